"""What the trainer asks of an engine, whichever one shards the model: forward, backward, step, state.

Engines sum gradients over ranks and micro-batches; the loop has divided the loss by the targets of the global batch.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pretrain.config import Config
from pretrain.data.loader import Batch
from pretrain.model.loss import LossSums

Keep = Callable[[Tensor], bool]
"""Told the global gradient norm, whether the update is made: asked once a step, with the same answer on all ranks."""
State = dict[str, Tensor]
"""Canonical names to whole-shaped tensors (DTensors where sharded): `model.NAME`, `optim.MOMENT.NAME`, `optim.step`."""


class Held(NamedTuple):
    """A weight or moment, or the part of it that is in this rank's memory."""

    name: str
    local: Tensor
    groups: tuple[Any, ...] = ()  # process groups (None: the world) whose ranks ought to hold the same bits


class Forward(Protocol):
    """As much of an engine as validation needs."""

    @property
    def model(self) -> nn.Module:
        """The wrapped model."""
        ...

    def forward(self, batch: Batch) -> LossSums:
        """Sums over this rank's targets of a micro-batch; differentiable while gradients are on."""
        ...


class Engine(Forward, Protocol):
    def backward(self, loss: Tensor, *, last: bool, reduce: bool = False) -> None:
        """Accumulate gradients in fp32; `last` marks the step's last micro-batch, `reduce` one after which gradients
        are looked at."""
        ...

    def grad_squares(self) -> dict[str, Tensor]:
        """This rank's share of each parameter's squared gradient norm, by name, before clipping: the sums over ranks
        are whole. Between a backward that was `last` or reduced and the step; collective."""
        ...

    def step(self, lr: float, keep: Keep | None = None) -> Tensor:
        """Clip, update, zero the gradients; the global gradient norm before clipping, on the device, not awaited.

        Where `keep` says no, weights and moments stay as they are.
        """
        ...

    def state(self) -> State:
        """Everything that a resume needs of weights and optimizer: the live tensors, or copies of them."""
        ...

    @property
    def state_is_copied(self) -> bool:
        """Whether `state` gives copies in host memory, which no later step changes."""
        ...

    def held(self) -> Iterator[Held]:
        """What this rank holds of weights and optimizer, without a copy or a word to other ranks."""
        ...

    def load(self, state: State) -> None:
        """Take a state of the same names, read in place into what `state()` gave."""
        ...

    def close(self) -> None:
        """Remove what it has on disks."""
        ...


def model_inputs(batch: Batch, *, mask_documents: bool, kernel: str) -> dict[str, Tensor | None]:
    """The keyword arguments of Llama.forward for a micro-batch."""
    varlen = kernel == "varlen"
    return {
        "positions": batch.positions,
        "documents": batch.documents if mask_documents and not varlen else None,
        "cu_seqlens": batch.cu_seqlens if varlen else None,
        "labels": batch.labels,
    }


def compute_dtype(cfg: Config) -> torch.dtype:
    return torch.bfloat16 if cfg.precision.compute == "bf16" else torch.float32


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of global norm `norm` are multiplied with so that it becomes at most `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
