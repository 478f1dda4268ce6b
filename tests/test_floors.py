"""The floors of the house: imports only go down, and the planner starts fast."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

FLOORS: dict[str, set[str]] = {
    "commandline": set(),
    "catalog": {"commandline"},
    "blockmanager": {"commandline", "catalog", "numpy"},
    "scheduler": {"commandline", "blockmanager", "numpy"},
    "records": {"scheduler", "numpy", "pandas", "pyarrow"},
    "traces": {
        *("commandline", "scheduler", "records", "blockmanager"),
        *(
            "numpy",
            "pandas",
            "pyarrow",
            "matplotlib",
            "tokenizers",
            "compression",
        ),  # the last from Python 3.14 on
    },
    "simulator": {
        *("commandline", "catalog", "blockmanager", "scheduler", "records", "traces"),
        *("numpy", "simpy", "pandas", "pyarrow", "matplotlib", "numba", "scipy"),
    },
    "gpu_backend": {
        *("commandline", "catalog", "blockmanager", "scheduler", "records", "traces"),
        *("numpy", "torch", "numba", "triton", "safetensors", "tokenizers", "gguf", "jinja2"),
    },
}
"""What a package may import besides itself and the standard library."""

LAZY = {"pandas", "pyarrow", "matplotlib", "tokenizers"}
"""Slow to import: only inside the functions that need them."""

ONLY_IN = {
    "torch": {"gpu_backend"},
    "simpy": {"simulator"},
    "matplotlib": {"simulator", "traces"},
}


class Import(NamedTuple):
    path: Path
    line: int
    top: str
    """First part of the module's name."""
    at_start: bool
    """Whether it is done when the module is imported."""

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.top}"


class _Imports(ast.NodeVisitor):
    """Collects imports; what stands in a function, or is for type checkers, is not at the start."""

    def __init__(self, path: Path, package: str) -> None:
        self.found: list[Import] = []
        self._path = path
        self._package = package
        self._depth = 0

    def _add(self, line: int, module: str) -> None:
        self.found.append(Import(self._path, line, module.split(".")[0], self._depth == 0))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node.lineno, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._add(node.lineno, self._package if node.level else node.module or "")

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if name in ("__import__", "import_module", "importlib.import_module") and node.args:
            (module, *_) = node.args
            if isinstance(module, ast.Constant) and isinstance(module.value, str):
                self._add(node.lineno, module.value)
        self.generic_visit(node)

    def _inside(self, node: ast.AST) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _inside  # noqa: N815

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self._depth += 1
            for child in node.body:
                self.visit(child)
            self._depth -= 1
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)


def imports_in(source: str, path: Path, package: str) -> list[Import]:
    visitor = _Imports(path, package)
    visitor.visit(ast.parse(source, str(path)))
    return visitor.found


def packages() -> list[str]:
    return [name for name in FLOORS if (ROOT / name).is_dir()]


def imports_of(package: str) -> list[Import]:
    """Every import in a package, wherever it stands."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        found += imports_in(path.read_text(), path, package)
    return found


@pytest.mark.parametrize("package", packages())
def test_imports_only_go_down(package: str) -> None:
    allowed = {package, *FLOORS[package], *sys.stdlib_module_names}
    wrong = [str(entry) for entry in imports_of(package) if entry.top not in allowed]
    assert not wrong


@pytest.mark.parametrize("package", [name for name in packages() if name != "gpu_backend"])
def test_slow_libraries_are_imported_where_they_are_used(package: str) -> None:
    wrong = [str(entry) for entry in imports_of(package) if entry.at_start and entry.top in LAZY]
    assert not wrong


@pytest.mark.parametrize(("library", "homes"), sorted(ONLY_IN.items()))
def test_library_stays_in_its_package(library: str, homes: set[str]) -> None:
    wrong = [
        str(entry)
        for package in packages()
        if package not in homes
        for entry in imports_of(package)
        if entry.top == library
    ]
    assert not wrong


def test_the_compiler_stays_in_the_compiled_loop() -> None:
    """It is optional at run time and slow to load."""
    users = {
        entry.path.name
        for package in packages()
        for entry in imports_of(package)
        if entry.top == "numba"
    }
    assert users == {"kernel.py", "compiled.py", "cpu_kernels.py"}


def test_every_package_has_a_floor() -> None:
    there = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert there - {"tests", "benchmarks", "notebooks", "docs"} <= FLOORS.keys()


def test_floors_have_no_cycle_and_no_wing_meets_the_other() -> None:
    seen: set[str] = set()
    for package, allowed in FLOORS.items():
        assert allowed & FLOORS.keys() <= seen, f"{package} would look up"
        seen.add(package)
        if package == "simulator":
            seen.remove(package)  # gpu_backend and simulator never import each other


def test_the_test_sees_imports_wherever_they_hide() -> None:
    source = """
import os.path
from numpy.typing import NDArray
if TYPE_CHECKING:
    import pandas
else:
    import torch
try:
    import pyarrow as pa
except ImportError:
    pass
class A:
    import simpy
    def f(self):
        from matplotlib import pyplot
        return importlib.import_module("safetensors.numpy")
from . import sibling
"""
    found = imports_in(source, ROOT / "x.py", "catalog")
    assert [(entry.top, entry.at_start) for entry in found] == [
        ("os", True),
        ("numpy", True),
        ("pandas", False),
        ("torch", True),
        ("pyarrow", True),
        ("simpy", True),
        ("matplotlib", False),
        ("safetensors", False),
        ("catalog", True),
    ]


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that are loaded after a statement, in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


SLOW = {"torch", "pandas", "matplotlib", "pyarrow", "numba"}


def test_planner_starts_without_slow_libraries() -> None:
    if not (ROOT / "simulator" / "__main__.py").is_file():
        pytest.skip("simulator has no command line yet")
    assert not loaded_by("import simulator.__main__") & SLOW


@pytest.mark.parametrize("package", ["blockmanager", "scheduler", "traces"])
def test_other_command_lines_start_without_slow_libraries(package: str) -> None:
    if not (ROOT / package / "__main__.py").is_file():
        pytest.skip(f"{package} has no command line yet")
    assert not loaded_by(f"import {package}.__main__") & {*SLOW, "simpy"}


def test_catalog_loads_nothing_but_the_standard_library() -> None:
    assert not loaded_by("import catalog") & {*SLOW, "numpy", "simpy", "blockmanager"}
