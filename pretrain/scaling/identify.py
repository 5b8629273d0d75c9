"""Can these points identify the law, and which run would tell most? Asked before a fit, answered with a run to add.

Three sizes are the least that separate E from A/N^alpha, and when D is a fixed multiple of N no number of runs tells
the two terms apart: a fit would still print five precise-looking numbers. With a law, the next run is the one that most
lowers the variance of the log-loss predicted ten times above the largest run; without one, the one whose own loss is
least certain (Bayesian linear designs, V- and D-optimal, at the law or at typical exponents).
"""

from typing import NamedTuple

import numpy as np

from pretrain.errors import ConfigError
from pretrain.scaling.forms import FORMS, Form, Points, SumModel
from pretrain.scaling.huber import Array
from pretrain.scaling.laws import Laws

SAME = 0.01  # sizes or lengths this close in log count as one
COLLINEAR = 0.995  # |correlation| of log N with log D above which the two terms cannot be told apart
PRIOR_SD = np.array([1.0, 1.0, 1.0, 0.3, 0.3])  # of centred log A, log B, log E, alpha, beta
TARGET = 10.0  # times the largest run's compute


class NextRun(NamedTuple):
    params: float
    tokens: float
    narrower: float  # factor on the predicted loss' standard deviation at the target
    reason: str


def distinct(values: Array) -> Array:
    """The different values, those within SAME of each other counted once."""
    ordered = np.sort(values)
    first = np.concatenate([[True], np.diff(np.log(ordered)) > SAME])
    return ordered[first]


def check(points: Points, form: Form) -> None:
    """ConfigError where these points cannot give the form's parameters; names what is missing and a run to add."""
    lacking = problem(points, form)
    if lacking:
        advice = next_run(points, form, None)
        raise ConfigError(
            f"form {form.name!r} ({form.formula}) cannot be identified: {lacking}. "
            f"The most informative run to add: {advice.params:.3g} params on {advice.tokens:.3g} tokens"
            f"{_other(points, form)}"
        )


def problem(points: Points, form: Form) -> str | None:
    """What the points lack for this form, in words; None when nothing."""
    count, free = len(points.loss), len(form.free)
    for role, used, values in (
        ("model sizes", form.uses_params, points.params),
        ("token counts", form.uses_tokens, points.tokens),
    ):
        if used and len(distinct(values)) < 3:
            shown = ", ".join(f"{value:.3g}" for value in distinct(values))
            return f"it needs 3 different {role} at least, and the points have {len(distinct(values))} ({shown})"
    if count < free + 2:
        return f"it has {free} parameters, and {count} points leave too little to check them by; it needs {free + 2}"
    if form.uses_params and form.uses_tokens:
        correlation = float(np.corrcoef(np.log(points.params), np.log(points.tokens))[0, 1])
        if abs(correlation) > COLLINEAR:
            ratio = points.tokens / points.params
            return (
                f"tokens follow params (correlation of their logarithms {correlation:.4f}; tokens per parameter "
                f"{ratio.min():.3g} to {ratio.max():.3g}), so A/N^alpha and B/D^beta cannot be told apart"
            )
    if form.repetition and np.mean(points.tokens / points.unique > 1.5) < 0.1:
        repeats = float((points.tokens / points.unique).max())
        return (
            f"the points hold no more than {repeats:.2g} passes over the unique tokens; it needs runs at 4 and 16 or so"
        )
    return None


def _other(points: Points, form: Form) -> str:
    """Names a simpler form that these points can carry, if any."""
    for name in ("params", "tokens"):
        if form.name not in ("params", "tokens") and problem(points, FORMS[name]) is None:
            line = "one line of sizes and lengths" if name == "params" else "one size"
            return f"; or fit --form {name}, which holds along {line} only"
    return ""


def next_run(points: Points, form: Form, law: Laws | None, *, noise: float = 0.01) -> NextRun:
    """The run, no dearer than the dearest so far, that most narrows the loss predicted at TARGET times its compute."""
    base = FORMS["chinchilla"]
    model = SumModel(base, points)
    full = law.rows[:, :5] if law is not None and form.uses_params and form.uses_tokens else _typical(points)
    theta = model.own(full)
    _, slopes = model.evaluate(theta)
    information = np.diag(PRIOR_SD**-2.0) + slopes[0].T @ slopes[0] / noise**2
    budget = float((points.params * points.tokens).max())
    best = Laws(np.concatenate([full, np.full((1, 2), np.inf)], axis=1)).optimum(6.0 * TARGET * budget)
    sizes = np.geomspace(points.params.min(), points.params.max() * 2, 25)
    lengths = np.geomspace(points.tokens.min(), points.tokens.max() * 4, 25)
    n, d = (grid.ravel() for grid in np.meshgrid(sizes, lengths))
    ratio = points.tokens / points.params
    sane = (n * d <= budget * 1.0001) & (d / n > min(1.0, ratio.min())) & (d / n < max(2000.0, ratio.max()))
    for values, asked in ((points.params, n), (points.tokens, d)):
        known = distinct(values)
        if law is None and len(known) < 3:  # another of the same would not help
            sane &= np.abs(np.log(asked[:, None] / known)).min(axis=1) > 0.2
    n, d = n[sane], d[sane]
    rows = _slopes_at(model, theta, np.append(n, best.params), np.append(d, best.tokens))
    covariance = np.linalg.inv(information)
    target = rows[-1]
    spread = float(target @ covariance @ target)
    hit = rows[:-1] @ covariance @ target
    own = np.einsum("ij,jk,ik->i", rows[:-1], covariance, rows[:-1])
    after = spread - hit**2 / (noise**2 + own)
    # Without a law the run that tells most of all parameters together, else the one that tells most of the target.
    pick = int(np.argmax(own)) if law is None else int(np.argmin(after))
    narrower = float(np.sqrt(max(after[pick], 0.0) / spread))
    reason = (
        f"narrows the loss predicted at {TARGET:g} times the largest run's compute most, of all runs no dearer than it"
    )
    return NextRun(float(n[pick]), float(d[pick]), narrower, reason)


def _typical(points: Points) -> Array:
    """Exponents of 0.35 and terms of a sensible size at the middle of the data, where no law can be had."""
    level, alpha = 0.35 * float(np.median(points.loss)) / 2, 0.35
    a = np.log(level) + alpha * np.log(points.params).mean()
    b = np.log(level) + alpha * np.log(points.tokens).mean()
    return np.array([[a, b, np.log(0.65 * float(points.loss.min())), alpha, alpha]])


def _slopes_at(model: SumModel, theta: Array, params: Array, tokens: Array) -> Array:
    """Slopes of log-loss at other sizes and lengths, in the centred parameters of `model`."""
    x, y = np.log(params) - model.center[0], np.log(tokens) - model.center[1]
    a, b, e, alpha, beta = theta[0]
    terms = np.stack([np.exp(a - alpha * x), np.exp(b - beta * y), np.full_like(x, np.exp(e))], axis=1)
    share = terms / terms.sum(axis=1, keepdims=True)
    return np.stack([share[:, 0], share[:, 1], share[:, 2], -x * share[:, 0], -y * share[:, 1]], axis=1)
