"""The KV memory that the block manager's ids stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import torch

from blockmanager.table import BlockCopy, BlockTransfer

KVDtype = Literal["auto", "fp8", "int8"]
"""``auto`` = the model's dtype."""

_QUANTISED: dict[str, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_MOST_AT_ONCE = 64
"""Blocks moved at a time: bounds the buffer that this takes."""


class KVCache:
    """Keys and values of all layers in blocks, on the device and (for swapping) in host memory.

    The pool is ``[layers, 2, num_blocks + 1, block_size, kv_heads, head_dim]``. Block 0 is the null
    block: writes that belong to nobody go there, and no table holds it. The scheduler hands out blocks
    1 to ``num_blocks``, and host blocks 1 to ``num_host_blocks``.

    A quantised pool has a float32 scale for each token and KV head (symmetric, of the largest absolute
    value): ``[layers, 2, num_blocks + 1, block_size, kv_heads]``.

    Raises ``ValueError`` for a size below 1 or an unknown ``kv_dtype``.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_dtype: KVDtype = "auto",
        num_host_blocks: int = 0,
    ) -> None:
        if kv_dtype not in get_args(KVDtype):
            raise ValueError(f"kv_dtype {kv_dtype!r} is not one of {', '.join(get_args(KVDtype))}")
        sizes = {
            "num_layers": num_layers,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} {size} is less than 1")
        if num_host_blocks < 0:
            raise ValueError(f"num_host_blocks {num_host_blocks} is less than 0")
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        self.dtype = _QUANTISED.get(kv_dtype, dtype)
        self.is_quantised = kv_dtype in _QUANTISED
        block = (block_size, num_kv_heads)
        self.pool = torch.zeros(
            (num_layers, 2, num_blocks + 1, *block, head_dim), dtype=self.dtype, device=self.device
        )
        self.scales = (
            torch.ones((num_layers, 2, num_blocks + 1, *block), device=self.device)
            if self.is_quantised
            else None
        )
        # A host block is one piece of memory, so that it moves in one copy. Pinned, or the copies
        # would wait for the device.
        pinned = self.device.type == "cuda" and num_host_blocks > 0
        host = (num_host_blocks + 1 if num_host_blocks else 0, num_layers, 2, *block)
        self._host_pool = torch.zeros((*host, head_dim), dtype=self.dtype, pin_memory=pinned)
        self._host_scales = torch.ones(host, pin_memory=pinned) if self.is_quantised else None
        # What every layer's write goes through: [slots, kv_heads * head_dim], bytes where torch cannot
        # index the type.
        self._raw = torch.uint8 if self.pool.element_size() == 1 else self.dtype
        self._rows = [
            tuple(half.view(self._raw).flatten(0, 1).flatten(1) for half in layer)
            for layer in self.pool
        ]

    def keys(self, layer: int) -> torch.Tensor:
        """``[num_blocks + 1, block_size, kv_heads, head_dim]``."""
        return self.pool[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """``[num_blocks + 1, block_size, kv_heads, head_dim]``."""
        return self.pool[layer, 1]

    def key_scales(self, layer: int) -> torch.Tensor | None:
        """``[num_blocks + 1, block_size, kv_heads]``, or ``None`` where nothing is quantised."""
        return None if self.scales is None else self.scales[layer, 0]

    def value_scales(self, layer: int) -> torch.Tensor | None:
        """``[num_blocks + 1, block_size, kv_heads]``, or ``None`` where nothing is quantised."""
        return None if self.scales is None else self.scales[layer, 1]

    @cached_property
    def arrays(self) -> list[tuple[Any, Any]]:
        """``keys`` and ``values`` of each layer for compiled loops: the same memory, bfloat16 as uint16."""
        from gpu_backend.attention.compiled import array_of

        return [(array_of(layer[0]), array_of(layer[1])) for layer in self.pool]

    @property
    def bytes_per_block(self) -> int:
        """Of one block in all layers, scales included."""
        return self.num_bytes // (self.num_blocks + 1)

    @property
    def num_bytes(self) -> int:
        """On the device, null block included."""
        return self.pool.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def num_host_bytes(self) -> int:
        return self._host_pool.nbytes + (
            0 if self._host_scales is None else self._host_scales.nbytes
        )

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Put ``key`` and ``value`` ``[T, kv_heads, head_dim]`` into the slots ``[T]`` (int64; -1 =
        nowhere). Does not wait for the device."""
        slots = slot_mapping.clamp_min(0)  # "nowhere" is slot 0, of the null block
        for half, given in enumerate((key, value)):
            rows = given.flatten(1)
            if self.scales is not None:
                quantised, scales = quantise(given, self.dtype)
                self.scales[layer, half].flatten(0, 1).index_copy_(0, slots, scales)
                rows = quantised.view(self._raw).flatten(1)
            self._rows[layer][half].index_copy_(0, slots, rows)

    def execute(
        self,
        swapped_out: Sequence[BlockTransfer],
        copies: Sequence[BlockCopy],
        swapped_in: Sequence[BlockTransfer],
    ) -> None:
        """What a plan asks for before its forward pass: out to host memory, copies, in from host
        memory, each list in its order, every layer. Does not wait for the device."""
        tensors = [(self.pool.view(self._raw), self._host_pool.view(self._raw))]
        if self.scales is not None and self._host_scales is not None:
            tensors.append((self.scales, self._host_scales))
        for pool, host in tensors:
            for batch in independent(swapped_out):
                blocks = pool.index_select(2, self._ids(batch, 0))
                blocks = blocks.movedim(2, 0).contiguous()
                for block, (_, dst) in zip(blocks, batch, strict=True):
                    host[dst].copy_(block, non_blocking=True)
            for batch in independent(copies, same_memory=True):
                blocks = pool.index_select(2, self._ids(batch, 0))
                pool.index_copy_(2, self._ids(batch, 1), blocks)
            for batch in independent(swapped_in):
                blocks = host.new_empty((len(batch), *host.shape[1:]), device=self.device)
                for block, (src, _) in zip(blocks, batch, strict=True):
                    block.copy_(host[src], non_blocking=True)
                pool.index_copy_(2, self._ids(batch, 1), blocks.movedim(0, 2))

    def _ids(self, batch: Sequence[tuple[int, int]], side: int) -> torch.Tensor:
        ids = torch.tensor([pair[side] for pair in batch])
        if self.device.type == "cuda":
            return ids.pin_memory().to(self.device, non_blocking=True)
        return ids


def independent(
    pairs: Sequence[tuple[int, int]], *, same_memory: bool = False
) -> Iterator[Sequence[tuple[int, int]]]:
    """Runs of (src, dst) that may be carried out at once, all reads first, and leave what one after
    the other leaves: no dst twice, and in the ``same_memory`` no src that is an earlier dst."""
    start = 0
    written: set[int] = set()
    for end, (src, dst) in enumerate(pairs):
        conflict = dst in written or (same_memory and src in written)
        if conflict or end - start == _MOST_AT_ONCE:
            yield pairs[start:end]
            start, written = end, set()
        written.add(dst)
    if start < len(pairs):
        yield pairs[start:]


class Quantised(NamedTuple):
    rows: torch.Tensor
    """``[..., head_dim]``, the pool's dtype."""
    scales: torch.Tensor
    """float32 ``[...]``: what the rows have to be multiplied by."""


def quantise(rows: torch.Tensor, dtype: torch.dtype) -> Quantised:
    """int8 or float8 of each row of ``rows [..., head_dim]``, its largest absolute value at the end of
    the range."""
    largest = _LARGEST[dtype]
    exact = rows.float()
    scales = exact.abs().amax(-1) / largest
    scales = scales.masked_fill(scales == 0, 1.0)
    ratio = (exact / scales[..., None]).clamp(-largest, largest)
    return Quantised((ratio.round() if dtype == torch.int8 else ratio).to(dtype), scales)
