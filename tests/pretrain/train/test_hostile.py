"""Checkpoints made by an attacker, with checksums that fit: no code runs, nothing outside is read or written, memory is
not filled, and the message names the file."""

import json
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.errors import CheckpointError
from pretrain.train import checkpoint_folder as folder
from pretrain.train.checkpoint import load_model_weights, read_whole, restore_rng, write_weights
from pretrain.train.tensor_files import INDEX

RANK_FILE = "rank-00000.safetensors"


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.proof}",)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step-00000001"
    write_weights(path, {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5)}, {"step": 1})
    return path


def reseal(path: Path) -> None:
    """Checksums and sizes of what is there now."""
    files = {p.name: p.read_bytes() for p in path.iterdir() if p.name not in (folder.MANIFEST, folder.MARKER)}
    folder.seal(path, 1, {name: folder.write_file(path / name, [data]) for name, data in files.items()})


@pytest.mark.parametrize("name", [INDEX, RANK_FILE, folder.META, ".metadata", "__0_0.distcp", "rng-00000.safetensors"])
def test_a_pickle_in_place_of_any_file_is_never_run(checkpoint: Path, tmp_path: Path, name: str) -> None:
    proof = tmp_path / "proof"
    (checkpoint / name).write_bytes(pickle.dumps(Payload(proof)))
    reseal(checkpoint)
    for read in (read_whole, load_model_weights, folder.read_meta, lambda path: restore_rng(path, 0)):
        with suppress(CheckpointError):
            read(checkpoint)  # type: ignore[operator]
    assert not proof.exists()


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((path / INDEX).read_text())
    edit(index["tensors"]["model.a"])
    (path / INDEX).write_text(json.dumps(index))
    reseal(path)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda a: a.update(shape=[10**12, 10**6]), "pieces of 12 elements"),
        (lambda a: a.update(shape=[2**62, 4], chunks=[a["chunks"][0] | {"sizes": [2**62, 4]}]), "does not fit"),
        (lambda a: a.update(shape=[-3, -4]), "where counts belong"),
        (lambda a: a.update(shape=[3.0, True]), "where counts belong"),
        (lambda a: a.update(shape=[1] * 70), "dims"),
        (lambda a: a.update(dtype="object"), "KeyError"),
        (lambda a: a["chunks"][0].update(at=10**9), "does not fit"),
        (lambda a: a["chunks"][0].update(at=1), "does not fit"),
        (lambda a: a["chunks"][0].update(offsets=[1, 0]), "outside"),
        (lambda a: a["chunks"][0].update(file="../../../etc/passwd"), "which the manifest does not"),
        (lambda a: a["chunks"][0].update(file="/etc/passwd"), "which the manifest does not"),
        (lambda a: a["chunks"].pop(), "pieces of 0 elements"),
        (lambda a: a["chunks"].extend(a["chunks"] * 10**5), "pieces of"),
        (lambda a: a.pop("chunks"), "KeyError"),
    ],
)
def test_an_index_that_claims_what_its_files_do_not_hold_is_refused(
    checkpoint: Path, edit: Callable[[dict[str, Any]], Any], named: str
) -> None:
    change(checkpoint, edit)
    with pytest.raises(CheckpointError, match=INDEX) as caught:
        read_whole(checkpoint)
    assert named in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"tensors": []}', "[]", "null", "\x00", '{"tensors": {"a": 5}}'])
def test_json_of_another_kind_is_refused(checkpoint: Path, text: str) -> None:
    (checkpoint / INDEX).write_text(text)
    reseal(checkpoint)
    with pytest.raises(CheckpointError, match=INDEX):
        read_whole(checkpoint)
    (checkpoint / folder.META).write_text(text)
    with pytest.raises(CheckpointError, match=folder.META):
        folder.read_meta(checkpoint)
    (checkpoint / folder.MANIFEST).write_text(text)
    assert folder.MANIFEST in str(folder.verify(checkpoint))


def test_a_json_file_too_large_for_one_of_ours_is_not_read(checkpoint: Path) -> None:
    with open(checkpoint / folder.MANIFEST, "wb") as f:
        f.truncate(1 << 40)  # takes no room on the disk
    assert "bytes, and" in str(folder.verify(checkpoint))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "a/b", "a\\b", ""])
def test_a_manifest_cannot_name_files_outside_its_folder(checkpoint: Path, name: str) -> None:
    folder.seal(checkpoint, 1, {name: {"bytes": 1, "checksum": "xxh3_128:0"}})
    assert "no file of this folder" in str(folder.verify(checkpoint))


def test_pruning_follows_no_link_out_of_the_run(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for step in (2, 3):
        write_weights(folder.step_dir(run, step), {"a": torch.ones(2)}, {"step": step})
    write_weights(elsewhere, {"a": torch.ones(2)}, {"step": 1})
    folder.step_dir(run, 1).symlink_to(elsewhere)
    assert folder.prune(run, keep=1) == ["step-00000002"]
    assert folder.verify(elsewhere) is None
