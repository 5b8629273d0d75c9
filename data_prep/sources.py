"""Files -> documents, each with its place: text, JSON lines, JSON, parquet, hub datasets.

`files` lists the files, `split` cuts them into pieces that depend on the input alone (never on the number of
workers), `read` yields the documents of a piece. `build` and `tokenizer_train` are the users; bytes and
compression live in `streams`. This is the only file that imports `datasets`.

One rule for what is no text, the same for each tokenizer: NUL and lone surrogates become U+FFFD; a byte order
mark at a file's start is dropped; everything else (CRLF, U+2028, ...) stays as it is. Invalid UTF-8 is a bad row.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

from pydantic_core import from_json

from data_prep import streams
from data_prep.errors import DataError
from data_prep.files import File, hub_parts

_BOM = b"\xef\xbb\xbf"
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")
_COMPRESSED_WEIGHT = 4  # a compressed byte counts as this many when files are grouped
_HUB_WEIGHT = 1 << 28  # of a shard, whose size is not known beforehand
_READ_CHARS = 1 << 20
_BLANK = re.compile(r"[ \t\r\n]*")
_SIGNS = {"]": "[", "[": "]", ",": "", "": ",]"}  # behind a sign of an array ("": an item; "]": outside): what may come


class Piece(NamedTuple):
    """One file, or a fixed part of it: what one manifest entry of `sources` stands for."""

    path: str
    format: str
    start: int  # jsonl: first byte; parquet: first row group; hub: shard number
    end: int  # jsonl: one past the last byte; parquet: last row group + 1; hub: number of shards; -1: the whole file
    first_line: int  # number of its first line or row in the file; 0: known only after the pieces before were read
    weight: int  # about how many bytes of text it holds


class Document(NamedTuple):
    text: str
    line: int  # 1-based line or row, counted from the start of the piece
    num_bytes: int  # of the text in UTF-8


class BadRow(NamedTuple):
    reason: str  # one of a small set, for counting
    line: int
    detail: str


class End(NamedTuple):
    lines: int  # how many lines or rows the piece had: where the file's next piece goes on counting


Row = Document | BadRow | End


# ---- cutting into pieces


def split(files: Iterable[File], piece_bytes: int) -> list[Piece]:
    """Pieces of about `piece_bytes` where a file can be cut (plain jsonl at lines, parquet at row groups, a hub
    dataset at its shards), else one piece a file. A function of the files and `piece_bytes` alone."""
    pieces: list[Piece] = []
    for path, kind, size, _ in files:
        compressed = path.lower().endswith(streams.COMPRESSIONS)
        if kind == "parquet":
            pieces += _parquet_pieces(path, piece_bytes)
        elif kind == "hub":
            count = max(1, _hub_dataset(path).num_shards)
            pieces += [Piece(path, kind, i, count, 0 if i else 1, _HUB_WEIGHT) for i in range(count)]
        elif kind == "jsonl" and not compressed and size > piece_bytes:
            cuts = [*range(0, size - piece_bytes // 2, piece_bytes), size]
            for start, end in itertools.pairwise(cuts):
                pieces.append(Piece(path, kind, start, end, 0 if start else 1, end - start))
        else:
            pieces.append(Piece(path, kind, 0, -1, 1, size * (_COMPRESSED_WEIGHT if compressed else 1)))
    return pieces


def _parquet_pieces(path: str, piece_bytes: int) -> Iterator[Piece]:
    with streams.open_plain(path) as stream:
        metadata = _parquet_file(stream, path).metadata
    start = first_line = rows = weight = 0
    for group in range(metadata.num_row_groups):
        rows += metadata.row_group(group).num_rows
        weight += metadata.row_group(group).total_byte_size
        if weight >= piece_bytes or group == metadata.num_row_groups - 1:
            yield Piece(path, "parquet", start, group + 1, first_line + 1, weight)
            start, first_line, weight = group + 1, rows, 0


# ---- reading documents


def read(piece: Piece, text_key: str = "text") -> Iterator[Row]:
    """Documents of a piece in order, a BadRow for each row that is none, and for jsonl and hub an End.

    An empty text is a BadRow of reason "empty". Damage that ends a file early (a truncated .gz) is a BadRow
    of reason "damaged file" and the last of its file. A file that cannot be opened raises DataError.
    """
    if piece.format == "hub":
        number = 0
        for number, row in enumerate(_hub_rows(piece), 1):
            yield _row(row, number, text_key)
        yield End(number)
        return
    with streams.open_plain(piece.path) if piece.format == "parquet" else streams.open_bytes(piece.path) as stream:
        try:
            if piece.format == "text":
                yield from _read_text(stream)
            elif piece.format == "jsonl":
                end = None if piece.end < 0 else piece.end
                yield from _read_lines(streams.lines(stream, piece.start, end), text_key)
            elif piece.format == "json":
                yield from _read_json(stream, text_key)
            else:
                yield from _read_parquet(stream, piece, text_key)
        except DataError as error:
            if piece.format == "parquet":
                raise
            yield BadRow("damaged file", 0, str(error))


def clean(text: str) -> tuple[str, int]:
    """The text with NUL and lone surrogates replaced by U+FFFD, and its length in UTF-8 bytes."""
    if "\0" in text:
        text = _NOT_TEXT.sub("\ufffd", text)
    if text.isascii():
        return text, len(text)
    try:
        return text, len(text.encode())
    except UnicodeEncodeError:
        text = _NOT_TEXT.sub("\ufffd", text)
        return text, len(text.encode())


def _document(text: Any, line: int, text_key: str) -> Document | BadRow:
    if not isinstance(text, str):
        return BadRow("text is no string", line, f"{text_key!r} is {'null' if text is None else type(text).__name__}")
    text, num_bytes = clean(text)
    return Document(text, line, num_bytes) if text else BadRow("empty", line, "the text is empty")


def _read_text(stream: BinaryIO) -> Iterator[Document | BadRow]:
    try:
        yield _document(stream.read().removeprefix(_BOM).decode(), 1, "")
    except UnicodeDecodeError as error:
        yield BadRow("invalid UTF-8", 1, str(error))


def _read_lines(lines: Iterable[bytes], text_key: str) -> Iterator[Row]:
    number = 0
    for number, line in enumerate(lines, 1):
        if number == 1:
            line = line.removeprefix(_BOM)
        if not line.isspace():
            yield _parse_row(line, number, text_key)
    yield End(number)


def _parse_row(line: bytes, number: int, text_key: str) -> Document | BadRow:
    try:
        return _row(from_json(line, cache_strings="keys"), number, text_key)  # twice as fast as `json`, but stricter
    except ValueError:
        pass
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadRow("invalid UTF-8", number, str(error))
    except (ValueError, RecursionError) as error:
        return BadRow("invalid JSON", number, str(error))
    return _row(row, number, text_key)


def _row(row: Any, number: int, text_key: str) -> Document | BadRow:
    if not isinstance(row, dict):
        return BadRow("no JSON object", number, f"the row is a {type(row).__name__}")
    if text_key not in row:
        keys = ", ".join(map(repr, list(row)[:8])) or "none"
        return BadRow("no text key", number, f"no key {text_key!r}; its keys: {keys}; see --text-key")
    return _document(row[text_key], number, text_key)


def _read_json(stream: BinaryIO, text_key: str) -> Iterator[Document | BadRow]:
    """A .json file: arrays of objects (read item by item), objects one a line, or a single object."""
    first = stream.readline().removeprefix(_BOM)
    before = 0
    while first and first.isspace():
        first = stream.readline()
        before += 1
    if first.lstrip().startswith(b"["):
        yield from _read_arrays(first, stream, before, text_key)
        return
    try:
        json.loads(first.decode())
        one_a_line = True
    except ValueError:
        one_a_line = False
    if one_a_line:
        yield _parse_row(first, before + 1, text_key)
        for item in _read_lines(streams.lines(stream), text_key):
            if not isinstance(item, End):
                yield item._replace(line=item.line + before + 1)
    elif first:
        yield _parse_row(first + stream.read(), before + 1, text_key)


def _read_arrays(first: bytes, stream: BinaryIO, before: int, text_key: str) -> Iterator[Document | BadRow]:
    """Arrays item by item, and what follows the first: further arrays and objects, one after another."""
    decoder = json.JSONDecoder()
    rest = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    line = before + 1
    try:
        buffer, at, more = first.decode(), 0, True
        behind = "]"
        while True:
            blank = _BLANK.match(buffer, at)
            assert blank is not None
            line += blank.group().count("\n")
            at = blank.end()
            try:
                sign = buffer[at : at + 1]
                if not sign:
                    if behind == "]" and not more:
                        return
                    raise ValueError("the array does not end")
                if sign in _SIGNS[behind]:
                    behind, at = sign, at + 1
                    continue
                if not behind:
                    raise ValueError(f"{sign!r} behind an item, where ',' or ']' is due")
                row, end = decoder.raw_decode(buffer, at)
                if more and end > len(buffer) - 3:
                    raise ValueError("a number may go on: '1' as '1e-5'")
                if behind == "]" and not isinstance(row, dict):
                    raise ValueError("behind an array come arrays and objects only")
            except (ValueError, RecursionError) as error:
                if not more:
                    detail = getattr(error, "msg", error)
                    yield BadRow("invalid JSON", line, f"{detail}; the rest of the file is lost")
                    return
                added = rest.read(max(_READ_CHARS, len(buffer) - at))  # doubling: a long row is parsed few times
                buffer, at, more = buffer[at:] + added, 0, bool(added)
                continue
            yield _row(row, line, text_key)
            line += buffer.count("\n", at, end)
            at = end
            behind = behind if behind == "]" else ""
    except UnicodeDecodeError as error:
        yield BadRow("invalid UTF-8", line, f"{error}; the rest of the file is lost")
        while rest.buffer.read(_READ_CHARS):  # to the end, so that other damage shows
            pass
    finally:
        rest.detach()


def _parquet_file(stream: BinaryIO, path: str) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(stream, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: no readable parquet file: {error}") from error


def _read_parquet(stream: BinaryIO, piece: Piece, text_key: str) -> Iterator[Document | BadRow]:
    import pyarrow

    table = _parquet_file(stream, piece.path)
    if text_key not in table.schema_arrow.names:
        raise DataError(
            f"{piece.path}: no column {text_key!r}; its columns: {', '.join(table.schema_arrow.names)}; see --text-key"
        )
    groups = range(piece.start, piece.end)
    batches = table.iter_batches(batch_size=256, row_groups=groups, columns=[text_key], use_threads=False)
    try:
        for number, text in enumerate(itertools.chain.from_iterable(map(_values, batches)), 1):
            if isinstance(text, UnicodeDecodeError):
                yield BadRow("invalid UTF-8", number, str(text))
            else:
                yield _document(text, number, text_key)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{piece.path}: damaged parquet file: {error}") from error


def _values(batch: Any) -> list[Any]:
    """The batch's one column as Python values, with the error in place of a text that is not UTF-8."""
    try:
        return batch.column(0).to_pylist()
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in batch.column(0)]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error


def _hub_dataset(address: str) -> Any:
    """The streaming dataset of `hub:name[:config][:split]`."""
    import datasets

    name, config, split_name = hub_parts(address)
    try:
        return datasets.load_dataset(name, config or None, split=split_name, streaming=True)
    except Exception as error:  # datasets raises many kinds of its own, urllib's and fsspec's
        raise DataError(f"{address}: cannot be loaded by `datasets`: {type(error).__name__}: {error}") from error


def _hub_rows(piece: Piece) -> Iterator[Any]:
    dataset = _hub_dataset(piece.path)
    if dataset.num_shards != piece.end and piece.end > 1:
        raise DataError(f"{piece.path}: has {dataset.num_shards} shards now, had {piece.end} when the build began")
    if piece.end > 1:
        dataset = dataset.shard(num_shards=piece.end, index=piece.start)
    return iter(dataset)
