"""Training a tokenizer from a sample of the input: sentencepiece BPE, or byte-level BPE as a tokenizer.json.

The sample is spread evenly over the input and fixed by it, so the same files give the same tokenizer.
Ids of sentencepiece: unk 0, bos 1, eos 2, pad 3, then 256 bytes. Ids of bpe: bos 0, eos 1, pad 2, then 256 bytes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_prep import files, sources, tokenizer, tokenizer_hf
from data_prep.errors import DataError

KINDS = ("sentencepiece", "bpe")
SAMPLE_MIB = 16  # of text; more changes little and costs time: training is the one part on a single core
SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")  # of kind bpe
CHARACTER_COVERAGE = 0.9995  # of kind sentencepiece: share of the text whose characters get ids; the rest are bytes
_LONGEST_LINE = 4096  # characters; what sentencepiece sees of a line at a time
_SPOTS = 256  # about so many places of the input make up the sample


def train_tokenizer(
    inputs: Sequence[str],
    out: str | Path,
    *,
    kind: str,
    vocab_size: int,
    text_key: str = "text",
    exclude: Sequence[str] = (),
    sample_mib: float = SAMPLE_MIB,
    character_coverage: float = CHARACTER_COVERAGE,
) -> tokenizer.Tokenizer:
    """Writes the tokenizer into the folder `out`, whole or not at all, and returns it, loaded from there."""
    if kind not in KINDS:
        raise DataError(f"kind={kind!r} is none of {', '.join(KINDS)}")
    least = 4 + 256 + 1 if kind == "sentencepiece" else len(SPECIAL_TOKENS) + 256
    if not least <= vocab_size < 2**31:
        raise DataError(f"vocab_size={vocab_size} is too small: special tokens and single bytes alone are {least}")
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"--out {out} exists and is not empty; choose another folder or remove it")
    found, _ = files.find(inputs, exclude=exclude)
    budget = int(sample_mib * 2**20)
    texts = sample(found, budget, text_key)
    first = next(texts, None)
    if first is None:
        raise DataError(f"{', '.join(inputs)}: no text to train a tokenizer on")
    folder.mkdir(parents=True, exist_ok=True)
    chained = (text for part in ([first], texts) for text in part)
    if kind == "sentencepiece":
        _train_sentencepiece(chained, folder, vocab_size, character_coverage)
    else:
        _train_bpe(chained, folder, vocab_size)
    return tokenizer.load_tokenizer(folder)


def sample(found: Sequence[files.File], budget: int, text_key: str) -> Iterator[str]:
    """Texts of at most about `budget` characters in all, from places spread evenly over the files."""
    pieces = sources.split(found, max(1, budget // _SPOTS))
    total = sum(piece.weight for piece in pieces)
    before = 0  # weight of the pieces so far
    left = budget
    for piece in pieces:
        after = before + piece.weight
        # Of each total/budget bytes of input one falls into the sample.
        chosen = total <= budget or after * _SPOTS // total > before * _SPOTS // total
        before = after
        limit = min(left, left if total <= budget else max(1, budget // _SPOTS))
        for row in sources.read(piece, text_key) if chosen else ():
            if not isinstance(row, sources.Document):
                continue  # `build` judges bad rows; here they are only not learned from
            yield row.text[:limit]
            left -= len(row.text[:limit])
            limit -= len(row.text)
            if limit <= 0:
                break
        if left <= 0:
            return


def _train_sentencepiece(texts: Iterator[str], folder: Path, vocab_size: int, character_coverage: float) -> None:
    """Llama 2's settings: nothing normalised, digits apart, blanks of any length are pieces, bytes for the rest."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=character_coverage,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=8 * _LONGEST_LINE,
            shuffle_input_sentence=False,
            num_threads=1,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(f"sentencepiece cannot train a vocabulary of {vocab_size} on this text: {error}") from error
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    config = {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    _write_config(folder, config | {"pad_token": "<pad>", "legacy": False})


def _lines(texts: Iterator[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            for at in range(0, len(line), _LONGEST_LINE):
                yield line[at : at + _LONGEST_LINE]


def _train_bpe(texts: Iterator[str], folder: Path, vocab_size: int) -> None:
    """Llama 3's pipeline: its splitting pattern, bytes, merges; nothing is ever unknown."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(tokenizer.LLAMA3_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(tokenizer_hf.BYTE_OF_CHAR),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    if library.get_vocab_size() != vocab_size:  # before anything is written: the folder stays free for another try
        raise DataError(
            f"vocab_size={vocab_size} is too large for this text: it yields {library.get_vocab_size()} tokens;"
            " give more text or ask for fewer"
        )
    library.save(str(folder / "tokenizer.json"))
    bos, eos, pad = SPECIAL_TOKENS
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, "pad_token": pad}
    _write_config(folder, config | {"clean_up_tokenization_spaces": False})


def _write_config(folder: Path, config: dict[str, object]) -> None:
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
