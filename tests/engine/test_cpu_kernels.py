"""The compiled decode step against the plain one, on the same weights and the same KV."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_backend.attention.inputs import AttentionInputs
from gpu_backend.attention.select import choose
from gpu_backend.config import ModelConfig, RopeConfig
from gpu_backend.kv_cache import KVCache
from gpu_backend.model import Decoder, can_pack
from gpu_backend.paged_layers import PagedLayers
from gpu_backend.weights import load_model
from tests.engine.conftest import LoadedModel

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")), reason="no bfloat16 kernels on this CPU"
)

CONFIG = ModelConfig(
    name="narrow", num_layers=3, hidden_size=192, intermediate_size=256, vocab_size=300, num_heads=6,
    num_kv_heads=2, head_dim=64, max_model_len=512, rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0), windows=(None, 20, None),
)  # fmt: skip
KINDS = {
    "llama": CONFIG,
    "qwen3": replace(CONFIG, qk_norm=True),
    "qwen2": replace(CONFIG, qkv_bias=True),
}


class Served:
    """A model with sequences of some contexts, KV at random, about to decode."""

    def __init__(self, model: Decoder, contexts: list[int], dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        self.model, config = model, model.config
        width = -(-max(contexts) // 16)
        self.cache = KVCache(
            config.num_layers, len(contexts) * width, 16, config.num_kv_heads, config.head_dim,
            dtype, "cpu",
        )  # fmt: skip
        self.cache.pool.copy_(torch.randn(self.cache.pool.shape).to(torch.bfloat16))
        tables = (torch.randperm(len(contexts) * width) + 1).view(len(contexts), width).int()
        self.positions = torch.tensor(contexts) - 1
        rows = torch.arange(len(contexts))
        slots = tables[rows, self.positions // 16].long() * 16 + self.positions % 16
        slots[-1] = -1  # the last is one whose KV goes nowhere
        self.token_ids = torch.arange(len(contexts)) + 5
        inputs = AttentionInputs(
            query_start=torch.arange(len(contexts) + 1, dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=tables,
            slot_mapping=slots,
            query_lens_host=(1,) * len(contexts),
            context_lens_host=tuple(contexts),
            max_query_len=1,
            max_context_len=max(contexts),
        )
        self.attend = PagedLayers(config, self.cache, choose("cpu", "cpu"), inputs)

    @torch.inference_mode()
    def logits(self) -> torch.Tensor:
        return self.model.logits(self.model(self.token_ids, self.positions, self.attend))


def relative_error(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found - want).norm() / want.norm())


@pytest.mark.parametrize("contexts", [[1], [300], [7, 64, 33], [*range(20, 36)]])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_it_is_the_plain_step_with_fewer_roundings(kind: str, contexts: list[int]) -> None:
    model = load_model(KINDS[kind], dtype=torch.bfloat16, seed=0)
    assert model.fused is not None
    exact = load_model(KINDS[kind], dtype=torch.float32, seed=0)
    with torch.no_grad():  # the same weights: those of 16 bits, widened
        plain = load_model(KINDS[kind], dtype=torch.bfloat16, seed=0, pack=False)
        for (_, wide), (_, narrow) in zip(
            exact.named_weights(), plain.named_weights(), strict=True
        ):
            wide.copy_(narrow)
    fused, slow = Served(model, contexts, torch.bfloat16), Served(plain, contexts, torch.bfloat16)
    truth = Served(exact, contexts, torch.float32)
    assert model.fused.takes(fused.attend)
    found, plain_logits, want = fused.logits(), slow.logits(), truth.logits()
    assert relative_error(found, want) <= 1.2 * relative_error(plain_logits, want) + 1e-4
    # What it wrote to the pool is what the plain step writes, up to a rounding.
    pools = fused.cache.pool[:, :, 1:].float(), slow.cache.pool[:, :, 1:].float()
    assert relative_error(*pools) < 0.01
    untouched = (fused.cache.pool == slow.cache.pool).float().mean()
    assert untouched > 0.5


def test_what_it_does_not_serve_takes_the_plain_way() -> None:
    model = load_model(CONFIG, dtype=torch.bfloat16, seed=0)
    assert model.fused is not None
    served = Served(model, [30], torch.bfloat16)
    for changed in (
        PagedLayers(CONFIG, served.cache, choose("cpu", "reference"), served.attend.inputs),
        PagedLayers(
            CONFIG,
            KVCache(3, 4, 16, 2, 64, torch.bfloat16, "cpu", "int8"),
            choose("cpu", "cpu"),
            served.attend.inputs,
        ),
        PagedLayers(
            CONFIG,
            served.cache,
            choose("cpu", "cpu"),
            replace(served.attend.inputs, max_query_len=2),
        ),
        lambda *_: None,
    ):
        assert not model.fused.takes(changed)
    assert load_model(CONFIG, dtype=torch.float32, seed=0).fused is None


def test_the_real_model_is_no_worse_than_plain(smollm2: LoadedModel) -> None:
    contexts = [3, 90, 200]
    want = Served(smollm2.model, contexts, torch.float32).logits()
    found = {}
    for pack in (True, False):
        model = load_model(smollm2.path, dtype=torch.bfloat16, pack=pack)
        found[pack] = relative_error(Served(model, contexts, torch.bfloat16).logits(), want)
    assert found[True] <= 1.1 * found[False]
