"""Fit the factors of ``simulator/cost/factors.json`` on published kernel times.

``python -m simulator.measured.fit FOLDER`` prints the errors on shapes that were held out; with
``--write`` it also writes the file. Needs SciPy. Serving factors are fitted after those of the kernels,
by simulating whole servers (``fit_serving``); all of it takes some ten minutes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import simulator.cost.factors
from catalog import GPU, load_gpu
from simulator.cost.factors import Factors, factors_from, nearest_factors
from simulator.cost.kernels import (
    DecodeFactors,
    GemmFactors,
    GemmKernel,
    PrefillFactors,
    ReduceFactors,
    decode_attention,
    prefill_attention,
)
from simulator.measured import kernel_tables as tables
from simulator.measured.fit_serving import (
    HOST,
    SERVING,
    fit,
    predictor,
    rounded,
    simulated_metrics,
)
from simulator.measured.kernel_tables import (
    AttentionTable,
    FloatArray,
    GemmTable,
    LayerTable,
    ReduceTable,
)
from simulator.measured.logs import load_log
from simulator.measured.served import ServedRun, closed_loops, experiments
from simulator.settings import Options

BoolArray = npt.NDArray[np.bool_]

# The tiles that libraries take as products get more rows.
_TILES = ((64, 64, 64), (128, 128, 64), (256, 128, 128), (1024, 128, 128), (1 << 40, 128, 256))
_PEER_BYTES = 8 << 20
"""Up to which vLLM reduces over peer memory; beyond, NCCL does."""
_HELD_OUT = 3
"""Of each so many shapes, one is held out."""


class Quality(NamedTuple):
    """Errors of a fit on rows that it did not see."""

    rows: int
    median: float
    p90: float
    bias: float
    """Median of predicted / measured - 1."""


def quality(predicted: FloatArray, measured: FloatArray) -> Quality:
    error = predicted / measured - 1.0
    size = np.abs(error)
    return Quality(
        len(error), float(np.median(size)), float(np.quantile(size, 0.9)), float(np.median(error))
    )


def _least_squares(
    predict: Callable[[FloatArray], FloatArray],
    measured: FloatArray,
    start: list[float],
    low: list[float],
    high: list[float],
) -> FloatArray:
    """Parameters with the least errors of the logarithm; outliers count less."""
    from scipy.optimize import least_squares

    result = least_squares(  # type: ignore[operator]  # a function, not the module of its name
        lambda parameters: np.log(predict(parameters) / measured),
        start,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=0.1,
        x_scale=np.maximum(np.abs(start), 0.01),
    )
    found: FloatArray = result.x
    return found


# --- products ---


def gemm_factors(parameters: FloatArray) -> GemmFactors:
    kernels = []
    for index, (rows, tile_rows, tile_columns) in enumerate(_TILES):
        compute, tile_us, bandwidth, overlap, fixed_us, quantised = parameters[
            6 * index : 6 * index + 6
        ].tolist()
        kernels.append(
            GemmKernel(
                *(rows, tile_rows, tile_columns, compute, tile_us * 1e-6, bandwidth),
                *(overlap, fixed_us * 1e-6, quantised),
            )
        )
    return GemmFactors(tuple(kernels), float(parameters[-1]))


def _gemm_seconds(
    factors: GemmFactors,
    rows: npt.NDArray[np.int64],
    columns: FloatArray,
    depth: FloatArray,
    gpu: GPU,
    flops: float,
    width: int,
) -> FloatArray:
    times: FloatArray = factors.time_ns(
        rows,
        columns=columns,  # type: ignore[arg-type]  # arrays do as well
        depth=depth,  # type: ignore[arg-type]
        weight_bytes=width * columns * depth,  # type: ignore[arg-type]
        activation_bytes=2.0 * (columns + depth),  # type: ignore[arg-type]
        peak_flops=flops,
        bandwidth=gpu.memory_bandwidth,
        num_sms=gpu.num_sms,
    )
    return times / 1e9


# Shares stay below 1, or a fit to one ratio of arithmetic to bandwidth would say little of another.
_GEMM_START = [0.7, 1.0, 0.9, 0.3, 3.5, 0.5] * len(_TILES) + [0.2]
_GEMM_LOW = [0.1, 0.0, 0.6, 0.0, 0.5, 0.0] * len(_TILES) + [0.02]
_GEMM_HIGH = [1.0, 10.0, 0.97, 0.5, 20.0, 1.0] * len(_TILES) + [1.0]


def fit_gemm(table: GemmTable, gpu: GPU, flops: float, width: int) -> GemmFactors:
    """Of products with ``width`` bytes a weight."""
    return gemm_factors(
        _least_squares(
            lambda p: gemm_seconds(gemm_factors(p), table, gpu, flops, width),
            table.seconds,
            _GEMM_START,
            _GEMM_LOW,
            _GEMM_HIGH,
        )
    )


def gemm_seconds(
    factors: GemmFactors, table: GemmTable, gpu: GPU, flops: float, width: int
) -> FloatArray:
    return _gemm_seconds(factors, table.rows, table.columns, table.depth, gpu, flops, width)


def fit_layers(table: LayerTable, gpu: GPU) -> GemmFactors:
    """On the sum of the four products of a layer."""
    return gemm_factors(
        _least_squares(
            lambda p: layer_seconds(gemm_factors(p), table, gpu),
            table.seconds,
            _GEMM_START,
            _GEMM_LOW,
            _GEMM_HIGH,
        )
    )


def layer_seconds(factors: GemmFactors, table: LayerTable, gpu: GPU) -> FloatArray:
    total = np.zeros(len(table.rows))
    for columns, depth in table.products:
        total += _gemm_seconds(factors, table.rows, columns, depth, gpu, gpu.flops["bf16"], 2)
    return total


def held_out_shapes(table: GemmTable) -> BoolArray:
    """One of each three weight shapes, by a fixed rule."""
    held: BoolArray = ((table.columns / 256 + table.depth / 128) % _HELD_OUT) == 0
    return held


# --- attention ---


def decode_seconds(factors: DecodeFactors, table: AttentionTable, gpu: GPU) -> FloatArray:
    per_head = 2.0 * table.head_dim * 2.0  # K and V in 16 bits
    bandwidth = gpu.memory_bandwidth * factors.bandwidth
    kv = table.batch * (table.cached + 1.0)
    seconds: FloatArray = factors.fixed_s + decode_attention(
        kv,
        table.batch,
        table.kv_heads * per_head / bandwidth,
        table.heads * per_head / bandwidth,
        table.heads * 4.0 * table.head_dim / (gpu.flops["bf16"] * factors.compute),
        factors.head_s * table.kv_heads / gpu.num_sms,
        factors.key_s,
        factors.overlap,
    )
    return seconds


def fit_decode(table: AttentionTable, gpu: GPU) -> DecodeFactors:
    def factors(p: FloatArray) -> DecodeFactors:
        return DecodeFactors(
            bandwidth=float(p[0]),
            compute=float(p[1]),
            fixed_s=float(p[2]) * 1e-6,
            head_s=float(p[3]) * 1e-6,
            key_s=float(p[4]) * 1e-9,
            overlap=float(p[5]),
        )

    return factors(
        _least_squares(
            lambda p: decode_seconds(factors(p), table, gpu),
            table.seconds,
            [0.9, 0.3, 8.0, 1.0, 0.2, 0.5],
            [0.2, 0.02, 0.0, 0.0, 0.0, 0.0],
            [1.0, 1.0, 40.0, 50.0, 10.0, 1.0],
        )
    )


def prefill_seconds(factors: PrefillFactors, table: AttentionTable, gpu: GPU) -> FloatArray:
    queries, cached = table.queries, table.cached
    triangle = table.batch * queries * (queries + 1.0) / 2.0
    pairs = table.batch * queries * cached + triangle
    per_head = 2.0 * table.head_dim * 2.0
    bandwidth = gpu.memory_bandwidth * factors.bandwidth
    pair_s = table.heads * 4.0 * table.head_dim / (gpu.flops["bf16"] * factors.compute)
    seconds: FloatArray = factors.fixed_s + prefill_attention(
        table.batch * (queries + cached),
        pairs,
        triangle,
        table.batch * queries,
        table.batch,
        table.kv_heads * per_head / bandwidth,
        table.heads * per_head / bandwidth,
        pair_s,
        pair_s * (factors.triangle - 1.0),
        factors.tile_s * table.heads / gpu.num_sms,
        factors.key_s,
        factors.overlap,
    )
    return seconds


def fit_prefill(table: AttentionTable, gpu: GPU) -> PrefillFactors:
    """``triangle`` stays 1 where the table has no cached tokens to tell it from."""
    tells = bool(table.cached.max() > 0)

    def factors(p: FloatArray) -> PrefillFactors:
        return PrefillFactors(
            bandwidth=float(p[0]),
            compute=float(p[1]),
            fixed_s=float(p[2]) * 1e-6,
            tile_s=float(p[3]) * 1e-6,
            key_s=float(p[4]) * 1e-9,
            overlap=float(p[5]),
            triangle=float(p[6]) if tells else 1.0,
        )

    return factors(
        _least_squares(
            lambda p: prefill_seconds(factors(p), table, gpu),
            table.seconds,
            [0.5, 0.6, 8.0, 1.0, 1.0, 0.5, 1.5],
            [0.02, 0.05, 0.0, 0.0, 0.0, 0.0, 1.0],
            [1.0, 1.0, 40.0, 40.0, 100.0, 1.0, 6.0],
        )
    )


def held_out_heads(table: AttentionTable) -> BoolArray:
    """One of each three pairs of head counts; of a grid with one pair, one of three lengths."""
    pairs = sorted(set(zip(table.heads.tolist(), table.kv_heads.tolist(), strict=True)))
    if len(pairs) < _HELD_OUT:
        place = table.batch + table.queries // 32 + (table.cached + 32) // 32
        chosen: BoolArray = (place % _HELD_OUT) == 0
        return chosen
    held = set(pairs[::_HELD_OUT])
    return np.array(
        [pair in held for pair in zip(table.heads.tolist(), table.kv_heads.tolist(), strict=True)]
    )


# --- all-reduce ---


def reduce_seconds(factors: ReduceFactors, table: ReduceTable, gpu: GPU) -> FloatArray:
    return np.array(
        [
            factors.time_s(size, int(count), gpu.link_bandwidth)
            for size, count in zip(table.num_bytes, table.num_gpus, strict=True)
        ]
    )


def _fit_line(table: ReduceTable, gpu: GPU) -> tuple[float, float]:
    """Fixed time and share of the link."""
    sent = 2.0 * (table.num_gpus - 1.0) / table.num_gpus * table.num_bytes / gpu.link_bandwidth
    found = _least_squares(
        lambda p: p[0] * 1e-6 + sent / p[1], table.seconds, [10.0, 0.5], [0.1, 0.05], [100.0, 1.0]
    )
    return float(found[0]) * 1e-6, float(found[1])


def fit_reduce(peer: ReduceTable, ring: ReduceTable, gpu: GPU, ring_gpu: GPU) -> ReduceFactors:
    small = peer.where(peer.num_bytes <= _PEER_BYTES)
    large = ring.where(ring.num_bytes > _PEER_BYTES)
    return ReduceFactors(*_fit_line(small, gpu), *_fit_line(large, ring_gpu))


# --- all of it ---


class Fitted(NamedTuple):
    """The ``gpus`` and ``errors`` of the data file, and the full table of errors."""

    gpus: dict[str, Any]
    errors: dict[str, dict[str, Quality]]


def fit_all(folder: Path) -> Fitted:
    """Fit every GPU of which ``folder`` has tables."""
    gpus: dict[str, Any] = {}
    errors: dict[str, dict[str, Quality]] = {}
    h100, a100 = load_gpu("h100-sxm"), load_gpu("a100-80gb")
    for name, short in (("h100-sxm", "h100"), ("h200", "h200")):
        gpu = load_gpu(name)
        found: dict[str, Any] = {"architecture": gpu.architecture}
        quality_of: dict[str, Quality] = {}
        for key, dtype, width, label in (
            ("gemm", "bfloat16", 2, "GEMM bf16"),
            ("gemm_8bit", "fp8", 1, "GEMM fp8"),
        ):
            table = tables.gemm_table(folder, short, dtype)
            flops = gpu.flops["bf16" if width == 2 else "fp8"]
            held = held_out_shapes(table)
            factors = fit_gemm(table.where(~held), gpu, flops, width)
            found[key] = _as_json(factors)
            rest = table.where(held)
            quality_of[label] = quality(
                gemm_seconds(factors, rest, gpu, flops, width), rest.seconds
            )
        found |= _attention_factors(
            tables.decode_table(folder, short), tables.prefill_table(folder, short), gpu, quality_of
        )
        peer = tables.peer_reduce_table(folder, short)
        ring = tables.ring_reduce_table(folder, "h100_dgx")
        reduce = fit_reduce(peer, ring, gpu, h100)
        found["reduce"] = _digits(reduce._asdict())
        small = peer.where(peer.num_bytes <= _PEER_BYTES)
        quality_of["all-reduce"] = quality(reduce_seconds(reduce, small, gpu), small.seconds)
        gpus[name], errors[name] = found, quality_of

    quality_of = {}
    layers = tables.layer_table(folder, "a100")
    models = sorted(set(layers.models.tolist()))
    held = np.isin(layers.models, models[::_HELD_OUT])
    factors = fit_layers(layers.where(~held), a100)
    rest_layers = layers.where(held)
    quality_of["GEMM fp16"] = quality(
        layer_seconds(factors, rest_layers, a100), rest_layers.seconds
    )
    found = {"architecture": a100.architecture, "gemm": _as_json(factors)}
    found |= _attention_factors(
        tables.grid_table(folder, prefill=False),
        tables.grid_table(folder, prefill=True),
        a100,
        quality_of,
    )
    # No table of vLLM's own kernel on A100: its fixed time and share are those of H100.
    ring = tables.ring_reduce_table(folder, "a100_dgx")
    reduce = fit_reduce(tables.peer_reduce_table(folder, "h100"), ring, h100, a100)
    found["reduce"] = _digits(reduce._asdict())
    gpus["a100-80gb"], errors["a100-80gb"] = found, quality_of
    return Fitted(gpus, errors)


def _attention_factors(
    decodes: AttentionTable, prefills: AttentionTable, gpu: GPU, quality_of: dict[str, Quality]
) -> dict[str, Any]:
    held = held_out_heads(decodes)
    decode = fit_decode(decodes.where(~held), gpu)
    rest = decodes.where(held)
    quality_of["decode attention"] = quality(decode_seconds(decode, rest, gpu), rest.seconds)
    held = held_out_heads(prefills)
    prefill = fit_prefill(prefills.where(~held), gpu)
    rest = prefills.where(held)
    quality_of["prefill attention"] = quality(prefill_seconds(prefill, rest, gpu), rest.seconds)
    return {"decode": _digits(decode._asdict()), "prefill": _digits(prefill._asdict())}


def _as_json(factors: GemmFactors) -> dict[str, Any]:
    return {
        "kernels": [_short(kernel._asdict()) for kernel in factors.kernels],
        "least_wave": float(f"{factors.least_wave:.4g}"),
    }


def _short(values: Mapping[str, Any]) -> list[Any]:
    return list(_digits(values).values())


def _digits(values: Mapping[str, Any]) -> dict[str, Any]:
    """Floats to four digits; what is as good as nothing, nothing."""
    return {
        name: value
        if isinstance(value, int)
        else 0.0
        if abs(value) < 1e-12
        else float(f"{value:.4g}")
        for name, value in values.items()
    }


# --- the data file ---

_SOURCES = (
    "products and attention of h100-sxm and h200, their all-reduce up to 8 MiB: kernel tables of vLLM 0.24 "
    "in ai-dynamo/aiconfigurator (Apache-2.0)",
    "products and attention of a100-80gb: microsoft/vidur (MIT), profiling data of 2024; larger "
    "all-reduces (NCCL): the same",
    "step_s, sequence_s, fixed_share, piece_s, frontend_s, experts_bandwidth: 18 runs of vLLM 0.15.1 on "
    "H100 in inference-sim/sim-to-real-accuracy-validation",
    "host_step_s, host_sequence_s: 90 closed loops of Qwen3-32B on vLLM 0.12, H100, in "
    "ai-dynamo/aiconfigurator (Apache-2.0)",
    "launch_s, elementwise_s, elementwise_bandwidth, experts_compute, pinned_bandwidth, "
    "pageable_bandwidth: assumed",
)
_ASSUMED = {
    "launch_s": 4.5e-6,
    "elementwise_s": 2e-6,
    "elementwise_bandwidth": 0.8,
    "experts_compute": 0.5,
    "pinned_bandwidth": 0.8,
    "pageable_bandwidth": 0.3,
}
_STAGE_S = 30.0


def fit_document(folder: Path, kernels: Fitted) -> dict[str, Any]:
    """The whole data file: ``kernels``, and serving factors from the runs in ``folder``."""
    from multiprocessing import Pool

    with Pool() as pool:
        host = {factor.name: factor.start for factor in HOST}

        def factors_of(run: ServedRun, values: Mapping[str, float]) -> Factors:
            entry = kernels.gpus[_gpu(run).name]
            return factors_from(entry, {**_ASSUMED, **host, **values}, "measured kernels", "")

        def map_runs(function: Any, jobs: list[Any]) -> list[Any]:
            return pool.map(function, jobs, chunksize=1)

        runs = experiments(folder, stage_s=_STAGE_S)
        serving = fit(predictor(runs, ("E2E mean", "TTFT mean"), factors_of, map_runs), SERVING)
        fixed = dict(serving.values)
        loops = [run for run in closed_loops(folder) if run.group == "closed loops"]

        def host_factors_of(run: ServedRun, values: Mapping[str, float]) -> Factors:
            return factors_of(run, {**fixed, **values})

        host_fit = fit(predictor(loops, ("TPOT mean",), host_factors_of, map_runs), HOST)
        left_out = pool.map(
            simulated_metrics,
            [(run, factors_of(run, left)) for run, left in zip(runs, serving.without, strict=True)],
            chunksize=1,
        )
        nearest = {**_ASSUMED, **fixed, **host_fit.values}
        logs = [
            load_log(path.parent, Options()).run
            for path in sorted((folder / "vllm_runs").glob("*/*/requests.jsonl"))
        ]
        elsewhere = pool.map(
            simulated_metrics,
            [(run, nearest_factors(_gpu(run), kernels.gpus, nearest)) for run in logs],
        )
    measured = _band(runs, left_out, 0.1)
    others = _band(logs, elsewhere, 0.0)
    values = rounded({**serving.values, **host_fit.values})
    return {
        "sources": list(_SOURCES),
        "serving": {**_ASSUMED, **values},
        "without": {
            run.name: rounded(left) for run, left in zip(runs, serving.without, strict=True)
        }
        | {run.name: rounded(left) for run, left in zip(loops, host_fit.without, strict=True)},
        "bands": {
            "measured kernels": measured,
            "datasheet only": [min(measured[0], others[0]), max(measured[1], others[1])],
        },
        "errors": {
            gpu: {what: round(found.median, 4) for what, found in of.items()}
            for gpu, of in kernels.errors.items()
        },
        "gpus": kernels.gpus,
    }


def _gpu(run: ServedRun) -> GPU:
    return load_gpu(run.options.gpu or "")


def _band(
    runs: Sequence[ServedRun], predicted: Sequence[Mapping[str, float]], tail: float
) -> list[float]:
    """Of measured / predicted time per output token, the quantiles ``tail`` and 1 - ``tail``, and 2 %
    at least."""
    ratios = []
    for run, metrics in zip(runs, predicted, strict=True):
        name = "TPOT mean" if "TPOT mean" in run.measured else "E2E mean"
        ratios.append(run.measured[name] / metrics[name])
    low, high = np.quantile(ratios, [tail, 1 - tail]).tolist()
    return [round(min(low, 0.98), 3), round(max(high, 1.02), 3)]


def main(argv: Sequence[str] | None = None) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="python -m simulator.measured.fit")
    parser.add_argument("folder", type=Path, help="with vidur/ and peers/")
    parser.add_argument("--write", action="store_true", help="simulator/cost/factors.json too")
    args = parser.parse_args(argv)
    document = fit_document(args.folder, fit_all(args.folder))
    text = json.dumps(document, indent=1) + "\n"
    print(text, end="")
    if args.write:
        path = Path(simulator.cost.factors.__file__).with_name("factors.json")
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
