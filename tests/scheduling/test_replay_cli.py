"""``python -m scheduler replay``: exit codes, one clear line for bad input, and words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scheduler.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
GOOD: dict[str, Any] = {
    "config": {"num_gpu_blocks": 5, "block_size": 2, "enable_prefix_caching": False},
    "requests": [
        {"id": "a", "arrival_step": 0, "prompt": [1, 2], "output_len": 4},
        {"id": "b", "arrival_step": 0, "prompt": [3, 4, 5], "output_len": 3},
    ],
}


def write(folder: Path, scenario: Any) -> Path:
    path = folder / "scenario.json"
    path.write_text(scenario if isinstance(scenario, str) else json.dumps(scenario))
    return path


def test_log_is_one_json_object_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(write(tmp_path, GOOD))]) == 0
    out, err = capsys.readouterr()
    entries = [json.loads(line) for line in out.splitlines()]
    assert err == ""
    assert [entry["step"] for entry in entries[:-1]] == list(range(5))
    assert entries[0]["sched"] == [["a", 2, 0], ["b", 3, 0]]
    assert entries[-1] == {"end": "drained", "steps": 5, "unfinished": [], "free_end": 4}


def test_explain_says_why_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = {"id": "c", "arrival_step": 1, "prompt": [1] * 20, "output_len": 1}
    path = write(tmp_path, {**GOOD, "requests": [*GOOD["requests"], big]})
    assert main(["replay", str(path), "--explain"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step 1: request c refused: 20 prompt tokens and up to 1 output tokens need 10 blocks, "
        "the pool has 4",
        "step 2: b preempted for itself, which needs 1 more block where 0 are free; "
        "4 computed tokens are thrown away",
    ]


def test_explain_of_a_quiet_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, {**GOOD, "config": {}})
    assert main(["replay", str(path), "--explain"]) == 0
    assert capsys.readouterr().out == "nothing was refused or preempted\n"


def test_run_that_hits_max_steps_says_who_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, {**GOOD, "config": {**GOOD["config"], "max_steps": 3}})
    assert main(["replay", str(path)]) == 0
    end = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert end["end"] == "max_steps"
    assert end["unfinished"] == ["a", "b"]


def with_config(**changes: Any) -> dict[str, Any]:
    return {**GOOD, "config": {**GOOD["config"], **changes}}


def with_request(**changes: Any) -> dict[str, Any]:
    row = {**GOOD["requests"][0], **changes}
    return {**GOOD, "requests": [{k: v for k, v in row.items() if v is not ...}]}


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ([], "list of requests"),
        ({"config": {}}, "list of requests"),
        ({"requests": 3}, "list of requests"),
        ({**GOOD, "config": []}, "config"),
        ({**GOOD, "config": None}, "config"),
        (with_config(max_num_sequences=3), "unknown max_num_sequences"),
        (with_config(num_gpu_blocks=1), "num_gpu_blocks is 1, must be at least 2"),
        (with_config(num_gpu_blocks="many"), "num_gpu_blocks"),
        (with_config(block_size=0), "block_size is 0"),
        (with_config(block_size=1.5), "block_size"),
        (with_config(max_num_seqs=0), "max_num_seqs is 0"),
        (with_config(max_num_batched_tokens=None), "max_num_batched_tokens"),
        (with_config(watermark=-1), "watermark"),
        (with_config(policy="fifo"), "unknown policy 'fifo'"),
        (with_config(preemption_mode="drop"), "preemption_mode is 'drop'"),
        (with_config(clock={"base": 0.1}), "clock"),
        (with_config(clock=3), "clock"),
        ({**GOOD, "requests": [7]}, "request 0"),
        (with_request(id=...), "request 0: id is missing"),
        (with_request(output_len=...), "request 0: output_len is missing"),
        (with_request(prompt=...), "request 0: segments is missing"),
        (with_request(prompt=..., segments=[{"len": 3}]), "request 0: seed is missing"),
        (with_request(arrival_step=...), "request 0"),
        (with_request(arrival_step=..., arrival_time=0.5), "request 0"),
        (with_request(prompt=[]), "num_prompt_tokens is 0"),
        (with_request(prompt="text"), "request 0"),
        (with_request(output_len=0), "max_tokens is 0"),
        (with_request(output_len="two"), "request 0"),
        ({**GOOD, "requests": [GOOD["requests"][0]] * 2}, "id"),
    ],
)
def test_bad_scenario_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scenario: Any, message: str
) -> None:
    path = write(tmp_path, scenario)
    assert main(["replay", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert message in line
    assert str(path) in line


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nothing.json"
    assert main(["replay", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: {path}: No such file or directory"


def test_folder_and_binary_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "binary.json"):
        assert main(["replay", str(path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["replay"], ["play", "x"], ["replay", "x", "--why"]])
def test_bad_arguments_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err


def test_help_names_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["replay", "--help"])
    assert stopped.value.code == 0
    assert "--explain" in capsys.readouterr().out


def test_module_runs_and_a_reader_may_leave_early(tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "arrival_step": i, "prompt": [i], "output_len": 3} for i in range(3000)]
    path = write(tmp_path, {"requests": rows})
    process = subprocess.Popen(
        [sys.executable, "-m", "scheduler", "replay", str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert json.loads(process.stdout.readline())["step"] == 0
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=30) == 0
    assert errors == b""
