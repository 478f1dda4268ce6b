"""Models by name or from a Hugging Face ``config.json``."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from catalog.hf_config import shape_from_config
from catalog.lookup import as_path, find_entry, read_entries, read_json_object
from catalog.shapes import ModelShape


@cache
def _entries() -> dict[str, dict[str, Any]]:
    return read_entries("models.json")


def model_names() -> tuple[str, ...]:
    """Names that ``load_model`` knows."""
    return tuple(_entries())


def load_model(name_or_path: str | Path) -> ModelShape:
    """A model of the catalogue, or the one that a ``config.json`` (or its folder) describes.

    Names are matched without regard to case, organisation and variant:
    ``meta-llama/Llama-3.1-8B-Instruct`` is ``llama-3.1-8b``.

    Raises
    ------
    CatalogError
        Unknown name (the message gives the closest ones), or a file that cannot be used (file,
        key, and what was expected).
    """
    path = as_path(name_or_path)
    if path is None:
        or_else = "a Hugging Face config.json, or a folder that holds one"
        entry = find_entry(str(name_or_path), _entries(), "model", or_else)
        return _from_catalog(str(entry["name"]))
    if path.is_dir():
        path = path / "config.json"
    config = read_json_object(path, "a Hugging Face config.json")
    fallback = path.parent.name if path.name == "config.json" else path.stem
    name = str(config.get("_name_or_path") or fallback or "config.json")
    return shape_from_config(config, name=name, source=str(path), where=str(path))


@cache
def _from_catalog(name: str) -> ModelShape:
    entry = _entries()[name]
    shape = shape_from_config(
        entry["config"], name=name, source=entry["source"], where=f"models.json, {name}"
    )
    return replace(shape, assumptions=(*shape.assumptions, *entry.get("assumptions", ())))
