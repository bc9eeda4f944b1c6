"""Whatever stands in a file or an option, a command ends in order: a result, or one line that says what is wrong.

A few seconds in CI; `make fuzz` (or `FUZZ=5000 pytest tests/evaluation/test_fuzz.py`) makes so many cases of each kind.
"""

import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_data
from fakes import FakeHost, config, make_place
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from judged_data import make_mmvet, make_msvd
from run_folders import store

from llava_consensus import cli, methods
from llava_consensus.cli import arguments
from llava_consensus.errors import ConsensusError
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.reduction.budget import Budget

CASES = int(os.environ.get("FUZZ", "25"))
fuzzed = settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # a case that was found is printed with its blob; making it small takes minutes
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
CODES = {0, 2, 3, 4, 5, 6}
DATA: dict[str, Callable[[Path], Path]] = {
    "gqa": tiny_data.make_gqa,
    "pope": tiny_data.make_pope,
    "textvqa": tiny_data.make_textvqa,
    "mme": tiny_data.make_mme,
    "vqav2": tiny_data.make_vqav2,
    "seed": tiny_data.make_seed,
    "mmbench": tiny_data.make_mmbench,
    "sqa": tiny_data.make_sqa,
    "mmvet": make_mmvet,
    "msvd": make_msvd,
}
ODD_TEXTS = ["", "\x1b[2J", "\ud800", "x" * 300, "a\0b", "../..", "=1+1", "NaN", "é", "\n", "0", "-1", "1" * 5000]
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(ODD_TEXTS)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@cache
def template(name: str) -> Path:
    """The data of a benchmark and answers to all of it."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    DATA[name](folder)
    rows = [
        {"question_id": one.question_id, "prompt": one.prompt or one.text, "text": "A", "answer_id": "x"}
        for one in benchmarks.make(name).load(folder)
    ]
    tiny_data.write_lines(folder / "answers.jsonl", rows)
    return folder


@contextlib.contextmanager
def copy(source: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        yield Path(folder)


def damage(draw: Any, path: Path) -> None:
    """One change of a file: of its bytes, of a value in it, of what it is."""
    content = path.read_bytes()
    kind = draw(
        st.sampled_from(("value", "value", "value", "value", "bytes", "cut", "deep", "gone", "folder", "twice"))
    )
    if kind in ("gone", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        return
    if kind == "value" and path.suffix in (".json", ".jsonl"):
        content = change_value(draw, path.suffix == ".jsonl" or content.count(b"\n{") > 0, content)
    elif kind in ("value", "bytes"):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        content = content[:at] + draw(st.binary(max_size=4)) + content[at + draw(st.integers(0, 3)) :]
    elif kind == "cut":
        content = content[: draw(st.integers(0, len(content)))]
    elif kind == "deep":
        content = b"[" * 100_000
    else:
        content += content
    path.write_bytes(content)


def change_value(draw: Any, lines: bool, content: bytes) -> bytes:
    rows = [json.loads(line) for line in content.splitlines() if line] if lines else json.loads(content)
    place = rows
    while True:
        if not isinstance(place, list | dict) or not place:
            return b"0"
        key = draw(st.sampled_from(range(len(place)) if isinstance(place, list) else list(place)))
        if isinstance(place[key], list | dict) and place[key] and draw(st.integers(0, 3)):
            place = place[key]
            continue
        if draw(st.integers(0, 3)):
            place[key] = draw(values)
        else:
            del place[key]
        break
    return "".join(json.dumps(row) + "\n" for row in rows).encode() if lines else json.dumps(rows).encode()


def ends_in_order(*given: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = cli.main(list(given))
        except SystemExit as usage:
            code = int(usage.code or 0)
    assert code in CODES and "Traceback" not in said.getvalue(), said.getvalue()
    assert "\x1b" not in said.getvalue()


@pytest.mark.parametrize("name", DATA)
@fuzzed
@given(data=st.data())
def test_files_of_a_benchmark(name: str, data: st.DataObject) -> None:
    with copy(template(name)) as folder:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        damage(data.draw, data.draw(st.sampled_from(files)))
        answers, place = ["--answers", str(folder / "answers.jsonl")], ["--data", str(folder)]
        command = data.draw(st.sampled_from(("score", "export", "check", "judge", "json")))
        if command == "check":
            ends_in_order("data", "check", name, *place)
        elif command == "export":
            ends_in_order("score", name, *answers, *place, "--export", str(folder / "out"))
        elif command == "judge":
            model = ["--judge-model", "m", "--judge-url", "http://127.0.0.1:9/v1", "--judge-dry-run"]
            ends_in_order("judge", name, *answers, *place, *model, "--out", str(folder / "judged"))
        else:
            ends_in_order("score", name, *answers, *place, *(["--json"] if command == "json" else []))


@cache
def finished() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    data = make_place(folder / "data", pictures=2)
    loop.run(config(data, data / "model"), folder / "out", Execution(4, progress=False), lambda *_: FakeHost())
    return folder


@fuzzed
@given(data=st.data())
def test_the_folder_of_a_run(data: st.DataObject) -> None:
    with copy(finished()) as folder:
        (run,) = (folder / "out").iterdir()
        damage(data.draw, data.draw(st.sampled_from(sorted(path for path in run.iterdir() if path.name != "lock"))))
        ends_in_order("report", "verify", str(run))
        ends_in_order("report", "--out", str(folder / "out"))
        ends_in_order("report", "compare", str(run), str(run), "--out", str(folder / "out"))
        with contextlib.suppress(ConsensusError):
            place = folder / "data"
            loop.run(
                config(place, place / "model"), folder / "out", Execution(4, progress=False), lambda *_: FakeHost()
            )


@cache
def results() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    store(folder, [1.0, 0.0, 1.0, 1.0], method="full", tokens=None)
    store(folder, [1.0, 0.0, 0.0, 1.0])
    store(folder, None)
    return folder


@fuzzed
@given(data=st.data())
def test_the_folder_of_all_runs(data: st.DataObject) -> None:
    with copy(results()) as folder:
        damage(data.draw, data.draw(st.sampled_from(sorted(folder.glob("*/*.json*")))))
        form = data.draw(st.sampled_from(("markdown", "csv", "latex", "brief")))
        ends_in_order("report", "--out", str(folder), "--format", form)
        ends_in_order("report", "compare", str(folder / "000"), str(folder / "001"), "--out", str(folder))


@fuzzed
@given(data=st.data())
def test_questions_and_pictures_that_are_asked(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = make_place(Path(name), pictures=2, each=2)
        damage(data.draw, data.draw(st.sampled_from(sorted(folder.rglob("eval/**/*.*")))))
        with contextlib.suppress(ConsensusError):
            wanted = config(folder, folder / "model")
            loop.run(wanted, folder / "out", Execution(4, progress=False), lambda *_: FakeHost())


@pytest.mark.parametrize("name", methods.METHODS)
@fuzzed
@given(data=st.data())
def test_options_of_a_method(name: str, data: st.DataObject) -> None:
    keys = [*getattr(methods.METHODS[name], "__dataclass_fields__", {}), "nothing"]
    pairs = st.tuples(st.sampled_from(keys), values.map(json.dumps) | st.text(max_size=6)).map("=".join)
    with contextlib.suppress(ConsensusError):
        methods.make(name, **arguments.options(data.draw(st.lists(pairs, max_size=2))))
        Budget(*data.draw(st.tuples(st.integers(-2, 2**70), st.none() | st.integers(-2, 2**70))))


OPTIONS = {
    "--tokens": st.integers(-2, 10**30).map(str) | st.text(max_size=4),
    "--merged": st.integers(-2, 10**30).map(str),
    "--limit": st.integers(-2, 0).map(str) | st.text(max_size=3),
    "--batch": st.integers(-2, 0).map(str),
    "--workers": st.integers(-2, 0).map(str),
    "--match": st.text(max_size=5),
    "--fail-on-error": st.text(max_size=5) | st.sampled_from(("nan", "inf%", "-1", "1e999")),
    "--benchmark-option": st.text(max_size=5),
    "--option": st.text(max_size=5),
    "--device": st.text(max_size=5).map("x{}".format),
    "--dtype": st.text(max_size=5),
    "--conversation": st.text(max_size=5),
    "--max-new-tokens": st.integers(-2, 0).map(str),
    "--model": st.sampled_from(ODD_TEXTS),
    "--data": st.sampled_from(ODD_TEXTS),
    "--method": st.text(max_size=5) | st.sampled_from(ODD_TEXTS),
}


@fuzzed
@given(data=st.data())
def test_options_of_an_evaluation(data: st.DataObject) -> None:
    """`--limit 0` at the latest ends it before anything is loaded."""
    chosen = data.draw(st.lists(st.sampled_from(sorted(OPTIONS)), min_size=1, max_size=3, unique=True))
    given = [f"{name}={data.draw(OPTIONS[name])}" for name in chosen]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        ends_in_order("eval", "gqa", *given, "--limit=0", "--out", folder)


JUDGE = {
    "--judge-url": st.sampled_from(
        ("http://h:", "http://h:x/v1", "http://[::1", "ftp://h", "", "http://h:99999/v1", "//")
    ),
    "--judge-option": st.text(max_size=8) | st.sampled_from(("a=NaN", "a=Infinity", "a=[1e999]", "a=\ud800")),
    "--judge-timeout": st.sampled_from(("nan", "inf", "-1", "0", "1e999")),
    "--judge-tries": st.sampled_from(("0", "-1", "1" * 5000)),
    "--concurrency": st.sampled_from(("0", "-1")),
    "--runs": st.sampled_from(("0", "-1")),
    "--max-cost": st.sampled_from(("nan", "inf", "-1")),
    "--max-requests": st.sampled_from(("-1", "1" * 5000)),
    "--judge-prompt-from": st.sampled_from(ODD_TEXTS),
    "--full-answers": st.sampled_from(ODD_TEXTS),
    "--answers": st.sampled_from(ODD_TEXTS),
}


@fuzzed
@given(data=st.data())
def test_options_of_a_judge(data: st.DataObject) -> None:
    pytest.importorskip("openai")
    folder = template("mmvet")
    name = data.draw(st.sampled_from(sorted(JUDGE)))
    start = ["judge", "mmvet", "--judge-model", "m", "--data", str(folder), "--answers", str(folder / "answers.jsonl")]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as out:
        option = f"{name}={data.draw(JUDGE[name])}"
        ends_in_order(*start, "--judge-url", "http://127.0.0.1:9/v1", option, "--judge-dry-run", "--out", out)
