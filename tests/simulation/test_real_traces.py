"""Real traces from end to end through the command line: nothing lost, and numbers one can believe.

Azure's conversation trace of 2023 (github.com/Azure/AzurePublicDataset) and Mooncake's conversation
trace (github.com/kvcache-ai/Mooncake); see ``tests.conftest.shared`` for where they lie.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from records.columns import STATUSES
from records.metrics import departures_ns, identity_errors, num_in_system_area_ns, sojourns_ns
from records.run import RunRecord
from tests.simulation.command import command
from traces import read_trace

LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s")


class RealRun:
    """What the command line printed and wrote about a trace."""

    def __init__(self, trace: Path, folder: Path, *flags: object) -> None:
        self.trace = trace
        ran = command("--trace", trace, "--kv-gb", 60, *flags, "--json", "--out", folder)
        assert (ran.code, ran.err) == (0, "")
        self.document = ran.document
        self.settings: dict[str, Any] = self.document["settings"]
        self.summary: dict[str, Any] = self.document["summary"]
        self.record = RunRecord.read(folder)


def found(path: Path) -> Path:
    if not path.is_file():
        pytest.skip(f"no {path.name} in {path.parent}")
    return path


@pytest.fixture(scope="module")
def azure(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    trace = found(shared / "traces" / "azure2023" / "AzureLLMInferenceTrace_conv.csv")
    return RealRun(trace, tmp_path_factory.mktemp("azure") / "run")


@pytest.fixture(scope="module")
def mooncake(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    trace = found(shared / "traces" / "mooncake" / "conversation_trace.jsonl")
    return RealRun(trace, tmp_path_factory.mktemp("mooncake") / "run")


@pytest.fixture(params=["azure", "mooncake"])
def real(request: pytest.FixtureRequest) -> RealRun:
    run: RealRun = request.getfixturevalue(request.param)
    return run


@pytest.mark.parametrize(("name", "rows"), [("azure", 19_366), ("mooncake", 12_031)])
def test_nothing_is_lost(name: str, rows: int, request: pytest.FixtureRequest) -> None:
    real: RealRun = request.getfixturevalue(name)
    counts = real.summary["requests"]
    assert real.settings["trace_rows"] == rows
    assert real.settings["trace_rows_skipped"] == []
    assert counts["total"] == sum(counts[status] for status in STATUSES) == rows
    assert counts["unfinished"] == counts["timed_out"] == counts["aborted"] == 0
    ids = real.record.requests["id"]
    assert len(set(ids)) == len(ids) == rows


def test_every_completed_request_has_all_its_tokens(real: RealRun) -> None:
    wanted = {a.request.id: (a.request, a.output_tokens) for a in read_trace(real.trace).arrivals}
    requests = real.record.requests
    for index, name in enumerate(requests["id"]):
        request, outputs = wanted[name]
        assert requests["arrival_ns"][index] == request.arrival_ns
        assert requests["prompt_tokens"][index] == request.num_prompt_tokens
        if requests["status"][index] == "completed":
            assert requests["output_tokens"][index] == outputs, name
        else:
            # The only reason here: longer than the model's window.
            assert "max_model_len" in requests["finish_reason"][index]
            assert request.num_prompt_tokens >= real.settings["max_model_len"]


def test_the_rows_agree_with_the_definitions(real: RealRun) -> None:
    requests, gaps = real.record.requests, real.record.gaps
    assert identity_errors(requests, gaps) == []
    completed = np.array([status == "completed" for status in requests["status"]])
    outputs = int((requests["output_tokens"] - requests["num_samples"])[completed].sum())
    assert gaps.count == outputs == real.summary["itl_s"]["count"]


def test_steps_follow_one_another_and_hold_what_there_is(real: RealRun) -> None:
    steps = real.record.steps
    assert steps is not None
    assert real.summary["steps"]["count"] == len(steps["start_ns"]) > 10_000
    assert (steps["duration_ns"] > 0).all()
    assert (steps["start_ns"][1:] >= (steps["start_ns"] + steps["duration_ns"])[:-1]).all()
    assert steps["blocks_used"].max() <= real.settings["num_blocks"]
    assert steps["running"].max() <= real.settings["max_num_seqs"]
    tokens = steps["prefill_tokens"] + steps["decode_tokens"]
    assert tokens.max() <= real.settings["max_num_batched_tokens"]
    requests = real.record.requests
    served = np.array([status == "completed" for status in requests["status"]])
    needed = (
        requests["prompt_tokens"]
        - requests["cached_tokens"]
        + requests["output_tokens"]
        - 1
        + requests["recomputed_tokens"]
    )
    assert int(tokens.sum()) == int(needed[served].sum())


def test_littles_law_holds_for_the_whole_run(real: RealRun) -> None:
    requests = real.record.requests
    left = departures_ns(requests, int(np.ma.MaskedArray(requests["finish_ns"]).max()))
    area = num_in_system_area_ns(requests["arrival_ns"], left)
    assert area == sojourns_ns(requests["arrival_ns"], left)


def test_latencies_are_in_order_and_believable(real: RealRun) -> None:
    for name in LATENCIES:
        values = real.summary[name]
        ordered = [values[key] for key in ("p50", "p90", "p95", "p99", "max")]
        assert ordered == sorted(ordered), name
        assert ordered[0] >= 0, name
        assert values["mean"] <= values["max"], name
    # An 8B model in bf16: 16.1 GB of weights cross 3.35 TB/s in 4.8 ms, no token is faster.
    assert real.summary["itl_s"]["p50"] > 0.0048
    assert real.summary["tpot_s"]["p50"] < 0.2
    assert real.summary["ttft_s"]["p50"] > 0.005
    for phase in real.summary["utilization"].values():
        assert 0 < phase["compute"] < 1
        assert 0 < phase["bandwidth"] < 1


def test_azure_conversation_is_an_easy_load(azure: RealRun) -> None:
    """5.5 requests/s of 1,155 prompt and 211 output tokens: half an hour of little work."""
    summary = azure.summary
    assert summary["requests"]["completed"] == 19_366
    assert summary["kv"]["prefix_hit_rate"] is None  # the trace does not know
    assert summary["kv"]["preemptions"] == 0
    assert summary["throughput"]["requests_per_s"] == pytest.approx(19_366 / 3_500, rel=0.02)
    assert summary["ttft_s"]["p99"] < 1
    assert azure.record.summary == summary


def test_mooncake_conversation_is_heavy_and_hits(mooncake: RealRun) -> None:
    """3.4 requests/s of 12,035 prompt tokens; at most 37.4 % of them can hit (512-token blocks)."""
    summary = mooncake.summary
    assert summary["requests"]["completed"] > 12_000
    # A pool of 60 GiB remembers only part of an hour, so it stays below what is ideal.
    assert 0.02 < summary["kv"]["prefix_hit_rate"] < 0.374
    assert summary["kv"]["evictions"] > 0
    assert summary["kv"]["peak_usage"] > 0.5
    assert summary["bottleneck"]["state"] in ("backlogged", "overloaded")
