"""DIR/SHA256SUMS: checksums of a dataset's small files, which carry none themselves. `sha256sum -c` reads it, too.

Shards and row indexes prove themselves; manifest, list of sources and the tokenizer's files are proven here.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from data_prep.blockfile import whole_file
from data_prep.errors import DataError

NAME = "SHA256SUMS"
_PLACES = "sources.json"


def write_sums(folder: Path) -> None:
    with whole_file(folder / NAME) as file:
        file.write(_sums(folder).encode())


def check_sums(folder: Path, *, everything: bool = True) -> None:
    """DataError if a file is not the one that was written, is missing or new. Not `everything`: what is new does no
    harm, and the list of sources, which may be long, is not looked at."""
    try:
        written = (folder / NAME).read_bytes().decode(errors="replace")
    except FileNotFoundError as error:
        raise DataError(f"{folder / NAME}: is missing; run the build to its end") from error
    stated, found = set(written.split("\n")), set(_sums(folder, everything).split("\n"))
    different = sorted(stated ^ found if everything else (line for line in stated - found if _PLACES not in line))
    if different:
        name = different[0].partition("  ")[2]
        raise DataError(f"{folder / name}: is not as it was written, or {NAME} is not; copy or build it again")


def _sums(folder: Path, places: bool = True) -> str:
    tokenizer = sorted(path for path in (folder / "tokenizer").glob("*") if path.is_file())
    paths = [folder / "manifest.json", *([folder / _PLACES] if places else []), *tokenizer]
    sums = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    return "".join(f"{digest}  {name}\n" for name, digest in sums.items())
