"""CogVLM-chat of 2023 and its v1.1 (`CogVLMForCausalLM`): an EVA2-CLIP tower with a class token, 1225 patches between
two learned rows, and a Vicuna in which the rows of a picture have weights of their own (visual experts).

Token types say which rows those are, and are reduced with them. All patches of a picture stand at one position, so
that no word moves when some of them leave. The two learned rows, begin and end of a picture, stay.

The checkpoint's own code could not be read here. Attribute paths were checked against published relatives of it: the
code of CogVLM2 (Niky-san/cogvlm2_surce at 7982d39), whose language side is that of this model but for its grouped keys,
a copy of CogAgent's, an adapted copy of `visual.py`, and the `util.py` of transformers' never merged port
(huggingface/transformers, src/transformers/models/cogvlm at 92657d1).
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import EXPERTS, Offer, Tap, Tiles
from llava_consensus.hosts.decoders import LlamaDecoder
from llava_consensus.hosts.remote import entrances
from llava_consensus.hosts.remote.entrances import RemoteModel, real_rows, rows_with
from llava_consensus.hosts.sequence import Assembled, Channel, RowKinds, Rule
from llava_consensus.hosts.towers import feature_taps, packed_taps, split_heads
from llava_consensus.reduction.tokens import Need

VISION = 1  # token type of the rows of a picture
ENDS = 2  # learned rows around its patches


class EvaTower:
    """The blocks of EVA2-CLIP, norms after attention and MLP, with a gated projector that takes each patch alone."""

    classes = 1
    members: Tensor | None = None
    offers = frozenset({Need.ATTENTION, Need.FEATURES, Need.CLASS_FEATURE, Need.PROJECTOR})

    def __init__(self, vision: Any, config: dict[str, Any]) -> None:
        self.vision, self.blocks = vision, list(vision.transformer.layers)
        self.feature_block = len(self.blocks) - 1
        self.side: int = config["image_size"] // config["patch_size"]
        self.tokens = self.side**2

    def encode(self, pixels: Tensor) -> Tensor:
        """Pictures through tower and projector, without the learned rows: [P, 3, h, w] -> [P, N, D]."""
        return self.vision(pixels)[:, 1:-1]

    def project(self, features: Tensor) -> Tensor:
        """The projector: [..., D_v] -> [..., D]."""
        return self.vision.linear_proj(features)

    def scale(self, block: int) -> float:
        """Scale of the attention logits of a block."""
        return float(self.blocks[block].attention.scale)

    def taps(self, needs: frozenset[Need], features: int, attention: int) -> list[Tap]:
        """The projection of one block, and the output of another."""
        attending = self.blocks[attention].attention
        taps = packed_taps(attending.query_key_value, attending.num_heads) if Need.ATTENTION in needs else []
        return taps + feature_taps(self.blocks[features], needs, self.classes)


class CogDecoder(LlamaDecoder):
    """The language model, whose rows are projected by the weights for words, or where `experts` [R, S] is not 0 by
    those for pictures.
    """

    cache_axis = 2

    def __init__(self, module: Any, experts: Tensor | None = None) -> None:
        super().__init__(module)
        self._experts = experts

    @property
    def kernel(self) -> str:
        """The model's own class computes attention by sdpa whatever the configuration says."""
        return "sdpa"

    def choosing(self, experts: Tensor) -> "CogDecoder":
        """The decoder for sequences with pictures."""
        return CogDecoder(self.module, experts)

    def query(self, layer: int, normed: Tensor) -> Tensor:
        """Queries of words before rotation: [R, L, D] -> [R, H, L, d]."""
        attention = self.layers[layer].self_attn
        return split_heads(attention.language_expert_query_key_value(normed).chunk(3, -1)[0], attention.num_heads)

    def key(self, layer: int, normed: Tensor) -> Tensor:
        """Keys before rotation: [R, S, D] -> [R, H, S, d]."""
        attention = self.layers[layer].self_attn
        key = attention.language_expert_query_key_value(normed).chunk(3, -1)[1]
        if self._experts is not None:
            visual = attention.vision_expert_query_key_value(normed).chunk(3, -1)[1]
            key = torch.where(self._experts.bool()[..., None], visual, key)
        return split_heads(key, attention.num_heads)

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, S, d] for positions [R, S]: the model's own module rotates and gives no angles."""
        frequencies = self.layers[0].self_attn.rotary_emb.inv_freq
        angles = positions[..., None].to(frequencies) * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


class CogVLM(RemoteModel):
    """A view of a `CogVLMForCausalLM`."""

    offer = Offer(EvaTower.offers)
    inlet = "model.encode_images"

    @cached_property
    def tower(self) -> EvaTower:
        """The vision side."""
        return EvaTower(self.module.model.vision, self.module.config.vision_config)

    @cached_property
    def decoder(self) -> CogDecoder:
        """The language side."""
        return CogDecoder(self.module.model)

    @staticmethod
    def give(attachment: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduced features in place of those of the pictures."""
        inner = attachment.here.module.model
        features = entrances.taken(attachment)
        return (plain or type(inner).encode_images.__get__(inner))(*args, **kwargs) if features is None else features

    def kinds(self, inputs: dict[str, Any]) -> RowKinds | None:
        """The rows of type 1 of every prompt are its picture; the first and the last of them are no candidates."""
        types, real = inputs.get("token_type_ids"), real_rows(inputs).cpu()
        if types is None or not (visual := (types.cpu() == VISION) & real).any():
            return None
        size, counts = self.tower.tokens, visual.sum(1, keepdim=True)
        if not bool(((counts == 0) | (counts == size + ENDS)).all()):
            raise OptionError(
                f"a picture of this model is {size + ENDS} rows of token type {VISION}: pass what its own "
                "build_conversation_input_ids gives, and truncate nothing"
            )
        token = visual.cumsum(1) - ENDS
        token = token.where(visual & (token >= 0) & (token < size), -1)
        picture = ((counts > 0).cumsum(0) - 1).expand_as(token).where(visual, -1)
        return RowKinds(real, picture, torch.where(token >= 0, 0, -1), token, entrances.answer_rows(inputs))

    def pixels(self, inputs: dict[str, Any]) -> Tensor:
        """One picture of every prompt that has some."""
        images = [image for row in inputs.get("images") or () for image in row]
        rows = int((inputs["token_type_ids"] == VISION).any(1).sum())
        if len(images) != rows:
            raise OptionError(f"{len(images)} images, and {rows} prompts have rows for one: pass one for each of them")
        return torch.stack(images)

    def assembled(self, inputs: dict[str, Any], kinds: RowKinds, tiles: list[Tiles]) -> Assembled:
        """Words, and patches between the two learned rows."""
        inner, types = self.module.model, inputs["token_type_ids"]
        projected = torch.cat([tile.projected for tile in tiles])
        ends = [row.to(projected).expand(len(projected), -1, -1) for row in (inner.vision.boi, inner.vision.eoi)]
        pictures = torch.cat((ends[0], projected, ends[1]), dim=1).flatten(0, 1)
        visual = types == VISION
        embeds = rows_with(kinds.picture >= 0, pictures, inner.embed_tokens(inputs["input_ids"]))
        experts = visual & torch.nn.functional.pad(visual, (0, 1))[:, 1:]  # the last row of a picture counts as a word
        channels = entrances.word_channels(inputs, self.module.config.pad_token_id or 0)
        channels["token_type_ids"] = Channel(types, 0, Rule.SOURCE)
        channels[EXPERTS] = Channel(experts.long(), 0, Rule.SOURCE)
        return Assembled(embeds, kinds.real.to(embeds.device), self._positions(inputs), channels)

    def _positions(self, inputs: dict[str, Any]) -> Tensor:
        """Positions [R, S] that were given, or by the model's own rule."""
        positions: Tensor | None = inputs.get("position_ids")
        if positions is None:
            words = {name: inputs.get(name) for name in ("input_ids", "token_type_ids", "attention_mask")}
            positions = self.module.prepare_inputs_for_generation(**words)["position_ids"]
        assert positions is not None
        return positions

    def features(self, out: Assembled) -> Tensor:
        """The rows of all pictures, as one: [1, rows, D]."""
        return out.embeds[(out.channels["token_type_ids"].values == VISION) & out.real][None]

    def arguments(self, inputs: dict[str, Any], out: Assembled) -> dict[str, Any]:
        """Types and positions of the rows that are left."""
        types = {"token_type_ids": out.channels["token_type_ids"].values, "position_ids": out.positions}
        return {**entrances.word_arguments(out), **types}
