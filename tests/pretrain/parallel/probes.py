"""Small measurements on any engine, on ranks that have joined: norms, clipping, accumulation, decay, checkpoints.

Not tests themselves: `test_gradients` and `test_consolidate` judge them on CPU, `tests/gpu` on CUDA.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from small import SEQ_LEN, VOCAB, small_config

from pretrain.config import Config
from pretrain.data.loader import Batch
from pretrain.dist import World
from pretrain.model.loss import LossSums
from pretrain.parallel.build import build_engine
from pretrain.parallel.engine import Engine, State
from pretrain.train.optimizer import build_optimizer, describe_groups

ROWS = 4
ENGINES: dict[str, dict[str, Any]] = {"fsdp": {}} | {
    f"zero{stage}": {"parallel__engine": "zero", "parallel__zero_stage": stage} for stage in (1, 2, 3)
}
SGD = {"optimizer__name": "sgd", "optimizer__lr": 1.0, "optimizer__weight_decay": 0.0}
BF16 = {"precision__compute": "bf16"}


def config(ranks: World, **changes: Any) -> Config:
    rows = {"train__global_batch_size": ROWS, "train__micro_batch_size": ROWS // ranks.size}
    return small_config("unused", "unused", **(rows | changes))


def engine_of(ranks: World, cfg: Config) -> Engine:
    return build_engine(cfg, cfg.layout(ranks.size), ranks, lambda model: build_optimizer(model, cfg.optimizer))


def batch(ranks: World, seed: int = 0) -> tuple[Batch, int]:
    """This rank's share of a global batch of ROWS rows, and the targets of the whole."""
    tokens = torch.randint(0, VOCAB, (ROWS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    labels[0, 5:] = -100
    mine = slice(ranks.rank * ROWS // ranks.size, (ranks.rank + 1) * ROWS // ranks.size)
    place = torch.arange(SEQ_LEN, dtype=torch.int32).expand(ROWS, SEQ_LEN)
    rows = ROWS // ranks.size
    ends = torch.arange(0, (rows + 1) * SEQ_LEN, SEQ_LEN, dtype=torch.int32)
    part = Batch(inputs[mine], labels[mine], place[mine], place[mine] * 0, ends, SEQ_LEN)
    return part.to(ranks.device), int((labels != -100).sum())


def update(ranks: World, engine: Engine, lr: float, *, times: float = 1.0, seed: int = 0) -> float:
    """One optimizer step on one micro-batch a rank, its loss blown up `times`; the norm that the engine reports."""
    part, targets = batch(ranks, seed)
    engine.backward(engine.forward(part).total * times / targets, last=True)
    return float(engine.step(lr))


def loss_of(ranks: World, engine: Engine, seed: int = 0) -> float:
    """Mean loss of a fixed global batch, with gradients on, as in training."""
    part, targets = batch(ranks, seed)
    total = engine.forward(part).cross_entropy.detach().clone()
    torch.distributed.all_reduce(total)
    return float(total) / targets


def whole(state: State) -> State:
    """Copies on the CPU of whole tensors; collective."""
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().cpu().clone() for name, t in state.items()
    }


def weights(engine: Engine) -> State:
    return {name: t for name, t in whole(engine.state()).items() if name.startswith("model.")}


def distance(before: State, after: State) -> float:
    return float(torch.cat([(after[name] - before[name]).double().flatten() for name in before]).norm())


def norm_and_step(ranks: World, **changes: Any) -> tuple[float, State]:
    """The norm of a fixed batch under clipping at 0.5, and the weights after the step."""
    engine = engine_of(ranks, config(ranks, **(SGD | {"train__grad_clip": 0.5} | changes)))
    return update(ranks, engine, 1.0), weights(engine)


def clip_of_a_blown_up_loss(ranks: World, **changes: Any) -> tuple[float, float]:
    """(norm that the engine reports, length of the change) of a loss x 1,000 with clip 1 and plain SGD of rate 1."""
    engine = engine_of(ranks, config(ranks, **(SGD | {"train__grad_clip": 1.0} | changes)))
    before = weights(engine)
    norm = update(ranks, engine, 1.0, times=1000.0)
    return norm, distance(before, weights(engine))


def decay_alone(ranks: World, **changes: Any) -> tuple[dict[str, float], list[str], str]:
    """Factor on each weight by a step of zero gradients, rate 0.1, decay 0.1; the state's names; the log's line."""
    decay = {"optimizer__lr": 0.1, "optimizer__weight_decay": 0.1, "model__tie_embeddings": True}
    cfg = config(ranks, **(decay | changes))
    engine = engine_of(ranks, cfg)
    before = weights(engine)
    update(ranks, engine, 0.1, times=0.0)
    factors = {}
    for name, after in weights(engine).items():
        ratio = after / before[name]
        factors[name] = float(ratio.mean())
        assert torch.allclose(ratio, ratio.mean(), rtol=1e-6), name
    return factors, sorted(engine.state()), describe_groups(engine.model, 0.1)


class OneWeight(nn.Module):
    """A stand-in for the Llama that both engines can shard: two equal weights, one for each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = "sdpa"
        self.layers = nn.ModuleList()
        self.output = nn.Linear(1, 2, bias=False)
        self.seen: set[torch.dtype] = set()

    def tie(self) -> None:
        pass

    def forward(self, tokens: Tensor, **inputs: Tensor | None) -> LossSums:
        ones = torch.ones(1, 1, dtype=self.output.weight.dtype, device=tokens.device)
        out = self.output(ones)
        self.seen.add(out.dtype)
        total = out.float().sum()
        return LossSums(total, total.detach(), torch.zeros_like(total), torch.ones_like(total, dtype=torch.int64))


def accumulate(ranks: World, gradients: list[float], **changes: Any) -> tuple[list[float], set[str]]:
    """What micro-batches with these gradients (of all ranks together) sum to in a bf16 run; the dtypes computed in."""
    cfg = config(
        ranks,
        **(SGD | BF16 | {"train__grad_clip": 0.0, "model__tie_embeddings": True} | changes),
        train__micro_batch_size=1,
        train__global_batch_size=ranks.size * len(gradients),
    )
    make: Any = lambda model: build_optimizer(model, cfg.optimizer)  # noqa: E731
    if cfg.parallel.engine == "zero":
        from pretrain.parallel.zero import ZeroEngine

        engine: Any = ZeroEngine(cfg, OneWeight, make, len(gradients), ranks)  # type: ignore[arg-type]
    else:
        from pretrain.parallel.fsdp import FsdpEngine
        from pretrain.parallel.mesh import build_meshes

        meshes = build_meshes(cfg.layout(ranks.size), ranks.device)
        engine = FsdpEngine(cfg, OneWeight, make, meshes, ranks.device)  # type: ignore[arg-type]
    before = weights(engine)["model.output.weight"]
    part, _ = batch(ranks)
    for index, gradient in enumerate(gradients):
        sums = engine.forward(part)
        engine.backward(sums.total * (gradient / ranks.size), last=index == len(gradients) - 1)
    engine.step(1.0)
    change = before - weights(engine)["model.output.weight"]
    return change.flatten().tolist(), {str(dtype) for dtype in engine.model.seen}
