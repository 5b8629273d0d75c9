"""Bytes of one input file: local or through fsspec, plain or .gz / .zst / .xz, and its lines.

`files` and `sources` stand on this file. Nothing here knows documents.
A compressed file holds one or more members (gzip, xz) or frames (zstd); one that holds none or ends inside a
member raises DataError, where several readers of the trade would hand out a shorter file.
"""

from __future__ import annotations

import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import zstandard

from data_prep.errors import DataError

_ZEROS_FIT: dict[str, Callable[[int, bool], bool]] = {  # padding behind a member: (zero bytes, the file ends) -> right?
    ".gz": lambda zeros, ends: ends or not zeros,
    ".zst": lambda zeros, ends: not zeros,
    ".xz": lambda zeros, ends: zeros % 4 == 0,
}
COMPRESSIONS = tuple(_ZEROS_FIT)
_FEED_BYTES = 1 << 14  # compressed bytes fed at a time: bounds what a decompressor may hand back at once
_BUFFER_BYTES = 1 << 17  # with what else a worker touches for a document it stays in the cache, beside the tokenizer


def is_remote(path: str) -> bool:
    """True for `s3://bucket/key` and the like, which go through fsspec."""
    return "://" in path


def filesystem(path: str) -> tuple[Any, str]:
    """The fsspec file system of a remote address, and the address as that file system writes it."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise DataError(f"{path}: cannot be reached through fsspec: {error}") from error


def modified(path: str) -> str:
    """When a local file was modified."""
    try:
        return str(os.stat(path).st_mtime_ns)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def modified_in(details: dict[str, Any]) -> str:
    """What changes when a remote file does, of an entry as fsspec lists it, whose keys differ by file system; or ""."""
    keys = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
    return str(next((details[key] for key in keys if details.get(key)), ""))


def open_plain(path: str) -> BinaryIO:
    """The file's own bytes, buffered and seekable."""
    try:
        if is_remote(path):
            fs, name = filesystem(path)
            return fs.open(name, "rb")
        return open(path, "rb", buffering=_BUFFER_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror or error}") from error


def open_bytes(path: str) -> BinaryIO:
    """The file's content, decompressed by the last suffix of its name."""
    suffix = os.path.splitext(path)[1].lower()
    plain = open_plain(path)
    if suffix not in COMPRESSIONS:
        return plain
    return io.BufferedReader(_Members(plain, path, suffix), _BUFFER_BYTES)


def lines(stream: BinaryIO, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Lines with their b"\\n"; only that byte ends a line (so U+2028 and a lone CR do not).

    With a range, the lines whose first byte lies in [start, end): ranges that partition a file share
    out its lines without loss or repetition, whatever a range holds.
    """
    position = start
    if start:
        stream.seek(start - 1)
        position -= 1
        rest = b""
        while not rest.endswith(b"\n"):  # the line that began before us belongs to the range before
            rest = stream.readline(_BUFFER_BYTES if end is None else min(_BUFFER_BYTES, end - position))
            position += len(rest)
            if not rest:
                return
    while end is None or position < end:
        line = stream.readline()
        if not line:
            return
        position += len(line)
        yield line


class _Members(io.RawIOBase):
    """Decompressed bytes of all members of a file, one after the other."""

    def __init__(self, compressed: BinaryIO, path: str, suffix: str):
        self._compressed, self._path = compressed, path
        self._new, self._zeros_fit = _decompressor_of(suffix), _ZEROS_FIT[suffix]
        self._member: Any = None  # the decompressor in the middle of its member
        self._zeros: int | None = None  # bytes of padding since the last member; None: there was no member
        self._waiting = b""  # compressed bytes that were read but not yet fed
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._compressed.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            fed = self._waiting or self._compressed.read(_FEED_BYTES)
            self._waiting = b""
            if not fed:
                if self._member is not None:
                    raise DataError(f"{self._path}: truncated: the compressed data ends inside a member")
                if self._zeros is None:
                    raise DataError(f"{self._path}: empty: there is no compressed data in it")
                self._check_padding(ends=True)
                return 0
            self._ready = memoryview(self._decompress(fed))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self, fed: bytes) -> bytes:
        if self._member is None:
            if self._zeros is not None:
                size = len(fed)
                fed = fed.lstrip(b"\0")
                self._zeros += size - len(fed)
                if not fed:
                    return b""
                self._check_padding(ends=False)
            self._member = self._new()
        try:
            out = self._member.decompress(fed)
        except (zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            raise DataError(f"{self._path}: corrupt compressed data: {error}") from error
        if self._member.eof:
            self._waiting = self._member.unused_data
            self._member, self._zeros = None, 0
        return out

    def _check_padding(self, ends: bool) -> None:
        if not self._zeros_fit(self._zeros or 0, ends):
            where = "at the end" if ends else "between members"
            raise DataError(f"{self._path}: corrupt compressed data: {self._zeros} zero bytes {where}")


def _decompressor_of(suffix: str) -> Callable[[], Any]:
    if suffix == ".gz":
        return lambda: zlib.decompressobj(wbits=31)
    if suffix == ".xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ)
    return lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
