"""Every generated number of the pages is what the kept results say."""

import shutil
import tarfile
from pathlib import Path

import pytest

from llava_consensus.methods import INDEX, written
from tools import pages

FILES = (
    "paper.md",
    "efficiency.md",
    "results.md",
    "results.csv",
    "paper/study.csv",
    "paper/study.json",
    "paper/scap.json",
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for folder in ("docs/paper", "llava_consensus/methods"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("README.md", *(f"docs/{name}" for name in FILES)):
        shutil.copy(pages.ROOT / name, tmp_path / name)
    return tmp_path


def test_the_pages_are_made_from_the_kept_results(copy: Path) -> None:
    for name in ("README.md", "docs/results.md"):
        forged = (copy / name).read_text().replace("77.5", "99.9")
        assert forged != (copy / name).read_text()
        (copy / name).write_text(forged)
    pages.write(copy)
    for name in ("README.md", *(f"docs/{name}" for name in FILES)):
        assert (copy / name).read_bytes().split(b"\n## Results")[-1] == (
            (pages.ROOT / name).read_bytes().split(b"\n## Results")[-1]
        ), f"{name}: make pages, then commit it"


def test_the_index_of_methods_is_fresh() -> None:
    assert INDEX.read_text() == written(), "llava_consensus/methods/index.json: make pages, then commit it"


def test_results_are_kept_in_the_same_bytes(tmp_path: Path) -> None:
    with pages.unpacked() as out:
        for run in sorted(out.glob("*/config.json"))[:9]:  # all of them take as long as they take to compress
            shutil.copytree(run.parent, tmp_path / "some" / run.parent.name)
    for name in ("one.tar.xz", "again.tar.xz"):
        pages.pack(tmp_path / "some", tmp_path / name)
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "again.tar.xz").read_bytes()
    with tarfile.open(tmp_path / "one.tar.xz") as archive:
        assert len({Path(name).parent for name in archive.getnames()}) == 9
