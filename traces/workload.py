"""What a driver serves: arrivals, and what follows an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from blockmanager.content import Content
from scheduler.request import Request


class Arrival(NamedTuple):
    """A request and what only the driver may know of it."""

    request: Request
    output_tokens: int
    """Tokens each of its ``n`` outputs really has."""
    transcript: Content | None = None
    """Identity of the prompt and of the answer behind it, where the source knows both: blocks of the
    answer are found again by whoever goes on from there. ``n`` is 1 then."""


class Workload(Protocol):
    """Open-loop traces and closed-loop users alike; both drivers call it."""

    def initial(self) -> Iterator[Arrival]:
        """Requests whose arrival does not depend on any answer, in arrival order."""

    def on_finish(self, request: Request, output_tokens: int, now_ns: int) -> Iterable[Arrival]:
        """Requests that the end of this one brings about, not earlier than ``now_ns``."""


class OpenLoop:
    """Arrivals that wait for nobody, as a trace recorded them."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._arrivals = arrivals

    def initial(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    def on_finish(self, request: Request, output_tokens: int, now_ns: int) -> Iterable[Arrival]:
        return ()
