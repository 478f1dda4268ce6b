"""The same model without a KV cache, to compare with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scheduler.features import StepFeatures
from simulator.cost.physical import PhysicalCost
from simulator.cost.step import Amount, RunPrice, StepPrice, StepWork, TermModel


class NoCacheCost(TermModel):
    """The same model without a KV cache: every step computes each sequence's whole context.

    Copies and swaps, which belong to a cache, cost nothing; K and V are read where they were just
    computed, and written nowhere. For comparison with ``physical``.
    """

    def __init__(self, physical: PhysicalCost) -> None:
        self.physical = physical
        self.windows = physical.windows

    def price(self, step: StepFeatures) -> StepPrice:
        """Price one step, in which every sequence was granted at least one token."""
        return super().price(_recomputed(step))

    def terms(self, step: StepFeatures) -> dict[str, int]:
        """The same step, term by term, in whole ns that add up to ``duration_ns`` exactly."""
        return super().terms(_recomputed(step))

    def price_steps(self, step: StepFeatures, num_steps: int) -> RunPrice:
        """Price ``num_steps`` decode steps; in each, every context is one token longer.

        One by one: without a cache, no two steps of a run compute the same number of tokens.
        """
        assert num_steps >= 1, f"a run has at least one step, not {num_steps}"
        assert step.granted.max() == 1, "only steps of decodes are priced as a run"
        prices = [
            self.price(replace(step, computed_before=step.computed_before + later))
            for later in range(num_steps)
        ]
        duration_ns, flops, num_bytes = zip(*prices, strict=True)
        return RunPrice(np.array(duration_ns), np.array(flops), np.array(num_bytes))

    def work_terms(self, work: StepWork) -> dict[str, Amount]:
        """Time of each term, ns; ``work`` is that of the whole contexts."""
        terms = self.physical.work_terms(work)
        del terms["kv_write"]
        return terms

    def work_flops_bytes(self, work: StepWork) -> tuple[Amount, Amount]:
        """Useful FLOPs and bytes through memory, per GPU; ``work`` is that of whole contexts."""
        flops, num_bytes = self.physical.work_flops_bytes(work)
        return flops, num_bytes - work.num_tokens * self.physical.kv_write_bytes

    def describe(self) -> list[str]:
        """Lines for the report: what is assumed, and what is not modelled."""
        return [
            "no KV cache: every step recomputes the whole context of every sequence; only the times "
            "are those of such an engine, requests are scheduled and blocks counted as with a cache",
            *self.physical.describe(),
        ]


def _recomputed(step: StepFeatures) -> StepFeatures:
    assert step.granted.min() >= 1, "a step computes at least one token of every sequence in it"
    return StepFeatures(
        granted=step.computed_before + step.granted,
        computed_before=np.zeros_like(step.computed_before),
        sampled=step.sampled,
        is_decode=np.zeros_like(step.is_decode),
    )
