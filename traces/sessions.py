"""Closed-loop sessions: the next turn is sent think time after the answers that it waits for.

A session is a list of turns, each of which waits for some that stand before it: a chat waits for the
last answer, an agent also for the sub-agents that it started. A server that slows down is asked
later, as by real users; an open replay of the same times would ask before the answer was there.
Latencies are counted from when a turn was really sent, so nothing is left out of them, but a slow
server also gets less load than an open one would give it (coordinated omission): compare servers at
the same number of sessions, not by their latencies alone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blockmanager.content import Content, HashedContent, TokenContent
from scheduler.request import Request
from traces.arrivals import ArrivalProcess
from traces.closed import sent_at
from traces.formats.base import TraceError
from traces.prefix import DEFAULT_BLOCK_SIZE
from traces.skipped import Skipped
from traces.workload import Arrival

_NS = 1_000_000_000
_ID_SPACE = 1 << 32
"""Token ids that one session, or one system prompt, has for itself."""

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a session, and when it is sent.

    What its prompt shares is either recorded (``request.content``), or told by ``kept_tokens``, or
    unknown where both are ``None``. What its answer is, the next turn says that goes on from it.
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
    holds_answer: bool = True
    """Whether a recorded prompt may hold the answer of the first turn of ``after``, word for word."""


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

    def transcripts(self) -> dict[int, Content]:
        """Identity of prompt and answer of each turn, by position, that a later turn goes on from: the
        recorded prompt of that one begins with this prompt and has room for the answer behind it.

        A turn from which several go on that tell different answers (a sub-agent that copied what was
        said so far) has none.
        """
        found: dict[int, Content] = {}
        doubtful: set[int] = set()
        for turn in self.turns:
            if turn.after and turn.holds_answer:
                source = turn.after[0]
                transcript = _transcript(self.turns[source], turn.request)
                if transcript is not None and _differ(
                    found.setdefault(source, transcript), transcript
                ):
                    doubtful.add(source)
        return {index: content for index, content in found.items() if index not in doubtful}

    def known_answers(self) -> set[int]:
        """Turns, by position, whose answer is in a later prompt, as far as one can tell."""
        kept = {
            turn.after[0]
            for turn in self.turns
            if turn.after
            and turn.kept_tokens
            and turn.kept_tokens > self.turns[turn.after[0]].request.num_prompt_tokens
            and self.turns[turn.after[0]].request.n == 1
        }
        return kept | self.transcripts().keys()


_MOST_UNSEEN = 64
"""Tokens of a prompt that the source may leave unnamed (an id of 64 tokens, rounded down), so that
another prompt is still taken to begin with it."""


def _transcript(turn: Turn, following: Request) -> Content | None:
    """Prompt and answer of a turn as the prompt of a later one tells them, or ``None``."""
    before, after = turn.request.content, following.content
    num_tokens = turn.request.num_prompt_tokens + turn.output_tokens
    if (
        before is None
        or after is None
        or turn.request.n > 1
        or turn.request.extra_keys != following.extra_keys
        or num_tokens > following.num_prompt_tokens
    ):
        return None
    num_known, num_prompt = min(num_tokens, after.num_tokens), turn.request.num_prompt_tokens
    if num_known <= num_prompt or num_prompt - before.num_tokens >= _MOST_UNSEEN:
        return None
    if isinstance(before, TokenContent) and isinstance(after, TokenContent):
        if not np.array_equal(before.token_ids, after.token_ids[: before.num_tokens]):
            return None
        return TokenContent(after.token_ids[:num_known])
    if isinstance(before, HashedContent) and isinstance(after, HashedContent):
        size = before.hash_block_size
        # An id of less than a block is another one once the answer has filled its block. If it stood
        # for whole blocks of an engine, these would have two names.
        whole, part = divmod(before.num_tokens, size)
        if (
            after.hash_block_size != size
            or part >= DEFAULT_BLOCK_SIZE
            or not whole  # nothing shows that the one goes on from the other
            or not np.array_equal(before.hash_ids[:whole], after.hash_ids[:whole])
        ):
            return None
        return HashedContent(after.hash_ids[: -(-num_known // size)], size, num_known)
    return None


def _differ(one: Content, other: Content) -> bool:
    """Whether two transcripts of a turn tell different answers, as far as whole ids go."""
    if isinstance(one, TokenContent) and isinstance(other, TokenContent):
        ids, more = one.token_ids, other.token_ids
    else:
        assert isinstance(one, HashedContent)
        assert isinstance(other, HashedContent)
        ids = one.hash_ids[: one.num_tokens // one.hash_block_size]
        more = other.hash_ids[: other.num_tokens // other.hash_block_size]
    both = min(len(ids), len(more))
    return not np.array_equal(ids[:both], more[:both])


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
        self._transcripts = session.transcripts()
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
        transcript = self._transcripts.get(index)
        if turn.kept_tokens is not None:
            request = replace(request, content=TokenContent(self._prompt(index, turn)))
            if request.n == 1 and index in self._contexts:
                # Also where the next prompt leaves the answer out: a server caches its blocks all the same.
                transcript = TokenContent(self._contexts[index])
        return sent_at(Arrival(request, turn.output_tokens, transcript), time_ns)

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

    def about_identity(self) -> str:
        """What the source tells of equal tokens, a sentence."""
        if not self.has_identity:
            return (
                "Prefix identity unknown: equal lengths are not taken for equal content, and no "
                "prefix hits are modelled."
            )
        known = sum(len(session.known_answers()) for session in self.sessions)
        followed = sum(
            len({turn.after[0] for turn in session.turns if turn.after})
            for session in self.sessions
        )
        return (
            f"Of {followed:,} answers that a turn follows, {known:,} stand in its prompt as far as one can "
            "tell, and their cached blocks are hit there. Where reasoning is left out of later prompts, "
            "that is too many."
        )

    def starting_by(self, arrivals: str) -> SessionTrace:
        """The same with sessions that start by an arrival process. Raises `TraceError`."""
        times = ArrivalProcess.parse(arrivals).times_ns()
        starts = zip(self.sessions, times, strict=False)
        return replace(
            self,
            sessions=tuple(replace(session, start_ns=time_ns) for session, time_ns in starts),
            notes=[*self.notes, f"Sessions start by --arrivals {arrivals}."],
        )

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
