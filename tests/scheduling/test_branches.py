"""Beams as the scheduler sees them: sequences that branch, wait for one another, and are dropped."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from blockmanager import TokenContent
from blockmanager.content import KeyChain
from scheduler import Scheduler, Sequence, StepOutcome, StepPlan, StepResult
from scheduler.sequence import SequenceState
from tests.scheduling.helpers import MemoryBackend, make_request, make_scheduler

SIZE = 4


def start(
    prompt: int | Seq[int] = 6, width: int = 3, num_blocks: int = 20, **config: Any
) -> Scheduler:
    """A scheduler in which the request ``a`` waits for its ``width`` beams."""
    scheduler = make_scheduler(num_blocks, SIZE, **config)
    scheduler.add(make_request("a", prompt, 20, n=width))
    return scheduler


def step(
    scheduler: Scheduler,
    branches: Mapping[str, Seq[int]] | None = None,
    withheld: Seq[str] = (),
    tokens: Mapping[str, Seq[int]] | None = None,
) -> tuple[StepPlan, StepOutcome]:
    """One step in which the sequences named branch, or wait."""
    plan = scheduler.schedule()
    scheduler.check()
    outcome = update(scheduler, plan, branches, withheld, tokens)
    return plan, outcome


def update(
    scheduler: Scheduler,
    plan: StepPlan,
    branches: Mapping[str, Seq[int]] | None = None,
    withheld: Seq[str] = (),
    tokens: Mapping[str, Seq[int]] | None = None,
) -> StepOutcome:
    position = {sequence.id: i for i, sequence in enumerate(plan.sequences)}
    outcome = scheduler.update(
        plan,
        StepResult(
            1,
            branches={position[name]: ids for name, ids in (branches or {}).items()},
            withheld=[position[name] for name in withheld],
            token_ids=None
            if tokens is None
            else [tokens.get(sequence.id, ()) for sequence in plan.sequences],
        ),
    )
    scheduler.check()
    return outcome


def running(scheduler: Scheduler) -> dict[str, Sequence]:
    return {sequence.id: sequence for sequence in scheduler.running}


def refs(scheduler: Scheduler, sequence: Sequence) -> list[int]:
    return [scheduler.blocks.pool.ref_count(block) for block in sequence.block_ids]


def test_branches_share_every_block_until_they_write() -> None:
    scheduler = start(prompt=6)
    _, outcome = step(scheduler, {"a#0": [1, 2, 3]})
    beams = running(scheduler)
    assert list(beams) == ["a#0", "a#1", "a#2"]
    assert [fork.parent.id for fork in outcome.forked] == ["a#0"]
    assert [beam.block_ids for beam in beams.values()] == [[1, 2]] * 3
    assert refs(scheduler, beams["a#0"]) == [3, 3]
    assert scheduler.blocks.num_free == 18

    plan = scheduler.schedule()
    # Everyone writes position 6: two copies, and the last holder keeps the original.
    assert [tuple(copy) for copy in plan.copies] == [(2, 3), (2, 4)]
    assert plan.new_blocks == {}
    assert [beam.block_ids for beam in beams.values()] == [[1, 3], [1, 4], [1, 2]]
    assert refs(scheduler, beams["a#0"]) == [3, 1]
    update(scheduler, plan, {"a#0": [4], "a#1": [5], "a#2": [6]})
    assert step(scheduler, {name: [7] for name in beams})[0].copies == []


def test_branches_at_a_block_boundary_copy_nothing() -> None:
    scheduler = start(prompt=8)
    step(scheduler, {"a#0": [1, 2, 3]})
    plan = scheduler.schedule()
    assert plan.copies == []
    assert [plan.new_blocks[sequence] for sequence in plan.sequences] == [[3], [4], [5]]
    assert refs(scheduler, plan.sequences[0]) == [3, 3, 1]


def test_a_branch_takes_the_place_of_a_dropped_beam() -> None:
    """Children get numbers that no living beam has, and stand beside their family."""
    scheduler = start(prompt=6, width=2, max_num_seqs=3)
    scheduler.add(make_request("b", 3, 9))
    step(scheduler, {"a#0": [1, 2]})
    assert list(running(scheduler)) == ["a#0", "a#1", "b"]
    plan = scheduler.schedule()
    private = plan.sequences[0].block_ids[-1]
    outcome = update(scheduler, plan, {"a#0": [], "a#1": [3, 4]})
    assert [(f.sequence.id, f.reason) for f in outcome.finished] == [("a#0", "dropped")]
    assert list(running(scheduler)) == ["a#1", "a#2", "b"]
    assert scheduler.blocks.pool.is_free(private)
    assert refs(scheduler, running(scheduler)["a#2"]) == [2, 2]
    assert running(scheduler)["a#2"].num_tokens == 8


def test_a_search_that_drops_every_beam_is_over() -> None:
    scheduler = start()
    step(scheduler, {"a#0": [1, 2, 3]})
    _, outcome = step(scheduler, {"a#0": [], "a#1": [], "a#2": []})
    assert [entry.reason for entry in outcome.finished] == ["dropped"] * 3
    assert not scheduler.is_unfinished("a")
    assert scheduler.blocks.num_free == 20


def test_beams_at_their_limit_end_with_it() -> None:
    scheduler = make_scheduler(20, SIZE)
    scheduler.add(make_request("a", 6, 2, n=2))
    step(scheduler, {"a#0": [1, 2]})
    _, outcome = step(scheduler, {"a#0": [3, 4], "a#1": []})
    assert [(f.sequence.id, f.reason) for f in outcome.finished] == [
        *[("a#1", "dropped"), ("a#0", "length"), ("a#2", "length")]
    ]
    assert scheduler.blocks.num_free == 20


def test_slots_are_kept_for_the_beams_to_come_and_no_longer() -> None:
    scheduler = start(width=3, max_num_seqs=4)
    scheduler.add(make_request("b", 3, 9))
    scheduler.add(make_request("c", 3, 9))
    plan = scheduler.schedule()
    assert [sequence.id for sequence in plan.sequences] == ["a#0", "b"]
    assert plan.blocked_by == "slots"
    assert scheduler.num_free_slots == 0
    update(scheduler, plan, {"a#0": [1]})  # it goes on alone: two slots come free
    assert scheduler.num_free_slots == 2
    assert running(scheduler)["a#0"].slots == 1
    plan, _ = step(scheduler, {"a#0": [1, 2]})
    assert [sequence.id for sequence in plan.sequences] == ["a#0", "b", "c"]
    assert scheduler.num_free_slots == 0


def test_more_branches_than_slots_change_nothing() -> None:
    scheduler = start(prompt=[*range(6)], width=2, max_num_seqs=3)
    scheduler.add(make_request("b", 3, 9))
    step(scheduler, {"a#0": [1, 2]})
    plan = scheduler.schedule()
    arrays = scheduler.arrays

    def state() -> tuple[Any, ...]:
        return (
            list(scheduler.running),
            [sequence.block_ids.copy() for sequence in scheduler.running],
            [getattr(arrays, name).tolist() for name in (*arrays.COLUMNS, "shared", "alive")],
            scheduler.blocks.pool.free_ids(),
            scheduler.num_free_slots,
        )

    before = state()
    with pytest.raises(ValueError, match=r"^beams need 4 sequence slots, max_num_seqs is 3$"):
        update(scheduler, plan, {"a#0": [3, 4], "a#1": [5]})
    assert state() == before
    update(scheduler, plan, {"a#0": [3, 4], "a#1": []})  # the same step, as it should be
    assert list(running(scheduler)) == ["a#0", "a#2", "b"]


def test_branches_of_a_search_that_was_aborted_meanwhile_are_ignored() -> None:
    scheduler = start(width=3, max_num_seqs=3)
    plan = scheduler.schedule()
    scheduler.abort("a")
    outcome = update(scheduler, plan, {"a#0": [1, 2, 3]})
    assert (outcome.finished, outcome.forked) == ([], [])
    assert scheduler.blocks.num_free == 20


def key_of(scheduler: Scheduler, tokens: Seq[int]) -> bytes:
    chain = KeyChain(TokenContent.of(list(tokens)), SIZE)
    assert len(tokens) == SIZE * len(chain.keys)
    return chain.keys[-1]


def test_each_branch_is_cached_under_its_own_tokens() -> None:
    prompt = [*range(50, 56)]
    scheduler = start(prompt, width=3)
    step(scheduler, {"a#0": [1, 2]})
    step(scheduler, {"a#0": [3], "a#1": [4, 5]})  # 6 + 2 tokens: the second block will be full
    step(scheduler, {name: [9] for name in ("a#0", "a#1", "a#2")})
    cache = scheduler.blocks.pool.cache
    for name, outputs in {"a#0": [1, 3], "a#1": [2, 4], "a#2": [2, 5]}.items():
        block = running(scheduler)[name].block_ids[1]
        assert cache.key_of(block) == key_of(scheduler, [*prompt, *outputs])
    # Who asks for a beam's text finds that beam's blocks.
    want = running(scheduler)["a#2"].block_ids[:2]
    scheduler.add(make_request("b", [*prompt, 2, 5, 77], 3))
    assert scheduler.schedule().admitted[0].hit_blocks == want


def test_a_withheld_token_is_computed_once_more() -> None:
    scheduler = start(prompt=7, width=2)
    step(scheduler, {"a#0": [1, 2]})
    plan, outcome = step(scheduler, {"a#0": [3]}, withheld=["a#1"])
    assert [sequence.id for sequence in outcome.sampled or ()] == ["a#0"]
    waiting = running(scheduler)["a#1"]
    assert (waiting.num_tokens, waiting.num_computed_tokens) == (8, 7)
    blocks = waiting.block_ids.copy()
    for _ in range(3):
        plan, _ = step(scheduler, withheld=["a#0", "a#1"])
        assert plan.computed_before.tolist() == [8, 7]
        assert plan.granted.tolist() == [1, 1]
        assert plan.samples.all()
        assert plan.copies == []
    assert waiting.block_ids == blocks  # not one more, however long it waits
    step(scheduler, {"a#0": [4], "a#1": [5, 6]})
    assert [s.num_tokens for s in scheduler.running] == [10, 9, 9]


def test_a_withheld_block_may_have_been_hit() -> None:
    """It was registered when the step was scheduled, and a request of that step took it: what is
    computed once more goes to where it is."""
    scheduler = start(prompt=[1, 2, 3], width=2)
    step(scheduler, {"a#0": [4, 5]})
    scheduler.add(make_request("b", [1, 2, 3, 4, 9], 8))
    plan, _ = step(scheduler, withheld=["a#0", "a#1"], tokens={"b": [7]})
    assert plan.admitted[0].hit_blocks == running(scheduler)["a#0"].block_ids
    step(scheduler, {"a#0": [6], "a#1": [6]}, tokens={"b": [7]})
    step(scheduler, {"a#0": [], "a#1": []}, tokens={"b": [7]})
    scheduler.abort("b")
    scheduler.check()
    assert scheduler.blocks.num_free == 20


def test_a_withheld_beam_goes_to_host_memory_and_back() -> None:
    """With the slot that it has, and has not computed."""
    scheduler = make_scheduler(5, SIZE, num_swap_blocks=9, preemption_mode="swap")
    scheduler.add(make_request("older", 7, 3))
    scheduler.add(make_request("a", 4, 8, n=2))
    step(scheduler, {"a#0": [1, 2]})
    step(scheduler, withheld=["a#0", "a#1"])
    plan, _ = step(scheduler, withheld=["a#0"])
    (victim,) = plan.preempted
    assert (victim.sequence.id, victim.swapped_out) == ("a#1", True)
    assert (victim.sequence.num_computed_tokens, len(victim.sequence.table.host_blocks)) == (4, 2)
    assert not scheduler.is_unfinished("older")
    plan, _ = step(scheduler, {"a#0": [3], "a#1": [3]})
    assert [admission.sequence.id for admission in plan.admitted] == ["a#1"]
    assert plan.admitted[0].swapped_in
    assert plan.computed_before.tolist() == [4, 4]


# -- a step that failed ----------------------------------------------------------------------


def test_an_abandoned_step_leaves_nothing_to_find() -> None:
    """Its requests end, others do not; blocks that it was to fill are not in the prefix cache."""
    scheduler = make_scheduler(20, SIZE, max_num_seqs=2)
    early, late = [*range(9)], [*range(30, 39)]
    scheduler.add(make_request("a", early, 3))
    step(scheduler, tokens={"a": [1]})
    scheduler.add(make_request("b", late, 3))
    scheduler.add(make_request("c", late, 3))
    plan = scheduler.schedule()
    assert [sequence.id for sequence in plan.sequences] == ["a", "b"]
    finished = scheduler.abandon(plan)
    scheduler.check()
    assert [(f.sequence.id, f.reason) for f in finished] == [("a", "error"), ("b", "error")]
    plan = scheduler.schedule()
    assert [sequence.id for sequence in plan.sequences] == ["c"]
    assert plan.admitted[0].hit_blocks == []  # of "b", which was never computed
    update(scheduler, plan, tokens={"c": [1]})
    scheduler.add(make_request("d", early, 3))
    plan = scheduler.schedule()
    assert len(plan.admitted[0].hit_blocks) == 2  # of "a", an earlier step
    update(scheduler, plan, tokens={"c": [1], "d": [1]})


def test_an_abandoned_step_ends_those_whose_memory_it_moved() -> None:
    """Nobody knows whether the content reached host memory, or came back from there."""
    scheduler = make_scheduler(
        4, SIZE, num_swap_blocks=9, preemption_mode="swap", enable_prefix_caching=False
    )
    scheduler.add(make_request("a", 8, 5))
    scheduler.add(make_request("b", 7, 5))
    step(scheduler)
    plan = scheduler.schedule()
    assert [entry.sequence.id for entry in plan.preempted] == ["b"]
    assert plan.swapped_out
    finished = scheduler.abandon(plan)
    assert [entry.sequence.id for entry in finished] == ["a", "b"]
    scheduler.check()
    assert scheduler.num_unfinished == 0
    assert scheduler.blocks.num_free == 4
    assert scheduler.blocks.host_pool is not None
    assert scheduler.blocks.host_pool.num_free == 9


# -- any search ------------------------------------------------------------------------------


class BranchingMemory(MemoryBackend):
    """Memory that knows what a branch means for the text."""

    def branched(self, parent: Sequence, children: Seq[Sequence], tokens: Seq[int]) -> None:
        for child in children:
            self._tokens[child] = list(self._tokens[parent])
            self._digests[child] = list(self._digests[parent])
        for member, token in zip([parent, *children], tokens, strict=True):
            self._append(member, token)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.data())
def test_whatever_branches_every_beam_reads_its_own_past(data: st.DataObject) -> None:
    draw = data.draw
    size = draw(st.sampled_from([1, 2, 3, 4, 8]), "block size")
    prompts = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3), "prompts")
    width, outputs = draw(st.integers(2, 4), "width"), 8
    longest = max(prompts) + outputs
    swap = draw(st.sampled_from([0, 0, 6, 100]), "host blocks")
    scheduler = make_scheduler(
        # Of a search that lost what it shares, one beam at least must fit.
        -(-longest // size) * draw(st.sampled_from([1, 2, width, 9]), "room"),
        size,
        max_num_seqs=draw(st.sampled_from([width, 5, 12]), "slots"),
        max_num_batched_tokens=draw(st.sampled_from([2, 5, 100]), "budget"),
        preemption_mode="swap" if swap else "recompute",
        num_swap_blocks=swap,
        enable_prefix_caching=draw(st.booleans(), "caching"),
    )
    memory = BranchingMemory(scheduler)
    for number, length in enumerate(prompts):
        prompt = [i % 3 for i in range(length)]
        # No max_tokens: that all beams could fit at once is not asked for here.
        for sequence in scheduler.add(make_request(str(number), prompt, n=width)):
            memory.known(sequence, prompt)
    preempted = withheld_of_all = branched = 0
    for count in range(400):
        if not scheduler.num_unfinished:
            break
        plan = scheduler.schedule()
        scheduler.check()
        preempted += len(plan.preempted)
        memory.prepare(plan)
        memory.execute(plan)
        branches: dict[int, list[int]] = {}
        withheld = []
        free = scheduler.num_free_slots
        for position in plan.samples.nonzero()[0].tolist():
            sequence = plan.sequences[position]
            if count < 60 and draw(st.integers(0, 4)) == 0:
                withheld.append(position)
                continue
            done = sequence.num_output_tokens >= outputs
            most = 0 if done else min(width, free + sequence.slots)
            chosen = draw(st.lists(st.integers(0, 4), min_size=min(1, most), max_size=most))
            if count > 30:
                chosen = chosen[:1]
            if draw(st.integers(0, 9)) == 0:
                chosen = []
            free += sequence.slots - len(chosen)
            branches[position] = chosen
        outcome = scheduler.update(plan, StepResult(1, branches=branches, withheld=withheld))
        scheduler.check()
        children = {fork.parent: fork.children for fork in outcome.forked}
        for position, chosen in branches.items():
            sequence = plan.sequences[position]
            if chosen:
                memory.branched(sequence, children.get(sequence, ()), chosen)
                branched += len(chosen) > 1
        withheld_of_all += len(withheld)
    assert scheduler.num_unfinished == 0
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    assert scheduler.num_free_slots == scheduler.config.max_num_seqs
    event(f"preempted: {preempted > 0}")
    event(f"withheld: {withheld_of_all > 0}")
    event(f"branched: {branched > 2}")


def test_forking_needs_a_slot_and_a_running_parent() -> None:
    scheduler = start(width=1, max_num_seqs=2)
    step(scheduler)
    (parent,) = scheduler.running
    child = scheduler.fork(parent, 5)
    assert (child.id, child.state, child.block_ids) == ("a#5", SequenceState.RUNNING, [1, 2])
    scheduler.check()
    with pytest.raises(ValueError, match=r"^no slot to fork a: max_num_seqs is 2$"):
        scheduler.fork(parent, 6)
    scheduler.check()


def test_requests_that_are_requeued_come_back_one_after_the_other() -> None:
    """From wherever their sequences are, at the head of the queue, to be computed again."""
    scheduler = make_scheduler(
        9, SIZE, num_swap_blocks=3, preemption_mode="swap", max_num_seqs=6, max_model_len=32
    )
    scheduler.add(make_request("old", [*range(60, 67)], 20))
    scheduler.add(make_request("a", [*range(40, 46)], n=2))
    scheduler.add(make_request("b", [*range(50, 58)], n=2))
    step(scheduler, {"a#0": [1, 2], "b#0": [1, 2]}, tokens={"old": [1]})
    scheduler.add(make_request("c", 3, 2))
    for _ in range(6):  # the old one grows, the others wait
        plan = scheduler.schedule()
        beams = [sequence.id for sequence in plan.sequences if sequence.id != "old"]
        update(scheduler, plan, withheld=beams, tokens={"old": [3]})
    assert list(running(scheduler)) == ["old", "a#0", "a#1"]
    assert [sequence.id for sequence in scheduler.swapped] == ["b#1"]
    assert [sequence.id for sequence in scheduler.waiting] == ["b#0", "c"]

    scheduler.requeue(["a", "b"])
    plan = scheduler.schedule()
    scheduler.check()
    assert [sequence.id for sequence in plan.sequences] == ["old"]
    assert not plan.admitted
    assert not plan.swapped_out
    assert [(p.sequence.id, p.tokens_lost) for p in plan.preempted] == [("a#1", 6), ("a#0", 6)]
    assert [sequence.id for sequence in scheduler.waiting] == ["a#0", "a#1", "b#0", "b#1", "c"]
    assert scheduler.blocks.host_pool is not None
    assert scheduler.blocks.host_pool.num_free == 3
    update(scheduler, plan, tokens={"old": [4]})
    plan = scheduler.schedule()
    assert [admission.sequence.id for admission in plan.admitted][:2] == ["a#0", "a#1"]
    first, second = (admission.sequence for admission in plan.admitted[:2])
    assert first.block_ids[0] == second.block_ids[0]  # the prompt, once again
    update(
        scheduler,
        plan,
        withheld=[sequence.id for sequence in plan.sequences if sequence.id != "old"],
        tokens={"old": [4]},
    )
    for name in ("old", "a", "b", "c"):
        scheduler.abort(name)
    scheduler.check()
    assert scheduler.blocks.num_free == 9
