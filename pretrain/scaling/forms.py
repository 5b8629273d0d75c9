"""The shapes a scaling law can take, as predictions of log-loss with analytic slopes.

Every form is log(E + A/N^alpha + B/D^beta) computed as a log-sum-exp of three straight lines in log N and log D, so
E, A and B are positive by construction and the optimiser works with their logarithms. The lines are centred on the
data's mean log N and log D, without which log A and alpha are correlated to 0.999. Forms differ in which parameters
are free or tied, and whether repeated tokens count in full. huber.py fits them, fit.py turns them into `Law`s.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.scaling.huber import Array

FULL = ("log_A", "log_B", "log_E", "alpha", "beta")
REPETITION = (*FULL, "log_RD", "log_RN")


class Points(NamedTuple):
    """What a law is fitted on. `unique` equals `tokens` where no token was seen twice."""

    params: Array  # [n] parameters, by the convention of the table
    tokens: Array  # [n] tokens trained on, repeats included
    loss: Array  # [n] nats per token (or any positive unit; E, A and B then have it too)
    unique: Array  # [n] different tokens among them

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> "Points":
        return Points(*(column[index] for column in self))


@dataclass(frozen=True)
class Form:
    """`ties` maps the form's own parameters to log_A, log_B, log_E, alpha, beta: full = ties @ own."""

    name: str
    formula: str
    source: str
    free: tuple[str, ...]
    ties: tuple[tuple[float, ...], ...]
    repetition: bool = False

    @property
    def uses_params(self) -> bool:
        return any(self.ties[0])

    @property
    def uses_tokens(self) -> bool:
        return any(self.ties[1])


def _select(*rows: str, columns: tuple[str, ...]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(column == row) for column in columns) for row in rows)


_ONLY_N, _ONLY_D, _TIED = (
    ("log_A", "log_E", "alpha"),
    ("log_B", "log_E", "beta"),
    ("log_A", "log_B", "log_E", "alpha"),
)
FORMS = {
    form.name: form
    for form in (
        Form(
            "chinchilla",
            "E + A/N^alpha + B/D^beta",
            "Hoffmann et al. 2022, arXiv:2203.15556",
            FULL,
            _select(*FULL, columns=FULL),
        ),
        # E + (a M^eta + b M^-eta) C^-eta with M = D/N and C = 6ND is the form above with both exponents 2 eta.
        Form(
            "overtrained",
            "E + A/N^alpha + B/D^alpha",
            "Gadre et al. 2024, arXiv:2403.08540",
            _TIED,
            _select("log_A", "log_B", "log_E", "alpha", "alpha", columns=_TIED),
        ),
        Form(
            "repetition",
            "E + A/N'^alpha + B/D'^beta, D' = U(1 + RD(1 - exp(-(D/U - 1)/RD)))",
            "Muennighoff et al. 2023, arXiv:2305.16264",
            REPETITION,
            _select(*FULL, columns=FULL),
            repetition=True,
        ),
        Form(
            "params",
            "E + A/N^alpha",
            "for one token count, or tokens in one ratio to params",
            _ONLY_N,
            _select("log_A", "", "log_E", "alpha", "", columns=_ONLY_N),
        ),
        Form(
            "tokens",
            "E + B/D^beta",
            "for one size",
            _ONLY_D,
            _select("", "log_B", "log_E", "", "beta", columns=_ONLY_D),
        ),
    )
}


def softmax(logits: list[Array]) -> tuple[Array, list[Array]]:
    top = logits[0]
    for other in logits[1:]:
        top = np.maximum(top, other)
    parts = [np.exp(logit - top) for logit in logits]
    total = sum(parts[1:], parts[0])
    return np.log(total) + top, [part / total for part in parts]


class SumModel:
    """A form without repetition: its lines are linear in theta, so second derivatives cost three products."""

    def __init__(self, form: Form, points: Points) -> None:
        self.form, self.target = form, np.log(points.loss)
        self.center = np.array([np.log(points.params).mean(), np.log(points.tokens).mean()])
        x, y = np.log(points.params) - self.center[0], np.log(points.tokens) - self.center[1]
        one, nil = np.ones_like(x), np.zeros_like(x)
        lines = [
            (form.uses_params, [one, nil, nil, -x, nil]),
            (form.uses_tokens, [nil, one, nil, nil, -y]),
            (True, [nil, nil, one, nil, nil]),
        ]
        ties = np.array(form.ties)
        self.lines = [np.stack(columns, axis=1) @ ties for used, columns in lines if used]  # each [n, p]
        self._squares = [(line[:, :, None] * line[:, None, :]).reshape(len(x), -1) for line in self.lines]

    def predict(self, theta: Array) -> Array:
        return softmax([theta @ line.T for line in self.lines])[0]

    def evaluate(self, theta: Array) -> tuple[Array, Array]:
        prediction, shares = softmax([theta @ line.T for line in self.lines])
        slopes = shares[0][:, :, None] * self.lines[0]
        for share, line in zip(shares[1:], self.lines[1:], strict=True):
            slopes += share[:, :, None] * line
        self._last = (theta, shares, slopes)
        return prediction, slopes

    def curvature(self, theta: Array, weights: Array) -> Array:
        last, shares, slopes = self._last
        if last is not theta:
            self.evaluate(theta)
            last, shares, slopes = self._last
        size = theta.shape[1]
        outer = np.matmul(slopes.transpose(0, 2, 1), weights[:, :, None] * slopes)
        inner = sum((weights * share) @ square for share, square in zip(shares, self._squares, strict=True))
        return np.asarray(inner).reshape(-1, size, size) - outer

    def full(self, theta: Array) -> Array:
        """log_A, log_B, log_E, alpha, beta in the table's own units: [R, 5]."""
        full = theta @ np.array(self.form.ties).T
        full[:, 0] += full[:, 3] * self.center[0]
        full[:, 1] += full[:, 4] * self.center[1]
        return full

    def own(self, full: Array) -> Array:
        """The form's centred parameters nearest to full ones [R, 5] (ties average)."""
        centred = full.copy()
        centred[:, 0] -= full[:, 3] * self.center[0]
        centred[:, 1] -= full[:, 4] * self.center[1]
        return centred @ np.linalg.pinv(np.array(self.form.ties)).T
