"""The free blocks, in the order in which they will be handed out: also the eviction order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain


class FreeQueue:
    """Free block ids 1..num_blocks, head first.

    The queue has three sections::

        head | freed without cached content | never used yet | freed with cached content | tail

    Blocks without content go back to the head, so they are taken again before a cached block is
    evicted; cached blocks go to the tail and leave it least recently freed first (LRU), or out of
    the middle when a prefix hit takes one back. A section of its own for the ids that were never
    used keeps the cost of a pool independent of its size.
    """

    __slots__ = ("_cached", "_last", "_next_unused", "_plain")

    def __init__(self, num_blocks: int) -> None:
        self._plain: list[int] = []  # a stack: the head of the queue is the end of this list
        self._next_unused = 1
        self._last = num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plain) + self._last + 1 - self._next_unused + len(self._cached)

    def __iter__(self) -> Iterator[int]:
        return chain(reversed(self._plain), range(self._next_unused, self._last + 1), self._cached)

    def is_cached(self, block: int) -> bool:
        """Whether ``block`` waits in the section of blocks with cached content."""
        return block in self._cached

    def pop(self, count: int) -> tuple[list[int], list[int]]:
        """Take ``count`` blocks from the head: those without and those with cached content.

        The caller has checked that there are as many.
        """
        plain = self._plain[: -count - 1 : -1]
        if plain:
            del self._plain[-len(plain) :]
        missing = count - len(plain)
        if missing and self._next_unused <= self._last:
            end = min(self._next_unused + missing, self._last + 1)
            plain.extend(range(self._next_unused, end))
            self._next_unused = end
            missing = count - len(plain)
        cached = []
        for _ in range(missing):
            try:
                cached.append(self._cached.popitem(last=False)[0])
            except KeyError:
                break  # the caller compares the counts
        return plain, cached

    def unpop(self, plain: Sequence[int], cached: Sequence[int]) -> None:
        """Put back what ``pop`` gave, so that the order is as it was before."""
        for block in reversed(cached):
            self._cached[block] = None
            self._cached.move_to_end(block, last=False)
        self.push_plain(plain)

    def push_plain(self, blocks: Sequence[int]) -> None:
        """Put blocks without cached content at the head, as one run in the order given."""
        self._plain.extend(reversed(blocks))

    def push_cached(self, blocks: Iterable[int]) -> None:
        """Put blocks with cached content at the tail, in the order given."""
        self._cached.update(dict.fromkeys(blocks))

    def remove_cached(self, block: int) -> None:
        """Take one block with cached content out of the middle (a prefix hit)."""
        del self._cached[block]
