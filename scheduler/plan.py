"""What passes between the scheduler and a backend in one step."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from blockmanager.table import BlockCopy, BlockTransfer
from scheduler.features import StepFeatures
from scheduler.sequence import Sequence

BlockedBy = Literal["slots", "budget", "blocks", "preemption", "policy"]
"""What the head of the queue waits for: a sequence slot, room in the step's token budget, free
blocks, a step in which nobody is preempted, or the policy's leave."""


class Admission(NamedTuple):
    """A sequence that left the waiting queue in this step."""

    sequence: Sequence
    hit_blocks: list[int]
    resumed: bool
    """It had been admitted before and was preempted."""
    swapped_in: bool


class Preemption(NamedTuple):
    """A running sequence that lost its blocks in this step, and why."""

    sequence: Sequence
    requester: Sequence
    """Who needed the room (the victim itself, where it was the policy's choice)."""
    blocks_needed: int
    blocks_free: int
    tokens_lost: int
    """Computed tokens that were thrown away (0 if swapped out)."""
    swapped_out: bool

    def explain(self) -> str:
        """In words, for a person."""
        victim, requester = self.sequence.id, self.requester.id
        who = "itself" if victim == requester else requester
        fate = (
            "its KV moved to host memory"
            if self.swapped_out
            else f"{self.tokens_lost} computed tokens are thrown away"
        )
        if self.blocks_needed == 0:
            return f"{victim} preempted: {who} is more urgent and every sequence slot was taken; {fate}"
        return (
            f"{victim} preempted for {who}, which needs {self.blocks_needed} more "
            f"block{'s' if self.blocks_needed > 1 else ''} where {self.blocks_free} are free; {fate}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step. A backend does, in this order: swap-outs, copies, swap-ins, each in the order of its
    list, then the forward pass (each layer writes the KV of all granted tokens before its attention
    reads). A block may be the source of a copy and the target of a swap-in, hence that order.

    Arrays have one entry a scheduled sequence, in the order of the grants; sequences that ran
    before the step come first.
    """

    sequences: list[Sequence]
    rows: npt.NDArray[np.int64]
    """Row of each sequence in the scheduler's ``SequenceArrays``."""
    granted: npt.NDArray[np.int64]
    """Tokens to compute."""
    computed_before: npt.NDArray[np.int64]
    samples: npt.NDArray[np.bool_]
    """Whether the sequence's last known token is computed, so that the next one is sampled."""
    is_decode: npt.NDArray[np.bool_]
    """Whether the one token granted is the output sampled last."""
    num_running: int
    """How many of the sequences were running before the step."""
    num_waiting: int
    """Sequences left in the queue (swapped-out ones included)."""
    blocked_by: BlockedBy | None
    """What kept the head of the queue out of this step; ``None`` where nobody waits."""
    num_free_blocks: int
    admitted: list[Admission]
    preempted: list[Preemption]
    new_blocks: Mapping[Sequence, list[int]]
    """Blocks taken for each sequence (copy-on-write targets not among them)."""
    copies: list[BlockCopy]
    swapped_in: list[BlockTransfer]
    swapped_out: list[BlockTransfer]
    evicted: list[int]
    """Blocks that lost cached content, in order."""
    num_steps: int = 1
    """Steps that may be run as one: in each of them every sequence of the plan gets one token more,
    and nothing else can happen inside the scheduler. 1 = just this step. The other fields are those
    of the first step."""

    def __bool__(self) -> bool:
        return bool(self.sequences)

    @property
    def block_ids(self) -> list[list[int]]:
        """Block table of each sequence; good until the next ``schedule()``, also after an abort."""
        return [sequence.table.blocks for sequence in self.sequences]

    @property
    def num_tokens(self) -> int:
        return int(self.granted.sum())

    def features(self) -> StepFeatures:
        return StepFeatures(
            granted=self.granted,
            computed_before=self.computed_before,
            sampled=self.samples,
            is_decode=self.is_decode,
            num_copies=len(self.copies),
            num_swapped_in=len(self.swapped_in),
            num_swapped_out=len(self.swapped_out),
        )


class Stop(NamedTuple):
    """An output that the driver ends: an end-of-sequence token, a stop string, its true length."""

    position: int
    """Of its sequence in the plan."""
    sample: int = 0
    """Which of the n first tokens, where the sequence forks in this step."""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a backend did with a plan."""

    duration_ns: int
    """Of all steps that were run."""
    token_ids: Seq[Seq[int]] | None = None
    """Sampled ids for each sequence of the plan (n of them where it forks, none where it does not
    sample); ``None`` where nobody knows them (simulation)."""
    stops: Seq[Stop] = ()
    """In the last step that was run."""
    num_steps: int = 1
    """How many of the plan's equal steps were run."""
    branches: Mapping[int, Seq[int]] = field(default_factory=dict)
    """Of a beam search: for the position of a sequence, the token ids by which it goes on. Each after
    the first makes a fork of it, without any it ends (``dropped``). ``token_ids`` of that position
    are not read."""
    withheld: Seq[int] = ()
    """Positions of sequences whose next token is not chosen yet (a beam that others of its search have
    to catch up with): they compute their last token once more."""


class Finished(NamedTuple):
    """A sequence that ended. ``reason`` is ``stop``, ``length``, ``kv_exhausted``, ``dropped``,
    ``aborted`` or ``timed_out``, or what the driver called it."""

    sequence: Sequence
    reason: str


class Fork(NamedTuple):
    parent: Sequence
    children: list[Sequence]


class StepOutcome(NamedTuple):
    """What a step came to."""

    sampled_rows: npt.NDArray[np.int64]
    """Rows of the sequences that got a token (children of a fork not among them)."""
    sampled: list[Sequence] | None
    """The same as sequences; ``None`` where it is all of the plan."""
    finished: list[Finished]
    forked: list[Fork]
    blocks_taken: npt.NDArray[np.int64]
    """Blocks taken in each step after the first (shape ``[num_steps - 1]``)."""
