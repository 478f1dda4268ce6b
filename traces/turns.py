"""Rows of an ordinary trace as turns of sessions, which wait for answers."""

from __future__ import annotations

import math
from dataclasses import replace

from traces.closed import sent_at
from traces.formats.base import TraceError
from traces.sessions import Session, SessionTrace, Turn
from traces.trace import Trace
from traces.workload import Arrival

_NS = 1_000_000_000


def closed_loop(trace: Trace, answer_tokens_per_s: float | None) -> SessionTrace:
    """An ordinary trace's sessions in closed loop.

    Rows of one ``session_id`` become its turns by arrival, rows without one a session each. The rows
    do not say when answers ended, so that takes an assumed answer speed: think time is what is left
    of the time between two rows. ``None``: the rows' times are not used; no session has a start, and
    nobody thinks.

    Raises ``ValueError`` where the speed is not above 0, `TraceError` where no row has a session.
    """
    if answer_tokens_per_s is not None and not 0 < answer_tokens_per_s < math.inf:
        raise ValueError(f"answer speed is {answer_tokens_per_s} tokens/s, expected above 0")
    if all(arrival.request.session_id is None for arrival in trace.arrivals):
        raise TraceError(
            f"trace {trace.path}: no row has a session, so nothing can wait for answers"
        )
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
            if before is not None and answer_tokens_per_s is not None:
                gap_ns = arrival.request.arrival_ns - before.request.arrival_ns
                think_ns = gap_ns - round(before.output_tokens * _NS / answer_tokens_per_s)
                num_early += think_ns < 0
            turns.append(
                Turn(
                    request=sent_at(arrival, 0).request,
                    output_tokens=arrival.output_tokens,
                    after=(len(turns) - 1,) if turns else (),
                    think_ns=max(0, think_ns),
                    # What was sent before the answer was there cannot hold it.
                    holds_answer=trace.keeps_answers and think_ns >= 0,
                )
            )
        start_ns = None if answer_tokens_per_s is None else arrivals[0].request.arrival_ns
        sessions.append(Session(id=name, turns=tuple(turns), start_ns=start_ns))
    notes = [
        *trace.notes,
        "Closed loop without recorded times: the next turn is sent at once when an answer has ended."
        if answer_tokens_per_s is None
        else f"Closed loop: answers are taken to have come at {answer_tokens_per_s:g} tokens/s, which "
        "decides the think times.",
    ]
    if not trace.keeps_answers:
        notes.append(
            f"Later prompts of {trace.format} leave reasoning out, so no answer is taken to be in them."
        )
    if num_early:
        notes.append(
            f"Turns that came before the answer in front of them had ended at that speed, and follow it at "
            f"once now: {num_early:,} of {len(trace.arrivals):,}."
        )
    closed = SessionTrace(
        path=trace.path,
        format=trace.format,
        sha256=trace.sha256,
        num_rows=trace.num_rows,
        sessions=tuple(sessions),
        skipped=trace.skipped,
        notes=notes,
    )
    if not closed.has_identity:  # of none at all the trace's own notes speak
        return closed
    return replace(closed, notes=[*notes, closed.about_identity()])
