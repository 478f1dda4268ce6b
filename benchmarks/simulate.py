"""Whole simulated runs: requests per CPU second, reading the trace and writing files not counted."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Spread, cpu_seconds, row
from scheduler import Request
from simulator.kernel_run import is_installed
from simulator.run import run
from simulator.settings import Options, Setup, resolve
from traces import Trace, default_trace_path, read_trace, stream_trace
from traces.workload import Arrival


def fixed_load(count: int, rate: float) -> Trace:
    """Poisson arrivals of 1,024 prompt and 128 output tokens, of unknown content."""
    times = np.cumsum(np.random.default_rng(1).exponential(1 / rate, count))
    arrivals = [
        Arrival(Request(id=str(i), arrival_ns=int(time_s * 1e9), num_prompt_tokens=1024), 128)
        for i, time_s in enumerate(times.tolist())
    ]
    return Trace(
        path=Path(f"1,024 in and 128 out, {rate:g} a second"),
        format="made here",
        sha256="",
        num_rows=count,
        arrivals=arrivals,
        skipped=[],
        notes=[],
    )


def simulated_traces(paths: list[Path], runs: int) -> Iterator[dict[str, Any]]:
    setup = resolve(Options(kv_gb="60"))
    fixed = fixed_load(10_000, 6.0)
    if is_installed():
        yield _first_use(setup, fixed)
    traces = [read_trace(default_trace_path()), fixed, *map(read_trace, paths)]
    for trace in traces:
        yield _row(trace, "", cpu_seconds(lambda trace=trace: run(setup, trace), runs))
    for trace in traces[1:]:
        if any(arrival.request.content is not None for arrival in trace.arrivals):
            continue  # the simple loop has served it already
        simple = cpu_seconds(lambda trace=trace: run(setup, trace, compiled=False), 1)
        yield _row(trace, ", simple loop", simple)


def a_million() -> Iterator[dict[str, Any]]:
    """A million requests (12 a second, a day of them) from a file, once, for time and memory: read,
    simulated, summed up."""
    code = (
        "import resource, sys, time\n"
        "from simulator.run import run\n"
        "from simulator.settings import Options, resolve\n"
        "from traces import stream_trace\n"
        "start = time.process_time()\n"
        "run(resolve(Options(kv_gb='60')), stream_trace(sys.argv[1]))\n"
        "print(time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "million.jsonl"
        with path.open("w") as file:
            for request, output_tokens, _ in fixed_load(1_000_000, 12.0):
                row_of_file = {
                    "arrival_s": request.arrival_ns / 1e9,
                    "prompt_tokens": request.num_prompt_tokens,
                    "output_tokens": output_tokens,
                }
                file.write(json.dumps(row_of_file) + "\n")
        start = time.process_time()
        for _ in stream_trace(path):
            pass
        reading = time.process_time() - start
        done = subprocess.run(
            [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
        )
    seconds, kib = map(float, done.stdout.split())
    for name, unit, value in (
        ("a million requests: read and simulated", "requests/CPU s", 1e6 / seconds),
        ("a million requests: only read", "requests/CPU s", 1e6 / reading),
        ("a million requests: peak memory", "GiB", kib / 2**20),
    ):
        yield row(name, unit, value, value, value)


def _row(trace: Trace, how: str, spread: Spread) -> dict[str, Any]:
    count = len(trace.arrivals)
    return spread.rate(f"simulate {trace.path.name}: {count:,}{how}", count)


def _first_use(setup: Setup, trace: Trace) -> dict[str, Any]:
    """What the first compiled run of a process costs more than the next: loading, or compiling."""
    start = time.process_time()
    run(setup, trace)
    first = time.process_time() - start
    start = time.process_time()
    run(setup, trace)
    extra = first - (time.process_time() - start)
    return row("first compiled run of a process, more than the next", "s", extra, extra, extra)
