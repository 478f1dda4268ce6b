"""Rotary position embedding and its scalings.

Formulas as in transformers' ``modeling_rope_utils.py``: linear (position interpolation, arXiv
2306.15595), llama3 (Llama 3.1's reference code), yarn (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from gpu_backend.config import RopeConfig


class Angles(NamedTuple):
    """Cosine and sine of each token's angles, ``[T, 1, head_dim]`` in the model's dtype.

    The first half of ``sin`` is negated: ``rotate`` then needs no negation of its own.
    """

    cos: torch.Tensor
    sin: torch.Tensor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians a position turns each pair of dimensions by: float32 ``[head_dim / 2]``."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "divided":
        if len(rope.divisors) != head_dim // 2:
            raise ValueError(f"{len(rope.divisors)} rope divisors, expected {head_dim // 2}")
        return frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long waves are slowed by ``factor``, short ones kept, those between blended."""
    turns = rope.original_max_len * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(frequencies: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Dimensions below ``low`` are kept, those above ``high`` interpolated, a ramp between."""

    def dimension(rotations: float) -> float:
        """The dimension that turns so often over the trained length."""
        waves = rope.original_max_len / (rotations * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    ramp = ramp.clamp(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


class Rotary(nn.Module):
    """Angles of a step's positions, computed once a step and used by every layer.

    Computed and not gathered from a table: a few small operations in a step save a table as long
    as the longest context.
    """

    signed: torch.Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device | str) -> None:
        super().__init__()
        frequencies = inverse_frequencies(rope, head_dim)
        # cos(-x) = cos(x) and sin(-x) = -sin(x): one product gives all of Angles.
        signed = torch.cat((-frequencies, frequencies)).to(device)
        self.register_buffer("signed", signed, persistent=False)
        self.attention_factor = rope.attention_factor

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> Angles:
        """Positions int64 ``[T]``. Angles are float32 until they are cosines and sines."""
        angles = positions.to(torch.float32)[:, None, None] * self.signed
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return Angles(cos.to(dtype), sin.to(dtype))


def rotate(heads: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Turn each pair (i, i + head_dim / 2) of ``[T, heads, head_dim]`` by its angle."""
    # Rolling by half swaps the halves, whose product with the signed sine completes the rotation:
    # the same as rotate_half without its negation and concatenation.
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * angles.cos, swapped, angles.sin)
