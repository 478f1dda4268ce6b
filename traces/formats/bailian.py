"""Qwen-Bailian usage traces: seconds, and one hash id for each 16 tokens of the prompt.

https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon. The ids are global to the file. Thinking
is stripped between turns, so a turn's prompt need not contain all of the answer before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from traces.formats.base import (
    SECONDS,
    Head,
    JsonLinesFormat,
    Row,
    int64_list,
    label,
    time_ns,
    tokens,
)
from traces.formats.mooncake import AS_LIKELY, FINE_BLOCK_SIZE, fits
from traces.formats.native import hashed

_NO_PARENT = (None, -1)


class Bailian(JsonLinesFormat):
    """``timestamp`` (s), ``input_length``, ``output_length``, ``hash_ids``, ``chat_id``.

    A conversation is a chain of chats, each with the one before as ``parent_chat_id``; the first one
    names the session. The chats of one pass are remembered, some 150 bytes each.
    """

    name = "bailian"
    recognised_by = "JSON lines with timestamp, input_length, output_length, hash_ids, chat_id"
    units = "seconds, tokens"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    prefix_identity = (
        "hash_ids, 16 tokens an id, rounded up or down; the last one may differ by padding"
    )
    licence = "Apache-2.0 (the repository of the public files)"
    keeps_answers = False
    required = frozenset({"timestamp", "input_length", "output_length"})
    optional = frozenset({"hash_ids", "chat_id", "parent_chat_id", "turn", "type"})
    signature = required | {"hash_ids", "chat_id"}

    def match(self, head: Head) -> int:
        if score := super().match(head):
            return score
        rows = [record for record in head.records if self.required <= record.keys()]
        return AS_LIKELY if any(fits(row, FINE_BLOCK_SIZE) for row in rows) else 0

    def parser(self) -> Callable[[int, dict[str, Any]], Row]:
        session_of: dict[str, str] = {}

        def parse(line: int, record: dict[str, Any]) -> Row:
            if record.get("chat_id") is None:
                return self.parse(line, record)
            chat, parent = label(record["chat_id"], "chat_id"), record.get("parent_chat_id")
            before = None if parent in _NO_PARENT else label(parent, "parent_chat_id")
            # A parent that is not in the file still ties its children together.
            session = chat if before is None else session_of.get(before, before)
            session_of[chat] = session
            return self.parse(line, record)._replace(session_id=session)

        return parse

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        prompt_tokens = tokens(record["input_length"], "input_length")
        content = None
        if record.get("hash_ids") is not None:
            hash_ids = int64_list(record["hash_ids"], "hash_ids")
            content = hashed(hash_ids, FINE_BLOCK_SIZE, prompt_tokens, may_round_down=True)
        return Row(
            line=line,
            arrival_ns=time_ns(record["timestamp"], "timestamp", SECONDS),
            prompt_tokens=prompt_tokens,
            output_tokens=tokens(record["output_length"], "output_length"),
            content=content,
        )
