"""The loop: read it top to bottom. What surrounds it (folder, resume, sinks, outcome) is set up by `run`.

`done` counts finished optimizer steps and `rows_consumed` rows of the stream: everything that is no tensor is a
function of the two. Nothing here waits for the device but the log steps, validation and saves.
"""

import gc
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.errors import DataError
from pretrain.config import Config
from pretrain.data.loader import Loader, Step
from pretrain.dist import World, gather_objects
from pretrain.errors import AnomalyError
from pretrain.metrics.meter import Meter
from pretrain.metrics.sinks import Sinks
from pretrain.parallel.engine import Engine
from pretrain.train.checkpoint import Checkpointer
from pretrain.train.schedule import lr_at
from pretrain.train.stop import Reason, Stop
from pretrain.train.watchdog import Watchdog

Evaluate = Callable[[Callable[[], bool]], dict[str, float] | None]


class Trainer:
    """One attempt of a run, from `done` steps on. `evaluate` gives validation metrics, or None when told to hurry."""

    def __init__(
        self,
        cfg: Config,
        engine: Engine,
        loader: Loader,
        meter: Meter,
        sinks: Sinks,
        checkpointer: Checkpointer,
        stop: Stop,
        evaluate: Evaluate | None,
        meta: Callable[["Trainer"], dict[str, Any]],
        *,
        done: int,
        rows_consumed: int,
        attempt: int,
        watchdog: Watchdog,
        world: World,
    ) -> None:
        self.cfg, self.engine, self.loader, self.meter, self.sinks = cfg, engine, loader, meter, sinks
        self.checkpointer, self.stop, self.evaluate, self.meta = checkpointer, stop, evaluate, meta
        self.done, self.rows_consumed, self.attempt, self.world = done, rows_consumed, attempt, world
        self.watchdog = watchdog
        self.saved = done  # the newest step that is in a checkpoint
        self._begun = done
        self._data_error: DataError | None = None
        self._norms: list[Tensor] = []  # of the steps not yet looked at for anomalies

    def train(self) -> Reason:
        """Train to the last step, or to an agreed stop; the reason (none: finished). All that was done is saved."""
        cfg, engine, meter = self.cfg, self.engine, self.meter
        upcoming = self.fetch()
        stopping = self.stop.agreed(self.world, no_data=upcoming is None)
        meter.restart_clock()
        with garbage_collection_at_fixed_steps(cfg.run.gc_every) as collect, self.watchdog.watching():
            while self.done < cfg.steps and not stopping:
                lr, step = lr_at(self.done + 1, cfg), upcoming
                assert step is not None
                for index, batch in enumerate(step.batches):
                    sums = engine.forward(batch)
                    engine.backward(sums.total / step.targets, last=index == len(step.batches) - 1)
                    meter.add(sums.cross_entropy, sums.targets, sums.z_loss if cfg.loss.z_loss else None)
                self._norms.append(engine.step(lr))
                self.done += 1
                self.rows_consumed += cfg.train.global_batch_size
                waited = self.loader.data_wait_seconds
                upcoming = self.fetch()
                waited = self.loader.data_wait_seconds - waited
                meter.step_done(tokens=step.tokens, targets=step.targets, data_wait=waited)
                self.watchdog.beat(self.done)
                self.checkpointer.raise_if_failed()
                collect(self.done)
                if meter.due(self.done):
                    self.sinks.write(meter.close_window(self.done, lr, self._norms[-1], step.epoch))
                    self.check_anomalies()
                if self.evaluate is not None and due(self.done, cfg.eval.every, cfg.steps):
                    self.validate(self.evaluate)
                stopping = self.stop.agreed(self.world, no_data=upcoming is None and self.done < cfg.steps)
                if stopping or due(self.done, cfg.checkpoint.every, cfg.steps):
                    self.save(background=cfg.checkpoint.async_ and not stopping and self.done < cfg.steps)
        self.checkpointer.wait()
        if stopping is Reason.data and self.done < cfg.steps:
            why = next(filter(None, gather_objects(str(self._data_error or ""), self.world)))
            if self.done == self._begun:
                raise DataError(why)
            raise AnomalyError(f"step {self.done + 1} has no data: {why}")
        return stopping if self.done < cfg.steps else Reason.none

    def fetch(self) -> Step | None:
        """The rows of the next step; None where they cannot be read, which all ranks then agree to stop for."""
        try:
            return self.loader.step(self.rows_consumed) if self.done < self.cfg.steps else None
        except DataError as e:
            self._data_error = e
            return None

    def validate(self, evaluate: Evaluate) -> None:
        """Validation metrics of this step; left out when a stop comes meanwhile."""
        with self.meter.pause("eval"), self.watchdog.paused():
            metrics = evaluate(lambda: self.stop.agreed(self.world) is not Reason.none)
        if metrics is not None:
            self.sinks.write({"step": self.done, "attempt": self.attempt, **metrics})

    def save(self, *, background: bool) -> None:
        """A checkpoint of this step, unless it has one; never of steps whose anomalies were not looked at."""
        self.check_anomalies()
        if self.saved == self.done or (self.stop.hurry and self.checkpointer.writing):
            return
        with self.meter.pause("save"), self.watchdog.paused():
            self.checkpointer.save(self.done, self.engine.state(), self.meta(self), background=background)
        self.saved = self.done

    def check_anomalies(self) -> None:
        """Raise AnomalyError where the loss or the gradient of a step since the last look was not finite."""
        if not self._norms:
            return
        norms = torch.stack([norm.detach().float() for norm in self._norms]).tolist()
        first = self.done - len(norms) + 1
        self._norms.clear()
        for step, norm in enumerate(norms, start=first):
            if not math.isfinite(norm):
                rows = self.cfg.train.global_batch_size
                end = self.rows_consumed - (self.done - step) * rows
                first_row, last_row = self.loader.order.stream_rows(np.array([end - rows, end - 1])).tolist()
                if self.world.first:
                    self.sinks.event("anomaly", step, grad_norm=str(norm), rows=[first_row, last_row])
                raise AnomalyError(
                    f"step {step}: the gradient norm is {norm}; the newest checkpoint is of step {self.saved}; "
                    f"look at its rows {first_row} to {last_row} with pretrain-data inspect --step {step}, leave them "
                    f"out with data.skip=[[{first_row}, {last_row}]], or lower optimizer.lr, and start again"
                )


def due(done: int, every: int, last: int) -> bool:
    """Every multiple of `every` (0: none) and the last step."""
    return done == last if every == 0 else done % every == 0 or done == last


class garbage_collection_at_fixed_steps:
    """Python's collector off while inside; the given function collects at multiples of `every`, on all ranks together.

    A collection takes tens of milliseconds, and a rank that pauses alone makes all others wait.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def __enter__(self) -> Callable[[int], None]:
        if self.every:
            gc.collect()
            gc.disable()
        return self.collect

    def collect(self, done: int) -> None:
        if self.every and done % self.every == 0:
            gc.collect(1)

    def __exit__(self, *exc: object) -> None:
        if self.every:
            gc.enable()
