"""Tensor parallel with sequence parallel (arXiv:2205.05198): each block's matrices cut over the axis `tp`.

Between the sublayers the residual stream is cut along the sequence: each rank has T / tp positions, and its norms run
on those. Attention and the feed-forward gather the sequence, work on this rank's heads or columns, and their last
product, a partial sum, is summed and scattered again. Embedding, head and loss hold a slice of the vocabulary each.

Modules keep their names and change their class, as fully_shard does; parameters become DTensors of the whole shape, so
sharding, optimizer and checkpoints need to know nothing of this. Norm gains are whole on every rank, their gradients
partial sums.
"""

from typing import Any

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from pretrain.errors import ConfigError
from pretrain.model.attention import AttentionInputs
from pretrain.model.elementwise import rms_norm
from pretrain.model.llama import Attention, Block, FeedForward, Head, Llama, RMSNorm
from pretrain.model.loss import VocabularySlice, linear_cross_entropy
from pretrain.parallel.collectives import Group, all_gather, axis_group, reduce_scatter

ROWS, COLUMNS = Shard(0), Shard(1)


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Cut a model on the meta device over the one axis of `mesh`, whose size divides heads, d_ff and vocabulary."""
    group = axis_group(mesh)
    _become(model.tok_embeddings, _Embedding, mesh, ROWS, group)
    for block in model.layers:
        assert isinstance(block, Block)
        for norm in (block.attention_norm, block.ffn_norm):
            _become(norm, _Norm, mesh, Replicate())
        for sublayer, into in ((block.attention, _Attention), (block.feed_forward, _FeedForward)):
            _become(sublayer, into, group=group)
            for name, linear in sublayer.named_children():
                _become(linear, _Linear, mesh, COLUMNS if name in ("o_proj", "down_proj") else ROWS)
    _become(model.norm, _Norm, mesh, Replicate())
    _become(model.output, _Head, mesh, ROWS, group)
    model.tie()


def overlap_collectives(mesh: DeviceMesh, device: torch.device) -> None:
    """Async tensor parallel: compiled blocks gather and scatter piece by piece while they multiply.

    The compiler fuses each collective with the products beside it, over memory that the GPUs of a node share.
    """
    if device.type != "cuda":
        raise ConfigError(f"parallel.async_tp=true needs CUDA devices, but this is {device.type}; leave it out")
    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """[B, T / tp, ...] to [B, T, ...]. Written as the compiler's async tensor parallel wants to find it."""
    return torch.cat(all_gather(x, group).chunk(group.size), dim=1)


def scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """Partial sums [B, T, ...] to this rank's positions of their sum, [B, T / tp, ...]."""
    return reduce_scatter(torch.cat(x.chunk(group.size, dim=1)), group)


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, _local(self.weight))


class _Norm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, DTensor)
        gain: Tensor = self.weight.to_local(grad_placements=[Partial()])
        return rms_norm(x, gain, self.eps)


class _Attention(Attention):
    group: Group

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        return scatter_sequence(super().forward(gather_sequence(x, self.group), inputs), self.group)


class _FeedForward(FeedForward):
    group: Group

    def forward(self, x: Tensor) -> Tensor:
        return scatter_sequence(super().forward(gather_sequence(x, self.group)), self.group)


class _Embedding(nn.Embedding):
    group: Group

    def forward(self, tokens: Tensor) -> Tensor:
        weight = _local(self.weight)
        row = tokens - self.group.rank * weight.size(0)
        elsewhere = (row < 0) | (row >= weight.size(0))
        x = F.embedding(row.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        return scatter_sequence(x, self.group)


class _Head(Head):
    group: Group

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        """As Head's; every rank of the axis computes the same loss, and its own part of the gradients."""
        x, weight = gather_sequence(x, self.group), _local(self.weight)
        if labels is None:
            logits = F.linear(x, weight).movedim(-1, 0)
            return all_gather(logits, self.group).movedim(0, -1)
        part = VocabularySlice(self.group.rank * weight.size(0), self._of_every_rank)
        return linear_cross_entropy(
            x.flatten(0, 1), weight, labels.flatten(), chunks=self.chunks, z_loss=self.z_loss, vocabulary=part
        )

    def _of_every_rank(self, x: Tensor) -> Tensor:
        return all_gather(x.unsqueeze(0), self.group)


def _become(
    module: nn.Module,
    into: type,
    mesh: DeviceMesh | None = None,
    how: Placement | None = None,
    group: Group | None = None,
) -> None:
    """Give a module the class `into`, its weight the placement `how`."""
    assert issubclass(into, type(module)), (into, type(module))
    module.__class__ = into
    if group is not None:
        module.group = group  # type: ignore[assignment]
    if mesh is not None:
        whole = module.weight
        assert isinstance(whole, Tensor)
        assert whole.is_meta
        assert how is not None
        shape = list(whole.shape)
        if isinstance(how, Shard):
            shape[how.dim] //= mesh.size()
        local = torch.empty(shape, dtype=whole.dtype, device=whole.device)
        module.weight = nn.Parameter(
            DTensor.from_local(local, mesh, [how], run_check=False, shape=whole.shape, stride=whole.stride())
        )


def _local(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()
