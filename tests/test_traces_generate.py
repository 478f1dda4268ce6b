"""``traces generate``: the workload it promises, byte for byte, written whole or not at all."""

from __future__ import annotations

import json
import math
import shlex
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces import TraceError, default_trace_path, read_trace
from traces.__main__ import main
from traces.convert import write_new
from traces.describe import describe
from traces.generate import ChatSettings, Lognormal, chat_lines, generate_chat
from traces.laws import (
    Fixed,
    Law,
    OnOff,
    Process,
    Quantiles,
    Stream,
    Uniform,
    Weibull,
    Zipf,
    parse_law,
    parse_process,
)
from traces.presets import PRESETS, preset
from traces.servegen import (
    ServeGenSettings,
    generate_servegen,
    read_servegen,
    servegen_lines,
)

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
    for arrival, row in zip(trace.arrivals, rows, strict=True):
        assert arrival.request.arrival_ns == round(row["arrival_s"] * 1000) * 1_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "rate is 0.0, must be within"),
        (["--rate", "nan"], "rate is nan"),
        (["--cv", "inf"], "cv is inf"),
        (["--turns", "0.5"], "turns is 0.5"),
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
    assert "'9' is no law; expected MEDIAN:P95" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", "--out", str(tmp_path / "trace"), "--think", "9:3"])
    assert "median 9, p95 3" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("text", "quantiles"),
    [
        ("60:500", {0.5: 60, 0.95: 500}),
        ("lognormal:60:500", {0.5: 60, 0.95: 500}),
        ("fixed:512", {0.01: 512, 0.99: 512}),
        ("uniform:10:20", {0.1: 11, 0.5: 15}),
        ("zipf:1:3", {0.5: 1, 0.6: 2, 0.9: 3}),  # weights 6, 3, 2 of 11
        ("zipf:0:4", {0.2: 1, 0.3: 2, 0.9: 4}),
    ],
)
def test_laws_by_their_quantiles(text: str, quantiles: dict[float, float]) -> None:
    law = parse_law(text)
    for u, value in quantiles.items():
        assert law.quantile(u) == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "9",
        "60:x",
        "uniform:5",
        "uniform:9:3",
        "zipf:1:0",
        "fixed:nan",
        "fixed:0",
        "empirical:x",
    ],
)
def test_a_law_that_is_none_is_one_line(text: str) -> None:
    with pytest.raises(TraceError) as refused:
        parse_law(text)
    assert "\n" not in str(refused.value)


def test_an_empirical_law_has_the_quantiles_of_the_trace() -> None:
    trace = read_trace(default_trace_path())
    prompts = [a.request.num_prompt_tokens for a in trace.arrivals]
    law = parse_law(f"empirical:{default_trace_path()}:prompt")
    for share in (0.0, 0.05, 0.5, 0.95, 1.0):
        assert law.quantile(share) == pytest.approx(np.quantile(prompts, share), rel=0.01)
    assert Quantiles.of([7]).quantile(0.3) == 7
    assert Quantiles.of([1, 2, 3]).quantile(0.75) == 2.5


@given(st.floats(1e-9, 1 - 1e-9), st.floats(1e-9, 1 - 1e-9))
@pytest.mark.parametrize(
    "law",
    [
        Lognormal(median=3, p95=9),
        Fixed(4),
        Uniform(1, 2),
        Zipf(1.3, 50),
        Quantiles(((0, 1), (0.5, 10), (1, 10_000)), is_log=True),
    ],
)
def test_quantiles_never_fall(law: Law, u: float, v: float) -> None:
    low, high = sorted((u, v))
    assert law.quantile(low) <= law.quantile(high)


def gaps_of(process: Process, rate: float, duration_s: float, seed: int = 1) -> Any:
    return np.diff(np.fromiter(process.times(rate, 0.0, duration_s, Stream(seed)), np.float64))


@pytest.mark.parametrize(
    ("text", "cv"),
    [
        ("poisson", 1.0),
        ("gamma:cv=0.3", 0.3),
        ("gamma:cv=2.5", 2.5),
        ("weibull:cv=0.5", 0.5),
        ("weibull:cv=1", 1.0),
        ("weibull:cv=2.5", 2.5),
    ],
)
def test_gaps_have_the_rate_and_the_cv_asked_for(text: str, cv: float) -> None:
    gaps = gaps_of(parse_process(text), 4.0, 20_000)
    assert 1 / gaps.mean() == pytest.approx(4.0, rel=4 * cv / math.sqrt(len(gaps)))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08)


@pytest.mark.parametrize("text", ["gamma:cv=4", "weibull:cv=4", "onoff:on=20,off=60", "poisson"])
def test_bursty_processes_are_stationary_from_the_start(text: str) -> None:
    """An ordinary renewal process would start with (CV^2 - 1) / 2 = 7.5 arrivals too many."""
    process = parse_process(text)
    counts = [sum(1 for _ in process.times(1.0, 0.0, 50.0, Stream(seed))) for seed in range(1_500)]
    error = np.std(counts) / math.sqrt(len(counts))
    assert np.mean(counts) == pytest.approx(50, abs=4 * error)
    assert error < 7.5 / 4


def test_on_and_off_take_turns() -> None:
    process = OnOff(on_s=10, off_s=40)
    gaps = gaps_of(process, 2.0, 100_000)
    assert len(gaps) / 100_000 == pytest.approx(2.0, rel=0.08)
    # While on the rate is 10 per second; a silence is a gap of 40 s on average.
    assert np.median(gaps) == pytest.approx(math.log(2) / 10, rel=0.05)
    assert gaps[gaps > 3].mean() == pytest.approx(40, rel=0.12)


def test_a_day_has_its_peak_where_asked() -> None:
    process = parse_process("diurnal:peak=1.5,period=1000,peak_at=250")
    times = np.fromiter(process.times(20.0, 0.0, 10_000.0, Stream(2)), np.float64)
    per_quarter = np.histogram(times % 1_000, 4, (0, 1_000))[0] / (10 * 250)
    # Means over quarters of 20 (1 + 0.5 cos): the peak lies between the first two.
    swing = 0.5 * 2 / math.pi
    want = 20 * np.array([1 + swing, 1 + swing, 1 - swing, 1 - swing])
    assert per_quarter == pytest.approx(want, rel=0.03)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pareto:cv=2",
        "gamma",
        "gamma:cv=x",
        "gamma:cv=0",
        "gamma:cv=2,rate=3",
        "gamma:cv=2,cv=3",
        "onoff:on=3",
        "onoff:on=0,off=1",
        "diurnal:peak=3",
        "weibull:cv=inf",
    ],
)
def test_a_process_that_is_none_is_one_line(text: str) -> None:
    with pytest.raises(TraceError) as refused:
        parse_process(text)
    assert "\n" not in str(refused.value)


def test_sessions_can_start_by_any_process() -> None:
    asked = ChatSettings(arrivals=Weibull(4.0), turns=1, rate=5, duration_s=3_000, seed=2)
    times = np.array([row["arrival_s"] for row in generate_chat(asked)])
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(4, rel=0.15)
    with pytest.raises(TraceError, match="cv 2 has no effect beside arrivals"):
        replace(asked, cv=2.0)


RAG = ChatSettings(
    rate=5,
    duration_s=200,
    turns=1,
    system_prompts=1,
    system_tokens=Fixed(40),
    question_tokens=Fixed(20),
    documents=20,
    documents_per_question=2,
    document_tokens=Fixed(100),
    hash_block_size=10,
    seed=1,
)


def test_questions_share_leading_documents_and_no_others() -> None:
    rows = list(generate_chat(RAG))
    assert {row["prompt_tokens"] for row in rows} == {40 + 2 * 100 + 20}
    lasts: dict[tuple[int, ...], int] = {}
    for row in rows:
        assert len(row["hash_ids"]) == 26
        # Blocks 4..13 are the first document, 14..23 the second one behind this first one.
        for depth in (4, 14, 24):
            path = tuple(row["hash_ids"][:depth])
            assert lasts.setdefault(path, path[-1]) == path[-1]
    first = {row["hash_ids"][4] for row in rows}
    second = {(row["hash_ids"][4], row["hash_ids"][14]) for row in rows}
    assert len(first) <= 20
    assert len({pair[1] for pair in second}) == len(second) > len(first)
    questions = [row["hash_ids"][24] for row in rows]
    assert len(set(questions)) == len(rows)


def test_popular_documents_are_retrieved_more_often() -> None:
    asked = replace(RAG, documents_per_question=1, document_exponent=1.0, duration_s=1_000)
    firsts = [row["hash_ids"][4] for row in generate_chat(asked)]
    counts = np.sort(np.unique(firsts, return_counts=True)[1])[::-1] / len(firsts)
    harmonic = sum(1 / k for k in range(1, 21))
    assert counts[0] == pytest.approx(1 / harmonic, rel=0.1)
    assert counts[1] == pytest.approx(1 / 2 / harmonic, rel=0.15)


def test_all_documents_of_a_small_corpus_come_where_all_are_asked_for() -> None:
    asked = replace(RAG, documents=3, documents_per_question=3, document_exponent=9.0)
    assert {row["prompt_tokens"] for row in generate_chat(asked)} == {40 + 3 * 100 + 20}
    with pytest.raises(TraceError, match="4 different documents a question need as many"):
        replace(RAG, documents=3, documents_per_question=4)


def test_reasoning_is_left_out_of_the_next_prompt() -> None:
    asked = ChatSettings(
        duration_s=200,
        turns=4,
        question_tokens=Fixed(10),
        output_tokens=Fixed(100),
        system_prompts=0,
        kept_output=0.25,
        seed=1,
    )
    rows = list(generate_chat(asked))
    for row in rows:
        turn = int(row["id"].split(".")[1])
        # Sessions under way at time 0 have turns that are not in the file.
        assert row["prompt_tokens"] % 35 == 10
        assert row["prompt_tokens"] >= 10 + 35 * turn


@pytest.mark.parametrize(
    ("name", "prompts", "outputs"),
    [
        ("chat", (181, 1_020, 4_083), (41, 129, 451)),
        ("code", (75, 1_469, 7_303), (6, 13, 90)),
        ("summarisation", (749, 2_730, 3_813), (60, 167, 736)),
        ("reasoning", (13, 208, 6_714), (225, 792, 5_701)),
        ("agents", (30_544, 103_659, 300_666), (89, 216, 1_554)),
    ],
)
def test_presets_are_near_the_figures_they_name(
    name: str, prompts: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    found = preset(name)
    figures = f"{prompts[1]:,}"
    assert figures in found.source
    rows = list(generate_chat(found.settings))
    for key, want, within in (("prompt_tokens", prompts, 1.5), ("output_tokens", outputs, 1.3)):
        got = np.percentile([row[key] for row in rows], [5, 50, 95])
        for value, published in zip(got, want, strict=True):
            assert published / within < value < published * within, (name, key)
    assert len(rows) / found.settings.duration_s == pytest.approx(found.settings.rate, rel=0.25)


def test_three_percent_of_the_documents_get_sixty_percent() -> None:
    settings_ = preset("rag").settings
    weights = np.arange(1, settings_.documents + 1) ** -settings_.document_exponent
    assert weights[: settings_.documents * 3 // 100].sum() / weights.sum() == pytest.approx(
        0.6, abs=0.01
    )


def test_agents_reuse_what_their_source_does() -> None:
    """96.3 % of blocks within sessions; turns whose predecessor is before the window are left out."""
    blocks: dict[str, list[int]] = defaultdict(list)
    reused = total = 0
    for row in generate_chat(preset("agents").settings):
        held = blocks[row["session_id"]]
        if held or row["id"].endswith(".0"):
            total += len(row["hash_ids"])
            reused += held[-1] if held else 0
        held.append(len(row["hash_ids"]))
    # A little above, as nothing here is ever compacted.
    assert reused / total == pytest.approx(0.963, abs=0.03)


def test_every_preset_names_a_source_and_what_it_assumes() -> None:
    for found in PRESETS.values():
        assert len(found.source) > 50
        assert len(found.assumed) > 20
    with pytest.raises(TraceError, match="no workload 'poetry'; there are chat"):
        preset("poetry")


def servegen_client(
    folder: Path, name: str, windows: str, dataset: dict[str, dict[str, str]] | None
) -> None:
    (folder / f"{name}-trace.csv").write_text(windows)
    if dataset is not None:
        (folder / f"{name}-dataset.json").write_text(json.dumps(dataset))


LENGTHS = {"0": {"input_tokens": "{5: 0.25, 9: 0.75}", "output_tokens": "{3: 1.0}"}}


def test_servegen_clients_by_hand(tmp_path: Path) -> None:
    servegen_client(
        tmp_path, "a", "0,2,1.0,Gamma,1.0,0.5\n600,0,0,,0,0\n1200,4,2.0,Weibull,0.54,0.1\n", LENGTHS
    )
    servegen_client(tmp_path, "b", "0,8,1,Gamma,1,0.125\n", None)
    clients = read_servegen(tmp_path)
    assert [client.name for client in clients] == ["a", "b"]
    assert clients[0].rate(0, 1_800) == 2.0
    made = generate_servegen(clients, ServeGenSettings(duration_s=1_800, seed=1))
    times = np.array([row["arrival_s"] for row in made.rows])
    counts = np.histogram(times, [0, 600, 1_200, 1_800])[0]
    assert counts[0] == pytest.approx(1_200, abs=4 * 1_200**0.5)
    assert counts[1] == 0
    assert counts[2] == pytest.approx(2_400, abs=4 * 2 * 2_400**0.5)
    prompts = [row["prompt_tokens"] for row in made.rows]
    assert set(prompts) == {5, 9}
    assert np.mean(np.array(prompts) == 5) == pytest.approx(0.25, abs=0.03)
    assert {row["output_tokens"] for row in made.rows} == {3}
    assert any("1 clients (2.667 requests/s) left out" in note for note in made.notes)
    assert made == generate_servegen(clients, ServeGenSettings(duration_s=1_800, seed=1))
    tenfold = generate_servegen(clients, ServeGenSettings(duration_s=1_800, rate=0.2, seed=1))
    assert len(tenfold.rows) == pytest.approx(360, abs=120)
    assert any("x 0.1," in note for note in tenfold.notes)
    (tmp_path / "made").write_text("".join(servegen_lines(made)))
    assert len(read_trace(tmp_path / "made", strict=True).arrivals) == len(made.rows)


def test_servegen_pictures_and_windows_without_lengths(tmp_path: Path) -> None:
    dataset = {
        "0": {"text_tokens": "{}", "output_tokens": "{}"},
        "600": {
            "text_tokens": "{10: 1.0}",
            "image_tokens": "{100: 1.0}",
            "image_count": "{2: 1.0}",
            "output_tokens": "{0: 1.0}",
        },
    }
    servegen_client(tmp_path, "a", "0,1,1,,0,0\n", dataset)
    made = generate_servegen(read_servegen(tmp_path), ServeGenSettings(duration_s=600))
    assert {(r["prompt_tokens"], r["output_tokens"]) for r in made.rows} == {(210, 1)}
    assert any("nearest other one" in note for note in made.notes)
    assert any("of one item" in note for note in made.notes)


@pytest.mark.parametrize(
    ("windows", "dataset", "message"),
    [
        ("0,1,1,Gamma,1\n", LENGTHS, "a-trace.csv, line 1: expected start_s,rate"),
        ("0,1,1,Pareto,1,1\n", LENGTHS, "line 1: gaps of Pareto"),
        ("0,-1,1,Gamma,1,1\n", LENGTHS, "out of range"),
        ("0,nan,1,Gamma,1,1\n", LENGTHS, "out of range"),
        ("600,1,1,,0,0\n0,1,1,,0,0\n", LENGTHS, "whose starts rise"),
        ("", LENGTHS, "whose starts rise, found 0"),
        ("0,0,0,,0,0\n", LENGTHS, "no client with lengths sends anything"),
        (
            "0,1,1,,0,0\n",
            {"0": {"input_tokens": "{}", "output_tokens": "{}"}},
            "no window has both",
        ),
        ("0,1,1,,0,0\n", {"x": {}}, "is not start -> field"),
        (
            "0,1,1,,0,0\n",
            {"0": {"input_tokens": "f()", "output_tokens": "{1: 1}"}},
            "expected {tokens",
        ),
        (
            "0,1,1,,0,0\n",
            {"0": {"input_tokens": "{-1: 1}", "output_tokens": "{1: 1}"}},
            "expected {tok",
        ),
        (
            "0,1,1,,0,0\n",
            {"0": {"input_tokens": "{1: 0}", "output_tokens": "{1: 1}"}},
            "expected {tok",
        ),
    ],
)
def test_servegen_files_that_are_none(
    tmp_path: Path, windows: str, dataset: dict[str, dict[str, str]], message: str
) -> None:
    servegen_client(tmp_path, "a", windows, dataset)
    with pytest.raises(TraceError) as refused:
        generate_servegen(read_servegen(tmp_path), ServeGenSettings(duration_s=600))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_servegen_needs_clients(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no client here"):
        read_servegen(tmp_path)
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_servegen(tmp_path / "none")


def test_servegen_deepseek_has_its_published_lengths(shared: Path, tmp_path: Path) -> None:
    import tarfile

    packed = shared / "traces/servegen/servegen_deepseek-r1_and_mm-image.tar.gz"
    with tarfile.open(packed) as archive:
        members = [m for m in archive.getmembers() if "deepseek-r1/chunk" in m.name]
        archive.extractall(tmp_path, members, filter="data")
    clients = read_servegen(tmp_path / members[0].name.rpartition("/")[0])
    assert len(clients) == 73
    assert sum(client.rate(0, 86_400) for client in clients) == pytest.approx(16.0, abs=0.05)
    made = generate_servegen(clients, ServeGenSettings(duration_s=86_400, rate=0.3, seed=1))
    prompts = [row["prompt_tokens"] for row in made.rows]
    outputs = [row["output_tokens"] for row in made.rows]
    assert np.percentile(prompts, [50, 95]) == pytest.approx([208, 6_714], rel=0.08)
    assert np.percentile(outputs, [50, 95]) == pytest.approx([792, 5_701], rel=0.08)
