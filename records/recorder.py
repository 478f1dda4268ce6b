"""From what happens in a run to its rows: one a step, one a request, and every gap between tokens."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt

from records.columns import (
    BLOCKED_CODES,
    IntArray,
    RequestRow,
    StepRow,
    request_store,
    step_store,
)
from records.gaps import GapCounts
from scheduler.plan import Finished, Fork, StepOutcome, StepPlan
from scheduler.request import Request
from scheduler.sequence import Sequence

_NEVER = -1  # inside this module only: no token yet


class _Tally:
    """A request under way: what its finished sequences add up to."""

    __slots__ = (
        "arrival_ns",
        "cached",
        "decode_gaps",
        "decode_ns",
        "first_scheduled_ns",
        "first_token_ns",
        "max_gap_ns",
        "num_live",
        "outputs",
        "preemptions",
        "reasons",
        "recomputed",
        "refound",
        "request",
    )

    def __init__(self, request: Request, num_live: int) -> None:
        self.request = request
        self.arrival_ns = request.arrival_ns
        self.num_live = num_live
        self.first_scheduled_ns: int | None = None
        self.first_token_ns: int | None = None
        self.outputs = 0
        self.cached = 0
        self.recomputed = 0
        self.refound = 0
        self.preemptions = 0
        self.decode_ns = 0
        self.decode_gaps = 0
        self.max_gap_ns = 0
        self.reasons: list[str] = []


class Recorder:
    """Collects the rows of one replica's run.

    Parameters
    ----------
    num_blocks
        Usable blocks of the pool.
    replica
        Number that its rows carry.
    """

    def __init__(self, num_blocks: int, replica: int = 0) -> None:
        self.steps = step_store()
        self.requests = request_store()
        self.gaps = GapCounts()
        self.num_done = 0
        """Requests that have their row."""
        self._num_blocks = num_blocks
        self._replica = replica
        self._tallies: dict[str, _Tally] = {}
        self._last_ns: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._first_ns: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._max_gap: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._carried_preemptions = 0
        self.carried_transfers = 0
        """Blocks that plans without a step swapped out: the next step has them, and their price."""

    def _fit(self, sequences: Seq[Sequence]) -> None:
        """Make room for the rows of new sequences and clear what their last users left."""
        needed = max(sequence.row for sequence in sequences) + 1
        if needed > len(self._last_ns):
            more = max(needed, 2 * len(self._last_ns)) - len(self._last_ns)
            for name in ("_last_ns", "_first_ns", "_max_gap"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.full(more, _NEVER, np.int64)]))
        for sequence in sequences:
            self._last_ns[sequence.row] = _NEVER
            self._max_gap[sequence.row] = 0

    def arrived(self, request: Request, sequences: Seq[Sequence]) -> None:
        self._tallies[request.id] = _Tally(request, len(sequences))
        self._fit(sequences)

    def refused(self, request: Request, reason: str) -> None:
        """It left as it came: its row has no times but the arrival."""
        self._write(_Tally(request, 0), "refused", reason, request.arrival_ns)

    def idle_preemptions(self, plan: StepPlan) -> None:
        """A plan in which nobody computes takes no time and has no row; what it did counts in the
        next one."""
        self._carried_preemptions += len(plan.preempted)
        self.carried_transfers += len(plan.swapped_out)

    def started(self, plan: StepPlan, start_ns: int) -> None:
        """A step begins: whoever was admitted has been scheduled, whatever becomes of it."""
        for admission in plan.admitted:
            tally = self._tallies[admission.sequence.request.id]
            if tally.first_scheduled_ns is None:
                tally.first_scheduled_ns = start_ns

    def step(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        start_ns: int,
        duration_ns: int,
        num_running: int,
        *,
        flops: float = 0.0,
        num_bytes: float = 0.0,
    ) -> None:
        """A step that started at ``start_ns`` is over; FLOPs and bytes are 0 where nobody counts
        them."""
        now = start_ns + duration_ns
        for fork in outcome.forked:
            self._forked(fork)
        self._tokens(outcome, now)
        granted, decode_tokens = plan.num_tokens, int(np.count_nonzero(plan.is_decode))
        self.steps.append(
            StepRow(
                start_ns=start_ns,
                duration_ns=duration_ns,
                prefill_tokens=granted - decode_tokens,
                decode_tokens=decode_tokens,
                context_tokens=int(plan.computed_before.sum()) + granted,
                num_seqs=len(plan.sequences),
                running=num_running,
                waiting=plan.num_waiting,
                blocks_used=self._num_blocks - plan.num_free_blocks,
                preemptions=len(plan.preempted) + self._carried_preemptions,
                copies=len(plan.copies),
                transfers=len(plan.swapped_in) + len(plan.swapped_out) + self.carried_transfers,
                blocked_by=BLOCKED_CODES[plan.blocked_by] if plan.blocked_by else 0,
                flops=flops,
                bytes=num_bytes,
                replica=self._replica,
            )
        )
        self._carried_preemptions = self.carried_transfers = 0
        self.finished(outcome.finished, now)

    def equal_steps(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        start_ns: int,
        durations: IntArray,
        num_running: int,
        *,
        flops: npt.NDArray[np.float64],
        num_bytes: npt.NDArray[np.float64],
    ) -> None:
        """Several steps that were run as one: the rows and gaps are those of single steps.
        ``durations`` in ns, ``flops`` and ``num_bytes`` have one entry a step."""
        count, batch = len(durations), len(plan.sequences)
        ends = start_ns + np.cumsum(durations)
        now = int(ends[-1])
        rows = outcome.sampled_rows
        self._tokens(outcome, int(ends[0]))
        # Everybody got a token in each of the further steps.
        self._last_ns[rows] = now
        self._max_gap[rows] = np.maximum(self._max_gap[rows], int(durations[1:].max()))
        self.gaps.add_array(durations[1:], batch)
        taken = np.concatenate([[0], np.cumsum(outcome.blocks_taken)])
        context = int(plan.computed_before.sum()) + batch
        preemptions = np.zeros(count, np.int64)
        preemptions[0] = self._carried_preemptions
        self._carried_preemptions = 0
        assert not self.carried_transfers, "transfers are priced in a step of their own"
        self.steps.extend(
            count,
            {
                "start_ns": ends - durations,
                "duration_ns": durations,
                "prefill_tokens": 0,
                "decode_tokens": batch,
                "context_tokens": context + batch * np.arange(count),
                "num_seqs": batch,
                "running": num_running,
                "waiting": plan.num_waiting,
                "blocks_used": self._num_blocks - plan.num_free_blocks + taken,
                "preemptions": preemptions,
                "copies": 0,
                "transfers": 0,
                "blocked_by": BLOCKED_CODES[plan.blocked_by] if plan.blocked_by else 0,
                "flops": flops,
                "bytes": num_bytes,
                "replica": self._replica,
            },
        )
        self.finished(outcome.finished, now)

    def compiled_steps(
        self,
        rows: npt.NDArray[np.int64],
        flops: npt.NDArray[np.float64],
        num_bytes: npt.NDArray[np.float64],
    ) -> None:
        """Steps of the compiled loop: ``rows`` has its columns (``kernel.START`` and so on)."""
        if not len(rows):
            return
        names = (
            "start_ns",
            "duration_ns",
            "prefill_tokens",
            "decode_tokens",
            "context_tokens",
            "num_seqs",
            "running",
            "waiting",
            "blocks_used",
            "preemptions",
            "blocked_by",
        )
        columns: dict[str, Any] = dict(zip(names, rows.T, strict=True))
        columns |= {"copies": 0, "transfers": 0, "flops": flops, "bytes": num_bytes}
        self.steps.extend(len(rows), columns | {"replica": self._replica})

    def compiled_requests(self, requests: Seq[Request], columns: Mapping[str, Any]) -> None:
        """Requests that the compiled loop served, in the order of their ends."""
        self.num_done += len(requests)
        self.requests.extend(
            len(requests),
            {
                **columns,
                "id": [request.id for request in requests],
                "priority": [request.priority for request in requests],
                "session_id": [request.session_id for request in requests],
                "replica": self._replica,
            },
        )

    def _forked(self, fork: Fork) -> None:
        self._tallies[fork.parent.request.id].num_live += len(fork.children)
        self._fit(fork.children)

    def _tokens(self, outcome: StepOutcome, now: int) -> None:
        """Every sampled token ends a gap, or is a first token."""
        rows = outcome.sampled_rows
        if outcome.forked:
            children = [child.row for fork in outcome.forked for child in fork.children]
            rows = np.concatenate([rows, np.array(children, np.int64)])
        if not len(rows):
            return
        last = self._last_ns[rows]
        self._last_ns[rows] = now
        gaps = now - last
        if int(last.min()) == _NEVER:
            is_first = last == _NEVER
            self._first_ns[rows[is_first]] = now
            rows, gaps = rows[~is_first], gaps[~is_first]
            if not len(rows):
                return
        longest = int(gaps.max())
        if longest == int(gaps.min()):  # all of them got their last token in the same step
            self.gaps.add(longest, len(gaps))
        else:
            self.gaps.add_array(gaps)
        self._max_gap[rows] = np.maximum(self._max_gap[rows], gaps)

    def finished(self, entries: Seq[Finished], now: int) -> None:
        """Sequences that ended; the request has its row when the last one has."""
        for sequence, reason in entries:
            tally = self._tallies[sequence.request.id]
            row = sequence.row
            outputs = sequence.num_output_tokens
            if outputs:
                first = int(self._first_ns[row])
                if tally.first_token_ns is None or first < tally.first_token_ns:
                    tally.first_token_ns = first
                tally.decode_ns += int(self._last_ns[row]) - first
                tally.decode_gaps += outputs - 1
                tally.max_gap_ns = max(tally.max_gap_ns, int(self._max_gap[row]))
            tally.outputs += outputs
            if sequence.index == 0:  # the prompt counts once, however many outputs it has
                tally.cached += sequence.num_cached_tokens
            tally.refound += sequence.num_refound_tokens
            tally.recomputed += sequence.num_recomputed_tokens
            tally.preemptions += sequence.num_preemptions
            tally.reasons.append(reason)
            tally.num_live -= 1
            if tally.num_live == 0:
                del self._tallies[sequence.request.id]
                self._close(tally, now)

    def _close(self, tally: _Tally, now: int) -> None:
        reasons = tally.reasons
        if "timed_out" in reasons:
            assert tally.request.deadline_ns is not None
            # The client left at its deadline, whenever the engine took notice.
            self._write(tally, "timed_out", "timed_out", tally.request.deadline_ns)
        elif "aborted" in reasons:
            self._write(tally, "aborted", "aborted", now)
        elif "kv_exhausted" in reasons:
            self._write(tally, "aborted", "kv_exhausted", now)
        else:
            reason = "length" if "length" in reasons else "stop"
            self._write(tally, "completed", reason, now)

    def unfinished(self, living: Seq[Sequence]) -> None:
        """The run was stopped: what is still there gets a row without a finish."""
        self.finished([Finished(sequence, "unfinished") for sequence in living], 0)

    def never_arrived(self, request: Request) -> None:
        """The run was stopped before this request's time."""
        self._write(_Tally(request, 0), "unfinished", "not arrived when the run was stopped", None)

    def _write(self, tally: _Tally, status: str, reason: str, finish_ns: int | None) -> None:
        request = tally.request
        if "unfinished" in tally.reasons:
            status, reason, finish_ns = "unfinished", "the run was stopped", None
        self.num_done += 1
        self.requests.append(
            RequestRow(
                id=request.id,
                arrival_ns=request.arrival_ns,
                first_scheduled_ns=tally.first_scheduled_ns,
                first_token_ns=tally.first_token_ns,
                finish_ns=finish_ns,
                prompt_tokens=request.num_prompt_tokens,
                cached_tokens=tally.cached,
                output_tokens=tally.outputs,
                recomputed_tokens=tally.recomputed,
                refound_tokens=tally.refound,
                preemptions=tally.preemptions,
                num_samples=request.n,
                decode_ns=tally.decode_ns,
                decode_gaps=tally.decode_gaps,
                max_gap_ns=tally.max_gap_ns,
                priority=request.priority,
                session_id=request.session_id,
                status=status,
                finish_reason=reason,
                replica=self._replica,
            )
        )
