"""Numbers from inside a step, of every engine on two ranks, beside those of a plain loop."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from ranks import run_ranks
from small import SEQ_LEN, small_config

from pretrain.errors import ConfigError
from pretrain.metrics.inside import Inside
from pretrain.metrics.noise_scale import NoiseScale
from tests.pretrain.parallel import probes
from tests.pretrain.parallel.test_agreement import ROWS, batches

MICRO = 2  # micro-batches a step
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "local": {"parallel__accumulate": "local"},
    "replicated": {"parallel__dp_replicate": 2},
    "tensor": {"parallel__tp": 2},
    "context": {"parallel__cp": 2},
    "recomputed": {"activation_checkpoint__mode": "full"},
    "compiled": {"compile__enabled": True},
    **{name: probes.ENGINES[name] for name in ("zero1", "zero2", "zero3")},
}


def line_of(ranks: Any, **changes: Any) -> dict[str, float | None]:
    """What is logged of one step of two micro-batches with uneven targets."""
    from pretrain.data.loader import Batch

    shared = changes.get("parallel__tp", 1) * changes.get("parallel__cp", 1)
    micro = ROWS * shared // ranks.size // MICRO
    cfg = small_config("u", "u", train__micro_batch_size=micro, **changes)
    layout = cfg.layout(ranks.size)
    engine = probes.engine_of(ranks, cfg)
    reduce = torch.distributed.all_reduce if ranks.size > 1 else None
    zero = cfg.parallel.engine == "zero"
    inside = Inside(layers=True, noise_scale=not zero, device=ranks.device, all_reduce=reduce)
    inputs, labels, positions, documents = batches(0, documents=True)
    targets = int((labels != -100).sum())
    with inside.watching(engine.model, now=True):
        for index in range(MICRO):
            start = (index * layout.dp + layout.dp_rank(ranks.rank)) * micro
            mine, ends = slice(start, start + micro), torch.zeros(1, dtype=torch.int32)
            sums = engine.forward(Batch(inputs[mine], labels[mine], positions[mine], documents[mine], ends, SEQ_LEN))
            last = index == MICRO - 1
            looked_at = inside.looks_at(index, last=last)
            engine.backward(sums.total / targets, last=last, reduce=looked_at)
            if looked_at:
                inside.add_gradients(engine.grad_squares(), sums.targets, targets, last=last)
    norm = float(engine.step(0.1))
    line = inside.close()
    assert inside.close() == {}, "once a window"
    parts = [value for name, value in line.items() if name.startswith("grad_norm/")]
    assert norm == pytest.approx(sum(part**2 for part in parts if part) ** 0.5, rel=1e-5)
    return line


def measure(layouts: dict[str, dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    from pretrain.dist import world

    with world(240) as ranks:
        return {name: line_of(ranks, **changes) for name, changes in layouts.items()}


def reference() -> dict[str, float | None]:
    """The same by a plain loop over the whole batch in float64, and over its first half alone."""
    from pretrain.model.init import init_weights
    from pretrain.model.llama import Llama

    cfg = small_config("u", "u")
    model = Llama(cfg.model, activations=torch.float64)
    init_weights(model, cfg.run.seed, cfg.model.n_layers)
    model.double()
    sizes: list[torch.Tensor] = []
    hooks = [block.register_forward_hook(lambda m, args, out: sizes.append(out.detach())) for block in model.layers]
    squares, counts, line = [], [], {}
    for rows in (ROWS // MICRO, ROWS):
        inputs, labels, positions, documents = (x[:rows] for x in batches(0, documents=True))
        sizes.clear()
        model.zero_grad()
        sums = model(inputs, positions=positions, documents=documents, labels=labels)
        (sums.total / sums.targets).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        squares.append(float(sum(grad.square().sum() for grad in grads.values())))
        counts.append(int(sums.targets))
    for hook in hooks:
        hook.remove()
    for index, out in enumerate(sizes):
        line[f"activation_rms/layers.{index}"] = float(out.square().mean().sqrt())
    key = lambda name: ".".join(name.split(".")[: 2 if name.startswith("layers") else 1])  # noqa: E731
    for place, names in itertools.groupby(grads, key):
        line[f"grad_norm/{place}"] = float(sum(grads[name].square().sum() for name in names)) ** 0.5
    return line | {"grad_noise_scale": NoiseScale().update(squares[0], counts[0], squares[1], counts[1])}


@pytest.mark.slow
def test_every_engine_sees_what_a_plain_loop_sees_inside_a_step() -> None:
    expected = reference()
    assert {name for name in expected if "/" in name} == {
        *("grad_norm/tok_embeddings", "grad_norm/layers.0", "grad_norm/layers.1", "grad_norm/norm"),
        *("grad_norm/output", "activation_rms/layers.0", "activation_rms/layers.1"),
    }
    assert expected["grad_noise_scale"] is not None
    alone = run_ranks(measure, 1, {"fsdp": {}}, timeout=300)
    for found in [*alone, *run_ranks(measure, 2, LAYOUTS, timeout=600)]:
        for name, line in found.items():
            wanted = {key: value for key, value in expected.items() if key != "grad_noise_scale" or "zero" not in name}
            assert line == pytest.approx(wanted, rel=1e-4), name


def test_off_it_looks_at_nothing() -> None:
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    for inside, now in ((Inside(), True), (Inside(layers=True, noise_scale=True), False)):
        with inside.watching(model, now=now):
            assert not model["layers"][0]._forward_hooks  # type: ignore[index]
            assert not inside.looks_at(0, last=True)
        assert inside.close() == {}


def test_a_noise_scale_needs_two_micro_batches_and_an_engine_that_shows_the_first() -> None:
    one = {"train__global_batch_size": 4, "train__micro_batch_size": 2, "metrics__noise_scale": True}
    small_config("u", "u", **one).layout(1)
    with pytest.raises(ConfigError, match="global_batch_size=4 is one micro-batch on 2 ranks"):
        small_config("u", "u", **one).layout(2)
    with pytest.raises(ConfigError, match=r'metrics.noise_scale=true is not available with parallel.engine="zero"'):
        small_config("u", "u", metrics__noise_scale=True, **probes.ENGINES["zero2"])
