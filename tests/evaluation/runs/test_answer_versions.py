"""Whoever changes answers raises the version that names runs; see tests/golden/make_answer_versions.py."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "golden"))
import make_answer_versions as golden

STORED = json.loads(golden.STORED.read_text())


@pytest.mark.parametrize("kind", ["method", "host", "benchmark"])
def test_changed_answers_have_a_raised_version(kind: str, tmp_path: Path) -> None:
    names = [name.partition(" ")[2] for name in STORED if name.startswith(f"{kind} ")]
    assert names
    wrong = []
    for name in names:
        make = {"method": golden.of_method, "host": golden.of_host}.get(kind)
        now = make(name) if make else golden.of_benchmark(name, tmp_path / name)
        text = golden.complaint(f"{kind} {name}", STORED, now)
        stale = not text and now != STORED[f"{kind} {name}"]
        wrong += [text] if text else [f"{kind} {name}: run tests/golden/make_answer_versions.py"] if stale else []
    assert not wrong, "\n".join(wrong)


def test_a_changed_answer_with_its_old_version_is_told_which_number_to_raise() -> None:
    known = {"reduction": {"version": 1}, "method x": {"version": 3, "checksum": "a"}}
    changed = {"version": 3, "checksum": "b"}
    told = "method x: gives other answers than version 3 gave. Raise its `answer_version` to 4"
    assert told in golden.complaint("method x", known, changed, 1)
    assert golden.complaint("method x", known, known["method x"], 1) == ""
    assert golden.complaint("method x", known, {"version": 4, "checksum": "b"}, 1) == ""
    assert golden.complaint("method x", known, changed, 2) == "", "the shared version was raised"
