"""``python -m traces``: look at a trace, make a trace."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import commandline
from commandline import Parser, user_input
from traces import find_trace
from traces.arrivals import KNOWN as ARRIVALS
from traces.convert import TARGETS, Written, convert, lines_of, write_new
from traces.fit import Fit, closeness, fit
from traces.formats import all_formats
from traces.formats.base import TraceError
from traces.generate import ChatSettings, chat_lines
from traces.laws import PROCESSES, Law, parse_law, parse_process
from traces.presets import PRESETS, preset
from traces.servegen import ServeGenSettings, generate_servegen, read_servegen, servegen_lines
from traces.session_files import is_session_trace, read_sessions
from traces.shape import STEPS, shaped_trace
from traces.tokenizer import TextTokenizer
from traces.trace import Trace, read_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 = done, 2 = input that cannot be used (one line on stderr)."""
    arguments = _parser().parse_args(argv)

    def command() -> int:
        with user_input():
            arguments.run(arguments)
        return 0

    return commandline.run(command)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m traces", description="Look at request traces and make them.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_inspect(commands)
    _add_sessions(commands)
    _add_convert(commands)
    _add_fit(commands)
    _add_generate(commands)
    return parser


def _add_reading(parser: argparse.ArgumentParser) -> None:
    """What every command that reads a trace takes."""
    parser.add_argument(
        "file", metavar="FILE", help="the trace: a file (also .gz, .bz2, .xz) or a folder"
    )
    parser.add_argument(
        "--format", metavar="NAME", help="read it as this format (default: by content)"
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse a trace with bad rows instead of skipping them",
    )
    parser.add_argument(
        "--arrivals",
        metavar="PROCESS",
        help=f"when requests come, where the file does not say: {ARRIVALS}",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="the model's tokenizer.json, where the trace holds texts instead of counts",
    )
    parser.add_argument(
        "--spread",
        action="store_true",
        help="spread rows of one coarse tick evenly over it (Mooncake's 3 s)",
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="STEP",
        help="change the load, in the order given: one of\n" + STEPS,
    )


def _read(arguments: argparse.Namespace) -> Trace:
    """The trace that the flags name, shaped."""
    bar = _ProgressBar()
    path, origin = find_trace(arguments.file)
    if origin:
        print(origin, file=sys.stderr)
    if path.exists() and is_session_trace(path):
        raise TraceError(
            f"trace {path}: holds sessions, whose turns wait for answers: give it to python -m simulator, or "
            "to python -m traces sessions"
        )
    trace = read_trace(
        path,
        arguments.format,
        arguments.strict,
        arrivals=arguments.arrivals,
        spread=arguments.spread,
        tokenizer=_tokenizer(arguments),
        progress=bar.show,
    )
    bar.clear()
    return shaped_trace(trace, arguments.shape)


def _tokenizer(arguments: argparse.Namespace) -> TextTokenizer | None:
    return None if arguments.tokenizer is None else TextTokenizer(arguments.tokenizer)


def _add_inspect(commands: argparse._SubParsersAction[Parser]) -> None:
    known = "\n".join(
        f"  {f.name:<24}{f.recognised_by}\n"
        f"{'':<26}units: {f.units}; prefix identity: {f.prefix_identity};\n"
        f"{'':<26}public data: {f.licence}"
        for f in all_formats()
    )
    parser = commands.add_parser(
        "inspect",
        help="describe a trace: rate, bursts, lengths, prefix reuse, what was skipped",
        description=(
            "Describe a trace as a planner wants it: rows, span, rate, burstiness, length\n"
            "percentiles (linear interpolation), prefix reuse against the size of the pool, what the\n"
            "format cannot tell, what was skipped and why."
        ),
        epilog=f"formats, recognised by content:\n{known}",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    _add_reading(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--picture", metavar="PNG", help="draw it too (.png or .svg)")
    parser.add_argument(
        "--block-size",
        type=_positive,
        metavar="B",
        help="tokens a block for the prefix hit rate, full blocks only (default: the trace's own\n"
        "block, or 16 where it has token ids)",
    )
    parser.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> None:
    from traces.describe import describe

    description = describe(_read(arguments), arguments.block_size)
    if arguments.json:
        print(json.dumps(description.to_json(), indent=2))
    else:
        print(description.to_text())
    if arguments.picture is not None:
        from traces.pictures import write_picture

        print(f"Written: {write_picture(description, arguments.picture)}", file=sys.stderr)


def _add_sessions(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "sessions",
        help="describe a file of sessions (Weka, TraceLab, LLMServingSim)",
        description="Sessions, turns and what was skipped; the simulator serves them in closed loop.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a file, archive or folder")
    parser.add_argument("--format", metavar="NAME", help="read it as this format")
    parser.add_argument("--strict", action="store_true", help="refuse a file with bad rows")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=_sessions)


def _sessions(arguments: argparse.Namespace) -> None:
    trace = read_sessions(arguments.file, arguments.format, arguments.strict)
    turns = sorted(len(session.turns) for session in trace.sessions)
    prompts = sorted(
        turn.request.num_prompt_tokens for session in trace.sessions for turn in session.turns
    )
    found = {
        "path": str(trace.path),
        "format": trace.format,
        "rows": trace.num_rows,
        "requests": trace.num_requests,
        "sessions": len(trace.sessions),
        "turns_p50": turns[len(turns) // 2],
        "turns_max": turns[-1],
        "prompt_tokens_p50": prompts[len(prompts) // 2],
        "prompt_tokens_max": prompts[-1],
        "starts_recorded": trace.has_starts,
        "prefix_identity": trace.has_identity,
        "skipped": [str(skipped) for skipped in trace.skipped],
        "notes": trace.notes,
    }
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print(
        f"{trace.path} ({trace.format}): {trace.num_rows:,} rows, {trace.num_requests:,} requests in "
        f"{len(trace.sessions):,} session{'s' if len(trace.sessions) > 1 else ''}\n"
        f"turns a session: p50 {found['turns_p50']:,}, max {found['turns_max']:,}; prompts: p50 "
        f"{found['prompt_tokens_p50']:,}, max {found['prompt_tokens_max']:,} tokens\n"
        f"starts of sessions: {'recorded' if trace.has_starts else 'not recorded'}; prefixes: "
        f"{'known' if trace.has_identity else 'unknown'}"
    )
    for text in (*map(str, trace.skipped), *trace.notes):
        print(f"  {text}")


def _add_fit(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "fit",
        help="learn a generator from a trace, and say how close it is",
        description="Learn rate, gaps, lengths and prefix sharing; `generate --like FIT` makes more of it.",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    _add_reading(parser)
    parser.add_argument("--out", required=True, metavar="FIT", help="where to write it (JSON)")
    parser.add_argument("--force", action="store_true", help="replace FIT if it exists")
    parser.add_argument("--json", action="store_true", help="report as JSON instead of text")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the workload that it is compared with"
    )
    parser.set_defaults(run=_fit)


def _fit(arguments: argparse.Namespace) -> None:
    trace = _read(arguments)
    found = fit(trace.arrivals)
    close = closeness(trace.arrivals, found.generate(seed=arguments.seed))
    write_new(Path(arguments.out), [json.dumps(found.to_json()) + "\n"], force=arguments.force)
    print(json.dumps(close.to_json(), indent=2) if arguments.json else close.to_text())


def _add_convert(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "convert",
        help="write a trace in another format, or shaped",
        description="Write a trace in another format: all that it can hold, and a list of what it cannot.",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    _add_reading(parser)
    parser.add_argument("--to", required=True, choices=tuple(TARGETS), help="the format")
    parser.add_argument("--out", required=True, metavar="FILE", help="where to write")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> None:
    done = convert(_read(arguments), arguments.out, arguments.to, force=arguments.force)
    print(
        f"Wrote {done.requests:,} requests to {arguments.out} ({done.written.bytes:,} bytes, sha256 "
        f"{done.written.sha256[:16]}...)."
    )
    for what in done.dropped:
        print(f"dropped: {what}")
    for note in done.notes:
        print(f"note: {note}")


_OPTIONS = (
    ("rate", "requests per second, all turns counted"),
    ("cv", "CV of the gaps between session starts: 1 = Poisson, else gamma"),
    ("duration", "seconds of load"),
    ("turns", "mean turns a session (geometric)"),
    ("question-tokens", "tokens each turn adds to the prompt"),
    ("output-tokens", "tokens of an answer"),
    ("system-tokens", "tokens of a system prompt"),
    ("system-prompts", "different system prompts; the k-th has weight 1/k"),
    ("documents", "different documents that questions bring along"),
    ("documents-per-question", "of them, most of the first ones"),
    ("document-tokens", "tokens of a document"),
    ("think", "seconds from the end of an answer to the next question"),
    ("answer-speed", "assumed tokens/s of an answer: decides when the next turn comes"),
    ("max-context", "a session ends where prompt + answer pass this"),
    ("hash-block-size", "tokens a hash id; only full blocks get one"),
)
_FIELDS = {"duration": "duration_s", "think": "think_s", "answer-speed": "answer_tokens_per_s"}
"""Settings whose flag has another name."""


def _field(option: str) -> str:
    return _FIELDS.get(option, option.replace("-", "_"))


def _add_generate(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="make a workload in the native format",
        description=(
            "Make a workload: sessions start at random and take turns; a turn's prompt is the "
            "prompt before it, the answer and a new question; system prompts and documents are shared. "
            "A LAW is MEDIAN:P95 (lognormal by its median and 95th percentile), fixed:N, uniform:A:B, "
            "zipf:EXPONENT:MOST or empirical:FILE:prompt (or :output). The same options give the same bytes."
        ),
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="where to write")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.add_argument("--json", action="store_true", help="report as JSON instead of text")
    parser.add_argument("--seed", type=int, help="(default: 0)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        help="start from settings that were shaped after public figures",
    )
    source.add_argument("--like", type=Path, metavar="FIT", help="of a trace, from `fit`")
    source.add_argument(
        "--servegen", type=Path, metavar="FOLDER", help="clients of alibaba/ServeGen"
    )
    parser.add_argument("--requests", type=_positive, metavar="N", help="with --like")
    parser.add_argument(
        "--start", type=float, metavar="S", help="with --servegen: from this second on"
    )
    parser.add_argument(
        "--arrivals",
        metavar="PROCESS",
        help=f"of session starts instead of --cv: {PROCESSES}",
    )
    default = ChatSettings()
    for option, text in _OPTIONS:
        value = getattr(default, _field(option))
        is_number = isinstance(value, int | float)
        parser.add_argument(
            f"--{option}",
            type=type(value) if is_number else _law,
            metavar="N" if isinstance(value, int) else "X" if is_number else "LAW",
            help=f"{text} (default: {value:g})" if is_number else text,
        )
    parser.add_argument(
        "--hash-ids",
        action=argparse.BooleanOptionalAction,
        help="say which blocks prompts share (on)",
    )
    parser.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> None:
    if arguments.like is not None:
        _generate_like(arguments)
    elif arguments.servegen is not None:
        _generate_servegen(arguments)
    else:
        _generate_chat(arguments)


def _refuse(arguments: argparse.Namespace, names: Iterable[str], where: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            raise TraceError(f"--{name.replace('_', '-')} has no effect {where}")


def _generate_like(arguments: argparse.Namespace) -> None:
    others = [option.replace("-", "_") for option, _ in _OPTIONS if option != "rate"]
    _refuse(arguments, (*others, "hash_ids", "arrivals", "start"), "with --like")
    try:
        learnt = Fit.from_json(json.loads(arguments.like.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise TraceError(f"{arguments.like}: {error}") from None
    arrivals = learnt.generate(
        requests=arguments.requests, rate=arguments.rate, seed=arguments.seed or 0
    )
    written = write_new(Path(arguments.out), lines_of(arrivals, "native"), force=arguments.force)
    _report(arguments, written, {"like": str(arguments.like)}, [])


def _generate_servegen(arguments: argparse.Namespace) -> None:
    others = [o.replace("-", "_") for o, _ in _OPTIONS if o not in ("rate", "duration")]
    _refuse(arguments, (*others, "hash_ids", "arrivals", "requests"), "with --servegen")
    given = {"start_s": arguments.start, "duration_s": arguments.duration, "seed": arguments.seed}
    settings = ServeGenSettings(
        rate=arguments.rate, **{name: value for name, value in given.items() if value is not None}
    )
    made = generate_servegen(read_servegen(arguments.servegen), settings)
    written = write_new(Path(arguments.out), servegen_lines(made), force=arguments.force)
    _report(arguments, written, dataclasses.asdict(settings), made.notes)


def _generate_chat(arguments: argparse.Namespace) -> None:
    _refuse(arguments, ("requests",), "without --like")
    _refuse(arguments, ("start",), "without --servegen")
    names = [*(option for option, _ in _OPTIONS), "hash-ids", "seed"]
    given = {
        _field(name): value
        for name in names
        if (value := getattr(arguments, name.replace("-", "_"))) is not None
    }
    if arguments.arrivals is not None:
        _refuse(arguments, ("cv",), "with --arrivals")
        given["arrivals"] = parse_process(arguments.arrivals)
    base, notes = ChatSettings(), []
    if arguments.preset is not None:
        chosen = preset(arguments.preset)
        base = chosen.settings
        notes = [f"shaped after {chosen.source}", f"assumed: {chosen.assumed}"]
    if given.get("hash_ids", base.hash_ids) is False and "hash_block_size" in given:
        raise TraceError("--hash-block-size has no effect with --no-hash-ids")
    settings = dataclasses.replace(base, **given)
    notes.append(
        f"assumed: answers come at {settings.answer_tokens_per_s:g} tokens/s, which decides when the next "
        "turn of a session arrives"
    )
    written = write_new(Path(arguments.out), chat_lines(settings), force=arguments.force)
    _report(arguments, written, settings.to_json(), notes)


def _report(
    arguments: argparse.Namespace, written: Written, settings: object, notes: Sequence[str]
) -> None:
    if arguments.json:
        report = {"path": arguments.out, **dataclasses.asdict(written)}
        print(json.dumps({**report, "settings": settings, "notes": list(notes)}, indent=2))
        return
    print(
        f"Wrote {written.rows:,} requests to {arguments.out} ({written.bytes:,} bytes, sha256 "
        f"{written.sha256[:16]}...), seed {arguments.seed or 0}."
    )
    for note in notes:
        print(f"{note[:1].upper()}{note[1:].removesuffix('.')}.")


class _ProgressBar:
    """On a terminal only, and only from the third second on."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._shown = False

    def show(self, done: int, total: int) -> None:
        if sys.stderr.isatty() and time.monotonic() - self._start > 2:
            filled = 40 * done // max(total, 1)
            print(f"\rreading [{'#' * filled:<40}]", end="", file=sys.stderr, flush=True)
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _law(text: str) -> Law:
    try:
        return parse_law(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
