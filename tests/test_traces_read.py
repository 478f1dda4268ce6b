"""Formats: recognised by content, parsed exactly, nothing lost."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockmanager.content import HashedContent, KeyChain, TokenContent
from traces import Trace, TraceError, default_trace_path, iter_rows, read_trace
from traces.formats import FORMATS, detect
from traces.formats.base import BadRow, Head, Row

NATIVE = {"arrival_s": 0, "prompt_tokens": 8, "output_tokens": 4}


def write(folder: Path, *lines: str | dict[str, Any], name: str = "trace") -> Path:
    path = folder / name
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    return path


def native(folder: Path, *changes: dict[str, Any], **options: Any) -> Trace:
    return read_trace(write(folder, *({**NATIVE, **change} for change in changes)), **options)


def native_line(arrival_s: str) -> str:
    """A row whose time is written in exactly these characters."""
    return f'{{"arrival_s": {arrival_s}, "prompt_tokens": 1, "output_tokens": 1}}'


def arrivals_ns(trace: Trace) -> list[int]:
    return [arrival.request.arrival_ns for arrival in trace.arrivals]


def skipped(trace: Trace) -> dict[str, list[int]]:
    return {group.reason: group.lines for group in trace.skipped}


TR_01 = (
    {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 27482, "input_length": 6755, "output_length": 500, "hash_ids": [*range(14)]},
    {"timestamp": 30000, "input_length": 20, "output_length": 8, "hash_ids": [0, 1]},
)


def test_tr_01_mooncake_times_are_ms_and_a_hash_id_covers_512_tokens(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, *TR_01))
    assert trace.format == "mooncake"
    assert arrivals_ns(trace) == [0, 27_482_000_000]
    assert skipped(trace) == {"hash_ids do not match the prompt length": [3]}
    assert trace.skipped[0].example == "2 ids for 20 tokens, 512 tokens an id need 1"
    first, second = (
        KeyChain(arrival.request.content, 16).keys
        for arrival in trace.arrivals
        if arrival.request.content is not None
    )
    shared_keys = [a for a, b in zip(first, second, strict=False) if a == b]
    assert len(shared_keys) == len(first) == 1024 // 16 == 64
    assert len(second) == 6755 // 16


def test_tr_01_strict_refuses_with_the_line_number(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 3: hash_ids do not match"):
        read_trace(write(tmp_path, *TR_01), strict=True)


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=2, max_size=5),
    size=st.integers(1, 7),
    block_size=st.integers(1, 9),
)
def test_prefix_identity_holds_at_any_engine_block_size(
    prompts: list[list[int]], size: int, block_size: int
) -> None:
    """Equal keys mean equal tokens, and equal full ids mean equal keys."""
    names: dict[tuple[int, ...], int] = {}
    seen: dict[bytes, tuple[int, ...]] = {}
    keys_of: dict[tuple[tuple[int, ...], int], bytes] = {}
    for prompt in prompts:
        ends = [min(end, len(prompt)) for end in range(size, len(prompt) + size, size)]
        ids = [names.setdefault(tuple(prompt[:end]), len(names)) for end in ends]
        content = HashedContent(np.array(ids, dtype=np.int64), size, len(prompt))
        for index, key in enumerate(KeyChain(content, block_size).keys, 1):
            prefix = tuple(prompt[: index * block_size])
            assert seen.setdefault(key, prefix) == prefix
            covering = size * -(-index * block_size // size)
            if covering <= len(prompt):
                where = tuple(prompt[:covering]), index
                assert keys_of.setdefault(where, key) == key


def test_azure_keeps_seven_decimals_crlf_and_no_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "no-suffix"
    path.write_bytes(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        b"2023-11-16 23:59:59.9799601,4808,10\r\n"
        b"2023-11-17 00:00:00.0000000,3180,8"
    )
    trace = read_trace(path)
    assert trace.format == "azure"
    assert arrivals_ns(trace) == [0, 20_039_900]
    assert [arrival.output_tokens for arrival in trace.arrivals] == [10, 8]
    assert [arrival.request.id for arrival in trace.arrivals] == ["line-2", "line-3"]


def test_azure_rows_that_are_not_rows(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:00:00,10,1",
        "2023-02-30 18:00:00,10,1",
        "2023-11-16 18:00:61,10,1",
        "2023-11-16 18:00:00",
        "2023-11-16 18:00:00,nan,1",
        "2023-11-16 18:00:00,10,1.5",
        "2023-11-16 18:00:00,10,-1",
        '"2023-11-16 18:00:00,10,1',
        "2024-05-10 00:00:00.009930+00:00,1,1",
    )
    trace = read_trace(path)
    assert skipped(trace) == {
        "TIMESTAMP is not a date and time": [3, 4],
        "not the header's number of fields": [5, 9],
        "ContextTokens is not a finite number": [6],
        "GeneratedTokens is not a whole number": [7],
        "GeneratedTokens is negative": [8],
    }
    assert trace.num_rows == 9 == len(trace.arrivals) + trace.num_skipped


def test_sv_01_of_rows_with_one_id_the_first_is_kept(tmp_path: Path) -> None:
    trace = native(tmp_path, {"id": "r", "prompt_tokens": 7}, {"id": "q"}, {"id": "r"}, {"id": "r"})
    assert [arrival.request.id for arrival in trace.arrivals] == ["r", "q"]
    assert trace.arrivals[0].request.num_prompt_tokens == 7
    assert skipped(trace) == {"duplicate id": [3, 4]}
    assert trace.skipped[0].example == "'r' is at line 1 already"


def test_sv_01_made_ids_never_meet_given_ones(tmp_path: Path) -> None:
    trace = native(tmp_path, {"id": "line-2"}, {}, {"id": 7}, {})
    ids = [arrival.request.id for arrival in trace.arrivals]
    assert ids == ["line-2", "~line-2", "7", "~line-4"]


def test_si_05_thirty_days_at_microseconds_are_exact(tmp_path: Path) -> None:
    lines = (
        native_line(text)
        for text in ("0", "0.1", "0.3", "2591999.999999", "2592000.000000", "27.482", "1e-9")
    )
    trace = read_trace(write(tmp_path, *lines))
    assert arrivals_ns(trace) == [
        0,
        1,
        100_000_000,
        300_000_000,
        27_482_000_000,
        2_591_999_999_999_000,
        2_592_000_000_000_000,
    ]


@given(st.integers(0, 10**8 * 10**9), st.integers(0, 4))
def test_decimal_seconds_are_integer_nanoseconds(time_ns: int, zeros: int) -> None:
    (reader,) = (known for known in FORMATS if known.name == "native")
    text = f"{Decimal(time_ns).scaleb(-9):f}" + ("0" * zeros if time_ns % 10**9 else "")
    (row,) = reader.rows(io.BytesIO(native_line(text).encode()))
    assert isinstance(row, Row)
    assert row.arrival_ns == time_ns


def test_digits_finer_than_a_nanosecond_round_to_even(tmp_path: Path) -> None:
    lines = (native_line(text) for text in ("0.0000000005", "0.0000000015", "0.30000000000000004"))
    assert arrivals_ns(read_trace(write(tmp_path, *lines))) == [0, 2, 300_000_000]


def test_si_11_equal_lengths_are_not_equal_content(tmp_path: Path) -> None:
    trace = read_trace(
        write(
            tmp_path,
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2023-11-16 18:00:00,512,10",
            "2023-11-16 18:00:01,512,10",
        )
    )
    assert [arrival.request.content for arrival in trace.arrivals] == [None, None]
    assert not trace.has_identity
    assert any("Prefix identity unknown" in note for note in trace.notes)


def test_native_row_with_everything(tmp_path: Path) -> None:
    trace = native(
        tmp_path,
        {
            "arrival_s": 1.5,
            "id": "a",
            "n": 2,
            "priority": -3,
            "session_id": 12,
            "deadline_s": 2.25,
            "max_tokens": 9,
            "lora": "L",
            "salt": "S",
            "token_ids": [*range(8)],
            "hash_ids": None,
        },
    )
    request, output_tokens, _ = trace.arrivals[0]
    assert (request.id, request.arrival_ns, request.n, request.priority) == (
        "a",
        1_500_000_000,
        2,
        -3,
    )
    assert (request.session_id, request.deadline_ns) == ("12", 3_750_000_000)
    assert (request.max_tokens, output_tokens) == (9, 4)
    assert (request.extra_keys.lora, request.extra_keys.salt) == ("L", "S")
    assert isinstance(request.content, TokenContent)
    assert request.content.token_ids.tolist() == [*range(8)]
    assert trace.notes == []


def test_a_plain_native_row_has_no_limits(tmp_path: Path) -> None:
    ((request, _, _),) = native(tmp_path, {}).arrivals
    assert (request.max_tokens, request.deadline_ns, request.session_id) == (None, None, None)


@pytest.mark.parametrize(
    ("hash_ids", "covered"), [([1, 2, 3], 40), ([1, 2], 32), ([1], None), ([1, 2, 3, 4], None)]
)
def test_native_hash_ids_round_up_or_down(
    tmp_path: Path, hash_ids: list[int], covered: int | None
) -> None:
    row = {"prompt_tokens": 40, "hash_block_size": 16, "hash_ids": hash_ids}
    trace = native(tmp_path, {}, row)
    if covered is None:
        assert skipped(trace) == {"hash_ids do not match the prompt length": [2]}
        return
    content = trace.arrivals[1].request.content
    assert content is not None
    assert content.num_tokens == covered


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arrival_s": -1}, "arrival_s is negative"),
        ({"arrival_s": -1e-12}, "arrival_s is negative"),
        ({"arrival_s": float("nan")}, "arrival_s is not a finite number"),
        ({"arrival_s": float("inf")}, "arrival_s is not a finite number"),
        ({"arrival_s": "1"}, "arrival_s is not a number"),
        ({"arrival_s": True}, "arrival_s is not a number"),
        ({"arrival_s": 1e11}, "arrival_s is out of range"),
        ({"arrival_s": 10**11}, "arrival_s is out of range"),
        ({"arrival_s": None}, "arrival_s missing"),
        ({"prompt_tokens": 0}, "prompt_tokens is zero"),
        ({"prompt_tokens": -3}, "prompt_tokens is negative"),
        ({"prompt_tokens": 1.5}, "prompt_tokens is not a whole number"),
        ({"prompt_tokens": 2**63}, "prompt_tokens is out of range"),
        ({"output_tokens": 0}, "output_tokens is zero"),
        ({"output_tokens": 2**31}, "output_tokens is out of range"),
        ({"n": 0}, "n is zero"),
        ({"deadline_s": 0}, "deadline_s is out of range"),
        ({"arrival_s": 9e9, "deadline_s": 9e9}, "deadline_s is out of range"),
        ({"max_tokens": 0}, "max_tokens is zero"),
        ({"id": ""}, "id is neither text nor an integer"),
        ({"id": "\ud800"}, "id is not valid text"),
        ({"priority": 2**40}, "priority is out of range"),
        ({"token_ids": [1]}, "token_ids do not match prompt_tokens"),
        ({"token_ids": [True] * 8}, "token_ids holds something that is not an integer"),
        ({"token_ids": 8}, "token_ids is not a list"),
        ({"hash_ids": [1]}, "hash_ids without hash_block_size"),
        ({"hash_ids": [1], "hash_block_size": 0}, "hash_block_size is zero"),
        (
            {"hash_ids": [2**64], "hash_block_size": 8},
            "hash_ids holds an integer of more than 64 bits",
        ),
        ({"hash_ids": [1], "hash_block_size": 8, "token_ids": [1]}, "both token_ids and hash_ids"),
    ],
)
def test_bad_native_rows_are_named_and_the_rest_goes_on(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    trace = native(tmp_path, {}, change, {})
    assert skipped(trace) == {reason: [2]}
    assert len(trace.arrivals) == 2
    with pytest.raises(TraceError, match=f"line 2: {reason}"):
        native(tmp_path, {}, change, {}, strict=True)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("1" * 5_000, "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"arrival_s": 1e9999999999999999999, "x": 1}', "number out of range"),
        ('{"arrival_s": 1e999999999, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s is out"),
        ('{"arrival_s": 1}', "output_tokens, prompt_tokens missing"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: str, reason: str) -> None:
    trace = read_trace(write(tmp_path, json.dumps(NATIVE), line, json.dumps(NATIVE)))
    ((named, lines),) = skipped(trace).items()
    assert named.startswith(reason)
    assert lines == [2]


def test_unsorted_rows_are_sorted_and_ties_keep_their_order(tmp_path: Path) -> None:
    times = {"a": 5, "b": 1, "c": 5, "d": 1, "e": 9}
    rows = [{"id": name, "arrival_s": time} for name, time in times.items()]
    trace = native(tmp_path, *rows)
    assert [arrival.request.id for arrival in trace.arrivals] == ["b", "d", "a", "c", "e"]
    assert "Sorted by arrival: 2 rows below later ones (lines 2, 4)." in trace.notes
    with pytest.raises(TraceError, match="line 2: arrives before a row above it"):
        native(tmp_path, *rows, strict=True)


def test_unknown_keys_are_counted(tmp_path: Path) -> None:
    trace = native(tmp_path, {"model": "x"}, {"model": "x", "user": "y"}, {})
    assert "Unknown keys ignored: model (2 rows), user (1 row)." in trace.notes
    with pytest.raises(TraceError, match="line 1: unknown keys model"):
        native(tmp_path, {"model": "x"}, strict=True)


def test_a_unix_clock_is_shifted_and_said(tmp_path: Path) -> None:
    trace = native(
        tmp_path, {"arrival_s": 1_700_000_001, "deadline_s": 3}, {"arrival_s": 1_700_000_000}
    )
    assert arrivals_ns(trace) == [0, 1_000_000_000]
    assert trace.arrivals[1].request.deadline_ns == 4_000_000_000
    assert any("Unix clock" in note for note in trace.notes)
    assert arrivals_ns(native(tmp_path, {"arrival_s": 86_400})) == [86_400_000_000_000]


def test_formats_are_recognised_by_content(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, "", "{", NATIVE, name="a.csv")).format == "native"
    bom = tmp_path / "bom.json"
    bom.write_bytes(b"\xef\xbb\xbf" + json.dumps(NATIVE).encode())
    assert read_trace(bom, strict=True).format == "native"
    azure = write(tmp_path, "GeneratedTokens,TIMESTAMP,ContextTokens", "1,2023-11-16 18:00:00,2")
    assert read_trace(azure).arrivals[0].output_tokens == 1


def test_mooncake_without_ids_is_not_guessed(tmp_path: Path) -> None:
    """Nothing says that its times are milliseconds; --format may."""
    path = write(tmp_path, {"timestamp": 2, "input_length": 5, "output_length": 6})
    with pytest.raises(TraceError, match="no known format"):
        read_trace(path)
    trace = read_trace(path, "mooncake")
    assert arrivals_ns(trace) == [2_000_000]
    assert not trace.has_identity


def test_every_format_describes_itself() -> None:
    assert len({known.name for known in FORMATS}) == len(FORMATS)
    for known in FORMATS:
        assert known.recognised_by
        assert known.units
        assert known.licence
        assert known.prefix_identity
        assert known.match(Head([])) == 0
    assert detect(Head([b"\xff\x00", b"{}"])) is None


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(json.dumps(NATIVE).encode())[:-9])
    other = write(tmp_path, "a,b,c", "1,2,3", name="other")
    useless = write(tmp_path, {**NATIVE, "output_tokens": 0}, name="useless")
    header = write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", name="header")
    for path, insisted, message in (
        (tmp_path / "nosuch", None, "nosuch: no such file"),
        (folder, None, "is a folder without files"),
        (empty, None, "is empty"),
        (packed, None, "is packed, and damaged"),
        (other, None, r"starts with b'a,b,c\\n1,2,3\\n'; known are native, .*azure, mooncake"),
        (other, "azure", "no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        (other, "parquet", "no trace format 'parquet'; there are native, .*azure, mooncake"),
        (useless, None, "no row can be used: output_tokens is zero: 1 row, line 1"),
        (header, None, "it holds no rows"),
    ):
        with pytest.raises(TraceError, match=message) as caught:
            read_trace(path, insisted)
        assert "\n" not in str(caught.value)


def test_a_pipe_can_be_read(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    text = json.dumps(NATIVE)
    writer = threading.Thread(target=fifo.write_text, args=(text,))
    writer.start()
    trace = read_trace(fifo)
    writer.join()
    assert trace.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert len(trace.arrivals) == 1


LINES = st.one_of(
    st.just(json.dumps(NATIVE).encode()),
    st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"{")),
    st.fixed_dictionaries(
        {},
        optional={
            "arrival_s": st.one_of(st.integers(-5, 5), st.floats(), st.just("1")),
            "prompt_tokens": st.one_of(st.integers(-1, 3), st.integers(), st.none()),
            "output_tokens": st.one_of(st.integers(-1, 3), st.floats(), st.booleans()),
            "id": st.sampled_from(["a", "b", 1, None, ""]),
            "hash_ids": st.lists(st.integers(0, 3), max_size=2),
            "hash_block_size": st.integers(0, 3),
            "other": st.integers(),
        },
    ).map(lambda record: json.dumps(record).encode()),
)


@given(lines=st.lists(LINES, max_size=12), ending=st.sampled_from([b"\n", b"\r\n"]))
def test_rows_in_are_rows_out_and_rows_skipped(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ending: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "arbitrary"
    lines = [json.dumps(NATIVE).encode(), *lines]
    path.write_bytes(ending.join(lines))
    trace = read_trace(path)
    num_rows = sum(bool(line.strip()) for line in lines)
    assert trace.num_rows == num_rows == len(trace.arrivals) + trace.num_skipped
    assert arrivals_ns(trace) == sorted(arrivals_ns(trace))
    ids = [arrival.request.id for arrival in trace.arrivals]
    assert len(set(ids)) == len(ids)
    streamed = list(iter_rows(path))
    assert len(streamed) == num_rows
    bad = [row.line for row in streamed if isinstance(row, BadRow)]
    named = [
        line for reason, at in skipped(trace).items() if reason != "duplicate id" for line in at
    ]
    assert sorted(named) == bad


def test_the_shipped_trace_is_clean() -> None:
    trace = read_trace(default_trace_path(), strict=True)
    assert trace.format == "native"
    assert trace.has_identity
    assert trace.notes == []


@pytest.mark.parametrize(
    ("name", "rows", "span_ns"),
    [
        ("azure2023/AzureLLMInferenceTrace_code.csv", 8_819, 3_435_948_056_000),
        ("azure2023/AzureLLMInferenceTrace_conv.csv", 19_366, 3_501_721_937_000),
        ("mooncake/conversation_trace.jsonl", 12_031, 3_536_999_000_000),
        ("mooncake/synthetic_trace.jsonl", 3_993, None),
    ],
)
def test_public_traces_are_read_whole(
    shared: Path, name: str, rows: int, span_ns: int | None
) -> None:
    trace = read_trace(shared / "traces" / name, strict=True)
    assert trace.num_rows == len(trace.arrivals) == rows
    assert trace.format == name[: len(trace.format)]
    assert arrivals_ns(trace)[0] == 0
    if span_ns is not None:
        assert arrivals_ns(trace)[-1] == span_ns
