"""How well would the law have predicted the largest runs? Fits on the smaller ones, asks about the rest.

Three uses of one question: the check printed with every fit, the choice between forms, and the factor by which
prediction intervals are widened where the law missed by more than its own intervals said. Points are ranked by
compute, N times D; equal runs fall on one side.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.scaling.fit import LEVEL, fit_law, interval
from pretrain.scaling.forms import FORMS, Form, Points
from pretrain.scaling.huber import Array
from pretrain.scaling.identify import problem
from pretrain.scaling.laws import Laws

KEPT = (0.4, 0.6, 0.7, 0.8, 0.9)  # shares of the points, smallest compute first, that the splits fit on
DRAWS = 100
RIVAL = 1.5  # times a form's error on the largest runs, within which another form is taken for as likely


class Held(NamedTuple):
    """Predictions for held-out runs; `places` are theirs in the points, `error` log measured - log predicted."""

    kept: float  # share of the points fitted on
    fitted: int
    places: NDArray[np.intp]
    predicted: Array
    low: Array  # of the 90 % interval for a measured run; nan without bootstrap
    high: Array
    error: Array

    @property
    def covered(self) -> NDArray[np.bool_]:
        measured = self.predicted * np.exp(self.error)
        return (self.low <= measured) & (measured <= self.high)

    @property
    def rms(self) -> float:
        return float(np.sqrt(np.mean(self.error**2)))


class Score(NamedTuple):
    form: str
    rms: float  # of log error on the largest runs, each split counted alike
    free: int  # parameters


def split(points: Points, kept: float) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The smallest `kept` of the points by compute, and the rest."""
    compute = np.log(points.params) + np.log(points.tokens)
    order = np.argsort(compute, kind="stable")
    cut = min(max(1, round(kept * len(order))), len(order) - 1)
    small = compute < compute[order[cut]] - 1e-3
    return np.flatnonzero(small), np.flatnonzero(~small)


def rolling(points: Points, form: Form, *, groups: NDArray[np.generic] | None = None, draws: int = DRAWS) -> list[Held]:
    """One Held for each different split of KEPT whose smaller runs can identify the form by themselves."""
    found: list[Held] = []
    for kept in KEPT:
        small, large = split(points, kept)
        if len(small) == 0 or problem(points.take(small), form) is not None:
            continue
        if found and found[-1].fitted == len(small):  # equal runs stay together, so two shares may cut alike
            continue
        own = None if groups is None else groups[small]
        fit = fit_law(points.take(small), form.name, bootstrap=draws, groups=own)
        asked = points.take(large)
        unique = asked.unique if form.repetition else None
        predicted = fit.law.loss(asked.params, asked.tokens, unique)[0]
        low = high = np.full(len(large), np.nan)
        if draws:
            drawn = run_draws(
                fit.replicates,
                fit.residuals,
                len(form.free),
                asked.params,
                asked.tokens,
                unique,
                at=predicted,
            )
            low, high = np.array([interval(column) or (np.nan, np.nan) for column in drawn.T]).T
        error = np.log(asked.loss) - np.log(predicted)
        found.append(Held(kept, len(small), large, predicted, low, high, error))
    return found


def run_draws(
    replicates: Laws,
    residuals: Array,
    free: int,
    params: Array,
    tokens: Array,
    unique: Array | None,
    *,
    at: Array,
    widen: float = 1.0,
    seed: int = 1,
) -> Array:
    """Draws [R, m] of what runs would measure: the replicates' losses times the scatter of the fitted runs.

    `widen` stretches their logarithms about the estimate's own prediction `at` [m].
    """
    loss = replicates.loss(params, tokens, unique)
    rng = np.random.default_rng(seed)
    scale = np.sqrt(len(residuals) / max(len(residuals) - free, 1))
    scatter = scale * rng.choice(np.sort(residuals), size=loss.shape)
    return np.asarray(at * np.exp(widen * (np.log(loss) - np.log(at) + scatter)))


def compare_forms(helds: dict[str, list[Held]]) -> list[Score]:
    """Forms by their error on the largest runs, best first; only splits that all of them could be fitted on count."""
    common = set.intersection(*({held.fitted for held in own} for own in helds.values())) if helds else set()
    if not common:
        return []
    scores = [
        Score(
            name,
            float(np.sqrt(np.mean([held.rms**2 for held in own if held.fitted in common]))),
            len(FORMS[name].free),
        )
        for name, own in helds.items()
    ]
    return sorted(scores, key=lambda score: (score.rms, score.free))


def choose(scores: list[Score]) -> Score:
    """The form with the fewest parameters among those within 5 % of the lowest error."""
    limit = 1.05 * scores[0].rms + 1e-6
    return min((score for score in scores if score.rms <= limit), key=lambda score: (score.free, score.rms))


def rivals(scores: list[Score], form: str) -> list[str]:
    """Forms that predicted the largest runs nearly as well as `form` or better: these runs cannot refute them."""
    own = next((score.rms for score in scores if score.form == form), 0.0)
    return [score.form for score in scores if score.form != form and score.rms <= RIVAL * own]


def widening(helds: list[Held]) -> float:
    """Factor, at least 1, by which intervals would have had to be wider to hold 90 % of the held-out runs.

    For each split the 90 % quantile of error over the side of the interval it lies on, and of all splits the worst: the
    runs to be predicted lie further out than any held-out one. Under a true law that costs a fifth of the width
    (mean factor 1.3, coverage 0.95 instead of 0.92); where the law bends it is what keeps the interval honest.
    """
    factors = []
    for held in helds:
        up, down = np.log(held.high) - np.log(held.predicted), np.log(held.predicted) - np.log(held.low)
        side = np.maximum(np.where(held.error > 0, up, down), 1e-6)
        usable = np.isfinite(side)
        if usable.any():
            factors.append(float(np.quantile(np.abs(held.error[usable]) / side[usable], LEVEL)))
    return max([1.0, *factors])


def noise_floor(points: Points) -> tuple[float, int] | None:
    """Standard deviation of log-loss between runs that differ in the seed alone, and the freedom it rests on."""
    columns = (points.params, points.tokens, points.unique)
    keys = np.stack([np.round(np.log(column) / 1e-6) for column in columns], axis=1)
    member = np.unique(keys, axis=0, return_inverse=True)[1].ravel()
    logs, sizes = np.log(points.loss), np.bincount(member)
    means = np.bincount(member, weights=logs) / sizes
    freedom = int(np.sum(sizes - 1))
    if freedom == 0:
        return None
    return float(np.sqrt(np.sum((logs - means[member]) ** 2) / freedom)), freedom
