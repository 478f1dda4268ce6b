"""From the rows of a run to plain words: how it went, what was short, what would help most."""

from simulator.verdict.judge import Verdict, judge

__all__ = ["Verdict", "judge"]
