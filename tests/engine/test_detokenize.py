"""Text token by token: equal to decoding all at once, and cut where a stop string says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFReader
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from gpu_backend.detokenize import Detokenizer, StopMatch

Decode = Callable[[list[int]], str]


def stream(detokenizer: Detokenizer, tokens: list[int]) -> str:
    """All that comes out, up to a stop string."""
    parts = []
    for token in tokens:
        if detokenizer.stopped is not None:
            break
        parts.append(detokenizer.push(token))
    parts.append(detokenizer.finish())
    assert detokenizer.num_chars == sum(map(len, parts))
    return "".join(parts)


# A byte-level BPE: SmolLM2's 49,152 tokens.


class Vocabulary:
    def __init__(self, pieces: list[str], decoder: decoders.Decoder) -> None:
        self.pieces = pieces
        self.ids = {piece: i for i, piece in enumerate(pieces)}
        self._tokenizer = Tokenizer(BPE(vocab=self.ids, merges=[]))
        self._tokenizer.decoder = decoder

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


@pytest.fixture(scope="session")
def byte_level(smollm2_path: Path) -> Vocabulary:
    field = GGUFReader(smollm2_path).fields["tokenizer.ggml.tokens"]
    pieces = [bytes(field.parts[i]).decode() for i in field.data]
    return Vocabulary(pieces, decoders.ByteLevel())


SPECIAL = frozenset(range(17))  # SmolLM2's control tokens
any_token = st.integers(0, 49_151)
text_tokens = st.lists(any_token, max_size=40)


def byte_tokens(vocabulary: Vocabulary, data: bytes) -> list[int]:
    """One token a byte, in the alphabet that byte-level BPE writes bytes with (GPT-2's)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [vocabulary.ids[letters[byte]] for byte in data if letters[byte] in vocabulary.ids]


@settings(max_examples=150, deadline=None)
@given(tokens=text_tokens, raw=st.binary(max_size=12), text=st.text(max_size=8))
def test_byte_level_pieces_add_up(
    byte_level: Vocabulary, tokens: list[int], raw: bytes, text: str
) -> None:
    """Any tokens, and any bytes one by one: also bytes that are no text, and unfinished ends."""
    tokens = (
        tokens + byte_tokens(byte_level, raw) + tokens[:3] + byte_tokens(byte_level, text.encode())
    )
    got = stream(Detokenizer(byte_level.decode, skip_ids=SPECIAL), tokens)
    assert got == byte_level.decode([token for token in tokens if token not in SPECIAL])


@settings(max_examples=80, deadline=None)
@given(st.lists(any_token, min_size=1, max_size=12), text_tokens)
def test_byte_level_output_continues_its_prompt(
    byte_level: Vocabulary, prompt: list[int], tokens: list[int]
) -> None:
    before = byte_level.decode(prompt)
    got = stream(Detokenizer(byte_level.decode, prompt_ids=prompt), tokens)
    whole = byte_level.decode(prompt + tokens)
    assert whole.endswith(got)
    # Bytes at the prompt's end that are no character (yet) come with the output.
    settled = len(before.rstrip("\ufffd"))
    assert settled <= len(whole) - len(got) <= len(before)


def test_a_character_comes_whole(byte_level: Vocabulary) -> None:
    """Four bytes in four tokens: nothing until the last."""
    tokens = byte_tokens(byte_level, "a🙂b".encode())
    assert len(tokens) == 6
    detokenizer = Detokenizer(byte_level.decode)
    assert [detokenizer.push(token) for token in tokens] == ["a", "", "", "", "🙂", "b"]


def test_a_character_begun_in_the_prompt_comes_whole(byte_level: Vocabulary) -> None:
    tokens = byte_tokens(byte_level, "é🙂b".encode())
    for cut in range(2, 6):
        detokenizer = Detokenizer(byte_level.decode, prompt_ids=tokens[:cut])
        assert stream(detokenizer, tokens[cut:]) == "🙂b"


def test_an_unfinished_end_is_flushed(byte_level: Vocabulary) -> None:
    detokenizer = Detokenizer(byte_level.decode)
    tokens = byte_tokens(byte_level, "ok🙂".encode())[:-1]
    assert "".join(map(detokenizer.push, tokens)) == "ok"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_special_tokens_leave_nothing(byte_level: Vocabulary) -> None:
    (hi,) = byte_tokens(byte_level, b"h")
    detokenizer = Detokenizer(byte_level.decode, skip_ids=SPECIAL)
    assert [detokenizer.push(token) for token in (1, hi, 2, 0, hi)] == ["", "h", "", "", "h"]
    assert detokenizer.num_tokens == 5


# A sentencepiece vocabulary, decoded as tokenizers decodes Llama 2's.

WORDS = ["▁the", "▁", "▁▁", "the", "s", "▁é", "日", "▁a", "\n", ".", "▁."]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
llama2 = Vocabulary(
    BYTES + WORDS,
    decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
)
metaspace = Vocabulary(WORDS, decoders.Metaspace())

word = st.integers(256, 255 + len(WORDS)).map(lambda token: [token])
character = st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]).map(
    lambda c: list(c.encode())
)
pieces = st.lists(st.one_of(word, word, character), max_size=14).map(lambda lists: sum(lists, []))  # noqa: RUF017


@settings(max_examples=150, deadline=None)
@given(pieces)
@example([257, 257, 257])
@example([258, 257, 256])
@example([0xE6, 0x97, 0xA5, 0xE6, 0x9C, 0xAC, 256])
def test_sentencepiece_pieces_add_up(tokens: list[int]) -> None:
    """Words with and without their space, spaces alone, characters spelled in bytes."""
    assert stream(Detokenizer(llama2.decode), tokens) == llama2.decode(tokens)


@settings(max_examples=150, deadline=None)
@given(pieces.filter(bool), pieces, st.integers(0, 3))
def test_sentencepiece_output_continues_its_prompt(
    prompt: list[int], tokens: list[int], moved: int
) -> None:
    """The first word keeps its space; so does it where the prompt ends inside a character."""
    before, whole = llama2.decode(prompt), llama2.decode(prompt + tokens)
    assert stream(Detokenizer(llama2.decode, prompt_ids=prompt), tokens) == whole[len(before) :]
    split = min(moved, len(tokens))
    prompt, tokens = prompt + tokens[:split], tokens[split:]
    complete = prompt
    while "\ufffd" in llama2.decode(complete):
        complete = complete[:-1]
    got = stream(Detokenizer(llama2.decode, prompt_ids=prompt), tokens)
    assert got == whole[len(llama2.decode(complete)) :]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=12))
def test_metaspace_pieces_add_up(tokens: list[int]) -> None:
    assert stream(Detokenizer(metaspace.decode), tokens) == metaspace.decode(tokens)


def test_the_first_word_loses_its_space_only_without_a_prompt() -> None:
    the, word_a = llama2.ids["▁the"], llama2.ids["▁a"]
    alone = Detokenizer(llama2.decode)
    assert [alone.push(the), alone.push(word_a)] == ["the", " a"]
    after = Detokenizer(llama2.decode, prompt_ids=[the])
    assert [after.push(word_a), after.push(the)] == [" a", " the"]


def test_each_push_decodes_few_tokens() -> None:
    lengths: list[int] = []

    def decode(tokens: list[int]) -> str:
        lengths.append(len(tokens))
        return llama2.decode(tokens)

    detokenizer = Detokenizer(decode, prompt_ids=[256] * 5000)
    for i in range(2000):
        detokenizer.push(256 + i % len(WORDS))
    assert max(lengths) <= 8


# Stop strings

ALPHABET = ["a", "b", "ab", "ba", "aab", "", "c", "bca"]


def spell(tokens: list[int]) -> str:
    return "".join(ALPHABET[token] for token in tokens)


def slow_stop(
    tokens: list[int], stops: list[str], include: bool, min_tokens: int
) -> tuple[str, StopMatch | None]:
    """Looks at all places of all stop strings after each token."""
    for count in range(min_tokens + 1, len(tokens) + 1):
        text = spell(tokens[:count])
        seen = len(spell(tokens[: count - 1]))
        ends = [
            (end, order, stop)
            for order, stop in enumerate(stops)
            for end in range(seen + 1, len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if ends:
            end, _, stop = min(ends)
            kept = text[: end if include else end - len(stop)]
            return kept, StopMatch(stop, count, len(kept))
    return spell(tokens), None


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, len(ALPHABET) - 1), max_size=14),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3, unique=True),
    include=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 3]),
)
@example(tokens=[7], stops=["ca", "bc"], include=False, min_tokens=0)
@example(tokens=[2, 0], stops=["ab", "abc"], include=False, min_tokens=1)
def test_stop_strings_are_found_where_the_slow_way_finds_them(
    tokens: list[int], stops: list[str], include: bool, min_tokens: int
) -> None:
    detokenizer = Detokenizer(
        spell, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    kept, match = slow_stop(tokens, stops, include, min_tokens)
    assert stream(detokenizer, tokens) == kept
    assert detokenizer.stopped == match


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, len(ALPHABET) - 1), max_size=14),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_more_and_no_less_is_held_back_than_may_become_a_stop_string(
    tokens: list[int], stops: list[str]
) -> None:
    detokenizer = Detokenizer(spell, stop=stops)
    out = ""
    for count, token in enumerate(tokens, start=1):
        out += detokenizer.push(token)
        if detokenizer.stopped:
            return
        text = spell(tokens[:count])
        prefixes = [stop[:length] for stop in stops for length in range(len(stop))]
        assert text[len(out) :] == max(filter(text.endswith, prefixes), key=len)


def test_a_stop_string_before_min_tokens_is_plain_text() -> None:
    detokenizer = Detokenizer(spell, stop=["ab"], min_tokens=2)
    texts = [detokenizer.push(ALPHABET.index(text)) for text in ("ab", "aab", "ba")]
    assert texts == ["ab", "aab", "b"]
    assert detokenizer.push(ALPHABET.index("b")) == ""
    assert detokenizer.stopped == StopMatch("ab", num_tokens=4, num_chars=6)


def test_a_stop_string_over_several_tokens(byte_level: Vocabulary) -> None:
    tokens = byte_tokens(byte_level, b"one</s>two")
    detokenizer = Detokenizer(byte_level.decode, stop=["</s>"])
    assert [detokenizer.push(token) for token in tokens[:7]] == ["o", "n", "e", "", "", "", ""]
    assert detokenizer.stopped == StopMatch("</s>", num_tokens=7, num_chars=3)
    assert detokenizer.finish() == ""
    other = Detokenizer(byte_level.decode, stop=["</s>"])
    almost = byte_tokens(byte_level, b"a</b")
    assert [other.push(token) for token in almost] == ["a", "", "", "</b"]


def test_en_03_a_preemption_leaves_no_trace() -> None:
    """Ten outputs, preempted after five: what is recomputed was pushed before and is not again."""
    outputs = [256, 261, 0xF0, 0x9F, 0x99, 0x82, 262, 257, 263, 265]
    detokenizer = Detokenizer(llama2.decode, prompt_ids=[256] * 8)
    streamed = [detokenizer.push(token) for token in outputs[:5]]
    # The engine computes prompt and outputs 0 to 4 again; the state stays as it was.
    streamed += [detokenizer.push(token) for token in outputs[5:]]
    assert len(streamed) == detokenizer.num_tokens == 10
    assert streamed == [" the", " é", "", "", "", "🙂", "日", " ", " a", "."]
    assert detokenizer.finish() == ""
