"""How much of the maths and of the hosts the tests hold: mutants of them, made by cosmic-ray, one change each,
and tried in turn by those tests of its place that run the changed line. `make mutate SAMPLE=100` prints those that
survive and how many do not.

    python tests/mutants.py list 100 > mutants.json   # where cosmic-ray is installed
    python tests/mutants.py try mutants.json          # where the tests run

The process that tries imports what is slow to import once and forks for every mutant. A mutant stands in the child's
memory alone, in place of what Python would have read of the file, so that no file is ever changed. Which test runs
which line, and which mutants were killed, is kept in files beside `mutants.json`: after a stop the same command goes
on, and after a new test it asks the survivors alone.
"""

import ast
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from importlib.machinery import SourceFileLoader
from pathlib import Path

ROOT = Path(__file__).parent.parent
SEED = 0
MATHS = ("tests/reduction", "tests/methods", "tests/evaluation/test_account.py")
HOSTS = tuple(
    f"tests/hosts/test_{name}.py"
    for name in (
        *("layouts", "shares", "newlines", "hf_hosts", "loops", "decoder", "llava_host", "llava_loops", "kept_axes"),
        *("attachment", "language_models", "ladder", "towers"),
    )
)
TESTS = {  # of the files in each place
    "llava_consensus/reduction/*.py": MATHS,
    "llava_consensus/methods/*.py": MATHS,
    "llava_consensus/hosts/*.py": HOSTS,
    "llava_consensus/hosts/hf/*.py": HOSTS,
    "llava_consensus/evaluation/benchmarks/*.py": ("tests/evaluation/benchmarks",),
    "llava_consensus/serving/setting.py": ("tests/serving/test_setting.py",),
    "llava_consensus/serving/plan.py": ("tests/serving/test_setting.py", "tests/serving/test_video.py"),
}
LEFT_OUT = ("RemoveDecorator", "ExceptionReplacer")  # which say nothing of what is computed


def mutants(sample: int) -> list[dict[str, object]]:
    """`sample` of all mutants, drawn once and for all, without those of annotations."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    found = []
    for path, tests in [(path, tests) for glob, tests in TESTS.items() for path in sorted(ROOT.glob(glob))]:
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
            places = [place for node in nodes for place in get_operator(name)().mutation_positions(node)]
            for number, (start, _) in enumerate(places):
                if not any(one[:2] <= tuple(start) < one[2:] for one in types):
                    found.append((path, tests, name, number, start[0], code))
    chosen = random.Random(SEED).sample(found, min(sample, len(found)))
    return [
        {
            "file": str(path.relative_to(ROOT)),
            "line": line,
            "operator": name.partition("/")[2],
            "tests": tests,
            "of": len(found),
            "code": mutate_code(code, get_operator(name)(), number),
        }
        for path, tests, name, number, line, code in sorted(chosen, key=lambda one: (str(one[0]), one[4]))
    ]


def tried(asked: list[str], file: str = "", code: str = "", limit: float = 3600) -> tuple[int, float]:
    """Exit code of pytest with this text in place of a file, 1 where it takes too long; and the seconds."""
    begun, child = time.monotonic(), os.fork()
    if not child:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        plain = SourceFileLoader.get_code

        def get_code(loader: SourceFileLoader, name: str) -> object:
            changed = file and Path(loader.path).resolve() == ROOT / file
            return compile(code, loader.path, "exec") if changed else plain(loader, name)

        SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
        import pytest

        os._exit(int(pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", *asked])))
    while time.monotonic() - begun < limit:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), time.monotonic() - begun
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 1, limit


def lines_run(tests: list[str], kept: Path) -> "dict[str, dict[str, list[str]]]":
    """For every file and line, the tests that run it, as those say that pass without a mutant; "" is an import."""
    place = kept.with_name(f"lines-{hashlib.sha256(' '.join(tests).encode()).hexdigest()[:8]}.json")
    if not place.exists():
        measured = place.with_suffix(".coverage")
        os.environ["COVERAGE_FILE"] = str(measured)
        if tried([*tests, "--cov=llava_consensus", "--cov-context=test", "--cov-report="])[0]:
            sys.exit(f"{' '.join(tests)}: fails without any mutant")
        from coverage import CoverageData

        data = CoverageData(str(measured))
        data.read()
        found = {
            str(Path(file).relative_to(ROOT)): {
                str(line): sorted({one.rpartition("|")[0] for one in by})
                for line, by in data.contexts_by_lineno(file).items()
            }
            for file in sorted(data.measured_files())
        }
        place.write_text(json.dumps(found), "utf-8")
    return dict(json.loads(place.read_text("utf-8")))


def running(by: "dict[str, list[str]]", file: str, line: int) -> list[str]:
    """The tests that run the statement at a line; none where an import runs it, so that any test may see it."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    around = [
        one for one in ast.walk(tree) if isinstance(one, ast.stmt) and one.lineno <= line <= (one.end_lineno or line)
    ]
    inner = max(around, key=lambda one: one.lineno)
    last = inner.body[0].lineno - 1 if getattr(inner, "body", None) else inner.end_lineno or line
    of = {test for at in range(inner.lineno, max(line, last) + 1) for test in by.get(str(at), [])}
    return sorted(of) if "" not in of else []


def try_all(path: str) -> int:
    """Tries the mutants of a file and prints those that survive."""
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import transformers
    from transformers import CLIPVisionModel, LlamaForCausalLM  # noqa: F401  to import them once for all children

    assert transformers and "llava_consensus" not in sys.modules
    found, log = json.loads(Path(path).read_text("utf-8")), Path(path).with_name("killed.txt")
    dead = set(log.read_text("utf-8").split()) if log.exists() else set()
    killed, survived = Counter[str](), Counter[str]()
    for one in found:
        name = hashlib.sha256((one["file"] + one["code"]).encode()).hexdigest()[:16]
        place = str(Path(one["file"]).parent)
        by = lines_run(one["tests"], Path(path)).get(one["file"], {})
        tests = running(by, one["file"], one["line"]) or one["tests"]
        if name in dead or tried(tests, one["file"], one["code"], 600)[0]:
            killed[place] += 1
            if name not in dead:
                with log.open("a", encoding="utf-8") as file:
                    file.write(name + "\n")
        else:
            survived[place] += 1
            print(f"survives: {one['file']}:{one['line']} {one['operator']}", flush=True)
    for place in sorted(killed | survived):
        print(f"{place}: {killed[place]} of {killed[place] + survived[place]} killed")
    print(f"{killed.total()} of {len(found)} mutants killed, drawn from {found[0]['of']} with seed {SEED}")
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "list":
        json.dump(mutants(int(sys.argv[2])), sys.stdout)
    else:
        sys.exit(try_all(sys.argv[2]))
