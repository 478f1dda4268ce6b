"""Policies: the built-in ones where they could go wrong, and one that a user wrote."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from scheduler import POLICIES, RequestRefusedError, Sequence, load_policy
from scheduler.policies import FCFS, PoolState
from tests.scheduling.helpers import Engine, make_request, make_scheduler, tokens

# -- a policy of one's own -------------------------------------------------------------------


class ShortestPromptFirst(FCFS):
    """What a user may write; it is loaded by the name of this module."""

    name = "shortest-prompt-first"

    def queue_key(self, sequence: Sequence) -> tuple[Any, ...]:
        return (sequence.num_prompt_tokens, sequence.number)


class OneAtATime(FCFS):
    """Admission by more than what fits."""

    name = "one-at-a-time"

    def __init__(self) -> None:
        self.asked: list[tuple[str, PoolState]] = []

    def admit(self, sequence: Sequence, state: PoolState) -> bool:
        self.asked.append((sequence.id, state))
        return state.num_running == 0


class NoVictims:
    """Has an order and nothing else."""

    name = "no-victims"

    def queue_key(self, sequence: Sequence) -> tuple[Any, ...]:
        return (sequence.number,)


class NeedsArguments(FCFS):
    def __init__(self, weight: float) -> None:
        self.weight = weight


def test_policy_of_a_user_by_module_and_class() -> None:
    policy = load_policy("tests.scheduling.test_policies:ShortestPromptFirst")
    assert policy.name == "shortest-prompt-first"
    engine = Engine(make_scheduler(100, policy=policy, max_num_seqs=1))
    for name, prompt in (("long", 30), ("short", 3), ("middle", 9)):
        engine.add(name, prompt, 2)
    engine.drain()
    assert [s.admitted for s in engine.steps if s.admitted] == [["short"], ["middle"], ["long"]]


def test_queue_key_is_asked_again_when_a_sequence_comes_back() -> None:
    policy = load_policy("tests.scheduling.test_policies:ShortestPromptFirst")
    engine = Engine(
        make_scheduler(6, 2, policy=policy, enable_prefix_caching=False, max_num_seqs=2)
    )
    engine.add("A", 4, 8)
    engine.add("B", 6, 4)
    engine.step()
    engine.add("C", 3, 1)  # waits for a slot, and is shorter than the preempted B
    engine.drain()
    assert engine.preemptions == ["B"]
    came_in = [seq_id for s in engine.steps for seq_id in (*s.admitted, *s.resumed)]
    assert came_in == ["A", "B", "C", "B"]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_built_in_policies_by_name(name: str) -> None:
    assert load_policy(name).name == name
    assert type(load_policy(name)) is POLICIES[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fifo", "unknown policy 'fifo': expected fcfs, "),
        ("", "unknown policy ''"),
        ("no_such_module_anywhere:Policy", "no_such_module_anywhere"),
        ("tests.scheduling.test_policies:NoSuchClass", "NoSuchClass"),
        ("tests.scheduling.test_policies:NoVictims", r"has no method victim\(\)"),
        ("tests.scheduling.test_policies:NeedsArguments", "weight"),
        ("tests.scheduling.test_policies:", "cannot be loaded"),
        (":Policy", "cannot be loaded"),
    ],
)
def test_policy_that_cannot_be_loaded_is_a_clear_value_error(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_policy(name)
    assert "\n" not in str(caught.value)


def test_admission_hook_sees_the_pool_and_ends_the_scan() -> None:
    policy = OneAtATime()
    engine = Engine(make_scheduler(10, 4, policy=policy))
    engine.add("A", 8, 2)
    engine.add("B", 4, 1)
    engine.add("C", 4, 1)
    step = engine.step()
    assert step.admitted == ["A"]
    assert step.blocked_by == "policy"
    assert policy.asked == [("A", PoolState(0, 10, 10)), ("B", PoolState(1, 8, 10))]
    engine.drain()
    assert [s.admitted for s in engine.steps] == [["A"], [], ["B"], ["C"]]


# -- victims ---------------------------------------------------------------------------------


def test_fewest_lost_takes_the_least_computed_the_last_of_equals() -> None:
    engine = Engine(make_scheduler(10, 2, policy="fcfs-fewest-lost", enable_prefix_caching=False))
    for name, prompt in (("A", 8), ("B", 4), ("C", 4), ("D", 4)):
        engine.add(name, prompt, 3)
    engine.step()
    assert engine.num_free == 0
    step = engine.step()
    # All four need a block. A takes one of D's two, B the other; C has nobody behind it and is the
    # least computed of those left, as B's grant counts.
    assert step.preempted == ["D", "C"]
    assert list(step.granted) == ["A", "B"]
    engine.drain()


def test_priority_prefers_the_least_urgent_then_the_latest() -> None:
    engine = Engine(make_scheduler(8, 2, policy="priority", enable_prefix_caching=False))
    for arrival, (name, priority) in enumerate([("A", 1), ("B", 2), ("C", 2), ("D", 0)]):
        engine.add(name, 4, 3, priority=priority, arrival_ns=arrival)
    assert engine.step().admitted == ["D", "A", "B", "C"]
    step = engine.step()
    assert step.preempted == ["C", "B"]
    assert list(step.granted) == ["D", "A"]
    engine.drain()
    assert [s.resumed for s in engine.steps if s.resumed] == [["B", "C"]]


def test_priority_among_equals_preempts_the_last_to_arrive() -> None:
    """Requests of one instant and one urgency: ties go by the order of arrival."""
    engine = Engine(make_scheduler(4, 2, policy="priority", enable_prefix_caching=False))
    engine.add("a", 4, 3)
    engine.add("b", 4, 3)
    engine.step()
    assert engine.step().preempted == ["b"]


def test_priority_among_equals_does_not_live_lock() -> None:
    # With the first of equals as victim they preempt one another for ever, each mid-prefill.
    scheduler = make_scheduler(
        9,
        4,
        policy="priority",
        enable_prefix_caching=False,
        max_num_seqs=3,
        max_num_batched_tokens=12,
        max_model_len=20,
        long_prefill_token_threshold=3,
        scheduler_reserve_full_isl=False,
        parallel_sampling="separate",
    )
    engine = Engine(scheduler)
    engine.add("r2", 11, 9)
    engine.add("r3", 6, 14, n=3)
    engine.drain(max_steps=300)
    assert set(engine.reasons.values()) == {"stop"}


# -- displacement ----------------------------------------------------------------------------


def preemptive(num_blocks: int, **more: Any) -> Engine:
    return Engine(make_scheduler(num_blocks, 2, policy="priority-preemptive", **more))


def test_displaced_for_blocks_and_resumed_later() -> None:
    engine = preemptive(4, enable_prefix_caching=False)
    engine.add("low", 4, 4, priority=5)
    engine.step()
    engine.add("high", 6, 2, priority=1)
    step = engine.step()
    assert step.preempted == ["low"]
    assert step.granted == {"high": 6}
    engine.drain()
    assert engine.preemptions == ["low"]
    assert engine.reasons == {"low": "stop", "high": "stop"}


def test_equally_urgent_are_not_displaced() -> None:
    engine = preemptive(4, max_num_seqs=1)
    engine.add("first", 4, 4, priority=1)
    engine.step()
    engine.add("second", 4, 1, priority=1)
    engine.drain()
    assert engine.preemptions == []


def test_nobody_is_displaced_once_others_read_what_it_computes_in_this_step() -> None:
    """R's chunk of this step is prefix to A; B takes R's slot, but not before A's hit is computed."""
    engine = preemptive(20, max_num_seqs=2, max_num_batched_tokens=16)
    text = tokens("text", 20)
    engine.add("R", text[:18], 2, priority=5)
    engine.step()
    engine.add("A", [*text[:18], 7], 3, priority=1)
    engine.add("B", tokens("b", 2), 2, priority=2)
    engine.drain()  # the memory compares what A reads
    assert set(engine.reasons.values()) == {"stop"}


def test_displaced_in_the_step_of_its_own_admission_is_not_in_the_plan() -> None:
    scheduler = make_scheduler(
        7,
        2,
        policy="priority-preemptive",
        enable_prefix_caching=False,
        num_swap_blocks=20,
        preemption_mode="swap",
        max_num_seqs=2,
    )
    engine = Engine(scheduler)
    engine.add("R", 6, 7, priority=0)
    engine.add("S", 6, 4, priority=9)
    engine.until(lambda: bool(engine.preemptions))
    assert [s.id for s in scheduler.swapped] == ["S"]
    engine.until(lambda: not scheduler.is_unfinished("R"))
    engine.add("U", 2, 2, priority=1)
    engine.add("V", 2, 2, priority=1)
    # S, first to be let in, takes one of two slots; V, more urgent than S, wants it.
    plan = engine.schedule()
    assert {a.sequence for a in plan.admitted} <= set(plan.sequences)
    assert plan.num_running == 0
    engine.finish_plan(plan)
    engine.drain()


def test_nobody_is_displaced_in_vain() -> None:
    engine = preemptive(8, enable_prefix_caching=False)
    engine.add("Z", 8, 2, priority=0)
    engine.add("R", 2, 2, priority=5)
    engine.step()
    # Z holds 5 blocks and R 2: with R's and the free one H would have 3 of the 4 it needs, and Z is
    # more urgent.
    engine.add("H", 8, 1, priority=1)
    step = engine.step()
    assert step.preempted == []
    assert step.granted == {"Z": 1, "R": 1}
    engine.drain()
    assert engine.preemptions == []


def test_refusal_comes_before_any_policy() -> None:
    class Explodes(FCFS):
        def queue_key(self, sequence: Sequence) -> tuple[Any, ...]:
            raise AssertionError("was asked")

        def victim(self, running: Seq[Sequence], requester: Sequence) -> int:
            raise AssertionError("was asked")

    scheduler = make_scheduler(2, 2, policy=Explodes())
    with pytest.raises(RequestRefusedError):
        scheduler.add(make_request("r", 100))
