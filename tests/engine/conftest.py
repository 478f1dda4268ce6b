"""Models that several tests of the engine use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from gpu_backend.config import ModelConfig, RopeConfig
from gpu_backend.model import Decoder
from gpu_backend.tokenizer import Tokenizer, load_tokenizer
from gpu_backend.weights import WeightsError, find_model, load_model


class LoadedModel(NamedTuple):
    path: Path
    model: Decoder
    tokenizer: Tokenizer


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tests run beside each other; tiny products gain nothing from a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return find_model("smollm2")
    except WeightsError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> LoadedModel:
    """SmolLM2-135M-Instruct in float32 (from its quantised GGUF), with its tokenizer."""
    model = load_model(smollm2_path, dtype=torch.float32)
    return LoadedModel(smollm2_path, model, load_tokenizer(smollm2_path))


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    """Two layers, four query heads on two KV heads: every index of the engine has something to
    mix up, and a step takes less than a millisecond."""
    return ModelConfig(
        name="tiny",
        num_layers=2,
        hidden_size=32,
        intermediate_size=48,
        vocab_size=101,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_model_len=512,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10_000.0),
        windows=(None, None),
    )


@pytest.fixture(scope="session")
def tiny_model(tiny_config: ModelConfig) -> Decoder:
    """``tiny_config`` with random weights in float32."""
    return load_model(tiny_config, dtype=torch.float32, seed=0)
