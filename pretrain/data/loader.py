"""The steps of this rank as tensors: its micro-batches, and the counts of the whole global batch.

The only file of `pretrain.data` that loads torch. What stands where in the stream is `order`'s business, what a row
holds `reader`'s; here rows are dealt to ranks and micro-batches, read ahead in a thread and moved to the device.
The state is one integer, the rows consumed; ranks never talk to each other.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import torch

from data_prep.errors import DataError
from data_prep.rows import IGNORE, RowBatch
from pretrain.config import DataConfig
from pretrain.data.order import Order, StreamRows, check_shape
from pretrain.data.prefetch import Prefetcher
from pretrain.data.reader import BadRow, Events, Reader, history
from pretrain.errors import ConfigError

_AHEAD = 2048  # positions whose place in the stream is worked out in one go
# Read in one go, in rows and in positions: enough to hide numpy's cost per call, and still in the cache.
_STRETCH_ROWS, _STRETCH_POSITIONS = 128, 1 << 18
CPU = torch.device("cpu")


class Batch(NamedTuple):
    """B rows of T positions. All shapes depend on B, T and the dataset only, so nothing is compiled twice."""

    inputs: torch.Tensor  # int64 [B, T]
    labels: torch.Tensor  # int64 [B, T]; -100 where there is no target
    positions: torch.Tensor  # int32 [B, T]; from 0 in each document
    documents: torch.Tensor  # int32 [B, T]; from 0 in each row, -1 padding
    cu_seqlens: torch.Tensor  # int32 [B x most documents in a row + 1]: where documents begin in the B x T positions
    max_seqlen: int  # T

    def to(self, device: torch.device) -> "Batch":
        inputs, labels, positions, documents, cu_seqlens = (tensor.to(device, non_blocking=True) for tensor in self[:5])
        return Batch(inputs, labels, positions, documents, cu_seqlens, self.max_seqlen)


class Step(NamedTuple):
    batches: list[Batch]  # this rank's micro-batches
    targets: int  # of the global batch: all ranks and micro-batches
    tokens: int  # of the global batch: positions that are no padding
    epoch: float  # how often the most-repeated source has been gone through after this step


class _Made(NamedTuple):
    step: Step
    bad: list[BadRow]


class Loader:
    """Steps by rows consumed: any position, any number of times, on any shape, each in milliseconds.

    The step at `rows_consumed` is the stream's next `rows` positions; the p-th of them goes to micro-batch
    p // (dp_world x micro_batch_size) of rank (p // micro_batch_size) % dp_world. `events` is called in the caller's
    thread as events("bad_shard", **details) with the step that a damaged row would have been in. Close it.
    """

    def __init__(
        self,
        cfg: DataConfig,
        *,
        seed: int,
        rows_per_step: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_world: int,
        device: torch.device = CPU,
        events: Events | None = None,
    ) -> None:
        self._reader = reader = Reader(cfg, "train", seed)
        self.cfg, self._seed = cfg, seed
        self._rows_per_step, self._micro, self._rank, self._world = rows_per_step, micro_batch_size, dp_rank, dp_world
        self._device, self._events = torch.device(device), events
        weights = [source.weight for source in cfg.sources]
        stages = [(stage.tokens, stage.weights) for stage in cfg.stages]
        for number, path in enumerate(reader.paths):
            if not reader.sizes[number] and any(shares[number] for shares in (weights, *(held for _, held in stages))):
                raise ConfigError(
                    f"data.sources: {path} has no row to train on; leave it out or build it from more text"
                )
        total = sum(reader.sizes)
        if total < rows_per_step:
            raise ConfigError(
                f"data.sources have {total} rows of seq_len={cfg.seq_len} in all, fewer than one global batch of "
                f"{rows_per_step} rows; set train.global_batch_size to {total} or less, or build more data"
            )
        check_shape(rows_per_step, micro_batch_size, dp_world)
        self._make_order = partial(
            Order, seed=seed, sizes=reader.sizes, weights=weights, stages=stages, seq_len=cfg.seq_len
        )
        self.order = self._make_order(skip=cfg.skip)
        self.vocab_size = reader.vocab_size
        self.fingerprint = history(cfg, seed, reader.fingerprint, 0, 0)  # of data, weights and seed
        self.data_wait_seconds = 0.0  # spent in `step` so far
        self.rows_substituted = 0
        self._stretch = min(_STRETCH_ROWS, _STRETCH_POSITIONS // cfg.seq_len)
        self._plan_first, self._plan = 0, self.order.rows(0, 0)
        self._prefetch = Prefetcher(self._make, cfg.prefetch)

    def step(self, rows_consumed: int, rows: int | None = None) -> Step:
        """The step after `rows_consumed` rows, of `rows` rows if that changes. Raises what reading it raised."""
        rows = rows or self._rows_per_step
        check_shape(rows, self._micro, self._world)
        began = time.perf_counter()
        made = self._prefetch.get(rows_consumed, rows)
        self.data_wait_seconds += time.perf_counter() - began
        self.rows_substituted += len(made.bad)
        for bad in made.bad if self._events else []:
            self._events("bad_shard", **bad._asdict())  # type: ignore[misc]
        if self._device.type == "cpu":
            return made.step
        return made.step._replace(batches=[batch.to(self._device) for batch in made.step.batches])

    def leave_out(self, rows: list[list[int]]) -> None:
        """Leave these ranges of stream rows out, too, as if `data.skip` named them; what was read ahead is dropped."""
        if not rows:
            return
        self._prefetch.close()
        skip = sorted(self.cfg.skip + [pair for pair in rows if pair not in self.cfg.skip])
        self.cfg = self.cfg.model_copy(update={"skip": skip})
        self.order = self._make_order(skip=skip)
        self._plan_first, self._plan = 0, self.order.rows(0, 0)
        self._prefetch = Prefetcher(self._make, self.cfg.prefetch)

    def fingerprint_at(self, rows_consumed: int) -> str:
        """Of all that decided the rows consumed so far: a resumed run must find the same. Unlike `fingerprint` it
        includes stages and skipped ranges once they have begun; later ones may still be added."""
        last = int(self.order.stream_rows(np.array([rows_consumed - 1]))[0]) + 1 if rows_consumed else 0
        return history(self.cfg, self._seed, self._reader.fingerprint, rows_consumed, last)

    def check_vocab(self, model_vocab_size: int) -> None:
        if model_vocab_size < self.vocab_size:
            raise ConfigError(
                f"model.vocab_size={model_vocab_size}, but the tokenizer of {self._reader.paths[0]} has "
                f"{self.vocab_size} tokens; set model.vocab_size={self.vocab_size} or more"
            )

    def close(self) -> None:
        """Ends the thread; `step` raises from then on."""
        self._prefetch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self, position: int, rows: int, awaited: bool) -> list[_Made]:
        """In the thread: the step at `position`, and unless it is awaited as many more as fill a stretch."""
        if self._device.type == "cuda":  # pinning memory would open a context on the thread's device, the first one
            torch.cuda.set_device(self._device)
        steps = 1 if awaited else max(1, self._stretch * self._world // rows)
        try:
            return self._read(position, rows, steps)
        except DataError:
            if steps == 1:
                raise
            return self._read(position, rows, 1)  # the error belongs to the step that it is in

    def _read(self, position: int, rows: int, steps: int) -> list[_Made]:
        plan = self._planned(position, rows * steps)
        targets, tokens = (
            counts.reshape(steps, rows).sum(1).tolist() for counts in self._reader.counts(plan.source, plan.row)
        )
        at = np.arange(rows * steps).reshape(-1, self._world, self._micro)[:, self._rank].reshape(-1)
        stride = max(1, self._stretch // self._micro) * self._micro
        batches: list[Batch] = []
        bad: list[BadRow] = []
        for begin in range(0, len(at), stride):
            mine = at[begin : begin + stride]
            arrays, failed = self._reader.read(plan.source[mine], plan.row[mine], plan.stream_row[mine])
            bad += failed
            batches += _to_batches(arrays, self._micro, self._device)
        ends = np.arange(1, steps + 1) * rows
        epochs = self.order.epochs(position + ends).max(1).tolist()
        last = plan.stream_row[ends - 1].tolist()
        its_bad: list[list[BadRow]] = [[] for _ in range(steps)]
        for one in bad:
            its_bad[bisect_left(last, one.stream_row)].append(one)
        per_step = len(batches) // steps
        its_batches = [batches[first : first + per_step] for first in range(0, len(batches), per_step)]
        return [
            _Made(Step(*of_step), failed)
            for *of_step, failed in zip(its_batches, targets, tokens, epochs, its_bad, strict=True)
        ]

    def _planned(self, position: int, rows: int) -> StreamRows:
        """A slice of the order, worked out in stretches: numpy's cost per call is that of a hundred rows."""
        at = position - self._plan_first
        if at < 0 or at + rows > len(self._plan.row):
            self._plan_first, self._plan, at = position, self.order.rows(position, max(rows, _AHEAD)), 0
        return StreamRows(*(values[at : at + rows] for values in self._plan))


class Validation:
    """Every validation row of every source once over all ranks, in a fixed order; iterate as often as needed.

    All ranks yield the same number of batches: those that run out yield rows of padding without a target.
    """

    def __init__(
        self,
        cfg: DataConfig,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_world: int,
        device: torch.device = CPU,
        events: Events | None = None,
    ) -> None:
        self._reader = reader = Reader(cfg, "val", 0)
        self._micro, self._rank, self._world = micro_batch_size, dp_rank, dp_world
        self._device, self._events = torch.device(device), events
        self._mask = cfg.mask_documents
        self.rows = sum(reader.sizes)
        self.targets = sum(rows.num_targets for rows in reader.sources)
        self.num_bytes = sum(rows.num_bytes for rows in reader.sources)  # of the text; for bits per byte
        self._ends = np.cumsum(reader.sizes)

    def __len__(self) -> int:
        """Batches of each rank."""
        return -(-self.rows // (self._micro * self._world))

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            first = (number * self._world + self._rank) * self._micro
            rows = np.arange(first, min(first + self._micro, self.rows))
            source = np.searchsorted(self._ends, rows, "right")
            arrays, bad = self._reader.read(
                source, rows - (self._ends[source] - np.array(self._reader.sizes)[source]), rows
            )
            for one in bad if self._events else []:
                self._events("bad_shard", **one._asdict())  # type: ignore[misc]
            (batch,) = _to_batches(self._filled(arrays), self._micro, self._device)
            yield batch if self._device.type == "cpu" else batch.to(self._device)

    def _filled(self, arrays: RowBatch) -> RowBatch:
        """With empty rows up to the micro-batch's size."""
        missing = self._micro - len(arrays.inputs)
        if not missing:
            return arrays
        values = (0, IGNORE, 0, -1 if self._mask else 0, self._reader.seq_len)
        filled = [
            np.pad(array, ((0, missing), (0, 0)), constant_values=value)
            for array, value in zip(arrays, values, strict=True)
        ]
        filled[4][len(arrays.inputs) :, 0] = 0
        return RowBatch(*filled)


def validation_batches(
    cfg: DataConfig, micro_batch_size: int, dp_rank: int, dp_world: int, device: torch.device = CPU
) -> Validation:
    return Validation(cfg, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp_world=dp_world, device=device)


def _to_batches(arrays: RowBatch, micro: int, device: torch.device) -> list[Batch]:
    """The rows in micro-batches of `micro`; their tensors share memory, so that numpy and torch are called once."""
    rows, length = arrays.inputs.shape
    inside = arrays.starts < length
    first = np.arange(rows, dtype=np.int32) % micro * length
    cu_seqlens = np.full((rows // micro, micro * arrays.starts.shape[1] + 1), micro * length, np.int32)
    used = np.arange(cu_seqlens.shape[1]) < inside.reshape(len(cu_seqlens), -1).sum(1)[:, None]
    cu_seqlens[used] = (arrays.starts + first[:, None])[inside]
    tensors = [
        *(torch.from_numpy(array).unflatten(0, (-1, micro)) for array in arrays[:4]),
        torch.from_numpy(cu_seqlens),
    ]
    if device.type == "cuda":  # from pinned memory the copy to the device runs beside the computation
        tensors = [tensor.pin_memory() for tensor in tensors]
    return [Batch._make((*parts, length)) for parts in zip(*map(torch.unbind, tensors), strict=True)]
