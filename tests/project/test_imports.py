"""Imports point one way (docs/design.md), nothing heavy happens at import, and the prose names what exists."""

import ast
import sys
from pathlib import Path

import pytest
import torch
from units import work

from llava_consensus.methods import make
from llava_consensus.reduction.costs import SHAPES
from tools.measure import circles

PACKAGE = Path(__file__).parents[2] / "llava_consensus"
MAY_IMPORT = {  # layer of the package -> layers it may import, beside itself
    "errors": set(),
    "entry_points": {"errors"},
    "reduction": {"errors"},
    "methods": {"reduction", "errors", "entry_points"},
    "hosts": {"methods", "reduction", "errors", "entry_points"},
    "evaluation": {"serving", "hosts", "methods", "reduction", "errors", "entry_points"},
    "serving": {"hosts", "methods", "reduction", "errors"},
    "paper": {"evaluation", "hosts", "methods", "reduction", "errors"},
    "training": {"evaluation", "hosts", "methods", "reduction", "errors"},
    "evidence": {"methods", "reduction", "errors"},
    "demo": {"evaluation", "hosts", "methods", "reduction", "errors"},
}
FREE = {"cli", "__init__"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    """The room a file belongs to: its folder, or its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Full names of everything a file imports: inside functions and under TYPE_CHECKING too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports are not read here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_point_one_way_and_every_module_says_what_it_is() -> None:
    wrong = []
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), path
        own = part(path)
        if own not in FREE:
            assert own in MAY_IMPORT, f"{own} is new: say in this test and in docs/design.md what it may import"
            used = {name.split(".")[1] for name in imported(path) if name.startswith("llava_consensus.")}
            wrong += [f"{path} imports {name}" for name in used - MAY_IMPORT[own] - {own}]
    assert wrong == []
    assert circles(PACKAGE.parent) == [], "no imports go in a circle"


def test_only_hosts_and_training_import_a_model_library_and_maths_import_torch_alone() -> None:
    for path in MODULES:
        outside = {name.split(".")[0] for name in imported(path)}
        if part(path) not in {"hosts", "training", "serving"} and path.parent.name != "models":
            assert not outside & {"llava", "transformers"}, path
        assert part(path) == "serving" or path.name in {"vllm.py", "serving.py"} or "vllm" not in outside, path
        if part(path) in {"reduction", "methods"}:
            files = {"safetensors"} if path.name == "scorer.py" else set()  # in which weights of scorers are published
            assert outside - set(sys.stdlib_module_names) - files <= {"torch", "llava_consensus"}, path


ON_THE_CPU_ALONE = {"_halve_long", "_checksum"}  # functions that say so and are called there alone: nobody waits there

ADAPTIVE = {"FlashVID", "lengths"}  # how many tokens are left follows from the video, so it waits, one video at a time


def test_no_tensor_is_read_in_the_reduction_path() -> None:
    files = [path for path in MODULES if part(path) in {"reduction", "methods"}]
    calls = [
        f"{path.name}:{node.lineno}"
        for path in files
        for function in ast.parse(path.read_text()).body
        if getattr(function, "name", "") not in ON_THE_CPU_ALONE | ADAPTIVE
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr in ("item", "tolist", "cpu", "numpy", "nonzero")
    ]
    assert calls == []


@pytest.mark.parametrize(("name", "option"), [("prumerge", {"budget": "adaptive"}), ("sparsevlm", {"version": "1.0"})])
@torch.no_grad()
def test_only_adaptive_methods_wait(name: str, option: dict[str, str]) -> None:
    """They say so: how many tokens they leave is read from the data. Tensors on the device "meta" have no numbers, so
    that reading one is an error; on these every other method is counted (`methods/test_method_costs.py`).
    """
    method = make(name, **option)
    assert method.adaptive and not make(name).adaptive
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        work(method, SHAPES["llava-1.5-7b"], 64)
