"""Every path of paged attention against dense attention in float64, computed from contiguous KV."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.attention.cpu import CpuAttention
from gpu_backend.attention.inputs import AttentionInputs, PagedAttention
from gpu_backend.attention.reference import reference_attention
from gpu_backend.attention.select import choose
from gpu_backend.attention.varlen import refuse

SCALE = 0.3
COMPILED = CpuAttention()
TORCH = CpuAttention(compiled=False)
PATHS: dict[str, PagedAttention] = {
    "reference": reference_attention,
    "compiled": COMPILED,
    "torch": TORCH,
}
# One shape for everything that the compiled loop does: each takes seconds to compile.
GROUP, HEAD_DIM = 2, 64
each_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


class Case(NamedTuple):
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    inputs: AttentionInputs
    want: torch.Tensor
    """float64, zeros in rows of padding."""


def make_inputs(
    lens: list[tuple[int, int]], tables: list[list[int]], block_size: int
) -> AttentionInputs:
    """A step from (query tokens, context) and blocks of each sequence; tables shorter than the longest
    are filled up with a block that does not exist."""
    width = max(len(table) for table in tables)
    query_lens = [num_queries for num_queries, _ in lens]
    slots = [
        tables[row][p // block_size] * block_size + p % block_size if context else -1
        for row, (num_queries, context) in enumerate(lens)
        for p in range(context - num_queries, context)
    ]
    starts = [sum(query_lens[:row]) for row in range(len(lens) + 1)]
    return AttentionInputs(
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in lens], dtype=torch.int32),
        block_tables=torch.tensor(
            [table + [10**6] * (width - len(table)) for table in tables], dtype=torch.int32
        ),
        slot_mapping=torch.tensor(slots),
        query_lens_host=tuple(query_lens),
        context_lens_host=tuple(context for _, context in lens),
        max_query_len=max(query_lens),
        max_context_len=max(context for _, context in lens),
    )


def make_case(
    lens: list[tuple[int, int]],
    block_size: int,
    *,
    kv_heads: int = 2,
    group: int = GROUP,
    head_dim: int = HEAD_DIM,
    window: int | None = None,
    fill: float = math.nan,
    blocks_too_many: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Sequences of (query tokens, context) in scattered blocks; all other slots hold ``fill``."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    needed = [-(-context // block_size) + blocks_too_many for _, context in lens]
    num_blocks = sum(needed) + 1
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    tables = [[free.pop() for _ in range(count)] for count in needed]
    keys = torch.full((num_blocks, block_size, kv_heads, head_dim), fill, dtype=dtype)
    values = keys.clone()
    queries, wants = [], []
    for (num_queries, context), table in zip(lens, tables, strict=True):
        k, v = random(context, kv_heads, head_dim), random(context, kv_heads, head_dim)
        q = random(num_queries, kv_heads * group, head_dim)
        for position in range(context):
            where = table[position // block_size], position % block_size
            keys[where], values[where] = k[position], v[position]
        queries.append(q)
        wants.append(dense(q, k, v, window) if context else torch.zeros(q.shape).double())
    inputs = make_inputs(lens, tables, block_size)
    return Case(torch.cat(queries), keys, values, inputs, torch.cat(wants))


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """Causal attention of the last tokens of a sequence, token by token."""
    group = q.shape[1] // k.shape[1]
    k = k.double().repeat_interleave(group, 1)
    v = v.double().repeat_interleave(group, 1)
    rows = []
    for number, token in enumerate(q.double()):
        end = len(k) - len(q) + number + 1
        begin = 0 if window is None else max(0, end - window)
        weights = torch.einsum("hd,shd->hs", token, k[begin:end]).mul(SCALE).softmax(-1)
        rows.append(torch.einsum("hs,shd->hd", weights, v[begin:end]))
    return torch.stack(rows)


def check(path: PagedAttention, case: Case, window: int | None = None) -> None:
    got = path(case.query, case.keys, case.values, case.inputs, scale=SCALE, window=window)
    torch.testing.assert_close(got.double(), case.want, rtol=0, atol=1e-5)


@each_path
@pytest.mark.parametrize("fill", [1e4, math.nan])
@pytest.mark.parametrize(
    ("block_size", "context", "too_many"), [(16, 32, 1), (16, 20, 0), (128, 64, 0)]
)
@pytest.mark.parametrize("whole", [False, True], ids=["decode", "prefill"])
def test_en01_unused_slots_do_not_exist(
    path: PagedAttention, fill: float, block_size: int, context: int, too_many: int, whole: bool
) -> None:
    lens = [(context if whole else 1, context)]
    check(path, make_case(lens, block_size, fill=fill, blocks_too_many=too_many))


@each_path
def test_a_mixed_step(path: PagedAttention) -> None:
    """Decoding sequences, chunks with and without a past, and rows of padding, in any order."""
    lens = [(1, 17), (7, 40), (1, 0), (5, 5), (1, 1), (1, 300), (3, 0)]
    check(path, make_case(lens, 16))


@each_path
@pytest.mark.parametrize("window", [1, 5, 16, 400])
def test_window(path: PagedAttention, window: int) -> None:
    lens = [(1, 3), (1, 90), (33, 33), (7, 60)]
    check(path, make_case(lens, 8, window=window), window)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int | None, int]:
    """(query tokens, context) of each sequence, block size, window, seed."""
    lens = []
    for _ in range(draw(st.integers(1, 5))):
        context = draw(st.integers(0, 70))
        longest = st.integers(1, max(context, 1))
        lens.append((draw(st.one_of(st.just(1), longest)), context))
    block_size = draw(st.one_of(st.sampled_from([1, 16, 128]), st.integers(1, 128)))
    window = draw(st.one_of(st.none(), st.integers(1, 80)))
    return lens, block_size, window, draw(st.integers(0, 99))


@given(steps(), st.integers(1, 3), st.integers(1, 4), st.sampled_from([2, 8, 24]))
@settings(max_examples=60, deadline=None)
def test_any_step_any_heads(
    step: tuple[list[tuple[int, int]], int, int | None, int],
    kv_heads: int,
    group: int,
    head_dim: int,
) -> None:
    lens, block_size, window, seed = step
    case = make_case(
        lens,
        block_size,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        window=window,
        seed=seed,
    )
    check(reference_attention, case, window)
    check(TORCH, case, window)


@given(steps(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_any_step_compiled(
    step: tuple[list[tuple[int, int]], int, int | None, int], kv_heads: int
) -> None:
    lens, block_size, window, seed = step
    check(
        COMPILED,
        make_case(lens, block_size, kv_heads=kv_heads, window=window, seed=seed),
        window,
    )


@each_path
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("chunks", [[50], [1, 49], [16, 16, 18], [49, 1], [5] * 10])
def test_chunks_make_the_whole(path: PagedAttention, chunks: list[int], window: int | None) -> None:
    case = make_case([(50, 50)], 8, window=window)
    table = case.inputs.block_tables[0].tolist()
    done = 0
    for chunk in chunks:
        inputs = make_inputs([(chunk, done + chunk)], [table], 8)
        tokens = slice(done, done + chunk)
        got = path(case.query[tokens], case.keys, case.values, inputs, scale=SCALE, window=window)
        torch.testing.assert_close(got.double(), case.want[tokens], rtol=0, atol=1e-5)
        done += chunk
    assert done == 50


def test_long_chunks_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_backend.attention.cpu._MOST_QUERIES", 7)
    monkeypatch.setattr("gpu_backend.attention.cpu._KEPT_MASKS", 200)
    for window in (None, 6):
        check(CpuAttention(), make_case([(20, 45), (3, 9)], 4, window=window), window)


def test_batch_mates_change_nothing() -> None:
    """Of a decoding sequence: bit for bit."""
    lens = [(1, 100), (1, 33), (1, 7)]
    case = make_case(lens, 16)
    together = COMPILED(case.query, case.keys, case.values, case.inputs, scale=SCALE)
    for row, length in enumerate(lens):
        alone = make_inputs([length], [case.inputs.block_tables[row].tolist()], 16)
        got = COMPILED(case.query[row : row + 1], case.keys, case.values, alone, scale=SCALE)
        assert torch.equal(got, together[row : row + 1])


def test_torch_keeps_its_threads() -> None:
    """numba's OpenMP is torch's, and its start changes the number for both."""
    code = """
import torch
torch.set_num_threads(1)
from tests.engine.test_attention import COMPILED, check, make_case
check(COMPILED, make_case([(1, 9)], 4))
print(torch.get_num_threads())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.stdout == "1\n"


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_share_the_work(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for lens in ([(1, 100)], [(1, 20), (1, 90), (1, 0), (1, 7), (1, 31)]):
            check(COMPILED, make_case(lens, 16, kv_heads=3))
    finally:
        torch.set_num_threads(before)


def test_lengths_are_read_from_tensors_where_the_host_has_none() -> None:
    case = make_case([(1, 9), (4, 12)], 4)
    inputs = AttentionInputs(
        query_start=case.inputs.query_start,
        context_lens=case.inputs.context_lens,
        block_tables=case.inputs.block_tables,
        slot_mapping=case.inputs.slot_mapping,
        query_lens_host=(),
        context_lens_host=(),
        max_query_len=4,
        max_context_len=12,
    )
    for path in PATHS.values():
        check(path, case._replace(inputs=inputs))


@pytest.mark.parametrize("half", ["keys", "values"])
def test_a_nan_that_is_alive_is_seen(half: str) -> None:
    case = make_case([(1, 20)], 16)
    block = int(case.inputs.block_tables[0, 1])
    getattr(case, half)[block, 2, 0, 3] = math.nan
    got = COMPILED(case.query, case.keys, case.values, case.inputs, scale=SCALE)
    assert got[0, :GROUP].isnan().any()
    assert not got[0, GROUP:].isnan().any()


def test_large_scores_do_not_overflow() -> None:
    case = make_case([(1, 50)], 16)
    for path in PATHS.values():
        got = path(case.query * 1000, case.keys, case.values, case.inputs, scale=SCALE)
        want = reference_attention(
            case.query.double() * 1000, case.keys, case.values, case.inputs, scale=SCALE
        )
        torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=1e-3)


def test_bfloat16_is_computed_in_float32() -> None:
    """Decoding rounds the result, and nothing before: half a unit of 8 bits."""
    case = make_case([(1, 100), (1, 0), (1, 31)], 16, dtype=torch.bfloat16)
    got = COMPILED(case.query, case.keys, case.values, case.inputs, scale=SCALE)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), case.want, rtol=2**-8, atol=1e-6)


def test_bfloat16_chunks() -> None:
    case = make_case([(40, 100), (9, 9)], 16, dtype=torch.bfloat16)
    got = TORCH(case.query, case.keys, case.values, case.inputs, scale=SCALE)
    torch.testing.assert_close(got.double(), case.want, rtol=0, atol=2e-2)


def test_inside_inference_mode_and_outside() -> None:
    path = CpuAttention()
    case = make_case([(5, 5)], 4)
    with torch.inference_mode():
        check(path, case)
    check(path, case)


def test_choose() -> None:
    assert isinstance(choose("cpu"), CpuAttention)
    assert choose("cpu", "reference") is reference_attention
    assert choose("cpu") is not choose("cpu"), "scratch is not shared"


@pytest.mark.parametrize(
    ("device", "name", "message"),
    [
        ("cpu", "flash", "'flash' is not one of auto, reference, cpu, triton, varlen"),
        ("cpu", "varlen", "'varlen' needs CUDA, not cpu"),
        ("cuda", "cpu", "'cpu' needs the CPU, not cuda"),
    ],
)
def test_choose_says_what_is_missing(device: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(device, name)


@pytest.mark.parametrize(
    ("query", "head_dim", "pool", "block_size", "message"),
    [
        (torch.float32, 64, torch.float32, 256, "float32 is not float16 or bfloat16"),
        (torch.bfloat16, 64, torch.int8, 256, "a pool of torch.int8 is not of the model's"),
        (torch.bfloat16, 512, torch.bfloat16, 256, "head_dim 512 is more than 256"),
        (torch.bfloat16, 64, torch.bfloat16, 16, "block_size 16 is not a multiple of 256"),
    ],
)
def test_varlen_says_what_it_does_not_take(
    query: torch.dtype, head_dim: int, pool: torch.dtype, block_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        refuse(query, head_dim, pool, block_size)
    refuse(torch.bfloat16, 64, torch.bfloat16, 512)
