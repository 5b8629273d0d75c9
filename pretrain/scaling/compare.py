"""A saved law held against measured runs that it was not fitted on: predicted, measured, inside the interval or not."""

from typing import Any

import numpy as np

from pretrain.errors import ConfigError
from pretrain.scaling.columns import points_of, where
from pretrain.scaling.predict import predicted_loss
from pretrain.scaling.saved import SavedFit
from pretrain.scaling.table import Table


def compare(fit: SavedFit, table: Table, expression: str | None = None) -> dict[str, Any]:
    """Every chosen run with its prediction, and the errors in sum; by default the runs that the fit's --where left out.

    Columns and units are those of the fit. Errors are measured over predicted, less 1.
    """
    asked, fitted = fit.content["columns"], fit.content["where"]
    if expression is not None:
        keep = where(table, expression)
    elif fitted is not None:
        keep = ~where(table, fitted)
    else:
        raise ConfigError(f"{fit.path} was fitted on all rows; say with --where which runs of {table.path} to predict")
    chosen = table.take(keep)
    if len(chosen) == 0:
        raise ConfigError(f"{table.path}: no run is left to predict; choose some with --where")
    roles = ("params", "tokens", "loss")
    points = points_of(chosen, *(asked[role] for role in roles), unique=asked["unique"], units=fit.content["units"])
    runs = []
    for line, n, d, loss, u in zip(chosen.lines, *points, strict=True):
        answer = predicted_loss(fit, float(n), float(d), float(u) if fit.form.repetition else None)
        span = answer["interval"]
        runs.append(
            {"line": int(line), "params": float(n), "tokens": float(d), "measured": float(loss)}
            | {"predicted": answer["loss"], "interval": span, "error": float(loss) / answer["loss"] - 1.0}
            | {"inside": None if span is None else bool(span[0] <= loss <= span[1])}
        )
    errors = np.array([run["error"] for run in runs])
    return {
        "runs": runs,
        "mean_error": float(errors.mean()),
        "median_absolute_error": float(np.median(np.abs(errors))),
        "rms_error": float(np.sqrt(np.mean(errors**2))),
        "inside_interval": None if runs[0]["inside"] is None else float(np.mean([run["inside"] for run in runs])),
        "times_largest_flops": float((points.params * points.tokens).max())
        * fit.flops_factor
        / fit.content["range"]["flops"][1],
    }
