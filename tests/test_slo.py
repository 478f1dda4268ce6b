"""The limits grammar."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from records.slo import (
    METRICS,
    Limits,
    RequestLimit,
    StatisticLimit,
    format_ns,
    parse_limits,
)

MS = 1_000_000
S = 1_000_000_000


def test_limits_of_requests_and_of_the_run() -> None:
    limits = parse_limits("ttft<=500ms, tpot<50ms, ttft:p99<=1s, itl:mean<20ms")
    assert limits == Limits(
        per_request=(RequestLimit("ttft", 500 * MS), RequestLimit("tpot", 50 * MS, False)),
        statistics=(
            StatisticLimit("ttft", "p99", S),
            StatisticLimit("itl", "mean", 20 * MS, False),
        ),
    )
    assert str(limits) == "ttft<=500ms,tpot<50ms,ttft:p99<=1s,itl:mean<20ms"


@pytest.mark.parametrize(
    ("time", "limit_ns"),
    [
        ("500ms", 500 * MS),
        ("1.5s", 1500 * MS),
        ("2", 2 * S),
        ("0.25", 250 * MS),
        ("3min", 180 * S),
        ("7us", 7000),
        ("9ns", 9),
        ("1e3 ms", S),
        (".5 S", 500 * MS),
    ],
)
def test_units(time: str, limit_ns: int) -> None:
    assert parse_limits(f"TTFT <= {time}").per_request[0].limit_ns == limit_ns


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"limit 1 \(''\): not a limit; expected e\.g\. ttft<=500ms"),
        ("ttft<=500ms,", r"limit 2 \(''\): not a limit"),
        ("ttft", r"limit 1 \('ttft'\): not a limit"),
        ("ttft=500ms", "not a limit"),
        ("ttft>=500ms", "limits are upper bounds"),
        ("latency<=1s", "unknown metric 'latency', expected one of ttft, tpot, itl, e2e, queue"),
        ("ttft:median<=1s", "unknown statistic 'median', expected mean, max or p0 to p100"),
        ("ttft:p101<=1s", "unknown statistic 'p101'"),
        ("ttft<=1h", "unknown unit 'h', expected ns, us, ms, s or min"),
        ("ttft<=1.2.3s", r"'1\.2\.3' is not a number"),
        ("ttft<=.s", r"'\.' is not a number"),
        ("ttft<=0s", "must be longer than 0"),
        ("ttft<=-1s", "not a limit"),
        ("ttft<=nan", "not a limit"),
        ("ttft<=0.5ns", "not a whole number of nanoseconds"),
        ("ttft<=1e30s", "longer than 146 years"),
        ("ttft<=1s,e2e<=3s,ttft<2s", r"limit 3 \('ttft<2s'\): limited before"),
        ("ttft:p99<=1s,ttft:p99.0<=2s", r"limit 2 \('ttft:p99<=2s'\): limited before"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_limits(text)
    assert "\n" not in str(caught.value)


_times = st.integers(1, 10**15)
_per_request = st.lists(
    st.builds(RequestLimit, st.sampled_from(METRICS), _times, st.booleans()),
    unique_by=lambda limit: limit.metric,
)
_percentiles = st.integers(0, 1000).map(lambda q: f"p{q / 10:g}")
_statistics = st.lists(
    st.builds(
        StatisticLimit,
        st.sampled_from(METRICS),
        st.sampled_from(["mean", "max"]) | _percentiles,
        _times,
        st.booleans(),
    ),
    unique_by=lambda limit: (limit.metric, limit.statistic),
)


@given(_per_request, _statistics)
def test_what_is_printed_is_read(
    per_request: list[RequestLimit], statistics: list[StatisticLimit]
) -> None:
    limits = Limits(tuple(per_request), tuple(statistics))
    if limits:
        assert parse_limits(str(limits)) == limits


@given(_times)
def test_times_are_printed_exactly(time_ns: int) -> None:
    assert parse_limits(f"e2e<={format_ns(time_ns)}").per_request[0].limit_ns == time_ns


def test_bounds_are_inclusive_where_the_sign_says_so() -> None:
    assert StatisticLimit("ttft", "p99", 100).holds(100.0)
    assert not StatisticLimit("ttft", "p99", 100, is_inclusive=False).holds(100.0)
    assert not StatisticLimit("ttft", "p99", 100).holds(None)
