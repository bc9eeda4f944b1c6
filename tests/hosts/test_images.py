"""The image the user passed is the unit of a budget, for what the families' own processors made of images
(tests/golden/processed_images.npz).
"""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import CLIP, NEXT, ONEVISION, built, noise, vip_llava
from hf_models import IMAGE as PLACEHOLDER

from llava_consensus import attach
from llava_consensus.hosts.images import STRUCTURAL, Image, family_of, images_of, one_image, parts_of
from llava_consensus.hosts.inputs import pixels_of_images, pixels_of_tile
from llava_consensus.hosts.kernels import KernelCall
from llava_consensus.hosts.outcomes import ImageOutcome, joined_parts
from llava_consensus.hosts.patch_map import Mixed, _pooled, patch_map, resampled, sides_of, visible

FILE = Path(__file__).parents[1] / "golden" / "processed_images.npz"
IMAGE = 1000  # id of placeholders
NEWLINES = ("llava_next", "llava_onevision")  # families with rows that are no candidates


@cache
def arrays() -> dict[str, np.ndarray]:
    with np.load(FILE) as file:
        return dict(file)


KINDS = list(dict.fromkeys(name.split("/")[0] for name in arrays() if "/" in name))


def processed(kind: str, prompt: str) -> tuple[dict[str, Any], list[int]]:
    """What a processor made of the images of a prompt, with noise for pixels, and the tokens of each image."""
    start = f"{kind}/{prompt}/"
    own = {name.removeprefix(start): value for name, value in arrays().items() if name.startswith(start)}
    counts = own.pop("counts").tolist()
    inputs: dict[str, Any] = {}
    for name, value in own.items():
        if "/" not in name:
            inputs[name] = torch.from_numpy(value.astype(np.int64))
        elif name.endswith("/shape"):
            name = name.removesuffix("/shape")
            pixels = torch.randn(*value.tolist(), generator=torch.Generator().manual_seed(0))
            for number, tiles in enumerate(own.get(f"{name}/tiles", [])):
                pixels[number, tiles:] = 0
            if f"{name}/cells" in own:
                cells = torch.from_numpy(own[f"{name}/cells"].astype(np.float32))
                pixels = torch.nn.functional.interpolate(cells, size=tuple(value[-2:]), mode="bilinear")
            inputs[name] = pixels
    return inputs, counts


def base_of(kind: str) -> Any:
    """Stands for the model of a family: the configuration that its processor goes with."""
    names = {"model_type": kind, "image_token_id": IMAGE, "boi_token_index": IMAGE + 1, "eoi_token_index": IMAGE + 2}
    if kind == "pixtral":
        names |= {"model_type": "llava", "vision_config": SimpleNamespace(model_type="pixtral")}
    if kind not in NEWLINES:
        return SimpleNamespace(config=SimpleNamespace(**names))
    if kind == "llava_next":
        pins = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
        sizes = {"vision_config": CLIP | {"image_size": 336}, "image_grid_pinpoints": pins}
        return built(kind, **NEXT | sizes | {"image_token_index": IMAGE}).model
    pins = [[384 * a, 384 * b] for a in range(1, 7) for b in range(1, 7)]
    sizes = {"vision_config": ONEVISION["vision_config"] | {"image_size": 384}, "image_grid_pinpoints": pins}
    return built(kind, **ONEVISION | sizes | {"image_token_index": IMAGE, "vision_aspect_ratio": "anyres_max_9"}).model


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_what_the_user_passed(kind: str) -> None:
    base = base_of(kind)
    assert family_of(base.config).known, "nothing is guessed"
    for prompt in ("one", "several", "batch"):
        inputs, counts = processed(kind, prompt)
        ids = inputs.pop("input_ids").numpy()
        record = SimpleNamespace(inputs=inputs, count=sum(counts))
        ((_, _, images, beams),) = images_of(base, base.config, {"image": [record]}, ids)
        assert [len(image.places) for image in images] == counts and beams == 1
        first = 0
        for image in images:
            real = image.token != STRUCTURAL
            assert (ids[image.row, image.places] == IMAGE).all() and image.first == first
            assert image.tile.max() + 1 == image.tiles
            assert len({*zip(image.tile[real].tolist(), image.token[real].tolist(), strict=True)}) == int(real.sum())
            assert real.all() or kind in NEWLINES
            first += image.tiles


def test_crops_are_told_from_several_images_by_pixels() -> None:
    """Gemma 3: ids of a view and its two crops, once with pixels of three images."""
    inputs, counts = processed("gemma3", "one")
    ids, base = inputs.pop("input_ids").numpy(), base_of("gemma3")
    record = SimpleNamespace(inputs=inputs, count=sum(counts))
    for tiles in ([3], [1, 1, 1]):
        ((_, _, images, _),) = images_of(base, base.config, {"image": [record]}, ids)
        assert [image.tiles for image in images] == tiles
        inputs["pixel_values"] = inputs["pixel_values"].flip(0)


def test_a_type_without_an_entry_says_so() -> None:
    """Each run of placeholders counts as one image, and a budget that reduces nothing warns once."""
    model, image = vip_llava(), [PLACEHOLDER] * 16
    ids = torch.tensor([[5, 6, *image, 7, *image, 8]])
    with attach(model, "divprune", tokens=16) as attached, pytest.warns(UserWarning, match="per tile") as warned:
        for _ in range(2):
            model(input_ids=ids, pixel_values=noise(2, 3, 56, 56, seed=0))
    assert len(warned) == 1
    assert "per tile" in repr(attached)


def call(entries: int, positions: int, mask: Any = None, lengths: Any = None) -> KernelCall:
    heads = torch.zeros(entries, 1, positions, 2)
    return KernelCall(torch.nn.Identity(), heads, heads, heads, mask, {"cu_seq_lens_q": lengths}, None)


def test_rows_of_a_resampler_are_numbered_in_each_tile() -> None:
    """An image of one tile and one of two, each tile an entry of the call, with four queries."""
    one, two = resampled(call(3, 4, torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1], [0, 1, 1, 1]])), 4, [4, 8])
    assert (one.tile.tolist(), one.token.tolist(), one.tiles, one.size) == ([0] * 4, [0, 1, 2, 3], 1, 4)
    assert (two.tile.tolist(), two.token.tolist(), two.tiles, two.size) == ([0] * 4 + [1] * 4, [0, 1, 2, 3] * 2, 2, 4)
    found = [(tile.entry, tile.position.tolist()) for own in (one, two) for tile in own.patches]
    assert found == [(0, [0, 1, 2]), (1, [0, 1, 3]), (2, [1, 2, 3])]


def test_a_position_sees_what_its_mask_or_the_lengths_say() -> None:
    seen = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)
    added = torch.where(seen, 0, torch.finfo(torch.float32).min)
    for own in (call(2, 3, seen[None, None]), call(2, 3, added[None, None]), call(2, 3, None, torch.tensor([0, 2, 3]))):
        assert [visible(own, 1, place).tolist() for place in range(3)] == seen.tolist()
    assert [visible(call(3, 3, added[:, None, None]), entry, 1).tolist() for entry in range(3)] == seen.tolist()


SHARES = [[[1, 0, 1, 0], [0, 1, 0, 1]], [[0, 1, 0, 1], [1, 0, 1, 0]]]
TILES: list[Any] = [  # rows that the tiles of the second image feed, the patches of each token, or their shares
    ([-1, 5, 6, 5, 6, -1, 8, 7, 8, 7], None, SHARES),
    ([-1, 6, 5, 6, 5, -1, 8, 7, 8, 7], [[1, 3], [0, 2]], None),
    ([-1, 5, 5, 5, 6, -1, 7, 7, 7, 8], None, [[[1, 1, 1, 0], [0, 0, 0, 1]]] * 2),
]


@pytest.mark.parametrize(("second", "members", "shares"), TILES)
def test_tiles_in_one_entry_are_told_apart(second: Any, members: Any, shares: Any) -> None:
    """Of an image with a newline, its third row, and one of two tiles, each behind a class token."""
    rows = torch.tensor([[-1, 0, 1, 3, 4, *second]])
    (one, two), classes = patch_map([call(1, 15, None, torch.tensor([0, 5, 10, 15]))], [rows], [5, 4], [0, 0])
    assert (classes, one.token.tolist(), one.members, one.pooling) == (1, [0, 1, STRUCTURAL, 2, 3], None, None)
    assert [own[:3:2] + own[5:7] for own in (one, two)] == [(one.tile, 1, 2, 4), (two.tile, 2, 0, 2)]
    assert (two.tile.tolist(), two.token.tolist()) == ([0, 0, 1, 1], [0, 1, 0, 1])
    assert [tile.position.tolist() for tile in two.patches] == [list(range(5, 10)), list(range(10, 15))]
    assert members == (None if two.members is None else two.members.tolist())
    expected = None if shares is None else torch.nn.functional.normalize(torch.tensor(shares).float(), 1, -1)
    assert expected is two.pooling or torch.equal(two.pooling, expected)


def test_positions_that_feed_several_rows_are_shares_of_each() -> None:
    """Every row of a tile is of two patches behind the class token; the second image begins at row three."""
    near = torch.tensor([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 1], [0, 0, 1]])
    feeds = torch.block_diag(near, near, near).view(3, 5, 9).bool()[[0, 2, 1]]
    (one, two), classes = patch_map([call(3, 5)], [feeds], [3, 6], [3, 0])
    assert (classes, one.side, one.tiles, two.side, two.tiles, two.size) == (1, 3, 1, 0, 2, 3)
    assert (two.tile.tolist(), two.token.tolist()) == ([0] * 3 + [1] * 3, [0, 1, 2] * 2)
    assert [tile.entry for tile in two.patches] == [2, 1]
    for own in (one, two):
        assert own.pooling is not None and own.pooling.tolist() == [(near[1:].T / 2).tolist()] * own.tiles


def test_a_token_that_several_tiles_feed_is_of_the_first() -> None:
    tiles: Any = [SimpleNamespace(row=torch.tensor(rows), feeds=None) for rows in ([0, 1], [1, 2])]
    assert [found.tolist() for found in _pooled(tiles, 3, 0)[:2]] == [[0, 0, 1], [0, 1, 0]]


def test_what_is_no_tile_is_named() -> None:
    blocks = torch.block_diag(*map(torch.ones, ((1, 1), (2, 2), (1, 1))))
    for rows, mask, why in (([0, 1, 0, 1], torch.ones(4, 4), "no position feeds alone"),
                            ([0, 1, 1, 2], blocks, "differ in size"),
                            ([0, 1, 2, 2], 1 - torch.eye(4), "does not see itself")):  # fmt: skip
        with pytest.raises(Mixed, match=why):
            patch_map([call(1, 4, mask[None, None].bool())], [torch.tensor([rows])], [2, 1], [0, 0])


def test_the_grid_of_an_image_is_what_its_processor_says() -> None:
    grid, places = torch.tensor([[1, 4, 6], [1, 8, 4]]), torch.tensor([[[5, 3], [2, 0]], [[3, 7], [-1, -1]]])
    one, two = {"p": torch.ones(2, 3), "n": grid[:, 1], "b": grid[:, None], "g": grid}, {"a": grid[:, :1], "g": grid}
    assert sides_of(one, [6, 8]) == sides_of({"a": grid + 1, "g": grid[:, 1:]}, [6, 8]) == [3, 2]
    assert sides_of({"f": grid[:, None, :2, None], "p": places}, [6, 8]) == [3, 2] and sides_of(two, [24, 8]) == [6, 2]
    assert sides_of(one, [6, 7]) == [0, 0] and sides_of(one, [6]) == [0]


def test_tiles_of_several_sizes_are_parts_that_are_joined_again() -> None:
    tile, token = np.repeat([0, 1, 2], [4, 3, 2]), np.array([*range(4), *range(3), *range(2)])
    parts = parts_of(Image(0, np.arange(9), tile, token, 3, False, 5))
    assert [(part.first, part.part) for part in parts] == [(5, (0, 3)), (6, (1, 3)), (7, (2, 3))]
    origins = [(torch.from_numpy(part.tile), torch.from_numpy(part.token)) for part in parts]
    outcomes = [ImageOutcome(0, 1, 1, 0, (), (), own, n) for n, own in enumerate(origins)]
    other, whole = joined_parts([ImageOutcome(0, 7, 7, 0, (), ()), *outcomes])
    assert torch.equal(torch.stack(whole.origin), torch.from_numpy(np.stack((tile, token)))) and other.before == 7
    newline = Image(0, np.arange(9), tile, np.where(token == 3, STRUCTURAL, token), 3, False, 5)
    assert parts_of(newline) == [newline], "tiles with more than their tokens are no parts"


def test_pixels_of_a_tile_are_found_by_what_the_processor_gives() -> None:
    """Of the second tile of an image whose first one is the second of all."""
    image, tiles = one_image(0, np.arange(4))._replace(first=1, tiles=2), torch.arange(1.0, 4 * 48 + 1).view(4, 3, 4, 4)
    padded, rows = torch.stack((tiles, tiles + 200)), tiles.view(16, 12)
    padded[0, 1:] = 0  # the first image has one tile
    sizes, grid = torch.tensor([[4, 4], [4, 4], [2, 3], [4, 4]]), torch.tensor([[1, 2, 1], [2, 1, 3], [1, 2, 4]])
    for given, expected in (
        ({"pixel_values": tiles}, tiles[2:3]),
        ({"pixel_values": padded}, padded[1, 1:2]),
        ({"pixel_values": tiles, "image_sizes": sizes}, tiles[2:3, :, :2, :3]),
        ({"pixel_values": rows, "image_grid_thw": grid}, rows[None, 5:8]),
    ):
        assert torch.equal(pixels_of_tile(image, given, 1), expected)
    assert not torch.equal(*pixels_of_images({"pixel_values": tiles[:3]}, [1, 1]))  # whose parts are not known
