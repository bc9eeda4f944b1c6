"""`recommend` prints numbers of its sources only."""

import csv
import json
from pathlib import Path

import pytest

from llava_consensus import example_image
from llava_consensus.cli import main
from llava_consensus.evidence import FAMILIES, OWN, family_of, recommend, scores, warnings
from tools.pages import titles

ROOT = Path(__file__).parent.parent


def test_every_number_equals_its_source() -> None:
    ledger = json.loads((ROOT / "llava_consensus/paper/ledger.json").read_text())
    paper = json.loads((ROOT / "llava_consensus/evaluation/report/paper.json").read_text())["tables"]
    known: set[tuple[str, int, str, float]] = set()
    for entry in ledger["entries"]:
        model = entry.get("model", "llava-1.5-7b")
        known |= {(model, entry["tokens"], benchmark, value) for benchmark, value in entry["results"].items()}
    for table, family in (("llava_1_5_7b", "llava-1.5-7b"), ("llava_next_7b", "llava-next-7b")):
        for row in paper[table]:
            known |= {(family, row["tokens"], name, row.get(name)) for name in ("gqa", "textvqa")}
            known.add((family, row["tokens"], "relative", row["rel_percent"]))
    with (ROOT / "docs/results.csv").open() as file:
        for run in csv.DictReader(file):
            if run["set"] == "photo":
                tokens = 576 if run["method"] == "full" else int(float(run["tokens"]))
                known.add((OWN, tokens, run["benchmark"], round(float(run["score"]), 2)))
    assert len(scores()) > 500
    for one in scores():
        assert (one.family, one.tokens, one.benchmark, one.score) in known, one


def test_methods_of_another_name_are_not_taken_for_ours() -> None:
    """Published rows of IDPruner are of trained weights, and those of VScan have a second stage."""
    assert "idpruner" not in titles() and "vscan" not in titles()
    assert titles()["pdrop"] == "pyramiddrop" and titles()["eadp"] == "eadp"


def test_tables_are_ranked_each_for_itself() -> None:
    found = recommend("llava-hf/llava-1.5-7b-hf", tokens=64)
    for source in {one.source for one in found}:
        rows = [one.score for one in found if one.source == source]
        assert rows == sorted(rows, reverse=True)
    best = next(one for one in found if one.source == "ConsensusDrop, table 1")
    assert (best.method, best.score, best.entering, best.mean, best.by_authors) == ("consensusdrop", 95.2, 64, 64, True)
    fastv = next(one for one in found if one.method == "fastv")
    assert fastv.entering == 576 and fastv.mean == 96  # two layers of 576 and 30 of 64


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("llava-hf/llava-1.5-7b-hf", "llava-1.5"),
        ("liuhaotian/llava-v1.6-vicuna-7b", "llava-next"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl"),
        ("Qwen/Qwen3-VL-8B-Instruct", "qwen3-vl"),
        ("checkpoints/llava-photo", OWN),
        ("OpenGVLab/InternVL3-8B-hf", "internvl3"),
        ("OpenGVLab/InternVL3_5-8B-HF", None),
    ],
)
def test_a_family_is_known_by_name_or_configuration(tmp_path: Path, model: str, family: str | None) -> None:
    assert family_of(model) == family
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    assert family_of(str(tmp_path)) == "qwen2.5-vl"


def test_a_score_has_the_unreduced_score_of_its_own_table() -> None:
    """OCRBench of Qwen2.5-VL-7B is 85.3 in one table and 78.3 in another."""
    found = [one for one in recommend("qwen2.5-vl", task="ocr", share=0.1) if one.benchmark == "ocrbench"]
    assert {(one.source[:5], one.full) for one in found} == {("Tence", 85.3), ("UniPr", 78.3)}
    assert {one.full for one in recommend("internvl3")} == {70.02}


def test_nothing_is_said_without_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    assert recommend("google/gemma-3-4b-it") == [] == recommend("llava-1.5", task="video")
    assert main(["recommend", "--model", "google/gemma-3-4b-it"]) == 0
    assert capsys.readouterr().out.startswith("no evidence for this family")


def test_notes_have_the_numbers_of_their_rows() -> None:
    assert any("59.7 if renumbered, 74.3 if kept" in note for note in warnings("qwen3-vl", "ocr"))
    assert any("66.1 if renumbered, 65.4 if kept" in note for note in warnings("llava-1.5", "ocr"))
    assert FAMILIES[OWN].keeps is False and any("refcoco 9.0" in note for note in warnings("llava-photo", "grounding"))


def test_the_screen_names_commands_that_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "--model", "qwen2.5-vl", "--share", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "--model Qwen/Qwen2.5-VL-7B-Instruct --method scope" in out
    assert "attach(model, method='scope', tokens=0.1)" in out and len(out.splitlines()) < 25
    assert main(["recommend", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"][0]["source"]


def test_an_image_is_bundled() -> None:
    assert example_image().size == (384, 304)
