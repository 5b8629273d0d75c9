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


class Stop:
    """What this rank has heard, and what all ranks agree on."""

    def __init__(self, run: Path, world: World) -> None:
        self._file = run / STOP_FILE
        self._world = world
        self._heard = Reason.none
        self.count = 0  # signals so far; a second one asks for hurry

    def agreed(self) -> Reason:
        """Collective, once a step: the reason to stop now that any rank knows of."""
        mine = self._heard
        if self._world.first and self._file.exists():
            mine = max(mine, Reason.user)
        return Reason(agree_max(int(mine), self._world))

    def honoured(self) -> None:
        """Rank 0 removes the STOP file, so that the next start runs."""
        if self._world.first:
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
        self.count += 1
        os.write(2, f"{signal.Signals(number).name} heard: saving and leaving after this step\n".encode())
