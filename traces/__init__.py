"""Request traces: formats, workloads, what they look like, and a generator."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from traces.formats.base import TraceError
from traces.skipped import Skipped
from traces.trace import (
    NotStreamableError,
    Trace,
    TraceStream,
    iter_rows,
    read_trace,
    stream_trace,
)
from traces.workload import Arrival, OpenLoop, Workload

__all__ = [
    "Arrival",
    "NotStreamableError",
    "OpenLoop",
    "Skipped",
    "Trace",
    "TraceError",
    "TraceStream",
    "Workload",
    "default_trace_path",
    "find_trace",
    "iter_rows",
    "read_trace",
    "stream_trace",
]


SHIPPED = "chat.jsonl"


class FoundTrace(NamedTuple):
    path: Path
    origin: str
    """Where it comes from, if that is not what was asked for; else empty."""


def find_trace(given: str) -> FoundTrace:
    """The file, or the sample that ships under that name where there is no such file."""
    path = Path(given)
    if not path.exists() and given == SHIPPED:
        return FoundTrace(
            default_trace_path(),
            f"there is no {SHIPPED} here: this is the sample that ships with kvplan",
        )
    return FoundTrace(path, "")


def default_trace_path() -> Path:
    """The chat trace that ships with the package (traces/data/README.md says how it was made)."""
    from importlib.resources import files

    return Path(str(files("traces.data").joinpath("chat.jsonl")))
