"""Decode attention over paged KV, compiled by numba for CPUs.

A decoding sequence asks one query of each head: too little work for a call into a library per
sequence and layer, and gathering its blocks first moves all of its KV once more. This loop reads the
blocks where they lie, every KV head's row once for the whole group of query heads, and needs one call
for the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import config, get_num_threads, njit, prange, set_num_threads, types
from numba.extending import overload, register_jitable

_TILE = 16
"""Tokens at a time: their rows stay in the first-level cache, and a vector register holds as many."""
_NO_WINDOW = 1 << 30
NO_SCALES = np.empty((0, 0, 0), np.float32)
_STORED_AS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
"""numpy has no such types: the loop gets their bits."""
_LOWEST = np.float32(-1e30)
LOG2_E = np.float32(math.log2(math.e))

# What one exponential may cost decides the speed, so it is written out. 2**x, x <= 0, is split at the
# nearest integer; the rest is a polynomial of degree 6 (Cephes exp2f, relative error below 2e-7).
_EXP2 = tuple(
    np.float32(c)
    for c in (
        1.535336188319500e-4,
        1.339887440266574e-3,
        9.618437357674640e-3,
        5.550332471162809e-2,
        2.402264791363012e-1,
        6.931472028550421e-1,
        1.0,
    )
)
_C6, _C5, _C4, _C3, _C2, _C1, _C0 = _EXP2

# "nnan" and "ninf" are left out: a NaN in live KV has to come out as NaN.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    arrays: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]],
    num_single: int,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """Fill the rows of ``out`` that belong to sequences with one query token; ``arrays`` are query_start,
    context_lens and block_tables, ``num_single`` is the number of those sequences."""
    decode_arrays(
        array_of(query),
        array_of(keys),
        array_of(values),
        NO_SCALES if key_scales is None else key_scales.numpy(),
        NO_SCALES if value_scales is None else value_scales.numpy(),
        arrays,
        num_single,
        use_torch_threads(),
        scale,
        window,
        array_of(out),
    )


def decode_arrays(
    query: Any,
    keys: Any,
    values: Any,
    key_scales: Any,
    value_scales: Any,
    arrays: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]],
    num_single: int,
    threads: int,
    scale: float,
    window: int | None,
    out: Any,
) -> None:
    """``decode`` for who has arrays at hand (``array_of``) and has asked ``use_torch_threads``."""
    heads, head_dim = query.shape[1:]
    kv_heads = keys.shape[2]
    # A block's heads lie side by side: one task reads them together where there are tasks enough.
    whole = threads == 1 or num_single >= 2 * threads
    decode_kernel(heads // kv_heads, head_dim)(
        query,
        keys,
        values,
        key_scales,
        value_scales,
        *arrays,
        np.float32(scale),
        _NO_WINDOW if window is None else window,
        kv_heads if whole else 1,
        np.float32(1),
        out,
    )


def use_torch_threads() -> int:
    """Make compiled loops use as many threads as torch does; returns their number."""
    threads = torch.get_num_threads()
    usable: int = min(threads, config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if get_num_threads() != usable:
        set_num_threads(usable)
    if torch.get_num_threads() != threads:
        # The first question to numba starts its threads, and sets OpenMP's number for torch too.
        torch.set_num_threads(threads)
    return usable


def array_of(tensor: torch.Tensor) -> Any:
    """A tensor's memory as an array."""
    stored = _STORED_AS.get(tensor.dtype)
    return (tensor if stored is None else tensor.view(stored)).numpy()


def widen(stored: Any) -> Any:
    """The float32 that is stored: float32 itself, the bits of a bfloat16 (uint16) or of a float8
    e4m3fn (uint8), or an int8."""
    raise NotImplementedError("compiled code only")


@overload(widen, strict=False)
def _widen_typed(stored: Any) -> Callable[[Any], Any] | None:
    if stored == types.uint16:
        return lambda stored: np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)
    if stored == types.uint8:
        # Sign, exponent and mantissa moved into place; 2**120 is the difference of the exponents'
        # biases. Subnormals come out right.
        return lambda stored: (
            np.uint32(
                (np.uint32(stored & np.uint8(0x80)) << np.uint32(24))
                | (np.uint32(stored & np.uint8(0x7F)) << np.uint32(20))
            ).view(np.float32)
            * np.float32(2.0**120)
        )
    if stored in (types.int8, types.float32):
        return lambda stored: np.float32(stored)
    return None


def narrow(value: Any, like: Any) -> Any:
    """``value`` (float32) as it is stored in an array whose elements are like ``like``."""
    raise NotImplementedError("compiled code only")


@overload(narrow, strict=False)
def _narrow_typed(value: Any, like: Any) -> Callable[[Any, Any], Any] | None:
    if like == types.float32:
        return lambda value, like: value
    if like == types.uint16:

        def to_bfloat16(value: Any, like: Any) -> Any:
            if value != value:
                return np.uint16(0x7FC0)
            bits = np.uint32(np.float32(value).view(np.uint32))
            rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            return np.uint16(np.uint32(rounded) >> np.uint32(16))

        return to_bfloat16
    return None


@register_jitable(inline="always")
def exp2(x: Any) -> Any:
    """2**x of a float32, x <= 0; below the normal numbers 2**-126."""
    x = np.float32(-126) if x < np.float32(-126) else x
    whole = np.int32(x - np.float32(0.5))
    f = x - np.float32(whole)
    p = ((_C6 * f + _C5) * f + _C4) * f + _C3
    p = ((p * f + _C2) * f + _C1) * f + _C0
    return p * np.int32((whole + np.int32(127)) << np.int32(23)).view(np.float32)


@cache
def decode_kernel(group: int, head_dim: int) -> Any:
    """``attend`` for models with ``group`` query heads a KV head: lengths that are constants become
    straight vector code."""

    def attend(
        query: Any,
        keys: Any,
        values: Any,
        key_scales: Any,
        value_scales: Any,
        query_start: Any,
        context_lens: Any,
        block_tables: Any,
        scale: Any,
        window: int,
        heads_per_task: int,
        one: Any,
        out: Any,
    ) -> None:
        """Attention of the sequences with one query token; rows of others in ``out`` stay as they are.

        Shapes as in ``PagedAttention``; bfloat16 comes as uint16, float8 as uint8; scales of size 0
        mean none; ``window`` at least 1; ``one`` is 1.0 (a product keeps LLVM from making a call to
        memcpy out of the copy of each row, which is slower).
        """
        num_sequences = context_lens.shape[0]
        block_size = keys.shape[1]
        tasks_per_sequence = keys.shape[2] // heads_per_task
        scaled = key_scales.size > 0
        for task in prange(num_sequences * tasks_per_sequence):
            sequence = task // tasks_per_sequence
            token = query_start[sequence]
            if query_start[sequence + 1] - token != 1:
                continue
            head = (task % tasks_per_sequence) * heads_per_task
            context = context_lens[sequence]
            q = np.empty((heads_per_task, group, head_dim), np.float32)
            for h in range(heads_per_task):
                for g in range(group):
                    for d in range(head_dim):
                        q[h, g, d] = widen(query[token, (head + h) * group + g, d]) * scale
            rows = np.zeros((heads_per_task, _TILE, head_dim), np.float32)
            scores = np.empty((heads_per_task, group, _TILE), np.float32)
            half = np.empty(_TILE // 2, np.float32)
            total = np.zeros((heads_per_task, group, head_dim), np.float32)
            weight = np.zeros((heads_per_task, group), np.float32)
            highest = np.full((heads_per_task, group), _LOWEST, np.float32)
            for start in range(max(0, context - window), context, _TILE):
                count = min(_TILE, context - start)
                if count < _TILE:
                    rows[:] = 0  # a tile is always computed whole
                for t in range(count):
                    block = block_tables[sequence, (start + t) // block_size]
                    slot = (start + t) % block_size
                    for h in range(heads_per_task):
                        factor = key_scales[block, slot, head + h] if scaled else one
                        for d in range(head_dim):
                            rows[h, t, d] = widen(keys[block, slot, head + h, d]) * factor
                for h in range(heads_per_task):
                    for g in range(group):
                        for quarter in range(_TILE // 4):
                            t = quarter * 4
                            s0 = s1 = s2 = s3 = np.float32(0)
                            for d in range(head_dim):
                                x = q[h, g, d]
                                s0 += rows[h, t, d] * x
                                s1 += rows[h, t + 1, d] * x
                                s2 += rows[h, t + 2, d] * x
                                s3 += rows[h, t + 3, d] * x
                            scores[h, g, t] = s0
                            scores[h, g, t + 1] = s1
                            scores[h, g, t + 2] = s2
                            scores[h, g, t + 3] = s3
                        for t in range(count, _TILE):
                            scores[h, g, t] = _LOWEST
                for t in range(count):
                    block = block_tables[sequence, (start + t) // block_size]
                    slot = (start + t) % block_size
                    for h in range(heads_per_task):
                        factor = value_scales[block, slot, head + h] if scaled else one
                        for d in range(head_dim):
                            rows[h, t, d] = widen(values[block, slot, head + h, d]) * factor
                for h in range(heads_per_task):
                    for g in range(group):
                        for t in range(_TILE // 2):
                            a, b = scores[h, g, t], scores[h, g, t + _TILE // 2]
                            half[t] = a if a > b else b
                        top = highest[h, g]
                        for t in range(_TILE // 2):
                            top = half[t] if half[t] > top else top
                        if top > highest[h, g]:
                            shrink = np.float32(math.exp(highest[h, g] - top))
                            weight[h, g] *= shrink
                            for d in range(head_dim):
                                total[h, g, d] *= shrink
                            highest[h, g] = top
                        added = np.float32(0)
                        for t in range(_TILE):
                            p = exp2((scores[h, g, t] - top) * LOG2_E)
                            scores[h, g, t] = p
                            added += p
                        weight[h, g] += added
                        for eighth in range(_TILE // 8):
                            t = eighth * 8
                            p0, p1 = scores[h, g, t], scores[h, g, t + 1]
                            p2, p3 = scores[h, g, t + 2], scores[h, g, t + 3]
                            p4, p5 = scores[h, g, t + 4], scores[h, g, t + 5]
                            p6, p7 = scores[h, g, t + 6], scores[h, g, t + 7]
                            for d in range(head_dim):
                                total[h, g, d] += (
                                    p0 * rows[h, t, d]
                                    + p1 * rows[h, t + 1, d]
                                    + p2 * rows[h, t + 2, d]
                                    + p3 * rows[h, t + 3, d]
                                    + p4 * rows[h, t + 4, d]
                                    + p5 * rows[h, t + 5, d]
                                    + p6 * rows[h, t + 6, d]
                                    + p7 * rows[h, t + 7, d]
                                )
            for h in range(heads_per_task):
                for g in range(group):
                    share = np.float32(1) / weight[h, g] if context > 0 else np.float32(0)
                    for d in range(head_dim):
                        row = (head + h) * group + g
                        out[token, row, d] = narrow(total[h, g, d] * share, out[token, row, d])

    return compiled(attend)


def compiled(function: Callable[..., Any], *, parallel: bool = True) -> Any:
    """Compile at the first call, and keep the result on disk where there is a place for it."""
    options: dict[str, Any] = {
        "parallel": parallel,
        "nogil": True,
        "error_model": "numpy",
        "fastmath": _FASTMATH,
    }
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither beside the module nor in the user's cache may be written
        return njit(**options)(function)
