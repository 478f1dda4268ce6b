"""A simulated run in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockmanager import BlockManager
from records.columns import Columns
from records.gaps import GapCounts
from records.recorder import Recorder
from records.run import RunRecord
from scheduler import Request, Scheduler, SchedulerConfig, load_policy
from scheduler.features import StepFeatures
from simulator.cost import ConstantCost, CostModel
from simulator.cost.step import StepPrice
from simulator.replica import simulate
from traces.workload import Arrival, OpenLoop

NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Run:
    requests: Columns
    steps: Columns
    gaps: GapCounts
    scheduler: Scheduler

    def row(self, request_id: str) -> dict[str, Any]:
        index = self.requests["id"].index(request_id)
        return {name: column[index] for name, column in self.requests.items()}


def arrival(request_id: str, time_s: float, prompt: int, output: int, **fields: Any) -> Arrival:
    request = Request(
        id=request_id, arrival_ns=round(time_s * NS), num_prompt_tokens=prompt, **fields
    )
    return Arrival(request, output)


def run(
    arrivals: Iterable[Arrival],
    cost: CostModel | None = None,
    *,
    num_blocks: int = 10_000,
    block_size: int = 16,
    policy: str = "fcfs",
    caching: bool = False,
    until_s: float | None = None,
    fast_forward: bool = True,
    async_scheduling: bool = False,
    frontend_ns: int = 0,
    swap_blocks: int = 0,
    watermark_blocks: int = 0,
    **config: Any,
) -> Run:
    blocks = BlockManager(
        num_blocks,
        block_size,
        enable_prefix_caching=caching,
        num_swap_blocks=swap_blocks,
        watermark_blocks=watermark_blocks,
    )
    scheduler = Scheduler(SchedulerConfig(**config), blocks, load_policy(policy))
    recorder = Recorder(num_blocks)
    simulate(
        scheduler,
        cost or ConstantCost(0.01),
        recorder,
        OpenLoop(list(arrivals)),
        until_ns=None if until_s is None else round(until_s * NS),
        fast_forward=fast_forward,
        async_scheduling=async_scheduling,
        frontend_ns=frontend_ns,
    )
    scheduler.check()
    return Run(recorder.requests.columns(), recorder.steps.columns(), recorder.gaps, scheduler)


class RandomCost:
    """Every step lasts a random time of its own, whatever is in it."""

    def __init__(self, durations_ns: Sequence[int]) -> None:
        self._durations = iter(durations_ns)

    def price(self, step: StepFeatures) -> StepPrice:
        return StepPrice(next(self._durations), 0.0, 0.0)

    def terms(self, step: StepFeatures) -> dict[str, int]:
        raise NotImplementedError

    def describe(self) -> list[str]:
        return ["random"]


def poisson_arrivals(rng: np.random.Generator, rate: float, count: int) -> np.ndarray[Any, Any]:
    return np.cumsum(rng.exponential(1 / rate, count))


def assert_same_record(a: RunRecord, b: RunRecord) -> None:
    assert a.settings == b.settings
    assert a.summary == b.summary
    assert a.gaps.gaps.tolist() == b.gaps.gaps.tolist()
    assert a.gaps.counts.tolist() == b.gaps.counts.tolist()
    for ours, theirs in ((a.requests, b.requests), (a.steps, b.steps)):
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None:
            continue
        for name in ours:
            assert list(ours[name]) == list(theirs[name]), name
