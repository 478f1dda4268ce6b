"""The native format as a table: the same names as columns, lists as integers with spaces between."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from traces.formats.base import CsvFormat, Row, RowError, to_number
from traces.formats.native import Native

_NUMBERS = (
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "deadline_s",
    "max_tokens",
    "n",
    "priority",
)
_NAMES = ("id", "session_id", "lora", "salt")
_LISTS = ("token_ids", "hash_ids")
_REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
COLUMNS = (
    "id",
    *_NUMBERS,
    "session_id",
    "lora",
    "salt",
    "hash_block_size",
    "hash_ids",
    "token_ids",
)
"""In the order in which they are written."""


class NativeCsv(CsvFormat):
    """``arrival_s``, ``prompt_tokens``, ``output_tokens`` and what else a row may know."""

    name = "csv"
    recognised_by = "CSV with arrival_s, prompt_tokens, output_tokens"
    units = "seconds, tokens"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    prefix_identity = "token_ids, or hash_ids with hash_block_size (rounded up or down)"
    licence = "whoever wrote the file"
    required = _REQUIRED
    optional = tuple(column for column in COLUMNS if column not in _REQUIRED)
    _native: ClassVar[Native] = Native()

    def parse(self, line: int, fields: dict[str, str]) -> Row:
        record: dict[str, Any] = {}
        for name, text in fields.items():
            if text == "":
                # No ids at all is an identity (a prompt shorter than a block): not an unknown one.
                if name != "hash_ids" or fields.get("hash_block_size", "") == "":
                    continue
                record[name] = []
            elif name in _LISTS:
                record[name] = [_integer(item, name) for item in text.split(" ")]
            elif name in _NAMES:
                record[name] = text
            elif name in COLUMNS:
                record[name] = _number(text, name)
        for name in self.required:
            if name not in record:
                raise RowError(f"{name} missing")
        return self._native.parse(line, record)


def _number(text: str, name: str) -> Any:
    try:
        return to_number(text)
    except RowError as error:
        raise RowError(f"{name} is {error.reason}", error.detail) from None


def _integer(text: str, name: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 19):
        raise RowError(f"{name} holds something that is not an integer", repr(text[:40]))
    return int(text)
