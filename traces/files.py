"""What stands behind the path of a trace: a file, packed or not, a pipe, or a folder of shards."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import importlib
import io
import lzma
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from traces.formats import by_name, detect, known_formats
from traces.formats.base import BadRow, Head, Row, TraceError, TraceFormat, text_lines
from traces.tokenizer import TextTokenizer

_HEAD_LINES = 20
_HEAD_BYTES = 1 << 24
_TAR_MAGIC = slice(257, 262)


def _open_zstd(raw: BinaryIO) -> Any:
    try:
        zstd = importlib.import_module("compression.zstd")
    except ImportError:
        raise TraceError(
            "is packed with zstd, which Python can read from 3.14 on: unpack it first"
        ) from None
    return zstd.open(raw)


_PACKED: tuple[tuple[bytes, Callable[[BinaryIO], Any]], ...] = (
    (b"\x1f\x8b", gzip.open),
    (b"BZh", bz2.open),
    (b"\xfd7zXZ\x00", lzma.open),
    (b"\x28\xb5\x2f\xfd", _open_zstd),
)
"""First bytes of packed files, and what unpacks them."""


class _FileState(NamedTuple):
    """What differs once a file has been replaced, written to or cut."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int


class _Shard:
    """One file; what comes from a pipe is kept, as it can be read only once."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        """How messages call it; empty where the trace is this file alone."""
        self._path = path
        self._data: bytes | None = None
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                self._data = file.read()
            self._state = _state(file)
        self.num_bytes = self._state.num_bytes if self._data is None else len(self._data)

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Its bytes as they are stored. Raises `TraceError` where they changed since it was made."""
        if self._data is not None:
            yield io.BytesIO(self._data)
            return
        with self._path.open("rb") as file:
            if _state(file) != self._state:
                raise TraceError("has been changed since it was first looked at")
            yield file

    def check_unchanged(self, raw: BinaryIO) -> None:
        """After reading. Raises `TraceError`."""
        if self._data is None and _state(raw) != self._state:
            raise TraceError("was changed while it was read")


def _state(file: BinaryIO) -> _FileState:
    status = os.fstat(file.fileno())
    return _FileState(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class TraceFiles:
    """The files of a trace, and their format.

    A folder's shards are its files, hidden ones left out, in the order of their names: one format, one
    clock. Raises `TraceError`, here and in every method, without the path (``naming`` puts it there).

    Parameters
    ----------
    insisted
        Name of the format; recognised by content where ``None``.
    tokenizer
        Counts the tokens of a format of texts.
    """

    def __init__(
        self, path: Path, insisted: str | None, tokenizer: TextTokenizer | None = None
    ) -> None:
        self._bytes_before = 0
        self._raw: BinaryIO | None = None
        self.is_folder = path.is_dir()
        if self.is_folder:
            members = sorted(p for p in path.iterdir() if not p.name.startswith("."))
            self._shards = [_Shard(p, p.name) for p in members if p.is_file()]
            if not self._shards:
                raise TraceError("is a folder without files")
        else:
            self._shards = [_Shard(path, "")]
        self.num_bytes = sum(shard.num_bytes for shard in self._shards)
        """As stored, packed or not."""
        if self.num_bytes == 0:
            raise TraceError("is empty")
        self.format = by_name(insisted) if insisted is not None else self._detected()
        if tokenizer is not None:
            self.format = self.format.counting(tokenizer)

    def _detected(self) -> TraceFormat:
        names = {shard.name for shard in self._shards}
        clients = [name.removesuffix("-trace.csv") for name in names if name.endswith("-trace.csv")]
        if any(f"{client}-dataset.json" in names for client in clients):
            raise TraceError(
                "holds clients of ServeGen, which describe a load and are no trace: "
                "`python -m traces generate --servegen FOLDER` makes one of them"
            )
        first: _Shard | None = None
        found: TraceFormat | None = None
        for shard in self._shards:
            if shard.num_bytes == 0:
                continue
            with self._unpacked(shard) as (_, source):
                format_ = _detect(source)
            if found is not None and first is not None and format_.name != found.name:
                raise TraceError(
                    f"holds more than one format: {first.name} is {found.name}, "
                    f"{shard.name} is {format_.name}"
                )
            if found is None:
                first, found = shard, format_
        assert found is not None
        return found

    @property
    def num_files(self) -> int:
        return len(self._shards)

    @property
    def bytes_read(self) -> int:
        """How far the present iteration has come, of ``num_bytes``."""
        return self._bytes_before + (self._raw.tell() if self._raw is not None else 0)

    def rows(self) -> Iterator[Row | BadRow]:
        """Every row in order, good or bad; it can be done again."""
        self._bytes_before = 0
        for shard in self._shards:
            if shard.num_bytes == 0:
                continue
            with self._unpacked(shard) as (raw, source):
                self._raw = raw
                try:
                    for row in self.format.rows(source):
                        yield row._replace(file=shard.name) if shard.name else row
                    shard.check_unchanged(raw)
                finally:
                    self._raw = None
            self._bytes_before += shard.num_bytes

    def sha256(self) -> str:
        """Of the bytes as stored; of a folder, of its files' names and digests."""
        digests = []
        for shard in self._shards:
            with _about(shard), shard.opened() as raw:
                digest = hashlib.file_digest(raw, "sha256")  # type: ignore[arg-type]
            digests.append(f"{digest.hexdigest()}  {shard.name}\n")
        if not self.is_folder:
            return digests[0][:64]
        return hashlib.sha256("".join(digests).encode(errors="surrogateescape")).hexdigest()

    @contextmanager
    def _unpacked(self, shard: _Shard) -> Iterator[tuple[BinaryIO, BinaryIO]]:
        """The file as stored, and its content from the first byte on."""
        with _about(shard), shard.opened() as raw:
            start = raw.read(8)
            raw.seek(0)
            if start.startswith(b"PK\x03\x04"):
                raise TraceError("is a zip archive: unpack it first")
            opener = next((open_ for magic, open_ in _PACKED if start.startswith(magic)), None)
            if opener is None:
                yield raw, raw
                return
            try:
                with opener(raw) as unpacker:
                    source = cast(BinaryIO, io.BufferedReader(unpacker, 1 << 18))
                    if source.peek(512)[_TAR_MAGIC] == b"ustar":  # type: ignore[attr-defined]
                        raise TraceError("is a tar archive: unpack it into a folder first")
                    yield raw, source
            except (EOFError, zlib.error, lzma.LZMAError) as error:
                raise TraceError(f"is packed, and damaged: {_one_line(error)}") from None
            except OSError as error:
                if error.errno is not None:
                    raise
                raise TraceError(f"is packed, and damaged: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _detect(source: BinaryIO) -> TraceFormat:
    lines: list[bytes] = []
    size = 0
    for _, line in text_lines(source):
        lines.append(line)
        size += len(line)
        if len(lines) == _HEAD_LINES or size > _HEAD_BYTES:
            break
    found = detect(Head(lines))
    if found is None:
        source.seek(0)
        start = source.read(48)
        raise TraceError(
            f"no known format: it starts with {start!r}; known are {known_formats()}; "
            "choose with --format"
        )
    return found


@contextmanager
def _about(shard: _Shard) -> Iterator[None]:
    """Failures name the file of a folder."""
    try:
        yield
    except TraceError as error:
        raise TraceError(f"{shard.name}: {error}" if shard.name else str(error)) from None
    except OSError as error:
        if not shard.name:
            raise
        raise TraceError(f"{shard.name} cannot be read: {error.strerror or error}") from None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Every failure becomes one line that names the trace."""
    try:
        yield
    except FileNotFoundError:
        raise TraceError(f"trace {path}: no such file") from None
    except OSError as error:
        raise TraceError(f"trace {path}: cannot be read: {error.strerror or error}") from None
    except TraceError as error:
        raise type(error)(f"trace {path}: {error}") from None
