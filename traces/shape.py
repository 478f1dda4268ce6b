"""A trace cut, scaled and combined; each change leaves a sentence in the trail for the run record.

Every function takes `Shaped` arrivals (sorted) and returns new ones. What is drawn is drawn with a
seed of its own. Copies of a request get new ids; what their prompts share with the originals is
said, never assumed: ``identity="own"`` puts a salt on each copy, so that copies are other people
who share nothing with each other, and ``"shared"`` lets them hit the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import numpy as np

from blockmanager.content import Content, ExtraKeys, HashedContent, TokenContent
from scheduler.request import Request
from traces.formats.base import INT64_MAX, MAX_TOKENS, RowError, TraceError, time_ns, to_number
from traces.laws import parse_options
from traces.trace import Trace
from traces.workload import Arrival

Identity = Literal["own", "shared"]
Unit = Literal["request", "session"]
_NS = 1_000_000_000
_MAX_REQUESTS = 50_000_000


@dataclass(frozen=True, slots=True)
class Shaped:
    """Arrivals in order of time, and what was done to them."""

    arrivals: Sequence[Arrival]
    trail: tuple[str, ...] = ()

    @property
    def first_ns(self) -> int:
        return self.arrivals[0].request.arrival_ns

    @property
    def span_ns(self) -> int:
        """From the first arrival to the last."""
        return self.arrivals[-1].request.arrival_ns - self.first_ns

    def then(self, arrivals: Iterable[Arrival], step: str) -> Shaped:
        """After one more step. Raises `TraceError` where it leaves no request."""
        kept = list(arrivals)
        if not kept:
            raise TraceError(f"{step}: no request is left")
        count = f"{len(self.arrivals):,} -> {len(kept):,} requests"
        return Shaped(kept, (*self.trail, f"{step} ({count})"))


def time_window(shaped: Shaped, start_ns: int, end_ns: int | None) -> Shaped:
    """What arrives within ``start_ns <= time < end_ns``; ``start_ns`` becomes time 0.

    A cache that was warm at that time in the trace starts cold here, and sessions lose the turns
    outside.
    """
    if end_ns is not None and end_ns <= start_ns:
        raise TraceError(f"window: ends at {_s(end_ns)}, not after its start at {_s(start_ns)}")
    inside = (
        a
        for a in shaped.arrivals
        if a.request.arrival_ns >= start_ns and (end_ns is None or a.request.arrival_ns < end_ns)
    )
    until = "the end" if end_ns is None else _s(end_ns)
    return shaped.then(
        (_moved(a, -start_ns) for a in inside),
        f"window from {_s(start_ns)} to {until}, its start is time 0; caches start cold",
    )


def cut_warm_up(shaped: Shaped, length_ns: int) -> Shaped:
    """Leave out the first ``length_ns`` after the first arrival, as a ramp that is not the load.

    The time where the cut ends becomes time 0.
    """
    start_ns = shaped.first_ns + length_ns
    return shaped.then(
        (_moved(a, -start_ns) for a in shaped.arrivals if a.request.arrival_ns >= start_ns),
        f"warm-up of {_s(length_ns)} after the first arrival left out; caches start cold",
    )


def stretch_time(shaped: Shaped, factor: Fraction) -> Shaped:
    """Rate times ``factor``, every gap divided by it (exact, half to even); patience stays."""
    _check_factor(factor)
    first_ns = shaped.first_ns
    return shaped.then(
        (
            _moved(
                a,
                first_ns + round((a.request.arrival_ns - first_ns) / factor) - a.request.arrival_ns,
            )
            for a in shaped.arrivals
        ),
        f"rate x {_number(factor)} by dividing every gap; bursts keep their shape, think times do not",
    )


def thin(shaped: Shaped, factor: Fraction, seed: int, unit: Unit = "request") -> Shaped:
    """Rate times ``factor <= 1``: each request (or each whole session) is kept with that chance."""
    _check_factor(factor)
    if factor > 1:
        raise TraceError(
            f"thin: factor is {_number(factor)}, must be at most 1 (superpose to add load)"
        )
    chance = float(factor)
    units = _units(shaped.arrivals, unit)
    kept = _rng(seed).random(max(units) + 1) < chance
    return shaped.then(
        (a for a, of in zip(shaped.arrivals, units, strict=True) if kept[of]),
        f"rate x {_number(factor)} by keeping each {unit} with that chance, seed {seed}"
        + _about_sessions(shaped.arrivals, unit),
    )


def superpose(shaped: Shaped, factor: Fraction, seed: int, identity: Identity = "own") -> Shaped:
    """Rate times ``factor >= 1``: the trace over itself, each copy turned around the clock.

    A copy starts at a point of the trace drawn with the seed, and its earlier part follows at the
    end, so that the bursts of copies do not fall together. Of a fractional factor the last copy is
    thinned. Sessions that the turn cuts through take their later turns first.
    """
    _check_factor(factor)
    if factor < 1:
        raise TraceError(
            f"superpose: factor is {_number(factor)}, must be at least 1 (thin takes load away)"
        )
    _check_count(factor * len(shaped.arrivals))
    rng = _rng(seed)
    first_ns, period_ns = shaped.first_ns, _period_ns(shaped)
    copies = list(shaped.arrivals)
    whole = factor.numerator // factor.denominator
    rest = float(factor - whole)
    rename = _Renamer(shaped.arrivals, identity)
    for copy in range(1, whole + (rest > 0)):
        offset_ns = int(rng.integers(period_ns))
        kept = rng.random(len(shaped.arrivals)) < (rest if copy == whole else 1.0)
        for arrival, is_kept in zip(shaped.arrivals, kept, strict=True):
            if is_kept:
                now = arrival.request.arrival_ns
                turned = first_ns + (now - first_ns + offset_ns) % period_ns
                copies.append(rename(_moved(arrival, turned - now), copy))
    copies.sort(key=_time)
    return shaped.then(
        copies,
        f"rate x {_number(factor)} by laying the trace over itself, each copy turned around its "
        f"{_s(period_ns)}, seed {seed}; {_about_identity(identity)}",
    )


def scale_lengths(
    shaped: Shaped, prompt: Fraction = Fraction(1), output: Fraction = Fraction(1)
) -> Shaped:
    """Prompts and outputs times a factor, rounded up; ``max_tokens`` goes with the outputs.

    Equal prefixes stay equal and different ones different: a hash id stands for as many more or
    fewer tokens (a whole number, so that prompts of ids follow the nearest factor that gives one),
    and a token id for its whole prefix.
    """
    for factor in (prompt, output):
        _check_factor(factor)
    scaled = _PromptScaler(prompt)
    arrivals = [
        Arrival(
            replace(
                scaled(a.request),
                max_tokens=None
                if a.request.max_tokens is None
                else _scaled(a.request.max_tokens, output),
            ),
            _scaled(a.output_tokens, output),
        )
        for a in shaped.arrivals
    ]
    step = f"prompts x {_number(prompt)}, outputs x {_number(output)}"
    for size, other in sorted(scaled.sizes.items()):
        if Fraction(other, size) != prompt:
            step += (
                f"; prompts with {size}-token hash ids x {other / size:.4g}, as their ids now stand "
                f"for {other} tokens"
            )
    return shaped.then(arrivals, step)


def sample(shaped: Shaped, count: int, seed: int, unit: Unit = "request") -> Shaped:
    """``count`` requests (or whole sessions) drawn without repetition; times stay as they are."""
    units = _units(shaped.arrivals, unit)
    there = max(units) + 1
    if not 1 <= count <= there:
        raise TraceError(
            f"sample: {count:,} {unit}s asked for, the trace has {there:,} (repeat makes more of it)"
        )
    kept = np.zeros(there, dtype=bool)
    kept[_rng(seed).choice(there, count, replace=False)] = True
    return shaped.then(
        (a for a, of in zip(shaped.arrivals, units, strict=True) if kept[of]),
        f"{count:,} of {there:,} {unit}s drawn with seed {seed}"
        + _about_sessions(shaped.arrivals, unit),
    )


def first(shaped: Shaped, count: int) -> Shaped:
    """The first ``count`` requests."""
    if not 1 <= count <= len(shaped.arrivals):
        raise TraceError(
            f"first: {count:,} requests asked for, the trace has {len(shaped.arrivals):,} "
            "(repeat makes more of it)"
        )
    return shaped.then(shaped.arrivals[:count], f"the first {count:,} requests")


def repeat(shaped: Shaped, times: int, identity: Identity = "own") -> Shaped:
    """The trace ``times`` times, one after the other, a mean gap between."""
    if times < 1:
        raise TraceError(f"repeat: times is {times}, must be at least 1")
    _check_count(times * len(shaped.arrivals))
    period_ns = _period_ns(shaped)
    rename = _Renamer(shaped.arrivals, identity)
    return shaped.then(
        (
            rename(_moved(a, copy * period_ns), copy) if copy else a
            for copy in range(times)
            for a in shaped.arrivals
        ),
        f"repeated {times} times, every {_s(period_ns)}; {_about_identity(identity)}",
    )


def merge(tenants: Sequence[tuple[str, Shaped]], identity: Identity = "own") -> Shaped:
    """Several traces as one load: ``NAME/`` before ids and sessions; ties in the order given.

    Raises `TraceError` where two tenants have one name.
    """
    names = [name for name, _ in tenants]
    if len(set(names)) < len(names) or not names:
        raise TraceError(
            f"merge: each tenant needs a name of its own, got {', '.join(names) or 'none'}"
        )
    arrivals: list[Arrival] = []
    for name, shaped in tenants:
        for a in shaped.arrivals:
            request = a.request
            session = request.session_id
            arrivals.append(
                a._replace(
                    request=replace(
                        request,
                        id=f"{name}/{request.id}",
                        session_id=None if session is None else f"{name}/{session}",
                        extra_keys=_salted(request.extra_keys, name)
                        if identity == "own"
                        else request.extra_keys,
                    )
                )
            )
    arrivals.sort(key=_time)
    counts = ", ".join(f"{name} with {len(shaped.arrivals):,}" for name, shaped in tenants)
    share = "tenants share no blocks" if identity == "own" else "tenants share blocks of equal ids"
    trail = tuple(f"{name}: {step}" for name, shaped in tenants for step in shaped.trail)
    return Shaped(arrivals, (*trail, f"merged {counts} requests; {share}"))


def shape(arrivals: Sequence[Arrival], steps: Iterable[str]) -> Shaped:
    """Do the steps that flags name, in their order (`STEPS`). Raises `TraceError`."""
    shaped = Shaped(arrivals)
    for step in steps:
        kind, given = parse_options(step)
        known = _STEPS.get(kind)
        if known is None:
            raise TraceError(
                f"{step!r} is no way to shape a trace; expected one of\n{STEPS}".replace("\n", " ")
            )
        values = _Values(step, given)
        shaped = known(shaped, values)
        values.check_all_used()
    return shaped


STEPS = """\
window:from=S,to=S            what arrives in between (either may be left out)
warm-up:cut=S                 without the first seconds
rate:factor=X,by=stretch      or by=thin[,seed=N][,unit=session], by=superpose[,seed=N][,identity=shared]
lengths:prompt=X,output=X     (either may be left out)
sample:count=N[,seed=N][,unit=session]
first:count=N
repeat:times=N[,identity=shared]"""
"""What `shape` reads; seeds are 0, units requests and identities own where they are not given."""


def shaped_trace(trace: Trace, steps: Sequence[str]) -> Trace:
    """A trace after the steps that flags name; its notes tell them. Raises `TraceError`."""
    if not steps:
        return trace
    done = shape(trace.arrivals, steps)
    notes = [*trace.notes, *(f"Shaped: {step}." for step in done.trail)]
    return replace(trace, arrivals=list(done.arrivals), notes=notes)


class _Values:
    """Options of one step, taken one by one."""

    def __init__(self, step: str, given: dict[str, str]) -> None:
        self._step = step
        self._given = given
        self._used: set[str] = set()

    def text(self, key: str, default: str | None, allowed: tuple[str, ...] = ()) -> str:
        self._used.add(key)
        value = self._given.get(key, default)
        if value is None or (allowed and value not in allowed):
            wanted = " or ".join(allowed) or "a value"
            raise TraceError(f"{self._step!r}: {key} is {value or 'missing'}, expected {wanted}")
        return value

    def whole(self, key: str, default: str | None = None) -> int:
        text = self.text(key, default)
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise TraceError(f"{self._step!r}: {key} is {text!r}, expected a whole number")
        return int(text)

    def factor(self, key: str, default: str | None = None) -> Fraction:
        text = self.text(key, default)
        try:
            value = Fraction(to_number(text))
        except RowError as error:
            raise TraceError(f"{self._step!r}: {key} is {error}") from None
        _check_factor(value)
        return value

    def ns(self, key: str, default: str | None = None) -> int:
        text = self.text(key, default)
        try:
            return time_ns(to_number(text.removesuffix("s")), key, 9)
        except RowError as error:
            raise TraceError(f"{self._step!r}: {key}: {error}") from None

    def check_all_used(self) -> None:
        if unknown := sorted(self._given.keys() - self._used):
            raise TraceError(f"{self._step!r}: {', '.join(unknown)} has no effect there")


def _rate_step(shaped: Shaped, values: _Values) -> Shaped:
    factor = values.factor("factor")
    by = values.text("by", None, ("stretch", "thin", "superpose"))
    if by == "stretch":
        return stretch_time(shaped, factor)
    if by == "thin":
        return thin(shaped, factor, values.whole("seed", "0"), _unit(values))
    return superpose(shaped, factor, values.whole("seed", "0"), _identity(values))


def _window_step(shaped: Shaped, values: _Values) -> Shaped:
    end = values.ns("to") if "to" in values._given else None
    return time_window(shaped, values.ns("from", "0"), end)


_STEPS: dict[str, Callable[[Shaped, _Values], Shaped]] = {
    "window": _window_step,
    "warm-up": lambda shaped, values: cut_warm_up(shaped, values.ns("cut")),
    "rate": _rate_step,
    "lengths": lambda shaped, values: scale_lengths(
        shaped, values.factor("prompt", "1"), values.factor("output", "1")
    ),
    "sample": lambda shaped, values: sample(
        shaped, values.whole("count"), values.whole("seed", "0"), _unit(values)
    ),
    "first": lambda shaped, values: first(shaped, values.whole("count")),
    "repeat": lambda shaped, values: repeat(shaped, values.whole("times"), _identity(values)),
}


def _unit(values: _Values) -> Unit:
    return (
        "session"
        if values.text("unit", "request", ("request", "session")) == "session"
        else "request"
    )


def _identity(values: _Values) -> Identity:
    return "shared" if values.text("identity", "own", ("own", "shared")) == "shared" else "own"


class _Renamer:
    """New ids for copies, none of which the trace has."""

    def __init__(self, arrivals: Sequence[Arrival], identity: Identity) -> None:
        self._identity = identity
        self._mark = "#"
        while any(self._mark in arrival.request.id for arrival in arrivals):
            self._mark += "#"

    def __call__(self, arrival: Arrival, copy: int) -> Arrival:
        request = arrival.request
        name = f"{self._mark}{copy}"
        session = request.session_id
        keys = request.extra_keys
        return arrival._replace(
            request=replace(
                request,
                id=request.id + name,
                session_id=None if session is None else session + name,
                extra_keys=_salted(keys, name) if self._identity == "own" else keys,
            )
        )


def _salted(keys: ExtraKeys, name: str) -> ExtraKeys:
    return replace(keys, salt=name if keys.salt is None else f"{keys.salt}/{name}")


class _PromptScaler:
    """Prompts times a factor, what they share with each other kept."""

    def __init__(self, factor: Fraction) -> None:
        self._factor = factor
        self._prefixes: dict[tuple[int, int], int] = {}
        self.sizes: dict[int, int] = {}
        """Tokens a hash id before and after."""

    def __call__(self, request: Request) -> Request:
        content = request.content
        if self._factor == 1:
            return request
        num_tokens = request.num_prompt_tokens
        if content is None:
            return replace(request, num_prompt_tokens=_scaled(num_tokens, self._factor))
        scaled: Content
        if isinstance(content, HashedContent):
            size = content.hash_block_size
            other = self.sizes.setdefault(size, max(min(size, 2), round(size * self._factor)))
            factor = Fraction(other, size)
            covered = _ceil(content.num_tokens * factor)
            scaled = HashedContent(content.hash_ids, other, covered)
            grown = _ceil((num_tokens - content.num_tokens) * factor)
            # What is too little for an id stays too little for one.
            is_tail = num_tokens - content.num_tokens < size
            length = covered + (min(grown, other - 1) if is_tail else grown)
        elif isinstance(content, TokenContent):
            length = _scaled(num_tokens, self._factor)
            scaled = TokenContent.of(
                self._prefix_ids(content, _scaled(content.num_tokens, self._factor))
            )
        else:
            raise TraceError(f"lengths: prompts of {type(content).__name__} cannot be scaled")
        return replace(request, num_prompt_tokens=max(1, length), content=scaled)

    def _prefix_ids(self, content: TokenContent, length: int) -> list[int]:
        """A token of the scaled prompt is named by the prefix of the original that it stands for."""
        node, nodes = -1, []
        for token in content.token_ids.tolist():
            node = self._prefixes.setdefault((node, token), len(self._prefixes))
            nodes.append(node)
        last = len(nodes) - 1
        return [nodes[min(last, _ceil(Fraction(i + 1) / self._factor) - 1)] for i in range(length)]


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


def _scaled(tokens: int, factor: Fraction) -> int:
    scaled = _ceil(tokens * factor)
    if scaled > MAX_TOKENS:
        raise TraceError(
            f"lengths: {tokens:,} tokens x {_number(factor)} are more than {MAX_TOKENS:,}"
        )
    return scaled


def _moved(arrival: Arrival, by_ns: int) -> Arrival:
    """At another time; a deadline moves with it."""
    request = arrival.request
    time = request.arrival_ns + by_ns
    deadline = None if request.deadline_ns is None else request.deadline_ns + by_ns
    if max(time, deadline or 0) > INT64_MAX:
        raise TraceError(f"request {request.id}: a time passes 64 bits")
    return arrival._replace(request=replace(request, arrival_ns=time, deadline_ns=deadline))


def _time(arrival: Arrival) -> int:
    return arrival.request.arrival_ns


def _period_ns(shaped: Shaped) -> int:
    """Span plus one mean gap; a second where there is no span."""
    gaps = len(shaped.arrivals) - 1
    return shaped.span_ns + shaped.span_ns // gaps if gaps and shaped.span_ns else _NS


def _units(arrivals: Sequence[Arrival], unit: Unit) -> list[int]:
    """Number of each arrival's request or session; a request without a session is one of its own."""
    if unit == "request":
        return list(range(len(arrivals)))
    numbers: dict[str | int, int] = {}
    return [
        numbers.setdefault(
            index if a.request.session_id is None else a.request.session_id, len(numbers)
        )
        for index, a in enumerate(arrivals)
    ]


def _about_sessions(arrivals: Sequence[Arrival], unit: Unit) -> str:
    if unit == "request" and any(a.request.session_id is not None for a in arrivals):
        return "; sessions lose turns"
    return ""


def _about_identity(identity: Identity) -> str:
    if identity == "own":
        return "copies have new ids and share no blocks with each other"
    return "copies have new ids and hit the blocks of the originals"


def _rng(seed: int) -> np.random.Generator:
    if seed < 0:
        raise TraceError(f"seed is {seed}, must not be negative")
    return np.random.Generator(np.random.PCG64(seed))


def _check_factor(factor: Fraction) -> None:
    if not Fraction(1, 10**6) <= factor <= 10**6:
        raise TraceError(f"a factor is {_number(factor)}, must be within 1e-06 and 1e+06")


def _check_count(count: Fraction | int) -> None:
    if count > _MAX_REQUESTS:
        raise TraceError(f"{float(count):,.0f} requests, at most {_MAX_REQUESTS:,} are made")


def _number(factor: Fraction) -> str:
    return f"{float(factor):g}"


def _s(time: int) -> str:
    return f"{time / _NS:,.6g} s"
