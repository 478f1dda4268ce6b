"""Pictures of a run that one can put in a slide: latencies, KV blocks, queue, throughput.

Levels are time-weighted means over bins of equal length, so a run of a million steps draws as
quickly as one of a hundred and no bin depends on how many steps fell into it. Same record, same
bytes (with the same version of matplotlib).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from records.columns import Columns, IntArray
from records.gaps import linear_percentile
from records.metrics import Latencies, latencies, meets, statistic_ns
from records.run import PICTURES, RunRecord
from records.slo import NO_LIMITS, Limits, Metric, format_ns, parse_limits
from records.steps import StepRows, end_ns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FloatArray = npt.NDArray[np.float64]

# Okabe and Ito's palette, which the common kinds of colour blindness keep apart.
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_INK, _GREY, _PALE = "#222222", "#666666", "#DDDDDD"
_STYLE: dict[str, Any] = {
    "figure.figsize": (10.0, 5.6),
    "figure.dpi": 150,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.12,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _PALE,
    "grid.linewidth": 0.8,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "svg.hashsalt": "kvplan",
}
_LEVEL_BINS = 250
_RATE_BINS = 200
_CURVE_POINTS = 1000
_LATENCY_NAMES: Mapping[Metric, str] = {
    "ttft": "TTFT (time to first token)",
    "tpot": "TPOT (time per output token)",
    "e2e": "E2E (arrival to last token)",
}


class _Axis(NamedTuple):
    """A unit for an axis of times."""

    name: str
    ns: int


def write_pictures(
    record: RunRecord,
    folder: str | Path,
    *,
    limits: Limits | None = None,
    caption: str | None = None,
    formats: Sequence[str] = ("png", "svg"),
) -> list[Path]:
    """Draw the pictures of a run into ``folder`` (made if need be); the files written.

    Parameters
    ----------
    limits
        Drawn beside the latencies; those in the record's summary where not given.
    caption
        Small print under each picture; by default model, GPU and trace as the settings have them.
    formats
        ``png``, ``svg`` or both.

    Raises
    ------
    OSError
        Where the folder cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if limits is None:
        limits = _recorded_limits(record.summary)
    drawings: dict[str, Callable[[Figure], None]] = dict(
        zip(
            PICTURES,
            (
                partial(_draw_latency, record=record, limits=limits),
                partial(_draw_kv_blocks, record=record),
                partial(_draw_queue, record=record),
                partial(_draw_throughput, record=record),
            ),
            strict=True,
        )
    )
    written: list[Path] = []
    with mpl.rc_context():
        # Not the user's own settings: the same record gives the same picture anywhere.
        mpl.rcdefaults()
        parameters: Any = mpl.rcParams
        parameters.update(_STYLE)
        for name, draw in drawings.items():
            # No pyplot: it keeps global state and may look for a screen.
            figure = Figure()
            draw(figure)
            small_print = _caption(record.settings) if caption is None else caption
            if small_print:
                # A $ in a file name is no formula.
                figure.supxlabel(
                    small_print, x=0.012, ha="left", fontsize=8, color=_GREY, parse_math=False
                )
            for suffix in formats:
                path = target / f"{name}.{suffix}"
                # A date would make every file differ.
                metadata = {"Date": None} if suffix == "svg" else None
                figure.savefig(path, format=suffix, metadata=metadata)
                written.append(path)
    return written


class TimeBins:
    """Bins of equal length over a run, and what the steps put into them.

    Steps of one replica do not overlap; several replicas add up.
    """

    def __init__(
        self,
        steps: Columns,
        start_ns: int,
        end_ns: int,
        num_bins: int,
        slice_rows: int | None = None,
    ) -> None:
        self._steps = StepRows(steps, slice_rows)
        self._replicas: list[int] = np.unique(
            np.concatenate([np.unique(rows["replica"]) for rows in self._steps.slices()])
        ).tolist()
        self._start_ns = start_ns
        self.edges_ns: FloatArray = np.linspace(0, max(end_ns - start_ns, 1), num_bins + 1)
        """Ascending, shape ``[num_bins + 1]``, from 0 at ``start_ns``."""

    def rate(self, column: str) -> FloatArray:
        """Amounts of a step, spread evenly over it, per second (shape ``[num_bins]``)."""
        return 1e9 * self._sum(self._spread(part, part[column]) for part in self._parts(column))

    def mean(self, column: str) -> FloatArray:
        """Time-weighted mean of a level that is 0 between steps (shape ``[num_bins]``)."""
        return self._sum(
            self._spread(part, part[column] * part["duration_ns"].astype(np.float64))
            for part in self._parts(column)
        )

    def peak(self, column: str) -> FloatArray | None:
        """Highest level in each bin; ``None`` for several replicas, whose peaks do not add up."""
        if len(self._replicas) != 1:
            return None
        highest = np.zeros(len(self.edges_ns) - 1)
        for part in self._parts(column):
            starts = part["start_ns"] - self._start_ns
            first = np.searchsorted(starts + part["duration_ns"], self.edges_ns[:-1], side="right")
            last = np.searchsorted(starts, self.edges_ns[1:], side="left")
            levels = np.append(part[column], 0)
            bounds = np.column_stack([first, np.maximum(last, first)]).ravel()
            peaks = np.maximum.reduceat(levels, bounds)[::2]
            highest = np.maximum(highest, np.where(last > first, peaks, 0))
        return highest

    def _parts(self, column: str) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Steps of one replica each, by start, some of the rows at a time."""
        for rows in self._steps.slices():
            part = {name: rows[name] for name in {column, "start_ns", "duration_ns", "replica"}}
            for replica in self._replicas:
                chosen = part
                if len(self._replicas) > 1:
                    mine = np.flatnonzero(part["replica"] == replica)
                    chosen = {name: values[mine] for name, values in part.items()}
                starts = chosen["start_ns"]
                if (starts[1:] < starts[:-1]).any():
                    order = np.argsort(starts, kind="stable")
                    chosen = {name: values[order] for name, values in chosen.items()}
                if len(starts):
                    yield chosen

    def _sum(self, parts: Iterable[FloatArray]) -> FloatArray:
        return sum(parts, start=np.zeros(len(self.edges_ns) - 1))

    def _spread(
        self, steps: Mapping[str, npt.NDArray[Any]], amounts: npt.NDArray[Any]
    ) -> FloatArray:
        """Amount per ns in each bin, from the running total, which rises evenly in a step."""
        starts, durations = steps["start_ns"], steps["duration_ns"]
        edges = self.edges_ns + self._start_ns
        over = np.searchsorted(starts + durations, edges, side="right")
        totals = np.concatenate([[0.0], np.cumsum(amounts, dtype=np.float64)])
        at = np.minimum(over, len(starts) - 1)  # the step that an edge may cut
        part = np.clip((edges - starts[at]) / durations[at], 0, 1)
        inside: FloatArray = totals[over] + np.where(over < len(starts), part * amounts[at], 0)
        return np.diff(inside) / np.diff(self.edges_ns)


def _draw_latency(figure: Figure, record: RunRecord, limits: Limits) -> None:
    values = latencies(record.requests)
    statuses = record.requests["status"]
    num_completed = statuses.count("completed")
    _title(figure, f"Latency: {num_completed:,} of {len(statuses):,} requests completed")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, metric in zip(panels, _LATENCY_NAMES, strict=True):
        _draw_distribution(axes, metric, values, record, limits)
    panels[0].set_ylabel("requests within, %")


def _draw_distribution(
    axes: Axes, metric: Metric, values: Latencies, record: RunRecord, limits: Limits
) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_title(_LATENCY_NAMES[metric])
    axes.set_ylim(0, 104)
    data = np.sort(getattr(values, metric))
    if not len(data):
        why = "no request with two tokens" if metric == "tpot" else "no request"
        _say(axes, f"{why} to show")
        return
    unit = _Axis("s", 10**9) if data[-1] >= 2e9 else _Axis("ms", 10**6)
    scaled = data / unit.ns
    is_log = scaled[0] > 0 and scaled[-1] / scaled[0] > 50
    ranks = np.unique(np.linspace(0, len(data) - 1, _CURVE_POINTS).astype(np.int64))
    axes.plot(
        np.append(scaled[0], scaled[ranks]),
        np.append(0, 100 * (ranks + 1) / len(data)),
        color=_BLUE,
        linewidth=2,
        drawstyle="steps-post",
    )
    for q, marker in ((50, "o"), (95, "s"), (99, "D")):
        value = linear_percentile(scaled.item, len(scaled), q)
        label = f"p{q}  {_seconds(value * unit.ns)}"
        style: dict[str, Any] = {
            "color": _BLUE,
            "markeredgecolor": "white",
            "markersize": 8,
            "clip_on": False,
        }
        axes.plot([value], [q], marker, label=label, zorder=3, **style)
    if is_log:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _tick(x)))
    axes.set_xlabel(f"{metric.upper()}, {unit.name}" + (" (log scale)" if is_log else ""))
    for limit_ns, label, style_name in _limit_lines(metric, values, record, limits):
        # A limit far from the data would squeeze it: then the legend alone tells.
        is_near = data[0] / 20 <= limit_ns <= (20 if is_log else 3) * data[-1]
        x = [limit_ns / unit.ns] if is_near else []
        axes.plot(x * 2, [0, 100] if is_near else [], color=_RED, linestyle=style_name, label=label)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), borderaxespad=0, handlelength=1.6)


def _limit_lines(
    metric: Metric, values: Latencies, record: RunRecord, limits: Limits
) -> list[tuple[int, str, str]]:
    """(ns, label, line style) of each limit on the metric."""
    lines = []
    for limit in limits.per_request:
        if limit.metric == metric:
            share = _percent(float(np.mean(meets(record.requests, limit))))
            label = f"limit {_exactly(limit.limit_ns)}: kept by {share}"
            lines.append((limit.limit_ns, label, "--"))
    for bound in limits.statistics:
        if bound.metric == metric:
            holds = bound.holds(statistic_ns(bound, values, record.gaps))
            verdict = "kept" if holds else "missed"
            label = f"{bound.statistic} limit {_exactly(bound.limit_ns)}: {verdict}"
            lines.append((bound.limit_ns, label, ":"))
    return lines


def _draw_kv_blocks(figure: Figure, record: RunRecord) -> None:
    num_blocks = record.settings.get("num_blocks")
    axes = figure.subplots()
    bins = _bins(record, _LEVEL_BINS)
    if bins is None:
        _title(figure, "KV blocks in use")
        _say_only(axes, _no_steps(record))
        return
    pool = num_blocks * record.settings.get("num_replicas", 1) if num_blocks else None
    kv = record.summary.get("kv", {})
    mean, peak = kv.get("mean_usage"), kv.get("peak_usage")
    shares = ""
    if mean is not None and peak is not None:
        shares = f": {100 * mean:.1f} % of the pool on average, {100 * peak:.1f} % at the peak"
    _title(figure, f"KV blocks in use{shares}")
    highest = _draw_level(axes, bins, "blocks_used", _BLUE)
    block_size = record.settings.get("block_size")
    axes.set_ylabel(f"KV blocks of {block_size} tokens" if block_size else "KV blocks")
    if pool:
        label = f"pool: {pool:,} blocks"
        if highest > 0.3 * pool:
            axes.axhline(pool, color=_RED, linestyle="--", label=label)
            axes.set_ylim(0, 1.05 * pool)
        else:
            axes.plot([], [], color=_RED, linestyle="--", label=f"{label} (far above)")
        of_pool = pool / 100
        share = axes.secondary_yaxis(
            "right", functions=(partial(np.multiply, 1 / of_pool), partial(np.multiply, of_pool))
        )
        share.set_ylabel("share of the pool, %")
    _time_axis(axes, bins)
    _legend_below(axes)


def _draw_queue(figure: Figure, record: RunRecord) -> None:
    bins = _bins(record, _LEVEL_BINS)
    if bins is None:
        _title(figure, "Requests running and waiting")
        _say_only(figure.subplots(), _no_steps(record))
        return
    running, waiting = (_number(float(bins.mean(name).mean())) for name in ("running", "waiting"))
    _title(figure, f"Requests: {running} running and {waiting} waiting on average")
    top, bottom = figure.subplots(2, 1, sharex=True)
    highest = _draw_level(top, bins, "running", _GREEN)
    top.set_ylabel("running")
    most = record.settings.get("max_num_seqs")
    if isinstance(most, int):
        line = most * record.settings.get("num_replicas", 1)
        if highest > 0.5 * line:
            top.axhline(line, color=_RED, linestyle="--", label=f"limit: {line:,} sequences")
            top.set_ylim(0, 1.08 * line)
    if _draw_level(bottom, bins, "waiting", _ORANGE) == 0:
        bottom.text(
            0.5, 0.5, "nothing waited", transform=bottom.transAxes, ha="center", color=_GREY
        )
    bottom.set_ylabel("waiting")
    _time_axis(bottom, bins)
    for axes in (top, bottom):
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)


def _draw_throughput(figure: Figure, record: RunRecord) -> None:
    bins = _bins(record, _RATE_BINS)
    if bins is None or record.steps is None:
        _title(figure, "Tokens per second")
        _say_only(figure.subplots(), _no_steps(record))
        return
    seconds = bins.edges_ns[-1] / 1e9
    means = {
        name: StepRows(record.steps).total(f"{name}_tokens") / seconds
        for name in ("prefill", "decode")
    }
    prefill, decode = (_number(mean) for mean in means.values())
    _title(figure, f"Tokens computed per second: {prefill} in prefill, {decode} in decode")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, (name, mean), color in zip(panels, means.items(), (_BLUE, _ORANGE), strict=True):
        rate = bins.rate(f"{name}_tokens")
        _, scale = _time_unit(bins)
        label = f"mean over {_bin_length(bins)}"
        edges = bins.edges_ns / scale.ns
        axes.stairs(rate, edges, fill=True, color=color, alpha=0.75, label=label)
        axes.axhline(mean, color=_INK, linewidth=1, linestyle="--", label="mean of the run")
        axes.set_ylabel(f"{name}, tokens/s")
        _count_axis(axes, float(rate.max()))
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)
    _time_axis(panels[1], bins)


def _draw_level(axes: Axes, bins: TimeBins, column: str, color: str) -> float:
    """Mean as a dark area, the peak as a light one behind it; the highest value drawn."""
    _, scale = _time_unit(bins)
    edges = bins.edges_ns / scale.ns
    mean, peak = bins.mean(column), bins.peak(column)
    label = f"mean over {_bin_length(bins)}"
    axes.stairs(mean, edges, fill=True, color=color, alpha=0.75, label=label, zorder=2)
    highest = float(mean.max())
    if peak is not None:
        axes.stairs(peak, edges, fill=True, color=color, alpha=0.3, label="peak", zorder=1)
        highest = float(peak.max())
    _count_axis(axes, highest)
    return highest


def _bins(record: RunRecord, num_bins: int) -> TimeBins | None:
    """Bins from the first arrival to the end of the last step; ``None`` where no step is known."""
    steps = record.steps
    if steps is None or not len(steps["start_ns"]):
        return None
    arrivals: IntArray = record.requests["arrival_ns"]
    rows = StepRows(steps)
    start = min(int(part["start_ns"].min()) for part in rows.slices())
    if len(arrivals):
        start = min(start, int(arrivals.min()))
    end = rows.most(end_ns)
    return TimeBins(steps, start, end, num_bins)


def _no_steps(record: RunRecord) -> str:
    return "the run was recorded without its steps" if record.steps is None else "no step was run"


def _time_unit(bins: TimeBins) -> tuple[float, _Axis]:
    """Length of the run and the unit to show it in."""
    length = float(bins.edges_ns[-1])
    for unit, least in ((_Axis("h", 3600 * 10**9), 3), (_Axis("min", 60 * 10**9), 10)):
        if length >= least * unit.ns:
            return length, unit
    return length, _Axis("s", 10**9) if length >= 10**9 else _Axis("ms", 10**6)


def _time_axis(axes: Axes, bins: TimeBins) -> None:
    length, unit = _time_unit(bins)
    axes.set_xlim(0, length / unit.ns)
    axes.set_xlabel(f"time since the first arrival, {unit.name}")


def _count_axis(axes: Axes, highest: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_ylim(0, 1.08 * highest if highest > 0 else 1)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _tick(y)))


def _legend_below(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=3, borderaxespad=0)


def _title(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.012, ha="left", fontsize=15, fontweight="bold", color=_INK)


def _say(axes: Axes, text: str) -> None:
    """An empty picture that says why it is empty."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=_GREY)
    axes.set_xticks([])
    axes.grid(visible=False)


def _say_only(axes: Axes, text: str) -> None:
    _say(axes, text)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_visible(False)


def _number(value: float) -> str:
    """Three digits that matter (two below 1), thousands apart."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{3 if value >= 1 else 2}g}"


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _percent(share: float) -> str:
    """Rounded down: 99.97 % of requests are not all of them."""
    return f"{math.floor(share * 1000 + 1e-9) / 10:.1f} %"


def _seconds(time_ns: float) -> str:
    return f"{_number(time_ns / 1e9)} s" if time_ns >= 1e9 else f"{_number(time_ns / 1e6)} ms"


def _bin_length(bins: TimeBins) -> str:
    return _seconds(float(bins.edges_ns[1]))


def _exactly(time_ns: int) -> str:
    """``500 ms`` for 500ms."""
    text = format_ns(time_ns)
    number = text.rstrip("smun")
    return f"{int(number):,} {text[len(number) :]}"


def _caption(settings: Mapping[str, Any]) -> str:
    parts = [
        f"{name}: {settings[name]}"
        for name in ("model", "gpu", "device", "trace")
        if isinstance(settings.get(name), str)
    ]
    return "   ".join(parts)


def _recorded_limits(summary: Mapping[str, Any]) -> Limits:
    text = summary.get("goodput", {}).get("slo", {}).get("limits")
    return parse_limits(text) if text else NO_LIMITS
