"""RoPE: real against complex arithmetic, Llama 3.1's scaling and precision."""

import math

import pytest
import torch

from pretrain.config import ModelConfig
from pretrain.model.rope import inverse_frequencies, rope_table, rotate

CPU = torch.device("cpu")
SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}


def config(**sizes) -> ModelConfig:
    small = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 48, "max_seq_len": 131_072}
    return ModelConfig.model_validate(small | sizes)


@pytest.mark.parametrize("compiling", [False, True])
def test_the_eager_and_the_compiled_form_are_multiplication_by_complex_numbers(monkeypatch, compiling):
    cfg = config(head_dim=16, rope_theta=10_000.0)
    positions = torch.tensor([[0, 1, 2, 700], [5, 0, 0, 131_071]])
    x = torch.randn(2, 4, 3, 16, generator=torch.Generator().manual_seed(0))
    angles = positions.unsqueeze(-1) * inverse_frequencies(cfg, CPU, torch.float32)
    turns = torch.polar(torch.ones_like(angles), angles)
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns.unsqueeze(2)).flatten(-2)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    out = rotate(x, rope_table(cfg, positions))
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(out[0, 0], x[0, 0])
    half = rotate(x.bfloat16(), rope_table(cfg, positions))
    torch.testing.assert_close(half, rotate(x.bfloat16().float(), rope_table(cfg, positions)).bfloat16())


def test_scores_depend_on_the_distance_alone():
    cfg = config(head_dim=16)
    q, k = torch.randn(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = []
    for at in (0, 3, 1000):
        table = rope_table(cfg, torch.tensor([[at, at + 17]]), torch.float64)
        turned = rotate(torch.stack([k, q]).view(1, 2, 1, 16), table)
        scores.append(float((turned[0, 0] * turned[0, 1]).sum()))
    assert scores == pytest.approx([scores[0]] * 3, rel=1e-10)
    assert scores[0] != pytest.approx(float((q * k).sum()))


def test_llama_31_scaling_keeps_fast_turns_slows_slow_ones_and_blends_between():
    plain = inverse_frequencies(config(head_dim=128), CPU, torch.float64)
    scaled = inverse_frequencies(config(head_dim=128, rope_scaling=SCALED), CPU, torch.float64)
    wavelengths = (2 * math.pi / plain).tolist()
    for slow, fast, wavelength in zip(scaled.tolist(), plain.tolist(), wavelengths, strict=True):
        if wavelength < 8192 / 4:
            expected = fast
        elif wavelength > 8192:
            expected = fast / 8
        else:
            blend = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - blend) * fast / 8 + blend * fast
        assert slow == pytest.approx(expected, rel=1e-12)
    assert any(8192 / 4 < w < 8192 for w in wavelengths)


@pytest.mark.parametrize("scaling", [None, SCALED, SCALED | {"factor": 32.0}])
def test_frequencies_equal_the_ones_that_transformers_computes_bit_for_bit(scaling):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from pretrain.model.hf import to_hf_config

    cfg = config(head_dim=128, rope_scaling=scaling)
    reference = LlamaRotaryEmbedding(_reference_config(to_hf_config(cfg)))
    assert torch.equal(inverse_frequencies(cfg, CPU, torch.float32), reference.inv_freq)


def _reference_config(values):
    import transformers

    return transformers.LlamaConfig(**values)


def test_bf16_heads_are_turned_in_fp32():
    cfg = config(head_dim=64)
    x = torch.randn(1, 1, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    positions = torch.tensor([[100_003]])  # no bf16 number: it would turn by the angle of 100,352
    out = rotate(x, rope_table(cfg, positions))
    assert out.dtype == torch.bfloat16
    exact = rotate(x.double(), rope_table(cfg, positions, torch.float64))
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=1e-2)
