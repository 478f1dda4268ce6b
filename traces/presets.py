"""Workloads by name, each shaped after public figures; what no source tells is said to be assumed."""

from __future__ import annotations

from dataclasses import dataclass

from traces.formats.base import TraceError
from traces.generate import ChatSettings
from traces.laws import Fixed, Lognormal, Poisson, Quantiles, Weibull


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings and where they come from."""

    settings: ChatSettings
    source: str
    """The public figures it was shaped after, and who published them."""
    assumed: str
    """What they do not tell."""


def _published(
    least: float, p5: float, p50: float, p95: float, p99: float, most: float
) -> Quantiles:
    points = ((0, least), (0.05, p5), (0.5, p50), (0.95, p95), (0.99, p99), (1, most))
    return Quantiles(tuple((float(share), float(value)) for share, value in points), is_log=True)


PRESETS: dict[str, Preset] = {
    "chat": Preset(
        ChatSettings(
            rate=5.53,
            turns=3,
            question_tokens=Lognormal(median=110, p95=900),
            output_tokens=_published(7, 41, 129, 451, 601, 1_000),
            system_tokens=Lognormal(median=130, p95=500),
            max_context=16_384,
        ),
        "Azure LLM inference trace 2023, conversation (Azure Public Dataset, CC-BY-4.0): 5.53 requests/s, "
        "CV of gaps 1.09, prompts of 181 / 1,020 / 4,083 tokens at p5 / p50 / p95 (mean 1,155), outputs of "
        "41 / 129 / 451 (mean 211)",
        "the trace has no sessions: turns, system prompts, think times and so all prefix hits",
    ),
    "code": Preset(
        ChatSettings(
            rate=2.566,
            arrivals=Weibull(13.15),
            turns=1,
            question_tokens=_published(3, 75, 1_469, 7_303, 7_436, 7_437),
            output_tokens=_published(6, 6, 13, 90, 251, 1_899),
            system_prompts=0,
            max_context=16_384,
            duration_s=3_436,
            hash_ids=False,
        ),
        "Azure LLM inference trace 2023, code completion (Azure Public Dataset, CC-BY-4.0): 2.566 "
        "requests/s, CV of gaps 13.15, prompts of 75 / 1,469 / 7,303 tokens at p5 / p50 / p95 (mean "
        "2,048), outputs of 6 / 13 / 90 (mean 27.9)",
        "lines between these quantiles that are straight in the logarithm; Weibull gaps, the law of that "
        "CV that comes nearest to the trace; what prompts share is unknown there and here, so no hits are "
        "modelled",
    ),
    "rag": Preset(
        ChatSettings(
            rate=3.0,
            turns=1,
            system_prompts=1,
            system_tokens=Fixed(200),
            question_tokens=Lognormal(median=100, p95=250),
            output_tokens=Lognormal(median=150, p95=400),
            documents=10_000,
            documents_per_question=4,
            document_tokens=Lognormal(median=450, p95=900),
            document_exponent=0.96,
            max_context=32_768,
            duration_s=1_200,
        ),
        "RAGCache (Jin et al. 2024, arXiv 2404.12457): 3 % of the documents get 60 % of the retrievals, "
        "and retrieved text adds 1,000 tokens and more to a question of 100",
        "10,000 documents, four for each question in order of relevance, chunks of 450 tokens at the "
        "median, the lengths of answers, the rate, Poisson arrivals",
    ),
    "summarisation": Preset(
        ChatSettings(
            rate=1.0,
            turns=1,
            question_tokens=_published(1, 749, 2_730, 3_813, 3_933, 4_054),
            output_tokens=_published(5, 60, 167, 736, 3_271, 4_056),
            system_prompts=0,
            max_context=16_384,
            duration_s=1_200,
            hash_ids=False,
        ),
        "arXiv summarisation lengths that ship with Vidur (MIT): prompts of 749 / 2,730 / 3,813 tokens at "
        "p5 / p50 / p95 (mean 2,588), outputs of 60 / 167 / 736 (mean 291)",
        "the source has no arrivals: the rate, Poisson arrivals; long prompts may get long outputs, which "
        "the source cuts at 4,096 together; articles share nothing that is known",
    ),
    "reasoning": Preset(
        ChatSettings(
            rate=2.0,
            arrivals=Poisson(),
            turns=1,
            question_tokens=_published(4, 13, 208, 6_714, 23_423, 57_284),
            output_tokens=_published(9, 225, 792, 5_701, 12_607, 32_768),
            system_prompts=0,
            max_context=131_072,
            duration_s=1_800,
            hash_ids=False,
        ),
        "ServeGen, deepseek-r1 (alibaba/ServeGen, Apache-2.0, rate-weighted over 73 clients): prompts of 13 "
        "/ 208 / 6,714 tokens at p5 / p50 / p95 (mean 1,268), outputs of 225 / 792 / 5,701 (mean 1,527), "
        "three quarters of which are reasoning",
        "lines between these quantiles that are straight in the logarithm; Poisson arrivals at a rate of "
        "our own (ServeGen's files give those of each client); no sessions and no shared prefixes, of "
        "which the source tells nothing",
    ),
    "agents": Preset(
        ChatSettings(
            rate=1.0,
            turns=50,
            question_tokens=Lognormal(median=600, p95=6_000),
            output_tokens=_published(1, 89, 216, 1_554, 3_686, 18_195),
            system_tokens=Lognormal(median=24_000, p95=60_000),
            system_prompts=40,
            think_s=Lognormal(median=10, p95=449),
            max_context=1_000_000,
            hash_block_size=64,
            duration_s=1_800,
        ),
        "Claude Code sessions of kv-cache-tester (callanjfox/kv-cache-tester, Apache-2.0, 710 sessions, "
        "49,334 requests): 45 requests a session at the median, first prompts of 24,454 tokens, all prompts "
        "30,544 / 103,659 / 300,666 at p5 / p50 / p95, outputs 89 / 216 / 1,554, think and tool times of "
        "10 s at the median and 449 s at p95, 96.3 % of blocks reused within a session",
        "a geometric number of turns, how many sessions share a system prompt (ids there are local to a "
        "session), no compaction and no sub-agents, the rate, Poisson starts",
    ),
}


def preset(name: str) -> Preset:
    """By name. Raises `TraceError`."""
    found = PRESETS.get(name)
    if found is None:
        raise TraceError(f"no workload {name!r}; there are {', '.join(PRESETS)}")
    return found
