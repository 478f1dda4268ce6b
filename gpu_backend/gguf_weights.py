"""GGUF files (llama.cpp's format): metadata, and weights under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpu_backend.config import ModelConfig, ModelConfigError

if TYPE_CHECKING:
    from gguf import GGUFReader

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"


class GGUFFile:
    """One file, mapped into memory; arrays are read when asked for."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader: GGUFReader = GGUFReader(path)
        except OSError as error:
            raise ModelConfigError(f"{path}: cannot read it ({error.strerror})") from None
        except (ValueError, IndexError) as error:
            raise ModelConfigError(
                f"{path}: no GGUF file, or damaged or cut short ({error})"
            ) from None
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str) -> Any:
        """Value of a metadata key; ``None`` where it is missing."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def config(self) -> ModelConfig:
        metadata = {
            key: self.get(key) for key in self._reader.fields if not key.startswith("tokenizer.")
        }
        # GGUF lists the fastest dimension first.
        shapes = {
            name: tuple(int(n) for n in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        divisors = self._read(_ROPE_DIVISORS).tolist() if _ROPE_DIVISORS in shapes else ()
        return ModelConfig.from_gguf(metadata, shapes, rope_divisors=divisors, where=str(self.path))

    def weights(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Each weight as float32 under its name in a Hugging Face checkpoint, one at a time."""
        config = self.config()
        permuted = self.get("general.architecture") == "llama"
        for name in self._tensors:
            if name == _ROPE_DIVISORS:
                continue
            weight = self._read(name)
            if permuted and ".attn_q." in name:
                weight = unpermute(weight, config.num_heads)
            elif permuted and ".attn_k." in name:
                weight = unpermute(weight, config.num_kv_heads)
            yield hf_name(name), weight

    def _read(self, name: str) -> npt.NDArray[np.float32]:
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            weight = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ModelConfigError(
                f"{self.path}, {name}: type {kind}, which the gguf package cannot dequantise"
            ) from None
        return np.asarray(weight, dtype=np.float32)


@lru_cache(maxsize=1)
def _open(path: Path, _mtime_ns: int) -> GGUFFile:
    return GGUFFile(path)


def open_gguf(path: Path) -> GGUFFile:
    """The file, kept open until another is asked for: reading a vocabulary takes seconds, and both
    the model and its tokenizer come out of it."""
    try:
        mtime_ns = path.stat().st_mtime_ns
    except OSError as error:
        raise ModelConfigError(f"{path}: cannot read it ({error.strerror})") from None
    return _open(path.resolve(), mtime_ns)


def unpermute(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of a query or key projection in the order of the Hugging Face checkpoint.

    Files of the llama architecture hold them so that rotated pairs are adjacent rows (2i, 2i + 1 of
    a head, as in Meta's code); the decoder rotates i with i + head_dim / 2.
    """
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; a name that is not
    known stays as it is."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        known = _LAYER_NAMES.get(part)
        return name if known is None else f"model.layers.{layer}.{known}.{kind}"
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name
