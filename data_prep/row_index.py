"""The file that says which tokens make up each row: DIR/rows/<split>-<seq_len>-<packing>.rows.

`pack` writes it, `rows` reads tokens by it. Its arrays are memory-mapped and looked up, never loaded: opening one
costs a page, for a thousand rows as for a billion. `docs/data_format.md` is the specification.
"""

import dataclasses
import hashlib
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from data_prep.blockfile import BlockFile, BlockWriter
from data_prep.errors import DataError
from data_prep.shard import ShardInfo

Packing = Literal["best_fit", "concat"]

MAGIC = b"ROWINDEX"
VERSION = 1
BLOCK_BYTES = 4096  # rows are looked up at random, so a block is a page
# packing (0 best_fit, 1 concat), unused, seq_len, rows, pieces, windows, documents, documents left out, tokens,
# positions, targets, bytes of text, most documents in a row, hash of the shards
_FIELDS = struct.Struct("<II11Q32s")
_U64, _U32 = np.dtype("<u8"), np.dtype("<u4")
_COPY_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True)
class PackingInfo:
    """What a row index says of itself; for `concat`, targets and bytes are those with documents masked."""

    packing: Packing
    seq_len: int
    rows: int
    pieces: int  # best_fit: runs of consecutive tokens that fill the rows; concat: 0
    windows: int  # best_fit: groups of documents that were packed together; concat: 0
    documents: int
    left_out: int  # documents of one token, which have no target
    tokens: int  # in the shards
    positions: int  # that hold a token; the rest of rows x seq_len is padding
    targets: int
    num_bytes: int  # of text in the documents that have targets
    max_documents: int  # most pieces in a row, its padding counted as one
    shards_hash: str

    @property
    def padding_fraction(self) -> float:
        return 1 - self.positions / (self.rows * self.seq_len) if self.rows else 0.0


def index_path(folder: str | Path, split: str, seq_len: int, packing: str) -> Path:
    return Path(folder) / "rows" / f"{split}-{seq_len}-{packing}.rows"


def packings(folder: str | Path, split: str) -> list[tuple[int, Packing]]:
    """(seq_len, packing) of every row index of a split that the folder holds."""
    found: list[tuple[int, Packing]] = []
    for path in (Path(folder) / "rows").glob(f"{split}-*.rows"):
        length, _, packing = path.stem.removeprefix(f"{split}-").partition("-")
        found += [(int(length), kind) for kind in get_args(Packing) if kind == packing and length.isdigit()]
    return sorted(found)


def shards_hash(shards: Iterable[ShardInfo]) -> str:
    """What a row index remembers of the shards it was made for."""
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(f"{shard.file} {shard.tokens} {shard.documents} {shard.sha256}\n".encode())
    return digest.hexdigest()


class RowIndex:
    """`info`, and the arrays of the file:

    missing   u32 [rows]       positions of the row that are no target: padding, and in concat ends of documents
    first     u64 [rows + 1]   best_fit: the row's pieces are first[r] .. first[r + 1]
    starts    u64 [pieces]     the piece's first token, counted over the split's shards in order
    sizes     u32 [pieces]     its positions; a piece of n positions takes n + 1 tokens
    windows   u64 [windows, 2] the window's first piece and first token
    """

    def __init__(self, path: str | Path) -> None:
        self.file = BlockFile(path, magic=MAGIC, version=VERSION, kind="row index")
        self.path = self.file.path
        packing, _, *numbers, shards = _FIELDS.unpack_from(self.file.fields)
        if packing >= len(get_args(Packing)):
            raise DataError(f"{self.path}: has an unknown packing, number {packing}")
        self.info = PackingInfo(get_args(Packing)[packing], *[*numbers, shards.hex()])
        rows, pieces, windows = self.info.rows, self.info.pieces, self.info.windows
        best_fit = self.info.packing == "best_fit"
        self._at, end = {}, 0
        for name, count, dtype in (
            ("windows", 2 * windows, _U64),
            ("first", rows + 1 if best_fit else 0, _U64),
            ("starts", pieces, _U64),
            ("missing", rows, _U32),
            ("sizes", pieces, _U32),
        ):
            self._at[name] = (end, dtype.itemsize)
            setattr(self, name, self.file.array(end, dtype, count))
            end += dtype.itemsize * count
        if end != self.file.payload_bytes:
            raise DataError(f"{self.path}: its counts take {end} bytes, the payload has {self.file.payload_bytes}")

    windows: np.ndarray
    first: np.ndarray
    starts: np.ndarray
    missing: np.ndarray
    sizes: np.ndarray

    def look_up(self, name: str, indices: np.ndarray) -> np.ndarray:
        """int64 values of one array, the blocks they lie in checked once."""
        offset, width = self._at[name]
        self.file.check_at(offset + indices * width)
        return getattr(self, name)[indices].astype(np.int64)


class RowIndexWriter:
    """Collects the arrays piecewise in unnamed temporary files, then writes the index; memory stays small."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._parts = {
            name: tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 (closed by `close`)
            for name in ("windows", "first", "starts", "missing", "sizes")
        }

    def add(self, name: str, values: np.ndarray) -> None:
        dtype = _U32 if name in ("missing", "sizes") else _U64
        self._parts[name].write(values.astype(dtype).data)

    def finish(self, info: PackingInfo) -> None:
        numbers = (getattr(info, field.name) for field in dataclasses.fields(info)[1:-1])
        fields = _FIELDS.pack(get_args(Packing).index(info.packing), 0, *numbers, bytes.fromhex(info.shards_hash))
        with BlockWriter(self._path, magic=MAGIC, version=VERSION, block_bytes=BLOCK_BYTES) as out:
            for part in self._parts.values():
                part.seek(0)
                while data := part.read(_COPY_BYTES):
                    out.write(data)
            out.finish(fields)

    def close(self) -> None:
        for part in self._parts.values():
            part.close()
