"""SageMaker Data Capture: requests and responses of an endpoint, as they were.

https://docs.aws.amazon.com/sagemaker, "Data capture". ``inferenceTime`` has whole seconds. Only a
response that reports its usage (as OpenAI-compatible containers do) tells token counts.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from scheduler.request import MAX_N
from traces.formats.base import Row, RowError, json_object, shown, whole
from traces.formats.documents import RecordsFormat, at, count, first, label_or_none, moment_ns


class SageMaker(RecordsFormat):
    """``captureData`` with JSON or BASE64 bodies, and ``eventMetadata``."""

    name = "sagemaker"
    recognised_by = "JSON lines with captureData and eventMetadata"
    counted_as = "line"
    assumes = "inferenceTime, in whole seconds, is taken for the arrival."
    units = "date and time in whole seconds, tokens (usage of the response, cached ones included)"
    licence = "whoever runs the endpoint"
    signatures = (frozenset({"captureData", "eventMetadata", "endpointOutput"}),)

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        if (time := at(record, "eventMetadata", "inferenceTime")) is None:
            raise RowError("no arrival time: no inferenceTime")
        usage = _usage(_body(record, "endpointOutput"))
        asked = _request(record)
        n = whole(asked.get("n", 1), "n", least=1, most=MAX_N)
        if n > 1:
            raise RowError("several choices: the tokens of each are not told", f"n {n}")
        limit = first(asked, "max_completion_tokens", "max_tokens")
        return Row(
            line=line,
            arrival_ns=moment_ns(time, "inferenceTime"),
            prompt_tokens=count(usage.get("prompt_tokens"), "prompt_tokens"),
            output_tokens=count(usage.get("completion_tokens"), "completion_tokens"),
            id=label_or_none(at(record, "eventMetadata", "eventId"), "eventId"),
            max_tokens=None if limit is None else count(limit, "max_tokens"),
        )


def _body(record: dict[str, Any], side: str) -> bytes:
    captured = at(record, "captureData", side)
    data, encoding = at(captured, "data"), at(captured, "encoding")
    if not isinstance(data, str):
        raise RowError(f"no data in {side}")
    text = data.encode(errors="surrogatepass")
    if encoding != "BASE64":
        return text
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise RowError(f"data of {side} is not BASE64", shown(data)) from None


def _usage(body: bytes) -> dict[str, Any]:
    """Usage of a response, or of the last event of a streamed one that reports any."""
    events = [line[5:] for line in body.splitlines() if line.startswith(b"data:")]
    for event in reversed(events or [body]):
        if event.strip() == b"[DONE]":
            continue
        try:
            usage = json_object(event).get("usage")
        except RowError:
            if events:
                continue
            raise RowError("the response is not JSON") from None
        if isinstance(usage, dict):
            return usage
    raise RowError("no usage in the response: token counts unknown")


def _request(record: dict[str, Any]) -> dict[str, Any]:
    """What was asked for, as far as it was captured as JSON; only limits are taken from it."""
    try:
        asked = json_object(_body(record, "endpointInput"))
    except RowError:
        return {}
    return {key: value for key, value in asked.items() if value is not None}
