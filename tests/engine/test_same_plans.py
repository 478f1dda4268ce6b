"""The engine and the simulator make the same plans, block id for block id, for the same arrivals.

One simulated step takes 1 ns, so that the n-th step of the simulation starts at the time n (later
ones after an idle time); the engine is given the requests at the same steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from blockmanager import BlockManager
from blockmanager.content import Content, HashedContent, TokenContent
from gpu_backend.sampling import SamplingParams
from records.recorder import Recorder
from scheduler import Request, Scheduler, SchedulerConfig, StepOutcome, StepPlan, StepResult
from scheduler.policies import load_policy
from simulator.cost import ConstantCost
from simulator.replica import simulate
from tests.engine.helpers import VOCAB, Driven, assert_nothing_left, make_engine
from traces.workload import Arrival, OpenLoop


class Taken(NamedTuple):
    """A plan in plain numbers, and what came of it."""

    sequences: list[str]
    granted: list[int]
    computed_before: list[int]
    samples: list[bool]
    tables: list[list[int]]
    new_blocks: dict[str, list[int]]
    admitted: list[tuple[str, list[int], bool, bool]]
    preempted: list[tuple[str, str, int, int, int, bool]]
    copies: list[tuple[int, int]]
    swapped_in: list[tuple[int, int]]
    swapped_out: list[tuple[int, int]]
    evicted: list[int]
    blocked_by: str | None
    num_free: int
    finished: list[tuple[str, str]]
    forked: list[tuple[str, list[str]]]


class Recording(Scheduler):
    """Takes down every plan that does something."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.taken: list[Taken] = []
        self._tables: list[list[int]] = []

    def schedule(self, max_steps: int = 1) -> StepPlan:
        plan = super().schedule(max_steps)
        self._tables = [list(table) for table in plan.block_ids]
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> StepOutcome:
        outcome = super().update(plan, result)
        if plan or plan.preempted:
            self.taken.append(
                Taken(
                    [sequence.id for sequence in plan.sequences],
                    plan.granted.tolist(),
                    plan.computed_before.tolist(),
                    plan.samples.tolist(),
                    self._tables,
                    {sequence.id: list(blocks) for sequence, blocks in plan.new_blocks.items()},
                    [(a.sequence.id, a.hit_blocks, a.resumed, a.swapped_in) for a in plan.admitted],
                    [(p.sequence.id, p.requester.id, *p[2:]) for p in plan.preempted],
                    [(src, dst) for src, dst in plan.copies],
                    [(src, dst) for src, dst in plan.swapped_in],
                    [(src, dst) for src, dst in plan.swapped_out],
                    plan.evicted,
                    plan.blocked_by,
                    plan.num_free_blocks,
                    [(entry.sequence.id, entry.reason) for entry in outcome.finished],
                    [(fork.parent.id, [c.id for c in fork.children]) for fork in outcome.forked],
                )
            )
        return outcome


class Setting(NamedTuple):
    num_blocks: int
    block_size: int
    manager: dict[str, Any]
    config: dict[str, Any]
    policy: str


def simulated(setting: Setting, arrivals: list[Arrival]) -> list[Taken]:
    blocks = BlockManager(setting.num_blocks, setting.block_size, **setting.manager)
    scheduler = Recording(SchedulerConfig(**setting.config), blocks, load_policy(setting.policy))
    recorder = Recorder(setting.num_blocks)
    simulate(scheduler, ConstantCost(1e-9), recorder, OpenLoop(arrivals), fast_forward=False)
    scheduler.check()
    return scheduler.taken


def served(setting: Setting, arrivals: list[Arrival]) -> Driven:
    """The same by the engine; it tells the scheduler no tokens, as nobody knows them in a trace."""
    engine = make_engine(
        setting.num_blocks,
        setting.block_size,
        policy=setting.policy,
        tell_tokens=False,
        scheduler_class=Recording,
        **setting.manager,
        **setting.config,
    )
    driven = Driven(engine)
    upcoming = list(arrivals)
    params = SamplingParams(temperature=1.0, seed=0)
    now = 0
    while upcoming or engine.num_unfinished:
        if not engine.num_unfinished:
            now = max(now, upcoming[0].request.arrival_ns)
        driven.expire(now)
        while upcoming and upcoming[0].request.arrival_ns <= now:
            arrival = upcoming.pop(0)
            length = arrival.request.num_prompt_tokens
            rng = np.random.default_rng(len(upcoming))
            engine.add_request(
                arrival.request,
                rng.integers(0, VOCAB, length),
                params,
                forced_tokens=arrival.output_tokens,
                answer_ids=None
                if arrival.transcript is None
                else rng.integers(0, VOCAB, arrival.output_tokens).tolist(),
                transcript=arrival.transcript,
            )
        step = driven.step()
        now += bool(step.plan)
        # A deadline that fell inside the step was missed.
        driven.expire(now - 1)
        assert len(driven.steps) < 3000
    return driven


@st.composite
def _loads(draw: st.DrawFn) -> tuple[Setting, list[Arrival]]:
    size = draw(st.sampled_from([1, 2, 4, 16]))
    common = np.arange(40)
    requests: list[Arrival] = []
    time = 0
    for number in range(draw(st.integers(2, 8))):
        time += draw(st.sampled_from([0, 0, 1, 3, 40]))
        prompt, output = draw(st.integers(1, 30)), draw(st.integers(1, 14))
        shared = draw(st.integers(0, prompt))
        tokens = np.concatenate([common[:shared], 1000 * (number + 1) + np.arange(prompt - shared)])
        hashes = np.concatenate([common, 100 * (number + 1) + np.arange(40)])
        content: Content | None = draw(
            st.sampled_from(
                [
                    None,
                    TokenContent(tokens),
                    TokenContent(tokens),
                    HashedContent(hashes[: -(-prompt // 4)], 4, prompt),
                ]
            )
        )
        asked = draw(st.sampled_from([None, output, output + 3, max(output - 2, 1)]))
        request = Request(
            id=f"r{number}",
            arrival_ns=time,
            num_prompt_tokens=prompt,
            content=content,
            max_tokens=asked,
            n=draw(st.sampled_from([1, 1, 1, 2, 3])),
            priority=draw(st.integers(0, 2)),
            deadline_ns=draw(st.sampled_from([None, None, None, time + 9])),
        )
        transcript = None
        if isinstance(content, TokenContent) and request.n == 1 and draw(st.booleans()):
            # What follows the common text, so that a longer prompt of it goes on from this answer.
            transcript = TokenContent(np.concatenate([tokens, common[shared:][:output]]))
        requests.append(Arrival(request, output, transcript))
    needs = [
        a.request.n * -(-(a.request.num_prompt_tokens + a.output_tokens + 3) // size)
        for a in requests
    ]
    swap = draw(st.sampled_from([0, 0, 5, 200]))
    manager = {
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        "watermark_blocks": draw(st.sampled_from([0, 0, 1])),
        "num_swap_blocks": swap,
    }
    config = {
        "max_num_seqs": draw(st.sampled_from([3, 4, 12])),
        "max_num_batched_tokens": draw(st.sampled_from([2, 7, 16, 300])),
        "max_model_len": 64,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 5])),
        "preemption_mode": "swap" if swap else "recompute",
        "parallel_sampling": draw(st.sampled_from(["fork", "fork", "separate"])),
    }
    room = draw(st.sampled_from([0, 1, 4, 100]))
    policy = draw(st.sampled_from(["fcfs", "fcfs", "priority", "priority-preemptive"]))
    return Setting(max(needs) + room, size, manager, config, policy), requests


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(_loads())
def test_the_simulator_and_the_engine_make_the_same_plans(
    load: tuple[Setting, list[Arrival]],
) -> None:
    setting, arrivals = load
    want = simulated(setting, arrivals)
    driven = served(setting, arrivals)
    scheduler = driven.engine.scheduler
    assert isinstance(scheduler, Recording)
    for number, (ours, theirs) in enumerate(zip(scheduler.taken, want, strict=False)):
        assert ours == theirs, f"step {number}"
    assert len(scheduler.taken) == len(want)
    assert_nothing_left(driven.engine)
    # Outputs have the lengths that were asked for, whatever tokens they are made of.
    for arrival in arrivals:
        limit = min(arrival.output_tokens, arrival.request.max_tokens or arrival.output_tokens)
        for output in driven.results[arrival.request.id].outputs:
            if output.finish_reason in ("stop", "length"):
                assert len(output.token_ids) == limit
    event(f"preempted: {driven.num_preempted > 0}")
    event(f"swapped in: {driven.num_swapped_in > 0}")
    event(f"copied: {driven.num_copies > 0}")
    event(f"hit: {driven.num_hits > 0}")
    outputs = [output for result in driven.results.values() for output in result.outputs]
    event(f"timed out: {any(output.finish_reason == 'timed_out' for output in outputs)}")
