"""Command line: ``python -m gpu_backend generate | replay | profile | bench``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import commandline
from blockmanager.ledger import parse_bytes
from commandline import Parser, UsageError, user_input
from traces.load import add_load_flags, read_load

if TYPE_CHECKING:
    from gpu_backend.llm import Built, EngineOptions

_GENERATE_KV_BYTES = 1 << 30
_INSTALL = "python -m pip install 'kvplan[gpu]'"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 ran, 1 a limit does not hold, 2 cannot run)."""
    args = build_parser().parse_args(argv)

    def command() -> int:
        try:
            import torch  # noqa: F401
        except ImportError:
            raise UsageError(f"the engine needs torch and more: {_INSTALL}") from None
        code: int = args.run(args)
        return code

    return commandline.run(command)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m gpu_backend",
        description="The scheduler and block manager on a real model, on a CPU or a CUDA GPU.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_replay(commands)
    _add_profile(commands)
    _add_bench(commands)
    return parser


# -- generate --------------------------------------------------------------------------------


def _add_generate(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "generate", help="continue prompts", description="Continue prompts, as text comes."
    )
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    add = parser.add_argument_group("what is sampled, named as in vLLM").add_argument
    add(
        "--chat", action="store_true", help="each prompt is a user's message; use the chat template"
    )
    add("--max-tokens", type=int, default=64, metavar="N", help="(64)")
    add("--n", type=int, default=1, metavar="N", help="outputs for each prompt (1)")
    add("--temperature", type=float, default=0.0, metavar="X", help="0 = greedy (0)")
    add("--top-k", type=int, default=0, metavar="N", help="0 = all (0)")
    add("--top-p", type=float, default=1.0, metavar="X", help="(1)")
    add("--min-p", type=float, default=0.0, metavar="X", help="(0)")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="(1)")
    add("--presence-penalty", type=float, default=0.0, metavar="X", help="(0)")
    add("--frequency-penalty", type=float, default=0.0, metavar="X", help="(0)")
    add("--beam-width", type=int, metavar="N", help="beam search instead of sampling")
    add("--stop", action="append", default=[], metavar="TEXT", help="may be repeated")
    add("--ignore-eos", action="store_true", help="go on after the end of text")
    add("--logprobs", type=int, metavar="N", help="report the N most likely tokens (with --json)")
    _add_engine(parser)
    parser.add_argument("--json", action="store_true", help="whole outputs as JSON")
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from gpu_backend.llm import LLM
    from gpu_backend.sampling import SamplingParams

    names = (
        "n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "max_tokens", "stop", "ignore_eos", "logprobs", "beam_width",
    )  # fmt: skip
    with user_input():
        params = SamplingParams(**{name: getattr(args, name) for name in names})
        options = _options(args)
        if not any((options.kv_bytes, options.num_blocks, options.memory_utilization)):
            # A few prompts need no half of the machine's memory, nor a largest step measured.
            options = replace(options, kv_bytes=_GENERATE_KV_BYTES)
        llm = LLM(**{name: getattr(options, name) for name in options.__slots__})
        prompts: list[Any] = args.prompts
        if args.chat:
            prompts = [
                llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in prompts
            ]
    if args.json:
        results = llm.generate(prompts, params)
        print(json.dumps([_as_json(result) for result in results], indent=2, ensure_ascii=False))
        return 2 if any(result.error for result in results) else 0
    _say(args, llm.built)
    if len(prompts) == 1 and args.n == 1 and args.beam_width is None:
        if not args.chat:
            print(args.prompts[0], end="", flush=True)
        with user_input():
            for piece in llm.stream(prompts, params):
                print(piece.text, end="", flush=True)
        print()
        return 0
    code = 0
    for text, result in zip(args.prompts, llm.generate(prompts, params), strict=True):
        print(f"> {text}")
        if result.error is not None:
            print(f"error: {result.error}", file=sys.stderr)
            code = 2
        for output in result.outputs:
            print(f"{output.text}\n[{output.finish_reason}]")
    return code


def _as_json(result: Any) -> dict[str, Any]:
    outputs = [
        {
            "index": output.index,
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "stop": output.stop,
            "logprobs": None
            if output.logprobs is None
            else [
                {token: entry._asdict() for token, entry in each.items()}
                for each in output.logprobs
            ],
            "sum_logprob": output.sum_logprob,
        }
        for output in result.outputs
    ]
    return {
        "prompt_ids": result.prompt_ids,
        "num_cached_tokens": result.num_cached_tokens,
        "error": result.error,
        "outputs": outputs,
    }


# -- replay ----------------------------------------------------------------------------------


def _add_replay(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "replay",
        help="serve a trace and write the run record",
        description="Serve a trace with its output lengths and record it, to be held against a "
        "simulation of the same trace: python -m simulator compare SIMULATED MEASURED.",
    )
    add_load_flags(parser.add_argument)
    parser.add_argument("--requests", type=_count, metavar="N", help="only the first N")
    parser.add_argument(
        "--pace",
        choices=("real", "busy"),
        default="real",
        help="real: arrivals at their times; busy: the clock counts steps only and jumps over idle "
        "time (real)",
    )
    parser.add_argument("--slo", metavar="LIMITS", help='e.g. "ttft<=500ms,tpot<=50ms"')
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the run record")
    parser.add_argument("--no-steps", action="store_true", help="leave steps.parquet out of it")
    _add_engine(parser)
    parser.add_argument("--json", action="store_true", help="print settings and metrics as JSON")
    parser.set_defaults(run=_replay)


def _replay(args: argparse.Namespace) -> int:
    from gpu_backend.llm import build
    from gpu_backend.replay import replay
    from records.run import check_writable, to_json
    from records.slo import NO_LIMITS, parse_limits
    from traces import TraceError, find_trace

    with user_input():
        limits = parse_limits(args.slo) if args.slo else NO_LIMITS
        if args.no_steps and args.out is None:
            raise ValueError("--no-steps has no effect without --out")
        if args.out is not None:
            check_writable(args.out)  # before the work, not after it
        path, origin = find_trace(args.trace)
        trace = read_load(args, path, only_open=("requests",))
        options = _options(args)
        built = build(options, tell_tokens=False)
    _say(args, built)
    try:
        done = replay(
            built,
            options,
            trace,
            pace=args.pace,
            limits=limits,
            most_requests=args.requests,
            users=args.users,
            on_progress=_progress("requests"),
        )
    except TraceError as error:
        raise UsageError(str(error)) from error
    finally:
        _clear_progress()
    if args.out is not None:
        with user_input():
            done.record.write(args.out, steps=not args.no_steps)
    if args.json:
        settings, summary = done.record.settings, done.record.summary
        print(to_json({"settings": settings, "summary": summary}), end="")
    else:
        print(_table(done.record.summary))
        print(
            f"replayed in {done.seconds:.1f} s ({args.pace} pace), {done.record.settings['load']}; greedy, "
            "with the trace's output lengths and what it tells of the answers"
        )
        settings = done.record.settings
        for skipped in settings["trace_rows_skipped"]:
            print(f"skipped: {skipped['reason']}: {skipped['rows']:,} rows")
        for note in settings["trace_notes"]:
            print(f"note: {note}")
        if origin:
            print(origin)
        if args.out is not None:
            print(f"Written: {args.out}")
    statistics = done.record.summary["goodput"]["slo"]["statistics"]
    return 0 if all(entry["holds"] for entry in statistics) else 1


def _table(summary: Mapping[str, Any]) -> str:
    counts = summary["requests"]
    failed = ", ".join(
        f"{n} {name}" for name, n in counts.items() if n and name not in ("total", "completed")
    )
    lines = [
        f"{counts['completed']:,} of {counts['total']:,} requests completed"
        + (f" ({failed})" if failed else "")
    ]
    lines.append(f"{'ms':>8}{'mean':>10}{'p50':>10}{'p95':>10}{'p99':>10}{'max':>10}")
    for name in ("ttft", "tpot", "itl", "e2e", "queue"):
        row = summary[f"{name}_s"]
        cells = (row[key] for key in ("mean", "p50", "p95", "p99", "max"))
        shown = "".join("-".rjust(10) if v is None else f"{1e3 * v:>10,.1f}" for v in cells)
        lines.append(f"{name.upper():>8}{shown}")
    rates, steps, kv = summary["throughput"], summary["steps"], summary["kv"]
    if rates["output_tokens_per_s"] is not None:
        lines.append(
            f"{rates['requests_per_s']:,.2f} requests/s, {rates['input_tokens_per_s']:,.0f} input and "
            f"{rates['output_tokens_per_s']:,.0f} output tokens/s"
        )
    if steps["count"]:
        lines.append(
            f"{steps['count']:,} steps, {1e3 * steps['mean_s']:.2f} ms on average; KV peak "
            f"{kv['peak_usage']:.1%}, {kv['preemptions']:,} preemptions"
        )
    attainment = summary["goodput"]["attainment"]
    if attainment is not None:
        lines.append(f"{attainment:.1%} of the requests met the limits")
    lines += [
        f"{entry['limit']} {'holds' if entry['holds'] else 'does not hold'}"
        for entry in summary["goodput"]["slo"]["statistics"]
    ]
    return "\n".join(lines)


# -- profile and bench -----------------------------------------------------------------------


def _add_profile(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "profile",
        help="measure a grid of steps and write the step profile",
        description="Measure decode steps by batch and context, prompt chunks, and both together.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON")
    parser.add_argument(
        "--batches",
        type=_counts,
        default=[1, 4, 16, 64],
        metavar="N,N,...",
        help="sequences that decode (1,4,16,64)",
    )
    parser.add_argument(
        "--contexts",
        type=_counts,
        default=[128, 512, 2048],
        metavar="N,N,...",
        help="tokens each attends to (128,512,2048)",
    )
    parser.add_argument(
        "--chunks",
        type=_counts,
        default=[64, 256, 1024],
        metavar="N,N,...",
        help="prompt tokens of a step (64,256,1024)",
    )
    parser.add_argument(
        "--repeats", type=_count, default=10, metavar="N", help="steps of each kind (10)"
    )
    _add_engine(parser)
    parser.add_argument("--json", action="store_true", help="print the steps as JSON too")
    parser.set_defaults(run=_profile)


def _profile(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from gpu_backend.llm import build
    from gpu_backend.profiling import SkippingExecutor, grid, profile
    from gpu_backend.replay import device_name, versions
    from records.profile import StepProfile

    with user_input():
        if not args.out.parent.is_dir() or args.out.is_dir():  # before the work, not after it
            raise ValueError(f"--out {args.out}: is a folder, or in one that is not there")
        options = _options(args)
        built = build(options, tell_tokens=False, executor_type=SkippingExecutor)
    _say(args, built)
    points = grid(args.batches, args.contexts, args.chunks, built.config.max_num_batched_tokens)
    left_out = []

    def show(point: Any, step: Any) -> None:
        if step is None:
            left_out.append(point)
        elif not args.json:
            print(
                f"{point.decodes:>5} decodes at {point.context:>6}, {point.prefill:>6} prompt tokens "
                f"behind {point.prefill_context:>6}: {1e3 * step.seconds:>9.3f} ms "
                f"({1e3 * step.min_s:.3f} to {1e3 * step.max_s:.3f})",
                flush=True,
            )

    steps = profile(built.engine, points, args.repeats, show)
    if not steps:
        raise UsageError(
            "no kind of step fits: blocks, slots, token budget or context are too small"
        )
    settings = {
        "model": built.model.config.name,
        "random_weights_seed": options.weights_seed,
        "device": device_name(built.model.device),
        "dtype": options.dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "block_size": options.block_size,
        "attention": built.attention,
        "cuda_graphs": built.engine.executor.graphs is not None,
        "max_num_batched_tokens": built.config.max_num_batched_tokens,
        "versions": versions(),
    }
    with user_input():
        StepProfile(settings, steps).write(args.out)
    if args.json:
        print(
            json.dumps({"settings": settings, "steps": [asdict(step) for step in steps]}, indent=1)
        )
        return 0
    if left_out:
        print(f"no room for {len(left_out)} kinds of step (blocks, slots, budget or context)")
    print(f"Written: {args.out} ({len(steps)} kinds of step)")
    return 0


def _add_bench(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure throughput on random prompts",
        description="Serve random prompts that all arrive at once, with outputs of one length.",
    )
    parser.add_argument("--num-prompts", type=_count, default=32, metavar="N", help="(32)")
    parser.add_argument("--input-len", type=_count, default=128, metavar="N", help="(128)")
    parser.add_argument("--output-len", type=_count, default=64, metavar="N", help="(64)")
    _add_engine(parser)
    parser.add_argument("--json", action="store_true", help="print settings and metrics as JSON")
    parser.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    from gpu_backend.llm import build
    from gpu_backend.replay import replay
    from records.run import to_json
    from scheduler.request import Request
    from traces import Arrival, Trace

    arrivals = [
        Arrival(Request(id=str(i), num_prompt_tokens=args.input_len), args.output_len)
        for i in range(args.num_prompts)
    ]
    name = f"{args.num_prompts} x {args.input_len} in, {args.output_len} out"
    trace = Trace(Path(name), "made here", "", len(arrivals), arrivals, [], [])
    with user_input():
        options = _options(args)
        built = build(options, tell_tokens=False)
    _say(args, built)
    done = replay(built, options, trace)
    if args.json:
        settings, summary = done.record.settings, done.record.summary
        print(to_json({"settings": settings, "summary": summary}), end="")
    else:
        print(_table(done.record.summary))
    return 0


# -- the engine's flags ----------------------------------------------------------------------


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        default="smollm2",
        metavar="NAME",
        help="a Hugging Face folder, a .gguf file, or smollm2 (smollm2)",
    )
    add(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights; --model may then be a catalogue name or a config.json (auto)",
    )
    add("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="(bf16)")
    add("--device", metavar="NAME", help="cpu or cuda (cuda where there is one)")
    add(
        "--attention",
        default="auto",
        metavar="NAME",
        help="reference, cpu, triton or varlen (by device)",
    )
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of random prompts, weights and samples (0)",
    )
    add = parser.add_argument_group(
        "KV memory (at most one of the first three; else what is left, for generate 1 GiB)"
    ).add_argument
    add(
        "--kv-gb",
        type=_size,
        metavar="SIZE",
        help="60 and 60GiB are 60 x 2^30 bytes, 60GB is 60 x 10^9",
    )
    add(
        "--num-gpu-blocks",
        type=_count,
        metavar="N",
        help="blocks as vLLM counts them, its null block included",
    )
    add(
        "--gpu-memory-utilization",
        type=float,
        metavar="F",
        help="share of the memory to use (0.9 of a GPU's, 0.5 of what a machine has free)",
    )
    add(
        "--kv-cache-dtype",
        choices=("auto", "fp8", "int8"),
        default="auto",
        help="auto: the model's (auto)",
    )
    add("--block-size", type=_count, default=16, metavar="N", help="tokens a block (16)")
    add(
        "--watermark",
        type=float,
        default=0.0,
        metavar="F",
        help="share of blocks an admission leaves free (0)",
    )
    add(
        "--swap-space",
        type=_size,
        default=0,
        metavar="SIZE",
        help="host memory, for --preemption-mode swap",
    )
    add = parser.add_argument_group("scheduler, named as in vLLM").add_argument
    add("--max-num-seqs", type=_count, default=256, metavar="N", help="sequences at once (256)")
    add(
        "--max-num-batched-tokens",
        type=_count,
        metavar="N",
        help="token budget of a step (8192 on a GPU, 2048 on a CPU)",
    )
    add("--max-model-len", type=_count, metavar="N", help="tokens of a sequence (the model's)")
    add(
        "--enable-chunked-prefill", action=argparse.BooleanOptionalAction, default=True, help="(on)"
    )
    add("--long-prefill-token-threshold", type=int, default=0, metavar="N", help="(off)")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="(on)")
    add(
        "--scheduling-policy",
        default="fcfs",
        metavar="NAME",
        help="as the simulator has them (fcfs)",
    )
    add("--preemption-mode", choices=("recompute", "swap"), default="recompute", help="(recompute)")
    add("--parallel-sampling", choices=("fork", "separate"), default="fork", help="(fork)")


def _options(args: argparse.Namespace) -> EngineOptions:
    from gpu_backend.config import ModelConfig
    from gpu_backend.llm import EngineOptions

    given = ("kv_gb", "num_gpu_blocks", "gpu_memory_utilization")
    if sum(getattr(args, name) is not None for name in given) > 1:
        raise ValueError(
            "--kv-gb, --num-gpu-blocks and --gpu-memory-utilization exclude each other"
        )
    if args.num_gpu_blocks == 1:
        raise ValueError("--num-gpu-blocks is 1: that is the null block, at least 2 are needed")
    is_random = args.load_format == "dummy"
    return EngineOptions(
        model=ModelConfig.from_name(args.model) if is_random else args.model,
        weights_seed=args.seed if is_random else None,
        device=args.device,
        dtype=args.dtype,
        attention=args.attention,
        kv_cache_dtype=cast("Any", args.kv_cache_dtype),
        block_size=args.block_size,
        num_blocks=None if args.num_gpu_blocks is None else args.num_gpu_blocks - 1,
        kv_bytes=args.kv_gb,
        memory_utilization=args.gpu_memory_utilization,
        swap_bytes=args.swap_space,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        enable_chunked_prefill=args.enable_chunked_prefill,
        enable_prefix_caching=args.enable_prefix_caching,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        watermark=args.watermark,
        preemption_mode=args.preemption_mode,
        parallel_sampling=args.parallel_sampling,
        scheduling_policy=args.scheduling_policy,
        cuda_graphs=not args.enforce_eager,
        seed=args.seed,
    )


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _counts(text: str) -> list[int]:
    return sorted({_count(part) for part in text.split(",")})


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _say(args: argparse.Namespace, built: Built) -> None:
    """What the engine is made of, on stderr: stdout is for results."""
    if not args.json:
        print("\n".join(built.lines), file=sys.stderr, flush=True)


def _progress(what: str) -> Any:
    def show(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done:,} {what}", end="", file=sys.stderr, flush=True)

    return show


def _clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
