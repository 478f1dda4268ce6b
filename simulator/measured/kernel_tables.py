"""Published times of GPU kernels, as arrays.

Two sources: microsoft/vidur (MIT), CSV files ``vidur/linear_ops.csv``, ``attention.csv`` and
``network_ops.csv``; and ai-dynamo/aiconfigurator (Apache-2.0), ``peers/kernels_*.csv``. Times become seconds.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class TableError(ValueError):
    """A table that is not there or not what it should be."""


class GemmTable(NamedTuple):
    """``[rows, depth] x [depth, columns]``, seconds."""

    rows: npt.NDArray[np.int64]
    columns: FloatArray
    depth: FloatArray
    seconds: FloatArray

    def where(self, mask: npt.NDArray[np.bool_]) -> GemmTable:
        return GemmTable(self.rows[mask], self.columns[mask], self.depth[mask], self.seconds[mask])


class LayerTable(NamedTuple):
    """The four products of a layer together, for one model shape at a time."""

    rows: npt.NDArray[np.int64]
    products: tuple[tuple[FloatArray, FloatArray], ...]
    """Columns and depth of each."""
    seconds: FloatArray
    models: npt.NDArray[np.str_]

    def where(self, mask: npt.NDArray[np.bool_]) -> LayerTable:
        return LayerTable(
            self.rows[mask],
            tuple((columns[mask], depth[mask]) for columns, depth in self.products),
            self.seconds[mask],
            self.models[mask],
        )


class AttentionTable(NamedTuple):
    """``batch`` sequences with ``queries`` tokens each behind ``cached`` ones; per GPU."""

    batch: FloatArray
    queries: FloatArray
    cached: FloatArray
    heads: FloatArray
    kv_heads: FloatArray
    head_dim: FloatArray
    seconds: FloatArray

    def where(self, mask: npt.NDArray[np.bool_]) -> AttentionTable:
        return AttentionTable(*(column[mask] for column in self))


class ReduceTable(NamedTuple):
    """All-reduce of ``num_bytes`` among ``num_gpus``."""

    num_bytes: FloatArray
    num_gpus: FloatArray
    seconds: FloatArray

    def where(self, mask: npt.NDArray[np.bool_]) -> ReduceTable:
        return ReduceTable(*(column[mask] for column in self))


def gemm_table(folder: Path, gpu: str, dtype: str) -> GemmTable:
    """aiconfigurator's products on ``gpu`` (``h100``, ``h200``); ``dtype`` ``bfloat16`` or ``fp8``."""
    rows = _rows(_kernels(folder, gpu, "gemm"), ("m", "n", "k", "latency_ms"), gemm_dtype=dtype)
    return GemmTable(rows["m"].astype(np.int64), rows["n"], rows["k"], rows["latency_ms"] / 1e3)


def decode_table(folder: Path, gpu: str) -> AttentionTable:
    """aiconfigurator's attention of one query each; ``step`` tokens are cached before."""
    return _attention(folder, gpu, "generation_attention", queries=None)


def prefill_table(folder: Path, gpu: str) -> AttentionTable:
    """aiconfigurator's attention of whole prompts."""
    return _attention(folder, gpu, "context_attention", queries="isl")


def _attention(folder: Path, gpu: str, kind: str, queries: str | None) -> AttentionTable:
    names = (
        *("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "step"),
        "latency_ms",
    )
    rows = _rows(_kernels(folder, gpu, kind), names)
    one = np.ones_like(rows["step"])
    return AttentionTable(
        rows["batch_size"],
        one if queries is None else rows[queries],
        rows["step"],
        rows["num_heads"],
        rows["num_key_value_heads"],
        rows["head_dim"],
        rows["latency_ms"] / 1e3,
    )


def peer_reduce_table(folder: Path, gpu: str) -> ReduceTable:
    """aiconfigurator's all-reduce by vLLM's own kernel, in a CUDA graph."""
    names = ("message_size", "num_gpus", "latency_ms")
    rows = _rows(
        _kernels(folder, gpu, "custom_allreduce"), names, kernel_source="vLLM_custom_graph"
    )
    return ReduceTable(rows["message_size"], rows["num_gpus"], rows["latency_ms"] / 1e3)


def ring_reduce_table(folder: Path, network: str) -> ReduceTable:
    """Vidur's all-reduce by NCCL within one machine, e.g. ``h100_dgx``."""
    names = ("size_bytes", "num_workers", "gpus_per_node_used", "median_ms")
    rows = _rows(folder / "vidur" / "network_ops.csv", names, network=network, op="all_reduce")
    table = ReduceTable(rows["size_bytes"], rows["num_workers"], rows["median_ms"] / 1e3)
    return table.where(rows["num_workers"] == rows["gpus_per_node_used"])


def layer_table(folder: Path, device: str) -> LayerTable:
    """Vidur's products of a layer on ``device`` (``a100``, ``h100``); 16 bits."""
    times = ("attn_pre_proj_ms", "attn_post_proj_ms", "mlp_up_proj_ms", "mlp_down_proj_ms")
    shape = ("n_q_head", "n_kv_head", "n_embd", "n_ffn", "tp", "num_tokens")
    path = folder / "vidur" / "linear_ops.csv"
    rows = _rows(path, (*shape, *times), device=device)
    texts = _texts(path, ("model", "gated"), device=device)
    hidden, tp = rows["n_embd"], rows["tp"]
    head_dim = hidden / rows["n_q_head"]
    kv_heads = np.maximum(rows["n_kv_head"] / tp, 1.0)
    gates = np.where(texts["gated"] == "True", 2.0, 1.0)
    return LayerTable(
        rows["num_tokens"].astype(np.int64),
        (
            ((rows["n_q_head"] / tp + 2 * kv_heads) * head_dim, hidden),
            (hidden, hidden / tp),
            (gates * rows["n_ffn"] / tp, hidden),
            (hidden, rows["n_ffn"] / tp),
        ),
        sum((rows[name] for name in times), np.zeros(len(hidden))) / 1e3,
        texts["model"],
    )


def grid_table(folder: Path, *, prefill: bool) -> AttentionTable:
    """Vidur's full grid of attention kernels: A100, the heads of Llama-2-70B on two GPUs."""
    names = (
        *("batch_size", "prefill_chunk", "kv_len", "n_q_head", "n_kv_head", "tp", "n_embd"),
        "median_ms",
    )
    rows = _rows(
        folder / "vidur" / "attention.csv",
        names,
        device="a100",
        model_shape="meta-llama/Llama-2-70b-hf",
        is_prefill=str(prefill),
    )
    one = np.ones_like(rows["kv_len"])
    return AttentionTable(
        one if prefill else rows["batch_size"],
        rows["prefill_chunk"] if prefill else one,
        rows["kv_len"] - (0.0 if prefill else 1.0),
        rows["n_q_head"] / rows["tp"],
        rows["n_kv_head"] / rows["tp"],
        rows["n_embd"] / rows["n_q_head"],
        rows["median_ms"] / 1e3,
    )


def _kernels(folder: Path, gpu: str, kind: str) -> Path:
    return folder / "peers" / f"kernels_{gpu}_sxm_vllm0.24.0_{kind}.csv"


def _read(path: Path, keep: Mapping[str, str]) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [
                row
                for row in csv.DictReader(file)
                if all(row.get(name) == value for name, value in keep.items())
            ]
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror}") from None


def _columns(
    path: Path, names: tuple[str, ...], keep: Mapping[str, str], of: Callable[[list[str]], object]
) -> dict[str, object]:
    rows = _read(path, keep)
    if not rows:
        raise TableError(f"{path}: no rows with {dict(keep)}")
    missing = [name for name in names if name not in rows[0]]
    if missing:
        raise TableError(f"{path}: has no column {missing[0]}")
    try:
        return {name: of([row[name] for row in rows]) for name in names}
    except ValueError as error:
        raise TableError(f"{path}: {error}") from None


def _rows(path: Path, names: tuple[str, ...], **keep: str) -> dict[str, FloatArray]:
    return _columns(path, names, keep, lambda column: np.array(column, np.float64))  # type: ignore[return-value]


def _texts(path: Path, names: tuple[str, ...], **keep: str) -> dict[str, npt.NDArray[np.str_]]:
    return _columns(path, names, keep, np.array)  # type: ignore[return-value]
