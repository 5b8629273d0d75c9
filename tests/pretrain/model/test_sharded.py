"""Weights and RoPE tables of a model that is built on the meta device and sharded, against one built directly.

One start of three ranks for all checks.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, empty

from pretrain.config_file import parse_config
from pretrain.dist import World, world
from pretrain.model.init import fill_parameter, init_weights
from pretrain.model.llama import Llama
from pretrain.model.rope import rope_table
from pretrain.parallel.fsdp import shard_model
from pretrain.parallel.mesh import build_meshes
from tests.ranks import run_ranks

RANKS = 3
ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
CONFIG = {
    "run": {"name": "sharded", "dir": "unused", "seed": 5},
    "model": {
        "vocab_size": 61,
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "d_ff": 48,
        "max_seq_len": 131_072,
        "rope_scaling": ROPE,
    },
    "data": {"sources": [{"path": "unused"}], "seq_len": 64},
    "train": {"steps": 1, "global_batch_size": RANKS},
    "optimizer": {"lr": 1e-3},
    "schedule": {"warmup_steps": 0},
}


def on_each_rank() -> tuple[list[str], dict[str, bool]]:
    with world(60) as here:
        whole = Llama(parse_config(CONFIG).model)
        init_weights(whole, 5, 2)
        return shards_that_differ(whole, here), spoiled_memory(whole, here)


def shards_that_differ(whole: Llama, here: World) -> list[str]:
    """Parameters whose local part is not the slice of the whole, sharded by rows, by rows with replicas, by columns."""
    wrong = []
    flat, square = init_device_mesh("cpu", (here.size,)), init_device_mesh("cpu", (1, here.size))
    layouts = [(flat, [Shard(0)]), (square, [Replicate(), Shard(0)]), (flat, [Shard(1)])]
    for name, param in whole.named_parameters():
        for mesh, placements in layouts:
            if any(isinstance(p, Shard) and p.dim >= param.dim() for p in placements):
                continue
            part = empty(param.shape, device_mesh=mesh, placements=placements)
            fill_parameter(name, part, part.shape, 5, 2)
            expected = distribute_tensor(param.detach(), mesh, placements)
            if not torch.equal(part.to_local(), expected.to_local()):
                wrong.append(f"{name} {placements} rank {here.rank}")
            if here.rank == 0 and part.to_local().numel() >= param.numel():
                wrong.append(f"{name} was not sharded")
    return wrong


def spoiled_memory(whole: Llama, here: World) -> dict[str, bool]:
    """The meta build into memory that is full of a pattern, looked at from inside a block that computes in bf16."""
    cfg = parse_config(CONFIG)
    with torch.device("meta"):
        sharded = Llama(cfg.model, activations=torch.bfloat16)
    shard_model(sharded, cfg, build_meshes(cfg.layout(here.size), here.device), here.device)
    sharded.to_empty(device=here.device)
    for tensor in [*sharded.parameters(), *sharded.buffers()]:
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().fill_(777.0)
    init_weights(sharded, cfg.run.seed, cfg.model.n_layers)
    pairs = zip(sharded.named_parameters(), whole.named_parameters(), strict=True)
    weights = all(n == m and torch.equal(p.full_tensor(), q) for (n, p), (m, q) in pairs)
    seen = []
    attention = sharded.layers[1].attention
    attention.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, args[1].rope)))
    positions = torch.tensor([[0, 1, 2, 9_000, 100_003]])
    with torch.no_grad():
        sharded(torch.ones_like(positions), positions=positions)
    (dtype, table), expected = seen[0], rope_table(cfg.model, positions)
    return {
        "weights equal": weights,
        "block runs in bf16": dtype == torch.bfloat16,
        "table is fp32": table.cos.dtype == torch.float32,
        "table equal": torch.equal(table.cos, expected.cos) and torch.equal(table.sin, expected.sin),
        "nothing to leave uninitialised": not list(sharded.buffers()),
    }


@pytest.fixture(scope="module")
def found() -> list[tuple[list[str], dict[str, bool]]]:
    return run_ranks(on_each_rank, RANKS)


def test_every_shard_is_the_slice_of_the_whole_bit_for_bit(found):
    assert [wrong for wrong, _ in found] == [[]] * RANKS


def test_the_rope_table_inside_a_sharded_bf16_block_is_the_direct_one_whatever_memory_held(found):  # G25
    for _, checks in found:
        assert checks == dict.fromkeys(checks, True)
