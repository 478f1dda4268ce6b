"""Beam search: transformers', step by step, with the forward pass done here."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from gpu_backend.beam import Beam, BeamSearch

VOCAB = 40
PROMPT = [3, 17, 5]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.6,  # large: distributions far from flat
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,  # a padding token's embedding would be 0: all logits tie
    )
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def search(model: LlamaForCausalLM, prompt: list[int], beams: BeamSearch) -> int:
    """Runs it to its end with dense forward passes; returns the number of steps."""
    live: list[list[int]] = [[]]
    for step in itertools.count(1):
        logits = model(torch.tensor([prompt + tokens for tokens in live]), use_cache=False).logits
        outcome = beams.step(logits[:, -1].float().log_softmax(-1))
        if beams.done:
            assert outcome.beams == []
            return step
        live = [[*live[beam.parent], beam.token_id] for beam in outcome.beams]
        assert beams.num_live == len(live)
    raise AssertionError


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("num_eos", [0, 1, 3])
def test_equal_to_transformers(model: LlamaForCausalLM, num_eos: int, early_stopping: Any) -> None:
    """All hypotheses with their scores, over prompts, widths, penalties and end tokens."""
    generator = torch.Generator().manual_seed(num_eos)
    stopped, early = 0, 0
    for width, length_penalty, seed in itertools.product(
        (2, 3, 5), (0.0, 1.0, 2.0, -1.0), range(3)
    ):
        prompt = torch.randint(VOCAB, (1 + seed,), generator=generator).tolist()
        # End tokens that the model likes: some of what it writes without any.
        free = BeamSearch(width, eos_ids=[], max_tokens=9)
        search(model, prompt, free)
        written = sorted({token for h in free.hypotheses for token in h.token_ids[2:]})
        eos_ids = [written[i] for i in torch.randperm(len(written), generator=generator)[:num_eos]]
        beams = BeamSearch(
            width,
            eos_ids=eos_ids,
            max_tokens=9,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        early += search(model, prompt, beams) < 9
        config = GenerationConfig(
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=9,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=eos_ids or None,
            pad_token_id=0,
            use_cache=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        ids = torch.tensor([prompt])
        theirs: Any = model.generate(
            ids, generation_config=config, attention_mask=torch.ones_like(ids)
        )
        assert len(beams.hypotheses) == width
        for ours, tokens, score in zip(
            beams.hypotheses, theirs.sequences.tolist(), theirs.sequences_scores, strict=True
        ):
            length = len(ours.token_ids)
            assert tokens[len(prompt) :][:length] == list(ours.token_ids)
            assert ours.score == pytest.approx(score.item(), rel=1e-5)
            ended = ours.token_ids[-1] in eos_ids
            assert ours.reason == ("stop" if ended else "length")
            assert ended or length == 9
            stopped += ended
    # The cases are of use only if outputs end by themselves, and searches early.
    assert (stopped > 20) == (num_eos > 0)
    assert (early > 5) == (num_eos > 0)


def log_probs(*rows: dict[int, float], vocab: int = 6) -> torch.Tensor:
    """Probabilities by token; the other tokens have 1e-9."""
    table = torch.full((len(rows), vocab), 1e-9)
    for i, row in enumerate(rows):
        for token, probability in row.items():
            table[i, token] = probability
    return table.log()


def test_by_hand() -> None:
    """Width 2, 0 ends: what ends among the two best is kept, further down it is not."""
    beams = BeamSearch(2, eos_ids=[0], max_tokens=3)
    first = beams.step(log_probs({1: 0.5, 0: 0.3, 2: 0.15, 3: 0.05}))
    assert first.beams == [Beam(0, 1), Beam(0, 2)]
    (ended,) = first.finished
    assert (ended.token_ids, ended.reason) == ((0,), "stop")
    assert ended.score == pytest.approx(math.log(0.3))

    # Candidates: 1,4 (.3), 2,4 (.12), 1,0 (.1, third: not kept), 1,5 (.1)
    second = beams.step(log_probs({4: 0.6, 0: 0.2, 5: 0.2}, {4: 0.8, 0: 0.2}))
    assert second.beams == [Beam(0, 4), Beam(1, 4)]
    assert second.finished == []

    third = beams.step(log_probs({4: 0.5, 3: 0.5}, {4: 0.9}))
    assert third.beams == []
    assert beams.done
    assert [h.token_ids for h in beams.hypotheses] == [(1, 4, 3), (1, 4, 4)]
    assert [h.reason for h in beams.hypotheses] == ["length", "length"]
    assert third.finished == beams.hypotheses
    assert beams.hypotheses[0].score == pytest.approx(math.log(0.5 * 0.6 * 0.5) / 3)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "steps"),
    [(True, 1.0, 2), (False, 1.0, 3), ("never", 1.0, 4), (False, 0.0, 3), ("never", 0.0, 3)],
)
def test_when_a_search_is_over(early_stopping: Any, length_penalty: float, steps: int) -> None:
    """Width 2. After two steps two hypotheses are there, the worse with p = .3 x .4 = .12: its score
    is ln .12 / 2 = -1.06. The best live beam has p = .18, then .036, then .0018: at its own length
    -.86, -1.11; at the full 5 tokens -.34, -.66, -1.26; summed (penalty 0) -1.71, -3.32 against
    ln .12 = -2.12.
    """
    beams = BeamSearch(
        2,
        eos_ids=[0],
        max_tokens=5,
        early_stopping=early_stopping,
        length_penalty=length_penalty,
    )
    steps_to_come = [
        log_probs({0: 0.5, 1: 0.3, 2: 0.2}),
        log_probs({0: 0.4, 3: 0.6}, {3: 0.5, 4: 0.5}),
        log_probs({5: 0.2}, {5: 0.01}),
        log_probs({5: 0.05}, {5: 0.01}),
    ]
    taken = 0
    while not beams.done:
        beams.step(steps_to_come[taken])
        taken += 1
    assert taken == steps
    assert [h.token_ids for h in beams.hypotheses] == [(0,), (1, 0)]


def test_ties_go_to_the_lowest_beam_and_token() -> None:
    beams = BeamSearch(3, eos_ids=[], max_tokens=4)
    flat = torch.full((1, 40), 1 / 40).log()
    assert beams.step(flat).beams == [Beam(0, 0), Beam(0, 1), Beam(0, 2)]
    assert beams.step(flat.repeat(3, 1)).beams == [Beam(0, 0), Beam(0, 1), Beam(0, 2)]


def test_a_wide_beam_is_an_exhaustive_search() -> None:
    """Width 27 over 3 tokens and 3 steps keeps everything: the best is the best of all."""
    table = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    beams = BeamSearch(27, eos_ids=[], max_tokens=3, length_penalty=0.0)
    live: list[list[int]] = [[]]
    for step in range(3):
        rows = torch.stack([table[step, tokens[-1] if tokens else 0] for tokens in live])
        outcome = beams.step(rows)
        live = [[*live[beam.parent], beam.token_id] for beam in outcome.beams]
    totals = {
        (a, b, c): (table[0, 0, a] + table[1, a, b] + table[2, b, c]).item()
        for a, b, c in itertools.product(range(3), repeat=3)
    }
    expected = sorted(totals, key=lambda tokens: -totals[tokens])
    assert [h.token_ids for h in beams.hypotheses] == expected


def test_enough_beams_go_on_whatever_ends() -> None:
    """Three end tokens are the best three of each beam: width 2 looks at eight candidates."""
    beams = BeamSearch(2, eos_ids=[0, 1, 2], max_tokens=4, early_stopping="never")
    ends = {0: 0.3, 1: 0.25, 2: 0.2}
    first = beams.step(log_probs({**ends, 3: 0.15, 4: 0.1}))
    assert first.beams == [Beam(0, 3), Beam(0, 4)]
    assert [h.token_ids for h in first.finished] == [(0,), (1,)]
    row = {**ends, 3: 0.19, 4: 0.06}
    assert beams.step(log_probs(row, row)).beams == [Beam(0, 3), Beam(1, 3)]


def test_fewer_tokens_than_beams() -> None:
    beams = BeamSearch(4, eos_ids=[2], max_tokens=2)
    outcome = beams.step(torch.tensor([[0.5, 0.5, 0.0]]).log())
    assert outcome.beams == [Beam(0, 0), Beam(0, 1)]  # a probability of 0 is no candidate
    beams.step(torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]]).log())
    assert [len(h.token_ids) for h in beams.hypotheses] == [2] * 4


def test_errors_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"width is 0, max_tokens is 5, both must be at least 1"):
        BeamSearch(0, eos_ids=[], max_tokens=5)
    with pytest.raises(ValueError, match=r"no token has a finite log-probability"):
        BeamSearch(2, eos_ids=[], max_tokens=5).step(torch.full((1, 9), math.nan))
