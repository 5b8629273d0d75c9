"""Which source each row of the stream comes from, for weights that hold: never a row away from the share asked for.

Exact weights repeat after their common denominator, so one such period is laid out when the mixture is made and every
question about any place in the stream is a look-up and a division.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from pretrain.errors import ConfigError

LONGEST_PERIOD = 200_000  # places; a tenth of a second to lay out


class Mixture:
    """After n places, each source has had more than n x share - 1 and fewer than n x share + 1 of them.

    The k-th row of a source with share w may stand at the places floor((k-1)/w) .. ceil(k/w) - 1: that window is the
    same demand. Serving the open window that ends first meets all windows whenever it can be done, and for shares that
    sum to 1 it can (Baruah et al. 1996, "Proportionate progress", for one processor).
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]  # 0.1 is a tenth, not the nearest binary number
        shares = [weight / sum(exact) for weight in exact]
        self.period = math.lcm(*(share.denominator for share in shares))
        if self.period > LONGEST_PERIOD:
            raise ConfigError(
                f"data: weights {list(weights)} repeat only after {self.period:,} rows, more than {LONGEST_PERIOD:,}; "
                f"round them, for example to {_rounded(shares)}"
            )
        self.per_period = np.array([int(share * self.period) for share in shares])
        self._source = _lay_out(self.per_period.tolist(), self.period)
        self._places = [np.flatnonzero(self._source == source) for source in range(len(weights))]
        self._nth = np.empty(self.period, np.int64)
        for places in self._places:
            self._nth[places] = np.arange(len(places))

    def at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each place, and how many rows that source had before; int64 both."""
        turn, place = np.divmod(places, self.period)
        source = self._source[place]
        return source, turn * self.per_period[source] + self._nth[place]

    def counts(self, places: np.ndarray | int) -> np.ndarray:
        """int64 [..., sources]: rows of each source in the first `places` places."""
        turns, rest = np.divmod(places, self.period)
        within = np.stack([np.searchsorted(its_places, rest) for its_places in self._places], axis=-1)
        return turns[..., None] * self.per_period + within

    def debt(self, places: np.ndarray | int) -> np.ndarray:
        """float [..., sources]: rows of each source in the first `places` places, less its share of them."""
        rest = np.asarray(places) % self.period
        return (self.counts(rest) * self.period - rest[..., None] * self.per_period) / self.period

    def start(self, debt: np.ndarray) -> int:
        """The place of the period to begin at, so that a debt carried in plus what is drawn from there on never lies
        further from no debt at all than need be."""
        if not debt.any():
            return 0
        each = self.debt(np.arange(self.period))
        carried = debt - each  # what remains of it, whatever is drawn
        worst = np.maximum(carried + each.max(axis=0), -carried - each.min(axis=0)).max(axis=-1)
        return int(worst.argmin())

    def places(self, source: int, nth: np.ndarray) -> np.ndarray:
        """The inverse of `at`: where the source's rows number `nth` stand."""
        turn, within = np.divmod(nth, self.per_period[source])
        return turn * self.period + self._places[source][within]


def _lay_out(counts: list[int], period: int) -> np.ndarray:
    """int64 [period]: the source at each place, earliest deadline first."""
    served = [0] * len(counts)
    opening = [(0, source) for source, count in enumerate(counts) if count]  # (first place, source)
    open_now: list[tuple[int, int]] = []  # (place before which it must be served, source)
    source_at = np.empty(period, np.int64)
    for place in range(period):
        while opening and opening[0][0] <= place:
            source = heapq.heappop(opening)[1]
            heapq.heappush(open_now, (-(-(served[source] + 1) * period // counts[source]), source))
        source = source_at[place] = heapq.heappop(open_now)[1]
        served[source] += 1
        heapq.heappush(opening, (served[source] * period // counts[source], source))
    return source_at


def _rounded(shares: list[Fraction]) -> list[float]:
    return [max(round(float(share), 4), 0.0001) if share else 0.0 for share in shares]
