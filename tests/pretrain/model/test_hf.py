"""Names, layouts and config fields against transformers itself."""

import json

import pytest
import torch
import transformers

from pretrain.config import ModelConfig
from pretrain.errors import ConfigError
from pretrain.model.hf import end_ids, from_hf, from_hf_config, hf_name, special_ids, to_hf, to_hf_config
from pretrain.model.init import init_weights
from pretrain.model.llama import Llama

SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}


def config(**sizes) -> ModelConfig:
    small = {"vocab_size": 97, "d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 112, "max_seq_len": 64}
    return ModelConfig.model_validate(small | sizes)


def both(cfg: ModelConfig) -> tuple[Llama, transformers.LlamaForCausalLM]:
    """Our model, and transformers' with the same weights carried over by our export."""
    model = Llama(cfg)
    init_weights(model, 3, cfg.n_layers)
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**to_hf_config(cfg)))
    state = {hf_name(name): to_hf(name, p.detach(), cfg) for name, p in model.named_parameters()}
    if cfg.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    reference.load_state_dict(state, strict=True)
    return model.eval(), reference.eval()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_weights_of_transformers_give_its_logits_in_our_model(kv_heads):  # G27
    cfg = config(n_kv_heads=kv_heads, head_dim=8)
    torch.manual_seed(0)
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**to_hf_config(cfg))).eval()
    theirs = reference.state_dict()
    model = Llama(cfg)
    names = [name for name, _ in model.named_parameters()]
    assert {hf_name(name) for name in names} == set(theirs)
    model.load_state_dict({name: from_hf(name, theirs[hf_name(name)], cfg) for name in names}, strict=True)
    tokens = torch.randint(97, (2, 40))
    with torch.no_grad():
        ours = model(tokens, positions=torch.arange(40).expand(2, -1))
        torch.testing.assert_close(ours, reference(tokens).logits, atol=1e-4, rtol=0)


def test_from_hf_undoes_to_hf_and_only_queries_and_keys_are_reordered():
    cfg = config(n_kv_heads=2)
    for name, param in Llama(cfg).named_parameters():
        weight = torch.arange(param.numel(), dtype=torch.float32).view(param.shape)
        there = to_hf(name, weight, cfg)
        assert torch.equal(from_hf(name, there, cfg), weight)
        assert torch.equal(there, weight) == (not name.endswith(("q_proj.weight", "k_proj.weight"))), name
    rows = to_hf("layers.0.attention.k_proj.weight", torch.arange(12.0).unsqueeze(1), config(n_kv_heads=2, head_dim=6))
    assert rows.flatten().tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


@pytest.mark.slow
def test_logits_with_scaled_rope_agree_at_short_and_long_positions():  # G36
    cfg = config(
        n_layers=1,
        d_model=32,
        n_heads=2,
        n_kv_heads=1,
        head_dim=64,
        d_ff=48,
        max_seq_len=16_384,
        rope_theta=500_000.0,
        rope_scaling=SCALED,
        norm_eps=1e-6,
    )
    model, reference = both(cfg)
    tokens = torch.randint(97, (1, 9_001), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(tokens, positions=torch.arange(9_001).unsqueeze(0))[0, [10, 9_000]]
        theirs = reference(tokens).logits[0, [10, 9_000]]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        # What a config without the scaling would give is far from it at the long position.
        lost = cfg.model_copy(update={"rope_scaling": None})
        plain = Llama(lost)
        plain.load_state_dict(model.state_dict())
        wrong = plain(tokens, positions=torch.arange(9_001).unsqueeze(0))[0, 9_000]
    assert (wrong - theirs[1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"n_kv_heads": 2, "head_dim": 32, "norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_embeddings": True},
        {"rope_scaling": SCALED, "max_seq_len": 131_072},
        {"preset": "llama3.2_1b"},
    ],
)
def test_a_config_comes_back_as_it_went_also_through_transformers(sizes, tmp_path):  # G36
    cfg = ModelConfig(preset=sizes["preset"]) if "preset" in sizes else config(**sizes)
    written = to_hf_config(cfg, bos_id=5, eos_ids=(7,))
    (tmp_path / "config.json").write_text(json.dumps(written))
    library = transformers.AutoConfig.from_pretrained(tmp_path)
    expected = cfg.model_copy(update={"preset": None})
    assert from_hf_config(json.loads(json.dumps(written))) == expected
    assert from_hf_config(json.loads(library.to_json_string())) == expected
    assert library.rope_parameters["rope_theta"] == cfg.rope_theta
    assert library.rope_parameters["rope_type"] == ("default" if cfg.rope_scaling is None else "llama3")
    assert (library.rms_norm_eps, library.head_dim, library.bos_token_id, library.eos_token_id) == (
        cfg.norm_eps,
        cfg.head_dim,
        5,
        7,
    )


def test_configs_from_before_transformers_5_are_read():
    then = to_hf_config(config(rope_theta=500_000.0, rope_scaling=SCALED))
    del then["rope_parameters"]
    assert from_hf_config(then) == config(rope_theta=500_000.0, rope_scaling=SCALED)
    then["rope_scaling"]["type"] = then["rope_scaling"].pop("rope_type")
    assert from_hf_config(then).rope_scaling == config(rope_scaling=SCALED).rope_scaling
    assert from_hf_config({"hidden_size": 512, "num_attention_heads": 8}).rope_theta == 10_000.0


def test_absent_fields_mean_what_transformers_means_by_them():
    library = transformers.LlamaConfig()
    model = from_hf_config({"model_type": "llama"})
    assert (model.vocab_size, model.d_model, model.n_layers, model.d_ff) == (
        library.vocab_size,
        library.hidden_size,
        library.num_hidden_layers,
        library.intermediate_size,
    )
    assert (model.n_heads, model.n_kv_heads, model.head_dim, model.max_seq_len, model.norm_eps) == (
        library.num_attention_heads,
        library.num_key_value_heads,
        library.head_dim,
        library.max_position_embeddings,
        library.rms_norm_eps,
    )
    assert model.tie_embeddings == library.tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "model_type='mistral'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "incomplete.*low_freq_factor"),
        ({"num_key_value_heads": 3}, "n_heads=4 is no multiple of n_kv_heads=3"),
        ({"hidden_size": "wide"}, "d_model"),
    ],
)
def test_a_model_that_is_not_ours_is_refused_by_field_and_value(change, message):
    with pytest.raises(ConfigError, match=message):
        from_hf_config(to_hf_config(config()) | change, "X/config.json")


def test_end_ids_in_every_form_in_which_they_are_written():  # G47
    assert end_ids(7) == end_ids([7]) == (7,)
    assert end_ids([5, 7, 9, 7]) == (5, 7, 9)
    assert end_ids(None) == end_ids([]) == ()
    assert special_ids(None, (7,), None) == {"bos_token_id": None, "eos_token_id": 7, "pad_token_id": None}
    assert special_ids(1, (5, 7, 9), 0)["eos_token_id"] == [5, 7, 9]
    assert special_ids(1, (), 0)["eos_token_id"] is None
