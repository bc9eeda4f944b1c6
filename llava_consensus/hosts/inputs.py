"""The inputs of a method (`VisualTokens`), built at the entrance of the language model."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llava_consensus.errors import NonFiniteError, OptionError
from llava_consensus.hosts.images import PIXELS, STRUCTURAL, Image, Integers
from llava_consensus.hosts.kernels import KernelCall, first_attention
from llava_consensus.hosts.prompts import Prompt
from llava_consensus.hosts.rows import padded_columns, upload
from llava_consensus.hosts.tower import EARLIER
from llava_consensus.hosts.units import Reduced, Unit, UnitBatch, prompt_hash, visual_rows
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import (
    ClipSides,
    Need,
    Stopwatch,
    TextProbe,
    VisionAttention,
    VisualTokens,
    WholeImages,
    Words,
)

KEPT = "positions of three axes are kept"
NO_TEXT = "no text after the image: reduced by vision saliency alone"
BY_WORDS = "no CLIP text tower: relevance by the language model's own embeddings of the words after the image"
NO_WORDS = "no text after the image: all tokens are equally relevant"
ALWAYS = frozenset({Need.PROBE, Need.FINGERPRINT, Need.QUESTION, Need.WORDS, Need.WHOLE_IMAGES})


def needs_of(prompt: Prompt, method: Method, model: Any, projects: bool, short: str = "") -> frozenset[Need]:
    """Parts that a method reads on this model: its `needs`, or its `instead` on a tower that does not give all of them.

    Args:
        projects: whether the model's projector takes patches one by one.
        short: why the tower lacks the attention that the method reads.
    Raises:
        OptionError: for a part that cannot be read.
    """
    offered = set(ALWAYS)
    if all("key" in tiles.parts for tiles in prompt.tiles):
        offered |= {Need.ATTENTION, Need.FEATURES, Need.EARLIER}
        if prompt.tiles and prompt.tiles[0].classes:
            offered.add(Need.CLASS_FEATURE)
    if projects:
        offered.add(Need.PROJECTOR)
    if short and not method.needs - offered and Need.CLASS_FEATURE in offered:  # then another block can be read
        raise OptionError(short)
    return needs_among(offered, method, type(model).__name__, short)


def check_finite(prompt: Prompt, embeds: Tensor) -> None:
    """Raises NonFiniteError for an image whose tower cannot be read as its numbers are not finite."""
    for number, image in enumerate(prompt.images):
        (places,) = upload([image.places], embeds.device)
        if not bool(embeds[image.row, places].isfinite().all()):
            raise NonFiniteError(
                f"image {number} of prompt {image.row}: NaN or infinite values. Check the pixels and weights"
            ) from None


def needs_among(offered: Set[Need], method: Method, model: str, why: str = "") -> frozenset[Need]:
    """The `needs` of a method, or its `instead` on a model that does not offer all of them, or for the reason `why`.

    Raises:
        OptionError: for a part that the vision side of the model does not have.
    """
    swaps = method.instead is not None and (why or method.needs - offered)
    needs: frozenset[Need] = method.instead if swaps else method.needs  # type: ignore[assignment]
    if missing := needs - offered:
        names = ", ".join(sorted(need.name.lower() for need in missing))
        raise OptionError(
            f"{type(method).__name__} needs {names}, which the vision side of {model} does not have"
            f"{f' ({why})' if why else ''}: take another method (llava-consensus list)"
        )
    return needs


@dataclass(eq=False)
class Inputs:
    """Everything a method may ask for in one forward."""

    prompt: Prompt
    embeds: Tensor  # [R, S, D] as the language model would read them
    method: Method
    needs: frozenset[Need]  # parts that the method reads, see `needs_of`
    project: Callable[[Tensor], Tensor] | None = None  # the model's projector
    clip: Callable[[list[int]], ClipSides] | None = None  # see `Attachment._clip_sides`
    probe: TextProbe | None = None
    asked: Sequence[Integers] = ()  # text columns of each prompt whose queries the probe has

    def __post_init__(self) -> None:
        self.watch = Stopwatch(self.embeds.device)

    @property
    def notes(self) -> tuple[str, ...]:
        silent = any(not len(text) for text in self.prompt.text)
        by_words = Need.QUESTION in self.needs and self.clip is None
        return (
            (NO_TEXT,) * (silent and Need.PROBE in self.needs)
            + (BY_WORDS,) * by_words
            + (NO_WORDS,) * (silent and by_words)
        )

    def read_probe(
        self, decoder: nn.Module, arguments: dict[str, Any], read: Callable[..., KernelCall] = first_attention
    ) -> None:
        """Queries and keys of the first attention layer, read before the language model runs (SCAP).

        Args:
            read: gives them of a decoder and its arguments, rotated or not, for rows that ask.
        """
        if Need.PROBE not in self.needs:
            return
        with self.watch.time("probe"), torch.autocast(self.embeds.device.type, enabled=False), torch.no_grad():
            asking = self.asking_rows()
            call = read(decoder, arguments, getattr(self.method, "scap_rope", True), asking[:2])
            self.probe = self.probe_of(call, *asking)

    def probe_of(
        self, call: KernelCall, which: Tensor, where: Tensor, mask: Tensor, keys: Tensor | None, padded: bool
    ) -> TextProbe:
        query = call.query.transpose(1, 2)[which, where].transpose(1, 2)  # [R, H, L, d]
        turned = call.key.new_empty(len(query), call.key.shape[2], 0)  # queries and keys are rotated already
        cap = float(call.options.get("softcap") or 0.0)
        more = call.extra(which, where, call.key.shape[2])
        return TextProbe(query, call.key, turned, turned, call.scale, where, mask, keys, padded, cap, **more)

    def asking_rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
        """Rows [R, 1] and columns [R, L] of the text that asks about images, which of these are no padding, which rows
        [R, S] of the prompts are none, and whether any of the former is.
        """
        rows, texts = len(self.prompt.real), []
        for row in range(rows):
            own = [text for image, text in zip(self.prompt.images, self.prompt.text, strict=True) if image.row == row]
            texts.append(np.unique(np.concatenate(own)) if own else np.zeros(0, dtype=np.int64))
        self.asked, (columns, real) = texts, padded_columns(texts)
        number = np.arange(rows)[:, None]
        where, which, mask, keys = upload([columns, number, real, self.prompt.real], self.embeds.device)
        return which, where, mask.bool(), None if self.prompt.real.all() else keys.bool(), not bool(real.all())

    def batches(self, units: list[Unit]) -> list[UnitBatch]:
        """Units that go through the method together: equal in shapes and needs. One at a time if their numbers of
        tokens are not known beforehand.
        """
        groups: dict[Any, list[Unit]] = {}
        for number, unit in enumerate(units):
            tiles = self.prompt.tiles[unit.image]
            shapes = tuple(value.shape[1:] for value in tiles.parts.values())
            asked = Need.PROBE in self.needs and bool(len(self.prompt.text[unit.image]))
            key = len(unit.places), unit.tiles, unit.budget, tiles.size, shapes, tiles.side, asked
            groups.setdefault((number,) if self.method.adaptive else key, []).append(unit)
        return self.indexed(list(groups.values()))

    def indexed(self, groups: list[list[Unit]]) -> list[UnitBatch]:
        """Groups of units with their indices, in one copy to the device."""
        arrays, every, size = [], [], self.prompt.real.shape[1]
        for units in groups:
            images = list(dict.fromkeys(unit.image for unit in units))
            counts = [self.prompt.tiles[image].count for image in images]
            first = dict(zip(images, np.cumsum([0, *counts]).tolist(), strict=False))
            rows = np.array([self.prompt.images[unit.image].row for unit in units])
            columns = np.stack([unit.places for unit in units])
            every.append(images)
            arrays += [
                columns,
                rows[:, None] * size + columns,
                np.stack([unit.tile + first[unit.image] for unit in units]),
                np.stack([unit.token for unit in units]),
                np.array([unit.image for unit in units]),
                rows,
            ]
        moved = iter(upload(arrays, self.embeds.device) if arrays else [])
        return [
            UnitBatch(units, *(next(moved) for _ in range(6)), images)  # type: ignore[call-arg, arg-type]
            for units, images in zip(groups, every, strict=True)
        ]

    def reduce(self, units: list[Unit]) -> list[Reduced]:
        found = []
        # autocast would compute saliencies in half precision, and training would keep other tokens than an answer does
        with torch.autocast(self.embeds.device.type, enabled=False):
            for batch in self.batches(units):
                with self.watch.time("gather"):
                    tokens = self.tokens(batch)
                watch = Stopwatch(self.embeds.device)
                try:
                    with watch.time("method"):
                        reduction = self.method.reduce(tokens, batch.units[0].budget)
                except NonFiniteError as error:
                    raise NonFiniteError(self._named(error, tokens.projected, batch)) from error
                found.append(Reduced(batch, reduction if reduction.watch else reduction._replace(watch=watch)))
        return found

    def _named(self, error: Exception, projected: Tensor, batch: UnitBatch) -> str:
        """The message with the images whose tokens are not finite, as they are if anything in the tower is not."""
        bad = [unit.image for unit, own in zip(batch.units, projected, strict=True) if not bool(own.isfinite().all())]
        names = ", ".join(f"image {image} of prompt {self.prompt.images[image].row}" for image in sorted(set(bad)))
        return f"{names}: {error}" if names else str(error)

    def tokens(self, batch: UnitBatch) -> VisualTokens:
        units, images, device = batch.units, batch.images, self.embeds.device
        own, needs = self.prompt.tiles[units[0].image], self.needs
        flat = self.embeds.flatten(0, 1)
        which: Tensor | None = None
        words = None
        if needs & {Need.WORDS, Need.QUESTION}:
            text, real = self._words(images)
            place = [images.index(unit.image) for unit in units]
            each = [i for i, image in enumerate(images) for _ in range(self.prompt.tiles[image].count)]
            which, tile_of = upload([np.array(place), np.array(each)], device)
            words = Words(text[which], real[which])
        clip = None
        if Need.QUESTION in needs:
            clip = self.clip(images) if self.clip is not None else self._by_words(images, text[tile_of], real[tile_of])
        return VisualTokens(
            projected=flat[batch.flat],
            tile=batch.tile,
            patch=batch.patch,
            tiles_per_unit=units[0].tiles,
            side=own.side,
            members=None if own.members is None else own.members.to(device),
            image=batch.image,
            prompt=batch.row,
            columns=batch.columns,
            attention=self._attention(images, "", own.scale) if Need.ATTENTION in needs else None,
            earlier=self._attention(images, EARLIER, own.early_scale) if Need.EARLIER in needs else None,
            features=self._part(images, "features") if Need.FEATURES in needs else None,
            class_feature=self._part(images, "class_feature") if Need.CLASS_FEATURE in needs else None,
            project=self.project if Need.PROJECTOR in needs else None,
            clip=clip,
            words=words if Need.WORDS in needs else None,
            probe=self._probe_of(units[0]),
            asking=self._asking(units),
            fingerprint=self._fingerprint(units) if Need.FINGERPRINT in needs else None,
            whole=self._whole(images) if Need.WHOLE_IMAGES in needs else None,
            pooling=self._part(images, "pooling") if "pooling" in own.parts else None,
            slot=self._part(images, "slot") if "slot" in own.parts else None,
        )

    def _part(self, images: list[int], name: str) -> Tensor:
        parts = [self.prompt.tiles[image].parts[name] for image in images]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self.embeds.device)

    def _attention(self, images: list[int], front: str, scale: float) -> VisionAttention:
        own = self.prompt.tiles[images[0]]
        query, key = (self._part(images, front + name) for name in ("query", "key"))
        return VisionAttention(query, key, scale, own.classes, own.places)

    def _words(self, images: list[int]) -> tuple[Tensor, Tensor]:
        """Embeddings of the text after each image [I, M, D], and which of them are real [I, M]."""
        columns, mask = padded_columns([self.prompt.text[image] for image in images])
        rows = np.array([[self.prompt.images[image].row] for image in images])
        where, row, real = upload([columns, rows, mask], self.embeds.device)
        return self.embeds[row, where], real.bool()

    def _by_words(self, images: list[int], text: Tensor, real: Tensor) -> ClipSides:
        """Both sides in the space of the language model's embeddings: all tiles of these images, and the words."""
        parts = []
        for image in images:
            own, size = self.prompt.images[image], self.prompt.tiles[image].size
            here = own.token >= 0
            where, slot = upload([own.places[here], own.tile[here] * size + own.token[here]], self.embeds.device)
            plane = self.embeds.new_zeros(self.prompt.tiles[image].count * size, self.embeds.shape[2])
            plane[slot] = self.embeds[own.row, where].detach()  # tokens that no prompt holds (unpadding) are zero
            parts.append(plane.unflatten(0, (-1, size)))
        return ClipSides(torch.cat(parts), text, real, words=True)

    def _probe_of(self, unit: Unit) -> TextProbe | None:
        """The probe, without text rows for units whose image no text follows."""
        probe = self.probe
        if probe is None or len(self.prompt.text[unit.image]):
            return probe
        return probe._replace(query=probe.query[:, :, :0], rows=probe.rows[:, :0], row_mask=probe.row_mask[:, :0])

    def _asking(self, units: list[Unit]) -> Tensor | None:
        """Which text rows of its prompt ask about a unit's image, [B, L]; None if all do."""
        if self.probe is None or not len(self.prompt.text[units[0].image]):
            return None
        mask = np.zeros((len(units), self.probe.rows.shape[1]), dtype=bool)
        for number, unit in enumerate(units):
            own = np.isin(self.asked[self.prompt.images[unit.image].row], self.prompt.text[unit.image])
            mask[number, : len(own)] = own
        return None if mask.all() else upload([mask], self.embeds.device)[0].bool()

    def _whole(self, images: list[int]) -> WholeImages:
        """The image each tile belongs to, and which of its tokens are in the prompt."""
        own, present = [], []
        for number in images:
            image, tiles = self.prompt.images[number], self.prompt.tiles[number]
            here, real = np.zeros((tiles.count, tiles.size), dtype=bool), image.token >= 0
            here[image.tile[real], image.token[real]] = True
            own.append(np.full(tiles.count, number))
            present.append(here)
        which, there = upload([np.concatenate(own), np.concatenate(present)], self.embeds.device)
        return WholeImages(which, there.bool())

    def _pixels(self, unit: Unit) -> Tensor:
        """Pixels of the first tile of a unit, or of its whole image if its processor's layout of tiles is not known."""
        image, inputs = self.prompt.images[unit.image], self.prompt.encoded[unit.image]
        if self.prompt.grouped:
            return pixels_of_tile(image, inputs, int(unit.tile[0]))
        beam = image.row % self.prompt.beams
        alike = [
            number
            for number, other in enumerate(self.prompt.images)
            if self.prompt.encoded[number] is inputs and other.row % self.prompt.beams == beam
        ]
        tiles = [self.prompt.images[number].tiles for number in alike]
        return pixels_of_images(inputs, tiles)[alike.index(unit.image)]

    def _hashes(self) -> Integers:
        """A number for each prompt."""
        prompt = self.prompt
        asks = prompt.real & (prompt.asks | visual_rows(prompt.images, prompt.real.shape))
        return prompt_hash(prompt.ids, asks, prompt.images)

    def _fingerprint(self, units: list[Unit]) -> Tensor:
        """A number for image and prompt, the same in every batch: [B]."""
        rows = [self.prompt.images[unit.image].row for unit in units]
        (own,) = upload([self._hashes()[rows]], self.embeds.device)
        pixels = [fingerprint(self._pixels(unit)) for unit in units]
        return torch.cat(pixels).to(own.device) ^ own


def pixels_of_tile(image: Image, inputs: dict[str, Any], tile: int) -> Tensor:
    modality = "video" if image.video else "image"
    pixels = next(inputs[name] for name in PIXELS[modality] if inputs.get(name) is not None)
    sizes, grid, number = inputs.get("image_sizes"), inputs.get(f"{modality}_grid_thw"), image.first + tile
    if grid is not None:  # rows of patches
        lengths = [height * width for time, height, width in grid.tolist() for _ in range(time)]
        start = sum(lengths[:number])
        return pixels[None, start : start + lengths[number]]
    if pixels.ndim == 5 and not image.video:  # tiles, padded to the most of them
        return pixels.flatten(0, 1)[(pixels != 0).flatten(2).any(2).flatten()][number : number + 1]
    if sizes is not None and pixels.ndim == 4:
        height, width = (int(size) for size in sizes[number])
        return pixels[number : number + 1, :, :height, :width]
    flat = pixels.flatten(0, -4) if pixels.ndim > 3 else pixels
    return flat[number : number + 1]


def pixels_of_images(inputs: dict[str, Any], tiles: list[int]) -> list[Tensor]:
    """The pixels of each image, [1, values] each: by entry if there is one for each image or tile, by rows in equal
    shares of a prompt's else.
    """
    pixels = next(value for name, value in inputs.items() if name.startswith("pixel_values") and value is not None)
    if len(pixels) == len(tiles):
        return [one.reshape(1, -1) for one in pixels]
    if len(pixels) == sum(tiles):
        return [one.reshape(1, -1) for one in pixels.split(tiles)]
    grids = [
        value.long().prod(-1).tolist()
        for value in inputs.values()
        if isinstance(value, Tensor) and value.ndim == 2 and len(value) == len(tiles) and not value.is_floating_point()
    ]
    for axis in range(pixels.ndim):
        for counts in grids:
            if pixels.shape[axis] == sum(counts):
                return [one.reshape(1, -1) for one in pixels.split(counts, axis)]
    return [torch.cat((pixels.reshape(1, -1), pixels.new_full((1, 1), number)), 1) for number in range(len(tiles))]


def fingerprint(values: Tensor) -> Tensor:
    """A number for each row of a tensor [T, ...] from its bits: int64 [T], the same in every batch and device."""
    if values.is_floating_point():
        values = values.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    flat = values.flatten(1).long()
    weight = torch.arange(flat.shape[1], device=flat.device) * 0x9E3779B97F4A7C1 | 1
    return (flat * weight).sum(1)  # int64 arithmetic wraps


def structural_rows(image: Image) -> int:
    return int((image.token == STRUCTURAL).sum())
