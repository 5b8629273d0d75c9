"""The shard format: what is written is read, by our reader and by one made from the format page."""

import hashlib
import itertools
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.blockfile import HEADER_BYTES, BlockFile, BlockWriter, whole_file
from data_prep.errors import DataError
from data_prep.shard import (
    BLOCK_BYTES,
    Manifest,
    Shard,
    ShardInfo,
    ShardWriter,
    Skipped,
    SourceFile,
    TokenizerInfo,
    read_sources,
    shard_path,
    write_sources,
)

HASH = hashlib.sha256(b"a tokenizer").hexdigest()


def write(
    path: Path, documents: list, *, vocab_size: int = 1000, bos_id: int | None = 1, eos_id: int | None = 2
) -> ShardInfo:
    with ShardWriter(path, vocab_size=vocab_size, tokenizer_hash=HASH, bos_id=bos_id, eos_id=eos_id) as writer:
        for number, tokens in enumerate(documents):
            writer.add_document(np.asarray(tokens), source=number % 3, line=10 * number + 1, num_bytes=5 * len(tokens))
        return writer.finish()


def read_by_the_format_page(path: Path) -> list[list[int]]:
    """Documents, by `docs/data_format.md` alone."""
    data = path.read_bytes()
    magic, version, header_crc, block, table_crc, payload, sha = struct.unpack_from("<8sIIIIQ32s", data)
    assert (magic, version) == (b"TOKSHARD", 1)
    assert header_crc == zlib.crc32(data[:12] + bytes(4) + data[16:4096])
    body, table = data[4096 : 4096 + payload], data[4096 + payload :]
    assert hashlib.sha256(body).digest() == sha
    assert zlib.crc32(table) == table_crc
    crcs = [zlib.crc32(body[at : at + block]) for at in range(0, payload, block)]
    assert list(struct.unpack(f"<{len(table) // 4}I", table)) == crcs
    width, _, _, tokens, documents, _, _, _, _ = struct.unpack_from("<IIQQQQqq32s", data, 128)
    ids = struct.unpack_from(f"<{tokens}{'H' if width == 2 else 'I'}", body)
    ends = struct.unpack_from(f"<{documents}Q", body, -(-tokens * width // 8) * 8)
    return [list(ids[begin:end]) for begin, end in itertools.pairwise((0, *ends))]


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 65_535), min_size=1, max_size=30), max_size=12),
    wide=st.booleans(),
)
def test_documents_come_back_as_they_went_in(tmp_path_factory, documents, wide):
    path = tmp_path_factory.mktemp("shard") / "a.tok"
    info = write(path, documents, vocab_size=65_537 if wide else 65_536)
    shard = Shard(path)
    shard.verify()
    assert [shard.document(k).tolist() for k in range(len(documents))] == documents
    assert read_by_the_format_page(path) == documents
    assert shard.tokens.dtype.itemsize == (4 if wide else 2)
    assert shard.sources.tolist() == [k % 3 for k in range(len(documents))]
    assert shard.lines.tolist() == [10 * k + 1 for k in range(len(documents))]
    assert shard.num_bytes.tolist() == [5 * len(tokens) for tokens in documents]
    assert info == ShardInfo(
        "a.tok", sum(map(len, documents)), len(documents), shard.header.num_bytes, shard.header.sha256
    )
    assert (shard.header.bos_id, shard.header.eos_id, shard.header.tokenizer_hash) == (1, 2, HASH)


def test_index_and_tokens_agree_with_the_end_of_document_token_on(tmp_path):  # G1
    write(tmp_path / "a.tok", [[5, 2], [5, 6, 2], [5, 6, 7, 2]], bos_id=None)
    shard = Shard(tmp_path / "a.tok")
    lengths = np.diff(shard.document_ends, prepend=np.uint64(0))
    assert lengths.sum() == len(shard.tokens) == (1 + 2 + 3) + 3
    assert all(shard.document(k)[-1] == 2 for k in range(3))
    assert shard.header.bos_id is None


def test_equal_documents_make_equal_bytes_and_leave_no_temporary_file(tmp_path):
    documents = [np.arange(1, n) for n in range(2, 400)]
    for name in ("one", "two"):
        write(tmp_path / name / "a.tok", documents)
    assert (tmp_path / "one/a.tok").read_bytes() == (tmp_path / "two/a.tok").read_bytes()
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["a.tok"]


def test_a_buffer_that_the_caller_uses_again_does_not_change_the_shard(tmp_path):
    buffer = np.array([7, 8, 9], np.uint16)
    with ShardWriter(tmp_path / "a.tok", vocab_size=10, tokenizer_hash=HASH, bos_id=None, eos_id=None) as writer:
        writer.add_document(buffer, source=0, line=1, num_bytes=3)
        buffer[:] = 0
        writer.finish()
    assert Shard(tmp_path / "a.tok").document(0).tolist() == [7, 8, 9]


def test_a_writer_left_without_finish_leaves_nothing(tmp_path):
    def fail() -> None:
        with ShardWriter(tmp_path / "a.tok", vocab_size=10, tokenizer_hash=HASH, bos_id=None, eos_id=None) as writer:
            writer.add_document(np.array([1]), source=0, line=1, num_bytes=1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_file_that_was_there(tmp_path):
    (tmp_path / "x").write_bytes(b"old")

    def fail() -> None:
        with whole_file(tmp_path / "x") as file:
            file.write(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fail()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x": b"old"}


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([3, 10], "holds token id 10, but the vocabulary has 10 tokens"),
        ([3, -1], "holds token id -1"),
        ([], "at least one whole number"),
        ([0.5], "at least one whole number"),
        ([[1, 2]], r"shape \(1, 2\)"),
    ],
)
def test_tokens_that_cannot_be_ids_are_refused_with_their_place(tmp_path, tokens, message):
    with ShardWriter(tmp_path / "a.tok", vocab_size=10, tokenizer_hash=HASH, bos_id=None, eos_id=None) as writer:
        writer.add_document(np.array([1]), source=4, line=1, num_bytes=1)
        with pytest.raises(DataError, match=message) as caught:
            writer.add_document(np.array(tokens), source=4, line=77, num_bytes=1)
        assert "a.tok" in str(caught.value)
        assert "document 1" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eos_id": 10}, "eos_id=10 is no id of a vocabulary of 10 tokens"),
        ({"bos_id": -1}, "bos_id=-1"),
        ({"tokenizer_hash": "abc"}, "tokenizer_hash='abc' is no SHA-256"),
        ({"vocab_size": 0}, "vocab_size=0"),
    ],
)
def test_settings_that_cannot_be_stored_are_refused(tmp_path, settings, message):
    given_settings = {"vocab_size": 10, "tokenizer_hash": HASH, "bos_id": None, "eos_id": None, **settings}
    with pytest.raises(DataError, match=message):
        ShardWriter(tmp_path / "a.tok", **given_settings)
    assert list(tmp_path.iterdir()) == []


def test_one_flipped_bit_anywhere_is_found(tmp_path):
    path = tmp_path / "a.tok"
    write(path, [[5, 6, 7], [8], [9, 10]])
    whole = path.read_bytes()
    for at in (*range(256), *range(256, HEADER_BYTES, 128), *range(HEADER_BYTES, len(whole))):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.tok"):
            Shard(path).verify()
    path.write_bytes(whole)
    Shard(path).verify()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "header says 4172 bytes, the file has 4171"),
        (lambda data: data + b"\0", "the file has 4173"),
        (lambda data: data[:100], "is no token shard"),
        (lambda data: b"", "is no token shard"),
        (lambda data: b"NPY" + data[3:], "is no token shard"),
        (lambda data: data[:8] + struct.pack("<I", 9) + data[12:], "format version 9, this reader knows 1"),
        (lambda data: data[:200] + b"\1" + data[201:], "header fails its checksum"),
    ],
)
def test_a_file_that_is_no_whole_shard_is_refused_by_name(tmp_path, change, message):
    path = tmp_path / "a.tok"
    write(path, [[5, 6], [7, 8, 9]])
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        Shard(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"missing\.tok: cannot be opened.*No such file"):
        Shard(tmp_path / "missing.tok")


def test_only_the_blocks_asked_for_are_checked_and_a_bad_one_stays_bad(tmp_path):
    path = tmp_path / "a.tok"
    write(path, [np.arange(4 * BLOCK_BYTES // 2) % 900])
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 2 * BLOCK_BYTES + 5] ^= 1
    path.write_bytes(data)
    shard = Shard(path)
    per_block = BLOCK_BYTES // 2

    def check(first: int, last: int) -> None:
        shard.check_tokens(np.array([first]), np.array([last]))

    check(0, per_block - 1)
    check(3 * per_block, 3 * per_block)
    assert shard.file.proven.tolist() == [True, False, False, True, False]  # the last one holds the documents
    for _ in range(2):
        with pytest.raises(DataError, match=r"bytes 69632 to 102399 \(block 2 of 5\) fail"):
            check(0, 4 * per_block - 1)  # a range over several blocks
    with pytest.raises(DataError, match="block 2"):
        check(2 * per_block, 2 * per_block)
    shard.check_documents()
    with pytest.raises(DataError, match="block 2"):
        shard.verify()


def test_a_payload_of_many_writes_has_the_checksums_of_one(tmp_path):
    data = np.random.default_rng(0).bytes(10_000)
    for name, cuts in (("one", [0, 10_000]), ("many", [0, 1, 7, 64, 128, 129, 5000, 9999, 10_000])):
        with BlockWriter(tmp_path / name, magic=b"MAGICMAG", version=1, block_bytes=64) as writer:
            for low, high in itertools.pairwise(cuts):
                writer.write(data[low:high])
            writer.finish(b"fields")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()
    file = BlockFile(tmp_path / "many", magic=b"MAGICMAG", version=1, kind="a test")
    file.verify()
    assert file.proven.all()
    assert len(file.proven) == 157
    assert file.fields[:7] == b"fields\0"


def test_the_manifest_comes_back_as_it_went_in(tmp_path):
    info = write(tmp_path / "shards/train-00000.tok", [[5, 6]])
    tokenizer = TokenizerInfo("hf", HASH, 1000, 1, None, 0, ("tokenizer.json", "añb.json"))
    manifest = Manifest(tokenizer, {"train": (info,), "val": ()}, {"empty": Skipped(2, "x.jsonl:7")}, {"eos": True})
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    assert manifest.shards("val") == manifest.shards("test") == ()
    assert shard_path(tmp_path, info) == tmp_path / "shards" / "train-00000.tok"
    sources = (SourceFile("a/ü.jsonl", 1, 2, 3), SourceFile("\udcff.txt", 4, 5, 6))
    write_sources(tmp_path, sources)
    assert read_sources(tmp_path) == sources


def test_a_folder_that_is_no_dataset_is_refused_with_what_makes_one(tmp_path):
    with pytest.raises(DataError, match=r"has no manifest\.json; it must be a folder made by `pretrain-data build`"):
        Manifest.read(tmp_path)
    with pytest.raises(DataError, match="is no folder"):
        Manifest.read(tmp_path / "absent")
    path = tmp_path / "manifest.json"
    for text, message in (
        ("{", "cannot be read"),
        ("[]", "is no manifest"),
        ('{"version": 1}', "KeyError: 'tokenizer'"),
        (json.dumps({"version": 7}), "format version 7, this reader knows 1"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            Manifest.read(tmp_path)
    (tmp_path / "sources.json").write_text('[{"path": 1, "colour": 2}]')
    with pytest.raises(DataError, match=r"sources\.json: is no list of source files"):
        read_sources(tmp_path)
