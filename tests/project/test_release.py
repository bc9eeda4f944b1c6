"""A tag releases the version that the package says, with its section of the changelog as notes."""

from pathlib import Path

import pytest
import yaml

from eval_scripts.release import ROOT, notes
from llava_consensus import __version__


def test_notes_are_the_section_of_the_version(tmp_path: Path) -> None:
    (tmp_path / "llava_consensus").mkdir()
    (tmp_path / "llava_consensus" / "__init__.py").write_text('"""x"""\n\n__version__ = "0.3.0"\n')
    log = tmp_path / "CHANGELOG.md"
    log.write_text(
        "# Changelog\n\n## Unreleased\n\n- later\n\n## 0.3.0 (2026-11-25)\n\n- one\n- two\n\n## 0.2.0\n\n- old\n"
    )
    assert notes("v0.3.0", tmp_path) == "- one\n- two"
    with pytest.raises(SystemExit, match=r"the tag must be v0\.3\.0"):
        notes("v0.3.1", tmp_path)
    log.write_text("# Changelog\n\n## Unreleased\n\n- later\n")
    with pytest.raises(SystemExit, match=r"no section 0\.3\.0"):
        notes("v0.3.0", tmp_path)


def test_the_last_release_has_notes_and_the_workflow_asks_for_them() -> None:
    assert notes(f"v{__version__}")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    steps = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert any("eval_scripts/release.py" in step for step in steps) and any(
        "twine check --strict" in step for step in steps
    )
    assert jobs["publish"]["permissions"]["id-token"] == "write" and jobs["publish"]["needs"] == "build"
