"""A model of transformers, checked, loaded and asked: by its own processor, chat template and `generate`. An image or
clip goes through the tower once, however many questions it has.

A processor replaces the placeholder of an image by its text, in some models with tags or times between
placeholders. It makes that text once, together with the pixels, and every prompt about the image then holds it.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from PIL.Image import Image
from PIL.Image import new as new_image
from torch import Tensor

from llava_consensus.errors import OptionError, missing_extra
from llava_consensus.evaluation.media import Clip, shrink_to_pad
from llava_consensus.evaluation.models.base import Encoding, Prompt, Runner, shape_of, text_rows
from llava_consensus.evaluation.models.loading import Loading, clip_costs, from_auto, loading_errors
from llava_consensus.hosts.environment import load_pretrained
from llava_consensus.hosts.facts import Facts, check_version, text_side
from llava_consensus.hosts.patch_map import sides_of
from llava_consensus.hosts.tower import RECORD, records_of
from llava_consensus.reduction.method import Shape

CHAT_TEMPLATE = "chat template of the model"


@dataclass(frozen=True, eq=False)
class HfEncoded(Encoding):
    """One image or clip with the arguments that the model needs for it."""

    modality: str  # image | video
    text: str  # that represents it in prompts
    output: Any  # of the model's encoder
    inputs: dict[str, Tensor]  # what the positions of its tokens follow from


class Processed(NamedTuple):
    modality: str  # image | video
    text: str  # in place of its placeholder
    ids: Tensor  # [1, n] of that text alone
    inputs: dict[str, Any]  # pixels, and the arguments that go with them


class HfRunner(Runner):
    def __init__(self, view: Facts, processor: "transformers.ProcessorMixin") -> None:
        super().__init__(view, processor.tokenizer)
        self.processor = processor
        self.limit = None if view.keeps_positions else view.reach
        words = (getattr(processor, f"{modality}_token", None) for modality in ("image", "video"))
        self.reserved = tuple(word for word in words if word)
        view.image_processor = processor.image_processor

    def shape(self, text: int = 0) -> Shape:
        config, inner = self.model.config, self.view.inner
        names = ("multi_modal_projector", "connector", "visual.merger")
        projector = next((attrgetter(name)(inner) for name in names if hasattr(inner, name.split(".")[0])), None)
        clip = clip_costs(self.view.clip_name) if self.view.clip_name else {"text_tower": 0.0}
        return shape_of(self.view, config.get_text_config(), config.vision_config, projector, text, **clip)

    def grid_columns(self, size: tuple[int, int]) -> int:
        columns: int = self.view.grid_columns(size)
        return columns

    def rows(self, prompt: Prompt, images: int = 1) -> tuple[int, int]:
        """Without tags between the tiles of an image."""
        placeholder = self.tokenizer.convert_tokens_to_ids(self._placeholder("image"))
        return text_rows(self.prompt_ids(prompt, images), [placeholder])

    @torch.inference_mode()
    def encode(self, images: list[Image | Clip]) -> list[Encoding]:
        with self.attachment() as attachment, attachment.call():
            return [self._encoded(attachment, visual) for visual in images]

    def _encoded(self, attachment: Any, visual: Image | Clip) -> HfEncoded:
        one, view = self.processed(visual), self.view
        inputs = self._placed({name: value for name, value in one.inputs.items() if isinstance(value, Tensor)})
        arguments = view.encoder_inputs(inputs)[one.modality]
        ids = one.ids.cpu().numpy()
        if view.lays_out:
            arguments, ids = view.on_grid(arguments)
        (image,) = view.images(one.modality, arguments, ids)
        with attachment.entrance.showing(ids):
            output = getattr(view.inner, f"get_{one.modality}_features")(**arguments, return_dict=True)
        size = len(image.places)
        side = view.tower.side or sides_of(arguments, [size])[0]
        text = self._placeholder(one.modality) * size if view.lays_out else one.text
        return HfEncoded(
            SimpleNamespace(side=side),  # 0 without a grid
            image.tiles > 1,
            visual.frames[0].size if isinstance(visual, Clip) else visual.size,
            attachment.asked,
            attachment.budget,
            one.modality,
            text,
            output,
            {name: value for name, value in arguments.items() if not name.startswith("pixel_values")},
        )

    def own_inputs(self, prompt: Prompt, image: Image, folder: Path) -> dict[str, Any]:
        content = [{"type": "image"}, {"type": "text", "text": prompt.text}]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        return self._placed(self.processor(images=[image], text=text, return_tensors="pt"))

    def _placed(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Tensors where the model stands, in its dtype if they are no whole numbers."""
        device, dtype = self.model.device, self.model.dtype
        return {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in inputs.items()}

    def generate(self, ids: Tensor, mask: Tensor, encoded: list[list[Any]], prompts: list[Prompt]) -> Tensor:
        images = [visual for row_images in encoded for visual in row_images]
        more = self._inputs(ids, images) if images else {}
        output = self.model.generate(input_ids=ids, attention_mask=mask, **more, **self.generation(prompts[0]))
        answers: Tensor = output[:, ids.shape[1] :]
        return answers

    def asked_rows(self, prompt: Prompt, images: list[Any], ids: Tensor) -> tuple[int, int]:
        return text_rows(ids, [self.view.placeholder(modality) for modality in {one.modality for one in images}])

    def _inputs(self, ids: Tensor, images: list[HfEncoded]) -> dict[str, Any]:
        """Arguments of the model for prompts [R, S] about images that are encoded."""
        outputs: dict[str, list[Any]] = {}
        for visual in images:
            outputs.setdefault(visual.modality, []).append(visual.output)
        encoded = {modality: _joined_outputs(own) for modality, own in outputs.items()}
        return {**self.view.row_inputs(ids, "video" in outputs), **_together(images), "mm_encoder_outputs": encoded}

    def question_ids(self, prompt: Prompt, images: list[Any]) -> Tensor:
        """A row per visual token. OptionError for several images that the model encodes differently one by one."""
        if self.view.tiled_alone and sum(visual.modality == "image" for visual in images) > 1:
            raise OptionError(
                f"{len(images)} images in one prompt: {type(self.model).__name__} cuts an image into tiles only "
                "if it is the only one, and the harness encodes each by itself. Ask about one image"
            )
        text = self._text(prompt.text, [visual.modality for visual in images])
        return self.ids_of(text, [(visual.modality, visual.text) for visual in images])

    def prompt_ids(self, prompt: Prompt, images: int = 1) -> Tensor:
        placeholder = self._placeholder("image")
        return self.ids_of(self._text(prompt.text, ["image"] * images), [("image", placeholder)] * images)

    def check_prompts(self) -> None:
        """Tries an image of one colour. OptionError if the processor makes another prompt of it than this runner."""
        image, text = new_image("RGB", (64, 48)), self._text("What?", ["image"])
        expected = self.processor(images=[image], text=[text], return_tensors="pt", **self._special(text))
        visual = self.processed(image, {})
        ours, _ = self.pad([self.ids_of(text, [(visual.modality, visual.text)])])
        if not torch.equal(ours[0].cpu(), expected.input_ids[0]):
            raise OptionError(
                f"the processor of {type(self.model).__name__} puts a prompt together in a way the harness is not "
                "adapted to. attach(model, ...) works in your own generate call"
            )

    def _placeholder(self, modality: str) -> str:
        token: str = getattr(self.processor, f"{modality}_token")
        return token

    def processed(self, visual: Image | Clip, image_options: dict[str, Any] | None = None) -> Processed:
        """One image or clip; `image_options` are for the image processor, None those of the view."""
        if isinstance(visual, Clip):
            modality, arguments = "video", _of_clip(visual)
        else:
            more = self.view.preprocessing if image_options is None else image_options
            if "LlavaImageProcessor" in type(self.processor.image_processor).__name__:  # may pad to a square first
                visual = shrink_to_pad(visual)
            modality, arguments = "image", {"images": [visual], **more}
        options = {"return_tensors": "pt", "return_text_replacement_offsets": True}
        inputs = dict(self.processor(text=[self._placeholder(modality)], **arguments, **options))
        ((replaced,),) = inputs.pop("text_replacement_offsets")
        return Processed(modality, replaced["replacement"], inputs.pop("input_ids"), inputs)

    def _text(self, question: str, modalities: list[str]) -> str:
        """The prompt of a question about images and clips, with one placeholder for each."""
        content = [*({"type": modality} for modality in modalities), {"type": "text", "text": question}]
        try:
            prompt: str = self.processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            )
        except ValueError as error:
            raise OptionError(
                f"the model has no chat template that takes {', '.join(modalities) or 'text'} ({error}): take a "
                "checkpoint that was trained to answer questions, with its chat_template.jinja"
            ) from error
        return prompt

    def ids_of(self, text: str, images: list[tuple[str, str]]) -> Tensor:
        """Ids [L] of a text of the chat template, each placeholder replaced by the text of its (modality, text)."""
        parts = {
            f"{modality}s_replacements": [part for kind, part in images if kind == modality]
            for modality in ("image", "video")
        }
        texts, _ = self.processor.get_text_with_replacements([text], **parts)
        ids: Tensor = self.tokenizer(texts[0], return_tensors="pt", **self._special(text)).input_ids[0]
        return ids

    def _special(self, text: str) -> dict[str, bool]:
        """Kwargs of the tokenizer: it adds a beginning-of-sequence token, unless the template has one."""
        mark = self.tokenizer.bos_token
        return {"add_special_tokens": mark is None or not text.startswith(mark)}


def _joined_outputs(outputs: list[Any]) -> Any:
    """Outputs of an encoder of several images as one, for prompts that show them in this order."""
    new = copy.copy(outputs[0])
    new["pooler_output"] = _in_a_row([output["pooler_output"] for output in outputs])
    if outputs[0].get("deepstack_features") is not None:
        layers = zip(*(output["deepstack_features"] for output in outputs), strict=True)
        new["deepstack_features"] = [_in_a_row(list(layer)) for layer in layers]
    records = [record._replace(prompt={}) for output in outputs for record in records_of(output)]
    object.__setattr__(new, RECORD, records)
    return new


def _in_a_row(values: list[Any]) -> Any:
    return torch.cat(values) if isinstance(values[0], Tensor) else [item for value in values for item in value]


def _together(images: list[HfEncoded]) -> dict[str, Tensor]:
    names = {name for visual in images for name in visual.inputs}
    return {name: torch.cat([visual.inputs[name] for visual in images if name in visual.inputs]) for name in names}


def _of_clip(clip: Clip) -> dict[str, Any]:
    """The arguments of a processor for a clip whose frames are chosen already."""
    from transformers.video_utils import VideoMetadata

    width, height = clip.frames[0].size
    metadata = VideoMetadata(
        total_num_frames=clip.length,
        fps=clip.rate,
        width=width,
        height=height,
        duration=None if clip.rate is None else clip.length / clip.rate,
        frames_indices=list(clip.places),
    )
    return {"videos": [list(clip.frames)], "video_metadata": [metadata], "do_sample_frames": False}


def check(model: str, conversation: str | None, videos: bool, options: Mapping[str, str]) -> dict[str, Any]:
    check_version(version("transformers"))
    if conversation not in (None, CHAT_TEMPLATE):
        raise OptionError(
            f"conversation={conversation!r}: {model} is a model of transformers, whose prompts are put into its own "
            "chat template. Leave --conversation out"
        )
    return {"conversation": CHAT_TEMPLATE}


def load(path: str, loading: Loading, view: str, options: Mapping[str, str]) -> HfRunner:
    check_version(transformers.__version__)
    with loading_errors(path):
        processor = processor_of(path, loading.trust_remote_code)
        model = from_auto(transformers.AutoModelForImageTextToText, path, loading)
        if clip := text_side(path):
            model.config.vision_config._name_or_path = clip
        runner = HfRunner(Facts(model, options), processor)
    remedy = ". Its processor cannot read an image: fetch preprocessor_config.json, processor_config.json and tokenizer"
    with loading_errors(path, remedy):
        runner.check_prompts()
    return runner


def processor_of(path: str, trust_remote_code: bool = False) -> transformers.ProcessorMixin:
    """The processor of a checkpoint; those of models that know videos need torchvision, that of SmolVLM num2words."""
    try:
        return load_pretrained(transformers.AutoProcessor, path, trust_remote_code)
    except ImportError as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise missing_extra(f"model={path!r} cannot be loaded: {reason}", "processors") from error
