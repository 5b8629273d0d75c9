"""Known laws and the points that they make."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pretrain.scaling.forms import Points
from pretrain.scaling.laws import Laws

# The replication's law (Besiroglu et al. 2024, arXiv:2404.10102).
TRUE = {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}


@pytest.fixture
def truth() -> dict[str, float]:
    return dict(TRUE)


@pytest.fixture(scope="session")
def true_law() -> Laws:
    t = TRUE
    logs = [np.log(t["A"]), np.log(t["B"]), np.log(t["E"]), t["alpha"], t["beta"], np.inf, np.inf]
    return Laws(np.array([logs]))


@pytest.fixture(scope="session")
def grid(true_law: Laws) -> Callable[..., Points]:
    """Points of the true law on a grid of sizes and lengths, with log-normal noise."""

    def make(sizes: int = 6, lengths: int = 5, noise: float = 0.0, seed: int = 0) -> Points:
        n, d = np.meshgrid(np.geomspace(5e7, 5e9, sizes), np.geomspace(1e9, 1e11, lengths))
        n, d = n.ravel(), d.ravel()
        scatter = np.random.default_rng(seed).standard_normal(len(n))
        return Points(n, d, true_law.loss(n, d)[0] * np.exp(noise * scatter), d)

    return make


@pytest.fixture(scope="session")
def shared_scaling() -> Path:
    root = Path(os.environ.get("PRETRAIN_SHARED", Path(__file__).parents[4] / "shared"))
    folder = root / "data" / "scaling"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here (set PRETRAIN_SHARED to the shared data folder)")
    return folder
