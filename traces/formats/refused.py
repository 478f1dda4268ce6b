"""Files that people try and that cannot be a trace: recognised, to say why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO, ClassVar, Literal

from traces.formats.base import BadRow, Head, Row, TraceError, TraceFormat
from traces.formats.documents import head_text


class Refused(TraceFormat):
    """A format that lacks what a trace needs."""

    clock: ClassVar[Literal["relative", "absolute"]] = "absolute"
    units: ClassVar[str] = "not read"
    prefix_identity: ClassVar[str] = "none"
    licence: ClassVar[str] = "not read"
    pattern: ClassVar[re.Pattern[bytes]]
    """What its first lines show."""
    reason: ClassVar[str]
    """What it lacks, and what to use instead."""

    def match(self, head: Head) -> int:
        return 1 if self.pattern.search(head_text(head)) else 0

    def rows(self, source: BinaryIO) -> Iterator[Row | BadRow]:
        raise TraceError(f"cannot be a trace: {self.reason}")


class GenAiPerf(Refused):
    """``profile_export.json`` of genai-perf and perf_analyzer."""

    name = "genai-perf"
    recognised_by = "JSON with experiments and response_timestamps (refused: no token counts)"
    pattern = re.compile(rb'"experiments"\s*:.*"(response_timestamps|service_kind)"', re.DOTALL)
    reason = (
        "genai-perf stores times and texts but no token counts; "
        "aiperf's profile_export.jsonl has both"
    )


class InferencePerfSummary(Refused):
    """Summaries of inference-perf, of a stage or of a run."""

    name = "inference-perf-summary"
    recognised_by = "JSON with load_summary and successes (refused: sums only)"
    pattern = re.compile(rb'"load_summary"\s*:.*"successes"\s*:', re.DOTALL)
    reason = (
        "a summary of inference-perf has no single requests; its per_request_lifecycle_metrics.json "
        "does (report: request_lifecycle: per_request: true)"
    )


class GuideLlmYaml(Refused):
    """A guidellm report in YAML."""

    name = "guidellm-yaml"
    recognised_by = "YAML report of guidellm (refused: write it as JSON)"
    pattern = re.compile(rb"^\s+guidellm_version:\s", re.MULTILINE)
    reason = "a guidellm report in YAML is not read; write it as JSON"


class OpenAiUsage(Refused):
    """Buckets of the OpenAI usage API."""

    name = "openai-usage"
    recognised_by = "JSON buckets with num_model_requests (refused: sums only)"
    pattern = re.compile(rb'"(num_model_requests|input_cached_tokens)"\s*:')
    reason = (
        "the OpenAI usage API gives sums over a minute, an hour or a day, no single requests; "
        "a gateway's log has them"
    )


class Prometheus(Refused):
    """A scrape of vLLM's /metrics, or of any server."""

    name = "prometheus"
    recognised_by = "Prometheus metrics as text (refused: sums only)"
    pattern = re.compile(rb"^(# (HELP|TYPE) \S+|(vllm|sglang):\w+(\{.*\})? \S+\s*$)", re.MULTILINE)
    reason = (
        "metrics are counters and histograms over all requests, no single requests with their "
        "times; a gateway's log or OpenTelemetry spans have them"
    )


class VllmLog(Refused):
    """Lines of vLLM's log."""

    name = "vllm-log"
    recognised_by = "log lines of vLLM (refused: no output lengths)"
    pattern = re.compile(
        rb"Received request \S+|Avg prompt throughput: [\d.]+ tokens/s|^(INFO|WARNING) \d\d-\d\d \d\d:",
        re.MULTILINE,
    )
    reason = (
        "vLLM's log tells when a request came and its max_tokens, neither the length of its "
        "prompt nor that of its output; a gateway's log or OpenTelemetry spans do"
    )


class AccessLog(Refused):
    """nginx and Apache, combined and alike."""

    name = "access-log"
    recognised_by = "access log of nginx or Apache (refused: bytes, no token counts)"
    pattern = re.compile(rb'^\S+ \S+ .*\[\d\d/\w{3}/\d{4}(:\d\d){3} [+-]\d{4}\] "', re.MULTILINE)
    reason = (
        "an access log has bytes and no token counts, and its lines are written when requests "
        "end; a gateway's log has what is needed"
    )
