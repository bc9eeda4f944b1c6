"""Qwen-VL and CogVLM, checked, loaded and asked: by the model's own prompts and `generate`.

The tower runs once for an image, however many questions are asked about it; prompts are answered in left-padded
batches.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from PIL import Image
from torch import Tensor

from llava_consensus.entry_points import load_place
from llava_consensus.errors import ConsensusError, DataError, OptionError, unknown_name
from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.models.base import Answer, Encoding, Prompt, Runner, answers_of, shape_of
from llava_consensus.evaluation.models.loading import Loading, from_auto
from llava_consensus.evaluation.models.weights import reason
from llava_consensus.hosts.pretrained import load_pretrained
from llava_consensus.hosts.remote.cogvlm import CogVLM
from llava_consensus.hosts.remote.qwen_vl import QwenVLChat
from llava_consensus.reduction.method import Shape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OWN_PROMPTS = "prompts of the model's own code"
COGVLM_TEMPLATES = ("base", "chat", "chat_old", "vqa")  # of CogVLM's `build_conversation_input_ids`
ANSWER = " Answer:"  # after every question in Qwen-VL's own evaluation


class RemoteRunner(Runner):
    """A model that carries its own code, with its tokenizer."""

    @property
    def padding(self) -> int:
        """Id of padding; the end of a document for Qwen's tokenizer, which has none."""
        end: int | None = getattr(self.tokenizer, "eod_id", None)
        return super().padding if end is None else end

    def words(self, prompt: Prompt, pictures: int) -> dict[str, Tensor]:
        """A prompt about that many images in the model's own words, as arguments of `generate` by row, each [L]."""
        raise NotImplementedError

    def stand_ins(self, pictures: list[int]) -> dict[str, Any]:
        """Arguments of `generate` in place of images that were encoded before, given their number in each row."""
        return {}

    def rows(self, prompt: Prompt, pictures: int = 1) -> tuple[int, int]:
        return self._text_rows(self.words(prompt, pictures))

    def _text_rows(self, words: dict[str, Tensor]) -> tuple[int, int]:
        images, length = self.view.images({name: value[None] for name, value in words.items()}), len(words["input_ids"])
        rows = sum(len(image.places) for image in images)
        return length - rows, length - 1 - int(images[-1].places[-1]) if images else length

    def prompt_ids(self, prompt: Prompt, pictures: int = 1) -> Tensor:
        return self.words(prompt, pictures)["input_ids"]

    @torch.inference_mode()
    def encode(self, pictures: list[Any]) -> list[Encoding]:
        """Images through tower and projector, for the method that is attached."""
        pixels = torch.stack([self.pixels(image) for image in pictures]).to(self.model.device, self.model.dtype)
        attachment: Any
        with self.attachment() as attachment:
            encoded, own = attachment.entrance.encode(pixels), (attachment.asked, attachment.budget)
        return [Encoding(one, False, image.size, *own) for image, one in zip(pictures, encoded, strict=True)]

    def answer_group(
        self, attachment: Any, encoded: list[list[Encoding]], ids: list[Tensor], prompts: list[Prompt]
    ) -> list[Answer]:
        counts = [len(pictures) for pictures in encoded]
        words = [self.words(*pair) for pair in zip(prompts, counts, strict=True)]
        padded, mask = self.pad([row["input_ids"] for row in words])
        types = {name: _padded([row[name] for row in words]).to(mask) for name in words[0] if name != "input_ids"}
        images = [picture.tiles for pictures in encoded for picture in pictures]
        arguments = {**types, **self.stand_ins(counts), **self.generation(prompts[0])}
        shown = attachment.entrance.shown(images) if images else nullcontext()
        with attachment.call([prompt.text for prompt in prompts]) as call, shown:
            output = self.model.generate(padded, attention_mask=mask, **arguments)
        texts = self.decode(output[:, padded.shape[1] :])
        return answers_of(call, texts, [self._text_rows(row) for row in words], None)


def _padded(rows: list[Tensor]) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])


class QwenVLRunner(RemoteRunner):
    """Qwen-VL, which reads images from files that its prompts name."""

    reserved = ("<img>", "</img>", "<imgpad>")

    def shape(self, text: int = 0) -> Shape:
        """The tower's rows are patches, of which there are more than tokens; the others count as class tokens do. Each
        token costs the resampler its share of the patches, which are projected, and made keys and values of; its own
        query, the projection after the attention, and the last one.
        """
        config, visual, tokens = self.model.config, self.model.config.visual, self.visual_tokens
        vision = SimpleNamespace(**visual, hidden_size=visual["width"], num_heads=visual["heads"])
        patches = (visual["image_size"] // visual["patch_size"]) ** 2
        width, output = visual["width"], visual["output_dim"]
        return shape_of(self.view, config, vision, None, text, text_tower=0.0)._replace(
            head_width=config.kv_channels,
            inner=config.intermediate_size // 2,
            classes=patches - tokens,
            projector=patches // tokens * (width * output + 2 * output**2) + 3 * output**2,
        )

    def pixels(self, image: Image.Image) -> Tensor:
        pixels: Tensor = self.model.transformer.visual.image_transform(image.convert("RGB"))
        return pixels

    def words(self, prompt: Prompt, pictures: int) -> dict[str, Tensor]:
        """`<img>`, as many fillers as an image has rows, `</img>`, the question, and `Answer:`."""
        start, end, pad = self.view.marks
        words = self.tokenizer(prompt.text + ANSWER, return_tensors="pt").input_ids[0]
        picture = torch.tensor([start, *[pad] * self.visual_tokens, end])
        return {"input_ids": torch.cat([*[picture] * pictures, words])}

    def own_inputs(self, prompt: Prompt, image: Image.Image, folder: Path) -> dict[str, Any]:
        ids, start = self.prompt_ids(prompt)[None], self.view.marks[0]
        path = folder / "picture.png"
        image.save(path)
        name = list(str(path).encode())
        if len(name) >= self.visual_tokens:
            raise OptionError(f"{path}: longer than the {self.visual_tokens} rows of an image, which hold its path")
        place = int((ids[0] == start).nonzero()[0]) + 1
        ids[0, place : place + len(name)] = torch.tensor(name)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class CogVLMRunner(RemoteRunner):
    """CogVLM, which reads at most one image in a prompt."""

    def shape(self, text: int = 0) -> Shape:
        config, vision = self.model.config, SimpleNamespace(**self.model.config.vision_config)
        width, inner = config.hidden_size, config.intermediate_size
        projector = vision.hidden_size * width + 3 * width * inner
        return shape_of(self.view, config, vision, None, text, text_tower=0.0)._replace(projector=projector)

    def pixels(self, image: Image.Image) -> Tensor:
        pixels: Tensor = self._conversation("", None, image)["images"][0]
        return pixels

    def words(self, prompt: Prompt, pictures: int) -> dict[str, Tensor]:
        """The model's own conversation about one image, or none."""
        if pictures > 1:
            raise OptionError(f"{pictures} images in a prompt: CogVLM reads one")
        image = Image.new("RGB", (1, 1)) if pictures else None
        built = self._conversation(prompt.text, prompt.conversation, image)
        return {name: built[name] for name in ("input_ids", "token_type_ids")}

    def stand_ins(self, pictures: list[int]) -> dict[str, Any]:
        """An empty tensor in place of each picture."""
        return {"images": [[torch.empty(0)] * count for count in pictures]} if any(pictures) else {}

    def own_inputs(self, prompt: Prompt, image: Image.Image, folder: Path) -> dict[str, Any]:
        built = self._conversation(prompt.text, prompt.conversation, image)
        device, dtype = self.model.device, self.model.dtype
        words = {name: built[name][None].to(device) for name in ("input_ids", "token_type_ids", "attention_mask")}
        return {**words, "images": [[built["images"][0].to(device, dtype)]]}

    def _conversation(self, text: str, template: str | None, image: Image.Image | None) -> dict[str, Any]:
        images = None if image is None else [image.convert("RGB")]
        template = None if template == OWN_PROMPTS else template
        built: dict[str, Any] = self.model.build_conversation_input_ids(
            self.tokenizer, query=text, history=[], images=images, template_version=template
        )
        return built


def runner_of(view: QwenVLChat | CogVLM, tokenizer: "PreTrainedTokenizerBase | None" = None) -> RemoteRunner:
    runner_class = next(
        runner for kind, runner in ((QwenVLChat, QwenVLRunner), (CogVLM, CogVLMRunner)) if isinstance(view, kind)
    )
    return runner_class(view, tokenizer)


def check(model: str, conversation: str | None, videos: bool, options: Mapping[str, str]) -> dict[str, Any]:
    """Checks a checkpoint with code of its own, before any of that code runs.

    Raises:
        OptionError: for a template the model does not have.
    """
    if conversation in (None, OWN_PROMPTS):
        return {"conversation": OWN_PROMPTS}
    file = Path(model).expanduser() / "config.json"
    config = read_json(file, "Fetch the checkpoint again", dict) if file.is_file() else {}
    if "QWenLMHeadModel" in (config.get("architectures") or []):
        raise OptionError(f"conversation={conversation!r}: Qwen-VL has one prompt of its own. Leave --conversation out")
    if conversation not in COGVLM_TEMPLATES:
        raise unknown_name("conversation", str(conversation), COGVLM_TEMPLATES)
    return {"conversation": conversation}


def load(path: str, loading: Loading, view: str, options: Mapping[str, str]) -> RemoteRunner:
    """A checkpoint that carries its own code, which the user trusts (checked before), with its tokenizer.

    Raises:
        OptionError: for an attention kernel, which such code chooses itself.
        DataError: for a checkpoint that cannot be loaded, or whose weights are not those of its config.json.
    """
    if loading.attention != "auto":
        raise OptionError(f"attention={loading.attention!r}: the code of {path} has a kernel of its own. Leave it out")
    try:
        tokenizer = load_pretrained(transformers.AutoTokenizer, path, loading.trust_remote_code)
        model = from_auto(transformers.AutoModelForCausalLM, path, loading)
    except ConsensusError:
        raise
    except Exception as error:  # foreign code breaks in any way
        raise DataError(
            f"model={path!r} cannot be loaded: {reason(error)}. Its code is of 2023, written for "
            "transformers 4.31 to 4.37 (make setup-pinned); CogVLM's checkpoint needs the tokenizer files of "
            "lmsys/vicuna-7b-v1.5 beside it"
        ) from error
    return runner_of(load_place(view)(model, options), tokenizer)
