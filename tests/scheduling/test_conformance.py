"""The same decisions as vLLM's V1 scheduler, step by step.

The first half compares with the decision logs of the real scheduler, where the data folder is at
hand. The second half needs no data: small scenarios whose logs were derived by hand, one rule each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler.replay import Scenario, load_scenario, parse_scenario, replay

GOLDEN = (
    "01_fcfs_ample",
    "02a_tight_preempt_nocache",
    "02b_tight_preempt_cache",
    "03_chunked_small_budget",
    "04_chunked_off",
    "05a_prefix_shared",
    "05b_prefix_eviction_lru",
    "06_priority_preempt",
    "07_long_prefill_threshold",
    "08_max_num_seqs",
    "09_block1",
    "09_block128",
    "09_block16",
    "09_block32",
    "10_prompt_over_budget",
    "12c_mixed300_block32",
    "13_watermark",
    "14a_reserve_on",
    "16_timed_poisson",
    "18_priority_refund",
)
IMPOSSIBLE = ("11a_prompt_over_cache", "11b_growth_over_cache", "11c_prompt_over_cache_noreserve")
USAGE_TOLERANCE = 1e-6
OURS = {"refuse"}
"""Log keys that the real scheduler does not write."""

Log = list[dict[str, Any]]


def golden_log(path: Path) -> Log:
    """The steps and the ending; the header is left out."""
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ: (ours, theirs); keys of either side count."""
    different = {}
    for key in (ours.keys() | theirs.keys()) - OURS:
        a, b = ours.get(key), theirs.get(key)
        if key == "usage" and a is not None and b is not None and abs(a - b) <= USAGE_TOLERANCE:
            continue
        if a != b:
            different[key] = (a, b)
    return different


def optional_keys(scenario: Scenario) -> set[str]:
    """Log keys that a scenario must ask for."""
    keys = set()
    if not scenario.dump_free_queue:
        keys |= {"free_queue", "free_queue_end"}
    if not scenario.dump_queues:
        keys |= {"q_run", "q_wait"}
    return keys


@pytest.mark.parametrize("name", GOLDEN)
def test_decides_as_vllm(shared: Path, name: str) -> None:
    folder = shared / "oracle" / "golden"
    scenario = load_scenario(folder / f"{name}.json")
    theirs = golden_log(folder / f"{name}.jsonl")
    ours = list(replay(scenario))
    for a, b in zip(ours, theirs, strict=False):
        assert not differences(a, b), f"{name}, step {b.get('step', 'end')}"
    assert len(ours) == len(theirs)
    assert not optional_keys(scenario) & {key for entry in theirs for key in entry}


def test_no_golden_scenario_is_left_out(shared: Path) -> None:
    there = {path.stem for path in (shared / "oracle" / "golden").glob("*.json")}
    assert there == {*GOLDEN, *IMPOSSIBLE}


@pytest.mark.parametrize(
    ("name", "refused", "numbers"),
    [
        # 400 prompt tokens and 4 outputs write 403 slots; 16 a block.
        ("11a_prompt_over_cache", "r1", (26, 10)),
        # 60 prompt tokens and 40 outputs write 99 slots.
        ("11b_growth_over_cache", "r0", (7, 5)),
        ("11c_prompt_over_cache_noreserve", "r1", (26, 10)),
    ],
)
def test_impossible_request_is_refused_and_the_rest_served(
    shared: Path, name: str, refused: str, numbers: tuple[int, int]
) -> None:
    path = shared / "oracle" / "golden" / f"{name}.json"
    *steps, end = replay(load_scenario(path))
    refusals = {seq_id: why for step in steps for seq_id, why in step.get("refuse", {}).items()}
    assert list(refusals) == [refused]
    need, have = numbers
    assert f"need {need} blocks, the pool has {have}" in refusals[refused]
    assert end["end"] == "drained"
    assert end["unfinished"] == []
    assert end["free_end"] == have
    rows = json.loads(path.read_text())["requests"]
    sampled = [seq_id for step in steps for seq_id in step.get("sample", ())]
    for row in rows:
        want = 0 if row["id"] == refused else row["output_len"]
        assert sampled.count(row["id"]) == want
    finished = [seq_id for step in steps for seq_id in step.get("finish", ())]
    assert sorted(finished) == sorted(row["id"] for row in rows if row["id"] != refused)


# -- without the data folder -----------------------------------------------------------------


def run(config: dict[str, Any], *requests: dict[str, Any]) -> Log:
    return list(replay(parse_scenario({"config": config, "requests": list(requests)})))


def row(request_id: str, prompt: list[int], output_len: int, **more: Any) -> dict[str, Any]:
    return {"id": request_id, "arrival_step": 0, "prompt": prompt, "output_len": output_len, **more}


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def assert_log(log: Log, expected: Log) -> None:
    for step, (ours, want) in enumerate(zip(log, expected, strict=False)):
        assert not differences(ours, want), f"entry {step}"
    assert len(log) == len(expected)


def test_by_hand_prefill_in_chunks_while_another_decodes() -> None:
    # Budget 6: a's prompt of 4 goes first, 2 tokens are left for b's 9; then 1 decode and 5 tokens.
    log = run(
        {"num_gpu_blocks": 11, "block_size": 4, "max_num_batched_tokens": 6},
        row("a", numbers(100, 4), 3),
        row("b", numbers(200, 9), 1),
    )
    assert_log(
        log,
        [
            {
                "step": 0,
                "arrive": ["a", "b"],
                "sched": [["a", 4, 0], ["b", 2, 0]],
                "new": ["a", "b"],
                "blocks": {"a": [1], "b": [2]},
                "free": 8,
                "usage": 0.2,
                "sample": ["a"],
                "free_end": 8,
                "nrun": 2,
                "nwait": 0,
            },
            {
                "step": 1,
                "sched": [["a", 1, 4], ["b", 5, 2]],
                "running": ["a", "b"],
                "blocks": {"a": [3], "b": [4]},
                "free": 6,
                "usage": 0.4,
                "sample": ["a"],
                "free_end": 6,
                "nrun": 2,
                "nwait": 0,
            },
            {
                # 7 computed of b, 2 missing: its third block. Both end: a wrote 6 slots (blocks 1
                # cached, 3 not), b 9 slots (2, 4 cached, 5 not).
                "step": 2,
                "sched": [["a", 1, 5], ["b", 2, 7]],
                "running": ["a", "b"],
                "blocks": {"b": [5]},
                "free": 5,
                "usage": 0.5,
                "sample": ["a", "b"],
                "finish": ["a", "b"],
                "free_end": 10,
                "nrun": 0,
                "nwait": 0,
            },
            {"end": "drained", "steps": 3, "unfinished": [], "free_end": 10},
        ],
    )


def test_by_hand_free_queue_and_eviction_order() -> None:
    # Blocks with content go to the tail, last block first; blocks without go to the head.
    config = {"num_gpu_blocks": 6, "block_size": 2, "dump_free_queue": True}
    log = run(
        config,
        row("a", numbers(100, 5), 1),  # blocks 1, 2 full, 3 half
        row("b", numbers(200, 7), 1, arrival_step=1),  # takes 3, 4, 5 and evicts 2
        row("c", numbers(100, 5), 1, arrival_step=2),  # finds block 1 only
    )
    assert_log(
        log,
        [
            {
                "step": 0,
                "arrive": ["a"],
                "sched": [["a", 5, 0]],
                "new": ["a"],
                "blocks": {"a": [1, 2, 3]},
                "free": 2,
                "usage": 0.6,
                "free_queue": [4, 5],
                "sample": ["a"],
                "finish": ["a"],
                "free_end": 5,
                "free_queue_end": [3, 4, 5, 2, 1],
                "nrun": 0,
                "nwait": 0,
            },
            {
                "step": 1,
                "arrive": ["b"],
                "sched": [["b", 7, 0]],
                "new": ["b"],
                "blocks": {"b": [3, 4, 5, 2]},
                "evict": [2],
                "free": 1,
                "usage": 0.8,
                "free_queue": [1],
                "sample": ["b"],
                "finish": ["b"],
                "free_end": 5,
                # b: 3, 4, 5 are full and cached, 2 is half full and not.
                "free_queue_end": [2, 1, 5, 4, 3],
                "nrun": 0,
                "nwait": 0,
            },
            {
                "step": 2,
                "arrive": ["c"],
                "sched": [["c", 3, 2]],
                "new": ["c"],
                "hit": {"c": 2},
                "hit_blocks": {"c": [1]},
                "blocks": {"c": [2, 5]},
                "evict": [5],
                "free": 2,
                "usage": 0.6,
                "free_queue": [4, 3],
                "sample": ["c"],
                "finish": ["c"],
                "free_end": 5,
                # c: 1 and 2 are cached, 5 is not; walked backwards.
                "free_queue_end": [5, 4, 3, 2, 1],
                "nrun": 0,
                "nwait": 0,
            },
            {"end": "drained", "steps": 3, "unfinished": [], "free_end": 5},
        ],
    )


def test_by_hand_preemption_and_resumption() -> None:
    # 4 blocks of 2. a writes 2 + 4 - 1 = 5 slots (3 blocks), b 3 + 3 - 1 = 5 slots (3 blocks).
    config = {
        "num_gpu_blocks": 5,
        "block_size": 2,
        "enable_prefix_caching": False,
        "dump_queues": True,
    }
    log = run(config, row("a", [1, 2], 4), row("b", [3, 4, 5], 3))
    brief = [{k: v for k, v in entry.items() if k != "usage"} for entry in log]
    assert brief == [
        {
            "step": 0,
            "arrive": ["a", "b"],
            "sched": [["a", 2, 0], ["b", 3, 0]],
            "new": ["a", "b"],
            "blocks": {"a": [1], "b": [2, 3]},
            "free": 1,
            "sample": ["a", "b"],
            "free_end": 1,
            "nrun": 2,
            "nwait": 0,
            "q_run": ["a", "b"],
        },
        {  # b's fourth slot is in its second block
            "step": 1,
            "sched": [["a", 1, 2], ["b", 1, 3]],
            "running": ["a", "b"],
            "blocks": {"a": [4]},
            "free": 0,
            "sample": ["a", "b"],
            "free_end": 0,
            "nrun": 2,
            "nwait": 0,
            "q_run": ["a", "b"],
        },
        {  # b needs a block for its fifth slot, is the last, and goes itself
            "step": 2,
            "sched": [["a", 1, 3]],
            "running": ["a"],
            "preempt": ["b"],
            "free": 2,
            "sample": ["a"],
            "free_end": 2,
            "nrun": 1,
            "nwait": 1,
            "q_run": ["a"],
            "q_wait": ["b"],
        },
        {  # a takes block 3 (freed last block first, as one run: 3, 2); b needs 3, one is free
            "step": 3,
            "sched": [["a", 1, 4]],
            "running": ["a"],
            "blocks": {"a": [3]},
            "free": 1,
            "sample": ["a"],
            "finish": ["a"],
            "free_end": 4,
            "nrun": 0,
            "nwait": 1,
            "q_wait": ["b"],
        },
        {  # prompt and two outputs once more, and the third output
            "step": 4,
            "sched": [["b", 5, 0]],
            "resumed": ["b"],
            "blocks": {"b": [3, 4, 1]},
            "free": 1,
            "sample": ["b"],
            "finish": ["b"],
            "free_end": 4,
            "nrun": 0,
            "nwait": 0,
        },
        {"end": "drained", "steps": 5, "unfinished": [], "free_end": 4},
    ]


def test_by_hand_priority_victim_is_the_requester_and_the_loop_ends() -> None:
    config = {
        "num_gpu_blocks": 5,
        "block_size": 2,
        "max_num_batched_tokens": 4,
        "policy": "priority",
        "enable_prefix_caching": False,
    }
    log = run(
        config,
        row("a", [1, 2, 3], 4, priority=1),
        row("b", [4, 5, 6, 7], 3, arrival_step=1, priority=0),
    )
    assert [entry.get("sched") for entry in log[:-1]] == [
        [["a", 3, 0]],
        [["a", 1, 3], ["b", 3, 0]],  # budget 4
        [],  # a needs a block, is the least urgent and goes; nobody else has a turn
        [["b", 1, 3]],
        [["b", 1, 4]],
        [["b", 1, 5]],
        [["a", 4, 0]],  # 5 tokens, budget 4
        [["a", 1, 4]],
        [["a", 1, 5]],
    ]
    assert [entry["preempt"] for entry in log if "preempt" in entry] == [["a"]]
    assert log[-1] == {"end": "drained", "steps": 9, "unfinished": [], "free_end": 4}


def test_by_hand_priority_victim_gives_its_grant_back() -> None:
    config = {"num_gpu_blocks": 5, "block_size": 2, "policy": "priority", "dump_free_queue": True}
    log = run(
        config,
        row("a", [1, 2], 5, priority=1),
        row("b", [4, 5, 6, 7], 2, arrival_step=1, priority=0),
    )
    assert_log(
        log[2:3],
        [
            {  # a held 1, 2 and had been granted its fourth slot; b takes 2, which that slot had filled
                "step": 2,
                "sched": [["b", 1, 4]],
                "running": ["b"],
                "preempt": ["a"],
                "blocks": {"b": [2]},
                "free": 1,
                "usage": 0.75,
                "free_queue": [1],
                "sample": ["b"],
                "finish": ["b"],
                "free_end": 4,
                "free_queue_end": [2, 1, 4, 3],
                "nrun": 0,
                "nwait": 1,
            }
        ],
    )
    # Block 2 was registered for a's dropped token, and must be forgotten: a finds block 1 alone.
    assert log[3]["sched"] == [["a", 2, 2]]
    assert log[3]["hit_blocks"] == {"a": [1]}


def test_by_hand_hit_within_the_step_that_computes_it() -> None:
    # Registered when scheduled: b, admitted after a in the same step, shares a's two full blocks,
    # but computes its last block itself although a has that one too.
    prompt = numbers(50, 6)
    log = run({"num_gpu_blocks": 9, "block_size": 2}, row("a", prompt, 1), row("b", prompt, 1))
    assert log[0]["sched"] == [["a", 6, 0], ["b", 2, 4]]
    assert log[0]["hit_blocks"] == {"b": [1, 2]}
    assert log[0]["blocks"] == {"a": [1, 2, 3], "b": [4]}
    assert log[0]["free"] == 4


def test_by_hand_threshold_is_off_for_the_only_request() -> None:
    config = {"num_gpu_blocks": 21, "block_size": 2, "long_prefill_token_threshold": 3}
    alone = run(config, row("a", numbers(1, 10), 1))
    assert alone[0]["sched"] == [["a", 10, 0]]
    both = run(config, row("a", numbers(1, 10), 1), row("b", numbers(30, 4), 1))
    assert [entry["sched"] for entry in both[:-1]] == [
        [["a", 3, 0], ["b", 3, 0]],
        [["a", 3, 3], ["b", 1, 3]],
        [["a", 4, 6]],  # b has gone
    ]


def test_by_hand_chunked_prefill_off_waits_for_a_whole_budget() -> None:
    config = {
        "num_gpu_blocks": 21,
        "block_size": 2,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 8,
        "max_model_len": 8,
    }
    log = run(config, row("a", numbers(1, 5), 2), row("b", numbers(30, 4), 1), row("c", [9], 1))
    # b's 4 do not fit beside a's 5: the scan ends, and c, which would fit, waits behind it.
    assert [entry["sched"] for entry in log[:-1]] == [
        [["a", 5, 0]],
        [["a", 1, 5], ["b", 4, 0], ["c", 1, 0]],
    ]


def test_by_hand_watermark_counts_only_while_something_runs() -> None:
    # int(0.3 x 11) = 3 blocks. a takes 8 of 10 though that leaves 2; b waits until a has gone.
    config = {"num_gpu_blocks": 11, "block_size": 2, "watermark": 0.3}
    log = run(config, row("a", numbers(1, 16), 2), row("b", [90, 91], 1))
    assert [entry["sched"] for entry in log[:-1]] == [[["a", 16, 0]], [["a", 1, 16]], [["b", 2, 0]]]


def test_by_hand_full_sequence_gate() -> None:
    # Budget 4, 5 blocks of 2. b's prompt of 6 needs 3 blocks, its first chunk needs 1.
    prompts = (row("a", numbers(1, 3), 4), row("b", numbers(30, 6), 1))
    config = {"num_gpu_blocks": 6, "block_size": 2, "max_num_batched_tokens": 4}
    gated = run({**config, "num_gpu_blocks": 5}, *prompts)
    assert [entry["sched"] for entry in gated[:-1]] == [
        [["a", 3, 0]],  # 2 of 4 blocks are left for b's 3
        [["a", 1, 3]],
        [["a", 1, 4]],
        [["a", 1, 5]],
        [["b", 4, 0]],
        [["b", 2, 4]],
    ]
    free = run({**config, "num_gpu_blocks": 5, "scheduler_reserve_full_isl": False}, *prompts)
    assert free[0]["sched"] == [["a", 3, 0], ["b", 1, 0]]
