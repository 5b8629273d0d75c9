"""How learning rate and batch should grow: minima of sweeps with a power law, and the critical batch from noise.

A sweep has several values of one setting at each size (or length); a parabola in its logarithm gives each minimum. The
gradient noise scale, tr(Sigma) / |G|^2, estimates the batch beyond which more rows save few steps (McCandlish et al.
2018, arXiv:1812.06162). It grows as the loss falls, so its power law is in tokens or in loss, by the column given.
The result is a rule that pretrain.scaling.shapes.PowerRule reads.
"""

from typing import Any

import numpy as np

from pretrain.errors import ConfigError
from pretrain.scaling.columns import numbers, where
from pretrain.scaling.fit import interval
from pretrain.scaling.table import Table
from pretrain.scaling.valley import Curve, Power, power_law, valleys


def sweep(table: Table, *, over: str, by: str, loss: str, expression: str | None = None) -> dict[str, Any]:
    """The best `over` at each value of `by`, and best = scale x by^exponent."""
    chosen = table if expression is None else table.take(where(table, expression))
    values, places, losses = (_positive(chosen, name) for name in (over, by, loss))
    curves = [
        Curve(float(at), values[mine], losses[mine])
        for at in np.unique(places)
        if len(np.unique(values[mine := places == at])) >= 3
    ]
    if not curves:
        raise ConfigError(f"{table.path}: no value of {by!r} has 3 different values of {over!r}, which a minimum needs")
    minima = valleys(curves)
    out: dict[str, Any] = {
        "over": over,
        "by": by,
        "minima": [
            {by: one.at, "best": one.best, "interval": one.interval, "loss": one.loss, "note": one.note}
            for one in minima
        ],
        "rule": None,
    }
    if len(minima) > 1:
        out["rule"] = _rule(power_law(minima))
    return out


def critical_batch(table: Table, *, by: str, column: str = "grad_noise_scale", draws: int = 1000) -> dict[str, Any]:
    """Noise scale = scale x by^exponent over rows where it was measured; intervals by resampling rows."""
    noise, at = numbers(table, column), numbers(table, by)
    seen = np.isfinite(noise) & (noise > 0) & np.isfinite(at) & (at > 0)
    x, y = np.log(at[seen]), np.log(noise[seen])
    if len(np.unique(np.round(x, 3))) < 2:
        raise ConfigError(
            f"{table.path}: {column!r} was measured at {len(np.unique(x))} values of {by!r}; a power law needs 2"
        )
    design = np.stack([np.ones_like(x), x], axis=1)
    best = np.linalg.lstsq(design, y, rcond=None)[0]
    weights = np.random.default_rng(0).exponential(size=(draws, len(x)))
    left = np.einsum("rn,ni,nj->rij", weights, design, design)
    right = np.einsum("rn,ni,n->ri", weights, design, y)
    drawn = np.linalg.solve(left, right[:, :, None])[:, :, 0]
    power = Power(float(np.exp(best[0])), float(best[1]), interval(drawn[:, 1]) if len(x) > 2 else None, drawn)
    return {"over": column, "by": by, "points": int(seen.sum()), "rule": _rule(power)}


def rule_at(rule: dict[str, Any], at: float) -> float:
    return float(rule["scale"] * at ** rule["exponent"])


def _rule(power: Power) -> dict[str, Any]:
    return {"scale": power.scale, "exponent": power.exponent, "interval": power.interval}


def _positive(table: Table, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = numbers(table, name)
    bad = ~(np.isfinite(values) & (values > 0))
    if bad.any():
        raise ConfigError(f"{table.path} line {table.lines[bad][0]}: column {name!r} is no positive number")
    return values
