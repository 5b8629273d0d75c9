"""The build: the same bytes for any workers, tasks and kills; bad rows and damaged files; nothing done twice."""

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep import build as building
from data_prep import plan, worker
from data_prep.build import build, merge
from data_prep.errors import DataError
from data_prep.inspect import open_shard, verify
from data_prep.plan import Settings
from data_prep.shard import Manifest, read_sources
from data_prep.tokenizer import load_tokenizer
from tests.data_prep.conftest import PROSE

KILLS = int(os.environ.get("DATA_PREP_KILLS", "6"))


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 2 MB in every kind of file: two large jsonl files, many small text files, one compressed."""
    import gzip

    folder = tmp_path_factory.mktemp("corpus")
    for name, count in (("a", 900), ("b", 500)):
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for i in range(count):
                file.write(
                    json.dumps({"text": f"{name} {i} {PROSE[i % 97 :]}" * (1 + i % 4)}, ensure_ascii=False) + "\n"
                )
                if i % 50 == 0:
                    file.write("\n")
    for i in range(100):
        (folder / f"note-{i:03}.txt").write_text(f"note {i}\n{PROSE[: 50 + 3 * i]}")
    (folder / "z.jsonl.gz").write_bytes(
        gzip.compress(b"".join(json.dumps({"text": f"zipped {i}"}).encode() + b"\n" for i in range(300)))
    )
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def documents(folder: Path, split: str) -> list[np.ndarray]:
    shards = [open_shard(folder, info) for info in Manifest.read(folder).shards(split)]
    return [shard.document(i) for shard in shards for i in range(shard.header.documents)]


def origins(folder: Path, split: str = "train") -> list[tuple[str, int]]:
    listed = read_sources(folder)
    shards = [open_shard(folder, info) for info in Manifest.read(folder).shards(split)]
    pairs = [pair for shard in shards for pair in zip(shard.sources.tolist(), shard.lines.tolist(), strict=True)]
    return [(Path(listed[source].path).name, listed[source].first_line - 1 + line) for source, line in pairs]


@pytest.fixture(scope="module")
def reference(corpus: Path, tokenizers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one undisturbed worker makes of the corpus."""
    out = tmp_path_factory.mktemp("reference") / "out"
    settings = Settings((str(corpus),), val_fraction=0.1)
    build(settings, tokenizers["bpe"], out, seq_len=256, say=quiet)
    verify(out)
    return tree(out)


def command(corpus: Path, tokenizer: Path, out: Path, workers: int) -> list[str]:
    arguments = ["build", str(corpus), "--tokenizer", str(tokenizer), "--out", str(out), "--seq-len", "256"]
    return [sys.executable, "-m", "data_prep", *arguments, "--val-fraction", "0.1", "--workers", str(workers)]


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


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_any_moment_and_started_again_it_makes_the_same_bytes(
    corpus: Path, reference: dict[str, bytes], tokenizers: dict[str, Path], tmp_path: Path, workers: int
) -> None:
    out = tmp_path / "out"
    chance = random.Random(workers)
    killed = 0
    for _ in range(KILLS // 2):
        process = start(command(corpus, tokenizers["bpe"], out, workers))
        # A moment after the first result is there, so that the kills fall into the work and not into imports.
        wait_for(lambda: (out / "build" / "units").is_dir() or (out / "manifest.json").exists(), process)
        time.sleep(chance.random() * 0.4 if killed else 0)  # a quick machine would be done before the first kill
        killed += process.poll() is None
        os.killpg(process.pid, signal.SIGKILL) if workers == 1 else process.kill()
        process.wait()
        if (out / "manifest.json").exists():
            break
    process = start(command(corpus, tokenizers["bpe"], out, workers))
    assert process.wait(timeout=120) == 0
    assert killed
    assert tree(out) == reference


def start(arguments: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[bytes]", seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_killed_worker_ends_the_command_soon_and_no_worker_outlives_it(
    corpus: Path, reference: dict[str, bytes], tokenizers: dict[str, Path], tmp_path: Path
) -> None:  # G6
    out = tmp_path / "out"
    process = start(command(corpus, tokenizers["bpe"], out, 2))
    wait_for(lambda: len(list(out.glob("build/scratch-*"))) == 2, process)
    workers = [int(path.name.rpartition("-")[2]) for path in out.glob("build/scratch-*")]
    os.kill(workers[0], signal.SIGKILL)
    status = process.wait(timeout=20)
    assert status == 1 or tree(out) == reference  # it may just have finished
    end = time.monotonic() + 10
    while any(map(alive, workers)):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert start(command(corpus, tokenizers["bpe"], out, 2)).wait(timeout=60) == 0
    assert tree(out) == reference


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_finished_units_are_not_read_again(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 200_000)
    (tmp_path / "e.txt").write_bytes(b"\xff" * 400_000)
    settings = Settings((str(tmp_path / "*.txt"),))
    with pytest.raises(DataError, match=r"e\.txt:1: invalid UTF-8: .* --on-bad-row skip"):
        build(settings, tokenizers["bpe"], tmp_path / "out", seq_len=64, say=quiet)
    for name in "abcde":  # were the first four read again, they would fail
        path = tmp_path / f"{name}.txt"
        before = path.stat().st_mtime_ns
        path.write_bytes(b"e " * 200_000 if name == "e" else b"\xff" * 400_000)
        os.utime(path, ns=(before, before))
    build(settings, tokenizers["bpe"], tmp_path / "out", seq_len=64, say=quiet)
    tokenizer = load_tokenizer(tokenizers["bpe"])
    texts = [tokenizer.decode(tokens[1:-1]) for tokens in documents(tmp_path / "out", "train")]
    assert texts == [f"{name} " * 200_000 for name in "abcde"]


def test_a_part_lost_to_a_power_cut_is_found_out_and_made_again(
    corpus: Path,
    reference: dict[str, bytes],
    tokenizers: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, settings = tmp_path / "out", Settings((str(corpus),), val_fraction=0.1)

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, "stop before the shards")

    with monkeypatch.context() as patch:
        patch.setattr(worker, "compose_group", refuse)
        with pytest.raises(OSError, match="stop before the shards"):
            build(settings, tokenizers["bpe"], out, seq_len=256, say=quiet)
    part = sorted((out / "build" / "units").glob("*.train"))[1]
    part.write_bytes(part.read_bytes()[:-100] + bytes(100))
    with pytest.raises(DataError, match="is not as it was written; run the same command again"):
        build(settings, tokenizers["bpe"], out, seq_len=256, say=quiet)
    build(settings, tokenizers["bpe"], out, seq_len=256, say=quiet)
    assert tree(out) == reference


def test_a_full_disk_stops_the_build_and_loses_nothing(
    corpus: Path,
    reference: dict[str, bytes],
    tokenizers: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, settings = tmp_path / "out", Settings((str(corpus),), val_fraction=0.1)
    calls = iter(range(1000))
    real = os.replace

    def sometimes(source: str, target: str) -> None:
        if next(calls) > 20 and "units" in str(target):
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", sometimes)
        with pytest.raises(OSError, match="No space left on device"):
            build(settings, tokenizers["bpe"], out, seq_len=256, say=quiet)
    done = len(list((out / "build" / "units").glob("*.json")))
    assert done > 2
    build(settings, tokenizers["bpe"], out, seq_len=256, say=quiet)
    assert tree(out) == reference


def test_a_finished_folder_is_known_again_packs_other_lengths_and_refuses_other_inputs(
    corpus: Path, tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    out, said = tmp_path / "out", []
    settings = Settings((str(corpus / "*.txt"),))
    build(settings, tokenizers["bpe"], out, seq_len=256, say=quiet)
    before = tree(out)
    build(settings, tokenizers["bpe"], out, seq_len=64, say=said.append)
    assert said[-1] == f"{out} is already built from these inputs"
    after = tree(out)
    assert set(after) - set(before) == {"rows/train-64-best_fit.rows"}
    assert before.items() <= after.items()
    for other in (Settings((str(corpus / "a.jsonl"),)), Settings((str(corpus / "*.txt"),), eos=False)):
        with pytest.raises(DataError, match="holds a dataset of other inputs, tokenizer or settings"):
            build(other, tokenizers["bpe"], out, seq_len=64, say=quiet)
    with pytest.raises(DataError, match="holds a dataset of other inputs"):
        build(settings, tokenizers["tiktoken"], out, seq_len=64, say=quiet)


def test_an_input_that_is_modified_meanwhile_is_refused_even_at_the_same_size(
    tokenizers: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    for name in "abcd":
        (tmp_path / "in" / f"{name}.txt").write_text(f"{name} " * 2000)
    settings, out, changed = Settings((str(tmp_path / "in"),)), tmp_path / "out", tmp_path / "in" / "b.txt"
    build(settings, tokenizers["bpe"], out, seq_len=64, task=0, num_tasks=2, say=quiet)  # the only group
    changed.write_text("c " * 2000)
    with pytest.raises(DataError, match=r"1 input files were modified since it began, the first .*b\.txt.*remove"):
        build(settings, tokenizers["bpe"], out, seq_len=64, task=1, num_tasks=2, say=quiet)
    said: list[str] = []
    build(settings, tokenizers["bpe"], tmp_path / "two", seq_len=64, say=quiet)
    changed.write_text("d " * 2000)
    build(settings, tokenizers["bpe"], tmp_path / "two", seq_len=64, say=said.append)
    assert re.search(r"1 input files were modified after .*two was finished, the first .*b\.txt", said[0])

    real = worker.PartWriter.add

    def edit_and_add(*arguments: object) -> None:
        changed.write_text("e " * 2000)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(worker.PartWriter, "add", edit_and_add)
    with pytest.raises(DataError, match=r"b\.txt: was modified while the build went on; remove .*build"):
        build(settings, tokenizers["bpe"], tmp_path / "three", seq_len=64, say=quiet)


def test_an_unfinished_folder_goes_on_only_with_its_own_build(
    corpus: Path, tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    out, inputs = tmp_path / "out", (str(corpus / "*.txt"),)
    build(Settings(inputs), tokenizers["bpe"], out, seq_len=64, task=0, num_tasks=2, say=quiet)
    for other, tokenizer, difference in (
        (Settings(inputs, val_fraction=0.5), "bpe", r"val_fraction was 0\.0, is 0\.5"),
        (Settings((str(corpus / "note-01*"),)), "bpe", "inputs was .*; 90 input files came, went or changed"),
        (Settings(inputs), "sentencepiece", "the tokenizer was"),
    ):
        with pytest.raises(DataError, match=difference):
            build(other, tokenizers[tokenizer], out, seq_len=64, say=quiet)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="is not empty and holds no build to go on with"):
        build(Settings(inputs), tokenizers["bpe"], tmp_path / "used", seq_len=64, say=quiet)
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["thesis.txt"]


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
    prose = "\n".join(f"sentence {i} of a long, long row." for i in range(800_000))  # G3
    assert len(prose) > 25_000_000
    path = tmp_path / "a.jsonl"
    with open(path, "w") as file:
        for text in ("short", prose, "short too"):
            file.write(json.dumps({"text": text}) + "\n")
    script = (
        "import re, sys; from data_prep.cli import main; status = main(sys.argv[1:]);"
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024); sys.exit(status)"
    )
    peak = {}
    for kind in ("tiktoken", "sentencepiece"):
        out = tmp_path / kind
        arguments = ["build", str(path), "--tokenizer", str(tokenizers[kind]), "--out", str(out), "--seq-len", "2048"]
        run = subprocess.run(
            [sys.executable, "-c", script, *arguments, "--workers", "1"], capture_output=True, text=True, check=True
        )
        peak[kind] = int(run.stdout.split()[-1])
        found = documents(out, "train")
        tokenizer = load_tokenizer(tokenizers[kind])
        assert [tokenizer.decode(found[i][1:-1]) for i in (0, 2)] == ["short", "short too"]
        head, tail = found[1][1:2001], found[1][-2001:-1]
        assert prose.startswith(tokenizer.decode(head)[:1000])
        assert prose.endswith(tokenizer.decode(tail)[-1000:])
        sizes = {kind: open_shard(out, Manifest.read(out).shards("train")[0]).num_bytes.tolist()}
        assert sizes[kind] == [5, len(prose), 9]
    # VmHWM and not getrusage, whose peak a child takes over from the process that started it
    assert max(peak.values()) < 700  # MiB: imports, and the row as bytes, text and ids a few times over


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
