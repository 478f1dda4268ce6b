"""What a client asks of the sampler, checked once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from scheduler.request import MAX_N

EarlyStopping = Literal["never"] | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the outputs of one request are chosen; the names are vLLM's.

    ``ValueError`` names the field, its value and what was expected.
    """

    n: int = 1
    """Outputs for the one prompt; of a beam search, its n best."""
    temperature: float = 1.0
    """Divides the logits; 0 = greedy."""
    top_k: int = 0
    """Only the k most likely tokens; 0 (or -1) = all. Of equally likely ones the lowest ids."""
    top_p: float = 1.0
    """Only the most likely tokens that together reach this probability, in (0, 1]."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the most likely one, from 0 to 1."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the output: divided by it if positive, else multiplied."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that are in the output, from -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken off the logits once for each time the token is in the output, from -2 to 2."""
    seed: int | None = None
    """Signed 64-bit; same seed, same output, whatever else runs. ``None`` = the engine draws one."""
    max_tokens: int | None = None
    """Most output tokens; ``None`` = up to ``max_model_len``."""
    min_tokens: int = 0
    """Output tokens before which neither an end-of-sequence or stop token is sampled nor a stop
    string looked for."""
    stop: Sequence[str] = ()
    """Strings that end the output (one string or several; kept as a tuple)."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the output, besides the model's end-of-sequence tokens (kept as a tuple)."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    logprobs: int | None = None
    """Most likely tokens whose log-probabilities are reported with each output token's; 0 = only
    that of the output token itself."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    include_stop_str_in_output: bool = False
    """Whether the output's text ends with the stop string or before it."""
    beam_width: int | None = None
    """Beams of a beam search; ``None`` = sample."""
    length_penalty: float = 1.0
    """A hypothesis scores its summed log-probability / tokens ** length_penalty."""
    early_stopping: EarlyStopping = False
    """When ``beam_width`` hypotheses are there: ``True`` = stop; ``False`` = stop if the best beam at
    its present length is no better; ``"never"`` = only if it cannot become better."""

    def __post_init__(self) -> None:
        for name, single in (("stop", str), ("stop_token_ids", int)):
            given = getattr(self, name)
            if isinstance(given, single):
                given = (given,)
            elif not isinstance(given, Sequence):
                raise ValueError(f"{name} is {given!r}, must be a list")
            object.__setattr__(self, name, tuple(given))
        self._check_integers()
        self._check_numbers()
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ValueError(
                f"stop is {list(self.stop)!r}, must be strings of at least one character"
            )
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}, must be true or false")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, must be at most max_tokens ({self.max_tokens})"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(
                f'early_stopping is {self.early_stopping!r}, must be true, false or "never"'
            )
        self._check_beams()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    def _check_integers(self) -> None:
        for name, low, high, optional in (
            ("n", 1, MAX_N, False),
            ("top_k", -1, None, False),
            ("seed", -(2**63), 2**63 - 1, True),
            ("max_tokens", 1, None, True),
            ("min_tokens", 0, None, False),
            ("logprobs", 0, None, True),
            ("prompt_logprobs", 0, None, True),
            ("beam_width", 1, MAX_N, True),
        ):
            value = getattr(self, name)
            if not (optional and value is None):
                _check_integer(name, value, low, high)
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0, None)

    def _check_numbers(self) -> None:
        for name, low, high, low_allowed in (
            ("temperature", 0, math.inf, True),
            ("top_p", 0, 1, False),
            ("min_p", 0, 1, True),
            ("repetition_penalty", 0, math.inf, False),
            ("presence_penalty", -2, 2, True),
            ("frequency_penalty", -2, 2, True),
            ("length_penalty", -math.inf, math.inf, True),
        ):
            value = getattr(self, name)
            known = isinstance(value, int | float) and not isinstance(value, bool)
            inside = known and math.isfinite(value) and low <= value <= high
            if inside and (low_allowed or value > low):
                continue
            bounds = ["a finite number"]
            bounds += [f"{'at least' if low_allowed else 'above'} {low}"] if low > -math.inf else []
            bounds += [f"at most {high}"] if high < math.inf else []
            raise ValueError(f"{name} is {value!r}, must be {', '.join(bounds)}")

    def _check_beams(self) -> None:
        """A beam search neither samples nor filters: what it would not heed is refused."""
        if self.beam_width is None:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != neutral:
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r}, must be left out without beam_width"
                    )
            return
        if self.n > self.beam_width:
            raise ValueError(f"n is {self.n}, must be at most beam_width ({self.beam_width})")
        if self.temperature not in (0, 1):
            raise ValueError(
                f"temperature is {self.temperature!r}, must be 0 or 1 with beam_width (nothing is sampled)"
            )
        heeded = {
            "n", "temperature", "max_tokens", "stop_token_ids", "ignore_eos", "beam_width",
            "length_penalty", "early_stopping",
        }  # fmt: skip
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in heeded and value != field.default:
                raise ValueError(
                    f"{field.name} is {value!r}, must be left out with beam_width: "
                    "a beam search does not use it"
                )


def _check_integer(name: str, value: Any, low: int, high: int | None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole and low <= value and (high is None or value <= high)):
        expected = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} is {value!r}, must be an integer {expected}")
