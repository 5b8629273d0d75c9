"""The prefetch thread: what it makes ahead, what it does with errors and jumps, and that it goes."""

import threading
import time
import traceback

import pytest

from pretrain.data.prefetch import Prefetcher


def settle(condition) -> None:
    """Waits for another thread to reach a state that it is bound to reach."""
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, "the thread did not get there"
        time.sleep(0.001)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "data-prefetch"]


class Maker:
    """Makes (position, rows) of each step, `together` of them at a time unless awaited."""

    def __init__(self, together: int = 1) -> None:
        self.together, self.calls = together, []

    def __call__(self, position: int, rows: int, awaited: bool) -> list[tuple[int, int]]:
        self.calls.append((position, rows, awaited))
        if position == 13:
            raise OSError("the disk is gone")
        return [(position + k * rows, rows) for k in range(1 if awaited else self.together)]


@pytest.mark.parametrize("together", [1, 3])
def test_steps_come_in_order_and_are_made_ahead_but_not_further_than_asked(together):
    maker = Maker(together)
    prefetch = Prefetcher(maker, depth=2)
    assert prefetch.get(0, 4) == (0, 4)
    settle(lambda: len(maker.calls) == (3 if together == 1 else 2))
    time.sleep(0.05)
    assert maker.calls[:2] == [(0, 4, True), (4, 4, False)]
    assert len(maker.calls) == (3 if together == 1 else 2)  # two steps, or three made together, lie ready
    assert [prefetch.get(4 * step, 4) for step in range(1, 9)] == [(4 * step, 4) for step in range(1, 9)]
    prefetch.close()


def test_a_jump_or_another_number_of_rows_is_followed():
    maker = Maker()
    prefetch = Prefetcher(maker, depth=3)
    for position, rows in ((0, 4), (4, 4), (100, 4), (104, 8), (112, 8), (0, 4), (0, 4)):
        assert prefetch.get(position, rows) == (position, rows)
    prefetch.close()
    assert [call for call in maker.calls if call[2]] == [(0, 4, True), (100, 4, True), (104, 8, True)] + [
        (0, 4, True)
    ] * 2


def test_an_error_reaches_the_caller_of_its_step_with_the_traceback_and_the_thread_stays_usable():
    prefetch = Prefetcher(Maker(), depth=4)
    assert prefetch.get(11, 1) == (11, 1)
    assert prefetch.get(12, 1) == (12, 1)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone") as caught:
            prefetch.get(13, 1)
        assert "__call__" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert prefetch.get(14, 1) == (14, 1)
    prefetch.close()


def test_closing_leaves_no_thread_whatever_it_was_doing():
    before = threads()
    Prefetcher(Maker(), depth=2).close()  # never started
    idle = Prefetcher(Maker(), depth=2)
    idle.get(0, 1)
    failed = Prefetcher(Maker(), depth=2)
    with pytest.raises(OSError, match="disk"):
        failed.get(13, 1)
    begun, go_on = threading.Event(), threading.Event()

    def slow(position: int, rows: int, awaited: bool) -> list[int]:
        begun.set()
        go_on.wait(30)
        return [position]

    busy = Prefetcher(slow, depth=2)
    outcome = []

    def wait_for_a_step() -> None:
        try:
            busy.get(0, 1)
        except RuntimeError as error:
            outcome.append(str(error))

    waiting = threading.Thread(target=wait_for_a_step)
    waiting.start()
    assert begun.wait(30)
    closing = threading.Thread(target=busy.close)
    closing.start()
    waiting.join(30)
    assert outcome == ["the loader was closed while a step was awaited"]
    go_on.set()
    closing.join(30)
    for prefetch in (idle, failed):
        prefetch.close()
        prefetch.close()
    assert threads() == before
    with pytest.raises(RuntimeError, match="the loader is closed"):
        idle.get(1, 1)
