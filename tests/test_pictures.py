"""Pictures of a run: the bins against an obvious slow sum, and that every run can be drawn."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from records.columns import Columns
from records.gaps import GapCounts
from records.metrics import summarize
from records.run import RunRecord
from records.slo import parse_limits
from simulator.pictures import TimeBins, write_pictures
from tests.test_records import MS, S, failed_row, request_row, requests_of, step_row, steps_of

NAMES = ["kv_blocks", "latency", "queue", "throughput"]

# (idle before, duration, level) of successive steps
_steps = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=12
)


def steps_from(pieces: list[tuple[int, int, int]], replica: int = 0) -> Columns:
    rows, now = [], 0
    for idle, duration, level in pieces:
        now += idle
        rows.append(
            step_row(
                start_ns=now, duration_ns=duration, blocks_used=level, decode_tokens=level,
                replica=replica,
            )
        )  # fmt: skip
        now += duration
    return steps_of(*rows)


def end_of(steps: Columns) -> int:
    return int((steps["start_ns"] + steps["duration_ns"]).max())


@given(_steps, st.integers(1, 9))
def test_bins_equal_a_sum_over_nanoseconds(
    pieces: list[tuple[int, int, int]], num_bins: int
) -> None:
    steps = steps_from(pieces)
    width = -(-end_of(steps) // num_bins)
    bins = TimeBins(steps, 0, width * num_bins, num_bins)
    level = np.zeros(width * num_bins)
    rate = np.zeros(width * num_bins)
    for start, duration, value in zip(
        steps["start_ns"], steps["duration_ns"], steps["blocks_used"], strict=True
    ):
        level[start : start + duration] = value
        rate[start : start + duration] = value / duration * 1e9
    per_bin = level.reshape(num_bins, width)
    np.testing.assert_allclose(bins.mean("blocks_used"), per_bin.mean(axis=1), atol=1e-9)
    np.testing.assert_allclose(
        bins.rate("decode_tokens"), rate.reshape(num_bins, width).mean(axis=1), rtol=1e-9, atol=1
    )
    np.testing.assert_array_equal(bins.peak("blocks_used"), per_bin.max(axis=1))


@given(_steps, _steps)
def test_replicas_add_up(one: list[tuple[int, int, int]], two: list[tuple[int, int, int]]) -> None:
    first, second = steps_from(one), steps_from(two, replica=1)
    # Rows of the two come mixed, as they do from a run.
    order = np.argsort(np.concatenate([first["start_ns"], second["start_ns"]]), kind="stable")
    both = {name: np.concatenate([first[name], second[name]])[order] for name in first}
    end = end_of(both)
    bins = TimeBins(both, 0, end, 7)
    alone = [TimeBins(steps, 0, end, 7).mean("blocks_used") for steps in (first, second)]
    np.testing.assert_allclose(bins.mean("blocks_used"), alone[0] + alone[1], atol=1e-9)
    assert bins.peak("blocks_used") is None


def record(requests: Columns, steps: Columns | None, slo: str = "ttft<=20ms") -> RunRecord:
    settings: dict[str, Any] = {
        "model": "m", "trace": "cost_in_$_and_€.jsonl", "num_blocks": 10, "block_size": 16,
        "max_num_seqs": 3,
    }  # fmt: skip
    gaps = GapCounts.of([10 * MS], 10)
    summary = summarize(requests, steps, gaps, settings, parse_limits(slo))
    return RunRecord(settings=settings, requests=requests, steps=steps, gaps=gaps, summary=summary)


def small_run() -> RunRecord:
    requests = requests_of(
        *(
            request_row(
                id=str(i), first_token_ns=10 * MS * (i + 1), finish_ns=S * (i + 1),
                decode_ns=S * (i + 1) - 10 * MS * (i + 1),
            )
            for i in range(5)
        ),
        failed_row("refused"),
    )  # fmt: skip
    steps = steps_of(
        *(step_row(start_ns=100 * MS * i, blocks_used=i % 10, waiting=i // 9) for i in range(50))
    )
    return record(requests, steps, "ttft<=20ms,tpot<=10s,e2e:p99<=2s,ttft:mean<=1s,itl<=1s")


def test_every_picture_is_written_the_same_each_time(tmp_path: Path) -> None:
    run = small_run()
    for folder in ("a", "b"):
        paths = write_pictures(run, tmp_path / folder)
        assert sorted(p.name for p in paths) == [f"{n}.{s}" for n in NAMES for s in ("png", "svg")]
    for path in (tmp_path / "a").iterdir():
        data = path.read_bytes()
        assert data == (tmp_path / "b" / path.name).read_bytes(), path.name
        assert data.startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")


def test_pictures_are_part_of_a_record_that_can_be_written_again(tmp_path: Path) -> None:
    run = small_run()
    for _ in range(2):
        run.write(tmp_path / "run", extras=lambda folder: write_pictures(run, folder))
    assert (tmp_path / "run" / "latency.svg").exists()
    run.write(tmp_path / "run")
    assert not (tmp_path / "run" / "latency.svg").exists()


def test_the_users_own_style_changes_nothing(tmp_path: Path) -> None:
    import matplotlib as mpl

    run = small_run()
    write_pictures(run, tmp_path / "a", formats=["svg"])
    with mpl.rc_context({"font.size": 30, "lines.color": "red", "axes.facecolor": "black"}):
        write_pictures(run, tmp_path / "b", formats=["svg"])
        assert mpl.rcParams["font.size"] == 30
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


@pytest.fixture
def _text_in_svg(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write words as words, so that a test can read them."""
    from simulator import pictures

    monkeypatch.setitem(pictures._STYLE, "svg.fonttype", "none")


@pytest.mark.usefixtures("_text_in_svg")
def test_limits_pool_and_units_are_on_the_pictures(tmp_path: Path) -> None:
    write_pictures(small_run(), tmp_path, formats=["svg"])
    latency = (tmp_path / "latency.svg").read_text()
    for words in (
        "5 of 6 requests completed", "p50  30 ms", "limit 20 ms: kept by 33.3 %",
        "p99 limit 2 s: missed", "mean limit 1 s: kept", "TTFT, ms", "E2E, s", "cost_in_$_and_€",
    ):  # fmt: skip
        assert words in latency, words
    assert "pool: 10 blocks" in (tmp_path / "kv_blocks.svg").read_text()
    assert "limit: 3 sequences" in (tmp_path / "queue.svg").read_text()
    assert "decode, tokens/s" in (tmp_path / "throughput.svg").read_text()


@pytest.mark.usefixtures("_text_in_svg")
@pytest.mark.parametrize(
    ("requests", "steps", "said"),
    [
        (requests_of(), steps_of(), {"latency": "no request to show", "queue": "no step was run"}),
        (
            requests_of(failed_row("refused")),
            None,
            {"latency": "0 of 1 requests completed", "kv_blocks": "recorded without its steps"},
        ),
        (
            requests_of(request_row(decode_ns=0, decode_gaps=0, output_tokens=1)),
            steps_of(step_row()),
            {"latency": "no request with two tokens", "queue": "nothing waited"},
        ),
    ],
)
def test_an_empty_picture_says_why(
    tmp_path: Path, requests: Columns, steps: Columns | None, said: dict[str, str]
) -> None:
    write_pictures(record(requests, steps), tmp_path, formats=["svg"])
    for name, words in said.items():
        assert words in (tmp_path / f"{name}.svg").read_text()


def test_a_long_run_of_two_replicas_is_drawn(tmp_path: Path) -> None:
    """Half a million steps over a day, latencies from 0 to hours."""
    count = 250_000
    steps = steps_of(step_row())
    many = {name: np.repeat(column, 2 * count) for name, column in steps.items()}
    many["replica"] = np.tile([0, 1], count)
    many["start_ns"] = np.repeat(np.arange(count), 2) * 350 * MS
    requests = requests_of(
        request_row(first_token_ns=0, finish_ns=100 * MS),
        request_row(id="s", first_token_ns=3600 * S, finish_ns=7200 * S, decode_ns=3600 * S),
    )
    run = record(requests, many)
    run = dataclasses.replace(run, settings={**run.settings, "num_replicas": 2})
    assert len(write_pictures(run, tmp_path, formats=["png"])) == 4
