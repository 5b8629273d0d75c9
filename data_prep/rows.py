"""Rows of a dataset: inputs, labels, positions and document numbers of any rows, straight from the mapped shards.

A row is `seq_len` positions made of pieces. Which pieces is looked up in the row index (`best_fit`) or follows from
the document ends (`concat`); nothing is scanned or kept, so a thousand shards open as fast as one. Each block of a
shard is checked against its CRC when a row first touches it.
"""

import hashlib
import itertools
import resource
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from data_prep.errors import DataError
from data_prep.row_index import Packing, PackingInfo, RowIndex, index_path, packings, shards_hash
from data_prep.shard import Manifest, Shard, shard_path, token_dtype
from data_prep.sums import check_sums

IGNORE = -100  # the label of a position that is no target
_U64 = np.dtype("<u8")
_PAIR = np.array([0, 1])
_PADDING = -1  # in place of a shard


class RowBatch(NamedTuple):
    """B rows of T positions. Without document masking, positions run over the row and documents are 0."""

    inputs: np.ndarray  # int64 [B, T]; padding holds EOS, or 0
    labels: np.ndarray  # int64 [B, T]; IGNORE where there is no target
    positions: np.ndarray  # int32 [B, T], from 0 in each piece
    documents: np.ndarray  # int32 [B, T], from 0 in each row; padding is -1
    starts: np.ndarray  # int32 [B, max_documents_per_row]: where each piece, or padding, begins; then T

    @classmethod
    def empty(cls, rows: int, length: int, documents: int) -> Self:
        """To be filled, `starts` but for what is T. In one piece of memory, which the allocator keeps for the next:
        of several it returns some, and new pages take as long to get as to fill."""
        ids, others = np.split(np.empty(6 * rows * length, np.int32), [4 * rows * length])
        shape = (2, rows, length)
        starts = np.full((rows, documents), length, np.int32)
        return cls._make((*ids.view(np.int64).reshape(shape), *others.reshape(shape), starts))


class RowPiece(NamedTuple):
    """Where part of a row comes from."""

    at: int  # its first position in the row
    size: int  # positions
    shard: str
    document: int  # in its shard
    start: int  # its first token in the document
    source: int  # index into the dataset's source files
    line: int


class _Pieces(NamedTuple):
    counts: np.ndarray  # pieces of each row; the others have one entry per piece, in row order
    shard: np.ndarray
    start: np.ndarray  # token in the shard
    size: np.ndarray
    closes: np.ndarray  # the last position's label is another document's token (concat)


class Rows:
    """The rows of one split. Not for several threads at once: the set of open shards is kept without a lock."""

    def __init__(
        self,
        folder: str | Path,
        split: str,
        manifest: Manifest,
        index: RowIndex,
        *,
        mask_documents: bool,
        max_open: int,
    ) -> None:
        self.folder, self.split, self.mask_documents = Path(folder), split, mask_documents
        self.shards = manifest.shards(split)
        self.info: PackingInfo = index.info
        self.seq_len = self.info.seq_len
        self.packing = self.info.packing
        self.vocab_size = manifest.tokenizer.vocab_size
        self.tokenizer_hash = manifest.tokenizer.hash
        self.num_bytes = self.info.num_bytes  # of text in the documents that have targets
        self.max_documents_per_row = max(self.info.max_documents, 1) if mask_documents else 1
        self._index, self._max_open = index, max_open
        self._filler = np.full(self.seq_len, manifest.tokenizer.eos_id or 0, token_dtype(self.vocab_size))
        self._ends = np.cumsum([shard.tokens for shard in self.shards], dtype=np.int64)
        self._begins = np.concatenate([[0], self._ends])
        self._document_ends = np.cumsum([shard.documents for shard in self.shards], dtype=np.int64)
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._proven: dict[int, np.ndarray] = {}  # which blocks are proven, also of shards closed meanwhile

    def __len__(self) -> int:
        return self.info.rows

    @property
    def num_targets(self) -> int:
        """Of all rows together."""
        return self.info.targets if self.mask_documents else self.info.positions

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides what the rows hold."""
        parts = (self.tokenizer_hash, self.info.shards_hash, self._index.file.sha256, self.packing, self.seq_len)
        return hashlib.sha256(" ".join(map(str, (*parts, self.mask_documents))).encode()).hexdigest()

    def targets(self, indices: np.ndarray) -> np.ndarray:
        """int64 [n]: labels that count in each row. Reads no token."""
        if self.packing == "concat" and not self.mask_documents:
            return self.tokens(indices)
        return self.seq_len - self._index.look_up("missing", self._in_range(indices))

    def tokens(self, indices: np.ndarray) -> np.ndarray:
        """int64 [n]: positions of each row that are no padding. Reads no token."""
        indices = self._in_range(indices)
        if self.packing == "concat":
            return np.minimum(self.seq_len, self.info.positions - indices * self.seq_len)
        return self.seq_len - self._index.look_up("missing", indices)

    def read(self, indices: np.ndarray) -> RowBatch:
        """The rows, in the order asked for. A damaged or missing shard raises DataError."""
        indices = self._in_range(indices)
        length = self.seq_len
        pieces = self._pieces(indices)
        tokens, lasts = self._proven_tokens(pieces)
        counts, shard, start, size, closes = self._pad(pieces)
        end = size.cumsum()  # of each piece in the flattened rows
        begin, padding = end - size, shard == _PADDING
        # A copy of each piece is half as dear as one gather, which needs an index for every position; and tokens as
        # they are stored stay in the cache until both have been made of them.
        spans = zip(shard.tolist(), start.tolist(), (start + size).tolist(), strict=True)
        stored = np.concatenate([self._filler[:0], *(tokens[number][first:stop] for number, first, stop in spans)])
        rows = RowBatch.empty(len(indices), length, self.max_documents_per_row)
        inputs, labels = rows.inputs.reshape(-1), rows.labels.reshape(-1)
        inputs[:], labels[:-1] = stored, stored[1:]
        labels[end[~padding] - 1] = lasts
        self._close_documents(labels, end[closes] - 1, shard[closes], (start + size)[closes])
        filled = _ranges(begin[padding], size[padding])
        labels[filled] = IGNORE
        if self.mask_documents:
            begin %= length
            number = _ranges(np.zeros_like(counts), counts)
            rows.starts[np.arange(len(indices)).repeat(counts), number] = begin
            number[padding] = -1
            rows.documents.reshape(-1)[:] = number.astype(np.int32).repeat(size)
            begins = begin.astype(np.int32).repeat(size).reshape(-1, length)
            np.subtract(np.arange(length, dtype=np.int32), begins, out=rows.positions)
            rows.positions.reshape(-1)[filled] = 0
        else:
            rows.positions[:], rows.documents[:], rows.starts[:] = np.arange(length), 0, 0
        return rows

    def pieces(self, row: int) -> list[RowPiece]:
        """Where a row's tokens come from, in order."""
        _, shards, starts, sizes, _ = self._pieces(self._in_range(np.array([row])))
        found, at = [], 0
        for number, start, size in zip(shards.tolist(), starts.tolist(), sizes.tolist(), strict=True):
            shard = self._shard(number)
            document = int(np.searchsorted(shard.document_ends, np.array(start, _U64), "right"))
            begin = int(shard.document_ends[document - 1]) if document else 0
            source, line = int(shard.sources[document]), int(shard.lines[document])
            found.append(RowPiece(at, size, shard.path.name, document, start - begin, source, line))
            at += size
        return found

    def rows_of(self, document: int) -> np.ndarray:
        """int64 [n]: the rows that hold a document of the split, counted over its shards in order."""
        number = int(np.searchsorted(self._document_ends, document, "right"))
        if document < 0 or number >= len(self.shards):
            raise DataError(f"document {document}: split {self.split!r} of {self.folder} has {self.info.documents}")
        shard, base = self._shard(number), self._ends[number] - self.shards[number].tokens
        local = document - (int(self._document_ends[number]) - self.shards[number].documents)
        begin = int(base) + (int(shard.document_ends[local - 1]) if local else 0)
        end = int(base) + int(shard.document_ends[local])
        if self.packing == "concat":
            last = min(end, self.info.positions) - 1  # the very last token of all has no position
            return np.arange(begin // self.seq_len, last // self.seq_len + 1)
        index = self._index
        windows = index.windows.reshape(-1, 2)
        window = int(np.searchsorted(windows[:, 1], np.array(begin, _U64), "right")) - 1
        low = int(windows[window, 0])
        high = int(windows[window + 1, 0]) if window + 1 < len(windows) else self.info.pieces
        starts = index.starts[low:high]
        hits = low + np.flatnonzero((starts >= begin) & (starts < end))
        return np.unique(np.searchsorted(index.first, hits.astype(_U64), "right") - 1)

    def _pieces(self, indices: np.ndarray) -> _Pieces:
        if self.packing == "concat":
            return self._concat_pieces(indices)
        index = self._index
        bounds = index.look_up("first", indices[:, None] + _PAIR)
        first, counts = bounds[:, 0], bounds[:, 1] - bounds[:, 0]
        if (counts < 0).any() or (first + counts > self.info.pieces).any():
            raise self._damaged_index()
        which = _ranges(first, counts)
        start, size = index.look_up("starts", which), index.look_up("sizes", which)
        shard = self._ends.searchsorted(start, "right")
        if (start + size >= self._ends.take(shard, mode="clip")).any():  # a piece needs one token more
            raise self._damaged_index()
        start -= self._begins[shard]
        return _Pieces(counts, shard, start, size, np.zeros(len(size), bool))

    def _concat_pieces(self, indices: np.ndarray) -> _Pieces:
        low = indices * self.seq_len
        high = low + self.tokens(indices)
        begins = self._begins
        first = np.searchsorted(self._ends, low, "right")
        spans = np.searchsorted(self._ends, high - 1, "right") - first + 1  # shards that the row reaches into
        shard = _ranges(first, spans)
        start = np.maximum(np.repeat(low, spans), begins[shard]) - begins[shard]
        end = np.minimum(np.repeat(high, spans), begins[shard + 1]) - begins[shard]
        # Documents of each span: `document` holds its first token, `documents` more begin inside.
        document, documents = np.empty_like(start), np.empty_like(start)
        for number in np.unique(shard).tolist():
            here, ends = shard == number, self._shard(number).document_ends
            document[here] = np.searchsorted(ends, start[here].astype(_U64), "right")
            documents[here] = np.searchsorted(ends, end[here].astype(_U64), "left") - document[here] + 1
        documents[start >= end] = 0  # a shard without documents, between two others
        which = _ranges(document, documents)
        span = np.repeat(np.arange(len(shard)), documents)
        stop = np.empty_like(which)
        for number in np.unique(shard).tolist():
            here = shard[span] == number
            stop[here] = self._shard(number).document_ends[which[here]].astype(np.int64)
        closes = stop <= end[span]
        stop = np.minimum(stop, end[span])
        begin = np.empty_like(stop)
        begin[1:] = stop[:-1]
        begin[(np.cumsum(documents) - documents)[documents > 0]] = start[documents > 0]
        counts = np.add.reduceat(documents, np.cumsum(spans) - spans) if len(spans) else documents
        return _Pieces(counts, shard[span], begin, stop - begin, closes)

    def _proven_tokens(self, pieces: _Pieces) -> tuple[dict[int, np.ndarray], np.ndarray]:
        """The tokens of each shard that the pieces lie in, those of fill, and the token that each piece stops at;
        after a look at the checksums below them."""
        _, shard, start, size, _ = pieces
        last = np.minimum(start + size, self._ends[shard] - self._begins[shard] - 1)
        tokens, lasts = {_PADDING: self._filler}, np.empty(len(size), np.int64)
        cuts = [0, *((shard[1:] != shard[:-1]).nonzero()[0] + 1).tolist(), len(shard)] if len(shard) else []
        for low, high in itertools.pairwise(cuts):
            mapped = self._shard(number := int(shard[low]))
            mapped.check_tokens(start[low:high], last[low:high])
            tokens[number] = mapped.tokens
            lasts[low:high] = mapped.tokens[last[low:high]]
        return tokens, lasts

    def _pad(self, pieces: _Pieces) -> _Pieces:
        """What is left of a row as one more piece at its end, of a shard of fill."""
        counts, shard, start, size, closes = pieces
        ends = counts.cumsum()
        padding = self.seq_len - np.add.reduceat(size, ends - counts) if len(size) else counts
        if (padding < 0).any():
            raise self._damaged_index()
        short = padding.nonzero()[0]
        if not len(short):
            return pieces
        kept = np.ones(len(size) + len(short), bool)
        kept[ends[short] + np.arange(len(short))] = False

        def spread(values: np.ndarray, added: np.ndarray | int) -> np.ndarray:
            out = np.empty(len(kept), values.dtype)
            out[kept], out[~kept] = values, added
            return out

        padded = spread(shard, _PADDING), spread(start, 0), spread(size, padding[short]), spread(closes, False)
        return _Pieces(counts + (padding > 0), *padded)

    def _close_documents(self, labels: np.ndarray, at: np.ndarray, shard: np.ndarray, end: np.ndarray) -> None:
        """Concat: the labels at `at`, of pieces that stop at token `end`, are other documents' first tokens."""
        if self.mask_documents:
            labels[at] = IGNORE
            return
        for where, number, stop in zip(at.tolist(), shard.tolist(), end.tolist(), strict=True):
            if stop == self.shards[number].tokens:  # the stream goes on in the next shard that is not empty
                follower = int(np.searchsorted(self._ends, self._ends[number], "right"))
                labels[where] = self._shard(follower).tokens[0]

    def _shard(self, number: int) -> Shard:
        shard = self._open.get(number)
        if shard is not None:
            self._open.move_to_end(number)
            return shard
        info = self.shards[number]
        shard = Shard(shard_path(self.folder, info))
        if (shard.header.tokens, shard.header.documents, shard.header.sha256) != (
            info.tokens,
            info.documents,
            info.sha256,
        ):
            raise DataError(f"{shard.path}: is not the shard that the manifest names; build the dataset again")
        shard.file.trust(self._proven.setdefault(number, shard.file.proven))
        self._open[number] = shard
        if len(self._open) > self._max_open:  # a mapping holds a file descriptor
            self._open.popitem(last=False)
        return shard

    def _in_range(self, indices: np.ndarray) -> np.ndarray:
        indices = np.asarray(indices, np.int64)
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"rows {indices.min()} to {indices.max()} of {self.folder}, which has {len(self)}")
        return indices

    def _damaged_index(self) -> DataError:
        return DataError(
            f"{self._index.path}: contradicts itself; "
            f"run `pretrain-data pack {self.folder} --seq-len {self.seq_len} --packing {self.packing}`"
        )


def open_rows(
    folder: str | Path,
    split: str,
    seq_len: int,
    packing: Packing | None = None,
    *,
    mask_documents: bool = True,
    max_open: int | None = None,
) -> Rows:
    """The rows of a split. Without `packing`, best_fit where it was packed, else concat.
    `max_open` bounds the shards held open. Manifest and tokenizer must be as they were written.
    """
    manifest = Manifest.read(folder)
    if manifest.tokenizer.files:
        check_sums(Path(folder), everything=False)
    if split not in manifest.splits:
        raise DataError(f"{folder} has no split {split!r}; it has {', '.join(manifest.splits) or 'none'}")
    found = packings(folder, split)
    if packing is None:
        packing = "concat" if (seq_len, "best_fit") not in found and (seq_len, "concat") in found else "best_fit"
    if (seq_len, packing) not in found:
        have = ", ".join(f"{length} ({kind})" for length, kind in found) or "none"
        raise DataError(
            f"{folder} has no rows of seq_len={seq_len} with packing={packing!r} for split {split!r}; it has {have}; "
            f"run `pretrain-data pack {folder} --seq-len {seq_len} --packing {packing}`"
        )
    index = RowIndex(index_path(folder, split, seq_len, packing))
    if index.info.shards_hash != shards_hash(manifest.shards(split)) or index.info.seq_len != seq_len:
        raise DataError(
            f"{index.path}: was made for other shards; "
            f"run `pretrain-data pack {folder} --seq-len {seq_len} --packing {packing}`"
        )
    return Rows(folder, split, manifest, index, mask_documents=mask_documents, max_open=max_open or open_limit())


def open_limit(datasets: int = 1) -> int:
    """Shards that each of so many datasets may hold open: together a quarter of this process's file descriptors."""
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // (4 * datasets))


def _ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ... (counts[0] numbers), first[1], ..."""
    ends = counts.cumsum()
    return np.arange(int(ends[-1]) if len(ends) else 0) + (first - ends + counts).repeat(counts)
