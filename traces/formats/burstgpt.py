"""BurstGPT traces: CSV whose columns have spaces in their names.

https://github.com/HPMLL/BurstGPT. Versions 1 and 2 have no sessions; version 3 adds ``Session ID``
(empty on API rows) and ``Elapsed time``.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from traces.formats.base import (
    SECONDS,
    CsvFormat,
    Row,
    RowError,
    field_number,
    label,
    time_ns,
    tokens,
)


class BurstGpt(CsvFormat):
    """``Timestamp`` (s), ``Request tokens``, ``Response tokens`` (0 = the request failed)."""

    name = "burstgpt"
    recognised_by = "CSV with Timestamp, Request tokens, Response tokens"
    units = "seconds since midnight of the first day, tokens"
    clock: ClassVar[Literal["relative", "absolute"]] = "absolute"
    clock_zero = "the file counts from midnight of its first day"
    prefix_identity = "none"
    licence = "CC-BY-4.0 (BurstGPT)"
    required = ("Timestamp", "Request tokens", "Response tokens")
    optional = ("Model", "Total tokens", "Log Type", "Session ID", "Elapsed time")

    def parse(self, line: int, fields: dict[str, str]) -> Row:
        answer = field_number(fields, "Response tokens")
        if answer == 0:
            raise RowError("failed request: Response tokens is zero")
        session = fields.get("Session ID", "").strip()
        return Row(
            line=line,
            arrival_ns=time_ns(field_number(fields, "Timestamp"), "Timestamp", SECONDS),
            prompt_tokens=tokens(field_number(fields, "Request tokens"), "Request tokens"),
            output_tokens=tokens(answer, "Response tokens"),
            session_id=label(session, "Session ID") if session else None,
        )
