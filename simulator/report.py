"""The report of a run, for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from blockmanager.ledger import GIB
from records.columns import Columns
from records.run import RunRecord
from records.steps import StepRows
from scheduler.policies import load_policy
from simulator.pictures import TimeBins
from simulator.run import RunResult, package_version
from simulator.settings import Setup
from simulator.verdict import Verdict
from simulator.verdict.facts import format_share
from traces.load import AnyTrace
from traces.sessions import SessionTrace

WIDTH = 100
_LABEL = 14
_BARS = " ▁▂▃▄▅▆▇█"
_CHART_COLUMNS = 60
GB = 10**9


def format_seconds(value: float | None) -> str:
    """A time in the unit that reads best; ``-`` where there is none."""
    if value is None:
        return "-"
    if value == 0:
        return "0 s"
    if value < 999.5e-6:  # what rounds to 1000 us is 1 ms
        return f"{value * 1e6:.3g} us"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"


def _line(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"  {label:<{_LABEL}}" if len(label) < _LABEL else f"  {label} ",
        subsequent_indent=" " * (_LABEL + 2),
        break_on_hyphens=False,
    ) or [f"  {label}"]


def render(result: RunResult, setup: Setup, origin: str) -> str:
    """The whole report. ``origin`` says where the trace came from if that was not the flag."""
    record, verdict, trace = result.record, result.verdict, result.trace
    summary = record.summary
    sections = [
        [f"kvplan {package_version()}: simulated run".replace(" unknown", "")],
        _verdict(verdict),
        _what_was_run(record, setup, trace, origin),
        _outcome(record),
        _latency(summary),
        _band(summary),
        _goodput(summary),
        _kv(record, trace),
        _work(summary),
        _preemptions(record.requests),
        _cut_short(record.requests, result.asked),
        _refusals(record.requests),
        _assumed(setup, record),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _verdict(verdict: Verdict) -> list[str]:
    lines = ["Verdict"]
    lines += _line("how it went", verdict.summary)
    lines += _line("bottleneck", verdict.kind)
    for number, evidence in enumerate(verdict.evidence):
        lines += _line("evidence" if number == 0 else "", evidence)
    change = verdict.change
    if verdict.flags:
        change += f" (try: {' '.join(verdict.flags)})"
    return lines + _line("what helps", change)


def _what_was_run(record: RunRecord, setup: Setup, trace: AnyTrace, origin: str) -> list[str]:
    settings, layout = setup.settings, setup.layout

    def mark(name: str) -> str:
        setting = settings[name]
        return "" if setting.source == "given" else f" [{setting.source}]"

    count, span = trace.num_requests, trace.span_ns / 1e9
    rate = f", {_number(count / span)} requests/s" if span else ", all at once"
    when = f" over {format_seconds(span)}{rate}"
    if isinstance(trace, SessionTrace):  # turns come when answers do
        when = f" in {len(trace.sessions):,} sessions"
    tp = settings["tensor_parallel_size"].value * settings["pipeline_parallel_size"].value
    kv_bytes = setup.num_blocks * layout.bytes_per_block
    config = setup.config
    lines = ["Run"]
    lines += _line(
        "trace",
        f"{trace.path.name} ({trace.format}): {count:,} request{'s' if count > 1 else ''}{when}",
    )
    if origin:
        lines += _line("", origin)
    lines += _line("load", str(record.settings["load"]))
    lines += _line(
        "model",
        f"{setup.shape.name}{mark('model')}, {settings['weight_dtype'].value} weights"
        f"{mark('weight_dtype')}: {setup.weight_bytes / GIB:.2f} GiB a GPU",
    )
    lines += _line(
        "GPU", f"{tp} x {setup.gpu.name}{mark('gpu')}, {setup.gpu.memory_bytes / GIB:.1f} GiB"
    )
    per_gpu = " a GPU" if tp > 1 else ""
    lines += _line(
        "KV memory",
        f"{kv_bytes / GIB:.2f} GiB ({kv_bytes / GB:.2f} GB){per_gpu}{mark('kv_bytes')} = "
        f"{setup.num_blocks:,} blocks of {layout.block_size} tokens{mark('block_size')} = "
        f"{setup.num_blocks * layout.block_size:,} tokens; {layout.bytes_per_token:,} bytes a token in "
        f"{settings['kv_cache_dtype'].value}{mark('kv_cache_dtype')} (vLLM counts "
        f"{setup.num_blocks + 1:,} blocks, its null block included); blocks are taken on demand, as a "
        "sequence grows, and not reserved for its longest output",
    )
    lines += _line(
        "scheduler",
        f"{setup.policy_name}{mark('scheduling_policy')}{_about(setup)}, max_num_seqs {config.max_num_seqs}"
        f"{mark('max_num_seqs')}, max_num_batched_tokens {config.max_num_batched_tokens:,}"
        f"{mark('max_num_batched_tokens')}, max_model_len {config.max_model_len:,}"
        f"{mark('max_model_len')}, chunked prefill {_on(config.enable_chunked_prefill)}, prefix caching "
        f"{_on(setup.enable_prefix_caching)}, preemption by {config.preemption_mode}",
    )
    lines += _line("cost model", f"{settings['cost_model'].value}{mark('cost_model')}")
    for warning in setup.warnings:
        lines += _line("beware", warning)
    for skipped in trace.skipped:
        lines += _line("skipped", str(skipped))
    for note in trace.notes:
        lines += _line("note", note)
    return lines


def _about(setup: Setup) -> str:
    about = getattr(load_policy(setup.policy_name), "about", "")
    return f" ({about})" if about else ""


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def _outcome(record: RunRecord) -> list[str]:
    requests, summary = record.summary["requests"], record.summary
    parts = [f"{requests['completed']:,} completed"]
    parts += [
        f"{requests[name]:,} {name.replace('_', ' ')}"
        for name in ("refused", "timed_out", "aborted", "unfinished")
    ]
    lines = ["Requests", *_line("", f"{', '.join(parts)}; {requests['total']:,} in all").copy()]
    if requests["timed_out"]:
        lines += _line(
            "beware",
            f"{requests['timed_out']:,} requests timed out: what they took from the others is in the "
            "times below, their own latencies are not",
        )
    rate = summary["throughput"]
    if rate["requests_per_s"] is not None:
        lines += _line(
            "throughput",
            f"{_number(rate['requests_per_s'])} requests/s, {rate['input_tokens_per_s']:,.0f} input and "
            f"{rate['output_tokens_per_s']:,.0f} output tokens/s, of completed requests over the makespan "
            f"of {format_seconds(summary['makespan_s'])}",
        )
    return lines


def _latency(summary: Mapping[str, Any]) -> list[str]:
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    lines = [
        "Latency",
        "  " + " " * _LABEL + "".join(f"{name:>11}" for name in columns) + f"{'count':>12}",
    ]
    for name, label in (
        ("ttft_s", "TTFT"),
        ("tpot_s", "TPOT"),
        ("itl_s", "ITL"),
        ("e2e_s", "E2E"),
        ("queue_s", "queue"),
    ):
        row = summary[name]
        cells = "".join(f"{format_seconds(row[column]):>11}" for column in columns)
        lines.append(f"  {label:<{_LABEL}}{cells}{row['count']:>12,}")
    lines += _line(
        "",
        "TTFT first token, TPOT mean time per token after it (a value a request), ITL every gap between "
        "tokens (pooled), E2E last token, queue time until first scheduled",
    )
    return lines


def _band(summary: Mapping[str, Any]) -> list[str]:
    """Low, best and high of the statistics that people plan with."""
    band = summary.get("band")
    if band is None:
        return []
    low, high = band["scale"]
    lines = [
        f"Band: the same with every step x {low:g} and x {high:g} ({band['why']})",
        "  " + " " * _LABEL + "".join(f"{name:>22}" for name in ("p50", "p95", "p99")),
    ]
    for name, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E")):
        ends = [
            [format_seconds(band[end][name][rank]) for end in ("low", "high")]
            for rank in ("p50", "p95", "p99")
        ]
        cells = "".join(f"{' - '.join(pair):>22}" for pair in ends)
        lines.append(f"  {label:<{_LABEL}}{cells}")
    if band["low"]["attainment"] is not None:
        lines += _line(
            "limits met",
            f"{format_share(band['high']['attainment'])} to {format_share(band['low']['attainment'])} of all "
            "requests",
        )
    return lines


def _goodput(summary: Mapping[str, Any]) -> list[str]:
    goodput = summary["goodput"]
    limits = goodput["slo"].get("limits") if goodput["slo"] else None
    if not limits:
        return [
            "Goodput",
            *_line("", 'no limits given: --slo "ttft<=500ms,tpot<=50ms" counts what meets them'),
        ]
    lines = ["Goodput", *_line("limits", limits)]
    if goodput["attainment"] is not None:
        lines += _line(
            "met by",
            f"{format_share(goodput['attainment'])} of all requests: "
            f"{_number(goodput['requests_per_s'])} requests/s, "
            f"{_number(goodput['output_tokens_per_s'])} output tokens/s",
        )
    rates = goodput["pass_rate"]
    if rates:
        lines += _line(
            "each alone", ", ".join(f"{name} {format_share(rate)}" for name, rate in rates.items())
        )
    for entry in goodput["slo"].get("statistics") or ():
        held = "holds" if entry["holds"] else "does not hold"
        lines += _line(entry["limit"], f"{held}: {format_seconds(entry['value_s'])}")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}" if value < 999.5 else f"{value:,.0f}"


def _kv(record: RunRecord, trace: AnyTrace) -> list[str]:
    kv = record.summary["kv"]
    lines = ["KV memory"]
    hit = (
        f"prefix hits {format_share(kv['prefix_hit_rate'])} of prompt tokens"
        if trace.has_identity
        else "prefix hits unknown: the trace does not say which prefixes are equal (modelled as none)"
    )
    lines += _line(
        "use",
        f"peak {format_share(kv['peak_usage'])}, mean {format_share(kv['mean_usage'])} of "
        f"{kv['num_blocks']:,} blocks held by requests; {hit}; {kv['evictions']:,} evictions of cached "
        "blocks (free blocks keep their prefixes until they are needed again)",
    )
    steps = record.steps
    if steps is not None and len(steps["start_ns"]):
        lines += _chart(steps, kv["num_blocks"])
    return lines


def _chart(steps: Columns, num_blocks: int) -> list[str]:
    """Blocks in use, requests running and waiting over time, one row each."""
    start = int(steps["start_ns"][0])
    end = int(steps["start_ns"][-1] + steps["duration_ns"][-1])
    bins = TimeBins(steps, start, end, _CHART_COLUMNS)
    lines = []
    for label, column, top in (
        ("blocks used", "blocks_used", num_blocks),
        ("running", "running", None),
        ("waiting", "waiting", None),
    ):
        values = bins.mean(column)
        scale = top if top is not None else max(float(np.max(values)), 1.0)
        bars = "".join(_bar(value / scale) for value in values)
        peak = StepRows(steps).most(column)
        lines.append(f"  {label:<{_LABEL}}|{bars}| full bar {scale:,.0f}, peak {peak:,}")
    each = format_seconds((end - start) / 1e9 / _CHART_COLUMNS)
    left, right = f"{start / 1e9:,.0f} s", f"{end / 1e9:,.0f} s"
    lines.append(
        f"  {'':<{_LABEL}} {left}{right:>{_CHART_COLUMNS - len(left)}}  each bar the mean of {each}"
    )
    return lines


def _bar(share: float) -> str:
    # Anything above nothing shows.
    index = min(len(_BARS) - 1, int(np.ceil(share * (len(_BARS) - 1))))
    return _BARS[max(index, 0)]


def _work(summary: Mapping[str, Any]) -> list[str]:
    steps, use = summary["steps"], summary["utilization"]
    lines = ["Work"]
    mean = steps["mean_batch"]
    lines += _line(
        "steps",
        f"{steps['count']:,}, {format_seconds(steps['mean_s'])} on average, "
        f"{'-' if mean is None else f'{mean:.3g}'} sequences in one",
    )
    for phase, what in (("prefill", "steps with prefill"), ("decode", "decode-only steps")):
        shares = use[phase]
        if shares["compute"] is None and shares["bandwidth"] is None:
            text = f"{what}: compute and bandwidth unknown to this cost model, or no such step"
        else:
            text = (
                f"{what}: {format_share(shares['compute'])} of peak FLOP/s, "
                f"{format_share(shares['bandwidth'])} of peak bandwidth"
            )
        lines += _line(phase, text)
    return lines


def _preemptions(requests: Columns) -> list[str]:
    counts = requests["preemptions"]
    total = int(counts.sum())
    if not total:
        return ["Preemptions", *_line("", "none")]
    victims = np.flatnonzero(counts)
    lines = [
        "Preemptions",
        *_line(
            "",
            f"{total:,} preemption{'s' if total > 1 else ''} of {len(victims):,} "
            f"request{'s' if len(victims) > 1 else ''}; {int(requests['recomputed_tokens'].sum()):,} tokens "
            f"computed again, {int(requests['refound_tokens'].sum()):,} found again in the prefix cache",
        ),
    ]
    order = np.lexsort((victims, -requests["max_gap_ns"][victims]))[:3]
    for number, index in enumerate(victims[order].tolist()):
        lines += _line(
            "hardest hit" if number == 0 else "",
            f"{requests['id'][index]}: preempted {_times(int(counts[index]))}, longest gap between tokens "
            f"{format_seconds(float(requests['max_gap_ns'][index]) / 1e9)}",
        )
    return lines


def _cut_short(requests: Columns, asked: Mapping[str, int]) -> list[str]:
    """Outputs that ended before their true length: the run did less than the trace asks for."""
    rows = list(
        zip(requests["id"], requests["finish_reason"], requests["output_tokens"], strict=True)
    )
    lines = []
    cut = [
        (name, int(got)) for name, why, got in rows if why == "length" and got < asked.get(name, 0)
    ]
    if cut:
        lost = sum(asked[name] - got for name, got in cut)
        lines += _line(
            "",
            f"{_requests(len(cut))} cut at max_tokens or max_model_len, {lost:,} output tokens less than "
            f"the trace has (first: {cut[0][0]})",
        )
    full = [(name, int(got)) for name, why, got in rows if why == "kv_exhausted"]
    if full:
        lines += _line(
            "",
            f"{_requests(len(full))} filled the whole pool and ended there, counted as aborted "
            f"(kv_exhausted; first: {full[0][0]} after {full[0][1]:,} output tokens)",
        )
    return ["Cut short", *lines] if lines else []


def _requests(count: int) -> str:
    return "1 request was" if count == 1 else f"{count:,} requests were"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _refusals(requests: Columns) -> list[str]:
    refused = [
        (name, reason)
        for name, status, reason in zip(
            requests["id"], requests["status"], requests["finish_reason"], strict=True
        )
        if status == "refused"
    ]
    if not refused:
        return []
    lines = ["Refused"]
    for name, reason in refused[:3]:
        lines += _line(name, reason)
    if len(refused) > 3:
        lines += _line("", f"and {len(refused) - 3:,} more")
    return lines


def _assumed(setup: Setup, record: RunRecord) -> list[str]:
    lines = ["Assumed"]
    for name, setting in setup.settings.items():
        if setting.source == "assumed" and setting.value is not None:
            note = f" ({setting.note})" if setting.note else ""
            lines.append(f"  --{name.replace('_', '-')} {_plain(setting.value)}{note}")
    for name in ("max_tokens", "deadline"):
        setting = setup.settings[name]
        if setting.value is None:
            lines.append(f"  no --{name.replace('_', '-')}: {setting.note}")
    lines += _bullets(record.settings["cost_model_assumes"])
    return lines


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bullets(texts: Iterable[str]) -> list[str]:
    lines = []
    for text in texts:
        lines += textwrap.wrap(
            text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
    return lines
