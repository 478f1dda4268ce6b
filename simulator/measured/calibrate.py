"""Fit a few physical factors to one server, from the times of some of its requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simulator.cost import Factors, factors_for
from simulator.cost.calibration import Calibration
from simulator.measured.fit_serving import Factor, Values, fit_one, rounded
from simulator.measured.kernel_tables import FloatArray, TableError
from simulator.measured.logs import RequestLog, statistics, times_of
from simulator.measured.served import Metrics, simulate_run
from simulator.settings import resolve

LEAST_REQUESTS = 40
"""Of a log: half of them tell the factors, the others how good they are."""


class Calibrated(NamedTuple):
    calibration: Calibration
    measured: Metrics
    """Of the requests that were held out, as the next two."""
    before: Metrics
    after: Metrics
    num_fitted: int
    num_held_out: int


def calibrate(log: RequestLog, *, hold_out: str = "odd") -> Calibrated:
    """Fit on every second request of a log, and look at the others.

    The whole load is simulated each time; only the times of the fitted half are compared.
    ``hold_out``: ``odd`` or ``even`` places in order of arrival.

    Raises ``TableError`` for a log of fewer than ``LEAST_REQUESTS``.
    """
    if len(log.ids) < LEAST_REQUESTS:
        raise TableError(
            f"{log.run.name}: {len(log.ids)} answered requests, expected at least {LEAST_REQUESTS}"
        )
    is_odd = hold_out == "odd"
    fitted_ids = set(log.ids[0 if is_odd else 1 :: 2])
    held_ids = [name for name in log.ids if name not in fitted_ids]
    setup = resolve(log.run.options)
    settings, gpu = setup.settings, setup.gpu
    base = factors_for(gpu)
    serving = base.serving
    factors = (
        Factor("weights", 1.0, 0.1, 0.5, 1.5),
        Factor("compute", 1.0, 0.15, 0.4, 2.0),
        Factor("kv", 1.0, 0.15, 0.4, 1.5),
        Factor("step_s", serving.step_s, 5e-4, 0.0, 2e-2),
        *([Factor("frontend_s", serving.frontend_s, 5e-3, 0.0, 1.0)] if log.run.by_client else []),
    )
    wanted = statistics(log.times[name] for name in fitted_ids)
    names = list(wanted)

    def predict(values: Values) -> FloatArray:
        found = statistics_of(log, scaled(base, values), fitted_ids)
        return np.array([[np.log(found[name] / wanted[name])] for name in names])

    values = rounded(fit_one(predict, factors))
    before = statistics_of(log, base, set(held_ids))
    after = statistics_of(log, scaled(base, values), set(held_ids))
    measured = statistics(log.times[name] for name in held_ids)
    worst = max(abs(after[name] / value - 1) for name, value in measured.items())
    calibration = Calibration(
        **values,
        model=setup.shape.name,
        gpu=gpu.name,
        tp=settings["tensor_parallel_size"].value,
        pp=settings["pipeline_parallel_size"].value,
        weight_dtype=settings["weight_dtype"].value,
        kv_cache_dtype=settings["kv_cache_dtype"].value,
        fitted_on=(
            f"{len(fitted_ids)} requests of {log.run.name}; the other {len(held_ids)}: no statistic further "
            f"off than {worst:.1%}"
        ),
        residuals={name: round(measured[name] / after[name] - 1, 4) for name in sorted(measured)},
    )
    return Calibrated(calibration, measured, before, after, len(fitted_ids), len(held_ids))


def scaled(base: Factors, values: Values) -> Factors:
    """``base`` with fitted values in it."""
    return base.scaled(**values)


def statistics_of(log: RequestLog, factors: Factors, ids: set[str]) -> Metrics:
    """Simulated statistics of some of the log's requests."""
    times = times_of(simulate_run(log.run, factors).requests)
    missing = [name for name in log.ids if name not in times]
    if missing:
        raise TableError(
            f"{log.run.name}: {len(missing)} of its requests (first: {missing[0]}) would be refused by the "
            "server as described, but were answered: check --max-model-len and the KV memory"
        )
    return statistics(times[name] for name in log.ids if name in ids)
