"""`pretrain doctor`: is this machine, and are all machines of a job, fit to train?

Each rank looks at its device, its node's clock and disk; then all multiply, and all-reduce in pairs of nodes and all
together, so that a slow node is named. One process looks at one machine; under torchrun or srun the ranks look
together. Nothing is changed and nothing is repaired. NVML comes from nvidia-ml-py where it is installed.
"""

import json
import os
import platform
import shutil
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pretrain.dist import World, gather_objects, launch_environment, world

FOLDER = "the run's folder"  # begins a problem that no node has where all have it (launch/health.py)


class Limits(NamedTuple):
    """Beyond these a node is unfit."""

    expect_gpus: int | None = None  # of a node; none: any number
    max_clock_skew_seconds: float = 1.0
    min_free_disk_gib: float = 1.0
    max_used_memory_gib: float = 2.0  # of a GPU, before anything has started
    min_allreduce_gb_per_second: float = 0.0  # bus bandwidth over all ranks; 0: any
    min_share_of_median: float = 0.7  # of the ranks' matmul speed, and of the pairs' bandwidth
    message_mib: int = 64  # of an all-reduce


class Report(NamedTuple):
    facts: dict[str, Any]
    problems: dict[str, list[str]]  # node -> what is wrong with it

    @property
    def fit(self) -> bool:
        return not any(self.problems.values())


def examine(limits: Limits, run: Path | None, report: Path | None, timeout_seconds: float) -> Report | None:
    """The report, on rank 0; None on the others. `report` is a folder that all nodes share, for the launcher to read.

    A node writes what is wrong with it before it meets the others, so that one that never gets there is known.
    """
    ranks, node = launch_environment(), node_name()
    facts, problems = look_at_node(limits, run)
    if ranks["local_rank"] == 0 and report is not None:
        _write(report / f"node-{node}.json", {"node": node, "problems": problems})
    with world(timeout_seconds) as here:
        own = {"node": node, "problems": problems, "clock": 0.0, "tflops": None}
        if here.device.type == "cuda":
            index = here.local_rank
            device_problems, device_facts = look_at_gpu(index, limits)
            own["problems"] = problems + device_problems
            facts["gpu"] = device_facts
        dist.barrier(group=here.agreement)
        own["clock"] = time.time()  # all ranks leave the barrier within milliseconds
        own["tflops"] = matmul_tflops(here.device)
        looks = gather_objects(own, here)
        nodes = list(dict.fromkeys(look["node"] for look in looks))
        pairs = pair_bandwidths([look["node"] for look in looks], here, limits.message_mib)
        bandwidth = bus_bandwidth(None, here.size, here, limits.message_mib) if here.size > 1 else None
    if ranks["rank"] != 0:
        return None
    found = judge(looks, pairs, bandwidth, limits)
    facts |= {"ranks": len(looks), "nodes": nodes, "allreduce_gb_per_second": bandwidth, "pairs_gb_per_second": pairs}
    facts["tflops"] = [look["tflops"] for look in looks]
    if report is not None:
        _write(report / "summary.json", {"problems": found, "facts": facts})
    return Report(facts, found)


def look_at_node(limits: Limits, run: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Facts and problems of this machine that one process can see."""
    problems = []
    gpus = torch.cuda.device_count()
    if limits.expect_gpus is not None and gpus != limits.expect_gpus:
        problems.append(f"{gpus} GPUs are seen, {limits.expect_gpus} expected")
    folder = _existing(run or Path.cwd())
    if run is not None and not run.is_dir():
        problems.append(f"{FOLDER} {run} is not there")
    free = shutil.disk_usage(folder).free / 2**30
    if free < limits.min_free_disk_gib:
        problems.append(f"{FOLDER} has {free:.1f} GiB free under {folder}, {limits.min_free_disk_gib:g} wanted")
    if not os.access(folder, os.W_OK):
        problems.append(f"{FOLDER} {folder} cannot be written to")
    facts = {
        "node": node_name(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "numpy", "deepspeed", "wandb", "nvidia-ml-py")},
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "cores": [len(os.sched_getaffinity(0)), os.cpu_count()],
        "free_disk_gib": round(free, 1),
    }
    return facts, problems


def look_at_gpu(index: int, limits: Limits) -> tuple[list[str], dict[str, Any]]:
    """Problems and facts of a GPU that torch and NVML tell."""
    facts: dict[str, Any] = {"name": torch.cuda.get_device_name(index)}
    try:
        import pynvml
    except ImportError:
        facts["nvml"] = "nvidia-ml-py is not installed: memory, ECC and throttling were not read"
        return [], facts
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        facts |= read_nvml(pynvml, handle)
    finally:
        pynvml.nvmlShutdown()
    return gpu_problems(index, facts, limits), facts


def read_nvml(nvml: Any, handle: Any) -> dict[str, Any]:
    """What NVML says of a device; null where this kind of device has no such counter."""

    def ask(function: str, *args: Any) -> Any:
        try:
            return getattr(nvml, function)(handle, *args)
        except nvml.NVMLError:
            return None

    memory, remapped = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetRemappedRows")
    slow = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    return {
        "used_memory_gib": memory.used / 2**30 if memory is not None else None,
        "processes": len(ask("nvmlDeviceGetComputeRunningProcesses") or []),
        "ecc_uncorrected": ask(
            "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "remap_pending": bool(remapped[2]) if remapped is not None else None,
        "remap_failed": bool(remapped[3]) if remapped is not None else None,
        "throttle": [
            word
            for word, bit in (
                ("hardware slowdown", nvml.nvmlClocksThrottleReasonHwSlowdown),
                ("hardware thermal", nvml.nvmlClocksThrottleReasonHwThermalSlowdown),
                ("power brake", nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown),
                ("software thermal", nvml.nvmlClocksThrottleReasonSwThermalSlowdown),
            )
            if slow is not None and slow & bit
        ],
        "temperature_celsius": ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
    }


def gpu_problems(index: int, facts: dict[str, Any], limits: Limits) -> list[str]:
    problems = []
    used = facts["used_memory_gib"]
    if used is not None and used > limits.max_used_memory_gib:
        problems.append(
            f"GPU {index} has {used:.1f} GiB in use by {facts['processes']} processes, "
            f"{limits.max_used_memory_gib:g} allowed"
        )
    if facts["ecc_uncorrected"]:
        problems.append(f"GPU {index} has {facts['ecc_uncorrected']} uncorrected ECC errors since its driver started")
    problems += [f"GPU {index}: memory row {key}" for key in ("remap_pending", "remap_failed") if facts[key]]
    problems += [f"GPU {index} is throttled: {word}" for word in facts["throttle"]]
    return problems


def matmul_tflops(device: torch.device) -> float:
    """Speed of this rank's device at a square matmul: bf16 on a GPU, fp32 and small on a CPU."""
    cuda = device.type == "cuda"
    size, rounds = (8192, 20) if cuda else (384, 8)
    a = torch.full((size, size), 0.5, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    for _ in range(3):
        a @ a
    start = _clock(device)
    for _ in range(rounds):
        a @ a
    return 2 * size**3 * rounds / (_clock(device) - start) / 1e12


def bus_bandwidth(group: Any, size: int, here: World, message_mib: int) -> float:
    """GB/s that an all-reduce over `size` ranks moves through the slowest link: 2 (n - 1) / n x bytes / seconds."""
    box = torch.ones(message_mib * 2**18, device=here.device)
    for _ in range(2):
        dist.all_reduce(box, group=group)
        box.fill_(1.0)
    seconds = []
    for _ in range(5):
        start = _clock(here.device)
        dist.all_reduce(box, group=group)
        seconds.append(_clock(here.device) - start)
        box.fill_(1.0)
    return 2 * (size - 1) / size * box.numel() * 4 / statistics.median(seconds) / 1e9


def pair_bandwidths(node_of_rank: Sequence[str], here: World, message_mib: int) -> dict[str, float]:
    """GB/s between neighbouring nodes, "a b" -> speed, each node in two pairs; on every rank."""
    nodes = list(dict.fromkeys(node_of_rank))
    mine: dict[str, float] = {}
    for pairs in rounds_of_pairs(len(nodes)):
        for a, b in pairs:
            members = [rank for rank, node in enumerate(node_of_rank) if node in (nodes[a], nodes[b])]
            group = dist.new_group(members)
            if here.rank in members:
                mine[f"{nodes[a]} {nodes[b]}"] = bus_bandwidth(group, len(members), here, message_mib)
    found: dict[str, float] = {}
    for one in gather_objects(mine, here):
        for pair, speed in one.items():
            found[pair] = min(speed, found.get(pair, speed))
    return found


def rounds_of_pairs(count: int) -> list[list[tuple[int, int]]]:
    """Neighbours on a ring of `count` nodes, in rounds in which no node is in two pairs."""
    if count < 2:
        return []
    if count == 2:
        return [[(0, 1)]]
    ring = [(i, (i + 1) % count) for i in range(count)]
    last = [[ring.pop()]] if count % 2 else []
    return [ring[0::2], ring[1::2], *last]


def judge(
    looks: Sequence[dict[str, Any]], pairs: dict[str, float], bandwidth: float | None, limits: Limits
) -> dict[str, list[str]]:
    """node -> problems, over all ranks' looks."""
    found: dict[str, list[str]] = {look["node"]: [] for look in looks}
    for look in looks:
        found[look["node"]] += [problem for problem in look["problems"] if problem not in found[look["node"]]]
    middle = statistics.median(look["clock"] for look in looks)
    speed = statistics.median(look["tflops"] for look in looks)
    for rank, look in enumerate(looks):
        skew = look["clock"] - middle
        text = f"clock is {skew:+.1f} s off the others'"
        if abs(skew) > limits.max_clock_skew_seconds and text not in found[look["node"]]:
            found[look["node"]].append(text)
        if look["tflops"] < limits.min_share_of_median * speed:
            found[look["node"]].append(f"rank {rank} multiplies at {look['tflops']:.3g} TFLOP/s, median {speed:.3g}")
    for node, best in slow_nodes(pairs, limits.min_share_of_median).items():
        middle_pair = statistics.median(pairs.values())
        found[node].append(f"all-reduces with its neighbours at {best:.3g} GB/s at best, median {middle_pair:.3g}")
    if bandwidth is not None and bandwidth < limits.min_allreduce_gb_per_second and not any(found.values()):
        worst = min(pairs, key=lambda pair: pairs[pair]).split() if pairs else list(found)
        for node in worst:
            found[node].append(
                f"the all-reduce over all ranks reaches {bandwidth:.3g} GB/s, "
                f"{limits.min_allreduce_gb_per_second:g} wanted; this node is of the slowest pair"
            )
    return found


def slow_nodes(pairs: dict[str, float], share: float) -> dict[str, float]:
    """Nodes whose every pair is below `share` of the median, and the best they reach; of two nodes no one can tell."""
    if len(pairs) < 3:
        return {}
    middle = statistics.median(pairs.values())
    speeds = defaultdict(list)
    for pair, speed in pairs.items():
        for node in pair.split():
            speeds[node].append(speed)
    return {node: max(all_) for node, all_ in speeds.items() if max(all_) < share * middle}


def describe(report: Report) -> str:
    """The report for people."""
    facts = report.facts
    lines = [f"{key:<24}{value}" for key, value in facts.items() if value is not None]
    for node, problems in report.problems.items():
        lines += [f"UNFIT {node}: {problem}" for problem in problems]
    return "\n".join([*lines, "fit to train" if report.fit else "not fit to train"])


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    aside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)
