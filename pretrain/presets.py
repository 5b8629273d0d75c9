"""The published Llama sizes, one line each. A size written beside `model.preset` in a config overrides it.

Sources: the Llama 1 (arXiv:2302.13971), Llama 2 (arXiv:2307.09288) and Llama 3 (arXiv:2407.21783) papers and the
`params.json` and `config.json` files released with the weights. The test suite checks the exact parameter counts.
"""

from typing import Any

_KEYS = (
    "vocab_size",
    "d_model",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "d_ff",
    "rope_theta",
    "max_seq_len",
    "norm_eps",
    "tie_embeddings",
)
_ROPE_8 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
_ROPE_32 = _ROPE_8 | {"factor": 32.0}

# fmt: off
_SIZES: dict[str, tuple[Any, ...]] = {
    #                vocab   d_model layers heads kv   d_ff    theta      max_seq  eps   tied
    "llama1_7b":     (32_000,  4096,  32,  32,  32, 11_008,  10_000.0,   2_048, 1e-6, False),
    "llama1_13b":    (32_000,  5120,  40,  40,  40, 13_824,  10_000.0,   2_048, 1e-6, False),
    "llama1_33b":    (32_000,  6656,  60,  52,  52, 17_920,  10_000.0,   2_048, 1e-6, False),
    "llama1_65b":    (32_000,  8192,  80,  64,  64, 22_016,  10_000.0,   2_048, 1e-5, False),
    "llama2_7b":     (32_000,  4096,  32,  32,  32, 11_008,  10_000.0,   4_096, 1e-5, False),
    "llama2_13b":    (32_000,  5120,  40,  40,  40, 13_824,  10_000.0,   4_096, 1e-5, False),
    "llama2_70b":    (32_000,  8192,  80,  64,   8, 28_672,  10_000.0,   4_096, 1e-5, False),
    "llama3_8b":     (128_256, 4096,  32,  32,   8, 14_336, 500_000.0,   8_192, 1e-5, False),
    "llama3_70b":    (128_256, 8192,  80,  64,   8, 28_672, 500_000.0,   8_192, 1e-5, False),
    "llama3.1_8b":   (128_256, 4096,  32,  32,   8, 14_336, 500_000.0, 131_072, 1e-5, False),
    "llama3.1_70b":  (128_256, 8192,  80,  64,   8, 28_672, 500_000.0, 131_072, 1e-5, False),
    "llama3.1_405b": (128_256, 16384, 126, 128,  8, 53_248, 500_000.0, 131_072, 1e-5, False),
    "llama3.2_1b":   (128_256, 2048,  16,  32,   8,  8_192, 500_000.0, 131_072, 1e-5, True),
    "llama3.2_3b":   (128_256, 3072,  28,  24,   8,  8_192, 500_000.0, 131_072, 1e-5, True),
}
# fmt: on
_ROPE_SCALING = {
    "llama3.1_8b": _ROPE_8,
    "llama3.1_70b": _ROPE_8,
    "llama3.1_405b": _ROPE_8,
    "llama3.2_1b": _ROPE_32,
    "llama3.2_3b": _ROPE_32,
}

PRESETS: dict[str, dict[str, Any]] = {
    name: dict(zip(_KEYS, sizes, strict=True))
    | ({"rope_scaling": _ROPE_SCALING[name]} if name in _ROPE_SCALING else {})
    for name, sizes in _SIZES.items()
}
"""Preset name -> the keys of `[model]` that it stands for."""
