"""The Llama: RMSNorm, grouped-query attention, SwiGLU, pre-norm blocks, a tied or untied head.

Plain modules with plain names. Nothing here knows of ranks, sharding or checkpoints; `parallel` wraps it from outside.
The loss is computed inside the root's forward, where every engine has the head's weight gathered.
Letters: B batch, T positions, D model, H query heads, K key/value heads, Q head size, F ffn, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config import ModelConfig
from pretrain.model.attention import AttentionInputs, Kernel, attend, document_mask
from pretrain.model.elementwise import rms_norm, swiglu
from pretrain.model.loss import linear_cross_entropy, loss_chunks
from pretrain.model.rope import rope_table, rotate


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps), in fp32 (fp64 stays fp64), cast back, times the gain."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        d, h, k, q = model.d_model, model.n_heads, model.n_kv_heads, model.head_dim
        self.head_dim = q
        self.q_proj = nn.Linear(d, h * q, bias=False)
        self.k_proj = nn.Linear(d, k * q, bias=False)
        self.v_proj = nn.Linear(d, k * q, bias=False)
        self.o_proj = nn.Linear(h * q, d, bias=False)
        self.attend = attend  # context parallel puts its own here, which gathers keys and values first

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        heads = (-1, self.head_dim)
        q = rotate(self.q_proj(x).unflatten(-1, heads), inputs.rope)
        k = rotate(self.k_proj(x).unflatten(-1, heads), inputs.rope)
        v = self.v_proj(x).unflatten(-1, heads)
        if inputs.cache is not None:
            k, v = inputs.cache.update(k, v)
        return self.o_proj(self.attend(q, k, v, inputs).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.d_model, model.d_ff, bias=False)
        self.up_proj = nn.Linear(model.d_model, model.d_ff, bias=False)
        self.down_proj = nn.Linear(model.d_ff, model.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Block(nn.Module):
    """One layer. `recompute`, set by `parallel.activation_checkpoint`, runs the body without keeping activations."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.d_model, model.norm_eps)
        self.attention = Attention(model)
        self.ffn_norm = RMSNorm(model.d_model, model.norm_eps)
        self.feed_forward = FeedForward(model)
        self.recompute: Callable[..., Tensor] | None = None

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        if self.recompute is not None and torch.is_grad_enabled():
            return self.recompute(self.body, x, inputs)
        return self.body(x, inputs)

    def body(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        x = x + self.attention(self.attention_norm(x), inputs)
        return x + self.feed_forward(self.ffn_norm(x))


class Head(nn.Linear):
    """The projection to the vocabulary, and the loss, where its weight is gathered on every engine.

    forward(x [B, T, D]) gives logits [B, T, V]; with labels [B, T] it gives the sums of the loss instead.
    """

    def __init__(self, model: ModelConfig, chunks: int, z_loss: float) -> None:
        super().__init__(model.d_model, model.vocab_size, bias=False)
        self.chunks, self.z_loss = chunks, z_loss

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if labels is None:
            return super().forward(x)
        chunks = loss_chunks(labels.numel(), self.chunks)
        return linear_cross_entropy(x.flatten(0, 1), self.weight, labels.flatten(), chunks=chunks, z_loss=self.z_loss)


class Llama(nn.Module):
    """Token ids to logits, or, given labels, to the sums of the loss.

    `activations` is the dtype of the residual stream; `kernel` is `attention.choose_kernel`'s; the loss is chunked as
    `loss.linear_cross_entropy` says.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        kernel: Kernel = "sdpa",
        activations: torch.dtype = torch.float32,
        loss_chunks: int = 1,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.config = model
        self.kernel = kernel
        self.activations = activations
        self.tok_embeddings = nn.Embedding(model.vocab_size, model.d_model)
        self.layers = nn.ModuleList(Block(model) for _ in range(model.n_layers))
        self.norm = RMSNorm(model.d_model, model.norm_eps)
        self.output = Head(model, loss_chunks, z_loss)
        self.tie()

    def tie(self) -> None:
        """Make the head's weight the embedding's, where the config ties them; moving off the meta device parts them."""
        if self.config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        documents: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """tokens, positions, documents, labels: int [B, T]. Returns logits [B, T, V], or with labels LossSums.

        documents (None: one document a row) and cu_seqlens say the same thing to different kernels.
        """
        inputs = self.attention_inputs(positions, documents, cu_seqlens)
        return self.output(self.hidden(tokens, [inputs] * len(self.layers)), labels)

    def attention_inputs(
        self, positions: Tensor, documents: Tensor | None, cu_seqlens: Tensor | None
    ) -> AttentionInputs:
        wide = torch.promote_types(self.activations, torch.float32)
        rope = rope_table(self.config, positions, wide)
        if self.kernel == "varlen":
            assert cu_seqlens is not None
            return AttentionInputs(rope, None, cu_seqlens)
        return AttentionInputs(rope, None if documents is None else document_mask(documents))

    def hidden(self, tokens: Tensor, inputs: list[AttentionInputs]) -> Tensor:
        """The normed residual stream [B, T, D] after all blocks; one AttentionInputs a layer."""
        x = self.tok_embeddings(tokens).to(self.activations)
        for layer, layer_inputs in zip(self.layers, inputs, strict=True):
            x = layer(x, layer_inputs)
        return self.norm(x)
