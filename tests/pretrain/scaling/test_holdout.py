import numpy as np
import pytest

from pretrain.scaling.forms import FORMS, Points
from pretrain.scaling.holdout import choose, compare_forms, noise_floor, rivals, rolling, split, widening

CHINCHILLA = FORMS["chinchilla"]


def test_a_split_keeps_the_smallest_and_never_parts_equal_runs(grid):
    points = grid()
    twice = Points(*(np.repeat(column, 2) for column in points))
    small, large = split(twice, 0.9)
    compute = twice.params * twice.tokens
    assert compute[small].max() < compute[large].min()
    assert len(small) + len(large) == 60
    assert len(large) % 2 == 0


def test_the_largest_runs_of_an_exact_law_are_predicted_exactly(grid):
    held = rolling(grid(), CHINCHILLA, draws=0)
    assert [round(one.kept, 1) for one in held] == [0.4, 0.6, 0.7, 0.8, 0.9]
    assert max(one.rms for one in held) < 1e-6


def test_intervals_of_a_true_law_need_little_widening_and_of_a_wrong_one_much(grid, true_law):
    points = grid(sizes=8, lengths=8, noise=0.003, seed=2)
    assert widening(rolling(points, CHINCHILLA)) < 1.6
    # The largest runs went wrong in a way that no smaller one shows.
    compute = points.params * points.tokens
    bent = points._replace(loss=np.where(compute > np.quantile(compute, 0.9), 1.04, 1.0) * points.loss)
    assert widening(rolling(bent, CHINCHILLA)) > 1.5


def test_the_right_form_wins_on_the_largest_runs():
    n, d = (axis.ravel() for axis in np.meshgrid(np.geomspace(1e7, 1e9, 6), np.geomspace(1e9, 1e12, 6)))
    scatter = np.exp(0.003 * np.random.default_rng(0).standard_normal(36))
    unequal = Points(n, d, (1.9 + 60.0 / n**0.2 + 2e5 / d**0.6) * scatter, d)
    names = ("chinchilla", "overtrained")
    scores = compare_forms({name: rolling(unequal, FORMS[name], draws=0) for name in names})
    assert choose(scores).form == "chinchilla"
    assert rivals(scores, "chinchilla") == []
    equal = Points(n, d, (1.9 + 300.0 / n**0.33 + 700.0 / d**0.33) * scatter, d)
    scores = compare_forms({name: rolling(equal, FORMS[name], draws=0) for name in names})
    assert choose(scores).form == "overtrained"
    assert rivals(scores, "overtrained") == ["chinchilla"]  # which holds the law of equal exponents too


def test_the_noise_floor_is_the_spread_between_seeds(grid):
    rng = np.random.default_rng(0)
    points = grid()
    many = Points(*(np.repeat(column, 5) for column in points))
    many = many._replace(loss=many.loss * np.exp(0.004 * rng.standard_normal(150)))
    found = noise_floor(many)
    assert found is not None
    assert found[1] == 120
    assert found[0] == pytest.approx(0.004, rel=0.15)
    assert noise_floor(points) is None
