"""What becomes of gradients on the way to the weights: their norm, clipping, their sum over micro-batches, decay.

Every engine on two ranks in one start, and one process as the reference.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ranks import run_ranks

from tests.pretrain.parallel import probes

pytestmark = pytest.mark.slow
SMALL = 2.0**-9
MICRO_BATCHES = [1.0] + [SMALL] * 511
SUM = 1 + 511 * SMALL


def measure() -> dict[str, Any]:
    from pretrain.dist import world

    with world(240) as ranks:
        on_engines: Callable[..., dict[str, Any]] = lambda probe, *args, **changes: {  # noqa: E731
            name: probe(ranks, *args, **engine, **changes) for name, engine in probes.ENGINES.items()
        }
        found = {
            "norms": on_engines(probes.norm_and_step),
            "decay": on_engines(probes.decay_alone),
            "clipped": on_engines(probes.clip_of_a_blown_up_loss, **probes.BF16),
            "placements": norm_of_every_placement(),
        }
        if ranks.size > 1:
            replicated = probes.norm_and_step(ranks, parallel__dp_replicate=2)
            found["norms"]["replicated"] = replicated
            found["sums"] = on_engines(probes.accumulate, MICRO_BATCHES)
            found["sums"]["local"] = probes.accumulate(ranks, MICRO_BATCHES, parallel__accumulate="local")
        return found


def norm_of_every_placement() -> float:
    """global_norm of a sharded, a replicated and a plain tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from pretrain.parallel.fsdp import global_norm

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    sharded = distribute_tensor(torch.full((3, 5), 2.0), mesh, [Shard(0)])  # uneven over two ranks
    whole = distribute_tensor(torch.full((4,), 3.0), mesh, [Replicate()])
    return float(global_norm([sharded, whole, torch.full((2, 2), 4.0)]))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_ranks(measure, 1, timeout=600)[0]


@pytest.fixture(scope="module")
def together() -> list[dict[str, Any]]:
    return run_ranks(measure, 2, timeout=600)


def test_the_norm_is_that_of_the_whole_gradient_in_every_set_up(alone, together):
    """G19: one process, two replicas, two shards, shards beside whole tensors; the weights after the step as well."""
    reference, expected = alone["norms"]["fsdp"]
    assert reference > 0.5, "the clip must bite"
    for found in [alone, *together]:
        assert found["placements"] == pytest.approx(math.sqrt(15 * 4 + 4 * 9 + 4 * 16), rel=1e-6)
        for name, (norm, weights) in found["norms"].items():
            assert norm == pytest.approx(reference, rel=1e-5), name
            for key, tensor in expected.items():
                assert float((weights[key] - tensor).norm() / tensor.norm()) < 1e-5, (name, key)
    assert "replicated" in together[0]["norms"]


def test_decay_reaches_matrices_alone_and_groups_are_the_same_sharded_or_not(alone, together):
    """G22, and names of the state on every engine (G31)."""
    _, names, line = alone["decay"]["fsdp"]
    gains, total = 5 * 32, 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64) + 64 * 32 + 5 * 32
    assert line.endswith(
        f"decay (0.1): 15 tensors, {total - gains:,} parameters | no_decay (0): 5 tensors, {gains} parameters"
    )
    for found in [alone, *together]:
        for engine, (factors, its_names, its_line) in found["decay"].items():
            assert (its_names, its_line) == (names, line), engine
            assert not any(name.endswith("output.weight") for name in factors), "a tied weight comes once"
            for name, factor in factors.items():
                assert factor == pytest.approx(1.0 if name.endswith("norm.weight") else 0.99, rel=1e-6), (engine, name)


def test_512_micro_batches_in_bf16_lose_no_small_gradient(together):
    """G23: 1 and 511 times 2^-9 are 1.998; a sum kept in bf16 stays at 1."""
    lost = torch.tensor(1.0, dtype=torch.bfloat16)
    for gradient in MICRO_BATCHES[1:]:
        lost = lost + torch.tensor(gradient, dtype=torch.bfloat16)
    assert float(lost) == 1.0
    for found in together:
        assert set(found["sums"]) == {*probes.ENGINES, "local"}
        for engine, (sums, dtypes) in found["sums"].items():
            assert dtypes == {"torch.bfloat16"}, engine
            assert sums == pytest.approx([SUM, SUM], abs=1e-6), engine


def test_clipping_bounds_the_update_in_bf16_and_the_norm_is_the_one_before_it(alone, together):
    """G24: a loss x 1,000, clip 1, plain SGD of rate 1."""
    reference = alone["norms"]["fsdp"][0]
    for found in [alone, *together]:
        for engine, (norm, length) in found["clipped"].items():
            assert norm == pytest.approx(1000 * reference, rel=0.02), engine
            assert 0.999 < length <= 1.0 + 1e-5, engine
