"""InternVL-Chat as the harness uses it: official LLaVA's harness, prompt by prompt."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from llava_consensus.hosts.base import Prompt
from llava_consensus.hosts.remote.internvl_chat.adapter import InternVLChat
from llava_consensus.hosts.remote.older_llava import OlderLlavaHost
from llava_consensus.reduction.method import Shape


class InternVLChatHost(OlderLlavaHost):
    """An InternVL-Chat model with its tokenizer and image processor."""

    view_class = InternVLChat

    def shape(self, text: int = 0) -> Shape:
        """Sizes of the model, with a prompt of one picture and `text` other rows."""
        return super().shape(text)._replace(patches=self.visual_tokens, tiles=1)

    def own_inputs(self, prompt: Prompt, image: Image.Image, folder: Path) -> dict[str, Any]:
        """What the model's own `generate` is given for one prompt about a picture."""
        inputs = super().own_inputs(prompt, image, folder)
        del inputs["image_sizes"]
        return inputs


def wrap(model: Any, options: Mapping[str, str] | None = None) -> InternVLChatHost:
    """The host of a model that is loaded already; it has no options."""
    return InternVLChatHost(model)
