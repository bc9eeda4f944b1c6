"""Methods before the vision tower on models of transformers, against the plain tower on smaller images or on cells."""

import copy
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from hf_models import CASES, END, IMAGE, START, VIDEO, Picture, decoder_given, double, noise, prompts, square
from torch import Tensor
from torch.nn.functional import interpolate

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.hosts.before_tower import ImageLeft, Left, tiles_left
from llava_consensus.hosts.images import one_image
from llava_consensus.methods.divprune import spread_out
from llava_consensus.methods.resize import smaller

T = 7
CELLS = {2: [(2, 2), (1, 2)], 1: [(2, 3)]}  # of a video of two temporal patches of 4 x 4 tokens, of an image of 4 x 6


def test_tokens_that_are_left_form_a_grid_if_their_places_do() -> None:
    slots = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3]).repeat(2, 1)  # two tiles of 3 x 4 places
    left = Left([ImageLeft(slots, 4, [4, 4]), ImageLeft(slots[:1].roll(1, 1), 4, [4])], None)
    found, _ = tiles_left(Mock(), left, [one_image(0, np.arange(12))] * 2, True, True)
    assert [tiles[:3] for tiles in found] == [(2, 4, 2), (1, 4, 0)]


def resized(image: Tensor, height: int, width: int) -> Tensor:
    return interpolate(image[None], size=(height, width), mode="bicubic", antialias=True, align_corners=False)[0]


def firsts(whole: tuple[int, int], small: tuple[int, int]) -> list[int]:
    """The first token of the full image, row by row, in each cell of the smaller one."""
    found: dict[tuple[int, int], int] = {}
    for row in range(whole[0]):
        for column in range(whole[1]):
            cell = row * small[0] // whole[0], column * small[1] // whole[1]
            found.setdefault(cell, row * whole[1] + column)
    return list(found.values())


def patches(image: Tensor, patch: int) -> Tensor:
    """By Qwen's own processor, which changes no number here."""
    processor = transformers.Qwen2VLImageProcessorPil(patch_size=patch)
    asked = dict(do_resize=False, do_rescale=False, do_normalize=False, do_convert_rgb=False)
    found = processor(images=[image.numpy()], input_data_format="channels_first", return_tensors="pt", **asked)
    return found["pixel_values"]


def prepared(frames: list[Tensor], patch: int) -> Tensor:
    """A temporal patch of two images: what the processor makes of both, of each its own half."""
    both = [patches(frame, patch).unflatten(1, (3, 2, -1)) for frame in frames]
    return torch.stack((both[0][:, :, 0], both[1][:, :, 1]), 2).flatten(1)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("qwen", "glm"))])
def test_qwen_reads_a_picture_that_was_prepared_smaller(name: str) -> None:
    case = CASES[name]
    model, patch, video = case.build(), 16 if "qwen3" in name else 14, "video" in name
    twin = copy.deepcopy(model)
    tiles, rows, columns = (2, 4, 4) if video else (1, 4, 6)
    films = [list(noise(2, 3, 2 * patch * rows, 2 * patch * columns, seed=tile)) for tile in range(tiles)]
    pixels = "pixel_values_videos" if video else "pixel_values"
    grid = "video_grid_thw" if video else "image_grid_thw"
    placeholder = VIDEO if video and "glm" not in name else IMAGE
    one = [START, *[placeholder] * rows * columns, END]
    whole = {pixels: torch.cat([prepared(frames, patch) for frames in films])}
    whole[grid] = torch.tensor([[tiles, 2 * rows, 2 * columns]])
    apart = "qwen3" in name or "glm" in name
    ids = one * tiles if apart or not video else [placeholder] * tiles * rows * columns
    inputs = prompts([1, 5, Picture(ids, whole), 7, 8])
    with attach(model, "resize", tokens=T) as attached:
        reduced = decoder_given(model, inputs)
    assert CELLS[tiles] == [smaller(share, rows, columns) for share in ([4, 3] if video else [T])]
    expected, planes, stays = [], [], [word != placeholder for word in inputs["input_ids"][0].tolist()]
    at_picture = [place for place, word in enumerate(stays) if not word]
    for tile, (frames, cells) in enumerate(zip(films, CELLS[tiles], strict=True)):
        small = [resized(frame, 2 * patch * cells[0], 2 * patch * cells[1]) for frame in frames]
        size = torch.tensor([[1, 2 * cells[0], 2 * cells[1]]])
        output = twin.model.get_image_features(prepared(small, patch), size, return_dict=True)
        expected.append(torch.cat(list(output.pooler_output)))
        planes.append(getattr(output, "deepstack_features", None) or [])
        for first in firsts((rows, columns), cells):
            stays[at_picture[tile * rows * columns + first]] = True
    found = visual_rows(reduced, inputs, stays, placeholder)
    assert torch.allclose(found, torch.cat(expected), atol=1e-5)
    assert attached.outcomes[0].after == len(found) == sum(a * b for a, b in CELLS[tiles])
    for index, plane in enumerate(reduced.get("deepstack_visual_embeds") or []):
        assert torch.allclose(plane, torch.cat([one for own in planes for one in own[index]]), atol=1e-5)
    plain = decoder_given(twin, inputs)["position_ids"]
    assert torch.equal(reduced["position_ids"][-3:], plain[-3:][..., stays])


def visual_rows(given: dict[str, Any], inputs: dict[str, Any], stays: list[bool], placeholder: int = IMAGE) -> Tensor:
    """The rows of images that the decoder is given of one prompt, of which these rows stay."""
    words = inputs["input_ids"][0][stays]
    assert given["inputs_embeds"].shape[:2] == (1, len(words))
    return given["inputs_embeds"][0][words == placeholder]


def test_video_llava_reads_smaller_frames_and_smaller_pictures_each_by_its_tower() -> None:
    model, clip, picture = CASES["video_llava"].build(), CASES["video_llava video"].picture(0), square(1)
    twin = copy.deepcopy(model).model
    inputs = prompts([1, 5, clip, 6, picture, 7, 8])
    with attach(model, "resize", tokens=0.25) as attached:
        given = decoder_given(model, inputs)["inputs_embeds"][0]
    assert [(one.before, one.after) for one in attached.outcomes] == [(16, 4), (4 * 16, 4 * 4)]  # images come first
    frames = torch.stack([resized(frame, 28, 28) for frame in inputs["pixel_values_videos"][0]])
    whole = resized(picture.pixels["pixel_values"][0], 28, 28)[None]
    towers = ((twin.video_tower, frames, 0, given[2:-7]), (twin.image_tower, whole, 1, given[-6:-2]))
    for tower, small, first, found in towers:
        states = tower(small, interpolate_pos_encoding=True, output_hidden_states=True).hidden_states[-2]
        expected = twin.multi_modal_projector(states[:, first:]).flatten(0, 1)
        assert torch.allclose(found, expected, atol=1e-4)


def test_dinov2_encodes_the_smaller_picture_as_if_it_had_been_given() -> None:
    model, inputs = CASES["llava dinov2"].build().double(), double(CASES["llava"].inputs())
    small = resized(inputs["pixel_values"][0].float(), 28, 28).double()[None]
    states = model.model.vision_tower(small, output_hidden_states=True).hidden_states[-2][:, 1:]
    with attach(model, "resize", 5) as attached:
        model(**inputs)
        (outcome,) = attached.outcomes
    assert (outcome.before, outcome.after) == (16, 4)
    expected = model.model.multi_modal_projector(states)[0]
    assert torch.allclose(outcome.reductions[0][1].tokens[0], expected, atol=1e-9)


# ---- cells

ROWS, COLUMNS = 4, 6  # of cells
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
needs_places = pytest.mark.skipif(VERSION < (5, 23), reason="the tower of Qwen3-VL is given places since 5.23")


def picture(*images: Tensor, clip: bool = False) -> dict[str, Any]:
    """A prompt about images, or clips, of cells [rows, columns, V / 2], whose two frames are the same."""
    shown, (word, kind, end) = [], (VIDEO, "video", "_videos") if clip else (IMAGE, "image", "")
    for cells in images:
        (rows, columns), pixels = cells.shape[:2], cells.reshape(-1, 3, 1, 256).expand(-1, -1, 2, -1).reshape(-1, 1536)
        given = {f"pixel_values{end}": pixels, f"{kind}_grid_thw": torch.tensor([[1, 2 * rows, 2 * columns]])}
        shown.append(Picture([START, *[word] * rows * columns, END], given))
    return prompts([1, 5, *shown, 7, 8])


@pytest.fixture(scope="module")
def model() -> Any:
    return CASES["qwen3_vl"].build()


@needs_places
def test_a_picture_of_different_cells_is_read_bit_for_bit(model: Any) -> None:
    inputs = picture(noise(ROWS, COLUMNS, 12 * 256, seed=1))
    plain = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    logits = model(**inputs).logits
    with attach(model, "pixelprune", tokens=1) as attached:
        given = decoder_given(model, inputs)
        assert torch.equal(given["inputs_embeds"][0, 3:-3], torch.cat(list(plain.pooler_output)))
        for one, other in zip(given["deepstack_visual_embeds"], plain.deepstack_features, strict=True):
            assert torch.equal(one, torch.cat(list(other)))
        assert torch.equal(model(**inputs).logits, logits) and attached.outcomes[0].after == ROWS * COLUMNS


@needs_places
def test_a_picture_within_its_budget_stays_whole_beside_another_and_a_clip_is_refused(model: Any) -> None:
    inputs = picture(cells := torch.ones(ROWS, COLUMNS, 12 * 256), cells[:2, :3])
    _, plain = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
    with attach(model, "pixelprune", tokens=6) as attached:
        assert torch.allclose(decoder_given(model, inputs)["inputs_embeds"][0, 6:12], plain, atol=1e-5)
        assert [one[1:3] for one in attached.outcomes] == [(ROWS * COLUMNS, 1), (6, 6)]
        with pytest.raises(OptionError, match="PixelPrune is for images, and this prompt shows a video"):
            model(**picture(cells, clip=True))


@needs_places
def test_cells_that_stay_go_through_the_tower_alone(model: Any) -> None:
    cells = noise(ROWS, COLUMNS, 12 * 256, seed=2)
    cells[1:, 2:] = cells[0, 1]  # the first of each row is predicted by the one left of it, which differs
    cells[0, 3] = cells[0, 2]
    inputs, visual = picture(cells), model.model.visual
    stays = torch.ones(ROWS * COLUMNS, dtype=torch.bool)
    stays[3] = False
    stays.view(ROWS, COLUMNS)[1:, 2:] = False
    stays.view(ROWS, COLUMNS)[1:, 2] = True
    patches = stays.repeat_interleave(4)
    states: dict[str, Any] = {}
    with visual.blocks[0].register_forward_pre_hook(
        lambda block, args, given: states.update(given, hidden=args[0]), with_kwargs=True
    ):
        visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    hidden = states["hidden"][patches]
    turned = tuple(one[patches] for one in states["position_embeddings"])
    ends = torch.tensor([0, len(hidden)], dtype=torch.int32)
    for block in visual.blocks:
        hidden = block(hidden, cu_seqlens=ends, position_embeddings=turned)
    full = decoder_given(model, inputs)["position_ids"][-3:]
    with attach(model, "pixelprune", tokens=1) as attached:
        given = decoder_given(model, inputs)
        assert model.generate(**inputs, max_new_tokens=3, do_sample=False).shape[1] == inputs["input_ids"].shape[1] + 3
    found = given["inputs_embeds"][0, 3:-3]
    assert torch.allclose(found, visual.merger(hidden), atol=1e-5)
    rows = torch.ones(inputs["input_ids"].shape[1], dtype=torch.bool)
    rows[inputs["input_ids"][0] == IMAGE] = stays
    assert torch.equal(given["position_ids"][-3:], full[..., rows])
    assert attached.outcomes[0].after == int(stays.sum()) == len(found)


@needs_places
def test_the_next_method_of_a_composition_is_given_the_cells_that_stay(model: Any) -> None:
    """DivPrune by its own function on the rows that PixelPrune has left; ConsensusDrop as alone where none leaves."""
    cells = noise(ROWS, COLUMNS, 12 * 256, seed=4)
    plain = picture(cells.clone())
    cells[1:3] = cells[0]
    inputs, caught = picture(cells), list[Tensor]()
    first_layer = model.model.language_model.layers[0]
    for name, tokens in (("pixelprune", 1), ("pixelprune+divprune:positions=keep", 5)):
        note = first_layer.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
        with note, attach(model, name, tokens=tokens) as attached:
            model(**inputs)
    assert [one[:3] for one in attached.outcomes] == [(0, ROWS * COLUMNS, 5)]
    first, last = 3, caught[0].shape[1] - 3
    kept = spread_out(caught[0][:, first:last], 5)[0].sort().values
    assert last - first == 2 * COLUMNS, "two rows of cells repeat the first"
    assert torch.equal(caught[1][0, first:-3], caught[0][0, first:last][kept])
    logits = []
    for name in ("consensusdrop", "pixelprune+consensusdrop:positions=keep"):
        with attach(model, name, tokens=5):
            logits.append(model(**plain).logits[:, -1])
    assert torch.equal(*logits)
