"""Formats of traces and of lengths: units, clocks, hash ids, failures; files, folders, processes."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockmanager.content import HashedContent, KeyChain
from traces import Trace, TraceError, TraceStream, iter_rows, read_trace, stream_trace
from traces.arrivals import ArrivalProcess
from traces.formats import FORMATS, all_formats, by_name
from traces.formats.base import NO_TOKENIZER, TEXT_PROMPT, BadRow, CsvFormat
from traces.trace import spread_ticks

BASETEN = {
    "timestamp_start_unix_ms": 1_700_000_000_250,
    "prompt": "not read",
    "input_tokens": 40,
    "output_tokens": 7,
    "total_hashes": [2**64 - 1, 5, 6],
    "provided_session_id": "s",
    "poor_man_session_id": 1,
    "block_size": 16,
    "request_canceled": 0,
}


def lines(*rows: str | dict[str, Any]) -> bytes:
    return "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows).encode()


def parquet(*rows: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([*rows], schema_of(rows[0])), out)
    return out.getvalue()


def schema_of(row: dict[str, Any]) -> pa.Schema:
    schema = pa.Table.from_pylist([{**row, "total_hashes": None}]).schema
    index = schema.get_field_index("total_hashes")
    return schema.set(index, pa.field("total_hashes", pa.list_(pa.uint64())))


BLIS_COLUMNS = (
    "request_id,slo_class,vllm_priority,session_id,prefix_group,prefix_length,input_tokens,"
    "output_tokens,deadline_us,server_input_tokens,arrival_time_us,send_time_us,status,"
    "error_message,adapter"
)

SAMPLES: dict[str, bytes] = {
    "azure": lines(
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens",
        "2025-03-01 10:00:00.0000001,0,700,20",
        "2025-03-01 10:00:00.5000000,2,900,30",
    ),
    "burstgpt": lines(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "50,ChatGPT,300,10,310,Conversation log",
        "53,GPT-4,200,0,200,API log",
        "57.5,GPT-4,100,20,120,API log",
    ),
    "bailian": lines(
        {
            "chat_id": 7,
            "parent_chat_id": -1,
            "timestamp": 0.5,
            "input_length": 33,
            "output_length": 9,
            "type": "text",
            "turn": 1,
            "hash_ids": [1, 2, 3],
        },
        {
            "chat_id": 9,
            "parent_chat_id": 7,
            "timestamp": 61.25,
            "input_length": 48,
            "output_length": 5,
            "type": "text",
            "turn": 2,
            "hash_ids": [1, 2, 4],
        },
    ),
    "mooncake": lines(
        {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 1500, "input_length": 512, "output_length": 4, "hash_ids": [0]},
    ),
    "aiperf-mooncake": lines(
        {
            "session_id": "a",
            "timestamp": 250.5,
            "input_length": 600,
            "output_length": 3,
            "hash_ids": [0, 1],
        },
        {"session_id": "b", "timestamp": 900, "input_length": 20, "output_length": 8},
    ),
    "aiperf-turns": lines(
        {"text": "Name three rivers.", "timestamp": 0, "output_length": 20},
        {"session_id": "s", "turns": [{"text": "Name one more."}]},
    ),
    "baseten": parquet(BASETEN, {**BASETEN, "timestamp_start_unix_ms": 1_700_000_003_250}),
    "vidur": lines("arrived_at,num_prefill_tokens,num_decode_tokens", "0.0,100,10", "0.125,200,20"),
    "splitwise-sim": lines(
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size",
        "0,2,0,1.5,1,800,30",
        "1,2,0,2,1,400,10",
    ),
    "blis": lines(
        "trace_version: 2",
        "time_unit: microseconds",
        "mode: real",
        "warm_up_requests: 1",
        "server:",
        "  model: small",
        BLIS_COLUMNS,
        "0,,0,,,0,100,10,0,0,1000,1000,ok,,",
        "1,batch,3,s1,sys,40,100,10,5000,0,2000,2500,ok,,tuned",
    ),
    "sglang-bench": lines(
        {
            "total_output_tokens_retokenized": 30,
            "input_lens": [10, 20, 30],
            "output_lens": [4, 0, 5],
            "errors": ["", "", "closed"],
        },
        {"total_output_tokens_retokenized": 8, "input_lens": [40], "output_lens": [8]},
        {"total_output_tokens_retokenized": 8},
    ),
    "llmperf": json.dumps(
        [
            {"error_code": None, "number_input_tokens": 550, "number_output_tokens": 150},
            {
                "error_code": -100,
                "error_msg": "too few",
                "number_input_tokens": 550,
                "number_output_tokens": 3,
            },
        ],
        indent=2,
    ).encode(),
    "openai-batch": lines(
        {
            "custom_id": "q1",
            "response": {
                "status_code": 200,
                "body": {"usage": {"prompt_tokens": 12, "completion_tokens": 5}},
            },
            "error": None,
        },
        {"custom_id": "q2", "response": {"status_code": 429, "body": {}}, "error": None},
        {"custom_id": "q3", "method": "POST", "url": "/v1/x", "body": {"messages": []}},
    ),
    "llama.cpp": lines(
        {"timings": {"cache_n": 30, "prompt_n": 5, "predicted_n": 9}, "content": "x"},
        {"timings": {"prompt_n": 6, "predicted_n": 9}},
        {"timings": {"prompt_n": 6, "predicted_n": 9}, "usage": {"prompt_tokens": 50}},
    ),
}
COUNTED_OTHERWISE = {"baseten", "llmperf", "sglang-bench", "blis"}
"""Formats whose rows are not lines, or not all of whose lines are rows."""
WITHOUT_ARRIVALS = {"sglang-bench", "llmperf", "openai-batch", "llama.cpp"}
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Any]:
    """Writes content under a name that tells nothing, and gives its path."""
    numbers = itertools.count()

    def write(content: bytes) -> Path:
        path = tmp_path / f"file-{next(numbers)}"
        path.write_bytes(content)
        return path

    return write


def process_for(name: str) -> str | None:
    return "all-at-once" if name in WITHOUT_ARRIVALS else None


def seconds(trace: Trace) -> list[float]:
    return [arrival.request.arrival_ns / 1e9 for arrival in trace.arrivals]


def lengths(trace: Trace) -> list[tuple[int, int]]:
    return [(a.request.num_prompt_tokens, a.output_tokens) for a in trace.arrivals]


def skipped(trace: Trace) -> dict[str, list[int]]:
    return {group.reason: group.lines for group in trace.skipped}


def test_every_format_of_these_modules_has_a_sample() -> None:
    mine = {"aiperf", "azure", "bailian", "baseten", "blis", "burstgpt", "lengths", "mooncake"}
    mine |= {"simulators"}
    names = {f.name for f in FORMATS if type(f).__module__.removeprefix("traces.formats.") in mine}
    assert names == SAMPLES.keys()


@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - {"aiperf-turns"}))
def test_samples_are_recognised_by_content(file: Any, name: str) -> None:
    trace = read_trace(file(SAMPLES[name]), arrivals=process_for(name))
    assert trace.format == name
    assert trace.num_rows == len(trace.arrivals) + trace.num_skipped


def test_azure_2025_counts_images_within_the_context(file: Any) -> None:
    trace = read_trace(file(SAMPLES["azure"]), strict=True)
    assert lengths(trace) == [(700, 20), (900, 30)]
    assert seconds(trace) == [0, 0.4999999]
    assert any("Images are taken to be counted in ContextTokens" in n for n in trace.notes)
    assert any(n.endswith(": 1 row.") for n in trace.notes)


def test_tr_03_burstgpt_failed_and_short_rows_are_skipped_with_a_reason(file: Any) -> None:
    answers = (10, 0, 7, 0, 3, 12)
    rows = [f"{i},ChatGPT,9,{n},{9 + n},API log" for i, n in enumerate(answers)]
    trace = read_trace(file(lines(BURSTGPT, *rows, "6,ChatGPT")))
    assert lengths(trace) == [(9, 10), (9, 7), (9, 3), (9, 12)]
    assert skipped(trace) == {
        "failed request: Response tokens is zero": [3, 5],
        "not the header's number of fields": [8],
    }


def test_burstgpt_3_has_sessions_and_a_late_clock(file: Any) -> None:
    trace = read_trace(
        file(
            lines(
                "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,"
                "Total tokens,Log Type",
                "19000000.0,abc,2,ChatGPT,100,10,110,Conversation log",
                "19000004.5,,0,GPT-4,50,5,55,API log",
            )
        ),
        strict=True,
    )
    assert [a.request.session_id for a in trace.arrivals] == ["abc", None]
    assert seconds(trace) == [0, 4.5]
    assert any("midnight of its first day" in note for note in trace.notes)


def test_bailian_times_are_seconds_and_ids_cover_16_tokens(file: Any) -> None:
    trace = read_trace(file(SAMPLES["bailian"]), strict=True)
    assert seconds(trace) == [0.5, 61.25]
    assert [a.request.session_id for a in trace.arrivals] == ["7", "7"]
    first, second = (KeyChain(a.request.content, 16).keys for a in trace.arrivals)
    assert len(first) == 2
    assert first == second[:2]


def test_bailian_sessions_are_chains_of_chats(file: Any) -> None:
    chats = [(1, -1), (2, 1), (3, 2), (4, -1), (6, 5), (7, 5), (8, 6), (9, None)]
    rows = [
        {
            "timestamp": i,
            "input_length": 16,
            "output_length": 1,
            "hash_ids": [i],
            "chat_id": chat,
            "parent_chat_id": parent,
        }
        for i, (chat, parent) in enumerate(chats)
    ]
    rows[1]["output_length"] = 0  # a turn that cannot be used still ties the next one to the first
    trace = read_trace(file(lines(*rows)))
    sessions = [a.request.session_id for a in trace.arrivals]
    assert sessions == ["1", "1", "4", "5", "5", "5", "9"]
    assert skipped(trace) == {"output_length is zero": [2]}


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([(600, 2)], "mooncake"),
        ([(100, 1)], "mooncake"),
        ([(10, 1), (600, 2)], "mooncake"),
        ([(100, 7)], None),
        ([(10, 1), (100, 7)], None),
        ([(10, 1)], None),
        ([(600, 5)], "mooncake"),
    ],
)
def test_ms_and_s_under_one_name_are_told_apart_or_refused(
    file: Any, rows: list[tuple[int, int]], found: str | None
) -> None:
    """512 tokens an id are milliseconds; 16 tokens an id without chats may be either."""
    path = file(
        lines(
            *(
                {"timestamp": 5, "input_length": n, "output_length": 1, "hash_ids": [*range(ids)]}
                for n, ids in rows
            )
        )
    )
    if found is None:
        with pytest.raises(TraceError, match=r"mooncake \(milliseconds.* or bailian \(seconds"):
            read_trace(path)
        assert by_name("bailian")
    else:
        assert {type(row) for row in iter_rows(path)} <= {type(r) for r in iter_rows(path, found)}
        if (600, 5) not in rows:
            assert read_trace(path).format == found
        else:
            with pytest.raises(TraceError, match="512 tokens an id need 2"):
                read_trace(path)


def test_aiperf_rows_without_lengths_or_times(file: Any) -> None:
    row = {"session_id": "a", "timestamp": 100, "input_length": 20, "output_length": 8}
    path = file(
        lines(
            row,
            {"session_id": "a", "delay": 50, "input_length": 20, "output_length": 8},
            {"session_id": "b", "timestamp": 200, "text_input": "hi", "output_length": 8},
            {"session_id": "b", "timestamp": 200, "input_length": 20},
            {**row, "hash_ids": [1, 2]},
            {**row, "timestamp": 100.5},
        )
    )
    trace = read_trace(path)
    assert trace.format == "aiperf-mooncake"
    assert seconds(trace) == [0.1, 0.1005]
    assert skipped(trace) == {
        "no arrival time": [2],
        NO_TOKENIZER: [3],
        "output_length missing": [4],
        "hash_ids do not match the prompt length": [5],
    }
    made = read_trace(path, arrivals="constant:rate=4")
    assert seconds(made) == [0, 0.25, 0.5]
    assert any("those of 2 rows are not used" in note for note in made.notes)


def test_prompts_as_text_are_refused_with_the_reason(file: Any) -> None:
    said = re.escape(f"no row can be used: {NO_TOKENIZER}: 2 rows, lines 1, 2")
    with pytest.raises(TraceError, match=said):
        read_trace(file(SAMPLES["aiperf-turns"]))


def arrow_file(*rows: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    table = pa.Table.from_pylist([*rows], schema_of(rows[0]))
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def arrow_stream(*rows: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    table = pa.Table.from_pylist([*rows], schema_of(rows[0]))
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


@pytest.mark.parametrize("written", [parquet, arrow_file, arrow_stream])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_baseten_in_every_container(file: Any, written: Any, pack: Any) -> None:
    rows = (
        BASETEN,
        {**BASETEN, "timestamp_start_unix_ms": BASETEN["timestamp_start_unix_ms"] + 1500},
        {**BASETEN, "output_tokens": 0, "request_canceled": 1},
        {**BASETEN, "output_tokens": 2, "request_canceled": 1, "provided_session_id": None},
        {**BASETEN, "input_tokens": 99},
        {**BASETEN, "input_tokens": None},
    )
    trace = read_trace(file(pack(written(*rows))))
    assert trace.format == "baseten"
    assert seconds(trace) == [0, 0, 1.5]
    assert [a.request.session_id for a in trace.arrivals] == ["s", "1", "s"]
    assert [a.request.id for a in trace.arrivals] == ["row-1", "row-4", "row-2"]
    assert skipped(trace) == {
        "output_tokens is zero": [3],
        "hash_ids do not match the prompt length": [5],
        "input_tokens missing": [6],
    }
    assert str(trace.skipped[0]) == "output_tokens is zero: 1 row, row 3"
    assert any(note.startswith("Cancelled by the client") for note in trace.notes)
    content = trace.arrivals[0].request.content
    assert isinstance(content, HashedContent)
    assert content.hash_ids.tolist() == [-1, 5, 6]


def test_other_tables_are_not_baseten(file: Any) -> None:
    out = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), out)
    with pytest.raises(TraceError, match="no column timestamp_start_unix_ms, input_tokens, output"):
        read_trace(file(out.getvalue()))
    with pytest.raises(TraceError, match="cannot be read as Parquet or Arrow") as caught:
        read_trace(file(out.getvalue()[:-30]))
    assert "\n" not in str(caught.value)


def test_vidur_and_splitwise_times_are_seconds(file: Any) -> None:
    vidur = read_trace(file(SAMPLES["vidur"]), strict=True)
    assert (seconds(vidur), lengths(vidur)) == ([0, 0.125], [(100, 10), (200, 20)])
    splitwise = read_trace(file(SAMPLES["splitwise-sim"] + b"2,2,0,3,4,5,6\n"))
    assert (seconds(splitwise), lengths(splitwise)) == ([1.5, 2], [(800, 30), (400, 10)])
    assert [a.request.id for a in splitwise.arrivals] == ["0", "1"]
    assert skipped(splitwise) == {"batch_size is not 1: several prompts in one row": [4]}


def test_blis_prefix_groups_deadlines_and_warm_up(file: Any) -> None:
    path = file(
        SAMPLES["blis"]
        + lines(
            "2,,0,,sys,24,8,10,0,0,3000,3000,ok,,",
            "3,,0,,sys,40,100,10,0,150,4000,4000,ok,,",
            "4,,0,,,0,100,10,0,130,5000,5000,ok,,",
            "5,,0,,,0,100,10,0,0,6000,6000,timeout,late,",
            "6,,0,,,0,100,10,6000,0,7000,7000,ok,,",
        )
    )
    trace = read_trace(path)
    assert seconds(trace) == [0.001, 0.002, 0.003, 0.004, 0.005]
    assert [n for n, _ in lengths(trace)] == [100, 140, 32, 150, 130]
    plain, grouped, short, counted, _ = (a.request for a in trace.arrivals)
    assert (plain.content, plain.deadline_ns, plain.session_id, plain.priority) == (
        None,
        None,
        None,
        0,
    )
    assert (grouped.deadline_ns, grouped.session_id, grouped.priority) == (5_000_000, "s1", 3)
    assert grouped.extra_keys.lora == "tuned"
    keys = [KeyChain(r.content, 8).keys for r in (grouped, short, counted) if r.content]
    assert [len(k) for k in keys] == [5, 3, 5]
    assert keys[0] == keys[2]
    assert keys[0][:2] == keys[1][:2]  # the full pieces of 16 tokens
    assert skipped(trace) == {
        "failed request: status is 'timeout'": [13],
        "deadline_us is not after the arrival": [14],
    }
    assert "Warm-up request of the recording, used like the others: 1 row." in trace.notes
    assert any("not at send_time_us" in note for note in trace.notes)


def test_blis_header_beside_its_rows(tmp_path: Path) -> None:
    header, _, rows = SAMPLES["blis"].partition(b"request_id,")
    (tmp_path / "trace.yaml").write_bytes(header)
    (tmp_path / "trace.csv").write_bytes(b"request_id," + rows)
    trace = read_trace(tmp_path)
    assert (trace.format, trace.num_rows) == ("blis", 2)
    with pytest.raises(TraceError, match="time_unit is 'hours', expected microseconds"):
        read_trace_text(tmp_path / "other", SAMPLES["blis"].replace(b"microseconds", b"hours"))


def read_trace_text(path: Path, content: bytes) -> Trace:
    path.write_bytes(content)
    return read_trace(path)


@pytest.mark.parametrize("name", sorted(WITHOUT_ARRIVALS))
def test_lengths_alone_ask_for_an_arrival_process(file: Any, name: str) -> None:
    path = file(SAMPLES[name])
    with pytest.raises(TraceError, match=r"no arrival time at \w+ 1.*--arrivals \"poisson:rate="):
        read_trace(path)
    stream = stream_trace(path)
    with pytest.raises(TraceError, match="--arrivals"):
        list(stream)
    trace = read_trace(path, arrivals="poisson:rate=2,seed=1")
    assert list(stream_trace(path, arrivals="poisson:rate=2,seed=1")) == trace.arrivals
    assert any(
        "Arrival times are made" in note and "a Poisson process of 2 requests/s, seed 1" in note
        for note in trace.notes
    )


def test_lengths_of_each_result_format(file: Any) -> None:
    def read(name: str) -> Trace:
        return read_trace(file(SAMPLES[name]), arrivals="all-at-once")

    sglang = read("sglang-bench")
    assert lengths(sglang) == [(10, 4), (40, 8)]
    assert skipped(sglang) == {
        "output_lens is zero": [2],
        "failed request": [3],
        "a run without input_lens, output_lens (use --output-details)": [5],
    }
    llmperf = read("llmperf")
    assert lengths(llmperf) == [(550, 150)]
    assert skipped(llmperf) == {"failed request: error_code -100": [2]}
    batch = read("openai-batch")
    assert lengths(batch) == [(12, 5)]
    assert batch.arrivals[0].request.id == "q1"
    assert [*skipped(batch).values()] == [[2], [3]]
    assert "status_code 429" in batch.skipped[0].reason
    assert TEXT_PROMPT in batch.skipped[1].reason


def test_llama_cpp_prompts_include_what_was_cached(file: Any) -> None:
    trace = read_trace(file(SAMPLES["llama.cpp"]), strict=True, arrivals="all-at-once")
    assert lengths(trace) == [(35, 9), (6, 9), (50, 9)]
    assert any("No cache_n" in note and note.endswith(": 1 row.") for note in trace.notes)


def test_vidur_length_statistics_have_no_arrivals(file: Any) -> None:
    path = file(lines("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio", "9,3,12,3"))
    with pytest.raises(TraceError, match="no arrival time at line 2"):
        read_trace(path)
    assert seconds(read_trace(path, strict=True, arrivals="constant:rate=1")) == [0]


def test_arrival_processes() -> None:
    def first(text: str, count: int) -> list[int]:
        return list(itertools.islice(ArrivalProcess.parse(text).times_ns(), count))

    assert first("constant:rate=3", 4) == [0, 333_333_333, 666_666_667, 1_000_000_000]
    assert first("all-at-once", 3) == [0, 0, 0]
    many = first("poisson:rate=2.5,seed=7", 20_000)
    assert many == first("poisson:seed=7,rate=2.5", 20_000)
    assert many != first("poisson:rate=2.5,seed=8", 20_000)
    gaps = np.diff([0, *many]) / 1e9
    assert gaps.mean() == pytest.approx(1 / 2.5, rel=4 / 20_000**0.5)  # four standard errors
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.04)
    assert gaps.min() >= 0
    assert (
        str(ArrivalProcess.parse("poisson:rate=2")) == "a Poisson process of 2 requests/s, seed 0"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "poisson",
        "poisson:rate=0",
        "poisson:rate=-1",
        "poisson:rate=nan",
        "poisson:rate=1,seed=x",
        "poisson:rate=1,seed=1.5",
        "poisson:rate=1,rate=2",
        "constant:rate=1,seed=2",
        "constant:1",
        "all-at-once:rate=1",
        "weibull:rate=1",
        "constant:rate=1e999999999",
    ],
)
def test_processes_that_are_none(file: Any, text: str) -> None:
    with pytest.raises(TraceError, match=r"trace .*: --arrivals .*poisson:rate=R,seed=S"):
        read_trace(file(SAMPLES["vidur"]), arrivals=text)


def test_times_past_64_bits_are_an_error(file: Any) -> None:
    with pytest.raises(TraceError, match="pass 64 bits"):
        read_trace(file(SAMPLES["vidur"]), arrivals="constant:rate=1e-12")


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 200))
def test_a_constant_rate_is_exact(numerator: int, denominator: int, index: int) -> None:
    process = ArrivalProcess("constant", Fraction(numerator, denominator))
    time = next(itertools.islice(process.times_ns(), index, None))
    assert abs(time * numerator - index * 10**9 * denominator) * 2 <= numerator


def ticking(path: Path, times_ms: list[int]) -> Path:
    path.write_bytes(
        lines(
            *(
                {"timestamp": t, "input_length": 100, "output_length": 1, "hash_ids": [i]}
                for i, t in enumerate(times_ms)
            )
        )
    )
    return path


def test_spread_lays_a_tick_out_evenly(tmp_path: Path) -> None:
    path = ticking(tmp_path / "t", [0, 0, 0, 3000, 9000, 9000])
    assert seconds(read_trace(path)) == [0, 0, 0, 3, 9, 9]
    for trace in (read_trace(path, spread=True), stream_trace(path, spread=True)):
        assert isinstance(trace, Trace)
        assert seconds(trace) == [0, 1, 2, 3, 9, 10.5]
        assert [a.request.id for a in trace.arrivals] == [f"line-{i}" for i in range(1, 7)]
        assert any(
            "3 rows with the time of another laid evenly over a tick of 3 s" in n
            for n in trace.notes
        )


def test_spread_that_changes_nothing_says_so(tmp_path: Path) -> None:
    for times, words in (([0, 7], "no two rows"), ([4, 4], "length of a tick is unknown")):
        path = ticking(tmp_path / "t", times)
        trace = read_trace(path, spread=True)
        assert seconds(trace) == [t / 1000 for t in times]
        assert any(words in note for note in trace.notes)
    with pytest.raises(TraceError, match="--spread has no effect"):
        read_trace(path, spread=True, arrivals="all-at-once")


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40))
def test_spread_keeps_order_ticks_and_rows(times: list[int]) -> None:
    (reader,) = (known for known in FORMATS if known.name == "vidur")
    header = "arrived_at,num_prefill_tokens,num_decode_tokens"
    source = io.BytesIO(lines(header, *(f"{t},1,1" for t in sorted(times))))
    rows = [row for row in reader.rows(source) if not isinstance(row, BadRow)]
    spread, _ = spread_ticks(rows)
    assert [r._replace(arrival_ns=0) for r in spread] == [r._replace(arrival_ns=0) for r in rows]
    after = [r.arrival_ns for r in spread if r.arrival_ns is not None]
    assert after == sorted(after)
    if len(set(times)) > 1:
        assert len(set(after)) == len(times)
        tick_ns = int(np.diff(np.unique(times)).min()) * 10**9
        for row, time in zip(rows, after, strict=True):
            assert row.arrival_ns is not None
            assert 0 <= time - row.arrival_ns < tick_ns


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_packed_files_are_read_as_they_are(file: Any, pack: Any) -> None:
    path, packed = file(SAMPLES["vidur"]), file(pack(SAMPLES["vidur"]))
    assert read_trace(packed, strict=True).arrivals == read_trace(path).arrivals
    stream = stream_trace(packed)
    assert isinstance(stream, TraceStream)
    assert list(stream) == read_trace(path).arrivals
    assert stream.sha256 == read_trace(packed).sha256 != read_trace(path).sha256
    with pytest.raises(TraceError, match="is packed, and damaged"):
        read_trace(file(pack(SAMPLES["vidur"] * 5000)[:-10]))


def test_archives_and_zstd_say_what_to_do(file: Any) -> None:
    tar, archive = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w:gz") as out:
        out.addfile(tarfile.TarInfo("a"))
    with zipfile.ZipFile(archive, "w") as out_zip:
        out_zip.writestr("a", "b")
    for content, words in (
        (tar.getvalue(), "is a tar archive: unpack it into a folder first"),
        (archive.getvalue(), "is a zip archive: unpack it first"),
    ):
        with pytest.raises(TraceError, match=words):
            read_trace(file(content))
    if sys.version_info < (3, 14):
        with pytest.raises(TraceError, match=r"packed with zstd, which Python can read from 3\.14"):
            read_trace(file(b"\x28\xb5\x2f\xfd" + bytes(20)))


def shards(folder: Path, **contents: bytes) -> Path:
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


HEADER = b"arrived_at,num_prefill_tokens,num_decode_tokens\n"


def test_shards_are_one_trace_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = shards(
        tmp_path / "f",
        b=HEADER + b"3,30,1\n4,0,1\n5,50,1\n",
        a=gzip.compress(HEADER + b"1,10,1\n"),
        c=b"",
    )
    (folder / ".hidden").write_bytes(b"no trace")
    trace = read_trace(folder)
    assert lengths(trace) == [(10, 1), (30, 1), (50, 1)]
    assert [a.request.id for a in trace.arrivals] == ["line-a:2", "line-b:2", "line-b:4"]
    assert [str(s) for s in trace.skipped] == ["b: num_prefill_tokens is zero: 1 row, line 3"]
    assert trace.num_rows == 4
    assert any(note.startswith("3 files read in the order of their names") for note in trace.notes)
    stream = stream_trace(folder)
    assert isinstance(stream, TraceStream)
    assert list(stream) == trace.arrivals
    assert (stream.sha256, stream.notes, stream.num_rows) == (trace.sha256, trace.notes, 4)
    (folder / "a").rename(folder / "aa")
    assert read_trace(folder).sha256 != trace.sha256
    with pytest.raises(TraceError, match="line 3 of b: num_prefill_tokens is zero"):
        read_trace(folder, strict=True)


def test_shards_that_overlap_are_sorted_and_said(tmp_path: Path) -> None:
    folder = shards(tmp_path / "f", a=HEADER + b"1,1,1\n3,3,1\n", b=HEADER + b"2,2,1\n")
    trace = read_trace(folder)
    assert lengths(trace) == [(1, 1), (2, 1), (3, 1)]
    assert "Sorted by arrival: 1 row below later ones (b: 1 row)." in trace.notes


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (SAMPLES["mooncake"], "more than one format: a is vidur, b is mooncake"),
        (b"README", "b: no known format: it starts with b'README'"),
        (gzip.compress(HEADER, mtime=0)[:-4], "b: is packed, and damaged"),
    ],
    ids=["two formats", "no format", "damaged"],
)
def test_folders_that_are_no_trace(tmp_path: Path, second: bytes, words: str) -> None:
    folder = shards(tmp_path / "f", a=HEADER + b"1,1,1\n", b=second)
    with pytest.raises(TraceError, match=words) as caught:
        read_trace(folder)
    assert str(caught.value).startswith(f"trace {folder}: ")


def test_ids_that_come_twice_are_named_with_their_file(tmp_path: Path) -> None:
    folder = shards(tmp_path / "f", a=SAMPLES["splitwise-sim"], b=SAMPLES["splitwise-sim"])
    trace = read_trace(folder)
    assert skipped(trace) == {"b: duplicate id": [2, 3]}
    assert trace.skipped[0].example == "'0' is at line 2 of a already"


PLUGIN = """
from typing import ClassVar
from traces.formats.base import CsvFormat, Row, field_number, tokens

class Mine(CsvFormat):
    name = "NAME"
    recognised_by = "CSV with in, out"
    units = "tokens; no arrivals"
    clock = "relative"
    prefix_identity = "none"
    licence = "mine"
    required = ("in", "out")

    def parse(self, line, fields):
        numbers = [tokens(field_number(fields, name), name) for name in self.required]
        return Row(line, 0, *numbers)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Installs a package with a format of its own for the time of a test."""

    def install(code: str, target: str = "Mine") -> None:
        folder = tmp_path / "site"
        info = folder / "their_format-1.dist-info"
        info.mkdir(parents=True)
        (folder / "their_format.py").write_text(code)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-format\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            f"[kvplan.trace_formats]\ntheirs = their_format:{target}\n"
        )
        monkeypatch.syspath_prepend(str(folder))
        all_formats.cache_clear()

    yield install
    all_formats.cache_clear()
    sys.modules.pop("their_format", None)


def test_formats_of_other_packages_are_found(file: Any, plugin: Any) -> None:
    path = file(b"in,out\n5,6\n")
    with pytest.raises(TraceError, match="no known format"):
        read_trace(path)
    plugin(PLUGIN.replace("NAME", "theirs"))
    assert lengths(read_trace(path)) == [(5, 6)]
    assert read_trace(path, "theirs").format == "theirs"


@pytest.mark.parametrize(
    ("code", "target", "words"),
    [
        ("1 / 0", "Mine", "theirs .*cannot be loaded: ZeroDivisionError"),
        ("Mine = dict", "Mine", "is not a TraceFormat"),
        (PLUGIN.replace("NAME", "azure"), "Mine", "there is a format azure already"),
        (PLUGIN, "Other", "cannot be loaded: AttributeError"),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_named(
    file: Any, plugin: Any, code: str, target: str, words: str
) -> None:
    plugin(code, target)
    with pytest.raises(TraceError, match=words) as caught:
        read_trace(file(SAMPLES["azure"]))
    assert "\n" not in str(caught.value)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 700),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-1, 9), max_size=3),
    st.lists(st.floats(), max_size=2),
    st.dictionaries(
        st.sampled_from(["usage", "prompt_tokens", "body", "prompt_n", "predicted_n", "cache_n"]),
        st.one_of(st.integers(-1, 50), st.none(), st.text(max_size=2)),
        max_size=3,
    ),
)


def changed_json(content: bytes) -> st.SearchStrategy[bytes]:
    """Lines of a sample with members replaced, removed or of another type."""
    records = [json.loads(line) for line in content.splitlines()]
    keys = sorted({key for record in records for key in record})
    changes = st.dictionaries(st.sampled_from(keys), VALUES, max_size=3)
    line = st.tuples(st.sampled_from(records), changes).map(
        lambda pair: json.dumps({**pair[0], **pair[1]}).encode()
    )
    noise = st.binary(max_size=12).map(lambda data: data.replace(b"\n", b"{"))
    return st.lists(st.one_of(line, noise), max_size=6).map(b"\n".join)


def changed_csv(content: bytes) -> st.SearchStrategy[bytes]:
    """Rows of a sample with fields replaced or lost, below its header."""
    *above, last = content.splitlines()
    header = next(i for i, line in enumerate([*above, last]) if b"okens" in line or b"size" in line)
    field = st.one_of(
        st.sampled_from(["", "0", "-1", "1.5", "1e400", "nan", "9" * 30, "2025-01-01 00:00:00"]),
        st.text(max_size=4).filter(lambda text: "\n" not in text and "\r" not in text),
    )
    fields = last.decode().split(",")
    line = st.lists(st.tuples(st.integers(0, len(fields) - 1), field), max_size=3).map(
        lambda changes: ",".join(
            dict(changes).get(i, text) for i, text in enumerate(fields)
        ).encode()
    )
    top = b"\n".join([*above, last][: header + 1])
    noise = st.binary(max_size=12).map(lambda data: data.replace(b"\n", b",").replace(b"\r", b","))
    return st.lists(st.one_of(line, noise), max_size=6).map(lambda rows: b"\n".join([top, *rows]))


def cut_bytes(content: bytes) -> st.SearchStrategy[bytes]:
    """A sample with some bytes replaced, put in, or lost."""
    places = st.tuples(st.integers(0, len(content)), st.integers(0, 4), st.binary(max_size=4))

    def apply(changes: list[tuple[int, int, bytes]]) -> bytes:
        data = content
        for at, lost, put in changes:
            data = data[:at] + put + data[at + lost :]
        return data

    return st.lists(places, max_size=3).map(apply)


def garbled(name: str) -> st.SearchStrategy[bytes]:
    content = SAMPLES[name]
    if name in ("baseten", "llmperf"):
        return cut_bytes(content)
    rows = changed_json(content) if content.startswith(b"{") else changed_csv(content)
    return st.one_of(rows, cut_bytes(content))


@pytest.mark.parametrize("name", sorted(SAMPLES))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), insisted=st.booleans())
def test_any_bytes_end_in_rows_or_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject, insisted: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / f"fuzz-{name}"
    content = data.draw(garbled(name))
    path.write_bytes(content)
    format_name = name if insisted else None
    try:
        trace = read_trace(path, format_name, arrivals="all-at-once")
    except TraceError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - any of many messages
        assert str(error).startswith(f"trace {path}: ")  # noqa: PT017
        return
    rows = list(iter_rows(path, format_name))
    assert trace.num_rows == len(rows) == len(trace.arrivals) + trace.num_skipped
    bad = sorted(row.line for row in rows if isinstance(row, BadRow))
    named = [n for s in trace.skipped if s.reason != "duplicate id" for n in s.lines]
    assert sorted(named) == bad
    if trace.format == name and name not in COUNTED_OTHERWISE:
        num_lines = sum(
            bool(line.strip()) for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        )
        num_headers = isinstance(by_name(trace.format), CsvFormat)
        assert trace.num_rows == num_lines - num_headers


@pytest.mark.parametrize(
    ("name", "arrivals", "rows", "used", "span_s", "medians"),
    [
        ("burstgpt/BurstGPT_1_first400.csv", None, 400, 383, 37_269, (353, 238)),
        ("burstgpt/burstgpt3_EXCERPT_12rows.csv", None, 12, 12, 1_429, None),
        ("vidur/splitwise_code.csv", None, 8_819, 8_819, 3_435.948, (1_469, 13)),
        ("vidur/splitwise_conv.csv", None, 19_366, 19_366, 3_501.722, (1_020, 129)),
        (
            "vidur/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
            "all-at-once",
            28_257,
            28_257,
            0,
            (2_730, 167),
        ),
        (
            "sarathi/sharegpt_8k_filtered_stats_llama2_tokenizer.csv",
            "all-at-once",
            30_731,
            30_731,
            0,
            (1_730, 415),
        ),
        ("misc/splitwise_sim_test_trace.csv", None, 3, 3, 3, (2_048, 16)),
        ("misc/precise_schedule.jsonl", None, 8, 8, 5, None),
        ("misc/production_trace.jsonl", None, 10, 9, 1.5, None),
        ("llmperf_leaderboard/bedrock_70b.json", "all-at-once", 150, 101, 0, None),
        ("llmperf_leaderboard/groq_70b.json", "all-at-once", 150, 150, 0, None),
    ],
)
def test_public_files_give_the_published_figures(
    shared: Path,
    name: str,
    arrivals: str | None,
    rows: int,
    used: int,
    span_s: float,
    medians: tuple[float, float] | None,
) -> None:
    trace = read_trace(shared / "traces" / name, arrivals=arrivals)
    assert (trace.num_rows, len(trace.arrivals)) == (rows, used)
    assert trace.span_ns / 1e9 == pytest.approx(span_s, abs=1e-3)
    if medians is not None:
        assert tuple(np.median(np.array(lengths(trace)), axis=0)) == medians


def test_mooncake_ticks_are_spread(shared: Path) -> None:
    trace = read_trace(shared / "traces/mooncake/conversation_trace.jsonl", spread=True)
    times = [arrival.request.arrival_ns for arrival in trace.arrivals]
    assert len(trace.arrivals) == 12_031 == len(set(times))
    assert times == sorted(times)
