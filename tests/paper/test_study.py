"""The controlled study: the worked example, both sides inside the language model on tiny models of several hosts, every
layer's attention beside SCAP, and what the study's files say.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hf_models
import pytest
import torch
from fakes import Fake, FakeHost, make_data, make_model
from models import PATCHES
from run_folders import store
from units import WATCH, seen, view_of

from llava_consensus import attach, cli, hosts
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import BENCHMARKS
from llava_consensus.paper.study import results
from llava_consensus.paper.study.methods import STRETCHES, LayerProbe, Selection, by_position
from llava_consensus.reduction.budget import Budget

S_V = [0.10, 0.40, 0.05, 0.20, 0.05, 0.20]
S_C = [0.27, 0.045, 0.225, 0.09, 0.225, 0.045]


def choose(kept: int, **options: Any) -> Any:
    view = view_of(S_C, kept, tower=seen(S_V, None, [0.0] * 6))
    return Selection(**options).select(view, WATCH)


def test_worked_example_and_the_layer_of_the_cut() -> None:
    chosen = choose(4, scores="recovery", student="vision", rate=0.5)
    assert chosen.kept.tolist() == [[0, 1, 2, 3]]
    assert chosen.measures["agreement"].tolist() == [0.5] and chosen.measures["correction"].tolist() == [1.0]
    assert choose(4, scores="vision").kept.tolist() == [[0, 1, 3, 5]]
    assert choose(4, scores="cross").kept.tolist() == [[0, 2, 3, 4]]
    assert set(choose(4, scores="cross").measures) == {"agreement"}
    # the cut is after layer 2, counted from 1
    assert Selection().entering(Budget(144), 576, 32) == [576] * 2 + [144] * 30
    assert Selection(layer=1).entering(Budget(144), 576, 32) == [576] + [144] * 31


def by(attached: Any) -> list[list[int]]:
    return [outcome.reductions[0][1].kept[0].tolist() for outcome in attached.outcomes]


@torch.no_grad()
def test_both_sides_inside_official_llava_are_those_of_other_methods(llava_model: Any, prompt: SimpleNamespace) -> None:
    """The vision side ranks as a method after the tower does, the cross-modal side as FastV in the same layer."""
    tokens = 6
    same = {}
    for name, options in (("consensusdrop", {"alpha": 1.0, "merged": 0}), ("fastv", {"layer": 2})):
        with attach(llava_model, name, tokens=tokens, **options) as attached:
            llava_model.generate(prompt.ids, images=prompt.images, max_new_tokens=2, do_sample=False)
            same[name] = by(attached)
    for scores, name in (("vision", "consensusdrop"), ("cross", "fastv")):
        selection = Selection(scores=scores, layer=2)
        with hosts.attach_view(hosts.view_of(llava_model), selection, Budget(tokens)) as attached:
            llava_model.generate(prompt.ids, images=prompt.images, max_new_tokens=2, do_sample=False)
            assert by(attached) == same[name]
            measured = attached.outcomes[0].reductions[0][1].measures["agreement"]
    shared = set(same["consensusdrop"][0]) & set(same["fastv"][0])
    assert measured.tolist() == [[pytest.approx(len(shared) / tokens)]]


@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_5_vl"])
@torch.no_grad()
def test_both_sides_inside_models_of_transformers(name: str) -> None:
    case = hf_models.CASES[name]
    model = case.build()
    inputs = hf_models.prompts([1, 5, 6, case.picture(0), 7, 8], [1, case.picture(1), 7, 8, 9])
    with attach(model, "consensusdrop", case.tokens, merged=0, alpha=1.0, tile_budget="global") as attached:
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
        vision = by(attached)
    with hosts.attach_view(hosts.view_of(model), Selection(scores="vision", layer=2), Budget(case.tokens)) as attached:
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert by(attached) == vision


@torch.no_grad()
def test_looking_where_scap_looks_changes_no_answer(llava_model: Any, prompt: SimpleNamespace) -> None:
    plain = llava_model(prompt.ids, images=prompt.images).logits
    with hosts.attach_view(hosts.view_of(llava_model), LayerProbe(), Budget(4)) as attached:
        logits = llava_model(prompt.ids, images=prompt.images).logits
        measures = attached.outcomes[0].reductions[0][1].measures
    assert torch.allclose(logits, plain, atol=1e-5) and attached.outcomes[0].after == PATCHES
    found = by_position(torch.arange(48.0)[None])
    assert found.shape == (1, STRETCHES) and found.mean() == pytest.approx(1.0) and found[0, 0] < found[0, -1]
    for rope, name in ((True, "rotated"), (False, "plain")):
        with attach(llava_model, tokens=4, scap_rope=rope) as attached:
            llava_model(prompt.ids, images=prompt.images)
            scap = attached.outcomes[0].reductions[0][1].cross
        assert torch.allclose(measures[name][0, 0], by_position(scap)[0], atol=1e-4)


def run_of(out: Path, scores: str, right: list[float], picture: dict[str, Any] | None, **options: Any) -> Path:
    """A run of the study as the harness leaves it."""
    of_run = {"tokens": options.pop("tokens", 0.25), "benchmark": options.pop("benchmark", "gqa")}
    chosen = {"scores": scores, "student": "vision", "rate": 0.1, "layer": None, "positions": "keep", **options}
    folder = store(out, right, method="Selection", options=chosen, changed=chosen, **of_run)
    file = folder / "metrics.json"
    metrics = json.loads(file.read_text())
    for row in metrics["report"]["extracted"]:
        row["picture"] = f"{row['index'] // 2}.jpg"
    file.write_text(json.dumps(metrics) if picture and len(right) == 24 else file.read_text())
    measured = {"measures": [picture]} if picture else {}
    said = [{"index": place, "pictures": f"{place // 2}", **measured} for place in range(len(right))]
    (folder / "answers.jsonl").write_text("".join(json.dumps({"metadata": one}) + "\n" for one in said))
    return folder


def test_rows_and_table_of_the_study(tmp_path: Path) -> None:
    wrong, right = [0.0] * 40 + [1.0] * 60, [1.0] * 100
    runs = [store(tmp_path, right, method="full", tokens=None, options={})]
    runs.append(run_of(tmp_path, "vision", wrong, {"agreement": [0.75]}))
    runs.append(run_of(tmp_path, "recovery", right, {"agreement": [0.75], "correction": [0.5]}, rate=0.3))
    content = results.study(runs)
    full, vision, recovery = content["rows"]
    assert (full["scores"], full["retention"], full["agreement"], full["gain"]) == ("full", 1.0, None, None)
    assert (vision["scores"], vision["retention"], vision["rate"], vision["student"]) == ("vision", 0.25, None, None)
    assert vision["disagreement"] == 0.25 and vision["correction"] is None and vision["accuracy"] == 60.0
    assert (recovery["student"], recovery["rate"], recovery["correction"]) == ("vision", 0.3, 0.5)
    assert recovery["gain"] == pytest.approx(40.0) and recovery["p"] < 0.001
    assert recovery["gain_interval"][0] > 25 and content["description"]["layer"] is None
    table = results.study_table(content)
    assert list(table.groups) == ["Retain 100 % of the tokens", "Retain 25 % of the tokens, positions kept"]
    assert table.head[1] == "GQA (100, 100)"
    name, cell = table.groups["Retain 25 % of the tokens, positions kept"][-1]
    assert name == "recovery, vision student, r = 0.3"
    assert "; +40.0 (" in cell and cell.endswith("‡; 25.0 / 50.0")


def test_contrasts_are_means_over_benchmarks_paired_by_question(tmp_path: Path) -> None:
    """At the least retention the sides disagree more, and recovery gains more; six of twelve images tell."""
    runs = []
    for name in ("gqa", "pope"):
        runs.append(store(tmp_path, [1.0] * 24, method="full", tokens=None, options={}, benchmark=name))
        for retention, right in ((0.5, 24), (0.06, 12)):
            found = {"agreement": [retention], "correction": [1 - retention]}
            student = [1.0] * right + [0.0] * (24 - right)
            runs.append(run_of(tmp_path, "vision", student, found, tokens=retention, benchmark=name))
            for rate, of in ((0.1, 1.0), (0.3, 0.5)):
                measured = {**found, "correction": [of * (1 - retention)]}
                more = {"tokens": retention, "benchmark": name, "rate": rate}
                runs.append(run_of(tmp_path, "recovery", [1.0] * 24, measured, **more))
    found = results.study(runs)["contrasts"]
    by_kind = {(one["of"], one["retention"], one["rate"]): one for one in found}
    assert all(one["benchmarks"] == ["gqa", "pope"] and one["pictures"] == 12 for one in found)
    assert by_kind["gain", 0.06, 0.1]["difference"] == 50 and by_kind["gain", 0.06, 0.1]["p"] < 0.01
    assert by_kind["gain", 0.5, 0.1]["difference"] == 0 and by_kind["gain", 0.5, 0.1]["p"] == 1
    assert by_kind["rise", 0.06, 0.1]["difference"] == 50
    assert by_kind["disagreement", 0.06, 0.1]["difference"] == pytest.approx(44)
    assert by_kind["fall", 0.06, 0.1]["difference"] == pytest.approx(47) and ("fall", 0.06, 0.3) not in by_kind


def test_scap_of_recorded_images(tmp_path: Path) -> None:
    picture = {"rotated": [[2.0, 1.0, 0.0]], "plain": [[1.0, 1.0, 1.0]]}
    content = results.scap(run_of(tmp_path, "vision", [1.0, 0.0] * 12, picture))
    rotated, plain = content["positions"]
    assert rotated == {"rotated": True, "saliency": [2, 1, 0]} and plain == {"rotated": False, "saliency": [1, 1, 1]}
    late, rotation = content["contrasts"]
    assert late["difference"] == rotation["difference"] == -200 and late["pictures"] == 12 and late["p"] < 0.001


def test_the_command_runs_goes_on_and_leaves_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(BENCHMARKS, "fake", Fake)
    loads: list[FakeHost] = []
    monkeypatch.setattr(models, "load", lambda *_: loads.append(FakeHost()) or loads[-1])
    make_model(tmp_path / "model")
    data, out = make_data(tmp_path / "data"), tmp_path / "out"
    place = ["--model", str(tmp_path / "model"), "--data", str(data), "--device", "cpu", "--no-progress"]
    line = ["paper", "study", "--bench", "fake", "--rates", "0.1", "--scap-bench", "none", *place, "--out", str(out)]
    assert cli.main(line) == 0 == cli.main(line)
    assert len(loads) == 1, "the model is loaded once, and not at all for what is complete"
    rows = json.loads((out / "study.json").read_text())["rows"]
    ways = {(row["positions"], row["retention"]) for row in rows if row["scores"] == "recovery"}
    assert ways == {(policy, share) for policy in ("keep", "renumber") for share in (0.5, 0.25, 0.12, 0.06, 0.03)}
    assert [row["scores"] for row in rows].count("recovery") == 20 and len(rows) == 41
    assert {path.name for path in out.glob("study.*")} == {"study.json", "study.md", "study.tex", "study.csv"}
    assert len(list(out.glob("*/config.json"))) == 1, "selections stand apart from runs of methods"
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 4}))
    for layer in ("99", "4", "0", "-1"):
        assert cli.main([*line, "--layer", layer]) == 2 and "must be in 1..3" in capsys.readouterr().err
    assert len(loads) == 1, "refused at once"
    assert cli.main([*line, "--rates", "many"]) == 2 and "must be numbers" in capsys.readouterr().err
    assert cli.main([*line, "--retention", "144"]) == 2 and "shares of the tokens" in capsys.readouterr().err
