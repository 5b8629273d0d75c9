"""Parameters, FLOPs and cache bytes of a Llama in closed form: integers from its sizes, nothing measured.

The meter, the planner and the scaling tools all count here, so that one convention holds everywhere.
Two conventions for attention exist and both are offered: `full` counts every score of the square,
`causal` only the half that a causal kernel computes. Never loads torch.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

Recompute = Literal["none", "full", "selective"]


class ModelSizes(Protocol):
    """The sizes of a model; `pretrain.config.ModelConfig` is one."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def d_model(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def d_ff(self) -> int: ...
    @property
    def tie_embeddings(self) -> bool: ...


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by component; the five parts add up to `total`, `matmul` overlaps them."""

    total: int
    embedding: int
    head: int  # 0 when tied: the weight is counted under `embedding`
    attention: int
    mlp: int
    norms: int
    matmul: int  # what multiplies activations: attention, mlp and the head, tied or not; no norms, no look-up

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def parameter_counts(model: ModelSizes) -> ParameterCounts:
    d, layers = model.d_model, model.n_layers
    query, kv = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    attention = layers * d * (2 * query + 2 * kv)
    mlp = layers * 3 * d * model.d_ff
    norms = layers * 2 * d + d
    table = model.vocab_size * d
    head = 0 if model.tie_embeddings else table
    return ParameterCounts(
        total=table + head + attention + mlp + norms,
        embedding=table,
        head=head,
        attention=attention,
        mlp=mlp,
        norms=norms,
        matmul=attention + mlp + table,
    )


def flops_per_token(model: ModelSizes, seq_len: int, *, causal: bool) -> int:
    """Forward + backward FLOPs for one trained token, without recomputation.

    6 per matmul weight plus the attention scores (PaLM, arXiv:2204.02311, appendix B), which go with the
    query heads; `causal=True` counts only the half that a causal kernel computes. Embedding look-ups count
    zero, a tied head once.
    """
    return 6 * parameter_counts(model).matmul + 3 * _attention_flops(model, seq_len, causal=causal)


def document_flops(model: ModelSizes, lengths: Iterable[int], *, causal: bool) -> int:
    """Training FLOPs of rows whose documents do not see each other, exactly: the square of each length.

    One document of seq_len tokens equals seq_len * flops_per_token(seq_len).
    """
    tokens = squares = 0
    for length in lengths:
        tokens += length
        squares += length * length
    return 6 * parameter_counts(model).matmul * tokens + 3 * _attention_flops(model, squares, causal=causal)


def recomputed_flops_per_token(
    model: ModelSizes, seq_len: int, mode: Recompute, *, causal: bool, every: int = 1
) -> int:
    """What activation checkpointing computes a second time, per trained token: HFU counts it, MFU does not.

    `full` repeats the forward of every `every`-th block (not the head's). `selective` keeps the results of
    matmuls and attention and repeats only element-wise work, which no convention counts: zero.
    The scores that a fused attention kernel rebuilds in its backward are not counted either, as is usual.
    """
    if mode != "full":
        return 0
    blocks = -(-model.n_layers // every)
    whole = block_forward_flops(model, 1, seq_len, causal=causal)
    return whole * blocks // model.n_layers


def block_forward_flops(model: ModelSizes, tokens: int, context: int, *, causal: bool = False) -> int:
    """Forward FLOPs of all blocks for `tokens` tokens that each see `context` positions; no head."""
    counts = parameter_counts(model)
    return tokens * (2 * (counts.attention + counts.mlp) + _attention_flops(model, context, causal=causal))


def head_forward_flops(model: ModelSizes, tokens: int) -> int:
    """Forward FLOPs of the output projection for `tokens` tokens."""
    return 2 * tokens * model.vocab_size * model.d_model


def prefill_flops(model: ModelSizes, tokens: int, *, causal: bool = False) -> int:
    """Forward FLOPs to read a prompt: every block over `tokens` tokens, the head for the last one alone."""
    return block_forward_flops(model, tokens, tokens, causal=causal) + head_forward_flops(model, 1)


def decode_flops(model: ModelSizes, context: int) -> int:
    """Forward FLOPs to generate one token after `context` tokens held in the cache: blocks and head."""
    return block_forward_flops(model, 1, context) + head_forward_flops(model, 1)


def kv_cache_bytes(model: ModelSizes, tokens: int, *, bytes_per_value: int = 2) -> int:
    """Keys and values of `tokens` tokens in all layers of one sequence; bf16 unless told."""
    return 2 * model.n_layers * model.n_kv_heads * model.head_dim * bytes_per_value * tokens


def _attention_flops(model: ModelSizes, context: int, *, causal: bool) -> int:
    """Forward FLOPs of scores and weighted values for one token that sees `context` positions, all layers."""
    return (2 if causal else 4) * model.n_layers * model.n_heads * model.head_dim * context
