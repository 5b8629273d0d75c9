"""What a build will do, as a pure function of its inputs: pieces -> units -> groups, and the settings that bind it.

A unit is what one worker does at a time and what a restart does not do again; a group is a run of units that
becomes one shard a split. Neither depends on workers or tasks, hence nor does any byte of the dataset.
The plan lies in DIR/build/plan.json while the build goes on; a restart or another task must come to the same one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep import files, sources
from data_prep.blockfile import whole_file
from data_prep.errors import DataError
from data_prep.shard import TokenizerInfo

UNIT_BYTES = (1 << 18, 1 << 24)  # of text: small enough to share out a small input, large enough to cost nothing
UNITS_AIMED_AT = 64
SHARD_BYTES = 1 << 30  # of text a shard: some 250 million tokens


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user asked for and what decides the dataset's bytes."""

    inputs: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    text_key: str = "text"
    on_bad_row: str = "fail"  # fail | skip
    val_fraction: float = 0.0  # of documents
    bos: bool | None = None  # put BOS before each document; None: yes if there is one that is not the EOS
    eos: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.val_fraction < 1.0:
            raise DataError(f"val_fraction={self.val_fraction} must lie in [0, 1)")
        if self.on_bad_row not in ("fail", "skip"):
            raise DataError(f"on_bad_row={self.on_bad_row!r} is none of fail, skip")


@dataclasses.dataclass(frozen=True)
class Plan:
    settings: Settings
    tokenizer: TokenizerInfo
    pieces: tuple[sources.Piece, ...]
    units: tuple[tuple[int, ...], ...]  # numbers of pieces
    groups: tuple[tuple[int, ...], ...]  # numbers of units
    modified: tuple[str, ...]  # of each piece: its file as it was when the build began, see `files.File`

    def unit_weight(self, unit: int) -> int:
        return sum(self.pieces[piece].weight for piece in self.units[unit])

    def fingerprint(self) -> str:
        """SHA-256 of everything above but times: what a finished dataset is known by."""
        lasting = self.as_json()
        del lasting["modified"]
        return hashlib.sha256(json.dumps(lasting).encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": dataclasses.asdict(self.settings),
            "tokenizer": dataclasses.asdict(self.tokenizer),
            "pieces": self.pieces,
            "units": self.units,
            "groups": self.groups,
            "modified": self.modified,
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Plan:
        settings, tokenizer = dict(raw["settings"]), dict(raw["tokenizer"])
        for key in ("inputs", "exclude"):
            settings[key] = tuple(settings[key])
        tokenizer["files"] = tuple(tokenizer["files"])
        return cls(
            Settings(**settings),
            TokenizerInfo(**tokenizer),
            tuple(sources.Piece(*piece) for piece in raw["pieces"]),
            tuple(tuple(unit) for unit in raw["units"]),
            tuple(tuple(group) for group in raw["groups"]),
            tuple(raw["modified"]),
        )

    def write(self, path: Path) -> None:
        put_file(path, json.dumps(self.as_json()).encode())

    @classmethod
    def read(cls, path: Path) -> Plan:
        try:
            return cls.from_json(json.loads(path.read_bytes()))
        except FileNotFoundError as error:
            raise DataError(f"{path.parents[1]}: no build is going on there ({path} is missing)") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: damaged ({error}); remove {path.parent} and build again") from error


def put_file(path: Path, content: bytes) -> None:
    """A file that several tasks may write at once, on several machines: each under a temporary name of its own."""
    scratch = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}")
    with whole_file(scratch) as file:
        file.write(content)
    os.replace(scratch, path)


def make_plan(settings: Settings, tokenizer: TokenizerInfo) -> tuple[Plan, list[str]]:
    """The plan, and notes on what was left out of it."""
    found, notes = files.find(settings.inputs, exclude=settings.exclude)
    total = sum(file.size for file in found)
    unit_bytes = min(max(total // UNITS_AIMED_AT, UNIT_BYTES[0]), UNIT_BYTES[1])
    pieces = sources.split(found, unit_bytes)
    units = _runs([piece.weight for piece in pieces], unit_bytes)
    groups = _runs([sum(pieces[i].weight for i in unit) for unit in units], SHARD_BYTES)
    times = {file.path: file.modified for file in found}
    modified = tuple(times[piece.path] for piece in pieces)
    return Plan(settings, tokenizer, tuple(pieces), units, groups, modified), notes


def differences(one: Plan, other: Plan) -> list[str]:
    """What is not the same in two plans, for a person."""
    found = []
    for field in dataclasses.fields(Settings):
        mine, theirs = getattr(one.settings, field.name), getattr(other.settings, field.name)
        if mine != theirs:
            found.append(f"{field.name} was {theirs!r}, is {mine!r}")
    if one.tokenizer != other.tokenizer:
        found.append(f"the tokenizer was {other.tokenizer.hash[:12]}, is {one.tokenizer.hash[:12]}")
    if one.pieces != other.pieces:
        changed = sorted({piece.path for piece in set(one.pieces) ^ set(other.pieces)})
        found.append(f"{len(changed)} input files came, went or changed in size, the first {changed[0]}")
    elif one.modified != other.modified:
        pairs = zip(one.pieces, one.modified, other.modified, strict=True)
        changed = sorted({piece.path for piece, mine, theirs in pairs if mine != theirs})
        found.append(f"{len(changed)} input files were modified since it began, the first {changed[0]}")
    return found


def _runs(weights: Sequence[int], limit: int) -> tuple[tuple[int, ...], ...]:
    """Runs of neighbours of at most `limit` together, or one alone."""
    runs: list[list[int]] = []
    filled = 0
    for number, weight in enumerate(weights):
        if not runs or filled + weight > limit:
            runs.append([])
            filled = 0
        runs[-1].append(number)
        filled += weight
    return tuple(map(tuple, runs))
