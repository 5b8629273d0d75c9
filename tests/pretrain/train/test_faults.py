"""Ranks that raise, hang or are killed: the job ends soon, says why, and comes back with the same weights.

PRETRAIN_KILLS=100 runs the kill test that often for each engine; the suite takes a sample.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ranks import ROOT, Rank, start_ranks
from small import make_dataset, small_config

from pretrain.config_file import dump_config
from pretrain.metrics.jsonl import read_records
from pretrain.train import checkpoint_folder as folder
from pretrain.train.run_folder import read_outcome
from tests.pretrain.train import faulty
from tests.pretrain.train.attempts import ENGINES, final_state

Started = list[Rank | subprocess.Popen[bytes]]
KILLS = int(os.environ.get("PRETRAIN_KILLS", "2"))


@contextmanager
def job(config: Path, fault: str = "none", size: int = 2, *, torchrun: bool = False, **env: str) -> Iterator[Started]:
    """Ranks of `pretrain train CONFIG`, or torchrun which starts them; those still there at the end are killed."""
    logs = [config.with_suffix(f".rank-{rank}.log") for rank in range(size)]
    started: Started = []
    if torchrun:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command = [sys.executable, *launcher, faulty.__file__, fault, "train", str(config)]
        own = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | env
        with open(logs[0], "ab") as log:
            started.append(subprocess.Popen(command, env=own, cwd=ROOT, stdout=log, stderr=log))
    else:
        started += start_ranks(faulty.main, size, (fault, "train", str(config)), logs, **env)
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


def wait_all(ranks: Started, seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    return [rank.wait(timeout=max(0.1, deadline - time.monotonic())) for rank in ranks]


def write_config(path: Path, run: Path, data: Path, **changes: Any) -> Path:
    path.write_text(dump_config(small_config(run, data, **changes)))
    return path


def last_words(config: Path) -> str:
    logs = sorted(config.parent.glob(f"{config.stem}.rank-*.log"))
    return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def steps_done(run: Path) -> int:
    try:
        return max((line["step"] for line in read_records(run / "metrics.jsonl")), default=0)
    except FileNotFoundError:
        return 0


def wait_for_step(run: Path, step: int, ranks: Started, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while steps_done(run) < step and any(rank.poll() is None for rank in ranks):
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("faults") / "data")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["forward", "loader", "save"])
def test_a_rank_that_raises_takes_the_job_down_with_its_traceback(tmp_path: Path, data: Path, fault: str) -> None:
    """G38: gone within 60 s, non-zero, the reason in the log, the last good checkpoint untouched."""
    run = tmp_path / "run"
    config = write_config(tmp_path / "c.toml", run, data, checkpoint__every=3, checkpoint__async=False)
    with job(config, fault) as ranks:
        wait_for_step(run, 4, ranks)
        statuses = wait_all(ranks, 60)
    assert all(statuses), statuses
    log = (run / "logs" / "rank-1.log").read_text()
    assert f"planted fault in {fault} on rank 1" in log
    assert "Traceback" in log
    assert [(c.step, c.problem) for c in folder.list_checkpoints(run)] == [(3, None)]
    assert read_outcome(run) is None, "a crash decides nothing"


@pytest.mark.slow
def test_ranks_that_wait_for_the_first_leave_when_it_fails(tmp_path: Path, data: Path) -> None:
    """G37: data is prepared by a command of its own; what rank 0 alone does at the start may fail, too."""
    run = tmp_path / "run"
    config = write_config(tmp_path / "c.toml", run, data, run__timeout_seconds=600.0)
    with job(config, "prepare") as ranks:
        statuses = wait_all(ranks, 180)  # far below the time-out of a collective
    assert all(statuses), statuses
    assert "planted fault in prepare on rank 0" in (run / "logs" / "rank-0.log").read_text()
    assert steps_done(run) == 0
    assert read_outcome(run) is None


@pytest.mark.slow
def test_a_rank_that_hangs_is_found_and_all_ranks_leave_their_stacks(tmp_path: Path, data: Path) -> None:
    run = tmp_path / "run"
    config = write_config(tmp_path / "c.toml", run, data, run__hang_factor=2.0, run__hang_seconds=8.0)
    with job(config, "hang") as ranks:
        wait_for_step(run, 4, ranks)
        statuses = wait_all(ranks, 120)
    assert all(statuses), statuses
    for rank in (0, 1):
        assert "stacks of all threads" in (run / "logs" / f"rank-{rank}.log").read_text()
    assert "faulty.py" in (run / "logs" / "rank-1.log").read_text()
    assert "hang" in {e["event"] for e in read_records(run / "events.jsonl")}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "reason"), [(signal.SIGTERM, "preempted"), (signal.SIGUSR1, "time_limit")])
def test_a_signal_to_one_rank_saves_the_same_step_on_all(
    tmp_path: Path, data: Path, number: signal.Signals, reason: str
) -> None:
    """G44."""
    run = tmp_path / "run"
    config = write_config(tmp_path / "c.toml", run, data, train__steps=2000)
    with job(config, "slow") as ranks:
        wait_for_step(run, 3, ranks)
        ranks[1].send_signal(number)
        assert wait_all(ranks, 60) == [75, 75]
    outcome = read_outcome(run)
    assert outcome is not None
    assert (outcome["reason"], outcome["status"]) == (reason, 75)
    assert [(c.step, c.problem) for c in folder.list_checkpoints(run)] == [(outcome["step"], None)]


@pytest.mark.slow
def test_a_second_signal_does_not_take_a_save_that_is_done_for_one_in_flight(tmp_path: Path, data: Path) -> None:
    run = tmp_path / "run"
    config = write_config(tmp_path / "c.toml", run, data, train__steps=2000, checkpoint__every=8)
    with job(config, "slow") as ranks:
        wait_for_step(run, 8, ranks)
        while not folder.list_checkpoints(run):
            time.sleep(0.02)
        wait_for_step(run, steps_done(run) + 2, ranks)
        for _ in range(2):
            ranks[1].send_signal(signal.SIGTERM)
            time.sleep(0.005)
        assert wait_all(ranks, 60) == [75, 75]
    outcome = read_outcome(run)
    assert outcome is not None
    assert folder.list_checkpoints(run)[-1].step == outcome["step"]


@pytest.mark.slow
def test_an_anomaly_sees_the_save_in_flight_through(tmp_path: Path, data: Path) -> None:
    run = tmp_path / "run"
    hot = {"optimizer__name": "sgd", "optimizer__lr": 1e30, "schedule__warmup_steps": 0}
    config = write_config(tmp_path / "c.toml", run, data, checkpoint__every=1, metrics__every=1, **hot)
    with job(config, "slow-save") as ranks:
        assert wait_all(ranks, 60) == [70, 70]
    outcome = read_outcome(run)
    assert outcome is not None
    [(step, _, problem)] = folder.list_checkpoints(run)
    assert problem is None
    assert f"the newest checkpoint is of step {step};" in outcome["message"]


@pytest.mark.slow
def test_a_second_start_of_a_living_run_is_refused(tmp_path: Path, data: Path) -> None:
    run = tmp_path / "run"
    config = write_config(tmp_path / "c.toml", run, data, train__steps=2000)
    with job(config, "slow", size=1) as first:
        wait_for_step(run, 1, first)
        with job(config, size=1) as second:
            assert wait_all(second, 120) == [2]
        assert "is in use by process" in config.with_suffix(".rank-0.log").read_text()
        (run / "STOP").touch()
        assert wait_all(first, 60) == [75]


@pytest.mark.slow
@pytest.mark.timeout(600 + 60 * KILLS)
@pytest.mark.parametrize("engine", ENGINES)
def test_runs_killed_at_random_moments_end_with_the_undisturbed_weights(
    tmp_path: Path, data: Path, engine: str
) -> None:
    """SIGKILL to one rank, to all or to torchrun, SIGTERM to one or to torchrun, with saves under way, half of them in
    the background."""
    seed = int(os.environ.get("PRETRAIN_KILL_SEED", "1"))
    draw = random.Random(f"{seed}{engine}")
    steps = {"train__steps": 24, "checkpoint__every": 2, "checkpoint__keep": 2} | ENGINES[engine]
    calm = tmp_path / "calm"
    with job(write_config(tmp_path / "calm.toml", calm, data, **steps)) as ranks:
        assert wait_all(ranks, 900) == [0, 0]
    expected = final_state(calm)
    for trial in range(KILLS):
        run = tmp_path / f"run-{trial}"
        background = {"checkpoint__async": (trial + list(ENGINES).index(engine)) % 2 == 0}
        config = write_config(tmp_path / f"{trial}.toml", run, data, **steps, **background)
        what = draw.choice(["kill one", "kill all", "term one", "kill torchrun", "term torchrun"])
        torchrun = "torchrun" in what
        with job(config, "slow", torchrun=torchrun) as started:
            wait_for_step(run, draw.randrange(1, 20), started)
            ranks_of_it = [int(p) for p in children(started[0].pid)] if torchrun else []
            time.sleep(draw.random() * 0.1)
            for victim in started if what == "kill all" or torchrun else [draw.choice(started)]:
                victim.send_signal(signal.SIGTERM if "term" in what else signal.SIGKILL)
            wait_all(started, 60)
            wait_until_gone(ranks_of_it)  # ranks that torchrun's death has orphaned train on
        with job(config) as ranks:
            assert wait_all(ranks, 900) == [0, 0], f"{seed} {trial} {what}\n{last_words(config)}"
        got = final_state(run)
        for name, tensor in expected.items():
            assert torch.equal(tensor, got[name]), (seed, trial, what, name)
        shutil.rmtree(run)
        print(f"{engine} {trial}: {what}", flush=True)


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def wait_until_gone(pids: list[int], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"{pids} are still there"
        time.sleep(0.1)
