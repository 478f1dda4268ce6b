"""What the engine's tests share: a model whose tokens are sure, a vocabulary that reads as text, and
a driver that checks everything after every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import pytest
import torch

from blockmanager.manager import BlockManager
from gpu_backend.attention.select import choose
from gpu_backend.config import ModelConfig, RopeConfig
from gpu_backend.engine import Engine, Step
from gpu_backend.executor import Executor
from gpu_backend.kv_cache import KVCache
from gpu_backend.model import Decoder
from gpu_backend.outputs import Logprobs, Output, Piece, RequestOutput
from gpu_backend.sampling import SamplingParams
from gpu_backend.tokenizer import Tokenizer
from gpu_backend.weights import load_model
from scheduler.config import SchedulerConfig
from scheduler.plan import StepOutcome, StepPlan, StepResult
from scheduler.policies import load_policy
from scheduler.scheduler import Scheduler

VOCAB = 40
EOS = 0
MAX_MODEL_LEN = 256
_SHARPER = 4.0


@cache
def sure_model(seed: int = 1) -> Decoder:
    """Two layers in float32 with a vocabulary of 40 and logits four times as large as random ones.

    Batches of another shape round differently, by some 1e-6; a token could only change where the
    best two are as close. With so few tokens they are 1e-3 and more apart (``test_the_model_is_sure``
    measures it), so that every difference that the tests see is a fault.
    """
    config = ModelConfig(
        name="sure",
        num_layers=2,
        hidden_size=32,
        intermediate_size=48,
        vocab_size=VOCAB,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_model_len=MAX_MODEL_LEN,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10_000.0),
        windows=(None, None),
    )
    model = load_model(config, dtype=torch.float32, seed=seed)
    assert model.lm_head.weight is not None
    model.lm_head.weight.mul_(_SHARPER)
    return model


class Letters:
    """The least of a tokenizer: 0 ends an output, 1 to 26 are letters, 27 and 28 the two bytes of an é,
    the rest pairs of letters."""

    eos_token_ids = (EOS,)
    special_ids = frozenset({EOS})
    _WORDS: Seq[bytes] = (
        b"",
        *(bytes([97 + i]) for i in range(26)),
        *(b"\xc3", b"\xa9"),
        *(b"th", b"he", b"in", b"er", b"an", b"re", b"on", b"at", b"en", b"nd", b"ti"),
    )

    def decode(self, token_ids: Seq[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self._WORDS[i] for i in token_ids).decode(errors="replace")


LETTERS = cast(Tokenizer, Letters())


def make_engine(
    num_blocks: int = 200,
    block_size: int = 4,
    *,
    model: Decoder | None = None,
    attention: str = "cpu",
    tokenizer: Tokenizer | None = LETTERS,
    eos_ids: Seq[int] = (EOS,),
    enable_prefix_caching: bool = True,
    watermark_blocks: int = 0,
    num_swap_blocks: int = 0,
    policy: str = "fcfs",
    tell_tokens: bool = True,
    seed: int = 0,
    scheduler_class: type[Scheduler] = Scheduler,
    **config: Any,
) -> Engine:
    """An engine of its own over ``sure_model``; ``config`` goes to ``SchedulerConfig``.

    Its KV memory starts as NaN: what is read without having been written shows.
    """
    model = model or sure_model()
    shape = model.config
    kv = KVCache(
        shape.num_layers,
        num_blocks,
        block_size,
        shape.num_kv_heads,
        shape.head_dim,
        torch.float32,
        "cpu",
        num_host_blocks=num_swap_blocks,
    )
    kv.pool.fill_(torch.nan)
    blocks = BlockManager(
        num_blocks,
        block_size,
        enable_prefix_caching=enable_prefix_caching,
        watermark_blocks=watermark_blocks,
        num_swap_blocks=num_swap_blocks,
    )
    config.setdefault("max_model_len", shape.max_model_len)
    scheduler = scheduler_class(SchedulerConfig(**config), blocks, load_policy(policy))
    return Engine(
        Executor(model, kv, choose("cpu", attention)),
        scheduler,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        seed=seed,
        tell_tokens=tell_tokens,
    )


@dataclass
class Driven:
    """Steps an engine and keeps what came of it; the scheduler checks itself after every step."""

    engine: Engine
    results: dict[str, RequestOutput] = field(default_factory=dict)
    pieces: dict[tuple[str, int], list[Piece]] = field(default_factory=lambda: defaultdict(list))
    steps: list[Step] = field(default_factory=list)
    num_withheld: int = 0
    """Times that a beam had to wait for others of its search."""

    def __post_init__(self) -> None:
        update = self.engine.scheduler.update

        def counted(plan: StepPlan, result: StepResult) -> StepOutcome:
            self.num_withheld += len(result.withheld)
            return update(plan, result)

        self.engine.scheduler.update = counted  # type: ignore[method-assign]

    def step(self) -> Step:
        step = self.engine.step()
        self.engine.scheduler.check()
        self.steps.append(step)
        self._note(step.progress.pieces, step.progress.finished)
        return step

    def abort(self, request_id: str) -> None:
        progress = self.engine.abort(request_id)
        self.engine.scheduler.check()
        self._note(progress.pieces, progress.finished)

    def expire(self, now_ns: int) -> None:
        progress = self.engine.expire(now_ns)
        self.engine.scheduler.check()
        self._note(progress.pieces, progress.finished)

    def _note(self, pieces: Seq[Piece], finished: Seq[RequestOutput]) -> None:
        for piece in pieces:
            self.pieces[piece.request_id, piece.index].append(piece)
        for result in finished:
            assert result.request_id not in self.results, "a request ends twice"
            self.results[result.request_id] = result

    def until(self, holds: Callable[[], bool], most_steps: int = 500) -> Driven:
        for _ in range(most_steps):
            if holds():
                return self
            self.step()
        raise AssertionError(f"did not come about in {most_steps} steps")

    def drain(self, most_steps: int = 3000) -> Driven:
        """Step until nothing is left, and then nothing may be left behind."""
        self.until(lambda: not self.engine.num_unfinished, most_steps)
        assert_nothing_left(self.engine)
        for result in self.results.values():
            if result.error is None:  # a step that failed may have sampled what it never told
                for output in result.outputs:
                    assert_pieces_add_up(self.pieces[result.request_id, output.index], output)
        return self

    @property
    def num_preempted(self) -> int:
        return sum(len(step.plan.preempted) for step in self.steps)

    @property
    def num_copies(self) -> int:
        return sum(len(step.plan.copies) for step in self.steps)

    @property
    def num_swapped_in(self) -> int:
        return sum(len(step.plan.swapped_in) for step in self.steps)

    @property
    def num_hits(self) -> int:
        return sum(len(a.hit_blocks) for step in self.steps for a in step.plan.admitted)


def assert_nothing_left(engine: Engine) -> None:
    scheduler = engine.scheduler
    scheduler.check()
    assert engine.num_unfinished == scheduler.num_unfinished == 0
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    host = scheduler.blocks.host_pool
    assert host is None or host.num_free == host.num_blocks
    assert scheduler.num_free_slots == scheduler.config.max_num_seqs


def assert_pieces_add_up(pieces: Seq[Piece], output: Output) -> None:
    """What was streamed is what the output holds, each token once, and only the last piece ends it."""
    assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
    assert "".join(piece.text for piece in pieces) == output.text
    if output.logprobs is not None:
        assert [report for piece in pieces for report in piece.logprobs] == output.logprobs
    if pieces:
        reasons = [piece.finish_reason for piece in pieces]
        assert reasons == [None] * (len(reasons) - 1) + [output.finish_reason]


def alone(prompt: Seq[int], params: SamplingParams, **options: Any) -> RequestOutput:
    """The request by itself, with all the memory and budget it could want, by plain attention."""
    engine = make_engine(400, 16, attention="reference", enable_prefix_caching=False, **options)
    engine.add(prompt, params, "alone")
    driven = Driven(engine).drain()
    assert not driven.num_preempted
    return driven.results["alone"]


def assert_same(got: RequestOutput, want: RequestOutput) -> None:
    assert got.error == want.error
    assert len(got.outputs) == len(want.outputs)
    for ours, theirs in zip(got.outputs, want.outputs, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.text, ours.finish_reason, ours.stop) == (
            theirs.text,
            theirs.finish_reason,
            theirs.stop,
        )
        assert ours.sum_logprob == pytest.approx(theirs.sum_logprob, abs=1e-3)
        assert_close(ours.logprobs, theirs.logprobs)
        assert ours.logprobs is None or len(ours.logprobs) == len(ours.token_ids)
    assert_close(got.prompt_logprobs, want.prompt_logprobs)


def assert_close(
    got: Seq[Logprobs | None] | None, want: Seq[Logprobs | None] | None, tolerance: float = 1e-4
) -> None:
    assert (got is None) == (want is None)
    for ours, theirs in zip(got or (), want or (), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None:
            continue
        assert list(ours) == list(theirs)
        for token, entry in theirs.items():
            assert ours[token].rank == entry.rank
            assert ours[token].logprob == pytest.approx(entry.logprob, abs=tolerance)


def as_transformers(model: Decoder) -> Any:
    """The same weights in transformers' ``LlamaForCausalLM`` (plain rotary embedding only)."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    shape = model.config
    assert shape.rope.kind == "default"
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_model_len,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
        tie_word_embeddings=shape.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with no_init_weights():  # they are all replaced
        theirs: Any = LlamaForCausalLM(config)
    weights = dict(model.named_weights())
    if shape.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    theirs.load_state_dict(weights)
    return theirs.eval()


def generate_with_beams(
    theirs: Any, prompt: Seq[int], params: SamplingParams, eos_ids: Seq[int]
) -> list[tuple[list[int], float]]:
    """What transformers' beam search gives for ``params``: tokens and score of its n best."""
    from transformers import GenerationConfig

    stops = [*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)]
    ids = torch.tensor([list(prompt)])
    settings: Any = GenerationConfig
    config = settings(
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=stops or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    with torch.inference_mode():
        found = theirs.generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))
    outputs = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        outputs.append((tokens[:end], score))
    return outputs
