"""``python -m blockmanager``: the KV ledger of a model on the command line."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence

import commandline
from blockmanager.ledger import KV_FORMATS, kv_format, parse_bytes
from blockmanager.ledger_gpu import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    DEFAULT_UTILIZATION,
)
from blockmanager.ledger_report import Question, as_dict, make_ledger, render
from catalog import DTYPE_BITS, gpu_names, load_gpu, load_model, model_names
from commandline import Parser, user_input

DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_GPU = "h100-sxm"

_EPILOG = """\
examples:
  python -m blockmanager --model llama-2-7b --context 4096 --batch 16
  python -m blockmanager --model llama-2-7b --context 4096 --batch 16 --kv-gb 60
  python -m blockmanager --model path/to/config.json --gpu a100-80gb --tp 2 --kv-dtype fp8
  python -m blockmanager --model llama-3.1-8b --gpu rtx-4090 --num-gpu-blocks 2588

exit code: 0 it fits, 1 it does not (the batch, or one request of --max-model-len), 2 bad input
"""


def _count(text: str) -> int:
    try:
        value = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {value}, expected at least 1")
    return value


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m blockmanager",
        description="What a model's KV cache costs per token, block and request, and how many\n"
        "requests fit. Sizes without a unit are GiB; KV memory is that of one GPU.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is asked")
    what.add_argument(
        "--model", metavar="NAME|FILE", help=f"name, or a config.json (default {DEFAULT_MODEL})"
    )
    what.add_argument(
        "--context", type=_count, metavar="N", help="tokens a request holds (default 4096)"
    )
    what.add_argument("--batch", type=_count, metavar="N", help="requests at once (default 1)")
    what.add_argument(
        "--max-model-len",
        type=_count,
        metavar="N",
        help="longest request the pool must hold (default: the model's, reported only)",
    )
    form = parser.add_argument_group("how it is stored")
    form.add_argument(
        "--kv-dtype",
        default="auto",
        metavar="TYPE",
        help=f"{', '.join(KV_FORMATS)}, or bits+scale bytes/group such as 4+1/16 "
        "(default auto: the model's 16-bit type)",
    )
    form.add_argument(
        "--weight-dtype",
        choices=tuple(DTYPE_BITS),
        metavar="TYPE",
        help=f"{', '.join(DTYPE_BITS)} (default: as published)",
    )
    form.add_argument(
        "--block-size", type=_count, default=16, metavar="N", help="tokens in a block (default 16)"
    )
    form.add_argument(
        "--tp", type=_count, default=1, metavar="N", help="tensor-parallel GPUs (default 1)"
    )
    form.add_argument(
        "--window-in-flight",
        action="store_true",
        help="let window layers hold a step's tokens besides their window, as vLLM reserves them",
    )
    memory = parser.add_argument_group("memory")
    pool = memory.add_mutually_exclusive_group()
    pool.add_argument(
        "--kv-gb", type=_size, metavar="SIZE", help="usable KV memory: 60, 60GiB, 60GB, 500MiB"
    )
    pool.add_argument(
        "--num-gpu-blocks",
        type=_count,
        metavar="N",
        help="KV blocks as vLLM prints them (one is its null block)",
    )
    memory.add_argument(
        "--gpu", metavar="NAME|FILE", help=f"name, or a JSON file (default {DEFAULT_GPU})"
    )
    memory.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=DEFAULT_UTILIZATION,
        metavar="X",
        help="share of the memory that the engine may use (default 0.9)",
    )
    memory.add_argument(
        "--max-num-batched-tokens",
        type=_count,
        metavar="N",
        help=f"tokens in a step, for activations (default {DEFAULT_MAX_NUM_BATCHED_TOKENS})",
    )
    memory.add_argument(
        "--max-num-seqs",
        type=_count,
        metavar="N",
        help=f"rows of logits, for activations (default {DEFAULT_MAX_NUM_SEQS})",
    )
    memory.add_argument(
        "--reserve-gb",
        type=_size,
        metavar="SIZE",
        help="CUDA context, workspaces and CUDA graphs (default 1 GiB)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=_count,
        metavar="N",
        help="prompt in the table of what the cache saves (default 128)",
    )
    parser.add_argument("--list", action="store_true", help="print the known models and GPUs")
    parser.add_argument("--json", action="store_true", help="print the ledger as JSON")
    return parser


def _question(args: argparse.Namespace, given: str) -> Question:
    """Fill in defaults, and say which."""
    assumed: list[str] = []

    def filled(value: int | None, default: int, text: str) -> int:
        if value is None:
            assumed.append(text)
            return default
        return value

    if args.model is None:
        assumed.append(f"model {DEFAULT_MODEL} (no --model)")
    shape = load_model(args.model or DEFAULT_MODEL)
    gpu = load_gpu(args.gpu or DEFAULT_GPU)
    if args.gpu is None:
        measured = args.kv_gb is not None or args.num_gpu_blocks is not None
        use = "for the time estimates only" if measured else "for the budget and the time estimates"
        assumed.append(f"GPU {gpu.name} (no --gpu), {use}")
    default_context = min(4096, shape.max_model_len)
    context = filled(args.context, default_context, f"context {default_context:,} (no --context)")
    if context > shape.max_model_len:
        assumed.append(
            f"context {context:,} is beyond the {shape.max_model_len:,} that the model was made for"
        )
    batch = filled(args.batch, 1, "batch 1 (no --batch)")
    kv_dtype = args.kv_dtype
    if kv_dtype == "auto":
        kv_dtype = shape.native_dtype if shape.native_dtype in ("fp16", "fp32") else "bf16"
        assumed.append(f"KV in {kv_dtype}, the model's 16-bit type (no --kv-dtype)")
    weight_dtype = args.weight_dtype or shape.native_dtype
    if args.weight_dtype is None:
        assumed.append(f"weights in {weight_dtype}, as published (no --weight-dtype)")
    tokens = args.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS
    prompt = args.prompt_tokens or max(1, min(128, context // 2))
    if args.prompt_tokens is None:
        assumed.append(f"prompt of {prompt} tokens where the cache's savings are counted")
    if prompt >= context > 1:
        raise ValueError(f"--prompt-tokens is {prompt}, expected less than the context, {context}")
    return Question(
        shape=shape,
        context=context,
        batch=batch,
        kv_dtype=kv_format(kv_dtype).name,
        weight_dtype=weight_dtype,
        block_size=args.block_size,
        tp=args.tp,
        gpu=gpu,
        kv_bytes=args.kv_gb,
        num_gpu_blocks=args.num_gpu_blocks,
        max_model_len=args.max_model_len,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_num_batched_tokens=tokens,
        max_num_seqs=args.max_num_seqs or DEFAULT_MAX_NUM_SEQS,
        reserve_bytes=args.reserve_gb or parse_bytes("1"),
        window_in_flight=args.window_in_flight,
        prompt_tokens=prompt,
        gpu_given=args.gpu is not None,
        given=given,
        assumed=tuple(assumed),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 it fits, 1 it does not, 2 input that cannot be used."""
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(argv)
    return commandline.run(lambda: _ledger(args, argv))


def _ledger(args: argparse.Namespace, argv: Sequence[str]) -> int:
    if args.list:
        names = {"models": list(model_names()), "gpus": list(gpu_names())}
        if args.json:
            print(json.dumps(names, indent=2))
        else:
            print("\n".join(f"{kind}: {', '.join(items)}" for kind, items in names.items()))
        return 0
    with user_input():
        ledger = make_ledger(_question(args, shlex.join(argv)))
    print(json.dumps(as_dict(ledger), indent=2) if args.json else render(ledger))
    return 0 if ledger.holds else 1


if __name__ == "__main__":
    sys.exit(main())
