"""Step times from a profile that an engine measured (``python -m gpu_backend profile``)."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from records.profile import ProfiledStep, ProfileError, StepProfile
from simulator.cost.step import Amount, Count, StepWork, TermModel

FloatArray = npt.NDArray[np.float64]


class _Line(NamedTuple):
    """Measured values at ascending places (one, or a row of them, at each); linear in between."""

    places: FloatArray
    values: FloatArray

    @classmethod
    def through(cls, points: Mapping[float, float]) -> _Line:
        places = sorted(points)
        return cls(
            np.array(places, np.float64), np.array([points[place] for place in places], np.float64)
        )

    def at(self, x: FloatArray) -> FloatArray:
        """Below the first place its value, as no step gets cheaper than the least one measured;
        beyond the last the line through the last two."""
        places, values = self.places, self.values
        if len(places) == 1:
            return np.broadcast_to(values[0], np.broadcast_shapes(x.shape, values.shape[1:]))
        left = np.clip(np.searchsorted(places, x, side="right") - 1, 0, len(places) - 2)
        share = (np.maximum(x, places[0]) - places[left]) / (places[left + 1] - places[left])
        found: FloatArray = values[left] + share * (values[left + 1] - values[left])
        return found

    def holds(self, x: FloatArray) -> npt.NDArray[np.bool_]:
        inside: npt.NDArray[np.bool_] = (x >= self.places[0]) & (x <= self.places[-1])
        return inside


class _Surface:
    """Values over two quantities: lines along the second, at several places of the first."""

    def __init__(self, points: Iterable[tuple[float, float, float]]) -> None:
        lines: dict[float, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        for first, second, value in points:
            lines[first][second].append(value)
        self._places = sorted(lines)
        self._lines = [
            _Line.through({x: statistics.median(found) for x, found in lines[place].items()})
            for place in self._places
        ]

    def at(self, first: float, second: FloatArray) -> FloatArray:
        rows = np.array([line.at(second) for line in self._lines])  # [places, n]
        return _Line(np.array(self._places, np.float64), rows).at(np.array(first))

    def holds(self, first: float, second: FloatArray) -> npt.NDArray[np.bool_]:
        """Whether each point lies between measured ones."""
        if not self._places[0] <= first <= self._places[-1]:
            return np.zeros(second.shape, np.bool_)
        right = int(np.searchsorted(self._places, first))
        around = self._lines[max(right - 1, 0) : right + 1]
        held: npt.NDArray[np.bool_] = np.any([line.holds(second) for line in around], axis=0)
        return held


class ProfileCost(TermModel):
    """Interpolates between measured steps.

    Decodes over batch and mean context, prompts over tokens and mean context behind them. A step with
    both takes the sum of the two less a share of the smaller (weights are read once), which the
    profile's own mixed steps tell. Outside of what was measured the nearest line goes on; how many
    steps that was is counted and said.

    Raises ``ProfileError`` where the file is no profile, or has no decode steps or no prompts.
    """

    def __init__(self, path: Path, model: str) -> None:
        self._path, self._model = path, model
        self._profile = profile = StepProfile.read(path)
        decodes = [s for s in profile.steps if s.decodes and not s.prefills]
        prefills = [s for s in profile.steps if s.prefills and not s.decodes]
        for name, found in (("decode steps", decodes), ("steps of prompts alone", prefills)):
            if not found:
                raise ProfileError(f"{path}: has no {name}, so none can be priced")
        self._decode = _Surface(
            (s.decodes, s.decode_context_tokens / s.decodes, 1e9 * s.seconds) for s in decodes
        )
        self._prefill = _Surface((s.prefill_tokens, _behind(s), 1e9 * s.seconds) for s in prefills)
        mixed = [s for s in profile.steps if s.prefills and s.decodes]
        self._num_mixed = len(mixed)
        self._shared = self._share_of_the_smaller(mixed)
        self._num_priced = self._num_outside = 0

    def _share_of_the_smaller(self, mixed: list[ProfiledStep]) -> float:
        """Median over the mixed steps of what they take less than both parts, of the smaller part."""
        shares = []
        for step in mixed:
            parts = [
                float(
                    self._decode.at(step.decodes, _one(step.decode_context_tokens / step.decodes))[
                        0
                    ]
                ),
                float(self._prefill.at(step.prefill_tokens, _one(_behind(step)))[0]),
            ]
            shares.append((sum(parts) - 1e9 * step.seconds) / min(parts))
        return min(max(statistics.median(shares), 0.0), 1.0) if shares else 0.0

    def work_terms(self, work: StepWork) -> dict[str, Amount]:
        """Time of each term, ns."""
        (attention,) = work.by_window
        terms: dict[str, Amount] = {}
        inside = np.ones(np.shape(attention.decode_kv) or (1,), np.bool_)
        decode = prefill = None
        if work.num_decodes:
            context = _floats(attention.decode_kv) / work.num_decodes
            decode = self._decode.at(work.num_decodes, context)
            inside &= self._decode.holds(work.num_decodes, context)
            terms["decode"] = _as_given(decode, attention.decode_kv)
        tokens = work.num_prefill_tokens
        if tokens:
            behind = _one(max(attention.prefill_kv - tokens, 0))
            prefill = self._prefill.at(tokens, behind)
            inside &= self._prefill.holds(tokens, behind)
            terms["prefill"] = float(prefill[0])
        if decode is not None and prefill is not None:
            terms["shared"] = -self._shared * min(float(decode[0]), float(prefill[0]))
        self._num_priced += inside.size
        self._num_outside += int(np.count_nonzero(~inside))
        return terms

    def work_flops_bytes(self, work: StepWork) -> tuple[Amount, Amount]:
        """Not known: 0, 0."""
        return 0.0, 0.0

    def describe(self) -> list[str]:
        """Lines for the report: what is assumed, and what is not modelled."""
        settings = self._profile.settings
        of = ", ".join(
            f"{name} {settings[name]}"
            for name in ("model", "device", "dtype", "kv_cache_dtype", "attention")
            if settings.get(name) is not None
        )
        lines = [f"step times interpolated from {self._path.name}: {len(self._profile.steps)} kinds of "
                 f"step measured ({of or 'of what, it does not say'})"]  # fmt: skip
        if settings.get("model") not in (None, self._model):
            lines.append(
                f"beware: the profile is of {settings['model']}, the blocks are those of {self._model}"
            )
        lines.append(
            f"a step with prompts and decodes takes both less {self._shared:.0%} of the smaller"
            + (
                f", from {self._num_mixed} mixed steps"
                if self._num_mixed
                else " (none were measured)"
            )
        )
        if self._num_outside:
            lines.append(
                f"{self._num_outside / self._num_priced:.1%} of the steps priced lie outside of what was "
                "measured: the nearest line is continued"
            )
        return [
            *lines,
            "several prompts of a step count as one of their tokens, behind the context of all of them",
            "block copies and swap transfers cost nothing in it",
            "FLOPs and bytes of a step are unknown to this cost model: utilisation is not shown",
        ]


def _behind(step: ProfiledStep) -> float:
    return step.prefill_context_tokens - step.prefill_tokens


def _one(value: float) -> FloatArray:
    return np.array([value], np.float64)


def _floats(count: Count) -> FloatArray:
    return np.atleast_1d(np.asarray(count, np.float64))


def _as_given(values: FloatArray, like: Any) -> Amount:
    """A number for one step, an array for a run."""
    return values if np.ndim(like) else float(values[0])
