"""A checkpoint of official LLaVA with random weights: the tower of LLaVA-1.5 (CLIP ViT-L/14 for pictures of 336 pixels)
before a language model of 12 layers and width 1,024, with the tokenizer of the embedded model.

    python -m eval_scripts.random_llava OUT    # by an interpreter with official LLaVA; writes OUT and OUT/clip-tower
"""

import shutil
import sys
from pathlib import Path

import torch
import transformers

SOURCE = Path(__file__).parents[1] / "checkpoints" / "llava-mini"
VISION = dict(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, image_size=336,
    patch_size=14, projection_dim=768,
)  # fmt: skip
TEXT = dict(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=16,
    vocab_size=32000, max_position_embeddings=4096, tie_word_embeddings=False,
)  # fmt: skip
SEEN = dict(
    mm_hidden_size=1024, mm_vision_select_layer=-2, mm_vision_select_feature="patch", mm_projector_type="mlp2x_gelu",
    mm_patch_merge_type="flat", mm_use_im_start_end=False, mm_use_im_patch_token=False, image_aspect_ratio="pad",
    use_mm_proj=True,
)  # fmt: skip
BESIDE = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")


def write(out: Path) -> None:
    """Writes the checkpoint and its tower, always with the same numbers, held in half precision."""
    from llava.model.language_model.llava_llama import LlavaConfig, LlavaLlamaForCausalLM

    torch.manual_seed(0)
    tower = out / "clip-tower"
    transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION)).half().save_pretrained(tower)
    side = VISION["image_size"]
    transformers.CLIPImageProcessor(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    ).save_pretrained(tower)
    config = LlavaConfig(**TEXT, **SEEN, mm_vision_tower=str(tower), torch_dtype="float16")
    LlavaLlamaForCausalLM(config).half().save_pretrained(out)
    for name in BESIDE:
        shutil.copy(SOURCE / name, out)


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve())
