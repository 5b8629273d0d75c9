"""`pretrain-data` from outside: every verb, and exit status 2 with one message for every bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.cli import main


def run(*arguments: object) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stop:  # argparse
        return int(stop.code or 0)


def test_from_text_to_rows_and_back_by_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes").mkdir()
    for i in range(30):
        (tmp_path / "notes" / f"{i}.py").write_text(f"def function_{i}(x):\n    return x * {i}\n" * 20)
    out = tmp_path / "data"
    monkeypatch.chdir(tmp_path)
    assert run("tokenizer", "notes", "--out", "tok", "--kind", "sentencepiece", "--vocab-size", 320) == 0
    assert "sentencepiece tokenizer of 320 ids; bos 1, eos 2, pad 3" in capsys.readouterr().out
    build = ("build", "notes", "--tokenizer", "tok", "--out", out, "--seq-len", 128, "--val-fraction", 0.1)
    assert run(*build, "--workers", 1) == 0
    assert "30 documents" in capsys.readouterr().out
    assert run("verify", out) == 0
    assert "all good" in capsys.readouterr().out
    assert run("pack", out, "--seq-len", 64, "--packing", "concat") == 0
    capsys.readouterr()
    assert run("stats", out, "--json") == 0
    counted = json.loads(capsys.readouterr().out)
    assert {"documents", "tokens", "rows", "targets", "padding_fraction", "bytes_per_token", "skipped"} <= set(counted)
    assert counted["documents"] == 30
    assert run("inspect", out, "--doc", 0, "--chars", 0) == 0
    assert "from notes/0.py:1" in capsys.readouterr().out
    assert run("inspect", out, "--row", 0, "--seq-len", 128, "--split", "val") == 0
    for kind in ("megatron", "nanogpt", "datatrove"):
        assert run("export", kind, out, "--out", tmp_path / kind) == 0
        back = tmp_path / f"{kind}-back"
        command = ("import", kind, tmp_path / kind, "--out", back, "--tokenizer", tmp_path / kind / "tokenizer")
        assert run(*command, "--seq-len", 128) == 0
        assert run("verify", back) == 0


def test_tasks_and_merge_by_the_command_line(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    (tmp_path / "a.txt").write_text("some text")
    for task in (0, 1):
        assert run("build", tmp_path / "a.txt", "--tokenizer", tokenizers["tiktoken"], "--out", tmp_path / "out",
                   "--seq-len", 8, "--workers", 1, "--task", task, "--num-tasks", 2) == 0  # fmt: skip
        assert not (tmp_path / "out" / "manifest.json").exists()
    assert run("merge", tmp_path / "out") == 0
    assert run("verify", tmp_path / "out") == 0
    assert (tmp_path / "out" / "rows" / "train-8-best_fit.rows").exists()


def test_bad_input_ends_with_status_2_and_one_message(
    tmp_path: Path, tokenizers: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tokenizers["tiktoken"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"\x89PNG")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"body": "x"}\n')
    (tmp_path / "good.txt").write_text("good")

    def refused(*arguments: object, message: str) -> None:
        assert run(*arguments) == 2, arguments
        errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert len(errors) == 1
        assert message in errors[0]

    def build(path: str, *more: object) -> tuple[object, ...]:
        given = ("build", tmp_path / path, "--tokenizer", tokenizer, "--out", tmp_path / "out", "--workers", 1)
        return (*given, "--seq-len", 8, *more)

    refused(*build("missing.jsonl"), message="missing.jsonl: no such file or folder")
    refused(*build("empty"), message="no file with text")
    refused(*build("images"), message="left out: 1 of other kinds")
    refused(*build("empty.jsonl"), message="no document for training; all is empty")
    (tmp_path / "out").rename(tmp_path / "out1")
    refused(*build("bad.jsonl"), message="bad.jsonl:2: no text key: no key 'text'; its keys: 'body'; see --text-key")
    (tmp_path / "out").rename(tmp_path / "out2")
    refused(*build("good.txt", "--val-fraction", 2), message="val_fraction=2.0 must lie in [0, 1)")
    refused(*build("good.txt", "--workers", 0), message="workers=0 must be 1 or more")
    refused(*build("good.txt", "--seq-len", "x"), message="invalid int value: 'x'")
    refused(*build("good.txt", "--tokenizer", tmp_path / "nothing"), message="no such tokenizer file or folder")
    refused(*build("good.txt", "--packing", "loose"), message="invalid choice: 'loose'")
    refused("stats", tmp_path / "nothing", message="it must be a folder made by `pretrain-data build`")
    refused("verify", tmp_path / "empty", message="has no manifest.json")
    refused("merge", tmp_path / "empty", message="no build is going on there")
    refused("inspect", tmp_path / "empty", "--doc", 0, message="has no manifest.json")
    refused("inspect", tmp_path / "empty", message="one of the arguments --doc --row --step is required")
    train = ("tokenizer", "--out", tmp_path / "tok", "--kind", "bpe")
    refused(*train, tmp_path / "good.txt", "--vocab-size", 9, message="vocab_size=9 is too small")
    refused(*train, tmp_path / "empty.jsonl", "--vocab-size", 300, message="no text to train a tokenizer on")
    refused("import", "megatron", tmp_path / "x", "--out", tmp_path / "y", "--tokenizer", tokenizer, message="no such")
    refused("export", "nanogpt", tmp_path / "empty", "--out", tmp_path / "y", message="has no manifest.json")
    assert run(*build("good.txt")) == 0
    refused("inspect", tmp_path / "out", "--doc", 1, message="document 1: split 'train' of")
    refused("inspect", tmp_path / "out", "--row", 5, message="row 5: ")
    refused("inspect", tmp_path / "out", "--step", 1, message="--step needs --config")
    refused("inspect", tmp_path / "out", "--step", 1, "--config", tmp_path / "none.toml", message="no such config file")
    refused("inspect", tmp_path / "out", "--step", 0, "--config", "x", message="--step 0: optimizer steps are counted")
    refused("inspect", tmp_path / "out", "--doc", 0, "--rank", 1, message="--rank: only with --step")
    refused("inspect", tmp_path / "out", "--step", 1, "--config", "x", "--split", "val", "--seq-len", 8,
            message="--split and --seq-len: only without --step")  # fmt: skip
    refused("inspect", tmp_path / "out", "--doc", 0, "--split", "val", message="has no split 'val'; it has train")
    refused("pack", tmp_path / "out", "--seq-len", 0, message="seq_len=0")


def test_a_machine_that_fails_is_status_1_and_an_interrupt_130(
    tmp_path: Path, tokenizers: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import os

    (tmp_path / "a.txt").write_text("some text")
    command = ("build", tmp_path / "a.txt", "--tokenizer", tokenizers["tiktoken"], "--out", tmp_path / "out")

    for error, status in ((OSError(28, "No space left on device"), 1), (KeyboardInterrupt(), 130)):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail)
            assert run(*command, "--seq-len", 8, "--workers", 1) == status
    shown = capsys.readouterr().err
    assert "error: OSError: [Errno 28] No space left on device" in shown
    assert "run the same command again to go on" in shown


def test_help_needs_no_heavy_import() -> None:
    script = (
        "import sys\nfrom data_prep.cli import main\n"
        "try:\n    main(['build', '--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "heavy = {'torch', 'numpy', 'datasets', 'tokenizers', 'sentencepiece', 'tiktoken', 'pyarrow', 'pretrain'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_building_loads_neither_torch_nor_datasets(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    (tmp_path / "a.txt").write_text("some text")
    script = (
        "import sys\nfrom data_prep.cli import main\nassert main(sys.argv[1:]) == 0\n"
        "assert not {'torch', 'datasets', 'pretrain', 'pyarrow'} & set(sys.modules)\n"
    )
    command = ["build", str(tmp_path / "a.txt"), "--tokenizer", str(tokenizers["bpe"]), "--out", str(tmp_path / "out")]
    subprocess.run(
        [sys.executable, "-c", script, *command, "--seq-len", "8", "--workers", "1"], check=True, capture_output=True
    )
