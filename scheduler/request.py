"""What arrived: a request as a server sees it, frozen."""

from __future__ import annotations

from dataclasses import dataclass

from blockmanager.content import NO_EXTRA_KEYS, Content, ExtraKeys

MAX_N = 16_384
"""Most outputs of one request; a larger number in a trace is a fault of the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request at its arrival.

    The true output length is not here: a server does not know it. The driver does, and reports
    the finish.
    """

    id: str
    arrival_ns: int = 0
    num_prompt_tokens: int
    content: Content | None = None
    """Identity of the prompt's tokens; ``None`` = unknown (never hashed, never hits)."""
    max_tokens: int | None = None
    """Most output tokens the client asked for; ``None`` = up to ``max_model_len``."""
    n: int = 1
    """Outputs sampled in parallel from the one prompt."""
    priority: int = 0
    """Lower is more urgent (as in vLLM); read by the priority policy only."""
    deadline_ns: int | None = None
    """Absolute time at which the client gives up."""
    session_id: str | None = None
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    """LoRA adapter and cache salt: part of every block key."""

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1:
            raise ValueError(
                f"request {self.id}: num_prompt_tokens is {self.num_prompt_tokens}, must be at least 1"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(
                f"request {self.id}: max_tokens is {self.max_tokens}, must be at least 1"
            )
        if not 1 <= self.n <= MAX_N:
            raise ValueError(f"request {self.id}: n is {self.n}, must be from 1 to {MAX_N}")
        if self.arrival_ns < 0:
            raise ValueError(
                f"request {self.id}: arrival_ns is {self.arrival_ns}, must not be negative"
            )
        if self.content is not None and self.content.num_tokens > self.num_prompt_tokens:
            raise ValueError(
                f"request {self.id}: identity of {self.content.num_tokens} tokens for a prompt of "
                f"{self.num_prompt_tokens}"
            )
