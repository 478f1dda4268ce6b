"""Logs of real servers: read, compared, and what a calibration learns from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from catalog import load_gpu
from simulator.cost import factors_for
from simulator.cost.calibration import Calibration, CalibrationError
from simulator.measured.calibrate import calibrate
from simulator.measured.kernel_tables import TableError
from simulator.measured.logs import RequestLog, load_log, times_of
from simulator.measured.served import simulate_run
from simulator.measured.validate import compare_log, factors_without, series_errors
from simulator.settings import Options
from tests.simulation.command import command, is_refused

GIVEN = Options(model="llama-3.1-8b", gpu="h100-sxm")


def recorded(folder: Path, rows: list[dict[str, Any]], **meta: Any) -> Path:
    folder.mkdir(parents=True)
    engine = {
        "tensor_parallel_size": 1,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_model_len": None,
    }
    head = {
        "model": "meta-llama/Llama-3.1-8B",
        "engine_kwargs": engine,
        "hardware": {"device_name": "NVIDIA H100 80GB HBM3"},
    }
    (folder / "meta.json").write_text(json.dumps(head | meta))
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def planted_rows(**factors: float) -> list[dict[str, Any]]:
    """What a server with these factors would have recorded of a bursty load."""
    rng = np.random.default_rng(3)
    count = 80
    starts = np.cumsum(rng.exponential(0.05, count)).tolist()
    prompts, outputs = rng.integers(50, 1500, count), rng.integers(20, 160, count)
    rows = [
        {
            "request_id": f"r{i}",
            "input_toks": int(prompts[i]),
            "output_toks": int(outputs[i]),
            "arrival_time": 1.7e9 + starts[i],  # another clock
            "queued_ts": 500 + starts[i],
            "first_token_ts": 501 + starts[i],
            "last_token_ts": 502 + starts[i],
        }
        for i in range(count)
    ]
    return rows if not factors else _served(rows, factors)


def _served(rows: list[dict[str, Any]], factors: dict[str, float]) -> list[dict[str, Any]]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        log = load_log(recorded(Path(folder) / "gpu" / "run", rows), Options())
    truth = factors_for(load_gpu("h100-sxm")).scaled(**factors)
    times = times_of(simulate_run(log.run, truth).requests)
    for row in rows:
        mine = times[row["request_id"]]
        row["first_token_ts"] = row["queued_ts"] + mine.ttft
        row["last_token_ts"] = row["queued_ts"] + mine.e2e
    return rows


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server whose products read weights at 0.7 of the usual speed, and that idles 2 ms a step."""
    folder = tmp_path_factory.mktemp("server") / "H100" / "run"
    return recorded(folder, planted_rows(weights=0.7, step_s=2e-3))


def test_a_recorded_run(slow_server: Path) -> None:
    log = load_log(slow_server, Options())
    assert (log.run.options.model, log.run.options.gpu) == ("meta-llama/Llama-3.1-8B", "h100-sxm")
    assert len(log.ids) == 80
    assert not log.run.by_client
    # Times of one clock only.
    assert all(0 < times.ttft < 10 for times in log.times.values())
    assert load_log(slow_server, Options(gpu="h200")).run.options.gpu == "h200"


def test_calibration_finds_what_was_planted(slow_server: Path) -> None:
    log = load_log(slow_server, Options())
    before = compare_log(log)
    assert before.error("TPOT mean") < -0.2
    result = calibrate(log)
    assert (result.num_fitted, result.num_held_out) == (40, 40)
    for name, value in result.measured.items():
        assert result.after[name] == pytest.approx(value, rel=0.06), name
    assert result.calibration.weights == pytest.approx(0.7, abs=0.08)
    after = compare_log(log, result.calibration)
    assert after.group == "calibrated"
    assert abs(after.error("TPOT mean")) < 0.02


def test_calibrate_and_use_it(slow_server: Path, tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    ran = command("calibrate", "--measured", slow_server, "--out", file)
    assert ran.code == 0
    assert "held-out requests" in ran.out
    made = Calibration.read(file)
    assert made.gpu == "h100-sxm"
    assert made.band[0] < 1 < made.band[1]
    plain = command("validate", "--measured", slow_server, "--max-error", "5%")
    held = command(
        *(
            "validate",
            "--measured",
            slow_server,
            "--max-error",
            "10%",
            "--calibration",
            file,
            "--json",
        )
    )
    assert (plain.code, held.code) == (1, 0)
    assert "TPOT p95" in plain.out
    document = json.loads(held.out)
    assert document[0]["basis"] == "calibrated"
    assert abs(document[0]["metrics"]["E2E mean"]["error"]) < 0.05


def test_pictures_of_a_log(slow_server: Path, tmp_path: Path) -> None:
    ran = command("validate", "--measured", slow_server, "--out", tmp_path / "pictures")
    assert ran.code == 0
    pictures = list((tmp_path / "pictures").glob("*.png"))
    assert len(pictures) == 1
    assert pictures[0].stat().st_size > 10_000


def test_series_are_compared_second_by_second(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "H100" / "run", planted_rows(weights=1.0))
    log = load_log(folder, Options())
    steps = simulate_run(log.run).steps
    seconds = range(1, 4)
    place = np.searchsorted(steps["start_ns"], [second * 10**9 for second in seconds], "right") - 1
    lines = [
        f"{second},{steps['running'][at]},{steps['waiting'][at]},0.0"
        for second, at in zip(seconds, place, strict=True)
    ]
    (folder / "timeseries.csv").write_text("\n".join(["t,running,waiting,kv_cache_pct", *lines]))
    errors = {row.name: row for row in series_errors(load_log(folder, Options()))}
    assert errors["running"].distance == 0
    assert "kv_cache_pct" not in errors  # all zero: not recorded


def bench_document(**changes: Any) -> dict[str, Any]:
    document = {
        "model_id": "meta-llama/Llama-3.1-8B",
        "input_lens": [10, 20, 30],
        "output_lens": [3, 2, 0],
        "ttfts": [0.1, 0.2, 0.0],
        "itls": [[0.01, 0.03], [0.02], []],
        "start_times": [100.5, 100.0, 101.0],
        "errors": ["", "", "timeout"],
    }
    return {**document, **changes}


def test_a_benchmark_of_vllm(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(bench_document()))
    log = load_log(path, GIVEN)
    assert log.ids == ["1", "0"]  # by start; the failed one is out
    assert log.times["0"].e2e == pytest.approx(0.14)
    assert log.times["0"].tpot == pytest.approx(0.02)
    assert log.run.by_client


def no_folder(path: Path) -> Path:
    return path / "none"


def no_starts(path: Path) -> Path:
    document = bench_document()
    del document["start_times"]
    (path / "bench.json").write_text(json.dumps(document))
    return path / "bench.json"


def a_summary(path: Path) -> Path:
    (path / "bench.json").write_text(json.dumps({"mean_ttft_ms": 3}))
    return path / "bench.json"


def not_json(path: Path) -> Path:
    (path / "bench.json").write_text("{")
    return path / "bench.json"


def an_unknown_gpu(path: Path) -> Path:
    return recorded(path / "X" / "run", planted_rows(), hardware={"device_name": "Abacus 3"})


def half_a_row(path: Path) -> Path:
    return recorded(path / "X" / "run", [{"request_id": "a"}])


def nobody(path: Path) -> Path:
    return recorded(path / "H100" / "run", [])


def twice(path: Path) -> Path:
    rows = planted_rows()[:3]
    return recorded(path / "H100" / "run", [*rows, rows[0]])


def bench_with(path: Path, **changes: Any) -> Path:
    (path / "bench.json").write_text(json.dumps(bench_document(**changes)))
    return path / "bench.json"


def not_a_number(path: Path) -> Path:
    return bench_with(path, ttfts=[float("nan"), 0.2, 0.0])


def below_zero(path: Path) -> Path:
    return bench_with(path, ttfts=[-1, 0.2, 0.0])


def too_short(path: Path) -> Path:
    return bench_with(path, ttfts=[0.1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nobody, "no request that was answered"),
        (twice, "request r0: is there twice"),
        (not_a_number, "request 0: TTFT is nan"),
        (below_zero, "request 0: TTFT is -1"),
        (too_short, "not of one length"),
        (no_folder, "no log of requests, expected"),
        (no_starts, "no start_times"),
        (a_summary, "no input_lens and ttfts"),
        (not_json, "not JSON"),
        (an_unknown_gpu, "Abacus 3"),
        (half_a_row, "queued_ts"),
    ],
)
def test_what_is_no_log(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    with pytest.raises(TableError, match=message):
        load_log(path, Options())
    is_refused(command("validate", "--measured", path), message)


def test_who_is_refused_is_not_compared_and_that_is_said(slow_server: Path) -> None:
    ran = command("validate", "--measured", slow_server, "--max-model-len", 900)
    assert ran.code == 0
    assert "requests of the log would be refused" in ran.out
    assert "[assumed]" in ran.out
    is_refused(
        command("validate", "--measured", slow_server, "--max-model-len", 50), "refuse every"
    )
    is_refused(command("calibrate", "--measured", slow_server, "--max-model-len", 900), "refused")


def test_flags_of_the_server_are_heard(slow_server: Path) -> None:
    def tpot(*flags: object) -> float:
        ran = command("validate", "--measured", slow_server, "--json", *flags)
        assert ran.code == 0
        return float(json.loads(ran.out)[0]["metrics"]["TPOT mean"]["predicted_s"])

    plain = tpot()
    assert tpot("--cost-model", "constant:50ms") == pytest.approx(0.05, rel=0.01)
    assert tpot("--gpu", "h200") < plain
    assert tpot("--no-async-scheduling") > plain
    assert tpot("--enforce-eager") != plain  # no padding, and launches that may show
    is_refused(
        command("calibrate", "--measured", slow_server, "--cost-model", "constant:1ms"), "physical"
    )


def test_a_run_record_validates_against_itself(tmp_path: Path) -> None:
    from tests.simulation.command import row, write_trace

    trace = write_trace(tmp_path / "t.jsonl", [row(0.2 * i, 300 + 7 * i, 40) for i in range(50)])
    for name, flags in (("a", ()), ("b", ("--cost-model", "constant:20ms", "--max-num-seqs", 3))):
        command("--trace", trace, "--out", tmp_path / name, "--no-bands", *flags)
        ran = command("validate", "--measured", tmp_path / name, "--json")
        metrics = json.loads(ran.out)[0]["metrics"]
        assert all(abs(metric["error"]) < 1e-6 for metric in metrics.values()), metrics


def test_too_few_requests_to_calibrate(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "H100" / "run", planted_rows()[:10])
    is_refused(command("calibrate", "--measured", folder), "10 answered requests", "at least 40")


def test_a_calibration_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    for text, message in (
        ("[]", "no calibration"),
        ("{", "not JSON"),
        ('{"weights": 0, "compute": 1, "kv": 1}', "weights is 0"),
        ('{"weights": 1, "compute": 1, "kv": 1, "step_s": "x"}', "step_s is 'x'"),
        ('{"weights": 1, "compute": 1, "kv": 1, "speed": 2}', "no calibration"),
        ('{"weights": 1e300, "compute": 1, "kv": 1}', "expected from 0.05 to 20"),
        ('{"weights": 1, "compute": 1, "kv": 1, "residuals": {}}', "no TPOT"),
        (
            '{"weights": 1, "compute": 1, "kv": 1, "residuals": {"TPOT mean": -1.5}}',
            "residuals are",
        ),
        ('{"weights": 1, "compute": 1, "kv": 1, "tp": "2"}', "tp is '2'"),
    ):
        path.write_text(text)
        with pytest.raises(CalibrationError, match=message):
            Calibration.read(path)


def test_flags_of_validate() -> None:
    is_refused(command("validate"), "one of --measured and --all")
    is_refused(command("validate", "--measured", "x", "--max-error", "much"), "--max-error")
    is_refused(command("validate", "--all", "/nowhere"), "no such folder")
    is_refused(command("validate", "--all", "/nowhere", "--tp", 2), "--all takes no flags")


# --- measured servers ---


def log_of(shared: Path, gpu: str) -> RequestLog:
    return load_log(shared / "measured" / "vllm_runs" / gpu / "Llama-3.1-8B", Options())


def test_rtx_pro_6000_from_its_datasheet(shared: Path) -> None:
    """Nothing was fitted on it, nor on a GPU of its kind."""
    row = compare_log(log_of(shared, "RTXPRO6000"))
    assert row.group == "datasheet only"
    for metric in row.measured:
        assert abs(row.error(metric)) < 0.15, metric


def test_rtx_4090_runs_out_of_blocks_when_the_real_one_does(shared: Path) -> None:
    row = compare_log(log_of(shared, "RTX4090"))
    assert abs(row.error("TPOT mean")) < 0.15
    assert abs(row.error("makespan")) < 0.15
    assert abs(row.error("TTFT mean")) < 0.25


def test_experiments_that_were_left_out_of_the_fit(shared: Path) -> None:
    from simulator.measured.served import experiments

    runs = [
        run
        for run in experiments(shared / "measured", stage_s=15)
        if "llama-3-1-8b" in run.name or "qwen" in run.name
    ]
    assert len(runs) == 7
    for run in runs:
        metrics = simulate_run(run, factors_without(run)).metrics
        assert metrics["E2E mean"] == pytest.approx(run.measured["E2E mean"], rel=0.12), run.name
        assert metrics["TTFT mean"] == pytest.approx(run.measured["TTFT mean"], rel=0.20), run.name
