"""A calibration: what a few hundred requests of a real server say of the factors, as a small file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeGuard

from simulator.cost.factors import Factors

_LEAST, _MOST = 0.05, 20.0


class CalibrationError(ValueError):
    """A file that is no calibration, or not one of this server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Multipliers of the fitted factors, and serving times; made by ``python -m simulator calibrate``."""

    weights: float = 1.0
    """Of the bandwidth at which products read their weights."""
    compute: float = 1.0
    """Of the rate of arithmetic."""
    kv: float = 1.0
    """Of the bandwidth at which attention reads K and V."""
    step_s: float | None = None
    """Instead of the fitted one, where it was fitted; so the next two."""
    sequence_s: float | None = None
    frontend_s: float | None = None
    model: str = ""
    gpu: str = ""
    tp: int = 1
    pp: int = 1
    weight_dtype: str = ""
    kv_cache_dtype: str = ""
    fitted_on: str = ""
    """The run, how many of its requests, and how far off the others are."""
    residuals: dict[str, float] = field(default_factory=dict)
    """Of each statistic: measured / predicted - 1 on what was held out."""

    @property
    def band(self) -> tuple[float, float]:
        """Measured over predicted time per output token of what was held out, and 2 % at least."""
        found = [1 + value for name, value in self.residuals.items() if name.startswith("TPOT")]
        return min([0.98, *found]), max([1.02, *found])

    def apply(self, factors: Factors, **server: str | int) -> Factors:
        """``factors`` as this server has them.

        Raises ``CalibrationError`` where what ``server`` names (``model``, ``gpu``, ``tp``, ``pp``,
        ``weight_dtype``, ``kv_cache_dtype``) is not what was calibrated.
        """
        for what, asked in server.items():
            own = getattr(self, what)
            if own and own != asked:
                raise CalibrationError(f"the calibration is of {what} {own}, the run's is {asked}")
        serving = {
            name: value
            for name in ("step_s", "sequence_s", "frontend_s")
            if (value := getattr(self, name)) is not None
        }
        scaled = factors.scaled(weights=self.weights, compute=self.compute, kv=self.kv, **serving)
        about = f"calibrated: {self.fitted_on}; over {factors.about}"
        return replace(scaled, basis="calibrated", about=about, band=self.band)

    def write(self, path: Path) -> None:
        """As JSON. Raises ``OSError``."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Raises ``CalibrationError`` with one clear line."""
        try:
            data: Any = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CalibrationError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise CalibrationError(f"{path}: not JSON: {error}") from None
        names = {item.name for item in fields(cls)}
        if not isinstance(data, dict) or not {"weights", "compute", "kv"} <= set(data) <= names:
            raise CalibrationError(
                f"{path}: no calibration, expected an object with {', '.join(sorted(names))}"
            )
        for name in ("weights", "compute", "kv", "step_s", "sequence_s", "frontend_s"):
            value = data.get(name)
            is_time = name.endswith("_s")
            if value is None and is_time:
                continue
            if not _is_finite(value) or value < 0 or (value == 0 and not is_time):
                raise CalibrationError(f"{path}: {name} is {value!r}, expected a positive number")
        for name in ("model", "gpu", "weight_dtype", "kv_cache_dtype", "fitted_on"):
            if not isinstance(data.get(name, ""), str):
                raise CalibrationError(f"{path}: {name} is {data[name]!r}, expected text")
        for name in ("tp", "pp"):
            if type(data.get(name, 1)) is not int:
                raise CalibrationError(f"{path}: {name} is {data[name]!r}, expected a whole number")
        for name in ("weights", "compute", "kv"):
            if not _LEAST <= data[name] <= _MOST:
                raise CalibrationError(
                    f"{path}: {name} is {data[name]:g}, expected from {_LEAST:g} to {_MOST:g}"
                )
        residuals = data.get("residuals", {})
        is_dict = isinstance(residuals, dict)
        if not is_dict or not all(_is_finite(x) and -0.9 < x < 10 for x in residuals.values()):
            raise CalibrationError(
                f"{path}: residuals are {residuals!r}, expected shares by statistic"
            )
        if not any(name.startswith("TPOT") for name in residuals):
            raise CalibrationError(
                f"{path}: residuals have no TPOT, so that nobody knows how good it is"
            )
        return cls(**data)


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
