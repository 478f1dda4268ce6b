"""A workload of sessions: people who arrive, ask, read, and ask again.

Sessions start as a renewal process (Poisson, or gamma gaps with a given CV) or as any process of
traces/laws.py. Each has a system prompt, shared with all sessions that drew the same one, documents
behind it if there are any, and turns: the prompt of a turn is the prompt before it, the answer to
that, and a new question. So prompts are the paths of a tree: system prompt, documents, turns. Agents,
retrieval, summaries and reasoning are the same with other numbers (traces/presets.py). The trace is
open loop, so the time of the next turn needs an answer speed, which is assumed.

The window ``[0, duration)`` is cut from a process that has been running for a while, so the load is
level from the first second on, and some conversations are in the middle when it starts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from traces.formats.base import TraceError
from traces.laws import Fixed, Law, Lognormal, Process, Stream, check, zipf_index

_NS = 1_000_000_000
_MS = 1_000_000
_MAX_REQUESTS = 10_000_000
_QUESTION = Lognormal(median=60, p95=500)
_ANSWER = Lognormal(median=180, p95=520)
_SYSTEM = Lognormal(median=250, p95=900)
_THINK = Lognormal(median=18, p95=70)
_DOCUMENT = Fixed(512)


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
    question_tokens: Law = _QUESTION
    output_tokens: Law = _ANSWER
    system_tokens: Law = _SYSTEM
    system_prompts: int = 12
    """Different system prompts; the k-th most popular is drawn with weight 1/k. 0: there are none."""
    think_s: Law = _THINK
    """Between the end of an answer, as assumed, and the next question."""
    answer_tokens_per_s: float = 50.0
    """Assumed: how fast answers come. A real server is not asked."""
    max_context: int = 8_192
    """A session ends where prompt and answer would not fit."""
    hash_block_size: int = 32
    hash_ids: bool = True
    """False leaves them out: what prompts share is then unknown, as in traces of lengths only."""
    seed: int = 0
    arrivals: Process | None = None
    """How sessions start; ``None`` = gaps with ``cv``."""
    documents: int = 0
    """Documents in the corpus; the k-th most popular has weight ``k ** -document_exponent``."""
    documents_per_question: int = 0
    """Documents in front of each question. Sessions share the blocks of equal leading documents."""
    document_tokens: Law = _DOCUMENT
    document_exponent: float = 1.0
    kept_output: float = 1.0
    """Share of an answer that the next prompt contains: reasoning is left out of it."""

    def __post_init__(self) -> None:
        check("rate", self.rate, 1e-6, 1e6)
        check("cv", self.cv, 0.01, 100)
        check("duration_s", self.duration_s, 1e-3, 1e8)
        check("turns", self.turns, 1, 1e4)
        check("answer_tokens_per_s", self.answer_tokens_per_s, 1e-3, 1e9)
        check("kept_output", self.kept_output, 0, 1)
        check("document_exponent", self.document_exponent, 0, 10)
        check("system_prompts", self.system_prompts, 0, 10_000_000)
        check("documents", self.documents, 0, 1_000_000)
        least_documents = 1 if self.documents else 0
        check("documents_per_question", self.documents_per_question, least_documents, 1_000)
        if self.documents_per_question > self.documents:
            raise TraceError(
                f"{self.documents_per_question} different documents a question need as many in the "
                f"corpus, which has {self.documents}"
            )
        for name in (
            "question_tokens",
            "output_tokens",
            "system_tokens",
            "think_s",
            "document_tokens",
        ):
            law: Law = getattr(self, name)
            law.check(name)
        for name in ("max_context", "hash_block_size"):
            check(name, getattr(self, name), 1, 10_000_000)
        if self.arrivals is not None:
            self.arrivals.check()
            if self.cv != 1.0:
                raise TraceError(f"cv {self.cv:g} has no effect beside arrivals ({self.arrivals})")
        if self.seed < 0:
            raise TraceError(f"seed is {self.seed}, must not be negative")
        requests = self.rate * (self.duration_s + self.warm_up_s)
        if requests > _MAX_REQUESTS:
            raise TraceError(
                f"rate x (duration + {self.warm_up_s:.0f} s of sessions under way before it) are "
                f"{requests:.0f} requests, at most {_MAX_REQUESTS} are made"
            )

    def to_json(self) -> dict[str, Any]:
        """For a report: laws and processes in words."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {k: str(v) if isinstance(v, Law | Process) else v for k, v in values.items()}

    @property
    def warm_up_s(self) -> float:
        """How long the process has been running at time 0: 4 x mean turns x a slow turn (p95).

        The number of turns is geometric: hardly any session lasts longer.
        """
        answer_s = self.output_tokens.p95_value() / self.answer_tokens_per_s
        return 4.0 * self.turns * (self.think_s.p95_value() + answer_s)


class _Turn(NamedTuple):
    arrival_ns: int
    session: int
    number: int
    prompt_tokens: int
    output_tokens: int
    shared: tuple[_Segment, ...]
    """What the session's prompts begin with."""


class _Segment(NamedTuple):
    """A piece of prompt that other sessions may have too; named by its kind and number."""

    kind: str
    number: int
    tokens: int


def generate_chat(settings: ChatSettings) -> Iterator[dict[str, Any]]:
    """Native rows by arrival. The same settings give the same rows.

    Hash ids cover the full blocks of each prompt. A block belongs to the system prompt (and the
    documents that follow it) where it lies wholly inside them, and to the session otherwise.
    """
    streams = _Streams(*map(Stream, np.random.SeedSequence(settings.seed).spawn(8)))
    systems = [
        _Segment(
            "system", number, _whole(settings.system_tokens, streams.prompts, settings.max_context)
        )
        for number in range(settings.system_prompts)
    ]
    corpus = [
        _Segment(
            "document",
            number,
            _whole(settings.document_tokens, streams.corpus, settings.max_context),
        )
        for number in range(settings.documents)
    ]
    weights = np.cumsum(1.0 / np.arange(1, settings.system_prompts + 1))
    turns: list[_Turn] = []
    for session, start_s in enumerate(_session_starts(settings, streams.arrivals)):
        shared: list[_Segment] = []
        if systems:
            drawn = streams.choices.draw() * weights[-1]
            shared.append(systems[int(np.searchsorted(weights, drawn, side="right"))])
        shared += _retrieved(settings, corpus, streams.retrieval)
        turns += _session(settings, session, start_s, tuple(shared), corpus, streams)
    turns.sort(key=lambda turn: (turn.arrival_ns, turn.session, turn.number))
    return _rows(settings, turns)


class _Streams(NamedTuple):
    """One for each source: a change of one leaves the draws of the others alone."""

    arrivals: Stream
    prompts: Stream
    choices: Stream
    lengths: Stream
    counts: Stream
    thoughts: Stream
    corpus: Stream
    retrieval: Stream


def _retrieved(settings: ChatSettings, corpus: list[_Segment], stream: Stream) -> list[_Segment]:
    """Different documents for a question, in the order in which they were drawn."""
    found: dict[int, _Segment] = {}
    while len(found) < settings.documents_per_question:
        number = zipf_index(settings.document_exponent, len(corpus), stream.draw())
        if stream.draw() * 64 < len(found):  # a steep law draws the same ones again and again
            number = next(k for k in range(len(corpus)) if k not in found)
        found.setdefault(number, corpus[number])
    return list(found.values())


def _session_starts(settings: ChatSettings, stream: Stream) -> Iterator[float]:
    """Seconds, from long before 0 to the end of the window."""
    mean_gap_s = settings.turns / settings.rate
    if settings.arrivals is not None:
        yield from settings.arrivals.times(
            1.0 / mean_gap_s, -settings.warm_up_s, settings.duration_s, stream
        )
        return
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
    shared: tuple[_Segment, ...],
    corpus: list[_Segment],
    streams: _Streams,
) -> Iterator[_Turn]:
    """The turns of one session that fall into the window."""
    num_turns = 1
    if settings.turns > 1:  # geometric by inversion
        num_turns += int(math.log(streams.counts.draw()) / math.log(1.0 - 1.0 / settings.turns))
    now_s = start_s
    prompt_tokens = sum(segment.tokens for segment in shared)
    for number in range(num_turns):
        if number and corpus:
            found = _retrieved(settings, corpus, streams.retrieval)
            prompt_tokens += sum(segment.tokens for segment in found)
        prompt_tokens += _whole(settings.question_tokens, streams.lengths, settings.max_context)
        output_tokens = _whole(settings.output_tokens, streams.lengths, settings.max_context)
        if prompt_tokens + output_tokens > settings.max_context:
            return
        arrival_ns = round(now_s * 1_000) * _MS
        if arrival_ns >= settings.duration_s * _NS:
            return
        if arrival_ns >= 0:
            yield _Turn(arrival_ns, session, number, prompt_tokens, output_tokens, shared)
        prompt_tokens += round(output_tokens * settings.kept_output)
        now_s += output_tokens / settings.answer_tokens_per_s
        now_s += settings.think_s.quantile(streams.thoughts.draw())


def _whole(law: Law, stream: Stream, most: int) -> int:
    return max(1, round(min(law.quantile(stream.draw()), most)))


def _rows(settings: ChatSettings, turns: list[_Turn]) -> Iterator[dict[str, Any]]:
    size = settings.hash_block_size
    ids = _Ids(size)
    session_ids: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for turn in turns:
        held = session_ids.get(turn.session)
        if held is None:
            names[turn.session] = f"s{len(names)}"
            held = session_ids[turn.session] = ids.shared(turn.shared)
        blocks = turn.prompt_tokens // size
        held += ids.new(max(0, blocks - len(held)))
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


class _Ids:
    """Ids of blocks, counted up from 0; one for each path through the tree of shared segments."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._count = 0
        self._known: dict[tuple[tuple[_Segment, ...], int], int] = {}

    def new(self, count: int) -> range:
        self._count += count
        return range(self._count - count, self._count)

    def shared(self, segments: tuple[_Segment, ...]) -> list[int]:
        """Of the full blocks of the segments laid end to end; a block is named by all up to its end."""
        ids: list[int] = []
        end = 0
        for depth, segment in enumerate(segments, 1):
            end += segment.tokens
            for index in range(len(ids), end // self._size):
                key = segments[:depth], index
                if key not in self._known:
                    self._known[key] = self.new(1).start
                ids.append(self._known[key])
        return ids


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
