"""The compiled loop leaves the record that the simple one leaves, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockmanager import BlockManager, TokenContent
from catalog import load_gpu, load_model
from records.recorder import Recorder
from scheduler import Scheduler, SchedulerConfig, load_policy
from simulator.cost import ConstantCost, CostModel, LinearCost, NoCacheCost, PhysicalCost
from simulator.kernel_run import WINDOW_REQUESTS, NotPlainError, simulate_compiled, why_not
from tests.simulation.helpers import Run, arrival, run
from tests.simulation.test_fast_forward import assert_same
from traces.workload import Arrival

pytest.importorskip("numba")


def physical(model: str, gpu: str = "h100-sxm", **options: Any) -> PhysicalCost:
    settings = {"weight_dtype": "bf16", "kv_dtype": "bf16", "tp": 1, "block_size": 16}
    return PhysicalCost(load_model(model), load_gpu(gpu), **(settings | options))


COSTS: dict[str, CostModel] = {
    "constant": ConstantCost(0.01),
    "linear": LinearCost(0.003, 0.0007, 0.0001, 0.00001),
    "dense": physical("llama-3.1-8b"),
    "windows": physical("gemma-2-2b", "l4"),
    "experts": physical("mixtral-8x7b", tp=2, weight_dtype="fp8"),
    "mla": physical("deepseek-v3", "h200", tp=8, kv_dtype="fp8"),
    "eager": physical("llama-3.1-8b", enforce_eager=True, async_scheduling=False),
}


def compiled(
    arrivals: list[Arrival],
    cost: CostModel,
    *,
    num_blocks: int = 10_000,
    block_size: int = 16,
    watermark_blocks: int = 0,
    window_requests: int = WINDOW_REQUESTS,
    async_scheduling: bool = False,
    frontend_ns: int = 0,
    **config: Any,
) -> Run:
    blocks = BlockManager(num_blocks, block_size, watermark_blocks=watermark_blocks)
    scheduler = Scheduler(SchedulerConfig(**config), blocks)
    assert why_not(scheduler, cost, arrivals, None) is None
    recorder = Recorder(num_blocks)
    simulate_compiled(
        scheduler,
        cost,
        recorder,
        iter(arrivals),
        window_requests=window_requests,
        async_scheduling=async_scheduling,
        frontend_ns=frontend_ns,
    )
    return Run(recorder.requests.columns(), recorder.steps.columns(), recorder.gaps, scheduler)


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[Arrival], dict[str, Any]]:
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 300),
                st.one_of(st.integers(1, 60), st.sampled_from([3, 500])),  # some are refused
                st.integers(1, 60),
                st.sampled_from([None, None, 1, 7, 500]),
            ),
            min_size=1,
            max_size=20,
        )
    )
    arrivals = [
        arrival(f"r{index}", time / 100, prompt, output, max_tokens=max_tokens)
        for index, (time, prompt, output, max_tokens) in enumerate(sorted(rows, key=lambda r: r[0]))
    ]
    chunked = draw(st.booleans())
    max_model_len = draw(st.sampled_from([50, 64, 200]))
    return arrivals, {
        "num_blocks": draw(st.integers(5, 70)),
        "block_size": draw(st.sampled_from([1, 3, 4, 16])),
        "watermark_blocks": draw(st.integers(0, 3)),
        "max_num_seqs": draw(st.integers(1, 9)),
        "max_num_batched_tokens": draw(st.sampled_from([4, 16, 64])) if chunked else max_model_len,
        "max_model_len": max_model_len,
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 5])),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
        "frontend_ns": draw(st.sampled_from([0, 0, 1, 3_000_000])),
    }


@settings(max_examples=300, deadline=None)
@given(loads(), st.sampled_from(sorted(COSTS)), st.sampled_from([1, 2, 5, 20, WINDOW_REQUESTS]))
def test_record_is_that_of_the_simple_loop(
    load: tuple[list[Arrival], dict[str, Any]], cost: str, window_requests: int
) -> None:
    """However few arrivals it takes from the stream at once."""
    arrivals, options = load
    fast = compiled(arrivals, COSTS[cost], window_requests=window_requests, **options)
    slow = run(arrivals, COSTS[cost], **options)
    # The compiled loop keeps no blocks of its own: those of the schedulers are not compared.
    assert_same(fast, slow, pools=False)


def test_everybody_refused_leaves_only_their_rows() -> None:
    arrivals = [arrival("a", 0, 100, 5), arrival("b", 1, 200, 5)]
    fast = compiled(arrivals, COSTS["constant"], num_blocks=2)
    assert fast.requests["status"] == ["refused", "refused"]
    assert len(fast.steps["start_ns"]) == 0


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("policy", {"policy": "priority"}),
        ("swap", {"config": {"preemption_mode": "swap"}}),
        ("several outputs", {"request": {"n": 2}}),
        ("deadline", {"request": {"deadline_ns": 10**9}}),
        ("known content", {"request": {"content": TokenContent.of([1, 2, 3])}}),
        ("known content", {"transcript": TokenContent.of(range(8))}),
        ("stopped", {"until_ns": 10**9}),
        ("tables", {"cost": NoCacheCost(physical("llama-3.1-8b"))}),
    ],
)
def test_what_it_cannot_do_is_left_to_the_simple_loop(why: str, changes: dict[str, Any]) -> None:
    policy = load_policy(changes.get("policy", "fcfs"))
    config = SchedulerConfig(**changes.get("config", {}))
    scheduler = Scheduler(config, BlockManager(10, 4, num_swap_blocks=4), policy)
    plain = arrival("a", 0, 5, 3, **changes.get("request", {}))
    arrivals = [plain._replace(transcript=changes.get("transcript"))]
    reason = why_not(
        scheduler, changes.get("cost", COSTS["constant"]), arrivals, changes.get("until_ns")
    )
    assert reason is not None
    assert why in reason


def test_an_arrival_that_it_cannot_do_stops_it_wherever_it_comes() -> None:
    arrivals = [arrival(str(i), i, 5, 3) for i in range(8)] + [arrival("late", 9, 5, 3, n=2)]
    scheduler = Scheduler(SchedulerConfig(), BlockManager(10, 4))
    with pytest.raises(NotPlainError, match="late: a request with several outputs"):
        simulate_compiled(scheduler, COSTS["constant"], Recorder(10), arrivals, window_requests=3)
