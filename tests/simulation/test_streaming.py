"""A trace that is read while it is served: the same requests, the same record, little memory."""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.run import run
from simulator.settings import Options, resolve
from tests.simulation.command import command, one_line, row, write_trace
from tests.simulation.helpers import assert_same_record
from traces import (
    NotStreamableError,
    Trace,
    TraceError,
    TraceStream,
    default_trace_path,
    read_trace,
    stream_trace,
)

ROWS = st.lists(
    st.one_of(
        st.builds(
            row,
            st.sampled_from([0, 0.5, 0.5, 1, 2.25, 9, 1.7e9]),
            st.integers(1, 60),
            st.integers(1, 9),
            id=st.one_of(st.none(), st.sampled_from(["a", "b", "line-2", "~line-1", "7"])),
            max_tokens=st.sampled_from([None, 3]),
            colour=st.sampled_from([None, "red"]),
        ).map(lambda fields: {k: v for k, v in fields.items() if v is not None}),
        st.sampled_from(["{", "[]", '{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}']),
    ),
    min_size=1,
    max_size=12,
)
ABOUT = ("path", "format", "sha256", "num_rows", "num_requests", "span_ns", "skipped", "notes",
         "has_identity")  # fmt: skip


def streamed(path: Path, **options: Any) -> TraceStream:
    stream = stream_trace(path, **options)
    assert isinstance(stream, TraceStream)
    return stream


def outcome(work: Callable[[], object]) -> str | None:
    """What a trace is refused for."""
    try:
        work()
    except TraceError as error:
        return str(error)
    return None


@settings(deadline=None, max_examples=200)
@given(ROWS, st.booleans())
def test_a_stream_is_the_trace_or_says_that_it_cannot_be(rows: list[Any], strict: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_trace(Path(folder) / "trace.jsonl", [row(0, 1, 1), *rows])
        stream = streamed(path, strict=strict)
        refusal = outcome(lambda: read_trace(path, strict=strict))
        try:
            arrivals = list(stream)
        except NotStreamableError:
            seen = [(r["arrival_s"], r.get("id")) for r in rows if isinstance(r, dict)]
            times, ids = [time for time, _ in seen], [name for _, name in seen if name is not None]
            assert times != sorted(times) or len({*ids}) < len(ids) or "line-2" in ids
            return
        except TraceError:
            assert outcome(lambda: list(stream)) == refusal
            return
        assert refusal is None
        trace = read_trace(path, strict=strict)
        assert arrivals == trace.arrivals == list(stream)
        for name in ABOUT:
            assert getattr(stream, name) == getattr(trace, name), name


@pytest.mark.parametrize("compiled", [None, False])
@pytest.mark.parametrize(
    "last",
    [
        row(61, 9, 9),
        row(3, 9, 9, id="out of order"),
        row(61, 9, 9, deadline_s=1),
        row(61, 9, 9, n=3),
        row(61, 10**6, 9),
    ],
)
def test_record_is_that_of_the_whole_trace(
    tmp_path: Path, last: dict[str, Any], compiled: bool | None
) -> None:
    """Long enough for the compiled loop; the last row may be one that it cannot do, or the
    stream."""
    rows = [row(i / 100, 10 + i % 7, 1 + i % 5) for i in range(6000)]
    path = write_trace(tmp_path / "trace.jsonl", [*rows, last])
    setup = resolve(Options(kv_gb="1", cost_model="constant:10ms"))
    whole = run(setup, read_trace(path), compiled=False)
    result = run(setup, stream_trace(path), compiled=compiled)
    assert_same_record(result.record, whole.record)
    assert result.asked == whole.asked
    assert isinstance(result.trace, Trace) == (last.get("id") == "out of order")


def test_a_trace_that_must_be_sorted_says_so(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [row(1, 5, 5), row(0, 5, 5), row(2, 5, 5)])
    done = command("--trace", path, "--kv-gb", "1")
    assert done.code == 0
    assert "Sorted by arrival: 1 row below later ones (line 2)." in one_line(done.out)


def test_reading_and_serving_hold_a_window_of_the_trace(tmp_path: Path) -> None:
    """Ten times the rows, and not twice the memory beyond their ids and results."""
    setup = resolve(Options(kv_gb="1", cost_model="constant:10ms"))
    peaks = []
    for count in (3_000, 30_000):
        path = tmp_path / f"{count}.jsonl"
        with path.open("w") as file:
            for i in range(count):
                file.write(json.dumps(row(i // 4, 20, 3, session_id=f"session {i}")) + "\n")
        stream = streamed(path)
        for _ in stream:  # whatever is loaded once is not counted
            break
        tracemalloc.start()
        num_tokens = sum(request.num_prompt_tokens for request, _ in stream)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert num_tokens == 20 * count
    assert peaks[1] < 2 * peaks[0] + 8 * 30_000
    assert run(setup, stream).record.summary["requests"]["completed"] == 30_000


def test_the_shipped_trace_streams() -> None:
    stream = streamed(default_trace_path(), strict=True)
    assert len(list(stream)) == stream.num_requests == 2962
