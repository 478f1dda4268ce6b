"""The decoder computes what transformers computes, for every family and every rope scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gpu_backend.config import ModelConfig, ModelConfigError, RopeConfig
from gpu_backend.gguf_weights import open_gguf
from gpu_backend.model import Decoder, RMSNorm, can_pack
from gpu_backend.rope import Rotary, inverse_frequencies, rotate
from gpu_backend.weights import load_model
from tests.engine.conftest import LoadedModel

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha-biases": (
        "llama",
        {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-head-dim": ("llama", {"head_dim": 16}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama-llama3": (
        "llama",
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32}},
    ),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "llama-yarn-mscale": (
        "llama",
        {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16}},
    ),
    "llama-yarn-attention-factor": (
        "llama",
        {"rope_scaling": {**YARN, "attention_factor": 0.8, "truncate": False}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {"sliding_window": 7, "use_sliding_window": False}),
    "qwen2-window": (
        "qwen2",
        {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("qwen2", {"rope_scaling": YARN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-biases-window": (
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "sliding_window": 9,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
CLASSES = {
    "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
    "mistral": (hf.MistralConfig, hf.MistralForCausalLM),
    "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),
    "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
}


class DenseAttend:
    """Softmax over all earlier tokens, sequence by sequence; the keys and values it has seen stay,
    so that a later call can go on where one ended."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.lengths: list[int] = []
        self.kv: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def step(self, *lengths: int) -> DenseAttend:
        """The next call has so many tokens of each sequence."""
        self.lengths = list(lengths)
        return self

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        parts = zip(*(torch.split(x, self.lengths) for x in (query, key, value)), strict=True)
        return torch.cat([self.one(i, layer, *part) for i, part in enumerate(parts)])

    def one(
        self, sequence: int, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if (sequence, layer) in self.kv:
            before_k, before_v = self.kv[sequence, layer]
            k, v = torch.cat((before_k, k)), torch.cat((before_v, v))
        self.kv[sequence, layer] = k, v
        groups = self.config.num_heads // self.config.num_kv_heads
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.config.scale
        behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden = behind < 0
        window = self.config.window(layer)
        if window is not None:
            hidden |= behind >= window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


def random_hf(family: str, changes: dict[str, Any], seed: int = 0) -> Any:
    """A model of transformers whose every weight, bias and norm is random."""
    config_class, model_class = CLASSES[family]
    config = config_class(**{**SHAPE, **changes}, attn_implementation="eager")
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.15, generator=generator)
    return model


@torch.inference_mode()
def logits_of(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    attend = DenseAttend(model.config).step(len(ids))
    return model.logits(model(ids, torch.arange(len(ids)), attend))


def some_ids(count: int, vocab: int = 61) -> torch.Tensor:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = random_hf(*FAMILIES[name])
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, dtype=torch.float32)
    ids = some_ids(SHAPE["max_position_embeddings"])
    with torch.inference_mode():
        want = theirs(ids[None]).logits[0]
    torch.testing.assert_close(logits_of(ours, ids), want, atol=1e-4, rtol=0)
    assert want.std() > 0.3  # logits of some size, so that 1e-4 means something


@pytest.mark.parametrize(
    "scaling", [None, {**LLAMA3, "original_max_position_embeddings": 32}, YARN]
)
def test_a_config_in_the_older_spelling_means_the_same(scaling: dict[str, Any] | None) -> None:
    old = {**SHAPE, "model_type": "llama", "rope_scaling": scaling}
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0, **(scaling or {})}
    a, b = (ModelConfig.from_hf(config, name="m", where="config.json") for config in (old, new))
    assert a == b
    assert a.rope.theta == 5000.0


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {**LLAMA3, "original_max_position_embeddings": 8192},
        {**LLAMA3, "factor": 32.0, "high_freq_factor": 6.0},
        {**YARN, "original_max_position_embeddings": 32768},
        {**YARN, "original_max_position_embeddings": 32768, "truncate": False, "beta_slow": 2},
        {**YARN, "factor": None, "original_max_position_embeddings": 4096, "beta_fast": 20.5},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    ],
)
def test_frequencies_of_a_large_head_equal_transformers(scaling: dict[str, Any]) -> None:
    """A head of 128 has dimensions on every piece of a scaling's curve, one of 8 has not."""
    config = {
        **SHAPE,
        "model_type": "llama",
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 500_000.0,
        "rope_scaling": scaling,
    }
    theirs = hf.LlamaConfig(**{key: v for key, v in config.items() if key != "model_type"})
    want, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs)
    rope = ModelConfig.from_hf(config, name="m", where="c").rope
    torch.testing.assert_close(inverse_frequencies(rope, 128), want, atol=0, rtol=1e-5)
    assert rope.attention_factor == pytest.approx(factor)


def test_real_weights_give_the_logits_of_transformers(smollm2: LoadedModel) -> None:
    config = smollm2.model.config
    shape: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "rope_theta": config.rope.theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": True,
    }
    theirs: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**shape))
    weights = {name: torch.tensor(w) for name, w in open_gguf(smollm2.path).weights()}
    theirs.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    text = "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\n# 12,345 €"
    ids = torch.tensor(smollm2.tokenizer.encode(text))
    with torch.inference_mode():
        want = theirs(ids[None]).logits[0]
    torch.testing.assert_close(logits_of(smollm2.model, ids), want, atol=1e-4, rtol=0)


def test_real_weights_know_the_capital_of_france(smollm2: LoadedModel) -> None:
    """Both sides of the test above read the weights the same way: this one fails where that way is
    wrong (q and k rows not put back in order, say)."""
    ids = torch.tensor(smollm2.tokenizer.encode("The capital of France is"))
    best = int(logits_of(smollm2.model, ids)[-1].argmax())
    assert smollm2.tokenizer.decode([best]) == " Paris"


def test_sequences_end_to_end_do_not_touch_each_other(tiny_model: Decoder) -> None:
    a, b = some_ids(11), some_ids(17) + 1
    attend = DenseAttend(tiny_model.config).step(11, 17)
    positions = torch.cat((torch.arange(11), torch.arange(17)))
    with torch.inference_mode():
        both = tiny_model.logits(tiny_model(torch.cat((a, b)), positions, attend))
    alone = torch.cat((logits_of(tiny_model, a), logits_of(tiny_model, b)))
    torch.testing.assert_close(both, alone, atol=1e-5, rtol=0)


def test_a_sequence_in_chunks_is_the_sequence_at_once(tiny_model: Decoder) -> None:
    ids = some_ids(20)
    attend, parts = DenseAttend(tiny_model.config), []
    for start, end in ((0, 7), (7, 8), (8, 20)):
        with torch.inference_mode():
            positions = torch.arange(start, end)
            hidden = tiny_model(ids[start:end], positions, attend.step(end - start))
        parts.append(tiny_model.logits(hidden))
    torch.testing.assert_close(torch.cat(parts), logits_of(tiny_model, ids), atol=1e-5, rtol=0)


def test_packed_weights_give_the_same_logits(tiny_config: ModelConfig) -> None:
    plain = load_model(tiny_config, dtype=torch.bfloat16, seed=3, pack=False)
    packed = load_model(tiny_config, dtype=torch.bfloat16, seed=3)
    if not can_pack(torch.bfloat16, packed.device):
        pytest.skip("this CPU has no packed bfloat16 kernels")
    assert packed.lm_head.packed is not None
    assert packed.num_bytes > plain.num_bytes * 0.9  # packed weights are counted
    ids = some_ids(9)
    exact = Decoder(tiny_config, dtype=torch.float32)
    for (_, to), (_, weight) in zip(exact.named_weights(), plain.named_weights(), strict=True):
        to.copy_(weight)
    want = logits_of(exact, ids)
    for model in (plain, packed):
        torch.testing.assert_close(logits_of(model, ids), want, atol=0.1, rtol=0)


def test_rms_norm_is_the_root_mean_square_in_float32() -> None:
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0)) * 3 + 1
    weight = torch.nn.Parameter(torch.linspace(0.5, 2, 16), requires_grad=False)
    want = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.01) * weight
    torch.testing.assert_close(RMSNorm(weight, 0.01)(x), want, atol=1e-5, rtol=1e-5)
    half = x.bfloat16()
    want = (
        half.float() * torch.rsqrt(half.float().square().mean(-1, keepdim=True) + 0.01)
    ) * weight
    got = RMSNorm(torch.nn.Parameter(weight.bfloat16(), requires_grad=False), 0.01)(half)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, atol=0, rtol=0.02)


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    rotary = Rotary(RopeConfig(theta=100.0), 8, "cpu")
    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(1, 2, 8, generator=generator),
        torch.randn(1, 2, 8, generator=generator),
    )

    def score(at: int, of: int) -> torch.Tensor:
        q = rotate(query, rotary(torch.tensor([at]), torch.float32))
        k = rotate(key, rotary(torch.tensor([of]), torch.float32))
        torch.testing.assert_close(q.norm(dim=-1), query.norm(dim=-1))
        return (q * k).sum(-1)

    torch.testing.assert_close(score(9, 4), score(105, 100), atol=1e-4, rtol=0)
    assert (score(9, 4) - score(9, 5)).abs().max() > 1e-2


def test_a_tied_model_counts_its_embedding_once(tiny_config: ModelConfig) -> None:
    model = Decoder(tiny_config, dtype=torch.bfloat16)
    numbers = sum(weight.numel() for _, weight in model.named_weights())
    assert model.num_bytes == 2 * numbers + 4 * tiny_config.head_dim  # and the rope frequencies


def test_scale_and_windows_are_read_by_layer() -> None:
    config = ModelConfig.from_hf(
        {**SHAPE, "model_type": "qwen2", **FAMILIES["qwen2-window"][1]}, name="m", where="c"
    )
    assert [config.window(layer) for layer in range(3)] == [None, 7, 7]
    assert config.scale == pytest.approx(8**-0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type is 'gemma2', expected one of llama, mistral"),
        ({"model_type": None}, "no model_type"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected silu"),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, "num_experts is 8"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope', expected default"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: no factor"),
        ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "factor is '8', expected a positive number"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', expected an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config"),
        ({"rms_norm_eps": None}, "no rms_norm_eps"),
        ({"head_dim": 15}, "head_dim 15, expected an even number"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4"),
        ({"hidden_size": "48"}, "hidden_size is '48'"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', expected true or false"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 4}, "llama has no windows"),
        ({"model_type": "mistral"}, "no sliding_window, expected a number or null"),
    ],
)
def test_what_it_cannot_compute_is_refused_in_one_line(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=r"^(folder/config\.json|m)[:,] ") as caught:
        ModelConfig.from_hf(
            {**SHAPE, "model_type": "llama", **changes}, name="m", where="folder/config.json"
        )
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shapes_of_the_catalogue_run_with_random_weights() -> None:
    config = ModelConfig.from_name("llama-3.1-8b")
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (32, 32, 8)
    assert ModelConfig.from_name("mistral-7b-v0.1").window(5) == 4096
    with pytest.raises(ModelConfigError, match="deepseek-v3: mla layers"):
        ModelConfig.from_name("deepseek-v3")
    with pytest.raises(ModelConfigError, match="mixtral-8x7b: num_experts is 8"):
        ModelConfig.from_name("mixtral-8x7b")
