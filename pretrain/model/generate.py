"""Text generation: token ids in, token ids out, with a key/value cache and a batch of prompts of different lengths.

Prompts are padded on the left, so that all rows grow at the same column; padding is hidden from attention and takes no
position. Works on a plain `Llama` on one device; reading checkpoints and text is the command's business.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.errors import ConfigError
from pretrain.model.attention import AttentionInputs
from pretrain.model.hf import end_ids as as_end_ids
from pretrain.model.llama import Llama
from pretrain.model.rope import rope_table

NextLogits = Callable[[Tensor], Tensor]
"""New tokens [B, t] of every row -> logits [B, V] of what follows them."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: temperature first, then top-k, then top-p of what is left."""

    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 0  # only the k likeliest; 0: all
    top_p: float = 1.0  # only the fewest that together have this probability
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} must be 0 (the likeliest token) or a positive number")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must be 0 (all tokens) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must lie above 0 and at most at 1")
        if self.temperature == 0 and (self.top_k > 1 or self.top_p < 1):
            raise ConfigError(
                f"temperature=0 takes the likeliest token, so top_k={self.top_k} and top_p={self.top_p} "
                f"have no effect; leave them out or set a temperature"
            )


class Generated(NamedTuple):
    tokens: Tensor  # int64 [B, N]: the new tokens; padding after a row's end
    lengths: Tensor  # int64 [B]: new tokens of each row, its end id included

    def rows(self) -> list[list[int]]:
        """Each row's new tokens, without padding."""
        pairs = zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        return [row[:length] for row, length in pairs]


class LayerCache:
    """Keys and values of one layer, [B, S, K, Q], in memory for all positions that will come."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append, and give all so far."""
        end = self.length + k.size(1)
        self.keys[:, self.length : end] = k
        self.values[:, self.length : end] = v
        self.length = end
        return self.keys[:, :end], self.values[:, :end]


class Decoder:
    """A model with its cache: call it with the padded prompts [B, T] first, then with one new token a row [B, 1]."""

    def __init__(self, model: Llama, padding: Tensor, capacity: int) -> None:
        """`padding`: int64 [B], positions of padding at the left of each row; `capacity`: positions in all."""
        self.model, self.padding = model, padding
        cfg = model.config
        shape = (padding.size(0), capacity, cfg.n_kv_heads, cfg.head_dim)
        self.caches = [LayerCache(shape, model.activations, padding.device) for _ in model.layers]
        self.padded = bool(padding.any())

    def __call__(self, tokens: Tensor) -> Tensor:
        start = self.caches[0].length
        assert start == 0 or tokens.size(1) == 1
        columns = torch.arange(start + tokens.size(1), device=tokens.device)
        queries = columns[start:]
        positions = (queries - self.padding.unsqueeze(1)).clamp(min=0)
        mask = None
        if self.padded:
            real = columns >= self.padding.unsqueeze(1)  # [B, S]
            # A padding position sees itself, since a softmax over nothing is no number.
            seen = (real.unsqueeze(1) & (columns <= queries.unsqueeze(1))) | (columns == queries.unsqueeze(1))
            mask = seen.unsqueeze(1)
        wide = torch.promote_types(self.model.activations, torch.float32)
        rope = rope_table(self.model.config, positions, wide)
        inputs = [AttentionInputs(rope, mask, cache=cache) for cache in self.caches]
        return self.model.output(self.model.hidden(tokens, inputs)[:, -1])


@torch.no_grad()
def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    end_ids: int | Sequence[int] | None = None,
    vocab_size: int | None = None,
    pad_id: int | None = None,
) -> Generated:
    """Continue every prompt until one of `end_ids` or `max_new_tokens`.

    Ids from `vocab_size` on (the tokenizer's size, by default the model's) are rows without a token and are never
    drawn. `pad_id` fills ended rows; by default the first end id, else 0.
    """
    cfg = model.config
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) == 0:
        raise ConfigError("a prompt is empty; give at least one token, for example BOS")
    longest, limit = max(lengths), min(vocab_size or cfg.vocab_size, cfg.vocab_size)
    if max_new_tokens < 1 or longest + max_new_tokens > cfg.max_seq_len:
        raise ConfigError(
            f"max_new_tokens={max_new_tokens} must be at least 1 and, with the longest prompt of {longest} tokens, "
            f"at most model.max_seq_len={cfg.max_seq_len}; shorten the prompt or generate fewer"
        )
    highest, lowest = max(map(max, prompts)), min(map(min, prompts))
    if lowest < 0 or highest >= limit:
        wrong = highest if highest >= limit else lowest
        raise ConfigError(f"a prompt holds token id {wrong}, but the vocabulary has {limit} tokens")
    ends = as_end_ids(end_ids)
    fill = pad_id if pad_id is not None else next(iter(ends), 0)
    device = model.tok_embeddings.weight.device
    tokens = torch.tensor([[fill] * (longest - len(p)) + list(p) for p in prompts], device=device)
    padding = torch.tensor([longest - length for length in lengths], device=device)
    decoder = Decoder(model, padding, longest + max_new_tokens)
    return extend(
        decoder, tokens, max_new_tokens=max_new_tokens, sampling=sampling, end_ids=ends, vocab_size=limit, pad_id=fill
    )


def extend(
    next_logits: NextLogits,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    end_ids: Sequence[int],
    vocab_size: int,
    pad_id: int,
) -> Generated:
    """The loop: draw a token for every live row, end rows at their end ids, stop when none lives."""
    generator = torch.Generator(tokens.device).manual_seed(sampling.seed)
    ends = torch.tensor(list(end_ids), dtype=torch.int64, device=tokens.device)
    out = tokens.new_full((tokens.size(0), max_new_tokens), pad_id)
    live = torch.ones(tokens.size(0), dtype=torch.bool, device=tokens.device)
    lengths = torch.zeros(tokens.size(0), dtype=torch.int64, device=tokens.device)
    for step in range(max_new_tokens):
        logits = next_logits(tokens)[:, :vocab_size]
        if step == 0 and not bool(logits.isfinite().all()):
            raise ConfigError("the model's logits are not finite: the checkpoint is of a run that diverged")
        chosen = choose(logits, sampling, generator)
        out[:, step] = torch.where(live, chosen, pad_id)
        lengths += live
        live &= ~torch.isin(chosen, ends)
        if not bool(live.any()):
            break
        tokens = out[:, step : step + 1]
    return Generated(out[:, : int(lengths.max())], lengths)


_COLDEST = 1e-6  # below this a division would overflow, and only the likeliest token has a chance anyway


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One id a row, int64 [B], from logits [B, V]."""
    if sampling.temperature < _COLDEST or sampling.top_k == 1:
        return logits.argmax(-1)
    probabilities = torch.softmax(likely(logits.float() / sampling.temperature, sampling.top_k, sampling.top_p), -1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def likely(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits [B, V] with -inf for the tokens outside of the k likeliest and of the probability p."""
    if 0 < top_k < logits.size(-1):
        smallest = logits.topk(top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if top_p < 1:
        ordered, index = logits.sort(-1, descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # of the likelier ones; the likeliest always stays
        logits = logits.masked_fill((before >= top_p).scatter(-1, index, before >= top_p), float("-inf"))
    return logits
