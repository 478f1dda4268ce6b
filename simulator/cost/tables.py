"""A cost model as numbers for a compiled loop: what depends on one count as a table, the rest as rates.

Each term is rounded to whole ns as ``TermModel`` does it, so that the compiled loop arrives at the same
times, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.cost.models import LinearCost
from simulator.cost.physical import PhysicalCost
from simulator.cost.step import CostModel, StepWork, WindowWork

_OF_ATTENTION = ("attention_decode", "attention_prefill")
_OF_HEAD = ("lm_head", "sampling", "logits_gather")


class PriceTables(NamedTuple):
    """Step time = token_ns[tokens] + head_ns[sampled] + seq_ns[sequences] + attention + KV write.

    Attention and KV write are rounded sums of the rates below; times in ns, bytes and FLOPs per GPU.
    """

    token_ns: npt.NDArray[np.int64]
    head_ns: npt.NDArray[np.int64]
    seq_ns: npt.NDArray[np.int64]
    context_token_ns: int
    """For each token of context of anybody (linear model)."""
    windows: npt.NDArray[np.int64]
    window_rates: npt.NDArray[np.float64]
    """A row a window: decode_kv_ns, prefill_kv_ns, prefill_pair_ns, expand_ns, kv_bytes,
    decode_flops, pair_flops, expand_flops."""
    scalars: npt.NDArray[np.float64]
    """query_bytes, decode and prefill bytes/ns, KV bytes written a token, state bytes a sequence,
    elementwise bytes/ns; then for FLOPs and bytes: token_flops, head_flops, weight_bytes, token_bytes,
    head_weight_bytes, head_row_bytes."""
    expert_bytes: npt.NDArray[np.float64]
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
            context_token_ns=cost.per_context_token_ns,
            windows=np.array(cost.windows, np.int64),
            window_rates=np.zeros((len(cost.windows), 8)),
            scalars=np.zeros(12),
            expert_bytes=np.zeros(0),
            has_attention=False,
        )
    return _physical(cost, max_tokens, max_seqs) if type(cost) is PhysicalCost else None


def _physical(cost: PhysicalCost, max_tokens: int, max_seqs: int) -> PriceTables:
    nothing = tuple(WindowWork(0, 0, 0) for _ in cost.windows)

    def terms(tokens: int, seqs: int, sampled: int) -> dict[str, int]:
        work = StepWork(seqs, tokens, sampled, 0, 0, 0, nothing)
        return {name: round(float(term)) for name, term in cost.work_terms(work).items()}

    def column(size: int, value: Callable[[int], int]) -> npt.NDArray[np.int64]:
        return np.array([value(count) for count in range(size + 1)], np.int64)

    def of_tokens(count: int) -> int:
        apart = (*_OF_ATTENTION, *_OF_HEAD, "kv_write", "host")
        return sum(ns for name, ns in terms(count, 1, 0).items() if name not in apart)

    no_head = terms(1, 1, 0)["kernels"]

    def of_head(count: int) -> int:
        if not count:
            return 0
        found = terms(1, 1, count)
        return sum(found.get(name, 0) for name in _OF_HEAD) + found["kernels"] - no_head

    eff, bandwidth = cost.efficiencies, cost._bandwidth
    head, expert = cost._head, cost._expert
    rates = [
        [
            window.decode_kv_ns,
            window.prefill_kv_ns,
            window.prefill_pair_ns,
            window.expand_ns,
            window.kv_bytes,
            window.decode_flops,
            window.pair_flops,
            window.expand_flops,
        ]
        for window in cost._attention_costs
    ]
    touched = [
        expert.weight_bytes * cost._experts_touched(count) if expert else 0.0
        for count in range(max_tokens + 1 if expert else 0)
    ]
    return PriceTables(
        token_ns=column(max_tokens, of_tokens),
        head_ns=column(max_seqs, of_head),
        seq_ns=column(max_seqs, lambda count: terms(1, count, 0)["host"]),
        context_token_ns=0,
        windows=np.array(cost.windows, np.int64),
        window_rates=np.array(rates, np.float64),
        scalars=np.array(
            [
                cost._query_bytes,
                bandwidth * eff.decode_bandwidth,
                bandwidth * eff.prefill_bandwidth,
                cost.kv_write_bytes,
                cost._state_bytes,
                bandwidth * eff.elementwise_bandwidth,
                cost._token_flops,
                head.flops,
                cost._weight_bytes,
                cost._token_bytes,
                head.weight_bytes,
                head.row_bytes + cost._sampling_bytes,
            ],
            np.float64,
        ),
        expert_bytes=np.array(touched, np.float64),
        has_attention=True,
    )
