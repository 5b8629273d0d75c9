"""The build: the same bytes for any workers and tasks; bad rows and damaged files; long rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep import build as building
from data_prep import plan
from data_prep.build import build, merge
from data_prep.errors import DataError
from data_prep.inspect import open_shard
from data_prep.plan import Settings
from data_prep.shard import Manifest
from data_prep.tokenizer import load_tokenizer
from tests.data_prep.builds import command, documents, origins, quiet, start, tree


def test_the_dataset_holds_every_document_with_its_text_end_and_place(
    corpus: Path, reference: dict[str, bytes], tokenizers: dict[str, Path], tmp_path: Path
) -> None:  # G1
    out = tmp_path / "out"
    build(Settings((str(corpus),)), tokenizers["bpe"], out, seq_len=256, say=quiet)
    tokenizer = load_tokenizer(tokenizers["bpe"])
    found, places = documents(out, "train"), origins(out)
    assert len(found) == 900 + 500 + 100 + 300
    assert sum(map(len, found)) == sum(info.tokens for info in Manifest.read(out).shards("train"))
    lines = {name: (corpus / name).read_text(encoding="utf-8").split("\n") for name in ("a.jsonl", "b.jsonl")}
    for tokens, (name, line) in zip(found, places, strict=True):
        text = tokenizer.decode(tokens[1:-1])
        if name in lines:
            assert text == json.loads(lines[name][line - 1])["text"]
        elif name.endswith(".txt"):
            assert (text, line) == ((corpus / name).read_text(), 1)
        else:
            assert text == f"zipped {line - 1}"
        assert (tokens[0], tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
        assert (tokens == tokenizer.eos_id).sum() == 1


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_makes_the_same_bytes(
    corpus: Path, reference: dict[str, bytes], tokenizers: dict[str, Path], tmp_path: Path, workers: int
) -> None:  # G6
    load_tokenizer(tokenizers["bpe"]).encode("a tokenizer was used in this process before")
    settings = Settings((str(corpus),), val_fraction=0.1)
    build(settings, tokenizers["bpe"], tmp_path / "out", seq_len=256, workers=workers, say=quiet)
    assert tree(tmp_path / "out") == reference


def test_more_workers_than_documents_make_the_same_bytes(tokenizers: dict[str, Path], tmp_path: Path) -> None:  # G6
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / f"{name}.txt").write_text(f"only {name}")
    trees = []
    for workers in (1, 5):
        settings = Settings((str(tmp_path / "in"),))
        build(settings, tokenizers["bpe"], tmp_path / str(workers), seq_len=8, workers=workers, say=quiet)
        trees.append(tree(tmp_path / str(workers)))
    assert trees[0] == trees[1]
    assert len(documents(tmp_path / "5", "train")) == 3


@pytest.mark.parametrize("num_tasks", [2, 5])
def test_any_number_of_tasks_makes_the_same_bytes(
    corpus: Path,
    reference: dict[str, bytes],
    tokenizers: dict[str, Path],
    tmp_path: Path,
    num_tasks: int,
) -> None:
    out, settings = tmp_path / "out", Settings((str(corpus),), val_fraction=0.1)
    options = {"seq_len": 256, "num_tasks": num_tasks, "say": quiet}
    for task in reversed(range(num_tasks)):
        with pytest.raises(DataError, match=r"are not built yet|no build is going on"):
            merge(out)
        assert build(settings, tokenizers["bpe"], out, task=task, **options) is None
    merge(out)
    assert tree(out) == reference
    merge(out)  # again: nothing to do
    assert tree(out) == reference


def test_tasks_started_at_the_same_moment_do_not_disturb_each_other(
    corpus: Path, reference: dict[str, bytes], tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    tasks = [
        start([*command(corpus, tokenizers["bpe"], out, 1), "--task", str(task), "--num-tasks", "3"])
        for task in range(3)
    ]
    assert [process.wait(timeout=300) for process in tasks] == [0, 0, 0]
    merge(out)
    assert tree(out) == reference


def test_many_shards_are_the_same_for_workers_and_tasks(
    corpus: Path, tokenizers: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "SHARD_BYTES", 400_000)
    settings = Settings((str(corpus),), val_fraction=0.1)
    build(settings, tokenizers["bpe"], tmp_path / "one", seq_len=256, say=quiet)
    assert len(Manifest.read(tmp_path / "one").shards("train")) > 3
    build(settings, tokenizers["bpe"], tmp_path / "two", seq_len=256, workers=2, say=quiet)
    for task in (2, 0, 1):
        build(settings, tokenizers["bpe"], tmp_path / "tasks", seq_len=256, task=task, num_tasks=3, say=quiet)
    merge(tmp_path / "tasks")
    assert tree(tmp_path / "two") == tree(tmp_path / "one") == tree(tmp_path / "tasks")
    lines = {(name, line) for name, line in origins(tmp_path / "one") if name == "a.jsonl"}
    assert max(line for _, line in lines) == 900 + 900 // 50  # blank lines are counted, over all pieces of the file


def test_bad_rows_fail_with_their_place_or_are_counted_with_the_first_of_each_reason(
    tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    rows = [json.dumps({"text": f"row {i} " * 50}) for i in range(4000)]
    rows[3210], rows[3500], rows[3501], rows[7] = "{", '{"body": 1}', '{"body": 2}', '{"text": ""}'
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(rows))
    assert path.stat().st_size > 4 * plan.UNIT_BYTES[0]  # so the bad rows lie in a later piece of the file
    with pytest.raises(DataError, match=r"a\.jsonl:(3211: invalid JSON|3501: no text key)"):
        build(Settings((str(path),)), tokenizers["bpe"], tmp_path / "fail", seq_len=64, workers=2, say=quiet)
    settings = Settings((str(path),), on_bad_row="skip")
    for workers in (1, 2):
        out = tmp_path / f"skip{workers}"
        made = build(settings, tokenizers["bpe"], out, seq_len=64, workers=workers, say=quiet)
        assert made is not None
        assert {reason: (entry.count, entry.first) for reason, entry in made.skipped.items()} == {
            "empty": (1, f"{path}:8"),
            "invalid JSON": (1, f"{path}:3211"),
            "no text key": (2, f"{path}:3501"),
        }
    assert tree(tmp_path / "skip1") == tree(tmp_path / "skip2")


def test_a_truncated_file_fails_by_default_and_is_counted_when_asked(
    tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    import gzip

    data = gzip.compress(b"".join(json.dumps({"text": f"{i} {i * i}"}).encode() + b"\n" for i in range(2000)))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: damaged file: .*truncated: .* ends inside a member"):
        build(Settings((str(path),)), tokenizers["bpe"], tmp_path / "out", seq_len=64, say=quiet)
    settings = Settings((str(path),), on_bad_row="skip")
    made = build(settings, tokenizers["bpe"], tmp_path / "skip", seq_len=64, say=quiet)
    assert made is not None
    assert made.skipped["damaged file"].count == 1
    assert 500 < made.shards("train")[0].documents < 1500


def test_validation_documents_follow_from_their_text_alone(
    corpus: Path, tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(corpus, tmp_path / "moved")
    (tmp_path / "moved" / "again.jsonl").write_bytes((corpus / "b.jsonl").read_bytes())
    tokenizer = load_tokenizer(tokenizers["bpe"])

    def texts(inputs: str, out: Path) -> tuple[list[str], list[str]]:
        build(Settings((inputs,), val_fraction=0.2), tokenizers["bpe"], out, seq_len=64, say=quiet)
        train, val = ([tokenizer.decode(found) for found in documents(out, split)] for split in ("train", "val"))
        return train, val

    train, val = texts(str(corpus), tmp_path / "one")
    assert 0.15 < len(val) / (len(train) + len(val)) < 0.25
    more_train, more_val = texts(str(tmp_path / "moved"), tmp_path / "two")
    assert set(more_val) == set(val)
    assert len(more_val) > len(val)  # the doubles stand on the same side as their originals
    assert not set(more_train) & set(more_val)


def test_a_validation_share_that_no_document_falls_into_is_said(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a single document")
    said: list[str] = []
    settings = Settings((str(tmp_path / "a.txt"),), val_fraction=1e-6)
    build(settings, tokenizers["bpe"], tmp_path / "out", seq_len=8, say=said.append)
    assert said[-1].startswith("warning: there is no validation split: by --val-fraction 1e-06 none of 1 documents")


def test_bos_and_eos_are_as_set_and_a_missing_one_is_an_error(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    # G8
    (tmp_path / "a.txt").write_text("some text")
    tokenizer = load_tokenizer(tokenizers["bpe"])
    text = tokenizer.encode("some text").tolist()
    for bos, eos, wanted in (
        (None, True, [0, *text, 1]),
        (True, False, [0, *text]),
        (False, True, [*text, 1]),
        (False, False, text),
    ):
        out = tmp_path / f"{bos}{eos}"
        build(Settings((str(tmp_path / "a.txt"),), bos=bos, eos=eos), tokenizers["bpe"], out, seq_len=8, say=quiet)
        assert documents(out, "train")[0].tolist() == wanted
    (tmp_path / "bare").mkdir()
    spec = json.loads((tokenizers["bpe"] / "tokenizer.json").read_text())
    spec["added_tokens"] = []
    for name in ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"):
        spec["model"]["vocab"][f"plain{name[2:-2]}"] = spec["model"]["vocab"].pop(name)
    (tmp_path / "bare" / "tokenizer.json").write_text(json.dumps(spec))
    for asked, message in (
        (Settings(("x",)), "no EOS token .* --no-eos"),
        (Settings(("x",), bos=True, eos=False), "BOS"),
    ):
        with pytest.raises(DataError, match=message):
            build(asked, tmp_path / "bare", tmp_path / "out", seq_len=8, say=quiet)


def test_inputs_without_a_document_are_refused(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"empty\.jsonl: no document for training; all is empty"):
        build(Settings((str(tmp_path / "empty.jsonl"),)), tokenizers["bpe"], tmp_path / "out", seq_len=8, say=quiet)
    (tmp_path / "blank.txt").write_text("")
    with pytest.raises(DataError, match=r"skipped: {'empty': 1}"):
        build(Settings((str(tmp_path / "blank.txt"),)), tokenizers["bpe"], tmp_path / "out2", seq_len=8, say=quiet)


def test_settings_that_cannot_be_are_refused(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    settings = Settings((str(tmp_path / "a.txt"),))
    for options, message in (
        ({"workers": 0}, "workers=0 must be 1 or more"),
        ({"task": 2, "num_tasks": 2}, "task=2 one of 0 to num_tasks - 1 = 1"),
        ({"seq_len": 0}, "seq_len=0 must be at least 1"),
    ):
        with pytest.raises(DataError, match=message):
            build(settings, tokenizers["bpe"], tmp_path / "out", **({"seq_len": 8, "say": quiet} | options))
    with pytest.raises(DataError, match=r"val_fraction=1\.0 must lie in \[0, 1\)"):
        Settings(("x",), val_fraction=1.0)
    with pytest.raises(DataError, match="on_bad_row='ignore' is none of fail, skip"):
        Settings(("x",), on_bad_row="ignore")


def test_a_row_of_25_megabytes_passes_whole_in_bounded_memory(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    for kind in ("tiktoken", "sentencepiece"):  # G3
        assert peak_with_a_row_of(800_000, tokenizers[kind], tmp_path / kind) < 700  # MiB


@pytest.mark.slow
def test_a_row_of_300_megabytes_passes_whole_in_bounded_memory(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    assert peak_with_a_row_of(9_000_000, tokenizers["tiktoken"], tmp_path) < 3300  # MiB


def peak_with_a_row_of(sentences: int, tokenizer_folder: Path, folder: Path) -> int:
    """The most memory that a build holds, in MiB, one of whose rows has so many sentences of over 30 characters;
    imports, and the row as bytes, text and ids a few times over. Checks what was built."""
    prose = "\n".join(f"sentence {i} of a long, long row." for i in range(sentences))
    assert len(prose) > 32 * sentences
    folder.mkdir(exist_ok=True)
    path, out = folder / "a.jsonl", folder / "out"
    with open(path, "w") as file:
        for text in ("short", prose, "short too"):
            file.write(json.dumps({"text": text}) + "\n")
    script = (  # VmHWM and not getrusage, whose peak a child takes over from the process that started it
        "import re, sys; from data_prep.cli import main; status = main(sys.argv[1:]);"
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024); sys.exit(status)"
    )
    arguments = ["build", str(path), "--tokenizer", str(tokenizer_folder), "--out", str(out), "--seq-len", "2048"]
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments, "--workers", "1"], capture_output=True, text=True, check=True
    )
    found = documents(out, "train")
    tokenizer = load_tokenizer(tokenizer_folder)
    assert [tokenizer.decode(found[i][1:-1]) for i in (0, 2)] == ["short", "short too"]
    head, tail = found[1][1:2001], found[1][-2001:-1]
    assert prose.startswith(tokenizer.decode(head)[:1000])
    assert prose.endswith(tokenizer.decode(tail)[-1000:])
    assert open_shard(out, Manifest.read(out).shards("train")[0]).num_bytes.tolist() == [5, len(prose), 9]
    return int(run.stdout.split()[-1])


def test_units_and_groups_partition_the_pieces_in_order(corpus: Path, tokenizers: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(tokenizers["bpe"])
    settings = Settings((str(corpus),))
    made, _ = plan.make_plan(settings, building._tokenizer_info(tokenizer, settings))
    assert [piece for unit in made.units for piece in unit] == list(range(len(made.pieces)))
    assert [unit for group in made.groups for unit in group] == list(range(len(made.units)))
    assert len(made.units) < 20 < len(made.pieces)  # small files share units
    again = plan.Plan.from_json(json.loads(json.dumps(made.as_json())))
    assert again == made
    assert again.fingerprint() == made.fingerprint()
