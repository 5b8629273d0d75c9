"""Checkpoints, run folders and model folders made by an attacker, with checksums that fit: no code runs, nothing
outside is read or written, memory is not filled, nobody waits for ever, and the message names the file."""

import json
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pretrain.config_file import load_config
from pretrain.config_tables import AnomaliesConfig
from pretrain.dist import world
from pretrain.errors import CheckpointError, ConfigError
from pretrain.train import checkpoint_folder as folder
from pretrain.train.anomalies import Anomalies
from pretrain.train.checkpoint import load_model_weights, read_whole, restore_rng, write_weights
from pretrain.train.convert import import_model
from pretrain.train.run_folder import next_attempt, only_start, read_outcome
from pretrain.train.stored_model import open_model, read_special_ids
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
        (lambda a: a["chunks"].extend(a["chunks"] * 10**5), "that another piece has"),
        (lambda a: a.update(chunks=[a["chunks"][0] | {"sizes": [1, 4]}] * 3), "that another piece has"),
        (lambda a: a.update(shape=[2**70], chunks=[a["chunks"][0] | {"sizes": [2**70], "offsets": [0]}]), INDEX),
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


@pytest.mark.parametrize(
    "edit",
    [
        lambda files: files[INDEX].update(bytes=float("inf")),
        lambda files: files[INDEX].update(checksum=["sha256"]),
        lambda files: files[INDEX].update(checksum="crc32:0"),
        lambda files: files.update({"a\0b": files[INDEX]}),
        lambda files: files.update({"\ud800": files[INDEX]}),
        lambda files: files.update({"a": 5}),
    ],
)
def test_a_manifest_with_other_things_in_it_is_refused(checkpoint: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((checkpoint / folder.MANIFEST).read_text())
    edit(manifest["files"])
    (checkpoint / folder.MANIFEST).write_text(json.dumps(manifest))
    assert str(folder.verify(checkpoint)).startswith(folder.MANIFEST)


@pytest.mark.parametrize("name", [folder.MANIFEST, folder.META, INDEX, RANK_FILE])
@pytest.mark.parametrize("make", [lambda p: p.symlink_to("/dev/zero"), os.mkfifo, os.mkdir])
def test_a_device_a_pipe_and_a_folder_are_no_files(checkpoint: Path, name: str, make: Callable[[Path], None]) -> None:
    manifest = json.loads((checkpoint / folder.MANIFEST).read_text())
    manifest["files"][RANK_FILE]["bytes"] = manifest["files"][INDEX]["bytes"] = 0
    (checkpoint / folder.MANIFEST).write_text(json.dumps(manifest))
    (checkpoint / name).unlink()
    make(checkpoint / name)
    assert folder.verify(checkpoint) is not None
    if name != RANK_FILE:
        with pytest.raises(CheckpointError, match="no regular file"):
            (folder.read_meta if name == folder.META else read_whole)(checkpoint)


def test_a_link_in_place_of_a_file_is_not_followed(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / RANK_FILE).rename(tmp_path / "elsewhere")
    (checkpoint / RANK_FILE).symlink_to(tmp_path / "elsewhere")
    assert str(folder.verify(checkpoint)).startswith(f"{RANK_FILE} is no regular file but a link")


def headed(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + bytes(9)


NINE = '{"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}'


@pytest.mark.parametrize(
    "content",
    [
        (1 << 62).to_bytes(8, "little") + b"{}",
        headed(f'{{"torch": {NINE}, "numpy": {NINE}, "python": {NINE}}}'),  # the same bytes three times
        headed(f'{{"torch": {NINE}, "torch": {NINE}}}'),
        headed(f'{{"torch": {NINE.replace("9", "99999999999")}}}'),
        headed("[" * 10_000),
        headed(" " * (2 << 20)),
    ],
)
def test_a_random_state_that_is_none_is_refused(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "rng-00000.safetensors").write_bytes(content)
    reseal(checkpoint)
    with pytest.raises(CheckpointError, match="not a random state"):
        restore_rng(checkpoint, 0)


SIZES = {"vocab_size": 8, "d_model": 4, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "d_ff": 4, "max_seq_len": 8}


@pytest.mark.parametrize("huge", [{"n_layers": 10**9}, {"vocab_size": 10**15}, {"d_ff": 10**15}])
def test_a_model_larger_than_the_files_is_refused_before_anything_is_made_of_it(tmp_path: Path, huge: Any) -> None:
    path = tmp_path / "checkpoint"
    write_weights(path, {"a": torch.ones(9)}, {"step": 0, "config": {"model": SIZES | huge}})
    with pytest.raises(CheckpointError, match=r"train.json describes [\d,]+ parameters"):
        open_model(path)
    source = tmp_path / "hf"
    source.mkdir()
    names = {"n_layers": "num_hidden_layers", "vocab_size": "vocab_size", "d_ff": "intermediate_size"}
    plain = {"hidden_size": 4, "num_attention_heads": 1, "vocab_size": 8, "intermediate_size": 4}
    (source / "config.json").write_text(json.dumps(plain | {names[key]: value for key, value in huge.items()}))
    save_file({"a": torch.ones(9)}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config.json describes [\d,]+ parameters"):
        import_model(source, tmp_path / "out")


@pytest.mark.parametrize("ids", [5, {"eos_token_id": {"a": 1}}, {"eos_token_id": [1e999]}, {"bos_token_id": ""}])
def test_token_ids_that_are_none_are_refused(tmp_path: Path, ids: Any) -> None:
    with pytest.raises(CheckpointError, match=r"train.json: no token ids"):
        read_special_ids(ids, tmp_path / folder.META)


@pytest.mark.parametrize("weight_map", [{"a": "../secret"}, {"a": "/etc/passwd"}, {"a": ".."}, [1], {"a": [1]}, {}])
def test_the_index_of_a_model_folder_cannot_name_files_outside_it(tmp_path: Path, weight_map: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"model.safetensors.index.json: ('\S+' is no file|\d of its \d files are)"):
        import_model(tmp_path, tmp_path / "out")


def test_a_tensor_that_two_files_of_a_model_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 8}))
    for name in ("one", "two"):
        save_file({"norm": torch.ones(1 << 16)}, tmp_path / name)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"norm": "one", "other": "two"}}')
    with pytest.raises(ConfigError, match="two: norm is in one as well"):
        import_model(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    "broken",
    [
        {"rows_consumed": "5"},
        {"rows_consumed": -1},
        {"tokens": 10**30},
        {"config": []},
        {"anomalies": 5},
        {"data_fingerprint": None},
        {"step": True},
    ],
)
def test_a_run_does_not_go_on_from_numbers_that_are_none(tmp_path: Path, broken: dict[str, Any]) -> None:
    counts = dict.fromkeys(("step", "rows_consumed", "tokens", "targets"), 1)
    good = counts | {"config": {}, "data_fingerprint": "0", "anomalies": {}}
    (tmp_path / folder.META).write_text(json.dumps(good))
    assert folder.read_meta(tmp_path, resumable=True) == good
    for key, value in broken.items():
        (tmp_path / folder.META).write_text(json.dumps(good | {key: value}))
        with pytest.raises(CheckpointError, match=f"has {key}="):
            folder.read_meta(tmp_path, resumable=True)
        (tmp_path / folder.META).write_text(json.dumps({k: v for k, v in good.items() if k != key}))
        if key != "anomalies":
            with pytest.raises(CheckpointError, match=f"has {key}=None"):
                folder.read_meta(tmp_path, resumable=True)


@pytest.mark.parametrize(
    "state", [{"left_out": 5}, {"left_out": [[3]]}, {"left_out": [[5, 3]]}, {"losses": ["x"]}, {"spent": float("inf")}]
)
def test_a_history_of_anomalies_that_is_none_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"train.json"):
        Anomalies(AnomaliesConfig()).load(state)


@pytest.mark.parametrize(
    "line", ['{"event": "sta', "[" * 100_000, '{"event": "start", "attempt": 1e999}', "9" * 5000, "\0" * 9999, "5\n[]"]
)
def test_a_broken_line_of_events_hides_none_of_the_others(tmp_path: Path, line: str) -> None:
    (tmp_path / "events.jsonl").write_text(f'{{"event": "start", "attempt": 3}}\n{line}')
    assert next_attempt(tmp_path) == 4
    for broken in ("[" * 100_000, "[]", "{", "\ufffe"):
        (tmp_path / "outcome.json").write_text(broken)
        assert read_outcome(tmp_path) is None
    (tmp_path / "outcome.json").unlink()
    (tmp_path / "outcome.json").mkdir()
    assert read_outcome(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 100_000, "[" + ".".join("a" * 20_000) + "]", ".".join("a" * 99) + "=1"]
)
def test_a_config_nested_without_end_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"config.toml: .* nested more than 32 deep"):
        load_config(file)
    with open(file, "wb") as f:
        f.truncate(1 << 40)
    with pytest.raises(ConfigError, match="bytes, and"):
        load_config(file)
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="no regular file"):
        load_config(file)


def test_a_json_file_too_large_for_one_of_ours_is_not_read(checkpoint: Path) -> None:
    with open(checkpoint / folder.MANIFEST, "wb") as f:
        f.truncate(1 << 40)  # takes no room on the disk
    assert "bytes, and" in str(folder.verify(checkpoint))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "a/b", "a\\b", ""])
def test_a_manifest_cannot_name_files_outside_its_folder(checkpoint: Path, name: str) -> None:
    folder.seal(checkpoint, 1, {name: {"bytes": 1, "checksum": "xxh3_128:0"}})
    assert "no file of this folder" in str(folder.verify(checkpoint))


@pytest.mark.parametrize("name", ["lock", "config.toml.partial", "metrics.jsonl", "logs/rank-0.log"])
def test_a_run_does_not_write_through_links_to_files(tmp_path: Path, name: str) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (run / "logs").mkdir(parents=True)
    elsewhere.write_text("precious")
    (run / name).symlink_to(elsewhere)
    with world(60) as alone, pytest.raises(ConfigError, match=f"{name} is a link to a file"), only_start(run, alone):
        pass
    assert elsewhere.read_text() == "precious"


def test_pruning_follows_no_link_out_of_the_run(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for step in (2, 3):
        write_weights(folder.step_dir(run, step), {"a": torch.ones(2)}, {"step": step})
    write_weights(elsewhere, {"a": torch.ones(2)}, {"step": 1})
    folder.step_dir(run, 1).symlink_to(elsewhere)
    folder.partial_dir(run, 7).symlink_to(elsewhere)
    folder.partial_dir(run, 8).write_text("a file")
    assert folder.remove_leftovers(run) == ["step-00000007.partial", "step-00000008.partial"]
    assert folder.prune(run, keep=1) == ["step-00000002"]
    assert folder.verify(elsewhere) is None
