"""The loop: schedule, execute, sample, update. One scheduler, one model, no clock of its own.

Which sequences run, and on which blocks, is the scheduler's business; tensors are the executor's. What
is kept here is what a client is owed: tokens, text, log-probabilities (``_Stream``), and the requests
that they belong to (``_Live``). None of it is touched by a preemption.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blockmanager.content import Content, TokenContent
from gpu_backend.beam import BeamSearch
from gpu_backend.detokenize import Detokenizer
from gpu_backend.executor import Executor
from gpu_backend.outputs import Logprobs, Output, Piece, RequestOutput
from gpu_backend.sampler import Sampler, SamplerState, derive_seed, gather_logprobs
from gpu_backend.sampling import SamplingParams
from gpu_backend.tokenizer import Tokenizer
from scheduler.plan import Finished, StepOutcome, StepPlan, StepResult, Stop
from scheduler.request import Request
from scheduler.scheduler import RequestRefusedError, Scheduler
from scheduler.sequence import Sequence

_LOGPROB_ROWS = 256
"""Prompt tokens at a time whose logits are there at once."""
_MOST_STALLED_STEPS = 2
"""Steps in which nobody got on, one after another, until something is done about it."""


class RequestError(ValueError):
    """A request that cannot be served; one line. The others go on."""


class Progress(NamedTuple):
    """What came of the requests."""

    pieces: list[Piece]
    finished: list[RequestOutput]
    """Requests whose last output has ended."""
    ended: list[Finished]
    """Sequences that ended otherwise than by their step's result: aborted, timed out, failed."""


class Step(NamedTuple):
    """What one step was."""

    plan: StepPlan
    num_running: int
    """Sequences that run once the plan is made."""
    outcome: StepOutcome
    progress: Progress
    start_ns: int
    """On the clock of ``time.perf_counter_ns``."""
    duration_ns: int
    """Of all of it: schedule, forward pass, sampling, update."""


class _Child(NamedTuple):
    parent: Sequence
    number: int
    """Which of the sequences that the parent goes on as, from 0 (itself)."""


@dataclass(slots=True, eq=False)
class _Stream:
    """An output under way."""

    output: Output
    state: SamplerState
    detokenizer: Detokenizer | None
    tokens: npt.NDArray[np.int64]
    """Prompt and outputs, with room to grow."""
    num_tokens: int

    @property
    def known(self) -> npt.NDArray[np.int64]:
        return self.tokens[: self.num_tokens]

    def append(self, token_id: int) -> None:
        if self.num_tokens == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)])
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        self.state.append(token_id)
        self.output.token_ids.append(token_id)


@dataclass(slots=True, eq=False)
class _Live:
    """A request under way."""

    request: Request
    params: SamplingParams
    result: RequestOutput
    seed: int
    forced_tokens: int | None
    """Length at which its outputs end, whatever they say; ``None`` = they say it."""
    answer_ids: list[int] | None = None
    """What its output says, whatever the model would; ``None`` = what is sampled."""
    streams: dict[Sequence, _Stream] = field(default_factory=dict)
    """Of its outputs that have not ended."""
    search: BeamSearch | None = None
    beams: list[Sequence] = field(default_factory=list)
    """Sequences of the search's live beams, in its order."""
    next_beams: list[_Child] = field(default_factory=list)
    """The same after the step that is under way."""
    was_requeued: bool = False
    """Since its beams last got on."""


class _Sampled(NamedTuple):
    """A token for each row of logits, and whose it is."""

    position: int
    """Of the sequence in the plan."""
    stream: _Stream
    sample: int
    """Which of the sequence's first tokens, where it forks in this step."""
    token: int
    logprobs: Logprobs | None


class _Ran(NamedTuple):
    """A step before the scheduler knows of it."""

    result: StepResult
    sampled: list[_Sampled]
    texts: list[str]
    """What each of ``sampled`` adds to what can be shown."""


class Engine:
    """Serves token ids; ``llm.LLM`` adds text.

    Parameters
    ----------
    executor
        The model and its memory.
    scheduler
        Over a block manager of no more blocks than the executor's pool has.
    tokenizer
        For stop strings and for text; ``None`` = token ids only.
    eos_ids
        Tokens that end an output.
    seed
        Requests without a seed draw theirs from it and their number.
    tell_tokens
        Whether the scheduler learns what was sampled, for its prefix cache. False where a trace is
        replayed: its outputs stand for others, whose tokens nobody knows.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        tokenizer: Tokenizer | None = None,
        eos_ids: Seq[int] = (),
        seed: int = 0,
        tell_tokens: bool = True,
    ) -> None:
        cache, blocks = executor.cache, scheduler.blocks
        assert blocks.num_blocks <= cache.num_blocks, "blocks without memory"
        assert blocks.block_size == cache.block_size, "blocks of another size"
        host_blocks = blocks.host_pool.num_blocks if blocks.host_pool else 0
        assert host_blocks <= cache.num_host_blocks, "host blocks without memory"
        self.executor, self.scheduler, self.tokenizer = executor, scheduler, tokenizer
        self._eos_ids = tuple(eos_ids)
        self._skip_ids = frozenset(eos_ids)
        if tokenizer is not None:
            self._skip_ids |= tokenizer.special_ids
        self._seed = seed
        self._tell_tokens = tell_tokens
        self._sampler = Sampler()
        self._live: dict[str, _Live] = {}
        self._last_tokens = np.zeros(scheduler.arrays.capacity, np.int64)
        """By row of the scheduler's arrays: all that decoding needs of the tokens."""
        self._num_added = 0
        self._num_stalled = 0
        self._progress = Progress([], [], [])

    # -- requests ----------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests under way."""
        return len(self._live)

    def add(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        arrival_ns: int = 0,
        deadline_ns: int | None = None,
    ) -> str:
        """Queue a prompt; returns the request's id (its number, where none is given).

        Raises ``RequestError`` for what could never be served; nothing has changed then.
        """
        request_id = str(self._num_added) if request_id is None else request_id
        ids = self._checked(request_id, prompt_ids)
        request = Request(
            id=request_id,
            arrival_ns=arrival_ns,
            num_prompt_tokens=len(ids),
            # Where logits of all prompt tokens are wanted, none may come from the prefix cache.
            content=None if params.prompt_logprobs is not None else TokenContent(ids),
            max_tokens=params.max_tokens,
            n=params.beam_width or params.n,
            priority=priority,
            deadline_ns=deadline_ns,
        )
        return self.add_request(request, ids, params)

    def add_request(
        self,
        request: Request,
        prompt_ids: Seq[int] | npt.NDArray[np.int64],
        params: SamplingParams,
        *,
        forced_tokens: int | None = None,
        answer_ids: list[int] | None = None,
        transcript: Content | None = None,
    ) -> str:
        """The same for a request that is made already, as a trace has it.

        Parameters
        ----------
        forced_tokens : length at which each of its outputs ends.
        answer_ids : what its one output says, whatever the model would.
        transcript : identity of its prompt and of that answer, see ``Scheduler.add``.

        Raises
        ------
        RequestError
            As above, and where an answer cannot be forced with these parameters.
        """
        ids = self._checked(request.id, prompt_ids)
        if answer_ids is not None or transcript is not None:
            forced_tokens = len(self._known_answer(request, params, answer_ids, forced_tokens))
        if params.stop and self.tokenizer is None:
            raise RequestError(f"request {request.id}: stop strings need a tokenizer")
        if params.beam_width is not None and (reason := self._no_beams()):
            raise RequestError(f"request {request.id}: {reason}")
        if request.id in self._live:
            raise RequestError(f"request {request.id}: its id is in use by an unfinished request")
        try:
            sequences = self.scheduler.add(request, transcript)
        except RequestRefusedError as error:
            raise RequestError(f"request {request.id}: {error.reason}") from None
        except ValueError as error:  # a transcript of less than the prompt
            raise RequestError(str(error)) from None
        seed = params.seed
        if seed is None:
            seed = derive_seed(self._seed, self._num_added)
        self._num_added += 1
        result = RequestOutput(request.id, ids.tolist(), [])
        if params.prompt_logprobs is not None:
            result.prompt_logprobs = [None] * len(ids)
        live = _Live(request, params, result, seed, forced_tokens, answer_ids)
        self._live[request.id] = live
        if params.beam_width is not None:
            live.search = self._new_search(live, params.beam_width)
            live.beams = sequences
        for index, sequence in enumerate(sequences):
            self._track(live, sequence, self._new_stream(live, index, ids))
        return request.id

    def _known_answer(
        self,
        request: Request,
        params: SamplingParams,
        answer_ids: list[int] | None,
        forced_tokens: int | None,
    ) -> npt.NDArray[np.int64]:
        if answer_ids is None:
            # Other tokens would be found again under the keys of these.
            raise RequestError(f"request {request.id}: a transcript needs answer_ids as well")
        if request.n > 1 or params.beam_width is not None or params.logprobs is not None:
            raise RequestError(
                f"request {request.id}: answer_ids need one output, no beam search and no logprobs"
            )
        answer = self._checked(request.id, answer_ids, "answer")
        if forced_tokens not in (None, len(answer)):
            raise RequestError(
                f"request {request.id}: forced_tokens is {forced_tokens}, its answer has {len(answer)}"
            )
        return answer

    def _no_beams(self) -> str | None:
        """Why no beam search can be served with these settings."""
        config = self.scheduler.config
        if config.parallel_sampling == "separate":
            return "a beam search needs parallel_sampling 'fork', it is 'separate'"
        if config.max_num_batched_tokens < config.max_num_seqs:
            # With less, those at the end of the list might never be computed beside the others.
            return (
                f"a beam search needs max_num_batched_tokens of at least max_num_seqs "
                f"({config.max_num_seqs}), it is {config.max_num_batched_tokens}"
            )
        return None

    def _checked(
        self, request_id: str, token_ids: Seq[int] | npt.NDArray[np.int64], what: str = "prompt"
    ) -> npt.NDArray[np.int64]:
        vocab = self.executor.model.config.vocab_size
        try:
            ids = np.asarray(token_ids)
        except ValueError:  # lists of several lengths
            ids = np.zeros((0, 0))
        if ids.shape == (0,):
            raise RequestError(f"request {request_id}: its {what} has no tokens, must have some")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError(f"request {request_id}: its {what} is no list of token ids")
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab))
        if len(wrong):
            raise RequestError(
                f"request {request_id}: token {wrong[0]} of its {what} is {ids[wrong[0]]}, must be "
                f"from 0 to {vocab - 1}"
            )
        return ids.astype(np.int64)

    def _new_search(self, live: _Live, width: int) -> BeamSearch:
        params = live.params
        room = self.scheduler.config.max_model_len - len(live.result.prompt_ids)
        return BeamSearch(
            width,
            eos_ids={*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids)},
            max_tokens=min(params.max_tokens or room, room),
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )

    def _new_stream(self, live: _Live, index: int, tokens: npt.NDArray[np.int64]) -> _Stream:
        """An output without tokens; ``tokens`` are the prompt's."""
        params, prompt_ids = live.params, live.result.prompt_ids
        output = Output(index, logprobs=None if params.logprobs is None else [])
        if live.search is None:
            live.result.outputs.append(output)
        state = SamplerState(params, prompt_ids, seed=live.seed, eos_ids=self._eos_ids)
        state.sample = index
        detokenizer = None
        if self.tokenizer is not None and live.search is None:
            detokenizer = Detokenizer(
                self._decode,
                prompt_ids=prompt_ids,
                skip_ids=self._skip_ids,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        return _Stream(output, state, detokenizer, tokens.copy(), len(tokens))

    def _decode(self, token_ids: list[int]) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _track(self, live: _Live, sequence: Sequence, stream: _Stream) -> None:
        missing = self.scheduler.arrays.capacity - len(self._last_tokens)
        if missing > 0:
            self._last_tokens = np.pad(self._last_tokens, (0, missing))
        live.streams[sequence] = stream
        self._last_tokens[sequence.row] = stream.known[-1]

    def sequences_of(self, request_id: str) -> list[Sequence]:
        """Those of its outputs that have not ended."""
        return list(self._live[request_id].streams)

    def abort(self, request_id: str) -> Progress:
        """End a request wherever it is; its blocks are free at once. An unknown id is none of ours:
        it may have just ended."""
        self._end(self.scheduler.abort(request_id))
        return self._take_progress()

    def expire(self, now_ns: int) -> Progress:
        """End the requests whose deadline has come."""
        self._end(self.scheduler.expire(now_ns))
        return self._take_progress()

    def _take_progress(self) -> Progress:
        progress, self._progress = self._progress, Progress([], [], [])
        return progress

    # -- a step ------------------------------------------------------------------------------

    def step(self) -> Step:
        """Let everybody get on by what fits into one forward pass. The plan is empty where nobody can
        compute now.

        Raises what the model raises (or a ``KeyboardInterrupt``): the requests of the step have ended
        then, which the next call tells; all others go on.
        """
        start_ns = perf_counter_ns()
        plan = self.scheduler.schedule()
        num_running = len(self.scheduler.running)
        try:
            ran = self._run(plan, start_ns)
        except BaseException:
            # Whatever it was: who was in this step has lost it, and no block may stay behind.
            self._abandon(plan)
            raise
        outcome = self.scheduler.update(plan, ran.result)
        self._follow(plan, outcome, ran.sampled, ran.result.branches)
        self._tell(plan, outcome, ran.sampled, ran.texts)
        self._watch_for_stall(plan, ran.result.withheld, outcome)
        progress = self._take_progress()
        return Step(plan, num_running, outcome, progress, start_ns, perf_counter_ns() - start_ns)

    def _run(self, plan: StepPlan, start_ns: int) -> _Ran:
        if not plan:
            self.executor.move_memory(plan)
            return _Ran(StepResult(0), [], [])
        sampled, log_probs = self._forward(plan)
        branches, withheld = self._choose_beams(plan, log_probs)
        token_ids: list[list[int]] = [[] for _ in plan.sequences]
        stops = []
        texts = []
        for entry in sampled:
            token_ids[entry.position].append(entry.token)
            is_stop, text = self._take_in(plan.sequences[entry.position], entry)
            texts.append(text)
            if is_stop:
                stops.append(Stop(entry.position, entry.sample))
        result = StepResult(
            max(perf_counter_ns() - start_ns, 1),
            token_ids=token_ids if self._tell_tokens else None,
            stops=stops,
            branches=branches,
            withheld=withheld,
        )
        return _Ran(result, sampled, texts)

    def _abandon(self, plan: StepPlan) -> None:
        finished = self.scheduler.abandon(plan)
        for request_id in {entry.sequence.request.id for entry in finished}:
            why = "the step that it was in failed"
            self._live[request_id].result.error = f"request {request_id}: {why}"
        self._end(finished)

    def _forward(self, plan: StepPlan) -> tuple[list[_Sampled], Mapping[int, torch.Tensor]]:
        """What everybody sampled, and the log-probabilities ``[vocab]`` of beams by position. Rows whose
        logits are no numbers end their requests here."""
        wanted = [
            position
            for position, sequence in enumerate(plan.sequences)
            if self._live[sequence.request.id].result.prompt_logprobs is not None
            and plan.computed_before[position] < sequence.num_prompt_tokens
        ]
        forward = self.executor.run(plan, self._last_tokens, self._known_tokens, wanted)
        for position in wanted:
            self._note_prompt(plan, position, forward.prompt_hidden[position])

        rows: list[int] = []
        owners: list[_Sampled] = []
        beams: dict[int, int] = {}
        for row, position in enumerate(np.flatnonzero(plan.samples).tolist()):
            sequence = plan.sequences[position]
            live = self._live[sequence.request.id]
            if live.search is not None:
                beams[position] = row
                continue
            first = live.streams[sequence]
            for sample in range(sequence.slots):
                stream = first if sample == 0 else self._new_stream(live, sample, first.known)
                owners.append(_Sampled(position, stream, sample, 0, None))
                rows.append(row)
        logits, log_probs = forward.logits, {}
        if beams:
            found = torch.log_softmax(self._rows(logits, list(beams.values())), dim=-1)
            log_probs = dict(zip(beams, found.unbind(), strict=True))
        if not rows:
            self.executor.synchronize()  # or the next step would be charged with this one
            return [], log_probs
        output = self._sampler(self._rows(logits, rows), [entry.stream.state for entry in owners])
        tokens, logprobs = output.fetch()  # the step's one wait for the device
        sampled = []
        for i, (entry, token) in enumerate(zip(owners, tokens, strict=True)):
            if token is None:
                request_id = plan.sequences[entry.position].request.id
                self._fail(request_id, "its logits are no numbers (NaN or infinite)")
            else:
                forced = self._forced_token(plan.sequences[entry.position].request.id, entry.stream)
                token = token if forced is None else forced
                sampled.append(entry._replace(token=token, logprobs=logprobs.get(i)))
        # A request that failed in one of its rows has none.
        return [
            e for e in sampled if plan.sequences[e.position].request.id in self._live
        ], log_probs

    def _forced_token(self, request_id: str, stream: _Stream) -> int | None:
        live = self._live.get(request_id)  # none if it failed in another row of this step
        if live is None or live.answer_ids is None:
            return None
        return live.answer_ids[len(stream.output.token_ids)]

    @staticmethod
    def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        if rows == list(range(len(logits))):
            return logits
        return logits[torch.tensor(rows).to(logits.device, non_blocking=True)]

    def _known_tokens(self, sequence: Sequence) -> npt.NDArray[np.int64]:
        return self._live[sequence.request.id].streams[sequence].known

    def _note_prompt(self, plan: StepPlan, position: int, hidden: torch.Tensor) -> None:
        """Log-probabilities of prompt tokens have their place: what a preempted request computes again
        is set again."""
        live = self._live[plan.sequences[position].request.id]
        report, count = live.result.prompt_logprobs, live.params.prompt_logprobs
        assert report is not None
        assert count is not None
        first = int(plan.computed_before[position]) + 1  # what the first row of logits predicts
        end = min(first + len(hidden), len(live.result.prompt_ids))
        for start in range(first, end, _LOGPROB_ROWS):
            following = live.result.prompt_ids[start : min(start + _LOGPROB_ROWS, end)]
            logits = self.executor.model.logits(hidden[start - first :][: len(following)])
            found = gather_logprobs(logits, torch.tensor(following).to(logits.device), count)
            report[start : start + len(following)] = found.to_dicts([count] * len(following))

    def _take_in(self, sequence: Sequence, entry: _Sampled) -> tuple[bool, str]:
        """An output's next token; whether it ends the output, and the text that can be shown."""
        live = self._live[sequence.request.id]
        stream, token, params = entry.stream, entry.token, live.params
        stream.append(token)
        output = stream.output
        if output.logprobs is not None and entry.logprobs is not None:
            output.logprobs.append(entry.logprobs)
        if live.forced_tokens is not None:
            return len(output.token_ids) >= live.forced_tokens, ""
        if stream.state.is_stop(token):
            output.stop = token if token in params.stop_token_ids else None
            return True, ""
        if stream.detokenizer is None:
            return False, ""
        text = stream.detokenizer.push(token)
        if stream.detokenizer.stopped is not None:
            output.stop = stream.detokenizer.stopped.stop
        return stream.detokenizer.stopped is not None, text

    def _follow(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        sampled: Iterable[_Sampled],
        branches: Mapping[int, Seq[int]],
    ) -> None:
        """Give the sequences that came of a fork their outputs, and note everybody's last token."""
        children = {fork.parent: fork.children for fork in outcome.forked}
        for entry in sampled:
            sequence = plan.sequences[entry.position]
            if entry.sample:
                sequence = children[sequence][entry.sample - 1]
                self._track(self._live[sequence.request.id], sequence, entry.stream)
            self._last_tokens[sequence.row] = entry.token
        for position, tokens in branches.items():
            sequence = plan.sequences[position]
            live = self._live[sequence.request.id]
            parent = live.streams[sequence]
            family = [sequence, *children.get(sequence, ())]
            streams = [parent, *(self._copy(live, parent) for _ in tokens[1:])]
            # Nothing is left of a beam without a token: it is closed with the finished.
            for member, stream, token in zip(family, streams, tokens, strict=False):
                stream.append(token)
                self._track(live, member, stream)
        for live in self._requests_of(plan.sequences[position] for position in branches):
            live.beams = [
                [child.parent, *children.get(child.parent, ())][child.number]
                for child in live.next_beams
            ]

    def _copy(self, live: _Live, parent: _Stream) -> _Stream:
        child = self._new_stream(live, parent.output.index, parent.known)
        child.output.token_ids = list(parent.output.token_ids)
        return child

    def _tell(
        self, plan: StepPlan, outcome: StepOutcome, sampled: list[_Sampled], texts: list[str]
    ) -> None:
        """Pieces for the clients; who has ended is closed."""
        children = {fork.parent: fork.children for fork in outcome.forked}
        reasons = {entry.sequence: entry.reason for entry in outcome.finished}
        for entry, text in zip(sampled, texts, strict=True):
            sequence = plan.sequences[entry.position]
            if entry.sample:
                sequence = children[sequence][entry.sample - 1]
            reason = reasons.pop(sequence, None)
            if reason is not None and entry.stream.detokenizer is not None:
                text += entry.stream.detokenizer.finish()
            self._give(sequence, entry.stream, (entry.token,), text, entry.logprobs, reason)
        self._close([entry for entry in outcome.finished if entry.sequence in reasons])

    def _give(
        self,
        sequence: Sequence,
        stream: _Stream,
        tokens: tuple[int, ...],
        text: str,
        logprobs: Logprobs | None,
        reason: str | None,
    ) -> None:
        request_id, output = sequence.request.id, stream.output
        output.text += text
        output.finish_reason = reason
        given = () if logprobs is None else (logprobs,)
        self._progress.pieces.append(Piece(request_id, output.index, tokens, text, given, reason))
        if reason is not None:
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """An output has ended, and perhaps its request."""
        live = self._live[sequence.request.id]
        live.streams.pop(sequence)
        if sequence.index == 0:
            live.result.num_cached_tokens = sequence.num_cached_tokens
        if not live.streams:
            for output in live.result.outputs:  # forked, but in a step that failed
                output.finish_reason = output.finish_reason or "error"
            del self._live[sequence.request.id]
            self._progress.finished.append(live.result)

    def _end(self, finished: list[Finished]) -> None:
        """Sequences that something else than their step's result has ended."""
        self._progress.ended.extend(finished)
        self._close(finished)

    def _close(self, finished: Iterable[Finished]) -> None:
        """Sequences that ended without a token in this step."""
        for sequence, reason in finished:
            live = self._live.get(sequence.request.id)
            if live is None or sequence not in live.streams:
                continue
            if live.search is not None:
                self._close_beam(live, sequence, reason)
                continue
            stream = live.streams[sequence]
            text = stream.detokenizer.finish() if stream.detokenizer is not None else ""
            self._give(sequence, stream, (), text, None, reason)

    def _fail(self, request_id: str, why: str) -> None:
        if request_id in self._live:
            self._live[request_id].result.error = f"request {request_id}: {why}"
            self._end(self.scheduler.abort(request_id, "error"))

    # -- beam search -------------------------------------------------------------------------

    def _choose_beams(
        self, plan: StepPlan, log_probs: Mapping[int, torch.Tensor]
    ) -> tuple[dict[int, list[int]], list[int]]:
        """By which tokens each beam goes on (``branches``), and whose token has to wait until all beams
        of its search have got as far (``withheld``): a budget or a preemption may part them."""
        position_of = {plan.sequences[position]: position for position in log_probs}
        branches: dict[int, list[int]] = {}
        withheld: list[int] = []
        free_slots = self.scheduler.num_free_slots
        for live in self._requests_of(position_of):
            search = live.search
            assert search is not None
            positions = [position_of.get(beam) for beam in live.beams]
            present = [position for position in positions if position is not None]
            if len(present) < len(positions):
                withheld += present
                continue
            try:
                step = search.step(torch.stack([log_probs[position] for position in present]))
            except ValueError as error:
                self._fail(live.request.id, str(error))
                continue
            growth = len(step.beams) - sum(beam.slots for beam in live.beams)
            if growth > free_slots:  # a search that had shrunk, and whose slots others have taken
                before = self.scheduler.num_free_slots
                self._fail(live.request.id, "its beams find no sequence slots (max_num_seqs)")
                free_slots += self.scheduler.num_free_slots - before
                continue
            free_slots -= growth
            chosen: dict[int, list[int]] = {position: [] for position in present}
            live.next_beams = []
            for beam in step.beams:
                tokens = chosen[present[beam.parent]]
                live.next_beams.append(_Child(live.beams[beam.parent], len(tokens)))
                tokens.append(beam.token_id)
            branches |= chosen
            live.was_requeued = False
        return branches, withheld

    def _requests_of(self, sequences: Iterable[Sequence]) -> list[_Live]:
        """Each once, in the order in which they come."""
        ids = dict.fromkeys(sequence.request.id for sequence in sequences)
        return [self._live[request_id] for request_id in ids]

    def _close_beam(self, live: _Live, sequence: Sequence, reason: str) -> None:
        """A beam has ended: dropped by its search, or, before that was over, by something else."""
        del live.streams[sequence]
        if sequence.index == 0:
            live.result.num_cached_tokens = sequence.num_cached_tokens
        request_id, search = live.request.id, live.search
        assert search is not None
        if live.streams:
            if reason != "dropped":  # the search cannot go on without it
                self._end(self.scheduler.abort(request_id, reason))
            return
        best = search.hypotheses[: live.params.n]
        for index, found in enumerate(best):
            text = "" if self.tokenizer is None else self.tokenizer.decode(found.token_ids)
            # Of a search that was cut short these are the best so far.
            why = found.reason if search.done else reason
            output = Output(index, list(found.token_ids), text, finish_reason=why)
            output.sum_logprob = found.sum_logprob
            live.result.outputs.append(output)
        if not best:
            live.result.outputs.append(Output(0, finish_reason=reason))
        for output in live.result.outputs:
            self._progress.pieces.append(
                Piece(
                    request_id,
                    output.index,
                    tuple(output.token_ids),
                    output.text,
                    (),
                    output.finish_reason,
                )
            )
        del self._live[request_id]
        self._progress.finished.append(live.result)

    def _watch_for_stall(self, plan: StepPlan, withheld: Seq[int], outcome: StepOutcome) -> None:
        """Beams that hold the blocks that the others of their search wait for would wait for ever.

        Computed again they share more: preempted one by one they may have lost what they shared. A
        search that waits all the same asks for more than there is.
        """
        only_waits = withheld and len(withheld) == len(plan.sequences)
        got_on = not only_waits or plan.admitted or outcome.finished
        self._num_stalled = 0 if got_on else self._num_stalled + 1
        if self._num_stalled <= _MOST_STALLED_STEPS:
            return
        self._num_stalled = 0
        waiting = {plan.sequences[position].request.id for position in withheld}
        stuck = [live for request_id, live in self._live.items() if request_id in waiting]
        if all(live.was_requeued for live in stuck):
            self._end(self.scheduler.abort(stuck[-1].request.id, "kv_exhausted"))
            return
        self.scheduler.requeue([live.request.id for live in stuck])
        for live in stuck:
            live.was_requeued = True
