"""InternVL-Chat of 2023 (`internvl_chat_llava`): LLaVA 1.1 with InternViT-6B for its tower and then Vicuna, run by its
authors' own `llava` package, which is installed in place of the official one. It is official LLaVA with another tower
and the older function that assembles prompts.

Attribute paths were checked against OpenGVLab/InternVL at 2410d1d, folder `internvl_chat_llava`: `llava_arch.py`,
`clip_encoder.py` and `intern_vit_6b/modeling_intern_vit.py`.
"""

from collections.abc import Callable
from functools import cached_property, partial, wraps
from typing import Any

from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Offer, Tap
from llava_consensus.hosts.llava import PREPARE, Arguments, LlavaModel, Projected, generate, prepared
from llava_consensus.hosts.old_attachment import Attachment
from llava_consensus.hosts.towers import feature_taps, hidden_state_block, packed_taps, split_heads
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import Need


class InternTower(Projected):
    """InternViT-6B with its projector. Its queries and keys are normed over all heads together, so they are read after
    those norms where there are some.
    """

    classes = 1
    members: Tensor | None = None
    offers = frozenset({Need.ATTENTION, Need.FEATURES, Need.CLASS_FEATURE, Need.PROJECTOR})

    def __init__(self, model: Any) -> None:
        tower = model.get_vision_tower()
        self._model, self.blocks = model, list(tower.vision_tower.encoder.layers)
        self.feature_block = hidden_state_block(tower.select_layer, len(self.blocks))
        shown = tower.image_processor.crop_size["height"]  # the tower's own configuration may say its first size
        self.side: int = shown // tower.config.patch_size
        self.tokens = self.side**2

    def scale(self, block: int) -> float:
        """Scale of the attention logits of a block."""
        return float(self.blocks[block].attn.scale)

    def taps(self, needs: frozenset[Need], features: int, attention: int) -> list[Tap]:
        """Queries and keys of one block, and the output of another."""
        attending = self.blocks[attention].attn
        taps: list[Tap] = []
        heads = attending.num_heads
        if Need.ATTENTION in needs and attending.qk_normalization:
            taps.append(Tap(attending.q_norm, lambda output: {"query": split_heads(output, heads)}))
            taps.append(Tap(attending.k_norm, lambda output: {"key": split_heads(output, heads)}))
        elif Need.ATTENTION in needs:
            taps += packed_taps(attending.qkv, heads)
        return taps + feature_taps(self.blocks[features], needs, self.classes)


class InternVLChat(LlavaModel):
    """A view of the `LlavaLlamaForCausalLM` of `internvl_chat_llava`."""

    offer = Offer(InternTower.offers)
    most_tiles = 1

    @cached_property
    def tower(self) -> InternTower:
        """The vision side."""
        return InternTower(self.module)

    def clip_text(self) -> Any:
        """None: InternViT is no side of a CLIP model in transformers."""
        return None

    def entrances(self, attachment: Attachment) -> dict[str, Callable[..., Any]]:
        """The function that assembles prompts, and `generate`, which makes a call of its own."""
        entrance = wraps(type(self.module).generate)(partial(generate, attachment))
        return {PREPARE: partial(prepare, attachment), "generate": entrance}

    def check(self, method: Method) -> None:
        """Raises OptionError for what cannot be attached, with the remedy."""
        if method.place is Place.DECODER or method.positions != "renumber":
            raise OptionError(
                f"{type(method).__name__}: InternVL-Chat's own code makes mask and positions from the length of the "
                "cache, so nothing can be cut between its layers and positions cannot be kept. Take a method that acts "
                "after the tower, and positions=renumber"
            )
        super().check(method)

    def check_tower(self, tower: Any) -> None:
        """Raises OptionError for a vision tower of another kind."""
        super().check_tower(tower)
        if type(tower.vision_tower).__name__ != "InternVisionModel":
            raise OptionError(
                f"vision tower {type(tower.vision_tower).__name__}: adapted is InternVL-Chat with InternViT-6B alone, "
                "not the 14B variant, whose language model reads queries beside the patches"
            )


def prepare(
    attachment: Attachment, input_ids: Tensor, attention_mask: Any, past_key_values: Any, labels: Any, images: Any
) -> tuple[Any, ...]:
    """Replaces the function that assembles prompts: same five arguments, same five results.

    Raises:
        OptionError: for prompts of several lengths, which that function cannot mask.
    """
    older = getattr(type(attachment.here.module), PREPARE)
    if attachment.entered() is None:
        return older(attachment.here.module, input_ids, attention_mask, past_key_values, labels, images)
    if attention_mask is not None and images is not None and not attention_mask.all():
        raise OptionError("attention_mask: InternVL-Chat's own code answers no padded batch. Ask prompt by prompt")

    def official(model: Any, *given: Any) -> tuple[Any, ...]:
        """Adapts the older function to the form of the later one, with positions and sizes of pictures: seven
        arguments, six results.
        """
        ids, _, mask, cache, labels, images, _ = given
        ids, mask, cache, embeds, labels = older(model, ids, mask, cache, labels, images)
        return ids, None, mask, cache, embeds, labels

    arguments = Arguments(input_ids, None, attention_mask, past_key_values, labels, images)
    ids, _, mask, cache, embeds, targets = prepared(attachment, official, arguments)
    return ids, mask, cache, embeds, targets
