"""Reported faults of serving systems as tests; the id of the case is in the test's name.

Their reference scheduler is this one with chunked prefill on and ``fcfs``. "Step 1" is the first
step; an arrival at index a is visible from step a + 1.
"""

from __future__ import annotations

from typing import Any

import pytest

from scheduler import RequestRefusedError, Stop
from tests.scheduling.helpers import Engine, make_request, make_scheduler, tokens

# -- SC-01: a request longer than the pool ---------------------------------------------------


def test_sc_01_impossible_request_is_refused_with_both_numbers() -> None:
    engine = Engine(make_scheduler(10, 16, max_model_len=512))
    with pytest.raises(RequestRefusedError) as refused:
        engine.add("X", 200, 10, max_tokens=10)
    # ceil(209 / 16) = 14
    assert refused.value.request_id == "X"
    assert "14 blocks" in refused.value.reason
    assert "10" in refused.value.reason.split("14 blocks")[1]
    assert engine.scheduler.num_unfinished == 0
    engine.add("Y", 32, 8, max_tokens=8)
    engine.drain()
    assert engine.token_steps["Y"] == list(range(1, 9))
    assert min(step.num_free for step in engine.steps) == 10 - 3
    assert engine.reasons == {"Y": "stop"}


def test_sc_01_refusal_changes_nothing() -> None:
    scheduler = make_scheduler(10, 16, max_model_len=512)
    before = scheduler.blocks.pool.free_ids()
    for _ in range(1000):
        with pytest.raises(RequestRefusedError):
            scheduler.add(make_request("X", 200, 10))
    assert scheduler.blocks.pool.free_ids() == before
    assert not scheduler.arrays.alive.any()
    assert not scheduler.is_unfinished("X")
    scheduler.check()


# -- SC-02: preemption without thrash --------------------------------------------------------


def two_growing(num_blocks: int, **config: Any) -> Engine:
    scheduler = make_scheduler(
        num_blocks, 16, enable_prefix_caching=False, max_num_batched_tokens=64, **config
    )
    engine = Engine(scheduler)
    engine.add("A", 64, 80)
    engine.add("B", 64, 80)
    return engine.drain()


def test_sc_02_exact_counts_under_shortage() -> None:
    engine = two_growing(10)
    assert engine.num_steps == 146
    assert engine.preemptions == ["B"]
    assert engine.recomputed == 78
    assert engine.tokens_computed == 2 * (64 + 79) + 78 == 364
    a, b = engine.token_steps["A"], engine.token_steps["B"]
    assert (a[0], a[-1]) == (1, 80)
    assert (b[0], b[-1]) == (3, 146)
    assert len(a) == len(b) == 80
    assert engine.num_free == 10


def test_sc_02_exact_counts_with_room() -> None:
    engine = two_growing(100)
    assert engine.num_steps == 82
    assert engine.tokens_computed == 286
    assert engine.preemptions == []


def test_sc_02_admission_by_next_chunk_thrashes() -> None:
    # The option exists (vLLM's), and this is what it costs.
    engine = two_growing(10, scheduler_reserve_full_isl=False)
    assert len(engine.preemptions) == 9
    assert engine.recomputed == 582
    assert engine.tokens_computed == 868


# -- SC-03: what a resumed request computes --------------------------------------------------


def test_sc_03_resumption_computes_prompt_and_outputs() -> None:
    def served(num_blocks: int) -> Engine:
        engine = Engine(make_scheduler(num_blocks, 4, enable_prefix_caching=False))
        engine.add("A", 16, 6)  # takes its sixth block in step 6, when X needs its fourth
        engine.add("X", tokens("x", 8), 10)
        return engine.drain()

    short, ample = served(8), served(100)
    assert short.preemptions == ["X"]
    assert ample.preemptions == []
    # Preempted after 5 outputs: 12 slots were written, 13 tokens are known.
    resumed = next(step for step in short.steps if step.resumed)
    assert resumed.computed_before["X"] == 0
    assert resumed.granted["X"] == 13
    assert len(resumed.new_blocks["X"]) == 4
    assert sum(resumed.granted.values()) == 13
    assert "X" in resumed.sampled
    assert len(short.outputs("X")) == 10
    assert short.outputs("X") == ample.outputs("X")


# -- SC-05: an unfit head does not stop whoever holds the blocks -----------------------------


def test_sc_05_holder_of_the_blocks_goes_on_while_the_head_waits() -> None:
    scheduler = make_scheduler(270, 16, max_num_batched_tokens=4000)
    engine = Engine(scheduler)
    engine.add("L", 255 * 16, 1)
    engine.step()
    assert scheduler.blocks.num_free == 20  # L holds 250 and needs 5 more
    engine.add("H", 100 * 16, 1)
    engine.add("W", 10 * 16, 1)
    step = engine.step()
    assert step.granted == {"L": 80}
    assert step.blocked_by == "blocks"
    engine.drain()
    assert engine.reasons == {"L": "stop", "H": "stop", "W": "stop"}
    assert all(step.granted for step in engine.steps)


def test_sc_05_swapped_out_holder_comes_back_before_the_head() -> None:
    scheduler = make_scheduler(
        270, 16, num_swap_blocks=300, preemption_mode="swap", max_num_batched_tokens=8192
    )
    engine = Engine(scheduler)
    engine.add("K", 16 * 16, 40)  # the older one: 16 blocks, 3 more in its 40 steps
    engine.add("L", 254 * 16, 40)
    engine.until(lambda: bool(engine.preemptions))
    assert engine.preemptions == ["L"]
    assert [s.id for s in scheduler.swapped] == ["L"]
    engine.add("H", 100 * 16, 1)  # fits: 270 - 19 - 100 would be left
    engine.add("W", 10 * 16, 1)
    engine.drain()
    assert engine.finish_step["L"] < engine.finish_step["H"]
    assert set(engine.reasons.values()) == {"stop"}
    assert all(step.granted for step in engine.steps)


# -- SC-06: on demand ------------------------------------------------------------------------


def test_sc_06_on_demand_runs_seventy_at_once() -> None:
    engine = Engine(make_scheduler(700, 16, max_num_seqs=70, max_model_len=2048))
    for number in range(80):
        engine.add(f"r{number}", 100, 50, max_tokens=1000)
    engine.drain()
    assert max(step.num_running for step in engine.steps) == 70
    assert min(step.num_free for step in engine.steps) == 0
    assert engine.preemptions == []
    assert set(engine.reasons.values()) == {"stop"}


# -- SC-07: one request fills the pool -------------------------------------------------------


def test_sc_07a_known_output_is_refused() -> None:
    with pytest.raises(RequestRefusedError, match=r"need 13 blocks, the pool has 10"):
        make_scheduler(10, 16).add(make_request("r", 100, 100))


def test_sc_07b_open_output_ends_with_a_reason_of_its_own() -> None:
    engine = Engine(make_scheduler(10, 16))
    engine.add("r", 100, 100)
    engine.drain()
    assert engine.reasons == {"r": "kv_exhausted"}
    assert len(engine.outputs("r")) == 61
    assert engine.num_free == 10
    engine.add("next", 100, 2)
    assert engine.drain().reasons["next"] == "stop"


def test_sc_07_thirteen_blocks_are_enough() -> None:
    engine = Engine(make_scheduler(13, 16))
    engine.add("r", 100, 100, max_tokens=100)
    engine.drain()
    assert len(engine.outputs("r")) == 100
    assert engine.preemptions == []
    assert min(step.num_free for step in engine.steps) == 0


# -- SC-09 (b): an urgent request behind a full set of slots ---------------------------------


@pytest.mark.parametrize(
    ("policy", "first_token", "preemptions"),
    [("priority", 1001, 0), ("priority-preemptive", 11, 1)],
)
def test_sc_09b_urgent_request_and_the_slot_limit(
    policy: str, first_token: int, preemptions: int
) -> None:
    engine = Engine(make_scheduler(1000, 16, policy=policy, max_num_seqs=2))
    engine.add("low0", 4, 1000, priority=1)
    engine.add("low1", 4, 1000, priority=1)
    for _ in range(10):
        engine.step()
    engine.add("high", 4, 4, priority=0)
    engine.drain()
    assert engine.token_steps["high"][0] == first_token
    assert len(engine.preemptions) == preemptions
    assert [len(engine.outputs(r)) for r in ("low0", "low1", "high")] == [1000, 1000, 4]


# -- SC-10: shortage is counted in blocks ----------------------------------------------------


def test_sc_10_slack_of_one_is_no_room_for_another() -> None:
    engine = Engine(make_scheduler(7, 16, enable_prefix_caching=False))
    engine.add("A", 32, 3)
    engine.add("B", 32, 3)
    engine.add("C", 33, 3)
    assert engine.step().num_free == 0
    step = engine.step()
    assert step.preempted == ["C"]
    assert step.granted == {"A": 1, "B": 1}
    assert step.num_free == 1
    engine.drain()
    assert engine.preemptions == ["C"]


# -- SC-11: the cached count is that of the admission ----------------------------------------


def test_sc_11a_only_what_is_not_cached_is_scheduled() -> None:
    engine = Engine(make_scheduler(4, 256))
    text = tokens("text", 465)
    engine.add("first", text[:300], 1)
    engine.drain()
    engine.add("r", text, 2)
    plan = engine.schedule()
    (sequence,) = plan.sequences
    assert plan.granted.tolist() == [209]
    assert plan.computed_before.tolist() == [256]
    assert len(sequence.table) == 2
    assert plan.num_tokens == 209
    engine.finish_plan(plan)


def test_sc_11b_hits_of_a_failed_attempt_are_forgotten() -> None:
    engine = Engine(make_scheduler(4, 4))
    text = tokens("c", 16)
    engine.add("seed", text[:8], 1)
    engine.drain()
    engine.add("big", 7, 10)  # 16 slots: all four blocks before it ends
    engine.step()
    engine.add("C", text, 1)  # attempts with 2 hits, needs 2 + 2
    hits_at_attempts = []
    while engine.scheduler.is_unfinished("big"):
        (waiting,) = engine.scheduler.waiting
        hits_at_attempts.append(len(engine.scheduler.blocks.find_hit(waiting.table, 16)))
        engine.step()
    assert hits_at_attempts[0] == 2
    assert hits_at_attempts[-1] == 0
    step = engine.step()
    assert step.granted == {"C": 16}
    assert step.cached == {}
    cold = Engine(make_scheduler(4, 4, enable_prefix_caching=False))
    cold.add("C", text, 1)
    assert engine.outputs("C") == cold.drain().outputs("C")


# -- SC-12: whose work is thrown away --------------------------------------------------------


@pytest.mark.parametrize(("policy", "recomputed"), [("fcfs", 4000), ("fcfs-fewest-lost", 100)])
def test_sc_12_victim_and_recomputed_tokens(policy: str, recomputed: int) -> None:
    # Z: 100 computed, admitted first; X: 4,000 computed, admitted last; one block short.
    scheduler = make_scheduler(
        257, 16, policy=policy, enable_prefix_caching=False, max_num_batched_tokens=4200
    )
    engine = Engine(scheduler)
    engine.add("Z", 99, 30)
    engine.add("X", 3999, 30)
    engine.step()
    engine.step()
    computed = {s.id: s.num_computed_tokens for s in scheduler.running}
    assert computed == {"Z": 100, "X": 4000}
    assert scheduler.blocks.num_free == 0
    engine.drain()
    assert engine.preemptions == ["X" if policy == "fcfs" else "Z"]
    assert engine.recomputed == recomputed
    assert engine.tokens_computed == (99 + 29) + (3999 + 29) + recomputed


def test_sc_12_preempted_come_back_before_those_who_wait_the_oldest_first() -> None:
    engine = Engine(make_scheduler(6, 2, enable_prefix_caching=False, max_num_seqs=3))
    for name in ("A", "B", "C", "W"):  # three slots: W waits from the start
        engine.add(name, 4, 6)
    engine.drain()
    # C in step 2, when A and B need their third blocks; B in step 4, when A needs its fourth.
    assert engine.preemptions[:2] == ["C", "B"]
    came_in = [seq_id for s in engine.steps for seq_id in (*s.resumed, *s.admitted)]
    assert came_in[:6] == ["A", "B", "C", "B", "C", "W"]


# -- SC-13: the last token is never written --------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "outputs", "need"), [(16, 17, 2), (16, 16, 2), (16, 1, 1), (17, 16, 2)]
)
def test_sc_13_one_rule_for_admission_and_allocation(prompt: int, outputs: int, need: int) -> None:
    scheduler = make_scheduler(2, 16)
    assert scheduler.blocks_at_peak(make_request("r", prompt, outputs), outputs) == need
    engine = Engine(scheduler)
    engine.add("r", prompt, outputs, max_tokens=outputs)
    engine.drain()
    assert len(engine.outputs("r")) == outputs
    assert 2 - min(step.num_free for step in engine.steps) == need
    one_less = make_scheduler(need - 1, 16) if need > 1 else None
    if one_less is not None:
        with pytest.raises(
            RequestRefusedError, match=f"need {need} blocks, the pool has {need - 1}"
        ):
            one_less.add(make_request("r", prompt, outputs))


# -- BM-06: copy-on-write for n > 1 ----------------------------------------------------------


def test_bm_06a_copies_of_a_half_filled_block() -> None:
    engine = Engine(make_scheduler(10, 4))
    engine.add("g", tokens("g", 10), 6, max_tokens=6, n=4)
    engine.step()
    pool = engine.scheduler.blocks.pool
    tables = [s.table.blocks for s in engine.scheduler.running]
    assert len(tables) == 4
    assert tables[0] == tables[1] == tables[2] == tables[3]
    assert [pool.ref_count(block) for block in tables[0]] == [4, 4, 4]
    assert pool.num_used == 3
    half_filled = tables[0][2]
    step = engine.step()
    assert len(step.copies) == 3
    assert {src for src, _ in step.copies} == {half_filled}
    assert pool.num_used == 6
    # The last writer keeps the original.
    assert engine.scheduler.running[-1].table.blocks[2] == half_filled
    engine.drain()
    assert min(s.num_free for s in engine.steps) == 0
    assert engine.preemptions == []
    assert sum(len(s.copies) for s in engine.steps) == 3
    assert {seq_id: len(engine.outputs(seq_id)) for seq_id in engine.sequences} == {
        f"g#{i}": 6 for i in range(4)
    }
    assert pool.num_free == 10


def test_bm_06a_group_that_needs_one_more_block_is_refused() -> None:
    with pytest.raises(
        RequestRefusedError, match=r"each of 4 outputs need 10 blocks, the pool has 9"
    ):
        make_scheduler(9, 4).add(make_request("g", 10, 6, n=4))


def test_bm_06b_no_copies_at_a_block_boundary() -> None:
    engine = Engine(make_scheduler(10, 4))
    engine.add("g", tokens("g", 8), 6, max_tokens=6, n=4)
    engine.step()
    assert engine.scheduler.blocks.pool.num_used == 2
    step = engine.step()
    assert step.copies == []
    assert engine.scheduler.blocks.pool.num_used == 6
    engine.drain()
    assert min(s.num_free for s in engine.steps) == 0
    assert sum(len(s.copies) for s in engine.steps) == 0
    assert engine.num_free == 10


def test_bm_06c_one_output_ends_alone() -> None:
    # A scheduler aborts whole requests; one output of four ends early by a stop of the driver.
    def served(stop_one: bool) -> Engine:
        engine = Engine(make_scheduler(10, 4))
        engine.add("g", tokens("g", 10), 6, max_tokens=6, n=4)
        engine.step()
        engine.step()
        plan = engine.schedule()
        used = engine.scheduler.blocks.pool.num_used
        position = [s.id for s in plan.sequences].index("g#2")
        engine.finish_plan(plan, [Stop(position)] if stop_one else [])
        # Its table: two shared blocks of the prompt, one of its own.
        assert engine.scheduler.blocks.pool.num_used == used - stop_one
        return engine.drain()

    stopped, whole = served(True), served(False)
    assert stopped.reasons["g#2"] == "stop"
    assert len(stopped.outputs("g#2")) == 3
    for other in ("g#0", "g#1", "g#3"):
        assert stopped.outputs(other) == whole.outputs(other)
        assert len(stopped.outputs(other)) == 6
    assert stopped.num_free == 10


# -- SV-01: an id in use ---------------------------------------------------------------------


def test_sv_01_duplicate_id_is_refused_while_in_use() -> None:
    engine = Engine(make_scheduler(100, 16))
    engine.add("r", 8, 50)
    for _ in range(10):
        engine.step()
    with pytest.raises(RequestRefusedError, match="id is in use"):
        engine.add("r", 8, 50)
    assert len(engine.scheduler.running) == 1
    engine.drain()
    assert engine.token_steps["r"] == list(range(1, 51))
    assert len(engine.scheduler.running) == 0
    engine.add("r", 8, 50)
    assert engine.drain().token_steps["r"] == list(range(51, 101))


# -- SV-05 (b): the context limit during generation ------------------------------------------


def test_sv_05b_context_limit_ends_as_length() -> None:
    engine = Engine(make_scheduler(100, 4, max_model_len=16))
    engine.add("r", 10, 100, max_tokens=100)
    engine.drain()
    assert len(engine.outputs("r")) == 6
    assert engine.reasons == {"r": "length"}


def test_sv_05a_prompt_over_the_context_is_refused() -> None:
    with pytest.raises(RequestRefusedError, match="1028 tokens, max_model_len 1024"):
        make_scheduler(100, 16, max_model_len=1024).add(make_request("r", 1028))
