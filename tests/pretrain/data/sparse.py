"""A dataset of as many tokens as asked for that takes no room: files with holes, all tokens 0, packed by `concat`.

It is written by the format page, not by our writer, which would write the zeros.
"""

import hashlib
import struct
import zlib
from pathlib import Path

from data_prep.row_index import index_path, shards_hash
from data_prep.shard import Manifest, ShardInfo, TokenizerInfo

HASH = "ab" * 32
BLOCK = 1 << 20


def sparse_dataset(folder: Path, *, tokens_per_shard: int, shards: int, seq_len: int) -> Path:
    """Each shard is one document; `tokens_per_shard` must be a multiple of `seq_len`."""
    assert tokens_per_shard % seq_len == 0
    (folder / "shards").mkdir(parents=True)
    (folder / "rows").mkdir()
    infos = []
    for number in range(shards):
        path = folder / "shards" / f"train-{number:05d}.tok"
        sha = hashlib.sha256(path.name.encode()).digest()  # nobody reads a terabyte to find out
        fields = struct.pack("<IIQQQQqq32s", 2, 0, 50_257, tokens_per_shard, 1, 7, -1, 0, bytes.fromhex(HASH))
        ends_at = -(-tokens_per_shard * 2 // 8) * 8
        payload = {ends_at: struct.pack("<QQQI", tokens_per_shard, 1, 7, 0)}
        _write(path, b"TOKSHARD", fields, sha, ends_at + 28, payload)
        infos.append(ShardInfo(path.name, tokens_per_shard, 1, 7, sha.hex()))
    tokens = tokens_per_shard * shards
    rows = -(-(tokens - 1) // seq_len)
    ends = range(tokens_per_shard, tokens, tokens_per_shard)
    # The last position of a shard has no target; neither has the place after the stream's last input.
    missing = {4 * (end // seq_len - 1): struct.pack("<I", 1) for end in [*ends, tokens]}
    counts = (seq_len, rows, 0, 0, shards, 0, tokens, tokens - 1, tokens - shards, 7 * shards, 2)
    fields = struct.pack("<II11Q32s", 1, 0, *counts, bytes.fromhex(shards_hash(infos)))
    _write(index_path(folder, "train", seq_len, "concat"), b"ROWINDEX", fields, bytes(32), 4 * rows, missing)
    Manifest(TokenizerInfo("hf", HASH, 50_257, None, 0, None), {"train": tuple(infos)}).write(folder)
    return folder


def _write(path: Path, magic: bytes, fields: bytes, sha: bytes, payload: int, values: dict[int, bytes]) -> None:
    """`values`: offset in the payload -> bytes that are not zero, none across a block."""
    blocks = -(-payload // BLOCK)
    crcs = [zlib.crc32(bytes(BLOCK))] * blocks
    filled: dict[int, bytearray] = {blocks - 1: bytearray(payload - (blocks - 1) * BLOCK)}
    for at, value in values.items():
        data = filled.setdefault(at // BLOCK, bytearray(min(BLOCK, payload - at // BLOCK * BLOCK)))
        assert at % BLOCK + len(value) <= len(data)
        data[at % BLOCK : at % BLOCK + len(value)] = value
    for block, data in filled.items():
        crcs[block] = zlib.crc32(data)
    table = struct.pack(f"<{blocks}I", *crcs)
    head = struct.pack("<8sIIIIQ32s", magic, 1, 0, BLOCK, zlib.crc32(table), payload, sha)
    header = bytearray((head.ljust(128, b"\0") + fields).ljust(4096, b"\0"))
    struct.pack_into("<I", header, 12, zlib.crc32(header))
    with path.open("wb") as file:
        file.write(header)
        for at, value in values.items():
            file.seek(4096 + at)
            file.write(value)
        file.seek(4096 + payload)
        file.write(table)
