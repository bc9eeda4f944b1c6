"""All tokens are held to published scores by the interval of the run, prompts to what official LLaVA made."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_folders import store

from llava_consensus.errors import DataError
from llava_consensus.evaluation import benchmarks, models
from llava_consensus.evaluation.models import Loading
from llava_consensus.evaluation.models.llava import on_pillow
from llava_consensus.evaluation.report.rows import read_row
from llava_consensus.evaluation.runs.configuration import RunConfig, RunPlan, prepare
from llava_consensus.methods import make
from llava_consensus.paper import official
from llava_consensus.paper.official import verify_table
from playground.mini.paths import MINI

MODEL = Path("checkpoints/llava-mini")


@pytest.mark.parametrize(
    ("published", "same"), [(75.0, True), (85.0, True), (61.5, True), (50.0, False), (95.0, False)]
)
def test_a_published_score_is_in_the_interval_refused_or_missing(tmp_path: Path, published: float, same: bool) -> None:
    run = read_row(store(tmp_path, [1] * 30 + [0] * 10, method="full", tokens=None))
    (line,) = verify_table([run], {}, {}).groups[""]
    assert line[3] == "-" and line[5] == "nothing published"
    if not same:
        with pytest.raises(DataError, match=r"gqa 75\.0 ± 1\d\.\d, published"):
            verify_table([run], {"gqa": published}, {})
        return
    (line,) = verify_table([run], {"gqa": published}, {"gqa": 4000}).groups[""]
    assert line[1:4] == ("40 (40)", line[2], f"{published:.1f}") and line[5] == "as published"
    assert float(line[4]) == pytest.approx(float(line[2].split(" ± ")[1]) / 10, abs=0.1)  # of a hundred times as many


@pytest.fixture(scope="module")
def mini() -> models.Runner:
    return models.load(str(MODEL), Loading("cpu"), {})


def plan(name: str, **given: Any) -> RunPlan:
    config = RunConfig(benchmark=benchmarks.make(name), method=make("full"), data=MINI, model=str(MODEL))
    return prepare(replace(config, **given))


def test_prompts_and_pixels_are_those_of_llavas_own_scripts(mini: models.Runner) -> None:
    table = official.prompts_table([plan("gqa"), plan("sqa"), plan("mmbench_cn")], mini, MODEL)  # type: ignore[arg-type]
    assert [line[1:4] for line in table.groups[""]] == [
        ("10 of 10", "10 of 10", "10 of 10"),
        ("10 of 10", "10 of 10", "6 of 6"),  # four have no image
        ("10 of 10", "10 of 10", "10 of 10"),
    ]
    with pytest.raises(DataError, match=r"gqa, question .*: other prompt"):
        official.prompts_table([plan("gqa", conversation="llava_v1")], mini, MODEL)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DataError, match="other pixels"):
        patch.setattr(mini.view.config, "image_aspect_ratio", "square")
        official.prompts_table([plan("textvqa")], mini, MODEL)  # type: ignore[arg-type]


def test_pixels_come_from_pillow_although_torchvision_is_there(mini: models.Runner) -> None:
    on_pil = pytest.importorskip("transformers.models.clip.image_processing_pil_clip").CLIPImageProcessorPil
    preferred = type("CLIPImageProcessor", (), {"to_dict": mini.image_processor.to_dict})  # type: ignore[attr-defined]
    assert type(on_pillow(preferred())) is on_pil
