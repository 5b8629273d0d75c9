import numpy as np
import pytest
from scipy.optimize import minimize

from pretrain.scaling.forms import FORMS, Points, SumModel
from pretrain.scaling.huber import huber_sum, minimise, objective
from pretrain.scaling.starts import hoffmann_grid


@pytest.fixture
def noisy(grid):
    return grid(noise=0.01, seed=3)


def test_huber_sum_is_quadratic_inside_the_threshold_and_linear_outside():
    residual = np.array([[0.5e-3, -2e-3]])
    expected = 2.0 * 0.5 * 0.5e-3**2 + 3.0 * 1e-3 * (2e-3 - 0.5e-3)
    assert huber_sum(residual, np.array([[2.0, 3.0]]), 1e-3)[0] == pytest.approx(expected, rel=1e-12)


def test_the_minimum_is_no_higher_than_scipy_finds_from_the_truth(noisy: Points, true_law):
    model = SumModel(FORMS["chinchilla"], noisy)
    target, ones = np.log(noisy.loss)[None], np.ones((1, 30))
    starts = model.own(true_law.rows[:, :5])
    found = minimise(model, starts, target, ones, 1e-3)
    assert found.converged.all()
    # The reference: derivative-free descents, restarted until they stop moving (BFGS stalls at the kinks).
    theta = starts[0]
    for _ in range(6):
        theta = minimize(
            lambda t: objective(model, t[None], target, ones, 1e-3)[0],
            theta,
            method="Nelder-Mead",
            options={"maxiter": 4000, "maxfev": 4000, "xatol": 1e-10, "fatol": 1e-16},
        ).x
    reference = objective(model, theta[None], target, ones, 1e-3)[0]
    assert found.objective[0] <= reference * (1 + 1e-9)
    assert found.objective[0] == pytest.approx(reference, rel=1e-3)


def test_the_gradient_vanishes_at_the_minimum(noisy: Points, true_law):
    model = SumModel(FORMS["chinchilla"], noisy)
    target, ones = np.log(noisy.loss)[None], np.ones((1, 30))
    theta = minimise(model, model.own(true_law.rows[:, :5]), target, ones, 1e-3).theta
    prediction, slopes = model.evaluate(theta)
    pull = np.clip(prediction - target, -1e-3, 1e-3)
    terms = pull[0][:, None] * slopes[0]
    assert np.abs(terms.sum(axis=0)).max() < 1e-5 * np.abs(terms).sum(axis=0).min()


def test_members_of_a_batch_do_not_touch_each_other(noisy: Points):
    model = SumModel(FORMS["chinchilla"], noisy)
    target = np.log(noisy.loss)[None]
    starts = model.own(hoffmann_grid()[::450])
    weights = np.random.default_rng(0).exponential(size=(len(starts), 30))
    together = minimise(model, starts, target, weights, 1e-3)
    for k in (0, 3, 7):
        alone = minimise(model, starts[k : k + 1], target, weights[k : k + 1], 1e-3)
        assert alone.objective[0] == pytest.approx(together.objective[k], rel=1e-7)


def test_weights_count_points_as_often_as_they_say(noisy: Points, true_law):
    counts = np.random.default_rng(1).integers(0, 3, 30)
    repeated = noisy.take(np.repeat(np.arange(30), counts))
    one, many = SumModel(FORMS["chinchilla"], noisy), SumModel(FORMS["chinchilla"], repeated)
    start = true_law.rows[:, :5]
    weighted = minimise(one, one.own(start), np.log(noisy.loss)[None], counts[None].astype(float), 1e-3)
    doubled = minimise(many, many.own(start), np.log(repeated.loss)[None], np.ones((1, counts.sum())), 1e-3)
    np.testing.assert_allclose(one.full(weighted.theta), many.full(doubled.theta), rtol=1e-5)
