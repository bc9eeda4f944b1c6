"""A tag releases its own version, with what the changelog calls Unreleased as notes; what workflows may do."""

import re
import shutil
import subprocess
import sys
from datetime import date
from functools import partial
from pathlib import Path

import pytest
import yaml

from tools.release import ROOT, cited, released

DAY = date(2026, 11, 25)
LOG = "# Changelog\n\n## Unreleased\n\n- one\n- two\n\n## 0.2.0\n\n- old\n"


def test_a_tag_names_what_was_unreleased_once() -> None:
    log, notes = released(LOG, "v0.3.0", DAY)
    assert notes == "- one\n- two"
    assert log.startswith("# Changelog\n\n## Unreleased\n\n## 0.3.0 (2026-11-25)\n\n- one\n")
    assert released(log, "v0.3.0", date(2027, 1, 1)) == (log, notes)
    with pytest.raises(SystemExit, match=r"v0\.3\.1: CHANGELOG\.md says nothing"):
        released(log, "v0.3.1", DAY)
    with pytest.raises(SystemExit, match="must be a version"):
        released(LOG, "vnext", DAY)


def test_the_citation_has_the_version_of_the_tag() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    log = (ROOT / "CHANGELOG.md").read_text()
    last = yaml.safe_load(citation)
    assert last["license"] == "Apache-2.0"
    assert f"\n## {last['version']} ({last['date-released']})\n" in log
    found = yaml.safe_load(cited(citation, "v99.0.0", DAY))
    assert (found["version"], found["date-released"]) == ("99.0.0", DAY)
    assert found["preferred-citation"] == last["preferred-citation"]
    assert cited(citation, f"v{last['version']}", DAY) == citation


def test_the_version_is_that_of_the_last_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("setuptools")
    for name in ("setup.py", "CHANGELOG.md", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\ndynamic = ["version", "readme", "urls"]\n')

    def ran(*words: str) -> str:
        return subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    said = partial(ran, sys.executable, "setup.py", "-q")
    git = partial(ran, "git", "-c", "user.name=a", "-c", "user.email=a@b")
    last = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert said("--version") == last, "without git"
    git("init")
    git("add", "setup.py")
    git("commit", "-m", "one")
    assert said("--version") == last, "without a tag"
    git("tag", "v0.3.0")
    assert said("--version") == "0.3.0"
    git("commit", "--allow-empty", "-m", "two")
    assert said("--version") == "0.3.0.post1"
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    page = said("--long-description")
    assert "](docs/" not in page and "](https://github.com/owner/name/blob/v0.3.0.post1/docs/results.md)" in page
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: x\nVersion: 0.3.0\n\nVersion: 9\n")
    assert said("--version") == "0.3.0", "an sdist knows"


def test_actions_are_pinned_and_no_job_both_mints_tokens_and_writes() -> None:
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(file.read_text())
        for job in workflow["jobs"].values():
            rights = job.get("permissions", workflow["permissions"])
            assert list(rights.values()).count("write") <= 1, file
            for step in job["steps"]:
                assert "uses" not in step or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]), step
                installed = re.findall(r"pip install ([^-\"].*?)(?: &&|$)", step.get("run", ""), re.MULTILINE)
                assert all("==" in word for line in installed for word in line.split()), step


def test_public_ci_does_what_our_own_does_and_tests_serving() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["run"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run", "make test-serving"]
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(form.read_text())
