"""Result files and logs: recognised, read exactly, failures left out with a reason."""

from __future__ import annotations

import base64
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockmanager.content import HashedContent, KeyChain
from traces import Trace, TraceError, iter_rows, read_trace
from traces.formats import FORMATS, by_name
from traces.formats.base import BadRow, Row, RowError
from traces.formats.documents import RecordsFormat, started_ns
from traces.formats.refused import Refused

S = 10**9


def trace_of(folder: Path, text: str | bytes, format: str | None = None, **options: Any) -> Trace:  # noqa: A002
    path = folder / "file"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_trace(path, format, **options)


def lines(*records: Any) -> str:
    return "\n".join(json.dumps(record) for record in records)


def table(*records: dict[str, Any]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]))
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def wrapped(*records: Any) -> list[str]:
    """The same records as JSON lines, as a document on one and on many lines, and as a page."""
    return [
        lines(*records),
        json.dumps(records),
        json.dumps(records, indent=1),
        json.dumps({"data": records, "meta": {"page": 1}}, indent=4),
    ]


def taken(trace: Trace) -> list[tuple[int, int, int]]:
    """Arrival in ns, prompt and output tokens of each request."""
    return [(a.request.arrival_ns, a.request.num_prompt_tokens, a.output_tokens) for a in trace]


def skipped(trace: Trace) -> dict[str, list[int]]:
    return {group.reason: group.lines for group in trace.skipped}


def bench(**changes: Any) -> dict[str, Any]:
    """A result of ``vllm bench serve`` with four requests; the third failed unnoticed."""
    result = {
        "date": "20250102-030405",
        "backend": "vllm",
        "model_id": "m",
        "tokenizer_id": "m",
        "num_prompts": 4,
        "request_rate": "inf",
        "duration": 2.5,
        "completed": 4,
        "input_lens": [10, 20, 30, 40],
        "output_lens": [5, 6, 0, 8],
        "ttfts": [0.1, 0.2, 0.0, 0.4],
        "itls": [[0.01] * 4, [0.01] * 5, [], [0.01] * 7],
        "start_times": [917.25, 917.5, 917.625, 918.000000001],
        "errors": ["", "", "", ""],
    }
    result.update(changes)
    return {key: value for key, value in result.items() if value is not ...}


def test_vllm_bench_counts_from_its_first_start_and_leaves_silent_failures_out(
    tmp_path: Path,
) -> None:
    trace = trace_of(tmp_path, json.dumps(bench()))
    assert trace.format == "vllm-bench"
    assert taken(trace) == [(0, 10, 5), (S // 4, 20, 6), (750_000_001, 40, 8)]
    assert skipped(trace) == {"failed: no output and no first token": [3]}
    assert "requests" not in str(trace.skipped[0])  # one row: "request 3"
    assert "request 3" in str(trace.skipped[0])
    assert "The earliest row is time 0: its times are those of a monotonic clock." in trace.notes
    assert any("waits for answers" in note for note in trace.notes)


def test_vllm_bench_without_start_times_asks_for_arrivals(tmp_path: Path) -> None:
    text = json.dumps(bench(start_times=...))
    with pytest.raises(TraceError, match=r"no arrival time.*--arrivals"):
        trace_of(tmp_path, text)
    trace = trace_of(tmp_path, text, arrivals="constant:rate=2")
    assert taken(trace) == [(0, 10, 5), (S // 2, 20, 6), (S, 40, 8)]
    assert not any("client sent" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_lens": ...}, "holds sums and no requests.*--save-detailed"),
        ({"input_lens": [1]}, "different lengths: input_lens 1, output_lens 4"),
        ({"output_lens": 7}, "output_lens is not a list"),
        ({"errors": ["a", "b", "c", "d"]}, r"no row can be used: failed \('a'\): 4 rows"),
    ],
)
def test_vllm_bench_files_that_hold_no_requests(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        trace_of(tmp_path, json.dumps(bench(**changes)))


def test_two_runs_in_one_file_have_two_clocks(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds a second run at line 2"):
        trace_of(tmp_path, lines(bench(), bench()))


def guidellm(*requests: dict[str, Any], **others: list[Any]) -> dict[str, Any]:
    return {
        "metadata": {"version": 2, "guidellm_version": "0.8.0"},
        "config": {},
        "benchmarks": [{"type_": "x", "requests": {"successful": requests, **others}}],
    }


def guidellm_request(start: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "request_id": f"r{start}",
        "info": {"conversation_id": "c", "timings": {"request_start": start}},
        "prompt_tokens": 7,
        "output_tokens": 3,
        **changes,
    }


def test_guidellm_takes_successful_requests_when_they_were_sent(tmp_path: Path) -> None:
    report = guidellm(
        guidellm_request(1_700_000_000.5),
        guidellm_request(None, request_start_time=1_700_000_001.25, prompt_tokens=9),
        guidellm_request(None),
        incomplete=[guidellm_request(1_700_000_002.0)],
        errored=[{}, {}],
    )
    for indent in (None, 1):
        trace = trace_of(tmp_path, json.dumps(report, indent=indent))
        assert trace.format == "guidellm"
        assert taken(trace) == [(0, 7, 3), (750_000_000, 9, 3)]
        assert trace.arrivals[0].request.session_id == "c"
        assert skipped(trace) == {
            "no arrival time: no request_start": [3],
            "incomplete request": [4],
            "errored request": [5, 6],
        }


def test_guidellm_reports_without_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="lists of requests are empty"):
        trace_of(tmp_path, json.dumps(guidellm(errored=[])))


def aiperf(start: int, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "x_request_id": f"r{start}",
            "x_correlation_id": "s",
            "request_start_ns": 1_700_000_000 * S + start,
            "benchmark_phase": "profiling",
            "was_cancelled": False,
            **metadata,
        },
        "metrics": {
            "input_sequence_length": {"value": 11, "unit": "tokens"},
            "output_sequence_length": {"value": 4, "unit": "tokens"},
        },
        "error": None,
    }


def test_aiperf_takes_profiled_requests_in_tokens(tmp_path: Path) -> None:
    failed = {**aiperf(9), "metrics": {"error_isl": {"value": 1, "unit": "tokens"}}}
    failed["error"] = {"code": 500, "type": "Server", "message": "x"}
    in_ms = aiperf(10)
    in_ms["metrics"]["input_sequence_length"]["unit"] = "ms"
    listed = aiperf(11)
    listed["metrics"]["output_sequence_length"]["value"] = [1, 2]
    rows = (
        aiperf(0),
        aiperf(1, benchmark_phase="warmup"),
        aiperf(7),
        aiperf(8, was_cancelled=True),
        failed,
        in_ms,
        listed,
        {**aiperf(12), "metadata": None},
    )
    trace = trace_of(tmp_path, lines(*rows))
    assert trace.format == "aiperf-export"
    assert taken(trace) == [(0, 11, 4), (7, 11, 4)]
    assert trace.arrivals[1].request.session_id == "s"
    assert skipped(trace) == {
        "not of the profiling phase": [2],
        "cancelled: its output is cut": [4],
        "failed": [5],
        "input_sequence_length is not in tokens": [6],
        "output_sequence_length is not a number": [7],
        "metadata missing": [8],
    }


def inference_perf(start: float, info: Any, **changes: Any) -> dict[str, Any]:
    return {
        "start_time": start,
        "end_time": start + 1,
        "request": json.dumps({"prompt": "x" * 100_000}),
        "response": "y",
        "info": info,
        "error": None,
        **changes,
    }


def test_inference_perf_prefers_the_servers_counts(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 12, "completion_tokens": 6}
    own = {"request_metrics": {"text": {"input_tokens": 10}}, "input_tokens": 10}
    rows = [
        inference_perf(3.5, {**own, "response_metrics": {"output_tokens": 5}}),
        inference_perf(
            4.0, {**own, "response_metrics": {"output_tokens": 5, "server_usage": usage}}
        ),
        inference_perf(4.5, {"input_tokens": 8, "output_tokens": 2, "output_token_times": [1.0]}),
        inference_perf(5.0, None),
        inference_perf(5.5, own, error={"error_type": "Timeout", "error_msg": "x"}),
    ]
    trace = trace_of(tmp_path, json.dumps(rows, indent=2))
    assert trace.format == "inference-perf"
    assert taken(trace) == [(0, 10, 5), (S // 2, 12, 6), (S, 8, 2)]
    assert skipped(trace) == {"input_tokens missing": [4], "failed": [5]}


def litellm(start: Any, **changes: Any) -> dict[str, Any]:
    row = {
        "request_id": f"r{start}",
        "call_type": "acompletion",
        "total_tokens": 25,
        "prompt_tokens": 20,
        "completion_tokens": 5,
        "startTime": start,
        "endTime": None,
        "request_duration_ms": None,
        "cache_hit": "None",
        "session_id": "s",
        "status": "success",
        "messages": 'a "quoted"\ntext',
    }
    row.update(changes)
    return row


LITELLM = (
    litellm("2025-01-02T03:04:05.250Z"),
    litellm("2025-01-02 04:04:06+01", status="failure", prompt_tokens=0, completion_tokens=0),
    litellm("2025-01-02 04:04:07+01", prompt_tokens=30),
    litellm("2025-01-02 03:04:08", cache_hit="True"),
    litellm("2025-01-02 03:04:09", completion_tokens=0),
    litellm(None, request_id="e", endTime="2025-01-02 03:04:12.0004", request_duration_ms="1000.5"),
    litellm(None, request_id="f", endTime="2025-01-02 03:04:13"),
)


def test_litellm_database_rows_in_every_wrapping(tmp_path: Path) -> None:
    for text in (*wrapped(*LITELLM), table(*LITELLM)):
        trace = trace_of(tmp_path, text)
        assert trace.format == "litellm"
        assert taken(trace) == [(0, 20, 5), (1_750_000_000, 30, 5), (5_749_900_000, 20, 5)]
        reasons = list(skipped(trace))
        assert reasons == [
            "failed",
            "answered from the gateway's cache",
            "completion_tokens is zero",
            "no arrival time: no startTime, and no endTime and duration",
        ]
        assert trace.num_rows == len(LITELLM)
        assert trace.arrivals[0].request.session_id == "s"
        assert "Arrival taken as the end of the request less its duration: 1 row." in trace.notes


def test_litellm_payload_has_unix_seconds_and_a_boolean(tmp_path: Path) -> None:
    rows = [
        litellm(1_700_000_000.25, cache_hit=False, trace_id="t"),
        litellm(1_700_000_001.5, cache_hit=True),
        litellm("1700000002.5", cache_hit=None),
        litellm(1_700_000_003_000),  # milliseconds are not guessed
    ]
    trace = trace_of(tmp_path, lines(*rows))
    assert taken(trace) == [(0, 20, 5), (2_250_000_000, 20, 5)]
    assert skipped(trace) == {
        "answered from the gateway's cache": [2],
        "startTime is out of range": [4],
    }


def langfuse(start: str, usage: Any = None, **changes: Any) -> dict[str, Any]:
    row = {
        "id": f"o{start}",
        "traceId": "t",
        "type": "GENERATION",
        "startTime": f"2025-01-02T03:04:{start}Z",
        "completionStartTime": None,
        "usageDetails": usage,
        "inputUsage": None,
        "outputUsage": None,
        "level": "DEFAULT",
        "sessionId": "s",
        "unit": "TOKENS",
    }
    row.update(changes)
    return row


LANGFUSE = (
    langfuse("05.000", {"input": 10, "output": 4, "input_cached_tokens": 90, "total": 104}),
    langfuse("06.000", {"input": 10, "output": 4}, type="SPAN"),
    langfuse("07.000", {"input": 100, "output": 4, "cache_read_input_tokens": 90, "total": 104}),
    langfuse("08.000", {"input": 10, "output": 4, "output_reasoning_tokens": 6}),
    langfuse("09.000", {}, inputUsage=7, outputUsage=2),
    langfuse("10.000", {"input": 1, "output": 1, "total": 9}),
    langfuse("11.000", {"input": 1}, level="ERROR"),
    langfuse("12.000", {"input": 5}),
    langfuse("13.000", None),
    langfuse("14.000", {"input": 5, "output": 5}, unit="CHARACTERS"),
)


def test_langfuse_usage_is_read_by_its_total(tmp_path: Path) -> None:
    in_csv = [
        {**row, "usageDetails": json.dumps(row["usageDetails"])}
        for row in LANGFUSE
        if row["usageDetails"] is not None
    ]
    snake = [
        {
            {"traceId": "trace_id", "startTime": "start_time", "usageDetails": "usage_details"}.get(
                key, key
            ): value
            for key, value in row.items()
        }
        for row in LANGFUSE
    ]
    for text in (*wrapped(*LANGFUSE), table(*in_csv), *wrapped(*snake)):
        trace = trace_of(tmp_path, text)
        assert trace.format == "langfuse"
        assert taken(trace) == [
            (0, 100, 4),
            (2 * S, 100, 4),
            (3 * S, 10, 10),
            (4 * S, 7, 2),
        ]
        reasons = [reason for reason in skipped(trace) if reason != "input usage missing"]
        assert reasons == [
            "not a generation",
            "usageDetails do not add up to their total",
            "failed",
            "output usage is zero",
            "usage is not in tokens",
        ]
        assert any("Cached tokens are in the input" in note for note in trace.notes)
        assert any("taken to be disjoint" in note for note in trace.notes)


def helicone(start: str | None, **changes: Any) -> dict[str, Any]:
    row = {
        "request_id": f"r{start}",
        "request_created_at": start,
        "response_created_at": None,
        "delay_ms": None,
        "response_status": 200,
        "prompt_tokens": 10,
        "prompt_cache_read_tokens": 0,
        "completion_tokens": 5,
        "reasoning_tokens": 0,
        "cache_reference_id": "00000000-0000-0000-0000-000000000000",
        "properties": json.dumps({"Helicone-Session-Id": "s"}),
    }
    row.update(changes)
    return row


HELICONE = (
    helicone("2025-01-02 03:04:05.100"),
    helicone("2025-01-02 03:04:06", prompt_cache_read_tokens=90, reasoning_tokens=3),
    helicone("2025-01-02 03:04:07", response_status=429),
    helicone("2025-01-02 03:04:08", cache_reference_id="1b"),
    helicone(None, request_id="e", response_created_at="2025-01-02 03:04:10", delay_ms=900),
    helicone(None, request_id="f", response_created_at="2025-01-02 03:04:11"),
)


def test_helicone_adds_what_it_counts_apart(tmp_path: Path) -> None:
    for text in (*wrapped(*HELICONE), table(*HELICONE)):
        trace = trace_of(tmp_path, text)
        assert trace.format == "helicone"
        assert taken(trace) == [(0, 10, 5), (S * 9 // 10, 100, 8), (4 * S, 10, 5)]
        assert trace.arrivals[0].request.session_id == "s"
        assert [reason.partition(":")[0] for reason in skipped(trace)] == [
            "failed",
            "answered from the gateway's cache",
            "no arrival time",
        ]


def test_an_end_becomes_an_arrival_only_with_a_duration() -> None:
    assert started_ns(3, 9, 5, "") == 3
    assert started_ns(None, 9, 5, "") == 4
    for end_ns, duration_ns in ((9, None), (None, 5), (5, 9)):
        with pytest.raises(RowError):
            started_ns(None, end_ns, duration_ns, "no start")


def test_rows_of_a_table_may_run_over_lines_and_be_long(tmp_path: Path) -> None:
    before = csv.field_size_limit(200_000)
    rows = [
        litellm("2025-01-02 03:04:05", messages="x\n\ny" * 100_000),
        litellm("2025-01-02 03:04:06", messages="z"),
    ]
    trace = trace_of(tmp_path, table(*rows))
    assert [row.request.arrival_ns for row in trace] == [0, S]
    assert csv.field_size_limit(before) == 200_000


def test_a_quote_that_is_never_closed_is_not_silent(tmp_path: Path) -> None:
    text = table(*LITELLM[:1]) + 'r2,acompletion,1,1,1,2025-01-02 03:04:06,,,,,success,"open\n'
    trace = trace_of(tmp_path, text + "\nr3,swallowed\n")
    assert skipped(trace) == {"not CSV": [4]}
    assert trace.skipped[0].example == "unexpected end of data (through line 6)"


def test_a_table_without_the_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="neither JSON nor a header with call_type"):
        trace_of(tmp_path, "a,b\n1,2\n", "litellm")


def test_bytes_that_are_not_utf8_cost_their_row_only(tmp_path: Path) -> None:
    text = table(litellm("2025-01-02 03:04:05", messages="m"), litellm("2025-01-02 03:04:06"))
    trace = trace_of(tmp_path, text.encode().replace(b",m\r", b",\xff\r"))
    assert skipped(trace) == {"not UTF-8": [2]}
    assert len(trace.arrivals) == 1


def span(second: str, attributes: Any, **changes: Any) -> dict[str, Any]:
    return {
        "trace_id": "t",
        "span_id": f"s{second}",
        "parent_span_id": None,
        "name": "chat m",
        "start_time": f"2025-01-02T03:04:{second}",
        "end_time": "2025-01-02T03:05:00",
        "attributes": attributes,
        "status": {"code": 1},
        **changes,
    }


NEW = {"gen_ai.usage.input_tokens": 20, "gen_ai.usage.output_tokens": 5}
OLD = {"gen_ai.usage.prompt_tokens": 30, "gen_ai.usage.completion_tokens": 6}
SPANS = (
    span(
        "05.5",
        {
            **NEW,
            "gen_ai.operation.name": "chat",
            "gen_ai.request.max_tokens": 64,
            "gen_ai.conversation.id": "c",
        },
    ),
    span("06", OLD, span_id="parent"),
    span("06.1", OLD, parent_span_id="parent"),
    span("07", NEW, parent_span_id="parent"),
    span("08", {**NEW, "gen_ai.operation.name": "invoke_agent"}),
    span("09", {"gen_ai.operation.name": "chat"}),
    span("10", {**NEW, "error.type": "timeout"}),
    span("11", NEW, status={"code": 2}),
    span("12", {"llm.token_count.prompt": "40", "llm.token_count.completion": "7"}),
    span("13", {**NEW, "gen_ai.request.choice.count": 3}),
    span("13.5", {**NEW, "openinference.span.kind": "CHAIN"}),
    span("14", NEW, start_time=5),
)
SPANS_TAKEN = [
    (0, 20, 5),
    (S // 2, 30, 6),
    (3 * S // 2, 20, 5),
    (13 * S // 2, 40, 7),
]
SPANS_SKIPPED = {
    "the same call as its parent span": [3],
    "not a model call": [5, 11],
    "span without token counts": [6],
    "failed": [7, 8],
    "several choices: the tokens of each are not told": [10],
}


def test_flat_spans_with_new_old_and_openinference_names(tmp_path: Path) -> None:
    dump = {"trace_id": "t", "span_count": len(SPANS), "spans": SPANS}
    for text in (
        json.dumps(dump),
        json.dumps(dump, indent=2),
        json.dumps([dump]),
        json.dumps(SPANS),
    ):
        trace = trace_of(tmp_path, text)
        assert trace.format == "otel"
        assert taken(trace) == SPANS_TAKEN
        assert skipped(trace) == {**SPANS_SKIPPED, "start_time is not a date and time": [12]}
        request = trace.arrivals[0].request
        assert (request.id, request.session_id, request.max_tokens) == ("t:s05.5", "c", 64)
        assert "span 3" in str(trace.skipped[0])


def test_the_only_call_of_an_agent_is_not_taken_for_the_agent(tmp_path: Path) -> None:
    agent = span("05", {**NEW, "gen_ai.operation.name": "invoke_agent"}, span_id="agent")
    call = span("05.1", {**NEW, "gen_ai.operation.name": "chat"}, parent_span_id="agent")
    trace = trace_of(tmp_path, json.dumps([agent, call]))
    assert [arrival.request.id for arrival in trace] == ["t:s05.1"]
    assert skipped(trace) == {"not a model call": [1]}


def otlp(flat: dict[str, Any]) -> dict[str, Any]:
    def value(given: Any) -> dict[str, Any]:
        return {"intValue": str(given)} if isinstance(given, int) else {"stringValue": given}

    second = flat["start_time"].rpartition(":")[2]
    nanoseconds = int(float(second) * 10) * S // 10
    return {
        "traceId": flat["trace_id"],
        "spanId": flat["span_id"],
        "parentSpanId": flat["parent_span_id"] or "",
        "startTimeUnixNano": str(1_700_000_000 * S + nanoseconds),
        "attributes": [{"key": k, "value": value(v)} for k, v in flat["attributes"].items()],
        "status": flat["status"],
    }


def test_otlp_json_wraps_values_and_writes_integers_as_text(tmp_path: Path) -> None:
    spans = [otlp(flat) for flat in SPANS[:-1]]
    request = {"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": spans}]}]}
    for text in (json.dumps(request), json.dumps(request, indent=2)):
        trace = trace_of(tmp_path, text)
        assert taken(trace) == SPANS_TAKEN
        assert skipped(trace) == SPANS_SKIPPED
        assert trace.arrivals[0].request.max_tokens == 64
    # A collector's file holds one export a line.
    trace = trace_of(tmp_path, lines(request, {"resourceSpans": 5}, {"resourceSpans": [{}]}))
    assert skipped(trace)["resourceSpans is not a list"] == [12]
    assert skipped(trace)["scopeSpans is not a list"] == [13]


def capture(output: str, encoding: str = "JSON", **asked: Any) -> dict[str, Any]:
    def packed(text: str) -> str:
        return base64.b64encode(text.encode()).decode() if encoding == "BASE64" else text

    return {
        "captureData": {
            "endpointInput": {"data": packed(json.dumps(asked)), "encoding": encoding},
            "endpointOutput": {"data": packed(output), "encoding": encoding},
        },
        "eventMetadata": {"eventId": "e", "inferenceTime": "2025-01-02T03:04:05Z"},
        "eventVersion": "0",
    }


def test_sagemaker_reads_usage_from_plain_packed_and_streamed_bodies(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4}
    events: tuple[dict[str, Any], ...] = (
        {"choices": []},
        {"usage": {**usage, "completion_tokens": 1}},
        {"usage": usage},
    )
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    rows = [
        capture(json.dumps({"usage": usage}), max_tokens=32),
        capture(json.dumps({"usage": usage}), "BASE64"),
        capture(stream + "data: [DONE]\n", "BASE64"),
        capture(json.dumps({"generated_text": "x"})),
        capture("0.5,0.5", "CSV"),
        capture(json.dumps({"usage": usage}), n=2),
        capture(json.dumps({"usage": usage})),
        {**capture(""), "eventMetadata": {}},
    ]
    rows[6]["captureData"]["endpointOutput"] = {"encoding": "BASE64", "data": "AAAA!!!!"}
    for index, row in enumerate(rows[:-1]):
        row["eventMetadata"]["eventId"] = f"e{index}"
    trace = trace_of(tmp_path, lines(*rows))
    assert trace.format == "sagemaker"
    assert taken(trace) == [(0, 9, 4)] * 3
    assert [arrival.request.max_tokens for arrival in trace] == [32, None, None]
    assert skipped(trace) == {
        "no usage in the response: token counts unknown": [4],
        "the response is not JSON": [5],
        "several choices: the tokens of each are not told": [6],
        "data of endpointOutput is not BASE64": [7],
        "no arrival time: no inferenceTime": [8],
    }
    assert "inferenceTime, in whole seconds, is taken for the arrival." in trace.notes


def dynamo(received: int | None, hashes: Any, length: int = 40, **changes: Any) -> dict[str, Any]:
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": 1_700_000_009_000,
        "agent_context": {"trajectory_id": "a"},
        "request": {
            "request_id": f"r{received}",
            "output_tokens": 3,
            "request_received_ms": received,
            "replay": {
                "trace_block_size": 16,
                "input_length": length,
                "input_sequence_hashes": hashes,
            },
            **changes,
        },
    }


def test_dynamo_hashes_are_unsigned_and_shared(tmp_path: Path) -> None:
    big = 2**64 - 1
    rows = [
        dynamo(1_700_000_000_000, [big, 2**63, 7]),
        dynamo(1_700_000_000_250, [big, 2**63, 8]),
        dynamo(1_700_000_000_500, [big, 5]),  # full blocks only
        {**dynamo(1, []), "event_type": "tool_end"},
        dynamo(1_700_000_000_600, [1]),
        dynamo(1_700_000_000_700, [2**64, 1, 2]),
        dynamo(None, None, request_id="derived", total_time_ms=8000.5),
        dynamo(None, None, request_id="lost"),
    ]
    trace = trace_of(tmp_path, lines(*rows))
    assert trace.format == "dynamo"
    assert [row[0] for row in taken(trace)] == [0, S // 4, S // 2, 999_500_000]
    assert trace.arrivals[0].request.session_id == "a"
    contents = [arrival.request.content for arrival in trace][:3]
    keys = []
    for content in contents:
        assert isinstance(content, HashedContent)
        keys.append(KeyChain(content, 16).keys)
    assert keys[0] == keys[1]  # two full blocks each
    assert keys[0][0] == keys[2][0]
    assert keys[0][1] != keys[2][1]
    assert contents[2] is not None
    assert contents[2].num_tokens == 32
    assert skipped(trace) == {
        "not the end of a request": [4],
        "hash_ids do not match the prompt length": [5],
        "input_sequence_hashes holds no unsigned 64-bit integer": [6],
        "no arrival time: no request_received_ms or total_time_ms": [8],
    }


REFUSED = {
    "genai-perf": json.dumps(
        {"experiments": [{"requests": [{"timestamp": 1, "response_timestamps": [2, 3]}]}]}
    ),
    "guidellm-yaml": "metadata:\n  version: 2\n  guidellm_version: 0.8.0\nbenchmarks: []\n",
    "inference-perf-summary": json.dumps({"load_summary": {"count": 3}, "successes": {"count": 3}}),
    "openai-usage": json.dumps(
        {"data": [{"start_time": 1, "results": [{"input_tokens": 5, "num_model_requests": 2}]}]}
    ),
    "prometheus": "# HELP vllm:num_requests_running Running.\n# TYPE vllm:x gauge\nvllm:x 1.0\n",
    "vllm-log": "INFO 01-02 03:04:05 [logger.py:42] Received request cmpl-1: params: ...\n",
    "access-log": '10.0.0.1 - - [02/Jan/2025:03:04:05 +0000] "POST /v1 HTTP/1.1" 200 17 "-" "x"\n',
}


def test_every_refused_format_has_an_example() -> None:
    assert {known.name for known in FORMATS if isinstance(known, Refused)} == REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_cannot_be_a_trace_are_told_why(tmp_path: Path, name: str) -> None:
    reader = by_name(name)
    assert isinstance(reader, Refused)
    with pytest.raises(TraceError) as caught:
        trace_of(tmp_path, REFUSED[name])
    assert f"cannot be a trace: {reader.reason}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_broken_documents_are_one_line_of_words(tmp_path: Path) -> None:
    document = json.dumps(LITELLM, indent=1)
    for text, message in (
        (document[:-20], "neither one JSON document nor JSON lines: not JSON: line"),
        (document + "\n[]", "Extra data"),
        ("[" * 100_000, "not JSON"),
    ):
        with pytest.raises(TraceError, match=message) as caught:
            trace_of(tmp_path, text, "litellm")
        assert "\n" not in str(caught.value)


def test_a_broken_first_line_does_not_lose_the_others(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, "{broken\n" + lines(LITELLM[0]), "litellm")
    assert skipped(trace) == {"not JSON": [1]}
    assert len(trace.arrivals) == 1


RECORDS = [known for known in FORMATS if isinstance(known, RecordsFormat)]
SAMPLES: dict[str, list[Any]] = {
    "dynamo": [dynamo(1_700_000_000_000, [1, 2, 3]), dynamo(5, None)],
    "vllm-bench": [bench()],
    "guidellm": [guidellm(guidellm_request(1.5), errored=[{}])],
    "aiperf-export": [aiperf(1), aiperf(2)],
    "inference-perf": [inference_perf(1.5, {"input_tokens": 1, "output_tokens": 2})],
    "litellm": list(LITELLM),
    "langfuse": list(LANGFUSE),
    "helicone": list(HELICONE),
    "otel": [*SPANS, {"resourceSpans": [{"scopeSpans": [{"spans": [otlp(SPANS[0])]}]}]}],
    "sagemaker": [capture("{}"), capture('data: {"usage": {"prompt_tokens": 1}}', "BASE64")],
}

JUNK: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 5),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.sampled_from(["", "1", "-1", "1e99", "x", "\ud800", "2025-01-02 03:04:05", "99:99"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["data", "spans", "key", "value", "unit"]), inner),
    ),
    max_leaves=6,
)


@st.composite
def damaged(draw: st.DrawFn, value: Any) -> Any:
    """The value with parts of it replaced by junk or left out."""
    choice = draw(st.integers(0, 9))
    if choice == 0:
        return draw(JUNK)
    if isinstance(value, dict):
        keys = [key for key in value if draw(st.integers(0, 19)) > 0]
        return {key: draw(damaged(value[key])) for key in keys}
    if isinstance(value, list | tuple) and choice < 8:
        return [draw(damaged(item)) for item in value[:6]]
    return value


def readable(reader: RecordsFormat, data: bytes) -> list[Row | BadRow] | None:
    """Every row, after checks of what holds for each; ``None`` where the file was refused."""
    found: list[Row | BadRow] = []
    words = ""
    try:
        found.extend(reader.rows(io.BytesIO(data)))
    except TraceError as error:
        words = str(error)
    assert "\n" not in words
    if words:
        return None
    numbers = [row.line for row in found]
    assert numbers == sorted(set(numbers))
    for row in found:
        if isinstance(row, Row):
            assert row.arrival_ns is None or 0 <= row.arrival_ns < 2**63
            assert min(row.prompt_tokens, row.output_tokens) > 0
        else:
            assert row.reason
    return found


def test_every_reader_is_fuzzed() -> None:
    assert {known.name for known in RECORDS} == SAMPLES.keys()


@pytest.mark.parametrize("name", SAMPLES)
@given(data=st.data())
def test_damaged_records_are_rows_or_have_a_reason(name: str, data: st.DataObject) -> None:
    reader = by_name(name)
    assert isinstance(reader, RecordsFormat)
    samples = st.sampled_from(SAMPLES[name]).flatmap(damaged)
    records = data.draw(st.lists(samples, min_size=1, max_size=4))
    found = readable(reader, lines(*records).encode())
    whole = readable(
        reader, json.dumps(records, indent=data.draw(st.sampled_from([None, 1]))).encode()
    )
    if reader.one_document or name == "otel":
        return  # a document is not a record there
    # A line a record, and a list of the same records: nothing more, nothing less.
    assert whole is not None
    assert len(whole) == len(records)
    pages = any(isinstance(r, dict) and isinstance(r.get("data"), list) for r in records)
    if isinstance(records[0], dict) and not pages:
        assert found is not None
        assert len(found) == len(records)


@pytest.mark.parametrize("name", SAMPLES)
@given(data=st.data())
def test_damaged_bytes_end_in_words(name: str, data: st.DataObject) -> None:
    reader = by_name(name)
    assert isinstance(reader, RecordsFormat)
    texts = [lines(*SAMPLES[name]), json.dumps(SAMPLES[name])]
    if reader.has_csv:
        texts.append(table(*SAMPLES[name]))
    text = bytearray(data.draw(st.sampled_from(texts)).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text)))
        text[place : place + data.draw(st.integers(0, 9))] = data.draw(
            st.one_of(
                st.binary(max_size=3), st.sampled_from([b'"', b"\n", b"{", b"]", b"\r", b"0"])
            )
        )
    readable(reader, bytes(text))


FIELD = st.text(st.characters(exclude_characters='"\r\n,', exclude_categories=["Cs"]), max_size=6)


@given(rows=st.lists(st.lists(FIELD, min_size=1, max_size=5), max_size=8))
def test_a_table_gives_a_row_for_each_of_its_lines(rows: list[list[str]]) -> None:
    header = "startTime,request_id,prompt_tokens,completion_tokens"
    good = "2025-01-02 03:04:05,id,1,1"
    text = "\n".join([header, good, *(",".join(row) for row in rows)])
    num_lines = sum(bool(line.strip()) for line in text.encode().split(b"\n"))
    found = readable(by_name("litellm"), text.encode())  # type: ignore[arg-type]
    assert found is not None
    assert len(found) == num_lines - 1
    assert isinstance(found[0], Row)


@pytest.mark.parametrize(("rate", "used", "failed"), [(16, 621, 379), (32, 622, 378)])
def test_public_vllm_results_count_failures_as_completed(
    shared: Path, rate: int, used: int, failed: int
) -> None:
    (path,) = (shared / "traces/vllm_bench_serve").glob(f"nvidia-vllm-{rate}.0qps-*")
    with pytest.raises(TraceError, match="--arrivals"):
        read_trace(path)
    trace = read_trace(path, arrivals=f"poisson:rate={rate},seed=1")
    assert trace.num_rows == 1000
    assert len(trace.arrivals) == used
    assert {r: len(at) for r, at in skipped(trace).items()} == {
        "failed: no output and no first token": failed
    }


def test_public_spans_mostly_lack_token_counts(shared: Path) -> None:
    found = [
        row for path in sorted((shared / "traces/otel").glob("*.json")) for row in iter_rows(path)
    ]
    reasons = [row.reason for row in found if isinstance(row, BadRow)]
    assert len(found) == 73
    assert reasons == ["span without token counts"] * 66
    (path,) = (shared / "traces/otel").glob("prefix_sharing*")
    assert read_trace(path).format == "otel"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("guidellm/guidellm_report_v2.json", "its lists of requests are empty"),
        ("misc/inference_perf_stage_3_lifecycle_metrics.json", "has no single requests"),
    ],
)
def test_public_reports_without_requests_are_refused(shared: Path, name: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(shared / "traces" / name)
