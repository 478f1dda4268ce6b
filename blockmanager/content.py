"""What is known of a sequence's tokens: enough to say which prefixes are equal, and no more.

A trace may know the token ids, or only that prompts share blocks of some size, or nothing at all.
Block keys come from here: key of block k = SHA-256(key of block k - 1, its content), the chain
starting at a root that carries the extra keys. A block whose content nobody knows has no key: it
is never put into the prefix cache and never hits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

BlockKey = bytes
HashFunction = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    """32-byte digest; equal digests are taken as equal content (see docs/decisions)."""
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What besides its tokens makes a block's KV what it is.

    Each kind has a name space of its own: an adapter called "X" and a salt "X" never meet.
    """

    lora: str | None = None
    salt: str | None = None

    def root(self, hash_function: HashFunction = sha256) -> BlockKey:
        """Parent key of a sequence's first block."""
        parts = [b"kvplan"]
        for kind, value in (("lora", self.lora), ("salt", self.salt)):
            if value is not None:
                encoded = value.encode()
                parts.append(f"{kind}:{len(encoded)}:".encode() + encoded)
        return hash_function(b"|".join(parts))


NO_EXTRA_KEYS = ExtraKeys()


class Content(Protocol):
    """Identity of the leading tokens of a sequence: of its prompt, or of all that it will hold."""

    @property
    def num_tokens(self) -> int:
        """Leading tokens whose identity is known."""

    def payloads(self, block_size: int) -> Iterator[bytes]:
        """One byte string for each full block of ``block_size`` known tokens, in order.

        Equal strings mean equal tokens.
        """


@dataclass(frozen=True, slots=True, eq=False)
class TokenContent:
    """Token ids themselves (int64, shape ``[num_tokens]``)."""

    token_ids: npt.NDArray[np.int64]

    @classmethod
    def of(cls, token_ids: Sequence[int] | npt.NDArray[np.int64]) -> TokenContent:
        return cls(np.asarray(token_ids, dtype=np.int64))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def payloads(self, block_size: int) -> Iterator[bytes]:
        data = self.token_ids.astype("<i8", copy=False).tobytes()
        width = 8 * block_size
        for start in range(0, len(data) - width + 1, width):
            yield data[start : start + width]


@dataclass(frozen=True, slots=True, eq=False)
class HashedContent:
    """One id for each ``hash_block_size`` tokens, as Mooncake and Bailian traces give it.

    The last id may stand for a partial block: ``num_tokens`` says how many tokens are covered. Any
    engine block size works: an engine block is named by the pieces of ids that it covers.

    Raises ``ValueError`` where the ids cannot cover exactly ``num_tokens`` tokens.
    """

    hash_ids: npt.NDArray[np.int64]
    hash_block_size: int
    num_tokens: int

    def __post_init__(self) -> None:
        if self.hash_block_size < 1:
            raise ValueError(f"hash_block_size is {self.hash_block_size}, must be at least 1")
        want = -(-self.num_tokens // self.hash_block_size)
        if len(self.hash_ids) != want:
            raise ValueError(
                f"{len(self.hash_ids)} hash ids for {self.num_tokens} tokens, "
                f"{self.hash_block_size} tokens an id need {want}"
            )

    def payloads(self, block_size: int) -> Iterator[bytes]:
        size = self.hash_block_size
        num_blocks = self.num_tokens // block_size
        if size % block_size == 0:
            # The common case in bulk: every engine block lies inside one id.
            start = np.arange(num_blocks, dtype=np.int64) * block_size
            pieces = np.empty((num_blocks, 3), dtype="<i8")
            pieces[:, 0] = size
            pieces[:, 1] = self.hash_ids[start // size]
            pieces[:, 2] = start % size
            data = pieces.tobytes()
            for k in range(num_blocks):
                # The tag keeps ids and offsets apart from token ids that happen to be equal.
                yield b"h" + data[24 * k : 24 * k + 24]
            return
        for k in range(num_blocks):
            first, end = k * block_size, (k + 1) * block_size
            parts = [size.to_bytes(8, "little")]
            while first < end:
                index, offset = divmod(first, size)
                length = min(size - offset, end - first)
                parts.append(np.array([self.hash_ids[index], offset, length], "<i8").tobytes())
                first += length
            yield b"h" + b"".join(parts)


class KeyChain:
    """The block keys of one sequence, as far as its content is known.

    Keys of what is known at the start are computed in one pass. Outputs extend the chain only when
    all token ids before them are known and the driver reports the ids it sampled.
    """

    __slots__ = ("_block_size", "_hash", "_parent", "_tail", "keys")

    def __init__(
        self,
        content: Content,
        block_size: int,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
        hash_function: HashFunction = sha256,
        *,
        is_whole_prompt: bool = True,
    ) -> None:
        self._block_size = block_size
        self._hash = hash_function
        key = extra_keys.root(hash_function)
        keys: list[BlockKey] = []
        for payload in content.payloads(block_size):
            key = hash_function(key + payload)
            keys.append(key)
        self.keys = keys
        """Key of each full block of known content, from the first block on."""
        self._parent = key
        self._tail: list[int] | None = None
        if is_whole_prompt and isinstance(content, TokenContent):
            self._tail = content.token_ids[len(keys) * block_size :].tolist()

    def append(self, token_id: int) -> None:
        """Extend by one output token; ignored where an earlier token is not known."""
        if self._tail is None:
            return
        self._tail.append(token_id)
        if len(self._tail) == self._block_size:
            payload = np.array(self._tail, dtype="<i8").tobytes()
            self._parent = self._hash(self._parent + payload)
            self.keys.append(self._parent)
            self._tail = []

    def fork(self) -> KeyChain:
        """An independent chain with the same past."""
        other = object.__new__(KeyChain)
        other._block_size = self._block_size
        other._hash = self._hash
        other._parent = self._parent
        other._tail = None if self._tail is None else list(self._tail)
        other.keys = list(self.keys)
        return other
