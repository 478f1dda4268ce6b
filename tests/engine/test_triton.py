"""The Triton kernels: run by Triton's interpreter on the CPU, and compiled for a GPU that need not be
there.

The interpreter is chosen when the kernels are defined, so the tests that need it run in a process of
their own, with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gpu_backend.attention.inputs import AttentionInputs
from gpu_backend.attention.reference import reference_attention
from gpu_backend.attention.select import choose
from gpu_backend.attention.triton_paged import INTERPRETED, TritonAttention
from tests.engine.test_attention import SCALE, check, make_case, make_inputs

# (1, 0) is a row of padding; 70 tokens make several splits of at least 16.
DECODE = [(1, 20), (1, 70), (1, 0), (1, 1)]
MIXED = [(1, 33), (5, 5), (1, 0), (7, 40), (18, 18)]


def small(num_sms: int = 4) -> TritonAttention:
    """As on a GPU of ``num_sms`` multiprocessors, with splits that pay early."""
    return TritonAttention(num_sms=num_sms, least_split=16)


if INTERPRETED:

    @pytest.mark.parametrize("fill", [1e4, math.nan])
    @pytest.mark.parametrize(
        ("block_size", "context", "too_many"), [(16, 32, 1), (16, 20, 0), (128, 64, 0)]
    )
    @pytest.mark.parametrize("whole", [False, True], ids=["decode", "prefill"])
    def test_en01(fill: float, block_size: int, context: int, too_many: int, whole: bool) -> None:
        lens = [(context if whole else 1, context)]
        check(small(), make_case(lens, block_size, fill=fill, blocks_too_many=too_many))

    @pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
    @pytest.mark.parametrize("window", [None, 7, 50])
    @pytest.mark.parametrize(
        ("block_size", "kv_heads", "group", "head_dim"),
        [(1, 1, 3, 24), (3, 2, 1, 16), (16, 1, 4, 64), (128, 2, 2, 8)],
    )
    def test_shapes(
        lens: list[tuple[int, int]],
        window: int | None,
        block_size: int,
        kv_heads: int,
        group: int,
        head_dim: int,
    ) -> None:
        case = make_case(
            lens, block_size, kv_heads=kv_heads, group=group, head_dim=head_dim, window=window
        )
        check(small(), case, window)

    @pytest.mark.parametrize("num_sms", [1, 3, 50])
    def test_the_number_of_splits_changes_nothing(num_sms: int) -> None:
        check(small(num_sms), make_case(DECODE, 8))

    def test_with_lengths_that_only_the_device_knows() -> None:
        """The launch is made for the longest context that a replay may have."""
        case = make_case(DECODE, 8)
        for longest in (70, 1000):
            inputs = AttentionInputs(
                query_start=case.inputs.query_start,
                context_lens=case.inputs.context_lens,
                block_tables=case.inputs.block_tables,
                slot_mapping=case.inputs.slot_mapping,
                query_lens_host=(),
                context_lens_host=(),
                max_query_len=1,
                max_context_len=longest,
            )
            check(small(), case._replace(inputs=inputs))

    def test_scratch_taken_before() -> None:
        path = small()
        path.reserve(len(DECODE), 4, 64, torch.device("cpu"))
        check(path, make_case(DECODE, 8))
        check(path, make_case(DECODE * 2, 8))  # more than was reserved

    def test_chunks_make_the_whole() -> None:
        case = make_case([(50, 50)], 8)
        table = case.inputs.block_tables[0].tolist()
        done = 0
        for chunk in (1, 30, 19):
            inputs = make_inputs([(chunk, done + chunk)], [table], 8)
            tokens = slice(done, done + chunk)
            got = small()(case.query[tokens], case.keys, case.values, inputs, scale=SCALE)
            torch.testing.assert_close(got.double(), case.want[tokens], rtol=0, atol=1e-5)
            done += chunk

    def test_query_inside_a_larger_tensor() -> None:
        case = make_case(MIXED, 8)
        padded = torch.cat([case.query, torch.full_like(case.query, math.nan)], dim=1)
        check(small(), case._replace(query=padded[:, : case.query.shape[1]]))

    def test_bfloat16() -> None:
        case = make_case(MIXED, 8, dtype=torch.bfloat16)
        got = small()(case.query, case.keys, case.values, case.inputs, scale=SCALE)
        # The interpreter cuts off the last bits of a bfloat16 where a GPU rounds.
        torch.testing.assert_close(got.double(), case.want, rtol=2**-7, atol=1e-6)

    @pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
    @pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
    def test_quantised(stored: torch.dtype, lens: list[tuple[int, int]]) -> None:
        case = make_case(lens, 8, fill=0)
        scales = torch.rand(2, *case.keys.shape[:3]) / 20
        scales[:, 0] = math.nan  # of the null block, which nobody reads
        given: Any = {"scale": SCALE, "key_scales": scales[0], "value_scales": scales[1]}
        pool = (case.keys * 20).to(stored), (case.values * 20).to(stored)
        want = reference_attention(case.query, *pool, case.inputs, **given)
        got = small()(case.query, *pool, case.inputs, **given)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)

else:

    def test_choose_says_that_a_cpu_needs_the_interpreter() -> None:
        with pytest.raises(ValueError, match=r"'triton' needs CUDA, not cpu .*TRITON_INTERPRET=1"):
            choose("cpu", "triton")

    def test_everything_under_the_interpreter() -> None:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", __file__],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    @pytest.mark.parametrize(("pool", "window"), [("bf16", 0), ("fp8e4nv", 4096)])
    def test_kernels_compile_for_hopper(pool: str, window: int) -> None:
        """No GPU is needed for that; what they compute there is measured where one is."""
        import triton.language as tl
        from triton import compile as compile_kernel
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from gpu_backend.attention import triton_paged

        scaled = pool != "bf16"
        constants = {
            "GROUP": 4,
            "GROUP_PAD": 16,
            "HEAD_DIM": 128,
            "HEAD_DIM_PAD": 128,
            "TILE": 64,
            "LEAST_SPLIT": 256,
            "SEQUENCES_PAD": 32,
            "SPLITS_PAD": 64,
            "TOKENS": 32,
            "ROWS": 128,
            "WINDOW": window,
            "SCALED": scaled,
            "DTYPE": tl.bfloat16,
        }
        types = {
            "query": "*bf16",
            "out": "*bf16",
            "keys": f"*{pool}",
            "values": f"*{pool}",
            "key_scales": "*fp32" if scaled else "*bf16",
            "value_scales": "*fp32" if scaled else "*bf16",
            "partial": "*fp32",
            "partial_top": "*fp32",
            "partial_weight": "*fp32",
            "query_start": "*i32",
            "context_lens": "*i32",
            "block_tables": "*i32",
            "qk_scale": "fp32",
        }
        for kernel in (
            triton_paged._decode_kernel,
            triton_paged._chunk_kernel,
            triton_paged._combine_kernel,
        ):
            names = kernel.arg_names
            source = ASTSource(
                kernel,
                {n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
                constexprs={n: constants[n] for n in names if n in constants},
            )
            made = compile_kernel(source, target=GPUTarget("cuda", 90, 32))
            assert made.asm["cubin"]
            # A multiprocessor has 227 KiB for its programs.
            assert made.metadata.shared <= 227 * 1024
