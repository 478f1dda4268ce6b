"""Cost models: exact where they are simple, sane and monotonic where they are physical."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog import GPU, AttentionLayers, ModelShape, count_parameters, load_gpu, load_model
from scheduler.features import StepFeatures
from simulator.cost import (
    ConstantCost,
    CostModel,
    Factors,
    LinearCost,
    NoCacheCost,
    PhysicalCost,
    cost_model_from_flag,
    factors_for,
)
from simulator.cost.physical import graph_size
from simulator.cost.step import FULL, StepWork

LAYERS = AttentionLayers(kind="full", num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64)
SMALL = ModelShape(
    name="small",
    num_layers=2,
    hidden_size=512,
    intermediate_size=1024,
    vocab_size=1000,
    max_model_len=4096,
    attention=(LAYERS,),
)


def step(
    granted: list[int],
    computed_before: list[int],
    sampled: list[bool] | None = None,
    num_copies: int = 0,
    num_swapped_in: int = 0,
    num_swapped_out: int = 0,
) -> StepFeatures:
    return StepFeatures(
        granted=np.array(granted, dtype=np.int64),
        computed_before=np.array(computed_before, dtype=np.int64),
        sampled=np.array([True] * len(granted) if sampled is None else sampled, dtype=np.bool_),
        is_decode=np.array(
            [g == 1 and c > 0 for g, c in zip(granted, computed_before, strict=True)]
        ),
        num_copies=num_copies,
        num_swapped_in=num_swapped_in,
        num_swapped_out=num_swapped_out,
    )


def decode(batch: int, context: int) -> StepFeatures:
    """``batch`` sequences that hold ``context`` tokens each after the step."""
    return step([1] * batch, [context - 1] * batch)


def physical(
    model: str | ModelShape, gpu: str | GPU, *, weights: str = "bf16", kv: str = "bf16", tp: int = 1
) -> PhysicalCost:
    shape = load_model(model) if isinstance(model, str) else model
    device = load_gpu(gpu) if isinstance(gpu, str) else gpu
    return PhysicalCost(shape, device, weight_dtype=weights, kv_dtype=kv, tp=tp)


MODELS: dict[str, CostModel] = {
    "constant": ConstantCost(0.02),
    "linear": LinearCost(0.005, 2e-5, 5e-5, 3e-9),
    "llama": physical("llama-3.1-8b", "h100-sxm"),
    "sliding and full": physical("gemma-2-9b", "a100-80gb", tp=2),
    "mla, experts": physical("deepseek-v3", "h200", weights="fp8", kv="fp8", tp=8),
    "no cache": NoCacheCost(physical("llama-3.1-8b", "h100-sxm")),
}
sequences = st.lists(
    st.tuples(st.integers(1, 3000), st.integers(0, 40_000), st.booleans()), min_size=1, max_size=8
)
any_model = st.sampled_from(sorted(MODELS))


def features(rows: list[tuple[int, int, bool]], copies: int = 0, swapped: int = 0) -> StepFeatures:
    granted, before, sampled = (list(column) for column in zip(*rows, strict=True))
    return step(granted, before, sampled, num_copies=copies, num_swapped_in=swapped)


# --- constant and linear: exact ---


def test_constant_is_exact_over_ten_steps() -> None:
    cost = ConstantCost(0.1)
    assert sum(cost.price(decode(3, 5)).duration_ns for _ in range(10)) == 10**9


def test_linear_by_hand() -> None:
    cost = LinearCost(base_s=5e-3, per_token_s=20e-6, per_seq_s=50e-6, per_context_token_s=1e-9)
    mixed = step([1, 100, 1], [10, 0, 30])
    assert cost.terms(mixed) == {
        "base": 5_000_000,
        "per_token": 20_000 * 102,
        "per_seq": 50_000 * 3,
        "per_context_token": 11 + 100 + 31,
    }
    assert cost.price(mixed).duration_ns == 5_000_000 + 2_040_000 + 150_000 + 142


def test_linear_may_be_proportional_to_the_batch() -> None:
    cost = LinearCost(base_s=0, per_token_s=0, per_seq_s=0.001)
    assert [cost.price(decode(n, 9)).duration_ns for n in (1, 2, 7)] == [
        10**6,
        2 * 10**6,
        7 * 10**6,
    ]


def test_linear_stays_exact_beyond_what_a_double_holds() -> None:
    cost = LinearCost(1e-9, 0, 0, per_context_token_s=1)
    first = decode(1, 10**8 + 1)
    expected = [1 + 10**9 * (10**8 + 1 + j) for j in range(3)]
    assert cost.price_steps(first, 3).duration_ns.tolist() == expected
    assert cost.price(first).duration_ns == expected[0]


@pytest.mark.parametrize("bad", [0.0, -0.1, math.nan, math.inf, 1e-10])
def test_constant_refuses_a_step_that_takes_no_time(bad: float) -> None:
    with pytest.raises(ValueError, match="base"):
        ConstantCost(bad)


# --- every model ---


@settings(max_examples=60, deadline=None)
@given(any_model, sequences, st.integers(0, 5), st.integers(0, 5))
def test_terms_add_up_to_the_duration(
    name: str, rows: list[tuple[int, int, bool]], copies: int, swapped: int
) -> None:
    cost, features_of_step = MODELS[name], features(rows, copies, swapped)
    price = cost.price(features_of_step)
    assert type(price.duration_ns) is int
    assert price.duration_ns == sum(cost.terms(features_of_step).values()) > 0
    assert math.isfinite(price.flops)
    assert math.isfinite(price.bytes)


@settings(max_examples=60, deadline=None)
@given(
    any_model,
    st.lists(st.tuples(st.integers(0, 9000), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 40),
)
def test_a_run_is_its_steps_bit_for_bit(
    name: str, rows: list[tuple[int, bool]], num_steps: int
) -> None:
    cost = MODELS[name]
    first = features([(1, before, sampled) for before, sampled in rows])
    alone = [
        cost.price(replace(first, computed_before=first.computed_before + j))
        for j in range(num_steps)
    ]
    run = cost.price_steps(first, num_steps)
    assert run.duration_ns.dtype == np.int64
    assert run.duration_ns.tolist() == [price.duration_ns for price in alone]
    assert run.flops.tolist() == [price.flops for price in alone]
    assert run.bytes.tolist() == [price.bytes for price in alone]


@settings(max_examples=150, deadline=None)
@given(
    any_model,
    sequences,
    st.integers(0, 7),
    st.sampled_from(["granted", "context", "sampled", "copies", "swapped", "join"]),
)
def test_more_of_anything_never_costs_less(
    name: str, rows: list[tuple[int, int, bool]], index: int, what: str
) -> None:
    granted, before, sampled = rows[index % len(rows)]
    more, copies, swapped = list(rows), 0, 0
    match what:
        case "granted":
            more[index % len(rows)] = (granted + 1, before, sampled)
        case "context":
            more[index % len(rows)] = (granted, before + 1, sampled)
        case "sampled":
            more[index % len(rows)] = (granted, before, True)
        case "join":
            more.append((granted, before, sampled))
        case "copies":
            copies = 1
        case "swapped":
            swapped = 1
    cost = MODELS[name]
    less_price, more_price = cost.price(features(rows)), cost.price(features(more, copies, swapped))
    # A product with a row more may be another kernel, which is a little faster.
    assert more_price.duration_ns >= 0.97 * less_price.duration_ns
    assert more_price.flops >= less_price.flops
    assert more_price.bytes >= less_price.bytes


@pytest.mark.parametrize("name", sorted(MODELS))
def test_si_06_no_step_computes_nothing(name: str) -> None:
    with pytest.raises(AssertionError, match="at least one token"):
        MODELS[name].price(step([1, 0], [5, 64]))
    fully_cached = step([16] * 4, [48] * 4)
    assert MODELS[name].price(fully_cached).duration_ns > 0


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_run_of_prefills_is_refused(name: str) -> None:
    with pytest.raises(AssertionError, match="only steps of decodes"):
        MODELS[name].price_steps(step([2], [5]), 2)


# --- a step as sums, against the slow obvious way ---


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=5),
    st.integers(1, 15),
)
def test_work_counts_query_key_pairs(rows: list[tuple[int, int]], window: int) -> None:
    work = StepWork.of(features([(g, c, True) for g, c in rows]), (window, FULL))
    for attention, width in zip(work.by_window, (window, FULL), strict=True):
        decode_kv = prefill_kv = pairs = 0
        for granted, before in rows:
            queries = range(before, before + granted)
            keys = [{k for k in range(q + 1) if q - k < width} for q in queries]
            if granted == 1:
                decode_kv += len(keys[0])
            else:
                pairs += sum(map(len, keys))
                prefill_kv += len(set.union(*keys))
        assert attention == (decode_kv, prefill_kv, pairs)
    assert work.prefill_triangle == sum(g * (g + 1) // 2 for g, _ in rows if g > 1)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 9))
def test_work_of_a_run_is_that_of_its_steps(before: list[int], window: int, num_steps: int) -> None:
    first = features([(1, computed, True) for computed in before])
    run = StepWork.of(first, (window, FULL), num_steps)
    for attention, width in zip(run.by_window, (window, FULL), strict=True):
        alone = [sum(min(c + 1 + j, width) for c in before) for j in range(num_steps)]
        assert np.atleast_1d(attention.decode_kv).tolist() == alone


# --- physical: known magnitudes ---


def test_decode_of_one_sequence_is_weights_over_bandwidth() -> None:
    """Llama-2-7B, A100 80 GB: 13.2 GB of matrices at 2.04 TB/s are 6.5 ms at the very least."""
    cost = physical("llama-2-7b", "a100-80gb")
    price, terms = cost.price(decode(1, 512)), cost.terms(decode(1, 512))
    gemms = sum(terms[name] for name in ("qkv_proj", "o_proj", "mlp", "lm_head"))
    count = count_parameters(cost.shape)
    matrices = count.total - count.embedding - count.norms
    floor_ns = 2 * matrices / cost.gpu.memory_bandwidth * 1e9
    assert floor_ns < gemms < 1.4 * floor_ns
    assert 9e6 < price.duration_ns < 12e6


def test_prefill_of_2048_tokens_is_compute_bound() -> None:
    cost = physical("llama-3.1-8b", "h100-sxm")
    price = cost.price(step([2048], [0]))
    matrices = count_parameters(cost.shape)
    ideal_s = 2 * (matrices.attention + matrices.mlp) * 2048 / cost.gpu.flops["bf16"]
    expected_ns = ideal_s / cost.factors.gemm.kernels[-1].compute * 1e9
    assert expected_ns < price.duration_ns < 2 * expected_ns


def test_flops_of_a_decode_are_two_for_each_weight_and_pair() -> None:
    cost = physical("llama-2-7b", "a100-80gb")
    count = count_parameters(cost.shape)
    weights = count.attention + count.mlp + count.lm_head
    pairs = 32 * 4 * 32 * 128 * 1000  # layers x (2 for QK, 2 for PV) x heads x head_dim x context
    assert cost.price(decode(1, 1000)).flops == pytest.approx(2 * weights + pairs, rel=1e-12)


def test_bytes_of_a_decode_are_weights_and_kv() -> None:
    cost = physical("llama-2-7b", "a100-80gb")
    count = count_parameters(cost.shape)
    weights = 2 * (count.attention + count.mlp + count.lm_head)
    kv = 8 * 1000 * 2 * 32 * 32 * 128 * 2
    assert cost.price(decode(8, 1000)).bytes == pytest.approx(weights + kv, rel=0.01)


def test_decode_grows_linearly_with_context() -> None:
    cost = physical("llama-3.1-8b", "h100-sxm")
    at = [cost.price(decode(16, context)).duration_ns for context in (1000, 2000, 3000)]
    assert at[2] - at[1] == pytest.approx(at[1] - at[0], rel=1e-4)
    kv_ns = 16 * 1000 * 131_072 / cost.gpu.memory_bandwidth * 1e9
    assert kv_ns < at[1] - at[0] < 1.4 * kv_ns


def test_sliding_layers_stop_growing_at_their_window() -> None:
    window = replace(LAYERS, kind="sliding", window=100)
    cost = physical(replace(SMALL, attention=(window,)), "h100-sxm")
    times = [cost.terms(decode(64, context))["attention_decode"] for context in (50, 100, 200)]
    assert times[0] < times[1] == times[2]


def test_two_gpus_are_faster_and_talk() -> None:
    one, two = (physical("llama-3.1-70b", "h100-sxm", tp=tp) for tp in (1, 2))
    for some in (decode(8, 1000), step([2048], [0])):
        assert two.price(some).duration_ns < one.price(some).duration_ns
        assert two.terms(some)["all_reduce"] > 0
        assert "all_reduce" not in one.terms(some)


def test_kv_heads_fewer_than_gpus_are_replicated() -> None:
    shape = load_model("llama-3.1-8b")  # 8 KV heads
    kv = [
        physical(shape, "h100-sxm", tp=tp).terms(decode(64, 4000))["attention_decode"]
        for tp in (1, 8, 16)
    ]
    assert kv[0] > 6 * kv[1]  # a kernel has a fixed time too
    assert kv[2] > 0.8 * kv[1]  # half the query heads, the same KV


def test_a_decode_reads_only_the_experts_it_uses() -> None:
    cost = physical("mixtral-8x7b", "h100-sxm")
    count = count_parameters(cost.shape)
    others = 2 * (count.attention + count.router + count.lm_head)
    assert cost.price(decode(1, 10)).bytes == pytest.approx(
        others + 2 * count.experts * 2 / 8, rel=0.01
    )
    # Of 8 experts, 2 a token: 256 tokens leave none out.
    assert cost.price(decode(256, 10)).bytes > others + 2 * count.experts


def test_experts_touched_is_the_expectation() -> None:
    cost = physical("qwen3-30b-a3b", "h100-sxm")  # 8 of 128
    for tokens in (1, 2, 7, 64):
        assert cost.experts_touched(tokens) == pytest.approx(128 * (1 - (120 / 128) ** tokens))


def test_fewer_kv_bits_cost_less_and_so_do_fewer_weight_bits() -> None:
    some = decode(32, 4000)
    bf16 = physical("llama-3.1-8b", "h100-sxm").price(some)
    fp8_kv = physical("llama-3.1-8b", "h100-sxm", kv="fp8").price(some)
    int4 = physical("llama-3.1-8b", "h100-sxm", weights="int4").price(some)
    assert fp8_kv.duration_ns < bf16.duration_ns
    assert int4.duration_ns < bf16.duration_ns
    assert int4.flops == bf16.flops


def test_fp8_on_a_gpu_without_it_saves_bytes_but_no_arithmetic() -> None:
    bf16, fp8 = (physical("llama-3.1-8b", "a100-80gb", weights=w) for w in ("bf16", "fp8"))
    prefill = step([8192], [0])
    assert fp8.terms(prefill)["mlp"] == pytest.approx(bf16.terms(prefill)["mlp"], rel=0.01)
    assert fp8.terms(decode(1, 10))["mlp"] < 0.65 * bf16.terms(decode(1, 10))["mlp"]
    assert any("has no fp8 rate" in line and "bf16" in line for line in fp8.describe())
    assert not any("has no" in line for line in bf16.describe())


def test_only_sampled_rows_pay_for_the_lm_head() -> None:
    cost = physical("llama-3.1-8b", "h100-sxm")
    silent = cost.terms(step([512], [0], sampled=[False]))
    assert "lm_head" not in silent
    assert cost.terms(step([512], [0]))["lm_head"] == cost.terms(decode(1, 10))["lm_head"]


def test_copies_and_swaps_move_blocks() -> None:
    cost = physical("llama-2-7b", "a100-80gb")  # 8 MiB a block
    terms = cost.terms(step([1], [10], num_copies=3, num_swapped_in=1, num_swapped_out=1))
    eff, block = cost.factors.serving, 8 * 2**20
    copies_s = 3 * 2 * block / (cost.gpu.memory_bandwidth * eff.elementwise_bandwidth)
    swap_s = 2 * block / (cost.gpu.host_bandwidth * eff.pinned_bandwidth)
    assert terms["block_copies"] == round(copies_s * 1e9)
    assert terms["swap"] == round(swap_s * 1e9)


def test_pageable_memory_swaps_more_slowly() -> None:
    pinned, pageable = (
        PhysicalCost(
            SMALL, load_gpu("h100-sxm"), weight_dtype="bf16", kv_dtype="bf16", swap_memory=kind
        )
        for kind in ("pinned", "pageable")
    )
    some = step([1], [10], num_swapped_out=100)
    assert pageable.terms(some)["swap"] > 2 * pinned.terms(some)["swap"]


def test_mla_prefill_expands_the_cached_prefix_and_decode_does_not() -> None:
    cost = physical("deepseek-v3", "h200", weights="fp8", tp=8)
    fresh, after_prefix = (cost.price(step([1024], [before])).flops for before in (0, 8192))
    group = cost.shape.attention[0]
    layers, heads = cost.shape.num_layers, group.num_heads / 8
    expand = 2 * layers * heads * 512 * (128 + 128) * 8192
    pairs = 2 * layers * heads * (192 + 128) * 1024 * 8192
    assert after_prefix - fresh == pytest.approx(expand + pairs)
    longer, shorter = (cost.price(decode(1, context)).flops for context in (9000, 8000))
    assert longer - shorter == pytest.approx(2 * layers * heads * (576 + 512) * 1000)


def test_without_a_cache_a_decode_costs_a_prefill_of_its_context() -> None:
    cached = physical("llama-3.1-8b", "h100-sxm")
    without = NoCacheCost(cached)
    whole = cached.terms(step([2048], [0]))
    assert without.price(decode(1, 2048)).duration_ns == sum(whole.values()) - whole["kv_write"]
    assert (
        without.price(decode(8, 2048)).duration_ns > 20 * cached.price(decode(8, 2048)).duration_ns
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 3}, "tp is 3, must divide the 8 query heads"),
        ({"tp": 0}, "tp is 0"),
        ({"block_size": 0}, "block_size is 0"),
    ],
)
def test_physical_refuses(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PhysicalCost(SMALL, load_gpu("h100-sxm"), weight_dtype="bf16", kv_dtype="bf16", **change)


@pytest.mark.parametrize(
    "change", [{"experts_compute": 0.0}, {"pinned_bandwidth": 1.5}, {"host_step_s": -1.0}]
)
def test_serving_factors_are_checked(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(factors_for(load_gpu("h100-sxm")).serving, **change)


def with_serving(factors: Factors, **serving: float) -> Factors:
    return replace(factors, serving=replace(factors.serving, **serving))


def test_every_serving_factor_that_is_printed_has_an_effect() -> None:
    """SI-09 for the cost model: no factor is shown and then ignored."""
    device = load_gpu("h100-sxm")
    factors = factors_for(device)
    some = step([1, 1, 300], [900, 20, 5], num_copies=1, num_swapped_in=2)
    experts = load_model("qwen3-30b-a3b")

    def duration(changed: Factors) -> int:
        return sum(
            PhysicalCost(
                experts,
                device,
                weight_dtype="bf16",
                kv_dtype="bf16",
                swap_memory=memory,
                async_scheduling=False,
                enforce_eager=eager,
                factors=changed,
            )
            .price(some)
            .duration_ns
            for memory, eager in (("pinned", False), ("pageable", True))
        )

    for name in factors.serving.__dataclass_fields__:
        if name in ("frontend_s", "fixed_share"):
            continue  # not in a step; already in the kernels' fixed times
        value = getattr(factors.serving, name)
        longer = (
            value / 2 if name.endswith("bandwidth") or name.endswith("compute") else value + 0.1
        )
        assert duration(with_serving(factors, **{name: longer})) != duration(factors), name


def test_factors_name_their_basis() -> None:
    for gpu, basis in (
        ("h100-sxm", "measured kernels"),
        ("h100-pcie", "fitted family"),
        ("rtx-4090", "datasheet only"),
    ):
        factors = factors_for(load_gpu(gpu))
        assert factors.basis == basis
        low, high = factors.band
        assert low < 1 < high
        lines = physical("llama-3.1-8b", gpu).describe()
        assert any(basis in line for line in lines)
        assert factors.about in lines


def test_slower_takes_times_as_long() -> None:
    """Every rate and fixed time of a step is scaled, none twice."""
    for name in ("llama-3.1-8b", "deepseek-v3"):
        cost = physical(name, "h200", weights="fp8", tp=8)
        for some in (decode(16, 1000), step([2048, 1], [100, 700], num_copies=3, num_swapped_in=2)):
            longer = cost.slower(1.25).price(some).duration_ns
            assert longer == pytest.approx(1.25 * cost.price(some).duration_ns, rel=1e-5)


def test_asynchronous_scheduling_hides_the_host_and_nothing_else() -> None:
    device = load_gpu("h100-sxm")
    slow_host = with_serving(factors_for(device), host_step_s=0.5)
    usual = factors_for(device)

    def cost(factors: Factors, asynchronous: bool) -> PhysicalCost:
        return PhysicalCost(
            SMALL,
            device,
            weight_dtype="bf16",
            kv_dtype="bf16",
            async_scheduling=asynchronous,
            factors=factors,
        )

    some = decode(8, 500)
    hidden, shown = cost(usual, True).terms(some), cost(usual, False).terms(some)
    device_ns = sum(hidden.values()) - hidden["host"]
    host_ns = shown["host"]
    assert sum(shown.values()) == device_ns + host_ns
    assert sum(hidden.values()) == max(device_ns, host_ns)
    assert cost(slow_host, True).price(some).duration_ns == pytest.approx(0.5e9, rel=1e-2)


def test_eager_steps_last_as_long_as_their_launches() -> None:
    device, shape = load_gpu("h100-sxm"), load_model("llama-3.1-8b")
    factors = with_serving(factors_for(device), launch_s=1e-4)
    eager, graphs = (
        PhysicalCost(
            shape, device, weight_dtype="bf16", kv_dtype="bf16", enforce_eager=e, factors=factors
        )
        for e in (True, False)
    )
    some = decode(1, 100)
    # 4 products, 5 other kernels and attention in each of 32 layers, and one for the embedding.
    assert eager.price(some).duration_ns == 321 * 100_000 + eager.host_ns(1)
    assert graphs.price(some).duration_ns < 12e6


def test_graphs_compute_the_next_captured_size() -> None:
    assert [graph_size(n) for n in (1, 2, 3, 4, 5, 9, 256, 257, 512, 513)] == [
        *(1, 2, 4, 4, 8, 16, 256, 272, 512, 513)
    ]
    assert graph_size(np.array([3, 700])).tolist() == [4, 700]
    assert graph_size(np.array([3, 60, 70]), 64).tolist() == [4, 64, 70]


def test_pipeline_stages() -> None:
    """Equal stages with a part each are all busy; a lone sequence passes through all of them."""
    one, four = (
        PhysicalCost(
            load_model("llama-3.1-70b"),
            load_gpu("h100-sxm"),
            weight_dtype="bf16",
            kv_dtype="bf16",
            tp=2,
            pp=pp,
        )
        for pp in (1, 4)
    )
    lone = one.price(decode(1, 1000)).duration_ns
    assert four.price(decode(1, 1000)).duration_ns == pytest.approx(lone, rel=0.01)
    # Weights are read once for each part, K and V once for all of them.
    many = decode(64, 8000)
    kv = one.terms(many)["attention_decode"]
    assert four.terms(many)["attention_decode"] < 0.4 * kv
    assert four.terms(many)["mlp"] == pytest.approx(one.terms(many)["mlp"], rel=0.1)
    assert four.terms(many)["send"] > 0
    assert any(line.startswith("pipeline") for line in four.describe())
    with pytest.raises(ValueError, match="pp is 81, expected from 1 to 80"):
        PhysicalCost(
            load_model("llama-3.1-70b"),
            load_gpu("h100-sxm"),
            weight_dtype="bf16",
            kv_dtype="bf16",
            pp=81,
        )


def test_describe_says_on_what_it_stands() -> None:
    lines = physical("mixtral-8x7b", "h100-sxm", tp=2).describe()
    assert "2 x h100-sxm" in lines[0]
    assert "measured kernels" in lines[0]
    assert any(line.startswith("not modelled: expert") for line in lines)
    assert any("routed experts" in line for line in lines)


# --- the flag ---


def from_flag(flag: str) -> CostModel:
    return cost_model_from_flag(
        flag, shape=SMALL, gpu=load_gpu("h100-sxm"), weight_dtype="bf16", kv_dtype="bf16"
    )


def test_flags_that_name_a_model() -> None:
    some = step([1, 10], [5, 0])
    assert from_flag("constant:20ms").price(some).duration_ns == 20_000_000
    assert from_flag("constant:0.1").price(some).duration_ns == 100_000_000
    linear = from_flag("linear:base=5ms, per_token=20us, per_seq=50us,per_context_token=2ns")
    assert linear.price(some).duration_ns == 5_000_000 + 11 * 20_000 + 2 * 50_000 + 16 * 2
    assert isinstance(from_flag("physical"), PhysicalCost)
    assert isinstance(from_flag("no-cache"), NoCacheCost)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("", "expected constant:TIME"),
        ("roofline", "expected constant:TIME"),
        ("constant", "expected constant:TIME"),
        ("physical:fast", "expected constant:TIME"),
        ("constant:", "not a time"),
        ("constant:20 minutes", "not a time"),
        ("constant:-1ms", "not a time"),
        ("constant:0", "must take time"),
        ("linear:base=5ms", "per_token, per_seq missing"),
        ("linear:base=5ms,per_token=1us,per_seq=1us,speed=2", "'speed=2' is not one of"),
        ("linear:base=5ms,base=6ms,per_token=1us,per_seq=1us", "given twice"),
        ("linear:base=0,per_token=0,per_seq=0", "must take time"),
        ("linear:base=1ms,per_token=0.1ns,per_seq=0", "rounds to 0 ns"),
    ],
)
def test_flags_that_name_none(flag: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_flag(flag)
