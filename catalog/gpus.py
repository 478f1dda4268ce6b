"""GPUs by name or from a small JSON file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from catalog.errors import CatalogError
from catalog.lookup import as_path, find_entry, read_entries, read_json_object
from catalog.shapes import DTYPE_BITS, GPU

_WHAT = (
    "a GPU: memory_bytes, memory_bandwidth, flops {dtype: dense FLOP/s}, host_bandwidth and "
    "optionally name, architecture, num_sms, link, link_bandwidth, usd_per_hour, source, assumptions "
    "(bytes per second)"
)
_KEYS = {
    "name",
    "aliases",
    "memory_bytes",
    "memory_bandwidth",
    "flops",
    "link",
    "link_bandwidth",
    "host_bandwidth",
    "architecture",
    "num_sms",
    "usd_per_hour",
    "source",
    "assumptions",
}

DEFAULT_SMS = 132
"""Of a GPU whose file does not say: as many as an H100."""

# A dtype without a rate of its own runs at that of the first of these that has one.
_FALLBACK: Mapping[str, tuple[str, ...]] = {
    "mxfp4": ("mxfp4", "fp8", "bf16", "fp16", "fp32"),
    "int4": ("int4", "int8", "bf16", "fp16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "int8": ("int8", "bf16", "fp16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "fp32": ("fp32",),
}


class PeakFlops(NamedTuple):
    """A rate, and the dtype whose rate it is."""

    flops: float
    """Dense FLOP per second."""
    dtype: str


@cache
def _entries() -> dict[str, dict[str, Any]]:
    return read_entries("gpus.json")


def gpu_names() -> tuple[str, ...]:
    """Names that ``load_gpu`` knows."""
    return tuple(_entries())


def load_gpu(name_or_path: str | Path) -> GPU:
    """A GPU of the catalogue, or one described in a JSON file.

    The file holds one object: ``memory_bytes``, ``memory_bandwidth``, ``flops`` (dense FLOP/s by
    dtype, e.g. ``{"bf16": 1e15}``), ``host_bandwidth`` (bytes per second, one direction); and
    optionally ``name``, ``architecture`` (e.g. ``hopper``) with ``num_sms``, ``link`` with
    ``link_bandwidth`` (else peers are taken to talk over PCIe), ``usd_per_hour``, ``source``,
    ``assumptions``.

    Raises
    ------
    CatalogError
        Unknown name (the message gives the closest ones), or a file that cannot be used.
    """
    path = as_path(name_or_path)
    if path is None:
        entry = find_entry(str(name_or_path), _entries(), "GPU", "a JSON file that describes it")
        return _gpu(entry, f"gpus.json, {entry['name']}", str(entry["name"]))
    return _gpu(read_json_object(path, _WHAT), str(path), path.stem)


def peak_flops(gpu: GPU, dtype: str) -> PeakFlops:
    """Dense rate at which ``gpu`` multiplies ``dtype``, or the next wider type it has.

    Raises ``ValueError`` for a dtype that is not one, or a GPU with none of the wider rates.
    """
    if dtype not in _FALLBACK:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(_FALLBACK)}")
    for candidate in _FALLBACK[dtype]:
        if candidate in gpu.flops:
            return PeakFlops(gpu.flops[candidate], candidate)
    raise ValueError(f"{gpu.name} has no rate for {dtype} nor for a wider type")


def _gpu(data: Mapping[str, Any], where: str, default_name: str) -> GPU:
    unknown = sorted(set(data) - _KEYS)
    if unknown:
        raise CatalogError(f"{where}: {unknown[0]} is no key of {_WHAT}")

    def number(key: str) -> float:
        if key not in data:
            raise CatalogError(f"{where}: no {key}, expected {_WHAT}")
        return _positive(data[key], key, where)

    flops = data.get("flops")
    if not isinstance(flops, Mapping) or not flops:
        raise CatalogError(
            f"{where}: flops is {flops!r}, expected dense FLOP/s by dtype, e.g. {{'bf16': 1e15}}"
        )
    for dtype in flops:
        if dtype not in DTYPE_BITS:
            raise CatalogError(
                f"{where}: flops has {dtype!r}, expected dtypes among {', '.join(DTYPE_BITS)}"
            )
    assumptions = _strings(data.get("assumptions", []), "assumptions", where)
    memory_bytes = number("memory_bytes")
    if memory_bytes != int(memory_bytes):
        raise CatalogError(f"{where}: memory_bytes is {memory_bytes}, expected whole bytes")
    host_bandwidth = number("host_bandwidth")
    if "link_bandwidth" in data:
        link_bandwidth, link = number("link_bandwidth"), str(data.get("link") or "link")
    else:
        link_bandwidth, link = host_bandwidth, "PCIe"
        assumptions += ("no link_bandwidth given: peers talk over PCIe",)
    num_sms = _positive(data.get("num_sms", DEFAULT_SMS), "num_sms", where)
    if num_sms != int(num_sms):
        raise CatalogError(f"{where}: num_sms is {num_sms}, expected a whole number")
    if "num_sms" not in data:
        assumptions += (f"no num_sms given: {DEFAULT_SMS} multiprocessors",)
    price = data.get("usd_per_hour")
    return GPU(
        name=str(data.get("name") or default_name),
        memory_bytes=int(memory_bytes),
        memory_bandwidth=number("memory_bandwidth"),
        flops={key: _positive(value, f"flops.{key}", where) for key, value in flops.items()},
        link_bandwidth=link_bandwidth,
        link=link,
        host_bandwidth=host_bandwidth,
        architecture=str(data.get("architecture") or "").lower(),
        num_sms=int(num_sms),
        usd_per_hour=None if price is None else _positive(price, "usd_per_hour", where),
        source=str(data.get("source") or where),
        assumptions=assumptions,
    )


def _positive(value: object, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CatalogError(f"{where}: {key} is {value!r}, expected a positive number")
    if not (value > 0 and math.isfinite(value)):
        raise CatalogError(f"{where}: {key} is {value!r}, expected a positive number")
    return float(value)


def _strings(value: object, key: str, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CatalogError(f"{where}: {key} is {value!r}, expected a list of strings")
    return tuple(value)
