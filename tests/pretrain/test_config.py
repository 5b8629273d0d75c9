"""Config files: what is accepted, what is refused and what the message says."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain.config import Config
from pretrain.config_file import dump_config, load_config, parse_config
from pretrain.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
BASE = """
[run]
name = "base"
dir = "runs/base"
[model]
preset = "llama3_8b"
[data]
sources = [{ path = "data" }]
seq_len = 8192
[train]
steps = 100_000
global_batch_size = 1024
[optimizer]
lr = 3e-4
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return path


def shipped() -> list[Path]:
    return sorted(p for p in (ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", shipped(), ids=lambda p: p.name)
def test_every_shipped_config_loads_and_survives_being_written(path: Path) -> None:
    cfg = load_config(path)
    again = parse_config(__import__("tomllib").loads(dump_config(cfg)))
    assert again == cfg


def test_there_is_a_config_for_every_size_that_people_start_from() -> None:
    names = {path.stem for path in shipped()}
    assert {"demo", "debug", "llama3_8b", "llama3_70b", "llama3.1_405b", "llama2_7b", "llama1_7b"} <= names


def test_numbers_are_numbers_by_the_fields_type_and_text_stays_text(base: Path) -> None:
    """G46."""
    for text in ("1e-4", "1E-4", '"1e-4"', "0.0001"):
        assert load_config(base, [f"optimizer.lr={text}"]).optimizer.lr == 1e-4
    assert load_config(base, ["optimizer.lr=1e4"]).optimizer.lr == 1e4
    assert load_config(base, ["train.steps=1e3", "schedule.warmup_steps=10"]).train.steps == 1000
    assert load_config(base, ["train.steps=16_384"]).train.steps == 16384
    assert load_config(base, ["data.mask_documents=on"]).data.mask_documents is True
    assert load_config(base, ["run.name=08"]).run.name == "08"
    assert load_config(base, ["run.name=1e3"]).run.name == "1e3"


REFUSED = [
    ("train.stepz=5", ["train.stepz", "5", "train.steps"]),
    ("train.learning_rate=1", ["train.learning_rate", "optimizer.lr"]),
    ("optimiser.lr=1", ["optimiser", "optimizer"]),
    ("data.sources=[{path='x', wieght=2}]", ["wieght", "weight"]),
    ("train.steps=1.5", ["train.steps", "1.5", "whole number"]),
    ("train.steps=true", ["train.steps", "True", "number"]),
    ("train.steps=0", ["train.steps", "0", "greater than or equal to 1"]),
    ("optimizer.lr=nan", ["optimizer.lr", "nan", "finite"]),
    ("optimizer.lr=fast", ["optimizer.lr", "'fast'", "number"]),
    ("compile.enabled=1", ["compile.enabled", "1", "true or false"]),
    ("schedule.name=cosin", ["schedule.name", "'cosin'", "cosine"]),
    ("model.preset=llama3_9b", ["llama3_9b", "llama3_8b"]),
    ("model.n_heads=7", ["d_model=4096", "n_heads=7", "head_dim"]),
    ("model.n_kv_heads=5", ["n_heads=32", "n_kv_heads=5"]),
    ("data.seq_len=9000", ["data.seq_len=9000", "model.max_seq_len=8192"]),
    ("train.tokens=1e9", ["train.steps", "train.tokens", "exactly one"]),
    ("schedule.warmup_steps=200_000", ["schedule.warmup_steps=200000", "100000 steps"]),
    ("parallel.zero_stage=2", ["parallel.zero_stage", 'engine="fsdp"', "remove"]),
    ("deepspeed.steps_per_print=5", ["[deepspeed]", 'engine="fsdp"']),
    ("deepspeed.fp16={enabled=true} + parallel.engine=zero", ["deepspeed.fp16", "precision.compute"]),
    ("deepspeed.foo=1 + parallel.engine=zero", ["deepspeed.foo=1", "zero_optimization"]),
    ("deepspeed.zero_optimization={stage=1} + parallel.engine=zero", ["zero_optimization", "zero_stage=3"]),
    (
        "deepspeed.zero_optimization.reduce_bucket_size=big + parallel.engine=zero",
        ["deepspeed.zero_optimization.reduce_bucket_size='big'", "a whole number of at least 1"],
    ),
    ("parallel.zero_stage=true + parallel.engine=zero", ["parallel.zero_stage", "True", "number"]),
    ("run.timeout_seconds=1e300", ["run.timeout_seconds", "1e+300", "less than or equal to 2592000"]),
    ("run.hang_seconds=1e10", ["run.hang_seconds", "less than or equal to 2592000"]),
    ("optimizer.momentum=0.9", ["optimizer.momentum", "adamw"]),
    ("metrics.wandb_mode=offline", ["metrics.wandb_mode", "metrics.sinks"]),
    ("init.load=all", ["init.load", "init.from"]),
    ("parallel.dp_shard=0", ["dp_shard=0", "-1"]),
    ("data.skip=[[5, 3]]", ["skip=[5, 3]"]),
    ("anomalies.budget=3", ["anomalies.budget", 'anomalies.policy="raise"']),
    ("train", ["'train'", "section.key=value"]),
]


@pytest.mark.parametrize(("override", "parts"), REFUSED, ids=[override for override, _ in REFUSED])
def test_a_wrong_setting_is_refused_with_key_values_and_mend(base: Path, override: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(base, override.split(" + "))
    for part in parts:
        assert part in str(caught.value)


def test_missing_sizes_and_missing_files_name_the_way_out(tmp_path: Path, base: Path) -> None:
    base.write_text(BASE.replace('preset = "llama3_8b"', "d_model = 64"))
    with pytest.raises(ConfigError, match=r"model\.vocab_size is missing.*model\.preset"):
        load_config(base)
    with pytest.raises(ConfigError, match=r"bass\.toml: no such config file; did you mean .*base\.toml"):
        load_config(tmp_path / "bass.toml")
    base.write_text("[run]\nname = 08\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(base)


def test_zero_stage_3_has_no_compiled_blocks_unless_asked_and_then_it_is_refused(base: Path) -> None:
    assert load_config(base, ["parallel.engine=zero"]).compile.enabled is False
    assert load_config(base, ["parallel.engine=zero", "parallel.zero_stage=2"]).compile.enabled is True
    with pytest.raises(ConfigError, match=r"compile\.enabled=true.*zero_stage=3"):
        load_config(base, ["parallel.engine=zero", "compile.enabled=true"])


def test_a_size_beside_a_preset_overrides_it_and_tokens_become_steps(base: Path) -> None:
    cfg = load_config(base, ["model.n_layers=2"])
    assert (cfg.model.n_layers, cfg.model.d_ff) == (2, 14336)
    raw = BASE.replace("steps = 100_000", "tokens = 1.0e12")
    base.write_text(raw)
    assert load_config(base).steps == -(-(10**12) // (1024 * 8192))


@pytest.mark.parametrize(
    ("changes", "world", "parts"),
    [
        ({"dp_shard": 6, "dp_replicate": 2}, 16, ["dp_shard=6", "dp_replicate=2", "is 12", "16", "launch 12 ranks"]),
        ({"dp_replicate": 3}, 16, ["dp_replicate=3", "WORLD_SIZE=16"]),
        ({}, 3, ["global_batch_size=1024", "3 rows", "1023"]),
    ],
)
def test_a_world_that_does_not_divide_is_refused_with_both_numbers(
    base: Path, changes: dict[str, int], world: int, parts: list[str]
) -> None:
    cfg = load_config(base, [f"parallel.{key}={value}" for key, value in changes.items()])
    with pytest.raises(ConfigError) as caught:
        cfg.layout(world)
    for part in parts:
        assert part in str(caught.value)


def test_layout_shares_rows_among_replicas_and_micro_batches(base: Path) -> None:
    layout = load_config(base, ["parallel.dp_replicate=2", "train.micro_batch_size=4"]).layout(16)
    assert (layout.dp_replicate, layout.dp_shard, layout.dp, layout.accumulation) == (2, 8, 16, 16)


def test_a_wrong_key_stops_the_command_within_seconds_with_status_2(base: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pretrain", "train", str(base), "train.stepz=5"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "train.stepz='5'" in done.stderr.replace("=5", "='5'")
    assert "did you mean train.steps?" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 60  # five seconds on an idle machine: torch is not loaded


def test_a_tilde_in_a_path_is_the_home_folder_wherever_paths_are_written(base: Path) -> None:
    cfg = load_config(base, ["run.dir=~/runs/x", 'data.sources=[{path="~/data"}]', "init.from=~/old"])
    home = str(Path.home())
    assert (cfg.run.dir, cfg.data.sources[0].path, cfg.init.from_) == (f"{home}/runs/x", f"{home}/data", f"{home}/old")


def test_configs_are_frozen(base: Path) -> None:
    cfg: Config = load_config(base)
    with pytest.raises(Exception, match="frozen"):
        cfg.train.steps = 3  # type: ignore[misc]
