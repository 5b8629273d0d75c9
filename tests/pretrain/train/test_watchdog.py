"""When a step is a hang, on a clock turned by hand, and what is left behind."""

import time
from pathlib import Path

import pytest

from pretrain.train.watchdog import Watchdog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watchdog(tmp_path: Path, clock: Clock | None = None, **settings: float) -> Watchdog:
    options = {"factor": 10.0, "least_seconds": 5.0} | settings
    return Watchdog(tmp_path / "rank-0.log", on_hang=lambda step, waited: None, clock=clock or Clock(), **options)  # type: ignore[arg-type]


def test_the_limit_follows_the_median_step_and_has_a_floor(tmp_path: Path) -> None:
    clock = Clock()
    dog = watchdog(tmp_path, clock)
    for step, duration in enumerate([0, 60, 2, 2, 2, 2], start=1):  # the first step compiled
        clock.now += duration
        dog.beat(step)
    assert dog.allowed_seconds() == 20
    clock.now += 19
    assert dog.overdue() is None
    clock.now += 2
    assert dog.overdue() == pytest.approx(21)
    assert watchdog(tmp_path).allowed_seconds() is None


def test_short_steps_are_given_the_least_seconds(tmp_path: Path) -> None:
    clock = Clock()
    dog = watchdog(tmp_path, clock)
    for step in range(5):
        clock.now += 0.01
        dog.beat(step)
    assert dog.allowed_seconds() == 5.0


def test_saves_and_validation_are_not_steps(tmp_path: Path) -> None:
    clock = Clock()
    dog = watchdog(tmp_path, clock)
    for step in range(5):
        clock.now += 1
        dog.beat(step)
    with dog.paused():
        clock.now += 1000
        assert dog.overdue() is None
    assert dog.overdue() is None
    clock.now += 1
    dog.beat(6)
    assert dog.allowed_seconds() == 10


def test_a_hang_leaves_the_stacks_in_the_log_and_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pretrain.train.watchdog._GRACE", 0.0)
    left: list[int] = []
    hangs: list[int] = []
    dog = Watchdog(
        tmp_path / "rank-0.log",
        factor=1.0,
        least_seconds=0.1,
        on_hang=lambda step, waited: hangs.append(step),
        leave=lambda: left.append(1),
    )
    with dog.watching():
        for step in range(1, 6):
            dog.beat(step)
        deadline = time.monotonic() + 60
        while not left and time.monotonic() < deadline:
            time.sleep(0.01)
    text = (tmp_path / "rank-0.log").read_text()
    assert (left, hangs) == ([1], [5])
    assert "after step 5" in text
    assert "test_a_hang_leaves_the_stacks" in text
