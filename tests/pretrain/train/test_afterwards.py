"""From text to a Hugging Face folder and back into training, by the commands that a person types."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data_prep import cli as data_cli
from pretrain import cli
from pretrain.train.checkpoint import load_model_weights
from pretrain.train.stored_model import open_model

ROOT = Path(__file__).resolve().parents[3]
CONFIG = """
run = {{ name = "walk", dir = "{run}" }}
model = {{ vocab_size = 400, d_model = 48, n_layers = 2, n_heads = 4, n_kv_heads = 2, d_ff = 96, max_seq_len = 128 }}
data = {{ sources = [ {{ path = "{data}" }} ], seq_len = 64 }}
train = {{ steps = 5, global_batch_size = 4, micro_batch_size = 2 }}
optimizer = {{ lr = 1e-3 }}
schedule = {{ warmup_steps = 1 }}
precision = {{ compute = "fp32" }}
compile = {{ enabled = false }}
eval = {{ every = 5 }}
metrics = {{ every = 5, sinks = ["jsonl"] }}
"""


def train(config: Path, *overrides: str) -> None:
    """In a process of its own: a run joins a process group and changes global state."""
    command = [sys.executable, "-m", "pretrain", "train", str(config), *overrides]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_trained_run_is_evaluated_exported_sampled_and_trained_on(tmp_path, capsys):  # G35
    import transformers

    draw = random.Random(1)
    words = ["def", "return", "for", "in", "if", "not", "else", "class", "import", "from", "self", "value", "name"]
    words += ["table", "rows", "step", "loss", "none", "true", "list"]
    for number in range(60):
        text = " ".join(draw.choice(words) + draw.choice(["", ":", ",", "_", "(x)", " = 1\n"]) for _ in range(60))
        (tmp_path / f"text-{number}.txt").write_text(text)
    inputs, tok, data, run = str(tmp_path / "text-*.txt"), tmp_path / "tok", tmp_path / "data", tmp_path / "run"
    tokenizer = ["tokenizer", inputs, "--out", str(tok), "--kind", "sentencepiece", "--vocab-size", "350"]
    assert data_cli.main(tokenizer) == 0
    build = ["build", inputs, "--tokenizer", str(tok), "--out", str(data), "--seq-len", "64", "--val-fraction", "0.2"]
    assert data_cli.main([*build, "--workers", "1"]) == 0
    config = tmp_path / "walk.toml"
    config.write_text(CONFIG.format(run=run, data=data))
    train(config)
    capsys.readouterr()

    # eval says what the run said of the same step.
    assert cli.main(["eval", str(run), "--data", str(data), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "val_loss" in line][-1]
    assert found["step"] == logged["step"] == 5
    assert found["val_loss"] == pytest.approx(logged["val_loss"], rel=1e-5)
    assert found["val_bits_per_byte"] == pytest.approx(logged["val_bits_per_byte"], rel=1e-5)

    # The export has the tokenizer's 350 rows of the model's 400; no other id is ever drawn.
    assert cli.main(["export", str(run), "--out", str(tmp_path / "hf")]) == 0
    assert "50 rows of padding left out" in capsys.readouterr().out
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values())
    assert model.config.vocab_size == model.lm_head.weight.size(0) == 350
    prompts = ["--prompt", "def "] * 100
    sample = ["generate", str(run), *prompts, "--max-new-tokens", "100", "--temperature", "5", "--json"]
    assert cli.main(sample) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ids = [i for row in rows for i in row["tokens"]]
    assert len(ids) > 5000
    assert 300 < max(ids) < 350

    # Greedy text of the export, by transformers, is that of the checkpoint, by us.
    assert cli.main(["generate", str(run), "--prompt", "def ", "--temperature", "0", "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)
    theirs_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    start = torch.tensor([theirs_tokenizer.encode("def ")])
    assert start[0].tolist() == ours["prompt_tokens"]
    generated = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=20, do_sample=False)
    assert generated[0, start.size(1) :].tolist() == ours["tokens"][:20]

    # Imported again, it is where another run starts from.
    assert cli.main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "imported")]) == 0
    imported = load_model_weights(tmp_path / "imported")
    trained = load_model_weights(open_model(run).path)
    assert torch.equal(imported["output.weight"], trained["output.weight"][:350])
    second = ["run.name=next", f"run.dir={tmp_path / 'next'}", "model.vocab_size=350", "train.steps=1"]
    train(config, *second, f"init.from={tmp_path / 'imported'}", "optimizer.lr=1e-30", "optimizer.weight_decay=0")
    moved = load_model_weights(open_model(tmp_path / "next").path)
    assert all(torch.equal(moved[name], imported[name]) for name in imported)
