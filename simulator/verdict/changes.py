"""Changes that the verdict may name: what each would make of the run, the cheapest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from blockmanager.ledger import GIB
from blockmanager.ledger_gpu import DEFAULT_UTILIZATION, gpu_budget
from catalog import DTYPE_BITS
from simulator.settings import Options, Setup, resolve

Changes: TypeAlias = Mapping[str, Any]
"""Options by name, as ``Options`` spells them."""
State = Literal["stable", "backlogged", "overloaded", "nothing ran"]
Kind = Literal[
    "none",
    "queue",
    "compute",
    "memory bandwidth",
    "KV capacity",
    "sequence limit",
    "token budget",
    "prefill interference",
    "preemption jitter",
    "admission policy",
    "refusals",
]

WORTH = 1.15
"""A change is worth naming if it serves this many times as much (or is as much faster): less is
within what the prices of an uncalibrated cost model can be wrong by."""
HEADROOM = 0.9
"""Machines are counted such that each is offered at most this share of what it can serve: a queue
without slack grows too."""
PEAKS = 1.5
"""Random arrivals come in peaks: a limit on sequences or blocks is raised for this many times the
mean."""
LARGEST_FACTOR = 64
"""Batches larger than this many times the present one are not looked at."""


@dataclass(frozen=True, slots=True)
class Reason:
    """What a rule found."""

    kind: Kind
    evidence: list[str]
    change: str
    changes: Changes = field(default_factory=dict)
    replicas: int = 1


class Option(NamedTuple):
    """A change that could be made, and the setup that it would give."""

    words: str
    changes: Changes
    setup: Setup


def what_if(setup: Setup, changes: Changes) -> Setup | None:
    """The same run with other options; ``None`` where it cannot be run like that."""
    names = {field.name for field in fields(Options)}
    given = {
        name: setting.value
        for name, setting in setup.settings.items()
        if name in names and setting.source == "given"
    }
    if setup.settings["kv_bytes"].source == "given":
        given["kv_gb"] = f"{setup.settings['kv_bytes'].value / 2**20:.6f}MiB"
    if "swap_space" in given:
        given["swap_space"] = f"{given['swap_space'] / 2**20:.6f}MiB"
    try:
        return resolve(replace(Options(**given), **changes))
    except ValueError:
        return None


def as_flags(changes: Changes) -> tuple[str, ...]:
    """Options as flags of the command line."""
    flags: list[str] = []
    for name, value in changes.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return tuple(flags)


def choose(
    options: Iterator[Option], value: Callable[[Option], float], need: float
) -> tuple[Option, float] | None:
    """The first option whose value is enough, else the best one that is worth it."""
    best: tuple[Option, float] | None = None
    for option in options:
        worth = value(option)
        if worth >= need:
            return option, worth
        if worth >= WORTH and (best is None or worth > best[1]):
            best = option, worth
    return best


def _option(setup: Setup, words: str, changes: Changes) -> Iterator[Option]:
    changed = what_if(setup, changes)
    if changed is not None:
        yield Option(words, changes, changed)


def kv_options(setup: Setup, factor: float) -> Iterator[Option]:
    """Ways to more blocks on the same GPU, the cheapest first."""
    wanted = math.ceil(factor * setup.num_blocks)
    most = min(wanted, most_blocks(setup))
    more: dict[str, Any] = {}
    whole = f"{kv_gib(setup, most)} GiB"
    if most < wanted:
        whole += f" (all that {setup.gpu.name} has left)"
    if most > setup.num_blocks:
        more = more_blocks(setup, most)
        yield from _option(setup, whole, more)
    if DTYPE_BITS[setup.settings["kv_cache_dtype"].value] == 16:
        half = {"kv_cache_dtype": "fp8"}
        words = "an 8-bit KV cache (check the answers), half the bytes a token"
        yield from _option(setup, words, half | _same_memory(setup, 2 * setup.num_blocks))
        if more:
            both = half | more | _same_memory(setup, 2 * most)
            yield from _option(setup, f"{whole} and an 8-bit KV cache (check the answers)", both)


def more_gpus(setup: Setup) -> Iterator[Option]:
    """Twice the GPUs in one machine, if the model can be split like that."""
    tp = 2 * setup.settings["tensor_parallel_size"].value
    changes = {"tensor_parallel_size": tp} | _same_memory(setup, 2 * setup.num_blocks)
    yield from _option(setup, f"{tp} GPUs that share each layer", changes)


def faster_options(setup: Setup) -> Iterator[Option]:
    """Ways to shorter steps on the same machine."""
    settings = setup.settings
    if settings["cost_model"].value == "no-cache":
        yield from _option(setup, "keep the KV cache", {"cost_model": "physical"})
    if DTYPE_BITS[settings["weight_dtype"].value] == 16 and "fp8" in setup.gpu.flops:
        yield from _option(setup, "8-bit weights (check the answers)", {"weight_dtype": "fp8"})
    if DTYPE_BITS[settings["kv_cache_dtype"].value] == 16:
        yield from _option(
            setup, "an 8-bit KV cache (check the answers)", {"kv_cache_dtype": "fp8"}
        )


def faster_machine(setup: Setup) -> Iterator[Option]:
    """Ways to shorter steps, more GPUs included."""
    yield from faster_options(setup)
    yield from more_gpus(setup)


def most_blocks(setup: Setup) -> int:
    """Blocks that the GPU has room for, beside weights and activations."""
    settings, config = setup.settings, setup.config
    room = gpu_budget(
        setup.gpu,
        setup.shape,
        weight_dtype=settings["weight_dtype"].value,
        tp=settings["tensor_parallel_size"].value,
        gpu_memory_utilization=DEFAULT_UTILIZATION,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
    ).kv_bytes
    more = max(room - settings["kv_bytes"].value, 0)
    return setup.num_blocks + int(more // setup.layout.bytes_per_block)


def kv_gib(setup: Setup, num_blocks: int) -> str:
    """KV memory with that many blocks, rounded up to three digits, as ``--kv-gb`` takes it."""
    more = (num_blocks - setup.num_blocks) * setup.layout.bytes_per_block
    gib = (setup.settings["kv_bytes"].value + more) / GIB
    digits = max(0, 2 - math.floor(math.log10(gib)))
    return f"{math.ceil(gib * 10**digits) / 10**digits:.{digits}f}"


def more_blocks(setup: Setup, num_blocks: int) -> dict[str, Any]:
    """The option by which the memory was given, at another size."""
    if setup.settings["num_gpu_blocks"].source == "given":
        return {"num_gpu_blocks": num_blocks + 1}
    return {"kv_gb": kv_gib(setup, num_blocks)}


def _same_memory(setup: Setup, num_blocks: int) -> dict[str, Any]:
    """Blocks that fit when tokens take less, where the memory was given as a number of blocks."""
    if setup.settings["num_gpu_blocks"].source == "given":
        return {"num_gpu_blocks": num_blocks + 1}
    return {}


def kv_left(setup: Setup) -> str:
    """What the GPU has room for, in words."""
    most = kv_gib(setup, most_blocks(setup))
    return f"{setup.gpu.name} has at most about {most} GiB for KV beside weights and activations"
