"""Steps whose loss or gradient norm is no number, or stands far above those before it: found on all ranks alike.

Arithmetic on the global loss and norm of each step, so every rank comes to the same verdict, and a resumed run (the
history is in its checkpoint) to the same as an unbroken one. What then happens is the trainer's business.
"""

import math
import statistics
from collections import deque
from typing import Any

from pretrain.config import AnomaliesConfig
from pretrain.errors import CheckpointError

_TO_DEVIATIONS = 1.4826  # median absolute deviations of a normal distribution in one standard deviation
_NOISE = 1e-3  # of the median: the least that counts as a deviation, where a window hardly varies


class Anomalies:
    """The last good losses and norms, and what the policy has done so far."""

    def __init__(self, cfg: AnomaliesConfig) -> None:
        self._cfg = cfg
        self._losses: deque[float] = deque(maxlen=cfg.window)
        self._norms: deque[float] = deque(maxlen=cfg.window)
        self.spent = 0  # of the budget: steps skipped, or rollbacks
        self.left_out: list[list[int]] = []  # stream rows that rollbacks have left out: first, last

    def judge(self, loss: float, norm: float) -> str | None:
        """What is wrong with a step; None: nothing, and its values join the window."""
        named = (("gradient norm", norm, self._norms), ("loss", loss, self._losses))
        for name, value, _ in named:
            if not math.isfinite(value):
                return f"the {name} is {value}"
        for name, value, window in named:
            if self._cfg.spike_z and len(window) == self._cfg.window:
                median, z = robust_z(value, window)
                if z > self._cfg.spike_z:
                    return (
                        f"the {name} {value:.5g} is {z:.1f} deviations above {median:.5g}, the median of "
                        f"{len(window)} steps (anomalies.spike_z={self._cfg.spike_z:g})"
                    )
        for _, value, window in named:
            window.append(value)
        return None

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON keeps every bit of a float."""
        histories = {"losses": list(self._losses), "norms": list(self._norms)} if self._cfg.spike_z else {}
        return {"spent": self.spent, "left_out": self.left_out, **histories}

    def load(self, state: dict[str, Any]) -> None:
        """What `state` gave; a longer window is filled by the steps to come."""
        self.left_out = left_out({"anomalies": state})
        try:
            self.spent = int(state.get("spent", 0))
            self._losses, self._norms = (
                deque(map(float, state.get(key, ())), self._cfg.window) for key in ("losses", "norms")
            )
        except (TypeError, ValueError, OverflowError) as e:
            raise CheckpointError(f"train.json of the checkpoint: no history of anomalies ({e})") from None


def left_out(meta: dict[str, Any]) -> list[list[int]]:
    """The stream rows that rollbacks had left out when a checkpoint was taken; `meta` is its train.json."""
    pairs = meta.get("anomalies", {}).get("left_out", [])
    try:
        checked = [[first, last] for first, last in pairs if type(first) is type(last) is int and 0 <= first <= last]
    except (TypeError, ValueError):
        checked = None
    if checked != pairs:
        raise CheckpointError(f"train.json of the checkpoint: left_out={str(pairs)[:80]} are no rows")
    return pairs


def robust_z(value: float, window: "deque[float]") -> tuple[float, float]:
    """The median, and by how many standard deviations, estimated from the median absolute one, `value` is above it."""
    median = statistics.median(window)
    deviation = statistics.median(abs(x - median) for x in window)
    scale = max(_TO_DEVIATIONS * deviation, _NOISE * abs(median))
    return median, (value - median) / scale if scale else 0.0
