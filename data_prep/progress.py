"""How far a build is: one line rewritten on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_EVERY_SECONDS = 10.0  # between plain lines


class Progress:
    """Counts bytes of input text and tokens; `show` is cheap and may be called often."""

    def __init__(self, total: int, say: Callable[[str], None]):
        self._total, self._say = total, say
        self._bytes = self._tokens = 0
        self._start = self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def add(self, num_bytes: int, tokens: int) -> None:
        self._bytes += num_bytes
        self._tokens += tokens

    def show(self) -> None:
        now = time.monotonic()
        if now - self._shown < (0.2 if self._terminal else _EVERY_SECONDS):
            return
        self._shown = now
        if self._terminal:
            print(f"\r{self._line()}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            self._say(self._line())

    def finish(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr)
        self._say(self._line())

    def _line(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-3)
        share = self._bytes / self._total if self._total else 1.0
        left = f"eta {_duration(seconds * (1 - share) / share)}" if share else "eta unknown"
        return (
            f"tokenise {self._bytes / 2**20:,.1f}/{self._total / 2**20:,.1f} MiB ({share:.0%})"
            f" | {self._bytes / seconds / 1e6:.1f} MB/s | {self._tokens / seconds / 1e6:.2f} M tokens/s"
            f" | {left if share < 1 else f'took {_duration(seconds)}'}"
        )


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}h {rest // 60:02}m" if hours else f"{rest // 60}m {rest % 60:02}s"
