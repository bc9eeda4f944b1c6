"""Size and traces of a checkout, as a table: `python tools/measure.py [ROOT] [--no-cases]`.

Standard library alone; ROOT/.venv runs the tests' collection and the traces, on the embedded model and on a tiny
Qwen2.5-VL. A trace counts calls of the package's functions (no module or class bodies): its files, its distinct
functions, and its moves, which are calls whose file is not that of the call before.
"""

import argparse
import ast
import os
import subprocess
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "llava_consensus"
PARTS = {  # rows of the size table: pathspecs of git
    "paper, cli/paper": ("llava_consensus/paper", "llava_consensus/cli/paper.py"),
    "evaluation/models": ("llava_consensus/evaluation/models",),
    "evaluation/report": ("llava_consensus/evaluation/report",),
    "evaluation/runs, files, media, data, checksums": tuple(
        f"llava_consensus/evaluation/{name}" for name in ("runs", "data", "files.py", "media*", "checksums.py")
    ),
    "evaluation/judge": ("llava_consensus/evaluation/judge",),
    "evaluation/benchmarks": ("llava_consensus/evaluation/benchmarks",),
    "evaluation/bench": ("llava_consensus/evaluation/bench",),
    "demo": ("llava_consensus/demo",),
    "training": ("llava_consensus/training",),
    "cli without paper": ("llava_consensus/cli", ":!llava_consensus/cli/paper.py"),
    "playground/mini": ("playground/mini",),
    "tests outside tests/hosts": ("tests", ":!tests/hosts"),
}
READY = (".venv/bin/pytest", "playground/mini/eval/.complete")  # of `make setup-dev data`
TRACE = """
import contextlib, inspect, io, pathlib, sys
package = str(pathlib.Path("llava_consensus").resolve()) + "/"
calls = []
def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(package) and code.co_flags & inspect.CO_OPTIMIZED:
        calls.append((code.co_filename, getattr(code, "co_qualname", code.co_name)))
def report():
    files = [one[0] for one in calls]
    moves = sum(one != other for one, other in zip(files, files[1:]))
    loaded = sum((getattr(module, "__file__", None) or "").startswith(package) for module in list(sys.modules.values()))
    print("trace", len(set(files)), len(set(calls)), moves, loaded)
"""
EVAL = """
from llava_consensus import cli
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    sys.setprofile(note)
    code = cli.main(["eval", "gqa", "--tokens", "64", "--limit", "16", "--device", "cpu", "--out", sys.argv[1]])
    sys.setprofile(None)
assert not code, code
report()
"""
ATTACH = """
import torch, transformers
from llava_consensus import attach
text = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=120, rope_scaling={"type": "default", "rope_type": "default", "mrope_section": [1, 1, 2]})
vision = dict(depth=4, hidden_size=32, intermediate_size=64, num_heads=4, out_hidden_size=32,
              fullatt_block_indexes=[1, 3], window_size=56, patch_size=14, spatial_merge_size=2, temporal_patch_size=2)
marks = dict(image_token_id=101, video_token_id=102, vision_start_token_id=103, vision_end_token_id=104)
config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **marks)
model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
grid = torch.tensor([[1, 16, 16]])
ids = torch.tensor([[5, 103, *[101] * 64, 104, 6, 7, 8]])
inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=torch.randn(256, 1176),
              image_grid_thw=grid, mm_token_type_ids=(ids == 101).int())
sys.setprofile(note)
with attach(model, method="consensusdrop", tokens=16):
    model.generate(**inputs, max_new_tokens=1, do_sample=False)
sys.setprofile(None)
report()
"""


def sources(root: Path, *folders: str) -> list[Path]:
    """The Python files that git tracks below folders."""
    return [path for path in tracked(root, *folders) if path.suffix == ".py"]


def tracked(root: Path, *folders: str) -> list[Path]:
    """The files that git tracks below folders, of all without one."""
    names = subprocess.run(
        ["git", "ls-files", "-z", *folders], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    return [path for name in names.split("\0") if name and (path := root / name).is_file()]


def lines(paths: list[Path]) -> int:
    """Lines of files."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def double_names(root: Path) -> list[str]:
    """Class names that stand for more than one class of the package."""
    trees = (ast.parse(path.read_text("utf-8")) for path in sources(root, PACKAGE))
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in names.items() if count > 1)


def named_picture(root: Path) -> int:
    """Uses of identifiers that say picture where users say image."""
    count = 0
    for path in sources(root, PACKAGE):
        with path.open("rb") as file:
            names = (token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME)
            count += sum("picture" in name.lower() for name in names)
    return count


def imports(path: Path, module: str) -> Iterator[str]:
    """Every module or name that a file imports, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: -node.level + (path.name == "__init__.py") or None]
                base = ".".join([*parent, *([base] if base else [])])
            yield from (f"{base}.{one.name}" for one in node.names)


def circles(root: Path) -> list[set[str]]:
    """Sets of modules of the package that import each other, by all imports (strongly connected components)."""
    files = {}
    for path in sources(root, PACKAGE):
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        found = (name if name in files else name.rpartition(".")[0] for name in imports(path, module))
        graph[module] = {name for name in found if name in files and name != module}
    reach: dict[str, set[str]] = {module: set() for module in graph}
    for module, seen in reach.items():
        open_ = [module]
        while open_:
            new = graph[open_.pop()] - seen
            seen |= new
            open_ += new
    rings = {tuple(sorted(other for other in reach[module] if module in reach[other])) for module in reach}
    return [set(ring) for ring in rings if len(ring) > 1]


def of(root: Path) -> dict[str, str]:
    """The environment in which the package is that of the checkout."""
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def trace(root: Path, flow: str) -> list[str]:
    """Files, functions, moves and loaded files of a flow."""
    python = root / ".venv/bin/python"
    with tempfile.TemporaryDirectory() as out:
        done = subprocess.run([python, "-c", TRACE + flow, out], cwd=root, capture_output=True, text=True, env=of(root))
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("trace ")]
    return found[0] if found else ["failed", (done.stderr.strip().splitlines() or ["?"])[-1]]


def cases(root: Path) -> str:
    """Cases of the suite, as pytest collects them."""
    command = [str(root / ".venv/bin/python"), "-m", "pytest", "--collect-only", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=of(root))
    return str(sum("::" in line for line in done.stdout.splitlines()))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", default=".", type=Path)
    parser.add_argument(
        "--no-cases", action="store_true", help="leave out the collection of the tests, which takes a minute"
    )
    given = parser.parse_args()
    root = given.root.resolve()
    lacking = [name for name in READY if not (root / name).exists()]
    if lacking:
        parser.error(f"{root} has no {' and no '.join(lacking)}. Run `make setup-dev data` there first")
    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")]
    names, rings = double_names(root), circles(root)
    for flow, text in (("eval gqa, official LLaVA", EVAL), ("attach + generate, Qwen2.5-VL", ATTACH)):
        print(f"{flow}: files, functions, moves; files loaded: {' '.join(trace(root, text))}")
    print(f"lines of {PACKAGE}: {lines(sources(root, PACKAGE))}")
    print(f"lines of tests: {lines(sources(root, 'tests'))}")
    for part, specs in PARTS.items():
        print(f"  {part}: {lines(sources(root, *specs))}")
    print(f"lines of eval_scripts, tools: {lines(tracked(root, 'eval_scripts'))}, {lines(tracked(root, 'tools'))}")
    if not given.no_cases:
        print(f"cases of the suite: {cases(root)}")
    print(f"words of docs: {sum(len(path.read_text('utf-8').split()) for path in pages)}")
    print(f"class names with two meanings: {len(names)} ({', '.join(names)})")
    print(f"identifiers named picture: {named_picture(root)}")
    print(f"circles: {len(rings)} ({'; '.join(', '.join(sorted(ring)) for ring in rings)})")
    print(f"bytes of the tree: {sum(path.stat().st_size for path in tracked(root))}")


if __name__ == "__main__":
    main()
