"""Imports point one way (docs/design.md), nothing heavy happens at import, and the prose names what exists."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "llava_consensus"
MAY_IMPORT = {  # room of the package -> rooms it may import, beside itself
    "errors": set(),
    "files": {"errors"},
    "reduction": {"errors"},
    "methods": {"reduction", "errors"},
    "hosts": {"methods", "reduction", "errors"},
    "scorers": {"errors"},
    "benchmarks": {"scorers", "files", "errors"},
    "judge": {"benchmarks", "scorers", "files", "errors"},
    "runs": {"benchmarks", "hosts", "methods", "reduction", "files", "errors"},
    "report": {"files", "errors"},
}
FREE = {"cli", "__init__"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    """The room a file belongs to: its folder, or its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Full names of everything a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    own = part(path)
    if own in FREE:
        return
    assert own in MAY_IMPORT, f"{own} is new: say in this test and in docs/design.md what it may import"
    used = {name.split(".")[1] for name in imported(path) if name.startswith("llava_consensus.")} - {own}
    assert used <= MAY_IMPORT[own], f"{own} must not import {sorted(used - MAY_IMPORT[own])}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_hosts_import_a_model_library_and_maths_import_torch_alone(path: Path) -> None:
    outside = {name.split(".")[0] for name in imported(path)}
    if part(path) != "hosts":
        assert not outside & {"llava", "transformers"}
    if part(path) in {"reduction", "methods"}:
        assert outside - set(sys.stdlib_module_names) <= {"torch", "llava_consensus"}
    if part(path) == "report":
        assert "torch" not in outside


def test_importing_the_package_and_its_command_line_loads_nothing_heavy() -> None:
    code = (
        "import sys, llava_consensus, llava_consensus.cli;"
        "print(sorted({'torch', 'transformers', 'llava', 'PIL'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_every_module_says_what_it_is() -> None:
    assert [str(path) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_no_host_synchronisation_in_the_reduction_path() -> None:
    files = [path for path in MODULES if part(path) in {"reduction", "methods"}]
    calls = [
        f"{path.name}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("item", "tolist", "cpu", "numpy", "nonzero")
    ]
    assert calls == []
