"""Raw text -> a dataset folder: a plan, units tokenised by a pool of processes, groups of units made into shards.

    DIR/build/plan.json                what is to be done (see `plan`), fixed by the inputs
    DIR/build/units/00007.json         unit 7 is done; beside it its tokens, one small shard a split
    DIR/build/groups/00000.json        group 0 is done: its shards stand in DIR/shards
    DIR/manifest.json                  all is done; DIR/build is then removed

Every file appears whole under its name or not at all, and what a file holds depends on the plan alone. So a build
killed anywhere goes on where it was, tasks on other machines share nothing but the folder, and the dataset is the
same byte for byte. What a worker does is in `worker`; this file only hands out work and counts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from data_prep import fast_bpe, lock, pack, plan, sources, sums, worker
from data_prep.errors import DataError
from data_prep.progress import Progress
from data_prep.row_index import Packing
from data_prep.shard import Manifest, ShardInfo, Skipped, SourceFile, TokenizerInfo, write_sources
from data_prep.tokenizer import Tokenizer, load_tokenizer

_SAMPLE_CHARS = 1 << 19  # of the input's first documents, on which a faster engine has to prove itself


class WorkerDied(RuntimeError):
    """A worker process ended without a word: killed, or out of memory."""


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def build(
    settings: plan.Settings,
    tokenizer_path: str | Path,
    out: str | Path,
    *,
    seq_len: int,
    packing: Packing = "best_fit",
    workers: int = 1,
    task: int = 0,
    num_tasks: int = 1,
    say: Callable[[str], None] = _to_stderr,
) -> Manifest | None:
    """Makes the dataset folder `out`, or this task's part of it (then the result is None until `merge`)."""
    if workers < 1 or not 0 <= task < num_tasks:
        raise DataError(
            f"workers={workers} must be 1 or more, and task={task} one of 0 to num_tasks - 1 = {num_tasks - 1}"
        )
    if seq_len < 1:
        raise DataError(f"seq_len={seq_len} must be at least 1")
    folder = Path(out)
    tokenizer = load_tokenizer(tokenizer_path)
    wanted, notes = plan.make_plan(settings, _tokenizer_info(tokenizer, settings))
    for note in notes:
        say(note)
    folder.mkdir(parents=True, exist_ok=True)
    with lock.held(folder, shared=num_tasks > 1):
        if (folder / "manifest.json").exists():
            manifest = Manifest.read(folder)
            if manifest.settings.get("fingerprint") != wanted.fingerprint():
                raise DataError(
                    f"{folder} holds a dataset of other inputs, tokenizer or settings; choose another --out"
                )
            if changed := _modified_since(folder, wanted):
                say(
                    f"warning: {len(changed)} input files were modified after {folder} was finished, the first"
                    f" {changed[0]}; what they hold now is not in it: choose another --out to build that"
                )
            say(f"{folder} is already built from these inputs")
        else:
            _prepare(folder, wanted, tokenizer, seq_len, packing)
            job = _job(folder, wanted)
            with _pool(job, min(workers, len(wanted.units))) as pool:
                engine = _choose_engine(wanted, tokenizer, say)  # while the workers start
                _run(job, pool, engine, workers, task, num_tasks, say)
            if num_tasks > 1:
                say(f"task {task} of {num_tasks} is done; when all are: pretrain-data merge {folder}")
                return None
        return _merge(folder, seq_len, packing, say)


def merge(
    folder: str | Path,
    *,
    seq_len: int | None = None,
    packing: Packing | None = None,
    say: Callable[[str], None] = _to_stderr,
) -> Manifest:
    """The manifest over the shards of all tasks, and the rows of one length, by default as the build was told.

    Safe to repeat."""
    folder = Path(folder)
    with lock.held(folder):
        return _merge(folder, seq_len, packing, say)


def _merge(folder: Path, seq_len: int | None, packing: Packing | None, say: Callable[[str], None]) -> Manifest:
    if not (folder / "manifest.json").exists():
        _write_manifest(folder, plan.Plan.read(folder / "build" / "plan.json"))
    if not (folder / sums.NAME).exists():
        sums.write_sums(folder)
    told = folder / "build" / "rows.json"
    if told.exists():
        asked = json.loads(told.read_bytes())
        seq_len, packing = seq_len or asked["seq_len"], packing or asked["packing"]
    if seq_len:
        pack.pack_dataset(folder, seq_len, packing or "best_fit")
    shutil.rmtree(folder / "build", ignore_errors=True)
    manifest = Manifest.read(folder)
    share = manifest.settings.get("val_fraction")
    if share and not manifest.shards("val"):
        count = sum(info.documents for info in manifest.shards("train"))
        say(
            f"warning: there is no validation split: by --val-fraction {share} none of {count} documents fell into it;"
            " choose a larger share or build from more documents"
        )
    return manifest


def _modified_since(folder: Path, wanted: plan.Plan) -> list[str]:
    """Local input files that are younger than the finished dataset."""
    finished = (folder / "manifest.json").stat().st_mtime_ns
    times = zip(wanted.pieces, wanted.modified, strict=True)
    return sorted({piece.path for piece, time in times if time.isdigit() and int(time) > finished})


def _tokenizer_info(tokenizer: Tokenizer, settings: plan.Settings) -> TokenizerInfo:
    if settings.eos and tokenizer.eos_id is None:
        raise DataError("the tokenizer has no EOS token to end documents with; choose --no-eos if that is meant")
    if settings.bos and tokenizer.bos_id is None:
        raise DataError("the tokenizer has no BOS token to begin documents with; choose --no-bos")
    return TokenizerInfo(
        kind=tokenizer.kind,
        hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        files=tuple(tokenizer.files),
    )


def _job(folder: Path, wanted: plan.Plan) -> worker.Job:
    add_bos = [wanted.tokenizer.bos_id] if _adds_bos(wanted) else []
    add_eos = [wanted.tokenizer.eos_id] if wanted.settings.eos else []
    return worker.Job(folder, wanted, add_bos, add_eos)


def _choose_engine(wanted: plan.Plan, tokenizer: Tokenizer, say: Callable[[str], None]) -> str:
    """The library that encodes, after a look at the tokenizer and the first documents."""
    say(fast_bpe.accelerate(tokenizer, _first_texts(wanted)))
    plain = "Hello, world: 1 + 2."
    back = tokenizer.decode(tokenizer.encode(plain))
    if back.strip() != plain:
        say(f"warning: this tokenizer loses text: {plain!r} comes back as {back!r}")
    say(f"each document: {'BOS + ' if _adds_bos(wanted) else ''}text{' + EOS' if wanted.settings.eos else ''}")
    return tokenizer.engine


def _adds_bos(wanted: plan.Plan) -> bool:
    """Whether BOS goes before each document: as asked, else where the tokenizer has one that is not its EOS."""
    tokenizer = wanted.tokenizer
    if wanted.settings.bos is None:
        return tokenizer.bos_id is not None and tokenizer.bos_id != tokenizer.eos_id
    return wanted.settings.bos


def _first_texts(wanted: plan.Plan) -> Iterator[str]:
    left = _SAMPLE_CHARS
    rows = (row for piece in wanted.pieces for row in sources.read(piece, wanted.settings.text_key))
    for row in itertools.islice(rows, 1000):
        if isinstance(row, sources.Document):
            yield row.text[:left]
            left -= len(row.text)
            if left <= 0:
                return


def _prepare(folder: Path, wanted: plan.Plan, tokenizer: Tokenizer, seq_len: int, packing: Packing) -> None:
    """The plan and the tokenizer's files stand in the folder; or a build that is going on there is this one."""
    path = folder / "build" / "plan.json"
    if path.exists():
        there = plan.Plan.read(path)
        if different := plan.differences(wanted, there):
            raise DataError(
                f"{folder} holds an unfinished build of something else ({'; '.join(different)});"
                f" choose another --out or remove {folder / 'build'}"
            )
    elif folder.exists() and any(folder.iterdir()) and not (folder / "build").is_dir():
        raise DataError(f"{folder} is not empty and holds no build to go on with; choose another --out")
    (folder / "build").mkdir(parents=True, exist_ok=True)
    for name, original in tokenizer.files.items():
        (folder / "tokenizer").mkdir(exist_ok=True)
        plan.put_file(folder / "tokenizer" / name, original.read_bytes())
    # For `merge`, should another process do that.
    plan.put_file(folder / "build" / "rows.json", json.dumps({"seq_len": seq_len, "packing": packing}).encode())
    if not path.exists():
        wanted.write(path)


def _run(
    job: worker.Job, pool: Any, engine: str, workers: int, task: int, num_tasks: int, say: Callable[[str], None]
) -> None:
    """All groups of this task: their units first, then the shards, on a pool that is never idle in between."""
    wanted = job.plan
    mine = [group for group in range(task, len(wanted.groups), num_tasks) if not job.group_done(group)]
    todo = {group: [unit for unit in wanted.groups[group] if not job.unit_done(unit)] for group in mine}
    left = {group: len(units) for group, units in todo.items()}
    progress = Progress(sum(wanted.unit_weight(unit) for units in todo.values() for unit in units), say)
    work: Iterator[tuple[str, int, int]] = (("unit", group, unit) for group in mine for unit in todo[group])
    compose = [group for group in mine if not left[group]]
    running: dict[futures.Future[int], tuple[str, int, int]] = {}
    while True:
        while len(running) < 2 * workers:
            if compose:
                group = compose.pop(0)
                running[pool.submit(worker.compose_group, group)] = ("group", group, 0)
            elif (item := next(work, None)) is not None:
                running[pool.submit(worker.tokenise_unit, item[2], engine)] = item
            else:
                break
        if not running:
            break
        done, _ = futures.wait(running, timeout=1.0, return_when=futures.FIRST_COMPLETED)
        for future in done:
            kind, group, unit = running.pop(future)
            tokens = future.result()
            if kind == "unit":
                progress.add(wanted.unit_weight(unit), tokens)
                left[group] -= 1
                if not left[group]:
                    compose.append(group)
        progress.show()
    progress.finish()


@contextlib.contextmanager
def _pool(job: worker.Job, workers: int) -> Iterator[Any]:
    """`workers` processes that are on their way; one that dies ends the block. One worker is this process.

    Spawned, not forked: a fork copies the locks of a tokenizer's threads in whatever state they are (G06)."""
    if workers == 1:
        yield _Inline(job)
        return
    context = multiprocessing.get_context("spawn")
    pool = futures.ProcessPoolExecutor(workers, mp_context=context, initializer=worker.start, initargs=(job,))
    try:
        for _ in range(workers):
            pool.submit(int)  # a process starts when there is something to do
        yield pool
        pool.shutdown()  # all is done: the workers may leave in good order
    except BrokenProcessPool as error:
        raise WorkerDied(
            "a worker process died (killed, or out of memory); finished work is kept: run the command again to go on"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()


class _Inline:
    """The pool of one worker: this process."""

    def __init__(self, job: worker.Job):
        self._started: worker.Worker | None = None
        self._job = job

    def submit(self, function: Callable[..., int], *args: Any) -> futures.Future[int]:
        if self._started is None:
            self._started = worker.Worker(self._job)
        future: futures.Future[int] = futures.Future()
        future.set_result(function(*args, using=self._started))
        return future


def _write_manifest(folder: Path, wanted: plan.Plan) -> None:
    ledger = worker.Job(folder, wanted, [], [])
    missing = [group for group in range(len(wanted.groups)) if not ledger.group_done(group)]
    if missing:
        raise DataError(
            f"{folder}: {len(missing)} of {len(wanted.groups)} parts are not built yet, the first is {missing[0]};"
            " part i belongs to task i modulo --num-tasks"
        )
    splits: dict[str, list[ShardInfo]] = {split: [] for split in worker.SPLITS}
    counts = [(0, 0, 0)] * len(wanted.pieces)
    lines = [0] * len(wanted.pieces)
    skipped: dict[str, tuple[int, int, int]] = {}  # reason: count, first piece, first line in it
    for group in range(len(wanted.groups)):
        report = json.loads(ledger.group_report(group).read_bytes())
        for split, info in report["splits"].items():
            splits[split].append(ShardInfo(**info))
        for piece, (documents, tokens, num_bytes, line_count) in report["pieces"]:
            counts[piece], lines[piece] = (documents, tokens, num_bytes), line_count
        for reason, (count, piece, line) in report["skipped"].items():
            before = skipped.get(reason)
            skipped[reason] = (count + before[0], *before[1:]) if before else (count, piece, line)
    if not splits["train"]:
        raise DataError(
            f"{', '.join(wanted.settings.inputs)}: no document for training; "
            + (f"skipped: { {reason: entry[0] for reason, entry in skipped.items()} }" if skipped else "all is empty")
        )
    first_lines = _first_lines(wanted.pieces, lines)
    write_sources(
        folder,
        [SourceFile(piece.path, *counts[number], first_lines[number]) for number, piece in enumerate(wanted.pieces)],
    )
    places = {
        reason: Skipped(count, f"{wanted.pieces[piece].path}:{first_lines[piece] - 1 + line}")
        for reason, (count, piece, line) in sorted(skipped.items())
    }
    settings = {
        "inputs": list(wanted.settings.inputs),
        "exclude": list(wanted.settings.exclude),
        "text_key": wanted.settings.text_key,
        "on_bad_row": wanted.settings.on_bad_row,
        "val_fraction": wanted.settings.val_fraction,
        "bos": _adds_bos(wanted),
        "eos": wanted.settings.eos,
        "fingerprint": wanted.fingerprint(),
    }
    kept = {split: tuple(infos) for split, infos in splits.items() if infos}
    Manifest(tokenizer=wanted.tokenizer, splits=kept, skipped=places, settings=settings).write(folder)


def _first_lines(pieces: tuple[sources.Piece, ...], lines: list[int]) -> list[int]:
    """Of each piece, the number that its first line has in its file."""
    found: list[int] = []
    for number, piece in enumerate(pieces):
        goes_on = not piece.first_line and number > 0
        found.append(found[-1] + lines[number - 1] if goes_on else max(1, piece.first_line))
    return found
