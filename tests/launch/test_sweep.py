import json
from pathlib import Path

import pytest

from launch import data_build, ledger, slurm, slurm_commands, sweep
from launch.cluster import load_cluster
from pretrain.errors import ConfigError
from tests.launch.tiny_run import ROOT, write_config

CPU = load_cluster(ROOT / "configs" / "cluster" / "cpu.toml")


def make_ladder(folder: Path, *names: str, after: dict[str, str] | None = None) -> Path:
    rows = []
    for name in names:
        write_config(folder / f"{name}.toml", folder / "runs" / name, folder, steps=10)
        row = {"name": name, "config": f"{name}.toml", "after": (after or {}).get(name, ""), "params": 2.5e4}
        rows.append(row | {"tokens": 1e5, "steps": 10, "gpu_hours": 1.5})
    (folder / "table.json").write_text(json.dumps({"points": rows}))
    return folder


def end(folder: Path, name: str, reason: str) -> None:
    run = folder / "runs" / name
    run.mkdir(parents=True, exist_ok=True)
    (run / "outcome.json").write_text(json.dumps({"status": 0, "reason": reason, "step": 10}))
    ledger.add(run, "submit", job="1_0", after=None, exclude=[])


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """sbatch calls, numbered 100 and up; SLURM knows no job but 1_7."""
    calls: list[list[str]] = []

    def submit(script, *, chdir, options=(), after=None):
        calls.append([str(script), *options])
        return str(99 + len(calls))

    monkeypatch.setattr(slurm_commands, "submit", submit)
    monkeypatch.setattr(slurm_commands, "state", lambda job: "RUNNING" if job == "1_7" else None)
    return calls


def run_sweep(folder: Path, *, dry_run: bool = False, at_once: int = 2) -> str:
    said: list[str] = []
    sweep.launch(folder, CPU, shape=slurm.Shape(1), at_once=at_once, chdir=folder, dry_run=dry_run, say=said.append)
    return "\n".join(said)


def test_a_dry_run_shows_the_table_with_gpu_hours_and_submits_nothing(tmp_path, commands):
    folder = make_ladder(tmp_path, "a", "b", "c")
    end(folder, "b", "finished")
    said = run_sweep(folder, dry_run=True)
    assert "2 of 3 runs to submit, 3 of 4.5 GPU hours" in said
    assert commands == []
    assert not (folder / "jobs").exists()


def test_only_what_is_neither_finished_nor_alive_is_submitted(tmp_path, commands):
    folder = make_ladder(tmp_path, "a", "b", "c", "d")
    end(folder, "a", "finished")
    end(folder, "b", "anomaly")
    ledger.add(folder / "runs" / "c", "submit", job="1_7", after=None, exclude=[])
    said = run_sweep(folder)
    assert "job 100: 2 runs, 2 at a time" in said
    points = (folder / "jobs" / "000" / "points.txt").read_text().split()
    assert points == [str(folder / "runs" / name / "jobs" / "000") for name in ("b", "d")]
    script = (folder / "jobs" / "000" / "train.sbatch").read_text()
    assert "#SBATCH --array=0,1%2" in script
    for point in map(Path, points):
        assert (point / "code" / "pretrain" / "cli.py").exists()
        assert (point / "train.sbatch").read_text() == script
        assert (point / "config.toml").exists()
    assert ledger.last_job(folder / "runs" / "d") == "100_1"


def test_a_sweep_that_is_done_submits_nothing(tmp_path, commands):
    folder = make_ladder(tmp_path, "a")
    end(folder, "a", "finished")
    assert "nothing is left to run" in run_sweep(folder)
    assert commands == []


def test_decays_wait_for_their_trunks(tmp_path, commands):
    folder = make_ladder(tmp_path, "trunk", "decay", after={"decay": "trunk"})
    run_sweep(folder)
    assert [call[1:] for call in commands] == [[], ["--dependency=afterok:100", "--kill-on-invalid-dep=yes"]]
    end(folder, "trunk", "finished")
    run_sweep(folder)
    assert commands[2][1:] == []  # the trunk is there: nothing to wait for


def test_a_decay_of_a_trunk_that_is_still_running_is_refused(tmp_path, commands):
    folder = make_ladder(tmp_path, "trunk", "decay", after={"decay": "trunk"})
    ledger.add(folder / "runs" / "trunk", "submit", job="1_7", after=None, exclude=[])
    with pytest.raises(ConfigError, match="decay starts from a checkpoint of trunk, which is still running"):
        run_sweep(folder)
    assert commands == []


def test_a_folder_that_no_ladder_made_is_refused(tmp_path, commands):
    with pytest.raises(ConfigError, match="pretrain scale ladder"):
        run_sweep(tmp_path)
    with pytest.raises(ConfigError, match="--at-once 0"):
        run_sweep(make_ladder(tmp_path, "a"), at_once=0)


def test_a_data_build_is_an_array_and_a_merge_that_waits_for_it(tmp_path, commands, monkeypatch):
    build = ["in put/*.jsonl", "--tokenizer", "t.json", "--out", "data/web", "--seq-len", "64"]
    said: list[str] = []
    assert data_build.launch(build, CPU, tasks=3, chdir=tmp_path, dry_run=False, say=said.append) == 0
    script = (tmp_path / "data/web.jobs/build.sbatch").read_text()
    assert "#SBATCH --array=0-2\n" in script
    assert "-m data_prep build 'in put/*.jsonl' --tokenizer t.json" in script
    assert '--num-tasks 3 --task "$SLURM_ARRAY_TASK_ID"' in script
    assert f"-m data_prep merge {tmp_path}/data/web" in (tmp_path / "data/web.jobs/merge.sbatch").read_text()
    assert commands[1][1:] == ["--dependency=afterok:100", "--kill-on-invalid-dep=yes"]
    monkeypatch.setattr(slurm_commands, "state", lambda job: "PENDING" if job == "101" else "COMPLETED")
    with pytest.raises(ConfigError, match=r"data/web is being built by job 101; wait for it, or scancel 101"):
        data_build.launch(build, CPU, tasks=3, chdir=tmp_path, dry_run=False, say=said.append)
    with pytest.raises(ConfigError, match="--out DIR is missing"):
        data_build.launch(build[:3], CPU, tasks=3, chdir=tmp_path, dry_run=True, say=said.append)
    with pytest.raises(ConfigError, match="--num-tasks is set by the launcher"):
        data_build.launch([*build, "--num-tasks=2"], CPU, tasks=3, chdir=tmp_path, dry_run=True, say=said.append)
