"""The data-repetition form as a model for huber.py: log_A, log_B, log_E, alpha, beta, log RD, log RN.

Muennighoff et al. 2023 (arXiv:2305.16264): a token seen again is worth less each time, and parameters beyond those
that are compute-optimal for the unique tokens fade in the same way. The effective N' and D' depend on the
parameters themselves, so the lines of forms.py bend; slopes are analytic, second derivatives are differences of them.
"""

import numpy as np
from numpy.typing import NDArray

from pretrain.scaling.forms import Form, Points, softmax
from pretrain.scaling.huber import Array
from pretrain.scaling.laws import best_params_for, fade


class RepetitionModel:
    def __init__(self, form: Form, points: Points) -> None:
        self.form = form
        self.x, self.y = np.log(points.params), np.log(points.tokens)
        self.u = np.minimum(np.log(points.unique), self.y)
        self.center = np.array([self.x.mean(), self.y.mean()])

    def predict(self, theta: Array) -> Array:
        return self._shares(theta)[0]

    def evaluate(self, theta: Array) -> tuple[Array, Array]:
        prediction, shares, (enough, rn, rd, small) = self._shares(theta)
        alpha, beta = theta[:, 3, None], theta[:, 4, None]
        x, y = self._effective(enough, rn, rd)
        # log N' moves with log RN, and with `enough`, which moves with log_A, log_B, alpha and beta.
        by_enough, by_rn = _fade_slopes(self.x, enough, rn)
        _, by_rd = _fade_slopes(self.y, np.broadcast_to(self.u, y.shape), rd)
        by_enough = np.where(small, 0.0, by_enough)  # a model smaller than the optimum uses all it has
        safe_alpha, safe_beta = np.maximum(alpha, 1e-3), np.maximum(beta, 1e-3)
        best = self._best(theta)
        slopes = np.empty((*prediction.shape, 7))
        pull = -alpha * by_enough
        slopes[:, :, 0] = shares[0] * (1.0 + pull / safe_alpha)
        slopes[:, :, 1] = shares[1] - shares[0] * pull / safe_alpha
        slopes[:, :, 2] = shares[2]
        best_by_alpha = (self.center[0] + 1.0 / safe_alpha - best) / safe_alpha
        slopes[:, :, 3] = shares[0] * (self.center[0] - x + pull * best_by_alpha)
        best_by_beta = (self.u - self.center[1] - 1.0 / safe_beta) / safe_alpha
        slopes[:, :, 4] = shares[1] * (self.center[1] - y) + shares[0] * pull * best_by_beta
        slopes[:, :, 5] = -shares[1] * beta * by_rd
        slopes[:, :, 6] = -shares[0] * alpha * by_rn
        return prediction, slopes

    def curvature(self, theta: Array, weights: Array) -> Array:
        size, step = theta.shape[1], 1e-5
        out = np.empty((len(theta), size, size))
        for j in range(size):
            move = np.zeros(size)
            move[j] = step
            change = self.evaluate(theta + move)[1] - self.evaluate(theta - move)[1]
            out[:, j] = np.einsum("rn,rnp->rp", weights, change) / (2.0 * step)
        return 0.5 * (out + out.transpose(0, 2, 1))

    def full(self, theta: Array) -> Array:
        full = theta[:, :5].copy()
        full[:, 0] += full[:, 3] * self.center[0]
        full[:, 1] += full[:, 4] * self.center[1]
        return np.concatenate([full, np.exp(np.clip(theta[:, 5:], -50.0, 50.0))], axis=1)

    def own(self, full: Array) -> Array:
        """From full parameters [R, 5], or [R, 7] with RD and RN (15.4 and 5.3, the paper's, where absent)."""
        own = np.empty((len(full), 7))
        own[:, :5] = full[:, :5]
        own[:, 0] -= full[:, 3] * self.center[0]
        own[:, 1] -= full[:, 4] * self.center[1]
        own[:, 5:] = np.log(full[:, 5:]) if full.shape[1] == 7 else np.log([15.39, 5.31])
        return own

    def _best(self, theta: Array) -> Array:
        alpha, beta = theta[:, 3, None], theta[:, 4, None]
        a, b = theta[:, 0, None] + alpha * self.center[0], theta[:, 1, None] + beta * self.center[1]
        return best_params_for(a, b, alpha, beta, self.u)

    def _effective(self, enough: Array, rn: Array, rd: Array) -> tuple[Array, Array]:
        return fade(self.x, enough, rn), fade(self.y, self.u, rd)

    def _shares(self, theta: Array) -> tuple[Array, list[Array], tuple[Array, Array, Array, NDArray[np.bool_]]]:
        alpha, beta = theta[:, 3, None], theta[:, 4, None]
        rd, rn = (np.exp(np.clip(theta[:, k, None], -50.0, 50.0)) for k in (5, 6))
        best = self._best(theta)
        small = best >= self.x
        enough = np.minimum(best, self.x)
        x, y = self._effective(enough, rn, rd)
        logits = [
            theta[:, 0, None] + alpha * (self.center[0] - x),
            theta[:, 1, None] + beta * (self.center[1] - y),
            np.broadcast_to(theta[:, 2, None], x.shape),
        ]
        prediction, shares = softmax(logits)
        return prediction, shares, (enough, rn, rd, small)


def _fade_slopes(total: Array, fresh: Array, scale: Array) -> tuple[Array, Array]:
    """Derivatives of laws.fade by log fresh and by log scale."""
    repeats = np.exp(np.minimum(total - fresh, 100.0)) - 1.0
    left = np.exp(-repeats / scale)
    height = 1.0 + scale * (1.0 - left)
    by_scale = scale * (1.0 - left) - repeats * left
    return 1.0 - left * (repeats + 1.0) / height, by_scale / height
