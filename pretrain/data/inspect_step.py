"""Which rows each rank takes at a step, and at which steps a row is taken, from a run's config alone.

`pretrain-data inspect` asks; it shows text and origin itself. No torch, and nothing is read but row indexes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.rows import Rows
from pretrain.config import Config
from pretrain.config_file import load_config
from pretrain.data.order import Order, check_shape
from pretrain.data.reader import Reader
from pretrain.errors import ConfigError


class SeenRow(NamedTuple):
    rank: int | None  # data-parallel; None: depends on the number of ranks, which was not given
    micro_batch: int | None
    stream_row: int  # what `data.skip` takes
    path: str  # of the source
    row: int  # of the source
    epoch: int
    rows: Rows


class Schedule:
    """The order of a run's rows. `config` is a TOML file or a run's folder, whose resolved config it then is."""

    def __init__(self, config: str | Path) -> None:
        path = Path(config)
        self.cfg: Config = load_config(path / "config.toml" if path.is_dir() else path)
        data = self.cfg.data
        self._reader = Reader(data, "train", self.cfg.run.seed)
        self.order = Order(
            seed=self.cfg.run.seed,
            sizes=self._reader.sizes,
            weights=[source.weight for source in data.sources],
            stages=[(stage.tokens, stage.weights) for stage in data.stages],
            seq_len=data.seq_len,
            skip=data.skip,
        )
        self.paths = self._reader.paths
        self.rows_per_step = self.cfg.train.global_batch_size

    def check(self, step: int, ranks: int | None = None) -> None:
        """ConfigError if the run has no such optimizer step, or cannot deal its rows to so many ranks."""
        if not 1 <= step <= self.cfg.steps:
            raise ConfigError(f"step {step}: the run's optimizer steps are 1 to {self.cfg.steps}")
        check_shape(self.rows_per_step, self.cfg.train.micro_batch_size, ranks or self.ranks() or 1)

    def step(self, step: int, ranks: int | None = None) -> Iterator[SeenRow]:
        """The rows of optimizer step `step`, counted from 1, in stream order; `ranks`: data-parallel ones."""
        self.check(step, ranks)
        ranks = ranks or self.ranks()
        micro = self.cfg.train.micro_batch_size
        plan = self.order.rows((step - 1) * self.rows_per_step, self.rows_per_step)
        for place in range(self.rows_per_step):
            source = int(plan.source[place])
            yield SeenRow(
                place // micro % ranks if ranks else None,
                place // (micro * ranks) if ranks else None,
                int(plan.stream_row[place]),
                self._reader.paths[source],
                int(plan.row[place]),
                int(plan.epoch[place]),
                self._reader.sources[source],
            )

    def steps_of(self, folder: str | Path, row: int, before: int) -> list[int]:
        """The steps, up to step `before`, that take a row of a source folder; none if it is not one of the run's."""
        wanted = Path(folder).resolve()
        found = [
            self.order.positions_of(number, row, before * self.rows_per_step) // self.rows_per_step + 1
            for number, path in enumerate(self._reader.paths)
            if Path(path).resolve() == wanted and row < self._reader.sizes[number]
        ]
        return sorted(set(np.concatenate(found).tolist())) if found else []

    def ranks(self) -> int | None:
        """Data-parallel ranks, where the config alone says how many."""
        parallel = self.cfg.parallel
        return parallel.dp_replicate * parallel.dp_shard if parallel.dp_shard > 0 else None
