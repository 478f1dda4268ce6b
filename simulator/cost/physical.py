"""The roofline cost model: from a model's shape and a GPU's datasheet to the time of a step."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from catalog import DTYPE_BITS, GPU, AttentionLayers, KVDtype, ModelShape, WeightDtype, peak_flops
from simulator.cost.efficiency import Efficiencies
from simulator.cost.layers import Gemm, kv_elements, qk_dim, take_apart, total, v_dim
from simulator.cost.step import FULL, Amount, StepWork, TermModel

_WEIGHT_ONLY = ("int4", "mxfp4")
"""Weights of these types are widened in the kernel and multiplied as 16-bit numbers."""


class _GemmCost(NamedTuple):
    """A ``Gemm``: times of one layer's matrix; FLOPs and bytes of all layers together."""

    term: str
    num_layers: int
    compute_ns: float
    """For each row."""
    weights_ns: float
    activations_ns: float
    """For each row."""
    flops: float
    """For each row."""
    weight_bytes: float
    row_bytes: float

    def time_ns(self, rows: int, copies: float = 1.0) -> float:
        """All layers: ``rows`` of input through ``copies`` matrices, each row through one."""
        compute = rows * self.compute_ns
        memory = copies * self.weights_ns + rows * self.activations_ns
        return self.num_layers * math.sqrt(compute * compute + memory * memory)


class _WindowCost(NamedTuple):
    """Attention of all layers with one window; ns, FLOPs and bytes per unit of ``WindowWork``."""

    decode_kv_ns: float = 0.0
    prefill_kv_ns: float = 0.0
    prefill_pair_ns: float = 0.0
    expand_ns: float = 0.0
    """MLA: for each cached token that a prefill reads and expands to K and V again."""
    kv_bytes: float = 0.0
    decode_flops: float = 0.0
    pair_flops: float = 0.0
    expand_flops: float = 0.0

    def plus(self, other: _WindowCost) -> _WindowCost:
        return _WindowCost(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class PhysicalCost(TermModel):
    """Each operator's time from its FLOPs, its bytes and the GPU's datasheet.

    A GEMM takes sqrt(c^2 + m^2) of its compute time c and its memory time m: nearly the longer
    one where they differ, 1.4 times it where they are equal. Attention takes c + m. Every kernel
    has a fixed time besides. Times are those of one GPU of the ``tp`` that share each layer.

    Parameters
    ----------
    shape, gpu
        The model and the GPU that runs it (``tp`` of them).
    weight_dtype
        Of the linear layers. Embedding, LM head and router are 16-bit or wider in any case.
    kv_dtype
        Of the KV cache.
    tp
        Tensor-parallel GPUs; must divide the query heads.
    block_size
        Tokens of a KV block: the size of copies and swap transfers.
    swap_memory
        Kind of the host memory that swapped blocks go to.
    efficiencies
        What the datasheet does not say.

    Raises
    ------
    ValueError
        ``tp`` or ``block_size`` out of range, or a GPU without a rate for the dtype.
    """

    def __init__(
        self,
        shape: ModelShape,
        gpu: GPU,
        *,
        weight_dtype: WeightDtype,
        kv_dtype: KVDtype,
        tp: int = 1,
        block_size: int = 16,
        swap_memory: Literal["pinned", "pageable"] = "pinned",
        efficiencies: Efficiencies | None = None,
    ) -> None:
        if tp < 1 or any(group.num_heads % tp for group in shape.attention):
            heads = " or ".join(sorted({str(group.num_heads) for group in shape.attention}))
            raise ValueError(f"tp is {tp}, must divide the {heads} query heads of {shape.name}")
        if tp > 1 and not gpu.link_bandwidth > 0:
            raise ValueError(f"tp is {tp}, but {gpu.name} has no link to its peers")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, must be at least 1")
        self.shape, self.gpu, self.tp = shape, gpu, tp
        self.efficiencies = eff = efficiencies or Efficiencies()
        self._weight_dtype, self._kv_dtype, self._swap_memory = weight_dtype, kv_dtype, swap_memory
        self._bandwidth = gpu.memory_bandwidth / 1e9  # bytes per ns, as every rate from here on

        wide_dtype: WeightDtype = "fp32" if weight_dtype == "fp32" else "bf16"
        self._wide_rate, self._wide_as = _per_ns(gpu, wide_dtype)
        self._weight_rate, self._weight_as = (
            (self._wide_rate, self._wide_as)
            if weight_dtype in _WEIGHT_ONLY
            else _per_ns(gpu, weight_dtype)
        )
        self._activation_bytes = DTYPE_BITS[wide_dtype] / 8
        self._kv_element_bytes = DTYPE_BITS[kv_dtype] / 8

        parts = take_apart(shape, tp)
        self._gemms = tuple(self._gemm_cost(gemm) for gemm in parts.gemms)
        self._head = self._gemm_cost(parts.head)
        self._expert = self._gemm_cost(parts.expert) if parts.expert else None

        by_window: dict[int, _WindowCost] = {}
        for group in shape.attention:
            window = group.window if group.kind == "sliding" else FULL
            by_window[window] = by_window.get(window, _WindowCost()).plus(self._attention(group))
        self.windows = tuple(by_window)
        self._attention_costs = tuple(by_window.values())

        # Bytes for each token, sampled row, sequence or block; all layers together.
        act = self._activation_bytes
        kv_bytes = parts.kv * self._kv_element_bytes
        self.kv_write_bytes = kv_bytes + parts.kv * act
        self._query_bytes = parts.queries * act
        self._elementwise_bytes = parts.elementwise * act
        self._embedding_bytes = 2 * shape.hidden_size * act
        self._sampling_bytes = 4 * 4 * shape.vocab_size  # four passes over fp32 logits
        self._state_bytes = total(  # read and written
            2 * group.num_layers * group.state_bytes / tp for group in shape.attention
        )
        self._block_bytes = block_size * kv_bytes
        self._weight_bytes = total(gemm.weight_bytes for gemm in self._gemms)
        self._token_flops = total(gemm.flops for gemm in self._gemms)
        self._token_bytes = (
            self.kv_write_bytes
            + self._query_bytes
            + self._elementwise_bytes
            + self._embedding_bytes
            + total(gemm.row_bytes for gemm in self._gemms)
        )
        if self._expert:
            self._token_flops += shape.num_experts_per_token * self._expert.flops
            self._token_bytes += shape.num_experts_per_token * self._expert.row_bytes

        self._kernels_ns = 1e9 * (
            eff.gemm_overhead_s * parts.num_gemm_kernels
            + eff.attention_overhead_s * shape.num_layers
            + eff.elementwise_overhead_s * parts.num_other_kernels
        )
        self._head_kernels_ns = 1e9 * (eff.gemm_overhead_s + 4 * eff.elementwise_overhead_s)
        is_pinned = swap_memory == "pinned"
        self._host_rate = gpu.host_bandwidth / 1e9
        self._host_rate *= eff.pinned_bandwidth if is_pinned else eff.pageable_bandwidth
        if tp > 1:
            # Ring: a GPU sends 2 (tp - 1) / tp of the tensor; two a layer, one for the embedding.
            link = gpu.link_bandwidth / 1e9 * eff.link_bandwidth
            reduces, share = 2 * shape.num_layers + 1, (tp - 1) / tp
            self._reduce_fixed_ns = 1e9 * reduces * eff.all_reduce_overhead_s
            self._reduce_token_ns = reduces * 2 * share * shape.hidden_size * act / link
            self._gather_row_ns = share * shape.vocab_size * act / link

    def _gemm_cost(self, gemm: Gemm) -> _GemmCost:
        eff, act, count = self.efficiencies, self._activation_bytes, gemm.num_layers
        element_bytes = DTYPE_BITS[self._weight_dtype] / 8
        rate, share = self._weight_rate, eff.gemm_compute
        if gemm.wide:
            element_bytes, rate = act, self._wide_rate
        elif self._weight_as in ("fp8", "int8"):
            share = eff.gemm_compute_8bit
        memory = self._bandwidth * eff.gemm_bandwidth
        return _GemmCost(
            term=gemm.term,
            num_layers=count,
            compute_ns=2.0 * gemm.weight_elements / (rate * share),
            weights_ns=element_bytes * gemm.weight_elements / memory,
            activations_ns=act * gemm.activation_elements / memory,
            flops=2.0 * count * gemm.weight_elements,
            weight_bytes=count * element_bytes * gemm.weight_elements,
            row_bytes=count * act * gemm.activation_elements,
        )

    def _attention(self, group: AttentionLayers) -> _WindowCost:
        """Cost of the group's layers together."""
        if group.kind == "recurrent":
            return _WindowCost()
        eff, layers, heads = self.efficiencies, group.num_layers, group.num_heads / self.tp
        kv_bytes = layers * kv_elements(group, self.tp) * self._kv_element_bytes
        pair_flops = 2.0 * layers * heads * (qk_dim(group) + v_dim(group))
        decode_flops, expand_flops = pair_flops, 0.0
        if group.kind == "mla":
            # Decoding works on latents (the expansion absorbed into query and output); a prefill
            # expands them to K and V of every head.
            decode_flops = 2.0 * layers * heads * (2 * group.kv_lora_rank + group.rope_head_dim)
            expand_flops = (
                2.0 * layers * group.kv_lora_rank * heads * (group.head_dim + v_dim(group))
            )
        compute = self._wide_rate * eff.attention_compute
        return _WindowCost(
            decode_kv_ns=decode_flops / compute
            + kv_bytes / (self._bandwidth * eff.decode_bandwidth),
            prefill_kv_ns=kv_bytes / (self._bandwidth * eff.prefill_bandwidth),
            prefill_pair_ns=pair_flops / compute,
            expand_ns=expand_flops / (self._wide_rate * eff.gemm_compute),
            kv_bytes=kv_bytes,
            decode_flops=decode_flops,
            pair_flops=pair_flops,
            expand_flops=expand_flops,
        )

    def _experts_touched(self, num_tokens: int) -> float:
        """Expected number of a layer's experts that at least one of the tokens goes to."""
        num_experts = self.shape.num_experts
        missed = 1 - self.shape.num_experts_per_token / num_experts
        return num_experts * (1 - _power(missed, num_tokens))

    def work_terms(self, work: StepWork) -> dict[str, Amount]:
        """Time of each term, ns."""
        eff, bandwidth, tokens = self.efficiencies, self._bandwidth, work.num_tokens
        terms: dict[str, Amount] = {}
        for gemm in self._gemms:
            terms[gemm.term] = terms.get(gemm.term, 0.0) + gemm.time_ns(tokens)
        if self._expert:
            assigned = tokens * self.shape.num_experts_per_token
            terms["experts"] = self._expert.time_ns(assigned, self._experts_touched(tokens))
        decode: Amount = work.num_decodes * self._query_bytes / (bandwidth * eff.decode_bandwidth)
        prefill_tokens = work.num_prefill_tokens
        prefill = prefill_tokens * self._query_bytes / (bandwidth * eff.prefill_bandwidth)
        for attention, cost in zip(work.by_window, self._attention_costs, strict=True):
            decode = decode + attention.decode_kv * cost.decode_kv_ns
            prefill += (
                attention.prefill_kv * cost.prefill_kv_ns
                + attention.prefill_pairs * cost.prefill_pair_ns
            )
            if cost.expand_ns:
                prefill += (attention.prefill_kv - prefill_tokens) * cost.expand_ns
        terms["attention_decode"] = decode
        terms["attention_prefill"] = prefill
        memory = bandwidth * eff.elementwise_bandwidth
        terms["kv_write"] = (
            tokens * self.kv_write_bytes + work.num_sequences * self._state_bytes
        ) / memory
        terms["elementwise"] = tokens * self._elementwise_bytes / memory
        terms["embedding"] = tokens * self._embedding_bytes / memory
        rows = work.num_sampled
        if rows:
            terms["lm_head"] = self._head.time_ns(rows)
            terms["sampling"] = rows * self._sampling_bytes / memory
        terms["kernels"] = self._kernels_ns + (self._head_kernels_ns if rows else 0.0)
        if self.tp > 1:
            terms["all_reduce"] = self._reduce_fixed_ns + tokens * self._reduce_token_ns
            terms["logits_gather"] = rows * self._gather_row_ns
        if work.num_copies:
            terms["block_copies"] = 2 * work.num_copies * self._block_bytes / memory
        if work.num_swapped:
            terms["swap"] = work.num_swapped * self._block_bytes / self._host_rate
        terms["host"] = 1e9 * (eff.host_step_s + work.num_sequences * eff.host_seq_s)
        return terms

    def work_flops_bytes(self, work: StepWork) -> tuple[Amount, Amount]:
        """Useful FLOPs and bytes through memory, per GPU."""
        tokens, rows = work.num_tokens, work.num_sampled
        flops: Amount = tokens * self._token_flops + rows * self._head.flops
        num_bytes: Amount = (
            self._weight_bytes
            + tokens * self._token_bytes
            + work.num_sequences * self._state_bytes
            + (2 * work.num_copies + work.num_swapped) * self._block_bytes
        )
        if rows:
            num_bytes += self._head.weight_bytes
            num_bytes += rows * (self._head.row_bytes + self._sampling_bytes)
        if self._expert:
            num_bytes += self._expert.weight_bytes * self._experts_touched(tokens)
        for attention, cost in zip(work.by_window, self._attention_costs, strict=True):
            flops = flops + (
                attention.decode_kv * cost.decode_flops + attention.prefill_pairs * cost.pair_flops
            )
            if cost.expand_flops:
                flops = flops + (attention.prefill_kv - work.num_prefill_tokens) * cost.expand_flops
            num_bytes = num_bytes + (attention.decode_kv + attention.prefill_kv) * cost.kv_bytes
        return flops, num_bytes

    def describe(self) -> list[str]:
        """Lines for the report: what is assumed, and what is not modelled."""
        gpus = self.gpu.name if self.tp == 1 else f"{self.tp} x {self.gpu.name}"
        lines = [
            f"physical cost model: {self.shape.name}, {self._weight_dtype} weights, "
            f"{self._kv_dtype} KV, on {gpus}; datasheet figures x assumed efficiencies, not "
            "calibrated",
        ]
        if self._weight_dtype in _WEIGHT_ONLY:
            lines.append(
                f"{self._weight_dtype} weights are widened in the kernel: multiplied at the "
                f"{self._weight_as} rate"
            )
        elif self._weight_as != self._weight_dtype:
            lines.append(
                f"{self.gpu.name} has no {self._weight_dtype} rate: multiplied at the "
                f"{self._weight_as} rate"
            )
        if DTYPE_BITS[self._weight_dtype] < 16:
            lines.append(
                "embedding, LM head, router and attention's arithmetic stay at 16 bits; scales of "
                "quantised weights are not counted"
            )
        lines += self.efficiencies.lines(link=self.tp > 1)
        if self.shape.num_experts:
            lines.append(
                "tokens choose experts evenly and independently; experts are split over the GPUs "
                "as dense layers are (no expert parallelism)"
            )
        if any(group.kind == "recurrent" for group in self.shape.attention):
            lines.append("recurrent layers: projections and state traffic only, no scan")
        return [
            *lines,
            f"swap transfers go over the host link at {self._swap_memory} speed, one direction "
            "at a time, and hide behind nothing",
            "sampling: four passes over fp32 logits",
            "not modelled: pipeline, expert and data parallelism, asynchronous scheduling, "
            "speculative decoding, overlap of communication with computation, CUDA graph padding, "
            "GEMM tile and wave steps, power and thermal limits, LoRA, vision towers",
        ]


def _power(base: float, exponent: int) -> float:
    """``base`` ** ``exponent`` by squaring: ``pow`` is not the same on every machine."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _per_ns(gpu: GPU, dtype: str) -> tuple[float, str]:
    """Peak FLOPs per ns for ``dtype``, and the dtype whose rate that is."""
    peak = peak_flops(gpu, dtype)
    return peak.flops / 1e9, peak.dtype
