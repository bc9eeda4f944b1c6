"""No page names a measured number without saying where it comes from."""

from pathlib import Path

import pytest

from eval_scripts import statements
from eval_scripts.statements import Statement


def test_every_number_of_every_page_has_a_source() -> None:
    found = statements.every()
    assert not [f"{one.page}:{one.line}: {one.wrong}: {one.text[:80]}" for one in found if one.wrong]
    assert {"kept results", "file", "published", "test", "dated"} <= {one.kind for one in found}
    assert {one.page for one in found} >= {"README.md", "docs/results.md", "docs/positions.md", "docs/efficiency.md"}


def of_page(folder: Path, text: str) -> list[Statement]:
    """The statements of a README of this text."""
    (folder / "README.md").write_text(text)
    return statements.every(folder)


@pytest.mark.parametrize(
    "said",
    [
        "It is 12 % faster.",
        "A cache of 3.5 GiB is left.",
        "- First.\n- It gains 4 points of GQA.",
        "| a | b |\n|---|---|\n| x | 71.4 |",
        "Reads 33.1 → 78.1 signs.",
        "## One\n\nSource: 2026-11-22, one core.\n\n## Two\n\nTakes 12 ms.",  # a source ends with its section
        "Takes 12 ms.\n\nSource: somewhere.",
    ],
)
def test_a_number_without_a_source_is_found(tmp_path: Path, said: str) -> None:
    assert [one.wrong for one in of_page(tmp_path, said)][-1] == "no source"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("It is 12 % faster (2026-11-22, one core).", "dated"),
        ("It is 12 % faster.\n\nAnd 3 points better.\n\nSource: 2026-11-22, a machine of two cores.", "dated"),
        ("RESTORE (arXiv 2606.01711) loses 1.6 points.", "published"),
        ("Equal to 1 %, which `tests/a.py` holds: tests/a.py.", "test"),
    ],
)
def test_a_source_is_known_by_its_words(tmp_path: Path, said: str, kind: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/a.py").write_text("")
    found = of_page(tmp_path, said)
    assert {one.kind for one in found} == {kind} and not any(one.wrong for one in found)


def test_a_source_must_be_there_and_have_the_number(tmp_path: Path) -> None:
    (tmp_path / "measured.tar.xz").write_bytes(b"")
    table = "<!-- numbers:begin -->\n| a |\n|--:|\n| 71.4 |\n<!-- numbers:end -->\n\n"
    said = "It has {} points ([kept]({})).\n"
    assert [one.wrong for one in of_page(tmp_path, table + said.format("71.4", "measured.tar.xz"))] == ["", ""]
    assert of_page(tmp_path, table + said.format("71.5", "measured.tar.xz"))[-1].wrong == "no table has 71.5"
    assert of_page(tmp_path, table + said.format("71.4", "docs/measured.tar.xz"))[-1].wrong.endswith("is not there")


@pytest.mark.parametrize(
    "said", ["LLaVA-1.5-7B on transformers 4.37.2.", "```\n12 %\n```", "`--limit 12 %`", "95 % intervals"]
)
def test_names_versions_and_code_are_no_numbers(tmp_path: Path, said: str) -> None:
    assert of_page(tmp_path, said) == []
