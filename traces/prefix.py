"""Prefix hits of a trace under an ideal cache: infinite, and filled in order of arrival."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blockmanager.content import BlockKey, Content, ExtraKeys, HashedContent, KeyChain
from scheduler.request import Request
from traces.workload import Arrival

DEFAULT_BLOCK_SIZE = 16
"""Tokens a block where a trace has no block size of its own (vLLM's default)."""


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Ideal hits over the requests whose prompts have an identity.

    A hit is the longest run of leading blocks that earlier arrivals had, looked up before the
    request's own blocks go in. Answers are not cached: rows do not say what they were. An engine that
    knows none either stays below this: it evicts, and it computes at least one token of every prompt.
    """

    block_size: int
    counts_partial_blocks: bool
    """Whether a trace's id for the partial block at the end of a prompt counts as a block."""
    requests: int
    requests_with_hits: int
    prompt_tokens: int
    hit_tokens: int
    blocks: int
    hit_blocks: int

    @property
    def unique_blocks(self) -> int:
        """A block that misses was never there, as its key names all that is before it."""
        return self.blocks - self.hit_blocks

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def block_hit_rate(self) -> float | None:
        return self.hit_blocks / self.blocks if self.blocks else None


class _IdTrie:
    """Prompts as paths of hash ids; each node knows how many tokens it was seen to cover.

    Two prompts share exactly the tokens below ``min(both lengths, common ids * tokens an id)``, so
    the deepest known node tells the hit at any block size, without a key for each engine block.
    """

    def __init__(self) -> None:
        self._nodes: dict[tuple[object, int], int] = {}
        self._covered: list[int] = []

    def take(self, content: HashedContent, extra_keys: ExtraKeys) -> tuple[int, int]:
        """Leading ids and leading tokens that were there before; then adds the prompt."""
        size, num_tokens = content.hash_block_size, content.num_tokens
        node: object = extra_keys
        hit_ids = hit_tokens = 0
        for depth, hash_id in enumerate(content.hash_ids.tolist(), 1):
            covers = min(depth * size, num_tokens)
            key = (node, hash_id)
            known = self._nodes.get(key)
            if known is None:
                known = self._nodes[key] = len(self._nodes)
                self._covered.append(covers)
            else:
                hit_ids = depth
                hit_tokens = min(self._covered[known], covers)
                self._covered[known] = max(self._covered[known], covers)
            node = known
        return hit_ids, hit_tokens


class _KeySet:
    """Full blocks by the keys that an engine gives them: any content."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._seen: set[BlockKey] = set()

    def take(self, content: Content, extra_keys: ExtraKeys) -> int:
        """Leading blocks that were there before; then adds the prompt's."""
        keys = KeyChain(content, self._block_size, extra_keys).keys
        hit_blocks = next((i for i, key in enumerate(keys) if key not in self._seen), len(keys))
        self._seen.update(keys[hit_blocks:])
        return hit_blocks


def ideal_prefix_hits(
    arrivals: Iterable[Arrival], block_size: int | None = None
) -> PrefixHits | None:
    """What an infinite prefix cache would save; ``None`` where no prompt has an identity.

    Parameters
    ----------
    block_size : tokens a block. ``None`` = the trace's own where all its hash ids have one size
        (then the id of a partial last block counts too), else `DEFAULT_BLOCK_SIZE`.
    """
    requests = [arrival.request for arrival in arrivals if arrival.request.content is not None]
    if not requests:
        return None
    id_size = _id_size(requests)
    size = block_size or id_size or DEFAULT_BLOCK_SIZE
    by_ids = block_size is None and id_size is not None
    trie, key_set = _IdTrie(), _KeySet(size)
    blocks = hit_blocks = hit_tokens = requests_with_hits = 0
    for request in requests:
        content = request.content
        assert content is not None
        held = content.num_tokens // size
        if id_size is None:
            hit = key_set.take(content, request.extra_keys)
            tokens = hit * size
        else:
            assert isinstance(content, HashedContent)
            hit, tokens = trie.take(content, request.extra_keys)
            if by_ids:
                held = len(content.hash_ids)
            else:
                hit = tokens // size
                tokens = hit * size
        blocks += held
        hit_blocks += hit
        hit_tokens += tokens
        requests_with_hits += hit > 0
    return PrefixHits(
        block_size=size,
        counts_partial_blocks=by_ids
        and any(r.content.num_tokens % size for r in requests if r.content),
        requests=len(requests),
        requests_with_hits=requests_with_hits,
        prompt_tokens=sum(request.num_prompt_tokens for request in requests),
        hit_tokens=hit_tokens,
        blocks=blocks,
        hit_blocks=hit_blocks,
    )


def _id_size(requests: Sequence[Request]) -> int | None:
    """Tokens a hash id, where all prompts have ids of one size."""
    sizes = {
        request.content.hash_block_size if isinstance(request.content, HashedContent) else None
        for request in requests
    }
    return next(iter(sizes)) if len(sizes) == 1 else None


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """The prompts of known content as runs of blocks, laid end to end; arrays are int64.

    Arrays over blocks have shape ``[blocks]``, those over requests ``[requests]``.
    """

    block_size: int
    prompt_tokens: int
    starts: npt.NDArray[np.int64]
    """First block of each request."""
    lengths: npt.NDArray[np.int64]
    """Blocks of each request."""
    owner: npt.NDArray[np.int64]
    """Request of each block."""
    previous: npt.NDArray[np.int64]
    """Where the same block came last before; -1 where it is new."""
    hit_tokens: npt.NDArray[np.int64]
    """Tokens of the block that earlier prompts had too; 0 where it is new."""
    index: npt.NDArray[np.int64]
    """Of each request, among all arrivals."""

    @property
    def depth(self) -> npt.NDArray[np.int64]:
        """Position of each block in its request."""
        return np.arange(len(self.owner)) - self.starts[self.owner]


def prompt_chains(arrivals: Iterable[Arrival], block_size: int | None = None) -> Chains | None:
    """Blocks of a trace and where each came before; ``None`` where no prompt has an identity.

    Blocks are those of `ideal_prefix_hits`: the trace's own hash ids (a partial last one counts), or
    full blocks of ``block_size`` tokens.
    """
    chosen = [
        (index, arrival.request)
        for index, arrival in enumerate(arrivals)
        if arrival.request.content is not None
    ]
    if not chosen:
        return None
    requests = [request for _, request in chosen]
    id_size = _id_size(requests) if block_size is None else None
    size = block_size or id_size or DEFAULT_BLOCK_SIZE
    lengths: list[int] = []
    previous: list[int] = []
    hit_tokens: list[int] = []
    ids: dict[tuple[ExtraKeys | int, int] | BlockKey, int] = {}
    last: list[int] = []
    covered: list[int] = []
    for request in requests:
        content = request.content
        assert content is not None
        before = len(previous)
        if id_size is None:
            nodes = [
                ids.setdefault(key, len(ids))
                for key in KeyChain(content, size, request.extra_keys).keys
            ]
            tail = size
        else:
            assert isinstance(content, HashedContent)
            nodes = []
            parent: ExtraKeys | int = request.extra_keys
            for hash_id in content.hash_ids.tolist():
                parent = ids.setdefault((parent, hash_id), len(ids))
                nodes.append(parent)
            tail = content.num_tokens - size * (len(nodes) - 1)
        for depth, node in enumerate(nodes, 1):
            covers = size if depth < len(nodes) else tail
            if node == len(last):
                previous.append(-1)
                hit_tokens.append(0)
                last.append(len(previous) - 1)
                covered.append(covers)
            else:
                previous.append(last[node])
                hit_tokens.append(min(covered[node], covers))
                last[node] = len(previous) - 1
                covered[node] = max(covered[node], covers)
        lengths.append(len(previous) - before)
    blocks = np.array(lengths, dtype=np.int64)
    return Chains(
        block_size=size,
        prompt_tokens=sum(request.num_prompt_tokens for request in requests),
        starts=np.cumsum(blocks) - blocks,
        lengths=blocks,
        owner=np.repeat(np.arange(len(blocks)), blocks),
        previous=np.array(previous, dtype=np.int64),
        hit_tokens=np.array(hit_tokens, dtype=np.int64),
        index=np.array([index for index, _ in chosen], dtype=np.int64),
    )
