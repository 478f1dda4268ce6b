"""A scheduler step (schedule and update) in which everybody decodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.measure import cpu_seconds
from blockmanager import BlockManager
from scheduler import Request, Scheduler, SchedulerConfig, StepResult

STEPS = 200


def decoding_scheduler(batch: int) -> Scheduler:
    """``batch`` sequences of 500 prompt tokens, all past their prefill."""
    config = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=8192, max_model_len=100_000)
    scheduler = Scheduler(config, BlockManager(batch * 2000, 16))
    for index in range(batch):
        scheduler.add(Request(id=str(index), num_prompt_tokens=500))
    while any(s.num_output_tokens == 0 for s in scheduler.running) or len(scheduler.waiting):
        scheduler.update(scheduler.schedule(), StepResult(0))
    return scheduler


def scheduler_steps(runs: int) -> Iterator[dict[str, Any]]:
    for batch in (1, 16, 64, 256, 1024, 4096):
        scheduler = decoding_scheduler(batch)

        def steps(scheduler: Scheduler = scheduler) -> None:
            for _ in range(STEPS):
                scheduler.update(scheduler.schedule(), StepResult(0))

        spread = cpu_seconds(steps, runs)
        name = f"scheduler step, {batch:,} sequences decode"
        yield spread.each(name, "us", 1e6 / STEPS)
