"""``python -m simulator validate`` and ``calibrate``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from catalog import load_gpu
from commandline import Parser, UsageError, user_input
from records.run import to_json
from simulator.cost.calibration import Calibration
from simulator.cost.factors import factors_for
from simulator.flags import add_server_flags, options_of
from simulator.measured import calibrate as calibration
from simulator.measured.kernel_tables import TableError
from simulator.measured.logs import RequestLog, load_log
from simulator.measured.validate import (
    Compared,
    MapJobs,
    compare_log,
    median_error,
    series_errors,
    server_text,
    validate_all,
)
from simulator.measured.words import everything_as_markdown, log_as_text
from simulator.settings import Options


def validate(argv: list[str]) -> int:
    """Predicted beside measured; 1 where an error passes ``--max-error``."""
    parser = Parser(
        prog="python -m simulator validate",
        description="Simulate the load of measured runs and print predicted beside measured, with signed "
        "errors. What a log does not say of its server can be given by flags.",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="request logs (requests.jsonl with meta.json), run records, or vllm bench serve --save-detailed",
    )
    parser.add_argument(
        "--all",
        type=Path,
        metavar="FOLDER",
        help="every table of docs/validation.md, from a folder with vidur/, peers/ and vllm_runs/",
    )
    parser.add_argument(
        "--max-error",
        metavar="SHARE",
        help="exit code 1 past it, e.g. 15%%: of any statistic of a log; with --all, of a table's median and "
        "of calibrated logs",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write pictures")
    parser.add_argument("--json", action="store_true", help="for machines")
    add_server_flags(parser)
    args = parser.parse_args(argv)
    if (args.measured is None) == (args.all is None):
        raise UsageError("one of --measured and --all is needed, not both")
    with user_input():
        limit = None if args.max_error is None else _share(args.max_error)
        given = options_of(args)
        if args.all is not None and (args.json or given != Options()):
            raise ValueError(
                "--all takes no flags of a server and no --json: its runs say what they were"
            )
        if args.all is not None:
            return _validate_all(args.all, args.out, limit)
        logs = [load_log(path, given) for path in args.measured]
        for log in logs:
            _check_named(log)
        rows = [compare_log(log) for log in logs]
        series = [series_errors(log) for log in logs]
    if args.json:
        print(to_json([_as_json(row) for row in rows]), end="")
    else:
        for log, row, errors in zip(logs, rows, series, strict=True):
            print(log_as_text(log, row, errors))
            print(f"  simulated: {server_text(log)}")
    if args.out is not None:
        from simulator.measured.pictures import write_log_pictures

        with user_input():
            write_log_pictures(logs, rows, args.out)
        print(f"Written: {args.out}", file=sys.stderr)
    return _exit_code(rows, limit)


def _exit_code(rows: Sequence[Compared], limit: float | None) -> int:
    if limit is None:
        return 0
    worst = max(abs(row.error(metric)) for row in rows for metric in row.measured)
    return int(not worst <= limit)


def _check_named(log: RequestLog) -> None:
    if log.run.options.gpu is None or log.run.options.model is None:
        raise ValueError(f"{log.run.name} does not name model and GPU: give --model and --gpu")


def _share(text: str) -> float:
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 100:
        raise ValueError(f"--max-error is {text!r}, expected a share like 15% or 0.15")
    return value


def _as_json(row: Compared) -> dict[str, Any]:
    return {
        "name": row.name,
        "basis": row.group,
        "metrics": {
            name: {
                "measured_s": value,
                "predicted_s": row.predicted[name],
                "error": row.error(name),
            }
            for name, value in row.measured.items()
        },
        "notes": list(row.notes),
    }


def _validate_all(folder: Path, out: Path | None, limit: float | None) -> int:
    if not folder.is_dir():
        raise TableError(
            f"{folder}: no such folder, expected one with vidur/, peers/ and vllm_runs/"
        )
    with _pool() as map_jobs:
        found = validate_all(folder, map_jobs)
    print(everything_as_markdown(found), end="")
    if out is not None:
        from simulator.measured.pictures import write_all_pictures

        write_all_pictures(found, out)
        print(f"Written: {out}", file=sys.stderr)
    if limit is None:
        return 0
    medians = [
        median_error(rows, metric)
        for rows in (found.experiments, [row for row in found.loops if row.group == "closed loops"])
        for metric in ("E2E mean", "TTFT mean", "TPOT mean")
        if any(metric in row.measured for row in rows)
    ]
    worst = max(
        [*medians, *(abs(after.error(m)) for _, after, _ in found.halves for m in after.measured)]
    )
    return int(not worst <= limit)


@contextmanager
def _pool() -> Iterator[MapJobs]:
    with Pool() as pool:

        def map_jobs(function: Callable[[Any], Any], jobs: Sequence[Any]) -> list[Any]:
            return pool.map(function, jobs, chunksize=1)

        yield map_jobs


def calibrate(argv: list[str]) -> int:
    """Fit a server's factors and write them."""
    parser = Parser(
        prog="python -m simulator calibrate",
        description="Fit a few physical factors of step times to the requests of a real server: every second "
        "request tells them, the others are held out and say how good they are. A few hundred requests do.",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        required=True,
        metavar="PATH",
        help="a log of requests, as for validate",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it, for --calibration FILE")
    parser.add_argument("--json", action="store_true", help="for machines")
    add_server_flags(parser)
    args = parser.parse_args(argv)
    with user_input():
        if args.calibration is not None:
            raise ValueError("--calibration has no effect here: it is what this command makes")
        log = load_log(args.measured, options_of(args))
        _check_named(log)
        if log.run.options.cost_model not in (None, "physical"):
            raise ValueError("--cost-model: only the physical one has factors to calibrate")
        result = calibration.calibrate(log)
        if args.out is not None:
            result.calibration.write(args.out)
    before = Compared(log.run.name, "before", result.before, result.measured)
    after = Compared(log.run.name, "after", result.after, result.measured)
    if args.json:
        document = {
            "calibration": _values(result.calibration),
            "held_out": {"before": _as_json(before), "after": _as_json(after)},
        }
        print(to_json(document), end="")
    else:
        print(_calibrated_text(log, result, before, after))
        if args.out is not None:
            print(f"\nWritten: {args.out} (use it with --calibration {args.out})")
    return 0


def _values(made: Calibration) -> dict[str, float]:
    names = ("weights", "compute", "kv", "step_s", "sequence_s", "frontend_s")
    return {name: value for name in names if (value := getattr(made, name)) is not None}


def _calibrated_text(
    log: RequestLog, result: calibration.Calibrated, before: Compared, after: Compared
) -> str:
    base = factors_for(load_gpu(result.calibration.gpu))
    lines = [
        f"{log.run.name}: {result.calibration.model} on {result.calibration.gpu}, "
        f"{result.num_fitted} requests fitted, {result.num_held_out} held out",
        f"before: {base.about}",
        f"simulated: {server_text(log)}",
        *(f"note: {note}" for note in log.run.notes),
        "",
        "fitted, x the shares before:",
    ]
    for name, value in _values(result.calibration).items():
        own = getattr(base.serving, name, None)
        text = f"{value:g}" if own is None else f"{value * 1e3:.3g} ms (before: {own * 1e3:.3g} ms)"
        lines.append(f"  {name:<12} {text}")
    lines += [
        "",
        "held-out requests (of the same run, so they queued with the fitted ones):",
        f"  {'':<10} {'measured':>10} {'before':>10} {'':>8} {'after':>10}",
    ]
    for name, value in result.measured.items():
        lines.append(
            f"  {name:<10} {_time(value):>10} {_time(before.predicted[name]):>10} "
            f"{before.error(name):>+8.1%} {_time(after.predicted[name]):>10} {after.error(name):>+8.1%}"
        )
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"
