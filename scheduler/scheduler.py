"""Continuous batching: who computes how many tokens in the next step.

The rules are those of vLLM's V1 scheduler, decision for decision; where this one differs on
purpose, docs/architecture.md says how and why. Nothing in here reads a clock, sleeps or logs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blockmanager.content import Content, HashedContent
from blockmanager.manager import BlockManager, Growth
from blockmanager.table import BlockCopy, BlockTransfer
from scheduler.config import SchedulerConfig
from scheduler.plan import (
    Admission,
    BlockedBy,
    Finished,
    Fork,
    Preemption,
    StepOutcome,
    StepPlan,
    StepResult,
)
from scheduler.policies import FCFS, Policy, PoolState, PreemptivePriority
from scheduler.request import Request
from scheduler.sequence import Sequence, SequenceArrays, SequenceState
from scheduler.waiting import WaitingQueue


class RequestRefusedError(ValueError):
    """A request that can never be served here; the message has the numbers."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(f"request {request_id} refused: {reason}")
        self.request_id = request_id
        self.reason = reason


_NO_BLOCKS = np.zeros(0, np.int64)

_SLACK = 64
"""Dead entries that a heap may hold before it is worth clearing them out."""


class _Grant(NamedTuple):
    """What a scheduled sequence got, and what undoing it needs."""

    tokens: int
    computed_before: int
    registered_before: int
    growth: Growth


class _Columns(NamedTuple):
    """Grants of many sequences as arrays, one entry each."""

    sequences: list[Sequence]
    rows: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    computed_before: npt.NDArray[np.int64]
    registered_before: npt.NDArray[np.int64]
    new_blocks: dict[Sequence, list[int]]

    def by_sequence(self) -> dict[Sequence, _Grant]:
        columns = zip(
            self.sequences,
            self.tokens.tolist(),
            self.computed_before.tolist(),
            self.registered_before.tolist(),
            strict=True,
        )
        return {
            sequence: _Grant(tokens, before, keys, Growth(self.new_blocks.get(sequence, []), []))
            for sequence, tokens, before, keys in columns
        }


class _Step:
    """A plan in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.columns: _Columns | None = None
        """Grants made in bulk; they come before ``grants``."""
        self.grants: dict[Sequence, _Grant] = {}
        self.admitted: list[Admission] = []
        self.preempted: list[Preemption] = []
        self.swapped_in: list[BlockTransfer] = []
        self.swapped_out: list[BlockTransfer] = []
        self.blocked_by: BlockedBy | None = None

    def one_by_one(self) -> None:
        """Turn grants made in bulk into single ones, so that each can be undone."""
        if self.columns is not None:
            self.grants = self.columns.by_sequence() | self.grants
            self.columns = None


def _prompt_of_its_own(request: Request, block_size: int) -> Content:
    """Identity of a prompt of unknown tokens, equal to itself only under a salt of its own."""
    num_blocks = -(-request.num_prompt_tokens // block_size)
    return HashedContent(np.arange(num_blocks), block_size, request.num_prompt_tokens)


class Scheduler:
    """Decides steps over one block manager.

    ``add``, ``abort`` and ``expire`` may be called at any moment; ``schedule`` and ``update``
    alternate.

    Parameters
    ----------
    config
        Limits and options.
    blocks
        The memory; this scheduler is its only user.
    policy
        Order of the queue, choice of victims, admission.
    """

    def __init__(
        self, config: SchedulerConfig, blocks: BlockManager, policy: Policy | None = None
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.policy: Policy = FCFS() if policy is None else policy
        self.arrays = SequenceArrays()
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(self.policy.queue_key)
        self.swapped = WaitingQueue(self.policy.queue_key)
        self._of_request: dict[str, dict[Sequence, None]] = {}
        self._deadlines: list[tuple[int, int, str]] = []
        self._num_added = 0
        self._num_preemptions = 0
        self._extra_slots = 0  # of running sequences that have not forked yet
        self._running_rows: npt.NDArray[np.int64] | None = None
        self._retired_rows: list[int] = []
        self._requeued: Seq[str] = ()
        self._pending: StepPlan | None = None

    # -- requests ----------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Sequences that wait, run or are swapped out."""
        return len(self.running) + len(self.waiting) + len(self.swapped)

    @property
    def num_free_slots(self) -> int:
        """Sequences that could run beside those that do."""
        return self.config.max_num_seqs - len(self.running) - self._extra_slots

    def is_unfinished(self, request_id: str) -> bool:
        return request_id in self._of_request

    def blocks_at_peak(self, request: Request, output_tokens: int) -> int:
        """Blocks that a request with ``output_tokens`` tokens in each of its outputs needs at its end.

        The last token of an output is never written, so P prompt and O output tokens take
        P + O - 1 slots. Outputs that fork share the full blocks of their prompt.
        """
        alone = self.blocks.blocks_for(request.num_prompt_tokens + output_tokens - 1)
        # An output of one token writes nothing of its own.
        if request.n == 1 or output_tokens == 1 or self.config.parallel_sampling == "separate":
            return alone
        shared = request.num_prompt_tokens // self.blocks.block_size
        return shared + request.n * (alone - shared)

    def refusal(self, request: Request) -> str | None:
        """Why a request could never be served, with the numbers, or ``None`` if it could.

        A ``max_tokens`` that the client gave is taken at its word. Without one the request may end
        early, so only its prompt and first token must fit; it ends as ``kv_exhausted`` should it
        outgrow the pool.
        """
        prompt, config = request.num_prompt_tokens, self.config
        if request.id in self._of_request:
            return "its id is in use by an unfinished request"
        if prompt >= config.max_model_len:
            return (
                f"its prompt has {prompt} tokens, max_model_len {config.max_model_len} leaves room for "
                f"at most {config.max_model_len - 1}"
            )
        if config.parallel_sampling == "fork" and request.n > config.max_num_seqs:
            return f"it samples n = {request.n} outputs, max_num_seqs is {config.max_num_seqs}"
        output_tokens = 1
        if request.max_tokens is not None:
            output_tokens = min(request.max_tokens, config.max_model_len - prompt)
        need = self.blocks_at_peak(request, output_tokens)
        if need > self.blocks.num_blocks:
            what = f"{prompt} prompt tokens"
            if request.max_tokens is not None:
                what += f" and up to {output_tokens} output tokens"
            if request.n > 1:
                what += f" in each of {request.n} outputs"
            return f"{what} need {need} blocks, the pool has {self.blocks.num_blocks}"
        return None

    def add(self, request: Request, transcript: Content | None = None) -> list[Sequence]:
        """Queue a request.

        ``transcript`` is the identity of its prompt and of the output that it will have, for a driver
        that replays what is known: blocks that hold some of the output are registered as they fill, as
        where token ids are reported. Where it names full blocks of the prompt otherwise than
        ``request.content`` does, nothing is known of the output: equal prompts have to stay equal.

        Returns its sequences: one, or n where parallel samples are separate.

        Raises
        ------
        RequestRefusedError
            It could never be served. Nothing has changed.
        ValueError
            A transcript for several outputs, or one that tells less than ``request.content``.
        """
        content = request.content
        if transcript is not None:
            content = self.known_tokens(request, transcript)
        reason = self.refusal(request)
        if reason is not None:
            raise RequestRefusedError(request.id, reason)
        separate = request.n > 1 and self.config.parallel_sampling == "separate"
        family: dict[Sequence, None] = {}
        self._of_request[request.id] = family
        extra_keys = request.extra_keys
        if separate and content is None:
            # Whatever the prompt is, it is the same for all of them.
            content = _prompt_of_its_own(request, self.blocks.block_size)
            extra_keys = replace(extra_keys, salt=f"outputs of sequence {self._num_added}")
        for index in range(request.n if separate else 1):
            sequence = self._new_sequence(request, index, 1 if separate else request.n)
            sequence.table = self.blocks.new_table(content, request.num_prompt_tokens, extra_keys)
            row = sequence.row
            self.arrays.num_tokens[row] = request.num_prompt_tokens
            self.arrays.num_keys[row] = sequence.table.num_keys
            family[sequence] = None
            self.waiting.push(sequence)
        if request.deadline_ns is not None:
            heappush(self._deadlines, (request.deadline_ns, self._num_added, request.id))
            if len(self._deadlines) > 2 * len(self._of_request) + _SLACK:
                # Most of them are of requests that have ended.
                self._deadlines = [e for e in self._deadlines if e[2] in self._of_request]
                heapify(self._deadlines)
        return list(family)

    def known_tokens(self, request: Request, transcript: Content) -> Content:
        """What `add` takes as the sequence's identity: the transcript, or the prompt's where the two name
        full blocks of the prompt differently. Raises ``ValueError`` as `add` does."""
        prompt, size = request.content, self.blocks.block_size
        if request.n > 1:
            raise ValueError(f"request {request.id}: one transcript for n = {request.n} outputs")
        if prompt is None:
            return transcript
        if transcript.num_tokens < prompt.num_tokens:
            raise ValueError(
                f"request {request.id}: a transcript of {transcript.num_tokens} tokens, of the prompt "
                f"alone {prompt.num_tokens} are known"
            )
        pairs = zip(prompt.payloads(size), transcript.payloads(size), strict=False)
        return transcript if all(own == told for own, told in pairs) else prompt

    def _new_sequence(self, request: Request, index: int, slots: int) -> Sequence:
        seq_id = request.id if request.n == 1 and index == 0 else f"{request.id}#{index}"
        sequence = Sequence(request, seq_id, index, self._num_added, self.arrays)
        self._num_added += 1
        sequence.slots = slots
        row, prompt = sequence.row, request.num_prompt_tokens
        limit = min(self.config.max_model_len, self._pool_limit)
        if request.max_tokens is not None:
            limit = min(limit, prompt + request.max_tokens)
        self.arrays.num_prompt[row] = prompt
        self.arrays.limit[row] = limit
        return sequence

    @property
    def _pool_limit(self) -> int:
        """Tokens a sequence has when it fills the pool: the last one is not written."""
        return self.blocks.num_blocks * self.blocks.block_size + 1

    def abort(self, request_id: str, reason: str = "aborted") -> list[Finished]:
        """End a request wherever it is; its blocks are free at once.

        Returns its sequences that were unfinished (none for an unknown id: it may have just ended).
        A step already scheduled is executed as planned, and its result for them is dropped.
        """
        return [
            self.abort_output(sequence, reason)
            for sequence in list(self._of_request.get(request_id, ()))
        ]

    def abort_output(self, sequence: Sequence, reason: str = "aborted") -> Finished:
        """End one of a request's outputs; the others go on.

        Raises ``ValueError`` for one that has ended already.
        """
        if sequence.state is SequenceState.RUNNING:
            self._remove_running(self.running.index(sequence))
        elif sequence.state is SequenceState.SWAPPED:
            self.swapped.remove(sequence)
        else:
            if sequence.state is not SequenceState.WAITING:
                raise ValueError(f"output {sequence.id} has ended already")
            self.waiting.remove(sequence)
        return self._finish(sequence, reason)

    def requeue(self, request_ids: Seq[str]) -> None:
        """At the next ``schedule()`` send all sequences of these requests back to the queue, the first
        request's before the second's, to be computed again.

        For beams that wait for blocks which others of their search, or of another, hold: they come
        back search by search, and share what the prefix cache knows of them.
        """
        self._requeued = tuple(request_ids)

    def expire(self, now_ns: int) -> list[Finished]:
        """End every request whose deadline is ``now_ns`` or earlier, as ``timed_out``."""
        finished = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            deadline, _, request_id = heappop(self._deadlines)
            family = self._of_request.get(request_id)
            # The id may have been used again by a request with another deadline.
            if family and next(iter(family)).request.deadline_ns == deadline:
                finished += self.abort(request_id, "timed_out")
        return finished

    def next_deadline(self) -> int | None:
        """Earliest time at which ``expire`` could end something."""
        while self._deadlines and self._deadlines[0][2] not in self._of_request:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # -- a step ------------------------------------------------------------------------------

    def schedule(self, max_steps: int = 1) -> StepPlan:
        """Decide the next step: blocks are taken, ``num_computed_tokens`` advances by the grants.

        With ``max_steps`` above 1 the plan may offer to be repeated, see ``StepPlan.num_steps``:
        as often as single steps would decide the same. Nothing of the repetition is done before
        ``update``.
        """
        assert self._pending is None, "schedule() again before update()"
        for row in self._retired_rows:
            self.arrays.return_row(row)
        self._retired_rows.clear()
        step = _Step(self.config.max_num_batched_tokens)
        for request_id in reversed(self._requeued):
            self._requeue(request_id, step)
        self._requeued = ()
        if not self._grant_all_running(step):
            self._grant_running_one_by_one(step)
        if not step.preempted:
            self._admit_waiting(step)
        elif self.num_unfinished > len(self.running):
            step.blocked_by = "preemption"
        self._pending = self._plan(step, max_steps)
        return self._pending

    def _equal_steps(
        self,
        step: _Step,
        rows: npt.NDArray[np.int64],
        is_decode: npt.NDArray[np.bool_],
        max_steps: int,
    ) -> int:
        """How many steps like this one would follow each other, this one included.

        All run and decode, so nobody frees blocks before the run ends. What could still change the
        next decision: a sequence at its limit, a shortage of blocks, and, while somebody waits, the
        head of the queue: a policy of one's own may change its mind, and a block that is registered
        may lengthen the head's prefix hit.
        """
        arrays = self.arrays
        # Grants that were made one by one may copy shared blocks.
        if max_steps == 1 or step.columns is None or step.admitted or step.preempted:
            return 1
        if len(rows) != len(self.running) or not is_decode.all():
            return 1
        num_steps = min(max_steps, int((arrays.limit[rows] - arrays.num_tokens[rows]).min()))
        num_steps = self._affordable_steps(arrays.num_computed[rows], num_steps)
        if self.num_unfinished > len(self.running):
            if not self._waits_steadily():
                return 1
            num_steps = self._steps_before_a_hit(rows, num_steps)
        return num_steps

    def _waits_steadily(self) -> bool:
        """Whether the head of the queue stays out as long as nobody leaves: sure only of policies
        whose answers depend on nothing else."""
        policy = type(self.policy)
        return policy.admit is FCFS.admit and policy.displace in (
            FCFS.displace,
            PreemptivePriority.displace,
        )

    def _steps_before_a_hit(self, rows: npt.NDArray[np.int64], num_steps: int) -> int:
        """Most steps, up to ``num_steps``, in which nobody registers a block that would lengthen the
        prefix hit of the head of the queue, or be one of it once that block has been evicted."""
        arrays, size = self.arrays, self.blocks.block_size
        registering = arrays.num_keys[rows] > arrays.num_registered[rows]
        head = self.swapped.head() or self.waiting.head()
        assert head is not None
        if not registering.any() or head.state is SequenceState.SWAPPED or not head.table.num_keys:
            return num_steps
        assert head.table.keys is not None
        num_hit = len(self.blocks.find_hit(head.table, head.num_tokens))
        wanted = set(head.table.keys.keys[: num_hit + 1])
        for i in registering.nonzero()[0].tolist():
            keys = self.running[i].table.keys
            assert keys is not None
            # The first step is decided, and has brought it to this point.
            computed, first = int(arrays.num_computed[rows[i]]), int(arrays.num_registered[rows[i]])
            last = (computed + num_steps - 1) // size
            for index, key in enumerate(keys.keys[first:last], first):
                if key in wanted:
                    num_steps = (index + 1) * size - computed
                    break
        return num_steps

    def _affordable_steps(self, computed: npt.NDArray[np.int64], num_steps: int) -> int:
        """Most steps, up to ``num_steps``, for whose blocks the free ones suffice; one is paid."""
        size, free = self.blocks.block_size, self.blocks.num_free
        held = -(-computed // size)

        def cost(steps: int) -> int:
            return int((-(-(computed + steps - 1) // size) - held).sum())

        if cost(num_steps) <= free:
            return num_steps
        low, high = 1, num_steps  # low is affordable, high is not
        while high - low > 1:
            middle = (low + high) // 2
            if cost(middle) <= free:
                low = middle
            else:
                high = middle
        return low

    def _grant_all_running(self, step: _Step) -> bool:
        """Grant every running sequence its tokens in a few array operations.

        The common case. Returns False, with nothing done, where blocks are short (somebody must be
        preempted) or a shared block may have to be copied: ``_grant_running_one_by_one`` tells what
        happens then, and would do the same here.
        """
        if not self.running:
            return True
        arrays, rows = self.arrays, self._rows_of_running()
        if arrays.shared[rows].any():
            return False
        before = arrays.num_computed[rows]
        tokens = np.minimum(arrays.num_tokens[rows] - before, self._longest_chunk())
        granted_up_to = np.cumsum(tokens)
        if granted_up_to[-1] > step.budget:
            left = np.maximum(step.budget - (granted_up_to - tokens), 0)
            tokens = np.minimum(tokens, left)
        after = before + tokens
        size = self.blocks.block_size
        # A sequence that gets nothing in this step gets no block either.
        wanted = np.where(tokens > 0, -(-after // size) - arrays.blocks_held[rows], 0)
        num_new = int(wanted.sum())
        if num_new > self.blocks.num_free:
            return False

        new_blocks: dict[Sequence, list[int]] = {}
        if num_new:
            growing = [self.running[i] for i in wanted.nonzero()[0].tolist()]
            taken = self.blocks.extend(
                [sequence.table for sequence in growing], wanted[wanted > 0].tolist()
            )
            new_blocks = dict(zip(growing, taken, strict=True))
            arrays.blocks_held[rows] += wanted
        registered = arrays.num_registered[rows]
        arrays.num_computed[rows] = after
        full = np.minimum(after // size, arrays.num_keys[rows])
        for i in (full > registered).nonzero()[0].tolist():
            self._register(self.running[i], int(after[i]))
        step.budget -= int(granted_up_to[-1])
        columns = _Columns(list(self.running), rows, tokens, before, registered, new_blocks)
        if step.budget < 0:  # the last ones got less, or nothing
            step.budget = 0
            got = tokens > 0
            columns = _Columns(
                [self.running[i] for i in got.nonzero()[0].tolist()],
                rows[got],
                tokens[got],
                before[got],
                registered[got],
                new_blocks,
            )
        step.columns = columns
        return True

    def _grant_running_one_by_one(self, step: _Step) -> None:
        """Grant running sequences their tokens in list order, preempting where blocks are short."""
        index = 0
        while index < len(self.running) and step.budget > 0:
            sequence = self.running[index]
            before = sequence.num_computed_tokens
            tokens = min(sequence.num_tokens - before, self._longest_chunk(), step.budget)
            growth = self.blocks.grow(sequence.table, before, before + tokens)
            while growth is None:
                victim_index = self.policy.victim(self.running, sequence)
                victim = self.running[victim_index]
                need = self.blocks.blocks_to_grow(sequence.table, before, before + tokens)
                self._preempt(victim_index, sequence, need, step)
                if victim is sequence:
                    return
                if victim_index < index:
                    index -= 1
                growth = self.blocks.grow(sequence.table, before, before + tokens)
            self._grant(step, sequence, tokens, growth)
            index += 1

    def _longest_chunk(self) -> int:
        """Most tokens one sequence may get: the long-prefill threshold, off when it is alone."""
        threshold = self.config.long_prefill_token_threshold
        if threshold and self.num_unfinished > 1:
            return threshold
        return self.config.max_num_batched_tokens

    def _grant(self, step: _Step, sequence: Sequence, tokens: int, growth: Growth) -> None:
        arrays, row = self.arrays, sequence.row
        before = int(arrays.num_computed[row])
        step.grants[sequence] = _Grant(tokens, before, sequence.table.num_registered, growth)
        step.budget -= tokens
        arrays.num_computed[row] = before + tokens
        arrays.blocks_held[row] = len(sequence.table)
        # From here on this sequence writes blocks of its own.
        arrays.shared[row] = False
        self._register(sequence, before + tokens)

    def _register(self, sequence: Sequence, num_tokens: int) -> None:
        self.blocks.register(sequence.table, num_tokens)
        self.arrays.num_registered[sequence.row] = sequence.table.num_registered

    def _requeue(self, request_id: str, step: _Step) -> None:
        for sequence in reversed(self._of_request.get(request_id, {})):
            if sequence.state is SequenceState.RUNNING:
                need = self.blocks.blocks_for(sequence.num_tokens)
                index = self.running.index(sequence)
                self._preempt(index, sequence, need, step, may_swap=False)
                continue
            queue = self.waiting if sequence.state is SequenceState.WAITING else self.swapped
            queue.remove(sequence)
            self.blocks.free(sequence.table)
            sequence.num_lost_tokens += sequence.num_computed_tokens
            self.arrays.num_computed[sequence.row] = 0
            sequence.last_preemption = self._num_preemptions
            self._num_preemptions += 1
            sequence.state = SequenceState.WAITING
            self.waiting.push(sequence)

    def _preempt(
        self,
        index: int,
        requester: Sequence,
        blocks_needed: int,
        step: _Step,
        *,
        may_swap: bool = True,
    ) -> None:
        """Take everything from a running sequence and send it back to the queue."""
        victim = self._remove_running(index)
        arrays, row = self.arrays, victim.row
        blocks_free = self.blocks.num_free
        step.one_by_one()
        grant = step.grants.pop(victim, None)
        if grant is not None:
            # Its tokens go back to the budget, as if it had never been granted any.
            step.budget += grant.tokens
            arrays.num_computed[row] = grant.computed_before
            self.blocks.unregister(victim.table, grant.registered_before)
        # What a dropped grant would have copied is not there to be swapped out.
        transfers = None
        if self.config.preemption_mode == "swap" and grant is None and may_swap:
            transfers = self.blocks.swap_out(victim.table)
        lost = 0
        if transfers is None:
            self.blocks.free(victim.table)
            lost = int(arrays.num_computed[row])
            arrays.num_computed[row] = 0
        else:
            step.swapped_out += transfers
        arrays.blocks_held[row] = 0
        arrays.num_registered[row] = 0
        arrays.shared[row] = False
        victim.num_lost_tokens = lost
        victim.num_preemptions += 1
        victim.last_preemption = self._num_preemptions
        self._num_preemptions += 1
        if transfers is None:
            victim.state = SequenceState.WAITING
            self.waiting.push(victim)
        else:
            victim.state = SequenceState.SWAPPED
            self.swapped.push(victim)
        step.preempted.append(
            Preemption(victim, requester, blocks_needed, blocks_free, lost, transfers is not None)
        )

    def _admit_waiting(self, step: _Step) -> None:
        """Admit from the head of the queue until something does not fit."""
        # Whoever holds host memory comes back before anybody new is let in.
        while (sequence := self.swapped.head() or self.waiting.head()) is not None:
            if step.budget == 0:
                step.blocked_by = "budget"
                return
            state = PoolState(len(self.running), self.blocks.num_free, self.blocks.num_blocks)
            if not self.policy.admit(sequence, state):
                step.blocked_by = "policy"
                return
            while (short_of := self._try_admit(sequence, step)) is not None:
                if not self._displace_for(sequence, short_of, step):
                    step.blocked_by = short_of
                    return

    def _displace_for(self, head: Sequence, short_of: BlockedBy, step: _Step) -> bool:
        """Preempt whom the policy names so that the head of the queue fits; nobody, if it would not."""
        # Whoever was let in by this step may have hit blocks that a victim would now never compute:
        # from the first admission on nobody is displaced before the next step.
        if short_of == "budget" or step.admitted or not self.running:
            return False
        if self.policy.displace(head, self.running) is None:
            return False
        step.one_by_one()
        config, budget = self.config, step.budget
        left, leaving = list(self.running), list[Sequence]()
        while not (
            sum(sequence.slots for sequence in left) + head.slots <= config.max_num_seqs
            and self.blocks.would_fit(
                head.table, head.num_tokens, [s.table for s in leaving], use_watermark=bool(left)
            )
            and (config.enable_chunked_prefill or head.num_uncomputed_tokens <= budget)
        ):
            index = self.policy.displace(head, left) if left else None
            if index is None:
                return False
            leaving.append(left.pop(index))
            if (grant := step.grants.get(leaving[-1])) is not None:
                budget += grant.tokens
        need = 0 if short_of == "slots" else self.blocks.blocks_for(head.num_tokens)
        for victim in leaving:
            self._preempt(self.running.index(victim), head, need, step)
        return bool(leaving)

    def _try_admit(self, sequence: Sequence, step: _Step) -> BlockedBy | None:
        """Let one sequence in, or change nothing and say what it is short of."""
        taken = len(self.running) + self._extra_slots
        if taken + sequence.slots > self.config.max_num_seqs:
            return "slots"
        if sequence.state is SequenceState.SWAPPED:
            return self._try_swap_in(sequence, step)
        num_tokens = sequence.num_tokens
        hit = self.blocks.find_hit(sequence.table, num_tokens)
        hit_tokens = len(hit) * self.blocks.block_size
        tokens = min(num_tokens - hit_tokens, self._longest_chunk_of_new())
        if tokens > step.budget:
            if not self.config.enable_chunked_prefill:
                return "budget"
            tokens = step.budget
        # While nothing runs nobody needs the headroom, and the head must not wait for ever.
        watermark = bool(self.running)
        if self.config.scheduler_reserve_full_isl and not self.blocks.fits(
            num_tokens, hit, use_watermark=watermark
        ):
            return "blocks"
        new_blocks = self.blocks.admit(
            sequence.table, hit, hit_tokens + tokens, use_watermark=watermark
        )
        if new_blocks is None:
            return "blocks"
        self._count_hit(sequence, hit_tokens)
        self.waiting.remove(sequence)
        step.admitted.append(Admission(sequence, hit, sequence.was_admitted, swapped_in=False))
        self.arrays.num_computed[sequence.row] = hit_tokens
        self._start(sequence, tokens, Growth(new_blocks, []), step)
        return None

    def _longest_chunk_of_new(self) -> int:
        # With chunked prefill off a prompt over the budget must be seen whole to be turned away.
        threshold = self.config.long_prefill_token_threshold
        return threshold if threshold and self.num_unfinished > 1 else self.config.max_model_len

    def _try_swap_in(self, sequence: Sequence, step: _Step) -> BlockedBy | None:
        tokens = min(sequence.num_uncomputed_tokens, self._longest_chunk_of_new(), step.budget)
        moved = self.blocks.swap_in(
            sequence.table,
            sequence.num_computed_tokens + tokens,
            use_watermark=bool(self.running),
        )
        if moved is None:
            return "blocks"
        transfers, blocks = moved
        step.swapped_in += transfers
        self.swapped.remove(sequence)
        step.admitted.append(Admission(sequence, [], resumed=True, swapped_in=True))
        self._start(sequence, tokens, Growth(blocks, []), step)
        return None

    def _start(self, sequence: Sequence, tokens: int, growth: Growth, step: _Step) -> None:
        sequence.state = SequenceState.RUNNING
        sequence.was_admitted = True
        self.running.append(sequence)
        self._running_rows = None
        self._extra_slots += sequence.slots - 1
        self.arrays.num_registered[sequence.row] = sequence.table.num_registered
        self._grant(step, sequence, tokens, growth)

    @staticmethod
    def _count_hit(sequence: Sequence, hit_tokens: int) -> None:
        """Tokens it had lost itself are found again, not hits; what it lost and does not find it
        will compute again."""
        lost = sequence.num_lost_tokens
        sequence.num_refound_tokens += min(hit_tokens, lost)
        sequence.num_cached_tokens += max(hit_tokens - lost, 0)
        sequence.num_recomputed_tokens += max(lost - hit_tokens, 0)
        sequence.num_lost_tokens = 0

    def _plan(self, step: _Step, max_steps: int) -> StepPlan:
        arrays = self.arrays
        sequences = list(step.grants)
        grants = step.grants.values()
        rows = np.array([sequence.row for sequence in sequences], np.int64)
        granted = np.array([grant.tokens for grant in grants], np.int64)
        before = np.array([grant.computed_before for grant in grants], np.int64)
        copies: list[BlockCopy] = []
        new_blocks = {}
        for sequence, grant in step.grants.items():
            copies += grant.growth.copies
            if grant.growth.new_blocks:
                new_blocks[sequence] = grant.growth.new_blocks
        if step.columns is not None:
            bulk = step.columns
            new_blocks = bulk.new_blocks | new_blocks
            if sequences:
                rows = np.concatenate([bulk.rows, rows])
                granted = np.concatenate([bulk.tokens, granted])
                before = np.concatenate([bulk.computed_before, before])
            else:
                rows, granted, before = bulk.rows, bulk.tokens, bulk.computed_before
            sequences = bulk.sequences + sequences
        num_tokens = arrays.num_tokens[rows]
        samples = before + granted == num_tokens
        is_decode = samples & (granted == 1) & (num_tokens > arrays.num_prompt[rows])
        return StepPlan(
            sequences=sequences,
            rows=rows,
            granted=granted,
            computed_before=before,
            samples=samples,
            is_decode=is_decode,
            num_running=len(sequences) - len(step.admitted),
            num_waiting=len(self.waiting) + len(self.swapped),
            blocked_by=step.blocked_by,
            num_free_blocks=self.blocks.num_free,
            admitted=step.admitted,
            preempted=step.preempted,
            new_blocks=new_blocks,
            copies=copies,
            swapped_in=step.swapped_in,
            swapped_out=step.swapped_out,
            evicted=self.blocks.pool.drain_evicted(),
            num_steps=self._equal_steps(step, rows, is_decode, max_steps),
        )

    def update(self, plan: StepPlan, result: StepResult) -> StepOutcome:
        """Take in what a backend did: tokens, forks, finishes; blocks of the finished are free.

        Raises ``ValueError``, with nothing changed, where ``result.branches`` need more sequence
        slots than there are.
        """
        assert plan is self._pending, "update() of a plan that schedule() did not just give"
        if result.branches and self._slots_after(plan, result) > self.config.max_num_seqs:
            raise ValueError(
                f"beams need {self._slots_after(plan, result)} sequence slots, max_num_seqs is "
                f"{self.config.max_num_seqs}"
            )
        assert 1 <= result.num_steps <= plan.num_steps, (
            f"{result.num_steps} steps were run, {plan.num_steps} were offered"
        )
        self._pending = None
        arrays, rows = self.arrays, plan.rows
        sampled = plan.samples & arrays.alive[rows]
        if result.withheld:
            waits = np.zeros_like(sampled)
            waits[list(result.withheld)] = True
            arrays.num_computed[rows[sampled & waits]] -= 1
            sampled &= ~waits
        sampled_rows = rows[sampled]
        blocks_taken = _NO_BLOCKS
        if result.num_steps > 1:
            assert result.token_ids is None, "token ids come one step at a time"
            blocks_taken = self._repeat(plan, sampled, result.num_steps - 1)
        arrays.num_tokens[sampled_rows] += result.num_steps
        ends = sampled & (arrays.num_tokens[rows] >= arrays.limit[rows])

        forked: list[Fork] = []
        finished: list[Finished] = []
        stops: dict[int, set[int]] = {}
        for stop in result.stops:
            stops.setdefault(stop.position, set()).add(stop.sample)
        if result.token_ids is not None or result.branches or self._extra_slots:
            for position in np.flatnonzero(sampled).tolist():
                sequence = plan.sequences[position]
                family = [sequence]
                token_ids = result.branches.get(position)
                if token_ids is not None:
                    self._extra_slots -= sequence.slots - 1
                    sequence.slots = 1
                    if not token_ids:
                        finished.append(Finished(sequence, "dropped"))
                        continue
                    if len(token_ids) > 1:
                        forked.append(self._fork_branches(sequence, len(token_ids)))
                        family += forked[-1].children
                else:
                    if sequence.slots > 1:
                        forked.append(self._fork_samples(sequence))
                        family += forked[-1].children
                    token_ids = None if result.token_ids is None else result.token_ids[position]
                if token_ids is not None:
                    self._append_tokens(family, token_ids)

        children_of = {fork.parent: fork.children for fork in forked}
        dropped = {position for position, token_ids in result.branches.items() if not token_ids}
        for position in sorted(set(np.flatnonzero(ends).tolist()) | stops.keys()):
            if not sampled[position] or position in dropped:
                continue
            sequence = plan.sequences[position]
            stopped = stops.get(position, set())
            for sample, member in enumerate([sequence, *children_of.get(sequence, ())]):
                if sample in stopped:
                    finished.append(Finished(member, "stop"))
                elif ends[position]:
                    finished.append(Finished(member, self._limit_reason(member)))
        if finished:
            gone = {entry.sequence for entry in finished}
            self.running = [sequence for sequence in self.running if sequence not in gone]
            self._running_rows = None
            for sequence, reason in finished:
                self._finish(sequence, reason)
        everybody = len(sampled_rows) == len(plan.sequences)
        return StepOutcome(
            sampled_rows=sampled_rows,
            sampled=None
            if everybody
            else [plan.sequences[i] for i in np.flatnonzero(sampled).tolist()],
            finished=finished,
            forked=forked,
            blocks_taken=blocks_taken,
        )

    def abandon(self, plan: StepPlan, reason: str = "error") -> list[Finished]:
        """Instead of ``update``: the backend failed, nobody knows how far it got. Every request whose
        KV the plan would have written or moved ends, and what it registered in the prefix cache is
        forgotten."""
        assert plan is self._pending, "abandon() of a plan that schedule() did not just give"
        self._pending = None
        brought_in = {admission.sequence for admission in plan.admitted if admission.swapped_in}
        for sequence, before in zip(plan.sequences, plan.computed_before.tolist(), strict=True):
            if sequence.state is SequenceState.RUNNING:
                whole = 0 if sequence in brought_in else before // self.blocks.block_size
                self.blocks.unregister(sequence.table, whole)
        moved_out = [entry.sequence for entry in plan.preempted if entry.swapped_out]
        return [
            entry
            for sequence in (*plan.sequences, *moved_out)
            for entry in self.abort(sequence.request.id, reason)
        ]

    def _slots_after(self, plan: StepPlan, result: StepResult) -> int:
        """Slots taken once beams have branched, not counting what ends otherwise."""
        growth = sum(
            len(token_ids) - plan.sequences[position].slots
            for position, token_ids in result.branches.items()
            if self.arrays.alive[plan.rows[position]]
        )
        return len(self.running) + self._extra_slots + growth

    def _repeat(
        self, plan: StepPlan, alive: npt.NDArray[np.bool_], num_more: int
    ) -> npt.NDArray[np.int64]:
        """Compute ``num_more`` further tokens of each living sequence, one a step.

        Blocks are taken, and registered, in the order in which single steps would have: step by step,
        within a step in the order of the plan. Returns how many each step took.
        """
        arrays, size = self.arrays, self.blocks.block_size
        positions = alive.nonzero()[0]
        rows = plan.rows[positions]
        # A sequence takes a block in the step that finds its last one full, then every size steps.
        first = -arrays.num_computed[rows] % size
        counts = np.maximum((num_more - 1 - first) // size + 1, 0)
        owner = np.repeat(np.arange(len(rows)), counts)
        nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        step = first[owner] + nth * size
        order = np.lexsort((owner, step))
        tables = [plan.sequences[positions[i]].table for i in owner[order].tolist()]
        self.blocks.extend(tables, [1] * len(tables))
        self.blocks.pool.drain_evicted()
        arrays.num_computed[rows] += num_more
        arrays.blocks_held[rows] += counts
        self._register_filled(plan, positions)
        return np.bincount(step, minlength=num_more)

    def _register_filled(self, plan: StepPlan, positions: npt.NDArray[np.int64]) -> None:
        """Register what sequences have filled meanwhile, first what was filled first."""
        arrays, size = self.arrays, self.blocks.block_size
        rows = plan.rows[positions]
        full = np.minimum(arrays.num_computed[rows] // size, arrays.num_keys[rows])
        filled = []
        for i in (full > arrays.num_registered[rows]).nonzero()[0].tolist():
            first, computed = int(arrays.num_registered[rows[i]]), int(arrays.num_computed[rows[i]])
            # All advance by one token a step, so tokens short of the run's end order the steps.
            filled += [
                ((index + 1) * size - computed, i, (index + 1) * size)
                for index in range(first, int(full[i]))
            ]
        for _, i, num_tokens in sorted(filled):
            self._register(plan.sequences[positions[i]], num_tokens)

    def _append_tokens(self, family: list[Sequence], token_ids: Seq[int]) -> None:
        """Let the block keys of a sequence (and of its new forks) know what was sampled."""
        assert len(token_ids) == len(family), (
            f"{family[0].id} samples {len(family)} tokens, the backend gave {len(token_ids)}"
        )
        for member, token_id in zip(family, token_ids, strict=True):
            if member.table.keys is not None:
                member.table.keys.append(token_id)
                self.arrays.num_keys[member.row] = member.table.num_keys

    def _limit_reason(self, sequence: Sequence) -> str:
        request, num_tokens = sequence.request, sequence.num_tokens
        asked = request.max_tokens
        if num_tokens >= self.config.max_model_len:
            return "length"
        if asked is not None and num_tokens >= request.num_prompt_tokens + asked:
            return "length"
        return "kv_exhausted"

    def _fork_samples(self, parent: Sequence) -> Fork:
        """Split a request with n outputs into n sequences, at its first token."""
        num_children = parent.slots - 1  # their slots were reserved at its admission
        self._extra_slots -= num_children
        parent.slots = 1
        return Fork(parent, self._fork(parent, range(1, num_children + 1)))

    def _fork_branches(self, parent: Sequence, count: int) -> Fork:
        """Split a beam into ``count``; ``update`` has made sure that there are slots."""
        first = 1 + max(member.index for member in self._of_request[parent.request.id])
        return Fork(parent, self._fork(parent, range(first, first + count - 1)))

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """A running copy of a running sequence, on the same blocks; it takes a slot of its own.

        For parallel samples and beams. The copies of shared blocks are made, and planned, when
        either one writes.

        Raises ``ValueError`` where every sequence slot is taken.
        """
        assert parent.state is SequenceState.RUNNING, f"{parent.id} does not run"
        if self.num_free_slots < 1:
            raise ValueError(
                f"no slot to fork {parent.id}: max_num_seqs is {self.config.max_num_seqs}"
            )
        return self._fork(parent, range(index, index + 1))[0]

    def _fork(self, parent: Sequence, indices: range) -> list[Sequence]:
        arrays = self.arrays
        children = []
        for index in indices:
            child = self._new_sequence(parent.request, index, slots=1)
            for name in SequenceArrays.COLUMNS:
                column = getattr(arrays, name)
                column[child.row] = column[parent.row]
            child.table = self.blocks.fork(parent.table)
            child.state = SequenceState.RUNNING
            child.was_admitted = True
            arrays.shared[parent.row] = arrays.shared[child.row] = True
            children.append(child)
        self._of_request[parent.request.id].update(dict.fromkeys(children))
        # Beside the rest of the family: they were admitted together.
        end = len(self.running) - next(
            i
            for i, sequence in enumerate(reversed(self.running))
            if sequence.request is parent.request
        )
        self.running[end:end] = children
        self._running_rows = None
        return children

    # -- bookkeeping -------------------------------------------------------------------------

    def _rows_of_running(self) -> npt.NDArray[np.int64]:
        if self._running_rows is None:
            self._running_rows = np.array([sequence.row for sequence in self.running], np.int64)
        return self._running_rows

    def _remove_running(self, index: int) -> Sequence:
        sequence = self.running.pop(index)
        self._running_rows = None
        self._extra_slots -= sequence.slots - 1
        return sequence

    def _finish(self, sequence: Sequence, reason: str) -> Finished:
        blocks = sequence.table.blocks
        self.blocks.free(sequence.table)
        # It holds nothing any more, but a plan that is being executed can still be read.
        sequence.table.blocks = blocks
        sequence.state = SequenceState.FINISHED
        self.arrays.alive[sequence.row] = False
        self.arrays.blocks_held[sequence.row] = 0
        self._retired_rows.append(sequence.row)
        family = self._of_request[sequence.request.id]
        del family[sequence]
        if not family:
            del self._of_request[sequence.request.id]
        return Finished(sequence, reason)

    def check(self) -> None:
        """Recompute what should hold between the queues, the rows and the blocks; slow.

        Raises ``AssertionError`` naming what is wrong.
        """
        waiting = list(self.waiting)
        swapped = list(self.swapped)
        everyone = [*self.running, *waiting, *swapped]
        assert len(waiting) == len(self.waiting), "the queue's length is not that of its entries"
        assert len(set(everyone)) == len(everyone), "a sequence is in two queues"
        known = {sequence for family in self._of_request.values() for sequence in family}
        assert known == set(everyone), f"lost or ghost sequences: {known ^ set(everyone)}"
        for state, queue in (
            (SequenceState.RUNNING, self.running),
            (SequenceState.WAITING, waiting),
            (SequenceState.SWAPPED, swapped),
        ):
            for sequence in queue:
                assert sequence.state is state, (
                    f"{sequence} stands in the queue of the {state.value}"
                )
        rows = [sequence.row for sequence in everyone]
        assert len(set(rows)) == len(rows), "two sequences share a row"
        assert set(np.flatnonzero(self.arrays.alive).tolist()) == set(rows), (
            "alive rows are not those in use"
        )
        slots = sum(sequence.slots for sequence in self.running)
        assert slots == len(self.running) + self._extra_slots, "slots are miscounted"
        assert slots <= self.config.max_num_seqs, (
            f"{slots} slots of {self.config.max_num_seqs} taken"
        )
        for sequence in everyone:
            self._check_sequence(sequence)
        self.blocks.check(sequence.table for sequence in everyone)

    def _check_sequence(self, sequence: Sequence) -> None:
        arrays, row, table = self.arrays, sequence.row, sequence.table
        computed, total = sequence.num_computed_tokens, sequence.num_tokens
        assert 0 <= computed <= total, f"{sequence} has computed more than there is"
        assert arrays.blocks_held[row] == len(table), (
            f"{sequence} holds {len(table)} blocks, not what its row says"
        )
        assert arrays.num_registered[row] == table.num_registered, (
            f"{sequence}: registrations miscounted"
        )
        assert arrays.num_keys[row] == table.num_keys, f"{sequence}: block keys miscounted"
        assert total < arrays.limit[row], f"{sequence} is past its limit {arrays.limit[row]}"
        # One whose token was withheld has the slot that it will compute again.
        lengths = {
            self.blocks.blocks_for(computed),
            self.blocks.blocks_for(min(computed + 1, total)),
        }
        if sequence.state is SequenceState.RUNNING:
            assert len(table) in lengths, (
                f"{sequence} holds {len(table)} blocks for {computed} computed tokens"
            )
            first_shared = next(
                (i for i, b in enumerate(table.blocks) if self.blocks.pool.ref_count(b) > 1), None
            )
            # A withheld token is computed again into a block that may be registered, and hit, by now:
            # that writes what is there.
            is_known = computed // self.blocks.block_size < table.num_registered
            if (
                computed % self.blocks.block_size
                and first_shared is not None
                and not arrays.shared[row]
                and not is_known
            ):
                last = table.blocks[-1]
                assert self.blocks.pool.ref_count(last) == 1, (
                    f"{sequence} would write block {last}, which others hold too"
                )
        elif sequence.state is SequenceState.WAITING:
            assert not table.blocks, f"{sequence} waits but holds blocks"
            assert computed == 0, f"{sequence} waits but has computed tokens"
        else:
            assert len(table.host_blocks) in lengths, f"{sequence}: lost host blocks"
