"""The parts of one attempt, made in order from the config: data, engine, starting point, meter, validation, the loop.

Each refusal of what cannot work happens here, before the first step, on all ranks alike.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from data_prep.errors import DataError
from pretrain.config import Config, Layout
from pretrain.data.loader import Loader, Validation
from pretrain.dist import World, all_ranks_ok
from pretrain.errors import ConfigError
from pretrain.metrics.hardware import find_device
from pretrain.metrics.inside import Inside
from pretrain.metrics.meter import Meter
from pretrain.metrics.sinks import Sinks, open_sinks
from pretrain.parallel.build import build_engine, describe_attention
from pretrain.parallel.engine import Engine, State
from pretrain.train import checkpoint_folder as folder
from pretrain.train.anomalies import Anomalies, left_out
from pretrain.train.checkpoint import Checkpointer, choose, read_state, restore_rng, verify_together
from pretrain.train.evaluate import evaluate
from pretrain.train.optimizer import build_optimizer, describe_groups
from pretrain.train.resume import compare_configs
from pretrain.train.run_folder import record_start, write_config
from pretrain.train.stop import Stop
from pretrain.train.trainer import Trainer
from pretrain.train.watchdog import Watchdog

T = TypeVar("T")


class Setup:
    """Builds the parts of an attempt in order, and closes what was opened."""

    def __init__(self, cfg: Config, layout: Layout, ranks: World, attempt: int) -> None:
        self.cfg, self.layout, self.ranks, self.attempt = cfg, layout, ranks, attempt
        self.run = Path(cfg.run.dir)
        self.sinks: Sinks = open_sinks(
            cfg.metrics.sinks,
            self.run,
            total_steps=cfg.steps,
            rank=ranks.rank,
            run_name=cfg.run.name,
            config=cfg.model_dump(by_alias=True),
            wandb_mode=cfg.metrics.wandb_mode,
            wandb_project=cfg.metrics.wandb_project,
            wandb_entity=cfg.metrics.wandb_entity,
            resume_step=max((c.step for c in folder.list_checkpoints(self.run) if c.problem is None), default=0),
        )
        self.anomalies = Anomalies(cfg.anomalies)
        self.inside = self._inside()
        self.loader: Loader | None = None
        self.engine: Engine | None = None
        self.done = lambda: 0  # steps so far, for events of the data

    def close(self) -> None:
        if self.loader is not None:
            self.loader.close()
        if self.engine is not None:
            self.engine.close()
        self.sinks.close()

    def trainer(self, stop: Stop, resume: str, allow_change: set[str]) -> Trainer:
        cfg, ranks, run = self.cfg, self.ranks, self.run
        seed_everything(cfg, ranks)
        self.loader = loader = self._open_data()
        start = self._starting_point(resume, allow_change, loader)
        engine = build_engine(cfg, self.layout, ranks, lambda model: build_optimizer(model, cfg.optimizer))
        self.engine = engine
        self._describe(engine)
        state = engine.state()
        folder.require_room(folder.checkpoints_dir(run), sum(t.numel() * t.element_size() for t in state.values()))
        origin = self._restore(engine, state, start)
        del state
        meter = self._meter(origin)
        checkpointer = Checkpointer(
            run, ranks, keep=cfg.checkpoint.keep, keep_every=cfg.checkpoint.keep_every, event=self.sinks.event
        )
        if ranks.first:
            record_start(self._resolved(), ranks)
            self.sinks.event("start", origin["step"], attempt=self.attempt, world_size=ranks.size)
        trainer = Trainer(
            cfg,
            engine,
            loader,
            meter,
            self.sinks,
            checkpointer,
            stop,
            self._evaluator(engine),
            self._meta,
            lambda rows: self._go_back(engine, rows),
            self.anomalies,
            self.inside,
            done=origin["step"],
            rows_consumed=origin["rows_consumed"],
            attempt=self.attempt,
            watchdog=self._watchdog(),
            world=ranks,
        )
        self.done = lambda: trainer.done
        return trainer

    def _open_data(self) -> Loader:
        """The loader; every refusal of the data happens here, on all ranks alike."""
        cfg = self.cfg

        def opened() -> Loader:
            loader = Loader(
                cfg.data,
                seed=cfg.run.seed,
                rows_per_step=cfg.train.global_batch_size,
                micro_batch_size=cfg.train.micro_batch_size,
                dp_rank=self.layout.dp_rank(self.ranks.rank),
                dp_world=self.layout.dp,
                device=self.ranks.device,
                events=self._data_event,
            )
            loader.check_vocab(cfg.model.vocab_size)
            return loader

        loader = self._on_all_ranks(opened)
        if self.ranks.first:
            self._copy_tokenizer()
        return loader

    def _on_all_ranks(self, opened: Callable[[], T]) -> T:
        """What this rank has opened, unless a rank, each with a disk of its own perhaps, finds its data wanting."""
        error = None
        try:
            result = opened()
        except (ConfigError, DataError) as e:
            error = e
        all_ranks_ok(error, self.ranks)
        return result

    def _data_event(self, event: str, **details: Any) -> None:
        self.sinks.event(event, self.done(), **details)

    def _copy_tokenizer(self) -> None:
        source, target = Path(self.cfg.data.sources[0].path) / "tokenizer", self.run / "tokenizer"
        if source.is_dir() and not target.exists():
            shutil.copytree(source, target)

    def _starting_point(self, resume: str, allow_change: set[str], loader: Loader) -> tuple[Path, str] | None:
        """The checkpoint to start from and how: ("resume" | "weights" | "all"); None: step 0."""
        cfg, ranks, run = self.cfg, self.ranks, self.run
        if ranks.first:
            for name in folder.remove_leftovers(run):
                self.sinks.say(f"removed {name}, left by an interrupted save")
        newest = choose(run, ranks, self.sinks.say)
        if newest is None:
            self.sinks.say("no checkpoint in this run yet")
            if cfg.init.from_ is None:
                return None
            return self._init_from(Path(cfg.init.from_)), cfg.init.load
        if resume == "never":
            raise ConfigError(
                f"run.dir={cfg.run.dir!r} has {newest.name} and --resume never was given; "
                f"choose another run.dir or leave --resume out"
            )
        meta = folder.read_meta(newest, resumable=True)
        loader.leave_out(left_out(meta))
        now = cfg.model_dump(by_alias=True, mode="json")
        fingerprints = (meta["data_fingerprint"], loader.fingerprint_at(meta["rows_consumed"]))
        changed = compare_configs(meta["config"], now, allow_change, fingerprints=fingerprints)
        if ranks.first:
            for key, (before, after) in changed.items():
                self.sinks.say(f"changed on resume, as allowed: {key} from {before} to {after}")
            self.sinks.event(
                "resume", meta["step"], checkpoint=newest.name, changed={k: list(v) for k, v in changed.items()}
            )
        return newest, "resume"

    def _init_from(self, source: Path) -> Path:
        """The checkpoint that init.from means: itself, or a run's newest whole one."""
        if (source / folder.MARKER).exists():
            problem = verify_together(source, self.ranks)
            if problem is not None:
                raise ConfigError(f"init.from={str(source)!r} is damaged: {problem}")
            return source
        found = choose(source, self.ranks, self.sinks.say)
        if found is None:
            raise ConfigError(f"init.from={str(source)!r} has no checkpoint; give a checkpoint's folder or a run's")
        return found

    def _restore(self, engine: Engine, state: State, start: tuple[Path, str] | None) -> dict[str, int]:
        """Fill the engine from the starting point; the counters that go with it."""
        if start is None:
            return {"step": 0, "rows_consumed": 0, "tokens": 0, "targets": 0}
        path, how = start
        if how == "weights":
            state = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
        read_state(path, state)
        engine.load(state)
        going_on = self.cfg.init.data == "continue"
        meta = folder.read_meta(path, resumable=how == "resume" or going_on)
        if how == "resume":
            restore_rng(path, self.ranks.rank)
            self.anomalies.load(meta.get("anomalies", {}))
            self.inside.load(meta)
            self.sinks.say(
                f"resumed from {path.name}: {meta['rows_consumed']:,} rows and {meta['tokens']:,} tokens done"
            )
            return {key: meta[key] for key in ("step", "rows_consumed", "tokens", "targets")}
        self.sinks.say(f"started from {path} ({how})")
        assert self.loader is not None
        if going_on:
            self.loader.leave_out(left_out(meta))
            self.anomalies.left_out = left_out(meta)
        if going_on and meta["data_fingerprint"] != self.loader.fingerprint_at(meta["rows_consumed"]):
            raise ConfigError(
                'init.data="continue" needs the data that init.from was trained on; set init.data="restart"'
            )
        kept = {key: meta[key] if going_on else 0 for key in ("rows_consumed", "tokens", "targets")}
        return {"step": 0, **kept}

    def _go_back(self, engine: Engine, rows: list[int]) -> dict[str, int]:
        """Take engine and data back to this run's newest whole checkpoint, less `rows`; the counters there."""
        newest = choose(self.run, self.ranks, self.sinks.say)
        assert newest is not None, "a run that may roll back has saved its first step"
        assert self.loader is not None
        origin = self._restore(engine, engine.state(), (newest, "resume"))
        self.anomalies.spent += 1
        self.anomalies.left_out.append(rows)
        self.loader.leave_out([rows])
        if self.ranks.first:
            write_config(self._resolved())
        return origin

    def _resolved(self) -> Config:
        """The config with the rows that rollbacks left out: `inspect` reads it to tell what a step has seen."""
        assert self.loader is not None
        return self.cfg.model_copy(update={"data": self.loader.cfg})

    def _meta(self, trainer: Trainer) -> dict[str, Any]:
        assert self.loader is not None
        return {
            "step": trainer.done,
            "rows_consumed": trainer.rows_consumed,
            "tokens": trainer.meter.tokens,
            "targets": trainer.meter.targets,
            "anomalies": trainer.anomalies.state(),
            "attempt": self.attempt,
            "world_size": self.ranks.size,
            "engine": self.cfg.parallel.engine,
            "data_fingerprint": self.loader.fingerprint_at(trainer.rows_consumed),
            "config": self.cfg.model_dump(by_alias=True, mode="json"),
            "torch": torch.__version__,
            **self.inside.state(),
        }

    def _meter(self, origin: dict[str, int]) -> Meter:
        cfg, ranks = self.cfg, self.ranks
        peak, why = peak_flops(cfg, ranks.device)
        self.sinks.say(why)
        if cfg.activation_checkpoint.memory_budget < 1:
            budget = f"activation_checkpoint.memory_budget={cfg.activation_checkpoint.memory_budget:g}"
            self.sinks.say(f"recompute | the compiler's choice for {budget} is not known, so no HFU")
        return Meter(
            cfg.model,
            seq_len=cfg.data.seq_len,
            every=cfg.metrics.every,
            last_step=cfg.steps,
            rank=ranks.rank,
            world_size=ranks.size,
            all_reduce=dist.all_reduce if ranks.size > 1 else None,
            device=ranks.device,
            peak_flops=peak,
            recompute=None if cfg.activation_checkpoint.memory_budget < 1 else cfg.activation_checkpoint.mode,
            recompute_every=cfg.activation_checkpoint.every,
            attempt=self.attempt,
            tokens=origin["tokens"],
            targets=origin["targets"],
        )

    def _inside(self) -> Inside:
        metrics, ranks = self.cfg.metrics, self.ranks
        return Inside(
            layers=metrics.layers,
            noise_scale=metrics.noise_scale,
            device=ranks.device,
            all_reduce=dist.all_reduce if ranks.size > 1 else None,
        )

    def _evaluator(self, engine: Engine) -> Any:
        cfg = self.cfg
        if not cfg.eval.every:
            return None
        micro = cfg.eval.micro_batch_size or cfg.train.micro_batch_size
        rows = self._on_all_ranks(
            lambda: Validation(
                cfg.data,
                micro_batch_size=micro,
                dp_rank=self.layout.dp_rank(self.ranks.rank),
                dp_world=self.layout.dp,
                device=self.ranks.device,
                events=self._data_event,
            )
        )
        if not rows.targets:
            if "every" in cfg.eval.model_fields_set:
                raise ConfigError(
                    f"eval.every={cfg.eval.every}, but data.sources have no validation rows; "
                    f"build them with pretrain-data build --val-fraction, or set eval.every=0"
                )
            self.sinks.say("no validation rows in data.sources: nothing to evaluate")
            return None
        return lambda leave: evaluate(engine, rows, self.ranks, leave)

    def _watchdog(self) -> Watchdog:
        run, rank = self.cfg.run, self.ranks.rank

        def on_hang(step: int, waited: float) -> None:
            self.sinks.event("hang", step, rank=rank, seconds=round(waited, 1), stacks=f"logs/rank-{rank}.log")

        log = self.run / "logs" / f"rank-{rank}.log"
        return Watchdog(log, factor=run.hang_factor, least_seconds=run.hang_seconds, on_hang=on_hang)

    def _describe(self, engine: Engine) -> None:
        cfg, layout, say = self.cfg, self.layout, self.sinks.say
        stage = f" stage {cfg.parallel.zero_stage}" if cfg.parallel.engine == "zero" else ""
        say(f"run {cfg.run.name} | {cfg.run.dir} | attempt {self.attempt} | seed {cfg.run.seed}")
        say(
            f"layout | {self.ranks.size} ranks: dp_replicate {layout.dp_replicate} x dp_shard {layout.dp_shard} x "
            f"cp {layout.cp} x tp {layout.tp} | "
            f"engine {cfg.parallel.engine}{stage} | "
            f"{layout.accumulation} micro-batches of {cfg.train.micro_batch_size} rows a rank and step"
        )
        say(f"attention | {describe_attention(cfg, self.ranks.device)[1]}")
        say(describe_groups(engine.model, cfg.optimizer.weight_decay))


def peak_flops(cfg: Config, device: torch.device) -> tuple[float | None, str]:
    """FLOP/s of one device for MFU, and the line that says where the number is from."""
    if cfg.metrics.peak_tflops is not None:
        return cfg.metrics.peak_tflops * 1e12, f"peak | {cfg.metrics.peak_tflops:g} TFLOP/s, from metrics.peak_tflops"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    known = find_device(name)
    if known is None:
        return None, f"peak | unknown for {name!r}, so no MFU; metrics.peak_tflops sets it"
    return known.bf16_flops, f"peak | {known.bf16_flops / 1e12:g} TFLOP/s bf16 dense for {name!r} ({known.source})"


def seed_everything(cfg: Config, ranks: World) -> None:
    """Seed each generator of this rank; weights and data order have seeds of their own and never draw from these."""
    seed = cfg.run.seed + ranks.rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(cfg.run.deterministic)
    # It would fill every new tensor with NaN, DeepSpeed's gigabytes of buckets at each step, too.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
