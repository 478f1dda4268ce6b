"""Runs step plans on a model: memory moves first, then one forward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch

from gpu_backend.attention.inputs import PagedAttention
from gpu_backend.batch import Batch, Batcher, IntArray, KnownTokens, to_device
from gpu_backend.graphs import DecodeGraphs
from gpu_backend.kv_cache import KVCache
from gpu_backend.model import Decoder
from gpu_backend.paged_layers import PagedLayers
from scheduler.plan import StepPlan


class Forward(NamedTuple):
    """What a forward pass gave, on the device: nothing has waited for it yet."""

    logits: torch.Tensor
    """float32 ``[R, vocab]``, a row for each sequence that samples, in the plan's order."""
    prompt_hidden: Mapping[int, torch.Tensor]
    """By position of the sequence in the plan: ``[granted, hidden]``, for ``model.logits``. (The logits
    of a whole chunk would take gigabytes.)"""


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
        prompts: Collection[int] = (),
    ) -> Forward:
        """Carry out a plan that computes something, in the order that ``StepPlan`` asks for.

        ``prompts`` are positions in the plan whose tokens' logits are all wanted.
        """
        self.cache.execute(plan.swapped_out, plan.copies, plan.swapped_in)
        batch = self._batcher.build(plan, last_tokens, known_tokens)
        device, model = self.cache.device, self.model
        if self.graphs is not None and plan.is_decode.all() and self.graphs.fits(batch):
            return Forward(model.logits(self.graphs.replay(batch)), {})
        attend = PagedLayers(model.config, self.cache, self.attention, batch.inputs(device))
        hidden = model(
            to_device(batch.token_ids, device), to_device(batch.positions, device), attend
        )
        of_prompts = {i: hidden[batch.starts[i] : batch.starts[i + 1]] for i in prompts}
        last = batch.starts[1:][plan.samples] - 1
        if len(last) < len(hidden):
            hidden = hidden[to_device(last, device)]
        if not len(last):
            return Forward(
                hidden.new_empty((0, model.config.vocab_size), dtype=torch.float32), of_prompts
            )
        return Forward(model.logits(hidden), of_prompts)

    def move_memory(self, plan: StepPlan) -> None:
        """The memory moves of a plan in which nobody computes."""
        self.cache.execute(plan.swapped_out, plan.copies, plan.swapped_in)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)

    def warm_up(self, num_tokens: int, num_sampled: int) -> torch.Tensor:
        """One pass of ``num_tokens`` tokens of sequences that leave no trace (their KV goes to the null
        block), and the capture of the graphs: what is compiled or allocated once is, then. Returns
        logits ``[num_sampled, vocab]`` that mean nothing."""
        size, device = self.cache.block_size, self.cache.device
        longest = min(num_tokens, self.model.config.max_model_len)
        whole, rest = divmod(num_tokens, longest)
        lens = np.array([longest] * whole + ([rest] if rest else []), np.int64)
        batch = Batch(
            token_ids=np.zeros(num_tokens, np.int64),
            positions=np.concatenate([np.arange(count) for count in lens]),
            slots=np.zeros(num_tokens, np.int64),
            starts=np.concatenate([[0], np.cumsum(lens)]),
            context_lens=lens,
            block_tables=np.zeros((len(lens), -(-longest // size)), np.int32),
        )
        with torch.inference_mode():
            attend = PagedLayers(
                self.model.config, self.cache, self.attention, batch.inputs(device)
            )
            hidden = self.model(
                to_device(batch.token_ids, device), to_device(batch.positions, device), attend
            )
            rows = torch.zeros(num_sampled, dtype=torch.int64, device=device)
            logits = self.model.logits(hidden[rows])
            if self.graphs is not None:
                self.graphs.capture()
        self.synchronize()
        return logits
