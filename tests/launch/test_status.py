import fcntl
import json
import os
import time
from pathlib import Path

import pytest

from launch import free, health, ledger, run_folder, slurm_commands, status, sweep, verdict
from launch.cli import main
from launch.cluster import load_cluster
from pretrain.errors import ConfigError
from tests.launch.tiny_run import write_config


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 200 steps at step 40, restarted once."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    write_config(run / "config.toml", run, tmp_path, steps=200)
    metrics = [
        {"step": step, "loss": 3.0, "tokens_per_second": 1000.0 + step, "step_seconds": 90.0, "mfu_causal": 0.41}
        for step in range(10, 50, 10)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics) + '{"step": 50, "lo')
    (run / "events.jsonl").write_text('{"event": "start", "attempt": 0}\n{"event": "start", "attempt": 1}\n')
    (run / "logs" / "slurm-5.out").write_text("".join(f"line {i}\n" for i in range(30)))
    monkeypatch.setattr(slurm_commands, "state", lambda job: "RUNNING")
    return run


def test_a_running_run_shows_step_rate_mfu_time_left_restarts_and_the_log(run):
    ledger.add(run, "submit", job="5", after=None)
    ledger.add(run, "end", job="5", reason="time_limit", step=20, decision="requeue")
    said = status.describe(run, lines=3)
    for part in (
        "state     running",
        "job       5 (RUNNING)",
        "step      40/200 (20.0%), loss 3.0000",
        "rate      1,025 tokens/s, MFU 41.0% (causal), 4.0 h to go",
        "starts    2 (1 restarts)",
        "job 5: time_limit at step 20, requeue",
    ):
        assert part in said
    assert said.endswith("line 27\nline 28\nline 29")


def test_a_run_that_fell_silent_is_not_called_running(run):
    os.utime(run / "metrics.jsonl", (0, time.time() - 3600))
    assert "silent for 3,6" not in status.describe(run)  # an hour is not long at 10 steps of 90 s a window
    os.utime(run / "metrics.jsonl", (0, time.time() - 36000))
    assert "silent for 36,0" in status.describe(run)


def test_an_ended_run_shows_its_outcome(run):
    outcome = {"status": 70, "reason": "anomaly", "step": 45, "message": "step 45: the gradient norm is nan"}
    (run / "outcome.json").write_text(json.dumps(outcome))
    assert "state     anomaly at step 45 (status 70): step 45: the gradient norm is nan" in status.describe(run)


def test_stop_leaves_the_file_that_the_run_honours(run, capsys, monkeypatch):
    ledger.add(run, "submit", job="5", after=None)
    assert main(["stop", str(run)]) == 0
    assert (run / "STOP").exists()
    assert "job 5 (RUNNING) saves after the step in hand" in capsys.readouterr().out
    monkeypatch.setattr(slurm_commands, "state", lambda job: "PENDING")
    monkeypatch.setattr(slurm_commands, "reason", lambda job: "BeginTime")
    assert main(["stop", str(run)]) == 0
    assert "job 5 (PENDING) has not started" in capsys.readouterr().out
    assert "state     waiting in SLURM's queue\njob       5 (PENDING: BeginTime)" in status.describe(run)
    (run / "outcome.json").write_text('{"status": 75, "reason": "time_limit", "step": 40}')
    assert "state     waiting to go on after time_limit at step 40 (status 75)" in status.describe(run)


def test_files_nested_without_end_are_damaged_like_any_other(run, tmp_path):
    deep = "[" * 100_000
    (run / "outcome.json").write_text(deep)
    assert run_folder.read_outcome(run) is None
    (run / "events.jsonl").write_text(f'{{"event": "start"}}\n{deep}\n{{"event": "start"}}\n')
    assert len(run_folder.records(run / "events.jsonl")) == 2
    (run / "config.toml").write_text(f"a = {deep}")
    free.require_free(run, "run", print)
    for read in (verdict.blame, health.bad_nodes):
        for name in ("task-0.json", "node-0.json"):
            (tmp_path / name).write_text(deep)
        assert read(tmp_path) == {}
    (tmp_path / "table.json").write_text(deep)
    with pytest.raises(ConfigError, match=r"table.json: cannot be read"):
        sweep.read_points(tmp_path, tmp_path)
    (tmp_path / "cluster.toml").write_text(f"a = {deep}")
    with pytest.raises(ConfigError, match=r"cluster.toml: cannot be read"):
        load_cluster(tmp_path / "cluster.toml")


def test_a_run_that_has_ended_has_nothing_to_stop_and_a_stale_stop_is_removed_by_the_next_start(run, capsys):
    (run / "outcome.json").write_text('{"status": 0, "reason": "finished", "step": 200}')
    assert main(["stop", str(run)]) == 2
    assert "nothing to stop: it ended, finished, at step 200" in capsys.readouterr().err
    assert not (run / "STOP").exists()
    (run / "STOP").touch()
    said: list[str] = []
    free.require_free(run, "run", said.append)
    assert not (run / "STOP").exists()
    assert "STOP, which no start of this run was left to honour" in said[0]


def test_a_run_that_a_process_works_on_is_neither_started_twice_nor_without_a_holder(run, capsys):
    assert free.holder(run) is None
    with open(run / "lock", "w") as lock:
        lock.write("process 7 on gpu3")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert free.holder(run) == "process 7 on gpu3"
        with pytest.raises(ConfigError, match="is in use by process 7 on gpu3; wait for its end"):
            free.require_free(run, "run", print)
        assert main(["stop", str(run)]) == 0
        assert "process 7 on gpu3 saves" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"holds the run named 'run', not run.name='other'"):
        free.require_free(run, "other", print)


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    for command in ("status", "stop"):
        assert main([command, str(tmp_path / "none")]) == 2
        assert "no run folder" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
