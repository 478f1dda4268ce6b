"""From the rows of a run to plain words: how it went, what was short, and what would help most.

Every rule looks at the run's rows, asks the cost model what a step of another size would take, and
carries its evidence along. A change is named only where those prices say that it is worth it. The
thresholds are judgement calls, named here and in ``verdict_facts``; docs/verdict.md lists them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from blockmanager.ledger_gpu import gpu_budget
from catalog import DTYPE_BITS
from records.columns import Columns
from records.gaps import GapCounts
from simulator.settings import DEFAULT_UTILIZATION, GIB, Setup
from simulator.verdict_facts import Changes, Facts, as_flags, what_if

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
    "refusals",
]

QUEUED_SHARE = 0.05
"""From this share of requests on, queueing is what users feel."""
OVERLOAD_SHARE = 0.05
"""Share of all requests still waiting when the last one arrives (or that gave up waiting), from
which on, and growing, the load is more than the machine can carry."""
OVERLOAD_WAITING = 10
"""Fewer than this many waiting is a moment, not a trend."""
GROWTH = 1.25
"""The queue grows if it was this many times longer in the last quarter than in the second."""
PRESSED = 0.7
"""Somebody waited in less than this share of the arrival time: what queued came in bursts."""
WORTH = 1.15
"""A change is worth naming if it serves this many times as much (or is as much faster): less is
within what the prices of an uncalibrated cost model can be wrong by."""
HEADROOM = 0.9
"""Machines are counted such that each is offered at most this share of what it can serve: a queue
without slack grows too."""
SATURATED = 0.45
"""Share of a peak (FLOP/s or bandwidth) from which on it is what bounds a step; kernels reach
0.65 to 0.87 of the datasheet, 8-bit ones 0.45, and a step has fixed times besides."""
INTERFERENCE = 2.0
"""Steps that mix prefill with decodes last this many times longer than decode-only ones, and p99 ITL
stands this many times over p50."""
CALM = 3.0
"""Where no limit says how long a step may be, chunks are cut such that it lasts this many times a
decode-only one: smaller ones cost the first tokens more than they give the others."""
SMALLEST_CHUNK = 128
"""Smaller chunks spend most of a step on reading the weights."""
JITTER_SHARE = 0.005
"""Share of requests preempted, from which on preemption shows in the p99."""
PEAKS = 1.5
"""Random arrivals come in peaks: sequences and blocks for this many times the mean cost nothing where
they are there."""
ROOM_FOR_GROWTH = 0.95
"""Share of the blocks that a higher sequence limit may plan with: the full pool would preempt."""
LARGEST_FACTOR = 64
"""Batches larger than this many times the present one are not looked at."""


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


@dataclass(frozen=True, slots=True)
class _Reason:
    kind: Kind
    evidence: list[str]
    change: str
    changes: Changes = field(default_factory=dict)
    replicas: int = 1


class _Option(NamedTuple):
    """A change that could be made, and the setup that it would give."""

    words: str
    changes: Changes
    setup: Setup


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
    _, second, _, last = facts.quarters
    enough = max(OVERLOAD_WAITING, OVERLOAD_SHARE * facts.num_requests)
    if facts.waiting_at_end >= enough and last > GROWTH * second:
        return "overloaded"
    # Where clients give up, the queue stops growing however long the overload lasts.
    if facts.num_gave_up >= enough and facts.pressed >= PRESSED:
        return "overloaded"
    return "backlogged" if facts.queued_share >= QUEUED_SHARE else "stable"


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
        text = (
            f"Backlogged: {facts.queued_share:.0%} of the requests waited for more than the steps in "
            f"progress, but {what}"
        )
    else:
        text = "Stable: requests are served as they come."
    attainment = facts.summary["goodput"]["attainment"]
    if attainment is not None:
        text += f" {attainment:.1%} of all requests met the limits."
    for entry in facts.summary["goodput"]["slo"]["statistics"]:
        text += f" {entry['limit']} {'holds' if entry['holds'] else 'does not hold'}."
    counts = {
        "were refused": facts.num_refused,
        "gave up waiting": facts.num_gave_up,
        "were not finished when the run was stopped": facts.num_unfinished,
        "had not arrived by then": facts.num_not_arrived,
    }
    told = [f"{count:,} {what}" for what, count in counts.items() if count]
    return f"{text} {', '.join(told)}." if told else text


# -- which question to ask -----------------------------------------------------------------------


def _reason(facts: Facts, state: State) -> _Reason:
    misses = int(facts.misses.sum())
    failed = int((facts.misses & facts.has_failed).sum())
    if state != "overloaded" and facts.suffers and failed > misses / 2:
        return _refusals(facts.failures, facts.setup)
    part = "queue" if state == "overloaded" else facts.worst_part()
    if part == "queue":
        return _why_queued(facts, state)
    return _slow_first_token(facts) if part == "first token" else _slow_tokens(facts)


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


def _refusals(reasons: list[str], setup: Setup) -> _Reason:
    """Most of what went wrong could never be served, however fast the machine."""
    evidence = [f"{len(reasons):,} requests could not be served; the first: {reasons[0]}"]
    # "... need 14 blocks, the pool has 10", or a sequence that grew over the whole pool.
    needs = [int(found[1]) for why in reasons if (found := re.search(r"need (\d+) blocks", why))]
    exhausted = reasons.count("kv_exhausted")
    if 2 * (len(needs) + exhausted) > len(reasons):
        wanted = max(needs, default=2 * setup.num_blocks)
        room = _most_blocks(setup)
        gib = _kv_gib(setup, wanted)
        if wanted <= room:
            return _Reason(
                "KV capacity",
                evidence,
                f"more KV memory: {gib} GiB hold the largest of them alone",
                _more_blocks(setup, wanted),
            )
        return _Reason(
            "KV capacity",
            evidence,
            f"more KV memory: the largest of them needs {gib} GiB, more than {setup.gpu.name} has left; "
            "a smaller KV dtype, more GPUs (--tensor-parallel-size) or shorter requests",
        )
    longest = setup.shape.max_model_len
    if setup.config.max_model_len < longest:
        return _Reason(
            "refusals",
            evidence,
            f"a higher --max-model-len: {setup.shape.name} goes up to {longest:,}",
            {"max_model_len": longest},
        )
    return _Reason("refusals", evidence, "shorter requests, or a model with a longer context")


# -- requests wait to be scheduled ---------------------------------------------------------------


def _why_queued(facts: Facts, state: State) -> _Reason:
    """What the head of the queue waited for, most of the time."""
    blocked_by = facts.blocked_by
    if blocked_by == "policy":
        return _Reason(
            "admission policy",
            [
                f"the policy kept the head of the queue out {facts.blocked_share:.0%} of the waiting time"
            ],
            "another --scheduling-policy",
        )
    if blocked_by == "slots":
        return _sequence_limit(facts, state)
    if blocked_by == "blocks":
        return _kv_capacity(facts, state, [])
    return _token_budget(facts, state)


def _rates(facts: Facts, state: State) -> list[str]:
    offered, served = facts.offered, facts.served
    if state != "overloaded" or offered is None or served is None:
        return []
    return [f"{offered:.3g} requests/s arrive, {served:.3g} are served while others wait"]


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


def _sequence_limit(facts: Facts, state: State) -> _Reason:
    setup, config = facts.setup, facts.setup.config
    limit = config.max_num_seqs
    used = facts.steps["blocks_used"][facts.is_blocked]
    peak = int(used.max())
    evidence = [
        f"the head of the queue waited for one of max_num_seqs = {limit:,} slots "
        f"{facts.blocked_share:.0%} of the waiting time",
        *_rates(facts, state),
    ]
    factor = _batch_factor(facts, state)
    holds = int(limit * ROOM_FOR_GROWTH * setup.num_blocks / max(peak, 1))
    # vLLM wants a token of the budget for every sequence.
    target = min(math.ceil(limit * factor), holds, config.max_num_batched_tokens)
    target = _within_token_limit(facts, limit, target)
    gain = facts.gain(target / limit)
    if target <= limit or (state == "overloaded" and gain < WORTH):
        if holds < WORTH * limit and facts.gain(factor) >= WORTH:
            return _kv_capacity(facts, state, evidence)
        return _saturated(facts, state, [*evidence, _no_use(facts)])
    evidence.append(
        f"{peak / setup.num_blocks:.0%} of the blocks in use then; a step of "
        f"{target / limit:.3g} x the sequences would last {_ratio(facts, target / limit):.3g} x as long"
    )
    change = (
        f"a higher --max-num-seqs: {facts.demand:,} sequences were there at the 95th percentile"
    )
    if state == "overloaded":
        change = f"a higher --max-num-seqs: {target:,} at once serve about {gain:.2g} x as much"
    replicas = _still_needed(facts, state, gain)
    return _Reason(
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
        f"twice as many sequences at once would serve only {facts.gain(2):.3g} x as much: their steps "
        f"last {_ratio(facts, 2):.3g} x as long"
    )


def _within_token_limit(facts: Facts, limit: int, target: int) -> int:
    """The largest number of sequences up to ``target`` whose steps keep the limit on TPOT."""
    tpot = facts.limit_ns.get("tpot")
    if tpot is None:
        return target
    mean = facts.mean_ns(facts.is_blocked)
    while target > limit and mean * _ratio(facts, target / limit) > tpot:
        target = max(limit, int(target * 0.95))
    return target


def _kv_capacity(facts: Facts, state: State, evidence: list[str]) -> _Reason:
    setup, steps = facts.setup, facts.steps
    if facts.blocked_by == "blocks":
        evidence = [
            f"the head of the queue waited for free blocks {facts.blocked_share:.0%} of the waiting "
            "time",
            *_rates(facts, state),
        ]
    evidence = [
        *evidence,
        f"{int(steps['blocks_used'].max()):,} of {setup.num_blocks:,} blocks in use at the peak, "
        f"{int(steps['preemptions'].sum()):,} preemptions",
    ]
    factor = _batch_factor(facts, state)
    if state == "overloaded" and facts.gain(factor) < WORTH:
        return _saturated(facts, state, [*evidence, _no_use(facts)])
    need = _need(facts, state) if state == "overloaded" else factor

    def value(option: _Option) -> float:
        grown = option.setup.num_blocks / setup.num_blocks
        grown = min(grown, setup.config.max_num_seqs / facts.running_blocked)
        return facts.gain(grown, option.setup.cost) if state == "overloaded" else grown

    best = _choose(_kv_options(setup, factor), value, need)
    if best is None:
        evidence.append(_kv_left(setup))
        return _replicas(facts, state, "KV capacity", evidence)
    option, worth = best
    if worth < need:
        evidence.append(_kv_left(setup))
    gpus = option.setup.settings["tensor_parallel_size"].value
    replicas = _still_needed(facts, state, worth)
    if gpus > setup.settings["tensor_parallel_size"].value and worth < need:
        # More GPUs that do not do it are no better than replicas, which serve twice as much.
        return _replicas(facts, state, "KV capacity", evidence)
    wanted = _kv_gib(setup, math.ceil(factor * setup.num_blocks))
    change = f"more KV memory: the load asks for about {wanted} GiB; {option.words}"
    if state == "overloaded":
        change = f"more KV memory: {option.words} serves about {worth:.2g} x as much"
    return _Reason(
        "KV capacity", evidence, change + _and_replicas(replicas), option.changes, replicas
    )


def _choose(options: Iterator[_Option], value: Any, need: float) -> tuple[_Option, float] | None:
    """The first option whose value is enough, else the best one that is worth it."""
    best: tuple[_Option, float] | None = None
    for option in options:
        worth = value(option)
        if worth >= need:
            return option, worth
        if worth >= WORTH and (best is None or worth > best[1]):
            best = option, worth
    return best


def _kv_options(setup: Setup, factor: float) -> Iterator[_Option]:
    """Ways to more blocks, the cheapest first."""
    wanted = math.ceil(factor * setup.num_blocks)
    most = min(wanted, _most_blocks(setup))
    if most > setup.num_blocks:
        changes = _more_blocks(setup, most)
        whole = "" if most == wanted else f", all that {setup.gpu.name} has left,"
        yield from _option(setup, f"{_kv_gib(setup, most)} GiB{whole}", changes)
    if DTYPE_BITS[setup.settings["kv_cache_dtype"].value] == 16:
        words = "an 8-bit KV cache (check the answers), half the bytes a token,"
        yield from _option(setup, words, _same_memory(setup, 2) | {"kv_cache_dtype": "fp8"})
    tp = 2 * setup.settings["tensor_parallel_size"].value
    yield from _option(
        setup,
        f"{tp} GPUs that share each layer",
        {"tensor_parallel_size": tp} | _same_memory(setup, 2),
    )


def _option(setup: Setup, words: str, changes: Changes) -> Iterator[_Option]:
    changed = what_if(setup, changes)
    if changed is not None:
        yield _Option(words, changes, changed)


def _most_blocks(setup: Setup) -> int:
    """Blocks that the GPU has room for, beside weights and activations."""
    settings, config = setup.settings, setup.config
    room = gpu_budget(
        setup.gpu,
        setup.shape,
        weight_dtype=settings["weight_dtype"].value,
        tp=settings["tensor_parallel_size"].value,
        gpu_memory_utilization=DEFAULT_UTILIZATION,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
    ).kv_bytes
    more = max(room - settings["kv_bytes"].value, 0)
    return setup.num_blocks + int(more // setup.layout.bytes_per_block)


def _kv_gib(setup: Setup, num_blocks: int) -> str:
    """KV memory with that many blocks, rounded up to three digits, as ``--kv-gb`` takes it."""
    more = (num_blocks - setup.num_blocks) * setup.layout.bytes_per_block
    gib = (setup.settings["kv_bytes"].value + more) / GIB
    digits = max(0, 2 - math.floor(math.log10(gib)))
    return f"{math.ceil(gib * 10**digits) / 10**digits:.{digits}f}"


def _more_blocks(setup: Setup, num_blocks: int) -> dict[str, Any]:
    """The option by which the memory was given, at another size."""
    if setup.settings["num_gpu_blocks"].source == "given":
        return {"num_gpu_blocks": num_blocks + 1}
    return {"kv_gb": _kv_gib(setup, num_blocks)}


def _same_memory(setup: Setup, factor: int) -> dict[str, Any]:
    """What a smaller token asks for where the memory was given as a number of blocks."""
    if setup.settings["num_gpu_blocks"].source == "given":
        return {"num_gpu_blocks": factor * setup.num_blocks + 1}
    return {}


def _kv_left(setup: Setup) -> str:
    most = _kv_gib(setup, _most_blocks(setup))
    return f"{setup.gpu.name} has at most about {most} GiB for KV beside weights and activations"


def _token_budget(facts: Facts, state: State) -> _Reason:
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
        if found is not None:
            larger, gain, ratio = found
            evidence.append(
                f"the steps have room: one of {larger:,} tokens would last {ratio:.3g} x as long"
            )
            replicas = _still_needed(facts, state, gain)
            return _Reason(
                "token budget",
                evidence,
                f"a larger --max-num-batched-tokens: prompts get through {gain:.2g} x as fast"
                + _and_replicas(replicas),
                {"max_num_batched_tokens": larger},
                replicas,
            )
    if state != "overloaded" and (facts.is_one_burst or facts.pressed < PRESSED):
        return _bursts(facts, evidence)
    return _saturated(facts, state, evidence)


def _larger_budget(facts: Facts) -> tuple[int, float, float] | None:
    """(budget, prompt tokens per second over those now, duration over that now), if any is worth it.

    The smallest that gets most of what there is to be got: long steps are felt between tokens.
    """
    cost, load = facts.setup.cost, facts.blocked_load
    budget = facts.setup.config.max_num_batched_tokens
    decodes = min(round(load.decodes), budget - 1)
    now = load.prefill_step(cost, budget - decodes).duration_ns
    itl = facts.limit_ns.get("itl")
    found = []
    for factor in (2, 4, 8, 16, 32):
        tokens = factor * budget - decodes
        step = load.prefill_step(cost, tokens).duration_ns
        if itl is not None and step > itl:
            break
        found.append((factor * budget, tokens / (budget - decodes) * now / step, step / now))
    best = max((gain for _, gain, _ in found), default=0.0)
    if best < WORTH:
        return None
    # A little more is not worth twice the step.
    return next(entry for entry in found if entry[1] >= 0.8 * best)


def _bursts(facts: Facts, evidence: list[str]) -> _Reason:
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
    return _Reason(
        "queue",
        [came, *evidence],
        f"spread the arrivals (rate limit, jitter), or {replicas} replicas that share the bursts",
        replicas=replicas,
    )


# -- the machine itself is the limit -------------------------------------------------------------


def _shares(facts: Facts, rows: Any) -> str:
    compute, bandwidth = facts.use(rows, "flops"), facts.use(rows, "bytes")
    if compute is None or bandwidth is None:
        return "how much of the peaks they use is unknown to this cost model"
    return f"at {compute:.0%} of the peak FLOP/s and {bandwidth:.0%} of the peak bandwidth"


def _saturated(facts: Facts, state: State, evidence: list[str]) -> _Reason:
    """No setting of the scheduler serves more."""
    rows = facts.is_blocked
    compute, bandwidth = facts.use(rows, "flops"), facts.use(rows, "bytes")
    is_memory = compute is not None and bandwidth is not None and bandwidth > compute
    kind: Kind = "memory bandwidth" if is_memory else "compute"
    evidence = [
        *evidence,
        f"steps take {_ms(facts.mean_ns(rows))} on average while others wait, {_shares(facts, rows)}",
    ]
    need = _need(facts, state)
    best = _choose(
        _faster_options(facts.setup), lambda option: facts.gain(1, option.setup.cost), need
    )
    if best is not None and best[1] >= need:
        option, gain = best
        return _Reason(
            kind, evidence, f"{option.words}: serves about {gain:.2g} x as much", option.changes
        )
    return _replicas(facts, state, kind, evidence)


def _faster_options(setup: Setup) -> Iterator[_Option]:
    """Ways to shorter steps on the same machine."""
    settings = setup.settings
    if settings["cost_model"].value == "no-cache":
        yield from _option(setup, "keep the KV cache", {"cost_model": "physical"})
    if DTYPE_BITS[settings["weight_dtype"].value] == 16:
        yield from _option(setup, "8-bit weights (check the answers)", {"weight_dtype": "fp8"})
    if DTYPE_BITS[settings["kv_cache_dtype"].value] == 16:
        yield from _option(
            setup, "an 8-bit KV cache (check the answers)", {"kv_cache_dtype": "fp8"}
        )


def _replicas_needed(facts: Facts, state: State) -> int:
    offered, served = facts.offered, facts.served
    if state != "overloaded" or offered is None or served is None:
        return 2
    return max(2, math.ceil(offered / served / HEADROOM))


def _replicas(facts: Facts, state: State, kind: Kind, evidence: list[str]) -> _Reason:
    count = _replicas_needed(facts, state)
    offered = facts.offered
    each = f", {offered / count:.3g} requests/s each" if offered is not None else ""
    change = f"more of the same: {count:,} replicas{each} (or a faster GPU)"
    if not facts.setup.enable_prefix_caching:
        change += "; prefix caching, which is off, may spare a part of it"
    return _Reason(kind, evidence, change, replicas=count)


def _still_needed(facts: Facts, state: State, gain: float) -> int:
    """Replicas beside a change that serves ``gain`` times as much."""
    return max(1, math.ceil(_need(facts, state) / gain - 0.05)) if state == "overloaded" else 1


def _and_replicas(count: int) -> str:
    return f"; the load still asks for {count:,} replicas then" if count > 1 else ""


# -- scheduled at once, and still slow -----------------------------------------------------------


def _slow_first_token(facts: Facts) -> _Reason:
    """The prompts themselves take long."""
    setup, config, cost = facts.setup, facts.setup.config, facts.setup.cost
    rows = facts.is_prefill
    load = facts.load(rows)
    prompt = facts.long_prompt
    evidence = [
        f"prompts of {prompt:,} tokens (95th percentile) to compute; steps with prefill take "
        f"{_ms(facts.mean_ns(rows))} on average, {_shares(facts, rows)}"
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
                f"{gain:.3g} x as long as at once"
            )
            words = f"larger chunks: --{name.replace('_', '-')} {larger:,}"
            return _Reason("token budget", evidence, words, {name: larger})
    now = load.prefill_step(cost, prompt).duration_ns
    limit = facts.limit_ns.get("ttft", now)
    best = _choose(
        _faster_machine(setup),
        lambda option: now / load.prefill_step(option.setup.cost, prompt).duration_ns,
        max(WORTH, now / limit),
    )
    if best is None:
        return _Reason("compute", evidence, "a faster GPU, or shorter prompts (prefix caching)")
    option, gain = best
    return _Reason(
        "compute",
        evidence,
        f"{option.words}: computes such a prompt {gain:.2g} x as fast",
        option.changes,
    )


def _faster_machine(setup: Setup) -> Iterator[_Option]:
    """Ways to shorter steps, more GPUs included."""
    yield from _faster_options(setup)
    tp = 2 * setup.settings["tensor_parallel_size"].value
    changes = {"tensor_parallel_size": tp} | _same_memory(setup, 2)
    yield from _option(setup, f"{tp} GPUs that share each layer", changes)


def _slow_tokens(facts: Facts) -> _Reason:
    """What bounds the time of a step, and its tail."""
    for rule in (_jitter, _interference):
        reason = rule(facts)
        if reason is not None:
            return reason
    return _bound(facts)


def _jitter(facts: Facts) -> _Reason | None:
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
        f"{facts.num_preempted:,} requests were preempted and had to compute again what they lost",
        f"the longest gap between two tokens of theirs is {_ms(longest)}, the median of all gaps "
        f"{_ms(median)}",
    ]
    if facts.suffers:
        evidence.append(
            f"{int((facts.misses & facts.was_preempted).sum()):,} of {int(facts.misses.sum()):,} "
            "requests that miss the limits were preempted"
        )
    full = facts.steps["blocks_used"] / max(setup.num_blocks, 1)
    crowded = full >= 0.9
    held = facts.steps["blocks_used"][crowded] / facts.running[crowded].clip(1)
    # Each of those there, running or put back, would hold what the running ones hold.
    there = (facts.running + facts.steps["waiting"])[crowded]
    wanted = float((held * there).max(initial=0.0)) / setup.num_blocks
    factor = max(1.1 * wanted, 1.25)
    best = _choose(
        _kv_options(setup, factor),
        lambda option: option.setup.num_blocks / setup.num_blocks,
        factor,
    )
    if best is None:
        fewer = max(1, int(0.8 * facts.running_blocked))
        return _Reason(
            "preemption jitter",
            [*evidence, _kv_left(setup)],
            "fewer sequences at once, none of them interrupted: a lower --max-num-seqs",
            {"max_num_seqs": fewer},
        )
    option, _ = best
    return _Reason(
        "preemption jitter",
        evidence,
        f"more KV memory, so that nobody is put back: {option.words.rstrip(',')}",
        option.changes,
    )


def _are_most_misses(facts: Facts) -> bool:
    return 2 * int((facts.misses & facts.was_preempted).sum()) >= int(facts.misses.sum())


def _interference(facts: Facts) -> _Reason | None:
    """Decodes that share a step with a prompt wait for it."""
    if not facts.is_mixed.any() or not facts.is_pure.any():
        return None
    pure, mixed = facts.mean_ns(facts.is_pure), facts.mean_ns(facts.is_mixed)
    median, tail = facts.gaps.percentile(50), facts.gaps.percentile(99)
    if mixed < INTERFERENCE * pure or median is None or tail is None:
        return None
    limit = min((facts.limit_ns[m] for m in ("tpot", "itl") if m in facts.suffers), default=None)
    if limit is None:
        if tail < INTERFERENCE * median:
            return None
    elif pure > limit:
        return None  # too slow without any prefill
    decoded = facts.steps["decode_tokens"]
    share = int(decoded[facts.is_mixed].sum()) / max(int(decoded.sum()), 1)
    extra = facts.busy_ns(facts.is_mixed) - pure * int(facts.is_mixed.sum())
    busy = extra / max(facts.busy_ns(facts.is_mixed | facts.is_pure), 1)
    evidence = [
        f"steps with prefill and decodes together last {_ms(mixed)} on average, decode-only ones "
        f"{_ms(pure)}; {share:.0%} of the decoded tokens come from the long ones",
        f"ITL p50 is {_ms(median)}, p99 {_ms(tail)}; prefill takes {busy:.0%} of the busy time from "
        "the decodes",
    ]
    found = _smaller_budget(facts, limit)
    if found is None:
        return _Reason(
            "prefill interference",
            evidence,
            "prefill on machines of its own; smaller chunks would be too slow for the prompts",
        )
    changes: dict[str, Any] = {"max_num_batched_tokens": found.budget}
    if not facts.setup.config.enable_chunked_prefill:
        changes = {"enable_chunked_prefill": True} | changes
    change = "smaller chunks of prefill (first tokens come a little later)"
    if found.replicas > 1:
        change += (
            f" on {found.replicas} replicas, as one would not keep up with the prompts like that; or "
            "prefill on machines of its own"
        )
    return _Reason("prefill interference", evidence, change, changes, found.replicas)


class _Chunks(NamedTuple):
    budget: int
    replicas: int
    """Machines that keep up with the prompts in chunks of that size."""


def _smaller_budget(facts: Facts, limit_ns: int | None) -> _Chunks | None:
    """The largest token budget of which full steps keep the limit, or are calm where there is none.

    ``None`` where the prompts are no larger than that, or would then miss the limit on TTFT.
    """
    cost, load = facts.setup.cost, facts.load(facts.is_mixed)
    target = limit_ns or CALM * facts.mean_ns(facts.is_pure)
    decodes, prompt = round(load.decodes), facts.longest_prompt
    tokens = min(facts.setup.config.max_num_batched_tokens, int(facts.steps["prefill_tokens"].max()))
    while tokens >= SMALLEST_CHUNK:
        tokens //= 2
        step = load.last_chunk_step(cost, tokens, prompt).duration_ns
        if step <= target:
            break
    else:
        return None
    first_token = math.ceil(prompt / tokens) * step
    if first_token > facts.limit_ns.get("ttft", first_token):
        return None
    most = tokens * 1e9 / step * HEADROOM
    return _Chunks(tokens + decodes, max(1, math.ceil(facts.prefill_rate / most)))


def _bound(facts: Facts) -> _Reason:
    """The typical step itself: what it is made of."""
    busy = facts.busy_ns(facts.is_prefill | facts.is_pure)
    decode_share = facts.busy_ns(facts.is_pure) / busy
    rows = facts.is_pure if decode_share >= 0.5 else facts.is_prefill
    name = "decode-only steps" if decode_share >= 0.5 else "steps with prefill"
    share = max(decode_share, 1 - decode_share)
    compute, bandwidth = facts.use(rows, "flops"), facts.use(rows, "bytes")
    kind: Kind = "none"
    if compute is not None and bandwidth is not None and max(compute, bandwidth) >= SATURATED:
        kind = "memory bandwidth" if bandwidth >= compute else "compute"
    used = int(facts.steps["blocks_used"].max()) / facts.setup.num_blocks
    evidence = [
        f"{name} take {share:.0%} of the busy time: {_ms(facts.mean_ns(rows))} each, "
        + _shares(facts, rows),
        f"at most {int(facts.running.max()):,} sequences at once and {used:.0%} of the blocks in use",
    ]
    if not facts.suffers and kind == "none":
        return _Reason(kind, evidence, "nothing: requests are served as they come")
    return _shorter_steps(facts, kind, evidence)


def _shorter_steps(facts: Facts, kind: Kind, evidence: list[str]) -> _Reason:
    load, cost = facts.load(facts.is_pure), facts.setup.cost
    limit = facts.limit_ns.get("tpot", facts.limit_ns.get("itl"))
    mean = facts.mean_ns(facts.is_pure) or facts.mean_ns(facts.is_prefill)
    need = max(WORTH, mean / limit) if limit and facts.suffers else LARGEST_FACTOR
    now = load.time_ns(cost)
    best = _choose(
        _faster_machine(facts.setup), lambda option: now / load.time_ns(option.setup.cost), need
    )
    half = now / load.time_ns(cost, 0.5)
    if half >= need or (best is None and half >= WORTH):
        count = next((n for n in range(2, 64) if now / load.time_ns(cost, 1 / n) >= need), 2)
        return _Reason(
            kind,
            evidence,
            f"fewer sequences for each machine: {count} replicas, their steps last "
            f"{load.time_ns(cost, 1 / count) / now:.2g} x as long",
            replicas=count,
        )
    if best is None:
        return _Reason(kind, evidence, "a faster GPU: no setting of this one shortens its steps")
    option, speedup = best
    change = f"{option.words}: steps take {1 / speedup:.2g} x as long"
    if speedup < need and limit and facts.suffers:
        change += f", which is still over the limit of {_ms(limit)}"
    return _Reason(kind, evidence, change, option.changes)


def _ms(time_ns: float) -> str:
    return f"{time_ns / 1e6:.3g} ms" if time_ns < 1e9 else f"{time_ns / 1e9:.3g} s"
