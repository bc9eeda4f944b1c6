"""Parts of hosts by themselves: which blocks of a tower a method reads, the rows that two methods leave, and masks."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import hf_models
import numpy as np
import pytest
import torch
from torch import nn

from llava_consensus import attach, make
from llava_consensus.errors import OptionError
from llava_consensus.hosts.images import one_image
from llava_consensus.hosts.kernels import in_this_thread, placed
from llava_consensus.hosts.patch_map import Mixed, fed_rows
from llava_consensus.hosts.prompts import _pack, text_after
from llava_consensus.hosts.rows import Rows, joined_rows
from llava_consensus.hosts.tower import Learnt, Tower

QWEN = (7, 15, 23, 31)  # blocks of Qwen2.5-VL that attend to the whole image


@pytest.mark.parametrize(
    ("method", "blocks", "whole", "block"),
    [
        ("hiprune", 24, None, 8),  # the ninth, as in the authors' code
        ("vscan", 24, None, 5),  # the sixth
        ("hiprune", 32, QWEN, 15),  # the sixteenth
        ("vscan", 32, QWEN, 7),  # the first that is not windowed
        ("hiprune", 4, None, 1),
        ("vscan", 4, None, 0),
    ],
)
def test_the_earlier_block_is_the_authors(method: str, blocks: int, whole: Any, block: int) -> None:
    base = nn.ModuleDict({"blocks": nn.ModuleList(nn.Identity() for _ in range(blocks))})
    base.config = SimpleNamespace(vision_config=SimpleNamespace(fullatt_block_indexes=whole))  # type: ignore[assignment]

    def early(**options: int) -> int:
        return Tower(base, None, make(method, **options), Learnt({}, None, {})).early_block("blocks")[1]  # type: ignore[arg-type]

    assert early() == block
    assert early(early_layer=-1) == blocks - 1
    assert early(early_layer=2) == 2
    for wrong in (blocks, -blocks - 1):
        with pytest.raises(OptionError, match=f"early_layer={wrong} must be in {-blocks}..{blocks - 1}"):
            early(early_layer=wrong)


@torch.enable_grad()
def test_positions_of_a_convolution_feed_several_rows() -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(1, 8, 5, requires_grad=True), torch.randn(6, 5, 3)
    found = fed_rows(nn.functional.conv1d(states.mT, weight, stride=2, padding=1)[0].T, [states])
    assert found is not None
    assert found[0][0].tolist() == [[abs(position - 2 * row) <= 1 for row in range(4)] for position in range(8)]
    with pytest.raises(Mixed, match="8 of 8 positions feed several rows"):
        fed_rows(torch.randn(4, 8) @ states[0], [states])


@pytest.mark.parametrize("method", ["divprune", "consensusdrop", "hiprune"])
@torch.enable_grad()
def test_blocks_that_nobody_reads_are_passed_over_in_an_answer_only(method: str) -> None:
    case = hf_models.CASES["llava"]
    model, inputs = case.build(), hf_models.prompts([1, case.picture(0), 7, 8])
    blocks, ran = model.model.vision_tower.encoder.layers, list[int]()
    for number, block in enumerate(blocks):
        block.self_attn.register_forward_hook(lambda *_, number=number: ran.append(number))
    pixels, layer = inputs["pixel_values"], model.config.vision_feature_layer
    assert (layer, len(blocks)) == (-2, 4)
    whole = model.get_image_features(pixels).last_hidden_state
    with attach(model, method, tokens=5) as attached:
        for answer in (lambda: model(**inputs), lambda: model.generate(**inputs, max_new_tokens=1)):
            ran.clear()
            answer()
            assert ran == [0, 1, 2] and attached.outcomes[0].after == 5
        assert torch.equal(model.get_image_features(pixels).last_hidden_state, whole)
        ran.clear()
        model(**inputs, vision_feature_layer=-1)
        assert ran == [0, 1, 2, 3]
        model.config.vision_feature_layer = [-3]
        model(**inputs)
        assert ran == [0, 1, 2, 3] * 2
    assert all("forward" not in vars(block) for block in blocks)


def test_blocks_that_are_offloaded_stay_so_after_detach() -> None:
    from accelerate import cpu_offload

    case = hf_models.CASES["llava"]
    model, inputs = case.build(), hf_models.prompts([1, case.picture(0), 7, 8])
    expected = model(**inputs).logits
    cpu_offload(model, preload_module_classes=["CLIPEncoderLayer"])
    with attach(model, "divprune", tokens=5):
        model(**inputs)
    assert torch.equal(model(**inputs).logits, expected)


def rows(size: int, index: list[int]) -> Rows:
    real = np.ones((1, len(index)), dtype=bool)
    gone = torch.tensor([[size - len(index)]])
    return Rows(size, torch.tensor([index]), None, real, torch.from_numpy(real), gone, len(index) < size)


def test_joined_rows_count_what_both_methods_removed() -> None:
    joined = joined_rows(rows(6, [0, 2, 3, 5]), rows(4, [3]))
    assert (joined.size, joined.index.tolist(), joined.removed.tolist()) == (6, [[5]], [[5]])
    assert joined.at is not None and joined.at.tolist() == [[5]] and joined.shrinks


def test_a_hook_of_one_thread_passes_by_in_others() -> None:
    with ThreadPoolExecutor(1) as pool:
        ours, theirs = in_this_thread(int), pool.submit(in_this_thread, int).result()
        answers = ours(1), theirs(1), pool.submit(ours, 1).result(), pool.submit(theirs, 1).result()
    assert answers == (1, None, None, 1)


def test_every_row_of_a_packed_batch_begins_with_a_prompt() -> None:
    pack = _pack(np.array([[True, True, False], [True, True, True]]), torch.device("cpu"))
    assert (pack.real.sum(1).tolist(), pack.place.tolist()) == ([1, 2, 1], [1, 2, 3, 5, 5, 5])


def test_markers_around_images_ask_nothing() -> None:
    """Of a family without an entry: two in front of an image, and one behind it."""
    config = SimpleNamespace(model_type="other", image_start_token_id=8, boi_token_id=9, eoi_token_id=7)
    ids = np.array([[1, 8, 9, 50, 50, 7, 4, 5, 8, 9, 50, 50, 7, 6]])
    images = [one_image(0, np.arange(start, start + 2)) for start in (3, 10)]
    found = text_after(ids, np.ones(ids.shape, dtype=bool), images, config)
    assert [one.tolist() for one in found] == [[5, 6, 7, 13], [12, 13]]


def test_queries_of_sam_carry_the_rows_and_columns_of_patches() -> None:
    modeling_got_ocr2 = pytest.importorskip("transformers.models.got_ocr2.modeling_got_ocr2")
    torch.manual_seed(0)
    config = modeling_got_ocr2.GotOcr2VisionConfig(hidden_size=32, num_attention_heads=2, image_size=80, patch_size=16)
    module, states = modeling_got_ocr2.GotOcr2VisionAttention(config, 0), torch.randn(2, 3, 5, 32)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    query, key, options = placed(module, states)
    weights = (query @ key.transpose(2, 3) * options["scaling"]).softmax(-1)
    assert torch.allclose(weights.flatten(0, 1), module(states)[1], atol=1e-5) and options["places"] == 3 + 5
