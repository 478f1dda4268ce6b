"""What reading a trace costs beside simulating it: ``python -m benchmarks.reading TRACE ...``.

CPU seconds of ``read_trace`` and of a simulated run of what was read, in the simple loop and as the
command would run it (compiled, where that serves the trace); least of three, in one process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from benchmarks.__main__ import machine
from simulator.run import run
from simulator.settings import Options, resolve
from traces import read_trace

_T = TypeVar("_T")
_COLUMNS = ("requests", "read (s)", "simple loop (s)", "share", "as run (s)", "share")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading", description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    args = parser.parse_args()
    setup = resolve(Options(max_model_len=131_072))
    print(machine())
    print(f"{'trace':<32}" + "".join(f"{name:>17}" for name in _COLUMNS))
    for path in args.traces:
        read_s, trace = _least(lambda path=path: read_trace(path))
        simple_s, _ = _least(lambda trace=trace: run(setup, trace, compiled=False))
        as_run_s, _ = _least(lambda trace=trace: run(setup, trace))
        cells = (
            f"{trace.num_requests:,}",
            f"{read_s:.3f}",
            *(f"{simple_s:.3f}", f"{read_s / simple_s:.1%}"),
            *(f"{as_run_s:.3f}", f"{read_s / as_run_s:.1%}"),
        )
        print(f"{path.name:<32}" + "".join(f"{cell:>17}" for cell in cells), flush=True)
    return 0


def _least(work: Callable[[], _T]) -> tuple[float, _T]:
    """CPU seconds of the fastest of three, and what the last one made."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        result = work()
        seconds.append(time.process_time() - start)
    return min(seconds), result


if __name__ == "__main__":
    raise SystemExit(main())
