"""The engine: the scheduler and the block manager on real torch models.

``LLM`` and ``SamplingParams`` are loaded when they are asked for: torch takes its time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_backend.llm import LLM, EngineOptions
    from gpu_backend.sampling import SamplingParams

__all__ = ["LLM", "EngineOptions", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "EngineOptions"):
        from gpu_backend import llm

        return getattr(llm, name)
    if name == "SamplingParams":
        from gpu_backend.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
