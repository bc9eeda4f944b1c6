"""`Mistral3ForConditionalGeneration` (Mistral Small 3.1 and later, Ministral 3), and Pixtral, which is a LLaVA in
transformers: a tower that reads pictures of any size one after the other in one row, and in Mistral 3 a merger that
makes one token of a square of patches. The processor puts a break after each row of tokens; breaks and the end are
words of the prompt here, which stay.
"""

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Offer, Tap, Tiles
from llava_consensus.hosts.hf.model import PATCHES, Features, HfModel, cells, joined, run_encoder
from llava_consensus.hosts.hf.seam import Rows, whole_tiles
from llava_consensus.hosts.inside import Grid, shrink, shrunk
from llava_consensus.hosts.towers import FRONTS, fingerprint, hidden_state_block
from llava_consensus.reduction.method import Place
from llava_consensus.reduction.saliency import rotate
from llava_consensus.reduction.tokens import Need


class PixtralTower:
    """The blocks of the tower; where the patches of a picture stand is known picture by picture.

    Args:
        module: the vision tower.
        layer: `vision_feature_layer`.
        merged: patches of a token.
        most: the most tokens a picture can have.
    """

    classes, side, offers, varies = 0, 0, PATCHES, True
    members: Tensor | None = None
    inside = MappingProxyType(
        {
            Place.PICTURE: "",
            Place.TOWER: "merges patches inside the tower, whose blocks rotate by the row and column of a patch, and "
            "none is known for a merged one",
        }
    )

    def __init__(self, module: Any, layer: int, merged: int, most: int) -> None:
        self.module, self.blocks = module, list(module.transformer.layers)
        self.feature_block, self.merged, self.tokens = hidden_state_block(layer, len(self.blocks)), merged, most

    def encode(self, pixels: Tensor) -> Tensor:
        """Never asked for: the model's own encoder runs, and hooks collect."""
        raise NotImplementedError

    def project(self, features: Tensor) -> Tensor:
        """Not offered: the merger takes several patches at a time."""
        raise NotImplementedError

    def scale(self, block: int) -> float:
        """What the products of queries and keys of a block are multiplied with."""
        scale: float = self.blocks[block].attention.scaling
        return scale

    def taps(self, needs: frozenset[Need], features: int, attention: int) -> list[Tap]:
        """Projections of one block, the rotation, and the output of another block: a row for each patch."""
        attending, taps = self.blocks[attention].attention, []
        if Need.ATTENTION in needs:
            taps.append(Tap(attending.q_proj, lambda output: {"query": output[0]}))
            taps.append(Tap(attending.k_proj, lambda output: {"key": output[0]}))
            rotary = self.module.patch_positional_embedding
            taps.append(Tap(rotary, lambda output: dict(zip(("cos", "sin"), output, strict=True))))
        if Need.FEATURES in needs:
            taps.append(Tap(self.blocks[features], lambda output: {"features": output[0]}))
        return taps


class Mistral3(HfModel):
    """Every picture is one tile."""

    offer = Offer(PATCHES, inside=PixtralTower.inside)

    @property
    def tower(self) -> PixtralTower:
        """The vision side. OptionError for a tower of another kind, or features of several layers."""
        config = self.module.config
        kind, layer = config.vision_config.model_type, config.vision_feature_layer
        if kind != "pixtral" or not isinstance(layer, int):
            raise OptionError(
                f"vision tower {kind!r}, vision_feature_layer={layer}: adapted is Pixtral with features of one layer"
            )
        most = (config.vision_config.image_size // self._pixels) ** 2
        return PixtralTower(self.inner.vision_tower, layer, self._side**2, most)

    @property
    def _side(self) -> int:
        """Patches in a row of the square that makes a token."""
        side: int = getattr(self.module.config, "spatial_merge_size", 1)
        return side

    @property
    def _pixels(self) -> int:
        """Height and width of a token in pixels."""
        pixels: int = self.module.config.vision_config.patch_size * self._side
        return pixels

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[Rows]:
        """The rows of tokens of every picture."""
        sizes = (torch.as_tensor(inputs["image_sizes"]).cpu() // self._pixels).tolist()
        return [whole_tiles(1, height * width) for height, width in sizes]

    def encode(self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[Rows]) -> Features:
        """The model's own encoder; queries and keys rotated, and split by picture."""
        if attachment.method.place is Place.PICTURE:
            return self.smaller(attachment, modality, inputs)
        output, parts = run_encoder(self, attachment, modality, inputs)
        sizes = torch.as_tensor(inputs["image_sizes"]).tolist()
        heads = self.module.config.vision_config.num_attention_heads
        for front in FRONTS:
            cos, sin = parts.pop(front + "cos", None), parts.pop(front + "sin", None)
            for name in (front + "query", front + "key") if cos is not None and sin is not None else ():
                states = parts[name].unflatten(-1, (heads, -1)).transpose(0, 1)[None]  # [1, H, rows, d]
                turned = rotate(states.float(), cos.float()[None], sin.float()[None])
                parts[name] = turned.to(states.dtype)[0].transpose(0, 1)
        patch, side = self.module.config.vision_config.patch_size, self._side
        grids = [(height // patch, width // patch) for height, width in sizes]
        split = {name: values.split([height * width for height, width in grids]) for name, values in parts.items()}
        tokens = joined(output.pooler_output)
        tiles = []
        for index, own in enumerate(tokens.detach().split([len(rows.token) for rows in pictures])):
            found = {name: values[index][None] for name, values in split.items()}
            found |= {name: one.transpose(1, 2) for name, one in found.items() if name.endswith(("query", "key"))}
            if Need.FINGERPRINT in attachment.method.needs:
                height, width = sizes[index]
                found["fingerprint"] = fingerprint(inputs["pixel_values"][index : index + 1, :, :height, :width])
            members = cells(*grids[index], side)
            tiles.append(Tiles(own[None], found, grids[index][1] // side, members))
        return Features(tiles, tokens)

    def smaller(self, attachment: Attachment, modality: str, inputs: dict[str, Any]) -> Features:
        """Smaller pictures through the model's own encoder."""
        sizes, pixels, new = torch.as_tensor(inputs["image_sizes"]).tolist(), inputs["pixel_values"].clone(), []
        small = shrunk(attachment, [Grid(1, *(length // self._pixels for length in size)) for size in sizes])
        for picture, (height, width), grid, (less,) in zip(pixels, sizes, small.grids, small.small, strict=True):
            new.append([height, width] if less == grid[1:] else [self._pixels * length for length in less])
            if new[-1] != [height, width]:
                resized = shrink(picture[None, :, :height, :width], *new[-1])[0].to(picture.dtype)
                picture[:, : new[-1][0], : new[-1][1]] = resized
        inputs = {**inputs, "pixel_values": pixels, "image_sizes": torch.tensor(new)}
        output, _ = run_encoder(self, attachment, modality, inputs)
        tokens = joined(output.pooler_output)
        tiles, index = small.tiles(tokens)
        return Features(tiles, tokens[index])
