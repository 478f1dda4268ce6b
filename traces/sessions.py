"""Closed-loop sessions: the next turn is sent think time after the answers that it waits for.

A session is a list of turns, each of which waits for some that stand before it: a chat waits for the
last answer, an agent also for the sub-agents that it started. A server that slows down is asked
later, as by real users; an open replay of the same times would ask before the answer was there.
Latencies are counted from when a turn was really sent, so nothing is left out of them, but a slow
server also gets less load than an open one would give it (coordinated omission): compare servers at
the same number of sessions, not by their latencies alone.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import tarfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from blockmanager.content import TokenContent
from scheduler.request import Request
from traces.closed import sent_at
from traces.formats.base import BadRow, Head, RowError, TraceError, text_lines
from traces.workload import Arrival

if TYPE_CHECKING:
    from traces.trace import Skipped, Trace

_NS = 1_000_000_000
_ID_SPACE = 1 << 32
"""Token ids that one session, or one system prompt, has for itself."""
_HEAD_LINES = 20
_HEAD_BYTES = 1 << 24

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a session, and when it is sent.

    What its prompt shares is either recorded (``request.content``), or told by ``kept_tokens``, or
    unknown where both are ``None``.
    """

    request: Request
    """As if sent at 0: ``arrival_ns`` is not used, a deadline counts from there."""
    output_tokens: int
    after: tuple[int, ...] = ()
    """Turns of the session, by position, whose answers must have ended; none: the session's start."""
    think_ns: int = 0
    """From the last of them to when this one is sent."""
    kept_tokens: int | None = None
    """Leading tokens of the context that the prompt begins with; the rest of it is new. The context
    is the prompt and the answer of the first turn of ``after``, or the session's system prompt."""


class SystemPrompt(NamedTuple):
    """Leading tokens that all sessions with the same number share."""

    number: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Turns that belong together. Raises ``ValueError`` where they contradict each other."""

    id: str
    turns: tuple[Turn, ...]
    start_ns: int | None = None
    """``None`` where the source does not say."""
    system: SystemPrompt | None = None

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError(f"session {self.id}: has no turns")
        for index, turn in enumerate(self.turns):
            name = turn.request.id
            if any(not 0 <= other < index for other in turn.after):
                raise ValueError(f"turn {name}: waits for {turn.after}, expected turns before it")
            if turn.think_ns < 0 or turn.output_tokens < 1:
                raise ValueError(
                    f"turn {name}: think_ns is {turn.think_ns} and output_tokens "
                    f"{turn.output_tokens}, expected at least 0 and 1"
                )
            if turn.kept_tokens is None:
                continue
            if turn.request.content is not None:
                raise ValueError(f"turn {name}: has both recorded content and kept_tokens")
            if turn.after and (before := self.turns[turn.after[0]]).kept_tokens is None:
                raise ValueError(
                    f"turn {name}: keeps of turn {before.request.id}, whose tokens are unknown"
                )
            most = min(self.context_tokens(turn), turn.request.num_prompt_tokens)
            if not 0 <= turn.kept_tokens <= most:
                raise ValueError(
                    f"turn {name}: kept_tokens is {turn.kept_tokens}, expected 0 to {most}"
                )

    def context_tokens(self, turn: Turn) -> int:
        """Tokens of the context that a turn can keep."""
        if not turn.after:
            return self.system.tokens if self.system else 0
        before = self.turns[turn.after[0]]
        return before.request.num_prompt_tokens + before.output_tokens


class _Running:
    """A session that is under way."""

    def __init__(self, session: Session, number: int) -> None:
        self.session = session
        self.num_left = len(session.turns)
        self._unanswered = [len(set(turn.after)) for turn in session.turns]
        self._followers: list[list[int]] = [[] for _ in session.turns]
        self._uses: Counter[int] = Counter()
        for index, turn in enumerate(session.turns):
            for other in set(turn.after):
                self._followers[other].append(index)
            if turn.kept_tokens is not None and turn.after:
                self._uses[turn.after[0]] += 1
        self._contexts: dict[int, Tokens] = {}
        """Prompt and answer of the turns whose context is still to be kept."""
        self._next_id = (number + 1) * _ID_SPACE
        self._end_id = self._next_id + _ID_SPACE

    def first(self) -> list[int]:
        """Turns that wait for nothing but the session's start."""
        return [index for index, turn in enumerate(self.session.turns) if not turn.after]

    def answered(self, index: int) -> list[int]:
        """Turns that waited for this answer last."""
        self.num_left -= 1
        for follower in self._followers[index]:
            self._unanswered[follower] -= 1
        return [i for i in self._followers[index] if self._unanswered[i] == 0]

    def send(self, index: int, time_ns: int) -> Arrival:
        turn = self.session.turns[index]
        request = turn.request
        if turn.kept_tokens is not None:
            request = replace(request, content=TokenContent(self._prompt(index, turn)))
        return sent_at(Arrival(request, turn.output_tokens), time_ns)

    def _prompt(self, index: int, turn: Turn) -> Tokens:
        """Token ids of a prompt, so that two prompts are equal exactly as far as the source says."""
        assert turn.kept_tokens is not None
        if turn.after:
            source = turn.after[0]
            context = self._contexts[source]
            self._uses[source] -= 1
            if not self._uses[source]:
                del self._contexts[source]
        elif (system := self.session.system) is not None:
            first = -(system.number + 1) * _ID_SPACE
            context = np.arange(first, first + system.tokens, dtype=np.int64)
        else:
            context = np.zeros(0, np.int64)
        new = self._fresh(turn.request.num_prompt_tokens - turn.kept_tokens)
        prompt = np.concatenate([context[: turn.kept_tokens], new])
        self._keep(index, prompt)
        return prompt

    def _keep(self, index: int, prompt: Tokens) -> None:
        if self._uses[index]:
            answer = self._fresh(self.session.turns[index].output_tokens)
            self._contexts[index] = np.concatenate([prompt, answer])

    def _fresh(self, count: int) -> Tokens:
        ids = np.arange(self._next_id, self._next_id + count, dtype=np.int64)
        self._next_id += count
        assert self._next_id <= self._end_id, "a session of more than 2**32 tokens"
        return ids


class _Place(NamedTuple):
    session: int
    turn: int


class SessionWorkload:
    """Sessions as a `Workload`: each turn of each session is sent exactly once.

    A turn that the server refuses or gives up counts as answered, with nothing: the session goes on
    with the turns that the source has, and the record shows what became of each.

    Parameters
    ----------
    sessions
        Request ids must differ between all of their turns.
    starts_ns
        When each session starts, in the order of ``sessions``.
    users
        Instead of ``starts_ns``: so many sessions are under way from time 0 on, and when the last
        answer of one has ended, the next one starts.

    Raises
    ------
    ValueError
        Both or neither of ``starts_ns`` and ``users``, too few starts, no users.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        starts_ns: Iterable[int] | None = None,
        *,
        users: int | None = None,
    ) -> None:
        if (starts_ns is None) == (users is None):
            raise ValueError("expected either starts of the sessions or a number of users")
        if users is not None and users < 1:
            raise ValueError(f"users is {users}, expected at least 1")
        self._sessions = sessions
        num_first = len(sessions) if users is None else min(users, len(sessions))
        starts = itertools.repeat(0) if starts_ns is None else starts_ns
        self._starts = list(itertools.islice(starts, num_first))
        if len(self._starts) < num_first:
            raise ValueError(f"{len(self._starts)} starts for {num_first} sessions")
        self._next_session = num_first
        self._running: dict[int, _Running] = {}
        self._under_way: dict[str, _Place] = {}

    def initial(self) -> Iterator[Arrival]:
        self._running, self._under_way = {}, {}
        self._next_session = len(self._starts)
        first = [
            (start_ns + turn.think_ns, number, index)
            for number, start_ns in enumerate(self._starts)
            for index, turn in enumerate(self._sessions[number].turns)
            if not turn.after
        ]
        for time_ns, number, index in sorted(first):
            if number not in self._running:
                self._running[number] = _Running(self._sessions[number], number)
            yield self._send(_Place(number, index), time_ns)

    def on_finish(self, request: Request, output_tokens: int, now_ns: int) -> list[Arrival]:
        place = self._under_way.pop(request.id)
        running = self._running[place.session]
        following = [_Place(place.session, index) for index in running.answered(place.turn)]
        if not running.num_left:
            del self._running[place.session]
            following += self._next_of_a_user()
        return [self._send(place, now_ns + self._turn(place).think_ns) for place in following]

    def _next_of_a_user(self) -> list[_Place]:
        number = self._next_session
        if number == len(self._sessions):
            return []
        self._next_session += 1
        running = self._running[number] = _Running(self._sessions[number], number)
        return [_Place(number, index) for index in running.first()]

    def _turn(self, place: _Place) -> Turn:
        return self._sessions[place.session].turns[place.turn]

    def _send(self, place: _Place, time_ns: int) -> Arrival:
        arrival = self._running[place.session].send(place.turn, time_ns)
        assert arrival.request.id not in self._under_way, f"two turns {arrival.request.id!r}"
        self._under_way[arrival.request.id] = place
        return arrival


@dataclass(frozen=True, slots=True)
class SessionTrace:
    """The sessions of a file or folder."""

    path: Path
    format: str
    sha256: str
    """Of the file's bytes; of a folder, of its files' names and digests."""
    num_rows: int
    """Requests in the source; the turns and the skipped rows add up to it."""
    sessions: tuple[Session, ...]
    skipped: list[Skipped]
    """Of lines, or of requests in the order of reading where a line holds a whole session."""
    notes: list[str]
    """What was changed, assumed or ignored, a sentence each."""

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def span_ns(self) -> int:
        """From the first start of a session to the last; 0 where they are not known. Later turns come
        when their answers do."""
        starts = [s.start_ns for s in self.sessions if s.start_ns is not None]
        return max(starts) - min(starts) if starts else 0

    def __iter__(self) -> Iterator[Arrival]:
        """Every turn, as if sent at its session's start."""
        for session in self.sessions:
            for turn in session.turns:
                yield sent_at(Arrival(turn.request, turn.output_tokens), session.start_ns or 0)

    @property
    def num_skipped(self) -> int:
        return sum(skipped.count for skipped in self.skipped)

    @property
    def has_identity(self) -> bool:
        """Whether any prompt says which tokens it shares; if none does, hits are unknown."""
        return any(
            turn.kept_tokens is not None or turn.request.content is not None
            for session in self.sessions
            for turn in session.turns
        )

    @property
    def has_starts(self) -> bool:
        return all(session.start_ns is not None for session in self.sessions)

    def workload(
        self, starts_ns: Iterable[int] | None = None, *, users: int | None = None
    ) -> SessionWorkload:
        """The sessions at their recorded starts, at given ones (`PoissonTimes`), or by so many users.

        Raises `TraceError` where the starts are neither recorded nor given.
        """
        if starts_ns is None and users is None:
            recorded = [session.start_ns for session in self.sessions]
            known = [start_ns for start_ns in recorded if start_ns is not None]
            if len(known) < len(recorded):
                raise TraceError(
                    f"trace {self.path}: {len(recorded) - len(known)} of {len(recorded)} sessions have "
                    "no start: name an arrival process of sessions or a number of users"
                )
            starts_ns = known
        return SessionWorkload(self.sessions, starts_ns, users=users)


def closed_loop(trace: Trace, answer_tokens_per_s: float) -> SessionTrace:
    """An ordinary trace's sessions in closed loop.

    Rows of one ``session_id`` become its turns by arrival, rows without one a session each. The rows
    do not say when answers ended, so that takes an assumed answer speed: think time is what is left
    of the time between two rows.

    Raises ``ValueError`` where the speed is not above 0.
    """
    if not answer_tokens_per_s > 0:
        raise ValueError(f"answer speed is {answer_tokens_per_s} tokens/s, expected above 0")
    groups: dict[tuple[bool, str], list[Arrival]] = {}
    for arrival in trace.arrivals:
        request = arrival.request
        session_id = request.session_id
        key = (False, request.id) if session_id is None else (True, session_id)
        groups.setdefault(key, []).append(arrival)
    sessions, num_early = [], 0
    for (_, name), arrivals in groups.items():
        turns: list[Turn] = []
        for before, arrival in zip([None, *arrivals], arrivals, strict=False):
            think_ns = 0
            if before is not None:
                gap_ns = arrival.request.arrival_ns - before.request.arrival_ns
                think_ns = gap_ns - round(before.output_tokens * _NS / answer_tokens_per_s)
                num_early += think_ns < 0
            turns.append(
                Turn(
                    request=sent_at(arrival, 0).request,
                    output_tokens=arrival.output_tokens,
                    after=(len(turns) - 1,) if turns else (),
                    think_ns=max(0, think_ns),
                )
            )
        start_ns = arrivals[0].request.arrival_ns
        sessions.append(Session(id=name, turns=tuple(turns), start_ns=start_ns))
    notes = [
        *trace.notes,
        f"Closed loop: answers are taken to have come at {answer_tokens_per_s:g} tokens/s, which "
        "decides the think times.",
    ]
    if num_early:
        notes.append(
            f"Turns that were sent before that answer's end, and follow at once now: {num_early} of "
            f"{len(trace.arrivals)}."
        )
    return SessionTrace(
        path=trace.path,
        format=trace.format,
        sha256=trace.sha256,
        num_rows=trace.num_rows,
        sessions=tuple(sessions),
        skipped=trace.skipped,
        notes=notes,
    )


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
    if not trace.has_identity:
        notes.append(
            "Prefix identity unknown: equal lengths are not taken for equal content, and no prefix "
            "hits are modelled."
        )
    return notes


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
