"""Context parallel: each row's positions dealt over the axis `cp`; attention gathers keys and values.

As Llama 3 does (arXiv:2407.21783, section 3.3.2): a row is cut into 2 cp chunks, and rank r takes chunks r and
2 cp - 1 - r, so that every rank has the same number of scores to compute under a causal mask. Keys and values of the
whole row are gathered in one collective, and each chunk's queries see those up to the chunk's end, so that document
masks stay exact with any kernel. Everything else works on a position alone and needs to know nothing of this.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pretrain.data.loader import Batch
from pretrain.model.attention import AttentionInputs, attend, document_mask
from pretrain.model.llama import Block, Llama
from pretrain.parallel.collectives import Group, all_gather, axis_group


def apply_context_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Let every attention of the model gather keys and values over the one axis of `mesh`."""
    context = Context(axis_group(mesh), model)
    model.attention_inputs = context.attention_inputs  # type: ignore[method-assign]
    for block in model.layers:
        assert isinstance(block, Block)
        block.attention.attend = context.attend


def chunk_starts(group: Group, length: int) -> tuple[int, int]:
    """Where this rank's two chunks of length / (2 cp) positions begin in rows of `length`."""
    chunk = length // (2 * group.size)
    return group.rank * chunk, (2 * group.size - 1 - group.rank) * chunk


def split_batch(batch: Batch, group: Group) -> Batch:
    """This rank's positions of each row. What says where documents are stays whole: keys are seen from all over."""
    starts = chunk_starts(group, batch.inputs.size(1))
    chunk = batch.inputs.size(1) // (2 * group.size)
    inputs, labels, positions = (torch.cat([x[:, at : at + chunk] for at in starts], dim=1) for x in batch[:3])
    return batch._replace(inputs=inputs, labels=labels, positions=positions)


class Context:
    def __init__(self, group: Group, model: Llama) -> None:
        self.group, self.kernel = group, model.kernel
        self._inputs = model.attention_inputs

    def attention_inputs(
        self, positions: Tensor, documents: Tensor | None, cu_seqlens: Tensor | None
    ) -> AttentionInputs:
        """positions: this rank's, [B, T / cp]; documents [B, T] and cu_seqlens are those of whole rows."""
        inputs = self._inputs(positions, None, cu_seqlens)
        length = positions.size(1) * self.group.size
        chunks = []
        for first in chunk_starts(self.group, length):
            end = first + length // (2 * self.group.size)
            if cu_seqlens is not None:
                queries, keys = chunk_lengths(cu_seqlens, length, first, end)
                chunks.append(inputs._replace(cu_seqlens=queries, key_cu_seqlens=keys))
            else:
                seen = positions.new_zeros(1, end) if documents is None else documents[:, :end]
                chunks.append(inputs._replace(mask=document_mask(seen, first)))
        return inputs._replace(chunks=tuple(chunks))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Tensor:
        """attention.attend for this rank's positions: q [B, T / cp, H, Q]; k, v [B, T / cp, K, Q]."""
        keys, values = gather_rows(torch.stack((k, v)), self.group)
        chunk, out = q.size(1) // 2, []
        for queries, first, its in zip(
            q.split(chunk, dim=1), chunk_starts(self.group, keys.size(1)), inputs.chunks, strict=True
        ):
            out.append(attend(queries, keys[:, : first + chunk], values[:, : first + chunk], its))
        return torch.cat(out, dim=1)


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """[2, B, T / cp, ...] of every rank as [2, B, T, ...], positions in the order of the row."""
    x = x.unflatten(2, (2, -1)).movedim(2, 0)  # [chunk of the rank, 2, B, T / (2 cp), ...]
    x = all_gather(x, group).unflatten(0, (group.size, 2))
    x = torch.cat((x[:, 0], x[:, 1].flip(0)))  # [chunk of the row, 2, B, ...]
    return x.movedim(0, 2).flatten(2, 3)


def chunk_lengths(cu_seqlens: Tensor, length: int, first: int, end: int) -> tuple[Tensor, Tensor]:
    """cu_seqlens of the queries [first, end) of each row, and of the keys [0, end) of each row.

    A document that lies before the chunk keeps its keys and gets no query, one behind it neither, so the number of
    documents, which compiled code depends on, stays as it was. cu_seqlens: of rows of `length`, flattened.
    """
    row, place = cu_seqlens // length, cu_seqlens % length
    queries = row * (end - first) + (place - first).clamp(0, end - first)
    return queries.to(torch.int32), (row * end + place.clamp(max=end)).to(torch.int32)
