"""The head and its loss in one: linear + cross-entropy (+ z-loss) over a chunk of positions at a time.

Logits of a vocabulary of 128,256 in fp32 are the largest tensor of a training step, so they never exist whole: each
chunk's logits are made, reduced to a loss and turned into their gradient in place, forward and backward in one pass.
Sums, never means: the caller divides by the targets of the global batch.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORE = -100  # label of a position that is no target


class LossSums(NamedTuple):
    """Sums over the targets of a micro-batch, fp32 scalars on the device."""

    total: Tensor  # cross-entropy + z-loss; the one to differentiate
    cross_entropy: Tensor  # nats
    z_loss: Tensor  # coefficient x squared log-sum-exp
    targets: Tensor  # int64, their number


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunks: int, z_loss: float) -> LossSums:
    """Loss of predicting `labels` [N] (IGNORE where none) from `hidden` [N, D] through the head `weight` [V, D].

    The products run in hidden's dtype; softmax, loss and the accumulation of the weight's gradient over chunks in fp32
    (fp64 for fp64 inputs). z-loss is `z_loss` x the sum of logsumexp² (PaLM, arXiv:2204.02311, section 5).
    """
    # autograd.Function.forward sees gradients off and `needs_input_grad` on, also under no_grad: so it is told.
    learns = torch.is_grad_enabled()
    total, cross_entropy, z = _LinearCrossEntropy.apply(hidden, weight, labels, chunks, z_loss, learns)
    return LossSums(total, cross_entropy, z, (labels != IGNORE).sum())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunks: int, z_loss: float, learns: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        accumulate = torch.promote_types(hidden.dtype, torch.float32)
        need_hidden, need_weight = (learns and need for need in ctx.needs_input_grad[:2])
        head = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=accumulate) if need_weight else None
        sums = torch.zeros(2, dtype=accumulate, device=hidden.device)
        rows = -(-hidden.size(0) // chunks)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.size(0), rows):
                piece = slice(start, start + rows)
                logits = (hidden[piece] @ head.t()).to(accumulate)
                grad = _chunk_loss(logits, labels[piece], z_loss, sums, need_grad=need_hidden or need_weight)
                if grad is None:
                    continue
                grad = grad.to(hidden.dtype)
                if grad_hidden is not None:
                    torch.mm(grad, head, out=grad_hidden[piece])
                if grad_weight is not None:
                    if grad.dtype == accumulate:
                        grad_weight.addmm_(grad.t(), hidden[piece])
                    else:
                        grad_weight += grad.t() @ hidden[piece]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        cross_entropy, z = (part.clone() for part in sums)
        ctx.mark_non_differentiable(cross_entropy, z)
        return cross_entropy + z, cross_entropy, z

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        scale = grads[0]
        grad_hidden, grad_weight = ctx.saved_tensors
        weight_dtype = ctx.weight_dtype
        # In place: the weight's gradient is the largest tensor here, and backward runs once.
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(scale)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(scale).to(weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _chunk_loss(logits: Tensor, labels: Tensor, z_loss: float, sums: Tensor, *, need_grad: bool) -> Tensor | None:
    """Add this chunk's sums to `sums` (cross-entropy, z); the gradient by the logits, written over them."""
    valid = labels != IGNORE
    index = labels.masked_fill(~valid, 0).unsqueeze(1)
    peak = logits.amax(dim=1, keepdim=True)
    picked = logits.gather(1, index).squeeze(1)
    exponentials = logits.sub_(peak).exp_()
    total = exponentials.sum(dim=1)
    log_sum_exp = total.log() + peak.squeeze(1)
    zero = torch.zeros((), dtype=logits.dtype, device=logits.device)
    sums[0] += torch.where(valid, log_sum_exp - picked, zero).sum()
    if z_loss:
        sums[1] += z_loss * torch.where(valid, log_sum_exp.square(), zero).sum()
    if not need_grad:
        return None
    slope = 1 + 2 * z_loss * log_sum_exp if z_loss else torch.ones_like(total)
    weight = torch.where(valid, slope / total, zero)
    grad = exponentials.mul_(weight.unsqueeze(1))
    return grad.scatter_add_(1, index, -valid.to(grad.dtype).unsqueeze(1))
