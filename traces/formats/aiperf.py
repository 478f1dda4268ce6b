"""Custom datasets of aiperf: ``mooncake_trace``, ``single_turn`` and ``multi_turn``.

https://github.com/ai-dynamo/aiperf. Times are milliseconds. A ``delay`` counts from the answer before,
so it says nothing of when a request arrives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, ClassVar, Literal

from traces.formats.base import (
    MILLISECONDS,
    TEXT_PROMPT,
    BadRow,
    Head,
    JsonLinesFormat,
    Row,
    RowError,
    TraceFormat,
    int64_list,
    json_object,
    label,
    text_lines,
    time_ns,
    tokens,
)
from traces.formats.mooncake import HASH_BLOCK_SIZE
from traces.formats.native import hashed

_PROMPTS = frozenset({"text_input", "messages", "payload"})
_MODALITIES = frozenset(
    {"text", "texts", "image", "images", "audio", "audios", "video", "videos", "turns"}
)
_ABOUT_TURNS = frozenset({"timestamp", "delay", "role", "session_id", "output_length"})


class AiperfMooncake(JsonLinesFormat):
    """Mooncake's keys, and ``session_id`` or ``delay``, which tell the two apart."""

    name = "aiperf-mooncake"
    recognised_by = "JSON lines with input_length, timestamp or delay, and session_id or text_input"
    units = "milliseconds, tokens"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    prefix_identity = "hash_ids, 512 tokens an id, rounded up"
    licence = "whoever wrote the file"
    required = frozenset[str]()
    signature = frozenset({"input_length", "timestamp", "session_id"})
    optional = _PROMPTS | signature | {"output_length", "hash_ids", "delay", "tools", "extra"}

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
        given = {key: value for key, value in record.items() if value is not None}
        if "input_length" not in given:
            raise RowError(TEXT_PROMPT if given.keys() & _PROMPTS else "input_length missing")
        if "output_length" not in given:
            raise RowError("output_length missing")
        prompt_tokens = tokens(given["input_length"], "input_length")
        content = arrival_ns = session_id = None
        if "hash_ids" in given:
            hash_ids = int64_list(given["hash_ids"], "hash_ids")
            content = hashed(hash_ids, HASH_BLOCK_SIZE, prompt_tokens, may_round_down=False)
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


class AiperfTurns(TraceFormat):
    """``single_turn`` and ``multi_turn``: prompts as text, which no reader here can count.

    They are known in order to be refused with that reason.
    """

    name = "aiperf-turns"
    recognised_by = "JSON lines with text, texts or turns, and timestamp, delay, role or session_id"
    units = "milliseconds; prompts as text, without token counts"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    prefix_identity = "none"
    licence = "whoever wrote the file"

    def match(self, head: Head) -> int:
        return int(
            any(
                record.keys() & _MODALITIES and record.keys() & _ABOUT_TURNS
                for record in head.records
            )
        )

    def rows(self, source: BinaryIO) -> Iterator[Row | BadRow]:
        for number, line in text_lines(source):
            try:
                json_object(line)
            except RowError as error:
                yield BadRow(number, error.reason, error.detail)
            else:
                yield BadRow(number, TEXT_PROMPT, "")
