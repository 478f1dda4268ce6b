"""What a run would be if its steps were somewhat shorter or longer than predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulator.cost.physical import PhysicalCost
from simulator.run import RunResult, run
from simulator.settings import Setup

LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")


def with_band(result: RunResult, setup: Setup, users: int | None = None) -> RunResult:
    """Run the load twice more, with every step as short and as long as the factors' residuals make
    likely: the result with ``band`` in its summary.

    Step times are scaled, not latencies: near the knee of a queue a few percent of a step are a multiple of a
    wait. Where step times were given, ``result`` as it is.
    """
    if setup.band is None or not isinstance(setup.cost, PhysicalCost):
        return result
    found: dict[str, Any] = {"scale": [setup.band.low, setup.band.high], "why": setup.band.why}
    for name, scale in (("low", setup.band.low), ("high", setup.band.high)):
        cost = setup.cost.slower(scale)
        other = run(replace(setup, cost=cost), result.trace, users=users).record.summary
        found[name] = {
            **{latency: other[latency] for latency in LATENCIES},
            "makespan_s": other["makespan_s"],
            "attainment": other["goodput"]["attainment"],
            "goodput_requests_per_s": other["goodput"]["requests_per_s"],
            "peak_usage": other["kv"]["peak_usage"],
            "preemptions": other["kv"]["preemptions"],
        }
    summary = {**result.record.summary, "band": found}
    return result._replace(record=replace(result.record, summary=summary))
