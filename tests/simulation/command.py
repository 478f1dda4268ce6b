"""The command line in this process, as tests call it: arguments in, exit code and text out."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simulator.__main__ import main
from simulator.run import RunResult, run
from simulator.settings import Options, resolve
from traces import read_trace

ROOT = Path(__file__).resolve().parents[2]


class Ran(NamedTuple):
    """A command line that has run."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """What ``--json`` printed; NaN and infinity, which JSON does not have, are an error."""

        def refuse(name: str) -> float:
            raise AssertionError(f"{name} is not JSON")

        document: dict[str, Any] = json.loads(self.out, parse_constant=refuse)
        return document

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = self.document["summary"]
        return summary


def command(*arguments: object, main: Callable[[Sequence[str]], int | None] = main) -> Ran:
    """Run a command line in this process; an exception that it lets out is the test's failure."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
    return Ran(code or 0, out.getvalue(), err.getvalue())


def python(
    *arguments: object, cwd: Path, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A Python of its own with the repository on its path."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        text=True,
        check=False,
        **({"capture_output": True, "timeout": 120} | options),
    )


def write_trace(path: Path, rows: Iterable[Mapping[str, Any] | str]) -> Path:
    """A native trace of these rows; a string is a line as it stands."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def row(arrival_s: float, prompt: int, output: int, **fields: Any) -> dict[str, Any]:
    """A row of the native format."""
    return {
        "arrival_s": arrival_s,
        "prompt_tokens": prompt,
        "output_tokens": output,
        **fields,
    }


def simulated(trace: Path, **options: Any) -> RunResult:
    """A run with these options, its rows and all; times are those of constant steps if not said."""
    options.setdefault("cost_model", "constant:10ms")
    return run(resolve(Options(**options)), read_trace(trace))


def row_of(result: RunResult, request_id: str) -> dict[str, Any]:
    """The row of one request."""
    requests = result.record.requests
    index = requests["id"].index(request_id)
    return {name: column[index] for name, column in requests.items()}


def one_line(text: str) -> str:
    """A report with its line breaks undone, to look for phrases in."""
    return " ".join(text.split())


def headings(report: str) -> list[str]:
    """Titles of a report's sections, behind its own."""
    return [line for line in report.splitlines()[1:] if line and not line.startswith(" ")]


def is_refused(ran: Ran, *words: str) -> None:
    """Assert that it could not run, and said so in one line with these words."""
    assert ran.code == 2, f"exit code {ran.code}: {ran.err}"
    assert ran.out == "", f"something on stdout: {ran.out[:200]!r}"
    assert "Traceback" not in ran.err
    lines = ran.err.splitlines()
    assert len(lines) == 1, f"{len(lines)} lines on stderr: {ran.err!r}"
    for word in words:
        assert word in ran.err, f"{word!r} is not in {ran.err!r}"
