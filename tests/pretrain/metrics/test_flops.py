"""The closed forms against published sizes, worked figures, and a count of real matmuls."""

import subprocess
import sys

import pytest

from pretrain.config import ModelConfig
from pretrain.metrics import flops

PUBLISHED_PARAMETERS = {
    "llama1_7b": 6_738_415_616,
    "llama1_13b": 13_015_864_320,
    "llama1_33b": 32_528_943_616,
    "llama1_65b": 65_285_660_672,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3.1_8b": 8_030_261_248,
    "llama3.1_70b": 70_553_706_496,
    "llama3.1_405b": 405_853_388_800,
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
}


def preset(name: str, **sizes: object) -> ModelConfig:
    return ModelConfig.model_validate({"preset": name, **sizes})


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED_PARAMETERS.items())
def test_parameters_equal_the_published_weights(name, parameters):
    counts = flops.parameter_counts(preset(name))
    assert counts.total == parameters
    assert counts.embedding + counts.head + counts.attention + counts.mlp + counts.norms == parameters
    tied = preset(name).tie_embeddings
    assert counts.matmul == parameters - counts.norms - (0 if tied else counts.embedding)


@pytest.mark.parametrize(
    ("name", "seq_len", "full", "causal"),
    [
        ("llama2_7b", 4096, 46.08, 42.86),
        ("llama3_8b", 8192, 57.91, 51.47),
        ("llama3_70b", 8192, 481.43, 449.22),
        ("llama3.1_405b", 8192, 2625.42, 2523.96),
        ("llama3.2_1b", 8192, 10.64, 9.03),
        ("llama3.2_3b", 8192, 27.73, 23.50),
    ],
)
def test_training_flops_equal_the_published_table_by_both_conventions(name, seq_len, full, causal):
    model = preset(name)
    assert flops.flops_per_token(model, seq_len, causal=False) / 1e9 == pytest.approx(full, abs=0.005)
    assert flops.flops_per_token(model, seq_len, causal=True) / 1e9 == pytest.approx(causal, abs=0.005)


def test_one_block_and_the_tables_of_the_8b_model_have_their_worked_sizes():
    counts = flops.parameter_counts(preset("llama3_8b"))
    assert counts.attention // 32 == 41_943_040
    assert counts.mlp // 32 == 176_160_768
    assert (counts.norms - 4096) // 32 == 8_192
    assert (counts.attention + counts.mlp + counts.norms - 4096) // 32 == 218_112_000
    assert counts.embedding == counts.head == 525_336_576


def test_kv_cache_of_the_8b_model_has_its_worked_sizes():
    model = preset("llama3_8b")
    gib = 2**30
    assert flops.kv_cache_bytes(model, 1) == 128 * 1024 == 32 * 4 * 1024
    assert flops.kv_cache_bytes(model, 8_192) == gib
    assert flops.kv_cache_bytes(model, 32_768) == 4 * gib
    assert flops.kv_cache_bytes(model, 128_000) == 15.625 * gib
    all_heads = preset("llama3_8b", n_kv_heads=32)
    assert flops.kv_cache_bytes(all_heads, 8_192) == 4 * gib


def test_inference_flops_of_the_8b_model_have_their_worked_sizes():
    model = preset("llama3_8b")
    forward = {tokens: flops.block_forward_flops(model, tokens, tokens) for tokens in (8192, 1024, 128)}
    assert forward[8192] == pytest.approx(1.50e14, rel=4e-3)
    assert forward[8192] / 32 == pytest.approx(3.57e12 + 1.10e12, rel=1e-3)
    assert forward[1024] == pytest.approx(1.48e13, rel=4e-3)
    assert forward[128] == pytest.approx(1.80e12, rel=4e-3)
    assert flops.block_forward_flops(model, 1, 8192) == pytest.approx(1.83e10, rel=4e-3)
    assert flops.head_forward_flops(model, 1) == pytest.approx(1.05e9, rel=4e-3)
    assert flops.decode_flops(model, 8192) == flops.block_forward_flops(model, 1, 8192) + flops.head_forward_flops(
        model, 1
    )


def test_causal_attention_is_half_of_full_and_the_rest_is_equal():
    model = preset("llama3_8b")
    full, causal = (flops.flops_per_token(model, 8192, causal=c) for c in (False, True))
    rest = 6 * flops.parameter_counts(model).matmul
    assert full - rest == 2 * (causal - rest)


def test_documents_that_fill_a_row_equal_the_row_and_shorter_ones_cost_their_squares():
    model = preset("llama3.2_1b")
    row = 4096 * flops.flops_per_token(model, 4096, causal=True)
    assert flops.document_flops(model, [4096], causal=True) == row
    halves = flops.document_flops(model, [2048, 2048], causal=True)
    assert halves == 4096 * flops.flops_per_token(model, 2048, causal=True) < row
    assert flops.document_flops(model, [], causal=True) == 0


def test_full_recomputation_adds_one_forward_of_the_blocks_and_selective_adds_nothing():
    model = preset("llama3_8b")
    again = flops.recomputed_flops_per_token(model, 8192, "full", causal=True)
    head = 6 * model.vocab_size * model.d_model
    assert again == (flops.flops_per_token(model, 8192, causal=True) - head) // 3
    every_other = flops.recomputed_flops_per_token(model, 8192, "full", causal=True, every=2)
    assert every_other == again // 2
    assert flops.recomputed_flops_per_token(model, 8192, "none", causal=True) == 0
    assert flops.recomputed_flops_per_token(model, 8192, "selective", causal=True) == 0


def test_flops_equal_what_torch_counts_for_a_small_block():
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model = preset("llama3_8b", vocab_size=100, d_model=64, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=96, head_dim=16)
    tokens = 32
    x = torch.randn(tokens, 64, requires_grad=True)
    weights = {
        name: torch.randn(shape, requires_grad=True)
        for name, shape in {
            "q": (64, 64), "k": (64, 32), "v": (64, 32), "o": (64, 64),
            "gate": (64, 96), "up": (64, 96), "down": (96, 64), "head": (64, 100),
        }.items()
    }  # fmt: skip
    with FlopCounterMode(display=False) as counter:
        q = (x @ weights["q"]).view(tokens, 4, 16).transpose(0, 1)
        k = (x @ weights["k"]).view(tokens, 2, 16).transpose(0, 1).repeat_interleave(2, 0)
        v = (x @ weights["v"]).view(tokens, 2, 16).transpose(0, 1).repeat_interleave(2, 0)
        h = ((q @ k.transpose(1, 2)).softmax(-1) @ v).transpose(0, 1).reshape(tokens, 64) @ weights["o"]
        h = (torch.sigmoid(h @ weights["gate"]) * (h @ weights["up"])) @ weights["down"]
        (h @ weights["head"]).sum().backward()
    assert counter.get_total_flops() == tokens * flops.flops_per_token(model, tokens, causal=False)


def test_neither_flops_nor_hardware_nor_energy_loads_torch():
    code = (
        "import sys, pretrain.metrics.flops, pretrain.metrics.hardware, pretrain.metrics.energy\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
