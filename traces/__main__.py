"""``python -m traces``: look at a trace, make a trace."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import commandline
from commandline import Parser, user_input
from traces import default_trace_path
from traces.formats import FORMATS
from traces.formats.base import TraceError
from traces.generate import ChatSettings, Lognormal, chat_lines
from traces.trace import read_trace

_DEFAULTS = ChatSettings()


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
    _add_generate(commands)
    return parser


def _add_inspect(commands: argparse._SubParsersAction[Parser]) -> None:
    known = "\n".join(
        f"  {f.name:<10}{f.recognised_by}\n"
        f"            units: {f.units}; prefix identity: {f.prefix_identity};\n"
        f"            public data: {f.licence}"
        for f in FORMATS
    )
    parser = commands.add_parser(
        "inspect",
        help="describe a trace: rate, bursts, lengths, prefix reuse, what was skipped",
        description=(
            "Describe a trace as a planner wants it: rows, span, rate, burstiness, length\n"
            "percentiles (linear interpolation), ideal prefix hit rate, what was skipped and why."
        ),
        epilog=f"formats, recognised by content:\n{known}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="the trace")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--format",
        choices=[f.name for f in FORMATS],
        help="read it as this format (default: by content)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse a trace with bad rows instead of skipping them",
    )
    parser.add_argument(
        "--block-size",
        type=_positive,
        metavar="B",
        help="tokens a block for the prefix hit rate, full blocks only (default: the trace's own "
        "block, or 16 where it has token ids)",
    )
    parser.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> None:
    from traces.describe import describe

    bar = _ProgressBar()
    path = Path(arguments.file)
    if not path.exists() and str(path) == default_trace_path().name:
        path = default_trace_path()
        print(f"no {path.name} here: this is the sample that ships with kvplan", file=sys.stderr)
    trace = read_trace(path, arguments.format, arguments.strict, progress=bar.show)
    bar.clear()
    description = describe(trace, arguments.block_size)
    if arguments.json:
        print(json.dumps(description.to_json(), indent=2))
    else:
        print(description.to_text())


def _add_generate(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="make a chat workload in the native format",
        description=(
            "Make a chat workload: sessions start at random and take turns; a turn's prompt is the "
            "prompt before it, the answer and a new question; system prompts are shared. "
            "MEDIAN:P95 gives a lognormal law by its median and its 95th percentile. The same "
            "options give the same bytes."
        ),
    )
    default = _DEFAULTS
    parser.add_argument("--out", required=True, metavar="FILE", help="where to write")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.add_argument("--json", action="store_true", help="report as JSON instead of text")
    parser.add_argument("--seed", type=int, default=default.seed, help="(default: %(default)s)")
    options = (
        ("rate", "requests per second, all turns counted"),
        ("cv", "CV of the gaps between session starts: 1 = Poisson, else gamma"),
        ("duration", "seconds of load"),
        ("turns", "mean turns a session (geometric)"),
        ("question-tokens", "tokens each turn adds to the prompt"),
        ("output-tokens", "tokens of an answer"),
        ("system-tokens", "tokens of a system prompt"),
        ("system-prompts", "different system prompts; the k-th has weight 1/k"),
        ("think", "seconds from the end of an answer to the next question"),
        ("answer-speed", "assumed tokens/s of an answer: decides when the next turn comes"),
        ("max-context", "a session ends where prompt + answer pass this"),
        ("hash-block-size", "tokens a hash id; only full blocks get one"),
    )
    for option, text in options:
        value = getattr(default, _FIELDS.get(option, option.replace("-", "_")))
        is_law = isinstance(value, Lognormal)
        shown = f"{value.median:g}:{value.p95:g}" if is_law else f"{value:g}"
        parser.add_argument(
            f"--{option}",
            type=_law if is_law else type(value),
            default=value,
            metavar="MEDIAN:P95" if is_law else "N" if isinstance(value, int) else "X",
            help=f"{text} (default: {shown})",
        )
    parser.add_argument(
        "--hash-ids",
        action=argparse.BooleanOptionalAction,
        default=default.hash_ids,
        help="say which blocks prompts share (on)",
    )
    parser.set_defaults(run=_generate)


_FIELDS = {"duration": "duration_s", "think": "think_s", "answer-speed": "answer_tokens_per_s"}
"""Settings whose flag has another name."""


def _generate(arguments: argparse.Namespace) -> None:
    given = {_FIELDS.get(k.replace("_", "-"), k): v for k, v in vars(arguments).items()}
    if not arguments.hash_ids and arguments.hash_block_size != _DEFAULTS.hash_block_size:
        raise TraceError("--hash-block-size has no effect with --no-hash-ids")
    names = [field.name for field in dataclasses.fields(ChatSettings)]
    settings = ChatSettings(**{name: given[name] for name in names})
    written = write_new(Path(arguments.out), chat_lines(settings), force=arguments.force)
    if arguments.json:
        report = {"path": arguments.out, **dataclasses.asdict(written)}
        print(json.dumps({**report, "settings": dataclasses.asdict(settings)}, indent=2))
        return
    print(
        f"Wrote {written.rows:,} requests to {arguments.out} "
        f"({written.bytes:,} bytes, sha256 {written.sha256[:16]}...), seed {settings.seed}.\n"
        f"Assumed: answers come at {settings.answer_tokens_per_s:g} tokens/s, which decides when "
        "the next turn of a session arrives."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A file that was written."""

    rows: int
    bytes: int
    sha256: str


def write_new(path: Path, lines: Iterable[str], *, force: bool = False) -> Written:
    """Write a file whole or not at all.

    Raises `TraceError` where it exists (without ``force``), is no regular file, or cannot be
    written; nothing is left behind then.
    """
    path = path.resolve()
    digest, rows, size = hashlib.sha256(), 0, 0
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():
            raise TraceError(f"{path}: is not a file that can be replaced")
        if path.exists() and not force:
            raise TraceError(f"{path}: exists (--force replaces it)")
        try:
            with part.open("xb") as file:
                for line in lines:
                    data = line.encode()
                    digest.update(data)
                    file.write(data)
                    rows, size = rows + 1, size + len(data)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror or error}") from None
    return Written(rows, size, digest.hexdigest())


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


def _law(text: str) -> Lognormal:
    median, colon, p95 = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return Lognormal(median=float(median), p95=float(p95))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not MEDIAN:P95, as in 60:500") from None


if __name__ == "__main__":
    sys.exit(main())
