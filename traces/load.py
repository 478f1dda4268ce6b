"""A load as a command line names it: which trace, changed how, sent when.

The simulator and the engine take the same flags, and put the same words about the load into their
records.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from traces.formats.base import NoArrivalsError
from traces.session_files import is_session_trace, read_sessions
from traces.sessions import SessionTrace
from traces.shape import shaped_trace
from traces.tokenizer import TextTokenizer
from traces.trace import MADE_ARRIVALS, NO_TIMES, Trace, TraceStream, read_trace, stream_trace
from traces.turns import closed_loop

AnyTrace = Trace | TraceStream | SessionTrace

_UNTOLD = object()
"""``--closed-loop`` without a speed."""


def add_load_flags(add: Callable[..., Any]) -> None:
    """What `read_load` reads; ``add`` is the ``add_argument`` of a parser or of a group."""
    add(
        "--trace",
        required=True,
        metavar="FILE",
        help="requests or sessions in any known format (`python -m traces inspect --help` lists them)",
    )
    add("--format", metavar="NAME", help="insist on a trace format instead of recognising it")
    add("--strict", action="store_true", help="a row that would be skipped or repaired is an error")
    add(
        "--arrivals",
        metavar="PROCESS",
        help="when requests come, or sessions start, where the file does not say: poisson:rate=R,seed=S, "
        "constant:rate=R or all-at-once",
    )
    add(
        "--tokenizer",
        metavar="FILE",
        help="the model's tokenizer.json, where the trace holds texts instead of counts",
    )
    add("--spread", action="store_true", help="spread rows of one coarse tick evenly over it")
    add(
        "--shape",
        action="append",
        default=[],
        metavar="STEP",
        help="change the load, in the order given, e.g. rate:factor=2,by=stretch (see `python -m traces "
        "convert --help`)",
    )
    add(
        "--users",
        type=int,
        metavar="N",
        help="closed loop: so many requests (or sessions) under way, the next as one ends",
    )
    add(
        "--closed-loop",
        type=float,
        nargs="?",
        const=_UNTOLD,
        metavar="SPEED",
        help="rows of one session wait for the answers before them; where rows have times, those are taken "
        "to have come at SPEED tokens/s in the recording, which decides the think times",
    )


def read_load(args: argparse.Namespace, path: Path, only_open: Sequence[str] = ()) -> AnyTrace:
    """The trace, or the sessions, that the flags name.

    ``only_open``: further flags of the caller, by ``dest``, that change nothing in sessions.

    Raises ``ValueError`` (also `TraceError`) where the file cannot be used or flags contradict it or
    each other.
    """
    if args.users is not None and args.users < 1:
        raise ValueError(f"--users is {args.users}, expected at least 1")
    if path.exists() and is_session_trace(path):
        flags = ("shape", "spread", "tokenizer", "closed_loop", *only_open)
        _refuse(args, flags, f"on sessions, as {path} has")
        return _started(args, read_sessions(path, args.format, args.strict))
    tokenizer = None if args.tokenizer is None else TextTokenizer(args.tokenizer)
    if args.closed_loop is not None:
        _refuse(args, only_open, "with --closed-loop")
        return _started(args, _rows_in_closed_loop(args, path, tokenizer))
    read = read_trace if args.shape else stream_trace
    trace = read(
        path,
        args.format,
        args.strict,
        arrivals=args.arrivals,
        spread=args.spread,
        tokenizer=tokenizer,
    )
    return shaped_trace(trace, args.shape) if isinstance(trace, Trace) and args.shape else trace


def _rows_in_closed_loop(
    args: argparse.Namespace, path: Path, tokenizer: TextTokenizer | None
) -> SessionTrace:
    speed = None if args.closed_loop is _UNTOLD else args.closed_loop
    for step in args.shape:
        if step.partition(":")[0] == "rate":
            raise ValueError(
                f"--shape {step} has no place in a closed loop, where answers set the pace: say --users "
                "or --arrivals"
            )
    if speed is not None and not 0 < speed < math.inf:
        raise ValueError(f"--closed-loop is {speed:g}, expected a speed above 0 in tokens/s")

    def read(arrivals: str | None) -> Trace:
        trace = read_trace(
            path,
            args.format,
            args.strict,
            arrivals=arrivals,
            spread=args.spread and arrivals is None,
            tokenizer=tokenizer,
        )
        return shaped_trace(trace, args.shape) if args.shape else trace

    try:
        trace = read(None)
    except NoArrivalsError:
        flags = {"the speed of --closed-loop": speed is not None, "--spread": args.spread}
        for step in args.shape:
            flags[f"--shape {step}"] = step.startswith("window:")
        for flag, is_given in flags.items():
            if is_given:
                raise ValueError(
                    f"{flag} has no effect: the first row of {path} has no time, so none is used"
                ) from None
        trace = read("all-at-once")
        notes = [
            n for n in trace.notes if not (n.startswith(MADE_ARRIVALS) and n.endswith(NO_TIMES))
        ]
        return closed_loop(replace(trace, notes=notes), None)
    if speed is None:
        raise ValueError(
            f"the rows of {path} have times: --closed-loop needs the speed, in tokens/s, at which "
            "answers came when they were recorded"
        )
    return closed_loop(trace, speed)


def _started(args: argparse.Namespace, sessions: SessionTrace) -> SessionTrace:
    if args.arrivals is not None:
        if args.users is not None:
            raise ValueError("--users and --arrivals are both given, expected one of them")
        return sessions.starting_by(args.arrivals)
    if args.users is None and not sessions.has_starts:
        raise ValueError(
            f"{sessions.path}: its sessions have no start: say --users N, or --arrivals "
            "poisson:rate=R,seed=S"
        )
    return sessions


def _refuse(args: argparse.Namespace, flags: Sequence[str], why: str) -> None:
    for flag in flags:
        value = getattr(args, flag)
        if value is not None and value is not False and value != []:
            raise ValueError(f"--{flag.replace('_', '-')} has no effect {why}")


def load_text(trace: AnyTrace, users: int | None) -> str:
    """How the requests come, in a few words."""
    if isinstance(trace, SessionTrace):
        starts = "at their starts" if users is None else f"by {users:,} users"
        return f"{len(trace.sessions):,} sessions {starts}, in closed loop: turns wait for answers"
    if users is not None:
        return (
            f"closed loop: {users:,} requests under way, the next as one ends (turns of a session do not "
            "wait for each other)"
        )
    return "open loop: requests come at the trace's times, whatever the server does"


def load_settings(trace: AnyTrace, users: int | None) -> dict[str, Any]:
    """What run.json says of the load; of a stream, once it has been read to its end."""
    return {
        "load": load_text(trace, users),
        "trace": trace.path.name,
        "trace_format": trace.format,
        "trace_sha256": trace.sha256,
        "trace_rows": trace.num_rows,
        "trace_rows_skipped": [
            {"reason": s.reason, "rows": s.count, "lines": s.lines[:20]} for s in trace.skipped
        ],
        "trace_notes": list(trace.notes),
        "prefix_identity": trace.has_identity,
    }
