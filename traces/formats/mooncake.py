"""Mooncake traces (FAST'25): milliseconds, and one hash id for each 512 tokens of the prompt.

https://github.com/kvcache-ai/Mooncake, FAST25-release/traces. The ids are global to the file and
the last one stands for a partial block.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from blockmanager.content import HashedContent
from traces.formats.base import (
    MILLISECONDS,
    Head,
    JsonLinesFormat,
    Row,
    int64_list,
    time_ns,
    tokens,
)
from traces.formats.native import hashed

HASH_BLOCK_SIZE = 512
FINE_BLOCK_SIZE = 16
"""Of Bailian traces, which have the same keys but seconds."""
AS_LIKELY = 2
"""What both formats score where the ids do not tell them apart."""


def fits(record: dict[str, Any], size: int) -> bool:
    """Whether a row has as many hash ids as its prompt has blocks of ``size`` tokens, rounded up."""
    length, ids = record.get("input_length"), record.get("hash_ids")
    return type(length) is int and isinstance(ids, list) and len(ids) == -(-length // size)


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

    def match(self, head: Head) -> int:
        if not super().match(head):
            return 0
        rows = [record for record in head.records if self.signature <= record.keys()]
        sure = any(fits(row, HASH_BLOCK_SIZE) and not fits(row, FINE_BLOCK_SIZE) for row in rows)
        fine = any(fits(row, FINE_BLOCK_SIZE) for row in rows)
        return len(self.signature) if sure or not fine else AS_LIKELY

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
