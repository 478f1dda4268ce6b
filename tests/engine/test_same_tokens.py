"""The same tokens whatever the scheduler does with a request and whoever runs beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any, NamedTuple

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from gpu_backend.engine import Engine
from gpu_backend.outputs import RequestOutput
from gpu_backend.sampling import SamplingParams
from tests.engine.helpers import (
    VOCAB,
    Driven,
    alone,
    assert_same,
    make_engine,
)

_rng = random.Random(7)


def _text(length: int) -> list[int]:
    return [_rng.randrange(1, VOCAB) for _ in range(length)]


COMMON = _text(21)
"""Several prompts begin with it."""
GREEDY = SamplingParams(temperature=0, max_tokens=12)
RANDOM: dict[str, Any] = {"temperature": 0.9, "seed": 11}


class Case(NamedTuple):
    prompt: list[int]
    params: SamplingParams


def _params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **given})


CASES = [
    Case([*COMMON, *_text(3)], GREEDY),
    Case([*COMMON, *_text(9)], _params(temperature=0, logprobs=3)),
    Case(COMMON, _params(**RANDOM, logprobs=0)),
    Case(COMMON, _params(**RANDOM, n=3)),
    Case(_text(37), _params(temperature=0, max_tokens=20)),
    Case([5], _params(temperature=0.7, seed=-3, top_p=0.8)),
    Case(_text(8), _params(temperature=1.3, seed=4, top_k=7, top_p=0.9, min_p=0.02, n=2)),
    Case(
        _text(16),
        _params(
            temperature=0,
            repetition_penalty=1.4,
            presence_penalty=0.5,
            frequency_penalty=0.7,
            max_tokens=24,
        ),
    ),
    Case([*COMMON, 9], _params(**RANDOM, repetition_penalty=1.2, frequency_penalty=-0.4, n=2)),
    Case(_text(12), _params(temperature=0, prompt_logprobs=2, logprobs=1)),
    Case([*COMMON, *_text(11)], _params(**RANDOM, prompt_logprobs=0, n=2)),
    Case(_text(5), _params(temperature=2.0, seed=2, max_tokens=30, ignore_eos=False)),
    Case(_text(7), _params(temperature=1.5, seed=1, stop=["an", "er", "o"], max_tokens=30)),
    Case(
        [*COMMON, 30],
        _params(
            temperature=1.5,
            seed=9,
            n=3,
            stop=["th", "a"],
            stop_token_ids=[4, 33],
            min_tokens=3,
            include_stop_str_in_output=True,
            max_tokens=30,
        ),
    ),
    Case(
        _text(9),
        _params(temperature=1.5, seed=6, n=2, stop_token_ids=[*range(20, 40)], min_tokens=2),
    ),
    Case(_text(3), _params(temperature=0, max_tokens=1, n=2)),
    Case(_text(60), _params(temperature=0.5, seed=8, max_tokens=5, n=4)),
]


@cache
def reference(index: int) -> RequestOutput:
    return alone(*CASES[index])


def need(engine: Engine, index: int) -> int:
    """Blocks without which the request is refused."""
    prompt, params = CASES[index]
    size, outputs = engine.scheduler.blocks.block_size, params.max_tokens or 0
    whole = -(-(len(prompt) + outputs - 1) // size)
    shared = len(prompt) // size
    return shared + params.n * (whole - shared)


def test_the_model_is_sure() -> None:
    """The best two tokens are further apart than rounding reaches by a factor of a hundred; and the
    cases are worth having: outputs vary, and end in every way."""
    gaps, reasons, stops, texts = [], set(), set(), set()
    for index, (prompt, params) in enumerate(CASES):
        for output in reference(index).outputs:
            texts.add(output.text)
            reasons.add(output.finish_reason)
            stops.add(type(output.stop))
        if params.temperature == 0 and not params.has_penalties:
            found = alone(prompt, _params(temperature=0, logprobs=2)).outputs[0]
            for report in found.logprobs or ():
                first, second = sorted((e.logprob for e in report.values()), reverse=True)[:2]
                gaps.append(first - second)
    assert len(gaps) > 50
    assert min(gaps) > 1e-3
    assert reasons == {"stop", "length"}
    assert stops == {type(None), str, int}
    assert len(texts) > len(CASES)


class Arrival(NamedTuple):
    case: int
    step: int
    priority: int


def serve(
    engine: Engine, arrivals: Seq[Arrival], aborts: Seq[tuple[int, int]] = ()
) -> tuple[Driven, list[RequestOutput | None]]:
    """Run requests that arrive, and are aborted, at some step; the result of each (``None`` = it has
    been aborted before it arrived)."""
    driven = Driven(engine)
    aborted: set[int] = set()
    step = 0
    while True:
        for victim, at in aborts:
            if at == step and victim < len(arrivals):
                driven.abort(str(victim))
                aborted.add(victim)
        for number, arrival in enumerate(arrivals):
            if arrival.step == step and number not in aborted:
                case = CASES[arrival.case]
                engine.add(case.prompt, case.params, str(number), priority=arrival.priority)
        if step > 12 and not engine.num_unfinished:
            break
        driven.step()
        step += 1
        assert step < 3000
    driven.drain()
    for number, arrival in enumerate(arrivals):
        want, got = reference(arrival.case), driven.results.get(str(number))
        if number in aborted:
            assert_begins(got, want)
        else:
            assert got is not None
            assert_same(got, want)
    return driven, [driven.results.get(str(number)) for number in range(len(arrivals))]


def assert_begins(got: RequestOutput | None, want: RequestOutput) -> None:
    """Whatever an aborted request had come to is the beginning of what it would have become."""
    for output in got.outputs if got is not None else ():
        theirs = want.outputs[output.index]
        assert output.token_ids == theirs.token_ids[: len(output.token_ids)]
        assert theirs.text.startswith(output.text) or output.finish_reason == "aborted"
        assert output.finish_reason in ("aborted", theirs.finish_reason)


@st.composite
def _loads(draw: st.DrawFn) -> tuple[dict[str, Any], list[Arrival], list[tuple[int, int]]]:
    """Settings of an engine in which every request fits, if only just; requests, and aborts."""
    indices = draw(st.lists(st.integers(0, len(CASES) - 1), min_size=2, max_size=8))
    arrivals = [
        Arrival(index, draw(st.sampled_from([0, 0, 0, 1, 3, 8])), draw(st.integers(0, 2)))
        for index in indices
    ]
    aborts = draw(
        st.lists(st.tuples(st.integers(0, len(indices) - 1), st.integers(0, 12)), max_size=2)
    )
    options: dict[str, Any] = {
        "block_size": draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 32, 128])),
        "num_blocks": draw(st.sampled_from([0, 0, 0, 1, 3, 100])),
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        "watermark_blocks": draw(st.sampled_from([0, 0, 2])),
        "policy": draw(
            st.sampled_from(["fcfs", "fcfs", "fcfs-fewest-lost", "priority-preemptive"])
        ),
        "attention": draw(st.sampled_from(["cpu", "cpu", "reference"])),
        "tell_tokens": draw(st.sampled_from([True, True, False])),
        "max_num_seqs": draw(st.sampled_from([4, 6, 12, 64])),
        "max_num_batched_tokens": draw(st.sampled_from([1, 2, 3, 5, 16, 61, 2048])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 4, 9])),
        "parallel_sampling": draw(st.sampled_from(["fork", "fork", "separate"])),
        "preemption_mode": draw(st.sampled_from(["recompute", "swap"])),
    }
    if options["preemption_mode"] == "swap":
        options["num_swap_blocks"] = draw(st.sampled_from([3, 30, 300]))
    if options["max_num_batched_tokens"] == 2048:
        options["enable_chunked_prefill"] = draw(st.booleans())
    return options, arrivals, aborts


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(_loads())
def test_the_same_tokens_whatever_the_scheduler_does(
    load: tuple[dict[str, Any], list[Arrival], list[tuple[int, int]]],
) -> None:
    options, arrivals, aborts = load
    probe = make_engine(1, options["block_size"])
    options["num_blocks"] += max(need(probe, arrival.case) for arrival in arrivals)
    driven, _ = serve(make_engine(**options), arrivals, aborts)
    event(f"preempted: {driven.num_preempted > 0}")
    event(f"swapped in: {driven.num_swapped_in > 0}")
    event(f"copied: {driven.num_copies > 0}")
    event(f"hit: {driven.num_hits > 0}")
