"""Processes and devices: who this rank is, the process groups, and small agreements over the CPU.

The one file that reads the launcher's environment (torchrun's variables, or SLURM's where ranks are srun tasks).
Agreements between ranks run over gloo and never touch the device, so they never wait for queued kernels.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pretrain.errors import ConfigError, MachineError


class World(NamedTuple):
    """This process among all of a job."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    agreement: Any = None  # gloo group over all ranks; None: the default group is gloo already

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and talks."""
        return self.rank == 0


def launch_environment() -> dict[str, int]:
    """rank, size and local rank as the launcher set them; a lone process is rank 0 of 1."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif "SLURM_PROCID" in env and "SLURM_NTASKS" in env and "MASTER_ADDR" in env:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    else:
        return {"rank": 0, "size": 1, "local_rank": 0}
    try:
        return dict(zip(("rank", "size", "local_rank"), (int(env[n]) for n in names), strict=True))
    except (KeyError, ValueError) as e:
        raise ConfigError(
            f"the launcher's environment is incomplete ({e}); start ranks with torchrun or srun"
        ) from None


def under_torchrun() -> bool:
    """Whether torchrun watches this process and turns its status into a restart or a failure of the job."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restart_count() -> int:
    """How often torchrun has restarted its workers in this job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextmanager
def world(timeout_seconds: float) -> Iterator[World]:
    """Join all ranks; leave without waiting for the others when an exception passes through."""
    ranks = launch_environment()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", ranks["local_rank"]) if cuda else torch.device("cpu")
    if cuda:
        if ranks["local_rank"] >= torch.cuda.device_count():
            raise MachineError(
                f"local rank {ranks['local_rank']} has no GPU: this node shows {torch.cuda.device_count()}; "
                f"start as many processes a node as it has GPUs"
            )
        torch.cuda.set_device(device)
    if "MASTER_PORT" not in os.environ and ranks["size"] > 1:
        raise ConfigError("MASTER_ADDR and MASTER_PORT are not set; start ranks with torchrun or pretrain-launch")
    timeout = timedelta(seconds=timeout_seconds)
    try:
        dist.init_process_group(
            backend="cuda:nccl,cpu:gloo" if cuda else "gloo",
            rank=ranks["rank"],
            world_size=ranks["size"],
            timeout=timeout,
            device_id=device if cuda else None,
            store=_meeting_point(ranks, timeout),
        )
    except (dist.DistNetworkError, dist.DistStoreError) as e:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise MachineError(f"rank {ranks['rank']} could not meet the others at {address}: {e}") from None
    agreement = dist.new_group(backend="gloo", timeout=timeout) if cuda else None
    yield World(ranks["rank"], ranks["size"], ranks["local_rank"], device, agreement)
    if cuda:
        torch.cuda.synchronize()
    dist.destroy_process_group()


def _meeting_point(ranks: dict[str, int], timeout: timedelta) -> dist.Store:
    """The store that ranks meet in. torchrun keeps one store over its restarts without clearing it (torch 2.13), and
    ranks that read the addresses of the dead hang, so each restart has a room of its own in it."""
    if ranks["size"] == 1:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", ranks["rank"], ranks["size"], timeout=timeout))
    return dist.PrefixStore(f"restart_{restart_count()}", store)


def agree_max(value: int, world: World) -> int:
    """The largest of all ranks' values, over the CPU."""
    if world.size == 1:
        return value
    box = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(box, dist.ReduceOp.MAX, group=world.agreement)
    return int(box)


def gather_objects(value: Any, world: World) -> list[Any]:
    """Every rank's small value, in rank order, on every rank."""
    if world.size == 1:
        return [value]
    out: list[Any] = [None] * world.size
    dist.all_gather_object(out, value, group=world.agreement)
    return out


def broadcast_object(value: Any, world: World) -> Any:
    """Rank 0's small value, on every rank."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=world.agreement)
    return box[0]


def all_ranks_ok(error: BaseException | None, world: World, otherwise: type[Exception] = ConfigError) -> None:
    """Raise on every rank when any failed: there the error, on the others `otherwise` with the first one's message."""
    texts = gather_objects(None if error is None else f"on {host()} failed: {error}", world)
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise otherwise(f"rank {rank} {text}")


def host() -> str:
    return socket.gethostname()
