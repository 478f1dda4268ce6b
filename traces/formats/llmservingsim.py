"""LLMServingSim workloads: requests, and agent sessions of ``sub_requests`` in the same file.

https://github.com/casys-kaist/LLMServingSim, workloads/README.md. The ordinary reader takes the
requests; with `traces.session_files.read_sessions` the sessions are read as well, and a request is a
session of one turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from blockmanager.content import TokenContent
from scheduler.request import Request
from traces.formats.base import (
    Head,
    JsonLinesFormat,
    Row,
    RowError,
    int64_list,
    json_object,
    label,
    shown,
    text_lines,
    time_ns,
    tokens,
)
from traces.formats.session_base import Document, Gathered, SessionFormat
from traces.sessions import Session, Turn

_NANOSECONDS = 0
_PLAIN = frozenset({"input_toks", "output_toks", "arrival_time_ns"})
_AGENTIC = frozenset({"arrival_time_ns", "sub_requests"})


class LLMServingSim(JsonLinesFormat):
    """``input_toks``, ``output_toks``, ``arrival_time_ns`` and perhaps ``input_tok_ids``."""

    name = "llmservingsim"
    recognised_by = "JSON lines with input_toks, output_toks, arrival_time_ns"
    units = "nanoseconds, tokens"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    prefix_identity = "input_tok_ids where a row has them"
    licence = "MIT (the repository of the public files)"
    required = frozenset({"arrival_time_ns"})  # an agent session has no more in common with a row
    optional = frozenset(
        {
            "input_toks",
            "output_toks",
            "input_tok_ids",
            "output_tok_ids",
            "session_id",
            "sub_requests",
        }
    )
    signature = _PLAIN

    def match(self, head: Head) -> int:
        agentic = any(record.keys() >= _AGENTIC for record in head.records)
        return super().match(head) or (len(_AGENTIC) if agentic else 0)

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        if "sub_requests" in record:
            raise RowError("an agent session: read the file as sessions")
        prompt_tokens, output_tokens, content = _lengths(record)
        return Row(
            line=line,
            arrival_ns=time_ns(record["arrival_time_ns"], "arrival_time_ns", _NANOSECONDS),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            content=content,
        )


def _lengths(record: dict[str, Any]) -> tuple[int, int, TokenContent | None]:
    missing = [key for key in ("input_toks", "output_toks") if record.get(key) is None]
    if missing:
        raise RowError(f"{', '.join(missing)} missing")
    prompt_tokens = tokens(record["input_toks"], "input_toks")
    content = None
    if record.get("input_tok_ids") is not None:
        token_ids = int64_list(record["input_tok_ids"], "input_tok_ids")
        if len(token_ids) != prompt_tokens:
            raise RowError(
                "input_tok_ids do not match input_toks",
                f"{len(token_ids)} ids for {prompt_tokens} tokens",
            )
        content = TokenContent.of(token_ids)
    return prompt_tokens, tokens(record["output_toks"], "output_toks"), content


class LLMServingSimSessions(SessionFormat):
    """``session_id``, ``arrival_time_ns``, ``sub_requests``: a chain, with a tool after each call."""

    name = "llmservingsim-sessions"
    recognised_by = "JSON lines with arrival_time_ns, sub_requests"
    units = "nanoseconds, tokens"
    clock: ClassVar[Literal["relative", "absolute", "none"]] = "relative"
    prefix_identity = "input_tok_ids where a call has them"
    licence = "MIT (the repository of the public files)"

    def match(self, head: Head) -> int:
        return 3 if any(record.keys() >= _AGENTIC for record in head.records) else 0

    def read(self, documents: Iterator[Document], found: Gathered) -> None:
        for document in documents:
            for line, data in text_lines(document.source):
                record: dict[str, Any] = {}
                try:
                    record = json_object(data)
                    _session(document, line, record, found)
                except RowError as error:
                    for _ in range(_num_calls(record)):
                        found.num_rows += 1
                        found.skip(line, error, document.name)


def _num_calls(record: dict[str, Any]) -> int:
    calls = record.get("sub_requests")
    return max(1, len(calls)) if isinstance(calls, list) else 1


def _session(document: Document, line: int, record: dict[str, Any], found: Gathered) -> None:
    """Raises `RowError` where nothing can be made of the line."""
    if record.get("arrival_time_ns") is None:
        raise RowError("arrival_time_ns missing")
    start_ns = time_ns(record["arrival_time_ns"], "arrival_time_ns", _NANOSECONDS)
    calls, name = [record], f"{document.name}:{line}"
    if "sub_requests" in record:
        calls = record["sub_requests"]
        if not isinstance(calls, list) or not calls:
            raise RowError("sub_requests is not a list of calls", shown(calls))
        name = label(record.get("session_id"), "session_id")
    turns: list[Turn] = []
    wait_ns = 0
    for number, call in enumerate(calls):
        found.num_rows += 1
        try:
            if not isinstance(call, dict):
                raise RowError("not a JSON object", shown(call))
            tool_ns = 0  # nothing follows the last call, so it may lack one
            if call.get("tool_duration_ns") is not None:
                tool_ns = time_ns(call["tool_duration_ns"], "tool_duration_ns", _NANOSECONDS)
            elif number < len(calls) - 1:
                raise RowError("tool_duration_ns missing")
            prompt_tokens, output_tokens, content = _lengths(call)
        except RowError as error:
            found.skip(line, error, f"{document.name}: call {number} of {name}")
            continue
        turns.append(
            Turn(
                request=Request(
                    id=f"{name}/{number}",
                    num_prompt_tokens=prompt_tokens,
                    content=content,
                    session_id=name,
                ),
                output_tokens=output_tokens,
                after=(len(turns) - 1,) if turns else (),
                think_ns=wait_ns if turns else 0,
            )
        )
        wait_ns = tool_ns
    if turns:
        found.add(Session(id=name, turns=tuple(turns), start_ns=start_ns), [line] * len(turns))
