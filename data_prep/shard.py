"""THE FORMAT: a token shard, its writer and memory-mapped reader, and the manifest over a dataset's shards.

A shard holds whole documents, one after the other, as bare token ids, then for each document where it ends,
which line of which source file it came from and how many bytes of text it was. `docs/data_format.md` is the
specification. Everything that trains stands on this file; it knows nothing of text, tokenizers or torch.
"""

import dataclasses
import json
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np

from data_prep.blockfile import BlockFile, BlockWriter, whole_file
from data_prep.errors import DataError

MAGIC = b"TOKSHARD"
VERSION = 1
BLOCK_BYTES = 32768  # of payload under one CRC: what a reader checks when it first touches a row there
KIND = "token shard"
# token bytes, unused, vocabulary size, tokens, documents, bytes of text, BOS id, EOS id (-1: none), tokenizer hash
_FIELDS = struct.Struct("<IIQQQQqq32s")
_U64, _U32 = np.dtype("<u8"), np.dtype("<u4")
_FLUSH_TOKENS = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype:
    """16 bits while every id below `vocab_size` fits, else 32."""
    return np.dtype("<u2") if vocab_size <= 65536 else np.dtype("<u4")


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    """What the manifest says of one shard."""

    file: str  # its name in the dataset's shards/ folder
    tokens: int
    documents: int
    num_bytes: int  # UTF-8 bytes of the documents' text
    sha256: str  # of the shard's payload, as in its header


class ShardWriter:
    """Writes one shard: documents are streamed to a temporary file, `finish` makes it whole under its name.

    The bytes depend on nothing but the arguments. Per document 28 bytes are kept in memory until `finish`.
    As a context manager it removes its temporary file when left without `finish`.
    """

    def __init__(
        self, path: str | Path, *, vocab_size: int, tokenizer_hash: str, bos_id: int | None, eos_id: int | None
    ) -> None:
        if vocab_size < 1 or vocab_size > 2**32:
            raise DataError(f"vocab_size={vocab_size} cannot be stored; it must lie between 1 and 2^32")
        for name, token in (("bos_id", bos_id), ("eos_id", eos_id)):
            if token is not None and not 0 <= token < vocab_size:
                raise DataError(f"{name}={token} is no id of a vocabulary of {vocab_size} tokens")
        self.path = Path(path)
        self.tokens = self.documents = self.num_bytes = 0
        self._vocab_size, self._bos_id, self._eos_id = vocab_size, bos_id, eos_id
        self._tokenizer = _hash_bytes(tokenizer_hash)
        self._dtype = token_dtype(vocab_size)
        self._ends, self._sources, self._lines, self._sizes = array("Q"), array("I"), array("Q"), array("Q")
        self._held: list[np.ndarray] = []
        self._held_tokens = 0
        self._file = BlockWriter(path, magic=MAGIC, version=VERSION, block_bytes=BLOCK_BYTES)

    def add_document(self, tokens: np.ndarray, *, source: int, line: int, num_bytes: int) -> None:
        """`tokens` with BOS and EOS as they shall be trained; `source` indexes the dataset's source files,
        `line` counts from 1 in it; `num_bytes` is the text's length in UTF-8."""
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
            raise DataError(
                f"{self.path.name}: document {self.documents} is {tokens.dtype} of shape {tokens.shape}; "
                "a document is a list of at least one whole number"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                f"{self.path.name}: document {self.documents} (source {source}, line {line}) holds token id "
                f"{low if low < 0 else high}, but the vocabulary has {self._vocab_size} tokens; "
                "count the tokenizer's added tokens in its size"
            )
        self.tokens += len(tokens)
        self.documents += 1
        self.num_bytes += num_bytes
        self._ends.append(self.tokens)
        self._sources.append(source)
        self._lines.append(line)
        self._sizes.append(num_bytes)
        self._held.append(tokens.astype(self._dtype))  # a copy: the caller may reuse its buffer
        self._held_tokens += len(tokens)
        if self._held_tokens >= _FLUSH_TOKENS:
            self._flush()

    def add_documents(
        self, tokens: np.ndarray, lengths: np.ndarray, *, sources: np.ndarray, lines: np.ndarray, num_bytes: np.ndarray
    ) -> None:
        """Many documents at once: their tokens end to end, then one number each, as in `add_document`."""
        if tokens.dtype.kind not in "iu" or int(lengths.sum()) != len(tokens) or int(lengths.min(initial=1)) < 1:
            raise DataError(f"{self.path.name}: {len(tokens)} tokens ({tokens.dtype}) are not {len(lengths)} documents")
        if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size):
            low, high = int(tokens.min()), int(tokens.max())
            raise DataError(
                f"{self.path.name}: documents {self.documents} to {self.documents + len(lengths) - 1} hold token id "
                f"{low if low < 0 else high}, but the vocabulary has {self._vocab_size} tokens; "
                "count the tokenizer's added tokens in its size"
            )
        self._flush()
        self._ends.frombytes((np.cumsum(lengths, dtype=np.uint64) + np.uint64(self.tokens)).tobytes())
        self._sources.frombytes(np.asarray(sources, np.uint32).tobytes())
        self._lines.frombytes(np.asarray(lines, np.uint64).tobytes())
        self._sizes.frombytes(np.asarray(num_bytes, np.uint64).tobytes())
        self.tokens += len(tokens)
        self.documents += len(lengths)
        self.num_bytes += int(num_bytes.sum(dtype=np.uint64))
        self._file.write(np.ascontiguousarray(tokens, self._dtype))

    def finish(self) -> ShardInfo:
        self._flush()
        self._file.align()
        self._file.write(np.array(self._ends, _U64))
        self._file.write(np.array(self._lines, _U64))
        self._file.write(np.array(self._sizes, _U64))
        self._file.write(np.array(self._sources, _U32))
        sha256 = self._file.finish(
            _FIELDS.pack(
                self._dtype.itemsize,
                0,
                self._vocab_size,
                self.tokens,
                self.documents,
                self.num_bytes,
                -1 if self._bos_id is None else self._bos_id,
                -1 if self._eos_id is None else self._eos_id,
                self._tokenizer,
            )
        )
        return ShardInfo(self.path.name, self.tokens, self.documents, self.num_bytes, sha256)

    def abort(self) -> None:
        self._file.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _flush(self) -> None:
        if self._held:
            self._file.write(np.concatenate(self._held))
        self._held, self._held_tokens = [], 0


@dataclasses.dataclass(frozen=True)
class ShardHeader:
    token_bytes: int
    vocab_size: int
    tokens: int
    documents: int
    num_bytes: int
    bos_id: int | None
    eos_id: int | None
    tokenizer_hash: str
    sha256: str


class Shard:
    """A shard, memory-mapped and read-only; opening costs one page, whatever its size.

    `tokens` and the per-document arrays are views of the file; nothing is copied until it is used.
    """

    def __init__(self, path: str | Path) -> None:
        self.file = BlockFile(path, magic=MAGIC, version=VERSION, kind=KIND)
        self.path = self.file.path
        width, _, vocab_size, tokens, documents, num_bytes, bos, eos, tokenizer = _FIELDS.unpack_from(self.file.fields)
        self.header = ShardHeader(
            width,
            vocab_size,
            tokens,
            documents,
            num_bytes,
            None if bos < 0 else bos,
            None if eos < 0 else eos,
            tokenizer.hex(),
            self.file.sha256,
        )
        dtype = token_dtype(vocab_size)
        if width != dtype.itemsize:
            raise DataError(
                f"{self.path}: stores tokens in {width} bytes, "
                f"but its vocabulary of {vocab_size} takes {dtype.itemsize}"
            )
        ends_at = -(-tokens * width // 8) * 8
        lines_at = ends_at + 8 * documents
        sizes_at = lines_at + 8 * documents
        sources_at = sizes_at + 8 * documents
        if self.file.payload_bytes != sources_at + 4 * documents:
            raise DataError(
                f"{self.path}: {tokens} tokens and {documents} documents take {sources_at + 4 * documents} bytes, "
                f"but the payload has {self.file.payload_bytes}"
            )
        self.tokens = self.file.array(0, dtype, tokens)
        self.document_ends = self.file.array(ends_at, _U64, documents)  # exclusive, in tokens of this shard
        self.lines = self.file.array(lines_at, _U64, documents)
        self.num_bytes = self.file.array(sizes_at, _U64, documents)
        self.sources = self.file.array(sources_at, _U32, documents)

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document."""
        begin = int(self.document_ends[index - 1]) if index else 0
        return self.tokens[begin : int(self.document_ends[index])]

    def check_tokens(self, first: np.ndarray, last: np.ndarray) -> None:
        """Checksums of the blocks that hold the tokens [first[i], last[i]], each block once; DataError if bad."""
        if not self.file.whole:
            width = self.header.token_bytes
            self.file.check(first * width, last * width)

    def check_documents(self) -> None:
        """The same for everything that is kept of the documents beside their tokens."""
        begin = -(-self.header.tokens * self.header.token_bytes // 8) * 8
        if self.header.documents:
            self.file.check(np.array([begin]), np.array([self.file.payload_bytes - 1]))

    def verify(self) -> None:
        """Every checksum, and that ends, counts and ids are in bounds; DataError names the file."""
        self.file.verify()
        ends, header = self.document_ends, self.header
        if header.documents and not (ends[0] > 0 and (ends[1:] > ends[:-1]).all()):
            raise DataError(f"{self.path}: its document ends do not rise")
        if (int(ends[-1]) if header.documents else 0) != header.tokens:
            raise DataError(f"{self.path}: its documents do not end with its {header.tokens} tokens")
        if int(self.num_bytes.sum(dtype=np.uint64)) != header.num_bytes:
            raise DataError(f"{self.path}: its documents' bytes do not sum to {header.num_bytes}")
        for at in range(0, header.tokens, _FLUSH_TOKENS):
            highest = int(self.tokens[at : at + _FLUSH_TOKENS].max())
            if highest >= header.vocab_size:
                raise DataError(f"{self.path}: holds token id {highest}, its vocabulary has {header.vocab_size}")


@dataclasses.dataclass(frozen=True)
class TokenizerInfo:
    kind: str  # sentencepiece | tiktoken | huggingface
    hash: str  # SHA-256 in hex over the tokenizer's files and the settings that change ids
    vocab_size: int  # with added tokens: one more than the highest id
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    files: tuple[str, ...] = ()  # names in the dataset's tokenizer/ folder


@dataclasses.dataclass(frozen=True)
class Skipped:
    count: int
    first: str  # "FILE:LINE" of the first one


@dataclasses.dataclass(frozen=True)
class SourceFile:
    path: str
    documents: int
    tokens: int
    num_bytes: int
    first_line: int = 1  # a large file is several entries; line k of an entry is line first_line - 1 + k of the file


@dataclasses.dataclass(frozen=True)
class Manifest:
    """DIR/manifest.json. The list of source files, which may be long, lies beside it (`read_sources`)."""

    tokenizer: TokenizerInfo
    splits: dict[str, tuple[ShardInfo, ...]]  # train and, with a validation share, val; order is data order
    skipped: dict[str, Skipped] = dataclasses.field(default_factory=dict)  # by reason
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # what the build was told, for people
    version: int = VERSION

    @classmethod
    def read(cls, folder: str | Path) -> "Manifest":
        path = Path(folder) / "manifest.json"
        raw = _read_json(path, folder)
        if isinstance(raw, dict) and raw.get("version") != VERSION:
            raise DataError(f"{path}: has format version {raw.get('version')}, this reader knows {VERSION}")
        try:
            tokenizer = dict(raw["tokenizer"])
            tokenizer["files"] = tuple(tokenizer["files"])
            return cls(
                tokenizer=TokenizerInfo(**tokenizer),
                splits={name: tuple(ShardInfo(**info) for info in infos) for name, infos in raw["splits"].items()},
                skipped={reason: Skipped(**entry) for reason, entry in raw["skipped"].items()},
                settings=raw["settings"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path}: is no manifest ({type(error).__name__}: {error}); build the dataset again"
            ) from error

    def write(self, folder: str | Path) -> None:
        _write_json(Path(folder) / "manifest.json", {"version": self.version, **dataclasses.asdict(self)})

    def shards(self, split: str) -> tuple[ShardInfo, ...]:
        return self.splits.get(split, ())


def shard_path(folder: str | Path, info: ShardInfo) -> Path:
    return Path(folder) / "shards" / info.file


def read_sources(folder: str | Path) -> tuple[SourceFile, ...]:
    """DIR/sources.json: the files that the shards' `sources` number."""
    path = Path(folder) / "sources.json"
    try:
        return tuple(SourceFile(**entry) for entry in _read_json(path, folder))
    except TypeError as error:
        raise DataError(f"{path}: is no list of source files ({error}); build the dataset again") from error


def write_sources(folder: str | Path, sources: Iterable[SourceFile]) -> None:
    _write_json(Path(folder) / "sources.json", [dataclasses.asdict(source) for source in sources])


def _read_json(path: Path, folder: str | Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        what = "has no" if Path(folder).is_dir() else "is no folder and so has no"
        raise DataError(f"{folder} {what} {path.name}; it must be a folder made by `pretrain-data build`") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _write_json(path: Path, value: Any) -> None:
    with whole_file(path) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())


def _hash_bytes(tokenizer_hash: str) -> bytes:
    try:
        raw = bytes.fromhex(tokenizer_hash)
    except ValueError:
        raw = b""
    if len(raw) != 32:
        raise DataError(f"tokenizer_hash={tokenizer_hash!r} is no SHA-256 in hex (64 digits)")
    return raw
