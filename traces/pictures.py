"""A trace as one picture: its rate over time, its lengths, its bursts, and what a cache could save.

Same trace, same bytes (with the same version of matplotlib).
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from traces.describe import Description
from traces.formats.base import TraceError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Okabe and Ito's palette, which the common kinds of colour blindness keep apart.
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_INK, _GREY, _PALE = "#222222", "#666666", "#DDDDDD"
_STYLE: dict[str, Any] = {
    "figure.figsize": (12.0, 8.0),
    "figure.dpi": 130,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.14,
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
_RATE_BINS = 150
_LEAST_CV = 0.01
"""Below it, gaps are even: its square has no place on a log scale."""
_LENGTH_BINS = 60
_CURVE_POINTS = 120
_NS = 1_000_000_000
_MADE = ("Arrival times are made", "Spread", "Shaped")
"""How notes begin without which the picture would pass for that of the file."""


class _Unit(NamedTuple):
    name: str
    s: float


def write_picture(description: Description, path: str | Path) -> Path:
    """Draw a trace into ``path`` (``.png`` or ``.svg``), which is replaced if it exists.

    Raises `TraceError` on another suffix, or where the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    path = Path(path)
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in ("png", "svg"):
        raise TraceError(f"{path}: a picture is .png or .svg")
    trace = description.trace
    times_s = np.array([a.request.arrival_ns for a in trace.arrivals], dtype=np.int64) / _NS
    with mpl.rc_context():
        # Not the user's own settings: the same trace gives the same picture anywhere.
        mpl.rcdefaults()
        parameters: Any = mpl.rcParams
        parameters.update(_STYLE)
        figure = Figure()  # no pyplot: it keeps global state and may look for a screen
        figure.suptitle(
            f"{trace.path.name}: {len(trace.arrivals):,} requests ({trace.format})",
            x=0.012,
            ha="left",
            fontsize=15,
            fontweight="bold",
            color=_INK,
            parse_math=False,
        )
        (rate, lengths), (bursts, reuse) = figure.subplots(2, 2)
        _draw_rate(rate, times_s)
        _draw_lengths(lengths, description)
        _draw_bursts(bursts, times_s, description.arrivals.gap_cv)
        _draw_reuse(reuse, description)
        skipped = (
            f"{trace.num_skipped:,} of {trace.num_rows:,} rows skipped.   "
            if trace.num_skipped
            else ""
        )
        made = "".join(f"{note}   " for note in trace.notes if note.startswith(_MADE))
        figure.supxlabel(
            textwrap.fill(f"{made}{skipped}Not told: {'; '.join(description.not_told)}.", 210),
            x=0.012,
            ha="left",
            fontsize=8,
            color=_GREY,
            parse_math=False,
        )
        try:
            # A date would make every file differ.
            figure.savefig(
                path, format=suffix, metadata={"Date": None} if suffix == "svg" else None
            )
        except OSError as error:
            raise TraceError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path


def _draw_rate(axes: Axes, times_s: FloatArray) -> None:
    axes.set_title("Requests per second over time")
    span_s = float(times_s[-1] - times_s[0])
    if span_s == 0:
        _say(axes, "all requests arrive at one time")
        return
    unit = next(
        u
        for u in (_Unit("h", 3600), _Unit("min", 60), _Unit("s", 1))
        if span_s >= 3 * u.s or u.s == 1
    )
    bins = max(10, min(_RATE_BINS, len(times_s) // 4))
    edges = np.linspace(0, span_s, bins + 1)
    counts, _ = np.histogram(times_s - times_s[0], edges)
    rate = counts / (span_s / bins)
    mean = (len(times_s) - 1) / span_s
    axes.stairs(
        rate,
        edges / unit.s,
        fill=True,
        color=_BLUE,
        alpha=0.75,
        label=f"mean over {_time(span_s / bins)}",
    )
    axes.axhline(mean, color=_INK, linewidth=1, linestyle="--", label=f"mean {_number(mean)}/s")
    axes.set_xlim(0, span_s / unit.s)
    axes.set_ylim(0, 1.18 * float(rate.max()))
    axes.set_xlabel(f"time since the first arrival, {unit.name}")
    axes.set_ylabel("requests/s")
    axes.legend(loc="upper right", ncols=2, borderaxespad=0)


def _draw_lengths(axes: Axes, description: Description) -> None:
    axes.set_title("Tokens per request")
    arrivals = description.trace.arrivals
    counts = {
        "prompt": np.array([a.request.num_prompt_tokens for a in arrivals], dtype=np.int64),
        "output": np.array([a.output_tokens for a in arrivals], dtype=np.int64),
    }
    low = min(int(values.min()) for values in counts.values())
    high = max(int(values.max()) for values in counts.values())
    edges = np.geomspace(max(low * 0.9, 0.7), high * 1.1, _LENGTH_BINS + 1)
    top = 0.0
    for (name, values), color in zip(counts.items(), (_BLUE, _ORANGE), strict=True):
        shares = 100 * np.histogram(values, edges)[0] / len(values)
        top = max(top, float(shares.max()))
        median = float(np.median(values))
        label = f"{name}: median {median:,.0f} (dashed), mean {values.mean():,.0f}"
        axes.stairs(shares, edges, fill=True, color=color, alpha=0.5, label=label)
        axes.axvline(median, ymax=0.8, color=color, linewidth=1.5, linestyle="--")
    axes.set_xscale("log")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1.25 * top)
    _label_log(axes.xaxis)
    axes.set_xlabel("tokens (log scale)")
    axes.set_ylabel(f"share of requests, %\n({_LENGTH_BINS} bins of equal ratio)")
    axes.legend(loc="upper right", borderaxespad=0)


def _draw_bursts(axes: Axes, times_s: FloatArray, cv: float | None) -> None:
    axes.set_title("Burstiness: variance / mean of arrivals in a window")
    if len(times_s) > 1 and times_s[0] == times_s[-1]:
        _say(axes, "all requests arrive at one time")
        return
    windows, dispersion = dispersion_by_window(times_s)
    if len(windows) < 2:
        _say(axes, "too few arrivals to tell")
        return
    axes.plot(
        windows, dispersion, "o-", color=_GREEN, linewidth=2, markersize=4, label="this trace"
    )
    axes.axhline(1, color=_INK, linewidth=1, linestyle="--", label="Poisson: 1 at any window")
    tends_to = 1.0
    if cv is not None and cv >= _LEAST_CV:
        tends_to = cv * cv
        label = f"independent gaps with this CV ({cv:.3g}): tends to CV² = {_number(tends_to)}"
        axes.axhline(tends_to, color=_RED, linewidth=1, linestyle=":", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    drawn = np.array([1.0, tends_to, *dispersion[dispersion > 0].tolist()])
    axes.set_ylim(float(drawn.min()) / 2, float(drawn.max()) * 8)
    _label_log(axes.xaxis)
    _label_log(axes.yaxis)
    axes.set_xlabel("window, s (log scale)")
    axes.set_ylabel("variance / mean (log scale)")
    axes.legend(loc="upper left", borderaxespad=0)


def dispersion_by_window(times_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Variance / mean of the arrivals in windows laid end to end, for a range of window lengths.

    Windows run from a tenth of the mean gap (or the smallest step of a coarse clock shows as a
    burst) to a fiftieth of the span; both arrays have shape ``[windows]`` and are empty where the
    span is too short.
    """
    since = times_s - times_s[0]
    span_s = float(since[-1])
    if len(times_s) < 100 or span_s == 0:
        return np.zeros(0), np.zeros(0)
    windows = np.geomspace(0.1 * span_s / (len(times_s) - 1), span_s / 50, 25)
    found = []
    for window_s in windows:
        full = int(span_s / window_s)
        number = (since / window_s).astype(np.int64)
        per_window = np.unique(number[number < full], return_counts=True)[1].astype(np.float64)
        mean = per_window.sum() / full
        found.append(((per_window**2).sum() / full - mean * mean) / mean)
    return windows, np.array(found)


def _draw_reuse(axes: Axes, description: Description) -> None:
    axes.set_title("Prefix reuse: prompt tokens that hit, by pool size")
    reuse, prefix = description.reuse, description.prefix
    if reuse is None:
        _say(
            axes,
            "unknown: the trace does not tell\nwhich tokens prompts share\n(this is not a hit rate of 0 %)",
        )
        return
    if not reuse.largest:
        _say(axes, "no block comes twice:\nno pool, however large, would hit")
        return
    most = max(2 * reuse.largest, 10)
    sizes = np.unique(np.geomspace(1, most, _CURVE_POINTS).astype(np.int64))
    few = np.unique(np.geomspace(1, most, _CURVE_POINTS // 4).astype(np.int64))
    # Wide and below, so that neither hides the other where they agree.
    axes.plot(
        few,
        [100 * reuse.ceiling(n) for n in few.tolist()],
        color=_ORANGE,
        alpha=0.7,
        linewidth=4,
        label="best eviction (knows the future)",
    )
    axes.plot(
        sizes,
        [100 * reuse.lru(n) for n in sizes.tolist()],
        color=_BLUE,
        linewidth=2,
        label="LRU eviction",
    )
    label = f"ideal (never evicts): {100 * reuse.ideal:.1f} %"
    axes.axhline(100 * reuse.ideal, color=_INK, linewidth=1, linestyle="--", label=label)
    axes.set_xscale("log")
    axes.set_xlim(1, most)
    axes.set_ylim(0, max(1.0, 135 * reuse.ideal))
    _label_log(axes.xaxis)
    axes.set_xlabel(f"pool, blocks of {reuse.block_size} tokens (log scale)")
    known = 0 if prefix is None else prefix.requests
    of = "" if known == len(description.trace.arrivals) else f"\n(of {known:,} requests that tell)"
    axes.set_ylabel(f"hit, % of prompt tokens{of}")
    axes.legend(loc="upper left", borderaxespad=0)


def _label_log(axis: Axis) -> None:
    """Plain numbers on a log scale; also at 2 and 5 where it spans few powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    if high < 50 * low:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def _say(axes: Axes, text: str) -> None:
    """An empty panel that says why it is empty."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=_GREY)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _time(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 120:
        return f"{seconds / 60:.3g} min"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
