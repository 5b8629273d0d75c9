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
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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

_SIDECARS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "added_tokens.json")
_KNOWN_BOS = ("<|begin_of_text|>", "<s>", "<|startoftext|>", "[BOS]")
_KNOWN_EOS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "[EOS]")


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
        encode_ordinary: Callable[[str], np.ndarray],
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
        self.encode_ordinary = encode_ordinary
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
        out, run = [], []
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
                shutil.copyfile(path, target / name)
        return list(self.files)

    def _required(self, token_id: int | None, name: str) -> np.ndarray:
        if token_id is None:
            raise DataError(f"{self.kind} tokenizer {next(iter(self.files.values()))} has no {name} token")
        return np.array([token_id], np.uint32)

    def _hash(self) -> str:
        """Of what decides the ids, not of file names: the same in every copy."""
        digest = hashlib.sha256()
        for name, path in self.files.items():
            if name not in _SIDECARS:
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
        return _load_huggingface(path)
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


def in_chunks(
    encode: Callable[[str], np.ndarray], cut: re.Pattern[str] | None, limit: int = CHUNK_CHARS
) -> Callable[[str], np.ndarray]:
    def encode_any(text: str) -> np.ndarray:
        if len(text) <= limit:
            return encode(text)
        return np.concatenate([encode(chunk) for chunk in chunks(text, cut, limit)])

    return encode_any


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

    def encode(text: str) -> np.ndarray:
        return np.array(processor.EncodeAsIds(text), np.uint32)

    def token_bytes(token_id: int) -> bytes:
        piece = processor.IdToPiece(token_id)
        return bytes([int(piece[3:5], 16)]) if processor.IsByte(token_id) else piece.replace("\u2581", " ").encode()

    return Tokenizer(
        "sentencepiece",
        {"tokenizer.model": path} | _sidecars(path),
        vocab_size=processor.GetPieceSize(),
        special=Special(ids["bos"], eos, ids["pad"]),
        special_tokens={processor.IdToPiece(i): i for i in controls},
        encode_ordinary=in_chunks(encode, _sentencepiece_cut(processor)),
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
        {"tokenizer.model": path} | _sidecars(path),
        vocab_size=len(ranks) + len(special_tokens),
        special=Special(special_tokens["<|begin_of_text|>"], (end, turn), None),
        special_tokens=special_tokens,
        encode_ordinary=in_chunks(encode, CUT_BEFORE_BLANK),
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


# ---- Hugging Face tokenizers


def _load_huggingface(path: Path) -> Tokenizer:
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
    sidecars = {name: _read_json(file) for name, file in _sidecars(path).items()}
    declared = [int(i) for i in sidecars.get("tokenizer_config.json", {}).get("added_tokens_decoder", {})]

    def encode(text: str) -> np.ndarray:
        return np.array(library.encode(text, add_special_tokens=False).ids, np.uint32)

    def token_bytes(token_id: int) -> bytes:
        token = library.id_to_token(token_id) or ""
        if all(char in BYTE_OF_CHAR for char in token) and "ByteLevel" in json.dumps(spec["decoder"]):
            return bytes(BYTE_OF_CHAR[char] for char in token)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    return Tokenizer(
        "huggingface",
        files | _sidecars(path),
        vocab_size=max([*vocabulary.values(), *declared]) + 1,
        special=_special_ids(path, spec, vocabulary, sidecars),
        special_tokens=added,
        encode_ordinary=in_chunks(encode, cut_of(spec)),
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


def cut_of(spec: dict[str, Any]) -> re.Pattern[str] | None:
    """Where a text may be cut without changing the ids of a tokenizer.json; None: nowhere that we know of."""
    from data_prep.fast_bpe import KNOWN_PATTERNS

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


def _sidecars(path: Path) -> dict[str, Path]:
    return {name: path.with_name(name) for name in _SIDECARS if path.with_name(name).is_file()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
