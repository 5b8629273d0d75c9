"""Differentiable collectives along dim 0, as operators that torch.compile traces: gather, and its transpose.

Used by tensor and context parallel alike. Both wait at once: what overlaps with what is the compiler's business.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Group(NamedTuple):
    """The ranks of one axis of the mesh, as this rank sees them. A name, since compiled code can hold no group."""

    name: str
    size: int
    rank: int


def axis_group(mesh: DeviceMesh) -> Group:
    """Of a mesh with one axis."""
    return Group(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


def all_gather(x: Tensor, group: Group) -> Tensor:
    """[N, ...] of every rank as [size x N, ...] on every rank; the backward sums and scatters."""
    return _AllGather.apply(x, group)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks of [size x N, ...], of which this rank keeps its [N, ...]; the backward gathers."""
    return _ReduceScatter.apply(x, group)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return _scatter(grads[0], ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.group), None


def _gather(x: Tensor, group: Group) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), group.size, group.name))


def _scatter(x: Tensor, group: Group) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name))
