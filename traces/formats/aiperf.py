"""Custom datasets of aiperf: ``mooncake_trace``, ``single_turn`` and ``multi_turn``.

https://github.com/ai-dynamo/aiperf. Times are milliseconds. A ``delay`` counts from the answer before,
so it says nothing of when a request arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, ClassVar, Literal

import numpy as np

from blockmanager.content import Content, TokenContent
from traces.formats.base import (
    MILLISECONDS,
    NO_TOKENIZER,
    BadRow,
    Head,
    JsonLinesFormat,
    Row,
    RowError,
    TextFormat,
    Tokenizer,
    int64_list,
    json_object,
    label,
    shown,
    text_lines,
    time_ns,
    tokens,
)
from traces.formats.mooncake import HASH_BLOCK_SIZE
from traces.formats.native import hashed

_LATER_TURN = "turns of a conversation, whose answers are not told"
_CHATS = frozenset({"messages", "payload"})
_MODALITIES = frozenset(
    {"text", "texts", "image", "images", "audio", "audios", "video", "videos", "turns"}
)
_ABOUT_TURNS = frozenset({"timestamp", "delay", "role", "session_id", "output_length"})


class AiperfMooncake(TextFormat, JsonLinesFormat):
    """Mooncake's keys, and ``session_id`` or ``delay``, which tell the two apart.

    A prompt may be ``text_input``; ``messages`` and ``payload`` would need a chat template as well.
    """

    name = "aiperf-mooncake"
    recognised_by = "JSON lines with input_length, timestamp or delay, and session_id or text_input"
    units = "milliseconds, tokens"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    prefix_identity = "hash_ids, 512 tokens an id, rounded up; token ids of texts"
    licence = "whoever wrote the file"
    required = frozenset[str]()
    signature = frozenset({"input_length", "timestamp", "session_id"})
    optional = (
        _CHATS | signature | {"text_input", "output_length", "hash_ids", "delay", "tools", "extra"}
    )

    def match(self, head: Head) -> int:
        scores = (
            len(record.keys() & self.optional)
            for record in head.records
            if record.keys() & {"input_length", "text_input"}
            and record.keys() & {"timestamp", "delay"}
            and record.keys() & {"session_id", "delay", "text_input"}
            and "chat_id" not in record
        )
        return max(scores, default=0)

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        return self.parser()(line, record)

    def parser(self) -> Callable[[int, dict[str, Any]], Row]:
        sessions = _Sessions()

        def parse(line: int, record: dict[str, Any]) -> Row:
            given = {key: value for key, value in record.items() if value is not None}
            if "input_length" in given:
                return _row(line, given, *_counted(given))
            if "text_input" not in given:
                for name in sorted(given.keys() & _CHATS):
                    raise RowError(f"{name} without input_length: a chat template would be needed")
                raise RowError("input_length missing")
            if self.tokenizer is None:
                raise RowError(NO_TOKENIZER)
            sessions.begin(given)
            row = _row(line, given, *_text(self.tokenizer, {"text_input": given["text_input"]}))
            return row._replace(remarks=frozenset({self.tokenizer.about}))

        return parse


class _Sessions:
    """Sessions whose first text has been seen. What follows is put behind it and its answers, see
    conversation-context-mode.md in aiperf's documentation."""

    def __init__(self) -> None:
        self._begun: set[str] = set()

    def begin(self, given: dict[str, Any]) -> None:
        """Raises `RowError` for a later turn."""
        if "session_id" in given:
            name = label(given["session_id"], "session_id")
            if name in self._begun:
                raise RowError(_LATER_TURN)
            self._begun.add(name)


def _counted(given: dict[str, Any]) -> tuple[int, Content | None]:
    prompt_tokens = tokens(given["input_length"], "input_length")
    if "hash_ids" not in given:
        return prompt_tokens, None
    hash_ids = int64_list(given["hash_ids"], "hash_ids")
    return prompt_tokens, hashed(hash_ids, HASH_BLOCK_SIZE, prompt_tokens, may_round_down=False)


def _text(tokenizer: Tokenizer, texts: dict[str, Any]) -> tuple[int, Content]:
    """Tokens of texts, one behind the other, by the names of their fields."""
    ids = np.concatenate([tokenizer.ids(text, name) for name, text in texts.items()])
    return tokens(len(ids), "tokens of the prompt"), TokenContent(ids)


def _row(line: int, given: dict[str, Any], prompt_tokens: int, content: Content | None) -> Row:
    if "output_length" not in given:
        raise RowError("output_length missing")
    arrival_ns = session_id = None
    if "timestamp" in given:
        arrival_ns = time_ns(given["timestamp"], "timestamp", MILLISECONDS)
    if "session_id" in given:
        session_id = label(given["session_id"], "session_id")
    return Row(
        line=line,
        arrival_ns=arrival_ns,
        prompt_tokens=prompt_tokens,
        output_tokens=tokens(given["output_length"], "output_length"),
        content=content,
        session_id=session_id,
    )


class AiperfTurns(TextFormat):
    """``single_turn`` and ``multi_turn``: prompts as text.

    Of ``multi_turn`` no prompt can be known: later ones hold answers whose text the file does not have.
    """

    name = "aiperf-turns"
    recognised_by = "JSON lines with text, texts or turns, and timestamp, delay, role or session_id"
    units = "milliseconds, texts (--tokenizer), tokens"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    prefix_identity = "token ids of texts"
    licence = "whoever wrote the file"

    def match(self, head: Head) -> int:
        return int(
            any(
                record.keys() & _MODALITIES and record.keys() & _ABOUT_TURNS
                for record in head.records
            )
        )

    def rows(self, source: BinaryIO) -> Iterator[Row | BadRow]:
        sessions = _Sessions()
        for number, line in text_lines(source):
            try:
                yield self._row(number, json_object(line), sessions)
            except RowError as error:
                yield BadRow(number, error.reason, error.detail)

    def _row(self, number: int, record: dict[str, Any], sessions: _Sessions) -> Row:
        given = {key: value for key, value in record.items() if value is not None}
        if self.tokenizer is None:
            raise RowError(NO_TOKENIZER)
        if "turns" in given:
            raise RowError(_LATER_TURN)
        if others := sorted(given.keys() & (_MODALITIES - {"text", "texts"})):
            raise RowError(f"holds {', '.join(others)}: only texts are counted")
        texts = [given["text"]] if "text" in given else given.get("texts", [])
        if not isinstance(texts, list):
            raise RowError("texts is not a list", shown(texts))
        named = {f"texts[{index}]": text for index, text in enumerate(texts)}
        if not named:
            raise RowError("text missing")
        sessions.begin(given)
        row = _row(number, given, *_text(self.tokenizer, named))
        known = _MODALITIES | _ABOUT_TURNS | {"extra"}
        return row._replace(
            remarks=frozenset({self.tokenizer.about}),
            unknown_keys=frozenset(record.keys() - known),
        )
