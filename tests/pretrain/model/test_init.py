"""Initial weights: numbers that depend on seed, name and index alone, of the stated size, on any sharding."""

import math

import pytest
import torch

from pretrain.config import ModelConfig
from pretrain.model.init import fill_parameter, init_std, init_weights
from pretrain.model.llama import Llama


def config(**sizes) -> ModelConfig:
    small = {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 48, "max_seq_len": 64}
    return ModelConfig.model_validate(small | sizes)


def drawn(name: str, shape: tuple[int, int], seed: int = 1, n_layers: int = 8) -> torch.Tensor:
    out = torch.empty(shape)
    fill_parameter(name, out, out.shape, seed, n_layers)
    return out


@pytest.mark.parametrize(
    ("name", "shape", "std"),
    [
        ("tok_embeddings.weight", (3000, 256), 256**-0.5),
        ("layers.1.attention.q_proj.weight", (1024, 512), 512**-0.5),
        ("layers.1.attention.o_proj.weight", (512, 1024), 1024**-0.5 / 4),
        ("layers.7.feed_forward.down_proj.weight", (256, 2000), 2000**-0.5 / 4),
        ("output.weight", (3000, 256), 256**-0.5),
    ],
)
def test_each_matrix_is_a_truncated_normal_of_the_stated_deviation(name, shape, std):
    weight = drawn(name, shape).double()
    assert init_std(name, torch.Size(shape), 8) == pytest.approx(std)
    assert weight.abs().max() <= 3 * std * 1.0001
    assert weight.abs().max() > 2.9 * std
    # A normal cut at 3 deviations: variance 1 - 2 * 3 * density(3) / probability within.
    cut = 1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2))
    error = 4 / math.sqrt(weight.numel())
    assert weight.mean().abs() < error * std
    assert weight.std() == pytest.approx(std * math.sqrt(cut), rel=error)
    within = (weight.abs() < std).double().mean()
    assert within == pytest.approx(math.erf(1 / math.sqrt(2)) / math.erf(3 / math.sqrt(2)), abs=error)


def test_norm_gains_start_at_one():
    model = Llama(config())
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
    init_weights(model, 1, 2)
    norms = [p for p in model.parameters() if p.dim() == 1]
    assert len(norms) == 2 * 2 + 1
    assert all(torch.equal(p, torch.ones_like(p)) for p in norms)
    assert all(p.isfinite().all() for p in model.parameters())


def test_numbers_depend_on_seed_and_name_and_on_nothing_else():
    one = drawn("layers.0.attention.q_proj.weight", (64, 64))
    torch.manual_seed(99)
    assert torch.equal(one, drawn("layers.0.attention.q_proj.weight", (64, 64)))
    for other in (
        drawn("layers.0.attention.q_proj.weight", (64, 64), seed=2),
        drawn("layers.1.attention.q_proj.weight", (64, 64)),
        drawn("layers.0.attention.k_proj.weight", (64, 64)),
        one.flip(0),
        one.t(),
    ):
        assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 4 / 64
        assert not torch.equal(one, other)
    neighbours = torch.stack([one.flatten()[:-1], one.flatten()[1:]])
    assert abs(torch.corrcoef(neighbours)[0, 1]) < 4 / 64


def test_a_matrix_drawn_in_pieces_equals_one_drawn_at_once(monkeypatch):
    from pretrain.model import init

    whole = drawn("output.weight", (100, 33))
    monkeypatch.setattr(init, "_PIECE", 70)
    assert torch.equal(whole, drawn("output.weight", (100, 33)))
