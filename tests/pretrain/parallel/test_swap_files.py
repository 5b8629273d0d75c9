"""What DeepSpeed swaps to disks: folders that go with their process, and what is refused before anything is swapped."""

import os
import resource
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.dist import World
from pretrain.errors import ConfigError
from pretrain.parallel import swap_files, zero
from pretrain.parallel.swap_files import SwapFolder, prepare_swapping

ALONE = World(0, 1, 0, torch.device("cpu"))
SIZES = [600_000, 300_000]


def prepare(disk: Path | str, *, load_ops: Any = lambda: None, aio: Any = None, **tables: Any) -> dict[str, Any]:
    """DeepSpeed's table, made ready for two parameters of SIZES on one rank."""
    tables = {key: {"device": "nvme", "nvme_path": str(disk)} | table for key, table in tables.items()}
    return prepare_swapping({"zero_optimization": tables, "aio": aio or {}}, SIZES, ALONE, load_ops)[0]


def test_a_folder_goes_with_its_process_and_a_dead_ones_with_the_next_start(tmp_path: Path) -> None:
    left = tmp_path / "pretrain-swap-killed"
    left.mkdir()
    (left / "0_param.tensor.swp").write_bytes(b"x")
    foreign = tmp_path / "mine"
    foreign.mkdir()
    living = SwapFolder(tmp_path, "path")
    assert not left.exists()
    other = SwapFolder(tmp_path, "path")
    assert {foreign, living.path, other.path} == {path for path in tmp_path.iterdir() if path.is_dir()}
    del living
    assert {foreign, other.path} == {path for path in tmp_path.iterdir() if path.is_dir()}
    other.remove()
    other.remove()
    assert {foreign} == {path for path in tmp_path.iterdir() if path.is_dir()}


def test_a_held_copy_lies_in_a_file_without_a_name(tmp_path: Path) -> None:
    folder = SwapFolder(tmp_path, "path")
    tensor = torch.arange(6.0).view(2, 3)
    held = folder.hold(tensor)
    assert torch.equal(held, tensor)
    held += 1
    assert held[0, 0] != tensor[0, 0]
    assert [path.name for path in folder.path.iterdir()] == ["lock"]
    assert str(folder.path) in Path("/proc/self/maps").read_text()
    del held
    assert str(folder.path) not in Path("/proc/self/maps").read_text()
    assert folder.hold(torch.empty(0, 3)).shape == (0, 3)


def test_buffers_are_as_large_as_the_largest_part_and_no_option_of_the_user_is_changed(tmp_path: Path) -> None:
    table = prepare(tmp_path, offload_param={}, offload_optimizer={"buffer_count": 6})
    assert table["offload_param"]["buffer_size"] == 600_000
    assert table["offload_optimizer"]["buffer_count"] == 6
    assert table["stage3_prefetch_bucket_size"] == table["stage3_max_reuse_distance"] == 0
    assert table["sub_group_size"] == 100_000_000


def test_what_a_machine_lacks_is_named_with_values_and_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    field = "deepspeed.zero_optimization.offload_optimizer"
    with pytest.raises(ConfigError, match=f"{field}.nvme_path='/nowhere' is no folder on .*; make it on a local disk"):
        prepare("/nowhere", offload_optimizer={})
    with pytest.raises(ConfigError, match=f"{field}.nvme_path='/proc' on .* cannot be written past the page cache"):
        prepare("/proc", offload_optimizer={})
    with pytest.raises(ConfigError, match=r"buffer_size=500000 elements do not hold .*; set buffer_size=600000"):
        prepare(tmp_path, offload_param={"buffer_size": 500_000})
    with pytest.raises(ConfigError, match=r"swaps pieces of 4,194,304 bytes and more, .* has 3,600,000; set device="):
        prepare(tmp_path, offload_optimizer={}, aio={"block_size": 4 << 20})
    usage = namedtuple("Usage", "total used free")(10**9, 0, 1000)
    monkeypatch.setattr(swap_files.shutil, "disk_usage", lambda path: usage)
    # 900,000 parameters x (4 + 3 of the optimizer, 1 of the weights) x 4 bytes
    with pytest.raises(ConfigError, match="has 1,000 bytes free, but its 1 ranks swap out 28,800,000"):
        prepare(tmp_path, offload_optimizer={}, offload_param={})


def lock_too_much() -> None:
    """As a user who may lock 64 KiB."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
    if os.getuid() == 0:
        os.setuid(65534)
    with pytest.raises(ConfigError, match=r"lets a process lock 65,536 bytes of memory, .* needs 131,072 .*ulimit -l"):
        swap_files._require_lockable(1 << 17)
    swap_files._require_lockable(1 << 16)
    print("refused")


def test_buffers_that_may_not_be_locked_are_refused_before_deepspeed_dies_of_them() -> None:
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_swap_files; test_swap_files.lock_too_much()"
    where = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=where, capture_output=True, text=True, check=False)
    assert done.stdout == "refused\n", done.stderr


def test_ops_that_cannot_be_built_name_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "load_op", lambda name: False)
    with pytest.raises(ConfigError, match=r"async_io op on .* its headers .* not there; install libaio-dev"):
        prepare(tmp_path, load_ops=zero.load_swap_ops, offload_optimizer={})

    def broken(name: str) -> bool:
        raise RuntimeError("Error building extension 'async_io'\nlines of ninja")

    monkeypatch.setattr(zero, "load_op", broken)
    with pytest.raises(ConfigError, match="did not build: Error building extension 'async_io'; install libaio-dev"):
        prepare(tmp_path, load_ops=zero.load_swap_ops, offload_optimizer={})
