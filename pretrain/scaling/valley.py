"""Minima of parabolas with intervals, and power laws through them: for IsoFLOP curves and hyper-parameter sweeps.

Each curve is loss against the logarithm of something (size at one budget, learning rate at one size). The scatter
about the parabolas is pooled over all curves, since five points tell little about their own noise, and drawn anew to
give every minimum its interval; the power law through the minima carries those and its own scatter.
"""

from typing import NamedTuple

import numpy as np

from pretrain.errors import ConfigError
from pretrain.scaling.fit import interval
from pretrain.scaling.huber import Array

DRAWS = 1000


class Curve(NamedTuple):
    at: float  # what the curve is at: FLOPs of the budget, or params of the size
    x: Array  # positions, not logarithms
    y: Array  # losses
    drift: Array | None = None  # a nuisance that moves y in a straight line, such as log FLOPs within a budget


class Valley(NamedTuple):
    at: float
    best: float  # position of the minimum
    loss: float
    interval: tuple[float, float] | None
    draws: Array  # [R] of log best
    note: str  # empty, or why the minimum is not to be trusted
    coefficients: tuple[float, float, float]  # of log x - log best: loss, 0 and curvature, for plots


class Power(NamedTuple):
    """best = scale * at^exponent."""

    scale: float
    exponent: float
    interval: tuple[float, float] | None
    draws: Array  # [R, 2] of log scale and exponent

    def __call__(self, at: float) -> tuple[float, tuple[float, float] | None]:
        span = interval(self.draws[:, 0] + self.draws[:, 1] * np.log(at)) if len(self.draws) else None
        return self.scale * at**self.exponent, None if span is None else (
            float(np.exp(span[0])),
            float(np.exp(span[1])),
        )


def valleys(curves: list[Curve], *, draws: int = DRAWS, seed: int = 0) -> list[Valley]:
    """One parabola in log x for each curve of at least 3 different positions; others are left out."""
    curves = [curve for curve in curves if len(np.unique(curve.x)) >= 3]
    designs = [_design(curve) for curve in curves]
    solved = [np.linalg.lstsq(design, curve.y, rcond=None)[0] for design, curve in zip(designs, curves, strict=True)]
    squares = sum(
        float(np.sum((curve.y - design @ c) ** 2)) for curve, design, c in zip(curves, designs, solved, strict=True)
    )
    freedom = sum(max(0, len(curve.y) - design.shape[1]) for curve, design in zip(curves, designs, strict=True))
    noise = float(np.sqrt(squares / freedom)) if freedom else 0.0
    rng = np.random.default_rng(seed)
    return [
        _valley(curve, design, np.asarray(c, dtype=np.float64), noise, bool(freedom), draws, rng)
        for curve, design, c in zip(curves, designs, solved, strict=True)
    ]


def power_law(minima: list[Valley]) -> Power:
    """Least squares of log best on log at, over the minima without a note."""
    good = [valley for valley in minima if not valley.note]
    if len({round(np.log(valley.at), 3) for valley in good}) < 2:
        raise ConfigError(
            f"a power law needs minima at 2 different places at least, and {len(good)} of {len(minima)} curves have a "
            f"minimum inside their range; widen the sweeps"
        )
    x = np.log([valley.at for valley in good])
    y = np.log([valley.best for valley in good])
    design = np.stack([np.ones_like(x), x], axis=1)
    solve = np.linalg.pinv(design)
    scale, exponent = solve @ y
    scatter = y - design @ (scale, exponent)
    count = len(good)
    if any(len(valley.draws) == 0 for valley in good):
        return Power(float(np.exp(scale)), float(exponent), None, np.empty((0, 2)))
    drawn = np.stack([valley.draws for valley in good], axis=1)
    explained = float(np.mean(np.nanvar(drawn, axis=0)))
    beyond = max(0.0, float(scatter @ scatter) / (count - 2) - explained) if count > 2 else 0.0
    rng = np.random.default_rng(count)
    drawn = np.where(np.isfinite(drawn), drawn, y) + np.sqrt(beyond) * rng.standard_normal(drawn.shape)
    rows = drawn @ solve.T
    return Power(float(np.exp(scale)), float(exponent), interval(rows[:, 1]), rows)


def _design(curve: Curve) -> Array:
    x = np.log(curve.x) - np.log(curve.x).mean()
    columns = [np.ones_like(x), x, x * x]
    if curve.drift is not None and np.ptp(curve.drift) > 1e-4 and len(x) > 4:
        columns.append(curve.drift - curve.drift.mean())
    return np.stack(columns, axis=1)


def _valley(
    curve: Curve, design: Array, c: Array, noise: float, known: bool, draws: int, rng: np.random.Generator
) -> Valley:
    center = float(np.log(curve.x).mean())
    note, inner = "", 0.0
    if c[2] <= 0:
        note = "the curve has no minimum (it bends down)"
        inner = float(np.log(curve.x[np.argmin(curve.y)])) - center
    else:
        inner = float(-c[1] / (2 * c[2]))
        low, high = np.log(curve.x.min()) - center, np.log(curve.x.max()) - center
        if not low <= inner <= high:
            note = f"the minimum lies outside the {len(curve.x)} points of the curve"
    level = float(c[0] + c[1] * inner + c[2] * inner**2)
    drawn = np.empty(0)
    if known:
        rows = c + noise * rng.standard_normal((draws, len(curve.y))) @ np.linalg.pinv(design).T
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = np.where(rows[:, 2] > 0, center - rows[:, 1] / (2 * rows[:, 2]), np.nan)
    span = interval(drawn) if len(drawn) else None
    wide = (
        None
        if span is None
        else (float(np.exp(np.clip(span[0], -600, 600))), float(np.exp(np.clip(span[1], -600, 600))))
    )
    return Valley(curve.at, float(np.exp(center + inner)), level, wide, drawn, note, (level, 0.0, float(c[2])))
