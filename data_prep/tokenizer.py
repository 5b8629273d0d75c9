"""One small class over the three kinds of tokenizer files: sentencepiece, tiktoken ranks, Hugging Face.

`load_tokenizer(path)` reads a file or folder; `build` then asks `fast_bpe.accelerate` for a faster engine of the
same ids. Encoding treats text that looks like a special token as ordinary text, never adds BOS or EOS by itself,
and gives for a text of any length the ids of the text encoded whole: long texts are cut only at places where the
tokenizer is known to cut as well, and where none is known they are encoded in one go.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.blockfile import whole_file
from data_prep.errors import DataError

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# A single blank between two letters begins a new piece in every pattern that we know.
CUT_BEFORE_BLANK = re.compile(r"(?<=[^\W\d_])(?=[ \n][^\W\d_])")
CHUNK_CHARS = 1 << 20
LONGEST_BLANK = 25_000  # Llama 3's own code cuts longer runs of blanks; tiktoken's regex engine dies of a million

SIDECARS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "added_tokens.json")


class Special(NamedTuple):
    """Ids with a meaning; None where the tokenizer has no such token."""

    bos_id: int | None
    eos_ids: tuple[int, ...]  # the first ends documents, each of them ends a generation
    pad_id: int | None


class Tokenizer:
    """Text <-> ids. Use `load_tokenizer` to make one.

    `encode_ordinary(text)` gives uint32 ids of plain text; `decode_ids` the text of ordinary ids;
    `token_bytes(id)` the bytes that one id stands for in mid-text.
    """

    def __init__(
        self,
        kind: str,
        files: dict[str, Path],
        *,
        vocab_size: int,
        special: Special,
        special_tokens: dict[str, int],
        encode: Callable[[str], np.ndarray],
        cut: re.Pattern[str] | None,
        decode_ids: Callable[[list[int]], str],
        token_bytes: Callable[[int], bytes],
        engine: str,
        spec: dict[str, Any] | None = None,
    ):
        self.kind = kind  # sentencepiece | tiktoken | huggingface
        self.files = files  # name in a saved folder -> where it is now; the first decides the ids
        self.vocab_size = vocab_size  # one above the highest id, added tokens included
        self.bos_id, self.eos_ids, self.pad_id = special
        self.eos_id = self.eos_ids[0] if self.eos_ids else None
        self.special_tokens = special_tokens
        self.cut = cut  # where a long text may be cut without changing its ids; None: nowhere
        self.encode_ordinary = in_chunks(encode, cut)
        self.token_bytes = token_bytes
        self.engine = engine  # which library encodes: sentencepiece | tiktoken | tokenizers
        self.spec = spec  # the parsed tokenizer.json, for `fast_bpe`
        self._decode_ids = decode_ids
        self._by_id = {token_id: text for text, token_id in special_tokens.items()}
        self.hash = self._hash()

    def encode(self, text: str, *, bos: bool = False, eos: bool = False, parse_special: bool = False) -> np.ndarray:
        """uint32 ids. BOS and EOS exactly as asked; asking for one that does not exist raises DataError.

        `parse_special` gives special tokens written out in the text their ids (for prompts, never for web text).
        """
        parts = [self._required(self.bos_id, "BOS")] if bos else []
        if parse_special and self.special_tokens:
            pattern = "|".join(map(re.escape, sorted(self.special_tokens, key=len, reverse=True)))
            for piece in re.split(f"({pattern})", text):
                known = self.special_tokens.get(piece)
                if known is not None:
                    parts.append(np.array([known], np.uint32))
                elif piece:
                    parts.append(self.encode_ordinary(piece))
        else:
            parts.append(self.encode_ordinary(text))
        if eos:
            parts.append(self._required(self.eos_id, "EOS"))
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.uint32)])

    def decode(self, ids: int | Sequence[int] | np.ndarray, *, skip_special: bool = False) -> str:
        """Text of one id or many; special tokens by name unless skipped; half characters as U+FFFD."""
        listed = [int(ids)] if isinstance(ids, int | np.integer) else [int(i) for i in ids]
        out: list[str] = []
        run: list[int] = []
        for token_id in listed:
            if not 0 <= token_id < self.vocab_size:
                raise DataError(f"token id {token_id} is outside the tokenizer's {self.vocab_size} ids")
            if token_id in self._by_id:
                out += [self._decode_ids(run) if run else "", "" if skip_special else self._by_id[token_id]]
                run = []
            else:
                run.append(token_id)
        return "".join(out) + (self._decode_ids(run) if run else "")

    def save(self, folder: str | Path) -> list[str]:
        """Copies the files into the folder under the names that `load_tokenizer` finds; returns the names."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name, path in self.files.items():
            if path.resolve() != (target / name).resolve():
                with whole_file(target / name) as file:
                    file.write(path.read_bytes())
        return list(self.files)

    def _required(self, token_id: int | None, name: str) -> np.ndarray:
        if token_id is None:
            raise DataError(f"{self.kind} tokenizer {next(iter(self.files.values()))} has no {name} token")
        return np.array([token_id], np.uint32)

    def _hash(self) -> str:
        """Of what decides the ids, not of file names: the same in every copy."""
        digest = hashlib.sha256()
        for name, path in self.files.items():
            if name not in SIDECARS:
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        ids = [self.kind, self.bos_id, list(self.eos_ids), self.pad_id, self.vocab_size]
        digest.update(json.dumps(ids).encode())
        return digest.hexdigest()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From a tokenizer.json, a sentencepiece or tiktoken .model, GPT-2's vocab.json, or a folder with one of them."""
    path = Path(path)
    if path.is_dir():
        models = sorted([*path.glob("*.model"), *path.glob("*.tiktoken")])
        choices = [path / "tokenizer.json", path / "tokenizer.model", *models, path / "vocab.json"]
        found = next((choice for choice in choices if choice.is_file()), None)
        if found is None:
            raise DataError(f"{path}: no tokenizer.json, *.model, *.tiktoken or vocab.json + merges.txt in the folder")
        path = found
    if not path.is_file():
        raise DataError(f"{path}: no such tokenizer file or folder")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the tokenizer file is empty")
    if path.suffix == ".json":
        from data_prep.tokenizer_hf import load_huggingface

        return load_huggingface(path)
    return _load_tiktoken(path) if _is_rank_file(path) else _load_sentencepiece(path)


def chunks(text: str, cut: re.Pattern[str] | None, limit: int = CHUNK_CHARS) -> Iterator[str]:
    """The text in parts of at least `limit` characters, parted where `cut` matches (what it matches is left out)."""
    at = 0
    while cut is not None and len(text) - at > limit:
        place = cut.search(text, at + limit)
        if place is None:
            break
        yield text[at : place.start()]
        at = place.end()
    yield text[at:] if at else text


def ids_array(ids: list[int]) -> np.ndarray:
    """uint32; through `array`, which takes a third of the time of np.array."""
    return np.frombuffer(array("I", ids), np.uint32)


def in_chunks(
    encode: Callable[[str], np.ndarray], cut: re.Pattern[str] | None, limit: int = CHUNK_CHARS
) -> Callable[[str], np.ndarray]:
    def encode_any(text: str) -> np.ndarray:
        if len(text) <= limit:
            return encode(text)
        return np.concatenate([encode(chunk) for chunk in chunks(text, cut, limit)])

    return encode_any


def sidecars_of(path: Path) -> dict[str, Path]:
    return {name: path.with_name(name) for name in SIDECARS if path.with_name(name).is_file()}


# ---- sentencepiece


def _load_sentencepiece(path: Path) -> Tokenizer:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.Load(str(path))
    except (RuntimeError, OSError) as error:
        raise DataError(f"{path}: neither a tiktoken rank file nor a sentencepiece model: {error}") from error
    ids = {name: value if value >= 0 else None for name, value in _sentencepiece_ids(processor).items()}
    eos = () if ids["eos"] is None else (ids["eos"],)
    controls = [i for i in range(processor.GetPieceSize()) if processor.IsControl(i)]

    as_numpy = getattr(processor, "EncodeAsNumpy", None)  # newer releases; spares a list of Python numbers

    def encode(text: str) -> np.ndarray:
        return as_numpy(text).view(np.uint32) if as_numpy else ids_array(processor.EncodeAsIds(text))

    def token_bytes(token_id: int) -> bytes:
        piece = processor.IdToPiece(token_id)
        return bytes([int(piece[3:5], 16)]) if processor.IsByte(token_id) else piece.replace("\u2581", " ").encode()

    return Tokenizer(
        "sentencepiece",
        {"tokenizer.model": path} | sidecars_of(path),
        vocab_size=processor.GetPieceSize(),
        special=Special(ids["bos"], eos, ids["pad"]),
        special_tokens={processor.IdToPiece(i): i for i in controls},
        encode=encode,
        cut=_sentencepiece_cut(processor),
        decode_ids=processor.DecodeIds,
        token_bytes=token_bytes,
        engine="sentencepiece",
    )


def _sentencepiece_ids(processor: Any) -> dict[str, int]:
    return {"bos": processor.bos_id(), "eos": processor.eos_id(), "pad": processor.pad_id()}


def _sentencepiece_cut(processor: Any) -> re.Pattern[str] | None:
    """Where a text may be cut: at a blank between letters, if no piece goes on beyond a blank. The blank itself
    is dropped where the model puts one in front of each text (add_dummy_prefix), else it stays. (G10)"""
    if any("\u2581" in processor.IdToPiece(i).lstrip("\u2581") for i in range(processor.GetPieceSize())):
        return None
    letters = r"(?<=[^\W\d_]){}(?=[^\W\d_])"
    for cut in (re.compile(letters.format(" ")), re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")):
        text = "The quick brown fox doesn't jump over one lazy dog"
        whole = processor.EncodeAsIds(text)
        if [i for chunk in chunks(text, cut, 1) for i in processor.EncodeAsIds(chunk)] == whole:
            return cut
    return None


# ---- tiktoken rank files


def _is_rank_file(path: Path) -> bool:
    with open(path, "rb") as file:
        return re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\r?\n?", file.readline(1000)) is not None


def _load_tiktoken(path: Path) -> Tokenizer:
    """A rank file holds neither pattern nor special tokens: they are Llama 3's, after the last rank."""
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    try:
        ranks = load_tiktoken_bpe(str(path))
    except ValueError as error:
        raise DataError(f"{path}: damaged tiktoken rank file: {error}") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError(f"{path}: the ranks are not 0 to {len(ranks) - 1}, each once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(f"{path}: no rank for {len(missing)} single bytes, the first {missing[0]:#04x}")
    special_tokens = {name: len(ranks) + i for i, name in enumerate(_llama3_special_tokens())}
    encoding = tiktoken.Encoding(
        path.name, pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special_tokens
    )
    long_blank = re.compile(rf"\s{{{LONGEST_BLANK}}}")

    def encode(text: str) -> np.ndarray:
        if len(text) > LONGEST_BLANK and long_blank.search(text):
            parts = re.split(f"({long_blank.pattern})", text)
            return np.concatenate([encode_short(part) for part in parts if part])
        return encode_short(text)

    def encode_short(text: str) -> np.ndarray:
        return encoding.encode_to_numpy(text, disallowed_special=())

    end, turn = special_tokens["<|end_of_text|>"], special_tokens["<|eot_id|>"]
    return Tokenizer(
        "tiktoken",
        {"tokenizer.model": path} | sidecars_of(path),
        vocab_size=len(ranks) + len(special_tokens),
        special=Special(special_tokens["<|begin_of_text|>"], (end, turn), None),
        special_tokens=special_tokens,
        encode=encode,
        cut=CUT_BEFORE_BLANK,
        decode_ids=encoding.decode,
        token_bytes=encoding.decode_single_token_bytes,
        engine="tiktoken",
    )


def _llama3_special_tokens() -> list[str]:
    """256 names, in the order of Llama 3's release."""
    reserved = iter(f"<|reserved_special_token_{i}|>" for i in range(256))
    names = ["<|begin_of_text|>", "<|end_of_text|>", *(next(reserved) for _ in range(4))]
    names += ["<|start_header_id|>", "<|end_header_id|>", next(reserved), "<|eot_id|>"]
    return names + [next(reserved) for _ in range(256 - len(names))]
