"""Decode steps of bfloat16 models on CPUs: few calls a layer, compiled by numba.

A small model's decode step is hundreds of operations on a few rows, and most of its time would go into
calling them. ``FusedDecode`` is ``Decoder.forward`` for such steps: four products a layer, and between
them four compiled loops. One row (a single sequence) needs no matrix kernel either: ``RowProduct`` reads
the weights as they lie, at twice the speed of oneDNN's packed product.

The first use compiles each loop, together ten seconds at most with the attention; the results stay on
disk (``compiled``).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numba import prange
from numba.extending import register_jitable

from gpu_backend.attention.compiled import (
    LOG2_E,
    NO_SCALES,
    array_of,
    compiled,
    decode_arrays,
    exp2,
    narrow,
    use_torch_threads,
    widen,
)
from gpu_backend.attention.cpu import CpuAttention
from gpu_backend.paged_layers import PagedLayers

if TYPE_CHECKING:
    from gpu_backend.model import Decoder, Layer, Linear, RMSNorm

_NONE = np.empty(0, np.uint16)


class RowProduct:
    """``Linear`` for one row, bfloat16; reads the plain weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = array_of(weight)
        self._bias = _NONE if bias is None else array_of(bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x [1, in]`` to ``[1, out]``."""
        out = x.new_empty((1, len(self._weight)))
        self.run(array_of(x), use_torch_threads(), array_of(out))
        return out

    def run(self, x: Any, threads: int, out: Any) -> None:
        """The same for arrays."""
        _row_product()(x, self._weight, self._bias, threads, out)


class FusedDecode:
    """``Decoder.forward`` of a packed bfloat16 model for steps in which each sequence has one token.

    Rounds where values go to memory: sums, norms and the rotation are float32 in between, where plain
    torch rounds after each operation.
    """

    def __init__(self, model: Decoder) -> None:
        config = model.config
        self._model = model
        self._num_heads, self._head_dim = config.num_heads, config.head_dim
        self._layers = [_LayerArrays.of(layer) for layer in model.layers]  # type: ignore[arg-type]
        self._norms = [layer.input_norm for layer in self._layers[1:]] + [_weight(model.norm)]

    def takes(self, attend: object) -> bool:
        """Whether it can do a step: decoding only, over a pool of bfloat16."""
        return (
            isinstance(attend, PagedLayers)
            and attend.inputs.max_query_len == 1
            and isinstance(attend.attention, CpuAttention)
            and attend.attention.is_compiled
            and attend.cache.dtype == torch.bfloat16
        )

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: PagedLayers
    ) -> torch.Tensor:
        """As ``Decoder.forward``; ``takes(attend)`` must hold."""
        model, config, inputs = self._model, self._model.config, attend.inputs
        threads, count = use_torch_threads(), len(token_ids)
        num_heads, head_dim, eps = config.num_heads, config.head_dim, config.rms_norm_eps
        angles = model.rotary(positions, torch.float32)
        cos, sin = angles.cos.flatten(1).numpy(), angles.sin.flatten(1).numpy()
        slots = inputs.slot_mapping.numpy()
        arrays = (
            inputs.query_start.numpy(),
            inputs.context_lens.numpy(),
            inputs.block_tables.contiguous().numpy(),
        )
        hidden = F.embedding(token_ids, model.embed_tokens)
        normed, mixed, activated = (
            hidden.new_empty((count, size))
            for size in (config.hidden_size, num_heads * head_dim, config.intermediate_size)
        )
        hidden_rows, normed_rows, activated_rows = map(array_of, (hidden, normed, activated))
        query_rows = np.empty((count, num_heads, head_dim), np.uint16)
        mixed_rows = array_of(mixed).reshape(query_rows.shape)
        eps = np.float32(eps)
        add_norm(hidden_rows, _NO_ROWS, self._layers[0].input_norm, eps, normed_rows)
        for number, layer in enumerate(self._layers):
            keys, values = attend.cache.arrays[number]
            qkv = array_of(layer.qkv_proj(normed))
            rotate_and_write(
                qkv.reshape(count, -1, head_dim),
                layer.q_norm,
                layer.k_norm,
                eps,
                cos,
                sin,
                slots,
                query_rows,
                keys,
                values,
            )
            decode_arrays(
                query_rows,
                keys,
                values,
                NO_SCALES,
                NO_SCALES,
                arrays,
                count,
                threads,
                config.scale,
                config.window(number),
                mixed_rows,
            )
            delta = array_of(layer.o_proj(mixed))
            add_norm(hidden_rows, delta, layer.mlp_norm, eps, normed_rows)
            silu_mul(array_of(layer.gate_up_proj(normed)), activated_rows)
            delta = array_of(layer.down_proj(activated))
            add_norm(hidden_rows, delta, self._norms[number], eps, normed_rows)
        return normed
