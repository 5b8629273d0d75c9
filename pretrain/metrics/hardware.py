"""What accelerators can do at most: dense matmul peaks, memory, links and power, each with its source.

Looked up by the exact name that CUDA reports or by the short name a person types to the planner. A device
that is not in the table has no peak: the answer is None and no number is made up for it, since two
well-known trainers fall back to another device's peak and have printed an MFU above 100 %. A MIG slice is
such an unknown device too: its name is not its board's. Never loads torch.
"""

import re
from dataclasses import dataclass

from pretrain.errors import ConfigError

TERA = 1e12
GB = 1e9


@dataclass(frozen=True)
class Device:
    """Peaks are dense (no sparsity) and what the vendor states; what can be reached is lower."""

    name: str  # as typed to the planner
    bf16_flops: float  # FLOP/s
    fp8_flops: float | None  # FLOP/s; None: no fp8 units
    memory_bytes: float
    memory_bandwidth: float  # bytes/s
    watts: float  # of the board
    link_bandwidth: float  # bytes/s between two devices of one node, each way
    network_bandwidth: float  # bytes/s per device between nodes, each way, as such nodes are usually wired
    cuda_names: tuple[str, ...]  # as torch.cuda.get_device_name says, without "NVIDIA"
    source: str


def _device(
    name: str,
    *cuda_names: str,
    bf16: float,
    fp8: float | None,
    memory: float,
    hbm: float,
    watts: float,
    link: float,
    network: float,
    source: str,
) -> Device:
    return Device(
        name=name,
        bf16_flops=bf16 * TERA,
        fp8_flops=None if fp8 is None else fp8 * TERA,
        memory_bytes=memory * GB,
        memory_bandwidth=hbm * TERA,
        watts=watts,
        link_bandwidth=link * GB,
        network_bandwidth=network * GB,
        cuda_names=cuda_names,
        source=source,
    )


# Units: TFLOP/s, GB, TB/s, W, GB/s each way. NVLink 3 / 4 / 5 carry 300 / 450 / 900 GB/s each way per device,
# PCIe 4 / 5 x16 carry 32 / 64. Networks: HDR 200 Gb/s a device with A100, NDR 400 with Hopper and Blackwell.
DEVICES: tuple[Device, ...] = (
    _device(
        "a100-sxm",
        "A100-SXM4-80GB", "A100-SXM-80GB",
        bf16=312, fp8=None, memory=80, hbm=2.0, watts=400, link=300, network=25,
        source="NVIDIA A100 datasheet, 2021",
    ),
    _device(
        "a100-sxm-40gb",
        "A100-SXM4-40GB",
        bf16=312, fp8=None, memory=40, hbm=1.555, watts=400, link=300, network=25,
        source="NVIDIA A100 datasheet, 2020",
    ),
    _device(
        "a100-pcie",
        "A100 80GB PCIe", "A100-PCIE-80GB",
        bf16=312, fp8=None, memory=80, hbm=1.935, watts=300, link=32, network=25,
        source="NVIDIA A100 datasheet, 2021",
    ),
    _device(
        "a100-pcie-40gb",
        "A100-PCIE-40GB",
        bf16=312, fp8=None, memory=40, hbm=1.555, watts=250, link=32, network=25,
        source="NVIDIA A100 datasheet, 2020",
    ),
    _device(
        "h100-sxm",
        "H100 80GB HBM3", "H100 SXM5 80GB",
        bf16=989.4, fp8=1978.9, memory=80, hbm=3.35, watts=700, link=450, network=50,
        source="NVIDIA H100 datasheet, 2023 (1,978.9 with sparsity, halved)",
    ),
    _device(
        "h100-sxm-96gb",
        "H100 96GB HBM2e", "H100 SXM5 96GB",
        bf16=989.4, fp8=1978.9, memory=96, hbm=2.4, watts=500, link=450, network=50,
        source="torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 96 GB HBM2e, 500 W limit",
    ),
    _device(
        "h100-pcie",
        "H100 PCIe",
        bf16=756, fp8=1513, memory=80, hbm=2.0, watts=350, link=64, network=50,
        source="NVIDIA H100 datasheet, 2023",
    ),
    _device(
        "h100-nvl",
        "H100 NVL",
        bf16=835, fp8=1671, memory=94, hbm=3.9, watts=400, link=300, network=50,
        source="NVIDIA H100 NVL datasheet, 2024",
    ),
    _device(
        "h200-sxm",
        "H200", "H200 SXM", "H200 141GB HBM3e",
        bf16=989.4, fp8=1978.9, memory=141, hbm=4.8, watts=700, link=450, network=50,
        source="NVIDIA H200 datasheet, 2024",
    ),
    _device(
        "h200-nvl",
        "H200 NVL",
        bf16=835.5, fp8=1671, memory=141, hbm=4.8, watts=600, link=450, network=50,
        source="NVIDIA H200 datasheet, 2024",
    ),
    _device(
        "gh200",
        "GH200 480GB",
        bf16=989.4, fp8=1978.9, memory=96, hbm=4.0, watts=900, link=450, network=50,
        source="NVIDIA GH200 datasheet, 2024 (96 GB HBM3; 900 W with the CPU)",
    ),
    _device(
        "b200",
        "B200",
        bf16=2250, fp8=4500, memory=180, hbm=8.0, watts=1000, link=900, network=50,
        source="NVIDIA Blackwell architecture technical brief, HGX B200",
    ),
    _device(
        "gb200",
        "GB200",
        bf16=2500, fp8=5000, memory=186, hbm=8.0, watts=1200, link=900, network=50,
        source="NVIDIA Blackwell architecture technical brief, GB200 NVL72",
    ),
)  # fmt: skip


def find_device(cuda_name: str) -> Device | None:
    """The device that CUDA calls `cuda_name` ("NVIDIA H100 80GB HBM3"), or None; parts of a name never match."""
    wanted = _plain(cuda_name)
    for device in DEVICES:
        if wanted in (_plain(name) for name in device.cuda_names):
            return device
    return None


def device_named(name: str) -> Device:
    """The device a person typed (`h100-sxm`, or a CUDA name); ConfigError with the known names otherwise."""
    for device in DEVICES:
        if device.name == name.lower().replace("_", "-"):
            return device
    found = find_device(name)
    if found is None:
        known = ", ".join(device.name for device in DEVICES)
        raise ConfigError(f"device {name!r} is not known; its peaks are needed to plan. Known: {known}")
    return found


def peak_flops(cuda_name: str | None, peak_tflops: float | None = None) -> float | None:
    """bf16 FLOP/s to divide by for an MFU: the stated `metrics.peak_tflops`, else the table's, else None."""
    if peak_tflops is not None:
        return peak_tflops * TERA
    device = find_device(cuda_name) if cuda_name else None
    return None if device is None else device.bf16_flops


def _plain(name: str) -> str:
    words = re.split(r"[\s_-]+", name.strip().lower())
    return " ".join(word for word in words if word != "nvidia")
