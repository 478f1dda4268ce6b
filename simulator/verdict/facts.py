"""What the rules of the verdict ask for: a run's rows, condensed, and the price of other steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from records.columns import BLOCKED_CODES, Columns, exact_sum
from records.gaps import GapCounts
from records.metrics import meets
from records.slo import Metric
from records.steps import Rows, StepRows, Where, end_ns, everywhere
from scheduler.features import StepFeatures
from simulator.cost.step import CostModel, StepPrice
from simulator.settings import Setup

Part = Literal["queue", "first token", "tokens"]
"""Where a request's time goes: until it is scheduled, until its first token, after it."""
Mask: TypeAlias = npt.NDArray[np.bool_]

QUEUED_STEPS = 2.0
"""A request queued if it waited longer than this many long (p99) steps: less is the step in
progress, and one more that was full."""
QUEUED_SHARE = 0.05
"""From this share of requests on, queueing is what users feel."""
LIMITS_MET = 0.99
"""Share of the requests that keep a limit from which on it counts as met."""


class Load(NamedTuple):
    """A typical step in numbers that a cost model can price at another size."""

    decodes: float
    """Sequences that decode."""
    context: int
    """Tokens that one of them attends to."""
    prefill: float
    """Prompt tokens."""
    prompt: int
    """Tokens of a prompt that are to be computed (prefix hits are not)."""

    def decode_step(self, cost: CostModel, factor: float = 1.0) -> StepPrice:
        """A step of ``factor`` times the decodes, and no prefill."""
        return _price(cost, max(round(self.decodes * factor), 1), self.context)

    def prefill_step(self, cost: CostModel, tokens: int) -> StepPrice:
        """A step of the same decodes and ``tokens`` of prompts."""
        return _price(cost, round(self.decodes), self.context, max(tokens, 1), self.prompt)

    def last_chunk_step(self, cost: CostModel, tokens: int, prompt: int) -> StepPrice:
        """A step of the same decodes and the last ``tokens`` of a long prompt."""
        decodes = round(self.decodes)
        return _price(cost, decodes, self.context, tokens, tokens, max(prompt - tokens, 0))

    def time_ns(self, cost: CostModel, factor: float = 1.0) -> float:
        """Mean duration of a step with ``factor`` times as many sequences.

        Prompts come whole, now and then: their tokens are priced at the size of a prompt, not as
        the few that a step has on average.
        """
        decode = self.decode_step(cost, factor).duration_ns
        if not self.prefill:
            return decode
        alone = _price(cost, max(round(self.decodes), 1), self.context).duration_ns
        whole = _price(cost, max(round(self.decodes), 1), self.context, self.prompt, self.prompt)
        return decode + self.prefill * factor * (whole.duration_ns - alone) / self.prompt


def _price(
    cost: CostModel, decodes: int, context: int, prefill: int = 0, prompt: int = 1, before: int = 0
) -> StepPrice:
    whole, rest = divmod(prefill, prompt)
    chunks = [prompt] * whole + ([rest] if rest else [])
    granted = np.array([1] * decodes + chunks, np.int64)
    is_decode = np.arange(len(granted)) < decodes
    computed = np.where(is_decode, context, before)
    sampled = np.arange(len(granted)) < decodes + whole
    return cost.price(StepFeatures(granted, computed, sampled, is_decode))


def is_prefill(rows: Rows) -> Mask:
    """Steps that compute some of a prompt."""
    return np.asarray(rows["prefill_tokens"] > 0)


def is_mixed(rows: Rows) -> Mask:
    """Steps of prompts and decodes."""
    mixed: Mask = is_prefill(rows) & (rows["decode_tokens"] > 0)
    return mixed


def is_pure(rows: Rows) -> Mask:
    """Steps that only decode."""
    return ~is_prefill(rows)


def _blocked_by(codes: list[int]) -> Where:
    return lambda rows: np.isin(rows["blocked_by"], codes)


class Facts:
    """The rows of a run that had at least one step, condensed to what the rules ask.

    Requests that a stopped run never came to are left out.
    """

    def __init__(
        self,
        requests: Columns,
        steps: Columns,
        gaps: GapCounts,
        setup: Setup,
        summary: Mapping[str, Any],
    ) -> None:
        self.setup, self.gaps, self.summary = setup, gaps, summary
        self.steps = StepRows(steps)
        self._take_requests(requests)
        self._take_queue()
        self._take_limits(requests)
        self._take_load(requests)

    def _take_requests(self, requests: Columns) -> None:
        status = np.array(requests["status"])
        arrival: npt.NDArray[np.int64] = requests["arrival_ns"]
        until = self.setup.settings["until"].value
        last_ns = self.steps.most(end_ns)
        if until is not None:
            last_ns = max(last_ns, round(until * 1e9))
        self.has_arrived = (status != "unfinished") | (arrival <= last_ns)
        is_refused = status == "refused"
        self.was_in = self.has_arrived & ~is_refused
        """Arrived and was taken in."""
        scheduled = requests["first_scheduled_ns"]
        never = np.ma.getmaskarray(scheduled)
        left = np.where(
            np.ma.getmaskarray(requests["finish_ns"]), last_ns, requests["finish_ns"].filled(0)
        )
        self.wait = np.where(never, left, scheduled.filled(0)) - arrival
        """Until it was scheduled or gave up, ns."""
        self.num_requests = int(np.count_nonzero(self.was_in))
        self.num_refused = int(np.count_nonzero(is_refused))
        self.num_timed_out = int(np.count_nonzero(status == "timed_out"))
        self.num_gave_up = int(np.count_nonzero((status == "timed_out") & never))
        self.num_not_arrived = int(np.count_nonzero(~self.has_arrived))
        self.num_unfinished = int(np.count_nonzero(status == "unfinished")) - self.num_not_arrived
        self.was_preempted = requests["preemptions"] > 0
        self.num_preempted = int(np.count_nonzero(self.was_preempted))
        self.longest_gap_preempted = int(requests["max_gap_ns"][self.was_preempted].max(initial=0))
        self.arrivals = np.sort(arrival[self.was_in])
        is_over = ~never & ~np.ma.getmaskarray(requests["finish_ns"])
        self.departures = np.sort(requests["finish_ns"].filled(0)[is_over])
        """Of requests that were scheduled: also of those whose clients then gave up."""
        self.has_failed = is_refused | (status == "aborted")
        """Without a fault of its speed."""
        self.failures: list[str] = [
            reason
            for reason, failed in zip(requests["finish_reason"], self.has_failed, strict=True)
            if failed
        ]

    def _take_queue(self) -> None:
        steps = self.steps
        self.p99_step = steps.percentile("duration_ns", 99) or 0.0
        # Steps scheduled one ahead keep an arrival out of one step more.
        most_steps = QUEUED_STEPS + self.setup.async_scheduling
        limit = most_steps * self.p99_step + self.setup.frontend_ns
        is_queued = self.was_in & (self.wait > limit)
        self.queued_share = int(np.count_nonzero(is_queued)) / max(self.num_requests, 1)
        self.first_arrival, self.last_arrival = int(self.arrivals[0]), int(self.arrivals[-1])
        self.span = self.last_arrival - self.first_arrival
        self.is_one_burst = self.span <= self.p99_step
        self.waiting_at_end = self._waiting_at(self.last_arrival)
        self.quarters = [self._mean_waiting(quarter) for quarter in range(4)]
        last_arrival = self.last_arrival
        pressed = steps.total(
            "duration_ns", lambda rows: (rows["waiting"] > 0) & (rows["start_ns"] < last_arrival)
        )
        self.pressed = pressed / max(self.span, 1)
        """Share of the arrival time in which somebody waited."""
        # Room lost to a preemption is room lost for want of blocks.
        codes = {name: [code] for name, code in BLOCKED_CODES.items()}
        codes["blocks"] += codes.pop("preemption")
        blocked = {name: _blocked_by(found) for name, found in codes.items()}
        waited = {name: steps.weighted("waiting", where) for name, where in blocked.items()}
        total = sum(waited.values())
        self.blocked_by = max(waited, key=lambda name: waited[name]) if total else None
        """What most of the waiting time was spent on; ``None`` where nobody waited for a step."""
        self.blocked_share = waited[self.blocked_by] / total if self.blocked_by else 0.0
        self.is_blocked: Where = blocked[self.blocked_by] if self.blocked_by else everywhere
        """Steps of that kind; all steps where there are none."""
        self.running_blocked = max(steps.mean("running", self.is_blocked), 1.0)

    def _waiting_at(self, time_ns: int) -> int:
        """Waiting in the last step that had started by then."""
        waiting = 0
        for rows in self.steps.slices():
            started = int(np.searchsorted(rows["start_ns"], time_ns, side="right"))
            if not started:
                break
            waiting = int(rows["waiting"][started - 1])
        return waiting

    def _mean_waiting(self, quarter: int) -> float:
        """Time-weighted number waiting in a quarter of the arrival time."""
        low = self.first_arrival + self.span * quarter // 4
        high = self.first_arrival + self.span * (quarter + 1) // 4
        area = self.steps.weighted(
            "waiting", lambda rows: (rows["start_ns"] >= low) & (rows["start_ns"] < high)
        )
        return area / max(high - low, 1)

    def _take_limits(self, requests: Columns) -> None:
        """Which limits are not met, and by whom."""
        limits = self.setup.limits
        self.has_limits = bool(limits)
        judged = self.has_arrived & (np.array(requests["status"]) != "unfinished")
        self.misses: Mask = np.zeros(len(judged), np.bool_)
        shares: dict[Metric, float] = {}
        self.limit_ns: dict[Metric, int] = {}
        for limit in limits.per_request:
            missed = judged & ~meets(requests, limit)
            self.misses |= missed
            share = int(np.count_nonzero(missed)) / max(int(np.count_nonzero(judged)), 1)
            if share > 1 - LIMITS_MET:
                shares[limit.metric] = share
            self.limit_ns[limit.metric] = limit.limit_ns
        held = [entry["holds"] for entry in self.summary["goodput"]["slo"]["statistics"]]
        for statistic, holds in zip(limits.statistics, held, strict=True):
            self.limit_ns.setdefault(statistic.metric, statistic.limit_ns)
            if not holds:
                shares.setdefault(statistic.metric, 1 - LIMITS_MET)
        self.suffers = sorted(shares, key=lambda metric: (-shares[metric], metric))
        """Metrics whose limits are not met, the worst first."""
        arrival = requests["arrival_ns"]
        first = np.ma.getmaskarray(requests["first_token_ns"])
        self.ttft = np.where(first, self.wait, requests["first_token_ns"].filled(0) - arrival)
        last = np.ma.getmaskarray(requests["finish_ns"])
        self.e2e = np.where(last, self.ttft, requests["finish_ns"].filled(0) - arrival)

    def worst_part(self) -> Part:
        """The part of a request's time that the limits suffer from most, or that queueing is."""
        metric = self.suffers[0] if self.suffers else None
        if metric == "ttft" and self.cannot_prefill_in_time:
            return "first token"
        if metric is None:
            return "queue" if self.queued_share >= QUEUED_SHARE else "tokens"
        if metric in ("tpot", "itl"):
            return "tokens"
        limit = self.limit_ns[metric]
        value = {"ttft": self.ttft, "e2e": self.e2e, "queue": self.wait}[metric]
        slow = self.was_in & (value > limit)
        parts: dict[Part, int] = {
            "queue": exact_sum(self.wait[slow]),
            "first token": exact_sum((self.ttft - self.wait)[slow]),
            "tokens": exact_sum((self.e2e - self.ttft)[slow]) if metric == "e2e" else 0,
        }
        return max(parts, key=lambda part: parts[part])

    @property
    def cannot_decode_in_time(self) -> bool:
        """Whether a limit on tokens is out of reach even for a sequence that is alone."""
        limits = [self.limit_ns[m] for m in ("tpot", "itl") if m in self.suffers]
        alone = Load(1, self.context, 0, self.prompt).decode_step(self.setup.cost)
        return bool(limits) and alone.duration_ns > min(limits)

    @property
    def cannot_prefill_in_time(self) -> bool:
        """Whether the limit on TTFT is out of reach even for a mean prompt that is alone."""
        alone = Load(0, self.context, 0, self.prompt).prefill_step(self.setup.cost, self.prompt)
        return "ttft" in self.suffers and alone.duration_ns > self.limit_ns["ttft"]

    def _take_load(self, requests: Columns) -> None:
        outputs = requests["output_tokens"]
        # A sequence decodes for as many steps as it has outputs.
        contexts = (requests["prompt_tokens"] + outputs // 2) * outputs
        context = exact_sum(contexts) // max(exact_sum(outputs), 1)
        scheduled = ~np.ma.getmaskarray(requests["first_scheduled_ns"])
        todo = np.maximum(requests["prompt_tokens"] - requests["cached_tokens"], 1)[scheduled]
        self.prompt = max(exact_sum(todo) // max(len(todo), 1), 1)
        self.long_prompt = int(np.percentile(todo, 95)) if len(todo) else 1
        self.longest_prompt = int(todo.max(initial=1))
        self.prefill_rate = exact_sum(todo) * 1e9 / self.span if self.span else 0.0
        """Prompt tokens to compute that arrive, per second."""
        self.context = max(context, 1)
        self.blocked_load = self.load(self.is_blocked)

    def load(self, where: Where) -> Load:
        """The typical step among those."""
        return Load(
            decodes=self.steps.mean("decode_tokens", where),
            context=self.context,
            prefill=self.steps.mean("prefill_tokens", where),
            prompt=self.prompt,
        )

    @property
    def demand(self) -> int:
        """Sequences to be served at once, most of the time at most.

        Those that were there at the 95th percentile; but a backlog makes that too many, so no more
        than the arrivals' peaks would bring in if nobody waited (Little's law: rate x time in
        service, as many again as half of that or two standard deviations of a Poisson number).
        """
        there = int(self.steps.percentile(lambda rows: rows["running"] + rows["waiting"], 95) or 0)
        done = self.e2e > self.ttft
        if self.offered is None or not done.any():
            return there
        service_s = _mean((self.e2e - self.wait)[done]) / 1e9
        mean = self.offered * service_s
        return min(there, math.ceil(mean + max(mean / 2, 2 * math.sqrt(mean))))

    @property
    def token_stretch(self) -> float:
        """Time per token that the slowest percent of requests saw, over that of a decode-only step of
        the typical batch: prefill in between makes it more than 1."""
        seen = self.summary["tpot_s"]["p99"]
        step = self.blocked_load.decode_step(self.setup.cost).duration_ns
        return max(seen * 1e9 / step, 1.0) if seen else 1.0

    @property
    def offered(self) -> float | None:
        """Requests that arrive per second: over all, or in the later half if that is more."""
        if not self.span:
            return None
        half = self.first_arrival + self.span // 2
        later = int(np.count_nonzero(self.arrivals > half)) / (self.last_arrival - half)
        return 1e9 * max((len(self.arrivals) - 1) / self.span, later)

    @property
    def served(self) -> float | None:
        """Requests that are done per second while others wait: what the machine can do.

        Or over the whole run, if that is more: the first are done long after the first wait.
        """
        low = high = None
        for rows in self.steps.slices():
            pressed = np.flatnonzero(rows["waiting"] > 0)
            if len(pressed):
                low = int(rows["start_ns"][pressed[0]]) if low is None else low
                high = int(end_ns(rows)[pressed[-1]])
        if low is None or high is None or not len(self.departures):
            return None
        done = np.count_nonzero((self.departures > low) & (self.departures <= high))
        overall = len(self.departures) / (int(self.departures[-1]) - self.first_arrival)
        return 1e9 * max(int(done) / (high - low), overall)

    def use(self, where: Where, what: Literal["flops", "bytes"]) -> float | None:
        """Share of the peak in those steps; ``None`` where the cost model does not know."""
        total = self.steps.float_total(what, where)
        busy_ns = self.busy_ns(where)
        setup = self.setup
        peak = setup.peak_flops if what == "flops" else setup.gpu.memory_bandwidth
        return total * 1e9 / (peak * busy_ns) if total and busy_ns and peak else None

    def busy_ns(self, where: Where = everywhere) -> int:
        return self.steps.total("duration_ns", where)

    def mean_ns(self, where: Where) -> float:
        return self.steps.mean("duration_ns", where)

    def gain(self, factor: float, cost: CostModel | None = None) -> float:
        """Requests per second with ``factor`` times as many sequences at once, over those now."""
        load, now = self.blocked_load, self.setup.cost
        return factor * load.time_ns(now) / load.time_ns(cost or now, factor)


def _mean(values: npt.NDArray[np.int64]) -> float:
    return exact_sum(values) / len(values) if len(values) else 0.0


def number(value: float) -> str:
    """Three digits, never in scientific notation: ``0.0297``, ``3.44``, ``12,031``."""
    if value <= 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(value)))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text


def ms(time_ns: float) -> str:
    """A time in ms, from a second on in s."""
    return f"{number(time_ns / 1e6)} ms" if time_ns < 1e9 else f"{number(time_ns / 1e9)} s"


def shares(facts: Facts, where: Where) -> str:
    compute, bandwidth = facts.use(where, "flops"), facts.use(where, "bytes")
    if compute is None or bandwidth is None:
        return "how much of the peaks they use is unknown to this cost model"
    return f"at {compute:.0%} of the peak FLOP/s and {bandwidth:.0%} of the peak bandwidth"


def format_share(value: float | None) -> str:
    # Rounded down: 99.97 % of the requests are not all of them.
    return "-" if value is None else f"{math.floor(value * 1000 + 1e-9) / 10:.1f}%"
