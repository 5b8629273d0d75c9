"""Files that hold less, more or other than their format allows: said, and never just shorter."""

import itertools
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data_prep.errors import DataError
from data_prep.sources import BadRow, Document
from tests.data_prep.test_sources import COMPRESS, places, read_all, rows, texts, write

A, B = b'{"text": "a"}', b'{"text": "b"}'


def test_what_follows_a_json_array_is_read_on(tmp_path: Path) -> None:
    for content in (
        b"[%s]\n[%s]\n" % (A, B),
        b"[%s][]\n\n [\n%s]" % (A, B),
        b"[%s]\r\n%s\n" % (A, B),
        b"[]%s%s" % (A, B),
        b"[%s\t, %s] " % (A, B),
    ):
        assert texts(write(tmp_path / "a.json", content)) == ["a", "b"], content
    for suffix, compress in COMPRESS.items():
        members = compress(b"[%s]\n" % A) + compress(b"[%s]" % B)
        assert texts(write(tmp_path / f"a.json{suffix}", members)) == ["a", "b"]
    path = write(tmp_path / "b.json", b'["x"]\n%s\n\n[%s]\n' % (A, B))
    assert places(path) == [("no JSON object", 1)]
    assert [(row.text, row.line) for row in read_all(path) if isinstance(row, Document)] == [("a", 2), ("b", 4)]


def test_wrong_separators_and_other_text_in_and_behind_json_arrays_are_bad_rows(tmp_path: Path) -> None:
    for content, line in (
        (b"[%s]xyz" % A, 1),
        (b"[%s],[%s]" % (A, B), 1),
        (b"[%s]\n]" % A, 2),
        (b'[%s]\n"b"\n%s' % (A, B), 2),
        (b"[%s\n %s]" % (A, B), 2),
        (b"[%s,\n]" % A, 2),
        (b"[%s,,%s]" % (A, B), 1),
        (b"[%s]\n[" % A, 2),
        (b"[%s\x0b, %s]" % (A, B), 1),
    ):
        path = write(tmp_path / "a.json", content)
        assert places(path) == [("invalid JSON", line)], content
        assert read_all(path)[0] == Document("a", 1, 1)
    assert places(write(tmp_path / "b.json", b"[,%s]" % A)) == [("invalid JSON", 1)]


def test_a_number_cut_by_the_reader_is_one_item(tmp_path: Path) -> None:
    for shift in range(8):  # the first million characters end inside the number
        content = b"[\n" + b" " * ((1 << 20) - shift) + b"12.5e-7, %s]" % A
        path = write(tmp_path / "a.json", content)
        assert places(path) == [("no JSON object", 2)]
        assert len(read_all(path)) == 2


@pytest.mark.parametrize(
    "content", [b"[%s]" % A, b"[%s]xyz" % A, b'[{"text": "\xff"}]' + b" " * 9000, A, rows("a", "b")]
)
def test_a_compressed_json_file_is_read_to_its_checksum(tmp_path: Path, content: bytes) -> None:
    data = bytearray(COMPRESS[".gz"](content))
    data[-6] ^= 1
    assert ("damaged file", 0) in places(write(tmp_path / "a.json.gz", bytes(data)))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_without_a_member_is_damaged(tmp_path: Path, suffix: str) -> None:
    for name, content in itertools.product(("a.jsonl", "a.txt", "a.json"), (b"", bytes(1), bytes(64), bytes(1 << 15))):
        assert places(write(tmp_path / f"{name}{suffix}", content)) == [("damaged file", 0)], (name, len(content))
    assert texts(write(tmp_path / f"a.jsonl{suffix}", COMPRESS[suffix](b""))) == []


@pytest.mark.parametrize(
    ("suffix", "zeros", "between", "at_the_end"),
    [
        (".gz", 4, False, True),
        (".gz", 1 << 15, False, True),
        (".xz", 4, True, True),
        (".xz", 1 << 15, True, True),
        (".xz", 6, False, False),
        (".zst", 1, False, False),
        (".zst", 4, False, False),
    ],
)
def test_zero_bytes_stand_only_where_the_format_allows_them(
    tmp_path: Path, suffix: str, zeros: int, between: bool, at_the_end: bool
) -> None:
    one, two = (COMPRESS[suffix](rows(text)) for text in ("one", "two"))
    for content, fine in ((one + bytes(zeros) + two, between), (one + two + bytes(zeros), at_the_end)):
        path = write(tmp_path / f"a.jsonl{suffix}", content)
        if fine:
            assert texts(path) == ["one", "two"]
        else:
            assert "damaged file" in dict(places(path))
            assert f"corrupt compressed data: {zeros} zero bytes" in str(read_all(path)[-1])


def test_a_parquet_page_that_fails_its_checksum_is_an_error(tmp_path: Path) -> None:
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    parquet.write_table(pyarrow.table({"text": ["good", "text"]}), tmp_path / "a.parquet", **options)
    data = (tmp_path / "a.parquet").read_bytes()
    assert texts(str(tmp_path / "a.parquet")) == ["good", "text"]
    at = data.index(b"good")
    path = write(tmp_path / "b.parquet", data[:at] + b"food" + data[at + 4 :])
    with pytest.raises(DataError, match=r"b\.parquet: damaged parquet file"):
        read_all(path)


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_invalid_utf8_in_parquet_is_a_bad_row_among_good_ones(tmp_path: Path, kind: str) -> None:
    wanted = [b"row %d" % i for i in range(600)]
    wanted[300] = b"\xff\xfe"
    text = pyarrow.array(wanted, pyarrow.binary()).view(pyarrow.string())
    if kind == "large_string":
        text = pyarrow.array(wanted, pyarrow.large_binary()).view(pyarrow.large_string())
    if kind == "dictionary":
        text = text.dictionary_encode()
    parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    found = read_all(str(tmp_path / "a.parquet"))
    assert [(row.reason, row.line) for row in found if isinstance(row, BadRow)] == [("invalid UTF-8", 301)]
    assert [row.text for row in found if isinstance(row, Document)] == [f"row {i}" for i in range(600) if i != 300]
    assert [row.line for row in found] == list(range(1, 601))
