"""The step-profile file: what steps of an engine were made of, and how long they took.

An engine's profiler writes it, a cost model may read it. JSON, so that a person can read it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

FORMAT = "kvplan-step-profile/1"


class ProfileError(ValueError):
    """A file that is no step profile; one clear line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledStep:
    """One kind of step, measured several times."""

    decodes: int
    """Sequences that got one token after their last."""
    decode_context_tokens: int
    """Sum over them of the tokens attended to."""
    prefills: int
    """Sequences that computed some of a prompt."""
    prefill_tokens: int
    """Tokens computed for those."""
    prefill_context_tokens: int
    """Sum over those of the tokens attended to, their own among them."""
    sampled: int
    """Sequences that got a token at the end."""
    repeats: int
    seconds: float
    """Median."""
    min_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    settings: Mapping[str, Any]
    """Model, device, dtypes, block size, versions: what the times hold for."""
    steps: list[ProfiledStep]

    def write(self, path: Path) -> None:
        """Whole or not at all. Raises ``ProfileError`` where that cannot be."""
        document = {
            "format": FORMAT,
            "settings": dict(self.settings),
            "steps": [asdict(step) for step in self.steps],
        }
        part = path.with_name(f".{path.name}.part")
        try:
            part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise ProfileError(f"{path}: cannot be written: {error.strerror or error}") from error

    @classmethod
    def read(cls, path: Path) -> StepProfile:
        """Raises ``ProfileError`` where the file is missing, damaged or something else."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not JSON"
            raise ProfileError(f"{path}: cannot be read: {reason}") from error
        found = document.get("format") if isinstance(document, dict) else None
        if found != FORMAT:
            raise ProfileError(f"{path}: format is {found!r}, expected {FORMAT!r}")
        names = {field.name: field.type for field in fields(ProfiledStep)}
        steps = []
        for number, row in enumerate(document.get("steps") or ()):
            if not isinstance(row, dict) or set(row) != set(names):
                wrong = sorted(set(row) ^ set(names)) if isinstance(row, dict) else row
                raise ProfileError(f"{path}: step {number}: keys {wrong} are missing or unknown")
            for name, value in row.items():
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if not is_number or value < 0 or (names[name] == "int" and value != int(value)):
                    raise ProfileError(f"{path}: step {number}: {name} is {value!r}")
            steps.append(ProfiledStep(**row))
        return cls(document.get("settings") or {}, steps)
