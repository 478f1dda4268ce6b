"""Command line: ``python -m simulator --trace chat.jsonl --kv-gb 60``, also installed as ``kvplan``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import commandline
from commandline import TOO_LARGE, Parser, UsageError, user_input
from records.columns import SpillError
from records.run import RunRecord, check_writable, to_json
from simulator.bands import with_band
from simulator.compare import compare, compare_json
from simulator.flags import add_server_flags, options_of
from simulator.report import render
from simulator.run import OnProgress, RunResult, package_version, run
from simulator.settings import Setup, resolve
from traces import TraceError, find_trace
from traces.load import AnyTrace, add_load_flags, read_load


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 ran, 1 a limit does not hold, 2 cannot run)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["compare"]:
        return commandline.run(lambda: _compare(arguments[1:]))
    if arguments[:1] in (["validate"], ["calibrate"]):
        from simulator.measured import commands

        command = commands.validate if arguments[0] == "validate" else commands.calibrate
        return commandline.run(lambda: command(arguments[1:]))
    return commandline.run(lambda: _run(arguments))


def _run_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m simulator",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Replay a request trace against a model of a serving engine: what users would feel, "
        "what ran out, what to change.",
        epilog="Other commands: `compare RUN_A RUN_B` puts two run records side by side, `validate` holds "
        "predictions\nagainst measured runs, `calibrate` fits step times to a server.\nSizes without a unit "
        "are GiB, times without one are seconds. What is not given is assumed,\nand the report says so.",
    )
    parser.add_argument("--version", action="version", version=f"kvplan {package_version()}")
    add = parser.add_argument_group("load").add_argument
    add_load_flags(add)
    add("--max-tokens", type=int, metavar="N", help="output limit of rows that have none")
    add(
        "--deadline",
        type=float,
        metavar="S",
        help="seconds after which clients give up, where rows do not say",
    )
    add(
        "--warm-start",
        type=int,
        metavar="N",
        help="first serve the prompts of the first N requests, unrecorded, so that the prefix cache is warm",
    )
    add("--until", type=float, metavar="S", help="stop the run at this time")
    add_server_flags(parser)
    add = parser.add_argument_group("result").add_argument
    add(
        "--slo",
        metavar="LIMITS",
        help='e.g. "ttft<=500ms,tpot<=50ms" for each request, "ttft:p99<=1s" for the run '
        "(exit code 1 if it does not hold)",
    )
    add(
        "--try-change",
        action="store_true",
        help="also run the change that the verdict names, and compare",
    )
    add(
        "--bands",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run twice more, with steps as short and as long as they may well be (on)",
    )
    add("--out", type=Path, metavar="DIR", help="write the run record and pictures")
    add("--no-steps", action="store_true", help="leave steps.parquet out of the record")
    add("--json", action="store_true", help="print settings and metrics as JSON")
    return parser


def _run(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        raise UsageError(
            f"unknown command {argv[0]!r}, expected compare, validate, calibrate or flags"
        )
    parser = _run_parser()
    args = parser.parse_args(argv)
    with user_input():
        if args.no_steps and args.out is None:
            raise ValueError("--no-steps has no effect without --out")
        if args.out is not None:
            check_writable(args.out)  # before the work, not after it
        setup = resolve(options_of(args))
        path, origin = find_trace(args.trace)
        trace = read_load(args, path, only_open=("max_tokens", "deadline", "warm_start"))
    result = _with_progress(setup, trace, args.strict, args.users)
    if args.bands:
        with user_input():
            result = with_band(result, setup, args.users)
    if args.out is not None:
        with user_input():
            _write(result.record, args.out, setup, steps=not args.no_steps)
    tried = _try_change(parser, argv, result) if args.try_change else None
    if args.json:
        document: dict[str, Any] = {
            "settings": result.record.settings,
            "summary": result.record.summary,
        }
        if tried is not None:
            document["change_tried"] = tried.as_json
        print(to_json(document), end="")
    else:
        print(render(result, setup, origin))
        if tried is not None:
            print(f"\nTried: {tried.text}")
        if args.out is not None:
            print(f"\nWritten: {args.out} (run record and pictures)")
    return 0 if _limits_hold(result.record) else 1


class _Tried(NamedTuple):
    text: str
    as_json: dict[str, Any] | None


def _try_change(parser: argparse.ArgumentParser, argv: list[str], result: RunResult) -> _Tried:
    """Run the change that the verdict names, and compare."""
    flags = result.verdict.flags
    if not flags:
        return _Tried(
            "nothing; what would help is not a matter of flags, or nothing is needed", None
        )
    try:
        setup = resolve(options_of(parser.parse_args([*argv, *flags])))
    except ValueError as error:
        return _Tried(f"{' '.join(flags)}, which cannot be run: {error}", None)
    try:
        users = parser.parse_args(argv).users
        changed = _with_progress(setup, result.trace, strict=False, users=users)
    except UsageError as error:
        return _Tried(f"{' '.join(flags)}, which could not be run: {error}", None)
    names = ("as asked", " ".join(flags))
    return _Tried(
        f"{names[1]}\n\n{compare(result.record, changed.record, names)}",
        compare_json(result.record, changed.record, names),
    )


def _limits_hold(record: RunRecord) -> bool:
    """Statistics of the run that were asked for (limits on each request are counted, not judged)."""
    statistics = (record.summary["goodput"]["slo"] or {}).get("statistics") or ()
    return all(entry["holds"] for entry in statistics)


def _with_progress(setup: Setup, trace: AnyTrace, strict: bool, users: int | None) -> RunResult:
    show: OnProgress | None = None
    if sys.stderr.isatty():

        def show(done: int, share: float) -> None:
            filled = int(30 * min(share, 1))
            bar = "#" * filled + "." * (30 - filled)
            print(f"\r[{bar}] {done:,} requests", end="", file=sys.stderr, flush=True)

    try:
        return run(setup, trace, on_progress=show, strict=strict, users=users)
    except (TraceError, SpillError) as error:
        raise UsageError(str(error)) from error
    except OverflowError as error:
        raise UsageError(TOO_LARGE) from error
    finally:
        if show is not None:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _write(record: RunRecord, folder: Path, setup: Setup, *, steps: bool) -> None:
    from simulator.pictures import write_pictures

    def pictures(partial: Path) -> None:
        write_pictures(record, partial, limits=setup.limits)

    record.write(folder, steps=steps, extras=pictures)


def _compare(argv: list[str]) -> int:
    parser = Parser(
        prog="python -m simulator compare",
        description="Two run records side by side: metrics, what changed, and which settings differ.",
    )
    parser.add_argument("a", type=Path, metavar="RUN_A")
    parser.add_argument("b", type=Path, metavar="RUN_B")
    parser.add_argument("--json", action="store_true", help="for machines")
    args = parser.parse_args(argv)
    with user_input():
        a, b = RunRecord.read(args.a), RunRecord.read(args.b)
    names = (args.a.name, args.b.name) if args.a.name != args.b.name else (str(args.a), str(args.b))
    if args.json:
        print(to_json(compare_json(a, b, names)), end="")
    else:
        print(compare(a, b, names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
