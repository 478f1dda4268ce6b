"""TraceLab: rounds of coding agents, as recorded (JSON lines) or made ready for a replay (CSV).

https://github.com/uw-syfi/TraceLab, replay/README.md. A round is sent when its last input (a user's
message, a tool's result) was there, and the server's part ends with its last output, so the think
time of a round is from the last output before it to its last input: people and tools both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple

from scheduler.request import Request
from traces.formats.azure import timestamp_ns
from traces.formats.base import (
    MILLISECONDS,
    Head,
    RowError,
    TraceError,
    csv_fields,
    json_object,
    label,
    shown,
    text_lines,
    time_ns,
    to_number,
    tokens,
    whole,
)
from traces.formats.session_base import Document, Gathered, SessionFormat
from traces.sessions import Session, Turn

_ROUND = frozenset(
    {
        "session_id",
        "round_index",
        "input_tokens_total",
        "prefix_tokens",
        "newly_append_tokens",
        "output_tokens",
    }
)

_FIRST_PREFIX = (
    "First rounds with a prefix, nothing saying with whom they share it: taken as the session's own"
)
_LONG_PREFIX = "Rounds whose prefix is longer than the context before them: the excess is new"
_NO_TIMES = "Rounds whose inputs or the outputs before them have no time, sent at once"
_EARLY = "Rounds whose input was there before the last output, sent at once"
_LOWER_BOUND = (
    "prefix_tokens is what the provider's cache held, the least that prompts share: after a miss "
    "there, prompts are taken to differ."
)


class _Round(NamedTuple):
    line: int
    prefix_tokens: int
    new_tokens: int
    output_tokens: int
    sent_ns: int | None
    """When its last input was there, on the file's clock; of a replay, when its session arrives."""
    ended_ns: int | None = None
    """When its last output came."""
    wait_after_ns: int | None = None
    """From its answer to the next round, where the file says it itself."""


_Rounds = dict[str, dict[int, _Round]]
"""By session and number, sessions in the order in which they come."""


def _put(rounds: _Rounds, session_id: str, index: int, row: _Round) -> None:
    """Raises `RowError` for the second of two rounds with the same number."""
    if index in rounds.setdefault(session_id, {}):
        raise RowError("duplicate round", f"{index} of session {session_id!r}")
    rounds[session_id][index] = row


def _add_sessions(rounds: _Rounds, found: Gathered) -> None:
    for session_id, by_index in rounds.items():
        turns: list[Turn] = []
        before: _Round | None = None
        for index, row in sorted(by_index.items()):
            context = 0 if before is None else _context(before)
            if row.prefix_tokens > context:
                found.noted[_FIRST_PREFIX if before is None else _LONG_PREFIX] += 1
            turns.append(
                Turn(
                    request=Request(
                        id=f"{session_id}/{index}",
                        num_prompt_tokens=row.prefix_tokens + row.new_tokens,
                        session_id=session_id,
                    ),
                    output_tokens=row.output_tokens,
                    after=(len(turns) - 1,) if turns else (),
                    think_ns=0 if before is None else _think_ns(before, row, found),
                    kept_tokens=min(row.prefix_tokens, context),
                )
            )
            before = row
        if turns:
            first = by_index[min(by_index)]
            session = Session(id=session_id, turns=tuple(turns), start_ns=first.sent_ns)
            found.add(session, [row.line for row in by_index.values()])


def _context(row: _Round) -> int:
    return row.prefix_tokens + row.new_tokens + row.output_tokens


def _think_ns(before: _Round, row: _Round, found: Gathered) -> int:
    if before.wait_after_ns is not None:
        return before.wait_after_ns
    if before.ended_ns is None or row.sent_ns is None:
        found.noted[_NO_TIMES] += 1
        return 0
    if row.sent_ns < before.ended_ns:
        found.noted[_EARLY] += 1
    return max(0, row.sent_ns - before.ended_ns)


class TraceLab(SessionFormat):
    """``session_id``, ``round_index``, ``prefix_tokens``, ``timing_events`` and more, a line a round."""

    name = "tracelab"
    recognised_by = "JSON lines with session_id, round_index, prefix_tokens, newly_append_tokens"
    units = "dates of events (ISO 8601), tokens"
    clock: ClassVar[Literal["relative", "absolute", "none"]] = "absolute"
    prefix_identity = "prefix_tokens of the round before's prompt and answer"
    licence = "CC-BY-4.0 (the public data set)"

    def match(self, head: Head) -> int:
        return len(_ROUND) if any(record.keys() >= _ROUND for record in head.records) else 0

    def read(self, documents: Iterator[Document], found: Gathered) -> None:
        rounds: _Rounds = {}
        for document in documents:
            for line, data in text_lines(document.source):
                found.num_rows += 1
                try:
                    record = json_object(data)
                    index = whole(_given(record, "round_index"), "round_index")
                    session_id = label(_given(record, "session_id"), "session_id")
                    _put(rounds, session_id, index, _recorded(line, record))
                except RowError as error:
                    found.skip(line, error, document.name)
        _add_sessions(rounds, found)
        if rounds:
            found.noted[_LOWER_BOUND] += 1


def _given(record: dict[str, Any], key: str) -> Any:
    if record.get(key) is None:
        raise RowError(f"{key} missing")
    return record[key]


def _recorded(line: int, record: dict[str, Any]) -> _Round:
    total = tokens(_given(record, "input_tokens_total"), "input_tokens_total")
    prefix = whole(_given(record, "prefix_tokens"), "prefix_tokens")
    new = whole(_given(record, "newly_append_tokens"), "newly_append_tokens")
    if prefix + new != total:
        raise RowError(
            "prefix_tokens and newly_append_tokens are not the input", f"{prefix} + {new}, {total}"
        )
    events = record.get("timing_events")
    if events is not None and not isinstance(events, list):
        raise RowError("timing_events is not a list", shown(events))
    inputs: list[int] = []
    outputs: list[int] = []
    for event in events or ():
        if not isinstance(event, dict) or not isinstance(event.get("timestamp"), str):
            raise RowError("a timing event without timestamp", shown(event))
        times = inputs if event.get("event_type") in ("user_message", "tool_result") else outputs
        times.append(timestamp_ns(event["timestamp"], "timestamp"))
    return _Round(
        line=line,
        prefix_tokens=prefix,
        new_tokens=new,
        output_tokens=tokens(_given(record, "output_tokens"), "output_tokens"),
        sent_ns=max(inputs, default=None),
        ended_ns=max(outputs, default=None),
    )


class TraceLabReplay(SessionFormat):
    """``session_id``, ``round_idx``, ``prefix_len``, ``input_len``, ``output_len``,
    ``tool_wait_after_ms``; the prompt is prefix and input together."""

    name = "tracelab-replay"
    recognised_by = "CSV with round_idx, prefix_len, input_len, output_len, tool_wait_after_ms"
    units = "milliseconds, tokens"
    clock: ClassVar[Literal["relative", "absolute", "none"]] = "relative"
    prefix_identity = "prefix_len tokens of the round before's prompt and answer"
    licence = "Apache-2.0 (the repository of the public examples)"

    required = ("round_idx", "prefix_len", "input_len", "output_len", "tool_wait_after_ms")

    def match(self, head: Head) -> int:
        has_id = "session_id" in head.header or "id" in head.header
        return len(self.required) if has_id and set(self.required) <= set(head.header) else 0

    def read(self, documents: Iterator[Document], found: Gathered) -> None:
        rounds: _Rounds = {}
        for document in documents:
            lines = text_lines(document.source)
            header = Head([line for _, line in (next(lines, (0, b"")),)]).header
            if not self.match(Head([",".join(header).encode()])):
                raise TraceError(
                    f"{document.name}: its first line lacks columns of {self.name} "
                    f"({self.recognised_by}, session_id or id)"
                )
            for line, data in lines:
                found.num_rows += 1
                try:
                    values = csv_fields(data)
                    if len(values) != len(header):
                        raise RowError(
                            "not the header's number of fields",
                            f"{len(values)} fields under a header of {len(header)}",
                        )
                    fields = dict(zip(header, values, strict=True))
                    session_id = label(fields.get("session_id", fields.get("id")), "session_id")
                    index = whole(_number(fields, "round_idx"), "round_idx")
                    _put(rounds, session_id, index, _planned(line, fields))
                except RowError as error:
                    found.skip(line, error, document.name)
        _add_sessions(rounds, found)


def _number(fields: dict[str, str], name: str) -> object:
    try:
        return to_number(fields[name])
    except RowError as error:
        raise RowError(f"{name} is {error.reason}", error.detail) from None


def _planned(line: int, fields: dict[str, str]) -> _Round:
    arrival_ns = None
    if "arrival_time" in fields:
        arrival_ns = time_ns(_number(fields, "arrival_time"), "arrival_time", MILLISECONDS)
    prefix = whole(_number(fields, "prefix_len"), "prefix_len")
    new = whole(_number(fields, "input_len"), "input_len")
    if prefix + new == 0:
        raise RowError("prefix_len and input_len are zero")
    wait = _number(fields, "tool_wait_after_ms")
    return _Round(
        line=line,
        prefix_tokens=prefix,
        new_tokens=new,
        output_tokens=tokens(_number(fields, "output_len"), "output_len"),
        sent_ns=arrival_ns,
        wait_after_ns=time_ns(wait, "tool_wait_after_ms", MILLISECONDS),
    )
