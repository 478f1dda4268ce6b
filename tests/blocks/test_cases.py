"""Published faults of block managers; the id in a test's name is that of the scenario."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from blockmanager import (
    BlockCopy,
    BlockManager,
    BlockTable,
    ExtraKeys,
    Growth,
    NoFreeBlocksError,
    TokenContent,
)
from blockmanager.content import HashFunction, sha256
from blockmanager.free_queue import FreeQueue
from scheduler import Scheduler, SchedulerConfig
from scheduler import Sequence as Scheduled
from scheduler.policies import FCFS
from tests.blocks.helpers import EXTRA_KEYS, Memory, kv_values, state_of
from tests.scheduling.helpers import Engine, make_request, make_scheduler
from tests.scheduling.helpers import tokens as text


def new_table(
    manager: BlockManager, tokens: Sequence[int], extra_keys: ExtraKeys = EXTRA_KEYS[0]
) -> BlockTable:
    return manager.new_table(TokenContent.of(tokens), len(tokens), extra_keys)


def unknown_table(manager: BlockManager, num_slots: int) -> BlockTable:
    """A running sequence of ``num_slots`` slots whose content nobody knows."""
    table = manager.new_table(None, num_slots)
    assert manager.admit(table, [], num_slots) is not None
    return table


def start(
    manager: BlockManager, tokens: Sequence[int], extra_keys: ExtraKeys = EXTRA_KEYS[0]
) -> tuple[BlockTable, int]:
    """A prompt computed in one step; its table and how many of its tokens were hits."""
    table = new_table(manager, tokens, extra_keys)
    hit = manager.find_hit(table, len(tokens))
    assert manager.admit(table, hit, len(tokens)) is not None
    manager.register(table, len(tokens))
    return table, len(hit) * manager.block_size


def cached_free(manager: BlockManager) -> list[int]:
    """Free blocks that still hold findable content ("evictable")."""
    return [block for block in manager.pool.free_ids() if block in manager.pool.cache]


def test_bm_01_free_hit_blocks_are_not_counted_twice() -> None:
    manager = BlockManager(6, 4)
    a, _ = start(manager, range(8))
    manager.free(a)
    b = unknown_table(manager, 3)
    assert (manager.num_free, len(cached_free(manager))) == (5, 2)

    c = new_table(manager, [*range(8), *range(100, 116)])
    hit = manager.find_hit(c, 24)
    before = state_of([manager, b, c])
    assert len(hit) == 2
    assert not manager.fits(24, hit, use_watermark=False)
    assert manager.admit(c, hit, 24) is None
    assert state_of([manager, b, c]) == before
    assert [manager.pool.ref_count(block) for block in hit] == [0, 0]

    manager.free(b)
    assert manager.num_free == 6
    hit = manager.find_hit(c, 24)
    new_blocks = manager.admit(c, hit, 24)
    assert new_blocks is not None
    assert (len(hit) * 4, len(new_blocks) * 4) == (8, 16)
    assert manager.num_free == 0
    manager.check([c])


def test_bm_02_no_entry_survives_the_block_it_names() -> None:
    manager = BlockManager(2, 4)
    memory = Memory(4)
    rng = np.random.default_rng(2)
    prompts = [list(range(1, 9)), list(range(11, 19)), list(range(1, 9))]
    prompts += rng.integers(0, 1 << 40, (10_000, 8)).tolist()
    for prompt in prompts:
        table, num_hit = start(manager, prompt)
        assert num_hit == 0
        memory.write(table.slot_mapping(0, 8, 4), kv_values(0, prompt))
        assert len(manager.pool.cache) <= 2
        keys = table.keys
        assert keys is not None
        assert [manager.pool.cache.key_of(block) for block in table.blocks] == keys.keys
        assert memory.read(table.slot_mapping(0, 8, 4)) == kv_values(0, prompt)
        manager.free(table)
        manager.check([])
    assert manager.pool.num_evictions == 2 * (len(prompts) - 1)


def test_bm_03_block_aligned_prompt_that_is_cached_whole() -> None:
    engine = Engine(make_scheduler(8, 4))
    prompt = text("a", 8)
    engine.add("A", prompt, 1)
    engine.drain()
    pool = engine.scheduler.blocks.pool
    first, second = engine.steps[0].new_blocks["A"]

    engine.add("B", prompt, 2)
    step = engine.step()
    assert (step.computed_before["B"], step.granted["B"]) == (4, 4)
    blocks = engine.sequences["B"].block_ids
    assert blocks[0] == first
    assert second not in blocks
    assert [pool.ref_count(block) for block in blocks] == [1, 1]
    assert pool.ref_count(second) == 0
    engine.step()
    assert 8 - engine.steps[-1].num_free == 3
    engine.drain()
    assert pool.num_free == 8
    assert len(pool.cache) == 2  # distinct keys: B's second block is a duplicate of A's
    assert sum(block in pool.cache for block in range(1, 9)) == 3


def test_bm_05_shared_blocks_are_counted_once() -> None:
    manager = BlockManager(10, 4)

    def counts(tables: list[BlockTable]) -> tuple[int, int, int]:
        """Blank and free, evictable, protected."""
        manager.check(tables)
        evictable = len(cached_free(manager))
        return manager.num_free - evictable, evictable, manager.pool.num_used

    assert counts([]) == (10, 0, 0)
    a, _ = start(manager, range(12))
    b, num_hit = start(manager, [*range(8), *range(100, 104)])
    assert num_hit == 8
    assert counts([a, b]) == (6, 0, 4)
    manager.free(a)
    assert counts([b]) == (6, 1, 3)
    manager.free(b)
    assert counts([]) == (6, 4, 0)
    again, num_hit = start(manager, range(12))
    assert num_hit == 8
    # The last block of a block-aligned prompt is computed again, into a blank block.
    assert counts([again]) == (5, 2, 3)
    manager.free(again)
    assert counts([]) == (5, 5, 0)


def grow_all(manager: BlockManager, tables: list[BlockTable], slot: int) -> list[BlockCopy]:
    """One more slot for each; the copies that takes."""
    copies = []
    for table in tables:
        growth = manager.grow(table, slot, slot + 1)
        assert growth is not None
        copies += growth.copies
    return copies


@pytest.mark.parametrize(("prompt", "num_copies"), [(10, 3), (8, 0)])
def test_bm_06ab_copies_where_needed_and_only_there(prompt: int, num_copies: int) -> None:
    manager = BlockManager(10, 4)
    parent, _ = start(manager, range(prompt))
    tables = [parent, *(manager.fork(parent) for _ in range(3))]
    original = list(parent.blocks)
    assert manager.pool.num_used == len(original)
    assert {manager.pool.ref_count(block) for block in original} == {4}

    copies = grow_all(manager, tables, prompt)
    assert len(copies) == num_copies
    assert manager.pool.num_used == 6
    assert [manager.pool.ref_count(block) for block in original[:2]] == [4, 4]
    if num_copies:
        assert {copy.src for copy in copies} == {original[2]}
        assert [table.blocks[2] == original[2] for table in tables] == [False, False, False, True]
    # P + O - 1 slots: the last of the 6 outputs is never written.
    for slot in range(prompt + 1, prompt + 5):
        assert grow_all(manager, tables, slot) == []
        manager.check(tables)
    assert manager.pool.num_used == 2 + 4 * 2 == 10


def test_bm_06c_a_child_that_ends_returns_its_private_blocks_only() -> None:
    manager = BlockManager(10, 4)
    memory = Memory(4)
    prompt = list(range(10))
    parent, _ = start(manager, prompt)
    memory.write(parent.slot_mapping(0, 10, 4), kv_values(0, prompt))
    tables = [parent, *(manager.fork(parent) for _ in range(3))]
    outputs = [[50 + i, 60 + i, 70 + i] for i in range(4)]
    for k in range(3):
        for table, output in zip(tables, outputs, strict=True):
            growth = manager.grow(table, 10 + k, 11 + k)
            assert growth is not None
            memory.copy(growth.copies)
            memory.write(
                table.slot_mapping(10 + k, 11 + k, 4), kv_values(0, prompt + output)[10 + k :][:1]
            )
    free = manager.num_free
    gone = tables.pop(1)
    del outputs[1]
    private = [block for block in gone.blocks if manager.pool.ref_count(block) == 1]
    assert len(private) == 2
    manager.free(gone)
    assert manager.num_free == free + 2
    assert sorted(private) == sorted(manager.pool.free_ids()[:2])
    for table, output in zip(tables, outputs, strict=True):
        assert memory.read(table.slot_mapping(0, 13, 4)) == kv_values(0, prompt + output)
    for table in tables:
        manager.free(table)
    manager.check([])
    assert manager.num_free == 10


@pytest.mark.parametrize(("more", "new_blocks"), [(20, 1), (22, 1), (23, None)])
def test_bm_07_room_in_the_half_filled_block_counts(more: int, new_blocks: int | None) -> None:
    manager = BlockManager(3, 16)
    table = unknown_table(manager, 26)
    assert (len(table), manager.num_free) == (2, 1)
    before = state_of([manager, table])
    growth = manager.grow(table, 26, 26 + more)
    if new_blocks is None:
        assert growth is None
        assert manager.blocks_to_grow(table, 26, 26 + more) == 2
        assert state_of([manager, table]) == before
    else:
        assert isinstance(growth, Growth)
        assert (len(growth.new_blocks), growth.copies) == (new_blocks, [])
        assert len(table) == 3


def test_bm_07_half_filled_block_preempts_nobody() -> None:
    engine = Engine(make_scheduler(3, 16))
    engine.add("A", 26, 22, max_tokens=23)  # 48 slots, all there are
    engine.drain()
    assert engine.preemptions == []
    assert engine.reasons["A"] == "stop"


def test_bm_08_refusals_take_nothing() -> None:
    manager = BlockManager(4, 16)
    holder = unknown_table(manager, 32)
    asker = manager.new_table(None, 48)
    before = state_of([manager, holder, asker])
    for _ in range(1000):
        assert manager.admit(asker, [], 48) is None
        with pytest.raises(NoFreeBlocksError, match="3 blocks asked for, 2 are free"):
            manager.extend([asker], [3])
        with pytest.raises(NoFreeBlocksError):
            manager.pool.allocate(3)
        assert manager.num_free == 2
        assert asker.blocks == []
    assert state_of([manager, holder, asker]) == before


@pytest.mark.parametrize("num_cached", [0, 1, 2])
def test_bm_08_failure_half_way_rolls_back_and_names_the_drift(
    num_cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third pop fails although the count says that it fits: the count is one too high."""
    manager = BlockManager(4, 16)
    holder = unknown_table(manager, 32)
    for k in range(num_cached):
        others, _ = start(manager, range(100 * k, 100 * k + 16))
        manager.free(others)
    asker = manager.new_table(None, 48)
    before = state_of([manager, holder, asker])
    real = FreeQueue.__len__
    with monkeypatch.context() as patch:
        patch.setattr(FreeQueue, "__len__", lambda self: real(self) + 1)
        with pytest.raises(AssertionError, match=r"counter drift: it counts 3 blocks .* 2 of 3"):
            manager.admit(asker, [], 48)
    free = manager.pool.free_ids()
    assert (manager.num_free, asker.blocks) == (2, [])
    # Ids never used before may now wait as blank ones: the same blocks in the same order.
    manager.check([holder, asker])
    assert (len(cached_free(manager)), manager.pool.num_evictions) == (num_cached, 0)
    if num_cached == 2:
        assert state_of([manager, holder, asker]) == before
    assert manager.pool.allocate(2) == free


def test_bm_09_equal_prompts_in_one_step_and_their_duplicate() -> None:
    """The published answer is no hit in the first step. Here the second prompt hits what the same
    step computes, as the real scheduler does: docs/decisions/2026-11-29-hits-within-a-step.md."""
    engine = Engine(make_scheduler(8, 256, max_model_len=1024))
    prompt = text("p", 512)
    engine.add("A", prompt, 1)
    engine.add("B", prompt, 1)
    step = engine.step()
    assert step.cached == {"B": 256}
    assert step.granted == {"A": 512, "B": 256}
    assert 8 - step.num_free == 3  # one shared, and the last block of each
    cache = engine.scheduler.blocks.pool.cache
    assert len(cache) == 2
    assert engine.num_free == 8

    engine.add("C", [*prompt, 1], 1)
    step = engine.step()
    assert (step.cached, step.granted) == ({"C": 512}, {"C": 1})
    assert engine.num_free == 8


@pytest.mark.parametrize("first_to_go", ["A", "B"])
def test_bm_09_evicting_a_duplicate_leaves_the_survivor(first_to_go: str) -> None:
    manager = BlockManager(8, 256)
    prompt = text("p", 512)
    tables = {name: start(manager, prompt)[0] for name in ("A", "B")}
    served, duplicate = tables["A"].blocks[1], tables["B"].blocks[1]
    assert served != duplicate
    gone = tables.pop(first_to_go)
    manager.free(gone)
    # Five blank blocks, and then the one that nobody holds any more.
    pressure = unknown_table(manager, 6 * 256)
    assert gone.blocks == []
    assert manager.pool.num_evictions == 1
    (survivor,) = tables.values()
    manager.check([survivor, pressure])
    assert len(manager.pool.cache) == 2
    manager.free(pressure)
    c, num_hit = start(manager, [*prompt, 1])
    assert num_hit == 512
    assert c.blocks[1] == (duplicate if first_to_go == "A" else served)


def truncated_digest(data: bytes) -> bytes:
    return sha256(data)[:1]


def truncated_tokens(data: bytes) -> bytes:
    """Hashes the parent key and the lowest byte of each token id."""
    return sha256(data[:32] + data[32::8])


def constant(data: bytes) -> bytes:
    return b"k"


def outputs_of(prompts: list[list[int]], hash_function: HashFunction | None) -> list[list[int]]:
    """Greedy outputs of prompts served one after another; ``None`` = no prefix cache."""
    scheduler = Scheduler(
        SchedulerConfig(),
        BlockManager(
            400,
            4,
            enable_prefix_caching=hash_function is not None,
            hash_function=hash_function or sha256,
        ),
    )
    engine = Engine(scheduler)
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, 4)
        engine.drain()
    return [engine.outputs(str(i)) for i in range(len(prompts))]


COLLIDING = [[65, 65, 65, 65, 1], [321, 321, 321, 321, 1]]


def test_bm_10_no_false_hit() -> None:
    """Equal keys mean equal content because they are 256-bit digests of it, each chained to its
    parent: docs/decisions/2026-11-29-block-keys.md."""
    manager = BlockManager(10, 4)
    tables = []
    for prompt in COLLIDING:
        table, num_hit = start(manager, prompt)
        assert num_hit == 0
        tables.append(table)
    keys = [key for table in tables if table.keys for key in table.keys.keys]
    assert len(set(keys)) == 2
    assert {8 * len(key) for key in keys} == {256}
    assert start(manager, COLLIDING[0])[1] == 4  # a true hit is still one

    rng = np.random.default_rng(10)
    prompts = COLLIDING + rng.integers(0, 512, (100, 9)).tolist()
    assert outputs_of(prompts, sha256) == outputs_of(prompts, None)


@pytest.mark.parametrize(
    ("bad_hash", "prompts"),
    [
        (truncated_tokens, COLLIDING),
        (truncated_digest, np.random.default_rng(10).integers(0, 512, (100, 9)).tolist()),
        (constant, np.random.default_rng(10).integers(0, 512, (100, 5)).tolist()),
    ],
)
def test_bm_10_shorter_keys_would_be_noticed(
    bad_hash: Callable[[bytes], bytes], prompts: list[list[int]]
) -> None:
    with pytest.raises(AssertionError, match="reads something else"):
        outputs_of(prompts, bad_hash)


def test_bm_10_unchained_keys_would_be_noticed() -> None:
    def unchained(data: bytes) -> bytes:
        return hashlib.sha256(data[-32:]).digest()  # four tokens, not what stands before them

    prompts = [[1] * 4 + [2] * 5, [3] * 9, [3] * 4 + [2] * 5]
    with pytest.raises(AssertionError, match="reads something else"):
        outputs_of(prompts, unchained)
    assert outputs_of(prompts, sha256) == outputs_of(prompts, None)


def test_bm_14a_group_that_can_never_fit_is_refused_with_the_numbers() -> None:
    """Llama-2-7B: 512 KiB a token, so 10 GiB are 1,280 blocks of 16 tokens."""
    scheduler = make_scheduler(1280, 16)
    group = make_request("g", 400, 950, n=125)
    need = 25 + 125 * 60
    assert scheduler.blocks_at_peak(group, 950) == need == 7525
    assert need * 16 * (512 << 10) / 2**30 == pytest.approx(58.8, abs=0.05)
    reason = scheduler.refusal(group)
    assert reason is not None
    assert "7525" in reason
    assert "1280" in reason
    assert make_scheduler(7525, 16).refusal(group) is None
    assert make_scheduler(7524, 16).refusal(group) is not None


@pytest.mark.parametrize("known", [True, False])
def test_bm_14b_nobody_is_admitted_while_somebody_is_swapped_out(known: bool) -> None:
    scheduler = make_scheduler(12, 16, num_swap_blocks=8, preemption_mode="swap")
    engine = Engine(scheduler)
    for i in range(20):
        engine.add(f"r{i}", text(f"r{i}", 32) if known else 32, 64, max_tokens=64, n=2)
    assert scheduler.blocks_at_peak(make_request("x", 32, 64, n=2), 64) == 2 + 2 * 4
    host = scheduler.blocks.host_pool
    assert host is not None
    swapped_out = thrown_away = most = 0
    while scheduler.num_unfinished:
        waited = bool(scheduler.swapped)
        plan = engine.schedule()
        assert plan, "nothing runs although work is left"
        newcomers = [entry for entry in plan.admitted if not entry.swapped_in]
        if newcomers:
            assert not scheduler.swapped, "somebody swapped out still waits"
        if waited and newcomers:
            first = plan.admitted.index(newcomers[0])
            assert all(entry.swapped_in for entry in plan.admitted[:first])
        swapped_out += sum(entry.swapped_out for entry in plan.preempted)
        thrown_away += sum(not entry.swapped_out for entry in plan.preempted)
        assert host.num_used <= 8
        most = max(most, host.num_used)
        engine.finish_plan(plan)
        assert engine.num_steps < 5000
    assert swapped_out, "the case is about swapping"
    assert thrown_away, "and about what happens when swap is full"
    assert 0 < most <= 8
    assert set(engine.reasons) == {f"r{i}#{k}" for i in range(20) for k in range(2)}
    assert all(len(engine.outputs(seq_id)) == 64 for seq_id in engine.reasons)
    assert (engine.num_free, host.num_used) == (12, 0)


def test_bm_16_identity_keys_of_different_kinds_never_meet() -> None:
    manager = BlockManager(20, 4)
    hits = []
    for extra_keys in (
        ExtraKeys(lora="X"),
        ExtraKeys(salt="X"),
        ExtraKeys(),
        ExtraKeys(salt="X"),
        ExtraKeys(lora="X", salt="X"),
    ):
        table, num_hit = start(manager, range(8), extra_keys)
        manager.free(table)
        hits.append(num_hit)
    assert hits == [0, 0, 0, 4, 0]


def test_hit_on_a_block_that_its_writer_never_computes() -> None:
    """R is granted a chunk, A hits its block in the same step, then urgent B takes R's place: what
    A hit will never be written by R."""
    scheduler = make_scheduler(
        9,
        4,
        policy="priority-preemptive",
        max_num_seqs=2,
        max_num_batched_tokens=12,
        long_prefill_token_threshold=4,
    )
    engine = Engine(scheduler)
    shared = text("shared", 20)
    engine.add("R", shared, 2, priority=5)
    assert engine.step().granted == {"R": 12}
    engine.add("A", shared[:17], 2, priority=1)
    engine.add("B", text("B", 6), 2, priority=2)
    engine.drain()
    assert set(engine.reasons) == {"R", "A", "B"}


class LargestVictim(FCFS):
    """A policy as a user may write it: who holds most goes first, urgent ones displace others."""

    def victim(self, running: Sequence[Scheduled], requester: Scheduled) -> int:
        return max(range(len(running)), key=lambda i: len(running[i].block_ids))

    def displace(self, head: Scheduled, running: Sequence[Scheduled]) -> int | None:
        index = max(range(len(running)), key=lambda i: (running[i].priority, i))
        return index if running[index].priority > head.priority else None


def test_swap_in_does_not_overwrite_what_is_still_to_be_copied() -> None:
    """P copies block b, which C keeps; C is displaced in the same step and S is swapped into b."""
    scheduler = make_scheduler(
        5,
        4,
        policy=LargestVictim(),
        num_swap_blocks=4,
        preemption_mode="swap",
        max_num_batched_tokens=18,
        scheduler_reserve_full_isl=False,
        enable_prefix_caching=False,
    )
    engine = Engine(scheduler)
    engine.add("X", text("X", 4), 4, priority=6)
    engine.add("S", text("S", 10), 4, priority=1)
    engine.add("G", text("G", 6), 4, priority=5, n=2)
    assert engine.step().granted == {"X": 4, "S": 10, "G#0": 4}
    assert engine.step().preempted == ["S"]
    step = engine.step()
    assert (step.preempted, step.resumed, len(step.copies)) == (["X", "G#1"], ["S"], 1)
    assert step.copies[0][0] in engine.sequences["S"].block_ids
    engine.drain()
