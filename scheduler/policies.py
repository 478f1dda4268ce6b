"""Who goes first, who must go, who may come in.

A policy is any object with these four methods; it sees ``Sequence`` views and changes nothing.
Write your own and name it on the command line as ``--scheduling-policy my_module:MyPolicy``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, Protocol

from scheduler.sequence import Sequence


class PoolState(NamedTuple):
    """What an admission may depend on besides the sequence."""

    num_running: int
    num_free_blocks: int
    num_blocks: int


class Policy(Protocol):
    name: str

    def queue_key(self, sequence: Sequence) -> tuple[Any, ...]:
        """Sort key in the waiting queue, smallest first; asked when the sequence enters the queue."""

    def victim(self, running: Seq[Sequence], requester: Sequence) -> int:
        """Index into ``running`` of the sequence to preempt so that ``requester`` gets a block.

        Naming the requester itself ends the turn of the running ones in this step, as in vLLM.
        """

    def admit(self, sequence: Sequence, state: PoolState) -> bool:
        """Whether the head of the queue may be admitted now, should it fit. False ends the scan."""

    def displace(self, head: Sequence, running: Seq[Sequence]) -> int | None:
        """Index of a running sequence that must make way for the head of the queue when that does
        not fit, or ``None`` to let it wait."""


class FCFS:
    """First come, first served; preempted sequences go back to the head, the last admitted is the
    victim (vLLM's ``fcfs``)."""

    name = "fcfs"
    about = "first come, first served; the last admitted is preempted first"

    def queue_key(self, sequence: Sequence) -> tuple[Any, ...]:
        if sequence.last_preemption is not None:
            return (0, -sequence.last_preemption)
        return (1, sequence.number)

    def victim(self, running: Seq[Sequence], requester: Sequence) -> int:
        return len(running) - 1

    def admit(self, sequence: Sequence, state: PoolState) -> bool:
        return True

    def displace(self, head: Sequence, running: Seq[Sequence]) -> int | None:
        return None


class FewestLost(FCFS):
    """First come, first served, but the victim is the running sequence with the least computed:
    the least work is thrown away."""

    name = "fcfs-fewest-lost"
    about = "first come, first served; the one with the least computed is preempted first"

    def victim(self, running: Seq[Sequence], requester: Sequence) -> int:
        return min(range(len(running)), key=lambda i: (running[i].num_computed_tokens, -i))


class Priority(FCFS):
    """Most urgent first, then first come (vLLM's ``priority``): the victim is the least urgent
    running sequence, the latest arrived of those. Urgent ones wait while every slot is taken."""

    name = "priority"
    about = (
        "most urgent first; urgent requests preempt for blocks but wait while every sequence slot "
        "is taken"
    )

    def queue_key(self, sequence: Sequence) -> tuple[Any, ...]:
        return (sequence.priority, sequence.arrival_ns, sequence.id)

    def victim(self, running: Seq[Sequence], requester: Sequence) -> int:
        def urgency(index: int) -> tuple[int, int, int]:
            # The number settles ties: with the oldest as victim, equals would preempt one another
            # for ever.
            sequence = running[index]
            return (sequence.priority, sequence.arrival_ns, sequence.number)

        return max(range(len(running)), key=urgency)


class PreemptivePriority(Priority):
    """As ``priority``, and a more urgent head of the queue takes the place of the least urgent
    running sequence when a slot or blocks are missing. vLLM does not do this."""

    name = "priority-preemptive"
    about = "most urgent first; urgent requests take the slots and blocks of less urgent ones"

    def displace(self, head: Sequence, running: Seq[Sequence]) -> int | None:
        index = self.victim(running, head)
        return index if running[index].priority > head.priority else None


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (FCFS, FewestLost, Priority, PreemptivePriority)
}


def load_policy(name: str) -> Policy:
    """A policy by its name, or by ``module:Class`` for one of your own.

    Raises ``ValueError`` saying what was looked for and what there is.
    """
    if name in POLICIES:
        return POLICIES[name]()
    known = ", ".join(POLICIES)
    module_name, colon, class_name = name.partition(":")
    if not colon:
        raise ValueError(f"unknown policy {name!r}: expected {known}, or module:Class for your own")
    try:
        policy: Policy = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"policy {name!r} cannot be loaded: {error}") from error
    for method in ("queue_key", "victim", "admit", "displace"):
        if not callable(getattr(policy, method, None)):
            raise ValueError(f"policy {name!r} has no method {method}(): see scheduler/policies.py")
    return policy
