"""The container under token shards and row indexes: a header, a payload, a CRC for every block of it.

A reader that touches a few kilobytes of a file of gigabytes can check just the blocks it touches, once
(`BlockFile.check`), while `verify` proves the whole. `shard` and `rows` say what the payload holds;
`docs/data_format.md` describes the bytes. A file is written aside, synced and renamed: whole or absent.
"""

import contextlib
import hashlib
import mmap
import os
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from data_prep.errors import DataError

HEADER_BYTES = 4096  # one page, so that blocks lie on page boundaries
FIELDS_AT = 128  # the container's own fields end before; the kind's fields start here
_HEAD = struct.Struct("<8sIIIIQ32s")  # magic, version, header CRC, block bytes, table CRC, payload bytes, SHA-256
_HEADER_CRC_AT = 12
_CRC = np.dtype("<u4")


class BlockWriter:
    """Streams a payload to a hidden temporary file; `finish` gives it its header and its name."""

    def __init__(self, path: str | Path, *, magic: bytes, version: int, block_bytes: int) -> None:
        self.path = Path(path)
        self.payload_bytes = 0
        self._magic, self._version, self._block_bytes = magic, version, block_bytes
        self._crcs: list[int] = []
        self._crc = self._filled = 0
        self._sha = hashlib.sha256()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = self.path.with_name(f".{self.path.name}.tmp")
        self._file: BinaryIO | None = self._temporary.open("wb")
        self._file.write(bytes(HEADER_BYTES))

    def write(self, data: bytes | bytearray | memoryview | np.ndarray) -> None:
        assert self._file is not None, "written to after finish"
        view = np.ascontiguousarray(data).data if isinstance(data, np.ndarray) else memoryview(data)
        if not view.nbytes:
            return
        view = view.cast("B")
        self._file.write(view)
        self._sha.update(view)
        self.payload_bytes += len(view)
        while len(view):
            part = view[: self._block_bytes - self._filled]
            self._crc = zlib.crc32(part, self._crc)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == self._block_bytes:
                self._close_block()

    def align(self) -> None:
        """Zeros up to the next multiple of 8 bytes, where a section of 64-bit numbers may start."""
        self.write(bytes(-self.payload_bytes % 8))

    def finish(self, fields: bytes) -> str:
        """Writes table and header, syncs, renames. Returns the payload's SHA-256 in hex."""
        assert self._file is not None, "finished twice"
        if self._filled:
            self._close_block()
        table = np.array(self._crcs, _CRC).tobytes()
        self._file.write(table)
        head = _HEAD.pack(
            self._magic, self._version, 0, self._block_bytes, zlib.crc32(table), self.payload_bytes, self._sha.digest()
        )
        header = bytearray((head.ljust(FIELDS_AT, b"\0") + fields).ljust(HEADER_BYTES, b"\0"))
        assert len(header) == HEADER_BYTES
        struct.pack_into("<I", header, _HEADER_CRC_AT, zlib.crc32(header))
        self._file.seek(0)
        self._file.write(header)
        _rename(self._file, self._temporary, self.path, sync=True)
        self._file = None
        return self._sha.hexdigest()

    def abort(self) -> None:
        """Leaves nothing behind; harmless after `finish`."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _close_block(self) -> None:
        self._crcs.append(self._crc)
        self._crc = self._filled = 0


class BlockFile:
    """A finished file, memory-mapped. Opening reads one page, whatever the size."""

    def __init__(self, path: str | Path, *, magic: bytes, version: int, kind: str) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                header = file.read(HEADER_BYTES)
                size = os.fstat(file.fileno()).st_size
                head = self._parse(header, magic, version, kind)
                _, _, _, self.block_bytes, self._table_crc, self.payload_bytes, sha256 = head
                self.blocks = -(-self.payload_bytes // self.block_bytes)
                self._table_at = HEADER_BYTES + self.payload_bytes
                expected = self._table_at + 4 * self.blocks
                if size != expected:
                    raise DataError(
                        f"{self.path}: the header says {expected} bytes, the file has {size}; "
                        "it is cut short or not this dataset's: copy or build it again"
                    )
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be opened as a {kind}: {error.strerror or error}") from error
        self.sha256 = sha256.hex()
        self.fields = header[FIELDS_AT:]
        self._bad: set[int] = set()
        self.trust(np.zeros(self.blocks, bool))
        self._crcs: np.ndarray | None = None

    def _parse(self, header: bytes, magic: bytes, version: int, kind: str) -> tuple:
        if len(header) < HEADER_BYTES or header[:8] != magic:
            raise DataError(f"{self.path}: is no {kind} (starts with {header[:8]!r}, not {magic!r})")
        head = _HEAD.unpack_from(header)
        if head[1] != version:
            raise DataError(f"{self.path}: has format version {head[1]}, this reader knows {version}")
        blank = bytearray(header)
        struct.pack_into("<I", blank, _HEADER_CRC_AT, 0)
        if zlib.crc32(blank) != head[2]:
            raise DataError(f"{self.path}: its header fails its checksum; copy or build it again")
        return head

    def array(self, offset: int, dtype: np.dtype, count: int) -> np.ndarray:
        """`count` numbers at byte `offset` of the payload, not copied."""
        if offset + count * dtype.itemsize > self.payload_bytes:
            raise DataError(f"{self.path}: has {self.payload_bytes} payload bytes, too few for what its header says")
        return np.frombuffer(self._map, dtype, count, HEADER_BYTES + offset)

    def trust(self, proven: np.ndarray) -> None:
        """`proven`: the blocks whose CRC is known to be right. Updated here as more are found so."""
        self.proven = proven
        self._unproven = int((~proven).sum())

    @property
    def whole(self) -> bool:
        """Every block is proven."""
        return not self._unproven

    def check(self, first: np.ndarray, last: np.ndarray) -> None:
        """Proves the blocks under the byte ranges [first[i], last[i]] of the payload, each block once in the
        file's life in this process. A block that fails, now or before, raises DataError."""
        if not self.whole:
            low = first // self.block_bytes
            counts = last // self.block_bytes - low + 1
            ends = counts.cumsum()
            self._prove(np.arange(ends[-1] if len(ends) else 0) + (low - ends + counts).repeat(counts))

    def check_at(self, at: np.ndarray) -> None:
        """The same for single bytes."""
        if not self.whole:
            self._prove(at // self.block_bytes)

    def verify(self) -> None:
        """Every block's CRC, the table's own, and the payload's SHA-256."""
        sha = hashlib.sha256()
        self._table()
        self._bad.clear()
        for data in self._proven_blocks(range(self.blocks)):
            sha.update(data)
        if sha.hexdigest() != self.sha256:
            raise DataError(f"{self.path}: its payload does not have the SHA-256 that its header states")

    def _prove(self, blocks: np.ndarray) -> None:
        unproven = blocks[~self.proven[blocks]]
        if len(unproven):
            deque(self._proven_blocks(np.unique(unproven).tolist()), maxlen=0)

    def _proven_blocks(self, blocks: Iterable[int]) -> Iterator[bytes]:
        """Read, not mapped: one request to the disk, and a failing disk is an error rather than a SIGBUS."""
        crcs = self._table()
        try:
            with self.path.open("rb", buffering=0) as file:
                for block in blocks:
                    start = block * self.block_bytes
                    size = min(self.block_bytes, self.payload_bytes - start)
                    data = os.pread(file.fileno(), size, HEADER_BYTES + start)
                    if block in self._bad or len(data) != size or zlib.crc32(data) != crcs[block]:
                        self._bad.add(block)
                        begin = HEADER_BYTES + start
                        raise DataError(
                            f"{self.path}: bytes {begin} to {begin + size - 1} (block {block} of {self.blocks}) fail "
                            "their checksum; the file was damaged after it was written: copy or build it again"
                        )
                    if not self.proven[block]:
                        self.proven[block] = True
                        self._unproven -= 1
                    yield data
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _table(self) -> np.ndarray:
        if self._crcs is None:
            table = np.frombuffer(self._map, _CRC, self.blocks, self._table_at)
            if zlib.crc32(table.data) != self._table_crc:
                raise DataError(f"{self.path}: its table of checksums is damaged; copy or build it again")
            self._crcs = table
        return self._crcs


@contextlib.contextmanager
def whole_file(path: str | Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A binary file that appears under its name complete, or not at all; if `durable`, also after a power cut."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    file = temporary.open("wb")
    try:
        yield file
        _rename(file, temporary, path, sync=durable)
    except BaseException:
        file.close()
        temporary.unlink(missing_ok=True)
        raise


def _rename(file: BinaryIO, temporary: Path, path: Path, *, sync: bool) -> None:
    file.flush()
    if sync:
        os.fsync(file.fileno())
    file.close()
    os.replace(temporary, path)
    if sync:
        sync_folder(path.parent)  # the rename itself must survive a power cut


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
