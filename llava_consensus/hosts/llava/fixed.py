"""Official LLaVA answering in fixed shapes: its prompts for `hosts.fast`."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llava_consensus.hosts.base import Tiles
from llava_consensus.hosts.fast.phases import Plan
from llava_consensus.hosts.fast.request import DeclinedError, Request, choice_of, unpadded
from llava_consensus.hosts.layouts import STOCK, check_tiles
from llava_consensus.hosts.llava.prepare import LIMIT, PREPARE, changed, joined, prompt_fingerprints
from llava_consensus.hosts.llava.structure import Arguments, structure_key
from llava_consensus.hosts.sequence.splice import Sequence
from llava_consensus.reduction.tokens import Need

if TYPE_CHECKING:
    from llava_consensus.hosts.attachment import Attachment
    from llava_consensus.hosts.call import Call

NAMES = ("inputs", "images", "image_sizes", "attention_mask", "position_ids")


class FixedLlava:
    """The prompts of an attached LLaVA, see `hosts.fast.phases.FixedHost`."""

    def __init__(self, attachment: "Attachment", view: Any) -> None:
        self.attachment, self.view = attachment, view

    def request(self, arguments: dict[str, Any], call: "Call") -> Request:
        """Ids [R, L] with `IMAGE_TOKEN_INDEX` for a picture, and the pictures as the official function takes them."""
        from llava.constants import IMAGE_TOKEN_INDEX

        about = {name: arguments.get(name) for name in NAMES}
        choice = choice_of(self.view.module, {name: value for name, value in arguments.items() if name not in NAMES})
        ids, images = about["inputs"], about["images"]
        if ids is None or about["position_ids"] is not None:
            raise DeclinedError("generate() without ids, or with positions")
        rows = unpadded(ids, about["attention_mask"])
        if images is None or ids.shape[1] == 1:
            return Request(rows, IMAGE_TOKEN_INDEX, choice, None, [])
        config = changed(self.view.config, call.settings)
        given = Arguments(ids, None, None, None, None, images, about["image_sizes"])
        ragged = len({len(row) for row in rows}) > 1 or (len(rows) > 1 and len(set(given.tiles)) > 1)
        if ragged and getattr(config, "tokenizer_padding_side", "right") != "left":
            raise DeclinedError(
                "tokenizer_padding_side is not 'left': prompts of a batch would be answered from padding"
            )
        pixels = given.pixels if call.encoded is None else None
        return Request(rows, IMAGE_TOKEN_INDEX, choice, pixels, given.tiles, given)

    def plan(self, request: Request, ids: Tensor, real: Tensor, call: "Call") -> Plan:
        """By the official function, as without `fast`: once for a structure."""
        view, attachment = self.view, self.attachment
        if request.given is None:
            return _words_alone(view.module, real)
        if view.layout != STOCK:
            check_tiles(request.tiles)
        config = changed(view.config, call.settings, {"tokenizer_padding_side": "right"})
        limit, config = getattr(config, LIMIT, None), changed(config, {LIMIT: None})
        given = Arguments(ids, None, real.long(), None, None, request.given.images, request.given.image_sizes)
        official = getattr(type(view.module), PREPARE)
        key = structure_key(given, config)
        structure = attachment.structures.get(key, lambda: view.structure(attachment, official, given, config))
        layout, device = attachment.layout(structure.kinds, key), view.module.device
        on_device = structure._replace(source=layout.once(("source", device), lambda: structure.source.to(device)))

        def rows(call: "Call", ids: Tensor, words: Tensor, tiles: list[Tiles]) -> Sequence:
            embeds = on_device.embeddings(view.module, ids, joined(tiles))
            full = Sequence(embeds, layout.real_on(device), layout.places_on(device))
            if not layout.reduced():
                attachment.pass_by(call, layout)
                return full
            prompts = None
            if Need.FINGERPRINT in attachment.method.needs:
                prompts = prompt_fingerprints(Arguments(ids, None, words, None, None, None))
            return attachment.reduce(call, full, layout, tiles, prompts)

        return Plan(key, rows, limit)

    def encode(self, pixels: Tensor, tiles: list[int]) -> list[Tiles]:
        """Pictures as methods see them."""
        seen: list[Tiles] = self.view.seen(self.attachment.run_tower(pixels, tiles))
        return seen

    def result(self, request: Request, answers: Tensor) -> Tensor:
        """The answers alone, as transformers 5 returns of prompts that are embeddings."""
        return answers


def _words_alone(model: Any, real: Tensor) -> Plan:
    """Prompts without pictures."""
    words, on_device = model.get_model().embed_tokens, real.to(model.device)

    def rows(call: "Call", ids: Tensor, _: Tensor, tiles: list[Tiles]) -> Sequence:
        return Sequence(words(ids), on_device, torch.zeros_like(ids))

    return Plan(("words", real.numpy().tobytes()), rows)
