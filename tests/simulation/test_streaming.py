"""A trace that is read while it is served: the same requests, the same record, little memory."""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.kernel_run import WINDOW_REQUESTS
from simulator.run import run
from simulator.settings import Options, resolve
from tests.simulation.command import command, one_line, row, write_trace
from tests.simulation.helpers import assert_same_record
from traces import (
    Arrival,
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


def test_who_is_refused_keeps_its_place_at_the_end_of_a_window(tmp_path: Path) -> None:
    """The window ends with a step under way; the next row is refused before that step is over."""
    rows = [row(i / 1000, 5, 1) for i in range(WINDOW_REQUESTS)]
    refused = row(WINDOW_REQUESTS / 1000 - 0.0005, 10**6, 1, id="refused")
    path = write_trace(tmp_path / "t.jsonl", [*rows, refused, row(66, 5, 1)])
    setup = resolve(Options(kv_gb="1", cost_model="constant:10ms"))
    compiled, simple = (run(setup, stream_trace(path), compiled=c) for c in (None, False))
    assert_same_record(compiled.record, simple.record)


@pytest.mark.parametrize("compiled", [None, False])
def test_serving_holds_a_window_of_the_trace(tmp_path: Path, compiled: bool | None) -> None:
    """Prompts with long lists of hash ids, which no result keeps: most must be gone by the time that
    the last is read."""
    count, ids = 20_000, list(range(300))
    path = tmp_path / "t.jsonl"
    with path.open("w") as file:
        for i in range(count):
            fields = row(i / 100, 4800, 1, hash_ids=ids, hash_block_size=16)
            file.write(json.dumps(fields) + "\n")
    setup = resolve(Options(kv_gb="1", cost_model="constant:1ms", enable_prefix_caching=False))
    run(setup, stream_trace(default_trace_path()), compiled=compiled)  # loads what is loaded once
    tracemalloc.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("simulator.kernel_run.WINDOW_REQUESTS", 1000)
        patch.setattr("simulator.run.WORTH_COMPILING", 1000)
        result = run(setup, stream_trace(path), compiled=compiled)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.record.summary["requests"]["completed"] == count
    assert peak < 0.6 * count * 8 * len(ids)


def test_a_file_that_changes_is_an_error(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [row(i, 5, 5) for i in range(6000)])
    stream = streamed(path)

    def read() -> None:
        for number, _ in enumerate(stream):
            if number == 100:
                write_trace(path, [row(i, 5, 5) for i in range(5000)])

    with pytest.raises(TraceError, match="was changed while it was read"):
        read()
    with pytest.raises(TraceError, match="has been changed since it was first looked at"):
        list(stream)


def test_a_change_that_cannot_be_tried_leaves_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_trace(tmp_path / "t.jsonl", [row(i / 10, 500, 200) for i in range(300)])
    plain = TraceStream.__iter__

    def once(self: TraceStream) -> Iterator[Arrival]:
        yield from plain(self)
        path.unlink()

    monkeypatch.setattr(TraceStream, "__iter__", once)
    done = command("--trace", path, "--num-gpu-blocks", 300, "--try-change", "--no-bands")
    assert done.code == 0
    assert "Verdict" in done.out
    assert "could not be run: trace" in done.out


def test_more_outputs_than_a_request_may_have_are_a_bad_row(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [row(0, 5, 5, n=20_000), row(1, 5, 5)])
    done = command("--trace", path, "--kv-gb", "1")
    assert done.code == 0
    assert "n is out of range (20000, at most 16384): 1 row, line 1" in one_line(done.out)


def test_strict_looks_at_all_requests_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_trace(tmp_path / "t.jsonl", [row(0, 5, 5), row(1, 10**6, 5, id="huge")])
    setup = resolve(Options(kv_gb="1"))
    monkeypatch.setattr("simulator.run.simulate", None)
    with pytest.raises(TraceError, match="huge would be refused"):
        run(setup, stream_trace(path), strict=True)


def test_warm_start_looks_at_the_whole_trace(tmp_path: Path) -> None:
    known = {"hash_ids": [1], "hash_block_size": 16}
    path = write_trace(tmp_path / "t.jsonl", [row(0, 16, 5), row(1, 16, 5, **known)])
    setup = resolve(Options(kv_gb="1", warm_start=1))
    assert isinstance(run(setup, stream_trace(path)).trace, Trace)
    unknown = write_trace(tmp_path / "u.jsonl", [row(0, 16, 5)])
    with pytest.raises(TraceError, match="does not say which prefixes are equal"):
        run(setup, stream_trace(unknown))


def test_progress_is_the_share_of_the_load(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [row(i / 100, 5, 5) for i in range(20_000)])
    setup = resolve(Options(kv_gb="1", cost_model="constant:10ms"))
    seen: list[tuple[int, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("simulator.kernel_run.WINDOW_REQUESTS", 1000)
        run(setup, stream_trace(path), on_progress=lambda done, share: seen.append((done, share)))
    assert seen[-1] == (20_000, 1.0)
    assert all(abs(share - done / 20_000) < 0.3 for done, share in seen)


def test_reading_holds_no_rows(tmp_path: Path) -> None:
    """Ten times the rows, and not twice the memory beyond their arrival times."""
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
        num_tokens = sum(arrival.request.num_prompt_tokens for arrival in stream)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert num_tokens == 20 * count
    assert peaks[1] < 2 * peaks[0] + 8 * 30_000


def test_the_shipped_trace_streams() -> None:
    stream = streamed(default_trace_path(), strict=True)
    assert len(list(stream)) == stream.num_requests == 2962
