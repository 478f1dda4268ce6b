"""A trace file as requests: nothing lost, nothing guessed, everything said.

``read_trace`` holds the whole file, ``stream_trace`` reads it while its requests are used.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeGuard

import numpy as np

from scheduler.request import Request
from traces.formats import by_name, detect, known_formats
from traces.formats.base import BadRow, Head, Row, TraceError, TraceFormat, text_lines
from traces.workload import Arrival

_ID_PREFIX = "line-"
"""Before the line number, the id of a row that has none."""
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

    @property
    def num_requests(self) -> int:
        return len(self.arrivals)

    @property
    def span_ns(self) -> int:
        """From the first arrival to the last."""
        return self.arrivals[-1].request.arrival_ns - self.arrivals[0].request.arrival_ns

    def __iter__(self) -> Iterator[Arrival]:
        return iter(self.arrivals)


class NotStreamableError(Exception):
    """What only shows while a trace is streamed, and needs all of its rows at once."""


class TraceStream:
    """A trace that is read while its requests are used, so that memory does not grow with it.

    Iterating reads the file from its start and yields its arrivals; it can be done again. The other
    attributes are those of ``Trace``, complete when an iteration has come to its end. Only ids that
    rows give are remembered (some 60 bytes each, to find those that come twice), and 8 bytes for
    each different arrival time.

    Raises, while iterating, `TraceError` as ``read_trace`` does, and `NotStreamableError` where rows
    are not in order of arrival, an id comes twice, or ids look like those that rows without one get.
    """

    def __init__(self, path: Path, format: str | None, strict: bool) -> None:  # noqa: A002
        self.path = path
        self.strict = strict
        self.num_rows = self.num_requests = self.span_ns = 0
        self.skipped: list[Skipped] = []
        self.notes: list[str] = []
        self.has_identity = False
        self.sha256 = ""
        self.share_read = 0.0
        """Share of the file that the present iteration has read."""
        with _opened(path, format) as opened:
            self.format = opened.format.name
            self._file = opened.file

    def __iter__(self) -> Iterator[Arrival]:
        with _opened(self.path, self.format) as opened:
            if opened.file != self._file:
                raise TraceError("has been changed since it was first looked at")
            checks = _StreamChecks(self.strict)
            notes: _Notes | None = None
            for number, row in enumerate(opened.format.rows(opened.source), 1):
                if number % 4096 == 1:
                    self.share_read = opened.source.tell() / max(opened.num_bytes, 1)
                if not checks.passes(row):
                    continue
                if notes is None:
                    notes = _Notes(opened.format, row.arrival_ns)
                notes.add(row)
                yield _arrival(row, notes.start_ns, _ID_PREFIX)
            if notes is None:
                raise checks.nothing_left()
            if _file_state(opened.source) != self._file:
                raise TraceError("was changed while it was read")
            opened.source.seek(0)
            self.sha256 = _sha256(opened.source)
        self.share_read = 1.0
        self.num_requests = notes.num_rows
        self.num_rows = notes.num_rows + checks.num_skipped
        self.span_ns = notes.last_ns - notes.first_ns
        self.skipped = list(checks.skipped.values())
        self.notes = notes.sentences([], checks.unknown)
        self.has_identity = notes.has_identity

    def read(self) -> Trace:
        """The whole of it, sorted."""
        return read_trace(self.path, self.format, self.strict)


def rows_text(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def lines_text(lines: list[int], most: int = 5) -> str:
    """``line 3`` or ``lines 3, 5, 8, ...``."""
    text = ", ".join(map(str, lines[:most])) + (", ..." if len(lines) > most else "")
    return f"line{'s' if len(lines) > 1 else ''} {text}"


class _FileState(NamedTuple):
    """What differs once a file has been replaced, written to or cut."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int


def _file_state(file: BinaryIO) -> _FileState:
    status = os.fstat(file.fileno())
    return _FileState(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class _Opened(NamedTuple):
    source: BinaryIO
    format: TraceFormat
    num_bytes: int
    file: _FileState


@contextmanager
def _opened(path: Path, insisted_name: str | None) -> Iterator[_Opened]:
    """The file at its first byte, and its format. Every failure becomes one line of words."""
    insisted = None if insisted_name is None else by_name(insisted_name)
    try:
        with path.open("rb") as file:
            source: BinaryIO = file
            state = _file_state(file)
            num_bytes = state.num_bytes
            if not stat.S_ISREG(
                os.fstat(file.fileno()).st_mode
            ):  # a pipe: read once, then as often as needed
                source = io.BytesIO(file.read())
                num_bytes = len(source.getbuffer())
            head = source.read(64)
            source.seek(0)
            if not head:
                raise TraceError("is empty")
            found = insisted or _detect(source, head)
            source.seek(0)
            yield _Opened(source, found, num_bytes, state)
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


def stream_trace(
    path: str | os.PathLike[str],
    format: str | None = None,  # noqa: A002
    strict: bool = False,
) -> Trace | TraceStream:
    """A trace to be read while it is used; a pipe, which cannot be read twice, is held as a whole.

    Raises `TraceError` where the file is missing, empty, unreadable or of no known format; the rest
    of what ``read_trace`` refuses shows while the stream is read.
    """
    path = Path(path)
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except OSError:
        is_file = True  # opening it says what is wrong
    return TraceStream(path, format, strict) if is_file else read_trace(path, format, strict)


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
        digest = _sha256(opened.source)
        opened.source.seek(0)
        checks = _WholeChecks(strict)
        rows: list[Row] = []
        for number, row in enumerate(opened.format.rows(opened.source), 1):
            if checks.passes(row):
                rows.append(row)
            if progress is not None and number % 4096 == 0:
                progress(opened.source.tell(), opened.num_bytes)
        if not rows:
            raise checks.nothing_left()
        num_rows = len(rows) + checks.num_skipped
        rows.sort(key=lambda row: row.arrival_ns)  # stable: ties keep the order of the file
        notes = _Notes(opened.format, rows[0].arrival_ns)
        for row in rows:
            notes.add(row)
        prefix = checks.id_prefix()
        return Trace(
            path=path,
            format=opened.format.name,
            sha256=digest,
            num_rows=num_rows,
            arrivals=[_arrival(row, notes.start_ns, prefix) for row in rows],
            skipped=list(checks.skipped.values()),
            notes=notes.sentences(checks.late, checks.unknown),
        )


def _sha256(source: BinaryIO) -> str:
    return hashlib.file_digest(source, "sha256").hexdigest()  # type: ignore[arg-type]


class _Checks(ABC):
    """Which rows can be used, and what becomes of the others."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self._latest_ns = 0
        self.skipped: dict[str, Skipped] = {}
        self.unknown: Counter[str] = Counter()
        """Rows that have each unknown key."""

    def passes(self, row: Row | BadRow) -> TypeGuard[Row]:
        """Whether a row can be used; counts it if not. Raises `TraceError` under ``strict``."""
        bad = row if isinstance(row, BadRow) else self.objection(row)
        if bad is not None:
            if self.strict:
                detail = f" ({bad.detail})" if bad.detail else ""
                raise TraceError(f"line {bad.line}: {bad.reason}{detail}")
            group = self.skipped.setdefault(bad.reason, Skipped(bad.reason, [], bad.detail))
            group.lines.append(bad.line)
            return False
        assert isinstance(row, Row)
        if row.arrival_ns < self._latest_ns:
            if self.strict:
                raise TraceError(f"line {row.line}: arrives before a row above it")
            self.out_of_order(row.line)
        self._latest_ns = max(self._latest_ns, row.arrival_ns)
        if row.unknown_keys:
            if self.strict:
                names = ", ".join(sorted(row.unknown_keys))
                raise TraceError(f"line {row.line}: unknown keys {names}")
            self.unknown.update(row.unknown_keys)
        return True

    @abstractmethod
    def objection(self, row: Row) -> BadRow | None:
        """What rows before this one have against it."""

    @abstractmethod
    def out_of_order(self, line: int) -> None:
        """A row arrives before one above it."""

    @property
    def num_skipped(self) -> int:
        return sum(skipped.count for skipped in self.skipped.values())

    def nothing_left(self) -> TraceError:
        why = "; ".join(map(str, self.skipped.values())) or "it holds no rows"
        return TraceError(f"no row can be used: {why}")


class _WholeChecks(_Checks):
    def __init__(self, strict: bool) -> None:
        super().__init__(strict)
        self._line_of_id: dict[str, int] = {}
        self.late: list[int] = []
        """Lines of the rows that stand below later ones."""

    def objection(self, row: Row) -> BadRow | None:
        if row.id is None:
            return None
        first = self._line_of_id.setdefault(row.id, row.line)
        if first == row.line:
            return None
        return BadRow(row.line, "duplicate id", f"{row.id!r} is at line {first} already")

    def out_of_order(self, line: int) -> None:
        self.late.append(line)

    def id_prefix(self) -> str:
        """What no given id begins with."""
        prefix = _ID_PREFIX
        while any(given.startswith(prefix) for given in self._line_of_id):
            prefix = "~" + prefix
        return prefix


class _StreamChecks(_Checks):
    """The same without remembering rows: what would need them stops the stream."""

    def __init__(self, strict: bool) -> None:
        super().__init__(strict)
        self._seen: set[int] = set()

    def objection(self, row: Row) -> BadRow | None:
        if row.id is not None:
            # A hash stands for the id; where two are equal, reading the whole file tells why.
            mark = hash(row.id)
            if mark in self._seen:
                raise NotStreamableError("an id comes twice")
            if row.id.startswith(_ID_PREFIX):
                raise NotStreamableError(f"an id begins with {_ID_PREFIX}")
            self._seen.add(mark)
        return None

    def out_of_order(self, line: int) -> None:
        raise NotStreamableError("rows are not in order of arrival")


class _Notes:
    """What is to be said of the rows used, which come in order of arrival."""

    def __init__(self, reader: TraceFormat, earliest_ns: int) -> None:
        self.num_rows = 0
        self.first_ns = self.last_ns = earliest_ns
        self.start_ns, self._about_clock = self._start(reader, earliest_ns)
        self._num_unknown = self._num_cut = 0
        self._distinct_gaps = array("q")

    @property
    def has_identity(self) -> bool:
        return self._num_unknown < self.num_rows

    def add(self, row: Row) -> None:
        self.num_rows += 1
        if row.arrival_ns > self.last_ns:
            self._distinct_gaps.append(row.arrival_ns - self.last_ns)
            self.last_ns = row.arrival_ns
        self._num_unknown += row.content is None
        self._num_cut += row.max_tokens is not None and row.max_tokens < row.output_tokens

    @staticmethod
    def _start(reader: TraceFormat, earliest_ns: int) -> tuple[int, str]:
        """The time that becomes 0, and why."""
        if reader.clock == "absolute":
            return earliest_ns, "The earliest row is time 0: the file has dates."
        if earliest_ns > _EPOCH_NS:
            return earliest_ns, (
                f"The clock starts at {earliest_ns / 1e9:.0f} s, so it is taken for a Unix clock: "
                "the earliest row is time 0."
            )
        return 0, ""

    def sentences(self, late: list[int], unknown: Counter[str]) -> list[str]:
        """All there is to say; ``late`` are lines of rows that had to be sorted in."""
        notes = [self._about_clock] if self._about_clock else []
        if late:
            notes.append(
                f"Sorted by arrival: {rows_text(len(late))} below later ones ({lines_text(late)})."
            )
        distinct = len(self._distinct_gaps) + 1
        shared = self.num_rows - distinct
        if distinct > 2 and shared > self.num_rows // 2:
            tick_s = float(np.median(np.array(self._distinct_gaps, np.int64))) / 1e9
            notes.append(
                f"Arrivals come in ticks of about {tick_s:.3g} s: {shared} of {self.num_rows} rows "
                f"have the time of another ({distinct} distinct). The bursts are the clock's."
            )
        if not self.has_identity:
            notes.append(
                "Prefix identity unknown: equal lengths are not taken for equal content, "
                "and no prefix hits are modelled."
            )
        elif self._num_unknown:
            notes.append(
                f"Prefix identity unknown for {self._num_unknown} of {self.num_rows} rows: "
                "they never hit."
            )
        if self._num_cut:
            notes.append(
                f"{rows_text(self._num_cut)} with more output_tokens than max_tokens allows."
            )
        if unknown:
            names = ", ".join(f"{key} ({rows_text(rows)})" for key, rows in sorted(unknown.items()))
            notes.append(f"Unknown keys ignored: {names}.")
        return notes


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
