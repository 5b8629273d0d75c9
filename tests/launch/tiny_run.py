"""A dataset of random tokens and a config of a Llama with 20 thousand parameters: training that starts in seconds."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.pack import pack_dataset
from data_prep.shard import Manifest, ShardWriter, SourceFile, TokenizerInfo, write_sources
from launch import ranks

ROOT = Path(__file__).resolve().parents[2]
VOCAB, SEQ_LEN = 64, 32


def make_data(folder: Path, documents: int = 200) -> Path:
    rng = np.random.default_rng(7)
    (folder / "shards").mkdir(parents=True)
    name = "train-00000.tok"
    writer = ShardWriter(folder / "shards" / name, vocab_size=VOCAB, tokenizer_hash="ab" * 32, bos_id=None, eos_id=0)
    with writer:
        for line in range(1, documents + 1):
            tokens = np.append(rng.integers(1, VOCAB, rng.integers(10, 60)), 0)
            writer.add_document(tokens, source=0, line=line, num_bytes=len(tokens))
        info = writer.finish()
    tokenizer = TokenizerInfo("hf", "ab" * 32, VOCAB, None, 0, None)
    Manifest(tokenizer, {"train": (info,)}).write(folder)
    write_sources(folder, [SourceFile("random", info.documents, info.tokens, info.num_bytes)])
    pack_dataset(folder, SEQ_LEN)
    return folder


def write_config(path: Path, run: Path, data: Path, *, steps: int, rows: int = 8, **tables: dict[str, Any]) -> Path:
    """`tables` add keys to a table: checkpoint={"every": 5}."""
    config: dict[str, dict[str, Any]] = {
        "run": {"name": run.name, "dir": str(run), "timeout_seconds": 120},
        "model": {
            "vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 64, "max_seq_len": SEQ_LEN
        },
        "data": {"seq_len": SEQ_LEN},
        "train": {"steps": steps, "global_batch_size": rows, "micro_batch_size": 2},
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup_steps": 2},
        "activation_checkpoint": {"mode": "none"},
        "precision": {"compute": "fp32"},
        "compile": {"enabled": False},
        "loss": {"chunks": 1},
        "checkpoint": {"every": 0},
        "eval": {"every": 0},
        "metrics": {"every": 1},
    }  # fmt: skip
    for table, keys in tables.items():
        config.setdefault(table, {}).update(keys)
    config["data"]["sources"] = f'@[{{ path = "{data}" }}]'
    lines = []
    for table, keys in config.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {_toml(value)}" for key, value in keys.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value[1:] if value.startswith("@") else f'"{value}"'
    return repr(value)


Launcher = Callable[..., "subprocess.Popen[str]"]


def launch(*args: str | Path) -> "subprocess.Popen[str]":
    """`pretrain-launch` as a process, both outputs in one pipe."""
    command = [sys.executable, "-m", "launch", *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(process: "subprocess.Popen[str]") -> None:
    """Kill what the launcher started, from the leaves, then itself."""
    if process.poll() is None:
        for child in ranks.children(process.pid):
            for rank in ranks.torchrun_ranks(child):
                ranks.send(rank, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
