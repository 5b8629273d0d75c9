"""Packing: what a row may hold, that nothing is lost or repeated, and how little is padding."""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import pack
from data_prep.errors import DataError
from data_prep.pack import best_fit, pack_dataset
from data_prep.row_index import index_path, packings
from data_prep.rows import IGNORE, open_rows
from data_prep.shard import Manifest
from tests.pretrain.data.numbered import counting, write_dataset

LENGTHS = st.lists(st.integers(1, 40), max_size=60)


def rows_of_a_slow_best_fit_decreasing(lengths: list[int], seq_len: int) -> int:
    """The number of rows by the textbook: each piece, longest first, where least room is left."""
    pieces = [min(seq_len, n - 1 - at) for n in lengths for at in range(0, n - 1, seq_len)]
    room: list[int] = []
    for piece in sorted(pieces, reverse=True):
        fitting = [k for k in range(len(room)) if room[k] >= piece]
        if fitting:
            room[min(fitting, key=room.__getitem__)] -= piece
        else:
            room.append(seq_len - piece)
    return len(room)


@settings(max_examples=300, deadline=None)
@given(LENGTHS, st.integers(1, 16))
def test_every_token_but_a_documents_first_is_a_target_once_and_only_long_documents_are_cut(lengths, seq_len):
    plan = best_fit(np.array(lengths, np.int64), seq_len)
    covered = [np.zeros(n, int) for n in lengths]
    for document, start, size in zip(plan.documents, plan.starts, plan.sizes, strict=True):
        covered[document][start + 1 : start + size + 1] += 1
    assert all(tokens[0] == 0 and (tokens[1:] == 1).all() for tokens in covered)
    pieces = np.bincount(plan.documents, minlength=len(lengths))
    assert pieces.tolist() == [-(-(n - 1) // seq_len) for n in lengths]  # no cut more than needed
    used = [plan.sizes[a:b].sum() for a, b in zip(plan.first, plan.first[1:], strict=False)]
    assert all(0 < size <= seq_len for size in used)
    assert plan.first[0] == 0
    assert plan.first[-1] == len(plan.sizes)
    assert len(used) <= rows_of_a_slow_best_fit_decreasing(lengths, seq_len)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 16))
def test_pieces_of_a_row_and_rows_stand_in_the_order_of_documents(lengths, seq_len):
    plan = best_fit(np.array(lengths, np.int64), seq_len)
    place = plan.documents * 100 + plan.starts
    for a, b in zip(plan.first, plan.first[1:], strict=False):
        assert (np.diff(place[a:b]) > 0).all()
    assert (np.diff(place[plan.first[:-1]]) > 0).all()


def test_a_row_that_best_fit_decreasing_would_waste_is_saved_by_exact_sums():
    # Best fit, longest first: 6 + 5, 5 + 4 + 2, and a 2 alone. But 6 + 4 + 2 and 5 + 5 + 2 fill two rows exactly.
    lengths = np.array([2, 2, 4, 6, 5, 5]) + 1
    assert rows_of_a_slow_best_fit_decreasing(lengths.tolist(), 12) == 3
    plan = best_fit(lengths, 12)
    assert len(plan.first) - 1 == 2
    assert np.add.reduceat(plan.sizes, plan.first[:-1]).tolist() == [12, 12]


@pytest.mark.parametrize(("eos", "most"), [(1, 0.002), (2, 0.003)])
def test_padding_of_real_pages_is_near_the_least_that_whole_rows_allow(shared, tmp_path, eos, most):
    """1,000 pages of C4 at 2,048 with the GPT-2 tokenizer; with EOS alone 0.08 %, with BOS too 0.29 %, of which the
    last row, which only 606 positions are left for, is all but nothing."""
    from tokenizers import ByteLevelBPETokenizer

    gpt2 = shared / "tokenizers" / "gpt2"
    encode = ByteLevelBPETokenizer(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt")).encode_batch
    pages = (shared / "c4_en_1k.jsonl").read_bytes().splitlines()
    texts = [json.loads(page)["text"] for page in pages]
    documents = [found.ids + [50256] * eos for found in encode(texts)]
    write_dataset(tmp_path, {"train": [documents]})
    info = pack_dataset(tmp_path, 2048)["train"]
    assert info.targets == sum(len(tokens) - 1 for tokens in documents)
    assert info.rows == -(-info.targets // 2048)
    assert info.padding_fraction < most


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
@pytest.mark.parametrize("window", [1, 3, 10, 1 << 20])
def test_windows_bound_memory_and_lose_nothing(tmp_path, monkeypatch, packing, window):
    monkeypatch.setattr(pack, "WINDOW", window)
    rng = np.random.default_rng(window)
    lengths = [rng.integers(1, 30, n).tolist() for n in (20, 0, 1, 17)]
    write_dataset(tmp_path, {"train": counting(lengths)})
    info = pack_dataset(tmp_path, 8, packing)["train"]
    rows = open_rows(tmp_path, "train", 8, packing)
    batch = rows.read(np.arange(len(rows)))
    firsts = np.cumsum([1] + [n for shard in lengths for n in shard])
    total = int(firsts[-1]) - 1
    labels = np.sort(batch.labels[batch.labels != IGNORE])
    assert labels.tolist() == sorted(set(range(1, total + 1)) - set(firsts.tolist()))
    assert (info.documents, info.tokens, info.left_out) == (38, total, sum(n == 1 for s in lengths for n in s))
    assert info.targets == len(labels) == rows.num_targets
    assert info.positions == (batch.documents >= 0).sum()
    assert info.padding_fraction == pytest.approx((batch.documents == -1).mean())
    segments = [len(set(row.tolist())) for row in batch.documents]
    assert info.max_documents == max(segments)
    assert info.num_bytes == 3 * sum(n for shard in lengths for n in shard if n > 1)
    if packing == "best_fit":
        assert info.windows == (1 if window == 1 << 20 else info.windows) > 0
        assert max(len(rows.pieces(r)) for r in range(len(rows))) <= window


def test_a_window_ends_with_its_shard_once_it_is_large_so_that_rows_touch_one_file(tmp_path, monkeypatch):
    write_dataset(tmp_path, {"train": counting([[3, 4, 5, 6], [3, 3, 3, 3], [2]])})
    pack_dataset(tmp_path, 20)
    across = open_rows(tmp_path, "train", 20)
    assert any(len({piece.shard for piece in across.pieces(row)}) > 1 for row in range(len(across)))
    monkeypatch.setattr(pack, "LEAST_WINDOW", 4)
    assert pack_dataset(tmp_path, 20)["train"].windows == 3
    rows = open_rows(tmp_path, "train", 20)
    assert all(len({piece.shard for piece in rows.pieces(row)}) == 1 for row in range(len(rows)))


def test_packing_again_gives_equal_bytes_and_another_length_touches_no_shard(tmp_path):
    write_dataset(tmp_path, {"train": counting([[5, 9, 2], [30]]), "val": counting([[4, 4]])})
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.tok")}
    pack_dataset(tmp_path, 8)
    path = index_path(tmp_path, "train", 8, "best_fit")
    once = path.read_bytes()
    pack_dataset(tmp_path, 8)
    pack_dataset(tmp_path, 4)
    pack_dataset(tmp_path, 8, "concat")
    assert path.read_bytes() == once
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.tok")} == before
    assert packings(tmp_path, "train") == packings(tmp_path, "val") == [(4, "best_fit"), (8, "best_fit"), (8, "concat")]
    assert sorted(path.name for path in (tmp_path / "rows").iterdir())[0] == "train-4-best_fit.rows"
    assert len(list((tmp_path / "rows").iterdir())) == 6  # and no temporary file


def test_documents_without_a_target_make_no_row(tmp_path):
    write_dataset(tmp_path, {"train": [[[7], [8], [9]]], "val": []})
    infos = pack_dataset(tmp_path, 4)
    assert (infos["train"].rows, infos["train"].left_out, infos["train"].num_bytes) == (0, 3, 0)
    assert infos["val"].rows == 0
    assert infos["val"].padding_fraction == 0.0
    concat = pack_dataset(tmp_path, 4, "concat")["train"]
    assert (concat.rows, concat.positions, concat.targets) == (1, 2, 0)
    assert len(open_rows(tmp_path, "val", 4, "best_fit")) == 0


def test_what_cannot_be_packed_is_refused(tmp_path):
    write_dataset(tmp_path, {"train": [[[7, 8]]]})
    with pytest.raises(DataError, match="seq_len=0"):
        pack_dataset(tmp_path, 0)
    with pytest.raises(DataError, match="packing='first_fit' is unknown; use best_fit or concat"):
        pack_dataset(tmp_path, 4, "first_fit")
    shard = tmp_path / "shards/train-00000.tok"
    write_dataset(tmp_path / "other", {"train": [[[1, 2]]]})
    shard.write_bytes((tmp_path / "other/shards/train-00000.tok").read_bytes())
    with pytest.raises(DataError, match="is not the shard that the manifest names"):
        pack_dataset(tmp_path, 4)
    assert not list(Path(tmp_path / "rows").iterdir())


def test_the_row_index_is_as_the_format_page_says(tmp_path):
    write_dataset(tmp_path, {"train": counting([[5, 12, 1], [3, 4]])})
    info = pack_dataset(tmp_path, 4)["train"]
    data = index_path(tmp_path, "train", 4, "best_fit").read_bytes()
    magic, version, _, block, _, payload, sha = struct.unpack_from("<8sIIIIQ32s", data)
    body = data[4096 : 4096 + payload]
    assert (magic, version, block, sha) == (b"ROWINDEX", 1, 4096, hashlib.sha256(body).digest())
    packing, _, seq_len, rows, pieces, windows, documents, left_out, tokens, positions, targets, num_bytes, most = (
        struct.unpack_from("<II11Q", data, 128)
    )
    assert (packing, seq_len, documents, left_out, tokens, num_bytes, most) == (0, 4, 5, 1, 25, 72, 2)
    assert positions == targets == 20 == info.targets
    shards = "".join(f"{s.file} {s.tokens} {s.documents} {s.sha256}\n" for s in Manifest.read(tmp_path).shards("train"))
    assert data[224:256] == hashlib.sha256(shards.encode()).digest()
    at, found = 0, {}
    for name, count, kind in (
        ("windows", 2 * windows, "Q"),
        ("first", rows + 1, "Q"),
        ("starts", pieces, "Q"),
        ("missing", rows, "I"),
        ("sizes", pieces, "I"),
    ):
        found[name] = struct.unpack_from(f"<{count}{kind}", body, at)
        at += struct.calcsize(f"<{count}{kind}")
    assert at == payload
    # Tokens 1-5, 6-17, 18 (alone, left out), 19-21 and 22-25 make pieces of 4, 4 + 4 + 3, 2 and 3 positions.
    assert found == {
        "windows": (0, 0),
        "first": (0, 1, 2, 3, 4, 5, 6),
        "starts": (0, 5, 9, 13, 18, 21),
        "missing": (0, 0, 0, 1, 2, 1),
        "sizes": (4, 4, 4, 3, 2, 3),
    }
