"""A generator learnt from a trace: what it finds again, and how close what it makes comes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockmanager.content import HashedContent
from scheduler.request import Request
from traces import Arrival, TraceError, default_trace_path, read_trace
from traces.fit import Fit, closeness, fit, two_sample_distance
from traces.laws import Stream, parse_process
from traces.prefix import ideal_prefix_hits

S = 1_000_000_000


def load(process: str, rate: float, duration_s: float, seed: int = 1) -> list[Arrival]:
    times = parse_process(process).times(rate, 0.0, duration_s, Stream(seed))
    return [
        Arrival(
            Request(id=f"r{i}", arrival_ns=round(time * S), num_prompt_tokens=10 + i % 90),
            1 + i % 7,
        )
        for i, time in enumerate(times)
    ]


def test_the_distance_of_two_samples_by_hand() -> None:
    a = np.array([1, 2, 3, 4])
    assert two_sample_distance(a, a) == 0
    assert two_sample_distance(a, a + 10) == 1
    assert two_sample_distance(a, np.array([3, 4, 5, 6])) == 0.5
    assert two_sample_distance(np.array([1]), np.array([1, 2])) == 0.5


@pytest.mark.parametrize(
    ("process", "rate", "found"),
    [
        ("gamma:cv=3", 5.0, "gamma"),
        ("weibull:cv=4", 5.0, "weibull"),
        ("onoff:on=20,off=60", 3.0, "onoff"),
    ],
)
def test_the_law_of_the_arrivals_is_found_again(process: str, rate: float, found: str) -> None:
    learnt = fit(load(process, rate, 4_000))
    assert learnt.process.startswith(found)
    best, second = learnt.candidates[:2]
    assert best.distance < 0.1 < second.distance


def test_a_day_is_found_again() -> None:
    learnt = fit(load("diurnal:peak=1.8,peak_at=50400", 0.1, 3 * 86_400))
    assert learnt.process.startswith("diurnal:")
    options = dict(part.split("=") for part in learnt.process.split(":")[1].split(","))
    assert float(options["peak"]) == pytest.approx(1.8, abs=0.05)
    assert float(options["peak_at"]) == pytest.approx(50_400, abs=1_500)


def test_rate_and_lengths_come_back() -> None:
    arrivals = load("poisson", 5.0, 1_000)
    learnt = fit(arrivals)
    made = learnt.generate(requests=2_000, rate=50.0, seed=3)
    assert len(made) == 2_000
    assert made[-1].request.arrival_ns / S == pytest.approx(40, rel=0.1)
    assert {a.request.num_prompt_tokens for a in made} <= set(range(10, 100))
    assert all(a.request.content is None for a in made)
    close = closeness(arrivals, made)
    assert max(close.gaps, close.counts, close.prompt_tokens, close.output_tokens) < 0.06
    assert close.by_chance == pytest.approx(
        1.36 * math.sqrt((len(arrivals) + 2_000) / (len(arrivals) * 2_000))
    )
    assert (close.hits, close.ideal, close.hit_gap) == (None, None, None)
    assert "prefix hits   unknown" in close.to_text()


def test_lengths_that_go_together_stay_together() -> None:
    arrivals = [
        Arrival(
            Request(id=f"r{i}", arrival_ns=i * S, num_prompt_tokens=i % 50 + 1), 2 * (i % 50) + 1
        )
        for i in range(500)
    ]
    for arrival in fit(arrivals).generate(seed=1):
        assert arrival.output_tokens == 2 * arrival.request.num_prompt_tokens - 1


def test_one_seed_one_workload() -> None:
    learnt = fit(read_trace(default_trace_path()).arrivals)

    def told(arrivals: list[Arrival]) -> list[tuple[int, int, int, list[int]]]:
        return [
            (r.arrival_ns, r.num_prompt_tokens, output, r.content.hash_ids.tolist())  # type: ignore[union-attr]
            for r, output, _ in arrivals
        ]

    assert told(learnt.generate(seed=4)) == told(learnt.generate(seed=4))
    assert told(learnt.generate(seed=4)) != told(learnt.generate(seed=5))


def test_what_is_made_is_a_prefix_chain_and_fits_its_prompts() -> None:
    parents: dict[int, int] = {}
    for arrival in fit(read_trace(default_trace_path()).arrivals).generate(seed=2):
        content = arrival.request.content
        assert isinstance(content, HashedContent)
        assert content.hash_block_size == 32
        assert (
            len(content.hash_ids) == arrival.request.num_prompt_tokens // 32
        )  # as the trace rounds
        chain = content.hash_ids.tolist()
        for parent, child in zip([-1, *chain], chain, strict=False):
            assert parents.setdefault(child, parent) == parent


def test_prompts_without_identity_stay_unknown() -> None:
    arrivals = load("poisson", 5.0, 400)
    known = HashedContent(np.arange(2), 4, 8)
    mixed = [
        a
        if i % 2
        else Arrival(
            Request(
                id=a.request.id, arrival_ns=a.request.arrival_ns, num_prompt_tokens=8, content=known
            ),
            1,
        )
        for i, a in enumerate(arrivals)
    ]
    made = fit(mixed).generate(seed=1)
    share = sum(a.request.content is None for a in made) / len(made)
    assert share == pytest.approx(0.5, abs=0.06)
    assert all((a.request.content is None) == (a.request.num_prompt_tokens != 8) for a in made)
    hits = ideal_prefix_hits(made)
    assert hits is not None
    assert hits.unique_blocks <= 20  # two, and again wherever the first request is drawn


@pytest.mark.parametrize(
    ("name", "hit_gap", "ideal_gap"),
    [("conversation", 0.05, 0.01), ("synthetic", 0.12, 0.02)],
)
def test_mooncake_is_made_again(shared: Path, name: str, hit_gap: float, ideal_gap: float) -> None:
    arrivals = read_trace(shared / f"traces/mooncake/{name}_trace.jsonl").arrivals
    close = closeness(arrivals, fit(arrivals).generate(seed=1))
    assert close.hit_gap is not None
    assert close.hit_gap < hit_gap
    assert close.ideal is not None
    assert close.ideal[0] == pytest.approx(close.ideal[1], abs=ideal_gap)
    assert close.prompt_tokens < 0.03
    assert close.output_tokens < 0.03


def test_azure_code_is_bursty_in_the_way_of_weibull(shared: Path) -> None:
    learnt = fit(read_trace(shared / "traces/azure2023/AzureLLMInferenceTrace_code.csv").arrivals)
    assert learnt.gap_cv == pytest.approx(13.15, abs=0.005)
    assert learnt.requests == 8_819
    assert learnt.process == "weibull:cv=13.1513"
    assert learnt.block_size is None


def test_a_fit_goes_through_a_file() -> None:
    learnt = fit(read_trace(default_trace_path()).arrivals)
    again = Fit.from_json(json.loads(json.dumps(learnt.to_json())))
    assert again == learnt


@pytest.mark.parametrize(
    "change",
    [
        {"kvplan_fit": 2},
        {"rows": []},
        {"rows": [[0, 1, None, 0]]},
        {"rows": [[1, 1, 1.5, 0]]},
        {"rows": [[1, 1]]},
        {"block_size": None},
        {"block_size": 0},
        {"arrivals": "gamma"},
        {"rate_per_s": 0},
        {"rate_per_s": "fast"},
    ],
)
def test_a_file_that_is_no_fit_is_refused(change: dict[str, Any]) -> None:
    record = fit(read_trace(default_trace_path()).arrivals).to_json()
    with pytest.raises(TraceError):
        Fit.from_json({**record, **change})
    for other in (None, [], "x", {}):
        with pytest.raises(TraceError, match="is no fit"):
            Fit.from_json(other)


def test_a_trace_without_a_span_teaches_nothing() -> None:
    flat = [Arrival(Request(id=f"r{i}", num_prompt_tokens=1), 1) for i in range(5)]
    with pytest.raises(TraceError, match="too few to learn a rate"):
        fit(flat)
    with pytest.raises(TraceError, match="no gaps to compare"):
        closeness(flat, flat)


def test_the_report_has_both_curves() -> None:
    arrivals = read_trace(default_trace_path()).arrivals
    close = closeness(arrivals, arrivals)
    assert close.hit_gap == 0
    assert close.ideal is not None
    assert close.ideal[0] == close.ideal[1] == pytest.approx(0.704, abs=5e-4)
    assert "70.4%    70.4%" in close.to_text()
    report = close.to_json()
    assert report["hit_rates"][-1]["first"] == report["hit_rates"][-1]["second"]
