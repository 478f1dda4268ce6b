"""Predicted beside measured: tables of kernels, runs of servers, logs of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from catalog import load_gpu
from simulator.cost.calibration import Calibration
from simulator.cost.factors import Factors, factors_for, factors_from, fitted
from simulator.cost.physical import PhysicalCost
from simulator.measured import fit as fits
from simulator.measured import kernel_tables as tables
from simulator.measured.calibrate import calibrate
from simulator.measured.fit import Quality, quality
from simulator.measured.fit_serving import simulated_metrics
from simulator.measured.kernel_tables import TableError
from simulator.measured.logs import RequestLog, load_log, makespan_of, statistics, times_of
from simulator.measured.served import Metrics, ServedRun, closed_loops, experiments, simulate_run
from simulator.settings import Options, resolve

STAGE_S = 120.0
"""Of each stage of an experiment, which goes on for 600 or 1,200 s at one rate."""

MapJobs = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]


class Compared(NamedTuple):
    """A run's metrics, predicted and measured, s."""

    name: str
    group: str
    predicted: Metrics
    measured: Mapping[str, float]
    notes: tuple[str, ...] = ()

    def error(self, metric: str) -> float:
        """predicted / measured - 1."""
        return self.predicted[metric] / self.measured[metric] - 1


class KernelRow(NamedTuple):
    """Errors of one table of kernels."""

    gpu: str
    what: str
    held_out: str
    quality: Quality


# --- kernels ---


def kernel_rows(folder: Path) -> list[KernelRow]:
    """The fitted factors on what they were not fitted on, and fits that leave a model out."""
    rows = []
    for name, short in (("h100-sxm", "h100"), ("h200", "h200")):
        gpu, factors = load_gpu(name), _kernel_factors(name)
        for what, dtype, width in (("GEMM, bf16", "bfloat16", 2), ("GEMM, fp8", "fp8", 1)):
            table = tables.gemm_table(folder, short, dtype)
            table = table.where(fits.held_out_shapes(table))
            gemm = factors.gemm if width == 2 else factors.gemm_8bit
            flops = gpu.flops["bf16" if width == 2 else "fp8"]
            predicted = fits.gemm_seconds(gemm, table, gpu, flops, width)
            rows.append(KernelRow(name, what, "weight shapes", quality(predicted, table.seconds)))
        decodes, prefills = tables.decode_table(folder, short), tables.prefill_table(folder, short)
        rows += _attention_rows(name, factors, decodes, prefills, "head counts")
    factors = _kernel_factors("a100-80gb")
    rows += _attention_rows(
        "a100-80gb",
        factors,
        tables.grid_table(folder, prefill=False),
        tables.grid_table(folder, prefill=True),
        "lengths",
    )
    for name, device in (("a100-80gb", "a100"), ("h100-sxm", "h100")):
        rows += _layer_rows(folder, name, device)
    return rows


def _kernel_factors(name: str) -> Factors:
    """As they were fitted, to kernels that ran alone."""
    document = fitted()
    alone = {**document["serving"], "fixed_share": 1.0}
    return factors_from(document["gpus"][name], alone, "measured kernels", "")


def _attention_rows(
    name: str,
    factors: Factors,
    decodes: tables.AttentionTable,
    prefills: tables.AttentionTable,
    held_out: str,
) -> list[KernelRow]:
    gpu = load_gpu(name)
    decodes = decodes.where(fits.held_out_heads(decodes))
    prefills = prefills.where(fits.held_out_heads(prefills))
    return [
        KernelRow(
            name,
            "decode attention",
            held_out,
            quality(fits.decode_seconds(factors.decode, decodes, gpu), decodes.seconds),
        ),
        KernelRow(
            name,
            "prefill attention",
            held_out,
            quality(fits.prefill_seconds(factors.prefill, prefills, gpu), prefills.seconds),
        ),
    ]


def _layer_rows(folder: Path, name: str, device: str) -> list[KernelRow]:
    """Sum of a layer's products of one model, from a fit to the others."""
    gpu, table = load_gpu(name), tables.layer_table(folder, device)
    rows = []
    for model in sorted(set(table.models.tolist())):
        held = table.models == model
        factors = fits.fit_layers(table.where(~held), gpu)
        rest = table.where(held)
        rows.append(
            KernelRow(
                name,
                "products of a layer, fp16",
                model.rsplit("/", 1)[-1],
                quality(fits.layer_seconds(factors, rest, gpu), rest.seconds),
            )
        )
    return rows


# --- servers ---


def factors_without(run: ServedRun) -> Factors:
    """Fitted factors as if ``run`` had not been measured (those of all, where it had no part)."""
    document = fitted()
    gpu = load_gpu(run.options.gpu or "")
    if gpu.name not in document["gpus"]:
        return factors_for(gpu)
    serving = {**document["serving"], **document["without"].get(run.name, {})}
    return factors_from(document["gpus"][gpu.name], serving, "measured kernels", "")


def compare_runs(runs: Sequence[ServedRun], map_jobs: MapJobs) -> list[Compared]:
    """Each predicted with factors that were fitted without it."""
    found = map_jobs(simulated_metrics, [(run, factors_without(run)) for run in runs])
    return [
        Compared(run.name, run.group, predicted, run.measured, run.notes)
        for run, predicted in zip(runs, found, strict=True)
    ]


def compare_log(log: RequestLog, calibration: Calibration | None = None) -> Compared:
    """A log as it was asked for, with its options' step times, or those of a calibration."""
    setup = resolve(log.run.options)
    basis, factors = str(setup.settings["cost_model"].value), None
    if isinstance(setup.cost, PhysicalCost):
        factors = setup.cost.factors
        if calibration is not None:
            factors = calibration.apply(factors)
        basis = factors.basis
    found = times_of(simulate_run(log.run, factors).requests)
    both = [name for name in log.ids if name in found]
    notes = list(log.run.notes)
    measured: Metrics = dict(log.run.measured)
    if not both:
        raise TableError(
            f"{log.run.name}: the server as described would refuse every request of the log, or never end "
            "it: check --max-model-len and the KV memory"
        )
    predicted = statistics(found[name] for name in both)
    if len(both) < len(log.ids):
        measured = statistics(log.times[name] for name in both)
        notes.append(
            f"{len(log.ids) - len(both)} requests of the log would be refused by the server as described: "
            "only the others are compared"
        )
    else:
        predicted["makespan"] = makespan_of(log, found)
    return Compared(log.run.name, basis, predicted, measured, tuple(notes))


def server_text(log: RequestLog) -> str:
    """What is simulated, with where each figure comes from: log or flag, or assumed."""
    setup = resolve(log.run.options)
    settings = setup.settings

    def shown(name: str) -> str:
        setting = settings[name]
        mark = "" if setting.source == "given" else f" [{setting.source}]"
        return f"{name} {setting.value}{mark}"

    names = (
        *("tensor_parallel_size", "weight_dtype", "kv_cache_dtype", "max_num_seqs"),
        *("max_num_batched_tokens", "max_model_len", "enable_prefix_caching", "async_scheduling"),
    )
    return (
        f"{setup.shape.name} on {setup.gpu.name}, {setup.num_blocks:,} blocks"
        f"{'' if log.run.options.num_gpu_blocks else ' [' + settings['kv_bytes'].source + ']'}; "
        + ", ".join(shown(name) for name in names)
    )


class SeriesErrors(NamedTuple):
    """A series' measured and predicted mean, and the mean distance between them at a second."""

    name: str
    distance: float
    mean: float
    predicted: float


def series_errors(log: RequestLog, factors: Factors | None = None) -> list[SeriesErrors]:
    """Running and waiting requests and KV use at each second, simulated against measured."""
    if not log.series:
        return []
    simulated = simulate_run(log.run, factors)
    steps = simulated.steps
    seconds = np.array([float(row["t"]) for row in log.series])
    place = np.searchsorted(steps["start_ns"], seconds * 1e9, side="right") - 1
    inside = (place >= 0) & (seconds * 1e9 <= float(steps["start_ns"][-1]))
    blocks = simulated.setup.num_blocks
    found = []
    for name, column, scale in (
        ("running", "running", 1.0),
        ("waiting", "waiting", 1.0),
        ("kv_cache_pct", "blocks_used", 100.0 / blocks),
    ):
        measured = np.array([float(row[name]) for row in log.series])
        if not measured.any():
            continue  # not recorded
        values = np.where(inside, steps[column][np.maximum(place, 0)] * scale, 0.0)
        found.append(
            SeriesErrors(
                name,
                float(np.mean(np.abs(values - measured))),
                float(measured.mean()),
                float(values.mean()),
            )
        )
    return found


class Everything(NamedTuple):
    kernels: list[KernelRow]
    experiments: list[Compared]
    loops: list[Compared]
    logs: list[RequestLog]
    log_rows: list[Compared]
    """Of each log: fitted factors on all of it."""
    halves: list[tuple[Compared, Compared, Calibration]]
    """Of each log: its odd half before and after calibration on the even one."""
    series: list[list[SeriesErrors]]


def validate_all(folder: Path, map_jobs: MapJobs) -> Everything:
    """All tables of docs/validation.md."""
    runs = experiments(folder, stage_s=STAGE_S)
    loops = closed_loops(folder)
    logs = [
        load_log(path.parent, Options())
        for path in sorted((folder / "vllm_runs").glob("*/*/requests.jsonl"))
    ]
    compared = compare_runs([*runs, *loops], map_jobs)
    halves, series = [], []
    for log, result in zip(logs, map_jobs(calibrate, logs), strict=True):
        halves.append(
            (
                Compared(log.run.name, "before", result.before, result.measured),
                Compared(log.run.name, "after", result.after, result.measured),
                result.calibration,
            )
        )
        factors = factors_for(load_gpu(log.run.options.gpu or ""))
        calibrated = result.calibration.apply(factors)
        series.append(series_errors(log, calibrated))
    return Everything(
        kernels=kernel_rows(folder),
        experiments=compared[: len(runs)],
        loops=compared[len(runs) :],
        logs=logs,
        log_rows=[compare_log(log) for log in logs],
        halves=halves,
        series=series,
    )


def median_error(rows: Iterable[Compared], metric: str) -> float:
    """Median of |predicted / measured - 1|."""
    return float(np.median([abs(row.error(metric)) for row in rows if metric in row.measured]))
