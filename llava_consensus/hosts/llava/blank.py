"""A LLaVA model without weights, to ask what can be attached to it."""

import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from llava_consensus.errors import MissingDependency
from llava_consensus.hosts.llava.adapter import LlavaModel


class Blank(LlavaModel):
    """A view of a model without weights. LLaVA's towers are of whole CLIP models, so that there is a text side."""

    def clip_text(self) -> Any:
        """None: there are no weights to compare anything with."""
        return None


def view(architecture: str, family: str, options: Mapping[str, str]) -> LlavaModel:
    """LLaVA 1.5 with a CLIP tower.

    Raises:
        MissingDependency: where the `llava` package is not installed.
    """
    try:
        from llava.model.language_model.llava_llama import LlavaConfig, LlavaLlamaForCausalLM
    except ImportError as error:
        raise MissingDependency(f"official LLaVA: {error}") from error
    with tempfile.TemporaryDirectory() as tower, torch.device("meta"):
        vision = transformers.CLIPVisionConfig()
        vision.save_pretrained(tower)
        model = LlavaLlamaForCausalLM(
            LlavaConfig(mm_vision_tower=tower, mm_hidden_size=vision.hidden_size, mm_vision_select_layer=-2)
        )
        holder: Any = model.get_vision_tower()
        holder.vision_tower, holder.is_loaded = transformers.CLIPVisionModel(vision), True
    return Blank(model)
