"""One attempt of a run, in one process: what it writes, what it refuses, how it ends."""

import fcntl
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ranks import Rank, run_ranks, start_ranks
from small import make_dataset, small_config

from pretrain.config import Config
from pretrain.config_file import dump_config
from pretrain.dist import World, world
from pretrain.errors import ConfigError
from pretrain.metrics.jsonl import read_records
from pretrain.model.loss import LossSums
from pretrain.parallel.build import build_engine
from pretrain.train import checkpoint_folder as folder
from pretrain.train.checkpoint import load_model_weights, read_whole
from pretrain.train.evaluate import evaluate
from pretrain.train.optimizer import build_optimizer, describe_groups
from pretrain.train.run import train_in
from pretrain.train.run_folder import read_outcome
from pretrain.train.stop import Stop
from tests.pretrain.train import faulty


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with world(60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "walks")


def start(ranks: World, cfg: Config, **options: Any) -> str:
    return train_in(ranks, cfg, Stop(Path(cfg.run.dir)), **options)


def outcome(run: Path) -> dict[str, Any]:
    found = read_outcome(run)
    assert found is not None
    return found


def test_a_finished_run_leaves_what_the_interface_promises(tmp_path: Path, data: Path, ranks: World) -> None:
    cfg = small_config(
        tmp_path, data, train__steps=6, metrics__every=2, checkpoint__every=2, checkpoint__keep=2, eval__every=3
    )
    assert start(ranks, cfg) == "finished"
    assert outcome(tmp_path) | {"time": ""} == {
        "status": 0,
        "reason": "finished",
        "step": 6,
        "attempt": 0,
        "time": "",
    }
    lines = list(read_records(tmp_path / "metrics.jsonl"))
    train = [line for line in lines if "val_loss" not in line]
    assert [line["step"] for line in train] == [2, 4, 6]
    assert set(train[0]) >= {
        *("step", "attempt", "tokens", "targets", "loss", "grad_norm", "lr", "step_seconds", "tokens_per_second"),
        *("tokens_per_second_per_gpu", "tflops_per_gpu", "mfu_causal", "mfu_full", "hfu", "data_wait_fraction"),
        *("peak_gib", "epoch"),
    }
    assert train[0]["mfu_full"] is None, "a CPU has no known peak"
    assert train[-1]["lr"] == pytest.approx(1e-3), "the rate of the last update is the floor, and it is the one logged"
    assert train[-1]["targets"] <= train[-1]["tokens"] <= 6 * 12 * 16
    assert [line["step"] for line in lines if "val_loss" in line] == [3, 6]
    assert lines[-1]["val_bits_per_byte"] > 0
    events = [(e["event"], e["step"]) for e in read_records(tmp_path / "events.jsonl")]
    assert events == [("start", 0), ("save", 2), ("save", 4), ("save", 6), ("finish", 6)]
    assert [found.step for found in folder.list_checkpoints(tmp_path)] == [4, 6]
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["seed"] == 7
    assert (tmp_path / "config.toml").exists()
    # Starting a finished run again changes nothing and says so.
    assert start(ranks, cfg) == "finished"
    assert outcome(tmp_path)["attempt"] == 1
    assert [line["step"] for line in read_records(tmp_path / "metrics.jsonl")] == [line["step"] for line in lines]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"train__global_batch_size": 400}, ["rows", "global batch", "400"]),  # G13
        ({"model__vocab_size": 50}, ["model.vocab_size=50", "64"]),  # G2, G9
        ({"data__seq_len": 8}, ["seq_len", "8"]),
        ({"data__sources": [{"path": "/nowhere/at/all"}]}, ["/nowhere/at/all"]),
        ({"model__attention": "varlen"}, ['model.attention="varlen"', "CUDA", "auto"]),
        ({"init__from": "/nowhere/model"}, ["/nowhere/model"]),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(
    tmp_path: Path, data: Path, ranks: World, changes: dict[str, Any], parts: list[str]
) -> None:
    assert start(ranks, small_config(tmp_path, data, **changes)) == "refused"
    found = outcome(tmp_path)
    assert (found["status"], found["step"]) == (2, 0)
    for part in parts:
        assert part in found["message"]
    assert not (tmp_path / "metrics.jsonl").exists() or not list(read_records(tmp_path / "metrics.jsonl"))


def test_sources_of_different_tokenizers_are_refused(tmp_path: Path, data: Path, ranks: World) -> None:
    other = make_dataset(tmp_path / "other", tokenizer="cd" * 32)
    cfg = small_config(tmp_path / "run", data, data__sources=[{"path": str(data)}, {"path": str(other)}])
    assert start(ranks, cfg) == "refused"
    assert "tokenizer" in outcome(tmp_path / "run")["message"]


def test_a_damaged_shard_stops_the_run_by_name(tmp_path: Path, ranks: World) -> None:
    data = make_dataset(tmp_path / "data")
    shard = data / "shards" / "train-00000.tok"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    assert start(ranks, small_config(tmp_path / "run", data)) == "refused"
    assert "train-00000.tok" in outcome(tmp_path / "run")["message"]


def test_a_shard_found_damaged_in_mid_run_saves_the_steps_that_were_good(
    tmp_path: Path, ranks: World, monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    from data_prep.errors import DataError
    from pretrain.data.loader import Loader, Step

    plain = Loader.step

    def step(self: Loader, rows_consumed: int, rows: int | None = None) -> Step:
        if rows_consumed >= 3 * 12:
            raise DataError("train-00000.tok: block 7 does not match its checksum")
        return plain(self, rows_consumed, rows)

    monkeypatch.setattr(Loader, "step", step)
    assert start(ranks, small_config(tmp_path, data)) == "anomaly"
    found = outcome(tmp_path)
    assert (found["status"], found["step"]) == (70, 3)
    assert "step 4 has no data: train-00000.tok: block 7" in found["message"]
    assert [c.step for c in folder.list_checkpoints(tmp_path)] == [3]


def train_on_own_copies(run: str, copies: list[str]) -> str:
    with world(60) as ranks:
        return start(ranks, small_config(run, copies[ranks.rank], eval__every=3, checkpoint__every=2))


def test_a_validation_shard_damaged_for_one_rank_ends_all_with_the_good_steps_saved(tmp_path: Path) -> None:
    copies = [make_dataset(tmp_path / name) for name in ("node-0", "node-1")]
    shard = copies[1] / "shards" / "val-00000.tok"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    run = tmp_path / "run"
    assert run_ranks(train_on_own_copies, 2, str(run), list(map(str, copies))) == ["anomaly", "anomaly"]
    found = outcome(run)
    assert (found["status"], found["step"]) == (70, 3)
    assert found["message"].startswith(f"validation after step 3 has no data: {shard}"), found
    for rank in (0, 1):
        assert found["message"] in (run / "logs" / f"rank-{rank}.log").read_text()
    assert [c.step for c in folder.list_checkpoints(run)] == [2, 3]
    assert not [line for line in read_records(run / "metrics.jsonl") if "val_loss" in line]


def start_refused(config: Path, **env: str) -> list[Rank]:
    logs = [config.with_suffix(f".rank-{rank}.log") for rank in (0, 1)]
    return start_ranks(faulty.main, 2, ("none", "train", str(config)), logs, **env)


def test_a_layout_that_is_refused_ends_once_and_is_told_where_nobody_is_misled(tmp_path: Path, data: Path) -> None:
    """Two ranks of torchrun's each: it restarts those that do not leave with 0, and shows nobody their status."""
    cases = {  # folder, whether a launcher asked for a note, statuses, whether the folder's outcome is this start's
        "done": (["run.name = 'small'"], False, [0, 0], True),
        "other": (["run.name = 'other'"], True, [0, 0], False),
        "alive": (["run.name = 'small'"], False, [2, 0], False),
        "none": ([], False, [2, 2], False),
        "noted": ([], True, [0, 0], False),
    }
    old, started = '{"status": 0, "reason": "finished", "step": 9, "attempt": 0}', {}
    with ExitStack() as held:
        for name, (config, asked, *_) in cases.items():
            run = tmp_path / name
            for text in config:
                run.mkdir()
                (run / "config.toml").write_text(text)
                (run / "outcome.json").write_text(old)
            if name == "alive":
                fcntl.flock(held.enter_context(open(run / "lock", "w")), fcntl.LOCK_EX)
            file = tmp_path / f"{name}.toml"
            file.write_text(dump_config(small_config(run, data, train__global_batch_size=10)))
            env = {"TORCHELASTIC_RUN_ID": "a"} | ({"PRETRAIN_REFUSAL": str(tmp_path / f"{name}.note")} if asked else {})
            started[name] = start_refused(file, **env)
        statuses = {name: [rank.wait(120) for rank in ranks] for name, ranks in started.items()}
    message = "train.global_batch_size=10 is no multiple of 4"
    for name, (config, asked, expected, told) in cases.items():
        assert statuses[name] == expected, name
        said = [(tmp_path / f"{name}.rank-{rank}.log").read_text().count(message) for rank in (0, 1)]
        assert said == [1, int(expected[1] == 2)], name
        assert (tmp_path / name).exists() == bool(config)
        if asked:
            assert message in (tmp_path / f"{name}.note").read_text()
        if told:
            found = outcome(tmp_path / name)
            assert (found["status"], found["reason"], found["step"]) == (2, "refused", 0)
            assert message in found["message"]
        elif config:
            assert (tmp_path / name / "outcome.json").read_text() == old


def test_a_checkpoint_after_validation_holds_masters_and_moments(tmp_path: Path, data: Path, ranks: World) -> None:
    """Validation leaves gathered 16-bit weights behind, which are no masters and have no moments."""
    for name, every in (("with", 2), ("without", 0)):
        cfg = small_config(
            tmp_path / name, data, train__steps=2, eval__every=every, precision__compute="bf16", checkpoint__every=2
        )
        assert start(ranks, cfg) == "finished"
    expected, got = (whole_state(tmp_path / name) for name in ("without", "with"))
    for name, tensor in expected.items():
        assert tensor.dtype == got[name].dtype == torch.float32, name
        assert torch.equal(tensor, got[name]), name
    assert got["optim.exp_avg.norm.weight"].abs().max() > 0


def whole_state(run: Path) -> dict[str, torch.Tensor]:
    newest = folder.newest_whole(run)
    return read_whole(newest)


def test_a_folder_of_another_run_is_refused_and_left_alone(tmp_path: Path, data: Path, ranks: World) -> None:
    start(ranks, small_config(tmp_path, data, train__steps=2))
    before = (tmp_path / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match=r"holds the run named 'small', not run\.name='other'"):
        start(ranks, small_config(tmp_path, data, train__steps=2, run__name="other"))
    assert (tmp_path / "config.toml").read_bytes() == before
    assert outcome(tmp_path)["reason"] == "finished"


def test_resume_refuses_another_model_and_bends_the_course_only_by_name(
    tmp_path: Path, data: Path, ranks: World
) -> None:
    """G21: another length would change the curve, so the run stops and asks."""
    assert start(ranks, small_config(tmp_path, data, train__steps=4)) == "finished"
    assert start(ranks, small_config(tmp_path, data, train__steps=4, model__d_ff=96)) == "refused"
    assert "model.d_ff: 64 -> 96" in outcome(tmp_path)["message"]
    longer = small_config(tmp_path, data, train__steps=6)
    assert start(ranks, longer) == "refused"
    assert "train.steps: 4 -> 6" in outcome(tmp_path)["message"]
    assert "--allow-change train.steps" in outcome(tmp_path)["message"]
    assert start(ranks, longer, allow_change={"train.steps"}) == "finished"
    resume = [e for e in read_records(tmp_path / "events.jsonl") if e["event"] == "resume"][-1]
    assert resume["changed"] == {"train.steps": [4, 6]}
    assert start(ranks, longer, resume="never") == "refused"
    assert "--resume never" in outcome(tmp_path)["message"]


def test_other_data_is_refused_on_resume_and_moved_data_is_not(tmp_path: Path, ranks: World) -> None:
    first = make_dataset(tmp_path / "first")
    assert start(ranks, small_config(tmp_path / "run", first, train__steps=3)) == "finished"
    moved = first.rename(tmp_path / "moved")
    longer = {"train__steps": 4}
    assert start(ranks, small_config(tmp_path / "run", moved, **longer), allow_change={"train.steps"}) == "finished"
    other = make_dataset(tmp_path / "other", seed=1)
    assert start(ranks, small_config(tmp_path / "run", other, **longer)) == "refused"
    assert "contents of data.sources" in outcome(tmp_path / "run")["message"]


def test_a_loss_that_is_not_finite_ends_the_run_and_is_never_saved(tmp_path: Path, data: Path, ranks: World) -> None:
    cfg = small_config(
        tmp_path, data, optimizer__name="sgd", optimizer__lr=1e30, train__grad_clip=0.0, checkpoint__every=1
    )
    assert start(ranks, cfg) == "anomaly"
    found = outcome(tmp_path)
    assert found["status"] == 70
    assert "gradient norm is" in found["message"]
    assert "data.skip" in found["message"]
    event = next(e for e in read_records(tmp_path / "events.jsonl") if e["event"] == "anomaly")
    assert [c.step for c in folder.list_checkpoints(tmp_path)] == list(range(1, event["step"]))


def test_init_takes_weights_from_another_run_only_once(tmp_path: Path, data: Path, ranks: World) -> None:
    start(ranks, small_config(tmp_path / "a", data, train__steps=3))
    source = load_model_weights(folder.newest_whole(tmp_path / "a"))
    changes = {"init__from": str(tmp_path / "a"), "optimizer__lr": 1e-12, "optimizer__weight_decay": 0.0}
    cfg = small_config(tmp_path / "b", data, train__steps=2, **changes)
    assert start(ranks, cfg) == "finished"
    for name, tensor in load_model_weights(folder.newest_whole(tmp_path / "b")).items():
        assert torch.allclose(tensor, source[name], atol=1e-6), name
    assert next(iter(read_records(tmp_path / "b" / "metrics.jsonl")))["step"] == 1
    for less, dropped in (
        ({"model__n_layers": 1}, "9 tensors that this run's model would drop: model.layers.1."),
        ({"model__tie_embeddings": True}, "1 tensors that this run's model would drop: model.output.weight; "),
    ):
        assert start(ranks, small_config(tmp_path / "c", data, **changes, **less)) == "refused"
        assert dropped in outcome(tmp_path / "c")["message"]


def test_room_is_checked_before_the_first_step(
    tmp_path: Path, data: Path, ranks: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G30."""
    usage = folder.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert start(ranks, small_config(tmp_path, data)) == "refused"
    assert re.search(r"needs [\d,]+ bytes and 1,000 are free", outcome(tmp_path)["message"])


def test_decay_touches_matrices_and_embeddings_but_no_norm(ranks: World) -> None:
    """G22: zero gradients, rate 0.1, decay 0.1: matrices x 0.99, gains unchanged; a tied weight is counted once."""
    cfg = small_config("unused", "unused", optimizer__lr=0.1, optimizer__weight_decay=0.1, model__tie_embeddings=True)
    engine = build_engine(cfg, cfg.layout(1), ranks, lambda model: build_optimizer(model, cfg.optimizer))
    before = {name: p.full_tensor().clone() for name, p in engine.model.named_parameters()}  # type: ignore[attr-defined]
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    sums = engine.model(tokens, positions=tokens, labels=tokens)
    (sums.total * 0).backward()
    engine.step(0.1)
    for name, param in engine.model.named_parameters():
        expected = before[name] * (1 if name.endswith("norm.weight") else 0.99)
        assert torch.allclose(param.full_tensor(), expected, rtol=1e-6), name  # type: ignore[attr-defined]
    total = sum(p.numel() for p in engine.model.parameters())
    norms = 32 * 5
    assert f"no_decay (0): 5 tensors, {norms:,} parameters" in describe_groups(engine.model, 0.1)
    assert f"{total - norms:,} parameters" in describe_groups(engine.model, 0.1)


def test_names_in_a_state_are_plain_whatever_wraps_the_blocks(ranks: World) -> None:
    """G31."""
    keys = []
    for compiled in (False, True):
        for mode in ("none", "full", "selective"):
            cfg = small_config("unused", "unused", compile__enabled=compiled, activation_checkpoint__mode=mode)
            engine = build_engine(cfg, cfg.layout(1), ranks, lambda m, c=cfg: build_optimizer(m, c.optimizer))  # type: ignore[misc]
            keys.append(sorted(engine.state()))
    assert all(k == keys[0] for k in keys)
    assert "model.layers.1.attention.q_proj.weight" in keys[0]
    assert not [k for k in keys[0] if "_" in k.split(".")[-2] and k.split(".")[-2].startswith("_")]


def open_folders(runs: list[str], data: str) -> str:
    from pretrain.train.run_folder import open_run_folder

    with world(60) as ranks:
        try:
            return f"attempt {open_run_folder(small_config(runs[ranks.rank], data), ranks)}"
        except ConfigError as e:
            return str(e)


def test_ranks_that_see_different_folders_are_refused(tmp_path: Path, data: Path) -> None:
    """A run folder on each node's own disk would look fine from rank 0."""
    here, elsewhere = str(tmp_path / "run"), str(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    said = run_ranks(open_folders, 2, [here, elsewhere], str(data))
    assert "is not the same folder on rank 1" in said[1]
    assert "file system that all nodes share" in said[1]
    assert "rank 1" in said[0]


class StubBatch(NamedTuple):
    loss_sum: float
    targets: int


class StubEngine:
    """Knows the loss of each batch."""

    model = torch.nn.Module()

    def forward(self, batch: StubBatch) -> LossSums:
        total = torch.tensor(batch.loss_sum)
        return LossSums(total, total, torch.zeros(()), torch.tensor(batch.targets))


class StubValidation:
    num_bytes = 40

    def __init__(self, batches: list[StubBatch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[StubBatch]:
        return iter(self.batches)


Parts = list[list[tuple[float, int]]]
"""(loss sum, targets) of each batch of each rank."""


def evaluate_stubs(cases: list[Parts]) -> list[dict[str, float] | None]:
    with world(60) as ranks:
        stubs = [StubValidation([StubBatch(*batch) for batch in parts[ranks.rank]]) for parts in cases]
        return [evaluate(StubEngine(), stub, ranks) for stub in stubs]  # type: ignore[arg-type]


def test_validation_is_a_mean_over_targets_on_any_number_of_ranks(ranks: World) -> None:
    """G28: 9.2, neither 6.0 nor 18.4; also where a batch is part empty, or a rank has none."""
    one = StubValidation([StubBatch(2.0, 1), StubBatch(90.0, 9)])
    two: list[Parts] = [
        [[(2.0, 1)], [(90.0, 9)]],
        [[(2.0, 1), (90.0, 9)], []],
        [[(2.0, 1), (0.0, 0)], [(90.0, 9), (0.0, 0)]],
    ]
    found = [evaluate(StubEngine(), one, ranks)]  # type: ignore[arg-type]
    for of_rank in run_ranks(evaluate_stubs, 2, two):
        found += of_rank
    for metrics in found:
        assert metrics is not None
        assert metrics["val_loss"] == pytest.approx(9.2)
        assert metrics["val_bits_per_byte"] == pytest.approx(92 / 0.6931471805599453 / 40)


def test_validation_is_left_when_a_stop_comes(ranks: World) -> None:
    asked: list[int] = []
    batches = StubValidation([StubBatch(1.0, 1)] * 5)
    leave: Callable[[bool], bool] = lambda lost: len(asked) > 1 or asked.append(1) is not None  # noqa: E731
    assert evaluate(StubEngine(), batches, ranks, leave) is None  # type: ignore[arg-type]
