"""Per-request results of benchmark clients: the load that a server was given, to be given again.

A benchmark's arrivals are what its client sent. A client that waits for answers (a fixed
concurrency, a saturated sender) sends late when the server is slow, and that is in the times.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any, ClassVar

from traces.formats.base import NO_REMARKS, Row, RowError, TraceError, shown
from traces.formats.documents import RecordsFormat, at, count, first, label_or_none, moment_ns

_OURS = "whoever ran the benchmark"
_SENT = (
    "Arrivals are the times at which the benchmark's client sent; one that waits for answers sends "
    "late when the server is slow"
)


class VllmBench(RecordsFormat):
    """``vllm bench serve --save-result --save-detailed``: arrays with a place for each request.

    https://github.com/vllm-project/vllm, vllm/benchmarks/serve.py. ``start_times`` come from a
    monotonic clock, so only their differences mean anything; older files have none.
    """

    name = "vllm-bench"
    recognised_by = "JSON of vllm bench serve with input_lens, output_lens (and start_times)"
    counted_as = "request"
    clock_zero = "its times are those of a monotonic clock"
    one_document = True
    units = "seconds of a monotonic clock, tokens"
    licence = _OURS
    signatures = (frozenset({"date", "model_id", "tokenizer_id", "num_prompts", "request_rate"}),)

    def entries(self, document: object) -> Iterator[object]:
        if at(document, "input_lens") is None or at(document, "output_lens") is None:
            raise TraceError(
                "holds sums and no requests: run vllm bench serve with --save-detailed "
                "(input_lens, output_lens, start_times)"
            )
        columns = {
            name: at(document, name)
            for name in ("input_lens", "output_lens", "start_times", "ttfts", "errors")
        }
        lengths = {name: len(column) for name, column in columns.items() if _is_list(name, column)}
        if len(set(lengths.values())) > 1:
            sizes = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise TraceError(f"its arrays have different lengths: {sizes}")
        filled = [column if column is not None else repeat(None) for column in columns.values()]
        for values in zip(*filled, strict=False):
            yield dict(zip(columns, values, strict=True))

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        if record["errors"]:
            raise RowError("failed", shown(record["errors"]))
        # Clients have counted such requests as completed, with no error.
        if record["output_lens"] == 0 and not record["ttfts"]:
            raise RowError("failed: no output and no first token")
        sent = record["start_times"]
        return Row(
            line=line,
            arrival_ns=None if sent is None else moment_ns(sent, "start_times"),
            prompt_tokens=count(record["input_lens"], "input_lens"),
            output_tokens=count(record["output_lens"], "output_lens"),
            remarks=NO_REMARKS if sent is None else frozenset({_SENT}),
        )


def _is_list(name: str, column: object) -> bool:
    if column is not None and not isinstance(column, list):
        raise TraceError(f"{name} is not a list: {shown(column)}")
    return column is not None


class GuideLlm(RecordsFormat):
    """A guidellm report in JSON: benchmarks, each with its successful and other requests.

    https://github.com/vllm-project/guidellm (reports of 0.8; ``start_time`` is of before 0.4). All
    benchmarks of a report are kept on the wall clock they share. Lists may be sampled or empty.
    """

    name = "guidellm"
    recognised_by = "guidellm JSON report with benchmarks[].requests"
    counted_as = "request"
    clock_zero = "its times are Unix times"
    assumes = f"{_SENT}; all benchmarks of the report are taken, as they followed each other."
    one_document = True
    units = "Unix seconds at which requests were sent, tokens (the server's count of the prompt)"
    licence = _OURS
    signatures = (frozenset({"metadata", "guidellm_version"}), frozenset({"benchmarks", "type_"}))

    def entries(self, document: object) -> Iterator[object]:
        benchmarks = at(document, "benchmarks")
        if not isinstance(benchmarks, list):
            raise TraceError("has no list of benchmarks, as a guidellm report has")
        empty = True
        for benchmark in benchmarks:
            if not isinstance(benchmark, dict):
                empty = False
                yield RowError("a benchmark is not a JSON object", shown(benchmark))
            for status in ("successful", "incomplete", "errored"):
                requests = at(benchmark, "requests", status)
                if requests is not None and not isinstance(requests, list):
                    requests = [RowError(f"requests.{status} is not a list", shown(requests))]
                for request in requests or ():
                    empty = False
                    if status == "successful" or isinstance(request, RowError):
                        yield request
                    else:
                        yield RowError(f"{status} request")
        if empty:
            raise TraceError("its lists of requests are empty: write the report with all samples")

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        sent = at(record, "info", "timings", "request_start")
        if sent is None:
            sent = first(record, "request_start_time", "start_time")
        if sent is None:
            raise RowError("no arrival time: no request_start")
        return Row(
            line=line,
            arrival_ns=moment_ns(sent, "request_start"),
            prompt_tokens=count(record.get("prompt_tokens"), "prompt_tokens"),
            output_tokens=count(record.get("output_tokens"), "output_tokens"),
            id=label_or_none(record.get("request_id"), "request_id"),
            session_id=label_or_none(at(record, "info", "conversation_id"), "conversation_id"),
        )


class AiPerf(RecordsFormat):
    """aiperf's ``profile_export.jsonl``: a request a line, with units beside the values.

    https://github.com/ai-dynamo/aiperf, docs/tutorials/working-with-profile-exports.md.
    """

    name = "aiperf-export"
    recognised_by = "JSON lines with metadata.request_start_ns and metrics"
    counted_as = "line"
    clock_zero = "its times are Unix times"
    assumes = f"{_SENT}."
    units = "Unix nanoseconds, tokens"
    licence = _OURS
    signatures = (frozenset({"metadata", "metrics", "request_start_ns"}),)

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        if record.get("error") is not None:
            raise RowError("failed", shown(at(record["error"], "type") or record["error"]))
        about = record.get("metadata")
        if not isinstance(about, dict):
            raise RowError("metadata missing")
        if about.get("was_cancelled"):
            raise RowError("cancelled: its output is cut")
        phase = about.get("benchmark_phase")
        if phase not in (None, "profiling"):
            raise RowError("not of the profiling phase", shown(phase))
        if about.get("request_start_ns") is None:
            raise RowError("no arrival time: no request_start_ns")
        session = first(about, "x_correlation_id", "conversation_id")
        return Row(
            line=line,
            arrival_ns=moment_ns(about["request_start_ns"], "request_start_ns", 0),
            prompt_tokens=_metric(record, "input_sequence_length"),
            output_tokens=_metric(record, "output_sequence_length"),
            id=label_or_none(about.get("x_request_id"), "x_request_id"),
            session_id=label_or_none(session, "x_correlation_id"),
        )


def _metric(record: dict[str, Any], name: str) -> int:
    unit = at(record, "metrics", name, "unit")
    if unit not in (None, "tokens"):
        raise RowError(f"{name} is not in tokens", shown(unit))
    return count(at(record, "metrics", name, "value"), name)


class InferencePerf(RecordsFormat):
    """inference-perf's ``per_request_lifecycle_metrics.json``: a list of requests.

    https://github.com/kubernetes-sigs/inference-perf, inference_perf/reportgen. Its clock is
    monotonic. Counts that the server reported go before those that the client made by tokenizing
    the text again.
    """

    name = "inference-perf"
    recognised_by = "JSON list with start_time, end_time, request, response, info"
    counted_as = "request"
    clock_zero = "its times are those of a monotonic clock"
    assumes = f"{_SENT}."
    one_document = True
    units = "seconds of a monotonic clock, tokens (the server's count where it gave one)"
    licence = _OURS
    # Not its later keys: a long request stands between them and the start of the file.
    signatures = (frozenset({"start_time", "end_time", "request"}),)
    _PROMPT: ClassVar = (
        ("response_metrics", "server_usage", "prompt_tokens"),
        ("request_metrics", "text", "input_tokens"),
        ("input_tokens",),
    )
    _OUTPUT: ClassVar = (
        ("response_metrics", "server_usage", "completion_tokens"),
        ("response_metrics", "output_tokens"),
        ("output_tokens",),
    )

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        if record.get("error") is not None:
            raise RowError("failed", shown(at(record["error"], "error_type") or record["error"]))
        if record.get("start_time") is None:
            raise RowError("no arrival time: no start_time")
        info = record.get("info")
        counts = [
            next((found for path in paths if (found := at(info, *path)) is not None), None)
            for paths in (self._PROMPT, self._OUTPUT)
        ]
        return Row(
            line=line,
            arrival_ns=moment_ns(record["start_time"], "start_time"),
            prompt_tokens=count(counts[0], "input_tokens"),
            output_tokens=count(counts[1], "output_tokens"),
        )
