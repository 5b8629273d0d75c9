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


def check_sums(folder: Path, *, places: bool = True) -> None:
    """DataError if a file is not the one that was written, is missing or new. Without `places` the list of sources,
    which may be long and which training does not read, is left out."""
    try:
        written = (folder / NAME).read_bytes().decode(errors="replace")
    except FileNotFoundError as error:
        raise DataError(f"{folder / NAME}: is missing; run the build to its end") from error
    lines = set(written.split("\n")) ^ set(_sums(folder, places).split("\n"))
    different = sorted(line for line in lines if places or not line.endswith(f"  {_PLACES}"))
    if different:
        name = different[0].partition("  ")[2]
        raise DataError(f"{folder / name}: is not as it was written, or {NAME} is not; copy or build it again")


def _sums(folder: Path, places: bool = True) -> str:
    listed = [folder / _PLACES] if places else []
    paths = [folder / "manifest.json", *listed, *sorted((folder / "tokenizer").glob("*"))]
    sums = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    return "".join(f"{digest}  {name}\n" for name, digest in sums.items())
