"""Silent corruption is planted on one rank, and found: a flipped bit in a copy, a moment that is no number, a step that
is computed wrongly once."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ranks import run_ranks
from small import make_dataset

from pretrain.metrics.jsonl import read_records
from pretrain.train import checkpoint_folder as folder
from pretrain.train.integrity import digest
from pretrain.train.run_folder import read_outcome
from tests.pretrain.train.attempts import ENGINES, attempt, final_state, scaled_loss

CHECKED = {"anomalies__verify_every": 2, "anomalies__replay_every": 4, "run__deterministic": True}
SHORT = {"train__steps": 5, "checkpoint__every": 1, "eval__every": 0, "checkpoint__async": False}
LAYOUTS = ENGINES | {"hsdp": {"parallel__dp_replicate": 2}, "tp": {"parallel__tp": 2}}
COPIED = ("hsdp", "tp", "zero1", "zero2", "zero3")
OTHERS = ("fsdp", "zero2", "zero3")


def plant(self: Any, fault: str, rank: int) -> None:
    """After step 4, on one rank."""
    held = {one.name: one.local for one in self.engine.held()}
    if self.done + 1 != 4 or self.world.rank != rank:
        return
    if fault == "bit":
        held["model.norm.weight"].reshape(-1).view(torch.int32)[0] ^= 1
    elif fault == "moment":
        next(local for name, local in held.items() if "exp_avg_sq" in name and local.numel()).view(-1)[0] = math.inf


def run_faulty(root: str, jobs: list[tuple[str, dict[str, Any], str]]) -> list[str]:
    from pretrain.dist import world
    from pretrain.train.trainer import Trainer

    plain_update, plain_gradients = Trainer.update, Trainer.gradients
    fault = ""

    def update(self: Any, step: Any, lr: float) -> Any:
        out = plain_update(self, step, lr)
        plant(self, fault, 1)
        return out

    def gradients(self: Any, step: Any, **options: Any) -> Any:
        nonlocal fault
        if fault != "sum" or self.done + 1 != 4 or self.world.rank != 1:
            return plain_gradients(self, step, **options)
        fault = "none"  # wrong the first time only
        with scaled_loss(self.engine, 1.001):
            return plain_gradients(self, step, **options)

    Trainer.update, Trainer.gradients = update, gradients  # type: ignore[method-assign]
    ends = []
    with world(120) as ranks:
        for name, changes, kind in jobs:
            fault = kind
            ends.append(attempt(ranks, root, SHORT | changes | {"name": name}, None))
    return ends


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("integrity")
    make_dataset(root / "data")
    jobs = []
    for name, layout in LAYOUTS.items():
        jobs += [(f"{name}-sound", layout | CHECKED, "none"), (f"{name}-plain", layout, "none")]
        if name in OTHERS:
            jobs += [(f"{name}-{fault}", layout | CHECKED, fault) for fault in ("sum", "moment")]
        if name in COPIED:
            jobs.append((f"{name}-bit", layout | CHECKED, "bit"))
    ends = run_ranks(run_faulty, 2, str(root), jobs, timeout=600)[0]
    for (name, _, fault), end in zip(jobs, ends, strict=True):
        assert end == ("finished" if fault == "none" else "anomaly"), (name, end)
    return root


def message(run: Path) -> str:
    outcome = read_outcome(run)
    assert outcome is not None
    assert outcome["status"] == 70
    assert "pretrain doctor" in outcome["message"]
    assert [found.step for found in folder.list_checkpoints(run)] == [1, 2, 3], "what is corrupt is not saved"
    assert "anomaly" in {event["event"] for event in read_records(run / "events.jsonl")}
    return str(outcome["message"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checks_find_nothing_in_a_sound_run_and_change_nothing(root: Path, layout: str) -> None:
    plain, checked = final_state(root / f"{layout}-plain"), final_state(root / f"{layout}-sound")
    assert plain.keys() == checked.keys()
    for name, tensor in plain.items():
        assert torch.equal(tensor, checked[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", COPIED)
def test_a_bit_that_flips_in_one_copy_is_found(root: Path, layout: str) -> None:
    said = message(root / f"{layout}-bit")
    assert "at step 4 copies differ between ranks" in said
    assert "model.norm.weight has digest" in said
    assert "rank 1 (" in said


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHERS)
def test_a_moment_that_is_no_number_is_found_on_its_rank(root: Path, layout: str) -> None:
    said = message(root / f"{layout}-moment")
    assert "at step 4 weights or moments are no numbers; rank 1 (" in said
    assert "rank 0 (" not in said


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHERS)
def test_a_step_that_one_rank_computes_wrongly_once_is_found(root: Path, layout: str) -> None:
    said = message(root / f"{layout}-sum")
    assert "a step computed twice gave two results" in said
    assert "rank 1 (" in said


def test_a_digest_changes_with_any_bit_and_any_place() -> None:
    values = torch.randn(3000)
    plain = digest(values)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = values.to(dtype)
        assert digest(tensor) == digest(tensor.clone())
    for element in (0, 1, 2999):
        for bit in range(32):
            flipped = values.clone()
            flipped.view(torch.int32)[element] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
            assert digest(flipped) != plain
    assert digest(values.flip(0)) != plain
