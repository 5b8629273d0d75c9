"""Checkpoints as folders: RUN/checkpoints/step-00000100, whole or absent. Files, numbers and checksums, no torch.

A save is written to `step-N.partial` beside its place. When every rank's files are there, synced, their sizes and
checksums stand in manifest.json; then the marker COMPLETE, a rename, and a sync of the parent make it a checkpoint.
`checkpoint` puts tensors into these folders. Names that are not ours are neither read nor deleted.
"""

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from pretrain import untrusted
from pretrain.errors import CheckpointError

MANIFEST, MARKER, META = "manifest.json", "COMPLETE", "train.json"
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"step-\d{8,}\.(partial|old|retired)")
_FILE = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}")
FORMAT = 3
# Against damage: a forger writes the manifest too. XXH3 costs a twentieth of SHA-256, which format 2 had.
_CHECKSUMS: dict[str, Callable[[], Any]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
_META_KINDS: dict[str, type] = dict.fromkeys(("step", "rows_consumed", "tokens", "targets"), int)
_META_KINDS |= {"config": dict, "anomalies": dict, "data_fingerprint": str}
Entry = dict[str, Any]
"""What the manifest says of a file: bytes, checksum (`xxh3_128:HEX`)."""


class Found(NamedTuple):
    step: int
    path: Path
    problem: str | None  # why it is not whole, as far as a look at names and sizes tells


def checkpoints_dir(run: Path) -> Path:
    return run / "checkpoints"


def step_dir(run: Path, step: int) -> Path:
    return checkpoints_dir(run) / f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[Found]:
    """All checkpoints of a run, by step number, oldest first; sizes are looked at, contents are not."""
    folder = checkpoints_dir(run)
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append(Found(int(match[1]), path, problem_at_a_glance(path)))
    return sorted(found)


def problem_at_a_glance(path: Path) -> str | None:
    """What is wrong with a checkpoint's files by name and size; None: nothing seen."""
    try:
        files = read_manifest(path)
    except CheckpointError as e:
        return str(e)
    if not (path / MARKER).is_file():
        return f"{MARKER} is missing"
    for name, entry in files.items():
        try:
            status = (path / name).lstat()
        except OSError:
            return f"{name} is missing"
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is no regular file but a link, a folder or a device"
        if status.st_size != entry["bytes"]:
            return f"{name} has {status.st_size:,} bytes, but {MANIFEST} says {entry['bytes']:,}"
    return None


def problem_in_file(path: Path, name: str, entry: Entry) -> str | None:
    """Compare one file with its checksum."""
    kind, _, expected = entry["checksum"].partition(":")
    try:
        with open(path / name, "rb", buffering=0) as f:
            actual = hashlib.file_digest(f, _CHECKSUMS[kind]).hexdigest()
    except OSError as e:
        return f"{name} cannot be read: {e}"
    return None if actual == expected else f"{name} does not match its checksum in {MANIFEST}"


def verify(path: Path) -> str | None:
    """The first problem of a checkpoint, every byte read; None: whole."""
    problem = problem_at_a_glance(path)
    if problem is not None:
        return problem
    return next(filter(None, (problem_in_file(path, n, e) for n, e in read_manifest(path).items())), None)


def read_manifest(path: Path) -> dict[str, Entry]:
    """File name -> {bytes, checksum}; CheckpointError when it is absent, damaged, of another step than its folder
    or names files outside it."""
    try:
        manifest = untrusted.read_json(path / MANIFEST)
        number, files = manifest["format"], manifest["files"].items()
        if number not in (2, FORMAT):
            raise CheckpointError(f"{MANIFEST} has format {number!r}; this program reads 2 and {FORMAT}")
        checked = {
            name: {"bytes": int(e["bytes"]), "checksum": e["checksum"] if number == FORMAT else f"sha256:{e['sha256']}"}
            for name, e in files
        }
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as e:
        raise CheckpointError(f"{MANIFEST} is damaged ({type(e).__name__}: {e})") from None
    for name, entry in checked.items():
        if not _FILE.fullmatch(name):
            raise CheckpointError(f"{MANIFEST} names {name!r}, which is no file of this folder")
        if str(entry["checksum"]).partition(":")[0] not in _CHECKSUMS:
            raise CheckpointError(f"{MANIFEST} gives {name} the checksum {entry['checksum']!r}, of no kind known here")
    named = _NAME.fullmatch(path.name)
    step = manifest.get("step")
    if named and step != int(named[1]):
        mend = f"; name it {step_dir(path, step).name}" if type(step) is int else ""
        raise CheckpointError(f"{MANIFEST} is of step {step!r}, but the folder is named {path.name}{mend}")
    return checked


def read_meta(path: Path, *, resumable: bool = False) -> dict[str, Any]:
    """train.json of a checkpoint: step, rows consumed, the config, the data's fingerprint, versions; with `resumable`,
    all of it that a run needs to go on."""
    try:
        meta = untrusted.read_json(path / META)
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path / META} cannot be read ({type(e).__name__}: {e})") from None
    if not isinstance(meta, dict):
        raise CheckpointError(f"{path / META} is no JSON object")
    for key, kind in _META_KINDS.items():
        needed = key == "step" or (resumable and key != "anomalies")
        if key not in meta and not needed:
            continue
        value: Any = meta.get(key)
        fits: bool = type(value) is kind
        if not fits or (kind is int and not 0 <= value < 1 << 62):
            what = "a count" if kind is int else f"a {kind.__name__}"
            raise CheckpointError(f"{path / META} has {key}={str(value)[:80]} where {what} belongs")
    return meta


def partial_dir(run: Path, step: int) -> Path:
    return step_dir(run, step).with_suffix(".partial")


def seal(folder: Path, step: int, files: dict[str, Entry]) -> None:
    """Write manifest and marker: from now on the folder says of itself that it is whole."""
    text = json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1) + "\n"
    write_file(folder / MANIFEST, [text.encode()])
    write_file(folder / MARKER, [])
    sync_folder(folder)


def commit(run: Path, step: int, files: dict[str, Entry]) -> Path:
    """Turn the partial folder of `step` into a checkpoint. A damaged one of the same step gives way to it."""
    partial, final = partial_dir(run, step), step_dir(run, step)
    seal(partial, step, files)
    old = final.with_suffix(".old")
    if final.exists():
        final.rename(old)
    partial.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)
    return final


def remove_leftovers(run: Path) -> list[str]:
    """Delete what interrupted saves and removals left behind; the names removed."""
    folder = checkpoints_dir(run)
    names = sorted(p.name for p in folder.iterdir() if _LEFTOVER.fullmatch(p.name)) if folder.is_dir() else []
    for name in names:
        old = folder / name
        if name.endswith(".old") and old.is_dir() and not old.with_suffix("").exists():
            old.rename(old.with_suffix(""))  # killed between the two renames: it is still the best of this step
        else:
            _delete(old)
    return names


def retire(
    run: Path, keep: int, keep_every: int = 0, *, until: int | None = None, verified: bool = False
) -> list[Path]:
    """Take all whole checkpoints but the newest `keep` and every multiple of `keep_every` out of the list, by a new
    name: what is left to delete.

    Damaged ones are neither counted nor removed, for a person to look at; `verified` reads each byte of those that are
    to be kept. Those of steps after `until` are not counted either: a run that has come to this step passed them over.
    A link is somebody's own arrangement.
    """
    kept, retired = 0, []
    for found in reversed(list_checkpoints(run)):
        if found.problem is not None or (until is not None and found.step > until):
            continue
        if kept < max(1, keep):
            kept += not verified or verify(found.path) is None
        elif not (keep_every and found.step % keep_every == 0) and not found.path.is_symlink():
            retired.append(found.path.rename(found.path.with_suffix(".retired")))
    return retired[::-1]


def prune(run: Path, keep: int, keep_every: int = 0) -> list[str]:
    """`retire` beside whole, verified ones, and delete; the names of the checkpoints that are no more."""
    retired = retire(run, keep, keep_every, verified=True)
    for path in retired:
        shutil.rmtree(path)
    return [path.stem for path in retired]


def _delete(path: Path) -> None:
    """Where a link leads, nothing is deleted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def require_room(folder: Path, needed: int) -> None:
    """CheckpointError with needed and free bytes when a save would not fit."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{folder}: a checkpoint needs {needed:,} bytes and {free:,} are free; make room or point run.dir elsewhere"
        )


def write_file(path: Path, pieces: Iterable[Any]) -> Entry:
    """Every file of a checkpoint is written here: in pieces (of bytes), hashed on the way, synced at the end."""
    checksum, size = xxhash.xxh3_128(), 0
    with open(path, "wb") as f:
        for piece in pieces:
            checksum.update(piece)
            written = f.write(piece)
            if written and hasattr(os, "posix_fadvise"):  # Linux: sends the piece on to the disk, without waiting
                f.flush()
                os.posix_fadvise(f.fileno(), size, written, os.POSIX_FADV_DONTNEED)
            size += written
        f.flush()
        os.fsync(f.fileno())
    return {"bytes": size, "checksum": f"xxh3_128:{checksum.hexdigest()}"}


def replace_synced(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    aside = path.with_name(path.name + ".partial")
    write_file(aside, [text.encode()])
    aside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def newest_whole(run: Path, say: Callable[[str], None] = lambda text: None) -> Path:
    """The newest checkpoint of a run of which every byte is right, for a single process; CheckpointError if none."""
    for found in reversed(list_checkpoints(run)):
        problem = found.problem or verify(found.path)
        if problem is None:
            return found.path
        say(f"{found.path.name} is passed over: {problem}")
    raise CheckpointError(f"{run}: no whole checkpoint; pretrain checkpoint list {run} tells what is there")
