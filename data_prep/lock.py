"""One build at a time in a folder. The lock is the kernel's: it ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from data_prep.errors import DataError


@contextlib.contextmanager
def held(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """DataError if another process holds the folder; those that share it do not hinder one another."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise DataError(f"{folder}: no build is going on there: {error.strerror}") from error
    try:
        # A file system without locks (NFS has none for folders) tells nothing.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DataError(
                    f"{folder}: another build or merge is at work there; wait for its end, or choose another --out"
                ) from error
        yield
    finally:
        os.close(descriptor)
