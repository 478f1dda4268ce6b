"""OpenTelemetry spans of model calls: OTLP JSON, and dumps with plain attributes.

https://github.com/open-telemetry/semantic-conventions (GenAI, in development) with its deprecated
names, the span of vLLM's own server, and OpenInference. ``input_tokens`` includes cached tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from traces.formats.base import Row, RowError, label, shown, to_number
from traces.formats.documents import (
    RecordsFormat,
    at,
    count,
    first,
    label_or_none,
    moment_ns,
    numeric,
)

_PROMPT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
_OUTPUT = (
    "gen_ai.usage.output_tokens",
    "gen_ai.usage.completion_tokens",
    "llm.token_count.completion",
)
_MODEL_CALLS = (None, "chat", "text_completion", "generate_content")
"""Values of gen_ai.operation.name; agents and tools carry sums of the calls below them."""
_FAILED = (2, "2", "STATUS_CODE_ERROR", "ERROR")


class OtelSpans(RecordsFormat):
    """One row a model call: a span with token counts, at its start."""

    name = "otel"
    counted_as = "span"
    assumes = "Cached tokens are taken to be in the input tokens, as the conventions say."
    recognised_by = "OTLP JSON (resourceSpans) or spans with start_time and attributes"
    units = "Unix ns or date and time (no zone: UTC), tokens (cached ones included)"
    licence = "whoever runs the service"
    signatures = (
        frozenset({"resourceSpans"}),
        frozenset({"resource_spans"}),
        frozenset({"span_id", "start_time", "attributes"}),
    )

    def entries(self, document: object) -> Iterator[object]:
        spans = list(_spans(document))
        by_id = {
            key: span
            for span in spans
            if isinstance(span, dict) and isinstance(key := first(span, "spanId", "span_id"), str)
        }
        for span in spans:
            if not isinstance(span, dict):
                yield span
                continue
            parent = first(span, "parentSpanId", "parent_span_id")
            yield {"span": span, "parent": by_id.get(parent) if isinstance(parent, str) else None}

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        span, parent = record["span"], record["parent"]
        attributes = _attributes(span)
        if (other := _other_kind(attributes)) is not None:
            raise RowError("not a model call", shown(other))
        if attributes.get("error.type") is not None or at(span, "status", "code") in _FAILED:
            raise RowError("failed", shown(attributes.get("error.type") or at(span, "status")))
        usage = _usage(attributes)
        if None in usage:
            raise RowError("span without token counts", shown(span.get("name")))
        if parent is not None and _is_same_call(usage, _attributes(parent)):
            raise RowError("the same call as its parent span")
        if (choices := attributes.get("gen_ai.request.choice.count")) not in (None, 1):
            raise RowError("several choices: the tokens of each are not told", shown(choices))
        limit = attributes.get("gen_ai.request.max_tokens")
        session = first(attributes, "gen_ai.conversation.id", "session.id")
        trace, own = first(span, "traceId", "trace_id"), first(span, "spanId", "span_id")
        return Row(
            line=line,
            arrival_ns=_start_ns(span),
            prompt_tokens=count(usage[0], "input_tokens"),
            output_tokens=count(usage[1], "output_tokens"),
            id=None if trace is None or own is None else label(f"{trace}:{own}", "span_id"),
            max_tokens=None if limit is None else count(limit, "max_tokens"),
            session_id=label_or_none(session, "conversation.id"),
        )


def _other_kind(attributes: dict[str, Any]) -> object:
    """What a span is, where it says that it is no call of a model."""
    operation = attributes.get("gen_ai.operation.name")
    kind = attributes.get("openinference.span.kind")
    if operation not in _MODEL_CALLS:
        return operation
    return None if kind == "LLM" else kind


def _is_same_call(usage: tuple[Any, Any], parent: dict[str, Any]) -> bool:
    """A client, a gateway and a server each write a span for one call; an agent's span is none."""
    return usage == _usage(parent) and _other_kind(parent) is None


def _spans(document: object) -> Iterator[object]:
    """Spans of any of the three shapes; a `RowError` for a part that is not what it should be."""
    for names in (("resourceSpans", "scopeSpans"), ("resource_spans", "scope_spans")):
        if isinstance(document, dict) and names[0] in document:
            for resource in _list(document, names[0]):
                for scope in _list(resource, names[1]):
                    yield from _list(scope, "spans")
            return
    if isinstance(document, dict) and "spans" in document:
        yield from _list(document, "spans")
    elif isinstance(document, list):
        for part in document:
            # A list of dumps; lists in it are no spans, and are not looked into for more.
            yield from _list(part, "spans") if at(part, "spans") is not None else [part]
    else:
        yield document


def _list(value: object, name: str) -> list[object]:
    if isinstance(value, RowError):
        return [value]
    found = at(value, name)
    return found if isinstance(found, list) else [RowError(f"{name} is not a list", shown(found))]


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    """Attributes by name: plain, or unwrapped from OTLP's ``{"key", "value": {"intValue"}}``."""
    attributes = span.get("attributes")
    if isinstance(attributes, dict):
        return attributes
    if not isinstance(attributes, list):
        return {}
    return {
        pair["key"]: _unwrapped(pair.get("value"))
        for pair in attributes
        if isinstance(pair, dict) and isinstance(pair.get("key"), str)
    }


def _unwrapped(value: object) -> object:
    if isinstance(text := at(value, "intValue"), str):  # int64 is text in OTLP
        try:
            return to_number(text)
        except RowError:
            return text
    return (
        first(value, "intValue", "doubleValue", "stringValue") if isinstance(value, dict) else None
    )


def _usage(attributes: dict[str, Any]) -> tuple[Any, Any]:
    return first(attributes, *_PROMPT), first(attributes, *_OUTPUT)


def _start_ns(span: dict[str, Any]) -> int:
    start = first(span, "startTimeUnixNano", "start_time_unix_nano")
    if start is not None:
        return moment_ns(numeric(start, "startTimeUnixNano"), "startTimeUnixNano", 0)
    start = first(span, "start_time", "startTime")
    if start is None:
        raise RowError("no arrival time: no start of the span")
    if not isinstance(start, str) or ":" not in start:  # seconds, ms, ns: nothing tells
        raise RowError("start_time is not a date and time", shown(start))
    return moment_ns(start, "start_time")
