"""FIT.json: what `pretrain scale fit --out` writes and `predict` and `plot` read. Layout in docs/scaling.md."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.errors import ConfigError
from pretrain.scaling.forms import FORMS, Form
from pretrain.scaling.huber import Array
from pretrain.scaling.laws import COLUMNS, Laws


@dataclass(frozen=True)
class SavedFit:
    path: str
    content: dict[str, Any]  # as in the file
    form: Form
    law: Laws
    replicates: Laws
    residuals: Array  # log measured - log fitted
    rivals: Laws  # other forms that predicted the largest runs about as well, one row each
    widen: float  # factor on prediction intervals, from the largest runs left out
    flops_factor: float  # FLOPs = factor * params * tokens


def write_fit(path: str | Path, content: dict[str, Any]) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_fit(path: str | Path) -> SavedFit:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        law = _rows([content["law"]])
        replicates, rivals = _rows(content["replicates"]), _rows([one["law"] for one in content["rivals"]])
        return SavedFit(
            path=str(path),
            content=content,
            form=FORMS[content["form"]],
            law=Laws(law),
            replicates=Laws(replicates),
            rivals=Laws(rivals),
            residuals=np.array(content["residuals"], dtype=np.float64),
            widen=float(content["leave_largest_out"]["widening"]),
            flops_factor=float(content["flops_factor"]),
        )
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; make it with pretrain scale fit TABLE --out {path}"
        ) from None
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not a file made by pretrain scale fit --out ({error!r})") from None


def plain_rows(rows: Array) -> list[list[float | str]]:
    """Rows for JSON: 10 digits, and what JSON has no number for as text."""
    return [[float(f"{value:.10g}") if np.isfinite(value) else str(value) for value in row] for row in rows]


def _rows(values: list[list[float | str]]) -> Array:
    return np.array([[float(value) for value in row] for row in values]).reshape(-1, len(COLUMNS))
