"""Other projects' token files: read as their own tools write them, written as their own tools read them."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from data_prep import convert
from data_prep.build import build
from data_prep.convert import export_dataset, import_dataset
from data_prep.errors import DataError
from data_prep.inspect import open_shard, stats, verify
from data_prep.plan import Settings
from data_prep.shard import Manifest
from data_prep.tokenizer import load_tokenizer

FORMATS = ("megatron", "nanogpt", "datatrove")


def documents(folder: Path, split: str = "train") -> list[list[int]]:
    shards = [open_shard(folder, info) for info in Manifest.read(folder).shards(split)]
    return [shard.document(i).tolist() for shard in shards for i in range(shard.header.documents)]


@pytest.fixture(scope="module")
def dataset(tokenizers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"h\u00e9llo number {i} " * (i + 1))
    settings = Settings((str(folder / "*.txt"),), val_fraction=0.2)
    build(settings, tokenizers["tiktoken"], folder / "out", seq_len=32, say=lambda _: None)
    return folder / "out"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shard_tokens", [convert.SHARD_TOKENS, 500])
def test_what_is_exported_is_imported_again(
    dataset: Path,
    tokenizers: dict[str, Path],
    tmp_path: Path,
    kind: str,
    shard_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(convert, "SHARD_TOKENS", shard_tokens)
    monkeypatch.setattr(convert, "_COPY_TOKENS", 200)
    written = export_dataset(kind, dataset, tmp_path / "out")
    assert all(path.is_file() for path in written)
    import_dataset(kind, tmp_path / "out", tmp_path / "back", tmp_path / "out" / "tokenizer", seq_len=32)
    verify(tmp_path / "back")
    for split in ("train", "val"):
        assert documents(tmp_path / "back", split) == documents(dataset, split)
    assert (len(Manifest.read(tmp_path / "back").shards("train")) > 1) == (shard_tokens == 500)
    before, after = stats(dataset), stats(tmp_path / "back")
    for key in ("documents", "tokens", "rows", "targets", "bytes_per_token"):
        assert after[key] == before[key]


def test_megatron_files_are_what_megatron_reads(dataset: Path, tmp_path: Path) -> None:
    export_dataset("megatron", dataset, tmp_path)
    raw = (tmp_path / "train.idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\0\0"
    version, code, sequences, entries = struct.unpack("<QBQQ", raw[9:34])
    wanted = documents(dataset)
    assert (version, code, sequences, entries) == (1, 8, len(wanted), len(wanted) + 1)
    sizes = np.frombuffer(raw, np.int32, sequences, 34)
    pointers = np.frombuffer(raw, np.int64, sequences, 34 + 4 * sequences)
    assert np.frombuffer(raw, np.int64, entries, 34 + 12 * sequences).tolist() == list(range(entries))
    assert len(raw) == 34 + 12 * sequences + 8 * entries
    tokens = (tmp_path / "train.bin").read_bytes()
    found = [
        np.frombuffer(tokens, np.uint16, size, pointer).tolist() for size, pointer in zip(sizes, pointers, strict=True)
    ]
    assert found == wanted


def write_megatron(path: Path, sequences: list[list[int]], documents_at: list[int], code: int, dtype: str) -> None:
    """As Megatron's own builder lays it out: a document may be several sequences."""
    path.with_suffix(".bin").write_bytes(b"".join(np.array(s, dtype).tobytes() for s in sequences))
    sizes = np.array([len(s) for s in sequences], np.int32)
    pointers = (np.cumsum(sizes) - sizes).astype(np.int64) * np.dtype(dtype).itemsize
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents_at))
    body = sizes.tobytes() + pointers.tobytes() + np.array(documents_at, np.int64).tobytes()
    path.with_suffix(".idx").write_bytes(head + body)


def test_a_megatron_document_of_several_sequences_comes_in_as_one(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    sequences = [[5, 6], [7, 8, 9], [10], [11, 12]]
    for code, dtype in ((4, "<i4"), (8, "<u2")):
        write_megatron(tmp_path / f"x{code}", sequences, [0, 2, 2, 4], code, dtype)  # the middle document is empty
        for given in (f"x{code}", f"x{code}.bin", f"x{code}.idx"):
            out = tmp_path / f"out-{given}"
            import_dataset("megatron", tmp_path / given, out, tokenizers["bpe"])
            assert documents(out) == [[5, 6, 7, 8, 9], [10, 11, 12]]
            verify(out)


def llmc_header(magic: int, version: int, count: int) -> bytes:
    return struct.pack("<3i", magic, version, count).ljust(1024, b"\0")


def test_nanogpt_files_end_documents_at_eos_and_a_header_is_no_token(
    tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(tokenizers["bpe"])
    tokens = np.array([5, 6, tokenizer.eos_id, 7, tokenizer.eos_id, 8, 9], np.uint16)
    (tmp_path / "train.bin").write_bytes(tokens.tobytes())
    (tmp_path / "val.bin").write_bytes(tokens[:3].tobytes())
    import_dataset("nanogpt", tmp_path, tmp_path / "out", tokenizers["bpe"])
    assert documents(tmp_path / "out") == [[5, 6, 1], [7, 1], [8, 9]]
    assert documents(tmp_path / "out", "val") == [[5, 6, 1]]
    for magic, dtype in ((20240520, np.uint16), (20240801, np.uint32)):
        path, out = tmp_path / f"{magic}.bin", tmp_path / f"out-{magic}"
        whole = llmc_header(magic, 1, len(tokens)) + tokens.astype(dtype).tobytes()
        for content, message in (
            (whole[:-4], rf"{magic}\.bin: its header says 7 tokens, but \d follow"),
            (whole[:-1], "are no whole number of"),
            (whole[:100], "is cut short: 100 of the 1024 bytes"),
            (llmc_header(magic, 9, len(tokens)) + whole[1024:], "has llm.c's format version 9; known is version 1"),
        ):
            path.write_bytes(content)
            with pytest.raises(DataError, match=message):
                import_dataset("nanogpt", path, out, tokenizers["bpe"])
        path.write_bytes(whole)
        import_dataset("nanogpt", path, out, tokenizers["bpe"])
        assert documents(out) == [[5, 6, 1], [7, 1], [8, 9]]


def test_datatrove_files_of_either_width(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    for name, dtype in (("a.ds", "<u2"), ("b.ds", "<u4")):
        (tmp_path / name).write_bytes(np.array([3, 4, 1, 5, 1], dtype).tobytes())
        (tmp_path / f"{name}.index").write_bytes(struct.pack("<2Q", 3, 5))
    import_dataset("datatrove", tmp_path, tmp_path / "out", tokenizers["bpe"])
    assert documents(tmp_path / "out") == [[3, 4, 1], [5, 1]] * 2
    export_dataset("datatrove", tmp_path / "out", tmp_path / "again")
    name, count, _ = (tmp_path / "again" / "train.ds.metadata").read_text().split("\n")
    assert (name.rpartition("|")[2], count) == ("2", "10")


def test_files_that_contradict_themselves_or_the_tokenizer_are_refused(
    tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    def refused(kind: str, name: str, message: str) -> None:
        with pytest.raises(DataError, match=message):
            import_dataset(kind, tmp_path / name, tmp_path / "out", tokenizers["bpe"])
        assert not (tmp_path / "out" / "manifest.json").exists()

    write_megatron(tmp_path / "big", [[5, 480]], [0, 1], 8, "<u2")
    refused("megatron", "big", "holds token ids 5 to 480, but the tokenizer has 480")
    write_megatron(tmp_path / "cut", [[5, 6], [7]], [0, 1, 2], 8, "<u2")
    (tmp_path / "cut.bin").write_bytes(b"\5\0\6\0")
    refused("megatron", "cut", "do not follow one another through the 2 tokens")
    (tmp_path / "cut.idx").write_bytes((tmp_path / "cut.idx").read_bytes()[:-9])
    refused("megatron", "cut", "is cut short")
    (tmp_path / "cut.idx").write_bytes(b"nonsense")
    refused("megatron", "cut", "is no Megatron index")
    (tmp_path / "cut.idx").unlink()
    refused("megatron", "cut", "cannot be read beside cut.bin")
    write_megatron(tmp_path / "gap", [[5], [6]], [0, 1], 8, "<u2")
    refused("megatron", "gap", "its documents do not partition its 2 sequences")
    write_megatron(tmp_path / "float", [[5]], [0, 1], 7, "<f4")
    refused("megatron", "float", "dtype code 7")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    refused("nanogpt", "odd.bin", "no whole number of 2-byte tokens")
    (tmp_path / "endless.bin").write_bytes(np.array([5, 6], np.uint16).tobytes())
    refused("nanogpt", "endless.bin", r"no EOS \(id 1\) in it")
    (tmp_path / "a.ds").write_bytes(bytes(10))
    refused("datatrove", "a.ds", r"a\.ds\.index: is missing")
    (tmp_path / "a.ds.index").write_bytes(struct.pack("<Q", 7))
    refused("datatrove", "a.ds", "ends at token 7, which does not fit the 10 bytes")
    (tmp_path / "a.ds.loss").write_bytes(bytes(5))
    refused("datatrove", "a.ds", "a loss mask, which shards cannot hold")
    refused("megatron", "nothing", "no such file or folder")
    (tmp_path / "folder").mkdir()
    refused("nanogpt", "folder", r"no \*\.bin in the folder")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").touch()
    with pytest.raises(DataError, match="is not empty"):
        import_dataset("megatron", tmp_path / "big", tmp_path / "used", tokenizers["bpe"])


def test_ids_beyond_16_bits_do_not_go_into_nanogpts_format(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers

    from data_prep.tokenizer_hf import BYTE_OF_CHAR

    vocabulary = {char: i for i, char in enumerate(sorted(BYTE_OF_CHAR))}
    library = Library(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    config = {"added_tokens_decoder": {"70000": {"content": "<later>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "a.txt").write_text("text")
    settings = Settings((str(tmp_path / "a.txt"),))
    build(settings, tmp_path / "tokenizer.json", tmp_path / "out", seq_len=8, say=lambda _: None)
    with pytest.raises(DataError, match="its 70001 ids do not fit the 16 bits of nanoGPT's format"):
        export_dataset("nanogpt", tmp_path / "out", tmp_path / "x")
    for kind, suffix in (("megatron", "bin"), ("datatrove", "ds")):
        export_dataset(kind, tmp_path / "out", tmp_path / kind)
        assert (tmp_path / kind / f"train.{suffix}").stat().st_size == 4 * 5
        import_dataset(kind, tmp_path / kind, tmp_path / f"{kind}-back", tmp_path / kind / "tokenizer")
        assert documents(tmp_path / f"{kind}-back") == documents(tmp_path / "out")
