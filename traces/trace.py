"""A trace file as requests: nothing lost, nothing guessed, everything said.

``read_trace`` holds the whole file, ``stream_trace`` reads it while its requests are used.
"""

from __future__ import annotations

import hashlib
import os
import stat
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scheduler.request import Request
from traces.arrivals import EXAMPLE, ArrivalProcess
from traces.files import TraceFiles, naming
from traces.formats.base import BadRow, NoArrivalsError, Row, TraceError, TraceFormat
from traces.skipped import Skipped, lines_text, rows_text
from traces.tokenizer import TextTokenizer
from traces.workload import Arrival

_NO_ARRIVAL = "no arrival time"
MADE_ARRIVALS = "Arrival times are made"
"""Begins the note on arrivals by a process."""
NO_TIMES = "; the file has none."
"""Ends it, where it takes the place of nothing."""
_EPOCH_NS = 10**17
"""A relative clock that starts later than this (3 years) is taken for a Unix clock."""

Progress = Callable[[int, int], None]
"""Called now and then with the bytes read and the bytes of the file."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a file, by arrival; ties keep the order of the file."""

    path: Path
    format: str
    sha256: str
    """Of the file's bytes as stored; of a folder, of its files' names and digests. Where a tokenizer was
    needed, of that digest and of its own."""
    num_rows: int
    """Rows in the file; ``len(arrivals)`` and the skipped rows add up to it."""
    arrivals: list[Arrival]
    skipped: list[Skipped]
    notes: list[str]
    """What was changed, assumed or ignored, a sentence each."""
    keeps_answers: bool = True
    """Whether later prompts of a session hold its answers as they were given."""

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

    def __init__(
        self,
        path: Path,
        format: str | None,  # noqa: A002
        strict: bool,
        arrivals: str | None = None,
    ) -> None:
        self.path = path
        self.strict = strict
        self.num_rows = self.num_requests = self.span_ns = 0
        self.skipped: list[Skipped] = []
        self.notes: list[str] = []
        self.has_identity = False
        self.sha256 = ""
        self.share_read = 0.0
        """Share of the file that the present iteration has read."""
        self._arrivals = arrivals
        with naming(path):
            self._process = None if arrivals is None else ArrivalProcess.parse(arrivals)
            self._files = TraceFiles(path, format)
        self.format = self._files.format.name

    def __iter__(self) -> Iterator[Arrival]:
        with naming(self.path):
            files = self._files
            checks = _StreamChecks(files, self.strict, self._process)
            notes: _Notes | None = None
            for number, row in enumerate(files.rows(), 1):
                if number % 4096 == 1:
                    self.share_read = files.bytes_read / files.num_bytes
                taken = checks.take(row)
                if taken is None:
                    continue
                if notes is None:
                    notes = _Notes(files, self._process, taken)
                notes.add(taken)
                yield _arrival(taken, notes.start_ns, checks.id_prefix())
            if notes is None:
                raise checks.nothing_left()
            self.sha256 = files.sha256()
        self.share_read = 1.0
        self.num_requests = notes.num_rows
        self.num_rows = notes.num_rows + checks.num_skipped
        self.span_ns = notes.last_ns - notes.first_ns
        self.skipped = list(checks.skipped.values())
        self.notes = notes.sentences(checks)
        self.has_identity = notes.has_identity

    def read(self) -> Trace:
        """The whole of it, sorted."""
        return read_trace(self.path, self.format, self.strict, arrivals=self._arrivals)


def _place(row: Row | BadRow, word: str) -> str:
    """``line 3``, in a folder ``line 3 of part-2.csv``."""
    return f"{word} {row.line}" + (f" of {row.file}" if row.file else "")


def iter_rows(
    path: str | os.PathLike[str],
    format: str | None = None,  # noqa: A002
    tokenizer: TextTokenizer | None = None,
) -> Iterator[Row | BadRow]:
    """Every row in file order, good or bad, one at a time; times on the file's own clock.

    Raises `TraceError` where the file cannot be read at all.
    """
    path = Path(path)
    with naming(path):
        yield from TraceFiles(path, format, tokenizer).rows()


def stream_trace(
    path: str | os.PathLike[str],
    format: str | None = None,  # noqa: A002
    strict: bool = False,
    *,
    arrivals: str | None = None,
    spread: bool = False,
    tokenizer: TextTokenizer | None = None,
) -> Trace | TraceStream:
    """A trace to be read while it is used.

    A pipe, which cannot be read twice, is held as a whole, and so are a trace to be spread (the length
    of a tick shows at its end) and texts (they are tokenised once). Parameters are those of
    ``read_trace``.

    Raises `TraceError` where the file is missing, empty, unreadable or of no known format; the rest
    of what ``read_trace`` refuses shows while the stream is read.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except OSError:
        mode = stat.S_IFREG  # opening it says what is wrong
    is_file = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    if spread or tokenizer is not None or not is_file:
        return read_trace(
            path, format, strict, arrivals=arrivals, spread=spread, tokenizer=tokenizer
        )
    return TraceStream(path, format, strict, arrivals)


def read_trace(
    path: str | os.PathLike[str],
    format: str | None = None,  # noqa: A002
    strict: bool = False,
    *,
    arrivals: str | None = None,
    spread: bool = False,
    tokenizer: TextTokenizer | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Read a whole trace: a file, packed or not, or a folder of shards.

    Rows that cannot be used are counted and named by line, and the rest is kept. Of rows with the
    same id the first is kept. Rows without an id are named ``line-<number>``. Arrivals are sorted.

    Parameters
    ----------
    format : name of the format; recognised by content where ``None``.
    strict : refuse what would otherwise be skipped, sorted or ignored.
    arrivals : a process that gives the arrival times, in the order of the file, instead of the file:
        ``poisson:rate=R,seed=S``, ``constant:rate=R`` (requests per second) or ``all-at-once``.
    spread : lay rows with one time evenly over a tick of the clock, for clocks coarser than the gaps
        between requests.
    tokenizer : counts tokens where the file holds texts.

    Raises
    ------
    TraceError
        The file is missing, empty, unreadable, of no known format, or without one usable row; it has
        no arrival times and ``arrivals`` names none, or texts and there is no ``tokenizer``; under
        ``strict`` also for the first bad row, unsorted arrivals or unknown keys.
    """
    path = Path(path)
    with naming(path):
        process = None if arrivals is None else ArrivalProcess.parse(arrivals)
        if spread and process is not None:
            raise TraceError("--spread has no effect on the times that --arrivals makes")
        files = TraceFiles(path, format, tokenizer)
        digest = files.sha256()
        if tokenizer is not None:  # with another one these are other requests
            digest = hashlib.sha256(f"{digest} {tokenizer.sha256}".encode()).hexdigest()
        checks = _WholeChecks(files, strict, process)
        rows: list[Row] = []
        for number, row in enumerate(files.rows(), 1):
            if (taken := checks.take(row)) is not None:
                rows.append(taken)
            if progress is not None and number % 4096 == 0:
                progress(files.bytes_read, files.num_bytes)
        if not rows:
            raise checks.nothing_left()
        num_rows = len(rows) + checks.num_skipped
        rows.sort(key=_arrival_ns)  # stable: ties keep the order of the file
        about_ticks = []
        if spread:
            rows, words = spread_ticks(rows)
            about_ticks.append(words)
        notes = _Notes(files, process, rows[0])
        for row in rows:
            notes.add(row)
        prefix = checks.id_prefix()
        return Trace(
            path=path,
            format=files.format.name,
            sha256=digest,
            num_rows=num_rows,
            arrivals=[_arrival(row, notes.start_ns, prefix) for row in rows],
            skipped=list(checks.skipped.values()),
            notes=about_ticks + notes.sentences(checks),
            keeps_answers=files.format.keeps_answers,
        )


def spread_ticks(rows: list[Row]) -> tuple[list[Row], str]:
    """Rows with one time laid evenly over one tick of the clock, and what to say of it.

    A tick is the smallest step between two times, so that no row passes the next time. The first row of
    a tick keeps its time. ``rows`` are sorted by arrival.
    """
    times = np.array([_arrival_ns(row) for row in rows], np.int64)
    distinct, counts = np.unique(times, return_counts=True)
    shared = len(rows) - len(distinct)
    if not shared:
        return rows, "Nothing to spread: no two rows have one time."
    if len(distinct) == 1:
        return rows, "Not spread: all rows have one time, so the length of a tick is unknown."
    tick_ns = int(np.diff(distinct).min())
    spread: list[Row] = []
    for time, count in zip(distinct.tolist(), counts.tolist(), strict=True):
        for index in range(count):
            row = rows[len(spread)]
            spread.append(
                row._replace(arrival_ns=time + index * tick_ns // count) if index else row
            )
    return spread, (
        f"Spread: {rows_text(shared)} with the time of another laid evenly over a tick of "
        f"{tick_ns / 1e9:.6g} s, the smallest step between times. When they really came within it "
        "is not known."
    )


def _arrival_ns(row: Row) -> int:
    assert row.arrival_ns is not None  # `take` lets none pass without
    return row.arrival_ns


class _Checks(ABC):
    """Which rows can be used and when they arrive, and what becomes of the others."""

    def __init__(self, files: TraceFiles, strict: bool, process: ArrivalProcess | None) -> None:
        self.strict = strict
        self.word = files.format.counted_as
        self._times = None if process is None else process.times_ns()
        self._latest_ns = 0
        self._num_taken = 0
        self.num_replaced = 0
        """Rows whose own time gave way to the process."""
        self.num_late = 0
        """Rows that stand below later ones."""
        self.skipped: dict[tuple[str, str], Skipped] = {}
        self.unknown: Counter[str] = Counter()
        """Rows that have each unknown key."""

    def take(self, row: Row | BadRow) -> Row | None:
        """The row with its time; ``None`` where it cannot be used, which is counted.

        Raises `TraceError` under ``strict``, and where the first row that could be used says nothing of
        its arrival.
        """
        bad = row if isinstance(row, BadRow) else self._without_time(row) or self.objection(row)
        if bad is not None:
            self._skip(bad)
            return None
        assert isinstance(row, Row)
        self._num_taken += 1
        if self._times is not None:
            self.num_replaced += row.arrival_ns is not None
            row = row._replace(arrival_ns=next(self._times))
        arrival_ns = _arrival_ns(row)
        if arrival_ns < self._latest_ns:
            if self.strict:
                raise TraceError(f"{_place(row, self.word)}: arrives before a row above it")
            self.out_of_order(row)
        else:
            self._latest_ns = arrival_ns
        if row.unknown_keys:
            if self.strict:
                names = ", ".join(sorted(row.unknown_keys))
                raise TraceError(f"{_place(row, self.word)}: unknown keys {names}")
            self.unknown.update(row.unknown_keys)
        return row

    def _without_time(self, row: Row) -> BadRow | None:
        if row.arrival_ns is not None or self._times is not None:
            return None
        if not self._num_taken:
            raise NoArrivalsError(
                f"{_NO_ARRIVAL} at {_place(row, self.word)}: name a process that makes them, as in "
                f"{EXAMPLE}"
            )
        return BadRow(row.line, _NO_ARRIVAL, "", row.file)

    def _skip(self, bad: BadRow) -> None:
        if self.strict:
            detail = f" ({bad.detail})" if bad.detail else ""
            raise TraceError(f"{_place(bad, self.word)}: {bad.reason}{detail}")
        reason = f"{bad.file}: {bad.reason}" if bad.file else bad.reason
        group = self.skipped.get((bad.file, bad.reason))
        if group is None:
            group = Skipped(reason, [], bad.detail, self.word)
            self.skipped[bad.file, bad.reason] = group
        group.lines.append(bad.line)

    @abstractmethod
    def objection(self, row: Row) -> BadRow | None:
        """What rows before this one have against it."""

    @abstractmethod
    def out_of_order(self, row: Row) -> None:
        """A row arrives before one above it."""

    def late_text(self) -> str:
        """Where late rows stand."""
        return ""

    @property
    def num_skipped(self) -> int:
        return sum(skipped.count for skipped in self.skipped.values())

    def nothing_left(self) -> TraceError:
        why = "; ".join(map(str, self.skipped.values())) or "it holds no rows"
        return TraceError(f"no row can be used: {why}")


class _WholeChecks(_Checks):
    def __init__(self, files: TraceFiles, strict: bool, process: ArrivalProcess | None) -> None:
        super().__init__(files, strict, process)
        self._place_of_id: dict[str, tuple[str, int]] = {}
        self._late: dict[str, list[int]] = {}
        """By file, where rows stand below later ones."""

    def objection(self, row: Row) -> BadRow | None:
        if row.id is None:
            return None
        first = self._place_of_id.setdefault(row.id, (row.file, row.line))
        if first == (row.file, row.line):
            return None
        file, line = first
        place = f"{self.word} {line}" + (f" of {file}" if file else "")
        return BadRow(row.line, "duplicate id", f"{row.id!r} is at {place} already", row.file)

    def out_of_order(self, row: Row) -> None:
        self.num_late += 1
        self._late.setdefault(row.file, []).append(row.line)

    def late_text(self) -> str:
        if list(self._late) == [""]:
            return lines_text(self._late[""], word=self.word)
        return ", ".join(f"{file}: {rows_text(len(late))}" for file, late in self._late.items())

    def id_prefix(self) -> str:
        """What no given id begins with, before the number of a row that has none."""
        prefix = f"{self.word}-"
        while any(given.startswith(prefix) for given in self._place_of_id):
            prefix = "~" + prefix
        return prefix


class _StreamChecks(_Checks):
    """The same without remembering rows: what would need them stops the stream."""

    def __init__(self, files: TraceFiles, strict: bool, process: ArrivalProcess | None) -> None:
        super().__init__(files, strict, process)
        self._seen: set[int] = set()
        self._prefix = f"{self.word}-"

    def objection(self, row: Row) -> BadRow | None:
        if row.id is not None:
            # A hash stands for the id; where two are equal, reading the whole file tells why.
            mark = hash(row.id)
            if mark in self._seen:
                raise NotStreamableError("an id comes twice")
            if row.id.startswith(self._prefix):
                raise NotStreamableError(f"an id begins with {self._prefix}")
            self._seen.add(mark)
        return None

    def out_of_order(self, row: Row) -> None:
        raise NotStreamableError("rows are not in order of arrival")

    def id_prefix(self) -> str:
        return self._prefix


class _Notes:
    """What is to be said of the rows used, which come in order of arrival."""

    def __init__(self, files: TraceFiles, process: ArrivalProcess | None, earliest: Row) -> None:
        self.num_rows = 0
        self._files = files
        self._process = process
        self.first_ns = self.last_ns = _arrival_ns(earliest)
        self.start_ns, self._about_clock = self._start(files.format, self.first_ns)
        self._num_unknown = self._num_cut = 0
        self._remarks: Counter[str] = Counter()
        self._distinct_gaps = array("q")

    @property
    def has_identity(self) -> bool:
        return self._num_unknown < self.num_rows

    def add(self, row: Row) -> None:
        self.num_rows += 1
        arrival_ns = _arrival_ns(row)
        if arrival_ns > self.last_ns:
            self._distinct_gaps.append(arrival_ns - self.last_ns)
            self.last_ns = arrival_ns
        self._num_unknown += row.content is None
        self._num_cut += row.max_tokens is not None and row.max_tokens < row.output_tokens
        if row.remarks:
            self._remarks.update(row.remarks)

    def _start(self, reader: TraceFormat, earliest_ns: int) -> tuple[int, str]:
        """The time that becomes 0, and why."""
        if self._process is not None:
            return 0, ""
        if reader.clock == "absolute":
            return earliest_ns, f"The earliest row is time 0: {reader.clock_zero}."
        if earliest_ns > _EPOCH_NS:
            return earliest_ns, (
                f"The clock starts at {earliest_ns / 1e9:.0f} s, so it is taken for a Unix clock: "
                "the earliest row is time 0."
            )
        return 0, ""

    def sentences(self, checks: _Checks) -> list[str]:
        """All there is to say."""
        notes = [self._about_clock] if self._about_clock else []
        if self._files.is_folder:
            notes.append(
                f"{self._files.num_files} files read in the order of their names, as parts of one "
                "trace: one clock, one space of hash ids."
            )
        if self._process is not None:
            notes.append(
                f"{MADE_ARRIVALS}, in the order of the file: {self._process}"
                + (
                    f"; those of {rows_text(checks.num_replaced)} are not used."
                    if checks.num_replaced
                    else NO_TIMES
                )
            )
        if self._files.format.assumes:
            notes.append(self._files.format.assumes)
        notes += [f"{text}: {rows_text(rows)}." for text, rows in sorted(self._remarks.items())]
        if checks.num_late:
            notes.append(
                f"Sorted by arrival: {rows_text(checks.num_late)} below later ones "
                f"({checks.late_text()})."
            )
        distinct = len(self._distinct_gaps) + 1
        shared = self.num_rows - distinct
        if self._process is None and distinct > 2 and shared > self.num_rows // 2:
            tick_s = float(np.median(np.array(self._distinct_gaps, np.int64))) / 1e9
            notes.append(
                f"Arrivals come in ticks of about {tick_s:.3g} s: {shared} of {self.num_rows} rows "
                f"have the time of another ({distinct} distinct). The bursts are the clock's; "
                "--spread lays them over the tick."
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
        if unknown := sorted(checks.unknown.items()):
            names = ", ".join(f"{key} ({rows_text(rows)})" for key, rows in unknown)
            notes.append(f"Unknown keys ignored: {names}.")
        return notes


def _arrival(row: Row, start_ns: int, id_prefix: str) -> Arrival:
    arrival_ns = _arrival_ns(row) - start_ns
    place = f"{row.file}:{row.line}" if row.file else str(row.line)
    request = Request(
        id=f"{id_prefix}{place}" if row.id is None else row.id,
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
