"""What a datasheet does not say, of a GPU: factors fitted on measured kernels and servers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from catalog import GPU
from simulator.cost.kernels import (
    DecodeFactors,
    GemmFactors,
    GemmKernel,
    PrefillFactors,
    ReduceFactors,
)

Basis = Literal["calibrated", "measured kernels", "fitted family", "datasheet only"]
"""How much is known of a GPU, from most to least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFactors:
    """What an engine adds to its kernels; seconds, and shares of the peak."""

    step_s: float
    """GPU idle between two steps: inputs copied, small kernels, the next graph launched."""
    sequence_s: float
    """The same for each sequence of a step."""
    host_step_s: float
    """Work of the host for a step: scheduling, inputs, outputs. Hidden behind the GPU where scheduling
    is asynchronous."""
    host_sequence_s: float
    piece_s: float
    """Of each attention layer of a step with prompts in it, whose CUDA graph is in pieces: the launches
    between them."""
    fixed_share: float
    """What is left of a kernel's fixed time where others run before and after it."""
    launch_s: float
    """Of a kernel, where no CUDA graph launches it (``--enforce-eager``)."""
    frontend_s: float
    """Between a client and the scheduler, there and back: HTTP, tokenisation, detokenisation."""
    elementwise_bandwidth: float
    """Norms, activations, KV writes, sampling."""
    elementwise_s: float
    """Fixed time of such a kernel."""
    experts_bandwidth: float
    """Grouped products of routed experts."""
    experts_compute: float
    pinned_bandwidth: float
    """Of the host link."""
    pageable_bandwidth: float

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            is_time = name.endswith("_s")
            if not (0 <= value < math.inf if is_time else 0 < value <= 1):
                expected = "seconds, 0 or more" if is_time else "a share above 0, at most 1"
                raise ValueError(f"{name} is {value}, expected {expected}")


SERVING_MEANING: Mapping[str, str] = {
    "step_s": "GPU idle between steps",
    "sequence_s": "and for each sequence",
    "host_step_s": "host time of a step",
    "host_sequence_s": "and for each sequence",
    "piece_s": "launches at an attention layer of a step with prompts",
    "fixed_share": "share of a kernel's fixed time that shows",
    "launch_s": "launch of a kernel without CUDA graphs",
    "frontend_s": "between client and scheduler",
    "elementwise_bandwidth": "share of peak bandwidth, norms, activations, KV writes, sampling",
    "elementwise_s": "fixed time of such a kernel",
    "experts_bandwidth": "share of peak bandwidth, routed experts",
    "experts_compute": "share of peak FLOP/s, routed experts",
    "pinned_bandwidth": "share of the host link, pinned memory",
    "pageable_bandwidth": "share of the host link, pageable memory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """All of them for one GPU."""

    gemm: GemmFactors
    """Products of 16-bit numbers (and wider ones)."""
    gemm_8bit: GemmFactors
    decode: DecodeFactors
    prefill: PrefillFactors
    reduce: ReduceFactors
    serving: ServingFactors
    basis: Basis
    about: str
    """On what they were fitted and how far off they are there; for the report."""
    band: tuple[float, float] = (1.0, 1.0)
    """Measured over predicted step times of most servers that were not fitted: least and most."""

    def scaled(
        self, *, weights: float = 1.0, compute: float = 1.0, kv: float = 1.0, **serving: float
    ) -> Factors:
        """The same with the bandwidth of products, the rate of arithmetic and the bandwidth of
        attention multiplied, and serving factors replaced."""
        return replace(
            self,
            gemm=_scaled_gemm(self.gemm, weights, compute),
            gemm_8bit=_scaled_gemm(self.gemm_8bit, weights, compute),
            decode=self.decode._replace(bandwidth=self.decode.bandwidth * kv),
            prefill=self.prefill._replace(
                compute=self.prefill.compute * compute, bandwidth=self.prefill.bandwidth * kv
            ),
            serving=replace(
                self.serving,
                experts_bandwidth=min(1.0, self.serving.experts_bandwidth * weights),
                experts_compute=min(1.0, self.serving.experts_compute * compute),
                **serving,
            ),
        )

    def slower(self, times: float) -> Factors:
        """Every fixed time ``times`` as long (but the way between client and scheduler)."""

        def longer(part: Any) -> Any:
            return part._replace(
                **{
                    name: value * times
                    for name, value in part._asdict().items()
                    if name.endswith("_s")
                }
            )

        serving = {
            name: getattr(self.serving, name) * times
            for name in self.serving.__dataclass_fields__
            if name.endswith("_s") and name != "frontend_s"
        }
        return replace(
            self,
            gemm=self.gemm._replace(kernels=tuple(map(longer, self.gemm.kernels))),
            gemm_8bit=self.gemm_8bit._replace(kernels=tuple(map(longer, self.gemm_8bit.kernels))),
            decode=longer(self.decode),
            prefill=longer(self.prefill),
            reduce=longer(self.reduce),
            serving=replace(self.serving, **serving),
        )


def _scaled_gemm(factors: GemmFactors, weights: float, compute: float) -> GemmFactors:
    return factors._replace(
        kernels=tuple(
            kernel._replace(bandwidth=kernel.bandwidth * weights, compute=kernel.compute * compute)
            for kernel in factors.kernels
        )
    )


_ELSEWHERE: Basis = "datasheet only"
"""Whose band serves every GPU without kernels of its own."""
_NEWEST = "h100-sxm"
"""Whose attention kernels are those of a current engine."""


@cache
def fitted() -> Mapping[str, Any]:
    """The data file: ``gpus`` by catalogue name, ``serving``, ``errors``, ``sources``."""
    text = files("simulator.cost").joinpath("factors.json").read_text(encoding="utf-8")
    document: Mapping[str, Any] = json.loads(text)
    return document


def factors_for(gpu: GPU) -> Factors:
    """Fitted factors of ``gpu``, or of the nearest GPU that there are some for; ``basis`` says which."""
    document = fitted()
    factors = nearest_factors(gpu, document["gpus"], document["serving"])
    is_measured = factors.basis == "measured kernels"
    low, high = document["bands"]["measured kernels" if is_measured else _ELSEWHERE]
    return replace(factors, band=(low, high))


def nearest_factors(gpu: GPU, gpus: Mapping[str, Any], serving: Mapping[str, float]) -> Factors:
    """The same from entries of the data file."""
    name, basis = _nearest(gpu, gpus)
    entry = gpus[name]
    if basis == "datasheet only":
        # A table of attention kernels of 2024 is no guide to today's on a GPU that is in no table.
        entry = {**entry, "decode": gpus[_NEWEST]["decode"], "prefill": gpus[_NEWEST]["prefill"]}
    return factors_from(entry, serving, basis, _about(gpu, name, basis))


def factors_from(
    entry: Mapping[str, Any], serving: Mapping[str, float], basis: Basis, about: str
) -> Factors:
    """One GPU's entry of the data file as factors."""
    share = serving["fixed_share"]
    decode, prefill = DecodeFactors(**entry["decode"]), PrefillFactors(**entry["prefill"])
    return Factors(
        gemm=_gemm(entry["gemm"], share),
        gemm_8bit=_gemm(entry.get("gemm_8bit", entry["gemm"]), share),
        decode=decode._replace(fixed_s=decode.fixed_s * share),
        prefill=prefill._replace(fixed_s=prefill.fixed_s * share),
        reduce=ReduceFactors(**entry["reduce"]),
        serving=ServingFactors(**serving),
        basis=basis,
        about=about,
    )


def _gemm(entry: Mapping[str, Any], fixed_share: float) -> GemmFactors:
    kernels = (GemmKernel(*row) for row in entry["kernels"])
    return GemmFactors(
        tuple(kernel._replace(fixed_s=kernel.fixed_s * fixed_share) for kernel in kernels),
        entry["least_wave"],
    )


def _nearest(gpu: GPU, gpus: Mapping[str, Any]) -> tuple[str, Basis]:
    if gpu.name in gpus:
        return gpu.name, "measured kernels"
    for name, entry in gpus.items():
        if gpu.architecture and entry["architecture"] == gpu.architecture:
            return name, "fitted family"
    # Kernels of server GPUs of one class have the same shares; the others run those of Ampere.
    return ("h100-sxm" if gpu.memory_bandwidth > 3e12 else "a100-80gb"), "datasheet only"


def _about(gpu: GPU, name: str, basis: Basis) -> str:
    errors = fitted()["errors"].get(name, {})
    known = ", ".join(f"{what} {error:.1%}" for what, error in errors.items())
    if basis == "measured kernels":
        return f"shares fitted on measured kernels of {name} (median error, held out: {known})"
    if basis == "fitted family":
        return (
            f"no kernel of {gpu.name} was measured: shares of {name}, of the same architecture, x "
            "its datasheet"
        )
    return (
        f"no kernel of {gpu.name} or its architecture was measured: shares of {name} (attention: "
        f"{_NEWEST}) x its datasheet"
    )
