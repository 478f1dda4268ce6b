"""Prefix hits against the size of the pool: LRU at every size in one pass, and what no policy beats.

A request looks its prompt up as the longest leading run of blocks that are cached, then all of its
blocks are inserted or refreshed, the last one first (as vLLM frees them, so the tail of a prompt is
evicted before its head). LRU keeps the most recently used blocks, so what a small pool holds a
larger one holds too: a block hits at every size above its *stack distance*, the number of different
blocks used since it was used last (Mattson et al. 1970). One sort of all distances gives the curve.

The ceiling keeps, after each request, the blocks that are needed soonest (Belady 1966), and may
drop the others at once. A later block of a prompt is never needed before an earlier one, so what it
keeps is always a leading run. No policy has more hits in blocks.

Outputs are not cached (traces do not say what they were), and requests take no room of their own:
an engine has less.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.prefix import Chains, prompt_chains
from traces.workload import Arrival

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ReuseCurve:
    """Token hit rates by pool size, exact at every size."""

    block_size: int
    prompt_tokens: int
    """Of the prompts whose identity is known: the denominator."""
    unique_blocks: int
    needed_blocks: IntArray
    """Shape ``[reuses]``, sorted: the smallest pool in which LRU has each block that recurs."""
    saved_tokens: IntArray
    """Shape ``[reuses]``: tokens saved by these blocks and those before them."""
    _spans: _Spans

    def lru(self, num_blocks: float) -> float:
        """Share of prompt tokens that hit under LRU with that many blocks."""
        hits = int(np.searchsorted(self.needed_blocks, num_blocks, side="right"))
        return int(self.saved_tokens[hits - 1]) / self.prompt_tokens if hits else 0.0

    @property
    def ideal(self) -> float:
        """With a pool that never evicts."""
        return self.lru(np.inf)

    def ceiling(self, num_blocks: int) -> float:
        """The same under the best eviction that knows the future; costs a pass over the reuses.

        Where prompts end in partial blocks (fewer tokens than others) it is the most hits in
        blocks, and may miss the most in tokens by a hair.
        """
        return self._spans.most_tokens(num_blocks) / self.prompt_tokens

    @property
    def largest(self) -> int:
        """Blocks from which on LRU misses nothing that recurs; 0 where nothing does."""
        return int(self.needed_blocks[-1]) if len(self.needed_blocks) else 0

    def sizes(self) -> list[int]:
        """Pool sizes worth showing: 1, 2, 5, 10, ... up to the first that is ideal."""
        steps = (step * 10**power for power in range(13) for step in (1, 2, 5))
        shown: list[int] = []
        for size in steps:
            shown.append(size)
            if size >= self.largest:
                break
        return [size for size in shown if self.lru(size) > 0] or shown[-1:]


def reuse_curve(arrivals: Iterable[Arrival], block_size: int | None = None) -> ReuseCurve | None:
    """The curve of a trace; ``None`` where no prompt has an identity, which is not a curve of zeros.

    ``block_size`` as for `ideal_prefix_hits`, with whose hits the ideal agrees.
    """
    chains = prompt_chains(arrivals, block_size)
    if chains is None:
        return None
    again = np.flatnonzero(chains.hit_tokens > 0)
    needed = _stack_distances(chains)[again] + 1
    order = np.argsort(needed, kind="stable")
    return ReuseCurve(
        block_size=chains.block_size,
        prompt_tokens=chains.prompt_tokens,
        unique_blocks=int((chains.previous < 0).sum()),
        needed_blocks=needed[order],
        saved_tokens=np.cumsum(chains.hit_tokens[again][order]),
        _spans=_Spans.of(chains),
    )


def _stack_distances(chains: Chains) -> IntArray:
    """Different blocks used between the last use of each block and the request that has it again.

    Shape ``[blocks]``; meaningless for blocks used the first time.

    With uses in the order ``0 .. N - 1`` and ``prev[i]`` the last use of the block of ``i``, the
    different blocks between are the uses ``j`` in ``(prev[i], i)`` but those that repeat a block
    within: ``prev[j] > prev[i]``. Such ``j < i`` are the inversions of ``prev``.
    """
    owner, depth = chains.owner, chains.depth
    # Last block first: use numbers run backwards within each request.
    use = chains.starts[owner] + chains.lengths[owner] - 1 - depth
    prev = np.full(len(owner), -1, dtype=np.int64)
    seen = chains.previous >= 0
    prev[use[seen]] = use[chains.previous[seen]]
    between = np.arange(len(prev)) - prev - 1 - _larger_before(prev)
    # The request's own blocks behind this one come before it in that order, each of them new.
    own_before: IntArray = chains.lengths[owner] - 1 - depth
    distances: IntArray = between[use] - own_before
    return distances


def _larger_before(values: IntArray) -> IntArray:
    """How many earlier values are larger, for each. Shape ``[N]``, O(N log^2 N).

    Merge sort from the bottom up, all pairs of runs of a level at once: each value of a right run
    is looked up in the left run beside it.
    """
    count = len(values)
    padded = 1 << max(count - 1, 1).bit_length()
    # What is added at the end is before nothing; -1 .. N - 1 become 0 .. N.
    ranks: npt.NDArray[Any] = np.full(padded, count, dtype=np.int64)
    ranks[:count] = values + 1
    places: npt.NDArray[Any] = np.arange(padded)
    larger = np.zeros(padded, dtype=np.int64)
    width = 1
    while width < padded:
        ranks, places = ranks.reshape(-1, 2 * width), places.reshape(-1, 2 * width)
        # A pair's values lie above those of the pairs before it, so that one search serves all.
        base = np.arange(len(ranks))[:, None] * (count + 1)
        left, right = (ranks[:, :width] + base).ravel(), (ranks[:, width:] + base).ravel()
        not_larger = np.searchsorted(left, right, side="right")
        larger[places[:, width:].ravel()] += np.repeat(np.arange(1, len(ranks) + 1), width) * width
        larger[places[:, width:].ravel()] -= not_larger
        order = np.argsort(ranks, axis=1, kind="stable")
        ranks = np.take_along_axis(ranks, order, axis=1)
        places = np.take_along_axis(places, order, axis=1)
        width *= 2
    return larger[:count]


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """Runs of blocks that one request has and a later one has again, no other in between.

    Arrays of shape ``[spans]``, by ``begin``.
    """

    begin: list[int]
    """The earlier request."""
    end: list[int]
    """The later request."""
    first: list[int]
    """First block of the run, counted over all blocks that recur."""
    count: list[int]
    saved: IntArray
    """Shape ``[reuses + 1]``: tokens of the recurring blocks before each."""

    @classmethod
    def of(cls, chains: Chains) -> _Spans:
        again = np.flatnonzero(chains.previous >= 0)
        begin, end = chains.owner[chains.previous[again]], chains.owner[again]
        starts = np.flatnonzero(
            np.diff(begin, prepend=-1) | np.diff(end, prepend=-1)
        )  # blocks that recur are a request's leading ones, so a run has no gaps
        counts = np.diff(starts, append=len(again))
        order = np.argsort(begin[starts], kind="stable")
        saved = np.concatenate([[0], np.cumsum(chains.hit_tokens[again])])
        return cls(
            begin=begin[starts][order].tolist(),
            end=end[starts][order].tolist(),
            first=starts[order].tolist(),
            count=counts[order].tolist(),
            saved=saved,
        )

    def most_tokens(self, num_blocks: int) -> int:
        """Tokens saved where, after each request, the blocks needed soonest are kept."""
        kept = list(self.count)
        leaving: Counter[int] = Counter()
        held = now = 0
        latest: list[tuple[int, int]] = []
        for span, (begin, end) in enumerate(zip(self.begin, self.end, strict=True)):
            for request in range(now + 1, begin + 1):
                held -= leaving.pop(request, 0)
            now = begin
            heapq.heappush(latest, (-end, span))
            held += kept[span]
            leaving[end] += kept[span]
            while held > num_blocks:
                # Spans that have ended lie below those that have not: they end earlier.
                last_end, last = latest[0]
                dropped = min(held - num_blocks, kept[last])
                kept[last] -= dropped
                leaving[-last_end] -= dropped
                held -= dropped
                if not kept[last]:
                    heapq.heappop(latest)
        firsts = np.array(self.first, dtype=np.int64)
        counts = np.array(kept, dtype=np.int64)
        return int((self.saved[firsts + counts] - self.saved[firsts]).sum())
