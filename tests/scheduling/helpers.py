"""What the scheduler's tests share: small factories, a fake backend, and a memory that can be read.

No torch and no clock in here. ``Engine`` is the least a driver can be; ``MemoryBackend`` is what
makes a plan worth something: it keeps the KV memory slot by slot and does exactly what the plan
says, in the documented order, so that a block given away too early is read back as nonsense.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from blockmanager import BlockManager, TokenContent
from blockmanager.content import Content
from scheduler import (
    Finished,
    Policy,
    Request,
    Scheduler,
    SchedulerConfig,
    Sequence,
    StepOutcome,
    StepPlan,
    StepResult,
    Stop,
    load_policy,
)

Prompt = int | Seq[int]
"""A number of tokens that nobody knows, or the token ids."""


def make_scheduler(
    num_blocks: int,
    block_size: int = 4,
    *,
    policy: str | Policy = "fcfs",
    enable_prefix_caching: bool = True,
    watermark_blocks: int = 0,
    num_swap_blocks: int = 0,
    scheduler_class: type[Scheduler] = Scheduler,
    **config: Any,
) -> Scheduler:
    """A scheduler over a pool of its own; ``config`` goes to ``SchedulerConfig``."""
    blocks = BlockManager(
        num_blocks,
        block_size,
        enable_prefix_caching=enable_prefix_caching,
        watermark_blocks=watermark_blocks,
        num_swap_blocks=num_swap_blocks,
    )
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    return scheduler_class(SchedulerConfig(**config), blocks, chosen)


def make_request(
    request_id: str, prompt: Prompt, max_tokens: int | None = None, **more: Any
) -> Request:
    if isinstance(prompt, int):
        num_tokens, content = prompt, None
    else:
        num_tokens, content = len(prompt), TokenContent.of(list(prompt))
    more.setdefault("content", content)
    return Request(id=request_id, num_prompt_tokens=num_tokens, max_tokens=max_tokens, **more)


class Step(NamedTuple):
    """One step as it was: the plan in plain words, taken down before ``update`` changed anything."""

    granted: dict[str, int]
    computed_before: dict[str, int]
    admitted: list[str]
    resumed: list[str]
    preempted: list[str]
    cached: dict[str, int]
    """Tokens found in the prefix cache on admission, where any were."""
    new_blocks: dict[str, list[int]]
    copies: list[tuple[int, int]]
    num_free: int
    """Free blocks once the step was scheduled."""
    blocked_by: str | None
    sampled: list[str]
    """Who got a token; the children of a fork after their parent."""
    finished: list[tuple[str, str]]
    num_running: int
    """Sequences that run after the step."""


class MemoryBackend:
    """KV memory that can be read: slot -> what was written there.

    The value of a position is a digest of the whole sequence up to it, as the KV of a real model
    depends on all that comes before: a block with the right tokens behind another prefix is wrong.

    ``prepare`` takes down a plan's slots as soon as it is scheduled, as an engine that hands its
    input to a GPU does; ``execute`` may come after sequences of the plan have been aborted.
    """

    VOCABULARY = 5
    """Few words, so that outputs of different sequences are often the same."""

    swaps_in_before_copies = False
    """The wrong order, for the test that shows it is wrong."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._size = scheduler.blocks.block_size
        self._device: dict[int, int] = {}
        self._host: dict[int, int] = {}
        self._tokens: dict[Sequence, list[int]] = {}
        self._digests: dict[Sequence, list[int]] = {}
        self._slots: list[list[int]] = []
        self.num_reads = 0
        """Positions that were read back and were right."""

    def known(self, sequence: Sequence, prompt: Iterable[int], namespace: int = 0) -> None:
        """A sequence that arrived, and its prompt; ``namespace`` stands for adapter and salt."""
        self._tokens[sequence] = []
        self._digests[sequence] = [namespace]
        for token in prompt:
            self._append(sequence, token)

    def outputs(self, sequence: Sequence) -> list[int]:
        return self._tokens[sequence][sequence.num_prompt_tokens :]

    def _append(self, sequence: Sequence, token: int) -> None:
        self._tokens[sequence].append(token)
        digests = self._digests[sequence]
        data = f"{digests[-1]}/{token}".encode()
        digests.append(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big"))

    def prepare(self, plan: StepPlan) -> None:
        """Take down which slots every sequence of the plan reads and writes."""
        ends = (plan.computed_before + plan.granted).tolist()
        self._slots = [
            sequence.table.slot_mapping(0, end, self._size).tolist()
            for sequence, end in zip(plan.sequences, ends, strict=True)
        ]

    def execute(self, plan: StepPlan) -> list[list[int]]:
        """Do the step; the sampled ids, an empty list where a sequence does not sample."""
        device, host = self._device, self._host
        for src, dst in plan.swapped_out:
            self._move(device, src, host, dst)
        if self.swaps_in_before_copies:
            for src, dst in plan.swapped_in:
                self._move(host, src, device, dst)
        for src, dst in plan.copies:
            self._move(device, src, device, dst)
        if not self.swaps_in_before_copies:
            for src, dst in plan.swapped_in:
                self._move(host, src, device, dst)
        befores = plan.computed_before.tolist()
        for sequence, slots, before in zip(plan.sequences, self._slots, befores, strict=True):
            digests = self._digests[sequence]
            for position in range(before, len(slots)):
                device[slots[position]] = digests[position + 1]
        sampled = []
        samples = plan.samples.tolist()
        for sequence, slots, does in zip(plan.sequences, self._slots, samples, strict=True):
            want = self._digests[sequence][1 : len(slots) + 1]
            got = [device.get(slot) for slot in slots]
            assert got == want, (
                f"{sequence.id} reads something else at positions "
                f"{[i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]} "
                f"of {len(slots)} (block size {self._size})"
            )
            self.num_reads += len(slots)
            first = want[-1] % self.VOCABULARY
            sampled.append(
                [(first + k) % self.VOCABULARY for k in range(sequence.slots)] if does else []
            )
        return sampled

    def _move(self, source: dict[int, int], src: int, target: dict[int, int], dst: int) -> None:
        for offset in range(self._size):
            value = source.get(src * self._size + offset)
            if value is None:
                target.pop(dst * self._size + offset, None)
            else:
                target[dst * self._size + offset] = value

    def updated(self, plan: StepPlan, sampled: list[list[int]], outcome: StepOutcome) -> None:
        """Append what was sampled, now that it is known who forked and who was dropped."""
        children_of = {fork.parent: fork.children for fork in outcome.forked}
        position_of = {sequence: i for i, sequence in enumerate(plan.sequences)}
        for parent in plan.sequences if outcome.sampled is None else outcome.sampled:
            ids = sampled[position_of[parent]]
            for child in children_of.get(parent, ()):
                self._tokens[child] = list(self._tokens[parent])
                self._digests[child] = list(self._digests[parent])
            for member, token in zip([parent, *children_of.get(parent, ())], ids, strict=True):
                self._append(member, token)


@dataclass
class Engine:
    """The least a driver can be: outputs end at their true length, which only it knows.

    Every step runs ``Scheduler.check()`` before and after, and through a ``MemoryBackend``.
    """

    scheduler: Scheduler
    report_ids: bool = True
    """Whether the sampled ids are told to the scheduler (a simulator does not know them)."""
    memory: MemoryBackend = field(init=False)
    steps: list[Step] = field(init=False, default_factory=list)
    reasons: dict[str, str] = field(init=False, default_factory=dict)
    finish_step: dict[str, int] = field(init=False, default_factory=dict)
    token_steps: dict[str, list[int]] = field(init=False, default_factory=dict)
    """For each sequence, the number (from 1) of the step that brought each output."""
    sequences: dict[str, Sequence] = field(init=False, default_factory=dict)
    computed_at_birth: dict[Sequence, int] = field(init=False, default_factory=dict)
    """Tokens that a child of a fork shares with its parent; 0 for the others."""
    _targets: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = MemoryBackend(self.scheduler)

    # -- requests ----------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        outputs: int,
        *,
        max_tokens: int | None = None,
        **more: Any,
    ) -> None:
        """Submit a request whose outputs really have ``outputs`` tokens; ``max_tokens`` only if given.

        Raises ``RequestRefusedError``.
        """
        request = make_request(request_id, prompt, max_tokens, **more)
        text = (
            [token_of(request_id, i) for i in range(prompt)] if isinstance(prompt, int) else prompt
        )
        for sequence in self.scheduler.add(request):
            self._arrived(sequence)
            self.memory.known(sequence, text)
        self._targets[request_id] = outputs

    def add_known(self, request: Request, text: Seq[int], outputs: int, namespace: int = 0) -> None:
        """Submit a request of which the engine knows the text, whatever the scheduler knows of it."""
        for sequence in self.scheduler.add(request):
            self._arrived(sequence)
            self.memory.known(sequence, text, namespace)
        self._targets[request.id] = outputs

    def _arrived(self, sequence: Sequence) -> None:
        self.sequences[sequence.id] = sequence
        self.computed_at_birth[sequence] = sequence.num_computed_tokens
        self.reasons.pop(sequence.id, None)  # the id is used again
        self.token_steps[sequence.id] = []

    def abort(self, request_id: str) -> list[Finished]:
        return self._ended(self.scheduler.abort(request_id))

    def expire(self, now_ns: int) -> list[Finished]:
        return self._ended(self.scheduler.expire(now_ns))

    def _ended(self, finished: list[Finished]) -> list[Finished]:
        for sequence, reason in finished:
            assert sequence.id not in self.reasons, f"{sequence.id} ends twice"
            self.reasons[sequence.id] = reason
            self.finish_step[sequence.id] = len(self.steps)
        return finished

    # -- steps -------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    def schedule(self) -> StepPlan:
        self.scheduler.check()
        plan = self.scheduler.schedule()
        self.scheduler.check()
        self.memory.prepare(plan)
        return plan

    def finish_plan(self, plan: StepPlan, extra_stops: Iterable[Stop] = ()) -> Step:
        """Execute a scheduled plan and take its result in."""
        granted = dict(zip([s.id for s in plan.sequences], plan.granted.tolist(), strict=True))
        before = dict(zip(granted, plan.computed_before.tolist(), strict=True))
        num_free = plan.num_free_blocks
        sampled = self.memory.execute(plan)
        stops = [*self._stops(plan), *extra_stops]
        token_ids = sampled if self.report_ids else None
        outcome = self.scheduler.update(plan, StepResult(1, token_ids=token_ids, stops=stops))
        for fork in outcome.forked:
            for child in fork.children:
                self._arrived(child)
        self.memory.updated(plan, sampled, outcome)
        self.scheduler.check()
        children_of = {fork.parent: fork.children for fork in outcome.forked}
        got = plan.sequences if outcome.sampled is None else outcome.sampled
        family = [m.id for s in got for m in (s, *children_of.get(s, ()))]
        size = self.scheduler.blocks.block_size
        self.steps.append(
            Step(
                granted=granted,
                computed_before=before,
                admitted=[a.sequence.id for a in plan.admitted if not a.resumed],
                resumed=[a.sequence.id for a in plan.admitted if a.resumed],
                preempted=[p.sequence.id for p in plan.preempted],
                cached={
                    a.sequence.id: size * len(a.hit_blocks) for a in plan.admitted if a.hit_blocks
                },
                new_blocks={s.id: list(blocks) for s, blocks in plan.new_blocks.items()},
                copies=[(c.src, c.dst) for c in plan.copies],
                num_free=num_free,
                blocked_by=plan.blocked_by,
                sampled=family,
                finished=[(f.sequence.id, f.reason) for f in outcome.finished],
                num_running=len(self.scheduler.running),
            )
        )
        for seq_id in family:
            self.token_steps[seq_id].append(len(self.steps))
        self._ended(outcome.finished)
        return self.steps[-1]

    def step(self) -> Step:
        return self.finish_plan(self.schedule())

    def until(self, holds: Callable[[], bool], max_steps: int = 300) -> Step:
        """Step until something holds; the last step taken. It must come about."""
        for _ in range(max_steps):
            step = self.step()
            if holds():
                return step
        raise AssertionError(f"did not come about in {max_steps} steps")

    def _stops(self, plan: StepPlan) -> list[Stop]:
        return [
            Stop(position, sample)
            for position, sequence in enumerate(plan.sequences)
            if plan.samples[position]
            and sequence.num_output_tokens + 1 >= self._targets[sequence.request.id]
            for sample in range(sequence.slots)
        ]

    def drain(self, max_steps: int = 2000) -> Engine:
        """Step until nothing is left."""
        while self.scheduler.num_unfinished:
            left = self.scheduler.num_unfinished
            assert self.num_steps < max_steps, f"still {left} after {max_steps} steps"
            self.step()
        self.scheduler.check()
        return self

    # -- what it came to ---------------------------------------------------------------------

    @property
    def tokens_computed(self) -> int:
        return sum(sum(step.granted.values()) for step in self.steps)

    @property
    def preemptions(self) -> list[str]:
        return [seq_id for step in self.steps for seq_id in step.preempted]

    @property
    def recomputed(self) -> int:
        return sum(sequence.num_recomputed_tokens for sequence in self.sequences.values())

    @property
    def num_free(self) -> int:
        return self.scheduler.blocks.num_free

    def outputs(self, seq_id: str) -> list[int]:
        return self.memory.outputs(self.sequences[seq_id])


def token_of(name: str, position: int) -> int:
    """A made-up token for text that nobody else has."""
    digest = hashlib.blake2b(f"{name}:{position}".encode(), digest_size=4).digest()
    return 1000 + int.from_bytes(digest, "big")


def tokens(name: str, length: int) -> list[int]:
    """``length`` tokens of the text ``name``."""
    return [token_of(name, position) for position in range(length)]


def partly_known(text: Seq[int], known: int) -> Content:
    return TokenContent(np.asarray(text[:known], np.int64))
