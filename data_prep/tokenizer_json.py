"""Hugging Face's tokenizer.json of a sentencepiece or tiktoken tokenizer, for exported models.

Only where it gives the same ids: a probe text decides. Both kinds become byte-pair merges, which neither file lists:
tiktoken's follow from replaying its ranks, sentencepiece's are every split of a piece into two others.
"""

from __future__ import annotations

from typing import Any

from data_prep.tokenizer import LLAMA3_PATTERN, Tokenizer
from data_prep.tokenizer_hf import byte_stand_ins

_BLANK = "\u2581"
_PROBE = (
    "The quick brown fox's 12345 jumps\n\n    over\tthe  lazy dog.  ",
    " leading and trailing ",
    "def f(x: int) -> str:\n        return '<s>' + \"</s>\" * x  # \r\n",
    "naïve Äpfel ﬁne ｆｕｌｌ Ⅳ ½ 中文字 日本語 русский العربية 🙂👍🏽 \u00a0 \u200b \ufeff …",
    "a\n\n\nb   c\n \n  d",
)


def tokenizer_json(tokenizer: Tokenizer) -> str | None:
    """The text of a tokenizer.json with the same ids, BOS set before a text as Llama's do; None where none is known."""
    if tokenizer.kind not in ("sentencepiece", "tiktoken"):
        return None
    library = _of_tiktoken(tokenizer) if tokenizer.kind == "tiktoken" else _of_sentencepiece(tokenizer)
    library.encode_special_tokens = True
    for text in _PROBE:
        if library.encode(text, add_special_tokens=False).ids != tokenizer.encode(text).tolist():
            return None
    library.encode_special_tokens = False
    if tokenizer.bos_id is not None and tokenizer.bos_id not in tokenizer.eos_ids:
        from tokenizers import processors

        bos = token_text(tokenizer, tokenizer.bos_id)
        library.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_id)]
        )
    return str(library.to_str(pretty=True))


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """How a special token is written."""
    return next(text for text, known in tokenizer.special_tokens.items() if known == token_id)


def _of_tiktoken(tokenizer: Tokenizer) -> Any:
    import tokenizers
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

    stand_in = {byte: char for char, byte in byte_stand_ins().items()}
    count = tokenizer.vocab_size - len(tokenizer.special_tokens)
    ranks = {tokenizer.token_bytes(rank): rank for rank in range(count)}
    written = {token: "".join(stand_in[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        if len(token) > 1:
            parts = _parts(token, rank, ranks)
            if len(parts) == 2:
                merges.append((written[parts[0]], written[parts[1]]))
    library = tokenizers.Tokenizer(
        models.BPE({written[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True)
    )
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    ordered = sorted(tokenizer.special_tokens, key=tokenizer.special_tokens.__getitem__)
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ordered])
    return library


def _parts(token: bytes, below: int, ranks: dict[bytes, int]) -> list[bytes]:
    """What byte-pair encoding makes of a token's bytes with the ranks below its own: its last merge, undone."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 1:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], below), i) for i in range(len(parts) - 1))
        if rank >= below:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _of_sentencepiece(tokenizer: Tokenizer) -> Any:
    """As Llama 1 and 2: a blank before the text, blanks as U+2581, merges by score, bytes for what has no piece."""
    import sentencepiece
    import tokenizers
    from tokenizers import AddedToken, decoders, models, normalizers

    processor = sentencepiece.SentencePieceProcessor(model_file=str(next(iter(tokenizer.files.values()))))
    pieces = [processor.IdToPiece(i) for i in range(processor.GetPieceSize())]
    ids = {piece: i for i, piece in enumerate(pieces)}
    usable = {
        piece
        for i, piece in enumerate(pieces)
        if not (processor.IsControl(i) or processor.IsUnknown(i) or processor.IsByte(i))
    }
    merges = []
    for piece in sorted(usable, key=lambda text: (-processor.GetScore(ids[text]), ids[text])):
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        merges += sorted(
            (pair for pair in halves if pair[0] in usable and pair[1] in usable),
            key=lambda pair: (ids[pair[0]], ids[pair[1]]),
        )
    unknown = pieces[processor.unk_id()]
    model = models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), normalizers.Replace(" ", _BLANK)])
    library.decoder = decoders.Sequence(
        [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [unknown, *tokenizer.special_tokens]
    library.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in sorted(special, key=ids.__getitem__)]
    )
    return library
