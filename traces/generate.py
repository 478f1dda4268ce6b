"""A chat workload: people who arrive, ask, read, and ask again.

Sessions start as a renewal process (Poisson, or gamma gaps with a given CV). Each has a system
prompt, shared with all sessions that drew the same one, and turns: the prompt of a turn is the
prompt before it, the answer to that, and a new question. The trace is open loop, so the time of the
next turn needs an answer speed, which is assumed.

The window ``[0, duration)`` is cut from a process that has been running for a while, so the load is
level from the first second on, and some conversations are in the middle when it starts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from traces.formats.base import TraceError

_NORMAL = NormalDist()
_Z95 = _NORMAL.inv_cdf(0.95)
_NS = 1_000_000_000
_MS = 1_000_000
_MAX_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """A lognormal law by its median and its 95th percentile."""

    median: float
    p95: float

    def quantile(self, u: float) -> float:
        """Inverse CDF: ``median * exp(sigma * z(u))``, ``sigma = ln(p95 / median) / z(0.95)``."""
        sigma = math.log(self.p95 / self.median) / _Z95
        return self.median * math.exp(sigma * _NORMAL.inv_cdf(u))

    def __str__(self) -> str:
        return f"median {self.median:g}, p95 {self.p95:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """What `generate_chat` makes. Raises `TraceError` on values that make no workload."""

    rate: float = 7.0
    """Requests per second, all turns counted."""
    cv: float = 1.0
    """CV of the gaps between session starts; 1 = Poisson, above = bursts (gamma)."""
    duration_s: float = 430.0
    turns: float = 3.0
    """Mean turns a session (geometric); fewer where ``max_context`` ends it."""
    question_tokens: Lognormal = Lognormal(median=60, p95=500)
    output_tokens: Lognormal = Lognormal(median=180, p95=520)
    system_tokens: Lognormal = Lognormal(median=250, p95=900)
    system_prompts: int = 12
    """Different system prompts; the k-th most popular is drawn with weight 1/k."""
    think_s: Lognormal = Lognormal(median=18, p95=70)
    """Between the end of an answer, as assumed, and the next question."""
    answer_tokens_per_s: float = 50.0
    """Assumed: how fast answers come. A real server is not asked."""
    max_context: int = 8_192
    """A session ends where prompt and answer would not fit."""
    hash_block_size: int = 32
    hash_ids: bool = True
    """False leaves them out: what prompts share is then unknown, as in traces of lengths only."""
    seed: int = 0

    def __post_init__(self) -> None:
        _check("rate", self.rate, 1e-6, 1e6)
        _check("cv", self.cv, 0.01, 100)
        _check("duration_s", self.duration_s, 1e-3, 1e8)
        _check("turns", self.turns, 1, 1e4)
        _check("answer_tokens_per_s", self.answer_tokens_per_s, 1e-3, 1e9)
        for name in ("question_tokens", "output_tokens", "system_tokens", "think_s"):
            law = getattr(self, name)
            if not 1e-3 <= law.median <= law.p95 <= 1e6:
                raise TraceError(f"{name}: need 0.001 <= median <= p95 <= 1e6, got {law}")
        for name in ("system_prompts", "max_context", "hash_block_size"):
            _check(name, getattr(self, name), 1, 10_000_000)
        if self.seed < 0:
            raise TraceError(f"seed is {self.seed}, must not be negative")
        requests = self.rate * (self.duration_s + self.warm_up_s)
        if requests > _MAX_REQUESTS:
            raise TraceError(
                f"rate x (duration + {self.warm_up_s:.0f} s of sessions under way before it) are "
                f"{requests:.0f} requests, at most {_MAX_REQUESTS} are made"
            )

    @property
    def warm_up_s(self) -> float:
        """How long the process has been running at time 0: 4 x mean turns x a slow turn (p95).

        The number of turns is geometric: hardly any session lasts longer.
        """
        answer_s = self.output_tokens.p95 / self.answer_tokens_per_s
        return 4.0 * self.turns * (self.think_s.p95 + answer_s)


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # NaN compares false
        raise TraceError(f"{name} is {value}, must be within {least:g} and {most:g}")


class _Uniforms:
    """One random stream of one source.

    Uniform doubles stay the same between numpy releases, while samplers of distributions may not:
    where there is an inverse CDF it is used instead.
    """

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self.rng = np.random.Generator(np.random.PCG64(seed))

    def draw(self) -> float:
        """Within (0, 1), both ends left out."""
        return max(float(self.rng.random()), 2.0**-54)


class _Turn(NamedTuple):
    arrival_ns: int
    session: int
    number: int
    prompt_tokens: int
    output_tokens: int
    system: int


def generate_chat(settings: ChatSettings) -> Iterator[dict[str, Any]]:
    """Native rows by arrival. The same settings give the same rows.

    Hash ids cover the full blocks of each prompt. A block belongs to the system prompt where it
    lies wholly inside it, and to the session otherwise.
    """
    arrivals, prompts, choices, lengths, counts, thoughts = (
        _Uniforms(seed) for seed in np.random.SeedSequence(settings.seed).spawn(6)
    )
    system_tokens = [
        _whole(settings.system_tokens, prompts, settings.max_context)
        for _ in range(settings.system_prompts)
    ]
    weights = np.cumsum(1.0 / np.arange(1, settings.system_prompts + 1))
    turns: list[_Turn] = []
    for session, start_s in enumerate(_session_starts(settings, arrivals)):
        system = int(np.searchsorted(weights, choices.draw() * weights[-1], side="right"))
        turns += _session(
            settings, session, start_s, system, system_tokens[system], lengths, counts, thoughts
        )
    turns.sort(key=lambda turn: (turn.arrival_ns, turn.session, turn.number))
    return _rows(settings, turns, system_tokens)


def _session_starts(settings: ChatSettings, stream: _Uniforms) -> Iterator[float]:
    """Seconds, from long before 0 to the end of the window."""
    mean_gap_s = settings.turns / settings.rate
    shape = 1.0 / settings.cv**2
    now_s = -settings.warm_up_s
    while True:
        if settings.cv == 1.0:
            now_s -= mean_gap_s * math.log(stream.draw())
        else:
            now_s += mean_gap_s * float(stream.rng.standard_gamma(shape)) / shape
        if now_s >= settings.duration_s:
            return
        yield now_s


def _session(
    settings: ChatSettings,
    session: int,
    start_s: float,
    system: int,
    system_tokens: int,
    lengths: _Uniforms,
    counts: _Uniforms,
    thoughts: _Uniforms,
) -> Iterator[_Turn]:
    """The turns of one session that fall into the window."""
    num_turns = 1
    if settings.turns > 1:  # geometric by inversion
        num_turns += int(math.log(counts.draw()) / math.log(1.0 - 1.0 / settings.turns))
    now_s = start_s
    prompt_tokens = system_tokens
    for number in range(num_turns):
        prompt_tokens += _whole(settings.question_tokens, lengths, settings.max_context)
        output_tokens = _whole(settings.output_tokens, lengths, settings.max_context)
        if prompt_tokens + output_tokens > settings.max_context:
            return
        arrival_ns = round(now_s * 1_000) * _MS
        if arrival_ns >= settings.duration_s * _NS:
            return
        if arrival_ns >= 0:
            yield _Turn(arrival_ns, session, number, prompt_tokens, output_tokens, system)
        prompt_tokens += output_tokens
        now_s += output_tokens / settings.answer_tokens_per_s
        now_s += settings.think_s.quantile(thoughts.draw())


def _whole(law: Lognormal, stream: _Uniforms, most: int) -> int:
    return max(1, round(min(law.quantile(stream.draw()), most)))


def _rows(
    settings: ChatSettings, turns: list[_Turn], system_tokens: list[int]
) -> Iterator[dict[str, Any]]:
    size = settings.hash_block_size
    num_ids = 0
    system_ids: dict[int, list[int]] = {}
    session_ids: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for turn in turns:
        held = session_ids.get(turn.session)
        if held is None:
            names[turn.session] = f"s{len(names)}"
            shared = system_ids.get(turn.system)
            if shared is None:
                blocks = system_tokens[turn.system] // size
                shared = system_ids[turn.system] = list(range(num_ids, num_ids + blocks))
                num_ids += blocks
            held = session_ids[turn.session] = list(shared)
        blocks = turn.prompt_tokens // size
        missing = max(0, blocks - len(held))
        held += range(num_ids, num_ids + missing)
        num_ids += missing
        name = names[turn.session]
        row = {
            "id": f"{name}.{turn.number}",
            "arrival_s": turn.arrival_ns // _MS / 1_000,
            "prompt_tokens": turn.prompt_tokens,
            "output_tokens": turn.output_tokens,
            "session_id": name,
        }
        yield row | (
            {"hash_block_size": size, "hash_ids": held[:blocks]} if settings.hash_ids else {}
        )


def chat_lines(settings: ChatSettings) -> Iterator[str]:
    """The rows of `generate_chat` as JSON lines. Raises `TraceError` where there is none."""
    empty = True
    for row in generate_chat(settings):
        empty = False
        yield json.dumps(row, separators=(",", ":")) + "\n"
    if empty:
        raise TraceError(
            f"no request falls into {settings.duration_s:g} s: raise the rate, the duration "
            "or max_context"
        )
