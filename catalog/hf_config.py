"""A Hugging Face ``config.json`` read as a ``ModelShape``.

Keys and defaults are those of the configuration classes of huggingface/transformers. What the file
does not say and a class default does not settle is assumed and said so in ``assumptions``; what
memory cannot be computed without (a recurrent state, say) is refused with the missing keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from catalog.errors import CatalogError
from catalog.shapes import DTYPE_BITS, AttentionLayers, ModelShape

# Class defaults that real files leave out. Gemma 3's published files give only what differs.
_CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"moe_intermediate_size": 768},
}
_UNTIED_BY_DEFAULT = {
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "phi3",
    "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text",
}  # fmt: skip
_KNOWN_TYPES = _UNTIED_BY_DEFAULT | set(_CLASS_DEFAULTS)
_PLAIN_MLP = {"gpt2", "gpt_neox", "opt", "bloom", "falcon", "phi", "gptj", "starcoder2", "nemotron"}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "bf16"}
_FULL, _SLIDING, _RECURRENT = "full", "sliding", "recurrent"
_LAYER_KINDS = {
    "full_attention": _FULL,
    "attention": _FULL,
    "sliding_attention": _SLIDING,
    "chunked_attention": _SLIDING,
    "linear_attention": _RECURRENT,
    "mamba": _RECURRENT,
}
# Layouts of hybrid models that do not list their layers in layer_types.
_HYBRID_KEYS = (
    "hybrid_override_pattern",
    "attn_layer_period",
    "attn_layer_indices",
    "attn_type_list",
    "block_types",
    "layers_block_type",
    "linear_attn_config",
    "ssm_cfg",
)
_GATED_DELTA_KEYS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_MAMBA_KEYS = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")


def shape_from_config(
    config: Mapping[str, Any], *, name: str, source: str, where: str
) -> ModelShape:
    """The shape that a config describes; multimodal ones are read through their ``text_config``.

    Raises ``CatalogError`` that starts with ``where`` and names the key and what was expected.
    """
    return _Reader(config, where).shape(name, source)


class _Reader:
    """One config, its class defaults, and what had to be assumed on the way."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.assumptions: list[str] = []
        self.where = where
        data = dict(config)
        nested = config.get("text_config") or config.get("language_config")
        if nested is not None and "num_hidden_layers" not in config:
            if not isinstance(nested, Mapping):
                self.fail("text_config", nested, "an object")
            # The outer file holds what both towers share; text_config wins.
            data = {**config, **nested}
            self.where = f"{where}, text_config"
        if config.get("vision_config"):
            self.assumptions.append("the vision tower is not counted")
        self.model_type = str(data.get("model_type", "")).lower()
        if self.model_type in ("gemma3", "llama4"):
            self.model_type += "_text"
        self.data = data
        self.defaults = _CLASS_DEFAULTS.get(self.model_type, {})

    def fail(self, key: str, value: object, expected: str) -> NoReturn:
        raise CatalogError(f"{self.where}: {key} is {value!r}, expected {expected}")

    def missing(self, key: str, expected: str) -> NoReturn:
        raise CatalogError(f"{self.where}: no {key}, expected {expected}")

    def get(self, key: str) -> Any:
        """The file's value, else the class default (said), else None."""
        value = self.data.get(key)
        if value is None and key in self.defaults:
            value = self.defaults[key]
            if key != "tie_word_embeddings":
                self.assumptions.append(f"{key} {value}: the default of {self.model_type}")
            self.data[key] = value
        return value

    def positive(self, *keys: str, expected: str = "a positive whole number") -> int:
        """The first of ``keys`` that is given; it must be a positive whole number."""
        value = self.optional(*keys)
        if value is None:
            self.missing(" or ".join(keys), expected)
        return value

    def optional(self, *keys: str) -> int | None:
        for key in keys:
            value = self.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                self.fail(key, value, "a positive whole number")
            return value
        return None

    def count(self, key: str, default: int = 0) -> int:
        """A whole number that may be 0."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.fail(key, value, "a whole number, 0 or more")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, value, "true or false")
        return value

    # The shape.

    def shape(self, name: str, source: str) -> ModelShape:
        num_layers = self.positive("num_hidden_layers", "n_layer", "n_layers")
        hidden_size = self.positive("hidden_size", "n_embd", "d_model")
        dtype = self.native_dtype()
        attention = self.attention(num_layers, hidden_size, dtype)
        moe = self.experts(num_layers)
        if self.count("num_nextn_predict_layers"):
            self.assumptions.append("the multi-token prediction layers are not counted")
        return ModelShape(
            name=name,
            num_layers=num_layers,
            hidden_size=hidden_size,
            vocab_size=self.positive("vocab_size"),
            max_model_len=self.max_model_len(),
            attention=attention,
            tie_word_embeddings=self.tied(),
            attention_bias=self.flag("attention_bias", self.model_type in ("qwen2", "qwen2_moe")),
            num_mlp_matrices=self.mlp_matrices(),
            native_dtype=dtype,
            source=source,
            **moe,
            assumptions=tuple(dict.fromkeys(self.assumptions)),
        )

    def tied(self) -> bool:
        if self.get("tie_word_embeddings") is None and self.model_type not in _UNTIED_BY_DEFAULT:
            self.assumptions.append("tie_word_embeddings not given: a separate LM head")
        return self.flag("tie_word_embeddings", default=False)

    def mlp_matrices(self) -> int:
        if self.model_type in _PLAIN_MLP:
            return 2
        if self.model_type not in _KNOWN_TYPES:
            self.assumptions.append(f"model type {self.model_type or 'not given'}: a gated MLP")
        return 3

    def native_dtype(self) -> str:
        """What the weights are stored in; 32-bit ones are served in 16 bits."""
        quantized = self.data.get("quantization_config")
        if isinstance(quantized, Mapping):
            method = str(quantized.get("quant_method", "")).lower()
            bits = quantized.get("bits")
            if method in DTYPE_BITS:
                return method
            if method in ("awq", "gptq", "auto-round") and bits in (None, 4, 8):
                return "int8" if bits == 8 else "int4"
            self.assumptions.append(
                f"quantization_config {method or 'without quant_method'} is not read: "
                "weights taken as not quantised"
            )
        given = self.data.get("torch_dtype") or self.data.get("dtype")
        if given is None:
            self.assumptions.append("torch_dtype not given: bf16")
            return "bf16"
        dtype = _DTYPES.get(str(given).removeprefix("torch."))
        if dtype is None:
            self.fail("torch_dtype", given, f"one of {', '.join(_DTYPES)}")
        if "float32" in str(given):
            self.assumptions.append("float32 weights are served in bf16")
        return dtype

    def max_model_len(self) -> int:
        """``max_position_embeddings``, times the scaling that is not yet in it."""
        length = self.positive("max_position_embeddings", "n_positions", "max_sequence_length")
        scaling = self.data.get("rope_scaling")
        if not isinstance(scaling, Mapping):
            return length
        kind = scaling.get("rope_type") or scaling.get("type")
        factor = scaling.get("factor")
        if not isinstance(factor, int | float) or isinstance(factor, bool) or factor <= 0:
            return length
        original = scaling.get("original_max_position_embeddings")
        if kind == "yarn" and isinstance(original, int):
            return max(length, round(original * factor))
        if kind in ("linear", "dynamic") and not self.model_type.startswith("gemma3"):
            return round(length * factor)
        return length

    # Attention.

    def attention(
        self, num_layers: int, hidden_size: int, dtype: str
    ) -> tuple[AttentionLayers, ...]:
        num_heads = self.positive("num_attention_heads", "n_head", "n_heads")
        if self.optional("kv_lora_rank") is not None:
            return (self.mla(num_layers, num_heads),)
        head_dim = self.optional("head_dim")
        if head_dim is None:
            if hidden_size % num_heads:
                self.missing(
                    "head_dim",
                    f"it, because hidden_size {hidden_size} is no multiple of "
                    f"num_attention_heads {num_heads}",
                )
            head_dim = hidden_size // num_heads
        num_kv_heads = self.optional("num_key_value_heads", "num_kv_heads")
        if num_kv_heads is None:
            num_kv_heads = 1 if self.data.get("multi_query") is True else num_heads
            if "multi_query" not in self.data:
                self.assumptions.append(f"num_key_value_heads not given: {num_heads}, as MHA")
        if num_heads % num_kv_heads:
            self.fail("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} query heads")
        kinds = Counter(self.layer_kinds(num_layers))
        groups: list[AttentionLayers] = []
        if kinds[_FULL]:
            groups.append(
                AttentionLayers(
                    kind="full",
                    num_layers=kinds[_FULL],
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                )
            )
        if kinds[_SLIDING]:
            groups.append(
                AttentionLayers(
                    kind="sliding",
                    num_layers=kinds[_SLIDING],
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    window=self.positive("sliding_window", "attention_chunk_size"),
                )
            )
        if kinds[_RECURRENT]:
            groups.append(self.recurrent(kinds[_RECURRENT], dtype))
        return tuple(groups)

    def layer_kinds(self, num_layers: int) -> list[str]:
        """Kind of each layer, first to last."""
        listed = self.data.get("layer_types")
        if listed is not None:
            return self.listed_kinds(listed, num_layers)
        for key in _HYBRID_KEYS:
            if self.data.get(key):
                self.missing(
                    "layer_types",
                    f"it: {key} says that recurrent and attention layers mix, and the layers that "
                    "keep a KV cache must be named one by one",
                )
        if interval := self.optional("full_attention_interval"):
            return [_RECURRENT if (i + 1) % interval else _FULL for i in range(num_layers)]
        if any(self.data.get(key) for key in (*_GATED_DELTA_KEYS, *_MAMBA_KEYS)):
            self.missing("layer_types", "it, because the model has recurrent layers")
        return self.windowed_kinds(num_layers)

    def listed_kinds(self, listed: object, num_layers: int) -> list[str]:
        if not isinstance(listed, list) or len(listed) != num_layers:
            size = f"{len(listed)} entries" if isinstance(listed, list) else repr(listed)
            self.fail("layer_types", size, f"a list of {num_layers}, one for each layer")
        for kind in listed:
            if kind not in _LAYER_KINDS:
                self.fail("layer_types", kind, f"kinds among {', '.join(_LAYER_KINDS)}")
        kinds = [_LAYER_KINDS[kind] for kind in listed]
        if self.model_type.startswith(("qwen2", "qwen3")) and not self.uses_window():
            kinds = [_FULL if kind == _SLIDING else kind for kind in kinds]
        return kinds

    def uses_window(self) -> bool:
        return self.flag("use_sliding_window", default=False)

    def windowed_kinds(self, num_layers: int) -> list[str]:
        layers = range(num_layers)
        if self.model_type == "llama4_text":
            # no_rope_layers: 0 marks a layer without rotary embedding, which attends to everything.
            rope = self.data.get("no_rope_layers") or []
            interval = self.optional("no_rope_layer_interval") or 4
            if not self.optional("attention_chunk_size"):
                return [_FULL] * num_layers
            if rope and len(rope) != num_layers:
                self.fail("no_rope_layers", f"{len(rope)} entries", f"{num_layers}, one a layer")
            is_chunked = [bool(x) for x in rope] or [(i + 1) % interval != 0 for i in layers]
            return [_SLIDING if chunked else _FULL for chunked in is_chunked]
        if not self.optional("sliding_window"):
            return [_FULL] * num_layers
        if self.model_type.startswith(("qwen2", "qwen3")):
            first = self.count("max_window_layers", default=num_layers)
            if not self.uses_window():
                first = num_layers
            return [_FULL if i < first else _SLIDING for i in layers]
        pattern = self.optional("sliding_window_pattern", "_sliding_window_pattern")
        if pattern is None:
            pattern = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4}.get(
                self.model_type
            )
        if pattern is None:
            return [_SLIDING] * num_layers
        return [_SLIDING if (i + 1) % pattern else _FULL for i in layers]

    def mla(self, num_layers: int, num_heads: int) -> AttentionLayers:
        return AttentionLayers(
            kind="mla",
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=1,
            head_dim=self.positive("qk_nope_head_dim"),
            v_head_dim=self.positive("v_head_dim"),
            kv_lora_rank=self.positive("kv_lora_rank"),
            q_lora_rank=self.count("q_lora_rank"),
            rope_head_dim=self.positive("qk_rope_head_dim"),
        )

    def recurrent(self, num_layers: int, dtype: str) -> AttentionLayers:
        """State of a gated delta net (Qwen3-Next, Qwen3.5) or of Mamba-2 layers.

        The state is a matrix per head and the last ``kernel - 1`` inputs of the convolution:
        ``heads x key dim x value dim`` and ``(kernel - 1) x channels``.
        """
        conv_bytes = 2 if DTYPE_BITS[dtype] <= 16 else 4
        state_bytes = 4
        given = self.data.get("mamba_ssm_dtype")
        if given is None:
            self.assumptions.append("recurrent state in fp32 (mamba_ssm_dtype not given)")
        elif given in ("bfloat16", "float16"):
            state_bytes = 2
        elif given != "float32":
            self.fail("mamba_ssm_dtype", given, "float32, bfloat16 or float16")
        self.assumptions.append(f"convolution state in {conv_bytes} bytes a value")
        if all(self.data.get(key) for key in _MAMBA_KEYS):
            heads, head_dim, state, groups, kernel = (self.positive(key) for key in _MAMBA_KEYS)
            channels = heads * head_dim + 2 * groups * state
            self.assumptions.append("weights of the recurrent layers are not counted")
            return AttentionLayers(
                kind="recurrent",
                num_layers=num_layers,
                state_bytes=heads * head_dim * state * state_bytes
                + (kernel - 1) * channels * conv_bytes,
            )
        expected = "it: the recurrent layers' state cannot be computed without " + ", ".join(
            _GATED_DELTA_KEYS
        )
        k_heads, v_heads, k_dim, v_dim, kernel = (
            self.positive(key, expected=expected) for key in _GATED_DELTA_KEYS
        )
        channels = 2 * k_heads * k_dim + v_heads * v_dim
        return AttentionLayers(
            kind="recurrent",
            num_layers=num_layers,
            num_heads=v_heads,
            num_kv_heads=k_heads,
            head_dim=k_dim,
            v_head_dim=v_dim,
            state_bytes=v_heads * k_dim * v_dim * state_bytes
            + (kernel - 1) * channels * conv_bytes,
        )

    # Mixture of experts.

    def experts(self, num_layers: int) -> dict[str, Any]:
        num_experts = max(
            self.count(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")
        )
        if not num_experts:
            return {"intermediate_size": self.positive("intermediate_size", "n_inner", "ffn_dim")}
        moe_size = self.positive("moe_intermediate_size", "intermediate_size")
        num_moe_layers = self.num_moe_layers(num_layers)
        dense_size = 0
        if num_moe_layers < num_layers:
            dense_size = self.positive("intermediate_size_mlp", "intermediate_size")
        shared = self.count("shared_expert_intermediate_size")
        if n_shared := self.count("n_shared_experts"):
            shared = n_shared * moe_size
        if self.model_type == "llama4_text":
            shared = moe_size
        return {
            "intermediate_size": dense_size,
            "num_experts": num_experts,
            "num_experts_per_token": self.positive(
                "num_experts_per_tok", "num_experts_per_token", "moe_topk"
            ),
            "moe_intermediate_size": moe_size,
            "shared_expert_intermediate_size": shared,
            "num_moe_layers": num_moe_layers,
        }

    def num_moe_layers(self, num_layers: int) -> int:
        """Layers with experts: all but the leading dense ones and those between the steps."""
        layers = range(num_layers)
        if self.get("first_k_dense_replace") is not None:
            first = self.count("first_k_dense_replace")
            every = self.optional("moe_layer_freq") or 1
            return sum(1 for i in layers if i >= first and i % every == 0)
        if listed := self.data.get("moe_layers"):
            return len(listed)
        step = self.optional("decoder_sparse_step", "interleave_moe_layer_step") or 1
        dense = self.data.get("mlp_only_layers") or []
        return sum(1 for i in layers if (i + 1) % step == 0 and i not in dense)
