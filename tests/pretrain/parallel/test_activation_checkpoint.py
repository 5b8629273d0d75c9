"""What recomputation keeps and what it computes again, counted on one process."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from small import SEQ_LEN, VOCAB, small_config

from pretrain.model.init import init_weights
from pretrain.parallel.build import build_model


class Count(TorchDispatchMode):
    """How often the products are called."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attentions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.products += name.startswith("aten.mm.")
        self.attentions += "attention" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


def one_step(mode: str, **more: Any) -> tuple[Count, int, float, list[torch.Tensor]]:
    """(calls, bytes kept for backward by the blocks, loss, gradients) of a small model under `mode`."""
    cfg = small_config("unused", "unused", activation_checkpoint__mode=mode, loss__chunks=1, **more)
    model = build_model(cfg, torch.device("cpu"))
    init_weights(model, 7, cfg.model.n_layers)
    tokens = torch.randint(0, VOCAB, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    place = torch.arange(SEQ_LEN, dtype=torch.int32).expand(2, SEQ_LEN)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in parameters:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    count = Count()
    with count, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        sums = model(tokens[:, :-1], positions=place, documents=place // 5, labels=tokens[:, 1:])
    with count:
        sums.total.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return count, sum(kept.values()), float(sums.cross_entropy), grads


def test_recompute_changes_no_gradient_and_selective_repeats_no_product() -> None:
    plain, kept_plain, loss, grads = one_step("none")
    selective, _, _, _ = selected = one_step("selective")
    full, kept_full, _, _ = fully = one_step("full")
    half, kept_half, _, _ = halfway = one_step("full", activation_checkpoint__every=2)
    for other in (selected, fully, halfway):
        assert other[2] == loss
        assert all(torch.equal(a, b) for a, b in zip(grads, other[3], strict=True))
    assert plain.products > 0
    assert plain.attentions == 2
    assert (selective.products, selective.attentions) == (plain.products, plain.attentions)
    # Again: q, k, v, o, gate and up; the last product of a block is needed by nothing in its backward.
    assert full.products == plain.products + 2 * 6
    assert full.attentions == 4
    assert half.products == plain.products + 6
    assert kept_full < kept_half < kept_plain


@pytest.mark.parametrize("tied", [False, True])
def test_recompute_leaves_names_alone(tied: bool) -> None:
    """G31: no wrapper in the state's names, with recompute and compile alike."""
    names = [
        list(build_model(small_config("unused", "unused", **setting), torch.device("cpu")).state_dict())
        for setting in (
            {"model__tie_embeddings": tied},
            {"model__tie_embeddings": tied, "activation_checkpoint__mode": "selective", "compile__enabled": True},
            {"model__tie_embeddings": tied, "activation_checkpoint__mode": "full"},
        )
    ]
    assert names[0] == names[1] == names[2]
    assert not any("." * 2 in name or "_orig_mod" in name or "_checkpoint" in name for name in names[0])
