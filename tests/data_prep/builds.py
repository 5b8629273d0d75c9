"""What tests of the build share: running it as a command, and reading what it made."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data_prep.inspect import open_shard
from data_prep.shard import Manifest, read_sources


def quiet(_: str) -> None:
    pass


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


def command(corpus: Path, tokenizer: Path, out: Path, workers: int) -> list[str]:
    arguments = ["build", str(corpus), "--tokenizer", str(tokenizer), "--out", str(out), "--seq-len", "256"]
    return [sys.executable, "-m", "data_prep", *arguments, "--val-fraction", "0.1", "--workers", str(workers)]


def start(arguments: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[bytes]", seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.005)
