"""All that needs a CUDA GPU, in one run of some five minutes: ``python -m benchmarks.gpu --out FOLDER``.

1. Every attention path that runs there against the reference: fp32 and bf16, grouped queries, ragged lengths,
   prompt chunks, windows, quantised pools.
2. Decode attention's bandwidth as a share of a device-to-device copy's, measured in the same run.
3. A model of Llama-3.1-8B's shape with random weights: the same tokens with and without CUDA graphs, and the
   times of its steps by batch and context, written as a step profile.

Exit code 1 where a result is wrong, 2 without a GPU. The figures are for people to judge.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.paged_attention import Decode, Shape
from gpu_backend.attention.inputs import AttentionInputs, PagedAttention
from gpu_backend.attention.reference import reference_attention
from gpu_backend.attention.select import choose
from gpu_backend.kv_cache import quantise

AIM = 0.75
"""Of the copy's bandwidth, at batches of 32 or more and contexts of 2,048 or more."""
LLAMA_8B = Shape("Llama-3.1-8B", 0, 0, 32, 8, 128)
_BEYOND_CACHES = 1 << 29
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    name: str
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    window: int | None = None
    pool: torch.dtype | None = None
    """Of a quantised pool."""


CASES = (
    Case("decode, ragged", (1,) * 7, (1, 15, 16, 17, 500, 2048, 4097)),
    Case("decode, padding rows", (1, 1, 1), (33, 0, 100)),
    Case("decode, one long", (1,), (30_000,)),
    Case("decode, no groups", (1, 1), (77, 300), heads=8),
    Case("decode, 9/3 heads x 64", (1, 1, 1), (5, 100, 1000), 9, 3, 64),
    Case("decode, window", (1, 1), (40, 3000), window=1024),
    Case("decode, blocks of 128", (1, 1), (128, 129), block_size=128),
    Case("decode, int8", (1, 1), (100, 700), pool=torch.int8),
    Case("decode, fp8", (1, 1), (100, 700), pool=torch.float8_e4m3fn),
    Case("chunks", (64, 300, 1), (64, 1300, 512)),
    Case("chunks, window", (200, 17), (900, 17), window=128),
    Case("chunks, 9/3 heads x 64", (100, 33), (100, 333), 9, 3, 64),
    Case("chunks, fp8", (100,), (333,), pool=torch.float8_e4m3fn),
)


def error_of(path: PagedAttention, case: Case, dtype: torch.dtype, device: str) -> float:
    """Largest difference from the reference in float32, of slots that nothing may read hold NaN."""
    torch.manual_seed(0)
    place: dict[str, Any] = {"dtype": dtype, "device": device}
    size, width = case.block_size, max(-(-max(case.contexts) // case.block_size), 1)
    count = len(case.contexts)
    pool = torch.randn(2, count * width + 1, size, case.kv_heads, case.head_dim, **place)
    tables = (torch.randperm(count * width, device=device) + 1).view(count, width).int()
    tokens = sum(case.queries)
    query = torch.randn(tokens, case.heads, case.head_dim, **place)
    starts = torch.tensor([0, *case.queries], device=device).cumsum(0).int()
    inputs = AttentionInputs(
        query_start=starts,
        context_lens=torch.tensor(case.contexts, dtype=torch.int32, device=device),
        block_tables=tables,
        slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=device),
        query_lens_host=case.queries,
        context_lens_host=case.contexts,
        max_query_len=max(case.queries),
        max_context_len=max(case.contexts),
    )
    scales: dict[str, torch.Tensor] = {}
    exact = pool.float()
    if case.pool is not None:
        keys, values = quantise(pool[0], case.pool), quantise(pool[1], case.pool)
        scales = {"key_scales": keys.scales, "value_scales": values.scales}
        pool = torch.stack([keys.rows.view(torch.uint8), values.rows.view(torch.uint8)])
        pool = pool.view(case.pool)
        exact = torch.stack([rows.float() * scale[..., None] for rows, scale in (keys, values)])
    else:
        for row, context in enumerate(case.contexts):
            if context < width * size:  # the unused slots of its last blocks
                block = tables[row, context // size].long()
                pool[:, block, context % size :] = torch.nan
                pool[:, tables[row, context // size + 1 :].long()] = torch.nan
    scale = case.head_dim**-0.5
    found = path(query, *pool, inputs, scale=scale, window=case.window, **scales)
    want = reference_attention(query.float(), *exact, inputs, scale=scale, window=case.window)
    return float((found.float() - want).abs().max())


def check_attention(device: str, report: dict[str, Any]) -> bool:
    is_right = True
    for name in ("triton", "varlen"):
        try:
            path = choose(device, name)
        except ValueError as error:
            print(f"{name}: {error}")
            continue
        for dtype, bound in TOLERANCE.items():
            for case in CASES:
                if name == "varlen" and (dtype == torch.float32 or case.pool is not None):
                    continue
                if name == "varlen" and 0 in case.contexts:
                    continue  # it has no rows of padding
                chosen = case._replace(block_size=256) if name == "varlen" else case
                try:
                    error = error_of(path, chosen, dtype, device)
                except Exception as failure:  # one path's refusal must not lose the rest
                    print(f"{name}, {case.name}: {type(failure).__name__}: {failure}")
                    report[f"{name}, {case.name}"] = str(failure)
                    is_right &= name == "varlen"
                    continue
                ok = error <= bound
                is_right &= ok
                key = f"{name} {str(dtype).removeprefix('torch.')}, {case.name}"
                report[key] = error
                print(f"{key:<48}{error:>10.2e}  {'ok' if ok else f'WRONG, at most {bound}'}")
    return is_right


def milliseconds(work: Any, repeats: int = 20) -> float:
    """Median time of a call on the device."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _copy_gb_per_s() -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) / 1e6


def _attention_ms(shape: Shape, read: int) -> float:
    """Of one call. Several are captured as one graph, or Python's launches would be what is measured; each
    has KV of its own, and all of them together more than any cache holds."""
    count = max(4, -(-_BEYOND_CACHES // read))
    calls = [
        Decode(shape, torch.bfloat16, "cuda").paged(choose("cuda", "triton")) for _ in range(count)
    ]
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compile and allocate outside of the capture
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return milliseconds(graph.replay) / count


def bandwidths() -> Iterator[dict[str, Any]]:
    copy = _copy_gb_per_s()
    print(f"device-to-device copy: {copy:,.0f} GB/s (read and written)")
    for batch, context in ((1, 8192), (8, 2048), (32, 2048), (64, 2048), (32, 8192), (128, 2048)):
        read = 2 * batch * context * LLAMA_8B.kv_heads * LLAMA_8B.head_dim * 2
        ms = _attention_ms(LLAMA_8B._replace(batch=batch, context=context), read)
        rate = read / ms / 1e6
        row = {"batch": batch, "context": context, "ms": ms, "gb_per_s": rate, "share": rate / copy}
        aimed = batch >= 32 and context >= 2048
        note = "" if not aimed else "  reached" if rate / copy >= AIM else f"  below {AIM:.0%}"
        print(
            f"decode attention, batch {batch:>4}, context {context:>6,}: {ms:7.3f} ms, "
            f"{rate:>6,.0f} GB/s, {rate / copy:.0%} of the copy{note}",
            flush=True,
        )
        yield row


def check_model(folder: Path, report: dict[str, Any]) -> bool:
    from gpu_backend.__main__ import main as engine
    from gpu_backend.config import ModelConfig
    from gpu_backend.llm import LLM
    from gpu_backend.sampling import SamplingParams

    # float32 and few layers: in bf16 another batch shape rounds otherwise, and random weights have ties.
    config = replace(ModelConfig.from_name("llama-3.1-8b"), num_layers=4, windows=(None,) * 4)
    options: dict[str, Any] = {
        "weights_seed": 0,
        "device": "cuda",
        "dtype": "fp32",
        "kv_bytes": 8 << 30,
        "max_num_seqs": 16,
        "max_model_len": 2048,
    }
    tokens = []
    for graphs in (True, False):
        llm = LLM(config, cuda_graphs=graphs, **options)
        prompts = [list(range(10 + 7 * i, 40 + 9 * i)) for i in range(5)]
        results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16))
        tokens.append([result.outputs[0].token_ids for result in results])
        llm.engine.scheduler.check()
        del llm
        torch.cuda.empty_cache()
    is_right = tokens[0] == tokens[1]
    report["graphs_give_the_same_tokens"] = is_right
    print(f"CUDA graphs give the {'same' if is_right else 'WRONG'} tokens")
    code = engine(
        [
            "profile",
            *("--model", "llama-3.1-8b", "--load-format", "dummy", "--device", "cuda"),
            *(
                "--out",
                str(folder / "step_profile.json"),
                "--kv-gb",
                "100",
                "--max-model-len",
                "32768",
            ),
            *("--batches", "1,2,4,8,16,32,64,128,256", "--contexts", "128,512,2048,8192"),
            *("--chunks", "128,512,2048,8192", "--max-num-seqs", "512", "--repeats", "10"),
        ]
    )
    return is_right and code == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing was measured", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "attention": {},
        "model": {},
    }
    print(f"{report['device']}, torch {torch.__version__}")

    def write() -> None:
        (args.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")

    with torch.inference_mode():
        is_right = check_attention("cuda", report["attention"])
        write()
        report["bandwidth"] = list(bandwidths())
        write()
    is_right &= check_model(args.out, report["model"])
    write()
    print(f"written: {args.out}/gpu.json, {args.out}/step_profile.json")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
