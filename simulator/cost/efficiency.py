"""The assumed part of the physical cost model: what a datasheet does not say."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields


def _assumed(default: float, meaning: str, source: str) -> float:
    """A field of ``Efficiencies`` that ``describe`` can print."""
    return field(default=default, metadata={"meaning": meaning, "source": source})


_GEMMS = "fit to microsoft/vidur (MIT) and ai-dynamo/aiconfigurator (Apache-2.0) GEMM tables"
_KERNELS = "fit to ai-dynamo/aiconfigurator (Apache-2.0) tables of vLLM 0.24 kernels, H100 and H200"


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """What a datasheet does not say. One set for every GPU: assumed, not calibrated.

    Shares are of the datasheet's peak, above 0 and at most 1; times are seconds.
    docs/cost-model.md says how each was found and how far off it leaves the model.
    """

    gemm_compute: float = _assumed(0.76, "share of peak FLOP/s, 16-bit GEMM", _GEMMS)
    gemm_compute_8bit: float = _assumed(0.45, "share of peak FLOP/s, 8-bit GEMM", _KERNELS)
    gemm_bandwidth: float = _assumed(0.87, "share of peak bandwidth, GEMM", _GEMMS)
    attention_compute: float = _assumed(0.65, "share of peak FLOP/s, attention", _KERNELS)
    decode_bandwidth: float = _assumed(0.87, "share of peak bandwidth, decode attention", _KERNELS)
    prefill_bandwidth: float = _assumed(0.4, "share of peak bandwidth, prefill attention", _KERNELS)
    elementwise_bandwidth: float = _assumed(
        0.8, "share of peak bandwidth, norms, activations, KV writes, sampling", "assumed"
    )
    link_bandwidth: float = _assumed(0.45, "share of the link between GPUs", _KERNELS)
    pinned_bandwidth: float = _assumed(
        0.8, "share of the host link, pinned memory", "rule of thumb"
    )
    pageable_bandwidth: float = _assumed(
        0.3, "share of the host link, pageable memory", "rule of thumb"
    )
    gemm_overhead_s: float = _assumed(5e-6, "fixed time of a GEMM kernel", _GEMMS)
    attention_overhead_s: float = _assumed(12e-6, "fixed time of an attention kernel", _KERNELS)
    elementwise_overhead_s: float = _assumed(
        2.5e-6, "fixed time of another kernel", "microsoft/vidur (MIT): add, embedding"
    )
    all_reduce_overhead_s: float = _assumed(5e-6, "fixed time of an all-reduce", _KERNELS)
    host_step_s: float = _assumed(0.5e-3, "host time of a step", "assumed")
    host_seq_s: float = _assumed(5e-6, "host time of a step for each sequence", "assumed")

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            is_share = not item.name.endswith("_s")
            if not (0 < value <= 1 if is_share else 0 <= value < math.inf):
                expected = "a share above 0, at most 1" if is_share else "seconds, 0 or more"
                raise ValueError(f"{item.name} is {value}, expected {expected}")

    def lines(self, *, link: bool = True) -> list[str]:
        """A line for each source: the figures that come from it.

        ``link``: those of the link between GPUs too.
        """
        by_source: dict[str, list[str]] = {}
        for item in fields(self):
            if not link and item.name in ("link_bandwidth", "all_reduce_overhead_s"):
                continue
            value = getattr(self, item.name)
            figure = f"{value * 1e6:g} us" if item.name.endswith("_s") else f"{value:g}"
            by_source.setdefault(item.metadata["source"], []).append(
                f"{item.metadata['meaning']} {figure}"
            )
        return [f"{source}: {'; '.join(figures)}" for source, figures in by_source.items()]
