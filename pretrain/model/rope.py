"""Rotary position embedding: cosine and sine tables in fp32, and the turn of neighbouring pairs.

The tables are computed from the config and the positions of a micro-batch at every forward, never stored: a module
built on the meta device or loaded from a checkpoint has nothing here that could be left uninitialised. Pairs are
neighbours (x0, x1), (x2, x3), ... as in the paper (arXiv:2104.09864); `model.hf` permutes for layouts that pair halves.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.config import ModelConfig, RopeScaling


class RopeTable(NamedTuple):
    cos: Tensor  # fp32 [B, T, Q/2]
    sin: Tensor  # fp32 [B, T, Q/2]


def inverse_frequencies(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Radians a position, [Q/2], with Llama 3.1's scaling where `rope_scaling` is set.

    Computed by the same operations, in the same precision, as the published models were trained with: at position
    100,000 one unit in the last place of a frequency already moves an angle by 0.006 radians.
    """
    exponents = torch.arange(0, model.head_dim, 2, device=device).to(dtype) / model.head_dim
    frequencies = 1.0 / model.rope_theta**exponents
    return frequencies if model.rope_scaling is None else _scaled(frequencies, model.rope_scaling)


def rope_table(model: ModelConfig, positions: Tensor, dtype: torch.dtype = torch.float32) -> RopeTable:
    """Tables for integer `positions` [B, T]; `dtype` is fp32, or fp64 in a reference run."""
    assert dtype in (torch.float32, torch.float64), dtype
    frequencies = inverse_frequencies(model, positions.device, dtype)
    angles = positions.to(dtype).unsqueeze(-1) * frequencies
    return RopeTable(angles.cos(), angles.sin())


def rotate(x: Tensor, table: RopeTable) -> Tensor:
    """Turn the neighbouring pairs of x [B, T, H, Q] by the table's angles; in the table's dtype, returned in x's.

    Read as complex numbers, x is multiplied by exp(i * angle). Eager mode does just that, in one pass over memory;
    compiled code does the same in real arithmetic, because the compiler does not fuse complex numbers.
    """
    if not torch.compiler.is_compiling():
        turn = torch.complex(table.cos, table.sin).unsqueeze(2)
        pairs = torch.view_as_complex(x.to(table.cos.dtype).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)
    cos, sin = table.cos.unsqueeze(2), table.sin.unsqueeze(2)
    even, odd = x.unflatten(-1, (-1, 2)).to(cos.dtype).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide slow frequencies by `factor`, keep fast ones, blend between (arXiv:2407.21783 and its released code)."""
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = (
        scaling.original_max_seq_len / scaling.low_freq_factor,
        scaling.original_max_seq_len / scaling.high_freq_factor,
    )
    blend = (scaling.original_max_seq_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    slow = frequencies / scaling.factor
    between = (1 - blend) * slow + blend * frequencies
    return torch.where(wavelengths > longest, slow, torch.where(wavelengths < shortest, frequencies, between))
