"""Everything `pretrain scale fit` finds out about a table, as one JSON-ready dictionary (the layout of FIT.json).

Reads the columns, refuses what cannot be identified, fits, and adds the checks: outliers, noise from repeated seeds,
the largest runs left out, the forms compared on them, IsoFLOP minima, the next run. report.py puts it into words.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.errors import ConfigError
from pretrain.scaling import holdout, identify
from pretrain.scaling.columns import numbers, points_of, where
from pretrain.scaling.fit import LEVEL, Fit, fit_law, interval
from pretrain.scaling.forms import FORMS, Points
from pretrain.scaling.huber import Array
from pretrain.scaling.isoflop import isoflop
from pretrain.scaling.laws import COLUMNS
from pretrain.scaling.saved import plain_rows
from pretrain.scaling.table import Table

MANY = 15  # rows of a size that look like checkpoints and not like runs


@dataclass(frozen=True)
class Question:
    """The columns of the table and how to fit them."""

    params: str
    tokens: str
    loss: str
    unique: str | None = None  # different tokens seen, for the repetition form
    flops: str | None = None  # training FLOPs, to find IsoFLOP budgets; flops_factor * params * tokens where absent
    group: str | None = None  # rows of one run, resampled together
    where: str | None = None
    form: str = "chinchilla"  # or auto: the best on the largest runs
    units: dict[str, float] = field(default_factory=dict)
    flops_factor: float = 6.0
    bootstrap: int = 1000
    seed: int = 0
    checks: bool = True  # leave the largest runs out, compare forms


def study(table: Table, ask: Question) -> dict[str, Any]:
    chosen = table if ask.where is None else table.take(where(table, ask.where))
    if len(chosen) == 0:
        raise ConfigError(f"--where {ask.where!r} leaves no row of {table.path}")
    points = points_of(chosen, ask.params, ask.tokens, ask.loss, unique=ask.unique, units=ask.units)
    groups = None if ask.group is None else chosen.column(ask.group)
    names = ["chinchilla", "overtrained"] + (["repetition"] if ask.unique else [])
    name = ask.form
    if name != "auto" and name not in FORMS:
        raise ConfigError(f"--form {name!r} is unknown; the forms are auto, {', '.join(FORMS)}")
    if name == "repetition" and ask.unique is None:
        raise ConfigError("--form repetition needs --unique COL, the number of different tokens that each run saw")
    if name == "auto":
        # Runs along one line of sizes and lengths, or of one size, can still carry a form with one term.
        able = [other for other in ("chinchilla", "params", "tokens") if not identify.problem(points, FORMS[other])]
        name = "auto" if able[:1] in (["chinchilla"], []) else able[0]
    identify.check(points, FORMS["chinchilla" if name == "auto" else name])
    helds: dict[str, list[holdout.Held]] = {}
    scores: list[holdout.Score] = []
    if ask.checks or name == "auto":
        compared = names if name in (*names, "auto") else [name]
        compared = [other for other in compared if identify.problem(points, FORMS[other]) is None]
        helds = {
            other: holdout.rolling(points, FORMS[other], groups=groups, draws=0) for other in compared if other != name
        }
        if name == "auto":
            scores = holdout.compare_forms(helds)
            name = holdout.choose(scores).form if scores else "chinchilla"
        helds[name] = holdout.rolling(points, FORMS[name], groups=groups)
        scores = holdout.compare_forms(helds)
    fit = fit_law(points, name, bootstrap=ask.bootstrap, seed=ask.seed, groups=groups)
    _refuse_flat(fit)
    own = helds.get(name, [])
    widen = holdout.widening(own)
    content = _law_part(fit) | {
        "points_used": len(chosen),
        "points_dropped": len(table) - len(chosen),
        "interval_level": LEVEL,
        "table": table.path,
        "columns": {key: getattr(ask, key) for key in ("params", "tokens", "loss", "unique", "flops", "group")},
        "units": ask.units,
        "where": ask.where,
        "flops_factor": ask.flops_factor,
        "range": {
            "params": _range(points.params),
            "tokens": _range(points.tokens),
            "loss": _range(points.loss),
            "flops": _range(ask.flops_factor * points.params * points.tokens),
            "tokens_per_param": _range(points.tokens / points.params),
            "sizes": len(identify.distinct(points.params)),
        },
        "noise": _noise(fit),
        "outliers": _outliers(fit, chosen.lines),
        "leave_largest_out": _largest_out(own, widen, chosen.lines),
        "forms": [score._asdict() for score in scores],
        "rivals": [
            {"form": other, "law": plain_rows(fit_law(points, other, bootstrap=0).law.rows)[0]}
            for other in holdout.rivals(scores, name)
        ],
        "isoflop": _isoflop(chosen, ask, points),
        "next_run": identify.next_run(points, fit.form, fit.law, noise=max(fit.noise, 1e-4))._asdict(),
        "bootstrap": {"replicates": ask.bootstrap, "seed": ask.seed, "weight_variance": fit.stretch},
        "warnings": _warnings(fit, own, scores) + _checkpoints(points, ask),
        "law_columns": list(COLUMNS),
        "law": plain_rows(fit.law.rows)[0],
        "residuals": [float(f"{value:.6g}") for value in fit.residuals],
        "replicates": plain_rows(fit.replicates.rows),
    }
    return content


def _law_part(fit: Fit) -> dict[str, Any]:
    """Each parameter as {"value", "interval"}; null where the form lacks it."""

    def entry(values: Array, draws: Array) -> dict[str, Any] | None:
        if not np.isfinite(values[0]):
            return None
        return {"value": float(values[0]), "interval": interval(draws) if len(draws) else None}

    out: dict[str, Any] = {"form": fit.form.name, "formula": fit.form.formula, "source": fit.form.source}
    for name, key in (("E", "log_E"), ("A", "log_A"), ("B", "log_B")):
        present = np.isfinite(fit.law.column(key))[0]
        out[name] = entry(np.exp(fit.law.column(key)), np.exp(fit.replicates.column(key))) if present else None
    for name in ("alpha", "beta", "RD", "RN"):
        out[name] = entry(fit.law.column(name), fit.replicates.column(name))
    exponent, drawn = fit.law.optimal_exponent, fit.replicates.optimal_exponent
    out["optimal_exponent"] = entry(exponent, drawn)
    out["optimal_exponent_tokens"] = entry(1.0 - exponent, 1.0 - drawn)
    out["objective"] = fit.objective
    out["starts_agreeing"] = fit.reached
    return out


def _refuse_flat(fit: Fit) -> None:
    for name, what in (("alpha", "params"), ("beta", "tokens")):
        value = fit.law.column(name)[0]
        if value <= 0:
            raise ConfigError(
                f"{name} came out at {value:.3g}: over these points the loss does not fall with {what}; "
                f"look for runs that are unfinished, mislabelled or trained at a bad learning rate"
            )


def _range(values: Array) -> list[float]:
    return [float(values.min()), float(values.max())]


def _noise(fit: Fit) -> dict[str, Any]:
    repeats = holdout.noise_floor(fit.points)
    return {
        "about_law": fit.noise,
        "between_seeds": None if repeats is None else repeats[0],
        "between_seeds_freedom": 0 if repeats is None else repeats[1],
    }


def _outliers(fit: Fit, lines: NDArray[np.int64]) -> list[dict[str, Any]]:
    found = np.flatnonzero(fit.outliers)
    found = found[np.argsort(-np.abs(fit.deviations[found]), kind="stable")]
    return [
        {
            "line": int(lines[fit.order[i]]),
            "params": float(fit.points.params[i]),
            "tokens": float(fit.points.tokens[i]),
            "loss": float(fit.points.loss[i]),
            "predicted": float(fit.points.loss[i] / np.exp(fit.residuals[i])),
            "deviations": float(fit.deviations[i]),
        }
        for i in found
    ]


def _largest_out(helds: list[holdout.Held], widen: float, lines: NDArray[np.int64]) -> dict[str, Any]:
    """`runs` are those of the last split, the largest tenth."""
    last = helds[-1] if helds else None
    return {
        "widening": widen,
        "runs": []
        if last is None
        else [
            {"line": int(lines[i]), "predicted": float(mid), "interval": [float(low), float(high)]}
            for i, mid, low, high in zip(last.places, last.predicted, last.low, last.high, strict=True)
        ],
        "splits": [
            {
                "fitted": held.fitted,
                "predicted": len(held.places),
                "mean_error": float(np.mean(held.error)),
                "rms_error": held.rms,
                "worst_error": float(held.error[np.argmax(np.abs(held.error))]),
                "inside_interval": float(np.mean(held.covered)),
            }
            for held in helds
        ],
    }


def _isoflop(table: Table, ask: Question, points: Points) -> dict[str, Any] | None:
    flops = numbers(table, ask.flops) if ask.flops else ask.flops_factor * points.params * points.tokens
    if not np.all(np.isfinite(flops) & (flops > 0)):
        raise ConfigError(f"{table.path}: column {ask.flops!r} (flops) has values that are no positive number")
    found = isoflop(points, flops)
    if found is None:
        return None
    return {
        "exponent": None
        if found.params is None
        else {"value": found.params.exponent, "interval": found.params.interval},
        "scale": None if found.params is None else found.params.scale,
        "budgets": [
            {
                "flops": valley.at,
                "params": valley.best,
                "interval": valley.interval,
                "loss": valley.loss,
                "curvature": valley.coefficients[2],
                "runs": len(curve.x),
                "note": valley.note,
            }
            for curve, valley in zip(found.curves, found.minima, strict=True)
        ],
    }


def _checkpoints(points: Points, ask: Question) -> list[str]:
    count, sizes = len(points.loss), len(identify.distinct(points.params))
    if ask.group is not None or count <= MANY * sizes:
        return []
    return [
        f"{count} rows of {sizes} sizes: where rows are checkpoints of one run, name its column with --group, or the "
        f"intervals are too narrow; and only checkpoints at a constant rate lie on a law of whole runs"
    ]


def _warnings(fit: Fit, helds: list[holdout.Held], scores: list[holdout.Score]) -> list[str]:
    found = []
    level = float(np.exp(fit.law.column("log_E")[0]) / fit.points.loss.min())
    if level < 0.01:
        found.append(f"E is {level:.2g} of the lowest loss: these points do not show where the loss levels off")
    for name in ("alpha", "beta"):
        value = fit.law.column(name)[0]
        span = interval(fit.replicates.column(name)) if len(fit.replicates.rows) else None
        if span is not None and np.isfinite(value) and span[1] - span[0] > value:
            found.append(f"{name} is poorly known: its interval [{span[0]:.3g}, {span[1]:.3g}] is wider than its value")
    if fit.reached < 0.5:
        found.append(f"only {fit.reached:.0%} of the best starts agree: the objective has several valleys")
    if not helds:
        found.append("the smaller runs alone cannot identify the law, so it could not be tested on the largest")
    elif (worst := helds[-1]).covered.mean() < 0.5:
        found.append(
            f"{1 - worst.covered.mean():.0%} of the largest runs fell outside their intervals; predictions are widened"
        )
    if len(scores) > 1 and (best := holdout.choose(scores)).form != fit.form.name:
        found.append(f"form {best.form!r} predicts the largest runs better; try --form {best.form}")
    return found
