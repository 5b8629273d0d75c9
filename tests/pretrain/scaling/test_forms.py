import numpy as np
import pytest

from pretrain.scaling.forms import FORMS, Points, SumModel
from pretrain.scaling.repetition import RepetitionModel

LAW = np.array([[np.log(482.0), np.log(2085.0), np.log(1.8), 0.35, 0.37]])


@pytest.fixture
def points() -> Points:
    rng = np.random.default_rng(0)
    n, d = np.exp(rng.uniform(17, 23, 40)), np.exp(rng.uniform(20, 26, 40))
    unique = d / np.maximum(1.0, np.exp(rng.uniform(-1, 4, 40)))
    return Points(n, d, rng.uniform(2, 4, 40), unique)


@pytest.mark.parametrize("name", list(FORMS))
def test_slopes_and_curvature_equal_differences(name: str, points: Points):
    form = FORMS[name]
    model = RepetitionModel(form, points) if form.repetition else SumModel(form, points)
    rng = np.random.default_rng(1)
    theta = model.own(LAW) + 0.1 * rng.standard_normal((4, len(form.free)))
    weights = rng.standard_normal((4, 40))
    slopes = model.evaluate(theta)[1]
    curvature = model.curvature(theta, weights)
    step = 1e-6
    for j, move in enumerate(step * np.eye(len(form.free))):
        difference = (model.predict(theta + move) - model.predict(theta - move)) / (2 * step)
        np.testing.assert_allclose(slopes[:, :, j], difference, atol=3e-8)
        bend = (model.evaluate(theta + move)[1] - model.evaluate(theta - move)[1]) / (2 * step)
        np.testing.assert_allclose(curvature[:, j], np.einsum("rn,rnp->rp", weights, bend), atol=1e-5)


@pytest.mark.parametrize("name", ["chinchilla", "overtrained"])
def test_full_and_own_parameters_are_each_others_inverse(name: str, points: Points):
    model = SumModel(FORMS[name], points)
    theta = model.own(LAW)
    np.testing.assert_allclose(model.own(model.full(theta)), theta, atol=1e-9)


def test_the_overtrained_form_is_the_one_of_gadre_et_al():
    # E + (a M^eta + b M^-eta) C^-eta with M = D/N and C = 6ND.
    a, b, eta = 250.0, 400.0, 0.16
    n, d = np.array([1e8, 3e9]), np.array([5e11, 2e10])
    ratio, compute = d / n, 6 * n * d
    theirs = 1.8 + (a * ratio**eta + b * ratio**-eta) * compute**-eta
    ours = 1.8 + a * 6**-eta / n ** (2 * eta) + b * 6**-eta / d ** (2 * eta)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    assert FORMS["overtrained"].free == ("log_A", "log_B", "log_E", "alpha")


def test_without_repeats_a_small_model_is_predicted_as_by_the_plain_form(points: Points):
    # N below the optimum for D and D = U: nothing fades.
    plain = points._replace(params=np.full(40, 1e6), tokens=points.tokens * 100, unique=points.tokens * 100)
    repetition, simple = RepetitionModel(FORMS["repetition"], plain), SumModel(FORMS["chinchilla"], plain)
    np.testing.assert_allclose(repetition.predict(repetition.own(LAW)), simple.predict(simple.own(LAW)), rtol=1e-12)
