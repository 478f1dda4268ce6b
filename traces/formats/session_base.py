"""What a format of sessions is: the files that it reads, and what it finds in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import BinaryIO, ClassVar, Literal, NamedTuple

from traces.formats.base import BadRow, Head, RowError, TraceError
from traces.sessions import Session


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
