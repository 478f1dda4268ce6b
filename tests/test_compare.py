"""Two runs side by side."""

from __future__ import annotations

from typing import Any

from records.gaps import GapCounts
from records.metrics import summarize
from records.run import RunRecord, to_json
from records.slo import NO_LIMITS, parse_limits
from simulator.compare import compare, compare_json
from tests.test_records import MS, failed_row, request_row, requests_of, step_row, steps_of


def run(ttft_ms: int = 100, slo: str | None = None, failed: int = 0, **settings: Any) -> RunRecord:
    """Four completed requests with one TTFT, and some that were refused."""
    requests = requests_of(
        *(
            request_row(id=str(i), first_token_ns=ttft_ms * MS, finish_ns=(ttft_ms + 100) * MS)
            for i in range(4)
        ),
        *(failed_row("refused") for _ in range(failed)),
    )
    steps = steps_of(step_row())
    gaps = GapCounts.of([10 * MS], 40)
    settings = {"num_blocks": 10, "policy": "fcfs", **settings}
    limits = NO_LIMITS if slo is None else parse_limits(slo)
    summary = summarize(requests, steps, gaps, settings, limits)
    return RunRecord(settings=settings, requests=requests, steps=steps, gaps=gaps, summary=summary)


def row(text: str, label: str) -> list[str]:
    """The words of a line of the table, its label left out."""
    lines = [line for line in text.splitlines() if line.startswith(f"{label}  ")]
    assert len(lines) == 1, f"{label} in {text}"
    return lines[0][len(label) :].split()


def test_better_and_worse_are_said_of_the_second() -> None:
    slow, quick = run(ttft_ms=1500), run(ttft_ms=150)
    assert row(compare(slow, quick), "TTFT p99") == [
        "1.50",
        "s",
        "0.150",
        "s",
        "-90.0",
        "%",
        "better",
    ]
    assert row(compare(quick, slow), "TTFT p99") == [
        "0.150",
        "s",
        "1.50",
        "s",
        "+900.0",
        "%",
        "worse",
    ]
    assert row(compare(quick, slow), "requests/s") == ["16.0", "2.50", "-84.4", "%", "worse"]
    assert row(compare(quick, slow), "TPOT mean") == [
        "10.0",
        "ms",
        "10.0",
        "ms",
        "+0.0",
        "%",
        "same",
    ]


def test_a_change_below_one_percent_is_the_same() -> None:
    table = compare(run(ttft_ms=1000), run(ttft_ms=1009))
    assert row(table, "TTFT mean")[-2:] == ["%", "same"]
    table = compare(run(ttft_ms=1000), run(ttft_ms=1011))
    assert row(table, "TTFT mean")[-2:] == ["%", "worse"]


def test_what_has_no_good_direction_gets_no_mark() -> None:
    a, b = run(num_blocks=10), run(num_blocks=20)
    assert row(compare(a, b), "KV use, peak") == ["50.0", "%", "25.0", "%", "-25.0", "points"]
    assert compare_json(a, b)["metrics"]["kv.peak_usage"] == {
        "a": 0.5, "b": 0.25, "change": -0.5, "verdict": "differs",
    }  # fmt: skip


def test_settings_that_differ_are_listed_nested_ones_too() -> None:
    a = run(num_blocks=10, scheduler={"max_num_seqs": 8, "chunked": True})
    b = run(num_blocks=20, scheduler={"max_num_seqs": 9, "chunked": True}, seed=3)
    a.settings["sources"], b.settings["sources"] = {"seed": "assumed"}, {"seed": "given"}
    assert compare_json(a, b)["settings"] == {
        "num_blocks": {"a": 10, "b": 20},
        "scheduler.max_num_seqs": {"a": 8, "b": 9},
        "seed": {"a": None, "b": 3},
    }
    table = compare(a, b, ("old", "new"))
    assert table.splitlines()[0].split() == ["old", "new", "change"]
    assert row(table, "scheduler.max_num_seqs") == ["8", "9"]
    assert row(table, "seed") == ["-", "3"]
    assert "policy" not in table
    assert "No setting differs." in compare(a, a)


def test_missing_values_are_dashes_and_not_judged() -> None:
    with_slo = run(slo="ttft<=200ms")
    assert row(compare(run(), with_slo), "SLO attainment") == ["-", "100.0", "%"]
    entry = compare_json(run(), with_slo)["metrics"]["goodput.attainment"]
    assert entry == {"a": None, "b": 1.0, "change": None, "verdict": "unknown"}
    assert "SLO attainment" not in compare(run(), run())


def test_what_does_not_compare_is_noted() -> None:
    notes = compare_json(run(trace_sha256="x"), run(trace_sha256="y", failed=2))["notes"]
    assert notes == [
        "the traces differ: a change may come from the load and not from the settings",
        "the runs have 4 and 6 requests",
    ]
    notes = compare_json(run(slo="ttft<=1s"), run())["notes"]
    assert notes == ["the limits differ (ttft<=1s and none): goodput and attainment do not compare"]
    assert compare_json(run(), run())["notes"] == []
    assert "Note: the runs have 4 and 6 requests" in compare(run(), run(failed=2))


def test_counts_of_unequal_loads_are_not_judged() -> None:
    entry = compare_json(run(), run(failed=2))["metrics"]["requests.refused"]
    assert entry["verdict"] == "differs"


def test_a_record_with_little_in_its_summary_compares() -> None:
    bare = RunRecord(settings={}, requests=requests_of(), steps=None, gaps=GapCounts(), summary={})
    assert "TTFT" not in compare(bare, bare)
    assert row(compare(bare, run()), "TTFT p50") == ["-", "100", "ms"]


def test_the_json_shape_is_json() -> None:
    text = to_json(compare_json(run(), run(ttft_ms=7)))
    assert text == to_json(compare_json(run(), run(ttft_ms=7)))
