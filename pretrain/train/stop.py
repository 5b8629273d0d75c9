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
    data = 4  # the next step's rows cannot be read


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
        self._settled = False  # whether the ranks have met for a step: before that there is nothing to save
        self.hurry = False  # agreed: a second signal came, so no new checkpoint while one is being written

    def agreed(self, world: World, *, no_data: bool = False) -> Reason:
        """Collective, once a step: the reason to stop now that any rank knows of."""
        self._settled = True
        mine = Reason.data if no_data else self._heard
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
        if self._count > 1 and not self._settled:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        what = "saving and leaving after this step" if self._count == 1 else "leaving as fast as is safe"
        os.write(2, f"{signal.Signals(number).name} heard: {what}\n".encode())
