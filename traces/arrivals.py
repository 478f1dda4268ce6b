"""Arrival times for requests that have none: a process, named by the user.

``poisson:rate=2,seed=1``, ``constant:rate=0.5``, ``all-at-once``. Rates are requests per second.
The same words give the same times, however the requests are read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from traces.formats.base import INT64_MAX, TraceError, shown

EXAMPLE = '--arrivals "poisson:rate=2,seed=1"'
KNOWN = "poisson:rate=R,seed=S, constant:rate=R, all-at-once"

_NS = 10**9
_DRAWS = 1024
_RATE = re.compile(r"\d+(\.\d*)?([eE][+-]?\d{1,2})?|\.\d+([eE][+-]?\d{1,2})?", re.ASCII)
_PARAMETERS = {"poisson": {"rate", "seed"}, "constant": {"rate"}, "all-at-once": set[str]()}


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """Times at which requests arrive, one after another from time 0 on."""

    kind: str
    """``poisson``, ``constant`` or ``all-at-once``."""
    rate: Fraction | None = None
    """Requests per second."""
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> ArrivalProcess:
        """The process that these words name. Raises `TraceError`."""
        kind, _, rest = text.strip().partition(":")
        if kind not in _PARAMETERS:
            raise TraceError(f"--arrivals {shown(text)}: no such process; there are {KNOWN}")
        given: dict[str, str] = {}
        for part in filter(None, rest.split(",")):
            name, equals, value = part.partition("=")
            if not equals or name not in _PARAMETERS[kind] or name in given:
                raise TraceError(f"--arrivals {shown(text)}: {shown(part)} is not known; {KNOWN}")
            given[name] = value
        if "rate" not in _PARAMETERS[kind]:
            return cls(kind)
        rate = given.get("rate", "")
        if not _RATE.fullmatch(rate) or not Fraction(rate):
            raise TraceError(f"--arrivals {shown(text)}: rate must be a number over 0; {KNOWN}")
        seed = given.get("seed", "0")
        if not (seed.isascii() and seed.isdigit() and int(seed) < 2**63):
            raise TraceError(f"--arrivals {shown(text)}: seed must be a whole number; {KNOWN}")
        return cls(kind, Fraction(rate), int(seed))

    def times_ns(self) -> Iterator[int]:
        """Endlessly, never falling. Raises `TraceError` where a time passes 64 bits."""
        for time in self._times():
            if time > INT64_MAX:
                raise TraceError(
                    f"arrivals at {float(self.rate or 0):g} a second pass 64 bits of ns"
                )
            yield time

    def _times(self) -> Iterator[int]:
        if self.rate is None:
            yield from itertools.repeat(0)
        elif self.kind == "constant":
            for index in itertools.count():
                yield round(index * _NS / self.rate)
        else:
            rng = np.random.Generator(np.random.PCG64(self.seed))
            time, mean_ns = 0, float(_NS / self.rate)
            while True:
                for gap in rng.standard_exponential(_DRAWS).tolist():
                    time += round(gap * mean_ns)
                    yield time

    def __str__(self) -> str:
        if self.rate is None:
            return "all at time 0"
        rate = f"{float(self.rate):g} requests/s"
        if self.kind == "constant":
            return f"evenly spaced at {rate}, the first at time 0"
        return f"a Poisson process of {rate}, seed {self.seed}"
