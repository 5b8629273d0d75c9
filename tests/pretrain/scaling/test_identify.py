import re

import numpy as np
import pytest

from pretrain.errors import ConfigError
from pretrain.scaling.forms import FORMS, Points
from pretrain.scaling.identify import check, distinct, next_run

CHINCHILLA = FORMS["chinchilla"]


def test_two_sizes_are_refused_by_number_and_a_run_is_named(grid):  # G48
    points = grid(sizes=2, lengths=15, noise=0.005)
    with pytest.raises(
        ConfigError, match=r"3 different model sizes at least, and the points have 2 .5e\+07, 5e\+09."
    ) as error:
        check(points, CHINCHILLA)
    run = re.search(r"run to add: (\S+) params on (\S+) tokens", str(error.value))
    assert run is not None
    added = float(run.group(1))
    assert all(abs(np.log(added / size)) > 0.19 for size in (5e7, 5e9))


def test_two_lengths_are_refused_as_well(grid):
    with pytest.raises(ConfigError, match="3 different token counts"):
        check(grid(sizes=10, lengths=2), CHINCHILLA)


def test_six_points_are_too_few_for_five_parameters(grid):
    points = grid().take(np.array([0, 7, 14, 21, 28, 5]))
    with pytest.raises(ConfigError, match="6 points leave too little to check them by; it needs 7"):
        check(points, CHINCHILLA)


def test_tokens_in_one_ratio_to_params_are_refused_and_the_simpler_form_named():
    n = np.geomspace(1e7, 1e10, 12)
    points = Points(n, 20 * n, 2 + 5e2 / n**0.34, 20 * n)
    with pytest.raises(ConfigError, match=r"tokens follow params.*tokens per parameter 20 to 20.*--form params"):
        check(points, CHINCHILLA)
    check(points, FORMS["params"])


def test_the_run_to_add_off_a_line_of_one_ratio_lies_off_that_line():
    n = np.geomspace(1e7, 1e10, 12)
    points = Points(n, 20 * n, 2 + 5e2 / n**0.34, 20 * n)
    run = next_run(points, CHINCHILLA, None)
    assert abs(np.log(run.tokens / run.params / 20)) > 1
    assert run.params * run.tokens <= 20 * 1e20 * 1.001


def test_a_wide_grid_is_accepted(grid):
    check(grid(), CHINCHILLA)
    check(grid(), FORMS["overtrained"])


def test_repetition_needs_repeats(grid):
    with pytest.raises(ConfigError, match="no more than 1 passes over the unique tokens"):
        check(grid(), FORMS["repetition"])


def test_the_next_run_narrows_the_prediction_more_than_the_others(grid, true_law):
    points = grid(noise=0.005)
    run = next_run(points, CHINCHILLA, true_law)
    again = Points(*(np.append(column, column[0]) for column in points))
    repeated = next_run(again, CHINCHILLA, true_law)  # after another copy of the smallest run
    assert 0.3 < run.narrower < 1.0
    assert repeated.narrower == pytest.approx(run.narrower, abs=0.1)
    assert run.params * run.tokens > 0.2 * (points.params * points.tokens).max()  # it is a large one


def test_sizes_within_a_percent_count_once():
    assert len(distinct(np.array([1.0e9, 1.004e9, 2e9]))) == 2
