"""Minimises a weighted sum of Huber losses for many starting points or bootstrap replicates at once.

Scaling laws are fitted with a Huber threshold (1e-3) far below the scatter of real losses (1e-2), so the objective
is nearly a sum of absolute values: first-order methods and BFGS crawl along its kinks and stop at places that depend
on where they began. Here every member of a batch takes damped Newton steps with the exact Hessian, measured in the
metric of the iteratively re-weighted least-squares matrix. At damping 0 that is Newton's method, which ends in finitely
many steps once the points inside the threshold are known; at large damping it is a short majorising step, which always
descends. It knows nothing of scaling laws (see forms.py) and draws no random numbers.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
CHUNK = 65_536  # residuals handled at once: temporaries of half a megabyte stay in the cache


class Model(Protocol):
    """A prediction for a batch of parameter vectors theta [R, p] at the same n points."""

    def evaluate(self, theta: Array) -> tuple[Array, Array]:
        """The prediction [R, n] and its slopes [R, n, p]."""
        ...

    def predict(self, theta: Array) -> Array:
        """The prediction [R, n] alone."""
        ...

    def curvature(self, theta: Array, weights: Array) -> Array:
        """Sum over points of weights [R, n] times the second derivatives of the prediction: [R, p, p]."""
        ...


class Minimum(NamedTuple):
    theta: Array  # [R, p]
    objective: Array  # [R]
    converged: NDArray[np.bool_]  # [R]
    steps: int  # of the slowest member


def huber_sum(residual: Array, weights: Array, delta: float) -> Array:
    size = np.abs(residual)
    inside = np.minimum(size, delta)
    return np.einsum("rn,rn->r", np.broadcast_to(weights, residual.shape), inside * (size - 0.5 * inside))


def objective(model: Model, theta: Array, target: Array, weights: Array, delta: float) -> Array:
    """The objective alone, for ranking many starts; target and weights [R, n] or [1, n]."""
    out = np.empty(len(theta))
    shape = (len(theta), target.shape[1])
    target, weights = np.broadcast_to(target, shape), np.broadcast_to(weights, shape)
    for part in _chunks(*shape):
        out[part] = huber_sum(model.predict(theta[part]) - target[part], weights[part], delta)
    return out


def minimise(
    model: Model,
    theta: Array,
    target: Array,
    weights: Array,
    delta: float,
    *,
    max_steps: int = 500,
    tolerance: float = 1e-12,
) -> Minimum:
    """Descends from every row of theta [R, p]; target and weights are [R, n], or [1, n] for all.

    A member has converged when a full Newton step promises less than `tolerance` of its objective, or when no step
    of any length lowers it further.
    """
    shape = (len(theta), target.shape[1])
    target, weights = np.broadcast_to(target, shape), np.broadcast_to(weights, shape)
    best, value = np.array(theta, dtype=np.float64), np.empty(len(theta))
    converged, slowest = np.zeros(len(theta), dtype=bool), 0
    for part in _chunks(*shape):
        goal = (model, target[part], weights[part], delta)
        best[part], value[part], converged[part], steps = _descend(*goal, best[part], max_steps, tolerance)
        slowest = max(slowest, steps)
    return Minimum(best, value, converged, slowest)


def _chunks(count: int, points: int) -> list[slice]:
    size = max(1, CHUNK // max(points, 1))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _descend(
    model: Model, target: Array, weights: Array, delta: float, theta: Array, max_steps: int, tolerance: float
) -> tuple[Array, Array, NDArray[np.bool_], int]:
    count, size = theta.shape
    theta = theta.copy()
    value = np.full(count, np.inf)
    converged = np.zeros(count, dtype=bool)
    damping = np.ones(count)
    live = np.arange(count)
    gradient, basis, curve = np.empty((count, size)), np.empty((count, size, size)), np.empty((count, size))
    fresh = np.ones(count, dtype=bool)  # members whose derivatives are out of date
    floor = tolerance * delta * delta * weights.sum(axis=1)
    step_number = 0
    while live.size and step_number < max_steps:
        step_number += 1
        renew = live[fresh[live]]
        if renew.size:
            goal = (model, target[renew], weights[renew], delta)
            value[renew], gradient[renew], hessian, metric = _derivatives(*goal, theta[renew])
            basis[renew], curve[renew] = _principal_axes(hessian, metric)
            fresh[renew] = False
        slope = np.einsum("rij,ri->rj", basis[live], gradient[live])
        stiffness = np.maximum(np.abs(curve[live]), 1e-9) + damping[live, None]
        move = -slope / stiffness
        promised = -np.einsum("rj,rj->r", slope, move) - 0.5 * np.einsum("rj,rj->r", np.abs(curve[live]), move**2)
        trial = theta[live] + np.clip(np.einsum("rij,rj->ri", basis[live], move), -2.0, 2.0)
        tried = huber_sum(model.predict(trial) - target[live], weights[live], delta)
        gained = value[live] - tried
        better = gained > 0.0
        theta[live[better]] = trial[better]
        fresh[live[better]] = True
        ratio = gained / np.maximum(promised, 1e-300)
        shrink = np.where(ratio > 0.7, 0.1, np.where(ratio > 0.2, 0.5, 2.0))
        worse = np.where(ratio > 0.0, 2.0, 6.0)
        damping[live] = np.maximum(damping[live] * np.where(better, shrink, worse), 1e-12)
        small = promised <= tolerance * np.abs(value[live]) + floor[live]
        done = (small & (damping[live] <= 1e-3)) | (~better & (damping[live] > 1e8)) | (value[live] <= floor[live])
        value[live[better]] = tried[better]
        converged[live[done]] = True
        live = live[~done]
    return theta, value, converged, step_number


def _derivatives(
    model: Model, target: Array, weights: Array, delta: float, theta: Array
) -> tuple[Array, Array, Array, Array]:
    """Objective [R], gradient [R, p], exact Hessian [R, p, p] and the re-weighted least-squares matrix [R, p, p]."""
    prediction, slopes = model.evaluate(theta)
    residual = prediction - target
    size = np.abs(residual)
    pull = weights * np.clip(residual, -delta, delta)
    inside = weights * (size <= delta)
    reweighted = weights * np.minimum(1.0, delta / np.maximum(size, 1e-300))
    transposed = slopes.transpose(0, 2, 1)
    gradient = np.matmul(transposed, pull[:, :, None])[:, :, 0]
    newton = np.matmul(transposed, inside[:, :, None] * slopes) + model.curvature(theta, pull)
    metric = np.matmul(transposed, reweighted[:, :, None] * slopes)
    return huber_sum(residual, weights, delta), gradient, newton, metric


def _principal_axes(hessian: Array, metric: Array) -> tuple[Array, Array]:
    """Directions [R, p, p] (columns) of unit length in `metric`, along which the Hessian is diagonal: [R, p]."""
    scale = np.sqrt(np.maximum(np.einsum("rii->ri", metric), 1e-300))
    unit = metric / (scale[:, :, None] * scale[:, None, :])
    unit += 1e-11 * np.eye(metric.shape[1])
    spread, axes = np.linalg.eigh(unit)
    whiten = axes / np.sqrt(np.maximum(spread, 1e-11))[:, None, :] / scale[:, :, None]
    inner = np.matmul(whiten.transpose(0, 2, 1), np.matmul(hessian, whiten))
    curve, turn = np.linalg.eigh(0.5 * (inner + inner.transpose(0, 2, 1)))
    return np.matmul(whiten, turn), curve
