"""Rules for requests that are scheduled at once and still slow: their prompts, or their tokens."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from records.columns import IntArray
from records.steps import Rows, Where
from simulator.verdict.changes import (
    HEADROOM,
    LARGEST_FACTOR,
    WORTH,
    Kind,
    Option,
    Reason,
    choose,
    faster_machine,
    faster_options,
    kv_left,
    kv_options,
)
from simulator.verdict.facts import Facts, is_mixed, is_prefill, is_pure, ms, number, shares

SATURATED = 0.45
"""Share of a peak (FLOP/s or bandwidth) from which on it is what bounds a step; kernels reach
0.65 to 0.87 of the datasheet, 8-bit ones 0.45, and a step has fixed times besides."""
INTERFERENCE = 2.0
"""Decodes are disturbed where steps with prefill last this many times as long as decode-only ones,
or a preempted request's longest gap as the median one."""
CALM = 3.0
"""Where no limit says how long a gap may be, p99 ITL up to this many times p50 is calm, and chunks
are cut such that a full step lasts this many times a decode-only one: smaller ones cost the first
tokens more than they give the others."""
SMALLEST_CHUNK = 128
"""Smaller chunks spend most of a step on reading the weights."""
JITTER_SHARE = 0.005
"""Share of requests preempted, from which on preemption shows in the p99."""


def slow_first_token(facts: Facts) -> Reason:
    """The prompts themselves take long."""
    setup, config, cost = facts.setup, facts.setup.config, facts.setup.cost
    load = facts.load(is_prefill)
    prompt = facts.long_prompt
    evidence = [
        f"prompts of {prompt:,} tokens (95th percentile) to compute; steps with prefill take "
        f"{ms(facts.mean_ns(is_prefill))} on average, {shares(facts, is_prefill)}"
    ]
    threshold = config.long_prefill_token_threshold
    chunk = config.max_num_batched_tokens - round(load.decodes)
    if threshold:
        chunk = min(chunk, threshold)
    chunk = max(chunk, 1)
    if prompt > chunk:
        in_chunks = math.ceil(prompt / chunk) * load.prefill_step(cost, chunk).duration_ns
        gain = in_chunks / load.prefill_step(cost, prompt).duration_ns
        if gain >= WORTH:
            is_threshold = threshold and chunk == threshold
            name = "long_prefill_token_threshold" if is_threshold else "max_num_batched_tokens"
            larger = 0 if is_threshold else 2 ** math.ceil(math.log2(prompt + load.decodes))
            evidence.append(
                f"such a prompt takes {math.ceil(prompt / chunk):,} steps of {chunk:,} tokens, "
                f"{number(gain)} x as long as at once"
            )
            words = f"larger chunks: --{name.replace('_', '-')} {larger:,}"
            return Reason("token budget", evidence, words, {name: larger})
    now = load.prefill_step(cost, prompt).duration_ns
    limit = facts.limit_ns.get("ttft", now)
    best = choose(
        faster_machine(setup),
        lambda option: now / load.prefill_step(option.setup.cost, prompt).duration_ns,
        max(WORTH, now / limit),
    )
    if best is None:
        return Reason("compute", evidence, "a faster GPU, or shorter prompts (prefix caching)")
    option, gain = best
    return Reason(
        "compute",
        evidence,
        f"{option.words}: computes such a prompt {number(gain)} x as fast",
        option.changes,
    )


def slow_tokens(facts: Facts) -> Reason:
    """What bounds the time of a step, and its tail."""
    for rule in (_jitter, _interference):
        reason = rule(facts)
        if reason is not None:
            return reason
    return _bound(facts)


def _jitter(facts: Facts) -> Reason | None:
    """Preempted requests stand still until they are let in again."""
    if facts.num_preempted < max(1.0, JITTER_SHARE * facts.num_requests):
        return None
    median, longest = facts.gaps.percentile(50), facts.longest_gap_preempted
    if median is None or longest < INTERFERENCE * median:
        return None
    if facts.suffers and not _are_most_misses(facts):
        return None
    setup = facts.setup
    evidence = [
        f"{facts.num_preempted:,} requests were preempted ({setup.config.preemption_mode}) and "
        "stood still until they were let in again",
        f"the longest gap between two tokens of theirs is {ms(longest)}, the median of all gaps "
        f"{ms(median)}",
    ]
    if facts.suffers:
        evidence.append(
            f"{int((facts.misses & facts.was_preempted).sum()):,} of {int(facts.misses.sum()):,} "
            "requests that miss the limits were preempted"
        )
    crowded = facts.steps.percentile(
        _blocks_wanted, 99, lambda rows: rows["blocks_used"] >= 0.9 * setup.num_blocks
    )
    wanted = 1.0 if crowded is None else crowded / setup.num_blocks
    factor = max(1.1 * wanted, 1.25)
    best = choose(
        kv_options(setup, factor),
        lambda option: option.setup.num_blocks / setup.num_blocks,
        factor,
    )
    if best is None:
        fewer = max(1, int(0.8 * facts.running_blocked))
        return Reason(
            "preemption jitter",
            [*evidence, kv_left(setup)],
            "fewer sequences at once, none of them interrupted: a lower --max-num-seqs",
            {"max_num_seqs": fewer},
        )
    option, _ = best
    return Reason(
        "preemption jitter",
        evidence,
        f"more KV memory, so that nobody is put back: {option.words}",
        option.changes,
    )


def _blocks_wanted(rows: Rows) -> IntArray:
    """If each of those there, running or put back, held what the running ones hold."""
    there = rows["running"] + rows["waiting"]
    wanted: IntArray = rows["blocks_used"] * there // rows["running"].clip(1)
    return wanted


def _are_most_misses(facts: Facts) -> bool:
    return 2 * int((facts.misses & facts.was_preempted).sum()) >= int(facts.misses.sum())


def _interference(facts: Facts) -> Reason | None:
    """Decodes that share a step with a prompt wait for it."""
    if not facts.steps.count(is_mixed) or not facts.steps.count(is_pure):
        return None
    pure, mixed = facts.mean_ns(is_pure), facts.mean_ns(is_mixed)
    median, tail = facts.gaps.percentile(50), facts.gaps.percentile(99)
    if mixed < INTERFERENCE * pure or median is None or tail is None:
        return None
    limit = min((facts.limit_ns[m] for m in ("tpot", "itl") if m in facts.suffers), default=None)
    if limit is None and facts.suffers:
        return None  # an answer as a whole is late: smaller chunks make it later
    if limit is None:
        if tail < CALM * median:
            return None
    elif pure > limit:
        return None  # too slow without any prefill
    steps = facts.steps
    decoded = steps.total("decode_tokens")
    share = steps.total("decode_tokens", is_mixed) / max(decoded, 1)
    extra = facts.busy_ns(is_mixed) - pure * steps.count(is_mixed)
    busy = extra / max(facts.busy_ns(is_mixed) + facts.busy_ns(is_pure), 1)
    evidence = [
        f"steps with prefill and decodes together last {ms(mixed)} on average, decode-only ones "
        f"{ms(pure)}; {share:.0%} of the decoded tokens come from the long ones",
        f"ITL p50 is {ms(median)}, p99 {ms(tail)}; prefill takes {busy:.0%} of the busy time from "
        "the decodes",
    ]
    found = _smaller_budget(facts, limit)
    if found is None:
        return Reason(
            "prefill interference",
            evidence,
            "prefill on machines of its own, or 2 replicas, where fewer prompts meet a decode; "
            "smaller chunks would be too slow for the prompts",
            replicas=2,
        )
    changes: dict[str, Any] = {"max_num_batched_tokens": found.budget}
    if not facts.setup.config.enable_chunked_prefill:
        changes = {"enable_chunked_prefill": True} | changes
    change = "smaller chunks of prefill (first tokens come a little later)"
    if found.replicas > 1:
        change += (
            f" on {found.replicas} replicas, as one would not keep up with the prompts like that; "
            "or prefill on machines of its own"
        )
    return Reason("prefill interference", evidence, change, changes, found.replicas)


class _Chunks(NamedTuple):
    budget: int
    replicas: int
    """Machines that keep up with the prompts in chunks of that size."""


def _smaller_budget(facts: Facts, limit_ns: int | None) -> _Chunks | None:
    """The largest token budget of which full steps keep the limit, or are calm where there is none.

    ``None`` where the prompts are no larger than that, or would then miss the limit on TTFT.
    """
    cost, load = facts.setup.cost, facts.load(is_mixed)
    target = limit_ns or CALM * facts.mean_ns(is_pure)
    decodes = round(load.decodes)
    tokens = min(facts.setup.config.max_num_batched_tokens, facts.steps.most("prefill_tokens"))
    while tokens >= SMALLEST_CHUNK:
        tokens //= 2
        step = load.last_chunk_step(cost, tokens, facts.longest_prompt).duration_ns
        if step <= target:
            break
    else:
        return None
    first_token = math.ceil(facts.long_prompt / tokens) * step
    if first_token > facts.limit_ns.get("ttft", first_token):
        return None
    most = tokens * 1e9 / step * HEADROOM
    # vLLM wants a token of the budget for every sequence.
    budget = max(tokens + decodes, facts.setup.config.max_num_seqs)
    return _Chunks(budget, max(1, math.ceil(facts.prefill_rate / most)))


def _bound(facts: Facts) -> Reason:
    """The typical step itself: what it is made of."""
    decode_share = facts.busy_ns(is_pure) / facts.busy_ns()
    rows = is_pure if decode_share >= 0.5 else is_prefill
    name = "decode-only steps" if decode_share >= 0.5 else "steps with prefill"
    share = max(decode_share, 1 - decode_share)
    compute, bandwidth = facts.use(rows, "flops"), facts.use(rows, "bytes")
    kind: Kind = "none"
    if compute is not None and bandwidth is not None and max(compute, bandwidth) >= SATURATED:
        kind = "memory bandwidth" if bandwidth >= compute else "compute"
    used = facts.steps.most("blocks_used") / facts.setup.num_blocks
    evidence = [
        f"{name} take {share:.0%} of the busy time: {ms(facts.mean_ns(rows))} each, "
        + shares(facts, rows),
        f"most sequences at once: {facts.steps.most('running'):,}; most blocks in use: {used:.0%}",
    ]
    if not facts.suffers and kind == "none":
        return Reason(kind, evidence, "nothing: requests are served as they come")
    return _shorter_steps(facts, rows, kind, evidence)


def _shorter_steps(facts: Facts, rows: Where, kind: Kind, evidence: list[str]) -> Reason:
    """The cheapest way to keep the limit on tokens; without one, the way that gives most."""
    load, cost = facts.load(rows), facts.setup.cost
    limit = facts.limit_ns.get("tpot", facts.limit_ns.get("itl")) if facts.suffers else None
    now = load.time_ns(cost)

    def speedup(option: Option) -> float:
        return now / load.time_ns(option.setup.cost)

    if limit is None:
        best = choose(faster_options(facts.setup), speedup, LARGEST_FACTOR)
        need = WORTH
    else:
        need = max(WORTH, facts.mean_ns(rows) / limit)
        best = choose(faster_machine(facts.setup), speedup, need)
    if best is not None and best[1] >= need:
        option, worth = best
        words = f"{option.words}: steps take {number(1 / worth)} x as long"
        return Reason(kind, evidence, words, option.changes)
    for count in range(2, LARGEST_FACTOR if limit else 0):
        if now / load.time_ns(cost, 1 / count) >= need:
            words = f"fewer sequences for each machine: {count} replicas"
            return Reason(kind, evidence, words, replicas=count)
    if best is None:
        return Reason(kind, evidence, "a faster GPU: no setting of this one shortens its steps")
    option, worth = best
    words = f"{option.words}: steps take {number(1 / worth)} x as long, which is not yet enough"
    return Reason(kind, evidence, words, option.changes)
