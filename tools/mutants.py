"""Share of mutants that the tests kill: mutants of each of PLACES, made by cosmic-ray, one change each, and tried in
turn by those tests of its place that run the changed line. `make mutate SAMPLE=40` prints those that survive, and how
many of the 40 of each place do not.

    python tools/mutants.py list 40 > mutants.json    # where cosmic-ray is installed
    python tools/mutants.py try mutants.json [240]    # where the tests run; for so many seconds

The process that tries imports what is slow to import once and forks for every mutant. A mutant stands in the child's
memory alone, in place of what Python would have read of the file, so that no file is ever changed. The fastest tests
come first. Which test runs which line, and the verdicts, are kept in files beside `mutants.json`: after a stop the same
command goes on, and after a test has changed it asks the survivors of its place again.
"""

import ast
import hashlib
import json
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SEED = 0
MATHS = (
    *("tests/reduction", "tests/methods", "tests/evaluation/test_account.py"),
    *(f"tests/hosts/test_{name}.py" for name in ("compositions", "before_tower", "parts")),
)
HOSTS = (
    *("tests/hosts", "tests/test_wrong_input.py", "tests/reduction/test_shares.py"),
    *(f"tests/methods/test_{name}.py" for name in ("cdpruner", "tome", "calibrated", "methods_before_projector")),
    *("tests/methods/test_tower_methods.py", "tests/methods/test_decoder_methods.py"),
    *(f"tests/evaluation/models/test_{name}.py" for name in ("check_host", "hf_harness", "loading")),
    *("tests/evaluation/report/test_overlay.py", "tests/project/test_mini_model.py", "tests/training/test_training.py"),
)
BENCHMARKS = (
    *("tests/evaluation/benchmarks", "tests/evaluation/test_user_files.py"),
    *("tests/cli/test_commands.py", "tests/project/test_mini_benchmarks.py"),
)
SERVING = tuple(f"tests/serving/test_{name}.py" for name in ("setting", "plan", "video"))
PLACES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # files of each place, and the tests that hold them
    "reduction": (("reduction/*.py",), MATHS),
    "methods": (("methods/*.py",), MATHS),
    "hosts": (("hosts/*.py",), HOSTS),
    "benchmarks": (("evaluation/benchmarks/*.py",), BENCHMARKS),
    "serving": (("serving/setting.py", "serving/plan.py"), SERVING),
}
LEFT_OUT = ("RemoveDecorator", "ExceptionReplacer")  # which say nothing of what is computed


def mutants(place: str) -> Iterator[dict[str, object]]:
    """All mutants of a place, without those of annotations."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    globs, tests = PLACES[place]
    for path in sorted(path for glob in globs for path in (ROOT / "llava_consensus").glob(glob)):
        nodes, code = list(ast_nodes(get_ast_from_path(path))), path.read_text("utf-8")
        types = [
            (one.lineno, one.col_offset, one.end_lineno, one.end_col_offset)
            for node in ast.walk(ast.parse(code))
            for one in (getattr(node, "annotation", None), getattr(node, "returns", None))
            if one is not None
        ]
        for name in operator_names():
            if get_operator(name).arguments() or any(word in name for word in LEFT_OUT):
                continue
            positions = [position for node in nodes for position in get_operator(name)().mutation_positions(node)]
            for number, (start, _) in enumerate(positions):
                if not any(one[:2] <= tuple(start) < one[2:] for one in types):
                    where = {"place": place, "file": str(path.relative_to(ROOT)), "line": start[0], "tests": tests}
                    made = partial(mutate_code, code, get_operator(name)(), number)
                    yield {**where, "operator": name.partition("/")[2], "code": made}


def sampled(count: int) -> list[dict[str, object]]:
    """`count` mutants of each place, drawn with a fixed seed, in the order of their lines."""
    drawn = []
    for place in PLACES:
        found = list(mutants(place))
        chosen = random.Random(SEED).sample(found, min(count, len(found)))
        chosen.sort(key=lambda one: (str(one["file"]), int(str(one["line"]))))
        drawn += [{**one, "of": len(found), "code": one["code"]()} for one in chosen]  # type: ignore[operator]
    return drawn


class Durations:
    """Plugin of pytest that writes the seconds of every test to a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.seconds), "utf-8")


def tried(asked: list[str], file: str = "", code: str = "", limit: float = 3600, plugins: Sequence[Any] = ()) -> int:
    """Exit code of pytest with this text in place of a file; not 0 where it takes more than `limit` seconds of the
    processor, or twenty times as many by the clock.
    """
    begun, child = time.monotonic(), os.fork()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, int(limit) + 2))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        plain = SourceFileLoader.get_code

        def get_code(loader: SourceFileLoader, name: str) -> object:
            changed = file and Path(loader.path).resolve() == ROOT / file
            return compile(code, loader.path, "exec") if changed else plain(loader, name)

        SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
        import pytest

        os._exit(int(pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", *asked], plugins=list(plugins))))
    while time.monotonic() - begun < 20 * limit:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 1


@cache
def measured(tests: tuple[str, ...], folder: Path) -> tuple[dict[str, dict[str, list[str]]], dict[str, float]]:
    """For every file and line, the tests that run it, "" for an import; and the seconds of every test."""
    place = folder / f"lines-{contents(tests)}.json"
    if not place.exists():
        coverage, seconds = place.with_suffix(".coverage"), place.with_suffix(".seconds")
        os.environ["COVERAGE_FILE"] = str(coverage)
        options = ["--cov=llava_consensus", "--cov-context=test", "--cov-report="]
        if tried([*tests, *options], plugins=[Durations(seconds)]):
            sys.exit(f"{' '.join(tests)}: fails without any mutant")
        from coverage import CoverageData

        data = CoverageData(str(coverage))
        data.read()
        found = {}
        for file in sorted(data.measured_files()):
            by_line = data.contexts_by_lineno(file).items()
            lines = {str(line): sorted({one.rpartition("|")[0] for one in by}) for line, by in by_line}
            found[str(Path(file).relative_to(ROOT))] = lines
        place.write_text(json.dumps([found, json.loads(seconds.read_text("utf-8"))]), "utf-8")
    lines, durations = json.loads(place.read_text("utf-8"))
    return lines, durations


def running(by: "dict[str, list[str]]", file: str, line: int) -> list[str]:
    """The tests that run the statement at a line; none where an import runs it, so that any test may see it."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    statements = [one for one in ast.walk(tree) if isinstance(one, ast.stmt)]
    around = [one for one in statements if one.lineno <= line <= (one.end_lineno or line)]
    if not around:  # a decorator of a class
        return []
    inner = max(around, key=lambda one: one.lineno)
    body = getattr(inner, "body", None)
    last = body[0].lineno - 1 if body else inner.end_lineno or line
    of = {test for at in range(inner.lineno, max(line, last) + 1) for test in by.get(str(at), [])}
    return sorted(of) if "" not in of else []


def try_all(path: str, seconds: float) -> int:
    """Tries the mutants of a file that have no verdict yet, and prints those that survive. Stops after some seconds,
    with exit code 3; the same command goes on.
    """
    begun = time.monotonic()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import transformers
    from transformers import CLIPVisionModel, LlamaForCausalLM  # noqa: F401  to import them once for all children

    assert transformers and "llava_consensus" not in sys.modules
    found, log = json.loads(Path(path).read_text("utf-8")), Path(path).with_name("verdicts.txt")
    known = dict(line.split() for line in log.read_text("utf-8").splitlines()) if log.exists() else {}
    counts: dict[str, Counter[str]] = {}
    for one in found:
        name = hashlib.sha256((one["file"] + one["code"]).encode()).hexdigest()[:16]
        verdict = known.get(name)
        if verdict not in ("killed", state := contents(tuple(one["tests"]))):
            if time.monotonic() - begun > seconds:
                return 3
            lines, durations = measured(tuple(one["tests"]), Path(path).parent)
            tests = running(lines.get(one["file"], {}), one["file"], one["line"]) or list(durations)
            tests.sort(key=lambda test: durations[test])
            limit = 60 + 3 * sum(durations[test] for test in tests)
            verdict = "killed" if tried(tests, one["file"], one["code"], limit) else state
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{name} {verdict}\n")
        counts.setdefault(one["place"], Counter())["killed" if verdict == "killed" else "survived"] += 1
        if verdict != "killed":
            print(f"survives: {one['file']}:{one['line']} {one['operator']}", flush=True)
    sizes = {one["place"]: one["of"] for one in found}
    for place, count in counts.items():
        print(f"{place}: {count['killed']} of {count.total()} killed, drawn from {sizes[place]} with seed {SEED}")
    return 0


@cache
def contents(tests: tuple[str, ...]) -> str:
    """Checksum of these test files: a survivor is tried again once they have changed."""
    files = [file for one in tests for file in ([ROOT / one] if one.endswith(".py") else (ROOT / one).rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]


if __name__ == "__main__":
    if sys.argv[1] == "list":
        json.dump(sampled(int(sys.argv[2])), sys.stdout)
    else:
        sys.exit(try_all(sys.argv[2], float(sys.argv[3]) if sys.argv[3:] else float("inf")))
