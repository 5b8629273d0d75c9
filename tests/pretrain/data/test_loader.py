"""The loader: the same stream on any shape, exact global counts, bad input and damaged shards, validation."""

import hashlib
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from data_prep.blockfile import HEADER_BYTES
from data_prep.build import build
from data_prep.errors import DataError
from data_prep.pack import pack_dataset
from data_prep.plan import Settings
from data_prep.rows import IGNORE, open_rows
from data_prep.tokenizer_hf import BYTE_OF_CHAR
from pretrain.config import DataConfig
from pretrain.data.loader import Batch, Loader, Step, Validation, validation_batches
from pretrain.errors import ConfigError
from tests.pretrain.data.numbered import counting, numbered_rows, write_dataset
from tests.pretrain.data.sparse import sparse_dataset

ROWS = 24  # of a step
SKIP = [[50, 61], [230, 230]]


def mixed_sources(folder: Path) -> list[dict]:
    """Two sources of several shards, with documents of all lengths and rows of very different make-up."""
    rng = np.random.default_rng(0)
    for name, shards, first in (("web", 3, 1), ("code", 2, 20_000)):
        lengths = [rng.integers(2, 50, 40).tolist() for _ in range(shards)]
        write_dataset(folder / name, {"train": counting(lengths, first), "val": counting([[9, 30, 4]], first + 9000)})
        for packing in ("best_fit", "concat"):
            pack_dataset(folder / name, 16, packing)
    return [{"path": str(folder / "web"), "weight": 0.7}, {"path": str(folder / "code"), "weight": 0.3}]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[dict]:
    return mixed_sources(tmp_path_factory.mktemp("sources"))


def mixture(sources: list[dict], **changes) -> DataConfig:
    stages = [{"tokens": 16 * 100, "weights": [0.2, 0.8]}, {"tokens": 16 * 217, "weights": [0, 1]}]
    return DataConfig(
        **{"sources": sources, "stages": stages, "seq_len": 16, "skip": [[50, 61], [230, 230]], **changes}
    )


def loaders(cfg: DataConfig, world: int = 1, micro: int = 1, rows: int = ROWS, seed: int = 1, **kw) -> list[Loader]:
    return [
        Loader(cfg, seed=seed, rows_per_step=rows, micro_batch_size=micro, dp_rank=rank, dp_world=world, **kw)
        for rank in range(world)
    ]


def only(cfg: DataConfig, **kw) -> Loader:
    return loaders(cfg, **kw)[0]


def flat(lists) -> list:
    return [value for values in lists for value in values]


def in_stream_order(steps: list[Step]) -> list[list[torch.Tensor]]:
    """One step as all ranks took it -> its rows, each (inputs, labels, positions, documents)."""
    rows = []
    for micro_batches in zip(*(step.batches for step in steps), strict=True):
        for batch in micro_batches:
            rows += [[tensor[row] for tensor in batch[:4]] for row in range(len(batch.inputs))]
    return rows


def digest(rows: list[list[torch.Tensor]]) -> str:
    found = hashlib.sha256()
    for row in rows:
        for tensor in row:
            found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def stream(cfg: DataConfig, world: int, micro: int, steps: range, rows: int = ROWS) -> list[tuple]:
    """(digest, targets, tokens, epoch) of each step; all ranks must agree on the counts."""
    running = loaders(cfg, world, micro, rows)
    found = []
    try:
        for step in steps:
            taken = [loader.step(step * rows) for loader in running]
            assert len({each[1:] for each in taken}) == 1
            labels = torch.stack([row[1] for row in in_stream_order(taken)])
            assert taken[0].targets == int((labels != IGNORE).sum())
            found.append((digest(in_stream_order(taken)), *taken[0][1:]))
    finally:
        for loader in running:
            loader.close()
    return found


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_the_stream_is_the_same_on_any_ranks_and_micro_batches_through_stages_and_stops(sources, packing):
    cfg = mixture(sources, packing=packing)
    whole = stream(cfg, 1, 24, range(14))
    assert len({step[0] for step in whole}) == 14
    for world, micro in ((1, 1), (1, 8), (2, 1), (2, 3), (2, 12), (3, 2), (3, 8), (4, 1), (4, 2), (4, 6)):
        assert stream(cfg, world, micro, range(14)) == whole, (world, micro)
    # Stopped after 3, 4 (inside the first skip's wake and a stage) and 9 steps, each time on another shape.
    pieces = [(1, 8, range(3)), (4, 2, range(3, 4)), (3, 1, range(4, 9)), (2, 6, range(9, 14))]
    assert flat(stream(cfg, *piece) for piece in pieces) == whole
    assert stream(mixture(sources, packing=packing, prefetch=7), 2, 2, range(14)) == whole


def test_steps_of_another_size_take_the_same_stream(sources):
    cfg = mixture(sources)
    with only(cfg, micro=4) as fixed, only(cfg, micro=4) as ramping:
        expected = [row for step in range(6) for row in in_stream_order([fixed.step(step * ROWS)])]
        found, at = [], 0
        for rows in (4, 8, 8, 12, 24, 24, 24, 40):
            found += in_stream_order([ramping.step(at, rows=rows)])
            at += rows
    assert digest(found) == digest(expected)


def test_one_epoch_holds_each_row_once_for_any_files_and_ranks(tmp_path):  # G15, G17
    for shards in (1, 3, 5):
        folder = numbered_rows(tmp_path / f"in-{shards}", 24, shards=shards)
        cfg = DataConfig(sources=[{"path": str(folder)}], seq_len=8)
        for world, micro in ((1, 4), (2, 2), (2, 1)):
            running = loaders(cfg, world, micro, rows=8)
            for epoch in range(2):
                seen = []
                for step in range(3):
                    for loader in running:
                        taken = loader.step(8 * (3 * epoch + step))
                        assert taken.targets == taken.tokens == 64
                        seen += [int(row[0]) for batch in taken.batches for row in batch.inputs]
                assert sorted(seen) == list(range(1, 25))
                assert taken.epoch == epoch + 1
            for loader in running:
                loader.close()


def test_a_run_resumed_after_the_last_step_of_an_epoch_takes_the_steps_of_the_next(tmp_path):  # G16
    cfg = DataConfig(sources=[{"path": str(numbered_rows(tmp_path, 8))}], seq_len=8)

    def rows(steps: range) -> list[list[int]]:
        with only(cfg, rows=2) as loader:
            return [loader.step(2 * step).batches[0].inputs[:, 0].tolist() for step in steps]

    unbroken = rows(range(12))
    assert rows(range(4, 12)) == unbroken[4:]
    assert rows(range(8, 12)) == unbroken[8:]
    assert unbroken[:4] != unbroken[4:8] != unbroken[8:]


def test_boundaries_have_one_shape_and_say_what_documents_say(sources):
    for mask in (True, False):
        with only(mixture(sources, mask_documents=mask), micro=4) as loader:
            shapes = set()
            for step in range(4):
                for batch in loader.step(step * ROWS).batches:
                    assert [t.dtype for t in batch[:5]] == [torch.int64] * 2 + [torch.int32] * 3
                    shapes.add(tuple(tuple(t.shape) for t in batch[:5]))
                    begins = batch.cu_seqlens[batch.cu_seqlens < 64].tolist()
                    flat = batch.documents.reshape(-1)
                    rows = torch.arange(64) // 16
                    changes = [i for i in range(64) if not i or flat[i] != flat[i - 1] or rows[i] != rows[i - 1]]
                    assert begins == changes
                    assert (batch.cu_seqlens[len(begins) :] == 64).all()
                    assert batch.max_seqlen == 16
            assert len(shapes) == 1
            if not mask:
                assert shapes == {((4, 16),) * 4 + ((5,),)}


def test_the_same_seed_repeats_and_another_does_not(sources):  # G14
    cfg = mixture(sources)
    with only(cfg) as one, only(cfg) as same, only(cfg, seed=2) as other:
        first = in_stream_order([one.step(0)])
        assert digest(in_stream_order([same.step(0)])) == digest(first) != digest(in_stream_order([other.step(0)]))
        assert one.fingerprint == same.fingerprint != other.fingerprint


def test_waiting_for_data_is_counted(sources):
    with only(mixture(sources)) as loader:
        assert loader.data_wait_seconds == 0.0
        loader.step(0)
        once = loader.data_wait_seconds
        loader.step(10**9)
        assert 0.0 < once < loader.data_wait_seconds


def test_closing_leaves_no_thread_and_steps_say_so(sources):
    loader = only(mixture(sources))
    loader.step(0)
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "data-prefetch"]
    with pytest.raises(RuntimeError, match="the loader is closed"):
        loader.step(ROWS)


# --- bad input


def test_fewer_rows_than_a_global_batch_are_refused_with_both_counts(tmp_path):  # G13
    cfg = DataConfig(sources=[{"path": str(numbered_rows(tmp_path, 3))}], seq_len=8)
    with pytest.raises(ConfigError, match=r"have 3 rows of seq_len=8 in all, fewer than one global batch of 4 rows"):
        only(cfg, rows=4)
    with only(cfg, rows=3) as loader:
        assert loader.step(0).targets == 24


def test_three_validation_rows_in_a_batch_of_four_are_padded_and_padding_is_no_target(tmp_path):  # G13
    cfg = DataConfig(sources=[{"path": str(numbered_rows(tmp_path, 3, val=3))}], seq_len=8)
    validation = Validation(cfg, micro_batch_size=4, dp_rank=0, dp_world=1)
    (batch,) = validation
    assert (validation.rows, validation.targets, tuple(batch.inputs.shape)) == (3, 24, (4, 8))
    assert (batch.labels != IGNORE).sum(dim=1).tolist() == [8, 8, 8, 0]
    assert (batch.documents[3] == -1).all()


def test_a_model_must_have_rows_for_tokens_added_to_the_tokenizer(tmp_path):
    """G9: 100 base tokens, `<pad>` 100 and `<extra>` 101, text with `<extra>`: a model of 100 rows is refused."""
    alphabet = sorted(BYTE_OF_CHAR)[:100]
    library = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["<pad>"])
    library.add_tokens(["<extra>"])
    (tmp_path / "tokenizer").mkdir()
    library.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("ABC<extra>ABC" * 9)
    settings = Settings((str(tmp_path / "a.txt"),), bos=False, eos=False)
    build(settings, tmp_path / "tokenizer", tmp_path / "data", seq_len=8, say=lambda text: None)
    with only(DataConfig(sources=[{"path": str(tmp_path / "data")}], seq_len=8), rows=2) as loader:
        assert max(int(batch.inputs.max()) for batch in loader.step(0).batches) == 101
        with pytest.raises(ConfigError, match=r"model.vocab_size=100, but the tokenizer of .* has 102 tokens"):
            loader.check_vocab(100)
        loader.check_vocab(102)


def test_a_global_batch_that_ranks_do_not_divide_is_refused(sources):
    with pytest.raises(
        ConfigError, match=r"train.global_batch_size=24 is no multiple of .*=5 x 2 data-parallel ranks = 10"
    ):
        loaders(mixture(sources), 2, 5)
    with only(mixture(sources), micro=8) as loader, pytest.raises(ConfigError, match="global_batch_size=12"):
        loader.step(0, rows=12)


def test_sources_of_two_tokenizers_are_refused_by_name(tmp_path):
    paths = [str(tmp_path / name) for name in ("one", "two")]
    for path, letter in zip(paths, "ab", strict=True):
        write_dataset(Path(path), {"train": counting([[9] * 40])}, tokenizer_hash=f"{letter}0" * 32)
        pack_dataset(path, 8)
    with pytest.raises(ConfigError) as caught:
        only(DataConfig(sources=[{"path": path} for path in paths], seq_len=8))
    assert all(part in str(caught.value) for part in (*paths, "a0a0a0a0a0a0", "b0b0b0b0b0b0"))


def test_a_model_smaller_than_the_tokenizer_is_refused_with_both_sizes(tmp_path):  # G2, G9
    write_dataset(tmp_path, {"train": counting([[9] * 40])}, vocab_size=1000)
    pack_dataset(tmp_path, 8)
    with only(DataConfig(sources=[{"path": str(tmp_path)}], seq_len=8)) as loader:
        with pytest.raises(ConfigError, match=r"model.vocab_size=500, but the tokenizer of .* has 1000 tokens"):
            loader.check_vocab(500)
        loader.check_vocab(1000)
        loader.check_vocab(1024)


def test_a_source_without_rows_is_refused_unless_nothing_is_drawn_from_it(tmp_path, sources):
    write_dataset(tmp_path, {"train": [[[7], [8]]]})
    pack_dataset(tmp_path, 16)
    with pytest.raises(ConfigError, match=f"{tmp_path} has no row to train on"):
        only(DataConfig(sources=[*sources, {"path": str(tmp_path)}], seq_len=16))


def test_a_length_that_was_not_packed_names_the_command_that_packs_it(sources):  # G37
    with pytest.raises(DataError, match=r"it has 16 \(best_fit\), 16 \(concat\); run .* --seq-len 32"):
        only(mixture(sources, seq_len=32))


# --- damaged shards


def damage(folder: Path, number: int, seq_len: int = 8) -> None:
    """Flips a bit in the row of token `number`. Shards of numbered rows hold one block each, so all their rows fail."""
    for path in sorted((folder / "shards").glob("train-*")):
        data = bytearray(path.read_bytes())
        at = data.find(np.full(seq_len + 1, number, "<u2").tobytes(), HEADER_BYTES)
        if at >= 0:
            data[at] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError(f"{number} is in no shard")


def test_a_damaged_shard_stops_the_run_at_the_step_that_needs_it(tmp_path):
    folder = numbered_rows(tmp_path, 40, shards=8)
    cfg = DataConfig(sources=[{"path": str(folder)}], seq_len=8)
    with only(cfg, rows=4) as loader:
        order = [loader.step(4 * step).batches for step in range(10)]
    victim = int(order[5][2].inputs[0, 0])
    damage(folder, victim)
    shard = set(range((victim - 1) // 5 * 5 + 1, (victim - 1) // 5 * 5 + 6))
    first = next(s for s in range(10) if shard & {int(b.inputs[0, 0]) for b in order[s]})
    with only(cfg, rows=4) as loader:
        for step in range(first):
            loader.step(4 * step)
        with pytest.raises(DataError, match=r"train-0000\d\.tok: bytes .* fail their checksum"):
            loader.step(4 * first)


def test_a_damaged_shard_is_replaced_the_same_way_on_every_rank_and_counted(tmp_path):
    folder = numbered_rows(tmp_path, 40, shards=8)
    cfg = DataConfig(sources=[{"path": str(folder)}], seq_len=8, on_bad_shard="substitute")
    with only(cfg, rows=8) as loader:
        sound = [[int(b.inputs[0, 0]) for b in loader.step(8 * step).batches] for step in range(5)]
    damage(folder, 7)
    bad = {6, 7, 8, 9, 10}

    def run(world: int, micro: int) -> tuple[list[list[int]], list[dict]]:
        told: list[dict] = []

        def events(event: str, **details) -> None:
            assert event == "bad_shard"
            assert threading.current_thread() is threading.main_thread()
            told.append(details)

        running = loaders(cfg, world, micro, rows=8, events=events)
        rows = []
        for step in range(5):
            taken = [loader.step(8 * step) for loader in running]
            assert {each.targets for each in taken} == {64}
            rows.append([int(row[0][0]) for row in in_stream_order(taken)])
        assert sum(loader.rows_substituted for loader in running) == len(told)
        for loader in running:
            loader.close()
        return rows, told

    rows, told = run(1, 1)
    assert run(2, 2)[0] == run(4, 1)[0] == rows
    assert len(told) == 5
    assert {details["row"] + 1 for details in told} == bad
    for before, after in zip(flat(sound), flat(rows), strict=True):
        assert after not in bad
        assert after == before or before in bad
    for details in told:
        assert details["source"] == str(folder)
        assert "train-00001.tok: bytes" in details["error"]
        at = details["stream_row"]
        assert flat(sound)[at] == details["row"] + 1
        assert flat(rows)[at] == details["substitute"] + 1


def test_a_substitute_has_as_many_targets_as_the_row_it_stands_in_for(tmp_path):
    rng = np.random.default_rng(1)
    write_dataset(tmp_path, {"train": counting([rng.integers(2, 9, 30).tolist() for _ in range(10)])})
    for packing in ("best_fit", "concat"):
        pack_dataset(tmp_path, 16, packing)
        cfg = DataConfig(sources=[{"path": str(tmp_path)}], seq_len=16, packing=packing, on_bad_shard="substitute")
        path = tmp_path / "shards/train-00003.tok"
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if packing == "best_fit" else whole[:-1])
        # In the first case the document lines are damaged, which no row touches but for the block they share.
        with only(cfg, rows=8) as loader:
            for step in range(10):
                taken = loader.step(8 * step)
                labels = torch.cat([batch.labels for batch in taken.batches])
                assert taken.targets == int((labels != IGNORE).sum())
            assert loader.rows_substituted > 0
        path.write_bytes(whole)


def test_when_no_row_can_stand_in_the_run_stops_with_the_cause(tmp_path):
    folder = numbered_rows(tmp_path, 6)
    damage(folder, 3)
    cfg = DataConfig(sources=[{"path": str(folder)}], seq_len=8, on_bad_shard="substitute")
    message = r"no row of .* can stand in for row \d: .* fail their checksum"
    with only(cfg, rows=2) as loader, pytest.raises(DataError, match=message):
        loader.step(0)


# --- what a resumed run compares


def test_the_past_of_the_stream_may_not_change_but_its_future_may(sources):
    def at(rows: int, **changes) -> str:
        with only(mixture(sources, **changes)) as loader:
            return loader.fingerprint_at(rows)

    later_stage = [{"tokens": 16 * 100, "weights": [0.2, 0.8]}, {"tokens": 16 * 300, "weights": [1, 1]}]
    assert at(200, stages=later_stage) == at(200)
    assert at(290, stages=later_stage) != at(290)
    later_skip = [[50, 61], [240, 250]]
    assert at(200, skip=later_skip) == at(200)
    assert at(230, skip=later_skip) != at(230)
    assert at(0, skip=[], stages=[]) == at(0)
    assert at(51, skip=[]) != at(51)
    with only(mixture(sources[:1], stages=[]), seed=1) as loader:
        assert loader.fingerprint_at(0) != at(0)


# --- validation


def validation_rows(cfg: DataConfig, micro: int, world: int) -> tuple[list[Batch], int]:
    """All ranks' batches in order, and how many each rank had."""
    ranks = [validation_batches(cfg, micro, rank, world) for rank in range(world)]
    batches = [list(rank) for rank in ranks]
    assert {len(each) for each in batches} == {len(ranks[0])}
    return [batch for together in zip(*batches, strict=True) for batch in together], len(ranks[0])


@pytest.mark.parametrize("mask", [True, False])
def test_validation_takes_each_row_once_and_every_rank_as_many_batches(sources, mask):  # G13, G28
    cfg = mixture(sources, mask_documents=mask)
    expected = [
        tuple(row.tolist())
        for source in sources
        for rows in [open_rows(source["path"], "val", 16, mask_documents=mask)]
        for row in rows.read(np.arange(len(rows))).labels
    ]
    for micro, world in ((1, 1), (4, 1), (3, 2), (1, 4), (2, 4), (5, 3), (50, 2)):
        batches, _ = validation_rows(cfg, micro, world)
        assert {tuple(batch.inputs.shape) for batch in batches} == {(micro, 16)}
        assert len({tuple(batch.cu_seqlens.shape) for batch in batches}) == 1
        labels = torch.cat([batch.labels for batch in batches])
        assert [tuple(row) for row in labels.tolist()[: len(expected)]] == expected
        assert (labels[len(expected) :] == IGNORE).all()
        documents = torch.cat([batch.documents for batch in batches])[len(expected) :]
        assert (documents == (-1 if mask else 0)).all()
        for batch in batches:
            edges = batch.cu_seqlens.tolist()
            assert edges == sorted(edges)
            assert edges[0] == 0
            assert edges[-1] == micro * 16
            assert set(range(0, micro * 16, 16)) <= set(edges)
        validation = Validation(cfg, micro_batch_size=micro, dp_rank=0, dp_world=world)
        assert validation.rows == len(expected)
        assert validation.targets == int((labels != IGNORE).sum()) == 2 * (8 + 29 + 3)
        assert validation.num_bytes == 2 * 3 * (9 + 30 + 4)
        assert list(map(str, validation)) == list(map(str, validation))  # the same again


def test_sources_without_a_validation_share_have_no_validation_rows(tmp_path, sources):
    folder = numbered_rows(tmp_path / "bare", 10, seq_len=16)
    alone = Validation(
        DataConfig(sources=[{"path": str(folder)}], seq_len=16), micro_batch_size=2, dp_rank=0, dp_world=2
    )
    assert (alone.rows, alone.targets, alone.num_bytes, len(alone), list(alone)) == (0, 0, 0, 0, [])
    beside = DataConfig(sources=[*sources, {"path": str(folder)}], seq_len=16)
    assert Validation(beside, micro_batch_size=2, dp_rank=0, dp_world=1).targets == 80


# --- size


def test_a_trillion_tokens_start_and_resume_without_a_scan_and_in_little_memory(tmp_path):
    folder = sparse_dataset(tmp_path, tokens_per_shard=2048 * 2**21, shards=233, seq_len=2048)
    cfg = DataConfig(sources=[{"path": str(folder)}], seq_len=2048, packing="concat")
    tracemalloc.start()
    try:
        for position in (0, 2**28, 10**9):  # the third lies in the third epoch
            with only(cfg, rows=8, micro=4) as loader:
                step = loader.step(position)
                assert 8 * 2048 - 8 <= step.targets <= step.tokens == 8 * 2048
                assert step.epoch == pytest.approx((position + 8) / (233 * 2**21))
                proven = sum(int(shard.file.proven.sum()) for shard in loader._reader.sources[0]._open.values())
                assert proven <= 2 * 128 * 2
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert loader._reader.sources[0].info.tokens > 10**12


# --- devices


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_reach_the_device_as_they_are_on_the_cpu(sources):
    cfg, device = mixture(sources), torch.device("cuda", torch.cuda.device_count() - 1)
    with only(cfg, micro=8) as on_cpu, only(cfg, micro=8, device=device) as on_cuda:
        for step in range(6):
            for ours, theirs in zip(on_cpu.step(step * ROWS).batches, on_cuda.step(step * ROWS).batches, strict=True):
                assert {tensor.device for tensor in theirs[:5]} == {device}
                assert all(torch.equal(a, b.cpu()) for a, b in zip(ours[:5], theirs[:5], strict=True))
