"""What the engine gives back: pieces as they come, and whole outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpu_backend.sampler import Logprob

Logprobs = dict[int, Logprob]
"""Of one token, first its own entry, then the most likely ones by rank."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step adds to one output."""

    request_id: str
    index: int
    """Which of the request's outputs."""
    token_ids: tuple[int, ...]
    """One token as a rule; all of a beam search's at its end; none where the output only ends."""
    text: str
    """What can be shown now; may lag behind the tokens."""
    logprobs: tuple[Logprobs, ...]
    """One for each token, where they were asked for."""
    finish_reason: str | None
    """``stop``, ``length``, ``kv_exhausted``, ``aborted``, ``timed_out`` or ``error``; ``None`` = it
    goes on."""


@dataclass(slots=True)
class Output:
    """One output of a request."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop: str | int | None = None
    """The stop string or token that ended it, where one did (``None`` for end-of-sequence)."""
    sum_logprob: float | None = None
    """Of a beam search's hypotheses."""


@dataclass(slots=True)
class RequestOutput:
    """A request and all that became of it."""

    request_id: str
    prompt_ids: list[int]
    outputs: list[Output]
    prompt_logprobs: list[Logprobs | None] | None = None
    """One for each prompt token, ``None`` for the first."""
    num_cached_tokens: int = 0
    error: str | None = None
    """Why the request was refused or failed; the others of the batch went on."""

    @property
    def text(self) -> str:
        """Of the first output."""
        return self.outputs[0].text if self.outputs else ""
