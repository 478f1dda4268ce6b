"""Timing in this process: CPU seconds, several runs, minimum, median and maximum."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Spread(NamedTuple):
    """CPU seconds of the runs."""

    low: float
    median: float
    high: float


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
