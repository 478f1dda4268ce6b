"""A memory that shows what was written, and slow obvious twins of what is tested."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from blockmanager import BlockCopy, BlockTransfer, ExtraKeys, Growth

EXTRA_KEYS = (ExtraKeys(), ExtraKeys(lora="X"), ExtraKeys(salt="X"), ExtraKeys(lora="X", salt="X"))


def kv_values(root: int, tokens: Iterable[int]) -> list[int]:
    """What a model would write for each token: it depends on every token before it, and on ``root``
    (adapter and salt), so that a block served behind another prefix reads back wrong."""
    values = []
    value = root
    for token in tokens:
        value = hash((value, token))  # of ints: the same in every process
        values.append(value)
    return values


def state_of(thing: object) -> Any:
    """Everything inside an object, as nested lists to compare; order counts in dicts too."""
    if isinstance(thing, (int, str, bytes, type(None))):
        return thing
    if isinstance(thing, Mapping):
        return [(state_of(key), state_of(value)) for key, value in thing.items()]
    if isinstance(thing, (list, tuple)):
        return [state_of(item) for item in thing]
    if callable(thing):
        return None
    names = list(getattr(thing, "__dict__", ()))
    for kind in type(thing).__mro__:
        names += getattr(kind, "__slots__", ())
    return [(name, state_of(getattr(thing, name))) for name in names]


class Memory:
    """GPU and host memory: a dict from slot to the value last written there."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.gpu: dict[int, int] = {}
        self.host: dict[int, int] = {}

    def _move(self, source: dict[int, int], src: int, target: dict[int, int], dst: int) -> None:
        for offset in range(self.block_size):
            value = source.get(src * self.block_size + offset)
            if value is None:
                target.pop(dst * self.block_size + offset, None)
            else:
                target[dst * self.block_size + offset] = value

    def swap_out(self, transfers: Iterable[BlockTransfer]) -> None:
        for src, dst in transfers:
            self._move(self.gpu, src, self.host, dst)

    def swap_in(self, transfers: Iterable[BlockTransfer]) -> None:
        for src, dst in transfers:
            self._move(self.host, src, self.gpu, dst)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        for src, dst in copies:
            self._move(self.gpu, src, self.gpu, dst)

    def write(self, slots: Iterable[int], values: Iterable[int]) -> None:
        self.gpu.update(zip(slots, values, strict=True))

    def read(self, slots: Iterable[int]) -> list[int | None]:
        return [self.gpu.get(slot) for slot in slots]

    def read_host(self, blocks: Sequence[int], num_tokens: int) -> list[int | None]:
        size = self.block_size
        return [self.host.get(blocks[p // size] * size + p % size) for p in range(num_tokens)]


# -- the plain twin of the block manager -----------------------------------------------------


class PlainPool:
    """The documented rules of a pool on plain lists; the head of ``free`` is taken first."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks + 1))
        self.refs = dict.fromkeys(self.free, 0)
        self.name_of: dict[int, Hashable] = {}
        """Content of each registered block, oldest registration first."""

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.refs[block] = 1
            self.name_of.pop(block, None)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        freed = []
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                freed.append(block)
        blank = [block for block in freed if block not in self.name_of]
        cached = [block for block in freed if block in self.name_of]
        self.free = blank + self.free + cached


class PlainTable:
    """``names()``: what each full block of known content holds, spelled out instead of hashed."""

    def __init__(self, names: Callable[[], list[Hashable]]) -> None:
        self.blocks: list[int] = []
        self.host_blocks: list[int] = []
        self.num_registered = 0
        self.names = names


class PlainManager:
    """What ``BlockManager`` should do, slowly; same method names, arguments and answers."""

    def __init__(
        self, num_blocks: int, block_size: int, watermark_blocks: int, num_swap_blocks: int
    ) -> None:
        self.block_size = block_size
        self.watermark_blocks = watermark_blocks
        self.pool = PlainPool(num_blocks)
        self.host_pool = PlainPool(num_swap_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def find_hit(self, table: PlainTable, num_tokens: int) -> list[int]:
        oldest: dict[Hashable, int] = {}
        for block, name in self.pool.name_of.items():
            oldest.setdefault(name, block)
        hit = []
        for name in table.names()[: (num_tokens - 1) // self.block_size]:
            if name not in oldest:
                break
            hit.append(oldest[name])
        return hit

    def fits(self, num_tokens: int, hit: list[int], *, use_watermark: bool) -> bool:
        left = [block for block in self.pool.free if block not in hit]
        watermark = self.watermark_blocks if use_watermark else 0
        return self.blocks_for(num_tokens) - len(hit) + watermark <= len(left)

    def admit(
        self, table: PlainTable, hit: list[int], num_tokens: int, *, use_watermark: bool
    ) -> list[int] | None:
        if not self.fits(num_tokens, hit, use_watermark=use_watermark):
            return None
        self.pool.hold(hit)
        new_blocks = self.pool.take(self.blocks_for(num_tokens) - len(hit))
        table.blocks = hit + new_blocks
        table.num_registered = len(hit)
        return new_blocks

    def grow(self, table: PlainTable, first_slot: int, num_slots: int) -> Growth | None:
        first = first_slot // self.block_size
        missing = max(0, self.blocks_for(num_slots) - len(table.blocks))
        shared = [i for i in range(first, len(table.blocks)) if self.pool.refs[table.blocks[i]] > 1]
        if missing + len(shared) > len(self.pool.free):
            return None
        copies = []
        for i, dst in zip(shared, self.pool.take(len(shared)), strict=True):
            copies.append(BlockCopy(table.blocks[i], dst))
            self.pool.release([table.blocks[i]])
            table.blocks[i] = dst
        new_blocks = self.pool.take(missing)
        table.blocks += new_blocks
        return Growth(new_blocks, copies)

    def register(self, table: PlainTable, num_tokens: int) -> None:
        names = table.names()[: num_tokens // self.block_size]
        for i in range(table.num_registered, len(names)):
            self.pool.name_of.setdefault(table.blocks[i], names[i])
            table.num_registered = i + 1

    def unregister(self, table: PlainTable, num_registered: int) -> None:
        while table.num_registered > num_registered:
            table.num_registered -= 1
            self.pool.name_of.pop(table.blocks[table.num_registered], None)

    def fork(self, table: PlainTable, child: PlainTable) -> None:
        child.blocks = list(table.blocks)
        child.num_registered = table.num_registered
        self.pool.hold(child.blocks)

    def free(self, table: PlainTable) -> None:
        self.pool.release(table.blocks[::-1])
        self.host_pool.release(table.host_blocks)
        table.blocks, table.host_blocks, table.num_registered = [], [], 0

    def swap_out(self, table: PlainTable) -> list[BlockTransfer] | None:
        if len(table.blocks) > len(self.host_pool.free):
            return None
        host_blocks = self.host_pool.take(len(table.blocks))
        transfers = [BlockTransfer(*pair) for pair in zip(table.blocks, host_blocks, strict=True)]
        self.free(table)
        table.host_blocks = host_blocks
        return transfers

    def swap_in(
        self, table: PlainTable, num_tokens: int, *, use_watermark: bool
    ) -> tuple[list[BlockTransfer], list[int]] | None:
        if not self.fits(num_tokens, [], use_watermark=use_watermark):
            return None
        blocks = self.pool.take(self.blocks_for(num_tokens))
        transfers = [BlockTransfer(*pair) for pair in zip(table.host_blocks, blocks, strict=False)]
        self.host_pool.release(table.host_blocks)
        table.blocks, table.host_blocks = blocks, []
        return transfers, blocks
