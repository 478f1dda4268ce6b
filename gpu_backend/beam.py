"""Beam search: which beams live on and which end, given each step's log-probabilities.

Selection, scores and the end are those of transformers' ``generate(num_beams=width)``, float32
operation by float32 operation. The engine keeps the sequences: it forks, extends and frees them
by what ``step`` returns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from gpu_backend.sampler import top_by_lowest_id
from gpu_backend.sampling import EarlyStopping


class Beam(NamedTuple):
    """A beam that lives on: ``token_id`` after the tokens of live beam ``parent``."""

    parent: int
    token_id: int


class Hypothesis(NamedTuple):
    """A finished output, its end-of-sequence token included."""

    token_ids: tuple[int, ...]
    sum_logprob: float
    score: float
    """``sum_logprob / len(token_ids) ** length_penalty``."""
    reason: str
    """``stop`` or ``length``, the words of the scheduler's ``Finished``."""


class BeamStep(NamedTuple):
    beams: list[Beam]
    """The next live beams, best first; empty when the search is over."""
    finished: list[Hypothesis]
    """What ended in this step and is, so far, among the ``width`` best."""


class BeamSearch:
    """Bookkeeping of one request. It starts with one live beam, the prompt, without tokens.

    Parameters
    ----------
    width
        Beams kept alive, and hypotheses kept.
    eos_ids
        Tokens that end a hypothesis. A step looks at ``max(2, 1 + len(eos_ids)) * width``
        candidates, so that ``width`` of them can go on whatever ends. (A vocabulary with fewer
        tokens than that leaves fewer beams; transformers fills up with copies.)
    max_tokens
        Length at which every hypothesis ends.
    length_penalty, early_stopping
        As in ``SamplingParams``.
    """

    def __init__(
        self,
        width: int,
        *,
        eos_ids: Iterable[int],
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        if width < 1 or max_tokens < 1:
            raise ValueError(
                f"width is {width}, max_tokens is {max_tokens}, both must be at least 1"
            )
        self.width = width
        self.eos_ids = frozenset(eos_ids)
        self.max_tokens = max_tokens
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.done = False
        self.hypotheses: list[Hypothesis] = []
        """At most ``width``, best first; equal ones in the order in which they ended."""
        self._live: list[list[int]] = [[]]
        self._scores = [0.0]
        self._num_tokens = 0

    @property
    def num_live(self) -> int:
        return len(self._live)

    def step(self, log_probs: torch.Tensor) -> BeamStep:
        """Takes ``log_probs [num_live, vocab]`` (float32, any device), one row for each live beam in
        the order of the last step; waits for the device once. Of equal candidates the lowest (beam,
        token) is first; those of probability 0 are none. ``ValueError`` where nothing is left."""
        assert not self.done, "the search is over"
        assert log_probs.shape[0] == self.num_live, "one row for each live beam"
        assert log_probs.dtype == torch.float32
        candidates = self._candidates(log_probs)
        self._num_tokens += 1
        at_limit = self._num_tokens == self.max_tokens

        finished: list[Hypothesis] = []
        beams: list[Beam] = []
        scores: list[float] = []
        for rank, (score, beam) in enumerate(candidates):
            if not (at_limit or beam.token_id in self.eos_ids):
                if len(beams) < self.width:
                    beams.append(beam)
                    scores.append(score)
            elif rank < self.width:  # candidates further down are only there to keep beams alive
                finished.append(self._hypothesis(beam, score))
        # Python's sort is stable: what ended earlier stays ahead of its equals.
        ranked = sorted(self.hypotheses + finished, key=lambda h: -h.score)
        self.hypotheses = ranked[: self.width]
        kept = {id(hypothesis) for hypothesis in self.hypotheses}

        self.done = not beams or self._is_over(scores[0])
        if self.done:
            beams, scores = [], []
        self._live = [[*self._live[beam.parent], beam.token_id] for beam in beams]
        self._scores = scores
        return BeamStep(beams, [hypothesis for hypothesis in finished if id(hypothesis) in kept])

    def _candidates(self, log_probs: torch.Tensor) -> list[tuple[float, Beam]]:
        vocab = log_probs.shape[1]
        scores = torch.tensor(self._scores, dtype=torch.float32, device=log_probs.device)
        flat = (log_probs + scores[:, None]).reshape(1, -1)
        count = min(max(2, 1 + len(self.eos_ids)) * self.width, flat.shape[1])
        best, ids = top_by_lowest_id(flat, count)
        # float64 holds both exactly, so that one copy brings them over.
        pairs = torch.stack((best[0].double(), ids[0].double())).tolist()
        found = [
            (score, Beam(*divmod(int(flat_id), vocab)))
            for score, flat_id in zip(*pairs, strict=True)
            if np.isfinite(score)
        ]
        if not found:
            raise ValueError("beam search: no token has a finite log-probability")
        return found

    def _hypothesis(self, beam: Beam, sum_logprob: float) -> Hypothesis:
        token_ids = (*self._live[beam.parent], beam.token_id)
        reason = "stop" if beam.token_id in self.eos_ids else "length"
        return Hypothesis(token_ids, sum_logprob, self._score(sum_logprob, len(token_ids)), reason)

    def _score(self, sum_logprob: float, length: int) -> float:
        return float(np.float32(sum_logprob) / np.float32(length**self.length_penalty))

    def _is_over(self, best_live: float) -> bool:
        if len(self.hypotheses) < self.width:
            return False
        if self.early_stopping is True:
            return True
        # With a positive penalty a longer output may score higher: "never" grants it the full length.
        reach = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_tokens if reach else self._num_tokens
        return self._score(best_live, length) <= self.hypotheses[-1].score
