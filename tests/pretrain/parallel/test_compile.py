"""Compiled blocks: one compilation for all of them, none later, and a budget for what they keep."""

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from small import SEQ_LEN, VOCAB, small_config

from pretrain.model.init import init_weights
from pretrain.model.llama import Llama
from pretrain.parallel.build import build_model

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own, which it filters but which are errors here


def compiled_model(monkeypatch: pytest.MonkeyPatch, backend: Any, **changes: Any) -> Llama:
    """A model whose blocks compile with `backend`, which takes less time than the default's C++."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    cfg = small_config("u", "u", compile__enabled=True, model__n_layers=3, **changes)
    model = build_model(cfg, torch.device("cpu"))
    init_weights(model, 7, 3)
    return model


def step(model: Llama, seed: int) -> list[torch.Tensor]:
    """Gradients on rows whose documents end elsewhere with every seed, the last of them padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (2, SEQ_LEN + 1), generator=generator)
    ends = torch.rand(2, SEQ_LEN, generator=generator) < 0.1 * (1 + seed)
    documents = ends.cumsum(1, dtype=torch.int32)
    documents[1, SEQ_LEN - seed :] = -1
    positions = torch.arange(SEQ_LEN, dtype=torch.int32).expand(2, SEQ_LEN) - seed % 2
    labels = tokens[:, 1:].masked_fill(documents < 0, -100)
    model.zero_grad()
    model(tokens[:, :-1], positions=positions.abs(), documents=documents, labels=labels).total.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_one_compilation_serves_all_blocks_and_all_steps(monkeypatch: pytest.MonkeyPatch, recompute: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    model = compiled_model(monkeypatch, counter, activation_checkpoint__mode=recompute)
    for seed in range(5):
        step(model, seed)
    with torch.no_grad():  # validation has a graph of its own, without a backward
        for seed in range(2):
            tokens = torch.full((2, SEQ_LEN), seed)
            model(tokens, positions=tokens.int(), documents=tokens.int(), labels=tokens)
    assert counter.frame_count == 2


def test_a_memory_budget_keeps_less_and_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, grads = {}, {}
    for budget in (1.0, 0.5, 0.0):
        model = compiled_model(monkeypatch, "aot_eager_decomp_partition", activation_checkpoint__memory_budget=budget)
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes: dict[int, int] = {}

        def keep(t: torch.Tensor, parameters: set[int] = parameters, sizes: dict[int, int] = sizes) -> torch.Tensor:
            if t.untyped_storage().data_ptr() not in parameters:
                sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            grads[budget] = step(model, 0)
        kept[budget] = sum(sizes.values())
        monkeypatch.undo()
    assert kept[0.0] < kept[0.5] < kept[1.0]
    for other in (0.5, 0.0):
        for one, two in zip(grads[1.0], grads[other], strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
