"""One engine in a process of its own, told over standard input what to measure.

Started by ``benchmarks.engine``. Reads lines of JSON, each answered by one: ``{"batch", "context"}`` fills
that many sequences up to that context, ``{"steps"}`` times so many of their decode steps, from the
scheduler to the sampled ids on the host (``{"seconds"}``), ``{}`` ends them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Shape of SmolLM2-135M (its config.json)."""
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 32
WARM_UP_STEPS = 4
MOST_STEPS = 512


class Worked(NamedTuple):
    """An engine as three calls."""

    fill: Callable[[int, int], None]
    step: Callable[[], object]
    clear: Callable[[], None]


def prompts(batch: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 49000, length).tolist() for _ in range(batch)]


def ours() -> Worked:
    import torch

    from gpu_backend.config import ModelConfig
    from gpu_backend.llm import EngineOptions, build
    from gpu_backend.sampling import SamplingParams

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    built = build(
        EngineOptions(
            model=ModelConfig.from_hf(SMOLLM2, name="smollm2-135m", where="benchmarks"),
            weights_seed=0,
            device="cpu",
            kv_bytes=1 << 30,
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=False,
        )
    )
    engine = built.engine
    params = SamplingParams(temperature=0, ignore_eos=True)

    ids: list[str] = []

    def fill(batch: int, context: int) -> None:
        ids.extend(engine.add(prompt, params) for prompt in prompts(batch, context))
        running = engine.scheduler.running
        while engine.scheduler.waiting or any(s.num_output_tokens < WARM_UP_STEPS for s in running):
            engine.step()
            running = engine.scheduler.running

    def clear() -> None:
        for request_id in ids:
            engine.abort(request_id)
        ids.clear()

    return Worked(fill, engine.step, clear)


def vllm(folder: str, async_scheduling: bool) -> Worked:
    threads = int(os.environ["OMP_NUM_THREADS"])
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "0" if threads == 1 else f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    (Path(folder) / "config.json").write_text(json.dumps(SMOLLM2))
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    engine = LLM(
        model=folder,
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        enable_prefix_caching=False,
        async_scheduling=async_scheduling,
        disable_log_stats=True,
    ).llm_engine
    count = 0
    generated: dict[str, int] = {}

    def fill(batch: int, context: int) -> None:
        nonlocal count
        params = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=MOST_STEPS, detokenize=False
        )
        for prompt in prompts(batch, context):
            count += 1
            generated[str(count)] = 0
            engine.add_request(str(count), {"prompt_token_ids": prompt}, params)
        while min(generated.values()) < WARM_UP_STEPS:
            for output in engine.step():
                generated[output.request_id] = len(output.outputs[0].token_ids)

    def clear() -> None:
        engine.abort_request(list(generated))
        generated.clear()
        while engine.has_unfinished_requests():
            engine.step()

    return Worked(fill, engine.step, clear)


def main() -> None:
    # Whatever else prints, the answers keep a channel of their own.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with tempfile.TemporaryDirectory() as folder:
        name = sys.argv[1]
        engine = ours() if name == "kvplan" else vllm(folder, name.endswith("async"))
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            task = json.loads(line)
            start = time.perf_counter()
            if "batch" in task:
                engine.fill(task["batch"], task["context"])
            elif "steps" in task:
                for _ in range(task["steps"]):
                    engine.step()
            else:
                engine.clear()
            print(json.dumps({"seconds": time.perf_counter() - start}), file=answers, flush=True)


if __name__ == "__main__":
    main()
