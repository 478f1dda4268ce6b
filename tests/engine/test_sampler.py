"""Tokens from logits: against a slow reference, against exact distributions, in any company."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.sampler import (
    Logprob,
    Sampler,
    SamplerState,
    derive_seed,
    gather_logprobs,
    gumbel_noise,
    top_by_lowest_id,
)
from gpu_backend.sampling import SamplingParams

Array = npt.NDArray[np.float64]
EOS = 1


def state(seed: int = 0, outputs: tuple[int, ...] = (), **params: Any) -> SamplerState:
    made = SamplerState(SamplingParams(**params), (2, 3, 2), seed=seed, eos_ids=[EOS])
    for token in outputs:
        made.append(token)
    return made


def sample(logits: Any, *states: SamplerState) -> list[int | None]:
    return Sampler()(torch.as_tensor(logits, dtype=torch.float32), states).tokens()


# The obvious way, one row and one rule at a time, in float64.


def processed(
    logits: Array, params: SamplingParams, prompt: list[int], outputs: list[int]
) -> Array:
    logits = logits.copy()
    if len(outputs) < params.min_tokens:
        logits[[EOS, *params.stop_token_ids]] = -np.inf
    for token in set(prompt) | set(outputs):
        logits[token] *= params.repetition_penalty ** (-1.0 if logits[token] > 0 else 1.0)
    for token in set(outputs):
        logits[token] -= params.frequency_penalty * outputs.count(token)
        logits[token] -= params.presence_penalty
    return logits


def distribution(logits: Array, params: SamplingParams) -> Array:
    logits = logits / params.temperature
    probs: Array = np.exp(logits - logits.max())
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0
    order = sorted(range(len(probs)), key=lambda token: (-logits[token], token))
    if params.top_k > 0:
        probs[order[params.top_k :]] = 0
    probs /= probs.sum()
    before = 0.0
    for token in order:
        keep = before < params.top_p
        before += probs[token]
        if not keep:
            probs[token] = 0
    probs /= probs.sum()
    return probs


def splitmix64(bits: int) -> int:
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


def noise(key: int, token: int) -> float:
    bits = splitmix64((key + (token + 1) * 0x9E3779B97F4A7C15) % 2**64)
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


def as_key(bits: int) -> torch.Tensor:
    return torch.tensor([bits - 2**64 if bits >= 2**63 else bits])


VOCAB = 11
logit = st.one_of(
    st.sampled_from([-2.0, 0.0, 0.5, 3.0]),  # ties
    st.integers(-128, 128).map(lambda sixteenths: sixteenths / 16),
    st.just(-math.inf),
)
params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, -1, 1, 2, 5, 50]),
    top_p=st.sampled_from([1.0, 1.0, 0.871, 0.4337, 0.013]),
    min_p=st.sampled_from([0.0, 0.0, 0.0521, 0.3307]),
    # With logits in sixteenths no penalty makes a near-tie, which float32 might decide otherwise.
    repetition_penalty=st.sampled_from([1.0, 1.371, 0.731]),
    presence_penalty=st.sampled_from([0.0, 0.6131, -1.1319]),
    frequency_penalty=st.sampled_from([0.0, 0.4517, -0.3119]),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([(), (4,)]),
)
row_strategy = st.tuples(
    st.lists(logit, min_size=VOCAB, max_size=VOCAB).filter(lambda row: max(row[5:]) > -math.inf),
    params_strategy,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    st.lists(st.integers(0, VOCAB - 1), max_size=6),
    st.integers(-(2**63), 2**63 - 1),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(row_strategy, min_size=1, max_size=6))
def test_each_row_is_what_the_slow_way_gives(rows: list[Any]) -> None:
    states, expected = [], []
    for logits, params, prompt, outputs, seed in rows:
        row = SamplerState(params, prompt, seed=seed, eos_ids=[EOS])
        for token in outputs:
            row.append(token)
        states.append(row)
        scores = processed(np.array(logits), params, prompt, outputs)
        if not params.is_greedy:
            probs = distribution(scores, params)
            with np.errstate(divide="ignore"):
                scores = np.log(probs) + [noise(row.key, token) for token in range(VOCAB)]
        expected.append(scores)
    got = sample([row[0] for row in rows], *states)
    for (_, params, *_), scores, token in zip(rows, expected, got, strict=True):
        assert token is not None
        if params.is_greedy:
            assert token == scores.argmax()  # the first of equals
        else:
            assert (
                scores[token] > scores.max() - 1e-5
            )  # float32 may not tell noise that close apart


def chi_square(counts: Array, probs: Array) -> None:
    """Within five standard deviations of a chi-square's mean (the seeds are fixed)."""
    assert not counts[probs == 0].any(), "a token that was filtered out"
    inside = probs > 0
    expected = probs[inside] * counts.sum()
    assert expected.min() >= 5, "too few draws for the test"
    freedom = int(inside.sum()) - 1
    statistic = float(((counts[inside] - expected) ** 2 / expected).sum())
    assert statistic <= freedom + 5 * math.sqrt(2 * freedom)


LOGITS = np.array([1.0, -0.5, 2.0, 0.0, 1.5, -1.0, 0.3, 2.0])


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.3},
        {"top_k": 6, "top_p": 0.7, "temperature": 1.3},
    ],
)
def test_frequencies_are_the_exact_probabilities(params: dict[str, Any]) -> None:
    """Over seeds, and over positions of one seed."""
    draws = 12_000
    probs = distribution(LOGITS, SamplingParams(**params))
    by_seed = [state(seed, **params) for seed in range(draws)]
    one = state(7, **params)
    by_position = []
    for position in range(draws):
        copy = one.fork(0)
        copy.num_outputs = position
        by_position.append(copy)
    for states in (by_seed, by_position):
        tokens = sample(np.tile(LOGITS, (draws, 1)), *states)
        chi_square(np.bincount(np.array(tokens), minlength=8).astype(float), probs)


@pytest.mark.parametrize("step", ["position", "sample", "seed"])
def test_neighbouring_draws_are_independent(step: str) -> None:
    """The pairs (this draw, the next one) have the product of the probabilities."""
    draws = 20_000
    states = []
    for i in range(draws):
        row = state(i if step == "seed" else 3)
        row.sample = i if step == "sample" else 0
        row.num_outputs = i if step == "position" else 0
        states.append(row)
    tokens = np.array(sample(np.tile(LOGITS[:4], (draws, 1)), *states))
    probs = distribution(LOGITS[:4], SamplingParams())
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16).astype(float)
    chi_square(pairs, np.outer(probs, probs).ravel())


def test_noise_is_splitmix64_of_key_and_token() -> None:
    """With key 0, token i takes the i-th number of the published generator started at 0."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    expected = [-math.log(-math.log(((bits >> 12) + 0.5) / 2**52)) for bits in published]
    got = gumbel_noise(torch.tensor([0]), torch.arange(3))[0]
    assert got.tolist() == torch.tensor(expected, dtype=torch.float64).float().tolist()


def test_every_draw_has_a_key_of_its_own() -> None:
    keys = set()
    for seed in (-(2**63), *range(-9, 10), 2**63 - 1):
        row = state(seed)
        for row.sample in range(20):
            for row.num_outputs in range(20):
                keys.add(row.key)
    assert len(keys) == 21 * 20 * 20


@given(st.integers(0, 2**64 - 1), st.integers(0, 300_000))
def test_noise_of_any_key_and_token(key: int, token: int) -> None:
    got = gumbel_noise(as_key(key), torch.tensor([token])).item()
    assert got == pytest.approx(noise(key, token), rel=1e-6, abs=1e-7)


def test_noise_has_the_same_bits_in_any_shape() -> None:
    keys = torch.arange(5) * 977 - 3
    whole = gumbel_noise(keys, torch.arange(1003))
    assert whole.isfinite().all()
    for width in (1, 7, 64, 1003):
        ids = torch.arange(1003 - width, 1003)
        for row in range(5):
            assert torch.equal(gumbel_noise(keys[row : row + 1], ids)[0], whole[row, -width:])


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 3},
    {"top_k": 40, "top_p": 0.9},
    {"top_p": 0.95},
    {"top_p": 0.2, "min_p": 0.01},
    {"temperature": 0.7, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 0.5, "logprobs": 2},
    {"min_tokens": 9, "temperature": 1.5},
]


def test_a_row_does_not_know_its_batch() -> None:
    """Alone, in order, and shuffled among others: the same tokens, bit for bit the same noise. The
    vocabulary is larger than the prefix in which top-p looks first."""
    generator = torch.Generator().manual_seed(0)
    rows = 4 * len(KINDS)
    logits = torch.randn(rows, 2500, generator=generator) * torch.linspace(0.1, 4, rows)[:, None]
    states = [state(i, outputs=(5, 6, 5), **KINDS[i % len(KINDS)]) for i in range(rows)]
    together = sample(logits, *states)
    assert [sample(logits[i : i + 1], states[i])[0] for i in range(rows)] == together
    order = torch.randperm(rows, generator=generator).tolist()
    shuffled = sample(logits[order], *(states[i] for i in order))
    assert shuffled == [together[i] for i in order]


def test_top_p_beyond_the_prefix_is_exact() -> None:
    """A flat distribution over more tokens than the prefix holds: the first 3 / 4 of them stay."""
    vocab, draws = 4000, 300
    states = [state(seed, top_p=0.75) for seed in range(draws)]
    tokens = np.array(sample(np.zeros((draws, vocab)), *states))
    assert tokens.max() < 3000
    assert tokens.max() > 2800
    assert abs(tokens.mean() - 1499.5) < 5 * 3000 / math.sqrt(12 * draws)


def test_ties_go_to_the_lowest_id() -> None:
    logits = [0.0, 2.0, 1.0, 2.0, 2.0, -0.0]
    assert sample([logits], state(temperature=0.0)) == [1]
    assert {sample([logits], state(s, top_k=2))[0] for s in range(60)} == {1, 3}
    values, ids = top_by_lowest_id(torch.tensor([[0.0, 2.0, 1.0, 2.0, -0.0]]), 5)
    assert ids.tolist() == [[1, 3, 2, 0, 4]]
    assert values.tolist() == [[2.0, 2.0, 1.0, 0.0, 0.0]]


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 12]), st.booleans())
def test_top_by_lowest_id_is_a_stable_sort(seed: int, k: int, ties: bool) -> None:
    """With few values (many ties), negative ones, both zeros and -inf; k on every path."""
    rng = np.random.default_rng(seed)
    pool = np.array([-np.inf, -1.5, -0.0, 0.0, 1e-40, 2.0, 7.0], dtype=np.float32)
    shape = (3, 120)
    pool = pool[: rng.integers(2, 8)]
    array = rng.choice(pool, shape) if ties else rng.normal(size=shape).astype(np.float32)
    values, ids = top_by_lowest_id(torch.from_numpy(array), k)
    expected = np.argsort(-array, axis=1, kind="stable")[:, :k]
    assert ids.tolist() == expected.tolist()
    assert values.tolist() == np.take_along_axis(array, expected, 1).tolist()


@pytest.mark.parametrize("params", KINDS)
def test_a_broken_row_fails_alone(params: dict[str, Any]) -> None:
    good = torch.linspace(-1, 1, 9)
    broken = torch.stack([good] * 4)
    broken[0, 4] = math.nan
    broken[1] = -math.inf
    broken[2, 0] = math.inf
    broken[3, EOS] = math.nan  # under the mask of min_tokens, where there is one
    logits = torch.cat((good[None], broken, good[None]))
    states = [state(i, **params) for i in range(6)]
    tokens = sample(logits, *states)
    assert tokens[1:5] == [None] * 4
    assert [tokens[0], tokens[5]] == sample(torch.stack([good, good]), states[0], states[5])
    assert None not in (tokens[0], tokens[5])


def test_logits_are_not_changed() -> None:
    logits = torch.linspace(-1, 1, 8).repeat(len(KINDS), 1)
    before = logits.clone()
    sample(logits, *(state(outputs=(5,), **params) for params in KINDS))
    assert torch.equal(logits, before)


def test_a_tiny_temperature_is_greedy_not_nan() -> None:
    assert sample([[5.0, 80.0, 79.0]], state(temperature=1e-40 * 1e5)) == [1]
    assert sample([[-3e38, 3e38, 0.0]], state(temperature=0.01)) == [1]


def test_min_tokens_masks_stop_tokens_until_then() -> None:
    logits = [[0.0, 9.0, 1.0, 2.0, 8.0]]  # 1 ends the sequence, 4 is a stop token, 77 is no token
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (4, 77)}
    assert sample(logits, state(**params)) == [3]
    assert sample(logits, state(outputs=(3,), **params)) == [3]
    assert sample(logits, state(outputs=(3, 3), **params)) == [1]
    assert sample([[-math.inf, 9.0, -math.inf]], state(temperature=0.0, min_tokens=1)) == [None]


def test_which_tokens_end_an_output() -> None:
    ends = state(stop_token_ids=(4,))
    goes_on = state(stop_token_ids=(4,), ignore_eos=True)
    assert [ends.is_stop(token) for token in (1, 4, 5)] == [True, True, False]
    assert [goes_on.is_stop(token) for token in (1, 4, 5)] == [False, True, False]


def test_penalties_by_hand() -> None:
    """The prompt is 2, 3, 2; the output 4, 4, 2: repetition reads both, the others the output."""
    row = state(
        outputs=(4, 4, 2),
        temperature=0.0,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=0.25,
    )
    #        0    1    2: 8/2-.25-1=2.75  3: -1*2  4: 6/2-.5-1=1.5
    assert sample([[2.7, 0.0, 8.0, -1.0, 6.0]], row) == [2]
    assert sample([[2.8, 0.0, 8.0, -1.0, 6.0]], row) == [0]
    assert sample([[-2.1, -9.0, -4.0, -1.0, 0.4]], row) == [4]  # 4: .2-1.5 = -1.3; 3: -2
    assert sample([[-2.1, -9.0, -4.0, -1.0, -1.0]], row) == [3]  # 4: -2-1.5; 3: -2


def test_forks_share_the_past_and_not_the_future() -> None:
    parent = state(3, frequency_penalty=0.5)
    parent.append(4)
    children = [parent, *(parent.fork(sample) for sample in range(1, 40))]
    flat = np.zeros((40, 64))
    first = sample(flat, *children)
    assert len(set(first)) > 20  # one seed, 40 outputs
    children[1].append(5)
    children[1].append(5)
    likes_5 = [[0.0] * 5 + [0.8] + [0.0] * 3]
    for row, counts in ((parent, [4]), (children[1], [4, 5, 5])):
        greedy = state(outputs=tuple(counts), temperature=0.0, frequency_penalty=0.5)
        again = row.fork(row.sample)
        again.params = greedy.params
        assert sample(likes_5, again) == sample(likes_5, greedy)
    assert parent.num_outputs == 1
    assert children[1].num_outputs == 3


def test_unseeded_requests_get_seeds_of_their_own() -> None:
    seeds = {derive_seed(0, number) for number in range(10_000)}
    assert len(seeds) == 10_000
    assert derive_seed(0, 5) != derive_seed(1, 5)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


# Log-probabilities


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0, 2.0, 1.0]])
    row = state(temperature=0.0, repetition_penalty=5.0, logprobs=2)
    output = Sampler()(logits, [row])
    expected = logits[0].log_softmax(0).tolist()
    assert output.tokens() == [4]  # 2 and 3 are in the prompt
    report = output.logprob_dicts()[0]
    assert [(token, entry.rank) for token, entry in report.items()] == [(4, 3), (2, 1), (3, 2)]
    for token, entry in report.items():
        assert entry.logprob == pytest.approx(expected[token])


def test_each_row_gets_the_logprobs_it_asked_for() -> None:
    logits = torch.linspace(0, 3, 6).repeat(4, 1)
    wanted = [None, 0, 2, 100]
    output = Sampler()(logits, [state(i, logprobs=k) for i, k in enumerate(wanted)])
    tokens, reports = output.tokens(), output.logprob_dicts()
    assert sorted(reports) == [1, 2, 3]
    assert list(reports[1]) == [tokens[1]]
    assert set(reports[2]) == {tokens[2], 5, 4}
    assert set(reports[3]) == set(range(6))
    for report in reports.values():
        for token, (logprob, rank) in report.items():
            assert logprob == pytest.approx(logits[0].log_softmax(0)[token].item())
            assert rank == 6 - token


def test_prompt_logprobs_row_i_scores_token_i_plus_1() -> None:
    prompt = torch.tensor([3, 0, 2, 2])
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    reports = gather_logprobs(logits[:-1], prompt[1:], 1).to_dicts([1] * 3)
    for i, report in enumerate(reports):
        scores = logits[i].log_softmax(0)
        assert next(iter(report)) == prompt[i + 1]
        assert set(report) == {int(prompt[i + 1]), int(scores.argmax())}
        assert report[int(prompt[i + 1])].logprob == pytest.approx(scores[prompt[i + 1]].item())


def toy_model(tokens: list[int]) -> torch.Tensor:
    """Logits that depend on all tokens so far."""
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)
    return torch.randn(1, 50, generator=generator) * 2


def generate(preempted_after: int | None) -> tuple[list[int], list[dict[int, Logprob]]]:
    prompt = list(range(8))
    params = SamplingParams(
        max_tokens=10, seed=5, logprobs=3, top_p=0.9, frequency_penalty=0.4, repetition_penalty=1.1
    )
    row = SamplerState(params, prompt, seed=5, eos_ids=[])
    outputs: list[int] = []
    reports = []
    while len(outputs) < 10:
        logits = [toy_model(prompt + outputs)]
        states = [row]
        if len(outputs) == preempted_after:
            # It is back after a preemption: all its tokens are computed again, behind a neighbour.
            logits = [torch.zeros(1, 50), *logits]
            states = [state(9, top_k=4), row]
        output = Sampler()(torch.cat(logits), states)
        token = output.tokens()[-1]
        assert token is not None
        outputs.append(token)
        reports.append(output.logprob_dicts()[len(states) - 1])
        row.append(token)
    return outputs, reports


def test_en_03_a_preemption_leaves_no_trace() -> None:
    plain, preempted = generate(None), generate(5)
    assert plain == preempted
    assert [len(part) for part in preempted] == [10, 10]
    assert all(next(iter(report)) == token for token, report in zip(*preempted, strict=True))


# Devices


def test_nothing_waits_for_the_device() -> None:
    """A tensor without data cannot be read on the host: the step would raise where it tries to."""
    states = [state(i, outputs=(5,), **params) for i, params in enumerate(KINDS)]
    output = Sampler()(torch.empty(len(KINDS), 3000, device="meta"), states)
    assert output.token_ids.shape == (len(KINDS),)
    assert output.token_ids.dtype == torch.int64
    with pytest.raises((RuntimeError, NotImplementedError)):
        output.tokens()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_samples_what_the_cpu_samples() -> None:
    rows = 16 * len(KINDS)
    logits = torch.randn(rows, 5000, generator=torch.Generator().manual_seed(0)) * 2
    states = [state(i, outputs=(5,), **KINDS[i % len(KINDS)]) for i in range(rows)]
    assert Sampler()(logits.cuda(), states).tokens() == sample(logits, *states)
    keys, ids = torch.arange(4) * 12345, torch.arange(5000)
    difference = gumbel_noise(keys.cuda(), ids.cuda()).cpu() - gumbel_noise(keys, ids)
    assert difference.abs().max() < 1e-6


# What is asked


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 0, "n is 0, must be an integer from 1 to 16384"),
        ("n", True, "n is True, must be an integer from 1 to 16384"),
        ("temperature", -0.1, "temperature is -0.1, must be a finite number, at least 0"),
        ("temperature", math.nan, "temperature is nan, must be a finite number, at least 0"),
        ("temperature", "1", "temperature is '1', must be a finite number, at least 0"),
        ("top_k", -2, "top_k is -2, must be an integer at least -1"),
        ("top_k", 1.5, "top_k is 1.5, must be an integer at least -1"),
        ("top_p", 0.0, "top_p is 0.0, must be a finite number, above 0, at most 1"),
        ("top_p", 1.1, "top_p is 1.1, must be a finite number, above 0, at most 1"),
        ("min_p", 1.1, "min_p is 1.1, must be a finite number, at least 0, at most 1"),
        ("repetition_penalty", 0, "repetition_penalty is 0, must be a finite number, above 0"),
        ("presence_penalty", 2.1, "must be a finite number, at least -2, at most 2"),
        ("frequency_penalty", -2.1, "must be a finite number, at least -2, at most 2"),
        ("seed", 2**63, "must be an integer from -9223372036854775808 to 9223372036854775807"),
        ("max_tokens", 0, "max_tokens is 0, must be an integer at least 1"),
        ("min_tokens", -1, "min_tokens is -1, must be an integer at least 0"),
        ("stop", ("a", ""), "stop is ['a', ''], must be strings of at least one character"),
        ("stop", (1,), "stop is [1], must be strings of at least one character"),
        ("stop", 7, "stop is 7, must be a list"),
        ("stop_token_ids", (-1,), "stop_token_ids is -1, must be an integer at least 0"),
        ("stop_token_ids", None, "stop_token_ids is None, must be a list"),
        ("ignore_eos", 1, "ignore_eos is 1, must be true or false"),
        ("logprobs", -1, "logprobs is -1, must be an integer at least 0"),
        ("prompt_logprobs", 0.5, "prompt_logprobs is 0.5, must be an integer at least 0"),
        ("beam_width", 0, "beam_width is 0, must be an integer from 1 to 16384"),
        ("length_penalty", 0.5, "length_penalty is 0.5, must be left out without beam_width"),
        ("early_stopping", "soon", "early_stopping is 'soon', must be true, false or \"never\""),
    ],
)
def test_bad_fields_are_named_with_what_was_expected(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        SamplingParams(**{field: value})
    assert str(error.value).startswith(f"{field} is ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens is 3, must be at most max_tokens (2)"),
        ({"beam_width": 2, "n": 3}, "n is 3, must be at most beam_width (2)"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature is 0.5, must be 0 or 1"),
        ({"beam_width": 2, "top_k": 4}, "top_k is 4, must be left out with beam_width"),
        ({"beam_width": 2, "stop": "x"}, "stop is ('x',), must be left out with beam_width"),
    ],
)
def test_fields_that_do_not_go_together(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        SamplingParams(**params)
    assert message in str(error.value)


def test_one_or_several_stops() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"], stop_token_ids=[3]).stop_token_ids == (3,)
    params = SamplingParams(stop_token_ids=3)  # type: ignore[arg-type]
    assert replace(params, n=2).stop_token_ids == (3,)
    beams = SamplingParams(
        n=2, beam_width=3, temperature=0, early_stopping="never", ignore_eos=True
    )
    assert beams.is_greedy
