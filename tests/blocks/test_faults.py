"""Tests of the test: each deliberate fault must make the state machine fail."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from blockmanager import BlockManager, BlockPool, BlockTable, Growth, PrefixCache
from blockmanager.content import ExtraKeys, HashFunction, KeyChain
from blockmanager.free_queue import FreeQueue
from tests.blocks.test_state_machine import BlockManagerMachine

SETTINGS = settings(
    derandomize=True,
    database=None,
    max_examples=3000,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.generate],  # a counterexample is wanted, not the smallest one
    suppress_health_check=list(HealthCheck),
)


class MemoryAlone(BlockManagerMachine):
    """No ``check()`` and no plain twin: only what is read back counts."""

    with_plain_twin = False


Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def no_copy_on_write(patch: Patch) -> None:
    patch.setattr(BlockManager, "_shared_from", lambda self, table, first_slot: [])


def copies_not_handed_over(patch: Patch) -> None:
    real = BlockManager.grow

    def grow(self: BlockManager, *args: Any) -> Growth | None:
        growth = real(self, *args)
        return growth if growth is None else Growth(growth.new_blocks, [])

    patch.setattr(BlockManager, "grow", grow)


def only_first_shared_block_copied(patch: Patch) -> None:
    real = BlockManager._shared_from
    patch.setattr(BlockManager, "_shared_from", lambda *args: real(*args)[:1])


def fork_does_not_hold(patch: Patch) -> None:
    def fork(self: BlockManager, table: BlockTable) -> BlockTable:
        child = BlockTable(None if table.keys is None else table.keys.fork())
        child.blocks = list(table.blocks)
        child.num_registered = table.num_registered
        return child

    patch.setattr(BlockManager, "fork", fork)


def fork_shares_the_key_chain(patch: Patch) -> None:
    patch.setattr(KeyChain, "fork", lambda self: self)


def hold_misses_the_last_block(patch: Patch) -> None:
    real = BlockPool.hold
    patch.setattr(BlockPool, "hold", lambda self, blocks: real(self, list(blocks)[:-1]))


def hold_counts_twice(patch: Patch) -> None:
    real = BlockPool.hold

    def hold(self: BlockPool, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        real(self, blocks)
        for block in blocks[:1]:
            self._ref_counts[block] += 1

    patch.setattr(BlockPool, "hold", hold)


def release_misses_the_last_block(patch: Patch) -> None:
    real = BlockPool.release
    patch.setattr(BlockPool, "release", lambda self, blocks: real(self, blocks[:-1]))


def release_frees_shared_blocks(patch: Patch) -> None:
    real = BlockPool.release

    def release(self: BlockPool, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._ref_counts[block] = min(self._ref_counts[block], 1)
        real(self, [block for block in blocks if self._ref_counts[block]])

    patch.setattr(BlockPool, "release", release)


def stale_key_kept_on_eviction(patch: Patch) -> None:
    real = BlockPool.allocate

    def allocate(self: BlockPool, count: int) -> list[int]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PrefixCache, "forget", lambda self, block: False)
            return real(self, count)

    patch.setattr(BlockPool, "allocate", allocate)


def stale_entry_kept_on_eviction(patch: Patch) -> None:
    """The block forgets its key, the map still serves the block."""
    real = PrefixCache.forget

    def forget(self: PrefixCache, block: int) -> bool:
        key = self._key_of.get(block)
        had = real(self, block)
        if key is not None:
            self._block_of.setdefault(key, block)
        return had

    patch.setattr(PrefixCache, "forget", forget)


def duplicate_takes_the_survivor_along(patch: Patch) -> None:
    real = PrefixCache.forget

    def forget(self: PrefixCache, block: int) -> bool:
        key = self._key_of.get(block)
        if key is None or key not in self._block_of:
            return self._key_of.pop(block, None) is not None
        real(self, block)
        self._block_of.pop(key, None)
        return True

    patch.setattr(PrefixCache, "forget", forget)


def newest_duplicate_is_served(patch: Patch) -> None:
    real = PrefixCache.register

    def register(self: PrefixCache, block: int, key: bytes) -> None:
        real(self, block, key)
        oldest = self._block_of[key]
        if oldest != block:
            self._block_of[key] = block
            self._duplicates[key][-1] = oldest

    patch.setattr(PrefixCache, "register", register)


def _changing_the_order_when_refused(door: str) -> Fault:
    def fault(patch: Patch) -> None:
        real = getattr(BlockManager, door)

        def refusing(self: BlockManager, *args: Any, **options: Any) -> Any:
            answer = real(self, *args, **options)
            if answer is None and len(self.pool._free._cached) > 1:
                self.pool._free._cached.move_to_end(next(iter(self.pool._free._cached)))
            return answer

        patch.setattr(BlockManager, door, refusing)

    return fault


def refused_extend_takes_a_block(patch: Patch) -> None:
    def allocate(self: BlockPool, count: int) -> list[int]:
        if 0 < len(self._free) < count:
            real(self, 1)
        return real(self, count)

    real = BlockPool.allocate
    patch.setattr(BlockPool, "allocate", allocate)


def refused_admission_keeps_its_hit(patch: Patch) -> None:
    real = BlockManager.admit

    def admit(
        self: BlockManager, table: BlockTable, hit: list[int], *args: Any, **options: Any
    ) -> Any:
        answer = real(self, table, hit, *args, **options)
        if answer is None:
            self.pool.hold(hit)
        return answer

    patch.setattr(BlockManager, "admit", admit)


def free_hit_blocks_count_as_room(patch: Patch) -> None:
    def need(self: BlockManager, num_tokens: int, hit: list[int], use_watermark: bool) -> int:
        return self.blocks_for(num_tokens) - len(hit) + self.watermark_blocks * use_watermark

    patch.setattr(BlockManager, "_admission_need", need)


def watermark_forgotten(patch: Patch) -> None:
    real = BlockManager._admission_need
    patch.setattr(
        BlockManager, "_admission_need", lambda self, n, hit, _: real(self, n, hit, False)
    )


def cached_blocks_go_to_the_head(patch: Patch) -> None:
    real = FreeQueue.push_cached

    def push_cached(self: FreeQueue, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        real(self, blocks)
        for block in reversed(blocks):
            self._cached.move_to_end(block, last=False)

    patch.setattr(FreeQueue, "push_cached", push_cached)


def cached_blocks_go_with_the_blank(patch: Patch) -> None:
    patch.setattr(FreeQueue, "push_cached", lambda self, blocks: self.push_plain(list(blocks)))


def blank_blocks_go_to_the_tail(patch: Patch) -> None:
    patch.setattr(FreeQueue, "push_plain", lambda self, blocks: self.push_cached(blocks))


def blank_blocks_in_the_wrong_order(patch: Patch) -> None:
    patch.setattr(FreeQueue, "push_plain", lambda self, blocks: self._plain.extend(blocks))


def prefix_is_freed_before_its_end(patch: Patch) -> None:
    real = BlockPool.release
    patch.setattr(BlockPool, "release", lambda self, blocks: real(self, blocks[::-1]))


def swap_in_moves_the_wrong_block(patch: Patch) -> None:
    real = BlockManager.swap_in

    def swap_in(self: BlockManager, *args: Any, **options: Any) -> Any:
        moved = real(self, *args, **options)
        if moved is None:
            return None
        transfers, blocks = moved
        sources = [transfer.src for transfer in transfers]
        wrong = zip(transfers, sources[1:] + sources[:1], strict=True)
        return [transfer._replace(src=src) for transfer, src in wrong], blocks

    patch.setattr(BlockManager, "swap_in", swap_in)


def swap_out_keeps_host_blocks_free(patch: Patch) -> None:
    real = BlockManager.swap_out

    def swap_out(self: BlockManager, table: BlockTable) -> Any:
        transfers = real(self, table)
        if transfers:
            assert self.host_pool is not None
            self.host_pool.release(table.host_blocks)
            table.host_blocks = list(table.host_blocks)
        return transfers

    patch.setattr(BlockManager, "swap_out", swap_out)


def swapped_table_stays_registered(patch: Patch) -> None:
    real = BlockManager.swap_in

    def swap_in(self: BlockManager, table: BlockTable, *args: Any, **options: Any) -> Any:
        moved = real(self, table, *args, **options)
        if moved is not None:
            table.num_registered = len(moved[0])
        return moved

    patch.setattr(BlockManager, "swap_in", swap_in)


def free_forgets_host_blocks(patch: Patch) -> None:
    def free(self: BlockManager, table: BlockTable) -> None:
        self.pool.release(table.blocks[::-1])
        table.blocks, table.host_blocks, table.num_registered = [], [], 0

    patch.setattr(BlockManager, "free", free)


def half_full_block_is_registered(patch: Patch) -> None:
    real = BlockManager.register

    def register(self: BlockManager, table: BlockTable, num_tokens: int) -> None:
        real(self, table, min(self.blocks_for(num_tokens), len(table)) * self.block_size)

    patch.setattr(BlockManager, "register", register)


def unregister_keeps_the_keys(patch: Patch) -> None:
    patch.setattr(BlockPool, "forget", lambda self, block: None)


def whole_prompt_may_hit(patch: Patch) -> None:
    def find_hit(self: BlockManager, table: BlockTable, num_tokens: int) -> list[int]:
        keys = [] if table.keys is None else table.keys.keys
        return self.pool.cache.longest_hit(keys, num_tokens // self.block_size)

    patch.setattr(BlockManager, "find_hit", find_hit)


def slots_of_the_wrong_block(patch: Patch) -> None:
    real = BlockTable.slot_mapping

    def slot_mapping(self: BlockTable, start: int, end: int, block_size: int) -> Any:
        # Off by one once a table has outgrown its first block.
        shift = block_size if start >= block_size and end % block_size else 0
        return real(self, start, end, block_size) - shift

    patch.setattr(BlockTable, "slot_mapping", slot_mapping)


def extra_keys_ignored(patch: Patch) -> None:
    patch.setattr(ExtraKeys, "root", lambda self, hash_function: hash_function(b""))


def one_name_space_for_extra_keys(patch: Patch) -> None:
    def root(self: ExtraKeys, hash_function: HashFunction) -> bytes:
        return hash_function(f"{self.lora or self.salt}".encode())

    patch.setattr(ExtraKeys, "root", root)


def constant_hash(patch: Patch) -> None:
    patch.setattr(BlockManagerMachine, "hash_function", staticmethod(lambda data: b"same"))


def unchained_hash(patch: Patch) -> None:
    """A key that names a block's tokens and not what stands before them."""

    def tokens_only(data: bytes) -> bytes:
        return hashlib.sha256(data[32:] if len(data) > 32 else data).digest()

    patch.setattr(BlockManagerMachine, "hash_function", staticmethod(tokens_only))


CORRUPTING: list[Fault] = [
    no_copy_on_write,
    copies_not_handed_over,
    only_first_shared_block_copied,
    fork_does_not_hold,
    hold_misses_the_last_block,
    release_frees_shared_blocks,
    stale_key_kept_on_eviction,
    stale_entry_kept_on_eviction,
    swap_in_moves_the_wrong_block,
    swap_out_keeps_host_blocks_free,
    slots_of_the_wrong_block,
    extra_keys_ignored,
    one_name_space_for_extra_keys,
    constant_hash,
    unchained_hash,
]
"""Somebody reads what somebody else wrote."""

MISCOUNTING: list[Fault] = [
    fork_shares_the_key_chain,
    half_full_block_is_registered,
    hold_counts_twice,
    release_misses_the_last_block,
    duplicate_takes_the_survivor_along,
    newest_duplicate_is_served,
    _changing_the_order_when_refused("admit"),
    _changing_the_order_when_refused("grow"),
    _changing_the_order_when_refused("swap_out"),
    _changing_the_order_when_refused("swap_in"),
    refused_extend_takes_a_block,
    refused_admission_keeps_its_hit,
    free_hit_blocks_count_as_room,
    watermark_forgotten,
    cached_blocks_go_to_the_head,
    cached_blocks_go_with_the_blank,
    blank_blocks_go_to_the_tail,
    blank_blocks_in_the_wrong_order,
    prefix_is_freed_before_its_end,
    swapped_table_stays_registered,
    free_forgets_host_blocks,
    unregister_keeps_the_keys,
    whole_prompt_may_hit,
]
"""Nothing reads back wrong (at once, or often), but counts, keys, hits or the eviction order are."""


def name_of(fault: Fault) -> str:
    return (
        fault.__name__
        if fault.__closure__ is None
        else f"refused_{fault.__closure__[0].cell_contents}"
    )


@pytest.mark.parametrize("fault", CORRUPTING + MISCOUNTING, ids=name_of)
def test_fault_is_found(fault: Fault, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(BlockManagerMachine, settings=SETTINGS)


@pytest.mark.parametrize("fault", CORRUPTING, ids=name_of)
def test_fault_is_found_by_the_memory_alone(fault: Fault, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    # A fault may also trip the bookkeeping before the memory shows it.
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(MemoryAlone, settings=SETTINGS)
