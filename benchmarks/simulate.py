"""Whole simulated runs: requests per CPU second, reading the trace and writing files not counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import cpu_seconds
from simulator.run import run
from simulator.settings import Options, resolve
from traces import default_trace_path, read_trace


def simulated_traces(paths: list[Path], runs: int) -> Iterator[dict[str, Any]]:
    for path in [default_trace_path(), *paths]:
        trace = read_trace(path)
        setup = resolve(Options(kv_gb="60"))
        spread = cpu_seconds(lambda setup=setup, trace=trace: run(setup, trace), runs)
        count = len(trace.arrivals)
        yield {
            "name": f"simulate {path.name}: {count:,} requests, 60 GiB",
            "unit": "requests/CPU s",
            "low": count / spread.high,
            "median": count / spread.median,
            "high": count / spread.low,
        }
