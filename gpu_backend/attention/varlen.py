"""Paged attention through torch's own FlashAttention, where torch and device have it."""

from __future__ import annotations

import inspect

import torch

from gpu_backend.attention.inputs import AttentionInputs

_BUILT_IN_MULTIPLE = 256
"""FlashAttention 2, which torch brings, takes blocks of multiples of this only. FlashAttention 3 and 4
(``torch.nn.attention.activate_flash_attention_impl``) take any."""
_LARGEST_HEAD_DIM = 256


def is_available() -> bool:
    """Whether torch has ``varlen_attn`` with block tables (2.12 and later) and sees a CUDA device."""
    if not torch.cuda.is_available():
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "block_table" in inspect.signature(varlen_attn).parameters


class VarlenAttention:
    """See ``PagedAttention``. Raises ``ValueError`` for what FlashAttention does not take: float32, a
    quantised pool, heads of more than 256, with FlashAttention 2 blocks of other sizes than multiples of
    256."""

    def __init__(self) -> None:
        self._step: tuple[AttentionInputs, torch.Tensor] | None = None

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        inputs: AttentionInputs,
        *,
        scale: float,
        window: int | None = None,
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        refuse(query.dtype, query.shape[2], keys.dtype, keys.shape[1])
        out = varlen_attn(
            query,
            keys,
            values,
            inputs.query_start,
            self._key_start(inputs),
            inputs.max_query_len,
            inputs.max_context_len,
            scale=scale,
            # Causal masks are aligned to the end of the context; "left" leaves the own token out.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=inputs.context_lens,
            block_table=inputs.block_tables,
        )
        assert isinstance(out, torch.Tensor), "no auxiliary output was asked for"
        return out

    def _key_start(self, inputs: AttentionInputs) -> torch.Tensor:
        """int32 ``[S + 1]``: the contexts laid end to end; the same in every layer of a step."""
        if self._step is None or self._step[0] is not inputs:
            start = torch.zeros_like(inputs.query_start)
            torch.cumsum(inputs.context_lens, 0, dtype=torch.int32, out=start[1:])
            self._step = inputs, start
        return self._step[1]


def refuse(query: torch.dtype, head_dim: int, pool: torch.dtype, block_size: int) -> None:
    """Raise ``ValueError`` for a model and a pool that FlashAttention does not take."""
    if query not in (torch.float16, torch.bfloat16):
        raise ValueError(f"attention 'varlen': {query} is not float16 or bfloat16")
    if pool != query:
        raise ValueError(f"attention 'varlen': a pool of {pool} is not of the model's {query}")
    if head_dim > _LARGEST_HEAD_DIM:
        raise ValueError(
            f"attention 'varlen': head_dim {head_dim} is more than {_LARGEST_HEAD_DIM}"
        )
    if _implementation() is None and block_size % _BUILT_IN_MULTIPLE:
        raise ValueError(
            f"attention 'varlen': block_size {block_size} is not a multiple of {_BUILT_IN_MULTIPLE}, "
            "as FlashAttention 2 needs"
        )


def _implementation() -> str | None:
    """FlashAttention that was activated in place of the built-in one."""
    try:
        from torch.nn.attention import current_flash_attention_impl
    except ImportError:
        return None
    name = current_flash_attention_impl()
    return None if name in (None, "FA2") else str(name)
