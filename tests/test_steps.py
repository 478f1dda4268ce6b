"""Reductions over steps: the same whatever slice of the rows is looked at at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from records.columns import STEP_SCHEMA, Columns
from records.steps import Rows, StepRows, end_ns, float_sum
from simulator.pictures import TimeBins


@st.composite
def steps(draw: st.DrawFn, least: int = 0) -> Columns:
    count = draw(st.integers(least, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    columns: dict[str, Any] = {
        name: rng.integers(0, 9, count) if kind == "int64" else rng.normal(0, 1e9, count)
        for name, kind in STEP_SCHEMA.items()
    }
    columns["duration_ns"] = rng.integers(1, draw(st.sampled_from([3, 2**62])), count)
    if draw(st.booleans()):
        columns["duration_ns"] = rng.integers(1, 100, count)
    columns["start_ns"] = np.arange(count) * 100
    columns["replica"] = rng.integers(0, 2, count)
    return columns


def has_prefill(rows: Rows) -> Any:
    return rows["prefill_tokens"] > 4


@settings(max_examples=200, deadline=None)
@given(steps(), st.integers(1, 31))
def test_results_are_those_of_whole_columns(columns: Columns, slice_rows: int) -> None:
    rows = StepRows(columns, slice_rows)
    where = columns["prefill_tokens"] > 4
    levels, durations = columns["waiting"], columns["duration_ns"].tolist()
    assert len(rows) == len(durations)
    assert rows.count(has_prefill) == int(where.sum())
    assert rows.total("waiting") == int(levels.sum())
    assert rows.total("duration_ns", has_prefill) == sum(columns["duration_ns"][where].tolist())
    assert rows.weighted("waiting") == sum(map(int.__mul__, levels.tolist(), durations))
    assert rows.most("waiting") == levels.max(initial=0)
    assert rows.float_total("flops", has_prefill) == math.fsum(columns["flops"][where])
    assert float_sum(columns["flops"]) == math.fsum(columns["flops"])
    chosen = levels[where]
    assert rows.mean("waiting", has_prefill) == (chosen.sum() / len(chosen) if len(chosen) else 0)
    for q in (0, 37.5, 95, 100):
        found = rows.percentile(lambda part: part["waiting"] + part["running"], q, has_prefill)
        both = (levels + columns["running"])[where]
        assert found == (np.percentile(both, q) if len(both) else None)
    assert [part.first for part in rows.slices()] == list(range(0, len(rows), slice_rows))


@settings(max_examples=100, deadline=None)
@given(steps(least=1), st.integers(1, 31))
def test_bins_of_slices_are_those_of_the_whole(columns: Columns, slice_rows: int) -> None:
    columns = {**columns, "duration_ns": columns["duration_ns"] % 100 + 1}
    end = StepRows(columns).most(end_ns)
    whole = TimeBins(columns, 0, end, 7)
    sliced = TimeBins(columns, 0, end, 7, slice_rows=slice_rows)
    np.testing.assert_allclose(sliced.mean("waiting"), whole.mean("waiting"), atol=1e-9)
    np.testing.assert_allclose(sliced.rate("waiting"), whole.rate("waiting"), rtol=1e-9)
    alone = {**columns, "replica": np.zeros_like(columns["replica"])}
    one, parts = TimeBins(alone, 0, end, 7), TimeBins(alone, 0, end, 7, slice_rows=slice_rows)
    np.testing.assert_array_equal(parts.peak("waiting"), one.peak("waiting"))
