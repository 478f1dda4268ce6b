"""Laws that workloads are drawn from: lengths by their quantiles, arrivals by their process.

Every draw goes through uniform doubles and an inverse CDF where there is one: those stay the same
between numpy releases, while samplers of distributions may not (gamma has no short inverse).
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from traces.formats.base import TraceError

_NORMAL = NormalDist()
_Z95 = _NORMAL.inv_cdf(0.95)
LEAST, MOST = 1e-3, 1e6
"""Values a law of tokens or seconds may have."""


def check(name: str, value: float, least: float, most: float) -> None:
    """Raises `TraceError` where a value is outside ``least .. most``, or NaN."""
    if not least <= value <= most:
        raise TraceError(f"{name} is {value}, must be within {least:g} and {most:g}")


class Stream:
    """One random stream of one source."""

    def __init__(self, seed: np.random.SeedSequence | int) -> None:
        self.rng = np.random.Generator(np.random.PCG64(seed))

    def draw(self) -> float:
        """Within (0, 1), both ends left out."""
        return max(float(self.rng.random()), 2.0**-54)


class Law(ABC):
    """A distribution of positive values."""

    @abstractmethod
    def quantile(self, u: float) -> float:
        """Inverse CDF at ``u`` in (0, 1)."""

    def p95_value(self) -> float:
        """The 95th percentile."""
        return self.quantile(0.95)

    @abstractmethod
    def problem(self) -> str:
        """What is wrong with its parameters, in the words of an error; empty where nothing is."""

    def check(self, name: str) -> None:
        """Raises `TraceError`."""
        if problem := self.problem():
            raise TraceError(f"{name}: need {problem}, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal(Law):
    """A lognormal law by its median and its 95th percentile."""

    median: float
    p95: float

    def quantile(self, u: float) -> float:
        """``median * exp(sigma * z(u))``, ``sigma = ln(p95 / median) / z(0.95)``."""
        sigma = math.log(self.p95 / self.median) / _Z95
        return self.median * math.exp(sigma * _NORMAL.inv_cdf(u))

    def p95_value(self) -> float:
        return self.p95

    def problem(self) -> str:
        return "" if LEAST <= self.median <= self.p95 <= MOST else "0.001 <= median <= p95 <= 1e6"

    def __str__(self) -> str:
        return f"median {self.median:g}, p95 {self.p95:g}"


@dataclass(frozen=True, slots=True)
class Fixed(Law):
    """Always the same."""

    value: float

    def quantile(self, u: float) -> float:
        return self.value

    def problem(self) -> str:
        return "" if LEAST <= self.value <= MOST else "0.001 <= value <= 1e6"

    def __str__(self) -> str:
        return f"always {self.value:g}"


@dataclass(frozen=True, slots=True)
class Uniform(Law):
    """Evenly between two values."""

    low: float
    high: float

    def quantile(self, u: float) -> float:
        return self.low + u * (self.high - self.low)

    def problem(self) -> str:
        return "" if LEAST <= self.low <= self.high <= MOST else "0.001 <= low <= high <= 1e6"

    def __str__(self) -> str:
        return f"even from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class Zipf(Law):
    """``k`` in ``1 .. most`` with weight ``k ** -exponent``."""

    exponent: float
    most: int

    def quantile(self, u: float) -> float:
        return 1.0 + zipf_index(self.exponent, self.most, u)

    def problem(self) -> str:
        fits = 0 <= self.exponent <= 10 and 1 <= self.most <= MOST
        return "" if fits else "0 <= exponent <= 10 and 1 <= most <= 1e6"

    def __str__(self) -> str:
        return f"Zipf with exponent {self.exponent:g} up to {self.most:,}"


@lru_cache(maxsize=8)
def _zipf_weights(exponent: float, count: int) -> npt.NDArray[np.float64]:
    return np.cumsum(np.arange(1, count + 1, dtype=np.float64) ** -exponent)


def zipf_index(exponent: float, count: int, u: float) -> int:
    """Which of ``count`` things, from 0, where the k-th most popular has weight ``k ** -exponent``."""
    weights = _zipf_weights(exponent, count)
    return min(int(np.searchsorted(weights, u * weights[-1], side="right")), count - 1)


@dataclass(frozen=True, slots=True)
class Quantiles(Law):
    """By some of its quantiles, lines between them: an empirical law, or published figures.

    ``points`` are (share, value), the first of share 0 (the least) and the last of share 1.
    """

    points: tuple[tuple[float, float], ...]
    is_log: bool = False
    """Lines are straight in the logarithm of the value: nearer to a law with a long tail."""

    def quantile(self, u: float) -> float:
        index = bisect.bisect_left(self.points, (u,))
        if index == 0:
            return self.points[0][1]
        (below, low), (above, high) = self.points[index - 1], self.points[index]
        share = (u - below) / (above - below)
        return low * (high / low) ** share if self.is_log else low + (high - low) * share

    def problem(self) -> str:
        shares = [share for share, _ in self.points]
        values = [value for _, value in self.points]
        fits = (
            len(shares) >= 2
            and (shares[0], shares[-1]) == (0.0, 1.0)
            and all(a < b for a, b in pairwise(shares))
            and all(a <= b for a, b in pairwise(values))
            and values[0] >= LEAST
            and values[-1] <= MOST
        )
        return "" if fits else "shares that rise from 0 to 1, values that do not fall, up to 1e6"

    def __str__(self) -> str:
        values = [f"{value:g}" for _, value in self.points]
        shown = values if len(values) <= 8 else [*values[:3], "...", *values[-3:]]
        return f"quantiles {' '.join(shown)}"

    @classmethod
    def of(cls, values: Iterable[float], most_points: int = 1025) -> Quantiles:
        """Of observed values: all of them where they are few, else evenly spaced quantiles."""
        data = np.sort(np.fromiter(values, np.float64))
        if not len(data):
            raise TraceError("an empirical law needs at least one value")
        if len(data) == 1:
            data = np.repeat(data, 2)
        shares = np.linspace(0, 1, min(len(data), most_points))
        return cls(tuple(zip(shares.tolist(), np.quantile(data, shares).tolist(), strict=True)))


def parse_law(text: str) -> Law:
    """A law as a flag gives it. Raises `TraceError`.

    ``60:500`` or ``lognormal:60:500`` (median, p95), ``fixed:512``, ``uniform:10:200``,
    ``zipf:1.2:4096`` (exponent, most), ``empirical:FILE:prompt`` or ``empirical:FILE:output`` (the
    lengths of a trace).
    """
    kind, _, rest = text.partition(":")
    wanted = (
        f"{text!r} is no law; expected MEDIAN:P95, fixed:N, uniform:LOW:HIGH, zipf:EXPONENT:MOST or "
        "empirical:FILE:prompt|output"
    )
    if kind == "empirical":
        path, colon, which = rest.rpartition(":")
        if not colon or which not in ("prompt", "output"):
            raise TraceError(wanted)
        from traces.trace import read_trace

        trace = read_trace(path)
        return Quantiles.of(
            a.request.num_prompt_tokens if which == "prompt" else a.output_tokens for a in trace
        )
    makers: dict[str, tuple[int, Callable[..., Law]]] = {
        "lognormal": (2, lambda median, p95: Lognormal(median=median, p95=p95)),
        "fixed": (1, Fixed),
        "uniform": (2, Uniform),
        "zipf": (2, lambda exponent, most: Zipf(exponent, int(most))),
    }
    if kind not in makers:
        kind, rest = "lognormal", text
    count, make = makers[kind]
    try:
        numbers = [float(number) for number in rest.split(":")]
        if len(numbers) != count or not all(map(math.isfinite, numbers)):
            raise ValueError
    except ValueError:
        raise TraceError(wanted) from None
    law = make(*numbers)
    law.check(text)
    return law


class Process(ABC):
    """Random arrivals of a given mean rate, stationary from the first moment on."""

    @abstractmethod
    def times(self, rate: float, start_s: float, end_s: float, stream: Stream) -> Iterator[float]:
        """Seconds within ``start_s .. end_s``, rising; ``rate`` is per second."""

    @abstractmethod
    def check(self) -> None:
        """Raises `TraceError` on parameters that make no process."""


@dataclass(frozen=True, slots=True)
class Poisson(Process):
    """Arrivals that know nothing of each other."""

    def times(self, rate: float, start_s: float, end_s: float, stream: Stream) -> Iterator[float]:
        now = start_s
        while (now := now - math.log(stream.draw()) / rate) < end_s:
            yield now

    def check(self) -> None:
        pass

    def __str__(self) -> str:
        return "Poisson"


class Renewal(Process):
    """Independent gaps of one law.

    The first gap is what is left of one that is under way at ``start_s`` (its law is that of a gap
    drawn in proportion to its length, of which a uniform share is left): without this, a bursty
    process would start with too many arrivals.
    """

    @abstractmethod
    def gap(self, stream: Stream) -> float:
        """A gap of mean 1."""

    @abstractmethod
    def long_gap(self, stream: Stream) -> float:
        """A gap of the same process, drawn in proportion to its length."""

    def times(self, rate: float, start_s: float, end_s: float, stream: Stream) -> Iterator[float]:
        now = start_s + stream.draw() * self.long_gap(stream) / rate
        while now < end_s:
            yield now
            now += self.gap(stream) / rate


@dataclass(frozen=True, slots=True)
class Gamma(Renewal):
    """Gamma gaps by their CV; above 1 they come in bursts."""

    cv: float

    def gap(self, stream: Stream) -> float:
        shape = 1.0 / self.cv**2
        return float(stream.rng.standard_gamma(shape)) / shape

    def long_gap(self, stream: Stream) -> float:
        shape = 1.0 / self.cv**2
        return float(stream.rng.standard_gamma(shape + 1.0)) / shape

    def check(self) -> None:
        check("cv", self.cv, 0.01, 100)

    def __str__(self) -> str:
        return f"gamma gaps with CV {self.cv:.4g}"


@dataclass(frozen=True, slots=True)
class Weibull(Renewal):
    """Weibull gaps by their CV; above 1 they come in bursts, with a longer tail than gamma's."""

    cv: float

    def gap(self, stream: Stream) -> float:
        power = 1.0 / weibull_shape(self.cv)
        return math.exp(power * math.log(-math.log(stream.draw())) - math.lgamma(1.0 + power))

    def long_gap(self, stream: Stream) -> float:
        power = 1.0 / weibull_shape(self.cv)
        drawn = max(float(stream.rng.standard_gamma(1.0 + power)), 1e-300)
        return math.exp(power * math.log(drawn) - math.lgamma(1.0 + power))

    def check(self) -> None:
        check("cv", self.cv, 0.01, 100)

    def __str__(self) -> str:
        return f"Weibull gaps with CV {self.cv:.4g}"


@cache
def weibull_shape(cv: float) -> float:
    """The shape ``k`` with ``gamma(1 + 2/k) / gamma(1 + 1/k)**2 = 1 + cv**2``, by bisection."""
    low, high = 0.05, 200.0
    want = math.log1p(cv * cv)
    for _ in range(100):
        middle = math.sqrt(low * high)
        got = math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle)
        low, high = (middle, high) if got > want else (low, middle)
    return math.sqrt(low * high)


def weibull_cv(shape: float) -> float:
    """The CV of Weibull gaps of a shape, at most 100."""
    log = math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)
    return min(100.0, max(0.01, math.sqrt(math.expm1(min(log, 10.0)))))


@dataclass(frozen=True, slots=True)
class OnOff(Process):
    """Silence and load in turn: Poisson while on, nothing while off; times of both exponential.

    ``on_s`` and ``off_s`` are their means; the mean rate over both is the rate that is asked for.
    """

    on_s: float
    off_s: float

    def times(self, rate: float, start_s: float, end_s: float, stream: Stream) -> Iterator[float]:
        cycle_s = self.on_s + self.off_s
        busy_rate = rate * cycle_s / self.on_s
        now, is_on = start_s, stream.draw() < self.on_s / cycle_s
        while now < end_s:
            until = now - math.log(stream.draw()) * (self.on_s if is_on else self.off_s)
            if is_on:
                yield from Poisson().times(busy_rate, now, min(until, end_s), stream)
            now, is_on = until, not is_on

    def check(self) -> None:
        check("on", self.on_s, 1e-3, 1e8)
        check("off", self.off_s, 0, 1e8)

    def __str__(self) -> str:
        return f"on for {self.on_s:.4g} s and off for {self.off_s:.4g} s on average"


@dataclass(frozen=True, slots=True)
class Diurnal(Process):
    """Poisson with a rate that swings as a cosine; ``peak`` is its highest rate over its mean."""

    peak: float
    period_s: float = 86_400.0
    peak_at_s: float = 0.0

    def times(self, rate: float, start_s: float, end_s: float, stream: Stream) -> Iterator[float]:
        for now in Poisson().times(rate * self.peak, start_s, end_s, stream):
            phase = 2 * math.pi * (now - self.peak_at_s) / self.period_s
            share = (1 + (self.peak - 1) * math.cos(phase)) / self.peak
            if stream.draw() < share:
                yield now

    def check(self) -> None:
        check("peak", self.peak, 1, 2)
        check("period", self.period_s, 1e-3, 1e9)
        check("peak_at", self.peak_at_s, -1e9, 1e9)

    def __str__(self) -> str:
        return (
            f"a rate that swings to {self.peak:.4g} x its mean every {self.period_s:.6g} s, "
            f"highest at {self.peak_at_s:.6g} s"
        )


_PROCESSES: dict[str, tuple[Callable[..., Process], dict[str, str], frozenset[str]]] = {
    "poisson": (Poisson, {}, frozenset()),
    "gamma": (Gamma, {"cv": "cv"}, frozenset({"cv"})),
    "weibull": (Weibull, {"cv": "cv"}, frozenset({"cv"})),
    "onoff": (OnOff, {"on": "on_s", "off": "off_s"}, frozenset({"on", "off"})),
    "diurnal": (
        Diurnal,
        {"peak": "peak", "period": "period_s", "peak_at": "peak_at_s"},
        frozenset({"peak"}),
    ),
}
PROCESSES = (
    "poisson, gamma:cv=C, weibull:cv=C, onoff:on=S,off=S, diurnal:peak=R[,period=S][,peak_at=S]"
)
"""What `parse_process` reads."""


def parse_process(text: str) -> Process:
    """An arrival process as a flag gives it (`PROCESSES`). Raises `TraceError`."""
    kind, values = parse_options(text)
    known = _PROCESSES.get(kind)
    if known is None or not known[2] <= values.keys() <= known[1].keys():
        raise TraceError(f"{text!r} is no arrival process; expected one of {PROCESSES}")
    make, fields, _ = known
    process = make(**{fields[key]: number(value, key) for key, value in values.items()})
    process.check()
    return process


def parse_options(text: str) -> tuple[str, dict[str, str]]:
    """``kind:key=value,key=value`` taken apart. Raises `TraceError`."""
    kind, colon, rest = text.partition(":")
    values: dict[str, str] = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = part.partition("=")
        if not equals or key in values:
            raise TraceError(f"{text!r}: expected KIND:KEY=VALUE,..., each key once")
        values[key.strip()] = value.strip()
    return kind.strip(), values


def number(text: str, name: str) -> float:
    """A finite number. Raises `TraceError`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TraceError(f"{name} is {text!r}, expected a number")
    return value
