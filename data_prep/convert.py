"""Token files of other projects -> a dataset folder, and back: Megatron .bin/.idx, nanoGPT .bin, datatrove .ds.

None of them carries what a shard carries (tokenizer, checksums, origin), so an import asks for the tokenizer, checks
every id against it, and gives each document its number in the imported file as its line. Nothing is tokenised.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from data_prep import pack, sums
from data_prep.blockfile import whole_file
from data_prep.errors import DataError
from data_prep.inspect import open_shard
from data_prep.row_index import Packing
from data_prep.shard import (
    Manifest,
    Shard,
    ShardInfo,
    ShardWriter,
    SourceFile,
    TokenizerInfo,
    token_dtype,
    write_sources,
)
from data_prep.tokenizer import Tokenizer, load_tokenizer

_SUFFIX = {"megatron": ".bin", "nanogpt": ".bin", "datatrove": ".ds"}
SHARD_TOKENS = 1 << 28
_COPY_TOKENS = 1 << 22
_MEGATRON_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_HEAD = struct.Struct("<QBQQ")  # version 1, dtype code, sequences, document index entries
_MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_LLMC_HEAD, _LLMC_HEADER_BYTES = struct.Struct("<3i"), 1024  # magic, version, tokens; nanoGPT's files have no header
_LLMC_DTYPES = {20240520: "<u2", 20240801: "<u4"}  # by magic


class Tokens(NamedTuple):
    """One file of another project."""

    path: Path
    tokens: np.ndarray  # memory-mapped
    ends: np.ndarray  # uint64 [documents], exclusive


# ---- import


def import_dataset(
    kind: str,
    path: str | Path,
    out: str | Path,
    tokenizer_path: str | Path,
    *,
    val: str | Path | None = None,
    seq_len: int | None = None,
    packing: Packing | None = None,
) -> Manifest:
    """Makes the dataset folder `out`; with `seq_len` its rows, too. `val` holds the validation split.

    Of a folder with a train.bin (train.ds), that and val.bin are taken; of other folders all files by name.
    """
    folder = Path(out)
    if folder.exists() and not {entry.name for entry in folder.iterdir()} <= {"shards", "tokenizer", "sources.json"}:
        raise DataError(f"{folder} is not empty; choose another --out")
    tokenizer = load_tokenizer(tokenizer_path)
    splits = {"train": _find(kind, Path(path), "train")}
    beside = Path(path) / f"val{_SUFFIX[kind]}"
    if val is not None:
        splits["val"] = _find(kind, Path(val), "val")
    elif splits["train"] == [beside.with_stem("train")] and beside.is_file():
        splits["val"] = [beside]
    lengths = _bytes_of_ids(tokenizer)
    files: list[SourceFile] = []
    shards: dict[str, tuple[ShardInfo, ...]] = {}
    for split, paths in splits.items():
        made: list[ShardInfo] = []
        for found in paths:
            tokens = read_tokens(kind, found, tokenizer)
            before = len(made)
            made += _write_shards(folder, split, len(made), tokens, len(files), tokenizer, lengths)
            new = made[before:]
            files.append(
                SourceFile(
                    str(found),
                    sum(info.documents for info in new),
                    sum(info.tokens for info in new),
                    sum(info.num_bytes for info in new),
                )
            )
        if made:
            shards[split] = tuple(made)
    if "train" not in shards:
        raise DataError(f"{path}: holds no documents")
    names = tuple(tokenizer.save(folder / "tokenizer"))
    write_sources(folder, files)
    info = TokenizerInfo(
        tokenizer.kind,
        tokenizer.hash,
        tokenizer.vocab_size,
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.pad_id,
        names,
    )
    manifest = Manifest(tokenizer=info, splits=shards, settings={"imported": kind})
    manifest.write(folder)
    sums.write_sums(folder)
    if seq_len:
        pack.pack_dataset(folder, seq_len, packing or "best_fit")
    return manifest


def read_tokens(kind: str, path: Path, tokenizer: Tokenizer) -> Tokens:
    """One file of another project; DataError if it contradicts itself."""
    if kind == "megatron":
        return _read_megatron(path)
    if kind == "datatrove":
        return _read_datatrove(path, tokenizer)
    return _read_nanogpt(path, tokenizer)


def _find(kind: str, path: Path, split: str) -> list[Path]:
    suffix = _SUFFIX[kind]
    if kind == "megatron" and not path.exists():
        path = path.with_name(path.name + suffix)  # Megatron's own tools name the prefix
    if kind == "megatron" and path.suffix == ".idx":
        path = path.with_suffix(suffix)
    if path.is_dir():
        named = path / f"{split}{suffix}"
        found = [named] if named.is_file() else sorted(path.glob(f"*{suffix}"))
        if not found:
            raise DataError(f"{path}: no *{suffix} in the folder")
        return found
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder")
    return [path]


def _read_megatron(path: Path) -> Tokens:
    index = path.with_suffix(".idx")
    try:
        raw = index.read_bytes()
    except OSError as error:
        raise DataError(f"{index}: cannot be read beside {path.name}: {error.strerror}") from error
    at = len(_MEGATRON_MAGIC) + _MEGATRON_HEAD.size
    if not raw.startswith(_MEGATRON_MAGIC) or len(raw) < at:
        raise DataError(f"{index}: is no Megatron index (starts with {raw[:9]!r})")
    version, code, sequences, entries = _MEGATRON_HEAD.unpack_from(raw, len(_MEGATRON_MAGIC))
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise DataError(f"{index}: has version {version} and dtype code {code}; known are version 1 and whole numbers")
    if len(raw) < at + 12 * sequences + 8 * entries:
        raise DataError(f"{index}: is cut short: {sequences} sequences and {entries} documents do not fit in it")
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    sizes = np.frombuffer(raw, "<i4", sequences, at).astype(np.int64)
    pointers = np.frombuffer(raw, "<i8", sequences, at + 4 * sequences)
    documents = np.frombuffer(raw, "<i8", entries, at + 12 * sequences)
    tokens = _map(path, dtype)
    ends = np.cumsum(sizes)
    if (pointers != (ends - sizes) * dtype.itemsize).any() or (len(ends) and ends[-1] != len(tokens)):
        raise DataError(f"{index}: its sequences do not follow one another through the {len(tokens)} tokens of {path}")
    if not entries or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise DataError(f"{index}: its documents do not partition its {sequences} sequences")
    at_sequence = np.concatenate([[0], ends])
    return Tokens(path, tokens, _without_empty(at_sequence[documents[1:]]))


def _read_nanogpt(path: Path, tokenizer: Tokenizer) -> Tokens:
    """Bare 16-bit ids, or llm.c's with a header. The only sign of a document's end is its EOS."""
    with open(path, "rb") as file:
        head = file.read(_LLMC_HEADER_BYTES)
    magic, version, count = _LLMC_HEAD.unpack(head[: _LLMC_HEAD.size].ljust(_LLMC_HEAD.size, b"\0"))
    if magic in _LLMC_DTYPES:
        if version != 1:
            raise DataError(f"{path}: has llm.c's format version {version}; known is version 1")
        if len(head) < _LLMC_HEADER_BYTES:
            raise DataError(f"{path}: is cut short: {len(head)} of the {_LLMC_HEADER_BYTES} bytes of llm.c's header")
        tokens = _map(path, np.dtype(_LLMC_DTYPES[magic]), _LLMC_HEADER_BYTES)
        if len(tokens) != count:
            raise DataError(f"{path}: its header says {count} tokens, but {len(tokens)} follow; copy or make it again")
    else:
        tokens = _map(path, np.dtype("<u2"))
    if tokenizer.eos_id is None:
        raise DataError(f"{path}: documents end at EOS in this format, but the tokenizer has none")
    ends = np.flatnonzero(tokens == tokenizer.eos_id) + 1
    if not len(ends):
        raise DataError(f"{path}: no EOS (id {tokenizer.eos_id}) in it; is this the tokenizer that made it?")
    if ends[-1] != len(tokens):
        ends = np.append(ends, len(tokens))
    return Tokens(path, tokens, ends.astype(np.uint64))


def _read_datatrove(path: Path, tokenizer: Tokenizer) -> Tokens:
    if Path(f"{path}.loss").exists():
        raise DataError(f"{path}.loss: a loss mask, which shards cannot hold")
    index = Path(f"{path}.index")
    if not index.is_file():
        raise DataError(f"{index}: is missing; without it the documents' ends are unknown")
    ends = _map(index, np.dtype("<u8"))
    total = int(ends[-1]) if len(ends) else 0
    size = path.stat().st_size
    width = next((width for width in (2, 4) if total * width == size), None)
    if width is None or (np.diff(ends.astype(np.int64)) < 0).any():
        raise DataError(f"{index}: ends at token {total}, which does not fit the {size} bytes of {path}")
    if width == 2 and tokenizer.vocab_size > 65536:
        raise DataError(f"{path}: has 16-bit tokens, but the tokenizer has {tokenizer.vocab_size} ids; is it the one?")
    return Tokens(path, _map(path, np.dtype(f"<u{width}")), _without_empty(ends))


def _without_empty(ends: np.ndarray) -> np.ndarray:
    ends = ends.astype(np.int64)
    return ends[np.diff(ends, prepend=0) > 0].astype(np.uint64)


def _map(path: Path, dtype: np.dtype, skip: int = 0) -> np.ndarray:
    size = path.stat().st_size - skip
    if size % dtype.itemsize:
        raise DataError(f"{path}: its {size} bytes are no whole number of {dtype.itemsize}-byte tokens")
    return np.memmap(path, dtype, "r", skip) if size else np.empty(0, dtype)


def _write_shards(
    folder: Path, split: str, number: int, found: Tokens, source: int, tokenizer: Tokenizer, lengths: np.ndarray
) -> Iterator[ShardInfo]:
    first, ends = 0, found.ends.astype(np.int64)
    while first < len(ends):
        begin = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, begin + SHARD_TOKENS, "right")))
        with ShardWriter(
            folder / "shards" / f"{split}-{number:05}.tok",
            vocab_size=tokenizer.vocab_size,
            tokenizer_hash=tokenizer.hash,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
        ) as writer:
            for low, high in _chunks(ends, first, last):
                start = int(ends[low - 1]) if low else 0
                tokens = np.asarray(found.tokens[start : int(ends[high - 1])])
                sizes = np.diff(ends[low:high], prepend=start)
                if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < tokenizer.vocab_size:
                    raise DataError(
                        f"{found.path}: holds token ids {tokens.min()} to {tokens.max()}, but the tokenizer has"
                        f" {tokenizer.vocab_size}; is it the one that made the file?"
                    )
                writer.add_documents(
                    tokens,
                    sizes,
                    sources=np.full(high - low, source),
                    lines=np.arange(low, high) + 1,
                    num_bytes=np.add.reduceat(lengths[tokens], np.cumsum(sizes) - sizes),
                )
            yield writer.finish()
        first, number = last, number + 1


def _chunks(ends: np.ndarray, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Ranges of documents of some millions of tokens, or one document."""
    while first < last:
        begin = int(ends[first - 1]) if first else 0
        high = min(last, max(first + 1, int(np.searchsorted(ends, begin + _COPY_TOKENS, "right"))))
        yield first, high
        first = high


def _bytes_of_ids(tokenizer: Tokenizer) -> np.ndarray:
    """int64 [vocabulary]: bytes of text that each id stands for; special tokens stand for none."""
    special = set(tokenizer.special_tokens.values())
    return np.array([0 if i in special else len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)])


# ---- export


def export_dataset(kind: str, folder: str | Path, out: str | Path) -> list[Path]:
    """Writes <split>.bin (.idx) or <split>.ds (.index, .metadata) and the tokenizer into `out`; returns the files."""
    manifest, target = Manifest.read(folder), Path(out)
    dtype = token_dtype(manifest.tokenizer.vocab_size)
    if kind == "nanogpt" and dtype.itemsize > 2:
        raise DataError(
            f"{folder}: its {manifest.tokenizer.vocab_size} ids do not fit the 16 bits of nanoGPT's format;"
            " export to megatron or datatrove"
        )
    if kind == "megatron" and dtype.itemsize > 2:
        dtype = np.dtype("<i4")
    written = []
    for split, infos in manifest.splits.items():
        shards = [open_shard(folder, info) for info in infos]
        name = target / f"{split}{_SUFFIX[kind]}"
        with whole_file(name) as file:
            for shard in shards:
                _copy_tokens(shard, file, dtype)
        written.append(name)
        lengths = np.concatenate([np.diff(shard.document_ends, prepend=np.uint64(0)) for shard in shards])
        if kind == "megatron":
            written.append(_write_megatron_index(name.with_suffix(".idx"), lengths.astype(np.int64), dtype))
        elif kind == "datatrove":
            written += _write_datatrove_index(name, lengths, dtype, manifest.tokenizer)
    tokenizer = load_tokenizer(Path(folder) / "tokenizer")
    return written + [target / "tokenizer" / saved for saved in tokenizer.save(target / "tokenizer")]


def _copy_tokens(shard: Shard, file: BinaryIO, dtype: np.dtype) -> None:
    for at in range(0, shard.header.tokens, _COPY_TOKENS):
        last = min(at + _COPY_TOKENS, shard.header.tokens) - 1
        shard.check_tokens(np.array([at]), np.array([last]))
        file.write(shard.tokens[at : last + 1].astype(dtype).data)


def _write_megatron_index(path: Path, lengths: np.ndarray, dtype: np.dtype) -> Path:
    """One sequence a document."""
    if lengths.max(initial=0) >= 2**31:
        raise DataError(f"{path}: a document of {lengths.max()} tokens is longer than a Megatron sequence can be")
    code = next(code for code, name in _MEGATRON_DTYPES.items() if np.dtype(name) == dtype)
    with whole_file(path) as file:
        file.write(_MEGATRON_MAGIC + _MEGATRON_HEAD.pack(1, code, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").data)
        file.write(((np.cumsum(lengths) - lengths) * dtype.itemsize).astype("<i8").data)
        file.write(np.arange(len(lengths) + 1, dtype="<i8").data)
    return path


def _write_datatrove_index(
    name: Path, lengths: np.ndarray, dtype: np.dtype, tokenizer: TokenizerInfo
) -> Sequence[Path]:
    ends = np.cumsum(lengths, dtype=np.uint64)
    index, metadata = Path(f"{name}.index"), Path(f"{name}.metadata")
    with whole_file(index) as file:
        file.write(ends.astype("<u8").data)
    total = int(ends[-1]) if len(ends) else 0
    with whole_file(metadata) as file:
        file.write(f"{tokenizer.kind}-{tokenizer.hash[:12]}|{dtype.itemsize}\n{total}\n{total / 1e9:.3f} GT".encode())
    return index, metadata
