"""Prose that cannot rot: links lead somewhere, make targets exist, and the example method works as printed."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = page.read_text().replace("(../../actions/", "(https://github.com/")  # GitHub's own pages
        targets = re.findall(r"\]\(([^)#]+)\)", text)
        dead = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
        assert dead == [], page.name


def test_make_targets_named_in_the_readme_exist() -> None:
    rules = re.findall(r"^([a-z%-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"make ([a-z][a-z-]+)", (ROOT / "README.md").read_text()))
    assert {name for name in named if name not in rules and not name.startswith("eval-")} == set()


def test_public_ci_does_what_our_own_does_and_tests_serving() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["run"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run", "make test-serving"]
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(form.read_text())
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["license"] == "Apache-2.0"
