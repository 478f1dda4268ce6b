"""Output text as it comes: whole characters, no part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder makes of bytes that are not (yet) a character."""

_CONTEXT_TOKENS = 6
_MAX_UNFINISHED_TOKENS = 3
"""A character has at most four bytes, and a token at least one."""


class StopMatch(NamedTuple):
    """A stop string was found."""

    stop: str
    num_tokens: int
    """Output tokens up to and with the one that completed it."""
    num_chars: int
    """Characters of the output text that are kept."""


class Detokenizer:
    """Turns one output's tokens into text, token by token.

    The texts returned add up to what ``decode`` makes of all tokens at once, up to a stop string. The
    state belongs to the output: each token is pushed once, when it is sampled, whatever is preempted
    or recomputed.

    Tokens cannot be decoded one at a time: a character may be spread over several of them, and
    decoders in the manner of sentencepiece drop the space before the first word only. So a window
    of tokens is decoded twice: up to ``read``, what has been returned, and whole. The difference is
    the new text; it is held back while it ends in an unfinished character. The window's first tokens
    (from ``prefix`` to ``read``) are only there to put the new ones inside a text. (The method of
    Hugging Face's text-generation-inference and of vLLM.) Each push thus decodes a few tokens; only
    output that stays unfinished, bytes that are no text, lets the window grow.

    One decoder cannot be followed exactly: byte fallback in ``tokenizers`` turns a whole run of byte
    tokens into replacement characters if any of it is invalid, also characters that were complete,
    and have been returned, before.

    Parameters
    ----------
    decode
        Token ids to text, e.g. ``tokenizer.decode``; it must keep replacement characters.
    prompt_ids
        The text continues the prompt: its first word keeps its space, and a character that the
        prompt left unfinished comes out whole. Empty = the output stands alone.
    skip_ids
        Special tokens; they leave no text.
    stop, include_stop_str_in_output, min_tokens
        As in ``SamplingParams``. Of several stop strings, the one that is complete first counts, then
        the first of the list.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        prompt_ids: Sequence[int] = (),
        skip_ids: Collection[int] = frozenset(),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decode = decode
        self._skip_ids = skip_ids
        self._stop = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self.stopped: StopMatch | None = None
        self.num_tokens = 0
        """Tokens pushed."""
        self.num_chars = 0
        """Characters returned."""
        self._held = ""
        """Decoded text that may be the beginning of a stop string."""
        self._window = self._context([i for i in prompt_ids if i not in skip_ids])
        self._read = end = len(self._window)
        for read in range(end, max(end - _MAX_UNFINISHED_TOKENS, 0) - 1, -1):
            if not decode(self._window[:read]).endswith(_UNFINISHED):
                self._read = read
                break

    def push(self, token_id: int) -> str:
        """The next output token; returns text that nothing that follows can change."""
        assert self.stopped is None, "the output has ended"
        self.num_tokens += 1
        if token_id in self._skip_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        known = self._decode(self._window[: self._read])
        if len(text) <= len(known) or text.endswith(_UNFINISHED):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return self._release(text[len(known) :])

    def finish(self) -> str:
        """The output has ended: whatever was held back."""
        if self.stopped is not None:
            return ""
        text = self._decode(self._window)
        known = self._decode(self._window[: self._read])
        self._read = len(self._window)
        released = self._release(text[len(known) :])
        if self.stopped is None:
            self.num_chars += len(self._held)
            released, self._held = released + self._held, ""
        return released

    def _context(self, prompt_ids: list[int]) -> list[int]:
        """The prompt's last tokens, more of them if they begin or end inside a character."""
        count = _CONTEXT_TOKENS
        while count < len(prompt_ids) and _UNFINISHED in self._decode(prompt_ids[-count:]):
            count *= 2
        return prompt_ids[-count:]

    def _release(self, new: str) -> str:
        text = self._held + new
        match = self._match(text, len(self._held))
        if match is not None:
            stop, end = match
            kept = text[: end if self._include_stop else end - len(stop)]
            self._held = ""
            self.num_chars += len(kept)
            self.stopped = StopMatch(stop, self.num_tokens, self.num_chars)
            return kept
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        self.num_chars += len(text) - held
        return text[: len(text) - held]

    def _match(self, text: str, searched: int) -> tuple[str, int] | None:
        """The first stop string that ends beyond ``searched``, and where it ends."""
        if self.num_tokens <= self._min_tokens:
            return None
        ends = {}
        for stop in self._stop:
            start = text.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0:
                ends[stop] = start + len(stop)
        if not ends:
            return None
        stop = min(ends, key=lambda found: ends[found])
        return stop, ends[stop]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins, short of all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
