"""Base of all hosts of transformers, see `base.Model`. A family's own file adds where its blocks are, how block rows
become tokens, and which rows of the prompt are tokens of a picture.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial, wraps
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Offer, Tiles
from llava_consensus.hosts.call import COUNTING, names_of, recounting
from llava_consensus.hosts.derived.decoder import TapDecoder
from llava_consensus.hosts.derived.tap import install, recording
from llava_consensus.hosts.environment import check_version
from llava_consensus.hosts.hf import generate as entrances
from llava_consensus.hosts.hf.rows import Features, PictureRows
from llava_consensus.hosts.hf.towers import PATCHES, TapTower, cells
from llava_consensus.hosts.old_attachment import Attachment
from llava_consensus.hosts.sequence import Assembled
from llava_consensus.hosts.towers import fingerprint, load_clip_text
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import Need


class HfModel:
    """A view of a `...ForConditionalGeneration` of transformers.

    Args:
        module: the model.
        options: of the host, all of them.
    """

    offer = Offer(PATCHES)
    decoding: Mapping[str, Any] = MappingProxyType({})  # what `TapDecoder` must be told of the language model
    tensors: frozenset[str] = frozenset()  # modalities whose features the model wants in one tensor, not in a list
    keeps_positions = False  # whether positions have axes, so that they can only be kept
    handed: Mapping[str, str] = MappingProxyType({})  # modalities whose features the model is given as another's
    tiled_alone = False  # whether a picture has tiles only where its prompt has no other
    placed_by: tuple[str, ...] = ()  # what a processor gives that the positions of tokens follow from
    embedded = True  # whether the embeddings of visual rows are the features
    records = False  # whether the language model's first attention is recorded, and not projected by a view of it
    typed = False  # whether the model places tokens of pictures by `mm_token_type_ids`
    around = (0, 0)  # rows of markers that the processor puts in front of and behind each picture
    markers: frozenset[int] = frozenset()  # their ids, where those say it and not their number
    image_processor: Any = None  # where the harness has one

    def __init__(self, module: Any, options: Mapping[str, str]) -> None:
        self.module: Any = module
        self.options = options

    @cached_property
    def inner(self) -> Any:
        """The model without its head."""
        return self.module.model

    @cached_property
    def tower(self) -> Any:
        """The vision side."""
        raise NotImplementedError

    @cached_property
    def decoder(self) -> TapDecoder:
        """The language side."""
        return TapDecoder(self.module.get_decoder(), **self.decoding)

    @property
    def chunks(self) -> bool:
        """True if `generate` reads a prompt in chunks as it reads it at once: no row sees those of the next chunk."""
        return not self.decoder.sees_ahead

    @property
    def most_tiles(self) -> int:
        """The most tiles a picture of this model can have."""
        return 1

    def grid_columns(self, size: tuple[int, int]) -> int:
        """Tiles in a row of the grid after the base view of a picture of this width and height; 0 without a grid."""
        return 0

    @property
    def lays_out(self) -> bool:
        """True if pictures are laid out otherwise than by the model and its processor."""
        return False

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Extra kwargs of the image processor."""
        return {}

    def check(self, method: Method) -> None:
        """Raises OptionError for what this family cannot do, or an old transformers."""
        check_version(transformers.__version__)
        if "positions" in method.asked and method.positions == "renumber" and self.keeps_positions:  # no default
            raise OptionError(
                f"positions=renumber: {type(self.module).__name__} has positions of three axes, which are kept. Leave "
                "it out, or take positions=keep"
            )

    @property
    def clip_name(self) -> str:
        """The CLIP model that the vision configuration names as its own; empty where it names none."""
        config = self.module.config.vision_config
        is_clip = getattr(config, "model_type", "") == "clip_vision_model"
        return getattr(config, "_name_or_path", "") if is_clip else ""

    def clip_text(self) -> Any:
        """CLIP's text side, where the vision configuration names the CLIP model it is of."""
        name = self.clip_name
        return load_clip_text(name, self.module.device) if name else None

    def of(self, module: Any) -> "HfModel":
        """A copy of this view for a replica, or for this module with its parts read anew."""
        view = copy.copy(self)
        view.module = module
        for part in ("inner", "tower", "decoder"):
            vars(view).pop(part, None)
        return view

    def entrances(self, attachment: Attachment) -> dict[str, Callable[..., Any]]:
        """`generate` and `forward` with the pictures reduced on their way, and what `generate` asks for processors,
        criteria and lengths.
        """
        model_class, attributes = type(self.module), vars(self.module)
        return {
            "generate": wraps(model_class.generate)(
                partial(entrances.generate, attachment, attributes.get("generate"))
            ),
            "forward": wraps(model_class.forward)(partial(entrances.forward, attachment, attributes.get("forward"))),
            **{
                name: partial(entrances.gathered, attachment, name, attributes.get(name))
                for name in entrances.GATHERING
            },
            COUNTING: partial(recounting, attachment, attributes.get(COUNTING)),
            **{
                name: partial(entrances.refused, name)
                for name in entrances.BATCHING
                if attachment.cuts is not None and hasattr(model_class, name)
            },
        }

    def encoder_inputs(self, inputs: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Arguments of the encoder of each modality that there are pixels of."""
        by_modality = {}
        for modality in ("image", "video"):
            names = self.encoder_names(modality)
            arguments = {name: inputs[name] for name in names if inputs.get(name) is not None}
            if any(name in arguments for name in entrances.PIXELS):
                by_modality[modality] = arguments
        return by_modality

    def encoder_names(self, modality: str) -> list[str]:
        """Arguments that the encoder of a modality takes; none where there is no encoder."""
        encoder = getattr(self.inner, f"get_{modality}_features", None)
        return [name for name in names_of(encoder) if name != "kwargs"] if encoder else []

    def placeholder(self, modality: str) -> int:
        """Id of the tokens that stand for a modality."""
        return getattr(self.module.config, f"{modality}_token_id")

    def words(self, ids: Tensor) -> Tensor:
        """Embeddings of rows that are no tokens of pictures: [R, S] -> [R, S, D]."""
        return self.module.get_input_embeddings()(ids)

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[PictureRows]:
        """The rows of every picture of a modality, in order, given the encoder's arguments and the prompts [R, S]."""
        raise NotImplementedError

    def encode(
        self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]
    ) -> Features:
        """Pictures through the model's own encoder, hooks collecting what the method needs."""
        raise NotImplementedError

    def positions(self, inputs: dict[str, Any], ids: Tensor, real: Tensor) -> Tensor:
        """Positions of the full prompts: [R, S], or [R, S, A] of A axes. Ids and mask are on the CPU."""
        positions = inputs.get("position_ids")
        return (real.cumsum(1) - 1).clamp_min(0) if positions is None else positions.expand(ids.shape)

    def row_inputs(self, ids: Tensor, real: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Inputs that a processor returns with the ids [R, S] of prompts, apart from pixels, given the values of
        `placed_by`.
        """
        return {}

    def install(self, attachment: Attachment) -> None:
        """Called when a method is attached, for hooks of the host's own."""
        check = partial(entrances.check_outer, attachment)
        taps = self.decoder.tapped([0]) if Need.PROBE in attachment.needs else []
        taps += install(list(self.attending(attachment).values()))
        attachment.add(taps, [self.inner.register_forward_pre_hook(check, with_kwargs=True)])

    def attending(self, attachment: Attachment) -> dict[str, Any]:
        """Attention modules of the tower whose kernel calls the method reads; see `TapTower.attending`."""
        tower = self.tower
        return tower.attending(attachment.reader) if isinstance(tower, TapTower) else {}

    def try_picture(self, inputs: dict[str, Any]) -> None:
        """Called with a prompt about a picture once the harness has loaded the model."""

    def settle(self, attachment: Attachment, inputs: dict[str, Any], encoder_inputs: dict[str, Any]) -> None:
        """Called with the arguments of a call that shows pictures, before anything is asked about them."""

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
        """The full prompts [R, S] as the language model would have read them. Known ids and mask are on the CPU."""
        positions = self.positions(inputs, known_ids, known_real).to(ids.device)
        words = ids
        for modality in features:
            words = words.masked_fill(ids == self.placeholder(modality), 0)
        embeds = self.words(words)  # a placeholder may have no place in the vocabulary
        planes: list[Tensor] = []
        for modality, own in features.items():
            at_placeholder = (ids == self.placeholder(modality))[..., None]
            embeds = embeds.masked_scatter(at_placeholder, own.tokens.to(embeds.device, embeds.dtype))
            planes = planes or [torch.zeros_like(embeds) for _ in own.planes]
            planes = [
                plane.masked_scatter(at_placeholder, more.to(plane.device, plane.dtype))
                for plane, more in zip(planes, own.planes, strict=True)
            ]
        return Assembled(embeds, real, positions, entrances.channels_of(self, inputs, ids, planes))

    def entering(self, attachment: Attachment, inputs: dict[str, Any]) -> Any:
        """Around a forward of the model with the arguments it is given."""
        return contextlib.nullcontext()

    def placing(self, inputs: dict[str, Any], positions: Tensor, real: Tensor) -> dict[str, Any]:
        """Arguments that say where the reduced rows stand: `positions` as they were, of rows that are `real`. Where
        they have axes, a model that counts by rows is told the step from rows to positions, for decoding loops that
        give no positions.
        """
        if positions.ndim == 2:
            return {"position_ids": positions}
        if hasattr(self.inner, "rope_deltas"):
            following = positions.masked_fill(~real[..., None], 0).amax((1, 2)) + 1
            self.inner.rope_deltas = following[:, None] - real.sum(1, keepdim=True)
        return {"position_ids": positions.permute(2, 0, 1)}

    def together(self, pictures: list[Features]) -> Features:
        """Pictures of one modality that went through the tower one by one."""
        tiles = [tile for picture in pictures for tile in picture.tiles]
        planes = zip(*(picture.planes for picture in pictures), strict=True)
        tokens = torch.cat([picture.tokens for picture in pictures])
        return Features(tiles, tokens, tuple(torch.cat(plane) for plane in planes))

    def output(self, tokens: Any, planes: list[list[Tensor]], like: Any) -> Any:
        """An encoder output in the form the model expects, like its own output `like`."""
        return transformers.modeling_outputs.BaseModelOutputWithPooling(pooler_output=tokens)

    def in_one(self, output: Any) -> Any:
        """An encoder's result with features in one tensor in place of a list."""
        return self.output(torch.cat(output.pooler_output)[None], [], None)


@contextmanager
def reading(view: HfModel, attachment: Attachment) -> Iterator[dict[str, Tensor]]:
    """What the method reads of the tower while the body runs, complete once it has ended."""
    modules = view.attending(attachment)
    with attachment.collecting() as parts, recording(list(modules.values())) as calls:
        yield parts
    for front, module in modules.items():
        heads = view.tower.heads([call for call in calls if call.module is module])
        parts |= {front + name: states.detach() for name, states in zip(("query", "key"), heads, strict=True)}


def run_encoder(view: HfModel, attachment: Attachment, modality: str, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """Runs the model's own encoder: its output, and the parts that were read meanwhile."""
    with reading(view, attachment) as parts:
        output = getattr(view.inner, f"get_{modality}_features")(**inputs, return_dict=True)
    return output, parts


def run_whole(
    view: HfModel, attachment: Attachment, modality: str, inputs: dict[str, Any], pixels: Tensor,
    pictures: list[PictureRows],
) -> Features:  # fmt: skip
    """Features by the model's own encoder, which takes tiles of one size, with what the method reads of each."""
    output, parts = run_encoder(view, attachment, modality, inputs)
    if Need.FINGERPRINT in attachment.needs:
        parts["fingerprint"] = fingerprint(pixels)
    tokens = joined(output.pooler_output)
    return Features(tiles_of(tokens, parts, pictures), tokens)


def tiles_of(tokens: Tensor, parts: dict[str, Tensor], pictures: list[PictureRows]) -> list[Tiles]:
    """The tiles of every picture, given all tokens as prompts hold them [n, D] and parts [T, ...] of all tiles. Tokens
    of a tile that no prompt holds, such as those that unpadding cuts away, are zero.
    """
    sizes = [int(rows.token.max()) + 1 for rows in pictures]
    rooms = [rows.tiles * size for rows, size in zip(pictures, sizes, strict=True)]
    places = [rows.tile * size + rows.token for rows, size in zip(pictures, sizes, strict=True)]
    place = torch.cat([place + sum(rooms[:index]) for index, place in enumerate(places)])
    real = torch.cat([rows.token for rows in pictures]) >= 0
    into, taken = torch.stack((place[real], real.nonzero()[:, 0])).to(tokens.device)
    projected = tokens.new_zeros(sum(rooms), tokens.shape[1])
    projected[into] = tokens.detach()[taken]
    tiles = [part.unflatten(0, (-1, size)) for part, size in zip(projected.split(rooms), sizes, strict=True)]
    split = {name: value.split([rows.tiles for rows in pictures]) for name, value in parts.items()}
    return [Tiles(tile, {name: values[i] for name, values in split.items()}) for i, tile in enumerate(tiles)]


def picture_tiles(
    tokens: Tensor, parts: dict[str, Tensor], grids: list[list[int]], side: int = 2, raster: bool = False
) -> list[Tiles]:
    """The tiles of pictures of any size, with the width of its grid and the patches of each token.

    Args:
        tokens: of all pictures [n, D].
        parts: of all patches [rows, ...].
        grids: tiles of each picture, and its rows and columns of patches.
        side: patches in a row of the square that makes a token.
        raster: whether patches stand row by row, and not square by square.
    """
    rows = [frames * height * width for frames, height, width in grids]
    split = {name: value.split(rows) for name, value in parts.items()}
    tiles = []
    for index, picture_tokens in enumerate(tokens.split([count // side**2 for count in rows])):
        frames, height, width = grids[index]
        size = height * width
        picture_parts = {name: values[index].unflatten(0, (frames, size)) for name, values in split.items()}
        for name in [name for name in picture_parts if name.endswith(("query", "key"))]:
            picture_parts[name] = picture_parts[name].transpose(1, 2)
        if "pixels" in picture_parts:
            picture_parts["fingerprint"] = fingerprint(picture_parts.pop("pixels"))
        members = cells(height, width, side) if raster else torch.arange(size).view(-1, side**2)
        tiles.append(Tiles(picture_tokens.unflatten(0, (frames, -1)), picture_parts, width // side, members))
    return tiles


def joined(features: Any) -> Tensor:
    """Features in any container, as [all tokens, D]."""
    return torch.cat([tensor.reshape(-1, tensor.shape[-1]) for tensor in features])
