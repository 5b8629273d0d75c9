"""Leaving in time: signals and the STOP file become one agreed step after which all ranks save and leave.

A handler only notes the signal. Once a step the ranks agree, over the CPU, on the gravest reason that any of them has
seen, so it does not matter whether the launcher, all ranks or a single one was told.
"""

import os
import signal
import types
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from pretrain.dist import World, agree_max


class Reason(IntEnum):
    """Why a run ends early; the larger wins where ranks saw different ones."""

    none = 0
    time_limit = 1  # SIGUSR1: the scheduler's warning before the end
    preempted = 2  # SIGTERM
    user = 3  # SIGINT or RUN/STOP: a person decided, so nothing may start the run again by itself


_SIGNALS = {
    signal.SIGUSR1: Reason.time_limit,
    signal.SIGTERM: Reason.preempted,
    signal.SIGINT: Reason.user,
}
STOP_FILE = "STOP"
_HURRY = 16  # above every Reason, so that one maximum carries both


class Stop:
    """What this rank has heard, and what all ranks agree on. Listens from before the ranks meet."""

    def __init__(self, run: Path) -> None:
        self._file = run / STOP_FILE
        self._heard = Reason.none
        self._count = 0
        self.hurry = False  # agreed: a second signal came, so no new checkpoint while one is being written

    def agreed(self, world: World) -> Reason:
        """Collective, once a step: the reason to stop now that any rank knows of."""
        mine = self._heard
        if world.first and self._file.exists():
            mine = max(mine, Reason.user)
        hurry, reason = divmod(agree_max(int(mine) + _HURRY * (self._count > 1), world), _HURRY)
        self.hurry = hurry > 0
        return Reason(reason)

    def honoured(self, world: World) -> None:
        """Rank 0 removes the STOP file, so that the next start runs."""
        if world.first:
            self._file.unlink(missing_ok=True)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note signals while inside, and give the handlers back after."""
        before = {number: signal.signal(number, self._hear) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: types.FrameType | None) -> None:
        self._heard = max(self._heard, _SIGNALS[signal.Signals(number)])
        self._count += 1
        what = "saving and leaving after this step" if self._count == 1 else "leaving as fast as is safe"
        os.write(2, f"{signal.Signals(number).name} heard: {what}\n".encode())
