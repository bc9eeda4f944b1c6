"""The sizes of a loaded Hugging Face model that decide what a prompt costs, read from its configurations."""

from typing import TYPE_CHECKING

from torch import nn

from llava_consensus.reduction.shape import Shape

if TYPE_CHECKING:
    from llava_consensus.hosts.hf.model import HfModel


def read_shape(view: "HfModel", text: int = 0) -> Shape:
    """Sizes of the model, with a prompt of one picture of the most tiles and `text` other rows. Every block of the
    tower counts, whichever feeds the projector.
    """
    config = view.module.config
    words, sight, tower = config.get_text_config(), config.vision_config, view.tower
    projector = getattr(view.inner, "multi_modal_projector", None)
    linear = [one for one in projector.modules() if isinstance(one, nn.Linear)] if projector is not None else []
    heads, blocks = words.num_attention_heads, len(tower.blocks)
    return Shape(
        layers=words.num_hidden_layers,
        width=words.hidden_size,
        heads=heads,
        kv_heads=getattr(words, "num_key_value_heads", None) or heads,
        head_width=getattr(words, "head_dim", None) or words.hidden_size // heads,
        inner=words.intermediate_size,
        vocabulary=words.vocab_size,
        blocks=blocks,
        vision_width=sight.hidden_size,
        vision_heads=getattr(sight, "num_attention_heads", None) or sight.num_heads,
        vision_inner=sight.intermediate_size,
        patches=tower.tokens,
        patch_values=3 * sight.patch_size**2,
        text=text,
        tiles=view.most_tiles,
        classes=tower.classes,
        projector=sum(one.in_features * one.out_features for one in linear),
        number_bytes=view.module.dtype.itemsize,
        feature_blocks=tower.feature_block + 1,
    )
