"""The rank processes below a launcher: finding them, and bringing signals to them themselves.

torchrun dies of USR1, and after TERM or INT it kills its ranks and exits 1, whatever they did. So nothing here ever
signals torchrun: a supervisor (`local` on one machine, `node` on each node of a job) takes the signal and hands it to
every rank once that rank listens. Standard library only; Linux's /proc says which processes there are and what they
catch.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

WARNINGS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What a supervisor takes for its ranks. A terminal that closes (HUP) counts as TERM."""
_POLL_SECONDS = 0.1
_INTERRUPTS_TO_KILL = 3


class Process(NamedTuple):
    """A process that is told from a later one of the same number by its start time."""

    pid: int
    started: str  # clock ticks since boot


def identify(pid: int) -> Process | None:
    """The process that has this number now; None where there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else Process(pid, fields[19])


def send(process: Process, number: int) -> bool:
    """Signal this very process; False where it is gone."""
    if identify(process.pid) != process:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
        return True
    return False


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def torchrun_ranks(pid: int) -> list[Process]:
    """The ranks that the torchrun `pid` has started, in the order of their local ranks."""
    ranks = []
    for child in children(pid):
        try:
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        local = [int(item[11:]) for item in environment if item.startswith(b"LOCAL_RANK=")]
        if local and (process := identify(child)) is not None:
            ranks.append((local[0], process))
    return [process for _, process in sorted(ranks)]


def lone_rank(pid: int) -> list[Process]:
    """The process itself, where no torchrun stands between."""
    process = identify(pid)
    return [process] if process is not None else []


def listens(process: Process) -> bool:
    """Whether a rank has come to where it takes warnings: it catches USR1, which no library does on its own."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


FindRanks = Callable[[int], list[Process]]
"""From the pid of a started command to the ranks that are now below it."""


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    find_ranks: FindRanks,
    say: Callable[[str], None],
    *,
    output: Path | None = None,
) -> int:
    """Run `command` to its end and hand every warning to its ranks; its exit status (negative: the signal it died of).

    Its output goes to the end of the file `output` where given. A warning that comes while a rank still imports waits
    until that rank listens, and is given to ranks that are started later too. A third interrupt by hand kills. Ranks
    that outlive a killed command are killed.
    """
    heard: list[int] = []
    previous = {number: signal.signal(number, _note(heard)) for number in WARNINGS}
    ranks: list[Process] = []
    try:
        process = _start(command, environment, output)
        told: dict[Process, int] = {}
        announced = 0
        while process.poll() is None:
            ranks = find_ranks(process.pid) or ranks
            for number in heard[announced:]:
                say(f"{signal.Signals(number).name} heard, telling the ranks")
            announced = len(heard)
            if heard.count(signal.SIGINT) >= _INTERRUPTS_TO_KILL:
                say("interrupted again and again: killing the ranks")
                for rank in [*ranks, *lone_rank(process.pid)]:
                    send(rank, signal.SIGKILL)
            for rank in ranks:
                while told.get(rank, 0) < len(heard) and listens(rank):
                    number = heard[told.get(rank, 0)]
                    send(rank, signal.SIGTERM if number == signal.SIGHUP else number)
                    told[rank] = told.get(rank, 0) + 1
            time.sleep(_POLL_SECONDS)
        return process.returncode
    finally:
        for rank in ranks:
            send(rank, signal.SIGKILL)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _start(command: Sequence[str], environment: Mapping[str, str], output: Path | None) -> "subprocess.Popen[bytes]":
    """In a session of its own, so that a terminal's interrupt reaches the supervisor alone."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(output, "ab")) if output is not None else None
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def _note(heard: list[int]) -> Callable[[int, types.FrameType | None], None]:
    return lambda number, frame: heard.append(number)


def _die_with_parent() -> None:
    """In the child, before it becomes the command: TERM when the supervisor is killed, so that nothing stays."""
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG
