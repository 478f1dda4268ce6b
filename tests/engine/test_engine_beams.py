"""Beam search through the engine: transformers' beams, whatever becomes of their blocks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from gpu_backend.executor import Forward
from gpu_backend.outputs import RequestOutput
from gpu_backend.sampling import SamplingParams
from tests.engine.conftest import LoadedModel
from tests.engine.helpers import (
    EOS,
    LETTERS,
    VOCAB,
    Driven,
    alone,
    as_transformers,
    assert_nothing_left,
    assert_same,
    generate_with_beams,
    make_engine,
    sure_model,
)


def _beams(width: int, max_tokens: int = 10, **given: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "n": width, "beam_width": width, "max_tokens": max_tokens, **given}
    )


def _prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


COMMON = _prompt(5, 13)
CASES: list[tuple[list[int], SamplingParams]] = [
    (COMMON, _beams(3)),
    ([*COMMON, 7], _beams(2, 14, length_penalty=2.0, ignore_eos=True)),
    (_prompt(6, 7), _beams(4, 8, early_stopping=True, stop_token_ids=[3, 30, 31])),
    ([*COMMON, 8, 9], _beams(3, 6, n=1, early_stopping="never", length_penalty=-1.0)),
    (_prompt(7, 1), _beams(2, 1)),
]
NEIGHBOURS: list[tuple[list[int], SamplingParams]] = [
    (_prompt(8, 9), SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)),
    ([*COMMON, 4], SamplingParams(temperature=1.0, seed=3, max_tokens=12, n=2)),
    (_prompt(9, 40), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)),
]


@cache
def reference(index: int) -> RequestOutput:
    return alone(*[*CASES, *NEIGHBOURS][index])


@pytest.mark.parametrize("seed", [1, 2])
def test_equal_to_transformers(seed: int) -> None:
    model = sure_model(seed)
    theirs = as_transformers(model)
    reasons = set()
    lengths = set()
    for number, (width, penalty, early) in enumerate(
        itertools.product((1, 2, 4), (0.0, 1.0, -1.5), (False, True, "never"))
    ):
        prompt = _prompt(number, 1 + 3 * (number % 5))
        stops = random.Random(number).sample(range(VOCAB), 4)
        params = _beams(
            width, 9, length_penalty=penalty, early_stopping=early, stop_token_ids=stops
        )
        engine = make_engine(model=model)
        engine.add(prompt, params, "a")
        result = Driven(engine).drain().results["a"]
        if width == 1:  # transformers has no beam search of one beam: it is greedy
            config = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=stops)
            assert (
                result.outputs[0].token_ids
                == alone(prompt, config, model=model).outputs[0].token_ids
            )
            continue
        want = generate_with_beams(theirs, prompt, params, engine_eos := (EOS,))
        assert [output.token_ids for output in result.outputs] == [tokens for tokens, _ in want]
        for output, (tokens, score) in zip(result.outputs, want, strict=True):
            assert output.sum_logprob is not None
            assert output.sum_logprob / len(tokens) ** penalty == pytest.approx(score, rel=1e-4)
            assert output.text == LETTERS.decode(tokens)
            ended = tokens[-1] in {*stops, *engine_eos}
            assert output.finish_reason == ("stop" if ended else "length")
            reasons.add(output.finish_reason)
            lengths.add(len(tokens))
    assert reasons == {"stop", "length"}
    assert len(lengths) > 4


def test_real_model_equal_to_transformers(smollm2: LoadedModel) -> None:
    theirs = as_transformers(smollm2.model)
    engine = make_engine(
        40,
        model=smollm2.model,
        tokenizer=smollm2.tokenizer,
        eos_ids=smollm2.tokenizer.eos_token_ids,
        block_size=16,
        max_model_len=128,
    )
    params = _beams(3, 7)
    texts = ["The capital of France is", "def add(a, b):\n    return"]
    prompts = [smollm2.tokenizer.encode(text) for text in texts]
    for number, prompt in enumerate(prompts):
        engine.add(prompt, params, str(number))
    driven = Driven(engine).drain()
    for number, prompt in enumerate(prompts):
        want = generate_with_beams(theirs, prompt, params, smollm2.tokenizer.eos_token_ids)
        result = driven.results[str(number)]
        assert [output.token_ids for output in result.outputs] == [tokens for tokens, _ in want]
        assert result.text == smollm2.tokenizer.decode(want[0][0])
    assert "Paris" in driven.results["0"].text


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_beams_are_the_same_beams(mode: str) -> None:
    """Two older requests take block after block; beams that lost theirs catch up, the others wait."""
    engine = make_engine(18, 4, preemption_mode=mode, num_swap_blocks=60 if mode == "swap" else 0)
    for name in ("older", "old"):
        engine.add(*NEIGHBOURS[0], name)
    engine.add(*CASES[0], "a")
    driven = Driven(engine).drain()
    victims = {p.sequence.id for step in driven.steps for p in step.plan.preempted}
    assert len(victims) > 1
    assert all(victim.startswith("a#") for victim in victims)
    assert (driven.num_swapped_in > 0) == (mode == "swap")
    assert driven.num_withheld > 0
    assert_same(driven.results["a"], reference(0))
    for name in ("older", "old"):
        assert_same(driven.results[name], reference(len(CASES)))


def test_a_budget_parts_the_beams() -> None:
    """A long prompt that runs ahead of them takes two of a step's four tokens: of three beams one
    comes too short, and two compute their last token again and again until the prompt is done."""
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=4, long_prefill_token_threshold=2)
    engine.add(*NEIGHBOURS[2], "long")
    engine.add(*CASES[0], "a")
    driven = Driven(engine).drain()
    assert driven.num_withheld > 10
    assert_same(driven.results["a"], reference(0))
    assert_same(driven.results["long"], reference(len(CASES) + 2))


def test_as_many_slots_as_beams() -> None:
    engine = make_engine(max_num_seqs=3)
    for number in range(2):
        engine.add(*CASES[0], f"a{number}")
        engine.add(*NEIGHBOURS[0], f"n{number}")
    driven = Driven(engine).drain()
    assert max(step.num_running for step in driven.steps) == 3
    for number in range(2):
        assert_same(driven.results[f"a{number}"], reference(0))
        assert_same(driven.results[f"n{number}"], reference(len(CASES)))


def test_beams_that_lost_what_they_shared_are_computed_again() -> None:
    """Preempted one by one and recomputed in chunks side by side, the beams of a search hold its
    prompt more than once, and the pool has no room for that: all of them go back to the queue, and
    find the prompt in the prefix cache."""
    prompt, params = CASES[1]
    engine = make_engine(
        40, 1, max_num_seqs=4, max_num_batched_tokens=9, long_prefill_token_threshold=3
    )
    requeued: list[Seq[str]] = []
    requeue = engine.scheduler.requeue

    def counted(request_ids: Seq[str]) -> None:
        requeued.append(request_ids)
        requeue(request_ids)

    engine.scheduler.requeue = counted  # type: ignore[method-assign]
    engine.add(*NEIGHBOURS[0], "older")
    driven = Driven(engine)
    driven.step()
    engine.add(prompt, params, "a")
    driven.drain()
    assert requeued == [["a"]]
    assert_same(driven.results["a"], reference(1))


def test_a_search_that_outgrows_the_pool_ends() -> None:
    """Without ``max_tokens`` it may: its beams are told apart from those that finish."""
    params = SamplingParams(temperature=0, beam_width=3, n=2, ignore_eos=True)
    engine = make_engine(6, 4)
    engine.add(COMMON[:5], params, "a")
    engine.add(*CASES[4], "b")
    driven = Driven(engine).drain()
    assert {output.finish_reason for output in driven.results["a"].outputs} == {"kv_exhausted"}
    assert_same(driven.results["b"], reference(4))


def test_an_aborted_search_gives_its_best_so_far() -> None:
    prompt, params = CASES[2]
    stops = [*range(1, VOCAB, 2)]
    params = SamplingParams(
        temperature=0, beam_width=4, n=4, max_tokens=40, early_stopping="never",
        length_penalty=2.0, stop_token_ids=stops,
    )  # fmt: skip
    engine = make_engine()
    engine.add(prompt, params, "a")
    driven = Driven(engine)
    for _ in range(4):
        driven.step()
    driven.abort("a")
    assert_nothing_left(engine)
    outputs = driven.results["a"].outputs
    assert {output.finish_reason for output in outputs} == {"aborted"}
    assert len(outputs) > 1
    assert all(output.token_ids[-1] in {*stops, EOS} for output in outputs)


def test_a_search_that_had_shrunk_may_find_no_slots() -> None:
    """Nine slots; for two steps only one token is possible, the three searches are down to a beam each,
    and five others come. Of the one slot left the first search takes what it needs, the next has no
    room and ends, and so does the last: the slot that is free by then is one too few."""
    engine = make_engine(max_num_seqs=9)
    for width in (2, 4, 3):
        engine.add(COMMON, _beams(width, 12, n=1), f"width {width}")
    driven = Driven(engine)
    run = engine.executor.run

    def only_seven(*args: Any) -> Forward:
        forward = run(*args)
        logits = forward.logits.clone()
        logits[:, :7] = logits[:, 8:] = -torch.inf
        return forward._replace(logits=logits)

    engine.executor.run = only_seven  # type: ignore[assignment,method-assign]
    driven.step()
    for number in range(5):
        engine.add(*NEIGHBOURS[0], str(number))
    driven.step()
    engine.executor.run = run  # type: ignore[method-assign]
    assert engine.scheduler.num_free_slots == 1
    driven.drain()
    why = "its beams find no sequence slots (max_num_seqs)"
    assert driven.results["width 2"].error is None
    assert driven.results["width 4"].error == f"request width 4: {why}"
    assert driven.results["width 3"].error == f"request width 3: {why}"
    for number in range(5):
        assert driven.results[str(number)].outputs[0].finish_reason == "length"


_Load = tuple[dict[str, Any], list[tuple[int, int]], tuple[int, int] | None]


@st.composite
def _loads(draw: st.DrawFn) -> _Load:
    """Settings, (case, arrival step) of each request, and (request, step) of an abort."""
    everything = len(CASES) + len(NEIGHBOURS)
    arrivals = draw(
        st.lists(
            st.tuples(st.integers(0, everything - 1), st.sampled_from([0, 0, 1, 3, 6])),
            min_size=2,
            max_size=6,
        )
    )
    max_num_seqs = draw(st.sampled_from([4, 5, 8]))
    options: dict[str, Any] = {
        "block_size": draw(st.sampled_from([1, 2, 3, 4, 8, 16])),
        "num_blocks": draw(st.sampled_from([0, 0, 1, 3, 40])),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": draw(st.sampled_from([max_num_seqs, 9, 17, 512])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 3])),
        "tell_tokens": draw(st.sampled_from([True, True, True, False])),
        "enable_prefix_caching": draw(st.sampled_from([True, True, True, False])),
        "policy": draw(st.sampled_from(["fcfs", "fcfs", "fcfs-fewest-lost", "priority"])),
    }
    if draw(st.booleans()):
        options |= {"preemption_mode": "swap", "num_swap_blocks": draw(st.sampled_from([9, 200]))}
    abort = draw(st.none() | st.tuples(st.integers(0, len(arrivals) - 1), st.integers(1, 8)))
    return options, arrivals, abort


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(_loads())
def test_the_same_beams_whatever_the_scheduler_does(
    load: _Load,
) -> None:
    options, arrivals, abort = load
    every = [*CASES, *NEIGHBOURS]
    size = options["block_size"]
    # Beams that come back from host memory, or whose tokens the prefix cache does not know, share
    # nothing any more.
    shares = options["enable_prefix_caching"] and options["tell_tokens"]
    shares = shares and "preemption_mode" not in options
    needs = []
    for index, _ in arrivals:
        prompt, params = every[index]
        whole = -(-(len(prompt) + (params.max_tokens or 0) - 1) // size)
        shared = len(prompt) // size if shares or params.beam_width is None else 0
        needs.append(shared + (params.beam_width or params.n) * (whole - shared))
    options["num_blocks"] += max(needs)
    engine = make_engine(**options)
    driven = Driven(engine)
    for step in itertools.count():
        for number, (index, at) in enumerate(arrivals):
            if at == step:
                prompt, params = every[index]
                engine.add(prompt, params, str(number), arrival_ns=10 * step + number)
        if abort is not None and abort[1] == step:
            driven.abort(str(abort[0]))
        if step > 8 and not engine.num_unfinished:
            break
        driven.step()
        assert step < 2000
    driven.drain()
    for number, (index, _) in enumerate(arrivals):
        if abort is None or number != abort[0]:
            assert_same(driven.results[str(number)], reference(index))
    event(f"preempted: {driven.num_preempted > 0}")
    event(f"swapped: {driven.num_swapped_in > 0}")
    event(f"hit: {driven.num_hits > 0}")
    event(f"parted: {driven.num_withheld > 0}")
