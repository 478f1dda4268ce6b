"""From the rows of a run to plain words: how it went, what was short, and what would help most.

Every rule looks at measured rows only and carries its evidence along. The thresholds are judgement
calls, named here and nowhere else; docs/verdict.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from records.columns import BLOCKED_CODES, Columns
from records.gaps import GapCounts
from scheduler.config import SchedulerConfig

State = Literal["stable", "backlogged", "overloaded", "nothing ran"]
Kind = Literal[
    "none",
    "queue",
    "compute",
    "memory bandwidth",
    "KV capacity",
    "sequence limit",
    "token budget",
    "prefill interference",
    "preemption jitter",
    "admission policy",
]

QUEUED_STEPS = 2.0
"""A request queued if it waited longer than this many long (p99) steps: less is the step in progress."""
QUEUED_SHARE = 0.05
"""From this share of requests on, queueing is what users feel."""
OVERLOAD_SHARE = 0.05
"""Share of all requests still waiting when the last one arrives, from which on (and growing) the
load is more than the service can carry."""
IDLE_BUSY = 0.7
"""Busy less than this share of the arrival time: what queues there is came in bursts."""
SATURATED = 0.45
"""Share of a peak (FLOP/s or bandwidth) from which on it is what bounds a step."""
INTERFERENCE = 2.0
"""Steps that mix prefill with decodes last this many times longer than decode-only ones, and p99 ITL
stands this many times over p50."""
JITTER_SHARE = 0.005
"""Share of requests preempted, from which on preemption shows in the p99."""


@dataclass(frozen=True, slots=True)
class Verdict:
    state: State
    kind: Kind
    summary: str
    """One sentence: how it went."""
    evidence: list[str]
    """What the kind rests on."""
    change: str
    """The one change that would help most, in words."""
    flags: tuple[str, ...] = ()
    """The same change as flags of this command line, where flags can express it."""

    def as_bottleneck(self) -> dict[str, Any]:
        """For summary.json."""
        return {
            "kind": self.kind,
            "why": "; ".join(self.evidence),
            "state": self.state,
            "change": self.change,
            "flags": list(self.flags),
        }


class Capacity(NamedTuple):
    """What the run had to work with."""

    config: SchedulerConfig
    num_blocks: int
    block_size: int
    peak_flops: float
    peak_bandwidth: float
    kv_gib: float


class _Facts:
    """The rows, condensed to what the rules ask."""

    def __init__(
        self, requests: Columns, steps: Columns, gaps: GapCounts, capacity: Capacity
    ) -> None:
        self.capacity = capacity
        self.duration: npt.NDArray[np.int64] = steps["duration_ns"]
        self.start: npt.NDArray[np.int64] = steps["start_ns"]
        self.steps = steps
        arrivals = np.sort(requests["arrival_ns"])
        self.num_requests = len(arrivals)
        self.first_arrival, self.last_arrival = int(arrivals[0]), int(arrivals[-1])
        self.queue = (requests["first_scheduled_ns"] - requests["arrival_ns"]).compressed()
        self.p99_step = float(np.percentile(self.duration, 99))
        queued = self.queue > QUEUED_STEPS * self.p99_step
        self.num_queued = int(np.count_nonzero(queued))
        never_scheduled = np.count_nonzero(
            np.ma.getmaskarray(requests["first_scheduled_ns"])
            & (np.array(requests["status"]) != "refused")
        )
        self.num_served = len(self.queue) + int(never_scheduled)
        self.num_queued += int(never_scheduled)
        self.queued_share = self.num_queued / max(self.num_served, 1)
        self.waiting_at_end = self._waiting_at(self.last_arrival)
        self.quarters = [self._mean_waiting(q) for q in range(4)]
        self.num_preempted = int(np.count_nonzero(requests["preemptions"]))
        self.itl_p50 = gaps.percentile(50)
        self.itl_p99 = gaps.percentile(99)
        self.max_gap_preempted = int(
            requests["max_gap_ns"][requests["preemptions"] > 0].max(initial=0)
        )
        self.waiting_time = int(self.duration[steps["waiting"] > 0].sum())
        self.blocked = {
            reason: int(self.duration[steps["blocked_by"] == code].sum())
            for reason, code in BLOCKED_CODES.items()
        }
        in_window = self.start < self.last_arrival
        self.busy = float(self.duration[in_window].sum()) / max(
            self.last_arrival - self.first_arrival, 1
        )
        self.one_burst = self.last_arrival - self.first_arrival <= self.p99_step

    def _waiting_at(self, time_ns: int) -> int:
        index = int(np.searchsorted(self.start, time_ns, side="right")) - 1
        return int(self.steps["waiting"][index]) if index >= 0 else 0

    def _mean_waiting(self, quarter: int) -> float:
        """Time-weighted number waiting in a quarter of the arrival time."""
        span = self.last_arrival - self.first_arrival
        low = self.first_arrival + span * quarter // 4
        high = self.first_arrival + span * (quarter + 1) // 4
        inside = (self.start >= low) & (self.start < high)
        area = int((self.steps["waiting"][inside] * self.duration[inside]).sum())
        return area / max(high - low, 1)

    def use(self, rows: npt.NDArray[np.bool_], what: Literal["flops", "bytes"]) -> float | None:
        """Share of the peak in those steps; ``None`` where the cost model does not know."""
        total = float(self.steps[what][rows].sum())
        seconds = float(self.duration[rows].sum()) / 1e9
        peak = self.capacity.peak_flops if what == "flops" else self.capacity.peak_bandwidth
        return total / (peak * seconds) if total and seconds and peak else None


def judge(
    requests: Columns,
    steps: Columns,
    gaps: GapCounts,
    capacity: Capacity,
    summary: Mapping[str, Any],
) -> Verdict:
    """The verdict on a run's rows.

    ``summary`` is the run's summary.json, read for its goodput.
    """
    if not len(steps["start_ns"]):
        return _nothing_ran(requests)
    facts = _Facts(requests, steps, gaps, capacity)
    state = _state(facts)
    if state != "stable" or facts.queued_share >= QUEUED_SHARE:
        kind, evidence, change, flags = _why_queued(facts, state)
    else:
        kind, evidence, change, flags = _why_slow(facts, steps)
    return Verdict(state, kind, _sentence(facts, state, summary), evidence, change, flags)


_Reason = tuple[Kind, list[str], str, tuple[str, ...]]


def _nothing_ran(requests: Columns) -> Verdict:
    statuses: list[str] = requests["status"]
    refused = statuses.count("refused")
    first = next(
        (why for s, why in zip(statuses, requests["finish_reason"], strict=True) if s == "refused"),
        "",
    )
    what = f"{refused} of {len(statuses)} requests were refused" if refused else "no step was run"
    return Verdict(
        "nothing ran",
        "KV capacity" if refused and "blocks" in first else "none",
        f"Nothing ran: {what}.",
        [f"the first refusal: {first}"] if first else [],
        "more KV memory, or shorter requests" if "blocks" in first else "see the refusals",
    )


def _state(facts: _Facts) -> State:
    waiting, quarters = facts.waiting_at_end, facts.quarters
    grows = quarters[3] > 1.25 * quarters[1] and quarters[3] > 1
    if (
        not facts.one_burst
        and grows
        and waiting >= max(10, OVERLOAD_SHARE * facts.num_requests)
    ):
        return "overloaded"
    if facts.queued_share >= QUEUED_SHARE:
        return "backlogged"
    return "stable"


def _sentence(facts: _Facts, state: State, summary: Mapping[str, Any]) -> str:
    goodput = summary["goodput"]
    slo = ""
    if goodput["attainment"] is not None:
        slo = f" {goodput['attainment']:.1%} of the requests met the limits."
    if state == "overloaded":
        growth = ", ".join(f"{q:.0f}" for q in facts.quarters)
        return (
            f"Overloaded: requests arrive faster than they are served; on average {growth} waited in "
            f"the four quarters of the arrival time, {facts.waiting_at_end:,} when the last one came."
            + slo
        )
    if state == "backlogged":
        return (
            f"Backlogged: {facts.queued_share:.0%} of the requests waited for more than the step in "
            "progress, but the queue does not grow without end." + slo
        )
    return "Stable: requests are served as they come." + slo


def _why_queued(facts: _Facts, state: State) -> _Reason:
    """What the head of the queue waited for, most of the time."""
    capacity, config = facts.capacity, facts.capacity.config
    blocked = dict(facts.blocked)
    # Room lost to a preemption is room lost for want of blocks.
    blocked["blocks"] += blocked.pop("preemption")
    total = sum(blocked.values())
    top = max(blocked, key=lambda reason: blocked[reason]) if total else "budget"
    share = blocked[top] / total if total else 1.0
    running = facts.steps["running"]
    demand = int(np.percentile(running + facts.steps["waiting"], 95))
    if top == "policy":
        return (
            "admission policy",
            [f"the policy kept the head of the queue out {share:.0%} of the time that anybody waited"],
            "another --scheduling-policy",
            (),
        )
    if top == "blocks":
        peak = int(facts.steps["blocks_used"].max())
        held = facts.steps["blocks_used"] / np.maximum(running, 1)
        wanted = float(held.mean()) * demand
        factor = max(wanted / capacity.num_blocks, 1.25)
        more = capacity.kv_gib * factor
        return (
            "KV capacity",
            [
                f"the head of the queue waited for free blocks {share:.0%} of the time that anybody waited",
                f"{peak:,} of {capacity.num_blocks:,} blocks in use at the peak, "
                f"{int(facts.steps['preemptions'].sum()):,} preemptions",
            ],
            f"more KV memory: about {more:.3g} GiB would hold the {demand:,} requests that were there at "
            "the 95th percentile (a smaller KV dtype, smaller weights, or more GPUs give it too)",
            ("--kv-gb", f"{more:.3g}"),
        )
    if top == "slots":
        return (
            "sequence limit",
            [
                f"the head of the queue waited for one of max_num_seqs = {config.max_num_seqs} slots "
                f"{share:.0%} of the time that anybody waited",
                f"{int(facts.steps['blocks_used'].max()):,} of {capacity.num_blocks:,} blocks in use at "
                "the peak",
            ],
            f"a higher --max-num-seqs: {demand:,} requests were there at the 95th percentile",
            ("--max-num-seqs", str(demand)),
        )
    compute = facts.use(facts.steps["blocked_by"] == BLOCKED_CODES["budget"], "flops")
    evidence = [
        f"the head of the queue waited for the step's token budget of {config.max_num_batched_tokens:,} "
        f"{share:.0%} of the time that anybody waited"
    ]
    if state != "overloaded" and (facts.one_burst or facts.busy < IDLE_BUSY):
        came = (
            "all requests arrived within one step"
            if facts.one_burst
            else f"the engine was busy {facts.busy:.0%} of the arrival time"
        )
        return (
            "queue",
            [f"{came}, yet {facts.queued_share:.0%} of the requests queued: they come in bursts", *evidence],
            "spread the arrivals (rate limit, jitter), or a second replica for the peaks",
            (),
        )
    if compute is None or compute < SATURATED:
        use = "" if compute is None else f", which used {compute:.0%} of the peak FLOP/s"
        return (
            "token budget",
            [evidence[0] + use],
            f"a larger --max-num-batched-tokens, e.g. {4 * config.max_num_batched_tokens:,}: the steps have "
            "room",
            ("--max-num-batched-tokens", str(4 * config.max_num_batched_tokens)),
        )
    return (
        "compute",
        [*evidence, f"those steps ran at {compute:.0%} of the peak FLOP/s: the prompts fill them"],
        "more compute: a second replica, tensor parallelism, a faster GPU or an 8-bit dtype; a higher "
        "prefix hit rate helps too",
        (),
    )


def _why_slow(facts: _Facts, steps: Columns) -> _Reason:
    """Nobody queues: what bounds the time of a step, and its tail."""
    capacity, config = facts.capacity, facts.capacity.config
    prefill = steps["prefill_tokens"] > 0
    decode = steps["decode_tokens"] > 0
    mixed, pure = prefill & decode, decode & ~prefill
    if facts.num_preempted >= max(1, JITTER_SHARE * facts.num_requests):
        longest = facts.max_gap_preempted / 1e9
        factor = 1.25
        more = capacity.kv_gib * factor
        return (
            "preemption jitter",
            [
                f"{facts.num_preempted:,} requests were preempted and computed again what they had lost",
                f"the longest gap between two tokens of theirs is {longest:.3g} s, the median of all gaps "
                f"{facts.itl_p50 / 1e9:.3g} s" if facts.itl_p50 is not None else "",
            ],
            f"more KV memory, about {more:.3g} GiB, or a lower --max-num-seqs: fewer requests at once, none "
            "of them interrupted",
            ("--kv-gb", f"{more:.3g}"),
        )
    if (
        mixed.any()
        and pure.any()
        and facts.itl_p50
        and facts.itl_p99 is not None
        and facts.itl_p99 >= INTERFERENCE * facts.itl_p50
    ):
        mean_mixed = float(facts.duration[mixed].mean())
        mean_pure = float(facts.duration[pure].mean())
        tokens = int(steps["decode_tokens"][mixed].sum()) / max(int(steps["decode_tokens"].sum()), 1)
        if mean_mixed >= INTERFERENCE * mean_pure:
            budget = max(256, config.max_num_batched_tokens // 4)
            return (
                "prefill interference",
                [
                    f"steps with prefill and decodes together last {mean_mixed / 1e6:.3g} ms on average, "
                    f"decode-only ones {mean_pure / 1e6:.3g} ms; {tokens:.0%} of the decoded tokens come "
                    "from the long ones",
                    f"ITL p99 is {facts.itl_p99 / facts.itl_p50:.3g} x its p50",
                ],
                f"smaller chunks of prefill: --max-num-batched-tokens {budget:,} (TTFT grows a little), or "
                "prefill on machines of its own",
                ("--max-num-batched-tokens", str(budget)),
            )
    bandwidth, compute = facts.use(pure, "bytes"), facts.use(prefill, "flops")
    busy = float(facts.duration.sum())
    if bandwidth is not None and bandwidth >= SATURATED and facts.duration[pure].sum() >= busy / 2:
        return (
            "memory bandwidth",
            [
                f"decode-only steps take {float(facts.duration[pure].sum()) / busy:.0%} of the busy time and "
                f"move data at {bandwidth:.0%} of the peak bandwidth",
            ],
            "fewer bytes a token: 8-bit weights or KV, tensor parallelism, or a GPU with more bandwidth",
            ("--weight-dtype", "fp8"),
        )
    if compute is not None and compute >= SATURATED and facts.duration[prefill].sum() >= busy / 2:
        return (
            "compute",
            [
                f"steps with prefill take {float(facts.duration[prefill].sum()) / busy:.0%} of the busy time "
                f"at {compute:.0%} of the peak FLOP/s",
            ],
            "more compute: tensor parallelism, a faster GPU or an 8-bit dtype",
            (),
        )
    return (
        "none",
        [
            f"busy {facts.busy:.0%} of the arrival time, at most "
            f"{int(steps['blocks_used'].max()) / capacity.num_blocks:.0%} of the blocks in use"
        ],
        "nothing; there is room for more load",
        (),
    )
