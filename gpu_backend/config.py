"""What a decoder computes: shape, rotary embedding, attention windows, biases and norms.

Read from a Hugging Face ``config.json``, from the metadata of a GGUF file, or from a shape of the
catalogue. What the decoder in ``model.py`` does not compute is refused here, with the key's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from catalog import CatalogError, ModelShape, load_model, shape_from_config
from catalog.lookup import as_path, read_json_object

RopeKind = Literal["default", "linear", "llama3", "yarn", "divided"]
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_DEFAULT_THETA = 10_000.0
"""Of every family's configuration class in transformers, and of llama.cpp."""


class ModelConfigError(ValueError):
    """A model that this decoder cannot compute: where, which key, and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding and how its frequencies are scaled (formulas in ``rope.py``)."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_len: int = 0
    """Positions that the model was trained on before the scaling (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Round the bounds of yarn's ramp to whole dimensions."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn)."""
    divisors: tuple[float, ...] = ()
    """One for each frequency (``divided``: how GGUF files store Llama 3's scaling)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family: RMSNorm, rotary embedding, grouped queries, SwiGLU."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    """Tokens of context that the model and its rope scaling were made for."""
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """For each layer the tokens that a query sees, itself included; ``None`` = all before it."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of each query and key head before the rotary embedding (Qwen3)."""
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ModelConfigError(
                f"{self.name}: head_dim {self.head_dim}, expected an even number"
            )
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"{self.name}: {self.num_kv_heads} KV heads, expected a divisor of the "
                f"{self.num_heads} query heads"
            )
        assert len(self.windows) == self.num_layers, "one window a layer"

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return float(self.head_dim**-0.5)

    def window(self, layer: int) -> int | None:
        return self.windows[layer]

    @classmethod
    def from_name(cls, name_or_path: str | Path) -> ModelConfig:
        """A ``config.json`` (or its folder), or a model of the catalogue by its name.

        Raises ``ModelConfigError`` or ``CatalogError``.
        """
        path = as_path(name_or_path)
        if path is None:
            return cls.from_shape(load_model(name_or_path))
        if path.is_dir():
            path = path / "config.json"
        config = read_json_object(path, "a Hugging Face config.json")
        return cls.from_hf(config, name=path.resolve().parent.name, where=str(path))

    @classmethod
    def from_shape(cls, shape: ModelShape) -> ModelConfig:
        """A plain Llama of this shape, for random weights and measurements of time.

        A shape has no rope theta, epsilon or q/k norm: 10,000, 1e-5 and none, so that real weights
        must come with their own configuration.
        """
        if len(shape.attention) != 1 or shape.attention[0].kind not in ("full", "sliding"):
            kinds = " and ".join(group.kind for group in shape.attention)
            raise ModelConfigError(
                f"{shape.name}: {kinds} layers, expected all full or all sliding attention"
            )
        (group,) = shape.attention
        _refuse(shape.name, "num_experts", shape.num_experts, 0, "a dense model")
        _refuse(shape.name, "num_mlp_matrices", shape.num_mlp_matrices, 3, "a gated MLP")
        if group.v_head_dim not in (0, group.head_dim):
            raise ModelConfigError(
                f"{shape.name}: v_head_dim {group.v_head_dim}, expected head_dim {group.head_dim}"
            )
        return cls(
            name=shape.name,
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            vocab_size=shape.vocab_size,
            num_heads=group.num_heads,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            max_model_len=shape.max_model_len,
            rms_norm_eps=1e-5,
            rope=RopeConfig(theta=_DEFAULT_THETA),
            windows=(group.window or None,) * shape.num_layers,
            qkv_bias=shape.attention_bias,
            tie_word_embeddings=shape.tie_word_embeddings,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, name: str, where: str) -> ModelConfig:
        """What ``config.json`` says, with the meaning that transformers' classes give it.

        Raises ``ModelConfigError`` (or ``CatalogError``) that starts with ``where``.
        """
        family = config.get("model_type")
        if family not in _FAMILIES:
            _fail(where, "model_type", family, f"one of {', '.join(_FAMILIES)}")
        _refuse(where, "hidden_act", config.get("hidden_act", "silu"), "silu", "silu")
        if config.get("quantization_config"):
            _fail(where, "quantization_config", "given", "none: unquantised weights, or a GGUF")
        scaling = _scaling_from_hf(config, where)
        shape = shape_from_config(
            {**config, "rope_scaling": scaling}, name=name, source=where, where=where
        )
        _refuse(where, "num_experts", shape.num_experts, 0, "a dense model")
        heads = shape.attention[0]
        bias = _flag(config, "attention_bias", where)
        return cls(
            name=name,
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            vocab_size=shape.vocab_size,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            # Dynamic NTK scaling changes the frequencies of a whole sequence once it outgrows the
            # trained length, also those in keys long cached. Up to that length it is plain rope.
            max_model_len=config["max_position_embeddings"]
            if scaling["rope_type"] == "dynamic"
            else shape.max_model_len,
            rms_norm_eps=_number(config, "rms_norm_eps", where),
            rope=_rope_from_hf(scaling, where),
            windows=_windows_from_hf(config, shape, where),
            qkv_bias=family == "qwen2" or (family != "mistral" and bias),
            output_bias=family in ("llama", "qwen3") and bias,
            mlp_bias=family == "llama" and _flag(config, "mlp_bias", where),
            qk_norm=family == "qwen3",
            tie_word_embeddings=shape.tie_word_embeddings,
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, tuple[int, ...]],
        *,
        rope_divisors: Sequence[float] = (),
        where: str,
    ) -> ModelConfig:
        """What the key-value pairs of a GGUF file say.

        Parameters
        ----------
        tensors
            Shape of each tensor in the file, rows first: they tell the vocabulary, the biases and
            whether there is a separate output matrix.
        rope_divisors
            Content of the tensor ``rope_freqs.weight``, where there is one.
        """
        arch = metadata.get("general.architecture")
        if arch not in ("llama", "qwen2", "qwen3"):
            _fail(where, "general.architecture", arch, "llama, qwen2 or qwen3")
        own = {
            key.removeprefix(f"{arch}."): value
            for key, value in metadata.items()
            if key.startswith(f"{arch}.")
        }
        where = f"{where}, {arch}"
        _refuse(where, "expert_count", own.get("expert_count", 0), 0, "a dense model")
        if "token_embd.weight" not in tensors:
            _fail(where, "token_embd.weight", None, "the embedding matrix")
        num_layers = _count(own, "block_count", where)
        hidden_size = _count(own, "embedding_length", where)
        num_heads = _count(own, "attention.head_count", where)
        default_dim = hidden_size // num_heads
        head_dim = _count(own, "attention.key_length", where, default_dim)
        for key in ("attention.value_length", "rope.dimension_count"):
            _refuse(where, key, own.get(key, head_dim), head_dim, f"the key length, {head_dim}")
        context = _count(own, "context_length", where)
        window = own.get("attention.sliding_window") or None
        if window is not None and arch != "llama":
            # Of these files the key says nothing about which layers it holds for.
            if window < context:
                _fail(where, "attention.sliding_window", window, f"at least {context}, the context")
            window = None
        return cls(
            name=str(metadata.get("general.name") or Path(where).stem),
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=_count(own, "feed_forward_length", where),
            vocab_size=tensors["token_embd.weight"][0],
            num_heads=num_heads,
            num_kv_heads=_count(own, "attention.head_count_kv", where, num_heads),
            head_dim=head_dim,
            max_model_len=context,
            rms_norm_eps=_number(own, "attention.layer_norm_rms_epsilon", where),
            rope=_rope_from_gguf(own, rope_divisors, context, where),
            windows=(window,) * num_layers,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_up.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            tie_word_embeddings="output.weight" not in tensors,
        )


def _windows_from_hf(
    config: Mapping[str, Any], shape: ModelShape, where: str
) -> tuple[int | None, ...]:
    """The layers' windows in their order (a ``ModelShape`` only counts them)."""
    family, num_layers = config["model_type"], shape.num_layers
    if family == "llama":
        if any(group.kind != "full" for group in shape.attention):
            _fail(where, "sliding_window or layer_types", "given", "none: llama has no windows")
        return (None,) * num_layers
    if family == "mistral":
        if "sliding_window" not in config:
            raise ModelConfigError(f"{where}: no sliding_window, expected a number or null")
        if config.get("layer_types"):
            _fail(where, "layer_types", "given", "none: one window for all layers of mistral")
        return (config["sliding_window"],) * num_layers
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if window is None:
        return (None,) * num_layers
    kinds = config.get("layer_types")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = _count(config, "max_window_layers", where)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _scaling_from_hf(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``rope_parameters`` (transformers 5) or ``rope_scaling`` and what stands beside it, with
    transformers' defaults filled in."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, Mapping):
        _fail(where, key, given, "an object or null")
    scaling = {"rope_theta": config.get("rope_theta", _DEFAULT_THETA), **given}
    scaling["rope_type"] = scaling.get("rope_type") or scaling.get("type", "default")
    for source in (scaling, config):
        part = source.get("partial_rotary_factor")
        _refuse(where, "partial_rotary_factor", 1.0 if part is None else part, 1.0, "1")
    if scaling["rope_type"] in ("llama3", "yarn"):
        length, longest = "original_max_position_embeddings", "max_position_embeddings"
        scaling[length] = config.get(length) or scaling.get(length) or config.get(longest)
        if scaling["rope_type"] == "yarn" and scaling.get("factor") is None:
            original = _count(scaling, length, where)
            scaling["factor"] = _count(config, longest, where) / original
    return scaling


def _rope_from_hf(scaling: Mapping[str, Any], where: str) -> RopeConfig:
    kind, where = scaling["rope_type"], f"{where}, rope_scaling"
    theta = _number(scaling, "rope_theta", where)
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        _fail(where, "rope_type", kind, "default, linear, dynamic, llama3 or yarn")
    factor = _number(scaling, "factor", where)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    original = _count(scaling, "original_max_position_embeddings", where)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=factor,
            original_max_len=original,
            low_freq_factor=_number(scaling, "low_freq_factor", where),
            high_freq_factor=_number(scaling, "high_freq_factor", where),
        )
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_len=original,
        beta_fast=_number(scaling, "beta_fast", where, 32.0),
        beta_slow=_number(scaling, "beta_slow", where, 1.0),
        truncate=_flag(scaling, "truncate", where, default=True),
        attention_factor=_yarn_attention_factor(scaling, factor, where),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float, where: str) -> float:
    """``0.1 ln(factor) + 1`` (YaRN, arXiv 2309.00071, section 3.4), or what the file says."""
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor", where)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if above and below:
        return mscale(above) / mscale(below)
    return mscale(1.0)


def _rope_from_gguf(
    own: Mapping[str, Any], divisors: Sequence[float], context: int, where: str
) -> RopeConfig:
    theta = _number(own, "rope.freq_base", where, _DEFAULT_THETA)
    kind = own.get("rope.scaling.type", "none")
    if divisors:
        _refuse(where, "rope.scaling.type", kind, "none", "none beside rope_freqs.weight")
        return RopeConfig(theta=theta, kind="divided", divisors=tuple(divisors))
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = _number(own, "rope.scaling.factor", where)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind != "yarn":
        _fail(where, "rope.scaling.type", kind, "none, linear or yarn")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_len=_count(own, "rope.scaling.original_context_length", where, context),
        attention_factor=_yarn_attention_factor({}, factor, where),
    )


def _fail(where: str, key: str, value: object, expected: str) -> NoReturn:
    what = f"no {key}" if value is None else f"{key} is {value!r}"
    raise ModelConfigError(f"{where}: {what}, expected {expected}")


def _refuse(where: str, key: str, value: object, only: object, expected: str) -> None:
    if value != only:
        _fail(where, key, value, expected)


def _number(data: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = data.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        _fail(where, key, value, "a positive number")
    return float(value)


def _count(data: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = data.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        _fail(where, key, value, "a positive whole number")
    return value


def _flag(data: Mapping[str, Any], key: str, where: str, *, default: bool = False) -> bool:
    value = data.get(key, default)
    if not isinstance(value, bool):
        _fail(where, key, value, "true or false")
    return value


__all__ = ["CatalogError", "ModelConfig", "ModelConfigError", "RopeConfig"]
