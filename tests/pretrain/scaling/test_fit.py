import re
import subprocess
import sys

import numpy as np
import pytest

from pretrain.errors import ConfigError
from pretrain.scaling.fit import fit_law, interval
from pretrain.scaling.forms import Points
from pretrain.scaling.laws import Laws


def natural(law: Laws) -> dict[str, float]:
    scales = {name: float(np.exp(law.column(f"log_{name}")[0])) for name in "EAB"}
    return scales | {name: float(law.column(name)[0]) for name in ("alpha", "beta")}


def test_a_law_is_recovered_from_30_exact_points(grid, truth):  # G48
    found = natural(fit_law(grid(), bootstrap=0).law)
    for name, value in truth.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize(
    "law", [(1.69, 406.4, 410.7, 0.34, 0.28), (0.5, 30.0, 900.0, 0.2, 0.45), (2.5, 5e4, 80.0, 0.6, 0.2)]
)
def test_other_laws_in_other_ranges_are_recovered_to_1_percent(law):
    e, a, b, alpha, beta = law
    n, d = (axis.ravel() for axis in np.meshgrid(np.geomspace(3e4, 1e6, 6), np.geomspace(1e6, 1e8, 5)))
    loss = e + a / n**alpha + b / d**beta
    found = natural(fit_law(Points(n, d, loss, d), bootstrap=0).law)
    np.testing.assert_allclose([found[k] for k in ("E", "A", "B", "alpha", "beta")], law, rtol=0.01)


def test_the_law_is_the_same_for_every_row_order_and_seed(grid):  # G48
    points = grid(noise=0.005, seed=1)
    first = fit_law(points, bootstrap=50)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(30)
        other = fit_law(points.take(order), bootstrap=50, seed=seed)
        assert np.array_equal(other.law.rows, first.law.rows)
        if seed == 0:
            assert np.array_equal(other.replicates.rows, first.replicates.rows)
        np.testing.assert_array_equal(points.take(order).take(other.order).loss, other.points.loss)


def test_units_of_tokens_change_B_alone(grid):
    points = grid(noise=0.003, seed=2)
    one = natural(fit_law(points, bootstrap=0).law)
    other = natural(fit_law(points._replace(tokens=points.tokens / 1e9), bootstrap=0).law)
    assert other["B"] == pytest.approx(one["B"] * 1e-9 ** one["beta"], rel=1e-4)
    for name in ("E", "A", "alpha", "beta"):
        assert other[name] == pytest.approx(one[name], rel=1e-5)


def test_one_loss_of_9_9_moves_the_law_little_and_is_named(grid, truth):  # G48
    points = grid(noise=0.001, seed=4)
    before = natural(fit_law(points, bootstrap=0).law)
    spoiled = points._replace(loss=np.where(np.arange(30) == 17, 9.9, points.loss))
    fit = fit_law(spoiled, bootstrap=0)
    after = natural(fit.law)
    for name in ("E", "alpha", "beta"):
        assert after[name] == pytest.approx(before[name], rel=0.05), name
    assert fit.order[np.flatnonzero(fit.outliers)].tolist() == [17]


def test_values_that_are_no_positive_number_are_refused(grid):  # G48
    points = grid()
    for bad in (np.nan, np.inf, -1.0, 0.0):
        with pytest.raises(ConfigError, match="loss has 1 values"):
            fit_law(points._replace(loss=np.where(np.arange(30) == 3, bad, points.loss)))


def test_an_unknown_form_is_refused_with_the_known_ones(grid):
    with pytest.raises(ConfigError, match=re.escape("form='kaplan' is unknown; the forms are chinchilla, overtrained")):
        fit_law(grid(), "kaplan")


def test_the_overtrained_form_finds_equal_exponents():
    n, d = (axis.ravel() for axis in np.meshgrid(np.geomspace(1e7, 1e9, 5), np.geomspace(1e9, 1e12, 5)))
    loss = 1.9 + 300.0 / n**0.33 + 700.0 / d**0.33
    fit = fit_law(Points(n, d, loss, d), "overtrained", bootstrap=0)
    assert natural(fit.law) == pytest.approx({"E": 1.9, "A": 300, "B": 700, "alpha": 0.33, "beta": 0.33}, rel=1e-4)
    assert fit.law.optimal_exponent[0] == pytest.approx(0.5)


def test_the_repetition_form_finds_how_fast_repeats_lose_their_worth(true_law):
    law = true_law.rows.copy()
    law[0, 5:] = 15.4, 5.3
    rng = np.random.default_rng(0)
    n, d = np.exp(rng.uniform(np.log(5e7), np.log(5e9), 120)), np.exp(rng.uniform(np.log(1e9), np.log(1e11), 120))
    unique = d / np.maximum(1.0, np.exp(rng.uniform(-1, 4, 120)))
    fit = fit_law(Points(n, d, Laws(law).loss(n, d, unique)[0], unique), "repetition", bootstrap=0)
    np.testing.assert_allclose(fit.law.rows, law, rtol=1e-4)


def test_one_size_is_enough_for_the_tokens_form():
    d = np.geomspace(1e9, 1e11, 8)
    fit = fit_law(Points(np.full(8, 1e8), d, 2.0 + 900.0 / d**0.33, d), "tokens", bootstrap=0)
    assert fit.law.column("beta")[0] == pytest.approx(0.33, rel=1e-4)
    assert np.isinf(fit.law.column("log_A")[0])
    assert fit.law.loss(3e8, 1e10)[0] == pytest.approx(2.0 + 900.0 / 1e10**0.33)


def test_rows_of_one_group_share_their_bootstrap_weight(grid):
    points = grid(noise=0.005, seed=5)
    apart = fit_law(points, bootstrap=300)
    twice = Points(*(np.concatenate([column, column]) for column in points))
    group = np.tile(np.arange(30), 2)
    together = fit_law(twice, bootstrap=300, groups=group)
    loose = fit_law(twice, bootstrap=300)

    def width(fit):
        low, high = interval(fit.replicates.column("alpha"))
        return high - low

    assert width(together) == pytest.approx(width(apart), rel=0.25)
    assert width(loose) < 0.85 * width(apart)  # as if the copies were news


def test_interval_wants_half_of_its_values_finite():
    assert interval(np.array([1.0, np.nan, np.nan])) is None
    assert interval(np.linspace(0, 1, 101)) == pytest.approx((0.05, 0.95))


def test_fitting_loads_neither_torch_nor_matplotlib_nor_pandas():
    code = "import sys, pretrain.scaling.fit, pretrain.scaling.study, pretrain.scaling.predict, pretrain.scaling.cli\n"
    code += "print([m for m in ('torch', 'matplotlib', 'pandas', 'scipy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
