"""Imports point one way (docs/design.md), nothing heavy happens at import, and the prose names what exists."""

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from units import work

from llava_consensus.methods import make
from llava_consensus.reduction.costs import SHAPES

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
    "evidence": {"paper", "methods", "reduction", "errors"},
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


def imports(package: Path) -> dict[str, set[str]]:
    """Modules of a package, each with those that it imports anywhere in its code."""
    paths = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }
    return {
        module: {name if name in paths else name.rpartition(".")[0] for name in imported(path)}
        & paths.keys() - {module}
        for module, path in paths.items()
    }


def circles(edges: dict[str, set[str]]) -> Iterator[set[str]]:
    """Sets of modules that reach each other."""

    def reached(module: str) -> set[str]:
        found, todo = set[str](), [module]
        while todo:
            new = edges[todo.pop()] - found
            found |= new
            todo += new
        return found

    reach = {module: reached(module) for module in edges}
    return (set(one) for one in {frozenset(b for b in reach[a] if a in reach[b]) for a in edges} if len(one) > 1)


def test_imports_point_one_way() -> None:
    wrong = []
    for path in MODULES:
        own = part(path)
        if own not in FREE:
            assert own in MAY_IMPORT, f"{own} is new: say in this test and in docs/design.md what it may import"
            used = {name.split(".")[1] for name in imported(path) if name.startswith("llava_consensus.")}
            wrong += [f"{path} imports {name}" for name in used - MAY_IMPORT[own] - {own}]
    assert wrong == []


def test_only_hosts_and_training_import_a_model_library_and_maths_import_torch_alone() -> None:
    for path in MODULES:
        outside = {name.split(".")[0] for name in imported(path)}
        if part(path) not in {"hosts", "training", "serving"} and path.parent.name != "models":
            assert not outside & {"llava", "transformers"}, path
        assert part(path) == "serving" or path.name in {"vllm.py", "serving.py"} or "vllm" not in outside, path
        if part(path) in {"reduction", "methods"}:
            files = {"safetensors"} if path.name == "scorer.py" else set()  # in which weights of scorers are published
            assert outside - set(sys.stdlib_module_names) - files <= {"torch", "llava_consensus"}, path
        if part(path) == "report":
            assert "torch" not in outside, path


def test_no_imports_go_in_a_circle() -> None:
    assert [sorted(one) for one in circles(imports(PACKAGE))] == []


def test_a_circle_within_functions_or_types_is_found(tmp_path: Path) -> None:
    package = tmp_path / "made"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "deep" / "__init__.py").write_text("def f():\n    from made import a\n")
    (package / "a.py").write_text("import typing\nif typing.TYPE_CHECKING:\n    from made.b import thing\n")
    (package / "b.py").write_text("import made.deep\nthing = 1\n")
    (package / "c.py").write_text("from made.a import typing\n")
    assert [sorted(one) for one in circles(imports(package))] == [["made.a", "made.b", "made.deep"]]


def test_every_module_says_what_it_is() -> None:
    assert [str(path) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))] == []


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


@pytest.mark.parametrize("options", [("prumerge", "budget", "adaptive"), ("sparsevlm", "version", "1.0")])
@torch.no_grad()
def test_only_adaptive_methods_wait(options: tuple[str, str, str]) -> None:
    """They say so: how many tokens they leave is read from the data. Tensors on the device "meta" have no numbers, so
    that reading one is an error; on these every other method is counted (`methods/test_method_costs.py`).
    """
    name, option, value = options
    method = make(name, **{option: value})
    assert method.adaptive and not make(name).adaptive
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        work(method, SHAPES["llava-1.5-7b"], 64)


WAITING: list[Callable[[torch.Tensor], object]] = [
    lambda tensor: int(tensor),
    lambda tensor: float(tensor),
    lambda tensor: bool(tensor),
    lambda tensor: 1 if tensor else 0,
    lambda tensor: tensor.item(),
    lambda tensor: tensor[None].tolist(),
    lambda tensor: tensor.cpu(),
    lambda tensor: torch.equal(tensor, tensor + 1),
    lambda tensor: torch.ones(3, device="meta")[tensor[None] > 0],
    lambda tensor: tensor[None].nonzero(),
]


def test_every_way_of_waiting_is_noticed() -> None:
    for read in WAITING:
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(torch.empty((), device="meta"))
