"""Spikes and numbers that are none: found, skipped or rolled back alike on every engine, and after a resume."""

import math
import random
import statistics
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ranks import run_ranks
from small import make_dataset

from pretrain.config import AnomaliesConfig
from pretrain.config_file import load_config
from pretrain.metrics.jsonl import read_records
from pretrain.train import checkpoint_folder as folder
from pretrain.train.anomalies import Anomalies, robust_z
from pretrain.train.run_folder import read_outcome
from tests.pretrain.train.attempts import ENGINES, Job, attempt, final_state, lines, scaled_loss, state_of

SPIKES = {"anomalies__spike_z": 100.0, "anomalies__window": 4, "eval__every": 0}
SKIP = SPIKES | {"anomalies__policy": "skip"}
ROLLBACK = SPIKES | {"anomalies__policy": "rollback", "checkpoint__every": 4}
EVERY_STEP = {"checkpoint__every": 1, "checkpoint__keep": 20}
POISON = {60: 1e4, 84: math.nan}  # first stream row of a step -> what its losses are multiplied with
LEFT_OUT = [[60, 71], [84, 95]]
BACK = ("fsdp", "zero1", "zero3")  # stage 2 loads as stage 1 does


def run_poisoned(root: str, jobs: list[Job], poison: dict[int, float]) -> list[list[str]]:
    from pretrain.dist import world
    from pretrain.train.trainer import Trainer

    plain = Trainer.update

    def update(self: Any, step: Any, lr: float) -> Any:
        row = int(self.loader.order.stream_rows(torch.tensor([self.rows_consumed]).numpy())[0])
        with scaled_loss(self.engine, poison.get(row, 1.0)):
            return plain(self, step, lr)

    Trainer.update = update  # type: ignore[method-assign]
    with world(120) as ranks:
        return [[attempt(ranks, root, changes, stop) for stop in [*stops, None]] for changes, stops in jobs]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every engine, skipping and rolling back, unbroken and broken between the spikes, in one start of two ranks."""
    root = tmp_path_factory.mktemp("anomalies")
    make_dataset(root / "data")
    jobs: list[tuple[Job, str]] = []  # and how the last attempt ends
    for name, engine in ENGINES.items():
        skip, rollback = engine | SKIP, engine | ROLLBACK
        jobs += [
            ((skip | EVERY_STEP | {"name": f"{name}-skip"}, []), "finished"),
            ((skip | {"name": f"{name}-skip-broken"}, [5, 7]), "finished"),
        ]
        if name not in BACK:
            continue
        jobs += [
            ((rollback | {"name": f"{name}-rollback"}, []), "finished"),
            ((rollback | {"name": f"{name}-rollback-broken"}, [5, 7]), "finished"),
            ((rollback | {"name": f"{name}-without", "data__skip": LEFT_OUT}, []), "finished"),
        ]
    poor = {"anomalies__budget": 1}
    jobs += [
        ((ROLLBACK | {"name": "late", "metrics__every": 7}, []), "finished"),
        ((ROLLBACK | {"name": "poor"} | poor, []), "anomaly"),
        ((ROLLBACK | {"name": "poor"} | poor, []), "anomaly"),
        ((ROLLBACK | {"name": "poor", "anomalies__budget": 2}, []), "finished"),
        ((SKIP | {"name": "poor-skip"} | poor, []), "anomaly"),
        ((SPIKES | {"name": "raise", "checkpoint__every": 2}, []), "anomaly"),
    ]
    found = run_ranks(run_poisoned, 2, str(root), [job for job, _ in jobs], POISON, timeout=600)[0]
    for ends, ((changes, stops), last) in zip(found, jobs, strict=True):
        assert ends == ["user"] * len(stops) + [last], changes
    return root


def of_kind(run: Path, kind: str) -> list[tuple[int, list[int]]]:
    return [(e["step"], e["rows"]) for e in read_records(run / "events.jsonl") if e["event"] == kind]


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_skipped_step_leaves_weights_and_moments_and_takes_its_rows(root: Path, engine: str) -> None:
    run = root / f"{engine}-skip"
    assert of_kind(run, "skip") == [(6, [60, 71]), (8, [84, 95])]
    for step in (6, 8):
        before, after = (state_of(folder.step_dir(run, number)) for number in (step - 1, step))
        assert_equal(before, after)
    assert float(final_state(run)["optim.step"]) == 8
    assert folder.read_meta(folder.newest_whole(run))["rows_consumed"] == 120
    for step, (loss, norm) in lines(run, "loss", "grad_norm").items():
        expected = lines(root / "fsdp-skip", "loss", "grad_norm")[step]
        assert (loss is None) == (step in (6, 8)), "a skipped step has trained on nothing"
        assert loss is None or loss == pytest.approx(expected[0], rel=1e-5)
        assert (norm is None) == (step == 8)
        assert norm is None or norm == pytest.approx(expected[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "engine"), [("skip", engine) for engine in ENGINES] + [("rollback", e) for e in BACK]
)
def test_a_run_stopped_between_two_spikes_equals_the_unbroken_one(root: Path, policy: str, engine: str) -> None:
    unbroken, broken = root / f"{engine}-{policy}", root / f"{engine}-{policy}-broken"
    assert_equal(final_state(unbroken), final_state(broken))
    states = [folder.read_meta(folder.newest_whole(run))["anomalies"] for run in (unbroken, broken)]
    assert states[0] == states[1]
    assert states[0]["spent"] == 2
    assert of_kind(unbroken, policy) == of_kind(broken, policy)


@pytest.mark.slow
@pytest.mark.parametrize("engine", BACK)
def test_a_run_rolled_back_equals_one_that_never_had_the_rows(root: Path, engine: str) -> None:
    run, without = root / f"{engine}-rollback", root / f"{engine}-without"
    assert of_kind(run, "rollback") == [(6, [60, 71]), (7, [84, 95])]
    assert not of_kind(without, "rollback")
    assert_equal(final_state(run), final_state(without))
    keys = ("loss", "grad_norm", "lr", "tokens", "targets", "epoch")
    assert lines(run, *keys) == lines(without, *keys)
    metas = [folder.read_meta(folder.newest_whole(folder_of)) for folder_of in (run, without)]
    assert metas[0]["anomalies"]["left_out"] == LEFT_OUT
    assert load_config(run / "config.toml").data.skip == LEFT_OUT, "inspect tells by it what a step has seen"
    assert metas[0]["data_fingerprint"] == metas[1]["data_fingerprint"]


@pytest.mark.slow
def test_it_does_not_matter_when_a_spike_is_found(root: Path) -> None:
    """Looked for at step 7 or at the save of step 8, not at 6."""
    assert_equal(final_state(root / "late"), final_state(root / "fsdp-rollback"))


@pytest.mark.slow
def test_a_budget_outlives_starts_and_its_end_says_what_to_do(root: Path) -> None:
    run = root / "poor"
    assert of_kind(run, "rollback") == [(6, [60, 71]), (7, [84, 95])]
    assert of_kind(run, "anomaly") == [(7, [84, 95])] * 2
    assert_equal(final_state(run), final_state(root / "fsdp-rollback"))


@pytest.mark.slow
def test_raising_is_the_default_and_names_the_rows(root: Path) -> None:
    outcome = read_outcome(root / "raise")
    assert outcome is not None
    assert outcome["status"] == 70
    assert "deviations above" in outcome["message"]
    assert "newest checkpoint is of step 4" in outcome["message"]
    assert "data.skip=[[60, 71]]" in outcome["message"]
    outcome = read_outcome(root / "poor-skip")
    assert outcome is not None
    assert "step 8" in outcome["message"]
    assert "anomalies.budget=1 is used up" in outcome["message"]


def test_z_is_that_of_the_median_and_its_deviation() -> None:
    draw = random.Random(0)
    values = [draw.gauss(3.0, 0.5) for _ in range(20_001)]
    median, z = robust_z(5.0, deque(values))
    assert median == statistics.median(values)
    assert z == pytest.approx(4.0, rel=0.05), "for normal values the robust deviation is the plain one"
    assert robust_z(5.0, deque([*values, *[1e9] * 500]))[1] == pytest.approx(z, rel=0.1), "outliers hardly count"
    assert robust_z(2.002, deque([2.0] * 9))[1] == pytest.approx(1.0), "a thousandth is noise where nothing varies"


def test_a_window_is_full_before_it_judges_and_takes_no_anomaly_in() -> None:
    watch = Anomalies(AnomaliesConfig(policy="skip", spike_z=6.0, window=4))
    assert [watch.judge(loss, 1.0) for loss in (9.0, 1.0, 1.1, 1.2)] == [None] * 4
    before = watch.state()
    said = watch.judge(99.0, 1.0)
    assert said is not None
    assert "the loss 99" in said
    assert "anomalies.spike_z=6" in said
    assert watch.judge(1.0, math.inf) == "the gradient norm is inf"
    assert watch.judge(math.nan, 1.0) == "the loss is nan"
    assert watch.state() == before
    assert watch.judge(0.0, 0.0) is None, "falling is no spike"
    other = Anomalies(AnomaliesConfig(policy="skip", spike_z=6.0, window=4))
    other.load(watch.state())
    assert other.state() == watch.state()
