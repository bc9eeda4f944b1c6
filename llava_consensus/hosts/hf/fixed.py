"""`LlavaForConditionalGeneration` answering in fixed shapes: its prompts for `hosts.fast`."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llava_consensus.hosts.base import Tiles
from llava_consensus.hosts.fast.phases import Plan
from llava_consensus.hosts.fast.request import DeclinedError, Request, choice_of, unpadded
from llava_consensus.hosts.hf import seam
from llava_consensus.hosts.hf.model import Features, joined
from llava_consensus.hosts.hf.rows import Placed, row_kinds, whole_tiles
from llava_consensus.hosts.sequence.layout import content, fingerprints
from llava_consensus.hosts.sequence.splice import Sequence

if TYPE_CHECKING:
    from llava_consensus.hosts.attachment import Attachment
    from llava_consensus.hosts.call import Call

NAMES = ("inputs", "input_ids", "attention_mask", "pixel_values")


class FixedLlava:
    """The prompts of an attached model, see `hosts.fast.phases.FixedHost`."""

    def __init__(self, attachment: "Attachment", view: Any) -> None:
        self.attachment, self.view = attachment, view

    def request(self, arguments: dict[str, Any], call: "Call") -> Request:
        """Ids [R, L] with a placeholder for every token of a picture, and pixels."""
        about = {name: arguments.get(name) for name in NAMES}
        rest = {name: value for name, value in arguments.items() if name not in NAMES}
        choice = choice_of(self.view.module, rest)
        ids = about["input_ids"] if about["inputs"] is None else about["inputs"]
        if ids is None:
            raise DeclinedError("generate() without ids")
        mask = seam.unpadded(self.view, ids) if about["attention_mask"] is None else about["attention_mask"]
        pixels = about["pixel_values"] if call.encoded is None else None
        pictures = len(call.encoded or ()) if pixels is None else len(pixels)
        placeholder = self.view.placeholder("image")
        return Request(unpadded(ids, mask), placeholder, choice, pixels, [1] * pictures, ids)

    def plan(self, request: Request, ids: Tensor, real: Tensor, call: "Call") -> Plan:
        """By the placeholders in the ids."""
        view, attachment, device = self.view, self.attachment, self.view.module.device
        pictures = [whole_tiles(1, view.tower.tokens) for _ in request.tiles]
        kinds = row_kinds(ids, real, [Placed("image", request.placeholder, pictures)], None)
        key = content(kinds)
        layout = attachment.layout(kinds, key)
        picture = layout.once(("picture", device), lambda: kinds.picture.to(device))

        def rows(call: "Call", ids: Tensor, words: Tensor, tiles: list[Tiles]) -> Sequence:
            features = {"image": Features(tiles, joined([one.projected for one in tiles]))} if tiles else {}
            full = seam.assembled(view, {}, ids, layout.real_on(device), features)
            if not layout.reduced():
                attachment.pass_by(call, layout)
                return full
            return attachment.reduce(call, full, layout, tiles, fingerprints(*seam.once(ids, words, picture)))

        return Plan(key, rows)

    def encode(self, pixels: Tensor, tiles: list[int]) -> list[Tiles]:
        """Pictures of one tile each."""
        return self.attachment.run_tower(pixels, tiles)

    def result(self, request: Request, answers: Tensor) -> Tensor:
        """The original prompts with the answers behind them."""
        return torch.cat((request.given, answers.to(request.given.device)), dim=1)
