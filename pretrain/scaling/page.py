"""One HTML page of a fit: its numbers as tables, its pictures inlined as SVG. It loads nothing from elsewhere."""

import re
from html import escape
from pathlib import Path

from pretrain.scaling.report import fit_report
from pretrain.scaling.saved import SavedFit

_CSS = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 60rem; margin: 2rem auto; }
h1 { font-size: 1.5rem; } figure { margin: 2rem 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid #e5e7eb; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
pre { white-space: pre-wrap; background: #f9fafb; padding: 1rem; font-size: 13px; }
"""


def write_page(path: Path, fit: SavedFit, pictures: list[tuple[str, str]]) -> Path:
    """`pictures` are pairs of a title and SVG text."""
    content = fit.content
    rows = []
    for name in ("E", "A", "B", "alpha", "beta", "RD", "RN", "optimal_exponent", "optimal_exponent_tokens"):
        entry = content[name]
        if entry is None:
            continue
        low, high = entry["interval"] or (None, None)
        cells = [f"{value:.5g}" if value is not None else "" for value in (entry["value"], low, high)]
        rows.append(f"<tr><td>{name.replace('_', ' ')}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    figures = "".join(
        f"<figure aria-label='{escape(title)}'>{_inline(svg, f'p{number}-')}</figure>\n"
        for number, (title, svg) in enumerate(pictures)
    )
    path.write_text(
        f"<!doctype html>\n<html lang='en'><meta charset='utf-8'>"
        f"<title>Scaling law of {escape(content['table'])}</title>\n"
        f"<style>{_CSS}</style>\n<h1>L = {escape(content['formula'])}</h1>\n"
        f"<p>{content['points_used']} runs of {escape(content['table'])}, {content['points_dropped']} dropped"
        f"{' by ' + escape(content['where']) if content['where'] else ''}. "
        f"Intervals at {content['interval_level']:.0%}.</p>\n"
        f"<table><tr><th>parameter<th>value<th>from<th>to</tr>\n{''.join(rows)}</table>\n{figures}"
        f"<h2>Report</h2>\n<pre>{escape(fit_report(content))}</pre>\n</html>\n",
        encoding="utf-8",
    )
    return path


def _inline(svg: str, prefix: str) -> str:
    """The <svg> element alone, its ids made unique on the page."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"\bid=\"", f'id="{prefix}', body)
    body = re.sub(r"xlink:href=\"#", f'xlink:href="#{prefix}', body)
    return re.sub(r"url\(#", f"url(#{prefix}", body)
