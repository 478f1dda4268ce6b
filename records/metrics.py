"""Rows of a run -> its metrics: the one place where a latency or a rate is defined.

docs/metrics.md says the same in prose, with examples. Everything here is a pure function of the
rows; times are integer nanoseconds until the last division, and sums are exact, so that equal rows
give equal bytes on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from records.columns import STATUSES, Columns, IntArray, NullableInts, exact_sum
from records.gaps import GapCounts, linear_percentile
from records.slo import METRICS, NO_LIMITS, Limits, Metric, RequestLimit, StatisticLimit
from records.steps import StepRows, Where, float_sum
from records.steps import end_ns as step_end_ns

PERCENTILE_RULE = "linear"
"""Linear interpolation between order statistics, as ``numpy.percentile`` does by default."""

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
_PERCENTILES = (50, 90, 95, 99)
_NS = 1_000_000_000


class Latencies(NamedTuple):
    """Per-request times in ns, requests that have none left out."""

    ttft: IntArray
    """First token - arrival, of every request that got a first token."""
    tpot: FloatArray
    """Mean time per output token after the first, of completed requests with more than one."""
    e2e: IntArray
    """Finish - arrival, of completed requests."""
    queue: IntArray
    """First scheduled - arrival, of every request that was scheduled."""


def latencies(requests: Columns) -> Latencies:
    """The per-request latencies of ``REQUEST_SCHEMA`` columns, in row order."""
    arrival: IntArray = requests["arrival_ns"]
    is_completed = _has_status(requests, "completed")
    gaps: IntArray = requests["decode_gaps"]
    has_tpot = is_completed & (gaps > 0)
    finish: NullableInts = requests["finish_ns"]
    return Latencies(
        ttft=_present(requests["first_token_ns"] - arrival),
        tpot=requests["decode_ns"][has_tpot] / gaps[has_tpot],
        e2e=_present((finish - arrival)[is_completed]),
        queue=_present(requests["first_scheduled_ns"] - arrival),
    )


def summarize(
    requests: Columns,
    steps: Columns | None,
    gaps: GapCounts,
    settings: Mapping[str, Any],
    limits: Limits = NO_LIMITS,
    *,
    end_ns: int | None = None,
    evictions: int | None = None,
    bottleneck: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """summary.json of a run: plain Python, times in seconds, ``None`` where there is no value.

    Parameters
    ----------
    requests, steps, gaps
        The rows (``REQUEST_SCHEMA``, ``STEP_SCHEMA``); without ``steps`` what needs them is None.
    settings
        run.json. Read are ``num_blocks`` and ``block_size`` (of one replica), ``bytes_per_token``,
        ``num_replicas`` (1 where it is absent), ``prefix_identity`` (False = the trace does not say
        which prefixes are equal), ``peak_flops`` (FLOP/s) and ``peak_bandwidth`` (bytes/s) of one
        replica.
    limits
        What each request, and the run, are held to.
    end_ns
        When the run was stopped, where it was: that is its last event if requests were unfinished.
    evictions
        Cached blocks evicted, which no row knows.
    bottleneck
        ``{"kind", "why"}`` where the caller has a verdict.

    Raises
    ------
    ValueError
        For a status that is not one of ``STATUSES``.
    """
    counts = _status_counts(requests)
    rows = None if steps is None else StepRows(steps)
    span = _makespan_ns(requests, rows, end_ns)
    values = latencies(requests)
    return {
        "requests": counts,
        "ttft_s": _distribution(values.ttft),
        "tpot_s": _distribution(values.tpot),
        "itl_s": _gap_distribution(gaps),
        "e2e_s": _distribution(values.e2e),
        "queue_s": _distribution(values.queue),
        "throughput": _throughput(requests, span),
        "goodput": _goodput(requests, values, gaps, limits, span),
        "kv": _kv(requests, rows, settings, span, evictions),
        "steps": _step_summary(rows),
        "utilization": _utilization(rows, settings),
        "makespan_s": None if span is None else span / _NS,
        "bottleneck": dict(bottleneck) if bottleneck else {"kind": None, "why": None},
        "percentile_rule": PERCENTILE_RULE,
    }


def meets(requests: Columns, limit: RequestLimit) -> BoolArray:
    """Whether each request keeps the limit (shape ``[requests]``); one that failed does not.

    A completed request with one output has no TPOT and no gap, and so passes limits on those.
    """
    is_completed = _has_status(requests, "completed")
    arrival: IntArray = requests["arrival_ns"]
    gaps: IntArray = requests["decode_gaps"]
    if limit.metric == "tpot":
        # In whole numbers: t / g <= L exactly when ceil(t / g) <= L, t / g < L when floor < L.
        divisor = np.maximum(gaps, 1)
        decode: IntArray = requests["decode_ns"]
        value = -(-decode // divisor) if limit.is_inclusive else decode // divisor
        value = np.where(gaps > 0, value, 0)
    elif limit.metric == "itl":
        value = np.where(gaps > 0, requests["max_gap_ns"], 0)
    else:
        column = {"ttft": "first_token_ns", "e2e": "finish_ns", "queue": "first_scheduled_ns"}
        times: NullableInts = requests[column[limit.metric]]
        is_completed &= ~np.ma.getmaskarray(times)
        value = times.filled(0) - arrival
    within: BoolArray = value <= limit.limit_ns if limit.is_inclusive else value < limit.limit_ns
    return within & is_completed


def statistic_ns(limit: StatisticLimit, values: Latencies, gaps: GapCounts) -> float | None:
    """The value in ns of the statistic that ``limit`` bounds, ``None`` where there is none."""
    q = limit.percentile
    if limit.metric == "itl":
        if q is not None:
            return gaps.percentile(q)
        return gaps.mean_ns if limit.statistic == "mean" else gaps.max_ns
    data: npt.NDArray[Any] = getattr(values, limit.metric)
    if not len(data):
        return None
    if q is not None:
        return linear_percentile(np.sort(data).item, len(data), q)
    return _total(data) / len(data) if limit.statistic == "mean" else float(data.max())


def num_in_system_area_ns(arrivals_ns: IntArray, departures_ns: IntArray) -> int:
    """Integral over time of the number of requests in the system, in request-nanoseconds, exact.

    Little's law as an identity: equal to ``sojourns_ns`` of the same times, which the queue
    sweep here does not use.
    """
    events = sorted(
        [(t, 1) for t in arrivals_ns.tolist()] + [(t, -1) for t in departures_ns.tolist()]
    )
    area = level = 0
    for (time, change), (next_time, _) in pairwise(events):
        level += change
        area += level * (next_time - time)
    return area


def sojourns_ns(arrivals_ns: IntArray, departures_ns: IntArray) -> int:
    """Sum of the times that requests spent in the system, in ns, exact."""
    return exact_sum(departures_ns - arrivals_ns)


def departures_ns(requests: Columns, end_ns: int) -> IntArray:
    """When each request left: its finish, its arrival if it was refused, else ``end_ns``."""
    is_refused = _has_status(requests, "refused")
    finish: NullableInts = requests["finish_ns"]
    left = np.where(np.ma.getmaskarray(finish), end_ns, finish.filled(0))
    return np.where(is_refused, requests["arrival_ns"], left)


def identity_errors(requests: Columns, gaps: GapCounts) -> list[str]:
    """What in the rows contradicts the definitions, one line each; empty for a sound record.

    TTFT + sum(ITL) = E2E of every completed request with one sample; between samples, a sample ends
    no later than its request. Tokens, gaps and the pooled gaps add up.
    """
    errors: list[str] = []
    ids: list[str] = requests["id"]
    first, finish = requests["first_token_ns"], requests["finish_ns"]
    scheduled, arrival = requests["first_scheduled_ns"], requests["arrival_ns"]
    samples, decode = requests["num_samples"], requests["decode_ns"]
    is_completed = _has_status(requests, "completed")
    has_times = ~(
        np.ma.getmaskarray(first) | np.ma.getmaskarray(finish) | np.ma.getmaskarray(scheduled)
    )
    # Under a mask lies a 0: no comparison of those rows is used.
    first, finish, scheduled = first.filled(0), finish.filled(0), scheduled.filled(0)
    is_timed = is_completed & has_times
    checks: list[tuple[BoolArray, str]] = [
        (is_completed & ~has_times, "completed without all of its times"),
        (is_timed & ((scheduled < arrival) | (first < scheduled) | (finish < first)),
         "its times run backwards"),
        (is_timed & (samples == 1) & (first + decode != finish), "TTFT + sum(ITL) is not E2E"),
        (is_timed & (decode > samples * (finish - first)), "tokens after its finish"),
        (is_completed & (requests["decode_gaps"] != requests["output_tokens"] - samples),
         "gaps are not outputs - 1"),
        (requests["max_gap_ns"] > decode, "its longest gap is longer than all gaps together"),
        (requests["cached_tokens"] > requests["prompt_tokens"], "more hits than prompt tokens"),
    ]  # fmt: skip
    for is_wrong, what in checks:
        rows = np.flatnonzero(is_wrong)
        if len(rows):
            more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
            errors.append(f"request {ids[rows[0]]}{more}: {what}")
    if gaps.count != exact_sum(requests["decode_gaps"]):
        errors.append(
            f"{gaps.count} gaps are pooled, requests have {exact_sum(requests['decode_gaps'])}"
        )
    if gaps.total_ns != exact_sum(decode):
        errors.append(f"pooled gaps are {gaps.total_ns} ns, requests have {exact_sum(decode)} ns")
    return errors


def _has_status(requests: Columns, status: str) -> BoolArray:
    return np.array([s == status for s in requests["status"]], np.bool_)


def _status_counts(requests: Columns) -> dict[str, int]:
    statuses: list[str] = requests["status"]
    unknown = set(statuses) - set(STATUSES)
    if unknown:
        raise ValueError(f"status {min(unknown)!r}, expected one of {', '.join(STATUSES)}")
    return {"total": len(statuses), **{s: statuses.count(s) for s in STATUSES}}


def _makespan_ns(requests: Columns, steps: StepRows | None, end_ns: int | None) -> int | None:
    """Last event - first arrival; ``None`` for a run without requests.

    An unfinished request may have an arrival that the stopped run never came to.
    """
    arrival: IntArray = requests["arrival_ns"]
    if not len(arrival):
        return None
    is_over = ~_has_status(requests, "unfinished")
    times = [arrival[is_over]]
    times += [_present(requests[n]) for n in ("first_scheduled_ns", "first_token_ns", "finish_ns")]
    if steps is not None:
        times.append(np.array([steps.most(step_end_ns)], np.int64))
    if end_ns is not None and not is_over.all():
        times.append(np.array([end_ns], np.int64))
    first = int(arrival.min())
    return max([first, *(int(t.max()) for t in times if len(t))]) - first


def _present(values: NullableInts) -> IntArray:
    """What is not missing."""
    data: IntArray = np.ma.MaskedArray(values).compressed()
    return data


def _total(values: npt.NDArray[Any]) -> int | float:
    """Exact sum of integers; correctly rounded sum of floats, whatever their order."""
    if values.dtype.kind == "i":
        return exact_sum(values)
    return float_sum(values)


def _distribution(values: npt.NDArray[Any]) -> dict[str, float | int | None]:
    if not len(values):
        return _as_distribution(None, [None] * len(_PERCENTILES), None, 0)
    ordered = np.sort(values)
    percentiles = [linear_percentile(ordered.item, len(ordered), q) for q in _PERCENTILES]
    longest = ordered[-1].item()
    return _as_distribution(_total(values) / len(values), percentiles, longest, len(values))


def _gap_distribution(gaps: GapCounts) -> dict[str, float | int | None]:
    percentiles = [gaps.percentile(q) for q in _PERCENTILES]
    return _as_distribution(gaps.mean_ns, percentiles, gaps.max_ns, gaps.count)


def _as_distribution(
    mean: float | None, percentiles: Sequence[float | None], longest: float | None, count: int
) -> dict[str, float | int | None]:
    in_ns = {
        "mean": mean,
        **{f"p{q}": value for q, value in zip(_PERCENTILES, percentiles, strict=True)},
        "max": longest,
    }
    return {**{k: None if v is None else v / _NS for k, v in in_ns.items()}, "count": count}


def _per_second(amount: int, span_ns: int | None) -> float | None:
    return amount * _NS / span_ns if span_ns else None


def _throughput(requests: Columns, span_ns: int | None) -> dict[str, float | None]:
    """Of completed requests only: what a failed one was given helped nobody."""
    is_completed = _has_status(requests, "completed")
    outputs: IntArray = requests["output_tokens"][is_completed]
    finish: IntArray = requests["finish_ns"].filled(0)[is_completed]
    steady_span = int(finish.max() - finish.min()) if len(finish) else 0
    # What completes at the start of the window was not served within it.
    is_steady = finish > finish.min() if len(finish) else np.zeros(0, np.bool_)
    return {
        "requests_per_s": _per_second(len(finish), span_ns),
        "input_tokens_per_s": _per_second(
            exact_sum(requests["prompt_tokens"][is_completed]), span_ns
        ),
        "output_tokens_per_s": _per_second(exact_sum(outputs), span_ns),
        "steady_requests_per_s": _per_second(int(is_steady.sum()), steady_span),
        "steady_output_tokens_per_s": _per_second(exact_sum(outputs[is_steady]), steady_span),
    }


def _goodput(
    requests: Columns, values: Latencies, gaps: GapCounts, limits: Limits, span_ns: int | None
) -> dict[str, Any]:
    statistics = []
    for limit in limits.statistics:
        value = statistic_ns(limit, values, gaps)
        statistics.append(
            {
                "limit": str(limit),
                "value_s": None if value is None else value / _NS,
                "holds": limit.holds(value),
            }
        )
    slo = {
        "limits": str(limits) if limits else None,
        "per_request_s": {limit.metric: limit.limit_ns / _NS for limit in limits.per_request},
        "statistics": statistics,
    }
    num_requests = len(requests["status"])
    passes: dict[Metric, BoolArray] = {
        limit.metric: meets(requests, limit) for limit in limits.per_request
    }
    if not passes or not num_requests:
        none = {"attainment": None, "requests_per_s": None, "output_tokens_per_s": None}
        return {"slo": slo, **none, "pass_rate": dict.fromkeys(_in_order(passes))}
    is_good: BoolArray = np.logical_and.reduce(list(passes.values()))
    num_good = int(is_good.sum())
    return {
        "slo": slo,
        "attainment": num_good / num_requests,
        "requests_per_s": _per_second(num_good, span_ns),
        "output_tokens_per_s": _per_second(exact_sum(requests["output_tokens"][is_good]), span_ns),
        "pass_rate": {m: int(passes[m].sum()) / num_requests for m in _in_order(passes)},
    }


def _in_order(passes: Mapping[Metric, object]) -> list[Metric]:
    return [metric for metric in METRICS if metric in passes]


def _kv(
    requests: Columns,
    steps: StepRows | None,
    settings: Mapping[str, Any],
    span_ns: int | None,
    evictions: int | None,
) -> dict[str, Any]:
    num_blocks = settings.get("num_blocks")
    block_size = settings.get("block_size")
    peak = mean = None
    if steps is not None and num_blocks:
        peak = steps.most("blocks_used") / num_blocks
        if span_ns:
            # Blocks x ns as exact integers; between steps nothing runs and nothing is held.
            area = steps.weighted("blocks_used")
            mean = area / (span_ns * num_blocks * settings.get("num_replicas", 1))
    is_admitted = ~np.ma.getmaskarray(requests["first_scheduled_ns"])
    prompt = exact_sum(requests["prompt_tokens"][is_admitted])
    hit_rate = None
    if prompt and settings.get("prefix_identity") is not False:
        hit_rate = exact_sum(requests["cached_tokens"][is_admitted]) / prompt
    return {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "bytes_per_token": settings.get("bytes_per_token"),
        "capacity_tokens": num_blocks * block_size if num_blocks and block_size else None,
        "peak_usage": peak,
        "mean_usage": mean,
        "prefix_hit_rate": hit_rate,
        "preemptions": exact_sum(requests["preemptions"]),
        "recomputed_tokens": exact_sum(requests["recomputed_tokens"]),
        "refound_tokens": exact_sum(requests["refound_tokens"]),
        "evictions": evictions,
    }


def _step_summary(steps: StepRows | None) -> dict[str, Any]:
    if steps is None:
        return {"count": None, "mean_s": None, "mean_batch": None}
    busy = steps.total("duration_ns")
    return {
        "count": len(steps),
        "mean_s": busy / (len(steps) * _NS) if len(steps) else None,
        "mean_batch": steps.weighted("num_seqs") / busy if busy else None,
    }


def _utilization(
    steps: StepRows | None, settings: Mapping[str, Any]
) -> dict[str, dict[str, float | None]]:
    if steps is None:
        return {kind: {"compute": None, "bandwidth": None} for kind in ("prefill", "decode")}
    kinds: dict[str, Where] = {
        "prefill": lambda rows: rows["prefill_tokens"] > 0,
        "decode": lambda rows: rows["prefill_tokens"] == 0,
    }
    result = {}
    for kind, where in kinds.items():
        busy_ns = steps.total("duration_ns", where)
        result[kind] = {
            name: _share(steps.float_total(column, where), settings.get(peak), busy_ns)
            for name, column, peak in (
                ("compute", "flops", "peak_flops"),
                ("bandwidth", "bytes", "peak_bandwidth"),
            )
        }
    return result


def _share(total: float, peak: float | None, busy_ns: int) -> float | None:
    """Share of the peak rate; ``None`` without a peak or a step, or where no step has a price."""
    return total * _NS / (peak * busy_ns) if peak and busy_ns and total else None
