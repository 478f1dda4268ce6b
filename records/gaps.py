"""Every gap between consecutive tokens, pooled: exact, however many tokens there were."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from records.columns import IntArray, exact_sum

_MOST_PENDING = 65_536
_SMALL_ARRAY = 64
"""Arrays shorter than this go through the dict, which is quicker than sorting them."""


def linear_percentile(order_statistic: Callable[[int], float], count: int, q: float) -> float:
    """Percentile ``q`` (0 to 100) by linear interpolation between order statistics.

    This is ``numpy.percentile``'s default rule, rounding included: the rank is (count - 1) q / 100,
    and between two neighbours the value is interpolated from the nearer one. ``order_statistic(i)``
    is the i-th smallest value, ``count`` at least 1.
    """
    rank = (count - 1) * (q / 100)
    index = min(math.floor(rank), count - 1)
    share = rank - index
    low, high = order_statistic(index), order_statistic(min(index + 1, count - 1))
    if share >= 0.5:
        return float(high - (high - low) * (1 - share))
    return float(low + (high - low) * share)


class GapCounts:
    """How often each gap (ns) occurred.

    Memory and work grow with the number of different gaps, not with that of tokens: new gaps gather
    in a dict, the dict is emptied into sorted pieces, and pieces are merged whenever they outgrow
    what is merged already, so that adding costs a logarithm, amortised.
    """

    __slots__ = ("_counts", "_ends", "_gaps", "_loose", "_num_loose", "_pending")

    def __init__(self) -> None:
        self._gaps: IntArray = np.empty(0, np.int64)
        self._counts: IntArray = np.empty(0, np.int64)
        self._loose: list[tuple[IntArray, IntArray]] = []
        self._num_loose = 0
        self._pending: dict[int, int] = {}
        self._ends: IntArray | None = None

    @classmethod
    def of(cls, gaps: npt.ArrayLike, counts: npt.ArrayLike = 1) -> GapCounts:
        """The gaps of two columns, as gaps.parquet holds them."""
        result = cls()
        result.add_array(gaps, counts)
        return result

    def add(self, gap_ns: int, count: int = 1) -> None:
        """``count`` further gaps of ``gap_ns``.

        Raises ``ValueError`` for a negative gap or count.
        """
        if gap_ns < 0 or count < 0:
            raise ValueError(f"gap of {gap_ns} ns, {count} times: neither may be negative")
        if count == 0:
            return
        pending = self._pending
        pending[gap_ns] = pending.get(gap_ns, 0) + count
        if len(pending) >= _MOST_PENDING:
            self._shelve()

    def add_array(self, gaps: npt.ArrayLike, counts: npt.ArrayLike = 1) -> None:
        """Each of ``gaps`` (int, shape ``[n]``), ``counts`` times (one number or shape ``[n]``).

        Raises ``ValueError`` for a negative gap or count, ``TypeError`` for what is no
        integer.
        """
        values = np.atleast_1d(np.asarray(gaps))
        times = np.asarray(counts)
        if values.size == 0:
            return
        if values.dtype.kind not in "iu" or times.dtype.kind not in "iu":
            raise TypeError(f"gaps are {values.dtype}, counts {times.dtype}: both must be integers")
        if values.min() < 0 or times.min() < 0:
            raise ValueError("a gap or a count is negative")
        if len(values) < _SMALL_ARRAY and times.ndim == 0:
            for gap in values.tolist():
                self.add(gap, int(times))
            return
        values = values.astype(np.int64, copy=False)
        times = np.broadcast_to(times.astype(np.int64, copy=False), values.shape)
        occurs = times > 0
        if occurs.any():
            self._push(*_merged(values[occurs], times[occurs]))

    @property
    def gaps(self) -> IntArray:
        """The different gaps in ns, ascending."""
        self._merge()
        return self._gaps

    @property
    def counts(self) -> IntArray:
        """How often each of ``gaps`` occurred."""
        self._merge()
        return self._counts

    @property
    def count(self) -> int:
        """Gaps in all."""
        ends = self._cumulative()
        return int(ends[-1]) if len(ends) else 0

    @property
    def total_ns(self) -> int:
        """Sum of all gaps, exact."""
        gaps, counts = self.gaps, self.counts
        # gap x count may pass 2^63 where the counts are large: split the gap.
        high, low = gaps >> 31, gaps & 0x7FFFFFFF
        return (exact_sum(high * counts) << 31) + exact_sum(low * counts)

    @property
    def max_ns(self) -> int | None:
        """Longest gap, ``None`` where there is none."""
        return int(self.gaps[-1]) if len(self.gaps) else None

    @property
    def mean_ns(self) -> float | None:
        """Mean gap, correctly rounded."""
        return self.total_ns / self.count if self.count else None

    def order_statistic(self, index: int) -> int:
        """The gap at ``index`` (from 0) of all gaps in ascending order."""
        return int(self._gaps[np.searchsorted(self._cumulative(), index, side="right")])

    def percentile(self, q: float) -> float | None:
        """``numpy.percentile(all gaps, q)`` in ns, ``None`` where there is none."""
        if not 0 <= q <= 100:
            raise ValueError(f"percentile {q}, must be from 0 to 100")
        return linear_percentile(self.order_statistic, self.count, q) if self.count else None

    def _cumulative(self) -> IntArray:
        self._merge()
        if self._ends is None:
            self._ends = np.cumsum(self._counts)
        return self._ends

    def _shelve(self) -> None:
        """Move the dict into a piece; merge once the pieces outgrow what is merged."""
        pending, self._pending = self._pending, {}
        gaps = np.fromiter(pending.keys(), np.int64, len(pending))
        counts = np.fromiter(pending.values(), np.int64, len(pending))
        self._push(gaps, counts)

    def _push(self, gaps: IntArray, counts: IntArray) -> None:
        self._loose.append((gaps, counts))
        self._num_loose += len(gaps)
        if self._num_loose > max(_MOST_PENDING, len(self._gaps)):
            self._combine()

    def _merge(self) -> None:
        if self._pending:
            self._shelve()
        if self._loose:
            self._combine()

    def _combine(self) -> None:
        gaps = np.concatenate([self._gaps, *(g for g, _ in self._loose)])
        counts = np.concatenate([self._counts, *(c for _, c in self._loose)])
        self._gaps, self._counts = _merged(gaps, counts)
        self._loose, self._num_loose, self._ends = [], 0, None


def _merged(gaps: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Ascending different gaps with their counts added up (at least one gap)."""
    order = np.argsort(gaps, kind="stable")
    gaps, counts = gaps[order], counts[order]
    first = np.flatnonzero(np.concatenate([[True], gaps[1:] != gaps[:-1]]))
    return gaps[first], np.add.reduceat(counts, first)
