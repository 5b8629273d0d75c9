"""The sides that benchmarks measure, one a process: build a model and its update, then a step for every line of input.

    python benchmarks/sides.py '{"side": "torchtitan", "precision": "bf16", ...}'

Run by `step.py` with the Python of the side's own environment: this file imports torch alone, and each function what
its side needs. All have the same shapes, tokens, clipping by the global norm and fused AdamW; ours and transformers'
the same weights too. Each prints one line of JSON when it is built, and one after every step.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLIP = 1.0
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Job:
    """What a process measures. `mixed`: fp32 weights, bf16 compute; our engine, or torch.autocast around the others."""

    side: str = "ours"
    precision: str = "fp32"  # fp32 | bf16 | mixed
    compiled: bool = False
    recompute: str = "none"  # ours
    chunks: int = 8  # ours: of the loss
    vocab: int = 32_000
    d_model: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    d_ff: int = 1536
    seq_len: int = 512
    batch: int = 4  # rows of all ranks
    threads: int = 1
    ranks: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES["bf16" if self.precision == "bf16" else "fp32"]


Step = Callable[[Tensor, Tensor], Tensor | None]  # inputs, labels [B, T]; one update; the mean loss before it


def ours(job: Job) -> Step:
    from pretrain.config_tables import ActivationCheckpointConfig
    from pretrain.model.llama import Llama
    from pretrain.parallel.activation_checkpoint import apply_activation_checkpoint
    from pretrain.parallel.compile import compile_blocks

    if job.precision == "mixed":
        return _our_engine(job)
    model = Llama(our_sizes(job), activations=job.dtype, loss_chunks=job.chunks)
    model.load_state_dict(_our_weights(job))
    model.to(job.dtype)
    apply_activation_checkpoint(model, ActivationCheckpointConfig(mode=job.recompute))  # type: ignore[arg-type]
    if job.compiled:
        compile_blocks(model)
    positions = _positions(job)
    return update(model, lambda x, y: model(x, positions=positions, labels=y).total / y.numel())


def our_sizes(job: Job) -> Any:
    from pretrain.config_tables import ModelConfig

    sizes = {"vocab_size": job.vocab, "n_layers": job.layers, "n_heads": job.heads, "n_kv_heads": job.kv_heads}
    return ModelConfig.model_validate(sizes | {"d_model": job.d_model, "d_ff": job.d_ff, "max_seq_len": job.seq_len})


def _our_weights(job: Job) -> dict[str, Tensor]:
    from pretrain.model.init import init_weights
    from pretrain.model.llama import Llama

    model = Llama(our_sizes(job))
    init_weights(model, 0, job.layers)
    return model.state_dict()


def _our_engine(job: Job) -> Step:
    from pretrain.config_file import parse_config
    from pretrain.data.loader import Batch
    from pretrain.dist import world
    from pretrain.parallel.build import build_engine

    rows = job.batch // job.ranks
    cfg = parse_config(
        {
            "run": {"name": "step", "dir": "step", "seed": 0},
            "model": our_sizes(job).model_dump(exclude_none=True),
            "data": {"sources": [{"path": "none"}], "seq_len": job.seq_len, "mask_documents": False},
            "train": {"steps": 1, "global_batch_size": job.batch, "micro_batch_size": rows, "grad_clip": CLIP},
            "optimizer": {"lr": ADAMW["lr"]},
            "schedule": {"warmup_steps": 0},
            "activation_checkpoint": {"mode": job.recompute},
            "loss": {"chunks": job.chunks},
            "compile": {"enabled": job.compiled},
        }
    )
    place = world(600).__enter__()  # for the life of this process
    engine = build_engine(
        cfg, cfg.layout(job.ranks), place, lambda model: torch.optim.AdamW(model.parameters(), **ADAMW)
    )
    mine = slice(place.rank * rows, (place.rank + 1) * rows)
    positions = _positions(job)[mine]
    ends = torch.arange(0, rows * job.seq_len + 1, job.seq_len, dtype=torch.int32)

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        batch = Batch(inputs[mine], labels[mine], positions, torch.zeros_like(positions), ends, job.seq_len)
        loss = engine.forward(batch).total / labels.numel()
        engine.backward(loss, last=True)
        engine.step(ADAMW["lr"])
        return loss.detach()

    return step


def transformers(job: Job) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    from pretrain.model.hf import hf_name, to_hf, to_hf_config

    sizes = our_sizes(job)
    model: Any = LlamaForCausalLM(
        LlamaConfig(**to_hf_config(sizes) | {"use_cache": False, "attn_implementation": "sdpa"})
    )
    model.load_state_dict({hf_name(name): to_hf(name, value, sizes) for name, value in _our_weights(job).items()})
    model.to(job.dtype)
    run = torch.compile(model) if job.compiled else model
    # shift_labels: the labels are the next tokens already.
    return update(model, lambda x, y: run(input_ids=x, labels=y, shift_labels=y).loss, job)


def litgpt(job: Job) -> Step:
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    cfg = Config(
        name="step",
        block_size=job.seq_len,
        vocab_size=job.vocab,
        padded_vocab_size=job.vocab,
        n_layer=job.layers,
        n_head=job.heads,
        n_query_groups=job.kv_heads,
        n_embd=job.d_model,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=job.d_ff,
    )
    model = _small(GPT(cfg)).to(job.dtype)
    model.max_seq_length = job.seq_len
    run = torch.compile(model) if job.compiled else model
    return update(model, lambda x, y: chunked_cross_entropy(run(x), y), job)


def torchtitan(job: Job) -> Step:
    model = titan_model(job)
    model.to(job.dtype)
    if job.compiled:
        for layer in model.layers.values():
            layer.compile(fullgraph=True)
    positions = _positions(job).long()
    return update(model, lambda x, y: _cross_entropy(model(x, positions=positions), y), job)


def titan_model(job: Job) -> Any:
    """torchtitan's Llama 3 of these shapes, with the one of its attentions that has a backward on a CPU."""
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3 import Llama3Model
    from torchtitan.models.llama3.model import Llama3TransformerBlock

    weight = {"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}
    head = job.d_model // job.heads

    def norm() -> Any:
        return RMSNorm.Config(normalized_shape=job.d_model, param_init={"weight": nn.init.ones_})

    def block() -> Any:
        attention = make_gqa_config(
            dim=job.d_model,
            n_heads=job.heads,
            n_kv_heads=job.kv_heads,
            wqkv_param_init=weight,
            wo_param_init=weight,
            inner_attention=ScaledDotProductAttention.Config(),
            fuse_qkv=True,
            rope=ComplexRoPE.Config(dim=head, max_seq_len=job.seq_len, theta=500_000.0),
        )
        ffn = make_ffn_config(dim=job.d_model, hidden_dim=job.d_ff, w1_param_init=weight, w2w3_param_init=weight)
        return Llama3TransformerBlock.Config(
            attention_norm=norm(), ffn_norm=norm(), attention=attention, feed_forward=ffn
        )

    model = Llama3Model.Config(
        dim=job.d_model,
        vocab_size=job.vocab,
        tok_embeddings=Embedding.Config(num_embeddings=job.vocab, embedding_dim=job.d_model, param_init=weight),
        norm=norm(),
        lm_head=Linear.Config(in_features=job.d_model, out_features=job.vocab, param_init=weight),
        layers=[block() for _ in range(job.layers)],
    ).build()
    with torch.no_grad():
        (model.init_weights if hasattr(model, "init_weights") else model.init_states)(buffer_device=None)
    return model


def olmo_core(job: Job) -> Step:
    from olmo_core.nn.transformer import TransformerConfig

    # Its feed-forward is 8/3 d_model, rounded up: with d_ff as the multiple it is d_ff.
    model = TransformerConfig.llama_like(
        d_model=job.d_model,
        vocab_size=job.vocab,
        n_layers=job.layers,
        n_heads=job.heads,
        n_kv_heads=job.kv_heads,
        hidden_size_multiple_of=job.d_ff,
    ).build(init_device="cpu")
    model.init_weights(max_seq_len=job.seq_len, device=torch.device("cpu"))
    model.to(job.dtype)
    if job.compiled:
        model.apply_compile()
    return update(model, lambda x, y: _cross_entropy(model(x), y), job)


def floor(job: Job) -> Step:
    """The matrix products and the attention of a step, on random numbers, products into tensors made before."""
    tokens, dtype = job.batch * job.seq_len, job.dtype if job.precision != "mixed" else torch.bfloat16
    d, h, k, q, f = job.d_model, job.heads, job.kv_heads, job.d_model // job.heads, job.d_ff
    layer = [(d, h * q), (d, k * q), (d, k * q), (h * q, d), (d, f), (d, f), (f, d)]
    linears = layer * job.layers + [(d, job.vocab)]
    weights = {pair: torch.randn(pair[1], pair[0], dtype=dtype) for pair in set(linears)}
    values = {n: torch.randn(tokens, n, dtype=dtype) for pair in set(linears) for n in pair}
    wide = {n: torch.empty_like(value) for n, value in values.items()}
    gradients = {pair: torch.empty_like(weight) for pair, weight in weights.items()}
    query, key, value = (
        torch.randn(job.batch, job.seq_len, n, q, dtype=dtype).transpose(1, 2).requires_grad_() for n in (h, k, k)
    )
    grad = torch.randn(job.batch, job.seq_len, h, q, dtype=dtype).transpose(1, 2)

    def step(inputs: Tensor, labels: Tensor) -> None:
        for pair in linears:
            x, weight, dy = values[pair[0]], weights[pair], values[pair[1]]
            torch.mm(x, weight.t(), out=wide[pair[1]])
            torch.mm(dy, weight, out=wide[pair[0]])
            torch.mm(dy.t(), x, out=gradients[pair])
        for _ in range(job.layers):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=h != k)
            torch.autograd.grad(out, (query, key, value), grad)

    return step


def update(model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], job: Job | None = None) -> Step:
    """Forward, loss, backward, clipping and the optimizer; under autocast where `job` is mixed."""
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, **ADAMW)

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=job is not None and job.precision == "mixed"):
            loss = loss_of(inputs, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step.parameters = sum(p.numel() for p in params)  # type: ignore[attr-defined]
    return step


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _small(model: nn.Module) -> Any:
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    return model


def _positions(job: Job) -> Tensor:
    return torch.arange(job.seq_len, dtype=torch.int32).repeat(job.batch, 1)


def tokens(job: Job, seed: int) -> tuple[Tensor, Tensor]:
    """Random inputs and labels, the same for every side."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(job.vocab, (job.batch, job.seq_len + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


SIDES: dict[str, Callable[[Job], Step]] = {
    "ours": ours,
    "transformers": transformers,
    "litgpt": litgpt,
    "torchtitan": torchtitan,
    "olmo_core": olmo_core,
    "floor": floor,
}
IMPORTS = {  # what a side's memory is counted above
    "ours": "pretrain.parallel.build",
    "transformers": "transformers.models.llama.modeling_llama",
    "litgpt": "litgpt",
    "torchtitan": "torchtitan.models.llama3",
    "olmo_core": "olmo_core.nn.transformer",
    "floor": "torch",
}


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    torch.set_num_threads(job.threads)
    importlib.import_module(IMPORTS[job.side])
    Path("/proc/self/clear_refs").write_text("5")  # forget the imports' own peak
    before = _resident("VmRSS")
    step = SIDES[job.side](job)
    print(json.dumps(asdict(job) | {"parameters": getattr(step, "parameters", None)}), file=answers, flush=True)
    for seed, _ in enumerate(sys.stdin):
        inputs, labels = tokens(job, seed)
        start, cpu = time.perf_counter(), time.process_time()
        loss = step(inputs, labels)
        answer = {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu,
            "loss": None if loss is None else float(loss),
            "peak_bytes": _resident("VmHWM") - before,
        }
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # ranks may be in a process group that nobody takes down


if __name__ == "__main__":
    main()
