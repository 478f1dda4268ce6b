"""Block manager operations, per block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.measure import cpu_seconds
from blockmanager import BlockManager, BlockPool, TokenContent

BLOCKS = 20_000


def block_operations(runs: int) -> Iterator[dict[str, Any]]:
    pool = BlockPool(2 * BLOCKS)

    def single() -> None:
        taken = [pool.allocate(1)[0] for _ in range(BLOCKS)]
        for block in taken:
            pool.release([block])

    def bulk() -> None:
        pool.release(pool.allocate(BLOCKS))

    manager = BlockManager(2 * BLOCKS, 16)
    content = TokenContent(np.arange(16 * BLOCKS, dtype=np.int64))

    def prefix() -> None:
        table = manager.new_table(content, 16 * BLOCKS)
        hit = manager.find_hit(table, 16 * BLOCKS)
        manager.admit(table, hit, 16 * BLOCKS)
        manager.register(table, 16 * BLOCKS)
        manager.free(table)

    cases: tuple[tuple[str, Callable[[], None]], ...] = (
        ("allocate and free, one at a time", single),
        ("allocate and free, 20,000 at once", bulk),
        ("hash, look up (hit), hold, free: a prompt of 20,000 blocks", prefix),
    )
    for name, work in cases:
        spread = cpu_seconds(work, runs)
        yield spread.each(name, "ns/block", 1e9 / BLOCKS)
