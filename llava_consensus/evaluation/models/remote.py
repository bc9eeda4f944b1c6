"""Models that carry their own code, checked, loaded and asked by the model's own prompts and `generate`: Qwen-VL and
CogVLM with code in the checkpoint, and InternVL-Chat of 2023 with its authors' `llava` package.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llava_consensus.entry_points import load_place
from llava_consensus.errors import MissingDependency, OptionError, unknown_name
from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.models.base import Encoding, Prompt, Runner, shape_of
from llava_consensus.evaluation.models.llava import LlavaRunner, chosen_conversation, quietly_loaded
from llava_consensus.evaluation.models.loading import Loading, from_auto, loading_errors
from llava_consensus.evaluation.models.weights import MEND
from llava_consensus.hosts.environment import load_pretrained
from llava_consensus.hosts.remote.cogvlm import CogVLM
from llava_consensus.hosts.remote.internvl_chat import InternVLChat
from llava_consensus.hosts.remote.qwen_vl import QwenVLChat
from llava_consensus.reduction.method import Shape

OWN_PROMPTS = "prompts of the model's own code"
COGVLM_TEMPLATES = ("base", "chat", "chat_old", "vqa")  # of CogVLM's `build_conversation_input_ids`
ANSWER = " Answer:"  # after every question in Qwen-VL's own evaluation


class RemoteRunner(Runner):
    @property
    def padding(self) -> int:
        """Id of padding; the end of a document for Qwen's tokenizer, which has none."""
        return int(getattr(self.tokenizer, "eod_id", None) or super().padding)

    def words(self, prompt: Prompt, items: int) -> dict[str, Tensor]:
        """A prompt about that many images in the model's own words, as arguments of `generate` by row, each [L]."""
        raise NotImplementedError

    def stand_ins(self, items: list[int]) -> dict[str, Any]:
        """Arguments of `generate` in place of images that were encoded before, given their number in each row."""
        return {}

    def rows(self, prompt: Prompt, items: int = 1) -> tuple[int, int]:
        words = self.words(prompt, items)
        images, length = self.view.images({name: value[None] for name, value in words.items()}), len(words["input_ids"])
        visual = sum(len(image.places) for image in images)
        return length - visual, length - 1 - int(images[-1].places[-1]) if images else length

    def prompt_ids(self, prompt: Prompt, items: int = 1) -> Tensor:
        return self.words(prompt, items)["input_ids"]

    @contextmanager
    def calling(self, attachment: Any, items: list[Any], questions: list[str]) -> Iterator[Any]:
        shown = attachment.entrance.shown([item.tiles for item in items]) if items else nullcontext()
        with attachment.call(questions) as call, shown:
            yield call

    def generate(self, ids: Tensor, mask: Tensor, encoded: list[list[Any]], prompts: list[Prompt]) -> Tensor:
        counts = [len(items) for items in encoded]
        words = [self.words(*pair) for pair in zip(prompts, counts, strict=True)]
        types = {
            name: pad_sequence([row[name] for row in words], batch_first=True, padding_side="left").to(mask)
            for name in words[0]
            if name != "input_ids"
        }
        arguments = {**types, **self.stand_ins(counts), **self.generation(prompts[0])}
        answers: Tensor = self.model.generate(ids, attention_mask=mask, **arguments)[:, ids.shape[1] :]
        return answers


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

    def words(self, prompt: Prompt, items: int) -> dict[str, Tensor]:
        """`<img>`, a filler for each row of an image, `</img>`, the question, and `Answer:`."""
        start, end, pad = self.view.marks
        words = self.tokenizer(prompt.text + ANSWER, return_tensors="pt").input_ids[0]
        item = torch.tensor([start, *[pad] * self.visual_tokens, end])
        return {"input_ids": torch.cat([*[item] * items, words])}

    def own_inputs(self, prompt: Prompt, image: Image.Image, folder: Path) -> dict[str, Any]:
        ids, start = self.prompt_ids(prompt)[None], self.view.marks[0]
        path = folder / "image.png"
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

    def words(self, prompt: Prompt, items: int) -> dict[str, Tensor]:
        """The model's own conversation about one image, or none."""
        if items > 1:
            raise OptionError(f"{items} images in a prompt: CogVLM reads one")
        image = Image.new("RGB", (1, 1)) if items else None
        built = self._conversation(prompt.text, prompt.conversation, image)
        return {name: built[name] for name in ("input_ids", "token_type_ids")}

    def stand_ins(self, items: list[int]) -> dict[str, Any]:
        return {"images": [[torch.empty(0)] * count for count in items]} if any(items) else {}

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


class InternVLChatRunner(LlavaRunner):
    """An InternVL-Chat model with its tokenizer and image processor. Its code makes mask and positions from the length
    of the cache and answers no padded batch, so prompts are asked one by one, and `generate` gives the prompt back in
    front of the answer.
    """

    view_class = InternVLChat

    def own_inputs(self, prompt: Prompt, image: Image.Image, folder: Path) -> dict[str, Any]:
        inputs = super().own_inputs(prompt, image, folder)
        del inputs["image_sizes"]
        return inputs

    def groups(self, encoded: list[list[Encoding]]) -> list[list[int]]:
        return [[row] for row in range(len(encoded))]

    def generate(self, ids: Tensor, mask: Tensor, encoded: list[list[Any]], prompts: list[Prompt]) -> Tensor:
        images = self.blank(encoded[0]) if encoded[0] else None
        output = self.model.generate(ids, images=images, attention_mask=mask, **self.generation(prompts[0]))
        answers: Tensor = output[:, ids.shape[1] :]
        return answers


def runner_of(view: QwenVLChat | CogVLM, tokenizer: transformers.PreTrainedTokenizerBase | None = None) -> RemoteRunner:
    return (QwenVLRunner if isinstance(view, QwenVLChat) else CogVLMRunner)(view, tokenizer)


def check(model: str, conversation: str | None, videos: bool, options: Mapping[str, str]) -> dict[str, Any]:
    made_by = read_json(Path(model) / "config.json", MEND, dict).get("architectures") or []
    if "LlavaLlamaForCausalLM" in made_by:
        return {"conversation": chosen_conversation(conversation)}
    if conversation in (None, OWN_PROMPTS):
        return {"conversation": OWN_PROMPTS}
    if "QWenLMHeadModel" in made_by:
        raise OptionError(f"conversation={conversation!r}: Qwen-VL has one prompt. Leave --conversation out")
    if conversation not in COGVLM_TEMPLATES:
        raise unknown_name("conversation", str(conversation), COGVLM_TEMPLATES)
    return {"conversation": conversation}


def load(path: str, loading: Loading, view: str, options: Mapping[str, str]) -> Runner:
    """A checkpoint with custom code, which the user trusts (checked before), and its tokenizer."""
    kind = load_place(view)
    if kind is InternVLChat:
        return _internvl_chat(path, loading)
    if loading.attention != "auto":
        raise OptionError(f"attention={loading.attention!r}: the code of {path} has its own kernel. Leave it out")
    remedy = (
        ". Its code is of 2023, written for transformers 4.31 to 4.37 (make setup-pinned); CogVLM's checkpoint needs "
        "the tokenizer files of lmsys/vicuna-7b-v1.5 beside it"
    )
    with loading_errors(path, remedy):
        tokenizer = load_pretrained(transformers.AutoTokenizer, path, loading.trust_remote_code)
        model = from_auto(transformers.AutoModelForCausalLM, path, loading)
    return runner_of(kind(model, options), tokenizer)


def _internvl_chat(path: str, loading: Loading) -> InternVLChatRunner:
    """An InternVL-Chat checkpoint by the loader of its package; the folder's name must contain `llava` or `intern`."""
    try:
        from llava.mm_utils import get_model_name_from_path
        from llava.model.builder import load_pretrained_model
        from llava.model.multimodal_encoder.clip_encoder import is_intern_vit_6b_model  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            "InternVL-Chat is run by a `llava` package of its own, which is not installed here. In an environment of "
            "its own, type: pip install 'llava @ git+https://github.com/OpenGVLab/InternVL#subdirectory="
            "internvl_chat_llava'"
        ) from error
    if loading.attention != "auto" or loading.device_map not in (None, "auto"):
        raise OptionError(
            f"{path}: the loader of InternVL's `llava` package takes no attention kernel, and no device map but auto. "
            "Leave them out"
        )
    bits: dict[str, Any] = {} if loading.bits is None else {f"load_{loading.bits}bit": True}
    name = get_model_name_from_path(path)
    model, tokenizer, processor = quietly_loaded(load_pretrained_model, path, name, device=loading.device, **bits)
    loading.cast(model)
    return InternVLChatRunner(model.eval(), tokenizer, processor)
