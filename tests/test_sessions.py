"""Sessions: what their readers take from the formats, and what the workload sends when.

Served at once here (an answer ends when it is asked for, or after a recorded time); in
tests/simulation/test_sessions.py a simulated server does it.
"""

from __future__ import annotations

import gzip
import heapq
import io
import itertools
import json
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from blockmanager.content import Content, ExtraKeys, HashedContent, KeyChain, TokenContent
from scheduler.request import Request
from traces import TraceError, read_trace
from traces.closed import FixedConcurrency, PoissonTimes, RatePoint, RateRamp
from traces.prefix import ideal_prefix_hits
from traces.session_files import is_session_trace, read_sessions
from traces.sessions import (
    Session,
    SessionTrace,
    SessionWorkload,
    SystemPrompt,
    Turn,
)
from traces.turns import closed_loop
from traces.workload import Arrival, Workload

NS = 1_000_000_000
MS = 1_000_000


def turn(name: str, prompt: int = 8, output: int = 4, **fields: Any) -> Turn:
    content = fields.pop("content", None)
    request = Request(id=name, num_prompt_tokens=prompt, content=content)
    return Turn(request=request, output_tokens=output, **fields)


def serve(workload: Workload, lasts_ns: Callable[[str], int] = lambda _: 0) -> list[Arrival]:
    """Every arrival in order of time, where each answer ends so long after it was asked for."""
    order = itertools.count()
    ends: list[tuple[int, int, Arrival]] = []
    sent: list[Arrival] = []

    def send(arrival: Arrival) -> None:
        sent.append(arrival)
        end_ns = arrival.request.arrival_ns + lasts_ns(arrival.request.id)
        heapq.heappush(ends, (end_ns, next(order), arrival))

    for arrival in workload.initial():
        send(arrival)
    while ends:
        now_ns, _, done = heapq.heappop(ends)
        for arrival in workload.on_finish(done.request, done.output_tokens, now_ns):
            assert arrival.request.arrival_ns >= now_ns
            send(arrival)
    return sorted(sent, key=lambda arrival: arrival.request.arrival_ns)


def times(arrivals: list[Arrival]) -> dict[str, int]:
    return {arrival.request.id: arrival.request.arrival_ns for arrival in arrivals}


def ids_of(arrival: Arrival) -> list[int]:
    assert isinstance(arrival.request.content, TokenContent)
    ids: list[int] = arrival.request.content.token_ids.tolist()
    return ids


def transcript_of(arrival: Arrival) -> list[int] | None:
    if arrival.transcript is None:
        return None
    assert isinstance(arrival.transcript, TokenContent)
    ids: list[int] = arrival.transcript.token_ids.tolist()
    return ids


# -- the workload -----------------------------------------------------------------------------


def test_a_turn_is_sent_think_time_after_the_last_answer_that_it_waits_for() -> None:
    session = Session(
        id="s",
        turns=(
            turn("ask"),
            turn("agent 1", after=(0,), think_ns=10),
            turn("agent 2", after=(0,), think_ns=20),
            turn("agent 2 again", after=(2,), think_ns=5),
            turn("go on", after=(0, 1, 3), think_ns=7),
        ),
    )
    lasts = {"ask": 100, "agent 1": 1000, "agent 2": 50, "agent 2 again": 50, "go on": 1}
    sent = serve(SessionWorkload([session], [3]), lasts.__getitem__)
    assert times(sent) == {
        "ask": 3,
        "agent 1": 113,
        "agent 2": 123,
        "agent 2 again": 178,
        "go on": 113 + 1000 + 7,
    }


def test_a_prompt_repeats_the_kept_context_and_the_answer_is_in_it() -> None:
    session = Session(
        id="s",
        turns=(
            turn("a", prompt=10, output=3, kept_tokens=0),
            turn("b", prompt=20, output=5, after=(0,), kept_tokens=13),
            turn("compacted", prompt=9, after=(1,), kept_tokens=4),
        ),
    )
    a, b, compacted = map(ids_of, serve(SessionWorkload([session], [0])))
    assert b[:10] == a
    assert compacted[:4] == a[:4]
    assert not set(b[10:]) & set(a)
    assert not set(compacted[4:]) & (set(a) | set(b))
    assert [len(a), len(b), len(compacted)] == [10, 20, 9]
    # What the driver knows of an answer is what the next prompt says that it was.
    first, second, last = serve(SessionWorkload([session], [0]))
    assert transcript_of(first) == b[:13]
    transcript = transcript_of(second)
    assert transcript is not None
    assert transcript[:20] == b
    assert len(transcript) == 25
    assert last.transcript is None  # nobody goes on from it


def hashed(ids: list[int], num_tokens: int) -> HashedContent:
    return HashedContent(np.array(ids), 8, num_tokens)


def test_recorded_prompts_say_what_the_answers_before_them_were() -> None:
    """20 tokens are ids 1, 2 and a part; with an answer of 10 they fill a third and part of a fourth."""
    session = Session(
        id="s",
        turns=(
            turn("a", 20, 10, content=hashed([1, 2, 50], 20)),
            turn("b", 40, 9, content=hashed([1, 2, 3, 4, 5], 40), after=(0,)),
            turn("c", 64, 1, content=hashed([1, 2, 3, 4, 5, 6, 7, 8], 64), after=(1,)),
        ),
    )
    a, b, c = serve(SessionWorkload([session], [0]))
    for arrival, ids, num_tokens in ((a, [1, 2, 3, 4], 30), (b, [1, 2, 3, 4, 5, 6, 7], 49)):
        assert isinstance(arrival.transcript, HashedContent)
        assert arrival.transcript.hash_ids.tolist() == ids
        assert arrival.transcript.num_tokens == num_tokens
    assert c.transcript is None
    assert session.known_answers() == {0, 1}


@pytest.mark.parametrize(
    ("prompt", "content", "fields"),
    [
        (29, hashed([1, 2, 3, 4], 29), {}),  # no room for an answer of 10
        (40, hashed([1, 9, 3, 4, 5], 40), {}),  # another text
        (40, HashedContent(np.array([1, 2, 3]), 16, 40), {}),  # ids of other blocks
        (40, TokenContent.of(range(40)), {}),
        (40, None, {}),
        (40, hashed([1, 2, 3, 4, 5], 40), {"lora": "x"}),
    ],
)
def test_what_does_not_go_on_from_an_answer_says_nothing_of_it(
    prompt: int, content: Content | None, fields: dict[str, str]
) -> None:
    following = Request(
        id="b", num_prompt_tokens=prompt, content=content, extra_keys=ExtraKeys(**fields)
    )
    session = Session(
        id="s",
        turns=(
            turn("a", 20, 10, content=hashed([1, 2, 50], 20)),
            Turn(request=following, output_tokens=1, after=(0,)),
        ),
    )
    first, _ = serve(SessionWorkload([session], [0]))
    assert first.transcript is None


def test_a_transcript_never_gives_a_prompt_another_name() -> None:
    """Two sessions begin with the same 1,000 tokens; what follows fills the last id of 512 in two ways."""
    first = HashedContent(np.array([1, 2]), 512, 1000)
    sessions = [
        Session(
            id=name,
            turns=(
                turn(f"{name}/0", 1000, 100, content=first),
                turn(
                    f"{name}/1",
                    1600,
                    5,
                    content=HashedContent(np.array([1, *ids]), 512, 1600),
                    after=(0,),
                ),
            ),
        )
        for name, ids in (("a", (3, 4, 5)), ("b", (6, 7, 8)))
    ]
    assert [session.transcripts() for session in sessions] == [{}, {}]
    # Of 520 tokens 8 are in the second id: no block of 16.
    short = HashedContent(np.array([1, 2]), 512, 520)
    following = HashedContent(np.array([1, 3, 4, 5]), 512, 1600)
    session = Session(
        id="c",
        turns=(
            turn("a", 520, 100, content=short),
            turn("b", 1600, 5, content=following, after=(0,)),
        ),
    )
    assert session.transcripts().keys() == {0}


def test_what_leaves_much_of_a_prompt_unnamed_tells_no_answer() -> None:
    """As a prefix group of BLIS does, or ids of 512 tokens that are rounded down."""

    def told(content: Content, following: Content) -> bool:
        turns = (
            turn("a", 1000, 10, content=content),
            turn("b", 1200, 5, content=following, after=(0,)),
        )
        return bool(Session(id="s", turns=turns).transcripts())

    assert not told(TokenContent.of(range(40)), TokenContent.of(range(40)))
    assert not told(TokenContent.of(range(40)), TokenContent.of(range(1200)))
    assert told(TokenContent.of(range(1000)), TokenContent.of(range(1200)))
    ids = np.arange(19)
    assert told(HashedContent(ids[:15], 64, 960), HashedContent(ids[:18], 64, 1152))
    assert not told(HashedContent(ids[:1], 512, 512), HashedContent(ids[:2], 512, 1024))


def test_turns_that_tell_different_answers_tell_none() -> None:
    """A sub-agent that begins with a copy of what was said, and the turn that goes on from it."""

    def session(*followers: list[int]) -> Session:
        start = turn("a", 16, 8, content=hashed([1, 2], 16))
        return Session(
            id="s",
            turns=(
                start,
                *(
                    turn(f"b{i}", 32, 1, content=hashed(ids, 32), after=(0,))
                    for i, ids in enumerate(followers)
                ),
            ),
        )

    assert session([1, 2, 3, 4]).transcripts().keys() == {0}
    assert session([1, 2, 3, 4], [1, 2, 3, 9]).transcripts().keys() == {0}
    assert session([1, 2, 3, 4], [8, 9, 3, 4]).transcripts().keys() == {0}
    assert not session([1, 2, 5, 6], [1, 2, 3, 4]).transcripts()
    assert not session([1, 2, 5, 6], [1, 2, 3, 4]).known_answers()
    tokens = [
        turn("a", 2, 1, content=TokenContent.of([7, 8])),
        turn("b", 4, 1, content=TokenContent.of([7, 8, 1, 2]), after=(0,)),
        turn("c", 4, 1, content=TokenContent.of([7, 8, 3, 2]), after=(0,)),
    ]
    assert not Session(id="s", turns=tuple(tokens)).transcripts()


@pytest.mark.parametrize(("speed", "known"), [(1000.0, 1), (40.0, 0), (None, 1)])
def test_who_wrote_before_the_answer_was_there_did_not_quote_it(
    tmp_path: Path, speed: float | None, known: int
) -> None:
    """A quarter of a second lies between the rows: too little for 20 tokens at 40 a second."""
    rows = [
        {
            "session_id": "s",
            "arrival_s": 0.25 * i,
            "prompt_tokens": 16 + 24 * i,
            "output_tokens": 20,
        }
        | {"hash_block_size": 8, "hash_ids": list(range(2 + 3 * i))}
        for i in range(2)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    (session,) = closed_loop(read_trace(path), speed).sessions
    assert len(session.transcripts()) == known
    assert (session.start_ns is None) == (speed is None)


def test_bailian_leaves_reasoning_out_of_later_prompts(tmp_path: Path) -> None:
    rows = [
        {"chat_id": i, "parent_chat_id": i - 1, "timestamp": 60.0 * i, "input_length": 32 + 64 * i}
        | {"output_length": 20, "hash_ids": list(range(2 + 4 * i)), "turn": i + 1, "type": "text"}
        for i in range(2)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    trace = closed_loop(read_trace(path), 100)
    assert trace.format == "bailian"
    (session,) = trace.sessions
    assert len(session.turns) == 2
    assert not session.transcripts()
    assert any("leave reasoning out" in note for note in trace.notes)


def test_a_prompt_of_less_than_an_id_proves_nothing() -> None:
    session = Session(
        id="s",
        turns=(
            turn("a", 6, 4, content=hashed([1], 6)),
            turn("b", 16, 1, content=hashed([2, 3], 16), after=(0,)),
        ),
    )
    assert not session.transcripts()


def test_recorded_tokens_say_what_the_answer_was() -> None:
    session = Session(
        id="s",
        turns=(
            turn("a", 3, 2, content=TokenContent.of([7, 8, 9])),
            turn("b", 6, 1, content=TokenContent.of([7, 8, 9, 1, 2, 3]), after=(0,)),
            turn("c", 8, 1, content=TokenContent.of([7, 8, 0, 1, 2, 3, 4, 5]), after=(1,)),
        ),
    )
    first, second, _ = serve(SessionWorkload([session], [0]))
    assert transcript_of(first) == [7, 8, 9, 1, 2]
    assert second.transcript is None


def test_parallel_sub_agents_branch_off_one_context() -> None:
    session = Session(
        id="s",
        turns=(
            turn("a", prompt=6, output=2, kept_tokens=0),
            turn("left", prompt=12, after=(0,), kept_tokens=8),
            turn("right", prompt=12, after=(0,), kept_tokens=8),
        ),
    )
    a, left, right = map(ids_of, serve(SessionWorkload([session], [0])))
    assert left[:8] == right[:8]
    assert left[:6] == a
    assert not set(left[8:]) & set(right[8:])


def test_sessions_share_system_prompts_of_the_same_number_and_nothing_else() -> None:
    def session(name: str, number: int) -> Session:
        first = turn(f"{name}/0", prompt=10, kept_tokens=6)
        return Session(id=name, turns=(first,), system=SystemPrompt(number, 8))

    one, two, other = map(
        ids_of,
        serve(SessionWorkload([session("x", 0), session("y", 0), session("z", 1)], [0, 1, 2])),
    )
    assert one[:6] == two[:6]
    assert not set(one[6:]) & set(two[6:])
    assert not set(other) & (set(one) | set(two))


def test_users_start_the_next_session_when_the_last_answer_of_theirs_has_ended() -> None:
    sessions = [
        Session(id=f"s{k}", turns=(turn(f"{k}/0"), turn(f"{k}/1", after=(0,), think_ns=10)))
        for k in range(3)
    ]
    lasts = {"0/0": 5, "0/1": 5, "1/0": 100, "1/1": 1, "2/0": 1, "2/1": 1}
    sent = times(serve(SessionWorkload(sessions, users=2), lasts.__getitem__))
    assert sent == {"0/0": 0, "1/0": 0, "0/1": 15, "2/0": 20, "2/1": 31, "1/1": 110}


def test_a_workload_can_be_served_again_with_the_same_outcome() -> None:
    sessions = [
        Session(
            id=f"s{k}",
            turns=(
                turn(f"{k}/0", kept_tokens=0),
                turn(f"{k}/1", prompt=20, after=(0,), think_ns=k, kept_tokens=12),
            ),
        )
        for k in range(4)
    ]
    workload = SessionWorkload(sessions, PoissonTimes([RatePoint(0, 2.0)], seed=1))
    first, second = serve(workload), serve(workload)
    assert times(first) == times(second)
    assert list(map(ids_of, first)) == list(map(ids_of, second))


@st.composite
def some_sessions(draw: st.DrawFn) -> list[Session]:
    sessions = []
    for number in range(draw(st.integers(1, 5))):
        turns: list[Turn] = []
        for index in range(draw(st.integers(1, 7))):
            after = draw(st.lists(st.integers(0, index - 1), unique=True)) if index else []
            prompt = draw(st.integers(1, 30))
            kept = None
            if draw(st.booleans()):
                context = 0
                if after:
                    before = turns[after[0]]
                    context = before.request.num_prompt_tokens + before.output_tokens
                kept = draw(st.integers(0, min(context, prompt)))
            turns.append(
                turn(
                    f"{number}/{index}",
                    prompt=prompt,
                    output=draw(st.integers(1, 9)),
                    after=tuple(after),
                    think_ns=draw(st.integers(0, 50)),
                    kept_tokens=kept if after == [] or kept is None else _known(turns, after, kept),
                )
            )
        sessions.append(Session(id=str(number), turns=tuple(turns)))
    return sessions


def _known(turns: list[Turn], after: list[int], kept: int) -> int | None:
    """A context can be kept only of a turn whose own tokens are known."""
    return kept if turns[after[0]].kept_tokens is not None else None


@given(sessions=some_sessions(), users=st.none() | st.integers(1, 6), lasts=st.integers(0, 60))
def test_every_turn_of_every_session_is_sent_once_and_not_before_what_it_waits_for(
    sessions: list[Session], users: int | None, lasts: int
) -> None:
    starts = None if users is not None else [7 * k for k in range(len(sessions))]
    sent = serve(SessionWorkload(sessions, starts, users=users), lambda _: lasts)
    assert sorted(times(sent)) == sorted(t.request.id for s in sessions for t in s.turns)
    assert len(sent) == sum(len(s.turns) for s in sessions)
    at = times(sent)
    for session in sessions:
        for item in session.turns:
            waited = [at[session.turns[other].request.id] + lasts for other in item.after]
            if waited:
                assert at[item.request.id] == max(waited) + item.think_ns


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ((), "has no turns"),
        ((turn("a", after=(0,)),), r"waits for \(0,\), expected turns before it"),
        ((turn("a", think_ns=-1),), "think_ns is -1"),
        ((turn("a", kept_tokens=1),), "kept_tokens is 1, expected 0 to 0"),
        ((turn("a", kept_tokens=0), turn("b", prompt=99, after=(0,), kept_tokens=13)), "0 to 12"),
        ((turn("a", content=TokenContent.of([1]), kept_tokens=0),), "both recorded content"),
        (
            (turn("a"), turn("b", after=(0,), kept_tokens=3)),
            "keeps of turn a, whose tokens are unknown",
        ),
    ],
)
def test_a_session_refuses_turns_that_contradict_each_other(
    turns: tuple[Turn, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Session(id="s", turns=turns)


def test_a_workload_wants_starts_or_users() -> None:
    sessions = [Session(id="s", turns=(turn("a"),)), Session(id="t", turns=(turn("b"),))]
    with pytest.raises(ValueError, match="either starts of the sessions or a number of users"):
        SessionWorkload(sessions)
    with pytest.raises(ValueError, match="1 starts for 2 sessions"):
        SessionWorkload(sessions, [0])
    with pytest.raises(ValueError, match="users is 0"):
        SessionWorkload(sessions, users=0)


# -- loads by rule ----------------------------------------------------------------------------


def requests(count: int, **fields: Any) -> list[Arrival]:
    return [
        Arrival(Request(id=f"r{k}", arrival_ns=k, num_prompt_tokens=8, **fields), 4)
        for k in range(count)
    ]


def test_a_deadline_moves_with_its_request() -> None:
    load = requests(2, deadline_ns=100)
    fixed = FixedConcurrency(load, 1, gap_ns=10)
    (first,) = fixed.initial()
    (second,) = fixed.on_finish(first.request, 4, 500)
    assert (first.request.arrival_ns, first.request.deadline_ns) == (0, 100)
    assert (second.request.arrival_ns, second.request.deadline_ns) == (500, 599)


def test_a_ramp_has_the_poisson_counts_that_its_rates_mean() -> None:
    """0 to 20/s over 100 s, back to 0 over 100 s, silent for 50 s, then 4/s: means 250, 750, 750,
    250, 0 and 400 for the windows. Counts of a Poisson process have the variance of their mean."""
    points = [RatePoint(t * NS, r) for t, r in ((0, 0), (100, 20), (200, 0), (250, 0))]
    points.append(RatePoint(250 * NS + 1, 4))
    windows = [(0, 50), (50, 100), (100, 150), (150, 200), (200, 250), (250, 350)]
    means = np.array([250, 750, 750, 250, 0, 400])
    counts = []
    for seed in range(40):
        drawn = np.array(
            list(itertools.takewhile(lambda t: t < 350 * NS, PoissonTimes(points, seed)))
        )
        assert (np.diff(drawn) >= 0).all()
        counts.append([((drawn >= a * NS) & (drawn < b * NS)).sum() for a, b in windows])
    table = np.array(counts)
    error = np.sqrt(np.maximum(means, 1e-9) / len(counts))
    assert (np.abs(table.mean(axis=0) - means) <= 4 * error).all()
    dispersion = table[:, [0, 1, 2, 3, 5]].var(axis=0, ddof=1) / means[[0, 1, 2, 3, 5]]
    # 39 degrees of freedom: chi-square / 39 lies within 0.4 and 2 but for one case in 10,000
    assert ((dispersion > 0.4) & (dispersion < 2)).all()


def test_ramps_are_exact_where_the_draw_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0 at rate 2 t: the cumulated rate is t², so a due sum of k arrives at sqrt(k)."""
    monkeypatch.setattr(PoissonTimes, "_draw", staticmethod(lambda rng: 1.0))
    ramp = PoissonTimes([RatePoint(0, 0.0), RatePoint(2 * NS, 4.0)])
    got = list(itertools.islice(ramp, 6))
    assert got == [NS, round(2**0.5 * NS), round(3**0.5 * NS), 2 * NS, 2.25 * NS, 2.5 * NS]


def test_a_ramp_sends_every_request_and_repeats_itself() -> None:
    times_ = PoissonTimes([RatePoint(0, 1.0), RatePoint(10 * NS, 5.0)], seed=3)
    load = RateRamp(requests(50), times_)
    first, second = list(load.initial()), list(load.initial())
    assert [a.request.id for a in first] == [f"r{k}" for k in range(50)]
    assert first == second
    other = PoissonTimes([RatePoint(0, 1.0), RatePoint(10 * NS, 5.0)], seed=4)
    assert list(itertools.islice(times_, 5)) != list(itertools.islice(other, 5))
    assert load.on_finish(first[0].request, 4, 5) == ()


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "no rate"),
        ([RatePoint(0, -1.0)], "rate is -1"),
        ([RatePoint(0, float("nan"))], "rate is nan"),
        ([RatePoint(-1, 1.0)], "must not be negative"),
        ([RatePoint(5, 1.0), RatePoint(5, 2.0)], "do not rise"),
        ([RatePoint(0, 1.0), RatePoint(5, 0.0)], "the last rate is 0"),
    ],
)
def test_rates_that_make_no_load_are_refused(points: list[RatePoint], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoissonTimes(points)


# -- Weka -------------------------------------------------------------------------------------


def call(t: float, prompt: int, ids: list[int], **fields: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": prompt, "out": 5, "hash_ids": ids, **fields}


def weka(name: str, *entries: Any, **fields: Any) -> dict[str, Any]:
    return {
        "id": name,
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": list(entries),
        **fields,
    }


def read(folder: Path, *records: Any, name: str = "trace.jsonl", **options: Any) -> SessionTrace:
    path = folder / name
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return read_sessions(path, **options)


def skipped(trace: SessionTrace) -> dict[str, list[int]]:
    return {group.reason: group.lines for group in trace.skipped}


def timeline(trace: SessionTrace, lasts_s: dict[str, float]) -> dict[str, float]:
    """When each turn is sent, in s, where answers last so long and all sessions start at 0."""
    workload = trace.workload([0] * len(trace.sessions))
    return {k: v / NS for k, v in times(serve(workload, lambda i: round(lasts_s[i] * NS))).items()}


def test_weka_think_time_counts_from_the_end_of_the_answer(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        weka(
            "w",
            call(0.0, 130, [1, 2], api_time=2.5),
            call(9.5, 200, [1, 2, 3], api_time=1, think_time=7.0),
        ),
    )
    assert (trace.format, trace.num_rows, trace.num_skipped) == ("weka", 2, 0)
    assert timeline(trace, {"w/0": 2.5, "w/1": 1}) == {"w/0": 0, "w/1": 9.5}
    assert timeline(trace, {"w/0": 100, "w/1": 1}) == {"w/0": 0, "w/1": 107}


def test_weka_without_the_api_time_before_it_the_recorded_distance_counts(tmp_path: Path) -> None:
    """The think time of the third request counts from the first answer, at 2 s."""
    trace = read(
        tmp_path,
        weka(
            "w",
            call(0, 64, [1], api_time=2),
            call(10, 64, [1], think_time=8),
            call(14, 64, [1], think_time=12, api_time=1),
        ),
    )
    assert timeline(trace, {"w/0": 2, "w/1": 0, "w/2": 1}) == {"w/0": 0, "w/1": 10, "w/2": 14}
    assert any("1 of 3 rows" in note and "without api_time" in note for note in trace.notes)


def sub_agent(t: float, *entries: Any, **fields: Any) -> dict[str, Any]:
    given = {
        "t": t,
        "type": "subagent",
        "agent_id": "agent_001",
        "status": "completed",
        "requests": list(entries),
    }
    return {**given, **fields}


def test_weka_sub_agents_run_side_by_side_and_the_parent_waits_for_them(tmp_path: Path) -> None:
    """The parent's answer ends at 2; two agents start at 3 and are recorded at their ends, 9 and 13;
    one that was only launched starts at 2.5 and ends when it likes; the parent goes on at 15."""
    trace = read(
        tmp_path,
        weka(
            "w",
            call(0, 64, [1], api_time=2),
            sub_agent(9, call(0, 64, [7], api_time=6), duration_ms=6000),
            sub_agent(
                13,
                call(0, 64, [7], api_time=3),
                call(5, 128, [7, 8], api_time=5, think_time=2),
                duration_ms=10_000,
                agent_id="agent_002",
            ),
            sub_agent(
                2.5,
                call(0, 64, [9]),
                status="async_launched",
                duration_ms=None,
                agent_id="agent_003",
            ),
            call(15, 192, [1, 2, 3], think_time=13, api_time=1),
        ),
    )
    one, two, two_again, background = (
        "w/1.agent_001.0",
        "w/2.agent_002.0",
        "w/2.agent_002.1",
        "w/3.agent_003.0",
    )
    lasts = {"w/0": 2.0, one: 6.0, two: 3.0, two_again: 5.0, background: 100.0, "w/4": 1.0}
    sent = {"w/0": 0, background: 2.5, one: 3, two: 3, two_again: 8, "w/4": 15}
    assert timeline(trace, lasts) == sent
    # a slow first agent is waited for, the one in the background is not
    assert timeline(trace, lasts | {one: 20.0})["w/4"] == 3 + 20 + 2


def test_weka_sub_agents_on_the_clock_of_the_session_start_with_their_first_request(
    tmp_path: Path,
) -> None:
    trace = read(
        tmp_path,
        weka(
            "w",
            call(0, 64, [1], api_time=2),
            sub_agent(4, call(4, 64, [7], api_time=1), call(6, 64, [7], api_time=1, think_time=1)),
            call(10, 64, [1], api_time=1),
        ),
    )
    lasts = {"w/0": 2.0, "w/1.agent_001.0": 1.0, "w/1.agent_001.1": 1.0, "w/2": 1.0}
    assert list(timeline(trace, lasts).values()) == [0, 4, 6, 10]


def test_weka_who_was_sent_before_the_answer_does_not_hold_it(tmp_path: Path) -> None:
    """The answer ends at 10. An agent that copied the context starts at 2, another at 11; the parent
    goes on at 20, before an agent that it does not quote has ended at 41."""
    trace = read(
        tmp_path,
        weka(
            "w",
            call(0, 64, [1], api_time=10),
            sub_agent(3, call(0, 192, [1, 2, 3], api_time=1), duration_ms=1000),
            sub_agent(
                12,
                call(0, 192, [1, 2, 3], api_time=1),
                call(0.5, 192, [1, 2, 3]),
                duration_ms=1000,
                agent_id="later",
            ),
            sub_agent(41, call(0, 64, [9], api_time=30), duration_ms=30_000, agent_id="long"),
            call(20, 192, [1, 2, 3], api_time=1),
        ),
    )
    (session,) = trace.sessions
    holds = {turn.request.id: turn.holds_answer for turn in session.turns}
    assert holds == {
        "w/0": True,
        "w/1.agent_001.0": False,
        "w/2.later.0": True,
        "w/2.later.1": False,
        "w/3.long.0": True,
        "w/4": True,
    }


def test_weka_ids_are_unique_by_session_and_shared_inside_it(tmp_path: Path) -> None:
    entries = (call(0, 100, [1]), call(1, 130, [1, 2]))
    trace = read(tmp_path, weka("a", *entries), weka("b", *entries))
    contents = [t.request.content for s in trace.sessions for t in s.turns]
    a, a_again, b, b_again = (
        set(KeyChain(content, 16).keys) for content in contents if content is not None
    )
    assert len(a) == 64 // 16  # 100 tokens have one full id of 64
    assert a < a_again
    assert b < b_again
    assert not a_again & b_again


def test_weka_ids_of_global_scope_are_shared_by_sessions(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        *(weka(name, call(0, 64, [1]), hash_id_scope="global") for name in ("a", "b")),
    )
    hits = ideal_prefix_hits(serve(trace.workload([0, 1])))
    assert hits is not None
    assert (hits.blocks, hits.hit_blocks) == (2, 1)


def test_weka_has_no_starts_so_they_must_be_named(tmp_path: Path) -> None:
    trace = read(tmp_path, weka("a", call(0, 64, [1])), weka("b", call(0, 64, [1])))
    with pytest.raises(TraceError, match="2 of 2 sessions have no start: name an arrival process"):
        trace.workload()
    assert any("has to be named" in note for note in trace.notes)
    starts = PoissonTimes([RatePoint(0, 0.5)], seed=2)
    assert list(times(serve(trace.workload(starts))).values()) == list(itertools.islice(starts, 2))
    assert times(serve(trace.workload(users=1))) == {"a/0": 0, "b/0": 0}


def test_weka_bad_rows_are_counted_and_the_rest_of_the_session_keeps_its_times(
    tmp_path: Path,
) -> None:
    trace = read(
        tmp_path,
        weka(
            "w",
            call(0, 64, [1], api_time=1),
            call(3, 64, [1], api_time=1, think_time=2, out=0),
            call(9, 64, [1, 2, 3], api_time=1, think_time=5),
            "what",
            sub_agent(9, call(0, 64, [1]), call(1, 64, [1]), agent_id=None),
            call(20, 64, [1], api_time=1, think_time=10),
        ),
        "{broken\n",
        weka("w", call(0, 64, [1]), call(1, 64, [1])),
        weka("x", call(0, 64, [1]), hash_id_scope="elsewhere"),
    )
    assert skipped(trace) == {
        "out is zero": [2],
        "hash_ids do not match the prompt length": [3],
        "not a JSON object": [4],
        "agent_id is neither text nor an integer": [5, 6],
        "not JSON": [8],
        "duplicate session id": [9, 10],
        "hash_id_scope is neither local nor global": [11],
    }
    assert trace.num_rows == 11
    assert trace.num_requests + trace.num_skipped == trace.num_rows
    assert timeline(trace, {"w/0": 1, "w/5": 1}) == {"w/0": 0, "w/5": 20}
    assert "requests 5, 6" in str(trace.skipped[3])
    with pytest.raises(TraceError, match="request 2: out is zero"):
        read_sessions(tmp_path / "trace.jsonl", strict=True)


def test_weka_folders_archives_and_many_lined_files_are_the_same_trace(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    records = [weka(f"w{k}", call(0, 64, [1]), call(2, 128, [1, 2])) for k in range(3)]
    for record in records:
        (folder / f"{record['id']}.json").write_text(json.dumps(record, indent=1))
    (folder / "README.txt").write_text("not a session")
    with tarfile.open(tmp_path / "sessions.tar.gz", "w:gz") as archive:
        archive.add(folder, arcname="traces")
    packed = tmp_path / "sessions.jsonl.gz"
    packed.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in records).encode()))
    for path in (folder, tmp_path / "sessions.tar.gz", packed):
        assert is_session_trace(path)
        trace = read_sessions(path)
        assert [s.id for s in trace.sessions] == ["w0", "w1", "w2"]
        assert (trace.num_rows, trace.num_skipped, len(trace.sha256)) == (6, 0, 64)


# -- TraceLab ---------------------------------------------------------------------------------

REPLAY = "session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n"


def test_tracelab_replays_wait_for_the_tool_and_keep_the_prefix(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        REPLAY,
        "7,200,1,40,24,8,0\n",  # rounds in any order
        "7,200,0,0,32,8,1500.5\n",
        "8,0,0,16,16,4,0\n",
        name="replay.csv",
    )
    assert (trace.format, trace.num_rows) == ("tracelab-replay", 3)
    sent = serve(trace.workload(), lambda _: 1000 * MS)
    assert times(sent) == {"8/0": 0, "7/0": 200 * MS, "7/1": 200 * MS + 1000 * MS + 1_500_500_000}
    _, first, second = map(ids_of, sent)
    assert (len(first), len(second)) == (32, 64)
    assert second[:32] == first
    assert any("First rounds with a prefix" in n and "1 of 3" in n for n in trace.notes)


def test_tracelab_replays_without_arrivals_have_no_start(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        "id,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n",
        "a,0,0,32,8,0\n",
        "a,1,99,32,8,0\n",
        "a,1,40,32,8,0\n",
        "a,2,0,x,8,0\n",
        "a,3,0,8\n",
        "a,4,0,0,8,0\n",
        "a,5,0,8,0,0\n",
        name="replay.csv",
    )
    assert skipped(trace) == {
        "duplicate round": [4],
        "input_len is not a finite number": [5],
        "not the header's number of fields": [6],
        "prefix_len and input_len are zero": [7],
        "output_len is zero": [8],
    }
    assert not trace.has_starts
    assert trace.sessions[0].turns[1].kept_tokens == 40  # of 99 that it names
    assert any("longer than the context" in note for note in trace.notes)


def round_(index: int, prefix: int, new: int, *events: tuple[str, str], **fields: Any) -> Any:
    return {
        "session_id": "s",
        "round_index": index,
        "input_tokens_total": prefix + new,
        "prefix_tokens": prefix,
        "newly_append_tokens": new,
        "output_tokens": 16,
        "timing_events": [
            {"event_type": kind, "timestamp": f"2026-01-01T00:00:{second}Z"}
            for kind, second in events
        ],
        **fields,
    }


def test_tracelab_rounds_are_sent_when_their_last_input_was_there(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        round_(0, 0, 64, ("user_message", "10.000"), ("text", "14"), ("tool_call", "15.5")),
        round_(1, 80, 32, ("tool_result", "16"), ("tool_result", "18.25"), ("text", "20")),
        round_(2, 64, 48, ("user_message", "19.5"), ("text", "22")),
        round_(3, 64, 48),
        round_(4, 64, 47, input_tokens_total=5),
        round_(0, 0, 64, ("user_message", "09"), session_id="earlier"),
    )
    assert trace.format == "tracelab"
    assert skipped(trace) == {"prefix_tokens and newly_append_tokens are not the input": [5]}
    sent = times(serve(trace.workload(), lambda _: 3 * NS))
    assert sent == {
        "earlier/0": 0,
        "s/0": 1 * NS,  # a second after the earliest session
        "s/1": 1 * NS + 3 * NS + 2_750 * MS,  # from 15.5 to 18.25
        "s/2": 9_750 * MS,  # its message was there before the answer had ended
        "s/3": 12_750 * MS,  # nothing says when
    }
    notes = " ".join(trace.notes)
    assert "before the last output, sent at once: 1 of 6" in notes
    assert "have no time, sent at once: 1 of 6" in notes
    assert "The earliest session starts at time 0" in notes


# -- LLMServingSim ----------------------------------------------------------------------------

PLAIN = {"input_toks": 3, "output_toks": 2, "arrival_time_ns": 5}
AGENT = {
    "session_id": "task",
    "arrival_time_ns": 70,
    "sub_requests": [
        {"input_toks": 3, "output_toks": 2, "tool_duration_ns": 40, "input_tok_ids": [1, 2, 3]},
        {"input_toks": 6, "output_toks": 2, "tool_duration_ns": 0},
    ],
}


def test_llmservingsim_rows_are_an_ordinary_trace(tmp_path: Path) -> None:
    path = tmp_path / "workload"
    rows = [{**PLAIN, "input_tok_ids": [9, 8, 7]}, PLAIN, AGENT, {**PLAIN, "input_tok_ids": [1]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read_trace(path)
    assert trace.format == "llmservingsim"
    assert [
        (a.request.arrival_ns, a.request.num_prompt_tokens, a.output_tokens) for a in trace
    ] == [
        (5, 3, 2),
        (5, 3, 2),
    ]
    first, second = (arrival.request.content for arrival in trace)
    assert isinstance(first, TokenContent)
    assert first.token_ids.tolist() == [9, 8, 7]
    assert second is None
    assert {s.reason: s.lines for s in trace.skipped} == {
        "an agent session: read the file as sessions": [3],
        "input_tok_ids do not match input_toks": [4],
    }


def test_llmservingsim_sessions_wait_for_their_tools(tmp_path: Path) -> None:
    bad = {"session_id": "bad", "arrival_time_ns": 0, "sub_requests": [{"input_toks": 1}, 7, PLAIN]}
    none = {"session_id": "none", "arrival_time_ns": 0, "sub_requests": []}
    trace = read(tmp_path, AGENT, PLAIN, bad, none)
    assert trace.format == "llmservingsim-sessions"
    assert skipped(trace) == {
        "tool_duration_ns missing": [3],
        "not a JSON object": [3],
        "sub_requests is not a list of calls": [4],
    }
    assert trace.num_rows == trace.num_requests + trace.num_skipped == 7
    sent = times(serve(trace.workload(), lambda _: 1000))
    assert sent == {"bad/2": 0, "trace.jsonl:2/0": 5, "task/0": 70, "task/1": 70 + 1000 + 40}


# -- ordinary traces in closed loop -----------------------------------------------------------


def test_a_trace_with_session_ids_becomes_closed_loop_by_an_assumed_answer_speed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "chat"
    row = {"prompt_tokens": 8, "output_tokens": 10, "hash_block_size": 8}
    rows = [
        {**row, "arrival_s": 1, "session_id": "s", "hash_ids": [1], "deadline_s": 3},
        {**row, "arrival_s": 2, "hash_ids": [1], "lora": "x"},
        {**row, "arrival_s": 9, "session_id": "s", "prompt_tokens": 16, "hash_ids": [1, 2]},
        {**row, "arrival_s": 9.5, "session_id": "s", "hash_ids": [1], "n": 2},
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    trace = closed_loop(read_trace(path), answer_tokens_per_s=5)
    sent = serve(trace.workload(), lambda _: 20 * NS)
    first, alone, second, third = (arrival.request for arrival in sent)
    assert [r.arrival_ns for r in (first, alone, second, third)] == [
        1 * NS,
        2 * NS,
        1 * NS + 20 * NS + 6 * NS,  # 8 s to the next row, of which 2 s are the answer
        47 * NS,  # half a second to the next row, the answer took two
    ]
    assert (first.deadline_ns, alone.extra_keys.lora, third.n) == (4 * NS, "x", 2)
    assert isinstance(second.content, HashedContent)
    assert second.content.hash_ids.tolist() == [1, 2]
    notes = " ".join(trace.notes)
    assert "5 tokens/s" in notes
    assert "follow it at once now: 1 of 4" in notes
    with pytest.raises(ValueError, match="answer speed is 0"):
        closed_loop(read_trace(path), 0)
    path.write_text("".join(json.dumps({**r, "session_id": None}) + "\n" for r in rows))
    with pytest.raises(TraceError, match="no row has a session"):
        closed_loop(read_trace(path), 5)


# -- failures ---------------------------------------------------------------------------------


def test_what_cannot_be_read_is_one_line_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(random.Random(1).randbytes(9999))[:500])
    (tmp_path / "folder").mkdir()
    for name, insisted, message in (
        ("missing", None, "no such file"),
        ("empty", None, "no known format of sessions"),
        ("cut.gz", None, "cannot be read"),
        ("folder", None, "holds no file that ends with .json"),
        ("empty", "weka", "no row can be used: it holds no rows"),
        ("empty", "tracelab-replay", "first line lacks columns"),
        ("empty", "paper", "no session format 'paper'; there are weka, tracelab"),
    ):
        with pytest.raises(TraceError, match=message) as caught:
            read_sessions(tmp_path / name, insisted)
        assert str(caught.value).startswith(f"trace {tmp_path / name}: ")
        assert "\n" not in str(caught.value)


scalars = st.none() | st.booleans() | st.integers(-3, 300) | st.floats(0, 99) | st.text(max_size=3)
values = scalars | st.lists(st.integers(-2, 5), max_size=3) | st.just(2**70) | st.just(1e300)


@st.composite
def weka_like(draw: st.DrawFn, depth: int = 0) -> dict[str, Any]:
    """A sound entry in which something may be anything."""
    blocks = draw(st.integers(1, 3))
    entry: dict[str, Any] = call(draw(st.integers(0, 9)), 64 * blocks, list(range(blocks)))
    if depth < 2 and draw(st.booleans()):
        inner = draw(st.lists(weka_like(depth + 1), max_size=2))
        entry = sub_agent(draw(st.integers(0, 9)), *inner)
    for key in draw(st.lists(st.sampled_from([*entry, "api_time", "duration_ms"]), max_size=2)):
        entry[key] = draw(values)
    return entry


def lines_of(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def replay_like() -> Iterator[st.SearchStrategy[bytes]]:
    field = st.sampled_from(["0", "1", "7", "-1", "x", "", "1e400", "2.5", '"', "9" * 30])
    row = st.lists(field, min_size=6, max_size=8).map(",".join)
    yield st.lists(row, max_size=6).map(lambda rows: (REPLAY + "\n".join(rows)).encode())


@settings(deadline=None)
@given(
    data=st.one_of(
        st.binary(max_size=40),
        st.lists(weka_like(), max_size=4).map(lambda e: lines_of([weka("w", *e), weka("v", *e)])),
        st.builds(
            lambda key, value: lines_of([{**weka("w", call(0, 64, [1])), key: value}]),
            st.sampled_from(["id", "block_size", "requests", "hash_id_scope"]),
            values,
        ),
        st.lists(
            st.builds(
                lambda row, key, value: {**row, key: value},
                st.sampled_from([round_(0, 0, 64, ("user_message", "10")), round_(1, 80, 9)]),
                st.sampled_from(list(round_(0, 0, 1))),
                values,
            ),
            max_size=4,
        ).map(lines_of),
        st.lists(
            st.builds(
                lambda key, value: {**AGENT, "sub_requests": [{**PLAIN, key: value}, PLAIN]},
                st.sampled_from(["input_toks", "output_toks", "tool_duration_ns", "input_tok_ids"]),
                values,
            ),
            max_size=3,
        ).map(lines_of),
        *replay_like(),
    ),
    format=st.sampled_from([None, "weka", "tracelab", "tracelab-replay", "llmservingsim-sessions"]),
)
def test_whatever_a_file_holds_nothing_is_lost_and_nothing_breaks(
    tmp_path_factory: pytest.TempPathFactory,
    data: bytes,
    format: str | None,  # noqa: A002
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(data)
    try:
        trace = read_sessions(path, format)
    except TraceError as error:
        why = str(error)
        event(why.partition(": ")[2][:24])
        if "\n" in why:
            raise
        return
    assert trace.num_requests + trace.num_skipped == trace.num_rows
    sent = serve(trace.workload(users=2), lambda _: NS)
    assert len(times(sent)) == len(sent) == trace.num_requests


# -- real files -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weka_archive(shared: Path) -> Path:
    path = shared / "traces" / "weka_claude_code" / "weka_subset_raw.tar.gz"
    if not path.is_file():
        pytest.skip(f"no {path.name} in {path.parent}")
    return path


@pytest.fixture(scope="module")
def weka_real(weka_archive: Path) -> SessionTrace:
    return read_sessions(weka_archive)


def test_real_weka_sessions_share_96_percent_of_their_blocks_within_each(
    weka_real: SessionTrace,
) -> None:
    """41 of the 739 sessions of github.com/callanjfox/kv-cache-tester; 96.3 % over 710 of them."""
    assert (len(weka_real.sessions), weka_real.num_rows, weka_real.num_skipped) == (41, 2606, 0)
    hits = ideal_prefix_hits(serve(weka_real.workload(users=41)))
    assert hits is not None
    assert (hits.requests, hits.hit_blocks, hits.blocks) == (2606, 5_085_787, 5_274_749)
    assert hits.block_hit_rate == pytest.approx(0.963, abs=0.002)


def test_real_weka_sessions_served_as_recorded_last_as_long_as_recorded(
    weka_archive: Path, weka_real: SessionTrace
) -> None:
    """Times in the files are whole seconds, so each turn may be half a second off on average."""
    lasted: dict[str, int] = {}
    recorded: dict[str, float] = {}
    with tarfile.open(weka_archive) as archive:
        for member in archive.getmembers():
            if not member.name.endswith(".json"):
                continue
            file = archive.extractfile(member)
            assert file is not None
            record = json.load(io.TextIOWrapper(file))
            session = next(s for s in weka_real.sessions if s.id == record["id"])
            flat = [
                inner
                for entry in record["requests"]
                for inner in (entry["requests"] if entry["type"] == "subagent" else [entry])
            ]
            for item, entry in zip(session.turns, flat, strict=True):
                lasted[item.request.id] = round(entry.get("api_time", 0) * NS)
            last = record["requests"][-1]
            recorded[record["id"]] = last["t"] + last.get("api_time", 0)
    sent = serve(weka_real.workload([0] * 41), lasted.__getitem__)
    for session in weka_real.sessions:
        end_s = max(
            (a.request.arrival_ns + lasted[a.request.id]) / NS
            for a in sent
            if a.request.session_id == session.id
        )
        assert end_s == pytest.approx(recorded[session.id], abs=5 + len(session.turns) ** 0.5)


def test_real_tracelab_rounds_and_replays(shared: Path) -> None:
    """github.com/uw-syfi/TraceLab, example_sessions and replay/examples."""
    folder = shared / "traces" / "tracelab"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    sizes = {
        "round_trace.sanitized.example.jsonl": ("tracelab", 2, 19),
        "multi_session_large.csv": ("tracelab-replay", 48, 303),
        "multi_session_example.csv": ("tracelab-replay", 3, 8),
        "session_workload_example.csv": ("tracelab-replay", 1, 11),
    }
    for name, expected in sizes.items():
        trace = read_sessions(folder / name)
        assert (trace.format, len(trace.sessions), trace.num_requests) == expected
        assert trace.num_skipped == 0
    large = read_sessions(folder / "multi_session_large.csv")
    for session in large.sessions:
        for item in session.turns[1:]:  # its prefixes are the whole context before them
            assert item.kept_tokens == session.context_tokens(item)


def test_real_llmservingsim_workloads(shared: Path) -> None:
    """github.com/casys-kaist/LLMServingSim, workloads."""
    folder = shared / "traces" / "llmservingsim"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    mixed = read_trace(folder / "workload_me2_01_mixed.jsonl")
    assert (mixed.format, mixed.num_rows, mixed.num_skipped) == ("llmservingsim", 608, 0)
    assert mixed.span_ns == pytest.approx(60.9 * NS, abs=0.05 * NS)
    packed = folder / "sharegpt-llama-3.1-8b-300-sps10.jsonl.gz"
    chat = read_sessions(packed, "llmservingsim-sessions")
    assert (len(chat.sessions), chat.num_requests, chat.num_skipped) == (300, 300, 0)
    hits = ideal_prefix_hits(serve(chat.workload()), 16)
    assert hits is not None
    assert (hits.unique_blocks, hits.blocks, hits.requests_with_hits) == (14_722, 15_942, 32)
