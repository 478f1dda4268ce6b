"""Coverage-guided fuzzing of every reader of traces, outside of CI: ``python -m tests.fuzz --minutes 10``.

Needs atheris (``pip install atheris``). Whatever bytes a file holds, reading it ends in requests or in one
line, and every row is used or counted with a reason. A failing input is left as ``crash-*``.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

DOC = Path(__file__).resolve().parent.parent / "docs" / "traces.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    import atheris

    with atheris.instrument_imports(include=["traces"]):
        from traces.formats import SESSION_FORMATS, all_formats

    row_formats = [
        known.name for known in all_formats() if known.name != "baseten"
    ]  # Parquet is C++
    session_formats = [known.name for known in SESSION_FORMATS]
    names = [*row_formats, *session_formats]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        tokenizer = Path(folder) / "tokenizer.json"
        _write_tokenizer(tokenizer)
        check = _checker(path, set(session_formats), tokenizer)

        def one_input(data: bytes) -> None:
            if len(data) > 1:
                check(names[data[0] % len(names)] if data[0] < 128 else None, data[1:])

        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for index, name in enumerate(names):
            for known in (index, 255):
                (corpus / f"{name}-{known}").write_bytes(bytes([known]) + _example(name) + b"\n")
        flags = [f"-max_total_time={round(60 * args.minutes)}", f"-seed={args.seed}"]
        flags += ["-timeout=20", "-rss_limit_mb=4096", "-max_len=4096", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *flags, str(corpus)], one_input)
        atheris.Fuzz()


def _checker(
    path: Path, session_formats: set[str], tokenizer: Path
) -> Callable[[str | None, bytes], None]:
    from traces import TraceError, iter_rows, read_trace
    from traces.formats.base import BadRow
    from traces.session_files import read_sessions
    from traces.tokenizer import TextTokenizer

    words = TextTokenizer(tokenizer)

    def check(name: str | None, content: bytes) -> None:
        path.write_bytes(content)
        counting = words if name in ("sharegpt", "aiperf-turns", "aiperf-mooncake") else None
        try:
            if name in session_formats:
                sessions = read_sessions(path, name)
                assert sessions.num_requests + sessions.num_skipped == sessions.num_rows
                return
            trace = read_trace(path, name, arrivals="all-at-once", tokenizer=counting)
        except TraceError as error:
            if len(str(error).splitlines()) != 1:
                raise AssertionError(f"not one line: {error}") from None
            return
        rows = list(iter_rows(path, name, counting))
        assert trace.num_rows == len(rows) == len(trace.arrivals) + trace.num_skipped
        num_bad = sum(isinstance(row, BadRow) for row in rows)
        twice = sum(s.count for s in trace.skipped if s.reason == "duplicate id")
        assert trace.num_skipped == num_bad + twice

    return check


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))


def _example(name: str) -> bytes:
    """The example of a format in docs/traces.md."""
    (block, *_) = re.findall(r"```text\n(.*?)```", DOC.read_text(), re.DOTALL)
    match = re.search(
        rf"^\[{re.escape(name)}\]\s(.*?)\n(?=\[[\w.-]+\]\s|\Z)", block, re.MULTILINE | re.DOTALL
    )
    assert match, f"no example of {name}"
    return match[1].encode()


if __name__ == "__main__":
    main()
