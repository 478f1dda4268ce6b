"""A trace on the engine: arrivals at their times, output lengths forced, and a run record of it.

The same requests, the same scheduler and the same record as in a simulation, with measured times.
"""

from __future__ import annotations

import heapq
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blockmanager.content import HashedContent, TokenContent
from gpu_backend.engine import Engine, Progress, RequestError
from gpu_backend.llm import Built, EngineOptions
from gpu_backend.memory import bytes_per_block
from gpu_backend.sampling import SamplingParams
from records.metrics import summarize
from records.recorder import Recorder
from records.run import RunRecord
from records.slo import NO_LIMITS, Limits
from scheduler.request import Request
from traces.closed import FixedConcurrency
from traces.load import AnyTrace, load_settings
from traces.sessions import SessionTrace
from traces.workload import Arrival, OpenLoop, Workload

Pace = Literal["real", "busy"]
"""``real``: arrivals come when they come. ``busy``: the clock counts steps only and jumps over idle
time, so that a quiet trace is done sooner; what a request sees is the same."""


class PromptMaker:
    """Token ids for prompts of which a trace knows the length, and perhaps what they share.

    Equal hash ids give equal tokens; the rest is drawn by chance. Same seed, same tokens.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size, self._seed = vocab_size, seed

    def __call__(self, arrival: Arrival, number: int) -> npt.NDArray[np.int64]:
        """Of the ``number``-th request: int64 ``[num_prompt_tokens]``, and behind it the answer where
        the trace knows that."""
        request, transcript = arrival.request, arrival.transcript
        num_tokens = request.num_prompt_tokens
        if transcript is not None:
            num_tokens += arrival.output_tokens
        content = request.content if transcript is None else transcript
        if isinstance(content, TokenContent):
            shared = content.token_ids % self._vocab_size
        elif isinstance(content, HashedContent):
            size = content.hash_block_size
            parts = [self._draw(size, 1, int(hash_id)) for hash_id in content.hash_ids]
            shared = np.concatenate(parts)[: content.num_tokens] if parts else _NOTHING
        else:
            shared = _NOTHING
        rest = num_tokens - len(shared)
        return np.concatenate([shared, self._draw(rest, 0, number)])

    def _draw(self, count: int, kind: int, number: int) -> npt.NDArray[np.int64]:
        seed = (self._seed, kind, number & (2**64 - 1))
        return np.random.default_rng(seed).integers(0, self._vocab_size, count)


_NOTHING = np.zeros(0, np.int64)


class Replayed(NamedTuple):
    record: RunRecord
    seconds: float
    """Of the whole replay, on the wall."""


def replay(
    built: Built,
    options: EngineOptions,
    trace: AnyTrace,
    *,
    pace: Pace = "real",
    limits: Limits = NO_LIMITS,
    most_requests: int | None = None,
    users: int | None = None,
    params: SamplingParams | None = None,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Replayed:
    """Serve a trace; ``built`` must have been made with ``tell_tokens=False``.

    ``params`` are how tokens are sampled (``None`` = greedy); lengths are the trace's. ``users``:
    so many requests (of sessions: sessions) under way, the next as one ends.
    """
    recorder = Recorder(built.kv.num_blocks)
    clock = _Clock(pace)
    driver = _Driver(
        built.engine, recorder, clock, options.seed, params or SamplingParams(temperature=0)
    )
    start = time.perf_counter()
    driver.run(_workload(trace, most_requests, users), on_progress)
    seconds = time.perf_counter() - start
    settings = run_settings(built, options, trace, pace, most_requests, users)
    requests, steps = recorder.requests.columns(), recorder.steps.columns()
    evictions = built.engine.scheduler.blocks.pool.num_evictions
    summary = summarize(requests, steps, recorder.gaps, settings, limits, evictions=evictions)
    return Replayed(RunRecord(settings, requests, steps, recorder.gaps, summary), seconds)


def _workload(trace: AnyTrace, most_requests: int | None, users: int | None) -> Workload:
    if isinstance(trace, SessionTrace):
        return trace.workload(users=users)
    arrivals: Iterable[Arrival] = trace
    if most_requests is not None:
        arrivals = _first(trace, most_requests)
    return OpenLoop(arrivals) if users is None else FixedConcurrency(arrivals, users)


def _first(trace: Iterable[Arrival], count: int) -> Iterator[Arrival]:
    for number, arrival in enumerate(trace):
        if number < count:  # the rest is read too: a stream is complete at its end only
            yield arrival


class _Clock:
    """Nanoseconds since the start of the trace."""

    def __init__(self, pace: Pace) -> None:
        self._is_real = pace == "real"
        self._zero_ns = time.perf_counter_ns()
        self._busy_ns = 0

    @property
    def now_ns(self) -> int:
        return time.perf_counter_ns() - self._zero_ns if self._is_real else self._busy_ns

    def step(self, start_ns: int, duration_ns: int) -> int:
        """Start of a step that took ``duration_ns`` from ``start_ns`` of ``perf_counter_ns``."""
        if self._is_real:
            return start_ns - self._zero_ns
        before = self._busy_ns
        self._busy_ns += duration_ns
        return before

    def wait_until(self, time_ns: int) -> None:
        if self._is_real:
            time.sleep(max(time_ns - self.now_ns, 0) / 1e9)
        self._busy_ns = max(self._busy_ns, time_ns)


class _Coming:
    """Arrivals still to come: those that are known from the start, and those that answers bring."""

    def __init__(self, initial: Iterator[Arrival]) -> None:
        self._initial = initial
        self._next = next(initial, None)
        self._following: list[tuple[int, int, Arrival]] = []
        self._count = 0

    def __bool__(self) -> bool:
        return self._next is not None or bool(self._following)

    def add(self, arrival: Arrival) -> None:
        self._count += 1
        entry = (arrival.request.arrival_ns, self._count, arrival)
        heapq.heappush(self._following, entry)

    @property
    def next_ns(self) -> int:
        """Time of the next one; there must be one."""
        times = [] if self._next is None else [self._next.request.arrival_ns]
        return min(times + [entry[0] for entry in self._following[:1]])

    def due(self, now_ns: int) -> Arrival | None:
        """The next that has arrived by then; at one instant those known from the start come first."""
        if not self or self.next_ns > now_ns:
            return None
        first = self._next
        if first is not None and first.request.arrival_ns == self.next_ns:
            self._next = next(self._initial, None)
            return first
        return heapq.heappop(self._following)[2]


class _Driver:
    """Requests in, steps and rows out."""

    def __init__(
        self, engine: Engine, recorder: Recorder, clock: _Clock, seed: int, params: SamplingParams
    ) -> None:
        self._engine, self._recorder, self._clock = engine, recorder, clock
        self._prompts = PromptMaker(engine.executor.model.config.vocab_size, seed)
        self._params = params
        self._num_arrived = 0
        self._under_way: dict[str, Arrival] = {}

    def run(self, workload: Workload, on_progress: Callable[[int], None]) -> None:
        """Serve a workload to its end."""
        engine, clock, recorder = self._engine, self._clock, self._recorder
        self._workload = workload
        coming = self._coming = _Coming(workload.initial())
        while coming or engine.num_unfinished:
            now_ns = clock.now_ns
            while (arrival := coming.due(now_ns)) is not None:
                self._arrive(arrival)
            self._after(engine.expire(now_ns), now_ns)
            if not engine.num_unfinished:
                if coming:
                    clock.wait_until(coming.next_ns)
                continue
            step = engine.step()
            if not step.plan:
                recorder.idle_preemptions(step.plan)
                if not step.plan.preempted:
                    self._wait()
                continue
            start_ns = clock.step(step.start_ns, step.duration_ns)
            recorder.started(step.plan, start_ns)
            recorder.step(step.plan, step.outcome, start_ns, step.duration_ns, step.num_running)
            self._after(step.progress, start_ns + step.duration_ns)
            on_progress(recorder.num_done)

    def _after(self, progress: Progress, now_ns: int) -> None:
        """Rows of who ended otherwise than by a step, and what the ends of requests bring about."""
        self._recorder.finished(progress.ended, now_ns)
        for output in progress.finished:
            arrival = self._under_way.pop(output.request_id)
            self._follow(arrival.request, arrival.output_tokens, now_ns)

    def _follow(self, request: Request, output_tokens: int, now_ns: int) -> None:
        for arrival in self._workload.on_finish(request, output_tokens, now_ns):
            self._coming.add(arrival)

    def _arrive(self, arrival: Arrival) -> None:
        request = arrival.request
        if arrival.transcript is not None:
            known = self._engine.scheduler.known_tokens(request, arrival.transcript)
            if known is not arrival.transcript:
                # Equal prompts have to stay equal: they are drawn from what names all of them alike.
                arrival = arrival._replace(transcript=None)
        tokens = self._prompts(arrival, self._num_arrived)
        prompt, answer = np.split(tokens, [request.num_prompt_tokens])
        self._num_arrived += 1
        try:
            self._engine.add_request(
                request,
                prompt,
                self._params,
                forced_tokens=arrival.output_tokens,
                answer_ids=answer.tolist() if len(answer) else None,
                transcript=arrival.transcript,
            )
        except RequestError as error:
            self._recorder.refused(request, str(error).partition(": ")[2])
            self._follow(request, 0, self._clock.now_ns)
            return
        self._under_way[request.id] = arrival
        self._recorder.arrived(request, self._engine.sequences_of(request.id))

    def _wait(self) -> None:
        """Nobody can compute now (a policy lets nobody in): until an arrival or a deadline."""
        times = [self._engine.scheduler.next_deadline()]
        times.append(self._coming.next_ns if self._coming else None)
        known = [time_ns for time_ns in times if time_ns is not None]
        if not known:
            raise RuntimeError("nobody can compute, and nothing that is known will change that")
        self._clock.wait_until(min(known))


def run_settings(
    built: Built,
    options: EngineOptions,
    trace: AnyTrace,
    pace: Pace,
    most_requests: int | None = None,
    users: int | None = None,
) -> dict[str, Any]:
    """run.json of a replay; its names are those of a simulation where both have the setting."""
    load = load_settings(trace, users)
    if most_requests is not None:
        # Of a part of the file there is no hash: it is another trace than the whole.
        load |= {"trace": f"{load['trace']}, first {most_requests}", "trace_sha256": None}
    blocks = built.engine.scheduler.blocks
    model, config = built.model.config, built.config
    block_bytes = bytes_per_block(
        model, options.block_size, built.model.dtype, options.kv_cache_dtype
    )
    return {
        "model": model.name,
        "device": device_name(built.model.device),
        "weight_dtype": options.dtype,
        "kv_cache_dtype": options.dtype
        if options.kv_cache_dtype == "auto"
        else options.kv_cache_dtype,
        "sampling": "greedy, output lengths and known answers forced",
        "attention": built.attention,
        "cuda_graphs": built.engine.executor.graphs is not None,
        "random_weights_seed": options.weights_seed,
        **load,
        "pace": pace,
        "num_replicas": 1,
        "num_blocks": built.kv.num_blocks,
        "num_gpu_blocks": built.kv.num_blocks + 1,
        "num_swap_blocks": host.num_blocks if (host := blocks.host_pool) else 0,
        "watermark_blocks": blocks.watermark_blocks,
        "kv_bytes": built.kv.num_blocks * block_bytes,
        "block_size": options.block_size,
        "bytes_per_token": block_bytes // options.block_size,
        "bytes_per_block": block_bytes,
        "weight_bytes_per_gpu": built.model.num_bytes,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": config.max_model_len,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": options.enable_prefix_caching,
        "long_prefill_token_threshold": config.long_prefill_token_threshold,
        "watermark": options.watermark,
        "scheduling_policy": options.scheduling_policy,
        "preemption_mode": config.preemption_mode,
        "parallel_sampling": config.parallel_sampling,
        "peak_flops": None,  # nobody counts FLOPs and bytes of real steps
        "peak_bandwidth": None,
        "seed": options.seed,
        "versions": versions(),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    try:
        ours = version("kvplan")
    except PackageNotFoundError:  # run from a checkout that was never installed
        ours = "unknown"
    return {
        "kvplan": ours,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }
