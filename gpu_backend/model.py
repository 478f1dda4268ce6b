"""A decoder of the Llama family in plain torch.

Tokens of all sequences of a step lie end to end; there is no batch dimension and no padding. What
a token may see is the business of ``Attend``, which also keeps the KV.

Modules inside the decoder are called without ``nn.Module``'s hooks (``__call__ = forward``): a step
makes hundreds of such calls, 3 % of the time of a 135M model's decode step on a CPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from gpu_backend.attention.cpu import LEAST_HEAD_DIM
from gpu_backend.config import ModelConfig
from gpu_backend.rope import Angles, Rotary, rotate

if TYPE_CHECKING:
    from gpu_backend.cpu_kernels import FusedDecode, RowProduct

_MOST_KEPT_BYTES = 1 << 30
"""Weights of models up to this size stay in both layouts."""


class Attend(Protocol):
    """Writes a layer's keys and values of this step's tokens, then lets the queries attend."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """``query [T, heads, head_dim]``, ``key`` and ``value [T, kv_heads, head_dim]`` (views, rows
        not adjacent) to ``[T, heads, head_dim]``. Scores are scaled by ``config.scale`` and limited
        to ``config.window(layer)``; keys have their rotary embedding."""
        ...


class Linear(nn.Module):
    """``x W^T + b`` with a weight ``[out, in]`` that ``pack`` lays out for the CPU's kernels."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = weight
        self.bias = bias
        self.packed: torch.Tensor | None = None
        self.row_product: RowProduct | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            assert self.weight is not None
            return F.linear(x, self.weight, self.bias)
        if self.row_product is not None and len(x) == 1:
            return self.row_product(x)
        y: torch.Tensor = _mkldnn()._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y

    __call__ = forward

    def pack(self, row_product: type[RowProduct] | None = None) -> None:
        """Replace the weight by oneDNN's blocked copy: the plain layout is packed again in every
        call, which costs as much as the product itself at the few tokens of a decode step.
        ``row_product`` keeps the plain one too, and takes the products of one row."""
        assert self.weight is not None, "packed already"
        self.packed = _mkldnn()._reorder_linear_weight(self.weight.detach())
        if row_product is None:
            self.weight = None
        else:
            self.row_product = row_product(self.weight, self.bias)


def _mkldnn() -> Any:
    return torch.ops.mkldnn


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``Linear.pack`` pays: a CPU with oneDNN kernels for a 16-bit dtype.

    Not float32: its packed kernels are a third faster too, but the logits of a 30-layer model are
    then 1e-4 off instead of 5e-5, and float32 is what one runs to compare.
    """
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(_mkldnn()._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(_mkldnn()._is_mkldnn_fp16_supported())
    return False


def can_fuse(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether ``cpu_kernels`` serve a model that can be packed. Models with small heads are toys, not
    worth the seconds that compiling takes."""
    return (
        dtype == torch.bfloat16
        and config.head_dim >= LEAST_HEAD_DIM
        and importlib.util.find_spec("numba") is not None
    )


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, computed in float32.

    torch has a fused kernel of it on CUDA only; on the CPU it is nine operations, a tenth of a small
    model's decode step. LayerNorm is fused there, and that of (x, -x), whose mean is 0 and whose
    variance is the mean square of x, holds the RMSNorm of x in its first half (for 16-bit dtypes:
    LayerNorm's float32 sums round a little worse).
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda or x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        size = x.shape[-1]
        normed = F.layer_norm(torch.cat((x, -x), -1), (2 * size,), eps=self.eps)
        return normed[..., :size] * self.weight

    __call__ = forward


class Attention(nn.Module):
    """Projections, q/k norm and rotary embedding around ``Attend``."""

    def __init__(self, config: ModelConfig, layer: int, new: _NewParameter) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        q_size = config.num_heads * config.head_dim
        out_size = q_size + 2 * config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(
            new(out_size, config.hidden_size), new(out_size) if config.qkv_bias else None
        )
        self.o_proj = Linear(
            new(config.hidden_size, q_size),
            new(config.hidden_size) if config.output_bias else None,
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(new(config.head_dim), config.rms_norm_eps)
            self.k_norm = RMSNorm(new(config.head_dim), config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, angles: Angles, attend: Attend) -> torch.Tensor:
        num_rotated = self.num_heads + self.num_kv_heads
        heads = self.qkv_proj(hidden).view(len(hidden), -1, self.head_dim)
        query_key, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = query_key[:, : self.num_heads], query_key[:, self.num_heads :]
            query_key = torch.cat((self.q_norm(query), self.k_norm(key)), 1)
        query_key = rotate(query_key, angles)
        query, key = query_key[:, : self.num_heads], query_key[:, self.num_heads :]
        return self.o_proj(attend(self.layer, query, key, value).flatten(1))

    __call__ = forward


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``, gate and up in one product."""

    def __init__(self, config: ModelConfig, new: _NewParameter) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(new(2 * size, hidden), new(2 * size) if bias else None)
        self.down_proj = Linear(new(hidden, size), new(hidden) if bias else None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)

    __call__ = forward


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, new: _NewParameter) -> None:
        super().__init__()
        self.input_norm = RMSNorm(new(config.hidden_size), config.rms_norm_eps)
        self.attention = Attention(config, layer, new)
        self.mlp_norm = RMSNorm(new(config.hidden_size), config.rms_norm_eps)
        self.mlp = MLP(config, new)

    def forward(self, hidden: torch.Tensor, angles: Angles, attend: Attend) -> torch.Tensor:
        hidden = hidden + self.attention(self.input_norm(hidden), angles, attend)
        return hidden + self.mlp(self.mlp_norm(hidden))

    __call__ = forward


class Decoder(nn.Module):
    """The model without its KV.

    Weights are uninitialised until ``weights.load_model`` (or the caller) fills what
    ``named_weights`` yields; they take no gradient.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        new = _NewParameter(dtype, self.device)
        self.embed_tokens = new(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i, new) for i in range(config.num_layers))
        self.norm = RMSNorm(new(config.hidden_size), config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = Linear(
            self.embed_tokens if tied else new(config.vocab_size, config.hidden_size)
        )
        self.rotary = Rotary(config.rope, config.head_dim, self.device)
        self.fused: FusedDecode | None = None

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """``token_ids`` and ``positions`` int64 ``[T]`` to the normed hidden states ``[T, hidden]``.

        Ids and positions must be in range. Nothing here waits for the device or depends on the
        values of a tensor, so that a call can be captured as a graph where ``attend`` can.
        """
        if self.fused is not None and self.fused.takes(attend):
            return self.fused(token_ids, positions, attend)
        angles = self.rotary(positions, self.dtype)
        hidden = F.embedding(token_ids, self.embed_tokens)
        for layer in self.layers:
            hidden = layer(hidden, angles, attend)
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [R, hidden]`` of the rows to sample to float32 ``[R, vocab]``."""
        return self.lm_head(hidden).float()

    def pack(self) -> None:
        """Lay out the weights for the CPU's kernels; they can no longer be read or filled.

        Does nothing where the device or the dtype has no such kernels. A tied embedding keeps its
        plain table beside the packed output matrix.
        """
        if not can_pack(self.dtype, self.device):
            return
        row_product = None
        if can_fuse(self.config, self.dtype):
            from gpu_backend.cpu_kernels import FusedDecode, RowProduct

            self.fused = FusedDecode(self)
            if self.num_bytes <= _MOST_KEPT_BYTES:
                row_product = RowProduct
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(row_product)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, packed ones included."""
        tensors = [*self.parameters(), *self.buffers()]
        tensors += [
            m.packed for m in self.modules() if isinstance(m, Linear) and m.packed is not None
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each weight under its name in a Hugging Face checkpoint, as a view into the (fused)
        parameter that holds it. Not after ``pack``."""
        yield "model.embed_tokens.weight", self.embed_tokens.detach()
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            for name, tensor in _layer_weights(self.config, layer):
                yield f"model.layers.{i}.{name}", tensor
        yield "model.norm.weight", self.norm.weight.detach()
        if not self.config.tie_word_embeddings:
            yield from _split("lm_head", self.lm_head, {"": self.config.vocab_size})


class _NewParameter:
    """Makes the parameters of one model: uninitialised, on its device, in its dtype."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def __call__(self, *shape: int) -> nn.Parameter:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)


def _layer_weights(config: ModelConfig, layer: Layer) -> Iterator[tuple[str, torch.Tensor]]:
    attention, mlp, hidden = layer.attention, layer.mlp, config.hidden_size
    q_size, kv_size = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    size = config.intermediate_size
    yield "input_layernorm.weight", layer.input_norm.weight.detach()
    qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    yield from _split("self_attn", attention.qkv_proj, qkv)
    if attention.q_norm is not None and attention.k_norm is not None:
        yield "self_attn.q_norm.weight", attention.q_norm.weight.detach()
        yield "self_attn.k_norm.weight", attention.k_norm.weight.detach()
    yield from _split("self_attn", attention.o_proj, {"o_proj": hidden})
    yield "post_attention_layernorm.weight", layer.mlp_norm.weight.detach()
    yield from _split("mlp", mlp.gate_up_proj, {"gate_proj": size, "up_proj": size})
    yield from _split("mlp", mlp.down_proj, {"down_proj": hidden})


def _split(prefix: str, linear: Linear, rows: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights and biases of the projections that were fused, each with its share of the rows."""
    assert linear.weight is not None, "packed weights cannot be read"
    for kind, fused in (("weight", linear.weight), ("bias", linear.bias)):
        if fused is not None:
            parts = torch.split(fused.detach(), list(rows.values()))
            for name, part in zip(rows, parts, strict=True):
                yield ".".join(filter(None, (prefix, name, kind))), part
