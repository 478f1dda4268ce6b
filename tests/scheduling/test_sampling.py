"""Several outputs of one prompt: forks that share its blocks, or requests of their own."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler import Request, RequestRefusedError, StepResult, Stop
from tests.scheduling.helpers import Engine, make_request, make_scheduler, tokens


def group(
    n: int, *, prompt: int = 6, outputs: int = 4, num_blocks: int = 100, **more: Any
) -> Engine:
    engine = Engine(make_scheduler(num_blocks, 4, **more))
    engine.add("g", tokens("g", prompt), outputs, n=n)
    return engine


def test_fork_happens_at_the_first_token_and_shares_the_prompt() -> None:
    engine = group(3)
    step = engine.step()
    assert step.granted == {"g#0": 6}
    assert step.sampled == ["g#0", "g#1", "g#2"]
    assert [s.id for s in engine.scheduler.running] == ["g#0", "g#1", "g#2"]
    assert engine.scheduler.blocks.pool.num_used == 2
    engine.drain()
    assert engine.tokens_computed == 6 + 3 * 3  # the prompt once
    assert {len(engine.outputs(f"g#{i}")) for i in range(3)} == {4}


def test_separate_sequences_are_n_of_everything() -> None:
    engine = group(3, parallel_sampling="separate", enable_prefix_caching=False)
    step = engine.step()
    assert step.granted == {"g#0": 6, "g#1": 6, "g#2": 6}
    assert engine.scheduler.blocks.pool.num_used == 6
    assert engine.drain().tokens_computed == 3 * (6 + 3)


def test_separate_sequences_find_the_prompt_in_the_prefix_cache() -> None:
    engine = group(3, parallel_sampling="separate")
    assert engine.step().granted == {"g#0": 6, "g#1": 2, "g#2": 2}


def test_one_output_keeps_the_id_of_its_request() -> None:
    engine = group(1)
    assert list(engine.drain().sequences) == ["g"]


def test_children_of_a_single_output_have_ids_of_their_own() -> None:
    """As beams do: forks of a request that asked for one output."""
    scheduler = make_scheduler(10)
    (parent,) = scheduler.add(make_request("r", 6))
    plan = scheduler.schedule()
    scheduler.update(plan, StepResult(1))
    children = [scheduler.fork(parent, 1), scheduler.fork(parent, 2)]
    assert len({parent.id, *(child.id for child in children)}) == 3
    scheduler.check()


def test_slots_of_a_group_are_taken_from_its_admission_on() -> None:
    engine = group(3, prompt=8, max_num_seqs=4, max_num_batched_tokens=5)
    engine.add("a", 3, 1)
    engine.add("b", 3, 1)
    step = engine.step()
    assert step.granted == {"g#0": 5}
    # g will be three; a takes the fourth slot, b waits for one although two sequences run.
    step = engine.step()
    assert list(step.granted) == ["g#0", "a"]
    assert step.blocked_by in ("slots", "budget")
    engine.drain()
    assert max(s.num_running for s in engine.steps) <= 4


def test_group_waits_for_all_its_slots() -> None:
    engine = Engine(make_scheduler(100, max_num_seqs=3))
    engine.add("a", 3, 4)
    engine.add("g", 3, 2, n=3)
    engine.add("b", 3, 1)
    step = engine.step()
    assert step.granted == {"a": 3}
    assert step.blocked_by == "slots"  # strictly head of line: b waits behind g
    engine.drain()
    assert engine.token_steps["g#0"][0] == 5


def test_more_outputs_than_slots_are_refused() -> None:
    with pytest.raises(RequestRefusedError, match="n = 5 outputs, max_num_seqs is 4"):
        make_scheduler(100, max_num_seqs=4).add(make_request("g", 3, n=5))
    make_scheduler(100, max_num_seqs=4, parallel_sampling="separate").add(make_request("g", 3, n=5))


def test_children_stop_at_different_times() -> None:
    engine = group(3, outputs=9)

    def step_and_stop(*seq_ids: str) -> None:
        plan = engine.schedule()
        ids = [s.id for s in plan.sequences]
        engine.finish_plan(plan, [Stop(ids.index(seq_id)) for seq_id in seq_ids])

    engine.step()
    step_and_stop("g#1")
    step_and_stop()
    step_and_stop("g#0")
    assert engine.scheduler.is_unfinished("g")
    assert [s.id for s in engine.scheduler.running] == ["g#2"]
    engine.drain()
    assert not engine.scheduler.is_unfinished("g")
    assert [len(engine.outputs(f"g#{i}")) for i in range(3)] == [4, 2, 9]
    assert engine.num_free == 100


def test_some_end_with_the_first_token() -> None:
    engine = group(3)
    engine.finish_plan(engine.schedule(), [Stop(0, sample=0), Stop(0, sample=2)])
    assert engine.reasons == {"g#0": "stop", "g#2": "stop"}
    assert [s.id for s in engine.scheduler.running] == ["g#1"]
    step = engine.step()
    assert step.copies == []  # the only holder left writes in place
    engine.drain()
    assert len(engine.outputs("g#1")) == 4


def test_all_end_with_the_first_token() -> None:
    engine = group(3, outputs=1)
    step = engine.step()
    assert step.finished == [(f"g#{i}", "stop") for i in range(3)]
    assert engine.num_free == 100


def test_one_token_each_needs_only_the_blocks_of_the_prompt() -> None:
    """The first token is never written: outputs of one token write nothing beside the prompt."""
    scheduler = make_scheduler(3, 4)
    assert scheduler.blocks_at_peak(make_request("g", 10, 1, n=4), 1) == 3
    engine = Engine(scheduler)
    engine.add("g", 10, 1, max_tokens=1, n=4)
    engine.drain()
    assert len(engine.reasons) == 4


def test_open_group_is_admitted_where_its_prompt_fits() -> None:
    # No max_tokens: only the prompt and a first token must fit; children then take turns.
    engine = Engine(make_scheduler(4, 4))
    engine.add("g", tokens("g", 10), 4, n=4)
    engine.drain()
    assert [len(engine.outputs(f"g#{i}")) for i in range(4)] == [4] * 4


def test_preempted_child_resumes_on_its_own() -> None:
    engine = Engine(make_scheduler(5, 4, enable_prefix_caching=False))
    engine.add("g", tokens("g", 6), 8, n=2)
    engine.drain()
    assert "g#1" in engine.preemptions
    ample = group(2, outputs=8).drain()
    for seq_id in ("g#0", "g#1"):
        assert engine.outputs(seq_id) == ample.outputs(seq_id)


def test_parent_preempted_before_its_fork_gives_all_slots_back() -> None:
    engine = Engine(
        make_scheduler(
            4,
            4,
            enable_prefix_caching=False,
            max_num_seqs=3,
            max_num_batched_tokens=4,
            scheduler_reserve_full_isl=False,
        )
    )
    engine.add("a", 4, 9)
    engine.add("g", tokens("g", 10), 2, n=2)
    engine.until(lambda: engine.preemptions == ["g#0"])
    assert engine.sequences["g#0"].slots == 2
    assert list(engine.sequences) == ["a", "g#0"]
    engine.drain()
    assert set(engine.reasons.values()) == {"stop"}
    assert len(engine.sequences) == 3


def test_abort_takes_the_whole_family() -> None:
    engine = group(3, outputs=9)
    engine.step()
    plan = engine.schedule()
    assert {f.sequence.id for f in engine.abort("g")} == {"g#0", "g#1", "g#2"}
    engine.finish_plan(plan)
    assert set(engine.reasons.values()) == {"aborted"}
    assert engine.num_free == 100


def test_abort_before_the_fork_forks_nobody() -> None:
    engine = group(3)
    plan = engine.schedule()
    engine.abort("g")
    step = engine.finish_plan(plan)
    assert step.sampled == []
    assert engine.reasons == {"g#0": "aborted"}
    engine.add("h", 3, 2, n=2)
    engine.drain()
    assert engine.num_free == 100


def test_backend_that_samples_too_few_is_an_error_of_ours() -> None:
    scheduler = make_scheduler(10)
    scheduler.add(make_request("g", [1, 2, 3], n=2))
    plan = scheduler.schedule()
    with pytest.raises(AssertionError, match="samples 2 tokens, the backend gave 1"):
        scheduler.update(plan, StepResult(1, token_ids=[[4]]))


def test_separate_outputs_share_their_prompt_though_nobody_knows_its_tokens() -> None:
    """One prompt is equal to itself: siblings hit its full blocks, other requests do not."""
    scheduler = make_scheduler(40, 4, parallel_sampling="separate")
    for name in ("a", "b"):
        scheduler.add(Request(id=name, num_prompt_tokens=10, n=3, max_tokens=2))
    plan = scheduler.schedule()
    hits = {entry.sequence.id: len(entry.hit_blocks) for entry in plan.admitted}
    assert hits == {"a#0": 0, "a#1": 2, "a#2": 2, "b#0": 0, "b#1": 2, "b#2": 2}
