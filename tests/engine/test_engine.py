"""The engine and ``LLM``: what a client is owed, whatever fails beside it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockmanager.content import TokenContent
from gpu_backend import memory
from gpu_backend.detokenize import Detokenizer
from gpu_backend.engine import Engine, RequestError
from gpu_backend.executor import Forward
from gpu_backend.llm import LLM, EngineOptions, Prompt, build
from gpu_backend.memory import budget, bytes_per_block
from gpu_backend.outputs import RequestOutput
from gpu_backend.sampler import Sampler
from gpu_backend.sampling import SamplingParams
from scheduler.plan import StepPlan
from scheduler.request import Request
from simulator.settings import Options, resolve
from tests.engine.helpers import (
    EOS,
    VOCAB,
    Driven,
    alone,
    assert_nothing_left,
    assert_pieces_add_up,
    assert_same,
    make_engine,
    sure_model,
)

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def params(**given: Any) -> SamplingParams:
    return replace(GREEDY, **given)


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


A, B, C = text(1, 9), text(2, 13), text(3, 6)


# -- copy-on-write ---------------------------------------------------------------------------


def test_two_samples_share_their_prompt_in_memory_until_one_writes() -> None:
    """Prompt of 10, blocks of 4: three blocks for both; one copy, when the last one is written."""
    prompt = text(4, 10)
    asked = params(temperature=1.0, seed=3, n=2, max_tokens=6)
    engine = make_engine(block_size=4)
    pool = engine.executor.cache.pool
    engine.add(prompt, asked, "a")
    driven = Driven(engine)

    driven.step()
    first, second = engine.scheduler.running
    assert first.block_ids == second.block_ids == [1, 2, 3]
    assert engine.scheduler.blocks.pool.num_used == 3
    assert driven.num_copies == 0
    before = pool.clone()

    plan = driven.step().plan
    assert [tuple(copy) for copy in plan.copies] == [(3, 4)]
    assert first.block_ids == [1, 2, 4]
    assert second.block_ids == [1, 2, 3]
    assert engine.scheduler.blocks.pool.num_used == 4
    assert torch.equal(pool[:, :, 1:3], before[:, :, 1:3])
    # Positions 8 and 9 are the prompt's, 10 is each sample's own; nobody has written 11 yet.
    assert torch.equal(pool[:, :, 3, :2], before[:, :, 3, :2])
    assert torch.equal(pool[:, :, 4, :2], before[:, :, 3, :2])
    assert not torch.equal(pool[:, :, 3, 2], pool[:, :, 4, 2])
    assert pool[:, :, 3:5, 3].isnan().all()

    driven.drain()
    assert driven.num_copies == 1
    a, b = driven.results["a"].outputs
    assert a.token_ids != b.token_ids
    assert_same(driven.results["a"], alone(prompt, asked))


def test_no_copy_where_the_prompt_fills_its_blocks() -> None:
    engine = make_engine(block_size=4)
    engine.add(text(5, 8), params(temperature=1.0, seed=3, n=4), "a")
    driven = Driven(engine)
    driven.step()
    assert engine.scheduler.blocks.pool.num_used == 2
    driven.step()
    assert engine.scheduler.blocks.pool.num_used == 6
    driven.drain()
    assert driven.num_copies == 0
    assert_same(driven.results["a"], alone(text(5, 8), params(temperature=1.0, seed=3, n=4)))


# -- EN-03: what a preemption must not touch -------------------------------------------------


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_after_five_outputs(mode: str) -> None:
    """10 tokens, 10 reports, each streamed once in order. Both prompts fill two blocks; when each has 5
    outputs both need a fourth block, and of the seven one is left."""
    asked = params(max_tokens=10, logprobs=2)
    engine = make_engine(7, 4, preemption_mode=mode, num_swap_blocks=4 if mode == "swap" else 0)
    engine.add(text(6, 8), params(max_tokens=12), "older")
    engine.add(text(7, 8), asked, "a")
    driven = Driven(engine)
    driven.until(lambda: driven.num_preempted > 0)
    (victim,) = driven.steps[-1].plan.preempted
    assert (victim.sequence.id, victim.sequence.num_output_tokens) == ("a", 5)
    assert victim.swapped_out == (mode == "swap")
    driven.drain()
    result = driven.results["a"]
    (output,) = result.outputs
    pieces = driven.pieces["a", 0]
    assert len(output.token_ids) == 10
    assert output.logprobs is not None
    assert len(output.logprobs) == 10
    assert [piece.token_ids for piece in pieces] == [(token,) for token in output.token_ids]
    assert all(len(piece.logprobs) == 1 for piece in pieces)
    assert_same(result, alone(text(7, 8), asked))
    assert_same(driven.results["older"], alone(text(6, 8), params(max_tokens=12)))


def test_preempted_inside_a_chunked_prefill() -> None:
    """Prompt log-probabilities: 8 of them, the first none, each set where it belongs."""
    asked = params(max_tokens=3, prompt_logprobs=2)
    prompt = text(8, 8)
    engine = make_engine(5, 4, long_prefill_token_threshold=3)
    engine.add(text(6, 8), params(max_tokens=9), "older")
    driven = Driven(engine)
    for _ in range(4):
        driven.step()
    engine.add(prompt, asked, "a")
    driven.until(lambda: driven.num_preempted > 0)
    (victim,) = driven.steps[-1].plan.preempted
    assert (victim.sequence.id, victim.tokens_lost) == ("a", 3)
    driven.drain()
    result = driven.results["a"]
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == 8
    assert result.prompt_logprobs[0] is None
    assert [next(iter(report or {})) for report in result.prompt_logprobs[1:]] == prompt[1:]
    assert_same(result, alone(prompt, asked))


# -- ends ------------------------------------------------------------------------------------


def test_end_of_sequence_and_what_puts_it_off() -> None:
    """A model that only ever wants to end: it may, it may not yet, it must go on."""
    engine = make_engine()

    def only_end(plan: StepPlan, logits: torch.Tensor) -> None:
        logits[:, EOS] += 100

    with changed_logits(engine, only_end):
        engine.add(A, SamplingParams(max_tokens=6), "ends")
        engine.add(A, SamplingParams(max_tokens=6, min_tokens=3), "later")
        engine.add(A, SamplingParams(max_tokens=6, ignore_eos=True), "never")
        engine.add(A, SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=[EOS]), "id")
        driven = Driven(engine).drain()
    outputs = {name: result.outputs[0] for name, result in driven.results.items()}
    assert outputs["ends"].token_ids == [EOS]
    assert (outputs["ends"].finish_reason, outputs["ends"].stop) == ("stop", None)
    assert outputs["later"].token_ids.index(EOS) == 3
    assert outputs["later"].finish_reason == "stop"
    assert outputs["never"].token_ids == [EOS] * 6
    assert (outputs["never"].finish_reason, outputs["never"].text) == ("length", "")
    assert (outputs["id"].token_ids, outputs["id"].stop) == ([EOS], EOS)


def test_stop_strings() -> None:
    whole = alone(A, params(max_tokens=12)).outputs[0].text
    stop = whole[4:6]
    first = whole.index(stop)
    engine = make_engine()
    engine.add(A, params(max_tokens=12, stop=[stop]), "before")
    engine.add(A, params(max_tokens=12, stop=[stop], include_stop_str_in_output=True), "with")
    engine.add(A, params(max_tokens=12, stop=["not in it", "?"]), "none")
    driven = Driven(engine).drain()
    outputs = {name: result.outputs[0] for name, result in driven.results.items()}
    assert outputs["before"].text == whole[:first]
    assert outputs["with"].text == whole[: first + len(stop)]
    assert outputs["none"].text == whole
    for name in ("before", "with"):
        assert (outputs[name].finish_reason, outputs[name].stop) == ("stop", stop)
        assert len(outputs[name].token_ids) < 12


def test_an_output_that_fills_the_pool_ends_there() -> None:
    engine = make_engine(3, 4)
    engine.add(text(9, 5), params(max_tokens=None), "a")
    (output,) = Driven(engine).drain().results["a"].outputs
    assert output.finish_reason == "kv_exhausted"
    assert len(output.token_ids) == 3 * 4 - 5 + 1  # the last one is not written
    want = alone(text(9, 5), params(max_tokens=20)).outputs[0].token_ids
    assert output.token_ids == want[: len(output.token_ids)]


def test_deadlines() -> None:
    engine = make_engine()
    engine.add(A, params(n=2), "late", deadline_ns=50)
    engine.add(B, params(), "b", deadline_ns=51)
    driven = Driven(engine)
    for _ in range(3):
        driven.step()
    driven.expire(50)
    assert [output.finish_reason for output in driven.results["late"].outputs] == ["timed_out"] * 2
    assert [len(output.token_ids) for output in driven.results["late"].outputs] == [3, 3]
    driven.drain()
    assert_same(driven.results["b"], alone(B, params()))


def test_seeds_of_the_engine_do_not_depend_on_the_batch() -> None:
    """Requests without a seed draw theirs from the engine's and their number."""
    wanted = params(temperature=1.5, seed=None)

    def outputs(together: bool, seed: int) -> list[list[int]]:
        engine = make_engine(seed=seed)
        driven = Driven(engine)
        for number, prompt in enumerate((A, A, B)):
            engine.add(prompt, wanted, str(number))
            if not together:
                driven.drain()
        driven.drain()
        return [driven.results[str(number)].outputs[0].token_ids for number in range(3)]

    assert outputs(True, 0) == outputs(False, 0)
    assert outputs(True, 0) != outputs(True, 1)
    assert outputs(True, 0)[0] != outputs(True, 0)[1]


# -- faults ----------------------------------------------------------------------------------


@contextmanager
def changed_logits(
    engine: Engine, change: Callable[[StepPlan, torch.Tensor], None]
) -> Iterator[None]:
    """While it lasts, ``change`` has the logits between the forward pass and the sampler."""
    run = engine.executor.run

    def changed(plan: StepPlan, *rest: Any) -> Forward:
        forward = run(plan, *rest)
        logits = forward.logits.clone()
        change(plan, logits)
        return forward._replace(logits=logits)

    engine.executor.run = changed  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        engine.executor.run = run  # type: ignore[method-assign]


def nan_for(request_id: str) -> Callable[[StepPlan, torch.Tensor], None]:
    def change(plan: StepPlan, logits: torch.Tensor) -> None:
        rows = np.flatnonzero(plan.samples).tolist()
        for row, position in enumerate(rows):
            if plan.sequences[position].request.id == request_id:
                logits[row, 7] = torch.nan

    return change


@pytest.mark.parametrize("steps_before", [0, 1, 3])
@pytest.mark.parametrize(
    "bad",
    [
        GREEDY,
        params(temperature=1.0, seed=1, n=3),
        SamplingParams(temperature=0, beam_width=3, n=2, max_tokens=8),
    ],
)
def test_logits_that_are_no_numbers_fail_their_request_alone(
    bad: SamplingParams, steps_before: int
) -> None:
    engine = make_engine()
    engine.add(A, GREEDY, "a")
    engine.add(B, bad, "bad")
    engine.add(C, params(n=2, temperature=1.0, seed=2), "c")
    driven = Driven(engine)
    for _ in range(steps_before):
        driven.step()
    with changed_logits(engine, nan_for("bad")):
        driven.step()
    failed = driven.results["bad"]
    assert failed.error is not None
    assert failed.error.startswith("request bad: ")
    assert "\n" not in failed.error
    assert {output.finish_reason for output in failed.outputs} == {"error"}
    driven.drain()
    assert_same(driven.results["a"], alone(A, GREEDY))
    assert_same(driven.results["c"], alone(C, params(n=2, temperature=1.0, seed=2)))


class _Broken(Exception):  # noqa: N818
    """What the tests raise where something else would."""


@contextmanager
def broken(target: object, name: str, error: BaseException, calls: int = 0) -> Iterator[None]:
    """While it lasts, ``target.name`` raises, after so many calls that do not."""
    real = getattr(target, name)
    remaining = calls

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise error
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, call)
        yield


@pytest.mark.parametrize("error", [_Broken(), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("where", ["memory", "forward", "sampler", "detokenizer"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_failed_step_ends_whom_it_held(
    where: str, error: BaseException, steps_before: int
) -> None:
    """And nobody else: ``waits`` has no part in it. The engine serves on, also the same prompts: what
    the step was to put into the prefix cache is not there."""
    engine = make_engine(max_num_seqs=6)
    asked = {
        "a": (A, params(logprobs=1)),
        "n": (B, params(temperature=1.0, seed=4, n=3)),
        "beams": (C, SamplingParams(temperature=0, beam_width=2, max_tokens=8)),
        "waits": (A, params(n=2, temperature=1.0, seed=5)),
    }
    for name, (prompt, chosen) in asked.items():
        engine.add(prompt, chosen, name)
    driven = Driven(engine)
    for _ in range(steps_before):
        driven.step()
    places: dict[str, tuple[object, str]] = {
        "memory": (engine.executor.cache, "execute"),
        "forward": (engine.executor.model, "logits"),
        "sampler": (Sampler, "__call__"),
        "detokenizer": (Detokenizer, "push"),
    }
    with broken(*places[where], error), pytest.raises(type(error)):
        engine.step()
    engine.scheduler.check()
    driven.step()  # what had ended is told with the next step
    for name in ("a", "n", "beams"):
        assert driven.results[name].error == f"request {name}: the step that it was in failed"
        assert {output.finish_reason for output in driven.results[name].outputs} == {"error"}
    driven.drain()
    assert_same(driven.results["waits"], alone(*asked["waits"]))
    again = Driven(engine)
    for name, (prompt, chosen) in asked.items():
        engine.add(prompt, chosen, f"{name} again")
    again.drain()
    for name, (prompt, chosen) in asked.items():
        assert_same(again.results[f"{name} again"], alone(prompt, chosen))


def test_a_failed_swap_ends_whom_it_moved() -> None:
    engine = make_engine(7, 4, preemption_mode="swap", num_swap_blocks=9)
    engine.add(text(6, 8), params(max_tokens=12), "older")
    engine.add(text(7, 8), params(max_tokens=10), "a")
    driven = Driven(engine)
    for _ in range(5):
        driven.step()
    with broken(engine.executor.cache, "execute", _Broken()), pytest.raises(_Broken):
        engine.step()
    assert_nothing_left(engine)


@pytest.mark.parametrize(
    ("prompt", "given", "why"),
    [
        ([], {}, "its prompt has no tokens, must have some"),
        ([1, VOCAB, 2], {}, f"token 1 of its prompt is {VOCAB}, must be from 0 to {VOCAB - 1}"),
        ([-1], {}, f"token 0 of its prompt is -1, must be from 0 to {VOCAB - 1}"),
        ([2**63], {}, f"token 0 of its prompt is {2**63}, must be from 0 to {VOCAB - 1}"),
        ([1.0, 2.0], {}, "its prompt is no list of token ids"),
        ([[1], [2, 3]], {}, "its prompt is no list of token ids"),
        ("text", {}, "its prompt is no list of token ids"),
        (None, {}, "its prompt is no list of token ids"),
        ([1] * 32, {}, "its prompt has 32 tokens, max_model_len 32 leaves room for at most 31"),
        ([1] * 9, {"n": 9}, "it samples n = 9 outputs, max_num_seqs is 8"),
        (
            [1] * 9,
            {"max_tokens": 20},
            "9 prompt tokens and up to 20 output tokens need 7 blocks, the pool has 6",
        ),
        (
            [1] * 9,
            {"beam_width": 4, "ignore_eos": False},
            "9 prompt tokens and up to 8 output tokens in each of 4 outputs need 10 blocks, the pool "
            "has 6",
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_alone(
    prompt: Any, given: dict[str, Any], why: str
) -> None:
    engine = make_engine(6, 4, max_num_seqs=8, max_model_len=32)
    engine.add(A, GREEDY, "a")
    with pytest.raises(RequestError, match=f"^request bad: {re.escape(why)}$"):
        engine.add(prompt, params(**given), "bad")
    driven = Driven(engine).drain()
    assert list(driven.results) == ["a"]
    assert_same(driven.results["a"], alone(A, GREEDY))


def known(request_id: str, prompt: list[int], answer: list[int], **fields: Any) -> dict[str, Any]:
    """Arguments of a request whose answer is known."""
    return {
        "request": Request(id=request_id, num_prompt_tokens=len(prompt), **fields),
        "prompt_ids": prompt,
        "params": GREEDY,
        "answer_ids": answer,
        "transcript": TokenContent.of(prompt + answer),
    }


def test_a_known_answer_is_given_and_found_again() -> None:
    """The next turn, whose first blocks hold the answer, says what it says without them."""
    answer = [3, 1, 4, 1, 5, 9, 2, 6]
    engine = make_engine(tell_tokens=False)
    engine.add_request(**known("a", A, answer))
    engine.add(A, GREEDY, "beside it")  # not under its influence
    driven = Driven(engine).drain()
    (output,) = driven.results["a"].outputs
    assert (output.token_ids, output.finish_reason) == (answer, "stop")
    assert_same(driven.results["beside it"], alone(A, GREEDY))
    following = [*A, *answer, 7]
    engine.add(following, GREEDY, "b")
    driven.drain()
    # All of it is computed but the last token of the answer.
    assert driven.results["b"].num_cached_tokens == (len(A) + 7) // 4 * 4 > len(A)
    assert_same(driven.results["b"], alone(following, GREEDY))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"answer_ids": None}, "a transcript needs answer_ids as well"),
        ({"answer_ids": []}, "its answer has no tokens, must have some"),
        ({"answer_ids": [-1]}, "token 0 of its answer is -1"),
        ({"forced_tokens": 3}, "forced_tokens is 3, its answer has 2"),
        ({"params": params(logprobs=1)}, "answer_ids need one output, no beam search and no"),
        ({"params": params(beam_width=2)}, "answer_ids need one output, no beam search and no"),
        (
            {"request": Request(id="a", num_prompt_tokens=len(A), n=2)},
            "answer_ids need one output, no beam search and no logprobs",
        ),
    ],
)
def test_an_answer_that_cannot_be_given_is_refused(changes: dict[str, Any], why: str) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match=f"^request a: {re.escape(why)}"):
        engine.add_request(**known("a", A, [1, 2]) | changes)
    assert not engine.num_unfinished


def test_what_an_engine_cannot_do_is_refused() -> None:
    engine = make_engine(tokenizer=None)
    engine.add(A, GREEDY, "a")
    with pytest.raises(
        RequestError, match=r"^request a: its id is in use by an unfinished request$"
    ):
        engine.add(A, GREEDY, "a")
    with pytest.raises(RequestError, match=r"^request b: stop strings need a tokenizer$"):
        engine.add(A, params(stop="x"), "b")
    beams = SamplingParams(temperature=0, beam_width=2, max_tokens=3)
    with pytest.raises(
        RequestError, match=r"^request b: a beam search needs parallel_sampling 'fork'"
    ):
        make_engine(parallel_sampling="separate").add(A, beams, "b")
    small = make_engine(max_num_seqs=4, max_num_batched_tokens=3)
    with pytest.raises(
        RequestError, match=r"max_num_batched_tokens of at least max_num_seqs \(4\)"
    ):
        small.add(A, beams, "b")
    assert_nothing_left(small)
    Driven(engine).drain()


def test_an_id_may_be_used_again_and_an_unknown_one_aborted() -> None:
    engine = make_engine()
    driven = Driven(engine)
    assert engine.add(A, GREEDY, "a") == "a"
    driven.drain()
    driven.abort("a")
    driven.abort("never seen")
    again = Driven(engine)
    engine.add(B, GREEDY, "a")
    again.drain()
    assert_same(again.results["a"], alone(B, GREEDY))


REQUESTS: list[tuple[list[int], SamplingParams]] = [
    (A, GREEDY),
    (B, params(temperature=1.0, seed=1, n=3, logprobs=1)),
    ([*A, 4, 4, 4, 9], params(prompt_logprobs=1)),
    (C, SamplingParams(temperature=0, beam_width=3, n=3, max_tokens=7)),
    ([*A, *B], params(temperature=0.8, seed=2, n=2, stop=["a", "e"])),
]


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.data())
def test_nothing_leaks_whatever_ends_and_fails(data: st.DataObject) -> None:
    """Any mix of ends; who was not aborted, late or in a step that failed has its own tokens."""
    draw = data.draw
    size = draw(st.sampled_from([1, 4, 16]), "block size")
    swap = draw(st.sampled_from([0, 60]), "host blocks")
    engine = make_engine(
        -(-30 // size) * draw(st.sampled_from([3, 4, 9]), "room"),
        size,
        max_num_seqs=draw(st.sampled_from([3, 8]), "slots"),
        max_num_batched_tokens=draw(st.sampled_from([8, 20, 300]), "budget"),
        preemption_mode="swap" if swap else "recompute",
        num_swap_blocks=swap,
    )
    driven = Driven(engine)
    kinds: dict[str, int] = {}
    for time in range(draw(st.integers(5, 25), "steps")):
        if draw(st.integers(0, 2)) == 0:
            kind = draw(st.integers(0, len(REQUESTS) - 1))
            name = str(len(kinds))
            deadline = draw(st.none() | st.integers(time, 40))
            engine.add(*REQUESTS[kind], name, deadline_ns=deadline, arrival_ns=time)
            kinds[name] = kind
        event = draw(st.sampled_from(["step"] * 6 + ["abort", "late", "nan", "broken", "bad"]))
        name = draw(st.sampled_from(sorted(kinds) or ["none"]))
        if event == "abort":
            driven.abort(name)
        elif event == "late":
            driven.expire(time)
        elif event == "bad":
            with pytest.raises(RequestError):
                engine.add([VOCAB], GREEDY, "bad")
        elif event == "nan":
            with changed_logits(engine, nan_for(name)):
                driven.step()
        elif event == "broken":
            place = draw(
                st.sampled_from([(engine.executor.model, "logits"), (Detokenizer, "push")])
            )
            try:
                with broken(*place, _Broken(), calls=draw(st.integers(0, 2))):
                    driven.step()
            except _Broken:
                engine.scheduler.check()
        else:
            driven.step()
    driven.drain()
    driven.step()  # tells the ends that a failed step brought
    assert set(driven.results) == set(kinds)
    for name, kind in kinds.items():
        result = driven.results[name]
        reasons = {output.finish_reason for output in result.outputs}
        cut = result.error is not None or bool(reasons & {"aborted", "timed_out"})
        # Beams that come back from host memory share nothing any more.
        if swap and REQUESTS[kind][1].beam_width is not None:
            cut = cut or reasons == {"kv_exhausted"}
        if not cut:
            assert_same(result, _reference(kind))
    assert_nothing_left(engine)


_references: dict[int, RequestOutput] = {}


def _reference(kind: int) -> RequestOutput:
    if kind not in _references:
        _references[kind] = alone(*REQUESTS[kind])
    return _references[kind]


# -- LLM -------------------------------------------------------------------------------------


def small_llm(**options: Any) -> LLM:
    """The weights of ``sure_model`` without its sharper logits, and no tokenizer."""
    return LLM(
        **{
            "model": sure_model().config,
            "weights_seed": 1,
            "dtype": "fp32",
            "device": "cpu",
            "num_blocks": 60,
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            **options,
        }
    )


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = small_llm()
    yield made
    assert_nothing_left(made.engine)


def ids_of(result: RequestOutput) -> list[int]:
    return result.outputs[0].token_ids


def test_generate_keeps_the_order_and_the_others(llm: LLM) -> None:
    """One bad prompt has its reason; the rest is as without it."""
    (a,), (b,) = llm.generate([A], GREEDY), llm.generate([B], params(max_tokens=3))
    each = [params(), params(), params(), params(max_tokens=3), params(max_tokens=300)]
    prompts: list[Prompt] = [A, [1, VOCAB], "text", B, A]
    results = llm.generate(prompts, each)
    assert ids_of(results[0]) == ids_of(a)
    assert ids_of(results[3]) == ids_of(b)
    assert [result.prompt_ids for result in results] == [A, [1, VOCAB], [], B, A]
    errors = [result.error for result in results]
    assert errors[0] is None
    assert errors[1] is not None
    assert errors[1].endswith(f": {_TOKEN}")
    assert errors[2] == "prompt 2: a model of random weights has no tokenizer, expected token ids"
    assert errors[4] is not None
    assert "the pool has 60" in errors[4]
    assert all("\n" not in str(error) for error in errors)


_TOKEN = f"token 1 of its prompt is {VOCAB}, must be from 0 to {VOCAB - 1}"


def test_one_prompt_many_prompts_none(llm: LLM) -> None:
    assert ids_of(llm.generate(A, GREEDY)[0]) == ids_of(llm.generate([A], GREEDY)[0])
    assert llm.generate([], GREEDY) == []
    assert list(llm.stream([], GREEDY)) == []
    with pytest.raises(ValueError, match=r"^1 sampling params for 2 prompts$"):
        llm.generate([A, B], [GREEDY])
    assert len(ids_of(llm.generate(A, replace(SamplingParams(seed=1), max_tokens=2))[0])) == 2


def test_the_stream_is_the_output_in_pieces(llm: LLM) -> None:
    asked = [params(logprobs=1), params(temperature=1.0, seed=2, n=3)]
    want = llm.generate([A, B], asked)
    pieces = list(llm.stream([A, B], asked))
    assert {piece.request_id for piece in pieces} == {"0", "1"}
    for number, result in enumerate(want):
        for output in result.outputs:
            own = [p for p in pieces if (p.request_id, p.index) == (str(number), output.index)]
            assert_pieces_add_up(own, output)
    # Both requests ran side by side: their pieces alternate.
    assert len({piece.request_id for piece in pieces[:4]}) == 2


def test_a_stream_that_is_closed_runs_no_further(llm: LLM) -> None:
    stream = llm.stream([A, B], params(max_tokens=50))
    next(stream)
    assert llm.engine.num_unfinished == 2
    stream.close()
    assert_nothing_left(llm.engine)


def test_a_stream_with_a_bad_prompt_starts_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError, match=_TOKEN):
        next(llm.stream([A, [1, VOCAB]], GREEDY))
    assert_nothing_left(llm.engine)


def test_streams_take_turns(llm: LLM) -> None:
    """A step serves everybody: what comes of it for another call waits for that call."""
    want = {name: ids_of(llm.generate(p, GREEDY)[0]) for name, p in {"a": A, "b": B}.items()}
    a, b = llm.stream(A, GREEDY), llm.stream(B, GREEDY)
    got_a = [next(a), next(a)]
    got_b = [next(b)]
    assert ids_of(llm.generate(C, GREEDY)[0])
    got_a += list(a)
    got_b += list(b)
    for name, pieces in {"a": got_a, "b": got_b}.items():
        assert [token for piece in pieces for token in piece.token_ids] == want[name]
        assert pieces[-1].finish_reason == "length"
    assert_nothing_left(llm.engine)


@pytest.mark.parametrize("call", ["generate", "stream"])
@pytest.mark.parametrize("calls", [0, 3])
def test_an_interrupt_leaves_nothing_behind(llm: LLM, call: str, calls: int) -> None:
    want = ids_of(llm.generate(A, GREEDY)[0])
    other = llm.stream(B, params(max_tokens=30))
    next(other)
    with (
        broken(llm.engine.executor, "run", KeyboardInterrupt(), calls),
        pytest.raises(KeyboardInterrupt),
    ):
        list(getattr(llm, call)([A, C], GREEDY))
    # The other call was in the step that was lost; it ends, and says so.
    assert [piece.finish_reason for piece in other][-1] == "error"
    assert_nothing_left(llm.engine)
    assert ids_of(llm.generate(A, GREEDY)[0]) == want


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"device": "tpu"}, "device 'tpu' is neither cpu nor cuda"),
        ({"device": "meta"}, "device 'meta' is neither cpu nor cuda"),
        ({"dtype": "int4"}, "dtype 'int4' is not one of bf16, fp16, fp32"),
        ({"attention": "flash"}, "attention 'flash' is not one of"),
        ({"attention": "varlen"}, "attention 'varlen' needs CUDA"),
        ({"scheduling_policy": "lifo"}, "unknown policy 'lifo'"),
        ({"weights_seed": None}, "sure: random weights need a seed"),
        ({"model": "no/such/model"}, "model 'no/such/model': no such file or folder"),
        ({"block_size": 0}, "block_size is 0, must be at least 1"),
        ({"num_blocks": 0}, "num_blocks is 0, must be at least 1"),
        ({"num_blocks": None, "kv_bytes": 100}, "no KV block fits"),
        ({"num_blocks": None, "memory_utilization": 1.5}, "memory utilization is 1.5, must be"),
        ({"kv_cache_dtype": "int2"}, "kv_dtype 'int2' is not one of auto, fp8, int8"),
        ({"swap_bytes": -1}, "swap_bytes is -1, must be at least 0"),
        ({"preemption_mode": "swap"}, "preemption_mode is swap, but 0 bytes of swap space hold no"),
        ({"preemption_mode": "drop"}, "preemption_mode is 'drop', must be 'recompute' or 'swap'"),
        ({"parallel_sampling": "no"}, "parallel_sampling is 'no', must be 'fork' or 'separate'"),
        ({"watermark": 1.0}, "watermark is 1.0, must be at least 0 and below 1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0, must be at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0, must be at least 1"),
        ({"max_model_len": 0}, "max_model_len is 0, must be at least 2"),
        ({"max_model_len": 257}, "max_model_len is 257, sure was made for at most 256"),
        (
            {"enable_chunked_prefill": False},
            "max_num_batched_tokens is 64, must be at least max_model_len",
        ),
    ],
)
def test_options_that_make_no_engine(options: dict[str, Any], why: str) -> None:
    if "model" in options:
        options = {**options, "weights_seed": None}
    with pytest.raises(ValueError, match=f"^{re.escape(why)}") as caught:
        small_llm(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("attention", ["reference", "cpu"])
def test_options_reach_the_engine(attention: str) -> None:
    config = sure_model().config
    each = bytes_per_block(config, 8, torch.float32, "int8")
    options = EngineOptions(
        model=config,
        weights_seed=1,
        device="cpu",
        dtype="fp32",
        attention=attention,
        kv_cache_dtype="int8",
        block_size=8,
        num_blocks=20,
        swap_bytes=3 * each + 1,
        max_model_len=100,
        enable_prefix_caching=False,
        watermark=0.16,
        preemption_mode="swap",
        scheduling_policy="priority",
    )
    built = build(options)
    blocks, cache = built.engine.scheduler.blocks, built.engine.executor.cache
    assert (blocks.num_blocks, blocks.block_size, blocks.watermark_blocks) == (20, 8, 3)
    assert cache.is_quantised
    assert (cache.num_blocks, cache.num_host_blocks) == (20, 3)
    assert not blocks.enable_prefix_caching
    assert built.engine.scheduler.policy.name == "priority"
    assert built.config.max_model_len == 100
    name = {"reference": "reference_attention", "cpu": "CpuAttention"}[attention]
    assert built.lines[0] == f"sure in fp32 on cpu, attention {name}"
    assert "20 blocks as given: 0.00 GiB" in built.lines


# -- memory ----------------------------------------------------------------------------------

BIG = replace(sure_model().config, num_layers=16, num_kv_heads=4, num_heads=4, windows=(None,) * 16)
"""2 x 16 layers x 4 heads x 8 x 4 bytes = 4 KiB a token, 64 KiB a block of 16."""
BLOCK = 2 * 16 * 4 * 8 * 4 * 16


def blocks_of(**given: Any) -> memory.KVBudget:
    return budget(
        BIG,
        torch.device("cpu"),
        **{
            "block_size": 16,
            "dtype": torch.float32,
            "kv_dtype": "auto",
            "weight_bytes": 3 * 2**30,
            **given,
        },
    )


def gib(line: str) -> float:
    return float(line.split()[0])


def test_blocks_as_given() -> None:
    found = blocks_of(num_blocks=16384)
    assert found.num_blocks == 16384
    assert gib(found.lines[0]) == 3
    assert found.lines[1].startswith("a block of 16 tokens takes 65,536 bytes (4,096 a token")
    assert found.lines[2] == "16,384 blocks as given: 1.00 GiB"


def test_blocks_in_bytes_given() -> None:
    assert bytes_per_block(BIG, 16, torch.float32, "auto") == BLOCK
    found = blocks_of(kv_bytes=2**30 + BLOCK - 1)
    assert found.num_blocks == 16384  # the rest is not enough for another
    assert found.lines[-1] == "1.00 GiB for KV: 16,384 blocks, 262,144 tokens"
    # int8 and a float32 scale a token and head: 12 bytes where there were 32.
    assert blocks_of(kv_bytes=2**30, kv_dtype="int8").num_blocks == 2**30 // (BLOCK * 12 // 32)


def test_blocks_in_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory x share - activations = KV; each number has its line."""
    monkeypatch.setattr(memory, "available_memory", lambda: 10 * 2**30)
    found = blocks_of(utilization=0.75, activation_peak=lambda: 3 * 2**29)
    assert found.lines[0] == "10.00 GiB of free memory x 0.75"
    left, activations, kv = 10 * 0.75, gib(found.lines[1]), gib(found.lines[-1])
    assert (activations, kv) == (1.5, 6.0)
    assert left - activations == kv
    assert found.num_blocks == 6 * 2**30 // BLOCK
    assumed = blocks_of(activation_peak=lambda: 0)
    assert assumed.lines[0] == "10.00 GiB of free memory x 0.5 (assumed)"
    with pytest.raises(ValueError, match=r"^no KV block fits: a block of 16 tokens takes 65,536"):
        blocks_of(utilization=0.1, activation_peak=lambda: 2**30)


def test_blocks_and_watermark_are_those_of_the_simulator() -> None:
    """As many as fit, however few could be in use at once (the others keep prefixes); the watermark is
    a share of what vLLM counts, its null block included."""
    llm = small_llm(num_blocks=None, kv_bytes=2**20, block_size=16, max_model_len=30)
    each = 2**20 // llm.engine.executor.cache.bytes_per_block
    assert llm.engine.scheduler.blocks.num_blocks == each > 16
    held = small_llm(num_blocks=199, watermark=0.01).engine.scheduler.blocks.watermark_blocks
    assert held == resolve(Options(num_gpu_blocks=200, watermark=0.01)).watermark_blocks == 2


def test_the_activation_peak_is_measured() -> None:
    """64 MiB that live for a moment are seen, where the system tells."""

    def work() -> None:
        torch.ones(2**24).sum()

    peak = memory.peak_bytes(torch.device("cpu"), work)
    if peak == 0:
        pytest.skip("this system does not tell a process its peak")
    assert 2**26 <= peak + 2**22 < 2**28
