"""The benchmarks of the training step run, at sizes that say nothing about speed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.config_tables import ModelConfig
from pretrain.metrics.flops import flops_per_token

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SIZES = {"vocab": 256, "d-model": 64, "heads": 4, "kv-heads": 2, "d-ff": 192, "layers": 1, "seq-len": 32, "batch": 2}


def run(script: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a benchmark printed, and its last line, which is JSON."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_step_is_measured_beside_transformers_from_the_same_loss() -> None:
    sizes = [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]
    few = ["--modes", "fp32/eager", "--sides", "ours", "transformers", "floor", "--rounds", "1", "--threads", "1"]
    printed, results = run("step.py", "speed", "ranks", *sizes, *few)
    sides = results["speed"]["fp32/eager"]
    assert list(sides) == ["ours", "transformers", "floor"]
    assert sides["ours"]["first_loss"] == pytest.approx(sides["transformers"]["first_loss"], rel=1e-5)
    assert sides["ours"]["parameters"] == sides["transformers"]["parameters"]
    assert all(side["tokens_per_second"] > 0 and side["peak_gib"] > 0 for side in sides.values())
    one, two = (row["first_loss"] for row in results["ranks"].values())
    assert one > 0
    assert two == pytest.approx(one / 2, rel=0.1), "each of two ranks reports its half of the sum"
    assert "| fp32/eager | floor |" in printed


@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_this_machine() -> None:
    printed, results = run("gpu.py", "--tiny", "--recompute", "selective", "--shapes", "llama3.2_1b")
    rows = [row for row in results["rows"] if row["side"] == "ours"]
    assert len(rows) == (4 if torch.cuda.is_available() else 2)
    tiny = {"n_layers": 2, "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "d_ff": 128}
    model = ModelConfig.model_validate({"preset": "llama3.2_1b", "vocab_size": 512} | tiny)
    for row in rows:
        flops = row["tokens_per_second"] * flops_per_token(model, 64, causal=True)
        assert row["tflops_causal"] == pytest.approx(flops / 1e12, rel=1e-6)
        assert row["tflops_causal"] < row["tflops_full"]
        assert (row["mfu_full"] is None) == (results["device"] == "cpu")
    assert "matrix products reach" in printed
