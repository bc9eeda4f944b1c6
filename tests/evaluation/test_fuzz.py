"""Damaged files: a command ends in order, with a result or one line that says what is wrong.

A few seconds in CI; `make fuzz` (or `FUZZ=5000 pytest tests/evaluation/test_fuzz.py`) makes so many cases of each kind.
"""

import contextlib
import io
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import tiny_data
from fakes import FakeHost, config, make_place
from hf_checkpoints import checkpoint
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from judged_data import make_mmvet, make_msvd
from PIL import Image

from llava_consensus import cli, methods
from llava_consensus.errors import ConsensusError, ImageError
from llava_consensus.evaluation import benchmarks, models
from llava_consensus.evaluation.media import open_image
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.reduction.budget import Budget
from llava_consensus.training.plan import read

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
MINI = Path(__file__).parents[2] / "checkpoints" / "llava-mini"
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
TERMINAL = ["\x1b[2J", "\ud800", "a\0b", "é", "\n"]
ODD_TEXTS = ["", *TERMINAL, "x" * 300, "../..", "=1+1", "NaN", "1e400", "$x$", "<image>", "0", "-1", "1" * 5000]
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.just([1, 2])
    | st.just({"total": 1})
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
        st.sampled_from(("value", "value", "value", "value", "bytes", "cut", "deep", "gone", "folder", "pipe", "twice"))
    )
    if kind in ("gone", "folder", "pipe"):
        path.unlink()
        if kind != "gone":
            (path.mkdir if kind == "folder" else partial(os.mkfifo, path))()
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


@fuzzed
@given(data=st.data())
def test_files_of_a_benchmark(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(DATA)))
    with copy(template(name)) as folder:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        damage(data.draw, data.draw(st.sampled_from(files)))
        answers, place = ["--answers", str(folder / "answers.jsonl")], ["--data", str(folder)]
        ends_in_order("data", "check", name, *place)
        ends_in_order("score", name, *answers, *place)


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
        ends_in_order("report", "--out", str(folder / "out"))
        ends_in_order("report", "compare", str(run), str(run), "--out", str(folder / "out"))
        with contextlib.suppress(ConsensusError):
            place = folder / "data"
            loop.run(
                config(place, place / "model"), folder / "out", Execution(4, progress=False), lambda *_: FakeHost()
            )


@fuzzed
@given(data=st.data())
def test_questions_and_pictures_that_are_asked(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = make_place(Path(name), pictures=2, each=2)
        damage(data.draw, data.draw(st.sampled_from(sorted(folder.rglob("eval/**/*.*")))))
        with contextlib.suppress(ConsensusError):
            wanted = config(folder, folder / "model")
            loop.run(wanted, folder / "out", Execution(4, progress=False), lambda *_: FakeHost())


@fuzzed
@given(data=st.data())
def test_pictures(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        path = Path(name) / "a.png"
        kind, mode = (
            data.draw(st.sampled_from(("PNG", "GIF", "BMP", "TIFF", "PPM", "WEBP"))),
            data.draw(st.sampled_from(("RGB", "L", "1"))),
        )
        Image.new(mode, data.draw(st.sampled_from(((1, 1), (9, 4), (8193, 1), (300, 200))))).save(path, kind)
        damage(data.draw, path)
        with contextlib.suppress(ImageError):
            assert open_image(path, upright=data.draw(st.booleans())).mode == "RGB"


@fuzzed
@given(data=st.data())
def test_conversations_to_train_on(data: st.DataObject) -> None:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "a dog"}]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        Image.new("RGB", (4, 4)).save(folder / "a.png")
        (folder / "c.json").write_text(json.dumps([{"id": "1", "image": "a.png", "conversations": turns}] * 2))
        damage(data.draw, data.draw(st.sampled_from((folder / "c.json", folder / "c.json", folder / "a.png"))))
        with contextlib.suppress(ConsensusError):
            read(folder / "c.json", folder)


@cache
def whole(kind: str) -> Path:
    return MINI if kind == "official" else checkpoint(kind, Path(tempfile.mkdtemp(prefix="fuzz-")) / "llava-y")


@pytest.fixture(scope="module")
def little_memory() -> Iterator[None]:
    """A damaged size may ask for more memory than there is: that is an error, and not the end of the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if (size := Path("/proc/self/statm")).exists():
        taken = int(size.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + 6 * 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("kind", ["official", "llava_next"])
@pytest.mark.usefixtures("little_memory")
@fuzzed
@given(data=st.data())
def test_checkpoints_to_ask(kind: str, data: st.DataObject) -> None:
    """The weights are whole, everything beside them is damaged."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name) / "llava-x"
        for path in whole(kind).rglob("*"):
            (target := folder / path.relative_to(whole(kind))).parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".safetensors":
                target.symlink_to(path)
            elif path.is_file():
                shutil.copyfile(path, target)
        damage(data.draw, data.draw(st.sampled_from(sorted(path for path in folder.rglob("*.json")))))
        with contextlib.suppress(ConsensusError):
            models.check(str(folder), None, models.Loading("cpu"))
            host = models.load(str(folder), models.Loading("cpu"))
            with host.attach(methods.make("random"), Budget(4)):
                picture = Image.new("RGB", (8, 8))
                assert host.ask([picture], models.Prompt("What?", max_new_tokens=1))
