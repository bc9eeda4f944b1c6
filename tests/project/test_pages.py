"""Every generated number of the pages is what the kept results say."""

import json
import shutil
from pathlib import Path

import pytest

from eval_scripts import pages
from llava_consensus.cli.models import COSTS

PAGES = (
    "README.md",
    *(
        f"docs/{name}"
        for name in ("results.md", "paper.md", "positions.md", "serving.md", "paper/study.json", "paper/scap.json")
    ),
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for folder in ("docs/paper", "llava_consensus/methods"):
        (tmp_path / folder).mkdir(parents=True)
    for name in PAGES:
        shutil.copy(pages.ROOT / name, tmp_path / name)
    return tmp_path


def test_the_pages_are_made_from_the_kept_results(copy: Path) -> None:
    (copy / "README.md").write_text((copy / "README.md").read_text().replace("77.5 |", "99.9 |").replace("92.5", "1"))
    changed = copy / "docs/results.md"
    changed.write_text(changed.read_text().replace("| ConsensusDrop, positions kept | 86.9", "| forged | 99.9"))
    pages.write(copy)
    for name in PAGES[1:]:
        assert (copy / name).read_bytes() == (pages.ROOT / name).read_bytes(), f"{name}: make pages, then commit it"
    kept, counted = (json.loads((folder / "llava_consensus" / COSTS).read_text()) for folder in (pages.ROOT, copy))
    assert kept == {name: counted[name] for name in kept}, "llava_consensus/methods/costs.json: make pages"
    blocks = [
        (folder / "README.md").read_text().split(pages.BEGIN)[1].split(pages.END)[0] for folder in (copy, pages.ROOT)
    ]
    assert blocks[0] == blocks[1], "README.md: make pages, then commit it"


def test_results_are_kept_in_the_same_bytes(tmp_path: Path) -> None:
    with pages.unpacked() as out:
        pages.pack(out, tmp_path / "again.tar.xz")
    assert (tmp_path / "again.tar.xz").read_bytes() == (pages.ROOT / pages.MEASURED).read_bytes()
