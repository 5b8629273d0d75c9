"""Small things that many tests need: a dataset of random documents and a config for a tiny model on it."""

from pathlib import Path
from typing import Any

import numpy as np

from data_prep.pack import pack_dataset
from data_prep.shard import Manifest, ShardWriter, SourceFile, TokenizerInfo, shard_path, write_sources
from pretrain.config import Config
from pretrain.config_file import parse_config

VOCAB, SEQ_LEN = 64, 16


def make_dataset(
    folder: Path,
    *,
    documents: int = 120,
    val_documents: int = 10,
    vocab: int = VOCAB,
    seq_len: int = SEQ_LEN,
    seed: int = 0,
    tokenizer: str = "ab" * 32,
) -> Path:
    """Random documents of 2 to 40 tokens, each a walk that can be learnt, EOS 2 last."""
    rng = np.random.default_rng(seed)
    (folder / "shards").mkdir(parents=True)
    splits = {}
    for split, count in (("train", documents), ("val", val_documents)):
        if not count:
            continue
        path = folder / "shards" / f"{split}-00000.tok"
        with ShardWriter(path, vocab_size=vocab, tokenizer_hash=tokenizer, bos_id=1, eos_id=2) as writer:
            for line in range(count):
                steps = rng.integers(1, 4, rng.integers(1, 40))
                tokens = np.concatenate([4 + np.cumsum(steps) % (vocab - 4), [2]])
                writer.add_document(tokens, source=0, line=line + 1, num_bytes=3 * len(tokens))
            splits[split] = (writer.finish(),)
        assert shard_path(folder, splits[split][0]) == path
    info = TokenizerInfo("sentencepiece", tokenizer, vocab, 1, 2, None)
    Manifest(info, splits).write(folder)
    write_sources(folder, [SourceFile("walks.txt", documents, 0, 0)])
    pack_dataset(folder, seq_len)
    return folder


def small_config(run: Path | str, data: Path | str, **changes: Any) -> Config:
    """A tiny model; `changes` are keys with two underscores for the dot: train__steps=5."""
    raw: dict[str, dict[str, Any]] = {
        "run": {"name": "small", "dir": str(run), "seed": 7},
        "model": {
            "vocab_size": VOCAB,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "n_kv_heads": 2,
            "d_ff": 64,
            "max_seq_len": SEQ_LEN,
        },
        "data": {"sources": [{"path": str(data)}], "seq_len": SEQ_LEN},
        "train": {"steps": 10, "global_batch_size": 12, "micro_batch_size": 2, "grad_clip": 0.5},
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup_steps": 2},
        "precision": {"compute": "fp32"},
        "activation_checkpoint": {"mode": "none"},
        "compile": {"enabled": False},
        "loss": {"chunks": 3},
        "checkpoint": {"every": 0},
        "eval": {"every": 0},
        "metrics": {"every": 1, "sinks": ["jsonl"]},
    }
    for name, value in changes.items():
        table, key = name.split("__")
        raw.setdefault(table, {})[key] = value
    return parse_config(raw)
