"""Prefix hits of a trace under an ideal cache: infinite, and filled in order of arrival."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from blockmanager.content import BlockKey, Content, ExtraKeys, HashedContent, KeyChain
from traces.workload import Arrival

DEFAULT_BLOCK_SIZE = 16
"""Tokens a block where a trace has no block size of its own (vLLM's default)."""


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Ideal hits over the requests whose prompts have an identity.

    A hit is the longest run of leading blocks that earlier arrivals had, looked up before the
    request's own blocks go in. Outputs are not cached: traces do not say what they were. An engine
    stays below this: it evicts, and it computes at least one token of every prompt.
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
    sizes = {
        request.content.hash_block_size if isinstance(request.content, HashedContent) else None
        for request in requests
    }
    id_size = next(iter(sizes)) if len(sizes) == 1 else None
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
