"""Sessions served by the simulator: timelines worked out by hand, hits, nothing lost.

A step costs 10 ms whatever is in it, so a request that is alone takes 10 ms for each output.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockmanager import BlockManager
from blockmanager.content import HashedContent, TokenContent
from records.recorder import Recorder
from scheduler import Request, Scheduler, SchedulerConfig, load_policy
from simulator.cost import ConstantCost
from simulator.replica import simulate
from tests.simulation.helpers import Run
from traces.closed import PoissonTimes, RatePoint, RateRamp
from traces.prefix import ideal_prefix_hits
from traces.session_files import read_sessions
from traces.sessions import Session, SessionWorkload, SystemPrompt, Turn
from traces.workload import Arrival, OpenLoop, Workload

MS = 1_000_000


def serve(
    workload: Workload,
    *,
    num_blocks: int = 10_000,
    block_size: int = 16,
    fast_forward: bool = True,
    **config: Any,
) -> Run:
    blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=True)
    scheduler = Scheduler(SchedulerConfig(**config), blocks, load_policy("fcfs"))
    recorder = Recorder(num_blocks)
    simulate(scheduler, ConstantCost(0.01), recorder, workload, fast_forward=fast_forward)
    scheduler.check()
    assert not scheduler.num_unfinished
    return Run(recorder.requests.columns(), recorder.steps.columns(), recorder.gaps, scheduler)


def turn(name: str, prompt: int, output: int, **fields: Any) -> Turn:
    request = Request(id=name, num_prompt_tokens=prompt)
    return Turn(request=request, output_tokens=output, **fields)


def served(sessions: Sequence[Session], starts_ms: Sequence[int], **options: Any) -> Run:
    return serve(SessionWorkload(sessions, [MS * start for start in starts_ms]), **options)


def times_ms(run: Run) -> dict[str, tuple[float, float]]:
    """Of each request, when it arrived and when it ended."""
    columns = run.requests
    return {
        name: (columns["arrival_ns"][i] / MS, columns["finish_ns"][i] / MS)
        for i, name in enumerate(columns["id"])
    }


CHAT = Session(
    id="chat",
    turns=(
        turn("a", 40, 10, kept_tokens=0),
        turn("b", 60, 5, after=(0,), think_ns=25 * MS, kept_tokens=50),
        turn("c", 80, 5, after=(1,), think_ns=35 * MS, kept_tokens=65),
    ),
)


def test_a_chat_by_hand() -> None:
    """Ten outputs from 0 to 100 ms, think 25, five from 125 to 175, think 35, five to 260."""
    assert times_ms(served([CHAT], [0])) == {"a": (0, 100), "b": (125, 175), "c": (210, 260)}


def test_a_slower_server_is_asked_later() -> None:
    """Beside a batch of others the scheduler lets in one at a time: the chat waits for its turn."""
    other = Session(id="other", turns=(turn("x", 16, 30),))
    run = served([other, CHAT], [0, 0], max_num_seqs=1)
    assert times_ms(run) == {"x": (0, 300), "a": (0, 400), "b": (425, 475), "c": (510, 560)}


def test_turns_hit_the_blocks_of_the_prompt_and_the_answer_before_them() -> None:
    """40 and 10 tokens, the last of them never written, are three full blocks for b; 60 and 5 are four
    for c, the last of them full with the last but one token of b's answer."""
    run = served([CHAT], [0])
    cached = {name: run.row(name)["cached_tokens"] for name in "abc"}
    assert cached == {"a": 0, "b": 48, "c": 64}


def test_recorded_turns_hit_the_answer_that_the_next_prompt_holds() -> None:
    """Ids of 8 tokens. Of a, 32 tokens are written: two blocks for b."""

    def recorded(name: str, ids: list[int], prompt: int, output: int, **fields: Any) -> Turn:
        content = HashedContent(np.array(ids), 8, prompt)
        return Turn(
            request=Request(id=name, num_prompt_tokens=prompt, content=content),
            output_tokens=output,
            **fields,
        )

    session = Session(
        id="s",
        turns=(
            recorded("a", [1, 2, 50], 20, 13),
            recorded("b", [1, 2, 3, 4, 5, 6], 48, 2, after=(0,)),
        ),
    )
    run = served([session], [0])
    assert run.row("b")["cached_tokens"] == 32  # 20 prompt tokens alone would be 16


def test_a_compacted_context_hits_what_was_kept_of_it() -> None:
    session = Session(
        id="s",
        turns=(
            turn("a", 100, 5, kept_tokens=0),
            turn("b", 60, 5, after=(0,), kept_tokens=50),
            turn("c", 60, 5, after=(1,), kept_tokens=0),
        ),
    )
    run = served([session], [0])
    assert [run.row(name)["cached_tokens"] for name in "abc"] == [0, 48, 0]


def test_sessions_hit_the_system_prompt_that_they_share_and_nothing_else() -> None:
    def session(name: str, number: int) -> Session:
        first = turn(name, 50, 2, kept_tokens=40)
        return Session(id=name, turns=(first,), system=SystemPrompt(number, 40))

    run = served([session("a", 0), session("b", 0), session("c", 1)], [0, 100, 200])
    assert [run.row(name)["cached_tokens"] for name in "abc"] == [0, 32, 0]


def test_hits_end_where_the_cache_was_too_small() -> None:
    """While the user thinks, another prompt takes all blocks: nothing is left of the first."""
    other = Session(id="other", turns=(turn("x", 150, 1, kept_tokens=0),))
    options: dict[str, Any] = {"num_blocks": 10, "max_model_len": 160}
    with_other = served([CHAT, other], [0, 105], **options)
    alone = served([CHAT], [0], **options)
    assert (alone.row("b")["cached_tokens"], with_other.row("b")["cached_tokens"]) == (48, 0)


def test_sub_agents_by_hand(tmp_path: Path) -> None:
    """Two agents start 20 ms after the answer, side by side; the parent goes on 30 ms after the
    later of them; the one in the background is not waited for."""
    entries = [
        {"t": 0, "in": 64, "out": 4, "hash_ids": [1], "api_time": 1},
        {
            "t": 3.02,
            "type": "subagent",
            "agent_id": "left",
            "duration_ms": 2000,
            "status": "completed",
            "requests": [{"t": 0, "in": 128, "out": 2, "hash_ids": [7, 8], "api_time": 2}],
        },
        {
            "t": 5.02,
            "type": "subagent",
            "agent_id": "right",
            "duration_ms": 4000,
            "status": "completed",
            "requests": [{"t": 0, "in": 128, "out": 6, "hash_ids": [7, 9], "api_time": 4}],
        },
        {
            "t": 1.02,
            "type": "subagent",
            "agent_id": "back",
            "duration_ms": None,
            "status": "async_launched",
            "requests": [{"t": 0, "in": 64, "out": 40, "hash_ids": [6]}],
        },
        {"t": 5.05, "in": 192, "out": 1, "hash_ids": [1, 2, 3], "think_time": 4.05},
    ]
    path = tmp_path / "session.json"
    path.write_text(json.dumps({"id": "w", "block_size": 64, "requests": entries}, indent=2))
    trace = read_sessions(path)
    run = serve(trace.workload([0]))
    assert times_ms(run) == {
        "w/0": (0, 40),
        "w/1.left.0": (60, 80),
        "w/2.right.0": (60, 120),
        "w/3.back.0": (60, 460),
        "w/4": (150, 160),
    }
    assert run.row("w/4")["cached_tokens"] == 64
    assert trace.num_requests == len(run.requests["id"]) == 5


def test_users_of_sessions_by_hand() -> None:
    sessions = [
        Session(
            id=str(k), turns=(turn(f"{k}", 8, 2), turn(f"{k}+", 8, 1, after=(0,), think_ns=5 * MS))
        )
        for k in range(3)
    ]
    run = serve(SessionWorkload(sessions, users=1))
    assert times_ms(run) == {
        "0": (0, 20),
        "0+": (25, 35),
        "1": (35, 55),
        "1+": (60, 70),
        "2": (70, 90),
        "2+": (95, 105),
    }


def test_a_refused_turn_is_counted_and_the_session_goes_on() -> None:
    session = Session(
        id="s",
        turns=(
            turn("a", 20, 2, kept_tokens=0),
            turn("long", 500, 2, after=(0,), think_ns=10 * MS, kept_tokens=22),
            turn("c", 30, 2, after=(1,), think_ns=10 * MS, kept_tokens=20),
        ),
    )
    run = served([session], [0], num_blocks=10)
    statuses = {name: run.row(name)["status"] for name in ("a", "long", "c")}
    assert len(set(statuses.values())) == 2
    assert statuses["a"] == statuses["c"] != statuses["long"]
    assert times_ms(run)["c"] == (40, 60)
    assert run.row("c")["cached_tokens"] == 16


@settings(deadline=None, max_examples=40)
@given(
    shapes=st.lists(
        st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(0, 90)), max_size=5),
        min_size=1,
        max_size=5,
    ),
    users=st.none() | st.integers(1, 3),
    num_blocks=st.integers(24, 60),
)
def test_every_turn_is_served_once_and_stepping_one_by_one_changes_nothing(
    shapes: list[list[tuple[int, int, int]]], users: int | None, num_blocks: int
) -> None:
    sessions = []
    for number, shape in enumerate(shapes):
        turns: list[Turn] = []
        context = 0
        for index, (new, output, think_ms) in enumerate([(9, 3, 0), *shape]):
            fields = {"after": (index - 1,), "think_ns": think_ms * MS} if index else {}
            turns.append(
                turn(f"{number}/{index}", context + new, output, kept_tokens=context, **fields)
            )
            context += new + output
        sessions.append(Session(id=str(number), turns=tuple(turns)))
    starts = None if users else [30 * MS * k for k in range(len(sessions))]
    runs = [
        serve(
            SessionWorkload(sessions, starts, users=users),
            num_blocks=num_blocks,
            fast_forward=fast_forward,
            max_num_seqs=4,
        )
        for fast_forward in (True, False)
    ]
    fast, slow = (run.requests for run in runs)
    assert {k: list(v) for k, v in fast.items()} == {k: list(v) for k, v in slow.items()}
    outputs = {t.request.id: t.output_tokens for s in sessions for t in s.turns}
    assert sorted(fast["id"]) == sorted(outputs)
    at = times_ms(runs[0])
    done = {name: i for i, name in enumerate(fast["id"]) if fast["output_tokens"][i]}
    for session in sessions:
        for before, item in zip(session.turns, session.turns[1:], strict=False):
            if before.request.id in done:
                ended = at[before.request.id][1] + item.think_ns / MS
                assert at[item.request.id][0] == pytest.approx(ended, abs=1e-6)
    for name, i in done.items():
        assert fast["output_tokens"][i] == outputs[name]


def test_an_infinite_cache_hits_what_is_ideal_when_turns_follow_each_other() -> None:
    """One session after another, so no prompt is computed beside one that it shares with."""
    sessions = [
        Session(
            id=str(k),
            system=SystemPrompt(k % 2, 64),
            turns=(
                turn(f"{k}/0", 100, 40, kept_tokens=64),
                turn(f"{k}/1", 180, 8, after=(0,), kept_tokens=139),
                turn(f"{k}/2", 130, 8, after=(1,), kept_tokens=77),
            ),
        )
        for k in range(4)
    ]
    sent: list[Arrival] = []

    class Watched(SessionWorkload):
        def initial(self) -> Any:
            for arrival in super().initial():
                sent.append(arrival)
                yield arrival

        def on_finish(self, request: Request, output_tokens: int, now_ns: int) -> list[Arrival]:
            following = super().on_finish(request, output_tokens, now_ns)
            sent.extend(following)
            return following

    run = serve(Watched(sessions, users=1))
    ideal = ideal_prefix_hits(sent, 16)
    assert ideal is not None
    # That is of prompts alone; of the answer behind 100 tokens 128 of 139 are hit instead of 96.
    assert sum(run.requests["cached_tokens"]) == ideal.hit_tokens + 4 * 32


def test_a_ramp_is_an_open_load() -> None:
    """The slow server gets the same arrivals as a fast one would."""
    load = [
        Arrival(Request(id=f"r{k}", num_prompt_tokens=16, content=TokenContent.of([k] * 16)), 20)
        for k in range(30)
    ]
    times = PoissonTimes([RatePoint(0, 1.0), RatePoint(2_000 * MS, 50.0)], seed=5)
    slow = serve(RateRamp(load, times), max_num_seqs=1)
    fast = serve(RateRamp(load, times), max_num_seqs=64)
    assert list(slow.requests["arrival_ns"]) == list(fast.requests["arrival_ns"])
    assert slow.requests["finish_ns"][-1] > 2 * fast.requests["finish_ns"][-1]
    again = serve(OpenLoop(list(RateRamp(load, times).initial())), max_num_seqs=1)
    assert list(again.requests["finish_ns"]) == list(slow.requests["finish_ns"])
