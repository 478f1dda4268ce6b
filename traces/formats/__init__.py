"""The formats known here, and which of them a file is, by its content.

To add one: a module with a small `TraceFormat`, and a line in `FORMATS`. One's own format needs no
change here: a package that names its `TraceFormat` class under the entry point group
``kvplan.trace_formats`` is found where it is installed.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata

from traces.formats.aiperf import AiperfMooncake, AiperfTurns
from traces.formats.azure import Azure
from traces.formats.bailian import Bailian
from traces.formats.base import Head, TraceError, TraceFormat
from traces.formats.baseten import Baseten
from traces.formats.blis import Blis
from traces.formats.burstgpt import BurstGpt
from traces.formats.dynamo import Dynamo
from traces.formats.gateways import Helicone, Langfuse, LiteLlm
from traces.formats.lengths import LlamaCpp, Llmperf, OpenAiBatch, SglangBench
from traces.formats.llmservingsim import LLMServingSim, LLMServingSimSessions
from traces.formats.mooncake import Mooncake
from traces.formats.native import Native
from traces.formats.native_csv import NativeCsv
from traces.formats.otel import OtelSpans
from traces.formats.refused import (
    AccessLog,
    GenAiPerf,
    GuideLlmYaml,
    InferencePerfSummary,
    OpenAiUsage,
    Prometheus,
    VllmLog,
)
from traces.formats.results import AiPerf, GuideLlm, InferencePerf, VllmBench
from traces.formats.sagemaker import SageMaker
from traces.formats.session_base import SessionFormat
from traces.formats.simulators import SplitwiseSim, Vidur
from traces.formats.texts import ShareGpt
from traces.formats.tracelab import TraceLab, TraceLabReplay
from traces.formats.weka import Weka

FORMATS: tuple[TraceFormat, ...] = (
    Native(),
    NativeCsv(),
    Azure(),
    Mooncake(),
    Bailian(),
    BurstGpt(),
    AiperfMooncake(),
    AiperfTurns(),
    Baseten(),
    Vidur(),
    SplitwiseSim(),
    Blis(),
    SglangBench(),
    Llmperf(),
    OpenAiBatch(),
    LlamaCpp(),
    ShareGpt(),
    LLMServingSim(),
    Dynamo(),
    VllmBench(),
    GuideLlm(),
    AiPerf(),
    InferencePerf(),
    LiteLlm(),
    Langfuse(),
    Helicone(),
    OtelSpans(),
    SageMaker(),
    GenAiPerf(),
    InferencePerfSummary(),
    GuideLlmYaml(),
    OpenAiUsage(),
    Prometheus(),
    VllmLog(),
    AccessLog(),
)

SESSION_FORMATS: tuple[SessionFormat, ...] = (
    Weka(),
    TraceLab(),
    TraceLabReplay(),
    LLMServingSimSessions(),
)

PLUGINS = "kvplan.trace_formats"
"""Entry point group of formats from other packages."""


@cache
def all_formats() -> tuple[TraceFormat, ...]:
    """`FORMATS` and those of installed packages. Raises `TraceError` for one that cannot be used."""
    formats = list(FORMATS)
    for entry in sorted(metadata.entry_points(group=PLUGINS), key=lambda entry: entry.name):
        where = f"format plug-in {entry.name} ({entry.value})"
        try:
            plugin = entry.load()()
        except Exception as error:  # whatever another package's code does
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise TraceError(f"{where}: cannot be loaded: {words}") from error
        if not isinstance(plugin, TraceFormat):
            raise TraceError(f"{where}: is not a TraceFormat")
        if any(plugin.name == known.name for known in formats):
            raise TraceError(f"{where}: there is a format {plugin.name} already")
        formats.append(plugin)
    return tuple(formats)


def known_formats() -> str:
    """The name of every format, in one line."""
    return ", ".join(known.name for known in all_formats())


def by_name(name: str) -> TraceFormat:
    """The format that ``--format`` names. Raises `TraceError`."""
    for known in all_formats():
        if known.name == name:
            return known
    sessions = ", ".join(known.name for known in SESSION_FORMATS)
    raise TraceError(
        f"no trace format {name!r}; there are {known_formats()}; of sessions: {sessions}"
    )


def detect(head: Head) -> TraceFormat | None:
    """The format whose names the head shows most of; ``None`` where it shows none.

    Formats share names (``timestamp``), so the most specific one wins. Raises `TraceError` where
    two are equally likely.
    """
    scores = [(known.match(head), known) for known in all_formats()]
    best = max(score for score, _ in scores)
    if best == 0:
        return None
    likely = [known for score, known in scores if score == best]
    if len(likely) > 1:
        names = " or ".join(f"{known.name} ({known.units})" for known in likely)
        raise TraceError(f"could be {names}: choose with --format")
    return likely[0]
