"""Outputs whose identity a driver knows beforehand: what is found of them, and what they must not change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from blockmanager import TokenContent
from blockmanager.content import Content, HashedContent
from scheduler import POLICIES, Scheduler, StepPlan, StepResult, Stop
from tests.scheduling.helpers import make_request, make_scheduler


def tokens(*parts: Iterable[int]) -> TokenContent:
    return TokenContent.of([token for part in parts for token in part])


def update(
    scheduler: Scheduler, plan: StepPlan, num_steps: int = 1, stops: Iterable[Stop] = ()
) -> None:
    scheduler.update(plan, StepResult(duration_ns=1, num_steps=num_steps, stops=list(stops)))
    scheduler.check()


def started(scheduler: Scheduler) -> None:
    """Computes the prompts of all that is waiting and fits."""
    update(scheduler, scheduler.schedule())


def offered(scheduler: Scheduler) -> int:
    """How many equal steps the scheduler offers now."""
    return scheduler.schedule(max_steps=1000).num_steps


def test_a_transcript_has_to_be_of_one_output_and_to_hold_the_prompt() -> None:
    scheduler = make_scheduler(20, 4)
    with pytest.raises(ValueError, match="r: one transcript for n = 2 outputs"):
        scheduler.add(make_request("r", range(4), n=2), TokenContent.of(range(9)))
    with pytest.raises(ValueError, match=r"of 3 tokens, of the prompt alone 4 are known"):
        scheduler.add(make_request("r", range(4)), TokenContent.of(range(3)))
    assert scheduler.num_unfinished == 0


@pytest.mark.parametrize(
    ("transcript", "num_keys"),
    [
        (TokenContent.of(range(40)), 10),
        (TokenContent.of([0, 9, *range(2, 40)]), 3),  # another text
        (HashedContent(np.arange(10), 4, 40), 3),  # other names
        (TokenContent.of([*range(12), 99, *range(13, 40)]), 10),  # the 13th token fills no block
    ],
)
def test_a_prompt_keeps_its_names(transcript: Content, num_keys: int) -> None:
    scheduler = make_scheduler(40, 4)
    (alone,) = scheduler.add(make_request("alone", range(13)))
    (known,) = scheduler.add(make_request("known", range(13)), transcript)
    assert known.table.num_keys == num_keys
    assert alone.table.keys is not None
    assert known.table.keys is not None
    assert known.table.keys.keys[:3] == alone.table.keys.keys


PROMPT, ANSWER = range(4), range(100, 160)


@pytest.fixture
def answering() -> Scheduler:
    """One slot, taken by a sequence of a prompt of one block and a known answer; one token is there."""
    scheduler = make_scheduler(100, 4, max_num_seqs=1)
    scheduler.add(make_request("running", PROMPT, 60), tokens(PROMPT, ANSWER))
    started(scheduler)
    return scheduler


def test_a_run_of_steps_ends_where_the_head_of_the_queue_gets_a_longer_hit(
    answering: Scheduler,
) -> None:
    """The fourth step fills its next block, and a step registers what it fills before it admits anybody."""
    answering.add(make_request("head", [*PROMPT, *list(ANSWER)[:9]]))
    assert offered(answering) == 3


def test_the_run_goes_on_where_nothing_more_can_be_hit(answering: Scheduler) -> None:
    answering.add(make_request("head", [*PROMPT, 100, 101, 102, 7, 8]))
    assert offered(answering) == 59


def test_a_head_without_names_cuts_no_run(answering: Scheduler) -> None:
    answering.add(make_request("head", 30))
    answering.add(make_request("behind", [*PROMPT, *list(ANSWER)[:9]]))
    assert offered(answering) == 59


def test_the_first_of_two_who_register_it_ends_the_run() -> None:
    """One is a token ahead of the other in the same answer."""
    scheduler = make_scheduler(100, 4, max_num_seqs=2)
    scheduler.add(make_request("a", PROMPT, 60), tokens(PROMPT, ANSWER))
    started(scheduler)
    update(scheduler, scheduler.schedule())
    scheduler.add(make_request("b", PROMPT, 60), tokens(PROMPT, ANSWER))
    update(scheduler, scheduler.schedule())
    scheduler.add(make_request("head", [*PROMPT, *list(ANSWER)[:9]]))
    # Of the block of 100 to 103, "a" has computed two tokens and "b" none.
    assert offered(scheduler) == 1


def test_a_block_of_the_present_hit_is_wanted_too() -> None:
    """It may be evicted during the run, and whoever registers it again brings the hit back."""
    scheduler = make_scheduler(100, 4, max_num_seqs=2)
    scheduler.add(make_request("gone", [*PROMPT, *list(ANSWER)[:4], 5]))
    scheduler.add(make_request("a", PROMPT, 60), tokens(PROMPT, ANSWER))
    plan = scheduler.schedule()
    update(scheduler, plan, stops=[Stop(0)])
    scheduler.add(make_request("b", 4, 60))
    started(scheduler)
    scheduler.add(make_request("head", [*PROMPT, *list(ANSWER)[:4], 5, 5, 5, 5, 5]))
    # "a" has computed 100 and fills its block in the third step of the run that begins now.
    assert offered(scheduler) == 2


def test_a_swapped_sequence_looks_for_no_hit() -> None:
    scheduler = make_scheduler(4, 4, num_swap_blocks=20, preemption_mode="swap")
    scheduler.add(make_request("a", PROMPT, 12), tokens(PROMPT, ANSWER))
    scheduler.add(make_request("b", PROMPT, 12), tokens(PROMPT, ANSWER))
    for _ in range(20):
        plan = scheduler.schedule()
        update(scheduler, plan)
        if len(scheduler.swapped):
            break
    assert len(scheduler.swapped) == 1
    left = 12 - (scheduler.running[0].num_tokens - 4)
    assert offered(scheduler) == left > 1


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_is_told_how_long_an_answer_will_be(policy: str) -> None:
    """Answers that nobody shares change no decision. (Nobody is preempted here: the preempted find their
    own blocks again.)"""

    def decisions(*, is_told: bool) -> list[Any]:
        rng = np.random.default_rng(3)
        scheduler = make_scheduler(24, 4, policy=policy, max_num_seqs=4)
        ends = {}
        for i in range(12):
            prompt, output = int(rng.integers(1, 20)), int(rng.integers(1, 30))
            text = range(1000 * i, 1000 * i + prompt + output)
            request = make_request(f"r{i}", text[:prompt], priority=int(rng.integers(3)))
            scheduler.add(request, TokenContent.of(text) if is_told else None)
            ends[f"r{i}"] = prompt + output
        taken = []
        while scheduler.num_unfinished:
            plan = scheduler.schedule()
            taken.append(
                (
                    [sequence.id for sequence in plan.sequences],
                    plan.granted.tolist(),
                    plan.blocked_by,
                )
            )
            stops = [
                Stop(position)
                for position, sequence in enumerate(plan.sequences)
                if plan.samples[position] and sequence.num_tokens + 1 == ends[sequence.id]
            ]
            update(scheduler, plan, stops=stops)
        return taken

    told = decisions(is_told=True)
    assert told == decisions(is_told=False)
    assert {"blocks", "slots"} & {blocked_by for _, _, blocked_by in told}
