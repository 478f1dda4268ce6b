"""The run record: column stores, pooled gaps, and the folder on disk."""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from records.columns import (
    REQUEST_SCHEMA,
    STEP_SCHEMA,
    Columns,
    ColumnStore,
    RequestRow,
    SpillError,
    StepRow,
    exact_sum,
    request_store,
    step_store,
)
from records.gaps import GapCounts
from records.run import RecordError, RunRecord, check_writable

MS = 1_000_000
S = 1_000_000_000


def request_row(**changes: Any) -> RequestRow:
    """A completed request: arrival 0, first token at 10 ms, 11 outputs, 10 ms apart."""
    row = RequestRow(
        id="r",
        arrival_ns=0,
        first_scheduled_ns=0,
        first_token_ns=10 * MS,
        finish_ns=110 * MS,
        prompt_tokens=64,
        cached_tokens=0,
        output_tokens=11,
        recomputed_tokens=0,
        refound_tokens=0,
        preemptions=0,
        num_samples=1,
        decode_ns=100 * MS,
        decode_gaps=10,
        max_gap_ns=10 * MS,
        priority=0,
        session_id=None,
        status="completed",
        finish_reason="length",
        replica=0,
    )
    return row._replace(**changes)


def failed_row(status: str, **changes: Any) -> RequestRow:
    """A request that never got a token."""
    return request_row(
        status=status, first_scheduled_ns=None, first_token_ns=None, finish_ns=None,
        output_tokens=0, decode_ns=0, decode_gaps=0, max_gap_ns=0, finish_reason="",
    )._replace(**changes)  # fmt: skip


def step_row(**changes: Any) -> StepRow:
    """A decode step of 10 ms with two sequences."""
    row = StepRow(
        start_ns=0, duration_ns=10 * MS, prefill_tokens=0, decode_tokens=2, context_tokens=100,
        num_seqs=2, running=2, waiting=0, blocks_used=5, preemptions=0, copies=0, transfers=0,
        blocked_by=0, flops=0.0, bytes=0.0, replica=0,
    )  # fmt: skip
    return row._replace(**changes)


def requests_of(*rows: RequestRow) -> Columns:
    store = request_store()
    for row in rows:
        store.append(row)
    return store.columns()


def steps_of(*rows: StepRow) -> Columns:
    store = step_store()
    for row in rows:
        store.append(row)
    return store.columns()


def record_of(requests: Columns, steps: Columns | None = None, **changes: Any) -> RunRecord:
    fields = {"settings": {"model": "m"}, "gaps": GapCounts(), "summary": {"makespan_s": 1.5}}
    return RunRecord(requests=requests, steps=steps, **{**fields, **changes})


def assert_equal_columns(got: Columns, want: Columns) -> None:
    assert got.keys() == want.keys()
    for name, column in want.items():
        if isinstance(column, list):
            assert got[name] == column, name
        else:
            assert got[name].dtype == column.dtype, name
            mask = np.ma.getmaskarray(column)
            np.testing.assert_array_equal(np.ma.getmaskarray(got[name]), mask)
            np.testing.assert_array_equal(np.ma.getdata(got[name]), np.ma.getdata(column))


# Column stores


def test_schemas_follow_the_rows() -> None:
    assert tuple(STEP_SCHEMA) == StepRow._fields
    assert tuple(REQUEST_SCHEMA) == RequestRow._fields


def test_rows_come_back_past_several_growths() -> None:
    store = step_store()
    for i in range(10_000):
        store.append(step_row(start_ns=i, flops=i / 4))
    columns = store.columns()
    assert len(store) == 10_000
    np.testing.assert_array_equal(columns["start_ns"], np.arange(10_000))
    np.testing.assert_array_equal(columns["flops"], np.arange(10_000) / 4)
    assert set(columns["duration_ns"]) == {10 * MS}


@given(st.lists(st.integers(0, 40), max_size=12), st.booleans())
def test_blocks_and_rows_give_the_same_columns(sizes: list[int], has_arrays: bool) -> None:
    by_row, by_block = step_store(), step_store()
    start = 0
    for size in sizes:
        starts = np.arange(start, start + size)
        for value in starts.tolist():
            by_row.append(step_row(start_ns=value, bytes=value * 0.5))
        block: dict[str, Any] = step_row()._asdict()
        block["start_ns"], block["bytes"] = starts, starts * 0.5
        if has_arrays:
            block["running"] = np.full(size, 2)
        by_block.extend(size, block)
        start += size
    assert len(by_row) == len(by_block) == start
    assert_equal_columns(by_block.columns(), by_row.columns())


def test_missing_times_are_masked_and_never_minus_one() -> None:
    columns = requests_of(request_row(), failed_row("refused"))
    np.testing.assert_array_equal(np.ma.getmaskarray(columns["finish_ns"]), [False, True])
    assert columns["finish_ns"].filled(0).tolist() == [110 * MS, 0]
    assert (columns["first_token_ns"] - columns["arrival_ns"]).compressed().tolist() == [10 * MS]


def test_request_rows_in_bulk() -> None:
    store = request_store()
    block: dict[str, Any] = request_row()._asdict()
    block["id"] = [f"r{i}" for i in range(20)]
    finish = np.ma.MaskedArray(np.arange(20), mask=np.arange(20) % 2 == 0)
    block["finish_ns"], block["first_token_ns"] = finish, None
    store.extend(20, block)
    columns = store.columns()
    assert columns["finish_ns"].compressed().tolist() == list(range(1, 20, 2))
    assert columns["first_token_ns"].count() == 0
    assert columns["session_id"] == [None] * 20


@pytest.mark.parametrize(
    ("changes", "column"),
    [({"start_ns": 1.5}, "start_ns"), ({"running": None}, "running"), ({"flops": None}, "flops")],
)
def test_a_value_of_the_wrong_type_is_refused(changes: dict[str, Any], column: str) -> None:
    store = step_store()
    store.append(step_row(**changes))
    with pytest.raises(TypeError, match=f"column {column}"):
        store.columns()


def test_a_block_without_a_column_is_refused() -> None:
    block = step_row()._asdict()
    del block["waiting"]
    with pytest.raises(ValueError, match="'waiting'"):
        step_store().extend(1, block)


def test_a_block_of_the_wrong_length_is_refused() -> None:
    for size in (3, 300):
        with pytest.raises(ValueError, match=r"values for|broadcast"):
            step_store().extend(size, {**step_row()._asdict(), "waiting": np.arange(size + 1)})


def test_a_missing_id_is_refused() -> None:
    store = request_store()
    store.append(request_row(id=None))
    with pytest.raises(TypeError, match="column id"):
        store.columns()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50))
def test_exact_sum_does_not_wrap(values: list[int]) -> None:
    assert exact_sum(np.array(values, np.int64)) == sum(values)


# Pooled gaps

_gaps = st.integers(0, 10**15)


@given(st.lists(_gaps, min_size=1, max_size=200), st.floats(0, 100))
def test_percentiles_equal_numpys_me08(gaps: list[int], q: float) -> None:
    assert GapCounts.of(gaps).percentile(q) == np.percentile(np.array(gaps), q)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=60),
    st.sampled_from([0, 1, 50, 90, 95, 99, 99.9, 100]),
)
def test_weighted_gaps_equal_the_expanded_ones(pairs: list[tuple[int, int]], q: float) -> None:
    one_by_one, at_once = GapCounts(), GapCounts()
    for gap, count in pairs:
        one_by_one.add(gap, count)
    at_once.add_array([g for g, _ in pairs], [c for _, c in pairs] or 1)
    expanded = sorted(g for g, c in pairs for _ in range(c))
    for pooled in (one_by_one, at_once):
        assert pooled.count == len(expanded)
        assert pooled.total_ns == sum(expanded)
        assert pooled.max_ns == (expanded[-1] if expanded else None)
        assert pooled.gaps.tolist() == sorted(set(expanded))
        want = np.percentile(np.array(expanded), q) if expanded else None
        assert pooled.percentile(q) == want


def test_many_different_gaps_are_merged_exactly() -> None:
    rng = np.random.default_rng(1)
    values = rng.integers(0, 10**6, 300_000)
    pooled = GapCounts()
    for piece in np.split(values[:200_000], 500):
        pooled.add_array(piece, 2)
    for gap in values[200_000:].tolist():
        pooled.add(gap)
    want, counts = np.unique(
        np.concatenate([np.repeat(values[:200_000], 2), values[200_000:]]), return_counts=True
    )
    np.testing.assert_array_equal(pooled.gaps, want)
    np.testing.assert_array_equal(pooled.counts, counts)


def test_the_sum_of_long_gaps_is_exact() -> None:
    pooled = GapCounts()
    pooled.add(30 * 86_400 * S, 10**9)
    assert pooled.total_ns == 30 * 86_400 * S * 10**9
    assert pooled.mean_ns == 30 * 86_400 * S


def test_gaps_must_be_whole_and_not_negative() -> None:
    with pytest.raises(ValueError, match="negative"):
        GapCounts().add(-1)
    with pytest.raises(ValueError, match="negative"):
        GapCounts().add_array([3, -1])
    with pytest.raises(TypeError, match="integers"):
        GapCounts().add_array([0.5])


def test_no_gap_has_no_percentile() -> None:
    assert GapCounts().percentile(50) is None
    assert GapCounts().mean_ns is None
    assert GapCounts().max_ns is None


# The folder


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(
        st.builds(
            request_row,
            id=st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
            arrival_ns=st.integers(0, 2**62),
            finish_ns=st.none() | st.integers(0, 2**62),
            session_id=st.none() | st.just("s"),
        ),
        max_size=6,
    ),
    starts=st.none() | st.lists(st.integers(0, 2**62), max_size=6),
    gaps=st.lists(_gaps, max_size=6),
    summary=st.dictionaries(
        st.text(max_size=3), st.none() | st.floats(allow_nan=False, allow_infinity=False)
    ),
)  # fmt: skip
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[RequestRow],
    starts: list[int] | None,
    gaps: list[int],
    summary: dict[str, Any],
) -> None:
    steps = None if starts is None else steps_of(*(step_row(start_ns=t) for t in starts))
    folder = tmp_path_factory.mktemp("run")
    record = record_of(
        requests_of(*rows), steps, gaps=GapCounts.of(gaps), summary=summary,
        settings={"seed": 1, "nested": {"a": [1, 2.5, None]}, "b": True},
    )  # fmt: skip
    record.write(folder)
    again = RunRecord.read(folder)
    assert again.settings == record.settings
    assert list(again.settings) == list(record.settings)
    assert again.summary == summary
    assert again.gaps.gaps.tolist() == record.gaps.gaps.tolist()
    assert again.gaps.counts.tolist() == record.gaps.counts.tolist()
    assert_equal_columns(again.requests, record.requests)
    if steps is None:
        assert again.steps is None
    else:
        assert again.steps is not None
        assert_equal_columns(again.steps, steps)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    record = record_of(requests_of(request_row(), failed_row("refused")), steps_of(step_row()))
    record.write(tmp_path / "a")
    record.write(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_row_groups_have_a_fixed_size(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    store = step_store()
    store.extend(70_000, step_row()._asdict())
    record_of(requests_of(), store.columns()).write(tmp_path / "run")
    metadata = pq.ParquetFile(tmp_path / "run" / "steps.parquet").metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [
        65_536,
        70_000 - 65_536,
    ]


def test_pandas_reads_the_tables(tmp_path: Path) -> None:
    import pandas as pd

    record_of(requests_of(request_row(), failed_row("refused"))).write(tmp_path / "run")
    table = pd.read_parquet(tmp_path / "run" / "requests.parquet")
    assert list(table.columns) == list(REQUEST_SCHEMA)
    assert table["finish_ns"].isna().tolist() == [False, True]


def test_steps_can_be_left_out(tmp_path: Path) -> None:
    record_of(requests_of(), steps_of(step_row())).write(tmp_path / "run", steps=False)
    assert RunRecord.read(tmp_path / "run").steps is None


def test_an_earlier_record_is_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    record_of(requests_of(), steps_of(step_row())).write(folder)
    (folder / "queue.png").write_bytes(b"old")
    record_of(requests_of(request_row())).write(folder)
    assert sorted(contents(folder)) == [
        "gaps.parquet", "requests.parquet", "run.json", "summary.json",
    ]  # fmt: skip
    assert RunRecord.read(folder).requests["id"] == ["r"]


def test_extras_become_part_of_the_folder(tmp_path: Path) -> None:
    def add(folder: Path) -> None:
        (folder / "report.txt").write_text("fine")

    record_of(requests_of()).write(tmp_path / "run", extras=add)
    assert (tmp_path / "run" / "report.txt").read_text() == "fine"


def test_missing_parents_are_made_and_go_again_on_failure(tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        record_of(requests_of()).write(tmp_path / "a" / "b" / "run", extras=fail)
    assert list(tmp_path.iterdir()) == []
    record_of(requests_of()).write(tmp_path / "a" / "b" / "run")
    assert RunRecord.read(tmp_path / "a" / "b" / "run").summary == {"makespan_s": 1.5}


@pytest.mark.parametrize("exists", [False, True])
def test_a_failure_half_way_leaves_what_was_there(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "run"
    if exists:
        record_of(requests_of(request_row())).write(folder)
    before = contents(tmp_path)
    # NaN is found only when summary.json, the last of the files, is written.
    with pytest.raises(ValueError, match="Out of range float"):
        record_of(requests_of(), summary={"makespan_s": float("nan")}).write(folder)
    assert contents(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == (["run"] if exists else [])


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    def fill(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(RecordError, match=r"run: cannot be written: No space left on device$"):
        record_of(requests_of()).write(tmp_path / "run", extras=fill)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / ".kvplan-partial-run-999").mkdir()
    record_of(requests_of()).write(tmp_path / "run")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RecordError, match="is not empty and is not a run record"):
        record_of(requests_of()).write(tmp_path)
    record_of(requests_of()).write(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(RecordError, match=r"holds 'notes\.txt'"):
        record_of(requests_of()).write(tmp_path / "run")
    assert (tmp_path / "notes.txt").read_text() == (tmp_path / "run" / "notes.txt").read_text()


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    record_of(requests_of()).write(tmp_path)
    assert RunRecord.read(tmp_path).settings == {"model": "m"}


def test_places_that_are_no_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="file: is not a folder"):
        check_writable(tmp_path / "file")
    with pytest.raises(RecordError, match="cannot be written"):
        check_writable(tmp_path / "file" / "run")
    with pytest.raises(RecordError, match="cannot be written"):
        record_of(requests_of()).write(tmp_path / "file" / "run")
    check_writable(tmp_path / "new" / "run")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "run.json").unlink(), "has no run.json"),
        (lambda f: (f / "run.json").write_text("{"), r"run\.json: cannot be read as JSON"),
        (lambda f: (f / "run.json").write_text("{}"), r"format is None, expected 'kvplan-run/1'"),
        (lambda f: (f / "summary.json").unlink(), r"summary\.json: missing"),
        (lambda f: (f / "summary.json").write_text("[]"), "is a JSON list, expected an object"),
        (lambda f: (f / "requests.parquet").unlink(), r"requests\.parquet: missing"),
        (lambda f: (f / "gaps.parquet").write_bytes(b"PAR1"), r"gaps\.parquet: cannot be read"),
        (lambda f: (f / "steps.parquet").write_bytes(b""), r"steps\.parquet: cannot be read"),
        (
            lambda f: (f / "steps.parquet").write_bytes((f / "gaps.parquet").read_bytes()),
            r"steps\.parquet: has no column 'start_ns'",
        ),
    ],
)
def test_a_damaged_record_is_one_clear_line(tmp_path: Path, damage: Any, message: str) -> None:
    record_of(requests_of(request_row()), steps_of(step_row())).write(tmp_path / "run")
    damage(tmp_path / "run")
    with pytest.raises(RecordError, match=message) as caught:
        RunRecord.read(tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="nowhere: no such folder, expected a run record"):
        RunRecord.read(tmp_path / "nowhere")


def test_numpy_numbers_are_written_as_numbers(tmp_path: Path) -> None:
    summary = {"a": np.int64(3), "b": np.float64(0.1)}
    record_of(requests_of(), summary=summary).write(tmp_path / "run")
    text = (tmp_path / "run" / "summary.json").read_text()
    assert json.loads(text) == {"a": 3, "b": 0.1}


def test_a_column_of_one_value_takes_no_memory_until_another_comes() -> None:
    store = step_store()
    row = StepRow(*range(len(StepRow._fields)))
    for _ in range(10_000):
        store.append(row)
    same = store.columns()
    assert same["copies"].strides == (0,)
    assert same["copies"].tolist() == [row.copies] * 10_000
    store.append(row._replace(copies=99))
    columns = store.columns()
    assert columns["copies"].tolist() == [row.copies] * 10_000 + [99]
    assert same["copies"].tolist() == [row.copies] * 10_000
    assert columns["waiting"].tolist() == [row.waiting] * 10_001


@pytest.mark.parametrize("spill_rows", [0, 1, 50, 4096, 5000])
def test_rows_beyond_memory_lie_in_files_and_read_the_same(spill_rows: int) -> None:
    """Single rows, blocks, columns of one value, missing values: all of it on both sides of the
    limit."""
    stores = [
        ColumnStore[RequestRow](REQUEST_SCHEMA, spill_rows=limit) for limit in (10**9, spill_rows)
    ]
    seen: list[Any] = []
    for store in stores:
        for i in range(60):
            store.append(
                request_row(
                    id=str(i), arrival_ns=i, first_token_ns=None if i % 3 else i, priority=4
                )
            )
        seen.append(store.columns())  # what was read stays as it was
        block = request_row()._asdict()
        block |= {"id": [str(i) for i in range(6000)], "arrival_ns": np.arange(6000)}
        block["first_token_ns"] = np.ma.MaskedArray(np.arange(6000), mask=np.arange(6000) % 2 == 0)
        store.extend(6000, block)
        store.extend(20, {**request_row()._asdict(), "priority": np.arange(20)})
    for names in ((seen[0], seen[1]), (stores[0].columns(), stores[1].columns())):
        held, spilled = names
        assert list(held) == list(spilled) == list(REQUEST_SCHEMA)
        for name in held:
            if isinstance(held[name], list):
                assert held[name] == spilled[name]
            else:
                np.testing.assert_array_equal(
                    np.ma.getmaskarray(held[name]), np.ma.getmaskarray(spilled[name])
                )
                np.testing.assert_array_equal(
                    np.ma.getdata(held[name]), np.ma.getdata(spilled[name])
                )
                assert not np.ma.getdata(spilled[name]).flags.writeable
    record_bytes = []
    for store in stores:
        with tempfile.TemporaryDirectory() as folder:
            record_of(store.columns()).write(Path(folder) / "run")
            record_bytes.append((Path(folder) / "run/requests.parquet").read_bytes())
    assert record_bytes[0] == record_bytes[1]


@pytest.mark.parametrize("num_rows", [20, 100_000])
def test_rows_that_fit_on_no_disk_are_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    """Whether that shows when they are written, or when the last of them leave the buffer."""
    store = ColumnStore[StepRow](STEP_SCHEMA, spill_rows=10)
    monkeypatch.setattr(
        "tempfile.TemporaryFile",
        lambda **_: Path("/dev/full").open("w+b"),  # noqa: SIM115
    )

    def write() -> object:
        store.extend(num_rows, {**step_row()._asdict(), "waiting": np.arange(num_rows)})
        return store.columns()["waiting"]

    with pytest.raises(SpillError, match=r"temporary files \(TMPDIR .*No space left"):
        write()


def test_numbers_of_more_than_64_bits_overflow() -> None:
    store = step_store()
    store.append(step_row(start_ns=2**63))
    with pytest.raises(OverflowError, match="start_ns"):
        store.columns()


def test_columns_travel_between_processes() -> None:
    columns = steps_of(step_row(), step_row(waiting=4))
    assert_equal_columns(pickle.loads(pickle.dumps(columns)), columns)
