"""Official LLaVA, checked, loaded and asked: by the package's own loader, templates and `generate`.

Some checkpoints, such as LLaVA 1.6, have a vision tower that was trained along (`unfreeze_mm_vision_tower`). Current
transformers refuse to load it while the language model is being made. Here the language model is loaded without it,
then the tower from its name, then the checkpoint's own tower weights over it: all of them and no others.
"""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.image_processing_utils import BaseImageProcessor

from llava_consensus.errors import MissingDependency, OptionError, unknown_name
from llava_consensus.evaluation.files import Record, read_json
from llava_consensus.evaluation.media import shrink_to_pad
from llava_consensus.evaluation.models.base import Encoding, Prompt, Runner, last_row_alone, shape_of, text_rows
from llava_consensus.evaluation.models.loading import (
    Checkpoint,
    Loading,
    clip_costs,
    find,
    incomplete_refused,
    loading_errors,
    refuse_incomplete,
)
from llava_consensus.evaluation.models.weights import MEND, tensors_of, weight_files
from llava_consensus.hosts.clip import without_unused_report
from llava_consensus.hosts.environment import OFFICIAL, STOCK, load_pretrained
from llava_consensus.hosts.official_model import Official, blank_images, check_images, check_layout, check_llava_version
from llava_consensus.reduction.method import Shape

IMAGE_ID = -200  # IMAGE_TOKEN_INDEX of official LLaVA, which represents an image in a prompt
LEFT = {"tokenizer_padding_side": "left"}
CONVERSATION = "vicuna_v1"  # default template: that of LLaVA-1.5
VIDEO_CONVERSATION = "llava_v1"  # of the official scripts for questions about videos (Video-LLaVA)
FLAG = "unfreeze_mm_vision_tower"
PREFIX = "model.vision_tower.vision_tower."  # of the tower's tensors in a checkpoint


class LlavaRunner(Runner):
    """A LLaVA model with its vision tower loaded; only `encode` and `answer` need tokenizer and image processor."""

    view_class = Official
    reserved = ("<image>",)

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        image_processor: BaseImageProcessor | None = None,
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(self.view_class(model, options), tokenizer)
        self.image_processor = image_processor
        self.limit = getattr(model.config, "max_position_embeddings", None)

    def shape(self, text: int = 0) -> Shape:
        tower = self.model.get_vision_tower()
        projector = getattr(self.model.get_model(), "mm_projector", None)
        clip = clip_costs(tower.vision_tower_name)
        return shape_of(self.view, self.model.config, tower.vision_tower.config, projector, text, **clip)

    def grid_columns(self, size: tuple[int, int]) -> int:
        from llava.mm_utils import get_anyres_image_grid_shape

        config, tile = self.view.config, self.model.get_vision_tower().config.image_size
        if getattr(config, "image_aspect_ratio", None) != "anyres":
            return 0
        return int(get_anyres_image_grid_shape(size, config.image_grid_pinpoints, tile)[0])

    def rows(self, prompt: Prompt, images: int = 1) -> tuple[int, int]:
        return text_rows(self.prompt_ids(prompt, images), [IMAGE_ID])

    def prompt_ids(self, prompt: Prompt, images: int = 1) -> Tensor:
        from llava.mm_utils import tokenizer_image_token

        text = to_text(prompt, images, getattr(self.model.config, "mm_use_im_start_end", False))
        ids: Tensor = tokenizer_image_token(text, self.tokenizer, IMAGE_ID, return_tensors="pt")
        return ids

    def pixels(self, image: Image.Image) -> Tensor:
        from llava.mm_utils import process_images

        pixels: Tensor = process_images([shrink_to_pad(image)], self.image_processor, self.view.config)[0]
        return pixels

    def own_inputs(self, prompt: Prompt, image: Image.Image, folder: Path) -> dict[str, Any]:
        ids = self.prompt_ids(prompt)[None].to(self.model.device)
        pixels = self.pixels(image)[None].to(self.model.device, self.model.dtype)
        size = [shrink_to_pad(image).size]
        return {"inputs": ids, "attention_mask": torch.ones_like(ids), "images": pixels, "image_sizes": size}

    @contextmanager
    def calling(self, attachment: Any, images: list[Any], questions: list[str]) -> Iterator[Any]:
        with attachment.call(questions, settings=LEFT) as call, last_row_alone(self.model.get_output_embeddings()):
            yield call

    def generate(self, ids: Tensor, mask: Tensor, encoded: list[list[Any]], prompts: list[Prompt]) -> Tensor:
        images = [visual for row_images in encoded for visual in row_images]
        output: Tensor = self.model.generate(
            ids,
            images=self.blank(images) if images else None,
            image_sizes=[visual.size for visual in images],
            attention_mask=mask,
            **self.generation(prompts[0]),
        )
        return output

    def blank(self, encoded: list[Encoding]) -> list[Tensor] | Tensor:
        """Stand-ins for images that are encoded, of the shape the official function looks at."""
        tiled = any(visual.tiled for visual in encoded)
        return blank_images([visual.tiles for visual in encoded], tiled, self.model.dtype)


def to_text(prompt: Prompt, images: int, wrapped: bool = False) -> str:
    """A prompt in its conversation template, as LLaVA's own runners write it; `wrapped` by `mm_use_im_start_end`."""
    from llava.constants import DEFAULT_IM_END_TOKEN, DEFAULT_IM_START_TOKEN, DEFAULT_IMAGE_TOKEN
    from llava.conversation import conv_templates

    image = DEFAULT_IM_START_TOKEN + DEFAULT_IMAGE_TOKEN + DEFAULT_IM_END_TOKEN if wrapped else DEFAULT_IMAGE_TOKEN
    turns = conv_templates[chosen_conversation(prompt.conversation)].copy()
    turns.append_message(turns.roles[0], f"{image * images}\n{prompt.text}" if images else prompt.text)
    turns.append_message(turns.roles[1], None)
    return str(turns.get_prompt())


def check(model: str, conversation: str | None, videos: bool, options: Mapping[str, str]) -> dict[str, Any]:
    """Checks a checkpoint; questions about videos have another template."""
    check_llava_version()
    tower, config = tower_of(Path(model)), config_of(Path(model))
    check_images(config)
    check_layout(options.get("layout", STOCK), config.get("image_aspect_ratio"))
    chosen = chosen_conversation(conversation, VIDEO_CONVERSATION if videos else CONVERSATION)
    return {"conversation": chosen, **({"tower": tower.commit} if tower and tower.commit else {})}


def chosen_conversation(name: str | None, default: str = CONVERSATION) -> str:
    """The template of a name, or the default. OptionError for a name that official LLaVA does not have."""
    from llava.conversation import conv_templates  # only now: it takes seconds

    if name is not None and name not in conv_templates:
        raise unknown_name("conversation", name, conv_templates)
    return name or default


def tower_of(path: Path) -> Checkpoint | None:
    """The vision tower that a checkpoint names, beside it if it is there; None if it names none."""
    name = config_of(path).get("mm_vision_tower")
    if not isinstance(name, str):
        return None
    beside = path / Path(name).name
    return Checkpoint(name, beside) if (beside / "config.json").is_file() else find(name)


def load(path: str, loading: Loading, view: str, options: Mapping[str, str]) -> LlavaRunner:
    check_llava_version()
    if loading.device_map not in (None, "auto"):
        raise OptionError(f"device_map={loading.device_map!r}: official LLaVA places its vision tower with auto only")
    try:
        from llava.model.builder import load_pretrained_model
    except ImportError as error:
        raise MissingDependency(f"official LLaVA: {error}. {OFFICIAL}") from error
    config, tower = config_of(Path(path)), tower_of(Path(path))
    check_images(config)
    # what the loader passes on to transformers; on which device the model is, is its own to say
    changes: dict[str, Any] = loading.from_pretrained_kwargs()
    if loading.device_map is None:
        changes.pop("device_map", None)
    if config.get(FLAG):
        changes[FLAG] = False
    if tower is not None:
        tower.files()
        changes["mm_vision_tower"] = str(tower.folder)
    # the loader takes the class from the name: llava_llama, llava_mistral
    name, device = f"llava_{config.get('model_type')}", "cuda" if loading.device_map else loading.device
    model, tokenizer, processor = quietly_loaded(load_pretrained_model, path, name, device=device, **changes)
    if config.get(FLAG):
        load_own_tower(path, model)
    loading.cast(model)
    return LlavaRunner(model.eval(), tokenizer, on_pillow(processor), options)


def on_pillow(processor: "BaseImageProcessor") -> "BaseImageProcessor":
    """The same image processor on Pillow, as in official LLaVA's releases. If torchvision is installed, transformers 5
    takes its backend, which resizes to other pixels.
    """
    pillow = getattr(transformers, f"{type(processor).__name__}Pil", None)
    return processor if pillow is None else pillow.from_dict(processor.to_dict())


def quietly_loaded(
    loader: Callable[..., Any], path: str, name: str, **arguments: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, BaseImageProcessor]:
    """Model, tokenizer and image processor by the loader of a `llava` package, with its printing suppressed."""
    with loading_errors(path), incomplete_refused(), contextlib.redirect_stdout(io.StringIO()), without_unused_report():
        tokenizer, model, processor, _ = loader(path, None, name, **arguments)
    return model, tokenizer, processor


def load_own_tower(path: str, model: PreTrainedModel) -> None:
    """Puts the checkpoint's tower weights into a model with another tower. DataError unless they fit."""
    tower = model.get_vision_tower().vision_tower
    files = weight_files(Path(path))
    state = {name.removeprefix(PREFIX): values for file in files for name, values in tensors_of(file, PREFIX)}
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    own, info = load_pretrained(type(tower), None, config=tower.config, state_dict=state, **options)
    refuse_incomplete(path, type(tower), info)
    tower.load_state_dict(own.state_dict())
    setattr(model.config, FLAG, True)


def config_of(folder: Path) -> Record:
    config: Record = read_json(folder / "config.json", MEND, dict)
    return config
