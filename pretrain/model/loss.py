"""The head and its loss in one: linear + cross-entropy (+ z-loss) over a chunk of positions at a time.

Logits of a vocabulary of 128,256 in fp32 are the largest tensor of a training step, so they never exist whole: each
chunk's logits are made, reduced to a loss and turned into their gradient in place, forward and backward in one pass.
Sums, never means: the caller divides by the targets of the global batch.
"""

from collections.abc import Callable
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


class VocabularySlice(NamedTuple):
    """Where a head's rows are in the whole vocabulary, when ranks hold a slice each."""

    first: int  # token id of the first row
    of_every_rank: Callable[[Tensor], Tensor]  # stacks a tensor of every rank: [...] to [ranks, ...]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunks: int,
    z_loss: float,
    vocabulary: VocabularySlice | None = None,
) -> LossSums:
    """Loss of predicting `labels` [N] (IGNORE where none) from `hidden` [N, D] through the head `weight` [V, D].

    The products run in hidden's dtype; softmax, loss and the accumulation of the weight's gradient over chunks in fp32
    (fp64 for fp64 inputs). z-loss is `z_loss` x the sum of logsumexp² (PaLM, arXiv:2204.02311, section 5).
    With `vocabulary`, `weight` is a slice of the head: every rank gets the whole loss, and its slice's part of the
    gradients, of which hidden's are to be summed over ranks.
    """
    # autograd.Function.forward sees gradients off and `needs_input_grad` on, also under no_grad: so it is told.
    learns = torch.is_grad_enabled()
    total, cross_entropy, z = _LinearCrossEntropy.apply(hidden, weight, labels, chunks, z_loss, learns, vocabulary)
    return LossSums(total, cross_entropy, z, (labels != IGNORE).sum())


def loss_chunks(positions: int, most: int) -> int:
    """Pieces to cut a micro-batch into: at most `most`, none below 512 positions.

    Each piece adds to the whole gradient of the weight, which takes as long as a product with some 50 positions.
    """
    return max(1, min(most, positions // 512))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunks: int,
        z_loss: float,
        learns: bool,
        vocabulary: VocabularySlice | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        accumulate = torch.promote_types(hidden.dtype, torch.float32)
        need_hidden, need_weight = (learns and need for need in ctx.needs_input_grad[:2])
        head = weight.to(hidden.dtype)
        rows = -(-hidden.size(0) // chunks)
        # Made once: the system hands out a fresh tensor of this size page by page, which takes longer than filling it.
        logits = hidden.new_empty(rows, head.size(0))
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=accumulate) if need_weight else None
        sums = torch.zeros(2, dtype=accumulate, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.size(0), rows):
                piece = slice(start, start + rows)
                inputs = hidden[piece]
                grad = torch.mm(inputs, head.t(), out=logits[: inputs.size(0)])
                factor = _softmax_loss_(grad, labels[piece], z_loss, sums, vocabulary)
                if grad_hidden is not None:
                    torch.mm(grad, head, out=grad_hidden[piece]).mul_(factor)
                if grad_weight is not None:
                    _add_product_(grad_weight, grad.t(), (inputs * factor).to(inputs.dtype))
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        cross_entropy, z = (part.clone() for part in sums)
        ctx.mark_non_differentiable(cross_entropy, z)
        return cross_entropy + z, cross_entropy, z

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        grad_hidden, grad_weight = ctx.saved_tensors
        weight_dtype = ctx.weight_dtype
        # In place: the weight's gradient is the largest tensor here, and backward runs once.
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(scale)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(scale).to(weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _softmax_loss_(
    logits: Tensor, labels: Tensor, z_loss: float, sums: Tensor, vocabulary: VocabularySlice | None
) -> Tensor:
    """Add the sums of `logits` [N, V] to `sums` (cross-entropy, z) and write their gradient over them.

    The gradient lacks a factor a row, [N, 1] in fp32, which is returned: it costs less on the hidden side of the
    products, D wide, than here, V wide. It is 0 where there is no target.
    """
    valid = (labels != IGNORE).unsqueeze(1)
    row, here = labels.unsqueeze(1), valid
    if vocabulary is not None:
        row = row - vocabulary.first
        here = valid & (row >= 0) & (row < logits.size(1))
    row = row.masked_fill(~here, 0)
    picked = logits.gather(1, row).to(sums.dtype)
    local = _softmax_(logits, sums.dtype)
    log_sum_exp, target = local, picked
    if vocabulary is not None:
        every = vocabulary.of_every_rank(torch.stack((local, picked.masked_fill(~here, 0))))  # [ranks, 2, N, 1]
        log_sum_exp, target = every[:, 0].logsumexp(0), every[:, 1].sum(0)
    sums[0] += (log_sum_exp - target).masked_fill_(~valid, 0).sum()
    sums[1] += z_loss * log_sum_exp.square().masked_fill_(~valid, 0).sum()
    # The softmax here is over this slice: `share` makes it the whole one's. The bound keeps its inverse finite.
    share = (local - log_sum_exp).exp_().clamp_(min=1e-30)
    factor = share * (1 + 2 * z_loss * log_sum_exp)
    # By indices: scatter_ makes an fp32 copy of all bf16 logits on a CPU, a seventh of this function's time.
    place = torch.arange(row.size(0), device=row.device).unsqueeze(1)
    logits.index_put_((place, row), ((picked - local).exp_() - here / factor).to(logits.dtype))
    return factor.masked_fill_(~valid, 0)


def _softmax_(logits: Tensor, accumulate: torch.dtype) -> Tensor:
    """Softmax of the rows of `logits` [N, V] over themselves; their log-sum-exp, [N, 1] in `accumulate`."""
    log_sum_exp = torch.empty(logits.size(0), 1, dtype=accumulate, device=logits.device)
    for piece in _blocks(logits, accumulate):
        block = logits[piece].to(accumulate)
        peak = block.amax(dim=1, keepdim=True)
        torch.softmax(block, dim=1, out=block)
        log_sum_exp[piece] = peak - block.amax(dim=1, keepdim=True).log_()  # the largest is 1 / sum(exp(x - peak))
        if block.dtype != logits.dtype:
            logits[piece] = block
    return log_sum_exp


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where the factors may be narrower than the total."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    for piece in _blocks(total, total.dtype):
        total[piece] += left[piece] @ right


_BLOCK_BYTES = 1 << 20  # on CPU: elementwise work goes by blocks that stay in the cache of a core


def _blocks(x: Tensor, dtype: torch.dtype) -> list[slice]:
    """Slices of the rows of x [N, M] to work on at a time: small on CPU, where a bf16 softmax gains threefold by it."""
    rows = x.size(0)
    # A traced plan's tensors have no memory, so no cache either, and stand for a GPU's.
    if type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling():
        rows = min(rows, max(1, _BLOCK_BYTES // (x.size(1) * dtype.itemsize)))
    return [slice(start, start + rows) for start in range(0, x.size(0), rows)]
