"""What a unit of a build leaves for its group: bare tokens, then one row of numbers a document, under one CRC.

Only `worker` writes and reads parts, within one build on one kind of machine, and removes them; so they are plain
and cheap: no fsync (a kill cannot lose them; a power cut can, which the CRC shows), no header. What is needed to
read a part, its `PartInfo`, stands in the unit's report.
"""

from __future__ import annotations

import os
import zlib
from array import array
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from data_prep.errors import DataError
from data_prep.shard import ShardWriter, token_dtype

_FLUSH_TOKENS = 1 << 15  # few enough to stay in the cache
_COPY_TOKENS = 1 << 22
_COLUMNS = 4  # length, source, line, bytes of text


class PartInfo(NamedTuple):
    tokens: int
    documents: int
    crc: int


class PartWriter:
    """Documents of one unit and split. Creates its file only when there is one."""

    def __init__(self, scratch: Path, vocab_size: int, before: list[int], after: list[int]):
        self.tokens = self.documents = 0
        self._scratch, self._dtype = scratch, token_dtype(vocab_size)
        self._before, self._after = np.array(before, np.uint32), np.array(after, np.uint32)
        self._around = len(before) + len(after)
        self._held: list[np.ndarray] = []
        self._held_tokens = self._crc = 0
        self._table = array("Q")
        self._file: BinaryIO | None = None

    def add(self, ids: np.ndarray, source: int, line: int, num_bytes: int) -> None:
        """`ids` without BOS and EOS, which are put around them here."""
        self._held += (self._before, ids, self._after)
        length = len(ids) + self._around
        self._table.extend((length, source, line, num_bytes))
        self.tokens += length
        self.documents += 1
        self._held_tokens += length
        if self._held_tokens >= _FLUSH_TOKENS:
            self._flush()

    def finish(self, path: Path) -> PartInfo | None:
        """Puts the part in its place; None and no file if it has no document."""
        if not self.documents:
            return None
        self._flush()
        self._write(self._table)
        assert self._file is not None
        self._file.close()
        self._file = None
        os.replace(self._scratch, path)
        return PartInfo(self.tokens, self.documents, self._crc)

    def abort(self) -> None:
        if self._file is not None:
            self._file.close()
            self._scratch.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._held:
            self._write(np.concatenate(self._held, dtype=self._dtype, casting="unsafe").data)
        self._held, self._held_tokens = [], 0

    def _write(self, data: memoryview | array[int]) -> None:
        if self._file is None:
            self._file = self._scratch.open("wb")
        self._crc = zlib.crc32(data, self._crc)
        self._file.write(data)


def copy_part(path: Path, info: PartInfo, vocab_size: int, writer: ShardWriter) -> None:
    """Appends a part to a shard. DataError if it is not what was written."""
    dtype = token_dtype(vocab_size)
    table_at, size = info.tokens * dtype.itemsize, info.tokens * dtype.itemsize + info.documents * _COLUMNS * 8
    try:
        content = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if len(content) != size or _crc(content) != info.crc:
        raise DataError(f"{path}: is not as it was written")
    tokens = content[:table_at].view(dtype)
    lengths, sources, lines, num_bytes = content[table_at:].copy().view(np.uint64).reshape(-1, _COLUMNS).T
    ends = np.cumsum(lengths)
    first = begin = 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, np.uint64(begin + _COPY_TOKENS), "right")))
        chosen, end = slice(first, last), int(ends[last - 1])
        writer.add_documents(
            tokens[begin:end],
            lengths[chosen],
            sources=sources[chosen],
            lines=lines[chosen],
            num_bytes=num_bytes[chosen],
        )
        first, begin = last, end


def _crc(content: np.ndarray) -> int:
    crc = 0
    for at in range(0, len(content), 1 << 24):
        crc = zlib.crc32(content[at : at + (1 << 24)].data, crc)
    return crc
