"""Paged attention on CPUs.

Two kinds of sequence, two ways. One query token (decode): all such sequences in one call of a compiled
loop that reads the blocks in place (``compiled.py``). A chunk of a prompt: its blocks are gathered by
``index_select`` into scratch that every layer reuses, and ``scaled_dot_product_attention`` does the
rest; the copy is small beside the products.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_backend.attention.inputs import AttentionInputs

_COMPILED_QUERIES = (torch.float32, torch.bfloat16)
_COMPILED_POOLS = (*_COMPILED_QUERIES, torch.int8, torch.float8_e4m3fn)
LEAST_HEAD_DIM = 64
"""Models with smaller heads are toys, not worth the seconds that compiling for their shape takes."""
_KEPT_MASKS = 1 << 24
"""Elements of a step's masks up to which they are kept for its other layers."""
_MOST_QUERIES = 512
"""Query tokens of a sequence at a time where a mask is needed: bounds the size of the mask."""


class CpuAttention:
    """See ``PagedAttention``. An object keeps scratch, so it serves one step at a time.

    ``compiled=False``, or numba not there: torch does the decoding sequences too, one by one.
    """

    def __init__(self, *, compiled: bool = True) -> None:
        self._decode: Callable[..., None] | None = None
        if compiled and importlib.util.find_spec("numba") is not None:
            from gpu_backend.attention.compiled import decode

            self._decode = decode
        self._step: _Step | None = None
        self._scratch: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def is_compiled(self) -> bool:
        """Whether there is a compiled loop for decoding sequences."""
        return self._decode is not None

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        inputs: AttentionInputs,
        *,
        scale: float,
        window: int | None = None,
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._step is None or self._step.inputs is not inputs:
            self._step = _Step(inputs, keys.shape[1])
        step = self._step
        query = query.contiguous()
        out = torch.empty_like(query)
        rows = step.rows
        if (
            self._decode is not None
            and step.num_single > 0
            and query.shape[2] >= LEAST_HEAD_DIM
            and query.dtype in _COMPILED_QUERIES
            and keys.dtype in _COMPILED_POOLS
        ):
            pool = keys, values, key_scales, value_scales
            self._decode(query, *pool, step.arrays, step.num_single, scale, window, out)
            rows = step.rows_of_several
        for row in rows:
            tokens = slice(step.starts[row], step.starts[row + 1])
            if step.lens[row][1] == 0:
                out[tokens] = 0
                continue
            k, v = self._gather(keys, values, key_scales, value_scales, step, row, query.dtype)
            out[tokens] = _attend(query[tokens], k, v, step, scale, window)
        return out

    def _gather(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_scales: torch.Tensor | None,
        value_scales: torch.Tensor | None,
        step: _Step,
        row: int,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a sequence as ``[context, kv_heads, head_dim]``, good until the next."""
        blocks, context = step.blocks(row), step.lens[row][1]
        key_rows, value_rows = self._rows(keys, len(blocks))
        torch.index_select(keys, 0, blocks, out=key_rows)
        torch.index_select(values, 0, blocks, out=value_rows)
        # Slots of the last block beyond the context are cut off here: nothing of them is ever read.
        k, v = key_rows.flatten(0, 1)[:context], value_rows.flatten(0, 1)[:context]
        if key_scales is None or value_scales is None:
            return k, v
        return (
            _dequantise(k, key_scales[blocks].flatten(0, 1)[:context], dtype),
            _dequantise(v, value_scales[blocks].flatten(0, 1)[:context], dtype),
        )

    def _rows(self, pool: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scratch for some blocks of keys and of values; grows to the longest sequence seen."""
        shape = (num_blocks, *pool.shape[1:])
        needed = num_blocks * pool[0].numel()
        held = self._scratch.get(pool.dtype)
        if held is None or held[0].numel() < needed:
            with torch.inference_mode(False):  # it may serve calls inside that mode and outside
                held = (
                    torch.empty(needed, dtype=pool.dtype),
                    torch.empty(needed, dtype=pool.dtype),
                )
            self._scratch[pool.dtype] = held
        return held[0][:needed].view(shape), held[1][:needed].view(shape)


class _Step:
    """What every layer of a step needs in the same form: made once a step."""

    def __init__(self, inputs: AttentionInputs, block_size: int) -> None:
        self.inputs = inputs
        query_lens, context_lens = inputs.query_lens_host, inputs.context_lens_host
        if not query_lens:
            query_lens = tuple(inputs.query_start.diff().tolist())
            context_lens = tuple(inputs.context_lens.tolist())
        self.lens = list(zip(query_lens, context_lens, strict=True))
        self.starts: list[int] = inputs.query_start.tolist()
        self.num_single = query_lens.count(1)
        self.rows = [row for row, count in enumerate(query_lens) if count > 0]
        self.rows_of_several = [row for row in self.rows if query_lens[row] > 1]
        self.arrays = (
            inputs.query_start.numpy(),
            inputs.context_lens.numpy(),
            inputs.block_tables.contiguous().numpy(),
        )
        self._block_size = block_size
        self._blocks: dict[int, torch.Tensor] = {}
        self._masks: dict[tuple[int, int, int, int | None, torch.dtype], torch.Tensor] = {}
        self._room = _KEPT_MASKS

    def blocks(self, row: int) -> torch.Tensor:
        """int64 ids of a sequence's blocks, those beyond its context left out."""
        if row not in self._blocks:
            count = -(-self.lens[row][1] // self._block_size)
            self._blocks[row] = self.inputs.block_tables[row, :count].long()
        return self._blocks[row]

    def mask(
        self, num_queries: int, first: int, low: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """What queries at positions from ``first`` on see of the positions from ``low`` to the last
        query's: 0 or -inf, ``[num_queries, positions]``."""
        key = (num_queries, first, low, window, dtype)
        if key in self._masks:
            return self._masks[key]
        position = torch.arange(first, first + num_queries)[:, None]
        other = torch.arange(low, first + num_queries)
        hidden = other > position
        if window is not None:
            hidden |= other <= position - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        if mask.numel() <= self._room:
            self._masks[key] = mask
            self._room -= mask.numel()
        return mask


def _attend(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: _Step,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of one sequence: ``query [q, heads, head_dim]``, k and v of its whole context
    ``[context, kv_heads, head_dim]``."""
    # Four dimensions, always: with three, torch 2.13 leaves its fast kernel for plain products.
    num_queries, heads, head_dim = query.shape
    context, kv_heads = k.shape[:2]
    if num_queries == 1:
        low = 0 if window is None else max(0, context - window)
        # The heads that share a KV head become its queries: its rows are read once, not per head.
        folded = query.view(1, kv_heads, heads // kv_heads, head_dim)
        return scaled_dot_product_attention(
            folded, _by_head(k[low:]), _by_head(v[low:]), scale=scale
        ).view(1, heads, head_dim)
    if num_queries == context and (window is None or window >= context):
        return scaled_dot_product_attention(
            *(_by_head(query), _by_head(k), _by_head(v)),
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
    pieces = []
    for begin in range(0, num_queries, _MOST_QUERIES):
        piece = query[begin : begin + _MOST_QUERIES]
        first = context - num_queries + begin
        seen = slice(0 if window is None else max(0, first - window + 1), first + len(piece))
        pieces.append(
            scaled_dot_product_attention(
                *(_by_head(piece), _by_head(k[seen]), _by_head(v[seen])),
                attn_mask=step.mask(len(piece), first, seen.start, window, query.dtype),
                scale=scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        )
    return torch.cat(pieces)


def _by_head(rows: torch.Tensor) -> torch.Tensor:
    """``[tokens, heads, head_dim]`` as ``[1, heads, tokens, head_dim]``, without a copy."""
    return rows.transpose(0, 1)[None]


def _dequantise(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (rows.float() * scales[..., None]).to(dtype)
