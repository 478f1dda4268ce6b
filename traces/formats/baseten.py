"""Baseten completion traces: Parquet or Arrow, milliseconds since 1970, block hashes of the prompt.

Columns as aiperf's ``baseten_trace`` has them: https://github.com/ai-dynamo/aiperf. The prompts
themselves are not read.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, ClassVar, Literal

from traces.formats.base import (
    INT64_MAX,
    MILLISECONDS,
    NO_REMARKS,
    BadRow,
    Head,
    Row,
    RowError,
    TraceError,
    TraceFormat,
    exact,
    int64_list,
    label,
    time_ns,
    tokens,
    whole,
)
from traces.formats.native import hashed

_PARQUET, _ARROW, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_TIME = "timestamp_start_unix_ms"
_REQUIRED = (_TIME, "input_tokens", "output_tokens")
_OPTIONAL = (
    "total_hashes",
    "block_size",
    "provided_session_id",
    "poor_man_session_id",
    "request_canceled",
)
_NOT_READ = (
    "prompt",
    "duration_e2e_ms",
    "duration_ttft_ms",
    "cached_tokens_reference",
    "model_name",
    "org_id",
    "features",
    "speculation_ratio",
    "output_text",
    "total_hashes_len",
    "__version__",
)
_BATCH_ROWS = 4096
_CANCELLED = frozenset({"Cancelled by the client: the output is what had come until then"})


class Baseten(TraceFormat):
    """``timestamp_start_unix_ms``, ``input_tokens``, ``output_tokens``, ``total_hashes``."""

    name = "baseten"
    recognised_by = "Parquet or Arrow with timestamp_start_unix_ms, input_tokens, output_tokens"
    units = "milliseconds since 1970, tokens"
    clock: ClassVar[Literal["relative", "absolute"]] = "absolute"
    counted_as = "row"
    prefix_identity = "total_hashes, block_size tokens a hash, rounded up or down"
    licence = "whoever recorded the file"

    def match(self, head: Head) -> int:
        return int(any(map(head.starts_with, (_PARQUET, _ARROW, _ARROW_STREAM))))

    def rows(self, source: BinaryIO) -> Iterator[Row | BadRow]:
        if not isinstance(source, io.BytesIO) and not _is_file(source):
            source = io.BytesIO(source.read())  # what unpacks cannot find a file's end
        number = 0
        with _readable():
            names, batches = _batches(source)
            missing = [name for name in _REQUIRED if name not in names]
            if missing:
                raise TraceError(f"no column {', '.join(missing)}: not a Baseten trace")
            unknown = frozenset(names) - {*_REQUIRED, *_OPTIONAL, *_NOT_READ}
            for batch in batches:
                for record in batch:
                    number += 1
                    try:
                        row = _parse(number, record)
                    except RowError as error:
                        yield BadRow(number, error.reason, error.detail)
                        continue
                    yield row._replace(unknown_keys=unknown) if unknown else row


def _is_file(source: BinaryIO) -> bool:
    return isinstance(source, io.BufferedReader) and isinstance(source.raw, io.FileIO)


@contextmanager
def _readable() -> Iterator[None]:
    """What pyarrow finds wrong with a file becomes a `TraceError`."""
    from pyarrow.lib import ArrowException

    try:
        yield
    except TraceError:
        raise
    except (ArrowException, OSError, ValueError, LookupError) as error:
        words = " ".join(str(error).split())
        raise TraceError(f"cannot be read as Parquet or Arrow: {words[:120]}") from None


def _batches(source: BinaryIO) -> tuple[list[str], Iterator[list[dict[str, Any]]]]:
    """Names of the columns, and the rows with the columns that are read, some at a time."""
    from pyarrow import ipc, parquet  # type: ignore[attr-defined]

    start = source.read(len(_ARROW))
    source.seek(0)
    if start.startswith(_PARQUET):
        file = parquet.ParquetFile(source)  # type: ignore[no-untyped-call]
        names = list(file.schema_arrow.names)
        wanted = [name for name in (*_REQUIRED, *_OPTIONAL) if name in names]
        parts = file.iter_batches(_BATCH_ROWS, columns=wanted)  # type: ignore[no-untyped-call]
        return names, (part.to_pylist() for part in parts)
    if start == _ARROW:
        reader = ipc.open_file(source)  # type: ignore[no-untyped-call]
        whole_batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        reader = ipc.open_stream(source)  # type: ignore[no-untyped-call]
        whole_batches = iter(reader)
    names = list(reader.schema.names)
    wanted = [name for name in (*_REQUIRED, *_OPTIONAL) if name in names]
    return names, (
        part.slice(at, _BATCH_ROWS).select(wanted).to_pylist()
        for part in whole_batches
        for at in range(0, part.num_rows, _BATCH_ROWS)
    )


def _parse(number: int, record: dict[str, Any]) -> Row:
    given = {key: exact(value) for key, value in record.items() if value is not None}
    missing = [name for name in _REQUIRED if name not in given]
    if missing:
        raise RowError(f"{', '.join(missing)} missing")
    prompt_tokens = tokens(given["input_tokens"], "input_tokens")
    content = None
    if given.get("total_hashes"):
        if "block_size" not in given:
            raise RowError("total_hashes without block_size")
        size = whole(given["block_size"], "block_size", least=1)
        hash_ids = int64_list(_signed(given["total_hashes"]), "total_hashes")
        content = hashed(hash_ids, size, prompt_tokens, may_round_down=True)
    session = given.get("provided_session_id", given.get("poor_man_session_id"))
    return Row(
        line=number,
        arrival_ns=time_ns(given[_TIME], _TIME, MILLISECONDS),
        prompt_tokens=prompt_tokens,
        output_tokens=tokens(given["output_tokens"], "output_tokens"),
        content=content,
        session_id=None if session in (None, "") else label(session, "session id"),
        remarks=_CANCELLED if given.get("request_canceled") else NO_REMARKS,
    )


def _signed(hashes: Any) -> Any:
    """Unsigned 64-bit hashes as the signed numbers with the same bits."""
    if not isinstance(hashes, list):
        return hashes
    return [
        value - 2**64 if type(value) is int and INT64_MAX < value < 2**64 else value
        for value in hashes
    ]
