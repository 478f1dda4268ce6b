"""Decode steps as CUDA graphs: one launch instead of hundreds.

A graph is captured for each of some batch sizes; a step takes the next larger one and fills it up with
rows of no context, whose KV goes to the null block. Grids and scratch of the attention are those of the
longest context that the model takes, so that one graph serves every step of its size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from gpu_backend.attention.inputs import AttentionInputs, PagedAttention
from gpu_backend.batch import Batch
from gpu_backend.kv_cache import KVCache
from gpu_backend.model import Attend, Decoder
from gpu_backend.paged_layers import PagedLayers


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8 up to 256 and every 16 beyond, as vLLM captures them."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs + 16, 16), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor


class DecodeGraphs:
    """Graphs of a model's decode steps over one KV pool.

    Parameters
    ----------
    max_num_seqs
        Sequences of the largest graph.
    max_model_len
        Tokens of the longest context.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        attention: PagedAttention,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._model, self._cache, self._attention = model, cache, attention
        self._sizes = capture_sizes(max_num_seqs)
        self._max_model_len = max_model_len
        device = cache.device
        most, width = self._sizes[-1], -(-max_model_len // cache.block_size)
        # The buffers that the graphs read; a step writes its numbers into their first rows.
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.zeros(most, dtype=torch.int64, device=device)
        self._context_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros((most, width), dtype=torch.int32, device=device)
        self._query_start = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._captured: dict[int, _Captured] = {}

    def fits(self, batch: Batch) -> bool:
        return len(batch.context_lens) <= self._sizes[-1] and bool(self._captured)

    def capture(self) -> None:
        """Capture every size, the largest first, so that the others find their memory there. (Only the
        hidden states stay; logits of every size would take gigabytes.)"""
        pool = None
        for size in reversed(self._sizes):
            step = self._attend(size)
            stream: Any = torch.cuda.Stream(self._cache.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._forward(size, step)  # compile and allocate outside of the capture
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden = self._forward(size, step)
            pool = pool or graph.pool()
            self._captured[size] = _Captured(graph, hidden)

    def replay(self, batch: Batch) -> torch.Tensor:
        """Hidden states ``[S, hidden]`` of a step in which each of S sequences has one token; good until
        the next step. Does not wait for the device."""
        count = len(batch.context_lens)
        size = next(size for size in self._sizes if size >= count)
        rows = np.zeros((4, size), np.int64)  # what is left over: no context, slot 0 of block 0
        rows[0, :count] = batch.token_ids
        rows[1, :count] = batch.positions
        rows[2, :count] = batch.slots
        rows[3, :count] = batch.context_lens
        staged = self._stage(torch.from_numpy(rows))
        self._token_ids[:size].copy_(staged[0])
        self._positions[:size].copy_(staged[1])
        self._slots[:size].copy_(staged[2])
        self._context_lens[:size].copy_(staged[3])
        tables = self._stage(torch.from_numpy(np.ascontiguousarray(batch.block_tables)))
        self._block_tables[:count, : tables.shape[1]].copy_(tables)
        captured = self._captured[size]
        captured.graph.replay()
        return captured.hidden[:count]

    def _stage(self, host: torch.Tensor) -> torch.Tensor:
        return host.pin_memory().to(self._cache.device, non_blocking=True)

    def _attend(self, size: int) -> Attend:
        inputs = AttentionInputs(
            query_start=self._query_start[: size + 1],
            context_lens=self._context_lens[:size],
            block_tables=self._block_tables[:size],
            slot_mapping=self._slots[:size],
            query_lens_host=(),
            context_lens_host=(),
            max_query_len=1,
            max_context_len=self._max_model_len,
        )
        return PagedLayers(self._model.config, self._cache, self._attention, inputs)

    def _forward(self, size: int, attend: Attend) -> torch.Tensor:
        hidden: torch.Tensor = self._model(self._token_ids[:size], self._positions[:size], attend)
        return hidden
