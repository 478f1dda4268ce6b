"""Logs of gateways and of tracing services: LiteLLM, Langfuse, Helicone.

What a gateway answered from its own cache never reached an engine and is left out; calls that
failed are left out too. No zone in a time means UTC.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from traces.formats.base import MILLISECONDS, NO_REMARKS, SECONDS, Row, RowError, shown, whole
from traces.formats.documents import (
    DERIVED_START,
    RecordsFormat,
    at,
    count,
    first,
    label_or_none,
    moment_ns,
    numeric,
    started_ns,
    table,
)

_OURS = "whoever runs the service"
_NO_TOTAL = frozenset({"The parts of usageDetails are taken to be disjoint, as no total says"})
_CACHED_IN = frozenset({"Cached tokens are in the input of usageDetails, by its total"})
_NO_UUID = "00000000-0000-0000-0000-000000000000"


class LiteLlm(RecordsFormat):
    """LiteLLM spend logs (dates) and its logging payload (Unix seconds).

    https://github.com/BerriAI/litellm, schema.prisma (LiteLLM_SpendLogs), StandardLoggingPayload.
    ``prompt_tokens`` includes cached tokens. Failed calls carry zero tokens.
    """

    name = "litellm"
    recognised_by = (
        "CSV, JSON or JSON lines with startTime, call_type, prompt_tokens, completion_tokens"
    )
    units = "date and time (no zone: UTC) or Unix seconds, tokens (cached ones included)"
    licence = _OURS
    signatures = (
        frozenset({"call_type", "startTime", "prompt_tokens", "completion_tokens"}),
        frozenset({"request_id", "startTime", "prompt_tokens", "completion_tokens"}),
    )
    has_csv = True

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        if (status := first(record, "status")) not in (None, "success"):
            raise RowError("failed", shown(status))
        # A boolean in the payload, its text in the database ("None" where there is no cache).
        if str(first(record, "cache_hit")).lower() == "true":
            raise RowError("answered from the gateway's cache")
        start, end, lasted = (
            None if (value := first(record, key)) is None else moment_ns(value, key, exponent)
            for key, exponent in (
                ("startTime", SECONDS),
                ("endTime", SECONDS),
                ("request_duration_ms", MILLISECONDS),
            )
        )
        return Row(
            line=line,
            arrival_ns=started_ns(start, end, lasted, "no startTime, and no endTime and duration"),
            prompt_tokens=count(first(record, "prompt_tokens"), "prompt_tokens"),
            output_tokens=count(first(record, "completion_tokens"), "completion_tokens"),
            id=label_or_none(first(record, "request_id", "id"), "request_id"),
            session_id=label_or_none(first(record, "session_id"), "session_id"),
            remarks=DERIVED_START if start is None else NO_REMARKS,
        )


class Langfuse(RecordsFormat):
    """Langfuse observations, from its API, its exports to a bucket or its tables.

    https://langfuse.com/docs/api-and-data-platform. Names come in camelCase or snake_case. Only
    generations count: the spans around them repeat their usage.
    """

    name = "langfuse"
    recognised_by = "CSV, JSON or JSON lines of observations with type, startTime, usageDetails"
    units = "date and time (no zone: UTC), tokens (cached ones included)"
    licence = _OURS
    signatures = tuple(
        frozenset(names)
        for names in (
            {"traceId", "type", "startTime", "usageDetails"},
            {"traceId", "type", "startTime", "completionStartTime"},
            {"traceId", "type", "startTime", "inputUsage", "outputUsage"},
            {"trace_id", "type", "start_time", "usage_details"},
            {"trace_id", "type", "start_time", "completion_start_time"},
        )
    )
    has_csv = True

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        record = {_snake(key): value for key, value in record.items()}
        kind = first(record, "type")
        if kind != "GENERATION":
            raise RowError("not a generation", f"type {shown(kind)}")
        if first(record, "level") == "ERROR":
            raise RowError("failed", "level ERROR")
        if (start := first(record, "start_time")) is None:
            raise RowError("no arrival time: no startTime")
        usage = _langfuse_usage(record)
        return Row(
            line=line,
            arrival_ns=moment_ns(start, "startTime"),
            prompt_tokens=count(usage.prompt, "input usage"),
            output_tokens=count(usage.output, "output usage"),
            id=label_or_none(first(record, "id"), "id"),
            session_id=label_or_none(first(record, "session_id"), "sessionId"),
            remarks=usage.remarks,
        )


@lru_cache(maxsize=256)
def _snake(key: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()


class _Usage(NamedTuple):
    prompt: Any
    output: Any
    remarks: frozenset[str] = NO_REMARKS


def _langfuse_usage(record: dict[str, Any]) -> _Usage:
    """Prompt and output tokens. Raises `RowError`.

    A usage map has free keys. Its parts are meant to be disjoint and to add up to ``total``, yet
    integrations also send ``input`` with the cached tokens in it: the total tells which it is.
    """
    unit = first(record, "unit") or at(record.get("usage"), "unit")
    if unit not in (None, "TOKENS"):
        raise RowError("usage is not in tokens", shown(unit))
    details = first(record, "usage_details")
    parts = {
        key: whole(numeric(value, "usageDetails"), "usageDetails")
        for key, value in table(details or {}, "usageDetails").items()
        if value is not None
    }
    if not parts:
        return _Usage(
            first(record, "input_usage", "prompt_tokens"),
            first(record, "output_usage", "completion_tokens"),
        )
    total = parts.pop("total", None)
    outputs = {key for key in parts if re.search("output|completion|reasoning", key)}
    prompts = {key for key in parts.keys() - outputs if re.search("input|prompt|cache", key)}
    prompt = sum(parts[key] for key in prompts)
    output = sum(parts[key] for key in outputs)
    if total is None or prompt + output == total:
        return _Usage(prompt, output, NO_REMARKS if total is not None else _NO_TOTAL)
    if parts.get("input", 0) + parts.get("output", 0) == total:
        return _Usage(parts.get("input"), parts.get("output"), _CACHED_IN)
    raise RowError("usageDetails do not add up to their total", shown(details))


class Helicone(RecordsFormat):
    """Helicone requests, from its export tool, its API or its query language.

    https://docs.helicone.ai/tools/export. Cached and reasoning tokens are columns of their own,
    which its costs add to ``prompt_tokens`` and ``completion_tokens``; so they are added here.
    """

    name = "helicone"
    recognised_by = (
        "CSV, JSON or JSON lines with request_created_at, prompt_tokens, completion_tokens"
    )
    units = "date and time (no zone: UTC), tokens (cached and reasoning ones are added)"
    assumes = (
        "prompt_tokens and completion_tokens are taken without the cached and the reasoning tokens "
        "in columns of their own, which are added."
    )
    licence = _OURS
    signatures = (frozenset({"request_created_at", "prompt_tokens", "completion_tokens"}),)
    has_csv = True

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        status = first(record, "response_status", "status")
        if status is not None and str(status) not in ("200", "success"):
            raise RowError("failed", f"status {shown(status)}")
        if first(record, "cache_reference_id") not in (None, _NO_UUID):
            raise RowError("answered from the gateway's cache")
        start, end, lasted = (
            None if (value := first(record, *keys)) is None else moment_ns(value, keys[0], exponent)
            for keys, exponent in (
                (("request_created_at",), SECONDS),
                (("response_created_at",), SECONDS),
                (("delay_ms", "latency"), MILLISECONDS),
            )
        )
        properties = first(record, "properties", "request_properties")
        session = None
        if properties is not None:
            session = table(properties, "properties").get("Helicone-Session-Id")
        return Row(
            line=line,
            arrival_ns=started_ns(
                start, end, lasted, "no request_created_at, and no response_created_at and delay_ms"
            ),
            prompt_tokens=_added(
                record, "prompt_tokens", "prompt_cache_read_tokens", "prompt_cache_write_tokens"
            ),
            output_tokens=_added(record, "completion_tokens", "reasoning_tokens"),
            id=label_or_none(first(record, "request_id"), "request_id"),
            session_id=label_or_none(session, "Helicone-Session-Id"),
            remarks=DERIVED_START if start is None else NO_REMARKS,
        )


def _added(record: dict[str, Any], name: str, *more: str) -> int:
    if first(record, name) is None:
        raise RowError(f"{name} missing")
    values = {key: first(record, key) for key in (name, *more)}
    total = sum(
        whole(numeric(value, key), key) for key, value in values.items() if value is not None
    )
    return count(total, name)
