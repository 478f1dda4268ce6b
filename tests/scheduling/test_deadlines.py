"""Deadlines and aborts: who ends when, and what is left behind (nothing)."""

from __future__ import annotations

import pytest

from scheduler import StepResult
from tests.scheduling.helpers import Engine, make_request, make_scheduler, tokens


def test_deadline_is_inclusive_and_ends_whoever_waits_or_runs() -> None:
    engine = Engine(make_scheduler(100, max_num_seqs=1))
    engine.add("runs", 4, 50, deadline_ns=10)
    engine.add("waits", 4, 50, deadline_ns=10)
    engine.add("stays", 4, 2)
    engine.step()
    assert engine.expire(9) == []
    assert [(f.sequence.id, f.reason) for f in engine.expire(10)] == [
        ("runs", "timed_out"),
        ("waits", "timed_out"),
    ]
    assert engine.expire(10) == []
    assert engine.num_free == 100
    engine.drain()
    assert engine.reasons["stays"] == "stop"


def test_deadline_ends_a_swapped_out_sequence() -> None:
    scheduler = make_scheduler(
        4, 2, enable_prefix_caching=False, num_swap_blocks=4, preemption_mode="swap"
    )
    engine = Engine(scheduler)
    engine.add("A", 4, 3)
    engine.add("B", 4, 3, deadline_ns=5)
    engine.until(lambda: engine.preemptions == ["B"])
    assert [f.sequence.id for f in engine.expire(5)] == ["B"]
    assert scheduler.blocks.host_pool is not None
    assert scheduler.blocks.host_pool.num_used == 0
    engine.drain()


def test_deadline_ends_all_outputs_that_are_left() -> None:
    engine = Engine(make_scheduler(100))
    engine.add("g", tokens("g", 6), 9, n=3, deadline_ns=7)
    engine.step()
    assert {f.sequence.id for f in engine.expire(7)} == {"g#0", "g#1", "g#2"}
    assert engine.num_free == 100


def test_deadline_of_a_finished_request_is_nobodys() -> None:
    engine = Engine(make_scheduler(100))
    engine.add("r", 4, 1, deadline_ns=10)
    engine.drain()
    assert engine.scheduler.next_deadline() is None
    assert engine.expire(10) == []


def test_deadline_does_not_reach_a_later_request_of_the_same_id() -> None:
    engine = Engine(make_scheduler(100))
    engine.add("r", 4, 1, deadline_ns=10)
    engine.drain()
    engine.add("r", 4, 5, deadline_ns=30)
    assert engine.expire(10) == []
    assert [f.sequence.id for f in engine.expire(30)] == ["r"]
    engine.add("r", 4, 5)
    assert engine.expire(1000) == []
    engine.drain()


def test_next_deadline_is_the_earliest_of_the_living() -> None:
    engine = Engine(make_scheduler(100))
    assert engine.scheduler.next_deadline() is None
    engine.add("late", 4, 5, deadline_ns=30)
    engine.add("early", 4, 5, deadline_ns=10)
    engine.add("never", 4, 5)
    assert engine.scheduler.next_deadline() == 10
    engine.abort("early")
    assert engine.scheduler.next_deadline() == 30
    engine.expire(30)
    assert engine.scheduler.next_deadline() is None


def test_deadline_inside_a_step_drops_its_token() -> None:
    engine = Engine(make_scheduler(100))
    engine.add("r", 4, 5, deadline_ns=10)
    engine.add("other", 4, 5)
    engine.step()
    plan = engine.schedule()
    engine.expire(10)
    step = engine.finish_plan(plan)
    assert step.sampled == ["other"]
    assert len(engine.outputs("r")) == 1


def test_abort_between_schedule_and_update_and_the_id_again() -> None:
    engine = Engine(make_scheduler(100))
    engine.add("r", tokens("r", 6), 5)
    plan = engine.schedule()
    (finished,) = engine.abort("r")
    assert (finished.sequence.id, finished.reason) == ("r", "aborted")
    engine.add("r", tokens("again", 5), 3)
    assert engine.sequences["r"].row != finished.sequence.row
    step = engine.finish_plan(plan)
    assert step.sampled == []
    engine.drain()
    assert engine.reasons == {"r": "stop"}
    assert len(engine.outputs("r")) == 3


def test_abort_keeps_the_cached_prefix_valid() -> None:
    engine = Engine(make_scheduler(100))
    text = tokens("text", 12)
    engine.add("r", text, 50)
    engine.step()
    engine.step()
    plan = engine.schedule()
    engine.abort("r")
    assert engine.num_free == 100
    engine.finish_plan(plan)
    engine.add("next", [*text, 1], 2)
    step = engine.step()  # the memory compares what it reads
    assert step.cached == {"next": 12}
    engine.drain()


def test_abort_of_an_unknown_or_ended_id_is_nothing() -> None:
    engine = Engine(make_scheduler(100))
    assert engine.abort("nobody") == []
    engine.add("r", 4, 1)
    engine.drain()
    assert engine.scheduler.abort("r") == []
    engine.scheduler.check()


def test_row_of_a_finished_sequence_is_readable_until_the_next_schedule() -> None:
    scheduler = make_scheduler(100)
    (sequence,) = scheduler.add(make_request("r", 4, 1))
    outcome = scheduler.update(scheduler.schedule(), StepResult(1))
    assert outcome.finished[0].sequence is sequence
    assert sequence.num_output_tokens == 1
    scheduler.add(make_request("next", 9, 1))
    assert sequence.num_tokens == 5


def test_rows_are_used_again_and_grow() -> None:
    engine = Engine(make_scheduler(2000, max_num_seqs=600))
    for number in range(600):
        engine.add(f"r{number}", 3, 1 + number % 2)
    engine.drain()
    capacity = engine.scheduler.arrays.capacity
    assert capacity >= 600
    for number in range(600):
        engine.add(f"s{number}", 3, 1)
    engine.drain()
    assert engine.scheduler.arrays.capacity == capacity


def test_schedule_and_update_alternate() -> None:
    scheduler = make_scheduler(10)
    scheduler.add(make_request("r", 4))
    plan = scheduler.schedule()
    with pytest.raises(AssertionError, match="before update"):
        scheduler.schedule()
    scheduler.update(plan, StepResult(1))
    with pytest.raises(AssertionError, match="did not just give"):
        scheduler.update(plan, StepResult(1))
