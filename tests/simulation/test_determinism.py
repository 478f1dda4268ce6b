"""Same input, same bytes out, whatever happens around the run (SI-03 in test_cases has the ties)."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from records.columns import Columns
from records.run import RunRecord
from simulator.cost import LinearCost
from tests.simulation.command import command, python, row, simulated, write_trace
from tests.simulation.helpers import NS, Run, arrival, run

FLAGS = (
    *("--num-gpu-blocks", 61, "--max-num-seqs", 12, "--scheduling-policy", "priority"),
    *("--slo", "ttft<=200ms,tpot<=50ms"),
)


def mixed_rows() -> list[dict[str, Any]]:
    """Shared prefixes, samples, priorities and deadlines; too much for the pool, no two at once."""
    rng = np.random.default_rng(42)
    rows = []
    for i in range(50):
        prompt = int(rng.integers(40, 200))
        token_ids = [*range(32), *rng.integers(100, 10**6, prompt - 32).tolist()]
        rows.append(
            row(
                round(0.013 * i + 0.001 * float(rng.random()), 6), prompt,
                int(rng.integers(5, 80)), id=f"r{i}", token_ids=token_ids, priority=i % 3,
                n=1 + (i % 5 == 0), deadline_s=[None, 0.25][i % 7 == 0], session_id=f"s{i % 9}",
            )
        )  # fmt: skip
    return rows


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("mixed") / "mixed.jsonl", mixed_rows())


def assert_same_columns(a: Columns | None, b: Columns | None, *, but: tuple[str, ...] = ()) -> None:
    assert a is not None
    assert b is not None
    assert a.keys() == b.keys()
    for name, column in a.items():
        if name not in but:
            assert list(column) == list(b[name]), name


def test_the_load_is_one_that_could_differ(mixed: Path) -> None:
    """Preemptions, hits, samples and timeouts all occur, or the tests below would say little."""
    summary = command("--trace", mixed, *FLAGS, "--json").summary
    assert summary["kv"]["preemptions"] > 5
    assert summary["kv"]["prefix_hit_rate"] > 0.1
    assert summary["kv"]["evictions"] > 10
    assert summary["requests"]["timed_out"] > 0
    assert summary["requests"]["completed"] > 30


def test_one_process_gives_the_same_twice_whatever_it_ran_between(mixed: Path) -> None:
    first = command("--trace", mixed, *FLAGS, "--json")
    command("--trace", mixed, "--kv-gb", 1, "--cost-model", "no-cache", "--model", "qwen2.5-7b")
    command("--trace", mixed, "--deadline", 0.1, "--warm-start", 10)
    assert command("--trace", mixed, *FLAGS, "--json") == first


def test_the_process_around_it_does_not_matter(mixed: Path) -> None:
    """Time zone, locale, working directory, ``-O``: an assertion that did work would show."""
    expected = command("--trace", mixed, *FLAGS, "--json").out
    flags = ("-m", "simulator", *FLAGS, "--json", "--trace")
    env = {"TZ": "Asia/Kathmandu", "LC_ALL": "C", "OMP_NUM_THREADS": "1"}
    optimised = python("-O", *flags, mixed.name, cwd=mixed.parent, env=env)
    elsewhere = python(*flags, mixed, cwd=Path("/"))
    assert (optimised.stderr, elsewhere.stderr) == ("", "")
    assert optimised.stdout == elsewhere.stdout == expected


def test_a_run_draws_no_random_number_of_others(mixed: Path) -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global generator is what must stay untouched
    before = random.getstate(), str(np.random.get_state())  # noqa: NPY002
    first = command("--trace", mixed, *FLAGS, "--json")
    assert (random.getstate(), str(np.random.get_state())) == before  # noqa: NPY002
    random.seed(2)
    np.random.seed(2)  # noqa: NPY002
    assert command("--trace", mixed, *FLAGS, "--json") == first


def test_the_record_is_the_same_bytes_in_any_folder(mixed: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "deep" / "er"]
    for folder in folders:
        assert command("--trace", mixed, *FLAGS, "--out", folder).code == 0
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == sorted(path.name for path in folders[1].iterdir())
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    # Neither where nor when nor on which machine.
    text = (folders[0] / "run.json").read_text() + (folders[0] / "summary.json").read_text()
    assert str(tmp_path) not in text
    assert str(mixed.parent) not in text
    assert socket.gethostname() not in text


def test_how_it_is_shown_does_not_change_what_is_found(mixed: Path, tmp_path: Path) -> None:
    plain = command("--trace", mixed, *FLAGS, "--json").document
    out = tmp_path / "run"
    written = command("--trace", mixed, *FLAGS, "--json", "--out", out, "--no-steps").document
    assert written == plain
    record = RunRecord.read(out)
    assert {"settings": record.settings, "summary": record.summary} == plain


def test_the_order_of_rows_does_not_matter_where_no_two_arrive_at_once(
    mixed: Path, tmp_path: Path
) -> None:
    rows = mixed_rows()
    random.Random(5).shuffle(rows)
    shuffled = write_trace(tmp_path / "shuffled.jsonl", rows)
    options: dict[str, Any] = {"num_gpu_blocks": 61, "scheduling_policy": "priority"}
    a, b = simulated(mixed, **options), simulated(shuffled, **options)
    assert_same_columns(a.record.requests, b.record.requests)
    assert_same_columns(a.record.steps, b.record.steps)
    assert a.record.summary == b.record.summary


def test_names_do_not_matter_under_fcfs(mixed: Path, tmp_path: Path) -> None:
    """Ids are labels: any others give the same times."""
    rows = [{**r, "id": f"{997 * i % 50:02}-other"} for i, r in enumerate(mixed_rows())]
    renamed = write_trace(tmp_path / "renamed.jsonl", rows)
    a, b = (simulated(trace, num_gpu_blocks=61) for trace in (mixed, renamed))
    assert a.record.summary["kv"]["preemptions"] > 0
    assert_same_columns(a.record.requests, b.record.requests, but=("id",))
    assert_same_columns(a.record.steps, b.record.steps)


def test_settings_say_what_ran_and_are_plain_json(mixed: Path) -> None:
    settings_ = command("--trace", mixed, *FLAGS, "--json").document["settings"]
    assert json.loads(json.dumps(settings_)) == settings_
    for name in ("trace_sha256", "versions", "sources", "seed", "num_blocks", "max_model_len"):
        assert name in settings_


loads = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=20
)
COST = LinearCost(0.003, 0.0007, 0.0001)


def served(load: list[tuple[int, int, int]], shift_ns: int, num_blocks: int) -> Run:
    arrivals = [
        arrival(str(i), (time * 10**7 + shift_ns) / NS, prompt, output)
        for i, (time, prompt, output) in enumerate(sorted(load))
    ]
    return run(arrivals, COST, num_blocks=num_blocks, block_size=4, max_num_batched_tokens=48)


@settings(max_examples=40, deadline=None)
@given(loads, st.integers(25, 60), st.integers(1, 3600))
def test_the_same_load_later_is_the_same_run_later(
    load: list[tuple[int, int, int]], num_blocks: int, shift_s: int
) -> None:
    """To the nanosecond: the clock counts integers, not floats that wear out as they grow."""
    shift_ns = shift_s * NS
    now, later = served(load, 0, num_blocks), served(load, shift_ns, num_blocks)
    assert_same_columns(now.steps, later.steps, but=("start_ns",))
    assert (later.steps["start_ns"] - now.steps["start_ns"] == shift_ns).all()
    times = ("arrival_ns", "first_scheduled_ns", "first_token_ns", "finish_ns")
    assert_same_columns(now.requests, later.requests, but=times)
    for name in times:
        moved = np.ma.MaskedArray(later.requests[name] - now.requests[name]).compressed()
        assert (moved == shift_ns).all(), name


@settings(max_examples=30, deadline=None)
@given(loads, st.integers(25, 60), st.integers(1, 400))
def test_a_run_that_is_stopped_is_the_beginning_of_the_run(
    load: list[tuple[int, int, int]], num_blocks: int, until_cs: int
) -> None:
    arrivals = [
        arrival(str(i), time / 100, prompt, output)
        for i, (time, prompt, output) in enumerate(sorted(load))
    ]
    options: dict[str, Any] = {"num_blocks": num_blocks, "block_size": 4}
    whole = run(arrivals, COST, **options)
    stopped = run(arrivals, COST, until_s=until_cs / 100, **options)
    count = len(stopped.steps["start_ns"])
    for name, column in stopped.steps.items():
        assert column.tolist() == whole.steps[name][:count].tolist(), name
    ends = whole.steps["start_ns"] + whole.steps["duration_ns"]
    assert count == int((ends <= until_cs * 10**7).sum())
    for index, status in enumerate(stopped.requests["status"]):
        if status != "unfinished":
            name = stopped.requests["id"][index]
            assert stopped.row(name)["finish_ns"] == whole.row(name)["finish_ns"]
