"""From LADDER.toml to a folder of runs: table.csv, table.json and one config a point, for `pretrain-launch sweep`.

Designs: `grid` (every size at every length) and `isoflop` (several sizes at each budget, tokens by the FLOPs of the
real shape). With `schedule.name = "wsd"` each size has one trunk, which is its longest run, and every shorter length is
a decay from one of the trunk's checkpoints: a table row names the run that must have finished `after` which it starts.
shapes.py has the rules; FLOPs are counted by pretrain.metrics.flops in the convention that [ladder] names.
"""

import difflib
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, ValidationError, model_validator

from pretrain.config import Config
from pretrain.config_file import parse_config
from pretrain.config_tables import Count, Float, Location, ModelConfig, Positive, Table
from pretrain.errors import ConfigError
from pretrain.metrics.flops import flops_per_token, parameter_counts
from pretrain.metrics.hardware import device_named
from pretrain.scaling.shapes import Rules, ShapeRules, count_params, shape


def different(values: tuple[Any, ...]) -> tuple[Any, ...]:
    twice = [value for value in values if values.count(value) > 1]
    if twice:
        raise ValueError(f"{twice[0]:g} stands there twice; two points would be one run")
    return values


Size = Annotated[Float, Field(gt=0)]
Sizes = Annotated[tuple[Size, ...], AfterValidator(different)]
# Keys that the ladder sets itself, by table; a table with None is the ladder's altogether.
_OWN: dict[str, tuple[str, ...] | None] = {
    "run": None,
    "model": None,
    "init": None,
    "train": ("steps", "tokens", "global_batch_size"),
    "optimizer": ("lr",),
    "schedule": ("warmup_steps", "decay_steps"),
}


class Design(Table):
    name: Annotated[str, Field(min_length=1)]  # * begins the name of every run
    dir: Location | None = None  # where the runs write; none: OUT/runs
    design: Literal["grid", "isoflop"] = "grid"
    sizes: Sizes = ()  # parameters, counted as shape.count says
    tokens_per_param: Sizes = ()  # grid: lengths as multiples of the size; isoflop: one, each budget's middle
    tokens: Sizes = ()  # grid: lengths, instead of multiples
    budgets: Sizes = ()  # isoflop: FLOPs of each budget
    sizes_per_budget: Positive = 7
    span: Annotated[Float, Field(gt=1)] = 4.0  # isoflop: largest size of a budget over its middle one
    total_flops: Size | None = None  # instead of sizes or budgets: all runs together
    rungs: Positive = 5  # with total_flops: how many sizes or budgets
    ratio: Annotated[Float, Field(gt=1)] = 2.0  # with total_flops: of a size or budget to the next smaller one
    seeds: Annotated[tuple[Count, ...], Field(min_length=1), AfterValidator(different)] = (1234,)
    flops: Literal["causal", "full"] = "causal"  # convention of attention FLOPs

    @model_validator(mode="after")
    def _complete(self) -> "Design":
        scale, other = ("budgets", "sizes") if self.design == "isoflop" else ("sizes", "budgets")
        if bool(getattr(self, scale)) == (self.total_flops is not None):
            raise ValueError(f'design="{self.design}" needs {scale} or total_flops, and not both')
        if getattr(self, other):
            raise ValueError(f'{other} has no effect with design="{self.design}"; remove it')
        if self.design == "isoflop" and (len(self.tokens_per_param) != 1 or self.tokens):
            raise ValueError("isoflop needs tokens_per_param with one value, such as [20], and no tokens")
        if self.design == "grid" and bool(self.tokens_per_param) == bool(self.tokens):
            raise ValueError("grid needs tokens_per_param or tokens, and not both")
        return self


class Hardware(Table):
    device: str | None = None  # such as h100-sxm
    peak_tflops: Size | None = None  # dense bf16, where the device is unknown
    mfu: Annotated[Float, Field(gt=0, le=1)] = 0.4  # of the convention that [ladder] names

    @model_validator(mode="after")
    def _one_peak(self) -> "Hardware":
        if self.device is not None and self.peak_tflops is not None:
            raise ValueError(
                f"peak_tflops={self.peak_tflops:g} has no effect beside device={self.device!r}; remove one"
            )
        return self

    def flops_per_hour(self) -> float | None:
        if self.device is not None:
            return 3600.0 * self.mfu * device_named(self.device).bf16_flops
        return None if self.peak_tflops is None else 3600.0 * self.mfu * self.peak_tflops * 1e12


class Sweep(Table):
    lr: Annotated[Sizes, Field(min_length=1)] = (1.0,)  # factors on the rule's learning rate
    batch: Annotated[Sizes, Field(min_length=1)] = (1.0,)  # factors on the rule's batch


class LadderConfig(Table):
    ladder: Design  # *
    shape: ShapeRules  # *
    rules: Rules  # *
    hardware: Hardware = Hardware()
    sweep: Sweep = Sweep()
    base: dict[str, dict[str, Any]]  # * tables of a run's config that hold for every point; [base.data] at least

    @model_validator(mode="after")
    def _base(self) -> "LadderConfig":
        for table, keys in _OWN.items():
            given = self.base.get(table, {})
            own = list(given) if keys is None else [key for key in keys if key in given]
            if own:
                raise ValueError(f"base.{table}.{own[0]} is set by the ladder for every point; remove it")
        if "seq_len" not in self.base.get("data", {}):
            raise ValueError("base.data.seq_len is missing; set it and base.data.sources")
        return self

    @property
    def seq_len(self) -> int:
        return int(self.base["data"]["seq_len"])

    @property
    def wsd(self) -> bool:
        return self.base.get("schedule", {}).get("name", "cosine") == "wsd"


class Point(NamedTuple):
    """One run: its row of the table and its config."""

    row: dict[str, Any]
    config: Config


class _Run(NamedTuple):
    model: ModelConfig
    tokens: float
    budget: float | None


def read_ladder(path: str | Path) -> LadderConfig:
    try:
        return LadderConfig.model_validate(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(_explain(one) for one in error.errors())) from None


def points(cfg: LadderConfig, out: Path) -> list[Point]:
    """All runs, trunks before their decays, cheap before dear."""
    found: list[Point] = []
    for seed in cfg.ladder.seeds:
        for lr_factor in cfg.sweep.lr:
            for batch_factor in cfg.sweep.batch:
                make = _Maker(cfg, Path(cfg.ladder.dir or out / "runs"), seed, lr_factor, batch_factor)
                found += make.trunks() if cfg.wsd else [make.alone(run) for run in _runs(cfg)]
    names = [point.row["name"] for point in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(
            f"two points have the name {sorted(twice)[0]!r}: sizes or tokens are nearer together than shapes and steps "
            f"allow; spread them"
        )
    return sorted(found, key=lambda point: (bool(point.row["after"]), point.row["flops"], point.row["name"]))


def _runs(cfg: LadderConfig) -> list[_Run]:
    design = cfg.ladder
    if design.total_flops is None:
        return _at(cfg, design.budgets if design.design == "isoflop" else design.sizes)
    low, high = -10.0, math.log(design.total_flops)  # of the largest size or budget
    ladder = [design.ratio**-k for k in reversed(range(design.rungs))]
    while high - low > 0.01:
        middle = 0.5 * (low + high)
        try:
            total = sum(_flops(cfg, run.model) * run.tokens for run in _at(cfg, [math.exp(middle) * r for r in ladder]))
        except ConfigError:  # too small for any shape
            total = 0.0
        low, high = (middle, high) if total * len(design.seeds) < design.total_flops else (low, middle)
    return _at(cfg, [math.exp(low) * r for r in ladder])


def _at(cfg: LadderConfig, scales: Sequence[float]) -> list[_Run]:
    """Models and lengths at sizes (grid) or budgets (isoflop)."""
    design = cfg.ladder
    if design.design == "grid":
        models = [shape(size, cfg.shape, cfg.seq_len) for size in scales]
        return [
            _Run(model, tokens, None)
            for model in models
            for tokens in design.tokens or [m * count_params(model, cfg.shape.count) for m in design.tokens_per_param]
        ]
    found = []
    for budget in scales:
        middle = math.sqrt(budget / (6.0 * design.tokens_per_param[0]))
        count = design.sizes_per_budget
        steps = [2 * k / (count - 1) - 1 for k in range(count)] if count > 1 else [0.0]
        shapes = [shape(middle * design.span**step, cfg.shape, cfg.seq_len) for step in steps]
        different = {(model.d_model, model.n_layers): model for model in shapes}
        found += [_Run(model, budget / _flops(cfg, model), budget) for model in different.values()]
    return found


def _flops(cfg: LadderConfig, model: ModelConfig) -> int:
    return flops_per_token(model, cfg.seq_len, causal=cfg.ladder.flops == "causal")


class _Maker:
    """Makes points for one seed and one pair of sweep factors."""

    def __init__(self, cfg: LadderConfig, runs_dir: Path, seed: int, lr_factor: float, batch_factor: float) -> None:
        self.cfg, self.runs_dir, self.seed = cfg, runs_dir, seed
        self.lr_factor, self.batch_factor = lr_factor, batch_factor
        parts = [f"s{seed}"] if len(cfg.ladder.seeds) > 1 else []
        parts += [f"lr{lr_factor:g}"] if len(cfg.sweep.lr) > 1 else []
        parts += [f"b{batch_factor:g}"] if len(cfg.sweep.batch) > 1 else []
        self.suffix = "".join("-" + part for part in parts)
        self.rate = cfg.hardware.flops_per_hour()

    def alone(self, run: _Run) -> Point:
        rows, lr = self._batch_and_lr(run.model, run.tokens)
        steps = max(2, round(run.tokens / (rows * self.cfg.seq_len)))
        warmup = math.ceil(self.cfg.rules.warmup_fraction * steps)
        return self._point(run, rows, lr, {"steps": steps}, {"warmup_steps": warmup}, steps)

    def trunks(self) -> list[Point]:
        """For each size the longest run as trunk, and a decay from it for every shorter length."""
        sizes: dict[tuple[int, int], list[_Run]] = {}
        for run in _runs(self.cfg):
            sizes.setdefault((run.model.d_model, run.model.n_layers), []).append(run)
        found = []
        for runs in sizes.values():
            found += self._trunk(sorted(runs, key=lambda run: run.tokens))
        return found

    def _trunk(self, runs: list[_Run]) -> list[Point]:
        longest = runs[-1]
        rows, lr = self._batch_and_lr(longest.model, longest.tokens)  # one batch and rate along the trunk
        decay = self.cfg.rules.decay_fraction
        ends = [max(4, round(run.tokens / (rows * self.cfg.seq_len))) for run in runs]
        # Decays start at checkpoints, which are `every` steps apart: an eighth of the shortest run's stable part.
        every = max(1, round((1 - decay) * ends[0] / 8))
        starts = [max(every, round((1 - decay) * end / every) * every) for end in ends]
        warmup = min(math.ceil(self.cfg.rules.warmup_fraction * ends[-1]), starts[0])
        tail = max(1, ends[-1] - starts[-1])
        schedule = {"warmup_steps": warmup, "decay_steps": tail}
        trunk = self._point(longest, rows, lr, {"steps": starts[-1] + tail}, schedule, starts[-1] + tail, every=every)
        found = [trunk]
        for run, start, end in zip(runs[:-1], starts[:-1], ends[:-1], strict=True):
            tail = max(1, end - start)
            origin = Path(trunk.config.run.dir) / "checkpoints" / f"step-{start:08d}"
            found.append(
                self._point(
                    run,
                    rows,
                    lr,
                    {"steps": tail},
                    {"warmup_steps": 0, "decay_steps": tail},
                    start + tail,
                    after=trunk.row["name"],
                    init={"from": str(origin), "load": "all", "data": "continue"},
                )
            )
        return found

    def _batch_and_lr(self, model: ModelConfig, tokens: float) -> tuple[int, float]:
        rules, params = self.cfg.rules, count_params(model, self.cfg.shape.count)
        micro = self.cfg.base.get("train", {}).get("micro_batch_size", 1)
        multiple = rules.batch_multiple or (micro if isinstance(micro, int) and micro > 0 else 1)
        wanted = self.batch_factor * rules.batch_tokens.value(model.d_model, params, tokens) / self.cfg.seq_len
        rows = multiple * max(1, round(wanted / multiple))
        return rows, self.lr_factor * rules.lr.value(model.d_model, params, tokens)

    def _point(
        self,
        run: _Run,
        rows: int,
        lr: float,
        train: dict[str, Any],
        schedule: dict[str, Any],
        steps: int,
        *,
        after: str = "",
        init: dict[str, Any] | None = None,
        every: int = 0,
    ) -> Point:
        """`steps` counts from the start of the trunk, `train` what this run itself does."""
        cfg, model = self.cfg, run.model
        params, counts = count_params(model, cfg.shape.count), parameter_counts(model)
        tokens = steps * rows * cfg.seq_len
        if not 0.8 < tokens / run.tokens < 1.25:
            raise ConfigError(
                f"{params:.4g} params on {run.tokens:.4g} tokens are {run.tokens / rows / cfg.seq_len:.2g} steps of "
                f"rules.batch_tokens, {rows * cfg.seq_len:,}; lower it, or batch_multiple, or train for longer"
            )
        new_tokens = train["steps"] * rows * cfg.seq_len
        name = f"{cfg.ladder.name}-n{_short(params)}-d{_short(tokens)}{self.suffix}"
        base = {table: dict(keys) for table, keys in cfg.base.items()}
        if every:
            base["checkpoint"] = {**base.get("checkpoint", {}), "every": every, "keep_every": every}
        elif "checkpoint" not in base:
            base["checkpoint"] = {"every": 0}
        if "eval" not in base:
            base["eval"] = {"every": train["steps"]}  # the loss that the law is fitted on: validation at the end
        base["run"] = {"name": name, "dir": str(self.runs_dir / name), "seed": self.seed}
        base["model"] = model.model_dump(exclude_none=True)
        base["train"] = {**base.get("train", {}), "global_batch_size": rows, **train}
        base["optimizer"] = {**base.get("optimizer", {}), "lr": float(f"{lr:.6g}")}
        base["schedule"] = {**base.get("schedule", {}), **schedule}
        if init is not None:
            base["init"] = init
        try:
            config = parse_config(base)
        except ConfigError as error:
            raise ConfigError(f"point {name}: {error}") from None
        flops = float(_flops(cfg, model)) * new_tokens
        row = {
            "name": name,
            "config": f"{name}.toml",
            "after": after,
            "params": params,
            "params_counted": cfg.shape.count,
            "params_total": counts.total,
            "d_model": model.d_model,
            "n_layers": model.n_layers,
            "n_heads": model.n_heads,
            "d_ff": model.d_ff,
            "tokens": tokens,
            "tokens_per_param": round(tokens / params, 2),
            "steps": train["steps"],
            "batch_rows": rows,
            "batch_tokens": rows * cfg.seq_len,
            "lr": config.optimizer.lr,
            "seed": self.seed,
            "budget": run.budget,
            "flops": flops,  # that this run itself computes: a decay without its trunk
            "flops_convention": cfg.ladder.flops,
            "gpu_hours": None if self.rate is None else flops / self.rate,
        }
        return Point(row, config)


def _short(count: float) -> str:
    """A count for names, four digits: 30.5k, 1.234m, 10m."""
    for unit, letter in ((1e12, "t"), (1e9, "b"), (1e6, "m"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.4g}{letter}"
    return f"{count:.4g}"


def _explain(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "ladder"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"{where} is missing; set it"
    if error["type"] == "extra_forbidden":
        table: Any = LadderConfig
        for part in error["loc"][:-1]:
            table = table.model_fields[part].annotation
        near = difflib.get_close_matches(str(error["loc"][-1]), table.model_fields, 1)
        keys = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(table.model_fields)}"
        return f"{where}={error['input']!r}: unknown key; {keys}"
    return f"{where}: {message}" if isinstance(error["input"], dict) else f"{where}={error['input']!r}: {message}"
