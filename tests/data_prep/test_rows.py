"""Rows against plain loops over the documents: inputs, labels, positions, documents, counts, and their origin."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.blockfile import HEADER_BYTES
from data_prep.errors import DataError
from data_prep.pack import pack_dataset
from data_prep.row_index import RowIndex, index_path
from data_prep.rows import IGNORE, open_rows
from data_prep.shard import BLOCK_BYTES
from tests.pretrain.data.numbered import counting, write_dataset

SHARDS = st.lists(st.lists(st.integers(1, 12), max_size=6), min_size=1, max_size=4)


def concat_by_the_book(shards: list, seq_len: int, mask: bool) -> list[tuple[list, list, list, list]]:
    """Rows of the stream of all tokens, position by position."""
    every = [tokens for shard in shards for tokens in shard]
    stream = [(token, document) for document, tokens in enumerate(every) for token in tokens]
    rows = []
    for begin in range(0, len(stream) - 1, seq_len):
        inputs, labels, positions, documents = [], [], [], []
        for at in range(begin, begin + seq_len):
            if at >= len(stream) - 1:
                row = (0, IGNORE, 0, -1) if mask else (0, IGNORE, at - begin, 0)
            else:
                (token, document), (following, its_document) = stream[at], stream[at + 1]
                label = following if document == its_document or not mask else IGNORE
                starts = [i for i in range(begin, at + 1) if i == begin or stream[i][1] != stream[i - 1][1]]
                row = (token, label, at - starts[-1], len(starts) - 1) if mask else (token, label, at - begin, 0)
            for values, value in zip((inputs, labels, positions, documents), row, strict=True):
                values.append(value)
        rows.append((inputs, labels, positions, documents))
    return rows


@settings(max_examples=120, deadline=None)
@given(SHARDS, st.integers(1, 9), st.booleans())
def test_concat_rows_are_the_stream_cut_every_seq_len(tmp_path_factory, lengths, seq_len, mask):
    folder, shards = tmp_path_factory.mktemp("concat"), counting(lengths)
    write_dataset(folder, {"train": shards})
    pack_dataset(folder, seq_len, "concat")
    rows = open_rows(folder, "train", seq_len, mask_documents=mask)
    expected = concat_by_the_book(shards, seq_len, mask)
    assert len(rows) == len(expected)
    order = np.random.default_rng(0).permutation(len(rows))
    batch = rows.read(order)
    for k, row in enumerate(order):
        assert [values[k].tolist() for values in batch[:4]] == list(expected[row])
    check_counts(rows)


@settings(max_examples=120, deadline=None)
@given(SHARDS, st.integers(1, 9), st.booleans())
def test_best_fit_rows_teach_every_token_from_the_one_before(tmp_path_factory, lengths, seq_len, mask):
    folder, shards = tmp_path_factory.mktemp("best_fit"), counting(lengths)
    write_dataset(folder, {"train": shards}, eos_id=9)
    pack_dataset(folder, seq_len)
    rows = open_rows(folder, "train", seq_len, mask_documents=mask)
    batch = rows.read(np.arange(len(rows)))
    taught = batch.labels != IGNORE
    expected = sorted(token for shard in shards for tokens in shard for token in tokens[1:])
    assert sorted(batch.labels[taught].tolist()) == expected
    assert (batch.labels[taught] == batch.inputs[taught] + 1).all()
    padding = ~taught
    assert (batch.inputs[padding] == 9).all()
    assert (np.diff(padding.astype(int), axis=1) >= 0).all()
    if mask:
        assert (batch.documents[padding] == -1).all()
        assert (batch.positions[padding] == 0).all()
        begins = np.ones_like(taught)
        begins[:, 1:] = batch.inputs[:, 1:] != batch.labels[:, :-1]
        for row in range(len(rows)):
            at = np.flatnonzero(begins[row] & taught[row])
            for a, b in zip(at, [*at[1:], taught[row].sum()], strict=True):
                assert batch.positions[row, a:b].tolist() == list(range(b - a))
                assert len(set(batch.documents[row, a:b].tolist())) == 1
    else:
        assert (batch.documents == 0).all()
        assert (batch.positions == np.arange(seq_len)).all()
    check_counts(rows)


def check_counts(rows) -> None:
    everything = np.arange(len(rows))
    targets, tokens = rows.targets(everything), rows.tokens(everything)
    assert targets.dtype == tokens.dtype == np.int64
    batch = rows.read(everything)
    assert targets.tolist() == (batch.labels != IGNORE).sum(1).tolist()
    if rows.mask_documents:
        assert tokens.tolist() == (batch.documents >= 0).sum(1).tolist()
    assert targets.sum() == rows.num_targets
    assert [array.dtype for array in batch] == [np.int64, np.int64, np.int32, np.int32, np.int32]
    for row in range(len(rows)):
        begins = batch.starts[row][batch.starts[row] < rows.seq_len]
        changes = np.flatnonzero(np.diff(batch.documents[row], prepend=-2))
        assert begins.tolist() == changes.tolist()
    assert batch.starts.shape == (len(rows), rows.max_documents_per_row)


def test_the_label_that_crosses_a_document_is_ignored_and_stays_without_masking(tmp_path):  # G11
    write_dataset(tmp_path, {"train": [[[5, 6], [7, 8, 9]]]})
    pack_dataset(tmp_path, 4, "concat")
    masked = open_rows(tmp_path, "train", 4)
    batch = masked.read(np.array([0]))
    assert batch.inputs.tolist() == [[5, 6, 7, 8]]
    assert batch.labels.tolist() == [[6, IGNORE, 8, 9]]
    assert masked.targets(np.array([0])).tolist() == [3]
    plain = open_rows(tmp_path, "train", 4, mask_documents=False)
    assert plain.read(np.array([0])).labels.tolist() == [[6, 7, 8, 9]]
    assert plain.num_targets == 4


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_where_a_row_comes_from_and_which_rows_hold_a_document(tmp_path, packing):
    shards = counting([[3, 30, 1, 6], [], [2, 11, 5], [40]])
    write_dataset(tmp_path, {"train": shards})
    pack_dataset(tmp_path, 7, packing)
    rows = open_rows(tmp_path, "train", 7)
    batch = rows.read(np.arange(len(rows)))
    holding: dict[tuple[int, int], set[int]] = {}
    for row in range(len(rows)):
        for piece in rows.pieces(row):
            number = int(piece.shard[len("train-") : -len(".tok")])
            tokens = shards[number][piece.document][piece.start :][: piece.size]
            assert batch.inputs[row, piece.at : piece.at + piece.size].tolist() == tokens
            assert (piece.source, piece.line) == (number, piece.document + 1)
            holding.setdefault((number, piece.document), set()).add(row)
    document = 0
    for number, shard in enumerate(shards):
        for local in range(len(shard)):
            assert rows.rows_of(document).tolist() == sorted(holding.get((number, local), ()))
            document += 1
    for wrong in (-1, document):
        with pytest.raises(DataError, match=f"document {wrong}: split 'train' of .* has 8"):
            rows.rows_of(wrong)


def test_few_open_shards_read_the_same_rows_as_many(tmp_path):
    write_dataset(tmp_path, {"train": counting([[9] * 5 for _ in range(12)])})
    pack_dataset(tmp_path, 8)
    few, many = (open_rows(tmp_path, "train", 8, max_open=most) for most in (2, 100))
    order = np.random.default_rng(0).permutation(len(many))
    assert (few.read(order).inputs == many.read(order).inputs).all()
    assert (len(few._open), len(many._open)) == (2, 12)


def test_only_rows_that_touch_a_damaged_block_fail(tmp_path):
    rows_per_block = BLOCK_BYTES // 2 // 9  # documents of 9 tokens fill rows of 8
    write_dataset(tmp_path, {"train": counting([[9] * (3 * rows_per_block)], first=1)})
    pack_dataset(tmp_path, 8)
    path = tmp_path / "shards/train-00000.tok"
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + BLOCK_BYTES + 100] ^= 4
    path.write_bytes(data)
    rows = open_rows(tmp_path, "train", 8)
    bad, messages = [], set()
    for row in range(len(rows)):
        try:
            rows.read(np.array([row]))
        except DataError as error:
            messages.add(str(error))
            bad.append(row)
    (message,) = messages
    assert f"{path}: bytes 36864 to 69631 (block 1 of" in message
    first, last = bad[0] * 9, bad[-1] * 9 + 8  # tokens
    assert bad == list(range(bad[0], bad[-1] + 1))
    assert first <= BLOCK_BYTES // 2 <= first + 9
    assert last - 9 <= BLOCK_BYTES - 1 <= last


def test_counts_of_rows_read_no_token(tmp_path):
    write_dataset(tmp_path, {"train": counting([[9, 5, 30]])})
    for packing in ("best_fit", "concat"):
        pack_dataset(tmp_path, 8, packing)
    (tmp_path / "shards/train-00000.tok").unlink()
    assert open_rows(tmp_path, "train", 8, "best_fit").targets(np.arange(6)).sum() == 8 + 4 + 29
    concat = open_rows(tmp_path, "train", 8, "concat")
    assert concat.targets(np.arange(6)).tolist() == [8, 6, 8, 8, 8, 3]
    assert concat.tokens(np.arange(6)).tolist() == [8, 8, 8, 8, 8, 3]


def test_a_missing_or_swapped_shard_is_named_when_a_row_needs_it(tmp_path):
    write_dataset(tmp_path, {"train": counting([[9, 9], [9, 9]])})
    pack_dataset(tmp_path, 8)
    first, second = (tmp_path / f"shards/train-0000{k}.tok" for k in (0, 1))
    second.write_bytes(first.read_bytes())
    rows = open_rows(tmp_path, "train", 8)
    rows.read(np.array([0, 1]))
    with pytest.raises(DataError, match=r"train-00001\.tok: is not the shard that the manifest names"):
        rows.read(np.array([2]))
    second.unlink()
    with pytest.raises(DataError, match=r"train-00001\.tok: cannot be opened"):
        rows.read(np.array([3]))


def test_rows_that_are_not_there_are_refused_with_what_is(tmp_path):
    write_dataset(tmp_path, {"train": counting([[9, 9]])})
    with pytest.raises(DataError, match=r"no rows of seq_len=8 .*it has none; run `pretrain-data pack .* --seq-len 8"):
        open_rows(tmp_path, "train", 8)
    pack_dataset(tmp_path, 4)
    pack_dataset(tmp_path, 8, "concat")
    with pytest.raises(DataError, match=r"packing='best_fit' for split 'train'; it has 4 \(best_fit\), 8 \(concat\)"):
        open_rows(tmp_path, "train", 8, "best_fit")
    assert open_rows(tmp_path, "train", 8).packing == "concat"  # the only one there
    with pytest.raises(DataError, match="has no split 'val'; it has train"):
        open_rows(tmp_path, "val", 8)
    rows = open_rows(tmp_path, "train", 4)
    for wrong in (-1, len(rows)):
        with pytest.raises(IndexError, match="which has 4"):
            rows.read(np.array([0, wrong]))


def test_an_index_made_for_other_shards_is_refused(tmp_path):
    write_dataset(tmp_path, {"train": counting([[9, 9]])})
    pack_dataset(tmp_path, 8)
    write_dataset(tmp_path, {"train": counting([[9, 9]], first=2)})
    with pytest.raises(DataError, match="was made for other shards; run `pretrain-data pack"):
        open_rows(tmp_path, "train", 8)


def test_a_damaged_index_is_found_when_it_is_looked_at(tmp_path):
    write_dataset(tmp_path, {"train": counting([[9] * 2000])})
    pack_dataset(tmp_path, 8)
    path = index_path(tmp_path, "train", 8, "best_fit")
    whole = path.read_bytes()
    for array, look in (
        ("missing", lambda rows: rows.targets(np.array([1999]))),
        ("starts", lambda rows: rows.read(np.array([1999]))),
        ("sizes", lambda rows: rows.read(np.array([1999]))),
        ("first", lambda rows: rows.read(np.array([1999]))),
    ):
        at = HEADER_BYTES + RowIndex(path)._at[array][0] + 1999 * RowIndex(path)._at[array][1]
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        rows = open_rows(tmp_path, "train", 8)
        with pytest.raises(DataError, match=r"train-8-best_fit\.rows: bytes .* fail their checksum"):
            look(rows)
        with pytest.raises(DataError, match="checksum"):
            RowIndex(path).file.verify()


def test_the_fingerprint_follows_everything_that_rows_depend_on(tmp_path):
    def fingerprint(
        name: str, lengths: list, seq_len: int = 8, packing: str = "best_fit", mask: bool = True, **kw
    ) -> str:
        folder: Path = tmp_path / name
        if not folder.exists():
            write_dataset(folder, {"train": counting(lengths)}, **kw)
        pack_dataset(folder, seq_len, packing)
        return open_rows(folder, "train", seq_len, packing, mask_documents=mask).fingerprint

    base = fingerprint("a", [[9, 9], [5]])
    assert fingerprint("same", [[9, 9], [5]]) == base
    others = [
        fingerprint("b", [[9, 9], [6]]),
        fingerprint("c", [[9], [9, 5]]),
        fingerprint("d", [[9, 9], [5]], tokenizer_hash="cd" * 32),
        fingerprint("a", [], 4),
        fingerprint("a", [], 8, "concat"),
        fingerprint("a", [], 8, "best_fit", False),
    ]
    assert len({base, *others}) == 7
