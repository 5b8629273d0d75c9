"""Seeing what is in a dataset folder: `verify` proves it, `stats` counts it, `View` shows documents and rows.

Reads only what `build` wrote; the text shown is the decoded tokens, the origin is the source file's line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import DataError
from data_prep.row_index import Packing, RowIndex, index_path, packings, shards_hash
from data_prep.rows import Rows, open_rows
from data_prep.shard import Manifest, Shard, ShardInfo, SourceFile, read_sources, shard_path
from data_prep.sums import check_sums
from data_prep.tokenizer import load_tokenizer

_SOURCES_SHOWN = 10


def verify(folder: str | Path) -> str:
    """Reads every byte. Raises DataError that names the first file that is not as it should be; else a summary."""
    manifest, sources = Manifest.read(folder), read_sources(folder)
    check_sums(Path(folder))
    tokenizer = load_tokenizer(Path(folder) / "tokenizer")
    if tokenizer.hash != manifest.tokenizer.hash:
        raise DataError(
            f"{Path(folder) / 'tokenizer'}: its hash is {tokenizer.hash[:12]}, but the manifest names"
            f" {manifest.tokenizer.hash[:12]}; the shards were made by another tokenizer"
        )
    shards = [info for infos in manifest.splits.values() for info in infos]
    counted = np.zeros((len(sources), 3), np.int64)
    for info in shards:
        shard = open_shard(folder, info)
        shard.verify()
        if shard.header.tokenizer_hash != manifest.tokenizer.hash:
            raise DataError(f"{shard.path}: was made by another tokenizer than {folder}/manifest.json names")
        if len(shard.sources) and int(shard.sources.max()) >= len(sources):
            raise DataError(f"{shard.path}: names source {shard.sources.max()}, sources.json has {len(sources)}")
        counted += _per_source(shard, len(sources))
    for number, source in enumerate(sources):
        if (source.documents, source.tokens, source.num_bytes) != tuple(counted[number]):
            raise DataError(
                f"{Path(folder) / 'sources.json'}: {source.path} has {source.documents} documents and {source.tokens}"
                f" tokens there, but {counted[number, 0]} and {counted[number, 1]} in the shards"
            )
    rows = 0
    indexed = {split: packings(folder, split) for split in manifest.splits}
    for split, infos in manifest.splits.items():
        if without := set().union(*indexed.values()).difference(indexed[split]):
            missing = index_path(folder, split, *min(without))
            raise DataError(f"{missing}: is missing, other splits have it; run `pretrain-data pack` again")
        for seq_len, packing in indexed[split]:
            index = RowIndex(index_path(folder, split, seq_len, packing))
            index.file.verify()
            if index.info.shards_hash != shards_hash(infos):
                raise DataError(f"{index.path}: was made for other shards; run `pretrain-data pack` again")
            rows += index.info.rows
    tokens = sum(info.tokens for info in shards)
    return f"all good: {len(shards)} shards, {tokens:,} tokens, {rows:,} rows"


def open_shard(folder: str | Path, info: ShardInfo) -> Shard:
    """The shard that the manifest names, or DataError."""
    shard = Shard(shard_path(folder, info))
    header = shard.header
    if (header.tokens, header.documents, header.sha256) != (info.tokens, info.documents, info.sha256):
        raise DataError(f"{shard.path}: is not the shard that {folder}/manifest.json names; build or copy it again")
    return shard


def stats(folder: str | Path) -> dict[str, Any]:
    """What `pretrain-data stats --json` prints: counts over all splits, then by split, packing and source file.

    `rows`, `targets` and `padding_fraction` are those of the first packing listed under `packings`.
    """
    manifest, sources = Manifest.read(folder), read_sources(folder)
    histogram = np.zeros(64, np.int64)
    splits: dict[str, Any] = {}
    packed: dict[str, dict[str, Any]] = {}
    for split, infos in manifest.splits.items():
        splits[split] = {
            "documents": sum(info.documents for info in infos),
            "tokens": sum(info.tokens for info in infos),
            "bytes": sum(info.num_bytes for info in infos),
            "shards": len(infos),
        }
        for info in infos:
            lengths = np.diff(open_shard(folder, info).document_ends, prepend=np.uint64(0))
            histogram += np.bincount(np.frexp(lengths.astype(np.float64))[1] - 1, minlength=64)[:64]
        for seq_len, packing in packings(folder, split):
            found = open_rows(folder, split, seq_len, packing).info
            entry = packed.setdefault(f"{packing} {seq_len}", {"packing": packing, "seq_len": seq_len})
            for key, value in (("rows", found.rows), ("targets", found.targets), ("positions", found.positions)):
                entry[key] = entry.get(key, 0) + value
            splits[split].setdefault("rows", found.rows)
    for entry in packed.values():
        places = entry["rows"] * entry["seq_len"]
        entry["padding_fraction"] = 1 - entry["positions"] / places if places else 0.0
    first = next(iter(packed.values()), {})
    tokens = sum(split["tokens"] for split in splits.values())
    num_bytes = sum(split["bytes"] for split in splits.values())
    return {
        "documents": sum(split["documents"] for split in splits.values()),
        "tokens": tokens,
        "rows": first.get("rows"),
        "targets": first.get("targets"),
        "padding_fraction": first.get("padding_fraction"),
        "bytes_per_token": num_bytes / tokens if tokens else None,
        "vocab_size": manifest.tokenizer.vocab_size,
        "skipped": {reason: entry.count for reason, entry in manifest.skipped.items()},
        "skipped_first": {reason: entry.first for reason, entry in manifest.skipped.items()},
        "splits": splits,
        "packings": list(packed.values()),
        "document_tokens": {f"{2**i}-{2 ** (i + 1) - 1}": int(n) for i, n in enumerate(histogram) if n},
        "sources": _by_path(sources),
    }


def describe(folder: str | Path, counted: dict[str, Any]) -> Iterator[str]:
    """The same for a person, line by line."""
    yield (
        f"{folder}: {counted['documents']:,} documents, {counted['tokens']:,} tokens of"
        f" {counted['vocab_size']:,} ids, {counted['bytes_per_token'] or 0:.2f} bytes per token"
    )
    for name, split in counted["splits"].items():
        rows = f", {split['rows']:,} rows" if "rows" in split else ""
        yield f"  {name}: {split['documents']:,} documents, {split['tokens']:,} tokens{rows}, {split['shards']} shards"
    for entry in counted["packings"]:
        yield (
            f"  rows of {entry['seq_len']:,} ({entry['packing']}): {entry['rows']:,}, {entry['targets']:,} targets,"
            f" {entry['padding_fraction']:.3%} padding"
        )
    for reason, count in counted["skipped"].items():
        yield f"  skipped {count:,}: {reason}, the first at {counted['skipped_first'][reason]}"
    most = max(counted["document_tokens"].values(), default=1)
    for bucket, count in counted["document_tokens"].items():
        yield f"  {bucket:>17} tokens {count:>12,} {'#' * -(-40 * count // most)}"
    by_size = sorted(counted["sources"].items(), key=lambda item: -item[1]["tokens"])
    for path, entry in by_size[:_SOURCES_SHOWN]:
        yield f"  {entry['tokens']:>14,} tokens {entry['documents']:>10,} documents  {path}"
    if len(by_size) > _SOURCES_SHOWN:
        yield f"  and {len(by_size) - _SOURCES_SHOWN:,} more source files"


class View:
    """Documents and rows of one split as text with their origin."""

    def __init__(
        self,
        folder: str | Path,
        split: str,
        seq_len: int | None = None,
        packing: Packing | None = None,
        chars: int = 400,
    ):
        self.folder, self.split, self.chars = Path(folder), split, chars
        self.manifest, self.sources = Manifest.read(folder), read_sources(folder)
        if split not in self.manifest.splits:
            raise DataError(f"{folder} has no split {split!r}; it has {', '.join(self.manifest.splits)}")
        self.tokenizer = load_tokenizer(self.folder / "tokenizer")
        self._wanted = (seq_len, packing)

    def document(self, number: int, schedule: Any = None) -> Iterator[str]:
        """A document of the split, counted from 0 over its shards, and the rows that hold it; with the schedule of
        a run also the steps that take them."""
        infos = self.manifest.shards(self.split)
        local = number
        for info in infos:
            if 0 <= local < info.documents:
                break
            local -= info.documents
        else:
            total = sum(info.documents for info in infos)
            raise DataError(f"document {number}: split {self.split!r} of {self.folder} has {total}, from 0")
        shard = open_shard(self.folder, info)
        tokens = shard.document(local)
        origin = self.origin(int(shard.sources[local]), int(shard.lines[local]))
        yield f"document {number} ({info.file}, {local}): {len(tokens):,} tokens, {shard.num_bytes[local]:,} bytes"
        yield f"from {origin}"
        for seq_len, packing in self._packings():
            held = open_rows(self.folder, self.split, seq_len, packing).rows_of(number)
            yield f"in rows {_listed(held)} of length {seq_len} ({packing})"
            if schedule and (seq_len, packing) == (schedule.cfg.data.seq_len, schedule.cfg.data.packing):
                yield from (self._steps(schedule, int(row)) for row in held)
        yield self.text(tokens)

    def row(self, number: int, schedule: Any = None) -> Iterator[str]:
        """The pieces of a row, each with its origin and text."""
        data = schedule.cfg.data if schedule else None
        fitting = [found for found in self._packings() if data is None or found == (data.seq_len, data.packing)]
        if not fitting:
            among = f" among those of the run, {data.seq_len} ({data.packing})" if data else ""
            raise DataError(f"{self.folder} has no rows like that{among}; see `pretrain-data pack`")
        seq_len, packing = fitting[0]
        rows = open_rows(self.folder, self.split, seq_len, packing)
        if not 0 <= number < len(rows):
            raise DataError(f"row {number}: {self.folder} has {len(rows)} rows of {seq_len} ({packing}), from 0")
        yield f"row {number} of {len(rows):,} ({self.split}, {packing}, {seq_len} positions)"
        if schedule:
            yield self._steps(schedule, number)
        yield from self.pieces(rows, number)

    def _steps(self, schedule: Any, row: int) -> str:
        steps = schedule.steps_of(self.folder, row, schedule.cfg.steps) if self.split == "train" else []
        return f"  row {row} is taken at step {_listed(steps)}" if steps else f"  row {row} is taken at no step"

    def pieces(self, rows: Rows, number: int) -> Iterator[str]:
        batch = rows.read(np.array([number]))
        for piece in rows.pieces(number):
            span = slice(piece.at, piece.at + piece.size)
            origin = self.origin(piece.source, piece.line)
            targets = int((batch.labels[0, span] >= 0).sum())
            yield (
                f"  positions {piece.at}-{piece.at + piece.size - 1}, {targets} targets: {origin}"
                f" (document {piece.document} of {piece.shard}, from its token {piece.start})"
            )
            yield "    " + self.text(batch.inputs[0, span]).replace("\n", "\n    ")

    def origin(self, source: int, line: int) -> str:
        entry = self.sources[source]
        return f"{entry.path}:{entry.first_line - 1 + line}"

    def text(self, tokens: np.ndarray) -> str:
        text = self.tokenizer.decode(tokens)
        return (
            text
            if not self.chars or len(text) <= self.chars
            else f"{text[: self.chars]} ... ({len(text):,} characters)"
        )

    def _packings(self) -> list[tuple[int, Packing]]:
        seq_len, packing = self._wanted
        return [
            (length, kind)
            for length, kind in packings(self.folder, self.split)
            if seq_len in (None, length) and packing in (None, kind)
        ]


def show_step(schedule: Any, step: int, rank: int | None, ranks: int | None, chars: int) -> Iterator[str]:
    """What a run takes at an optimizer step, or one data-parallel rank of it: rows, their documents and text."""
    if rank is not None and (ranks or schedule.ranks()) is None:
        raise DataError("parallel.dp_shard=-1 leaves the number of data-parallel ranks open; give it with --ranks")
    views: dict[str, View] = {}
    taken = list(schedule.step(step, ranks))
    seen = [row for row in taken if rank is None or row.rank == rank]
    if not seen:
        raise DataError(f"rank {rank} takes no row: there are {ranks or schedule.ranks()} data-parallel ranks, from 0")
    first, last = taken[0].stream_row, taken[-1].stream_row
    yield f"step {step}: stream rows {first} to {last} (data.skip takes such ranges)"
    for row in seen:
        view = views.setdefault(row.path, View(row.path, "train", chars=chars))
        where = "" if row.rank is None else f"rank {row.rank}, micro-batch {row.micro_batch}, "
        yield f"{where}stream row {row.stream_row}: row {row.row} of {row.path}, epoch {row.epoch}"
        yield from view.pieces(row.rows, row.row)


def _listed(numbers: Iterable[int]) -> str:
    numbers = [int(number) for number in numbers]
    if len(numbers) <= 8:
        return ", ".join(map(str, numbers)) or "none (a document of one token has no target)"
    return f"{numbers[0]} to {numbers[-1]} ({len(numbers)})"


def _per_source(shard: Shard, count: int) -> np.ndarray:
    """int64 [count, 3]: documents, tokens and bytes of each source in a shard."""
    lengths = np.diff(shard.document_ends, prepend=np.uint64(0)).astype(np.float64)
    columns = (None, lengths, shard.num_bytes.astype(np.float64))  # exact below 2^53
    return np.stack([np.bincount(shard.sources, column, count) for column in columns], 1).astype(np.int64)


def _by_path(sources: Iterable[SourceFile]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for source in sources:
        entry = found.setdefault(source.path, {"documents": 0, "tokens": 0, "bytes": 0})
        entry["documents"] += source.documents
        entry["tokens"] += source.tokens
        entry["bytes"] += source.num_bytes
    return found
