"""The whole model against transformers' Llama, its parts against closed forms, documents against each other."""

import pytest
import torch
from torch import nn

from pretrain.config import ModelConfig
from pretrain.model.hf import hf_name, to_hf, to_hf_config
from pretrain.model.init import init_weights
from pretrain.model.llama import Block, Llama, RMSNorm
from pretrain.parallel.compile import compile_blocks

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


def config(**sizes) -> ModelConfig:
    small = {"vocab_size": 97, "d_model": 64, "n_layers": 3, "n_heads": 4, "d_ff": 112, "max_seq_len": 64}
    return ModelConfig.model_validate(small | sizes)


def build(cfg: ModelConfig, seed: int = 1, **kwargs) -> Llama:
    model = Llama(cfg, **kwargs)
    init_weights(model, seed, cfg.n_layers)
    return model


def row_positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.size(1), dtype=torch.int32).expand_as(tokens)


def tokens_like(cfg: ModelConfig, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(cfg.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_every_preset_has_exactly_the_published_parameters():
    for name, published in PUBLISHED_PARAMETERS.items():
        with torch.device("meta"):
            model = Llama(ModelConfig(preset=name))
        assert sum(p.numel() for p in model.parameters()) == published, name


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_equal_transformers_on_each_attention_path(kv_heads):  # G27
    import transformers

    cfg = config(n_kv_heads=kv_heads)
    model = build(cfg)
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**to_hf_config(cfg)))
    state = {hf_name(name): to_hf(name, p.detach(), cfg) for name, p in model.named_parameters()}
    reference.load_state_dict(state, strict=True)
    tokens = tokens_like(cfg, 2, 48)
    with torch.no_grad():
        expected = reference(tokens).logits
        causal = model(tokens, positions=row_positions(tokens))
        masked = model(tokens, positions=row_positions(tokens), documents=torch.zeros_like(tokens))
    torch.testing.assert_close(causal, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(masked, expected, atol=1e-4, rtol=0)


def test_a_document_sees_nothing_of_its_neighbour_in_the_row():  # G12
    cfg = config(n_kv_heads=2)
    model = build(cfg).eval()
    first, second = 19, 30
    tokens = tokens_like(cfg, 1, first + second)
    positions = torch.cat([torch.arange(first), torch.arange(second)]).unsqueeze(0)
    documents = torch.tensor([[0] * first + [1] * second])
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % cfg.vocab_size
    with torch.no_grad():
        before = model(tokens, positions=positions, documents=documents)
        after = model(changed, positions=positions, documents=documents)
        alone = model(tokens[:, first:], positions=positions[:, first:], documents=documents[:, first:])
        seen_before = model(tokens, positions=positions)
        seen_after = model(changed, positions=positions)
    assert torch.equal(before[:, first:], after[:, first:])
    assert not torch.equal(before[:, 7], after[:, 7])
    # Another number of rows takes other paths through the matrix products, so here it is equal to rounding.
    torch.testing.assert_close(before[:, first:], alone, atol=2e-6, rtol=0)
    assert not torch.equal(seen_before[:, first:], seen_after[:, first:])


def test_padding_changes_no_document_and_is_finite():
    cfg = config()
    model = build(cfg)
    tokens = tokens_like(cfg, 1, 20)
    documents = torch.tensor([[0] * 12 + [-1] * 8])
    positions = torch.cat([torch.arange(12), torch.zeros(8, dtype=torch.int64)]).unsqueeze(0)
    other = tokens.clone()
    other[:, 12:] = 3
    one, two = (model(t, positions=positions, documents=documents) for t in (tokens, other))
    assert torch.equal(one[:, :12], two[:, :12])
    assert one.isfinite().all()


def test_tied_head_is_the_embedding():  # G34
    tied, untied = build(config(tie_embeddings=True)), build(config())
    assert tied.output.weight is tied.tok_embeddings.weight
    assert "output.weight" not in dict(tied.named_parameters())
    counts = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert counts[1] - counts[0] == 97 * 64
    tokens = tokens_like(tied.config, 1, 9)
    logits = tied(tokens, positions=row_positions(tokens))
    logits.sum().backward()
    hidden = tied.hidden(tokens, [tied.attention_inputs(row_positions(tokens), None, None)] * 3)
    torch.testing.assert_close(logits, hidden @ tied.tok_embeddings.weight.t())


def test_rms_norm_computes_in_fp32_with_eps_inside_the_root():
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)) * 1e-3
    norm = RMSNorm(256, eps=1e-5)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x), exact.float())
    # In bf16 the sum of 4,096 squares would lose its small terms; only the two last roundings may show.
    wide = torch.randn(3, 4096, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = wide.double() / (wide.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    out = RMSNorm(4096, eps=1e-5).bfloat16()(wide)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.float().bfloat16())


def test_the_residual_stream_of_a_bf16_model_keeps_fp32_rope_tables():
    cfg = config(n_kv_heads=2)
    model = build(cfg, activations=torch.bfloat16).bfloat16()
    seen = []
    model.layers[1].register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, args[1].rope.cos.dtype)))
    tokens = tokens_like(cfg, 1, 9)
    assert model(tokens, positions=row_positions(tokens)).dtype == torch.bfloat16
    assert seen == [(torch.bfloat16, torch.float32)]


def test_a_model_in_double_precision_stays_there_and_its_gradients_are_right():
    cfg = config(vocab_size=11, d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=12)
    model = build(cfg, activations=torch.float64, loss_chunks=2, z_loss=1e-2).double()
    tokens = tokens_like(cfg, 2, 5)
    labels = tokens_like(cfg, 2, 5, seed=1)
    labels[0, 3] = -100
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, -1]])
    assert model(tokens, positions=row_positions(tokens)).dtype == torch.float64

    def loss() -> torch.Tensor:
        return model(tokens, positions=row_positions(tokens), documents=documents, labels=labels).total

    loss().backward()
    assert loss().dtype == torch.float64
    generator = torch.Generator().manual_seed(3)
    for name, param in model.named_parameters():
        direction = torch.randn(param.shape, dtype=torch.float64, generator=generator)
        moved = []
        for step in (1e-5, -2e-5, 1e-5):  # there, to the other side, and back
            with torch.no_grad():
                param += step * direction
                moved.append(loss())
        slope = (moved[0] - moved[1]) / 2e-5
        torch.testing.assert_close((param.grad * direction).sum(), slope, rtol=1e-6, atol=1e-8, msg=name)


def test_fp32_logits_equal_double_precision_to_rounding():
    cfg = config(n_kv_heads=1)
    single, double = build(cfg), build(cfg, activations=torch.float64).double()
    tokens = tokens_like(cfg, 1, 60)
    with torch.no_grad():
        pair = [model(tokens, positions=row_positions(tokens)) for model in (single, double)]
    torch.testing.assert_close(pair[0].double(), pair[1], atol=2e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile's own: it looks
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # at its inputs' .grad, and imports old modules
def test_a_compiled_block_equals_the_eager_one_forward_and_backward():
    cfg = config(n_layers=1, n_kv_heads=2)
    tokens, labels = tokens_like(cfg, 2, 32), tokens_like(cfg, 2, 32, seed=1)
    documents = (torch.arange(32) // 12).expand(2, -1)
    results = []
    for compiled in (False, True):
        model = build(cfg)
        if compiled:
            compile_blocks(model)
        sums = model(tokens, positions=row_positions(tokens), documents=documents, labels=labels)
        sums.total.backward()
        results.append([sums.total.detach(), *(p.grad for p in model.parameters())])
        assert list(model.state_dict()) == list(build(cfg).state_dict())
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


def test_recompute_is_left_out_where_no_gradient_is_wanted():
    cfg = config(n_layers=1)
    model = build(cfg)
    calls = []

    def recompute(body, *args):
        calls.append(1)
        return body(*args)

    block = model.layers[0]
    assert isinstance(block, Block)
    block.recompute = recompute
    tokens = tokens_like(cfg, 1, 4)
    with torch.no_grad():
        model(tokens, positions=row_positions(tokens))
    assert calls == []
    model(tokens, positions=row_positions(tokens))
    assert calls == [1]
