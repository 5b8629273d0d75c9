"""Small tokenizers of every kind, trained once, and where the optional shared data lies."""

import base64
import json
import os
from pathlib import Path

import pytest

from data_prep.tokenizer import load_tokenizer
from data_prep.tokenizer_hf import BYTE_OF_CHAR
from data_prep.tokenizer_train import train_tokenizer

KINDS = ("sentencepiece", "bpe", "tiktoken")

PROSE = (
    "The quick brown fox doesn't jump over 12 lazy dogs; it sleeps, as foxes do, until 1984. "
    "def f(x):\n    return x ** 2  # squares\n\n\tThey'll say: \"WE'VE seen 3.14159 of it\"...\n"
    "El veloz murciélago hindú comía feliz cardillo y kiwi. Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich. "
    "Съешь же ещё этих мягких французских булок, да выпей чаю. 天地玄黃,宇宙洪荒。日月盈昃,辰宿列張。\n"
)


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a tokenizer of each kind, all with BOS, EOS and every byte."""
    root = tmp_path_factory.mktemp("tokenizers")
    (root / "text.txt").write_text(PROSE * 20, encoding="utf-8")
    for kind in ("sentencepiece", "bpe"):
        train_tokenizer([str(root / "text.txt")], root / kind, kind=kind, vocab_size=480)
    spec = json.loads((root / "bpe" / "tokenizer.json").read_text())["model"]
    merged = [left + right for left, right in spec["merges"]]
    tokens = [bytes([byte]) for byte in range(256)] + [bytes(BYTE_OF_CHAR[c] for c in token) for token in merged]
    ranks = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (root / "tiktoken").mkdir()
    (root / "tiktoken" / "tokenizer.model").write_text("".join(ranks))
    for kind in KINDS:
        assert load_tokenizer(root / kind).eos_id is not None
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="session")
def shared() -> Path:
    """The optional folder of real corpora and tokenizers."""
    found = Path(os.environ.get("PRETRAIN_SHARED", Path(__file__).resolve().parents[2] / ".." / "shared")) / "data"
    if not found.is_dir():
        pytest.skip(f"{found} is not there (set PRETRAIN_SHARED)")
    return found
