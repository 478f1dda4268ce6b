"""Runs step plans on a model: memory moves first, then one forward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch

from gpu_backend.attention.inputs import AttentionInputs, PagedAttention
from gpu_backend.batch import Batcher, IntArray, KnownTokens, to_device
from gpu_backend.graphs import DecodeGraphs
from gpu_backend.kv_cache import KVCache
from gpu_backend.model import Decoder
from gpu_backend.paged_layers import PagedLayers
from scheduler.plan import StepPlan


class Forward(NamedTuple):
    """What a forward pass gave, on the device: nothing has waited for it yet."""

    logits: torch.Tensor
    """float32 ``[R, vocab]``, a row for each sequence that samples, in the plan's order."""
    prompt_logits: Mapping[int, torch.Tensor]
    """By position of the sequence in the plan: float32 ``[granted, vocab]``."""


class Executor:
    """A model and the memory that the scheduler's block ids stand for.

    ``graphs`` are for decode steps on CUDA; ``None`` = every step kernel by kernel.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        attention: PagedAttention,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.model, self.cache, self.attention, self.graphs = model, cache, attention, graphs
        self._batcher = Batcher(cache.block_size)

    @torch.inference_mode()
    def run(
        self,
        plan: StepPlan,
        last_tokens: IntArray,
        known_tokens: KnownTokens,
        prompt_logits_of: Collection[int] = (),
    ) -> Forward:
        """Carry out a plan that computes something, in the order that ``StepPlan`` asks for.

        ``prompt_logits_of`` are positions in the plan whose tokens' logits are all wanted.
        """
        self.cache.execute(plan.swapped_out, plan.copies, plan.swapped_in)
        batch = self._batcher.build(plan, last_tokens, known_tokens)
        if self.graphs is not None and plan.is_decode.all() and self.graphs.fits(batch):
            return Forward(self.graphs.replay(batch), {})
        device, model = self.cache.device, self.model
        attend = PagedLayers(model.config, self.cache, self.attention, batch.inputs(device))
        hidden = model(
            to_device(batch.token_ids, device), to_device(batch.positions, device), attend
        )
        prompts = {
            i: model.logits(hidden[batch.starts[i] : batch.starts[i + 1]]) for i in prompt_logits_of
        }
        last = batch.starts[1:][plan.samples] - 1
        if len(last) < len(hidden):
            hidden = hidden[to_device(last, device)]
        if not len(last):
            return Forward(
                hidden.new_empty((0, model.config.vocab_size), dtype=torch.float32), prompts
            )
        return Forward(model.logits(hidden), prompts)

    def move_memory(self, plan: StepPlan) -> None:
        """The memory moves of a plan in which nobody computes."""
        self.cache.execute(plan.swapped_out, plan.copies, plan.swapped_in)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)

    def warm_up(self, num_tokens: int, num_sampled: int) -> torch.Tensor:
        """One pass of ``num_tokens`` tokens of a sequence that leaves no trace (its KV goes to the null
        block), and the capture of the graphs: what is compiled or allocated once is, then. Returns
        logits ``[num_sampled, vocab]`` that mean nothing."""
        size = self.cache.block_size
        num_tokens = min(num_tokens, self.model.config.max_model_len)
        device = self.cache.device
        inputs = AttentionInputs(
            query_start=to_device(np.array([0, num_tokens], np.int32), device),
            context_lens=to_device(np.array([num_tokens], np.int32), device),
            block_tables=torch.zeros((1, -(-num_tokens // size)), dtype=torch.int32, device=device),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            query_lens_host=(num_tokens,),
            context_lens_host=(num_tokens,),
            max_query_len=num_tokens,
            max_context_len=num_tokens,
        )
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        with torch.inference_mode():
            attend = PagedLayers(self.model.config, self.cache, self.attention, inputs)
            hidden = self.model(ids, torch.arange(num_tokens, device=device), attend)
            rows = torch.zeros(num_sampled, dtype=torch.int64, device=device)
            logits = self.model.logits(hidden[rows])
            if self.graphs is not None:
                self.graphs.capture()
        self.synchronize()
        return logits
