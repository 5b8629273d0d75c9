"""What one worker process of a build does: tokenise a unit, or make the shards of a group out of its units.

`build` runs these functions in its pool. A worker ends when its parent does, so that no orphan writes on.
Temporary files lie in a folder of the process; results are renamed into place, so two workers never meet in one file.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import socket
import threading
import zlib
from pathlib import Path
from typing import Any

from data_prep import fast_bpe, plan, sources, streams
from data_prep.blockfile import sync_folder, whole_file
from data_prep.errors import DataError
from data_prep.part import PartInfo, PartWriter, copy_part
from data_prep.shard import ShardInfo, ShardWriter
from data_prep.tokenizer import load_tokenizer

SPLITS = ("train", "val")


@dataclasses.dataclass(frozen=True)
class Job:
    """What every worker of a build knows, and where its results lie."""

    folder: Path
    plan: plan.Plan
    before: list[Any]  # ids before each document's text: [] or [BOS]
    after: list[Any]  # [] or [EOS]

    def unit_report(self, unit: int) -> Path:
        return self.folder / "build" / "units" / f"{unit:05}.json"

    def group_report(self, group: int) -> Path:
        return self.folder / "build" / "groups" / f"{group:05}.json"

    def part(self, unit: int, split: str) -> Path:
        return self.folder / "build" / "units" / f"{unit:05}.{split}"

    def unit_done(self, unit: int) -> bool:
        return self.unit_report(unit).exists()

    def group_done(self, group: int) -> bool:
        return self.group_report(group).exists()


class Worker:
    def __init__(self, job: Job):
        self.job = job
        self.tokenizer = load_tokenizer(job.folder / "tokenizer")
        if self.tokenizer.hash != job.plan.tokenizer.hash:
            raise DataError(f"{job.folder / 'tokenizer'}: its files changed since the build began")
        self.encode = fast_bpe.engines(self.tokenizer)
        self.scratch = job.folder / "build" / f"scratch-{socket.gethostname()}-{os.getpid()}"
        for folder in (self.scratch, job.unit_report(0).parent, job.group_report(0).parent, job.folder / "shards"):
            folder.mkdir(parents=True, exist_ok=True)

    def shard_writer(self, name: str) -> ShardWriter:
        info = self.job.plan.tokenizer
        return ShardWriter(
            self.scratch / name,
            vocab_size=info.vocab_size,
            tokenizer_hash=info.hash,
            bos_id=info.bos_id,
            eos_id=info.eos_id,
        )

    def part_writer(self, unit: int, split: str) -> PartWriter:
        job = self.job
        return PartWriter(self.scratch / f"{unit:05}.{split}", job.plan.tokenizer.vocab_size, job.before, job.after)


_worker: Worker | None = None  # of this process, set once by the pool's initializer


def start(job: Job) -> None:
    """Initializer of a pool's process."""
    global _worker
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _worker = Worker(job)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def tokenise_unit(unit: int, engine: str, using: Worker | None = None) -> int:
    """Reads the unit's pieces, writes its part of each split and, last, its report. Returns the tokens.
    `engine`: the library that encodes, as the parent proved it."""
    me = using or _worker
    assert me is not None
    job = me.job
    splits = {split: me.part_writer(unit, split) for split in SPLITS}
    bar = round(job.plan.settings.val_fraction * 2**32)
    skipped = _Skipped()
    try:
        pieces = [(piece, _tokenise_piece(me, engine, piece, splits, bar, skipped)) for piece in job.plan.units[unit]]
        parts = {split: part.finish(job.part(unit, split)) for split, part in splits.items()}
    finally:
        for part in splits.values():
            part.abort()
    report = {"pieces": pieces, "parts": parts, "skipped": skipped.by_reason}
    _write_report(me, job.unit_report(unit), report, durable=False)
    return sum(part.tokens for part in splits.values())


def _tokenise_piece(
    me: Worker, engine: str, number: int, splits: dict[str, PartWriter], bar: int, skipped: _Skipped
) -> tuple[int, int, int, int]:
    """Documents, tokens, bytes and lines of one piece."""
    settings, piece = me.job.plan.settings, me.job.plan.pieces[number]
    train, val = splits["train"], splits["val"]
    encode, around = me.encode[engine], len(me.job.before) + len(me.job.after)
    documents = tokens = num_bytes = lines = 0
    for row in sources.read(piece, settings.text_key):
        if isinstance(row, sources.Document):
            try:
                ids = encode(row.text)
            except BaseException as error:  # tiktoken's Rust panics are no Exception
                if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                    raise
                raise DataError(f"{_place(piece, row.line)}: the tokenizer failed: {error}") from error
            if len(ids):
                # By the text itself: independent of place and order, and equal texts never part over the splits.
                part = val if bar and zlib.crc32(row.text.encode()) < bar else train
                part.add(ids, number, row.line, row.num_bytes)
                documents += 1
                tokens += len(ids) + around
                num_bytes += row.num_bytes
                continue
            row = sources.BadRow("no tokens", row.line, "the tokenizer makes nothing of the text")
        if isinstance(row, sources.End):
            lines = row.lines
        elif row.reason not in ("empty", "no tokens") and settings.on_bad_row == "fail":
            place = piece.path if row.reason == "damaged file" else _place(piece, row.line)
            raise DataError(f"{place}: {row.reason}: {row.detail}; --on-bad-row skip leaves such rows out, counted")
        else:
            skipped.add(row.reason, number, row.line)
    local = piece.format != "hub" and not streams.is_remote(piece.path)
    if local and streams.modified(piece.path) != me.job.plan.modified[number]:
        raise DataError(
            f"{piece.path}: was modified while the build went on; remove {me.job.folder / 'build'} and build again"
        )
    return documents, tokens, num_bytes, lines


def compose_group(group: int, using: Worker | None = None) -> int:
    """The group's shard of each split from its units' parts, checked on the way; then the parts are removed."""
    me = using or _worker
    assert me is not None
    job, units = me.job, me.job.plan.groups[group]
    reports = {unit: json.loads(job.unit_report(unit).read_bytes()) for unit in units}
    skipped = _Skipped()
    for report in reports.values():
        for reason, (count, piece, line) in report["skipped"].items():
            skipped.add(reason, piece, line, count)
    shards = {}
    for split in SPLITS:
        parts = {unit: PartInfo(*report["parts"][split]) for unit, report in reports.items() if report["parts"][split]}
        if parts:
            shards[split] = dataclasses.asdict(_compose_shard(me, f"{split}-{group:05}.tok", split, parts))
    sync_folder(job.folder / "shards")
    pieces = [piece for report in reports.values() for piece in report["pieces"]]
    report = {"splits": shards, "pieces": pieces, "skipped": skipped.by_reason}
    _write_report(me, job.group_report(group), report, durable=True)
    for unit in units:
        for split in SPLITS:
            job.part(unit, split).unlink(missing_ok=True)
    return 0


def _compose_shard(me: Worker, name: str, split: str, parts: dict[int, PartInfo]) -> ShardInfo:
    job = me.job
    with me.shard_writer(name) as writer:
        for unit, info in parts.items():
            try:
                copy_part(job.part(unit, split), info, job.plan.tokenizer.vocab_size, writer)
            except DataError as error:
                job.unit_report(unit).unlink(missing_ok=True)
                raise DataError(f"{error}; run the same command again, it makes this part anew") from error
        done = writer.finish()
    os.replace(me.scratch / name, job.folder / "shards" / name)
    return done


class _Skipped:
    """Counts of rows left out by reason, with the first place of each: piece and line in it."""

    def __init__(self) -> None:
        self.by_reason: dict[str, list[int]] = {}

    def add(self, reason: str, piece: int, line: int, count: int = 1) -> None:
        entry = self.by_reason.setdefault(reason, [0, piece, line])
        entry[0] += count


def _place(piece: sources.Piece, line: int) -> str:
    """FILE:LINE, the line counted from the file's start."""
    before = 0
    if piece.format == "jsonl" and piece.start:
        with streams.open_plain(piece.path) as stream:
            before = sum(1 for _ in streams.lines(stream, 0, piece.start))
    elif piece.first_line:
        before = piece.first_line - 1
    return f"{piece.path}:{before + line}"


def _write_report(me: Worker, path: Path, report: dict[str, Any], *, durable: bool) -> None:
    scratch = me.scratch / path.name
    with whole_file(scratch, durable=durable) as file:
        file.write(json.dumps(report).encode())
    os.replace(scratch, path)
    if durable:
        sync_folder(path.parent)
