"""Random scenarios: nothing breaks, nothing is lost, and every context reads back as it was written.

Each scenario runs through ``Engine``: ``Scheduler.check()`` at every turn, and a memory that does
what the plans say and compares every position that a sequence reads.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from blockmanager import (
    BlockManager,
    BlockTable,
    Content,
    ExtraKeys,
    HashedContent,
    TokenContent,
)
from scheduler import POLICIES, Request, RequestRefusedError, Scheduler, Sequence, StepPlan
from scheduler.policies import FCFS
from scheduler.scheduler import _Step
from scheduler.sequence import SequenceState
from tests.scheduling.helpers import Engine, make_scheduler

MAX_STEPS = 600
Knowledge = Literal["ids", "nothing", "part", "hashes"]
AbortAt = Literal["before schedule", "before update", "after update"]


@dataclass(frozen=True)
class Arrival:
    """A request of a scenario, and what its client and its driver will do."""

    step: int
    text: tuple[int, ...]
    knowledge: Knowledge
    outputs: int
    tell_max_tokens: bool
    n: int
    priority: int
    salt: str | None
    deadline: int | None
    """Steps after its arrival."""
    abort: tuple[int, AbortAt] | None
    """Steps after its arrival, and when in the step."""


@dataclass(frozen=True)
class Load:
    """A scenario: settings and arrivals."""

    num_blocks: int
    block_size: int
    policy: str
    watermark_blocks: int
    enable_prefix_caching: bool
    num_swap_blocks: int
    report_ids: bool
    config: tuple[tuple[str, Any], ...]
    arrivals: tuple[Arrival, ...]

    def engine(self, scheduler_class: type[Scheduler] = Scheduler) -> Engine:
        scheduler = make_scheduler(
            self.num_blocks,
            self.block_size,
            policy=self.policy,
            enable_prefix_caching=self.enable_prefix_caching,
            watermark_blocks=self.watermark_blocks,
            num_swap_blocks=self.num_swap_blocks,
            scheduler_class=scheduler_class,
            **dict(self.config),
        )
        return Engine(scheduler, report_ids=self.report_ids)


# -- scenarios -------------------------------------------------------------------------------

TEXTS = [[(family * 7 + i * i) % 4 for i in range(40)] for family in range(2)]
"""Two texts that prompts begin with, in a vocabulary that outputs share."""


@st.composite
def arrivals(draw: st.DrawFn, max_n: int, departures: bool) -> Arrival:
    shared = draw(st.integers(0, 24))
    own = draw(st.lists(st.integers(0, 4), min_size=0 if shared else 1, max_size=12))
    at: st.SearchStrategy[AbortAt] = st.sampled_from(
        ["before schedule", "before update", "after update"]
    )
    return Arrival(
        step=draw(st.integers(0, 12)),
        text=(*draw(st.sampled_from(TEXTS))[:shared], *own),
        knowledge=draw(st.sampled_from(["ids", "ids", "ids", "nothing", "part", "hashes"])),
        outputs=draw(st.integers(1, 20)),
        tell_max_tokens=draw(st.booleans()),
        n=draw(st.integers(1, max_n)),
        priority=draw(st.integers(0, 2)),
        salt=draw(st.sampled_from([None, None, None, "s"])),
        deadline=draw(st.none() | st.integers(0, 25)) if departures else None,
        abort=draw(st.none() | st.tuples(st.integers(0, 15), at)) if departures else None,
    )


@st.composite
def loads(
    draw: st.DrawFn,
    *,
    max_n: int = 1,
    departures: bool = True,
    policies: tuple[str, ...] = tuple(POLICIES),
    modes: tuple[str, ...] = ("recompute", "swap"),
) -> Load:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    num_blocks = draw(st.integers(2, 14) | st.integers(2, 40) | st.just(400))
    chunked = draw(st.booleans())
    max_model_len = draw(st.sampled_from([20, 50, 500]))
    budget = draw(st.integers(1, 12) | st.integers(4, 60))
    mode = draw(st.sampled_from(modes))
    return Load(
        num_blocks=num_blocks,
        block_size=block_size,
        policy=draw(st.sampled_from(policies)),
        watermark_blocks=draw(st.sampled_from([0, 0, 1, 3])),
        enable_prefix_caching=draw(st.booleans()),
        num_swap_blocks=draw(st.integers(1, 20)) if mode == "swap" else 0,
        report_ids=draw(st.booleans()),
        config=(
            ("max_num_seqs", draw(st.integers(1, 8))),
            ("max_num_batched_tokens", budget if chunked else max(budget, max_model_len)),
            ("max_model_len", max_model_len),
            ("enable_chunked_prefill", chunked),
            ("long_prefill_token_threshold", draw(st.sampled_from([0, 0, 1, 3, 7]))),
            ("scheduler_reserve_full_isl", draw(st.booleans())),
            ("preemption_mode", mode),
            ("parallel_sampling", draw(st.sampled_from(["fork", "separate"]))),
        ),
        arrivals=tuple(draw(st.lists(arrivals(max_n, departures), min_size=1, max_size=7))),
    )


def content_of(text: tuple[int, ...], knowledge: Knowledge) -> Content | None:
    if knowledge == "nothing":
        return None
    if knowledge == "part":
        return TokenContent.of(text[: len(text) * 2 // 3])
    if knowledge == "ids":
        return TokenContent.of(text)
    size = 5
    ids = [hash(text[: start + size]) for start in range(0, len(text), size)]
    return HashedContent(np.array(ids, np.int64), size, len(text))


# -- the run ---------------------------------------------------------------------------------


class Run:
    """Drives one scenario to its end and checks what must hold whatever it is."""

    def __init__(self, load: Load, scheduler_class: type[Scheduler] = Scheduler) -> None:
        self.load = load
        self.engine = load.engine(scheduler_class)
        self.scheduler = self.engine.scheduler
        self.config = self.scheduler.config
        self.transcript: list[Any] = []
        self.refused: dict[str, str] = {}
        self.granted: dict[Sequence, int] = {}
        self.step = 0
        self._abort_at: dict[tuple[int, AbortAt], list[str]] = {}
        todo = sorted(enumerate(load.arrivals), key=lambda pair: pair[1].step)
        while todo or self.scheduler.num_unfinished:
            assert self.step < MAX_STEPS, (
                f"still {self.scheduler.num_unfinished} after {MAX_STEPS} steps"
            )
            while todo and todo[0][1].step <= self.step:
                self._submit(*todo.pop(0))
            self.engine.expire(self.step)
            self._aborts("before schedule")
            self._one_step()
            self._aborts("after update")
            self.step += 1
        self._at_the_end()

    def _submit(self, index: int, arrival: Arrival) -> None:
        request = Request(
            id=f"r{index}",
            arrival_ns=self.step,
            num_prompt_tokens=len(arrival.text),
            content=content_of(arrival.text, arrival.knowledge),
            max_tokens=arrival.outputs if arrival.tell_max_tokens else None,
            n=arrival.n,
            priority=arrival.priority,
            deadline_ns=None if arrival.deadline is None else self.step + arrival.deadline,
            extra_keys=ExtraKeys(salt=arrival.salt),
        )
        free = self.scheduler.blocks.pool.free_ids()
        try:
            self.engine.add_known(request, arrival.text, arrival.outputs, arrival.salt is not None)
        except RequestRefusedError as error:
            self.refused[request.id] = error.reason
            assert self.scheduler.blocks.pool.free_ids() == free
            return
        if arrival.abort is not None:
            wait, when = arrival.abort
            self._abort_at.setdefault((self.step + wait, when), []).append(request.id)

    def _aborts(self, when: AbortAt) -> None:
        for request_id in self._abort_at.pop((self.step, when), ()):
            self.engine.abort(request_id)
            assert not self.scheduler.is_unfinished(request_id)
            self.scheduler.check()

    def _one_step(self) -> None:
        scheduler = self.scheduler
        ran_before = set(scheduler.running)
        unfinished = scheduler.num_unfinished
        plan = self.engine.schedule()
        self.transcript.append(plain(plan))
        self.transcript.append(scheduler.blocks.pool.free_ids())
        self._check_plan(plan, ran_before, unfinished)
        for sequence, tokens in zip(plan.sequences, plan.granted.tolist(), strict=True):
            self.granted[sequence] = self.granted.get(sequence, 0) + tokens
        self._aborts("before update")
        step = self.engine.finish_plan(plan)
        self.transcript.append((step.sampled, step.finished, scheduler.blocks.pool.free_ids()))
        for sequence in {*plan.sequences, *scheduler.running, *scheduler.waiting}:
            self._check_accounts(sequence)

    def _check_plan(self, plan: StepPlan, ran_before: set[Sequence], unfinished: int) -> None:
        config, granted = self.config, plan.granted
        assert len(set(plan.sequences)) == len(plan.sequences)
        assert (granted > 0).all()
        assert plan.num_tokens <= config.max_num_batched_tokens
        slots = sum(sequence.slots for sequence in self.scheduler.running)
        assert slots <= config.max_num_seqs
        threshold = config.long_prefill_token_threshold
        if threshold and unfinished > 1:
            assert (granted <= threshold).all(), "more than the long-prefill threshold"
        assert bool(plan) or bool(plan.preempted) or not unfinished, "nobody has a turn"
        if self.load.policy == "fcfs":
            # The first of the running list can always go on, so a step is never empty.
            assert bool(plan) or not unfinished
        assert (plan.blocked_by is None) == (plan.num_waiting == 0)
        assert plan.num_free_blocks == self.scheduler.blocks.num_free
        for preemption in plan.preempted:
            if preemption.requester.state is SequenceState.WAITING:
                # A head of the queue for which somebody made way, or a victim of its own need.
                assert preemption.requester in {p.sequence for p in plan.preempted}, "in vain"
        come_in = {admission.sequence for admission in plan.admitted}
        assert plan.num_running == sum(s not in come_in for s in plan.sequences)
        assert all(s in ran_before for s in plan.sequences[: plan.num_running])
        assert come_in <= set(plan.sequences), "admitted, and yet not in the plan"
        totals = np.array([s.num_tokens for s in plan.sequences], np.int64)
        assert (plan.computed_before + granted <= totals).all()
        assert ((plan.computed_before + granted == totals) == plan.samples).all()
        for sequence, is_decode in zip(plan.sequences, plan.is_decode.tolist(), strict=True):
            one_left = sequence.num_output_tokens > 0 and sequence.num_uncomputed_tokens == 0
            position = plan.sequences.index(sequence)
            assert is_decode == (one_left and granted[position] == 1)
        taken = [block for blocks in plan.new_blocks.values() for block in blocks]
        taken += [copy.dst for copy in plan.copies]
        assert len(set(taken)) == len(taken), "a block is given away twice in one step"
        assert set(plan.new_blocks) <= set(plan.sequences)

    def _check_accounts(self, sequence: Sequence) -> None:
        """Granted = where it stands, less what it was given, plus what it did twice."""
        stands = sequence.num_computed_tokens + sequence.num_lost_tokens
        done_twice = sequence.num_recomputed_tokens - sequence.num_cached_tokens
        granted = self.granted.get(sequence, 0)
        assert granted == stands - self.engine.computed_at_birth[sequence] + done_twice

    def _at_the_end(self) -> None:
        engine, scheduler, blocks = self.engine, self.scheduler, self.scheduler.blocks
        scheduler.check()
        assert blocks.num_free == blocks.num_blocks
        assert blocks.host_pool is None or blocks.host_pool.num_used == 0
        assert not scheduler.arrays.alive.any()
        assert engine.reasons.keys() == engine.sequences.keys(), (
            "somebody never ended, or came from nowhere"
        )
        by_request: dict[str, int] = {}
        for seq_id, sequence in engine.sequences.items():
            by_request[sequence.request.id] = by_request.get(sequence.request.id, 0) + 1
            self._check_reason(sequence, engine.reasons[seq_id])
        ids = {f"r{index}" for index in range(len(self.load.arrivals))}
        assert by_request.keys() | self.refused.keys() == ids
        assert not by_request.keys() & self.refused.keys()
        for index, arrival in enumerate(self.load.arrivals):
            if arrival.deadline is None and arrival.abort is None and f"r{index}" in by_request:
                assert by_request[f"r{index}"] == arrival.n

    def _check_reason(self, sequence: Sequence, reason: str) -> None:
        arrival = self.load.arrivals[int(sequence.request.id[1:])]
        outputs = len(self.engine.memory.outputs(sequence))
        total = len(arrival.text) + outputs
        pool = self.load.num_blocks * self.load.block_size
        if reason == "stop":
            assert outputs == arrival.outputs
        elif reason == "length":
            assert total == self.config.max_model_len
        elif reason == "kv_exhausted":
            assert total == pool + 1
            assert not arrival.tell_max_tokens
        elif reason == "aborted":
            assert arrival.abort is not None
        else:
            assert reason == "timed_out"
            assert arrival.deadline is not None


def plain(plan: StepPlan) -> dict[str, Any]:
    """Every field of a plan, sequences by their ids."""
    return {
        "sequences": [s.id for s in plan.sequences],
        "block_ids": [list(blocks) for blocks in plan.block_ids],
        "rows": plan.rows.tolist(),
        "granted": plan.granted.tolist(),
        "computed_before": plan.computed_before.tolist(),
        "samples": plan.samples.tolist(),
        "is_decode": plan.is_decode.tolist(),
        "num_running": plan.num_running,
        "num_waiting": plan.num_waiting,
        "blocked_by": plan.blocked_by,
        "num_free_blocks": plan.num_free_blocks,
        "admitted": [(a.sequence.id, *a[1:]) for a in plan.admitted],
        "preempted": [(p.sequence.id, p.requester.id, *p[2:]) for p in plan.preempted],
        "new_blocks": {s.id: list(blocks) for s, blocks in plan.new_blocks.items()},
        "copies": list(plan.copies),
        "swapped_in": list(plan.swapped_in),
        "swapped_out": list(plan.swapped_out),
        "evicted": list(plan.evicted),
        "num_steps": plan.num_steps,
    }


def test_plain_leaves_no_field_out() -> None:
    engine = Engine(make_scheduler(4))
    engine.add("r", 3, 1)
    assert plain(engine.schedule()).keys() == {*StepPlan.__dataclass_fields__, "block_ids"}


def test_a_plan_can_be_read_after_an_abort() -> None:
    """A backend that executes it meanwhile finds the blocks where they were."""
    engine = Engine(make_scheduler(4))
    engine.add("a", 3, 5)
    engine.add("b", 5, 5)
    plan = engine.schedule()
    before = [list(blocks) for blocks in plan.block_ids]
    engine.scheduler.abort("b")
    assert plan.block_ids == before
    engine.scheduler.check()


# -- properties ------------------------------------------------------------------------------


def run_and_tell(load: Load) -> Run:
    run = Run(load)
    if run.engine.preemptions:
        event("preempted")
    if any(step.cached for step in run.engine.steps):
        event("prefix hits")
    if any(step.copies for step in run.engine.steps):
        event("copies on write")
    if any(plan["swapped_in"] for plan in run.transcript[::3]):
        event("swapped in")
    return run


@settings(max_examples=250, deadline=None)
@given(load=loads())
def test_everything_ends_and_reads_back(load: Load) -> None:
    run_and_tell(load)


@settings(max_examples=200, deadline=None)
@given(load=loads(max_n=4))
def test_everything_ends_and_reads_back_with_several_outputs(load: Load) -> None:
    run_and_tell(load)


@settings(max_examples=150, deadline=None)
@given(load=loads(departures=False))
def test_tokens_granted_are_those_of_the_outputs_and_those_done_twice(load: Load) -> None:
    run = run_and_tell(load)
    want = 0
    for sequence in run.engine.sequences.values():
        outputs = len(run.engine.memory.outputs(sequence))
        want += sequence.num_prompt_tokens + outputs - 1
        want += sequence.num_recomputed_tokens - sequence.num_cached_tokens
    assert run.engine.tokens_computed == want


@settings(max_examples=100, deadline=None)
@given(load=loads(max_n=4, departures=False))
def test_tokens_granted_with_forks_count_the_prompt_once(load: Load) -> None:
    run = run_and_tell(load)
    want = 0
    for sequence in run.engine.sequences.values():
        outputs = len(run.engine.memory.outputs(sequence))
        is_child = sequence.index > 0 and run.config.parallel_sampling == "fork"
        want += outputs - 1 + (0 if is_child else sequence.num_prompt_tokens)
        want += sequence.num_recomputed_tokens - sequence.num_cached_tokens
    assert run.engine.tokens_computed == want


@settings(max_examples=60, deadline=None)
@given(load=loads(max_n=3))
def test_same_input_same_plans(load: Load) -> None:
    assert Run(load).transcript == Run(load).transcript


class OneByOne(Scheduler):
    """Without the fast path."""

    def _grant_all_running(self, step: _Step) -> bool:
        return False


@settings(max_examples=150, deadline=None)
@given(load=loads(max_n=3))
def test_fast_path_decides_as_one_by_one(load: Load) -> None:
    fast, slow = Run(load), Run(load, OneByOne)
    for ours, theirs in zip(fast.transcript, slow.transcript, strict=True):
        assert ours == theirs


@settings(max_examples=60, deadline=None)
@given(load=loads(max_n=3, departures=False, policies=("fcfs", "priority")))
def test_outputs_do_not_depend_on_the_memory_there_is(load: Load) -> None:
    """Preemption, sharing and swap are invisible in what is generated."""
    tight = Run(load).engine
    ample = Run(
        Load(
            **{
                **{name: getattr(load, name) for name in Load.__dataclass_fields__},
                "num_blocks": 2000,
                "enable_prefix_caching": False,
            }
        )
    ).engine
    for seq_id, sequence in tight.sequences.items():
        got, want = tight.memory.outputs(sequence), ample.outputs(seq_id)
        assert got == want[: len(got)]
        assert len(got) == len(want) or tight.reasons[seq_id] == "kv_exhausted"


# -- the test of the test --------------------------------------------------------------------


def _forget_copies(plan: StepPlan) -> None:
    plan.copies.clear()


def _forget_swaps(plan: StepPlan) -> None:
    plan.swapped_in.clear()


@pytest.mark.parametrize("fault", [_forget_copies, _forget_swaps])
def test_memory_notices_what_a_backend_leaves_out(fault: Callable[[StepPlan], None]) -> None:
    scheduler = make_scheduler(
        9, 4, num_swap_blocks=9, preemption_mode="swap", enable_prefix_caching=False
    )
    engine = Engine(scheduler)
    engine.add("g", [1, 2, 3, 4, 5, 6], 8, n=2)
    engine.add("h", [1, 2, 3, 4, 5, 6, 7, 8, 9], 12)

    def serve() -> None:
        while scheduler.num_unfinished:
            plan = engine.schedule()
            fault(plan)
            engine.finish_plan(plan)

    with pytest.raises(AssertionError, match="reads something else"):
        serve()


class FirstGoes(FCFS):
    """The victim is the oldest, who had its turn already."""

    def victim(self, running: Seq[Sequence], requester: Sequence) -> int:
        return 0


def _keep_registrations(self: BlockManager, table: BlockTable, num_registered: int) -> None:
    table.num_registered = min(table.num_registered, num_registered)


def test_memory_notices_registrations_of_what_was_never_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BlockManager, "unregister", _keep_registrations)
    engine = Engine(make_scheduler(7, 2, policy=FirstGoes(), long_prefill_token_threshold=3))
    engine.add("a", list(range(9)), 2)
    engine.add("b", list(range(20, 24)), 2)
    # In step 3 a's chunk fills its fourth block, is dropped for b, and found again by a.
    with pytest.raises(AssertionError, match="a reads something else"):
        engine.drain()
    assert engine.preemptions == ["a"]


def test_memory_notices_blocks_registered_before_they_are_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = BlockManager.register

    def early(self: BlockManager, table: BlockTable, num_tokens: int) -> None:
        right(self, table, min(num_tokens + 1, len(table) * self.block_size))

    monkeypatch.setattr(BlockManager, "register", early)
    engine = Engine(make_scheduler(20, 4, long_prefill_token_threshold=3))
    engine.add("a", list(range(9)), 2)
    engine.add("b", list(range(9)), 2)
    with pytest.raises(AssertionError, match=r"reads something else|which others hold"):
        engine.drain()


def test_check_notices_blocks_that_are_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: BlockManager, table: BlockTable) -> None:
        table.blocks = []

    monkeypatch.setattr(BlockManager, "free", forget)
    engine = Engine(make_scheduler(20, 4))
    engine.add("a", 9, 2)
    with pytest.raises(AssertionError, match="block 1 has reference count 1, 0 holders"):
        engine.drain()
