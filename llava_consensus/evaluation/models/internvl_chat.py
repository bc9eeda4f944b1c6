"""InternVL-Chat of 2023, checked, loaded and asked: by its authors' `llava` package, its templates and `generate`.

The tower runs once for an image, however many questions are asked about it; prompts are answered one by one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from llava_consensus.errors import MissingDependency, OptionError
from llava_consensus.evaluation.models.base import Encoding, Prompt
from llava_consensus.evaluation.models.llava import CONVERSATION, LlavaRunner, chosen_conversation, quietly_loaded
from llava_consensus.evaluation.models.loading import Loading, incomplete_refused, refuse_not_finite
from llava_consensus.hosts.remote.internvl_chat import InternVLChat


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

    def groups(self, attachment: Any, encoded: list[list[Encoding]], ids: list[Tensor]) -> list[list[int]]:
        return [[row] for row in range(len(ids))]

    def _ask(self, pictures: list[Encoding], rows: list[Tensor], prompt: Prompt) -> list[str]:
        """Texts by the model's own `generate`."""
        ids, mask = self.pad(rows)
        images = self.blank(pictures) if pictures else None
        output = self.model.generate(ids, images=images, attention_mask=mask, **self.generation(prompt))
        return self.decode(output[:, ids.shape[1] :])


def check(model: str, conversation: str | None, videos: bool, options: Mapping[str, str]) -> dict[str, Any]:
    """Checks an InternVL-Chat checkpoint; finding the vision tower is left to its package. OptionError for a
    conversation template that the `llava` package does not have.
    """
    return {"conversation": chosen_conversation(conversation, CONVERSATION)}


def load(path: str, loading: Loading, view: str, options: Mapping[str, str]) -> InternVLChatRunner:
    """An InternVL-Chat checkpoint with its tokenizer and image processor, by the loader of its authors' package. The
    folder's name must contain `llava` or `intern` for it.

    Raises:
        OptionError: for loading options that the package's loader does not have.
        MissingDependency: where another `llava` package is installed than InternVL's.
        DataError: for a checkpoint that cannot be loaded, or whose weights are not those of its config.json.
    """
    try:
        from llava.model.multimodal_encoder import clip_encoder

        known = hasattr(clip_encoder, "is_intern_vit_6b_model")
    except ImportError:
        known = False
    if not known:
        raise MissingDependency(
            "InternVL-Chat is run by a `llava` package of its own, which is not installed here. In an environment of "
            "its own, type: pip install 'llava @ git+https://github.com/OpenGVLab/InternVL#subdirectory="
            "internvl_chat_llava'"
        )
    if loading.attention != "auto" or loading.device_map not in (None, "auto"):
        raise OptionError(
            f"{path}: the loader of InternVL's `llava` package takes no attention kernel, and no device map but auto. "
            "Leave them out"
        )
    from llava.mm_utils import get_model_name_from_path
    from llava.model.builder import load_pretrained_model

    bits: dict[str, Any] = {} if loading.bits is None else {f"load_{loading.bits}bit": True}
    with incomplete_refused():
        model, tokenizer, processor = quietly_loaded(
            load_pretrained_model, path, get_model_name_from_path(path), device=loading.device, **bits
        )
    loading.cast(model)
    refuse_not_finite(path, model)
    return InternVLChatRunner(model.eval(), tokenizer, processor)
