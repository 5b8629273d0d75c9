"""`pretrain-launch`: parse, call, print."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.slurm_commands import SlurmError
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
    except BrokenPipeError:  # pretrain-launch status ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SlurmError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="pretrain-launch", description="From a config to a running job.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    p = commands.add_parser("local", help="train on this machine with torchrun")
    _add_config(p)
    p.add_argument("--nproc", type=int, required=True, metavar="N", help="ranks")
    p.add_argument("--max-restarts", type=int, default=0, metavar="N", help="restarts after a crash (default 0)")
    p.add_argument("--port", type=int, help="rendezvous port (default: a free one)")
    _add_train_options(p)
    p.set_defaults(run=_local)

    p = commands.add_parser("slurm", help="submit a job that trains, and comes back by itself until it is finished")
    _add_config(p)
    _add_site(p)
    p.add_argument("--nodes", type=int, required=True, metavar="N")
    _add_train_options(p)
    p.set_defaults(run=_slurm)

    p = commands.add_parser("sweep", help="submit an array over the runs that pretrain scale ladder made")
    p.add_argument("folder", metavar="DIR", type=Path)
    _add_site(p)
    p.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of each run (default 1)")
    p.add_argument("--at-once", type=int, default=8, metavar="N", help="runs at the same time (default 8)")
    p.set_defaults(run=_sweep)

    p = commands.add_parser("data", help="submit pretrain-data build as an array, then merge")
    _add_site(p, launcher=False)
    p.add_argument("--tasks", type=int, required=True, metavar="N")
    p.add_argument("build", nargs="+", metavar="ARG", help="after --: INPUT... and the options of pretrain-data build")
    p.set_defaults(run=_data)

    p = commands.add_parser("status", help="state, step, rate, restarts and the end of the log of a run")
    p.add_argument("folder", metavar="RUN", type=Path)
    p.add_argument("--lines", type=int, default=10, metavar="N", help="lines of the log (default 10)")
    p.set_defaults(run=_status)

    p = commands.add_parser("stop", help="save after the step in hand and end, for good")
    p.add_argument("folder", metavar="RUN", type=Path)
    p.set_defaults(run=_stop)
    return top


def _add_config(p: argparse.ArgumentParser) -> None:
    p.add_argument("config", metavar="CONFIG.toml", type=Path)
    p.add_argument("overrides", nargs="*", metavar="section.key=value")


def _add_train_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--resume", choices=("auto", "never"), help="as for pretrain train")
    p.add_argument("--allow-change", metavar="KEY,KEY", help="as for pretrain train")


def _train_options(args: argparse.Namespace) -> list[str]:
    given = {"--resume": args.resume, "--allow-change": args.allow_change}
    return [word for option, value in given.items() if value is not None for word in (option, value)]


def _add_site(p: argparse.ArgumentParser, *, launcher: bool = True) -> None:
    default = os.environ.get("PRETRAIN_CLUSTER")
    p.add_argument(
        "--cluster",
        type=Path,
        default=default,
        required=default is None,
        metavar="FILE",
        help="cluster file (docs/slurm.md); default: the variable PRETRAIN_CLUSTER",
    )
    if launcher:
        p.add_argument("--launcher", choices=("torchrun", "srun"), default="torchrun")
    p.add_argument("--dry-run", action="store_true", help="print what would be submitted")


def _local(args: argparse.Namespace) -> int:
    from launch import local

    return local.launch(
        args.config,
        args.overrides,
        nproc=args.nproc,
        max_restarts=args.max_restarts,
        port=args.port,
        train_options=_train_options(args),
        say=_say,
    )


def _slurm(args: argparse.Namespace) -> int:
    from launch import slurm
    from launch.cluster import load_cluster
    from pretrain.config_file import load_config

    cfg, cluster = load_config(args.config, args.overrides), load_cluster(args.cluster)
    shape = slurm.Shape(args.nodes, args.launcher, _train_options(args))
    if args.dry_run:
        run = (Path.cwd() / cfg.run.dir).resolve()
        place = slurm.Place(run, run / "jobs" / "000", Path.cwd())
        print(slurm.render_sbatch(cfg, cluster, place, shape), end="")
        return 0
    place = slurm.prepare(cfg, cluster, shape, chdir=Path.cwd(), say=_say)
    slurm.submit(place, cluster, _say)
    return 0


def _sweep(args: argparse.Namespace) -> int:
    from launch import slurm, sweep
    from launch.cluster import load_cluster

    return sweep.launch(
        args.folder,
        load_cluster(args.cluster),
        shape=slurm.Shape(args.nodes, args.launcher),
        at_once=args.at_once,
        chdir=Path.cwd(),
        dry_run=args.dry_run,
        say=_say,
    )


def _data(args: argparse.Namespace) -> int:
    from launch import data_build
    from launch.cluster import load_cluster

    return data_build.launch(
        args.build, load_cluster(args.cluster), tasks=args.tasks, chdir=Path.cwd(), dry_run=args.dry_run, say=_say
    )


def _status(args: argparse.Namespace) -> int:
    from launch import status

    print(status.describe(args.folder, lines=args.lines))
    return 0


def _stop(args: argparse.Namespace) -> int:
    from launch import status

    print(status.stop(args.folder))
    return 0


def _say(text: str) -> None:
    print(text, flush=True)
