"""Every generated number of the pages is what the kept results say, and nothing else can stand there; links lead
somewhere, and make targets exist.
"""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from llava_consensus.evaluation.report.rows import read_rows
from llava_consensus.methods import INDEX, written
from tools import pages
from tools.photo import Photo

AGAIN = "make pages, then commit it"


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages.pages(pages.ROOT / "README.md")


def filled(text: str) -> list[str]:
    return [part[0] for part in re.finditer(f"{pages.SPAN.pattern}|{pages.BEGIN}.*?{pages.END}", text, re.DOTALL)]


def test_the_pages_are_made_from_the_kept_results(made: dict[str, str]) -> None:
    assert [name for name, text in made.items() if (pages.ROOT / name).read_bytes().decode() != text] == [], AGAIN
    assert pages.loose({}) == []
    sources = {source for sourced in json.loads((pages.ROOT / pages.STATED).read_text()).values() for source in sourced}
    assert [name for name in sources if not (name.startswith("https://") or (pages.ROOT / name).exists())] == []


FORGERIES = json.loads((Path(__file__).parents[1] / "data" / "forgeries.json").read_text("utf-8"))
FORGED = [(page, *pair) for page, pairs in FORGERIES.items() for pair in pairs]  # what is there, and put in its place


@pytest.mark.parametrize(("page", "old", "new"), FORGED)
def test_a_forged_statement_is_found(made: dict[str, str], page: str, old: str, new: str) -> None:
    text = (pages.ROOT / page).read_text("utf-8")
    assert old in text
    forged = text.replace(old, new, 1)
    if page == "docs/efficiency.md":  # wholly made of its template
        assert forged != made[page]
    else:
        assert filled(forged) != filled(made.get(page, text)) or pages.loose({page: forged})


def test_the_plot_of_the_readme_has_the_scores_of_the_kept_runs() -> None:
    with pages.unpacked(pages.ROOT / pages.PHOTO) as runs, Image.open(pages.ROOT / pages.PLOT) as plot:
        points = Photo(runs, pages.ROOT / pages.NAMED).front_points()
        assert plot.text["Description"] == json.dumps(points), AGAIN


def test_templates_hold_no_number() -> None:
    """A number in prose is an expression; digits stand in code, in links and in names that have letters too."""
    for name in pages.TEMPLATES:
        text = (pages.ROOT / pages.FOLDER / name).read_text("utf-8")
        for inside in (r"```.*?```", r"\{\{.*?\}\}", r"\{%.*?%\}", r"<!--.*?-->", r"`[^`]*`", r"\]\([^)]*\)"):
            text = re.sub(inside, " ", text, flags=re.DOTALL)
        words = " ".join(line for line in text.splitlines() if not line.startswith("    ")).split()
        found = [word for word in words if re.search(r"\d", word) and not re.search("[A-Za-z]", word)]
        assert found == [], f"{name}: give {found} as an expression"


def test_the_csv_says_what_the_runs_say() -> None:
    lines = (pages.ROOT / "docs/results.csv").read_text("utf-8").splitlines()
    with pages.unpacked(pages.ROOT / pages.PHOTO) as photo:
        rows = read_rows(photo)
        found = pages.csv_text(pages.every_run({"photo": photo})).splitlines()
    assert len(rows) > 20 and found[0] == lines[0] and found[1:] == lines[-len(found) + 1 :], AGAIN


def test_an_archive_of_the_gpu_hour_becomes_tables() -> None:
    assert "\n| AnchorPrune, positions=keep | " in pages.published_tables(pages.ROOT / pages.PHOTO)


def test_the_index_of_methods_is_fresh() -> None:
    assert INDEX.read_text() == written(), "llava_consensus/methods/index.json: make pages, then commit it"


def test_an_archive_of_other_bytes_is_refused(tmp_path: Path) -> None:
    other = tmp_path / pages.PHOTO.name
    other.write_bytes((pages.ROOT / pages.PHOTO).read_bytes() + b"\0")
    with pytest.raises(SystemExit, match=r"not what docs/measured\.sha256 says"), pages.unpacked(other):
        pass


def test_comparisons_were_named_before_their_runs() -> None:
    """The files may not change after the first run of their model: Holm's correction is over what they named."""
    named = {pages.NAMED: [14, 64, 300], pages.NAMED_UNSEEN: [5, 32, 300], pages.NAMED_CROWDED: [8, 32, 200]}
    for file, sizes in named.items():
        plan = json.loads((pages.ROOT / file).read_text("utf-8"))
        assert [len(plan["comparisons"]), plan["tokens"], plan["sample"]] == sizes


def test_links_lead_somewhere() -> None:
    for page in [*pages.ROOT.glob("*.md"), *(pages.ROOT / "docs").glob("*.md")]:
        text = page.read_text().replace("(../../actions/", "(https://github.com/")  # GitHub's own pages
        targets = re.findall(r"\]\(([^)#]+)\)", text)
        dead = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
        assert dead == [], page.name


def test_make_targets_named_in_the_readme_exist() -> None:
    rules = re.findall(r"^([a-z%-]+):", (pages.ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"make ([a-z][a-z-]+)", (pages.ROOT / "README.md").read_text()))
    assert {name for name in named if name not in rules and not name.startswith("eval-")} == set()
