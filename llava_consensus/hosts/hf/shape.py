"""The sizes of a loaded Hugging Face model that decide what a prompt costs, read from its configurations."""

from typing import TYPE_CHECKING

from torch import nn

from llava_consensus.reduction.method import Shape

if TYPE_CHECKING:
    from llava_consensus.hosts.hf.model import HfModel


def read_shape(view: "HfModel", text: int = 0) -> Shape:
    """Sizes of the model, with a prompt of one picture of the most tiles and `text` other rows. Every block of the
    tower counts, whichever feeds the projector.
    """
    config = view.module.config
    language, vision, tower = config.get_text_config(), config.vision_config, view.tower
    projector = getattr(view.inner, "multi_modal_projector", None)
    linear = (
        [module for module in projector.modules() if isinstance(module, nn.Linear)] if projector is not None else []
    )
    heads, blocks = language.num_attention_heads, len(tower.blocks)
    return Shape(
        layers=language.num_hidden_layers,
        width=language.hidden_size,
        heads=heads,
        kv_heads=getattr(language, "num_key_value_heads", None) or heads,
        head_width=getattr(language, "head_dim", None) or language.hidden_size // heads,
        inner=language.intermediate_size,
        vocabulary=language.vocab_size,
        blocks=blocks,
        vision_width=vision.hidden_size,
        vision_heads=getattr(vision, "num_attention_heads", None) or vision.num_heads,
        vision_inner=vision.intermediate_size,
        patches=tower.tokens,
        patch_values=3 * vision.patch_size**2,
        text=text,
        tiles=view.most_tiles,
        classes=tower.classes,
        projector=sum(module.in_features * module.out_features for module in linear),
        number_bytes=view.module.dtype.itemsize,
        feature_blocks=tower.feature_block + 1,
    )
