"""Replay a scenario and print every decision, in the log format of the conformance data.

A scenario is a JSON object: ``config`` (vLLM's names; ``num_gpu_blocks`` counts vLLM's null block),
and ``requests`` with an arrival step or time, a prompt (token ids, or segments of a formula) and
the length of the output. One token is made up for each request that samples, so prefix hits on
outputs are as real as those on prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from blockmanager.content import TokenContent
from blockmanager.manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.plan import StepOutcome, StepPlan, StepResult
from scheduler.policies import load_policy
from scheduler.request import Request
from scheduler.scheduler import RequestRefusedError, Scheduler
from scheduler.sequence import Sequence

NS_PER_S = 1_000_000_000

_CONFIG_DEFAULTS: Mapping[str, Any] = {
    "num_gpu_blocks": 1001,
    "block_size": 16,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "max_model_len": 8192,
    "long_prefill_token_threshold": 0,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "policy": "fcfs",
    "watermark": 0.0,
    "scheduler_reserve_full_isl": True,
    "clock": None,
    "max_steps": 1_000_000,
    "dump_queues": False,
    "dump_free_queue": False,
    # Ours alone:
    "preemption_mode": "recompute",
    "num_swap_blocks": 0,
}


class ScenarioError(ValueError):
    """A scenario that cannot be run; the message says what, where and what was expected."""


def formula_tokens(seed: int, start: int, length: int) -> npt.NDArray[np.int64]:
    """Tokens ``start`` to ``start + length`` of the made-up text ``seed`` (int64, ``[length]``)."""
    i = np.arange(start, start + length, dtype=np.int64)
    return (seed * 7919 + i * 104729 + (seed * (i + 1)) % 9973) % 31991


@dataclass(frozen=True, slots=True)
class StepClock:
    """A step of T tokens of N sequences lasts base + per_token x T + per_seq x N."""

    base_ns: int
    per_token_ns: int
    per_seq_ns: int

    def duration_ns(self, plan: StepPlan) -> int:
        num_seqs = len(plan.sequences)
        return self.base_ns + self.per_token_ns * plan.num_tokens + self.per_seq_ns * num_seqs


@dataclass(frozen=True, slots=True)
class ScenarioRequest:
    request: Request
    output_tokens: npt.NDArray[np.int64]
    arrival_step: int | None


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    scheduler_config: SchedulerConfig
    num_gpu_blocks: int
    block_size: int
    enable_prefix_caching: bool
    watermark: float
    policy: str
    num_swap_blocks: int
    clock: StepClock | None
    max_steps: int
    dump_queues: bool
    dump_free_queue: bool
    requests: tuple[ScenarioRequest, ...]

    def scheduler(self) -> Scheduler:
        blocks = BlockManager(
            self.num_gpu_blocks - 1,
            self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            # vLLM takes the fraction of all blocks, the null block included.
            watermark_blocks=int(self.watermark * self.num_gpu_blocks),
            num_swap_blocks=self.num_swap_blocks,
        )
        return Scheduler(self.scheduler_config, blocks, load_policy(self.policy))


def load_scenario(path: Path) -> Scenario:
    """Read a scenario file. Raises ``ScenarioError``."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ScenarioError(f"{path}: not JSON: {error}") from error
    try:
        return parse_scenario(data, path.stem)
    except (ValueError, TypeError) as error:
        raise ScenarioError(f"{path}: {error}") from error


def parse_scenario(data: Any, name: str = "scenario") -> Scenario:
    """A scenario from its JSON object. Raises ``ValueError`` or ``TypeError``."""
    if not isinstance(data, dict) or not isinstance(data.get("requests"), list):
        raise ValueError("expected an object with a list of requests")
    given = data.get("config", {})
    if not isinstance(given, dict):
        raise ValueError("config: expected an object")
    unknown = sorted(given.keys() - _CONFIG_DEFAULTS.keys())
    if unknown:
        raise ValueError(f"config: unknown {', '.join(unknown)}")
    config = {**_CONFIG_DEFAULTS, **given}
    _check_types(config)
    if config["num_gpu_blocks"] < 2:
        raise ValueError(
            f"num_gpu_blocks is {config['num_gpu_blocks']}, must be at least 2 (one is the null block)"
        )
    clock = config["clock"]
    scenario = Scenario(
        name=data.get("name", name),
        scheduler_config=SchedulerConfig(
            **{
                key: config[key]
                for key in (
                    "max_num_seqs",
                    "max_num_batched_tokens",
                    "max_model_len",
                    "long_prefill_token_threshold",
                    "enable_chunked_prefill",
                    "scheduler_reserve_full_isl",
                    "preemption_mode",
                )
            }
        ),
        num_gpu_blocks=config["num_gpu_blocks"],
        block_size=config["block_size"],
        enable_prefix_caching=config["enable_prefix_caching"],
        watermark=config["watermark"],
        policy=config["policy"],
        num_swap_blocks=config["num_swap_blocks"],
        clock=None
        if clock is None
        else StepClock(*(round(clock[key] * NS_PER_S) for key in ("base", "per_token", "per_seq"))),
        max_steps=config["max_steps"],
        dump_queues=config["dump_queues"],
        dump_free_queue=config["dump_free_queue"],
        requests=tuple(_parse_request(row, i) for i, row in enumerate(data["requests"])),
    )
    seen: set[str] = set()
    for index, entry in enumerate(scenario.requests):
        if entry.request.id in seen:
            raise ValueError(f"request {index}: id {entry.request.id!r} is used twice")
        seen.add(entry.request.id)
        if clock is None and entry.arrival_step is None:
            raise ValueError(f"request {index}: arrival_time needs a clock, or give arrival_step")
    scenario.scheduler()  # what only the policy and the block manager can check
    return scenario


def _check_types(config: Mapping[str, Any]) -> None:
    for key, default in _CONFIG_DEFAULTS.items():
        value = config[key]
        if key == "clock":
            names = ("base", "per_token", "per_seq")
            if value is not None and not (
                isinstance(value, dict)
                and all(isinstance(value.get(name), (int, float)) for name in names)
            ):
                raise ValueError(
                    f"config: clock is {value!r}, expected null or {', '.join(names)} in seconds"
                )
            continue
        kind = (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, kind) or (
            isinstance(value, bool) and not isinstance(default, bool)
        ):
            name = "a number" if isinstance(default, float) else type(default).__name__
            raise ValueError(f"config: {key} is {value!r}, expected {name}")


def _parse_request(row: Any, index: int) -> ScenarioRequest:
    where = f"request {index}"
    try:
        if "prompt" in row:
            prompt = np.asarray(row["prompt"], dtype=np.int64)
        else:
            parts = [
                formula_tokens(s["seed"], s.get("start", 0), s["len"]) for s in row["segments"]
            ]
            prompt = np.concatenate(parts)
        output_len = row["output_len"]
        outputs = formula_tokens(row.get("out_seed", 100_000 + index), 0, output_len)
        arrival_step = row.get("arrival_step")
        if arrival_step is None:
            arrival_ns = round(row["arrival_time"] * NS_PER_S)
        else:
            # Orders requests of equal priority as their place in the list does.
            arrival_ns = arrival_step * NS_PER_S + index * 1000
        request = Request(
            id=row["id"],
            arrival_ns=arrival_ns,
            num_prompt_tokens=len(prompt),
            content=TokenContent(prompt),
            max_tokens=output_len,
            priority=row.get("priority", 0),
        )
    except KeyError as error:
        raise ValueError(f"{where}: {error.args[0]} is missing") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    return ScenarioRequest(request, outputs, arrival_step)


def replay(scenario: Scenario, *, explain: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Run a scenario; one log entry a step, and a last one that says how it ended.

    ``explain`` collects a sentence for each refusal and preemption. A refused request appears as
    ``refuse`` in the step of its arrival (a key of ours: vLLM lets it block the queue).
    """
    scheduler = scenario.scheduler()
    todo = sorted(scenario.requests, key=lambda r: r.request.arrival_ns)
    outputs = {r.request.id: r.output_tokens for r in scenario.requests}
    step, now_ns, next_arrival = 0, 0, 0

    def is_due(entry: ScenarioRequest) -> bool:
        if scenario.clock is None:
            assert entry.arrival_step is not None
            return entry.arrival_step <= step
        return entry.request.arrival_ns <= now_ns

    while True:
        if not scheduler.num_unfinished and next_arrival < len(
            todo
        ):  # idle: on to the next arrival
            entry = todo[next_arrival]
            step = max(step, entry.arrival_step or 0)
            now_ns = max(now_ns, entry.request.arrival_ns)
        arrived, refused = [], {}
        while next_arrival < len(todo) and is_due(todo[next_arrival]):
            request = todo[next_arrival].request
            next_arrival += 1
            arrived.append(request.id)
            try:
                scheduler.add(request)
            except RequestRefusedError as error:
                refused[request.id] = error.reason
                if explain is not None:
                    explain.append(f"step {step}: {error}")
        if not scheduler.num_unfinished and next_arrival == len(todo) and not arrived:
            ending = "drained"
            break
        if step >= scenario.max_steps:
            ending = "max_steps"
            break
        entry_log: dict[str, Any] = {"step": step}
        if scenario.clock is not None:
            entry_log["t"] = round(now_ns / NS_PER_S, 6)
        entry_log |= {"arrive": arrived, "refuse": refused}
        plan = scheduler.schedule()
        if explain is not None:
            explain += [f"step {step}: {p.explain()}" for p in plan.preempted]
        entry_log |= _decisions(scenario, scheduler, plan)
        token_ids = [
            [int(outputs[s.request.id][s.num_output_tokens])] if samples else []
            for s, samples in zip(plan.sequences, plan.samples.tolist(), strict=True)
        ]
        if scenario.clock is not None:
            now_ns += scenario.clock.duration_ns(plan)
        outcome = scheduler.update(plan, StepResult(duration_ns=0, token_ids=token_ids))
        entry_log |= _outcome(scenario, scheduler, plan, outcome)
        yield {
            key: value
            for key, value in entry_log.items()
            if key == "sched" or value not in ([], {})
        }
        step += 1
    unfinished = [s.id for s in (*scheduler.running, *scheduler.swapped, *scheduler.waiting)]
    yield {
        "end": ending,
        "steps": step,
        "unfinished": sorted(unfinished),
        "free_end": scheduler.blocks.num_free,
    }


def _decisions(scenario: Scenario, scheduler: Scheduler, plan: StepPlan) -> dict[str, Any]:
    size = scenario.block_size
    sequences = plan.sequences
    columns = zip(sequences, plan.granted.tolist(), plan.computed_before.tolist(), strict=True)
    log: dict[str, Any] = {
        "sched": [[s.id, granted, before] for s, granted, before in columns],
        "running": [s.id for s in sequences[: plan.num_running]],
        "new": [a.sequence.id for a in plan.admitted if not a.resumed],
        "resumed": [a.sequence.id for a in plan.admitted if a.resumed],
        "hit": {a.sequence.id: size * len(a.hit_blocks) for a in plan.admitted if a.hit_blocks},
        "hit_blocks": {a.sequence.id: a.hit_blocks for a in plan.admitted if a.hit_blocks},
        "preempt": [p.sequence.id for p in plan.preempted],
        "blocks": {s.id: blocks for s, blocks in plan.new_blocks.items()},
        "evict": plan.evicted,
        "free": plan.num_free_blocks,
        "usage": round(1 - plan.num_free_blocks / scheduler.blocks.num_blocks, 6),
    }
    if scenario.dump_free_queue:
        log["free_queue"] = scheduler.blocks.pool.free_ids()
    return log


def _outcome(
    scenario: Scenario, scheduler: Scheduler, plan: StepPlan, outcome: StepOutcome
) -> dict[str, Any]:
    def ids(sequences: list[Sequence]) -> list[str]:
        return [s.id for s in sequences]

    log: dict[str, Any] = {
        "sample": ids(plan.sequences if outcome.sampled is None else outcome.sampled),
        "finish": [f.sequence.id for f in outcome.finished],
        "free_end": scheduler.blocks.num_free,
        "nrun": len(scheduler.running),
        "nwait": len(scheduler.waiting) + len(scheduler.swapped),
    }
    if scenario.dump_free_queue:
        log["free_queue_end"] = scheduler.blocks.pool.free_ids()
    if scenario.dump_queues:
        log["q_run"] = ids(scheduler.running)
        log["q_wait"] = ids([*scheduler.swapped, *scheduler.waiting])
    return log
