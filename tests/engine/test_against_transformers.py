"""What transformers makes of the same weights: greedy text, log-probabilities, chat."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from gpu_backend.llm import LLM
from gpu_backend.sampling import SamplingParams
from tests.engine.conftest import LoadedModel
from tests.engine.helpers import VOCAB, Driven, as_transformers, make_engine, sure_model

STARTS = """
The capital of France is
Once upon a time there was a
def fibonacci(n):
Water boils at a temperature of
The three primary colours are
Dear Sir or Madam,
1, 2, 3, 4,
The opposite of hot is
My favourite food is
In 1969, people first
SELECT name FROM users WHERE
The largest planet is
To be or not to be,
import numpy as np
A triangle has
The quick brown fox
Shakespeare wrote
E = mc^2 means
She opened the door and
The recipe needs flour,
<html><body>
The sun rises in the
A haiku about autumn:
Bonjour, je m'appelle
5 + 7 =
Photosynthesis is
The meaning of life is
Roses are red,
For sale: baby shoes,
Question: What is DNA? Answer:
In the beginning
The stock market fell because
# Shopping list
Python is a language that
Ice is lighter than
The train leaves at
An apple a day
Die Hauptstadt von Deutschland
It was a dark and
The mitochondria is
To reverse a string,
Abraham Lincoln was
Gold has the symbol
Two plus two
The doctor said that
On Monday we will
If x > 0 then
The French Revolution
A good teacher
Finally, I would like
""".strip().splitlines()


@pytest.fixture(scope="module")
def theirs(smollm2: LoadedModel) -> Any:
    return as_transformers(smollm2.model)


def test_greedy_text_of_fifty_prompts(smollm2: LoadedModel, theirs: Any) -> None:
    """Fifty prompts at once here, in chunks and out of one pool; there each by itself in one forward
    pass over its whole text. What a greedy search gives is the one text whose every token is the
    most likely after those before it: that is looked at, and that the next best is further away than
    rounding reaches.
    """
    assert len(STARTS) == len(set(STARTS)) == 50
    tokenizer = smollm2.tokenizer
    engine = make_engine(
        260,
        16,
        model=smollm2.model,
        tokenizer=tokenizer,
        eos_ids=tokenizer.eos_token_ids,
        max_model_len=128,
        max_num_batched_tokens=96,
        max_num_seqs=50,
    )
    prompts = [tokenizer.encode(start) for start in STARTS]
    for number, prompt in enumerate(prompts):
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=6), str(number))
    driven = Driven(engine).drain()
    for number, prompt in enumerate(prompts):
        result = driven.results[str(number)]
        (output,) = result.outputs
        whole = torch.tensor([[*prompt, *output.token_ids]])
        with torch.inference_mode():
            logits = theirs(whole[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
        best = logits.topk(2)
        assert best.indices[:, 0].tolist() == output.token_ids, STARTS[number]
        assert (best.values[:, 0] - best.values[:, 1]).min() > 1e-3
        ended = output.token_ids[-1] in tokenizer.eos_token_ids
        assert output.finish_reason == ("stop" if ended else "length")
        assert len(output.token_ids) == 6 or ended
        assert tokenizer.decode(prompt) + output.text == tokenizer.decode(
            [*prompt, *output.token_ids]
        )
    assert driven.results["0"].text.startswith(" Paris")


def test_the_chat_is_what_generate_gives(smollm2: LoadedModel, theirs: Any) -> None:
    """The whole way once: chat template, bf16 off, ``LLM.chat``, against ``generate``."""
    llm = LLM("smollm2", dtype="fp32", device="cpu", num_blocks=20, max_num_batched_tokens=32)
    messages = [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "What is the capital of Italy?"},
    ]
    result = llm.chat(messages, SamplingParams(temperature=0, max_tokens=12))
    prompt = smollm2.tokenizer.decode(result.prompt_ids, skip_special_tokens=False)
    assert prompt == (
        "<|im_start|>system\nYou answer in one word.<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = torch.tensor([result.prompt_ids])
    (end,) = {smollm2.tokenizer.backend.token_to_id("<|im_end|>")}
    with torch.inference_mode():
        found = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=end,
            pad_token_id=end,
        )
    want = found[0, ids.shape[1] :].tolist()
    assert result.outputs[0].token_ids == want
    assert result.text == smollm2.tokenizer.decode(want)
    assert "Rome" in result.text


def test_log_probabilities() -> None:
    """Of prompt and output tokens: log_softmax of transformers' logits, in chunks or at once."""
    model = sure_model()
    theirs = as_transformers(model)
    prompt = [random.Random(1).randrange(VOCAB) for _ in range(30)]
    params = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=3, logprobs=VOCAB + 5
    )
    for budget in (7, 512):
        engine = make_engine(max_num_batched_tokens=budget)
        engine.add(prompt, params, "a")
        result = Driven(engine).drain().results["a"]
        (output,) = result.outputs
        whole = [*prompt, *output.token_ids]
        with torch.inference_mode():
            want = theirs(torch.tensor([whole])).logits[0].float().log_softmax(-1)
        assert result.prompt_logprobs is not None
        assert output.logprobs is not None
        reports = [*result.prompt_logprobs, *output.logprobs]
        assert reports[0] is None
        for position, (token, report) in enumerate(zip(whole, reports, strict=True)):
            if report is None:
                assert position == 0
                continue
            row = want[position - 1]
            assert next(iter(report)) == token
            for candidate, (logprob, rank) in report.items():
                assert logprob == pytest.approx(row[candidate].item(), abs=1e-4)
                assert rank == int((row >= row[candidate]).sum())
            most = 3 if position < len(prompt) else VOCAB
            best = row.topk(most).indices.tolist()
            assert set(report) == {token, *best}
