"""The loop of ``Replica`` and ``Scheduler`` once more, compiled, for the plainest and commonest case.

First come, first served; recompute; one output a request; prompts of unknown content, so that no block
is ever shared and only their number matters. ``kernel_run.why_not`` says when that holds. The code that
tells what happens is ``scheduler/scheduler.py``; this one is tested to leave the same record, byte for
byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from simulator.cost.kernels import decode_attention, prefill_attention


def _compiled(function: Callable[..., Any]) -> Any:
    """Compile at the first call, and keep the result on disk where there is a place for it."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # neither beside the module nor in the user's cache may be written
        return njit(function)


# Places in the array of scalars that survives between calls.
(
    NOW,
    NEXT_ARRIVAL,
    NUM_RUNNING,
    FRESH_HEAD,
    NUM_PREEMPTED,
    FREE,
    NUM_DONE,
    NUM_STEPS,
    NUM_GAPS,
    IS_LAST,
    LAST_START,
) = range(11)
NUM_SCALARS = 11

SLOTS, BUDGET, BLOCKS, PREEMPTION = 1, 2, 3, 4  # records.columns.BLOCKED_CODES
STOP, LENGTH, KV_EXHAUSTED = 0, 1, 2

# Columns of the step buffer.
(
    START,
    DURATION,
    PREFILL,
    DECODE,
    CONTEXT,
    NUM_SEQS,
    RUNNING,
    WAITING,
    USED,
    PREEMPTIONS,
    BLOCKED,
) = range(11)
NUM_STEP_COLUMNS = 11


@_compiled
def _keys_seen(context: int, window: int) -> int:
    inside = min(context, window)
    return inside * (inside + 1) // 2 + (context - inside) * window


_decode_attention = _compiled(decode_attention)
_prefill_attention = _compiled(prefill_attention)


@_compiled
def _blocks(tokens: int, size: int) -> int:
    return (tokens + size - 1) // size


@_compiled
def advance(
    scalars: Any,
    config: Any,
    arrival: Any,
    prompt: Any,
    target: Any,
    limit: Any,
    hard_limit: Any,
    tokens: Any,
    computed: Any,
    held: Any,
    lost: Any,
    first_scheduled: Any,
    first_token: Any,
    last_token: Any,
    max_gap: Any,
    preemptions: Any,
    recomputed: Any,
    reason: Any,
    finish: Any,
    done_order: Any,
    running: Any,
    grants: Any,
    preempted: Any,
    token_ns: Any,
    head_ns: Any,
    seq_ns: Any,
    host_ns: Any,
    host_hides: bool,
    launch_ns: int,
    context_token_ns: int,
    windows: Any,
    group_windows: Any,
    rates: Any,
    attention: Any,
    rate_scalars: Any,
    expert_bytes: Any,
    has_attention: bool,
    steps: Any,
    step_flops: Any,
    step_bytes: Any,
    gap_values: Any,
    gap_counts: Any,
) -> None:
    """Run steps until every request is done, a buffer is full or (unless ``IS_LAST``) every request
    has arrived, so that a step might lack the next; all state is in the arrays.

    Arrays of requests have shape ``[requests]`` in order of arrival; times in ns, -1 = never.
    """
    max_num_seqs, budget_of_step, threshold, max_model_len = (
        config[0],
        config[1],
        config[2],
        config[3],
    )
    is_chunked, has_gate, watermark, size, num_blocks = (
        config[4] == 1,
        config[5] == 1,
        config[6],
        config[7],
        config[8],
    )
    now, next_arrival, num_running = scalars[NOW], scalars[NEXT_ARRIVAL], scalars[NUM_RUNNING]
    fresh_head, num_preempted, free = scalars[FRESH_HEAD], scalars[NUM_PREEMPTED], scalars[FREE]
    num_done, num_steps, num_gaps = scalars[NUM_DONE], scalars[NUM_STEPS], scalars[NUM_GAPS]
    frontend, is_async, last_start = config[9], config[10] == 1, scalars[LAST_START]
    num_requests = len(arrival)
    num_windows = len(windows)
    decode_kv = np.zeros(num_windows, np.int64)
    prefill_kv = np.zeros(num_windows, np.int64)
    pairs = np.zeros(num_windows, np.int64)

    while (
        num_done < num_requests
        and num_steps < len(steps)
        and num_gaps + max_num_seqs + 1 < len(gap_values)
    ):
        # Who is seen: with asynchronous scheduling, who was there when the last step began.
        horizon = (last_start if is_async else now) - frontend
        while next_arrival < num_requests and arrival[next_arrival] <= horizon:
            next_arrival += 1
        is_idle = num_running == 0 and num_preempted + next_arrival == fresh_head
        if is_idle and next_arrival < num_requests:
            now = max(now, arrival[next_arrival] + frontend)
            last_start = now  # nothing was scheduled ahead: all that is there is seen
            while next_arrival < num_requests and arrival[next_arrival] + frontend <= now:
                next_arrival += 1
        if next_arrival == num_requests and scalars[IS_LAST] == 0:
            break
        last_start = now

        # Running sequences, in list order.
        budget = budget_of_step
        num_unfinished = num_running + num_preempted + next_arrival - fresh_head
        is_capped = threshold > 0 and num_unfinished > 1
        chunk = threshold if is_capped else budget_of_step
        num_victims = 0
        num_granted = 0
        while num_granted < num_running and budget > 0:
            s = running[num_granted]
            grant = min(tokens[s] - computed[s], chunk, budget)
            need = _blocks(computed[s] + grant, size) - held[s]
            is_victim = False
            while need > free:
                num_running -= 1
                victim = running[num_running]
                free += held[victim]
                held[victim] = 0
                lost[victim] = computed[victim]
                computed[victim] = 0
                preemptions[victim] += 1
                preempted[num_preempted] = victim
                num_preempted += 1
                num_victims += 1
                if victim == s:
                    is_victim = True
                    break
            if is_victim:
                break
            free -= need
            held[s] += need
            computed[s] += grant
            grants[num_granted] = grant
            budget -= grant
            num_granted += 1

        # Waiting ones, from the head of the queue: the preempted, last one first, then by arrival.
        blocked = 0
        if num_victims == 0:
            new_chunk = threshold if is_capped else max_model_len
            while num_preempted > 0 or fresh_head < next_arrival:
                if budget == 0:
                    blocked = BUDGET
                    break
                if num_running >= max_num_seqs:
                    blocked = SLOTS
                    break
                s = preempted[num_preempted - 1] if num_preempted > 0 else fresh_head
                grant = min(tokens[s], new_chunk)
                if grant > budget:
                    if not is_chunked:
                        blocked = BUDGET
                        break
                    grant = budget
                headroom = watermark if num_running > 0 else 0
                if has_gate and _blocks(tokens[s], size) + headroom > free:
                    blocked = BLOCKS
                    break
                need = _blocks(grant, size)
                if need + headroom > free:
                    blocked = BLOCKS
                    break
                if num_preempted > 0:
                    num_preempted -= 1
                else:
                    fresh_head += 1
                recomputed[s] += lost[s]
                lost[s] = 0
                if first_scheduled[s] < 0:
                    first_scheduled[s] = now
                free -= need
                held[s] = need
                computed[s] = grant
                running[num_running] = s
                grants[num_running] = grant
                num_running += 1
                num_granted += 1
                budget -= grant
        else:
            blocked = PREEMPTION

        # What the step is made of.
        num_tokens = 0
        num_ones = 0
        num_sampled = 0
        num_decodes = 0
        context = 0
        triangle = 0
        for w in range(num_windows):
            decode_kv[w] = 0
            prefill_kv[w] = 0
            pairs[w] = 0
        for i in range(num_granted):
            s = running[i]
            grant = grants[i]
            after = computed[s]
            num_tokens += grant
            context += after
            if after == tokens[s]:
                num_sampled += 1
                if grant == 1 and after > prompt[s]:
                    num_decodes += 1
            if grant == 1:
                num_ones += 1
                for w in range(num_windows):
                    decode_kv[w] += min(after, windows[w])
            else:
                triangle += grant * (grant + 1) // 2
                for w in range(num_windows):
                    prefill_kv[w] += min(after, windows[w] + grant - 1)
                    pairs[w] += _keys_seen(after, windows[w]) - _keys_seen(
                        after - grant, windows[w]
                    )

        # Its price, term by term as the cost model has it.
        duration = token_ns[num_tokens] + head_ns[num_sampled] + seq_ns[num_granted]
        flops = 0.0
        num_bytes = 0.0
        if has_attention:
            num_prefill = num_tokens - num_ones
            num_prefills = num_granted - num_ones
            decode_ns = 0.0
            prefill_ns = 0.0
            flops = num_tokens * rate_scalars[3] + num_sampled * rate_scalars[4]
            num_bytes = (
                rate_scalars[5] + num_tokens * rate_scalars[6] + num_granted * rate_scalars[1]
            )
            if num_sampled > 0:
                num_bytes += rate_scalars[7]
                num_bytes += num_sampled * rate_scalars[8]
            if len(expert_bytes) > 0:
                num_bytes += expert_bytes[num_tokens]
            for g in range(len(group_windows)):
                w = group_windows[g]
                rate = rates[g]
                if num_ones > 0:
                    decode_ns = decode_ns + rate[0] * _decode_attention(
                        float(decode_kv[w]),
                        float(num_ones),
                        rate[1],
                        rate[2],
                        rate[3],
                        rate[4],
                        attention[0],
                        attention[1],
                    )
                if num_prefills > 0:
                    prefill_ns = prefill_ns + rate[0] * _prefill_attention(
                        float(prefill_kv[w]),
                        float(pairs[w]),
                        float(min(triangle, pairs[w])),
                        float(num_prefill),
                        float(num_prefills),
                        rate[5],
                        rate[6],
                        rate[7],
                        rate[8],
                        rate[9],
                        attention[3],
                        attention[4],
                    )
                    prefill_ns = prefill_ns + rate[0] * (
                        float(prefill_kv[w] - num_prefill) * rate[10]
                    )
                flops = flops + (decode_kv[w] * rate[12] + pairs[w] * rate[13])
                if rate[14] != 0.0:
                    flops = flops + (prefill_kv[w] - num_prefill) * rate[14]
                num_bytes = num_bytes + (decode_kv[w] + prefill_kv[w]) * rate[11]
            if num_prefills > 0:
                prefill_ns = prefill_ns + attention[5]
            else:
                decode_ns = decode_ns + attention[2]
            kv_write = (
                num_tokens * rate_scalars[0] + num_granted * rate_scalars[1]
            ) / rate_scalars[2]
            duration += int(np.rint(decode_ns)) + int(np.rint(prefill_ns)) + int(np.rint(kv_write))
        else:
            duration += context_token_ns * (decode_kv[0] + prefill_kv[0])
        host = host_ns[num_granted]
        hidden, shown = (host, 0) if host_hides else (0, host)
        duration = max(duration, hidden + launch_ns) + shown

        row = steps[num_steps]
        row[START] = now
        row[DURATION] = duration
        row[PREFILL] = num_tokens - num_decodes
        row[DECODE] = num_decodes
        row[CONTEXT] = context
        row[NUM_SEQS] = num_granted
        row[RUNNING] = num_running
        row[WAITING] = num_preempted + next_arrival - fresh_head
        row[USED] = num_blocks - free
        row[PREEMPTIONS] = num_victims
        row[BLOCKED] = blocked
        step_flops[num_steps] = flops
        step_bytes[num_steps] = num_bytes
        num_steps += 1

        # Tokens, gaps and finishes, in the order of the list.
        start = now
        now += duration
        num_steady = 0
        kept = 0
        for i in range(num_running):
            s = running[i]
            if i >= num_granted or computed[s] != tokens[s]:
                running[kept] = s
                kept += 1
                continue
            tokens[s] += 1
            if first_token[s] < 0:
                first_token[s] = now
            else:
                gap = now - last_token[s]
                if gap > max_gap[s]:
                    max_gap[s] = gap
                if last_token[s] == start:
                    num_steady += 1
                else:
                    gap_values[num_gaps] = gap
                    gap_counts[num_gaps] = 1
                    num_gaps += 1
            last_token[s] = now
            is_stop = tokens[s] - prompt[s] >= target[s]
            if is_stop or tokens[s] >= limit[s]:
                if is_stop:
                    reason[s] = STOP
                elif tokens[s] >= hard_limit[s]:
                    reason[s] = LENGTH
                else:
                    reason[s] = KV_EXHAUSTED
                finish[s] = now
                free += held[s]
                held[s] = 0
                done_order[num_done] = s
                num_done += 1
            else:
                running[kept] = s
                kept += 1
        num_running = kept
        if num_steady > 0:
            gap_values[num_gaps] = duration
            gap_counts[num_gaps] = num_steady
            num_gaps += 1

    scalars[NOW], scalars[NEXT_ARRIVAL], scalars[NUM_RUNNING] = now, next_arrival, num_running
    scalars[FRESH_HEAD], scalars[NUM_PREEMPTED], scalars[FREE] = fresh_head, num_preempted, free
    scalars[NUM_DONE], scalars[NUM_STEPS], scalars[NUM_GAPS] = num_done, num_steps, num_gaps
    scalars[LAST_START] = last_start
