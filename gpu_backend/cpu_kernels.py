"""Decode steps of bfloat16 models on CPUs, in few calls compiled by numba.

A small model's decode step is hundreds of operations on a few rows: calling them takes as long as half of
the products. ``FusedDecode`` is ``Decoder.forward`` for such steps, four products a layer and between them
four compiled loops. A single row needs no matrix kernel either: ``RowProduct`` reads the weight as it
lies, at the speed of memory, twice that of oneDNN's packed product.

The first use compiles what it needs, some ten seconds in all with the attention's loop, and keeps it on
disk (``compiled``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numba import prange

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
_NO_ROWS = np.empty((0, 0), np.uint16)


class RowProduct:
    """``Linear`` of a bfloat16 weight for one row, float32 until it is rounded."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = array_of(weight.detach())
        self._bias = _NONE if bias is None else array_of(bias.detach())
        self.out_size = len(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x [1, in]`` to ``[1, out]``."""
        out = x.new_empty((1, self.out_size))
        self.run(array_of(x), use_torch_threads(), array_of(out))
        return out

    def run(self, x: Any, threads: int, out: Any) -> None:
        """The same on arrays; ``threads`` are those of ``use_torch_threads``."""
        _row_product(x, self._weight, self._bias, threads, out)


class _LayerParts(NamedTuple):
    """A layer's weights, norms as arrays (``q_norm`` and ``k_norm`` empty where there are none)."""

    qkv_proj: Linear
    o_proj: Linear
    gate_up_proj: Linear
    down_proj: Linear
    input_norm: Any
    q_norm: Any
    k_norm: Any
    mlp_norm: Any

    @classmethod
    def of(cls, layer: Layer) -> _LayerParts:
        attention, mlp = layer.attention, layer.mlp
        return cls(
            attention.qkv_proj,
            attention.o_proj,
            mlp.gate_up_proj,
            mlp.down_proj,
            _weight(layer.input_norm),
            _weight(attention.q_norm),
            _weight(attention.k_norm),
            _weight(layer.mlp_norm),
        )


def _weight(norm: RMSNorm | None) -> Any:
    return _NONE if norm is None else array_of(norm.weight.detach())


class FusedDecode:
    """``Decoder.forward`` of a packed bfloat16 model, for steps in which every sequence has one token.

    Rounds to bfloat16 what goes to memory; norms, rotation and activation are float32 inside, where
    plain torch rounds after each operation.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._layers = [_LayerParts.of(layer) for layer in model.layers]  # type: ignore[arg-type]
        following = [layer.input_norm for layer in self._layers[1:]]
        self._norms_after = [*following, _weight(model.norm)]

    @staticmethod
    def takes(attend: object) -> TypeGuard[PagedLayers]:
        """Whether it serves a step: one that decodes only, over a pool that is not quantised."""
        return (
            isinstance(attend, PagedLayers)
            and attend.inputs.max_query_len == 1
            and attend.cache.dtype == torch.bfloat16
            and isinstance(attend.attention, CpuAttention)
            and attend.attention.is_compiled
        )

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: PagedLayers
    ) -> torch.Tensor:
        """As ``Decoder.forward``, where ``takes(attend)``."""
        config, inputs, threads = self._model.config, attend.inputs, use_torch_threads()
        count, eps = len(token_ids), np.float32(config.rms_norm_eps)
        angles = self._model.rotary(positions, torch.float32)
        cos, sin = angles.cos.flatten(1).numpy(), angles.sin.flatten(1).numpy()
        slots = inputs.slot_mapping.numpy()
        arrays = (
            inputs.query_start.numpy(),
            inputs.context_lens.numpy(),
            inputs.block_tables.contiguous().numpy(),
        )
        step = _Scratch(count, threads)
        hidden = array_of(F.embedding(token_ids, self._model.embed_tokens))
        normed = step.rows(config.hidden_size)
        mixed = step.rows(config.num_heads * config.head_dim)
        activated = step.rows(config.intermediate_size)
        query = np.empty((count, config.num_heads, config.head_dim), np.uint16)
        mixed_heads = mixed.array.reshape(query.shape)
        add_norm(hidden, _NO_ROWS, self._layers[0].input_norm, eps, normed.array)
        for number, (layer, norm_after) in enumerate(
            zip(self._layers, self._norms_after, strict=True)
        ):
            keys, values = attend.cache.arrays[number]
            heads = step.product(layer.qkv_proj, normed).reshape(count, -1, config.head_dim)
            norms = layer.q_norm, layer.k_norm
            rotate_and_write(heads, *norms, eps, cos, sin, slots, query, keys, values)
            decode_arrays(
                *(query, keys, values, NO_SCALES, NO_SCALES, arrays, count, threads),
                *(config.scale, config.window(number), mixed_heads),
            )
            delta = step.product(layer.o_proj, mixed)
            add_norm(hidden, delta, layer.mlp_norm, eps, normed.array)
            silu_mul(step.product(layer.gate_up_proj, normed), activated.array)
            delta = step.product(layer.down_proj, activated)
            add_norm(hidden, delta, norm_after, eps, normed.array)
        return normed.tensor


class _Rows(NamedTuple):
    tensor: torch.Tensor
    array: Any
    """The same memory."""


class _Scratch:
    """Memory of one step's rows, and the products that read it."""

    def __init__(self, count: int, threads: int) -> None:
        self._count, self._threads = count, threads
        self._products: dict[int, Any] = {}
        """Results of single rows by their size; each is read before the next of its size."""

    def rows(self, size: int) -> _Rows:
        """``[count, size]``."""
        tensor = torch.empty((self._count, size), dtype=torch.bfloat16)
        return _Rows(tensor, array_of(tensor))

    def product(self, linear: Linear, x: _Rows) -> Any:
        """``[count, out]``, good until the next of that size."""
        if self._count > 1 or linear.row_product is None:
            return array_of(linear(x.tensor))
        size = linear.row_product.out_size
        out = self._products.get(size)
        if out is None:
            out = self._products[size] = np.empty((1, size), np.uint16)
        linear.row_product.run(x.array, self._threads, out)
        return out


# Loops. bfloat16 comes as its bits (uint16) and is computed with in float32.


@compiled
def _row_product(x: Any, weight: Any, bias: Any, num_tasks: int, out: Any) -> None:
    """``out [1, n]`` = ``weight [n, k]`` x ``x [1, k]`` + ``bias`` (``[n]`` or empty)."""
    size, depth = weight.shape
    row = np.empty(depth, np.float32)
    for i in range(depth):
        row[i] = widen(x[0, i])
    for task in prange(num_tasks):
        for o in range(task * size // num_tasks, (task + 1) * size // num_tasks):
            total = np.float32(0)
            for i in range(depth):
                total += widen(weight[o, i]) * row[i]
            if bias.size > 0:
                total += widen(bias[o])
            out[0, o] = narrow(total, out[0, o])


def _add_norm(hidden: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    """Add ``delta`` (or nothing, where it is empty) to ``hidden [T, size]`` in place; the RMSNorm of the
    sum, as it is stored, to ``out``."""
    size = hidden.shape[1]
    for token in range(hidden.shape[0]):
        if delta.size > 0:
            for i in range(size):
                total = widen(hidden[token, i]) + widen(delta[token, i])
                hidden[token, i] = narrow(total, hidden[token, i])
        squares = np.float32(0)
        for i in range(size):
            x = widen(hidden[token, i])
            squares += x * x
        factor = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
        for i in range(size):
            x = widen(hidden[token, i]) * factor * widen(weight[i])
            out[token, i] = narrow(x, out[token, i])


def _rotate_and_write(
    heads: Any,
    q_norm: Any,
    k_norm: Any,
    eps: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    query: Any,
    keys: Any,
    values: Any,
) -> None:
    """Split ``heads [T, heads + 2 kv_heads, head_dim]``: the query heads, normed (``q_norm [head_dim]`` or
    empty) and rotated, to ``query [T, heads, head_dim]``; keys, normed and rotated, and values to their
    slots in ``keys`` and ``values [blocks, block_size, kv_heads, head_dim]`` (slot -1 = nowhere).
    ``cos`` and ``sin`` are float32 ``[T, head_dim]``, as in ``Angles``."""
    num_heads, head_dim = query.shape[1:]
    block_size, kv_heads = keys.shape[1:3]
    half = head_dim // 2
    row = np.empty(head_dim, np.float32)
    for token in range(heads.shape[0]):
        block, slot = slots[token] // block_size, slots[token] % block_size
        for head in range(num_heads + kv_heads):
            norm = q_norm if head < num_heads else k_norm
            squares = np.float32(0)
            for d in range(head_dim):
                row[d] = widen(heads[token, head, d])
                squares += row[d] * row[d]
            if norm.size > 0:
                factor = np.float32(1) / np.sqrt(squares / np.float32(head_dim) + eps)
                for d in range(head_dim):
                    row[d] *= factor * widen(norm[d])
            if head < num_heads:
                out = query[token, head]
            elif slots[token] >= 0:
                out = keys[block, slot, head - num_heads]
            else:
                continue
            for d in range(half):
                a, b, s = row[d], row[half + d], sin[token, half + d]
                out[d] = narrow(a * cos[token, d] - b * s, out[d])
                out[half + d] = narrow(b * cos[token, d] + a * s, out[d])
        if slots[token] >= 0:
            for head in range(kv_heads):
                for d in range(head_dim):
                    values[block, slot, head, d] = heads[token, num_heads + kv_heads + head, d]


def _silu_mul(gate_up: Any, out: Any) -> None:
    """``silu(gate) * up``: ``gate_up [T, 2 size]`` to ``out [T, size]``."""
    size = out.shape[1]
    for token in range(out.shape[0]):
        for i in range(size):
            gate = widen(gate_up[token, i])
            small = exp2(-abs(gate) * LOG2_E)  # e**-|gate|: neither overflows nor loses digits
            share = (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small)
            x = gate * share * widen(gate_up[token, size + i])
            out[token, i] = narrow(x, out[token, i])


add_norm = compiled(_add_norm, parallel=False)
rotate_and_write = compiled(_rotate_and_write, parallel=False)
silu_mul = compiled(_silu_mul, parallel=False)
