"""Activation checkpointing: which activations of a block are recomputed in backward rather than kept.

Set on the blocks from outside, without wrapper modules, so that parameter names never change.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pretrain.config import ActivationCheckpointConfig
from pretrain.model.llama import Block, Llama

# Selective keeps what is dear to compute: matrix products and attention. Norms, RoPE, SwiGLU and casts are recomputed.
_KEEP_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "linear",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_flash_attention_for_cpu",
)


def apply_activation_checkpoint(model: Llama, cfg: ActivationCheckpointConfig) -> None:
    """Set `recompute` on each block (every k-th for full with `every`)."""
    if cfg.mode == "none":
        return
    every = cfg.every if cfg.mode == "full" else 1
    for index, block in enumerate(model.layers):
        assert isinstance(block, Block)
        if index % every == 0:
            block.recompute = _full if cfg.mode == "full" else partial(_selective, _last_product(block))


def _full(body: Callable[..., Tensor], *args: Any) -> Tensor:
    return checkpoint(body, *args, use_reentrant=False, preserve_rng_state=False)


def _selective(last: tuple[int, int], body: Callable[..., Tensor], *args: Any) -> Tensor:
    context = partial(create_selective_checkpoint_contexts, partial(_policy, last))
    return checkpoint(body, *args, use_reentrant=False, preserve_rng_state=False, context_fn=context)


def _policy(last: tuple[int, int], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op in kept_ops() and not (op is torch.ops.aten.mm.default and tuple(args[1].shape) == last)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _last_product(block: Block) -> tuple[int, int]:
    """Shape of the right factor of a block's last product. Its result goes into a sum, whose backward does not need it,
    so it is not kept; nor is it computed again, since recomputation stops at the last tensor that is needed."""
    linear = block.feed_forward.down_proj
    if isinstance(linear.weight, DTensor):  # cut by tensor parallel
        outputs, inputs = linear.weight.to_local().shape
        return inputs, outputs
    return linear.in_features, linear.out_features  # also where ZeRO-3 has emptied the weight


def kept_ops() -> set[Any]:
    """The operators whose outputs selective keeps, those that this torch has."""
    ops = {getattr(torch.ops.aten, name).default for name in _KEEP_NAMES if hasattr(torch.ops.aten, name)}
    ops.add(torch.ops._c10d_functional.reduce_scatter_tensor.default)  # tensor parallel: no second one in backward
    varlen = getattr(torch.ops, "torch_attn", None)
    if varlen is not None and hasattr(varlen, "_varlen_attn"):
        ops.add(varlen._varlen_attn.default)
    return ops
