"""Besiroglu et al. 2024 (arXiv:2404.10102) fitted the points of figure 4 of the Chinchilla paper again."""

import numpy as np
import pytest

from pretrain.scaling.columns import points_of, where
from pretrain.scaling.forms import FORMS, SumModel
from pretrain.scaling.huber import objective
from pretrain.scaling.saved import read_fit, write_fit
from pretrain.scaling.study import Question, study
from pretrain.scaling.table import read_table

THEIRS = {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}
THEIR_ERRORS = {"E": 0.03, "A": 124.58, "B": 1293.23, "alpha": 0.02, "beta": 0.02}
ASK = Question("params", "tokens", "loss", flops="flops", where="not largest(loss, 5)", bootstrap=1000)


@pytest.fixture(scope="module")
def content(shared_scaling):
    return study(read_table(shared_scaling / "chinchilla_figure4.csv"), ASK)


def test_the_published_law_lies_within_the_intervals(content):
    assert (content["points_used"], content["points_dropped"]) == (240, 5)
    for name, value in THEIRS.items():
        low, high = content[name]["interval"]
        assert low < value < high, name
        # Half a 90 % interval is 1.645 standard errors; theirs are from 4,000 bootstraps.
        assert (high - low) / 2 == pytest.approx(1.645 * THEIR_ERRORS[name], rel=0.6), name
        assert content[name]["value"] == pytest.approx(value, abs=0.2 * THEIR_ERRORS[name]), name
    assert content["optimal_exponent"]["value"] == pytest.approx(0.513, abs=0.003)


def test_the_objective_is_no_higher_than_at_the_published_law(content, shared_scaling):
    table = read_table(shared_scaling / "chinchilla_figure4.csv")
    points = points_of(table.take(where(table, ASK.where)), "params", "tokens", "loss")
    model = SumModel(FORMS["chinchilla"], points)
    logs = [np.log(THEIRS["A"]), np.log(THEIRS["B"]), np.log(THEIRS["E"]), THEIRS["alpha"], THEIRS["beta"]]
    theirs = objective(model, model.own(np.array([logs])), np.log(points.loss)[None], np.ones((1, 240)), 1e-3)[0]
    assert content["objective"] <= theirs
    assert content["objective"] == pytest.approx(theirs, rel=0.01)  # theirs is rounded to four digits


def test_the_worst_three_points_are_named_by_line(content):
    assert [point["line"] for point in content["outliers"]] == [7, 12, 13]
    assert all(abs(point["deviations"]) > 6 for point in content["outliers"])


def test_the_parabolas_agree_with_the_law_on_the_exponent(content):
    found = content["isoflop"]
    assert len(found["budgets"]) >= 9
    assert found["exponent"]["interval"][0] < content["optimal_exponent"]["value"] < found["exponent"]["interval"][1]


def test_the_file_keeps_law_replicates_and_checks(content, tmp_path):
    write_fit(tmp_path / "fit.json", content)
    fit = read_fit(tmp_path / "fit.json")
    assert fit.replicates.rows.shape == (1000, 7)
    assert np.exp(fit.law.column("log_E")[0]) == pytest.approx(content["E"]["value"], rel=1e-9)
    assert fit.widen == content["leave_largest_out"]["widening"] >= 1.0
    assert {score["form"] for score in content["forms"]} == {"chinchilla", "overtrained"}
