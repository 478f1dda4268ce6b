"""The limits grammar: what a service promises, in one line.

    limits     = limit {"," limit}
    limit      = metric [":" statistic] ("<=" | "<") time
    metric     = "ttft" | "tpot" | "itl" | "e2e" | "queue"
    statistic  = "mean" | "max" | "p" number
    time       = number ["ns" | "us" | "ms" | "s" | "min"]

``ttft<=500ms`` limits each request, ``ttft:p99<=1s`` a statistic of the run. A time without a unit
is in seconds. Per request, ``itl`` is its longest gap between two tokens; as a statistic it is of
all gaps pooled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, TypeVar, get_args

Metric = Literal["ttft", "tpot", "itl", "e2e", "queue"]
METRICS: tuple[Metric, ...] = get_args(Metric)

_UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1, "min": 60 * 10**9}
_LIMIT = re.compile(
    r"(?P<metric>[a-z0-9_]+)\s*(?::\s*(?P<statistic>[a-z0-9.]+)\s*)?(?P<op><=|<)\s*"
    r"(?P<number>[0-9.]+(?:e[+-]?[0-9]{1,2})?)\s*(?P<unit>[a-z]*)"
)
_EXPECTED = "expected e.g. ttft<=500ms (each request) or ttft:p99<=1s (a statistic of the run)"
_LONGEST_NS = 2**62


@dataclass(frozen=True, slots=True)
class RequestLimit:
    """A bound that each request is held to."""

    metric: Metric
    limit_ns: int
    is_inclusive: bool = True
    """``<=`` rather than ``<``."""

    def __str__(self) -> str:
        return f"{self.metric}{'<=' if self.is_inclusive else '<'}{format_ns(self.limit_ns)}"


@dataclass(frozen=True, slots=True)
class StatisticLimit:
    """A bound on one statistic of the whole run."""

    metric: Metric
    statistic: str
    """``mean``, ``max`` or ``p`` and a number from 0 to 100."""
    limit_ns: int
    is_inclusive: bool = True

    @property
    def percentile(self) -> float | None:
        """The number behind ``p``; ``None`` for mean and max."""
        return float(self.statistic[1:]) if self.statistic[0] == "p" else None

    def holds(self, value_ns: float | None) -> bool:
        """Whether the statistic keeps the bound; one that has no value does not."""
        if value_ns is None:
            return False
        return value_ns <= self.limit_ns if self.is_inclusive else value_ns < self.limit_ns

    def __str__(self) -> str:
        op = "<=" if self.is_inclusive else "<"
        return f"{self.metric}:{self.statistic}{op}{format_ns(self.limit_ns)}"


@dataclass(frozen=True, slots=True)
class Limits:
    """What was asked of a run; ``str`` gives a line that parses to an equal one."""

    per_request: tuple[RequestLimit, ...] = ()
    statistics: tuple[StatisticLimit, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.per_request or self.statistics)

    def __str__(self) -> str:
        return ",".join(str(limit) for limit in (*self.per_request, *self.statistics))


NO_LIMITS = Limits()


def parse_limits(text: str) -> Limits:
    """Read a line such as ``ttft<=500ms,tpot<=50ms,ttft:p99<=1s``.

    Raises ``ValueError`` naming the limit, what is wrong with it and what was expected.
    """
    per_request: list[RequestLimit] = []
    statistics: list[StatisticLimit] = []
    for position, part in enumerate(text.split(","), start=1):
        limit = _parse_limit(part.strip(), f"limit {position} ({part.strip()!r})")
        if isinstance(limit, RequestLimit):
            _refuse_second(limit, [r.metric for r in per_request], limit.metric, position)
            per_request.append(limit)
        else:
            names = [(s.metric, s.statistic) for s in statistics]
            _refuse_second(limit, names, (limit.metric, limit.statistic), position)
            statistics.append(limit)
    return Limits(tuple(per_request), tuple(statistics))


def format_ns(time_ns: int) -> str:
    """A time in the largest of s, ms, us, ns that shows it without a fraction, e.g. ``1500ms``."""
    for unit in ("s", "ms", "us"):
        if time_ns % _UNITS[unit] == 0:
            return f"{time_ns // _UNITS[unit]}{unit}"
    return f"{time_ns}ns"


def _parse_limit(part: str, where: str) -> RequestLimit | StatisticLimit:
    match = _LIMIT.fullmatch(part.lower())
    if match is None:
        if ">" in part:
            raise ValueError(f"{where}: limits are upper bounds, written <= or <; {_EXPECTED}")
        raise ValueError(f"{where}: not a limit; {_EXPECTED}")
    metric = _metric(match["metric"], where)
    limit_ns = _time_ns(match["number"], match["unit"], where)
    is_inclusive = match["op"] == "<="
    if match["statistic"] is None:
        return RequestLimit(metric, limit_ns, is_inclusive)
    return StatisticLimit(metric, _statistic(match["statistic"], where), limit_ns, is_inclusive)


def _metric(name: str, where: str) -> Metric:
    for metric in METRICS:
        if metric == name:
            return metric
    raise ValueError(f"{where}: unknown metric {name!r}, expected one of {', '.join(METRICS)}")


def _statistic(name: str, where: str) -> str:
    if name in ("mean", "max"):
        return name
    number = re.fullmatch(r"p([0-9]+(?:\.[0-9]+)?)", name)
    if number is None or Decimal(number[1]) > 100:
        raise ValueError(f"{where}: unknown statistic {name!r}, expected mean, max or p0 to p100")
    whole, _, fraction = number[1].partition(".")
    fraction = fraction.rstrip("0")
    # p099.90 and p99.9 are the same limit.
    return f"p{int(whole)}" + (f".{fraction}" if fraction else "")


def _time_ns(number: str, unit: str, where: str) -> int:
    if unit and unit not in _UNITS:
        raise ValueError(f"{where}: unknown unit {unit!r}, expected ns, us, ms, s or min")
    if number.count(".") > 1 or not re.search("[0-9]", number.split("e")[0]):
        raise ValueError(f"{where}: {number!r} is not a number; {_EXPECTED}")
    time = Decimal(number) * _UNITS[unit or "s"]
    if time <= 0:
        raise ValueError(f"{where}: the limit must be longer than 0")
    if time != int(time):
        raise ValueError(f"{where}: the limit is not a whole number of nanoseconds")
    if time > _LONGEST_NS:
        raise ValueError(f"{where}: the limit is longer than 146 years")
    return int(time)


_Name = TypeVar("_Name")


def _refuse_second(
    limit: RequestLimit | StatisticLimit, earlier: list[_Name], name: _Name, position: int
) -> None:
    if name in earlier:
        raise ValueError(f"limit {position} ({str(limit)!r}): limited before, expected once")
