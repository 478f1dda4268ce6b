"""The only door to the blocks: what a scheduler asks, decided all or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

from blockmanager.content import NO_EXTRA_KEYS, Content, ExtraKeys, HashFunction, KeyChain, sha256
from blockmanager.pool import BlockPool
from blockmanager.table import BlockCopy, BlockTable, BlockTransfer


class Growth(NamedTuple):
    """What a table gained: new blocks at its end, and the copies due before the first write."""

    new_blocks: list[int]
    copies: list[BlockCopy]


class BlockManager:
    """Allocates, shares, caches, swaps and frees the blocks of sequences.

    Parameters
    ----------
    num_blocks
        Usable blocks (vLLM's ``num_gpu_blocks`` - 1).
    block_size
        Tokens a block.
    enable_prefix_caching
        Keep full blocks of known content findable after their owner has gone.
    watermark_blocks
        Blocks that an admission must leave free while anything else runs.
    num_swap_blocks
        Blocks of host memory for swapped-out sequences; 0 = no swap.
    hash_function
        Of the block keys; another than SHA-256 is for tests.

    Every request that cannot be met leaves everything as it was, the eviction order included, and
    is answered with ``None``.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        watermark_blocks: int = 0,
        num_swap_blocks: int = 0,
        hash_function: HashFunction = sha256,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, must be at least 1")
        if watermark_blocks < 0:
            raise ValueError(f"watermark_blocks is {watermark_blocks}, must not be negative")
        self.block_size = block_size
        self.watermark_blocks = watermark_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_swap_blocks) if num_swap_blocks else None
        self._hash = hash_function

    # -- questions ---------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` slots."""
        return -(-num_tokens // self.block_size)

    def find_hit(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Cached blocks of the longest known prefix; nothing changes.

        One token at least is left to compute (its logits are wanted), so the hit ends at or before
        block ``(num_tokens - 1) // block_size``.
        """
        if table.keys is None:
            return []
        return self.pool.cache.longest_hit(table.keys.keys, (num_tokens - 1) // self.block_size)

    def fits(self, num_tokens: int, hit: list[int], *, use_watermark: bool) -> bool:
        """Whether a new table of ``num_tokens`` slots could be allocated now behind ``hit``.

        Hit blocks that nobody holds are free blocks too: taking them back takes them from the
        count that is left for the rest.
        """
        return self._admission_need(num_tokens, hit, use_watermark) <= self.pool.num_free

    def blocks_to_grow(self, table: BlockTable, first_slot: int, num_slots: int) -> int:
        """Blocks that ``grow`` would take: new ones and copies."""
        return self._missing(table, num_slots) + len(self._shared_from(table, first_slot))

    def _missing(self, table: BlockTable, num_slots: int) -> int:
        return max(self.blocks_for(num_slots) - len(table), 0)

    def _shared_from(self, table: BlockTable, first_slot: int) -> list[int]:
        """Indices of the blocks from ``first_slot`` on that others hold too."""
        first = first_slot // self.block_size
        return [
            index
            for index, block in enumerate(table.blocks[first:], first)
            if self.pool.ref_count(block) > 1
        ]

    def _admission_need(self, num_tokens: int, hit: list[int], use_watermark: bool) -> int:
        need = self.blocks_for(num_tokens) - len(hit)
        need += sum(map(self.pool.is_free, hit))
        return need + (self.watermark_blocks if use_watermark else 0)

    def would_fit(
        self,
        table: BlockTable,
        num_tokens: int,
        leaving: Iterable[BlockTable],
        *,
        use_watermark: bool,
    ) -> bool:
        """Whether a table without blocks would get ``num_tokens`` slots once others are freed."""
        held = Counter(block for other in leaving for block in other.blocks)
        freed = sum(self.pool.ref_count(block) == count for block, count in held.items())
        # What comes from host memory comes whole, without hits.
        hit = [] if table.host_blocks else self.find_hit(table, num_tokens)
        shared = sum(self.pool.ref_count(block) > held[block] for block in hit)
        need = self.blocks_for(num_tokens) - shared
        return need + (self.watermark_blocks if use_watermark else 0) <= self.pool.num_free + freed

    # -- changes -----------------------------------------------------------------------------

    def new_table(
        self,
        content: Content | None,
        num_prompt_tokens: int,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
    ) -> BlockTable:
        """An empty table for a sequence that begins with ``content``: its prompt or a part of it, or more."""
        if content is None or not self.enable_prefix_caching:
            return BlockTable()
        is_whole_prompt = content.num_tokens == num_prompt_tokens
        return BlockTable(
            KeyChain(
                content, self.block_size, extra_keys, self._hash, is_whole_prompt=is_whole_prompt
            )
        )

    def admit(
        self, table: BlockTable, hit: list[int], num_tokens: int, *, use_watermark: bool = False
    ) -> list[int] | None:
        """Give an empty table the blocks of ``hit`` and new ones for the rest of ``num_tokens`` slots.

        Returns the new blocks, or ``None`` if they are not free now.
        """
        assert not table.blocks, f"the table holds {len(table.blocks)} blocks already"
        if not self.fits(num_tokens, hit, use_watermark=use_watermark):
            return None
        self.pool.hold(hit)
        new_blocks = self.pool.allocate(self.blocks_for(num_tokens) - len(hit))
        table.blocks = hit + new_blocks
        table.num_registered = len(hit)
        return new_blocks

    def grow(self, table: BlockTable, first_slot: int, num_slots: int) -> Growth | None:
        """Make slots ``[first_slot, num_slots)`` writable: new blocks, and copies of shared ones.

        A block that others hold too is replaced by a copy (copy-on-write); the last holder keeps
        the original. Returns ``None`` if the blocks are not free now.
        """
        blocks = table.blocks
        shared = self._shared_from(table, first_slot)
        need = self._missing(table, num_slots) + len(shared)
        if need == 0:
            return Growth([], [])
        if need > self.pool.num_free:
            return None
        taken = self.pool.allocate(need)
        copies = []
        for index, dst in zip(shared, taken, strict=False):
            copies.append(BlockCopy(blocks[index], dst))
            self.pool.release([blocks[index]])
            blocks[index] = dst
        new_blocks = taken[len(shared) :]
        blocks += new_blocks
        return Growth(new_blocks, copies)

    def extend(self, tables: Iterable[BlockTable], counts: Iterable[int]) -> list[list[int]]:
        """New blocks for many tables in one go: as ``grow`` of each in turn, where none is shared.

        Raises ``NoFreeBlocksError`` if they are not all free now.
        """
        counts = list(counts)
        taken = self.pool.allocate(sum(counts))
        new_blocks = []
        start = 0
        for table, count in zip(tables, counts, strict=True):
            new = taken[start : start + count]
            table.blocks += new
            new_blocks.append(new)
            start += count
        return new_blocks

    def register(self, table: BlockTable, num_tokens: int) -> None:
        """Let others find the full blocks among the first ``num_tokens`` slots.

        To be called when the step that fills them is scheduled: a request admitted later in the
        same step may hit them, so a backend writes KV before attention in each layer.
        """
        if table.keys is None:
            return
        keys = table.keys.keys
        end = min(num_tokens // self.block_size, len(keys))
        for index in range(table.num_registered, end):
            block = table.blocks[index]
            # A fork shares blocks that its sibling may have registered.
            if block not in self.pool.cache:
                self.pool.register(block, keys[index])
        table.num_registered = max(table.num_registered, end)

    def unregister(self, table: BlockTable, num_registered: int) -> None:
        """Take registrations back to the first ``num_registered`` blocks: the rest never came to be."""
        for index in range(num_registered, table.num_registered):
            self.pool.forget(table.blocks[index])
        table.num_registered = min(table.num_registered, num_registered)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table on the same blocks; whoever writes a shared one first copies it."""
        child = BlockTable(None if table.keys is None else table.keys.fork())
        child.blocks = list(table.blocks)
        child.num_registered = table.num_registered
        self.pool.hold(child.blocks)
        return child

    def free(self, table: BlockTable) -> None:
        """Release everything the table holds, last block first: a prefix outlives what follows it."""
        self.pool.release(table.blocks[::-1])
        table.blocks = []
        table.num_registered = 0
        if table.host_blocks:
            assert self.host_pool is not None
            self.host_pool.release(table.host_blocks)
            table.host_blocks = []

    def swap_out(self, table: BlockTable) -> list[BlockTransfer] | None:
        """Move a table's content to host memory and release its blocks.

        Returns the transfers, or ``None`` if host memory has no room (or there is none).
        """
        if self.host_pool is None or len(table.blocks) > self.host_pool.num_free:
            return None
        host_blocks = self.host_pool.allocate(len(table.blocks))
        transfers = [BlockTransfer(*pair) for pair in zip(table.blocks, host_blocks, strict=True)]
        self.pool.release(table.blocks[::-1])
        table.blocks = []
        table.num_registered = 0
        table.host_blocks = host_blocks
        return transfers

    def swap_in(
        self, table: BlockTable, num_tokens: int, *, use_watermark: bool = False
    ) -> tuple[list[BlockTransfer], list[int]] | None:
        """Bring a table back, with room for ``num_tokens`` slots.

        Returns the transfers and the blocks taken, or ``None`` if those are not free now.
        """
        assert self.host_pool is not None, "there is no host memory"
        assert table.host_blocks, "the table is not swapped out"
        assert self.blocks_for(num_tokens) >= len(table.host_blocks), (
            f"{num_tokens} tokens are fewer than host memory holds of the table"
        )
        if not self.fits(num_tokens, [], use_watermark=use_watermark):
            return None
        blocks = self.pool.allocate(self.blocks_for(num_tokens))
        transfers = [BlockTransfer(*pair) for pair in zip(table.host_blocks, blocks, strict=False)]
        self.host_pool.release(table.host_blocks)
        table.blocks, table.host_blocks = blocks, []
        table.num_registered = 0
        return transfers, blocks

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Recompute every count from the tables of all living sequences; slow.

        Raises ``AssertionError`` naming what is wrong.
        """
        tables = list(tables)
        self.pool.check(block for table in tables for block in table.blocks)
        if self.host_pool is not None:
            self.host_pool.check(block for table in tables for block in table.host_blocks)
        for table in tables:
            assert len(set(table.blocks)) == len(table.blocks), (
                f"a table holds a block twice: {table.blocks}"
            )
            assert table.num_registered <= len(table.blocks), (
                f"{table.num_registered} blocks registered of {len(table.blocks)} held"
            )
            keys = [] if table.keys is None else table.keys.keys
            for block, key in zip_longest(table.blocks, keys[: len(table)]):
                found = self.pool.cache.key_of(block)
                assert found is None or found == key, (
                    f"block {block} is registered under {found.hex()[:12]}, "
                    f"its table says {key.hex()[:12] if key else 'unknown'}"
                )
