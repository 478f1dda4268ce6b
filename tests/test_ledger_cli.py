"""``python -m blockmanager``: what it prints, its JSON and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blockmanager.__main__ import main

GIB = 2**30
LLAMA_2 = ["--model", "llama-2-7b", "--context", "4096", "--batch", "16"]


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = main([*argv, "--json"])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, answer


def test_llama_2_in_60_gib_holds_30_or_29(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, *LLAMA_2, "--kv-gb", "60")
    assert code == 0
    assert answer["kv"]["bytes_per_request"] == 2 * GIB
    assert answer["kv"]["bytes_per_batch"] == 32 * GIB
    pool = answer["pool"]
    assert (pool["usable_blocks"], pool["tokens"]) == (7680, 122_880)
    assert (pool["requests"], pool["requests_with_null_block"]) == (30, 29)
    assert answer["fits"] is True


def test_num_gpu_blocks_counts_the_null_block(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, *LLAMA_2, "--num-gpu-blocks", "7680")
    assert code == 0
    pool = answer["pool"]
    assert (pool["usable_blocks"], pool["requests"]) == (7679, 29)
    assert pool["requests_all_blocks_usable"] == 30


def test_report_spells_out_the_formula_and_both_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*LLAMA_2, "--kv-gb", "60"]) == 0
    out = capsys.readouterr().out
    for text in (
        "Given: --model llama-2-7b --context 4096 --batch 16 --kv-gb 60",
        "2 (K and V) x 32 layers x 32 KV heads x 128 head_dim x 2 bytes",
        "512 KiB",
        "4,096 tokens in 256 blocks x 8,388,608 bytes",
        "34.36 GB",
        "60 GiB = 64.42 GB",
        "without a unit that is GiB",
        "7,680 usable",
        "29 as vLLM counts",
        "no cache",
        "Fits: 16 requests of 4,096 tokens; 30 would.",
    ):
        assert text in out


def test_le_01_report_states_the_unit(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", "llama-3-8b", "--context", "4096")
    _, decimal = run_json(capsys, *model, "--kv-gb", "60GB")
    _, binary = run_json(capsys, *model, "--kv-gb", "60")
    assert (decimal["pool"]["tokens"], binary["pool"]["tokens"]) == (457_760, 491_520)
    assert main([*model, "--kv-gb", "60GB"]) == 0
    assert "55.88 GiB = 60 GB" in capsys.readouterr().out


def test_le_06_tp_that_does_not_divide_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "llama-3-70b", "--tp", "6", "--kv-gb", "30"]) == 2
    assert "TP 6 refused: 8 KV heads not divisible" in capsys.readouterr().err
    code, answer = run_json(capsys, "--model", "llama-3-70b", "--tp", "16", "--kv-gb", "30")
    assert code == 0
    assert answer["kv"]["bytes_per_token"] == 40_960
    assert answer["pool"]["tokens"] == 786_432


def test_le_10_max_model_len_that_does_not_fit_is_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["--model", "llama-3-8b", "--context", "16", "--num-gpu-blocks", "2"]
    assert main([*argv, "--max-model-len", "2048"]) == 1
    out = capsys.readouterr().out
    assert "needs 128 blocks, the pool has 1" in out
    assert "0.0078 x" in out
    argv = ["--model", "llama-3-8b", "--context", "1024"]
    code, answer = run_json(capsys, *argv, "--num-gpu-blocks", "1479", "--max-model-len", "29000")
    assert code == 1
    assert answer["max_model_len"]["capacity_tokens"] == 23_648
    assert answer["max_model_len"]["concurrency"] == pytest.approx(0.8154, abs=5e-5)
    code, answer = run_json(capsys, *argv, "--num-gpu-blocks", "1953", "--max-model-len", "20000")
    assert code == 0
    assert answer["max_model_len"]["concurrency"] == pytest.approx(1.5616)


def test_le_10_a_measured_kv_size_wins_and_the_difference_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # 24 GiB and nothing set aside but the weights, as the reported planner took it.
    gpu = {"memory_bytes": 24 * GIB, "memory_bandwidth": 1e12, "flops": {"bf16": 1.6e14}}
    path = tmp_path / "naive.json"
    path.write_text(json.dumps({**gpu, "host_bandwidth": 3e10}))
    argv = ["--model", "llama-3.1-8b", "--context", "1024", "--gpu", str(path)]
    argv += ["--num-gpu-blocks", "2589", "--reserve-gb", "1b"]
    argv += ["--max-num-batched-tokens", "1", "--max-num-seqs", "1"]
    code, answer = run_json(capsys, *argv)
    assert code == 0
    assert answer["pool"]["source"] == "--num-gpu-blocks"
    assert answer["pool"]["tokens"] == 41_408
    assert answer["budget"]["more_than_measured"] == pytest.approx(0.314, abs=0.001)
    assert main(argv) == 0
    assert "--num-gpu-blocks gives 5.06 GiB and wins; the budget above differs by +31.3%" in (
        capsys.readouterr().out
    )


def test_gpu_budget_is_shown_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, "--model", "llama-3.1-8b", "--gpu", "a100-80gb")
    assert code == 0
    lines = answer["budget"]["lines"]
    labels = [line["label"] for line in lines]
    assert labels == ["memory", "not used", "weights", "activations", "engine reserve"]
    assert sum(line["num_bytes"] for line in lines) == answer["pool"]["bytes"]
    assert answer["pool"]["source"] == "budget"


def test_a_batch_that_does_not_fit_is_exit_code_1_with_the_way_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--model", "llama-3-70b", "--gpu", "a100-80gb", "--batch", "8"]) == 1
    out = capsys.readouterr().out
    assert "nothing is left: the weights and the rest do not fit" in out
    assert out.rstrip().endswith("with --tp 4 it would.")


def test_defaults_are_said_to_be_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys)
    assert code == 0
    assert answer["model"]["name"] == "llama-3.1-8b"
    assumed = "\n".join(answer["assumed"])
    for text in ("model llama-3.1-8b", "GPU h100-sxm", "context 4,096", "batch 1", "KV in bf16"):
        assert text in assumed


@pytest.mark.parametrize(
    "argv",
    [
        ["--model", "gemma-3-27b", "--context", "131072", "--kv-gb", "60"],
        ["--model", "gemma-3-27b", "--context", "8192", "--kv-gb", "60", "--window-in-flight"],
        ["--model", "mistral-7b-v0.1", "--kv-gb", "60"],
        ["--model", "deepseek-v3", "--tp", "8", "--gpu", "h200", "--kv-dtype", "fp8"],
        ["--model", "gpt-oss-120b", "--kv-dtype", "q8_0"],
        ["--model", "llama-2-7b", "--context", "1", "--gpu", "v100"],
    ],
)
def test_reports_of_all_kinds_of_layers(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 0
    assert "Fits:" in capsys.readouterr().out


def test_models_with_windows_count_tokens_not_blocks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ("--model", "gemma-3-27b", "--context", "4096", "--kv-gb", "60")
    code, answer = run_json(capsys, *argv)
    assert code == 0
    assert answer["kv"]["bytes_allocated_per_request"] == 771_751_936
    assert answer["pool"]["requests"] == 60 * GIB // 771_751_936
    assert answer["pool"]["usable_blocks"] is None


def test_hybrid_report_shows_the_state(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_next",
        "num_hidden_layers": 8,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["--model", str(path), "--kv-gb", "1"]) == 0
    out = capsys.readouterr().out
    assert "6 recurrent layers x 2,146,304 bytes of state" in out
    assert "a request of n tokens holds ceil(n / 16) of 2 growing layers, 12.28 MiB of state" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "lama-2-7b"], "unknown model 'lama-2-7b'; closest: llama-2-7b"),
        (["--model", "nowhere/config.json"], "nowhere/config.json: cannot read it"),
        (["--gpu", "h10"], "unknown GPU 'h10'"),
        (["--kv-dtype", "fp7"], "KV dtype is 'fp7', expected one of"),
        (["--kv-gb", "1KiB"], "--kv-gb leaves 1,024 bytes of KV memory, expected at least one"),
        (["--num-gpu-blocks", "1"], "--num-gpu-blocks leaves 0 bytes of KV memory"),
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization is 1.5, expected"),
        (["--context", "10", "--prompt-tokens", "10"], "--prompt-tokens is 10, expected less"),
        (["--model", "gemma-3-4b", "--num-gpu-blocks", "9"], "expected --kv-gb"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--context", "0"], "argument --context: is 0, expected at least 1"),
        (["--batch", "x"], "argument --batch: 'x' is no whole number"),
        (["--kv-gb", "60XB"], "argument --kv-gb: size is '60XB'"),
        (["--kv-gb", "1", "--num-gpu-blocks", "5"], "not allowed with argument"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_list_names_models_and_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    code, names = run_json(capsys, "--list")
    assert code == 0
    assert "llama-2-7b" in names["models"]
    assert "h100-sxm" in names["gpus"]


def test_the_command_runs_and_imports_nothing_heavy() -> None:
    script = (
        "import sys; from blockmanager.__main__ import main; code = main(['--kv-gb', '60']); "
        "heavy = {'pandas', 'pyarrow', 'matplotlib', 'simpy', 'torch'} & set(sys.modules); "
        "sys.exit(f'heavy: {heavy}' if heavy else code)"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "exit code: 0 it fits" in out
    assert "python -m blockmanager --model llama-2-7b" in out
