"""Fit what an engine adds to its kernels, by simulating measured runs.

A few factors, found by Gauss-Newton steps on the logarithm of predicted / measured with a weak pull
towards where they started (a load that does not tell a factor leaves it alone). Steps go on until they are
small; then leaving a run out is one more, without that run's rows: what it moves is that run's doing.
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
_PRIOR = 0.2
"""Weight of the pull to the start, against a run's error of 100 %."""
_PRIOR_OF_ONE = 0.05
"""The same where the runs are one, and the rows its statistics."""
_SMALL = 0.1
"""A step that moves no factor by more of its scale is the last."""
_MOST_MOVE = 1.5
_DIFFERENCE = 0.3
"""Of a factor's scale, for the slopes."""


def fit(predict: Predict, factors: Sequence[Factor], most_steps: int = 6) -> FitResult:
    """Least errors over all runs; outliers count less the further they are out."""
    values = {factor.name: factor.start for factor in factors}
    for _ in range(most_steps):
        residuals, slopes = _linearised(predict, values, factors)
        moved = _step(values, residuals, slopes, factors)
        if max(abs(moved[f.name] - values[f.name]) / f.scale for f in factors) < _SMALL:
            break
        values = moved
    else:
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
        values = _step(values, residuals, slopes, factors, _PRIOR_OF_ONE)
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
    values: Values,
    residuals: FloatArray,
    slopes: FloatArray,
    factors: Sequence[Factor],
    prior: float = _PRIOR,
) -> Values:
    errors = residuals.reshape(-1)
    weight = 1 / np.sqrt(np.maximum(0.05, np.abs(errors)))
    offsets = [(values[factor.name] - factor.start) / factor.scale for factor in factors]
    rows = np.vstack(
        [slopes.reshape(len(factors), -1).T * weight[:, None], prior * np.eye(len(factors))]
    )
    wanted = np.concatenate([-errors * weight, -prior * np.array(offsets)])
    least, most = (
        np.array(
            [(limit - values[f.name]) / f.scale for f, limit in zip(factors, limits, strict=True)]
        )
        for limits in ([f.least for f in factors], [f.most for f in factors])
    )
    moves = _bounded(rows, wanted, np.maximum(least, -_MOST_MOVE), np.minimum(most, _MOST_MOVE))
    return {
        factor.name: float(values[factor.name] + move * factor.scale)
        for factor, move in zip(factors, moves, strict=True)
    }


def _bounded(
    rows: FloatArray, wanted: FloatArray, least: FloatArray, most: FloatArray
) -> FloatArray:
    """Least squares within bounds: who leaves them furthest is set on its bound, and the others are
    solved for again."""
    found = np.zeros(rows.shape[1])
    is_free = np.ones(rows.shape[1], np.bool_)
    while is_free.any():
        rest = wanted - rows[:, ~is_free] @ found[~is_free]
        found[is_free] = np.linalg.lstsq(rows[:, is_free], rest, rcond=None)[0]
        outside = np.where(is_free, np.maximum(least - found, found - most), 0.0)
        worst = int(np.argmax(outside))
        if outside[worst] <= 0:
            break
        found[worst] = np.clip(found[worst], least[worst], most[worst])
        is_free[worst] = False
    return found


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
