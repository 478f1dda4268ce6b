"""Files of sessions: which format a file has, and how all of them are read."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from traces.files import naming
from traces.formats import SESSION_FORMATS
from traces.formats.base import BadRow, Head, TraceError, text_lines
from traces.formats.session_base import Document, Gathered, SessionFormat
from traces.sessions import Session, SessionTrace
from traces.skipped import Skipped

_HEAD_LINES = 20
_HEAD_BYTES = 1 << 24


def is_session_trace(path: Path) -> bool:
    """Whether `read_sessions` would know the content. Raises `TraceError` where it cannot be read."""
    with _one_line(path):
        head = _head(path)
        return any(known.match(head) for known in SESSION_FORMATS)


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
        known = SESSION_FORMATS
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
    groups: dict[str, Skipped] = {}
    for row in bad:
        group = groups.setdefault(row.reason, Skipped(row.reason, [], row.detail, counted_as))
        group.lines.append(row.line)
    return list(groups.values())


# -- files ------------------------------------------------------------------------------------


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Every failure to read a path as one line that names it, those of archives too."""
    with naming(path):
        try:
            yield
        except (EOFError, zlib.error, tarfile.TarError) as error:
            raise TraceError(f"cannot be read: {error}") from None


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
