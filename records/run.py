"""The run record: a folder that drivers write and everything else reads.

| file | what |
|---|---|
| run.json | every resolved setting; its ``format`` says that this is a run record, and which |
| requests.parquet | one row a request (``records.columns.RequestRow``) |
| steps.parquet | one row a step (``records.columns.StepRow``); may be left out |
| gaps.parquet | ``gap_ns``, ``count``: every gap between consecutive tokens, pooled |
| summary.json | the metrics (docs/metrics.md) |

The same record gives the same bytes (with the same version of pyarrow).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from records.columns import GAP_SCHEMA, REQUEST_SCHEMA, STEP_SCHEMA, Columns, ColumnType
from records.gaps import GapCounts

FORMAT = "kvplan-run/1"
RECORD_FILES = ("run.json", "requests.parquet", "steps.parquet", "gaps.parquet", "summary.json")
PICTURES = ("latency", "kv_blocks", "queue", "throughput")
OTHER_OWN_NAMES = (
    "report.txt",
    *(f"{name}.{kind}" for name in PICTURES for kind in ("png", "svg")),
)
"""What else a driver may put in the folder, and a later run may replace."""
ROW_GROUP_ROWS = 65_536
_PARTIAL = ".kvplan-partial-"


class RecordError(ValueError):
    """A folder that cannot be read as a run record, or not be written as one; one clear line."""


@dataclass(frozen=True, slots=True, eq=False)
class RunRecord:
    """One run, simulated or measured."""

    settings: Mapping[str, Any]
    """run.json without its ``format``."""
    requests: Columns
    """Columns of ``REQUEST_SCHEMA``."""
    steps: Columns | None
    """Columns of ``STEP_SCHEMA``; ``None`` where the run was recorded without."""
    gaps: GapCounts
    summary: Mapping[str, Any]

    def write(
        self,
        folder: str | Path,
        *,
        steps: bool = True,
        extras: Callable[[Path], object] | None = None,
    ) -> None:
        """Write the folder, whole or not at all.

        Everything is written beside its place first, under a temporary name, and moved when it is
        complete. A folder that is there already must be empty or an earlier run record without
        foreign files; that record is then replaced (its run.json goes first and the new one comes
        last, so that a reader never takes half a record for one).

        Parameters
        ----------
        steps
            False leaves steps.parquet out.
        extras
            Called with the folder under its temporary name, to add what belongs there
            (``OTHER_OWN_NAMES``); what it raises leaves nothing behind either.

        Raises
        ------
        RecordError
            Where the folder holds something else or cannot be written.
        """
        target = Path(folder)
        check_writable(target)
        made: list[Path] = []
        partial: Path | None = None
        try:
            made = _make_parents(target)
            # Inside a folder that exists (it may be a mount point, or be somebody's working
            # directory), beside one that does not.
            home, is_new = (target, False) if target.exists() else (target.parent, True)
            for leftover in home.glob(f"{_PARTIAL}{target.name}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            partial = home / f"{_PARTIAL}{target.name}-{os.getpid()}"
            partial.mkdir()
            self._write_files(partial, steps=steps)
            if extras is not None:
                extras(partial)
            if is_new:
                partial.rename(target)
            else:
                _replace_contents(target, partial)
        except BaseException as error:
            if partial is not None:
                shutil.rmtree(partial, ignore_errors=True)
            for parent in reversed(made):
                _remove_if_empty(parent)
            if isinstance(error, OSError):
                raise RecordError(f"{folder}: cannot be written: {_reason(error)}") from error
            raise

    @classmethod
    def read(cls, folder: str | Path) -> RunRecord:
        """Read a folder that ``write`` made.

        Raises ``RecordError`` where it is missing, incomplete or damaged.
        """
        path = Path(folder)
        if not path.is_dir():
            found = "is not a folder" if path.exists() else "no such folder"
            raise RecordError(f"{folder}: {found}, expected a run record")
        if not (path / "run.json").is_file():
            raise RecordError(f"{folder}: not a run record (it has no run.json)")
        settings = _read_json(path / "run.json")
        found_format = settings.pop("format", None)
        if found_format != FORMAT:
            raise RecordError(
                f"{path / 'run.json'}: format is {found_format!r}, expected {FORMAT!r}"
            )
        gaps = _read_table(path / "gaps.parquet", GAP_SCHEMA)
        try:
            pooled = GapCounts.of(gaps["gap_ns"], gaps["count"])
        except ValueError as error:
            raise RecordError(f"{path / 'gaps.parquet'}: {error}") from error
        return cls(
            settings=settings,
            requests=_read_table(path / "requests.parquet", REQUEST_SCHEMA),
            steps=_read_table(path / "steps.parquet", STEP_SCHEMA)
            if (path / "steps.parquet").exists()
            else None,
            gaps=pooled,
            summary=_read_json(path / "summary.json"),
        )

    def _write_files(self, folder: Path, *, steps: bool) -> None:
        _write_json(folder / "run.json", {"format": FORMAT, **self.settings})
        _write_table(folder / "requests.parquet", self.requests, REQUEST_SCHEMA)
        if steps and self.steps is not None:
            _write_table(folder / "steps.parquet", self.steps, STEP_SCHEMA)
        gaps = {"gap_ns": self.gaps.gaps, "count": self.gaps.counts}
        _write_table(folder / "gaps.parquet", gaps, GAP_SCHEMA)
        _write_json(folder / "summary.json", self.summary)


def check_writable(folder: str | Path) -> None:
    """Raise ``RecordError`` where a run record could not be written; for use before a long run."""
    target = Path(folder)
    try:
        if target.is_dir():
            _check_replaceable(target)
            home = target
        elif target.exists() or target.is_symlink():
            raise RecordError(f"{folder}: is not a folder, expected a folder for the run record")
        else:
            home = next(parent for parent in target.absolute().parents if parent.exists())
            if not home.is_dir():
                raise RecordError(f"{folder}: cannot be written: {home} is not a folder")
    except OSError as error:
        raise RecordError(f"{folder}: cannot be written: {_reason(error)}") from error
    if not os.access(home, os.W_OK | os.X_OK):
        raise RecordError(f"{folder}: cannot be written: no permission to write in {home}")


def to_json(value: object) -> str:
    """JSON with its keys in the given order and floats as ``repr`` writes them.

    Raises ``ValueError`` for NaN and infinity, which JSON does not have.
    """
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=_plain) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def _is_record(folder: Path) -> bool:
    try:
        settings = json.loads((folder / "run.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and str(settings.get("format", "")).startswith("kvplan-run/")


def _check_replaceable(folder: Path) -> None:
    names = [p.name for p in folder.iterdir() if not p.name.startswith(_PARTIAL)]
    if not names:
        return
    if not _is_record(folder):
        raise RecordError(
            f"{folder}: is not empty and is not a run record, expected a new or empty folder"
        )
    foreign = sorted(set(names) - {*RECORD_FILES, *OTHER_OWN_NAMES})
    if foreign:
        raise RecordError(
            f"{folder}: holds {foreign[0]!r}, which no run wrote, beside a run record that would "
            "be replaced; expected a new or empty folder"
        )


def _make_parents(target: Path) -> list[Path]:
    """Create what is missing above ``target``; the folders made, outermost first."""
    missing = [p for p in target.absolute().parents if not p.exists()]
    made: list[Path] = []
    try:
        for parent in reversed(missing):
            parent.mkdir()
            made.append(parent)
    except OSError:
        for parent in reversed(made):
            _remove_if_empty(parent)
        raise
    return made


def _replace_contents(target: Path, partial: Path) -> None:
    new = sorted(p.name for p in partial.iterdir() if p.name != "run.json")
    (target / "run.json").unlink(missing_ok=True)
    for old in target.iterdir():
        if old == partial:
            continue
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink()
    for name in (*new, "run.json"):
        (partial / name).rename(target / name)
    partial.rmdir()


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return


def _reason(error: BaseException) -> str:
    """One line of an error, without the path that the caller names anyway."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text.splitlines() or [type(error).__name__])[0]


def _write_json(path: Path, value: object) -> None:
    path.write_text(to_json(value), encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RecordError(f"{path}: missing, the run record is incomplete") from None
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read as JSON: {_reason(error)}") from error
    if not isinstance(value, dict):
        raise RecordError(f"{path}: is a JSON {type(value).__name__}, expected an object")
    return value


def _import_pyarrow() -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet, which take their time to load and carry no usable types."""
    return import_module("pyarrow"), import_module("pyarrow.parquet")


def _write_table(path: Path, columns: Columns, schema: Mapping[str, ColumnType]) -> None:
    pa, pq = _import_pyarrow()
    types = {"i": pa.int64(), "f": pa.float64(), "s": pa.string()}
    fields = [
        pa.field(name, types[kind[0]], nullable=kind.endswith("?")) for name, kind in schema.items()
    ]
    num_rows = len(columns[next(iter(schema))])
    # A row group at a time: a whole table would be there twice.
    with pq.ParquetWriter(path, pa.schema(fields), compression="zstd") as writer:
        for start in range(0, max(num_rows, 1), ROW_GROUP_ROWS):
            arrays = []
            for name, kind in schema.items():
                data = columns[name][start : start + ROW_GROUP_ROWS]
                if kind == "int64?":
                    masked = np.ma.MaskedArray(data)
                    mask = np.ma.getmaskarray(masked)
                    arrays.append(pa.array(masked.filled(0), types["i"], mask=mask))
                else:
                    arrays.append(
                        pa.array(
                            np.ascontiguousarray(data) if kind[0] != "s" else data, types[kind[0]]
                        )
                    )
            table = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
            writer.write_table(table, row_group_size=ROW_GROUP_ROWS)


def _read_table(path: Path, schema: Mapping[str, ColumnType]) -> Columns:
    pa, pq = _import_pyarrow()
    if not path.is_file():
        raise RecordError(f"{path}: missing, the run record is incomplete")
    try:
        with pq.ParquetFile(path) as file:
            table = file.read()
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{path}: cannot be read as Parquet: {_reason(error)}") from error
    columns: dict[str, Any] = {}
    for name, kind in schema.items():
        if name not in table.column_names:
            raise RecordError(f"{path}: has no column {name!r}")
        column = table.column(name)
        if not column.type.equals({"i": pa.int64(), "f": pa.float64(), "s": pa.string()}[kind[0]]):
            raise RecordError(f"{path}: column {name!r} is {column.type}, expected {kind}")
        if column.null_count and not kind.endswith("?"):
            raise RecordError(f"{path}: column {name!r} has {column.null_count} missing values")
        columns[name] = _to_column(column, kind)
    return columns


def _to_column(column: Any, kind: ColumnType) -> Any:
    if kind.startswith("str"):
        return column.to_pylist()
    if kind != "int64?":
        return column.to_numpy()
    missing = column.is_null().to_numpy()
    return np.ma.MaskedArray(column.fill_null(0).to_numpy(), mask=missing)
