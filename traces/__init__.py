"""Request traces: formats, workloads, what they look like, and a generator."""

from __future__ import annotations

from pathlib import Path

from traces.formats.base import TraceError
from traces.trace import (
    NotStreamableError,
    Skipped,
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
    "iter_rows",
    "read_trace",
    "stream_trace",
]


def default_trace_path() -> Path:
    """The chat trace that ships with the package (traces/data/README.md says how it was made)."""
    from importlib.resources import files

    return Path(str(files("traces.data").joinpath("chat.jsonl")))
