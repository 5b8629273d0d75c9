"""Datasets whose content tells where it comes from, written without any tokenizer."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_prep.pack import pack_dataset
from data_prep.shard import Manifest, ShardWriter, TokenizerInfo

HASH = "ab" * 32


def write_dataset(
    folder: Path,
    splits: dict[str, Sequence[Sequence[Sequence[int]]]],
    *,
    vocab_size: int = 60_000,
    eos_id: int | None = None,
    tokenizer_hash: str = HASH,
) -> Path:
    """`splits`: name -> shards -> documents -> token ids. Line numbers count through a shard, from 1."""
    written = {}
    for split, shards in splits.items():
        infos = []
        for number, documents in enumerate(shards):
            path = folder / "shards" / f"{split}-{number:05d}.tok"
            with ShardWriter(
                path, vocab_size=vocab_size, tokenizer_hash=tokenizer_hash, bos_id=None, eos_id=eos_id
            ) as writer:
                for line, tokens in enumerate(documents, 1):
                    writer.add_document(np.array(tokens), source=number, line=line, num_bytes=3 * len(tokens))
                infos.append(writer.finish())
        written[split] = tuple(infos)
    Manifest(TokenizerInfo("hf", tokenizer_hash, vocab_size, None, eos_id, None), written).write(folder)
    return folder


def counting(lengths: Sequence[Sequence[int]], first: int = 1) -> list[list[list[int]]]:
    """Shards of documents of these lengths in which every token of all is one more than the token before it."""
    shards = []
    for shard in lengths:
        documents = []
        for length in shard:
            documents.append(list(range(first, first + length)))
            first += length
        shards.append(documents)
    return shards


def numbered_rows(folder: Path, rows: int, *, seq_len: int = 8, shards: int = 1, first: int = 1, val: int = 0) -> Path:
    """Row r, of one document without padding, is token first + r over and over; validation rows follow."""
    numbers = np.array_split(np.arange(first, first + rows), shards)
    splits = {"train": [[[number] * (seq_len + 1) for number in part] for part in numbers]}
    if val:
        splits["val"] = [[[number] * (seq_len + 1) for number in range(first + rows, first + rows + val)]]
    write_dataset(folder, splits)
    pack_dataset(folder, seq_len)
    return folder
