"""What each command line costs before it does anything: wall seconds of ``--help``."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import row

ROOT = Path(__file__).resolve().parent.parent


def start_up(runs: int) -> Iterator[dict[str, Any]]:
    for package in ("simulator", "blockmanager", "scheduler", "traces"):
        times = []
        for _ in range(runs + 1):
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", package, "--help"],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                check=True,
            )
            times.append(time.perf_counter() - start)
        times = times[1:]
        name = f"python -m {package} --help"
        yield row(name, "s (wall)", min(times), statistics.median(times), max(times))
