"""The check that waits for a GPU, as far as a CPU can run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import CASES, Case, error_of
from gpu_backend.attention.inputs import AttentionInputs
from gpu_backend.attention.reference import reference_attention
from gpu_backend.attention.select import choose

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("case", [c for c in CASES if max(c.contexts) < 5000], ids=lambda c: c.name)
def test_cases_are_right_for_a_path_that_is(case: Case) -> None:
    assert error_of(choose("cpu", "cpu"), case, torch.float32, "cpu") < 1e-4


def test_a_wrong_path_is_seen() -> None:
    def wrong(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
              inputs: AttentionInputs, **options: object) -> torch.Tensor:  # fmt: skip
        return 1.01 * reference_attention(query, keys, values, inputs, **options)  # type: ignore[arg-type]

    assert error_of(wrong, CASES[0], torch.float32, "cpu") > 1e-3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--out", tmp_path / "out"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "torch sees no CUDA device: nothing was measured\n"
    assert not (tmp_path / "out").exists()
