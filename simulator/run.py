"""One simulated run, from options and a trace to a run record and a verdict."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from records.metrics import summarize
from records.run import RunRecord
from scheduler.plan import StepResult
from scheduler.scheduler import RequestRefusedError, Scheduler
from simulator.kernel_run import WORTH_COMPILING, simulate_compiled, why_not
from simulator.recorder import Recorder
from simulator.replica import simulate
from simulator.settings import Setting, Setup
from simulator.verdict import Verdict, judge
from traces.trace import Trace
from traces.workload import Arrival, OpenLoop

NS = 1_000_000_000


class RunResult(NamedTuple):
    record: RunRecord
    verdict: Verdict


def package_version() -> str:
    try:
        return version("kvplan")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"


def run(
    setup: Setup,
    trace: Trace,
    *,
    on_progress: Callable[[int], None] | None = None,
    compiled: bool | None = None,
) -> RunResult:
    """Replay a trace on one replica.

    ``on_progress`` is called now and then with the number of requests that are done. ``compiled``
    says whether the compiled loop is used where it can be; ``None`` = for long traces. The record is
    the same either way.
    """
    scheduler = setup.scheduler()
    arrivals = _with_defaults(trace.arrivals, setup)
    num_warm = setup.settings["warm_start"].value
    if num_warm:
        warm_up(scheduler, arrivals[:num_warm])
    evictions_before = scheduler.blocks.pool.num_evictions
    recorder = Recorder(setup.num_blocks)
    until = setup.settings["until"].value
    until_ns = None if until is None else round(until * NS)
    tick = _throttled(on_progress, recorder)
    compiled = len(arrivals) >= WORTH_COMPILING if compiled is None else compiled
    if compiled and why_not(scheduler, setup.cost, arrivals, until_ns) is None:
        simulate_compiled(
            scheduler, setup.cost, recorder, arrivals, on_progress=on_progress or _silent
        )
    else:
        simulate(
            scheduler,
            setup.cost,
            recorder,
            OpenLoop(arrivals),
            until_ns=until_ns,
            on_progress=tick,
        )
    requests, steps = recorder.requests.columns(), recorder.steps.columns()
    settings = run_settings(setup, trace)
    evictions = scheduler.blocks.pool.num_evictions - evictions_before
    summary = summarize(
        requests,
        steps,
        recorder.gaps,
        settings,
        setup.limits,
        end_ns=until_ns,
        evictions=evictions,
    )
    verdict = judge(requests, steps, recorder.gaps, setup, summary)
    summary["bottleneck"] = verdict.as_bottleneck()
    return RunResult(RunRecord(settings, requests, steps, recorder.gaps, summary), verdict)


def warm_up(scheduler: Scheduler, arrivals: Sequence[Arrival]) -> None:
    """Serve the prompts of some requests, one after another and outside the run's time, so that
    the prefix cache holds what they leave behind."""
    for arrival in arrivals:
        request = replace(
            arrival.request, id=f"warm-up {arrival.request.id}", max_tokens=1, n=1, deadline_ns=None
        )
        try:
            scheduler.add(request)
        except RequestRefusedError:
            continue  # it will be refused in the run too, and counted there
        while scheduler.num_unfinished:
            plan = scheduler.schedule()
            scheduler.update(plan, StepResult(0))
            if not plan and not plan.preempted:  # a policy that lets nobody in
                scheduler.abort(request.id)


def _with_defaults(arrivals: list[Arrival], setup: Setup) -> list[Arrival]:
    """Requests with the flags' ``max_tokens`` and deadline where their rows have none."""
    max_tokens = setup.settings["max_tokens"].value
    deadline = setup.settings["deadline"].value
    if max_tokens is None and deadline is None:
        return arrivals
    changed = []
    for request, output_tokens in arrivals:
        changes: dict[str, Any] = {}
        if max_tokens is not None and request.max_tokens is None:
            changes["max_tokens"] = max_tokens
        if deadline is not None and request.deadline_ns is None:
            changes["deadline_ns"] = request.arrival_ns + round(deadline * NS)
        changed.append(Arrival(replace(request, **changes) if changes else request, output_tokens))
    return changed


def _silent(done: int) -> None:
    """Nobody watches."""


def _throttled(on_progress: Callable[[int], None] | None, recorder: Recorder) -> Callable[[], None]:
    if on_progress is None:
        return lambda: None
    last = time.monotonic()

    def tick() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 0.2:
            last = now
            on_progress(recorder.num_done)

    return tick


def run_settings(setup: Setup, trace: Trace) -> dict[str, Any]:
    """run.json: every resolved setting by name, and where each came from."""
    settings: dict[str, Any] = {name: setting.value for name, setting in setup.settings.items()}
    settings["model"] = setup.shape.name
    settings["gpu"] = setup.gpu.name
    settings |= {
        "trace": str(trace.path.name),
        "trace_format": trace.format,
        "trace_sha256": trace.sha256,
        "trace_rows": trace.num_rows,
        "trace_rows_skipped": [
            {"reason": s.reason, "rows": s.count, "lines": s.lines[:20]} for s in trace.skipped
        ],
        "prefix_identity": trace.has_identity,
        "num_replicas": 1,
        "num_swap_blocks": setup.num_swap_blocks,
        "watermark_blocks": setup.watermark_blocks,
        "bytes_per_token": setup.layout.bytes_per_token,
        "bytes_per_block": setup.layout.bytes_per_block,
        "weight_bytes_per_gpu": setup.weight_bytes,
        "peak_flops": setup.peak_flops,
        "peak_bandwidth": setup.gpu.memory_bandwidth,
        "cost_model_assumes": setup.cost.describe(),
        "warnings": setup.warnings,
        "seed": None,  # nothing in a run is drawn by chance
        "device": "simulated",
        "versions": {
            "kvplan": package_version(),
            "python": platform.python_version(),
            "numpy": sys.modules["numpy"].__version__,
        },
        "sources": {name: _source(setting) for name, setting in setup.settings.items()},
    }
    return settings


def _source(setting: Setting) -> dict[str, str]:
    return {"source": setting.source, "note": setting.note}
