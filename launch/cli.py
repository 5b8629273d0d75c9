"""`pretrain-launch`: parse, call, print."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pretrain.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    top = parser()
    args, rest = top.parse_known_args(argv)
    # argparse gives up on `CONFIG --nproc 2 key=value`: positionals after an option are left over
    if hasattr(args, "overrides"):
        args.overrides += [word for word in rest if "=" in word and not word.startswith("-")]
        rest = [word for word in rest if word not in args.overrides]
    if rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return int(args.run(args) or 0)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="pretrain-launch", description="From a config to a running job.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    p = commands.add_parser("local", help="train on this machine with torchrun")
    _add_config(p)
    p.add_argument("--nproc", type=int, required=True, metavar="N", help="ranks")
    p.add_argument("--max-restarts", type=int, default=0, metavar="N", help="restarts after a crash (default 0)")
    p.add_argument("--port", type=int, help="rendezvous port (default: a free one)")
    p.set_defaults(run=_local)
    return top


def _add_config(p: argparse.ArgumentParser) -> None:
    p.add_argument("config", metavar="CONFIG.toml", type=Path)
    p.add_argument("overrides", nargs="*", metavar="section.key=value")


def _local(args: argparse.Namespace) -> int:
    from launch import local

    return local.launch(
        args.config,
        args.overrides,
        nproc=args.nproc,
        max_restarts=args.max_restarts,
        port=args.port,
        say=lambda text: print(text, flush=True),
    )
