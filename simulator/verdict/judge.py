"""From the rows of a run to plain words: how it went, what was short, and what would help most.

Every rule looks at the run's rows, asks the cost model what a step of another size would take, and
carries its evidence along. A change is named only where those prices say that it is worth it. The
rules: ``queue`` for requests that wait, ``steps`` for those that are slow without
waiting. The thresholds are judgement calls, each named beside its rule; docs/verdict.md lists them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from records.columns import Columns
from records.gaps import GapCounts
from simulator.settings import Setup
from simulator.verdict.changes import (
    PEAKS,
    Kind,
    Reason,
    State,
    as_flags,
    kv_gib,
    more_blocks,
    most_blocks,
)
from simulator.verdict.facts import QUEUED_SHARE, Facts, format_share
from simulator.verdict.queue import PRESSED, why_queued, with_replicas
from simulator.verdict.steps import slow_first_token, slow_tokens

OVERLOAD_SHARE = 0.05
"""Share of all requests still waiting when the last one arrives (or that gave up waiting), from
which on, and growing, the load is more than the machine can carry."""
OVERLOAD_WAITING = 10
"""Fewer than this many waiting is a moment, not a trend."""
GROWTH = 1.25
"""The queue grows if it was this many times longer in the last quarter than in the first."""


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
    replicas: int = 1
    """Machines like this one, each with its share of the load, that the change asks for in all."""

    def as_bottleneck(self) -> dict[str, Any]:
        """For summary.json."""
        return {
            "kind": self.kind,
            "why": "; ".join(self.evidence),
            "state": self.state,
            "change": self.change,
            "flags": list(self.flags),
            "replicas": self.replicas,
        }


def judge(
    requests: Columns, steps: Columns, gaps: GapCounts, setup: Setup, summary: Mapping[str, Any]
) -> Verdict:
    """The verdict on the rows of a run of ``setup``.

    ``summary`` is the run's summary.json, read for its goodput.
    """
    if not len(steps["start_ns"]):
        return _nothing_ran(requests, setup)
    facts = Facts(requests, steps, gaps, setup, summary)
    state = _state(facts)
    reason = _reason(facts, state)
    change, changes, replicas = reason.change, reason.changes, reason.replicas
    if state != "overloaded" and facts.has_limits and not facts.suffers:
        change, changes, replicas = "nothing is needed: the limits are met", {}, 1
    elif state == "stable" and not facts.has_limits and reason.kind != "none":
        change = (
            f"nothing has to change (no --slo says what is too slow); for lower latency: {change}"
        )
    return Verdict(
        state,
        reason.kind,
        _sentence(facts, state),
        reason.evidence,
        change,
        as_flags(changes),
        replicas,
    )


# -- how it went ---------------------------------------------------------------------------------


def _state(facts: Facts) -> State:
    if facts.is_one_burst:
        return "backlogged" if facts.queued_share >= QUEUED_SHARE else "stable"
    first, _, _, last = facts.quarters
    enough = max(OVERLOAD_WAITING, OVERLOAD_SHARE * facts.num_requests)
    if facts.waiting_at_end >= enough and last > GROWTH * first:
        return "overloaded"
    # Where clients give up, the queue stops growing however long the overload lasts.
    if facts.num_gave_up >= enough and facts.pressed >= PRESSED:
        return "overloaded"
    if facts.queued_share >= QUEUED_SHARE or facts.num_timed_out >= enough:
        return "backlogged"
    return "stable"


def _sentence(facts: Facts, state: State) -> str:
    if state == "overloaded":
        growth = ", ".join(f"{mean:,.0f}" for mean in facts.quarters)
        text = (
            f"Overloaded: requests arrive faster than they are served; on average {growth} waited "
            f"in the four quarters of the arrival time, {facts.waiting_at_end:,} when the last one "
            "came."
        )
    elif state == "backlogged":
        what = (
            "all requests came at once, the queue is as long as the batch."
            if facts.is_one_burst
            else "the queue does not grow without end."
        )
        if facts.queued_share < QUEUED_SHARE:
            what = "clients give up before they are served to the end."
        text = (
            f"Backlogged: {facts.queued_share:.0%} of the requests waited longer than "
            f"{'three' if facts.setup.async_scheduling else 'two'} long steps, but {what}"
        )
    else:
        text = "Stable: requests are served as they come."
    attainment = facts.summary["goodput"]["attainment"]
    if attainment is not None:
        text += f" {format_share(attainment)} of all requests met the limits."
    for entry in facts.summary["goodput"]["slo"]["statistics"]:
        text += f" {entry['limit']} {'holds' if entry['holds'] else 'does not hold'}."
    counts = {
        "were refused": facts.num_refused,
        "gave up waiting": facts.num_gave_up,
        "gave up while being served": facts.num_timed_out - facts.num_gave_up,
        "were not finished when the run was stopped": facts.num_unfinished,
        "had not arrived by then": facts.num_not_arrived,
    }
    told = [f"{count:,} {what}" for what, count in counts.items() if count]
    if facts.num_refused == 1:
        told[0] = "1 was refused"
    return f"{text} {', '.join(told)}." if told else text


# -- which question to ask -----------------------------------------------------------------------


def _reason(facts: Facts, state: State) -> Reason:
    misses = int(facts.misses.sum())
    failed = int((facts.misses & facts.has_failed).sum())
    if state != "overloaded" and facts.suffers and failed > misses / 2:
        return _refusals(facts.failures, facts.setup)
    # What no queue is to blame for comes first, if it can be named.
    if facts.cannot_decode_in_time and (reason := slow_tokens(facts)).kind != "none":
        return with_replicas(facts, state, reason)
    part = "queue" if state == "overloaded" else facts.worst_part()
    if part == "queue":
        return why_queued(facts, state)
    return slow_first_token(facts) if part == "first token" else slow_tokens(facts)


def _nothing_ran(requests: Columns, setup: Setup) -> Verdict:
    total, refused = len(requests["status"]), requests["status"].count("refused")
    if not refused:
        summary = f"Nothing ran: no step was run for {total:,} requests."
        return Verdict("nothing ran", "none", summary, [], "see the status of the requests")
    reason = _refusals(
        [
            why
            for status, why in zip(requests["status"], requests["finish_reason"], strict=True)
            if status == "refused"
        ],
        setup,
    )
    summary = f"Nothing ran: {refused:,} of {total:,} requests were refused."
    return Verdict(
        "nothing ran",
        reason.kind,
        summary,
        reason.evidence,
        reason.change,
        as_flags(reason.changes),
    )


def _refusals(reasons: list[str], setup: Setup) -> Reason:
    """Most of what went wrong could never be served, however fast the machine."""
    evidence = [f"{len(reasons):,} requests could not be served; the first: {reasons[0]}"]
    # "... need 14 blocks, the pool has 10", or a sequence that grew over the whole pool.
    needs = [int(found[1]) for why in reasons if (found := re.search(r"need (\d+) blocks", why))]
    exhausted = reasons.count("kv_exhausted")
    if 2 * (len(needs) + exhausted) > len(reasons):
        wanted = math.ceil(PEAKS * max(needs, default=setup.num_blocks))
        room = most_blocks(setup)
        gib = kv_gib(setup, wanted)
        if wanted <= room:
            return Reason(
                "KV capacity",
                evidence,
                f"more KV memory: {gib} GiB hold the largest of them, and half as much again for "
                "what it writes",
                more_blocks(setup, wanted),
            )
        return Reason(
            "KV capacity",
            evidence,
            f"more KV memory: the largest of them needs {gib} GiB, more than {setup.gpu.name} has "
            "left; a smaller KV dtype, more GPUs (--tensor-parallel-size) or shorter requests",
        )
    longest = setup.shape.max_model_len
    if setup.config.max_model_len < longest:
        return Reason(
            "refusals",
            evidence,
            f"a higher --max-model-len: {setup.shape.name} goes up to {longest:,}",
            {"max_model_len": longest},
        )
    return Reason("refusals", evidence, "shorter requests, or a model with a longer context")
