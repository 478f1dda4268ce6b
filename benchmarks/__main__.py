"""Run the benchmarks, print a table, and write it with machine and commit to benchmarks/results/."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.blocks import block_operations
from benchmarks.peers import mocker, vllm_steps
from benchmarks.simulate import a_million, fixed_load, simulated_traces
from benchmarks.start import start_up
from benchmarks.steps import scheduler_steps
from traces import read_trace

ROOT = Path(__file__).resolve().parent.parent


def machine() -> dict[str, object]:
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "cpu": model,
        "python": platform.python_version(),
        "commit": commit or "unknown",
        "date": datetime.now(UTC).date().isoformat(),
    }


def figure(value: float | None) -> str:
    """Four digits, never in scientific notation."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each (5)")
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        help="simulate this trace too (may be repeated)",
    )
    parser.add_argument(
        "--million",
        action="store_true",
        help="also simulate a million requests (a process of its own)",
    )
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()
    rows = []
    plain = [trace for trace in map(read_trace, args.trace) if not trace.has_identity]
    for part in (
        simulated_traces(args.trace, args.runs),
        scheduler_steps(args.runs),
        block_operations(args.runs),
        start_up(args.runs),
        a_million() if args.million else (),
        mocker([fixed_load(10_000, 6.0), *plain], args.runs),
        vllm_steps(args.runs),
    ):
        for row in part:
            print(
                f"{row['name']:<62}{figure(row['median']):>10} {row['unit']:<15} "
                f"({figure(row['low'])} to {figure(row['high'])})",
                flush=True,
            )
            rows.append(row)
    if not args.no_write:
        folder = ROOT / "benchmarks" / "results"
        folder.mkdir(exist_ok=True)
        info = machine()
        path = folder / f"{info['date']}-{info['commit']}.json"
        path.write_text(json.dumps({"machine": info, "rows": rows}, indent=1) + "\n")
        print(f"written: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
