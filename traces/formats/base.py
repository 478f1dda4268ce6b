"""What a trace format is, and the exact parsing that all of them share.

A reader says in a few words what it recognises and turns lines into `Row`s. Everything else (ids,
sorting, counting what was skipped) is done once, in traces/trace.py. Times become integer
nanoseconds straight from their decimal text: no float in between.
"""

from __future__ import annotations

import csv
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal
from functools import cached_property
from typing import Any, BinaryIO, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from blockmanager.content import NO_EXTRA_KEYS, Content, ExtraKeys

INT64_MAX = 2**63 - 1
MAX_TOKENS = 2**31 - 1
"""Largest token count believed; sums over billions of such rows still fit 64 bits."""

SECONDS = 9
"""Power of ten that turns a unit into nanoseconds."""
MILLISECONDS = 6
MICROSECONDS = 3

_EXACT = Context(prec=64, rounding=ROUND_HALF_EVEN)
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_MEMBER = re.compile(rb'"([A-Za-z_][A-Za-z_0-9.]*)"\s*:')
_NAMES_BYTES = 1 << 16
_BOM = b"\xef\xbb\xbf"


class TraceError(ValueError):
    """A trace that cannot be used; the message is one line and names the file."""


class NoArrivalsError(TraceError):
    """Rows do not say when they came, and no process does."""


class RowError(ValueError):
    """One row that cannot be used: a reason shared by many rows, and this row's detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


NO_REMARKS: frozenset[str] = frozenset()
TEXT_PROMPT = "the prompt is text: only a tokenizer tells its tokens"
NO_TOKENIZER = f"{TEXT_PROMPT} (--tokenizer)"


class Row(NamedTuple):
    """A request as a file gives it; times in ns on the file's own clock."""

    line: int
    """Where it stands: what it counts, ``TraceFormat.counted_as`` says."""
    arrival_ns: int | None
    """``None``: the file does not say; a process has to be named (``--arrivals``)."""
    prompt_tokens: int
    output_tokens: int
    id: str | None = None
    content: Content | None = None
    max_tokens: int | None = None
    n: int = 1
    priority: int = 0
    deadline_ns: int | None = None
    """After the arrival."""
    session_id: str | None = None
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    unknown_keys: frozenset[str] = frozenset()
    remarks: frozenset[str] = NO_REMARKS
    """What was assumed of this row, as the report prints it before a count of rows."""
    file: str = ""
    """Which file of a folder it is from."""


class BadRow(NamedTuple):
    """A row that was skipped."""

    line: int
    reason: str
    detail: str
    file: str = ""
    """Which file of a folder it is from."""


def shown(value: object) -> str:
    """``repr`` of a value from a file, short enough for a message."""
    text = repr(str(value) if isinstance(value, Decimal) else value)
    return text if len(text) <= 40 else text[:37] + "..."


def to_number(text: str) -> int | Decimal:
    """The number that a text field holds, exactly."""
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return int(text)
    if _NUMBER.fullmatch(text) is None:
        raise RowError("not a finite number", shown(text))
    return _decimal(text)


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except ArithmeticError:  # an exponent of more than eighteen digits
        raise RowError("number out of range", shown(text)) from None


def scaled(value: object, name: str, exponent: int) -> int:
    """``value * 10**exponent`` as an integer, exact (finer digits round half to even).

    Raises `RowError` where the value is no finite number or the result passes 64 bits.
    """
    if type(value) is int:
        number: int = value * 10**exponent
    elif isinstance(value, Decimal):
        if value and value.adjusted() + exponent > 18:
            raise RowError(f"{name} is out of range", shown(value))
        number = int(_EXACT.to_integral_value(_EXACT.scaleb(value, exponent)))
    elif isinstance(value, float):  # json gives floats for NaN and Infinity only, see _DECODER
        raise RowError(f"{name} is not a finite number", shown(value))
    else:
        raise RowError(f"{name} is not a number", shown(value))
    if not -INT64_MAX <= number <= INT64_MAX:
        raise RowError(f"{name} is out of range", shown(value))
    return number


def exact(value: object) -> object:
    """A float as the shortest decimal that gives it back; anything else as it is.

    For values that a library has turned into floats already. Not finite ones stay floats.
    """
    if isinstance(value, float) and math.isfinite(value):
        return Decimal(repr(value))
    return value


def field_number(fields: Mapping[str, str], name: str) -> int | Decimal:
    """The number in a text field. Raises `RowError` with the field's name."""
    try:
        return to_number(fields[name])
    except RowError as error:
        raise RowError(f"{name} is {error.reason}", error.detail) from None


def time_ns(value: object, name: str, exponent: int) -> int:
    """A time that is not negative, in ns. Raises `RowError`."""
    time = scaled(value, name, exponent)
    if time < 0 or (isinstance(value, Decimal) and value.is_signed() and value):
        raise RowError(f"{name} is negative", shown(value))
    return time


def whole(value: object, name: str, *, least: int | None = 0, most: int = MAX_TOKENS) -> int:
    """A whole number within ``least .. most``. Raises `RowError`."""
    number = scaled(value, name, 0)
    if isinstance(value, Decimal) and value != number:
        raise RowError(f"{name} is not a whole number", shown(value))
    if least is not None and number < 0 <= least:
        raise RowError(f"{name} is negative", shown(value))
    if least is not None and number < least:
        raise RowError(f"{name} is zero" if number == 0 else f"{name} is under {least}", "")
    if number > most:
        raise RowError(f"{name} is out of range", f"{shown(value)}, at most {most}")
    return number


def tokens(value: object, name: str) -> int:
    """A count of at least one token. Raises `RowError`."""
    return whole(value, name, least=1)


def int64_list(value: object, name: str) -> list[int]:
    """A list of 64-bit integers. Raises `RowError`."""
    if not isinstance(value, list):
        raise RowError(f"{name} is not a list", shown(value))
    if value and set(map(type, value)) != {int}:
        wrong = next(item for item in value if type(item) is not int)
        raise RowError(f"{name} holds something that is not an integer", shown(wrong))
    if value and (max(value) > INT64_MAX or min(value) < -INT64_MAX - 1):
        raise RowError(f"{name} holds an integer of more than 64 bits")
    return value


def label(value: object, name: str) -> str:
    """A name given as text or as an integer. Raises `RowError`."""
    if type(value) is int:
        return str(value)
    if not isinstance(value, str) or not value:
        raise RowError(f"{name} is neither text nor an integer", shown(value))
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, written as a JSON escape
            raise RowError(f"{name} is not valid text", ascii(value)[:40]) from None
    return value


def text_lines(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1; a byte order mark is dropped."""
    for number, raw in enumerate(source, 1):
        line = raw.removeprefix(_BOM) if number == 1 else raw
        if line.strip():
            yield number, line.rstrip(b"\r\n")


def decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RowError("not UTF-8", f"byte {error.start + 1} of the line") from None


_DECODER = json.JSONDecoder(parse_float=_decimal)


def json_value(data: bytes) -> Any:
    """What JSON text holds; numbers with a point or exponent are `Decimal`s. Raises `RowError`."""
    text = decoded(data)
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise RowError("not JSON", f"{line}column {error.colno}: {error.msg}") from None
    except RowError:
        raise
    except (ValueError, RecursionError) as error:  # thousands of digits, thousands of brackets
        raise RowError("not JSON", str(error)[:60]) from None


def json_object(line: bytes) -> dict[str, Any]:
    """The object that a line holds, as ``json_value`` gives it. Raises `RowError`."""
    record = json_value(line)
    if not isinstance(record, dict):
        raise RowError("not a JSON object", shown(record))
    return record


def csv_fields(line: bytes) -> list[str]:
    """Fields of one line. Raises `RowError`."""
    try:
        return next(csv.reader([decoded(line)]))
    except (csv.Error, StopIteration) as error:
        raise RowError("not CSV", str(error)) from None


class Head:
    """The first lines of a file that are not blank, for readers to recognise."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._lines = lines

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """JSON objects among the lines."""
        found = []
        for line in self._lines:
            try:
                found.append(json_object(line))
            except RowError:
                continue
        return found

    @cached_property
    def header(self) -> list[str]:
        """Fields of the first line, read as CSV."""
        try:
            return [field.strip() for field in csv_fields(self._lines[0])] if self._lines else []
        except RowError:
            return []

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of JSON members in the lines, wherever they stand: a document may span many."""
        text = b"\n".join(self._lines)[:_NAMES_BYTES]
        return frozenset(name.decode("ascii") for name in _MEMBER.findall(text))

    def starts_with(self, magic: bytes) -> bool:
        """Whether the file begins with these bytes."""
        return bool(self._lines) and self._lines[0].startswith(magic)


class Tokenizer(Protocol):
    """Counts tokens of texts; see `traces.tokenizer.TextTokenizer`."""

    @property
    def about(self) -> str:
        """What is said of a row that it counted, see ``Row.remarks``."""

    @property
    def sha256(self) -> str:
        """Of its file."""

    def ids(self, text: object, name: str) -> npt.NDArray[np.int64]:
        """Token ids, ``[num_tokens]``, of the text of a field. Raises `RowError`."""


class TraceFormat(ABC):
    """One format. A reader keeps no state between calls."""

    name: ClassVar[str]
    """What ``--format`` calls it."""
    recognised_by: ClassVar[str]
    """The content it looks for, in words."""
    units: ClassVar[str]
    clock: ClassVar[Literal["relative", "absolute"]]
    """Whether time 0 is the start of the trace, or the earliest row has to become it."""
    clock_zero: ClassVar[str] = "the file has dates"
    """Why the earliest row becomes time 0, where the clock is absolute."""
    assumes: str = ""
    """What a reader takes for granted of every row: a sentence that the report prints."""
    counted_as: ClassVar[str] = "line"
    """What ``Row.line`` counts, from 1."""
    prefix_identity: ClassVar[str]
    """What the format tells about equal prefixes, in words."""
    licence: ClassVar[str]
    """Under what terms public data of this format comes, in words."""
    keeps_answers: ClassVar[bool] = True
    """Whether the next prompt of a session holds an answer as it was given, reasoning and all."""

    @abstractmethod
    def match(self, head: Head) -> int:
        """How many names of the format the head shows; 0 where it is another format."""

    @abstractmethod
    def rows(self, source: BinaryIO) -> Iterator[Row | BadRow]:
        """Every row of the file, in file order, good or bad.

        Raises `TraceError` (without the file's name) where no row at all can be read.
        """

    def counting(self, tokenizer: Tokenizer) -> TraceFormat:
        """The reader that counts texts with this. Raises `TraceError` where the format has no texts."""
        raise TraceError(f"--tokenizer has no effect: {self.name} has counts, not texts")


class TextFormat(TraceFormat):
    """A format that holds texts, all of whose rows, or some, need a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer

    def counting(self, tokenizer: Tokenizer) -> Self:
        return type(self)(tokenizer)


class JsonLinesFormat(TraceFormat):
    """One JSON object a line."""

    required: ClassVar[frozenset[str]]
    optional: ClassVar[frozenset[str]] = frozenset()
    signature: ClassVar[frozenset[str]]
    """Keys that together are taken as proof of the format."""

    @abstractmethod
    def parse(self, line: int, record: dict[str, Any]) -> Row:
        """A row from an object that has the required keys. Raises `RowError`."""

    def parser(self) -> Callable[[int, dict[str, Any]], Row]:
        """``parse`` for one pass over a file, with what it has to remember of the rows above."""
        return self.parse

    def match(self, head: Head) -> int:
        seen = any(self.signature <= record.keys() for record in head.records)
        return len(self.signature) if seen else 0

    def rows(self, source: BinaryIO) -> Iterator[Row | BadRow]:
        known = self.required | self.optional
        parse = self.parser()
        for number, line in text_lines(source):
            try:
                record = json_object(line)
                for key in self.required:
                    if record.get(key) is None:
                        missing = sorted(k for k in self.required if record.get(k) is None)
                        raise RowError(f"{', '.join(missing)} missing")
                row = parse(number, record)
            except RowError as error:
                yield BadRow(number, error.reason, error.detail)
                continue
            unknown = record.keys() - known
            yield row._replace(unknown_keys=frozenset(unknown)) if unknown else row


class CsvFormat(TraceFormat):
    """Comma-separated values under a header line; a row is a line."""

    required: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def parse(self, line: int, fields: dict[str, str]) -> Row:
        """A row from a line that has every column of the header. Raises `RowError`."""

    def match(self, head: Head) -> int:
        return len(self.required) if set(self.required) <= set(head.header) else 0

    def rows(self, source: BinaryIO) -> Iterator[Row | BadRow]:
        return self.table(text_lines(source))

    def table(self, lines: Iterator[tuple[int, bytes]]) -> Iterator[Row | BadRow]:
        """The rows of numbered lines, of which the first is the header. Raises `TraceError`."""
        header = Head([line for _, line in (next(lines, (0, b"")),)]).header
        missing = [column for column in self.required if column not in header]
        if missing:
            raise TraceError(
                f"no column {', '.join(missing)} in its first line, "
                f"as {self.name} needs ({self.recognised_by})"
            )
        unknown = frozenset(header) - {*self.required, *self.optional}
        for number, line in lines:
            try:
                fields = csv_fields(line)
                if len(fields) != len(header):
                    raise RowError(
                        "not the header's number of fields",
                        f"{len(fields)} fields under a header of {len(header)}",
                    )
                row = self.parse(number, dict(zip(header, fields, strict=True)))
            except RowError as error:
                yield BadRow(number, error.reason, error.detail)
                continue
            yield row._replace(unknown_keys=unknown) if unknown else row
