"""Preemption by swapping: what is moved, what comes back first, and what it may not ignore."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from scheduler import Sequence
from scheduler.policies import FCFS
from tests.scheduling.helpers import Engine, make_scheduler, tokens


def swapping(num_blocks: int, num_swap_blocks: int, **more: Any) -> Engine:
    more.setdefault("enable_prefix_caching", False)
    return Engine(
        make_scheduler(
            num_blocks, 2, num_swap_blocks=num_swap_blocks, preemption_mode="swap", **more
        )
    )


def test_swapped_out_keeps_what_it_computed() -> None:
    engine = swapping(4, 4)
    engine.add("A", 4, 3)
    engine.add("B", 4, 3)
    engine.step()
    plan = engine.schedule()
    (preemption,) = plan.preempted
    assert preemption.sequence.id == "B"
    assert preemption.swapped_out
    assert preemption.tokens_lost == 0
    assert [(t.src, t.dst) for t in plan.swapped_out] == [(3, 1), (4, 2)]
    assert preemption.sequence.num_computed_tokens == 4
    assert "moved to host memory" in preemption.explain()
    engine.finish_plan(plan)
    engine.drain()
    (back,) = [s for s in engine.steps if s.resumed]
    assert back.granted == {"B": 1}
    assert back.computed_before == {"B": 4}
    assert engine.recomputed == 0
    assert engine.tokens_computed == 2 * 6
    assert engine.scheduler.blocks.host_pool is not None
    assert engine.scheduler.blocks.host_pool.num_used == 0


def test_recompute_when_host_memory_is_full() -> None:
    engine = swapping(4, 1)
    engine.add("A", 4, 3)
    engine.add("B", 4, 3)
    engine.drain()
    assert engine.preemptions == ["B"]
    assert engine.recomputed == 4


def test_nobody_new_is_admitted_while_somebody_is_swapped_out() -> None:
    engine = swapping(8, 8)
    engine.add("A", 4, 12)
    engine.add("B", 8, 8)
    engine.until(lambda: bool(engine.preemptions))
    engine.add("C", 1, 1)
    for _ in range(2):
        step = engine.step()
        assert step.admitted == []
        assert step.blocked_by == "blocks"
        assert engine.scheduler.swapped
    engine.drain()
    b = next(i for i, s in enumerate(engine.steps) if "B" in s.resumed)
    c = next(i for i, s in enumerate(engine.steps) if "C" in s.admitted)
    assert b <= c


def test_swapped_out_come_back_oldest_first() -> None:
    """As those who are recomputed do: the last preempted, who is the older, is at the head."""
    engine = swapping(8, 20, max_num_seqs=4)
    for name in "ABCD":
        engine.add(name, 4, 8)
    engine.drain()
    assert engine.preemptions[:2] == ["D", "C"]
    back = [seq_id for s in engine.steps for seq_id in s.resumed]
    assert back.index("C") < back.index("D")


def test_swapped_out_come_back_the_most_urgent_first() -> None:
    engine = swapping(8, 20, policy="priority")
    for arrival, (name, priority) in enumerate([("A", 0), ("B", 1), ("C", 2), ("D", 3)]):
        engine.add(name, 4, 8, priority=priority, arrival_ns=arrival)
    engine.drain()
    assert engine.preemptions[:2] == ["D", "C"]
    back = [seq_id for s in engine.steps for seq_id in s.resumed]
    assert back.index("C") < back.index("D")


def test_swap_in_keeps_to_the_long_prefill_threshold() -> None:
    engine = swapping(10, 20, long_prefill_token_threshold=2, scheduler_reserve_full_isl=False)
    engine.add("A", 2, 9)
    engine.add("S", 16, 1)
    engine.until(lambda: engine.preemptions == ["S"])
    assert engine.sequences["S"].num_uncomputed_tokens == 4
    engine.until(lambda: not engine.scheduler.is_unfinished("A"))
    engine.add("other", 1, 1)
    assert engine.step().granted == {"S": 2, "other": 1}


def test_abort_of_a_swapped_out_sequence_frees_host_memory() -> None:
    engine = swapping(4, 4)
    engine.add("A", 4, 3)
    engine.add("B", 4, 3)
    engine.until(lambda: bool(engine.preemptions))
    host = engine.scheduler.blocks.host_pool
    assert host is not None
    assert host.num_used == 2
    engine.abort("B")
    assert host.num_used == 0
    engine.drain()
    assert engine.reasons == {"A": "stop", "B": "aborted"}


def test_bm_14b_groups_with_little_swap_all_end() -> None:
    engine = Engine(make_scheduler(12, 16, num_swap_blocks=8, preemption_mode="swap"))
    assert engine.scheduler.blocks.host_pool is not None
    for number in range(20):
        engine.add(f"g{number}", tokens(f"g{number}", 32), 64, max_tokens=64, n=2)
    engine.drain(max_steps=20_000)
    assert len(engine.reasons) == 40
    assert set(engine.reasons.values()) == {"stop"}
    assert all(len(engine.outputs(seq_id)) == 64 for seq_id in engine.sequences)
    for step in engine.steps:
        if step.blocked_by is not None and not step.resumed:
            assert step.granted


class _LastGoes(FCFS):
    """Lets the queue push out whoever is last in the running list."""

    name = "last-goes"

    def displace(self, head: Sequence, running: Seq[Sequence]) -> int | None:
        return len(running) - 1 if running[-1].priority > head.priority else None


@pytest.mark.parametrize("swaps_in_before_copies", [False, True])
def test_copies_come_before_swap_ins(swaps_in_before_copies: bool) -> None:
    """P copies a block whose last holder, C, is displaced; S comes back into that very block."""
    engine = swapping(5, 5, policy=_LastGoes(), long_prefill_token_threshold=2)
    engine.memory.swaps_in_before_copies = swaps_in_before_copies
    engine.add("E", 1, 2, priority=9)
    engine.add("F", 2, 3, priority=0)
    engine.add("g", 3, 3, n=2, priority=5)
    engine.add("S", 1, 3, priority=0)
    engine.step()
    step = engine.step()
    assert step.preempted == ["S"]
    assert step.finished == [("E", "stop")]
    plan = engine.schedule()
    (copy,), (transfer,) = plan.copies, plan.swapped_in
    assert copy.src == transfer.dst
    if swaps_in_before_copies:
        with pytest.raises(AssertionError, match="g#0 reads something else"):
            engine.finish_plan(plan)
    else:
        engine.finish_plan(plan)
        engine.drain()
