"""Block keys: equal exactly where what is known of the tokens before is equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockmanager import ExtraKeys, HashedContent, KeyChain, TokenContent
from blockmanager.content import sha256

TOKENS = st.lists(st.integers(0, 2), max_size=40)
BLOCK_SIZES = st.integers(1, 9)


def token_keys(tokens: Sequence[int], block_size: int, **options: Any) -> list[bytes]:
    return KeyChain(TokenContent.of(tokens), block_size, **options).keys


def hashed(ids: Sequence[int], hash_block_size: int, num_tokens: int) -> HashedContent:
    return HashedContent(np.array(ids, np.int64), hash_block_size, num_tokens)


def num_common(left: Sequence[Any], right: Sequence[Any]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


@given(common=TOKENS, left=TOKENS, right=TOKENS, block_size=BLOCK_SIZES)
def test_token_contents_share_the_keys_of_their_common_full_blocks(
    common: list[int], left: list[int], right: list[int], block_size: int
) -> None:
    a, b = common + left, common + right
    keys_a, keys_b = token_keys(a, block_size), token_keys(b, block_size)
    assert (len(keys_a), len(keys_b)) == (len(a) // block_size, len(b) // block_size)
    shared = num_common(a, b) // block_size
    assert num_common(keys_a, keys_b) == shared
    # Once they differ they never meet again, whatever follows.
    assert set(keys_a[shared:]).isdisjoint(keys_b[shared:])
    assert len(set(keys_a)) == len(keys_a)


@given(
    common=st.lists(st.integers(0, 1000), max_size=6),
    left=st.lists(st.integers(0, 3), max_size=4),
    right=st.lists(st.integers(0, 3), max_size=4),
    cut=st.tuples(st.integers(0, 11), st.integers(0, 11)),
    hash_block_size=st.integers(1, 12),
    block_size=st.integers(1, 12),
)
def test_hashed_contents_share_floor_of_common_tokens_keys_at_any_block_size(
    common: list[int],
    left: list[int],
    right: list[int],
    cut: tuple[int, int],
    hash_block_size: int,
    block_size: int,
) -> None:
    """Common tokens are those under common leading ids; the last id may be partial."""
    sides = []
    for tail, missing in zip((left, right), cut, strict=True):
        ids = common + tail
        num_tokens = len(ids) * hash_block_size
        if ids:
            num_tokens -= missing % hash_block_size
        sides.append((ids, num_tokens))
    keys_a, keys_b = (
        KeyChain(hashed(ids, hash_block_size, n), block_size).keys for ids, n in sides
    )
    num_shared_ids = num_common(sides[0][0], sides[1][0])
    common_tokens = min(num_shared_ids * hash_block_size, sides[0][1], sides[1][1])
    assert num_common(keys_a, keys_b) == common_tokens // block_size
    assert [len(keys_a), len(keys_b)] == [n // block_size for _, n in sides]


@pytest.mark.parametrize(("block_size", "shared"), [(16, 64), (512, 2), (24, 42), (1000, 1)])
def test_two_ids_of_512_tokens_are_64_shared_blocks_of_16(block_size: int, shared: int) -> None:
    short = KeyChain(hashed([0, 1], 512, 1024), block_size).keys
    long = KeyChain(hashed(range(14), 512, 6755), block_size).keys
    assert num_common(short, long) == shared


@pytest.mark.parametrize(("num_tokens", "want"), [(20, "need 1"), (1025, "need 3"), (0, "need 0")])
def test_ids_that_cannot_cover_the_tokens_are_an_error(num_tokens: int, want: str) -> None:
    with pytest.raises(ValueError, match=want):
        hashed([0, 1], 512, num_tokens)


def test_hash_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="hash_block_size is 0"):
        hashed([], 0, 0)


def test_ids_of_groups_of_another_size_never_meet() -> None:
    assert set(KeyChain(hashed([7, 8], 4, 8), 4).keys).isdisjoint(
        KeyChain(hashed([7, 8], 8, 16), 4).keys
    )


@pytest.mark.parametrize("block_size", [3, 4, 7])
def test_tokens_never_pass_for_hash_ids(block_size: int) -> None:
    """Nobody knows which tokens an id stands for, so the two kinds share no key."""
    for hash_block_size in range(1, 13):
        ids = list(range(40))
        content = hashed(ids, hash_block_size, len(ids) * hash_block_size)
        for payload in content.payloads(block_size):
            width = len(payload) // 8
            posing = TokenContent.of(np.frombuffer(payload[: 8 * width], "<i8"))
            assert payload not in list(posing.payloads(width))


@given(prompt=TOKENS, outputs=TOKENS, block_size=BLOCK_SIZES)
def test_appended_outputs_give_the_keys_of_the_whole(
    prompt: list[int], outputs: list[int], block_size: int
) -> None:
    chain = KeyChain(TokenContent.of(prompt), block_size)
    for token in outputs:
        chain.append(token)
    assert chain.keys == token_keys(prompt + outputs, block_size)


@given(prompt=TOKENS, left=TOKENS, right=TOKENS, block_size=BLOCK_SIZES)
def test_a_fork_goes_its_own_way(
    prompt: list[int], left: list[int], right: list[int], block_size: int
) -> None:
    parent = KeyChain(TokenContent.of(prompt), block_size)
    child = parent.fork()
    for token in left:
        parent.append(token)
    for token in right:
        child.append(token)
    assert parent.keys == token_keys(prompt + left, block_size)
    assert child.keys == token_keys(prompt + right, block_size)


@given(known=TOKENS, outputs=st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_outputs_after_an_unknown_tail_have_no_keys(known: list[int], outputs: list[int]) -> None:
    chain = KeyChain(TokenContent.of(known), 4, is_whole_prompt=False)
    for token in outputs:
        chain.append(token)
        chain.fork().append(token)
    assert chain.keys == token_keys(known, 4)
    assert len(chain.keys) == len(known) // 4


def test_outputs_after_hash_ids_have_no_keys() -> None:
    chain = KeyChain(hashed([1, 2], 4, 8), 4)
    for token in range(8):
        chain.append(token)
    assert len(chain.keys) == 2


@given(
    left=st.builds(ExtraKeys, lora=st.none() | st.text(), salt=st.none() | st.text()),
    right=st.builds(ExtraKeys, lora=st.none() | st.text(), salt=st.none() | st.text()),
)
def test_roots_are_equal_exactly_for_equal_extra_keys(left: ExtraKeys, right: ExtraKeys) -> None:
    assert (left.root() == right.root()) == (left == right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (ExtraKeys(lora="X"), ExtraKeys(salt="X")),
        (ExtraKeys(lora=""), ExtraKeys()),
        (ExtraKeys(lora="a|salt:1:b"), ExtraKeys(lora="a", salt="b")),
        (ExtraKeys(lora="a", salt="b"), ExtraKeys(lora="b", salt="a")),
    ],
)
def test_kinds_of_extra_keys_are_name_spaces(left: ExtraKeys, right: ExtraKeys) -> None:
    keys = [token_keys([1, 2, 3, 4], 2, extra_keys=extra) for extra in (left, right)]
    assert set(keys[0]).isdisjoint(keys[1])


def test_keys_are_chained_sha256() -> None:
    """Spelled out: key k = SHA-256(key k - 1, eight little-endian bytes a token)."""
    first, second = token_keys([1, 2, 3, 258, 5], 2)
    payloads = [
        b"\x01" + bytes(7) + b"\x02" + bytes(7),
        b"\x03" + bytes(7) + b"\x02\x01" + bytes(6),
    ]
    assert first == sha256(ExtraKeys().root() + payloads[0])
    assert second == sha256(first + payloads[1])
