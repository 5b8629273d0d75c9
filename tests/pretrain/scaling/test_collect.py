import json
from pathlib import Path

import pytest

from pretrain.config_file import dump_config, parse_config
from pretrain.errors import ConfigError
from pretrain.metrics.flops import flops_per_token, parameter_counts
from pretrain.scaling.collect import Wanted, collect
from pretrain.scaling.columns import points_of
from pretrain.scaling.table import read_table, write_table


def make_run(folder: Path, *, steps: int = 100, reason: str | None = "finished", **changes) -> Path:
    """A run folder as the trainer leaves it: windows of 10 steps, validation every 50."""
    sizes = {"vocab_size": 256, "d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 96, "max_seq_len": 64}
    cfg = parse_config(
        {
            "run": {"name": folder.name, "dir": str(folder)},
            "model": sizes,
            "data": {"sources": [{"path": "x"}], "seq_len": 64},
            "train": {"steps": 100, "global_batch_size": 4},
            "optimizer": {"lr": 1e-3},
            "schedule": {"warmup_steps": 5},
        }
    )
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(cfg))
    lines = []
    for step in range(10, steps + 1, 10):
        line = {"step": step, "attempt": 0, "tokens": 250 * step, "targets": 240 * step, "loss": 5 - 0.01 * step}
        lines.append(line | {"epoch": step / 50, "grad_noise_scale": 10.0 * step} | changes.get("line", {}))
        if step % 50 == 0:
            lines.append({"step": step, "attempt": 0, "val_loss": 5.1 - 0.01 * step, "val_bits_per_byte": 2.0})
    lines += changes.get("more", [])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + changes.get("torn", ""))
    events = [{"event": "start", "step": 0}, *({"event": event, "step": 3} for event in changes.get("events", []))]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if reason is not None:
        (folder / "outcome.json").write_text(json.dumps({"reason": reason, "status": 0, "step": steps, "attempt": 0}))
    return folder


def test_a_finished_run_is_one_row_with_counts_by_the_named_convention(tmp_path):
    (row,) = collect([make_run(tmp_path / "a")])
    model = parse_config({**_raw(tmp_path / "a")}).model
    counts = parameter_counts(model)
    assert row["params"] == counts.total - counts.embedding - counts.head
    assert (row["params_total"], row["params_matmul"]) == (counts.total, counts.matmul)
    assert (row["tokens"], row["step"], row["kind"]) == (25_000, 100, "final")
    assert row["flops"] == 25_000 * flops_per_token(model, 64, causal=True)
    assert (row["loss"], row["loss_of"]) == (pytest.approx(4.1), "validation")
    assert row["train_loss"] == pytest.approx(4.0)
    assert row["unique_tokens"] == 12_500  # two epochs
    assert row["batch_tokens"] == 256
    rows = collect([tmp_path / "a"], Wanted(intermediate=True))
    assert [row["grad_noise_scale"] for row in rows] == [400.0, 800.0]  # medians of the later half of the way there
    (full,) = collect([tmp_path / "a"], Wanted(flops="full"))
    assert full["flops"] == 25_000 * flops_per_token(model, 64, causal=False)


def _raw(folder: Path) -> dict:
    import tomllib

    return tomllib.loads((folder / "config.toml").read_text())


def test_intermediate_validations_and_smoothing_are_given_when_asked_for(tmp_path):
    make_run(tmp_path / "a")
    rows = collect([tmp_path / "a"], Wanted(intermediate=True))
    assert [(row["kind"], row["step"], row["tokens"]) for row in rows] == [
        ("intermediate", 50, 12_500),
        ("final", 100, 25_000),
    ]
    assert rows[0]["loss"] == pytest.approx(4.6)
    (smooth,) = collect([tmp_path / "a"], Wanted(smooth=2))
    assert smooth["loss"] == pytest.approx((4.6 + 4.1) / 2)


def test_the_tail_of_training_losses_is_averaged_where_nothing_was_validated(tmp_path):
    make_run(tmp_path / "a")
    path = tmp_path / "a" / "metrics.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "val_loss" not in line))
    (row,) = collect([tmp_path / "a"], Wanted(tail=0.25))
    assert (row["loss"], row["loss_of"]) == (pytest.approx((4.2 + 4.1 + 4.0) / 3), "training")


def test_the_last_attempt_of_a_step_counts_and_torn_lines_do_not(tmp_path):
    more = [{"step": 100, "attempt": 1, "tokens": 25_000, "targets": 24_000, "loss": 3.5, "epoch": 2.0}]
    make_run(tmp_path / "a", more=more, torn='{"step": 110, "lo')
    (row,) = collect([tmp_path / "a"])
    assert row["train_loss"] == 3.5


@pytest.mark.parametrize("reason", ["preempted", None])
def test_a_run_that_has_not_finished_is_refused_unless_asked_for(tmp_path, reason):
    make_run(tmp_path / "a", steps=50, reason=reason)
    with pytest.raises(
        ConfigError, match=r"not finished .outcome '\w+', step 50 of 100.; go on with it, or add --unfinished"
    ):
        collect([tmp_path / "a"])
    (row,) = collect([tmp_path / "a"], Wanted(unfinished=True))
    assert row["tokens"] == 12_500


def test_a_run_that_met_an_anomaly_is_refused_unless_asked_for(tmp_path):
    make_run(tmp_path / "a", events=["anomaly", "skip"])
    make_run(tmp_path / "b", events=["rollback"])
    with pytest.raises(ConfigError, match=r"a: met anomaly, skip .*; .*b: met rollback"):
        collect([tmp_path / "a", tmp_path / "b"])
    assert len(collect([tmp_path / "a", tmp_path / "b"], Wanted(anomalous=True))) == 2


def test_a_loss_that_is_no_number_is_refused(tmp_path):
    make_run(tmp_path / "a", line={"loss": None})
    with pytest.raises(ConfigError, match="last training loss is no number"):
        collect([tmp_path / "a"])


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"{tmp_path} is no run's folder: it has no config.toml"):
        collect([tmp_path])


def test_a_ladders_folder_stands_for_its_runs(tmp_path):
    make_run(tmp_path / "a")
    ladder = tmp_path / "ladder"
    ladder.mkdir()
    (ladder / "a.toml").write_text((tmp_path / "a" / "config.toml").read_text())
    (ladder / "table.json").write_text(json.dumps({"points": [{"name": "a", "config": "a.toml"}]}))
    assert [row["run"] for row in collect([ladder])] == ["a"]


def test_the_table_goes_into_a_fit_as_it_is(tmp_path):
    write_table(tmp_path / "table.csv", collect([make_run(tmp_path / "a"), make_run(tmp_path / "b")]))
    points = points_of(read_table(tmp_path / "table.csv"), "params", "tokens", "loss", unique="unique_tokens")
    assert points.tokens.tolist() == [25_000, 25_000]
    assert points.unique.tolist() == [12_500, 12_500]
