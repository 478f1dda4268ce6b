"""Results that know how long requests were, but not when they came.

Each needs an arrival process (traces/arrivals.py). The order is that of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, ClassVar, Literal

from traces.formats.base import (
    NO_REMARKS,
    TEXT_PROMPT,
    BadRow,
    Head,
    JsonLinesFormat,
    Row,
    RowError,
    TraceFormat,
    json_object,
    json_value,
    label,
    shown,
    text_lines,
    tokens,
    whole,
)

_NOT_SAID_WHAT_WAS_CACHED = frozenset(
    {"No cache_n, as older builds have none: prompt_n may leave cached tokens out"}
)


class SglangBench(TraceFormat):
    """``sglang.bench_serving``: an object for each run, with arrays over its requests.

    https://github.com/sgl-project/sglang, docs on bench serving. A run without ``--output-details`` has no
    arrays.
    """

    name = "sglang-bench"
    recognised_by = "JSON lines with total_output_tokens_retokenized and input_lens, output_lens"
    units = "tokens; no arrivals"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    counted_as = "request"
    assumes = "The requests of all runs in the file are used, one run after another."
    prefix_identity = "none"
    licence = "whoever ran the benchmark"

    def match(self, head: Head) -> int:
        return 3 if any("total_output_tokens_retokenized" in r for r in head.records) else 0

    def rows(self, source: BinaryIO) -> Iterator[Row | BadRow]:
        number = 0
        for line, text in text_lines(source):
            try:
                run = json_object(text)
                arrays = [run.get(name) for name in ("input_lens", "output_lens")]
                inputs, outputs = ([] if array is None else array for array in arrays)
                if None in arrays:
                    raise RowError("a run without input_lens, output_lens (use --output-details)")
                if not (isinstance(inputs, list) and isinstance(outputs, list)):
                    raise RowError("input_lens or output_lens is not a list")
                if len(inputs) != len(outputs):
                    counts = f"{len(inputs)} and {len(outputs)}"
                    raise RowError("input_lens and output_lens are not of one length", counts)
            except RowError as error:
                number += 1
                yield BadRow(number, error.reason, f"{error.detail} in line {line}".strip())
                continue
            errors = run.get("errors")
            if not isinstance(errors, list) or len(errors) != len(inputs):
                errors = [None] * len(inputs)
            for prompt, output, failure in zip(inputs, outputs, errors, strict=True):
                number += 1
                try:
                    if failure:
                        raise RowError("failed request", shown(failure))
                    yield Row(
                        line=number,
                        arrival_ns=None,
                        prompt_tokens=tokens(prompt, "input_lens"),
                        output_tokens=tokens(output, "output_lens"),
                    )
                except RowError as error:
                    yield BadRow(number, error.reason, error.detail)


class Llmperf(TraceFormat):
    """llmperf's individual responses: one list of objects.

    https://github.com/ray-project/llmperf-leaderboard, raw_data/individual.
    """

    name = "llmperf"
    recognised_by = "a JSON list of objects with number_input_tokens, number_output_tokens"
    units = "tokens; no arrivals"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    counted_as = "item"
    prefix_identity = "none"
    licence = "Apache-2.0 (the leaderboard's repository)"

    _names = frozenset({"number_input_tokens", "number_output_tokens"})

    def match(self, head: Head) -> int:
        return 2 if head.starts_with(b"[") and self._names <= head.names else 0

    def rows(self, source: BinaryIO) -> Iterator[Row | BadRow]:
        try:
            items = json_value(source.read().removeprefix(b"\xef\xbb\xbf"))
        except RowError as error:
            yield BadRow(1, error.reason, error.detail)
            return
        if not isinstance(items, list):
            yield BadRow(1, "not a JSON list", shown(items))
            return
        for number, item in enumerate(items, 1):
            try:
                yield self._row(number, item)
            except RowError as error:
                yield BadRow(number, error.reason, error.detail)

    def _row(self, number: int, item: Any) -> Row:
        if not isinstance(item, dict):
            raise RowError("not a JSON object", shown(item))
        if item.get("error_code") is not None:
            code = f"failed request: error_code {shown(item['error_code'])}"
            raise RowError(code, shown(item.get("error_msg", "")))
        missing = sorted(name for name in self._names if item.get(name) is None)
        if missing:
            raise RowError(f"{', '.join(missing)} missing")
        return Row(
            line=number,
            arrival_ns=None,
            prompt_tokens=tokens(item["number_input_tokens"], "number_input_tokens"),
            output_tokens=tokens(item["number_output_tokens"], "number_output_tokens"),
        )


class OpenAiBatch(JsonLinesFormat):
    """The output file of a batch: ``custom_id`` and ``response.body.usage``, in any order.

    ``created`` is when the batch got to a request, so it is no arrival. Cached tokens are counted in
    ``prompt_tokens``. An input file has no counts.
    """

    name = "openai-batch"
    recognised_by = "JSON lines with custom_id and response"
    units = "tokens; no arrivals"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    prefix_identity = "none"
    licence = "whoever ran the batch"
    required = frozenset({"custom_id"})
    optional = frozenset({"id", "response", "error", "method", "url", "body"})
    signature = required

    def match(self, head: Head) -> int:
        keys = ({"response"}, {"method", "body"})
        return 2 * any("custom_id" in r and any(k <= r.keys() for k in keys) for r in head.records)

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        response = record.get("response")
        if record.get("error"):
            raise RowError("failed request", shown(record["error"]))
        if response is None:
            raise RowError(f"a batch's input: {TEXT_PROMPT}; read the batch's output")
        if not isinstance(response, dict):
            raise RowError("response is not a JSON object", shown(response))
        if response.get("status_code", 200) != 200:
            raise RowError(f"failed request: status_code {shown(response['status_code'])}")
        usage = _member(_member(response, "body"), "usage")
        return Row(
            line=line,
            arrival_ns=None,
            prompt_tokens=tokens(usage.get("prompt_tokens"), "prompt_tokens"),
            output_tokens=tokens(usage.get("completion_tokens"), "completion_tokens"),
            id=label(record["custom_id"], "custom_id"),
        )


def _member(record: dict[str, Any], name: str) -> dict[str, Any]:
    value = record.get(name)
    if not isinstance(value, dict):
        raise RowError(f"{name} is not a JSON object", shown(value))
    return value


class LlamaCpp(JsonLinesFormat):
    """``timings`` of llama.cpp's server: responses, one a line, or the timings alone.

    https://github.com/ggml-org/llama.cpp, tools/server. ``prompt_n`` leaves out what was cached: the
    prompt is ``cache_n + prompt_n``.
    """

    name = "llama.cpp"
    recognised_by = "JSON lines with timings of prompt_n, predicted_n"
    units = "tokens; no arrivals"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    prefix_identity = "none"
    licence = "whoever ran the server"
    required = frozenset[str]()
    signature = frozenset({"prompt_n", "predicted_n"})

    def match(self, head: Head) -> int:
        return 2 * any(self.signature <= _timings(record).keys() for record in head.records)

    def rows(self, source: BinaryIO) -> Iterator[Row | BadRow]:
        for row in super().rows(source):  # the other members of a response are not of interest
            yield row._replace(unknown_keys=frozenset()) if isinstance(row, Row) else row

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        timings = _timings(record)
        missing = sorted(name for name in self.signature if timings.get(name) is None)
        if missing:
            raise RowError(f"{', '.join(missing)} missing")
        computed = whole(timings["prompt_n"], "prompt_n")
        remarks = NO_REMARKS
        if timings.get("cache_n") is not None:
            prompt_tokens = whole(timings["cache_n"], "cache_n") + computed
        elif (total := _total(record)) is not None:
            prompt_tokens = total
        else:
            prompt_tokens, remarks = computed, _NOT_SAID_WHAT_WAS_CACHED
        return Row(
            line=line,
            arrival_ns=None,
            prompt_tokens=tokens(prompt_tokens, "cache_n + prompt_n"),
            output_tokens=tokens(timings["predicted_n"], "predicted_n"),
            remarks=remarks,
        )


def _timings(record: dict[str, Any]) -> dict[str, Any]:
    timings = record.get("timings")
    return timings if isinstance(timings, dict) else record


def _total(record: dict[str, Any]) -> int | None:
    """Tokens of the whole prompt as the response counts them; ``None`` where it does not."""
    usage = record.get("usage")
    if isinstance(usage, dict) and usage.get("prompt_tokens") is not None:
        return tokens(usage["prompt_tokens"], "prompt_tokens")
    return None
