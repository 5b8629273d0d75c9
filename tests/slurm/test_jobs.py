"""Real jobs on a real SLURM, two nodes of two gloo ranks each: they finish, and come back when they should, only then.

Most runs are frozen in mid training (one rank stopped, so that all wait) until the disturbance has come, and their
final weights must then equal, bit for bit, those of a run that nobody disturbed.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.tiny_run import ROOT, write_config
from tests.slurm import jobs
from tests.slurm.jobs import STEPS
from tests.slurm.lab import Lab, freeze, ranks_of, thaw

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture(scope="module")
def undisturbed(lab: Lab, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Final weights of the same run under either launcher; the two jobs run at the same time and do not meet.

    One has a health gate, to which one of its nodes seems too full at first: it goes on without that node.
    """
    folder = tmp_path_factory.mktemp("undisturbed")
    limits = {"enabled": "true", "min_free_disk_gib": "0.1", "message_mib": "1", "min_share_of_median": "0.0"}
    sick = folder / "python"
    sick.write_text(
        f'#!/bin/bash\n[[ $SLURMD_NODENAME = node2 && "$*" = *doctor* ]] && full="--min-free-disk 1e9"\n'
        f'exec {sys.executable} "$@" $full\n'
    )
    sick.chmod(0o755)
    one = jobs.submit(lab, folder, data, "one", cluster={"health": limits, "software": {"python": f'"{sick}"'}})
    two = jobs.submit(lab, folder, data, "two", launcher="srun")
    jobs.wait_for(lambda: one.newest() != one.id, "resubmission without node2", run=one.run)
    assert [(end["reason"], end["decision"], list(end["nodes"])) for end in one.ends()] == [
        ("unhealthy", "resubmit", ["node2"])
    ]
    assert "UNFIT node2: the run's folder has" in jobs.output(one.run)
    one = one._replace(id=one.newest())
    assert lab.field(one.id, "ExcNodeList") == "node2"
    for job in (one, two):
        assert job.wait_for_end() == "COMPLETED", jobs.output(job.run)
        assert job.outcome()["reason"] == "finished"
        environment = json.loads((job.run / "environment.json").read_text())
        assert environment["world_size"] == 4
        assert environment["slurm"]["SLURM_JOB_ID"] == job.id
        assert "OMP_NUM_THREADS=1" in jobs.output(job.run)
    assert jobs.weights(one.run, STEPS) == jobs.weights(two.run, STEPS)
    summary = json.loads((one.run / "jobs" / "starts" / f"{one.id}.0" / "health" / "summary.json").read_text())
    assert summary["facts"]["ranks"] == 4
    assert list(summary["problems"].values()) == [[], []]
    assert summary["facts"]["allreduce_gb_per_second"] > 0
    return jobs.weights(one.run, STEPS)


def hold(*started: jobs.Job) -> list[int]:
    """Freeze the last rank of each of these jobs as soon as it has done a few steps; their pids."""
    held: dict[str, int] = {}

    def all_held() -> bool:
        for job in started:
            if job.id not in held and job.steps() >= 3:
                where = ranks_of(job.id)
                held[job.id] = where[max(where)][-1]
                freeze(held[job.id])
                assert job.steps() < STEPS - 5, "too late to disturb"
        return len(held) == len(started)

    jobs.wait_for(all_held, "third step", run=started[0].run)
    return [held[job.id] for job in started]


def test_the_warning_before_the_time_limit_saves_requeues_resumes_and_finishes(lab, data, tmp_path, undisturbed):
    # G44
    started = [jobs.submit(lab, tmp_path, data, launcher, launcher=launcher) for launcher in ("torchrun", "srun")]
    held = hold(*started)
    for job in started:
        lab.call("scontrol", "update", f"JobId={job.id}", "TimeLimit=1")
    for job, pid in zip(started, held, strict=True):
        job.wait_for_text("USR1 heard: telling the ranks")
        lab.call("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")  # for the second start
        thaw(pid)
    for job in started:
        assert job.wait_for_end() == "COMPLETED", jobs.output(job.run)
        first, second = job.ends()
        assert (first["reason"], first["decision"]) == ("time_limit", "requeue")
        assert 3 <= first["step"] < STEPS
        assert (second["reason"], second["restart"], second["job"]) == ("finished", 1, job.id)
        assert jobs.weights(job.run, STEPS) == undisturbed
        assert job.events() == ["start", "save", "stop", "resume", "start", "save", "finish"]
        assert f"finished at step {STEPS} (status 0)" in jobs.launch(lab, "status", job.run)


def test_a_preempted_job_saves_in_its_grace_comes_back_and_finishes(lab, data, tmp_path, undisturbed):
    job = jobs.submit(lab, tmp_path, data, "preempted", cluster={"slurm": {"partition": '"low"'}})
    [pid] = hold(job)
    lab.call("sbatch", "-p", "high", "-N3", "-c4", "--ntasks-per-node=1", "-o", "/dev/null", "--wrap", "sleep 5")
    job.wait_for_text("TERM heard, telling the ranks")
    thaw(pid)
    assert job.wait_for_end() == "COMPLETED", jobs.output(job.run)
    assert [end["reason"] for end in job.ends()] == ["preempted", "finished"]
    assert jobs.weights(job.run, STEPS) == undisturbed


def test_a_lost_node_brings_the_job_back_on_what_is_left(lab, data, tmp_path, undisturbed):
    job = jobs.submit(lab, tmp_path, data, "lost", checkpoint={"every": 2, "async": False})
    hold(job)
    lost = sorted(ranks_of(job.id))[-1]
    lab.crash(lost)
    try:
        job.wait_for_text(r"start 1 \|")
        assert job.wait_for_end() == "COMPLETED", jobs.output(job.run)
        assert lost not in lab.field(job.id, "NodeList")
        assert job.ends()[-1]["reason"] == "finished"
        assert "resume" in job.events()
        assert jobs.weights(job.run, STEPS) == undisturbed
    finally:
        lab.boot(lost)
        jobs.wait_for(lambda: lost in lab.idle(), f"{lost} idle again")


def test_a_node_whose_rank_dies_is_left_out_of_the_next_job(lab, data, tmp_path, undisturbed):
    retry = {"retry": {"node_failures": "1"}}
    job = jobs.submit(lab, tmp_path, data, "crashed", cluster=retry, checkpoint={"every": 2, "async": False})
    [pid] = hold(job)
    bad = jobs.environment_of(pid)["SLURMD_NODENAME"]
    os.kill(pid, signal.SIGKILL)
    jobs.wait_for(lambda: job.newest() != job.id, "resubmission", run=job.run)
    assert job.wait_for_end() == "COMPLETED", jobs.output(job.run)
    first, second = job.ends()
    assert (first["reason"], first["nodes"]) == ("crash", {bad: "its rank was the first to go"})
    assert (first["decision"], second["reason"]) == ("resubmit", "finished")
    assert lab.field(job.newest(), "ExcNodeList") == bad
    assert jobs.weights(job.run, STEPS) == undisturbed


def test_a_job_that_always_fails_gives_up_after_its_budget_and_shows_the_error(lab, data, tmp_path):
    broken = {"retry": {"crashes": "1", "node_failures": "9"}, "environment": {"GLOO_SOCKET_IFNAME": '"none0"'}}
    job = jobs.submit(lab, tmp_path, data, "broken", cluster=broken)
    assert job.wait_for_end() == "FAILED", jobs.output(job.run)
    jobs.wait_for(lambda: len(job.ends()) == 2 and job.wait_for_end() == "FAILED", "second failure", run=job.run)
    assert [(end["reason"], end["decision"]) for end in job.ends()] == [("crash", "requeue"), ("crash", "stop")]
    assert "2 starts in a row ended (crash the last)" in jobs.output(job.run)
    assert "none0" in jobs.output(job.run)


def test_what_a_person_ends_stays_ended(lab, data, tmp_path):
    """STOP leaves with everything saved; a second job of a running run is refused; scancel is final."""
    job = jobs.submit(lab, tmp_path, data, "stopped", steps=100_000)
    job.wait_for_step(3)
    again = ["slurm", tmp_path / "stopped.toml", "--nodes", "2", "--cluster", tmp_path / "stopped.cluster.toml"]
    assert f"in use by job {job.id} (RUNNING)" in jobs.launch(lab, *again, status=2)
    assert "running" in jobs.launch(lab, "status", job.run)
    by_hand = lab.call("sbatch", "--parsable", str(job.run / "jobs" / "000" / "train.sbatch")).strip()
    jobs.wait_for(lambda: lab.state(by_hand) == "FAILED", "refusal of a second job", run=job.run)
    assert f"has job {job.id} running already; this one, {by_hand}, leaves it alone" in jobs.output(job.run)
    assert job.newest() == job.id
    jobs.launch(lab, "stop", job.run)
    job.wait_for_end()
    assert (job.outcome()["reason"], job.ends()[-1]["decision"]) == ("user", "stop")
    assert (job.run / "checkpoints" / f"step-{job.outcome()['step']:08d}" / "COMPLETE").exists()
    assert "has nothing to stop: it ended, user" in jobs.launch(lab, "stop", job.run, status=2)

    jobs.launch(lab, *again)
    second = job.newest()
    assert second != job.id
    job.wait_for_step(job.outcome()["step"] + 3)
    lab.call("scancel", second)
    assert job.wait_for_end() == "CANCELLED"
    jobs.wait_for(lambda: len(job.ends()) == 2 or "TERM heard" in jobs.output(job.run), "the script's last words")
    assert lab.state(second) == "CANCELLED"
    assert lab.call("squeue", "-h", "-t", "PENDING,RUNNING", "-o", "%i").split() == []


def test_a_sweep_runs_every_point_and_relaunches_the_failed_one_alone(lab, data, tmp_path):
    """Four points, two at a time, on one node of one rank each; the data of one is missing at first."""
    names = ["a", "b", "c", "d"]
    rows = []
    for name in names:
        source = tmp_path / "late" if name == "c" else data
        write_config(tmp_path / f"{name}.toml", tmp_path / "runs" / name, source, steps=3)
        row = {"name": name, "config": f"{name}.toml", "after": "", "params": 2e4, "tokens": 768, "steps": 3}
        rows.append(row | {"gpu_hours": 0.001})
    (tmp_path / "table.json").write_text(json.dumps({"points": rows}))
    site = jobs.write_cluster(tmp_path / "site.toml", node={"ranks": "1", "cpus": "1"})
    sweep = ["sweep", tmp_path, "--cluster", site, "--at-once", "2"]
    assert "4 of 4 runs to submit, 0.004 of 0.004 GPU hours" in jobs.launch(lab, *sweep, "--dry-run")
    jobs.launch(lab, *sweep)
    runs = {name: jobs.Job(lab, tmp_path / "runs" / name, "") for name in names}
    for name, run in runs.items():
        assert run.wait_for_end() == ("FAILED" if name == "c" else "COMPLETED"), jobs.output(run.run)
        assert run.outcome()["reason"] == ("refused" if name == "c" else "finished")
        assert [end["decision"] for end in run.ends()] == ["stop"]

    (tmp_path / "late").symlink_to(data)
    before = {name: run.newest() for name, run in runs.items()}
    assert "1 of 4 runs to submit" in jobs.launch(lab, *sweep)
    assert runs["c"].wait_for_end() == "COMPLETED", jobs.output(runs["c"].run)
    assert {name for name, run in runs.items() if run.newest() != before[name]} == {"c"}
    assert "nothing is left to run" in jobs.launch(lab, *sweep)


def test_a_dataset_is_built_by_an_array_and_merged(lab, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for part in range(3):
        lines = [json.dumps({"text": f"part {part} line {line} " * 5}) for line in range(50)]
        (texts / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "data_prep"]
    made = [*command, "tokenizer", str(texts), "--out", str(tmp_path / "tok"), "--kind", "bpe", "--vocab-size", "300"]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True, timeout=240)
    site = jobs.write_cluster(tmp_path / "site.toml", node={"ranks": "1", "cpus": "1"})
    out = tmp_path / "built"
    build = [texts, "--tokenizer", tmp_path / "tok", "--out", out, "--seq-len", "32", "--workers", "1"]
    said = jobs.launch(lab, "data", "--cluster", site, "--tasks", "2", "--", *build)
    merge = re.findall(r"job (\d+)", said)[1]
    jobs.wait_for(lambda: lab.state(merge) in ("COMPLETED", "FAILED", "CANCELLED"), "end of the merge")
    outputs = "\n".join(path.read_text() for path in (tmp_path / "built.jobs").glob("*.out"))
    assert lab.state(merge) == "COMPLETED", outputs
    stats = subprocess.run(
        [*command, "stats", str(out), "--json"], cwd=ROOT, capture_output=True, timeout=120, check=True
    )
    assert json.loads(stats.stdout)["documents"] == 150
