"""The fixed set of KV blocks: who holds one, which are free, what the free ones still hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blockmanager.content import BlockKey
from blockmanager.free_queue import FreeQueue
from blockmanager.prefix_cache import PrefixCache


class NoFreeBlocksError(Exception):
    """Not now: fewer blocks are free than were asked for. Nothing has changed."""


class BlockPool:
    """Blocks 1..num_blocks with reference counts.

    Id 0 is never handed out: backends may use it as the null block that padding points to, as vLLM
    does. ``num_blocks`` counts usable blocks, without it.

    Invariant: a block is free exactly when its reference count is zero. A free block may still be
    registered in the prefix cache; it loses its key only when it is allocated again.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks: must hold at least 1")
        self.num_blocks = num_blocks
        self.cache = PrefixCache()
        self.evicted: list[int] = []
        """Blocks that lost cached content, in order, since ``drain_evicted``."""
        self.num_evictions = 0
        self._free = FreeQueue(num_blocks)
        # Grows with the highest id ever used, so a large idle pool costs nothing.
        self._ref_counts: list[int] = [0]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def free_ids(self) -> list[int]:
        """Free blocks in the order in which they will be taken."""
        return list(self._free)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block] if block < len(self._ref_counts) else 0

    def is_free(self, block: int) -> bool:
        return self.ref_count(block) == 0

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks from the head of the free queue, each with one reference.

        Cached content of the blocks taken is evicted.

        Raises
        ------
        NoFreeBlocksError
            Fewer are free. Nothing has changed, the eviction order included.
        """
        if count > len(self._free):
            raise NoFreeBlocksError(f"{count} blocks asked for, {len(self._free)} are free")
        plain, cached = self._free.pop(count)
        if len(plain) + len(cached) != count:
            self._free.unpop(plain, cached)
            raise AssertionError(
                f"free-queue counter drift: it counts {len(self._free)} blocks but gave only "
                f"{len(plain) + len(cached)} of {count}"
            )
        for block in cached:
            self.cache.forget(block)
        self.evicted += cached
        self.num_evictions += len(cached)
        blocks = plain + cached
        counts = self._ref_counts
        for block in blocks:
            if block < len(counts):
                counts[block] = 1
            else:  # ids are first used in order
                counts.append(1)
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; a free one leaves the free queue."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                self._free.remove_cached(block)
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block, walking in the order given.

        Blocks that nobody holds any more become free: with cached content at the tail of the free
        queue, without at its head as one run.
        """
        plain: list[int] = []
        cached: list[int] = []
        counts = self._ref_counts
        for block in blocks:
            assert counts[block] > 0, f"block {block} is released but nobody holds it"
            counts[block] -= 1
            if counts[block] == 0:
                (cached if block in self.cache else plain).append(block)
        self._free.push_cached(cached)
        self._free.push_plain(plain)

    def register(self, block: int, key: BlockKey) -> None:
        """Let prefix hits find a held, full block under ``key``."""
        assert self._ref_counts[block] > 0, f"block {block} is registered but free"
        self.cache.register(block, key)

    def forget(self, block: int) -> None:
        """Take back a registration: the block's content was never computed."""
        assert self._ref_counts[block] > 0, (
            f"block {block} is free: only its eviction may forget it"
        )
        self.cache.forget(block)

    def drain_evicted(self) -> list[int]:
        evicted, self.evicted = self.evicted, []
        return evicted

    def check(self, held: Iterable[int]) -> None:
        """Recompute reference counts and the free queue from ``held``, one entry a reference.

        Raises ``AssertionError`` naming the block that disagrees.
        """
        truth: dict[int, int] = {}
        for block in held:
            truth[block] = truth.get(block, 0) + 1
        for block, count in truth.items():
            assert self.ref_count(block) == count, (
                f"block {block} has {count} holders, its reference count is {self.ref_count(block)}"
            )
        for block, count in enumerate(self._ref_counts):
            assert count == truth.get(block, 0), (
                f"block {block} has reference count {count}, {truth.get(block, 0)} holders"
            )
        free = self.free_ids()
        assert len(free) == len(self._free), (
            f"the free queue counts {len(self._free)} blocks and holds {len(free)}"
        )
        assert len(set(free)) == len(free), "a block is in the free queue twice"
        assert set(free).isdisjoint(truth), (
            f"blocks {sorted(set(free) & set(truth))} are held and free"
        )
        assert len(free) + len(truth) == self.num_blocks, (
            f"{len(free)} free and {len(truth)} held blocks are not the {self.num_blocks} of the pool"
        )
        for block in free:
            assert self._free.is_cached(block) == (block in self.cache), (
                f"free block {block} is in the wrong section of the queue"
            )
        self.cache.check()
