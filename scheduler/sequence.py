"""Sequences: one row of numbers each, so that a step reads columns instead of objects."""

from __future__ import annotations

from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt

from blockmanager.table import BlockTable
from scheduler.request import Request


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class SequenceArrays:
    """The numbers of all living sequences, a row each; rows are reused.

    Columns are int64 of shape ``[capacity]``; ``shared`` and ``alive`` are bool.
    """

    COLUMNS: Final = (
        "num_tokens",  # prompt and outputs known so far
        "num_computed",  # leading tokens whose KV is there (or scheduled)
        "num_prompt",
        "limit",  # tokens at which the sequence must end
        "blocks_held",
        "num_keys",  # leading blocks whose key is known, also before they are computed
        "num_registered",  # leading blocks that are in the prefix cache
    )

    def __init__(self, capacity: int = 256) -> None:
        self.num_tokens = np.zeros(capacity, np.int64)
        self.num_computed = np.zeros(capacity, np.int64)
        self.num_prompt = np.zeros(capacity, np.int64)
        self.limit = np.zeros(capacity, np.int64)
        self.blocks_held = np.zeros(capacity, np.int64)
        self.num_keys = np.zeros(capacity, np.int64)
        self.num_registered = np.zeros(capacity, np.int64)
        self.shared = np.zeros(capacity, np.bool_)
        """The next write may hit a block that a sibling holds too."""
        self.alive = np.zeros(capacity, np.bool_)
        self._free_rows = list(range(capacity - 1, -1, -1))

    @property
    def capacity(self) -> int:
        return len(self.alive)

    def take_row(self) -> int:
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        for name in self.COLUMNS:
            getattr(self, name)[row] = 0
        self.shared[row] = False
        self.alive[row] = True
        return row

    def return_row(self, row: int) -> None:
        self._free_rows.append(row)

    def _grow(self) -> None:
        old = self.capacity
        for name in (*self.COLUMNS, "shared", "alive"):
            column: npt.NDArray[np.int64] = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._free_rows = list(range(2 * old - 1, old - 1, -1))


class Sequence:
    """One output being generated: a view of its row, and what does not fit into numbers.

    Only the scheduler changes it. The row of a finished sequence stays readable until the
    scheduler's next ``schedule()``.
    """

    __slots__ = (
        "_arrays",
        "id",
        "index",
        "last_preemption",
        "num_cached_tokens",
        "num_lost_tokens",
        "num_preemptions",
        "num_recomputed_tokens",
        "num_refound_tokens",
        "number",
        "request",
        "row",
        "slots",
        "state",
        "table",
        "was_admitted",
    )

    def __init__(
        self, request: Request, seq_id: str, index: int, number: int, arrays: SequenceArrays
    ) -> None:
        self.request = request
        self.id = seq_id
        self.index = index
        """Which of the request's n outputs this is."""
        self.number = number
        """Order of arrival among all sequences."""
        self.slots = 1
        """Of ``max_num_seqs``: n until a request with n outputs has forked, then 1."""
        self.state = SequenceState.WAITING
        self.table = BlockTable()
        self.was_admitted = False
        self.num_preemptions = 0
        self.last_preemption: int | None = None
        """Number of its last preemption, counted over the whole run."""
        self.num_lost_tokens = 0
        """Computed tokens that its last preemption threw away, until it is admitted again."""
        self.num_cached_tokens = 0
        """Tokens other requests had computed for it (prefix hits)."""
        self.num_refound_tokens = 0
        """Tokens lost by preemption and found again in the prefix cache: no prefix hits."""
        self.num_recomputed_tokens = 0
        """Tokens lost by preemption and computed again."""
        self._arrays = arrays
        self.row = arrays.take_row()

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.id} {self.state.value} {self.num_computed_tokens}/{self.num_tokens}>"
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs known so far."""
        return int(self._arrays.num_tokens[self.row])

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose KV is in place once the scheduled step has run."""
        return int(self._arrays.num_computed[self.row])

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def block_ids(self) -> list[int]:
        return self.table.blocks

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def arrival_ns(self) -> int:
        return self.request.arrival_ns
