"""`pretrain plan` as a user meets it: worked figures, JSON keys, search, and messages."""

import argparse
import json
import subprocess
import sys

import pytest

from pretrain.errors import ConfigError
from pretrain.plan.cli import add_parser

CONFIG = """
[run]
name = "llama3_8b"
dir = "runs/llama3_8b"
[model]
preset = "llama3_8b"
[data]
sources = [ { path = "data/web" } ]
seq_len = 8192
[train]
tokens = 15e12
global_batch_size = 1024
[optimizer]
lr = 3e-4
"""


@pytest.fixture
def run_plan(tmp_path, capsys):
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)

    def run(*arguments: str) -> str:
        parser = argparse.ArgumentParser()
        add_parser(parser.add_subparsers())
        args = parser.parse_args(["plan", str(config), *arguments])
        assert args.run(args) == 0
        return capsys.readouterr().out

    return run


def test_json_reproduces_the_worked_figures_of_the_8b_model(run_plan):
    plan = json.loads(run_plan("--json", "--gpu-hours", "1.3e6", "--power-watts", "700", "--grid-kg-per-kwh", "0.43"))
    assert plan["parameters"] == {
        "total": 8_030_261_248,
        "embedding": 525_336_576,
        "head": 525_336_576,
        "attention": 32 * 41_943_040,
        "mlp": 32 * 176_160_768,
        "norms": 32 * 8_192 + 4096,
        "matmul": 7_504_658_432,
    }
    assert plan["parameters_per_block"] == {
        "attention": 41_943_040,
        "mlp": 176_160_768,
        "norms": 8_192,
        "total": 218_112_000,
    }
    assert plan["flops_per_token"]["full"] / 1e9 == pytest.approx(57.91, rel=1e-3)
    assert plan["flops_per_token"]["causal"] / 1e9 == pytest.approx(51.47, rel=1e-3)
    assert plan["prefill_flops"] == pytest.approx(1.50e14, rel=4e-3)
    assert plan["decode_flops_blocks"] == pytest.approx(1.83e10, rel=4e-3)
    assert plan["decode_flops_head"] == pytest.approx(1.05e9, rel=4e-3)
    assert plan["decode_flops"] == plan["decode_flops_blocks"] + plan["decode_flops_head"]
    assert plan["kv_cache_bytes_per_token"] == 128 * 1024
    assert plan["kv_cache_gib"] == {"8192": 1.0, "32768": 4.0, "128000": 15.625}
    assert plan["train_flops"] == pytest.approx(7.23e23, rel=1e-3)
    assert plan["gpu_hours"] == 1.3e6
    assert plan["energy_kwh"] == pytest.approx(910e3)
    assert plan["co2e_kg"] == pytest.approx(390e3, rel=5e-3)
    assert plan["tflops_per_gpu"] == pytest.approx(154, rel=5e-3)


def test_prefill_at_other_lengths_follows_context(run_plan):
    for context, expected in ((1024, 1.48e13), (128, 1.80e12)):
        plan = json.loads(run_plan("--json", "--context", str(context)))
        assert plan["prefill_flops_blocks"] == pytest.approx(expected, rel=4e-3)


def test_four_times_the_kv_heads_take_four_times_the_cache(run_plan):
    plan = json.loads(run_plan("model.n_kv_heads=32", "--json"))
    assert plan["kv_cache_gib"]["8192"] == 4.0


def test_json_has_the_promised_keys(run_plan):
    plan = json.loads(run_plan("--json", "--gpus", "16", "--device", "h200-sxm"))
    assert {
        "parameters", "flops_per_token", "prefill_flops", "decode_flops", "kv_cache_bytes_per_token", "train_flops",
        "gpu_hours", "energy_kwh", "co2e_kg", "memory_gib", "step_seconds", "tokens_per_second_per_gpu", "mfu",
        "limited_by",
    } <= plan.keys()  # fmt: skip
    parts = dict(plan["memory_gib"])
    assert parts.pop("peak") == pytest.approx(sum(parts.values()))
    assert set(plan["mfu"]) == {"full", "causal"}
    assert plan["layout"]["dp_shard"] == plan["gpus"] == 16
    assert plan["device"] == "h200-sxm"


def test_hours_follow_from_a_stated_mfu_and_half_of_it_takes_twice_as_long(run_plan):
    hours = [json.loads(run_plan("--json", "--mfu", mfu))["gpu_hours"] for mfu in ("0.4", "0.2")]
    assert hours[0] == pytest.approx(7.227e23 / (0.4 * 989.4e12) / 3600, rel=1e-3)
    assert hours[1] == pytest.approx(2 * hours[0])


def test_steps_and_tokens_describe_the_same_run(run_plan):
    by_tokens = json.loads(run_plan("train.tokens=41943040e3", "--json"))
    assert by_tokens["steps"] == 5000
    assert by_tokens["train_tokens"] == 5000 * 1024 * 8192


def test_a_plan_says_that_what_the_compiler_recomputes_is_not_predicted(run_plan):
    chosen = ["activation_checkpoint.mode=none", "activation_checkpoint.memory_budget=0.5"]
    assert "recompute planned as none, not as memory_budget 0.5 will have it" in run_plan(*chosen)
    assert json.loads(run_plan(*chosen, "--json"))["layout"]["memory_budget"] == 0.5
    assert "recompute selective" in run_plan()


def test_the_table_states_conventions_and_fits_a_page(run_plan):
    text = run_plan()
    for words in (
        "8,030,261,248",
        "57.91 G",
        "causal 51.47 G",
        "6 N T",
        "128 KiB / token",
        "15.625 GiB",
        "MFU",
        "kg/kWh",
    ):
        assert words in text
    assert len(text.splitlines()) < 30
    assert "Does not fit" not in text


def test_a_job_that_does_not_fit_says_so_with_the_numbers_and_the_mend(run_plan):
    text = run_plan("train.micro_batch_size=4", "--gpus", "1")
    assert "Does not fit" in text
    assert "74.5 GiB" in text
    assert "train.micro_batch_size" in text


def test_search_ranks_layouts_that_fit_and_gives_the_overrides_that_make_each(run_plan):
    result = json.loads(run_plan("--json", "--search", "--gpus", "64"))
    speeds = [layout["tokens_per_second_per_gpu"] for layout in result["layouts"]]
    assert speeds == sorted(speeds, reverse=True)
    assert all(layout["fits"] for layout in result["layouts"])
    best = result["layouts"][0]
    again = json.loads(run_plan(*best["overrides"], "--json", "--gpus", "64"))
    assert again["tokens_per_second_per_gpu"] == pytest.approx(best["tokens_per_second_per_gpu"])
    assert again["memory_gib"] == best["memory_gib"]
    assert "activation_checkpoint.mode=" in run_plan("--search", "--gpus", "64")


def test_search_of_a_zero_config_keeps_its_engine(run_plan):
    result = json.loads(run_plan("parallel.engine=zero", "parallel.zero_stage=3", "--json", "--search", "--gpus", "8"))
    assert result["layouts"]
    assert not any("dp_shard" in text for layout in result["layouts"] for text in layout["overrides"])


def test_search_where_nothing_fits_names_the_least_memory_needed(run_plan):
    with pytest.raises(ConfigError, match=r"none of \d+ layouts fits 8 x a100-sxm-40gb .*take more GPUs"):
        run_plan("model.preset=llama3_70b", "--search", "--gpus", "8", "--device", "a100-sxm-40gb")


def test_gpus_that_do_not_divide_the_batch_are_refused_with_the_numbers(run_plan):
    with pytest.raises(ConfigError, match=r"global_batch_size=1024.*12"):
        run_plan("--gpus", "12")


def test_an_unknown_device_is_refused_with_the_known_ones(run_plan):
    with pytest.raises(ConfigError, match=r"'v100'.*h100-sxm"):
        run_plan("--device", "v100")


def test_planning_loads_no_torch(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    code = (
        "import argparse, sys\n"
        "from pretrain.plan.cli import add_parser\n"
        "parser = argparse.ArgumentParser()\n"
        "add_parser(parser.add_subparsers())\n"
        f"args = parser.parse_args(['plan', {str(config)!r}, '--search'])\n"
        "args.run(args)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
