"""Where a GPU's memory goes before KV gets its share: weights, activations, the engine's reserve.

Only the weights follow from the shape. The activation peak and the reserve are estimates, said to
be so wherever they are printed; a KV size that an engine measured at start-up beats both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from blockmanager.ledger import GIB, cdiv, kv_heads_per_gpu
from catalog import (
    DTYPE_BITS,
    GPU,
    AttentionLayers,
    ModelShape,
    attention_parameters,
    count_parameters,
)

DEFAULT_UTILIZATION = 0.9
"""vLLM's ``gpu_memory_utilization``."""
DEFAULT_MAX_NUM_BATCHED_TOKENS = 8192
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_RESERVE_BYTES = GIB
"""CUDA context, library workspaces and CUDA graphs together; assumed."""

# Scales stored beside quantised weights: (bytes, weights that share them).
_WEIGHT_SCALES: Mapping[str, tuple[int, int]] = {"int4": (2, 128), "mxfp4": (1, 32)}


class WeightBytes(NamedTuple):
    """Bytes of weights on one GPU of a TP group."""

    linear: int
    """Attention projections and dense MLPs."""
    experts: int
    """Routed and shared experts."""
    embedding: int
    """Embedding, and the LM head where it is separate."""
    other: int
    """Routers, norms and biases, the same on every GPU."""
    note: str
    """What was assumed of the format."""

    @property
    def total(self) -> int:
        return self.linear + self.experts + self.embedding + self.other


def weight_bytes(shape: ModelShape, weight_dtype: str, tp: int = 1) -> WeightBytes:
    """Weights on one GPU.

    Split over the GPUs: query, output and MLP matrices, experts (each GPU a slice of all), the
    vocabulary. KV projections are split down to one head each. Replicated: routers, norms, and
    what compresses the queries and keys of MLA. Quantised types hold the linear layers only
    (``mxfp4``: the experts only); the rest stays in 16 bits.

    Raises ``ValueError`` for a dtype that is not one, or heads that ``tp`` does not divide.
    """
    if weight_dtype not in DTYPE_BITS:
        known = ", ".join(DTYPE_BITS)
        raise ValueError(f"weight dtype is {weight_dtype!r}, expected one of {known}")
    hidden = shape.hidden_size
    plain_bits = max(16, DTYPE_BITS[weight_dtype])
    linear_bits = _bits(weight_dtype) if weight_dtype != "mxfp4" else 16.0
    attention = sum(
        layers.num_layers * _attention_per_gpu(layers, hidden, tp) for layers in shape.attention
    )
    matrices = shape.num_mlp_matrices * hidden
    mlp = (shape.num_layers - shape.num_moe_layers) * matrices * cdiv(shape.intermediate_size, tp)
    expert_columns = shape.num_experts * cdiv(shape.moe_intermediate_size, tp)
    expert_columns += cdiv(shape.shared_expert_intermediate_size, tp)
    experts = shape.num_moe_layers * matrices * expert_columns
    vocab = (1 if shape.tie_word_embeddings else 2) * cdiv(shape.vocab_size, tp) * hidden
    count = count_parameters(shape)
    other = count.norms + count.router
    return WeightBytes(
        linear=int((attention + mlp) * linear_bits) // 8,
        experts=int(experts * _bits(weight_dtype)) // 8,
        embedding=vocab * plain_bits // 8,
        other=other * plain_bits // 8,
        note=_weight_note(weight_dtype),
    )


def _bits(dtype: str) -> float:
    scale_bytes, group = _WEIGHT_SCALES.get(dtype, (0, 1))
    return DTYPE_BITS[dtype] + 8 * scale_bytes / group


def _weight_note(dtype: str) -> str:
    if DTYPE_BITS[dtype] >= 16:
        return ""
    which = "experts" if dtype == "mxfp4" else "linear layers"
    text = f"{dtype} weights: {which} only, the rest in 16 bits"
    if dtype in _WEIGHT_SCALES:
        scale_bytes, group = _WEIGHT_SCALES[dtype]
        text += f"; {scale_bytes} scale byte{'s' if scale_bytes > 1 else ''} per {group} weights"
    return text


def _attention_per_gpu(layers: AttentionLayers, hidden: int, tp: int) -> int:
    """Projection weights of one layer on one GPU."""
    if tp == 1:
        return attention_parameters(layers, hidden)
    if layers.num_heads % tp:
        raise ValueError(f"TP {tp} refused: {layers.num_heads} query heads not divisible")
    heads = layers.num_heads // tp
    v_dim = layers.v_head_dim or layers.head_dim
    if layers.kind == "recurrent":
        return cdiv(attention_parameters(layers, hidden), tp)
    if layers.kind == "mla":
        query_dim = heads * (layers.head_dim + layers.rope_head_dim)
        query = (
            layers.q_lora_rank * (hidden + query_dim) if layers.q_lora_rank else hidden * query_dim
        )
        compress = hidden * (layers.kv_lora_rank + layers.rope_head_dim)
        expand = layers.kv_lora_rank * heads * (layers.head_dim + v_dim)
        return query + compress + expand + heads * v_dim * hidden
    kv_heads = kv_heads_per_gpu(layers.num_kv_heads, tp)
    return hidden * (heads * (layers.head_dim + v_dim) + kv_heads * (layers.head_dim + v_dim))


class ActivationEstimate(NamedTuple):
    """Peak of what a step holds besides weights and KV; an assumption, not a measurement."""

    peak: int
    """Bytes: the largest of the candidates below."""
    attention: int
    mlp: int
    logits: int
    formula: str
    """The candidate that is the peak, spelled out."""


def activation_bytes(
    shape: ModelShape,
    tp: int = 1,
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS,
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
) -> ActivationEstimate:
    """Estimate of one GPU's activation peak.

    For T tokens in a step, 2 bytes a value, tensors of one layer alive at a time: residual and
    input (2 x hidden) with either Q, K, V and the output (attention) or the MLP's matrices'
    results (MLP; for experts, those of the chosen ones and their outputs); or logits of
    ``max_num_seqs`` rows in bf16, fp32 and as fp32 probabilities (10 bytes a word).
    """
    tokens, hidden = max_num_batched_tokens, shape.hidden_size
    widest = 0
    for layers in shape.attention:
        v_dim = layers.v_head_dim or layers.head_dim
        heads = cdiv(layers.num_heads, tp)
        kv_heads = heads if layers.kind == "mla" else cdiv(layers.num_kv_heads, tp)
        q_dim = layers.head_dim + layers.rope_head_dim
        widest = max(widest, heads * (q_dim + v_dim) + kv_heads * (q_dim + v_dim))
    attention = tokens * (2 * hidden + widest) * 2
    dense = shape.num_mlp_matrices * cdiv(shape.intermediate_size, tp)
    experts = shape.num_experts_per_token * (
        shape.num_mlp_matrices * cdiv(shape.moe_intermediate_size, tp) + hidden
    ) + shape.num_mlp_matrices * cdiv(shape.shared_expert_intermediate_size, tp)
    inner = max(dense, experts if shape.num_moe_layers else 0)
    mlp = tokens * (2 * hidden + inner) * 2
    logits = max_num_seqs * shape.vocab_size * 10
    candidates = {
        f"attention: {tokens:,} tokens x (2 x {hidden:,} + {widest:,}) x 2 bytes": attention,
        f"MLP: {tokens:,} tokens x (2 x {hidden:,} + {inner:,}) x 2 bytes": mlp,
        f"logits: {max_num_seqs:,} rows x {shape.vocab_size:,} x 10 bytes": logits,
    }
    formula = max(candidates, key=lambda text: candidates[text])
    return ActivationEstimate(candidates[formula], attention, mlp, logits, formula)


class BudgetLine(NamedTuple):
    """One line of a GPU's budget; ``num_bytes`` is negative where something is taken away."""

    label: str
    num_bytes: int
    note: str


class GPUBudget(NamedTuple):
    """A GPU's memory, line by line, down to what is left for KV (negative: it does not fit)."""

    lines: tuple[BudgetLine, ...]
    kv_bytes: int


def gpu_budget(
    gpu: GPU,
    shape: ModelShape,
    *,
    weight_dtype: str | None = None,
    tp: int = 1,
    gpu_memory_utilization: float = DEFAULT_UTILIZATION,
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS,
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
    reserve_bytes: int = DEFAULT_RESERVE_BYTES,
) -> GPUBudget:
    """KV memory of one GPU: memory x utilisation - weights - activations - reserve.

    ``weight_dtype`` is the model's own where None. Raises ``ValueError`` for a utilisation outside
    (0, 1], and as ``weight_bytes`` does.
    """
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(
            f"gpu_memory_utilization is {gpu_memory_utilization}, expected above 0 and at most 1"
        )
    dtype = weight_dtype or shape.native_dtype
    usable = int(gpu.memory_bytes * gpu_memory_utilization)
    weights = weight_bytes(shape, dtype, tp)
    activations = activation_bytes(shape, tp, max_num_batched_tokens, max_num_seqs)
    share = f", 1 of {tp} shares" if tp > 1 else ""
    utilization = f"gpu_memory_utilization {gpu_memory_utilization:g}"
    lines = (
        BudgetLine("memory", gpu.memory_bytes, gpu.name),
        BudgetLine("not used", usable - gpu.memory_bytes, utilization),
        BudgetLine("weights", -weights.total, f"{dtype}{share}"),
        BudgetLine("activations", -activations.peak, f"assumed; {activations.formula}"),
        BudgetLine("engine reserve", -reserve_bytes, "assumed; CUDA context, workspaces, graphs"),
    )
    return GPUBudget(lines, sum(line.num_bytes for line in lines))
