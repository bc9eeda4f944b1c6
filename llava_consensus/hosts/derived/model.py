"""A model of transformers whose family no file describes, as an attachment views it.

What can be read of the class stands at attach; the rest is derived at the first call with pictures, since only a
processor knows the form of a family's pixels, proved there (`proof.py`), and kept for every model of the same
configuration.
"""

import contextlib
import copy
import inspect
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from llava_consensus.errors import OptionError
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Offer
from llava_consensus.hosts.call import Shadow, enter_model, running
from llava_consensus.hosts.derived import record as deriving
from llava_consensus.hosts.derived.decoder import TapDecoder
from llava_consensus.hosts.derived.proof import prove, tower_facts
from llava_consensus.hosts.derived.record import (
    Fields,
    Record,
    RecordedEncoding,
    ReducedRows,
    decoder_call,
    encode,
    language_facts,
    map_patches,
    note_entry,
    note_output,
    reduced_rows,
    seam_of,
    stand_aside,
    text_arguments,
)
from llava_consensus.hosts.derived.rows import Mapped, Mixed, sides_of, unread
from llava_consensus.hosts.derived.tap import attention_modules, install, recording
from llava_consensus.hosts.hf.generate import EMBEDS, channels_of, check_outer
from llava_consensus.hosts.hf.model import HfModel
from llava_consensus.hosts.hf.rows import Features, PictureRows, runs
from llava_consensus.hosts.hf.towers import PATCHES, TapTower
from llava_consensus.hosts.sequence import Assembled
from llava_consensus.hosts.towers import EARLIER, blocks_read, fingerprint
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import Need

MAPS = 256  # shapes of pictures whose maps are kept for a configuration
_RECORDS: dict[str, Record] = {}  # by configuration
_MAPS: dict[str, OrderedDict[Any, list[Mapped]]] = {}
# Encoded pictures whose shapes were new, for the step that would encode them again.
_STASH: ContextVar[tuple[dict[str, Any], RecordedEncoding] | None] = ContextVar("llava_consensus_encoded", default=None)
_DERIVING = threading.RLock()


class DerivedTower(TapTower):
    """The vision side by its record.

    Args:
        module: the model.
        record: of its configuration.
        most: the most tokens a picture can have.
        inside: where methods can act before the projector; elsewhere they are refused.
    """

    def __init__(self, module: Any, record: Record, most: int, inside: Mapping[Place, str]) -> None:
        self._module, self._record = module, record
        self.tokens, self.members, self.classes, self.inside, self.varies = most, None, record.classes, inside, True
        self.blocks: Any = module.get_submodule(record.blocks) if record.blocks else range(1)
        self.feature_block = record.number
        self.full = record.full or range(len(self.blocks))
        self.offers = (
            PATCHES | ({Need.CLASS_FEATURE} if record.classes else frozenset()) if record.block else frozenset()
        )
        self.kernel = getattr(module.config, "_attn_implementation", "sdpa")

    def scale(self, block: int) -> float:
        """The factor of the products of queries and keys: they are kept with it."""
        return 1.0

    def taps(self, needs: frozenset[Need], features: int, attention: int) -> list[Any]:
        """No taps: the model's own encoder is recorded."""
        return []

    def attention(self, block: int) -> Any:
        """The attention module of a block. OptionError where it has none of that name."""
        record = self._record
        path = f"{record.blocks}.{block}{record.block.removeprefix(f'{record.blocks}.{record.number}')}"
        try:
            return self._module.get_submodule(path)
        except AttributeError as error:
            raise OptionError(f"vision block {block}: has no attention like that of block {record.number}") from error


class DerivedModel(HfModel):
    """A `...ForConditionalGeneration` that takes `mm_encoder_outputs`."""

    offer = Offer(PATCHES)
    records = True

    @cached_property
    def key(self) -> str:
        """The configuration that records are kept by."""
        return deriving.fingerprint(self.module)

    @property
    def record(self) -> Record | None:
        """Record derived for models of this configuration; None before the first call with pictures."""
        return _RECORDS.get(self.key)

    @property
    def inner(self) -> Any:
        """The part that encodes pictures. OptionError where there is none."""
        return seam_of(self.module)

    @property
    def tower(self) -> Any:
        """The vision side; None before it is known."""
        record = self.record
        return None if record is None else self._tower_of(record)

    def _tower_of(self, record: Record) -> DerivedTower:
        return DerivedTower(self.module, record, self.reach, self.offer.inside)

    @cached_property
    def markers(self) -> frozenset[int]:  # type: ignore[override]
        """Ids of the rows around pictures, as the configuration names them; none where it does not."""
        named = vars(self.module.config).items()
        return frozenset(value for name, value in named if MARKER.fullmatch(name) and isinstance(value, int))

    @property
    def reach(self) -> int:
        """Positions the language model was made for."""
        return int(getattr(self.module.config.get_text_config(), "max_position_embeddings", 0) or 0)

    @property
    def keeps_positions(self) -> bool:  # type: ignore[override]
        """True if position ids have several axes, so that they can only be kept."""
        record = self.record
        return hasattr(self.inner, "get_rope_index") if record is None else record.axes > 1

    @property
    def tensors(self) -> frozenset[str]:  # type: ignore[override]
        """Modalities whose features the model wants in one tensor."""
        record = self.record
        return frozenset({"image"}) if record is not None and not record.listed else frozenset()

    @property
    def embedded(self) -> bool:  # type: ignore[override]
        """True if the embeddings of visual rows equal the features."""
        record = self.record
        return record is None or record.embedded

    @property
    def decoder(self) -> Any:
        """The language side, for methods between its layers."""
        record = self.record
        return TapDecoder(
            self.module.get_decoder(), *((1, False) if record is None else (record.axes, record.ahead))
        )  # fmt: skip

    def check(self, method: Method) -> None:
        """Raises OptionError for a model or a method that derivation does not cover."""
        super().check(method)
        record, _ = self.record, self.inner
        if record is not None and record.uncut and method.place is Place.DECODER:
            raise OptionError(
                f"{type(method).__name__} cuts between decoder layers, and {type(self.module).__name__} does not take "
                f"it: {record.uncut}. Take a method that acts after the tower"
            )
        if record is not None and record.unkept and method.positions != "renumber":
            raise OptionError(
                f"positions={method.positions}: {type(self.module).__name__} does not keep them ({record.unkept}). "
                "Take positions=renumber"
            )
        if record is not None and Need.PROBE in method.needs and not record.first:
            raise OptionError(
                f"{type(method).__name__} reads the first attention of {type(self.module).__name__}, which it "
                f"does not show ({record.unasked}). Take a method that asks no question of it"
            )
        if Need.PROBE in method.needs and not getattr(method, "scap_rope", True):
            raise OptionError(
                f"scap_rope=false: queries and keys of {type(self.module).__name__} are read behind their rotation. "
                "Leave it out"
            )
        if method.acts_inside and self.offer.inside.get(method.place) != "":
            raise OptionError(
                f"{type(method).__name__} acts before the projector, and no file says how the tower of "
                f"{type(self.module).__name__} takes fewer patches. Take a method that acts after the tower"
            )

    def install(self, attachment: Attachment) -> None:
        """Taps and hooks, silent until a call records: of the modules the record names, or of all that may be they."""
        module, record = self.module, self.record
        hook = module.get_decoder().register_forward_pre_hook(note_entry, with_kwargs=True)
        check = partial(check_outer, attachment)
        attachment.add(
            [], [module.model.register_forward_pre_hook(check, with_kwargs=True)] if hasattr(module, "model") else []
        )
        if record is None:
            attachment.add(install(attention_modules(module)), [hook])
        else:
            read = [module.get_submodule(record.block)] if record.block else []  # which new shapes are mapped by
            read += self._tower_of(record).attending(attachment.reader).values()
            first = [module.get_submodule(record.first)] if record.first else []
            attachment.add(install([*first, *read]), [hook])
            self._install_record(attachment, record)
            attachment.settled = True

    def _install_record(self, attachment: Attachment, record: Record) -> None:
        """Hooks the tower block whose output is read, and bypasses the layers before the first attention for SCAP."""
        module, shadows, handles = self.module, [], []
        if record.block and attachment.needs & READ:
            features, _ = blocks_read(self._tower_of(record), attachment.reader)
            handles.append(module.get_submodule(record.blocks)[features].register_forward_hook(note_output))
        for layer in module.get_submodule(record.layers)[: record.layer] if record.first else ():
            shadows.append(Shadow(layer, "forward", partial(stand_aside, layer.forward)))
        attachment.add(shadows, handles)

    def try_picture(self, inputs: dict[str, Any]) -> None:
        """Derives the record from the harness's first prompt."""
        if self.record is None:
            from llava_consensus.methods.full import Full

            with Attachment(self, Full(), Budget(1)) as attachment:
                self.settle(attachment, inputs, self.encoder_inputs(inputs))

    def settle(self, attachment: Attachment, inputs: dict[str, Any], encoder_inputs: dict[str, Any]) -> None:
        """Derives and proves the record at the first call with pictures of a configuration, or reads that of an earlier
        process.
        """
        if attachment.settled:
            return
        with _DERIVING:
            if self.record is None and (known := deriving.cached(self.key)) is not None:
                _RECORDS[self.key] = known
            record = self.record
            if record is None:
                _RECORDS[self.key] = self._proved(attachment, inputs, encoder_inputs)
                deriving.cache(self.key, _RECORDS[self.key], self.module)
            else:
                self._install_record(attachment, record)
        self.check(attachment.method)
        attachment.check_tower()
        attachment.settled = True

    def _proved(self, attachment: Attachment, inputs: dict[str, Any], encoder_inputs: dict[str, Any]) -> Record:
        """The record, proved by the pictures it was derived of."""
        plain, modules = attachment.plain(self.module), list(attention_modules(self.module))
        modes = [(one, one.training) for one in (plain, *self.module.modules())]
        plain.eval()  # dropout, of LoRA for example, would make every run another one
        around = running()
        enter_model(plain)
        try:
            record, text, fields, encoded = self._derived(plain, inputs, encoder_inputs["image"])
            self._install_record(attachment, record)
            first = self.module.get_submodule(record.first) if record.first else None
            proved = prove(plain, record, inputs, text, fields, "image", modules, first)
            own = (
                not attachment.needs & READ
                or blocks_read(self._tower_of(record), attachment.reader)[0] == record.number
            )
            if encoded is not None and own and not any(mode for _, mode in modes):
                assert encoded.map is not None
                self._remember("image", encoder_inputs["image"], inputs["input_ids"].cpu(), encoded.map.pictures)
                stash(encoder_inputs["image"], encoded)
            return proved
        finally:
            enter_model(around)
            for one, mode in modes:
                one.training = mode

    def _derived(
        self, plain: Any, inputs: dict[str, Any], arguments: dict[str, Any]
    ) -> tuple[Record, dict[str, Any], Fields, RecordedEncoding | None]:
        """The record, the arguments of the prompts without pixels, the features of their pictures, and these with what
        was read of the tower meanwhile.
        """
        ids = inputs["input_ids"]
        known_ids, placeholder, modules = ids.cpu(), self.placeholder("image"), list(attention_modules(self.module))
        count = int((known_ids == placeholder).sum())
        with torch.no_grad(), recording(modules, shapes=True) as calls:
            output = self.inner.get_image_features(**arguments, return_dict=True)
        fields = Fields(output, count)
        text = text_arguments(self.module, inputs, self.encoder_names("image"))
        seen = {id(call.module) for call in calls}
        with torch.no_grad():
            outside = [one for one in modules if id(one) not in seen]
            entered = decoder_call(plain, text, {"image": output}, outside)
        language = language_facts(self.module, entered, fields, ids == placeholder)
        decoder = TapDecoder(self.module.get_decoder(), language["axes"], language["ahead"])
        if not language["uncut"]:
            try:
                decoder.check_layers(True, entered.arguments)
            except OptionError as error:
                language["uncut"] = str(error).partition(": ")[2].partition(". ")[0]

        def counts(found: Fields) -> list[int]:
            return sizes_of(found, arguments, known_ids, placeholder)

        found: list[RecordedEncoding] = []

        def mapped(module: nn.Module) -> RecordedEncoding:
            path = next(name for name, one in self.module.named_modules() if one is module)
            blocks, number = deriving.listed_in(self.module, path)
            hooks = [self.module.get_submodule(blocks)[number].register_forward_hook(note_output)] if blocks else []
            try:
                found.append(map_patches(self.inner, "image", arguments, module, count, counts))
            finally:
                for hook in hooks:
                    hook.remove()
            return found[-1]

        tower = tower_facts(self.module, self.inner, calls, mapped)
        return Record(**language, **tower), text, fields, found[-1] if tower["block"] else None

    # Pictures

    def encoder_inputs(self, inputs: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Arguments of the encoder of pictures. OptionError for videos, whose rows are not derived."""
        if any(inputs.get(name) is not None for name in ("pixel_values_videos", "video_grid_thw")):
            raise OptionError(
                f"videos of {type(self.module).__name__} are not adapted: pass their frames as pictures, or detach"
            )
        names = self.encoder_names("image")
        arguments = {name: inputs[name] for name in names if inputs.get(name) is not None}
        return {"image": arguments} if any(name.startswith(deriving.PIXELS) for name in arguments) else {}

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[PictureRows]:
        """The rows of every picture, by the map of pictures of these shapes."""
        maps, key = self._maps(modality, inputs, ids)
        found = maps.get(key)
        if found is None:
            found = self._mapped(modality, inputs, ids, int((ids == self.placeholder(modality)).sum()))
            self._remember(modality, inputs, ids, found)
        return list(found)

    def _maps(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> tuple[OrderedDict[Any, list[Mapped]], Any]:
        """The maps of this configuration, and the key of that of these pictures."""
        key = _shapes(inputs), tuple(length for _, _, length in runs(ids, self.placeholder(modality)))
        return _MAPS.setdefault(self.key, OrderedDict()), key

    def _remember(self, modality: str, inputs: dict[str, Any], ids: Tensor, pictures: list[Mapped]) -> None:
        """Keeps the map of pictures of these shapes, and forgets the oldest of too many."""
        maps, key = self._maps(modality, inputs, ids)
        maps[key] = pictures
        while len(maps) > MAPS:
            maps.popitem(last=False)

    def _mapped(self, modality: str, inputs: dict[str, Any], ids: Tensor, count: int) -> list[Mapped]:
        """The rows of pictures of new shapes, which are encoded for it."""
        record = self.record
        assert record is not None

        def counts(fields: Fields) -> list[int]:
            return sizes_of(fields, inputs, ids, self.placeholder(modality))

        if record.block:
            block = self.module.get_submodule(record.block)
            with contextlib.suppress(Mixed):
                encoded = map_patches(self.inner, modality, inputs, block, count, counts)
                stash(inputs, encoded)
                assert encoded.map is not None
                return encoded.map.pictures
        with torch.no_grad():
            encoded = encode(self.inner, modality, inputs, [], count)
        stash(inputs, encoded)
        sizes = counts(encoded.fields)
        return unread(sizes, sides_of(inputs, sizes))

    @property
    def placed_by(self) -> tuple[str, ...]:  # type: ignore[override]
        """Inputs that the model computes positions from, beside the ids."""
        return tuple(name for name in self.encoder_names("image") if not name.startswith(deriving.PIXELS))

    def row_inputs(self, ids: Tensor, real: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Mask of the rows that are tokens of pictures, and the grids of these."""
        taken = inspect.signature(type(self.module).forward).parameters
        visual = (ids == self.placeholder("image")).long()
        return {**{name: visual for name in TYPES if name in taken}, **inputs}

    def together(self, pictures: list[Features]) -> Features:
        """Pictures that went through the tower one by one."""
        joined = super().together(pictures)
        parts = [list(part) for part in zip(*((one.tokens, *one.planes) for one in pictures), strict=True)]
        fields: Fields = pictures[0].output
        return joined._replace(output=Fields(fields.with_parts(parts), len(joined.tokens)))

    def encode(
        self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]
    ) -> Features:
        """The model's own encoder, with what the method reads of the tower."""
        record, stash = self.record, _STASH.get()
        assert record is not None
        reads = bool(record.block and attachment.needs & READ)
        modules: dict[str, Any] = {}
        if reads:
            tower = self._tower_of(record)
            modules = {"": tower.attention(record.number)} | tower.attending(attachment.reader)
        _STASH.set(None)
        mapped = not reads or list(modules.values()) == [tower.attention(record.number)]
        if stash is not None and stash[0] is inputs and mapped:
            encoded = stash[1]
        else:
            read = list(modules.values())
            encoded = encode(self.inner, modality, inputs, read, sum(len(rows.token) for rows in pictures))
        calls = {front: [call for call in encoded.calls if call.module is one] for front, one in modules.items()}
        tokens, *planes = encoded.fields.flat()
        tiles, first = [], 0
        for rows in pictures:
            assert isinstance(rows, Mapped)
            if attachment.needs & READ and not rows.patches:
                raise OptionError(
                    f"{type(attachment.method).__name__} reads the vision tower, and the patches of this picture could "
                    "not be told from each other. Take a method that reads none (llava-consensus list)"
                )
            own = tokens.detach()[first : first + len(rows.token)]
            first += len(rows.token)
            own_tiles = rows.tiles_of(own, calls.get("", []), encoded.states, record.classes)
            if EARLIER in calls:
                parts = rows.tiles_of(own, calls[EARLIER], [], record.classes).parts
                own_tiles.parts.update({EARLIER + name: value for name, value in parts.items()})
            tiles.append(own_tiles)
        if Need.FINGERPRINT in attachment.needs:
            for one, pixels in zip(tiles, pixels_of(inputs, [rows.tiles for rows in pictures]), strict=True):
                one.parts["fingerprint"] = fingerprint(pixels).expand(len(one.projected))
        return Features(tiles, tokens, tuple(planes), encoded.fields)

    # Prompts

    def assembled(
        self,
        attachment: Attachment,
        inputs: dict[str, Any],
        ids: Tensor,
        real: Tensor,
        features: dict[str, Features],
        known_ids: Tensor,
        known_real: Tensor,
    ) -> Assembled:
        """The full prompts as the model itself hands them to its language model."""
        record, module = self.record, self.module
        plain = attachment.plain(module)
        assert record is not None
        text = text_arguments(module, inputs, self.encoder_names("image"))
        outputs = {name: one.output.output for name, one in features.items()}
        first = [module.get_submodule(record.first)] if Need.PROBE in attachment.needs else None
        with torch.autocast(ids.device.type, enabled=False):
            entered = decoder_call(plain, text, outputs, first)
        if record.axes == 1:
            positions = self.positions(inputs, known_ids, known_real).to(ids.device)
        else:
            positions = entered.arguments["position_ids"].expand(-1, *ids.shape).permute(1, 2, 0)
        planes = []
        for modality, one in features.items():
            visual = (ids == self.placeholder(modality))[..., None]
            for plane in one.planes if record.embedded else (one.tokens, *one.planes):
                planes.append(plane.new_zeros(*ids.shape, plane.shape[-1]).masked_scatter(visual, plane))
        channels = channels_of(self, inputs, ids, planes)
        embeds = entered.arguments["inputs_embeds"]
        return Assembled(embeds, real, positions, channels, attending=entered.attention)

    def entering(self, attachment: Attachment, inputs: dict[str, Any]) -> Any:
        """Around a forward: merged rows as they are, where the model makes other embeddings of features than these."""
        embeds, record = attachment.current(fresh=False).state.get(EMBEDS), self.record
        if embeds is None or record is None or record.embedded or not inputs.get("mm_encoder_outputs"):
            return contextlib.nullcontext()
        ids = inputs["input_ids"]
        visual = ids == self.placeholder("image")
        beams = len(ids) // len(embeds)
        embeds = pad(embeds, (0, 0, 0, ids.shape[1] - embeds.shape[1])).repeat_interleave(beams, 0)
        return reduced_rows(ReducedRows(visual, embeds[visual]))

    def output(self, tokens: Any, planes: list[list[Tensor]], like: Any) -> Any:
        """The encoder's result with other rows."""
        parts = [tokens, *planes] if self.embedded else planes
        return like.with_parts(parts, split=True)

    def in_one(self, output: Any) -> Any:
        """A copy of the output whose embedded field is one tensor, as this model wants it."""
        output = copy.copy(output)
        output.pooler_output = torch.cat(output.pooler_output)[None]
        return output


def pixels_of(inputs: dict[str, Any], tiles: list[int]) -> list[Tensor]:
    """The pixels of each picture, [1, values] each: by entry where there is one for each picture or tile, by rows in
    equal shares of a prompt's else.
    """
    pixels = next(value for name, value in inputs.items() if name.startswith(deriving.PIXELS))
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


def stash(inputs: dict[str, Any], encoded: RecordedEncoding) -> None:
    """Keeps what was encoded without gradients for the step of this call that would encode it again."""
    if not torch.is_grad_enabled():
        _STASH.set((inputs, encoded))


MARKER = re.compile("(boi|eoi|(low_res_)?(image|vision|im)_(start|end))_(token_)?(id|index)")
TYPES = ("mm_token_type_ids", "moe_mm_token_type_ids")  # arguments that say which rows are tokens of pictures
READ = frozenset({Need.ATTENTION, Need.EARLIER, Need.FEATURES, Need.CLASS_FEATURE})  # of the tower


def _shapes(inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Key of the cached maps: the shapes of pixels, and the numbers that say how pictures are cut."""
    told: list[tuple[str, Any]] = []
    for name, value in sorted(inputs.items()):
        if isinstance(value, Tensor) and (value.is_floating_point() or value.numel() > 1 << 16):
            told.append((name, tuple(value.shape)))
        else:
            told.append((name, str(value.tolist() if isinstance(value, Tensor) else value)))
    return tuple(told)


def sizes_of(fields: Fields, inputs: dict[str, Any], ids: Tensor, placeholder: int) -> list[int]:
    """Rows of each picture: of each entry of a list of features, where the processor gives something for each, else of
    each unbroken run of placeholders.
    """
    sizes = fields.sizes()
    counts = {len(value) for value in inputs.values() if isinstance(value, Tensor) and value.ndim <= 2}
    if sizes is not None and (len(sizes) > 1 or len(sizes) in counts):
        return sizes
    return [length for _, _, length in runs(ids, placeholder)]
