"""Files, console and trackers; wandb is a fake that records, fails or hangs, and once the real one, offline."""

import io
import json
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from pretrain.errors import ConfigError
from pretrain.metrics import sinks as sinks_module
from pretrain.metrics.console import Console, duration, format_line
from pretrain.metrics.jsonl import JsonLines, encode, read_records
from pretrain.metrics.sinks import Sinks, Wandb, check_sinks, open_sinks

RECORD = {
    "step": 1200,
    "attempt": 0,
    "tokens": 10**9,
    "targets": 10**9,
    "loss": 2.431,
    "grad_norm": 0.41,
    "lr": 2.9e-4,
    "step_seconds": 5.6,
    "tokens_per_second": 94_960.0,
    "tokens_per_second_per_gpu": 11_870.0,
    "mfu_causal": 0.412,
    "mfu_full": 0.46,
    "hfu": 0.5,
    "data_wait_fraction": 0.003,
    "peak_gib": 61.4,
    "epoch": 0.1,
}


# Files


def test_a_record_is_one_strict_line_of_json(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.write({"step": 1, "loss": float("nan"), "nested": [float("inf"), {"x": -float("inf")}], "text": "a\nb"})
    sink.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.count("\n") == 1
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text) == {"step": 1, "loss": None, "nested": [None, {"x": None}], "text": "a\nb"}


def test_tensors_numpy_scalars_and_paths_become_plain_values(tmp_path):
    import numpy as np
    import torch

    record = {"a": torch.tensor(1.5), "b": np.float32(2.5), "c": np.int64(3), "d": tmp_path, "e": True}
    assert json.loads(encode(record)) == {"a": 1.5, "b": 2.5, "c": 3, "d": str(tmp_path), "e": True}


def test_a_line_torn_by_a_crash_stays_alone_on_its_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    sink = JsonLines(path)
    sink.write({"step": 3})
    sink.write({"step": 4})
    sink.close()
    assert [record["step"] for record in read_records(path)] == [1, 3, 4]


def test_writers_that_share_a_file_do_not_mix_their_lines(tmp_path):
    path = tmp_path / "events.jsonl"

    def write(rank: int) -> None:
        sink = JsonLines(path)
        for i in range(200):
            sink.write({"rank": rank, "i": i, "pad": "x" * 200})
        sink.close()

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = read_records(path)
    assert len(records) == 800
    assert all([r["i"] for r in records if r["rank"] == rank] == list(range(200)) for rank in range(4))


def test_events_carry_time_step_and_details_and_every_rank_may_write_them(tmp_path):
    for rank in (0, 1):
        sinks = open_sinks(["jsonl"], tmp_path, total_steps=10, rank=rank)
        sinks.event("bad_shard", 7, path="a.tok")
        sinks.write({"step": 7})
        sinks.close()
    events = read_records(tmp_path / "events.jsonl")
    assert [(e["event"], e["step"], e["path"]) for e in events] == [("bad_shard", 7, "a.tok")] * 2
    assert all(abs(e["time"] - time.time()) < 60 for e in events)
    assert read_records(tmp_path / "metrics.jsonl") == [{"step": 7}]


def test_a_sink_that_fails_is_named_once_and_the_others_go_on(tmp_path):
    class Full:
        def write(self, record):
            raise OSError(28, "No space left on device")

        def close(self):
            raise OSError(28, "No space left on device")

    stream = io.StringIO()
    good = JsonLines(tmp_path / "good.jsonl")
    sinks = Sinks({"metrics.jsonl": Full(), "good": good}, None, Console(10, stream))
    for step in range(3):
        sinks.write({"step": step})
    sinks.close()
    assert stream.getvalue().count("metrics.jsonl failed") == 1
    assert "No space left" in stream.getvalue()
    assert len(read_records(tmp_path / "good.jsonl")) == 3


# Console


def test_the_console_line_has_the_house_form():
    line = format_line(RECORD, 50_000)
    assert line == (
        "step  1200/50000 | loss  2.4310 | gnorm  0.41 | lr 2.9e-04 | tok/s/gpu  11,870 | mfu  41.2% "
        "| data  0.3% | mem  61.4 GiB | eta 3d 3h"
    )


def test_the_console_line_leaves_mfu_out_where_there_is_none_and_marks_what_is_missing():
    line = format_line(RECORD | {"mfu_causal": None, "loss": None}, 50_000)
    assert "mfu" not in line
    assert "loss       - |" in line
    assert "nan" in format_line(RECORD | {"loss": float("nan")}, 50_000)


def test_lines_in_a_file_are_plain_and_aligned():
    stream = io.StringIO()
    console = Console(50_000, stream)
    console.write(RECORD)
    console.write(RECORD | {"step": 50_000, "loss": 10.5, "tokens_per_second_per_gpu": 950.0})
    console.write({"step": 1200, "val_loss": 2.5, "val_bits_per_byte": 0.91})
    console.close()
    first, second, third = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()
    assert [i for i, c in enumerate(first) if c == "|"] == [i for i, c in enumerate(second) if c == "|"]
    assert third == "step  1200/50000 | val_loss 2.5000 | bits/byte 0.9100"


def test_a_terminal_gets_a_bar_in_place_and_messages_stay_above_it():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    console = Console(2400, stream)
    console.write(RECORD)
    console.say("saved step 1200")
    console.write(RECORD | {"step": 2400})
    console.close()
    text = stream.getvalue()
    assert text.count("\n") == 2
    assert "█" * 10 + "░" * 10 in text
    assert "█" * 20 in text
    assert "\r\x1b[Ksaved step 1200\n" in text


def test_a_closed_console_does_not_stop_a_run():
    stream = io.StringIO()
    console = Console(10, stream)
    stream.close()
    console.write(RECORD)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(42, "42s"), (483, "8m 03s"), (18_720, "5h 12m"), (273_600, "3d 4h"), (float("nan"), "-")],
)
def test_a_duration_is_said_in_its_two_largest_units(seconds, text):
    assert duration(seconds) == text


# wandb


class FakeWandb(ModuleType):
    """Records what is asked of it; drops points whose internal step does not grow, as the real one does."""

    def __init__(self, init=None, log=None) -> None:
        super().__init__("wandb")
        self.inits: list[dict] = []
        self.axes: list[tuple] = []
        self.points: list[dict] = []
        self.finished = 0
        self._init, self._log = init, log
        self.Settings = SimpleNamespace

    def init(self, **options):
        self.inits.append(options)
        if self._init is not None:
            self._init(options)
        internal = -1

        def log(point, step=None):
            nonlocal internal
            if self._log is not None:
                self._log(point)
            if step is not None and step <= internal:
                return
            internal = internal + 1 if step is None else step
            self.points.append(point)

        def finish():
            self.finished += 1

        return SimpleNamespace(log=log, finish=finish, define_metric=lambda *a, **k: self.axes.append((a, k)))

    def teardown(self):
        pass


@pytest.fixture
def fake(monkeypatch):
    def install(**behaviour) -> FakeWandb:
        module = FakeWandb(**behaviour)
        monkeypatch.setitem(sys.modules, "wandb", module)
        return module

    return install


def run_with_wandb(run_dir, steps, stream=None, mode="online", **options):
    sinks = open_sinks(["wandb"], run_dir, total_steps=300, wandb_mode=mode, stream=stream or io.StringIO(), **options)
    for step in steps:
        sinks.write({"step": step, "loss": 1.0 / step, "tokens": 100 * step})
    sinks.close()


def test_a_resume_from_an_older_checkpoint_keeps_the_run_and_loses_no_point(fake, tmp_path):
    """G41: Saved at 200, killed at 212, resumed: points 201-212 come a second time and are kept."""
    wandb = fake()
    run_with_wandb(tmp_path, range(1, 213))
    run_with_wandb(tmp_path, range(201, 301))
    first, second = wandb.inits
    assert first["id"] == second["id"] == (tmp_path / "wandb_id").read_text().strip()
    assert first["resume"] == second["resume"] == "allow"
    assert [point["step"] for point in wandb.points] == [*range(1, 213), *range(201, 301)]
    assert all(point["tokens"] == 100 * point["step"] for point in wandb.points)
    assert (("*",), {"step_metric": "step"}) in wandb.axes
    assert wandb.finished == 2


def test_only_rank_0_speaks_to_wandb(fake, tmp_path):  # G42
    wandb = fake()
    for rank in range(2):
        run_with_wandb(tmp_path, [1], rank=rank)
    assert len(wandb.inits) == 1
    assert len(wandb.points) == 1


def test_disabled_needs_nothing_and_starts_nothing(monkeypatch, tmp_path):  # G42
    monkeypatch.setitem(sys.modules, "wandb", None)
    stream = io.StringIO()
    run_with_wandb(tmp_path, [1], stream, mode="disabled")
    assert stream.getvalue() == ""
    assert not (tmp_path / "wandb_id").exists()


def test_wandb_not_installed_warns_once_and_training_goes_on(monkeypatch, tmp_path):  # G42
    monkeypatch.setitem(sys.modules, "wandb", None)
    stream = io.StringIO()
    run_with_wandb(tmp_path, range(1, 50), stream)
    assert stream.getvalue().count("not installed") == 1


def test_online_without_a_network_warns_and_writes_offline_files_instead(fake, tmp_path):  # G42
    def unreachable(options):
        if options["mode"] == "online":
            raise TimeoutError("network is down")

    wandb, stream = fake(init=unreachable), io.StringIO()
    run_with_wandb(tmp_path, [1, 2, 3], stream)
    assert [options["mode"] for options in wandb.inits] == ["online", "offline"]
    assert len({options["id"] for options in wandb.inits}) == 1
    assert [point["step"] for point in wandb.points] == [1, 2, 3]
    assert stream.getvalue().count("network is down") == 1


def test_a_start_that_hangs_delays_neither_steps_nor_the_end(fake, tmp_path):  # G42
    release, stream = threading.Event(), io.StringIO()
    fake(init=lambda options: release.wait(60))
    sink = Wandb(
        tmp_path, name="", project="p", mode="online", config={}, say=stream.write, queue_size=5, close_timeout=0.2
    )
    start = time.monotonic()
    for step in range(100):
        sink.write({"step": step})
    sink.close()
    assert time.monotonic() - start < 5
    assert stream.getvalue().count("does not keep up") == 1
    assert stream.getvalue().count("left behind") == 1
    release.set()


def test_points_that_fail_are_counted_and_named_once(fake, tmp_path):  # G42
    def broken(point):
        if point["step"] % 2:
            raise RuntimeError("gone")

    wandb, stream = fake(log=broken), io.StringIO()
    run_with_wandb(tmp_path, range(1, 11), stream)
    assert [point["step"] for point in wandb.points] == [2, 4, 6, 8, 10]
    assert stream.getvalue().count("gone") == 1
    assert "missed 5 points" in stream.getvalue()


def test_the_real_wandb_writes_offline_files_without_a_network(monkeypatch, tmp_path):  # G42
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    stream = io.StringIO()
    run_with_wandb(tmp_path, [1, 2, 3], stream, mode="offline")
    run_id = (tmp_path / "wandb_id").read_text().strip()
    assert stream.getvalue() == ""
    (file,) = (tmp_path / "wandb").glob(f"offline-run-*/run-{run_id}.wandb")
    assert file.stat().st_size > 500


# TensorBoard


def test_tensorboard_gets_the_scalars(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    sinks = open_sinks(["tensorboard"], tmp_path, total_steps=10, resume_step=5)
    sinks.write({"step": 6, "loss": 2.0, "mfu_full": None})
    sinks.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in file.read_bytes()


def test_tensorboard_not_installed_is_refused_before_the_run_with_the_mend(monkeypatch):
    monkeypatch.setattr(sinks_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"metrics\.sinks.*pip install tensorboard"):
        check_sinks(["console", "tensorboard"])
    check_sinks(["console", "jsonl", "wandb"])
