"""The order of the stream: epochs, mixtures, stages and skips, from any position, and back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.order import Order


def plain(rows: int, seed: int = 1) -> Order:
    return Order(seed=seed, sizes=[rows], weights=[1.0])


def rows_of(order: Order, first: int, count: int) -> list[int]:
    return order.rows(first, count).row.tolist()


def test_each_epoch_is_another_order_of_all_rows_and_the_seed_decides():  # G14
    epochs = [rows_of(plain(20), 20 * epoch, 20) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [rows_of(plain(20), 20 * epoch, 20) for epoch in range(3)] == epochs
    assert rows_of(plain(20, seed=2), 0, 20) != epochs[0]


@pytest.mark.parametrize("stopped", [4, 8])
def test_a_run_stopped_at_the_end_of_an_epoch_goes_on_with_the_next(stopped):  # G16
    unbroken = [rows_of(plain(8), 2 * step, 2) for step in range(12)]
    resumed = [rows_of(plain(8), 2 * step, 2) for step in range(stopped, 12)]
    assert resumed == unbroken[stopped:]
    epoch = [row for step in unbroken[stopped : stopped + 4] for row in step]
    assert sorted(epoch) == list(range(8))
    assert plain(8).epochs(2 * stopped).tolist() == [stopped / 4]


def test_a_resumed_run_does_not_draw_again_what_it_drew():  # G17
    unbroken = rows_of(plain(10**6), 0, 20)
    assert rows_of(plain(10**6), 10, 10) == unbroken[10:]
    assert not set(unbroken[:10]) & set(unbroken[10:])


def test_the_first_position_and_the_trillionth_are_answered_alike():
    order = Order(seed=3, sizes=[10**12, 7], weights=[0.75, 0.25])
    for first in (0, 10**12 - 3, 4 * 10**12 // 3 - 2):
        found = order.rows(first, 9)
        assert (found.source == order.rows(first + 4, 5).source[0]).sum() >= 1
        assert [tuple(column[4:].tolist()) for column in found] == [
            tuple(column.tolist()) for column in order.rows(first + 4, 5)
        ]
        assert ((found.row >= 0) & (found.row < np.array([10**12, 7])[found.source])).all()
    end_of_epoch = order.rows(4 * 10**12 // 3 - 8, 16)
    assert set(end_of_epoch.epoch[end_of_epoch.source == 0].tolist()) == {0, 1}


def test_sources_keep_their_own_epochs():
    order = Order(seed=1, sizes=[30, 5], weights=[0.5, 0.5])
    found = order.rows(0, 60)
    big, small = found.source == 0, found.source == 1
    assert sorted(found.row[big].tolist()) == list(range(30))
    assert np.bincount(found.row[small]).tolist() == [6] * 5
    assert [sorted(found.row[small][5 * e :][:5].tolist()) for e in range(6)] == [list(range(5))] * 6
    assert found.epoch[small].tolist() == sorted(list(range(6)) * 5)
    assert order.epochs(60).tolist() == [1.0, 6.0]
    assert order.epochs(0).tolist() == [0.0, 0.0]


def test_sources_of_equal_size_are_not_in_the_same_order():
    found = Order(seed=1, sizes=[50, 50], weights=[1, 1]).rows(0, 100)
    assert found.row[found.source == 0].tolist() != found.row[found.source == 1].tolist()


def test_stages_change_the_weights_where_they_begin_and_repeat_no_row():
    order = Order(seed=1, sizes=[100, 100], weights=[0.9, 0.1], stages=[(401, [0.5, 0.5]), (800, [0, 1])], seq_len=10)
    found = order.rows(0, 120)
    # 401 tokens end inside row 40: the stage begins with the next one.
    assert np.bincount(found.source[:41]).tolist() == [37, 4]
    assert np.bincount(found.source[41:80]).tolist() in ([19, 20], [20, 19])
    assert (found.source[80:] == 1).all()
    for source in (0, 1):
        rows = found.row[found.source == source]
        assert len(set(rows.tolist())) == len(rows)
    assert [tuple(c[70:90].tolist()) for c in found] == [tuple(c.tolist()) for c in order.rows(70, 20)]


def test_a_stage_from_the_start_replaces_the_weights():
    order = Order(seed=1, sizes=[9, 9], weights=[1, 0], stages=[(0, [0, 1])])
    assert (order.rows(0, 9).source == 1).all()


def test_stages_of_the_same_weights_change_nothing():
    stages = [(64 * 13 * number, [0.5, 0.5]) for number in range(1, 20)]
    order = Order(seed=1, sizes=[1000, 1000], weights=[0.5, 0.5], stages=stages, seq_len=64)
    bare = Order(seed=1, sizes=[1000, 1000], weights=[0.5, 0.5])
    assert all((a == b).all() for a, b in zip(order.rows(0, 260), bare.rows(0, 260), strict=True))
    assert np.bincount(order.rows(0, 260).source).tolist() == [130, 130]


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(2, 5))
def test_debts_do_not_add_up_over_stages(data, count):
    weights = st.lists(st.integers(0, 9), min_size=count, max_size=count).filter(any)
    shares = data.draw(st.lists(weights, min_size=2, max_size=20))
    lengths = data.draw(st.lists(st.integers(1, 25), min_size=len(shares), max_size=len(shares)))
    ends = np.cumsum(lengths).tolist()
    order = Order(
        seed=1, sizes=[9] * count, weights=shares[0], stages=list(zip(ends[:-1], shares[1:], strict=True)), seq_len=1
    )
    drawn = np.cumsum(order.rows(0, ends[-1]).source[:, None] == np.arange(count), axis=0)
    exact = np.array(shares) / np.sum(shares, axis=1, keepdims=True)
    debt = np.abs(drawn - np.cumsum(np.repeat(exact, lengths, axis=0), axis=0)).max()
    assert debt < (1 if count == 2 else 2)


def test_skipped_rows_are_left_out_and_nothing_else_moves():
    bare = Order(seed=1, sizes=[50, 20], weights=[0.6, 0.4])
    order = Order(seed=1, sizes=[50, 20], weights=[0.6, 0.4], skip=[[12, 12], [3, 5], [6, 9], [8, 10]])
    everything, kept = bare.rows(0, 60), order.rows(0, 51)
    left = [row for row in range(60) if row not in {3, 4, 5, 6, 7, 8, 9, 10, 12}]
    assert kept.stream_row.tolist() == left
    for name in ("source", "epoch", "row"):
        assert getattr(kept, name).tolist() == getattr(everything, name)[left].tolist()
    assert order.epochs(3).tolist() == bare.epochs(3).tolist()
    assert order.epochs(4).tolist() == bare.epochs(12).tolist()  # position 3 is stream row 11


SETTINGS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 5),
        "sizes": st.lists(st.integers(1, 30), min_size=2, max_size=2),
        "weights": st.lists(st.integers(1, 9), min_size=2, max_size=2),
        "stages": st.lists(
            st.tuples(st.integers(0, 200), st.lists(st.integers(0, 5), min_size=2, max_size=2).filter(any)),
            max_size=4,
            unique_by=lambda stage: stage[0],
        ).map(sorted),
        "skip": st.lists(
            st.tuples(st.integers(0, 250), st.integers(0, 40)).map(lambda pair: [pair[0], pair[0] + pair[1]]),
            max_size=3,
        ),
    }
)


@settings(max_examples=80, deadline=None)
@given(SETTINGS, st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_the_stream_is_the_same_in_any_pieces(given_settings, lengths):
    order, ends = Order(**given_settings), np.cumsum([0, *lengths])
    whole = order.rows(0, sum(lengths))
    assert order.epochs(ends).tolist() == [order.epochs(end).tolist() for end in ends.tolist()]
    at = 0
    for length in lengths:
        part = Order(**given_settings).rows(at, length)
        assert all((a[at : at + length] == b).all() for a, b in zip(whole, part, strict=True))
        at += length


@settings(max_examples=60, deadline=None)
@given(SETTINGS, st.integers(0, 300))
def test_looking_up_a_row_finds_each_position_where_it_stands(given_settings, end):
    order = Order(**given_settings)
    found = order.rows(0, 300)
    for source, size in enumerate(given_settings["sizes"]):
        drawn = np.bincount(found.source[:end], minlength=2)[source]
        assert order.epochs(end)[source] >= drawn / size  # skipped rows count as drawn
        for row in range(size):
            here = np.flatnonzero((found.source == source) & (found.row == row))
            assert order.positions_of(source, row, end).tolist() == here[here < end].tolist()
