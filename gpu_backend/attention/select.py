"""Which path computes attention."""

from __future__ import annotations

import importlib.util

import torch

from gpu_backend.attention.inputs import PagedAttention

NAMES = ("reference", "cpu", "triton", "varlen")


def choose(device: torch.device | str, name: str = "auto") -> PagedAttention:
    """A path that runs on ``device``; ``auto`` is triton on CUDA and cpu elsewhere.

    Each call gives an object of its own, for one engine. Raises ``ValueError`` for a name that is
    unknown or cannot run there.
    """
    device = torch.device(device)
    if name == "auto":
        name = "triton" if device.type == "cuda" else "cpu"
    if name == "reference":
        from gpu_backend.attention.reference import reference_attention

        return reference_attention
    if name == "cpu":
        _need(device.type == "cpu", name, f"the CPU, not {device}")
        from gpu_backend.attention.cpu import CpuAttention

        return CpuAttention()
    if name == "triton":
        _need(importlib.util.find_spec("triton") is not None, name, "the package triton")
        from gpu_backend.attention.triton_paged import INTERPRETED, TritonAttention

        where = f"CUDA, not {device} (on the CPU: TRITON_INTERPRET=1, for tests)"
        _need(device.type == "cuda" or INTERPRETED, name, where)
        return TritonAttention()
    if name == "varlen":
        from gpu_backend.attention.varlen import VarlenAttention, is_available

        _need(device.type == "cuda", name, f"CUDA, not {device}")
        _need(is_available(), name, f"torch 2.12 or later built for CUDA, not {torch.__version__}")
        return VarlenAttention()
    raise ValueError(f"attention {name!r} is not one of auto, {', '.join(NAMES)}")


def _need(there: bool, name: str, what: str) -> None:
    if not there:
        raise ValueError(f"attention {name!r} needs {what}")
