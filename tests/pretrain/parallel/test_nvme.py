"""ZeRO-3 with its optimizer, or its weights too, in swap files: the same numbers, and checkpoints that go anywhere.

One start of ranks for all checks. The model is as small as lets DeepSpeed swap: pieces of 1 MiB and more.
"""

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from ranks import run_ranks

from pretrain.train import checkpoint_folder as folder
from tests.pretrain.parallel import probes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/usr/include/libaio.h").exists(), reason="libaio-dev is not installed"),
]
MODEL = {"model__d_model": 256, "model__d_ff": 2048, "model__vocab_size": 2048, "model__tie_embeddings": True}
PIECES = 600_000  # elements of a rank: three groups that are swapped, one of gains that is not
SAME = {"disk": "host", "both": "host", "weights": "memory", "both in bf16": "host in bf16"}
PIPELINED = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}


def config(ranks: Any, *, bf16: bool = False, optimizer: Any = None, weights: Any = None) -> Any:
    zero = {"sub_group_size": PIECES} | {
        key: table for key, table in (("offload_optimizer", optimizer), ("offload_param", weights)) if table is not None
    }
    changes = MODEL | {"train__grad_clip": 0.5, "train__micro_batch_size": 1} | (probes.BF16 if bf16 else {})
    return probes.config(ranks, **probes.ENGINES["zero3"] | changes, deepspeed__zero_optimization=zero)


def step(ranks: Any, engine: Any, seed: int, *, times: float = 1.0, keep: Any = None) -> float:
    """Two micro-batches a rank, and an update; the norm."""
    part, targets = probes.batch(ranks, seed)
    for row in range(2):
        micro = part._replace(**{name: getattr(part, name)[row : row + 1] for name in part._fields[:4]})
        engine.backward(engine.forward(micro).total * times / targets, last=row == 1)
    return float(engine.step(0.01, keep))


def train(ranks: Any, cfg: Any) -> tuple[Any, list[float]]:
    """An engine after updates, one that is no number and one that is refused; what was seen on the way."""
    engine = probes.engine_of(ranks, cfg)
    seen = [step(ranks, engine, seed=0), step(ranks, engine, seed=1)]
    seen.append(step(ranks, engine, seed=2, times=math.nan))
    seen.append(step(ranks, engine, seed=2, keep=lambda norm: False))
    seen.append(step(ranks, engine, seed=3))
    return engine, [*seen, probes.loss_of(ranks, engine)]


def reload(ranks: Any, root: Path, cfg: Any, number: int) -> Any:
    from pretrain.train.checkpoint import read_state

    engine = probes.engine_of(ranks, cfg)
    state = engine.state()
    read_state(folder.step_dir(root, number), state)
    engine.load(state)
    return engine


def farthest(state: probes.State, reference: probes.State) -> float:
    """The largest relative distance of a tensor from the reference's; 0: the same bits."""
    assert state.keys() == reference.keys()
    return max(float((state[name] - tensor).norm() / tensor.norm()) for name, tensor in reference.items())


def measure(root: str) -> dict[str, Any]:
    from pretrain.dist import world
    from pretrain.train.checkpoint import Checkpointer
    from pretrain.train.integrity import numbers_that_are_none

    host, disk = {"device": "cpu", "pin_memory": False}, {"device": "nvme", "nvme_path": root, "pin_memory": False}
    found: dict[str, Any] = {"seen": {}, "files": {}, "apart": {}, "onward": {}}
    with world(900) as ranks:
        configs = {
            "memory": config(ranks),
            "host": config(ranks, optimizer=host),
            "disk": config(ranks, optimizer=disk),
            "weights": config(ranks, weights=disk | {"max_in_cpu": 0}),
            "host in bf16": config(ranks, bf16=True, optimizer=host, weights=host),
            "both in bf16": config(ranks, bf16=True, optimizer=disk, weights=disk | {"max_in_cpu": 0}),
            "both": config(ranks, optimizer=disk | PIPELINED, weights=disk | {"max_in_cpu": 0}),
        }
        states, seen = {}, set[str]()  # engines are not gone at once, nor are their files
        for name, cfg in configs.items():
            engine, found["seen"][name] = train(ranks, cfg)
            assert numbers_that_are_none(engine.held(), ranks) is None
            states[name] = probes.whole(engine.state())
            files = {path.name for path in Path(root).glob(f"*/*/*/rank{ranks.rank}/*.swp")}
            found["files"][name], seen = " ".join(files - seen), seen | files
        for name, like in SAME.items():
            found["apart"][name] = farthest(states[name], states[like])
        found["apart"]["host"] = farthest(states["host"], states["memory"])

        configs["fsdp"] = probes.config(ranks, **MODEL, train__grad_clip=0.5)
        folder.checkpoints_dir(Path(root)).mkdir(exist_ok=True)
        saver = Checkpointer(Path(root), ranks, keep=9, keep_every=0, event=lambda *args, **details: None)
        for number, (writer, readers) in enumerate([("both", ("both", "disk", "fsdp")), ("fsdp", ("disk",))]):
            stored = probes.whole(engine.state())
            meta = {"step": number, "rows_consumed": 0, "tokens": 0, "targets": 0, "config": {}}
            saver.save(number, engine.state(), meta, background=True, copied=engine.state_is_copied)
            saver.wait()
            after = {}
            for reader in (None, *readers):
                other = engine if reader is None else reload(ranks, Path(root), configs[reader], number)
                found["apart"][writer, reader] = farthest(probes.whole(other.state()), stored)
                norm, loss = probes.update(ranks, other, 0.01, seed=4), probes.loss_of(ranks, other)
                after[reader] = probes.whole(other.state())
                found["onward"][writer, reader] = norm, loss, farthest(after[reader], after[None])
            engine = other
    return found


def test_what_lies_in_swap_files_trains_and_is_stored_as_what_lies_in_memory(tmp_path: Path) -> None:
    for found in run_ranks(measure, 2, str(tmp_path), timeout=1500):
        seen, apart, onward = found["seen"], found["apart"], found["onward"]
        for name, like in SAME.items():
            assert str(seen[name]) == str(seen[like]), name  # one of the norms is NaN, no equal of itself
            assert apart.pop(name) == 0, name
        assert math.isnan(seen["disk"][2])
        assert math.isfinite(seen["disk"][3])
        assert seen["host"][-2:] == pytest.approx(seen["memory"][-2:], rel=1e-5)
        assert apart.pop("host") < 1e-5
        files = found["files"]
        assert files["memory"] == ""
        for kind, name in itertools.product(("exp_avg-", "gradient", "param"), ("disk", "weights", "both")):
            assert (kind in files[name]) == (name == "both" or (kind == "param") == (name == "weights")), (kind, name)
        assert set(apart.values()) == {0}, "a checkpoint read is the state that was written"
        for (writer, reader), (norm, loss, distance) in onward.items():
            assert (norm, loss) == pytest.approx(onward[writer, None][:2], rel=1e-5), (writer, reader)
            exact = writer == "both" and reader != "fsdp"
            assert distance == 0 if exact else distance < 1e-4, (writer, reader)
