"""The physical cost model: from a model's shape and a GPU's datasheet to the time of a step."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from catalog import DTYPE_BITS, GPU, AttentionLayers, KVDtype, ModelShape, WeightDtype, peak_flops
from simulator.cost.factors import SERVING_MEANING, Factors, factors_for
from simulator.cost.kernels import GemmFactors, decode_attention, prefill_attention
from simulator.cost.layers import Gemm, kv_elements, qk_dim, take_apart, total, v_dim
from simulator.cost.step import FULL, Amount, Count, StepWork, TermModel

_WEIGHT_ONLY = ("int4", "mxfp4")
"""Weights of these types are widened in the kernel and multiplied as 16-bit numbers."""
LARGEST_GRAPH = 512
"""Tokens of a step up to which vLLM captures CUDA graphs; no more than twice ``max_num_seqs``."""


class _GemmCost:
    """A ``Gemm``: time of one layer's matrix; FLOPs and bytes of all layers together."""

    def __init__(
        self,
        gemm: Gemm,
        factors: GemmFactors,
        gpu: GPU,
        *,
        element_bytes: float,
        activation_bytes: float,
        flops_per_s: float,
    ) -> None:
        self.term, self.num_layers = gemm.term, gemm.num_layers
        self._time = partial(
            factors.time_ns,
            columns=gemm.columns,
            depth=gemm.depth,
            weight_bytes=element_bytes * gemm.weight_elements,
            activation_bytes=activation_bytes * gemm.activation_elements,
            peak_flops=flops_per_s,
            bandwidth=gpu.memory_bandwidth,
            num_sms=gpu.num_sms,
        )
        self._known: dict[int, float] = {}
        self.flops = 2.0 * gemm.num_layers * gemm.weight_elements
        """For each row."""
        self.weight_bytes = gemm.num_layers * element_bytes * gemm.weight_elements
        self.row_bytes = gemm.num_layers * activation_bytes * gemm.activation_elements

    def time_ns(self, rows: Count) -> Amount:
        """All layers, with ``rows`` of input (above 0)."""
        if isinstance(rows, np.ndarray):
            times: Amount = self.num_layers * self._time(rows)
            return times
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = float(self.num_layers * self._time(rows))
        return known


class WindowCost(NamedTuple):
    """Attention of the layers that have one window and one shape, for one of them: ns for each unit of
    ``WindowWork``; FLOPs and bytes of all of them."""

    num_layers: int
    decode_kv_ns: float
    decode_query_ns: float
    decode_pair_ns: float
    decode_head_ns: float
    prefill_kv_ns: float
    prefill_query_ns: float
    prefill_pair_ns: float
    triangle_ns: float
    """More, for each pair with a key of the same chunk."""
    prefill_tile_ns: float
    expand_ns: float
    """MLA: for each cached token that a prefill reads and expands to K and V again."""
    kv_bytes: float
    decode_flops: float
    pair_flops: float
    expand_flops: float


class PhysicalCost(TermModel):
    """Each operator's time from its FLOPs, its bytes, the GPU's datasheet and fitted factors.

    The forms are those of ``simulator.cost.kernels``. Times are those of one GPU of the ``tp`` that
    share each layer; with ``pp`` stages, a step's sequences follow one another through them in as
    many parts.

    Parameters
    ----------
    shape, gpu
        The model and the GPU that runs it (``tp`` x ``pp`` of them).
    weight_dtype
        Of the linear layers. Embedding, LM head and router are 16-bit or wider in any case.
    kv_dtype
        Of the KV cache.
    tp, pp
        Tensor- and pipeline-parallel GPUs; ``tp`` must divide the query heads.
    block_size
        Tokens of a KV block: the size of copies and swap transfers.
    swap_memory
        Kind of the host memory that swapped blocks go to.
    async_scheduling
        The host prepares a step while the GPU runs the one before: its time shows only where it is
        the longer one.
    enforce_eager
        No CUDA graphs: a step lasts at least as long as the host takes to launch its kernels.
    max_num_seqs
        Of the scheduler, which limits the captured graphs (``None`` = no limit of its own).
    factors
        What the datasheet does not say (``None`` = fitted ones, ``factors_for``).

    Raises
    ------
    ValueError
        ``tp``, ``pp`` or ``block_size`` out of range, or a GPU without a rate for the dtype.
    """

    def __init__(
        self,
        shape: ModelShape,
        gpu: GPU,
        *,
        weight_dtype: WeightDtype,
        kv_dtype: KVDtype,
        tp: int = 1,
        pp: int = 1,
        block_size: int = 16,
        swap_memory: Literal["pinned", "pageable"] = "pinned",
        async_scheduling: bool = True,
        enforce_eager: bool = False,
        max_num_seqs: int | None = None,
        factors: Factors | None = None,
    ) -> None:
        if tp < 1 or any(group.num_heads % tp for group in shape.attention):
            heads = " or ".join(sorted({str(group.num_heads) for group in shape.attention}))
            raise ValueError(f"tp is {tp}, must divide the {heads} query heads of {shape.name}")
        if not 1 <= pp <= shape.num_layers:
            raise ValueError(f"pp is {pp}, expected from 1 to {shape.num_layers}, the layers")
        if tp * pp > 1 and not gpu.link_bandwidth > 0:
            raise ValueError(f"tp x pp is {tp * pp}, but {gpu.name} has no link to its peers")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, must be at least 1")
        self.shape, self.gpu, self.tp, self.pp = shape, gpu, tp, pp
        self.factors = factors = factors or factors_for(gpu)
        self.async_scheduling, self.enforce_eager = async_scheduling, enforce_eager
        self._max_num_seqs = max_num_seqs
        self._largest_graph = LARGEST_GRAPH
        if max_num_seqs is not None:
            self._largest_graph = min(LARGEST_GRAPH, 2 * max_num_seqs)
        self._weight_dtype, self._kv_dtype, self._swap_memory = weight_dtype, kv_dtype, swap_memory
        serving = factors.serving
        bandwidth = gpu.memory_bandwidth / 1e9  # bytes per ns, as every rate from here on

        wide_dtype: WeightDtype = "fp32" if weight_dtype == "fp32" else "bf16"
        self._wide_rate, self._wide_as = _per_s(gpu, wide_dtype)
        self._weight_rate, self._weight_as = (
            (self._wide_rate, self._wide_as)
            if weight_dtype in _WEIGHT_ONLY
            else _per_s(gpu, weight_dtype)
        )
        self._activation_bytes = DTYPE_BITS[wide_dtype] / 8
        self._kv_element_bytes = DTYPE_BITS[kv_dtype] / 8

        parts = take_apart(shape, tp)
        self.gemms = tuple(self._gemm_cost(gemm) for gemm in parts.gemms)
        self.head = self._gemm_cost(parts.head)
        self.experts = self._gemm_cost(parts.expert) if parts.expert else None
        if parts.expert:
            width = DTYPE_BITS[weight_dtype] / 8
            self._expert_row_ns = (
                2e9 * parts.expert.weight_elements / (self._weight_rate * serving.experts_compute)
            )
            memory = bandwidth * serving.experts_bandwidth
            self._expert_weights_ns = width * parts.expert.weight_elements / memory
            act = self._activation_bytes
            self._expert_activations_ns = act * parts.expert.activation_elements / memory

        groups = [group for group in shape.attention if group.kind != "recurrent"]
        self.windows = tuple(dict.fromkeys(_window(group) for group in groups)) or (FULL,)
        self.attention = tuple(
            (self.windows.index(_window(group)), self._attention(group)) for group in groups
        )
        self.prefill_fixed_ns = 1e9 * (factors.prefill.fixed_s + serving.piece_s)
        """Of one layer."""
        self._num_attention_layers = sum(group.num_layers for group in groups)

        # Bytes for each token, sampled row, sequence or block; all layers together.
        act = self._activation_bytes
        kv_bytes = parts.kv * self._kv_element_bytes
        self.kv_write_bytes = kv_bytes + parts.kv * act
        self.elementwise_bytes = parts.elementwise * act
        self.embedding_bytes = 2 * shape.hidden_size * act
        self.sampling_bytes = 4 * 4 * shape.vocab_size  # four passes over fp32 logits
        self.state_bytes = total(  # read and written
            2 * group.num_layers * group.state_bytes / tp for group in shape.attention
        )
        self._block_size, self._block_bytes = block_size, block_size * kv_bytes
        self.weight_bytes = total(gemm.weight_bytes for gemm in self.gemms)
        self.token_flops = total(gemm.flops for gemm in self.gemms)
        self.token_bytes = (
            self.kv_write_bytes
            + parts.queries * act
            + self.elementwise_bytes
            + self.embedding_bytes
            + total(gemm.row_bytes for gemm in self.gemms)
        )
        if self.experts:
            self.token_flops += shape.num_experts_per_token * self.experts.flops
            self.token_bytes += shape.num_experts_per_token * self.experts.row_bytes

        self.elementwise_rate = bandwidth * serving.elementwise_bandwidth
        self._kernels_ns = 1e9 * serving.elementwise_s * parts.num_other_kernels
        self._head_kernels_ns = 1e9 * serving.elementwise_s * 4
        num_gemms = sum(gemm.num_layers for gemm in self.gemms) + 2 * shape.num_moe_layers
        num_kernels = parts.num_other_kernels + num_gemms + self._num_attention_layers
        self.launch_ns = round(1e9 * serving.launch_s * num_kernels) if enforce_eager else 0
        self.step_ns, self.sequence_ns = 1e9 * serving.step_s, 1e9 * serving.sequence_s
        self._host_step_ns, self._host_sequence_ns = (
            round(1e9 * serving.host_step_s),
            round(1e9 * serving.host_sequence_s),
        )
        is_pinned = swap_memory == "pinned"
        self._host_rate = gpu.host_bandwidth / 1e9
        self._host_rate *= serving.pinned_bandwidth if is_pinned else serving.pageable_bandwidth
        self._token_message = shape.hidden_size * act
        """Bytes that a token's hidden state takes."""
        self._reduces: dict[int, float] = {}

    def with_factors(self, factors: Factors) -> PhysicalCost:
        """The same with other factors."""
        return self._like(self.gpu, factors)

    def slower(self, times: float) -> PhysicalCost:
        """The same with every step ``times`` as long: as a GPU with all of its rates divided by that."""
        gpu = replace(
            self.gpu,
            memory_bandwidth=self.gpu.memory_bandwidth / times,
            flops={dtype: rate / times for dtype, rate in self.gpu.flops.items()},
            link_bandwidth=self.gpu.link_bandwidth / times,
            host_bandwidth=self.gpu.host_bandwidth / times,
        )
        return self._like(gpu, self.factors.slower(times))

    def _like(self, gpu: GPU, factors: Factors) -> PhysicalCost:
        return PhysicalCost(
            self.shape,
            gpu,
            weight_dtype=self._weight_dtype,
            kv_dtype=self._kv_dtype,
            tp=self.tp,
            pp=self.pp,
            block_size=self._block_size,
            swap_memory=self._swap_memory,
            async_scheduling=self.async_scheduling,
            enforce_eager=self.enforce_eager,
            max_num_seqs=self._max_num_seqs,
            factors=factors,
        )

    def _gemm_cost(self, gemm: Gemm) -> _GemmCost:
        is_8bit = not gemm.wide and self._weight_as in ("fp8", "int8")
        wide_bytes = self._activation_bytes
        return _GemmCost(
            gemm,
            self.factors.gemm_8bit if is_8bit else self.factors.gemm,
            self.gpu,
            element_bytes=wide_bytes if gemm.wide else DTYPE_BITS[self._weight_dtype] / 8,
            activation_bytes=wide_bytes,
            flops_per_s=self._wide_rate if gemm.wide else self._weight_rate,
        )

    def _attention(self, group: AttentionLayers) -> WindowCost:
        layers, heads = group.num_layers, group.num_heads / self.tp
        decode, prefill = self.factors.decode, self.factors.prefill
        kv_bytes = kv_elements(group, self.tp) * self._kv_element_bytes
        pair_flops = 2.0 * heads * (qk_dim(group) + v_dim(group))
        decode_flops, expand_flops = pair_flops, 0.0
        kv_heads = -(-group.num_kv_heads // self.tp)
        if group.kind == "mla":
            # Decoding works on latents (the expansion absorbed into query and output); a prefill
            # expands them to K and V of every head.
            decode_flops = 2.0 * heads * (2 * group.kv_lora_rank + group.rope_head_dim)
            expand_flops = 2.0 * group.kv_lora_rank * heads * (group.head_dim + v_dim(group))
            kv_heads = 1
        query_bytes = heads * (qk_dim(group) + v_dim(group)) * self._activation_bytes
        bandwidth, rate = self.gpu.memory_bandwidth / 1e9, self._wide_rate / 1e9
        pair_ns = pair_flops / (rate * prefill.compute)
        expand_rate = rate * self.factors.gemm.kernels[-1].compute
        return WindowCost(
            num_layers=layers,
            decode_kv_ns=kv_bytes / (bandwidth * decode.bandwidth),
            decode_query_ns=query_bytes / (bandwidth * decode.bandwidth),
            decode_pair_ns=decode_flops / (rate * decode.compute),
            decode_head_ns=1e9 * decode.head_s * kv_heads / self.gpu.num_sms,
            prefill_kv_ns=kv_bytes / (bandwidth * prefill.bandwidth),
            prefill_query_ns=query_bytes / (bandwidth * prefill.bandwidth),
            prefill_pair_ns=pair_ns,
            triangle_ns=pair_ns * (prefill.triangle - 1.0),
            prefill_tile_ns=1e9 * prefill.tile_s * heads / self.gpu.num_sms,
            expand_ns=expand_flops / expand_rate,
            kv_bytes=layers * kv_bytes,
            decode_flops=layers * decode_flops,
            pair_flops=layers * pair_flops,
            expand_flops=layers * expand_flops,
        )

    def experts_touched(self, num_tokens: Count) -> Amount:
        """Expected number of a layer's experts that at least one of the tokens goes to."""
        num_experts = self.shape.num_experts
        missed = 1 - self.shape.num_experts_per_token / num_experts
        return num_experts * (1 - _power(missed, num_tokens))

    def rows(self, num_tokens: Count) -> Count:
        """Rows that the products compute: with CUDA graphs, those of the next captured size."""
        if self.enforce_eager:
            return num_tokens
        return graph_size(num_tokens, self._largest_graph)

    def work_terms(self, work: StepWork) -> dict[str, Amount]:
        """Time of each term but the host's, ns."""
        parts = self.pp if self.pp < work.num_sequences else work.num_sequences
        tokens, seqs = -(-work.num_tokens // parts), -(-work.num_sequences // parts)
        terms = self.token_terms(tokens)
        terms |= self.attention_terms(work, parts)
        memory = self.elementwise_rate
        terms["kv_write"] = (tokens * self.kv_write_bytes + seqs * self.state_bytes) / memory
        if work.num_sampled:
            terms |= self.head_terms(-(-work.num_sampled // parts), parts)
        if work.num_copies:
            terms["block_copies"] = 2 * work.num_copies * self._block_bytes / memory
        if work.num_swapped:
            terms["swap"] = work.num_swapped * self._block_bytes / self._host_rate
        terms["between_steps"] = self.step_ns + work.num_sequences * self.sequence_ns
        return terms

    def token_terms(self, tokens: Count) -> dict[str, Amount]:
        """What the number of tokens alone decides, ns."""
        rows = self.rows(tokens)
        terms: dict[str, Amount] = {}
        for gemm in self.gemms:
            terms[gemm.term] = terms.get(gemm.term, 0.0) + gemm.time_ns(rows)
        if self.experts:
            terms["experts"] = self._experts_ns(tokens)
        memory = self.elementwise_rate
        terms["elementwise"] = tokens * self.elementwise_bytes / memory
        terms["embedding"] = tokens * self.embedding_bytes / memory
        terms["kernels"] = self._kernels_ns
        if self.tp > 1:
            terms["all_reduce"] = self._all_reduce_ns(tokens)
        if self.pp > 1:
            reduce = self.factors.reduce
            link = self.gpu.link_bandwidth / 1e9 * reduce.ring_share
            send = tokens * self._token_message / self.tp / link
            terms["send"] = (self.pp - 1) * (1e9 * reduce.ring_fixed_s + send)
        return terms

    def head_terms(self, sampled: Count, parts: int = 1) -> dict[str, Amount]:
        """Logits and sampling of so many rows (above 0) in each of ``parts``, ns.

        They are the last stage's alone, so that each part of a step waits for them.
        """
        memory = self.elementwise_rate
        terms: dict[str, Amount] = {
            "lm_head": parts * self.head.time_ns(sampled),
            "sampling": parts * (sampled * self.sampling_bytes / memory + self._head_kernels_ns),
        }
        if self.tp > 1:
            share = (self.tp - 1) / self.tp
            link = self.gpu.link_bandwidth / 1e9 * self.factors.reduce.ring_share
            vocab_bytes = self.shape.vocab_size * self._activation_bytes
            terms["logits_gather"] = sampled * (share * vocab_bytes / link)
        return terms

    def _experts_ns(self, tokens: Count) -> Amount:
        assert self.experts is not None
        rows = tokens * self.shape.num_experts_per_token
        compute = rows * self._expert_row_ns
        memory = (
            self.experts_touched(tokens) * self._expert_weights_ns
            + rows * self._expert_activations_ns
        )
        fixed = 2e9 * self.factors.gemm.kernels[0].fixed_s  # two grouped products
        return self.experts.num_layers * (fixed + np.sqrt(compute * compute + memory * memory))

    def _all_reduce_ns(self, tokens: Count) -> Amount:
        """Two a layer and one for the embedding."""
        reduces = 2 * self.shape.num_layers + 1
        if isinstance(tokens, np.ndarray):
            return np.array([self._all_reduce_ns(count) for count in tokens.tolist()])
        known = self._reduces.get(tokens)
        if known is None:
            seconds = self.factors.reduce.time_s(
                tokens * self._token_message, self.tp, self.gpu.link_bandwidth
            )
            known = self._reduces[tokens] = reduces * (1e9 * seconds)
        return known

    def attention_terms(self, work: StepWork, parts: int = 1) -> dict[str, Amount]:
        """``attention_decode`` and ``attention_prefill``; one kernel serves a step with both."""
        decode: Amount = 0.0
        prefill: Amount = 0.0
        decode_factors, prefill_factors = self.factors.decode, self.factors.prefill
        layers = self._num_attention_layers
        if work.num_decodes:
            for index, cost in self.attention:
                decode = decode + cost.num_layers * decode_attention(
                    work.by_window[index].decode_kv / parts,
                    work.num_decodes / parts,
                    cost.decode_kv_ns,
                    cost.decode_query_ns,
                    cost.decode_pair_ns,
                    cost.decode_head_ns,
                    1e9 * decode_factors.key_s,
                    decode_factors.overlap,
                )
        if work.num_prefills:
            tokens = work.num_prefill_tokens
            for index, cost in self.attention:
                attention = work.by_window[index]
                triangle = min(work.prefill_triangle, attention.prefill_pairs)
                prefill = prefill + cost.num_layers * prefill_attention(
                    attention.prefill_kv / parts,
                    attention.prefill_pairs / parts,
                    triangle / parts,
                    tokens / parts,
                    work.num_prefills / parts,
                    cost.prefill_kv_ns,
                    cost.prefill_query_ns,
                    cost.prefill_pair_ns,
                    cost.triangle_ns,
                    cost.prefill_tile_ns,
                    1e9 * prefill_factors.key_s,
                    prefill_factors.overlap,
                )
                prefill = prefill + cost.num_layers * (
                    (attention.prefill_kv - tokens) / parts * cost.expand_ns
                )
            prefill = prefill + layers * self.prefill_fixed_ns
        elif work.num_decodes:
            decode = decode + layers * (1e9 * decode_factors.fixed_s)
        return {"attention_decode": decode, "attention_prefill": prefill}

    def host_ns(self, num_sequences: int) -> int:
        """Work of the host for a step, whole ns."""
        return self._host_step_ns + num_sequences * self._host_sequence_ns

    def host_terms(self, work: StepWork, device_ns: Count) -> dict[str, Count]:
        """What the host adds to ``device_ns``: launches hide behind the GPU, and the rest of its work too
        where scheduling is asynchronous; both are the same host's."""
        host, launches = self.host_ns(work.num_sequences), self.launch_ns
        if self.async_scheduling:
            term = np.maximum(host + launches - device_ns, 0)
        else:
            term = host + np.maximum(launches - device_ns, 0)
        return {"host": term if isinstance(device_ns, np.ndarray) else int(term)}

    def work_flops_bytes(self, work: StepWork) -> tuple[Amount, Amount]:
        """Useful FLOPs and bytes through memory, per GPU of one stage x ``pp``."""
        tokens, rows = work.num_tokens, work.num_sampled
        flops: Amount = tokens * self.token_flops + rows * self.head.flops
        num_bytes: Amount = (
            self.weight_bytes
            + tokens * self.token_bytes
            + work.num_sequences * self.state_bytes
            + (2 * work.num_copies + work.num_swapped) * self._block_bytes
        )
        if rows:
            num_bytes += self.head.weight_bytes
            num_bytes += rows * (self.head.row_bytes + self.sampling_bytes)
        if self.experts:
            num_bytes += self.experts.weight_bytes * self.experts_touched(tokens)
        for index, cost in self.attention:
            attention = work.by_window[index]
            flops = flops + (
                attention.decode_kv * cost.decode_flops + attention.prefill_pairs * cost.pair_flops
            )
            if cost.expand_flops:
                flops = flops + (attention.prefill_kv - work.num_prefill_tokens) * cost.expand_flops
            num_bytes = num_bytes + (attention.decode_kv + attention.prefill_kv) * cost.kv_bytes
        return flops / self.pp, num_bytes / self.pp

    def describe(self) -> list[str]:
        """Lines for the report: what is assumed, and what is not modelled."""
        gpus = self.gpu.name if self.tp * self.pp == 1 else f"{self.tp * self.pp} x {self.gpu.name}"
        lines = [
            f"physical cost model: {self.shape.name}, {self._weight_dtype} weights, "
            f"{self._kv_dtype} KV, on {gpus}; step times: {self.factors.basis}",
            self.factors.about,
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
        serving = self.factors.serving
        figures = "; ".join(
            f"{meaning} {_figure(name, getattr(serving, name))}"
            for name, meaning in SERVING_MEANING.items()
            if self._uses(name)
        )
        lines.append(f"engine: {figures}")
        if self.async_scheduling:
            lines.append(
                "asynchronous scheduling: the host's work hides behind the GPU's, and a request that "
                "arrives during a step is seen when the next one has begun"
            )
        if self.shape.num_experts:
            lines.append(
                "tokens choose experts evenly and independently; experts are split over the GPUs "
                "as dense layers are (no expert parallelism)"
            )
        if any(group.kind == "recurrent" for group in self.shape.attention):
            lines.append("recurrent layers: projections and state traffic only, no scan")
        if self.pp > 1:
            lines.append(
                f"pipeline: layers divide evenly over {self.pp} stages, a step's sequences into as "
                "many equal parts (fewer sequences leave bubbles)"
            )
        return [
            *lines,
            f"swap transfers go over the host link at {self._swap_memory} speed, one direction "
            "at a time, and hide behind nothing",
            "sampling: four passes over fp32 logits",
            "not modelled: expert and data parallelism, speculative decoding, overlap of "
            "communication with computation, power and thermal limits, LoRA, vision towers",
        ]

    def _uses(self, name: str) -> bool:
        if name == "launch_s":
            return self.enforce_eager
        if name.startswith("experts"):
            return self.experts is not None
        if name in ("pinned_bandwidth", "pageable_bandwidth"):
            return name.startswith(self._swap_memory)
        return True


def _figure(name: str, value: float) -> str:
    return f"{value * 1e6:.4g} us" if name.endswith("_s") else f"{value:.3g}"


def _window(group: AttentionLayers) -> int:
    return group.window if group.kind == "sliding" else FULL


def graph_size(num_tokens: Count, largest: int = LARGEST_GRAPH) -> Count:
    """Tokens that a CUDA graph of vLLM computes for so many: 1, 2, 4, then multiples of 8, from 256 on of
    16, up to ``largest``; more are computed as they are."""
    if isinstance(num_tokens, np.ndarray):
        counts = num_tokens.tolist()
        sizes: Count = np.array([graph_size(count, largest) for count in counts], np.int64)
        return sizes
    if num_tokens > largest:
        return num_tokens
    if num_tokens > 4:
        step = 8 if num_tokens <= 256 else 16
        return -(-num_tokens // step) * step
    return 4 if num_tokens == 3 else num_tokens


def _power(base: float, exponent: Count) -> Amount:
    """``base`` ** ``exponent`` by squaring: ``pow`` is not the same on every machine."""
    if isinstance(exponent, np.ndarray):
        return np.array([_power(base, count) for count in exponent.tolist()], np.float64)
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _per_s(gpu: GPU, dtype: str) -> tuple[float, str]:
    """Peak FLOP/s for ``dtype``, and the dtype whose rate that is."""
    peak = peak_flops(gpu, dtype)
    assert math.isfinite(peak.flops)
    return peak.flops, peak.dtype
