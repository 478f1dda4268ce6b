"""Agent sessions recorded by Weka's kv-cache-tester: one JSON object a session, ids of its own.

https://github.com/callanjfox/kv-cache-tester, docs/trace_replay_tester.md. Nothing says when a
session started: an arrival process of sessions has to be named. What is taken from the times:

- ``think_time`` is what passes from the end of an answer to the next request, so that is when the
  next turn is sent. Where the request before has no ``api_time`` the figure counts from an earlier
  answer (a session of the public files would last 12 times as long as it did); the
  difference of ``t`` is taken then, which holds the unknown answering time as well.
- ``t`` of a sub-agent is when it had ended: ``t - duration_ms`` is within a second of the end of the
  request that started it, in all of the public files looked at. So it starts there, in parallel with
  its siblings, and the parent's next request waits for all of them, but for ``async_launched`` ones.
  Without a duration it starts at ``t``; requests inside that do not count from 0 have the session's
  own clock, and then the first of them is the start.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, ClassVar, Literal, NamedTuple

from blockmanager.content import HashedContent
from scheduler.request import Request
from traces.formats.base import (
    MILLISECONDS,
    SECONDS,
    Head,
    RowError,
    int64_list,
    json_object,
    label,
    shown,
    text_lines,
    time_ns,
    tokens,
    whole,
)
from traces.formats.native import hashed
from traces.formats.session_base import Document, Gathered, SessionFormat
from traces.sessions import Session, Turn

_MOST_NESTED = 8
"""Sub-agents inside sub-agents."""

_NO_API_TIME = (
    "Requests after one without api_time, sent at the recorded distance from it (its answering "
    "time included)"
)
_EARLY = "Requests recorded before what they wait for had ended, sent at once"
_NO_SCOPE = "Where no hash_id_scope is given, hash ids are taken as local to the session."
_LOCAL = (
    "Hash ids are local to a session: what sessions share (tools, system prompt) is unknown, and no "
    "hits between them are modelled."
)


class _Names(dict[int, int]):
    """Ids of one session as ids that no other session has."""

    def __init__(self, numbers: Iterator[int]) -> None:
        super().__init__()
        self._numbers = numbers

    def __missing__(self, hash_id: int) -> int:
        number = self[hash_id] = next(self._numbers)
        return number


class Weka(SessionFormat):
    """``id``, ``block_size``, ``requests`` of ``t``, ``in``, ``out``, ``hash_ids``, ``think_time``."""

    name = "weka"
    recognised_by = "JSON objects with id, block_size, requests of t, in, out, hash_ids"
    units = "seconds, tokens (duration_ms: milliseconds)"
    clock: ClassVar[Literal["relative", "absolute", "none"]] = "none"
    prefix_identity = "hash_ids of the session, block_size (64) tokens an id, rounded down"
    licence = "Apache-2.0 (the repository of the public files)"
    counted_as = "request"

    def match(self, head: Head) -> int:
        for record in head.records:
            requests = record.get("requests")
            if "block_size" in record and isinstance(requests, list):
                entries = [entry for entry in requests if isinstance(entry, dict)]
                if any({"t", "in", "out", "hash_ids"} <= entry.keys() for entry in entries):
                    return 6
        return 0

    def read(self, documents: Iterator[Document], found: Gathered) -> None:
        numbers = itertools.count()
        everybody = _Names(numbers)
        for document in documents:
            for line, data in _objects(document.source):
                place = f"{document.name} line {line}"
                record: dict[str, Any] = {}
                try:
                    record = json_object(data)
                    reader = _Reader(record, found, document.name, numbers, everybody)
                except RowError as error:
                    _skip_all(found, error, place, record)
                else:
                    reader.run(record["requests"])


def _skip_all(found: Gathered, error: RowError, place: str, record: dict[str, Any]) -> None:
    """Every request of an object that cannot be used; the object itself where it lists none."""
    requests = record.get("requests")
    for _ in range(max(1, len(requests)) if isinstance(requests, list) else 1):
        found.num_rows += 1
        found.skip(found.num_rows, error, place)


def _objects(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """JSON objects, one a line; or the whole, where the first line is only the start of one."""
    lines = text_lines(source)
    for number, line in lines:
        if line.strip() in (b"{", b"["):
            yield number, b"\n".join([line, *(rest for _, rest in lines)])
        else:
            yield number, line


class _Call(NamedTuple):
    """A request as the file gives it, times in ns on the clock of its list."""

    time_ns: int
    api_ns: int | None
    think_ns: int | None
    prompt_tokens: int
    output_tokens: int
    content: HashedContent

    @property
    def end_ns(self) -> int:
        return self.time_ns + (self.api_ns or 0)


class _Awaited(NamedTuple):
    """What the next request of a list waits for."""

    turn: int
    end_ns: int
    """Recorded, on the list's clock."""


@dataclass(slots=True)
class _Chain:
    """A list of requests, the session's or a sub-agent's, as far as it has been read."""

    agent: str
    """Before the position in the list, the name of a request in its session."""
    now_ns: int
    """Recorded end of the last request, on the list's clock; before the first, its start."""
    after: tuple[int, ...]
    delay_ns: int = 0
    """From the end of ``after`` to the start of the list."""
    starts_early: bool = False
    """Whether it started before that end."""
    last: _Call | None = None
    has_gap: bool = False
    """Whether requests were skipped since the last one."""
    children: list[_Awaited] = field(default_factory=list)


class _Reader:
    """One session. Raises `RowError` where nothing can be made of it."""

    def __init__(
        self,
        record: dict[str, Any],
        found: Gathered,
        document: str,
        numbers: Iterator[int],
        everybody: _Names,
    ) -> None:
        self._id = label(record.get("id"), "id")
        self._block_size = whole(record.get("block_size"), "block_size", least=1)
        if not isinstance(record.get("requests"), list):
            raise RowError("requests is not a list", shown(record.get("requests")))
        scope = record.get("hash_id_scope")
        if scope not in (None, "local", "global"):
            raise RowError("hash_id_scope is neither local nor global", shown(scope))
        if scope is None:
            found.noted[_NO_SCOPE] += 1
        if scope != "global":
            found.noted[_LOCAL] += 1
        self._names = everybody if scope == "global" else _Names(numbers)
        self._found, self._document = found, document
        self._turns: list[Turn] = []
        self._lines: list[int] = []

    def run(self, requests: list[Any]) -> None:
        self._read(requests, _Chain(agent="", now_ns=0, after=()), 0)
        if self._turns:
            session = Session(id=self._id, turns=tuple(self._turns))
            self._found.add(session, self._lines, self._document)

    def _read(self, entries: list[Any], chain: _Chain, depth: int) -> None:
        for number, entry in enumerate(entries):
            try:
                if not isinstance(entry, dict):
                    raise RowError("not a JSON object", shown(entry))
                if entry.get("type") == "subagent":
                    self._sub_agent(entry, number, chain, depth)
                    continue
                call = self._call(entry)
            except RowError as error:
                place = f"{self._document}: {self._id}/{chain.agent}{number}"
                _skip_all(self._found, error, place, entry if isinstance(entry, dict) else {})
                chain.has_gap = True
                continue
            self._found.num_rows += 1
            self._add(call, number, chain)

    def _call(self, entry: dict[str, Any]) -> _Call:
        given = {key: value for key, value in entry.items() if value is not None}
        missing = [key for key in ("t", "in", "out", "hash_ids") if key not in given]
        if missing:
            raise RowError(f"{', '.join(missing)} missing")
        if given.get("type") not in ("n", "s", None):
            raise RowError("type is none of n, s, subagent", shown(given["type"]))
        prompt_tokens = tokens(given["in"], "in")
        ids = [self._names[hash_id] for hash_id in int64_list(given["hash_ids"], "hash_ids")]
        return _Call(
            time_ns=time_ns(given["t"], "t", SECONDS),
            api_ns=_optional_ns(given, "api_time", SECONDS),
            think_ns=_optional_ns(given, "think_time", SECONDS),
            prompt_tokens=prompt_tokens,
            output_tokens=tokens(given["out"], "out"),
            content=hashed(ids, self._block_size, prompt_tokens, may_round_down=True),
        )

    def _add(self, call: _Call, number: int, chain: _Chain) -> None:
        wait_ns = call.time_ns - max([chain.now_ns, *(c.end_ns for c in chain.children)])
        if chain.last is not None and not chain.children and not chain.has_gap:
            if chain.last.api_ns is None:
                self._found.noted[_NO_API_TIME] += 1
            elif call.think_ns is not None:
                wait_ns = call.think_ns
        if wait_ns < 0:
            self._found.noted[_EARLY] += 1
        self._turns.append(
            Turn(
                request=Request(
                    id=f"{self._id}/{chain.agent}{number}",
                    num_prompt_tokens=call.prompt_tokens,
                    content=call.content,
                    session_id=self._id,
                ),
                output_tokens=call.output_tokens,
                after=(*chain.after, *(child.turn for child in chain.children)),
                think_ns=chain.delay_ns + max(0, wait_ns),
                # Sub-agents apart: what was sent before that answer was there cannot hold it.
                holds_answer=call.time_ns >= chain.now_ns
                and not (chain.last is None and chain.starts_early),
            )
        )
        self._lines.append(self._found.num_rows)
        chain.after, chain.delay_ns, chain.children = (len(self._turns) - 1,), 0, []
        chain.last, chain.now_ns, chain.has_gap = call, call.end_ns, False

    def _sub_agent(self, entry: dict[str, Any], number: int, parent: _Chain, depth: int) -> None:
        requests = entry.get("requests")
        if not isinstance(requests, list):
            raise RowError("requests of a sub-agent is not a list", shown(requests))
        if depth == _MOST_NESTED:
            raise RowError("sub-agents nested too deep", f"more than {_MOST_NESTED}")
        marker_ns = time_ns(entry.get("t"), "t", SECONDS)
        duration_ns = _optional_ns(entry, "duration_ms", MILLISECONDS)
        first_ns = next(
            (
                time_ns(inner["t"], "t", SECONDS)
                for inner in requests
                if isinstance(inner, dict) and inner.get("t") is not None
            ),
            0,
        )
        sent_ns = 0 if parent.last is None else parent.last.time_ns
        start_ns = marker_ns
        if first_ns > 0:
            start_ns = first_ns
        elif duration_ns is not None and marker_ns - duration_ns >= sent_ns:
            start_ns = marker_ns - duration_ns
        agent = label(entry.get("agent_id"), "agent_id")
        child = _Chain(
            agent=f"{parent.agent}{number}.{agent}.",
            now_ns=first_ns,
            after=parent.after,
            delay_ns=parent.delay_ns + max(0, start_ns - parent.now_ns),
            starts_early=start_ns < parent.now_ns,
        )
        self._read(requests, child, depth + 1)
        if child.last is not None and entry.get("status") != "async_launched":
            lasted_ns = child.now_ns - first_ns if duration_ns is None else duration_ns
            parent.children.append(_Awaited(child.after[0], start_ns + lasted_ns))


def _optional_ns(entry: dict[str, Any], key: str, exponent: int) -> int | None:
    value = entry.get(key)
    return None if value is None else time_ns(value, key, exponent)
