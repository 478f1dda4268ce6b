"""What every cost model shares: its protocol, a step reduced to sums, and terms made a price."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from scheduler.features import StepFeatures

Count: TypeAlias = int | npt.NDArray[np.int64]
"""A whole number of one step, or one entry a step of a run."""
Amount: TypeAlias = int | float | npt.NDArray[Any]
"""The same of times, FLOPs or bytes."""

FULL = 1 << 31
"""The window of layers that see the whole context."""


class StepPrice(NamedTuple):
    """What one step costs."""

    duration_ns: int
    """Always above 0."""
    flops: float
    """Useful floating-point operations, per GPU (0 where the model does not know)."""
    bytes: float
    """Bytes moved through GPU memory, per GPU (0 where the model does not know)."""


class RunPrice(NamedTuple):
    """What each of a run of steps costs; entry i equals the price of step i alone, bit for bit."""

    duration_ns: npt.NDArray[np.int64]
    flops: npt.NDArray[np.float64]
    bytes: npt.NDArray[np.float64]

    @classmethod
    def of(cls, price: StepPrice) -> RunPrice:
        """A run of one step."""
        return cls(np.array([price.duration_ns]), np.array([price.flops]), np.array([price.bytes]))

    @property
    def first(self) -> StepPrice:
        return StepPrice(int(self.duration_ns[0]), float(self.flops[0]), float(self.bytes[0]))


class CostModel(Protocol):
    """How long a step takes, from its features alone."""

    def price(self, step: StepFeatures) -> StepPrice:
        """Price one step, in which every sequence was granted at least one token."""
        ...

    def terms(self, step: StepFeatures) -> dict[str, int]:
        """The same step, term by term, in whole ns that add up to ``duration_ns`` exactly."""
        ...

    def price_steps(self, step: StepFeatures, num_steps: int) -> RunPrice:
        """Price ``num_steps`` decode steps; in each, every context is one token longer.

        ``step`` is the first: one token granted to every sequence.
        """
        ...

    def describe(self) -> list[str]:
        """Lines for the report: what is assumed, and what is not modelled."""
        ...


class WindowWork(NamedTuple):
    """Attention of a step through one window, summed over its sequences."""

    decode_kv: Count
    """Tokens of K and V read for sequences with one query; as many query-key pairs."""
    prefill_kv: int
    """Tokens of K and V read for sequences with several queries, each read once."""
    prefill_pairs: int
    """Query-key pairs of those, causal: query t of the context sees min(t, window) keys."""


class StepWork(NamedTuple):
    """A step as sums: all that prices are made of. In a run only ``decode_kv`` changes."""

    num_sequences: int
    num_tokens: int
    num_sampled: int
    num_decodes: int
    """Sequences with one token granted. Kernels see one query, whether it was sampled or given."""
    num_copies: int
    num_swapped: int
    """Blocks to and from host memory."""
    prefill_triangle: int
    """Of sequences with several queries, pairs of a query and a key of the same step."""
    by_window: tuple[WindowWork, ...]

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decodes

    @property
    def num_prefills(self) -> int:
        """Sequences with several tokens granted."""
        return self.num_sequences - self.num_decodes

    @classmethod
    def of(cls, step: StepFeatures, windows: tuple[int, ...], num_steps: int = 1) -> StepWork:
        """Sum ``step`` up, and with ``num_steps`` above 1 the decode steps that follow it.

        Integers are summed before anything becomes a float: a float sum would depend on its order.
        """
        granted = step.granted
        num_sequences = len(granted)
        assert num_sequences > 0, "a step without a sequence has no price"
        assert granted.min() >= 1, "a step computes at least one token of every sequence in it"
        num_tokens = int(granted.sum())
        context = step.computed_before + granted
        if num_tokens == num_sequences:
            num_decodes, triangle = num_sequences, 0
            by_window = tuple(
                WindowWork(_decode_kv(context, window, num_steps), 0, 0) for window in windows
            )
        else:
            assert num_steps == 1, "only steps of decodes are priced as a run"
            single = granted == 1
            num_decodes = int(np.count_nonzero(single))
            several = ~single
            decodes, after, queries = context[single], context[several], granted[several]
            triangle = int((queries * (queries + 1) // 2).sum())
            by_window = tuple(
                WindowWork(
                    _decode_kv(decodes, window, 1),
                    int(np.minimum(after, window + queries - 1).sum()),
                    int((_keys_seen(after, window) - _keys_seen(after - queries, window)).sum()),
                )
                for window in windows
            )
        return cls(
            num_sequences,
            num_tokens,
            int(np.count_nonzero(step.sampled)),
            num_decodes,
            step.num_copies,
            step.num_swapped_in + step.num_swapped_out,
            triangle,
            by_window,
        )


def _keys_seen(context: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.int64]:
    """Keys that the first ``context`` tokens see together: sum of min(t, window) over them."""
    inside = np.minimum(context, window)
    seen: npt.NDArray[np.int64] = inside * (inside + 1) // 2 + (context - inside) * window
    return seen


def _decode_kv(context: npt.NDArray[np.int64], window: int, num_steps: int) -> Count:
    """Sum over sequences of min(context + j, window), for step j = 0..num_steps - 1."""
    first = int(context.sum() if window == FULL else np.minimum(context, window).sum())
    if num_steps == 1:
        return first
    if window == FULL:
        return first + len(context) * np.arange(num_steps, dtype=np.int64)
    # From step j to j + 1 the sum grows by the number of sequences still inside the window.
    room = np.sort(window - context)
    growth = len(room) - np.searchsorted(room, np.arange(num_steps - 1), side="right")
    return np.cumsum(np.concatenate(([first], growth)), dtype=np.int64)


def _whole(term: Amount) -> Any:
    """Rounded to whole ns, half to even: an int, or an int64 array."""
    if not isinstance(term, np.ndarray):
        return round(term)
    return np.rint(term).astype(np.int64) if term.dtype.kind == "f" else term


class TermModel(ABC):
    """A cost model whose price is the sum of its terms.

    Each term is rounded to a whole ns (half to even) before the sum, so that terms add up exactly.
    One expression serves a step (Python numbers) and a run (arrays): both are IEEE doubles, and
    + - x / sqrt are correctly rounded in both.
    """

    windows: tuple[int, ...] = (FULL,)
    """Attention windows of which the model needs the sums."""

    @abstractmethod
    def describe(self) -> list[str]:
        """Lines for the report: what is assumed, and what is not modelled."""

    @abstractmethod
    def work_terms(self, work: StepWork) -> dict[str, Amount]:
        """Time of each term, ns."""

    @abstractmethod
    def work_flops_bytes(self, work: StepWork) -> tuple[Amount, Amount]:
        """Useful FLOPs and bytes through memory, per GPU."""

    def host_terms(self, work: StepWork, device_ns: Count) -> dict[str, Count]:
        """What the host adds to ``device_ns``, the whole ns of ``work_terms`` together."""
        return {}

    def _whole_terms(self, work: StepWork) -> dict[str, Any]:
        terms = {name: _whole(term) for name, term in self.work_terms(work).items()}
        terms |= self.host_terms(work, sum(terms.values()))
        return terms

    def price(self, step: StepFeatures) -> StepPrice:
        """Price one step, in which every sequence was granted at least one token."""
        work = StepWork.of(step, self.windows)
        duration_ns = sum(self._whole_terms(work).values())
        assert duration_ns > 0, "a step takes time"
        flops, num_bytes = self.work_flops_bytes(work)
        return StepPrice(duration_ns, float(flops), float(num_bytes))

    def terms(self, step: StepFeatures) -> dict[str, int]:
        """The same step, term by term, in whole ns that add up to ``duration_ns`` exactly."""
        return self._whole_terms(StepWork.of(step, self.windows))

    def price_steps(self, step: StepFeatures, num_steps: int) -> RunPrice:
        """Price ``num_steps`` decode steps; in each, every context is one token longer.

        ``step`` is the first: one token granted to every sequence.
        """
        assert num_steps >= 1, f"a run has at least one step, not {num_steps}"
        work = StepWork.of(step, self.windows, num_steps)
        duration_ns = np.zeros(num_steps, dtype=np.int64)
        for term in self._whole_terms(work).values():
            duration_ns += term
        assert duration_ns.min() > 0, "a step takes time"
        flops, num_bytes = self.work_flops_bytes(work)
        return RunPrice(
            duration_ns,
            np.broadcast_to(np.asarray(flops, dtype=np.float64), num_steps),
            np.broadcast_to(np.asarray(num_bytes, dtype=np.float64), num_steps),
        )
