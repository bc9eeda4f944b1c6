"""Rows of the prompts of transformers models that hold visual tokens, and the features of these rows."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Tiles
from llava_consensus.hosts.sequence import RowKinds

STRUCTURAL, DROPPED = -1, -2  # in place of a token: a row that stays, and one that goes where a picture is reduced


class PictureRows(NamedTuple):
    """Tile and patch index of each row of one picture, in the order of the prompt, on the CPU."""

    tile: Tensor  # [n] of the picture
    token: Tensor  # [n] of the tile; STRUCTURAL or DROPPED for rows that are never candidates
    tiles: int


def whole_tiles(tiles: int, tokens: int) -> PictureRows:
    """The rows of a picture whose tiles stand one after the other."""
    place = torch.arange(tiles * tokens)
    return PictureRows(place // tokens, place % tokens, tiles)


class ModalityRows(NamedTuple):
    """The pictures of one modality, and the id of their placeholders."""

    modality: str
    placeholder: int
    pictures: list[PictureRows]


def row_kinds(
    ids: Tensor,
    real: Tensor,
    placed: list[ModalityRows],
    answer: Tensor | None,
    around: tuple[int, int] = (0, 0),
    markers: frozenset[int] = frozenset(),
) -> RowKinds:
    """Kind of every row of prompts [R, S]; pictures are numbered across all modalities. All on the CPU.

    Args:
        around: rows of markers that the processor puts in front of and behind each picture.
        markers: or their ids, where those say it.
    Raises:
        OptionError: where placeholders and pictures do not match.
    """
    picture, first, videos = torch.full(ids.shape, -1), 0, set[int]()
    for modality, placeholder, pictures in placed:
        at_placeholder = ids == placeholder
        count = sum(len(rows.token) for rows in pictures)
        if int(at_placeholder.sum()) != count:
            raise OptionError(
                f"the prompts hold {int(at_placeholder.sum())} placeholders (id {placeholder}) and {len(pictures)} "
                f"{modality}s make {count} tokens: pass input_ids and pixels of one call of the model's own processor, "
                "and truncate nothing"
            )
        if count:
            number = torch.cat([torch.full_like(rows.token, first + i) for i, rows in enumerate(pictures)])
            picture[at_placeholder] = number
        if modality == "video":
            videos |= set(range(first, first + len(pictures)))
        first += len(pictures)
    marked = _marked(ids, picture, markers) if markers else (around,) * first
    every = [rows for group in placed for rows in group.pictures]
    return kinds_of(real, picture, every, videos, marked)._replace(answer=answer)


def kinds_of(
    real: Tensor, picture: Tensor, pictures: Sequence[PictureRows], videos: Iterable[int], marked: Sequence[Any]
) -> RowKinds:
    """Kind of every row of prompts, given which picture each is of [R, S] and the rows of the pictures."""
    tile, token = torch.full_like(picture, -1), torch.full_like(picture, -1)
    for number, rows in enumerate(pictures):
        here = picture == number
        tile[here], token[here] = rows.tile, rows.token
    tile, counts = torch.where(token >= 0, tile, -1), tuple(rows.tiles for rows in pictures)
    return RowKinds(real, picture, tile, token, None, frozenset(videos), counts, tuple(marked))


def _marked(ids: Tensor, picture: Tensor, markers: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """Rows of these ids right in front of and behind each picture."""
    marker, found = torch.isin(ids, torch.tensor(list(markers))).long(), []
    for source in picture[picture >= 0].unique().tolist():
        row, places = (picture == source).nonzero().T
        front, behind = marker[row[0], : places[0]].flip(0), marker[row[0], places[-1] + 1 :]
        found.append((int(front.cumprod(0).sum()), int(behind.cumprod(0).sum())))
    return tuple(found)


def without_dropped(kinds: RowKinds) -> RowKinds:
    """The kinds of rows without those that go where a picture is reduced; `kinds` itself where there are none."""
    gone = kinds.token == DROPPED
    if not gone.any():
        return kinds
    return kinds._replace(real=kinds.real & ~gone, picture=kinds.picture.masked_fill(gone, -1))


def runs(ids: Tensor, placeholder: int) -> list[tuple[int, int, int]]:
    """Row, start and length of every unbroken run of placeholders in prompts [R, S], in order."""
    edges = torch.nn.functional.pad((ids == placeholder).int(), (1, 1)).diff(dim=1)
    starts, stops = (edges == 1).nonzero().tolist(), (edges == -1).nonzero().tolist()
    return [(row, start, stop - start) for (row, start), (_, stop) in zip(starts, stops, strict=True)]


def unbroken(ids: Tensor, placeholder: int, size: int) -> list[PictureRows]:
    """Pictures of prompts [R, S] whose tiles of `size` tokens follow each other: each run of placeholders is one."""
    pictures = []
    for row, start, length in runs(ids, placeholder):
        if length % size:
            raise _cut_off(row, start, length, size)
        pictures.append(whole_tiles(length // size, size))
    return pictures


def spaced(ids: Tensor, placeholder: int, size: int) -> list[PictureRows]:
    """Pictures of prompts [R, S] whose tiles are runs of placeholders, one row between them."""
    tiles: list[int] = []
    follows = (-1, -1)  # row of the batch and place where the next tile of the same picture begins
    for row, start, length in runs(ids, placeholder):
        tiles = [*tiles[:-1], tiles[-1] + 1] if (row, start) == follows else [*tiles, 1]
        follows = row, start + length + 1
    return [whole_tiles(count, size) for count in tiles]


def tagged(ids: Tensor, placeholder: int, size: int) -> list[PictureRows]:
    """Pictures of prompts [R, S] whose tiles have a tag in front. The last tile of a picture shows the whole of it and
    has the tag of the last tile of the prompt.
    """
    tile_runs, pictures, waiting = runs(ids, placeholder), [], 0
    last = {row: int(ids[row, start - 1]) for row, start, _ in tile_runs}
    for row, start, length in tile_runs:
        if length != size:
            raise _cut_off(row, start, length, size)
        waiting += 1
        if int(ids[row, start - 1]) == last[row]:
            pictures.append(whole_tiles(waiting, size))
            waiting = 0
    return pictures


def _cut_off(row: int, start: int, length: int, size: int) -> OptionError:
    return OptionError(
        f"prompt {row} has {length} placeholders from row {start} on, and a tile is {size} tokens: pass input_ids and "
        "pixels of one call of the model's own processor, and truncate nothing"
    )


class Features(NamedTuple):
    """Pictures of one modality after the tower."""

    tiles: list[Tiles]  # of each picture
    tokens: Tensor  # [all tokens, D] in the order of the placeholders
    planes: tuple[Tensor, ...] = ()  # [all tokens, D] each: what some models add between decoder layers
    output: Any = None  # what the encoder returned, where the model takes nothing plainer
