"""The sizes of Qwen-VL and CogVLM that decide what a prompt costs, read from their configurations."""

from typing import Any

from llava_consensus.reduction.method import Shape


def read_qwen_vl(model: Any, text: int) -> Shape:
    """Sizes of a `QWenLMHeadModel`, with a prompt of one picture and `text` other rows.

    The tower's rows are patches, of which there are more than tokens; the others count as class tokens do. Each token
    costs the resampler its share of the patches, which are projected, and made keys and values of; its own query, the
    projection behind the attention, and the last one.
    """
    config, visual = model.config, model.config.visual
    width, output, tokens = visual["width"], visual["output_dim"], model.transformer.visual.attn_pool.num_queries
    patches = (visual["image_size"] // visual["patch_size"]) ** 2
    return Shape(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_width=config.kv_channels,
        inner=config.intermediate_size // 2,
        vocabulary=config.vocab_size,
        blocks=visual["layers"],
        vision_width=width,
        vision_heads=visual["heads"],
        vision_inner=int(width * visual["mlp_ratio"]),
        patches=tokens,
        patch_values=3 * visual["patch_size"] ** 2,
        text=text,
        classes=patches - tokens,
        projector=patches // tokens * (width * output + 2 * output**2) + 3 * output**2,
        number_bytes=model.dtype.itemsize,
        feature_blocks=visual["layers"],
    )


def read_cogvlm(model: Any, text: int) -> Shape:
    """Sizes of a `CogVLMForCausalLM`, with a prompt of one picture and `text` other rows."""
    config, vision = model.config, model.config.vision_config
    return Shape(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_width=config.hidden_size // config.num_attention_heads,
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        blocks=vision["num_hidden_layers"],
        vision_width=vision["hidden_size"],
        vision_heads=vision["num_heads"],
        vision_inner=vision["intermediate_size"],
        patches=(vision["image_size"] // vision["patch_size"]) ** 2,
        patch_values=3 * vision["patch_size"] ** 2,
        text=text,
        projector=vision["hidden_size"] * config.hidden_size + 3 * config.hidden_size * config.intermediate_size,
        number_bytes=model.dtype.itemsize,
        feature_blocks=vision["num_hidden_layers"],
    )
