"""Result files and logs: whole JSON documents, JSON lines and CSV exports, read by one loop.

The same records come in several wrappings (a list, a page of an API, an object a line, a table), so
a format here says what a record is, and `RecordsFormat` finds the records.
"""

from __future__ import annotations

import csv
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, BinaryIO, ClassVar, Literal

from traces.formats.azure import timestamp_ns
from traces.formats.base import (
    SECONDS,
    BadRow,
    Head,
    Row,
    RowError,
    TraceError,
    TraceFormat,
    decoded,
    field_number,
    json_object,
    json_value,
    label,
    shown,
    text_lines,
    time_ns,
    tokens,
)

Lines = Iterable[tuple[int, bytes]]
"""Lines that are not blank, without their ends, and their numbers from 1."""

_HEAD_TEXT = 1 << 16
"""Bytes of a head that are searched for patterns."""
_MAX_FIELD = 2**31 - 1
_SHORT_ZONE = re.compile(r":\d\d(\.\d+)?[+-]\d\d\Z", re.ASCII)
"""End of a time whose zone has hours only, as PostgreSQL writes it."""

DERIVED_START = frozenset({"Arrival taken as the end of the request less its duration"})


def head_text(head: Head) -> bytes:
    """The first lines as they stand, at most 64 KiB of them."""
    return b"\n".join(head._lines)[:_HEAD_TEXT]


def at(value: object, *path: str) -> Any:
    """What stands at a path of keys; ``None`` where the path ends earlier."""
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def first(record: dict[str, Any], *names: str) -> Any:
    """The first of these fields that holds something."""
    return next((record[n] for n in names if record.get(n) not in (None, "")), None)


def count(value: object, name: str) -> int:
    """A number of tokens, given as a number or as its text. Raises `RowError`."""
    if value is None:
        raise RowError(f"{name} missing")
    return tokens(numeric(value, name), name)


def moment_ns(value: object, name: str, exponent: int = SECONDS) -> int:
    """A time as ns: a number of units since an origin, or a date and time since 1970 (no zone: UTC).

    ``exponent`` is the power of ten that turns the unit into ns. Raises `RowError`.
    """
    if isinstance(value, str) and ":" in value:
        text = value.strip()
        return timestamp_ns(text + ":00" if _SHORT_ZONE.search(text) else text, name)
    return time_ns(numeric(value, name), name, exponent)


def numeric(value: object, name: str) -> object:
    """The number that a text holds; what is no text as it is. Raises `RowError`."""
    return field_number({name: value}, name) if isinstance(value, str) else value


def label_or_none(value: object, name: str) -> str | None:
    """A name, where there is one. Raises `RowError`."""
    return None if value is None or value == "" else label(value, name)


def table(value: object, name: str) -> dict[str, Any]:
    """An object, or the JSON text of one, as exports put it into a column. Raises `RowError`."""
    if isinstance(value, str):
        try:
            return json_object(value.encode(errors="surrogatepass"))
        except RowError as error:
            raise RowError(f"{name} is {error.reason}", error.detail) from None
    if not isinstance(value, dict):
        raise RowError(f"{name} is not a JSON object", shown(value))
    return value


def started_ns(start_ns: int | None, end_ns: int | None, duration_ns: int | None, what: str) -> int:
    """When a request came: its start, or its end less its duration.

    An end alone is a completion and not taken for an arrival: `RowError`.
    """
    if start_ns is not None:
        return start_ns
    if end_ns is None or duration_ns is None:
        raise RowError(f"no arrival time: {what}")
    if duration_ns > end_ns:
        raise RowError("lasts longer than its clock has run")
    return end_ns - duration_ns


class RecordsFormat(TraceFormat):
    """Records in a JSON document, in JSON lines, or in CSV where ``has_csv``.

    Rows are numbered by line where a line is a record, else by their place in the document.
    """

    counted_as: ClassVar[str] = "row"

    clock: ClassVar[Literal["relative", "absolute"]] = "absolute"
    prefix_identity: ClassVar[str] = "none"
    signatures: ClassVar[tuple[frozenset[str], ...]]
    """Each a set of names that together are taken as proof of the format."""
    has_csv: ClassVar[bool] = False
    one_document: ClassVar[bool] = False
    """Whether a second document would be another run with a clock of its own."""

    @abstractmethod
    def parse(self, line: int, record: dict[str, Any]) -> Row:
        """A row from a record. Raises `RowError`."""

    def entries(self, document: object) -> Iterator[object]:
        """The records of a document; a `RowError` among them is a record that cannot be used.

        Raises `TraceError` where the document cannot hold any.
        """
        if isinstance(document, list):
            yield from document
        elif isinstance(pages := at(document, "data"), list):
            yield from pages
        else:
            yield document

    def match(self, head: Head) -> int:
        names = head.names.union(head.header, *head.records)
        return max((len(wanted) for wanted in self.signatures if wanted <= names), default=0)

    def rows(self, source: BinaryIO) -> Iterator[Row | BadRow]:
        lines = text_lines(source)
        start = next(lines, None)
        if start is None:
            return
        lines = chain([start], lines)
        if self.has_csv and start[1].lstrip()[:1] not in (b"{", b"["):
            records = self._table(lines)
        else:
            records = self._documents(lines)
        for number, record in records:
            try:
                if isinstance(record, RowError):
                    raise record
                if not isinstance(record, dict):
                    raise RowError("not a JSON object", shown(record))
                yield self.parse(number, record)
            except RowError as error:
                yield BadRow(number, error.reason, error.detail)

    def _documents(self, lines: Lines) -> Iterator[tuple[int, object]]:
        last = 0
        for line, document in json_documents(lines):
            if last and self.one_document:
                raise TraceError(f"holds a second run at line {line}: read one at a time")
            found = [document] if isinstance(document, RowError) else self.entries(document)
            for record in found:
                last = max(line, last + 1)
                yield last, record

    def _table(self, lines: Lines) -> Iterator[tuple[int, object]]:
        fields_of = _csv_rows(lines)
        _, header = next(fields_of)
        if isinstance(header, RowError):
            raise TraceError(f"line 1: {header}")
        names = [name.strip() for name in header]
        if not any(wanted <= set(names) for wanted in self.signatures):
            wanted = ", ".join(sorted(self.signatures[0]))
            raise TraceError(f"its first line is neither JSON nor a header with {wanted}")
        for number, fields in fields_of:
            if isinstance(fields, RowError):
                yield number, fields
            elif len(fields) != len(names):
                yield (
                    number,
                    RowError(
                        "not the header's number of fields",
                        f"{len(fields)} fields under a header of {len(names)}",
                    ),
                )
            else:
                yield number, dict(zip(names, fields, strict=True))


def json_documents(lines: Lines) -> Iterator[tuple[int, object]]:
    """A document a line, or one document over all lines; raises `TraceError` for a broken one."""
    lines = iter(lines)
    number, line = next(lines, (0, b""))
    if not number:
        return
    alone: object
    try:
        alone = json_object(line)
    except RowError as error:
        # Either a document of several lines or of another shape, or a first line that is broken.
        rest = list(lines)
        text = b"\n".join([line, *(more for _, more in rest)])
        try:
            yield number, json_value(text)
            return
        except RowError as whole:
            if line.lstrip()[:1] == b"[" or not any(_is_object(more) for _, more in rest[:20]):
                raise TraceError(f"neither one JSON document nor JSON lines: {whole}") from None
        alone, lines = error, iter(rest)
    yield number, alone
    for number, line in lines:
        try:
            yield number, json_object(line)
        except RowError as error:
            yield number, error


def _is_object(line: bytes) -> bool:
    try:
        return bool(json_object(line))
    except RowError:
        return False


def _csv_rows(lines: Lines) -> Iterator[tuple[int, list[str] | RowError]]:
    """Rows of a table whose quoted fields may run over lines, by the line where each starts."""
    taken: list[int] = []
    undecodable: list[RowError] = []

    def texts() -> Iterator[str]:
        for number, line in lines:
            taken.append(number)
            try:
                yield decoded(line) + "\n"
            except RowError as error:
                undecodable.append(error)
                yield line.decode(errors="replace") + "\n"

    # Strict: a quote that is never closed would otherwise swallow the rest of the file unnoticed.
    reader = csv.reader(texts(), strict=True)
    while True:
        taken.clear()
        undecodable.clear()
        fields: list[str] | RowError
        try:
            with _long_fields():
                fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            through = f" (through line {taken[-1]})" if len(taken) > 1 else ""
            fields = RowError("not CSV", f"{error}{through}")
        yield taken[0], undecodable[0] if undecodable else fields


@contextmanager
def _long_fields() -> Iterator[None]:
    """Exports hold whole prompts in a field; the limit is the process's, so it is put back."""
    before = csv.field_size_limit(_MAX_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)
