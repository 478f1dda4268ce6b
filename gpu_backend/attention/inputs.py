"""What a step's attention needs to know, and the one signature of every path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """The sequences of one step, their tokens laid end to end.

    Tensors are on the model's device; T = tokens, S = sequences, B = blocks of the longest table.
    """

    query_start: torch.Tensor
    """int32 ``[S + 1]``: sequence i has the tokens ``query_start[i]:query_start[i + 1]``."""
    context_lens: torch.Tensor
    """int32 ``[S]``: tokens of each sequence whose KV is there after this step's writes (its own
    query tokens are the last of them). 0 = a row of padding: nothing is read, its output is 0."""
    block_tables: torch.Tensor
    """int32 ``[S, B]``: blocks of each sequence in order; entries beyond its last block are
    undefined and must not be read."""
    slot_mapping: torch.Tensor
    """int64 ``[T]``: where the KV of each token goes: block x block_size + offset; -1 = nowhere."""
    query_lens_host: tuple[int, ...]
    context_lens_host: tuple[int, ...]
    """The same numbers where Python can read them without waiting for the device; empty for a step
    that is replayed as a graph."""
    max_query_len: int
    max_context_len: int


class PagedAttention(Protocol):
    """Attention of the step's queries over all that their sequences have in the KV pool.

    Token j of a sequence's q query tokens sits at position ``context_len - q + j`` and sees all
    positions up to its own (with ``window``: the last ``window`` of them). Slots at and beyond
    ``context_len`` are not read, whatever they hold (also NaN).
    """

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        inputs: AttentionInputs,
        *,
        scale: float,
        window: int | None = None,
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``query [T, heads, head_dim]`` and one layer of the pool, ``keys`` and ``values``
        ``[num_blocks, block_size, kv_heads, head_dim]``, to ``[T, heads, head_dim]`` in the query's
        dtype. Query head h reads KV head ``h // (heads // kv_heads)``. For a quantised pool the
        scales ``[num_blocks, block_size, kv_heads]`` (float32) multiply what is read."""
        ...
