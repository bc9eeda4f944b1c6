"""Whatever stands in a file or an option, a command ends in order: a result, or one line that says what is wrong.

A few seconds in CI; `make fuzz` (or `FUZZ=5000 pytest tests/evaluation/test_fuzz.py`) makes so many cases of each kind.
"""

import contextlib
import io
import json
import multiprocessing
import os
import resource
import shlex
import shutil
import signal
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import study_files
import tiny_data
import torch
from fakes import FakeHost, config, make_place
from hf_checkpoints import checkpoint
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from judged_data import make_mmvet, make_msvd
from PIL import Image
from run_folders import store
from safetensors.torch import save_file

from llava_consensus import cli, methods
from llava_consensus.cli import arguments
from llava_consensus.demo import desk, markup
from llava_consensus.demo.app import Guard
from llava_consensus.errors import ConsensusError, DataError, ImageError
from llava_consensus.evaluation import benchmarks, models
from llava_consensus.evaluation.data.transfer import fetch
from llava_consensus.evaluation.data.unpack import unpack
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.evaluation.runs.pictures import open_image
from llava_consensus.reduction.budget import Budget
from llava_consensus.training import run as training
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
FORK = multiprocessing.get_context("fork")
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


def inside(folder: Path) -> set[str]:
    """Everything in a folder, by name, so that what was written elsewhere is seen."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


OUTSIDE = ("../x", "/tmp/fuzz-x", "\\tmp\\fuzz-x", "C:/x", "..\\x", "a/../../x")
NAMES = st.sampled_from((*OUTSIDE, "a", "a/b", "./a", "a//b", "é", "x" * 300, " "))
KINDS = st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))


@fuzzed
@given(data=st.data())
def test_archives(data: st.DataObject) -> None:
    members = data.draw(st.lists(st.tuples(NAMES, st.binary(max_size=300)), min_size=1, max_size=4))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        with warnings.catch_warnings(), zipfile.ZipFile(folder / "a.zip", "w", data.draw(KINDS)) as archive:
            warnings.simplefilter("ignore")
            for member, content in members:
                archive.writestr(member, content)
        whole = (folder / "a.zip").read_bytes()
        if data.draw(st.booleans()):
            damage(data.draw, folder / "a.zip")
        intact = (folder / "a.zip").is_file() and (folder / "a.zip").read_bytes() == whole
        with contextlib.suppress(ConsensusError):
            unpack(folder / "a.zip", folder / "out", without=data.draw(st.sampled_from(("", "a/"))))
            if intact:
                written = {path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()}
                assert written <= {content for _, content in members}
        assert {path.split("/")[0] for path in inside(folder)} <= {"a.zip", "out"}
        assert not Path("/tmp/fuzz-x").exists() and not any(path.endswith(".unpacking") for path in inside(folder))


HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "Content-Length": st.sampled_from(("0", "5", "100", "99999", "-1", "x", "1e400")),
        "Content-Range": st.sampled_from(
            ("bytes 0-99/100", "bytes 40-99/100", "bytes */100", "bytes */40", "x", "bytes 40-99/*")
        ),
        "Content-Encoding": st.sampled_from(("identity", "gzip", "x")),
        "Content-Type": st.sampled_from(("text/html", "application/zip")),
        "Transfer-Encoding": st.sampled_from(("chunked", "x")),
        "Location": st.sampled_from(("/", "file:///etc/passwd", "http://[", "")),
    },
)
STATUS = st.sampled_from((200, 206, 206, 204, 302, 304, 403, 404, 416, 429, 500, 999))
FILE = bytes(range(100))


@contextlib.contextmanager
def serving(answers: list[tuple[int, dict[str, str], bytes]]) -> Iterator[str]:
    """The address of a server that gives these answers, then nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.close_connection = True
            if answers:
                status, headers, body = answers.pop(0)
                lines = [f"HTTP/1.1 {status} so", *(f"{key}: {value}" for key, value in headers.items())]
                self.wfile.write("\r\n".join([*lines, "", ""]).encode() + body)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/a"
    finally:
        server.shutdown()
        server.server_close()


@fuzzed
@given(data=st.data())
def test_servers(data: st.DataObject) -> None:
    """What is taken for whole is as long as the server says; else a line, and what was there stays a part."""
    bodies = st.sampled_from((b"", FILE, FILE[:40], FILE[40:], b"<html>no", b"5\r\nabcde\r\n0\r\n\r\n", b"ffff\r\nab"))
    answers = data.draw(st.lists(st.tuples(STATUS, HEADERS, bodies), min_size=1, max_size=3))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name, serving(list(answers)) as url:
        folder = Path(name)
        if data.draw(st.booleans()):
            (folder / "a.part").write_bytes(FILE[:40])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("time.sleep", lambda _: None)
            patch.setenv("NO_PROXY", "127.0.0.1")
            with contextlib.suppress(ConsensusError):
                fetch(url, folder / "a")
        assert inside(folder) <= {"a", "a.part"}
        if (folder / "a").exists():
            content, said = (folder / "a").read_bytes(), [head.get("Content-Length", "") for _, head, _ in answers]
            ranges = [head.get("Content-Range", "").rpartition("/")[2] for _, head, _ in answers]
            chunked = any(head.get("Transfer-Encoding") == "chunked" for _, head, _ in answers)
            assert chunked or str(len(content)) in (*said, *ranges)
            assert b"<html" not in content


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


@fuzzed
@given(data=st.data())
def test_checkpoints_to_convert(data: st.DataObject) -> None:
    """Without weights of any size: what is whole is refused for want of them, after everything else."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder, source = Path(name), Path(name) / "llava-x"
        for path in MINI.rglob("*"):
            if path.suffix in (".json", ".model"):
                (source / path.relative_to(MINI)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, source / path.relative_to(MINI))
        for place in (source, source / "vision_tower"):
            save_file({"model.norm.weight": torch.zeros(2)}, place / "model.safetensors")
        if data.draw(st.booleans()):
            towers = st.sampled_from(
                ("..", "a/../..", "", "/", ".", "vision_tower/..", "official", None, 3, [], "x" * 300)
            )
            config = json.loads((source / "config.json").read_text())
            (source / "config.json").write_text(json.dumps(config | {"mm_vision_tower": data.draw(towers)}))
        else:
            damage(data.draw, data.draw(st.sampled_from(sorted(path for path in source.rglob("*") if path.is_file()))))
        before = inside(folder)
        ends_in_order("model", "convert", str(source), str(folder / "out"))
        assert {path for path in inside(folder) - before if path.split("/")[0] != "out"} == set()


class Killed(FakeHost):
    """Is killed at the question with a number."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def answer(self, encoded: Any, prompts: Any) -> Any:
        if len(self.asked) >= self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().answer(encoded, prompts)


@cache
def undisturbed() -> tuple[Path, dict[str, bytes]]:
    folder = make_place(Path(tempfile.mkdtemp(prefix="fuzz-")), pictures=2, each=4)
    return folder, asked(folder, folder / "out", 3, FakeHost())


def asked(folder: Path, out: Path, batch: int, host: Any) -> dict[str, bytes]:
    path = loop.run(config(folder, folder / "model"), out, Execution(batch, progress=False), lambda *_: host).path
    return {name: (path / name).read_bytes() for name in ("answers.jsonl", "errors.jsonl", "scores.jsonl")}


@fuzzed
@given(data=st.data())
def test_kills(data: st.DataObject) -> None:
    """However often a run is killed, wherever: it ends as an undisturbed one."""
    folder, expected = undisturbed()
    kills = data.draw(st.lists(st.tuples(st.integers(0, 8), st.sampled_from((1, 3, 9))), min_size=1, max_size=6))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as out:
        for at, batch in kills:
            process = multiprocessing.get_context("fork").Process(
                target=asked, args=(folder, Path(out), batch, Killed(at))
            )
            process.start()
            process.join()
        assert asked(folder, Path(out), 3, FakeHost()) == expected


# ---- everything that every command takes


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes minutes, or the network, ends there with a line: what comes before it is asked here."""

    def here(*_: Any, **__: Any) -> Any:
        raise DataError("this far")

    for place in (
        "evaluation.models.load",
        "evaluation.models.random_weights.plan",
        "evaluation.data.transfer.fetch",
        "evaluation.data.mini.generate",
        "evaluation.data.mini.copy",
        "evaluation.bench.growth.measure",
        "cli.models._matrix",
        "cli.serve.os.execv",
    ):
        monkeypatch.setattr(f"llava_consensus.{place}", here)
    monkeypatch.setattr(training, "train", lambda plan, name: (training.prepare(plan, name), here()))


def words_of(draw: Any, folder: Path) -> list[str]:
    """A command with arguments of every kind: what is right, what is nearly right, and what is neither."""
    cli.parser()
    name = draw(st.sampled_from([name for name in arguments.COMMANDS if name != "demo"]))
    texts = [
        "2",
        "0.5",
        "-0",
        "64 32",
        "0.1 1",
        "\u0663",
        "\u00b2",
        "nan",
        "inf",
        "a=b",
        "alpha=1e400",
        "=",
        ",",
        "all",
    ]
    texts += ["gqa", "pope", "gqa gqa", "random", "random:a=1", "consensusdrop:alpha=2", "full", "none", "results"]
    texts += [str(MINI), str(template("gqa")), *(str(folder / one) for one in ("pipe", "file.json", "link", "a/b.csv"))]
    texts += [f"{folder}/picture.png", "10" * 20, "0x10", "1_0", "--tokens", "cuda:99", "float64"]
    value = st.sampled_from(texts) | st.sampled_from(ODD_TEXTS) | st.text(max_size=5)
    given, known = name.split(), {"--model": str(MINI), "--data": str(template("gqa")), "--out": str(folder / "out")}
    wanted = draw(st.lists(st.integers(0, 40), max_size=4))
    for number, one in enumerate(arguments.COMMANDS[name].arguments):
        flag, action = one.flags[0], one.settings.get("action")
        if not flag.startswith("-"):
            given += [draw(value)]
        elif action in ("store_true", "store_const"):
            given += [flag] if number in wanted else []
        elif number in wanted and flag != "--workers":
            given += [f"{flag}={draw(value)}"]
        elif flag in known or one.settings.get("required"):
            given += [f"{flag}={known.get(flag, draw(value))}"]
    return given


@pytest.mark.usefixtures("nothing_loads")
@fuzzed
@given(data=st.data())
def test_arguments_of_every_command(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name) / "a" / "b"  # so that `../..` stays inside
        folder.mkdir(parents=True)
        patch.chdir(folder)
        os.mkfifo(folder / "pipe")
        (folder / "file.json").write_text('{"a": 1}')
        (folder / "link").symlink_to("link")
        Image.new("RGB", (4, 4)).save(folder / "picture.png")
        given = words_of(data.draw, folder)
        try:
            ends_in_order(*given)
        except AssertionError as error:
            raise AssertionError(shlex.join(given)) from error


@cache
def measured() -> Path:
    """A folder of results with every file that figures and claims are made of."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    for name in ("gqa", "pope"):
        store(folder, [1.0] * 9 + [0.0], method="full", tokens=576, benchmark=name)
        store(folder, [1.0] * 6 + [0.0] * 4, benchmark=name)
    for name in ("study", "scap", "bench", "growth"):
        (folder / f"{name}.json").write_text(json.dumps(getattr(study_files, name)()))
    return folder


@fuzzed
@given(data=st.data())
def test_files_that_figures_and_claims_are_made_of(data: st.DataObject) -> None:
    pytest.importorskip("matplotlib")
    with copy(measured()) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("llava_consensus.paper.figures.style.save_all", lambda drawing, *_: [drawing.number])
        file = data.draw(st.sampled_from(sorted(folder.glob("*.json"))))
        damage(data.draw, file)
        ends_in_order("paper", "claims", "--out", str(folder))
        ends_in_order("report", "--out", str(folder), "--format", data.draw(st.sampled_from(("markdown", "csv"))))
        ends_in_order("paper", "figures", "--out", str(folder))


# ---- what visitors of the page send


class Square(FakeHost):
    visual_tokens = 16


OWN = ("localhost", "localhost:7860", "127.0.0.1:7860", "[::1]:7860", "http://localhost", "http://localhost:7860")
EVIL = ("evil.org", "127.0.0.1.evil.org", "http://evil.org", "localhost@evil.org", "evil.org#@localhost")
HEADER_VALUES = st.sampled_from(
    (*OWN, *EVIL, "", "a@localhost", "localhost:x", "[::1", "null", "\xff", "0", "2130706433")
)


@fuzzed
@given(data=st.data())
def test_forms_and_pages_that_ask(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        path = Path(name) / "a.png"
        Image.new("RGB", (8, 8), (7, 0, 0)).save(path)
        if not data.draw(st.integers(0, 3)):
            damage(data.draw, path)
        known: dict[str, Any] = {"picture": str(path), "question": "What?", "second": "", "left": "consensusdrop"}
        known |= {"right": "random", "tokens": 4.0, "alpha": 0.7, "positions": "keep", "short": True}
        for field in data.draw(st.lists(st.sampled_from(sorted(known)), max_size=2)):
            known[field] = data.draw(values)
        with contextlib.suppress(ConsensusError):
            told = desk.Desk(Square(), seconds=0).ask(desk.request(desk.Form(**known)))
            drawn = markup.results(told, data.draw(st.sampled_from(list(desk.VIEWS))))
            assert "<script" not in drawn
        headers = data.draw(st.lists(st.tuples(st.sampled_from((b"host", b"origin")), HEADER_VALUES), max_size=3))
        sent = [(name, value.encode("latin-1")) for name, value in headers]
        if Guard(None, "localhost").admits(sent):  # type: ignore[arg-type]
            (host,) = (value for name, value in headers if name == b"host")
            assert "evil" not in host and all("evil" not in value for _, value in headers)


# ---- checkpoints that are loaded, photographs that are looked at


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


@pytest.mark.parametrize("kind", ["official", "llava", "llava_next"])
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


@cache
def embedded() -> Any:
    return models.load(str(MINI), models.Loading("cpu"))


@fuzzed
@given(data=st.data())
def test_photographs(data: st.DataObject) -> None:
    """Whatever lies in the folder and wherever the sheets go: no photograph is another afterwards."""
    pytest.importorskip("matplotlib")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "load", lambda _: embedded())
        patch.chdir(MINI.parents[1])
        folder = Path(name) / "photographs"
        (folder / "deep").mkdir(parents=True)
        names = ("a.png", "a.jpg", "a-jpg.png", "$x_y$.png", "\n.png", "deep.png", "\udcff.png", "\x1b[2J.png", "b.JPG")
        for one in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
            Image.new("RGB", (8, 8), "green").save(folder / one, "PNG")
        damage(data.draw, data.draw(st.sampled_from(sorted(path for path in folder.iterdir() if path.is_file()))))
        (Path(name) / "link").symlink_to(folder)
        before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        to = data.draw(
            st.sampled_from(("link", "photographs", "photographs/.", "photographs/deep", "out", "link/../out"))
        )
        asked = data.draw(st.sampled_from(("What?", *ODD_TEXTS[:-1])))
        more = [f"--question={asked}", "--methods=random", "--tokens=4", f"--to={name}/{to}"]
        ends_in_order("paper", "gallery", str(folder), *more)
        assert all(path.read_bytes() == content for path, content in before.items())
        assert {path for path in folder.iterdir() if path.is_file()} == set(before)


# ---- arguments by lmms-eval's command


@pytest.mark.usefixtures("nothing_loads")
@fuzzed
@given(data=st.data())
def test_model_arguments_of_lmms_eval(data: st.DataObject) -> None:
    pytest.importorskip("lmms_eval")
    from lmms_eval.models import get_model

    keys = (
        "pretrained",
        "method",
        "tokens",
        "merged",
        "conversation",
        "batch_size",
        "alpha",
        "positions",
        "host_layout",
    )
    keys += ("device", "dtype", "bits", "attn", "trust_remote_code", "revision", "device_map", "nothing", "")
    texts = st.text("aé-1.e ", max_size=5) | st.sampled_from(
        ("no", "True", "1e400", "-1", "0.5", "nan", "None", "4", "\ud800", "a\0")
    )
    pairs = data.draw(st.lists(st.tuples(st.sampled_from(keys), texts), max_size=3))
    given = [f"{key}={value}" for key, value in pairs if "," not in value and "=" not in value]
    with contextlib.suppress(ConsensusError):
        get_model("consensusdrop").create_from_arg_string(",".join([f"pretrained={MINI}", *given]), {})
