"""Rows of a run as growing numpy columns: one row a step, one row a request.

Two schemas and one store. A column is ``int64``, ``float64`` or ``str`` (a list of strings); a
question mark behind the type says that values may be missing. In memory a nullable integer column
is a ``numpy.ma.MaskedArray`` (masked = missing, the data below a mask is 0, arithmetic carries the
mask on), a nullable string column is a list with ``None``.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import repeat
from typing import IO, Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

ColumnType = Literal["int64", "int64?", "float64", "str", "str?"]
Columns: TypeAlias = Mapping[str, Any]
"""Column name -> int64 or float64 array, masked int64 array, or list of strings; equal lengths."""
IntArray: TypeAlias = npt.NDArray[np.int64]
NullableInts: TypeAlias = "np.ma.MaskedArray[Any, np.dtype[np.int64]]"

SPILL_ROWS = 1_000_000
"""Rows of a store up to which its numbers are held in memory."""
INT64_MAX = 2**63 - 1
_CHUNK_ROWS = 4096
_SMALL_BLOCK = 16
"""Blocks shorter than this are buffered as rows: slicing every column would cost more."""


class StepRow(NamedTuple):
    """One step of one replica."""

    start_ns: int
    duration_ns: int
    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    """Sum over the scheduled sequences of the tokens attended to."""
    num_seqs: int
    """Sequences scheduled in the step."""
    running: int
    waiting: int
    blocks_used: int
    """Blocks held by sequences during the step; cached blocks that nobody holds count as free."""
    preemptions: int
    copies: int
    transfers: int
    """Blocks swapped in and out."""
    blocked_by: int
    """What kept the head of the waiting queue out, as a code of ``BLOCKED_CODES``."""
    flops: float
    """As the cost model prices the step; 0 where it does not."""
    bytes: float
    replica: int


class RequestRow(NamedTuple):
    """One request of a run, whatever became of it."""

    id: str
    arrival_ns: int
    first_scheduled_ns: int | None
    first_token_ns: int | None
    finish_ns: int | None
    """When it left, finished or not: also the time of a timeout or abort."""
    prompt_tokens: int
    cached_tokens: int
    """Prefix hits at the first admission."""
    output_tokens: int
    """All samples together."""
    recomputed_tokens: int
    refound_tokens: int
    """Tokens that it found again in the cache after a preemption; never counted as prefix hits."""
    preemptions: int
    num_samples: int
    decode_ns: int
    """Sum over the samples of (last token - first token)."""
    decode_gaps: int
    """Sum over the samples of (outputs - 1)."""
    max_gap_ns: int
    """Longest gap between two consecutive tokens of a sample; 0 where there is none."""
    priority: int
    session_id: str | None
    status: str
    """One of ``STATUSES``."""
    finish_reason: str
    """stop, length, kv_exhausted, ..., or the text of the refusal."""
    replica: int


BLOCKED_CODES: Mapping[str, int] = {
    "slots": 1,
    "budget": 2,
    "blocks": 3,
    "preemption": 4,
    "policy": 5,
}
"""0 = nobody waited. The others are ``scheduler.plan.BlockedBy``: no sequence slot, no room in the
token budget, no free blocks, a preemption in the same step, the policy's wish."""

STATUSES = ("completed", "refused", "timed_out", "aborted", "unfinished")

STEP_SCHEMA: Mapping[str, ColumnType] = {
    name: "float64" if name in ("flops", "bytes") else "int64" for name in StepRow._fields
}
REQUEST_SCHEMA: Mapping[str, ColumnType] = {
    **dict.fromkeys(RequestRow._fields, "int64"),
    "id": "str",
    "first_scheduled_ns": "int64?",
    "first_token_ns": "int64?",
    "finish_ns": "int64?",
    "session_id": "str?",
    "status": "str",
    "finish_reason": "str",
}
GAP_SCHEMA: Mapping[str, ColumnType] = {"gap_ns": "int64", "count": "int64"}

Row = TypeVar("Row", bound=tuple[Any, ...])


class SpillError(ValueError):
    """The temporary files of a long run cannot be written; one clear line."""


@contextmanager
def _spilling() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SpillError(
            "the rows of this run are too many for memory and cannot be put into temporary files "
            f"(TMPDIR names their folder): {error.strerror or error}"
        ) from error


def _close(file: IO[bytes]) -> None:
    with suppress(OSError):  # what finds no room at its end has been told already
        file.close()


class _Values:
    """Numbers appended in blocks: an array that doubles, beyond ``spill_rows`` a file."""

    __slots__ = ("__weakref__", "_data", "_dtype", "_file", "_spill_rows")

    def __init__(self, dtype: npt.DTypeLike, spill_rows: int) -> None:
        self._dtype = np.dtype(dtype)
        self._spill_rows = spill_rows
        self._data: npt.NDArray[Any] = np.zeros(min(_CHUNK_ROWS, spill_rows), self._dtype)
        self._file: Any = None

    def put(self, start: int, end: int, values: Any) -> None:
        """Set rows [start, end), which come in order, to a scalar or an array of that shape."""
        if self._file is None and end <= self._spill_rows:
            if end > len(self._data):
                grown = np.zeros(min(max(end, 2 * len(self._data)), self._spill_rows), self._dtype)
                grown[:start] = self._data[:start]
                self._data = grown
            self._data[start:end] = values
            return
        with _spilling():
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="kvplan-")  # noqa: SIM115
                weakref.finalize(self, _close, self._file)  # maps of it stay good
                self._file.write(self._data[:start].data)
                self._data = np.zeros(0, self._dtype)
            block = np.ascontiguousarray(np.broadcast_to(values, end - start), self._dtype)
            self._file.write(block.data)

    def get(self, num_rows: int) -> npt.NDArray[Any]:
        """The first rows, read-only: a view, or a new map of the file."""
        if self._file is not None:
            with _spilling():
                self._file.flush()
            return np.memmap(self._file, self._dtype, "r", shape=(num_rows,)).view(np.ndarray)
        # Rows that come later lie behind it, or in a new array.
        data = self._data[:num_rows]
        data.flags.writeable = False
        return data


class _Numbers:
    """One numeric column, with the validity of its values if nullable.

    A column that has held one value so far has no array at all: many do to the end of a run.
    """

    __slots__ = ("_dtype", "_name", "_nullable", "_only", "_spill_rows", "_valid", "_values")

    def __init__(self, name: str, kind: ColumnType, spill_rows: int) -> None:
        self._name = name
        self._nullable = kind == "int64?"
        self._dtype = np.dtype(np.float64 if kind == "float64" else np.int64)
        self._spill_rows = spill_rows
        self._only: Any = None
        """The value of all rows so far, while there is no array."""
        self._values: _Values | None = None
        self._valid = _Values(np.bool_, spill_rows) if self._nullable else None

    def put(self, start: int, end: int, values: Any) -> None:
        """Set rows [start, end) to a scalar or a sequence of that length; rows come in order."""
        valid: Any = True
        if self._valid is not None:
            values, valid = _split_missing(values)
        array = np.asarray(values)
        if array.dtype.kind in "Ou" and array.size and _passes_64_bits(array):
            raise OverflowError(f"column {self._name}: a value passes 64 bits")
        # Assignment would cut 1.5 to 1 and take None for NaN without a word.
        if array.dtype.kind not in ("biuf" if self._dtype.kind == "f" else "biu") and array.size:
            raise TypeError(
                f"column {self._name}: got {array.dtype} values such as {array.flat[0]!r}, "
                f"must be {self._dtype}"
            )
        if array.shape not in ((), (end - start,)):
            raise ValueError(f"column {self._name}: {array.shape} values for {end - start} rows")
        if self._values is None and not self._nullable and end > start and array.size:
            only = array.flat[0] if start == 0 else self._only
            # NaN is not equal to itself and so gets an array.
            if (array == only).all():
                self._only = only
                return
        if self._values is None:
            self._values = _Values(self._dtype, self._spill_rows)
            if start:
                self._values.put(0, start, self._only)
        self._values.put(start, end, array)
        if self._valid is not None:
            self._valid.put(start, end, valid)

    def get(self, num_rows: int) -> Any:
        if self._values is None:
            only = np.zeros((), self._dtype) if self._only is None else self._only
            data = np.broadcast_to(np.asarray(only, self._dtype), num_rows)
        else:
            data = self._values.get(num_rows)
        if self._valid is None:
            return data
        return np.ma.MaskedArray(data, mask=~self._valid.get(num_rows))


class _Strings:
    """One column of strings, some missing where the schema allows it."""

    __slots__ = ("_data", "_name", "_nullable")

    def __init__(self, name: str, kind: ColumnType, spill_rows: int) -> None:
        self._name = name
        self._nullable = kind == "str?"
        self._data: list[str | None] = []

    def put(self, start: int, end: int, values: Any) -> None:
        new = [values] * (end - start) if isinstance(values, str | None) else list(values)
        for value in new:
            if not isinstance(value, str) and not (self._nullable and value is None):
                raise TypeError(f"column {self._name}: got {value!r}, must be a string")
        if len(new) != end - start:
            raise ValueError(f"column {self._name}: {len(new)} values for {end - start} rows")
        self._data[start:] = new

    def get(self, num_rows: int) -> Any:
        return self._data[:num_rows]


class _StoredColumns(Mapping[str, Any]):
    """The columns of a store as they were when it was asked; each is fetched when it is read."""

    __slots__ = ("_columns", "_num_rows")

    def __init__(self, columns: Mapping[str, _Numbers | _Strings], num_rows: int) -> None:
        self._columns, self._num_rows = columns, num_rows

    def __getitem__(self, name: str) -> Any:
        return self._columns[name].get(self._num_rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (list(self.items()),)


class ColumnStore(Generic[Row]):
    """Rows appended one by one or in blocks, read back as columns.

    ``append`` only buffers; every few thousand rows the buffer moves into the arrays, or into their
    files. A value of the wrong type raises ``TypeError``, at the latest in ``columns``.
    """

    __slots__ = ("_columns", "_num_stored", "_pending", "_schema")

    def __init__(self, schema: Mapping[str, ColumnType], *, spill_rows: int = SPILL_ROWS) -> None:
        self._schema = schema
        self._columns: dict[str, _Numbers | _Strings] = {
            name: (_Strings if kind.startswith("str") else _Numbers)(name, kind, spill_rows)
            for name, kind in schema.items()
        }
        self._pending: list[tuple[Any, ...]] = []
        self._num_stored = 0

    def __len__(self) -> int:
        return self._num_stored + len(self._pending)

    def append(self, row: Row) -> None:
        """Add one row, its values in the schema's order."""
        self._pending.append(row)
        if len(self._pending) >= _CHUNK_ROWS:
            self._flush()

    def extend(self, num_rows: int, columns: Mapping[str, Any]) -> None:
        """Add ``num_rows`` rows: for each column of the schema an array, or one value for all rows.

        Raises ``ValueError`` where a column is missing, unknown or of another length.
        """
        if columns.keys() != self._schema.keys():
            wrong = sorted(columns.keys() ^ self._schema.keys())
            raise ValueError(f"columns {wrong} are missing or unknown")
        if num_rows < _SMALL_BLOCK:
            self._pending.extend(
                zip(*(_as_rows(num_rows, n, columns[n]) for n in self._schema), strict=True)
            )
            if len(self._pending) >= _CHUNK_ROWS:
                self._flush()
            return
        self._flush()
        start, end = self._num_stored, self._num_stored + num_rows
        for name, column in self._columns.items():
            column.put(start, end, columns[name])
        self._num_stored = end

    def columns(self) -> Columns:
        """The rows so far; the arrays are not to be written.

        A column that lies in a file is mapped anew each time it is read from the mapping.
        """
        self._flush()
        return _StoredColumns(self._columns, self._num_stored)

    def _flush(self) -> None:
        if not self._pending:
            return
        start, end = self._num_stored, self._num_stored + len(self._pending)
        for column, values in zip(
            self._columns.values(), zip(*self._pending, strict=True), strict=True
        ):
            column.put(start, end, values)
        self._num_stored = end
        self._pending = []


def step_store() -> ColumnStore[StepRow]:
    """An empty store of step rows."""
    return ColumnStore(STEP_SCHEMA)


def request_store() -> ColumnStore[RequestRow]:
    """An empty store of request rows."""
    return ColumnStore(REQUEST_SCHEMA)


def exact_sum(values: IntArray) -> int:
    """Sum of int64 values, exact where numpy's own would wrap (10,000 sojourns of a month)."""
    high, low = values >> 32, values & 0xFFFFFFFF
    return (int(high.sum()) << 32) + int(low.sum())


def _passes_64_bits(array: npt.NDArray[Any]) -> bool:
    """Larger integers than int64 holds make an array of objects, some of them one of uint64."""
    if array.dtype.kind == "u":
        return int(array.max()) > INT64_MAX
    return any(type(value) is int and not -INT64_MAX <= value <= INT64_MAX for value in array.flat)


def _split_missing(values: Any) -> tuple[Any, Any]:
    """(values with 0 where missing, whether each is there)."""
    if values is None:
        return 0, False
    if isinstance(values, np.ma.MaskedArray):
        return values.filled(0), ~np.ma.getmaskarray(values)
    if np.ndim(values) == 0 or isinstance(values, np.ndarray):
        return values, True
    return [0 if v is None else v for v in values], [v is not None for v in values]


def _as_rows(num_rows: int, name: str, values: Any) -> Iterable[Any]:
    """``num_rows`` values for one column."""
    if isinstance(values, str | None) or np.ndim(values) == 0:
        return repeat(values, num_rows)
    if len(values) != num_rows:
        raise ValueError(f"column {name}: {len(values)} values for {num_rows} rows")
    listed: Iterable[Any] = values.tolist() if isinstance(values, np.ndarray) else values
    return listed
