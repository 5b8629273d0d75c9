"""What a fitted law says: loss at a size and length, the best split of a budget, the cheapest way to a loss.

A `Laws` holds R parameter sets at once (one estimate, or its bootstrap replicates), so an interval costs one call.
Built by fit.py, asked by predict.py, plot.py and the checks. Compute is `factor * N * D`, 6 by the usual convention,
and inference `2 * N` for each token; both conventions belong to the caller.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pretrain.scaling.huber import Array

COLUMNS = ("log_A", "log_B", "log_E", "alpha", "beta", "RD", "RN")
_GOLDEN = (np.sqrt(5.0) - 1.0) / 2.0


class Optimum(NamedTuple):
    params: Array  # [R]
    tokens: Array  # [R]
    loss: Array  # [R]


@dataclass(frozen=True)
class Laws:
    """Rows of COLUMNS: [R, 7]. Without a term log_A or log_B is -inf, without repetition RD and RN are inf."""

    rows: Array

    def __getitem__(self, index: slice) -> "Laws":
        return Laws(self.rows[index])

    def column(self, name: str) -> Array:
        return self.rows[:, COLUMNS.index(name)]

    @property
    def optimal_exponent(self) -> Array:
        """The best N grows as C to this power: beta / (alpha + beta)."""
        alpha, beta = self.column("alpha"), self.column("beta")
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where((alpha > 0) & (beta > 0), beta / (alpha + beta), np.nan)

    def loss(self, params: ArrayLike, tokens: ArrayLike, unique: ArrayLike | None = None) -> Array:
        """Loss [R, ...] of all rows at the same params and tokens [...]."""
        asked = (params, tokens) if unique is None else (params, tokens, unique)
        logs = np.broadcast_arrays(*(np.log(np.asarray(value, dtype=np.float64)) for value in asked))
        return self._loss(*(log[None] for log in logs))

    def loss_each(self, params: Array, tokens: Array, unique: float | None = None) -> Array:
        """Loss [R] of each row at its own params [R] and tokens [R]."""
        x, y = np.log(params), np.log(tokens)
        return self._loss(x, y) if unique is None else self._loss(x, y, np.full_like(x, np.log(unique)))

    def _loss(self, x: Array, y: Array, u: Array | None = None) -> Array:
        """From logarithms [R, ...] or [1, ...]."""
        if u is not None:
            x, y = self._effective(x, y, u)
        a, b, e, alpha, beta = (self._tall(name, x.ndim) for name in COLUMNS[:5])
        return np.exp(e) + _term(a, alpha, x) + _term(b, beta, y)

    def optimum(
        self, flops: float, *, factor: float = 6.0, inference_tokens: float = 0.0, unique: float | None = None
    ) -> Optimum:
        """The split of `flops` = factor N D + 2 N inference_tokens with the lowest loss; nan: a term does not fall."""
        if not inference_tokens and unique is None:
            x = self._best_split(np.log(flops / factor))
            tokens = flops / factor / np.exp(x)
            return Optimum(np.exp(x), tokens, self.loss_each(np.exp(x), tokens))

        def tokens_at(x: Array) -> Array:
            return np.maximum((flops / np.exp(x) - 2.0 * inference_tokens) / factor, 1.0)

        highest = np.log(flops / (factor + 2.0 * inference_tokens))
        x = self._golden(lambda x: self.loss_each(np.exp(x), tokens_at(x), unique), 0.0, highest)
        return Optimum(np.exp(x), tokens_at(x), self.loss_each(np.exp(x), tokens_at(x), unique))

    def cheapest(self, loss: float, *, factor: float = 6.0, inference_tokens: float = 0.0) -> tuple[Optimum, Array]:
        """The run that reaches `loss` at the least training plus inference FLOPs, and those FLOPs; nan: never."""
        a, b, e, alpha, beta = (self.column(name) for name in COLUMNS[:5])
        room = loss - np.exp(e)
        with np.errstate(invalid="ignore", divide="ignore"):
            smallest = (a - np.log(room)) / alpha  # below this size no number of tokens suffices

        def tokens_at(x: Array) -> Array:
            left = np.maximum(room - np.exp(a - alpha * x), 1e-300)
            return np.exp(np.minimum((b - np.log(left)) / beta, 300.0))

        def cost(x: Array) -> Array:
            tokens = tokens_at(x)
            return np.log(factor * tokens + 2.0 * inference_tokens) + x

        x = self._golden(cost, smallest + 1e-9, smallest + 40.0)
        tokens = tokens_at(x)
        return Optimum(np.exp(x), tokens, np.where(room > 0, loss, np.nan)), np.exp(cost(x))

    def _best_split(self, log_product: float) -> Array:
        """log N where both terms fall equally fast along N D = exp(log_product)."""
        a, b, _, alpha, beta = (self.column(name) for name in COLUMNS[:5])
        falling = (alpha > 0) & (beta > 0)
        alpha, beta = np.where(falling, alpha, np.nan), np.where(falling, beta, np.nan)
        return (a + np.log(alpha) - b - np.log(beta) + beta * log_product) / (alpha + beta)

    def _tall(self, name: str, dimensions: int) -> Array:
        return self.column(name).reshape((-1,) + (1,) * (dimensions - 1))

    def _effective(self, x: Array, y: Array, u: Array) -> tuple[Array, Array]:
        """log N' and log D' of Muennighoff et al. 2023: repeats, and parameters beyond what U needs, fade away."""
        a, b, _, alpha, beta, rd, rn = (self._tall(name, max(x.ndim, u.ndim)) for name in COLUMNS)
        if np.all(np.isinf(rd)):
            return x, y
        u = np.minimum(u, y)
        enough = np.minimum(best_params_for(a, b, alpha, beta, u), x)
        return fade(x, enough, rn), fade(y, u, rd)

    def _golden(self, value: object, low: ArrayLike, high: ArrayLike) -> Array:
        """The argument that minimises a one-valley function of each row: golden-section search."""
        assert callable(value)
        low, high = (np.broadcast_to(np.asarray(edge, dtype=np.float64), len(self.rows)).copy() for edge in (low, high))
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        at_left, at_right = value(left), value(right)
        for _ in range(90):
            go_left = at_left < at_right
            high, low = np.where(go_left, right, high), np.where(go_left, low, left)
            left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
            at_left, at_right = value(left), value(right)
        return 0.5 * (low + high)


def best_params_for(a: Array, b: Array, alpha: Array, beta: Array, u: Array) -> Array:
    """log of the compute-optimal N for exp(u) tokens: where both terms' slopes per log FLOP are equal."""
    alpha, beta = np.maximum(alpha, 1e-3), np.maximum(beta, 1e-3)
    return (a + np.log(alpha) - b - np.log(beta) + beta * u) / alpha


def fade(total: Array, fresh: Array, scale: Array) -> Array:
    """log of fresh (1 + R*(1 - exp(-R/R*))), R = total/fresh - 1 the repeats; all arguments but R* are logs."""
    repeats = np.exp(np.minimum(total - fresh, 100.0)) - 1.0
    return fresh + np.log1p(-scale * np.expm1(-repeats / scale))


def _term(log_scale: Array, exponent: Array, x: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(log_scale), 0.0, np.exp(log_scale - exponent * x))
