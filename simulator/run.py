"""One simulated run, from options and a trace to a run record and a verdict."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, islice
from typing import Any, NamedTuple

from records.metrics import summarize
from records.recorder import Recorder
from records.run import RunRecord
from scheduler.plan import StepResult
from scheduler.scheduler import RequestRefusedError, Scheduler
from simulator.kernel_run import WORTH_COMPILING, NotPlainError, simulate_compiled, why_not
from simulator.replica import simulate
from simulator.settings import Setting, Setup
from simulator.verdict import Verdict, judge
from traces.closed import FixedConcurrency
from traces.formats.base import TraceError
from traces.load import AnyTrace, load_settings
from traces.sessions import SessionTrace
from traces.trace import NotStreamableError, TraceStream
from traces.workload import Arrival, OpenLoop, Workload

NS = 1_000_000_000


OnProgress = Callable[[int, float], None]


class RunResult(NamedTuple):
    record: RunRecord
    verdict: Verdict
    trace: AnyTrace
    """What was served; a stream that had to be sorted is held now."""
    asked: dict[str, int]
    """Output tokens that the trace has for each request that may not get them all (max_tokens,
    max_model_len, the whole pool)."""


def package_version() -> str:
    try:
        return version("kvplan")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"


def run(
    setup: Setup,
    trace: AnyTrace,
    *,
    on_progress: OnProgress | None = None,
    compiled: bool | None = None,
    strict: bool = False,
    users: int | None = None,
) -> RunResult:
    """Replay a trace on one replica.

    Parameters
    ----------
    trace
        A stream is read as the run goes. Where that shows that it cannot be streamed, it is read
        as a whole and the run starts again.
    on_progress
        Called now and then with the number of requests that are done, and the share of the load
        that they are.
    compiled
        Whether the compiled loop is used where it can be; ``None`` = for long traces. The record is
        the same either way.
    strict
        A request that would be refused is an error.
    users
        So many requests (of sessions: sessions) under way at once, whatever the trace's times are;
        ``None`` = as the trace has them.

    Raises
    ------
    TraceError
        For what is wrong with a stream, with a request (``strict``), or with --warm-start.
    SpillError
        The rows of a long run find no room on disk.
    OverflowError
        A time passes 64 bits.
    """
    while True:
        try:
            return _run(setup, trace, on_progress, compiled, strict, users)
        except NotStreamableError:
            assert isinstance(trace, TraceStream)
            trace = trace.read()
        except NotPlainError:  # the first requests were
            compiled = False


def _run(
    setup: Setup,
    trace: AnyTrace,
    on_progress: OnProgress | None,
    compiled: bool | None,
    strict: bool,
    users: int | None,
) -> RunResult:
    scheduler = setup.scheduler()
    load = _Load(trace, setup, scheduler)
    if strict:
        load.check()  # the whole of it, before the work
    arrivals = iter(load)
    num_warm = setup.settings["warm_start"].value or 0
    first = list(islice(arrivals, max(WORTH_COMPILING, num_warm)))
    if num_warm:
        if all(arrival.request.content is None for arrival in first[:num_warm]):
            if isinstance(trace, TraceStream):
                raise NotStreamableError("whether it says anything of prefixes shows at its end")
            if not trace.has_identity:
                raise TraceError(
                    f"--warm-start has no effect: {trace.path} does not say which prefixes are equal"
                )
        warm_up(scheduler, first[:num_warm])
    evictions_before = scheduler.blocks.pool.num_evictions
    recorder = Recorder(setup.num_blocks)
    until = setup.settings["until"].value
    until_ns = None if until is None else round(until * NS)
    compiled = len(first) >= WORTH_COMPILING if compiled is None else compiled
    all_arrivals = chain(first, arrivals)

    def report(done: int) -> None:
        if on_progress is not None:
            on_progress(done, load.share_of(done))

    workload: Workload
    if isinstance(trace, SessionTrace):
        workload = trace.workload(users=users)
    elif users is not None:
        workload = FixedConcurrency(all_arrivals, users)
    else:
        workload = OpenLoop(all_arrivals)
    is_open = isinstance(workload, OpenLoop)
    if compiled and is_open and why_not(scheduler, setup.cost, first, until_ns) is None:
        simulate_compiled(
            scheduler,
            setup.cost,
            recorder,
            all_arrivals,
            async_scheduling=setup.async_scheduling,
            frontend_ns=setup.frontend_ns,
            on_progress=report,
        )
    else:
        simulate(
            scheduler,
            setup.cost,
            recorder,
            workload,
            until_ns=until_ns,
            async_scheduling=setup.async_scheduling,
            frontend_ns=setup.frontend_ns,
            on_progress=_throttled(report, recorder) if on_progress else _silent,
        )
    requests, steps = recorder.requests.columns(), recorder.steps.columns()
    settings = run_settings(setup, trace, users)
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
    record = RunRecord(settings, requests, steps, recorder.gaps, summary)
    return RunResult(record, verdict, trace, load.asked)


class _Load:
    """Arrivals with the flags' ``max_tokens`` and deadline where their rows have none."""

    def __init__(self, trace: AnyTrace, setup: Setup, scheduler: Scheduler) -> None:
        self.asked: dict[str, int] = {}
        self._trace, self._scheduler = trace, scheduler
        self._num_read = 0
        self._max_tokens: int | None = setup.settings["max_tokens"].value
        deadline = setup.settings["deadline"].value
        self._deadline_ns = None if deadline is None else round(deadline * NS)
        capacity = setup.num_blocks * setup.layout.block_size
        self._most_tokens = min(setup.config.max_model_len, capacity)

    def check(self) -> None:
        """Raises ``TraceError`` for a request that would be refused."""
        for arrival in self:
            request = arrival.request
            if (reason := self._scheduler.refusal(request)) is not None:
                raise TraceError(
                    f"{self._trace.path}: request {request.id} would be refused: {reason}"
                )

    def share_of(self, done: int) -> float:
        """Which part of all requests these are, as far as one knows."""
        if isinstance(self._trace, TraceStream):
            return self._trace.share_read * done / max(self._num_read, 1)
        return done / self._trace.num_requests

    def __iter__(self) -> Iterator[Arrival]:
        self._num_read = 0
        for arrival in self._trace:
            self._num_read += 1
            request = arrival.request
            changes: dict[str, Any] = {}
            if self._max_tokens is not None and request.max_tokens is None:
                changes["max_tokens"] = self._max_tokens
            if self._deadline_ns is not None and request.deadline_ns is None:
                changes["deadline_ns"] = request.arrival_ns + self._deadline_ns
            if changes:
                request = replace(request, **changes)
            room = self._most_tokens - request.num_prompt_tokens
            if arrival.output_tokens > min(room, request.max_tokens or room):
                self.asked[request.id] = arrival.output_tokens * request.n
            yield arrival._replace(request=request)


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


def _silent() -> None:
    """Nobody watches."""


def _throttled(on_progress: Callable[[int], None], recorder: Recorder) -> Callable[[], None]:
    last = time.monotonic()

    def tick() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 0.2:
            last = now
            on_progress(recorder.num_done)

    return tick


def run_settings(setup: Setup, trace: AnyTrace, users: int | None) -> dict[str, Any]:
    """run.json: every resolved setting by name, and where each came from."""
    settings: dict[str, Any] = {name: setting.value for name, setting in setup.settings.items()}
    settings["model"] = setup.shape.name
    settings["gpu"] = setup.gpu.name
    settings |= {
        **load_settings(trace, users),
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
