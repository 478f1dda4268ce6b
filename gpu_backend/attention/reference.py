"""Paged attention, plainly: gather, mask, softmax in fp32. Slow, and the truth for the other paths."""

from __future__ import annotations

import torch

from gpu_backend.attention.inputs import AttentionInputs


def reference_attention(
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
    """See ``PagedAttention``. Waits for the device (it reads lengths from it)."""
    out = torch.zeros_like(query)
    block_size, kv_heads = keys.shape[1:3]
    starts = inputs.query_start.tolist()
    for row, context in enumerate(inputs.context_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        num_queries = tokens.stop - tokens.start
        if context == 0 or num_queries == 0:
            continue
        blocks = inputs.block_tables[row, : -(-context // block_size)]
        slots = torch.arange(len(blocks) * block_size, device=query.device)
        # A masked score is not enough: its weight is 0, and 0 x NaN is NaN.
        dead = (slots >= context)[:, None, None]
        k = gather(keys, key_scales, blocks).masked_fill(dead, 0.0)
        v = gather(values, value_scales, blocks).masked_fill(dead, 0.0)
        q = query[tokens].float().view(num_queries, kv_heads, -1, query.shape[2])
        position = torch.arange(context - num_queries, context, device=query.device)[:, None]
        seen = slots <= position
        if window is not None:
            seen &= slots > position - window
        scores = torch.einsum("qkgd,skd->kgqs", q, k) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[tokens] = torch.einsum("kgqs,skd->qkgd", weights, v).flatten(1, 2).to(out.dtype)
    return out


def gather(pool: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor) -> torch.Tensor:
    """The slots of some blocks in order, as fp32 ``[len(blocks) * block_size, kv_heads, head_dim]``."""
    rows = pool[blocks.long()].float()
    if scales is not None:
        rows = rows * scales[blocks.long()][..., None]
    return rows.flatten(0, 1)
