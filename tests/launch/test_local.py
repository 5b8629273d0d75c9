import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from launch import local, ranks, run_folder, torchrun
from launch.cli import main
from pretrain.cli import main as pretrain_main
from pretrain.errors import ConfigError
from tests.launch.tiny_run import write_config


def wait_for(condition, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.1)


def steps(run: Path) -> list[int]:
    return [record["step"] for record in run_folder.records(run / "metrics.jsonl")]


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def ranks_of(launch: "subprocess.Popen[str]") -> list[ranks.Process]:
    return [rank for child in ranks.children(launch.pid) for rank in ranks.torchrun_ranks(child)]


def test_a_layout_that_cannot_work_is_refused_before_anything_starts(tmp_path, data, capsys):
    config = write_config(tmp_path / "c.toml", tmp_path / "run", data, steps=4)
    assert main(["local", str(config), "--nproc", "3"]) == 2
    message = capsys.readouterr().err
    assert "train.global_batch_size=8 is no multiple of 6" in message
    assert not (tmp_path / "run").exists()
    assert main(["local", str(config), "--nproc", "2", "train.stepz=4"]) == 2
    assert "train.stepz=4: unknown key; did you mean train.steps?" in capsys.readouterr().err


def test_words_that_are_no_overrides_are_refused(tmp_path, data, capsys):
    config = write_config(tmp_path / "c.toml", tmp_path / "run", data, steps=4)
    with pytest.raises(SystemExit) as exit:
        main(["local", str(config), "--nproc", "2", "--nprocs=3"])
    assert exit.value.code == 2
    assert "--nprocs=3" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named():  # G39
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} cannot be used"):
            local.require_free_port(port)
    local.require_free_port(port)


def test_what_refuses_the_ranks_refuses_the_launch_though_torchrun_hides_their_status(
    tmp_path, data, capsys, monkeypatch
):
    """The rank is `pretrain` itself, which finds no config; torchrun's part is played by a function that returns 1."""

    def supervise(line, environment, find_ranks, say):
        monkeypatch.setenv(run_folder.REFUSAL, environment[run_folder.REFUSAL])
        assert pretrain_main(["train", str(tmp_path / "gone.toml")]) == 2
        return 1

    monkeypatch.setattr(ranks, "supervise", supervise)
    config = write_config(tmp_path / "c.toml", tmp_path / "run", data, steps=4)
    assert main(["local", str(config), "--nproc", "2"]) == 2
    assert capsys.readouterr().err.count("gone.toml: no such config file") == 2


def test_threads_follow_the_allowed_cores_and_not_the_machines():  # G45
    assert torchrun.threads({}, ranks=2, cores=8)[0] == 4
    assert torchrun.threads({}, ranks=8, cores=2)[0] == 1
    count, why = torchrun.threads({"OMP_NUM_THREADS": "3"}, ranks=2, cores=8)
    assert count == 3
    assert "as the environment says" in why
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert torchrun.allowed_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_the_first_of_several_failures_is_shown(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-0.log").write_text("2026-01-01 10:00:00,000 ERROR pretrain: rank 0 failed\nold\n")
    before = run_folder.log_sizes(tmp_path)
    with open(logs / "rank-0.log", "a") as f:
        f.write("2026-01-01 12:00:00,900 ERROR pretrain: rank 0 failed\nTraceback\nConnection closed by peer\n")
    (logs / "rank-1.log").write_text(
        "2026-01-01 12:00:00,100 WARNING x: y\n2026-01-01 12:00:00,200 ERROR pretrain: rank 1 failed\n"
        "Traceback\nValueError: the cause\n2026-01-01 12:00:01,000 WARNING x: y\n"
    )
    failure = run_folder.first_failure(tmp_path, before)
    assert failure == ("2026-01-01 12:00:00,200", 1, "Traceback\nValueError: the cause")
    assert run_folder.first_failure(tmp_path, run_folder.log_sizes(tmp_path)) is None


def test_an_outcome_of_an_earlier_attempt_does_not_count(tmp_path):
    outcome = tmp_path / "outcome.json"
    assert run_folder.outcome_since(tmp_path, run_folder.stamp(tmp_path)) is None
    outcome.write_text('{"status": 0, "reason": "finished"}')
    before = run_folder.stamp(tmp_path)
    assert run_folder.outcome_since(tmp_path, before) is None
    outcome.unlink()
    outcome.write_text('{"status": 75, "reason": "user"}')
    assert run_folder.outcome_since(tmp_path, before) == {"status": 75, "reason": "user"}


def test_a_warning_to_the_launcher_alone_saves_one_step_and_the_next_start_goes_on(tmp_path, data, launcher):
    """G44: USR1 comes twice: while the ranks still import, when it must not kill them, and in mid training."""
    run = tmp_path / "run"
    config = write_config(tmp_path / "c.toml", run, data, steps=100_000)
    first = launcher("local", config, "--nproc", "2")
    wait_for(lambda: len(ranks_of(first)) == 2)
    assert not any(ranks.listens(rank) for rank in ranks_of(first))
    first.send_signal(signal.SIGUSR1)
    status, output = finish(first)
    assert (status, run_folder.read_outcome(run)["reason"]) == (75, "time_limit"), output

    second = launcher("local", config, "--nproc", "2")
    wait_for(lambda: len(steps(run)) >= 3)
    second.send_signal(signal.SIGUSR1)
    status, output = finish(second)
    outcome = run_folder.read_outcome(run)
    assert (status, outcome["reason"]) == (75, "time_limit"), output
    assert [p.name for p in (run / "checkpoints").iterdir()] == [f"step-{outcome['step']:08d}"]

    third = launcher("local", config, "--nproc", "2", f"train.steps={outcome['step'] + 2}", "--max-restarts", "1")
    status, output = finish(third)
    # another train.steps is another schedule, which resume refuses unless told: a decided end, which nothing repeats
    assert status == 2, output
    assert "train.steps" in output
    allowed = ["--allow-change", "train.steps"]
    fourth = launcher("local", config, "--nproc", "2", *allowed, f"train.steps={outcome['step'] + 2}")
    status, output = finish(fourth)
    assert status == 0, output


def test_a_signal_to_one_rank_and_a_crash_of_another_end_on_the_same_step_for_all(tmp_path, data, launcher):  # G44
    run = tmp_path / "run"
    config = write_config(tmp_path / "c.toml", run, data, steps=100_000, checkpoint={"every": 2})
    launch = launcher("local", config, "--nproc", "2", "--max-restarts", "1")
    wait_for(lambda: len(steps(run)) >= 4)
    os.kill(ranks_of(launch)[1].pid, signal.SIGKILL)
    wait_for(lambda: sum(e["event"] == "start" for e in run_folder.records(run / "events.jsonl")) == 2)
    wait_for(lambda: run_folder.records(run / "metrics.jsonl")[-1]["attempt"] == 1)
    os.kill(ranks_of(launch)[1].pid, signal.SIGTERM)
    status, output = finish(launch)
    outcome = run_folder.read_outcome(run)
    assert (status, outcome["reason"], outcome["attempt"]) == (75, "preempted", 1), output
    assert (run / "checkpoints" / f"step-{outcome['step']:08d}" / "COMPLETE").exists()


def test_two_starts_at_once_do_not_meet(tmp_path, data, launcher):  # G39
    launches = []
    for name in ("one", "two"):
        config = write_config(tmp_path / f"{name}.toml", tmp_path / name, data, steps=3)
        launches.append(launcher("local", config, "--nproc", "2"))
    for launch, name in zip(launches, ("one", "two"), strict=True):
        status, output = finish(launch)
        assert status == 0, output
        assert json.loads((tmp_path / name / "environment.json").read_text())["world_size"] == 2
        assert steps(tmp_path / name) == [1, 2, 3]
