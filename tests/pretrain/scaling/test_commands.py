"""The commands from parsing to printing, and what a person sees when they refuse."""

import argparse
import json

import numpy as np
import pytest

from pretrain.errors import ConfigError
from pretrain.scaling.cli import add_parser
from pretrain.scaling.table import write_table


def run(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["scale", *map(str, argv)])
    return args.run(args)


@pytest.fixture
def table(tmp_path, grid):
    return make_table(tmp_path, grid)


def make_table(folder, grid):
    points = grid(noise=0.003, seed=7)
    rows = [{"params": n, "tokens": d, "loss": loss} for n, d, loss in zip(*points[:3], strict=True)]
    write_table(folder / "runs.csv", rows)
    return folder / "runs.csv"


COLUMNS = ("--params", "params", "--tokens", "tokens", "--loss", "loss")


@pytest.fixture(scope="module")
def fit(tmp_path_factory, grid):
    folder = tmp_path_factory.mktemp("fit")
    assert run("fit", make_table(folder, grid), *COLUMNS, "--bootstrap", 200, "--out", folder / "fit.json") == 0
    return folder / "fit.json"


def test_fit_writes_every_promised_key_with_intervals(fit, truth):  # G48
    content = json.loads(fit.read_text())
    for name, value in truth.items():
        low, high = content[name]["interval"]
        assert low < content[name]["value"] < high
        assert content[name]["value"] == pytest.approx(value, rel=0.5)
    assert (content["points_used"], content["points_dropped"]) == (30, 0)
    assert content["interval_level"] == 0.9
    low, high = content["optimal_exponent"]["interval"]
    assert low < content["optimal_exponent"]["value"] < high


def test_fit_prints_the_law_the_check_on_the_largest_runs_and_the_next_run(table, capsys):
    run("fit", table, *COLUMNS, "--bootstrap", 100, "--where", "not largest(loss, 1)")
    out = capsys.readouterr().out
    assert "29 points, 1 dropped" in out
    assert "alpha" in out
    assert "largest left out: fitted on the" in out
    assert "forms by rms error on the largest runs" in out
    assert "next run:" in out


def test_fit_chooses_the_form_on_the_largest_runs_when_told_to(table, capsys):
    run("fit", table, *COLUMNS, "--bootstrap", 0, "--form", "auto", "--json")
    content = json.loads(capsys.readouterr().out)
    assert content["form"] in ("chinchilla", "overtrained")
    assert (
        content["form"] == min(content["forms"], key=lambda score: score["rms"])["form"] or len(content["forms"]) == 2
    )
    assert content["E"]["interval"] is None


def test_runs_of_one_ratio_carry_the_form_with_one_term_along_their_line_only(tmp_path, capsys, true_law):
    sizes = np.geomspace(1e8, 1e10, 9)
    rows = [{"params": n, "tokens": 20 * n, "loss": float(true_law.loss(n, 20 * n)[0])} for n in sizes]
    write_table(tmp_path / "line.csv", rows)
    run("fit", tmp_path / "line.csv", *COLUMNS, "--form", "auto", "--bootstrap", 100, "--out", tmp_path / "fit.json")
    assert "E + A/N^alpha" in capsys.readouterr().out
    run("predict", tmp_path / "fit.json", "--params", "1e11", "--tokens", "2e12", "--json")
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(float(true_law.loss(1e11, 2e12)[0]), rel=0.01)
    with pytest.raises(ConfigError, match="fitted at tokens_per_param from 20 to 20 and says nothing about 200"):
        run("predict", tmp_path / "fit.json", "--params", "1e10", "--tokens", "2e12")
    with pytest.raises(ConfigError, match="one term only, so it cannot split a budget"):
        run("predict", tmp_path / "fit.json", "--flops", "1e24")
    assert run("plot", tmp_path / "fit.json", tmp_path / "line.csv", "--out", tmp_path / "plots") == 0


def test_predict_gives_the_loss_of_a_run_with_its_intervals(fit, capsys, true_law):
    run("predict", fit, "--params", "7e10", "--tokens", "1.4e12", "--json")
    answer = json.loads(capsys.readouterr().out)
    true = float(true_law.loss(7e10, 1.4e12)[0])
    assert answer["law_interval"][0] < true < answer["law_interval"][1]
    wide, narrow = np.diff(answer["interval"])[0], np.diff(answer["law_interval"])[0]
    assert wide > narrow > 0
    assert answer["loss"] == pytest.approx(true, rel=0.02)
    gain = answer["marginal"]
    assert gain["loss_of_doubling_tokens"] == pytest.approx(float(true_law.loss(7e10, 2.8e12)[0]) - true, rel=0.3)


def test_predict_splits_a_budget_and_counts_inference(fit, capsys, true_law):
    run("predict", fit, "--flops", "1e23", "--json")
    plain = json.loads(capsys.readouterr().out)
    best = true_law.optimum(1e23)
    assert plain["params_interval"][0] < best.params[0] < plain["params_interval"][1]
    assert 6 * plain["params"] * plain["tokens"] == pytest.approx(1e23)
    run("predict", fit, "--flops", "1e23", "--inference-tokens", "1e13", "--json")
    served = json.loads(capsys.readouterr().out)
    assert served["params"] < plain["params"]
    assert served["training_flops"] + served["inference_flops"] == pytest.approx(1e23)
    assert 0 < served["saving"] < 1
    run("predict", fit, "--loss", served["loss"], "--inference-tokens", "1e13", "--json")
    back = json.loads(capsys.readouterr().out)
    assert back["flops"] == pytest.approx(1e23, rel=1e-4)
    assert back["params"] == pytest.approx(served["params"], rel=1e-2)


def test_predict_holds_the_law_against_the_runs_that_the_fit_left_out(table, tmp_path, capsys):
    small = "params * tokens < 2e19"
    run("fit", table, *COLUMNS, "--where", small, "--bootstrap", 200, "--out", tmp_path / "fit.json")
    capsys.readouterr()
    run("predict", tmp_path / "fit.json", "--table", table, "--json")
    answer = json.loads(capsys.readouterr().out)
    large = [one for one in answer["runs"] if one["params"] * one["tokens"] >= 2e19]
    assert len(answer["runs"]) == len(large) > 3
    assert answer["inside_interval"] > 0.7
    assert answer["times_largest_flops"] > 10
    errors = [one["measured"] / one["predicted"] - 1 for one in large]
    assert answer["rms_error"] == pytest.approx(np.sqrt(np.mean(np.square(errors))))
    assert answer["rms_error"] < 0.02
    run("predict", tmp_path / "fit.json", "--table", table, "--where", "largest(params, 5) and tokens > 9e10")
    out = capsys.readouterr().out
    assert "inside their 90 % intervals" in out
    assert len(out.splitlines()) == 3
    with pytest.raises(ConfigError, match="--where 'a > 1' has no effect without --table"):
        run("predict", tmp_path / "fit.json", "--flops", 1e20, "--where", "a > 1")


def test_other_forms_that_the_largest_runs_cannot_refute_widen_the_interval(fit, tmp_path, capsys):
    content = json.loads(fit.read_text())
    higher = [*content["law"][:2], content["law"][2] + 0.1, *content["law"][3:]]
    answers = []
    for rivals in ([], [{"form": "overtrained", "law": higher}]):
        (tmp_path / "fit.json").write_text(json.dumps(content | {"rivals": rivals}))
        run("predict", tmp_path / "fit.json", "--params", "7e10", "--tokens", "1.4e12", "--json")
        answers.append(json.loads(capsys.readouterr().out))
    alone, doubted = answers
    rival = alone["loss"] + (np.exp(0.1) - 1) * content["E"]["value"]
    assert doubted["interval"][0] == alone["interval"][0]
    assert doubted["interval"][1] == pytest.approx(alone["interval"][1] * rival / alone["loss"])
    assert (doubted["loss"], doubted["law_interval"]) == (alone["loss"], alone["law_interval"])


def test_predict_speaks_in_words_too(fit, capsys):
    run("predict", fit, "--flops", "1e23", "--inference-tokens", "1e13")
    out = capsys.readouterr().out
    assert "fewer FLOPs in all than the compute-optimal size" in out
    assert "times the compute of the largest run" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--params", 1e9), "say one of"),
        (("--flops", 1e20, "--loss", 2.0), "say one of"),
        (("--params", 1e9, "--tokens", -5), "--tokens -5 is no positive number"),
        (("--params", 1e9, "--tokens", 1e9, "--inference-tokens", 1e9), "--inference-tokens has no effect"),
        (
            ("--params", 1e9, "--tokens", 1e9, "--unique-tokens", 1e8),
            "--unique-tokens has no effect on form 'chinchilla'",
        ),
        (("--loss", 0.5), "is not above the law's E="),
    ],
)
def test_predict_refuses_what_it_cannot_answer(fit, arguments, message):
    with pytest.raises(ConfigError, match=message):
        run("predict", fit, *arguments)


def test_files_that_are_no_fit_are_refused_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(ConfigError, match="make it with pretrain scale fit"):
        run("predict", tmp_path / "none.json", "--flops", 1e20)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a file made by pretrain scale fit"):
        run("predict", tmp_path / "other.json", "--flops", 1e20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--where", "loss > 100"), "leaves no row"),
        (("--where", "params < 1.3e8"), "3 different model sizes"),
        (("--form", "repetition"), "needs --unique COL"),
        (("--form", "kaplan"), "--form 'kaplan' is unknown; the forms are auto"),
        (("--bootstrap", 5), "--bootstrap 5 is too few"),
        (("--flops", "flops"), "has no column 'flops'"),
    ],
)
def test_fit_refuses_what_it_cannot_do(table, arguments, message):
    with pytest.raises(ConfigError, match=message):
        run("fit", table, *COLUMNS, *arguments)


def test_a_nan_in_the_table_is_refused_by_line_and_goes_away_with_where(table, capsys):
    with table.open("a") as file:
        file.write("1e9,1e10,nan\n")
    with pytest.raises(ConfigError, match=r"'loss' .loss. has 1 values that are no positive number: line 32 .nan."):
        run("fit", table, *COLUMNS)
    assert run("fit", table, *COLUMNS, "--where", "loss > 0", "--bootstrap", 0, "--json") == 0
    assert json.loads(capsys.readouterr().out)["points_dropped"] == 1


def test_plot_draws_png_svg_and_one_page_that_loads_nothing(fit, table, tmp_path, capsys):
    assert run("plot", fit, table, "--out", tmp_path / "plots") == 0
    names = {line.rsplit("/", 1)[1] for line in capsys.readouterr().out.split()}
    for name in ("loss_against_compute", "optimum", "predicted_against_measured", "residuals"):
        assert {f"{name}.png", f"{name}.svg"} <= names
        assert (tmp_path / "plots" / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    page = (tmp_path / "plots" / "index.html").read_text()
    assert page.count("<svg") == 4
    assert "src=" not in page
    assert 'href="http' not in page
    first = (tmp_path / "plots" / "residuals.svg").read_bytes()
    run("plot", fit, table, "--out", tmp_path / "again")
    assert (tmp_path / "again" / "residuals.svg").read_bytes() == first


def test_ladder_says_what_it_costs_and_how_to_run_it(tmp_path, capsys):
    (tmp_path / "l.toml").write_text(
        "[ladder]\nname = 'x'\nsizes = [1e6]\ntokens = [1e6, 2e6]\n"
        "[shape]\nvocab_size = 512\nhead_dim = 16\naspect = 24\n"
        "[rules]\nlr = {base = 1e-3}\nbatch_tokens = {base = 4096}\n"
        "[base.data]\nsources = [{path = 'd'}]\nseq_len = 64\n",
    )
    assert run("ladder", tmp_path / "l.toml", "--out", tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert "2 runs" in out
    assert f"pretrain-launch sweep {tmp_path / 'out'}" in out


def test_hyper_gives_the_rule_and_its_value(tmp_path, capsys):
    rows = [
        {"params": n, "lr": lr, "loss": 3 + 0.02 * np.log(lr / (30 * n**-0.5)) ** 2}
        for n in (1e6, 1e8)
        for lr in 30 * n**-0.5 * np.array([0.3, 1.0, 3.0])
    ]
    write_table(tmp_path / "s.csv", rows)
    run("hyper", tmp_path / "s.csv", "--over", "lr", "--by", "params", "--loss", "loss", "--at", 1e10)
    out = capsys.readouterr().out
    assert "lr = 30 x params^-0.5000" in out
    assert "at params 1e+10: lr 0.0003" in out
    with pytest.raises(ConfigError, match="--over lr needs --loss COL"):
        run("hyper", tmp_path / "s.csv", "--over", "lr", "--by", "params")
