"""When the compiled loop may stand in for the simple one, and how its arrays become the record."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from blockmanager.manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.policies import FCFS
from scheduler.scheduler import Scheduler
from simulator.cost import CostModel
from simulator.cost.tables import price_tables
from simulator.recorder import Recorder
from traces.workload import Arrival

WORTH_COMPILING = 5000
"""Requests from which on the compiled loop is used: below, the simple one is done before the other is
loaded."""
_BUFFER_ROWS = 65_536
_LARGEST_STEP = 1 << 17
"""Tokens or sequences of a step up to which its price is put into tables: more take too long to fill."""
_REASONS = ("stop", "length", "kv_exhausted")


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
    caching = scheduler.blocks.enable_prefix_caching
    for request, _ in arrivals:
        if request.n != 1:
            return "a request with several outputs"
        if request.deadline_ns is not None:
            return "a request with a deadline"
        if caching and request.content is not None:
            return "prompts of known content"
    if price_tables(cost, 1, 1) is None:
        return "the cost model has no tables"
    return None


def simulate_compiled(
    scheduler: Scheduler,
    cost: CostModel,
    recorder: Recorder,
    arrivals: Sequence[Arrival],
    *,
    on_progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Run arrivals that ``why_not`` has no objection to; ``recorder`` gets the rows that
    ``simulate`` would leave.

    ``scheduler`` gives settings and refusals; its own state stays as it is.
    """
    from simulator import kernel

    config, blocks = scheduler.config, scheduler.blocks
    served: list[Arrival] = []
    refused: list[tuple[int, Arrival, str]] = []
    for arrival in arrivals:
        reason = scheduler.refusal(arrival.request)
        if reason is None:
            served.append(arrival)
        else:
            refused.append((arrival.request.arrival_ns, arrival, reason))
    count = len(served)
    columns = _Columns(served, config, blocks)
    most_seqs = min(config.max_num_seqs, max(count, 1))
    tables = price_tables(cost, config.max_num_batched_tokens, most_seqs)
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
        ],
        np.int64,
    )
    running = np.zeros(most_seqs + 1, np.int64)
    grants = np.zeros(most_seqs + 1, np.int64)
    preempted = np.zeros(most_seqs + count + 1, np.int64)
    steps = np.zeros((_BUFFER_ROWS, kernel.NUM_STEP_COLUMNS), np.int64)
    flops, num_bytes = np.zeros(_BUFFER_ROWS), np.zeros(_BUFFER_ROWS)
    num_gaps = 2 * _BUFFER_ROWS + 2 * config.max_num_seqs
    gap_values, gap_counts = np.zeros(num_gaps, np.int64), np.zeros(num_gaps, np.int64)
    advance: Any = kernel.advance  # a compiled function has no signature that mypy knows
    while scalars[kernel.NUM_DONE] < count:
        scalars[kernel.NUM_STEPS] = scalars[kernel.NUM_GAPS] = 0
        advance(
            scalars,
            settings,
            *columns.arrays(),
            running,
            grants,
            preempted,
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
        on_progress(int(scalars[kernel.NUM_DONE]))
    columns.write(recorder, refused)


class _Columns:
    """The requests as arrays, in order of arrival."""

    def __init__(
        self, served: list[Arrival], config: SchedulerConfig, blocks: BlockManager
    ) -> None:
        count = len(served)

        def column(values: list[int]) -> npt.NDArray[np.int64]:
            return np.array(values, np.int64)

        requests = [arrival.request for arrival in served]
        self.served = served
        self.arrival = column([request.arrival_ns for request in requests])
        self.prompt = column([request.num_prompt_tokens for request in requests])
        self.target = column([arrival.output_tokens for arrival in served])
        asked = column(
            [
                config.max_model_len
                if request.max_tokens is None
                else min(config.max_model_len, request.num_prompt_tokens + request.max_tokens)
                for request in requests
            ]
        )
        self.hard_limit = asked
        """Tokens at which an output ends as ``length``."""
        # The last token is not written: a sequence that fills the pool has one more.
        self.limit = np.minimum(asked, blocks.num_blocks * blocks.block_size + 1)
        self.tokens = self.prompt.copy()
        zeros, never = np.zeros(count, np.int64), np.full(count, -1, np.int64)
        self.computed, self.held, self.lost = zeros.copy(), zeros.copy(), zeros.copy()
        self.first_scheduled, self.first_token = never.copy(), never.copy()
        self.last_token, self.max_gap = never.copy(), zeros.copy()
        self.preemptions, self.recomputed = zeros.copy(), zeros.copy()
        self.reason, self.finish, self.order = zeros.copy(), never.copy(), zeros.copy()

    def arrays(self) -> tuple[npt.NDArray[np.int64], ...]:
        """In the order of the kernel's parameters."""
        return (
            self.arrival,
            self.prompt,
            self.target,
            self.limit,
            self.hard_limit,
            self.tokens,
            self.computed,
            self.held,
            self.lost,
            self.first_scheduled,
            self.first_token,
            self.last_token,
            self.max_gap,
            self.preemptions,
            self.recomputed,
            self.reason,
            self.finish,
            self.order,
        )

    def write(self, recorder: Recorder, refused: list[tuple[int, Arrival, str]]) -> None:
        """Rows in the order of the events: at one instant, who ends before who is refused."""
        order = self.order
        finishes = self.finish[order]
        start = 0
        for time, arrival, reason in refused:
            end = int(np.searchsorted(finishes, time, side="right"))
            if end > start:
                self._write_finished(recorder, order[start:end])
                start = end
            recorder.refused(arrival.request, reason)
        self._write_finished(recorder, order[start:])

    def _write_finished(self, recorder: Recorder, order: npt.NDArray[np.int64]) -> None:
        if not len(order):
            return
        requests = [self.served[index].request for index in order.tolist()]
        outputs = self.tokens[order] - self.prompt[order]
        reasons = [_REASONS[code] for code in self.reason[order].tolist()]
        recorder.compiled_requests(
            requests,
            {
                "arrival_ns": self.arrival[order],
                "first_scheduled_ns": self.first_scheduled[order],
                "first_token_ns": self.first_token[order],
                "finish_ns": self.finish[order],
                "prompt_tokens": self.prompt[order],
                "cached_tokens": 0,
                "output_tokens": outputs,
                "recomputed_tokens": self.recomputed[order],
                "refound_tokens": 0,
                "preemptions": self.preemptions[order],
                "num_samples": 1,
                "decode_ns": self.last_token[order] - self.first_token[order],
                "decode_gaps": outputs - 1,
                "max_gap_ns": self.max_gap[order],
                "status": [
                    "aborted" if reason == "kv_exhausted" else "completed" for reason in reasons
                ],
                "finish_reason": reasons,
            },
        )
