import math
import re
import tomllib
from pathlib import Path

import pytest
import tomli_w

from pretrain.config_file import load_config
from pretrain.errors import ConfigError
from pretrain.metrics.flops import flops_per_token, parameter_counts
from pretrain.scaling.ladder import LadderConfig, points, read_ladder
from pretrain.scaling.ladder_folder import cost, write_folder
from pretrain.scaling.shapes import PowerRule, ShapeRules, count_params, feed_forward_size, shape
from pretrain.train.schedule import lr_at

ROOT = Path(__file__).parents[3]

BASE = {
    "ladder": {"name": "t", "design": "grid", "sizes": [1e6, 4e6], "tokens_per_param": [10, 20, 40]},
    "shape": {"vocab_size": 512, "aspect": 24, "head_dim": 16},
    "rules": {"lr": {"base": 3e-4, "at_width": 4096}, "batch_tokens": {"base": 8192}},
    "base": {"data": {"sources": [{"path": "data/x"}], "seq_len": 128}, "train": {"micro_batch_size": 4}},
}


def ladder(tmp_path: Path, **changes: dict) -> LadderConfig:
    raw = {table: BASE.get(table, {}) | changes.get(table, {}) for table in {**BASE, **changes}}
    raw["ladder"] = {key: value for key, value in raw["ladder"].items() if value is not None}
    path = tmp_path / "ladder.toml"
    path.write_text(tomli_w.dumps(raw))
    return read_ladder(path)


@pytest.mark.parametrize(("params", "head_dim"), [(3e4, 16), (1e6, 32), (3e7, 64), (1e9, 128), (7e9, 128)])
def test_shapes_have_the_size_asked_for_near_the_aspect(params, head_dim):
    rules = ShapeRules(vocab_size=32_000, aspect=64 if params > 1e6 else 24, head_dim=head_dim)
    model = shape(params, rules, 1024)
    assert count_params(model, "non_embedding") == pytest.approx(params, rel=0.3)
    assert model.head_dim == head_dim
    assert model.n_heads * head_dim == model.d_model
    assert 0.4 < model.d_model / model.n_layers / rules.aspect < 2.5


@pytest.mark.parametrize(
    ("d_model", "multiplier", "multiple_of", "d_ff"),
    [(4096, 1.0, 256, 11_008), (5120, 1.0, 256, 13_824), (8192, 1.3, 4096, 28_672), (4096, 1.3, 1024, 14_336)],
)
def test_feed_forward_sizes_are_those_of_the_released_llamas(d_model, multiplier, multiple_of, d_ff):
    assert feed_forward_size(d_model, multiplier, multiple_of) == d_ff


def test_the_width_rule_gives_llamas_own_rates():
    rule = PowerRule(base=3e-4, at_width=4096)
    assert rule.value(4096, 7e9, 1e12) == 3e-4
    assert rule.value(8192, 70e9, 1e12) == 1.5e-4


def test_a_power_of_params_or_tokens_needs_the_place_where_its_base_holds():
    rule = PowerRule(base=1e6, at_tokens=1e10, tokens_power=0.5, highest=4e6)
    assert rule.value(1, 1.0, 4e10) == pytest.approx(2e6)
    assert rule.value(1, 1.0, 1e13) == 4e6
    with pytest.raises(ValueError, match=r"tokens_power=0.5 and at_tokens=None belong together"):
        PowerRule(base=1.0, tokens_power=0.5)


def test_a_grid_has_every_size_at_every_length(tmp_path):
    found = points(ladder(tmp_path), tmp_path / "out")
    assert len(found) == 6
    assert {round(point.row["tokens_per_param"]) for point in found} == {10, 20, 40}
    assert [point.row["flops"] for point in found] == sorted(point.row["flops"] for point in found)
    for point in found:
        cfg = point.config
        per_token = flops_per_token(cfg.model, cfg.data.seq_len, causal=True)
        trained = cfg.steps * cfg.train.global_batch_size * cfg.data.seq_len
        assert point.row["flops"] == per_token * trained
        assert point.row["params_total"] == parameter_counts(cfg.model).total
        assert cfg.train.global_batch_size == 64
        assert cfg.train.global_batch_size % cfg.train.micro_batch_size == 0
        assert cfg.optimizer.lr == pytest.approx(3e-4 * 4096 / cfg.model.d_model, rel=1e-5)
        assert cfg.schedule.warmup_steps == math.ceil(0.02 * cfg.steps)


def test_isoflop_points_of_a_budget_cost_the_same(tmp_path):
    cfg = ladder(
        tmp_path,
        ladder={
            "design": "isoflop",
            "sizes": None,
            "tokens_per_param": [20],
            "budgets": [1e14, 1e15],
            "sizes_per_budget": 5,
        },
        rules={"batch_tokens": {"base": 1024}},
    )
    found = points(cfg, tmp_path)
    for budget in (1e14, 1e15):
        mine = [point.row for point in found if point.row["budget"] == budget]
        assert len(mine) == 5
        assert all(row["flops"] == pytest.approx(budget, rel=0.02) for row in mine)
        assert max(row["params"] for row in mine) > 8 * min(row["params"] for row in mine)


@pytest.mark.parametrize("design", ["grid", "isoflop"])
def test_a_total_of_flops_is_spent_and_not_exceeded(tmp_path, design):
    cfg = ladder(
        tmp_path,
        ladder={
            "design": design,
            "sizes": None,
            "tokens_per_param": [20],
            "total_flops": 1e17,
            "rungs": 4,
            "seeds": [1, 2],
        },
    )
    found = points(cfg, tmp_path)
    assert sum(point.row["flops"] for point in found) == pytest.approx(1e17, rel=0.1)
    assert {point.row["seed"] for point in found} == {1, 2}


def test_every_point_is_a_config_that_loads_and_the_table_names_it(tmp_path):
    found = points(ladder(tmp_path), tmp_path / "out")
    write_folder(found, tmp_path / "out")
    for point in found:
        assert load_config(tmp_path / "out" / point.row["config"]) == point.config
        assert Path(point.config.run.dir) == tmp_path / "out" / "runs" / point.row["name"]
    assert (tmp_path / "out" / "table.csv").read_text().count("\n") == 7
    write_folder(found, tmp_path / "out")  # again: the same files
    (tmp_path / "out" / "other.toml").write_text("")
    with pytest.raises(ConfigError, match=r"1 configs that are no points of this ladder .other.toml"):
        write_folder(found, tmp_path / "out")


def test_wsd_lengths_share_a_trunk_and_decay_from_its_checkpoints(tmp_path):
    found = points(ladder(tmp_path, base=BASE["base"] | {"schedule": {"name": "wsd", "min_lr_ratio": 0.0}}), tmp_path)
    trunks = {point.row["name"]: point for point in found if not point.row["after"]}
    decays = [point for point in found if point.row["after"]]
    assert (len(trunks), len(decays)) == (2, 4)
    assert [bool(point.row["after"]) for point in found] == [False] * 2 + [True] * 4
    for point in decays:
        trunk = trunks[point.row["after"]].config
        match = re.fullmatch(re.escape(trunk.run.dir) + r"/checkpoints/step-(\d{8})", point.config.init.from_)
        assert match
        start = int(match[1])
        assert start % trunk.checkpoint.every == 0
        assert trunk.checkpoint.keep_every == trunk.checkpoint.every  # kept for ever
        assert start <= trunk.steps - trunk.schedule.decay_steps  # the trunk has not begun to decay there
        assert (point.config.init.load, point.config.init.data) == ("all", "continue")
        assert point.config.train.global_batch_size == trunk.train.global_batch_size
        # The decay's rates are those of a whole run of that length.
        whole = start + point.config.steps
        assert point.row["tokens"] == whole * trunk.train.global_batch_size * 128
        assert point.config.steps == pytest.approx(0.2 * whole, rel=0.15)
        assert lr_at(point.config.steps, point.config) == pytest.approx(0.0, abs=1e-12)
        tail = trunk.model_copy(
            update={
                "train": trunk.train.model_copy(update={"steps": whole}),
                "schedule": trunk.schedule.model_copy(update={"decay_steps": point.config.steps}),
            }
        )
        for update in (1, 2, point.config.steps):
            assert lr_at(update, point.config) == pytest.approx(lr_at(start + update, tail), rel=1e-9, abs=1e-12)


def test_sweeps_multiply_the_points(tmp_path):
    found = points(ladder(tmp_path, sweep={"lr": [0.5, 1, 2]}), tmp_path)
    assert len(found) == 18
    rates = {
        point.config.optimizer.lr for point in found if point.config.model.d_model == found[0].config.model.d_model
    }
    assert max(rates) / min(rates) == pytest.approx(4, rel=1e-4)


def test_device_hours_come_from_the_stated_mfu(tmp_path):
    found = points(ladder(tmp_path, hardware={"device": "h100-sxm", "mfu": 0.5}), tmp_path)
    row = found[0].row
    assert row["gpu_hours"] == pytest.approx(row["flops"] / (0.5 * 989.4e12 * 3600), rel=1e-3)
    assert "device hours" in cost(found)
    assert points(ladder(tmp_path), tmp_path)[0].row["gpu_hours"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ladder": {"sizes": None}}, 'design="grid" needs sizes or total_flops, and not both'),
        ({"ladder": {"tokens": [1e6]}}, "grid needs tokens_per_param or tokens, and not both"),
        ({"ladder": {"budgets": [1e15]}}, 'budgets has no effect with design="grid"'),
        ({"ladder": {"size": [1e6]}}, "ladder.size=.*unknown key; did you mean sizes"),
        ({"ladder": {"name": None}}, "ladder.name is missing"),
        ({"base": BASE["base"] | {"optimizer": {"lr": 1e-3}}}, "base.optimizer.lr is set by the ladder"),
        ({"base": BASE["base"] | {"model": {"d_model": 64}}}, "base.model.d_model is set by the ladder"),
        ({"base": {"data": {}}}, "base.data.seq_len is missing"),
        ({"ladder": {"seeds": [1, 2, 1]}}, r"ladder.seeds=.*: 1 stands there twice; two points would be one run"),
        ({"sweep": {"lr": [0.5, 0.5]}}, r"sweep.lr=.*: 0.5 stands there twice"),
        ({"rules": BASE["rules"] | {"lr": {"base": 0}}}, "rules.lr.base=0: Input should be greater than 0"),
        (
            {"hardware": {"device": "h100-sxm", "peak_tflops": 5}},
            "peak_tflops=5 has no effect beside device='h100-sxm'",
        ),
    ],
)
def test_a_ladder_that_cannot_work_is_refused_by_key(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        ladder(tmp_path, **changes)


def test_sizes_too_near_for_their_shapes_and_too_small_for_their_heads_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"two points have the name"):
        points(ladder(tmp_path, ladder={"sizes": [1e6, 1.001e6]}), tmp_path)
    with pytest.raises(ConfigError, match="no Llama of head_dim=128 and aspect=24 has about 3e"):
        points(ladder(tmp_path, ladder={"sizes": [3e4]}, shape=BASE["shape"] | {"head_dim": 128}), tmp_path)
    with pytest.raises(ConfigError, match=r"tokens are 1.3 steps of rules.batch_tokens, 8,000,000; lower it"):
        points(ladder(tmp_path, rules={"batch_tokens": {"base": 8e6}}), tmp_path)


def test_a_key_of_the_base_that_no_run_has_is_refused_with_the_point(tmp_path):
    cfg = ladder(tmp_path, base=BASE["base"] | {"optimizer": {"beta": [0.9, 0.95]}})
    with pytest.raises(ConfigError, match=r"point t-n\S+: optimizer.beta=.* did you mean optimizer.betas"):
        points(cfg, tmp_path)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "ladder").glob("*.toml")), ids=lambda path: path.stem)
def test_the_ladders_that_ship_can_be_made(path, tmp_path):
    found = points(read_ladder(path), tmp_path)
    assert len(found) >= 20
    assert tomllib.loads(path.read_text())["ladder"]["name"] == path.stem.split("_")[0]
