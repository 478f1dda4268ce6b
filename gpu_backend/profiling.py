"""Measures what steps take: a grid of batch sizes, contexts and prompt chunks.

The steps are real ones, from the scheduler to the sampled token. What is not real is how a sequence got
its context: its blocks are taken, but nothing is computed into them, as their content does not change how
long reading them takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from gpu_backend.batch import IntArray, KnownTokens
from gpu_backend.engine import Engine, RequestError, Step
from gpu_backend.executor import Executor, Forward
from gpu_backend.sampling import SamplingParams
from records.profile import ProfiledStep
from scheduler.plan import StepPlan
from scheduler.request import Request

_WARM_UP_STEPS = 2


class SkippingExecutor(Executor):
    """An executor that, while ``is_skipping``, takes every step for done."""

    is_skipping = False

    def run(
        self,
        plan: StepPlan,
        last_tokens: IntArray,
        known_tokens: KnownTokens,
        prompts: Collection[int] = (),
    ) -> Forward:
        if not self.is_skipping:
            return super().run(plan, last_tokens, known_tokens, prompts)
        shape = (int(plan.samples.sum()), self.model.config.vocab_size)
        return Forward(torch.zeros(shape, device=self.cache.device), {})


class Point(NamedTuple):
    """A kind of step to measure."""

    decodes: int
    context: int
    """Tokens that each of the decoding sequences attends to."""
    prefill: int
    """Prompt tokens computed beside them, for one more request."""
    prefill_context: int
    """Tokens of that prompt that are there already."""


class Profiler:
    """Drives an engine from point to point. ``engine.executor`` must be a ``SkippingExecutor``."""

    def __init__(self, engine: Engine, repeats: int) -> None:
        executor = engine.executor
        assert isinstance(executor, SkippingExecutor)
        self._engine, self._executor, self._repeats = engine, executor, repeats
        self._num_requests = 0

    def measure(self, point: Point) -> ProfiledStep | None:
        """``None`` where the engine has no room for it (blocks, slots, budget, context)."""
        if not self._fits(point):
            return None
        try:
            self._fill(point)
            steps = list(self._steps(point))
        except RequestError:
            return None
        finally:
            self._clear()
        summary = _summary(steps)
        as_asked = (point.decodes, point.prefill) == (summary.decodes, summary.prefill_tokens)
        return summary if as_asked else None

    def _fits(self, point: Point) -> bool:
        config, blocks = self._engine.scheduler.config, self._engine.scheduler.blocks
        more = _WARM_UP_STEPS + self._repeats + 1
        longest = max(point.context + more if point.decodes else 0, _prompt(point))
        needed = point.decodes * blocks.blocks_for(point.context + more)
        needed += blocks.blocks_for(_prompt(point) + 1) if point.prefill else 0
        return (
            point.decodes + bool(point.prefill) <= config.max_num_seqs
            and point.decodes + point.prefill <= config.max_num_batched_tokens
            and longest < config.max_model_len
            and needed <= blocks.num_blocks
        )

    def _fill(self, point: Point) -> None:
        """Bring the decoding sequences to their context, all in one step: nothing is computed, so that
        no budget need hold for it."""
        if not point.decodes:
            return
        for _ in range(point.decodes):
            self._add(point.context - 1)
        scheduler = self._engine.scheduler
        config = scheduler.config
        tokens = max(point.decodes * point.context, config.max_num_batched_tokens)
        scheduler.config = replace(
            config, max_num_batched_tokens=tokens, long_prefill_token_threshold=0
        )
        self._executor.is_skipping = True
        try:
            self._engine.step()
        finally:
            scheduler.config, self._executor.is_skipping = config, False

    def _add(self, prompt_tokens: int) -> str:
        self._num_requests += 1
        request = Request(id=str(self._num_requests), num_prompt_tokens=max(prompt_tokens, 1))
        prompt = np.zeros(request.num_prompt_tokens, np.int64)
        params = SamplingParams(temperature=0)
        return self._engine.add_request(request, prompt, params, forced_tokens=1 << 30)

    def _steps(self, point: Point) -> Iterator[Step]:
        for number in range(_WARM_UP_STEPS + self._repeats):
            step = self._chunk_step(point) if point.prefill else self._engine.step()
            if number >= _WARM_UP_STEPS:
                yield step

    def _chunk_step(self, point: Point) -> Step:
        """A step with the last chunk of a prompt; the request is gone afterwards."""
        request_id = self._add(_prompt(point))
        (sequence,) = self._engine.sequences_of(request_id)
        self._executor.is_skipping = True
        while sequence.num_uncomputed_tokens > point.prefill:
            self._engine.step()
        self._executor.is_skipping = False
        step = self._engine.step()
        self._engine.abort(request_id)
        return step

    def _clear(self) -> None:
        self._executor.is_skipping = False
        for sequence in [*self._engine.scheduler.running, *self._engine.scheduler.waiting]:
            self._engine.abort(sequence.request.id)


def _prompt(point: Point) -> int:
    return point.prefill_context + point.prefill


def _summary(steps: list[Step]) -> ProfiledStep:
    """Of steps of one kind; counts are those of the step in the middle (contexts grow by a token each)."""
    plan = steps[len(steps) // 2].plan
    after = plan.computed_before + plan.granted
    seconds = [step.duration_ns / 1e9 for step in steps]
    return ProfiledStep(
        decodes=int(plan.is_decode.sum()),
        decode_context_tokens=int(after[plan.is_decode].sum()),
        prefills=int((~plan.is_decode).sum()),
        prefill_tokens=int(plan.granted[~plan.is_decode].sum()),
        prefill_context_tokens=int(after[~plan.is_decode].sum()),
        sampled=int(plan.samples.sum()),
        repeats=len(steps),
        seconds=statistics.median(seconds),
        min_s=min(seconds),
        max_s=max(seconds),
    )


def grid(
    batches: Sequence[int], contexts: Sequence[int], chunks: Sequence[int], budget: int
) -> list[Point]:
    """Decode steps of all batches and contexts; chunks alone, behind contexts that are whole steps of
    ``budget`` tokens, and beside the smallest and the largest batch at a middle context."""
    points = [Point(batch, context, 0, 0) for batch in batches for context in contexts]
    behind = sorted({context // budget * budget for context in contexts} | {0})
    points += [Point(0, 0, chunk, context) for chunk in chunks for context in behind]
    middle = contexts[len(contexts) // 2]
    points += [
        Point(batch, middle, chunk, 0)
        for batch in sorted({batches[0], batches[-1]})
        for chunk in chunks
        if batch + chunk <= budget
    ]
    return points


def profile(
    engine: Engine,
    points: Sequence[Point],
    repeats: int,
    on_step: Callable[[Point, ProfiledStep | None], None] = lambda point, step: None,
) -> list[ProfiledStep]:
    """Measure all points; those without room are left out."""
    profiler = Profiler(engine, repeats)
    found = []
    for point in points:
        step = profiler.measure(point)
        on_step(point, step)
        if step is not None:
            found.append(step)
    return found
