"""The bug cases that ask for an accelerator: document masking in the ragged kernel, clipping, sums and ZeRO in bf16.

The same probes that judge every engine on CPU, on as many of this machine's GPUs as two ranks need.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ranks import run_ranks

from pretrain.config import ModelConfig
from pretrain.model.init import init_weights
from pretrain.model.llama import Llama
from pretrain.train import checkpoint_folder as folder
from pretrain.train.checkpoint import load_model_weights
from tests.pretrain.parallel import probes
from tests.pretrain.train.test_faults import job, wait_all, wait_for_step, write_config
from tests.pretrain.train.test_wrapped_checkpoints import stored_state, zero_masters
from tests.small import make_dataset

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SIZE = min(2, torch.cuda.device_count())
MICRO_BATCHES = [1.0] + [2.0**-9] * 511


def measure(root: str) -> dict[str, Any]:
    from pretrain.dist import world

    with world(240) as ranks:
        found: dict[str, Any] = {"clipped": {}, "sums": {}, "norms": {}, "masters": {}}
        for name, engine in probes.ENGINES.items():
            found["norms"][name] = probes.norm_and_step(ranks, **engine)
            found["clipped"][name] = probes.clip_of_a_blown_up_loss(ranks, **engine, **probes.BF16)
            found["sums"][name] = probes.accumulate(ranks, MICRO_BATCHES, **engine)
        for stage in (1, 2, 3):
            live = zero_masters(ranks, Path(root, f"zero{stage}"), stage)
            found["masters"][stage] = {name: tensor.cpu() for name, tensor in live.items()}
        return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def found(root: Path) -> list[dict[str, Any]]:
    return run_ranks(measure, SIZE, str(root), timeout=600, DS_ACCELERATOR="cuda")


def test_a_document_sees_nothing_of_its_neighbour_in_the_ragged_kernel() -> None:
    """G12 in bf16 on the kernel that training uses."""
    sizes = {"vocab_size": 97, "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 96}
    cfg = ModelConfig.model_validate(sizes | {"max_seq_len": 64})
    ragged, plain = (Llama(cfg, kernel=kernel, activations=torch.bfloat16) for kernel in ("varlen", "sdpa"))
    for model in (ragged, plain):
        init_weights(model, 3, cfg.n_layers)
        model.to("cuda", torch.bfloat16).eval()
    first, second = 19, 30
    tokens = torch.randint(97, (1, first + second), generator=torch.Generator().manual_seed(0)).cuda()
    positions = torch.cat([torch.arange(first), torch.arange(second)]).unsqueeze(0).cuda()
    ends = torch.tensor([0, first, first + second], dtype=torch.int32, device="cuda")
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 97
    with torch.no_grad():
        before = ragged(tokens, positions=positions, cu_seqlens=ends)
        after = ragged(changed, positions=positions, cu_seqlens=ends)
        alone = ragged(tokens[:, first:], positions=positions[:, first:], cu_seqlens=ends[1:] - first)
        documents = torch.tensor([[0] * first + [1] * second], device="cuda")
        masked = plain(tokens, positions=positions, documents=documents)
        seen = plain(tokens, positions=positions), plain(changed, positions=positions)
    assert torch.equal(before[:, first:], after[:, first:])
    assert not torch.equal(before[:, 7], after[:, 7])
    assert not torch.equal(seen[0][:, first:], seen[1][:, first:])
    torch.testing.assert_close(before[:, first:], alone, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(before, masked, atol=5e-2, rtol=5e-2)


def test_512_micro_batches_in_bf16_lose_no_small_gradient(found: list[dict[str, Any]]) -> None:
    """G23."""
    for rank in found:
        for engine, (sums, dtypes) in rank["sums"].items():
            assert dtypes == {"torch.bfloat16"}, engine
            assert sums == pytest.approx([1 + 511 * 2.0**-9] * 2, abs=1e-6), engine


def test_clipping_bounds_the_update_in_bf16_and_the_norm_is_the_one_before_it(found: list[dict[str, Any]]) -> None:
    """G24, and G19: the fp32 norm is the same for every engine."""
    for rank in found:
        reference = rank["norms"]["fsdp"][0]
        for engine in probes.ENGINES:
            assert rank["norms"][engine][0] == pytest.approx(reference, rel=1e-5), engine
            norm, length = rank["clipped"][engine]
            assert norm == pytest.approx(1000 * reference, rel=0.02), engine
            assert 0.999 < length <= 1.0 + 1e-5, engine


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_consolidated_zero_checkpoint_is_the_live_masters(
    root: Path, found: list[dict[str, Any]], stage: int
) -> None:
    """G32."""
    path = folder.step_dir(root / f"zero{stage}", 2)
    assert "output.weight" not in load_model_weights(path), "tied"
    for rank in found:
        for name, tensor in stored_state(path).items():
            assert torch.equal(tensor, rank["masters"][stage][name]), name


@pytest.mark.skipif(SIZE < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("fault", ["forward", "save"])
def test_a_rank_that_raises_takes_the_job_down_with_its_traceback(tmp_path: Path, fault: str) -> None:
    """G38 over NCCL, whose kernels wait on the device for the rank that is gone."""
    run = tmp_path / "run"
    config = write_config(tmp_path / "c.toml", run, make_dataset(tmp_path / "data"), checkpoint__every=3)
    with job(config, fault, DS_ACCELERATOR="cuda") as ranks:
        wait_for_step(run, 4, ranks)
        statuses = wait_all(ranks, 60)
    assert all(statuses), statuses
    log = (run / "logs" / "rank-1.log").read_text()
    assert f"planted fault in {fault} on rank 1" in log
    assert [(c.step, c.problem) for c in folder.list_checkpoints(run)] == [(3, None)]
