"""Which tokens make up which row: best-fit packing as a pure function of lengths, and the row index of a dataset.

`best_fit` fills rows with whole documents, cutting only those longer than a row; `concat` cuts the stream of tokens
every `seq_len`. Tokens are never moved: packing for another length writes another row index beside the shards.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from data_prep.errors import DataError
from data_prep.row_index import Packing, PackingInfo, RowIndexWriter, index_path, shards_hash
from data_prep.shard import Manifest, Shard, shard_path

WINDOW = 1 << 20  # pieces packed together at most: about 200 MB of memory, padding far below one row in a thousand
LEAST_WINDOW = 1 << 16  # with this many, a window ends where its shard does, so that rows touch one file
_POOL_ITEMS = 512  # pieces that are packed a second time, by exact sums, where best-fit left a row too many


class RowPlan(NamedTuple):
    """Row r is pieces first[r] .. first[r + 1]; piece p takes `sizes[p]` positions, and so `sizes[p] + 1` tokens,
    of document `documents[p]` from its token `starts[p]` on. int64 all."""

    first: np.ndarray
    documents: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray


def best_fit(lengths: np.ndarray, seq_len: int) -> RowPlan:
    """Rows of whole documents of `lengths` tokens (one window: all of them are packed together).

    A document of n tokens has n - 1 targets and takes as many positions. Longer ones than a row are cut every
    `seq_len` positions; the last token of a piece, only a label there, is the first input of the next. Documents of
    one token are in no row. Best-fit decreasing (as in arXiv:2404.10830): each piece, longest first, goes where the
    least room is left. Pieces of a row, and rows, are in the order of their first documents.
    """
    positions = np.asarray(lengths, np.int64) - 1
    cuts = -(-positions // seq_len)
    documents = np.repeat(np.arange(len(positions)), cuts)
    starts = (np.arange(len(documents)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * seq_len
    sizes = np.minimum(positions[documents] - starts, seq_len)
    whole = sizes == seq_len
    row = np.cumsum(whole) - 1
    row[~whole] = int(whole.sum()) + _fit(sizes[~whole], seq_len)
    _, heads, row = np.unique(row, return_index=True, return_inverse=True)
    rank = np.empty(len(heads), np.int64)  # of each row, by its first piece
    rank[np.argsort(heads)] = np.arange(len(heads))
    row = rank[row]
    order = np.argsort(row, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(heads)))]).astype(np.int64)
    return RowPlan(first, documents[order], starts[order], sizes[order])


def _fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """A row for each size below `capacity`, best-fit decreasing. Works on all pieces of one size, and all rows with
    the same room, at a time: a million pieces take a fifth of a second."""
    order = np.argsort(-sizes, kind="stable")
    counts = np.bincount(sizes)
    row_of = np.empty(len(sizes), np.int64)
    open_rows: dict[int, list[np.ndarray]] = {}  # room left -> rows
    rooms = 0  # bit r is set where open_rows has rows with room r
    rows = at = 0
    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        while left:
            fitting = rooms >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                stack = open_rows[room]
                taken = stack.pop()
                if len(taken) > left:
                    stack.append(taken[left:])
                    taken = taken[:left]
                elif not stack:
                    rooms ^= 1 << room
            else:  # new rows; when several of this size fit one row, the rest of them follow in the next turns
                room = capacity
                taken = np.arange(rows, rows - (-left // (capacity // size)))
                rows += len(taken)
            row_of[order[at : at + len(taken)]] = taken
            at += len(taken)
            left -= len(taken)
            room -= size
            if room:
                if not rooms >> room & 1:
                    open_rows[room] = []
                    rooms |= 1 << room
                open_rows[room].append(taken)
    if rows > -(-int(sizes.sum()) // capacity):
        _refit_loosest(sizes, row_of, rows, capacity)
    return row_of


def _refit_loosest(sizes: np.ndarray, row_of: np.ndarray, rows: int, capacity: int) -> None:
    """Packs the rows with most room once more, each filled by an exact subset sum, and keeps that if it saves a row.

    Best-fit decreasing often ends with a few short pieces in a row of their own while a token or two are free in many
    others; in a small dataset that one row is all the padding there is. Changes `row_of`.
    """
    loosest = np.argsort(np.bincount(row_of, sizes, rows), kind="stable")
    pool = loosest[: np.searchsorted(np.cumsum(np.bincount(row_of, minlength=rows)[loosest]), _POOL_ITEMS)]
    items = np.flatnonzero(np.isin(row_of, pool))
    left = items[np.argsort(-sizes[items], kind="stable")].tolist()
    size_of = dict(zip(left, sizes[left].tolist(), strict=True))
    chosen: list[list[int]] = []
    while left and len(chosen) < len(pool):
        row, left = [left[0]], left[1:]
        target = capacity - size_of[row[0]]
        sums = [1]  # bit s of sums[i]: some of the first i pieces sum to s
        for item in left:
            sums.append(sums[-1] | sums[-1] << size_of[item] & (1 << target + 1) - 1)
        total = sums[-1].bit_length() - 1
        for i in range(len(left), 0, -1):  # from the short ones: takes them only where it must
            if not sums[i - 1] >> total & 1:
                row.append(left[i - 1])
                total -= size_of[left[i - 1]]
        taken = set(row)
        left = [item for item in left if item not in taken]
        chosen.append(row)
    if left or len(chosen) >= len(pool):
        return
    for number, row in enumerate(chosen):
        row_of[row] = pool[number]


def pack_dataset(folder: str | Path, seq_len: int, packing: Packing = "best_fit") -> dict[str, PackingInfo]:
    """Writes the row index of every split. Equal bytes for equal shards; memory does not grow with the dataset."""
    if seq_len < 1:
        raise DataError(f"seq_len={seq_len}: a row needs at least 1 position")
    if packing not in get_args(Packing):
        raise DataError(f"packing={packing!r} is unknown; use {' or '.join(get_args(Packing))}")
    manifest = Manifest.read(folder)
    return {split: _pack_split(folder, manifest, split, seq_len, packing) for split in manifest.splits}


def _pack_split(folder: str | Path, manifest: Manifest, split: str, seq_len: int, packing: Packing) -> PackingInfo:
    shards = manifest.shards(split)
    writer = RowIndexWriter(index_path(folder, split, seq_len, packing))
    try:
        pack = _pack_best_fit if packing == "best_fit" else _pack_concat
        tokens = sum(shard.tokens for shard in shards)
        counts = _Counts()
        pack(writer, counts, _windows(folder, manifest, split, seq_len, counts), seq_len, tokens)
        info = PackingInfo(
            packing, seq_len, tokens=tokens, shards_hash=shards_hash(shards), **dataclasses.asdict(counts)
        )
        writer.finish(info)
        return info
    finally:
        writer.close()


@dataclasses.dataclass
class _Counts:
    rows: int = 0
    pieces: int = 0
    windows: int = 0
    documents: int = 0
    left_out: int = 0
    positions: int = 0
    targets: int = 0
    num_bytes: int = 0
    max_documents: int = 0


def _windows(
    folder: str | Path, manifest: Manifest, split: str, seq_len: int, counts: _Counts
) -> Iterator[tuple[int, np.ndarray]]:
    """(first token, document lengths) of runs of documents with WINDOW pieces at most, or of one document."""
    held, first = np.empty(0, np.int64), 0
    for info in manifest.shards(split):
        shard = Shard(shard_path(folder, info))
        if (shard.header.tokens, shard.header.documents, shard.header.sha256) != (
            info.tokens,
            info.documents,
            info.sha256,
        ):
            raise DataError(f"{shard.path}: is not the shard that the manifest names; build the dataset again")
        shard.check_documents()
        for at in range(0, info.documents, WINDOW):
            ends = shard.document_ends[at : at + WINDOW].astype(np.int64)
            begin = int(shard.document_ends[at - 1]) if at else 0
            lengths = np.diff(ends, prepend=begin)
            counts.documents += len(lengths)
            counts.left_out += int((lengths == 1).sum())
            counts.num_bytes += int(shard.num_bytes[at : at + WINDOW][lengths > 1].sum(dtype=np.uint64))
            held = np.concatenate([held, lengths])
            while True:
                pieces = np.cumsum(-(-(held - 1) // seq_len))
                if not len(held) or pieces[-1] <= WINDOW:
                    break
                cut = max(1, int(np.searchsorted(pieces, WINDOW, "right")))
                yield first, held[:cut]
                first += int(held[:cut].sum())
                held = held[cut:]
        if len(held) and pieces[-1] >= LEAST_WINDOW:
            yield first, held
            first += int(held.sum())
            held = held[:0]
    if len(held):
        yield first, held


def _pack_best_fit(
    writer: RowIndexWriter, counts: _Counts, windows: Iterator[tuple[int, np.ndarray]], seq_len: int, _tokens: int
) -> None:
    writer.add("first", np.zeros(1, np.int64))
    for first_token, lengths in windows:
        plan = best_fit(lengths, seq_len)
        used = np.add.reduceat(plan.sizes, plan.first[:-1]) if len(plan.sizes) else np.empty(0, np.int64)
        begins = first_token + np.cumsum(lengths) - lengths
        writer.add("windows", np.array([counts.pieces, first_token]))
        writer.add("first", counts.pieces + plan.first[1:])
        writer.add("starts", begins[plan.documents] + plan.starts)
        writer.add("missing", seq_len - used)
        writer.add("sizes", plan.sizes)
        segments = np.diff(plan.first) + (used < seq_len)
        counts.rows += len(used)
        counts.pieces += len(plan.sizes)
        counts.windows += 1
        counts.positions += int(used.sum())
        counts.max_documents = max(counts.max_documents, int(segments.max(initial=0)))
    counts.targets = counts.positions


def _pack_concat(
    writer: RowIndexWriter, counts: _Counts, windows: Iterator[tuple[int, np.ndarray]], seq_len: int, tokens: int
) -> None:
    counts.positions = max(tokens - 1, 0)  # the last token of all is only a label
    counts.rows = -(-counts.positions // seq_len)
    row = open_ends = open_starts = 0  # the row in hand, and what earlier windows held of it

    def close(rows: int, ends: np.ndarray, starts: np.ndarray) -> None:
        """Writes `rows` rows from `row` on; `ends` documents end and `starts` begin inside each."""
        used = np.minimum(seq_len, counts.positions - np.arange(row, row + rows) * seq_len)
        writer.add("missing", seq_len - used + ends)
        counts.targets += int((used - ends).sum())
        counts.max_documents = max(counts.max_documents, int((1 + starts + (used < seq_len)).max(initial=0)))

    for first_token, lengths in windows:
        ends = first_token + np.cumsum(lengths)
        ends = ends[ends <= counts.positions]  # no position follows the last document
        reached = int(first_token + lengths.sum()) // seq_len  # rows before this one are complete
        reached = max(row, min(reached, counts.rows))
        # A document that ends at e has no target at position e - 1; the next one begins at e, inside a row or at one.
        ended = np.bincount((ends - 1) // seq_len - row, minlength=reached - row + 1)
        inside = ends[(ends % seq_len != 0) & (ends < counts.positions)]
        started = np.bincount(inside // seq_len - row, minlength=reached - row + 1)
        ended[0] += open_ends
        started[0] += open_starts
        close(reached - row, ended[: reached - row], started[: reached - row])
        open_ends, open_starts = int(ended[reached - row :].sum()), int(started[reached - row :].sum())
        row = reached
    if row < counts.rows:
        close(1, np.array([open_ends]), np.array([open_starts]))
