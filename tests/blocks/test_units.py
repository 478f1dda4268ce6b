"""The parts of the block manager, one by one."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockmanager import (
    BlockCopy,
    BlockManager,
    BlockPool,
    BlockTable,
    NoFreeBlocksError,
    PrefixCache,
    TokenContent,
)
from blockmanager.free_queue import FreeQueue
from tests.blocks.helpers import state_of

# -- free queue ------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["pop", "pop", "pop and put back", "plain", "cached", "hit"]),
        st.integers(0, 6),
    ),
    max_size=60,
)


@given(num_blocks=st.integers(1, 12), operations=OPERATIONS)
def test_free_queue_is_a_list(num_blocks: int, operations: list[tuple[str, int]]) -> None:
    """Head of the list first; which of its blocks have content is known beside it."""
    queue = FreeQueue(num_blocks)
    free = list(range(1, num_blocks + 1))
    with_content: set[int] = set()
    held: list[int] = []
    for operation, count in operations:
        if operation.startswith("pop"):
            count = min(count, len(free))
            plain, cached = queue.pop(count)
            assert plain + cached == free[:count]
            assert with_content.issuperset(cached)
            assert with_content.isdisjoint(plain)
            if operation == "pop":
                held += free[:count]
                del free[:count]
                with_content.difference_update(held)
            else:
                queue.unpop(plain, cached)
        elif operation == "hit":
            inside = [block for block in free if block in with_content]
            if inside:
                block = inside[count % len(inside)]
                queue.remove_cached(block)
                free.remove(block)
                with_content.remove(block)
                held.append(block)
        else:
            returned, held = held[:count], held[count:]
            if operation == "plain":
                queue.push_plain(returned)
                free[:0] = returned
            else:
                queue.push_cached(returned)
                free += returned
                with_content.update(returned)
        assert list(queue) == free
        assert len(queue) == len(free)
        assert [queue.is_cached(block) for block in free] == [b in with_content for b in free]


def test_free_queue_gives_what_it_has_when_asked_for_more() -> None:
    """The pool compares the numbers and puts back what came."""
    queue = FreeQueue(3)
    queue.push_cached(queue.pop(1)[0])
    assert queue.pop(5) == ([2, 3], [1])
    queue.unpop([2, 3], [1])
    assert list(queue) == [2, 3, 1]


# -- pool ------------------------------------------------------------------------------------


def test_pool_frees_blank_blocks_to_the_head_and_cached_ones_to_the_tail() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(5)
    assert blocks == [1, 2, 3, 4, 5]
    for block in (1, 2, 4):
        pool.register(block, bytes([block]))
    pool.release([5, 4, 3, 2, 1])
    assert pool.free_ids() == [5, 3, 6, 4, 2, 1]
    pool.hold([2])
    assert pool.free_ids() == [5, 3, 6, 4, 1]
    assert pool.allocate(4) == [5, 3, 6, 4]
    assert (pool.drain_evicted(), pool.evicted, pool.num_evictions) == ([4], [], 1)
    pool.check([2, 5, 3, 6, 4])


def test_pool_refusal_names_both_numbers_and_changes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    before = state_of(pool)
    with pytest.raises(NoFreeBlocksError, match="3 blocks asked for, 2 are free"):
        pool.allocate(3)
    assert state_of(pool) == before


def test_pool_of_no_blocks_is_an_error() -> None:
    with pytest.raises(ValueError, match="a pool of 0 blocks"):
        BlockPool(0)


def test_blocks_that_nobody_holds_cannot_be_released_registered_or_forgotten() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="block 1 is released but nobody holds it"):
        pool.release([block])
    with pytest.raises(AssertionError, match="block 1 is registered but free"):
        pool.register(block, b"key")
    with pytest.raises(AssertionError, match="block 1 is free"):
        pool.forget(block)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([1, 2, 2], "block 1 has reference count 1, 0 holders|block 2 has 2 holders"),
        ([1], "block 2 has reference count 1, 0 holders"),
        ([1, 2, 3], "block 3 has 1 holders, its reference count is 0"),
    ],
)
def test_pool_check_names_the_block_that_disagrees(held: list[int], message: str) -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool.check([1, 2])
    with pytest.raises(AssertionError, match=message):
        pool.check(held)


def test_a_large_pool_costs_what_is_used_of_it() -> None:
    tracemalloc.start()
    try:
        manager = BlockManager(10**9, 16, num_swap_blocks=10**9)
        table = manager.new_table(TokenContent.of(range(160)), 160)
        assert manager.admit(table, [], 160) == list(range(1, 11))
        manager.register(table, 160)
        assert manager.grow(table, 160, 161) == ([11], [])
        assert manager.swap_out(table) is not None
        assert manager.swap_in(table, 161) is not None
        manager.free(table)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert manager.num_free == 10**9
    assert len(manager.pool._ref_counts) <= 1 + 2 * 11
    assert peak < 64 * 1024


# -- prefix cache ----------------------------------------------------------------------------


@given(
    operations=st.lists(
        st.tuples(st.booleans(), st.integers(1, 6), st.sampled_from([b"a", b"b", b"c"])),
        max_size=40,
    )
)
def test_prefix_cache_serves_the_oldest_of_equal_blocks(
    operations: list[tuple[bool, int, bytes]],
) -> None:
    cache = PrefixCache()
    key_of: dict[int, bytes] = {}  # oldest registration first
    for is_register, block, key in operations:
        if not is_register:
            assert cache.forget(block) == (key_of.pop(block, None) is not None)
        elif block not in key_of:
            cache.register(block, key)
            key_of[block] = key
        cache.check()
        assert len(cache) == len(set(key_of.values()))
        for k in (b"a", b"b", b"c"):
            oldest = [b for b in key_of if key_of[b] == k][:1]
            assert cache.longest_hit([k], 1) == oldest
        assert [cache.key_of(b) for b in range(1, 7)] == [key_of.get(b) for b in range(1, 7)]
        assert [b in cache for b in range(1, 7)] == [b in key_of for b in range(1, 7)]


def test_prefix_cache_hits_end_at_the_first_miss_and_at_the_limit() -> None:
    cache = PrefixCache()
    for block, key in ((1, b"a"), (2, b"b"), (4, b"d")):
        cache.register(block, key)
    keys = [b"a", b"b", b"c", b"d"]
    assert cache.longest_hit(keys, 4) == [1, 2]
    assert cache.longest_hit(keys, 1) == [1]
    assert cache.longest_hit(keys, 0) == []


def test_prefix_cache_refuses_to_name_a_block_twice() -> None:
    cache = PrefixCache()
    cache.register(1, b"a")
    with pytest.raises(AssertionError, match="block 1 is registered already"):
        cache.register(1, b"b")


# -- tables and the manager ------------------------------------------------------------------


def test_slot_mapping_follows_the_table() -> None:
    table = BlockTable()
    table.blocks = [7, 2, 5]
    slots = table.slot_mapping(2, 11, 4)
    assert slots.dtype == np.int64
    assert slots.tolist() == [30, 31, 8, 9, 10, 11, 20, 21, 22]
    assert table.slot_mapping(3, 3, 4).tolist() == []


@pytest.mark.parametrize(
    ("block_size", "watermark_blocks", "message"),
    [
        (0, 0, "block_size is 0"),
        (4, -1, "watermark_blocks is -1"),
    ],
)
def test_manager_names_a_bad_setting(block_size: int, watermark_blocks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockManager(8, block_size, watermark_blocks=watermark_blocks)


def test_watermark_holds_back_admissions_only() -> None:
    manager = BlockManager(8, 4, watermark_blocks=3)
    first = manager.new_table(None, 20)
    assert manager.admit(first, [], 21, use_watermark=True) is None
    assert manager.admit(first, [], 20, use_watermark=True) == [1, 2, 3, 4, 5]
    assert manager.grow(first, 20, 32) == ([6, 7, 8], [])


def test_a_fork_copies_what_it_writes_and_the_last_holder_keeps_the_original() -> None:
    manager = BlockManager(8, 4)
    first = manager.new_table(None, 6)
    manager.admit(first, [], 6)
    second, third = manager.fork(first), manager.fork(first)
    assert manager.blocks_to_grow(second, 6, 7) == 1
    assert manager.grow(second, 6, 7) == ([], [BlockCopy(2, 3)])
    assert manager.grow(third, 6, 7) == ([], [BlockCopy(2, 4)])
    assert manager.grow(first, 6, 7) == ([], [])
    assert (first.blocks, second.blocks, third.blocks) == ([1, 2], [1, 3], [1, 4])
    # Rewriting from the start takes the shared block too.
    assert manager.grow(first, 0, 6) == ([], [BlockCopy(1, 5)])
    manager.check([first, second, third])


def test_no_swap_space_means_no_swap() -> None:
    manager = BlockManager(4, 4)
    table = manager.new_table(None, 4)
    manager.admit(table, [], 4)
    assert manager.swap_out(table) is None
    assert table.blocks == [1]


def test_swapped_out_content_stays_findable_until_evicted_and_comes_back_as_a_duplicate() -> None:
    manager = BlockManager(6, 2, num_swap_blocks=2)
    content = TokenContent.of([1, 2, 3, 4])
    table = manager.new_table(content, 4)
    manager.admit(table, [], 4)
    manager.register(table, 4)
    assert manager.swap_out(table) == [(1, 1), (2, 2)]
    assert manager.find_hit(manager.new_table(content, 4), 5) == [1, 2]
    assert manager.swap_in(table, 4) == ([(1, 3), (2, 4)], [3, 4])
    manager.register(table, 4)
    assert len(manager.pool.cache) == 2
    manager.check([table])
    assert manager.pool.allocate(4) == [5, 6, 2, 1]
    assert manager.find_hit(manager.new_table(content, 4), 5) == [3, 4]


def test_check_names_a_key_that_is_not_the_tables() -> None:
    manager = BlockManager(4, 2)
    table = manager.new_table(TokenContent.of([1, 2]), 2)
    manager.admit(table, [], 2)
    manager.pool.register(table.blocks[0], b"\xff" * 32)
    with pytest.raises(AssertionError, match="block 1 is registered under ffffffffffff"):
        manager.check([table])


def test_check_names_a_key_that_unknown_content_cannot_have() -> None:
    manager = BlockManager(4, 2)
    table = manager.new_table(None, 2)
    manager.admit(table, [], 2)
    manager.pool.register(table.blocks[0], b"\xff" * 32)
    with pytest.raises(AssertionError, match="block 1 is registered under ffffffffffff"):
        manager.check([table])
