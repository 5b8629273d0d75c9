"""IsoFLOP curves: loss against size at one budget, the minimum of each, and how the best size grows with compute.

Approach 2 of Hoffmann et al. 2022. A parabola is only a local picture of the valley, so its exponent is biased when a
budget's sizes are not centred on the optimum; it is a check on the parametric fit, not a replacement.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.errors import ConfigError
from pretrain.scaling.forms import Points
from pretrain.scaling.huber import Array
from pretrain.scaling.valley import Curve, Power, Valley, power_law, valleys

WIDTH = 0.05  # runs within this much of each other's log FLOPs share a budget
LEAST = 4  # different sizes of a budget


class IsoFlop(NamedTuple):
    curves: list[Curve]  # at = FLOPs of the budget, x = params
    minima: list[Valley]
    params: Power | None  # best params = scale * FLOPs^exponent


def isoflop(points: Points, flops: Array) -> IsoFlop | None:
    """None when fewer than two budgets hold enough sizes. `flops` [n] of each run, by one convention."""
    curves = [
        Curve(
            float(np.exp(np.log(flops[chosen]).mean())),
            points.params[chosen],
            points.loss[chosen],
            np.log(flops[chosen]),
        )
        for chosen in _budgets(points, flops)
    ]
    if len(curves) < 2:
        return None
    minima = valleys(curves)
    try:
        params = power_law(minima)
    except ConfigError:
        params = None
    return IsoFlop(curves, minima, params)


def _budgets(points: Points, flops: Array) -> list[NDArray[np.intp]]:
    """Indices of each budget, smallest first: the fullest window of FLOPs, then the fullest of what is left."""
    log = np.log(flops)
    free = np.ones(len(log), dtype=bool)
    found = []
    while free.any():
        members = [np.flatnonzero(free & (np.abs(log - center) <= WIDTH)) for center in log[free]]
        best = max(members, key=len)
        if len(best) < LEAST:
            break
        free[best] = False
        sizes = np.unique(np.round(np.log(points.params[best]), 2))
        if len(sizes) >= LEAST and np.ptp(sizes) > np.log(2.0):
            found.append(best)
    return sorted(found, key=lambda chosen: float(log[chosen].mean()))
