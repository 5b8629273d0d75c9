import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pretrain import cli, doctor
from pretrain.doctor import Limits
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def look(node: str, clock: float = 0.0, tflops: float = 100.0, *problems: str) -> dict[str, Any]:
    return {"node": node, "problems": list(problems), "clock": clock, "tflops": tflops}


def test_each_node_is_in_two_pairs_and_never_in_two_at_once():
    assert doctor.rounds_of_pairs(1) == []
    assert doctor.rounds_of_pairs(2) == [[(0, 1)]]
    for count in (3, 4, 7, 16):
        rounds = doctor.rounds_of_pairs(count)
        for pairs in rounds:
            nodes = [node for pair in pairs for node in pair]
            assert len(nodes) == len(set(nodes))
        everyone = sorted(node for pairs in rounds for pair in pairs for node in pair)
        assert everyone == sorted([*range(count)] * 2)


def test_the_slow_node_is_the_one_that_is_slow_with_both_its_neighbours():
    pairs = {"a b": 100.0, "b c": 40.0, "c d": 42.0, "d a": 99.0}
    assert doctor.slow_nodes(pairs, share=0.7) == {"c": 42.0}
    assert doctor.slow_nodes({"a b": 1.0}, share=0.7) == {}


def test_a_clock_a_slow_device_and_local_problems_are_laid_to_their_nodes():
    looks = [
        look("a"),
        look("a"),
        look("b", 3.0),
        look("b", 3.0),
        look("c", 0.0, 60.0),
        look("c", 0.0, 100.0, "7 GPUs"),
    ]
    found = doctor.judge(looks, {}, None, Limits())
    assert found == {
        "a": [],
        "b": ["clock is +3.0 s off the others'"],
        "c": ["7 GPUs", "rank 4 multiplies at 60 TFLOP/s, median 100"],
    }


def test_a_slow_network_is_a_problem_of_the_slowest_pair():
    looks = [look(node) for node in "abcd"]
    pairs = {"a b": 40.0, "b c": 39.0, "c d": 40.0, "d a": 40.0}
    found = doctor.judge(looks, pairs, 50.0, Limits(min_allreduce_gb_per_second=100.0))
    assert [node for node, problems in found.items() if problems] == ["b", "c"]
    assert "reaches 50 GB/s, 100 wanted" in found["b"][0]
    assert not any(doctor.judge(looks, pairs, 120.0, Limits(min_allreduce_gb_per_second=100.0)).values())


class Memory(NamedTuple):
    used: float


class FalseNvml:
    """A GPU with 3 GiB in use, two uncorrected errors, a pending remap and a hot chip; no process list."""

    class NVMLError(Exception): ...

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = NVML_TEMPERATURE_GPU = 0
    nvmlClocksThrottleReasonHwSlowdown, nvmlClocksThrottleReasonHwThermalSlowdown = 8, 64
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown, nvmlClocksThrottleReasonSwThermalSlowdown = 128, 32

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Memory:
        return Memory(3 * 2.0**30)

    def nvmlDeviceGetRemappedRows(self, handle: Any) -> tuple[int, int, int, int]:
        return 0, 0, 1, 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return 64

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        raise self.NVMLError

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, counter: int) -> int:
        return 2

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return 91


def test_memory_in_use_ecc_errors_remaps_and_throttling_make_a_gpu_unfit():
    facts = doctor.read_nvml(FalseNvml(), None)
    assert doctor.gpu_problems(5, facts, Limits()) == [
        "GPU 5 has 3.0 GiB in use by 0 processes, 2 allowed",
        "GPU 5 has 2 uncorrected ECC errors since its driver started",
        "GPU 5: memory row remap_pending",
        "GPU 5 is throttled: hardware thermal",
    ]
    clean = facts | {"used_memory_gib": None, "ecc_uncorrected": None, "remap_pending": None, "throttle": []}
    assert doctor.gpu_problems(5, clean, Limits()) == []


def examine_as_node(folder: str) -> dict[str, Any] | None:
    os.environ |= {"SLURMD_NODENAME": f"node{os.environ['RANK']}", "LOCAL_RANK": "0"}
    limits = Limits(min_share_of_median=0.0, message_mib=1, expect_gpus=0, min_free_disk_gib=0.0)
    report = doctor.examine(limits, Path(folder), Path(folder), 120)
    return None if report is None else report.facts | {"problems": report.problems}


def test_ranks_look_together_and_the_report_is_where_the_launcher_reads_it(tmp_path):
    facts, *others = run_ranks(examine_as_node, 3, str(tmp_path))
    assert others == [None, None]
    assert facts["nodes"] == ["node0", "node1", "node2"]
    assert set(facts["pairs_gb_per_second"]) == {"node0 node1", "node1 node2", "node2 node0"}
    assert min(facts["pairs_gb_per_second"].values()) > 0
    assert facts["allreduce_gb_per_second"] > 0
    assert facts["problems"] == {"node0": [], "node1": [], "node2": []}
    assert json.loads((tmp_path / "summary.json").read_text())["facts"]["ranks"] == 3
    assert sorted(path.name for path in tmp_path.glob("node-*")) == [f"node-node{i}.json" for i in range(3)]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--run", "/nonexistent"], "--run /nonexistent: no such folder"),
        (["--message-mib", "-1"], "--message-mib -1: set a number from 1 to"),
        (["--timeout", "0"], "--timeout 0: set a number from 1 to"),
        (["--min-share-of-median", "nan"], "--min-share-of-median nan: set a number from 0 to 1"),
    ],
)
def test_the_command_refuses_what_it_cannot_look_at_or_wait_for(
    option: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *option]) == 2
    assert said in capsys.readouterr().err


def test_in_a_job_a_folder_that_is_not_there_is_a_problem_of_the_node(tmp_path: Path) -> None:
    _, problems = doctor.look_at_node(Limits(min_free_disk_gib=0.0), tmp_path / "run")
    assert f"the run's folder {tmp_path / 'run'} is not there" in problems


def test_the_command_ends_with_1_and_names_what_is_missing(tmp_path):
    command = [sys.executable, "-m", "pretrain", "doctor", "--json", "--expect-gpus", "99", "--run", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["fit"] is False
    assert "99 expected" in next(iter(report["problems"].values()))[0]
