"""The simple cost models, and the choice among all of them from a flag."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

from catalog import GPU, KVDtype, ModelShape, WeightDtype
from simulator.cost.factors import Factors
from simulator.cost.no_cache import NoCacheCost
from simulator.cost.physical import PhysicalCost
from simulator.cost.profile import ProfileCost
from simulator.cost.step import Amount, CostModel, StepWork, TermModel

_NOT_KNOWN = "FLOPs and bytes of a step are unknown to this cost model: utilisation is not shown"


class LinearCost(TermModel):
    """base + per_token x T + per_seq x N + per_context_token x sum of contexts, exact in ns.

    T are the tokens computed in the step, N its sequences; a context is what a sequence holds
    after the step.

    Parameters
    ----------
    base_s, per_token_s, per_seq_s, per_context_token_s
        Seconds, each rounded to a whole ns here, once.

    Raises
    ------
    ValueError
        A negative or unbounded time, one that is not 0 but rounds to 0 ns, or all of the first
        three 0: a step must take time.
    """

    def __init__(
        self,
        base_s: float | Decimal,
        per_token_s: float | Decimal,
        per_seq_s: float | Decimal,
        per_context_token_s: float | Decimal = 0,
    ) -> None:
        self.base_ns = _whole_ns("base", base_s)
        self.per_token_ns = _whole_ns("per_token", per_token_s)
        self.per_seq_ns = _whole_ns("per_seq", per_seq_s)
        self.per_context_token_ns = _whole_ns("per_context_token", per_context_token_s)
        if self.base_ns + self.per_token_ns + self.per_seq_ns == 0:
            raise ValueError("base, per_token and per_seq are all 0: a step must take time")

    def work_terms(self, work: StepWork) -> dict[str, Amount]:
        """Time of each term, ns."""
        (attention,) = work.by_window
        return {
            "base": self.base_ns,
            "per_token": self.per_token_ns * work.num_tokens,
            "per_seq": self.per_seq_ns * work.num_sequences,
            "per_context_token": self.per_context_token_ns
            * (attention.decode_kv + attention.prefill_kv),
        }

    def work_flops_bytes(self, work: StepWork) -> tuple[Amount, Amount]:
        """Not known: 0, 0."""
        return 0.0, 0.0

    def describe(self) -> list[str]:
        """Lines for the report: what is assumed, and what is not modelled."""
        return [
            f"step time = {self.base_ns} ns + {self.per_token_ns} ns x tokens + {self.per_seq_ns} "
            f"ns x sequences + {self.per_context_token_ns} ns x context tokens, as given",
            "block copies and swap transfers cost nothing in it",
            _NOT_KNOWN,
        ]


class ConstantCost(LinearCost):
    """Every step takes ``step_s`` seconds, rounded to a whole ns, whatever is in it."""

    def __init__(self, step_s: float | Decimal) -> None:
        """Raises ``ValueError`` where ``step_s`` is not above 0."""
        super().__init__(base_s=step_s, per_token_s=0, per_seq_s=0)

    def describe(self) -> list[str]:
        """Lines for the report: what is assumed, and what is not modelled."""
        return [f"every step takes {self.base_ns} ns, as given, whatever is in it", _NOT_KNOWN]


def _whole_ns(name: str, seconds: float | Decimal) -> int:
    time = Decimal(str(seconds))  # str: 0.1 means a tenth, not its nearest double
    if not time.is_finite() or time < 0:
        raise ValueError(f"{name} is {seconds} s, expected a time of 0 or more")
    nanoseconds = round(time * 10**9)
    if time > 0 and nanoseconds == 0:
        raise ValueError(f"{name} is {seconds} s, which rounds to 0 ns")
    return nanoseconds


_UNITS = {"ns": -9, "us": -6, "µs": -6, "ms": -3, "s": 0, "": 0}
_DURATION = re.compile(r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*([nuµm]?s)?", re.IGNORECASE)
_FORMS = (
    "constant:TIME, linear:base=TIME,per_token=TIME,per_seq=TIME[,per_context_token=TIME], "
    "profile:FILE, physical or no-cache, where TIME is like 20ms, 50us or 0.02 (seconds)"
)


def cost_model_from_flag(
    flag: str,
    *,
    shape: ModelShape,
    gpu: GPU,
    weight_dtype: WeightDtype,
    kv_dtype: KVDtype,
    tp: int = 1,
    pp: int = 1,
    block_size: int = 16,
    async_scheduling: bool = True,
    enforce_eager: bool = False,
    max_num_seqs: int | None = None,
    factors: Factors | None = None,
) -> CostModel:
    """The cost model that a command line names.

    ``constant:20ms``, ``linear:base=5ms,per_token=20us,per_seq=50us``, ``profile:FILE``,
    ``physical`` or ``no-cache``; the keywords are used by the last two.

    Raises
    ------
    ValueError
        The flag has another form, with what was expected; or what the model itself refuses.
    """
    kind, colon, rest = flag.strip().partition(":")
    if kind == "constant" and colon:
        return ConstantCost(_seconds(rest, flag))
    if kind == "linear" and colon:
        return LinearCost(**_linear_coefficients(rest, flag))
    if kind == "profile" and rest:
        return ProfileCost(Path(rest), shape.name)
    if kind in ("physical", "no-cache") and not colon:
        physical = PhysicalCost(
            shape,
            gpu,
            weight_dtype=weight_dtype,
            kv_dtype=kv_dtype,
            tp=tp,
            pp=pp,
            block_size=block_size,
            async_scheduling=async_scheduling,
            enforce_eager=enforce_eager,
            max_num_seqs=max_num_seqs,
            factors=factors,
        )
        return physical if kind == "physical" else NoCacheCost(physical)
    raise ValueError(f"cost model is {flag!r}, expected {_FORMS}")


def _linear_coefficients(text: str, flag: str) -> dict[str, Decimal]:
    allowed = ("base", "per_token", "per_seq", "per_context_token")
    given: dict[str, Decimal] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in allowed or not equals:
            raise ValueError(f"cost model {flag!r}: {part!r} is not one of {', '.join(allowed)}")
        if name in given:
            raise ValueError(f"cost model {flag!r}: {name} is given twice")
        given[name] = _seconds(value, flag)
    missing = [name for name in allowed[:3] if name not in given]
    if missing:
        raise ValueError(f"cost model {flag!r}: {', '.join(missing)} missing (0 may be given)")
    return {f"{name}_s": value for name, value in given.items()}


def _seconds(text: str, flag: str) -> Decimal:
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"cost model {flag!r}: {text!r} is not a time, expected one like 20ms, 50us or 0.02"
        )
    number, unit = match.groups()
    try:
        time = Decimal(number).scaleb(_UNITS[(unit or "").lower()])
    except ArithmeticError:  # an exponent of more than eighteen digits
        time = Decimal("Infinity")
    if time > 10**6:
        raise ValueError(f"cost model {flag!r}: {text!r} is longer than 10^6 s")
    return time
