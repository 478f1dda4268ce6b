"""Times of GPU kernels from FLOPs, bytes and a few factors of a GPU.

Every kernel is a blend of what it computes and what it moves, plus what it costs however little there is
to do. Factors are fitted on measured kernels (``simulator.cost.factors`` says on which); the forms are
physical, so that they carry over to shapes and GPUs that nobody measured.

Only + - x / and sqrt on doubles, in a fixed order: the same bits on every machine, for one step, for an
array of steps and in compiled code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

QUERY_TILE = 128
"""Queries that one block of threads of a prefill kernel takes."""


def blend(a: Any, b: Any, share: Any) -> Any:
    """The longer of two times that overlap, as far as ``share`` says they do not: the maximum at 0, the
    sum at 1, smooth in between.

    From x^2 - (a + b) x + (1 - share) a b = 0: at share 0 its roots are a and b, at 1 they are 0
    and a + b.
    """
    apart = a - b
    return 0.5 * (a + b + np.sqrt(apart * apart + 4.0 * share * a * b))


class GemmKernel(NamedTuple):
    """The kernel that a library takes for products of up to ``max_rows`` rows."""

    max_rows: int
    tile_rows: int
    tile_columns: int
    compute: float
    """Share of the peak that a multiprocessor reaches inside a tile."""
    tile_s: float
    """A tile's start and end, s."""
    bandwidth: float
    """Share of the peak bandwidth."""
    overlap: float
    """``share`` of ``blend``: how much of the shorter of compute and memory time shows."""
    fixed_s: float
    quantised: float
    """How far a last, partly filled wave of tiles counts as a full one: 0 not at all, 1 wholly."""


class GemmFactors(NamedTuple):
    """Products of one width of number on one GPU."""

    kernels: tuple[GemmKernel, ...]
    """By ``max_rows``, ascending; the last takes the rest."""
    least_wave: float
    """A product keeps at least this share of the multiprocessors busy (K is split)."""

    def time_ns(
        self,
        rows: Any,
        *,
        columns: float,
        depth: float,
        weight_bytes: float,
        activation_bytes: float,
        peak_flops: float,
        bandwidth: float,
        num_sms: int,
    ) -> Any:
        """``[rows, depth] x [depth, columns]``, ns; ``rows`` one number or an array of them.

        ``weight_bytes`` of the whole matrix and ``activation_bytes`` of one row in and out;
        FLOP/s and bytes/s of the datasheet.
        """
        if isinstance(rows, np.ndarray):
            several = [self._kernel_ns(k, rows, columns, depth, weight_bytes, activation_bytes,
                                       peak_flops, bandwidth, num_sms) for k in self.kernels]  # fmt: skip
            limits = [rows <= k.max_rows for k in self.kernels[:-1]]
            return np.select(limits, several[:-1], several[-1])
        kernel = next((k for k in self.kernels if rows <= k.max_rows), self.kernels[-1])
        return self._kernel_ns(kernel, rows, columns, depth, weight_bytes, activation_bytes,
                               peak_flops, bandwidth, num_sms)  # fmt: skip

    def _kernel_ns(
        self,
        kernel: GemmKernel,
        rows: Any,
        columns: float,
        depth: float,
        weight_bytes: float,
        activation_bytes: float,
        peak_flops: float,
        bandwidth: float,
        num_sms: int,
    ) -> Any:
        tiles = _ceil(rows / kernel.tile_rows) * _ceil(columns / kernel.tile_columns)
        waves = tiles / num_sms
        # The larger of two numbers, for arrays too.
        filled = np.maximum(waves, self.least_wave)
        waves = kernel.quantised * _ceil(waves) + (1.0 - kernel.quantised) * filled
        tile_flops = 2.0 * kernel.tile_rows * kernel.tile_columns * depth
        compute = waves * (tile_flops / (peak_flops / num_sms * kernel.compute) + kernel.tile_s)
        memory = (weight_bytes + rows * activation_bytes) / (bandwidth * kernel.bandwidth)
        return 1e9 * (kernel.fixed_s + blend(compute, memory, kernel.overlap))


def _ceil(value: Any) -> Any:
    return -(-value // 1.0)


class DecodeFactors(NamedTuple):
    """Attention of sequences with one query each."""

    bandwidth: float
    """Share of the peak."""
    compute: float
    fixed_s: float
    head_s: float
    """Of a multiprocessor for each KV head of each sequence, s."""
    key_s: float
    """Of the one walk over a context, for each key, s."""
    overlap: float


class PrefillFactors(NamedTuple):
    """Attention of sequences with several queries each."""

    bandwidth: float
    compute: float
    fixed_s: float
    tile_s: float
    """Of a multiprocessor for each tile of ``QUERY_TILE`` queries of one head, s."""
    key_s: float
    overlap: float
    triangle: float
    """What a pair of a query and a key of the same chunk takes, of what one with an earlier key does:
    above 1 where a kernel computes masked pairs too."""


def decode_attention(
    kv_tokens: Any,
    num_sequences: Any,
    kv_ns: Any,
    query_ns: Any,
    pair_ns: Any,
    head_ns: Any,
    key_ns: Any,
    overlap: Any,
) -> Any:
    """Time beyond the fixed one, ns, for ``num_sequences`` (above 0) that read ``kv_tokens`` together.

    ``blend`` is written out here and below, so that the functions can be compiled as they are.
    """
    memory = kv_tokens * kv_ns + num_sequences * query_ns
    compute = kv_tokens * pair_ns + kv_tokens / num_sequences * key_ns
    apart = memory - compute
    both = np.sqrt(apart * apart + 4.0 * overlap * memory * compute)
    return num_sequences * head_ns + 0.5 * (memory + compute + both)


def prefill_attention(
    kv_tokens: Any,
    num_pairs: Any,
    num_triangle: Any,
    num_tokens: Any,
    num_sequences: Any,
    kv_ns: Any,
    query_ns: Any,
    pair_ns: Any,
    triangle_ns: Any,
    tile_ns: Any,
    key_ns: Any,
    overlap: Any,
) -> Any:
    """Time beyond the fixed one, ns, of ``num_sequences`` (above 0) with ``num_tokens`` queries.

    ``num_pairs`` of a query and a key that it sees, of which ``num_triangle`` have a key of the
    same chunk and take ``triangle_ns`` more.
    """
    tiles = num_tokens / QUERY_TILE + 0.5 * num_sequences
    compute = num_pairs * pair_ns + num_triangle * triangle_ns
    walk = (kv_tokens - 0.5 * num_tokens) / num_sequences
    memory = kv_tokens * kv_ns + num_tokens * query_ns + walk * key_ns
    apart = compute - memory
    both = np.sqrt(apart * apart + 4.0 * overlap * compute * memory)
    return tiles * tile_ns + 0.5 * (compute + memory + both)


class ReduceFactors(NamedTuple):
    """All-reduce: the faster of a kernel over peer memory and of NCCL's ring."""

    peer_fixed_s: float
    peer_share: float
    """Of the link."""
    ring_fixed_s: float
    ring_share: float

    def time_s(self, num_bytes: float, num_gpus: int, link_bandwidth: float) -> float:
        """Of a tensor of ``num_bytes`` on each of ``num_gpus``; a GPU sends 2 (n - 1) / n of it."""
        sent = 2.0 * (num_gpus - 1) / num_gpus * num_bytes / link_bandwidth
        peer = self.peer_fixed_s + sent / self.peer_share
        ring = self.ring_fixed_s + sent / self.ring_share
        return peer if peer < ring else ring
