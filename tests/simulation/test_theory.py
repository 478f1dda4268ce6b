"""Queueing theory: the model against formulas, over replications with the warm-up cut.

One request that takes one step is one customer of a single server; a step whose cost grows with its
batch is a processor that all share. A confidence interval over independent replications must hold
the formula's value; at 99.9 % and fixed seeds a right model fails here about never.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from records.metrics import departures_ns, num_in_system_area_ns, sojourns_ns
from simulator.cost import ConstantCost, LinearCost
from tests.simulation.helpers import NS, RandomCost, Run, arrival, poisson_arrivals, run

REPLICATIONS = 12
T_999 = 4.437  # Student's t, 11 degrees of freedom, two-sided 99.9 %


def queue_s(result: Run, warm_up: int) -> Any:
    column = result.requests
    waits = column["first_scheduled_ns"] - column["arrival_ns"]
    order = np.argsort(column["arrival_ns"], kind="stable")
    return waits.compressed()[order][warm_up:] / NS


def assert_mean_holds(
    replicate: Callable[[np.random.Generator], float], expected: float, *, most_relative: float
) -> None:
    """The interval holds ``expected``, and is narrow enough to mean something."""
    seeds = np.random.SeedSequence(2026).spawn(REPLICATIONS)
    means = np.array([replicate(np.random.default_rng(seed)) for seed in seeds])
    half = T_999 * means.std(ddof=1) / np.sqrt(REPLICATIONS)
    assert half < most_relative * expected, f"interval of {half:g} around {means.mean():g}"
    assert abs(means.mean() - expected) < half, f"{means.mean():g} +- {half:g}, theory {expected:g}"


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_m_m_1_waiting_time(load: float) -> None:
    service = 0.1

    def replicate(rng: np.random.Generator) -> float:
        times = poisson_arrivals(rng, load / service, 3000)
        durations = np.maximum(rng.exponential(service * NS, 3000).astype(np.int64), 1)
        requests = [arrival(str(i), t, 1, 1) for i, t in enumerate(times)]
        result = run(requests, RandomCost(durations.tolist()), max_num_seqs=1)
        return float(queue_s(result, 500).mean())

    assert_mean_holds(replicate, load * service / (1 - load), most_relative=0.25)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_m_d_1_waiting_time(load: float) -> None:
    service = 0.1

    def replicate(rng: np.random.Generator) -> float:
        times = poisson_arrivals(rng, load / service, 3000)
        requests = [arrival(str(i), t, 1, 1) for i, t in enumerate(times)]
        result = run(requests, ConstantCost(service), max_num_seqs=1)
        return float(queue_s(result, 500).mean())

    # Pollaczek and Khinchine, no variance of service: half of M/M/1.
    assert_mean_holds(replicate, load * service / (2 * (1 - load)), most_relative=0.25)


def test_m_g_inf_waits_only_for_the_step_in_progress() -> None:
    """With a slot for everybody a request waits for the end of a step if anybody is there, a
    uniform part of it; the number present is Poisson with mean rate x stay."""
    step, rate, mean_outputs = 0.01, 20.0, 10

    def simulate_once(rng: np.random.Generator) -> Run:
        times = poisson_arrivals(rng, rate, 1000)
        outputs = rng.integers(1, 2 * mean_outputs, 1000)
        requests = [
            arrival(str(i), t, 1, int(o))
            for i, (t, o) in enumerate(zip(times, outputs, strict=True))
        ]
        return run(requests, ConstantCost(step), max_num_seqs=1000)

    def mean_wait(rng: np.random.Generator) -> float:
        return float(queue_s(simulate_once(rng), 100).mean())

    def mean_present(rng: np.random.Generator) -> float:
        result = simulate_once(rng)
        arrivals = result.requests["arrival_ns"]
        area = num_in_system_area_ns(arrivals, departures_ns(result.requests, int(arrivals.max())))
        return area / int(arrivals.max() - arrivals.min())

    # The number present is Poisson with mean rate x stay, so somebody is there for a share
    # 1 - exp(-rate x stay) of the time; who arrives then waits half a step on average. The stay
    # itself holds that wait: one more round gives it to well within the interval.
    stay = mean_outputs * step
    for _ in range(3):
        wait = step / 2 * (1 - np.exp(-rate * stay))
        stay = mean_outputs * step + wait
    assert_mean_holds(mean_wait, wait, most_relative=0.08)
    assert_mean_holds(mean_present, rate * stay, most_relative=0.12)


def test_processor_sharing_where_the_step_costs_what_its_batch_holds() -> None:
    """Each step gives everybody one token and lasts c x N: the mean stay is E[S] / (1 - load),
    whatever the distribution of lengths."""
    c, load, mean_outputs = 0.001, 0.6, 25
    rate = load / (c * mean_outputs)

    def replicate(rng: np.random.Generator) -> float:
        count = 800
        times = poisson_arrivals(rng, rate, count)
        outputs = rng.integers(1, 2 * mean_outputs, count)
        requests = [
            arrival(str(i), t, 1, int(o))
            for i, (t, o) in enumerate(zip(times, outputs, strict=True))
        ]
        result = run(requests, LinearCost(0, c, 0), max_num_seqs=10_000)
        column = result.requests
        stays = (column["finish_ns"] - column["arrival_ns"]).compressed()
        order = np.argsort(column["arrival_ns"], kind="stable")
        return float(stays[order][150:].mean()) / NS

    assert_mean_holds(replicate, c * mean_outputs / (1 - load), most_relative=0.3)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 40), st.integers(1, 30)),
        min_size=1,
        max_size=25,
    ),
    st.integers(6, 30),
    st.integers(1, 8),
)
def test_littles_law_is_exact(
    loads: list[tuple[int, int, int]], num_blocks: int, max_num_seqs: int
) -> None:
    requests = [
        arrival(str(i), time / 100, prompt, output)
        for i, (time, prompt, output) in enumerate(sorted(loads))
    ]
    result = run(
        requests,
        LinearCost(0.003, 0.0007, 0.0001),
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=32,
    )
    column = result.requests
    end = int(np.ma.MaskedArray(column["finish_ns"]).max())
    leaving = departures_ns(column, end)
    assert num_in_system_area_ns(column["arrival_ns"], leaving) == sojourns_ns(
        column["arrival_ns"], leaving
    )
    # The same area from the other side: what the steps saw of everybody who was admitted or waited.
    in_steps = int(
        ((result.steps["running"] + result.steps["waiting"]) * result.steps["duration_ns"]).sum()
    )
    assert in_steps <= sojourns_ns(column["arrival_ns"], leaving)
