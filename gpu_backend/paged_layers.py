"""What a decoder's layers see of the KV pool."""

from __future__ import annotations

import torch

from gpu_backend.attention.inputs import AttentionInputs, PagedAttention
from gpu_backend.config import ModelConfig
from gpu_backend.kv_cache import KVCache


class PagedLayers:
    """``Attend`` over the KV pool: write a layer's keys and values, then attend."""

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache,
        attention: PagedAttention,
        inputs: AttentionInputs,
    ) -> None:
        self.cache, self.attention, self.inputs = cache, attention, inputs
        self._config = config

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        cache = self.cache
        cache.write(layer, key, value, self.inputs.slot_mapping)
        return self.attention(
            query,
            cache.keys(layer),
            cache.values(layer),
            self.inputs,
            scale=self._config.scale,
            window=self._config.window(layer),
            key_scales=cache.key_scales(layer),
            value_scales=cache.value_scales(layer),
        )
