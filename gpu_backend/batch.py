"""From a step plan to tensors: token ids, positions, slots and block tables.

All of it is array work on numbers that the scheduler holds in arrays already; only prompts and
sequences whose blocks have changed are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_backend.attention.inputs import AttentionInputs
from scheduler.plan import StepPlan
from scheduler.sequence import Sequence

IntArray = npt.NDArray[np.int64]
KnownTokens = Callable[[Sequence], IntArray]
"""Prompt and outputs of a sequence, int64 ``[num_tokens]``."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A step's input on the host, the tokens of its S sequences end to end (T in all)."""

    token_ids: IntArray
    """``[T]``."""
    positions: IntArray
    """``[T]``."""
    slots: IntArray
    """``[T]``: block x block_size + offset."""
    starts: IntArray
    """``[S + 1]``: where each sequence's tokens begin."""
    context_lens: IntArray
    """``[S]``: tokens of each sequence with KV after the step."""
    block_tables: npt.NDArray[np.int32]
    """``[S, blocks of the longest]``; what lies beyond a table's end means nothing."""

    def inputs(self, device: torch.device) -> AttentionInputs:
        query_lens = np.diff(self.starts)
        return AttentionInputs(
            query_start=to_device(self.starts.astype(np.int32), device),
            context_lens=to_device(self.context_lens.astype(np.int32), device),
            block_tables=to_device(self.block_tables, device),
            slot_mapping=to_device(self.slots, device),
            query_lens_host=tuple(query_lens.tolist()),
            context_lens_host=tuple(self.context_lens.tolist()),
            max_query_len=int(query_lens.max()),
            max_context_len=int(self.context_lens.max()),
        )


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A tensor of the array's values; does not wait for what the device is doing."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


class Batcher:
    """Builds batches; keeps the block tables of living sequences as rows of one array."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((0, 0), np.int32)
        self._owners: list[Sequence | None] = []
        self._lengths: list[int] = []

    def build(self, plan: StepPlan, last_tokens: IntArray, known_tokens: KnownTokens) -> Batch:
        """The input of a plan that computes something.

        ``last_tokens[row]`` is the last known token of the sequence in that row of the scheduler's
        arrays: all that decoding needs. ``known_tokens`` is asked for prompts only.
        """
        granted, before = plan.granted, plan.computed_before
        starts = np.concatenate([[0], np.cumsum(granted)])
        positions = np.arange(starts[-1]) + np.repeat(before - starts[:-1], granted)
        is_last = plan.samples & (granted == 1)
        if is_last.all():
            token_ids = last_tokens[plan.rows]
        else:
            token_ids = np.empty(starts[-1], np.int64)
            token_ids[starts[:-1][is_last]] = last_tokens[plan.rows[is_last]]
            for i in np.flatnonzero(~is_last).tolist():
                known = known_tokens(plan.sequences[i])
                token_ids[starts[i] : starts[i + 1]] = known[before[i] : before[i] + granted[i]]
        tables = self._tables_of(plan)
        size = self._block_size
        owner = np.repeat(np.arange(len(granted)), granted)
        blocks = tables[owner, positions // size].astype(np.int64)
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slots=blocks * size + positions % size,
            starts=starts,
            context_lens=before + granted,
            block_tables=tables,
        )

    def _tables_of(self, plan: StepPlan) -> npt.NDArray[np.int32]:
        moved = {admission.sequence for admission in plan.admitted}
        rows = plan.rows.tolist()
        longest = 0
        self._fit_rows(max(rows) + 1)
        for sequence, row in zip(plan.sequences, rows, strict=True):
            blocks = sequence.table.blocks
            length = len(blocks)
            longest = max(longest, length)
            first = self._lengths[row]
            # Copy-on-write replaces blocks that are there; admission may replace all of them.
            if self._owners[row] is not sequence or plan.copies or sequence in moved:
                first = 0
            if first != length:
                self._fit_columns(length)
                self._tables[row, first:length] = blocks[first:]
                self._owners[row], self._lengths[row] = sequence, length
        return self._tables[plan.rows, :longest]

    def _fit_rows(self, needed: int) -> None:
        more = needed - len(self._owners)
        if more > 0:
            self._tables = np.pad(self._tables, ((0, more), (0, 0)))
            self._owners += [None] * more
            self._lengths += [0] * more

    def _fit_columns(self, needed: int) -> None:
        width = self._tables.shape[1]
        if needed > width:
            self._tables = np.pad(self._tables, ((0, 0), (0, max(needed, 2 * width) - width)))
