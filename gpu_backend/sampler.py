"""From logits to tokens.

The order is that of vLLM V1 (``vllm/v1/sample/sampler.py``):

1. log-probabilities, where asked for, from the raw logits (vLLM's default ``raw_logprobs``);
2. end-of-sequence and stop tokens masked while the output is shorter than ``min_tokens``;
3. repetition, then frequency, then presence penalty;
4. greedy rows: the largest logit;
5. the others: temperature, min-p, top-k, top-p (of what top-k left), then the draw.

Ties go to the lowest id everywhere. (vLLM's top-k keeps all tokens that tie with the k-th.)

**The draw** is Gumbel-max: the largest of logit + noise, the noise of a token being a hash of (seed,
sample, position in the output, token id). No generator has a state, so that a row draws the same
noise whoever shares its batch, and again after a preemption. The hash is SplitMix64 (Steele et al.,
OOPSLA 2014) in int64 tensor operations, which wrap alike on every device: the integers are the same
on CPU and CUDA, the noise up to the rounding of ``log``. Noise for each token, rather than one
number and the inverse of the summed distribution, because rounding in the logits (another batch
size, other chunks) then changes a draw about as seldom as it changes the distribution, while the
boundaries of a sum over a large vocabulary all shift.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_backend.sampling import SamplingParams

NO_TOKEN = -1
"""Stands in ``SamplerOutput.token_ids`` where a row has no largest finite logit."""

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_NUCLEUS_PREFIX = 1024
"""On the CPU top-p first looks at so many tokens: sorting a vocabulary costs eight times as much."""


class Logprob(NamedTuple):
    logprob: float
    rank: int
    """1 = most likely; of equally likely tokens outside the reported ones, the last."""


class LogprobTensors(NamedTuple):
    """Log-probabilities of L tokens, on the device."""

    token_ids: torch.Tensor
    """int64 ``[L, 1 + k]``: the token itself, then the k most likely."""
    logprobs: torch.Tensor
    """float32 ``[L, 1 + k]``."""
    ranks: torch.Tensor
    """int64 ``[L]``: how many tokens are at least as likely as the token itself."""

    def to_dicts(self, counts: Iterable[int]) -> list[dict[int, Logprob]]:
        """As vLLM reports them: for each token its own entry first, then (at most) the
        ``counts[i]`` most likely with ranks from 1. One copy from the device for each tensor."""
        reports = []
        columns = zip(*(tensor.tolist() for tensor in self), counts, strict=True)
        for token_ids, logprobs, own_rank, count in columns:
            report = {token_ids[0]: Logprob(logprobs[0], own_rank)}
            likely = zip(token_ids[1 : count + 1], logprobs[1 : count + 1], strict=True)
            for rank, (token_id, logprob) in enumerate(likely, start=1):
                report[token_id] = Logprob(logprob, rank)
            reports.append(report)
        return reports


class SamplerOutput(NamedTuple):
    """What a step sampled, on the device: nothing has waited for it yet."""

    token_ids: torch.Tensor
    """int64 ``[R]``; ``NO_TOKEN`` for a row whose logits hold NaN or +inf or are all -inf: that
    request has failed, the others have not."""
    logprobs: LogprobTensors | None
    """Of the rows in ``logprob_rows``; they mean nothing for a row without a token."""
    logprob_rows: tuple[int, ...]
    logprob_counts: tuple[int, ...]

    def tokens(self) -> list[int | None]:
        """Waits for the device; ``None`` for a row that failed."""
        return [None if token == NO_TOKEN else token for token in self.token_ids.tolist()]

    def fetch(self) -> tuple[list[int | None], dict[int, dict[int, Logprob]]]:
        """``tokens`` and ``logprob_dicts``, with one wait for the device for both."""
        if self.logprobs is None:
            return self.tokens(), {}
        # float64 holds ids, ranks and float32 exactly, so that one copy brings all of them over.
        parts = [self.token_ids, *self.logprobs]
        flat = torch.cat([part.double().flatten() for part in parts]).cpu()
        pieces = torch.split(flat, [part.numel() for part in parts])
        token_ids, ids, logprobs, ranks = (
            piece.view(part.shape).to(part.dtype) for piece, part in zip(pieces, parts, strict=True)
        )
        there = self._replace(token_ids=token_ids, logprobs=LogprobTensors(ids, logprobs, ranks))
        return there.tokens(), there.logprob_dicts()

    def logprob_dicts(self) -> dict[int, dict[int, Logprob]]:
        """Reports by row, of the rows that asked (also of rows that failed)."""
        if self.logprobs is None:
            return {}
        reports = self.logprobs.to_dicts(self.logprob_counts)
        return dict(zip(self.logprob_rows, reports, strict=True))


class SamplerState:
    """What the sampler remembers of one sequence, on the host.

    Only ``append`` changes it, once for each output token: a preemption and what is recomputed
    after it leave no trace.

    Parameters
    ----------
    prompt_ids
        Read only where there is a repetition penalty.
    seed
        That of the request, or ``derive_seed`` of the engine's.
    eos_ids
        The model's end-of-sequence tokens.
    """

    __slots__ = ("_counts", "eos_ids", "num_outputs", "params", "sample", "seed")

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        eos_ids: Iterable[int],
    ) -> None:
        self.params = params
        self.seed = seed
        self.eos_ids = frozenset(eos_ids)
        self.sample = 0
        """Which of the request's n outputs this is."""
        self.num_outputs = 0
        self._counts: _TokenCounts | None = None
        if params.has_penalties:
            self._counts = _TokenCounts()
            if params.repetition_penalty != 1:
                self._counts.add_prompt(prompt_ids)

    def append(self, token_id: int) -> None:
        """The sequence got ``token_id`` (sampled or forced)."""
        self.num_outputs += 1
        if self._counts is not None:
            self._counts.add_output(token_id)

    def fork(self, sample: int) -> SamplerState:
        """The state of another of the request's outputs, equal up to now."""
        child = SamplerState.__new__(SamplerState)
        child.params, child.seed, child.eos_ids = self.params, self.seed, self.eos_ids
        child.sample, child.num_outputs = sample, self.num_outputs
        child._counts = None if self._counts is None else self._counts.copy()
        return child

    def is_stop(self, token_id: int) -> bool:
        """Whether the output ends with this token."""
        if token_id in self.params.stop_token_ids:
            return True
        return token_id in self.eos_ids and not self.params.ignore_eos

    @property
    def masked_ids(self) -> frozenset[int]:
        """Tokens that may not be sampled now. As in vLLM, end-of-sequence tokens are masked before
        ``min_tokens`` also where ``ignore_eos`` is set."""
        if self.num_outputs >= self.params.min_tokens:
            return frozenset()
        return self.eos_ids.union(self.params.stop_token_ids)

    @property
    def counts(self) -> _TokenCounts | None:
        return self._counts

    @property
    def key(self) -> int:
        """Of the noise for the next token, 64 bits."""
        return _hash(self.seed, self.sample, self.num_outputs)


class _TokenCounts:
    """How often each token seen is in the output (0 = only in the prompt): room for the tokens seen,
    not for the vocabulary."""

    __slots__ = ("_place", "outputs", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.outputs: list[int] = []
        self._place: dict[int, int] = {}

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._find(token_id)

    def add_output(self, token_id: int) -> None:
        self.outputs[self._find(token_id)] += 1

    def copy(self) -> _TokenCounts:
        other = _TokenCounts()
        other.token_ids, other.outputs = self.token_ids.copy(), self.outputs.copy()
        other._place = self._place.copy()
        return other

    def _find(self, token_id: int) -> int:
        place = self._place.setdefault(token_id, len(self.token_ids))
        if place == len(self.token_ids):
            self.token_ids.append(token_id)
            self.outputs.append(0)
        return place


class Sampler:
    """Samples one token for each row of logits; keeps nothing between steps."""

    def __call__(self, logits: torch.Tensor, states: Sequence[SamplerState]) -> SamplerOutput:
        """Takes ``logits [R, vocab]`` (any float type, computed with in float32, not changed) and the
        state of each row's sequence; where a request forks, its row comes once for each output.
        Nothing here waits for a CUDA device."""
        assert logits.ndim == 2
        assert logits.shape[0] == len(states), "one state for each row of logits"
        logits = logits.float()
        rows = [i for i, state in enumerate(states) if state.params.logprobs is not None]
        counts = [states[i].params.logprobs or 0 for i in rows]

        processed = _with_penalties(_with_masks(logits, states), states)
        token_ids = _argmax(processed)
        best = processed.gather(-1, token_ids[:, None])  # NaN counts as largest
        failed = ~best[:, 0].isfinite()
        if processed is not logits:  # a mask may have hidden a NaN
            failed |= ~logits.amax(dim=-1).isfinite()

        drawn = [i for i, state in enumerate(states) if not state.params.is_greedy]
        if drawn:
            shifted = _select(processed, drawn) - _select(best, drawn)
            chosen = _draw(shifted, [states[i] for i in drawn])
            token_ids = token_ids.index_copy(0, _to_device(drawn, np.int64, logits), chosen)
        token_ids = token_ids.masked_fill(failed, NO_TOKEN)

        logprobs = None
        if rows:
            # A failed row has no token: any valid id will do to look one up.
            wanted = _select(token_ids, rows).clamp(min=0)
            logprobs = gather_logprobs(_select(logits, rows), wanted, max(counts))
        return SamplerOutput(token_ids, logprobs, tuple(rows), tuple(counts))


def derive_seed(engine_seed: int, request_number: int) -> int:
    """Seed of a request that came without one: the engine's seed and the order of arrival say it."""
    return _signed(_hash(engine_seed, request_number))


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num: int) -> LogprobTensors:
    """Log-probabilities of ``token_ids`` int64 ``[L]`` and of the ``num`` most likely tokens (all, if
    there are fewer) under ``logits [L, vocab]``; for prompts, row i and token i + 1."""
    logprobs = logits.float().log_softmax(dim=-1)
    own_ids = token_ids[:, None]
    own = logprobs.gather(-1, own_ids)
    ranks = (logprobs >= own).count_nonzero(dim=-1)
    if num == 0:
        return LogprobTensors(own_ids, own, ranks)
    top, top_ids = top_by_lowest_id(logprobs, min(num, logits.shape[-1]))
    return LogprobTensors(torch.cat((own_ids, top_ids), 1), torch.cat((own, top), 1), ranks)


def top_by_lowest_id(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row of float32 ``[R, V]`` with their ids, in descending order and, of
    equals, ascending ids (``torch.topk`` takes any of them)."""
    vocab = values.shape[-1]
    if k > vocab // 8:  # sorting all is as fast
        ordered, ids = values.sort(dim=-1, descending=True, stable=True)
        return ordered[:, :k], ids[:, :k]
    if values.device.type == "cpu" and k < vocab:
        top, ids = values.topk(k + 1, dim=-1)
        # Which k they are is settled unless the last ties with the next. (NaN ties with all.)
        if bool((top[:, k - 1] > top[:, k]).all()):
            ids = ids[:, :k].sort(dim=-1).values
            ordered, order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
            return ordered, ids.gather(-1, order)
    # A float's bits order like integers once those of negative numbers are flipped (+ 0.0 makes -0.0
    # equal to 0.0). With the ids below them no two keys are equal.
    bits = (values + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (bits.long() << 32) + torch.arange(vocab - 1, -1, -1, device=values.device)
    ids = vocab - 1 - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
    return values.gather(-1, ids), ids


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 ``[R, W]``, for the tokens ``[W]`` or ``[R, W]`` of rows with
    keys int64 ``[R]``: -log(-log(u)), u = (52 bits of the hash + 1/2) / 2^52, exact in float64, never 0
    or 1."""
    bits = (token_ids + 1) * _signed(_GAMMA) + keys[:, None]
    for shift, factor in _MIX:
        bits ^= _shift_right(bits, shift)
        bits *= _signed(factor)
    bits ^= _shift_right(bits, 31)
    uniform = _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_().float()


def _with_masks(logits: torch.Tensor, states: Sequence[SamplerState]) -> torch.Tensor:
    vocab = logits.shape[-1]
    pairs = [
        (i, token) for i, state in enumerate(states) for token in state.masked_ids if token < vocab
    ]
    if not pairs:
        return logits
    rows, ids = _to_device(pairs, np.int64, logits).T
    minus_inf = torch.full((), -math.inf, device=logits.device)
    return logits.index_put((rows, ids), minus_inf)


def _with_penalties(logits: torch.Tensor, states: Sequence[SamplerState]) -> torch.Tensor:
    """Touches only the tokens seen: one gather and one scatter for all rows."""
    seen = [
        (i, state.params, state.counts)
        for i, state in enumerate(states)
        if state.counts is not None and state.counts.token_ids
    ]
    if not seen:
        return logits
    lengths = [len(counts.token_ids) for _, _, counts in seen]

    def per_token(read: Callable[[SamplingParams], float]) -> torch.Tensor:
        values = np.repeat([read(params) for _, params, _ in seen], lengths)
        return _to_device(values, np.float32, logits)

    rows = _to_device(np.repeat([i for i, _, _ in seen], lengths), np.int64, logits)
    token_ids = [token for _, _, counts in seen for token in counts.token_ids]
    ids = _to_device(token_ids, np.int64, logits)
    outputs = [count for _, _, counts in seen for count in counts.outputs]
    times = _to_device(outputs, np.float32, logits)

    repetition = per_token(lambda params: params.repetition_penalty)
    values = logits[rows, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= per_token(lambda params: params.frequency_penalty) * times
    values -= per_token(lambda params: params.presence_penalty) * (times > 0)
    return logits.index_put((rows, ids), values)


def _draw(logits: torch.Tensor, states: Sequence[SamplerState]) -> torch.Tensor:
    """Token ids ``[R]`` for rows whose largest logit is 0 (so that no temperature overflows);
    ``logits`` are overwritten."""
    params = [state.params for state in states]
    vocab = logits.shape[-1]
    keys = _to_device([_signed(state.key) for state in states], np.int64, logits)
    logits /= _to_device([[p.temperature] for p in params], np.float32, logits)
    if any(p.min_p > 0 for p in params):
        # p >= min_p x p_max, as logits: the largest is 0.
        floor = [[math.log(p.min_p) if p.min_p > 0 else -math.inf] for p in params]
        logits.masked_fill_(logits < _to_device(floor, np.float32, logits), -math.inf)

    limits = [p.top_k if 0 < p.top_k < vocab else None for p in params]
    # Rows that meet in a kind never change one another's tokens: only the width is shared.
    kinds: dict[str, list[int]] = {"all": [], "top_k": [], "top_p": []}
    for i, (p, limit) in enumerate(zip(params, limits, strict=True)):
        kinds["top_k" if limit is not None else "top_p" if p.top_p < 1 else "all"].append(i)

    token_ids = torch.empty_like(keys)
    for kind, rows in kinds.items():
        if not rows:
            continue
        row_logits, row_keys = _select(logits, rows), _select(keys, rows)
        top_p = _to_device([[params[i].top_p] for i in rows], np.float64, logits)
        if kind == "all":
            chosen = _draw_from_all(row_logits, row_keys)
        elif kind == "top_k":
            k = [[limits[i]] for i in rows]
            chosen = _draw_from_top_k(row_logits, row_keys, k, top_p)
        else:
            chosen = _draw_from_top_p(row_logits, row_keys, top_p)
        token_ids.index_copy_(0, _to_device(rows, np.int64, logits), chosen)
    return token_ids


def _draw_from_all(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    vocab = logits.shape[-1]
    ids = torch.arange(vocab, device=logits.device)
    # Several float64 temporaries: in the cache on a CPU, in bounded memory on a GPU.
    rows = max(1, (2**16 if logits.device.type == "cpu" else 2**25) // vocab)
    parts = zip(torch.split(logits, rows), torch.split(keys, rows), strict=True)
    return torch.cat([gumbel_noise(key, ids).add_(part).argmax(dim=-1) for part, key in parts])


def _draw_from_top_k(
    logits: torch.Tensor, keys: torch.Tensor, k: list[list[int | None]], top_p: torch.Tensor
) -> torch.Tensor:
    width = max(limit for (limit,) in k if limit is not None)
    values, ids = top_by_lowest_id(logits, width)
    beyond = torch.arange(width, device=logits.device) >= _to_device(k, np.int64, logits)
    values = values.masked_fill(beyond, -math.inf)
    mass = values.exp().double().cumsum(dim=-1)
    return _draw_from_nucleus(values, ids, keys, mass, top_p * mass[:, -1:], top_p < 1)


def _draw_from_top_p(logits: torch.Tensor, keys: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    vocab = logits.shape[-1]
    needed = top_p * logits.exp().double().sum(dim=-1, keepdim=True)
    is_cpu = logits.device.type == "cpu"  # a CUDA device would have to be waited for below
    width = min(_NUCLEUS_PREFIX, vocab) if is_cpu else vocab
    values, ids = top_by_lowest_id(logits, width)
    mass = values.exp().double().cumsum(dim=-1)
    token_ids = _draw_from_nucleus(values, ids, keys, mass, needed, top_p < 1)
    if width < vocab:
        for row in (mass[:, -1:] < needed).nonzero()[:, 0].tolist():
            one = slice(row, row + 1)
            values, ids = top_by_lowest_id(logits[one], vocab)
            mass_all = values.exp().double().cumsum(dim=-1)
            token_ids[one] = _draw_from_nucleus(
                values, ids, keys[one], mass_all, needed[one], top_p[one] < 1
            )
    return token_ids


def _draw_from_nucleus(
    values: torch.Tensor,
    ids: torch.Tensor,
    keys: torch.Tensor,
    mass: torch.Tensor,
    needed: torch.Tensor,
    filtered: torch.Tensor,
) -> torch.Tensor:
    """From candidates in descending order: a token stays if those before it do not reach ``needed``.

    ``values`` and ``ids`` ``[R, W]``, ``mass`` their summed weights, ``needed`` and ``filtered``
    ``[R, 1]``.
    """
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    values = values.masked_fill(filtered & (before >= needed), -math.inf)
    chosen = (values + gumbel_noise(keys, ids)).argmax(dim=-1, keepdim=True)
    return ids.gather(-1, chosen)[:, 0]


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Of each row the place of the largest, the first of equals; NaN counts as largest. On a CPU by
    numpy, which compares a vector at a time where torch compares one by one."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.argmax(logits.numpy(), axis=-1))
    return logits.argmax(dim=-1)


def _hash(*words: int) -> int:
    """A 64-bit key out of several numbers, one SplitMix64 step each."""
    bits = 0
    for word in words:
        bits = (bits ^ word) + _GAMMA & _MASK
        for shift, factor in _MIX:
            bits = (bits ^ bits >> shift) * factor & _MASK
        bits ^= bits >> 31
    return bits


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >> 63 else bits


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Without the sign."""
    return (bits >> count).bitwise_and_(2 ** (64 - count) - 1)


def _select(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """These rows (ascending, each once); no copy where it is all of them."""
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor[_to_device(rows, np.int64, tensor)]


def _to_device(
    values: Sequence[Any] | npt.NDArray[Any], dtype: type[np.generic], like: torch.Tensor
) -> torch.Tensor:
    """Beside ``like``, without waiting for its device."""
    array = torch.from_numpy(np.asarray(values, dtype=dtype))
    return array.to(like.device, non_blocking=True)
