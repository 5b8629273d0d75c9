"""Options that move memory or work elsewhere and must change no number: offload to the host, prefetch, async TP."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from ranks import run_ranks
from small import small_config

from pretrain.errors import ConfigError
from tests.pretrain.parallel import probes

HOST = {"device": "cpu", "pin_memory": False}
OFFLOADED: dict[str, dict[str, Any]] = {
    "fsdp": {"parallel__cpu_offload": True},
    "zero1": {"deepspeed__zero_optimization": {"offload_optimizer": HOST}},
    "zero2": {"deepspeed__zero_optimization": {"offload_optimizer": HOST}},
    "zero3": {"deepspeed__zero_optimization": {"offload_optimizer": HOST, "offload_param": HOST}},
}
# Each block's matrices are cut into pieces of their own, as a large model's are.
PIECES = {"deepspeed__zero_optimization": {"offload_optimizer": HOST, "sub_group_size": 1000}}


def train(ranks: Any, **changes: Any) -> tuple[list[float], probes.State]:
    """Norms and losses of two steps, the second from a state that another engine stored; the weights after it."""
    cfg = probes.config(ranks, **changes)
    first = probes.engine_of(ranks, cfg)
    curve = [probes.update(ranks, first, 0.01), probes.loss_of(ranks, first)]
    stored = probes.whole(first.state())
    if "zero_hpz_partition_size" in changes.get("deepspeed__zero_optimization", {}):
        second = first  # DeepSpeed lets one engine a process have this
    else:
        second = probes.engine_of(ranks, cfg)
        state = second.state()
        for name, tensor in state.items():
            tensor.copy_(cut_like(stored[name], tensor))
        second.load(state)
    curve += [probes.update(ranks, second, 0.01, seed=1), probes.loss_of(ranks, second)]
    return curve, probes.weights(second)


def cut_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, cut as `like` is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements) if isinstance(like, DTensor) else whole


def measure() -> dict[str, Any]:
    from pretrain.dist import world

    with world(240) as ranks:
        found = {}
        for name, engine in probes.ENGINES.items():
            found[name] = train(ranks, **engine)
            found[f"{name} offloaded"] = train(ranks, **engine | OFFLOADED[name])
        found["zero3 in pieces"] = train(ranks, **probes.ENGINES["zero3"] | PIECES)
        found["zero3 hpz"] = train(
            ranks, **probes.ENGINES["zero3"], deepspeed__zero_optimization={"zero_hpz_partition_size": 2}
        )
        for count in (1, 5):
            found[f"fsdp prefetching {count}"] = train(ranks, parallel__prefetch=count)
        return found


@pytest.mark.slow
def test_offload_and_prefetch_change_no_number() -> None:
    for found in run_ranks(measure, 2, timeout=600):
        assert len(found) == 12
        for name, (curve, weights) in found.items():
            expected, tensors = found[name.split()[0]]
            assert curve == pytest.approx(expected, rel=1e-6), name
            for key, tensor in tensors.items():
                assert float((weights[key] - tensor).norm() / tensor.norm()) < 1e-6, (name, key)


def test_quantized_collectives_are_refused_where_their_kernels_cannot_run() -> None:
    from pretrain.parallel.zero import deepspeed_config

    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        cfg = small_config("u", "u", **probes.ENGINES["zero3"], deepspeed__zero_optimization={key: True})
        with pytest.raises(ConfigError, match=f"{key}=true needs CUDA devices, but this is cpu"):
            deepspeed_config(cfg, 1, torch.device("cpu"))
        zero = deepspeed_config(cfg, 1, torch.device("cuda"))["zero_optimization"]
        assert zero[key] is True
        assert zero["stage"] == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what its compiler imports and does
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_the_compiler_finds_tensor_parallel_collectives_beside_their_products(mode: str) -> None:
    """What async tensor parallel fuses on CUDA, found in the graph of a compiled block."""
    import torch._inductor.fx_passes.micro_pipeline_tp as fusion
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    from pretrain.parallel.build import build_model
    from pretrain.parallel.mesh import build_meshes
    from pretrain.parallel.tensor_parallel import overlap_collectives
    from pretrain.train.trace import _fake_world

    consumers, producers = [], []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        view_to_reshape(graph)
        found = fusion.find_all_gather_patterns(graph.graph)
        consumers.append([len(fusion._find_consumer_matmuls(gather.res_node)) for gather in found])
        scatters = fusion.find_reduce_scatter_patterns(graph.graph)
        producers.append([fusion._find_producer_matmul(scatter.input_node) is not None for scatter in scatters])
        return make_boxed_func(graph.forward)

    cpu = torch.device("cpu")
    rows = {"train__global_batch_size": 2, "train__micro_batch_size": 2, "activation_checkpoint__mode": mode}
    cfg = small_config("u", "u", parallel__tp=2, **rows)
    with _fake_world(0, 2):
        meshes = build_meshes(cfg.layout(2), cpu)
        assert meshes.tp is not None
        with pytest.raises(ConfigError, match="async_tp=true needs CUDA devices, but this is cpu"):
            overlap_collectives(meshes.tp, cpu)
        with torch.device("meta"):
            model = build_model(cfg, cpu, meshes)
        model.to_empty(device=cpu)
        backend = aot_autograd(fw_compiler=look, bw_compiler=look, decompositions=select_decomp_table())
        block = torch.compile(model.layers[0].forward, backend=backend, fullgraph=True)
        positions = torch.arange(16).expand(2, 16)
        block(torch.zeros(2, 8, 32, requires_grad=True), model.attention_inputs(positions, None, None)).sum().backward()
    assert consumers[0] == [3, 2], "q, k, v; gate, up"
    assert producers[0] == [True, True], "o, down"
