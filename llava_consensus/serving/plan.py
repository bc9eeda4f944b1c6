"""Number of tokens kept of a picture, known before it is encoded. The bookkeeping is that of the model's host: its view
of a model of this configuration that has no weights.
"""

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor

from llava_consensus.hosts import view_of
from llava_consensus.hosts.facts import text_side
from llava_consensus.hosts.hf.rows import PictureRows, kinds_of, whole_tiles
from llava_consensus.hosts.sequence import Layout, RowKinds, Sharing, read_layout
from llava_consensus.reduction.budget import Auto, Budget, Share
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import Need
from llava_consensus.serving.setting import Setting, of_config
from llava_consensus.serving.views import VIEWS

PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


class Plan:
    """The host's view of a model, and what its server is asked to do.

    Args:
        config: of the model, with a setting in it.
        folder: of its checkpoint, or a name.
    Raises:
        OptionError: for a method that the model cannot have.
    """

    def __init__(self, config: Any, folder: str) -> None:
        self.setting: Setting = of_config(config)
        self.method: Method = self.setting.made
        self.config, self.folder = config, folder

    @cached_property
    def view(self) -> Any:
        """View of a model without weights, whose language model is one layer: nothing of it is run."""
        config = copy.deepcopy(self.config)
        config.text_config.num_hidden_layers = 1
        if getattr(config.text_config, "layer_types", None):
            config.text_config.layer_types = config.text_config.layer_types[:1]
        if getattr(config.text_config, "num_kv_shared_layers", 0):
            config.text_config.num_kv_shared_layers = 0
        with torch.device("meta"):
            model = transformers.AutoModelForImageTextToText.from_config(config)
        own = VIEWS.get(config.model_type)
        return view_of(model, old=True) if own is None else own(model, {})

    @cached_property
    def clip_name(self) -> str:
        """The CLIP model by whose text tower the method reads the question; empty where it reads none so."""
        if Need.QUESTION not in self.method.needs:
            return ""
        return text_side(self.folder) or str(self.view.clip_name)

    def rows(self, modality: str, inputs: dict[str, Any]) -> list[PictureRows]:
        """The rows of every picture, given what the processor makes of them."""
        tiles = inputs.get(f"{modality}_num_patches")
        if tiles is not None:  # of one run of tiles
            return [whole_tiles(count, self.view.tower.tokens) for count in tiles.tolist()]
        return self.view.pictures(modality, inputs, None)

    def layout(self, kinds: RowKinds, budgets: Sequence[Budget | Share | Auto]) -> Layout:
        """Layout of pictures with these budgets: their rows, and the units to reduce."""
        sizes = self.view.tower.tokens, self.view.most_tiles
        return read_layout(kinds, Sharing(self.method, budgets[0], *sizes, budgets=tuple(budgets)))

    def left(self, modality: str, rows: PictureRows, budget: Budget | Share | Auto) -> int:
        """Rows that are left of a picture."""
        layout = self.layout(row_kinds([torch.zeros(len(rows.token), dtype=torch.long)], [rows], modality), [budget])
        gone = sum(len(unit.places) - unit.budget.tokens for unit in layout.reduced())
        return len(rows.token) - gone - sum(len(picture.leaving) for picture in layout.pictures)


def row_kinds(
    prompts: Sequence[Tensor], pictures: Sequence[PictureRows], modality: str, around: tuple[int, int] = (0, 0)
) -> RowKinds:
    """Kind of every row of these prompts, on the CPU: each prompt [S] holds the picture index of a row, or -1."""
    picture = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True, padding_value=-2)
    videos = range(len(pictures)) if modality == "video" else ()
    return kinds_of(picture > -2, picture.clamp_min(-1), pictures, videos, (around,) * len(pictures))
