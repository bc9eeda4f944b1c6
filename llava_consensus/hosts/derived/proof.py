"""A record proved on the model itself, before its first use: no reference model is needed.

    all rows kept     ids, features and positions give the logits of the plain call, which ran without taps
    attention         what was read of the tower's block gives what its kernel gave
    half of the rows  the shortened call equals the language model on its own call, cut
    generate          its first token's logits are those of forward

The first finds a model that asks for its kernel's name, the third one that takes positions for row numbers, the last
one that counts positions anew.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.derived.decoder import distance
from llava_consensus.hosts.derived.record import (
    NOT_ROWS,
    Fields,
    Record,
    RecordedEncoding,
    decoder_call,
    listed_in,
    tower_modules,
)
from llava_consensus.hosts.derived.rows import Mapped, Mixed
from llava_consensus.hosts.derived.tap import KernelCall, attended, untapped

ROOM = {torch.float64: 1e-6, torch.float32: 1e-3}  # of a difference, as a share of the largest number
WIDE = 0.1  # in half precision
TRIED_BLOCKS = 6  # of a tower, from its last one; a projector's layers stand behind
KEEP, RENUMBER = "keep", "renumber"


def prove(
    module: Any,
    record: Record,
    inputs: dict[str, Any],
    text: dict[str, Any],
    fields: Fields,
    modality: str,
    tapped: Collection[nn.Module],
    first: nn.Module | None,
) -> Record:
    """The record, without what this model does not show or keep.

    Args:
        inputs: of the call, with pixels.
        text: its arguments without them (`text_arguments`).
        fields: of the encoder's output.
        tapped: all modules with a tap.
        first: the language model's first attention module.
    Raises:
        OptionError: the record does not hold, with the check that failed.
    """
    with torch.no_grad():
        proof = _Proof(module, record, text, fields, modality)
        with untapped(tapped):
            plain = proof.logits(inputs)
        for how in (KEEP, RENUMBER):
            proof.hold(f"all rows kept (positions={how})", proof.logits(proof.cut(proof.every, how)), plain)
        record = proof.asked(record, first)
        unkept = ""
        for how in (RENUMBER, KEEP):
            try:
                proof.half(how)
            except (OptionError, IndexError, RuntimeError) as error:
                failed = f"a prompt without half of its visual rows cannot be run (positions={how})"
                why = str(error) if isinstance(error, OptionError) else failed
                if how == RENUMBER or record.axes > 1:
                    raise OptionError(f"{proof.name}: {why}") from error
                unkept = why
    return replace(record, unkept=unkept)


class _Proof:
    def __init__(self, module: Any, record: Record, text: dict[str, Any], fields: Fields, modality: str) -> None:
        self.module, self.record, self.fields, self.modality = module, record, fields, modality
        self.name = type(module).__name__
        self.text = text
        ids = text["input_ids"]
        self.visual = ids == module.config.image_token_id
        mask = text.get("attention_mask")
        self.real = torch.ones_like(self.visual) if mask is None else mask.bool()
        self.every = torch.ones_like(ids, dtype=torch.bool)
        self.entered = decoder_call(module, text, {modality: fields.output})
        self.room = ROOM.get(self.entered.arguments["inputs_embeds"].dtype, WIDE)

    def hold(self, what: str, found: Tensor, expected: Tensor) -> None:
        """Raises OptionError where two results differ."""
        found, expected = found[self.real[:, -1]].float(), expected[self.real[:, -1]].float()
        difference = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
        if not difference <= self.room:
            raise OptionError(f"{what}: differs by {difference:.1g} of its size, so this model is not understood")

    def asked(self, record: Record, first: nn.Module | None) -> Record:
        """The record without SCAP, where the first attention cannot be read on the embeddings."""
        if first is None:
            return record
        try:
            call = decoder_call(self.module, self.text, {self.modality: self.fields.output}, [first]).attention
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return replace(record, first="", unasked=f"layers before {record.first} hand on more than states")
        if call is None or call.query.shape[2] != self.visual.shape[1]:
            return replace(record, first="", unasked=f"{record.first} does not see the whole prompt")
        return record

    def logits(self, inputs: dict[str, Any]) -> Tensor:
        """Logits of the last row of each prompt: [R, V]."""
        taken = inspect.signature(type(self.module).forward).parameters
        given = {name: value for name, value in inputs.items() if name in taken and name not in NOT_ROWS}
        if "logits_to_keep" in taken:  # those of all rows can take more memory than the model
            given["logits_to_keep"] = 1
        return self.module(**given, use_cache=False).logits[:, -1]

    def cut(self, stays: Tensor, how: str) -> dict[str, Any]:
        """The call with these rows [R, S] alone, as many of each prompt."""
        shape = stays.shape
        positions = self.positions
        given = {
            name: value[stays].view(shape[0], -1) if value.shape == shape else value
            for name, value in self.text.items()
        }
        if how == KEEP or self.record.axes > 1:
            given["position_ids"] = torch.stack([axis[stays].view(shape[0], -1) for axis in positions])
            given["position_ids"] = given["position_ids"] if self.record.axes > 1 else given["position_ids"][0]
        else:
            given.pop("position_ids", None)
        keep = stays[self.visual]
        parts = [part[keep.to(part.device)] for part in self.fields.flat()]
        output = self.fields.with_parts([[part] for part in parts])
        return {**given, "mm_encoder_outputs": {self.modality: output}}

    @property
    def positions(self) -> Tensor:
        """Position ids of the full prompts: [axes, R, S]."""
        given = self.entered.arguments.get("position_ids")
        if given is not None and given.ndim == 3:
            return given.expand(-1, *self.visual.shape)
        return (self.real.cumsum(1) - 1).clamp_min(0)[None]

    def half(self, how: str) -> None:
        """Raises OptionError where half of the visual rows are not read as the language model reads its call, cut."""
        stays = self.every.clone()
        for row in range(len(stays)):  # as many of each prompt, so that no padding comes in
            places = self.visual[row].nonzero()[:, 0]
            stays[row, places[1 : 1 + 2 * (int(self.visual.sum(1).min()) // 2) : 2]] = False
        call = self.cut(stays, how)
        outputs: list[Tensor] = []
        decoder = self.module.get_decoder()
        # of a tuple or of a `ModelOutput`
        handle = decoder.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
        try:
            logits = self.logits(call)
            arguments = {name: self._shorter(value, stays) for name, value in self.entered.arguments.items()}
            if "logits_to_keep" in arguments:  # of a decoder that has the head too
                arguments["logits_to_keep"] = 1
            shortened = decoder_call(
                self.module, {**call, "mm_encoder_outputs": None}, call["mm_encoder_outputs"]
            ).arguments
            if how == KEEP or self.record.axes > 1:
                arguments["position_ids"] = call["position_ids"]
            else:
                arguments["position_ids"] = shortened.get("position_ids")
            window = getattr(self.module.config.get_text_config(), "sliding_window", None)
            if window and stays.shape[1] > window:  # it counts the rows that are there
                arguments["attention_mask"] = shortened.get("attention_mask")
            decoder(**arguments)
        finally:
            handle.remove()
        self.hold(f"half of the rows (positions={how})", outputs[0][:, -1], outputs[1][:, -1])
        if not bool(self.real[:, -1].all()):
            return
        generated = self.module.generate(
            **call, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True,
            pad_token_id=0,
        )  # fmt: skip
        self.hold(f"generate (positions={how})", generated.logits[0], logits)

    def _shorter(self, value: Any, stays: Tensor) -> Any:
        """An argument of the decoder without the rows that leave."""
        rows, size = stays.shape
        if isinstance(value, dict):
            return {name: self._shorter(one, stays) for name, one in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "get_seq_length"):
            return type(value)(self._shorter(one, stays) for one in value)
        if not isinstance(value, Tensor):
            return value
        visual = int(self.visual.sum())
        features = value.ndim == 2 and value.is_floating_point() and value.shape[1] != size
        if value.ndim and value.shape[0] == visual and (visual != size or features):
            return value[stays[self.visual]]
        for axis in range(value.ndim):
            if value.shape[axis] == size and size != rows:
                left = torch.stack([row.nonzero()[:, 0] for row in stays])
                value = _gathered(value, axis, left)
        return value


def _gathered(value: Tensor, axis: int, left: Tensor) -> Tensor:
    """Rows `left` [R, L] along one axis of a tensor whose first axes may be the batch."""
    batch = next((place for place in range(axis) if value.shape[place] == len(left)), None)
    if batch is None:
        return value.index_select(axis, left[0])
    shape = [1] * value.ndim
    shape[batch], shape[axis] = left.shape
    target = list(value.shape)
    target[axis] = left.shape[1]
    return value.gather(axis, left.view(shape).expand(target))


def tower_facts(
    module: Any, base: Any, calls: list[KernelCall], mapped: Callable[[nn.Module], RecordedEncoding]
) -> dict[str, Any]:
    """The record's tower fields: the last block whose map is clean and whose kernel output matches its queries, keys
    and values.

    Args:
        module, base: the model, and the part that encodes pictures.
        calls: kernel calls of all attention modules while it did.
        mapped: encodes the pictures once more and maps their patches by one module.
    """
    names = {id(one): path for path, one in module.named_modules()}
    why = ""  # of the last block, which is tried first
    for candidate in reversed(tower_modules(base, calls)[-TRIED_BLOCKS:]):
        path = names[id(candidate)]
        try:
            found = mapped(candidate)
        except Mixed as reason:
            why = why or f"{path}: {reason}"
            continue
        assert found.map is not None
        error = tower_error(found.calls, found.map.pictures)
        if error > ROOM.get(found.calls[0].query.dtype, WIDE):
            why = why or f"{path}: its kernel does more than softmax of queries and keys ({error:.1g})"
            continue
        blocks, number = listed_in(module, path)
        shapes = _shapes(calls, names)
        alike = [listed_in(module, other) for other, own in shapes.items() if own == shapes[path]]
        full = tuple(place for above, place in alike if above == blocks)
        return {"block": path, "blocks": blocks, "number": number, "full": full, "classes": found.map.classes}
    why = why or "no attention module of the tower reaches a kernel"
    return {"block": "", "blocks": "", "number": 0, "full": (), "classes": 0, "why": why}


def _shapes(calls: list[KernelCall], names: dict[int, str]) -> dict[str, list[torch.Size]]:
    """Shapes of the queries of every call of every module: of a block that looks at windows they are others."""
    shapes: dict[str, list[torch.Size]] = {}
    for call in calls:
        shapes.setdefault(names[id(call.module)], []).append(call.query.shape)
    return shapes


@torch.no_grad()
def tower_error(calls: list[KernelCall], pictures: list[Mapped]) -> float:
    """Largest relative difference between the kernel's output of a tile and the one computed from its queries, keys and
    values.
    """
    worst = 0.0
    for picture in pictures:
        for tile in picture.patches:
            call = calls[tile.call]
            place = tile.position.to(call.query.device)
            query, key, value = (one[tile.entry][:, place] for one in (call.query, call.key, call.value))
            assert call.output is not None
            fed = tile.row >= 0
            own = call.output[tile.entry][place].transpose(0, 1)[:, fed]
            worst = max(worst, distance(attended(query, key, value, call.scale)[:, fed], own))
    return worst
