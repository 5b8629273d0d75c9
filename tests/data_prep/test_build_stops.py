"""Builds that are stopped, by a kill, a full disk or an error, and go on; and what may not have changed meanwhile."""

import errno
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from data_prep import worker
from data_prep.build import build, merge
from data_prep.errors import DataError
from data_prep.plan import Settings
from data_prep.tokenizer import load_tokenizer
from tests.data_prep.builds import command, documents, quiet, start, tree, wait_for

KILLS = int(os.environ.get("DATA_PREP_KILLS", "6"))


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


def test_of_two_equal_builds_at_once_the_second_is_refused_by_name_and_nothing_is_damaged(
    corpus: Path, reference: dict[str, bytes], tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    settings = Settings((str(corpus),), val_fraction=0.1)

    def build_again(_: str) -> None:
        for second in (
            lambda: build(settings, tokenizers["bpe"], out, seq_len=256, say=quiet),
            lambda: build(settings, tokenizers["bpe"], out, seq_len=256, num_tasks=2, say=quiet),
            lambda: merge(out, say=quiet),
        ):
            if (out / "build").exists():
                with pytest.raises(DataError, match="another build or merge is at work there"):
                    second()
                refused.append(second)

    refused: list[object] = []
    build(settings, tokenizers["bpe"], out, seq_len=256, say=build_again)
    assert len(refused) >= 3
    assert tree(out) == reference
    said: list[str] = []
    build(settings, tokenizers["bpe"], out, seq_len=256, say=said.append)
    assert said[-1] == f"{out} is already built from these inputs"
    with pytest.raises(DataError, match="no build is going on there"):
        merge(tmp_path / "none", say=quiet)


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
