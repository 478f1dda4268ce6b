"""Rows that could not be used, by reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Skipped:
    """Rows left out for one reason."""

    reason: str
    lines: list[int]
    example: str
    """Detail of the first of them."""
    counted_as: str = "line"
    """What ``lines`` count, see ``TraceFormat.counted_as``."""

    @property
    def count(self) -> int:
        return len(self.lines)

    @property
    def where(self) -> str:
        return lines_text(self.lines, word=self.counted_as)

    def __str__(self) -> str:
        detail = f" ({self.example})" if self.example else ""
        return f"{self.reason}{detail}: {rows_text(self.count)}, {self.where}"


def rows_text(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def lines_text(lines: Sequence[int], most: int = 5, word: str = "line") -> str:
    """``line 3`` or ``lines 3, 5, 8, ...``."""
    text = ", ".join(map(str, lines[:most])) + (", ..." if len(lines) > most else "")
    return f"{word}{'s' if len(lines) > 1 else ''} {text}"
