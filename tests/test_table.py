"""Tables are pure functions of result folders. Run: `pytest tests/test_table.py`."""

import json
from pathlib import Path
from typing import Any

import pytest

from llava_consensus.errors import DataError
from llava_consensus.report.table import (
    BEGIN,
    END,
    LINEUP,
    difference,
    full_score,
    half_width,
    markdown,
    read_rows,
    replace_block,
)

BASE: dict[str, Any] = {
    "benchmark": "gqa",
    "method": "consensusdrop",
    "tokens": 64,
    "merged": None,
    "options": {"alpha": 0.7},
    "changed": {},
    "model": "checkpoints/llava-mini",
    "weights": "abc",
    "data": "playground/mini",
    "questions": "def",
    "limit": None,
    "conversation": "vicuna_v1",
    "max_new_tokens": 128,
    "dtype": "auto",
    "device": "cpu",
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
}


def store(out: Path, right: list[int] | None, **changes: Any) -> dict[str, Any]:
    """Writes a run as the harness does; `right` is the correctness of each answer, None an incomplete run."""
    config = {**BASE, **changes}
    folder = out / str(len(list(out.glob("*")))).zfill(3)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "answers.jsonl").write_text('{"a": 1}\n' * 3)
    if right is not None:
        after = 576 if config["method"] == "full" else min(576, config["tokens"])
        metrics = {
            "score": 100 * sum(right) / len(right),
            "metric": "accuracy",
            "questions": len(right),
            "answered": len(right),
            "errors": 0,
            "tokens": {"before": 576.0, "after": float(after), "structural": 0.0},
            "report": {"extracted": [{"index": index, "correct": value} for index, value in enumerate(right)]},
        }
        (folder / "metrics.json").write_text(json.dumps(metrics))
    return config


@pytest.fixture
def out(tmp_path: Path) -> Path:
    store(tmp_path, [1, 1, 1, 0], method="full", tokens=576)
    store(tmp_path, [1, 1, 1, 1], method="full", tokens=576, benchmark="pope", questions="ghi")
    store(tmp_path, [1, 0, 0, 0], method="random")
    store(tmp_path, [1, 1, 0, 0])
    store(tmp_path, [1, 1, 0, 1], benchmark="pope", questions="ghi")
    store(tmp_path, [0, 1, 0, 0], changed={"alpha": 1.0})
    store(tmp_path, [0, 0, 0, 0], changed={"fuser": "recovery", "tau_cross": 2.0}, tokens=32)
    store(tmp_path, None, tokens=128)
    return tmp_path


def test_table(out: Path) -> None:
    lines = markdown(read_rows(out)).split("\n")
    assert lines[0].startswith("**checkpoints/llava-mini** on `playground/mini` (cpu, torch 2.13.0")
    assert lines[2:10] == [
        "| tokens | method | gqa (4 questions) | pope (4 questions) | relative |",
        "| --: | --- | --: | --: | --: |",
        "| 576 | all tokens (the unpatched model) | 75.0 ± 49.0 | 100.0 ± 0.0 | 100 % |",
        "| 128 | ConsensusDrop | incomplete (3 answered) |  |  |",
        "| 64 | ConsensusDrop | 50.0 ± 56.6 | 75.0 ± 49.0 | 70.8 % |",
        "| 64 | vision-only (alpha 1) | 25.0 ± 49.0 |  |  |",
        "| 64 | random | 25.0 ± 49.0 |  |  |",
        "| 32 | consensusdrop, fuser=recovery, tau_cross=2.0 | 0.0 ± 0.0 |  |  |",
    ]
    assert "| 64 | ConsensusDrop | +25.0 ± 49.0 |  |" in lines
    assert "| 64 | vision-only (alpha 1) | +0.0 ± 80.0 |  |" in lines


def test_order_of_files_does_not_matter(out: Path) -> None:
    rows = read_rows(out)
    assert markdown(rows[:2] + rows[:1:-1]) == markdown(rows)


def test_settings_are_not_mixed(out: Path) -> None:
    store(out, [1, 1], limit=2)
    store(out, [1, 1], weights="other")
    text = markdown(read_rows(out))
    assert text.count("**checkpoints/llava-mini**") == 3 and ", first 2 questions" in text


def test_full_score_is_of_the_same_setting(out: Path) -> None:
    assert full_score(out, {**BASE, "tokens": 32, "changed": {"alpha": 0.0}}) == 75.0
    assert full_score(out, {**BASE, "benchmark": "pope", "questions": "ghi"}) == 100.0
    assert full_score(out, {**BASE, "limit": 5}) is None


def test_labels(out: Path) -> None:
    labels = {row.label for row in read_rows(out) if not row.full}
    assert labels == {*(LINEUP[place].label for place in (0, 1, 4)), "consensusdrop, fuser=recovery, tau_cross=2.0"}
    store(out, [1, 0], merged=3)
    assert "ConsensusDrop, merged=3" in {row.label for row in read_rows(out)}


def test_nothing_measured(tmp_path: Path) -> None:
    assert "No results yet" in markdown(read_rows(tmp_path / "nowhere"))


def test_half_width_and_difference(out: Path) -> None:
    assert half_width([1.0]) is None and half_width([1.0, 1.0]) == 0
    width = half_width([1.0] * 500 + [0.0] * 500)
    assert width is not None and abs(width - 100 * 1.96 * (0.25 / 1000) ** 0.5) < 0.01
    row = read_rows(out)[0]
    assert difference(row, row) == "+0.0 ± 0.0" and difference(row, None) == difference(None, row) == ""


def test_replaces_between_markers_only() -> None:
    text = f"# Title\n\n{BEGIN}\nold\nlines\n{END}\n\nrest | of\n"
    fresh = replace_block(text, "new", "README.md")
    assert fresh == f"# Title\n\n{BEGIN}\nnew\n{END}\n\nrest | of\n"
    assert replace_block(fresh, "new", "README.md") == fresh


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_missing_markers_are_named(text: str) -> None:
    with pytest.raises(DataError, match="README"):
        replace_block(text, "new", "README.md")


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_damaged_run_is_named(out: Path, content: str) -> None:
    (out / "003" / "config.json").write_text(content)
    with pytest.raises(DataError, match="003"):
        read_rows(out)
