"""`pretrain plan --trace`: the real model on a fake world, one step of it, and what that holds in memory on one rank.

The engine is built and driven as the trainer does it, every axis of the mesh at full size, but tensors are fake (sizes
without storage) and the process group answers at once, so 512 ranks of a 70B model fit a laptop. Each storage is
counted from its making to its end. Traced in eager mode, with the kernels of CUDA; torch.compile keeps about the same
between blocks and less inside. What the allocator, CUDA and NCCL keep beyond tensors is not in it: see `plan.memory`.
"""

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretrain.config import Config, Layout
from pretrain.data.loader import Batch
from pretrain.errors import ConfigError
from pretrain.model.attention import Kernel
from pretrain.model.llama import Llama
from pretrain.parallel.build import build_model, describe_attention
from pretrain.parallel.fsdp import FsdpEngine
from pretrain.parallel.mesh import build_meshes
from pretrain.train.optimizer import build_optimizer

GIB = 2**30


class Trace(NamedTuple):
    """GiB of tensors on one rank."""

    layout: Layout
    rank: int
    kernel: Kernel
    parameters: float
    optimizer: float
    gradients: float  # that stay between the last backward and the update
    activations: float  # alive between the last forward and its backward, with weights that stay gathered
    forward_peak: float
    backward_peak: float
    step_peak: float
    seconds: float  # that tracing took

    @property
    def peak(self) -> float:
        return max(self.forward_peak, self.backward_peak, self.step_peak)


def trace(cfg: Config, gpus: int, *, rank: int = 0, micro_batches: int = 2) -> Trace:
    """Trace rank `rank` of `gpus`: the first `micro_batches` of a step (two show what accumulation adds)."""
    if cfg.parallel.engine != "fsdp":
        raise ConfigError(f'--trace needs parallel.engine="fsdp", not "{cfg.parallel.engine}"')
    start = time.perf_counter()
    layout = cfg.layout(gpus)
    cfg = cfg.model_copy(update={"compile": cfg.compile.model_copy(update={"enabled": False})})
    kernel, _ = describe_attention(cfg, torch.device("cuda"))
    cpu = torch.device("cpu")
    with _fake_world(rank, gpus):
        meshes = build_meshes(layout, cpu)
        fake, ledger = FakeTensorMode(allow_non_fake_inputs=True), Ledger()

        def without_memory(model: Llama) -> None:
            with fake, ledger:
                model.to_empty(device=cpu)

        engine = FsdpEngine(
            cfg,
            lambda: build_model(cfg, torch.device("cuda"), meshes),
            lambda model: build_optimizer(model, cfg.optimizer),
            meshes,
            cpu,
            materialise=without_memory,
        )
        with fake, ledger:
            parameters = ledger.now
            engine.state()  # makes the moments
            optimizer = ledger.now - parameters
            batch = _batch(cfg)
            idle, peaks = ledger.now, {"forward": 0.0, "backward": 0.0}
            count = min(micro_batches, layout.accumulation)
            for index in range(count):
                before = ledger.now
                ledger.peak = ledger.now
                sums = engine.forward(batch)
                activations = ledger.now - before
                peaks["forward"] = max(peaks["forward"], ledger.peak)
                ledger.peak = ledger.now
                engine.backward(sums.total, last=index == count - 1)
                peaks["backward"] = max(peaks["backward"], ledger.peak)
                del sums
            gradients = ledger.now - idle
            ledger.peak = ledger.now
            engine.step(cfg.optimizer.lr)
    return Trace(
        layout=layout,
        rank=rank,
        kernel=kernel,
        parameters=parameters / GIB,
        optimizer=optimizer / GIB,
        gradients=gradients / GIB,
        activations=activations / GIB,
        forward_peak=peaks["forward"] / GIB,
        backward_peak=peaks["backward"] / GIB,
        step_peak=ledger.peak / GIB,
        seconds=time.perf_counter() - start,
    )


def render(traced: Trace) -> str:
    cut = traced.layout
    lines = [
        f"rank {traced.rank} of dp_replicate {cut.dp_replicate} x dp_shard {cut.dp_shard} x cp {cut.cp} x tp {cut.tp}, "
        f"attention {traced.kernel}, traced in {traced.seconds:.0f} s"
    ]
    for name in ("parameters", "optimizer", "gradients", "activations", "forward_peak", "backward_peak", "step_peak"):
        lines.append(f"{name.replace('_', ' '):<14} {getattr(traced, name):8.2f} GiB")
    return "\n".join([*lines, f"{'peak':<14} {traced.peak:8.2f} GiB"])


def as_json(traced: Trace) -> dict[str, Any]:
    sizes = traced._asdict()
    layout = sizes.pop("layout")._asdict()
    return {"layout": layout, "peak": traced.peak, **sizes}


class Ledger(TorchDispatchMode):
    """Counts the bytes of every storage that is made while it is on, until it is freed or resized."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0.0
        self._sizes: dict[int, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._take(leaf._local_tensor if isinstance(leaf, DTensor) else leaf)
        return out

    def __enter__(self) -> "Ledger":
        self._resize = torch.UntypedStorage.resize_  # FSDP frees and refills gathered weights by it

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            self._resize(storage, size)
            if id(storage) in self._sizes:
                self._set(id(storage), size)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _take(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        if id(storage) not in self._sizes:
            weakref.finalize(storage, self._drop, id(storage)).atexit = False
            self._set(id(storage), storage.nbytes())

    def _set(self, key: int, size: float) -> None:
        self.now += size - self._sizes.get(key, 0.0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@contextmanager
def _fake_world(rank: int, size: int) -> Iterator[None]:
    """Be one rank of a process group that never communicates."""
    # Importing these registers the backend, and the sizes of its collectives' results.
    import torch.distributed._tools.fake_collectives
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    dist.init_process_group("fake", rank=rank, world_size=size, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _batch(cfg: Config) -> Batch:
    """Rows of padding; how many documents a row may have depends on the data, a tensor of a few KiB."""
    rows, length = cfg.train.micro_batch_size, cfg.data.seq_len
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    places = torch.zeros(rows, length, dtype=torch.int32)
    return Batch(tokens, tokens.clone(), places, places.clone(), torch.zeros(rows + 1, dtype=torch.int32), length)
