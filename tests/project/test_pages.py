"""Every generated number of the pages is what the kept results say, and nothing else can stand there."""

import json
import random
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from llava_consensus.evaluation.report.rows import read_rows
from llava_consensus.methods import INDEX, written
from tools import pages
from tools.photo import Photo

AGAIN = "make pages, then commit it"
NAME = r"\b(ConsensusDrop|VisionZip|VisPruner|GQA|POPE|TextVQA|RefCOCO|uniform grid|random|resize|all tokens)\b"
FORGED: dict[str, tuple[str, Callable[[re.Match[str]], str]]] = {  # what is looked for, and what it becomes
    "number": (r"\d+\.\d", lambda found: f"{float(found[0]) + 1.3:.1f}"),
    "sign": (r"[+-](?=\d+\.\d)", lambda found: "-" if found[0] == "+" else "+"),
    "n": (r"\b\d{2,4}\b(?= (questions|images|tokens|pairs|samples))", lambda found: str(int(found[0]) + 1)),
    "name": (NAME, lambda found: "SparseVLM" if found[0] != "SparseVLM" else "FastV"),
    "policy": (r"\b(renumber|keep)\b", lambda found: "keep" if found[0] == "renumber" else "renumber"),
    "mark": (r"[†‡]", lambda found: "‡" if found[0] == "†" else "†"),
    "p": (r"(?<=p )\d", lambda found: str((int(found[0]) + 1) % 10)),
}


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages.pages(pages.ROOT / "README.md")


def differing(made: dict[str, str], texts: dict[str, str]) -> list[str]:
    """The pages whose text is not what the kept results make."""
    return [name for name, text in made.items() if texts.get(name, (pages.ROOT / name).read_bytes().decode()) != text]


def test_the_pages_are_made_from_the_kept_results(made: dict[str, str]) -> None:
    assert differing(made, {}) == [], AGAIN


def test_the_plot_of_the_readme_has_the_scores_of_the_kept_runs() -> None:
    with pages.unpacked(pages.ROOT / pages.PHOTO) as runs, Image.open(pages.ROOT / pages.PLOT) as plot:
        points = Photo(runs, pages.ROOT / pages.NAMED).front_points()
        assert plot.text["Description"] == json.dumps(points), AGAIN  # type: ignore[attr-defined]


def test_thirty_forged_statements_are_caught(made: dict[str, str]) -> None:
    draw, names = random.Random(), [f"docs/{name}" for name in pages.TEMPLATES]
    forged = {kind: 0 for kind in FORGED}
    while sum(forged.values()) < 30:
        kind, name = min(forged, key=forged.__getitem__), draw.choice(names)
        text = (pages.ROOT / name).read_text("utf-8")
        pattern, change = FORGED[kind]
        places = list(re.finditer(pattern, text))
        if not places:
            continue
        place = draw.choice(places)
        assert change(place) != place[0]
        false = text[: place.start()] + change(place) + text[place.end() :]
        assert differing(made, {name: false}) == [name], f"{kind} at {place.start()} of {name}: {place[0]}"
        forged[kind] += 1


def test_templates_hold_no_number() -> None:
    """A number in prose is an expression; digits stand in code, in links and in names that have letters too."""
    for name in pages.TEMPLATES:
        text = (pages.ROOT / pages.FOLDER / name).read_text("utf-8")
        for inside in (r"```.*?```", r"\{\{.*?\}\}", r"\{%.*?%\}", r"<!--.*?-->", r"`[^`]*`", r"\]\([^)]*\)"):
            text = re.sub(inside, " ", text, flags=re.DOTALL)
        lines = [line for line in text.splitlines() if not line.startswith("    ")]
        found = [
            word
            for line in lines
            for word in line.split()
            if re.search(r"\d", word) and not re.search("[A-Za-z]", word)
        ]
        assert found == [], f"{name}: give {found} as an expression"


def test_the_csv_says_what_the_runs_say() -> None:
    lines = (pages.ROOT / "docs/results.csv").read_text("utf-8").splitlines()
    with pages.unpacked(pages.ROOT / pages.PHOTO) as photo:
        rows = read_rows(photo)
        found = pages.csv_text(pages.every_run({"photo": photo})).splitlines()
    assert len(rows) > 20 and found[0] == lines[0] and found[1:] == lines[-len(found) + 1 :], AGAIN


def test_the_index_of_methods_is_fresh() -> None:
    assert INDEX.read_text() == written(), "llava_consensus/methods/index.json: make pages, then commit it"


def test_an_archive_of_other_bytes_is_refused(tmp_path: Path) -> None:
    other = tmp_path / pages.PHOTO.name
    other.write_bytes((pages.ROOT / pages.PHOTO).read_bytes() + b"\0")
    with pytest.raises(SystemExit, match=r"not what docs/measured\.sha256 says"), pages.unpacked(other):
        pass


def test_results_are_kept_in_the_same_bytes(tmp_path: Path) -> None:
    with pages.unpacked(pages.ROOT / pages.PHOTO) as out:
        for run in sorted(out.glob("*/config.json"))[:9]:  # all of them take as long as they take to compress
            shutil.copytree(run.parent, tmp_path / "some" / run.parent.name)
    for name in ("one.tar.xz", "again.tar.xz"):
        pages.pack(tmp_path / "some", tmp_path / name)
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "again.tar.xz").read_bytes()
    with tarfile.open(tmp_path / "one.tar.xz") as archive:
        assert len({Path(name).parent for name in archive.getnames()}) == 9


def test_comparisons_were_named_before_their_runs() -> None:
    """The files may not change after the first run of their model: Holm's correction is over what they named."""
    for file, count, tokens in ((pages.NAMED, 14, 64), (pages.NAMED_UNSEEN, 5, 32)):
        plan = json.loads((pages.ROOT / file).read_text("utf-8"))
        assert len(plan["comparisons"]) == count and plan["tokens"] == tokens and plan["sample"] == 300
