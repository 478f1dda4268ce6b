"""The forms of kernel times, and the fitted factors on the tables that they were not fitted on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog import load_gpu
from simulator.cost.kernels import (
    GemmFactors,
    GemmKernel,
    ReduceFactors,
    blend,
    decode_attention,
    prefill_attention,
)
from simulator.measured import fit as fits
from simulator.measured import kernel_tables as tables
from simulator.measured.validate import _kernel_factors

times = st.floats(1e-9, 1e9)


@given(times, times)
def test_blend_is_the_maximum_at_0_and_the_sum_at_1(a: float, b: float) -> None:
    assert blend(a, b, 0.0) == pytest.approx(max(a, b), rel=1e-9)
    assert blend(a, b, 1.0) == pytest.approx(a + b, rel=1e-9)


@given(times, times, st.floats(0, 1), st.floats(0, 1))
def test_blend_lies_between_and_grows(a: float, b: float, x: float, y: float) -> None:
    low, high = (blend(a, b, share) for share in sorted((x, y)))
    assert max(a, b) * (1 - 1e-9) <= low <= high * (1 + 1e-9)
    assert high <= (a + b) * (1 + 1e-9)
    assert blend(a, b, x) == pytest.approx(blend(b, a, x), rel=1e-12)


TWO = GemmFactors(
    (
        GemmKernel(64, 64, 64, 0.8, 1e-6, 0.9, 0.3, 3e-6, 0.5),
        GemmKernel(1 << 40, 128, 256, 0.8, 0.0, 0.8, 0.0, 2e-6, 0.0),
    ),
    0.1,
)
SHAPE = {
    "columns": 4096.0,
    "depth": 1024.0,
    "weight_bytes": 2 * 4096 * 1024.0,
    "activation_bytes": 2 * 5120.0,
    "peak_flops": 1e15,
    "bandwidth": 3e12,
    "num_sms": 132,
}


def test_products_of_many_rows_at_once_are_those_of_each() -> None:
    rows = np.array([1, 63, 64, 65, 1000, 8192])
    alone = [float(TWO.time_ns(int(count), **SHAPE)) for count in rows]
    assert TWO.time_ns(rows, **SHAPE).tolist() == alone


def test_a_large_product_is_its_arithmetic() -> None:
    rows = 1 << 20
    flops = 2.0 * rows * 4096 * 1024
    assert TWO.time_ns(rows, **SHAPE) == pytest.approx(2e3 + 1e9 * flops / 0.8e15, rel=1e-3)


def test_attention_by_hand() -> None:
    # 1,000 tokens at 2 ns and 4 queries at 5 ns beside 1,000 pairs at 1 ns and a walk of 250 at 4 ns.
    assert decode_attention(1000, 4, 2.0, 5.0, 1.0, 10.0, 4.0, 0.0) == 40 + 2020
    assert decode_attention(1000, 4, 2.0, 5.0, 1.0, 10.0, 4.0, 1.0) == 40 + 2020 + 2000
    # One sequence, 256 queries behind 44: pairs count 3 ns, those within the chunk 1 ns more.
    tiles = (256 / 128 + 0.5) * 7
    compute, memory = 44_000 * 3 + 32_896 * 1, 300 * 2 + 256 * 5 + (300 - 128) * 4
    assert prefill_attention(
        300, 44_000, 32_896, 256, 1, 2.0, 5.0, 3.0, 1.0, 7.0, 4.0, 1.0
    ) == pytest.approx(tiles + compute + memory)


def test_the_faster_way_to_reduce_is_taken() -> None:
    factors = ReduceFactors(peer_fixed_s=4e-6, peer_share=0.4, ring_fixed_s=3e-5, ring_share=0.8)
    assert factors.time_s(0, 2, 4e11) == 4e-6
    assert factors.time_s(4e8, 8, 4e11) == pytest.approx(3e-5 + 1.75e-3 / 0.8)


# --- measured kernels: the bounds that docs/validation.md reports on ---


@pytest.mark.parametrize(("name", "short"), [("h100-sxm", "h100"), ("h200", "h200")])
def test_hopper_kernels_that_were_held_out(shared: Path, name: str, short: str) -> None:
    folder, gpu, factors = shared / "measured", load_gpu(name), _kernel_factors(name)
    for dtype, width, gemm in (
        ("bfloat16", 2, factors.gemm),
        ("fp8", 1, factors.gemm_8bit),
    ):
        table = tables.gemm_table(folder, short, dtype)
        table = table.where(fits.held_out_shapes(table))
        flops = gpu.flops["bf16" if width == 2 else "fp8"]
        predicted = fits.gemm_seconds(gemm, table, gpu, flops, width)
        assert len(predicted) > 5000
        assert fits.quality(predicted, table.seconds).median < 0.08
    decodes = tables.decode_table(folder, short)
    decodes = decodes.where(fits.held_out_heads(decodes))
    predicted = fits.decode_seconds(factors.decode, decodes, gpu)
    assert fits.quality(predicted, decodes.seconds).median < 0.08
    prefills = tables.prefill_table(folder, short)
    prefills = prefills.where(fits.held_out_heads(prefills))
    predicted = fits.prefill_seconds(factors.prefill, prefills, gpu)
    assert fits.quality(predicted, prefills.seconds).median < 0.10


def test_the_grid_of_attention_on_a100(shared: Path) -> None:
    gpu, factors = load_gpu("a100-80gb"), _kernel_factors("a100-80gb")
    decodes = tables.grid_table(shared / "measured", prefill=False)
    decodes = decodes.where(fits.held_out_heads(decodes))
    predicted = fits.decode_seconds(factors.decode, decodes, gpu)
    assert fits.quality(predicted, decodes.seconds).median < 0.10
    prefills = tables.grid_table(shared / "measured", prefill=True)
    prefills = prefills.where(fits.held_out_heads(prefills))
    predicted = fits.prefill_seconds(factors.prefill, prefills, gpu)
    assert fits.quality(predicted, prefills.seconds).median < 0.10


def test_products_of_layers_of_models_that_were_held_out(shared: Path) -> None:
    gpu, table = load_gpu("a100-80gb"), tables.layer_table(shared / "measured", "a100")
    models = sorted(set(table.models.tolist()))[::3]
    for model in models:
        rest = table.where(table.models == model)
        predicted = fits.layer_seconds(_kernel_factors("a100-80gb").gemm, rest, gpu)
        assert fits.quality(predicted, rest.seconds).median < 0.06, model


def test_a_fit_finds_what_was_planted() -> None:
    pytest.importorskip("scipy")
    gpu, truth = load_gpu("h100-sxm"), _kernel_factors("h100-sxm").decode
    rng = np.random.default_rng(0)
    count = 400
    table = tables.AttentionTable(
        batch=2.0 ** rng.integers(0, 9, count),
        queries=np.ones(count),
        cached=2.0 ** rng.integers(5, 15, count) - 1,
        heads=np.full(count, 32.0),
        kv_heads=np.full(count, 8.0),
        head_dim=np.full(count, 128.0),
        seconds=np.ones(count),
    )
    table = table._replace(seconds=fits.decode_seconds(truth, table, gpu))
    found = fits.fit_decode(table, gpu)
    assert fits.quality(fits.decode_seconds(found, table, gpu), table.seconds).median < 0.01


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(tables.TableError, match=r"gemm\.csv: cannot be read"):
        tables.gemm_table(tmp_path, "h100", "bfloat16")
    (tmp_path / "peers").mkdir()
    path = tmp_path / "peers" / "kernels_h100_sxm_vllm0.24.0_gemm.csv"
    path.write_text("gemm_dtype,m,n,k\nbfloat16,1,2,3\n")
    with pytest.raises(tables.TableError, match="no column latency_ms"):
        tables.gemm_table(tmp_path, "h100", "bfloat16")
    with pytest.raises(tables.TableError, match="no rows with"):
        tables.gemm_table(tmp_path, "h100", "fp8")
