"""The sources of a run, opened and checked, and rows of any of them as arrays; what to do about damaged shards.

Arrays only: `loader` makes tensors of them and knows of ranks and steps.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from data_prep.errors import DataError
from data_prep.rows import IGNORE, RowBatch, Rows, open_limit, open_rows
from data_prep.shard import Manifest
from pretrain.config import DataConfig
from pretrain.data.permutation import permute, round_keys
from pretrain.errors import ConfigError

_CANDIDATES = 200  # rows looked at for one that can stand in for a damaged one

# Told of every row that could not be read: ("bad_shard", details).
Events = Callable[..., None]


class BadRow(NamedTuple):
    source: str
    row: int
    stream_row: int
    substitute: int  # row of the same source
    error: str


class Reader:
    """One split of every source of `[data]`. Not for several threads at once."""

    def __init__(self, cfg: DataConfig, split: str, seed: int) -> None:
        self.paths = [source.path for source in cfg.sources]
        if split != "train":  # a source may have been built without a validation share
            self.paths = [path for path in self.paths if split in Manifest.read(path).splits]
        self.sources: list[Rows] = [
            open_rows(
                path,
                split,
                cfg.seq_len,
                cfg.packing,
                mask_documents=cfg.mask_documents,
                max_open=open_limit(2 * len(self.paths)),  # training and validation
            )
            for path in self.paths
        ]
        for path, rows in zip(self.paths, self.sources, strict=True):
            if rows.tokenizer_hash != self.sources[0].tokenizer_hash:
                raise ConfigError(
                    f"data.sources: {path} was made with tokenizer {rows.tokenizer_hash[:12]}, {self.paths[0]} with "
                    f"{self.sources[0].tokenizer_hash[:12]}; build all sources with one tokenizer"
                )
        self.sizes = [len(rows) for rows in self.sources]
        self.vocab_size = max((rows.vocab_size for rows in self.sources), default=0)
        self.max_documents_per_row = max((rows.max_documents_per_row for rows in self.sources), default=1)
        self.seq_len = cfg.seq_len
        self._policy, self._seed = cfg.on_bad_shard, seed

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps([rows.fingerprint for rows in self.sources]).encode()).hexdigest()

    def counts(self, source: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [n] each: targets, and positions that are no padding, of each row; reads no token."""
        targets, tokens = np.zeros_like(row), np.zeros_like(row)
        for number, rows in enumerate(self.sources):
            here = source == number
            if here.any():
                targets[here], tokens[here] = rows.targets(row[here]), rows.tokens(row[here])
        return targets, tokens

    def read(self, source: np.ndarray, row: np.ndarray, stream_row: np.ndarray) -> tuple[RowBatch, list[BadRow]]:
        """The rows in the order given, and those that others had to stand in for."""
        if len(source) and (source == source[0]).all():
            batch, bad = self._read(int(source[0]), row, stream_row)
            return self._widened(batch), bad
        out = RowBatch.empty(len(row), self.seq_len, self.max_documents_per_row)
        bad = []
        for number in np.unique(source).tolist():
            here = np.flatnonzero(source == number)
            batch, failed = self._read(number, row[here], stream_row[here])
            for whole, part in zip(out, self._widened(batch), strict=True):
                whole[here] = part
            bad += failed
        return out, bad

    def _read(self, number: int, row: np.ndarray, stream_row: np.ndarray) -> tuple[RowBatch, list[BadRow]]:
        try:
            return self.sources[number].read(row), []
        except DataError:
            if self._policy == "raise":
                raise
        found = [self._read_or_replace(number, *pair) for pair in zip(row.tolist(), stream_row.tolist(), strict=True)]
        batches, bad = zip(*found, strict=True)
        return RowBatch(*map(np.concatenate, zip(*batches, strict=True))), [one for one in bad if one]

    def _read_or_replace(self, number: int, row: int, stream_row: int) -> tuple[RowBatch, BadRow | None]:
        """The row, or one that a permutation keyed by it names and that has as many targets or more, its surplus
        ones ignored: every rank counts the targets of the whole batch without reading it, and stays right."""
        rows = self.sources[number]
        try:
            return rows.read(np.array([row])), None
        except DataError as error:
            cause = error
        wanted = int(rows.targets(np.array([row]))[0])
        count = min(_CANDIDATES, len(rows))
        for candidate in permute(np.arange(count), len(rows), round_keys(self._seed, number, row, 0)).tolist():
            if candidate == row or int(rows.targets(np.array([candidate]))[0]) < wanted:
                continue
            try:
                batch = rows.read(np.array([candidate]))
            except DataError:
                continue
            surplus = np.cumsum(batch.labels != IGNORE, axis=1) > wanted
            batch.labels[surplus] = IGNORE
            return batch, BadRow(self.paths[number], row, stream_row, candidate, str(cause))
        raise DataError(f"no row of {self.paths[number]} can stand in for row {row}: {cause}") from cause

    def _widened(self, batch: RowBatch) -> RowBatch:
        missing = self.max_documents_per_row - batch.starts.shape[1]
        if not missing:
            return batch
        return batch._replace(starts=np.pad(batch.starts, ((0, 0), (0, missing)), constant_values=self.seq_len))


def history(cfg: DataConfig, seed: int, data: str, position: int, stream_row: int) -> str:
    """SHA-256 of all that decided the stream's first `position` rows, of which the last is before `stream_row`:
    stages and skips that begin later may still be changed."""
    weights: Sequence[Any] = [source.weight for source in cfg.sources]
    stages = [[stage.tokens, stage.weights] for stage in cfg.stages if stage.tokens < position * cfg.seq_len]
    skip = [pair for pair in cfg.skip if pair[0] < stream_row]
    return hashlib.sha256(json.dumps([seed, data, weights, stages, skip]).encode()).hexdigest()
