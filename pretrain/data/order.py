"""Which row of which source stands at each position of the stream: a pure function of the seed and the settings.

Nothing here knows of ranks, micro-batches or workers, keeps an index, or grows with the data: position 10^12 is
answered as fast as position 0. Two counts are told apart. A *stream row* numbers the endless stream itself. A
*position* counts the rows trained on: the same number until `skip` leaves stream rows out, behind by those left out
from then on. `inspect` and the logs name stream rows, and `skip` takes them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pretrain.data.mixture import Mixture
from pretrain.data.permutation import permute, round_keys
from pretrain.errors import ConfigError


class StreamRows(NamedTuple):
    """For each of n positions; int64 [n] all."""

    stream_row: np.ndarray
    source: np.ndarray
    epoch: np.ndarray  # times that the source was gone through before
    row: np.ndarray  # of the source


def check_shape(rows: int, micro_batch_size: int, ranks: int) -> None:
    """ConfigError unless the rows of a step can be dealt to data-parallel ranks in whole micro-batches."""
    if rows < 1 or rows % (micro_batch_size * ranks):
        raise ConfigError(
            f"train.global_batch_size={rows} is no multiple of train.micro_batch_size={micro_batch_size} x "
            f"{ranks} data-parallel ranks = {micro_batch_size * ranks}; set it to a multiple, or change the others"
        )


class _Stage(NamedTuple):
    mixture: Mixture
    origin: int  # stream row at which its place 0 would stand
    drawn: np.ndarray  # rows of each source before that; both may be negative


class Order:
    """The order of sources with `sizes` rows, mixed by `weights` (shares of the rows; all rows have one length).

    `stages` are (tokens, weights): the weights that hold from the first row on that starts at or after that many
    positions of stream. What each source was drawn stays within one row of its target, the sum over the stages: always
    with one set of weights or two sources. With more, a change of weights may find debts that no place of the new
    pattern meets; they are carried along, so they do not add up, and stay within two rows (1.4 is the most seen).
    Weights that are given again simply go on. `skip` are inclusive ranges of stream rows that are left out. In each
    epoch a source's rows come in a new order.
    """

    def __init__(
        self,
        *,
        seed: int,
        sizes: Sequence[int],
        weights: Sequence[float],
        stages: Sequence[tuple[float, Sequence[float]]] = (),
        seq_len: int = 1,
        skip: Sequence[Sequence[int]] = (),
    ) -> None:
        self.seed, self.sizes = seed, np.array(sizes, np.int64)
        begins = [(0, weights), *((math.ceil(tokens / seq_len), shares) for tokens, shares in stages)]
        drawn, debt = np.zeros(len(sizes), np.int64), np.zeros(len(sizes))
        self._stages: list[_Stage] = []
        self._stage_starts = np.array([first for first, _ in begins])
        held, end = Mixture(weights), 0  # the stage before, and its place where the next begins
        for number, (first, shares) in enumerate(begins):
            mixture = Mixture(shares)
            place = end if np.array_equal(mixture.per_period, held.per_period) else mixture.start(debt)
            self._stages.append(_Stage(mixture, first - place, drawn - mixture.counts(place)))
            held, end = mixture, place + begins[min(number + 1, len(stages))][0] - first
            drawn = drawn + mixture.counts(end) - mixture.counts(place)
            debt = debt + mixture.debt(end) - mixture.debt(place)
        merged: list[list[int]] = []
        for low, high in sorted(map(list, skip)):
            if merged and low <= merged[-1][1] + 1:
                merged[-1][1] = max(high, merged[-1][1])
            else:
                merged.append([low, high])
        self._skip = np.array(merged, np.int64).reshape(-1, 2)
        lengths = self._skip[:, 1] - self._skip[:, 0] + 1
        self._left_out = np.concatenate([[0], np.cumsum(lengths)])  # before each range, and after all
        self._kept = self._skip[:, 0] - self._left_out[:-1]  # positions before each range

    def rows(self, first: int, count: int) -> StreamRows:
        """What stands at the positions first .. first + count - 1."""
        stream_row = self.stream_rows(np.arange(first, first + count))
        source, draw = np.empty_like(stream_row), np.empty_like(stream_row)
        stages = np.searchsorted(self._stage_starts, stream_row, "right") - 1
        for number in np.unique(stages).tolist():
            stage, here = self._stages[number], stages == number
            source[here], nth = stage.mixture.at(stream_row[here] - stage.origin)
            draw[here] = nth + stage.drawn[source[here]]
        epoch, row = np.divmod(draw, self.sizes[source])
        for number in np.unique(source).tolist():
            here = source == number
            row[here] = permute(row[here], int(self.sizes[number]), self._keys(number, epoch[here]))
        return StreamRows(stream_row, source, epoch, row)

    def epochs(self, positions: np.ndarray | int) -> np.ndarray:
        """float [..., sources]: how often each source was gone through in the positions before each of these."""
        positions = np.asarray(positions)
        end = np.where(positions > 0, self.stream_rows(positions - 1) + 1, 0)
        stages = np.searchsorted(self._stage_starts, end, "right") - 1
        drawn = np.empty((*end.shape, len(self.sizes)))
        for number in np.unique(stages).tolist():
            stage, here = self._stages[number], stages == number
            drawn[here] = stage.drawn + stage.mixture.counts(end[here] - stage.origin)
        return drawn / np.maximum(self.sizes, 1)

    def stream_rows(self, positions: np.ndarray) -> np.ndarray:
        return positions + self._left_out[np.searchsorted(self._kept, positions, "right")]

    def positions_of(self, source: int, row: int, end: int) -> np.ndarray:
        """int64 [n], rising: the positions below `end` at which a row of a source stands."""
        size = int(self.sizes[source])
        epochs = np.arange(math.ceil(float(self.epochs(end)[source])) + 1)
        index = permute(np.full(len(epochs), row), size, self._keys(source, epochs), inverse=True)
        draws = epochs * size + index
        found = []
        for number, stage in enumerate(self._stages):
            if stage.mixture.per_period[source]:
                stands = stage.origin + stage.mixture.places(source, draws - stage.drawn[source])
                found.append(stands[np.searchsorted(self._stage_starts, stands, "right") - 1 == number])
        stream_row = np.concatenate(found) if found else np.empty(0, np.int64)
        inside = np.searchsorted(self._skip[:, 0], stream_row, "right") - 1
        kept = (inside < 0) | (stream_row > np.append(self._skip[:, 1], -1)[inside])
        positions = (stream_row - self._left_out[inside + 1])[kept]
        return positions[positions < end]

    def _keys(self, source: int, epochs: np.ndarray) -> np.ndarray:
        different, which = np.unique(epochs, return_inverse=True)
        if len(different) == 1:
            return round_keys(self.seed, source, int(different[0]))
        keys = np.stack([round_keys(self.seed, source, epoch) for epoch in different.tolist()], axis=1)
        return keys[:, which]
