"""Traces as the simulators Vidur and splitwise-sim keep them: CSV, seconds from the start.

https://github.com/microsoft/vidur, data/processed_traces, and https://github.com/Mutinifni/splitwise-sim.
Sarathi-Serve's length statistics have Vidur's columns.
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


class Vidur(CsvFormat):
    """``num_prefill_tokens``, ``num_decode_tokens`` and, but for length statistics, ``arrived_at``."""

    name = "vidur"
    recognised_by = "CSV with num_prefill_tokens, num_decode_tokens (and arrived_at)"
    units = "seconds, tokens; the files of length statistics have no arrivals"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    prefix_identity = "none"
    licence = "MIT (the repository of the public files; its splitwise files are Azure's, CC-BY-4.0)"
    required = ("num_prefill_tokens", "num_decode_tokens")
    optional = ("arrived_at", "num_total_tokens", "pd_ratio")

    def parse(self, line: int, fields: dict[str, str]) -> Row:
        arrival_ns = None
        if "arrived_at" in fields:
            arrival_ns = time_ns(field_number(fields, "arrived_at"), "arrived_at", SECONDS)
        prompt, output = (tokens(field_number(fields, name), name) for name in self.required)
        return Row(line=line, arrival_ns=arrival_ns, prompt_tokens=prompt, output_tokens=output)


class SplitwiseSim(CsvFormat):
    """``arrival_timestamp`` (s), ``prompt_size``, ``token_size``, ``request_id``."""

    name = "splitwise-sim"
    recognised_by = "CSV with arrival_timestamp, prompt_size, token_size"
    units = "seconds, tokens"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    prefix_identity = "none"
    licence = "MIT (the repository of the public files)"
    required = ("arrival_timestamp", "prompt_size", "token_size")
    optional = ("request_id", "request_type", "application_id", "batch_size")

    def parse(self, line: int, fields: dict[str, str]) -> Row:
        if "batch_size" in fields and (size := field_number(fields, "batch_size")) != 1:
            raise RowError("batch_size is not 1: several prompts in one row", str(size)[:40])
        number = fields.get("request_id", "").strip()
        arrival = field_number(fields, "arrival_timestamp")
        return Row(
            line=line,
            arrival_ns=time_ns(arrival, "arrival_timestamp", SECONDS),
            prompt_tokens=tokens(field_number(fields, "prompt_size"), "prompt_size"),
            output_tokens=tokens(field_number(fields, "token_size"), "token_size"),
            id=label(number, "request_id") if number else None,
        )
