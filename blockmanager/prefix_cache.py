"""Which block holds which content: block keys to block ids, and back."""

from __future__ import annotations

from collections.abc import Iterable

from blockmanager.content import BlockKey


class PrefixCache:
    """Registered blocks by key.

    Two blocks may hold the same content (both prompts were computed before either was known): both
    stay registered and the oldest is served, so that evicting one never loses the other.
    """

    __slots__ = ("_block_of", "_duplicates", "_key_of")

    def __init__(self) -> None:
        self._block_of: dict[BlockKey, int] = {}
        self._duplicates: dict[BlockKey, dict[int, None]] = {}  # in order of registration
        self._key_of: dict[int, BlockKey] = {}

    def __len__(self) -> int:
        """Distinct keys."""
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def key_of(self, block: int) -> BlockKey | None:
        return self._key_of.get(block)

    def register(self, block: int, key: BlockKey) -> None:
        assert block not in self._key_of, f"block {block} is registered already"
        self._key_of[block] = key
        if key in self._block_of:
            self._duplicates.setdefault(key, {})[block] = None
        else:
            self._block_of[key] = block

    def forget(self, block: int) -> bool:
        """Drop the block's key; whether it had one."""
        key = self._key_of.pop(block, None)
        if key is None:
            return False
        duplicates = self._duplicates.get(key)
        if self._block_of[key] != block:
            assert duplicates is not None
            del duplicates[block]
        elif duplicates:
            oldest = next(iter(duplicates))
            del duplicates[oldest]
            self._block_of[key] = oldest
        else:
            del self._block_of[key]
        if duplicates is not None and not duplicates:
            del self._duplicates[key]
        return True

    def longest_hit(self, keys: Iterable[BlockKey], max_blocks: int) -> list[int]:
        """Blocks of the longest registered prefix, at most ``max_blocks`` of them."""
        hit: list[int] = []
        block_of = self._block_of
        for key in keys:
            if len(hit) == max_blocks:
                break
            block = block_of.get(key)
            if block is None:
                break
            hit.append(block)
        return hit

    def check(self) -> None:
        """Recompute the maps from one another.

        Raises ``AssertionError`` naming the block or key that disagrees.
        """
        blocks_by_key: dict[BlockKey, set[int]] = {}
        for block, key in self._key_of.items():
            blocks_by_key.setdefault(key, set()).add(block)
        assert blocks_by_key.keys() == self._block_of.keys(), (
            f"{len(self._block_of)} keys are served, blocks carry {len(blocks_by_key)}"
        )
        for key, blocks in blocks_by_key.items():
            served = [self._block_of[key], *self._duplicates.get(key, {})]
            assert sorted(served) == sorted(blocks), (
                f"key {key.hex()[:12]} serves blocks {served}, blocks {sorted(blocks)} carry it"
            )
        assert all(self._duplicates.values()), "an empty list of duplicates was kept"
