"""A model of each family without weights, to ask what can be attached to it."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from llava_consensus.hosts.hf.checks import check_version
from llava_consensus.hosts.hf.host import view_of
from llava_consensus.hosts.hf.model import HfModel

SIDE, PATCH = 448, 14  # of pictures, in pixels: a grid that every family's shuffle or pooling divides


def view(architecture: str, family: str, options: Mapping[str, str]) -> HfModel:
    """A family's view of a model of its class, as its configuration has it where nobody says otherwise.

    Raises:
        OptionError: for a version of transformers that these hosts do not work with.
    """
    check_version(transformers.__version__)
    cls: Any = getattr(transformers, architecture)
    config = cls.config_class()
    if isinstance(getattr(config.vision_config, "image_size", None), int):
        config.vision_config.image_size, config.vision_config.patch_size = SIDE, PATCH
    with torch.device("meta"):
        return view_of(cls(config).eval(), family, options)
