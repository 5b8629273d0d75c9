"""`pretrain doctor`: parse, call, print."""

import argparse
import json
import signal
from pathlib import Path

from pretrain.errors import ConfigError

_BOUNDS = {
    "expect_gpus": (0, 1024),
    "timeout": (1, 30 * 86_400),
    "max_clock_skew": (0, 86_400),
    "min_free_disk": (0, 10**9),
    "max_used_memory": (0, 10**6),
    "min_allreduce": (0, 10**6),
    "min_share_of_median": (0, 1),
    "message_mib": (1, 1 << 16),
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    p = commands.add_parser("doctor", help="is this machine, or are all nodes of a job, fit to train?")
    p.add_argument("--json", action="store_true", help="print the report as JSON")
    p.add_argument(
        "--run", dest="folder", type=Path, metavar="RUN", help="folder whose disk is looked at (default: here)"
    )
    p.add_argument("--report", type=Path, metavar="DIR", help="shared folder for the launcher to read (jobs)")
    p.add_argument("--expect-gpus", type=int, metavar="N", help="GPUs that a node must show")
    p.add_argument("--timeout", type=int, default=300, metavar="SECONDS", help="give up after this long (default 300)")
    p.add_argument("--max-clock-skew", type=float, default=1.0, metavar="SECONDS")
    p.add_argument("--min-free-disk", type=float, default=1.0, metavar="GIB")
    p.add_argument("--max-used-memory", type=float, default=2.0, metavar="GIB", help="of a GPU before the start")
    p.add_argument("--min-allreduce", type=float, default=0.0, metavar="GB/S", help="bus bandwidth over all ranks")
    p.add_argument("--min-share-of-median", type=float, default=0.7, metavar="SHARE", help="of speed and bandwidth")
    p.add_argument("--message-mib", type=int, default=64, metavar="MIB", help="size of the all-reduce")
    p.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    _check(args)
    signal.alarm(args.timeout)  # a collective that never ends is ended: the process dies of SIGALRM
    from pretrain import doctor

    limits = doctor.Limits(
        args.expect_gpus, args.max_clock_skew, args.min_free_disk, args.max_used_memory,
        args.min_allreduce, args.min_share_of_median, args.message_mib,
    )  # fmt: skip
    report = doctor.examine(limits, args.folder, args.report, args.timeout)
    signal.alarm(0)
    if report is None:
        return 0
    print(json.dumps({"fit": report.fit, **report._asdict()}) if args.json else doctor.describe(report), flush=True)
    return 0 if report.fit else 1


def _check(args: argparse.Namespace) -> None:
    for name, (least, most) in _BOUNDS.items():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: set a number from {least:,} to {most:,}")
    # In a job a folder that is not there is a problem of the node, which goes into its report.
    if args.folder is not None and args.report is None and not args.folder.is_dir():
        raise ConfigError(
            f"--run {args.folder}: no such folder; make it, or leave --run out to look at this one's disk"
        )
