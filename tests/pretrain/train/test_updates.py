"""A run against a loop written out by hand: which rows, which targets and which rate make each update."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from small import SEQ_LEN, VOCAB, small_config

from data_prep.pack import pack_dataset
from pretrain.data.loader import Loader
from pretrain.dist import World, world
from pretrain.metrics.jsonl import read_records
from pretrain.model.init import init_weights
from pretrain.model.llama import Llama
from pretrain.train import checkpoint_folder as folder
from pretrain.train.checkpoint import load_model_weights
from pretrain.train.run import train_in
from pretrain.train.stop import Stop
from tests.pretrain.data.numbered import write_dataset

LENGTHS = [10, 11, 12, 13, 14, 15, 16, 17, 10, 12]  # no two documents fit into one row


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with world(60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten rows of one document each, with 9 to 16 targets; the first token is the document's number."""
    path = tmp_path_factory.mktemp("updates") / "data"
    generator = torch.Generator().manual_seed(0)
    documents = [
        [number, *torch.randint(10, VOCAB, (length - 1,), generator=generator).tolist()]
        for number, length in enumerate(LENGTHS)
    ]
    write_dataset(path, {"train": [documents]}, vocab_size=VOCAB)
    pack_dataset(path, SEQ_LEN)
    return path


def test_every_update_is_made_of_its_own_rows_targets_and_rate(tmp_path: Path, data: Path, ranks: World) -> None:
    """G18, G20: 10 rows, 4 an update in 2 micro-batches, 5 updates: twice round the data, the third update over the
    seam, nothing left over or carried on, and a first update that moves the weights at the rate that is logged."""
    cfg = small_config(
        tmp_path,
        data,
        train__steps=5,
        train__global_batch_size=4,
        train__micro_batch_size=2,
        train__grad_clip=0.0,
        optimizer__name="sgd",
        optimizer__lr=0.5,
        optimizer__weight_decay=0.0,
        schedule__warmup_steps=2,
        schedule__min_lr_ratio=0.1,
        checkpoint__every=1,
        checkpoint__keep=9,
    )
    assert train_in(ranks, cfg, Stop(tmp_path)) == "finished"
    lines = read_records(tmp_path / "metrics.jsonl")
    assert [line["lr"] for line in lines] == pytest.approx([0.25, 0.5, *(0.5 * f for f in (0.775, 0.325, 0.1))])

    model = Llama(cfg.model)
    init_weights(model, cfg.run.seed, cfg.model.n_layers)
    loader = Loader(cfg.data, seed=cfg.run.seed, rows_per_step=4, micro_batch_size=4, dp_rank=0, dp_world=1)
    seen: Counter[int] = Counter()
    tokens = 0
    for update, line in enumerate(lines, start=1):
        (batch,) = loader.step(4 * (update - 1)).batches
        documents = batch.inputs[:, 0].tolist()
        seen.update(documents)
        targets = sum(LENGTHS[number] - 1 for number in documents)
        tokens += targets
        logits = model(batch.inputs, positions=batch.positions, documents=batch.documents)
        total = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum")
        (total / targets).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                param -= line["lr"] * param.grad
                param.grad = None
        assert line["loss"] == pytest.approx(float(total.detach()) / targets, rel=1e-5)
        assert (line["tokens"], line["targets"]) == (tokens, tokens), "padding is neither"
        saved = load_model_weights(folder.step_dir(tmp_path, update))
        for name, param in model.named_parameters():
            moved = float((param.detach() - before[name]).norm())
            assert moved > 0, (update, name)
            assert float((param.detach() - saved[name]).norm()) < 1e-4 * moved + 1e-6, (update, name)
    loader.close()
    assert seen == Counter(dict.fromkeys(range(10), 2))
