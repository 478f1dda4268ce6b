"""Fit what an engine adds to its kernels, by simulating measured runs.

A few factors, found by Gauss-Newton steps on the logarithm of predicted / measured with a weak pull
towards where they started (a load that does not tell a factor leaves it alone). Leaving a run out is one
more step from the fit of all, without that run's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from simulator.cost.factors import Factors
from simulator.measured.kernel_tables import FloatArray
from simulator.measured.served import ServedRun, simulate_run

Values = dict[str, float]
Job = tuple[ServedRun, Factors]
Predict = Callable[[Values], FloatArray]
"""Values of the factors to log(predicted / measured), ``[runs, metrics]``."""


class Factor(NamedTuple):
    """One to be fitted."""

    name: str
    start: float
    scale: float
    """How far it may well be from its start."""
    least: float
    most: float


class FitResult(NamedTuple):
    values: Values
    without: list[Values]
    """Of each run: as if it had not been there."""
    residuals: FloatArray
    """log(predicted / measured) at ``values``, ``[runs, metrics]``."""


SERVING = (
    Factor("step_s", 6e-4, 3e-4, 0.0, 5e-3),
    Factor("sequence_s", 1e-5, 1e-5, 0.0, 1e-4),
    Factor("fixed_share", 0.5, 0.3, 0.0, 1.0),
    Factor("piece_s", 2e-5, 1e-5, 0.0, 1e-4),
    Factor("frontend_s", 6e-3, 2e-3, 0.0, 5e-2),
    Factor("experts_bandwidth", 0.8, 0.15, 0.1, 1.0),
)
HOST = (
    Factor("host_step_s", 1.5e-3, 5e-4, 0.0, 2e-2),
    Factor("host_sequence_s", 1.5e-5, 1e-5, 0.0, 2e-4),
)
_PRIOR = 0.1
"""Weight of the pull to the start, against a run's error of 100 %."""
_DIFFERENCE = 0.3
"""Of a factor's scale, for the slopes."""


def fit(predict: Predict, factors: Sequence[Factor], num_steps: int = 2) -> FitResult:
    """Least errors over all runs; outliers count less the further they are out."""
    values = {factor.name: factor.start for factor in factors}
    for _ in range(num_steps):
        residuals, slopes = _linearised(predict, values, factors)
        values = _step(values, residuals, slopes, factors)
    residuals, slopes = _linearised(predict, values, factors)
    without = [
        _step(
            values,
            np.delete(residuals, run, axis=0),
            np.delete(slopes, run, axis=1),
            factors,
        )
        for run in range(len(residuals))
    ]
    return FitResult(values, without, residuals)


def fit_one(predict: Predict, factors: Sequence[Factor], num_steps: int = 5) -> Values:
    """As ``fit``, of one run: its metrics are the rows, and the best of the steps is taken."""
    values = {factor.name: factor.start for factor in factors}
    best, least = values, np.inf
    for _ in range(num_steps):
        residuals, slopes = _linearised(predict, values, factors)
        error = float(np.mean(np.abs(residuals)))
        if error < least:
            best, least = values, error
        values = _step(values, residuals, slopes, factors)
    return values if float(np.mean(np.abs(predict(values)))) < least else best


def _linearised(
    predict: Predict, values: Values, factors: Sequence[Factor]
) -> tuple[FloatArray, FloatArray]:
    """Residuals, and their slopes ``[factors, runs, metrics]`` for a change of a factor's scale."""
    residuals = predict(values)
    slopes = [
        (
            predict(values | {factor.name: values[factor.name] + _DIFFERENCE * factor.scale})
            - residuals
        )
        / _DIFFERENCE
        for factor in factors
    ]
    return residuals, np.array(slopes)


def _step(
    values: Values, residuals: FloatArray, slopes: FloatArray, factors: Sequence[Factor]
) -> Values:
    errors = residuals.reshape(-1)
    weight = 1 / np.sqrt(np.maximum(0.05, np.abs(errors)))
    offsets = [(values[factor.name] - factor.start) / factor.scale for factor in factors]
    rows = np.vstack(
        [slopes.reshape(len(factors), -1).T * weight[:, None], _PRIOR * np.eye(len(factors))]
    )
    wanted = np.concatenate([-errors * weight, -_PRIOR * np.array(offsets)])
    moves = np.clip(np.linalg.lstsq(rows, wanted, rcond=None)[0], -1.5, 1.5)
    return {
        factor.name: float(
            np.clip(values[factor.name] + move * factor.scale, factor.least, factor.most)
        )
        for factor, move in zip(factors, moves, strict=True)
    }


def predictor(
    runs: Sequence[ServedRun],
    metrics: Sequence[str],
    factors_of: Callable[[ServedRun, Values], Factors],
    map_runs: Callable[[Callable[[Job], Values], list[Job]], list[Values]],
) -> Predict:
    """By simulation; ``map_runs`` is ``map`` or a pool's."""

    def predict(values: Values) -> FloatArray:
        jobs = [(run, factors_of(run, values)) for run in runs]
        found = map_runs(simulated_metrics, jobs)
        return np.array(
            [
                [np.log(simulated[name] / run.measured[name]) for name in metrics]
                for run, simulated in zip(runs, found, strict=True)
            ]
        )

    return predict


def simulated_metrics(job: Job) -> Values:
    """The metrics of a run with these factors (for a pool of processes)."""
    run, factors = job
    return simulate_run(run, factors).metrics


def rounded(values: Mapping[str, float]) -> Values:
    """To three digits: more would say more than the data."""
    return {name: float(f"{value:.3g}") for name, value in values.items()}
