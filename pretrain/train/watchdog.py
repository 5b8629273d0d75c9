"""Ends a job that hangs: when a step takes far longer than steps do, every rank writes its stacks to its log and exits.

A collective that one rank never joins would hold all machines until the process group's time-out, and say nothing of
where. Each rank watches itself from a thread, so a rank stuck in C++ is seen too. Saves and validation are not watched;
their collectives have the process group's time-out.
"""

import faulthandler
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_WARM = 3  # steps before watching: the first ones compile
_REMEMBERED = 64  # steps in the median
_GRACE = 5.0  # seconds between writing stacks and leaving, so that the other ranks write theirs


class Watchdog:
    """`beat` after every step; `factor` x the median step, but at least `least_seconds`, without one is a hang."""

    def __init__(
        self,
        log: Path,
        *,
        factor: float,
        least_seconds: float,
        on_hang: Callable[[int, float], None],
        leave: Callable[[], None] = lambda: os._exit(1),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._factor, self._least = log, factor, least_seconds
        self._on_hang, self._leave, self._clock = on_hang, leave, clock
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)
        self._last: float | None = None
        self._step = 0
        self._paused = False
        self._stopped = threading.Event()

    @contextmanager
    def watching(self) -> Iterator["Watchdog"]:
        """Watch from a thread while inside; `factor` 0 watches nothing."""
        thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        if self._factor:
            thread.start()
        try:
            yield self
        finally:
            self._stopped.set()

    def beat(self, step: int) -> None:
        """A step is done."""
        now = self._clock()
        if self._last is not None:
            self._durations.append(now - self._last)
        self._last, self._step = now, step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Not a step: its time neither counts nor ends the job."""
        self._paused = True
        try:
            yield
        finally:
            self._last, self._paused = self._clock(), False

    def allowed_seconds(self) -> float | None:
        """How long the step in hand may take; None while too few steps are known."""
        if len(self._durations) < _WARM:
            return None
        return max(self._least, self._factor * statistics.median(self._durations))

    def overdue(self) -> float | None:
        """Seconds since the last step where that is too long, else None."""
        allowed, last = self.allowed_seconds(), self._last
        if allowed is None or last is None or self._paused:
            return None
        waited = self._clock() - last
        return waited if waited > allowed else None

    def _run(self) -> None:
        while not self._stopped.wait(min(1.0, self._least / 4)):
            waited = self.overdue()
            if waited is not None:
                self._report(waited)
                time.sleep(_GRACE)
                self._leave()
                return

    def _report(self, waited: float) -> None:
        allowed = self.allowed_seconds() or 0.0
        with open(self._log, "a", encoding="utf-8") as f:
            f.write(
                f"hang: {waited:.0f} s after step {self._step} the next one is not done ({allowed:.0f} s are allowed, "
                f"run.hang_factor={self._factor:g}, run.hang_seconds={self._least:g}); stacks of all threads:\n"
            )
            f.flush()
            faulthandler.dump_traceback(f, all_threads=True)
        _dump_nccl(self._log.with_suffix(".nccl"))
        self._on_hang(self._step, waited)


def _dump_nccl(path: Path) -> None:
    """NCCL's flight recorder (the last collectives of this rank), where there is one."""
    from torch import distributed

    dump = getattr(getattr(distributed, "_distributed_c10d", None), "_dump_nccl_trace", None)
    if dump is not None and distributed.is_initialized() and "nccl" in distributed.get_backend_config():
        path.write_bytes(dump())
