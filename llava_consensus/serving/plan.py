"""What a server knows of an image before it is encoded, from the model's configuration, by `hosts.facts`."""

import copy
from collections.abc import Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers

from llava_consensus.hosts.facts import Facts, text_side
from llava_consensus.hosts.images import Image, decoder_of
from llava_consensus.hosts.inputs import needs_of, structural_rows
from llava_consensus.hosts.tower import EARLIER, Learnt, Tiles, Tower
from llava_consensus.hosts.units import units_of
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import Need
from llava_consensus.serving.setting import Setting, of_config

PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


class Plan:
    """A model's configuration with a setting in it. OptionError for a method that the model cannot have."""

    def __init__(self, config: Any, folder: str) -> None:
        self.setting: Setting = of_config(config)
        self.method: Method = self.setting.made
        self.config, self.folder = config, folder

    @cached_property
    def facts(self) -> Facts:
        """Facts of a model without weights, whose language model has one layer, see `engine.first_layer`."""
        config = copy.deepcopy(self.config)
        text = config.text_config
        kinds = getattr(text, "layer_types", None)
        changes: dict[str, Any] = {"num_hidden_layers": 1, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
        if kinds:
            attention = (kind for kind in kinds if "attention" in kind and "linear" not in kind)
            changes["layer_types"] = [next(attention, kinds[0])]
        for name, value in changes.items():
            if hasattr(text, name):
                setattr(text, name, value)
        with torch.device("meta"):
            return Facts(transformers.AutoModelForImageTextToText.from_config(config), {})

    @cached_property
    def clip_name(self) -> str:
        """The CLIP model by whose text tower the method reads the question; empty if it reads none so."""
        if Need.QUESTION not in self.method.needs:
            return ""
        return text_side(self.folder) or self.facts.clip_name

    @cached_property
    def tower(self) -> Tower:
        """The vision side in transformers, which names the blocks that the method reads."""
        facts = self.facts
        return Tower(facts.inner, decoder_of(facts.module), self.method, Learnt({}, {}, {}))

    @cached_property
    def needs(self) -> frozenset[Need]:
        """Parts that the method reads. OptionError for one that this tower does not have."""
        tower, ahead = self.facts.tower, self.method.blocks_ahead
        count, short = len(tower.blocks), ""
        if ahead and (self._features + ahead >= count or not tower.classes):
            short = (
                f"this method reads the attention of the block after the features' own, which is the last of {count}: "
                f"give vision_layer={count - 1 - ahead}, or use a model with mm_vision_select_layer=-2"
            )
        parts: Any = {"key": None} if Need.ATTENTION in tower.offers else {}
        read = SimpleNamespace(tiles=[Tiles(1, 1, 0, parts, classes=tower.classes)])
        return needs_of(read, self.method, self.facts.module, Need.PROJECTOR in tower.offers, short)  # type: ignore[arg-type]

    @property
    def _features(self) -> int:
        fed = self.facts.tower.feature_block
        return self.tower.features_block((self._blocks, fed))[1] if self.tower.lists else fed

    @property
    def _blocks(self) -> str:
        """Name of the list of blocks of the tower in transformers."""
        lists = self.tower.lists
        return max(lists, key=lambda name: lists[name])

    def blocks(self) -> tuple[int, dict[str, int]]:
        """The block whose output is read, and by the prefix of their parts those whose attention is read."""
        blocks = {}
        if Need.ATTENTION in self.needs:
            blocks[""] = self._features + (self.method.blocks_ahead if self.needs == self.method.needs else 0)
        if Need.EARLIER in self.needs:
            blocks[EARLIER] = self.tower.early_block(self._blocks)[1]
        return self._features, blocks

    def image(self, modality: str, inputs: Mapping[str, Any], count: int) -> Image:
        """The rows of one image, given its processed form and the number of its tokens."""
        ids = np.full((1, count), self.facts.placeholder(modality))
        (image,) = self.facts.images(modality, dict(inputs), ids)
        return image

    def left(self, image: Image, budget: Budget | Share) -> int:
        """Tokens that are left of an image, newlines among them."""
        units = units_of([image], [budget], self.method, self.facts.most_tiles)
        gone = sum(len(unit.places) - unit.budget.tokens for unit in units)
        return len(image.places) - gone - (structural_rows(image) if units and self.drops(image) else 0)

    def drops(self, image: Image) -> bool:
        return self.method.newlines == "drop" and not image.video
