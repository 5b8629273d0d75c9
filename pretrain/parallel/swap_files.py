"""Local disks that DeepSpeed swaps to: a folder of this process on each, and a look at what they and memory must allow.

DeepSpeed heeds no result of a write and dies of memory it may not lock (0.19), so both are found out beforehand, on all
ranks together. A folder goes with its process; those of processes that were killed are removed by the next start.
"""

import ctypes
import fcntl
import mmap
import os
import resource
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from pretrain.config_deepspeed import swapping
from pretrain.dist import World, all_ranks_ok, gather_objects, host
from pretrain.errors import ConfigError

_PREFIX = "pretrain-swap-"
_LOCK = "lock"  # held by the process that a folder belongs to
_FP32 = 4  # bytes
# Elements that are in memory at once; DeepSpeed's own default is ten times that. The others: see `config_deepspeed`.
_DEFAULTS = {"sub_group_size": 100_000_000}
_PARAM_DEFAULTS = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
_LEAST_BYTES = 1 << 20  # of a group or parameter that DeepSpeed swaps out; less stays in memory
# On the disk, for an element of a rank's part: of the optimizer a master, two moments and a gradient, and copies of the
# first three while a checkpoint is made.
_BYTES = {"offload_optimizer": (4 + 3) * _FP32, "offload_param": _FP32}


class SwapFolder:
    """A folder below `disk` that goes with this process; `field` is what a message calls the disk by."""

    def __init__(self, disk: Path, field: str) -> None:
        self.disk, self.field = disk, field
        _check_disk(disk, field)
        with open(disk / f"{_PREFIX}{_LOCK}", "w") as gate:  # nobody sees a folder before it is locked
            fcntl.flock(gate, fcntl.LOCK_EX)
            for folder in disk.glob(f"{_PREFIX}*/"):
                _remove_if_left(folder)
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=disk))
            lock = open(self.path / _LOCK, "w")  # noqa: SIM115
            fcntl.flock(lock, fcntl.LOCK_EX)
        self.remove = weakref.finalize(self, _remove, self.path, lock)  # called at the end of a process, too

    def require_room(self, needed: int, ranks: int) -> None:
        """`needed` bytes for each of this machine's `ranks` ranks."""
        free = shutil.disk_usage(self.path).free
        if free < needed * ranks:
            raise ConfigError(
                f"{self.field}={str(self.disk)!r} on {host()} has {free:,} bytes free, but its {ranks} ranks swap out "
                f"{needed * ranks:,}; free them, name a larger disk, or use more ranks"
            )

    def hold(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor whose memory is a nameless file here, so that the system may write it out."""
        if not tensor.numel():
            return tensor.cpu()
        with tempfile.NamedTemporaryFile(dir=self.path) as file:
            held = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
        return held.view(tensor.shape).copy_(tensor)


def prepare_swapping(
    settings: dict[str, Any], sizes: list[int], world: World, load_ops: Callable[[], None]
) -> tuple[dict[str, Any], dict[str, SwapFolder]]:
    """DeepSpeed's table with the folders and buffers that it swaps through, and the folders, by key.

    `sizes`: elements of each parameter. ConfigError on all ranks where any of their machines lacks something.
    """
    zero: dict[str, Any] = _DEFAULTS | settings["zero_optimization"]
    parts = [-(-size // world.size) for size in sizes]
    tables = {key: dict(zero[key]) for key in swapping(zero)}
    disks = {key: Path(table["nvme_path"]) for key, table in tables.items()}
    folders: dict[str, SwapFolder] = {}
    ranks = gather_objects(host(), world).count(host())
    error = None
    try:
        load_ops()
        for key, table in tables.items():
            folders[key] = SwapFolder(disks[key], f"deepspeed.zero_optimization.{key}.nvme_path")
            needed = sum(sum(parts) * _BYTES[other] for other in tables if disks[other] == disks[key])
            folders[key].require_room(needed, ranks)
            table["nvme_path"] = str(folders[key].path)
        if "offload_param" in tables:
            _fit_buffers(tables["offload_param"], max(parts))
            zero = _PARAM_DEFAULTS | zero
        zero |= tables
        _require_something_swapped(zero, parts, settings.get("aio", {}))
        _require_lockable(_buffer_bytes(zero, parts))
    except ConfigError as e:
        error = e
    all_ranks_ok(error, world)
    return zero, folders


def _fit_buffers(table: dict[str, Any], largest: int) -> None:
    size = table.setdefault("buffer_size", largest)
    if size < largest:
        raise ConfigError(
            f"deepspeed.zero_optimization.offload_param.buffer_size={size} elements do not hold a rank's part of the "
            f"largest parameter; set buffer_size={largest} or leave it out"
        )


def _largest_group(zero: dict[str, Any], parts: list[int]) -> int:
    """Elements of it, at most: a group ends with the parameter that fills it."""
    return min(sum(parts), zero["sub_group_size"] + max(parts))


def _require_something_swapped(zero: dict[str, Any], parts: list[int], aio: dict[str, Any]) -> None:
    least = max(_LEAST_BYTES, aio.get("block_size", 0))
    largest = {"offload_optimizer": _largest_group(zero, parts), "offload_param": max(parts)}
    for key in swapping(zero):
        if largest[key] * _FP32 < least:
            raise ConfigError(
                f'deepspeed.zero_optimization.{key}.device="nvme": DeepSpeed swaps pieces of {least:,} bytes and more, '
                f'but the largest here has {largest[key] * _FP32:,}; set device="cpu"'
            )


def _buffer_bytes(zero: dict[str, Any], parts: list[int]) -> int:
    group, total = _largest_group(zero, parts), 0
    if "offload_optimizer" in swapping(zero):
        total += zero["offload_optimizer"].get("buffer_count", 4) * group
    if "offload_param" in swapping(zero):
        total += zero["offload_param"].get("buffer_count", 5) * zero["offload_param"]["buffer_size"] + group
    return total * _FP32


def _require_lockable(needed: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return
    libc, pages = ctypes.CDLL(None), ctypes.create_string_buffer(limit + mmap.PAGESIZE)
    if libc.mlock(pages, len(pages)) == 0:  # this process is not bound by the limit
        libc.munlock(pages, len(pages))
        return
    raise ConfigError(
        f"{host()} lets a process lock {limit:,} bytes of memory, but swapping needs {needed:,} for its buffers; raise "
        f"ulimit -l, or lower deepspeed.zero_optimization.sub_group_size"
    )


def _check_disk(disk: Path, field: str) -> None:
    if not disk.is_dir():
        raise ConfigError(f"{field}={str(disk)!r} is no folder on {host()}; make it on a local disk of every node")
    try:
        with tempfile.NamedTemporaryFile(dir=disk) as file, mmap.mmap(-1, mmap.PAGESIZE) as page:
            direct = os.open(file.name, os.O_WRONLY | os.O_DIRECT)
            try:
                os.write(direct, page)
            finally:
                os.close(direct)
    except OSError as e:
        raise ConfigError(
            f"{field}={str(disk)!r} on {host()} cannot be written past the page cache ({e.strerror}); "
            f"name a folder on a local disk that you may write to"
        ) from None


def _remove_if_left(folder: Path) -> None:
    try:
        lock = open(folder / _LOCK, "a")  # noqa: SIM115
    except OSError:  # removed meanwhile, or another user's
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its process lives
        lock.close()
    else:
        _remove(folder, lock)


def _remove(folder: Path, lock: IO[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()
