"""Planted bottlenecks, one load for each kind: the verdict names them, and what it advises helps.

Loads run on the physical cost model of Llama-3.1-8B on one H100 unless a test says otherwise. Where
the verdict gives flags, they are appended to the command line and the load is run again; where it
asks for replicas, each gets every n-th request.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.policies import FCFS, PoolState
from scheduler.request import Request
from scheduler.sequence import Sequence
from simulator.__main__ import _run_parser, main
from simulator.run import run
from simulator.settings import Options, resolve
from simulator.verdict import Verdict
from simulator.verdict.changes import as_flags
from traces import Arrival, Trace

NS = 1_000_000_000
SLO = "ttft<=500ms,tpot<=50ms"
Rows = list[tuple[float, int, int]]
"""(arrival in seconds, prompt tokens, output tokens) of each request."""


@dataclass(frozen=True)
class Planted:
    """A load, how it ran, and what was said about it."""

    rows: Rows
    options: Options
    verdict: Verdict
    summary: dict[str, Any]

    @property
    def attainment(self) -> float:
        return float(self.summary["goodput"]["attainment"])

    def of(self, metric: str, statistic: str) -> float:
        return float(self.summary[f"{metric}_s"][statistic])

    def changed(self) -> Planted:
        """The same load with the flags that were advised, as the command line takes them."""
        given = {f.name: getattr(self.options, f.name) for f in fields(Options)}
        argv = ["--trace", "t", *as_flags({k: v for k, v in given.items() if v is not None})]
        args = _run_parser().parse_args([*argv, *self.verdict.flags])
        assert self.verdict.flags, f"no flags: {self.verdict.change}"
        return planted(self.rows, Options(**{name: getattr(args, name) for name in given}))

    def shared(self) -> Planted:
        """What one of the replicas sees that were advised."""
        count = self.verdict.replicas
        assert count > 1, f"no replicas: {self.verdict.change}"
        return planted(self.rows[::count], self.options)


def planted(rows: Rows, options: Options) -> Planted:
    arrivals = [
        Arrival(
            Request(id=f"r{index}", arrival_ns=round(time_s * NS), num_prompt_tokens=prompt), output
        )
        for index, (time_s, prompt, output) in enumerate(rows)
    ]
    trace = Trace(Path("planted"), "planted", "0" * 64, len(rows), arrivals, [], [])
    result = run(resolve(options), trace)
    return Planted(rows, options, result.verdict, result.record.summary)


def plant(rows: Rows, **options: Any) -> Planted:
    load = planted(sorted(rows), Options(**options))
    text = json.dumps(load.summary["bottleneck"])
    assert not re.search(r"\b(nan|inf|none)\b", text.replace('"kind": "none"', "")), text
    assert load.verdict.replicas >= 1
    assert all(load.verdict.evidence), load.verdict.evidence
    return load


def poisson(rate: float, count: int, prompt: int, output: int) -> Rows:
    times = np.cumsum(np.random.default_rng(0).exponential(1 / rate, count))
    return [(float(time), prompt, output) for time in times]


def said(load: Planted) -> tuple[str, str]:
    return load.verdict.state, load.verdict.kind


NOTHING = "nothing is needed: the limits are met"


class Closed(FCFS):
    """Lets nobody in while three run."""

    name = "closed"

    def admit(self, sequence: Sequence, state: PoolState) -> bool:
        return state.num_running < 3


# -- one load for each kind ----------------------------------------------------------------------


def test_sequence_limit() -> None:
    load = plant(poisson(20, 300, 200, 100), max_num_seqs=8, slo=SLO)
    assert said(load) == ("overloaded", "sequence limit")
    assert "max_num_seqs = 8" in load.verdict.evidence[0]
    assert load.verdict.flags[0] == "--max-num-seqs"
    better = load.changed()
    assert load.attainment < 0.2
    assert better.attainment > 0.98
    assert better.of("ttft", "p95") < load.of("ttft", "p95") / 20


def test_sequence_limit_without_overload() -> None:
    load = plant(poisson(9, 200, 200, 100), max_num_seqs=8)
    assert said(load) == ("backlogged", "sequence limit")
    assert load.changed().of("ttft", "p95") < load.of("ttft", "p95") / 2


@pytest.mark.parametrize("given", [{"kv_gb": "0.5"}, {"num_gpu_blocks": 257}])
def test_kv_capacity(given: dict[str, Any]) -> None:
    load = plant(poisson(20, 300, 500, 100), slo=SLO, **given)
    assert said(load) == ("overloaded", "KV capacity")
    # The way in which the memory was given is the way in which more is advised.
    (name,) = given
    assert load.verdict.flags[0] == f"--{name.replace('_', '-')}"
    assert len(load.verdict.flags) == 2
    better = load.changed()
    assert load.attainment < 0.2
    assert better.attainment > 0.98
    assert better.of("ttft", "p95") < load.of("ttft", "p95") / 20


def test_token_budget() -> None:
    rows = poisson(12, 300, 800, 10)
    load = plant(rows, max_num_batched_tokens=64, max_num_seqs=64, slo=SLO)
    assert said(load) == ("backlogged", "token budget")
    better = load.changed()
    assert load.attainment < 0.6
    assert better.attainment > 0.98
    assert better.of("ttft", "p95") < load.of("ttft", "p95") / 10


def test_token_budget_that_cuts_a_prompt() -> None:
    rows = poisson(2, 40, 4000, 20)
    load = plant(rows, long_prefill_token_threshold=64, slo="ttft<=300ms,tpot<=200ms")
    assert said(load) == ("stable", "token budget")
    assert load.verdict.flags == ("--long-prefill-token-threshold", "0")
    better = load.changed()
    assert load.attainment < 0.9
    assert better.attainment == 1
    assert better.of("ttft", "p95") < load.of("ttft", "p95") / 2


def test_compute() -> None:
    load = plant(poisson(15, 200, 4000, 3), slo=SLO)
    assert said(load) == ("overloaded", "compute")
    assert "peak FLOP/s" in load.verdict.evidence[-1]
    # Nothing but more machines serves more: arrivals over what is served, with a tenth to spare.
    assert load.verdict.flags == ()
    assert load.verdict.replicas == 2
    each = load.shared()
    assert each.verdict.state != "overloaded"
    assert each.of("ttft", "p95") < load.of("ttft", "p95") / 10


def test_compute_of_a_long_prompt() -> None:
    """Nobody waits for long: the prompt itself is too slow for the limit."""
    load = plant([(3.0 * i, 30_000, 20) for i in range(8)], slo="ttft<=800ms,tpot<=200ms")
    assert said(load) == ("stable", "compute")
    assert load.verdict.flags == ("--tensor-parallel-size", "2")
    better = load.changed()
    assert load.attainment == 0
    assert better.attainment == 1


def test_queue() -> None:
    """Ticks of 3 s, as in traces whose times were rounded: a machine that idles, and a queue."""
    rows = [(3.0 * tick, 4000, 2) for tick in range(8) for _ in range(16)]
    load = plant(rows, slo="ttft<=500ms")
    assert said(load) == ("backlogged", "queue")
    assert load.verdict.flags == ()
    assert load.shared().attainment > 0.98 > 0.5 > load.attainment
    spread = planted([(3 * i / 16, p, o) for i, (_, p, o) in enumerate(rows)], load.options)
    assert spread.of("ttft", "p95") < load.of("ttft", "p95") / 4


LONG_AMONG_SHORT: Rows = [(i * 0.05, 100, 100) for i in range(300)]
LONG_AMONG_SHORT += [(0.5 + i * 0.8, 8000, 5) for i in range(18)]


@pytest.mark.parametrize(
    "given", [{}, {"enable_chunked_prefill": False, "max_model_len": 16_000}], ids=["on", "off"]
)
def test_prefill_interference(given: dict[str, Any]) -> None:
    load = plant(LONG_AMONG_SHORT, slo="ttft<=1s,itl<=100ms", **given)
    assert said(load) == ("stable", "prefill interference")
    assert ("--enable-chunked-prefill" in load.verdict.flags) == bool(given)
    better = load.changed()
    assert load.attainment < 0.2
    assert better.attainment > 0.98
    assert better.of("itl", "p99") < load.of("itl", "p99") / 3


def test_prefill_interference_without_limits() -> None:
    load = plant(LONG_AMONG_SHORT)
    assert said(load) == ("stable", "prefill interference")
    assert load.verdict.change.startswith("nothing has to change (no --slo")
    better = load.changed()
    assert better.of("itl", "p99") < load.of("itl", "p99") / 4
    assert better.of("ttft", "p95") < 2 * load.of("ttft", "p95")


def growing(count: int) -> Rows:
    """Requests that all fit when they are let in, and outgrow the pool together."""
    outputs = np.random.default_rng(1).integers(300, 700, count).tolist()
    return [(0.18 * i, 200, output) for i, output in enumerate(outputs)]


def test_preemption_jitter() -> None:
    load = plant(growing(150), kv_gb="1.42", slo="itl<=50ms")
    assert said(load) == ("stable", "preemption jitter")
    assert load.summary["kv"]["preemptions"] > 0
    better = load.changed()
    assert better.summary["kv"]["preemptions"] == 0
    assert load.attainment < 0.99
    assert better.attainment == 1
    assert better.of("itl", "max") < load.of("itl", "max") / 8


def test_preempted_but_fine() -> None:
    load = plant(growing(150), kv_gb="1.45", slo="ttft<=2s,tpot<=50ms")
    assert load.summary["kv"]["preemptions"] > 0
    assert load.attainment == 1
    assert load.verdict.state == "stable"
    assert (load.verdict.change, load.verdict.flags) == (NOTHING, ())


def test_memory_bandwidth_of_weights() -> None:
    load = plant(poisson(3, 60, 500, 100), slo="ttft<=1s,tpot<=6ms")
    assert said(load) == ("stable", "memory bandwidth")
    better = load.changed()
    assert load.attainment == 0
    assert better.attainment == 1
    assert better.of("tpot", "p50") < 0.75 * load.of("tpot", "p50")


def test_memory_bandwidth_at_the_sequence_limit() -> None:
    """The head waits for a slot, and yet more slots would not help: the KV of those there fills the
    bandwidth already."""
    load = plant([(i / 3, 6000, 1000) for i in range(120)], max_num_seqs=48, slo="ttft<=5s")
    assert said(load) == ("overloaded", "memory bandwidth")
    assert "max_num_seqs" in load.verdict.evidence[0]
    assert load.verdict.flags == ()
    wider = planted(load.rows, replace(load.options, max_num_seqs=96))
    served = "requests_per_s"
    gain = wider.summary["throughput"][served] / load.summary["throughput"][served]
    assert gain < 1.15
    each = load.shared()
    assert load.attainment < 0.5
    assert each.attainment == 1


def test_sequence_limit_and_kv_capacity_together() -> None:
    """Neither helps without the other: both are named."""
    load = plant(poisson(20, 300, 500, 100), max_num_seqs=6, kv_gb="0.5", slo=SLO)
    assert said(load) == ("overloaded", "sequence limit")
    assert set(load.verdict.flags[::2]) == {"--max-num-seqs", "--kv-gb"}
    assert load.attainment < 0.2
    assert load.changed().attainment > 0.98


def test_limits_that_no_queue_is_to_blame_for() -> None:
    """One sequence, or one prompt, alone takes longer than the limit."""
    load = plant(poisson(12, 100, 500, 100), gpu="l4", slo="ttft<=2s,tpot<=40ms")
    assert said(load) == ("overloaded", "memory bandwidth")
    assert load.verdict.replicas > 1  # what is arriving asks for them all the same
    better = load.changed()
    assert better.of("tpot", "p50") < 0.75 * load.of("tpot", "p50")
    prompts = plant([(i / 4, 8000, 2) for i in range(60)], slo="ttft<=100ms")
    assert prompts.verdict.kind == "compute"
    assert prompts.changed().of("ttft", "p50") < 0.75 * prompts.of("ttft", "p50")


def test_a_larger_budget_does_not_break_the_limit_on_tokens() -> None:
    load = plant(
        poisson(40, 300, 500, 30), max_num_batched_tokens=128, slo="ttft<=300ms,tpot<=12ms"
    )
    assert said(load) == ("overloaded", "token budget")
    better = load.changed()
    assert load.attainment < 0.5
    assert better.attainment > 0.98


def test_a_queue_that_never_recovers_is_an_overload() -> None:
    """It grows for most of the time and is as long at the end, whatever the last quarter did."""
    rows = poisson(16, 600, 200, 100)
    rows += [(rows[-1][0] + time_s, p, o) for time_s, p, o in poisson(11, 200, 200, 100)]
    load = plant(rows, max_num_seqs=8)
    assert said(load) == ("overloaded", "sequence limit")


def test_kv_capacity_beyond_the_gpu() -> None:
    """The load asks for more than the GPU has; what is advised fits, and says what is missing."""
    rows: Rows = [(i / 1.5, 3000, 200) for i in range(80)]
    load = plant(rows, gpu="l4", kv_gb="1.5", slo="ttft<=5s,tpot<=150ms")
    assert said(load) == ("overloaded", "KV capacity")
    flags = dict(zip(load.verdict.flags[::2], load.verdict.flags[1::2], strict=True))
    assert flags["--kv-cache-dtype"] == "fp8"
    # 21.7 GiB x 0.9, less weights, activations of 2,048 tokens (vLLM's default there) and reserve.
    room = "l4 has at most about 3.99 GiB"
    assert any(room in evidence for evidence in load.verdict.evidence)
    assert float(flags["--kv-gb"]) <= 3.99
    assert load.verdict.replicas > 1
    better = load.changed()
    served = "output_tokens_per_s"
    assert better.summary["throughput"][served] > 2 * load.summary["throughput"][served]
    # ... and the replicas beside it do the rest.
    each = planted(rows[:: load.verdict.replicas], better.options)
    assert each.attainment > 0.98


def test_admission_policy() -> None:
    policy = f"{__name__}:Closed"
    load = plant(poisson(9, 60, 200, 100), scheduling_policy=policy)
    assert load.verdict.kind == "admission policy"
    assert load.verdict.flags == ()


# -- nothing to change, or nothing to say --------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "given"),
    [
        (poisson(3, 60, 500, 100), {}),
        (poisson(9, 200, 200, 100), {"max_num_seqs": 8}),
        (poisson(3, 60, 500, 100), {"slo": "ttft:p99<=1s,itl:p99<=50ms"}),
        ([(0.0, 100, 20)], {}),
    ],
    ids=["light", "a few waited", "limits on statistics", "one request"],
)
def test_limits_that_are_met_need_no_change(rows: Rows, given: dict[str, Any]) -> None:
    load = plant(rows, **{"slo": SLO} | given)
    assert (load.verdict.change, load.verdict.flags) == (NOTHING, ())
    assert load.verdict.replicas == 1


def test_a_statistic_that_does_not_hold_is_a_limit_that_is_not_met() -> None:
    load = plant(LONG_AMONG_SHORT, slo="itl:p99<=50ms")
    assert said(load) == ("stable", "prefill interference")
    assert "itl:p99<=50ms does not hold" in load.verdict.summary
    assert load.of("itl", "p99") > 0.05 > load.changed().of("itl", "p99")


def test_one_request_of_one_token() -> None:
    load = plant([(3.5, 100, 1)])
    assert load.verdict.state == "stable"


def test_everything_at_once_is_a_backlog_not_an_overload() -> None:
    load = plant([(0.0, 1000, 50)] * 200, slo=SLO)
    assert said(load) == ("backlogged", "queue")
    assert "all 200 requests came within one step" in load.verdict.evidence
    assert load.shared().attainment > 0.98


def test_everything_at_once_behind_a_sequence_limit() -> None:
    load = plant([(0.0, 1000, 50)] * 200, max_num_seqs=8)
    assert said(load) == ("backlogged", "sequence limit")
    better = load.changed()
    assert better.summary["makespan_s"] < load.summary["makespan_s"] / 2


def test_everything_refused_for_want_of_blocks() -> None:
    load = plant([(float(i), 3000, 50) for i in range(20)], num_gpu_blocks=101, slo=SLO)
    assert said(load) == ("nothing ran", "KV capacity")
    assert "need 188 blocks, the pool has 100" in load.verdict.evidence[0]
    assert load.changed().attainment == 1


def test_everything_refused_by_max_model_len() -> None:
    load = plant([(float(i), 3000, 50) for i in range(20)], max_model_len=2000)
    assert said(load) == ("nothing ran", "refusals")
    assert load.changed().summary["requests"]["completed"] == 20


def test_refused_beyond_the_gpu() -> None:
    load = plant([(0.0, 100_000, 1)], gpu="l4", kv_gb="1")
    assert said(load) == ("nothing ran", "KV capacity")
    assert load.verdict.flags == ()
    assert "more than l4 has left" in load.verdict.change


def test_some_refused_is_no_matter_of_speed() -> None:
    rows: Rows = [(float(i), 3000, 50) for i in range(20)]
    rows += [(i + 0.5, 100, 50) for i in range(20)]
    load = plant(rows, num_gpu_blocks=101, slo=SLO)
    assert said(load) == ("stable", "KV capacity")
    assert "20 were refused" in load.verdict.summary
    assert load.attainment == 0.5
    assert load.changed().attainment == 1


def test_a_stopped_run_is_judged_by_what_arrived() -> None:
    load = plant(poisson(3, 60, 500, 100), slo=SLO, until=6.0)
    assert load.verdict.state == "stable"
    assert load.verdict.change == NOTHING
    assert "48 had not arrived by then" in load.verdict.summary
    full = plant(poisson(15, 200, 4000, 3), slo=SLO, until=6.0)
    assert said(full) == ("overloaded", "compute")
    assert full.verdict.replicas == 2


def test_clients_that_give_up_hide_no_overload() -> None:
    load = plant(poisson(19, 300, 4000, 3), slo=SLO, deadline=1.0)
    assert said(load) == ("overloaded", "compute")
    assert "gave up waiting" in load.verdict.summary
    assert load.verdict.replicas == 2
    assert load.shared().summary["requests"]["timed_out"] == 0


# -- cost models that know no FLOPs --------------------------------------------------------------

LINEAR = "linear:base=5ms,per_token=30us,per_seq=50us"
PER_SEQUENCE = "linear:base=1ms,per_token=1us,per_seq=1ms"


def test_constant_steps_have_room_for_everything() -> None:
    budget = plant(
        poisson(12, 200, 800, 10), max_num_batched_tokens=256, cost_model="constant:20ms"
    )
    assert said(budget) == ("backlogged", "token budget")
    assert budget.changed().of("ttft", "p95") < budget.of("ttft", "p95") / 2
    slots = plant(poisson(12, 200, 100, 60), max_num_seqs=8, cost_model="constant:20ms", slo=SLO)
    assert said(slots) == ("overloaded", "sequence limit")
    assert slots.changed().attainment == 1


def test_time_that_goes_with_the_tokens_is_compute() -> None:
    load = plant(poisson(12, 200, 4000, 10), cost_model=LINEAR)
    assert said(load) == ("overloaded", "compute")
    assert load.shared().verdict.state != "overloaded"


def test_time_that_goes_with_the_sequences_needs_no_more_of_them() -> None:
    load = plant(poisson(30, 300, 100, 100), max_num_seqs=64, cost_model=PER_SEQUENCE, slo=SLO)
    assert load.verdict.state == "overloaded"
    assert load.verdict.kind != "sequence limit"
    assert load.verdict.flags == ()
    assert load.shared().attainment > 0.98


def test_no_cache() -> None:
    load = plant(poisson(2, 30, 500, 60), cost_model="no-cache", slo="tpot<=10ms")
    assert load.verdict.kind == "compute"
    assert load.verdict.flags == ("--cost-model", "physical")
    assert load.changed().attainment == 1


@pytest.mark.parametrize("cost_model", [LINEAR, "constant:60ms", PER_SEQUENCE])
@pytest.mark.parametrize("slo", [None, "tpot<=1ms", "ttft<=1ms", SLO])
def test_nothing_is_claimed_of_unknown_peaks(cost_model: str, slo: str | None) -> None:
    load = plant(poisson(6, 60, 100, 100), cost_model=cost_model, slo=slo)
    text = " ".join([load.verdict.summary, *load.verdict.evidence, load.verdict.change])
    assert "% of the peak" not in text
    assert "--weight-dtype" not in load.verdict.flags  # the price would not change


# -- any load ------------------------------------------------------------------------------------

rows_of_any_load = st.lists(
    st.tuples(st.floats(0, 3, allow_nan=False, width=32), st.integers(1, 3000), st.integers(1, 40)),
    min_size=1,
    max_size=25,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=rows_of_any_load,
    blocks=st.integers(8, 300),
    max_num_seqs=st.integers(1, 8),
    budget=st.sampled_from([16, 64, 512, 8192]),
    cost_model=st.sampled_from(["physical", "constant:20ms", LINEAR]),
    slo=st.sampled_from([None, SLO, "ttft<=20ms,itl<=10ms", "e2e<=200ms", "queue:mean<=1ms"]),
    until=st.sampled_from([None, 1.0]),
    deadline=st.sampled_from([None, 0.1]),
)
def test_a_verdict_on_anything(
    rows: Rows,
    blocks: int,
    max_num_seqs: int,
    budget: int,
    cost_model: str,
    slo: str | None,
    until: float | None,
    deadline: float | None,
) -> None:
    load = plant(
        rows,
        num_gpu_blocks=blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        cost_model=cost_model,
        slo=slo,
        until=until,
        deadline=deadline,
    )
    verdict = load.verdict
    assert verdict.summary
    assert verdict.change
    if verdict.flags:
        load.changed()  # it can be run like that
        assert "--kv-gb" not in verdict.flags  # the memory was given as blocks


def test_try_change_runs_what_was_advised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [
        json.dumps({"arrival_s": time, "prompt_tokens": prompt, "output_tokens": output})
        for time, prompt, output in poisson(20, 150, 200, 100)
    ]
    trace.write_text("\n".join(lines) + "\n")
    argv = ["--trace", str(trace), "--max-num-seqs", "8", "--slo", SLO, "--try-change", "--json"]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    bottleneck = document["summary"]["bottleneck"]
    assert (bottleneck["state"], bottleneck["kind"]) == ("overloaded", "sequence limit")
    assert document["change_tried"]["metrics"]["goodput.attainment"]["b"] > 0.98


@pytest.mark.parametrize("slice_rows", [1, 7, 100])
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (poisson(30, 300, 2000, 300), {"max_num_seqs": 4}),
        (poisson(8, 300, 2000, 300), {"num_gpu_blocks": 1500}),
        (poisson(8, 300, 6000, 50), {"max_num_batched_tokens": 1024}),
        (poisson(2, 60, 500, 200), {}),
    ],
)
def test_looking_at_steps_in_slices_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, rows: Rows, options: dict[str, Any], slice_rows: int
) -> None:
    whole = planted(rows, Options(**options, slo=SLO))
    monkeypatch.setattr("records.steps.SLICE_ROWS", slice_rows)
    sliced = planted(rows, Options(**options, slo=SLO))
    assert sliced.verdict == whole.verdict
    assert sliced.summary == whole.summary
