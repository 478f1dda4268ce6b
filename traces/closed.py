"""Loads by a rule of their own: a fixed number of users, and a rate that ramps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from scheduler.request import Request
from traces.workload import Arrival

_NS = 1_000_000_000


def sent_at(arrival: Arrival, time_ns: int) -> Arrival:
    """The same request at another time; its deadline moves with it."""
    request = arrival.request
    deadline_ns = request.deadline_ns
    if deadline_ns is not None:
        deadline_ns += time_ns - request.arrival_ns
    return arrival._replace(request=replace(request, arrival_ns=time_ns, deadline_ns=deadline_ns))


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
        return sent_at(arrival, time)


class RatePoint(NamedTuple):
    """The rate at a time; between two points it changes linearly."""

    time_ns: int
    per_second: float


class PoissonTimes:
    """Times of a Poisson process whose rate is piecewise linear, in ns, without end.

    Each iteration draws the same times. The cumulated rate is inverted exactly, so no draw is
    rejected and the k-th time depends on the first k draws only.

    Parameters
    ----------
    points
        In order of time. Before the first and after the last the rate stays as it is there, so the
        last one must be above 0. A single point is a constant rate.
    seed
        Of the one random stream used; a `SeedSequence` where several sources share a seed.

    Raises
    ------
    ValueError
        No point, times that do not rise, a rate that is negative or not finite, a last rate of 0.
    """

    def __init__(self, points: Sequence[RatePoint], seed: int | np.random.SeedSequence = 0) -> None:
        if not points:
            raise ValueError("no rate is given")
        for point in points:
            if not (math.isfinite(point.per_second) and point.per_second >= 0):
                raise ValueError(f"rate is {point.per_second}, expected a number of at least 0")
            if point.time_ns < 0:
                raise ValueError(f"time of a rate is {point.time_ns} ns, must not be negative")
        if any(b.time_ns <= a.time_ns for a, b in itertools.pairwise(points)):
            raise ValueError("times of the rates do not rise")
        if points[-1].per_second == 0:
            raise ValueError("the last rate is 0: what is left would never be sent")
        self._points = tuple(points)
        self._seed = (
            seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
        )

    def __iter__(self) -> Iterator[int]:
        rng = np.random.Generator(np.random.PCG64(self._seed))
        first = self._points[0]
        # (from, rate there, to, rate there), in seconds
        pieces = [(0.0, first.per_second, first.time_ns / _NS, first.per_second)]
        pieces += [
            (a.time_ns / _NS, a.per_second, b.time_ns / _NS, b.per_second)
            for a, b in itertools.pairwise(self._points)
        ]
        now = 0.0
        due = self._draw(rng)
        for start, rate, end, end_rate in pieces:
            if end <= start:
                continue
            slope = (end_rate - rate) / (end - start)
            now, here = start, rate
            while due < (held := (here + end_rate) / 2 * (end - now)):
                # due = here * x + slope / 2 * x**2, solved in the form that never cancels
                root = math.sqrt(max(here * here + 2 * slope * due, 0.0))
                now = min(now + 2 * due / (here + root), end)
                here = rate + slope * (now - start)
                yield round(now * _NS)
                due = self._draw(rng)
            due -= held
            now = end
        last = self._points[-1].per_second
        while True:
            now += due / last
            yield round(now * _NS)
            due = self._draw(rng)

    @staticmethod
    def _draw(rng: np.random.Generator) -> float:
        """A unit exponential by inversion: numpy's own sampler may change between releases."""
        return -math.log(max(float(rng.random()), 2.0**-54))


class RateRamp:
    """An open load: the requests in their order, at the times of a `PoissonTimes`.

    It waits for no answer, so a slow server is asked as much as a fast one.
    """

    def __init__(self, arrivals: Iterable[Arrival], times: PoissonTimes) -> None:
        self._arrivals, self._times = arrivals, times

    def initial(self) -> Iterator[Arrival]:
        return (
            sent_at(arrival, time)
            for arrival, time in zip(self._arrivals, self._times, strict=False)
        )

    def on_finish(self, request: Request, output_tokens: int, now_ns: int) -> Iterable[Arrival]:
        return ()
