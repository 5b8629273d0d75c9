"""Checkpoints to Hugging Face folders and back, judged by transformers, and the commands on a stored model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from data_prep.errors import DataError
from data_prep.pack import pack_dataset
from data_prep.shard import Manifest, ShardWriter, TokenizerInfo, shard_path, write_sources
from data_prep.tokenizer import load_tokenizer
from pretrain import cli
from pretrain.config import ModelConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.model.init import init_weights
from pretrain.model.llama import Llama
from pretrain.train import checkpoint_folder as folder
from pretrain.train.checkpoint import load_model_weights, write_weights
from pretrain.train.convert import export_model, import_model, plan_files
from pretrain.train.stored_model import load_model, open_model

SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
TEXT = "train the model well . so that a small one can read and write what it was told <pad>"


def config(**sizes) -> ModelConfig:
    small = {"vocab_size": 128, "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 96}
    return ModelConfig.model_validate(small | {"head_dim": 32, "max_seq_len": 64} | sizes)


def write_tokenizer_json(target: Path, size: int = 97) -> None:
    """A byte-level tokenizer.json of `size` ids: BOS 0, EOS 1, padding 2, then bytes that text may have."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    target.mkdir(parents=True)
    letters = [chr(c) for c in range(33, 127) if chr(c) != '"'][: size - 4]
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", "<pad>", "\u0120", *letters])}
    library = Tokenizer(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r" ?\S+|\s+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>", "<pad>"])
    library.save(str(target / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (target / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))


def make_run(where: Path, cfg: ModelConfig, *, tokenizer: bool = True, seed: int = 1) -> Path:
    """A run folder with one checkpoint, its weights straight from the initialisation."""
    model = Llama(cfg)
    init_weights(model, seed, cfg.n_layers)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    data = {"seq_len": 32, "packing": "best_fit", "mask_documents": True}
    meta = {"step": 5, "rows_consumed": 40, "tokens": 0, "targets": 0}
    meta["config"] = {"model": cfg.model_dump(mode="json"), "data": data}
    (where / "checkpoints").mkdir(parents=True)
    write_weights(folder.step_dir(where, 5), weights, meta)
    if tokenizer:
        write_tokenizer_json(where / "tokenizer")
    return where


def logits(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, positions=torch.arange(tokens.size(1)).expand_as(tokens))


def stored_logits(run: Path, tokens: torch.Tensor) -> torch.Tensor:
    return logits(load_model(open_model(run), torch.device("cpu"), torch.float32), tokens)


def load_strictly(path: Path) -> transformers.LlamaForCausalLM:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize("tied", [False, True])
def test_an_export_loads_strictly_in_transformers_with_equal_logits_and_comes_back(tmp_path, tied, capsys):  # G34
    cfg = config(vocab_size=97, tie_embeddings=tied, norm_eps=1e-6, rope_scaling=SCALED)
    run = make_run(tmp_path / "run", cfg)
    assert cli.main(["export", str(run), "--out", str(tmp_path / "hf")]) == 0
    assert "1 file of weights" in capsys.readouterr().out
    model = load_strictly(tmp_path / "hf")
    tokens = torch.randint(97, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = model(tokens).logits
    torch.testing.assert_close(stored_logits(run, tokens), theirs, atol=1e-4, rtol=0)
    assert model.config.tie_word_embeddings == tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    count = sum(p.numel() for p in Llama(cfg).parameters())
    assert sum(p.numel() for p in model.parameters()) == count
    assert sum(t.numel() for t in load_file(tmp_path / "hf/model.safetensors").values()) == count

    assert cli.main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "back")]) == 0
    back, before = open_model(tmp_path / "back"), open_model(run)
    assert back.model == cfg
    ours, again = load_model_weights(before.path), load_model_weights(back.path)
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    assert back.special == before.special == (0, (1,), 2)
    assert back.tokenizer.hash == before.tokenizer.hash
    # Out again, after the way back: the same files to the byte.
    export_model(back, tmp_path / "twice")
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes(), name


@pytest.mark.slow
def test_scaled_rope_norm_eps_and_head_size_survive_so_that_logits_agree_at_position_9000(tmp_path):  # G36
    cfg = config(max_seq_len=16_384, rope_theta=500_000.0, rope_scaling=SCALED, norm_eps=1e-6, n_layers=1)
    run = make_run(tmp_path / "run", cfg)
    export_model(open_model(run), tmp_path / "hf", keep_padding=True)
    written = json.loads((tmp_path / "hf/config.json").read_text())
    for rope in (written["rope_parameters"], written["rope_scaling"] | {"rope_theta": written["rope_theta"]}):
        assert rope == {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    assert (written["rms_norm_eps"], written["head_dim"]) == (1e-6, 32)
    tokens = torch.randint(97, (1, 9_001), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = load_strictly(tmp_path / "hf")(tokens).logits[0, [10, 9_000]]
    torch.testing.assert_close(stored_logits(run, tokens)[0, [10, 9_000]], theirs, atol=1e-4, rtol=0)
    assert import_model(tmp_path / "hf", tmp_path / "back") == cfg


def test_vocabulary_padding_reaches_neither_the_export_nor_a_sample(tmp_path, capsys):  # G35
    run = make_run(tmp_path / "run", config())
    export_model(open_model(run), tmp_path / "hf")
    model = load_strictly(tmp_path / "hf")
    assert model.config.vocab_size == model.model.embed_tokens.weight.size(0) == model.lm_head.weight.size(0) == 97
    tokens = torch.randint(97, (1, 30))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, stored_logits(run, tokens)[..., :97], atol=1e-4, rtol=0)
    export_model(open_model(run), tmp_path / "padded", keep_padding=True)
    assert load_strictly(tmp_path / "padded").config.vocab_size == 128
    ids = []
    for seed in range(2):
        prompts = ["--prompt", "a"] * 100
        command = ["generate", str(run), *prompts, "--max-new-tokens", "50", "--temperature", "5", "--seed", str(seed)]
        assert cli.main([*command, "--json"]) == 0
        ids += [i for line in capsys.readouterr().out.splitlines() for i in json.loads(line)["tokens"]]
    assert max(ids) == 96
    assert len(set(ids)) > 90


@pytest.mark.parametrize("ends", [7, [7], [5, 7, 9], None])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_end_ids_survive_import_and_export(tmp_path, ends, file):  # G47
    run = make_run(tmp_path / "run", config(vocab_size=97))
    export_model(open_model(run), tmp_path / "hf")
    if file == "config.json":
        (tmp_path / "hf/generation_config.json").unlink()
    values = json.loads((tmp_path / "hf" / file).read_text()) | {"eos_token_id": ends}
    (tmp_path / "hf" / file).write_text(json.dumps(values))
    import_model(tmp_path / "hf", tmp_path / "back")
    expected = () if ends is None else (7,) if ends in (7, [7]) else (5, 7, 9)
    back = open_model(tmp_path / "back")
    assert back.special.eos_ids == expected
    export_model(back, tmp_path / "again")
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "again" / name).read_text())["eos_token_id"]
        assert written == ([5, 7, 9] if len(expected) > 1 else 7 if expected else None)
    library = transformers.GenerationConfig.from_pretrained(tmp_path / "again")
    assert library.eos_token_id == written


def test_large_weights_are_cut_into_files_with_an_index_that_transformers_follows(tmp_path):
    run = make_run(tmp_path / "run", config(vocab_size=97))
    done = export_model(open_model(run), tmp_path / "hf", dtype="bf16", max_shard_bytes=30_000)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) == done.files > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    total = 0
    for name in files:
        with safe_open(tmp_path / "hf" / name, "pt") as f:
            sizes = [f.get_tensor(key).nbytes for key in f.keys()]  # noqa: SIM118
            assert all(index["weight_map"][key] == name for key in f.keys())  # noqa: SIM118
        assert sum(sizes) <= 30_000 or len(sizes) == 1
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total == done.num_bytes
    model = load_strictly(tmp_path / "hf")
    assert model.dtype == torch.bfloat16
    ours = load_model(open_model(run), torch.device("cpu"), torch.bfloat16)
    assert torch.equal(model.lm_head.weight, ours.output.weight)
    # And our own import follows it too.
    import_model(tmp_path / "hf", tmp_path / "back")
    assert torch.equal(load_model_weights(tmp_path / "back")["output.weight"], ours.output.weight.float())


def test_files_are_filled_in_order_up_to_the_limit():
    assert plan_files({"a": 3, "b": 3, "c": 4, "d": 9, "e": 1}, 7) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert plan_files({"a": 3, "b": 4}, 7) == [["a", "b"]]


@pytest.mark.parametrize("kind", ["sentencepiece", "bpe"])
def test_the_exported_tokenizer_gives_the_same_ids_in_transformers(tmp_path, kind):
    from data_prep.tokenizer_train import train_tokenizer

    words = TEXT.split()
    lines = [" ".join(words[i:] + words[:i]) + "\n    def f(x):  # 123\n" for i in range(len(words))] * 4
    (tmp_path / "text.txt").write_text("\n".join(lines))
    train_tokenizer([str(tmp_path / "text.txt")], tmp_path / "tok", kind=kind, vocab_size=330)
    check_exported_tokenizer(load_tokenizer(tmp_path / "tok"), tmp_path)


def test_an_exported_tiktoken_gives_the_same_ids_in_transformers(tmp_path):
    import base64

    words = [bytes([i]) for i in range(256)] + [b" t", b"he", b" the", b"in", b"ing", b"  ", b"    ", b"\n\n", b" m"]
    text = "".join(f"{base64.b64encode(word).decode()} {rank}\n" for rank, word in enumerate(words))
    (tmp_path / "tokenizer.model").write_text(text)
    check_exported_tokenizer(load_tokenizer(tmp_path / "tokenizer.model"), tmp_path)


def test_a_tokenizer_that_no_json_equals_goes_out_with_its_own_files(tmp_path):
    import sentencepiece

    text = iter([" ".join(TEXT.split()[i:]) for i in range(18)] * 5)
    settings = {"model_type": "unigram", "vocab_size": 30, "normalization_rule_name": "nmt_nfkc", "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.Train(sentence_iterator=text, model_prefix=str(tmp_path / "m"), **settings)
    run = make_run(tmp_path / "run", config(), tokenizer=False)
    load_tokenizer(tmp_path / "m.model").save(run / "tokenizer")
    assert export_model(open_model(run), tmp_path / "hf").tokenizer == "tokenizer files as they were"
    assert (tmp_path / "hf/tokenizer.model").read_bytes() == (tmp_path / "m.model").read_bytes()
    assert not (tmp_path / "hf/tokenizer.json").exists()


def check_exported_tokenizer(tokenizer, tmp_path):
    run = make_run(tmp_path / "run", config(vocab_size=tokenizer.vocab_size + 3), tokenizer=False)
    tokenizer.save(run / "tokenizer")
    done = export_model(open_model(run), tmp_path / "hf")
    assert done.vocab_size == tokenizer.vocab_size
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    texts = ["train the  model\n\n    well ", " a blank first", "", "naïve 中文 🙂 0123456789", "\tx = [1, 2]\r\n"]
    for text in texts:
        ids = tokenizer.encode(text).tolist()
        assert theirs.encode(text, add_special_tokens=False) == ids, text
        assert theirs.decode(ids) == tokenizer.decode(ids), text
    model = load_strictly(tmp_path / "hf")
    assert model.generation_config.eos_token_id == (
        list(tokenizer.eos_ids) if len(tokenizer.eos_ids) > 1 else tokenizer.eos_id
    )


def test_generate_continues_each_prompt_and_is_decided_by_its_seed(tmp_path, capsys):
    run = make_run(tmp_path / "run", config(vocab_size=97))

    def generate(*more: str) -> str:
        assert cli.main(["generate", str(run), "--prompt", "the model", "--max-new-tokens", "12", *more]) == 0
        return capsys.readouterr().out

    assert generate().startswith("the model")
    assert generate("--seed", "3") == generate("--seed", "3") != generate("--seed", "4")
    several = generate("--prompt", "a", "--temperature", "0", "--json").splitlines()
    assert [json.loads(line)["prompt"] for line in several] == ["the model", "a"]
    first = json.loads(several[0])
    assert first["prompt_tokens"][0] == 0
    assert first["tokens"] == json.loads(generate("--temperature", "0", "--json"))["tokens"]
    assert first["text"].startswith("the model")
    assert cli.main(["generate", str(run), "--prompt", "a", "--temperature", "0", "--top-k", "5"]) == 2
    assert "top_k=5" in capsys.readouterr().err


def make_dataset(where: Path, tokenizer_hash: str, vocab_size: int, seq_len: int = 32) -> list[np.ndarray]:
    """Documents in a packed data set, those of the validation split returned."""
    generator = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", 4), ("val", 9)):
        documents = [generator.integers(3, vocab_size, n) for n in generator.integers(5, 30, count)]
        path = where / "shards" / f"{split}-00000.tok"
        path.parent.mkdir(parents=True, exist_ok=True)
        with ShardWriter(path, vocab_size=vocab_size, tokenizer_hash=tokenizer_hash, bos_id=0, eos_id=1) as writer:
            for line, tokens in enumerate(documents, start=1):
                writer.add_document(tokens, source=0, line=line, num_bytes=3 * len(tokens))
            splits[split] = (writer.finish(),)
    info = TokenizerInfo("huggingface", tokenizer_hash, vocab_size, 0, 1, 2)
    Manifest(info, splits).write(where)
    write_sources(where, [])
    pack_dataset(where, seq_len, "best_fit")
    assert shard_path(where, splits["val"][0]).exists()
    return documents


def test_eval_is_the_mean_over_all_targets_of_the_validation_rows(tmp_path, capsys):
    run = make_run(tmp_path / "run", config())
    stored = open_model(run)
    documents = make_dataset(tmp_path / "data", stored.tokenizer.hash, 97)
    command = ["eval", str(run), "--data", str(tmp_path / "data"), "--micro-batch-size", "2", "--json"]
    assert cli.main(command) == 0
    found = json.loads(capsys.readouterr().out)
    model = load_model(stored, torch.device("cpu"), torch.float32)
    loss = targets = 0
    for tokens in documents:  # each shorter than a row, so packing cuts none
        row = torch.tensor(tokens).unsqueeze(0)
        loss += float(torch.nn.functional.cross_entropy(logits(model, row)[0, :-1], row[0, 1:], reduction="sum"))
        targets += len(tokens) - 1
    assert found["val_targets"] == targets
    assert found["val_loss"] == pytest.approx(loss / targets, rel=1e-5)
    num_bytes = sum(3 * len(tokens) for tokens in documents)
    assert found["val_bits_per_byte"] == pytest.approx(loss / np.log(2) / num_bytes, rel=1e-5)
    assert found["step"] == 5


def test_eval_refuses_data_of_another_tokenizer_or_without_what_it_needs(tmp_path, capsys):
    run = make_run(tmp_path / "run", config())
    make_dataset(tmp_path / "data", "ab" * 32, 97)
    assert cli.main(["eval", str(run), "--data", str(tmp_path / "data")]) == 2
    assert "was built with tokenizer abababababab" in capsys.readouterr().err
    assert cli.main(["eval", str(run), "--data", str(tmp_path / "none")]) == 2
    assert "manifest" in capsys.readouterr().err
    assert cli.main(["eval", str(run), "--data", str(tmp_path / "data"), "--seq-len", "100"]) == 2
    assert "--seq-len 100 is above model.max_seq_len=64" in capsys.readouterr().err


def test_a_checkpoint_argument_is_a_run_or_a_checkpoint_and_is_verified(tmp_path, capsys):
    run = make_run(tmp_path / "run", config())
    checkpoint = folder.step_dir(run, 5)
    assert open_model(run).path == open_model(checkpoint).path == checkpoint
    assert open_model(checkpoint).tokenizer.vocab_size == 97
    with pytest.raises(ConfigError, match="neither a checkpoint"):
        open_model(tmp_path / "nowhere")
    data = next(checkpoint.glob("rank-*.safetensors"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        open_model(checkpoint)
    assert cli.main(["export", str(run), "--out", str(tmp_path / "hf")]) == 1
    assert "no whole checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_a_model_without_its_tokenizer_exports_whole_and_generates_with_one_that_is_given(tmp_path, capsys):
    run = make_run(tmp_path / "run", config(vocab_size=97), tokenizer=False)
    assert cli.main(["generate", str(run), "--prompt", "a"]) == 2
    assert "--tokenizer PATH" in capsys.readouterr().err
    write_tokenizer_json(tmp_path / "tok")
    command = ["generate", str(run), "--prompt", "a", "--max-new-tokens", "2", "--tokenizer", str(tmp_path / "tok")]
    assert cli.main(command) == 0
    done = export_model(open_model(run), tmp_path / "hf")
    assert done.tokenizer is None
    assert json.loads((tmp_path / "hf/config.json").read_text())["eos_token_id"] is None
    small = make_run(tmp_path / "small", config(vocab_size=50), tokenizer=False)
    with pytest.raises(ConfigError, match=r"97 tokens, but the model only vocab_size=50"):
        open_model(small, tmp_path / "tok")


def test_an_export_is_whole_or_absent(tmp_path, monkeypatch):
    stored = open_model(make_run(tmp_path / "run", config()))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("kept")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export_model(stored, tmp_path / "full")
    assert (tmp_path / "full/file").read_text() == "kept"

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pretrain.train.convert.save_file", full_disk)
        with pytest.raises(OSError, match="No space left"):
            export_model(stored, tmp_path / "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "run"]
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
        with pytest.raises(CheckpointError, match="10 are free"):
            export_model(stored, tmp_path / "hf")
    (tmp_path / "hf.partial").mkdir()  # a folder of the user's
    export_model(stored, tmp_path / "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "hf", "hf.partial", "run"]


def test_an_import_of_weights_that_do_not_fit_their_config_is_refused_with_names(tmp_path):
    export_model(open_model(make_run(tmp_path / "run", config(tie_embeddings=True))), tmp_path / "hf")
    path, config_path = tmp_path / "hf/model.safetensors", tmp_path / "hf/config.json"
    weights, values = load_file(path), json.loads(config_path.read_text())

    def refused(message: str, changed: dict[str, torch.Tensor], **fields: object) -> None:
        save_file(changed, path)
        config_path.write_text(json.dumps(values | fields))
        with pytest.raises(ConfigError, match=message):
            import_model(tmp_path / "hf", tmp_path / "back")
        assert not (tmp_path / "back").exists()
        assert not list(tmp_path.glob(".back.partial*"))

    norm = "model.norm.weight"
    refused(f"1 missing .first {norm}", {k: v for k, v in weights.items() if k != norm})
    refused("1 unknown .first model.extra", weights | {"model.extra": torch.ones(1)})
    refused(r"model.norm.weight is \(3,\), but config.json makes it \(64,\)", weights | {norm: torch.ones(3)})
    refused("missing .first lm_head.weight", weights, tie_word_embeddings=False)
    other = torch.ones_like(weights["model.embed_tokens.weight"])
    refused("lm_head.weight is not the embedding", weights | {"lm_head.weight": other})
    path.write_bytes(b"garbage!")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        import_model(tmp_path / "hf", tmp_path / "back")
    path.unlink()
    with pytest.raises(ConfigError, match="pickled weights are not read"):
        import_model(tmp_path / "hf", tmp_path / "back")
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        import_model(tmp_path / "none", tmp_path / "back")
    # A copy of the tied head, and tables of old versions, change nothing.
    copy = weights["model.embed_tokens.weight"].clone()
    extra = {"lm_head.weight": copy, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    save_file(weights | extra, path)
    config_path.write_text(json.dumps(values))
    import_model(tmp_path / "hf", tmp_path / "back")
    assert torch.equal(load_model_weights(tmp_path / "back")["tok_embeddings.weight"], copy)


def test_an_import_without_a_tokenizer_says_so(tmp_path, capsys):
    export_model(open_model(make_run(tmp_path / "run", config(), tokenizer=False)), tmp_path / "hf")
    with pytest.raises(DataError):
        load_tokenizer(tmp_path / "hf")
    assert cli.main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "back")]) == 0
    out = capsys.readouterr()
    assert "no tokenizer was imported" in out.err
    assert f'init.from = "{tmp_path / "back"}"' in out.out
