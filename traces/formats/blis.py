"""TraceV2 of BLIS (inference-sim): CSV in microseconds, with a YAML header above it or in a file beside it.

https://github.com/inference-sim/inference-sim, sim/workload/tracev2.go. Of the header, two fields matter
here: ``time_unit`` and ``warm_up_requests``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO, ClassVar, Literal

import numpy as np

from blockmanager.content import NO_EXTRA_KEYS, ExtraKeys, HashedContent
from traces.formats.base import (
    MICROSECONDS,
    BadRow,
    CsvFormat,
    Head,
    Row,
    RowError,
    TraceError,
    decoded,
    field_number,
    shown,
    text_lines,
    time_ns,
    tokens,
    whole,
)

_PIECE_TOKENS = 16
"""Prompts of a group with prefixes of different length share the full pieces that both have."""
_YAML = re.compile(r"\s*(?:#.*|---|\.\.\.|- .*|([A-Za-z_]\w*)\s*:(.*))")
_MICROSECONDS = ("", "us", "µs", "microseconds", "microsecond")
_WARM_UP = frozenset({"Warm-up request of the recording, used like the others"})


class Blis(CsvFormat):
    """``arrival_time_us``, ``input_tokens``, ``output_tokens``, ``prefix_group``, ``prefix_length``.

    ``input_tokens`` is what follows a group's prefix, so the prompt is both together, or what the server
    counted (``server_input_tokens``) where that was recorded.
    """

    name = "blis"
    recognised_by = (
        "CSV with arrival_time_us, input_tokens, output_tokens (a YAML header may be above)"
    )
    units = "microseconds, tokens"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    prefix_identity = "prefix_group: its prompts share their first prefix_length tokens"
    licence = "whoever wrote the file"
    assumes = "Requests arrive at arrival_time_us, when they were due, not at send_time_us."
    required = ("arrival_time_us", "input_tokens", "output_tokens")
    optional = (
        "request_id",
        "client_id",
        "tenant_id",
        "slo_class",
        "vllm_priority",
        "session_id",
        "round_index",
        "prefix_group",
        "prefix_length",
        "streaming",
        "text_tokens",
        "image_tokens",
        "audio_tokens",
        "video_tokens",
        "reason_ratio",
        "model",
        "deadline_us",
        "slo_target_us",
        "server_input_tokens",
        "send_time_us",
        "first_chunk_time_us",
        "last_chunk_time_us",
        "num_chunks",
        "status",
        "error_message",
        "finish_reason",
        "x_request_id",
        "adapter",
        "think_time_us",
    )

    def match(self, head: Head) -> int:
        if score := super().match(head):
            return score
        return len(self.required) if head.starts_with(b"trace_version:") else 0

    def rows(self, source: BinaryIO) -> Iterator[Row | BadRow]:
        lines = text_lines(source)
        header: dict[str, str] = {}
        for number, line in lines:
            match = None if b"," in line and b"arrival_time_us" in line else _yaml(line)
            if match is None:  # the table, or what it lacks is named
                return self._table(chain([(number, line)], lines), header)
            if match[1]:
                header[match[1]] = match[2].strip().strip("'\"")
        return iter(())  # the header alone: its rows are in the file beside it

    def _table(
        self, lines: Iterator[tuple[int, bytes]], header: dict[str, str]
    ) -> Iterator[Row | BadRow]:
        if header.get("time_unit", "") not in _MICROSECONDS:
            raise TraceError(f"time_unit is {shown(header['time_unit'])}, expected microseconds")
        warm_up = header.get("warm_up_requests", "0")
        num_warm_up = int(warm_up) if warm_up.isascii() and warm_up.isdigit() else 0
        for number, row in enumerate(self.table(lines), 1):
            if number <= num_warm_up and isinstance(row, Row):
                row = row._replace(remarks=_WARM_UP)
            yield row

    def parse(self, line: int, fields: dict[str, str]) -> Row:
        given = {name: text for name, text in fields.items() if text.strip()}
        status = given.get("status", "ok")
        if status != "ok":
            raise RowError(
                f"failed request: status is {shown(status)}", shown(given.get("error_message", ""))
            )
        missing = [name for name in self.required if name not in given]
        if missing:
            raise RowError(f"{', '.join(missing)} missing")
        arrival_ns = _time(given, "arrival_time_us")
        deadline_ns = None
        if "deadline_us" in given and (deadline := _time(given, "deadline_us")):
            deadline_ns = deadline - arrival_ns
            if deadline_ns <= 0:
                raise RowError("deadline_us is not after the arrival")
        prefix_tokens = _count(given, "prefix_length") if "prefix_group" in given else 0
        prompt_tokens = _count(given, "server_input_tokens") or (
            prefix_tokens + _count(given, "input_tokens")
        )
        prefix_tokens = min(prefix_tokens, prompt_tokens)
        adapter = given.get("adapter")
        return Row(
            line=line,
            arrival_ns=arrival_ns,
            prompt_tokens=tokens(prompt_tokens, "input_tokens"),
            output_tokens=tokens(field_number(given, "output_tokens"), "output_tokens"),
            id=given.get("request_id"),
            content=_prefix(given["prefix_group"], prefix_tokens) if prefix_tokens else None,
            priority=_count(given, "vllm_priority"),
            deadline_ns=deadline_ns,
            session_id=given.get("session_id"),
            extra_keys=NO_EXTRA_KEYS if adapter is None else ExtraKeys(lora=adapter),
        )


def _yaml(line: bytes) -> re.Match[str] | None:
    """A line of a YAML header; ``None`` for anything else."""
    try:
        return _YAML.fullmatch(decoded(line))
    except RowError:
        return None


def _time(given: dict[str, str], name: str) -> int:
    return time_ns(field_number(given, name), name, MICROSECONDS)


def _count(given: dict[str, str], name: str) -> int:
    return whole(field_number(given, name), name) if name in given else 0


def _prefix(group: str, num_tokens: int) -> HashedContent:
    """The first tokens of every prompt of a group; what follows them is unknown."""
    first = int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") >> 2
    ids = first + np.arange(-(-num_tokens // _PIECE_TOKENS), dtype=np.int64)
    return HashedContent(ids, _PIECE_TOKENS, num_tokens)
