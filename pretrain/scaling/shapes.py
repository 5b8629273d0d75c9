"""Rules that turn a size into a well-shaped Llama, and a shape and length into a batch and a learning rate.

Depth and width: n_layers = d_model / aspect (Llama's own are 100 to 130; small models do better with 16 to 64).
Heads keep their size, so their number grows with the width. d_ff is the family's: two thirds of 4 d_model, times
ffn_multiplier (1.3 in Llama 3 8B), rounded up. Batch and learning rate are power laws with stated exponents.
"""

import math
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from pretrain.config_tables import Count, Flag, Float, ModelConfig, Positive, Table
from pretrain.errors import ConfigError
from pretrain.metrics.flops import ModelSizes, parameter_counts

Counting = Literal["non_embedding", "matmul", "total"]


class ShapeRules(Table):
    vocab_size: Positive  # * rows of the embedding
    max_seq_len: Positive | None = None  # tokens; none: data.seq_len
    aspect: Annotated[Float, Field(gt=0)] = 64.0  # d_model / n_layers
    head_dim: Positive = 64
    queries_per_kv: Positive = 1  # query heads that share a key/value head; what divides n_heads of it
    ffn_multiplier: Annotated[Float, Field(gt=0)] = 1.0  # on two thirds of 4 d_model
    ffn_multiple_of: Positive = 32  # d_ff is rounded up to a multiple
    tie_embeddings: Flag = False
    rope_theta: Annotated[Float, Field(gt=0)] = 500_000.0
    norm_eps: Annotated[Float, Field(gt=0)] = 1e-5
    count: Counting = "non_embedding"  # what `sizes` counts


class PowerRule(Table):
    """base x (at_width/d_model)^width_power x (params/at_params)^params_power x (tokens/at_tokens)^tokens_power."""

    base: Annotated[Float, Field(gt=0)]  # *
    at_width: Positive | None = None
    width_power: Float = 1.0  # used only with at_width
    at_params: Annotated[Float, Field(gt=0)] | None = None
    params_power: Float = 0.0
    at_tokens: Annotated[Float, Field(gt=0)] | None = None
    tokens_power: Float = 0.0
    highest: Annotated[Float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _anchored(self) -> "PowerRule":
        for name in ("params", "tokens"):
            power, at = getattr(self, f"{name}_power"), getattr(self, f"at_{name}")
            if bool(power) != (at is not None):
                raise ValueError(f"{name}_power={power:g} and at_{name}={at} belong together; set both or neither")
        if "width_power" in self.model_fields_set and self.at_width is None:
            raise ValueError(f"width_power={self.width_power:g} needs at_width, the width at which base holds")
        return self

    def value(self, d_model: int, params: float, tokens: float) -> float:
        out = self.base
        if self.at_width is not None:
            out *= (self.at_width / d_model) ** self.width_power
        if self.at_params is not None:
            out *= (params / self.at_params) ** self.params_power
        if self.at_tokens is not None:
            out *= (tokens / self.at_tokens) ** self.tokens_power
        return out if self.highest is None else min(out, self.highest)


class Rules(Table):
    lr: PowerRule  # * the peak
    batch_tokens: PowerRule  # * tokens per optimizer step
    batch_multiple: Count = 0  # rows; 0: train.micro_batch_size
    warmup_fraction: Annotated[Float, Field(ge=0, lt=1)] = 0.02  # of the steps
    decay_fraction: Annotated[Float, Field(gt=0, lt=1)] = 0.2  # wsd: of the steps


class _Sizes(NamedTuple):
    """What parameters are counted from: a ModelConfig is made of the best one only, since checking each is slow."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    tie_embeddings: bool


def count_params(model: ModelSizes, count: Counting) -> int:
    counts = parameter_counts(model)
    if count == "matmul":
        return counts.matmul
    return counts.total if count == "total" else counts.total - counts.embedding - counts.head


def shape(params: float, rules: ShapeRules, seq_len: int) -> ModelConfig:
    """The shape nearest to `params`; leaving the aspect costs a quarter of what missing the parameters does."""
    found: list[tuple[float, _Sizes]] = []
    # 12 L d^2 parameters at the aspect: d is searched around the cube root of params x aspect / 12.
    guess = (params * rules.aspect / 12.0) ** (1 / 3)
    for heads in range(1, math.ceil(3 * guess / rules.head_dim) + 2):
        none, one = (count_params(_sizes(heads, layers, rules), rules.count) for layers in (0, 1))
        nearest = max(1, round((params - none) / (one - none)))
        deep = heads * rules.head_dim / rules.aspect
        for layers in {max(1, nearest - 1), nearest, nearest + 1, max(1, round(deep))}:
            sizes = _sizes(heads, layers, rules)
            miss = abs(math.log(count_params(sizes, rules.count) / params))
            found.append((miss + 0.25 * abs(math.log(layers / deep)), sizes))
    sizes = min(found)[1]
    got = count_params(sizes, rules.count)
    if not 0.6 < got / params < 1.67:
        raise ConfigError(
            f"sizes: no Llama of head_dim={rules.head_dim} and aspect={rules.aspect:g} has about {params:.3g} "
            f"parameters ({rules.count}); the nearest has {got:.3g}. Use a smaller head_dim for small models"
        )
    return ModelConfig(
        **sizes._asdict(),
        max_seq_len=rules.max_seq_len or seq_len,
        norm_eps=rules.norm_eps,
        rope_theta=rules.rope_theta,
    )


def feed_forward_size(d_model: int, multiplier: float, multiple_of: int) -> int:
    """d_ff as in the Llama reference code: 8/3 d_model, times the multiplier, rounded up."""
    return multiple_of * math.ceil(int(multiplier * int(8 * d_model / 3)) / multiple_of)


def _sizes(heads: int, layers: int, rules: ShapeRules) -> _Sizes:
    d_model = heads * rules.head_dim
    return _Sizes(
        vocab_size=rules.vocab_size,
        d_model=d_model,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=heads // math.gcd(heads, rules.queries_per_kv),
        head_dim=rules.head_dim,
        d_ff=feed_forward_size(d_model, rules.ffn_multiplier, rules.ffn_multiple_of),
        tie_embeddings=rules.tie_embeddings,
    )
