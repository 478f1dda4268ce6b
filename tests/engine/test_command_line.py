"""``python -m gpu_backend``: each command on the real model or on random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpu_backend.__main__ import main
from gpu_backend.replay import PromptMaker
from records.metrics import identity_errors
from records.profile import ProfileError, StepProfile
from records.run import RunRecord
from scheduler.request import Request
from tests.simulation.command import Ran, command, is_refused, row, write_trace
from traces.workload import Arrival

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Flags of an engine of random weights that is there at once."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    return ["--model", str(config), "--load-format", "dummy", "--dtype", "fp32",
            "--device", "cpu", "--num-gpu-blocks", "41", "--block-size", "4"]  # fmt: skip


def ran(*arguments: object) -> Ran:
    return command(*arguments, main=main)


def test_generate_prints_sensible_text(smollm2_path: Path) -> None:
    done = ran("generate", "--kv-gb", "0.25", "--max-tokens", 4, "The capital of France is")
    assert done.code == 0
    assert done.out.startswith("The capital of France is Paris.")
    assert "blocks" in done.err
    assert "max_num_seqs 256" in done.err


def test_generate_as_json(smollm2_path: Path) -> None:
    done = ran(
        "generate", "--kv-gb", "0.25", "--chat", "--max-tokens", 3, "--n", 2, "--temperature", 1,
        "--logprobs", 1, "--seed", 3, "--json", "Hello", "Name a colour",
    )  # fmt: skip
    document: Any = json.loads(done.out)
    assert [len(result["outputs"]) for result in document] == [2, 2]
    assert all(len(o["token_ids"]) == len(o["logprobs"]) for r in document for o in r["outputs"])


def test_replay_leaves_a_sound_record(tmp_path: Path, tiny: list[str]) -> None:
    known = {"hash_ids": [7, 8], "hash_block_size": 8}
    trace = write_trace(
        tmp_path / "t.jsonl",
        [
            row(0, 16, 5, id="a", **known),
            row(0, 16, 3, id="b", **known),
            row(0.01, 30, 8, id="c", n=2),
            row(0.02, 300, 5, id="too long"),
            row(0.03, 20, 200, id="late", deadline_s=1e-6),
            row(9000, 8, 2, id="after a night"),
        ],
    )
    done = ran("replay", "--trace", trace, "--pace", "busy", "--out", tmp_path / "run",
               "--slo", "ttft<=10s,ttft:p50<=20s", *tiny)  # fmt: skip
    assert done.code == 0, done.err
    assert "4 of 6 requests completed" in done.out
    record = RunRecord.read(tmp_path / "run")
    assert not identity_errors(record.requests, record.gaps)
    rows = dict(zip(record.requests["id"], record.requests["status"], strict=True))
    assert rows["too long"] == "refused"
    assert rows["late"] == "timed_out"
    outputs = dict(zip(record.requests["id"], record.requests["output_tokens"], strict=True))
    assert (outputs["a"], outputs["b"], outputs["c"], outputs["after a night"]) == (5, 3, 16, 2)
    assert record.summary["kv"]["prefix_hit_rate"] is not None
    assert record.settings["device"].endswith("threads")
    assert record.settings["trace_rows"] == 6


def test_replay_of_users_and_of_sessions(tmp_path: Path, tiny: list[str]) -> None:
    """Turns wait for answers on the engine as in the simulator."""
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 4}) + "\n"
            for _ in range(6)
        )
    )
    alone = ran("replay", "--trace", trace, "--pace", "busy", "--users", 1, "--json", *tiny)
    summary = json.loads(alone.out)["summary"]
    assert summary["requests"]["completed"] == 6
    assert summary["steps"]["mean_batch"] == 1
    turns = [
        {"input_toks": 9 + 5 * i, "output_toks": 3, "tool_duration_ns": 10**9} for i in range(3)
    ]
    sessions = tmp_path / "s.jsonl"
    sessions.write_text(
        "".join(
            json.dumps({"session_id": name, "arrival_time_ns": 0, "sub_requests": turns}) + "\n"
            for name in "ab"
        )
    )
    done = ran("replay", "--trace", sessions, "--pace", "busy", "--json", *tiny)
    summary = json.loads(done.out)["summary"]
    assert summary["requests"]["completed"] == 6
    assert summary["makespan_s"] > 2  # two tools of a second each


def test_replay_in_closed_loop_hits_what_the_simulator_hits(
    tmp_path: Path, tiny: list[str]
) -> None:
    """Three turns, whose prompts hold the answers before them."""
    ids = list(range(1, 40))
    rows = [
        row(t, 16 + 32 * t, 17, session_id="s", hash_block_size=16, hash_ids=ids[: 1 + 2 * t])
        for t in range(3)
    ]
    path = write_trace(tmp_path / "chat.jsonl", rows)
    flags = ("--trace", path, "--closed-loop", 100, "--json")
    simulated = command(*flags, "--block-size", 16)
    served = ran("replay", *flags, "--pace", "busy", *tiny, "--block-size", 16)
    for done in (simulated, served):
        # Of 48 and 80 tokens all but the 16 new ones, half of them of the answer.
        assert done.summary["kv"]["prefix_hit_rate"] == pytest.approx((32 + 64) / (16 + 48 + 80))
        settings = done.document["settings"]
        assert "in closed loop" in settings["load"]
        assert any(
            "Of 2 answers that a turn follows, 2 stand" in note for note in settings["trace_notes"]
        )
    refused = ran("replay", *flags, "--requests", 2, *tiny)
    is_refused(refused, "--requests has no effect with --closed-loop")


def test_replay_in_real_time_waits_for_arrivals(tmp_path: Path, tiny: list[str]) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [row(0, 5, 2), row(0.3, 5, 2)])
    done = ran("replay", "--trace", trace, "--json", *tiny)
    assert done.code == 0
    assert done.summary["makespan_s"] >= 0.3
    assert done.document["settings"]["pace"] == "real"


def test_a_limit_that_does_not_hold_is_exit_code_1(tmp_path: Path, tiny: list[str]) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [row(0, 5, 2)])
    assert ran("replay", "--trace", trace, "--slo", "ttft:p50<=1ns", *tiny).code == 1


def test_profile_is_read_back(tmp_path: Path, tiny: list[str]) -> None:
    path = tmp_path / "profile.json"
    done = ran("profile", "--out", path, "--batches", "1,3,999", "--contexts", "8,32",
               "--chunks", "4,16", "--repeats", 3, "--max-num-batched-tokens", 256, *tiny)  # fmt: skip
    assert done.code == 0, done.err
    assert "no room for" in done.out
    profile = StepProfile.read(path)
    assert profile.settings["dtype"] == "fp32"
    kinds = {(s.decodes, s.decode_context_tokens, s.prefill_tokens) for s in profile.steps}
    assert {s.decodes for s in profile.steps} == {0, 1, 3}
    assert len(kinds) == len(profile.steps)
    for step in profile.steps:
        assert step.repeats == 3
        assert 0 < step.min_s <= step.seconds <= step.max_s
        assert step.sampled == step.decodes + step.prefills
        if step.decodes:  # contexts grow by a token a step around the one asked for
            assert min(abs(step.decode_context_tokens / step.decodes - c) for c in (8, 32)) <= 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "x"}, "format is 'x'"),
        ({"steps": [{"decodes": 1}]}, "step 0: keys"),
        ({"steps": ["x"]}, "step 0: keys"),
    ],
)
def test_a_damaged_profile_is_one_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "profile.json"
    StepProfile({}, []).write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ProfileError, match=words):
        StepProfile.read(path)


def test_bench_prints_rates(tiny: list[str]) -> None:
    done = ran("bench", "--num-prompts", 3, "--input-len", 9, "--output-len", 4, *tiny)
    assert done.code == 0
    assert "3 of 3 requests completed" in done.out
    assert "output tokens/s" in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--model", "nowhere", "x"], ["nowhere", "no such file"]),
        (["generate", "--temperature", "-1", "x"], ["temperature is -1.0"]),
        (["generate", "--dtype", "fp12", "x"], ["fp12"]),
        (["replay", "--trace", "none.jsonl"], ["none.jsonl: no such file"]),
        (["replay", "--trace", "x", "--slo", "fast"], ["fast"]),
        (["bench", "--kv-gb", "1", "--num-gpu-blocks", "9"], ["exclude each other"]),
        (["bench", "--num-gpu-blocks", "1"], ["null block"]),
        (["profile", "--out", "/nowhere/p.json", "--batches", "0"], ["0"]),
        (["dance"], ["dance"]),
    ],
)
def test_bad_input_is_one_line(arguments: Sequence[str], words: list[str]) -> None:
    is_refused(ran(*arguments), *words)


def test_equal_hash_ids_are_equal_prompts() -> None:
    import numpy as np

    from blockmanager import HashedContent

    make = PromptMaker(101, seed=0)

    def request(name: str, ids: list[int], answer: list[int] | None = None) -> Arrival:
        def content(ids: list[int]) -> HashedContent:
            return HashedContent(np.array(ids), 8, 8 * len(ids))

        asked = Request(id=name, num_prompt_tokens=8 * len(ids) + 3, content=content(ids))
        return Arrival(asked, 13, None if answer is None else content(ids + answer))

    first, second = make(request("a", [5, 6]), 0), make(request("b", [5, 9]), 1)
    assert len(first) == len(second) == 19
    assert (first[:8] == second[:8]).all()
    assert (first[8:16] != second[8:16]).any()
    assert (make(request("a", [5, 6]), 0) == first).all()
    # An answer that is known stands behind its prompt: 19 and 13 tokens, 16 of them identified.
    answered = make(request("c", [5, 6], [7]), 2)
    following = make(request("d", [5, 6, 7]), 3)
    assert len(answered) == 19 + 13
    assert (answered[:24] == following[:24]).all()


def test_a_large_batch_is_filled_in_one_step(tiny: list[str], tmp_path: Path) -> None:
    """Not in budget-sized ones, in which the first sequences would decode on and on."""
    path = tmp_path / "profile.json"
    flags = [*tiny, "--num-gpu-blocks", 700, "--max-num-batched-tokens", 32]
    done = ran("profile", "--out", path, "--batches", 16, "--contexts", 128, "--chunks", 8,
               "--repeats", 3, *flags)  # fmt: skip
    assert done.code == 0, done.err
    steps = [s for s in StepProfile.read(path).steps if not s.prefills]
    assert [(s.decodes, s.repeats) for s in steps] == [(16, 3)]
    assert abs(steps[0].decode_context_tokens / 16 - 128) <= 5
