"""The command line under bad input, odd input and all that it promises."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from catalog import gpu_names
from records.columns import STATUSES
from records.metrics import identity_errors
from records.run import PICTURES, RECORD_FILES, RunRecord
from simulator import pictures
from simulator.__main__ import main as simulator_main
from simulator.report import format_seconds, render
from simulator.run import RunResult, run
from simulator.settings import Options, resolve
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
from tests.simulation.helpers import assert_same_record
from traces import read_trace

LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [row(0, 100, 10, id="a"), row(0.5, 100, 10, id="b")]
    return write_trace(tmp_path_factory.mktemp("two") / "two.jsonl", rows)


@pytest.fixture(scope="module")
def burst(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [row(round(0.01 * i, 2), 64, 80, id=f"r{i}") for i in range(40)]
    return write_trace(tmp_path_factory.mktemp("burst") / "burst.jsonl", rows)


# -- input that cannot be run ------------------------------------------------------------------


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    is_refused(command("--trace", tmp_path / "nope.jsonl"), "nope.jsonl", "no such file")


def test_a_trace_that_is_empty(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    is_refused(command("--trace", tmp_path / "empty.jsonl"), "empty.jsonl", "is empty")


def test_a_trace_that_is_a_folder(tmp_path: Path) -> None:
    is_refused(command("--trace", tmp_path), str(tmp_path), "folder")


@pytest.mark.parametrize("content", [bytes(range(256)) * 20, b"\n\n\n", b"PK\x03\x04" * 99, b"{"])
def test_a_trace_that_is_no_trace(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(content)
    is_refused(command("--trace", tmp_path / "junk"), "junk")


def test_a_trace_without_one_good_row(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "bad.jsonl", [row(-1, 10, 3), row(0, 0, 3)])
    is_refused(command("--trace", trace), "no row can be used", "line 1", "line 2")


def test_no_trace_at_all() -> None:
    is_refused(command(), "--trace")
    is_refused(command("--trace"), "--trace")


def test_an_unknown_model_is_told_the_closest_names(two: Path) -> None:
    is_refused(command("--trace", two, "--model", "lama-3.1-8b"), "lama-3.1-8b", " llama-3.1-8b,")


def test_an_unknown_gpu_is_told_the_names(two: Path) -> None:
    is_refused(command("--trace", two, "--gpu", "h1000-sxm"), "h1000-sxm", " h100-sxm")
    is_refused(command("--trace", two, "--gpu", "abacus"), *gpu_names())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--kv-gb 0.0001", ("not one block", "2,097,152 bytes")),
        ("--kv-gb 1MB", ("not one block",)),
        ("--kv-gb 0", ("--kv-gb", "0")),
        ("--kv-gb -1", ("--kv-gb", "-1")),
        ("--kv-gb nan", ("--kv-gb", "nan")),
        ("--kv-gb inf", ("--kv-gb", "inf")),
        ("--kv-gb lots", ("--kv-gb", "lots", "GiB")),
        ("--kv-gb 60XB", ("--kv-gb", "60XB")),
        ("--num-gpu-blocks 1", ("--num-gpu-blocks", "null block")),
        ("--num-gpu-blocks -7", ("--num-gpu-blocks", "-7")),
        ("--num-gpu-blocks 1.5", ("--num-gpu-blocks", "1.5")),
        ("--gpu-memory-utilization 0", ("memory", "utilization")),
        ("--gpu-memory-utilization 1.1", ("memory", "utilization", "1.1")),
        ("--gpu-memory-utilization nan", ("memory", "utilization", "nan")),
        ("--gpu-memory-utilization 0.1", ("leaves no memory", "h100-sxm")),
        ("--model llama-3.1-405b", ("leaves no memory", "--tensor-parallel-size")),
        ("--block-size 0", ("block", "size", "0")),
        ("--block-size -16", ("block", "size", "-16")),
        ("--watermark 1", ("--watermark", "1")),
        ("--watermark -0.1", ("--watermark", "-0.1")),
        ("--watermark nan", ("--watermark", "nan")),
        ("--max-num-seqs 0", ("max_num_seqs", "0")),
        ("--max-num-seqs many", ("--max-num-seqs", "many")),
        ("--max-num-batched-tokens -1", ("max_num_batched_tokens", "-1")),
        ("--max-model-len 1", ("max_model_len", "1")),
        ("--long-prefill-token-threshold -1", ("long_prefill_token_threshold", "-1")),
        ("--no-enable-chunked-prefill --max-num-batched-tokens 64", ("chunked prefill", "64")),
        ("--tp 0", ("TP", "0")),
        ("--tp 3", ("TP", "3")),
        ("--weight-dtype fp7", ("--weight-dtype", "fp7", "bf16")),
        ("--kv-dtype fp7", ("--kv-cache-dtype", "fp7", "bf16")),
        ("--scheduling-policy lifo", ("lifo", "fcfs", "priority")),
        ("--scheduling-policy no.such.module:Policy", ("no.such.module:Policy",)),
        ("--scheduling-policy os:getcwd", ("os:getcwd", "queue_key")),
        ("--scheduling-policy :", ("policy", "':'")),
        ("--preemption-mode drop", ("preemption_mode", "drop")),
        ("--preemption-mode swap", ("--swap-space",)),
        ("--preemption-mode swap --swap-space 1KB", ("--swap-space", "not one block")),
        ("--preemption-mode swap --swap-space x", ("--swap-space", "x")),
        ("--parallel-sampling both", ("parallel_sampling", "both")),
        ("--cost-model guess", ("guess", "physical")),
        ("--cost-model constant:-1ms", ("constant:-1ms",)),
        ("--cost-model constant:0", ("must take time",)),
        ("--cost-model constant:nan", ("constant:nan",)),
        ("--cost-model constant:1e999999999999999999999", ("constant:1e999999999999999999999",)),
        ("--cost-model linear:base=1ms", ("per_token",)),
        ("--max-tokens 0", ("--max-tokens", "0")),
        ("--deadline 0", ("--deadline", "0")),
        ("--deadline -5", ("--deadline", "-5")),
        ("--deadline nan", ("--deadline", "nan")),
        ("--deadline soon", ("--deadline", "soon")),
        ("--warm-start -1", ("--warm-start", "-1")),
        ("--until 0", ("--until", "0")),
        ("--until nan", ("--until", "nan")),
        ("--format xml", ("csv", "native", "azure", "mooncake")),
        ("--format azure", ("two.jsonl", "TIMESTAMP")),
        ("--slo fast", ("fast", "ttft<=500ms")),
        ("--slo ttft<=-1", ("ttft<=-1",)),
        ("--slo speed<=1s", ("speed", "ttft")),
        ("--model two.jsonl", ("two.jsonl",)),
        ("--model no/such/config.json", ("no/such/config.json",)),
        ("--gpu no/such.json", ("no/such.json",)),
    ],
)
def test_a_value_that_cannot_be_run(flags: str, words: tuple[str, ...], two: Path) -> None:
    is_refused(command("--trace", two, *flags.split()), *words)


@pytest.mark.parametrize(
    "flags",
    [
        "--deadline inf",
        "--deadline 1e300",
        "--until inf",
        "--until 1e300",
        "--cost-model constant:1e12",
        "--cost-model constant:1e30",
        "--max-num-batched-tokens 99999999999999999999",
        "--max-num-seqs 99999999999999999999",
        "--max-model-len 99999999999999999999",
        "--max-tokens 99999999999999999999",
        "--long-prefill-token-threshold 99999999999999999999",
        "--num-gpu-blocks 99999999999999999999",
        "--warm-start 99999999999999999999",
        "--block-size 99999999999999999999",
        "--kv-gb 99999999999999999999",
    ],
)
def test_numbers_beyond_64_bits_run_or_are_refused(flags: str, two: Path) -> None:
    ran = command("--trace", two, "--kv-gb", 60, *flags.split())
    if "--num-gpu-blocks" in flags:
        ran = command("--trace", two, *flags.split())
    if ran.code == 0:
        assert "2 completed" in ran.out
    else:
        is_refused(ran)


def test_a_config_that_is_broken(two: Path, tmp_path: Path) -> None:
    for content in ("", "{", "[]", "{}", '{"num_hidden_layers": -1}'):
        (tmp_path / "config.json").write_text(content)
        is_refused(command("--trace", two, "--model", tmp_path / "config.json"), "config.json")
        (tmp_path / "gpu.json").write_text(content)
        is_refused(command("--trace", two, "--gpu", tmp_path / "gpu.json"), "gpu.json")


def test_a_name_with_a_zero_byte(two: Path) -> None:
    is_refused(command("--trace", "a\0b"))
    is_refused(command("--trace", two, "--model", "a\0b"))
    is_refused(command("--trace", two, "--out", "a\0b"))


def test_a_policy_that_admits_nobody_ends_the_run(two: Path) -> None:
    ran = command("--trace", two, "--scheduling-policy", f"{__name__}:NeverAdmits", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.summary["requests"]["unfinished"] == 2


class NeverAdmits:
    """A policy that lets nobody in."""

    name = "never"

    def queue_key(self, sequence: Any) -> tuple[int]:
        return (sequence.number,)

    def victim(self, running: Any, requester: Any) -> int:
        return 0

    def admit(self, sequence: Any, state: Any) -> bool:
        return False

    def displace(self, head: Any, running: Any) -> None:
        return None


def test_a_warm_start_that_cannot_go_on_does_not_hang(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.jsonl", [row(0, 4, 2, token_ids=[1, 2, 3, 4])])
    policy = f"{__name__}:NeverAdmits"
    try:
        ran = python(
            *("-m", "simulator", "--trace", "t.jsonl", "--json"),
            *("--scheduling-policy", policy, "--warm-start", 1),
            cwd=tmp_path,
            timeout=10,
        )
    except subprocess.TimeoutExpired:
        pytest.fail("warm_up() spins for ever where a plan computes nothing")
    assert ran.returncode in (0, 2)
    assert "Traceback" not in ran.stderr


# -- folders that cannot be written ------------------------------------------------------------


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_an_output_folder_with_a_file_in_the_way(two: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    is_refused(command("--trace", two, "--out", tmp_path / "file"), "file", "not a folder")
    is_refused(command("--trace", two, "--out", tmp_path / "file" / "run"), "not a folder")
    is_refused(command("--trace", two, "--out", tmp_path / "file" / "a" / "b"), "not a folder")
    assert listing(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_an_output_folder_where_nobody_may_write(two: Path) -> None:
    # Tests may run as root, whom permissions do not stop; /proc does.
    if not Path("/proc/self").exists():
        pytest.skip("no /proc here")
    is_refused(command("--trace", two, "--out", "/proc/kvplan/run"), "/proc/kvplan/run")
    is_refused(command("--trace", two, "--out", "/proc/self/run"), "/proc/self/run")


def test_an_output_folder_that_belongs_to_somebody_else(two: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    is_refused(command("--trace", two, "--out", tmp_path), "not empty", "not a run record")
    assert listing(tmp_path) == ["thesis.tex"]


def test_the_folder_is_tried_before_the_run(two: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = command("--trace", tmp_path / "nope", "--model", "none", "--out", tmp_path / "file")
    is_refused(ran, "not a folder")


def test_a_run_that_cannot_start_leaves_no_folder(two: Path, tmp_path: Path) -> None:
    is_refused(command("--trace", two, "--kv-gb", "x", "--out", tmp_path / "a" / "b"))
    is_refused(command("--trace", tmp_path / "nope", "--out", tmp_path / "a" / "b"))
    assert listing(tmp_path) == []


@pytest.mark.parametrize("failing", ["write_pictures"])
def test_a_disk_that_fills_up_leaves_nothing_behind(
    failing: str, two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(record: Any, folder: Path, **_: Any) -> None:
        (folder / "latency.png").write_bytes(b"half a pict")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pictures, failing, full)
    ran = command("--trace", two, "--out", tmp_path / "a" / "run")
    is_refused(ran, "No space left on device", str(tmp_path / "a" / "run"))
    assert listing(tmp_path) == []


# -- single bad rows ---------------------------------------------------------------------------

BAD_ROWS = {
    "broken JSON": ('{"arrival_s": 1, "prompt_tok', "not JSON"),
    "not an object": ("[1, 2]", "not a JSON object"),
    "negative": ('{"arrival_s": 1, "prompt_tokens": -5, "output_tokens": 3}', "negative"),
    "negative time": ('{"arrival_s": -1, "prompt_tokens": 5, "output_tokens": 3}', "negative"),
    "NaN": ('{"arrival_s": NaN, "prompt_tokens": 5, "output_tokens": 3}', "not a finite number"),
    "infinite": ('{"arrival_s": 1, "prompt_tokens": Infinity, "output_tokens": 3}', "finite"),
    "zero": ('{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 0}', "zero"),
    "missing": ('{"arrival_s": 1, "prompt_tokens": 5}', "output_tokens missing"),
    "duplicate id": (
        '{"id": "good", "arrival_s": 1, "prompt_tokens": 5, "output_tokens": 3}',
        "duplicate id",
    ),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_counted_and_named_and_the_run_goes_on(kind: str, tmp_path: Path) -> None:
    line, reason = BAD_ROWS[kind]
    trace = write_trace(tmp_path / "t.jsonl", [row(0, 5, 3, id="good"), line, row(2, 5, 3)])
    ran = command("--trace", trace)
    assert (ran.code, ran.err) == (0, "")
    skipped = ran.out.split("skipped")[1].split("\n\n")[0]
    assert reason in skipped
    assert "1 row, line 2" in one_line(skipped)
    assert "2 completed, 0 refused, 0 timed out, 0 aborted, 0 unfinished; 2 in all" in ran.out

    document = command("--trace", trace, "--json").document
    (entry,) = document["settings"]["trace_rows_skipped"]
    assert reason in entry["reason"]
    assert (entry["rows"], entry["lines"]) == (1, [2])
    assert document["settings"]["trace_rows"] == 3
    assert document["summary"]["requests"]["total"] == 2

    is_refused(command("--trace", trace, "--strict"), "line 2", reason)


def test_unsorted_arrivals_are_sorted_and_named(tmp_path: Path) -> None:
    rows = [row(3, 5, 3, id="c"), row(1, 5, 3, id="a"), row(2, 5, 3, id="b")]
    trace = write_trace(tmp_path / "t.jsonl", rows)
    ran = command("--trace", trace)
    assert ran.code == 0
    assert "Sorted by arrival: 2 rows below later ones (lines 2, 3)" in one_line(ran.out)
    result = simulated(trace)
    order = np.argsort(result.record.requests["first_scheduled_ns"])
    assert [result.record.requests["id"][i] for i in order] == ["a", "b", "c"]
    is_refused(command("--trace", trace, "--strict"), "line 2", "arrives before")


def test_a_prompt_that_is_too_long_is_refused_and_counted(tmp_path: Path) -> None:
    rows = [row(0, 5000, 3, id="model"), row(0, 900, 3, id="pool"), row(0, 50, 3, id="fits")]
    trace = write_trace(tmp_path / "t.jsonl", rows)
    flags = ("--max-model-len", 4096, "--num-gpu-blocks", 51)
    ran = command("--trace", trace, *flags)
    assert (ran.code, ran.err) == (0, "")
    assert "1 completed, 2 refused" in ran.out
    text = one_line(ran.out)
    assert "its prompt has 5000 tokens, max_model_len 4096 leaves room for at most 4095" in text
    assert "900 prompt tokens need 57 blocks, the pool has 50" in text
    summary = command("--trace", trace, *flags, "--json").summary
    assert (summary["requests"]["refused"], summary["ttft_s"]["count"]) == (2, 1)


def test_a_request_that_can_never_be_served_is_fatal_under_strict(tmp_path: Path) -> None:
    """As any other row that would be left out."""
    rows = [row(0, 50, 3), row(0, 5000, 3, id="long")]
    trace = write_trace(tmp_path / "t.jsonl", rows)
    assert command("--trace", trace, "--max-model-len", 4096).code == 0
    is_refused(command("--trace", trace, "--max-model-len", 4096, "--strict"), "long", "4096")


def test_a_request_that_outgrew_the_pool_is_explained(tmp_path: Path) -> None:
    """Nobody aborted it: the report says what did."""
    trace = write_trace(tmp_path / "t.jsonl", [row(0, 100, 100, id="greedy"), row(0, 5, 3)])
    result = simulated(trace, num_gpu_blocks=11)
    greedy = row_of(result, "greedy")
    assert (greedy["output_tokens"], greedy["finish_reason"]) == (61, "kv_exhausted")
    ran = command("--trace", trace, "--num-gpu-blocks", 11)
    assert "1 aborted" in ran.out
    assert "greedy" in ran.out


@pytest.mark.parametrize("flags", ["--max-model-len 120", "--max-tokens 30"])
def test_outputs_that_were_cut_short_are_counted(flags: str, tmp_path: Path) -> None:
    """A run that leaves out half of the tokens is not simply a faster one."""
    trace = write_trace(tmp_path / "t.jsonl", [row(0, 100, 100), row(0, 100, 10)])
    ran = command("--trace", trace, *flags.split())
    assert "2 completed" in ran.out
    assert re.search(r"\bcut\b", ran.out), "nothing says that an output was cut short"


def test_every_request_refused_still_prints_the_whole_report(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [row(i, 5000, 3) for i in range(5)])
    flags = ("--max-model-len", 4096, "--slo", "ttft<=500ms,tpot<=50ms")
    ran = command("--trace", trace, *flags)
    assert (ran.code, ran.err) == (0, "")
    served = command("--trace", write_trace(tmp_path / "ok.jsonl", [row(0, 5, 3)]), *flags)
    without = [heading for heading in headings(ran.out) if heading != "Refused"]
    assert without == headings(served.out)
    assert "0 completed, 5 refused" in ran.out
    assert "met by 0.0% of all requests" in one_line(ran.out)
    assert "and 2 more" in ran.out

    summary = command("--trace", trace, *flags, "--json").summary
    assert summary["requests"]["refused"] == 5
    assert summary["goodput"]["attainment"] == 0
    for name in LATENCIES:
        assert summary[name] == dict.fromkeys(summary[name]) | {"count": 0}


def test_every_request_refused_can_be_written_and_compared(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [row(i, 5000, 3) for i in range(5)])
    ran = command("--trace", trace, "--max-model-len", 4096, "--out", tmp_path / "run")
    assert (ran.code, ran.err) == (0, "")
    assert RunRecord.read(tmp_path / "run").summary["requests"]["refused"] == 5
    assert command("compare", tmp_path / "run", tmp_path / "run").code == 0


def test_a_run_in_which_nothing_refused_is_not_told_to_see_the_refusals(two: Path) -> None:
    ran = command("--trace", two, "--cost-model", "constant:1s", "--until", 0.1)
    assert ran.code == 0
    assert "2 unfinished" in ran.out
    assert "see the refusals" not in ran.out


# -- what is written ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(burst: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Ran]:
    """Records of a tight and of a roomy run, and what the first printed."""
    folder = tmp_path_factory.mktemp("runs")
    tight = command(
        *(
            "--trace",
            burst,
            "--num-gpu-blocks",
            41,
            "--json",
            "--no-bands",
            "--out",
            folder / "tight",
        )
    )
    roomy = command("--trace", burst, "--kv-gb", 20, "--no-steps", "--out", folder / "roomy")
    assert (tight.code, tight.err, roomy.code, roomy.err) == (0, "", 0, "")
    assert f"Written: {folder / 'roomy'}" in roomy.out
    return folder / "tight", folder / "roomy", tight


def test_the_record_reads_back_as_what_was_run(
    written: tuple[Path, Path, Ran], burst: Path
) -> None:
    tight, _, printed = written
    record = RunRecord.read(tight)
    assert_same_record(record, run(resolve(Options(num_gpu_blocks=41)), read_trace(burst)).record)
    assert printed.document == {"settings": record.settings, "summary": record.summary}


def test_the_record_is_complete(written: tuple[Path, Path, Ran]) -> None:
    tight, roomy, _ = written
    images = {f"{name}.{kind}" for name in PICTURES for kind in ("png", "svg")}
    assert set(listing(tight)) == {*RECORD_FILES, *images}
    assert all((tight / name).stat().st_size > 1000 for name in images)
    assert set(listing(roomy)) == {*RECORD_FILES, *images} - {"steps.parquet"}
    assert RunRecord.read(roomy).steps is None
    assert listing(tight.parent)[0] == "roomy", "something half-written remains"


def test_a_record_is_replaced_whole(
    written: tuple[Path, Path, Ran], two: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command("--trace", two, "--out", out, "--cost-model", "constant:1ms")
    ran = command("--trace", two, "--out", out, "--cost-model", "constant:2ms", "--no-steps")
    assert ran.code == 0
    record = RunRecord.read(out)
    assert record.settings["cost_model"] == "constant:2ms"
    assert not (out / "steps.parquet").exists()
    (out / "notes.txt").write_text("mine")
    is_refused(command("--trace", two, "--out", out), "notes.txt")
    assert RunRecord.read(out).settings["cost_model"] == "constant:2ms"


# -- compare -----------------------------------------------------------------------------------


def test_compare_two_records(written: tuple[Path, Path, Ran]) -> None:
    tight, roomy, _ = written
    ran = command("compare", tight, roomy)
    assert (ran.code, ran.err) == (0, "")
    assert "num_blocks" in ran.out
    ttft = next(line for line in ran.out.splitlines() if line.startswith("TTFT mean"))
    assert ttft.endswith("better")
    back = command("compare", roomy, tight)
    assert next(li for li in back.out.splitlines() if li.startswith("TTFT mean")).endswith("worse")

    document = command("compare", tight, roomy, "--json").document
    entry = document["metrics"]["ttft_s.mean"]
    assert entry["a"] == RunRecord.read(tight).summary["ttft_s"]["mean"]
    assert entry["b"] == RunRecord.read(roomy).summary["ttft_s"]["mean"]
    assert document["settings"]["num_blocks"]["a"] == 40


def test_compare_a_record_with_itself(written: tuple[Path, Path, Ran]) -> None:
    tight, _, _ = written
    ran = command("compare", tight, tight)
    assert ran.code == 0
    assert "No setting differs" in ran.out
    assert "better" not in ran.out
    assert "worse" not in ran.out


def test_compare_refuses_what_is_no_record(written: tuple[Path, Path, Ran], tmp_path: Path) -> None:
    tight, _, _ = written
    is_refused(command("compare", tight, tmp_path / "nope"), "nope", "no such folder")
    is_refused(command("compare", tmp_path, tight), str(tmp_path), "run.json")
    (tmp_path / "file").touch()
    is_refused(command("compare", tight, tmp_path / "file"), "file", "not a folder")
    is_refused(command("compare", tight), "RUN_B")
    is_refused(command("compare", tight, tight, tight), "unrecognized")
    is_refused(command("compare", tight, tight, "--trace", "x"), "unrecognized")


@pytest.mark.parametrize("name", ["run.json", "requests.parquet", "gaps.parquet", "summary.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "junk"])
def test_compare_refuses_a_damaged_record(
    name: str, damage: str, written: tuple[Path, Path, Ran], tmp_path: Path
) -> None:
    tight, _, _ = written
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in RECORD_FILES:
        (broken / file).write_bytes((tight / file).read_bytes())
    if damage == "missing":
        (broken / name).unlink()
    elif damage == "cut":
        (broken / name).write_bytes((tight / name).read_bytes()[:-40])
    else:
        (broken / name).write_bytes(b"\x00\xff junk")
    is_refused(command("compare", tight, broken), name)


def test_compare_refuses_another_version(written: tuple[Path, Path, Ran], tmp_path: Path) -> None:
    tight, _, _ = written
    for file in RECORD_FILES:
        (tmp_path / file).write_bytes((tight / file).read_bytes())
    settings = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(settings | {"format": "kvplan-run/99"}))
    is_refused(command("compare", tight, tmp_path), "kvplan-run/99")


# -- limits, and the change that would help ----------------------------------------------------


def test_a_limit_of_the_run_that_does_not_hold_is_exit_code_1(two: Path) -> None:
    ran = command("--trace", two, "--slo", "ttft:p99<=1ms")
    assert (ran.code, ran.err) == (1, "")
    assert "does not hold" in ran.out
    (entry,) = command("--trace", two, "--slo", "ttft:p99<=1ms", "--json").summary["goodput"][
        "slo"
    ]["statistics"]
    assert entry["holds"] is False
    assert command("--trace", two, "--slo", "ttft:p99<=1s").code == 0
    # A limit of each request is counted, not judged.
    assert command("--trace", two, "--slo", "ttft<=1ms").code == 0
    assert command("--trace", two, "--slo", "ttft<=1ms,itl:max<=1ms").code == 1
    assert command("--trace", two, "--slo", "ttft<=1ms,itl:max<=10s").code == 0


@pytest.mark.parametrize("limit", ["ttft:p99<=500ms", "queue:p99.99<=100ms", "ttft:mean<=1s"])
def test_a_limit_and_its_result_are_two_words(limit: str, two: Path) -> None:
    ran = command("--trace", two, "--slo", limit)
    assert f"{limit} holds" in one_line(ran.out.split("Goodput")[1])


def test_nearly_all_is_not_all(tmp_path: Path) -> None:
    """One failure among 3,000 is not 100.0 %."""
    rows = [row(i * 0.01, 5, 1) for i in range(2999)] + [row(40, 10**6, 1)]
    trace = write_trace(tmp_path / "t.jsonl", rows)
    ran = command("--trace", trace, "--cost-model", "constant:1ms", "--slo", "ttft<=1s")
    met = one_line(ran.out.split("Goodput")[1].split("\n\n")[0])
    assert "99.9" in met
    assert "100.0%" not in met
    assert "100.0% of the requests" not in one_line(ran.out)


def test_the_suggested_change_is_tried(burst: Path) -> None:
    ran = command("--trace", burst, "--max-num-seqs", 2, "--try-change")
    assert (ran.code, ran.err) == (0, "")
    assert "Tried: --max-num-seqs" in ran.out
    assert "max_num_seqs" in ran.out.split("Settings that differ")[1]


@pytest.mark.parametrize(
    "flags",
    [
        "--num-gpu-blocks 21",
        "--kv-gb 0.04",
        "--gpu t4 --gpu-memory-utilization 0.9 --model llama-3.2-1b --max-model-len 4096",
        "--no-enable-chunked-prefill --max-model-len 256 --max-num-batched-tokens 256",
        "--cost-model no-cache --num-gpu-blocks 21",
        "--preemption-mode swap --swap-space 1 --num-gpu-blocks 21",
        "--until 0.001",
    ],
)
def test_a_change_can_be_tried_whatever_was_asked(flags: str, burst: Path) -> None:
    """The flags of the change must not contradict those that were given."""
    plain = command("--trace", burst, *flags.split())
    ran = command("--trace", burst, *flags.split(), "--try-change")
    assert (ran.code, ran.err) == (plain.code, "")
    assert ran.out.startswith(plain.out)
    assert "\nTried: " in ran.out


def test_a_change_that_is_not_one_of_flags_is_not_tried(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [row(0, 10**7, 3)])  # no setting serves that
    ran = command("--trace", trace, "--try-change")
    assert ran.code == 0
    assert "Tried: nothing" in ran.out


# -- options in combination --------------------------------------------------------------------


def test_parallel_samples_share_their_prompt(tmp_path: Path) -> None:
    rows = [row(0, 100, 20, id="four", n=4), row(0, 100, 20, id="one")]
    trace = write_trace(tmp_path / "n.jsonl", rows)
    fork = simulated(trace, parallel_sampling="fork")
    separate = simulated(trace, parallel_sampling="separate")
    alone = simulated(trace, parallel_sampling="separate", enable_prefix_caching=False)
    for result in (fork, separate, alone):
        four = row_of(result, "four")
        assert (four["num_samples"], four["output_tokens"], four["decode_gaps"]) == (4, 80, 76)
        assert four["status"] == "completed"
        assert result.record.gaps.count == 76 + 19
        assert identity_errors(result.record.requests, result.record.gaps) == []
    # 6 full blocks once or four times, and ceil(119 / 16) - 6 = 2 of each of its own.
    used = [
        int(result.record.steps["blocks_used"].max())
        for result in (fork, separate, alone)
        if result.record.steps is not None
    ]
    assert used == [6 + 4 * 2 + 8, 6 + 4 * 2 + 8, 4 * 8 + 8]
    ran = command("--trace", trace)
    assert "2 completed" in ran.out


def test_a_refused_group_says_how_many_outputs_it_wanted(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "n.jsonl", [row(0, 100, 20, n=300)])
    assert "n = 300" in command("--trace", trace, "--max-num-seqs", 256).out


def test_urgent_requests_go_first_under_the_priority_policy(tmp_path: Path) -> None:
    rows = [row(0, 16, 50, id="first", priority=5)]
    rows += [row(0.01, 16, 50, id=f"p{p}", priority=p) for p in (3, 1, 2)]
    trace = write_trace(tmp_path / "p.jsonl", rows)
    order = {}
    for policy in ("fcfs", "priority"):
        requests = simulated(trace, max_num_seqs=1, scheduling_policy=policy).record.requests
        start = requests["first_scheduled_ns"]
        order[policy] = [requests["id"][i] for i in np.argsort(start)]
        assert requests["priority"].tolist().count(5) == 1
    assert order == {"fcfs": ["first", "p3", "p1", "p2"], "priority": ["first", "p1", "p2", "p3"]}


def test_without_a_cache_every_token_costs_the_whole_context(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [row(100 * i, 2000, 50) for i in range(3)])
    cached = command("--trace", trace, "--json").summary
    without = command("--trace", trace, "--json", "--cost-model", "no-cache").summary
    # A step recomputes 2,000 tokens instead of one: compute-bound, not bandwidth-bound.
    assert without["tpot_s"]["mean"] > 5 * cached["tpot_s"]["mean"]
    assert without["ttft_s"]["mean"] == pytest.approx(cached["ttft_s"]["mean"], rel=0.05)
    assert "no KV cache" in command("--trace", trace, "--cost-model", "no-cache").out


def test_memory_that_was_granted_is_not_warned_about(two: Path) -> None:
    """More than the default share was asked for, and the report need not say so again."""
    ran = command("--trace", two, "--gpu-memory-utilization", 0.95)
    assert ran.code == 0
    assert "needs gpu_memory_utilization" not in one_line(ran.out)


def test_memory_that_is_not_there_is_warned_about(two: Path) -> None:
    assert "more than it has" in one_line(command("--trace", two, "--kv-gb", 70).out)
    assert "needs gpu_memory_utilization" in one_line(command("--trace", two, "--kv-gb", 60).out)
    assert "beware memory:" not in one_line(command("--trace", two, "--kv-gb", 20).out)


def test_swap_space_is_used_before_work_is_thrown_away(burst: Path) -> None:
    flags = ("--trace", burst, "--num-gpu-blocks", 41, "--json")
    thrown = command(*flags).summary
    swapped = command(*flags, "--preemption-mode", "swap", "--swap-space", 4).summary
    assert thrown["kv"]["recomputed_tokens"] > 0
    assert swapped["kv"]["preemptions"] > 0
    assert swapped["kv"]["recomputed_tokens"] == 0


def test_the_shipped_trace_is_found_by_its_name_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--trace", "chat.jsonl", "--until", 20, "--kv-gb", 60)
    shipped = command(*flags)
    assert shipped.code == 0
    assert "the sample that ships with kvplan" in one_line(shipped.out)
    write_trace(tmp_path / "chat.jsonl", [row(0, 5, 3)])
    own = command(*flags)
    assert "ships" not in own.out
    assert "1 in all" in own.out
    is_refused(command("--trace", "no/chat.jsonl"), "no such file")


# -- output that goes nowhere, and terminals of all kinds --------------------------------------

COMMAND_LINES = {
    "simulator": ("simulator", "--trace", "two.jsonl"),
    "simulator --json": ("simulator", "--trace", "two.jsonl", "--json"),
    "simulator --help": ("simulator", "--help"),
    "compare": ("simulator", "compare", "tight", "roomy"),
    "blockmanager": ("blockmanager", "--model", "llama-2-7b", "--context", "4096"),
    "traces": ("traces", "inspect", "two.jsonl"),
}


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_a_reader_that_has_seen_enough_gets_no_traceback(
    name: str, two: Path, written: tuple[Path, Path, Ran], tmp_path: Path
) -> None:
    """As in ``| head -1``; here the reader is gone from the start."""
    tight, roomy, _ = written
    for path in (two, tight, roomy):
        (tmp_path / path.name).symlink_to(path)
    reading, writing = os.pipe()
    os.close(reading)
    ran = python(
        *("-m", *COMMAND_LINES[name]),
        cwd=tmp_path,
        capture_output=False,
        stdout=writing,
        stderr=subprocess.PIPE,
    )
    os.close(writing)
    assert ran.stderr == ""
    assert ran.returncode == 0


def test_a_disk_full_of_standard_output_is_one_line(two: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with Path("/dev/full").open("w") as full:
        ran = python(
            *("-m", "simulator", "--trace", two.name),
            cwd=two.parent, capture_output=False, stdout=full, stderr=subprocess.PIPE,
        )  # fmt: skip
    assert "Traceback" not in ran.stderr
    assert ran.returncode not in (0, 1)  # 1 would say that a limit does not hold


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_a_terminal_of_any_encoding_gets_the_report(encoding: str, two: Path) -> None:
    ran = python(
        *("-m", "simulator", "--trace", two.name),
        cwd=two.parent,
        env={"PYTHONIOENCODING": encoding},
        encoding=encoding,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "2 completed" in ran.stdout
    assert ("█" in ran.stdout) == (encoding == "utf-8")


def test_planning_loads_nothing_heavy(two: Path) -> None:
    """No table, no picture: no pandas, no pyarrow, no matplotlib, and never torch."""
    code = (
        "import sys; from simulator.__main__ import main; "
        f"main(['--trace', {two.name!r}, '--json']); "
        "heavy = {'pandas', 'pyarrow', 'matplotlib', 'torch'} & set(sys.modules); "
        "sys.exit(f'loaded {sorted(heavy)}' if heavy else 0)"
    )
    ran = python("-c", code, cwd=two.parent)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_report_keeps_to_its_width(two: Path, burst: Path) -> None:
    for args in (("--trace", two), ("--trace", burst, "--num-gpu-blocks", 41)):
        too_long = [line for line in command(*args).out.splitlines() if len(line) > 120]
        assert too_long == []


@pytest.mark.parametrize("value", [0.9996e-6, 0.9996e-3, 0.9996, 9.996, 99.96, 999.6, 12345.6])
def test_times_read_like_times(value: float) -> None:
    """Never 1e+03 ms."""
    text = format_seconds(value)
    assert "e" not in text
    number, unit = text.split()
    back = float(number.replace(",", "")) * {"us": 1e-6, "ms": 1e-3, "s": 1}[unit]
    assert back == pytest.approx(value, rel=0.006)


def test_no_number_is_in_scientific_notation(two: Path, tmp_path: Path) -> None:
    many = write_trace(tmp_path / "many.jsonl", [row(0.0001 * i, 5, 2) for i in range(2000)])
    for args in (("--trace", two), ("--trace", many, "--cost-model", "constant:1us")):
        found = re.findall(r"\S*\de[+-]\d\S*", command(*args).out)
        assert found == []


# -- help --------------------------------------------------------------------------------------


class _GotParser(Exception):  # noqa: N818
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(package: str, monkeypatch: pytest.MonkeyPatch, *argv: str) -> argparse.ArgumentParser:
    """The parser that a command line makes, whatever it is called there."""

    def stop(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _GotParser(self)

    module = importlib.import_module(f"{package}.__main__")
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(_GotParser) as got:
            module.main(list(argv))
    return got.value.parser


def with_commands(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
    """A parser and those of its commands, each with the words that lead there."""
    yield [], parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                for words, found in with_commands(child):
                    yield [name, *words], found


@pytest.mark.parametrize(
    ("package", "argv"),
    [
        ("simulator", ()),
        ("simulator", ("compare",)),
        ("blockmanager", ()),
        ("scheduler", ()),
        ("traces", ()),
    ],
)
def test_help_mentions_every_flag(
    package: str, argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"{package}.__main__")
    for words, parser in with_commands(parser_of(package, monkeypatch, *argv)):
        ran = command(*argv, *words, "--help", main=module.main)
        assert (ran.code, ran.err) == (0, "")
        assert f"python -m {package}" in ran.out
        for action in parser._actions:
            for name in action.option_strings:
                assert name in ran.out
            assert action.help or not action.option_strings, f"{action.dest} has no help"


@pytest.mark.parametrize(
    ("package", "argv"),
    [
        ("simulator", ("--trace", "x", "--bogus")),
        ("simulator", ("compare", "a", "b", "--bogus")),
        ("blockmanager", ("--bogus",)),
        ("scheduler", ("replay", "x", "--bogus")),
        ("traces", ("inspect", "x", "--bogus")),
    ],
)
def test_an_unknown_flag_is_one_line_in_every_command(package: str, argv: tuple[str, ...]) -> None:
    module = importlib.import_module(f"{package}.__main__")
    is_refused(command(*argv, main=module.main), "--bogus")


def test_an_unknown_command_is_named() -> None:
    is_refused(command("plot", "a", "b"), "plot")


def test_help_names_the_other_command() -> None:
    assert "compare" in command("--help").out
    assert "exit code" in command("--help").out.lower()


# -- any small trace ---------------------------------------------------------------------------


@st.composite
def rows_of_any_kind(draw: st.DrawFn) -> list[dict[str, Any]]:
    times = draw(st.lists(st.integers(0, 40), min_size=1, max_size=14))
    rows = []
    for index, time in enumerate(sorted(times)):
        prompt = draw(st.integers(1, 60))
        fields: dict[str, Any] = {"id": f"r{index}", "priority": draw(st.integers(0, 2))}
        if draw(st.booleans()):
            stem = draw(st.integers(0, 2))
            fields["token_ids"] = [stem] * prompt
        if draw(st.integers(0, 3)) == 0:
            fields["n"] = draw(st.integers(2, 4))
        if draw(st.integers(0, 3)) == 0:
            fields["deadline_s"] = draw(st.integers(1, 60)) / 100
        if draw(st.booleans()):
            fields["max_tokens"] = draw(st.integers(1, 50))
        rows.append(row(time / 100, prompt, draw(st.integers(1, 40)), **fields))
    return rows


options_of_any_kind = st.fixed_dictionaries(
    {
        "num_gpu_blocks": st.integers(2, 40),
        "block_size": st.sampled_from([4, 16]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 100),
        "max_model_len": st.integers(20, 110),
        "long_prefill_token_threshold": st.sampled_from([0, 8]),
        "enable_prefix_caching": st.booleans(),
        "scheduler_reserve_full_isl": st.booleans(),
        "scheduling_policy": st.sampled_from(
            ["fcfs", "fcfs-fewest-lost", "priority", "priority-preemptive"]
        ),
        "watermark": st.sampled_from([0.0, 0.2]),
        "preemption_mode": st.sampled_from(["recompute", "swap"]),
        "parallel_sampling": st.sampled_from(["fork", "separate"]),
        "cost_model": st.sampled_from(
            ["constant:10ms", "linear:base=1ms,per_token=100us,per_seq=1ms", "physical"]
        ),
        "deadline": st.sampled_from([None, 0.3]),
        "until": st.sampled_from([None, None, 0.25]),
        "max_tokens": st.sampled_from([None, 7]),
        "slo": st.just("ttft<=50ms,tpot<=20ms,e2e:p99<=10s"),
    }
)


def run_any(rows: list[dict[str, Any]], options: dict[str, Any]) -> tuple[RunResult, str]:
    """A run through a trace file, and its report."""
    asked = Options(**options, swap_space="1" if options["preemption_mode"] == "swap" else None)
    with tempfile.TemporaryDirectory() as folder:
        trace = read_trace(write_trace(Path(folder) / "any.jsonl", rows))
    setup = resolve(asked)
    result = run(setup, trace)
    return result, render(result, setup, "")


@settings(max_examples=150, deadline=None)
@given(rows_of_any_kind(), options_of_any_kind)
@example(
    [row(0, 20, 30, id="r0", n=3), row(0, 20, 30, id="r1", deadline_s=0.2, priority=1)],
    {
        "num_gpu_blocks": 18, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 64,
        "max_model_len": 60, "scheduling_policy": "priority-preemptive", "slo": "ttft<=50ms",
        "preemption_mode": "recompute", "cost_model": "constant:10ms",
    },
)  # fmt: skip
def test_any_trace_keeps_its_rows_its_tokens_and_its_time(
    rows: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    result, report = run_any(rows, options)
    record = result.record
    requests, steps, summary = record.requests, record.steps, record.summary
    assert steps is not None

    # Every row has one outcome.
    assert sorted(requests["id"]) == sorted(r["id"] for r in rows)
    counts = summary["requests"]
    assert sum(counts[status] for status in STATUSES) == counts["total"] == len(rows)
    by_id = {r["id"]: r for r in rows}
    for index, name in enumerate(requests["id"]):
        asked, status = by_id[name], requests["status"][index]
        limit = min(
            asked["output_tokens"],
            asked.get("max_tokens") or options.get("max_tokens") or 10**9,
            options["max_model_len"] - asked["prompt_tokens"],
        )
        wanted = max(limit, 0) * asked.get("n", 1)
        got = int(requests["output_tokens"][index])
        assert (got == wanted) if status == "completed" else (got <= wanted), name
        if status == "refused":
            assert got == 0

    # TTFT + sum of gaps = E2E, no gap twice, nothing after the finish.
    assert identity_errors(requests, record.gaps) == []
    if counts["completed"] == len(rows):
        gaps = int((requests["output_tokens"] - requests["num_samples"]).sum())
        assert record.gaps.count == gaps

    # Steps follow one another, take time and hold no more than there is.
    ends = steps["start_ns"] + steps["duration_ns"]
    assert (steps["duration_ns"] > 0).all()
    assert (steps["start_ns"][1:] >= ends[:-1]).all()
    assert (steps["blocks_used"] <= options["num_gpu_blocks"] - 1).all()
    assert (steps["running"] <= options["max_num_seqs"]).all()
    tokens = steps["prefill_tokens"] + steps["decode_tokens"]
    assert (tokens <= options["max_num_batched_tokens"]).all()
    assert (tokens >= steps["num_seqs"]).all()
    if options.get("until") is not None:
        assert (ends <= options["until"] * 10**9).all()
    else:
        assert counts["unfinished"] == 0
        assert int(steps["preemptions"].sum()) == int(requests["preemptions"].sum())

    # What is said can be said, and be written as JSON.
    json.dumps([record.settings, summary], allow_nan=False)
    assert f"{counts['completed']:,} completed" in report


@settings(max_examples=40, deadline=None)
@given(rows_of_any_kind(), options_of_any_kind)
def test_any_trace_computes_each_token_once_or_says_so(
    rows: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    """Tokens computed in the steps = prompts - hits + outputs written + what was computed again."""
    rows = [{k: v for k, v in r.items() if k not in ("n", "deadline_s")} for r in rows]
    options = options | {"until": None, "deadline": None}
    record = run_any(rows, options)[0].record
    requests, steps = record.requests, record.steps
    assert steps is not None
    served = np.array([status != "refused" for status in requests["status"]], bool)
    needed = (
        requests["prompt_tokens"]
        - requests["cached_tokens"]
        + requests["output_tokens"]
        - 1
        + requests["recomputed_tokens"]
    )
    computed = int((steps["prefill_tokens"] + steps["decode_tokens"]).sum())
    assert computed == int(needed[served].sum())


@settings(max_examples=25, deadline=None)
@given(rows_of_any_kind(), options_of_any_kind)
def test_any_trace_through_the_command_line(
    rows: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    """The same numbers as through ``run``."""
    result, _ = run_any(rows, options)
    flags: list[object] = []
    asked = options | ({"swap_space": 1} if options["preemption_mode"] == "swap" else {})
    for name, value in asked.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            flags += [flag, value]
    with tempfile.TemporaryDirectory() as folder:
        trace = write_trace(Path(folder) / "any.jsonl", rows)
        ran = command("--trace", trace, *flags, "--json", "--no-bands", main=simulator_main)
    assert ran.code in (0, 1)
    assert ran.err == ""
    assert ran.document == {
        "settings": json.loads(json.dumps(result.record.settings)),
        "summary": json.loads(json.dumps(result.record.summary)),
    }
