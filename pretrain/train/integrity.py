"""Looks for what no error tells of: a bit that flipped on one rank, a device whose results are not what they should be.

Copies that ranks ought to share bit for bit are compared by digest, every number is looked at, and a step is computed
a second time. Collective; each function gives the same sentence on every rank, or None.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pretrain.dist import World, gather_objects, host
from pretrain.parallel.engine import Engine, Held

_PIECE = 1 << 20  # elements that are digested at once
_NAMED = 3  # places that a message names


class Outcome(NamedTuple):
    """What a step came to on this rank; bits, since NaN is no equal of itself."""

    loss: Tensor
    norm: Tensor


def differing_copies(held: Iterable[Held], world: World) -> str | None:
    """Names a tensor that is not the same on all the ranks that hold it, and who holds what."""
    by_group: dict[Any, list[tuple[str, Tensor]]] = {}
    for one in held:
        for group in one.groups:
            by_group.setdefault(group, []).append((one.name, digest(one.local)))
    mine: list[str] = []
    for group, named in by_group.items():
        digests = torch.stack([value for _, value in named])
        both = torch.stack([digests, ~digests])  # the least is the complement of the greatest complement
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        for (name, value), same in zip(named, (both[0] == ~both[1]).tolist(), strict=True):
            if not same:
                mine.append(f"{name} has digest {int(value) & 0xFFFFFFFF:08x}")
    return _told("copies differ between ranks", mine, world)


def numbers_that_are_none(held: Iterable[Held], world: World) -> str | None:
    """Names a weight or moment that is not finite."""
    names, good = zip(*((one.name, torch.isfinite(one.local).all()) for one in held), strict=True)
    bad = [f"{name} is not finite" for name, fine in zip(names, torch.stack(good).tolist(), strict=True) if not fine]
    return _told("weights or moments are no numbers", bad, world)


class Replay:
    """Made before an update, it can take the engine back to there, and compare a second one with the first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = {name: _local(t).to("cpu", copy=True) for name, t in engine.state().items()}

    def compare(self, first: Outcome, again: Callable[[], Outcome], world: World) -> str | None:
        """What differs when the update is done over; None: nothing, and the engine stands where it stood."""
        after = self._digests()
        state = self._engine.state()
        with torch.no_grad():
            for name, tensor in state.items():
                _local(tensor).copy_(self._before[name])
        self._engine.load(state)
        second = again()
        named = zip(Outcome._fields, first, second, strict=True)
        bad = [f"{name} {float(a):.9g}, then {float(b):.9g}" for name, a, b in named if digest(a) != digest(b)]
        bad += [f"{name} differs after it" for name, value in self._digests().items() if value != after[name]]
        return _told("a step computed twice gave two results", bad, world)

    def _digests(self) -> dict[str, int]:
        return {one.name: int(digest(one.local)) for one in self._engine.held()}


def digest(tensor: Tensor) -> Tensor:
    """int64 []: changes with any single bit, and with the places of unequal elements; on the tensor's device."""
    bits = tensor.detach().reshape(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, piece in enumerate(bits.split(_PIECE)):
        place = torch.arange(number * _PIECE, number * _PIECE + len(piece), device=tensor.device)
        total += (piece.long() * (2 * place + 1)).sum()  # an odd factor loses no bit, modulo 2^64
    return total


def _told(what: str, mine: list[str], world: World) -> str | None:
    """One sentence of all ranks' findings, those of the ranks with most to say about themselves first."""
    found = gather_objects((host(), mine[:_NAMED], len(mine)), world)
    texts = [
        f"rank {rank} ({name}): {', '.join(some)}" + (f" and {count - len(some)} more" if count > len(some) else "")
        for rank, (name, some, count) in enumerate(found)
        if count
    ]
    return f"{what}; {'; '.join(texts[:8])}" if texts else None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
