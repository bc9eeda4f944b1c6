"""Tiny models in memory with random weights, shared by the tests, and the smallest view of a bare tower or language
model that a method can be attached to.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from llava_consensus.hosts.decoders import LlamaDecoder
from llava_consensus.hosts.old_attachment import Attachment
from llava_consensus.hosts.sequence import RowKinds
from llava_consensus.hosts.towers import ClipBlocks, blocks_read, hidden_state_block
from llava_consensus.methods import METHODS, make
from llava_consensus.reduction.budget import Budget
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
    shape = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    special = dict(
        max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False
    )
    vision = dict(
        mm_vision_tower=str(tower), mm_hidden_size=32, mm_projector_type="mlp2x_gelu", mm_vision_select_layer=-2
    )
    choices = dict(mm_vision_select_feature="patch", image_aspect_ratio="pad", use_cache=True)
    torch.manual_seed(seed)
    model = make_model(make_config(**{**shape, **special, **vision, **choices, **config}))
    for name, parameter in model.named_parameters():
        if (parameter.ndim > 1 or "newline" in name) and "vision_tower" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.get_vision_tower().load_model()
    return model.float().eval()


def write_tower(folder: Path) -> None:
    """A CLIP tower of four blocks, 4 x 4 patches and a class token, as LLaVA's loader wants it."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
    config = transformers.CLIPVisionConfig(**sizes, image_size=IMAGE, patch_size=14)
    tower = transformers.CLIPVisionModel(config)
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


class BareTower(ClipBlocks):
    """A CLIP tower of `side` x `side` patches without a projector."""

    def __init__(self, clip: Any, side: int) -> None:
        super().__init__(clip, hidden_state_block(-2, clip.config.num_hidden_layers))
        self.tokens, self.side = side * side, side

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        states = self.module(pixels, output_hidden_states=True).hidden_states
        return states[self.feature_block + 1][:, 1:]

    def project(self, features: torch.Tensor) -> torch.Tensor:
        return features


class BareModel:
    """A CLIP tower, or a language model with a head, as an attachment sees it."""

    most_tiles = 1

    def __init__(self, module: Any, side: int = 0) -> None:
        self.module = module
        self.tower = BareTower(module, side) if side else None

    @property
    def decoder(self) -> LlamaDecoder:
        return LlamaDecoder(self.module.model)

    def of(self, module: Any) -> "BareModel":
        return self

    def clip_text(self) -> Any:
        raise NotImplementedError

    def check(self, method: Any) -> None:
        """Any method will do."""

    def entrances(self, attachment: Attachment) -> dict[str, Any]:
        return {}


def collected(tower: Any, method: Any, pixels: torch.Tensor) -> VisualTokens:
    """What a method is given of tiles [U, 3, h, w], each a unit of its own, by a tower's own hooks."""
    model = BareModel(tower, side=pixels.shape[-1] // tower.config.patch_size)
    with Attachment(model, method, Budget(1)) as attached:
        (found,) = attached.encode(pixels, [len(pixels)])
    return as_units(model.tower, method, found)


def as_units(tower: Any, method: Any, found: Any) -> VisualTokens:
    """Encoded tiles, each as a unit of its own."""
    count, size = found.projected.shape[:2]
    parts = dict(found.parts)
    query, key = parts.pop("query", None), parts.pop("key", None)
    block = blocks_read(tower, method)[1]
    return VisualTokens(
        projected=found.projected,
        tile=torch.arange(count)[:, None].expand(-1, size),
        patch=torch.arange(size).expand(count, -1),
        attention=None if query is None else VisionAttention(query, key, tower.scale(block), tower.classes),
        project=tower.project if Need.PROJECTOR in method.needs else None,
        **parts,
    )


def one_picture(before: int, visual: int, after: int) -> RowKinds:
    """A sequence of text, one picture of so many tokens, and text."""
    rows = torch.full((1, before + visual + after), -1)
    picture, token = rows.clone(), rows.clone()
    picture[0, before : before + visual], token[0, before : before + visual] = 0, torch.arange(visual)
    return RowKinds(rows < 0, picture, picture.clone(), token)


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
