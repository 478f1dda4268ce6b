"""Names that people type, matched to catalogue entries."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from catalog.errors import CatalogError

_VARIANT = re.compile(r"-(instruct|chat|it|hf|base|pt)(?=-|$)")


def normalize(name: str) -> str:
    """The part of a name that tells models apart: ``meta-llama/Llama-2-7b-hf`` -> ``llama27b``.

    Case, the organisation, dashes and words that name a tuned variant of the same shape go.
    """
    bare = name.strip().lower().rsplit("/", 1)[-1].replace("_", "-").replace(" ", "-")
    return _VARIANT.sub("", bare).replace("-", "")


def read_entries(file: str) -> dict[str, dict[str, Any]]:
    """Entries of a data file of this package by name, in its order."""
    text = files("catalog.data").joinpath(file).read_text(encoding="utf-8")
    return {entry["name"]: entry for entry in json.loads(text)}


def find_entry(
    name: str, entries: Mapping[str, Mapping[str, Any]], kind: str, or_else: str
) -> Mapping[str, Any]:
    """The entry whose name or alias is ``name``.

    Raises ``CatalogError`` that names the closest entries; ``or_else`` says what else would do.
    """
    wanted = normalize(name)
    spellings = {
        normalize(spelling): entry
        for entry in entries.values()
        for spelling in (entry["name"], *entry.get("aliases", ()))
    }
    if wanted in spellings:
        return spellings[wanted]
    close = _closest(wanted, spellings)
    names = list(dict.fromkeys(spellings[key]["name"] for key in close))[:4]
    hint = f"closest: {', '.join(names)}" if names else f"known: {', '.join(entries)}"
    raise CatalogError(f"unknown {kind} {name!r}; {hint} (or {or_else})")


def _closest(wanted: str, spellings: Iterable[str]) -> list[str]:
    spellings = list(spellings)
    close = difflib.get_close_matches(wanted, spellings, n=8, cutoff=0.55)
    starts = [key for key in spellings if wanted and key.startswith(wanted)]
    return [*starts, *(key for key in close if key not in starts)]


def as_path(name_or_path: str | Path) -> Path | None:
    """The path that ``name_or_path`` means, or None where it is a name.

    A path is a ``Path``, ends with ``.json``, is a folder with a ``config.json``, or has a separator
    and exists (``./my-model``);
    ``meta-llama/Llama-3.1-8B`` is a name as long as there is no such folder here.
    """
    if isinstance(name_or_path, Path):
        return name_or_path
    path = Path(name_or_path)
    if name_or_path.endswith(".json"):
        return path
    has_separator = "/" in name_or_path or "\\" in name_or_path
    if (path / "config.json").is_file():
        return path
    if has_separator and (path.exists() or name_or_path.startswith(("/", "./", "../", "~"))):
        return path.expanduser()
    return None


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in ``path``; ``CatalogError`` where there is none (``what`` names it)."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogError(f"{path}: cannot read it ({error.strerror}), expected {what}") from None
    except UnicodeDecodeError:
        raise CatalogError(f"{path}: not a text file, expected {what}") from None
    except json.JSONDecodeError as error:
        raise CatalogError(
            f"{path}, line {error.lineno}: not JSON ({error.msg}), expected {what}"
        ) from None
    if not isinstance(data, dict):
        raise CatalogError(f"{path}: a JSON {type(data).__name__}, expected an object: {what}")
    return data
