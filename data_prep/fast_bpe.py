"""tiktoken as the engine of a byte-level BPE tokenizer.json, where it gives exactly the same ids.

`accelerate` is the whole interface. tiktoken merges by rank, knows one regular expression and no normaliser; a
pipeline that asks for more keeps the `tokenizers` library. What can be expressed is still compared, id by id, on a
fixed nasty sample, on every token of the vocabulary and on the caller's own texts before it is used.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from data_prep import tokenizer as tk
from data_prep.tokenizer_hf import BYTE_OF_CHAR, KNOWN_PATTERNS, pattern_of

Encode = Callable[[str], np.ndarray]


def accelerate(tokenizer: tk.Tokenizer, texts: Iterable[str] = ()) -> str:
    """Switches a Hugging Face tokenizer to tiktoken if that is exact. Returns a line for the log: which, and why."""
    if tokenizer.spec is None:
        return f"encoding with {tokenizer.engine}"
    reason = why_not(tokenizer.spec)
    if reason is None:
        fast = _use_tiktoken(tokenizer)
        reason = _difference(tokenizer, fast, itertools.chain(nasty_sample(), _vocabulary_texts(tokenizer), texts))
        if reason is None:
            tokenizer.encode_ordinary, tokenizer.engine = fast, "tiktoken"
            return "encoding with tiktoken: same ids as `tokenizers` on all samples"
    return f"encoding with `tokenizers` (slower than tiktoken), because {reason}"


def engines(tokenizer: tk.Tokenizer) -> dict[str, Encode]:
    """The encoding functions that can be had, by engine and unchecked: which of them is right `accelerate` says."""
    found = {tokenizer.engine: tokenizer.encode_ordinary}
    if tokenizer.spec is not None and why_not(tokenizer.spec) is None:
        found["tiktoken"] = _use_tiktoken(tokenizer)
    return found


def _use_tiktoken(tokenizer: tk.Tokenizer) -> Encode:
    assert tokenizer.spec is not None
    encoding, id_of_rank, matched = encoding_of(tokenizer.spec)
    slow = tokenizer.encode_ordinary
    long_blank = re.compile(rf"\s{{{tk.LONGEST_BLANK}}}")

    def encode(text: str) -> np.ndarray:
        if len(text) > tk.LONGEST_BLANK and long_blank.search(text):
            return slow(text)  # tiktoken's regex engine overflows its stack on a million blanks
        found = encoding.encode_to_numpy(text, allowed_special=matched, disallowed_special=())
        return found if id_of_rank is None else id_of_rank[found]

    return tk.in_chunks(encode, tokenizer.cut)


def encoding_of(spec: dict[str, Any]) -> tuple[Any, np.ndarray | None, set[str]]:
    """tiktoken's Encoding, the id of each of its ranks (None: itself), and the added tokens to be found in texts.

    tiktoken's rank is both id and order of merges; single bytes are merged from nothing, so theirs may be any. Ids that
    rise with the merges, each once, are the ranks; otherwise the rank is the order alone.
    """
    import tiktoken

    vocabulary = spec["model"]["vocab"]
    tokens = [(bytes([byte]), vocabulary[char]) for byte, char in enumerate(_CHAR_OF_BYTE)]
    tokens += [(_bytes_of(left + right), vocabulary[left + right]) for left, right in _merges(spec)]
    matched = [token for token in spec["added_tokens"] if not token["special"]]
    ids = np.array([number for _, number in tokens] + [token["id"] for token in matched], np.uint32)
    rising = bool((np.diff(ids[256 : len(tokens)].astype(np.int64)) > 0).all()) and len(np.unique(ids)) == len(ids)
    ranks = ids.tolist() if rising else range(len(ids))
    added = dict(zip((token["content"] for token in matched), ranks[len(tokens) :], strict=True))
    pattern = pattern_of(spec)
    assert pattern is not None
    encoding = tiktoken.Encoding(
        "tokenizer.json",
        pat_str=pattern,
        mergeable_ranks=dict(zip((token for token, _ in tokens), ranks, strict=False)),
        special_tokens=added or {"\0\0\0": max(ranks) + 1},  # tiktoken is slow without any
    )
    return encoding, None if rising else ids, set(added)


def why_not(spec: dict[str, Any]) -> str | None:
    """What in a tokenizer.json tiktoken cannot express; None if nothing."""
    model = spec["model"]
    if model["type"] != "BPE":
        return f"its model is {model['type']}, not BPE"
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            return f"its model has {key}={model[key]!r}"
    if spec["normalizer"] is not None:
        return f"it has a normalizer ({spec['normalizer']['type']})"
    pattern = pattern_of(spec)
    if pattern is None:
        return "its pre_tokenizer is not one regular expression before ByteLevel"
    if pattern not in KNOWN_PATTERNS:
        return f"its pattern is none of those known to be exact: {pattern}"
    vocabulary = model["vocab"]
    missing = [char for char in _CHAR_OF_BYTE if char not in vocabulary]
    if missing:
        return f"its vocabulary lacks {len(missing)} of the 256 bytes"
    merged = [left + right for left, right in _merges(spec)]
    if len(set(merged)) != len(merged):
        return "two of its merges make the same token"
    added = spec["added_tokens"]
    if model.get("ignore_merges"):
        unmerged = set(vocabulary) - set(merged) - set(_CHAR_OF_BYTE) - {token["content"] for token in added}
        if unmerged:
            return f"{len(unmerged)} of its tokens are reached without merges"
    matched = [token["content"] for token in added if not token["special"]]
    if any(token[flag] for token in added if not token["special"] for flag in ("lstrip", "rstrip", "single_word")):
        return "an added token takes blanks or word ends with it"
    if any(one != other and other.startswith(one) for one in matched for other in matched):
        return "one of its added tokens begins another"
    return None


def nasty_sample() -> list[str]:
    """Texts where tokenizers differ: blanks, line ends, contractions, digits, marks, and of the assigned characters
    each 32nd and all those where the category changes, between a letter and a digit."""
    texts = [
        "",
        " ",
        "  two  blanks   three\t\ttabs \n newline\n\nparagraph \r\n crlf\r\rcr  ",
        "I'll don't WE'VE it'S 'tis ''s '\u017f \u2019s can't've y'all'd",
        "0 12 123 1234 12345 1,234.56 0x1F \u0661\u0662\u0663\u0664 \u00b2\u00b3\u00bd\u216b 3rd",
        "def f(x):\n\tif x != 0:\n        return x**2  # comment\n\n\n\nclass A: pass\n",
        "\ufffd \ufeffbom \u2028line\u2029para\u0085nel \u00a0nbsp \u200bzero\u200djoin \u3000wide",
        "<|endoftext|> </s> <s> [INST] <|begin_of_text|> <unk> <pad> <|eot_id|>",
        "e\u0301 \u0e01\u0e33 \u0915\u094d\u0937\u093f \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
        "\u4e2d\u6587\u3002\u4f60\u597d\uff0c\u4e16\u754c\uff01 \u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8",
        "a" * 3000 + "!" * 3000 + " " * 3000 + "\n" * 300 + "x",
        "http://example.com/?q=a%20b&c=d#e foo_bar-baz@qux.org $5.00 (50%) [1]... --- *** ===\n//\n",
    ]
    categories = [unicodedata.category(chr(code)) for code in range(0x20000)]  # above are ideographs only
    chars = [
        chr(code)
        for code, (before, category) in enumerate(itertools.pairwise(["", *categories]))
        if (category != before or code % 32 == 0) and category not in ("Cn", "Co", "Cs")
    ]
    return texts + ["".join(f"a{char}1" for char in chars[i : i + 1000]) for i in range(0, len(chars), 1000)]


def _vocabulary_texts(tokenizer: tk.Tokenizer) -> list[str]:
    assert tokenizer.spec is not None
    tokens = [_bytes_of(token) for token in tokenizer.spec["model"]["vocab"] if _is_bytes(token)]
    texts = [token.decode(errors="ignore") for token in tokens]
    return texts + [" ".join(texts[i : i + 1000]) for i in range(0, len(texts), 1000)]


def _difference(tokenizer: tk.Tokenizer, fast: Encode, texts: Iterable[str]) -> str | None:
    for text in texts:
        if tokenizer.encode_ordinary(text).tobytes() != fast(text).tobytes():
            shown = text if len(text) < 80 else text[:80] + "..."
            return f"tiktoken gives other ids for {shown!r}"
    return None


def _merges(spec: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in spec["model"]["merges"])
    return [(left, right) for left, right in pairs]


def _is_bytes(token: str) -> bool:
    return BYTE_OF_CHAR.keys() >= set(token)


def _bytes_of(token: str) -> bytes:
    return token.translate(_BYTE_OF_CODE).encode("latin-1")


_CHAR_OF_BYTE = sorted(BYTE_OF_CHAR, key=lambda char: BYTE_OF_CHAR[char])
# Characters that stand for no byte go where latin-1 ends.
_BYTE_OF_CODE = dict.fromkeys(range(256), 0xFFFD) | {ord(char): byte for char, byte in BYTE_OF_CHAR.items()}
