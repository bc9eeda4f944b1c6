"""InternVL-Chat of 2023 (`internvl_chat_llava`): LLaVA 1.1 with InternViT-6B for its tower and then Vicuna, run by its
authors' own `llava` package, which is installed in place of the official one. It is official LLaVA with another tower
and the older function that assembles prompts.

Attribute paths were checked against OpenGVLab/InternVL at 2410d1d, folder `internvl_chat_llava`: `llava_arch.py`,
`clip_encoder.py` and `intern_vit_6b/modeling_intern_vit.py`.
"""

from typing import Any

from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.kernels import uncompiled
from llava_consensus.hosts.official import PREPARE, OfficialEntrance
from llava_consensus.hosts.official_model import Arguments, Official
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import Need


class InternVLChat(Official):
    """The `LlavaLlamaForCausalLM` of `internvl_chat_llava`."""

    entrance = "llava_consensus.hosts.remote.internvl_chat:InternVLChatEntrance"
    offers = frozenset({Need.ATTENTION, Need.FEATURES, Need.CLASS_FEATURE, Need.PROJECTOR})

    @staticmethod
    def check(method: Method, model: str = "") -> None:
        name = type(method).__name__
        if method.acts_inside:
            raise OptionError(
                f"{name} acts before the projector and is adapted to CLIP towers. Take a method that acts after the "
                "tower"
            )
        if method.place is Place.DECODER or method.positions != "renumber":
            raise OptionError(
                f"{name}: InternVL-Chat's own code makes mask and positions from the length of the "
                "cache, so nothing can be cut between its layers and positions cannot be kept. Take a method that acts "
                "after the tower, and positions=renumber"
            )


class InternVLChatEntrance(OfficialEntrance):
    view = InternVLChat
    clip_name = ""  # InternViT is no side of a CLIP model in transformers

    def check(self, model: Any, methods: list[Method]) -> None:
        super().check(model, methods)
        vision = type(model.get_vision_tower().vision_tower).__name__
        if vision != "InternVisionModel":
            raise OptionError(
                f"vision tower {vision}: adapted is InternVL-Chat with InternViT-6B only, "
                "not the 14B variant, whose language model reads queries beside the patches"
            )

    @uncompiled
    def called(
        self, input_ids: Tensor, attention_mask: Any, past_key_values: Any, labels: Any, images: Any
    ) -> tuple[Any, ...]:
        """Takes the place of the function that assembles prompts: same five arguments, same five results.

        Raises:
            OptionError: for prompts of several lengths, which that function cannot mask.
        """
        if attention_mask is not None and images is not None and not attention_mask.all():
            raise OptionError("attention_mask: InternVL-Chat's own code answers no padded batch. Ask prompt by prompt")
        results = self.prepare(Arguments(input_ids, None, attention_mask, past_key_values, labels, images))
        ids, _, mask, cache, embeds, targets = results
        return ids, mask, cache, embeds, targets

    def official(self, model: Any) -> Any:
        """The older function in the form of the later one, with positions and sizes of images."""
        older = getattr(type(model), PREPARE)

        def later(own: Any, *given: Any) -> tuple[Any, ...]:
            ids, _, mask, cache, labels, images, _ = given
            ids, mask, cache, embeds, labels = older(own, ids, mask, cache, labels, images)
            return ids, None, mask, cache, embeds, labels

        return later
