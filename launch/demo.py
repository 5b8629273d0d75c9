"""`make demo`: the whole way on this machine, by the same commands a person would type, on text that every Python has.

Trains a tokenizer and packs shards from the standard library's own source, plans, trains on two CPU ranks, stops in the
middle, resumes, plots, validates, exports and writes a sample. Needs no data, GPU or account.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

RUN = Path("runs/demo")
CONFIG = "configs/demo.toml"
STOP_AFTER = 45  # steps


def main() -> int:
    begun = time.monotonic()
    shutil.rmtree(RUN, ignore_errors=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    text = [str(library / "*.py"), *(str(library / name) for name in ("asyncio", "email", "http", "json", "unittest"))]
    step("1/8  a tokenizer from the standard library's source")
    kind = ("--kind", "sentencepiece", "--vocab-size", "4096")
    call("pretrain-data", "tokenizer", *text, "--out", f"{RUN}/tokenizer-made", *kind)
    step("2/8  packed token shards")
    call(
        *("pretrain-data", "build", *text, "--tokenizer", f"{RUN}/tokenizer-made", "--out", f"{RUN}/data"),
        *("--seq-len", "256", "--val-fraction", "0.05", "--workers", "2"),
        quiet=True,
    )
    call("pretrain-data", "verify", f"{RUN}/data")
    step("3/8  what it will cost")
    call("pretrain", "plan", CONFIG)
    step(f"4/8  training on two ranks, stopped after step {STOP_AFTER} (by touching {RUN}/STOP)")
    train_and_stop()
    step("5/8  the same command again: it resumes by itself")
    call("pretrain-launch", "local", CONFIG, "--nproc", "2")
    step("6/8  the loss")
    first, last = plot_loss(RUN / "metrics.jsonl", RUN / "loss.png")
    call("pretrain", "eval", str(RUN), "--data", f"{RUN}/data")
    step("7/8  a Hugging Face folder")
    call("pretrain", "export", str(RUN), "--out", f"{RUN}/hf")
    step("8/8  a sample")
    call(
        *("pretrain", "generate", str(RUN), "--prompt", "def __init__(self, ", "--max-new-tokens", "60"),
        *("--temperature", "0.7", "--top-k", "50", "--seed", "1"),
    )
    events = [json.loads(line)["event"] for line in (RUN / "events.jsonl").read_text().splitlines()]
    print(f"\nDone in {time.monotonic() - begun:.0f} s. The loss fell from {first:.2f} to {last:.2f} nats a token.")
    print(f"Events of the run: {', '.join(events)}")
    print(f"""
Where everything lies:
  {RUN}/data          packed shards        (pretrain-data inspect {RUN}/data --row 0)
  {RUN}/metrics.jsonl one line a window    {RUN}/loss.png  the curve
  {RUN}/checkpoints   whole or absent      (pretrain checkpoint list {RUN})
  {RUN}/hf            for transformers     (AutoModelForCausalLM.from_pretrained("{RUN}/hf"))
What to try next:
  pretrain-launch local {CONFIG} --nproc 2 run.name=mine run.dir=runs/mine train.steps=300
  pretrain plan configs/llama3_8b.toml --gpus 128 --device h100-sxm
  pretrain-data build YOUR_TEXT --tokenizer {RUN}/tokenizer-made --out data/mine --seq-len 256""")
    if not last < first - 1:
        print(
            f"error: the loss should have fallen by more than 1, from {first:.2f}, but is {last:.2f}", file=sys.stderr
        )
        return 1
    return 0


def step(title: str) -> None:
    print(f"\n=== {title}", flush=True)


def command(*args: str) -> list[str]:
    """The console script beside this Python, so that no PATH is needed."""
    return [str(Path(sys.executable).with_name(args[0])), *args[1:]]


def call(*args: str, quiet: bool = False) -> None:
    print("$ " + " ".join(args if len(args) < 14 else (*args[:13], "...")), flush=True)
    done = subprocess.run(command(*args), stdout=subprocess.PIPE if quiet else None, text=True)
    if done.returncode:
        print(done.stdout or "")
        raise SystemExit(f"error: {args[0]} {args[1]} ended with status {done.returncode}")


def train_and_stop() -> None:
    """Start the run and, once it has done STOP_AFTER steps, ask it to stop as a person would."""
    args = ("pretrain-launch", "local", CONFIG, "--nproc", "2")
    print("$ " + " ".join(args), flush=True)
    job = subprocess.Popen(command(*args))
    while job.poll() is None and steps_done(RUN / "metrics.jsonl") < STOP_AFTER:
        time.sleep(0.2)
    (RUN / "STOP").touch()
    status = job.wait()
    if status != 75:
        raise SystemExit(f"error: a run that was asked to stop should end with status 75, not {status}")
    print("stopped and saved, status 75: start me again", flush=True)


def steps_done(metrics: Path) -> int:
    try:
        lines = metrics.read_text().splitlines()
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (FileNotFoundError, ValueError):
        return 0


def plot_loss(metrics: Path, out: Path) -> tuple[float, float]:
    """Draw training and validation loss against the step; the first and last training loss."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    import matplotlib.pyplot as plt

    lines = {}
    for text in metrics.read_text().splitlines():
        line = json.loads(text)
        lines[line["step"], "val_loss" in line] = line  # the last line of a step counts
    train = [(step, line["loss"]) for (step, val), line in sorted(lines.items()) if not val]
    val = [(step, line["val_loss"]) for (step, val), line in sorted(lines.items()) if val]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*zip(*train, strict=True), label="training, mean of a window")
    if val:
        axes.plot(*zip(*val, strict=True), "o", label="validation")
    axes.set(xlabel="optimizer step", ylabel="loss (nats a token)", title="demo: Python's own source, two CPU ranks")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=120)
    print(f"{out}: from {train[0][1]:.3f} (step {train[0][0]}) to {train[-1][1]:.3f} (step {train[-1][0]})")
    return train[0][1], train[-1][1]


if __name__ == "__main__":
    sys.exit(main())
