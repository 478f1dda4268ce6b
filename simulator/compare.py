"""Two runs side by side: what changed, whether that is better, and which settings differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from records.run import RunRecord

Verdict = Literal["better", "worse", "same", "differs", "unknown"]
"""``differs``: neither direction is better by itself; ``unknown``: a run has no value."""

SAME_WITHIN = 0.01
"""A relative change up to this is called ``same``; of counts, only none is."""
SAME_SHARE_WITHIN = 0.005
"""The same for shares, as a difference: half a point."""


class _Metric(NamedTuple):
    """A row of the table."""

    path: str
    """Keys of summary.json."""
    label: str
    kind: Literal["time", "rate", "share", "count", "number"]
    better: Literal["lower", "higher", None]


_METRICS = (
    _Metric("requests.total", "requests", "count", None),
    _Metric("requests.completed", "completed", "count", "higher"),
    *(
        _Metric(f"requests.{status}", status.replace("_", " "), "count", "lower")
        for status in ("refused", "timed_out", "aborted", "unfinished")
    ),
    *(
        _Metric(f"{name}_s.{statistic}", f"{label} {statistic}", "time", "lower")
        for name, label in (
            ("ttft", "TTFT"),
            ("tpot", "TPOT"),
            ("itl", "ITL"),
            ("e2e", "E2E"),
            ("queue", "queue"),
        )
        for statistic in ("mean", "p50", "p95", "p99", "max")
    ),
    _Metric("throughput.requests_per_s", "requests/s", "rate", "higher"),
    _Metric("throughput.input_tokens_per_s", "input tokens/s", "rate", "higher"),
    _Metric("throughput.output_tokens_per_s", "output tokens/s", "rate", "higher"),
    _Metric("throughput.steady_requests_per_s", "steady requests/s", "rate", "higher"),
    _Metric("goodput.attainment", "SLO attainment", "share", "higher"),
    _Metric("goodput.requests_per_s", "goodput, requests/s", "rate", "higher"),
    _Metric("goodput.output_tokens_per_s", "goodput, tokens/s", "rate", "higher"),
    _Metric("kv.peak_usage", "KV use, peak", "share", None),
    _Metric("kv.mean_usage", "KV use, mean", "share", None),
    _Metric("kv.prefix_hit_rate", "prefix hit rate", "share", "higher"),
    _Metric("kv.preemptions", "preemptions", "count", "lower"),
    _Metric("kv.recomputed_tokens", "recomputed tokens", "count", "lower"),
    _Metric("kv.evictions", "evictions", "count", None),
    _Metric("steps.count", "steps", "count", None),
    _Metric("steps.mean_s", "step time, mean", "time", None),
    _Metric("steps.mean_batch", "sequences in a step", "number", None),
    *(
        _Metric(f"utilization.{phase}.{what}", f"{phase} {what} use", "share", None)
        for phase in ("prefill", "decode")
        for what in ("compute", "bandwidth")
    ),
    _Metric("makespan_s", "makespan", "time", None),
)


def compare_json(a: RunRecord, b: RunRecord, names: tuple[str, str] = ("A", "B")) -> dict[str, Any]:
    """The comparison for machines.

    ``metrics`` maps a path of summary.json to ``{"a", "b", "change", "verdict"}``, where ``change``
    is relative to A ((b - a) / a; None where a is 0 or a value is missing) and ``verdict`` reads
    "B is ...". ``settings`` maps each setting that differs to ``{"a", "b"}`` (None where a run
    has no such setting). ``notes`` are lines that say what a comparison of these two cannot tell.
    """
    metrics = {}
    is_same_load = _at(a.summary, "requests.total") == _at(b.summary, "requests.total")
    for metric in _METRICS:
        values = [_at(run.summary, metric.path) for run in (a, b)]
        metrics[metric.path] = {
            "a": values[0],
            "b": values[1],
            "change": _change(*values),
            "verdict": _verdict(metric, *values, is_same_load=is_same_load),
        }
    ours, theirs = (
        # Where a setting came from is none itself.
        _flat({key: value for key, value in run.settings.items() if key != "sources"})
        for run in (a, b)
    )
    settings = {
        key: {"a": ours.get(key), "b": theirs.get(key)}
        for key in dict.fromkeys((*ours, *theirs))
        if ours.get(key) != theirs.get(key)
    }
    return {
        "a": names[0],
        "b": names[1],
        "metrics": metrics,
        "settings": settings,
        "bottleneck": {
            "a": _at(a.summary, "bottleneck.kind"),
            "b": _at(b.summary, "bottleneck.kind"),
        },
        "notes": _notes(a, b, settings),
    }


def compare(a: RunRecord, b: RunRecord, names: tuple[str, str] = ("A", "B")) -> str:
    """The comparison for people: a table, then the settings that differ, then what to beware of.

    Rows that no run has a value for are left out. "better" and "worse" are said of B.
    """
    result = compare_json(a, b, names)
    rows: list[tuple[str, ...]] = [("", *names, "change", "")]
    for metric in _METRICS:
        entry = result["metrics"][metric.path]
        if entry["a"] is None and entry["b"] is None:
            continue
        texts = _texts(metric, entry["a"], entry["b"])
        change = _change_text(metric, entry["a"], entry["b"], entry["change"])
        # "differs" and "unknown" can be seen.
        verdict = entry["verdict"] if entry["verdict"] in ("better", "worse", "same") else ""
        rows.append((metric.label, *texts, change, verdict))
    if any(result["bottleneck"].values()):
        kinds = (result["bottleneck"][side] or "-" for side in ("a", "b"))
        rows.append(("bottleneck", *kinds, "", ""))
    lines = _table(rows)
    lines.append("")
    if result["settings"]:
        lines.append("Settings that differ")
        lines.extend(
            _table(
                [
                    (key, _setting(pair["a"]), _setting(pair["b"]))
                    for key, pair in result["settings"].items()
                ]
            )
        )
    else:
        lines.append("No setting differs.")
    lines.extend(["", *(f"Note: {note}" for note in result["notes"])] if result["notes"] else [])
    return "\n".join(lines) + "\n"


def _at(tree: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, ``None`` where there is none."""
    value: Any = tree
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            result.update(_flat(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return result


def _change(a: float | None, b: float | None) -> float | None:
    return (b - a) / a if a and b is not None else None


def _verdict(metric: _Metric, a: float | None, b: float | None, *, is_same_load: bool) -> Verdict:
    if a is None or b is None:
        return "unknown"
    slack = {"count": 0, "share": SAME_SHARE_WITHIN}.get(metric.kind, SAME_WITHIN * abs(a))
    if abs(b - a) <= slack:
        return "same"
    if metric.better is None or (metric.kind == "count" and not is_same_load):
        return "differs"
    return "better" if (b < a) == (metric.better == "lower") else "worse"


def _notes(a: RunRecord, b: RunRecord, settings: Mapping[str, Any]) -> list[str]:
    notes = []
    if any(key.split(".")[-1] == "trace_sha256" for key in settings):
        notes.append("the traces differ: a change may come from the load and not from the settings")
    totals = [_at(run.summary, "requests.total") for run in (a, b)]
    if totals[0] != totals[1]:
        notes.append(f"the runs have {totals[0]} and {totals[1]} requests")
    slos = [_at(run.summary, "goodput.slo.limits") for run in (a, b)]
    if slos[0] != slos[1]:
        notes.append(
            f"the limits differ ({slos[0] or 'none'} and {slos[1] or 'none'}): goodput and "
            "attainment do not compare"
        )
    completed = [_at(run.summary, "requests.completed") for run in (a, b)]
    if totals[0] == totals[1] and completed[0] != completed[1]:
        notes.append(
            f"{completed[0]} and {completed[1]} requests completed: E2E and TPOT are of those only"
        )
    return notes


def _texts(metric: _Metric, *values: float | None) -> list[str]:
    """Values of a row, all in one unit."""
    known = [v for v in values if v is not None]
    if metric.kind == "time":
        in_ms = max(known) < 1
        return [_time(v, in_ms=in_ms) for v in values]
    return [_text(metric, v) for v in values]


def _time(value: float | None, *, in_ms: bool) -> str:
    if value is None:
        return "-"
    return f"{_digits(value * 1000)} ms" if in_ms else f"{_digits(value)} s"


def _text(metric: _Metric, value: float | None) -> str:
    if value is None:
        return "-"
    if metric.kind == "share":
        return f"{100 * value:.1f} %"
    return f"{value:,}" if metric.kind == "count" else _digits(value)


def _digits(value: float) -> str:
    """Three digits that matter, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")


def _change_text(metric: _Metric, a: float | None, b: float | None, change: float | None) -> str:
    if a is None or b is None:
        return ""
    if metric.kind == "share":
        return f"{100 * (b - a):+.1f} points"
    if metric.kind == "count":
        return f"{b - a:+,}" if b != a else "0"
    return "" if change is None else f"{100 * change:+,.1f} %"


def _setting(value: object) -> str:
    if isinstance(value, list):
        return f"{len(value)} entries"
    return "-" if value is None else str(value)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Names left, values right, verdicts left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [text.rjust(width) for text, width in zip(row[1:4], widths[1:4], strict=True)]
        lines.append("  ".join([*cells, *row[4:]]).rstrip())
    return lines
