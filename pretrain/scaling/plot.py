"""Pictures of a saved law beside the runs it was fitted on: PNG, SVG, and one page that needs no other file.

Draws with matplotlib's figure objects, not pyplot, so nothing global is set. page.py makes the HTML.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from pretrain.scaling.columns import numbers, points_of, where
from pretrain.scaling.fit import interval
from pretrain.scaling.forms import Points
from pretrain.scaling.huber import Array
from pretrain.scaling.identify import distinct
from pretrain.scaling.isoflop import isoflop
from pretrain.scaling.page import write_page
from pretrain.scaling.saved import SavedFit
from pretrain.scaling.table import Table

_STYLE = {
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "pretrain",
    "figure.dpi": 100,
}
_RED, _BLUE, _GREY = "#c2410c", "#1d4ed8", "#6b7280"
_AHEAD = 30.0  # times the largest run's compute that curves go on for


class Drawing:
    """The rows that were fitted, in the table's own order, and what the law says of each."""

    def __init__(self, fit: SavedFit, table: Table) -> None:
        content = fit.content
        columns = content["columns"]
        chosen = table if content["where"] is None else table.take(where(table, content["where"]))
        self.fit, self.lines = fit, chosen.lines
        self.points: Points = points_of(
            chosen,
            columns["params"],
            columns["tokens"],
            columns["loss"],
            unique=columns["unique"],
            units=content["units"],
        )
        self.flops = fit.flops_factor * self.points.params * self.points.tokens
        budget = columns["flops"]
        self.budgets = numbers(chosen, budget) if budget else self.flops
        unique = self.points.unique if fit.form.repetition else None
        self.predicted = fit.law.loss(self.points.params, self.points.tokens, unique)[0]
        self.outliers = np.isin(self.lines, [point["line"] for point in content["outliers"]])
        self.norm = LogNorm(self.points.params.min() * 0.9, self.points.params.max() * 1.1)


def plot_fit(fit: SavedFit, table: Table, out: str | Path) -> list[Path]:
    """Writes NAME.png and NAME.svg for each picture that the form allows, and index.html; returns the paths."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    drawing = Drawing(fit, table)
    both = fit.form.uses_params and fit.form.uses_tokens
    pictures: list[tuple[str, str, Callable[[Drawing], Figure | None]]] = [
        ("loss_against_compute", "Loss against compute", _compute if both else _skip),
        ("isoflop", "IsoFLOP curves", _isoflop if both else _skip),
        ("optimum", "Compute-optimal size and tokens", _optimum if both else _skip),
        ("predicted_against_measured", "Predicted against measured", _predicted),
        ("residuals", "Residuals", _residuals),
    ]
    written, shown = [], []
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        for name, title, draw in pictures:
            figure = draw(drawing)
            if figure is None:
                continue
            for suffix, extra in ((".png", {"dpi": 150}), (".svg", {"metadata": {"Date": None}})):
                figure.savefig(folder / (name + suffix), bbox_inches="tight", **extra)  # type: ignore[arg-type]
                written.append(folder / (name + suffix))
            shown.append((title, (folder / (name + ".svg")).read_text(encoding="utf-8")))
    written.append(write_page(folder / "index.html", fit, shown))
    return written


def _skip(_: Drawing) -> Figure | None:
    return None


def _figure(title: str, x: str, y: str, size: tuple[float, float] = (7.2, 4.6)) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def _band(draws: Array) -> tuple[Array, Array]:
    """Edges of the 90 % interval of each column."""
    spans = [interval(column) or (np.nan, np.nan) for column in draws.T]
    low, high = np.array(spans).T
    return low, high


def _color(drawing: Drawing, size: float) -> tuple[float, float, float, float]:
    return matplotlib.colormaps["viridis_r"](0.08 + 0.92 * float(drawing.norm(size)))  # type: ignore[no-any-return]


def _scatter(drawing: Drawing, axes: Axes, x: Array, y: Array) -> None:
    colors = [_color(drawing, size) for size in drawing.points.params]
    axes.scatter(x, y, s=18, c=colors, linewidths=0.3, edgecolors="white", zorder=3)
    if drawing.outliers.any():
        axes.scatter(
            x[drawing.outliers],
            y[drawing.outliers],
            s=60,
            facecolors="none",
            edgecolors=_RED,
            zorder=4,
            label="outlier",
        )


def _sizes(drawing: Drawing, most: int = 8) -> Array:
    sizes = distinct(drawing.points.params)
    return sizes[np.unique(np.linspace(0, len(sizes) - 1, min(most, len(sizes))).round().astype(int))]


def _name(count: float) -> str:
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return f"{count:.3g}"


def _compute(drawing: Drawing) -> Figure:
    fit = drawing.fit
    figure, axes = _figure("Loss against training compute", f"FLOPs ({fit.flops_factor:g} N D)", "loss")
    grid = np.geomspace(drawing.flops.min() / 2, drawing.flops.max() * _AHEAD, 60)
    for size in _sizes(drawing):
        own = drawing.flops[np.abs(np.log(drawing.points.params / size)) < 0.02]
        span = np.geomspace(own.min() / 3, own.max() * 3, 60)
        tokens = span / (fit.flops_factor * size)
        axes.plot(
            span,
            fit.law.loss(size, tokens)[0],
            color=_color(drawing, size),
            lw=1,
            alpha=0.8,
            label=f"N = {_name(size)}",
        )
    best = np.array([fit.law.optimum(flops, factor=fit.flops_factor).loss[0] for flops in grid])
    axes.plot(grid, best, color="black", lw=1.6, label="best split")
    if len(fit.replicates.rows):
        some = fit.replicates[slice(0, 400)]
        drawn = np.stack([some.optimum(flops, factor=fit.flops_factor).loss for flops in grid], axis=1)
        axes.fill_between(grid, *_band(drawn), color="black", alpha=0.15, lw=0, label="90 % interval of the law")
    _scatter(drawing, axes, drawing.flops, drawing.points.loss)
    axes.axvspan(drawing.flops.max(), grid[-1], color=_BLUE, alpha=0.05, lw=0)
    axes.annotate(
        "beyond the runs",
        (drawing.flops.max() * 1.15, 0.97),
        xycoords=("data", "axes fraction"),
        va="top",
        color=_BLUE,
    )
    axes.set_xscale("log")
    axes.set_xlim(grid[0], grid[-1])
    top, bottom = drawing.points.loss.max(), min(drawing.points.loss.min(), best.min())
    axes.set_ylim(bottom - 0.06 * (top - bottom), top + 0.06 * (top - bottom))
    axes.legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _isoflop(drawing: Drawing) -> Figure | None:
    found = isoflop(drawing.points, drawing.budgets)
    if found is None:
        return None
    fit = drawing.fit
    figure, axes = _figure("IsoFLOP curves: parabolas through runs of one budget", "parameters N", "loss")
    shades = matplotlib.colormaps["viridis_r"](np.linspace(0.1, 1.0, len(found.curves)))
    for curve, valley, shade in zip(found.curves, found.minima, shades, strict=True):
        axes.scatter(curve.x, curve.y, s=16, color=shade, zorder=3)
        x = np.geomspace(curve.x.min(), curve.x.max(), 80)
        level, _, bend = valley.coefficients
        axes.plot(x, level + bend * np.log(x / valley.best) ** 2, color=shade, lw=1.2, label=f"{curve.at:.2g}")
        axes.plot(x, fit.law.loss(x, curve.at / (fit.flops_factor * x))[0], color=shade, lw=0.8, ls=":")
        if not valley.note:
            axes.plot(valley.best, valley.loss, marker="*", color=_RED, ms=9, zorder=5, mec="white", mew=0.5)
    axes.set_xscale("log")
    axes.plot([], [], marker="*", color=_RED, ls="", label="minimum")
    axes.plot([], [], ls=":", color=_GREY, label="the law")
    axes.legend(title="FLOPs", fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _optimum(drawing: Drawing) -> Figure:
    fit = drawing.fit
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    figure.suptitle("Best split of a budget", x=0.01, ha="left", fontsize=11)
    grid = np.geomspace(drawing.flops.min(), drawing.flops.max() * _AHEAD, 40)
    best = [fit.law.optimum(flops, factor=fit.flops_factor) for flops in grid]
    some = fit.replicates[slice(0, 400)]
    drawn = [some.optimum(flops, factor=fit.flops_factor) for flops in grid] if len(fit.replicates.rows) else []
    found = isoflop(drawing.points, drawing.budgets)
    for place, (field, label) in enumerate((("params", "best parameters N"), ("tokens", "best tokens D"))):
        axes = figure.add_subplot(1, 2, place + 1)
        axes.plot(grid, [getattr(one, field)[0] for one in best], color="black", lw=1.6, label="law")
        if drawn:
            low, high = _band(np.stack([getattr(one, field) for one in drawn], axis=1))
            axes.fill_between(grid, low, high, color="black", alpha=0.15, lw=0, label="90 % interval")
        for valley in found.minima if found else []:
            if valley.note:
                continue
            value = np.array(valley.interval or (valley.best, valley.best))
            middle = valley.best
            if field == "tokens":
                value, middle = (
                    valley.at / (fit.flops_factor * value[::-1]),
                    valley.at / (fit.flops_factor * middle),
                )
            axes.plot([valley.at, valley.at], value, color=_RED, lw=0.8)
            axes.plot(valley.at, middle, marker="*", color=_RED, ms=8, mec="white", mew=0.4)
        if found:
            axes.plot([], [], marker="*", color=_RED, ls="-", lw=0.8, label="IsoFLOP minimum")
        axes.set(xscale="log", yscale="log", xlabel="FLOPs", ylabel=label)
        edges = [getattr(one, field)[0] for one in best]
        axes.set_ylim(edges[0] / 6, edges[-1] * 6)
        axes.axvline(drawing.flops.max(), color=_BLUE, lw=0.8, ls="--")
        axes.legend(fontsize=7.5, frameon=False)
    return figure


def _predicted(drawing: Drawing) -> Figure:
    figure, axes = _figure("Predicted against measured", "predicted loss", "measured loss", (5.8, 5.2))
    held: dict[int, dict[str, Any]] = {run["line"]: run for run in drawing.fit.content["leave_largest_out"]["runs"]}
    inside = np.array([line not in held for line in drawing.lines])
    axes.scatter(
        drawing.predicted[inside],
        drawing.points.loss[inside],
        s=14,
        color=_GREY,
        alpha=0.7,
        label="fitted runs",
    )
    runs = [held[int(line)] for line in drawing.lines[~inside]]
    if runs:
        x = np.array([run["predicted"] for run in runs])
        spans = np.array([run["interval"] for run in runs])
        y = drawing.points.loss[~inside]
        axes.hlines(y, spans[:, 0], spans[:, 1], color=_BLUE, lw=1, alpha=0.5)
        axes.scatter(x, y, s=20, color=_BLUE, zorder=3, label="largest tenth, predicted from the rest, 90 % interval")
    low, high = drawing.points.loss.min(), drawing.points.loss.max()
    pad = 0.04 * (high - low)
    axes.plot([low - pad, high + pad], [low - pad, high + pad], color="black", lw=0.8)
    axes.set(xlim=(low - pad, high + pad), ylim=(low - pad, high + pad), aspect="equal")
    axes.legend(fontsize=7.5, frameon=False, loc="upper left")
    return figure


def _residuals(drawing: Drawing) -> Figure:
    figure, axes = _figure("Residuals: measured over predicted loss", "FLOPs", "residual, %", (7.2, 3.6))
    residual = 100.0 * np.log(drawing.points.loss / drawing.predicted)
    noise = 100.0 * drawing.fit.content["noise"]["about_law"]
    axes.axhspan(-noise, noise, color=_GREY, alpha=0.15, lw=0, label=f"scatter about the law, {noise:.2g} %")
    axes.axhline(0.0, color="black", lw=0.8)
    _scatter(drawing, axes, drawing.flops, residual)
    for line, x, y in zip(
        drawing.lines[drawing.outliers],
        drawing.flops[drawing.outliers],
        residual[drawing.outliers],
        strict=True,
    ):
        axes.annotate(
            f"line {line}",
            (x, y),
            xytext=(5, 0),
            textcoords="offset points",
            fontsize=7,
            color=_RED,
            va="center",
        )
    for size in _sizes(drawing, 5):
        axes.scatter([], [], s=18, color=_color(drawing, size), label=f"N = {_name(size)}")
    axes.set_xscale("log")
    axes.legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
