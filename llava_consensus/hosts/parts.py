"""The parts of a model of transformers, and what it is asked about itself."""

from typing import Any

import torch

from llava_consensus.hosts.next_grid import check_tiles, fixed_grid

MODALITIES = ("image", "video")


def base_of(model: Any) -> Any:
    """The module of a model that encodes images; None if there is none."""
    return next((part for part in (getattr(model, "model", None), model) if hasattr(part, "get_image_features")), None)


def decoder_of(model: Any) -> Any:
    """The module of a model that runs the decoder layers; None if there is none."""
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    return decoder.model if hasattr(decoder, "lm_head") else decoder  # Llama 4 has a whole language model inside


def packed_whole(pack: Any, base: Any, *args: Any, image_newline: Any = None, **more: Any) -> Any:
    """LLaVA-NeXT's packing without newlines."""
    return pack(base, *args, image_newline=None, **more)


def on_grid(config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of LLaVA-NeXT's encoder as if each image filled the fixed grid, so that nothing of it is cut away."""
    check_tiles(len(tiles) for tiles in inputs["pixel_values"])
    size = fixed_grid(config.vision_config.image_size)
    return {**inputs, "image_sizes": torch.tensor(size).expand(len(inputs["pixel_values"]), 2)}


def is_static(cache: Any) -> bool:
    return bool(getattr(cache, "is_compileable", False))


def runs_again(decoder: Any) -> bool:
    """Whether layers run again in the backward pass."""
    return bool(decoder.training and torch.is_grad_enabled() and getattr(decoder, "gradient_checkpointing", False))


def most_tiles(model: Any) -> int:
    """The most tiles an image of this model can have, for `tile_budget=most_tiles`."""
    pins, vision = getattr(model.config, "image_grid_pinpoints", None), getattr(model.config, "vision_config", None)
    if pins and vision is not None:
        size = vision.image_size
        return 1 + max((height // size) * (width // size) for height, width in pins)
    return 1
