"""Each kind of tokenizer: round trips, BOS and EOS as set, special text as text, long texts, the faster engine."""

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers, processors

from data_prep import fast_bpe
from data_prep.errors import DataError
from data_prep.tokenizer import Tokenizer, chunks, load_tokenizer
from data_prep.tokenizer_hf import BYTE_OF_CHAR
from data_prep.tokenizer_train import train_tokenizer
from tests.data_prep.conftest import PROSE

KINDS = ("sentencepiece", "bpe", "tiktoken")
# U+2581 is how sentencepiece writes a blank: the one character that it does not give back.
NASTY = [text.replace("\u2581", "") for text in fast_bpe.nasty_sample() if text]


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Path]) -> Tokenizer:
    return load_tokenizer(tokenizers[request.param])


def test_text_comes_back_exactly(tokenizer: Tokenizer) -> None:
    for text in NASTY:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("")) == 0


def test_ids_are_in_range_and_name_their_bytes(tokenizer: Tokenizer) -> None:
    text = "def f(x):\n    return 'h\u00e9llo, \u5929\u5730'"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint32
    assert int(ids.max()) < tokenizer.vocab_size
    assert b"".join(tokenizer.token_bytes(int(i)) for i in ids).decode().lstrip() == text


def test_one_id_decodes_alone_and_an_unknown_id_is_refused(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(int(tokenizer.encode("x")[-1])) == "x"
    assert tokenizer.eos_id is not None
    name = tokenizer.decode(tokenizer.eos_id)
    assert tokenizer.special_tokens[name] == tokenizer.eos_id
    assert tokenizer.decode([tokenizer.eos_id, *tokenizer.encode("a b").tolist()], skip_special=True) == "a b"
    with pytest.raises(DataError, match=f"token id {tokenizer.vocab_size} is outside the tokenizer's"):
        tokenizer.decode([tokenizer.vocab_size])


def test_text_that_looks_like_a_special_token_is_ordinary_text(tokenizer: Tokenizer) -> None:  # G7
    eos = tokenizer.decode(tokenizer.eos_id or 0)
    for marker in ("<|endoftext|>", "</s>", "<s>", eos, tokenizer.decode(tokenizer.bos_id or 0)):
        text = f"before {marker} after"
        ids = tokenizer.encode(text, eos=True)
        assert (ids == tokenizer.eos_id).sum() == 1
        assert ids[-1] == tokenizer.eos_id
        assert tokenizer.decode(ids[:-1]) == text
    asked = tokenizer.encode(f"a{eos}b", parse_special=True)
    assert (asked == tokenizer.eos_id).sum() == 1


def test_what_follows_an_odd_character_is_kept(tokenizer: Tokenizer) -> None:  # G5
    for odd in ("\0", "\ufffd", "\u2028", "\x7f"):
        assert tokenizer.decode(tokenizer.encode(f"abc{odd}def")) == f"abc{odd}def"


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("aZ\u00e9\u5929 \n\t\r.'1\u00bd_\u0301"), max_size=60), limit=st.integers(1, 8))
def test_a_text_cut_where_we_cut_has_the_ids_of_the_whole(
    tokenizers: dict[str, Path], kind: str, text: str, limit: int
) -> None:  # G10
    tokenizer = load_once(tokenizers[kind])
    assert tokenizer.cut is not None
    found = [tokenizer.encode_ordinary(chunk) for chunk in chunks(text, tokenizer.cut, limit)]
    assert np.concatenate(found).tolist() == tokenizer.encode_ordinary(text).tolist()


def test_a_huge_document_has_the_ids_of_its_words_and_lines(tokenizer: Tokenizer) -> None:  # G10
    words = "lorem ipsum dolor " * 15_000 + "\n" * 50 + "x" * 200_000 + "\n\n" + "sit amet " * 80_000
    ids = tokenizer.encode(words)  # beyond the size at which texts are cut
    assert len(words) > 1 << 20
    assert tokenizer.decode(ids) == words
    unit = tokenizer.encode("lorem ipsum dolor " * 2)
    assert ids[: len(unit) - 4].tolist() == unit[:-4].tolist()


@pytest.mark.parametrize("text", ["a" * 1_000_000, " " * 1_000_000 + "b", "\n" * 1_000_000, "!" * 1_000_000])
def test_a_million_equal_characters_pass(tokenizer: Tokenizer, text: str) -> None:
    fast_bpe.accelerate(tokenizer)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_asking_for_bos_or_eos_gives_exactly_one(tokenizer: Tokenizer) -> None:  # G8
    for bos in (False, True):
        for eos in (False, True):
            ids = tokenizer.encode("some text", bos=bos, eos=eos).tolist()
            assert (ids[0] == tokenizer.bos_id, ids[-1] == tokenizer.eos_id) == (bos, eos)
            assert ids.count(tokenizer.bos_id) + ids.count(tokenizer.eos_id) == bos + eos


def test_a_template_in_the_tokenizer_adds_nothing_to_what_is_asked(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    library = Library.from_file(str(tokenizers["bpe"] / "tokenizer.json"))  # G8
    bos, eos = "<|begin_of_text|>", "<|end_of_text|>"
    library.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}", special_tokens=[(bos, library.token_to_id(bos)), (eos, library.token_to_id(eos))]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    plain, templated = load_tokenizer(tokenizers["bpe"]), load_tokenizer(tmp_path)
    assert (templated.bos_id, templated.eos_id) == (plain.bos_id, plain.eos_id)  # read from the template
    for bos_on in (False, True):
        for eos_on in (False, True):
            for text in ("first document", "second"):
                asked = {"bos": bos_on, "eos": eos_on}
                assert templated.encode(text, **asked).tolist() == plain.encode(text, **asked).tolist()


def test_a_token_that_does_not_exist_cannot_be_asked_for(tokenizers: dict[str, Path], tmp_path: Path) -> None:  # G8
    spec = json.loads((tokenizers["bpe"] / "tokenizer.json").read_text())
    spec["added_tokens"] = []
    for name in ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"):
        spec["model"]["vocab"][f"plain{name[2:-2]}"] = spec["model"]["vocab"].pop(name)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    bare = load_tokenizer(tmp_path)
    assert (bare.bos_id, bare.eos_ids, bare.pad_id) == (None, (), None)
    with pytest.raises(DataError, match="has no BOS token"):
        bare.encode("x", bos=True)
    with pytest.raises(DataError, match="has no EOS token"):
        bare.encode("x", eos=True)


def test_the_size_counts_added_tokens(tmp_path: Path) -> None:  # G9
    alphabet = sorted(BYTE_OF_CHAR)[:100]
    library = Library(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["<pad>"])
    library.add_tokens(["<extra>"])
    library.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).vocab_size == 102
    assert load_tokenizer(tmp_path).encode("<extra>").tolist() == [101]
    assert 100 not in load_tokenizer(tmp_path).encode("<pad>").tolist()
    config = {"added_tokens_decoder": {"110": {"content": "<later>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).vocab_size == 111


def test_truncation_and_padding_saved_in_a_tokenizer_do_not_shorten_documents(
    tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    library = Library.from_file(str(tokenizers["bpe"] / "tokenizer.json"))
    library.enable_truncation(8)
    library.enable_padding(length=16)
    library.save(str(tmp_path / "tokenizer.json"))
    text = "many words in this text " * 20
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode(text)) == text


def test_end_ids_are_a_list_where_the_files_say_so(tokenizers: dict[str, Path], tmp_path: Path) -> None:  # G47
    shutil.copytree(tokenizers["bpe"], tmp_path / "t")
    (tmp_path / "t" / "generation_config.json").write_text('{"eos_token_id": [7, 1, 9]}')
    loaded = load_tokenizer(tmp_path / "t")
    assert (loaded.eos_id, loaded.eos_ids) == (1, (1, 7, 9))
    loaded.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").eos_ids == (1, 7, 9)
    (tmp_path / "t" / "generation_config.json").write_text('{"eos_token_id": 1}')
    assert load_tokenizer(tmp_path / "t").eos_ids == (1,)


def test_a_saved_copy_is_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    names = tokenizer.save(tmp_path / "copy")
    assert sorted(names) == sorted(path.name for path in (tmp_path / "copy").iterdir())
    again = load_tokenizer(tmp_path / "copy")
    assert (again.hash, again.vocab_size, again.bos_id, again.eos_ids, again.pad_id) == (
        tokenizer.hash,
        tokenizer.vocab_size,
        tokenizer.bos_id,
        tokenizer.eos_ids,
        tokenizer.pad_id,
    )
    assert again.encode(NASTY[4]).tolist() == tokenizer.encode(NASTY[4]).tolist()
    again.save(tmp_path / "copy")  # onto itself


def test_tokenizers_of_other_ids_have_other_hashes(tokenizers: dict[str, Path]) -> None:
    assert len({load_tokenizer(path).hash for path in tokenizers.values()}) == len(tokenizers)


def test_llama3_special_tokens_stand_where_llama3_has_them(tokenizers: dict[str, Path]) -> None:
    loaded = load_tokenizer(tokenizers["tiktoken"] / "tokenizer.model")
    base = loaded.vocab_size - 256
    names = {name: token_id - base for name, token_id in loaded.special_tokens.items()}
    assert names["<|begin_of_text|>"] == 0
    assert names["<|end_of_text|>"] == 1
    assert names["<|start_header_id|>"] == 6
    assert names["<|end_header_id|>"] == 7
    assert names["<|eot_id|>"] == 9
    assert names["<|reserved_special_token_4|>"] == 8
    assert names["<|reserved_special_token_250|>"] == 255
    assert loaded.eos_ids == (base + 1, base + 9)


def test_unusable_files_are_refused_by_name(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    def refused(name: str, content: str, message: str) -> None:
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=message):
            load_tokenizer(tmp_path / name)

    refused("empty.model", "", "the tokenizer file is empty")
    refused("junk.model", "nonsense\n", "neither a tiktoken rank file nor a sentencepiece model")
    refused("short.model", "AA== 0\nAQ== 1\n", "no rank for 254 single bytes, the first 0x02")
    refused("gap.model", "AA== 0\nAQ== 2\n", "the ranks are not 0 to 1, each once")
    refused("tokenizer.json", "{}", "no usable tokenizer")
    refused("vocab.json", "{}", "merges.txt is missing beside it")
    with pytest.raises(DataError, match="no such tokenizer file or folder"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path / "folder")
    shutil.copytree(tokenizers["bpe"], tmp_path / "named")
    (tmp_path / "named" / "tokenizer_config.json").write_text('{"eos_token": "<nowhere>"}')
    with pytest.raises(DataError, match="its eos_token '<nowhere>' is not in the vocabulary"):
        load_tokenizer(tmp_path / "named")


# ---- the faster engine


def test_tiktoken_takes_over_a_byte_level_tokenizer_with_the_same_ids(tokenizers: dict[str, Path]) -> None:
    slow, fast = load_tokenizer(tokenizers["bpe"]), load_tokenizer(tokenizers["bpe"])
    line = fast_bpe.accelerate(fast, ["a text of the corpus"])
    assert line.startswith("encoding with tiktoken: same ids")
    assert fast.engine == "tiktoken"
    for text in NASTY:
        assert fast.encode(text).tolist() == slow.encode(text).tolist()


def variants(spec: dict) -> Iterator[tuple[str, dict]]:
    """Changes that tiktoken cannot follow, and a word of the reason that must be given."""
    for change, reason in (
        (lambda s: s.update(normalizer={"type": "NFC"}), "normalizer"),
        (lambda s: s["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\w+|\s+"), "known to be exact"),
        (lambda s: s["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"), "one regular expression"),
        (lambda s: s["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True), "one regular expression"),
        (lambda s: s["model"].update(dropout=0.1), "dropout"),
        (lambda s: s["model"]["vocab"].pop("\u0100"), "lacks 1 of the 256 bytes"),
        (lambda s: s["model"].update(ignore_merges=True, vocab=s["model"]["vocab"] | {"zzz": 479}), "without merges"),
        (lambda s: s["added_tokens"].append(added(480, "<a>", lstrip=True)), "takes blanks"),
        (lambda s: s["added_tokens"].extend([added(480, "<a>"), added(481, "<a>b")]), "begins another"),
    ):
        changed = copy.deepcopy(spec)
        change(changed)
        yield reason, changed


def added(token_id: int, content: str, *, lstrip: bool = False) -> dict:
    flags = {"single_word": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": token_id, "content": content, "lstrip": lstrip, **flags}


def test_a_pipeline_that_tiktoken_cannot_express_stays_with_the_library_and_says_why(
    tokenizers: dict[str, Path],
) -> None:
    spec = load_tokenizer(tokenizers["bpe"]).spec
    assert spec is not None
    assert fast_bpe.why_not(spec) is None
    for reason, changed in variants(spec):
        assert reason in (fast_bpe.why_not(changed) or "")


def test_a_normalizer_keeps_the_library(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    library = Library.from_file(str(tokenizers["bpe"] / "tokenizer.json"))
    library.normalizer = normalizers.NFC()
    library.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert "because it has a normalizer (NFC)" in fast_bpe.accelerate(loaded)
    assert loaded.engine == "tokenizers"
    assert loaded.cut is None  # and long texts are encoded whole


def test_merges_that_tiktoken_would_do_otherwise_are_found_out(tmp_path: Path) -> None:
    alphabet = {char: i for i, char in enumerate(sorted(BYTE_OF_CHAR))}
    merges = [("x", "a"), ("b", "c"), ("a", "bc"), ("x", "abc")]  # tiktoken also joins "xa" and "bc"
    vocabulary = alphabet | {left + right: 256 + i for i, (left, right) in enumerate(merges)}
    library = Library(models.BPE(vocabulary, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert fast_bpe.why_not(loaded.spec or {}) is None
    assert "because tiktoken gives other ids for 'xabc'" in fast_bpe.accelerate(loaded)
    assert loaded.encode("xabc").tolist() == library.encode("xabc").ids


@pytest.mark.parametrize("merge_ids", [{"he": 299, "lo": 0, "llo": 300}, {"he": 0, "lo": 299, "llo": 300}])
def test_ids_in_any_order_and_added_tokens_pass_through_tiktoken(tmp_path: Path, merge_ids: dict[str, int]) -> None:
    vocabulary = merge_ids | {char: i + 1 for i, char in enumerate(sorted(BYTE_OF_CHAR, reverse=True))}
    library = Library(models.BPE(vocabulary, [("h", "e"), ("l", "o"), ("l", "lo")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_tokens(["<extra>"])
    library.add_special_tokens(["<stop>"])
    library.save(str(tmp_path / "tokenizer.json"))
    slow, fast = load_tokenizer(tmp_path), load_tokenizer(tmp_path)
    assert "encoding with tiktoken" in fast_bpe.accelerate(fast)
    for text in (*NASTY, "hello<extra>hello<stop> <extra> <extra"):
        assert fast.encode(text).tolist() == slow.encode(text).tolist()
    assert library.token_to_id("<extra>") in fast.encode("a<extra>b").tolist()
    assert fast.spec is not None
    assert (fast_bpe.encoding_of(fast.spec)[1] is None) == (merge_ids["he"] < merge_ids["lo"])  # ids rise: no table


def test_the_real_tokenizers_and_texts(shared: Path) -> None:
    gpt2 = load_tokenizer(shared / "tokenizers" / "gpt2")
    slow = load_tokenizer(shared / "tokenizers" / "gpt2")
    assert (gpt2.vocab_size, gpt2.eos_id) == (50257, 50256)
    texts = [json.loads(line)["text"] for line in (shared / "c4_en_1k.jsonl").read_text().splitlines()[:100]]
    texts += [json.loads(line)["text"] for line in (shared / "udhr_multilingual.jsonl").read_text().splitlines()[:10]]
    assert "encoding with tiktoken" in fast_bpe.accelerate(gpt2)
    for text in texts:
        assert gpt2.encode(text).tolist() == slow.encode(text).tolist()
        assert gpt2.decode(gpt2.encode(text)) == text
    titan = load_tokenizer(shared / "tokenizers" / "titan_bpe_2k")
    assert (titan.vocab_size, titan.bos_id, titan.eos_id) == (2020, 2002, 2003)
    assert "lacks 162 of the 256 bytes" in fast_bpe.accelerate(titan)
    ranks = load_tokenizer(shared / "tokenizers" / "tiktoken_small.model")
    assert (ranks.kind, ranks.vocab_size, ranks.bos_id) == ("tiktoken", 2256, 2000)
    pieces = load_tokenizer(shared / "tokenizers" / "sentencepiece_m.model")
    assert (pieces.kind, pieces.vocab_size, pieces.bos_id, pieces.eos_id) == ("sentencepiece", 2000, 1, 2)


# ---- training


def test_training_states_its_ids_and_is_the_same_in_another_process(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{PROSE[i % 200 :]} {i * i}"}) + "\n" for i in range(200)))
    for kind, ids in (("sentencepiece", (1, 2, 3)), ("bpe", (0, 1, 2))):
        made = train_tokenizer([str(text)], tmp_path / kind, kind=kind, vocab_size=440)
        assert (made.vocab_size, (made.bos_id, made.eos_id, made.pad_id)) == (440, ids)
        command = [sys.executable, "-m", "data_prep", "tokenizer", str(text), "--kind", kind, "--vocab-size", "440"]
        env = os.environ | {"PYTHONHASHSEED": "7"}
        subprocess.run([*command, "--out", str(tmp_path / f"{kind}2")], check=True, env=env, capture_output=True)
        for path in (tmp_path / kind).iterdir():
            assert path.read_bytes() == (tmp_path / f"{kind}2" / path.name).read_bytes()


def test_training_on_a_sample_takes_it_from_all_over_the_input(tmp_path: Path) -> None:
    from data_prep import files
    from data_prep.tokenizer_train import sample

    for name in "abcd":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name * 100}) * 0 + "".join(
            json.dumps({"text": name * 100}) + "\n" for _ in range(2000)))  # fmt: skip
    found, _ = files.find([str(tmp_path)])
    texts = list(sample(found, 40_000, "text"))
    assert {text[0] for text in texts} == set("abcd")
    assert 10_000 < sum(map(len, texts)) <= 40_000
    assert texts == list(sample(found, 40_000, "text"))


def test_impossible_trainings_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("only a few words")
    for kind, message in (("sentencepiece", "cannot train a vocabulary of 5000"), ("bpe", "yields")):
        with pytest.raises(DataError, match=message):
            train_tokenizer([str(text)], tmp_path / "out", kind=kind, vocab_size=5000)
        with pytest.raises(DataError, match="vocab_size=100 is too small"):
            train_tokenizer([str(text)], tmp_path / "out", kind=kind, vocab_size=100)
    with pytest.raises(DataError, match="kind='word' is none of sentencepiece, bpe"):
        train_tokenizer([str(text)], tmp_path / "out", kind="word", vocab_size=500)
    text.write_text("")
    with pytest.raises(DataError, match="no text to train a tokenizer on"):
        train_tokenizer([str(text)], tmp_path / "out", kind="bpe", vocab_size=500)
    assert not list((tmp_path / "out").iterdir())  # what failed left nothing, so the folder may be used again
    (tmp_path / "out" / "thesis.txt").touch()
    with pytest.raises(DataError, match="exists and is not empty; choose another folder or remove it"):
        train_tokenizer([str(text)], tmp_path / "out", kind="bpe", vocab_size=500)


def test_transformers_reads_the_trained_folders_and_gives_the_same_ids(tokenizers: dict[str, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    for kind in ("bpe", "sentencepiece"):
        ours, theirs = load_tokenizer(tokenizers[kind]), transformers.AutoTokenizer.from_pretrained(tokenizers[kind])
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (
            ours.bos_id,
            ours.eos_id,
            ours.pad_id,
        )
        for text in ("The quick brown fox", "def f(x):\n    return x ** 2", "caf\u00e9 \u5929\u5730 123"):
            assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text).tolist()


_loaded: dict[Path, Tokenizer] = {}


def load_once(path: Path) -> Tokenizer:
    if path not in _loaded:
        _loaded[path] = load_tokenizer(path)
    return _loaded[path]
