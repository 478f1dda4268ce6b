"""The waiting queue: a heap of policy keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from scheduler.sequence import Sequence


class WaitingQueue:
    """Sequences in the order of their keys; ties by arrival.

    A removed sequence leaves its heap entry behind, to be dropped when it comes up.
    """

    def __init__(self, key: Callable[[Sequence], tuple[Any, ...]]) -> None:
        self._key = key
        self._heap: list[tuple[tuple[Any, ...], int, int, Sequence]] = []
        self._entry_of: dict[Sequence, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._entry_of)

    def __iter__(self) -> Iterator[Sequence]:
        """In queue order; slow."""
        return (
            entry[-1] for entry in sorted(self._heap, key=lambda e: e[:3]) if self._is_live(entry)
        )

    def _is_live(self, entry: tuple[tuple[Any, ...], int, int, Sequence]) -> bool:
        return self._entry_of.get(entry[3]) == entry[2]

    def push(self, sequence: Sequence) -> None:
        assert sequence not in self._entry_of, f"{sequence.id} waits already"
        self._count += 1
        self._entry_of[sequence] = self._count
        heappush(self._heap, (self._key(sequence), sequence.number, self._count, sequence))

    def head(self) -> Sequence | None:
        while self._heap:
            if self._is_live(self._heap[0]):
                return self._heap[0][3]
            heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        del self._entry_of[sequence]
        if len(self._heap) > 2 * len(self._entry_of) + 64:  # most entries are dead
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)
