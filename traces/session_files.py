"""Files of sessions: the formats' protocol, which of them a file is, and how all of them are read."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, ClassVar, Literal, NamedTuple

from traces.formats.base import BadRow, Head, RowError, TraceError, text_lines
from traces.sessions import Session, SessionTrace

if TYPE_CHECKING:
    from traces.trace import Skipped

_HEAD_LINES = 20
_HEAD_BYTES = 1 << 24


class Document(NamedTuple):
    """A file of a trace, unpacked."""

    name: str
    source: BinaryIO


class Gathered:
    """What a reader has found so far."""

    def __init__(self, strict: bool, counted_as: str = "line") -> None:
        self._strict = strict
        self._counted_as = counted_as
        self.num_rows = 0
        self.sessions: dict[str, Session] = {}
        self._request_ids: set[str] = set()
        self.bad: list[BadRow] = []
        self.noted: Counter[str] = Counter()
        """Sentences, and how often each holds."""

    def skip(self, line: int, error: RowError, where: str = "") -> None:
        """A row that cannot be used. Raises `TraceError` under ``strict``."""
        detail = ": ".join(filter(None, (where, error.detail)))
        if self._strict:
            raise TraceError(
                f"{self._counted_as} {line}: {error.reason}" + (f" ({detail})" if detail else "")
            )
        self.bad.append(BadRow(line, error.reason, detail))

    def add(self, session: Session, lines: Sequence[int], where: str = "") -> None:
        """A session, and the lines of its turns; of two with the same id the first is kept."""
        ids = {turn.request.id for turn in session.turns}
        if session.id in self.sessions or len(ids) < len(lines) or ids & self._request_ids:
            for line in lines:
                self.skip(line, RowError("duplicate session id", repr(session.id)), where)
            return
        self.sessions[session.id] = session
        self._request_ids |= ids


class SessionFormat(ABC):
    """A format whose rows form sessions. A reader keeps no state between calls."""

    name: ClassVar[str]
    """What ``--format`` calls it."""
    recognised_by: ClassVar[str]
    """The content it looks for, in words."""
    units: ClassVar[str]
    clock: ClassVar[Literal["relative", "absolute", "none"]]
    """What starts of sessions count from: the trace's start, a date (the earliest becomes 0), or
    nothing (they have to be given)."""
    prefix_identity: ClassVar[str]
    """What the format tells about equal prefixes, in words."""
    licence: ClassVar[str]
    """Under what terms public data of this format comes, in words."""
    counted_as: ClassVar[str] = "line"
    """What the line of a skipped row counts, from 1."""

    @abstractmethod
    def match(self, head: Head) -> int:
        """How many names of the format the head shows; 0 where it is another format."""

    @abstractmethod
    def read(self, documents: Iterator[Document], found: Gathered) -> None:
        """Add every session, and count and skip every row, good or bad.

        Raises `TraceError` (without the file's name) where no row at all can be read.
        """


def session_formats() -> tuple[SessionFormat, ...]:
    """The formats known here."""
    # Imported here: the readers are made of what stands above.
    from traces.formats.llmservingsim import LLMServingSimSessions
    from traces.formats.tracelab import TraceLab, TraceLabReplay
    from traces.formats.weka import Weka

    return (Weka(), TraceLab(), TraceLabReplay(), LLMServingSimSessions())


def is_session_trace(path: Path) -> bool:
    """Whether `read_sessions` would know the content. Raises `TraceError` where it cannot be read."""
    with _one_line(path):
        head = _head(path)
        return any(known.match(head) for known in session_formats())


def read_sessions(
    path: Path,
    format: str | None = None,  # noqa: A002
    strict: bool = False,
) -> SessionTrace:
    """Read the sessions of a file, of an archive or of a folder of files.

    Rows that cannot be used are counted and named, and the rest of their session is kept.

    Parameters
    ----------
    path : a file, plain or gzip; a tar archive or a folder of ``.json``, ``.jsonl`` or ``.csv``.
    format : name of the format; recognised by content where ``None``.
    strict : refuse what would otherwise be skipped.

    Raises
    ------
    TraceError
        It is missing, unreadable, of no known format, or without one usable row; under ``strict``
        also for the first bad row.
    """
    with _one_line(path):
        known = session_formats()
        if format is None:
            head = _head(path)
            score, reader = max(((k.match(head), k) for k in known), key=lambda pair: pair[0])
            if not score:
                listed = "; ".join(f"{k.name} ({k.recognised_by})" for k in known)
                raise TraceError(f"no known format of sessions; known are {listed}")
        else:
            by_name = {k.name: k for k in known}
            if format not in by_name:
                raise TraceError(f"no session format {format!r}; there are {', '.join(by_name)}")
            reader = by_name[format]
        found = Gathered(strict, reader.counted_as)
        reader.read(_documents(path), found)
        skipped = _by_reason(found.bad, reader.counted_as)
        if not found.sessions:
            why = "; ".join(map(str, skipped)) or "it holds no rows"
            raise TraceError(f"no row can be used: {why}")
        trace = SessionTrace(
            path=path,
            format=reader.name,
            sha256=_sha256(path),
            num_rows=found.num_rows,
            sessions=_from_zero(found, reader),
            skipped=skipped,
            notes=[],
        )
        assert trace.num_requests + trace.num_skipped == trace.num_rows, (
            f"{trace.num_requests} turns and {trace.num_skipped} skipped rows of {trace.num_rows}"
        )
        return replace(trace, notes=_sentences(trace, found, reader))


def _from_zero(found: Gathered, reader: SessionFormat) -> tuple[Session, ...]:
    sessions = tuple(found.sessions.values())
    starts = [session.start_ns for session in sessions if session.start_ns is not None]
    if reader.clock != "absolute" or not starts:
        return sessions
    zero_ns = min(starts)
    found.noted["The earliest session starts at time 0: the file has dates."] += 1
    return tuple(
        session
        if session.start_ns is None
        else replace(session, start_ns=session.start_ns - zero_ns)
        for session in sessions
    )


def _sentences(trace: SessionTrace, found: Gathered, reader: SessionFormat) -> list[str]:
    notes = [
        "Closed loop: a turn is sent think time after the answer before it, so a slower server is "
        "asked later."
    ]
    if not trace.has_starts:
        notes.append(
            "The starts of sessions are not recorded: an arrival process of sessions or a number of "
            "users has to be named."
        )
    notes += [
        text if text.endswith(".") else f"{text}: {count} of {trace.num_rows} rows."
        for text, count in found.noted.items()
    ]
    return [*notes, trace.about_identity()]


def _by_reason(bad: Iterable[BadRow], counted_as: str) -> list[Skipped]:
    from traces.trace import Skipped  # which imports the formats, one of which imports this

    groups: dict[str, Skipped] = {}
    for row in bad:
        group = groups.setdefault(row.reason, Skipped(row.reason, [], row.detail, counted_as))
        group.lines.append(row.line)
    return list(groups.values())


# -- files ------------------------------------------------------------------------------------


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Every failure to read a path as one line that names it."""
    try:
        yield
    except FileNotFoundError:
        raise TraceError(f"trace {path}: no such file") from None
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        why = getattr(error, "strerror", None) or error
        raise TraceError(f"trace {path}: cannot be read: {why}") from None
    except TraceError as error:
        raise TraceError(f"trace {path}: {error}") from None


_SUFFIXES = (".json", ".jsonl", ".csv", ".json.gz", ".jsonl.gz", ".csv.gz")


def _documents(path: Path) -> Iterator[Document]:
    """The files of a path, by name."""
    if path.is_dir():
        for part in _parts(path):
            yield from _documents(part)
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            members = [m for m in archive.getmembers() if m.isfile() and m.name.endswith(_SUFFIXES)]
            if not members:
                raise TraceError(f"holds no file that ends with {', '.join(_SUFFIXES)}")
            for member in sorted(members, key=lambda m: m.name):
                source = archive.extractfile(member)
                assert source is not None
                with source:
                    yield Document(member.name, _unpacked(source))  # type: ignore[arg-type]
    else:
        with path.open("rb") as source:
            yield Document(path.name, _unpacked(source))


def _parts(folder: Path) -> list[Path]:
    parts = sorted(p for p in folder.iterdir() if p.is_file() and p.name.endswith(_SUFFIXES))
    if not parts:
        raise TraceError(f"holds no file that ends with {', '.join(_SUFFIXES)}")
    return parts


def _unpacked(source: BinaryIO) -> BinaryIO:
    is_packed = source.read(2) == b"\x1f\x8b"
    source.seek(0)
    return gzip.GzipFile(fileobj=source) if is_packed else source  # type: ignore[return-value]


def _head(path: Path) -> Head:
    """The first lines of the first file; of a document of many lines, the whole."""
    for document in _documents(path):
        lines: list[bytes] = []
        size = 0
        for _, line in text_lines(document.source):
            lines.append(line)
            size += len(line)
            if size > _HEAD_BYTES or (len(lines) == _HEAD_LINES and lines[0].strip() != b"{"):
                break
        return Head([b"\n".join(lines)] if lines and lines[0].strip() == b"{" else lines)
    return Head([])


def _sha256(path: Path) -> str:
    if path.is_dir():
        whole = hashlib.sha256()
        for part in _parts(path):
            whole.update(f"{part.name}\0{_sha256(part)}\n".encode())
        return whole.hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
