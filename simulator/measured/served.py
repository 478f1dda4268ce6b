"""Runs of real servers: what was asked of them, and what was measured."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from blockmanager.content import HashedContent
from records.columns import Columns
from records.metrics import latencies
from records.recorder import Recorder
from scheduler.request import Request
from simulator.cost import Factors, PhysicalCost
from simulator.measured.kernel_tables import TableError
from simulator.replica import simulate
from simulator.settings import Options, Setup, resolve
from traces.closed import FixedConcurrency
from traces.workload import Arrival, OpenLoop, Workload

NS = 1_000_000_000
_CLIENT_GAP_NS = 2_000_000
_ROUNDS = 8
_CLOSED_BUDGET = 2048
"""Of the closed loops neither the client's haste, nor how many requests each user sent, nor the token budget
of a step is recorded. These were chosen on the same runs: so much of their agreement is hindsight."""

Metrics = dict[str, float]
"""Seconds by name: ``"TTFT mean"``, ``"E2E p95"``, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """One run of a real server."""

    name: str
    group: str
    options: Options
    """Of the server."""
    workload: Callable[[], Workload]
    measured: Mapping[str, float]
    by_client: bool
    """Times are a client's, so that HTTP and tokenisation are in them; else the engine's own."""
    metrics: Callable[[Columns], Metrics]
    """The same from the rows of a simulated run."""
    notes: tuple[str, ...] = ()


class Simulated(NamedTuple):
    metrics: Metrics
    requests: Columns
    steps: Columns
    setup: Setup


def simulate_run(
    run: ServedRun, factors: Factors | None = None, *, scale: float = 1.0
) -> Simulated:
    """Simulate what the server was asked; ``factors`` instead of those of its options, every step
    ``scale`` times as long (neither where its cost model has none)."""
    setup = resolve(run.options)
    cost = setup.cost
    frontend_ns = setup.frontend_ns if run.options.frontend_latency is not None else 0
    if isinstance(cost, PhysicalCost):
        cost = cost if factors is None else cost.with_factors(factors)
        if run.by_client and run.options.frontend_latency is None:
            frontend_ns = round(cost.factors.serving.frontend_s * NS)
        cost = cost if scale == 1.0 else cost.slower(scale)
    recorder = Recorder(setup.num_blocks)
    simulate(
        setup.scheduler(),
        cost,
        recorder,
        run.workload(),
        async_scheduling=setup.async_scheduling,
        frontend_ns=frontend_ns,
    )
    requests = recorder.requests.columns()
    return Simulated(run.metrics(requests), requests, recorder.steps.columns(), setup)


# --- inference-sim's experiments ---

_KINDS = {
    # system prompts, users of each, question, output, system prompt (tokens)
    "general": (9, 5, 447, 248, 100),
    "codegen": (11, 4, 466, 247, 100),
    "roleplay": (10, 5, 600, 251, 150),
    "reasoning": (23, 1, 934, 1448, 100),
}
_RATES = {
    ("general", False): ((600, 8.0), (600, 20.0)),
    ("codegen", False): ((600, 5.0), (600, 10.0)),
    ("roleplay", False): ((1200, 6.0),),
    ("reasoning", False): ((1200, 4.0),),
    ("general", True): ((600, 2.5), (600, 6.0)),
    ("reasoning", True): ((1200, 1.0),),
}
_LONGER = 1.047
"""Prompts are random tokens turned into text and read again: published lengths of three loads are this much
above those asked for (591.6 for 566, 574.2 for 547, 1,082 for 1,034 tokens)."""
_NAMES = {"RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": "llama-4-scout"}


def experiments(folder: Path, *, stage_s: float | None = None) -> list[ServedRun]:
    """The 18 runs of ``peers/vllm_experiments_*.csv``: vLLM 0.15.1 on H100, load at a constant rate.

    The published lifecycle metrics of the same load show prompts of one length from the first
    round to the last (562 to 590 tokens over 12,000 requests of ``general``), and no failures at a
    model limit of 4,096 tokens: each user asks the same prompt each time, and the conversation is not
    carried along (inference-sim/training, default_args/*/results/stage_*_lifecycle_metrics.json).
    So every prompt but the first of each user hits the prefix cache.

    ``stage_s``: simulate only so much of each stage.
    """
    measured = read_csv(folder / "peers" / "vllm_experiments_measured.csv")
    loads = {
        row["exp_id"]: row for row in read_csv(folder / "peers" / "vllm_experiments_workloads.csv")
    }
    runs = []
    for row in measured:
        if row["stage_index"] != "-1":
            continue
        # Ids of the two parts overlap: only one of them has loads recorded.
        load = loads.get(row["exp_id"]) if row["split"] == "trainval" else None
        runs.append(_experiment(row, load, stage_s))
    return runs


def _experiment(
    row: Mapping[str, str],
    load: Mapping[str, str] | None,
    stage_s: float | None,
) -> ServedRun:
    kind, is_lite = row["workload"], "lite" in row["experiment"]
    groups, users, question, output, system = _KINDS[kind]
    plan = tuple((float(seconds), rate) for seconds, rate in _RATES[kind, is_lite])
    if load is not None:
        groups = int(load["num_unique_system_prompts"])
        users = int(load["num_users_per_system_prompt"])
        question, output = int(load["question_len"]), int(load["output_len"])
        system = int(load["system_prompt_len"])
        plan = tuple((s["duration"], s["rate"]) for s in json.loads(load["stages"]))
    if stage_s is not None:  # but as long as four answers take
        least = stage_s if output < 1000 else 2 * stage_s
        plan = tuple((min(least, seconds), rate) for seconds, rate in plan)
    dtype = "fp8" if row["precision"] == "FP8" else "bf16"
    options = Options(
        model=_NAMES.get(row["model"], row["model"]),
        gpu="h100-sxm",
        weight_dtype=dtype,
        tensor_parallel_size=int(row["tp"]),
        max_num_seqs=128,
        max_num_batched_tokens=int(row["max_num_batched_tokens"]),
        num_gpu_blocks=int(load["total_kv_blocks"]) if load else None,
        gpu_memory_utilization=None if load else float(row["gpu_mem_util"] or 0.9),
    )
    e2e, ttft, itl = (float(row[f"{name}_mean_ms"]) / 1e3 for name in ("e2e", "ttft", "itl"))
    counted = 1 + (e2e - ttft) / itl
    notes = []
    if abs(counted / output - 1) > 0.05:
        notes.append(
            f"its ITL divides by {counted:.0f} output tokens, counted by tokenising the text again; "
            f"{output} were asked for"
        )
    question, system = round(question * _LONGER), round(system * _LONGER)
    return ServedRun(
        name=row["experiment"],
        group="vllm experiments",
        options=options,
        workload=partial(_shared_prompts, groups, users, question, output, system, plan),
        measured={
            "E2E mean": e2e,
            "TTFT mean": ttft,
            "ITL mean": itl,
            "ITL of asked": (e2e - ttft) / (output - 1),
            "E2E p99": float(row["e2e_p99_ms"]) / 1e3,
            "TTFT p99": float(row["ttft_p99_ms"]) / 1e3,
        },
        by_client=True,
        metrics=_experiment_metrics,
        notes=tuple(notes),
    )


def _experiment_metrics(requests: Columns) -> Metrics:
    times = latencies(requests)
    outputs = float(np.mean(requests["output_tokens"]))
    e2e, ttft = float(times.e2e.mean()) / NS, float(times.ttft.mean()) / NS
    return {
        "E2E mean": e2e,
        "TTFT mean": ttft,
        "ITL mean": (e2e - ttft) / (outputs - 1),
        "ITL of asked": (e2e - ttft) / (outputs - 1),
        "E2E p99": float(np.percentile(times.e2e, 99)) / NS,
        "TTFT p99": float(np.percentile(times.ttft, 99)) / NS,
    }


def _shared_prompts(
    groups: int,
    users: int,
    question: int,
    output: int,
    system: int,
    plan: tuple[tuple[float, float], ...],
) -> OpenLoop:
    return OpenLoop(_shared_prompt_arrivals(groups, users, question, output, system, plan))


def _shared_prompt_arrivals(
    groups: int,
    users: int,
    question: int,
    output: int,
    system: int,
    plan: tuple[tuple[float, float], ...],
) -> Iterator[Arrival]:
    count, start = 0, 0.0
    length = system + question
    for seconds, rate in plan:
        for index in range(round(seconds * rate)):
            user = count % (groups * users)
            group = user % groups
            ids = np.arange(length, dtype=np.int64)
            ids[:system] += (1 + group) << 32
            ids[system:] += (1_000 + user) << 32
            request = Request(
                id=str(count),
                arrival_ns=round((start + index / rate) * NS),
                num_prompt_tokens=length,
                content=HashedContent(ids, 1, length),
                max_tokens=output,
            )
            yield Arrival(request, output)
            count += 1
        start += seconds


# --- closed loops at a fixed concurrency ---


def closed_loops(folder: Path) -> list[ServedRun]:
    """Dense models on vLLM in ``peers/silicon_e2e.csv``: mean TTFT and TPOT at a fixed concurrency."""
    runs = []
    seen = set()
    for row in read_csv(folder / "peers" / "silicon_e2e.csv"):
        is_dense = not any(part in row["model_path"] for part in ("gpt-oss", "A22B", "A3B"))
        if row["backend"] != "vllm" or row["mode"] != "agg" or not is_dense:
            continue
        concurrency = int(float(row["concurrency"] or row["batch_size"]))
        isl, osl, tp = int(row["isl"]), int(row["osl"]), int(float(row["tp_size"]))
        key = (row["model_path"], row["system"], row["gemm_quant_mode"], isl, osl, tp, concurrency)
        if key in seen:
            continue
        seen.add(key)
        is_fp8 = row["gemm_quant_mode"] == "fp8"
        model = row["model_path"].removesuffix("-FP8").rsplit("/", 1)[-1]
        runs.append(
            ServedRun(
                name=f"{model}{' fp8' if is_fp8 else ''} {row['system']} tp{tp} {isl}/{osl} c{concurrency}",
                group="closed loops, fp8" if is_fp8 else "closed loops",
                options=Options(
                    model=model,
                    gpu="h100-sxm" if row["system"] == "h100_sxm" else "h200",
                    weight_dtype="fp8" if is_fp8 else "bf16",
                    tensor_parallel_size=tp,
                    max_num_batched_tokens=_CLOSED_BUDGET,
                    async_scheduling=False,  # vLLM 0.12
                ),
                workload=partial(_closed, isl, osl, concurrency),
                measured={
                    "TTFT mean": float(row["ttft_ms"]) / 1e3,
                    "TPOT mean": float(row["tpot_ms"]) / 1e3,
                },
                by_client=True,
                metrics=_mean_metrics,
                notes=("vLLM's defaults, asynchronous scheduling off: assumed",),
            )
        )
    return runs


def _closed(isl: int, osl: int, concurrency: int) -> FixedConcurrency:
    count = _ROUNDS * concurrency
    arrivals = [
        Arrival(Request(id=str(index), arrival_ns=0, num_prompt_tokens=isl, max_tokens=osl), osl)
        for index in range(count)
    ]
    return FixedConcurrency(arrivals, concurrency, gap_ns=_CLIENT_GAP_NS)


def _mean_metrics(requests: Columns) -> Metrics:
    times = latencies(requests)
    return {
        "TTFT mean": float(times.ttft.mean()) / NS,
        "TPOT mean": float(times.tpot.mean()) / NS,
    }


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror}") from None


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(read_text(path).splitlines()))
