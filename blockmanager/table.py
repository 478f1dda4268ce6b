"""A sequence's page table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blockmanager.content import KeyChain


class BlockCopy(NamedTuple):
    """A copy inside GPU memory that the backend makes before the step's first write."""

    src: int
    dst: int


class BlockTransfer(NamedTuple):
    """A copy between GPU and host memory: out before the step's copies, in after them."""

    src: int
    dst: int


class BlockTable:
    """Block ids of one sequence: position p lives in block ``p // block_size``.

    Only ``BlockManager`` changes a table. While the sequence is swapped out its content is in
    ``host_blocks`` and ``blocks`` is empty.
    """

    __slots__ = ("blocks", "host_blocks", "keys", "num_registered")

    def __init__(self, keys: KeyChain | None = None) -> None:
        self.blocks: list[int] = []
        self.host_blocks: list[int] = []
        self.keys = keys
        """``None`` = unknown content or no prefix caching: nothing of it is ever registered."""
        self.num_registered = 0
        """Leading blocks that went through registration (or came from a hit)."""

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def num_keys(self) -> int:
        return 0 if self.keys is None else len(self.keys.keys)

    def slot_mapping(self, start: int, end: int, block_size: int) -> npt.NDArray[np.int64]:
        """Slot (block id x block size + offset) of each position in ``[start, end)``."""
        positions = np.arange(start, end, dtype=np.int64)
        blocks = np.asarray(self.blocks, dtype=np.int64)
        return blocks[positions // block_size] * block_size + positions % block_size
