"""CogVLM-chat of 2023 and its v1.1 (`CogVLMForCausalLM`): an EVA2-CLIP tower with a class token, 1225 patches between
two learned rows, and a Vicuna in which the rows of an image have separate weights (visual experts).

Token types say which rows those are, and are reduced with them. All patches of an image are at one position, so that no
word moves when some of them leave. The two learned rows, begin and end of an image, stay.

The checkpoint's own code could not be read here. Attribute paths were checked against published relatives of it: the
code of CogVLM2 (Niky-san/cogvlm2_surce at 7982d39), whose language side is that of this model but for its grouped keys,
a copy of CogAgent's, an adapted copy of `visual.py`, and the `util.py` of transformers' never merged port
(huggingface/transformers, src/transformers/models/cogvlm at 92657d1).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.images import STRUCTURAL, Image, one_image
from llava_consensus.hosts.kernels import KernelCall
from llava_consensus.hosts.remote.entrances import EncodedImage, RemoteModel, real_rows, rows_with
from llava_consensus.hosts.rows import Rows
from llava_consensus.hosts.taps import Tap, packed_tap, split_heads
from llava_consensus.hosts.units import visual_rows
from llava_consensus.reduction.saliency import rotate
from llava_consensus.reduction.tokens import Need

VISION = 1  # token type of the rows of an image
ENDS = 2  # learned rows around its patches


class CogVLM(RemoteModel):
    offers = frozenset({Need.ATTENTION, Need.FEATURES, Need.CLASS_FEATURE, Need.PROJECTOR})
    classes = 1

    @property
    def vision(self) -> Any:
        """EVA2-CLIP, norms after attention and MLP, with a gated projector that takes each patch by itself."""
        return self.module.model.vision

    @property
    def blocks(self) -> Any:
        return self.vision.transformer.layers

    @property
    def tokens(self) -> int:
        config = self.module.config.vision_config
        return int((config["image_size"] // config["patch_size"]) ** 2)

    def encode(self, pixels: Tensor) -> Tensor:
        return self.vision(pixels)[:, 1:-1]

    def project(self, features: Tensor) -> Tensor:
        return self.vision.linear_proj(features)

    def states(self, output: Any) -> dict[str, Tensor]:
        return {"features": output[:, 1:], "class_feature": output[:, 0]}

    def attention(self, block: int) -> tuple[list[Tap], float]:
        attention = self.blocks[block].attention
        return [packed_tap(attention.query_key_value, attention.num_heads)], float(attention.scale)

    def first_attention(self, embeds: Tensor, inputs: dict[str, Any], rotated: bool) -> KernelCall:
        """Queries and keys of the first layer, projected by the weights for words or for images."""
        layer, types = self.module.model.layers[0], inputs["token_type_ids"] == VISION
        attention, normed = layer.self_attn, layer.input_layernorm(embeds)
        # the last row of an image counts as a word
        experts = (types & torch.nn.functional.pad(types, (0, 1))[:, 1:])[..., None]
        parts = [
            torch.where(experts, visual, word)
            for visual, word in zip(
                attention.vision_expert_query_key_value(normed).chunk(3, -1)[:2],
                attention.language_expert_query_key_value(normed).chunk(3, -1)[:2],
                strict=True,
            )
        ]
        query, key = (split_heads(part, attention.num_heads) for part in parts)
        if rotated:
            frequencies = attention.rotary_emb.inv_freq  # the model's own module rotates and gives no angles
            angles = self._positions(inputs)[..., None].to(frequencies) * frequencies
            angles = torch.cat((angles, angles), dim=-1)
            cos, sin = angles.cos().to(embeds.dtype), angles.sin().to(embeds.dtype)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        return KernelCall(attention, query, key, key, None, {}, None)

    def images(self, inputs: dict[str, Any]) -> list[Image]:
        """The rows of type 1 of every prompt are its image; the first and the last of them are no candidates."""
        types, size = inputs.get("token_type_ids"), self.tokens
        if types is None:
            return []
        visual = (types.cpu().numpy() == VISION) & real_rows(inputs)
        counts = visual.sum(1)
        if not ((counts == 0) | (counts == size + ENDS)).all():
            raise OptionError(
                f"an image of this model is {size + ENDS} rows of token type {VISION}: pass what its own "
                "build_conversation_input_ids gives, and truncate nothing"
            )
        token = np.concatenate(([STRUCTURAL], np.arange(size), [STRUCTURAL]))
        return [one_image(row, np.flatnonzero(visual[row]), token) for row in np.flatnonzero(counts).tolist()]

    def pixels(self, inputs: dict[str, Any]) -> Tensor:
        images = [image for row in inputs.get("images") or () for image in row]
        rows = int((inputs["token_type_ids"] == VISION).any(1).sum())
        if len(images) != rows:
            raise OptionError(f"{len(images)} images, and {rows} prompts have rows for one: pass one for each of them")
        return torch.stack(images)

    def assembled(self, inputs: dict[str, Any], images: list[Image], encoded: list[EncodedImage]) -> Tensor:
        projected, ids = torch.cat([one.projected for one in encoded]), inputs["input_ids"]
        ends = [row.to(projected).expand(len(projected), -1, -1) for row in (self.vision.boi, self.vision.eoi)]
        values = torch.cat((ends[0], projected, ends[1]), dim=1).flatten(0, 1)
        return rows_with(visual_rows(images, ids.shape), values, self.module.model.embed_tokens(ids))

    def _positions(self, inputs: dict[str, Any]) -> Tensor:
        """Positions [R, S] that were given, or by the model's own rule."""
        positions: Tensor | None = inputs.get("position_ids")
        if positions is None:
            words = {name: inputs.get(name) for name in ("input_ids", "token_type_ids", "attention_mask")}
            positions = self.module.prepare_inputs_for_generation(**words)["position_ids"]
        assert positions is not None
        return positions

    def arguments(self, inputs: dict[str, Any], rows: Rows | None) -> dict[str, Any]:
        given = {"input_ids": inputs["input_ids"], "token_type_ids": inputs["token_type_ids"]}
        given["position_ids"] = self._positions(inputs)
        if rows is None:
            return given
        pad = {"input_ids": self.module.config.pad_token_id or 0}
        return {
            name: value.gather(1, rows.index).masked_fill(~rows.shown, pad.get(name, 0))
            for name, value in given.items()
        }

    def features(self, embeds: Tensor, arguments: dict[str, Any], real: Tensor) -> Tensor:
        """The rows of all images, as one: [1, rows, D]."""
        return embeds[(arguments["token_type_ids"] == VISION) & real][None]

    def install(self, give: Callable[..., Any]) -> list[Any]:
        return [_Inlet(self.module.model, give)]


class _Inlet:
    """A function in the place of `encode_images`, which is not run if features are given."""

    def __init__(self, inner: Any, give: Callable[..., Any]) -> None:
        self.inner, self.give = inner, give
        inner.encode_images = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        features = self.give(None)
        return type(self.inner).encode_images(self.inner, *args, **kwargs) if features is None else features

    def remove(self) -> None:
        vars(self.inner).pop("encode_images", None)
