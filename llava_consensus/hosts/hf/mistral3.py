"""`Mistral3ForConditionalGeneration` (Mistral Small 3.1 and later, Ministral 3), and Pixtral, which is a LLaVA in
transformers: a tower that reads pictures of any size one after the other in one row, and in Mistral 3 a merger that
makes one token of a square of patches. The processor puts a break after each row of tokens; breaks and the end are
words of the prompt here, which stay.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Offer, Tap, Tiles
from llava_consensus.hosts.hf.model import HfModel, joined, run_encoder
from llava_consensus.hosts.hf.rows import Features, PictureRows, whole_tiles
from llava_consensus.hosts.hf.towers import MERGER, PATCHES, cells
from llava_consensus.hosts.tower_hooks import TokenGrid, shrink, shrunk
from llava_consensus.hosts.towers import FRONTS, BlockParts, ClipBlocks, fingerprint, hidden_state_block, split_heads
from llava_consensus.reduction.merging import group_means
from llava_consensus.reduction.method import Place
from llava_consensus.reduction.saliency import rotate
from llava_consensus.reduction.tokens import Need


class PixtralTower:
    """The blocks of the tower; where the patches of a picture stand is known picture by picture.

    Args:
        inner: the model without its head.
        merged: patches of a token.
        most: the most tokens a picture can have.
        inside: where methods can act before the projector.
    """

    classes, side, offers, varies = 0, 0, PATCHES, True
    members: Tensor | None = None
    embeddings = None  # the host makes pictures smaller

    def __init__(self, inner: Any, merged: int, most: int, inside: Mapping[Place, str]) -> None:
        self.module, self.project = inner.vision_tower, inner.multi_modal_projector
        self.layer: int = inner.config.vision_feature_layer
        self.blocks: Sequence[Any] = list(self.module.transformer.layers)
        self.merged, self.tokens, self.inside = merged, most, inside
        self.feature_block = hidden_state_block(self.layer, len(self.blocks))
        self.kernel: str = getattr(self.module.config, "_attn_implementation", "eager")

    def of_picture(self, rows: int, columns: int) -> "PixtralTower":
        """A copy of this tower for pictures of `rows` x `columns` patches."""
        tower = copy.copy(self)
        tower.tokens, tower.side = rows * columns, columns
        return tower

    def encode(self, pixels: Tensor) -> Tensor:
        """A picture [1, 3, h, w] through tower and projector, where each patch is a token: [1, N, D]."""
        states = self.module(pixels, output_hidden_states=True, return_dict=True).hidden_states[self.layer]
        projected: Tensor = self.project(states)
        return projected

    def scale(self, block: int) -> float:
        """Scale of the attention logits of a block."""
        scale: float = self.blocks[block].attention.scaling
        return scale

    def parts(self, block: int) -> BlockParts:
        """The parts of a block."""
        one = self.blocks[block]
        return BlockParts(one.attention_norm, one.attention, one.ffn_norm, one.feed_forward)

    def key_tap(self, block: int) -> Tap:
        """Tap of the keys [1, H, t, d] of a block, before rotation."""
        attention = self.blocks[block].attention
        return Tap(attention.k_proj, lambda output: {"key": split_heads(output, attention.num_heads)})

    def angles(self, hidden: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, t, d] of the tokens [1, t, D_v] of a picture, given which of them each patch is in
        [1, N]: by the tower's own frequencies, at the mean row and column of a token's patches.
        """
        patch = torch.arange(self.tokens, device=hidden.device)
        grid = torch.stack((patch // self.side, patch % self.side), -1)[None].float()
        with torch.autocast(hidden.device.type, enabled=False):  # positions in half precision would be others
            means = group_means(grid, place, hidden.shape[1])[0]
        cos, sin = self.module.patch_positional_embedding(hidden, means)
        return cos[None], sin[None]

    def result(self, states: Tensor) -> Tensor:
        """States as a block returns them."""
        return states

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
    """Adapter for Mistral 3. Every picture is one tile."""

    offer = Offer(PATCHES, inside=MERGER)
    around = (0, 1)  # the end; breaks stand within

    @cached_property
    def tower(self) -> PixtralTower:
        """The vision side. OptionError for a tower of another kind, or features of several layers."""
        config = self.module.config
        kind, layer = config.vision_config.model_type, config.vision_feature_layer
        if kind != "pixtral" or not isinstance(layer, int):
            raise OptionError(
                f"vision tower {kind!r}, vision_feature_layer={layer}: adapted is Pixtral with features of one layer"
            )
        most = (config.vision_config.image_size // self._pixels) ** 2
        return PixtralTower(self.inner, self._side**2, most, self.offer.inside)

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

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[PictureRows]:
        """The rows of tokens of every picture."""
        sizes = (torch.as_tensor(inputs["image_sizes"]).cpu() // self._pixels).tolist()
        return [whole_tiles(1, height * width) for height, width in sizes]

    def encode(
        self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]
    ) -> Features:
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
            if Need.FINGERPRINT in attachment.needs:
                height, width = sizes[index]
                found["fingerprint"] = fingerprint(inputs["pixel_values"][index : index + 1, :, :height, :width])
            members = cells(*grids[index], side)
            tiles.append(Tiles(own[None], found, grids[index][1] // side, members))
        return Features(tiles, tokens)

    def smaller(self, attachment: Attachment, modality: str, inputs: dict[str, Any]) -> Features:
        """Smaller pictures through the model's own encoder."""
        sizes, pixels, new = torch.as_tensor(inputs["image_sizes"]).tolist(), inputs["pixel_values"].clone(), []
        small = shrunk(attachment, [TokenGrid(1, *(length // self._pixels for length in size)) for size in sizes])
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


class Pixtral(Mistral3):
    """Each patch is a token, so that methods can merge them inside the tower, picture by picture."""

    offer = Offer(PATCHES, inside=ClipBlocks.inside)

    def encode(
        self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]
    ) -> Features:
        """Encodes as Mistral 3 does; pictures that are merged go through tower and projector one by one."""
        if attachment.method.place is not Place.TOWER:
            return super().encode(attachment, modality, inputs, pictures)
        sizes, tiles = torch.as_tensor(inputs["image_sizes"]).tolist(), []
        for picture, (height, width) in zip(inputs["pixel_values"], sizes, strict=True):
            tower = self.tower.of_picture(height // self._pixels, width // self._pixels)
            (one,) = attachment.encode(picture[None, :, :height, :width], [1], tower)
            tiles.append(one._replace(side=tower.side))
        return Features(tiles, joined(one.projected for one in tiles))
