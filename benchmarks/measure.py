"""Timing in this process: CPU seconds, several runs, minimum, median and maximum."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """CPU seconds of the runs."""

    low: float
    median: float
    high: float

    def each(self, name: str, unit: str, scale: float) -> dict[str, Any]:
        """A row of what one of many costs: seconds x ``scale``."""
        return row(name, unit, *(seconds * scale for seconds in self))

    def rate(self, name: str, count: int) -> dict[str, Any]:
        """A row of requests per CPU second."""
        return row(name, "requests/CPU s", count / self.high, count / self.median, count / self.low)


def row(
    name: str, unit: str, low: float | None, median: float | None, high: float | None
) -> dict[str, Any]:
    """A line of the table."""
    return {"name": name, "unit": unit, "low": low, "median": median, "high": high}


def cpu_seconds(
    work: Callable[[], object], runs: int, prepare: Callable[[], object] | None = None
) -> Spread:
    """CPU time of ``work`` over ``runs`` runs, one run before them not counted."""
    times = []
    for number in range(runs + 1):
        if prepare is not None:
            prepare()
        start = time.process_time()
        work()
        if number:
            times.append(time.process_time() - start)
    return Spread(min(times), statistics.median(times), max(times))
