"""What reading a trace costs beside simulating it: ``python -m benchmarks.reading TRACE ...``.

CPU seconds of ``read_trace`` and of a simulated run of what was read, least of three, in one process.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.__main__ import machine
from simulator.run import run
from simulator.settings import Options, resolve
from traces import read_trace


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading", description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    args = parser.parse_args()
    print(machine())
    print(
        f"{'trace':<32}{'requests':>10}{'read (s)':>10}{'simulate (s)':>14}{'read / simulate':>17}"
    )
    for path in args.traces:
        reading, simulating = [], []
        for _ in range(3):
            start = time.process_time()
            trace = read_trace(path)
            read = time.process_time()
            run(resolve(Options(max_model_len=131_072)), trace)
            reading.append(read - start)
            simulating.append(time.process_time() - read)
        share = min(reading) / min(simulating)
        print(
            f"{path.name:<32}{trace.num_requests:>10,}{min(reading):>10.3f}{min(simulating):>14.3f}"
            f"{share:>16.1%}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
