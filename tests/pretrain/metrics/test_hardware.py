import pytest

from pretrain.errors import ConfigError
from pretrain.metrics.hardware import DEVICES, device_named, find_device, peak_flops


@pytest.mark.parametrize(
    ("cuda_name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250),
    ],
)
def test_a_cuda_name_finds_its_dense_bf16_peak(cuda_name, tflops):
    assert peak_flops(cuda_name) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA H100X",
        "NVIDIA A10",
        "cpu",
        "",
        None,
    ],
)
def test_an_unknown_device_or_a_slice_of_a_known_one_has_no_peak(name):
    assert peak_flops(name) is None


def test_a_stated_peak_is_used_for_any_device():
    assert peak_flops("Some Accelerator", 123.5) == 123.5e12
    assert peak_flops("NVIDIA H200", 800) == 800e12


def test_a_planner_name_finds_the_device_and_an_unknown_one_is_refused_with_the_known_names():
    assert device_named("h100-sxm").memory_bandwidth == 3.35e12
    assert device_named("H200_SXM").memory_bytes == 141e9
    assert device_named("NVIDIA H100 80GB HBM3") is device_named("h100-sxm")
    with pytest.raises(ConfigError, match=r"'h10o'.*h100-sxm"):
        device_named("h10o")


def test_names_are_unique_and_every_device_states_its_source():
    names = [name for device in DEVICES for name in (device.name, *device.cuda_names)]
    assert len(names) == len(set(names))
    assert all(device.source for device in DEVICES)
    for device in DEVICES:
        assert all(find_device(name) is device for name in device.cuda_names)
