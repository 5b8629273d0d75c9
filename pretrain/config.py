"""What a run is: all tables of its config, the checks that cross them, and how it cuts a world of ranks.

A key that would have no effect beside the others (an *inactive* key) is refused when a person sets it. Nothing here
loads torch, so a login node answers at once. Reading and writing of files is `config_file`; the published sizes are
`presets`.
"""

import math
from fractions import Fraction
from typing import Any, NamedTuple

from pydantic import Field, model_validator

from pretrain.config_deepspeed import check_deepspeed, check_world
from pretrain.config_tables import (
    ActivationCheckpointConfig,
    AnomaliesConfig,
    CheckpointConfig,
    CompileConfig,
    DataConfig,
    EvalConfig,
    InitConfig,
    LossConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RopeScaling,
    RunConfig,
    ScheduleConfig,
    Source,
    Stage,
    Table,
    TrainConfig,
)
from pretrain.errors import ConfigError

__all__ = [
    "ActivationCheckpointConfig",
    "AnomaliesConfig",
    "CheckpointConfig",
    "CompileConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "InitConfig",
    "Layout",
    "LossConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RopeScaling",
    "RunConfig",
    "ScheduleConfig",
    "Source",
    "Stage",
    "TrainConfig",
    "inactive_keys",
]


class Layout(NamedTuple):
    """How a world of ranks is cut: every number is a count of ranks but `accumulation` (micro-batches a step)."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    accumulation: int

    @property
    def dp(self) -> int:
        """Replicas that read different rows."""
        return self.dp_replicate * self.dp_shard

    def dp_rank(self, rank: int) -> int:
        """Which of the `dp` readers of rows a rank is; ranks that differ in cp and tp alone share their rows."""
        return rank // (self.cp * self.tp)


class Config(Table):
    run: RunConfig
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    init: InitConfig = InitConfig()
    precision: PrecisionConfig = PrecisionConfig()
    activation_checkpoint: ActivationCheckpointConfig = ActivationCheckpointConfig()
    compile: CompileConfig = CompileConfig()
    loss: LossConfig = LossConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()
    anomalies: AnomaliesConfig = AnomaliesConfig()
    deepspeed: dict[str, Any] = Field(default={})  # passed through to DeepSpeed, checked

    @model_validator(mode="before")
    @classmethod
    def _default_compile(cls, values: Any) -> Any:
        """Off by default at stage 3, which gathers parameters in hooks that a compiled block cannot have."""
        par = values.get("parallel") if isinstance(values, dict) and "compile" not in values else None
        if isinstance(par, dict) and par.get("engine") == "zero" and str(par.get("zero_stage", 3)) == "3":
            return values | {"compile": {"enabled": False}}
        return values

    @model_validator(mode="after")
    def _cross(self) -> "Config":
        for table, key, why in inactive_keys(self):
            if key in getattr(self, table).model_fields_set:
                raise ConfigError(f"{table}.{_alias(self, table, key)} has no effect {why}; remove it")
        _check_lengths(self)
        if self.anomalies.replay_every and not self.run.deterministic:
            raise ConfigError(
                f"anomalies.replay_every={self.anomalies.replay_every} compares two computations of a step bit by bit; "
                f"set run.deterministic=true with it"
            )
        _check_engine(self)
        return self

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.tokens is not None
        return math.ceil(Fraction(self.train.tokens) / (self.train.global_batch_size * self.data.seq_len))

    def layout(self, world_size: int) -> Layout:
        """Cut `world_size` ranks as `[parallel]` says, or raise ConfigError with the numbers that do not divide."""
        par, train = self.parallel, self.train
        fixed = par.dp_replicate * par.cp * par.tp * par.pp
        shard = par.dp_shard
        if shard == -1:
            if world_size % fixed:
                raise ConfigError(
                    f"parallel.dp_replicate={par.dp_replicate} x cp={par.cp} x tp={par.tp} x pp={par.pp} is {fixed}, "
                    f"which does not divide WORLD_SIZE={world_size}; launch a multiple of {fixed} ranks"
                )
            shard = world_size // fixed
        elif shard * fixed != world_size:
            raise ConfigError(
                f"parallel.dp_shard={shard} x dp_replicate={par.dp_replicate} x cp={par.cp} x tp={par.tp} "
                f"x pp={par.pp} is {shard * fixed}, but WORLD_SIZE is {world_size}; "
                f"set dp_shard=-1 or launch {shard * fixed} ranks"
            )
        check_world(self.deepspeed, world_size)
        dp = shard * par.dp_replicate
        rows = dp * train.micro_batch_size
        if train.global_batch_size % rows:
            raise ConfigError(
                f"train.global_batch_size={train.global_batch_size} is no multiple of {rows} rows a micro-step "
                f"({dp} data-parallel ranks x train.micro_batch_size={train.micro_batch_size}); "
                f"set global_batch_size={rows * max(1, round(train.global_batch_size / rows))} "
                f"or another micro_batch_size"
            )
        if self.metrics.noise_scale and train.global_batch_size == rows:
            raise ConfigError(
                f"metrics.noise_scale=true compares a step's first micro-batch with the whole step, but "
                f"train.global_batch_size={rows} is one micro-batch on {dp} ranks; lower train.micro_batch_size or "
                f"raise global_batch_size"
            )
        return Layout(par.dp_replicate, shard, par.cp, par.tp, train.global_batch_size // rows)


def inactive_keys(cfg: Config) -> list[tuple[str, str, str]]:
    """(table, key, why) of the keys that have no effect in this config."""
    zero = cfg.parallel.engine == "zero"
    sched, opt, ac = cfg.schedule.name, cfg.optimizer.name, cfg.activation_checkpoint.mode
    compiled = cfg.compile.enabled
    rules: list[tuple[bool, str, tuple[str, ...], str]] = [
        (not zero, "parallel", ("zero_stage",), 'beside parallel.engine="fsdp"'),
        (zero, "parallel", ("reshard_after_forward", "prefetch"), 'beside parallel.engine="zero"'),
        (
            zero,
            "parallel",
            ("cpu_offload",),
            'beside parallel.engine="zero", which has deepspeed.zero_optimization.offload_optimizer',
        ),
        (zero, "parallel", ("accumulate",), 'beside parallel.engine="zero", whose stage decides it'),
        (sched != "wsd", "schedule", ("decay_steps",), f'beside schedule.name="{sched}"'),
        (sched == "constant", "schedule", ("min_lr_ratio",), 'beside schedule.name="constant"'),
        (opt == "sgd", "optimizer", ("betas", "eps"), 'beside optimizer.name="sgd"'),
        (opt == "adamw", "optimizer", ("momentum",), 'beside optimizer.name="adamw"'),
        (ac != "full", "activation_checkpoint", ("every",), f'beside activation_checkpoint.mode="{ac}"'),
        (ac != "none", "activation_checkpoint", ("memory_budget",), f'beside activation_checkpoint.mode="{ac}"'),
        (not compiled, "activation_checkpoint", ("memory_budget",), "while compile.enabled=false"),
        (not compiled, "parallel", ("async_tp",), "while compile.enabled=false"),
        (cfg.parallel.tp == 1, "parallel", ("async_tp",), "while parallel.tp=1"),
        (cfg.init.from_ is None, "init", ("load", "data"), "without init.from"),
        (cfg.run.hang_factor == 0, "run", ("hang_seconds",), "while run.hang_factor=0"),
        (
            "wandb" not in cfg.metrics.sinks,
            "metrics",
            ("wandb_mode", "wandb_project", "wandb_entity"),
            'without "wandb" in metrics.sinks',
        ),
        (cfg.eval.every == 0, "eval", ("micro_batch_size",), "while eval.every=0"),
        (cfg.checkpoint.every == 0, "checkpoint", ("keep_every",), "while checkpoint.every=0"),
        (cfg.anomalies.spike_z == 0, "anomalies", ("window",), "while anomalies.spike_z=0"),
        (cfg.anomalies.policy == "raise", "anomalies", ("budget",), 'beside anomalies.policy="raise"'),
    ]
    return [(table, key, why) for off, table, keys, why in rules if off for key in keys]


def _alias(cfg: Config, table: str, key: str) -> str:
    return type(getattr(cfg, table)).model_fields[key].alias or key


def _check_lengths(cfg: Config) -> None:
    model, data, train, sched = cfg.model, cfg.data, cfg.train, cfg.schedule
    if data.seq_len > model.max_seq_len:
        raise ConfigError(
            f"data.seq_len={data.seq_len} is above model.max_seq_len={model.max_seq_len}; "
            f"shorten the rows or raise max_seq_len (and think of rope_theta)"
        )
    if (train.steps is None) == (train.tokens is None):
        both = "both are set" if train.steps is not None else "neither is set"
        raise ConfigError(f"train.steps and train.tokens: {both}; set exactly one of them")
    if sched.name == "wsd" and sched.decay_steps is None:
        raise ConfigError('schedule.name="wsd" needs schedule.decay_steps (how many of the last steps decay)')
    tail = sched.decay_steps or 0
    if sched.warmup_steps + tail > cfg.steps:
        parts = f"schedule.warmup_steps={sched.warmup_steps}" + (f" + decay_steps={tail}" if tail else "")
        raise ConfigError(f"{parts} is more than the run's {cfg.steps} steps; shorten the warm-up or train longer")


def _check_engine(cfg: Config) -> None:
    par = cfg.parallel
    if par.pp > 1:
        raise ConfigError(f"parallel.pp={par.pp} is not available in this version; set parallel.pp=1")
    _check_axes(cfg)
    if par.engine == "fsdp":
        if cfg.deepspeed:
            raise ConfigError('[deepspeed] has no effect beside parallel.engine="fsdp"; remove it')
        return
    check_deepspeed(cfg.deepspeed, cfg.parallel.zero_stage)
    if cfg.precision.reduce != "fp32":
        raise ConfigError(
            f'precision.reduce="{cfg.precision.reduce}" is not available with parallel.engine="zero"; '
            f'set precision.reduce="fp32" or use parallel.engine="fsdp"'
        )
    if cfg.metrics.noise_scale:
        raise ConfigError(
            'metrics.noise_scale=true is not available with parallel.engine="zero", which does not show the gradient '
            'of a single micro-batch; leave it out or use parallel.engine="fsdp"'
        )
    for axis, size in (("tp", par.tp), ("cp", par.cp)):
        if size > 1:
            raise ConfigError(
                f'parallel.{axis}={size} is not available with parallel.engine="zero"; '
                f'set parallel.{axis}=1 or engine="fsdp"'
            )
    if par.zero_stage == 3 and cfg.compile.enabled:
        raise ConfigError(
            "compile.enabled=true cannot take effect with parallel.zero_stage=3, which gathers parameters in hooks "
            'inside each block; set compile.enabled=false, zero_stage=2 or engine="fsdp"'
        )
    if par.dp_replicate > 1 or par.dp_shard != -1:
        raise ConfigError(
            f'parallel.engine="zero" shards over the whole world, so dp_replicate={par.dp_replicate} and '
            f'dp_shard={par.dp_shard} cannot take effect; leave them out, or use engine="fsdp"'
        )


def _check_axes(cfg: Config) -> None:
    """What tensor and context parallel must divide."""
    model, par, length = cfg.model, cfg.parallel, cfg.data.seq_len
    for key, size in (
        ("n_heads", model.n_heads),
        ("n_kv_heads", model.n_kv_heads),
        ("d_ff", model.d_ff),
        ("vocab_size", model.vocab_size),
    ):
        if size % par.tp:
            raise ConfigError(
                f"parallel.tp={par.tp} does not divide model.{key}={size}; set tp to a divisor of n_heads, n_kv_heads, "
                f"d_ff and vocab_size: {_divisors(model)}"
            )
    if length % (2 * par.cp) and par.cp > 1:
        raise ConfigError(
            f"parallel.cp={par.cp} cuts each row into {2 * par.cp} chunks, but data.seq_len={length} is no multiple "
            f"of that; set another cp or seq_len"
        )
    if length // par.cp % par.tp:
        raise ConfigError(
            f"parallel.tp={par.tp} does not divide the {length // par.cp} positions of a row that a rank has "
            f"(data.seq_len={length} / parallel.cp={par.cp}); set another tp, cp or seq_len"
        )


def _divisors(model: ModelConfig) -> str:
    common = math.gcd(model.n_heads, model.n_kv_heads, model.d_ff, model.vocab_size)
    return ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
