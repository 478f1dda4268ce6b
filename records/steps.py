"""Sums, means and percentiles over the steps of a run, a slice of the rows at a time.

A week of traffic has tens of millions of steps: an array of all of them for every intermediate
result would take more memory than the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from records.columns import Columns, IntArray, exact_sum
from records.gaps import GapCounts

SLICE_ROWS = 1 << 20
"""Rows looked at at a time, where nobody says."""

Rows: TypeAlias = "_Slice"
Amount: TypeAlias = Callable[[Rows], IntArray]
"""A number for each of the rows."""
Where: TypeAlias = Callable[[Rows], npt.NDArray[np.bool_]]
"""Which of the rows count."""


class _Slice:
    """Some of the rows; a column is fetched when it is read."""

    __slots__ = ("_columns", "_rows", "first")

    def __init__(self, columns: Columns, rows: slice) -> None:
        self._columns, self._rows = columns, rows
        self.first: int = rows.start
        """Number of the first of these rows among all."""

    def __getitem__(self, name: str) -> Any:
        return self._columns[name][self._rows]


def everywhere(rows: Rows) -> npt.NDArray[np.bool_]:
    """Every row counts."""
    return np.ones(len(rows["start_ns"]), np.bool_)


class StepRows:
    """The steps of a run. All results are exact, however many rows there are."""

    def __init__(self, steps: Columns, slice_rows: int | None = None) -> None:
        self._steps, self._slice_rows = steps, slice_rows or SLICE_ROWS
        self._num_rows = len(steps["start_ns"])

    def __len__(self) -> int:
        return self._num_rows

    def slices(self) -> Iterator[Rows]:
        for start in range(0, self._num_rows, self._slice_rows):
            yield _Slice(self._steps, slice(start, min(start + self._slice_rows, self._num_rows)))

    def count(self, where: Where) -> int:
        return sum(int(np.count_nonzero(where(rows))) for rows in self.slices())

    def total(self, amount: str | Amount, where: Where = everywhere) -> int:
        return sum(exact_sum(values) for values in self._values(amount, where))

    def weighted(self, level: str, where: Where = everywhere) -> int:
        """Sum of level x duration: a month at 10^6 blocks passes 2^63."""
        total = 0
        for levels, durations in zip(
            self._values(level, where), self._values("duration_ns", where), strict=True
        ):
            high, low = durations >> 24, durations & 0xFFFFFF
            total += (exact_sum(levels * high) << 24) + exact_sum(levels * low)
        return total

    def float_total(self, column: str, where: Where = everywhere) -> float:
        """Sum of a column of floats, correctly rounded."""
        return math.fsum(chain.from_iterable(map(_floats, self._values(column, where))))

    def most(self, amount: str | Amount, where: Where = everywhere) -> int:
        """The largest; 0 where no row counts."""
        return max(
            (int(values.max(initial=0)) for values in self._values(amount, where)), default=0
        )

    def mean(self, amount: str | Amount, where: Where = everywhere) -> float:
        """0 where no row counts."""
        count = self.count(where)
        return self.total(amount, where) / count if count else 0.0

    def percentile(self, amount: str | Amount, q: float, where: Where = everywhere) -> float | None:
        """As ``numpy.percentile`` interpolates; ``None`` where no row counts."""
        counts = GapCounts()
        for values in self._values(amount, where):
            counts.add_array(values)
        return counts.percentile(q)

    def _values(self, amount: str | Amount, where: Where) -> Iterator[Any]:
        for rows in self.slices():
            values = rows[amount] if isinstance(amount, str) else amount(rows)
            yield values if where is everywhere else values[where(rows)]


def float_sum(values: npt.NDArray[np.float64]) -> float:
    """Correctly rounded sum, whatever the order."""
    return math.fsum(_floats(values))


def _floats(values: npt.NDArray[np.float64]) -> Iterator[float]:
    """One by one; a list of millions of them is not made."""
    for start in range(0, len(values), 65_536):
        yield from values[start : start + 65_536].tolist()


def end_ns(rows: Rows) -> IntArray:
    ends: IntArray = rows["start_ns"] + rows["duration_ns"]
    return ends
