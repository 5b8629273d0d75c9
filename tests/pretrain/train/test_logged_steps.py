"""Whole runs in one process: what is logged on request, and that a deterministic run repeats itself bit for bit."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from small import make_dataset, small_config

from pretrain.dist import World, world
from pretrain.metrics.jsonl import read_records
from pretrain.scaling.collect import collect
from pretrain.train import checkpoint_folder as folder
from pretrain.train.checkpoint import load_model_weights
from pretrain.train.run import train_in
from pretrain.train.stop import Stop


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with world(60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "walks")


def test_layers_and_noise_scale_are_in_the_log_and_in_the_table_of_runs(
    tmp_path: Path, data: Path, ranks: World
) -> None:
    wanted = {"metrics__every": 2, "metrics__layers": True, "metrics__noise_scale": True, "checkpoint__every": 2}
    run, resumed = tmp_path / "run", tmp_path / "resumed"
    cfg = small_config(run, data, train__steps=6, **wanted)
    assert train_in(ranks, cfg, Stop(run)) == "finished"
    lines = read_records(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6]
    for line in lines:
        norms = [line[f"grad_norm/{place}"] for place in ("tok_embeddings", "layers.0", "layers.1", "norm", "output")]
        assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(line["grad_norm"], rel=1e-5)
        assert 0 < line["activation_rms/layers.0"] < line["activation_rms/layers.1"]
    scales = [line["grad_noise_scale"] for line in lines if line["grad_noise_scale"] is not None]
    [row] = collect([run])
    assert 0 < min(scales) <= row["grad_noise_scale"] <= max(scales)

    shutil.copytree(run, resumed)
    for step in (4, 6):
        shutil.rmtree(folder.step_dir(resumed, step))
    assert train_in(ranks, small_config(resumed, data, train__steps=6, **wanted), Stop(resumed)) == "finished"
    again = [line for line in read_records(resumed / "metrics.jsonl") if line["attempt"] == 1]
    assert [line["grad_noise_scale"] for line in again] == [line["grad_noise_scale"] for line in lines[1:]]


def test_a_deterministic_run_repeats_itself_bit_for_bit(tmp_path: Path, data: Path, ranks: World) -> None:
    found = []
    for name in ("one", "two"):
        run = tmp_path / name
        torch.rand(7)  # the state of the generator before a run is not part of it
        bf16 = {"precision__compute": "bf16", "activation_checkpoint__mode": "selective"}
        cfg = small_config(run, data, train__steps=4, run__deterministic=True, **bf16)
        try:
            assert train_in(ranks, cfg, Stop(run)) == "finished"
            assert torch.are_deterministic_algorithms_enabled()
        finally:
            torch.use_deterministic_algorithms(False)
        curve = [(line["loss"], line["grad_norm"]) for line in read_records(run / "metrics.jsonl")]
        found.append((curve, load_model_weights(folder.step_dir(run, 4))))
    assert found[0][0] == found[1][0]
    assert len(found[0][0]) == 4
    assert all(torch.equal(tensor, found[1][1][name]) for name, tensor in found[0][1].items())
