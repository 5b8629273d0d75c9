"""`pretrain-data`: reads the command line, calls, prints. What it calls is imported when it is needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from data_prep.errors import DataError

_INPUT_HELP = "file, folder, glob, fsspec address (s3://...) or hub:name[:config][:split]"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 bad input or setting, 1 the machine failed (disk, memory, a killed worker)."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `pretrain-data inspect ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, MemoryError, RuntimeError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept: run the same command again to go on", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pretrain-data", description="Raw text to packed token shards.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary)
        added.set_defaults(run=run)
        return added

    sub = command("tokenizer", _tokenizer, "Train a tokenizer on a sample of the input.")
    sub.add_argument("inputs", nargs="+", metavar="INPUT", help=_INPUT_HELP)
    sub.add_argument("--out", required=True, metavar="DIR")
    sub.add_argument("--kind", required=True, choices=["sentencepiece", "bpe"])
    sub.add_argument("--vocab-size", required=True, type=int, metavar="N", help="special tokens and bytes included")
    sub.add_argument(
        "--sample-mib", type=float, default=16.0, metavar="N", help="text to learn from, evenly spread (16)"
    )
    sub.add_argument("--character-coverage", type=float, default=0.9995, metavar="F", help="sentencepiece: share of the"
                     " text whose characters get ids, the rest become bytes (0.9995)")  # fmt: skip
    _reading_options(sub)

    sub = command("build", _build, "Tokenise the input into a dataset folder; run again to go on after a stop.")
    sub.add_argument("inputs", nargs="+", metavar="INPUT", help=_INPUT_HELP)
    sub.add_argument("--tokenizer", required=True, metavar="PATH", help="file or folder; its files are copied")
    sub.add_argument("--out", required=True, metavar="DIR")
    _packing_options(sub, required=True)
    sub.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (all cores)")
    sub.add_argument("--val-fraction", type=float, default=0.0, metavar="F", help="of documents, for validation (0)")
    sub.add_argument("--on-bad-row", choices=["fail", "skip"], default="fail", help="skip: leave out and count (fail)")
    sub.add_argument("--bos", action=argparse.BooleanOptionalAction, default=None, help="BOS before each document"
                     " (default: where the tokenizer has one that is not its EOS)")  # fmt: skip
    sub.add_argument("--eos", action=argparse.BooleanOptionalAction, default=True, help="EOS after each document (yes)")
    sub.add_argument("--task", type=int, default=0, metavar="I", help="this machine's part, from 0; then `merge`")
    sub.add_argument("--num-tasks", type=int, default=1, metavar="N")
    _reading_options(sub)

    sub = command("merge", _merge, "Finish a build made by several tasks.")
    sub.add_argument("folder", metavar="DIR")
    _packing_options(sub, required=False)

    sub = command("pack", _pack, "Rows of another length or packing, without tokenising again.")
    sub.add_argument("folder", metavar="DIR")
    _packing_options(sub, required=True)

    sub = command("verify", _verify, "Prove every checksum, count and bound of a dataset.")
    sub.add_argument("folder", metavar="DIR")

    sub = command("stats", _stats, "Documents, tokens, rows and padding of a dataset.")
    sub.add_argument("folder", metavar="DIR")
    sub.add_argument("--json", action="store_true")

    sub = command("inspect", _inspect, "Text and origin of a document, a row, or what a rank sees at a step.")
    sub.add_argument("folder", metavar="DIR")
    what = sub.add_mutually_exclusive_group(required=True)
    what.add_argument("--doc", type=int, metavar="K", help="document of the split, from 0")
    what.add_argument("--row", type=int, metavar="R", help="row of the split, from 0")
    what.add_argument("--step", type=int, metavar="N", help="optimizer step, from 1; needs --config")
    sub.add_argument("--config", metavar="C", help="a run's config or folder; with --doc, --row: at which steps")
    sub.add_argument("--rank", type=int, metavar="R", help="only what this data-parallel rank sees at the step")
    sub.add_argument("--ranks", type=int, metavar="N", help="data-parallel ranks, if parallel.dp_shard leaves it open")
    sub.add_argument("--split", choices=["train", "val"], help="(train)")
    sub.add_argument("--chars", type=int, default=400, metavar="N", help="of text shown each; 0: all (400)")
    _packing_options(sub, required=False)

    for name, verb in (("import", _import), ("export", _export)):
        sub = command(name, verb, f"{name.capitalize()} token files of another project.")
        sub.add_argument("format", choices=["megatron", "nanogpt", "datatrove"])
        sub.add_argument("path", metavar="PATH", help="file" if name == "import" else "dataset folder")
        sub.add_argument("--out", required=True, metavar="DIR")
        if name == "import":
            sub.add_argument("--tokenizer", required=True, metavar="PATH", help="the one that made the tokens")
            sub.add_argument("--val", metavar="PATH", help="file or folder of the validation split")
            _packing_options(sub, required=False)
    return parser


def _reading_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--text-key", default="text", metavar="KEY", help="of JSON rows and parquet columns (text)")
    sub.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="paths below INPUT to leave out")


def _packing_options(sub: argparse.ArgumentParser, *, required: bool) -> None:
    sub.add_argument("--seq-len", type=int, required=required, metavar="N", help="positions of a row")
    sub.add_argument("--packing", choices=["best_fit", "concat"], default="best_fit" if required else None)


def _tokenizer(args: argparse.Namespace) -> None:
    from data_prep.tokenizer_train import train_tokenizer

    made = train_tokenizer(
        args.inputs,
        args.out,
        kind=args.kind,
        vocab_size=args.vocab_size,
        text_key=args.text_key,
        exclude=args.exclude,
        sample_mib=args.sample_mib,
        character_coverage=args.character_coverage,
    )
    print(
        f"{args.out}: {made.kind} tokenizer of {made.vocab_size} ids; bos {made.bos_id}, eos {made.eos_id},"
        f" pad {made.pad_id}; hash {made.hash[:12]}"
    )


def _build(args: argparse.Namespace) -> None:
    from data_prep.build import build
    from data_prep.plan import Settings

    settings = Settings(
        inputs=tuple(args.inputs),
        exclude=tuple(args.exclude),
        text_key=args.text_key,
        on_bad_row=args.on_bad_row,
        val_fraction=args.val_fraction,
        bos=args.bos,
        eos=args.eos,
    )
    done = build(
        settings,
        args.tokenizer,
        args.out,
        seq_len=args.seq_len,
        packing=args.packing,
        workers=args.workers,
        task=args.task,
        num_tasks=args.num_tasks,
    )
    if done is not None:
        _print_stats(args.out)


def _merge(args: argparse.Namespace) -> None:
    from data_prep.build import merge

    merge(args.folder, seq_len=args.seq_len, packing=args.packing)
    _print_stats(args.folder)


def _pack(args: argparse.Namespace) -> None:
    from data_prep.pack import pack_dataset

    pack_dataset(args.folder, args.seq_len, args.packing)
    _print_stats(args.folder)


def _verify(args: argparse.Namespace) -> None:
    from data_prep.inspect import verify

    print(f"{args.folder}: {verify(args.folder)}")


def _stats(args: argparse.Namespace) -> None:
    from data_prep.inspect import stats

    if args.json:
        print(json.dumps(stats(args.folder), indent=1))
    else:
        _print_stats(args.folder)


def _print_stats(folder: str) -> None:
    from data_prep.inspect import describe, stats

    print("\n".join(describe(folder, stats(folder))))


def _inspect(args: argparse.Namespace) -> None:
    from data_prep.inspect import View, show_step

    if args.step is not None and args.config is None:
        raise DataError("--step needs --config: which rows a step takes depends on seed, sources and batch size")
    if args.step is not None and args.step < 1:
        raise DataError(f"--step {args.step}: optimizer steps are counted from 1")
    idle = ("rank", "ranks") if args.step is None else ("split", "seq_len", "packing")
    if without := [f"--{name.replace('_', '-')}" for name in idle if getattr(args, name) is not None]:
        raise DataError(f"{' and '.join(without)}: only {'with' if args.step is None else 'without'} --step")
    view = View(args.folder, args.split or "train", args.seq_len, args.packing, args.chars)
    schedule = _schedule(args.config, args.folder, args.step, args.ranks) if args.config else None
    if args.doc is not None:
        lines = view.document(args.doc, schedule)
    elif args.row is not None:
        lines = view.row(args.row, schedule)
    else:
        lines = show_step(schedule, args.step, args.rank, args.ranks, args.chars)
    for line in lines:
        print(line)


def _schedule(config: str, folder: str, step: int | None = None, ranks: int | None = None) -> Any:
    """The order in which a run takes rows. The one place where data preparation looks up at training, and only when
    asked about a run: nothing else of `data_prep` needs `pretrain`."""
    from pretrain.data.inspect_step import Schedule
    from pretrain.errors import ConfigError

    try:
        schedule = Schedule(config)
        if step is not None:
            schedule.check(step, ranks)
    except ConfigError as error:
        raise DataError(str(error)) from error
    if os.path.realpath(folder) not in map(os.path.realpath, schedule.paths):
        raise DataError(f"{folder} is no source of {config}; its sources are {', '.join(schedule.paths)}")
    return schedule


def _import(args: argparse.Namespace) -> None:
    from data_prep.convert import import_dataset

    import_dataset(
        args.format,
        args.path,
        args.out,
        args.tokenizer,
        val=args.val,
        seq_len=args.seq_len,
        packing=args.packing,
    )
    _print_stats(args.out)


def _export(args: argparse.Namespace) -> None:
    from data_prep.convert import export_dataset

    for path in export_dataset(args.format, args.path, args.out):
        print(path)
