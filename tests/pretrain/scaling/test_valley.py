import numpy as np
import pytest

from pretrain.errors import ConfigError
from pretrain.scaling.forms import Points
from pretrain.scaling.hyper import critical_batch, rule_at, sweep
from pretrain.scaling.isoflop import isoflop
from pretrain.scaling.table import Table
from pretrain.scaling.valley import Curve, power_law, valleys


def table(**columns) -> Table:
    count = len(next(iter(columns.values())))
    return Table("runs.csv", {k: np.asarray(v, dtype=float) for k, v in columns.items()}, np.arange(2, count + 2))


def test_the_minimum_of_an_exact_parabola_is_found():
    x = np.geomspace(1, 100, 7)
    (valley,) = valleys([Curve(1.0, x, 2.0 + 0.1 * np.log(x / 8.0) ** 2)])
    assert valley.best == pytest.approx(8.0)
    assert valley.loss == pytest.approx(2.0)
    assert not valley.note


def test_a_minimum_outside_its_points_is_marked_and_left_out_of_the_power_law():
    x = np.geomspace(1, 100, 7)
    curves = [Curve(at, x, 2 + 0.1 * np.log(x / best) ** 2) for at, best in ((1.0, 5.0), (2.0, 10.0), (4.0, 400.0))]
    minima = valleys(curves)
    assert [bool(one.note) for one in minima] == [False, False, True]
    assert power_law(minima).exponent == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="0 of 1 curves have a minimum inside"):
        power_law(minima[2:])


def test_intervals_of_minima_cover_the_truth():
    rng = np.random.default_rng(0)
    x, hits, exponents = np.geomspace(1, 50, 6), 0, 0
    for _ in range(100):
        curves = [
            Curve(at, x, 2 + 0.05 * np.log(x / (7 * at**0.2)) ** 2 + 0.01 * rng.standard_normal(6))
            for at in (1.0, 3.0, 9.0)
        ]
        minima = valleys(curves, draws=300)
        low, high = minima[0].interval
        hits += low <= 7.0 <= high
        low, high = power_law(minima).interval
        exponents += low <= 0.2 <= high
    assert 80 <= hits <= 99
    assert 78 <= exponents <= 99


def test_isoflop_minima_grow_as_the_law_says(true_law):
    # Budgets centred on the true optimum: there the parabola's bias is small.
    budgets = np.geomspace(1e19, 1e22, 5)
    n = np.concatenate([true_law.optimum(c).params[0] * np.geomspace(1 / 3, 3, 7) for c in budgets])
    c = np.repeat(budgets, 7)
    d = c / (6 * n)
    found = isoflop(Points(n, d, true_law.loss(n, d)[0], d), c)
    assert found is not None
    assert found.params is not None
    assert [valley.at for valley in found.minima] == pytest.approx(budgets.tolist())
    assert found.params.exponent == pytest.approx(true_law.optimal_exponent[0], abs=0.005)


def test_a_grid_of_sizes_and_lengths_has_no_budgets(grid):
    assert (
        isoflop(grid(sizes=5, lengths=3), 6 * grid(sizes=5, lengths=3).params * grid(sizes=5, lengths=3).tokens) is None
    )


def test_a_learning_rate_sweep_gives_the_rule_it_was_made_from():
    params = np.repeat([1e6, 1e7, 1e8, 1e9], 5)
    best = 30.0 * params**-0.5
    lr = best * np.tile([0.25, 0.5, 1, 2, 4], 4)
    noise = 0.001 * np.random.default_rng(0).standard_normal(20)
    answer = sweep(
        table(params=params, lr=lr, loss=3 + 0.02 * np.log(lr / best) ** 2 + noise), over="lr", by="params", loss="loss"
    )
    assert answer["rule"]["exponent"] == pytest.approx(-0.5, abs=0.05)
    assert answer["rule"]["interval"][0] < -0.5 < answer["rule"]["interval"][1]
    assert rule_at(answer["rule"], 1e10) == pytest.approx(3e-4, rel=0.3)


def test_a_sweep_of_two_values_is_refused():
    runs = table(params=[1e6, 1e6], lr=[1e-3, 2e-3], loss=[3.0, 3.1])
    with pytest.raises(ConfigError, match="no value of 'params' has 3 different values of 'lr'"):
        sweep(runs, over="lr", by="params", loss="loss")


def test_the_critical_batch_follows_measured_noise_scales():
    tokens = np.geomspace(1e8, 1e11, 12)
    noise = 3.0 * tokens**0.5 * np.exp(0.1 * np.random.default_rng(1).standard_normal(12))
    runs = table(tokens=np.append(tokens, 1e12), grad_noise_scale=np.append(noise, np.nan))
    answer = critical_batch(runs, by="tokens")
    assert answer["points"] == 12
    assert answer["rule"]["interval"][0] < 0.5 < answer["rule"]["interval"][1]
    with pytest.raises(ConfigError, match="was measured at 0 values of 'tokens'"):
        critical_batch(table(tokens=tokens, grad_noise_scale=np.full(12, np.nan)), by="tokens")
