"""Tiny models in memory with random weights, shared by the tests, and the smallest view of a bare tower or language
model that a method can be attached to.
"""

import json
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from hf_models import SQUARE, TEXT

from llava_consensus.hosts.images import Image
from llava_consensus.hosts.official import OfficialEntrance, Prepared
from llava_consensus.hosts.official_model import LlavaTower
from llava_consensus.hosts.outcomes import Report, unchanged
from llava_consensus.hosts.pinned import layers_of
from llava_consensus.hosts.prompts import prompt_of
from llava_consensus.hosts.taps import Reader
from llava_consensus.hosts.tower import READ, Tiles, argument_names
from llava_consensus.methods import METHODS, make
from llava_consensus.reduction.method import Place
from llava_consensus.reduction.tokens import Need, VisionAttention, VisualTokens

PATCHES = 16
IMAGE = 56
LENGTH = 24  # of the tiny text tower


def tiny_llava(tower: Path, family: str = "llama", seed: int = 0, **config: Any) -> Any:
    """A LLaVA of three layers with grouped-query attention and random weights, its tower loaded."""
    from llava.model.language_model import llava_llama, llava_mistral

    classes = {
        "llama": (llava_llama.LlavaConfig, llava_llama.LlavaLlamaForCausalLM),
        "mistral": (llava_mistral.LlavaMistralConfig, llava_mistral.LlavaMistralForCausalLM),
    }
    make_config, make_model = classes[family]
    shape = TEXT | dict(num_hidden_layers=3, eos_token_id=2, mm_vision_tower=str(tower), mm_hidden_size=32)
    shape |= dict(mm_projector_type="mlp2x_gelu", mm_vision_select_layer=-2, mm_vision_select_feature="patch")
    torch.manual_seed(seed)
    model = make_model(make_config(**{**shape, "image_aspect_ratio": "pad", "use_cache": True, **config}))
    for name, parameter in model.named_parameters():
        if (parameter.ndim > 1 or "newline" in name) and "vision_tower" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.get_vision_tower().load_model()
    return model.float().eval()


def write_tower(folder: Path) -> None:
    """A CLIP tower of four blocks, 4 x 4 patches and a class token, as LLaVA's loader wants it."""
    torch.manual_seed(0)
    tower = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SQUARE))
    for parameter in tower.parameters():  # larger than the default, so that saliencies differ
        torch.nn.init.normal_(parameter, std=0.3)
    tower.save_pretrained(folder)
    square = {"height": IMAGE, "width": IMAGE}
    transformers.CLIPImageProcessor(size={"shortest_edge": IMAGE}, crop_size=square).save_pretrained(folder)


def write_text_side(folder: Path) -> int:
    """CLIP's byte vocabulary without merges; its size."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(code) for code in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    special = {"bos_token": words[-2], "eos_token": words[-1], "unk_token": words[-1], "pad_token": words[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer", **special}))
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    return len(words)


def write_clip(folder: Path, vision: dict[str, Any]) -> Any:
    """A whole CLIP model with random weights, its tokenizer beside it."""
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    folder.mkdir(parents=True, exist_ok=True)
    words = write_text_side(folder)
    ends = dict(bos_token_id=words - 2, eos_token_id=words - 1, pad_token_id=words - 1)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, projection_dim=24)
    text = CLIPTextConfig(vocab_size=words, max_position_embeddings=LENGTH, **sizes, **ends)
    sight = CLIPVisionConfig(**{**vision, "projection_dim": 24})
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=sight.to_dict(), projection_dim=24)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model


def collected(tower: Any, method: Any, pixels: torch.Tensor) -> VisualTokens:
    """What a method is given of tiles [U, 3, h, w], each a unit of its own, by a bare CLIP tower."""
    view, count = LlavaTower(SimpleNamespace(vision_tower=tower)), tower.config.num_hidden_layers
    reader = Reader(method, count, count - 2) if method.needs & READ else None
    with nullcontext({}) if reader is None else reader.reading(view) as parts:
        projected = tower(pixels, output_hidden_states=True).hidden_states[-2][:, 1:]
    return as_units(projected, parts, 1.0 if reader is None else reader.scales(view)[0], method, lambda states: states)


def as_units(projected: torch.Tensor, parts: dict[str, Any], scale: float, method: Any, project: Any) -> VisualTokens:
    """Encoded tiles [U, N, D], each as a unit of its own."""
    count, size = projected.shape[:2]
    needs = {"features": Need.FEATURES, "class_feature": Need.CLASS_FEATURE}
    return VisualTokens(
        projected=projected,
        tile=torch.arange(count)[:, None].expand(-1, size),
        patch=torch.arange(size).expand(count, -1),
        attention=VisionAttention(parts["query"], parts["key"], scale, 1) if "query" in parts else None,
        project=project if Need.PROJECTOR in method.needs else None,
        **{name: parts[name] for name, need in needs.items() if need in method.needs},
    )


class BareLanguage(OfficialEntrance):
    """Cuts between the layers of a bare language model."""

    def __init__(self, owner: Any, model: Any, options: Any) -> None:
        self.start(owner, model)
        self.options, self.reader = options, None
        self.layers = layers_of(model.model, owner.method)
        self.inner = argument_names(type(model.model).forward)[1:]

    def replaced(self, model: Any) -> Iterator[Any]:
        model.model.mm_projector = None
        return iter(())

    def base(self) -> None:
        """There is no vision side."""

    def show(self, embeds: torch.Tensor, before: int, visual: int) -> None:
        """The next forward is of embeddings [1, S, D] in which an image of so many tokens is behind so many rows."""
        real = np.ones((1, embeds.shape[1]), dtype=bool)
        tokens = np.arange(visual)
        image = Image(0, before + tokens, np.zeros_like(tokens), tokens, 1, False, 0)
        ids, tiles = np.zeros(real.shape, dtype=np.int64), Tiles(1, visual, 0, {})
        config = self.model().config  # type: ignore[union-attr]
        prompt = prompt_of(ids, real, real, [image], [tiles], [{}], config)
        self.local.prepared = Prepared(weakref.ref(embeds), prompt, Report(unchanged([image])), None)


def runnable() -> list[str]:
    """The methods that run on official LLaVA here: not those that read a question by a text tower it has not, and on
    transformers 4, whose `generate` does not advance given positions, not those that keep positions in front of it.
    """
    advances = int(transformers.__version__.split(".")[0]) >= 5
    return [
        name
        for name, one in METHODS.items()
        if Need.QUESTION not in one.needs
        and one.place is not Place.CELLS
        and (advances or one.place is Place.DECODER or not one.reduces or make(name).positions == "renumber")
    ]
