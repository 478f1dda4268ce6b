"""Rules for requests that wait to be scheduled: what for, and what would let more of them in."""

from __future__ import annotations

import math
from dataclasses import replace

from simulator.cost.step import CostModel
from simulator.verdict.changes import (
    HEADROOM,
    LARGEST_FACTOR,
    PEAKS,
    WORTH,
    Kind,
    Option,
    Reason,
    State,
    choose,
    faster_options,
    kv_left,
    kv_options,
    more_gpus,
    what_if,
)
from simulator.verdict.facts import Facts, ms, number, shares

PRESSED = 0.7
"""Somebody waited in less than this share of the arrival time: what queued came in bursts."""
BUDGET_WORTH = 1.5
"""A larger token budget is what is short if it serves what is asked for, or this many times as
much: compute is what is short otherwise."""
TOKEN_MARGIN = 0.95
"""Share of the limit on TPOT that larger batches may plan with."""
UNEVEN = 1.15
"""Requests differ in length: blocks are planned for this many times the mean."""
ROOM_FOR_GROWTH = 0.95
"""Share of the blocks that a higher sequence limit may plan with: the full pool would preempt."""


def why_queued(facts: Facts, state: State) -> Reason:
    """What the head of the queue waited for, most of the time."""
    blocked_by, share = facts.blocked_by, f"{facts.blocked_share:.0%}"
    if blocked_by == "policy":
        return Reason(
            "admission policy",
            [f"the policy kept the head of the queue out {share} of the waiting time"],
            "another --scheduling-policy",
        )
    if blocked_by == "slots":
        return _sequence_limit(facts, state)
    if blocked_by == "blocks":
        return _kv_capacity(facts, state, [], max_num_seqs=None)
    return _token_budget(facts, state)


def _rates(facts: Facts, state: State) -> list[str]:
    offered, served = facts.offered, facts.served
    if state != "overloaded" or offered is None or served is None:
        return []
    return [f"{number(offered)} requests/s arrive, {number(served)} are served while others wait"]


def _need(facts: Facts, state: State) -> float:
    """How many times as much the machine would have to serve."""
    offered, served = facts.offered, facts.served
    if state == "overloaded" and offered is not None and served is not None:
        return max(offered / served / HEADROOM, WORTH)
    return max(facts.pressed / PRESSED, WORTH)


def _batch_factor(facts: Facts, state: State) -> float:
    """How many times as many sequences at once would do (``LARGEST_FACTOR`` if no number does)."""
    if state != "overloaded":
        return min(max(facts.demand / facts.running_blocked, 1.25), LARGEST_FACTOR)
    need, factor = _need(facts, state), 1.0
    while factor < LARGEST_FACTOR and facts.gain(factor) < need:
        factor *= 1.1
    return min(factor * PEAKS, LARGEST_FACTOR)


def _sequence_limit(facts: Facts, state: State) -> Reason:
    setup, config = facts.setup, facts.setup.config
    limit = config.max_num_seqs
    peak = facts.steps.most("blocks_used", facts.is_blocked)
    evidence = [
        f"the head of the queue waited for one of max_num_seqs = {limit:,} slots "
        f"{facts.blocked_share:.0%} of the waiting time",
        *_rates(facts, state),
    ]
    factor = _batch_factor(facts, state)
    holds = int(limit * ROOM_FOR_GROWTH * setup.num_blocks / max(peak, 1))
    # vLLM wants a token of the budget for every sequence.
    wanted = math.ceil(limit * factor)
    target = min(wanted, holds, config.max_num_batched_tokens)
    target = _within_token_limit(facts, limit, target)
    changed = what_if(setup, {"max_num_seqs": target})
    if changed is not None and changed.config.max_num_seqs < target:  # no room for their windows
        target = changed.config.max_num_seqs
    gain = facts.gain(target / limit)
    if target <= limit or (state == "overloaded" and gain < WORTH):
        if holds < WORTH * limit and facts.gain(factor) >= WORTH:
            return _kv_capacity(facts, state, evidence, max_num_seqs=wanted)
        return _saturated(facts, state, [*evidence, _no_use(facts)])
    more = target / limit
    evidence.append(
        f"{peak / setup.num_blocks:.0%} of the blocks in use then; a step of {number(more)} x the "
        f"sequences would last {number(_ratio(facts, more))} x as long"
    )
    if state == "overloaded":
        change = f"a higher --max-num-seqs: {target:,} at once serve about {number(gain)} x as much"
    else:
        change = f"a higher --max-num-seqs: room for {facts.demand:,} sequences, as many as the peaks bring"
    if target < wanted:
        change += (
            f" (more than {target:,} would run out of blocks, token budget or the limit on TPOT)"
        )
    replicas = _still_needed(facts, state, gain)
    return Reason(
        "sequence limit",
        evidence,
        change + _and_replicas(replicas),
        {"max_num_seqs": target},
        replicas,
    )


def _ratio(facts: Facts, factor: float) -> float:
    return factor / facts.gain(factor)


def _no_use(facts: Facts) -> str:
    return (
        f"twice as many sequences at once would serve only {number(facts.gain(2))} x as much: their "
        f"steps last {number(_ratio(facts, 2))} x as long"
    )


def _within_token_limit(facts: Facts, limit: int, target: int) -> int:
    """The largest number of sequences up to ``target`` whose steps keep the limit on TPOT."""
    while target > limit and not _keeps_token_limit(facts, facts.setup.cost, target / limit):
        target = max(limit, int(target * 0.95))
    return target


def _keeps_token_limit(facts: Facts, cost: CostModel, factor: float) -> bool:
    """Whether ``factor`` times as many sequences could decode within the limit on TPOT, if any."""
    tpot = facts.limit_ns.get("tpot")
    step_ns = facts.blocked_load.decode_step(cost, factor).duration_ns
    # More sequences also bring more prefill in between: the stretch grows with them a little.
    return tpot is None or step_ns * facts.token_stretch <= TOKEN_MARGIN * tpot


def _kv_capacity(
    facts: Facts, state: State, evidence: list[str], max_num_seqs: int | None
) -> Reason:
    """Blocks are what is short, or what is short next if ``max_num_seqs`` is raised to what is
    wanted: then neither helps without the other."""
    setup, steps = facts.setup, facts.steps
    if facts.blocked_by == "blocks":
        evidence = [
            f"the head of the queue waited for free blocks {facts.blocked_share:.0%} of the "
            "waiting time",
            *_rates(facts, state),
        ]
    evidence = [
        *evidence,
        f"{steps.most('blocks_used'):,} of {setup.num_blocks:,} blocks in use at the peak, "
        f"{steps.total('preemptions'):,} preemptions",
    ]
    factor = _batch_factor(facts, state)
    if state != "overloaded":
        factor = min(UNEVEN * factor, LARGEST_FACTOR)
    if state == "overloaded" and facts.gain(factor) < WORTH:
        return _saturated(facts, state, [*evidence, _no_use(facts)])
    need = _need(facts, state) if state == "overloaded" else factor

    def value(option: Option) -> float:
        grown = option.setup.num_blocks / setup.num_blocks
        grown = min(grown, (max_num_seqs or setup.config.max_num_seqs) / facts.running_blocked)
        if not _keeps_token_limit(facts, option.setup.cost, grown):
            return 0.0
        return facts.gain(grown, option.setup.cost) if state == "overloaded" else grown

    best = choose(kv_options(setup, factor), value, need)
    if best is None or best[1] < need:
        evidence.append(kv_left(setup))
        # More GPUs in one machine are worth naming where replicas would not do as well.
        gpus = choose(more_gpus(setup), value, max(need, 2))
        best = gpus if gpus is not None and gpus[1] >= max(need, 2) else best
    if best is None:
        return _replicas(facts, state, "KV capacity", evidence)
    option, worth = best
    change = f"more KV memory: {option.words}"
    kind: Kind = "KV capacity"
    changes = dict(option.changes)
    if max_num_seqs is not None:
        kind = "sequence limit"
        grown = option.setup.num_blocks / setup.num_blocks
        changes["max_num_seqs"] = min(max_num_seqs, int(setup.config.max_num_seqs * grown))
        change = f"a higher --max-num-seqs together with {change}"
    if state == "overloaded":
        change += f", serves about {number(worth)} x as much"
    elif worth >= need:
        change += f", room for {facts.demand:,} sequences, as many as the peaks bring"
    replicas = _still_needed(facts, state, worth)
    return Reason(kind, evidence, change + _and_replicas(replicas), changes, replicas)


def _token_budget(facts: Facts, state: State) -> Reason:
    """The head waited for room in a step; or, where nobody waited, for the step in progress."""
    config = facts.setup.config
    budget = config.max_num_batched_tokens
    evidence = _rates(facts, state)
    if facts.blocked_by == "budget":
        evidence = [
            f"the head of the queue waited for the step's token budget of {budget:,} "
            f"{facts.blocked_share:.0%} of the waiting time",
            *evidence,
        ]
        found = _larger_budget(facts)
        # A little more is no answer where the load asks for several times as much.
        if found is not None and found[1] >= min(_need(facts, state), BUDGET_WORTH):
            larger, gain, ratio = found
            evidence.append(
                f"the steps have room: one of {larger:,} tokens would last {number(ratio)} x as long"
            )
            replicas = _still_needed(facts, state, gain)
            return Reason(
                "token budget",
                evidence,
                f"a larger --max-num-batched-tokens: prompts get through {number(gain)} x as fast"
                + _and_replicas(replicas),
                {"max_num_batched_tokens": larger},
                replicas,
            )
    if state != "overloaded" and (facts.is_one_burst or facts.pressed < PRESSED):
        return _bursts(facts, evidence)
    return _saturated(facts, state, evidence)


def _larger_budget(facts: Facts) -> tuple[int, float, float] | None:
    """(budget, prompt tokens per second over those now, step time over that now), if worth it.

    The smallest that gets most of what there is to be got: long steps are felt between tokens.
    """
    cost, load = facts.setup.cost, facts.blocked_load
    budget = facts.setup.config.max_num_batched_tokens
    decodes = min(round(load.decodes), budget - 1)
    now = load.prefill_step(cost, budget - decodes).duration_ns
    limits = [facts.limit_ns[m] for m in ("itl", "tpot") if m in facts.limit_ns]
    longest = min(limits, default=math.inf)
    found = []
    for factor in (2, 4, 8, 16, 32):
        tokens = factor * budget - decodes
        step = load.prefill_step(cost, tokens).duration_ns
        if step > longest:
            break
        found.append((factor * budget, tokens / (budget - decodes) * now / step, step / now))
    best = max((gain for _, gain, _ in found), default=0.0)
    if best < WORTH:
        return None
    # A little more is not worth twice the step.
    return next(entry for entry in found if entry[1] >= 0.8 * best)


def _bursts(facts: Facts, evidence: list[str]) -> Reason:
    if facts.is_one_burst:
        came = f"all {facts.num_requests:,} requests came within one step"
    else:
        came = (
            f"somebody waited in {facts.pressed:.0%} of the arrival time only, yet "
            f"{facts.queued_share:.0%} of the requests queued: they come in bursts"
        )
    replicas = 2
    limit = facts.limit_ns.get("ttft")
    if limit is not None and "ttft" in facts.suffers:
        # In a burst each machine takes its share of those before.
        replicas = max(2, math.ceil(facts.summary["ttft_s"]["p99"] * 1e9 / limit / HEADROOM))
    return Reason(
        "queue",
        [came, *evidence],
        f"spread the arrivals (rate limit, jitter), or {replicas} replicas that share the bursts",
        replicas=replicas,
    )


def _saturated(facts: Facts, state: State, evidence: list[str]) -> Reason:
    """No setting of the scheduler serves more."""
    rows = facts.is_blocked
    compute, bandwidth = facts.use(rows, "flops"), facts.use(rows, "bytes")
    is_memory = compute is not None and bandwidth is not None and bandwidth > compute
    kind: Kind = "memory bandwidth" if is_memory else "compute"
    evidence = [
        *evidence,
        f"steps take {ms(facts.mean_ns(rows))} on average while others wait, {shares(facts, rows)}",
    ]
    need = _need(facts, state)
    best = choose(
        faster_options(facts.setup), lambda option: facts.gain(1, option.setup.cost), need
    )
    if best is not None and best[1] >= need:
        option, gain = best
        return Reason(
            kind, evidence, f"{option.words}: serves about {number(gain)} x as much", option.changes
        )
    return _replicas(facts, state, kind, evidence)


def _replicas_needed(facts: Facts, state: State) -> int:
    offered, served = facts.offered, facts.served
    if state != "overloaded" or offered is None or served is None:
        return 2
    return max(2, math.ceil(offered / served / HEADROOM))


def _replicas(facts: Facts, state: State, kind: Kind, evidence: list[str]) -> Reason:
    count = _replicas_needed(facts, state)
    offered = facts.offered
    each = f", {number(offered / count)} requests/s each" if offered is not None else ""
    change = f"more of the same: {count:,} replicas{each} (or a faster GPU)"
    if not facts.setup.enable_prefix_caching:
        change += "; prefix caching, which is off, may spare a part of it"
    return Reason(kind, evidence, change, replicas=count)


def _still_needed(facts: Facts, state: State, gain: float) -> int:
    """Replicas beside a change that serves ``gain`` times as much."""
    return max(1, math.ceil(_need(facts, state) / gain - 0.05)) if state == "overloaded" else 1


def with_replicas(facts: Facts, state: State, reason: Reason) -> Reason:
    """A reason that is not the queue's, with the replicas that an overload asks for beside it."""
    if state != "overloaded":
        return reason
    changed = what_if(facts.setup, reason.changes)
    count = _still_needed(facts, state, facts.gain(1, changed.cost) if changed else 1.0)
    return replace(
        reason,
        evidence=[*reason.evidence, *_rates(facts, state)],
        change=reason.change + _and_replicas(count),
        replicas=max(count, reason.replicas),
    )


def _and_replicas(count: int) -> str:
    return f"; the load still asks for {count:,} replicas then" if count > 1 else ""
