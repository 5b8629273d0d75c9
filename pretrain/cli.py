"""`pretrain`: parse, call, print. Heavy imports wait until a command needs them."""

import argparse
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from pretrain.config import Config
from pretrain.errors import CheckpointError, ConfigError, MachineError


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        return int(args.run(args) or 0)
    except BrokenPipeError:  # pretrain plan ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        _told_launcher(e)
        return 2
    except (CheckpointError, MachineError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except Exception as e:
        if type(e).__module__ == "data_prep.errors":
            print(f"error: {e}", file=sys.stderr)
            return 2
        raise


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; overrides may stand before and after the options."""
    top = parser()
    args, rest = top.parse_known_args(argv)
    late = [text for text in rest if "=" in text and not text.startswith("-")]
    if len(late) < len(rest) or (late and not hasattr(args, "overrides")):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if late:
        args.overrides = [*args.overrides, *late]
    return args


def parser() -> argparse.ArgumentParser:
    from pretrain import cli_doctor, cli_model
    from pretrain.plan import cli as cli_plan
    from pretrain.scaling import cli as cli_scale

    top = argparse.ArgumentParser(
        prog="pretrain", description="Pretrain Llama models; docs/architecture.md is the map."
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    cli_plan.add_parser(commands, _trace)
    cli_model.add_parser(commands)
    cli_doctor.add_parser(commands)
    _add_checkpoint(commands)
    cli_scale.add_parser(commands)
    return top


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    p = commands.add_parser("train", help="train a config, or go on where its run stopped")
    p.add_argument("config", metavar="CONFIG.toml")
    p.add_argument("overrides", nargs="*", metavar="section.key=value")
    p.add_argument(
        "--resume",
        choices=("auto", "never"),
        default="auto",
        help="auto: go on from the run's newest whole checkpoint; never: refuse a run that has one",
    )
    p.add_argument(
        "--allow-change",
        default="",
        metavar="KEY,KEY",
        help="settings of train, optimizer, schedule or precision that may differ from the checkpoint's",
    )
    p.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    from pretrain.config_file import load_config

    cfg = load_config(args.config, args.overrides)
    from pretrain.dist import launch_environment, under_torchrun
    from pretrain.train.run import run_training

    allowed = {key.strip() for key in args.allow_change.split(",") if key.strip()}
    faulthandler.enable(2)  # a rank that dies in C++ leaves its stacks in the log
    try:
        status = run_training(cfg, resume=args.resume, allow_change=allowed)
    except ConfigError as e:  # on all ranks alike
        if not under_torchrun() or not _told_launcher(e):
            raise
        if launch_environment()["rank"] == 0:
            print(f"error: {e}", file=sys.stderr)
        _leave(0)
    except MachineError:
        raise
    except BaseException:
        # A crash. Tear-down would wait for ranks that wait for this one, so leave at once; torchrun ends the others.
        # Half a second later, so that who watches the ranks can tell the first to go from those it takes along.
        traceback.print_exc()
        time.sleep(0.5)
        _leave(1)
    if launch_environment()["size"] > 1:
        # Engines keep process groups alive whose threads hold tensors; one that lets go while the interpreter is
        # taken down aborts the process, and a finished run would be taken for a crash.
        _leave(status)
    return status


def _told_launcher(refusal: ConfigError) -> bool:
    """Leave the words where a launcher asked for them: torchrun shows it no status of a rank."""
    note = os.environ.get("PRETRAIN_REFUSAL")
    with suppress(OSError):
        return note is not None and Path(note).write_text(f"{refusal}\n", encoding="utf-8") > 0
    return False


def _leave(status: int) -> NoReturn:
    with suppress(OSError):  # a full disk below the output changes nothing about the status
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _trace(cfg: Config, gpus: int, as_json: bool) -> str:
    """`pretrain plan --trace` builds the trainer's engine, which `plan` is not above."""
    from pretrain.metrics.jsonl import encode
    from pretrain.train import trace

    traced = trace.trace(cfg, gpus)
    return encode(trace.as_json(traced)) if as_json else trace.render(traced)


def _add_checkpoint(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    p = commands.add_parser("checkpoint", help="list, verify or prune the checkpoints of a run")
    p.add_argument("action", choices=("list", "verify", "prune"))
    p.add_argument("run_dir", metavar="RUN")
    p.add_argument("--keep", type=int, default=3, help="prune: newest whole checkpoints to keep (default 3)")
    p.set_defaults(run=_checkpoint)


def _keep_every(run: Path) -> int:
    """The run's own `checkpoint.keep_every`: what it keeps for ever is not this command's to remove."""
    from pretrain.untrusted import read_toml

    try:
        return int(read_toml(run / "config.toml")["checkpoint"]["keep_every"])
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise ConfigError(
            f"{run / 'config.toml'}: checkpoint.keep_every cannot be read ({e}), and without it nothing is removed"
        ) from None


def _checkpoint(args: argparse.Namespace) -> int:
    from pretrain.train import checkpoint_folder as folder

    run = Path(args.run_dir)
    if not folder.checkpoints_dir(run).is_dir():
        raise ConfigError(f"{run}: no run folder (it has no checkpoints/)")
    if args.action == "prune":
        if args.keep < 1:
            raise ConfigError(f"--keep {args.keep}: at least one checkpoint stays; set --keep 1 or more")
        for name in folder.prune(run, args.keep, _keep_every(run)):
            print(f"removed {name}")
        return 0
    bad, shown = 0, 0
    for found in folder.list_checkpoints(run):
        problem = found.problem or (folder.verify(found.path) if args.action == "verify" else None)
        try:
            size = sum(f.stat().st_size for f in found.path.iterdir() if f.is_file())
        except FileNotFoundError:
            continue  # a living run has taken it away meanwhile
        bad, shown = bad + (problem is not None), shown + 1
        print(f"{found.path.name}  {size / 2**20:10.1f} MiB  {problem or 'whole'}")
    if not shown:
        print(f"no checkpoint in {run}")
    return 2 if bad and args.action == "verify" else 0
