"""Steps run as one leave the record that single steps leave, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockmanager import BlockManager, HashedContent
from catalog import load_gpu, load_model
from scheduler import Request, Scheduler, SchedulerConfig, StepResult
from scheduler.policies import FCFS, PoolState
from scheduler.replay import load_scenario
from scheduler.scheduler import Scheduler as RealScheduler
from scheduler.sequence import Sequence
from simulator.cost import ConstantCost, CostModel, LinearCost, PhysicalCost
from tests.simulation.helpers import NS, Run, arrival, run
from traces.workload import Arrival

COSTS: dict[str, CostModel] = {
    "constant": ConstantCost(0.01),
    "linear": LinearCost(0.003, 0.0007, 0.0001, 0.00001),
    "physical": PhysicalCost(
        load_model("gemma-2-2b"),
        load_gpu("l4"),
        weight_dtype="bf16",
        kv_dtype="bf16",
        tp=1,
        block_size=4,
    ),
}


class Fussy(FCFS):
    """Lets nobody in while less than half of the pool is free: its answer changes with each block."""

    name = "fussy"

    def admit(self, sequence: Sequence, state: PoolState) -> bool:
        return not state.num_running or 2 * state.num_free_blocks >= state.num_blocks


def assert_same(one: Run, other: Run, *, pools: bool = True) -> None:
    for kind in ("requests", "steps"):
        a, b = getattr(one, kind), getattr(other, kind)
        assert a.keys() == b.keys()
        for name in a:
            x, y = a[name], b[name]
            if isinstance(x, np.ma.MaskedArray):
                assert x.tolist() == y.tolist(), name
            elif isinstance(x, np.ndarray):
                assert x.dtype == y.dtype, name
                assert x.tobytes() == y.tobytes(), name
            else:
                assert x == y, name
    assert one.gaps.count == other.gaps.count
    for q in (0, 1, 50, 99, 100):
        assert one.gaps.percentile(q) == other.gaps.percentile(q)
    if pools:
        first, second = (result.scheduler.blocks.pool for result in (one, other))
        assert first.free_ids() == second.free_ids()
        assert first.num_evictions == second.num_evictions


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[Arrival], dict[str, Any]]:
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 400),  # arrival, hundredths of a second
                st.integers(1, 40),  # prompt
                st.integers(1, 60),  # output
                st.integers(0, 2),  # priority
                st.sampled_from([1, 1, 1, 2, 3]),  # n
                st.sampled_from([None, None, 0.3, 2.0]),  # deadline
                st.sampled_from([None, 0, 1]),  # which of two texts its prompt begins
                st.sampled_from([None, None, 5, 80]),  # max_tokens
                st.booleans(),  # whether its answer, the rest of the text, is known
            ),
            min_size=1,
            max_size=14,
        )
    )
    arrivals = []
    for index, row in enumerate(sorted(rows, key=lambda entry: entry[0])):
        time, prompt, output, priority, n, deadline, text, max_tokens, is_known = row
        content = transcript = None
        if text is not None:
            content = HashedContent(np.arange(prompt) + 1000 * text, 1, prompt)
            if is_known and n == 1:
                whole = prompt + output
                transcript = HashedContent(np.arange(whole) + 1000 * text, 1, whole)
        arrivals.append(
            arrival(
                f"r{index}",
                time / 100,
                prompt,
                output,
                priority=priority,
                n=n,
                content=content,
                max_tokens=max_tokens,
                deadline_ns=None if deadline is None else round((time / 100 + deadline) * NS),
            )._replace(transcript=transcript)
        )
    mode = draw(st.sampled_from(["recompute", "recompute", "swap"]))
    return arrivals, {
        "num_blocks": draw(st.integers(6, 60)),
        "block_size": draw(st.sampled_from([1, 3, 4, 16])),
        "policy": draw(
            st.sampled_from(
                ["fcfs", "fcfs-fewest-lost", "priority", "priority-preemptive", f"{__name__}:Fussy"]
            )
        ),
        "caching": draw(st.booleans()),
        "until_s": draw(st.sampled_from([None, None, 1.0, 3.37])),
        "swap_blocks": 10 if mode == "swap" else 0,
        "preemption_mode": mode,
        "max_num_seqs": draw(st.integers(3, 8)),
        "max_num_batched_tokens": draw(st.sampled_from([4, 16, 64])),
        "max_model_len": draw(st.sampled_from([64, 200])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 5])),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "parallel_sampling": draw(st.sampled_from(["fork", "separate"])),
        "async_scheduling": draw(st.booleans()),
        "frontend_ns": draw(st.sampled_from([0, 3_000_000])),
    }


@settings(max_examples=250, deadline=None)
@given(loads(), st.sampled_from(sorted(COSTS)))
def test_record_is_the_same_with_and_without(
    load: tuple[list[Arrival], dict[str, Any]], cost: str
) -> None:
    arrivals, options = load
    fast = run(arrivals, COSTS[cost], **options)
    slow = run(arrivals, COSTS[cost], fast_forward=False, **options)
    assert_same(fast, slow)


@pytest.mark.parametrize(
    "name", ["16_timed_poisson", "05b_prefix_eviction_lru", "12c_mixed300_block32"]
)
def test_recorded_scenarios_with_a_clock(shared: Path, name: str) -> None:
    """Those that vLLM's own decisions were recorded for, on the clock that one of them has."""
    scenario = load_scenario(shared / "oracle" / "golden" / f"{name}.json")
    arrivals = sorted(
        (Arrival(entry.request, len(entry.output_tokens)) for entry in scenario.requests),
        key=lambda entry: entry.request.arrival_ns,
    )
    config = scenario.scheduler_config
    options = {name: getattr(config, name) for name in SchedulerConfig.__dataclass_fields__}
    options |= {"num_blocks": scenario.num_gpu_blocks - 1, "block_size": scenario.block_size}
    cost = LinearCost(0.005, 0.00002, 0.00005)
    fast = run(arrivals, cost, caching=scenario.enable_prefix_caching, **options)
    slow = run(
        arrivals, cost, caching=scenario.enable_prefix_caching, fast_forward=False, **options
    )
    assert_same(fast, slow)


def test_tokens_that_are_told_come_one_step_at_a_time() -> None:
    """A told token may complete a block that the head of the queue waits for, so no step after the
    next is decided before it is known."""
    scheduler = decoding(100)
    plan = scheduler.schedule(50)
    assert plan.num_steps == 50
    with pytest.raises(AssertionError, match="one step at a time"):
        scheduler.update(plan, StepResult(1, token_ids=[[1], [2]], num_steps=2))


def test_a_long_answer_is_a_few_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = []
    update = RealScheduler.update

    def counting(self: RealScheduler, plan: Any, result: StepResult) -> Any:
        offers.append(result.num_steps)
        return update(self, plan, result)

    monkeypatch.setattr(RealScheduler, "update", counting)
    result = run([arrival("a", 0, 100, 2000), arrival("b", 5, 100, 500)], max_model_len=8192)
    assert len(result.steps["start_ns"]) == sum(offers) == 2000
    assert len(offers) < 12


def decoding(num_blocks: int, **config: Any) -> Scheduler:
    """Two sequences past their prefill of 5 tokens, blocks of 4."""
    scheduler = Scheduler(SchedulerConfig(**config), BlockManager(num_blocks, 4))
    for name in "ab":
        scheduler.add(Request(id=name, num_prompt_tokens=5, max_tokens=100))
    scheduler.update(scheduler.schedule(), StepResult(1))
    return scheduler


def test_offer_ends_where_blocks_run_out() -> None:
    """4 + 6 blocks: slots for 20 tokens each, 5 + 15 of them decoded."""
    scheduler = decoding(30)
    scheduler.blocks.pool.allocate(20)
    plan = scheduler.schedule(1000)
    assert plan.num_steps == 15
    taken = scheduler.update(plan, StepResult(1, num_steps=15)).blocks_taken
    # Tokens 9, 13 and 17 of both open a block: in steps 4, 8 and 12.
    assert np.flatnonzero(taken).tolist() == [2, 6, 10]
    assert taken[[2, 6, 10]].tolist() == [2, 2, 2]
    assert scheduler.blocks.num_free == 0
    assert scheduler.schedule(1000).num_steps == 1


def test_offer_ends_at_the_first_limit() -> None:
    scheduler = decoding(100, max_model_len=30)
    plan = scheduler.schedule(1000)
    assert plan.num_steps == 30 - 6  # 6 tokens known, the 30th is the last
    outcome = scheduler.update(plan, StepResult(1, num_steps=24))
    assert [entry.reason for entry in outcome.finished] == ["length", "length"]


def test_part_of_an_offer_may_be_taken() -> None:
    single, several = decoding(100), decoding(100)
    for _ in range(10):
        single.update(single.schedule(), StepResult(1))
    for count in (3, 1, 6):
        plan = several.schedule(1000)
        assert plan.num_steps > 6
        several.update(plan, StepResult(1, num_steps=count))
    several.check()
    assert [s.block_ids for s in single.running] == [s.block_ids for s in several.running]
    assert [s.num_tokens for s in single.running] == [s.num_tokens for s in several.running]


def test_more_than_was_offered_is_refused() -> None:
    scheduler = decoding(100)
    plan = scheduler.schedule(5)
    with pytest.raises(AssertionError, match="6 steps were run, 5 were offered"):
        scheduler.update(plan, StepResult(1, num_steps=6))


def test_aborted_in_the_middle_of_an_offer_takes_no_blocks() -> None:
    scheduler = decoding(100)
    plan = scheduler.schedule(50)
    scheduler.abort("a")
    scheduler.update(plan, StepResult(1, num_steps=50))
    scheduler.check()
    assert scheduler.blocks.pool.num_used == -(-(5 + 50) // 4)


def test_prefill_and_waiting_under_a_policy_of_ones_own_are_single_steps() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=1), BlockManager(100, 4), Fussy())
    request = Request(id="a", num_prompt_tokens=5)
    scheduler.add(request)
    assert scheduler.schedule(50).num_steps == 1
    scheduler.update(scheduler._pending, StepResult(1))  # type: ignore[arg-type]
    scheduler.add(replace(request, id="b"))
    plan = scheduler.schedule(50)
    assert (plan.num_steps, plan.blocked_by) == (1, "slots")
