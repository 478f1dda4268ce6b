"""What a KV cache saves: work and time to generate S tokens with it and without.

With a cache, each token is computed once: its own linear layers, and attention over what is before
it, so that the work of a token is O(S). Without one, every output token computes the whole sequence
again: O(S) linear layers and O(S^2) attention for each. One request, nothing batched with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blockmanager.ledger import KVLayout
from blockmanager.ledger_gpu import weight_bytes
from catalog import GPU, ModelShape, count_parameters, num_active_parameters, peak_flops

COMPUTE_EFFICIENCY = 0.6
"""Share of the dense peak that matrix products reach; assumed."""
BANDWIDTH_EFFICIENCY = 0.8
"""Share of the peak memory bandwidth that reads reach; assumed."""

Tokens = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def _attended(end: Tokens, window: int) -> Floats:
    """Sum over positions 1..``end`` of the tokens each attends to: all before it, or a window."""
    n = end.astype(np.float64)
    if not window:
        return np.asarray(n * (n + 1) / 2, dtype=np.float64)
    inside = np.minimum(n, window)
    return np.asarray(inside * (inside + 1) / 2 + (n - inside) * window, dtype=np.float64)


def flops(shape: ModelShape, start: Tokens | int, end: Tokens | int, logits: int = 1) -> Floats:
    """FLOPs of one forward pass over positions ``start``..``end`` (those before are cached).

    2 per weight and token (of experts the chosen ones), 2 per weight of the LM head for each of
    ``logits`` rows, and 2 x heads x (K + V dimension) per layer and token attended to. MLA is
    counted in its expanded form; a recurrent layer's update of its state is left out.
    """
    first, last = np.asarray(start, dtype=np.int64), np.asarray(end, dtype=np.int64)
    head = shape.vocab_size * shape.hidden_size
    per_token = 2 * (num_active_parameters(shape) - head - count_parameters(shape).norms)
    total = (last - first) * float(per_token) + 2.0 * head * logits
    for layers in shape.attention:
        if layers.kind == "recurrent":
            continue
        k_dim = layers.head_dim + layers.rope_head_dim
        v_dim = layers.v_head_dim or layers.head_dim
        scale = 2.0 * layers.num_layers * layers.num_heads * (k_dim + v_dim)
        window = layers.window if layers.kind == "sliding" else 0
        total = total + scale * (_attended(last, window) - _attended(first, window))
    return np.asarray(total, dtype=np.float64)


class Saving(NamedTuple):
    """Generating ``num_tokens`` after a prompt, with a KV cache and without."""

    num_tokens: int
    flops_cached: float
    flops_uncached: float
    seconds_cached: float
    seconds_uncached: float
    last_token_flops_cached: float
    """Work of the last output token alone."""
    last_token_flops_uncached: float


def savings(
    shape: ModelShape,
    layout: KVLayout,
    gpu: GPU,
    *,
    prompt_tokens: int,
    output_tokens: Sequence[int],
    weight_dtype: str | None = None,
) -> tuple[Saving, ...]:
    """A ``Saving`` for each entry of ``output_tokens``.

    A pass takes the longer of its FLOPs at ``COMPUTE_EFFICIENCY`` x peak and its bytes at
    ``BANDWIDTH_EFFICIENCY`` x bandwidth (weights once, cached KV once), both split evenly over
    ``layout.tp`` GPUs without communication or host time.
    """
    dtype = weight_dtype or shape.native_dtype
    flops_rate = compute_rate(gpu, dtype) * COMPUTE_EFFICIENCY * layout.tp
    bandwidth = gpu.memory_bandwidth * BANDWIDTH_EFFICIENCY
    weights = weight_bytes(shape, dtype, layout.tp)
    routed = shape.num_experts_per_token / shape.num_experts if shape.num_experts else 1.0

    def seconds(work: Floats, new_tokens: Tokens, cached: Tokens) -> Floats:
        # Each token draws its own experts: T of them read at most T x k / E of the weights.
        experts = weights.experts * np.minimum(1.0, new_tokens * routed)
        read = weights.total - weights.experts + experts + _kv_bytes(layout, cached)
        return np.asarray(np.maximum(work / flops_rate, read / bandwidth), dtype=np.float64)

    result = []
    for count in output_tokens:
        ends = prompt_tokens + np.arange(count, dtype=np.int64)
        starts = np.concatenate(([0], ends[:-1]))
        cached = flops(shape, starts, ends)
        uncached = flops(shape, np.zeros_like(ends), ends)
        result.append(
            Saving(
                num_tokens=count,
                flops_cached=float(cached.sum()),
                flops_uncached=float(uncached.sum()),
                seconds_cached=float(seconds(cached, ends - starts, starts).sum()),
                seconds_uncached=float(seconds(uncached, ends, np.zeros_like(ends)).sum()),
                last_token_flops_cached=float(cached[-1]),
                last_token_flops_uncached=float(uncached[-1]),
            )
        )
    return tuple(result)


def compute_rate(gpu: GPU, weight_dtype: str) -> float:
    """Dense FLOP/s for weights of a dtype; 4-bit weights are multiplied in 16 bits."""
    dtype = "bf16" if weight_dtype in ("int4", "mxfp4") else weight_dtype
    return peak_flops(gpu, dtype).flops


def _kv_bytes(layout: KVLayout, tokens: Tokens) -> Floats:
    """KV of one request that a pass reads, on one GPU."""
    total = np.zeros(tokens.shape, dtype=np.float64)
    for group in layout.groups:
        held = np.minimum(tokens, group.window) if group.window else tokens
        total += held * float(group.bytes_per_token) + (tokens > 0) * float(group.state_bytes)
    return total
