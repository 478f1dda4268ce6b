"""``traces generate``: the workload it promises, byte for byte, written whole or not at all."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces import TraceError, default_trace_path, read_trace
from traces.__main__ import main, write_new
from traces.describe import describe
from traces.generate import ChatSettings, Lognormal, chat_lines, generate_chat

SMALL = ChatSettings(duration_s=60, seed=3)


def test_the_shipped_trace_comes_from_the_command_beside_it(tmp_path: Path) -> None:
    readme = default_trace_path().with_name("README.md").read_text()
    (command,) = (line for line in readme.splitlines() if line.startswith("python -m traces"))
    arguments = shlex.split(command)[3:]
    out = tmp_path / "chat.jsonl"
    arguments[arguments.index("--out") + 1] = str(out)
    assert main(arguments) == 0
    assert out.read_bytes() == default_trace_path().read_bytes()


def test_the_shipped_trace_is_the_load_its_readme_tells() -> None:
    found = describe(read_trace(default_trace_path(), strict=True))
    readme = default_trace_path().with_name("README.md").read_text()
    assert found.sessions is not None
    assert found.prefix is not None
    for figure in (
        f"{found.trace.num_rows:,} chat requests",
        f"{found.arrivals.rate_per_s:.1f} requests/s",
        f"{found.sessions.count:,} sessions",
        f"prompts of {found.prompt_tokens.p50:.0f} tokens",
        f"(mean {found.prompt_tokens.mean:,.0f})",
        f"answers of {found.output_tokens.p50:.0f} (mean {found.output_tokens.mean:.0f})",
        f"{found.prefix.token_hit_rate:.1%}".replace("%", " %"),
    ):
        assert figure in " ".join(readme.split())


def test_a_turn_extends_the_prompt_and_the_answer_before_it() -> None:
    sessions: dict[str, list[dict[str, Any]]] = defaultdict(list)
    rows = list(generate_chat(SMALL))
    for row in rows:
        sessions[row["session_id"]].append(row)
    assert any(len(turns) > 1 for turns in sessions.values())
    for turns in sessions.values():
        for before, after in pairwise(turns):
            context = before["prompt_tokens"] + before["output_tokens"]
            assert after["prompt_tokens"] > context
            assert after["hash_ids"][: len(before["hash_ids"])] == before["hash_ids"]
            answer_s = before["output_tokens"] / SMALL.answer_tokens_per_s
            assert after["arrival_s"] - before["arrival_s"] > answer_s
            assert int(after["id"].split(".")[1]) == int(before["id"].split(".")[1]) + 1
    for row in rows:
        assert len(row["hash_ids"]) == row["prompt_tokens"] // SMALL.hash_block_size
        assert row["prompt_tokens"] + row["output_tokens"] <= SMALL.max_context
        assert 0 <= row["arrival_s"] < SMALL.duration_s


def test_hash_ids_are_a_prefix_chain_shared_by_system_prompts() -> None:
    parents: dict[int, int] = {}
    sharers: dict[int, set[str]] = defaultdict(set)
    for row in generate_chat(SMALL):
        for parent, child in zip([-1, *row["hash_ids"]], row["hash_ids"], strict=False):
            assert parents.setdefault(child, parent) == parent
            sharers[child].add(row["session_id"])
    assert sorted(parents) == list(range(len(parents)))  # ids count up from 0, none left out
    roots = [child for child, parent in parents.items() if parent == -1]
    assert any(len(sharers[root]) > 10 for root in roots)


def test_rate_lengths_and_burstiness_are_those_asked_for() -> None:
    asked = ChatSettings(
        rate=20,
        duration_s=2_000,
        turns=1,
        output_tokens=Lognormal(median=100, p95=300),
        question_tokens=Lognormal(median=50, p95=200),
        max_context=100_000,
        seed=5,
    )
    rows = list(generate_chat(asked))
    outputs = sorted(row["output_tokens"] for row in rows)
    assert len(rows) == pytest.approx(40_000, rel=0.02)  # 4 standard deviations
    assert outputs[len(outputs) // 2] == pytest.approx(100, rel=0.03)
    assert outputs[len(outputs) * 95 // 100] == pytest.approx(300, rel=0.04)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_between_sessions_have_the_cv_asked_for(tmp_path: Path, cv: float) -> None:
    path = tmp_path / "trace"
    path.write_text("".join(chat_lines(ChatSettings(cv=cv, turns=1, duration_s=2_000, seed=1))))
    found = describe(read_trace(path)).arrivals
    assert found.gap_cv == pytest.approx(cv, rel=0.1)
    assert found.rate_per_s == pytest.approx(7.0, rel=0.12)


def test_the_load_is_level_from_the_start() -> None:
    """Sessions under way at time 0 are in the window: no ramp."""
    rows = list(generate_chat(ChatSettings(rate=50, duration_s=400, seed=2)))
    halves = [
        sum(row["arrival_s"] < 200 for row in rows),
        sum(row["arrival_s"] >= 200 for row in rows),
    ]
    assert halves[0] == pytest.approx(halves[1], rel=0.05)


def test_one_seed_one_file_and_streams_of_their_own() -> None:
    assert list(chat_lines(SMALL)) == list(chat_lines(SMALL))
    other = ChatSettings(duration_s=60, seed=4)
    assert list(chat_lines(SMALL)) != list(chat_lines(other))
    # Lengths have streams of their own: they do not move the starts of sessions.
    longer = Lognormal(median=99, p95=999)
    changes: tuple[dict[str, Any], ...] = ({}, {"system_tokens": longer, "question_tokens": longer})
    times = [
        [
            row["arrival_s"]
            for row in generate_chat(
                ChatSettings(duration_s=60, seed=3, turns=1, max_context=10**6, **change)
            )
        ]
        for change in changes
    ]
    assert times[0] == times[1]


@settings(max_examples=20, deadline=None)
@given(
    rate=st.floats(0.1, 3),
    cv=st.floats(0.2, 4),
    turns=st.floats(1, 4),
    max_context=st.integers(500, 5_000),
    size=st.integers(1, 64),
    seed=st.integers(0, 2**32),
)
def test_whatever_is_made_is_read_back_without_a_complaint(
    tmp_path_factory: pytest.TempPathFactory,
    rate: float,
    cv: float,
    turns: float,
    max_context: int,
    size: int,
    seed: int,
) -> None:
    asked = ChatSettings(
        rate=rate,
        cv=cv,
        turns=turns,
        duration_s=10,
        max_context=max_context,
        hash_block_size=size,
        seed=seed,
    )
    rows = list(generate_chat(asked))
    if not rows:
        return
    path = tmp_path_factory.getbasetemp() / "made"
    path.write_text("".join(chat_lines(asked)))
    trace = read_trace(path, strict=True)
    assert [arrival.request.id for arrival in trace.arrivals] == [row["id"] for row in rows]
    for (request, _), row in zip(trace.arrivals, rows, strict=True):
        assert request.arrival_ns == round(row["arrival_s"] * 1000) * 1_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "rate is 0.0, must be within"),
        (["--rate", "nan"], "rate is nan"),
        (["--cv", "inf"], "cv is inf"),
        (["--turns", "0.5"], "turns is 0.5"),
        (["--think", "9:3"], "think_s: need"),
        (["--seed", "-1"], "seed is -1"),
        (["--duration", "1e8"], "requests, at most"),
        (["--max-context", "1"], "no request falls into"),
    ],
)
def test_settings_that_make_no_workload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["generate", "--out", str(tmp_path / "trace"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_wrong_law_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "--out", str(tmp_path / "trace"), "--think", "9"])
    assert stopped.value.code == 2
    assert "'9' is not MEDIAN:P95" in capsys.readouterr().err


def test_nothing_is_overwritten_without_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace"
    out.write_text("precious")
    command = ["generate", "--out", str(out), "--duration", "5"]
    assert main(command) == 2
    assert "exists (--force replaces it)" in capsys.readouterr().err
    assert out.read_text() == "precious"
    assert main([*command, "--force", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == len(out.read_text().splitlines())
    assert report["settings"]["answer_tokens_per_s"] == 50.0
    assert report["sha256"] == read_trace(out).sha256


def test_a_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Any:
        yield "one\n"
        raise TraceError("stop")

    out = tmp_path / "trace"
    out.write_text("precious")
    with pytest.raises(TraceError, match="stop"):
        write_new(out, broken(), force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]
    assert out.read_text() == "precious"


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is not a file that can be replaced"):
        write_new(tmp_path, ["x"], force=True)
    with pytest.raises(TraceError, match="cannot be written: No such file"):
        write_new(tmp_path / "no" / "trace", ["x"])


def test_the_assumed_answer_speed_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "trace")
    assert main(["generate", "--out", out, "--duration", "5", "--answer-speed", "30"]) == 0
    assert "Assumed: answers come at 30 tokens/s" in capsys.readouterr().out


def test_without_hash_ids_only_they_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = list(generate_chat(replace(SMALL, hash_ids=False)))
    full = [
        {key: value for key, value in row.items() if not key.startswith("hash_")}
        for row in generate_chat(SMALL)
    ]
    assert bare == full
    out = str(tmp_path / "trace")
    assert main(["generate", "--out", out, "--duration", "5", "--no-hash-ids"]) == 0
    assert not read_trace(out).has_identity
    command = ["generate", "--out", out, "--force", "--no-hash-ids", "--hash-block-size", "16"]
    assert main(command) == 2
    assert "has no effect with --no-hash-ids" in capsys.readouterr().err
