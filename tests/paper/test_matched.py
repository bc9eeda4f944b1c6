"""The runs of a preset are found in a folder of results by what was asked, whichever code and command asked it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_folders import BASE, store

from llava_consensus import cli
from llava_consensus.cli import arguments
from llava_consensus.errors import DataError
from llava_consensus.evaluation.report.rows import Catalogue, Row
from llava_consensus.evaluation.report.table import BEGIN, END
from llava_consensus.evaluation.runs.configuration import describe_reduction
from llava_consensus.methods import METHODS
from llava_consensus.paper import preset
from llava_consensus.paper.matched import holds
from llava_consensus.reduction.budget import budget

SMALL: dict[str, Any] = {
    "title": "Small",
    "about": "two ways to number positions",
    "printed": "",
    "reference": "",
    "benchmarks": {"gqa": "", "pope": ""},
    "limits": {"gqa": 4},
    "fewer": {"32": ["gqa"]},
    "rows": [
        {"label": "VisionZip", "method": "visionzip", "tokens": [64, 32]},
        {"label": "VisionZip, positions kept", "method": "visionzip:positions=keep", "tokens": [64, 32]},
    ],
}
KEPT = {"changed": {"positions": "keep"}}


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    """A file of the preset above beside a complete folder of its runs, made by two versions of the code."""
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    out, newer = tmp_path / "out", {"versions": BASE["versions"] | {"llava-consensus": "0.2.0+source.other"}}
    for tokens, more in ((None, {"method": "full"}), (64, {}), (64, KEPT | newer), (32, newer), (32, KEPT)):
        given: dict[str, Any] = {"method": "visionzip", "tokens": tokens, **more}
        given |= {"questions_asked": 4} if tokens else {"tokens": 576}
        store(out, [1, 1, 1, bool(tokens)], limit=4 if tokens == 32 else 9, **given)
        if tokens != 32:
            store(out, [1, 1, 1, 1], limit=None, benchmark="pope", **given)
    for wrong in ({"limit": 2}, {"limit": None, "match": "flops"}, {"limit": None, "merged": 3}):
        store(out, [0, 0, 0, 0], method="visionzip", questions_asked=4, **wrong)
    return tmp_path


def report(folder: Path, *more: str) -> int:
    """The page of the small preset."""
    (folder / "page.md").write_text(f"{BEGIN}\n{END}\n")
    files = ["--out", str(folder / "out"), "--write", str(folder / "page.md"), "--format", "csv"]
    return cli.main(["report", "--preset", str(folder / "small.json"), "--complete", *files, *more])


def test_a_page_has_what_the_preset_says_and_nothing_else(grid: Path) -> None:
    assert report(grid) == 0
    page = (grid / "page.md").read_text()
    at_64, at_32 = page.split("**checkpoints/llava-mini**")[1:]
    assert "| visionzip | 100.0 | 100.0 | 100.0" in at_64 and "| visionzip, positions kept | 100.0 | 100.0 |" in at_64
    assert "Retain 32" not in at_64.split("The paper's numbers")[0] and "of GQA the first 4 questions" in at_32
    assert "Retain 64" not in at_32 and "POPE" not in at_32
    assert "| visionzip, positions kept | 100.0 |" in at_32 and "merged=3" not in page and "| 0.0" not in page


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: (run / "metrics.json").unlink(), "3 questions answered, not all"),
        (lambda run: (run / "config.json").unlink(), "not run"),
    ],
)
def test_a_page_is_refused_while_a_run_is_missing(
    grid: Path, spoil: Callable[[Path], None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(next(path.parent for path in grid.glob("out/*/config.json") if kept_at_32(path)))
    assert report(grid) == 3 and f"gqa VisionZip, positions kept 32: {message}" in capsys.readouterr().err
    assert report(grid, "--limit", "2") == 3 and "no runs at 32 tokens" in capsys.readouterr().err


def kept_at_32(path: Path) -> bool:
    config = json.loads(path.read_text())
    return bool(config["tokens"] == 32 and config["changed"] == KEPT["changed"])


@pytest.mark.parametrize(
    ("own", "asked", "limit", "same"),
    [
        (4, 4, 4, True),
        (None, 3, 4, True),  # a benchmark of three questions
        (9, 3, 4, True),
        (9, 3, None, True),
        (None, 9, 4, False),
        (2, 2, 4, False),
        (4, 4, None, False),  # there may be more
    ],
)
def test_the_same_questions(own: int | None, asked: int, limit: int | None, same: bool) -> None:
    assert holds(Row({"limit": own}, {"questions": asked}, asked, Path()), limit) is same
    assert holds(Row({"limit": own}, None, 1, Path()), limit) is (own == limit)


def test_the_results_grid_has_both_ways_to_number_positions_of_every_method_under_their_names() -> None:
    found = preset.read("results")
    catalogue = Catalogue({name: METHODS.title(name) for name in METHODS})
    policies: dict[tuple[str, str], set[str]] = {}
    for row in found.rows:
        config = describe_reduction(arguments.one_word_method(row.method), budget(row.tokens))
        assert Row(config, None, 0, Path(), catalogue).label == row.label
        others = {key: value for key, value in config["options"].items() if key != "positions"}
        policies.setdefault((config["method"], str(others)), set()).add(config["options"]["positions"])
    assert {name for name, _ in policies} == {*METHODS} - {"full", "consensusdrop+"}
    assert all(both == {"renumber", "keep"} for both in policies.values())
    assert found.asked_at(64) == list(found.benchmarks) and found.asked_at(32) == ["gqa", "textvqa"]


@pytest.mark.parametrize("fewer", [{"48": ["gqa"]}, {"32": ["mme"]}, {"32": "gqa"}])
def test_a_preset_that_asks_what_it_has_not(tmp_path: Path, fewer: dict[str, Any]) -> None:
    (tmp_path / "wrong.json").write_text(json.dumps(SMALL | {"fewer": fewer}))
    with pytest.raises(DataError, match="must be a budget of its rows"):
        preset.read(str(tmp_path / "wrong.json"))
