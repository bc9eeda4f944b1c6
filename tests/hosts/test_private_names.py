"""Names of transformers that hosts/ depends on and that may change without notice: a failure names the one that did."""

import inspect

import pytest
import transformers
from hf_models import CASES

if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("methods on models of transformers need version 5", allow_module_level=True)

from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING

from llava_consensus.hosts.entrance import ENCODING
from llava_consensus.hosts.rows import CACHE_NAMES


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_kernels_are_asked_for_by_name() -> None:
    """hosts/kernels.py takes the place of `AttentionInterface.get_interface`."""
    assert parameters(AttentionInterface.get_interface) == ["self", "attn_implementation", "default"]


@pytest.mark.parametrize("kind", [Cache, DynamicCache, StaticCache])
def test_caches_have_a_length_and_a_query_offset(kind: type) -> None:
    """hosts/rows.py gives a shortened cache another length, and the offset of what it holds."""
    for name in ("get_seq_length", "get_query_offset"):
        assert parameters(getattr(kind, name))[:2] == ["self", "layer_idx"], name
    assert parameters(kind.get_mask_sizes)[:3] == ["self", "query_length", "layer_idx"]  # type: ignore[attr-defined]
    for name in ("reset", "batch_repeat_interleave", "batch_select_indices"):
        assert hasattr(kind, name), name


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention", "chunked_attention"])
def test_masks_are_made_for_one_layer(kind: str) -> None:
    """hosts/layers.py asks for the mask of one layer, whose cache may be shorter than others."""
    names = parameters(LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[kind])
    assert names[:3] == ["config", "inputs_embeds", "attention_mask"]
    assert names[3] in CACHE_NAMES
    assert {"position_ids", "layer_idx", "or_mask_function"} <= set(names)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_models_encode_images_in_a_step_of_its_own(name: str) -> None:
    """hosts/entrance.py wraps `get_image_features`, and finds what was read on `mm_encoder_outputs`."""
    model = CASES[name].build()
    base = model.model
    assert {"input_ids", "attention_mask", "inputs_embeds", "mm_encoder_outputs"} <= set(parameters(base.forward))
    assert "pixel_values" in parameters(base.get_image_features)
    assert parameters(getattr(model, ENCODING))[:2] == ["inputs_tensor", "model_kwargs"]
    decoder = model.get_decoder()
    assert hasattr(decoder, "layers")
    assert {"attention_mask", "position_ids", "inputs_embeds"} <= set(parameters(decoder.forward))
    assert set(CACHE_NAMES) & set(parameters(decoder.forward))
