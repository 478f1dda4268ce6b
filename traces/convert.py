"""A trace in another format: as much as that one can hold, and a list of what it cannot.

``native`` and ``csv`` (traces/formats/native_csv.py) hold everything that a `Request` knows.
``mooncake`` has milliseconds, two lengths and one hash id for each 512 tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockmanager.content import Content, HashedContent, KeyChain, TokenContent
from scheduler.request import Request
from traces.formats import by_name
from traces.formats.base import TraceError
from traces.formats.mooncake import HASH_BLOCK_SIZE
from traces.formats.native_csv import COLUMNS
from traces.skipped import rows_text
from traces.trace import Trace
from traces.workload import Arrival

_NS, _MS = 1_000_000_000, 1_000_000
_BY_LINE = re.compile(r"line-\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written."""

    rows: int
    """Lines."""
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Converted:
    """What `convert` did."""

    requests: int
    written: Written
    dropped: tuple[str, ...]
    """What the target does not hold, a sentence each; empty where nothing was lost."""
    notes: tuple[str, ...]
    """What was changed or assumed without a loss."""


@dataclass(slots=True)
class Losses:
    """Rows that lost something, by what it was."""

    rows: dict[str, int] = field(default_factory=dict)

    def add(self, what: str) -> None:
        self.rows[what] = self.rows.get(what, 0) + 1

    def sentences(self) -> tuple[str, ...]:
        return tuple(f"{what}: {rows_text(count)}" for what, count in self.rows.items())


def convert(
    trace: Trace, path: str | os.PathLike[str], target: str, *, force: bool = False
) -> Converted:
    """Write a trace to ``path`` as one of `TARGETS`, whole or not at all.

    Raises `TraceError` on an unknown target, content that has no file format, or a file that cannot
    be written or exists (without ``force``).
    """
    losses = Losses()
    lines = lines_of(trace.arrivals, target, losses)
    written = write_new(Path(path), lines, force=force)
    dropped = list(losses.sentences())
    dropped += [f"skipped on reading: {skipped}" for skipped in trace.skipped]
    dropped += [note for note in trace.notes if note.startswith("Unknown keys")]
    if not trace.keeps_answers:
        dropped.append("that later prompts leave reasoning out: a closed loop would not know it")
    if by_name(trace.format).clock == "absolute":
        dropped.append("dates: time 0 is that of the earliest row")
    notes = [note for note in trace.notes if not note.startswith("Unknown keys")]
    if not _has_own_ids(trace.arrivals):
        notes.append("Rows had no ids: they go by their line numbers in the new file.")
    return Converted(len(trace.arrivals), written, tuple(dropped), tuple(notes))


def lines_of(
    arrivals: Sequence[Arrival], target: str, losses: Losses | None = None
) -> Iterator[str]:
    """The lines of a target file, line ends included. Raises `TraceError` on an unknown target."""
    writer = TARGETS.get(target)
    if writer is None:
        raise TraceError(f"no format {target!r} to convert to; there are {', '.join(TARGETS)}")
    return writer(arrivals, Losses() if losses is None else losses)


def _native(arrivals: Sequence[Arrival], losses: Losses) -> Iterator[str]:
    with_ids = _has_own_ids(arrivals)
    for arrival in arrivals:
        record = _record(arrival, with_ids, losses)
        # Times are written as exact decimals, which a double would not always be.
        exact = [
            f'"{key}":{record.pop(key)}' for key in ("arrival_s", "deadline_s") if key in record
        ]
        rest = json.dumps(record, separators=(",", ":"))
        yield "{" + ",".join(exact) + "," + rest[1:] + "\n"


def _csv(arrivals: Sequence[Arrival], losses: Losses) -> Iterator[str]:
    with_ids = _has_own_ids(arrivals)
    records = [_record(arrival, with_ids, losses) for arrival in arrivals]
    used = [column for column in COLUMNS if any(column in record for record in records)]
    yield ",".join(used) + "\n"
    for record in records:
        yield ",".join(_cell(record.get(column), losses) for column in used) + "\n"


def _cell(value: object, losses: Losses) -> str:
    if value is None:
        return ""
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    if any(mark in text for mark in "\r\n"):  # a row is a line
        losses.add("line breaks in names became spaces")
        text = " ".join(text.split())
    if any(mark in text for mark in ',"') or text != text.strip():
        text = '"' + text.replace('"', '""') + '"'
    return text


def _has_own_ids(arrivals: Sequence[Arrival]) -> bool:
    """Whether ids are more than the line numbers that rows without one are named by."""
    return not all(_BY_LINE.fullmatch(arrival.request.id) for arrival in arrivals)


def _record(arrival: Arrival, with_id: bool, losses: Losses) -> dict[str, Any]:
    """All of a request under the native names; times as decimal text."""
    request = arrival.request
    record: dict[str, Any] = {"id": request.id} if with_id else {}
    record |= {
        "arrival_s": _seconds(request.arrival_ns),
        "prompt_tokens": request.num_prompt_tokens,
        "output_tokens": arrival.output_tokens,
    }
    if request.deadline_ns is not None:
        record["deadline_s"] = _seconds(request.deadline_ns - request.arrival_ns)
    optional = (
        ("max_tokens", request.max_tokens, None),
        ("n", request.n, 1),
        ("priority", request.priority, 0),
        ("session_id", request.session_id, None),
        ("lora", request.extra_keys.lora, None),
        ("salt", request.extra_keys.salt, None),
    )
    record |= {key: value for key, value, default in optional if value != default}
    return record | _identity(request, losses)


def _identity(request: Request, losses: Losses) -> dict[str, Any]:
    content = request.content
    if content is None:
        return {}
    if isinstance(content, TokenContent):
        if content.num_tokens == request.num_prompt_tokens:
            return {"token_ids": content.token_ids.tolist()}
        losses.add("token ids that cover only a part of their prompt")
        return {}
    if isinstance(content, HashedContent):
        size, prompt = content.hash_block_size, request.num_prompt_tokens
        if content.num_tokens in (prompt, prompt // size * size):
            return {"hash_block_size": size, "hash_ids": content.hash_ids.tolist()}
        losses.add("hash ids that cover only a part of their prompt")
        return {}
    raise TraceError(f"request {request.id}: {type(content).__name__} has no place in a file")


def _seconds(time_ns: int) -> str:
    """Exact: ``1.5`` for 1,500,000,000."""
    whole, rest = divmod(time_ns, _NS)
    return f"{whole}.{rest:09d}".rstrip("0").rstrip(".") if rest else str(whole)


def _mooncake(arrivals: Sequence[Arrival], losses: Losses) -> Iterator[str]:
    with_ids = _has_own_ids(arrivals)
    ids = _MooncakeIds(arrivals, losses)
    defaults = (
        ("max_tokens", None),
        ("n", 1),
        ("priority", 0),
        ("deadline_ns", None),
        ("session_id", None),
    )
    for arrival in arrivals:
        request = arrival.request
        for name, default in defaults:
            if getattr(request, name) != default:
                losses.add(f"{name.removesuffix('_ns')} dropped")
        if with_ids:
            losses.add("id dropped")
        if request.arrival_ns % _MS:
            losses.add("time rounded to a millisecond")
        record: dict[str, Any] = {
            "timestamp": (request.arrival_ns + _MS // 2) // _MS,
            "input_length": request.num_prompt_tokens,
            "output_length": arrival.output_tokens,
        }
        hash_ids = ids.of(request)
        if hash_ids is None:
            losses.add(
                "no hash_ids, as what prompts share is unknown (read it with --format mooncake)"
            )
        else:
            record |= {"hash_ids": hash_ids}
        yield json.dumps(record, separators=(",", ":")) + "\n"


class _MooncakeIds:
    """One id for each 512 tokens, the last one for what is left."""

    def __init__(self, arrivals: Sequence[Arrival], losses: Losses) -> None:
        self._losses = losses
        self._numbers: dict[object, int] = {}
        self._as_they_are = all(
            a.request.content is None or _is_mooncake(a.request, a.request.content)
            for a in arrivals
        )

    def of(self, request: Request) -> list[int] | None:
        content = request.content
        if content is None:
            return None
        if self._as_they_are:
            assert isinstance(content, HashedContent)
            as_they_are: list[int] = content.hash_ids.tolist()
            return as_they_are
        extra = request.extra_keys
        if extra.lora is not None or extra.salt is not None:
            self._losses.add("lora and salt dropped (their blocks keep ids of their own)")
        if not (isinstance(content, HashedContent) and content.hash_block_size == HASH_BLOCK_SIZE):
            self._losses.add(
                f"prefixes shared by less than whole blocks of {HASH_BLOCK_SIZE} tokens"
            )
        names: list[object] = list(KeyChain(content, HASH_BLOCK_SIZE, extra).keys)
        blocks = -(-request.num_prompt_tokens // HASH_BLOCK_SIZE)
        if len(names) < blocks and content.num_tokens == request.num_prompt_tokens:
            # The whole prompt as one block names its partial end.
            names.append((*KeyChain(content, content.num_tokens, extra).keys, content.num_tokens))
        if len(names) < blocks:
            self._losses.add(
                "ids made up for the end of a prompt, of unknown content: it never hits"
            )
            names += [(request.id, index) for index in range(len(names), blocks)]
        return [self._numbers.setdefault(name, len(self._numbers)) for name in names]


def _is_mooncake(request: Request, content: Content) -> bool:
    return (
        isinstance(content, HashedContent)
        and content.hash_block_size == HASH_BLOCK_SIZE
        and content.num_tokens == request.num_prompt_tokens
        and request.extra_keys.lora is None
        and request.extra_keys.salt is None
    )


TARGETS: dict[str, Callable[[Sequence[Arrival], Losses], Iterator[str]]] = {
    "native": _native,
    "csv": _csv,
    "mooncake": _mooncake,
}
"""Formats that can be written."""


def write_new(path: Path, lines: Iterable[str], *, force: bool = False) -> Written:
    """Write a file whole or not at all.

    Raises `TraceError` where it exists (without ``force``), is no regular file, or cannot be
    written; nothing is left behind then.
    """
    path = path.resolve()
    digest, rows, size = hashlib.sha256(), 0, 0
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():
            raise TraceError(f"{path}: is not a file that can be replaced")
        if path.exists() and not force:
            raise TraceError(f"{path}: exists (--force replaces it)")
        try:
            with part.open("xb") as file:
                for line in lines:
                    data = line.encode()
                    digest.update(data)
                    file.write(data)
                    rows, size = rows + 1, size + len(data)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror or error}") from None
    return Written(rows, size, digest.hexdigest())
