"""The sizes of a loaded LLaVA model that decide what a prompt costs (`account.py`), read from its configurations."""

import ast
import json
from pathlib import Path
from typing import Any

from torch import nn

from llava_consensus.reduction.method import Shape


def read_shape(model: Any, text: int = 0) -> Shape:
    """Sizes of the model, with a prompt of one picture of the most tiles and `text` other rows.

    Every block of the tower counts: official LLaVA runs them all and takes the output of one.
    """
    config, tower = model.config, model.get_vision_tower()
    vision = tower.vision_tower.config
    heads, layer = config.num_attention_heads, tower.select_layer
    projector = getattr(model.get_model(), "mm_projector", None)
    linear = (
        [module for module in projector.modules() if isinstance(module, nn.Linear)] if projector is not None else []
    )
    return Shape(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_width=getattr(config, "head_dim", None) or config.hidden_size // heads,
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        blocks=vision.num_hidden_layers,
        vision_width=vision.hidden_size,
        vision_heads=vision.num_attention_heads,
        vision_inner=vision.intermediate_size,
        patches=tower.num_patches,
        patch_values=getattr(vision, "num_channels", 3) * vision.patch_size**2,
        text=text,
        tiles=most_tiles(config, vision.image_size),
        projector=sum(module.in_features * module.out_features for module in linear),
        number_bytes=model.dtype.itemsize,
        feature_blocks=layer + vision.num_hidden_layers + 1 if layer < 0 else layer,
        **_text_side(Path(tower.vision_tower_name)),
    )


def _text_side(folder: Path) -> dict[str, Any]:
    """What CLIP's text tower costs, from a folder that holds a whole CLIP model; nothing, so ViT-L's, for others."""
    file = folder / "config.json"
    text = json.loads(file.read_text()).get("text_config") if file.is_file() else None
    if not text:
        return {}
    width, inner, length = (text[name] for name in ("hidden_size", "intermediate_size", "max_position_embeddings"))
    weights = text["num_hidden_layers"] * (4 * width**2 + 2 * width * inner)
    return {"joint": text["projection_dim"], "text_tower": 2.0 * length * weights}


def most_tiles(config: Any, image_size: int) -> int:
    """The most tiles a picture can have: the base view and the largest grid of `image_grid_pinpoints`; 1 without
    anyres.
    """
    points = getattr(config, "image_grid_pinpoints", None)
    if getattr(config, "image_aspect_ratio", None) != "anyres" or not points:
        return 1
    points = ast.literal_eval(points) if isinstance(points, str) else points
    return 1 + max((width // image_size) * (height // image_size) for width, height in points)
