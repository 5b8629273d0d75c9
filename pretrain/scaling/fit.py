"""Fits a scaling law to (params, tokens, loss) with bootstrap intervals. Never loads torch, matplotlib or pandas.

The estimate minimises the sum of Huber losses of log-loss (threshold 1e-3, Hoffmann et al. 2022; the *sum*, so that no
tolerance depends on the number of points) from many starts. Rows are sorted first, so their order cannot matter, and
only the intervals draw random numbers. forms.py has the shapes, huber.py the optimiser, identify.py the refusals,
holdout.py the checks on the largest runs; report.py and study.py turn a `Fit` into words and JSON.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pretrain.errors import ConfigError
from pretrain.scaling.forms import FORMS, Form, Points, SumModel
from pretrain.scaling.huber import Array, minimise, objective
from pretrain.scaling.laws import Laws
from pretrain.scaling.repetition import RepetitionModel
from pretrain.scaling.starts import hoffmann_grid, profile_grid

DELTA = 1e-3  # Huber threshold on log-loss
LEVEL = 0.90  # of every interval
KEPT_STARTS = 48  # of the Hoffmann grid, by objective
EARLY_STEPS, FINISHERS = 12, 16  # every start takes so many steps, then the best so many go on to the end


@dataclass(frozen=True)
class Fit:
    form: Form
    points: Points  # in the order of the residuals: sorted by params, tokens, loss
    order: NDArray[np.intp]  # their places in what was given
    law: Laws  # one row, the estimate
    replicates: Laws  # bootstrap, one row each; none where it was not asked for
    residuals: Array  # [n] log measured - log fitted
    objective: float
    reached: float  # share of the finishers that ended at the estimate; 1 means one valley
    stretch: float  # variance of the bootstrap weights

    @property
    def noise(self) -> float:
        """Standard deviation of log-loss about the law, for points that are no outliers, freed parameters counted."""
        inliers = self.residuals[~self.outliers]
        freedom = max(len(inliers) - len(self.form.free), 1)
        return float(np.sqrt(np.sum(inliers**2) / freedom))

    @property
    def deviations(self) -> Array:
        """Residuals in robust standard deviations (1.4826 times the median size; at least the threshold's tenth)."""
        center = np.median(self.residuals)
        scale = 1.4826 * np.median(np.abs(self.residuals - center))
        return (self.residuals - center) / max(scale, 0.1 * DELTA)

    @property
    def outliers(self) -> NDArray[np.bool_]:
        return np.abs(self.deviations) > 6.0


def interval(values: Array) -> tuple[float, float] | None:
    """The central 90 % of finite values; none where fewer than half are finite or there are none."""
    finite = values[np.isfinite(values)]
    if len(finite) < max(2, len(values) / 2):
        return None
    low, high = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def fit_law(
    points: Points,
    form: str = "chinchilla",
    *,
    bootstrap: int = 1000,
    seed: int = 0,
    groups: NDArray[np.generic] | None = None,
    delta: float = DELTA,
) -> Fit:
    """The law of `form` nearest to `points`; `groups` names rows that come from one run and are resampled together.

    Checks only that the numbers are usable; whether they can identify the law is identify.check's question.
    """
    if form not in FORMS:
        raise ConfigError(f"form={form!r} is unknown; the forms are {', '.join(FORMS)}")
    order = np.lexsort((points.unique, points.loss, points.tokens, points.params))
    points = points.take(order)
    _refuse_unusable(points)
    model = _model(FORMS[form], points)
    target, ones = np.log(points.loss)[None], np.ones((1, len(points.loss)))
    starts = _starts(model, points, target, delta)
    begun = minimise(model, starts, target, ones, delta, max_steps=EARLY_STEPS)
    ahead = np.argsort(begun.objective, kind="stable")[:FINISHERS]
    found = minimise(model, begun.theta[ahead], target, ones, delta)
    best = int(np.argmin(found.objective))
    lowest = float(found.objective[best])
    theta = found.theta[best : best + 1]
    residuals = target[0] - model.predict(theta)[0]
    stretch = _stretch(residuals, theta.shape[1], delta)
    replicates = np.empty((0, 7))
    if bootstrap:
        weights = _weights(len(target[0]), None if groups is None else groups[order], bootstrap, stretch, seed)
        begin = np.repeat(theta, bootstrap, axis=0)
        replicates = _rows(model, minimise(model, begin, target, weights, delta).theta)
    return Fit(
        form=FORMS[form],
        points=points,
        order=order,
        law=Laws(_rows(model, theta)),
        replicates=Laws(replicates),
        residuals=residuals,
        objective=lowest,
        reached=float(np.mean(found.objective <= lowest * (1 + 1e-6) + 1e-15)),
        stretch=stretch,
    )


def _model(form: Form, points: Points) -> SumModel | RepetitionModel:
    return RepetitionModel(form, points) if form.repetition else SumModel(form, points)


def _refuse_unusable(points: Points) -> None:
    for name, column in zip(Points._fields, points, strict=True):
        bad = ~(np.isfinite(column) & (column > 0))
        if bad.any():
            raise ConfigError(f"{name} has {int(bad.sum())} values that are not positive numbers; leave those rows out")


def _starts(model: SumModel | RepetitionModel, points: Points, target: Array, delta: float) -> Array:
    form = model.form
    profile = profile_grid(points, use_params=form.uses_params, use_tokens=form.uses_tokens)
    grid = model.own(hoffmann_grid())
    rank = np.argsort(objective(model, grid, target, np.ones_like(target), delta), kind="stable")
    starts = np.concatenate([model.own(profile), grid[rank[:KEPT_STARTS]]])
    if not form.repetition:
        return starts
    few = np.argsort(objective(model, starts, target, np.ones_like(target), delta), kind="stable")[:24]
    shifts = np.log(np.array([(1.0, 1.0), (0.2, 1.0), (5.0, 1.0), (1.0, 5.0), (1.0, 30.0)]))
    many = np.repeat(starts[few], len(shifts), axis=0)
    many[:, 5:] += np.tile(shifts, (len(few), 1))
    return many


def _stretch(residuals: Array, free: int, delta: float) -> float:
    """Variance of the bootstrap weights: near 1, and more where the fit is least squares on few points.

    Residuals inside the threshold make the fit least squares, whose resampled spread is too small by the leverage
    (n - p)/n and by the normal quantile used for Student's. Outside it the fit is nearly of absolute values, whose
    resampled spread is a little too large. Both corrections vanish with many points; the share of points inside,
    squared, weighs between them. Found by simulation: docs/scaling.md has the coverage over designs and noise.
    """
    count = len(residuals)
    if count <= free + 2:
        return 1.0
    inside = max(0.0, (np.sum(np.abs(residuals) <= delta) - free) / (count - free))
    # Student's 95 % quantile over the normal one, to first order in 1/(n - p) (Fisher's expansion).
    student = 1.0 + (1.645**2 + 1.0) / (4.0 * (count - free))
    small_sample = (count / (count - free) * student) ** 2
    return float(1.0 - 0.5 * free / count + inside**2 * (small_sample - 1.0))


def _weights(count: int, groups: NDArray[np.generic] | None, draws: int, variance: float, seed: int) -> Array:
    """Random weights of mean 1 for each replicate and point: the Bayesian bootstrap, which never loses a size."""
    rng = np.random.default_rng(seed)
    if groups is None:
        return rng.gamma(1.0 / variance, variance, size=(draws, count))
    names, member = np.unique(groups, return_inverse=True)
    return rng.gamma(1.0 / variance, variance, size=(draws, len(names)))[:, member]


def _rows(model: SumModel | RepetitionModel, theta: Array) -> Array:
    """Rows of laws.COLUMNS."""
    full = model.full(theta)
    if full.shape[1] == 5:
        full = np.concatenate([full, np.full((len(full), 2), np.inf)], axis=1)
    for used, scale in ((model.form.uses_params, 0), (model.form.uses_tokens, 1)):
        if not used:
            full[:, scale], full[:, 3 + scale] = -np.inf, np.nan
    return full
