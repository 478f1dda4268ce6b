"""The discrete-event model: arrivals and a replica that serves them, as SimPy processes.

Order at one instant: first the step that ends (its tokens and finishes), then the arrivals of that
instant in trace order, then the next step. So a request is visible to the first step that starts at
or after its arrival. Time is integer nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import simpy
from simpy.events import NORMAL, Event, EventPriority

from records.recorder import Recorder
from scheduler.plan import StepPlan, StepResult, Stop
from scheduler.request import Request
from scheduler.scheduler import RequestRefusedError, Scheduler
from simulator.cost.step import CostModel, RunPrice
from traces.workload import Arrival, Workload

_STEP_END = NORMAL
_ARRIVAL = EventPriority(NORMAL + 1)
_STEP_START = EventPriority(NORMAL + 2)

_MOST_STEPS = 4096
"""Steps in one run at most: enough to make the rest of a run's cost vanish."""

Process = Generator[Event, Any, None]


class Moment(Event):
    """A time to wait for, with a place among the events of that time."""

    def __init__(self, env: simpy.Environment, delay_ns: int, order: EventPriority) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, priority=order, delay=delay_ns)


class Replica:
    """One engine: a scheduler whose steps last as long as a cost model says.

    Parameters
    ----------
    env
        Its clock counts integer nanoseconds.
    scheduler, cost, recorder
        What decides, what prices, what remembers.
    until_ns
        No step ends and no request arrives after this time; ``None`` = run until all is served.
    async_scheduling
        Steps are scheduled one ahead, as vLLM does it by default: what arrives while a step runs is
        not in the next one, but in the one after. (What a step frees is there for the next one all
        the same; in vLLM it is not.)
    frontend_ns
        From a client to the scheduler and back; all of it is spent on the way there.
    fast_forward
        Run equal decode steps as one. The record is the same, byte for byte; False is for tests.
    on_progress
        Called after each step, or run of equal steps.
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        cost: CostModel,
        recorder: Recorder,
        workload: Workload,
        *,
        until_ns: int | None = None,
        async_scheduling: bool = False,
        frontend_ns: int = 0,
        fast_forward: bool = True,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._env = env
        self._scheduler = scheduler
        self._cost = cost
        self._recorder = recorder
        self._workload = workload
        self._until_ns = until_ns
        self._async_scheduling = async_scheduling
        self._frontend_ns = frontend_ns
        self._is_busy = False
        self._unseen: list[Arrival] = []
        """Arrived since the running step was scheduled, where that is one ahead."""
        self._fast_forward = fast_forward
        self._last_step_ns = 1
        self._on_progress = on_progress
        self._targets = np.zeros(0, np.int64)
        self._output_tokens: dict[str, int] = {}
        self._wake: Event | None = None
        env.process(self._arrivals(workload.initial()))
        env.process(self._serve())

    @property
    def _now(self) -> int:
        """The clock in ns; SimPy would let it be a float, here it never is."""
        return cast(int, self._env.now)

    # -- arrivals ----------------------------------------------------------------------------

    def _arrivals(self, arrivals: Iterator[Arrival]) -> Process:
        for arrival in arrivals:
            arrival_ns = arrival.request.arrival_ns + self._frontend_ns
            if self._until_ns is not None and arrival_ns > self._until_ns:
                self._recorder.never_arrived(arrival.request)
                continue
            if arrival_ns > self._now:
                yield Moment(self._env, arrival_ns - self._now, _ARRIVAL)
            if reason := self._scheduler.refusal(arrival.request):
                self._recorder.refused(arrival.request, reason)
                self._follow(arrival.request, 0)
            elif self._async_scheduling and self._is_busy:
                self._unseen.append(arrival)
            else:
                self._submit(arrival)

    def see_rest(self) -> None:
        """Whoever came during the last step, when the run is over."""
        self._see_all()

    def _see_all(self) -> None:
        unseen, self._unseen = self._unseen, []
        for arrival in unseen:
            self._submit(arrival)

    def _submit(self, arrival: Arrival) -> None:
        request = arrival.request
        try:
            sequences = self._scheduler.add(request, arrival.transcript)
        except RequestRefusedError as error:  # since it came, another has taken its id
            self._recorder.refused(request, error.reason)
            self._follow(request, 0)
            return
        self._output_tokens[request.id] = arrival.output_tokens
        self._recorder.arrived(request, sequences)
        for sequence in sequences:
            self._set_target(sequence.row, arrival.output_tokens)
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None

    def _follow(self, request: Request, output_tokens: int) -> None:
        """Requests that the end of this one brings about."""
        following = self._workload.on_finish(request, output_tokens, self._now)
        for arrival in following:
            self._env.process(self._arrivals(iter([arrival])))

    def _set_target(self, row: int, output_tokens: int) -> None:
        if row >= len(self._targets):
            capacity = self._scheduler.arrays.capacity
            self._targets = np.concatenate(
                [self._targets, np.zeros(capacity - len(self._targets), np.int64)]
            )
        self._targets[row] = output_tokens

    # -- service -----------------------------------------------------------------------------

    def _serve(self) -> Process:
        env, scheduler = self._env, self._scheduler
        while True:
            if env.peek() <= self._now:  # let everything else of this instant happen first
                yield Moment(env, 0, _STEP_START)
            if self._until_ns is not None and self._now >= self._until_ns:
                return
            self._expire(self._now)
            if not scheduler.num_unfinished:
                if self._unseen:
                    self._see_all()
                    continue
                self._is_busy = False
                self._wake = env.event()
                yield self._wake
                continue
            plan = scheduler.schedule(self._longest_run())
            self._is_busy = True
            has_unseen = bool(self._unseen)
            self._see_all()
            if not plan:
                if has_unseen:
                    scheduler.update(plan, StepResult(0))
                    self._recorder.idle_preemptions(plan)
                    continue
                yield from self._stand_still(plan)
                continue
            start_ns = self._now
            num_running = len(scheduler.running)
            self._recorder.started(plan, start_ns)
            prices = self._price(plan, start_ns)
            count = len(prices.duration_ns)
            duration_ns = int(prices.duration_ns.sum())
            self._last_step_ns = int(prices.duration_ns[-1])
            if self._until_ns is not None and start_ns + duration_ns > self._until_ns:
                yield Moment(env, self._until_ns - start_ns, _STEP_START)
                self._expire(self._until_ns)
                return
            yield Moment(env, duration_ns, _STEP_END)
            # A deadline that fell inside the step was missed, whatever the step brought.
            self._expire(self._now - 1)
            stops = self._stops(plan, count)
            outcome = scheduler.update(plan, StepResult(duration_ns, stops=stops, num_steps=count))
            for fork in outcome.forked:
                for child in fork.children:
                    self._set_target(child.row, self._output_tokens[child.request.id])
            if count == 1:
                price = prices.first
                self._recorder.step(
                    plan,
                    outcome,
                    start_ns,
                    price.duration_ns,
                    num_running,
                    flops=price.flops,
                    num_bytes=price.bytes,
                )
            else:
                self._recorder.equal_steps(
                    plan,
                    outcome,
                    start_ns,
                    prices.duration_ns,
                    num_running,
                    flops=prices.flops,
                    num_bytes=prices.bytes,
                )
            for sequence, _ in outcome.finished:
                self._ended(sequence.request)
            self._on_progress()

    def _longest_run(self) -> int:
        """Steps that are worth asking for: about as many as end before the next event."""
        if not self._fast_forward or self._unseen:
            return 1
        pause = self._env.peek() - self._now
        if pause > _MOST_STEPS * self._last_step_ns:
            return _MOST_STEPS
        return int(pause) // self._last_step_ns + 2

    def _price(self, plan: StepPlan, start_ns: int) -> RunPrice:
        """Prices of the steps to run as one: of those that the plan offers, none that would start
        with or after an arrival, end after a deadline or the end of the run, or follow an output's
        last token."""
        features = plan.features()
        if carried := self._recorder.carried_transfers:
            features = replace(features, num_swapped_out=features.num_swapped_out + carried)
            return RunPrice.of(self._cost.price(features))
        count = plan.num_steps
        if count > 1:
            arrays, rows = self._scheduler.arrays, plan.rows
            outputs = arrays.num_tokens[rows] - arrays.num_prompt[rows]
            count = min(count, int((self._targets[rows] - outputs).min()))
        if count <= 1:
            return RunPrice.of(self._cost.price(features))
        prices = self._cost.price_steps(features, count)
        ends = start_ns + np.cumsum(prices.duration_ns)
        next_event = self._env.peek()
        if next_event <= int(ends[-1]):
            count = int(np.searchsorted(ends, next_event, side="left")) + 1
        for latest in (self._scheduler.next_deadline(), self._until_ns):
            if latest is not None and latest < int(ends[count - 1]):
                count = max(1, int(np.searchsorted(ends, latest, side="right")))
        return RunPrice(prices.duration_ns[:count], prices.flops[:count], prices.bytes[:count])

    def _stand_still(self, plan: StepPlan) -> Process:
        """Nobody can compute now: wait for what could change that."""
        self._is_busy = False  # no step is scheduled ahead of who comes now
        self._recorder.idle_preemptions(plan)
        self._scheduler.update(plan, StepResult(0))
        if plan.preempted:
            return  # the room is there at once
        self._wake = self._env.event()
        deadline = self._scheduler.next_deadline()
        if deadline is None:
            yield self._wake
        else:
            yield self._wake | Moment(self._env, deadline - self._now, _STEP_END)
            self._wake = None

    def _expire(self, time_ns: int) -> None:
        expired = self._scheduler.expire(time_ns)
        self._recorder.finished(expired, self._now)
        for sequence, _ in expired:
            self._ended(sequence.request)

    def _ended(self, request: Request) -> None:
        """Tell the workload, once the last output of a request has ended."""
        if self._scheduler.is_unfinished(request.id) or request.id not in self._output_tokens:
            return
        self._follow(request, self._output_tokens.pop(request.id))

    def _stops(self, plan: StepPlan, num_steps: int) -> list[Stop]:
        """Outputs that reach their true length with the last of these steps' tokens."""
        arrays, rows = self._scheduler.arrays, plan.rows
        outputs = arrays.num_tokens[rows] - arrays.num_prompt[rows] + num_steps
        ends = np.flatnonzero(plan.samples & (outputs >= self._targets[rows]))
        return [
            Stop(position, sample)
            for position in ends.tolist()
            for sample in range(plan.sequences[position].slots)
        ]


def simulate(
    scheduler: Scheduler,
    cost: CostModel,
    recorder: Recorder,
    workload: Workload,
    *,
    until_ns: int | None = None,
    async_scheduling: bool = False,
    frontend_ns: int = 0,
    fast_forward: bool = True,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Run a workload on one replica until all is served (or until ``until_ns``).

    Every request of the workload has its row in ``recorder`` afterwards; those that could not
    finish are ``unfinished``.
    """
    env = simpy.Environment()
    replica = Replica(
        env,
        scheduler,
        cost,
        recorder,
        workload,
        until_ns=until_ns,
        async_scheduling=async_scheduling,
        frontend_ns=frontend_ns,
        fast_forward=fast_forward,
        on_progress=on_progress,
    )
    env.run()
    replica.see_rest()
    recorder.unfinished([*scheduler.running, *scheduler.swapped, *scheduler.waiting])
