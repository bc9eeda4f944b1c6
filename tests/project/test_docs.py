"""Prose that cannot rot: links lead somewhere, make targets exist, and the example method works as printed."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml
from units import unit

from llava_consensus.reduction.budget import Budget

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


def test_the_example_method_works_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding.md").read_text(), re.DOTALL)[0]
    module = types.ModuleType("brightest")
    monkeypatch.setitem(sys.modules, "brightest", module)
    exec(compile(code, "docs/adding.md", "exec"), vars(module))
    tokens = unit(size=24)
    result = module.Brightest().reduce(tokens, Budget(5))
    longest = tokens.features.norm(dim=-1).topk(5).indices.sort(dim=1).values
    assert torch.equal(result.kept, longest) and result.tokens.shape == (2, 5, 6)


def test_budget_words_are_used_for_one_thing_each() -> None:
    """The glossary of the README: a token's number is a saliency, what scores answers is a scorer."""
    package = ROOT / "llava_consensus"
    for path in (path for folder in ("reduction", "methods", "hosts") for path in (package / folder).rglob("*.py")):
        words = set(re.findall(r"\b(importance|keep_rate|keep_ratio|wrapper|backend|metric)\b", path.read_text()))
        assert words == set(), f"{path.name}: {words}"


def test_public_ci_does_what_our_own_does_and_tests_serving() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["run"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run", "make test-serving"]
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(form.read_text())
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["license"] == "Apache-2.0"
