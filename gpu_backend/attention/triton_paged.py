# mypy: disable-error-code="no-untyped-def,untyped-decorator,attr-defined,import-untyped"
# ruff: noqa: N803 (upper case: constants of the compilation)
"""Paged attention for CUDA in Triton: decode with the context split over programs, and prompt chunks.

Both kernels read the blocks in place through the block table, load one KV head's rows once for the
whole group of query heads that share it, and keep the softmax online in fp32 (FlashAttention-2; the
splits are FlashDecoding's). The grid depends only on shapes and on the longest context, never on
lengths that only the device knows, so a launch can be captured in a CUDA graph and replayed with other
lengths. With ``TRITON_INTERPRET=1`` set before the import the kernels run on CPU tensors.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl

from gpu_backend.attention.inputs import AttentionInputs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_LOG2_E = 1.4426950408889634
_LEAST_SPLIT = 256
"""Tokens below which a split costs more than it hides."""
_MOST_SPLITS = 128
_PROGRAMS_PER_SM = 6
"""Two rounds of the three that a multiprocessor of compute capability 9.0 holds (168 registers a
thread): fewer, and the last round leaves much of it idle."""
_RAGGED = 2
"""How many times its even share of the splits one long sequence of a batch may take."""


@triton.jit
def _load_tile(
    pool,
    scales,
    block_table,
    positions,
    live,
    dims,
    head,
    block_size,
    kv_heads,
    HEAD_DIM: tl.constexpr,
    SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Rows of one KV head at some positions, ``[positions, dims]`` in DTYPE, and their scales; 0 where
    not ``live`` (such a slot may hold NaN, and a weight of 0 would not remove that)."""
    block = tl.load(block_table + positions // block_size, mask=live, other=0).to(tl.int64)
    row = (block * block_size + positions % block_size) * kv_heads + head
    rows = tl.load(
        pool + row[:, None] * HEAD_DIM + dims[None, :],
        mask=live[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    ).to(DTYPE)
    scale = tl.load(scales + row, mask=live, other=0.0) if SCALED else 1.0
    return rows, scale


@triton.jit
def _absorb(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    block_table,
    positions,
    live,
    seen,
    dims,
    head,
    block_size,
    kv_heads,
    top,
    weight,
    total,
    qk_scale,
    HEAD_DIM: tl.constexpr,
    SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """One tile of the context into the online softmax: q ``[M, dims]``, seen ``[M, positions]``."""
    k, k_scale = _load_tile(
        keys, key_scales, block_table, positions, live, dims, head, block_size, kv_heads,
        HEAD_DIM, SCALED, DTYPE,
    )  # fmt: skip
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
    if SCALED:
        scores *= k_scale[None, :]
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet stays at -inf, and -inf - -inf is NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    weight = weight * shrink + tl.sum(p, 1)
    v, v_scale = _load_tile(
        values, value_scales, block_table, positions, live, dims, head, block_size, kv_heads,
        HEAD_DIM, SCALED, DTYPE,
    )  # fmt: skip
    if SCALED:
        p *= v_scale[None, :]
    total = total * shrink[:, None] + tl.dot(p.to(DTYPE), v, input_precision="ieee")
    return new_top, weight, total


@triton.jit(do_not_specialize=["num_sequences", "table_stride", "num_splits"])
def _decode_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    partial,
    partial_top,
    partial_weight,
    query_start,
    context_lens,
    block_tables,
    num_sequences,
    query_stride,
    table_stride,
    num_splits,
    target_programs,
    block_size,
    kv_heads,
    qk_scale,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    LEAST_SPLIT: tl.constexpr,
    SEQUENCES_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Program (sequence, KV head, split): part of the context for one query token's group of heads.

    Without ``num_splits`` > 1 the result goes to ``out [T, heads, head_dim]``, otherwise unnormalised
    to ``partial [S, heads, num_splits, head_dim]`` with maximum and weight ``[S, heads, num_splits]``;
    a split that has nothing leaves its maximum at -inf, and the rest unwritten.
    """
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start + sequence)
    if tl.load(query_start + sequence + 1) - token != 1:
        return
    context = tl.load(context_lens + sequence)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0) // TILE * TILE
    length = context - first

    # The work of the whole batch is cut into about target_programs pieces of one length, so a long
    # sequence among short ones gets the splits that they do not need.
    share = tl.cdiv(length, num_splits)
    if (num_splits > 1) & (length > LEAST_SPLIT):
        rows = tl.arange(0, SEQUENCES_PAD)
        lengths = tl.load(context_lens + rows, mask=rows < num_sequences, other=0)
        if WINDOW > 0:
            lengths = tl.minimum(lengths, WINDOW)
        work = tl.sum(lengths.to(tl.int64)) * kv_heads
        share = tl.maximum(share, tl.cdiv(work, target_programs).to(tl.int32))
    pieces = tl.maximum(tl.cdiv(length, tl.maximum(share, LEAST_SPLIT)), 1)
    share = tl.cdiv(tl.cdiv(length, pieces), TILE) * TILE
    begin = first + split * share
    end = tl.minimum(begin + share, context)

    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, HEAD_DIM_PAD)
    real = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_heads * GROUP
    row = head * GROUP + group
    part = (sequence.to(tl.int64) * heads + row) * num_splits + split
    if (split > 0) & (begin >= end):
        tl.store(
            partial_top + part, tl.full([GROUP_PAD], float("-inf"), tl.float32), mask=group < GROUP
        )
        return
    token_row = token.to(tl.int64) * heads + row
    asked = token.to(tl.int64) * query_stride + row * HEAD_DIM
    q = tl.load(query + asked[:, None] + dims[None, :], mask=real, other=0.0).to(DTYPE)

    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP_PAD], tl.float32)
    total = tl.zeros([GROUP_PAD, HEAD_DIM_PAD], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    for start in range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        live = positions < end
        if WINDOW > 0:
            live = live & (positions >= context - WINDOW)
        top, weight, total = _absorb(
            q, keys, values, key_scales, value_scales, table, positions, live, live[None, :], dims,
            head, block_size, kv_heads, top, weight, total, qk_scale,
            HEAD_DIM, SCALED, DTYPE,
        )  # fmt: skip
    if num_splits == 1:
        result = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
        tl.store(
            out + token_row[:, None] * HEAD_DIM + dims[None, :],
            result.to(out.dtype.element_ty),
            mask=real,
        )
    else:
        tl.store(partial_top + part, top, mask=group < GROUP)
        tl.store(partial_weight + part, weight, mask=group < GROUP)
        tl.store(partial + part[:, None] * HEAD_DIM + dims[None, :], total, mask=real)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    partial,
    partial_top,
    partial_weight,
    out,
    query_start,
    heads,
    num_splits,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    """Program (sequence, head): its splits into one row of ``out``."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start + sequence)
    if tl.load(query_start + sequence + 1) - token != 1:
        return
    splits = tl.arange(0, SPLITS_PAD)
    dims = tl.arange(0, HEAD_DIM_PAD)
    part = (sequence.to(tl.int64) * heads + head) * num_splits + splits
    there = splits < num_splits
    top = tl.load(partial_top + part, mask=there, other=float("-inf"))
    there = there & (top != float("-inf"))
    base = tl.max(top, 0)
    factor = tl.where(there, tl.exp2(top - tl.where(base == float("-inf"), 0.0, base)), 0.0)
    weight = tl.sum(tl.load(partial_weight + part, mask=there, other=0.0) * factor, 0)
    rows = tl.load(
        partial + part[:, None] * HEAD_DIM + dims[None, :],
        mask=there[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    result = tl.sum(rows * factor[:, None], 0) / tl.where(weight == 0.0, 1.0, weight)
    tl.store(
        out + (token.to(tl.int64) * heads + head) * HEAD_DIM + dims,
        result.to(out.dtype.element_ty),
        mask=dims < HEAD_DIM,
    )


@triton.jit(do_not_specialize=["num_sequences", "table_stride"])
def _chunk_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    query_start,
    context_lens,
    block_tables,
    num_sequences,
    query_stride,
    table_stride,
    block_size,
    kv_heads,
    qk_scale,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Program (TOKENS query tokens of one sequence, KV head); row r is head r % GROUP of token
    r // GROUP.

    Sequence s owns the programs from ``query_start[s] // TOKENS + s`` on: at least as many as it needs,
    and the grid's size follows from T and S alone.
    """
    program, head = tl.program_id(0), tl.program_id(1)
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TOKENS + middle <= program:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    begin = tl.load(query_start + sequence)
    num_queries = tl.load(query_start + sequence + 1) - begin
    offset = (program - begin // TOKENS - sequence) * TOKENS
    if (num_queries <= 1) | (offset >= num_queries):
        return
    context = tl.load(context_lens + sequence)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PAD)
    token = offset + rows // GROUP
    real_row = (rows < TOKENS * GROUP) & (token < num_queries)
    real = real_row[:, None] & (dims < HEAD_DIM)[None, :]
    row = (begin + token).to(tl.int64) * (kv_heads * GROUP) + head * GROUP + rows % GROUP
    asked = (begin + token).to(tl.int64) * query_stride + (head * GROUP + rows % GROUP) * HEAD_DIM
    q = tl.load(query + asked[:, None] + dims[None, :], mask=real, other=0.0).to(DTYPE)
    query_position = context - num_queries + token

    first_position = context - num_queries + offset
    end = tl.minimum(first_position + TOKENS, context)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, HEAD_DIM_PAD], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    for start in range(first, end, TILE):
        positions = start + tl.arange(0, TILE)
        live = positions < end
        seen = (positions[None, :] <= query_position[:, None]) & live[None, :]
        if WINDOW > 0:
            seen = seen & (positions[None, :] > query_position[:, None] - WINDOW)
        top, weight, total = _absorb(
            q, keys, values, key_scales, value_scales, table, positions, live, seen, dims,
            head, block_size, kv_heads, top, weight, total, qk_scale,
            HEAD_DIM, SCALED, DTYPE,
        )  # fmt: skip
    result = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    tl.store(
        out + row[:, None] * HEAD_DIM + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=real,
    )


class TritonAttention:
    """See ``PagedAttention``. Needs keys and values contiguous, and query heads side by side.

    Launches depend on shapes, ``max_query_len`` and ``max_context_len`` only: for a graph give the
    longest that a replay may have, and host lengths left empty.

    Parameters
    ----------
    num_sms
        Multiprocessors to spread the work over; ``None`` = those of the query's device.
    least_split
        Tokens of context that a split has at least.
    """

    def __init__(self, *, num_sms: int | None = None, least_split: int = _LEAST_SPLIT) -> None:
        self._num_sms = num_sms
        self._least_split = least_split
        self._scratch: torch.Tensor | None = None

    def reserve(self, num_sequences: int, heads: int, head_dim: int, device: torch.device) -> None:
        """Take the scratch for partial results now, for batches of up to ``num_sequences``; larger
        ones, and objects without it, take theirs from torch's allocator in each call."""
        size = num_sequences * heads * _MOST_SPLITS * (head_dim + 2)
        self._scratch = torch.empty(size, dtype=torch.float32, device=device)

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
        assert keys.is_contiguous(), "a layer of the pool, whole"
        assert values.is_contiguous(), "a layer of the pool, whole"
        heads, head_dim = query.shape[1:]
        if query.stride()[1:] != (head_dim, 1):
            query = query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        kv_heads = keys.shape[2]
        shared: dict[str, Any] = {
            "query": query,
            "keys": keys,
            "values": values,
            # Never read without SCALED, but a kernel's arguments keep their types.
            "key_scales": keys if key_scales is None else key_scales,
            "value_scales": values if value_scales is None else value_scales,
            "out": out,
            "query_start": inputs.query_start,
            "context_lens": inputs.context_lens,
            "block_tables": inputs.block_tables,
            "num_sequences": inputs.context_lens.shape[0],
            "query_stride": query.stride(0),
            "table_stride": inputs.block_tables.stride(0),
            "block_size": keys.shape[1],
            "kv_heads": kv_heads,
            "qk_scale": scale * _LOG2_E,
            "GROUP": heads // kv_heads,
            "HEAD_DIM": head_dim,
            "HEAD_DIM_PAD": triton.next_power_of_2(max(head_dim, 16)),
            "WINDOW": window or 0,
            "SCALED": key_scales is not None,
            # The interpreter computes products of bfloat16 wrongly.
            "DTYPE": tl.float32 if INTERPRETED else _TRITON_DTYPES[query.dtype],
        }
        if inputs.max_query_len > 1:
            self._chunks(shared)
        if inputs.max_query_len <= 1 or not inputs.query_lens_host or 1 in inputs.query_lens_host:
            self._decode(shared, inputs, window)
        return out

    def _chunks(self, shared: dict[str, Any]) -> None:
        query, group = shared["query"], shared["GROUP"]
        wide = query.element_size() > 2 or shared["HEAD_DIM_PAD"] > 128
        rows = max(triton.next_power_of_2(group), 16 if wide else 128)
        tokens = rows // group
        grid = (query.shape[0] // tokens + shared["num_sequences"], shared["kv_heads"])
        _chunk_kernel[grid](
            **shared,
            TOKENS=tokens,
            ROWS=rows,
            TILE=32 if wide else 64,
            num_warps=4 if wide else 8,
            num_stages=2,
        )

    def _decode(self, shared: dict[str, Any], inputs: AttentionInputs, window: int | None) -> None:
        query, out, kv_heads = shared["query"], shared["out"], shared["kv_heads"]
        num_sequences = len(inputs.context_lens)
        heads, head_dim = query.shape[1:]
        target = _PROGRAMS_PER_SM * self._multiprocessors(query.device)
        splits = self._num_splits(inputs, kv_heads, target, window)
        rows = num_sequences * heads * splits if splits > 1 else 0
        scratch = self._scratch
        if (
            scratch is None
            or scratch.device != query.device
            or scratch.numel() < rows * (head_dim + 2)
        ):
            scratch = query.new_empty(rows * (head_dim + 2), dtype=torch.float32)
        partial = scratch[: rows * head_dim]
        top, weight = scratch[rows * head_dim : rows * (head_dim + 2)].view(2, rows)
        wide = query.element_size() > 2 or shared["HEAD_DIM_PAD"] > 128
        _decode_kernel[(num_sequences, kv_heads, splits)](
            **shared,
            partial=partial,
            partial_top=top,
            partial_weight=weight,
            num_splits=splits,
            target_programs=target,
            GROUP_PAD=triton.next_power_of_2(
                max(shared["GROUP"], 16)
            ),  # tl.dot has at least 16 rows
            TILE=32 if wide else 64,
            LEAST_SPLIT=self._least_split,
            SEQUENCES_PAD=triton.next_power_of_2(num_sequences),
            num_warps=4,
            num_stages=3,
        )
        if splits > 1:
            _combine_kernel[(num_sequences, heads)](
                partial,
                top,
                weight,
                out,
                inputs.query_start,
                heads,
                splits,
                HEAD_DIM=head_dim,
                HEAD_DIM_PAD=shared["HEAD_DIM_PAD"],
                SPLITS_PAD=triton.next_power_of_2(splits),
            )

    def _num_splits(
        self, inputs: AttentionInputs, kv_heads: int, target: int, window: int | None
    ) -> int:
        """Most splits that a sequence may get; how many of them it uses the kernel decides by the
        lengths of the step."""

        def read(context: int) -> int:
            return context if window is None else min(context, window)

        num_sequences = len(inputs.context_lens)
        longest = read(inputs.max_context_len)
        if inputs.context_lens_host:
            work = sum(map(read, inputs.context_lens_host)) * kv_heads
            splits = -(-longest // max(self._least_split, -(-work // target)))
        else:
            even = -(-target // (num_sequences * kv_heads))
            splits = min(even * _RAGGED, -(-longest // self._least_split))
        return max(1, min(splits, _MOST_SPLITS))

    def _multiprocessors(self, device: torch.device) -> int:
        if self._num_sms is None:
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        return self._num_sms


_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
