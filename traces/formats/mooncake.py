"""Mooncake traces (FAST'25): milliseconds, and one hash id for each 512 tokens of the prompt.

https://github.com/kvcache-ai/Mooncake, FAST25-release/traces. The ids are global to the file and
the last one stands for a partial block.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from blockmanager.content import HashedContent
from traces.formats.base import MILLISECONDS, JsonLinesFormat, Row, int64_list, time_ns, tokens
from traces.formats.native import hashed

HASH_BLOCK_SIZE = 512


class Mooncake(JsonLinesFormat):
    """``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``."""

    name = "mooncake"
    recognised_by = "JSON lines with timestamp, input_length, output_length, hash_ids"
    units = "milliseconds, tokens"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    prefix_identity = "hash_ids, 512 tokens an id, rounded up"
    licence = "Apache-2.0 (the repository of the public files)"
    required = frozenset({"timestamp", "input_length", "output_length"})
    optional = frozenset({"hash_ids"})
    # Without the ids nothing says that `timestamp` is milliseconds: only --format may say so.
    signature = required | optional

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        prompt_tokens = tokens(record["input_length"], "input_length")
        content: HashedContent | None = None
        if record.get("hash_ids") is not None:
            hash_ids = int64_list(record["hash_ids"], "hash_ids")
            content = hashed(hash_ids, HASH_BLOCK_SIZE, prompt_tokens, may_round_down=False)
        return Row(
            line=line,
            arrival_ns=time_ns(record["timestamp"], "timestamp", MILLISECONDS),
            prompt_tokens=prompt_tokens,
            output_tokens=tokens(record["output_length"], "output_length"),
            content=content,
        )
