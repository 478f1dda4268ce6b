"""Scheduler settings, spelled as vLLM spells them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Checked once, here. Raises ``ValueError`` naming the setting, its value and what was expected."""

    max_num_seqs: int = 256
    """Most sequences running at once."""
    max_num_batched_tokens: int = 8192
    """Token budget of a step."""
    max_model_len: int = 8192
    """Most tokens, prompt and output together, that a sequence may have."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be computed over several steps."""
    long_prefill_token_threshold: int = 0
    """Most prompt tokens a step computes for one sequence while there are others; 0 = no limit."""
    scheduler_reserve_full_isl: bool = True
    """Admit a sequence only when the blocks of all its present tokens are free, not just those of its
    first chunk."""
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    """What becomes of a victim's KV: thrown away, or moved to host memory (while there is room).
    vLLM V1 only recomputes."""
    parallel_sampling: Literal["fork", "separate"] = "fork"
    """``fork``: the n outputs of a request share their prompt's blocks. ``separate``: n requests of
    their own, as vLLM V1 does it."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.max_model_len < 2:
            raise ValueError(
                f"max_model_len is {self.max_model_len}, must be at least 2 (a prompt and an output token)"
            )
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold}, "
                "must not be negative (0 = off)"
            )
        if self.preemption_mode not in ("recompute", "swap"):
            raise ValueError(
                f"preemption_mode is {self.preemption_mode!r}, must be 'recompute' or 'swap'"
            )
        if self.parallel_sampling not in ("fork", "separate"):
            raise ValueError(
                f"parallel_sampling is {self.parallel_sampling!r}, must be 'fork' or 'separate'"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least max_model_len "
                f"({self.max_model_len}) while chunked prefill is off: a longer prompt would wait for ever"
            )
