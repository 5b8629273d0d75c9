import numpy as np
import pytest

from pretrain.scaling.laws import Laws


def test_the_best_split_is_the_closed_form(true_law, truth):
    flops = 5.76e23
    a, b = truth["alpha"], truth["beta"]
    scale = (a * truth["A"] / (b * truth["B"])) ** (1 / (a + b))
    best = true_law.optimum(flops)
    assert best.params[0] == pytest.approx(scale * (flops / 6) ** (b / (a + b)), rel=1e-5)
    assert 6 * best.params[0] * best.tokens[0] == pytest.approx(flops, rel=1e-9)
    assert true_law.optimal_exponent[0] == pytest.approx(b / (a + b))


def test_a_search_finds_the_same_split_as_the_closed_form(true_law):
    searched = true_law.optimum(1e22, inference_tokens=1e-6)
    assert searched.params[0] == pytest.approx(true_law.optimum(1e22).params[0], rel=1e-5)


def test_a_law_that_does_not_fall_has_no_best_split(true_law):
    rows = np.repeat(true_law.rows, 2, axis=0)
    rows[1, 3] = -0.01
    best = Laws(rows).optimum(1e22)
    assert np.isfinite(best.params[0])
    assert np.isnan(best.params[1])


def test_the_best_split_with_inference_is_the_lowest_of_a_fine_grid(true_law):
    flops, served = 1e24, 1e13
    best = true_law.optimum(flops, inference_tokens=served)
    sizes = np.geomspace(1e9, flops / (2 * served) * 0.999, 20_001)
    losses = true_law.loss(sizes, (flops / sizes - 2 * served) / 6)[0]
    assert best.loss[0] <= losses.min() + 1e-12
    assert best.params[0] == pytest.approx(sizes[losses.argmin()], rel=2e-3)
    assert best.params[0] < true_law.optimum(flops).params[0]


def test_the_cheapest_run_to_the_best_loss_of_a_budget_is_that_budgets_best_run(true_law):
    best = true_law.optimum(1e22)
    run, cost = true_law.cheapest(float(best.loss[0]))
    assert cost[0] == pytest.approx(1e22, rel=1e-7)
    assert run.params[0] == pytest.approx(best.params[0], rel=1e-4)


def test_inference_makes_the_cheapest_run_smaller_and_longer_at_the_same_loss(true_law):
    plain, _ = true_law.cheapest(2.1)
    served, cost = true_law.cheapest(2.1, inference_tokens=1e13)
    assert served.params[0] < plain.params[0]
    assert served.tokens[0] > plain.tokens[0]
    assert true_law.loss_each(served.params, served.tokens)[0] == pytest.approx(2.1, abs=1e-6)
    assert cost[0] < plain.params[0] * (6 * plain.tokens[0] + 2e13)


def test_a_loss_below_E_has_no_run(true_law):
    run, _ = true_law.cheapest(1.8)
    assert np.isnan(run.loss[0])


def test_many_rows_answer_as_each_alone(true_law):
    rows = np.repeat(true_law.rows, 3, axis=0)
    rows[:, 3] += [0.0, 0.02, -0.02]
    together = Laws(rows).optimum(1e22)
    for k in range(3):
        assert Laws(rows[k : k + 1]).optimum(1e22).params[0] == pytest.approx(together.params[k], rel=1e-9)
    np.testing.assert_allclose(
        Laws(rows).loss([1e9, 1e8], [1e10, 1e9])[1], Laws(rows[1:2]).loss([1e9, 1e8], [1e10, 1e9])[0]
    )


def test_as_many_points_as_rows_are_still_points(true_law):
    rows = np.repeat(true_law.rows, 3, axis=0)
    assert Laws(rows).loss([1e8, 1e9, 1e10], [1e10, 1e11, 1e12]).shape == (3, 3)
    assert Laws(rows).loss_each(np.array([1e8, 1e9, 1e10]), np.array([1e10, 1e11, 1e12])).shape == (3,)


def test_repeated_tokens_are_worth_what_the_paper_says(true_law):
    rows = true_law.rows.copy()
    rows[0, 5:] = 15.4, 5.3
    law, small, unique = Laws(rows), 1e6, 1e9
    once = law.loss(small, unique, unique)[0]
    assert once == pytest.approx(true_law.loss(small, unique)[0], rel=1e-12)
    # Four passes lose little, many passes end at (1 + RD) times the unique tokens.
    effective = unique * (1 + 15.4 * (1 - np.exp(-3 / 15.4)))
    assert law.loss(small, 4 * unique, unique)[0] == pytest.approx(true_law.loss(small, effective)[0], rel=1e-12)
    assert law.loss(small, 1e6 * unique, unique)[0] == pytest.approx(true_law.loss(small, 16.4 * unique)[0], rel=1e-9)


def test_parameters_beyond_what_the_unique_tokens_need_fade(true_law):
    rows = true_law.rows.copy()
    rows[0, 5:] = 15.4, 5.3
    law, unique = Laws(rows), 1e9
    floor = [law.loss(size, unique, unique)[0] for size in (1e10, 1e12, 1e14)]
    assert floor[1] == pytest.approx(floor[2], rel=1e-6)
    assert floor[0] > true_law.loss(1e10, unique)[0]
