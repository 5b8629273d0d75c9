"""Where the lines of a run go: console, metrics.jsonl and events.jsonl, wandb, TensorBoard.

The one door to wandb and to TensorBoard. Only rank 0 writes metrics; every rank may write events. Trackers
are guests: wandb lives in a thread of its own behind a bounded queue, so that neither its failures nor its
hangs can stop or delay a step, and what a tracker missed is still in metrics.jsonl.
"""

import contextlib
import importlib.util
import os
import queue
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TextIO

from pretrain.errors import ConfigError
from pretrain.metrics.console import Console
from pretrain.metrics.jsonl import JsonLines

Say = Callable[[str], None]


class Sink(Protocol):
    def write(self, record: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Sinks:
    """All the sinks of a rank. A sink that fails is named once on the console and does not end the run."""

    def __init__(self, sinks: dict[str, Sink], events: JsonLines | None, console: Console | None) -> None:
        self._sinks = sinks
        self._events = events
        self._console = console
        self._complained: set[str] = set()

    def write(self, record: dict[str, Any]) -> None:
        """One line of metrics: a training window from the meter, or `step` with `val_loss`."""
        for name, sink in self._sinks.items():
            try:
                sink.write(record)
            except Exception as error:
                self._complain(name, error)

    def event(self, event: str, step: int, **details: Any) -> None:
        """A line of events.jsonl: `event` is start, resume, save, stop, anomaly, bad_shard, finish and the like."""
        if self._events is None:
            return
        try:
            self._events.write({"time": time.time(), "step": step, "event": event, **details})
        except Exception as error:
            self._complain("events.jsonl", error)

    def say(self, text: str) -> None:
        """A plain line for people, on the rank that has a console."""
        if self._console is not None:
            self._console.say(text)

    def close(self) -> None:
        """Flushes what it can within seconds; a tracker that does not answer is left behind."""
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception as error:
                self._complain(name, error)
        if self._events is not None:
            with contextlib.suppress(OSError):  # of a full disk, perhaps over the error that it has caused
                self._events.close()
            self._events = None

    def _complain(self, name: str, error: Exception) -> None:
        if name not in self._complained:
            self._complained.add(name)
            self.say(f"warning: {name} failed and training goes on: {_reason(error)}")


def check_sinks(names: Iterable[str]) -> None:
    """Refuses, before anything starts, a sink that cannot work here; a missing wandb only warns, later."""
    if "tensorboard" in names and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            'metrics.sinks names "tensorboard", which is not installed; '
            "run `pip install tensorboard` or take it out of metrics.sinks"
        )


def open_sinks(
    names: Iterable[str],
    run_dir: str | Path,
    *,
    total_steps: int,
    rank: int = 0,
    run_name: str = "",
    config: dict[str, Any] | None = None,
    wandb_mode: str = "online",
    wandb_project: str = "llama-pretrain",
    wandb_entity: str | None = None,
    resume_step: int = 0,
    stream: TextIO | None = None,
) -> Sinks:
    """The sinks named in `metrics.sinks`; on ranks other than 0 only the events file.

    `resume_step` is the optimizer step that this start continues from; `config` goes to wandb as it is.
    """
    run_dir = Path(run_dir)
    events = JsonLines(run_dir / "events.jsonl")
    if rank != 0:
        return Sinks({}, events, None)
    names = list(names)
    console = Console(total_steps, stream)
    sinks: dict[str, Sink] = {}
    if "jsonl" in names:
        sinks["metrics.jsonl"] = JsonLines(run_dir / "metrics.jsonl")
    if "console" in names:
        sinks["console"] = console
    if "tensorboard" in names:
        sinks["tensorboard"] = TensorBoard(run_dir / "tensorboard", resume_step)
    if "wandb" in names and wandb_mode != "disabled":
        sinks["wandb"] = Wandb(
            run_dir,
            name=run_name,
            project=wandb_project,
            entity=wandb_entity,
            mode=wandb_mode,
            config=config or {},
            say=console.say,
        )
    return Sinks(sinks, events, console)


class Wandb:
    """One wandb run over all attempts: its id is kept in RUN/wandb_id, its x axis is our own `step`.

    wandb drops points whose internal step does not grow, as after a resume from an older checkpoint; points
    sent without one, on an axis of their own, are all kept (the steps done twice appear twice, told apart by
    `attempt`).
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        name: str,
        project: str,
        mode: str,
        config: dict[str, Any],
        say: Say,
        entity: str | None = None,
        queue_size: int = 1000,
        init_timeout: float = 20.0,
        close_timeout: float = 30.0,
    ) -> None:
        self._say = say
        self._close_timeout = close_timeout
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(queue_size)
        self._dropped = 0
        self._failed = 0
        self._dead = False
        run_dir.mkdir(parents=True, exist_ok=True)
        options = {
            "id": _run_id(run_dir / "wandb_id"),
            "resume": "allow",
            "project": project,
            "entity": entity,
            "name": name or None,
            "dir": str(run_dir),
            "mode": mode,
            "config": config,
        }
        self._thread = threading.Thread(
            target=self._serve, args=(options, init_timeout), name="wandb-sink", daemon=True
        )
        self._thread.start()

    def write(self, record: dict[str, Any]) -> None:
        if self._dead:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                self._say("warning: wandb does not keep up; points are left out there, metrics.jsonl has them")

    def close(self) -> None:
        if not self._dead:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=self._close_timeout)
        self._thread.join(self._close_timeout)
        if self._thread.is_alive():
            self._say(
                f"warning: wandb did not finish within {self._close_timeout:g} s and is left behind; "
                f"`wandb sync` sends what it wrote"
            )
        elif self._dropped or self._failed:
            self._say(f"warning: wandb missed {self._dropped + self._failed} points; metrics.jsonl has them")

    def _serve(self, options: dict[str, Any], init_timeout: float) -> None:
        """The thread: everything that touches wandb."""
        run = self._start(options, init_timeout)
        if run is None:
            self._dead = True
            return
        while (record := self._queue.get()) is not None:
            try:
                run.log({key: value for key, value in record.items() if value is not None})
            except Exception as error:
                self._failed += 1
                if self._failed == 1:
                    self._say(f"warning: wandb failed and training goes on: {_reason(error)}")
        try:
            run.finish()
        except Exception as error:
            self._say(f"warning: wandb could not finish: {_reason(error)}")

    def _start(self, options: dict[str, Any], init_timeout: float) -> Any:
        """A run, or None when there is no way to have one. Online without a network or key becomes offline."""
        try:
            import wandb
        except Exception as error:
            missing = isinstance(error, ModuleNotFoundError)
            why = "is not installed (`pip install wandb`)" if missing else f"does not import: {_reason(error)}"
            self._say(f"warning: wandb {why}; training goes on, metrics.jsonl has every point")
            return None
        settings = _settings(wandb, init_timeout=init_timeout, finish_timeout=self._close_timeout / 2)
        for mode in dict.fromkeys((options["mode"], "offline")):
            try:
                run = wandb.init(**options | {"mode": mode}, settings=settings)
                run.define_metric("step")
                run.define_metric("*", step_metric="step")
                return run
            except Exception as error:
                then = (
                    "training goes on, metrics.jsonl has every point"
                    if mode == "offline"
                    else f"points are kept under {options['dir']}/wandb for `wandb sync`"
                )
                self._say(f"warning: wandb could not start {mode} ({_reason(error)}); {then}")
                with contextlib.suppress(Exception):
                    wandb.teardown()  # its service would hold on to the run's id
        return None


class TensorBoard:
    """Scalars under RUN/tensorboard; points of an older attempt past `resume_step` are not shown twice."""

    def __init__(self, log_dir: Path, resume_step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the packages that tensorboard imports
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(log_dir), purge_step=resume_step + 1 if resume_step else None)

    def write(self, record: dict[str, Any]) -> None:
        for key, value in record.items():
            if key != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, global_step=record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _run_id(path: Path) -> str:
    """The run's id, made at its first start and the same ever after."""
    if path.exists() and (known := path.read_text().strip()):
        return known
    fresh = secrets.token_hex(4)
    aside = path.with_suffix(".tmp")
    aside.write_text(fresh + "\n")
    os.replace(aside, path)
    return fresh


def _settings(wandb: Any, **wanted: Any) -> Any:
    """The wanted settings that this version of wandb knows: finish_timeout came late."""
    wanted["login_timeout"] = 1  # seconds that a prompt for a key may stay on a terminal
    wanted["console"] = "off"  # it would put itself between the program and its output
    wanted["quiet"] = True
    known = getattr(wandb.Settings, "model_fields", wanted)
    return wandb.Settings(**{key: value for key, value in wanted.items() if key in known})


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
