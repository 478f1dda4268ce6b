"""How many weights a shape has, by kind; small vectors (norms, biases) approximately."""

from __future__ import annotations

from typing import NamedTuple

from catalog.shapes import AttentionLayers, ModelShape


class ParameterCount(NamedTuple):
    """Weights by kind; matrices are exact, ``norms`` holds all vectors."""

    embedding: int
    lm_head: int
    """0 where it is the embedding matrix (tied)."""
    attention: int
    mlp: int
    """Dense MLPs."""
    experts: int
    """All routed experts."""
    shared_experts: int
    router: int
    norms: int
    """Norm weights (two a layer and the last) and QKV biases."""

    @property
    def total(self) -> int:
        return sum(self)


def attention_parameters(layers: AttentionLayers, hidden_size: int) -> int:
    """Projection weights of one layer of the group.

    ``mla``: the query (through ``q_lora_rank`` where there is one), the joint KV compression, its
    expansion and the output. ``recurrent``: the projections of a gated delta net (query, key,
    value, gate, output), with ``num_heads`` value heads of ``v_head_dim`` and ``num_kv_heads`` key
    heads of ``head_dim``; 0 where those are not known.
    """
    heads, kv_heads, k_dim = layers.num_heads, layers.num_kv_heads, layers.head_dim
    v_dim = layers.v_head_dim or k_dim
    if layers.kind == "recurrent":
        return hidden_size * (2 * kv_heads * k_dim + 3 * heads * v_dim)
    if layers.kind == "mla":
        query_dim = heads * (k_dim + layers.rope_head_dim)
        query = (
            layers.q_lora_rank * (hidden_size + query_dim)
            if layers.q_lora_rank
            else hidden_size * query_dim
        )
        compress = hidden_size * (layers.kv_lora_rank + layers.rope_head_dim)
        expand = layers.kv_lora_rank * heads * (k_dim + v_dim)
        return query + compress + expand + heads * v_dim * hidden_size
    return hidden_size * (heads * k_dim + kv_heads * (k_dim + v_dim) + heads * v_dim)


def count_parameters(shape: ModelShape) -> ParameterCount:
    """Weights of the decoder by kind (no vision tower, no multi-token prediction layers)."""
    hidden = shape.hidden_size
    dense_layers = shape.num_layers - shape.num_moe_layers
    expert = shape.num_mlp_matrices * hidden * shape.moe_intermediate_size
    biases = sum(
        group.num_layers
        * (
            group.num_heads * group.head_dim
            + group.num_kv_heads * (group.head_dim + (group.v_head_dim or group.head_dim))
        )
        for group in shape.attention
        if shape.attention_bias and group.kind in ("full", "sliding")
    )
    return ParameterCount(
        embedding=shape.vocab_size * hidden,
        lm_head=0 if shape.tie_word_embeddings else shape.vocab_size * hidden,
        attention=sum(
            group.num_layers * attention_parameters(group, hidden) for group in shape.attention
        ),
        mlp=dense_layers * shape.num_mlp_matrices * hidden * shape.intermediate_size,
        experts=shape.num_moe_layers * shape.num_experts * expert,
        shared_experts=shape.num_moe_layers
        * shape.num_mlp_matrices
        * hidden
        * shape.shared_expert_intermediate_size,
        router=shape.num_moe_layers * shape.num_experts * hidden,
        norms=(2 * shape.num_layers + 1) * hidden + biases,
    )


def num_parameters(shape: ModelShape) -> int:
    """All weights of the decoder."""
    return count_parameters(shape).total


def num_active_parameters(shape: ModelShape) -> int:
    """Weights that one token is multiplied with, the LM head included.

    Of the routed experts, ``num_experts_per_token`` a layer; the embedding is looked up, not
    multiplied, and counts only as a tied LM head.
    """
    count = count_parameters(shape)
    active_experts = (
        count.experts * shape.num_experts_per_token // shape.num_experts if shape.num_experts else 0
    )
    head = shape.vocab_size * shape.hidden_size
    return count.total - count.embedding - count.lm_head - count.experts + active_experts + head
