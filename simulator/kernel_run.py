"""When the compiled loop may stand in for the simple one, and how its arrays become the record."""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from records.columns import IntArray
from records.recorder import Recorder
from scheduler.policies import FCFS
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from simulator.cost import CostModel
from simulator.cost.tables import price_tables
from traces.workload import Arrival

WORTH_COMPILING = 5000
"""Requests from which on the compiled loop is used: below, the simple one is done before the other is
loaded."""
_BUFFER_ROWS = 65_536
_LARGEST_STEP = 1 << 17
"""Tokens or sequences of a step up to which its price is put into tables: more take too long to fill."""
WINDOW_REQUESTS = 65_536
"""Arrivals taken from the stream at once (more, where a step is longer than they take to come)."""
_REASONS = ("stop", "length", "kv_exhausted")


class _Refused(NamedTuple):
    request: Request
    reason: str


def is_installed() -> bool:
    return importlib.util.find_spec("numba") is not None


def why_not(
    scheduler: Scheduler, cost: CostModel, arrivals: Sequence[Arrival], until_ns: int | None
) -> str | None:
    """What keeps a run out of the compiled loop, or ``None``."""
    config = scheduler.config
    if not is_installed():
        return "numba is not installed"
    if type(scheduler.policy) is not FCFS:
        return "the policy is not fcfs"
    if config.preemption_mode != "recompute":
        return "preemption by swap"
    if until_ns is not None:
        return "the run is stopped at a time"
    if (
        scheduler.num_unfinished
        or scheduler.blocks.pool.num_used
        or len(scheduler.blocks.pool.cache)
    ):
        return "the scheduler is not new"
    if max(config.max_num_seqs, config.max_num_batched_tokens) > _LARGEST_STEP:
        return "a step may be very large"
    for arrival in arrivals:
        if (objection := _objection(arrival, scheduler)) is not None:
            return objection
    if price_tables(cost, 1, 1) is None:
        return "the cost model has no tables"
    return None


def _objection(arrival: Arrival, scheduler: Scheduler) -> str | None:
    request = arrival.request
    if request.n != 1:
        return "a request with several outputs"
    if request.deadline_ns is not None:
        return "a request with a deadline"
    has_identity = request.content is not None or arrival.transcript is not None
    if scheduler.blocks.enable_prefix_caching and has_identity:
        return "prompts of known content"
    return None


class NotPlainError(Exception):
    """A request that the compiled loop cannot serve, met after others that it can."""


def simulate_compiled(
    scheduler: Scheduler,
    cost: CostModel,
    recorder: Recorder,
    arrivals: Iterable[Arrival],
    *,
    async_scheduling: bool = False,
    frontend_ns: int = 0,
    on_progress: Callable[[int], None] = lambda done: None,
    window_requests: int | None = None,
) -> None:
    """Run arrivals to which ``why_not`` has no objection; ``recorder`` gets the rows that
    ``simulate`` would leave.

    ``scheduler`` gives settings and refusals; its own state stays as it is. ``arrivals`` are taken
    ``window_requests`` at a time (``None`` = ``WINDOW_REQUESTS``) and let go of when they are done.
    Raises ``NotPlainError`` at the first arrival that ``why_not`` would object to.
    """
    from simulator import kernel

    config, blocks = scheduler.config, scheduler.blocks
    tables = price_tables(cost, config.max_num_batched_tokens, config.max_num_seqs)
    assert tables is not None, "why_not() was not asked"
    scalars = np.zeros(kernel.NUM_SCALARS, np.int64)
    scalars[kernel.FREE] = blocks.num_blocks
    settings = np.array(
        [
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.long_prefill_token_threshold,
            config.max_model_len,
            config.enable_chunked_prefill,
            config.scheduler_reserve_full_isl,
            blocks.watermark_blocks,
            blocks.block_size,
            blocks.num_blocks,
            frontend_ns,
            async_scheduling,
        ],
        np.int64,
    )
    running = np.zeros(config.max_num_seqs + 1, np.int64)
    grants = np.zeros(config.max_num_seqs + 1, np.int64)
    steps = np.zeros((_BUFFER_ROWS, kernel.NUM_STEP_COLUMNS), np.int64)
    flops, num_bytes = np.zeros(_BUFFER_ROWS), np.zeros(_BUFFER_ROWS)
    num_gaps = 2 * _BUFFER_ROWS + 2 * config.max_num_seqs
    gap_values, gap_counts = np.zeros(num_gaps, np.int64), np.zeros(num_gaps, np.int64)
    window = _Window(scheduler, window_requests or WINDOW_REQUESTS, frontend_ns)
    source = iter(arrivals)
    num_before = 0
    advance: Any = kernel.advance  # a compiled function has no signature that mypy knows
    while True:
        if scalars[kernel.NEXT_ARRIVAL] == window.count and not scalars[kernel.IS_LAST]:
            num_before += int(scalars[kernel.NUM_DONE])
            scalars[kernel.IS_LAST] = window.refill(source, scalars, running, recorder)
        if scalars[kernel.NUM_DONE] == window.count and scalars[kernel.IS_LAST]:
            break
        scalars[kernel.NUM_STEPS] = scalars[kernel.NUM_GAPS] = 0
        advance(
            scalars,
            settings,
            *window.columns,
            running,
            grants,
            window.preempted,
            *tables,
            steps,
            flops,
            num_bytes,
            gap_values,
            gap_counts,
        )
        done = int(scalars[kernel.NUM_STEPS])
        recorder.compiled_steps(steps[:done], flops[:done], num_bytes[:done])
        gaps = int(scalars[kernel.NUM_GAPS])
        recorder.gaps.add_array(gap_values[:gaps], gap_counts[:gaps])
        on_progress(num_before + int(scalars[kernel.NUM_DONE]))
    window.write_done(scalars, recorder, is_over=True)


_COLUMN_NAMES = (
    "arrival",
    "prompt",
    "target",
    "limit",
    "hard_limit",
    "tokens",
    "computed",
    "held",
    "lost",
    "first_scheduled",
    "first_token",
    "last_token",
    "max_gap",
    "preemptions",
    "recomputed",
    "reason",
    "finish",
    "order",
)
"""In the order of the kernel's parameters; ``order`` lists those that are done, as they ended."""
_NEVER_AT_FIRST = ("first_scheduled", "first_token", "last_token", "finish")


class _Window:
    """The requests that the loop may need now, as arrays in order of arrival: those under way, and
    the next ones of the stream."""

    def __init__(self, scheduler: Scheduler, size: int, frontend_ns: int) -> None:
        self._scheduler = scheduler
        self._frontend_ns = frontend_ns
        self._size = size
        self._arrivals: list[Arrival] = []
        self._refused: deque[_Refused] = deque()
        self._columns = {name: np.zeros(0, np.int64) for name in _COLUMN_NAMES}
        self.preempted = np.zeros(0, np.int64)

    @property
    def count(self) -> int:
        return len(self._arrivals)

    @property
    def columns(self) -> tuple[IntArray, ...]:
        return tuple(self._columns.values())

    def refill(
        self, source: Iterator[Arrival], scalars: IntArray, running: IntArray, recorder: Recorder
    ) -> bool:
        """Let go of what is done and take in more of the stream; whether that was the last."""
        from simulator import kernel

        # Who is refused has a row among those that end: all that came before now must be known.
        read: list[Arrival] = []
        while True:
            more = list(islice(source, self._size))
            read += more
            is_last = len(more) < self._size
            if is_last or read[-1].request.arrival_ns >= scalars[kernel.NOW]:
                break
        new = self._served(read)
        self.write_done(scalars, recorder)
        stays = np.ones(self.count, np.bool_)
        stays[self._columns["order"][: scalars[kernel.NUM_DONE]]] = False
        place = np.cumsum(stays) - 1
        for rows, count in ((running, kernel.NUM_RUNNING), (self.preempted, kernel.NUM_PREEMPTED)):
            rows[: scalars[count]] = place[rows[: scalars[count]]]
        for counter in (kernel.FRESH_HEAD, kernel.NEXT_ARRIVAL):
            scalars[counter] = np.count_nonzero(stays[: scalars[counter]])
        scalars[kernel.NUM_DONE] = 0
        kept = [
            arrival for arrival, stay in zip(self._arrivals, stays.tolist(), strict=True) if stay
        ]
        columns = self._new_columns(new)
        for name, column in self._columns.items():
            self._columns[name] = np.concatenate([column[stays], columns[name]])
        self._arrivals = kept + new
        preempted = np.zeros(self.count + len(running), np.int64)
        preempted[: scalars[kernel.NUM_PREEMPTED]] = self.preempted[: scalars[kernel.NUM_PREEMPTED]]
        self.preempted = preempted
        return is_last

    def _served(self, arrivals: list[Arrival]) -> list[Arrival]:
        """Those that are not refused."""
        served = []
        for arrival in arrivals:
            request = arrival.request
            if (objection := _objection(arrival, self._scheduler)) is not None:
                raise NotPlainError(f"request {request.id}: {objection}")
            reason = self._scheduler.refusal(request)
            if reason is None:
                served.append(arrival)
            else:
                self._refused.append(_Refused(request, reason))
        return served

    def _new_columns(self, arrivals: list[Arrival]) -> dict[str, IntArray]:
        config, blocks = self._scheduler.config, self._scheduler.blocks
        requests = [arrival.request for arrival in arrivals]
        never = np.full(len(arrivals), -1, np.int64)
        columns = {
            name: never.copy() if name in _NEVER_AT_FIRST else np.zeros_like(never)
            for name in _COLUMN_NAMES
        }
        columns["arrival"][:] = [request.arrival_ns for request in requests]
        columns["prompt"][:] = [request.num_prompt_tokens for request in requests]
        columns["target"][:] = [arrival.output_tokens for arrival in arrivals]
        columns["hard_limit"][:] = [
            config.max_model_len
            if request.max_tokens is None
            else min(config.max_model_len, request.num_prompt_tokens + request.max_tokens)
            for request in requests
        ]
        columns["tokens"] = columns["prompt"].copy()
        # The last token is not written: a sequence that fills the pool has one more.
        capacity = blocks.num_blocks * blocks.block_size
        columns["limit"] = np.minimum(columns["hard_limit"], capacity + 1)
        return columns

    def write_done(self, scalars: IntArray, recorder: Recorder, *, is_over: bool = False) -> None:
        """Rows in the order of the events: at one instant, who ends before who is refused."""
        from simulator import kernel

        order = self._columns["order"][: scalars[kernel.NUM_DONE]]
        finishes = self._columns["finish"][order]
        start = 0
        while self._refused:
            time = self._refused[0].request.arrival_ns + self._frontend_ns
            if time >= scalars[kernel.NOW] and not is_over:
                break  # others may still end before
            end = int(np.searchsorted(finishes, time, side="right"))
            if end > start:
                self._write(recorder, order[start:end])
                start = end
            recorder.refused(*self._refused.popleft())
        if len(order) > start:
            self._write(recorder, order[start:])

    def _write(self, recorder: Recorder, order: IntArray) -> None:
        column = {name: values[order] for name, values in self._columns.items()}
        requests = [self._arrivals[index].request for index in order.tolist()]
        outputs = column["tokens"] - column["prompt"]
        reasons = [_REASONS[code] for code in column["reason"].tolist()]
        recorder.compiled_requests(
            requests,
            {
                "arrival_ns": column["arrival"],
                "first_scheduled_ns": column["first_scheduled"],
                "first_token_ns": column["first_token"],
                "finish_ns": column["finish"],
                "prompt_tokens": column["prompt"],
                "cached_tokens": 0,
                "output_tokens": outputs,
                "recomputed_tokens": column["recomputed"],
                "refound_tokens": 0,
                "preemptions": column["preemptions"],
                "num_samples": 1,
                "decode_ns": column["last_token"] - column["first_token"],
                "decode_gaps": outputs - 1,
                "max_gap_ns": column["max_gap"],
                "status": [
                    "aborted" if reason == "kv_exhausted" else "completed" for reason in reasons
                ],
                "finish_reason": reasons,
            },
        )
