"""`plan --trace`: the real engine on a fake world holds what closed forms say, on every rank alike."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pretrain.config_file import load_config
from pretrain.metrics.flops import parameter_counts
from pretrain.train.trace import GIB, trace

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@pytest.mark.slow
def test_a_512th_of_llama_70b_is_on_every_rank_and_recomputation_frees_activations() -> None:
    """Two of its layers, since all are alike; the whole takes minutes."""
    same = ['data.sources=[{path="x"}]', "model.n_layers=2"]
    cfg = load_config(CONFIGS / "llama3_70b.toml", same)
    assert cfg.activation_checkpoint.mode == "full"
    first, middle, last = (trace(cfg, 512, rank=rank, micro_batches=1) for rank in (0, 300, 511))
    assert first[3:-1] == pytest.approx(middle[3:-1], rel=1e-6)
    # 128,256 rows over 512 ranks are 251 for 510 of them: the last one has none of embedding and head.
    assert all(rest <= most for rest, most in zip(last[3:-1], first[3:-1], strict=True))
    share = 4 * parameter_counts(cfg.model).total / 512 / GIB
    assert first.parameters == pytest.approx(share, rel=0.02)
    assert first.optimizer == pytest.approx(2 * first.parameters, rel=0.02)
    assert first.gradients == pytest.approx(first.parameters, rel=0.02)
    kept = trace(load_config(CONFIGS / "llama3_70b.toml", [*same, "activation_checkpoint.mode=none"]), 512)
    assert kept.activations > 1.5 * first.activations
    assert kept.parameters == first.parameters
