"""How many KV blocks there is memory for, with every number that leads there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from blockmanager.ledger import GIB
from gpu_backend.config import ModelConfig
from gpu_backend.kv_cache import KVDtype

UTILIZATION = {"cuda": 0.9, "cpu": 0.5}
"""Share of the memory that may be used where nobody says: of a GPU's all, as vLLM; of a machine's what
is free, as other programs live there too."""
_ELEMENT_BYTES = {"fp8": 1, "int8": 1}
_SCALE_BYTES = 4


def bytes_per_block(
    config: ModelConfig, block_size: int, dtype: torch.dtype, kv_dtype: KVDtype
) -> int:
    """Of all layers: 2 x layers x kv_heads x head_dim x bytes a token, and a float32 scale for each
    token, head and layer where the KV is quantised."""
    element = _ELEMENT_BYTES.get(kv_dtype, dtype.itemsize)
    per_head = config.head_dim * element + (_SCALE_BYTES if kv_dtype != "auto" else 0)
    return 2 * config.num_layers * config.num_kv_heads * block_size * per_head


@dataclass(frozen=True, slots=True)
class KVBudget:
    num_blocks: int
    lines: list[str]
    """The arithmetic, line by line, for people."""


def budget(
    config: ModelConfig,
    device: torch.device,
    *,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: KVDtype,
    weight_bytes: int,
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    utilization: float | None = None,
    activation_peak: Callable[[], int] | None = None,
) -> KVBudget:
    """Blocks as given, as many as fit into ``kv_bytes``, or what the device has left.

    Parameters
    ----------
    activation_peak
        Measures the bytes of a largest step; called where the blocks are not given.

    Raises ``ValueError`` with the numbers where no block fits.
    """
    each = bytes_per_block(config, block_size, dtype, kv_dtype)
    a_block = (
        f"a block of {block_size} tokens takes {each:,} bytes "
        f"({each // block_size:,} a token, {config.num_layers} layers, KV in "
        f"{dtype_name(dtype) if kv_dtype == 'auto' else kv_dtype})"
    )
    lines = [_line("of weights, loaded already (packed copies among them)", weight_bytes), a_block]
    if num_blocks is not None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least 1")
        lines.append(f"{num_blocks:,} blocks as given: {num_blocks * each / GIB:.2f} GiB")
        return KVBudget(num_blocks, lines)
    if kv_bytes is None:
        share = UTILIZATION[device.type] if utilization is None else utilization
        if not 0 < share <= 1:
            raise ValueError(f"memory utilization is {share}, must be above 0 and at most 1")
        lines, kv_bytes = _left_over(device, share, utilization is None, activation_peak, lines)
    found = kv_bytes // each
    if found < 1:
        raise ValueError(
            f"no KV block fits: {a_block}, {kv_bytes / GIB:.2f} GiB are there "
            f"({'; '.join(line for line in lines if line != a_block)})"
        )
    lines.append(
        f"{kv_bytes / GIB:.2f} GiB for KV: {found:,} blocks, {found * block_size:,} tokens"
    )
    return KVBudget(found, lines)


def _left_over(
    device: torch.device,
    share: float,
    is_assumed: bool,
    activation_peak: Callable[[], int] | None,
    lines: list[str],
) -> tuple[list[str], int]:
    peak = activation_peak() if activation_peak is not None else 0
    assumed = " (assumed)" if is_assumed else ""
    measured = _line("activations of a largest step, measured", peak)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was measured is counted once
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
        lines = [
            f"{total / GIB:.2f} GiB of {torch.cuda.get_device_name(device)} x {share:g}{assumed}",
            _line("in use, weights among it", used),
            measured,
            *lines,
        ]
        return lines, int(total * share) - used - peak
    free = available_memory()
    lines = [f"{free / GIB:.2f} GiB of free memory x {share:g}{assumed}", measured, *lines]
    return lines, int(free * share) - peak


def _line(what: str, num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB {what}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def available_memory() -> int:
    """Bytes that programs can have without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (
        found := re.search(r"^MemAvailable: +(\d+) kB", meminfo.read_text(), re.MULTILINE)
    ):
        return int(found[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Bytes that ``work`` takes at its peak beyond what is taken before (and 0 where the system does
    not say)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use
        before = _status("VmRSS")
        work()
        return max(_status("VmHWM") - before, 0)
    except (OSError, LookupError):
        return 0


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise LookupError(name)
    return int(found[1]) * 1024
