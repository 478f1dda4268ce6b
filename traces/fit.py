"""A generator learnt from a trace, and how close what it makes comes to the trace.

Learnt are the rate and the law of the gaps, and rows of prompt length, output length and reuse. A row
is drawn as a whole and from about the same part of the trace, so that what goes together stays
together, and what changes over time does. Nothing in a fit identifies a request: no ids, no content.

Reuse is learnt as a walk: how many leading blocks of a prompt are known from before, and how many
requests ago they were used last. A made request takes that many blocks from a prompt that far back,
so blocks are shared, and come back after a while, as they did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blockmanager.content import HashedContent
from scheduler.request import Request
from traces.formats.base import MAX_TOKENS, TraceError
from traces.laws import (
    Process,
    Stream,
    check,
    parse_process,
)
from traces.prefix import prompt_chains
from traces.reuse import reuse_curve
from traces.workload import Arrival

_NS = 1_000_000_000
_MOST_ROWS = 4096
_MOST_TRIAL = 50_000
_SEARCH = 2048
_REACH, _REACH_ROWS = 0.02, 32
"""How far from its place in the trace a row is drawn: this share of it, and at least so many rows."""
_DAY_S = 86_400.0
_PER_WINDOW = 5.0
"""Requests a window of the count distance holds on average."""


class FitRow(NamedTuple):
    """A request as it is drawn."""

    prompt_tokens: int
    output_tokens: int
    shared_blocks: int | None
    """Leading blocks known from before; ``None`` = what it shares is unknown."""
    requests_back: int
    """How many requests ago the last of them was used; 0 where none is known."""


class Candidate(NamedTuple):
    """A law of the arrivals and how far its gaps and counts are from those of the trace."""

    process: str
    gap_distance: float
    count_distance: float

    @property
    def distance(self) -> float:
        return (self.gap_distance + self.count_distance) / 2


@dataclass(frozen=True, slots=True)
class Fit:
    """What `fit` learnt; `generate` makes a workload of it."""

    requests: int
    """Of the trace."""
    rate: float
    """Requests per second."""
    gap_cv: float
    process: str
    """Best of the candidates, as `parse_process` reads it."""
    candidates: tuple[Candidate, ...]
    rows: tuple[FitRow, ...]
    block_size: int | None
    """Tokens a hash id; ``None`` where no prompt has an identity."""
    rounds_up: bool
    """Whether a partial block at the end of a prompt has an id."""

    def to_json(self) -> dict[str, Any]:
        """A file that `Fit.from_json` reads."""
        return {
            "kvplan_fit": 1,
            "requests": self.requests,
            "rate_per_s": self.rate,
            "gap_cv": self.gap_cv,
            "arrivals": self.process,
            "candidates": [c._asdict() for c in self.candidates],
            "block_size": self.block_size,
            "rounds_up": self.rounds_up,
            "rows": [list(row) for row in self.rows],
        }

    @classmethod
    def from_json(cls, record: Any) -> Fit:
        """Raises `TraceError` where the record is no fit."""
        try:
            if record["kvplan_fit"] != 1:
                raise ValueError
            parse_process(record["arrivals"])
            rows = tuple(FitRow(*row) for row in record["rows"])
            found = cls(
                requests=int(record["requests"]),
                rate=float(record["rate_per_s"]),
                gap_cv=float(record["gap_cv"]),
                process=record["arrivals"],
                candidates=tuple(Candidate(**c) for c in record["candidates"]),
                rows=rows,
                block_size=record["block_size"],
                rounds_up=bool(record["rounds_up"]),
            )
            if not rows or not all(map(found._is_row, rows)):
                raise ValueError
        except TraceError:
            raise
        except (KeyError, TypeError, ValueError):
            raise TraceError("is no fit of a trace (kvplan_fit 1)") from None
        check("rate_per_s", found.rate, 1e-9, 1e9)
        return found

    def _is_row(self, row: FitRow) -> bool:
        wholes = (row.prompt_tokens, row.output_tokens, row.requests_back, row.shared_blocks or 0)
        return (
            all(type(value) is int and 0 <= value <= MAX_TOKENS for value in wholes)
            and min(wholes[:2]) >= 1
            and (
                row.shared_blocks is None or (type(self.block_size) is int and self.block_size > 0)
            )
        )

    def generate(
        self, *, requests: int | None = None, rate: float | None = None, seed: int = 0
    ) -> list[Arrival]:
        """A workload like the trace: as many requests at the same rate where nothing is given.

        Ids are ``r0``, ``r1``, ...; times are whole microseconds. Sessions are not made.
        """
        count = self.requests if requests is None else requests
        per_s = self.rate if rate is None else rate
        check("requests", count, 1, 50_000_000)
        check("rate", per_s, 1e-9, 1e9)
        check("seed", seed, 0, 2**63)
        times, draws = (Stream(child) for child in np.random.SeedSequence(seed).spawn(2))
        chosen = _nearby(draws.rng, count, len(self.rows))
        prompts = _Prompts(self.block_size or 1, self.rounds_up)
        made: list[Arrival] = []
        process = parse_process(self.process)
        for time, row in zip(
            _endless(process, per_s, times), map(self.rows.__getitem__, chosen), strict=False
        ):
            request = Request(
                id=f"r{len(made)}",
                arrival_ns=round(time * 1e6) * 1_000,
                num_prompt_tokens=row.prompt_tokens,
                content=None if row.shared_blocks is None else prompts.make(row, row.shared_blocks),
            )
            made.append(Arrival(request, row.output_tokens))
        return made


def _nearby(rng: np.random.Generator, count: int, rows: int) -> list[int]:
    """Rows drawn from about the same place in the trace; past its ends the line is folded back."""
    reach = max(_REACH_ROWS, _REACH * rows)
    places = (np.arange(count) + 0.5) * rows / count + (2 * rng.random(count) - 1) * reach
    folded = np.abs(places) % (2 * rows)
    chosen = np.minimum(folded, 2 * rows - folded).astype(np.int64).clip(0, rows - 1)
    return [int(row) for row in chosen]


def _endless(process: Process, rate: float, stream: Stream) -> Iterator[float]:
    return process.times(rate, 0.0, math.inf, stream)


class _Prompts:
    """Prompts made so far, and new ones that share with them."""

    def __init__(self, size: int, rounds_up: bool) -> None:
        self._size = size
        self._rounds_up = rounds_up
        self._made: list[list[int]] = []
        self._user: list[int] = []
        """Which prompt used each block last."""

    def make(self, row: FitRow, shared: int) -> HashedContent:
        full, tail = divmod(row.prompt_tokens, self._size)
        blocks = full + (self._rounds_up and tail > 0)
        number = len(self._made)
        ids = self._earlier(row.requests_back, min(shared, blocks))
        for block in ids:
            self._user[block] = number
        new = range(len(self._user), len(self._user) + blocks - len(ids))
        ids.extend(new)
        self._user.extend([number] * len(new))
        self._made.append(ids)
        covered = row.prompt_tokens if self._rounds_up else full * self._size
        return HashedContent(np.array(ids, dtype=np.int64), self._size, covered)

    def _earlier(self, back: int, shared: int) -> list[int]:
        """The first ``shared`` blocks of the prompt that far back that used the last of them last.

        Where that one has not, the nearest that has; where none near has, the longest near.
        """
        count = len(self._made)
        if not shared or not count:
            return []
        wanted = min(max(0, count - back), count - 1)
        longest = self._made[wanted]
        for step in range(_SEARCH):
            for index in {wanted - step, wanted + step}:
                if 0 <= index < count:
                    ids = self._made[index]
                    if len(ids) >= shared and self._user[ids[shared - 1]] == index:
                        return ids[:shared]
                    if len(ids) > len(longest):
                        longest = ids
            if wanted < step > count - wanted:
                break
        return longest[:shared]


def fit(arrivals: Sequence[Arrival], block_size: int | None = None) -> Fit:
    """Learn a generator from a trace. Raises `TraceError` where all requests arrive at one time.

    ``block_size`` as for `ideal_prefix_hits`.
    """
    times_s = np.array([a.request.arrival_ns for a in arrivals], dtype=np.int64) / _NS
    if len(times_s) < 3 or times_s[-1] == times_s[0]:
        raise TraceError(
            f"{len(times_s)} requests that span {times_s[-1] - times_s[0] if len(times_s) else 0:g} s "
            "are too few to learn a rate from"
        )
    gaps = np.diff(times_s)
    rate, cv = float(1 / gaps.mean()), float(gaps.std() / gaps.mean())
    candidates = _judge(times_s, rate, cv)
    rows, size, rounds_up = _rows(arrivals, block_size)
    return Fit(
        requests=len(arrivals),
        rate=rate,
        gap_cv=cv,
        process=candidates[0].process,
        candidates=tuple(candidates),
        rows=rows,
        block_size=size,
        rounds_up=rounds_up,
    )


def _rows(
    arrivals: Sequence[Arrival], block_size: int | None
) -> tuple[tuple[FitRow, ...], int | None, bool]:
    chains = prompt_chains(arrivals, block_size)
    shared: dict[int, tuple[int, int]] = {}
    rounds_up = False
    if chains is not None:
        known = np.concatenate([[0], np.cumsum(chains.previous >= 0)])
        hits = (known[chains.starts + chains.lengths] - known[chains.starts]).tolist()
        for number, (index, start, hit) in enumerate(
            zip(chains.index.tolist(), chains.starts.tolist(), hits, strict=True)
        ):
            back = number - int(chains.owner[chains.previous[start + hit - 1]]) if hit else 0
            shared[index] = hit, back
        lengths = dict(zip(chains.index.tolist(), chains.lengths.tolist(), strict=True))
        rounds_up = any(
            count * chains.block_size > arrivals[index].request.num_prompt_tokens
            for index, count in lengths.items()
        )
    rows = [
        FitRow(
            a.request.num_prompt_tokens,
            a.output_tokens,
            *shared.get(index, (None, 0)),
        )
        for index, a in enumerate(arrivals)
    ]
    if len(rows) > _MOST_ROWS:
        picks = (np.arange(_MOST_ROWS) + 0.5) * len(rows) / _MOST_ROWS
        rows = [rows[int(pick)] for pick in picks]
    return tuple(rows), None if chains is None else chains.block_size, rounds_up


def _judge(times_s: npt.NDArray[np.float64], rate: float, cv: float) -> list[Candidate]:
    """Laws that could be it, the nearest first; each is tried out, with a seed of its own."""
    span_s = float(times_s[-1] - times_s[0])
    candidates: list[Candidate] = []
    for text in _laws(times_s, rate, cv):
        trial_s = min(span_s, _MOST_TRIAL / rate)
        made = np.fromiter(
            parse_process(text).times(rate, 0.0, trial_s, Stream(len(candidates))), np.float64
        )
        if len(made) > 2:
            candidates.append(
                Candidate(
                    text,
                    two_sample_distance(np.diff(times_s) * rate, np.diff(made) * rate),
                    two_sample_distance(_counts(times_s, rate), _counts(made, rate)),
                )
            )
    if not candidates:
        raise TraceError(f"{len(times_s)} requests are too few to learn how they arrive")
    return sorted(candidates, key=lambda c: c.distance)


def _laws(times_s: npt.NDArray[np.float64], rate: float, cv: float) -> Iterator[str]:
    yield "poisson"
    if 0.01 <= cv <= 100:
        yield f"gamma:cv={cv:.6g}"
        yield f"weibull:cv={cv:.6g}"
    gaps = np.diff(times_s)
    # Silence is a gap ten times the mean one of what is left; a few rounds settle it.
    busy = gaps
    for _ in range(5):
        busy = gaps[gaps <= 10 * busy.mean()]
    silent = gaps[gaps > 10 * busy.mean()]
    if len(silent) > 2 and busy.sum() > 0:
        yield f"onoff:on={busy.sum() / (len(silent) + 1):.6g},off={silent.mean():.6g}"
    if times_s[-1] - times_s[0] >= _DAY_S:
        # The first harmonic of a day: twice the mean of exp(i w t) is the swing.
        swing = 2 * np.exp(2j * np.pi * times_s / _DAY_S).mean()
        at = float(np.angle(swing)) / (2 * math.pi) % 1 * _DAY_S
        yield f"diurnal:peak={1 + min(abs(swing), 1.0):.6g},peak_at={at:.6g}"


def _counts(times_s: npt.NDArray[np.float64], rate: float) -> npt.NDArray[np.float64]:
    """Arrivals in windows laid end to end, `_PER_WINDOW` on average."""
    window_s = _PER_WINDOW / rate
    since = times_s - times_s[0]
    windows = max(1, int(since[-1] / window_s))
    return np.bincount((since / window_s).astype(np.int64), minlength=windows)[:windows].astype(
        np.float64
    )


def two_sample_distance(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float:
    """Kolmogorov and Smirnov's: the largest difference of the two empirical CDFs, 0 to 1."""
    values = np.concatenate([first, second])
    shares = [
        np.searchsorted(np.sort(part), values, side="right") / len(part) for part in (first, second)
    ]
    return float(np.abs(shares[0] - shares[1]).max())


class HitPoint(NamedTuple):
    """LRU token hit rates at one size."""

    blocks: int
    first: float
    second: float


@dataclass(frozen=True, slots=True)
class Closeness:
    """How far two workloads are from each other; distances are 0 (the same) to 1."""

    gaps: float
    """Two-sample distance of gaps / mean gap."""
    counts: float
    """Two-sample distance of arrivals in windows that hold five on average."""
    prompt_tokens: float
    output_tokens: float
    by_chance: float
    """What two samples of one law stay under 19 times out of 20: ``1.36 sqrt((n + m) / (n m))``."""
    hits: tuple[HitPoint, ...] | None
    """``None``: one of the two does not tell what prompts share."""
    ideal: tuple[float, float] | None

    @property
    def hit_gap(self) -> float | None:
        """Largest difference of the hit curves."""
        return None if self.hits is None else max(abs(p.first - p.second) for p in self.hits)

    def to_json(self) -> dict[str, Any]:
        return {
            "gap_distance": self.gaps,
            "count_distance": self.counts,
            "prompt_tokens_distance": self.prompt_tokens,
            "output_tokens_distance": self.output_tokens,
            "distance_by_chance": self.by_chance,
            "hit_rate_gap": self.hit_gap,
            "hit_rates": None if self.hits is None else [point._asdict() for point in self.hits],
            "ideal_hit_rates": None if self.ideal is None else list(self.ideal),
        }

    def to_text(self) -> str:
        """Lines for people."""
        lines = [
            "Distance from the trace (0 = the same, 1 = nothing in common; "
            f"chance alone gives up to {self.by_chance:.3f})",
            f"  gaps          {self.gaps:.3f}",
            f"  bursts        {self.counts:.3f}   (arrivals in windows of five on average)",
            f"  prompt tokens {self.prompt_tokens:.3f}",
            f"  output tokens {self.output_tokens:.3f}",
        ]
        if self.hits is None or self.ideal is None:
            return "\n".join(
                [*lines, "  prefix hits   unknown: the trace does not tell what prompts share"]
            )
        lines.append(
            f"  prefix hits   {100 * (self.hit_gap or 0):.1f} points at most between the LRU hit rates"
        )
        lines.append(f"  {'blocks':>12} {'trace':>8} {'made':>8}")
        lines += [f"  {p.blocks:>12,} {p.first:>8.1%} {p.second:>8.1%}" for p in self.hits]
        lines.append(f"  {'ideal':>12} {self.ideal[0]:>8.1%} {self.ideal[1]:>8.1%}")
        return "\n".join(lines)


def closeness(
    first: Sequence[Arrival], second: Sequence[Arrival], block_size: int | None = None
) -> Closeness:
    """Compare two workloads (a trace, what was made after it); each needs three arrivals or more.

    Raises `TraceError` where one has no span.
    """
    times = []
    for arrivals in (first, second):
        time = np.array([a.request.arrival_ns for a in arrivals], dtype=np.int64) / _NS
        if len(time) < 3 or time[0] == time[-1]:
            raise TraceError("a workload without a span has no gaps to compare")
        times.append(time)
    rates = [(len(time) - 1) / (time[-1] - time[0]) for time in times]
    n, m = len(first), len(second)
    curves = [reuse_curve(arrivals, block_size) for arrivals in (first, second)]
    one, two = curves
    hits = ideal = None
    if one is not None and two is not None:
        sizes = sorted({*one.sizes(), *two.sizes()})
        hits = tuple(HitPoint(size, one.lru(size), two.lru(size)) for size in sizes)
        ideal = one.ideal, two.ideal
    return Closeness(
        gaps=two_sample_distance(*(np.diff(t) * r for t, r in zip(times, rates, strict=True))),
        counts=two_sample_distance(*(_counts(t, r) for t, r in zip(times, rates, strict=True))),
        prompt_tokens=two_sample_distance(*(_lengths(a, "prompt") for a in (first, second))),
        output_tokens=two_sample_distance(*(_lengths(a, "output") for a in (first, second))),
        by_chance=1.36 * math.sqrt((n + m) / (n * m)),
        hits=hits,
        ideal=ideal,
    )


def _lengths(arrivals: Iterable[Arrival], which: str) -> npt.NDArray[np.int64]:
    return np.array(
        [a.request.num_prompt_tokens if which == "prompt" else a.output_tokens for a in arrivals],
        dtype=np.int64,
    )
