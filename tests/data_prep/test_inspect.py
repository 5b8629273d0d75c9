"""verify finds one flipped bit, stats equal counts made by hand, and a document can be traced both ways."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_prep import cli
from data_prep.build import build
from data_prep.errors import DataError
from data_prep.inspect import View, describe, show_step, stats, verify
from data_prep.pack import pack_dataset
from data_prep.plan import Settings
from data_prep.rows import open_rows
from data_prep.sums import write_sums
from data_prep.tokenizer import load_tokenizer

TEXTS = [f"document {i} says " + "word " * (i % 23) for i in range(400)]


@pytest.fixture(scope="module")
def dataset(tokenizers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines.insert(100, "not a row")
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.txt").write_text("alone")
    settings = Settings((str(folder / "a.jsonl"), str(folder / "b.txt")), val_fraction=0.1, on_bad_row="skip")
    build(settings, tokenizers["tiktoken"], folder / "out", seq_len=64, say=lambda _: None)
    return folder / "out"


def test_a_good_dataset_verifies(dataset: Path) -> None:
    assert verify(dataset).startswith("all good: 2 shards")


def test_one_flipped_bit_anywhere_is_found_and_the_file_named(dataset: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    rng = np.random.default_rng(0)
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    assert {path.suffix for path in files} == {".tok", ".rows", ".json", ".model", ""}
    for path in files:
        good = path.read_bytes()
        for at in [0, 9, len(good) // 2, len(good) - 1, *rng.integers(0, len(good), 20).tolist()]:
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << int(rng.integers(8))]) + good[at + 1 :])
            with pytest.raises(DataError) as caught:
                verify(copy)
            assert path.name in str(caught.value)
        path.write_bytes(good)
    verify(copy)


def test_rows_are_refused_where_manifest_or_tokenizer_are_not_as_they_were_written(
    dataset: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    (copy / "tokenizer" / ".nfs0001").touch()
    open_rows(copy, "train", 64)
    with pytest.raises(DataError, match="nfs0001: is not as it was written"):
        verify(copy)
    (copy / "tokenizer" / ".nfs0001").unlink()
    for path in [copy / "manifest.json", *(copy / "tokenizer").iterdir()]:
        good = path.read_bytes()
        at = good.rindex(b"1")
        path.write_bytes(good[:at] + b"2" + good[at + 1 :])
        with pytest.raises(DataError, match=f"{path.name}: is not as it was written"):
            open_rows(copy, "train", 64)
        path.write_bytes(good)
    shutil.rmtree(copy / "tokenizer")
    with pytest.raises(DataError, match=r"tokenizer/.*: is not as it was written"):
        open_rows(copy, "train", 64)


def test_a_changed_count_a_missing_and_a_foreign_shard_are_found(
    dataset: Path, tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    listed = copy / "sources.json"
    good = listed.read_text()
    listed.write_text(good.replace('"documents": 1,', '"documents": 2,'))
    write_sums(copy)
    with pytest.raises(DataError, match=r"sources\.json: .*b\.txt has 2 documents .* but 1 and"):
        verify(copy)
    listed.write_text(good)
    shutil.rmtree(copy / "tokenizer")
    shutil.copytree(tokenizers["bpe"], copy / "tokenizer")
    write_sums(copy)
    with pytest.raises(DataError, match="the shards were made by another tokenizer"):
        verify(copy)
    shutil.rmtree(copy / "tokenizer")
    shutil.copytree(dataset / "tokenizer", copy / "tokenizer")
    write_sums(copy)
    shutil.copy(copy / "shards" / "val-00000.tok", copy / "shards" / "train-00000.tok")
    with pytest.raises(DataError, match=r"train-00000\.tok: is not the shard that .*manifest\.json names"):
        verify(copy)
    (copy / "shards" / "train-00000.tok").unlink()
    with pytest.raises(DataError, match=r"train-00000\.tok: cannot be opened"):
        verify(copy)
    with pytest.raises(DataError, match=r"has no manifest\.json; it must be a folder made by"):
        verify(tmp_path)


def test_stats_equal_counts_made_by_hand(dataset: Path, tokenizers: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(tokenizers["tiktoken"])
    lengths = [len(tokenizer.encode(text)) + 2 for text in [*TEXTS, "alone"]]
    num_bytes = sum(len(text.encode()) for text in TEXTS) + 5
    counted = stats(dataset)
    assert counted["documents"] == 401
    assert counted["tokens"] == sum(lengths)
    assert counted["targets"] == sum(lengths) - 401
    assert counted["bytes_per_token"] == num_bytes / sum(lengths)
    assert counted["padding_fraction"] == 1 - counted["targets"] / (counted["rows"] * 64)
    assert counted["skipped"] == {"invalid JSON": 1}
    assert counted["skipped_first"]["invalid JSON"].endswith("a.jsonl:101")
    assert {key.rsplit("/")[-1]: value["documents"] for key, value in counted["sources"].items()} == {
        "a.jsonl": 400,
        "b.txt": 1,
    }
    histogram = {f"{2**i}-{2 ** (i + 1) - 1}": 0 for i in range(12)}
    for length in lengths:
        histogram[f"{2 ** (length.bit_length() - 1)}-{2 ** length.bit_length() - 1}"] += 1
    assert counted["document_tokens"] == {key: value for key, value in histogram.items() if value}
    splits = counted["splits"]
    assert splits["train"]["documents"] + splits["val"]["documents"] == 401
    assert "skipped 1: invalid JSON, the first at" in "\n".join(describe(dataset, counted))


def test_every_packing_is_listed(dataset: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    pack_dataset(copy, 32, "concat")
    assert [(entry["packing"], entry["seq_len"]) for entry in stats(copy)["packings"]] == [
        ("concat", 32),
        ("best_fit", 64),
    ]


def test_a_document_is_shown_with_its_text_origin_and_rows(dataset: Path) -> None:
    view = View(dataset, "train", chars=0)
    total = sum(info.documents for info in view.manifest.shards("train"))
    seen = []
    for number in range(0, total, 37):
        head, origin, rows, text = view.document(number)
        assert head.startswith(f"document {number} (train-00000.tok, {number}): ")
        line = int(origin.rpartition(":")[2])
        shown = text.removeprefix("<|begin_of_text|>").removesuffix("<|end_of_text|>")
        assert shown == TEXTS[line - 1 - (line > 101)]
        row = int(rows.split()[2].rstrip(","))
        assert any(origin.removeprefix("from ") in part for part in view.row(row))
        seen.append(line)
    assert len(set(seen)) == len(seen)


def test_what_is_not_there_is_said_with_what_is(dataset: Path) -> None:
    view = View(dataset, "train")
    total = sum(info.documents for info in view.manifest.shards("train"))
    for number in (total, -1):
        with pytest.raises(DataError, match=f"document {number}: split 'train' of .* has {total}, from 0"):
            list(view.document(number))
    with pytest.raises(DataError, match=r"row 99999: .* has \d+ rows of 64"):
        list(view.row(99999))
    with pytest.raises(DataError, match="has no rows like that"):
        list(View(dataset, "train", seq_len=7).row(0))
    with pytest.raises(DataError, match="has no split 'test'; it has train, val"):
        View(dataset, "test")


def test_a_step_shows_the_rows_a_rank_takes_and_documents_know_their_steps(dataset: Path, tmp_path: Path) -> None:
    import torch

    from pretrain.data.inspect_step import Schedule
    from pretrain.data.loader import Loader

    config = tmp_path / "config.toml"
    config.write_text(
        f"""
run = {{ name = "x", dir = "{tmp_path / "run"}", seed = 5 }}
model = {{ vocab_size = 1024, d_model = 32, n_layers = 1, n_heads = 2, n_kv_heads = 1, head_dim = 16, d_ff = 64,
           max_seq_len = 64 }}
data = {{ sources = [{{ path = "{dataset}" }}], seq_len = 64 }}
train = {{ steps = 9, global_batch_size = 12, micro_batch_size = 3 }}
optimizer = {{ lr = 1e-3 }}
schedule = {{ warmup_steps = 1 }}
""".replace("\n           ", " ")
    )
    schedule = Schedule(config)
    rows = open_rows(dataset, "train", 64)
    with Loader(schedule.cfg.data, seed=5, rows_per_step=12, micro_batch_size=3, dp_rank=1, dp_world=2) as loader:
        for step in (1, 4, 9):
            batches = loader.step((step - 1) * 12).batches
            seen = [row for row in schedule.step(step, 2) if row.rank == 1]
            assert [row.micro_batch for row in seen] == [0, 0, 0, 1, 1, 1]
            wanted = torch.cat([batch.inputs for batch in batches]).numpy()
            assert (rows.read(np.array([row.row for row in seen])).inputs == wanted).all()
            assert all(step in schedule.steps_of(dataset, row.row, 9) for row in seen)
    shown = list(show_step(schedule, 4, 1, 2, 40))
    assert shown[0] == "step 4: stream rows 36 to 47 (data.skip takes such ranges)"
    assert sum(line.startswith("rank 1, micro-batch") for line in shown) == 6
    for step, ranks, message in (
        (10, 2, "step 10: the run's optimizer steps are 1 to 9"),
        (4, 5, "train.global_batch_size=12 is no multiple of train.micro_batch_size=3 x 5 data-parallel ranks = 15"),
    ):
        with pytest.raises(DataError, match=message):
            cli._schedule(str(config), str(dataset), step, ranks)
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    pack_dataset(copy, 32, "concat")
    assert " 64 positions)" in next(View(copy, "train").row(0, schedule))
    with pytest.raises(DataError, match=r"has no rows like that among those of the run, 64 \(best_fit\)"):
        next(View(copy, "train", 32).row(0, schedule))
    (copy / "rows" / "val-32-concat.rows").unlink()
    with pytest.raises(DataError, match=r"val-32-concat\.rows: is missing, other splits have it"):
        verify(copy)
    with pytest.raises(DataError, match=r"is no source of .*config\.toml; its sources are .*/out"):
        cli._schedule(str(config), str(tmp_path))
    with pytest.raises(DataError, match="leaves the number of data-parallel ranks open"):
        list(show_step(schedule, 4, 1, None, 40))
    with pytest.raises(DataError, match="rank 2 takes no row: there are 2 data-parallel ranks, from 0"):
        list(show_step(schedule, 4, 2, 2, 40))
    view = View(dataset, "train")
    piece = rows.pieces(seen[0].row)[0]
    assert "is taken at step" in "\n".join(view.row(seen[0].row, schedule))
    assert f"row {seen[0].row} is taken at step" in "\n".join(view.document(piece.document, schedule))
