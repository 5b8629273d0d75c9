"""Files in, documents with their places out: formats, compression, damage, odd bytes."""

import gzip
import io
import itertools
import json
import lzma
from pathlib import Path

import fsspec
import pyarrow
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from data_prep import files, sources, streams
from data_prep.errors import DataError
from data_prep.sources import BadRow, Document, Piece

COMPRESS = {
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
    ".xz": lambda data: lzma.compress(data),
}


def write(path: Path, content: bytes | str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def rows(*texts: object) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def read_all(inputs: str | list[str], piece_bytes: int = 1 << 20, **options: object) -> list[Document | BadRow]:
    found, _ = files.find([inputs] if isinstance(inputs, str) else inputs)
    pieces = sources.split(found, piece_bytes)
    found = (row for piece in pieces for row in sources.read(piece, **options))  # type: ignore[arg-type]
    return [row for row in found if not isinstance(row, sources.End)]


def texts(inputs: str | list[str], piece_bytes: int = 1 << 20) -> list[str]:
    found = read_all(inputs, piece_bytes)
    assert all(isinstance(row, Document) for row in found), found
    return [row.text for row in found]


def places(inputs: str) -> list[tuple[str, int]]:
    return [(row.reason, row.line) for row in read_all(inputs) if isinstance(row, BadRow)]


def test_every_format_gives_its_documents_with_their_lines(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", rows("one", "two"))
    write(tmp_path / "b.json", json.dumps([{"text": "three"}, {"text": "four"}], indent=1))
    write(tmp_path / "c.json", rows("five", "six"))
    write(tmp_path / "d.json", json.dumps({"text": "seven"}, indent=2))
    write(tmp_path / "e.md", "# eight\n")
    write(tmp_path / "f.py", "nine = 9\n")
    parquet.write_table(pyarrow.table({"text": ["ten", "eleven"], "n": [1, 2]}), tmp_path / "g.parquet")
    found = read_all(str(tmp_path))
    assert [row.text for row in found] == (
        ["one", "two", "three", "four", "five", "six", "seven", "# eight\n", "nine = 9\n", "ten", "eleven"]
    )
    assert [row.line for row in found] == [1, 2, 2, 5, 1, 2, 1, 1, 1, 1, 2]
    assert [row.num_bytes for row in found[:2]] == [3, 3]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_all_members_of_a_compressed_file_are_read(tmp_path: Path, suffix: str) -> None:
    members = [rows("one", "two"), b"", rows("three"), rows("x" * 3_000_000)]
    data = b"".join(COMPRESS[suffix](member) for member in members)
    assert texts(write(tmp_path / f"a.jsonl{suffix}", data)) == ["one", "two", "three", "x" * 3_000_000]


def test_a_skippable_zstd_frame_and_padding_after_gzip_and_xz_members_are_no_damage(tmp_path: Path) -> None:
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    data = COMPRESS[".zst"](rows("one")) + skippable + COMPRESS[".zst"](rows("two"))
    assert texts(write(tmp_path / "a.jsonl.zst", data)) == ["one", "two"]
    for suffix in (".gz", ".xz"):
        assert texts(write(tmp_path / f"a.jsonl{suffix}", COMPRESS[suffix](rows("one")) + bytes(512))) == ["one"]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", ["cut in the second member", "cut by one byte", "flipped"])
def test_a_damaged_compressed_file_is_reported_never_just_shorter(tmp_path: Path, suffix: str, damage: str) -> None:
    noise = [f"{i * 7919 % 10007:x}" for i in range(2000)]
    data = COMPRESS[suffix](rows("first")) + COMPRESS[suffix](rows(*noise))
    if damage == "flipped":
        middle = len(data) // 2
        data = data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :]
    else:
        data = data[: len(data) * 2 // 3 if "second" in damage else -1]
    path = write(tmp_path / f"a.jsonl{suffix}", data)
    found = read_all(path)
    assert isinstance(found[-1], BadRow)
    assert found[-1].reason in ("damaged file", "invalid JSON")  # a flipped bit may pass as other text for a while
    assert any(row.reason == "damaged file" and path in row.detail for row in found if isinstance(row, BadRow))


@given(st.lists(st.binary(max_size=12), max_size=12), st.integers(1, 30))
def test_byte_ranges_share_out_the_lines_without_loss_or_repetition(parts: list[bytes], step: int) -> None:
    data = b"\n".join(parts)
    cuts = [*range(0, len(data), step), len(data)]
    found = []
    for start, end in itertools.pairwise(cuts):
        found += list(streams.lines(io.BytesIO(data), start, end))
    assert found == list(io.BytesIO(data))


def test_a_range_inside_a_long_line_reads_no_further_than_its_end() -> None:
    class Counting(io.BytesIO):
        given = 0

        def readline(self, size: int | None = -1) -> bytes:
            line = super().readline(size)
            self.given += len(line)
            return line

    stream = Counting(b"short\n" + b"x" * 1_000_000 + b"\nlast\n")
    assert list(streams.lines(stream, 1000, 2000)) == []
    assert stream.given <= 1001
    assert list(streams.lines(stream, 999_000, 1_000_020)) == [b"last\n"]


def test_a_jsonl_file_in_pieces_gives_the_rows_of_the_whole(tmp_path: Path) -> None:
    wanted = [f"row {i} " + "x" * (i * 37 % 200) for i in range(300)]
    path = write(tmp_path / "a.jsonl", rows(*wanted))
    for piece_bytes in (1, 100, 1000, 10_000, 1 << 20):
        assert texts(path, piece_bytes) == wanted
    found, _ = files.find([path])
    pieces = sources.split(found, 1000)
    ends = [row.lines for piece in pieces for row in sources.read(piece) if isinstance(row, sources.End)]
    assert sum(ends) == 300  # lines, so that the pieces' first lines can be told
    assert [piece.first_line for piece in pieces[:2]] == [1, 0]


def test_parquet_is_cut_at_row_groups_and_counts_rows_through_the_file(tmp_path: Path) -> None:
    wanted = [f"row {i}" for i in range(100)]
    parquet.write_table(pyarrow.table({"body": wanted}), tmp_path / "a.parquet", row_group_size=10)
    found, _ = files.find([str(tmp_path)])
    pieces = sources.split(found, 1)
    assert len(pieces) == 10
    assert [piece.first_line for piece in pieces] == list(range(1, 101, 10))
    assert [row.text for piece in pieces for row in sources.read(piece, "body")] == wanted  # type: ignore[union-attr]
    with pytest.raises(DataError, match="no column 'text'; its columns: body"):
        list(sources.read(pieces[0]))


def test_a_null_in_parquet_is_a_bad_row_and_a_damaged_file_an_error(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    assert places(str(tmp_path)) == [("text is no string", 2)]
    path = write(tmp_path / "b.parquet", (tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"b\.parquet: no readable parquet file"):
        read_all(path)


def test_byte_order_mark_line_ends_and_unicode_separators(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + json.dumps({"text": "a\u2028b\r\nc\x85d"}, ensure_ascii=False).encode() + b"\r\n\r\n"
    data += json.dumps({"text": "\ufeffsecond"}, ensure_ascii=False).encode()
    found = read_all(write(tmp_path / "a.jsonl", data))
    assert [(row.text, row.line) for row in found] == [("a\u2028b\r\nc\x85d", 1), ("\ufeffsecond", 3)]
    assert texts(write(tmp_path / "b.txt", b"\xef\xbb\xbfone\r\ntwo\r\n")) == ["one\r\ntwo\r\n"]
    assert texts(write(tmp_path / "c.json", b"\xef\xbb\xbf" + rows("x"))) == ["x"]


def test_nul_and_lone_surrogates_become_replacement_characters_and_the_rest_stays(tmp_path: Path) -> None:  # G5
    data = b'{"text": "abc\\u0000def"}\n{"text": "x\\ud800y\\udfffz"}\n{"text": "\\ud83d\\ude00"}\n'
    assert texts(write(tmp_path / "a.jsonl", data)) == ["abc\ufffddef", "x\ufffdy\ufffdz", "\U0001f600"]
    assert texts(write(tmp_path / "b.txt", b"abc\0def")) == ["abc\ufffddef"]
    assert sources.clean("a\0\ud800\u00e9") == ("a\ufffd\ufffd\u00e9", 9)


def test_each_kind_of_bad_row_is_named_with_its_line(tmp_path: Path) -> None:
    lines = [
        b'{"text": "good"}',
        b'{"text": "bad \xff bytes"}',
        b'{"text": "unfinished',
        b'["no", "object"]',
        b'{"body": "x"}',
        b'{"text": 7}',
        b'{"text": null}',
        b'{"text": ""}',
        b'{"text": ' + b"[" * 100_000 + b"}",
        b"",
        b'{"text": "good again", "x": NaN, "y": 123456789012345678901234567890}',
    ]
    path = write(tmp_path / "a.jsonl", b"\n".join(lines))
    assert places(path) == [
        ("invalid UTF-8", 2),
        ("invalid JSON", 3),
        ("no JSON object", 4),
        ("no text key", 5),
        ("text is no string", 6),
        ("text is no string", 7),
        ("empty", 8),
        ("invalid JSON", 9),
    ]
    assert [row.text for row in read_all(path) if isinstance(row, Document)] == ["good", "good again"]
    missing = next(row for row in read_all(path) if isinstance(row, BadRow) and row.reason == "no text key")
    assert missing.detail == "no key 'text'; its keys: 'body'; see --text-key"
    assert places(write(tmp_path / "b.txt", b"latin-1: \xe9")) == [("invalid UTF-8", 1)]


def test_a_json_array_is_read_item_by_item_whatever_its_layout(tmp_path: Path) -> None:
    wanted = ["x" * 2_500_000, "two", '], [ {"', "\u00e9" * 700_000]
    for indent in (None, 3):
        data = "\n\n" + json.dumps([{"text": text} for text in wanted], indent=indent, ensure_ascii=False)
        assert texts(write(tmp_path / "a.json", data)) == wanted
    assert places(write(tmp_path / "b.json", '[{"text": "a"},\n {"text": "b"}')) == [("invalid JSON", 2)]
    assert places(write(tmp_path / "c.json", '[{"text": "a"}, nonsense]')) == [("invalid JSON", 1)]
    assert texts(write(tmp_path / "d.json", "[]")) == []


def test_a_file_named_outright_is_text_whatever_its_suffix(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "README", "hello")) == ["hello"]


def test_fsspec_addresses_files_folders_and_globs(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    try:
        memory.pipe("/corpus/b.jsonl", rows("b1", "b2" * 100))
        memory.pipe("/corpus/a.txt.gz", gzip.compress(b"a"))
        memory.pipe("/corpus/.hidden.txt", b"no")
        parquet.write_table(pyarrow.table({"text": ["p"]}), "/corpus/c.parquet", filesystem=memory)
        assert texts("memory://corpus") == ["a", "b1", "b2" * 100, "p"]
        assert texts("memory://corpus", piece_bytes=20) == ["a", "b1", "b2" * 100, "p"]
        assert texts("memory://corpus/*.jsonl") == ["b1", "b2" * 100]
        monkeypatch.setattr(type(memory), "find", lambda self, path, **_: {path: {}})  # as of a file by HTTP
        assert texts("memory://corpus/a.txt.gz") == ["a"]
        monkeypatch.undo()
        with pytest.raises(DataError, match="no such file or folder"):
            files.find(["memory://nothing"])
        with pytest.raises(DataError, match="cannot be reached through fsspec"):
            files.find(["nosuch://bucket/key"])
    finally:
        memory.rm("/corpus", recursive=True)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_hub_dataset_is_split_over_its_shards_and_each_row_comes_once(tmp_path: Path, count: int) -> None:  # G15
    pytest.importorskip("datasets")
    wanted = [f"row {i}" for i in range(24)]
    for part in range(count):
        write(tmp_path / f"part-{part}.jsonl", rows(*wanted[part::count]))
    found, _ = files.find([f"hub:{tmp_path}:train"])
    pieces = sources.split(found, 1 << 20)
    assert [(piece.start, piece.end) for piece in pieces] == [(i, count) for i in range(count)]
    found = [row.text for piece in pieces for row in sources.read(piece) if isinstance(row, Document)]
    assert sorted(found) == sorted(wanted)


def test_a_hub_dataset_that_does_not_exist_is_a_clear_error(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    found, _ = files.find([f"hub:{tmp_path / 'nothing'}"])
    with pytest.raises(DataError, match="cannot be loaded by `datasets`"):
        sources.split(found, 1 << 20)


def test_pieces_follow_from_the_files_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(*["x" * 90] * 100))
    size = Path(path).stat().st_size
    pieces = sources.split([files.File(path, "jsonl", size)], 1000)
    assert pieces[0] == Piece(path, "jsonl", 0, 1000, 1, 1000)
    assert [piece.start for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]]
    assert pieces[-1].end == size
    assert min(piece.weight for piece in pieces) >= 500
