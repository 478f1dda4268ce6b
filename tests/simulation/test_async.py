"""Steps scheduled one ahead, by hand: every step takes 10 ms."""

from __future__ import annotations

import pytest

from tests.simulation.helpers import NS, Run, arrival, run

MS = NS // 1000


def first_token_ms(result: Run, name: str) -> float:
    return float(result.row(name)["first_token_ns"]) / MS


@pytest.mark.parametrize(("ahead", "expected"), [(False, 20), (True, 30)])
def test_who_comes_during_a_step_is_in_the_one_after_the_next(ahead: bool, expected: int) -> None:
    result = run([arrival("a", 0, 10, 9), arrival("b", 0.005, 10, 2)], async_scheduling=ahead)
    assert first_token_ms(result, "a") == 10
    assert first_token_ms(result, "b") == expected


def test_who_comes_as_a_step_begins_is_in_the_next() -> None:
    """At 10 ms the second step begins; the third is scheduled right then."""
    result = run([arrival("a", 0, 10, 9), arrival("b", 0.010, 10, 2)], async_scheduling=True)
    assert first_token_ms(result, "b") == 30


def test_an_idle_engine_serves_at_once() -> None:
    result = run([arrival("a", 0, 10, 2), arrival("b", 0.5, 10, 2)], async_scheduling=True)
    assert first_token_ms(result, "b") == 510


def test_nobody_is_lost_when_the_run_is_stopped() -> None:
    arrivals = [arrival("a", 0, 10, 500), arrival("b", 1.995, 10, 2)]
    result = run(arrivals, async_scheduling=True, until_s=2.0)
    assert sorted(result.requests["id"]) == ["a", "b"]
    assert set(result.requests["status"]) == {"unfinished"}


def test_the_way_to_the_scheduler_counts_in_what_a_client_feels() -> None:
    result = run([arrival("a", 0, 10, 3)], frontend_ns=7 * MS)
    row = result.row("a")
    assert row["arrival_ns"] == 0
    assert first_token_ms(result, "a") == 17
    assert row["finish_ns"] == 37 * MS
