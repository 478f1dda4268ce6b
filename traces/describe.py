"""A trace as a planner wants to see it: how much, how fast, how bursty, how long, how shared."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from traces.formats import by_name
from traces.prefix import PrefixHits, ideal_prefix_hits
from traces.reuse import ReuseCurve, reuse_curve
from traces.trace import Trace

_NS = 1_000_000_000
_PEAK_WINDOWS_S = (1, 10, 60)
_CHART_COLUMNS = 60
_CHART_ROWS = 5
_REUSE_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Peak:
    """Most arrivals in a window of ``window_s`` seconds."""

    window_s: int
    requests: int
    """Wherever the window starts."""
    aligned_requests: int
    """With windows laid end to end from the first arrival."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Speed and burstiness of the arrivals; ``None`` where two arrivals are too few to tell."""

    first_s: float
    span_s: float
    """From the first arrival to the last."""
    rate_per_s: float | None
    """Gaps per second: (requests - 1) / span = 1 / mean gap."""
    gap_mean_s: float | None
    gap_max_s: float | None
    gap_cv: float | None
    """Standard deviation of the gaps / their mean; 1 for a Poisson process."""
    count_dispersion_1s: float | None
    """Variance / mean of the arrivals per second; 1 for a Poisson process."""
    shared_timestamps: int
    """Arrivals that have the time of an earlier one."""
    peaks: tuple[Peak, ...]
    """For the windows that fit into the span."""
    windows_s: float | None
    window_requests: tuple[int, ...]
    """Arrivals in windows of ``windows_s`` laid over the span."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of a token count; percentiles are linearly interpolated."""

    min: float
    p5: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    mean: float
    total: int


@dataclass(frozen=True, slots=True)
class Sessions:
    """Requests that say which conversation they belong to."""

    count: int
    requests: int
    requests_p50: float
    requests_max: int


class ReusePoint(NamedTuple):
    """Token hit rates of a pool of some size."""

    blocks: int
    lru: float
    ceiling: float
    """Under the best eviction that knows the future."""


@dataclass(frozen=True, slots=True)
class Description:
    """What `describe` found."""

    trace: Trace
    arrivals: Arrivals
    prompt_tokens: Lengths
    output_tokens: Lengths
    prefix: PrefixHits | None
    """``None``: the trace tells nothing about equal prefixes, which is not a hit rate of zero."""
    sessions: Sessions | None
    reuse: ReuseCurve | None
    """Hits against the size of the pool; ``None`` where ``prefix`` is."""
    reuse_points: tuple[ReusePoint, ...]

    @property
    def not_told(self) -> list[str]:
        """What this trace cannot tell, so that nothing of it is taken for zero."""
        requests = [arrival.request for arrival in self.trace.arrivals]
        unknown = sum(request.content is None for request in requests)
        found = []
        if unknown:
            of = (
                ""
                if unknown == len(requests)
                else f" (for {unknown:,} of {len(requests):,} requests)"
            )
            found.append(f"which prompts share a prefix{of}")
        else:
            found.append(
                "what the outputs say: their blocks hit only where a later prompt has them"
            )
        alone = sum(request.session_id is None for request in requests)
        if alone:
            of = "" if alone == len(requests) else f" (for {alone:,} of {len(requests):,} requests)"
            found.append(f"which requests are turns of one conversation{of}")
        if all(request.max_tokens is None for request in requests):
            found.append("how many tokens clients allowed (max_tokens)")
        return found

    def to_json(self) -> dict[str, Any]:
        """For ``--json``: seconds and tokens; unknown values are null."""
        trace, arrivals, prefix = self.trace, self.arrivals, self.prefix
        return {
            "path": str(trace.path),
            "format": trace.format,
            "sha256": trace.sha256,
            "rows": {
                "total": trace.num_rows,
                "used": len(trace.arrivals),
                "skipped": trace.num_skipped,
            },
            "skipped": [
                {"reason": s.reason, "count": s.count, "lines": s.lines, "example": s.example}
                for s in trace.skipped
            ],
            "notes": trace.notes,
            "arrivals": {
                "first_s": arrivals.first_s,
                "span_s": arrivals.span_s,
                "rate_per_s": arrivals.rate_per_s,
                "gap_mean_s": arrivals.gap_mean_s,
                "gap_max_s": arrivals.gap_max_s,
                "gap_cv": arrivals.gap_cv,
                "count_dispersion_1s": arrivals.count_dispersion_1s,
                "shared_timestamps": arrivals.shared_timestamps,
                "peaks": [
                    {
                        "window_s": peak.window_s,
                        "requests": peak.requests,
                        "aligned_requests": peak.aligned_requests,
                        "rate_per_s": peak.requests / peak.window_s,
                    }
                    for peak in arrivals.peaks
                ],
                "window_s": arrivals.windows_s,
                "window_requests": list(arrivals.window_requests),
            },
            "prompt_tokens": _lengths_json(self.prompt_tokens),
            "output_tokens": _lengths_json(self.output_tokens),
            "prefix": None
            if prefix is None
            else {
                "token_hit_rate": prefix.token_hit_rate,
                "block_hit_rate": prefix.block_hit_rate,
                "block_size": prefix.block_size,
                "counts_partial_blocks": prefix.counts_partial_blocks,
                "requests": prefix.requests,
                "requests_with_hits": prefix.requests_with_hits,
                "prompt_tokens": prefix.prompt_tokens,
                "hit_tokens": prefix.hit_tokens,
                "blocks": prefix.blocks,
                "hit_blocks": prefix.hit_blocks,
                "unique_blocks": prefix.unique_blocks,
            },
            "reuse": None
            if self.reuse is None
            else {
                "block_size": self.reuse.block_size,
                "ideal": self.reuse.ideal,
                "ideal_from_blocks": self.reuse.largest,
                "points": [point._asdict() for point in self.reuse_points],
            },
            "not_told": self.not_told,
            "sessions": None
            if self.sessions is None
            else {
                "count": self.sessions.count,
                "requests": self.sessions.requests,
                "requests_p50": self.sessions.requests_p50,
                "requests_max": self.sessions.requests_max,
            },
        }

    def to_text(self) -> str:
        """For people, in lines of at most about 100 columns."""
        trace = self.trace
        lines = [
            f"Trace      {trace.path}",
            f"Format     {trace.format}: {by_name(trace.format).recognised_by}",
            f"Rows       {trace.num_rows:,}: {len(trace.arrivals):,} used, "
            f"{trace.num_skipped:,} skipped",
        ]
        for skipped in trace.skipped:
            detail = f" ({skipped.example})" if skipped.example else ""
            lines += _wrapped(
                "           ",
                f"- {skipped.count:,} skipped: {skipped.reason}{detail}; {skipped.where}",
            )
        lines += self._arrival_lines()
        lines += ["", f"{'Tokens':<10}" + "".join(f"{name:>9}" for name in _LENGTH_COLUMNS)]
        for name, lengths in (("prompt", self.prompt_tokens), ("output", self.output_tokens)):
            cells = (getattr(lengths, column) for column in _LENGTH_COLUMNS)
            lines.append(f"  {name:<8}" + "".join(f"{cell:>9,.0f}" for cell in cells))
        total = self.prompt_tokens.total + self.output_tokens.total
        lines.append(
            f"  in all {self.prompt_tokens.total:,} prompt + {self.output_tokens.total:,} output "
            f"= {total:,} tokens"
        )
        lines += ["", *_wrapped("Prefix     ", self._prefix_text())]
        lines += self._reuse_lines()
        if self.sessions is not None:
            lines += _wrapped(
                "Sessions   ",
                f"{self.sessions.count:,} with {self.sessions.requests:,} requests, "
                f"{self.sessions.requests_p50:g} at the median, at most "
                f"{self.sessions.requests_max:,}",
            )
        lines += _wrapped("Not told   ", "; ".join(self.not_told))
        for index, note in enumerate(trace.notes):
            lines += _wrapped("           " if index else "Notes      ", f"- {note}")
        return "\n".join(lines)

    def _arrival_lines(self) -> list[str]:
        arrivals = self.arrivals
        clock = f" ({_clock(arrivals.span_s)})" if arrivals.span_s >= 60 else ""
        lines = [f"Span       {arrivals.span_s:,.3f} s{clock}"]
        if arrivals.first_s > 0:
            lines[0] += f", the first arrival at {arrivals.first_s:,.3f} s"
        if arrivals.rate_per_s is None:
            return [*lines, "Rate       unknown: all requests arrive at one time"]
        lines.append(f"Rate       {arrivals.rate_per_s:.3f} requests/s on average")
        for peak in arrivals.peaks:
            lines += _wrapped(
                "           ",
                f"{peak.requests / peak.window_s:.3f} in the busiest {peak.window_s} s "
                f"({_requests(peak.requests)}; {peak.aligned_requests:,} at most in windows laid "
                "end to end)",
            )
        assert arrivals.gap_mean_s is not None
        assert arrivals.gap_max_s is not None
        dispersion = arrivals.count_dispersion_1s
        lines += _wrapped(
            "Burstiness ",
            f"CV of the gaps {arrivals.gap_cv:.2f}, variance/mean of arrivals per second "
            f"{'unknown' if dispersion is None else f'{dispersion:.2f}'} (both 1 if Poisson); "
            f"gaps {arrivals.gap_mean_s:.4g} s on average, {arrivals.gap_max_s:.4g} s at most; "
            f"{arrivals.shared_timestamps:,} arrivals at the time of another",
        )
        assert arrivals.windows_s is not None
        return [*lines, "", *_chart(arrivals.window_requests, arrivals.windows_s)]

    def _reuse_lines(self) -> list[str]:
        reuse, points = self.reuse, self.reuse_points[-_REUSE_COLUMNS:]
        if reuse is None:
            return []
        if not reuse.largest:
            return ["           no block comes twice: no pool, however large, would hit"]
        rows = {
            "blocks": [f"{point.blocks:,}" for point in points],
            "tokens": [_short(point.blocks * reuse.block_size) for point in points],
            "LRU": [f"{point.lru:.1%}" for point in points],
            "best": [f"{point.ceiling:.1%}" for point in points],
        }
        return [
            "           token hit rate by pool size, with LRU eviction and with the best there is:",
            *(
                f"  {name:<8}" + "".join(f"{cell:>9}" for cell in cells)
                for name, cells in rows.items()
            ),
        ]

    def _prefix_text(self) -> str:
        prefix = self.prefix
        if prefix is None:
            return (
                "ideal hit rate unknown: the trace does not say which tokens prompts share "
                "(no hits are modelled; that is not a measured 0 %)"
            )
        block_rate = prefix.block_hit_rate
        kind = "a partial last block counted" if prefix.counts_partial_blocks else "full blocks"
        text = (
            f"ideal hit rate {prefix.token_hit_rate:.1%} of tokens, "
            f"{'unknown' if block_rate is None else f'{block_rate:.2%}'} of blocks "
            f"({prefix.block_size} tokens a block, {kind}; infinite cache, outputs not cached); "
            f"{prefix.requests_with_hits:,} of {prefix.requests:,} requests hit, "
            f"{prefix.unique_blocks:,} of {prefix.blocks:,} blocks are unique"
        )
        unknown = len(self.trace.arrivals) - prefix.requests
        return text + (f"; {unknown:,} requests of unknown content left out" if unknown else "")


_LENGTH_COLUMNS = ("min", "p5", "p50", "p90", "p95", "p99", "max", "mean")


def describe(trace: Trace, block_size: int | None = None) -> Description:
    """Statistics of a trace; prefix hits at ``block_size`` (see `ideal_prefix_hits`)."""
    reuse = reuse_curve(trace.arrivals, block_size)
    requests = [arrival.request for arrival in trace.arrivals]
    return Description(
        trace=trace,
        arrivals=describe_arrivals(np.array([r.arrival_ns for r in requests], dtype=np.int64)),
        prompt_tokens=_lengths([r.num_prompt_tokens for r in requests]),
        output_tokens=_lengths([a.output_tokens for a in trace.arrivals]),
        prefix=ideal_prefix_hits(trace.arrivals, block_size),
        sessions=_sessions([r.session_id for r in requests if r.session_id is not None]),
        reuse=reuse,
        reuse_points=()
        if reuse is None
        else tuple(ReusePoint(n, reuse.lru(n), reuse.ceiling(n)) for n in reuse.sizes()),
    )


def describe_arrivals(times_ns: npt.NDArray[np.int64]) -> Arrivals:
    """Statistics of sorted times (ns, shape ``[requests]``, at least one)."""
    since_ns = times_ns - times_ns[0]
    span_ns = int(since_ns[-1])
    gaps_ns = np.diff(since_ns)
    per_second = np.unique(since_ns // _NS, return_counts=True)[1]
    seconds = span_ns // _NS + 1  # the last one is cut short by the end of the trace
    mean = len(since_ns) / seconds
    variance = float((per_second.astype(np.float64) ** 2).sum()) / seconds - mean * mean
    columns = min(_CHART_COLUMNS, len(since_ns))
    window_ns = span_ns // columns + 1
    has_span = span_ns > 0
    return Arrivals(
        first_s=int(times_ns[0]) / _NS,
        span_s=span_ns / _NS,
        rate_per_s=len(gaps_ns) * _NS / span_ns if has_span else None,
        gap_mean_s=float(gaps_ns.mean()) / _NS if has_span else None,
        gap_max_s=int(gaps_ns.max()) / _NS if has_span else None,
        gap_cv=float(gaps_ns.std() / gaps_ns.mean()) if has_span else None,
        count_dispersion_1s=variance / mean if seconds > 1 else None,
        shared_timestamps=int((gaps_ns == 0).sum()),
        peaks=tuple(
            _peak(since_ns, window) for window in _PEAK_WINDOWS_S if span_ns >= window * _NS
        ),
        windows_s=window_ns / _NS if has_span else None,
        window_requests=tuple(np.bincount(since_ns // window_ns, minlength=columns).tolist())
        if has_span
        else (),
    )


def _peak(since_ns: npt.NDArray[np.int64], window_s: int) -> Peak:
    window_ns = window_s * _NS
    # A busiest half-open window can always be moved to start at an arrival.
    after = np.searchsorted(since_ns, since_ns + window_ns, side="left")
    return Peak(
        window_s,
        int((after - np.arange(len(since_ns))).max()),
        int(np.unique(since_ns // window_ns, return_counts=True)[1].max()),
    )


def _lengths(counts: list[int]) -> Lengths:
    p5, p50, p90, p95, p99 = np.percentile(counts, (5, 50, 90, 95, 99)).tolist()
    total = sum(counts)
    return Lengths(min(counts), p5, p50, p90, p95, p99, max(counts), total / len(counts), total)


def _lengths_json(lengths: Lengths) -> dict[str, float]:
    return {name: getattr(lengths, name) for name in (*_LENGTH_COLUMNS, "total")}


def _sessions(session_ids: list[str]) -> Sessions | None:
    if not session_ids:
        return None
    counts = np.unique(session_ids, return_counts=True)[1]
    return Sessions(len(counts), len(session_ids), float(np.median(counts)), int(counts.max()))


def _short(tokens: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if tokens >= size:
            return f"{tokens / size:.3g} {unit}"
    return str(tokens)


def _requests(count: int) -> str:
    return f"{count:,} request" + ("" if count == 1 else "s")


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hour:02}:{minute:02}:{second:02}"


def _wrapped(label: str, text: str) -> list[str]:
    indent = " " * len(label) + ("  " if text.startswith("- ") else "")
    return textwrap.wrap(
        text, 98, initial_indent=label, subsequent_indent=indent, break_long_words=False
    )


def _chart(counts: Sequence[int], window_s: float) -> list[str]:
    """Bars of the rate over the span: a column a window, full height for the busiest."""
    top = max(counts)
    heights = [math.ceil(_CHART_ROWS * count / top) for count in counts]
    axis = f"{top / window_s:.3g}"
    lines = [f"Requests/s in windows of {window_s:.4g} s"]
    for row in range(_CHART_ROWS, 0, -1):
        edge = axis if row == _CHART_ROWS else ""
        bars = "".join("#" if height >= row else " " for height in heights)
        lines.append(f"{edge:>9} |{bars}".rstrip())
    lines.append(f"{'0':>9} +{'-' * len(counts)}")
    return lines
