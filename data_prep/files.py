"""What the user points at -> a list of files: files, folders, globs, fsspec addresses, hub datasets.

`find` is the whole interface; `sources` reads what it found. The list depends on the inputs alone: its order is
theirs, sorted by path within each, and no file comes twice, whatever names lead to it.
"""

from __future__ import annotations

import fnmatch
import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from data_prep import streams
from data_prep.errors import DataError

TEXT_SUFFIXES = frozenset(
    ".txt .text .md .markdown .rst .tex .html .htm .xml .py .pyi .ipynb .c .h .cc .cpp .cxx .hpp .hh .cu .cuh .m"  # noqa: SIM905
    " .java .kt .scala .js .mjs .jsx .ts .tsx .go .rs .rb .php .pl .lua .jl .r .hs .ml .swift .sh .bash .sql"
    " .css .toml .yaml .yml .ini .cfg .lean .v .f90".split()
)
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
_TEMPORARY = (".tmp", ".temp", ".part", ".partial", ".crdownload", ".swp", ".bak", "~")
_NOT_PLAIN = "that are no plain files"


class File(NamedTuple):
    path: str  # as given or found: what the manifest shows
    format: str  # text | jsonl | json | parquet | hub
    size: int  # bytes on disk; 0 where unknown (hub)
    modified: str = ""  # changes when the file does: a time, or what a remote system tells; "" where nothing tells


def find(inputs: Sequence[str], *, exclude: Sequence[str] = ()) -> tuple[list[File], list[str]]:
    """All files of the inputs in a fixed order (as given; sorted by path inside a folder or glob), each once.

    `exclude` holds globs over the path below the folder given, `*` matching `/` too. Also returns notes for the
    user about what was left out. Raises DataError for an input that names nothing readable.
    """
    files: dict[str, File] = {}  # by what the name leads to
    folders: dict[str, str] = {}
    notes = []
    for given in inputs:
        left_out: Counter[str] = Counter()
        if given.startswith("hub:"):
            found = [File(given, "hub", 0)]
        elif not given:
            raise DataError("an input is the empty string; give a file, folder, glob, address or hub:name")
        else:
            found = list(_find_paths(given, exclude, left_out))
        said = ", ".join(f"{count} {what}" for what, count in sorted(left_out.items()))
        if not found:
            raise DataError(
                f"{given}: no file with text (known are {' '.join(FORMATS)}, text and source files, and"
                f" {' '.join(streams.COMPRESSIONS)} of them)" + (f"; left out: {said}" if said else "")
            )
        before = len(files)
        for file in found:
            files.setdefault(_identity(file.path, folders), file)
        if said:
            notes.append(f"{given}: left out {said}")
        if again := before + len(found) - len(files):
            notes.append(f"{given}: {again} files came before, by this name or another, and are taken once")
    return list(files.values()), notes


def _find_paths(given: str, exclude: Sequence[str], left_out: Counter[str]) -> Iterator[File]:
    if streams.is_remote(given):
        yield from _find_remote(given, exclude, left_out)
    elif os.path.isfile(given):
        yield _local(given)
    elif os.path.isdir(given):
        yield from _find_below(given, exclude, left_out)
    elif glob.has_magic(given):
        for path in sorted(set(_matches(given, left_out))):
            if os.path.isdir(path):
                continue  # a folder that happens to match (G04: "b.jsonl/"); "**" names the files below it itself
            if reason := _left_out(os.path.basename(path), path, exclude):
                left_out[reason] += 1
            else:
                yield from _plain(path, left_out)
    else:
        raise DataError(f"{given}: no such file or folder")


def _find_below(folder: str, exclude: Sequence[str], left_out: Counter[str]) -> Iterator[File]:
    below = []
    for root, _, names in _walk(folder, left_out):
        for name in names:
            below.append(os.path.relpath(os.path.join(root, name), folder).replace(os.sep, "/"))
    for relative in sorted(below):
        if reason := _left_out(relative, relative, exclude):
            left_out[reason] += 1
        else:
            yield from _plain(os.path.join(folder, relative), left_out)


def _matches(pattern: str, left_out: Counter[str]) -> Iterator[str]:
    """As `glob.glob` (hidden files only where the pattern names the dot), but "**" follows no link to a folder."""
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    at = parts.index("**")
    behind = "/".join(parts[at + 1 :]) or "*"
    for top in glob.glob("/".join([*parts[:at], ""])) if at else ["."]:
        for root, folders, _ in _walk(top, left_out):
            folders[:] = [name for name in folders if not name.startswith(".")]
            root = root if at else root.removeprefix(".").removeprefix("/")
            yield from _matches(os.path.join(glob.escape(root), behind), left_out)


def _walk(top: str, left_out: Counter[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, with a word on what it leaves out: links to folders, which may lead round in circles."""
    for root, folders, names in os.walk(top, onerror=_not_listed):
        for name in folders:
            if os.path.islink(os.path.join(root, name)):
                left_out["links to folders"] += 1
        yield root, folders, names


def _not_listed(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be listed: {error.strerror or error}") from error


def _find_remote(given: str, exclude: Sequence[str], left_out: Counter[str]) -> Iterator[File]:
    fs, name = streams.filesystem(given)
    try:
        if glob.has_magic(name):
            details = {k: v for k, v in fs.glob(name, detail=True).items() if v["type"] != "directory"}
            root = ""
        else:
            details = fs.find(name, detail=True)
            root = "" if name in details else name.rstrip("/") + "/"
            if not root:
                details = {name: fs.info(name)}  # of a file itself, some systems list nothing but the name
    except (OSError, ValueError) as error:
        raise DataError(f"{given}: cannot be listed: {error}") from error
    if not details:
        raise DataError(f"{given}: no such file or folder")
    for path in sorted(details):
        relative = path.removeprefix(root) if root else path.rsplit("/", 1)[-1]
        alone = len(details) == 1 and not root
        if not alone and (reason := _left_out(relative, path.removeprefix(root), exclude)):
            left_out[reason] += 1
            continue
        if details[path]["type"] != "file":
            left_out[_NOT_PLAIN] += 1
            continue
        size, modified = int(details[path]["size"] or 0), streams.modified_in(details[path])
        yield File(fs.unstrip_protocol(path), _format_of(path) or "text", size, modified)


def _plain(path: str, left_out: Counter[str]) -> Iterator[File]:
    if os.path.isfile(path):  # not a socket, nor a link to nowhere
        yield _local(path)
    else:
        left_out[_NOT_PLAIN] += 1


def _local(path: str) -> File:
    return File(path, _format_of(path) or "text", os.path.getsize(path), streams.modified(path))


def _identity(path: str, folders: dict[str, str]) -> str:
    """The same for all names of one file. `folders` remembers where the links in a folder's path lead."""
    if path.startswith("hub:"):
        return "hub:" + ":".join(hub_parts(path))
    path = path.removeprefix("file://")
    if streams.is_remote(path):
        return path
    folder, name = os.path.split(path)
    if folder not in folders:
        folders[folder] = os.path.realpath(folder)
    path = os.path.join(folders[folder], name)
    return os.path.realpath(path) if os.path.islink(path) else path


def hub_parts(address: str) -> tuple[str, str, str]:
    """Name, config ("": the default one) and split of `hub:name[:config][:split]`; the split defaults to train.

    One part after the name is a split if it is called like one, else a config.
    """
    name, _, rest = address.removeprefix("hub:").partition(":")
    config, _, split = rest.partition(":")
    if config in ("train", "validation", "test") and not split:
        config, split = "", config
    return name, config, split or "train"


def _left_out(relative: str, full: str, exclude: Sequence[str]) -> str | None:
    parts = relative.split("/")
    if any(fnmatch.fnmatchcase(full, pattern) for pattern in exclude):
        return "excluded"
    if any(part.startswith(".") for part in parts):
        return "hidden"
    if "__pycache__" in parts or parts[-1].endswith(_TEMPORARY):
        return "temporary"
    if _format_of(parts[-1]) is None:
        return "of other kinds"
    return None


def _format_of(path: str) -> str | None:
    stem, suffix = os.path.splitext(path.lower())
    compressed = suffix in streams.COMPRESSIONS
    if compressed:
        suffix = os.path.splitext(stem)[1]
    if suffix == ".parquet" and compressed:
        return None  # parquet compresses inside; its reader has to seek
    return FORMATS.get(suffix) or ("text" if suffix in TEXT_SUFFIXES else None)
