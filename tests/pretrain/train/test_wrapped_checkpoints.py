"""Checkpoints of wrapped models: compiled, recomputing, sharded by either engine, on one rank and on two.

Two starts of ranks for all checks.
"""

import sys
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ranks import run_ranks

from pretrain.errors import CheckpointError
from pretrain.train import checkpoint_folder as folder
from pretrain.train.checkpoint import load_model_weights
from pretrain.train.convert import export_model
from pretrain.train.stored_model import open_model
from tests.pretrain.parallel import probes

pytestmark = pytest.mark.slow
TIED = {"model__tie_embeddings": True}
WRAPPED = {
    f"compile {compiled}, recompute {mode}": {"compile__enabled": compiled, "activation_checkpoint__mode": mode} | TIED
    for compiled in (False, True)
    for mode in ("none", "full")
}


def save(ranks: Any, run: Path, step: int, engine: Any, cfg: Any) -> Path:
    from pretrain.train.checkpoint import Checkpointer

    folder.checkpoints_dir(run).mkdir(parents=True, exist_ok=True)
    checkpointer = Checkpointer(run, ranks, keep=3, keep_every=0, event=lambda *args, **details: None)
    counts = {"step": step, "rows_consumed": step * probes.ROWS, "tokens": 0, "targets": 0}
    meta = counts | {"config": cfg.model_dump(by_alias=True, mode="json")}
    checkpointer.save(step, engine.state(), meta, background=False)
    return folder.step_dir(run, step)


def load(ranks: Any, path: Path, cfg: Any) -> Any:
    from pretrain.train.checkpoint import read_state

    torch._dynamo.reset()
    engine = probes.engine_of(ranks, cfg)
    state = engine.state()
    read_state(path, state)
    engine.load(state)
    return engine


def on_one_rank(root: str) -> dict[str, Any]:
    from pretrain.dist import world

    # Names do not depend on what compiles the graph; without inductor it takes a tenth of the time.
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    with world(120) as ranks:
        return {"pairs": wrapped_pairs(ranks, Path(root)), "alone": run_of_one(ranks, Path(root, "alone"))}


def wrapped_pairs(ranks: Any, root: Path) -> dict[str, Any]:
    """Each kind of wrapping saved, then read by each; each read once more after a step and a save of its reader."""
    configs = {name: probes.config(ranks, **changes) for name, changes in WRAPPED.items()}
    written, once, twice = {}, {}, {}
    for writer, cfg in configs.items():
        engine = probes.engine_of(ranks, cfg)
        probes.update(ranks, engine, 0.01)
        path = save(ranks, root / writer, 1, engine, cfg)
        written[writer] = (probes.loss_of(ranks, engine), path)
    names = list(configs)
    for number, writer in enumerate(names):
        for reader, cfg in configs.items():
            engine = load(ranks, written[writer][1], cfg)
            once[writer, reader] = probes.loss_of(ranks, engine)
            if reader == names[(number + 1) % 4]:
                probes.update(ranks, engine, 0.01, seed=1)
                path = save(ranks, root / reader, 2, engine, cfg)
                before = probes.loss_of(ranks, engine)
                twice[reader] = (before, probes.loss_of(ranks, load(ranks, path, configs[writer])))
    return {"written": {name: loss for name, (loss, _) in written.items()}, "once": once, "twice": twice}


def run_of_one(ranks: Any, run: Path) -> dict[str, Any]:
    """Two updates, a save, and three more updates."""
    cfg = probes.config(ranks)
    engine = probes.engine_of(ranks, cfg)
    for step in range(2):
        probes.update(ranks, engine, 0.01, seed=step)
    save(ranks, run, 2, engine, cfg)
    state = probes.whole(engine.state())
    return {"state": state, "losses": three_more(ranks, engine)}


def three_more(ranks: Any, engine: Any) -> list[float]:
    losses = []
    for step in range(2, 5):
        losses.append(probes.loss_of(ranks, engine, seed=step))
        probes.update(ranks, engine, 0.01, seed=step)
    return losses


def on_two_ranks(root: str) -> dict[str, Any]:
    from pretrain.dist import world

    with world(120) as ranks:
        found: dict[str, Any] = {"alone": {}, "masters": {}}
        for name in ("fsdp", "zero1", "zero3"):
            cfg = probes.config(ranks, **probes.ENGINES[name])
            engine = load(ranks, folder.step_dir(Path(root, "alone"), 2), cfg)
            state = probes.whole(engine.state())
            found["alone"][name] = {"state": state, "losses": three_more(ranks, engine)}
        for stage in (1, 2, 3):
            found["masters"][stage] = zero_masters(ranks, Path(root, f"zero{stage}"), stage)
        found["full disk"] = save_without_room(ranks, Path(root, "full"))
        return found


def zero_masters(ranks: Any, run: Path, stage: int) -> dict[str, torch.Tensor]:
    """The live fp32 masters and moments as DeepSpeed itself puts them together, beside a checkpoint of ours."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    cfg = probes.config(ranks, **(probes.ENGINES[f"zero{stage}"] | probes.BF16 | TIED))
    engine = probes.engine_of(ranks, cfg)
    for step in range(2):
        probes.update(ranks, engine, 0.01, seed=step)
    save(ranks, run, 2, engine, cfg)
    live = {}
    for name, param in engine.model.named_parameters():
        live[f"model.{name}"] = safe_get_full_fp32_param(param).detach().clone()
        for key in ("exp_avg", "exp_avg_sq"):
            live[f"optim.{key}.{name}"] = safe_get_full_optimizer_state(param, key).detach().clone()
    return live


def save_without_room(ranks: Any, run: Path) -> str:
    """What this rank is told when there is no room for the second checkpoint, which only rank 0 can see."""
    cfg = probes.config(ranks)
    engine = probes.engine_of(ranks, cfg)
    save(ranks, run, 1, engine, cfg)
    plain = folder.shutil.disk_usage
    if ranks.first:
        full = namedtuple("Usage", "total used free")(10**9, 10**9, 1000)
        folder.shutil.disk_usage = lambda path: full  # type: ignore[assignment]
    try:
        save(ranks, run, 2, engine, cfg)
        return "saved"
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    finally:
        folder.shutil.disk_usage = plain


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wrapped")


@pytest.fixture(scope="module")
def one(root: Path) -> dict[str, Any]:
    return run_ranks(on_one_rank, 1, str(root), timeout=600)[0]


@pytest.fixture(scope="module")
def two(root: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2, str(root), timeout=600)


def test_every_wrapping_reads_every_others_checkpoint_twice(one: dict[str, Any]) -> None:
    """G31: 16 pairs with no name too few or too many (reading refuses both) and with the same loss."""
    found = one["pairs"]
    reference = found["written"]["compile False, recompute none"]
    assert len(found["once"]) == 16
    for loss in [*found["written"].values(), *found["once"].values()]:
        assert loss == pytest.approx(reference, rel=1e-6)
    assert len(found["twice"]) == 4
    after = next(iter(found["twice"].values()))[0]
    assert after != pytest.approx(reference, rel=1e-6)
    for losses in found["twice"].values():
        assert losses == pytest.approx((after, after), rel=1e-6)


def test_an_export_after_two_resumes_has_plain_names_and_one_tied_head(root: Path, one: dict[str, Any]) -> None:
    """G31, G34."""
    import transformers
    from safetensors.torch import load_file

    stored = open_model(root / "compile True, recompute full")
    export_model(stored, root / "hf")
    names = load_file(root / "hf" / "model.safetensors").keys()
    assert "lm_head.weight" not in names
    assert not [name for name in names if not name.startswith("model.") or "_orig_mod" in name or "_checkpoint" in name]
    model, report = transformers.AutoModelForCausalLM.from_pretrained(root / "hf", output_loading_info=True)
    assert not any(report.values()), report
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ours = sum(tensor.numel() for tensor in load_model_weights(stored.path).values())
    assert sum(p.numel() for p in model.parameters()) == ours


def test_a_checkpoint_of_one_rank_goes_on_on_two(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    """G33: weights and moments exact, the next losses those of the unbroken run."""
    expected = one["alone"]
    assert any(name.startswith("optim.exp_avg_sq.") for name in expected["state"])
    for found in two:
        for engine, got in found["alone"].items():
            assert got["state"].keys() == expected["state"].keys(), engine
            for name, tensor in expected["state"].items():
                assert torch.equal(tensor, got["state"][name]), (engine, name)
            assert got["losses"] == pytest.approx(expected["losses"], rel=1e-5), engine


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_consolidated_zero_checkpoint_is_the_live_masters_and_never_a_part_of_them(
    root: Path, two: list[dict[str, Any]], stage: int
) -> None:
    """G32: decay and no-decay groups, a tied head once; one rank's file missing is an error."""
    path = folder.step_dir(root / f"zero{stage}", 2)
    weights = load_model_weights(path)
    assert "output.weight" not in weights
    for found in two:
        live = found["masters"][stage]
        assert {f"model.{name}" for name in weights} == {name for name in live if name.startswith("model.")}
        for name, tensor in stored_state(path).items():
            assert torch.equal(tensor, live[name]), name
        assert any((tensor != tensor.bfloat16().float()).any() for tensor in weights.values()), "fp32, not bf16"
    (path / "rank-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is missing"):
        open_model(path)
    said: list[str] = []
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        folder.newest_whole(root / f"zero{stage}", said.append)
    assert "rank-00001.safetensors is missing" in said[0]


def stored_state(path: Path) -> dict[str, torch.Tensor]:
    """All weights and moments of a checkpoint."""
    from pretrain.train.checkpoint import read_whole

    state = read_whole(path)
    del state["optim.step"]
    return state


def test_a_save_without_room_is_refused_on_every_rank_and_the_last_checkpoint_stays(
    root: Path, two: list[dict[str, Any]]
) -> None:
    """G30."""
    first, second = (found["full disk"] for found in two)
    assert str(folder.checkpoints_dir(root / "full")) in first
    assert "bytes and 1,000 are free" in first
    assert second.startswith("CheckpointError: rank 0 on ")
    assert "bytes and 1,000 are free" in second
    assert [(c.step, c.problem) for c in folder.list_checkpoints(root / "full")] == [(1, None)]
    assert folder.newest_whole(root / "full") == folder.step_dir(root / "full", 1)
