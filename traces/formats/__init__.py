"""The formats known here, and which of them a file is, by its content.

To add one: a module with a small `TraceFormat`, and a line in `FORMATS`.
"""

from __future__ import annotations

from traces.formats.azure import Azure
from traces.formats.base import Head, TraceError, TraceFormat
from traces.formats.mooncake import Mooncake
from traces.formats.native import Native

FORMATS: tuple[TraceFormat, ...] = (Native(), Azure(), Mooncake())


def known_formats() -> str:
    """Every format and what it is recognised by, in one line."""
    return "; ".join(f"{known.name} ({known.recognised_by})" for known in FORMATS)


def by_name(name: str) -> TraceFormat:
    """The format that ``--format`` names. Raises `TraceError`."""
    for known in FORMATS:
        if known.name == name:
            return known
    names = ", ".join(known.name for known in FORMATS)
    raise TraceError(f"no trace format {name!r}; there are {names}")


def detect(head: Head) -> TraceFormat | None:
    """The format whose names the head shows most of; ``None`` where it shows none.

    Formats share names (``timestamp``), so the most specific one wins. Raises `TraceError` where
    two are equally likely.
    """
    scores = [(known.match(head), known) for known in FORMATS]
    best = max(score for score, _ in scores)
    if best == 0:
        return None
    likely = [known for score, known in scores if score == best]
    if len(likely) > 1:
        names = " or ".join(known.name for known in likely)
        raise TraceError(f"could be {names}: choose with --format")
    return likely[0]
