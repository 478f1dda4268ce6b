"""Load that waits for answers: a fixed number of users."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from scheduler.request import Request
from traces.workload import Arrival


class FixedConcurrency:
    """As benchmark clients with ``--max-concurrency`` do it: so many requests are under way, and as one
    ends the next is sent.

    A server that slows down is asked less, so latencies under overload look better than those of an
    open load with the same mean rate (coordinated omission).

    Parameters
    ----------
    arrivals
        The requests in the order in which they are sent; their own arrival times are not used.
    concurrency
        Requests under way at once, at least 1.
    gap_ns
        Between two requests that one client sends at the same instant: it sends them one by one.
    """

    def __init__(self, arrivals: Iterable[Arrival], concurrency: int, *, gap_ns: int = 0) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}, expected at least 1")
        self._rest = iter(arrivals)
        self._concurrency = concurrency
        self._gap_ns = gap_ns
        self._free_ns = 0
        """When the client can send again."""

    def initial(self) -> Iterator[Arrival]:
        for _ in range(self._concurrency):
            if (arrival := self._next(0)) is None:
                return
            yield arrival

    def on_finish(self, request: Request, output_tokens: int, now_ns: int) -> Iterable[Arrival]:
        arrival = self._next(now_ns)
        return () if arrival is None else (arrival,)

    def _next(self, now_ns: int) -> Arrival | None:
        arrival = next(self._rest, None)
        if arrival is None:
            return None
        time = max(now_ns, self._free_ns)
        self._free_ns = time + self._gap_ns
        return Arrival(replace(arrival.request, arrival_ns=time), arrival.output_tokens)
