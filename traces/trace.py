"""A trace file as requests: nothing lost, nothing guessed, everything said."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from scheduler.request import Request
from traces.formats import by_name, detect, known_formats
from traces.formats.base import BadRow, Head, Row, TraceError, TraceFormat, text_lines
from traces.workload import Arrival

_HEAD_LINES = 20
_HEAD_BYTES = 1 << 24
_EPOCH_NS = 10**17
"""A relative clock that starts later than this (3 years) is taken for a Unix clock."""

Progress = Callable[[int, int], None]
"""Called now and then with the bytes read and the bytes of the file."""


@dataclass(slots=True)
class Skipped:
    """Rows left out for one reason."""

    reason: str
    lines: list[int]
    example: str
    """Detail of the first of them."""

    @property
    def count(self) -> int:
        return len(self.lines)

    def __str__(self) -> str:
        detail = f" ({self.example})" if self.example else ""
        return f"{self.reason}{detail}: {rows_text(self.count)}, {lines_text(self.lines)}"


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a file, by arrival; ties keep the order of the file."""

    path: Path
    format: str
    sha256: str
    """Of the file's bytes."""
    num_rows: int
    """Rows in the file; ``len(arrivals)`` and the skipped rows add up to it."""
    arrivals: list[Arrival]
    skipped: list[Skipped]
    notes: list[str]
    """What was changed, assumed or ignored, a sentence each."""

    @property
    def num_skipped(self) -> int:
        return sum(skipped.count for skipped in self.skipped)

    @property
    def has_identity(self) -> bool:
        """Whether any prompt says which tokens it shares; if none does, hits are unknown."""
        return any(arrival.request.content is not None for arrival in self.arrivals)


def rows_text(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def lines_text(lines: list[int], most: int = 5) -> str:
    """``line 3`` or ``lines 3, 5, 8, ...``."""
    text = ", ".join(map(str, lines[:most])) + (", ..." if len(lines) > most else "")
    return f"line{'s' if len(lines) > 1 else ''} {text}"


class _Opened(NamedTuple):
    source: BinaryIO
    format: TraceFormat
    num_bytes: int


@contextmanager
def _opened(path: Path, insisted_name: str | None) -> Iterator[_Opened]:
    """The file at its first byte, and its format. Every failure becomes one line of words."""
    insisted = None if insisted_name is None else by_name(insisted_name)
    try:
        with path.open("rb") as file:
            source: BinaryIO = file
            status = os.fstat(file.fileno())
            num_bytes = status.st_size
            if not stat.S_ISREG(status.st_mode):  # a pipe: read once, then as often as needed
                source = io.BytesIO(file.read())
                num_bytes = len(source.getbuffer())
            head = source.read(64)
            source.seek(0)
            if not head:
                raise TraceError("is empty")
            found = insisted or _detect(source, head)
            source.seek(0)
            yield _Opened(source, found, num_bytes)
    except FileNotFoundError:
        raise TraceError(f"trace {path}: no such file") from None
    except IsADirectoryError:
        raise TraceError(f"trace {path}: is a folder, not a file") from None
    except OSError as error:
        raise TraceError(f"trace {path}: cannot be read: {error.strerror or error}") from None
    except TraceError as error:
        raise TraceError(f"trace {path}: {error}") from None


def _detect(source: BinaryIO, first_bytes: bytes) -> TraceFormat:
    lines: list[bytes] = []
    size = 0
    for _, line in text_lines(source):
        lines.append(line)
        size += len(line)
        if len(lines) == _HEAD_LINES or size > _HEAD_BYTES:
            break
    found = detect(Head(lines))
    if found is None:
        packed = " (gzip: unpack it first)" if first_bytes.startswith(b"\x1f\x8b") else ""
        raise TraceError(
            f"no known format{packed}: it starts with {first_bytes[:48]!r}; "
            f"known are {known_formats()}; choose with --format"
        )
    return found


def iter_rows(
    path: str | os.PathLike[str],
    format: str | None = None,  # noqa: A002
) -> Iterator[Row | BadRow]:
    """Every row in file order, good or bad, one at a time; times on the file's own clock.

    Raises `TraceError` where the file cannot be read at all.
    """
    with _opened(Path(path), format) as opened:
        yield from opened.format.rows(opened.source)


def read_trace(
    path: str | os.PathLike[str],
    format: str | None = None,  # noqa: A002
    strict: bool = False,
    *,
    progress: Progress | None = None,
) -> Trace:
    """Read a whole trace.

    Rows that cannot be used are counted and named by line, and the rest is kept. Of rows with the
    same id the first is kept. Rows without an id are named ``line-<number>``. Arrivals are sorted.

    Parameters
    ----------
    format : name of the format; recognised by content where ``None``.
    strict : refuse what would otherwise be skipped, sorted or ignored.

    Raises
    ------
    TraceError
        The file is missing, empty, unreadable, of no known format, or without one usable row;
        under ``strict`` also for the first bad row, unsorted arrivals or unknown keys.
    """
    path = Path(path)
    with _opened(path, format) as opened:
        digest = hashlib.file_digest(opened.source, "sha256").hexdigest()  # type: ignore[arg-type]
        opened.source.seek(0)
        collected = _Collected(strict)
        for number, row in enumerate(opened.format.rows(opened.source), 1):
            collected.add(row)
            if progress is not None and number % 4096 == 0:
                progress(opened.source.tell(), opened.num_bytes)
        arrivals = collected.arrivals(opened.format)
        return Trace(
            path=path,
            format=opened.format.name,
            sha256=digest,
            num_rows=len(collected.rows) + sum(s.count for s in collected.skipped.values()),
            arrivals=arrivals,
            skipped=list(collected.skipped.values()),
            notes=collected.notes,
        )


class _Collected:
    """Rows on their way to arrivals."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.rows: list[Row] = []
        self.skipped: dict[str, Skipped] = {}
        self.notes: list[str] = []
        self._line_of_id: dict[str, int] = {}
        self._unknown: Counter[str] = Counter()

    def add(self, row: Row | BadRow) -> None:
        if isinstance(row, Row) and row.id is not None:
            first = self._line_of_id.setdefault(row.id, row.line)
            if first != row.line:
                row = BadRow(row.line, "duplicate id", f"{row.id!r} is at line {first} already")
        if isinstance(row, Row):
            if row.unknown_keys:
                if self.strict:
                    names = ", ".join(sorted(row.unknown_keys))
                    raise TraceError(f"line {row.line}: unknown keys {names}")
                self._unknown.update(row.unknown_keys)
            self.rows.append(row)
            return
        if self.strict:
            detail = f" ({row.detail})" if row.detail else ""
            raise TraceError(f"line {row.line}: {row.reason}{detail}")
        group = self.skipped.setdefault(row.reason, Skipped(row.reason, [], row.detail))
        group.lines.append(row.line)

    def arrivals(self, reader: TraceFormat) -> list[Arrival]:
        """Sorted, on the trace's clock; fills ``notes``."""
        if not self.rows:
            why = "; ".join(map(str, self.skipped.values())) or "it holds no rows"
            raise TraceError(f"no row can be used: {why}")
        times = np.array([row.arrival_ns for row in self.rows], dtype=np.int64)
        start_ns = self._start(reader, int(times.min()))
        self._note_order(times)
        order = np.argsort(times, kind="stable").tolist()
        prefix = self._id_prefix()
        arrivals = [_arrival(self.rows[index], start_ns, prefix) for index in order]
        self._note_ticks(times)
        self._note_content()
        return arrivals

    def _start(self, reader: TraceFormat, earliest_ns: int) -> int:
        if reader.clock == "absolute":
            self.notes.append("The earliest row is time 0: the file has dates.")
            return earliest_ns
        if earliest_ns > _EPOCH_NS:
            self.notes.append(
                f"The clock starts at {earliest_ns / 1e9:.0f} s, so it is taken for a Unix clock: "
                "the earliest row is time 0."
            )
            return earliest_ns
        return 0

    def _note_order(self, times: np.typing.NDArray[np.int64]) -> None:
        late = np.flatnonzero(times < np.maximum.accumulate(times))
        if not len(late):
            return
        lines = [self.rows[index].line for index in late.tolist()]
        if self.strict:
            raise TraceError(f"line {lines[0]}: arrives before a row above it")
        self.notes.append(
            f"Sorted by arrival: {rows_text(len(lines))} below later ones ({lines_text(lines)})."
        )

    def _id_prefix(self) -> str:
        prefix = "line-"
        while any(given.startswith(prefix) for given in self._line_of_id):
            prefix = "~" + prefix
        return prefix

    def _note_ticks(self, times: np.typing.NDArray[np.int64]) -> None:
        distinct = np.unique(times)
        shared = len(times) - len(distinct)
        if len(distinct) > 2 and shared > len(times) // 2:
            tick_s = float(np.median(np.diff(distinct))) / 1e9
            self.notes.append(
                f"Arrivals come in ticks of about {tick_s:.3g} s: {shared} of {len(times)} rows "
                f"have the time of another ({len(distinct)} distinct). The bursts are the clock's."
            )

    def _note_content(self) -> None:
        unknown = sum(row.content is None for row in self.rows)
        if unknown == len(self.rows):
            self.notes.append(
                "Prefix identity unknown: equal lengths are not taken for equal content, "
                "and no prefix hits are modelled."
            )
        elif unknown:
            self.notes.append(
                f"Prefix identity unknown for {unknown} of {len(self.rows)} rows: they never hit."
            )
        cut = sum(
            row.max_tokens is not None and row.max_tokens < row.output_tokens for row in self.rows
        )
        if cut:
            self.notes.append(f"{rows_text(cut)} with more output_tokens than max_tokens allows.")
        if self._unknown:
            names = ", ".join(
                f"{key} ({rows_text(rows)})" for key, rows in sorted(self._unknown.items())
            )
            self.notes.append(f"Unknown keys ignored: {names}.")


def _arrival(row: Row, start_ns: int, id_prefix: str) -> Arrival:
    arrival_ns = row.arrival_ns - start_ns
    request = Request(
        id=f"{id_prefix}{row.line}" if row.id is None else row.id,
        arrival_ns=arrival_ns,
        num_prompt_tokens=row.prompt_tokens,
        content=row.content,
        max_tokens=row.max_tokens,
        n=row.n,
        priority=row.priority,
        deadline_ns=None if row.deadline_ns is None else arrival_ns + row.deadline_ns,
        session_id=row.session_id,
        extra_keys=row.extra_keys,
    )
    return Arrival(request, row.output_tokens)
