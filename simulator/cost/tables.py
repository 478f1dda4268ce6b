"""A cost model as numbers for a compiled loop: what depends on one count as a table, the rest as rates.

Each term is rounded to whole ns as ``TermModel`` does it, so that the compiled loop arrives at the same
times, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.cost.models import LinearCost
from simulator.cost.physical import PhysicalCost
from simulator.cost.step import Amount, CostModel

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class PriceTables(NamedTuple):
    """Time on the GPU = token_ns[tokens] + head_ns[sampled] + seq_ns[sequences] + attention + KV write;
    the step lasts as long as that, or as the host takes (``PhysicalCost.host_terms``).

    Attention and KV write are rounded sums of the rates below; times in ns, bytes and FLOPs per GPU.
    """

    token_ns: IntArray
    head_ns: IntArray
    seq_ns: IntArray
    host_ns: IntArray
    host_hides: bool
    """Behind the GPU's time."""
    launch_ns: int
    """Of a step's kernels: it lasts at least as long."""
    context_token_ns: int
    """For each token of context of anybody (linear model)."""
    windows: IntArray
    group_windows: IntArray
    """Of each group of attention layers, the index of its window."""
    group_rates: FloatArray
    """A row a group: the fields of ``WindowCost``."""
    attention: FloatArray
    """Decode: ns a key of a walk, overlap, fixed ns of all layers; the same of prefill."""
    scalars: FloatArray
    """KV bytes written a token, state bytes a sequence, elementwise bytes/ns; then for FLOPs and bytes:
    token_flops, head_flops, weight_bytes, token_bytes, head_weight_bytes, head_row_bytes."""
    expert_bytes: FloatArray
    """Weights of the experts that a step of so many tokens touches; empty without experts."""
    has_attention: bool


def price_tables(cost: CostModel, max_tokens: int, max_seqs: int) -> PriceTables | None:
    """The tables of a model for steps of up to so many tokens and sequences; ``None`` where a
    model cannot be put like that."""
    if isinstance(cost, LinearCost):
        tokens = np.arange(max_tokens + 1, dtype=np.int64)
        seqs = np.arange(max_seqs + 1, dtype=np.int64)
        return PriceTables(
            token_ns=cost.base_ns + cost.per_token_ns * tokens,
            head_ns=np.zeros(max_seqs + 1, np.int64),
            seq_ns=cost.per_seq_ns * seqs,
            host_ns=np.zeros(max_seqs + 1, np.int64),
            host_hides=False,
            launch_ns=0,
            context_token_ns=cost.per_context_token_ns,
            windows=np.array(cost.windows, np.int64),
            group_windows=np.zeros(0, np.int64),
            group_rates=np.zeros((0, 15)),
            attention=np.zeros(6),
            scalars=np.zeros(9),
            expert_bytes=np.zeros(0),
            has_attention=False,
        )
    if type(cost) is not PhysicalCost or cost.pp > 1:
        return None
    return _physical(cost, max_tokens, max_seqs)


def _physical(cost: PhysicalCost, max_tokens: int, max_seqs: int) -> PriceTables:
    tokens = np.arange(1, max_tokens + 1, dtype=np.int64)
    seqs = np.arange(1, max_seqs + 1, dtype=np.int64)
    layers = sum(rates.num_layers for _, rates in cost.attention)
    decode, prefill, head = cost.factors.decode, cost.factors.prefill, cost.head
    return PriceTables(
        token_ns=_table(cost.token_terms(tokens), len(tokens)),
        head_ns=_table(cost.head_terms(seqs), len(seqs)),
        seq_ns=_table({"between_steps": cost.step_ns + seqs * cost.sequence_ns}, len(seqs)),
        host_ns=np.array([cost.host_ns(count) for count in range(max_seqs + 1)], np.int64),
        host_hides=cost.async_scheduling,
        launch_ns=cost.launch_ns,
        context_token_ns=0,
        windows=np.array(cost.windows, np.int64),
        group_windows=np.array([index for index, _ in cost.attention], np.int64),
        group_rates=np.array([rates for _, rates in cost.attention], np.float64).reshape(-1, 15),
        attention=np.array(
            [
                1e9 * decode.key_s,
                decode.overlap,
                layers * (1e9 * decode.fixed_s),
                1e9 * prefill.key_s,
                prefill.overlap,
                layers * cost.prefill_fixed_ns,
            ]
        ),
        scalars=np.array(
            [
                cost.kv_write_bytes,
                cost.state_bytes,
                cost.elementwise_rate,
                cost.token_flops,
                head.flops,
                cost.weight_bytes,
                cost.token_bytes,
                head.weight_bytes,
                head.row_bytes + cost.sampling_bytes,
            ],
            np.float64,
        ),
        expert_bytes=np.zeros(0)
        if cost.experts is None
        else cost.experts.weight_bytes
        * np.asarray(cost.experts_touched(np.arange(max_tokens + 1)), np.float64),
        has_attention=True,
    )


def _table(terms: dict[str, Amount], count: int) -> IntArray:
    """Their sum for 0 (nothing) and each of ``count`` values, every term rounded by itself."""
    table = np.zeros(count + 1, np.int64)
    for term in terms.values():
        table[1:] += np.rint(term).astype(np.int64)
    return table
