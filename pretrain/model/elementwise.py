"""RMSNorm and SwiGLU as functions that keep little for backward: their inputs, and one number a row.

Written out for eager mode, where autograd over the plain formula keeps every intermediate and takes twice the passes
over memory. Under torch.compile the plain formula is used: the compiler fuses it and chooses itself what to keep.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps), in fp32 (fp64 stays fp64), cast back, times the gain `weight` [D]; x [..., D]."""
    if not torch.compiler.is_compiling():
        return _RMSNorm.apply(x, weight, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).type_as(x) * weight.type_as(x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv:2002.05202)."""
    if not torch.compiler.is_compiling():
        return _SwiGLU.apply(gate, up)
    return F.silu(gate) * up


class _RMSNorm(torch.autograd.Function):
    """With s the row's scale and n = s x: dx = s (w g - n mean(w g n)), dw = sum over rows of g n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = square.div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).type_as(x).mul_(weight.type_as(x))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide, grad, gain = (t.to(scale.dtype) for t in (x, grads[0], weight))
        product = (grad * wide).flatten(0, -2)
        grad_weight = scale.flatten() @ product
        mean = (product @ gain).view_as(scale).div_(x.size(-1))
        grad_x = (grad * scale).mul_(gain).addcmul_(wide, scale.pow(3).mul_(mean), value=-1)
        return grad_x.type_as(x), grad_weight.type_as(weight), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0] * up, gate), F.silu(gate).mul_(grads[0])
