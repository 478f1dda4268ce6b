"""Request traces of NVIDIA Dynamo: one JSON event a line, written when a request has ended.

https://github.com/ai-dynamo/dynamo, docs/observability/request-tracing.md. The trace is best
effort: events can be lost, and requests with several choices or images are not in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blockmanager.content import HashedContent
from traces.formats.base import MILLISECONDS, NO_REMARKS, Head, Row, RowError, shown, whole
from traces.formats.documents import (
    DERIVED_START,
    RecordsFormat,
    at,
    count,
    first,
    label_or_none,
    moment_ns,
    started_ns,
)
from traces.formats.native import hashed

_SCHEMA = "dynamo.request.trace.v1"
_UINT64 = 2**64


class Dynamo(RecordsFormat):
    """``request_end`` events; tool and payload events are not requests."""

    name = "dynamo"
    recognised_by = f'JSON lines with "schema": "{_SCHEMA}"'
    counted_as = "line"
    clock_zero = "its times are Unix times"
    units = "Unix milliseconds at which requests came, tokens"
    prefix_identity = (
        "replay.input_sequence_hashes of trace_block_size tokens, global (rounded up or down)"
    )
    licence = "whoever runs the service"
    signatures = (frozenset({"schema", "event_type"}),)

    def match(self, head: Head) -> int:
        # The value of `schema` is proof beyond its name.
        return 9 if any(record.get("schema") == _SCHEMA for record in head.records) else 0

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        if (schema := record.get("schema")) != _SCHEMA:
            raise RowError(f"schema is not {_SCHEMA}", shown(schema))
        if (event := record.get("event_type")) != "request_end":
            raise RowError("not the end of a request", f"event_type {shown(event)}")
        request = record.get("request")
        if not isinstance(request, dict):
            raise RowError("request missing")
        start, end, lasted = (
            None if value is None else moment_ns(value, name, MILLISECONDS)
            for name, value in (
                ("request_received_ms", request.get("request_received_ms")),
                ("event_time_unix_ms", record.get("event_time_unix_ms")),
                ("total_time_ms", request.get("total_time_ms")),
            )
        )
        prompt = at(request, "replay", "input_length")
        prompt_tokens = count(
            request.get("input_tokens") if prompt is None else prompt, "input_length"
        )
        context = record.get("agent_context")
        session = (
            first(context, "trajectory_id", "session_id") if isinstance(context, dict) else None
        )
        return Row(
            line=line,
            arrival_ns=started_ns(start, end, lasted, "no request_received_ms or total_time_ms"),
            prompt_tokens=prompt_tokens,
            output_tokens=count(request.get("output_tokens"), "output_tokens"),
            id=label_or_none(request.get("request_id"), "request_id"),
            content=_content(request, prompt_tokens),
            session_id=label_or_none(session, "trajectory_id"),
            remarks=DERIVED_START if start is None else NO_REMARKS,
        )


def _content(request: dict[str, Any], prompt_tokens: int) -> HashedContent | None:
    hashes = at(request, "replay", "input_sequence_hashes")
    if hashes is None:
        return None
    if not isinstance(hashes, list):
        raise RowError("input_sequence_hashes is not a list", shown(hashes))
    for value in hashes:
        if type(value) is not int or not 0 <= value < _UINT64:
            raise RowError("input_sequence_hashes holds no unsigned 64-bit integer", shown(value))
    size = whole(at(request, "replay", "trace_block_size"), "trace_block_size", least=1)
    # Ids are only compared, so the same 64 bits may be read as signed.
    signed = np.array(hashes, dtype=np.uint64).view(np.int64).tolist()
    return hashed(signed, size, prompt_tokens, may_round_down=True)
