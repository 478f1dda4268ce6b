"""Azure LLM inference traces of 2023 to 2025: CSV with a date and two lengths.

https://github.com/Azure/AzurePublicDataset. The multimodal trace of 2025 adds ``NumImages``. The
clock has 7 decimals (100 ns), which the standard library's parsers refuse or cut, so it is read here.
"""

from __future__ import annotations

import re
from datetime import date
from functools import lru_cache
from typing import ClassVar, Literal

from traces.formats.base import (
    NO_REMARKS,
    CsvFormat,
    Row,
    RowError,
    field_number,
    shown,
    tokens,
    whole,
)

_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):?(\d\d))?",
    re.ASCII,
)
_IMAGES = frozenset(
    {"Images are taken to be counted in ContextTokens; encoding them costs nothing here"}
)


class Azure(CsvFormat):
    """``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``."""

    name = "azure"
    recognised_by = "CSV with TIMESTAMP, ContextTokens, GeneratedTokens"
    units = "date and time with up to 9 decimals (no zone: UTC), tokens"
    clock: ClassVar[Literal["relative", "absolute"]] = "absolute"
    prefix_identity = "none"
    licence = "CC-BY-4.0 (Azure Public Dataset)"
    required = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    optional = ("NumImages",)

    def parse(self, line: int, fields: dict[str, str]) -> Row:
        has_images = "NumImages" in fields and whole(field_number(fields, "NumImages"), "NumImages")
        return Row(
            line=line,
            arrival_ns=timestamp_ns(fields["TIMESTAMP"], "TIMESTAMP"),
            prompt_tokens=tokens(field_number(fields, "ContextTokens"), "ContextTokens"),
            output_tokens=tokens(field_number(fields, "GeneratedTokens"), "GeneratedTokens"),
            remarks=_IMAGES if has_images else NO_REMARKS,
        )


@lru_cache(maxsize=64)
def _day(text: str) -> int:
    """Days since 1970-01-01. Raises ``ValueError``."""
    return date.fromisoformat(text).toordinal() - date(1970, 1, 1).toordinal()


def timestamp_ns(text: str, name: str) -> int:
    """ns since 1970 of ``YYYY-MM-DD HH:MM:SS.fffffff``, exact. Raises `RowError`."""
    match = _TIMESTAMP.fullmatch(text.strip())
    if match is None:
        raise RowError(f"{name} is not a date and time", shown(text))
    day, hour, minute, second, fraction, sign, zone_hour, zone_minute = match.groups()
    try:
        days = _day(day)
    except ValueError:
        raise RowError(f"{name} is not a date and time", shown(text)) from None
    if not (hour < "24" and minute < "60" and second < "60"):
        raise RowError(f"{name} is not a date and time", shown(text))
    seconds = days * 86_400 + int(hour) * 3_600 + int(minute) * 60 + int(second)
    if sign:
        offset = int(zone_hour) * 3_600 + int(zone_minute) * 60
        seconds -= offset if sign == "+" else -offset
    time = seconds * 10**9 + (int(fraction.ljust(9, "0")) if fraction else 0)
    if not 0 <= time < 2**63:
        raise RowError(f"{name} is out of range", shown(text))
    return time
