"""Flags of a server, the same for every command that simulates one."""

from __future__ import annotations

import argparse
from dataclasses import fields

from simulator.settings import Options


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Machine, KV memory and scheduler; names are those of ``Options``."""
    add = parser.add_argument_group("machine").add_argument
    add(
        "--model",
        metavar="NAME",
        help="a catalogue name or a path to a Hugging Face config.json (llama-3.1-8b)",
    )
    add("--gpu", metavar="NAME", help="a catalogue name or a JSON file (h100-sxm)")
    add(
        "--tensor-parallel-size",
        "--tp",
        type=int,
        metavar="N",
        help="GPUs that share each layer (1)",
    )
    add(
        "--pipeline-parallel-size",
        "--pp",
        type=int,
        metavar="N",
        help="stages that the layers are divided into (1)",
    )
    add("--weight-dtype", metavar="DTYPE", help="bf16, fp16, fp8, int8, int4 (the model's own)")
    add(
        "--kv-cache-dtype",
        "--kv-dtype",
        metavar="DTYPE",
        help="bf16, fp16, fp8, int8, int4 (as the activations)",
    )
    add(
        "--cost-model",
        metavar="MODEL",
        help="physical, constant:20ms, linear:base=5ms,per_token=20us,per_seq=50us, profile:FILE (measured, "
        "by python -m gpu_backend profile), or no-cache (no KV cache at all) (physical)",
    )
    add(
        "--calibration",
        metavar="FILE",
        help="factors of a server of yours, from `python -m simulator calibrate`",
    )
    add(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="the host prepares a step while the GPU runs the one before (on with --cost-model physical)",
    )
    add(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        help="no CUDA graphs: a step lasts at least as long as launching its kernels (off)",
    )
    add(
        "--frontend-latency",
        type=float,
        metavar="S",
        help="seconds between a client and the scheduler, there and back (fitted, with physical)",
    )
    add = parser.add_argument_group(
        "KV memory (one of the first two; else what the GPU has left)"
    ).add_argument
    add(
        "--kv-gb",
        metavar="SIZE",
        help="usable KV memory of one GPU: 60 and 60GiB are 60 x 2^30 bytes, 60GB is 60 x 10^9",
    )
    add(
        "--num-gpu-blocks",
        type=int,
        metavar="N",
        help="blocks as vLLM counts them, its null block included",
    )
    add("--gpu-memory-utilization", type=float, metavar="F", help="share of the GPU to use (0.9)")
    add("--block-size", type=int, metavar="N", help="tokens a block (16)")
    add("--watermark", type=float, metavar="F", help="share of blocks an admission leaves free (0)")
    add("--swap-space", metavar="SIZE", help="host memory a GPU, for --preemption-mode swap")
    add = parser.add_argument_group("scheduler, named as in vLLM").add_argument
    add(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="sequences at once (1024 on a GPU of 70 GiB or more, no A100; else 256)",
    )
    add(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="token budget of a step (8192 on a GPU of 70 GiB or more, no A100; else 2048)",
    )
    add(
        "--max-model-len",
        type=int,
        metavar="N",
        help="prompt and output tokens of a sequence (the model's)",
    )
    add(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        help="spread a prompt over steps (on)",
    )
    add(
        "--long-prefill-token-threshold",
        type=int,
        metavar="N",
        help="most prompt tokens a step for one sequence while there are others (off)",
    )
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, help="(on)")
    add(
        "--scheduler-reserve-full-isl",
        action=argparse.BooleanOptionalAction,
        help="admit only what fits with all its present tokens (on)",
    )
    add(
        "--scheduling-policy",
        metavar="NAME",
        help="fcfs, fcfs-fewest-lost, priority, priority-preemptive, or module:Class (fcfs)",
    )
    add("--preemption-mode", metavar="MODE", help="recompute or swap (recompute)")
    add(
        "--parallel-sampling",
        metavar="MODE",
        help="n > 1: fork (shares the prompt's blocks) or separate, as vLLM V1 (fork)",
    )


def options_of(args: argparse.Namespace) -> Options:
    """What was given of them."""
    return Options(**{field.name: getattr(args, field.name, None) for field in fields(Options)})
