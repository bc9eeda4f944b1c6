"""What brings data here: a cut connection is gone on with, what is damaged or leads elsewhere is refused, licences are
shown first, and the embedded model works wherever it is put.

Run: `pytest tests/cli/test_data_commands.py`.
"""

import hashlib
import io
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llava_consensus import cli
from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import BENCHMARKS
from llava_consensus.evaluation.data import sources
from llava_consensus.evaluation.data.unpack import unpack

ROOT = Path(__file__).parents[2]
CHUNK = 10 * 2**20  # what the hub's library writes at once; less is lost where a connection is cut
BYTES = os.urandom(2 * CHUNK + 1_000_000)
CUT = CHUNK + 100_000


class Server(ThreadingHTTPServer):
    """Serves files; cuts the connection in the middle of so many answers, and remembers what was asked for."""

    files: dict[str, bytes]
    cuts = 0
    asked: list[tuple[str, str | None]]


class Handler(BaseHTTPRequestHandler):
    """A range of a file, or what there is of it until the connection breaks."""

    server: Server

    def do_HEAD(self) -> None:
        self._answer(send=False)

    def do_GET(self) -> None:
        self._answer(send=True)

    def _answer(self, send: bool) -> None:
        name, wanted = self.path.lstrip("/"), self.headers.get("Range")
        content = self.server.files.get(name)
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if send:
            self.server.asked.append((name, wanted))
        if content is None or (wanted and first >= len(content)):
            self.send_error(404 if content is None else 416)
            return
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(content) - first))
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not send:
            return
        if self.server.cuts:
            self.server.cuts -= 1
            self.wfile.write(content[first : first + CUT])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(content[first:])

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    """A server on this machine."""
    one = Server(("127.0.0.1", 0), Handler)
    one.files, one.asked = {"a.bin": BYTES}, []
    threading.Thread(target=one.serve_forever, daemon=True).start()
    yield one
    one.shutdown()
    one.server_close()


def fetched(server: Server, name: str, target: Path, md5: str = "") -> subprocess.CompletedProcess[str]:
    """`transfer.fetch` in a process of its own: the tests' own have the hub offline."""
    url = f"http://127.0.0.1:{server.server_port}/{name}"
    code = "from llava_consensus.evaluation.data.transfer import fetch; from pathlib import Path; "
    code += f"fetch({url!r}, Path({str(target)!r}), {md5!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def test_a_cut_connection_is_gone_on_with(server: Server, tmp_path: Path) -> None:
    """In the same process where the hub's library does it, else by the same command given again."""
    server.cuts, target = 2, tmp_path / "a.bin"
    for _ in range(3):
        done = fetched(server, "a.bin", target, hashlib.md5(BYTES).hexdigest())
        if done.returncode == 0:
            break
        assert "The same command goes on from" in done.stderr, done.stderr[-2000:]
    assert target.read_bytes() == BYTES and not target.with_name("a.bin.part").exists()
    assert [wanted for _, wanted in server.asked] == [None, f"bytes={CHUNK}-", f"bytes={2 * CHUNK}-"]


def test_what_a_killed_process_left_is_gone_on_with(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(BYTES[:1234])
    assert fetched(server, "a.bin", tmp_path / "a.bin").returncode == 0
    assert (tmp_path / "a.bin").read_bytes() == BYTES and server.asked == [("a.bin", "bytes=1234-")]


def test_a_whole_part_is_taken_and_an_impossible_one_dropped(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(BYTES)
    assert fetched(server, "a.bin", tmp_path / "a.bin").returncode == 0
    (tmp_path / "b.bin.part").write_bytes(BYTES + b"more")
    server.files["b.bin"] = BYTES
    assert "TransferError" in fetched(server, "b.bin", tmp_path / "b.bin").stderr
    assert fetched(server, "b.bin", tmp_path / "b.bin").returncode == 0 and (tmp_path / "b.bin").read_bytes() == BYTES


@pytest.mark.parametrize("kind", ["another", "page", "absent"])
def test_what_is_not_the_file_is_refused(server: Server, tmp_path: Path, kind: str) -> None:
    server.files["page"] = b"<!DOCTYPE html><html>quota</html>"
    names = {"another": ("a.bin", "0" * 32, "its md5 is not"), "page": ("page", "", "a page in place of the file")}
    name, md5, why = names.get(kind, ("gone", "", "404"))
    done = fetched(server, name, tmp_path / name, md5)
    assert done.returncode and why in done.stderr and not (tmp_path / name).exists()


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    """A zip with these members."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_a_zip_is_unpacked_in_part_and_gone_on_with(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "a.zip", {"top/a.txt": b"a", "top/deep/b.txt": b"bb", "other/c.txt": b"c"})
    folder = tmp_path / "out"
    assert unpack(archive, folder, only="top/*", without="top/") == 2
    assert sorted(path.name for path in folder.rglob("*.txt")) == ["a.txt", "b.txt"]
    before = (folder / "a.txt").stat().st_mtime_ns
    (folder / "deep" / "b.txt").unlink()
    assert unpack(archive, folder, only="top/*", without="top/") == 2
    assert (folder / "deep" / "b.txt").read_bytes() == b"bb" and (folder / "a.txt").stat().st_mtime_ns == before
    with pytest.raises(DataError, match=r"nothing in it matches none\*"):
        unpack(archive, folder, only="none*")


@pytest.mark.parametrize("name", ["../a", "/a", "top/../../a", "..\\a", "C:/a"])
def test_a_member_that_leads_outside_is_refused(tmp_path: Path, name: str) -> None:
    archive = zipped(tmp_path / "a.zip", {name: b"a"})
    with pytest.raises(DataError, match="leads out of"):
        unpack(archive, tmp_path / "in" / "out")
    assert not (tmp_path / "a").exists()


def test_a_damaged_zip_is_refused(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "a.zip", {"a.txt": b"something"})
    archive.write_bytes(archive.read_bytes().replace(b"something", b"somewhere"))
    with pytest.raises(DataError, match="CRC"):
        unpack(archive, tmp_path / "out")
    assert not (tmp_path / "out" / "a.txt").exists()
    archive.write_bytes(b"no zip")
    with pytest.raises(DataError, match="damaged"):
        unpack(archive, tmp_path / "out")


def test_every_benchmark_has_sources_in_its_own_folder() -> None:
    assert set(sources.SOURCES) == set(BENCHMARKS)
    for name, found in sources.SOURCES.items():
        for source in found:
            assert not source.to or BENCHMARKS[name].folder.startswith(source.to.split("/")[0]), source
            assert source.url.startswith(("https://", sources.COCO))
    names = [source for found in sources.SOURCES.values() for source in found]
    assert len({source.name for source in names}) == len(set(names))


def test_licences_come_first_and_nobody_is_taken_to_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "download", "pope", "--data", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert "MIT; COCO pictures" in shown.out and "6 GB" in shown.out and "--yes" in shown.err
    assert not any(tmp_path.iterdir())
    assert cli.main(["data", "download", "pop"]) == 2 and "Did you mean 'pope'" in capsys.readouterr().err


def test_data_are_fetched_unpacked_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from llava_consensus.evaluation.data import transfer

    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("mm-vet/mm-vet.json", "{}")
        archive.writestr("mm-vet/images/1.png", "no picture")
    served, asked = {"eval.zip": content.getvalue(), "mm-vet.zip": content.getvalue()}, []

    def fetch(url: str, target: Path, md5: str = "") -> None:
        asked.append(target.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(served[target.name])

    monkeypatch.setattr(transfer, "fetch", fetch)
    command = ["data", "download", "mmvet", "--data", str(tmp_path), "--yes"]
    assert cli.main(command) == 3  # the question file was in none of them
    shown = capsys.readouterr()
    assert "llava-mm-vet.jsonl" in shown.out and "missing still of mmvet" in shown.err
    assert (tmp_path / "eval" / "mm-vet" / "mm-vet.json").is_file()
    assert sorted(path.name for path in (tmp_path / "downloads").iterdir()) == ["eval.zip.done", "mm-vet.zip.done"]
    cli.main(command)
    assert asked == ["eval.zip", "mm-vet.zip"] and "here already" in capsys.readouterr().out


def test_the_embedded_model_is_put_where_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from llava_consensus.evaluation.data import mini

    generated: list[Path] = []
    monkeypatch.setattr(mini, "generate", generated.append)
    assert cli.main(["data", "mini", "--to", str(tmp_path)]) == 0
    assert "llava-consensus eval gqa" in capsys.readouterr().out and generated == [tmp_path]
    for part in mini.PARTS:
        there = {path.relative_to(ROOT / part) for path in (ROOT / part).rglob("*") if path.is_file()}
        copied = {path.relative_to(tmp_path / part) for path in (tmp_path / part).rglob("*") if path.is_file()}
        assert copied and copied <= there and not any("eval" in path.parts for path in copied)
    monkeypatch.setattr(mini, "HERE", tmp_path / "nowhere" / "a" / "b" / "c")
    assert cli.main(["data", "mini", "--to", str(tmp_path / "other")]) == 3
    assert "Install the wheel of a release" in capsys.readouterr().err


def test_a_missing_default_says_how_it_is_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(b"")
    assert cli.main(["ask", "a.png", "what?", "--device", "cpu"]) == 3
    assert "llava-consensus data mini" in capsys.readouterr().err
