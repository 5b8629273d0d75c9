"""Hugging Face's tokenizer.json, and GPT-2's vocab.json + merges.txt, as a `Tokenizer`.

`tokenizer.load_tokenizer` comes here. The `tokenizers` library encodes; `fast_bpe` may put tiktoken in its place.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import DataError
from data_prep.tokenizer import (
    CUT_BEFORE_BLANK,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    Special,
    Tokenizer,
    ids_array,
    sidecars_of,
)

_QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_O200K_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
# Each covers every text without a gap (tiktoken drops what a pattern skips, the library keeps it), and in each a
# blank between letters begins a new piece. A pattern not listed here stays with the library.
KNOWN_PATTERNS = frozenset(
    [
        GPT2_PATTERN,
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        LLAMA3_PATTERN,
        _QWEN2_PATTERN,
        _O200K_WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        _O200K_WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
_KNOWN_BOS = ("<|begin_of_text|>", "<s>", "<|startoftext|>", "[BOS]")
_KNOWN_EOS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "[EOS]")


def load_huggingface(path: Path) -> Tokenizer:
    import tokenizers

    try:
        if path.name in ("vocab.json", "gpt2-vocab.json"):
            merges = path.with_name(path.name.replace("vocab.json", "merges.txt"))
            library = _gpt2(path, merges)
            files = {"vocab.json": path, "merges.txt": merges}
        else:
            library = tokenizers.Tokenizer.from_file(str(path))
            files = {"tokenizer.json": path}
    except Exception as error:  # the Rust side raises plain Exception
        raise DataError(f"{path}: no usable tokenizer: {error}") from error
    library.no_truncation()  # else long documents would end early without a word
    library.no_padding()
    library.encode_special_tokens = True  # special tokens written in a text are text (G07)
    spec = json.loads(library.to_str())
    vocabulary = library.get_vocab(with_added_tokens=True)
    added = {token["content"]: token["id"] for token in spec["added_tokens"] if token["special"]}
    sidecars = {name: _read_json(file) for name, file in sidecars_of(path).items()}
    declared = [int(i) for i in sidecars.get("tokenizer_config.json", {}).get("added_tokens_decoder", {})]

    def encode(text: str) -> np.ndarray:
        return ids_array(library.encode(text, add_special_tokens=False).ids)

    def token_bytes(token_id: int) -> bytes:
        token = library.id_to_token(token_id) or ""
        if all(char in BYTE_OF_CHAR for char in token) and "ByteLevel" in json.dumps(spec["decoder"]):
            return bytes(BYTE_OF_CHAR[char] for char in token)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    return Tokenizer(
        "huggingface",
        files | sidecars_of(path),
        vocab_size=max([*vocabulary.values(), *declared]) + 1,
        special=_special_ids(path, spec, vocabulary, sidecars),
        special_tokens=added,
        encode=encode,
        cut=_cut_of(spec),
        decode_ids=lambda ids: library.decode(ids, skip_special_tokens=False),
        token_bytes=token_bytes,
        engine="tokenizers",
        spec=spec,
    )


def _gpt2(vocab: Path, merges: Path) -> Any:
    import tokenizers

    if not merges.is_file():
        raise DataError(f"{vocab}: {merges.name} is missing beside it")
    library = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    if library.token_to_id("<|endoftext|>") is not None:
        library.add_special_tokens(["<|endoftext|>"])
    return library


def pattern_of(spec: dict[str, Any]) -> str | None:
    """The one regular expression that a byte-level pipeline splits by; None where it is another pipeline."""
    pre = spec["pre_tokenizer"] or {}
    steps = pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return GPT2_PATTERN if last["use_regex"] else None
    first = steps[0]
    if len(steps) > 2 or last["use_regex"] or first["type"] != "Split":
        return None
    if first["behavior"] != "Isolated" or first["invert"] or "Regex" not in first["pattern"]:
        return None
    return first["pattern"]["Regex"]


def _cut_of(spec: dict[str, Any]) -> re.Pattern[str] | None:
    """Where a text may be cut without changing the ids of a tokenizer.json; None: nowhere that we know of."""
    if spec["normalizer"] is not None or pattern_of(spec) not in KNOWN_PATTERNS:
        return None
    spanning = any(CUT_BEFORE_BLANK.search(token["content"]) for token in spec["added_tokens"])
    return None if spanning else CUT_BEFORE_BLANK


def _special_ids(
    path: Path, spec: dict[str, Any], vocabulary: dict[str, int], sidecars: dict[str, dict[str, Any]]
) -> Special:
    """BOS, EOS and padding as the files beside it name them, else by its own template, else by well-known names."""
    named: dict[str, str] = {}
    for sidecar in (sidecars.get("special_tokens_map.json", {}), sidecars.get("tokenizer_config.json", {})):
        for key in ("bos_token", "eos_token", "pad_token"):
            value = sidecar.get(key)
            content = value.get("content") if isinstance(value, dict) else value
            if content is not None and content not in vocabulary:
                raise DataError(f"{path}: its {key} {content!r} is not in the vocabulary")
            if content is not None:
                named[key] = content
    template = _template_ends(spec["post_processor"])
    if not any(key in sidecars.get("tokenizer_config.json", {}) for key in ("bos_token", "eos_token")):
        for key, in_template, known in zip(("bos_token", "eos_token"), template, (_KNOWN_BOS, _KNOWN_EOS), strict=True):
            guess = in_template or next((name for name in known if name in vocabulary), None)
            if guess is not None:
                named.setdefault(key, guess)
    ids = {key: vocabulary[name] for key, name in named.items()}
    eos = [ids["eos_token"]] if "eos_token" in ids else []
    listed = sidecars.get("generation_config.json", {}).get("eos_token_id") or []
    eos += [i for i in ([listed] if isinstance(listed, int) else listed) if i not in eos]
    return Special(ids.get("bos_token"), tuple(eos), ids.get("pad_token"))


def _template_ends(processor: dict[str, Any] | None) -> tuple[str | None, str | None]:
    steps = (processor or {}).get("processors") or [processor or {}]
    for step in steps:
        if step.get("type") == "TemplateProcessing":
            single = step["single"]
            ends = [item.get("SpecialToken", {}).get("id") for item in (single[0], single[-1])]
            return ends[0], ends[1]
    return None, None


def byte_stand_ins() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE: bytes that print stand for themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = byte_stand_ins()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
