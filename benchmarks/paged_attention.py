"""``python -m benchmarks.paged_attention``: decode attention over paged KV beside dense attention.

Each round runs every variant once, one after the other, on KV of its own, so that a disturbance of the
machine meets them all; ratios are taken within a round, and their median is told. Dense attention has
its KV contiguous, ``[batch, kv_heads, context, head_dim]``: "dense" is what one calls without a thought
(``enable_gqa=True``), "folded" has the query heads that share a KV head as its queries, which reads KV
once. The paged pool's blocks (of 16 tokens) are handed out at random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_backend.attention.inputs import AttentionInputs
from gpu_backend.attention.select import choose

BLOCK_SIZE = 16


class Shape(NamedTuple):
    name: str
    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = (
    Shape("Llama-3.1-8B", 8, 2048, 32, 8, 128),
    *(
        Shape("SmolLM2-135M", batch, context, 9, 3, 64)
        for context in (100, 1000)
        for batch in (1, 8, 32)
    ),
)


class Decode:
    """One decode step's attention of one layer, in every way that is compared."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        batch, context, heads, kv_heads, head_dim = shape[1:]
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.query = torch.randn(batch, heads, head_dim, **place)
        self.folded = self.query.view(batch, kv_heads, heads // kv_heads, head_dim)
        self.dense_kv = torch.randn(2, batch, kv_heads, context, head_dim, **place)
        width = -(-context // BLOCK_SIZE)
        num_blocks = batch * width + 1
        self.pool = torch.zeros(2, num_blocks, BLOCK_SIZE, kv_heads, head_dim, **place)
        tables = (torch.randperm(num_blocks - 1, device=device) + 1).view(batch, width)
        slots = torch.arange(context, device=device)
        rows = tables[:, slots // BLOCK_SIZE], slots % BLOCK_SIZE
        for half in (0, 1):
            self.pool[half][rows] = self.dense_kv[half].transpose(1, 2)
        self.inputs = AttentionInputs(
            query_start=torch.arange(batch + 1, dtype=torch.int32, device=device),
            context_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
            block_tables=tables.int(),
            slot_mapping=tables[:, -1] * BLOCK_SIZE + (context - 1) % BLOCK_SIZE,
            query_lens_host=(1,) * batch,
            context_lens_host=(context,) * batch,
            max_query_len=1,
            max_context_len=context,
        )

    def dense(self) -> torch.Tensor:
        keys, values = self.dense_kv
        return scaled_dot_product_attention(self.query[:, :, None], keys, values, enable_gqa=True)

    def fold(self) -> torch.Tensor:
        return scaled_dot_product_attention(self.folded, *self.dense_kv)

    def paged(self, path: Any) -> Callable[[], torch.Tensor]:
        scale = self.query.shape[2] ** -0.5
        return lambda: path(self.query, *self.pool, self.inputs, scale=scale)


def variants(case: Decode, device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """The first is what the others are compared with."""
    found = {"dense": case.dense, "folded": case.fold, "paged": case.paged(choose(device))}
    if device == "cpu":
        from gpu_backend.attention.cpu import CpuAttention

        found["paged, torch"] = case.paged(CpuAttention(compiled=False))
    return found


def measure(case: Decode, device: str, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds and ratio to dense attention, of each variant: median and the middle 80 %."""
    ways = variants(case, device)
    want = case.fold().float().flatten()
    for name, work in ways.items():
        error = float((work().float().flatten() - want).abs().max())
        assert error < 0.02, f"{name} differs from dense attention by {error}"
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            work()  # fetches its KV after another variant's
            _wait(device)
            start = time.perf_counter()
            work()
            _wait(device)
            times[name].append((time.perf_counter() - start) * 1e3)
    result = {}
    for name, own in times.items():
        ratios = [a / b for a, b in zip(own, times["dense"], strict=True)]
        low, high = _middle(ratios)
        result[name] = {
            "ms": statistics.median(own),
            "ratio": statistics.median(ratios),
            "ratio_low": low,
            "ratio_high": high,
        }
    return result


def _middle(numbers: list[float]) -> tuple[float, float]:
    tenths = statistics.quantiles(numbers, n=10)
    return tenths[0], tenths[-1]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run(device: str, rounds: int) -> Iterator[dict[str, Any]]:
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES:
            case = Decode(shape, dtype, device)
            yield {
                **shape._asdict(),
                "dtype": str(dtype).removeprefix("torch."),
                "variants": measure(case, device, rounds),
            }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paged_attention", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each shape (30)")
    parser.add_argument("--threads", type=int, default=1, help="of torch on a CPU (1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(cpu)")
    parser.add_argument(
        "--json", action="store_true", help="rows for machines instead of the table"
    )
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: at least 2 are needed to tell a spread")
    if args.threads < 1:
        parser.error(f"--threads {args.threads}: at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows = []
    if not args.json:
        print(f"{'':<38}{'ms':>9}   ratio to dense (middle 80 %)")
    with torch.inference_mode():
        for row in run(args.device, args.rounds):
            rows.append(row)
            if args.json:
                continue
            print(
                f"{row['name']} {row['dtype']}, batch {row['batch']}, context {row['context']:,}, "
                f"heads {row['heads']}/{row['kv_heads']} x {row['head_dim']}"
            )
            for name, got in row["variants"].items():
                print(
                    f"    {name:<34}{got['ms']:>9.3f}   {got['ratio']:.2f} "
                    f"({got['ratio_low']:.2f} to {got['ratio_high']:.2f})",
                    flush=True,
                )
    if args.json:
        machine = {"torch": torch.__version__, "threads": args.threads, "device": args.device}
        print(json.dumps({"machine": machine, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
