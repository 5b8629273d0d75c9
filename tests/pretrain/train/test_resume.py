"""Resume equals no resume: bit for bit at the same layout, to rounding at another one."""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ranks import run_ranks
from small import make_dataset, small_config

from pretrain import cli
from pretrain.errors import CheckpointError, ConfigError
from pretrain.train import checkpoint_folder as folder
from pretrain.train.resume import check_allowed
from tests.pretrain.train.attempts import ENGINES, Job, events, final_state, lines, run_first_attempts, run_jobs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unbroken and broken runs of every engine on two ranks, in one start."""
    root = tmp_path_factory.mktemp("resume")
    make_dataset(root / "data")
    jobs: list[Job] = []
    for name, engine in ENGINES.items():
        bf16 = engine | {"precision__compute": "bf16"}
        jobs.append((bf16 | {"name": f"{name}-unbroken"}, []))
        jobs.append((bf16 | {"name": f"{name}-once", "checkpoint__async": True}, [5]))
        jobs.append((bf16 | {"name": f"{name}-twice", "checkpoint__every": 2}, [3, 7]))
    for name, engine in ENGINES.items():
        jobs.append((engine | {"name": f"{name}-fp32"}, [5]))
    for ends, (changes, stops) in zip(run_ranks(run_jobs, 2, str(root), jobs, timeout=600)[0], jobs, strict=True):
        assert ends == ["user"] * len(stops) + ["finished"], changes
    return root


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("broken", ["once", "twice"])
def test_a_run_stopped_and_resumed_equals_the_unbroken_one_bit_for_bit(root: Path, engine: str, broken: str) -> None:
    unbroken, resumed = root / f"{engine}-unbroken", root / f"{engine}-{broken}"
    expected, got = final_state(unbroken), final_state(resumed)
    assert expected.keys() == got.keys()
    assert any(name.startswith("optim.exp_avg.") for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name
    keys = ("loss", "grad_norm", "lr", "tokens", "targets", "epoch")
    assert lines(unbroken, *keys) == lines(resumed, *keys)
    assert list(lines(resumed, "step")) == list(range(1, 11))
    assert [e for e in events(resumed) if e in ("start", "resume", "stop", "finish")] == [
        "start",
        *["stop", "resume", "start"] * (1 if broken == "once" else 2),
        "finish",
    ]


@pytest.mark.slow
def test_engines_read_each_others_checkpoints_and_go_on_alike(root: Path) -> None:  # G33
    jobs: list[Job] = []
    pairs = [("fsdp", "zero3"), ("zero3", "fsdp"), ("fsdp", "zero1"), ("zero2", "fsdp")]
    for before, after in pairs:
        shutil.copytree(root / f"{before}-fp32", root / f"{before}-to-{after}")
        only_step_5(root / f"{before}-to-{after}")
        jobs.append((ENGINES[after] | {"name": f"{before}-to-{after}"}, []))
    still = {"optimizer__lr": 1e-12, "optimizer__weight_decay": 0.0, "train__steps": 2}
    for engine in ("zero1", "zero3"):
        origin = {"name": f"{engine}-from-fsdp", "init__from": str(root / "fsdp-fp32")}
        jobs.append((ENGINES[engine] | still | origin, []))
    ends = run_ranks(run_jobs, 2, str(root), jobs, timeout=900)[0]
    assert ends == [["finished"]] * len(jobs)
    trained = final_state(root / "fsdp-fp32")
    for engine in ("zero1", "zero3"):
        for name, tensor in final_state(root / f"{engine}-from-fsdp").items():
            assert not name.startswith("model.") or torch.allclose(tensor, trained[name], atol=1e-6), name
    for before, after in pairs:
        assert_near(root / f"{before}-fp32", root / f"{before}-to-{after}")


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_on_another_number(root: Path) -> None:  # G33
    """2 ranks, then 1, 3 and 4, with another engine at nearly each start: the same samples, losses to rounding."""
    hsdp = {"parallel__dp_replicate": 2, "train__micro_batch_size": 1}
    one_row = ENGINES["zero3"] | {"train__micro_batch_size": 1}
    ways = {
        "fsdp": [(1, ENGINES["zero3"], [6]), (3, ENGINES["zero1"], [8]), (4, hsdp, [])],
        "zero2": [(1, {}, [6]), (3, {}, [8]), (4, one_row, [])],
    }
    for before in ways:
        shutil.copytree(root / f"{before}-fp32", root / f"{before}-moved")
        only_step_5(root / f"{before}-moved")
    for starts in zip(*ways.values(), strict=True):
        [size], [stops] = {size for size, _, _ in starts}, {tuple(stops) for _, _, stops in starts}
        jobs = [
            (changes | {"name": f"{name}-moved"}, stops) for name, (_, changes, _) in zip(ways, starts, strict=True)
        ]
        ends = run_ranks(run_first_attempts, size, str(root), jobs, timeout=600)[0]
        assert ends == ["user" if stops else "finished"] * 2, (size, ends)
    for before in ways:
        assert_near(root / f"{before}-fp32", root / f"{before}-moved")


def only_step_5(run: Path) -> None:
    """Take a finished run back to its checkpoint of step 5."""
    shutil.rmtree(folder.step_dir(run, 10))
    assert [found.step for found in folder.list_checkpoints(run)] == [5]


def assert_near(unbroken: Path, other: Path) -> None:
    for step, (loss, norm, tokens) in lines(unbroken, "loss", "grad_norm", "tokens").items():
        got = lines(other, "loss", "grad_norm", "tokens")[step]
        assert got[0] == pytest.approx(loss, rel=1e-5), step
        assert got[1] == pytest.approx(norm, rel=1e-4), step
        assert got[2] == tokens
    expected, got_state = final_state(unbroken), final_state(other)
    for name, tensor in expected.items():
        assert float((tensor - got_state[name]).norm()) <= 1e-3 * float(tensor.norm()) + 1e-7, name


def test_newest_is_by_number_and_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    """G29."""
    for step in (800, 900, 1000, 1100):
        whole_checkpoint(tmp_path, step)
    for name in ("step_handpicked", "step_1200.tmp", "notes"):
        (folder.checkpoints_dir(tmp_path) / name).mkdir()
    for age, step in enumerate((1100, 800, 1000, 900)):  # the newest by number is the oldest by its file times
        os.utime(folder.step_dir(tmp_path, step), (1e9 + age, 1e9 + age))
    assert folder.newest_whole(tmp_path) == folder.step_dir(tmp_path, 1100)
    removed = folder.prune(tmp_path, keep=2)
    assert removed == ["step-00000800", "step-00000900"]
    assert folder.remove_leftovers(tmp_path) == []
    left = sorted(path.name for path in folder.checkpoints_dir(tmp_path).iterdir())
    assert left == ["notes", "step-00001000", "step-00001100", "step_1200.tmp", "step_handpicked"]


def test_prune_keeps_multiples_for_ever_and_the_newest_whole_one(tmp_path: Path) -> None:
    for step in range(1, 8):
        whole_checkpoint(tmp_path, step)
    (folder.step_dir(tmp_path, 7) / "weights.bin").write_bytes(b"cut")
    folder.prune(tmp_path, keep=1, keep_every=3)
    assert [(f.step, f.problem is None) for f in folder.list_checkpoints(tmp_path)] == [
        (3, True),
        (6, True),
        (7, False),
    ]


def test_what_is_damaged_inside_is_not_what_stays(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        whole_checkpoint(tmp_path, step)
    (folder.step_dir(tmp_path, 6) / "weights.bin").write_bytes(bytes(99) + b"1")  # of the right size
    assert folder.prune(tmp_path, keep=1) == ["step-00000002"]
    whole_checkpoint(tmp_path, 5)  # of a run that has passed 6 over
    assert [path.stem for path in folder.retire(tmp_path, keep=1, until=5)] == ["step-00000004"]
    assert [found.step for found in folder.list_checkpoints(tmp_path)] == [5, 6]


def test_the_command_removes_none_that_the_run_keeps_for_ever(tmp_path: Path) -> None:
    for step in (2, 3, 4, 6):
        whole_checkpoint(tmp_path, step)
    assert cli.main(["checkpoint", "prune", str(tmp_path), "--keep", "1"]) == 2, "nobody knows what it keeps"
    (tmp_path / "config.toml").write_text("checkpoint = {keep_every = 4}")
    assert cli.main(["checkpoint", "prune", str(tmp_path), "--keep", "1"]) == 0
    assert [found.step for found in folder.list_checkpoints(tmp_path)] == [4, 6]


def test_a_removal_that_is_cut_short_is_no_checkpoint_and_is_finished_by_the_next_start(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        whole_checkpoint(tmp_path, step)
    retired = folder.retire(tmp_path, keep=1)
    assert [found.step for found in folder.list_checkpoints(tmp_path)] == [3]
    (retired[0] / "manifest.json").unlink()
    assert folder.remove_leftovers(tmp_path) == ["step-00000001.retired", "step-00000002.retired"]
    assert [path.name for path in folder.checkpoints_dir(tmp_path).iterdir()] == ["step-00000003"]


def test_a_checkpoint_in_a_folder_of_another_step_is_passed_over(tmp_path: Path) -> None:
    for step in (2, 4):
        whole_checkpoint(tmp_path, step)
    folder.step_dir(tmp_path, 2).rename(folder.step_dir(tmp_path, 99999999))
    said: list[str] = []
    assert folder.newest_whole(tmp_path, said.append) == folder.step_dir(tmp_path, 4)
    assert said == [
        "step-99999999 is passed over: manifest.json is of step 2, but the folder is named step-99999999; "
        "name it step-00000002"
    ]


def test_the_command_says_when_there_is_no_checkpoint_and_skips_those_that_go_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.checkpoints_dir(tmp_path).mkdir()
    for action in ("list", "verify"):
        assert cli.main(["checkpoint", action, str(tmp_path)]) == 0
        assert capsys.readouterr().out == f"no checkpoint in {tmp_path}\n"
    for step in (1, 2):
        whole_checkpoint(tmp_path, step)

    def verify(path: Path) -> str | None:
        folder.retire(tmp_path, keep=1)  # as a living run beside this command
        return folder.problem_at_a_glance(path)

    monkeypatch.setattr(folder, "verify", verify)
    assert cli.main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["step-00000002"]


@pytest.mark.parametrize(
    ("key", "mend"),
    [
        ("train.stepz", "did you mean train.steps?"),
        ("lr", "did you mean optimizer.lr?"),
        ("nonsense", "it takes keys of train, optimizer, schedule, precision"),
        ("model.n_layers", "no setting that may change on resume"),
    ],
)
def test_a_change_that_no_start_can_make_is_refused_by_the_first_start_too(key: str, mend: str) -> None:
    now = small_config("run", "data").model_dump(by_alias=True)
    check_allowed({"train.steps", "optimizer.lr"}, now)
    with pytest.raises(ConfigError) as error:
        check_allowed({"train.steps", key}, now)
    assert f"--allow-change {key}: " in str(error.value)
    assert mend in str(error.value)


def test_a_checkpoint_of_format_2_is_verified_by_its_sha256(tmp_path: Path) -> None:
    whole_checkpoint(tmp_path, 5)
    path = folder.step_dir(tmp_path, 5)
    entry = {"bytes": 100, "sha256": hashlib.sha256(bytes(100)).hexdigest()}
    (path / "manifest.json").write_text(json.dumps({"format": 2, "step": 5, "files": {"weights.bin": entry}}))
    assert folder.verify(path) is None
    (path / "weights.bin").write_bytes(bytes(99) + b"\1")
    assert folder.verify(path) == "weights.bin does not match its checksum in manifest.json"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda p: (p / "COMPLETE").unlink(), "COMPLETE is missing"),
        (lambda p: (p / "COMPLETE").unlink() or (p / "COMPLETE").mkdir(), "COMPLETE is missing"),
        (lambda p: (p / "weights.bin").unlink(), "weights.bin is missing"),
        (lambda p: (p / "weights.bin").write_bytes(b"x" * 9), "weights.bin has 9 bytes"),
        (lambda p: (p / "weights.bin").write_bytes(b"\x01" + b"\0" * 99), "weights.bin does not match its checksum"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda p: [f.unlink() for f in p.iterdir()], "manifest.json is missing"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path: Path, damage: Any, named: str) -> None:  # G32
    whole_checkpoint(tmp_path, 5)
    whole_checkpoint(tmp_path, 9)
    damage(folder.step_dir(tmp_path, 9))
    said: list[str] = []
    assert folder.newest_whole(tmp_path, said.append) == folder.step_dir(tmp_path, 5)
    assert "step-00000009" in said[0]
    assert named in said[0]


def test_a_run_with_only_damaged_checkpoints_is_not_begun_again(tmp_path: Path) -> None:
    whole_checkpoint(tmp_path, 5)
    (folder.step_dir(tmp_path, 5) / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        folder.newest_whole(tmp_path)


def test_a_manifest_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    whole_checkpoint(tmp_path, 5)
    path = folder.step_dir(tmp_path, 5)
    entry = {"bytes": 1, "checksum": "xxh3_128:0"}
    (path / "manifest.json").write_text(json.dumps({"format": folder.FORMAT, "files": {"../../secret": entry}}))
    with pytest.raises(CheckpointError, match="no file of this folder"):
        folder.read_manifest(path)


def whole_checkpoint(run: Path, step: int) -> None:
    partial = folder.partial_dir(run, step)
    partial.mkdir(parents=True)
    folder.commit(run, step, {"weights.bin": folder.write_file(partial / "weights.bin", [bytes(100)])})
