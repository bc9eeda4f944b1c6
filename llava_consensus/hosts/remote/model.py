"""What the views of Qwen-VL and CogVLM share: see `base.Model`. A family's own file says where its blocks are, where
the tokens of a picture stand in its prompts, and where the model takes their features.
"""

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Prompt, Tiles
from llava_consensus.hosts.clip_text import ClipText
from llava_consensus.hosts.layout import RowKinds
from llava_consensus.hosts.remote import seam
from llava_consensus.hosts.sequence import Sequence
from llava_consensus.reduction.method import Method, Place

if TYPE_CHECKING:
    from PIL.Image import Image

    from llava_consensus.hosts.attachment import Attachment
    from llava_consensus.reduction.method import Shape


class RemoteModel:
    """A view of a model that carries its own code.

    Args:
        module: the model.
    """

    most_tiles = 1
    inlet = ""  # path of the function of the model that is given features of pictures

    def __init__(self, module: Any) -> None:
        self.module: Any = module

    @property
    def tower(self) -> Any:
        """The vision side."""
        raise NotImplementedError

    @property
    def decoder(self) -> Any:
        """The language side."""
        raise NotImplementedError

    def of(self, module: Any) -> "RemoteModel":
        """The same view of a replica."""
        return type(self)(module)

    def clip_text(self) -> ClipText:
        """None of these towers is one side of a CLIP model in transformers."""
        raise OptionError(
            f"this method compares patches with the question by CLIP's text tower, which {type(self.module).__name__} "
            "does not have: take another method (llava-consensus list)"
        )

    def check(self, method: Method) -> None:
        """Raises OptionError for what these models cannot do."""
        if method.place is Place.DECODER:
            raise OptionError(
                f"{type(method).__name__} cuts between decoder layers, and those of {type(self.module).__name__} are "
                "code of its own that is not adapted for it: take a method that acts after the tower"
            )

    def entrances(self, attachment: "Attachment") -> dict[str, Callable[..., Any]]:
        """`generate`, which makes one call, `forward` with the pictures reduced, and where their features go in."""
        model_class, attributes = type(self.module), vars(self.module)
        owner, _, name = self.inlet.rpartition(".")
        plain = vars(self.module.get_submodule(owner)).get(name)
        return {
            "generate": wraps(model_class.generate)(partial(seam.generate, attachment, attributes.get("generate"))),
            "forward": wraps(model_class.forward)(partial(seam.forward, attachment, attributes.get("forward"))),
            self.inlet: partial(self.give, attachment, plain),
        }

    @staticmethod
    def give(attachment: "Attachment", plain: Any, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the inlet: what the call has prepared, once, else what the model's own function gives."""
        raise NotImplementedError

    def kinds(self, inputs: dict[str, Any]) -> RowKinds | None:
        """What every row of prompts is, given the arguments of `forward`; None where there are no pictures.

        Raises:
            OptionError: where a picture has another number of rows than tokens.
        """
        raise NotImplementedError

    def pixels(self, inputs: dict[str, Any]) -> Tensor:
        """The pictures of prompts: [P, 3, h, w]."""
        raise NotImplementedError

    def assembled(self, inputs: dict[str, Any], kinds: RowKinds, tiles: list[Tiles]) -> Sequence:
        """The full prompts as the language model would have read them, with ids and labels among the channels."""
        raise NotImplementedError

    def arguments(self, inputs: dict[str, Any], out: Sequence) -> dict[str, Any]:
        """Arguments of `forward` for the reduced prompts; the features go in by the inlet."""
        raise NotImplementedError

    def features(self, out: Sequence) -> Tensor:
        """What the inlet is to give for the reduced prompts."""
        raise NotImplementedError

    def shape(self, text: int) -> "Shape":
        """Sizes of the model, with a prompt of one picture and `text` other rows."""
        raise NotImplementedError

    def picture(self, tokenizer: Any, image: "Image") -> Tensor:
        """A picture as the tower takes it, by the model's own preprocessing: [3, h, w]."""
        raise NotImplementedError

    def prompt(self, tokenizer: Any, prompt: Prompt, pictures: int) -> dict[str, Tensor]:
        """A prompt about that many pictures in the model's own words, as arguments of `generate` by row, each [L]."""
        raise NotImplementedError

    def stand_ins(self, pictures: list[int]) -> dict[str, Any]:
        """Arguments of `generate` in place of pictures that were encoded before, so many in each row."""
        return {}

    def own(self, tokenizer: Any, prompt: Prompt, image: "Image", folder: Path) -> dict[str, Any]:
        """Arguments of the model's own `generate` for a prompt about a picture, which may be written to a folder."""
        raise NotImplementedError


def rows_with(rows: Tensor, values: Tensor, embeds: Tensor) -> Tensor:
    """Embeddings [R, S, D] with `values` [n, D] at the n true places of `rows` [R, S]."""
    at_rows = rows.to(embeds.device)[..., None].expand_as(embeds)
    return embeds.masked_scatter(at_rows, values.to(embeds.device, embeds.dtype))


def real_rows(inputs: dict[str, Any]) -> Tensor:
    """Which rows of prompts [R, S] are no padding."""
    mask = inputs.get("attention_mask")
    return torch.ones_like(inputs["input_ids"], dtype=torch.bool) if mask is None else mask.bool()
