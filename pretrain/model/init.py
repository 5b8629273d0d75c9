"""Initial weights: each number is a hash of (seed, parameter name, index), so any shard makes its own and no other.

A run starts from bit-equal fp32 weights on every engine, mesh and world size, and a rank of a 405B model neither draws
nor holds more than its shard. A generator would not do: on sharded tensors it repeats one rank's numbers, or has
to draw the whole tensor everywhere.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

_CUT = 3.0  # truncation of the normal, in standard deviations before truncation
_PIECE = 1 << 18  # elements drawn at a time: bounds the scratch memory, stays in cache


def init_std(name: str, shape: torch.Size, n_layers: int) -> float | None:
    """Standard deviation of a parameter's truncated normal, by name; None for norm gains, which start at 1.

    fan_in^-0.5 for every matrix; the two that write into the residual stream (o_proj, down_proj) are divided by
    sqrt(2 n_layers), so that the stream's variance does not grow with depth (GPT-2); d_model^-0.5 for the
    embedding, so that a tied head starts as an untied one does.
    """
    if len(shape) == 1:
        return None
    std = shape[1] ** -0.5
    return std / math.sqrt(2 * n_layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else std


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, n_layers: int) -> None:
    """Fill every parameter, plain or DTensor, in place."""
    for name, param in model.named_parameters():
        fill_parameter(name, param, param.shape, seed, n_layers)


@torch.no_grad()
def fill_parameter(name: str, param: Tensor, shape: torch.Size, seed: int, n_layers: int) -> None:
    """Fill one parameter whose global shape is `shape`; of a DTensor only this rank's part."""
    local, offsets = local_part(param)
    std = init_std(name, shape, n_layers)
    if std is None:
        local.fill_(1.0)
        return
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little", signed=True)
    columns = torch.arange(offsets[1], offsets[1] + local.size(1), device=local.device)
    rows_at_once = max(1, _PIECE // max(1, local.size(1)))
    for start in range(0, local.size(0), rows_at_once):
        piece = local[start : start + rows_at_once]
        first = offsets[0] + start
        rows = torch.arange(first, first + piece.size(0), device=local.device)
        index = rows.unsqueeze(1) * shape[1] + columns
        piece.copy_(_truncated_normal(index, key, std))


def local_part(param: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a parameter and its offset in the whole along each dim."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(param, DTensor):
        return param, (0,) * param.dim()
    _, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return param.to_local(), tuple(offsets)


def _truncated_normal(index: Tensor, key: int, std: float) -> Tensor:
    """N(0, std²) cut at _CUT deviations (std before the cut), fp32: the inverse distribution of hashed uniforms."""
    uniform = ((_hash(index, key) >> 40) & ((1 << 24) - 1)).float().add_(0.5).mul_(2.0**-24)
    edge = math.erf(_CUT / math.sqrt(2))
    return torch.erfinv(uniform.mul_(2 * edge).sub_(edge)).mul_(std * math.sqrt(2))


def _hash(index: Tensor, key: int) -> Tensor:
    """splitmix64's finaliser (Steele, Lea, Flood 2014) of key + (index + 1) x golden ratio; int64 wraps."""
    x = (index + 1).mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    x = x.bitwise_xor_(_shift(x, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    x = x.bitwise_xor_(_shift(x, 27)).mul_(_signed(0x94D049BB133111EB))
    return x.bitwise_xor_(_shift(x, 31))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; int64's own is arithmetic."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
