"""InternVL-Chat as an attachment sees it: official LLaVA with another tower and the older function that assembles
prompts.

Attribute paths were checked against OpenGVLab/InternVL at 2410d1d, folder `internvl_chat_llava`: `llava_arch.py`,
`clip_encoder.py` and `intern_vit_6b/modeling_intern_vit.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Tap
from llava_consensus.hosts.clip_text import ClipText
from llava_consensus.hosts.llava.adapter import Projected
from llava_consensus.hosts.llava.prepare import PREPARE, prepared
from llava_consensus.hosts.llava.structure import Arguments, Official, Structure, read_structure
from llava_consensus.hosts.remote.older_llava import OlderLlava
from llava_consensus.hosts.towers import hidden_state_block, split_heads
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import Need


class InternTower(Projected):
    """InternViT-6B with the projector behind it. Its queries and keys are normed over all heads together, so they are
    read behind those norms where there are some.
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
        """What the products of queries and keys of a block are multiplied with."""
        return float(self.blocks[block].attn.scale)

    def taps(self, needs: frozenset[Need], features: int, attention: int) -> list[Tap]:
        """Queries and keys of one block, and the output of another."""
        attending, taps = self.blocks[attention].attn, []
        heads = attending.num_heads

        def packed(output: Tensor) -> dict[str, Tensor]:
            query, key, _ = (split_heads(part, heads) for part in output.chunk(3, -1))
            return {"query": query, "key": key}

        if Need.ATTENTION in needs and attending.qk_normalization:
            taps.append(Tap(attending.q_norm, lambda output: {"query": split_heads(output, heads)}))
            taps.append(Tap(attending.k_norm, lambda output: {"key": split_heads(output, heads)}))
        elif Need.ATTENTION in needs:
            taps.append(Tap(attending.qkv, packed))
        if Need.FEATURES in needs:
            taps.append(Tap(self.blocks[features], lambda output: {"features": output[:, 1:]}))
        if Need.CLASS_FEATURE in needs:
            taps.append(Tap(self.blocks[features], lambda output: {"class_feature": output[:, 0]}))
        return taps


class InternVLChat(OlderLlava):
    """A view of the `LlavaLlamaForCausalLM` of `internvl_chat_llava`."""

    called = "InternVL-Chat"

    @property
    def tower(self) -> Any:
        """The vision side."""
        return InternTower(self.module)

    def structure(self, attachment: Attachment, official: Official, arguments: Arguments, config: Any) -> Structure:
        """What every row will be; the tower's own number of patches may be that of its first size."""
        return read_structure(official, self.module, arguments, config, self.tower.tokens)

    def clip_text(self) -> ClipText:
        """InternViT is no side of a CLIP model in transformers."""
        raise OptionError(
            "this method compares patches with the question by CLIP's text tower, which InternViT does not have: take "
            "another method (llava-consensus list)"
        )

    def prepare(self, attachment: Attachment, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Takes the place of the function that assembles prompts."""
        return prepare(attachment, *args, **kwargs)

    def check(self, method: Method) -> None:
        """Raises OptionError for what cannot be attached, with the remedy."""
        tower = self.module.get_vision_tower()
        if not tower.is_loaded:
            raise OptionError("the vision tower has no weights yet: call model.get_vision_tower().load_model() first")
        if type(tower.vision_tower).__name__ != "InternVisionModel":
            raise OptionError(
                f"vision tower {type(tower.vision_tower).__name__}: adapted is InternVL-Chat with InternViT-6B alone, "
                "not the 14B variant, whose language model reads queries beside the patches"
            )
        if tower.select_feature != "patch":
            raise OptionError(
                f"mm_vision_select_feature={tower.select_feature!r} must be 'patch': "
                "a class token among the patches is no candidate"
            )
        self.check_method(method)


def prepare(
    attachment: Attachment, input_ids: Tensor, attention_mask: Any, past_key_values: Any, labels: Any, images: Any
) -> tuple[Any, ...]:
    """Takes the place of the function that assembles prompts: same five arguments, same five results.

    Raises:
        OptionError: for prompts of several lengths, which that function cannot mask.
    """
    if attention_mask is not None and images is not None and not attention_mask.all():
        raise OptionError("attention_mask: InternVL-Chat's own code answers no padded batch. Ask prompt by prompt")
    arguments = Arguments(input_ids, None, attention_mask, past_key_values, labels, images)
    official = partial(_later, getattr(type(attachment.here.module), PREPARE))
    ids, _, mask, cache, embeds, targets = prepared(attachment, official, arguments)
    return ids, mask, cache, embeds, targets


def _later(older: Callable[..., Any], model: Any, *arguments: Any) -> tuple[Any, ...]:
    """The function in the form of the later one, with positions and sizes of pictures: seven arguments, six results."""
    ids, _, mask, cache, labels, images, _ = arguments
    ids, mask, cache, embeds, labels = older(model, ids, mask, cache, labels, images)
    return ids, None, mask, cache, embeds, labels
