"""``python -m traces`` from the command line, and docs/traces.md: its examples and commands are tried."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyarrow import parquet

from simulator.__main__ import main as simulate
from traces import TraceError, read_trace
from traces.__main__ import main
from traces.formats import SESSION_FORMATS, all_formats
from traces.formats.base import TraceFormat
from traces.formats.session_base import SessionFormat
from traces.presets import PRESETS
from traces.session_files import read_sessions
from traces.tokenizer import TextTokenizer

ROOT = Path(__file__).resolve().parent.parent
DOC = (ROOT / "docs" / "traces.md").read_text()


class Said(NamedTuple):
    code: int
    out: str
    err: str


Traces = Callable[..., Said]


@pytest.fixture(name="traces")
def run_traces(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Traces:
    """Runs ``python -m traces`` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*argv: object) -> Said:
        try:
            code = main([str(word) for word in argv])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Said(code, *capsys.readouterr())

    return call


def refused(said: Said) -> str:
    """The one line in which a command said why it did nothing."""
    assert said.code == 2
    assert said.out == ""
    lines = said.err.splitlines()
    assert len(lines) == 1, said.err
    assert lines[0].startswith("error: ")
    return lines[0]


ROWS: tuple[dict[str, Any], ...] = (
    {"id": "a", "arrival_s": "0.000000001", "prompt_tokens": 40, "output_tokens": 12, "n": 2}
    | {"hash_block_size": 16, "hash_ids": [1, 2], "session_id": "x, y", "deadline_s": "0.25"},
    {"id": "b", "arrival_s": "1.5", "prompt_tokens": 3, "output_tokens": 1, "priority": -1}
    | {"token_ids": [7, 8, 9], "lora": "l", "salt": "s", "max_tokens": 5},
    {"id": "c", "arrival_s": "1.5", "prompt_tokens": 9, "output_tokens": 2}
    | {"hash_block_size": 16, "hash_ids": []},
)


def write_native(path: Path, rows: tuple[dict[str, Any], ...] = ROWS) -> Path:
    lines = (re.sub(r'(_s": )"([\d.]+)"', r"\1\2", json.dumps(row)) for row in rows)
    path.write_text("".join(line + "\n" for line in lines))
    return path


# -- convert ----------------------------------------------------------------------------------


def test_convert_to_csv_and_back_loses_nothing(traces: Traces) -> None:
    given = write_native(Path("given.jsonl"))
    to_csv = traces("convert", given, "--to", "csv", "--out", "t.csv")
    back = traces("convert", "t.csv", "--to", "native", "--out", "back.jsonl")
    assert (to_csv.code, back.code) == (0, 0)
    assert "dropped" not in to_csv.out + back.out
    assert "Wrote 3 requests to t.csv" in to_csv.out

    def rows(path: str) -> list[dict[str, Any]]:
        return [
            json.loads(line, parse_float=Decimal) for line in Path(path).read_text().splitlines()
        ]

    assert rows("back.jsonl") == rows("given.jsonl")
    assert [str(a) for a in read_trace("back.jsonl")] == [str(a) for a in read_trace(given)]


def test_convert_to_mooncake_lists_what_it_drops(traces: Traces) -> None:
    said = traces("convert", write_native(Path("t.jsonl")), "--to", "mooncake", "--out", "m.jsonl")
    assert said.code == 0
    dropped = {line for line in said.out.splitlines() if line.startswith("dropped: ")}
    for what in ("max_tokens", "n", "priority", "deadline", "session_id"):
        assert f"dropped: {what} dropped: 1 row" in dropped
    assert "dropped: id dropped: 3 rows" in dropped
    assert "dropped: time rounded to a millisecond: 1 row" in dropped
    assert "dropped: lora and salt dropped (their blocks keep ids of their own): 1 row" in dropped
    assert read_trace("m.jsonl").format == "mooncake"


def test_convert_replaces_a_file_only_by_force(traces: Traces) -> None:
    given = write_native(Path("t.jsonl"))
    there = Path("there.csv")
    there.write_text("mine")
    argv = ("convert", given, "--to", "csv", "--out", there)
    assert refused(traces(*argv)).endswith("there.csv: exists (--force replaces it)")
    assert there.read_text() == "mine"
    assert traces(*argv, "--force").code == 0
    assert read_trace(there).num_rows == 3
    assert sorted(path.name for path in Path().iterdir()) == ["t.jsonl", "there.csv"]


# -- inspect ----------------------------------------------------------------------------------


def test_inspect_draws_a_picture(traces: Traces) -> None:
    said = traces("inspect", "chat.jsonl", "--picture", "p.png")
    assert said.code == 0
    assert "Written: p.png" in said.err
    assert Path("p.png").read_bytes()[:4] == b"\x89PNG"
    assert Path("p.png").stat().st_size > 10_000
    assert ".png or .svg" in traces("inspect", "chat.jsonl", "--picture", "p.pdf").err


def inspected(said: Said) -> dict[str, Any]:
    assert said.code == 0, said.err
    found: dict[str, Any] = json.loads(said.out)
    return found


def test_inspect_with_arrivals_spread_and_shape(traces: Traces) -> None:
    lengths = Path("lengths.csv")
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n" + "8,2\n" * 5)
    assert "name a process" in refused(traces("inspect", lengths))
    made = inspected(traces("inspect", lengths, "--arrivals", "constant:rate=2", "--json"))
    assert made["arrivals"]["span_s"] == 2.0
    assert any("Arrival times are made" in note for note in made["notes"])

    ticks = write_native(
        Path("ticks.jsonl"),
        tuple({"arrival_s": s, "prompt_tokens": 8, "output_tokens": 2} for s in (0, 0, 0, 3, 3, 6)),
    )
    assert inspected(traces("inspect", ticks, "--json"))["arrivals"]["shared_timestamps"] == 3
    spread = inspected(traces("inspect", ticks, "--spread", "--json"))
    assert spread["arrivals"]["shared_timestamps"] == 0
    assert spread["arrivals"]["gap_max_s"] == 1.5

    steps = ("--shape", "window:from=3", "--shape", "rate:factor=3,by=stretch")
    shaped = inspected(traces("inspect", ticks, *steps, "--json"))
    assert shaped["arrivals"]["span_s"] == 1.0
    assert sum(note.startswith("Shaped: ") for note in shaped["notes"]) == 2
    assert "no way to shape" in refused(traces("inspect", ticks, "--shape", "squeeze"))


# -- sessions ---------------------------------------------------------------------------------


def test_sessions_in_words_and_as_json(traces: Traces) -> None:
    Path("s.csv").write_text(example("tracelab-replay") + "\n")
    words = traces("sessions", "s.csv")
    assert words.code == 0
    assert "s.csv (tracelab-replay): 2 rows, 2 requests in 1 session" in words.out
    assert "Closed loop" in words.out
    found = inspected(traces("sessions", "s.csv", "--json"))
    assert (found["requests"], found["sessions"], found["turns_max"]) == (2, 1, 2)
    assert found["prompt_tokens_max"] == 210
    assert found["starts_recorded"]
    assert found["prefix_identity"]
    assert "python -m traces sessions" in refused(traces("inspect", "s.csv"))
    assert "no known format of sessions" in refused(traces("sessions", write_native(Path("t"))))


# -- fit, generate ----------------------------------------------------------------------------


def test_fit_and_generate_more_of_it(traces: Traces) -> None:
    fitted = traces("fit", "chat.jsonl", "--out", "fit.json")
    assert fitted.code == 0
    made = traces(
        "generate",
        "--like",
        "fit.json",
        "--out",
        "l.jsonl",
        "--requests",
        300,
        "--rate",
        5,
        "--json",
    )
    assert inspected(made)["rows"] == 300
    found = inspected(traces("inspect", "l.jsonl", "--json"))
    assert found["arrivals"]["rate_per_s"] == pytest.approx(5, rel=0.3)
    assert "--turns has no effect with --like" in refused(
        traces("generate", "--like", "fit.json", "--turns", 2, "--out", "x.jsonl")
    )
    assert "is no fit" in refused(
        traces("generate", "--like", write_native(Path("n"), ROWS[:1]), "--out", "x.jsonl")
    )


@pytest.mark.parametrize("name", PRESETS)
def test_generate_every_preset(name: str, traces: Traces) -> None:
    argv = ("generate", "--preset", name, "--duration", 60, "--seed", 3)
    said = traces(*argv, "--out", "p.jsonl")
    assert said.code == 0
    assert f"Shaped after {PRESETS[name].source}." in said.out
    assert "Assumed: " in said.out
    assert read_trace("p.jsonl", strict=True).num_rows > 10
    traces(*argv, "--out", "again.jsonl")
    assert Path("again.jsonl").read_bytes() == Path("p.jsonl").read_bytes()


def test_generate_from_servegen_clients(traces: Traces) -> None:
    folder = Path("clients")
    folder.mkdir()
    (folder / "a-trace.csv").write_text("0,2.0,1.0,Gamma,1.0,0.5\n600,2.0,2.0,Gamma,0.25,2.0\n")
    lengths = {"0": {"input_tokens": "{8: 0.5, 64: 0.5}", "output_tokens": "{4: 1.0}"}}
    (folder / "a-dataset.json").write_text(json.dumps(lengths))
    argv = ("generate", "--servegen", folder, "--duration", 300, "--start", 600)
    said = traces(*argv, "--out", "s.jsonl")
    assert said.code == 0
    trace = read_trace("s.jsonl", strict=True)
    assert 300 < trace.num_rows < 1200
    assert {a.request.num_prompt_tokens for a in trace} == {8, 64}
    assert {a.output_tokens for a in trace} == {4}
    assert "generate --servegen" in refused(traces("inspect", folder))
    empty = Path("empty")
    empty.mkdir()
    refused(traces("generate", "--servegen", empty, "--out", "x.jsonl"))


# -- the documentation ------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOC, re.DOTALL)


def example(name: str) -> str:
    match = re.search(
        rf"^\[{re.escape(name)}\]\s(.*?)\n(?=\[[\w.-]+\]\s|\Z)", blocks("text")[0], re.M | re.S
    )
    assert match, f"no example of {name}"
    return match[1]


@pytest.mark.parametrize("known", [*all_formats(), *SESSION_FORMATS], ids=lambda known: known.name)
def test_documented_example_is_read(
    known: TraceFormat | SessionFormat, tmp_path: Path, word_tokenizer: Path
) -> None:
    assert f"| `{known.name}` | {known.recognised_by} |" in DOC
    path = tmp_path / "example"
    if known.name == "baseten":
        table = pa.Table.from_pylist(  # type: ignore[attr-defined]
            [json.loads(example("baseten"))]
        )
        parquet.write_table(table, path)  # type: ignore[no-untyped-call]
    else:
        path.write_text(example(known.name) + "\n")
    if isinstance(known, SessionFormat):
        sessions = read_sessions(path, strict=True)
        assert (sessions.format, sessions.num_skipped) == (known.name, 0)
        return
    if known.units == "not read":
        with pytest.raises(TraceError, match="cannot be a trace"):
            read_trace(path)
        return
    assert f"{known.units} |" in DOC
    assert f"| {known.prefix_identity} | {known.licence} |" in DOC
    is_timed = "no arrivals" not in known.units or known.name == "vidur"
    holds_texts = "--tokenizer" in known.units
    trace = read_trace(
        path,
        arrivals=None if is_timed else "all-at-once",
        tokenizer=TextTokenizer(word_tokenizer) if holds_texts else None,
    )
    assert (trace.format, trace.num_skipped) == (known.name, 0)


def test_documented_commands_run(traces: Traces, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(commands) > 10
    for command in commands:
        _, _, module, *argv = shlex.split(command)
        if module == "traces":
            said = traces(*argv)
            assert said.code == 0, f"{command}: {said.err}"
            assert "dropped" not in said.out or "mooncake" in command
        else:
            assert module == "simulator"
            assert simulate(argv) == 0
            capsys.readouterr()


def test_documented_plug_in_works(tmp_path: Path) -> None:
    (tmp_path / "our_log.py").write_text(blocks("python")[0])
    group, entry = blocks("toml")[0].splitlines()
    assert group == '[project.entry-points."kvplan.trace_formats"]'
    about = tmp_path / "our_log-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: our-log\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[kvplan.trace_formats]\n" + entry.replace('"', "") + "\n"
    )
    (tmp_path / "day.csv").write_text("when,asked,answered\n0.5,40,12\n2,8,0\n")
    said = subprocess.run(
        [sys.executable, "-m", "traces", "inspect", str(tmp_path / "day.csv"), "--json"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(said.stdout)
    assert found["format"] == "our-log"
    assert found["rows"] == {"total": 2, "used": 1, "skipped": 1}
    assert "answered is zero" in said.stdout


# -- real files -------------------------------------------------------------------------------

# Requests, span in s, CV of gaps, prompt p50 and p95, output p50 and p95, share of tokens that hit.
MEASURED: dict[str, tuple[int, float, float, float, float, float, float, float | None]] = {
    "azure2023/AzureLLMInferenceTrace_code.csv": (8819, 3435.9, 13.15, 1469, 7303, 13, 90, None),
    "azure2023/AzureLLMInferenceTrace_conv.csv": (19366, 3501.7, 1.09, 1020, 4083, 129, 451, None),
    "mooncake/conversation_trace.jsonl": (12031, 3537, 3.03, 6909, 39550, 350, 698, 0.3736),
    "mooncake/synthetic_trace.jsonl": (3993, 1022, 1.01, 11587, 48905, 69, 519, 0.6512),
    "vidur/splitwise_code.csv": (8819, 3435.9, 13.15, 1469, 7303, 13, 90, None),
    "burstgpt/BurstGPT_1_first400.csv": (383, 37269, 4.46, 353, 1639, 238, 842, None),
    "llmservingsim/sharegpt-llama-3.1-8b-300-sps10.jsonl.gz": (
        *(300, 29.1, 0.94, 732, 1749, 632, 773),
        0.0759,
    ),
    "llmservingsim/workload_me2_01_mixed.jsonl": (608, 60.9, 0.99, 2910, 26412, 874, 13045, None),
}
LENGTHS_ONLY = {  # requests, prompt p50, output p50
    "vidur/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv": (28257, 2730, 167),
    "sarathi/sharegpt_8k_filtered_stats_llama2_tokenizer.csv": (30731, 1730, 415),
}
SESSIONS = {  # sessions, requests
    "weka_claude_code/weka_subset_raw.tar.gz": (41, 2606),
    "tracelab/round_trace.sanitized.example.jsonl": (2, 19),
    "tracelab/multi_session_large.csv": (48, 303),
    "tracelab/multi_session_example.csv": (3, 8),
    "tracelab/session_workload_example.csv": (1, 11),
}
REFUSED = (  # the start of a path, and why
    ("servegen/", "tar archive"),
    ("guidellm/", "lists of requests are empty"),
    ("misc/inference_perf_stage_3", "no single requests"),
    ("llmperf_leaderboard/", "no arrival time"),
    ("vllm_bench_serve/", "no arrival time"),
    ("sarathi/", "no arrival time"),
    ("vidur/arxiv", "no arrival time"),
    ("weka_claude_code/weka_710", "no known format"),
    ("otel/", "span without token counts"),
)


def test_every_real_file_loads_or_is_refused_with_the_reason(shared: Path, traces: Traces) -> None:
    folder = shared / "traces"
    files = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    assert files.keys() >= MEASURED.keys() | LENGTHS_ONLY.keys() | SESSIONS.keys()
    for name, path in files.items():
        if path.suffix == ".md":
            continue
        said = traces("inspect", path, "--json")
        if name in SESSIONS:
            assert "holds sessions" in refused(said)
            found = inspected(traces("sessions", path, "--json"))
            assert (found["sessions"], found["requests"]) == SESSIONS[name], name
        elif said.code:
            why = refused(said)
            assert any(name.startswith(start) and word in why for start, word in REFUSED), why
        else:
            found = inspected(said)
            assert found["rows"]["used"] > 0
            if name in MEASURED:
                check_measured(name, found)


def check_measured(name: str, found: dict[str, Any]) -> None:
    requests, span_s, cv, *lengths, hit_rate = MEASURED[name]
    assert found["rows"]["used"] == requests, name
    assert found["arrivals"]["span_s"] == pytest.approx(span_s, abs=0.06), name
    assert found["arrivals"]["gap_cv"] == pytest.approx(cv, abs=0.006), name
    measured = [found[f"{w}_tokens"][p] for w in ("prompt", "output") for p in ("p50", "p95")]
    assert measured == pytest.approx(lengths, abs=0.6), name
    if hit_rate is None:
        assert found["prefix"] is None, name
    else:
        assert found["prefix"]["token_hit_rate"] == pytest.approx(hit_rate, abs=6e-5), name


def test_real_lengths_with_arrivals_named(shared: Path, traces: Traces) -> None:
    for name, (requests, prompt, output) in LENGTHS_ONLY.items():
        path = shared / "traces" / name
        found = inspected(traces("inspect", path, "--arrivals", "poisson:rate=9,seed=1", "--json"))
        assert found["rows"]["used"] == requests
        assert (found["prompt_tokens"]["p50"], found["output_tokens"]["p50"]) == (prompt, output)
    for path in sorted((shared / "traces" / "vllm_bench_serve").glob("*16.0qps*")):
        found = inspected(traces("inspect", path, "--arrivals", "constant:rate=16", "--json"))
        assert (found["rows"]["total"], found["rows"]["used"]) == (
            1000,
            621,
        )  # 379 failed unnoticed


def test_real_hit_rate_by_pool_size(shared: Path, traces: Traces) -> None:
    # The report has these sizes where its own round ones meet them.
    wanted = {
        "conversation": {1000: 4.5, 5000: 11.4, 10_000: 21.6, 50_000: 36.2, 100_000: 37.1},
        "synthetic": {1000: 8.6, 5000: 28.5, 10_000: 43.2, 50_000: 65.1, 100_000: 65.1},
    }
    for name, rates in wanted.items():
        path = shared / "traces" / "mooncake" / f"{name}_trace.jsonl"
        points = inspected(traces("inspect", path, "--json"))["reuse"]["points"]
        found = {point["blocks"]: 100 * point["lru"] for point in points}
        met = rates.keys() & found.keys()
        assert len(met) >= 4, name
        for blocks_ in met:
            assert found[blocks_] == pytest.approx(rates[blocks_], abs=0.06), name


def test_real_servegen_clients_generate(shared: Path, traces: Traces, tmp_path: Path) -> None:
    packed = shared / "traces" / "servegen" / "servegen_deepseek-r1_and_mm-image.tar.gz"
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = next(tmp_path.rglob("deepseek-r1"))
    said = traces("generate", "--servegen", folder, "--duration", 120, "--out", "s.jsonl")
    assert said.code == 0
    assert "73 clients" in said.out
    assert read_trace("s.jsonl", strict=True).num_rows > 500
