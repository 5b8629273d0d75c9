"""On a CUDA device: offload to pinned host memory and prefetch change no number; the benchmark of MFU runs."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ranks import run_ranks

from tests.benchmarks.test_tiny import run
from tests.pretrain.parallel import probes
from tests.pretrain.parallel.test_options import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SIZE = min(2, torch.cuda.device_count())
PINNED = {"device": "cpu", "pin_memory": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "fsdp offloaded": {"parallel__cpu_offload": True},
    "fsdp prefetching": {"parallel__prefetch": 2},
    "zero2": probes.ENGINES["zero2"],
    "zero2 offloaded": probes.ENGINES["zero2"] | {"deepspeed__zero_optimization": {"offload_optimizer": PINNED}},
    "zero3": probes.ENGINES["zero3"],
    "zero3 offloaded": probes.ENGINES["zero3"]
    | {"deepspeed__zero_optimization": {"offload_optimizer": PINNED, "offload_param": PINNED}},
}


def measure() -> dict[str, Any]:
    from pretrain.dist import world

    with world(240) as ranks:
        return {name: train(ranks, **changes) for name, changes in OPTIONS.items()}


def test_offload_and_prefetch_change_no_number() -> None:
    for found in run_ranks(measure, SIZE, timeout=600, DS_ACCELERATOR="cuda"):
        for name, (curve, weights) in found.items():
            expected, tensors = found[name.split()[0]]
            assert curve == pytest.approx(expected, rel=1e-5), name
            for key, tensor in tensors.items():
                assert float((weights[key] - tensor).norm() / tensor.norm()) < 1e-5, (name, key)


def test_the_benchmark_runs_both_kernels_and_states_an_mfu() -> None:
    _, results = run("gpu.py", "--tiny", "--recompute", "selective", "none")
    rows = [row for row in results["rows"] if row["side"] == "ours"]
    assert {row["kernel"] for row in rows} == {"sdpa", "varlen"}
    assert len(rows) == 8
    assert all(row["peak_gib"] > 0 for row in rows)
