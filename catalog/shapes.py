"""What a model and a GPU are, in the few numbers that memory and time follow from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

WeightDtype = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4", "mxfp4"]
KVDtype = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4"]

DTYPE_BITS: Mapping[str, int] = {
    "fp32": 32,
    "bf16": 16,
    "fp16": 16,
    "fp8": 8,
    "int8": 8,
    "int4": 4,
    "mxfp4": 4,
}
"""Bits of one element, scales of block-quantised types not included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayers:
    """A group of layers that keep the same state per token or per request.

    ``full`` and ``sliding`` layers keep K and V of ``num_kv_heads`` heads; ``sliding`` ones of the
    last ``window`` tokens only (chunked attention counts as a window of its chunk). ``mla`` layers
    keep one latent vector of ``kv_lora_rank`` and one rotary key of ``rope_head_dim`` per token,
    shared by all heads. ``recurrent`` layers keep ``state_bytes`` per request whatever its length.
    """

    kind: Literal["full", "sliding", "mla", "recurrent"]
    num_layers: int
    num_heads: int = 0
    """Query heads."""
    num_kv_heads: int = 0
    head_dim: int = 0
    """Of K (and of V unless ``v_head_dim`` is given); for ``mla`` the non-rotary part of a query
    head."""
    v_head_dim: int = 0
    """0 = same as ``head_dim``."""
    window: int = 0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    """0 = queries are not compressed."""
    rope_head_dim: int = 0
    state_bytes: int = 0
    """Per request and layer (``recurrent`` only; ``num_heads`` and ``v_head_dim`` are then those of
    the values, ``num_kv_heads`` and ``head_dim`` those of the keys, 0 where not known)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder's shape: enough for its KV bytes, weight bytes and FLOPs.

    ``attention`` lists the layer groups; their ``num_layers`` add up to ``num_layers``.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of a dense MLP (0 where every layer is a mixture of experts)."""
    vocab_size: int
    max_model_len: int
    """Tokens of context the model was made for (``max_position_embeddings`` and its scaling)."""
    attention: tuple[AttentionLayers, ...]
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """QKV projections have a bias (Qwen2)."""
    num_mlp_matrices: int = 3
    """3 for gated MLPs (SwiGLU, GeGLU), 2 for plain ones."""
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    """All shared experts of a layer together."""
    num_moe_layers: int = 0
    """The other layers have a dense MLP of ``intermediate_size``."""
    native_dtype: str = "bf16"
    source: str = ""
    """Where the numbers were read."""
    assumptions: tuple[str, ...] = ()
    """What the source did not say and was assumed; printed with every result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """One accelerator. Bytes, bytes per second and dense FLOP per second (no sparsity)."""

    name: str
    memory_bytes: int
    memory_bandwidth: float
    """Bytes per second, peak."""
    flops: Mapping[str, float] = field(default_factory=dict)
    """Dense tensor-core FLOP/s by dtype (keys of ``DTYPE_BITS``); a dtype that is missing runs at
    the rate of the next wider one that is there."""
    link_bandwidth: float
    """Bytes per second one GPU sends to its peers, one direction (NVLink, Infinity Fabric or
    PCIe)."""
    link: str
    """Name of that link, e.g. ``NVLink 4``."""
    host_bandwidth: float
    """Bytes per second between GPU and host memory, one direction, peak of the PCIe link."""
    architecture: str = ""
    """Generation, in small letters: ``hopper``; empty where it is unknown."""
    num_sms: int = 132
    """Streaming multiprocessors (NVIDIA) or compute units (AMD)."""
    usd_per_hour: float | None = None
    source: str = ""
    assumptions: tuple[str, ...] = ()


def pipeline_stage(shape: ModelShape, num_stages: int) -> ModelShape:
    """The largest of ``num_stages`` equal parts of the layers, for what it holds in memory: it has the
    embedding or the LM head, not both."""
    if num_stages == 1:
        return shape

    def part(count: int) -> int:
        return -(-count // num_stages)

    groups = tuple(replace(group, num_layers=part(group.num_layers)) for group in shape.attention)
    return replace(
        shape,
        num_layers=sum(group.num_layers for group in groups),
        attention=groups,
        num_moe_layers=part(shape.num_moe_layers),
        tie_word_embeddings=True,
    )
