"""A step in numbers: all that a cost model may know of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class StepFeatures:
    """One forward pass. Arrays have one entry a scheduled sequence, in the order of the grants."""

    granted: npt.NDArray[np.int64]
    """Tokens this step computes for the sequence (1 for a plain decode)."""
    computed_before: npt.NDArray[np.int64]
    """Tokens whose KV was there before the step (prefix hits included)."""
    sampled: npt.NDArray[np.bool_]
    """Whether the step ends with a sampled token, and so needs logits."""
    is_decode: npt.NDArray[np.bool_]
    """True where the only token granted is the one sampled last; prefill (also recomputation of a
    preempted sequence) otherwise."""
    num_copies: int = 0
    """Copy-on-write copies, in blocks."""
    num_swapped_in: int = 0
    """Blocks brought back from host memory."""
    num_swapped_out: int = 0
    """Blocks sent to host memory."""
