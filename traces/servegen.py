"""ServeGen's clients as a generator: arrivals per client and window, lengths from their histograms.

https://github.com/alibaba/ServeGen (Apache-2.0; Xiang et al. 2025, arXiv 2505.09999). A model of a
workload, not a list of requests. A folder has two files for each client:

- ``NAME-trace.csv``, no header: start of the window (s), requests/s, CV of the gaps, their law
  (``Gamma``, ``Weibull`` or nothing), its shape, its scale (s);
- ``NAME-dataset.json``: start of a window (s) -> field -> ``"{tokens: probability, ...}"``, a
  Python literal in a string, which is read as a literal and never run.

The rate of a window and the shape of its gaps are kept; the scale follows from the rate (in public
files the fitted scale gives another rate here and there). Prompt and output are drawn on their own.
"""

from __future__ import annotations

import ast
import bisect
import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from traces.formats.base import MAX_TOKENS, TraceError
from traces.laws import Gamma, Poisson, Process, Stream, Weibull, check, weibull_cv

_NS, _MS = 1_000_000_000, 1_000_000
_TRACE, _DATASET = "-trace.csv", "-dataset.json"
_MODALITIES = ("image", "audio", "video")
_FIELDS = {
    *("input_tokens", "text_tokens", "output_tokens"),
    *(f"{kind}_{what}" for kind in _MODALITIES for what in ("tokens", "count")),
}
_WINDOW_S = 600.0
"""Length of the last window of a client; the others end where the next one starts."""
_MAX_REQUESTS = 10_000_000


class Window(NamedTuple):
    """What one client does from ``start_s`` on."""

    start_s: float
    rate: float
    process: Process


@dataclass(frozen=True, slots=True)
class Client:
    """One sender of requests."""

    name: str
    windows: tuple[Window, ...]
    """By start."""
    dataset: Path | None
    """``None``: its lengths are not known."""

    def rate(self, start_s: float, end_s: float) -> float:
        """Mean requests per second in between."""
        parts = self.within(start_s, end_s)
        return sum(w.rate * (end - start) for w, start, end in parts) / (end_s - start_s)

    def within(self, start_s: float, end_s: float) -> Iterator[tuple[Window, float, float]]:
        """Windows that overlap, cut to what does."""
        ends = [w.start_s for w in self.windows[1:]] + [self.windows[-1].start_s + _WINDOW_S]
        for window, until in zip(self.windows, ends, strict=True):
            start, end = max(window.start_s, start_s), min(until, end_s)
            if start < end and window.rate > 0:
                yield window, start, end


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeGenSettings:
    """What `generate_servegen` makes of the clients in a folder."""

    start_s: float = 0.0
    """Of the part to generate, on the clock of the files; it becomes time 0."""
    duration_s: float = 3_600.0
    rate: float | None = None
    """Requests per second on average over the part; ``None`` = as the files have it."""
    seed: int = 0

    def __post_init__(self) -> None:
        check("start_s", self.start_s, 0, 1e9)
        check("duration_s", self.duration_s, 1e-3, 1e8)
        check("seed", self.seed, 0, 2**63)
        if self.rate is not None:
            check("rate", self.rate, 1e-6, 1e6)


class Made(NamedTuple):
    """Rows in the native format and what was assumed to make them."""

    rows: list[dict[str, Any]]
    notes: list[str]


def read_servegen(folder: str | Path) -> list[Client]:
    """The clients of a folder, by name. Raises `TraceError`, with the file and line where it can."""
    folder = Path(folder)
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(_TRACE))
        if not paths:
            raise TraceError(f"{folder}: no client here, expected files *{_TRACE}")
        return [_client(path) for path in paths]
    except OSError as error:
        raise TraceError(f"{folder}: cannot be read: {error.strerror or error}") from None


def _client(path: Path) -> Client:
    windows = []
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for line, row in enumerate(csv.reader(file), 1):
            if row:
                windows.append(_window(row, f"{path}, line {line}"))
    if not windows or any(a.start_s >= b.start_s for a, b in pairwise(windows)):
        raise TraceError(f"{path}: expected windows whose starts rise, found {len(windows)}")
    dataset = path.with_name(path.name.removesuffix(_TRACE) + _DATASET)
    return Client(
        path.name.removesuffix(_TRACE), tuple(windows), dataset if dataset.exists() else None
    )


def _window(row: list[str], where: str) -> Window:
    wanted = "start_s,rate,cv,Gamma|Weibull|nothing,shape,scale"
    try:
        start, rate, _, law, shape, _ = row
        start_s, per_s, k = float(start), float(rate), float(shape or 0)
    except ValueError:
        raise TraceError(f"{where}: expected {wanted}") from None
    if not (0 <= start_s < 1e12 and 0 <= per_s < 1e9):
        raise TraceError(f"{where}: start {start} or rate {rate} is out of range")
    if per_s == 0 or not law:
        return Window(start_s, per_s, Poisson())
    if law not in ("Gamma", "Weibull") or not 1e-4 <= k <= 1e9:
        raise TraceError(f"{where}: gaps of {law} with shape {shape}, expected {wanted}")
    return Window(
        start_s, per_s, Gamma(max(0.01, k**-0.5)) if law == "Gamma" else Weibull(weibull_cv(k))
    )


def generate_servegen(clients: list[Client], settings: ServeGenSettings) -> Made:
    """Requests of all clients whose lengths are known, by arrival. Raises `TraceError` where none is.

    Each client has streams of its own, so leaving one out does not change the others.
    """
    start_s, end_s = settings.start_s, settings.start_s + settings.duration_s
    known = [client for client in clients if client.dataset is not None]
    total = sum(client.rate(start_s, end_s) for client in known)
    if total == 0:
        raise TraceError(
            f"no client with lengths sends anything from {start_s:g} s to {end_s:g} s "
            f"({len(clients)} clients, {len(known)} with lengths)"
        )
    factor = 1.0 if settings.rate is None else settings.rate / total
    if total * factor * settings.duration_s > _MAX_REQUESTS:
        raise TraceError(
            f"{total * factor:,.1f} requests/s for {settings.duration_s:g} s are more than "
            f"{_MAX_REQUESTS:,}: give a lower rate or a shorter duration"
        )
    notes = [
        f"{len(known)} clients, {total:.4g} requests/s on average as recorded",
        "Prompt and output lengths are drawn independently of each other; no prefixes are made.",
    ]
    if silent := [client for client in clients if client.dataset is None]:
        lost = sum(client.rate(start_s, end_s) for client in silent)
        notes.append(
            f"{len(silent)} clients ({lost:.4g} requests/s) left out: no lengths in the folder"
        )
    if factor != 1.0:
        notes.append(f"Rates of all clients x {factor:.4g}, the shapes of their gaps kept")
    rows: list[tuple[int, int, int, str]] = []
    multimodal = moved = 0
    for client, seed in zip(known, _seeds(clients, known, settings.seed), strict=True):
        times, draws = (Stream(child) for child in seed.spawn(2))
        lengths = _Lengths(client)
        for window, start, end in client.within(start_s, end_s):
            rows += (
                (round((now - start_s) * 1_000), *lengths.draw(now, draws.rng), client.name)
                for now in window.process.times(window.rate * factor, start, end, times)
            )
        multimodal += lengths.is_multimodal
        moved += lengths.moved
    if multimodal:
        notes.append(
            "Image, audio and video tokens are those of one item; as many are added as drawn"
        )
    if moved:
        notes.append(
            f"{moved} windows of lengths are empty: the client's nearest other one is used"
        )
    if not rows:
        raise TraceError(
            f"no request falls into {settings.duration_s:g} s: raise the rate or the duration"
        )
    rows.sort()
    return Made(
        [
            {
                "id": f"r{index}",
                "arrival_s": ms / 1_000,
                "prompt_tokens": prompt,
                "output_tokens": output,
            }
            for index, (ms, prompt, output, _) in enumerate(rows)
        ],
        notes,
    )


def servegen_lines(made: Made) -> Iterator[str]:
    """The rows as JSON lines."""
    for row in made.rows:
        yield json.dumps(row, separators=(",", ":")) + "\n"


def _seeds(clients: list[Client], known: list[Client], seed: int) -> list[np.random.SeedSequence]:
    every = dict(
        zip(
            (c.name for c in clients), np.random.SeedSequence(seed).spawn(len(clients)), strict=True
        )
    )
    return [every[client.name] for client in known]


class _Histogram(NamedTuple):
    values: npt.NDArray[np.int64]
    cumulated: npt.NDArray[np.float64]

    def draw(self, rng: np.random.Generator) -> int:
        index = int(
            np.searchsorted(self.cumulated, rng.random() * self.cumulated[-1], side="right")
        )
        return int(self.values[min(index, len(self.values) - 1)])


class _Lengths:
    """The histograms of one client, read when first needed."""

    def __init__(self, client: Client) -> None:
        assert client.dataset is not None
        self._path = client.dataset
        self._read: dict[int, dict[str, _Histogram]] = {}
        try:
            record = json.loads(self._path.read_bytes())
            self._starts = sorted((float(start), start) for start in record)
            self._record: dict[str, dict[str, str]] = record
            filled = [
                index for index, (_, key) in enumerate(self._starts) if self._is_filled(record[key])
            ]
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise TraceError(
                f"{self._path}: is not start -> field -> '{{tokens: probability}}'"
            ) from None
        if not filled:
            raise TraceError(f"{self._path}: no window has both prompt and output lengths")
        self._filled = filled
        self.is_multimodal = any("text_tokens" in record[key] for _, key in self._starts)
        self.moved = len(self._starts) - len(filled)
        """Windows without lengths."""

    @staticmethod
    def _is_filled(fields: dict[str, str]) -> bool:
        prompt = fields.get("input_tokens", fields.get("text_tokens", "{}"))
        return "{}" not in (prompt.strip(), fields.get("output_tokens", "{}").strip())

    def draw(self, now_s: float, rng: np.random.Generator) -> tuple[int, int]:
        """Prompt and output tokens, at least one of each."""
        window = max(0, bisect.bisect_right(self._starts, (now_s, "~")) - 1)
        fields = self._fields(min(self._filled, key=lambda index: abs(index - window)))
        prompt = fields["input_tokens" if "input_tokens" in fields else "text_tokens"].draw(rng)
        for kind in _MODALITIES:
            count = fields.get(f"{kind}_count")
            for _ in range(0 if count is None else count.draw(rng)):
                prompt += fields[f"{kind}_tokens"].draw(rng)
        return max(1, min(prompt, MAX_TOKENS)), max(1, fields["output_tokens"].draw(rng))

    def _fields(self, index: int) -> dict[str, _Histogram]:
        if index not in self._read:
            key = self._starts[index][1]
            self._read[index] = {
                name: self._histogram(text, f"window {key}, {name}")
                for name, text in self._record[key].items()
                if name in _FIELDS and text.strip() != "{}"
            }
        return self._read[index]

    def _histogram(self, text: str, where: str) -> _Histogram:
        try:
            pairs = sorted(ast.literal_eval(text).items())
            values = np.array([value for value, _ in pairs], dtype=np.int64)
            shares = np.array([share for _, share in pairs], dtype=np.float64)
            if not (
                len(pairs) and values[0] >= 0 and values[-1] <= MAX_TOKENS and (shares >= 0).all()
            ):
                raise ValueError
            total = float(shares.sum())
            if not (math.isfinite(total) and total > 0):
                raise ValueError
        except (
            ValueError,
            TypeError,
            SyntaxError,
            AttributeError,
            OverflowError,
            MemoryError,
            RecursionError,
        ):
            raise TraceError(
                f"{self._path}, {where}: expected {{tokens: probability, ...}}"
            ) from None
        return _Histogram(values, np.cumsum(shares))
