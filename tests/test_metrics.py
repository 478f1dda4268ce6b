"""Metrics from hand-written rows: the cases' right values, and identities on random rows."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from records.columns import Columns, RequestRow
from records.gaps import GapCounts
from records.metrics import (
    departures_ns,
    identity_errors,
    latencies,
    num_in_system_area_ns,
    sojourns_ns,
    summarize,
)
from records.run import to_json
from records.slo import NO_LIMITS, Limits, parse_limits
from tests.test_records import MS, S, failed_row, request_row, requests_of, step_row, steps_of


def from_token_times(*times_ns: int, **changes: Any) -> tuple[RequestRow, list[int]]:
    """The row of a completed request with one sample, and its gaps."""
    gaps = [b - a for a, b in pairwise(times_ns)]
    row = request_row(
        first_token_ns=times_ns[0],
        finish_ns=times_ns[-1],
        output_tokens=len(times_ns),
        decode_ns=times_ns[-1] - times_ns[0],
        decode_gaps=len(gaps),
        max_gap_ns=max(gaps, default=0),
    )
    return row._replace(**changes), gaps


def summary_of(
    requests: Columns,
    steps: Columns | None = None,
    gaps: GapCounts | None = None,
    settings: dict[str, Any] | None = None,
    limits: Limits = NO_LIMITS,
    **more: Any,
) -> dict[str, Any]:
    return summarize(requests, steps, gaps or GapCounts(), settings or {}, limits, **more)


# The cases


def test_me01_ttft_is_no_gap() -> None:
    row, gaps = from_token_times(1000 * MS, 1100 * MS, 1200 * MS, 1300 * MS)
    summary = summary_of(requests_of(row), gaps=GapCounts.of(gaps))
    assert summary["ttft_s"]["mean"] == 1.0
    assert summary["itl_s"]["mean"] == 0.1
    assert summary["itl_s"]["count"] == 3


def test_me01_mean_tpot_and_mean_itl_weigh_differently() -> None:
    one, gaps_one = from_token_times(S, 2 * S)
    two, gaps_two = from_token_times(*range(S, 2 * S + 1, 100 * MS))
    gaps = GapCounts.of(gaps_one + gaps_two)
    summary = summary_of(requests_of(one, two), gaps=gaps)
    assert gaps.count == 11
    assert summary["tpot_s"]["mean"] == pytest.approx(0.55, rel=1e-12)
    assert summary["itl_s"]["mean"] == pytest.approx(2.0 / 11, rel=1e-12)


def me05_rows() -> list[RequestRow]:
    measured = [
        (80, 20), (120, 30), (300, 25), (90, 60), (150, 40), (200, 50), (210, 20), (199, 49),
    ]  # fmt: skip
    rows = [
        request_row(
            id=f"r{i}", first_token_ns=ttft * MS, finish_ns=(ttft + 99 * tpot) * MS,
            output_tokens=100, decode_ns=99 * tpot * MS, decode_gaps=99, max_gap_ns=tpot * MS,
        )
        for i, (ttft, tpot) in enumerate(measured)
    ]  # fmt: skip
    # One of the failed had a good TTFT: it fails that limit all the same.
    return [
        *rows,
        failed_row("aborted", first_scheduled_ns=0, first_token_ns=50 * MS, finish_ns=20 * S),
        failed_row("timed_out", finish_ns=15 * S),
    ]


def test_me05_goodput_counts_failures_and_includes_bounds() -> None:
    limits = parse_limits("ttft<=200ms,tpot<=50ms")
    summary = summary_of(requests_of(*me05_rows()), limits=limits)
    assert summary["makespan_s"] == 20.0
    assert summary["throughput"]["requests_per_s"] == 0.4
    assert summary["goodput"] == {
        "slo": {
            "limits": "ttft<=200ms,tpot<=50ms",
            "per_request_s": {"ttft": 0.2, "tpot": 0.05},
            "statistics": [],
        },
        "attainment": 0.5,
        "requests_per_s": 0.25,
        "output_tokens_per_s": 25.0,
        "pass_rate": {"ttft": 0.6, "tpot": 0.7},
    }


def test_me05_strict_bounds_are_strict() -> None:
    limits = parse_limits("ttft<200ms,tpot<50ms")
    goodput = summary_of(requests_of(*me05_rows()), limits=limits)["goodput"]
    assert goodput["attainment"] == 0.4
    assert goodput["pass_rate"] == {"ttft": 0.5, "tpot": 0.6}


def test_me07_blocks_found_again_are_no_prefix_hits() -> None:
    """SC-02 with a prefix cache: B found 64 of its own tokens again, the prompts share nothing."""
    rows = [
        request_row(id="A"),
        request_row(id="B", preemptions=1, recomputed_tokens=14, refound_tokens=64),
    ]
    kv = summary_of(requests_of(*rows))["kv"]
    assert kv["prefix_hit_rate"] == 0.0
    assert (kv["refound_tokens"], kv["recomputed_tokens"]) == (64, 14)


def test_me08_percentiles_are_linear_and_named() -> None:
    rows = [
        request_row(id=str(k), finish_ns=100 * k * MS, decode_ns=100 * k * MS - 10 * MS)
        for k in range(1, 11)
    ]
    summary = summary_of(requests_of(*rows))
    e2e = summary["e2e_s"]
    assert summary["percentile_rule"] == "linear"
    assert (e2e["p50"], e2e["p90"], e2e["p99"]) == pytest.approx((0.55, 0.91, 0.991), rel=1e-12)
    assert (e2e["max"], e2e["count"]) == (1.0, 10)


def test_me08_tpot_of_one_token_is_null() -> None:
    row, _ = from_token_times(S)
    limits = parse_limits("tpot<=1ms,itl<=1ms,tpot:p99<=1ms")
    summary = summary_of(requests_of(row, row), limits=limits)
    empty = dict.fromkeys(["mean", "p50", "p90", "p95", "p99", "max"])
    assert summary["tpot_s"] == {**empty, "count": 0}
    assert summary["itl_s"] == {**empty, "count": 0}
    # There is nothing that could be too slow; of the run's p99 nothing can be said.
    assert summary["goodput"]["attainment"] == 1.0
    assert summary["goodput"]["slo"]["statistics"] == [
        {"limit": "tpot:p99<=1ms", "value_s": None, "holds": False}
    ]


def test_me08_steady_throughput_leaves_out_the_ramp() -> None:
    rows = [
        request_row(id=str(k), finish_ns=k * S, decode_ns=k * S - 10 * MS) for k in range(10, 20)
    ]
    throughput = summary_of(requests_of(*rows))["throughput"]
    assert throughput["requests_per_s"] == pytest.approx(10 / 19, rel=1e-12)
    assert throughput["steady_requests_per_s"] == 1.0
    assert throughput["steady_output_tokens_per_s"] == 11.0


def test_si01_timeouts_are_counted_and_throughput_stays_below_capacity() -> None:
    def served(k: int) -> RequestRow:
        return request_row(
            id=f"r{k}", first_scheduled_ns=100 * k * S, first_token_ns=(100 * k + 1) * S,
            finish_ns=100 * (k + 1) * S, output_tokens=100, decode_ns=99 * S, decode_gaps=99,
            max_gap_ns=S,
        )  # fmt: skip

    running = served(3)._replace(
        status="timed_out", finish_ns=310 * S, output_tokens=10, decode_ns=9 * S, decode_gaps=9
    )
    waiting = [failed_row("timed_out", finish_ns=310 * S)] * 6
    summary = summary_of(requests_of(*(served(k) for k in range(3)), running, *waiting))
    assert summary["requests"] == {
        "total": 10, "completed": 3, "refused": 0, "timed_out": 7, "aborted": 0, "unfinished": 0,
    }  # fmt: skip
    assert summary["makespan_s"] == 310.0
    assert summary["throughput"]["output_tokens_per_s"] == pytest.approx(300 / 310, rel=1e-12)
    patient = summary_of(requests_of(*(served(k) for k in range(10))))
    assert patient["makespan_s"] == 1000.0
    assert patient["throughput"]["output_tokens_per_s"] == 1.0


def si02() -> tuple[Columns, GapCounts]:
    """SC-02 at 10 ms a step; B emits at steps 3 to 17 and, after its preemption, 82 to 146."""
    a, gaps_a = from_token_times(*range(10 * MS, 801 * MS, 10 * MS), id="A")
    b, gaps_b = from_token_times(
        *(10 * MS * step for step in (*range(3, 18), *range(82, 147))),
        id="B", first_scheduled_ns=20 * MS, preemptions=1, recomputed_tokens=78,
    )  # fmt: skip
    return requests_of(a, b), GapCounts.of(gaps_a + gaps_b)


def test_si02_a_preemption_is_one_long_gap() -> None:
    requests, gaps = si02()
    summary = summary_of(requests, gaps=gaps)
    assert requests["output_tokens"].tolist() == [80, 80]
    assert summary["itl_s"]["count"] == 158
    assert summary["itl_s"]["max"] == 0.65
    assert latencies(requests).ttft.tolist() == [10 * MS, 30 * MS]
    assert latencies(requests).e2e.tolist() == [800 * MS, 1460 * MS]
    assert latencies(requests).tpot.tolist() == [10 * MS, 1430 * MS / 79]
    assert requests["max_gap_ns"].tolist() == [10 * MS, 650 * MS]
    assert identity_errors(requests, gaps) == []
    assert requests["prompt_tokens"].sum() == 128
    assert summary["kv"]["recomputed_tokens"] == 78
    assert summary["kv"]["preemptions"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_token_ns": 820 * MS}, "request B: TTFT + sum(ITL) is not E2E"),
        ({"first_token_ns": 820 * MS}, "request B: tokens after its finish"),
        ({"first_scheduled_ns": 40 * MS}, "request B: its times run backwards"),
        ({"finish_ns": None}, "request B: completed without all of its times"),
        ({"output_tokens": 95}, "request B: gaps are not outputs - 1"),
        ({"decode_gaps": 94}, "158 gaps are pooled, requests have 173"),
        ({"decode_ns": 1420 * MS}, "pooled gaps are 2220000000 ns, requests have 2210000000 ns"),
        ({"max_gap_ns": 1440 * MS}, "its longest gap is longer than all gaps together"),
        ({"cached_tokens": 65}, "more hits than prompt tokens"),
    ],
)
def test_si02_wrong_rows_are_named(changes: dict[str, Any], message: str) -> None:
    rows, gaps = si02()
    requests = dict(rows)
    for name, value in changes.items():
        requests[name] = requests[name].copy()
        requests[name][1] = np.ma.masked if value is None else value
    assert any(message in error for error in identity_errors(requests, gaps))


# Definitions


def test_samples_share_one_tpot() -> None:
    """Two samples of 3 and 5 outputs, 10 and 20 ms apart: 100 ms over 6 gaps."""
    row = request_row(
        num_samples=2, output_tokens=8, decode_ns=100 * MS, decode_gaps=6, max_gap_ns=20 * MS,
        finish_ns=90 * MS,
    )  # fmt: skip
    assert latencies(requests_of(row)).tpot.tolist() == [100 * MS / 6]


def test_tpot_limits_are_judged_exactly() -> None:
    """10 ns over 3 gaps are 3.33 ns: more than 3, less than 4."""
    requests = requests_of(request_row(decode_ns=10, decode_gaps=3, max_gap_ns=4))
    for text, good in [
        ("tpot<=3ns", 0), ("tpot<=4ns", 1), ("tpot<4ns", 1), ("tpot<3ns", 0), ("itl<=4ns", 1),
        ("itl<4ns", 0),
    ]:  # fmt: skip
        goodput = summary_of(requests, limits=parse_limits(text))["goodput"]
        assert goodput["attainment"] == good, text


@given(st.integers(0, 10**6), st.integers(1, 1000), st.integers(1, 10**4))
def test_tpot_limits_agree_with_fractions(decode: int, gaps: int, limit: int) -> None:
    requests = requests_of(request_row(decode_ns=decode, decode_gaps=gaps))
    for op, want in (("<=", decode <= limit * gaps), ("<", decode < limit * gaps)):
        goodput = summary_of(requests, limits=parse_limits(f"tpot{op}{limit}ns"))["goodput"]
        assert goodput["attainment"] == want


def test_statistics_of_the_run_are_held_to_limits() -> None:
    requests, gaps = si02()
    text = "itl:max<=650ms,itl:p50<10ms,ttft:mean<=20ms,e2e:p0<=800ms,e2e:max<1s,queue:max<=20ms"
    statistics = summary_of(requests, gaps=gaps, limits=parse_limits(text))["goodput"]["slo"][
        "statistics"
    ]
    assert [(s["value_s"], s["holds"]) for s in statistics] == [
        (0.65, True), (0.01, False), (0.02, True), (0.8, True), (1.46, False), (0.02, True),
    ]  # fmt: skip


def test_kv_use_is_weighted_by_time_and_idle_counts_nothing() -> None:
    """40 blocks for 1 s, 10 for 3 s, 6 s of nothing, of 80: (40 + 30) / (10 x 80)."""
    steps = steps_of(
        step_row(start_ns=0, duration_ns=S, blocks_used=40, num_seqs=8),
        step_row(start_ns=7 * S, duration_ns=3 * S, blocks_used=10, num_seqs=2),
    )
    requests = requests_of(request_row(finish_ns=10 * S, decode_ns=10 * S - 10 * MS))
    settings = {"num_blocks": 80, "block_size": 16, "bytes_per_token": 131_072}
    summary = summary_of(requests, steps, settings=settings, evictions=7)
    assert summary["kv"]["peak_usage"] == 0.5
    assert summary["kv"]["mean_usage"] == 70 / 800
    assert summary["kv"]["capacity_tokens"] == 1280
    assert summary["kv"]["bytes_per_token"] == 131_072
    assert summary["kv"]["evictions"] == 7
    assert summary["steps"] == {"count": 2, "mean_s": 2.0, "mean_batch": (8 + 2 * 3) / 4}
    two = summary_of(requests, steps, settings={**settings, "num_replicas": 2})
    assert two["kv"]["mean_usage"] == 35 / 800


def test_hit_rate_is_of_admitted_prompts_and_unknown_without_identity() -> None:
    requests = requests_of(
        request_row(prompt_tokens=100, cached_tokens=48),
        failed_row("refused", prompt_tokens=9999),
    )
    assert summary_of(requests)["kv"]["prefix_hit_rate"] == 0.48
    unknown = summary_of(requests, settings={"prefix_identity": False})
    assert unknown["kv"]["prefix_hit_rate"] is None


def test_utilization_splits_steps_by_whether_they_prefill() -> None:
    steps = steps_of(
        step_row(duration_ns=S, prefill_tokens=100, flops=5e14, bytes=1e12),
        step_row(start_ns=S, duration_ns=S, flops=1e13, bytes=2e12),
        step_row(start_ns=2 * S, duration_ns=3 * S, flops=3e13, bytes=4e12),
    )
    peaks = {"peak_flops": 1e15, "peak_bandwidth": 2e12}
    utilization = summary_of(requests_of(request_row()), steps, settings=peaks)["utilization"]
    assert utilization["prefill"] == {"compute": 0.5, "bandwidth": 0.5}
    assert utilization["decode"] == {"compute": 4e13 / (1e15 * 4), "bandwidth": 0.75}


def test_utilization_is_unknown_without_peaks_or_prices() -> None:
    unknown = {"compute": None, "bandwidth": None}
    for steps, peaks in (
        (steps_of(step_row(flops=1e12, bytes=1e9)), {}),
        (steps_of(step_row()), {"peak_flops": 1e15, "peak_bandwidth": 2e12}),
        (None, {"peak_flops": 1e15, "peak_bandwidth": 2e12}),
    ):
        summary = summary_of(requests_of(request_row()), steps, settings=peaks)
        assert summary["utilization"] == {"prefill": unknown, "decode": unknown}


def test_a_stopped_run_ends_when_it_was_stopped() -> None:
    late = failed_row("unfinished", arrival_ns=90 * S)
    requests = requests_of(request_row(), late)
    assert summary_of(requests)["makespan_s"] == 0.11
    assert summary_of(requests, end_ns=50 * S)["makespan_s"] == 50.0
    assert summary_of(requests_of(request_row()), end_ns=50 * S)["makespan_s"] == 0.11


def test_all_refused_is_a_whole_summary() -> None:
    requests = requests_of(failed_row("refused"), failed_row("refused"))
    summary = summary_of(requests, steps_of(), limits=parse_limits("ttft<=1s"))
    assert summary["requests"]["refused"] == 2
    assert summary["ttft_s"]["count"] == 0
    assert summary["throughput"]["requests_per_s"] is None  # no time went by
    assert summary["goodput"]["attainment"] == 0.0
    assert summary["steps"] == {"count": 0, "mean_s": None, "mean_batch": None}


def test_no_request_at_all_is_a_whole_summary() -> None:
    summary = summary_of(requests_of(), steps_of(), limits=parse_limits("ttft<=1s,e2e:max<=1s"))
    assert summary["requests"]["total"] == 0
    assert summary["makespan_s"] is None
    assert summary["goodput"]["attainment"] is None
    assert summary["goodput"]["pass_rate"] == {"ttft": None}


def test_the_summary_has_the_documented_shape() -> None:
    summary = summary_of(requests_of(request_row()), bottleneck={"kind": "queue", "why": "long"})
    distribution = ["mean", "p50", "p90", "p95", "p99", "max", "count"]
    want = {
        "requests": ["total", "completed", "refused", "timed_out", "aborted", "unfinished"],
        **dict.fromkeys(["ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s"], distribution),
        "throughput": [
            "requests_per_s", "input_tokens_per_s", "output_tokens_per_s",
            "steady_requests_per_s", "steady_output_tokens_per_s",
        ],
        "goodput": ["slo", "attainment", "requests_per_s", "output_tokens_per_s", "pass_rate"],
        "kv": [
            "num_blocks", "block_size", "bytes_per_token", "capacity_tokens", "peak_usage",
            "mean_usage", "prefix_hit_rate", "preemptions", "recomputed_tokens", "refound_tokens",
            "evictions",
        ],
        "steps": ["count", "mean_s", "mean_batch"],
        "utilization": ["prefill", "decode"],
        "makespan_s": None,
        "bottleneck": ["kind", "why"],
        "percentile_rule": None,
    }  # fmt: skip
    assert list(summary) == list(want)
    for key, names in want.items():
        if names is not None:
            assert list(summary[key]) == names, key
    assert summary["bottleneck"] == {"kind": "queue", "why": "long"}
    assert json.loads(to_json(summary)) == summary


def test_an_unknown_status_is_refused() -> None:
    with pytest.raises(ValueError, match="status 'lost', expected one of completed, refused"):
        summary_of(requests_of(failed_row("lost")))


# Identities on random rows

_times = st.tuples(st.integers(0, 2**50), st.integers(0, 2**50), st.integers(0, 2**50)).map(sorted)


@given(st.lists(_times, max_size=40), st.data())
def test_littles_law_is_exact(times: list[list[int]], data: st.DataObject) -> None:
    """Area under the number in system = sum of sojourns, whatever became of the requests."""
    end = 2**50
    rows = []
    for arrival, first, finish in times:
        status = data.draw(st.sampled_from(["completed", "timed_out", "refused", "unfinished"]))
        is_over = status in ("completed", "timed_out")
        rows.append(
            request_row(
                arrival_ns=arrival,
                first_token_ns=first if is_over else None,
                finish_ns=finish if is_over else None,
                status=status,
            )
        )
    requests = requests_of(*rows)
    left = departures_ns(requests, end)
    area = num_in_system_area_ns(requests["arrival_ns"], left)
    assert area == sojourns_ns(requests["arrival_ns"], left)
    by_hand = sum(
        {"refused": 0, "unfinished": end - arrival}.get(row.status, finish - arrival)
        for row, (arrival, _, finish) in zip(rows, times, strict=True)
    )
    assert area == by_hand


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=60))
def test_latency_percentiles_equal_numpys(waits: list[int]) -> None:
    rows = [request_row(arrival_ns=5, first_token_ns=5 + wait) for wait in waits]
    ttft = summary_of(requests_of(*rows))["ttft_s"]
    for q in (50, 90, 95, 99):
        assert ttft[f"p{q}"] == np.percentile(np.array(waits), q) / 1e9
    assert ttft["mean"] == sum(waits) / len(waits) / 1e9


@given(st.lists(st.lists(st.integers(0, 10**9), min_size=1, max_size=8), min_size=1, max_size=8))
def test_ttft_and_gaps_add_up_to_e2e(all_gaps: list[list[int]]) -> None:
    """The first of each list is the TTFT."""
    rows, pooled = [], GapCounts()
    for times in all_gaps:
        row, gaps = from_token_times(*np.cumsum(times).tolist())
        pooled.add_array(np.array(gaps, np.int64))
        rows.append(row._replace(first_scheduled_ns=0))
    requests = requests_of(*rows)
    assert identity_errors(requests, pooled) == []
    values = latencies(requests)
    assert int(values.e2e.sum()) == int(values.ttft.sum()) + pooled.total_ns


def test_order_of_rows_does_not_change_a_byte() -> None:
    rng = np.random.default_rng(7)
    pairs = zip(rng.integers(1, 10**10, 500), rng.integers(1, 999, 500), strict=True)
    rows = [
        request_row(id=str(i), decode_ns=int(decode), decode_gaps=int(gaps))
        for i, (decode, gaps) in enumerate(pairs)
    ]
    forward, backward = (summary_of(requests_of(*r)) for r in (rows, rows[::-1]))
    assert to_json(forward) == to_json(backward)
