"""Reported faults of simulators and metrics as tests; the id of the case is in the test's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from records.metrics import identity_errors
from records.run import RunRecord
from simulator.__main__ import _run_parser
from simulator.cost import ConstantCost, PhysicalCost
from simulator.cost.calibration import Calibration
from simulator.settings import Options
from tests.simulation.command import (
    Ran,
    command,
    headings,
    is_refused,
    one_line,
    python,
    row,
    row_of,
    simulated,
    write_trace,
)
from tests.simulation.helpers import NS, arrival, run

MS = 1_000_000
SECTIONS = (
    "Verdict",
    "Run",
    "Requests",
    "Latency",
    "Goodput",
    "KV memory",
    "Work",
    "Preemptions",
    "Assumed",
)
LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s")


# -- SC-01: a request that no pool of this size can ever hold ---------------------------------

SC_01 = ("--num-gpu-blocks", 11, "--max-model-len", 512, "--cost-model", "constant:10ms")
X = row(0, 200, 10, id="X", max_tokens=10)
Y = row(0, 32, 8, id="Y", max_tokens=8)


def test_sc_01_the_impossible_is_refused_and_the_rest_is_served(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "xy.jsonl", [X, Y])
    result = simulated(trace, num_gpu_blocks=11, max_model_len=512)
    x, y = row_of(result, "X"), row_of(result, "Y")
    assert x["status"] == "refused"
    assert "14 blocks" in x["finish_reason"]  # ceil(209 / 16)
    assert "pool has 10" in x["finish_reason"]
    assert (y["first_token_ns"], y["finish_ns"]) == (10 * MS, 80 * MS)
    steps = result.record.steps
    assert steps is not None
    assert len(steps["start_ns"]) == 8
    assert steps["blocks_used"].max() == 3

    report = command("--trace", trace, *SC_01)
    assert report.code == 0
    assert "1 completed, 1 refused, 0 timed out, 0 aborted, 0 unfinished; 2 in all" in report.out
    assert "need 14 blocks, the pool has 10" in one_line(report.out)


def test_sc_01_a_run_of_refusals_prints_the_full_report(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "x.jsonl", [X])
    report = command("--trace", trace, *SC_01)
    assert (report.code, report.err) == (0, "")
    assert headings(report.out) == [*SECTIONS[:-1], "Refused", "Assumed"]
    assert "0 completed, 1 refused" in report.out

    machine = command("--trace", trace, *SC_01, "--json")
    assert (machine.code, machine.err) == (0, "")
    requests = machine.summary["requests"]
    assert (requests["total"], requests["completed"], requests["refused"]) == (1, 0, 1)
    for name in LATENCIES:
        values = machine.summary[name]
        assert values.pop("count") == 0
        assert set(values.values()) == {None}, name


# -- SI-01: what times out neither vanishes nor makes the rest look faster --------------------

TEN = [row(0, 1, 100, id=f"r{i}") for i in range(10)]
SI_01 = ("--max-num-seqs", 1, "--cost-model", "constant:1s")


@pytest.mark.parametrize("given_by", ["flag", "rows"])
def test_si_01_timeouts_are_counted_and_the_makespan_keeps_them(
    given_by: str, tmp_path: Path
) -> None:
    rows = [{**r, "deadline_s": 310} for r in TEN] if given_by == "rows" else TEN
    trace = write_trace(tmp_path / "ten.jsonl", rows)
    deadline = 310.0 if given_by == "flag" else None
    result = simulated(trace, max_num_seqs=1, cost_model="constant:1s", deadline=deadline)
    summary, requests = result.record.summary, result.record.requests
    assert summary["requests"] == {
        "total": 10, "completed": 3, "refused": 0, "timed_out": 7, "aborted": 0, "unfinished": 0,
    }  # fmt: skip
    done = [i for i, status in enumerate(requests["status"]) if status == "completed"]
    late = [i for i, status in enumerate(requests["status"]) if status == "timed_out"]
    assert requests["finish_ns"][done].tolist() == [100 * 10**9, 200 * 10**9, 300 * 10**9]
    assert set(requests["finish_ns"][late].tolist()) == {310 * 10**9}
    # One of the seven was running, and had ten tokens.
    assert requests["first_scheduled_ns"][late].count() == 1
    assert requests["output_tokens"][late].tolist() == [10, 0, 0, 0, 0, 0, 0]
    assert int(requests["output_tokens"][done].sum()) == 300
    assert summary["makespan_s"] == 310.0
    assert summary["throughput"]["output_tokens_per_s"] == pytest.approx(300 / 310, rel=1e-12)
    assert summary["throughput"]["steady_output_tokens_per_s"] <= 1.0
    assert summary["ttft_s"]["count"] == 4
    assert summary["e2e_s"]["count"] == 3

    flags = ("--deadline", 310) if given_by == "flag" else ()
    report = command("--trace", trace, *SI_01, *flags)
    assert report.code == 0
    assert "7 timed out" in report.out
    assert "beware" in report.out.split("Requests\n")[1].split("Latency\n")[0]
    # Says which of the two rates it is.
    assert "of completed requests over the makespan of 310 s" in one_line(report.out)


def test_si_01_a_client_leaves_at_its_deadline_not_at_the_end_of_the_step(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "t.jsonl",
        [
            row(0, 16, 9, id="inside", deadline_s=0.055),
            row(0.02, 16, 5, id="just", deadline_s=0.05),
        ],
    )
    result = simulated(trace)
    inside, just = row_of(result, "inside"), row_of(result, "just")
    assert (inside["status"], inside["finish_ns"]) == ("timed_out", 55 * MS)
    assert inside["output_tokens"] == 5  # the step that ends at 60 ms brings it nothing
    assert identity_errors(result.record.requests, result.record.gaps) == []
    # A finish at the deadline itself is in time.
    assert (just["status"], just["finish_ns"]) == ("completed", 70 * MS)


def test_si_01_the_deadline_of_the_flag_counts_from_each_arrival(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "t.jsonl",
        [row(0, 16, 3), row(1000, 16, 3), row(1000, 16, 900, deadline_s=8), row(2000, 16, 900)],
    )
    requests = simulated(trace, deadline=5.0).record.requests
    finish = dict(zip(requests["arrival_ns"].tolist(), requests["finish_ns"].tolist(), strict=True))
    assert sorted(requests["status"]) == ["completed", "completed", "timed_out", "timed_out"]
    # The row's own deadline comes before the flag's.
    assert finish == {0: 30 * MS, 1000 * NS: 1008 * NS, 2000 * NS: 2005 * NS}


def test_si_01_without_deadlines_all_ten_complete(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "ten.jsonl", TEN)
    summary = command("--trace", trace, *SI_01, "--json").summary
    assert summary["requests"]["completed"] == 10
    assert summary["makespan_s"] == 1000.0
    assert summary["throughput"]["output_tokens_per_s"] == 1.0


# -- SI-02: what a preemption does to the numbers ---------------------------------------------


def test_si_02_preemption_counts_nothing_twice(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "ab.jsonl", [row(0, 64, 80, id="A"), row(0, 64, 80, id="B")])
    result = simulated(trace, num_gpu_blocks=11, max_num_batched_tokens=64)
    requests, gaps = result.record.requests, result.record.gaps
    a, b = row_of(result, "A"), row_of(result, "B")
    assert int(requests["output_tokens"].sum()) == 160
    assert (a["decode_gaps"], b["decode_gaps"], gaps.count) == (79, 79, 158)
    assert (a["first_token_ns"], b["first_token_ns"]) == (10 * MS, 30 * MS)
    assert (a["finish_ns"], b["finish_ns"]) == (800 * MS, 1460 * MS)
    assert (a["decode_ns"], b["decode_ns"]) == (790 * MS, 1430 * MS)
    assert (a["max_gap_ns"], b["max_gap_ns"]) == (10 * MS, 650 * MS)
    assert (a["preemptions"], b["preemptions"]) == (0, 1)
    assert (a["recomputed_tokens"], b["recomputed_tokens"]) == (0, 78)
    assert int(requests["prompt_tokens"].sum()) == 128
    assert identity_errors(requests, gaps) == []
    steps = result.record.steps
    assert steps is not None
    computed = steps["prefill_tokens"] + steps["decode_tokens"]
    assert (len(computed), int(computed.sum())) == (146, 364)

    summary = result.record.summary
    assert summary["ttft_s"]["count"] == 2
    assert summary["itl_s"]["count"] == 158
    assert summary["itl_s"]["max"] == 0.65
    assert summary["tpot_s"]["max"] == pytest.approx(1.43 / 79, rel=1e-12)
    assert summary["tpot_s"]["mean"] == pytest.approx((0.01 + 1.43 / 79) / 2, rel=1e-12)
    assert summary["kv"]["recomputed_tokens"] == 78
    input_tokens = summary["throughput"]["input_tokens_per_s"] * summary["makespan_s"]
    assert input_tokens == pytest.approx(128, rel=1e-12)

    report = command(
        *("--trace", trace, "--num-gpu-blocks", 11, "--max-num-batched-tokens", 64),
        *("--cost-model", "constant:10ms"),
    )
    assert "78 tokens computed again" in one_line(report.out)
    assert "B: preempted once, longest gap between tokens 650 ms" in one_line(report.out)


# -- SI-03: ties ------------------------------------------------------------------------------

SI_03 = (
    *("--num-gpu-blocks", 41, "--max-num-seqs", 3, "--cost-model", "constant:10ms"),
    *("--scheduling-policy", "fcfs", "--json"),
)


def twenty(tied: list[str]) -> list[dict[str, Any]]:
    """20 requests; "first" ends at 50 ms exactly, when the five tied ones arrive."""
    rows = [row(0, 20, 5, id="first", session_id="s")]
    rows += [row(0, 30, 20 + i, id=f"other-{i}") for i in range(2)]
    rows += [row(0.05, 16, 7, id=name) for name in tied]
    rows += [row(0.05 + 0.011 * i, 10 + i, 3 + i, id=f"late-{i}") for i in range(1, 13)]
    assert len(rows) == 20
    return rows


def test_si_03_the_same_bytes_under_every_hash_seed(tmp_path: Path) -> None:
    write_trace(tmp_path / "ties.jsonl", twenty(["a", "b", "c", "d", "e"]))
    seen = []
    for seed in range(5):
        ran = python(
            *("-m", "simulator", "--trace", "ties.jsonl", *SI_03, "--out", f"out-{seed}"),
            cwd=tmp_path,
            env={"PYTHONHASHSEED": str(seed)},
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        files = {path.name: path.read_bytes() for path in (tmp_path / f"out-{seed}").iterdir()}
        assert {"run.json", "requests.parquet", "steps.parquet", "gaps.parquet"} <= files.keys()
        seen.append((ran.stdout, files))
    assert all(other == seen[0] for other in seen[1:])


def test_si_03_ties_go_to_completions_then_to_the_order_of_the_trace(tmp_path: Path) -> None:
    names = ["a", "b", "c", "d", "e"]
    swapped = ["d", "b", "e", "a", "c"]
    one, other = (
        simulated(
            write_trace(tmp_path / f"{'-'.join(order)}.jsonl", twenty(order)),
            num_gpu_blocks=41,
            max_num_seqs=3,
        )
        for order in (names, swapped)
    )
    assert row_of(one, "first")["finish_ns"] == 50 * MS
    # The slot that "first" leaves at 50 ms goes to the first of the five in the same instant.
    starts = [row_of(one, name)["first_scheduled_ns"] for name in names]
    assert starts[0] == 50 * MS
    assert starts == sorted(starts)
    # The swapped run is the same run with the names of the five exchanged.
    renamed = dict(zip(swapped, names, strict=True))
    ids = [renamed.get(name, name) for name in other.record.requests["id"]]
    assert ids == one.record.requests["id"]
    for name, column in one.record.requests.items():
        if name != "id":
            assert list(column) == list(other.record.requests[name]), name
    assert one.record.steps is not None
    assert other.record.steps is not None
    for name, column in one.record.steps.items():
        assert column.tolist() == other.record.steps[name].tolist(), name
    assert one.record.summary == other.record.summary


# -- SI-05: the clock -------------------------------------------------------------------------


def test_si_05_ten_steps_of_a_tenth_end_at_one_second_exactly() -> None:
    requests = [arrival("A", 0, 16, 10), arrival("B", 1.0, 16, 1)]
    result = run(requests, ConstantCost(0.1))
    assert result.row("A")["finish_ns"] == 10**9
    assert result.steps["start_ns"].tolist() == [i * 10**8 for i in range(11)]
    # B is seen by the step that starts at its arrival.
    b = result.row("B")
    assert (b["first_scheduled_ns"], b["first_token_ns"]) == (10**9, 11 * 10**8)


def test_si_05_events_at_the_stop_time_are_processed() -> None:
    requests = [
        arrival("ends", 0, 16, 10),
        arrival("comes", 1.0, 16, 1),
        arrival("refused", 1.0, 10**6, 1),
        arrival("after", 1.000000001, 16, 1),
    ]
    result = run(requests, ConstantCost(0.1), until_s=1.0)
    ends = result.row("ends")
    assert (ends["status"], ends["finish_ns"]) == ("completed", 10**9)
    assert result.row("refused")["status"] == "refused"
    comes, after = result.row("comes"), result.row("after")
    assert (comes["status"], comes["finish_reason"]) == ("unfinished", "the run was stopped")
    assert after["status"] == "unfinished"
    assert "not arrived" in after["finish_reason"]
    assert len(result.steps["start_ns"]) == 10


def test_si_05_a_client_that_gave_up_before_the_stop_has_timed_out() -> None:
    # The first step would end after the stop: nobody is served, but time passes all the same.
    requests = [arrival("gone", 0, 16, 1, deadline_ns=50 * MS), arrival("patient", 0, 16, 1)]
    result = run(requests, ConstantCost(2), until_s=1.0)
    gone = result.row("gone")
    assert (gone["status"], gone["finish_ns"]) == ("timed_out", 50 * MS)
    assert result.row("patient")["status"] == "unfinished"


def test_si_05_a_stopped_run_lasts_until_the_stop(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [row(0, 16, 3), row(0.2, 16, 300)])
    result = simulated(trace, cost_model="constant:100ms", until=0.95)
    assert result.record.summary["makespan_s"] == 0.95
    assert result.record.summary["requests"]["unfinished"] == 1


def test_si_05_a_month_in_microseconds_is_kept_exactly(tmp_path: Path) -> None:
    times = ["0", "1296000.000001", "2591999.999999", "2592000"]
    trace = write_trace(
        tmp_path / "month.jsonl",
        [f'{{"arrival_s": {t}, "prompt_tokens": 16, "output_tokens": 3}}' for t in times],
    )
    result = simulated(trace, cost_model="constant:1us")
    arrivals = result.record.requests["arrival_ns"].tolist()
    assert arrivals == [0, 1_296_000_000_001_000, 2_591_999_999_999_000, 2_592_000_000_000_000]
    lasted = result.record.requests["finish_ns"] - result.record.requests["arrival_ns"]
    assert set(lasted.tolist()) == {3000}
    assert result.record.summary["makespan_s"] == 2592000.000003


# -- SI-06: a prefill that is cached to the last block still takes time ------------------------


@pytest.mark.parametrize("cost_model", ["physical", "linear:base=0,per_token=1us,per_seq=0"])
def test_si_06_cached_prefills_take_time_and_the_run_ends(
    cost_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(64))
    trace = write_trace(
        tmp_path / "same.jsonl", [row(0, 64, 1, token_ids=prompt) for _ in range(1000)]
    )
    least_granted: list[int] = []
    price = PhysicalCost.price

    def watched(self: PhysicalCost, step: Any) -> Any:
        least_granted.append(int(step.granted.min()))
        return price(self, step)

    monkeypatch.setattr(PhysicalCost, "price", watched)
    result = simulated(trace, cost_model=cost_model, warm_start=1)
    requests, steps = result.record.requests, result.record.steps
    assert steps is not None
    assert requests["status"] == ["completed"] * 1000
    assert set(requests["cached_tokens"].tolist()) == {48}
    assert (steps["prefill_tokens"] == 16 * steps["num_seqs"]).all()
    assert steps["num_seqs"].sum() == 1000
    assert (steps["duration_ns"] > 0).all()
    assert (np.diff(steps["start_ns"]) > 0).all()
    assert result.record.summary["kv"]["prefix_hit_rate"] == 0.75
    # What the warm-up computed is neither a request nor a step of the run.
    assert len(requests["id"]) == 1000
    assert steps["start_ns"][0] < 1e8
    if cost_model == "physical":
        assert min(least_granted) >= 1


# -- SI-09: every flag does what it says, or says that it cannot -------------------------------


class Effect(NamedTuple):
    """Flags that must change a field of what ``--json`` prints."""

    flags: str
    field: str
    base: str = ""
    """Flags of both runs."""


TIGHT = "--num-gpu-blocks 61"
EFFECTS = {
    "max_tokens": Effect("--max-tokens 5", "throughput.output_tokens_per_s"),
    "deadline": Effect("--deadline 0.4", "requests.timed_out", "--max-num-seqs 4"),
    "warm_start": Effect("--warm-start 3", "kv.prefix_hit_rate"),
    "until": Effect("--until 0.5", "requests.unfinished"),
    "model": Effect("--model qwen2.5-7b", "kv.bytes_per_token"),
    "gpu": Effect("--gpu a100-80gb", "tpot_s.mean"),
    "tensor_parallel_size": Effect("--tensor-parallel-size 2", "kv.bytes_per_token"),
    "pipeline_parallel_size": Effect("--pipeline-parallel-size 2", "kv.bytes_per_token"),
    "weight_dtype": Effect("--weight-dtype fp8", "tpot_s.mean"),
    "kv_cache_dtype": Effect("--kv-cache-dtype fp8", "kv.bytes_per_token"),
    "cost_model": Effect("--cost-model constant:20ms", "itl_s.p50"),
    "async_scheduling": Effect("--no-async-scheduling", "tpot_s.mean"),
    "enforce_eager": Effect("--enforce-eager", "ttft_s.mean", "--model llama-3.2-1b"),
    "frontend_latency": Effect("--frontend-latency 0.1", "ttft_s.mean"),
    "kv_gb": Effect("--kv-gb 1.5", "kv.num_blocks"),
    "num_gpu_blocks": Effect("--num-gpu-blocks 100", "kv.num_blocks"),
    "gpu_memory_utilization": Effect("--gpu-memory-utilization 0.8", "kv.num_blocks"),
    "block_size": Effect("--block-size 32", "kv.block_size"),
    "watermark": Effect("--watermark 0.4", "queue_s.mean", TIGHT),
    "swap_space": Effect(
        "--swap-space 1",
        "kv.recomputed_tokens",
        f"{TIGHT} --preemption-mode swap --swap-space 0.01 --no-enable-prefix-caching",
    ),
    "max_num_seqs": Effect("--max-num-seqs 3", "queue_s.mean"),
    "max_num_batched_tokens": Effect("--max-num-batched-tokens 64", "steps.count"),
    "max_model_len": Effect("--max-model-len 100", "requests.refused"),
    "enable_chunked_prefill": Effect(
        "--no-enable-chunked-prefill",
        "ttft_s.mean",
        "--max-model-len 400 --max-num-batched-tokens 400 --cost-model constant:100ms",
    ),
    "long_prefill_token_threshold": Effect("--long-prefill-token-threshold 16", "ttft_s.mean"),
    "enable_prefix_caching": Effect("--no-enable-prefix-caching", "kv.prefix_hit_rate"),
    "scheduler_reserve_full_isl": Effect(
        "--no-scheduler-reserve-full-isl",
        "kv.preemptions",
        f"{TIGHT} --max-num-batched-tokens 64",
    ),
    "scheduling_policy": Effect("--scheduling-policy priority", "ttft_s.p90", "--max-num-seqs 4"),
    "preemption_mode": Effect(
        "--preemption-mode swap --swap-space 1",
        "kv.recomputed_tokens",
        f"{TIGHT} --no-enable-prefix-caching",
    ),
    "parallel_sampling": Effect(
        "--parallel-sampling separate", "kv.peak_usage", "--no-enable-prefix-caching"
    ),
    "slo": Effect("--slo ttft<=100ms", "goodput.attainment"),
}
"""The rest (``test_si_09_flag_NAME``) is no change of a number."""
RECORDED_AS = {"kv_gb": "kv_bytes"}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts that share a prefix, all lengths, priorities and numbers of samples."""
    rng = np.random.default_rng(9)
    rows = []
    for i in range(30):
        prompt = int(rng.integers(80, 250))
        token_ids = [*range(64), *rng.integers(100, 10**6, prompt - 64).tolist()]
        rows.append(
            row(
                round(0.02 * i, 3), prompt, int(rng.integers(10, 60)),
                id=f"r{i}", token_ids=token_ids, priority=int(-i % 5), n=1 + i % 2,
            )
        )  # fmt: skip
    return write_trace(tmp_path_factory.mktemp("load") / "load.jsonl", rows)


def at(tree: dict[str, Any], path: str) -> Any:
    for key in path.split("."):
        tree = tree[key]
    return tree


@pytest.mark.parametrize("name", EFFECTS)
def test_si_09_the_flag_changes_its_field_and_is_echoed(name: str, load: Path) -> None:
    effect = EFFECTS[name]
    plain = command("--trace", load, "--json", *effect.base.split())
    varied = command("--trace", load, "--json", *effect.base.split(), *effect.flags.split())
    assert (plain.code, varied.code, varied.err) == (0, 0, "")
    before, after = (at(ran.summary, effect.field) for ran in (plain, varied))
    assert before != after, f"{effect.field} is {before} with and without {effect.flags}"
    settings = varied.document["settings"]
    recorded = RECORDED_AS.get(name, name)
    assert settings["sources"][recorded]["source"] == "given"
    assert settings[recorded] != plain.document["settings"].get(recorded)


def test_si_09_every_flag_is_tested_here() -> None:
    names = {action.dest for action in _run_parser()._actions}
    untested = {n for n in names - EFFECTS.keys() if f"test_si_09_flag_{n}" not in globals()}
    assert not untested, f"say here what these flags change: {sorted(untested)}"
    assert EFFECTS.keys() <= names


def test_si_09_flag_calibration(load: Path, tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    made = Calibration(
        weights=0.5,
        model="llama-3.1-8b",
        gpu="h100-sxm",
        fitted_on="two requests",
        residuals={"TPOT mean": 0.03},
    )
    made.write(file)
    plain, slower = (
        command("--trace", load, "--json", *flags) for flags in ((), ("--calibration", file))
    )
    assert slower.summary["tpot_s"]["mean"] > 1.5 * plain.summary["tpot_s"]["mean"]
    assert slower.document["settings"]["sources"]["calibration"]["source"] == "given"
    assert slower.summary["band"]["why"] == "step times: calibrated"
    is_refused(command("--trace", load, "--calibration", file, "--gpu", "h200"), "h100-sxm", "h200")
    is_refused(command("--trace", load, "--calibration", tmp_path / "none.json"), "none.json")
    is_refused(
        command("--trace", load, "--calibration", file, "--cost-model", "constant:1ms"),
        "no effect",
    )


def test_si_09_flag_arrivals(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n" + "100,20\n" * 30)
    is_refused(command("--trace", lengths), "--arrivals")
    ran = command("--trace", lengths, "--arrivals", "constant:rate=10", "--json")
    assert ran.summary["makespan_s"] == pytest.approx(3.1, abs=0.1)
    notes = ran.document["settings"]["trace_notes"]
    assert any("10" in note and "rrival" in note for note in notes), notes


def test_si_09_flag_tokenizer(tmp_path: Path, word_tokenizer: Path) -> None:
    messages = [{"from": "human", "value": "a b c"}, {"from": "gpt", "value": "d e"}]
    path = write_trace(tmp_path / "chats.jsonl", [{"id": "c", "conversations": messages}])
    process = ("--arrivals", "constant:rate=1")
    is_refused(command("--trace", path, *process), "--tokenizer FILE")
    ran = command("--trace", path, *process, "--tokenizer", word_tokenizer, "--json")
    assert ran.summary["requests"]["completed"] == 1
    assert any("chat template" in note for note in ran.document["settings"]["trace_notes"])
    is_refused(command("--trace", path, "--tokenizer", word_tokenizer, "--closed-loop"), "no start")
    is_refused(
        command("--trace", path, "--tokenizer", word_tokenizer, "--closed-loop", 5), "has no time"
    )
    for how in (("--users", 1), process):
        flags = ("--tokenizer", word_tokenizer, "--closed-loop", *how)
        looped = command("--trace", path, *flags, "--json")
        settings = looped.document["settings"]
        assert "in closed loop" in settings["load"]
        assert not any("Arrival times are made" in note for note in settings["trace_notes"])
    calls = [{"input_toks": 5, "output_toks": 2}]
    agents = write_trace(
        tmp_path / "agents.jsonl",
        [{"session_id": "a", "arrival_time_ns": 0, "sub_requests": calls}],
    )
    is_refused(command("--trace", agents, "--tokenizer", word_tokenizer), "--tokenizer", "sessions")
    for speed in ((), (0,)):
        is_refused(
            command("--trace", agents, "--closed-loop", *speed), "--closed-loop has no effect"
        )


def test_si_09_flag_spread(tmp_path: Path) -> None:
    ticks = write_trace(tmp_path / "t.jsonl", [row(3 * (i // 10), 500, 20) for i in range(60)])
    plain, spread = (command("--trace", ticks, "--json", *f) for f in ((), ("--spread",)))
    assert spread.summary["ttft_s"]["p90"] < plain.summary["ttft_s"]["p90"]


def test_si_09_flag_shape(load: Path) -> None:
    shaped = command(
        "--trace", load, "--json", "--shape", "first:count=20", "--shape", "repeat:times=3"
    )
    assert shaped.summary["requests"]["total"] == 60
    notes = shaped.document["settings"]["trace_notes"]
    assert len([note for note in notes if note.startswith("Shaped")]) == 2
    is_refused(command("--trace", load, "--shape", "bend:by=3"), "bend", "window:from")


def test_si_09_flag_users(load: Path) -> None:
    ran = command("--trace", load, "--json", "--users", 1, "--frontend-latency", 0)
    assert ran.summary["steps"]["mean_batch"] < 2.1  # n is 1 or 2
    assert "closed loop: 1 requests under way" in ran.document["settings"]["load"]
    is_refused(command("--trace", load, "--users", 0), "--users is 0")


def test_sessions_are_served_in_closed_loop(tmp_path: Path) -> None:
    """LLMServingSim's sub-requests: the second waits for the first and for its tool."""
    rows = [
        {
            "session_id": f"s{i}",
            "arrival_time_ns": i * 10**8,
            "sub_requests": [
                {"input_toks": 100, "output_toks": 10, "tool_duration_ns": 2 * 10**9},
                {"input_toks": 150, "output_toks": 10, "tool_duration_ns": 0},
            ],
        }
        for i in range(5)
    ]
    path = tmp_path / "agents.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    ran = command("--trace", path, "--json", "--slo", "ttft<=1s")
    assert ran.code == 0
    assert ran.summary["requests"]["completed"] == 10
    assert ran.summary["makespan_s"] > 2.4
    assert "5 sessions at their starts" in ran.document["settings"]["load"]
    one = command("--trace", path, "--json", "--users", 1)
    assert one.summary["makespan_s"] > 10
    assert "by 1 users" in command("--trace", path, "--users", 1).out
    is_refused(command("--trace", path, "--shape", "first:count=2"), "--shape", "sessions")


def test_si_09_flag_closed_loop(tmp_path: Path) -> None:
    """Four turns of a chat, 20 s apart, whose prompts hold the answers before them."""
    ids = list(range(1, 100))
    rows = [
        {
            "arrival_s": 20 * turn,
            "session_id": "s",
            "prompt_tokens": 64 + 96 * turn,
            "output_tokens": 65,
            "hash_block_size": 16,
            "hash_ids": ids[: 4 + 6 * turn],
        }
        for turn in range(4)
    ]
    path = write_trace(tmp_path / "chat.jsonl", rows)
    ran = command("--trace", path, "--closed-loop", 10, "--json")
    # 65 tokens at 10 a second leave 13.5 s to think, three times.
    assert 3 * 13.5 < ran.summary["makespan_s"] < 3 * 13.5 + 20
    said = " ".join(command("--trace", path, "--closed-loop", 10).out.split())
    assert "Of 3 answers that a turn follows, 3 stand in its prompt" in said
    # Of 160, 256 and 352 prompt tokens all but the 32 new ones: 64 + 96 turn of prompt, 64 of answer.
    prompts = 64 + 160 + 256 + 352
    assert ran.summary["kv"]["prefix_hit_rate"] == pytest.approx((128 + 224 + 320) / prompts)
    alone = command("--trace", path, "--json")
    assert alone.summary["kv"]["prefix_hit_rate"] == pytest.approx((64 + 160 + 256) / prompts)
    for speed in (0, -1, "inf", "nan"):
        is_refused(command("--trace", path, "--closed-loop", speed), "--closed-loop is", "above 0")
    is_refused(command("--trace", path, "--closed-loop"), "needs the speed")
    shaped = command("--trace", path, "--closed-loop", 9, "--shape", "rate:factor=2,by=stretch")
    is_refused(shaped, "--shape rate:factor=2,by=stretch has no place in a closed loop")
    for flag in ("--warm-start", "--max-tokens", "--deadline"):
        said = command("--trace", path, "--closed-loop", 9, flag, 2)
        is_refused(said, f"{flag} has no effect with --closed-loop")
    # An arrival process says when sessions start, and leaves the time between turns as it was.
    started = command(
        "--trace", path, "--closed-loop", 10, "--arrivals", "constant:rate=1", "--json"
    )
    assert started.summary["makespan_s"] == ran.summary["makespan_s"]
    both = command("--trace", path, "--closed-loop", 9, "--arrivals", "all-at-once", "--users", 2)
    is_refused(both, "--users and --arrivals")
    unknown = write_trace(tmp_path / "t.jsonl", [row(0, 5, 2)])
    is_refused(command("--trace", unknown, "--closed-loop", 9), "no row has a session")


def test_si_09_flag_bands(load: Path) -> None:
    ran, without = (
        command("--trace", load, "--json"),
        command("--trace", load, "--json", "--no-bands"),
    )
    band = ran.summary["band"]
    assert band["scale"][0] < 1 < band["scale"][1]
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        low, high = (band[end][name]["p50"] for end in ("low", "high"))
        assert low < ran.summary[name]["p50"] < high
    assert "band" not in without.summary
    assert {**without.summary, "band": band} == ran.summary
    assert "Band" in command("--trace", load).out
    assert "Band" not in command("--trace", load, "--cost-model", "constant:1ms").out


def test_si_09_every_option_is_a_flag_and_is_in_the_settings(load: Path) -> None:
    options = set(Options.__dataclass_fields__)
    assert options == EFFECTS.keys() | {"calibration"}
    settings = command("--trace", load, "--json").document["settings"]
    not_asked = {"kv_gb", "swap_space"}  # recorded as bytes; nothing where there is no swap
    missing = options - not_asked - settings.keys()
    assert not missing, f"the record does not say what was run for {sorted(missing)}"


def test_si_09_flag_trace(load: Path, tmp_path: Path) -> None:
    other = write_trace(tmp_path / "other.jsonl", [row(0, 10, 3)])
    assert command("--trace", load, "--json").summary["requests"]["total"] == 30
    assert command("--trace", other, "--json").summary["requests"]["total"] == 1


def test_si_09_flag_format(load: Path) -> None:
    is_refused(command("--trace", load, "--format", "mooncake"), "input_length")
    assert command("--trace", load, "--format", "native", "--json").code == 0


def test_si_09_flag_strict(tmp_path: Path) -> None:
    unknown = write_trace(tmp_path / "unknown.jsonl", [row(0, 10, 3), row(0, 10, 3, temprature=1)])
    lenient = command("--trace", unknown)
    assert lenient.code == 0
    assert "temprature" in lenient.out  # said, though it does nothing
    is_refused(command("--trace", unknown, "--strict"), "line 2", "temprature")


def test_si_09_flag_try_change(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "burst.jsonl", [row(0.01 * i, 64, 80) for i in range(40)])
    args = ("--trace", trace, "--max-num-seqs", 2, "--json")
    plain, tried = command(*args), command(*args, "--try-change")
    assert (plain.code, tried.code) == (0, 0)
    assert "change_tried" not in plain.document
    entry = tried.document["change_tried"]["metrics"]["ttft_s.mean"]
    assert entry["a"] == plain.summary["ttft_s"]["mean"]
    assert entry["b"] < entry["a"]
    assert tried.summary == plain.summary


def test_si_09_flag_out(load: Path, tmp_path: Path) -> None:
    ran = command("--trace", load, "--json", "--out", tmp_path / "run")
    assert ran.code == 0
    assert RunRecord.read(tmp_path / "run").summary == ran.summary
    # A path of this machine is no result.
    assert str(tmp_path) not in (tmp_path / "run" / "run.json").read_text()


def test_si_09_flag_no_steps(load: Path, tmp_path: Path) -> None:
    command("--trace", load, "--out", tmp_path / "with")
    command("--trace", load, "--out", tmp_path / "without", "--no-steps")
    assert (tmp_path / "with" / "steps.parquet").is_file()
    assert not (tmp_path / "without" / "steps.parquet").exists()
    is_refused(command("--trace", load, "--no-steps"), "--no-steps", "--out")


def test_si_09_flag_json(load: Path) -> None:
    ran = command("--trace", load, "--json")
    assert json.loads(ran.out).keys() == {"settings", "summary"}
    assert not command("--trace", load).out.startswith("{")


def test_si_09_flag_help() -> None:
    ran = command("--help")
    assert (ran.code, ran.err) == (0, "")
    for action in _run_parser()._actions:
        assert action.help, f"{action.dest} has no help"
        assert all(name in ran.out for name in action.option_strings)


def test_si_09_flag_version() -> None:
    ran = command("--version")
    assert ran.code == 0
    assert ran.out.startswith("kvplan ")


@pytest.mark.parametrize(
    "flags",
    [
        "--max-num-sequences 3",
        "--kv-cache-gb 60",
        "--max-num-s 3",  # the beginning of a flag is not the flag: tomorrow it may be another's
        "surplus",
    ],
)
def test_si_09_unknown_flags_are_refused(flags: str, load: Path) -> None:
    is_refused(command("--trace", load, *flags.split()), flags.split()[0])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--kv-gb 60 --gpu-memory-utilization 0.5", ("--kv-gb", "--gpu-memory-utilization")),
        ("--num-gpu-blocks 99 --gpu-memory-utilization 0.5", ("--gpu-memory-utilization",)),
        ("--kv-gb 60 --num-gpu-blocks 99", ("--kv-gb", "--num-gpu-blocks")),
        ("--swap-space 4", ("--swap-space", "--preemption-mode")),
        ("--warm-start 3 --no-enable-prefix-caching", ("--warm-start",)),
    ],
)
def test_si_09_what_would_have_no_effect_is_refused(
    flags: str, words: tuple[str, ...], load: Path
) -> None:
    is_refused(command("--trace", load, *flags.split()), *words)


# -- SI-11: a trace that does not know its prefixes ---------------------------------------------


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:15:0{i}.0000000,512,20" for i in range(4)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    return path


def test_si_11_equal_lengths_are_not_equal_content(azure: Path) -> None:
    result = simulated(azure)
    assert result.record.requests["cached_tokens"].tolist() == [0, 0, 0, 0]
    assert result.record.summary["kv"]["prefix_hit_rate"] is None
    assert result.record.settings["prefix_identity"] is False
    report = one_line(command("--trace", azure).out)
    assert "prefix hits unknown" in report
    assert "modelled as none" in report
    assert "prefix hits 0" not in report


def test_si_11_a_warm_start_is_asked_for_and_shown(load: Path) -> None:
    cold = command("--trace", load, "--json").document
    assert cold["settings"]["warm_start"] == 0
    assert cold["settings"]["sources"]["warm_start"]["note"] == "the prefix cache starts empty"
    warm = command("--trace", load, "--json", "--warm-start", 30).document
    assert warm["settings"]["warm_start"] == 30
    first = simulated(load, warm_start=30).record.requests["cached_tokens"][0]
    assert first >= 64


def test_si_11_a_warm_start_without_identity_says_that_it_warms_nothing(azure: Path) -> None:
    ran = command("--trace", azure, "--warm-start", 4)
    if ran.code == 2:
        is_refused(ran, "--warm-start")
    else:
        beware = one_line(ran.out.split("Requests\n")[0])
        assert "warm" in beware, "nothing says that there was nothing to warm"


# -- ME-07: what a preempted request finds again is not a prefix hit ----------------------------


def test_me_07_found_again_is_no_hit(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    rows = [row(0, 64, 80, id=name, token_ids=rng.integers(0, 10**9, 64).tolist()) for name in "AB"]
    trace = write_trace(tmp_path / "random.jsonl", rows)
    result = simulated(trace, num_gpu_blocks=11, max_num_batched_tokens=64)
    kv, b = result.record.summary["kv"], row_of(result, "B")
    assert kv["preemptions"] == 1
    assert kv["prefix_hit_rate"] == 0
    assert result.record.requests["cached_tokens"].tolist() == [0, 0]
    # A takes four of the five blocks that B lost, the last ones of B's prompt first.
    assert (b["refound_tokens"], b["recomputed_tokens"]) == (16, 62)
    assert (kv["refound_tokens"], kv["recomputed_tokens"]) == (16, 62)
    report = one_line(
        command(
            *("--trace", trace, "--num-gpu-blocks", 11, "--max-num-batched-tokens", 64),
            *("--cost-model", "constant:10ms"),
        ).out
    )
    assert "prefix hits 0.0% of prompt tokens" in report
    assert "62 tokens computed again, 16 found again in the prefix cache" in report


# -- SC-06 and SC-09(b): the report names the rules it ran by ----------------------------------


def test_sc_06_the_report_says_that_blocks_are_taken_on_demand(tmp_path: Path) -> None:
    rows = [row(0, 100, 50, max_tokens=1000) for _ in range(110)]
    trace = write_trace(tmp_path / "many.jsonl", rows)
    args = ("--trace", trace, "--num-gpu-blocks", 701, "--cost-model", "constant:10ms")
    ran = command(*args)
    # Not reserved for the 1,000 they may take: that would be 10 at once and no preemption.
    steps = simulated(trace, num_gpu_blocks=701).record.steps
    assert steps is not None
    assert steps["running"].max() == 100
    assert steps["preemptions"].sum() > 0
    assert "on demand" in one_line(ran.out)


def three(policy: str, tmp_path: Path) -> tuple[Ran, Any]:
    low = [row(0, 4, 1000, id=f"low-{i}", priority=1) for i in range(2)]
    # Arrives at index 10: seen by step 11, which starts at 100 ms.
    trace = write_trace(tmp_path / "three.jsonl", [*low, row(0.1, 4, 4, id="high", priority=0)])
    flags = ("--max-num-seqs", 2, "--scheduling-policy", policy, "--cost-model", "constant:10ms")
    return (
        command("--trace", trace, *flags),
        simulated(trace, max_num_seqs=2, scheduling_policy=policy),
    )


def test_sc_09_priority_waits_for_a_slot_and_the_report_says_which(tmp_path: Path) -> None:
    report, result = three("priority", tmp_path)
    high = row_of(result, "high")
    assert high["first_token_ns"] == 1001 * 10 * MS
    assert high["first_token_ns"] - high["arrival_ns"] == 991 * 10 * MS
    assert result.record.summary["kv"]["preemptions"] == 0
    assert "urgent requests preempt for blocks but wait while every sequence slot" in one_line(
        report.out
    )


def test_sc_09_preemptive_priority_takes_a_slot_and_the_report_says_which(tmp_path: Path) -> None:
    report, result = three("priority-preemptive", tmp_path)
    assert row_of(result, "high")["first_token_ns"] == 11 * 10 * MS
    preempted = {name: row_of(result, name)["preemptions"] for name in ("low-0", "low-1", "high")}
    assert sorted(preempted.values()) == [0, 0, 1]
    assert preempted["high"] == 0
    assert "urgent requests take the slots and blocks of less urgent ones" in one_line(report.out)
