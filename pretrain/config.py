"""What a run is: one frozen pydantic model per TOML table, and the checks that cross them.

Every key has a default but those marked *. A key that would have no effect beside the others (an *inactive* key) is
refused when a person sets it. Nothing here loads torch, so a login node answers at once. Reading and writing of files
is `config_file`; the published sizes are `presets`.
"""

import math
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pretrain.errors import ConfigError
from pretrain.presets import PRESETS


def _number(value: Any) -> Any:
    """Numbers may be written 1e-4, 3e3, 16_384, also as text; a flag is no number."""
    if isinstance(value, bool):
        raise ValueError("a number is wanted, not a flag")
    if isinstance(value, str):
        try:
            value = float(value) if any(c in value.lower() for c in ".en") else int(value)
        except ValueError:
            raise ValueError("a number is wanted") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a finite number is wanted")
    return value


def _whole(value: Any) -> Any:
    value = _number(value)
    if isinstance(value, float):
        if value != int(value):
            raise ValueError("a whole number is wanted")
        return int(value)
    return value


def _flag(value: Any) -> Any:
    words = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise ValueError("true or false is wanted")
    return value


Float = Annotated[float, BeforeValidator(_number)]
Int = Annotated[int, BeforeValidator(_whole)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Positive = Annotated[Int, Field(ge=1)]
Count = Annotated[Int, Field(ge=0)]


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=())


class RunConfig(Table):
    name: Annotated[str, Field(min_length=1)]  # *
    dir: Annotated[str, Field(min_length=1)]  # * everything that this run writes
    seed: Count = 1234
    deterministic: Flag = False  # refuse operations whose result may differ from run to run
    timeout_seconds: Annotated[Float, Field(gt=0)] = 600.0  # a collective that takes longer ends the job
    hang_factor: Annotated[Float, Field(ge=0)] = 30.0  # times the median step that make a hang; 0: never
    hang_seconds: Annotated[Float, Field(gt=0)] = 300.0  # a shorter step is never a hang
    gc_every: Count = 100  # optimizer steps between Python garbage collections, on all ranks; 0: Python's own


class RopeScaling(Table):
    """Llama 3.1's stretch of the RoPE wavelengths (arXiv:2407.21783 and its reference code)."""

    factor: Annotated[Float, Field(gt=0)]
    low_freq_factor: Annotated[Float, Field(gt=0)] = 1.0
    high_freq_factor: Annotated[Float, Field(gt=0)] = 4.0
    original_max_seq_len: Positive = 8192  # tokens

    @model_validator(mode="after")
    def _ordered(self) -> "RopeScaling":
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must be above low_freq_factor={self.low_freq_factor}"
            )
        return self


class ModelConfig(Table):
    preset: str | None = None  # * or the sizes themselves; a size beside a preset overrides it
    vocab_size: Positive  # rows of the embedding; at least the tokenizer's size
    d_model: Positive
    n_layers: Positive
    n_heads: Positive  # query heads
    n_kv_heads: Positive
    head_dim: Positive
    d_ff: Positive
    max_seq_len: Positive  # tokens
    norm_eps: Annotated[Float, Field(gt=0)] = 1e-5
    rope_theta: Annotated[Float, Field(gt=0)] = 500_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: Flag = False
    attention: Literal["auto", "sdpa", "varlen"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = dict(values)
        preset = given.get("preset")
        if preset is not None:
            if preset not in PRESETS:
                raise ValueError(f"preset={preset!r} is unknown; the presets are {', '.join(PRESETS)}")
            given = PRESETS[preset] | given
        sizes = ("d_model", "n_heads")
        if "n_kv_heads" not in given and "n_heads" in given:
            given["n_kv_heads"] = given["n_heads"]
        if "head_dim" not in given and all(k in given for k in sizes):
            d_model, n_heads = (_whole(given[k]) for k in sizes)
            if n_heads < 1 or d_model % n_heads:
                raise ValueError(f"d_model={d_model} is no multiple of n_heads={n_heads}; change one or set head_dim")
            given["head_dim"] = d_model // n_heads
        return given

    @model_validator(mode="after")
    def _shapes(self) -> "ModelConfig":
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads={self.n_heads} is no multiple of n_kv_heads={self.n_kv_heads}; "
                f"query heads share key/value heads in equal groups"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE turns pairs, so set an even head_dim")
        return self


class Source(Table):
    path: Annotated[str, Field(min_length=1)]  # a folder made by pretrain-data build
    weight: Annotated[Float, Field(gt=0)] = 1.0  # share of the tokens, relative to the other sources


class Stage(Table):
    tokens: Annotated[Float, Field(ge=0)]  # stream positions (rows x seq_len) after which these weights hold
    weights: list[Annotated[Float, Field(ge=0)]]  # one per source


class DataConfig(Table):
    sources: Annotated[list[Source], Field(min_length=1)]  # *
    stages: list[Stage] = []  # weights that change at given token counts
    seq_len: Positive  # * tokens a row
    packing: Literal["best_fit", "concat"] = "best_fit"
    mask_documents: Flag = True  # documents of a row do not see each other
    skip: list[
        Annotated[list[Count], Field(min_length=2, max_length=2)]
    ] = []  # rows of the stream left out: first, last
    on_bad_shard: Literal["raise", "substitute"] = "raise"
    prefetch: Positive = 2  # optimizer steps read ahead

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        for first, last in self.skip:
            if last < first:
                raise ValueError(f"skip=[{first}, {last}] ends before it begins")
        starts = [stage.tokens for stage in self.stages]
        if sorted(set(starts)) != starts:
            raise ValueError(f"stages start at tokens={starts}; they must increase")
        for stage in self.stages:
            if len(stage.weights) != len(self.sources) or not any(stage.weights):
                raise ValueError(
                    f"stage at tokens={stage.tokens:g} has {len(stage.weights)} weights for "
                    f"{len(self.sources)} sources; give one each, not all zero"
                )
        return self


class TrainConfig(Table):
    steps: Positive | None = None  # * optimizer steps, or:
    tokens: Annotated[Float, Field(gt=0)] | None = None  # row positions to train on; rounded up to whole steps
    global_batch_size: Positive  # * rows per optimizer step, over all ranks and micro-batches
    micro_batch_size: Positive = 1  # rows per data-parallel replica and forward
    grad_clip: Annotated[Float, Field(ge=0)] = 1.0  # largest global gradient norm; 0: no clipping


class OptimizerConfig(Table):
    name: Literal["adamw", "sgd"] = "adamw"
    lr: Annotated[Float, Field(gt=0)]  # * the peak
    betas: Annotated[list[Float], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    eps: Annotated[Float, Field(gt=0)] = 1e-8
    momentum: Annotated[Float, Field(ge=0, lt=1)] = 0.0  # sgd
    weight_decay: Annotated[Float, Field(ge=0)] = 0.1  # matrices and embeddings; never norms

    @model_validator(mode="after")
    def _betas(self) -> "OptimizerConfig":
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas={self.betas} must lie in [0, 1)")
        return self


class ScheduleConfig(Table):
    name: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    warmup_steps: Count = 2000  # optimizer steps; update 1 has peak / warmup_steps
    decay_steps: Positive | None = None  # wsd: the last so many steps fall to the floor
    min_lr_ratio: Annotated[Float, Field(ge=0, le=1)] = 0.1  # the last update's rate / peak


class ParallelConfig(Table):
    engine: Literal["fsdp", "zero"] = "fsdp"
    zero_stage: Literal[1, 2, 3] = 3
    dp_replicate: Positive = 1
    dp_shard: Int = -1  # ranks; -1: what is left of the world
    accumulate: Literal["reduce", "local"] = "reduce"
    reshard_after_forward: Flag = True  # free a block's gathered weights between forward and backward
    tp: Positive = 1
    cp: Positive = 1
    pp: Positive = 1

    @model_validator(mode="after")
    def _shard(self) -> "ParallelConfig":
        if self.dp_shard == 0 or self.dp_shard < -1:
            raise ValueError(f"dp_shard={self.dp_shard} must be -1 (what is left of the world) or at least 1")
        return self


class InitConfig(Table):
    from_: str | None = Field(default=None, alias="from")  # a checkpoint, or a model made by pretrain import
    load: Literal["weights", "all"] = "weights"
    data: Literal["restart", "continue"] = "restart"


class PrecisionConfig(Table):
    compute: Literal["bf16", "fp32"] = "bf16"
    reduce: Literal["fp32", "bf16"] = "fp32"  # dtype in which gradients are summed over ranks


class ActivationCheckpointConfig(Table):
    mode: Literal["none", "full", "selective"] = "selective"
    every: Positive = 1  # full: recompute every k-th block


class CompileConfig(Table):
    enabled: Flag = True  # torch.compile each block


class LossConfig(Table):
    chunks: Positive = 8  # pieces of the micro-batch whose logits exist at once; 1: all
    z_loss: Annotated[Float, Field(ge=0)] = 0.0  # coefficient of the squared log-sum-exp


class CheckpointConfig(Table):
    every: Count = 500  # optimizer steps; 0: only the last
    keep: Positive = 3  # newest whole checkpoints kept
    keep_every: Count = 0  # optimizer steps; multiples of it are kept for ever; 0: none
    async_: Flag = Field(default=True, alias="async")  # write in the background


class EvalConfig(Table):
    every: Count = 500  # optimizer steps; 0: never
    micro_batch_size: Positive | None = None  # rows per replica and forward; none: train's


class MetricsConfig(Table):
    every: Positive = 10  # optimizer steps a window
    sinks: list[Literal["console", "jsonl", "wandb", "tensorboard"]] = ["console", "jsonl"]
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    wandb_project: str = "llama-pretrain"
    wandb_entity: str | None = None
    peak_tflops: Annotated[Float, Field(gt=0)] | None = None  # dense bf16 TFLOP/s of one device, where unknown


class AnomaliesConfig(Table):
    policy: Literal["raise", "skip", "rollback"] = "raise"  # what a non-finite loss or gradient norm does


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
    deepspeed: dict[str, Any] = {}  # passed through to DeepSpeed, checked

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
        dp = shard * par.dp_replicate
        rows = dp * train.micro_batch_size
        if train.global_batch_size % rows:
            raise ConfigError(
                f"train.global_batch_size={train.global_batch_size} is no multiple of {rows} rows a micro-step "
                f"({dp} data-parallel ranks x train.micro_batch_size={train.micro_batch_size}); "
                f"set global_batch_size={rows * max(1, round(train.global_batch_size / rows))} "
                f"or another micro_batch_size"
            )
        return Layout(par.dp_replicate, shard, par.cp, par.tp, train.global_batch_size // rows)


def inactive_keys(cfg: Config) -> list[tuple[str, str, str]]:
    """(table, key, why) of the keys that have no effect in this config."""
    zero = cfg.parallel.engine == "zero"
    sched, opt, ac = cfg.schedule.name, cfg.optimizer.name, cfg.activation_checkpoint.mode
    rules: list[tuple[bool, str, tuple[str, ...], str]] = [
        (not zero, "parallel", ("zero_stage",), 'beside parallel.engine="fsdp"'),
        (zero, "parallel", ("reshard_after_forward",), 'beside parallel.engine="zero"'),
        (zero, "parallel", ("accumulate",), 'beside parallel.engine="zero", whose stage decides it'),
        (sched != "wsd", "schedule", ("decay_steps",), f'beside schedule.name="{sched}"'),
        (sched == "constant", "schedule", ("min_lr_ratio",), 'beside schedule.name="constant"'),
        (opt == "sgd", "optimizer", ("betas", "eps"), 'beside optimizer.name="sgd"'),
        (opt == "adamw", "optimizer", ("momentum",), 'beside optimizer.name="adamw"'),
        (ac != "full", "activation_checkpoint", ("every",), f'beside activation_checkpoint.mode="{ac}"'),
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
    if cfg.anomalies.policy != "raise":
        raise ConfigError(
            f'anomalies.policy="{cfg.anomalies.policy}" is not available in this version; set anomalies.policy="raise"'
        )
    if par.engine == "fsdp":
        if cfg.deepspeed:
            raise ConfigError('[deepspeed] has no effect beside parallel.engine="fsdp"; remove it')
        return
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
