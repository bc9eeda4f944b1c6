"""Video-LLaVA in the harness: mini questions about videos, clips of 8 x 257 rows, the paper's budgets in the record."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import hf_checkpoints
import hf_models
import pytest
import torch
import transformers
from PIL import Image

from llava_consensus import cli
from llava_consensus.errors import MissingDependency
from llava_consensus.evaluation import models
from llava_consensus.evaluation.models.hf import HfRunner
from llava_consensus.hosts import view_of
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

PLAYGROUND = Path(__file__).parents[3] / "playground/mini"


class FrameByFrame:
    """A stand-in for the video processor where torchvision is missing: the image processor, frame by frame."""

    def __init__(self, pictures: Any) -> None:
        self.pictures = pictures
        self.valid_kwargs = transformers.processing_utils.VideosKwargs

    def __call__(self, videos: list[Any], **options: Any) -> Any:
        told = {"return_tensors": "pt", "return_legacy_image_output": False}
        pixels = [self.pictures(images=clip, **told).pixel_values for clip in videos]
        return transformers.BatchFeature({"pixel_values_videos": torch.stack(pixels)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "video-llava"
    model = hf_models.video_llava(224)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    if hf_checkpoints.FILMING:
        hf_checkpoints.video_llava(224).save_pretrained(folder)
    return folder


@pytest.fixture
def loadable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness loads the checkpoint; without torchvision it is given one with a stand-in processor."""
    if hf_checkpoints.FILMING:
        return
    processor = hf_checkpoints.video_llava(224)
    processor.video_processor = FrameByFrame(processor.image_processor)

    def load(path: str, loading: Any, options: Any) -> HfRunner:
        model = transformers.VideoLlavaForConditionalGeneration.from_pretrained(path).eval()
        return HfRunner(view_of(model, options), processor)

    monkeypatch.setattr(models, "load", load)


@pytest.mark.parametrize(
    ("benchmark", "budget", "tile_budget"),
    [("tgif", 455, "global"), ("msvd", 227, "per_tile"), ("msrvtt", 114, "global")],
)
def test_the_budgets_of_a_clip_stand_in_the_record(
    folder: Path, loadable: None, benchmark: str, budget: int, tile_budget: str, tmp_path: Path
) -> None:
    said = f"eval {benchmark} --model {folder} --tokens {budget} --option tile_budget={tile_budget}".split()
    more = ["--data", str(PLAYGROUND), "--out", str(tmp_path), "--device", "cpu", "--limit", "3"]
    assert cli.main([*said, *more, "--max-new-tokens", "3", "--no-progress"]) == 0
    (described,) = tmp_path.rglob("config.json")
    assert json.loads(described.read_text())["videos"] == "clips"
    records = [json.loads(line) for line in (described.parent / "answers.jsonl").read_text().splitlines()]
    counts = {tuple(one["metadata"][name] for name in ("before", "after", "structural", "videos")) for one in records}
    assert len(records) == 3 and counts == {(2048, budget, 8, "clips")}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("\nVideoLlavaVideoProcessor requires the Torchvision library but it was not found in your environment. "
         "Check out\nthe instructions.\n", "requires the Torchvision library but it was not found in your environment"),
        ("Package `num2words` is required to run SmolVLM processor. Install it with `pip install num2words`.",
         "Package `num2words` is required to run SmolVLM processor"),
    ],
)  # fmt: skip
def test_a_package_that_a_processor_needs_is_named_in_one_line_before_weights_load(
    folder: Path, error: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", Mock(side_effect=ImportError(error)))
    never = SimpleNamespace(from_pretrained=lambda *given, **options: pytest.fail("weights were loaded"))
    monkeypatch.setattr(transformers, "AutoModelForImageTextToText", never)
    with pytest.raises(MissingDependency) as caught:
        models.load(str(folder), models.Loading("cpu", "float32"))
    assert reason in str(caught.value) and str(caught.value).endswith("[processors]'")
    assert "\n" not in str(caught.value)


def test_a_prompt_longer_than_the_positions_of_the_model_is_noted() -> None:
    model = hf_models.CASES["llava"].build()
    model.config.text_config.max_position_embeddings = 40
    host = HfRunner(view_of(model), hf_checkpoints.PROCESSORS["llava"]())
    prompts = [models.Prompt(text, max_new_tokens=2) for text in ("What?", "What is on the table in front?")]
    with host.attach(make("consensusdrop"), Budget(8)):
        (picture,) = host.encode([Image.new("RGB", (56, 56))])
        with pytest.warns(UserWarning, match="longer than the 40 positions"):
            short, long = host.answer([[picture]] * 2, prompts)
    rows = [answer.prefill.text + answer.after for answer in (short, long)]
    assert rows[0] <= 40 < rows[1]
    assert (short.notes, long.notes) == ((), ("prompt longer than the 40 positions of the model",))
