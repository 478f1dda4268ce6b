"""A decoder taken apart: its weight matrices and what one token moves through its layers.

All counts are elements on one of ``tp`` GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import NamedTuple

from catalog import AttentionLayers, ModelShape, attention_parameters

_KERNELS_PER_LAYER = 5
"""Two norms with their residual additions, rotary embedding, KV write, activation."""


class Gemm(NamedTuple):
    """Equal weight matrices, one a layer, multiplied with the same number of rows."""

    term: str
    num_layers: int
    depth: float
    """Inputs of a row, per GPU."""
    columns: float
    """Outputs of a row, per GPU."""
    wide: bool = False
    """Kept in 16 bits whatever the type of the other weights."""
    between: float = 0.0
    """Elements of a row that are written and read on the way, where the entry is several matrices."""

    @property
    def weight_elements(self) -> float:
        """Of one matrix, per GPU."""
        return self.depth * self.columns

    @property
    def activation_elements(self) -> float:
        """Read and written for each row, per GPU."""
        return self.depth + self.columns + self.between


class DecoderParts(NamedTuple):
    """A decoder on one of ``tp`` GPUs: its matrices, and elements moved for each token."""

    gemms: list[Gemm]
    """Of the layers, without the routed experts."""
    expert: Gemm | None
    """One routed expert with all its matrices; rows are tokens assigned to it."""
    head: Gemm
    """Rows are sampled tokens. A tied head is the embedding matrix, but is read all the same."""
    kv: int
    """K and V (or latents) kept, all layers."""
    queries: float
    """Queries read and outputs written by attention."""
    elementwise: float
    """Read and written by kernels other than GEMMs and attention."""
    num_other_kernels: int
    """Neither GEMM nor attention, without the head's."""


def take_apart(shape: ModelShape, tp: int) -> DecoderParts:
    """The decoder as one GPU of ``tp`` sees it."""
    gemms = _layer_gemms(shape, tp)
    expert = None
    if shape.num_moe_layers:
        width = shape.num_mlp_matrices * shape.moe_intermediate_size / tp
        expert = Gemm(
            "experts", shape.num_moe_layers, shape.hidden_size, width, between=shape.hidden_size
        )
    vocab = shape.vocab_size / tp
    with_heads = [group for group in shape.attention if group.kind != "recurrent"]
    return DecoderParts(
        gemms=gemms,
        expert=expert,
        head=Gemm("lm_head", 1, shape.hidden_size, vocab, wide=True),
        kv=sum(group.num_layers * kv_elements(group, tp) for group in shape.attention),
        queries=total(
            group.num_layers * group.num_heads * (qk_dim(group) + v_dim(group)) / tp
            for group in with_heads
        ),
        elementwise=_elementwise_elements(shape, tp),
        # Routed experts: choice, sorting of the tokens by expert, merging.
        num_other_kernels=_KERNELS_PER_LAYER * shape.num_layers + 3 * shape.num_moe_layers + 1,
    )


def total(values: Iterable[float]) -> float:
    """Added from left to right: ``sum`` of floats compensates from Python 3.12 on, not before."""
    return reduce(add, values, 0.0)


def qk_dim(group: AttentionLayers) -> int:
    """Of one head: what a query and a key are multiplied over."""
    return group.head_dim + (group.rope_head_dim if group.kind == "mla" else 0)


def v_dim(group: AttentionLayers) -> int:
    """Of one head: what attention gives out."""
    return group.v_head_dim or group.head_dim


def kv_elements(group: AttentionLayers, tp: int) -> int:
    """Kept for each token by one layer on one GPU. The latents of ``mla`` are on every GPU."""
    if group.kind == "mla":
        return group.kv_lora_rank + group.rope_head_dim
    if group.kind == "recurrent":
        return 0
    kv_heads = -(-group.num_kv_heads // tp)  # fewer KV heads than GPUs are replicated
    return kv_heads * (group.head_dim + v_dim(group))


def _layer_gemms(shape: ModelShape, tp: int) -> list[Gemm]:
    """The weight matrices of the layers but the routed experts, as one GPU of ``tp`` holds them."""
    hidden = shape.hidden_size
    gemms: list[Gemm] = []

    def add_gemm(term: str, count: int, inputs: float, outputs: float, wide: bool = False) -> None:
        if count and inputs and outputs:
            gemms.append(Gemm(term, count, inputs, outputs, wide))

    for group in shape.attention:
        count, heads = group.num_layers, group.num_heads / tp
        output_dim = heads * v_dim(group)
        if group.kind == "mla":
            latent = group.kv_lora_rank + group.rope_head_dim
            # The compressions are small and stand whole on every GPU.
            add_gemm("qkv_proj", count, hidden, latent + group.q_lora_rank)
            add_gemm("qkv_proj", count, group.q_lora_rank or hidden, heads * qk_dim(group))
            add_gemm("qkv_proj", count, group.kv_lora_rank, heads * (group.head_dim + v_dim(group)))
        elif group.kind == "recurrent":
            projections = attention_parameters(group, hidden) / hidden / tp
            add_gemm("qkv_proj", count, hidden, projections - output_dim)
        else:
            add_gemm("qkv_proj", count, hidden, heads * group.head_dim + kv_elements(group, tp))
        add_gemm("o_proj", count, output_dim, hidden)

    def add_mlp(count: int, intermediate: float) -> None:
        add_gemm("mlp", count, hidden, (shape.num_mlp_matrices - 1) * intermediate)
        add_gemm("mlp", count, intermediate, hidden)

    add_mlp(shape.num_layers - shape.num_moe_layers, shape.intermediate_size / tp)
    add_mlp(shape.num_moe_layers, shape.shared_expert_intermediate_size / tp)
    add_gemm("router", shape.num_moe_layers, hidden, shape.num_experts, wide=True)
    return gemms


def _elementwise_elements(shape: ModelShape, tp: int) -> float:
    """Activations that kernels other than GEMMs and attention read and write for each token."""
    norms = 2 * 4 * shape.hidden_size * shape.num_layers  # each: input and residual, in and out
    rotary = total(
        2 * group.num_layers * (group.num_heads / tp * qk_dim(group) + kv_elements(group, tp))
        for group in shape.attention
        if group.kind != "recurrent"
    )
    dense = (shape.num_layers - shape.num_moe_layers) * shape.intermediate_size
    routed = shape.num_moe_layers * (
        shape.num_experts_per_token * shape.moe_intermediate_size
        + shape.shared_expert_intermediate_size
    )
    activation = shape.num_mlp_matrices * (dense + routed) / tp  # gate and up in, product out
    return norms + rotary + activation
