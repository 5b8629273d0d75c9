"""Where descents begin: the grid of Hoffmann et al. 2022 and, for each pair of exponents, the best E, A and B.

Given alpha and beta the law is linear in E, A and B, so a grid over two exponents covers five dimensions; the original
grid of 4,500 starts is ranked by its objective and the best few kept. Fits from one start settle in wrong valleys, so
the answer is the lowest of them all, whatever the order of rows or the seed.
"""

import itertools

import numpy as np

from pretrain.scaling.forms import Points
from pretrain.scaling.huber import Array

EXPONENTS = (0.03, 0.08, 0.15, 0.22, 0.3, 0.38, 0.46, 0.56, 0.7, 0.9, 1.3, 1.9)


def hoffmann_grid() -> Array:
    """Rows of log_A, log_B, log_E, alpha, beta: 6 x 6 x 5 x 5 x 5 of them, appendix D.3 of arXiv:2203.15556."""
    scale, level, exponent = range(0, 26, 5), (-1.0, -0.5, 0.0, 0.5, 1.0), (0.0, 0.5, 1.0, 1.5, 2.0)
    return np.array(list(itertools.product(scale, scale, level, exponent, exponent)), dtype=np.float64)


def profile_grid(points: Points, *, use_params: bool, use_tokens: bool) -> Array:
    """Rows of log_A, log_B, log_E, alpha, beta: least squares of relative error at every pair of EXPONENTS."""
    x, y = np.log(points.params), np.log(points.tokens)
    cx, cy = x.mean(), y.mean()
    alphas = EXPONENTS if use_params else (0.0,)
    betas = EXPONENTS if use_tokens else (0.0,)
    rows = []
    for alpha, beta in itertools.product(alphas, betas):
        columns = [np.ones_like(x)]
        columns += [np.exp(-alpha * (x - cx))] if use_params else []
        columns += [np.exp(-beta * (y - cy))] if use_tokens else []
        design = np.stack(columns, axis=1) / points.loss[:, None]
        scale = np.linalg.norm(design, axis=0)
        solution = np.linalg.lstsq(design / scale, np.ones_like(x), rcond=1e-10)[0] / scale
        smallest = 1e-3 * points.loss.min() / np.abs(design * points.loss[:, None]).max(axis=0)
        logs = np.log(np.maximum(solution, smallest))
        a = logs[1] + alpha * cx if use_params else 0.0
        b = logs[-1] + beta * cy if use_tokens else 0.0
        rows.append((a, b, logs[0], alpha, beta))
    return np.array(rows)
