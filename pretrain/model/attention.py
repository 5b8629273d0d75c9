"""The one door to attention kernels: which one a run uses, and the call.

`choose_kernel` decides once, in the open, and says why; nothing falls back afterwards. Documents packed into one row do
not see each other: exactly masked scores through SDPA, or `varlen_attn` (FlashAttention over ragged rows) on CUDA.
"""

import inspect
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.errors import ConfigError
from pretrain.model.rope import RopeTable

Kernel = Literal["sdpa", "varlen"]


class AttentionInputs(NamedTuple):
    """What every block's attention needs to know of a micro-batch, made once a forward."""

    rope: RopeTable
    mask: Tensor | None  # bool [B, 1, T, S], True where a query sees a key; None: causal
    cu_seqlens: Tensor | None = None  # int32, ends of the documents in the B*T positions; set: varlen
    key_cu_seqlens: Tensor | None = None  # the same of keys and values, where there are more of them than queries
    chunks: tuple[Any, ...] = ()  # context parallel: the AttentionInputs of each chunk of this rank's positions
    cache: Any = None  # generation: has .update(k, v) -> all keys and values so far, [B, S, K, Q]


def choose_kernel(
    wanted: Literal["auto", "sdpa", "varlen"], device: torch.device, dtype: torch.dtype, *, mask_documents: bool
) -> tuple[Kernel, str]:
    """The kernel to use and one line that says why; ConfigError where the wanted one cannot run."""
    can_varlen = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if wanted == "varlen":
        if not can_varlen:
            raise ConfigError(
                f'model.attention="varlen" needs a CUDA device and 16-bit compute, but this is {device.type} with '
                f'{str(dtype).removeprefix("torch.")}; set model.attention="auto"'
            )
        if not mask_documents:
            raise ConfigError('model.attention="varlen" needs data.mask_documents=true; set model.attention="sdpa"')
        return "varlen", "varlen (FlashAttention over ragged documents), as model.attention asks"
    if wanted == "auto" and mask_documents and can_varlen:
        return "varlen", "varlen (FlashAttention over ragged documents): documents are masked on CUDA"
    if mask_documents:
        return "sdpa", f"sdpa with an exact document mask ({device.type}, {str(dtype).removeprefix('torch.')})"
    return "sdpa", f"sdpa, causal over whole rows ({device.type}, {str(dtype).removeprefix('torch.')})"


def document_mask(documents: Tensor, first: int = 0) -> Tensor:
    """bool [B, 1, T - first, T]: a position sees itself and earlier ones of its document. documents: int [B, T].

    The queries are the positions from `first` on.
    """
    length = documents.size(1)
    causal = torch.ones(length - first, length, dtype=torch.bool, device=documents.device).tril(first)
    same = documents[:, first:].unsqueeze(2) == documents.unsqueeze(1)
    return (same & causal).unsqueeze(1)


def attend(q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Tensor:
    """Softmax attention with 1/sqrt(Q) scaling. q [B, T, H, Q]; k, v [B, S, K, Q]; returns [B, T, H, Q].

    Query head h reads key/value head h // (H / K).
    """
    grouped = q.size(2) != k.size(2)
    if inputs.cu_seqlens is not None:
        return _varlen(q, k, v, inputs)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=inputs.mask,
        is_causal=inputs.mask is None and q.size(1) > 1,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2)


def _varlen(q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Tensor:
    """Each document's last query sees its last key, where a document has more keys than queries."""
    from torch.nn.attention.varlen import varlen_attn

    causal: dict[str, Any] = {"window_size": (-1, 0)} if _varlen_takes("window_size") else {"is_causal": True}
    if q.size(2) != k.size(2):
        if _varlen_takes("enable_gqa"):
            causal["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.size(2) // k.size(2), dim=2) for x in (k, v))
    starts = inputs.cu_seqlens
    assert starts is not None
    key_starts = starts if inputs.key_cu_seqlens is None else inputs.key_cu_seqlens
    rows = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
    out = varlen_attn(*rows, starts, key_starts, q.size(1), k.size(1), **causal)
    assert isinstance(out, Tensor)
    return out.view_as(q)


@torch.compiler.assume_constant_result
def _varlen_takes(keyword: str) -> bool:
    """Whether this torch's varlen_attn has a keyword: its spelling changed between 2.10 (is_causal) and 2.13."""
    from torch.nn.attention.varlen import varlen_attn

    return keyword in inspect.signature(varlen_attn).parameters
