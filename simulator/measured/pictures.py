"""Pictures of predicted against measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from catalog import load_gpu
from simulator.cost.factors import factors_for
from simulator.measured.logs import RequestLog, times_of
from simulator.measured.served import simulate_run
from simulator.measured.validate import Compared, Everything

_COLOURS = ("#1b6ca8", "#c8553d", "#5b8c5a", "#8d6cab")
_DPI = 120


def write_all_pictures(found: Everything, folder: Path) -> None:
    """``experiments.png``, ``closed-loops.png`` and one for each log."""
    folder.mkdir(parents=True, exist_ok=True)
    _scatter(
        found.experiments,
        ("E2E mean", "TTFT mean", "ITL mean"),
        "18 experiments on H100, each left out of the fit",
        folder / "experiments.png",
    )
    loops = [row for row in found.loops if row.group == "closed loops"]
    _scatter(
        loops,
        ("TTFT mean", "TPOT mean"),
        "Closed loops of Qwen3-32B on H100",
        folder / "closed-loops.png",
    )
    _by_load(loops, folder / "closed-loops-by-load.png")
    for log, (_, _, calibration) in zip(found.logs, found.halves, strict=True):
        factors = factors_for(load_gpu(calibration.gpu))
        applied = calibration.apply(factors)
        _log(log, applied, "after calibration", folder / f"{_file_name(log.run.name)}.png")


def write_log_pictures(logs: Sequence[RequestLog], rows: Sequence[Compared], folder: Path) -> None:
    """One for each log."""
    folder.mkdir(parents=True, exist_ok=True)
    for log, row in zip(logs, rows, strict=True):
        _log(log, None, row.group, folder / f"{_file_name(log.run.name)}.png")


def _subplots(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, **options)


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name).strip("-").lower()


def _scatter(rows: Sequence[Compared], metrics: Sequence[str], title: str, path: Path) -> None:
    figure, panels = _subplots(
        1, len(metrics), figsize=(4.4 * len(metrics), 4.4), layout="constrained"
    )
    for axes, metric, colour in zip(np.atleast_1d(panels), metrics, _COLOURS, strict=False):
        measured = np.array([row.measured[metric] for row in rows])
        predicted = np.array([row.predicted[metric] for row in rows])
        _diagonal(axes, measured, predicted)
        axes.scatter(measured, predicted, s=18, color=colour, alpha=0.75, zorder=3)
        errors = np.abs(predicted / measured - 1)
        axes.set_title(f"{metric}: median error {np.median(errors):.1%}", fontsize=10)
    figure.suptitle(title)
    _save(figure, path)


def _diagonal(axes: Any, measured: Any, predicted: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low = 0.85 * min(measured.min(), predicted.min())
    high = 1.18 * max(measured.max(), predicted.max())
    line = np.array([low, high])
    axes.plot(line, line, color="#555555", linewidth=1, label="equal")
    axes.fill_between(line, line * 0.9, line * 1.1, color="#bbbbbb", alpha=0.4, label="10 % off")
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("measured (s)")
    axes.set_ylabel("predicted (s)")
    axes.legend(loc="upper left", fontsize=8, frameon=False)


def _by_load(rows: Sequence[Compared], path: Path) -> None:
    figure, panels = _subplots(1, 2, figsize=(10, 4), layout="constrained", sharex=True)
    users = np.array([int(row.name.rsplit(" c", 1)[1]) for row in rows])
    for axes, metric, colour in zip(panels, ("TTFT mean", "TPOT mean"), _COLOURS, strict=False):
        errors = 100 * np.array([row.error(metric) for row in rows])
        axes.axhline(0, color="#555555", linewidth=1)
        axes.axhspan(-10, 10, color="#bbbbbb", alpha=0.4)
        axes.scatter(users, errors, s=18, color=colour, alpha=0.75)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(set(users.tolist())), [str(n) for n in sorted(set(users.tolist()))])
        axes.minorticks_off()
        axes.set_title(metric, fontsize=10)
        axes.set_xlabel("users at once")
        axes.set_ylabel("predicted / measured - 1 (%)")
    figure.suptitle("Closed loops of Qwen3-32B on H100: error by load")
    _save(figure, path)


def _log(log: RequestLog, factors: Any, basis: str, path: Path) -> None:
    """Each request's TTFT and E2E by arrival, and running and waiting over time."""
    simulated = simulate_run(log.run, factors)
    found = times_of(simulated.requests)
    ids = [name for name in log.ids if name in found]
    figure, panels = _subplots(2, 2, figsize=(11, 7), layout="constrained")
    order = np.arange(len(ids))
    for axes, metric in zip(panels[0], ("ttft", "e2e"), strict=True):
        for label, source, colour in (
            ("measured", log.times, _COLOURS[0]),
            ("predicted", found, _COLOURS[1]),
        ):
            values = [getattr(source[name], metric) for name in ids]
            axes.plot(order, values, ".", markersize=3, color=colour, label=label)
        axes.set_xlabel("request, in order of arrival")
        axes.set_ylabel(f"{metric.upper()} (s)")
        axes.legend(fontsize=8, frameon=False)
    steps = simulated.steps
    blocks = simulated.setup.num_blocks
    for axes, names in zip(panels[1], (("running", "waiting"), ("kv_cache_pct",)), strict=True):
        for name, colour in zip(names, _COLOURS, strict=False):
            values = 100 * steps["blocks_used"] / blocks if name == "kv_cache_pct" else steps[name]
            axes.plot(
                steps["start_ns"] / 1e9,
                values,
                color=colour,
                linewidth=1,
                label=f"{name}, predicted",
            )
            if log.series and any(float(row[name]) for row in log.series):
                axes.plot(
                    [float(row["t"]) for row in log.series],
                    [float(row[name]) for row in log.series],
                    color=colour,
                    linestyle=":",
                    linewidth=1.6,
                    label=f"{name}, measured",
                )
        axes.set_xlabel("time since the first arrival (s)")
        axes.set_ylabel("KV blocks in use (%)" if "kv_cache_pct" in names else "requests")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(f"{log.run.name}, step times: {basis}")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=_DPI)
    plt.close(figure)
