import json
from pathlib import Path
from typing import Any

import pytest

from launch import health, ledger, verdict
from launch.verdict import Facts, decide

NOBODY: dict[str, str] = {}


def facts(**changes: Any) -> Facts:
    usual = Facts(
        reason="crash", slurm_ends_it=False, said="", blamed=NOBODY, step=10, history=[], crashes=3, node_failures=2,
        excluded=[], requeue="scontrol",
    )  # fmt: skip
    return usual._replace(**changes)


def end(reason: str, step: int, **nodes: str) -> dict[str, Any]:
    return {"reason": reason, "step": step, "nodes": nodes}


@pytest.mark.parametrize(
    ("reason", "action"),
    [
        ("finished", "stop"),
        ("refused", "stop"),
        ("anomaly", "stop"),
        ("user", "stop"),
        ("preempted", "requeue"),
        ("time_limit", "requeue"),
        ("lost", "requeue"),
        ("crash", "requeue"),
    ],
)
def test_only_preemption_time_limit_and_crashes_bring_a_job_back(reason, action):
    assert decide(facts(reason=reason)).action == action
    assert decide(facts(reason=reason, slurm_ends_it=True)).action == "stop"


def test_a_site_without_requeue_resubmits_and_keeps_its_excluded_nodes():
    decision = decide(facts(reason="time_limit", requeue="resubmit", excluded=["gpu7"]))
    assert (decision.action, decision.exclude) == ("resubmit", ["gpu7"])


def test_crashes_without_a_new_checkpoint_run_out_of_budget():
    history = [end("crash", 10), end("crash", 10), end("crash", 10)]
    assert decide(facts(history=history[:2])).action == "requeue"
    decision = decide(facts(history=history))
    assert decision.action == "stop"
    assert "4 starts in a row" in decision.why
    assert "retry.crashes=3" in decision.why
    assert decide(facts(crashes=0)).action == "stop"


def test_a_new_checkpoint_gives_the_budget_back():
    history = [end("crash", 10), end("crash", 10), end("crash", 10)]
    assert decide(facts(history=history, step=12)).action == "requeue"
    assert decide(facts(history=[*history, end("crash", 12)], step=12)).action == "requeue"


def test_a_chain_of_time_limits_never_ends_while_it_saves_and_ends_when_it_gets_nowhere():
    chain = [end("time_limit", step) for step in range(0, 1000, 10)]
    assert decide(facts(reason="time_limit", step=1000, history=chain)).action == "requeue"
    stuck = [*chain, *(end("lost", 990) for _ in range(3))]
    assert decide(facts(reason="time_limit", step=990, history=stuck)).action == "stop"


def test_a_node_that_fails_repeatedly_is_excluded():
    history = [end("crash", 10, gpu3="first"), end("time_limit", 20, gpu4="never counted")]
    assert decide(facts(step=30, history=history, blamed={"gpu4": "first"})).action == "requeue"
    decision = decide(facts(step=30, history=history, blamed={"gpu3": "first"}, excluded=["gpu9"]))
    assert (decision.action, decision.exclude) == ("resubmit", ["gpu3", "gpu9"])


def test_an_unhealthy_node_is_excluded_at_once():
    decision = decide(facts(reason="unhealthy", blamed={"gpu3": "ECC"}))
    assert (decision.action, decision.exclude) == ("resubmit", ["gpu3"])


def gathered(run: Path) -> Facts:
    words = f"--run {run} --script x --attempt {run / 'start'} --job 7 --stamp none --warned 0 --ended 0 --crashes 3"
    args = verdict.parse(f"{words} --node-failures 2 --requeue scontrol --nodes gpu[1-2]".split())
    return verdict.gather(args)


def test_a_refusal_that_no_outcome_could_hold_is_no_crash(tmp_path):
    (tmp_path / "start").mkdir()
    assert gathered(tmp_path).reason == "crash"
    (tmp_path / "start" / "refused").write_text("run.dir is in use by process 7 on gpu3\n")
    decision = decide(gathered(tmp_path))
    assert decision[:2] == ("stop", "the run has ended: refused, run.dir is in use by process 7 on gpu3")


def test_a_full_disk_under_the_run_is_no_nodes_fault_and_one_nodes_own_trouble_is(tmp_path):
    full, worn = "the run's folder has 0.1 GiB free under /runs, 20 wanted", "GPU 3 is throttled: hardware thermal"
    health_notes = tmp_path / "start" / "health"
    health_notes.mkdir(parents=True)
    for node, problems in (("gpu1", []), ("gpu2", [full])):
        (health_notes / f"node-{node}.json").write_text(json.dumps({"node": node, "problems": problems}))
    assert decide(gathered(tmp_path))[:2] == ("resubmit", "unhealthy; without gpu2")
    (health_notes / "node-gpu1.json").write_text(json.dumps({"node": "gpu1", "problems": [worn, full]}))
    assert decide(gathered(tmp_path))[:2] == ("stop", f"no node is at fault: unhealthy, {full}")


def note(folder: Path, task: int, node: str, status: int, first_gone: float | None) -> None:
    record = {"node": node, "task": task, "status": status, "first_gone": first_gone}
    (folder / f"task-{task}.json").write_text(json.dumps(record))


def test_the_node_whose_rank_was_gone_first_is_to_blame(tmp_path):
    note(tmp_path, 0, "gpu1", 1, 100.4)
    note(tmp_path, 1, "gpu2", 1, 100.1)
    note(tmp_path, 2, "gpu3", 0, None)
    assert list(verdict.blame(tmp_path)) == ["gpu2"]
    assert verdict.blame(tmp_path / "none") == {}


def test_history_begins_at_the_last_submission_by_a_person(tmp_path):
    ledger.add(tmp_path, "submit", job="1", after=None, exclude=[])
    ledger.add(tmp_path, "end", job="1", reason="crash", step=3)
    ledger.add(tmp_path, "submit", job="2", after="1", exclude=["gpu1"])
    ledger.add(tmp_path, "end", job="2", reason="crash", step=3, ended_by_slurm=True)
    assert [record["job"] for record in ledger.ends_since_submission(tmp_path)] == ["1"]
    assert (ledger.last_job(tmp_path), ledger.excluded(tmp_path)) == ("2", ["gpu1"])
    ledger.add(tmp_path, "submit", job="3", after=None, exclude=[])
    assert ledger.ends_since_submission(tmp_path) == []


def test_health_names_nodes_with_problems_and_nodes_that_never_spoke(tmp_path):
    assert health.bad_nodes(tmp_path) == {}
    for node, problems in (("gpu1", []), ("gpu2", ["7 GPUs are seen, 8 expected"])):
        (tmp_path / f"node-{node}.json").write_text(json.dumps({"node": node, "problems": problems}))
    for node in ("gpu1", "gpu2", "gpu3"):
        (tmp_path / "ranks" / node).mkdir(parents=True)
        (tmp_path / "ranks" / node / "started.json").write_text(json.dumps({"node": node}))
    assert health.bad_nodes(tmp_path) == {"gpu2": "7 GPUs are seen, 8 expected", "gpu3": "no report in time"}
    (tmp_path / "summary.json").write_text(json.dumps({"problems": {"gpu1": ["slow"], "gpu2": []}}))
    assert health.bad_nodes(tmp_path) == {"gpu1": "slow", "gpu2": "7 GPUs are seen, 8 expected"}
