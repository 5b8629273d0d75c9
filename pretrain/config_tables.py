"""The tables of a config, one frozen pydantic model each: keys, units, defaults, and checks within a table.

Every key has a default but those marked *. `config` puts the tables together and checks across them.
"""

import math
import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

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
Seconds = Annotated[Float, Field(gt=0, le=30 * 86_400)]
Location = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""A file or folder; ~ is read as a shell would, which leaves it alone in run.dir=~/x."""


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=())


class RunConfig(Table):
    name: Annotated[str, Field(min_length=1)]  # *
    dir: Location  # * everything that this run writes
    seed: Annotated[Int, Field(ge=0, lt=2**63 - 2**20)] = 1234
    deterministic: Flag = False  # refuse operations whose result may differ from run to run
    timeout_seconds: Seconds = 600.0  # a collective that takes longer ends the job
    hang_factor: Annotated[Float, Field(ge=0)] = 30.0  # times the median step that make a hang; 0: never
    hang_seconds: Seconds = 300.0  # a shorter step is never a hang
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
    path: Location  # a folder made by pretrain-data build
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
    steps: Annotated[Int, Field(ge=1, le=10**12)] | None = None  # * optimizer steps, or:
    tokens: Annotated[Float, Field(gt=0, le=1e18)] | None = None  # row positions to train on; rounded up to whole steps
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
    zero_stage: Annotated[Literal[1, 2, 3], BeforeValidator(_number)] = 3
    dp_replicate: Positive = 1
    dp_shard: Int = -1  # ranks; -1: what is left of the world
    accumulate: Literal["reduce", "local"] = "reduce"
    reshard_after_forward: Flag = True  # free a block's gathered weights between forward and backward
    prefetch: Count = 0  # modules whose weights are gathered ahead; 0: the next one, as fully_shard does by itself
    cpu_offload: Flag = False  # masters, gradients and moments in host memory, where the update runs
    async_tp: Flag = False  # overlap the collectives of tp with its products: compiled, on CUDA
    tp: Positive = 1
    cp: Positive = 1
    pp: Positive = 1

    @model_validator(mode="after")
    def _shard(self) -> "ParallelConfig":
        if self.dp_shard == 0 or self.dp_shard < -1:
            raise ValueError(f"dp_shard={self.dp_shard} must be -1 (what is left of the world) or at least 1")
        return self


class InitConfig(Table):
    from_: Location | None = Field(default=None, alias="from")  # a checkpoint, or a model made by pretrain import
    load: Literal["weights", "all"] = "weights"
    data: Literal["restart", "continue"] = "restart"


class PrecisionConfig(Table):
    compute: Literal["bf16", "fp32"] = "bf16"
    reduce: Literal["fp32", "bf16"] = "fp32"  # dtype in which gradients are summed over ranks


class ActivationCheckpointConfig(Table):
    mode: Literal["none", "full", "selective"] = "selective"
    every: Positive = 1  # full: recompute every k-th block
    memory_budget: Annotated[Float, Field(ge=0, le=1)] = 1.0  # none: share of activations that compiled blocks keep


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
    layers: Flag = False  # gradient norm and activation RMS of each block, at the step that closes a window
    noise_scale: Flag = False  # the gradient noise scale, likewise; takes two micro-batches a step
    sinks: list[Literal["console", "jsonl", "wandb", "tensorboard"]] = ["console", "jsonl"]
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    wandb_project: str = "llama-pretrain"
    wandb_entity: str | None = None
    peak_tflops: Annotated[Float, Field(gt=0)] | None = None  # dense bf16 TFLOP/s of one device, where unknown


class AnomaliesConfig(Table):
    policy: Literal["raise", "skip", "rollback"] = "raise"  # about a non-finite loss or gradient norm, or a spike
    spike_z: Annotated[Float, Field(ge=0)] = 0.0  # robust deviations above the median that make a spike; 0: none is
    window: Annotated[Int, Field(ge=4)] = 128  # steps whose median and deviation a step is held against
    budget: Positive = 10  # steps skipped, or rollbacks, in the whole run; the next one stops it
    verify_every: Count = 0  # optimizer steps between looks for flipped bits in weights and moments; 0: never
    replay_every: Count = 0  # optimizer steps between steps that are computed twice and compared; 0: never
