"""The loop: read it top to bottom. What surrounds it (folder, resume, sinks, outcome) is made by `run` and `setup`.

`done` counts finished optimizer steps and `rows_consumed` rows of the stream: everything that is no tensor is a
function of the two. Nothing here waits for the device but the log steps, validation and saves.
"""

import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.errors import DataError
from pretrain.config import Config
from pretrain.data.loader import Loader, Step
from pretrain.dist import World, gather_objects
from pretrain.errors import AnomalyError
from pretrain.metrics.inside import Inside
from pretrain.metrics.meter import Meter
from pretrain.metrics.sinks import Sinks
from pretrain.model.loss import LossSums
from pretrain.parallel.engine import Engine
from pretrain.train.anomalies import Anomalies
from pretrain.train.checkpoint import Checkpointer
from pretrain.train.integrity import Outcome, Replay, differing_copies, numbers_that_are_none
from pretrain.train.schedule import lr_at
from pretrain.train.stop import Reason, Stop
from pretrain.train.watchdog import Watchdog

Evaluate = Callable[[Callable[[bool], bool]], dict[str, float] | None]


class Unseen(NamedTuple):
    """A step that was not yet looked at for anomalies."""

    loss: Tensor  # this rank's share of the mean over the global batch's targets
    norm: Tensor


class Trainer:
    """One attempt of a run, from `done` steps on. `evaluate` gives validation metrics, or None when told to hurry;
    `restore` goes back to the newest whole checkpoint, leaves a range of rows out, and gives the counters."""

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
        restore: Callable[[list[int]], dict[str, int]],
        anomalies: Anomalies,
        inside: Inside,
        *,
        done: int,
        rows_consumed: int,
        attempt: int,
        watchdog: Watchdog,
        world: World,
    ) -> None:
        self.cfg, self.engine, self.loader, self.meter, self.sinks = cfg, engine, loader, meter, sinks
        self.checkpointer, self.stop, self.evaluate, self.meta = checkpointer, stop, evaluate, meta
        self.restore, self.anomalies, self.inside = restore, anomalies, inside
        self.done, self.rows_consumed, self.attempt, self.world = done, rows_consumed, attempt, world
        self.watchdog = watchdog
        self.saved = done  # the newest step that is in a checkpoint
        self._begun = done
        self._no_data = ""  # what this rank could not read
        self._unseen: list[Unseen] = []
        self._upcoming: Step | None = None

    def train(self) -> Reason:
        """Train to the last step, or to an agreed stop; the reason (none: finished). All that was done is saved."""
        cfg, engine, meter = self.cfg, self.engine, self.meter
        if cfg.anomalies.policy == "rollback" and self.done == 0:
            self.save(background=False, again=True)  # there must be one to go back to
        self._upcoming = self.fetch()
        stopping, why = self.stop_agreed()
        meter.restart_clock()
        with garbage_collection_at_fixed_steps(cfg.run.gc_every) as collect, self.watchdog.watching():
            while self.done < cfg.steps and not stopping:
                lr, step = lr_at(self.done + 1, cfg), self._upcoming
                assert step is not None
                norm, kept = self.update(step, lr)
                self.done += 1
                self.rows_consumed += cfg.train.global_batch_size
                waited = self.loader.data_wait_seconds
                self._upcoming = self.fetch()
                waited = self.loader.data_wait_seconds - waited
                # A step that was skipped has trained on nothing.
                meter.step_done(tokens=step.tokens * kept, targets=step.targets * kept, data_wait=waited)
                self.watchdog.beat(self.done)
                self.checkpointer.raise_if_failed()
                collect(self.done)
                if meter.due(self.done):
                    self.sinks.write(meter.close_window(self.done, lr, norm, step.epoch) | self.inside.close())
                verifying = multiple(self.done, cfg.anomalies.verify_every)
                if verifying or meter.due(self.done) or due(self.done, cfg.checkpoint.every, cfg.steps):
                    self.check_anomalies()
                if verifying:
                    self.stop_if_corrupt(numbers_that_are_none(engine.held(), self.world))
                    self.stop_if_corrupt(differing_copies(engine.held(), self.world))
                if self.evaluate is not None and due(self.done, cfg.eval.every, cfg.steps):
                    self.validate(self.evaluate)
                stopping, why = self.stop_agreed()
                if stopping or due(self.done, cfg.checkpoint.every, cfg.steps):
                    self.save(background=cfg.checkpoint.async_ and not stopping and self.done < cfg.steps)
        self.checkpointer.wait()
        if stopping is Reason.data:
            raise DataError(why) if self.done == self._begun else AnomalyError(why)
        return stopping if self.done < cfg.steps else Reason.none

    def update(self, step: Step, lr: float) -> tuple[Tensor, bool]:
        """One optimizer step; the gradient norm, and whether it was not skipped. Only policy "skip" waits for the
        device here, since it judges before the update."""
        replay = Replay(self.engine) if multiple(self.done + 1, self.cfg.anomalies.replay_every) else None
        parts, loss = self.gradients(step, inside=self.meter.due(self.done + 1))
        kept = True

        def keep(norm: Tensor) -> bool:
            nonlocal kept
            [why] = self.judge([Unseen(loss, norm)])
            if why is not None:
                kept = False
                self.answer(self.done + 1, why)
            return kept

        skipping = self.cfg.anomalies.policy == "skip"
        norm = self.engine.step(lr, keep if skipping else None)
        if not skipping:
            self._unseen.append(Unseen(loss, norm))
        if replay is not None and kept:
            self.stop_if_corrupt(replay.compare(Outcome(loss, norm), lambda: self.repeated(step, lr), self.world))
        for sums in parts if kept else ():
            self.meter.add(sums.cross_entropy, sums.targets, sums.z_loss if self.cfg.loss.z_loss else None)
        return norm, kept

    def gradients(self, step: Step, *, inside: bool = False) -> tuple[list[LossSums], Tensor]:
        """Forward and backward of all micro-batches; their sums, and this rank's share of the step's mean loss."""
        engine, parts = self.engine, list[LossSums]()
        with self.inside.watching(engine.model, now=inside):
            for index, batch in enumerate(step.batches):
                last = index == len(step.batches) - 1
                looked_at = self.inside.looks_at(index, last=last)
                sums = engine.forward(batch)
                engine.backward(sums.total / step.targets, last=last, reduce=looked_at)
                if looked_at:
                    self.inside.add_gradients(engine.grad_squares(), sums.targets, step.targets, last=last)
                parts.append(LossSums(*(part.detach() for part in sums)))
        return parts, torch.stack([sums.cross_entropy for sums in parts]).sum() / step.targets

    def repeated(self, step: Step, lr: float) -> Outcome:
        """A step that leaves no trace but in the engine."""
        _, loss = self.gradients(step)
        return Outcome(loss, self.engine.step(lr))

    def stop_if_corrupt(self, why: str | None) -> None:
        """Raise what a check for silent corruption has found."""
        if why is None:
            return
        if self.world.first:
            self.sinks.event("anomaly", self.done, why=why)
        raise AnomalyError(
            f"at step {self.done} {why}; memory or processor of a host may be faulty: test it with pretrain doctor or "
            f"leave it out, and start again: {self.newest_checkpoint()}"
        )

    def stop_agreed(self) -> tuple[Reason, str]:
        """Why all ranks stop now, and what the first of those that lack data could not read."""
        reason = self.stop.agreed(self.world, no_data=bool(self._no_data))
        found = gather_objects(self._no_data, self.world) if reason is Reason.data else []
        return reason, next(filter(None, found), "")

    def fetch(self) -> Step | None:
        """The rows of the next step; None where they cannot be read, which all ranks then agree to stop for."""
        self._no_data = ""
        try:
            return self.loader.step(self.rows_consumed) if self.done < self.cfg.steps else None
        except DataError as e:
            self._no_data = f"step {self.done + 1} has no data: {e}"
            return None

    def validate(self, evaluate: Evaluate) -> None:
        """Validation metrics of this step; left out when a stop comes meanwhile, or rows that a rank cannot read."""
        metrics = None
        with self.meter.pause("eval"), self.watchdog.paused():
            try:
                metrics = evaluate(lambda lost: self.stop.agreed(self.world, no_data=lost) is not Reason.none)
            except DataError as e:
                self._no_data = f"validation after step {self.done} has no data: {e}"
        if metrics is not None:
            self.sinks.write({"step": self.done, "attempt": self.attempt, **metrics})

    def save(self, *, background: bool, again: bool = False) -> None:
        """A checkpoint of this step, unless it has one; never of steps whose anomalies were not looked at."""
        self.check_anomalies()
        if not again and (self.saved == self.done or (self.stop.hurry and self.checkpointer.writing())):
            return
        with self.meter.pause("save"), self.watchdog.paused():
            self.checkpointer.wait()  # before the next state is made: it may be copies
            copied = self.engine.state_is_copied
            self.checkpointer.save(
                self.done, self.engine.state(), self.meta(self), background=background, copied=copied
            )
        self.saved = self.done

    def newest_checkpoint(self) -> str:
        """Of a run that is about to end: said when the save in flight is whole."""
        with self.watchdog.paused():
            self.checkpointer.wait()
        return f"the newest checkpoint is of step {self.saved}" if self.saved else "there is no checkpoint yet"

    def check_anomalies(self) -> None:
        """Do what the policy says about the first anomaly since the last look; the steps after it are its children."""
        unseen, self._unseen = self._unseen, []
        for step, why in enumerate(self.judge(unseen), start=self.done - len(unseen) + 1):
            if why is not None:
                self.answer(step, why)
                return

    def judge(self, unseen: list[Unseen]) -> Iterator[str | None]:
        """What is wrong with each step (None: nothing), the same on every rank. Collective; waits for the device."""
        if not unseen:
            return
        losses = torch.stack([step.loss.double() for step in unseen])
        if self.world.size > 1:
            dist.all_reduce(losses)
        norms = torch.stack([step.norm.double() for step in unseen])
        for loss, norm in zip(losses.tolist(), norms.tolist(), strict=True):
            yield self.anomalies.judge(loss, norm)

    def answer(self, step: int, why: str) -> None:
        """Raise, note the skip, or roll back, as the policy says and the budget allows."""
        settings, rows = self.cfg.anomalies, self.cfg.train.global_batch_size
        end = self.rows_consumed - (self.done - step) * rows
        first, last = self.loader.order.stream_rows(np.array([end - rows, end - 1])).tolist()
        exhausted = settings.policy != "raise" and self.anomalies.spent >= settings.budget
        stops = exhausted or settings.policy == "raise"
        if self.world.first:
            self.sinks.event("anomaly" if stops else settings.policy, step, why=why, rows=[first, last])
            self.sinks.say(f"step {step}, rows {first} to {last}: {why}" + ("" if stops else f": {settings.policy}"))
        if stops:
            spent = f"; anomalies.budget={settings.budget} is used up" if exhausted else ""
            raise AnomalyError(
                f"step {step}: {why}{spent}; {self.newest_checkpoint()}; "
                f"look at its rows {first} to {last} with pretrain-data inspect --step {step}, leave them "
                f"out with data.skip=[[{first}, {last}]], or lower optimizer.lr, and start again"
            )
        if settings.policy == "rollback":
            self.roll_back([first, last])
        else:
            self.anomalies.spent += 1

    def roll_back(self, rows: list[int]) -> None:
        """Return to the newest checkpoint and leave `rows` of the stream out. Saved there at once: a later start, from
        whichever checkpoint, leaves them out too, and the budget is not refilled by a crash."""
        with self.watchdog.paused():
            self.checkpointer.wait()
            origin = self.restore(rows)
            self.done, self.rows_consumed = origin["step"], origin["rows_consumed"]
            self.meter.go_back(tokens=origin["tokens"], targets=origin["targets"])
        self.save(background=False, again=True)
        self._upcoming = self.fetch()


def due(done: int, every: int, last: int) -> bool:
    """Every multiple of `every` (0: none) and the last step."""
    return multiple(done, every) or done == last


def multiple(done: int, every: int) -> bool:
    """Every multiple of `every`; 0: none."""
    return every > 0 and done % every == 0


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
