"""A cluster file: what a site's SLURM wants and has, as frozen pydantic tables read from TOML.

Everything that is a property of the machines and not of the run. `slurm` turns it and a config into a batch script.
"""

import difflib
import re
import tomllib
import typing
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from pretrain.config import Table
from pretrain.errors import ConfigError


class Slurm(Table):
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str  # * limit of one job, as sbatch takes it: [days-]hours:minutes:seconds; a longer run is a chain of jobs
    signal_seconds: PositiveInt = (
        300  # warning before the limit; SLURM looks every 30 s, so 60 is the least that is safe
    )
    requeue: Literal["scontrol", "resubmit"] = "scontrol"  # resubmit: where users may not requeue
    exclude: tuple[str, ...] = ()  # nodes never to use
    extra: tuple[str, ...] = ()  # further #SBATCH options, such as "--constraint=h100"

    @field_validator("time")
    @classmethod
    def _readable(cls, value: str) -> str:
        seconds_of(value)
        return value

    @field_validator("extra")
    @classmethod
    def _options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for line in value:
            if not line.startswith("-") or "\n" in line:
                raise ValueError(f"{line!r} is no sbatch option; write it as --name=value")
        return value

    @model_validator(mode="after")
    def _warned_in_time(self) -> "Slurm":
        if self.signal_seconds + 60 > seconds_of(self.time):
            raise ValueError(
                f"signal_seconds={self.signal_seconds} leaves less than a minute of time={self.time}; "
                "lengthen time or warn later"
            )
        return self


class Node(Table):
    gpus: NonNegativeInt  # * GPUs of a node, one rank each; 0: ranks on CPUs
    ranks: PositiveInt | None = None  # only where gpus=0: ranks of a node
    cpus: PositiveInt  # * CPUs of a node that a job may have
    memory: str | None = "0"  # sbatch --mem; "0" is all of a node's; leave out with memory = ""
    gpu_option: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"  # how this SLURM is asked for GPUs
    exclusive: bool = True  # no other job on the node

    @model_validator(mode="after")
    def _ranks(self) -> "Node":
        if self.gpus and self.ranks is not None:
            raise ValueError(f"ranks={self.ranks} beside gpus={self.gpus}: each GPU has one rank; leave ranks out")
        if not self.gpus and self.ranks is None:
            raise ValueError("gpus=0 needs ranks (processes of a node)")
        if self.cpus < self.processes:
            raise ValueError(f"cpus={self.cpus} is less than one for each of {self.processes} ranks")
        return self

    @property
    def processes(self) -> int:
        """Ranks of a node."""
        return self.gpus or self.ranks or 1


class Software(Table):
    activate: tuple[str, ...] = ()  # shell lines that make `python` the right one: modules, a venv
    python: str = "python"
    container: tuple[str, ...] = ()  # srun options that enter a container, such as "--container-image=PATH" (pyxis)
    host_python: str = "python3"  # beside container: Python >= 3.11 outside it, for the batch script; bare


class Network(Table):
    interface: str | None = None  # network interface of rendezvous, gloo and NCCL's bootstrap, such as "ib0"
    port_base: Annotated[int, Field(ge=1024, le=55_000)] = 20_000  # a job's port lies in the 10,000 from here


class Retry(Table):
    crashes: NonNegativeInt = 3  # starts in a row that may crash or get nowhere before the job gives up
    torchrun_restarts: NonNegativeInt = 0  # restarts inside an allocation; torchrun only
    node_failures: PositiveInt = 2  # a node that was first to fail this often is excluded


class Health(Table):
    enabled: bool = True
    timeout_seconds: PositiveInt = 300
    max_clock_skew_seconds: Annotated[float, Field(gt=0)] = 1.0
    min_free_disk_gib: Annotated[float, Field(ge=0)] = 20.0  # in the run's folder
    max_used_memory_gib: Annotated[float, Field(ge=0)] = 2.0  # of a GPU before anything has started
    min_allreduce_gb_per_second: Annotated[float, Field(ge=0)] = 0.0  # bus bandwidth over all ranks; 0: any
    min_share_of_median: Annotated[float, Field(ge=0, le=1)] = 0.7  # of matmul speed and pairwise bandwidth
    message_mib: PositiveInt = 256  # of the all-reduce


class Cluster(Table):
    name: Annotated[str, Field(min_length=1)]  # *
    slurm: Slurm
    node: Node
    software: Software = Software()
    environment: dict[str, str] = Field(default_factory=dict)  # exported on every node: NCCL settings, caches, proxies
    network: Network = Network()
    retry: Retry = Retry()
    health: Health = Health()

    @field_validator("environment")
    @classmethod
    def _names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r} is no name of an environment variable")
        return value


def load_cluster(path: str | Path) -> Cluster:
    """The cluster of a TOML file; ConfigError names the key, its value and the mend."""
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such cluster file; docs/slurm.md says how to write one") from None
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: cannot be read as a cluster file: {e}") from None
    try:
        return Cluster.model_validate(raw)
    except ValidationError as e:
        raise ConfigError("; ".join(f"{path}: {_explain(error)}" for error in e.errors())) from None


def seconds_of(time: str) -> int:
    """Seconds of a SLURM time: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    days, _, rest = time.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in parts) or len(parts) > 3 or (days and not days.isdigit()):
        raise ValueError(f"{time!r} is no time; write hours:minutes:seconds or days-hours:minutes:seconds")
    numbers = [int(part) for part in parts]
    if days:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 1:
        return numbers[0] * 60
    hours, minutes, seconds = (0, *numbers)[-3:]
    return (hours * 60 + minutes) * 60 + seconds


def _explain(error: typing.Any) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "cluster file"
    value, kind = error.get("input"), error["type"]
    if kind == "missing":
        return f"{where} is missing; set it"
    if kind == "extra_forbidden":
        keys = _keys_beside(error["loc"])
        near = difflib.get_close_matches(str(error["loc"][-1]), keys, 1, 0.6)
        return f"{where}={value!r}: unknown key; " + (
            f"did you mean {near[0]}?" if near else f"the keys here are {', '.join(keys)}"
        )
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if isinstance(value, dict) else f"{where}={value!r}: {message}"


def _keys_beside(loc: tuple[typing.Any, ...]) -> list[str]:
    table: typing.Any = Cluster
    for part in loc[:-1]:
        field = table.model_fields.get(part)
        table = field.annotation if field else None
        if not (isinstance(table, type) and issubclass(table, BaseModel)):
            return []
    return list(table.model_fields)
