"""Hugging Face's Llama layout <-> ours: names of weights, the order of rows in q_proj and k_proj, config.json.

Maps names, shapes and fields only; reading and writing of folders is `train.convert`. Our RoPE turns neighbouring
pairs of a head, Hugging Face's turns pairs half a head apart, so the rows of each query and key head are reordered.
A config that asks for something this model does not do is refused, never approximated.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from pretrain.config import ModelConfig, RopeScaling
from pretrain.errors import ConfigError

_OUTSIDE = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.gate_proj": "mlp.gate_proj",
    "feed_forward.up_proj": "mlp.up_proj",
    "feed_forward.down_proj": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """`layers.3.attention.q_proj.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    module = name.removesuffix(".weight")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.weight"
    _, index, inside = module.split(".", 2)
    return f"model.layers.{index}.{_IN_LAYER[inside]}.weight"


def to_hf(name: str, weight: Tensor, model: ModelConfig) -> Tensor:
    """A weight of ours, by our name, with its rows as Hugging Face orders them."""
    heads = _rope_heads(name, model)
    return weight if heads is None else weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def from_hf(name: str, weight: Tensor, model: ModelConfig) -> Tensor:
    """A weight of Hugging Face's, by our name, with its rows as we order them."""
    heads = _rope_heads(name, model)
    return weight if heads is None else weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def to_hf_config(
    model: ModelConfig,
    *,
    vocab_size: int | None = None,
    dtype: str = "float32",
    bos_id: int | None = None,
    eos_ids: Sequence[int] = (),
    pad_id: int | None = None,
) -> dict[str, Any]:
    """config.json of a model. `vocab_size`: rows kept of the embedding and head, by default all.

    RoPE stands twice: under `rope_parameters`, which transformers reads since 5.0, and under the keys before that.
    """
    scaling = None
    if model.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": model.rope_scaling.factor,
            "low_freq_factor": model.rope_scaling.low_freq_factor,
            "high_freq_factor": model.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": model.rope_scaling.original_max_seq_len,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size or model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_theta": model.rope_theta, **(scaling or {"rope_type": "default"})},
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": model.tie_embeddings,
        "dtype": dtype,
        "torch_dtype": dtype,
        **special_ids(bos_id, eos_ids, pad_id),
    }


def special_ids(bos_id: int | None, eos_ids: Sequence[int], pad_id: int | None) -> dict[str, Any]:
    """The fields that config.json and generation_config.json share.

    All are written, since Hugging Face fills in absent ones with Llama 2's. One end id is a number, several a list.
    """
    ends: Any = list(eos_ids) if len(eos_ids) > 1 else next(iter(eos_ids), None)
    return {"bos_token_id": bos_id, "eos_token_id": ends, "pad_token_id": pad_id}


def end_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """End ids as they are written anywhere (7, [7], [5, 7, 9], none), in order, each once."""
    listed = [] if value is None else [value] if isinstance(value, int) else value
    return tuple(dict.fromkeys(int(i) for i in listed))


def from_hf_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """The model of a config.json; absent fields mean what transformers' LlamaConfig means by them."""
    kind = raw.get("model_type", "llama")
    if kind != "llama":
        raise ConfigError(f'{where}: model_type={kind!r} is another architecture; only "llama" can be imported')
    for key, plain in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if raw.get(key, plain) != plain:
            raise ConfigError(f"{where}: {key}={raw[key]!r} is not supported, this model has {key}={plain!r} only")
    heads = raw.get("num_attention_heads", 32)
    theta, scaling = _rope(raw, where)
    sizes = {
        "vocab_size": raw.get("vocab_size", 32_000),
        "d_model": raw.get("hidden_size", 4096),
        "n_layers": raw.get("num_hidden_layers", 32),
        "n_heads": heads,
        "n_kv_heads": heads if raw.get("num_key_value_heads") is None else raw["num_key_value_heads"],
        "d_ff": raw.get("intermediate_size", 11_008),
        "max_seq_len": raw.get("max_position_embeddings", 2048),
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_embeddings": raw.get("tie_word_embeddings", False),
    }
    if raw.get("head_dim") is not None:
        sizes["head_dim"] = raw["head_dim"]
    try:
        return ModelConfig.model_validate(sizes)
    except ValidationError as e:
        reasons = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in e.errors())
        raise ConfigError(f"{where}: no model can have these sizes: {reasons}") from None


def _rope(raw: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` or from the keys before transformers 5."""
    now = raw.get("rope_parameters") or {}
    then = raw.get("rope_scaling") or {}
    rope = {**then, **now}
    theta = now.get("rope_theta", raw.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if kind not in ("default", "llama3") or partial != 1.0:
        raise ConfigError(
            f"{where}: rope_type={kind!r} with partial_rotary_factor={partial} is not supported; "
            f'this model has "default" and "llama3" over whole heads'
        )
    if kind == "default":
        return theta, None
    try:
        return theta, RopeScaling(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_seq_len=rope["original_max_position_embeddings"],
        )
    except (KeyError, ValidationError) as e:
        raise ConfigError(f'{where}: rope_type="llama3" with incomplete or impossible numbers: {e}') from None


def _rope_heads(name: str, model: ModelConfig) -> int | None:
    """Heads in a weight whose rows RoPE turns; None for all others."""
    if name.endswith("attention.q_proj.weight"):
        return model.n_heads
    return model.n_kv_heads if name.endswith("attention.k_proj.weight") else None
