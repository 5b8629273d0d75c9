"""Small tokenizers of every kind, a corpus and what is built of it, made once; where the optional shared data lies."""

import base64
import gzip
import json
import os
from pathlib import Path

import pytest

from data_prep.build import build
from data_prep.inspect import verify
from data_prep.plan import Settings
from data_prep.tokenizer import load_tokenizer
from data_prep.tokenizer_hf import BYTE_OF_CHAR
from data_prep.tokenizer_train import train_tokenizer
from tests.data_prep.builds import quiet, tree

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


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 2 MB in every kind of file: two large jsonl files, many small text files, one compressed."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, count in (("a", 900), ("b", 500)):
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for i in range(count):
                file.write(
                    json.dumps({"text": f"{name} {i} {PROSE[i % 97 :]}" * (1 + i % 4)}, ensure_ascii=False) + "\n"
                )
                if i % 50 == 0:
                    file.write("\n")
    for i in range(100):
        (folder / f"note-{i:03}.txt").write_text(f"note {i}\n{PROSE[: 50 + 3 * i]}")
    (folder / "z.jsonl.gz").write_bytes(
        gzip.compress(b"".join(json.dumps({"text": f"zipped {i}"}).encode() + b"\n" for i in range(300)))
    )
    return folder


@pytest.fixture(scope="session")
def reference(corpus: Path, tokenizers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one undisturbed worker makes of the corpus."""
    out = tmp_path_factory.mktemp("reference") / "out"
    settings = Settings((str(corpus),), val_fraction=0.1)
    build(settings, tokenizers["bpe"], out, seq_len=256, say=quiet)
    verify(out)
    return tree(out)
