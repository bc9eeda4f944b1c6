"""Vision towers: hooks that read the inputs of a method and change nothing (the tower keeps its attention kernel; no
attention map is ever asked for), CLIP towers under every attribute path of transformers, and skipping of blocks whose
output is not read.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Tap, Tiles, Tower
from llava_consensus.hosts.clip import without_unused_report
from llava_consensus.hosts.pretrained import load_pretrained
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import ClipSides, Need

EARLIER = "earlier "  # in front of the names of parts that an earlier block gave
# whatever the tower is
GIVEN = frozenset({Need.PROBE, Need.FINGERPRINT, Need.QUESTION, Need.WORDS, Need.WHOLE_PICTURES})


def needs_of(tower: Tower, method: Method) -> frozenset[Need]:
    """Parts that a method reads on a tower: its `needs`; or its `instead`, if it has one, where the tower does not give
    all of them, or has no class token and ends before the block whose attention is read.
    """
    long = tower.feature_block + method.blocks_ahead < len(tower.blocks) or Need.CLASS_FEATURE in tower.offers
    given = long and not method.needs - offered(tower)
    return method.needs if given or method.instead is None else method.instead


def lacking(tower: Tower, method: Method) -> str:
    """Parts that a method reads and the tower does not give, as text; empty if none is missing."""
    return ", ".join(sorted(need.name.lower() for need in needs_of(tower, method) - offered(tower)))


def offered(tower: Tower) -> frozenset[Need]:
    """Parts that a host can give on a tower. The attention of an earlier block is available wherever attention is."""
    return tower.offers | GIVEN | ({Need.EARLIER} if Need.ATTENTION in tower.offers else frozenset())


def blocks_read(tower: Tower, method: Method) -> tuple[int, int]:
    """The vision block whose output a method reads (the one that feeds the projector, or the one its option names), and
    the block whose attention it reads.

    Raises:
        OptionError: for an index the tower does not have, or a tower that ends before the second.
    """
    option, count, features = method.vision_layer, len(tower.blocks), tower.feature_block
    if option is not None:
        if not -count <= option < count:
            raise OptionError(f"vision_layer={option} must be in {-count}..{count - 1}: the tower has {count} blocks")
        features = option % count
    attention = features + (method.blocks_ahead if needs_of(tower, method) == method.needs else 0)
    if attention >= count:
        raise OptionError(
            f"this method reads the attention of the block after the features' own, which is the last of {count}: "
            f"give vision_layer={count - 1 - method.blocks_ahead}, or use a model with mm_vision_select_layer=-2"
        )
    return features, attention


def earlier_block(tower: Tower, method: Method) -> int:
    """The vision block whose attention a method reads as EARLIER.

    Raises:
        OptionError: for an index the tower does not have.
    """
    option, count = method.early_layer, len(tower.blocks)
    if option is None:
        place = round(method.early * count) - 1
        return min(getattr(tower, "full", range(count)), key=lambda block: (abs(block - place), -block))
    if not -count <= option < count:
        raise OptionError(f"early_layer={option} must be in {-count}..{count - 1}: the tower has {count} blocks")
    return option % count


def attention_blocks(tower: Tower, method: Method) -> dict[str, int]:
    """The vision blocks whose attention a method reads, by what stands in front of the names of their parts."""
    needs, blocks = needs_of(tower, method), {}
    if Need.ATTENTION in needs:
        blocks[""] = blocks_read(tower, method)[1]
    if Need.EARLIER in needs:
        blocks[EARLIER] = earlier_block(tower, method)
    return blocks


def taps_read(tower: Tower, method: Method) -> list[Tap]:
    """Taps of the parts that a method reads of a tower; those of an earlier block have names of their own."""
    needs = needs_of(tower, method)
    taps = tower.taps(needs, *blocks_read(tower, method))
    if Need.EARLIER in needs:
        block = earlier_block(tower, method)
        attention = tower.taps(frozenset({Need.ATTENTION}), block, block)
        taps += [Tap(tap.module, partial(_earlier, tap)) for tap in attention]
    return taps


def _earlier(tap: Tap, output: Any) -> dict[str, Tensor]:
    """The values of a tap under the names of the earlier block."""
    return {EARLIER + name: value for name, value in tap.read(output).items()}


def split_heads(states: Tensor, heads: int) -> Tensor:
    """[T, n, H d] -> [T, H, n, d]."""
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


def fingerprint(values: Tensor) -> Tensor:
    """A number for each row of a tensor [T, ...], from its bits: int64 [T], the same in every batch and on every
    device.
    """
    if values.is_floating_point():
        values = values.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    flat = values.flatten(1).long()
    weight = torch.arange(flat.shape[1], device=flat.device) * 0x9E3779B97F4A7C1 | 1
    return (flat * weight).sum(1)  # int64 arithmetic wraps


OLD = int(transformers.__version__.split(".")[0]) < 5  # official LLaVA's own pin


class BlockParts(NamedTuple):
    """The parts of one vision block, for methods that merge between its attention and its MLP."""

    before_attention: nn.Module
    attention: nn.Module
    before_mlp: nn.Module
    mlp: nn.Module


class ClipBlocks:
    """Blocks, embeddings and attention of a CLIP vision model.

    Args:
        module: `CLIPVisionModel`, of transformers 4.37 or 5.
        feature_block: index of the block whose output feeds the projector.
    """

    classes = 1
    class_is_token = False  # whether the class token is a token, the first one, whose features are read too
    resizes_by: int | None = None  # pixels in a row of a patch, where the embeddings take pictures of any size
    members: Tensor | None = None
    offers = frozenset({Need.ATTENTION, Need.FEATURES, Need.CLASS_FEATURE, Need.PROJECTOR})
    # where methods can act before the projector; where one cannot, why, in the words of `check_inside`
    inside: Mapping[Place, str] = MappingProxyType({Place.PICTURE: "", Place.TOWER: ""})

    def __init__(self, module: Any, feature_block: int) -> None:
        self.module, self.feature_block = module, feature_block
        inner = getattr(module, "vision_model", module)
        self.blocks: Sequence[Any] = list(inner.encoder.layers)
        self.last_norm = inner.post_layernorm
        self.embeddings, self.kernel = inner.embeddings, getattr(module.config, "_attn_implementation", "eager")

    def attention(self, block: int) -> tuple[Any, int, float]:
        """The attention module of a block, with `q_proj` and `k_proj`; its heads, and the scale of its products."""
        module: Any = self.blocks[block]
        return module.self_attn, module.self_attn.num_heads, module.self_attn.scale

    def scale(self, block: int) -> float:
        """Scale of the attention logits of a block."""
        return self.attention(block)[2]

    def taps(self, needs: frozenset[Need], features: int, attention: int) -> list[Tap]:
        """Projections of queries and keys of one block, and the output of another."""
        taps = []
        if Need.ATTENTION in needs:
            module, heads, _ = self.attention(attention)
            taps.append(Tap(module.q_proj, lambda output: {"query": split_heads(output, heads)}))
            taps.append(self.key_tap(attention))
        return taps + feature_taps(self.blocks[features], needs, 0 if self.class_is_token else self.classes)

    def parts(self, block: int) -> BlockParts:
        """The parts of a block."""
        module: Any = self.blocks[block]
        return BlockParts(module.layer_norm1, module.self_attn, module.layer_norm2, module.mlp)

    def key_tap(self, block: int) -> Tap:
        """Tap of the keys [T, H, t, d] of a block."""
        module, heads, _ = self.attention(block)
        return Tap(module.k_proj, lambda output: {"key": split_heads(output, heads)})

    def angles(self, hidden: Tensor, place: Tensor) -> None:
        """Positions are in the embeddings: attention rotates nothing."""

    def result(self, states: Tensor) -> Any:
        """States in the form a block returns them."""
        return (states,) if OLD else states


def states_of(output: Any) -> Tensor:
    """States in what a block returned, on any version."""
    return output[0] if isinstance(output, tuple) else output


def feature_taps(block: Any, needs: frozenset[Need], classes: int) -> list[Tap]:
    """Taps of the states [T, n, D_v] of a block behind the class tokens, and of the first of these."""
    taps = []
    if Need.FEATURES in needs:
        taps.append(Tap(block, lambda output: {"features": states_of(output)[:, classes:]}))
    if Need.CLASS_FEATURE in needs:
        taps.append(Tap(block, lambda output: {"class_feature": states_of(output)[:, 0]}))
    return taps


def packed_taps(module: Any, heads: int) -> list[Tap]:
    """Tap of queries and keys [T, H, n, d] of a projection [T, n, 3 H d] that makes values too."""

    def packed(output: Tensor) -> dict[str, Tensor]:
        query, key, _ = (split_heads(part, heads) for part in output.chunk(3, -1))
        return {"query": query, "key": key}

    return [Tap(module, packed)]


def hidden_state_block(select_layer: int, blocks: int) -> int:
    """Index of the block whose output is `hidden_states[select_layer]`, which has one entry more than blocks."""
    if not isinstance(select_layer, int):
        raise OptionError(f"vision layer {select_layer!r}: features of several layers are not adapted, give one number")
    return select_layer + blocks if select_layer < 0 else select_layer - 1


class TwoTowers:
    """Both towers as one; methods act inside the one that runs.

    Args:
        clips, pictures: the towers.
        class_is_token: whether the class token of a frame is a token.
    """

    members: Tensor | None = None
    inside = ClipBlocks.inside

    def __init__(self, clips: Any, pictures: Any, class_is_token: bool) -> None:
        clips.class_is_token, self.kernel = class_is_token, clips.kernel
        self.towers = clips, pictures
        self.tokens, self.side, self.classes, self.offers = clips.tokens, clips.side, clips.classes, clips.offers
        self.blocks, self.feature_block = clips.blocks, clips.feature_block
        self.scale, self.project, self.encode = clips.scale, clips.project, clips.encode

    def taps(self, needs: frozenset[Need], features: int, attention: int) -> list[Tap]:
        """Taps of both towers, one of which runs at a time."""
        return [tap for tower in self.towers for tap in tower.taps(needs, features, attention)]


class ClipText:
    """Text tower, tokenizer and projections of one CLIP model, in float32 on one device.

    Args:
        name: folder or hub name of the vision tower.
    Raises:
        OptionError: where there is no text tower beside the vision tower.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        try:
            config = load_pretrained(transformers.AutoConfig, name)
        except (OSError, ValueError) as error:
            raise OptionError(f"vision tower {name!r}: its configuration cannot be read: {error}") from error
        if not hasattr(config, "text_config"):
            raise OptionError(
                f"vision tower {name!r} is a vision model alone: this method compares patches with the question by "
                "CLIP's text tower. Use a checkpoint whose mm_vision_tower is a whole CLIP model "
                "(openai/clip-vit-large-patch14-336), or another method"
            )
        try:
            with without_unused_report():
                self._text = load_pretrained(transformers.CLIPTextModelWithProjection, name).float().eval()
                clip_model = load_pretrained(transformers.CLIPVisionModelWithProjection, name)
                self._tokenizer = load_pretrained(transformers.AutoTokenizer, name)
        except (OSError, ValueError) as error:
            raise OptionError(f"vision tower {name!r}: its text tower cannot be loaded: {error}") from error
        self._text.to(device)
        self.projection = clip_model.visual_projection.float().to(device)
        self.last_norm = clip_model.vision_model.post_layernorm.to(device)
        self._length: int = config.text_config.max_position_embeddings

    def embed(self, question: str) -> Tensor:
        """Embeddings [M, P] of a question cut into segments of the text tower's length, the last filled with zeros."""
        ids = self._tokenizer(question, return_tensors="pt").input_ids[0].to(self.projection.weight.device)
        room = -len(ids) % self._length
        mask = torch.nn.functional.pad(torch.ones_like(ids), (0, room)).view(-1, self._length)
        pieces = torch.nn.functional.pad(ids, (0, room)).view(-1, self._length)
        return self._text(input_ids=pieces, attention_mask=mask).text_embeds

    @torch.no_grad()
    def sides(self, tower: Any, tiles: list[Tiles], questions: list[str]) -> ClipSides:
        """Embeddings of the patches of all tiles [T, n, P] (the tower's features after its last norm), and of the
        question of each row [R, M, P].
        """
        features = torch.cat([picture.parts["features"] for picture in tiles])
        patches = self.projection(tower.last_norm(features).float())
        texts = [self.embed(question) for question in questions]
        real = [torch.ones(len(text), dtype=torch.bool, device=text.device) for text in texts]
        pad = torch.nn.utils.rnn.pad_sequence
        return ClipSides(patches, pad(texts, batch_first=True), pad(real, batch_first=True))


@lru_cache(maxsize=1)
def load_clip_text(name: str, device: torch.device) -> ClipText:
    """The text side of a CLIP model, loaded once."""
    return ClipText(name, device)
