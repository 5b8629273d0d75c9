"""What one does with a trained model: `pretrain eval`, `generate`, `export`, `import`. Parse, call, print.

A CHECKPOINT is a checkpoint's folder or a run's, whose newest whole checkpoint is taken. Heavy imports wait.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pretrain.train.stored_model import StoredModel

NEW_TOKENS = 128


def add_parser(commands: Any) -> None:
    """Add the four commands; each parsed namespace has `run`, which takes it and returns the exit status."""
    p = commands.add_parser("eval", help="loss and bits per byte of a checkpoint on a data set's validation rows")
    _checkpoint_argument(p)
    p.add_argument("--data", required=True, metavar="DIR", help="a folder made by pretrain-data build --val-fraction")
    p.add_argument("--seq-len", type=_positive, metavar="N", help="tokens a row (the run's own)")
    p.add_argument("--micro-batch-size", type=_positive, default=4, metavar="N", help="rows a forward (4)")
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=_eval)

    p = commands.add_parser("generate", help="continue prompts with a checkpoint")
    _checkpoint_argument(p)
    p.add_argument("--prompt", required=True, action="append", metavar="TEXT", help="may be given several times")
    most = f"at most so many a prompt ({NEW_TOKENS}, or what the model's length leaves)"
    p.add_argument("--max-new-tokens", type=int, metavar="N", help=most)
    p.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: always the likeliest token (1)")
    p.add_argument("--top-k", type=int, default=0, metavar="K", help="draw among the K likeliest (all)")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw among the likeliest of P together (1)")
    p.add_argument("--seed", type=_seed, default=0, metavar="S")
    p.add_argument("--json", action="store_true", help="one object a prompt, with token ids")
    p.set_defaults(run=_generate)

    p = commands.add_parser("export", help="write a checkpoint as a Hugging Face model folder")
    _checkpoint_argument(p)
    p.add_argument("--out", required=True, type=Path, metavar="DIR")
    p.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (fp32)")
    p.add_argument("--keep-vocab-padding", action="store_true", help="keep rows above the tokenizer's size")
    p.set_defaults(run=_export)

    p = commands.add_parser("import", help="make a checkpoint of a Hugging Face Llama folder, for init.from")
    p.add_argument("source", metavar="HF_DIR", type=Path)
    p.add_argument("--out", required=True, type=Path, metavar="CHECKPOINT")
    p.set_defaults(run=_import)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is wanted, not {text}")
    return int(text)


def _seed(text: str) -> int:
    if not 0 <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"a whole number from 0 to 2^63 - 1 is wanted, not {text}")
    return int(text)


def _checkpoint_argument(p: argparse.ArgumentParser) -> None:
    p.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a checkpoint or run folder")
    p.add_argument("--tokenizer", metavar="PATH", type=Path, help="file or folder (the one kept with the run)")


def _eval(args: argparse.Namespace) -> int:
    from pretrain.train.evaluate_stored import evaluate_stored

    stored = _open(args)
    device, dtype = _device()
    metrics = evaluate_stored(
        stored, args.data, device=device, dtype=dtype, seq_len=args.seq_len, micro_batch_size=args.micro_batch_size
    )
    if args.json:
        print(json.dumps({"checkpoint": str(stored.path), "step": stored.meta["step"], **metrics}))
    else:
        print(
            f"{stored.path} | step {stored.meta['step']} | val_loss {metrics['val_loss']:.4f} | val_bits_per_byte "
            f"{metrics['val_bits_per_byte']:.4f} | {metrics['val_targets']:,.0f} targets | {_short(dtype)} on {device}"
        )
    return 0


def _generate(args: argparse.Namespace) -> int:
    from pretrain.model.generate import Sampling, generate
    from pretrain.train.stored_model import load_model

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    stored = _open(args)
    tokenizer, special = stored.need_tokenizer(), stored.special
    # As documents begin in training: with BOS, where there is one that does not end them as well.
    bos = tokenizer.bos_id is not None and tokenizer.bos_id not in tokenizer.eos_ids
    prompts = [tokenizer.encode(text, bos=bos, parse_special=True).tolist() for text in args.prompt]
    room = stored.model.max_seq_len - max(map(len, prompts))
    count = min(NEW_TOKENS, room) if args.max_new_tokens is None else args.max_new_tokens
    device, dtype = _device()
    rows = generate(
        load_model(stored, device, dtype),
        prompts,
        max_new_tokens=count,
        sampling=sampling,
        end_ids=special.eos_ids,
        vocab_size=stored.vocab_size,
        pad_id=special.pad_id,
    ).rows()
    for text, prompt, row in zip(args.prompt, prompts, rows, strict=True):
        ended = bool(row) and row[-1] in special.eos_ids
        new = tokenizer.decode(prompt + (row[:-1] if ended else row), skip_special=True)
        if args.json:
            print(json.dumps({"prompt": text, "text": new, "prompt_tokens": prompt, "tokens": row, "ended": ended}))
        else:
            print(new if len(rows) == 1 else f"--- {text!r}\n{new}")
    return 0


def _export(args: argparse.Namespace) -> int:
    from pretrain.train.convert import export_model

    stored = _open(args)
    done = export_model(stored, args.out, dtype=args.dtype, keep_padding=args.keep_vocab_padding)
    left_out = stored.model.vocab_size - done.vocab_size
    print(
        f"{args.out} | {done.files} file{'s' if done.files > 1 else ''} of weights, {done.num_bytes / 1e9:.3f} GB "
        f"{args.dtype} | vocabulary {done.vocab_size}"
        f"{f' ({left_out} rows of padding left out)' if left_out else ''} | "
        f"{done.tokenizer or 'no tokenizer is kept with this checkpoint, so none is in the folder'}"
    )
    return 0


def _import(args: argparse.Namespace) -> int:
    from pretrain.metrics.flops import parameter_counts
    from pretrain.train.convert import import_model

    model = import_model(args.source, args.out, _say)
    print(f'{args.out} | {parameter_counts(model).total:,} parameters | start from it with init.from = "{args.out}"')
    return 0


def _open(args: argparse.Namespace) -> "StoredModel":
    from pretrain.train.stored_model import open_model

    return open_model(args.checkpoint, args.tokenizer, _say)


def _device() -> "tuple[torch.device, torch.dtype]":
    """The first GPU in bf16, or the CPU in fp32."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", 0), torch.bfloat16
    return torch.device("cpu"), torch.float32


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
