"""Runs of which each request was recorded: request logs, vLLM's benchmark results, run records."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from blockmanager.content import HashedContent
from catalog import CatalogError, gpu_names, load_gpu
from records.columns import Columns
from records.run import RunRecord
from scheduler.request import Request
from simulator.measured.kernel_tables import TableError
from simulator.measured.served import NS, Metrics, ServedRun, read_csv, read_text
from simulator.settings import Options
from traces.workload import Arrival, OpenLoop

RANKS = (50, 95)


class Times(NamedTuple):
    """What a request felt, s."""

    ttft: float
    tpot: float | None
    """``None`` of one output token."""
    e2e: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLog:
    """A measured run with a row per request."""

    run: ServedRun
    times: Mapping[str, Times]
    start_s: float
    """Of the first arrival, on the log's clock; the end is that of the last answer."""
    series: Sequence[Mapping[str, str]]
    """Running, waiting and KV use each second, where they were recorded."""

    @property
    def ids(self) -> list[str]:
        """In order of arrival."""
        return list(self.times)


class _Row(NamedTuple):
    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    e2e_s: float


def load_log(path: Path, given: Options) -> RequestLog:
    """A log of any kind that is known; ``given`` options stand above what the log says of the server.

    A folder with ``requests.jsonl`` and ``meta.json`` (LLMServingSim's recorder of vLLM), a run record, or
    the JSON of ``vllm bench serve --save-result --save-detailed``.

    Raises ``TableError`` with what was expected.
    """
    try:
        if (path / "requests.jsonl").is_file():
            return _recorded(path, given)
        if (path / "run.json").is_file():
            return _run_record(path, given)
        if path.is_file():
            return _bench(path, given)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise TableError(f"{path}: not what such a log has: {error!r}") from None
    except json.JSONDecodeError as error:
        raise TableError(f"{path}: not JSON: {error}") from None
    raise TableError(
        f"{path}: no log of requests, expected a folder with requests.jsonl and meta.json, a run record, or "
        "the JSON of vllm bench serve --save-detailed"
    )


def _recorded(folder: Path, given: Options) -> RequestLog:
    meta = json.loads(read_text(folder / "meta.json"))
    raw = [json.loads(line) for line in read_text(folder / "requests.jsonl").splitlines() if line]
    # Times of one clock: arrival_time is of another.
    rows = [
        _Row(
            row["request_id"],
            row["queued_ts"],
            row["input_toks"],
            row["output_toks"],
            row["first_token_ts"] - row["queued_ts"],
            row["last_token_ts"] - row["queued_ts"],
        )
        for row in raw
    ]
    engine = meta["engine_kwargs"]
    options = Options(
        model=meta["model"],
        gpu=_gpu_of((meta.get("hardware") or {}).get("device_name") or folder.parent.name),
        tensor_parallel_size=engine["tensor_parallel_size"],
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        max_model_len=engine["max_model_len"],
        num_gpu_blocks=(meta.get("kv_cache") or {}).get("num_gpu_blocks"),
    )
    series = folder / "timeseries.csv"
    return _log(
        f"{folder.parent.name} {folder.name}",
        _over(options, given),
        rows,
        by_client=False,
        series=read_csv(series) if series.is_file() else (),
    )


def _gpu_of(device: str) -> str:
    """A catalogue name for what a driver calls the GPU."""
    words = [word for word in device.split() if word.lower() not in ("nvidia", "geforce")]
    try:
        return load_gpu(" ".join(words)).name
    except CatalogError as error:
        bare = "".join(words).lower().replace("-", "")
        for name in sorted(gpu_names(), key=len, reverse=True):
            plain = name.replace("-", "")
            if bare.startswith(plain) or plain.startswith(bare):
                return name
        raise TableError(f"GPU {device!r} of the log: {error}; name it with --gpu") from None


def _bench(path: Path, given: Options) -> RequestLog:
    data = json.loads(read_text(path))
    if not isinstance(data, dict) or "input_lens" not in data or "ttfts" not in data:
        raise TableError(
            f"{path}: no input_lens and ttfts, expected the JSON of vllm bench serve --save-detailed"
        )
    starts = data.get("start_times")
    lengths = {
        name: len(data[name])
        for name in ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
        if isinstance(data.get(name), list)
    }
    if len(set(lengths.values())) > 1:
        raise TableError(f"{path}: its arrays are not of one length: {lengths}")
    if starts is None:
        raise TableError(
            f"{path}: has no start_times, so that nobody knows when its requests came (vLLM records them "
            "since 2025)"
        )
    errors = data.get("errors") or [""] * len(starts)
    rows = []
    for index, start in enumerate(starts):
        gaps, ttft, outputs = (
            data["itls"][index],
            data["ttfts"][index],
            data["output_lens"][index],
        )
        if errors[index] or not outputs or not ttft:
            continue  # failed, whatever `completed` says
        rows.append(
            _Row(
                str(index), start, data["input_lens"][index], outputs, ttft, ttft + float(sum(gaps))
            )
        )
    failed = len(starts) - len(rows)
    notes = [f"{failed} requests failed or have no output, and are left out"] if failed else []
    options = Options(model=data.get("model_id"))
    return _log(path.name, _over(options, given), rows, by_client=True, notes=notes)


def _run_record(folder: Path, given: Options) -> RequestLog:
    record = RunRecord.read(folder)
    settings = record.settings
    names = {item.name for item in fields(Options)} - {"slo", "calibration", "kv_gb", "swap_space"}
    sources = settings.get("sources", {})
    known = {
        name: settings[name]
        for name in names & settings.keys()
        if settings[name] is not None and sources.get(name, {}).get("source") != "derived"
    }
    known["num_gpu_blocks"] = settings["num_blocks"] + 1
    known.pop("gpu_memory_utilization", None)
    if settings.get("device") == "simulated" and settings.get("calibration"):
        raise TableError(
            f"{folder}: a simulated run with a calibration, which is not in the record"
        )
    requests = record.requests
    rows = []
    for row, status in enumerate(requests["status"]):
        if status != "completed":
            continue
        arrival, first, finish = (
            int(requests[name][row]) for name in ("arrival_ns", "first_token_ns", "finish_ns")
        )
        rows.append(
            _Row(
                requests["id"][row],
                arrival / NS,
                int(requests["prompt_tokens"][row]),
                int(requests["output_tokens"][row]),
                (first - arrival) / NS,
                (finish - arrival) / NS,
            )
        )
    notes = []
    hits = int(np.sum(requests["cached_tokens"]))
    if hits:
        share = hits / max(int(np.sum(requests["prompt_tokens"])), 1)
        notes.append(
            f"beware: {share:.0%} of its prompt tokens were prefix hits, and a record does not say between "
            "which requests: none are simulated"
        )
    others = len(requests["status"]) - len(rows)
    if others:
        notes.append(f"{others} requests were not completed, and are left out")
    return _log(folder.name, _over(Options(**known), given), rows, by_client=False, notes=notes)


def _over(options: Options, given: Options) -> Options:
    named = {
        item.name: value
        for item in fields(Options)
        if (value := getattr(given, item.name)) is not None
    }
    return replace(options, **named)


def _log(
    name: str,
    options: Options,
    rows: list[_Row],
    *,
    by_client: bool,
    series: Sequence[Mapping[str, str]] = (),
    notes: Sequence[str] = (),
) -> RequestLog:
    _check(name, rows)
    rows = sorted(rows, key=lambda row: row.arrival_s)
    start = rows[0].arrival_s
    arrivals = [
        Arrival(
            Request(
                id=row.id,
                arrival_ns=round((row.arrival_s - start) * NS),
                num_prompt_tokens=row.prompt_tokens,
                # Its own content and nobody else's: found again after a preemption.
                content=HashedContent(
                    np.arange(row.prompt_tokens, dtype=np.int64) + (index << 32),
                    1,
                    row.prompt_tokens,
                ),
                max_tokens=row.output_tokens,
            ),
            row.output_tokens,
        )
        for index, row in enumerate(rows)
    ]
    times = {
        row.id: Times(
            row.ttft_s,
            (row.e2e_s - row.ttft_s) / (row.output_tokens - 1) if row.output_tokens > 1 else None,
            row.e2e_s,
        )
        for row in rows
    }
    makespan = max(row.arrival_s + row.e2e_s for row in rows) - start
    return RequestLog(
        run=ServedRun(
            name=name,
            group="request logs",
            options=options,
            workload=partial(OpenLoop, arrivals),
            measured={**statistics(times.values()), "makespan": makespan},
            by_client=by_client,
            metrics=_metrics,
            notes=("prompts are taken to share nothing with one another", *notes),
        ),
        times=times,
        start_s=start,
        series=series,
    )


def _check(name: str, rows: Sequence[_Row]) -> None:
    """Raises ``TableError`` for a row that no server can have recorded."""
    if not rows:
        raise TableError(f"{name}: no request that was answered")
    seen = set()
    for row in rows:
        where = f"{name}: request {row.id}"
        if row.id in seen:
            raise TableError(f"{where}: is there twice")
        seen.add(row.id)
        for what, count in (("input", row.prompt_tokens), ("output", row.output_tokens)):
            if type(count) is not int or not 1 <= count < 2**31:
                raise TableError(f"{where}: {what} tokens are {count!r}, expected at least 1")
        for what, value, least in (
            ("arrival", row.arrival_s, -math.inf),
            ("TTFT", row.ttft_s, 0.0),
            ("E2E", row.e2e_s, 0.0),
        ):
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if not is_number or not least < value < 1e10:
                raise TableError(f"{where}: {what} is {value!r} s, expected a time above 0")
        if row.e2e_s < row.ttft_s:
            raise TableError(f"{where}: its last token came before its first")


def makespan_of(log: RequestLog, times: Mapping[str, Times]) -> float:
    """From the first arrival to the last end, s, with ``times`` instead of the log's."""
    starts = {a.request.id: a.request.arrival_ns / NS for a in log.run.workload().initial()}
    return max(starts[name] + felt.e2e for name, felt in times.items())


def statistics(times: Iterable[Times]) -> Metrics:
    """Mean, p50 and p95 of TTFT, TPOT and E2E, s."""
    rows = list(times)
    found: Metrics = {}
    for name, values in (
        ("TTFT", [row.ttft for row in rows]),
        ("TPOT", [row.tpot for row in rows if row.tpot is not None]),
        ("E2E", [row.e2e for row in rows]),
    ):
        if not values:
            continue
        found[f"{name} mean"] = float(np.mean(values))
        for rank in RANKS:
            found[f"{name} p{rank}"] = float(np.percentile(values, rank))
    return found


def times_of(requests: Columns) -> dict[str, Times]:
    """The same of a simulated run, by id."""
    found = {}
    columns = (requests[name] for name in ("arrival_ns", "first_token_ns", "finish_ns"))
    for name, arrival, first, finish, outputs, status in zip(
        requests["id"], *columns, requests["output_tokens"], requests["status"], strict=True
    ):
        if status != "completed":
            continue
        ttft, e2e = float(first - arrival) / NS, float(finish - arrival) / NS
        tpot = (e2e - ttft) / (int(outputs) - 1) if outputs > 1 else None
        found[name] = Times(ttft, tpot, e2e)
    return found


def _metrics(requests: Columns) -> Metrics:
    found = statistics(times_of(requests).values())
    finish = requests["finish_ns"]
    found["makespan"] = float(np.max(finish) - np.min(requests["arrival_ns"])) / NS
    return found
