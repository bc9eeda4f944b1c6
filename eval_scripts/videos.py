"""Methods for videos on clips of which every thing that is asked about is seen in one frame.

    python -m playground.mini.build --split brief --out playground/mini-brief
    python -m eval_scripts.videos --out results/videos

The embedded model as a `LlavaNextVideoForConditionalGeneration` whose frames are not pooled: the eight frames of a clip
are one video of 8 x 576 tokens with one budget. In official LLaVA each frame is a picture of its own, and a method that
looks across frames finds no video. The model is built in memory, with a processor that needs no torchvision.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from eval_scripts.compared import LINES
from eval_scripts.composition import FULL, Cell, run
from llava_consensus.evaluation.models import CLIPS, Host, Loading, Prompt
from llava_consensus.evaluation.models.convert import convert
from llava_consensus.evaluation.models.hf import HfHost
from llava_consensus.hosts import view_of
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

DATA = Path("playground/mini-brief")
VIDEO = "<video>"
SAID = {"videos": CLIPS, "class": "LlavaNextVideoForConditionalGeneration, frames not pooled"}
LONGEST = 16  # tokens of an answer: without a picture to go by the model may go on for ever
SEEDS = 3  # of random
MOVED = ("ConsensusDrop, the clip", "VidCom2, the clip", "VisPruner, each frame", "random, each frame")
MANY = ("ConsensusDrop, the clip", "VidCom2, the clip", "EVS, the clip", "random, each frame")


class Frames:
    """A video processor that takes frames one by one through that of pictures."""

    def __init__(self, pictures: Any) -> None:
        self.pictures, self.valid_kwargs = pictures, transformers.processing_utils.VideosKwargs

    def __call__(self, videos: list[Any], **options: Any) -> Any:
        """Pixels [videos, frames, 3, height, width]."""
        pixels = [self.pictures(images=clip, return_tensors="pt").pixel_values for clip in videos]
        return transformers.BatchFeature({"pixel_values_videos": torch.stack(pixels)})


class Processor(transformers.LlavaNextVideoProcessor):
    """With a placeholder for every patch, where the released models have one for four."""

    def check_argument_for_proper_class(self, *_: Any) -> None:
        """`Frames` is of no class that the base knows."""

    def replace_video_token(self, video_inputs: dict[str, Any], video_idx: int = 0, **_: Any) -> str:
        """The placeholders of a video."""
        frames, _, height, width = video_inputs["pixel_values_videos"][video_idx].shape
        return VIDEO * (frames * (height // self.patch_size) * (width // self.patch_size))


def as_video_model(model: str, loading: Loading, options: Mapping[str, str]) -> Host:
    """An official checkpoint as a model of videos."""
    with tempfile.TemporaryDirectory() as place:
        convert(Path(model), folder := Path(place) / "converted")
        source = transformers.LlavaForConditionalGeneration.from_pretrained(folder, dtype=loading.torch_dtype())
        plain = transformers.AutoProcessor.from_pretrained(folder)
    plain.tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", VIDEO]})
    video = plain.tokenizer.convert_tokens_to_ids(VIDEO)
    source.resize_token_embeddings(video + 1, mean_resizing=False)
    config = transformers.LlavaNextVideoConfig(
        **{name: getattr(source.config, name) for name in ("vision_config", "text_config", "image_token_index",
           "vision_feature_layer", "vision_feature_select_strategy", "tie_word_embeddings")},
        video_token_index=video, spatial_pool_stride=1,
    )  # fmt: skip
    made = transformers.LlavaNextVideoForConditionalGeneration(config).to(source.dtype)
    missing, unexpected = made.load_state_dict(source.state_dict(), strict=False)
    assert (missing, unexpected) == (["model.image_newline"], []), (missing, unexpected)
    made.generation_config = source.generation_config
    made.generation_config.suppress_tokens = [config.image_token_index, video]
    size = config.vision_config.patch_size
    template = plain.chat_template.replace("'image'", "'video'").replace('"<image>"', f'"{VIDEO}"')
    processor = Processor(video_processor=Frames(plain.image_processor), image_processor=plain.image_processor,
                          tokenizer=plain.tokenizer, patch_size=size, chat_template=template)  # fmt: skip
    return HfHost(view_of(made.eval(), dict(options)), processor)


def loaded(model: str, loading: Loading, options: Mapping[str, str]) -> Host:
    """The same, which puts a prompt of thousands of placeholders together once for each question."""
    host = as_video_model(model, loading, options)
    ids, kept = host.question_ids, dict[tuple[Any, ...], torch.Tensor]()

    def once(prompt: Prompt, pictures: list[Any]) -> torch.Tensor:
        key = (prompt.text, *(len(picture.rows.token) for picture in pictures))
        return kept[key] if key in kept else kept.setdefault(key, ids(prompt, pictures))

    host.question_ids = once  # type: ignore[method-assign]
    return host


def grid() -> list[Cell]:
    """Every line with positions kept, some with positions closed up and with as many tokens as EVS is made for."""
    return [*cells(32, LINES), FULL, *cells(32, MOVED, "renumber"), *cells(128, LINES), *cells(1152, MANY)]


def cells(tokens: int, lines: Iterable[str], positions: str = "keep") -> Iterator[Cell]:
    """These lines at a budget; what draws, with several seeds."""
    for words in lines:
        name, options = LINES[words]
        for seed in range(SEEDS) if name == "random" else (None,):
            drawn = {} if seed is None else {"seed": seed}
            yield make(name, positions=positions, **options, **drawn), Budget(tokens)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="checkpoints/llava-mini")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=Path("results/videos"), help="folder (%(default)s)")
    given = parser.parse_args()
    run(grid(), {"msvd": None}, given.model, given.data, given.out, loaded, SAID, LONGEST, batch=1)


if __name__ == "__main__":
    main()
