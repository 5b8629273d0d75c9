"""The simple gradient noise scale: from how many tokens a step on, more of them mostly repeat each other.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1. With G the true gradient and S the trace of the covariance of
one token's, a mean over n tokens has an expected squared norm of |G|² + S/n. Two batch sizes in one step give both
unknowns without bias; each is averaged over the logged steps before their ratio S/|G|² is taken. In targets (tokens
with a loss), as if they were independent: rows are, tokens of a row less so.
"""

import math
from typing import Any

from pretrain.errors import CheckpointError


class NoiseScale:
    """Keeps two exponential averages; checkpoints carry them. `decay` is per logged step."""

    def __init__(self, decay: float = 0.9) -> None:
        self._decay = decay
        self._signal = self._noise = 0.0

    def update(self, small_square: float, small: float, big_square: float, big: float) -> float | None:
        """The noise scale after one more step, or None while noise hides the gradient.

        small_square, big_square: squared norms of the mean gradients over `small` and `big` > `small` targets.
        """
        if not 0 < small < big:
            return None
        signal = (big * big_square - small * small_square) / (big - small)
        noise = (small_square - big_square) / (1 / small - 1 / big)
        # Both averages are short of the same factor in the beginning, which their ratio does not see.
        self._signal += (1 - self._decay) * (signal - self._signal)
        self._noise += (1 - self._decay) * (noise - self._noise)
        return self._noise / self._signal if self._signal > 0 and self._noise > 0 else None

    def state(self) -> list[float]:
        """For a checkpoint; JSON keeps every bit of a float."""
        return [self._signal, self._noise]

    def load(self, state: Any) -> None:
        """What `state` gave."""
        if not isinstance(state, list) or [type(x) for x in state] != [float] * 2 or not all(map(math.isfinite, state)):
            raise CheckpointError(f"train.json of the checkpoint: noise_scale={str(state)[:80]} is no pair of averages")
        self._signal, self._noise = state
