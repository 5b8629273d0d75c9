"""Makes the next steps in one thread while the present one is computed."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """`get(position, rows)` returns what `make` made for it; meanwhile the thread makes what follows until `depth`
    steps are ready, supposing that the next call asks for (position + rows, rows). Asking for anything else is right
    too, only late.

    `make(position, rows, awaited)` returns that step and, where that is cheaper, some that follow; `awaited` says that
    a caller waits for just this one. Its error is raised, with its traceback, by the `get` that asked for the step, and
    the thread waits for another `get`. The thread starts with the first `get` and is gone after `close`.
    """

    def __init__(self, make: Callable[[int, int, bool], list[T]], depth: int) -> None:
        self._make, self._depth = make, depth
        self._changed = threading.Condition()
        self._ready: deque[tuple[tuple[int, int], T | None, BaseException | None]] = deque()
        self._next: tuple[int, int] | None = None  # what the thread makes, or would
        self._jumps = 0  # results begun before a jump are thrown away
        self._jumped = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def get(self, position: int, rows: int) -> T:
        wanted = (position, rows)
        with self._changed:
            if self._closed:
                raise RuntimeError("the loader is closed")
            if (self._ready[0][0] if self._ready else self._next) != wanted:
                self._ready.clear()
                self._next = wanted
                self._jumps += 1
                self._jumped = True
                self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="data-prefetch", daemon=True)
                self._thread.start()
            self._changed.wait_for(lambda: self._ready or self._closed)
            if self._closed:
                raise RuntimeError("the loader was closed while a step was awaited")
            _, made, error = self._ready.popleft()
            if len(self._ready) < self._depth:  # else the thread would wake up for nothing
                self._changed.notify_all()
        if error is not None:
            raise error
        return made  # type: ignore[return-value]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._next and len(self._ready) < self._depth))
                if self._closed or self._next is None:
                    return
                (position, rows), jumps, awaited = self._next, self._jumps, self._jumped
                self._jumped = False
            made: list[T] = []
            error = None
            try:
                made = self._make(position, rows, awaited)
            except BaseException as caught:  # whatever it is, the caller must hear of it
                error = caught
            with self._changed:
                if jumps != self._jumps:
                    continue
                for step in made:
                    self._ready.append(((position, rows), step, None))
                    position += rows
                if error:
                    self._ready.append(((position, rows), None, error))
                self._next = None if error else (position, rows)
                self._changed.notify_all()
