"""A run on a file system that is too small, real where this machine lets a test mount one of its own."""

import errno
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from small import make_dataset, small_config

from pretrain.config_file import dump_config
from pretrain.dist import world
from pretrain.errors import CheckpointError
from pretrain.train import checkpoint_folder as folder
from pretrain.train.checkpoint import Checkpointer, choose, read_whole
from pretrain.train.run_folder import rank_log

ROOT = Path(__file__).resolve().parents[3]
# The mount is seen by these processes only and goes with them.
SCRIPT = """
mount -t tmpfs -o size="$1" none "$2" || exit 77
head -c "$5" /dev/zero > "$2/taken"
"$3" -m pretrain train "$4"; echo "status of the first start: $?"
"$3" -m pretrain checkpoint verify "$2"; echo "status of verify: $?"
ls "$2/checkpoints"
"""


def train_on(size: str, folder: Path, *, taken: str = "0") -> str:
    data, run = make_dataset(folder / "data"), folder / "run"
    run.mkdir()
    cfg = small_config(
        run,
        data,
        model__d_model=128,
        model__d_ff=512,
        train__steps=6,
        checkpoint__every=2,
        checkpoint__keep=1,
        checkpoint__async=False,
    )
    (folder / "c.toml").write_text(dump_config(cfg))
    arguments = [size, str(run), sys.executable, str(folder / "c.toml"), taken]
    command = ["unshare", "--map-root-user", "--mount", "bash", "-c", SCRIPT, "bash", *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
        )
    except FileNotFoundError:
        pytest.skip("no unshare on this machine")
    if done.returncode == 77 or "unshare failed" in done.stdout:
        pytest.skip(f"no mount of its own here: {done.stdout.strip()[-200:]}")
    return done.stdout


@pytest.mark.slow
def test_a_second_save_without_room_leaves_the_first_whole_and_names_path_and_bytes(tmp_path: Path) -> None:
    """G30: one checkpoint of 6 MB fits into 12 MB, a second beside it does not."""
    output = train_on("12m", tmp_path)
    assert "status of the first start: 1" in output, output
    message = re.search(r"(\S+/run/checkpoints): a checkpoint needs ([\d,]+) bytes and ([\d,]+) are free", output)
    assert message is not None, output
    needed, free = (int(number.replace(",", "")) for number in message.groups()[1:])
    assert 4_000_000 < free < needed < 12_000_000, output
    assert "status of verify: 0" in output, output
    assert output.splitlines()[-1] == "step-00000002", output


@pytest.mark.slow
def test_a_run_whose_first_checkpoint_cannot_fit_is_refused_at_the_start(tmp_path: Path) -> None:
    """G30."""
    output = train_on("3m", tmp_path)
    assert "status of the first start: 2" in output, output
    assert re.search(r"/run/checkpoints: a checkpoint needs [\d,]+ bytes and [\d,]+ are free", output), output
    assert "step 1/" not in output


@pytest.mark.slow
def test_a_fresh_run_on_a_full_disk_is_refused_and_nothing_hides_why(tmp_path: Path) -> None:
    output = train_on("1m", tmp_path, taken="2M")
    assert "status of the first start: 2" in output, output
    said = output.partition("status of")[0]
    assert re.search(r"error: run.dir='\S+/run' cannot be used: .*No space left on device", said), output
    assert "Traceback" not in said, output


def test_a_log_without_room_does_not_hide_the_error_that_it_should_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
    said = "a checkpoint needs room"
    with world(60) as ranks, pytest.raises(CheckpointError, match=said), rank_log(tmp_path, ranks):
        raise CheckpointError(said)


class FullDisk:
    """Stands in for `open` where checkpoints are written: from the `allowed`-th write on, nothing fits."""

    def __init__(self, allowed: int) -> None:
        self.left = allowed

    def __call__(self, *args: Any) -> Any:
        file = open(*args)  # noqa: SIM115
        plain = file.write

        class Writing:
            write = staticmethod(lambda data: self.take() or plain(data))
            __enter__ = lambda this: file.__enter__() and this  # noqa: E731
            __exit__ = lambda this, *exc: file.__exit__(*exc)  # noqa: E731
            flush, fileno = file.flush, lambda this: self.take() or file.fileno()

        return Writing()

    def take(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_again(checkpointer: Checkpointer, state: Any, meta: Any, *, background: bool) -> str | None:
    try:
        checkpointer.save(2, state, meta, background=background)
        checkpointer.wait()
        return None
    except (CheckpointError, OSError) as e:
        return str(e)


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_is_full_at_any_write_or_sync_costs_only_that_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """G30: room was there when it was looked for, and another program has taken it since."""
    meta, state = {"step": 1}, {"model.a": torch.arange(8.0), "model.b": torch.ones(3, dtype=torch.bfloat16)}
    folder.checkpoints_dir(tmp_path).mkdir()
    with world(60) as ranks:
        checkpointer = Checkpointer(tmp_path, ranks, keep=2, keep_every=0, event=lambda *args, **details: None)
        checkpointer.save(1, state, meta, background=False)
        failures = 0
        for allowed in range(100):
            with monkeypatch.context() as disk:
                disk.setattr(folder, "open", FullDisk(allowed), raising=False)
                said = save_again(checkpointer, state, meta, background=background)
            if said is None:
                break
            assert "No space left on device" in said
            failures += 1
            assert choose(tmp_path, ranks, print) == folder.step_dir(tmp_path, 1)
            assert folder.remove_leftovers(tmp_path) == ["step-00000002.partial"]
    assert failures >= 12, "tensors, index, random state, meta, manifest, marker: written and synced"
    for step in (1, 2):
        assert torch.equal(read_whole(folder.step_dir(tmp_path, step))["model.a"], state["model.a"])
