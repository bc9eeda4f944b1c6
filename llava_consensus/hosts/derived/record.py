"""Derivation of a record from a loaded model, step by step; each step refuses in one line that names what is not
understood.

seam              `get_image_features` makes features, and `forward` takes them as `mm_encoder_outputs`
placeholders      the fields of the features with one row for each placeholder
decoder call      the embeddings and positions that the language model is given
first attention   the first attention module of the language model that reaches an attention kernel
tower block       the last attention module of the tower each of whose positions feeds one row, and which
"""

import copy
import hashlib
import inspect
import json
import os
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.derived.rows import Mixed, PatchMap, fed_rows, patch_map, sides_of
from llava_consensus.hosts.derived.tap import KernelCall, Left, recording, setting
from llava_consensus.hosts.environment import cache_folder

PIXELS = ("pixel_values", "image_patches")  # beginnings of names of arguments that are left out beside features
MAIN = "pooler_output"
IGNORED = ("hidden_states", "attentions")
VERSION = 1  # raised by hand where derivation comes to find something else; records of another one are derived again
NOT_ROWS = ("labels", "past_key_values", "cache", "use_cache", "logits_to_keep", "return_dict", "output_attentions")


@dataclass(frozen=True)
class Record:
    """Facts derived of models of one configuration. Modules are named by their paths."""

    fields: tuple[str, ...]  # of the features, with a row for each placeholder; the one that is embedded first
    listed: bool  # whether that field is a list of pictures, and not one tensor
    embedded: bool  # whether its rows are what stands in the embeddings
    axes: int  # of positions
    first: str  # attention module whose queries and keys are SCAP's; "" where none reaches a kernel
    layer: int  # of the decoder, which that module is in
    layers: str  # the decoder's list of layers
    block: str  # attention module of the tower that is read; "" where none can be
    blocks: str  # the tower's list of blocks
    number: int  # of the block in that list
    full: tuple[int, ...]  # blocks of that list that see as much as this one does; others look at windows
    classes: int  # class tokens in front of the patches
    why: str = ""  # the tower cannot be read
    ahead: bool = False  # whether rows of pictures attend to later ones
    uncut: str = ""  # why rows cannot leave between the decoder's layers
    unkept: str = ""  # why positions cannot be kept
    unasked: str = "no attention module hands it to a kernel"  # why SCAP cannot be read, where there is no `first`

    def lines(self) -> list[str]:
        """The record in words, for `model check`."""
        tower = f"{self.block}, {self.classes} class token(s)" if self.block else f"not read: {self.why}"
        return [
            f"features      {', '.join(self.fields)} ({'a list of pictures' if self.listed else 'one tensor'})",
            f"positions     {self.axes} axis" if self.axes == 1 else f"positions     {self.axes} axes, which are kept",
            f"SCAP          {self.first or 'none: no attention module of the language model reaches a kernel'}",
            f"vision tower  {tower}",
        ]


class DecoderCall(NamedTuple):
    """Arguments of one call of the language model."""

    arguments: dict[str, Any]
    attention: KernelCall | None  # of its first attention module


# Prompts that run only as far as the language model


class _Entry(NamedTuple):
    found: list[dict[str, Any]]
    leaves: bool


class ReducedRows(NamedTuple):
    """Embeddings of the visual rows of a reduced prompt."""

    visual: Tensor  # [R, S] bool
    values: Tensor  # [n, D]


_REDUCED: ContextVar[ReducedRows | None] = ContextVar("llava_consensus_reduced_rows", default=None)
_ENTRY: ContextVar[_Entry | None] = ContextVar("llava_consensus_decoder_entry", default=None)
_OUTPUTS: ContextVar[list[Tensor] | None] = ContextVar("llava_consensus_block_outputs", default=None)
_ASIDE: ContextVar[bool] = ContextVar("llava_consensus_stand_aside", default=False)


def note_entry(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a decoder: keeps what it is given, and leaves where no more is wanted; or puts in reduced
    rows, where the model makes other embeddings of features than these themselves.
    """
    entry, rows = _ENTRY.get(), _REDUCED.get()
    if entry is None and rows is not None and kwargs.get("inputs_embeds") is not None:
        embeds = kwargs["inputs_embeds"]
        visual = rows.visual[..., None].to(embeds.device)
        return args, {**kwargs, "inputs_embeds": embeds.masked_scatter(visual, rows.values.to(embeds))}
    if entry is None:
        return None
    names = inspect.signature(type(module).forward).parameters
    entry.found.append({**dict(zip(list(names)[1:], args, strict=False)), **kwargs})
    if entry.leaves:
        raise Left
    return None


def note_output(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of a block of the tower: keeps the states it returns."""
    outputs = _OUTPUTS.get()
    if outputs is not None:
        outputs.append(output[0] if isinstance(output, tuple) else output)


def stand_aside(plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces the forward of layers before the first attention: SCAP reads that attention on the embeddings."""
    if not _ASIDE.get():
        return plain(*args, **kwargs)
    return args[0] if args else kwargs["hidden_states"]


def reduced_rows(rows: ReducedRows | None) -> Any:
    """The next decoder that is entered while the body runs reads these rows."""
    return setting(_REDUCED, rows)


# Features


class Fields:
    """The parts of an encoder's output that have one row for each placeholder, as flat tensors and back."""

    def __init__(self, output: Any, count: int) -> None:
        self.output = output
        names = [name for name in output if name not in IGNORED]
        flat = {name: flat_rows(output[name], count) for name in names}
        self.names = [name for name in names if flat[name] is not None]
        self.names.sort(key=lambda name: name != MAIN)
        # layers of features, alone or as pairs with the number of a decoder layer
        self.deep = [name for name in names if name not in self.names and self._layers(output[name], count)]
        if not self.names and not self.deep:
            raise OptionError(
                f"the prompts hold {count} placeholders, and nothing that get_image_features returns has as many rows: "
                "pass input_ids and pixels of one call of the model's own processor, and truncate nothing"
            )
        self._count = count

    @staticmethod
    def _layers(value: Any, count: int) -> bool:
        return (
            isinstance(value, list | tuple)
            and bool(value)
            and all(flat_rows(_of_layer(one), count) is not None for one in value)
        )

    def flat(self) -> list[Tensor]:
        """Every part as [rows, D]: fields first, then layers."""
        parts = [flat_rows(self.output[name], self._count) for name in self.names]
        parts += [flat_rows(_of_layer(one), self._count) for name in self.deep for one in self.output[name]]
        return [part for part in parts if part is not None]

    def sizes(self) -> list[int] | None:
        """PictureRows of each entry of a list; None where the features are no list of matrices."""
        value = self.output[self.names[0]] if self.names else _of_layer(self.output[self.deep[0]][0])
        if not isinstance(value, list | tuple) or not all(one.ndim == 2 for one in value):
            return None
        return [len(one) for one in value]

    @property
    def listed(self) -> bool:
        """True if the embedded field is a list."""
        return bool(self.names) and isinstance(self.output[self.names[0]], list | tuple)

    def taken(self, index: Tensor, counts: list[int]) -> "Fields":
        """Fields of pictures of `counts` rows each, whose rows in order are these [n] of the ones here."""
        parts = [list(part[index].split(counts)) for part in self.flat()]
        return Fields(self.with_parts(parts, split=True), len(index))

    def with_parts(self, parts: list[list[Tensor]], split: bool = False) -> Any:
        """The output with other rows, given a list of matrices for each part, in the order of `flat`; with `split` the
        field that `generate` repeats for beams stays a list of them.
        """
        output, rest = copy.copy(self.output), list(parts)
        for name in self.names:
            own = rest.pop(0)
            output[name] = own if split and name == MAIN else _like(self.output[name], own)
        for name in self.deep:
            layers = [
                (one[0], _like(one[1], rest.pop(0))) if _is_pair(one) else _like(one, rest.pop(0))
                for one in self.output[name]
            ]
            output[name] = type(self.output[name])(layers)
        return output


def flat_rows(value: Any, count: int) -> Tensor | None:
    """A tensor, or list of tensors, as [count, D]; None where it has another number of rows."""
    if isinstance(value, list | tuple) and value and all(isinstance(one, Tensor) and one.ndim >= 2 for one in value):
        if len({one.shape[-1] for one in value}) > 1:
            return None
        value = torch.cat([one.reshape(-1, one.shape[-1]) for one in value])
    elif isinstance(value, Tensor) and value.ndim >= 2:
        value = value.reshape(-1, value.shape[-1])
    else:
        return None
    return value if len(value) == count else None


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], int)


def _of_layer(value: Any) -> Any:
    return value[1] if _is_pair(value) else value


def _like(value: Any, parts: list[Tensor]) -> Any:
    """Matrices in the form that a field has: a list, or one tensor of as many dimensions."""
    if isinstance(value, list | tuple):
        return type(value)(parts)
    joined = torch.cat(parts)
    return joined if value.ndim == 2 else joined[(None,) * (value.ndim - 2)]


# The steps


def seam_of(module: Any) -> Any:
    """The part of a model that encodes pictures.

    Raises:
        OptionError: pictures enter in another way.
    """
    name = type(module).__name__
    base = next((one for one in (getattr(module, "model", None), module) if hasattr(one, "get_image_features")), None)
    if base is None:
        raise OptionError(f"{name}: has no get_image_features, so that its pictures enter elsewhere (cross-attention)")
    if "mm_encoder_outputs" not in inspect.signature(type(module).forward).parameters:
        raise OptionError(
            f"{name}: forward takes no mm_encoder_outputs, so that reduced features cannot be given to it"
        )
    pixels = inspect.signature(type(module).forward).parameters.get("pixel_values")
    if pixels is not None and pixels.default is inspect.Parameter.empty:
        raise OptionError(f"{name}: forward demands pixel_values, so that reduced features cannot take their place")
    if not isinstance(getattr(module.config, "image_token_id", None), int):
        raise OptionError(f"{name}: config.image_token_id is missing, so that visual rows cannot be told from words")
    return base


def text_arguments(module: Any, inputs: dict[str, Any], encoder_names: list[str]) -> dict[str, Any]:
    """The arguments of `forward` for prompts whose features are given: what goes with the rows, and the grids that
    positions are made of.
    """
    taken = inspect.signature(type(module).forward).parameters
    return {
        name: value
        for name, value in inputs.items()
        if isinstance(value, Tensor) and name in taken and name not in NOT_ROWS and not name.startswith(PIXELS)
        and (name not in encoder_names or value.ndim <= 2)
    }  # fmt: skip


def decoder_call(
    module: Any, arguments: dict[str, Any], outputs: dict[str, Any], first: list[nn.Module] | None = None
) -> DecoderCall:
    """Captures the arguments of the language model for prompts whose pictures were encoded to `outputs`. It is not run,
    except where `first` are attention modules: then as far as the kernel of the first one that is reached.

    Args:
        module: the model, without a method.

    Raises:
        OptionError: the language model is not called by this model.
    """
    found: list[dict[str, Any]] = []
    features = {name: copy.copy(output) for name, output in outputs.items()}
    given = {**arguments, "mm_encoder_outputs": features, "use_cache": False}
    calls: list[KernelCall] = []
    with setting(_ENTRY, _Entry(found, first is None)), setting(_ASIDE, first is not None):
        try:
            if first is None:
                module(**given)
            else:
                with recording(first, leaves=True) as calls:
                    module(**given)
        except Left:
            pass
    if not found or found[0].get("inputs_embeds") is None:
        raise OptionError(f"{type(module).__name__}: forward gives its decoder no inputs_embeds")
    return DecoderCall(found[0], calls[0] if calls else None)


class RecordedEncoding(NamedTuple):
    """Output of an encoder for some pictures, and what was read of its tower meanwhile."""

    fields: Fields
    calls: list[KernelCall]
    states: list[Tensor]  # that the block returned
    map: PatchMap | None = None


def encode(
    base: Any, modality: str, arguments: dict[str, Any], modules: list[nn.Module], count: int
) -> RecordedEncoding:
    """Runs the model's own encoder on pictures of `count` placeholders; records the kernel calls of attention modules,
    and the outputs of hooked blocks.
    """
    output, calls, states = _encoded(base, modality, arguments, modules)
    return RecordedEncoding(Fields(output, count), calls, states)


def _encoded(
    base: Any, modality: str, arguments: dict[str, Any], modules: list[nn.Module], cuts_graph: bool = False
) -> tuple[Any, list[KernelCall], list[Tensor]]:
    """Output of an encoder, kernel calls and states; with `cuts_graph` it depends on the modules' attention alone."""
    states: list[Tensor] = []
    with setting(_OUTPUTS, states), recording(modules, cuts_graph=cuts_graph) as calls:
        output = getattr(base, f"get_{modality}_features")(**arguments, return_dict=True)
    return output, calls, states


def map_patches(
    base: Any, modality: str, arguments: dict[str, Any], module: nn.Module, count: int, counts: "Any"
) -> RecordedEncoding:
    """Encodes pictures and finds which patches make which row, by one block of the tower.

    Args:
        count: placeholders.
        counts: gives the rows of each picture of features.
    Raises:
        Mixed: the block's positions do not feed one row each.
    """
    # An inference tensor cannot be differentiated through: outside of inference mode its copy can.
    given = {
        name: value.clone() if torch.is_tensor(value) and value.is_inference() else value
        for name, value in arguments.items()
    }
    with torch.inference_mode(False), torch.no_grad():  # until the tap turns it on at the module's first kernel call
        output, calls, states = _encoded(base, modality, given, [module], cuts_graph=True)
    with torch.inference_mode(False), torch.enable_grad():
        fields = Fields(output, count)
        attended = [call.output for call in calls if call.output is not None]
        fed = fed_rows(fields.flat()[0], attended) if attended else None
    if fed is None:
        raise Mixed("its positions feed no row")
    sizes = counts(fields)
    found = patch_map(calls, fed, sizes, sides_of(arguments, sizes))
    return RecordedEncoding(detached(fields, count), calls, [one.detach() for one in states], found)


def detached(fields: Fields, count: int) -> Fields:
    """The fields detached from the graph."""
    output = copy.copy(fields.output)
    for name in (*fields.names, *fields.deep):
        output[name] = _detached(output[name])
    return Fields(output, count)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return type(value)(_detached(one) for one in value) if isinstance(value, list | tuple) else value


def sees_ahead(call: KernelCall) -> bool:
    """True if rows of a call attend to later ones, as where the rows of a picture see each other."""
    mask = call.mask
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-1] != mask.shape[-2]:
        return False
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    filled = seen[..., -1:, :].transpose(-1, -2)  # rows that the last one sees; what padding sees means nothing
    return bool((seen.triu(1) & filled).any())


def language_facts(module: Any, entered: DecoderCall, fields: Fields, visual: Tensor) -> dict[str, Any]:
    """The record's fields about the language model, given its call by prompts with these visual rows [R, S]."""
    embeds, positions = entered.arguments["inputs_embeds"], entered.arguments.get("position_ids")
    rows, features = embeds[visual], fields.flat()[0]
    first, layers, number, uncut, ahead = "", "", 0, "", False
    if entered.attention is not None and entered.attention.query.shape[2] == visual.shape[1]:
        first = next(path for path, one in module.named_modules() if one is entered.attention.module)
        layers, number = listed_in(module, first)
        ahead = sees_ahead(entered.attention)
    if fields.deep and not hasattr(module.get_decoder(), "_deepstack_process"):
        uncut = "features are added between its layers"
    return {
        "fields": (*fields.names, *fields.deep),
        "listed": fields.listed,
        "embedded": bool(fields.names) and features.shape == rows.shape and torch.equal(features.to(rows), rows),
        "axes": positions.shape[0] if positions is not None and positions.ndim == 3 else 1,
        "first": first,
        "layer": number,
        "layers": layers,
        "ahead": ahead,
        "uncut": uncut,
    }


def tower_modules(base: Any, calls: list[KernelCall]) -> list[nn.Module]:
    """The attention modules of the tower that were called, in order: those under the child of `base` that called first.
    A projector with attention of its own, such as a Q-Former, is no block of patches.
    """
    paths = {id(one): name for name, one in base.named_modules()}
    if not calls:
        return []
    tower = paths[id(calls[0].module)].split(".")[0]
    modules = dict.fromkeys(call.module for call in calls if paths[id(call.module)].split(".")[0] == tower)
    return [
        one for one in modules if all(call.query.shape[2] == call.key.shape[2] for call in calls if call.module is one)
    ]


def listed_in(module: nn.Module, path: str) -> tuple[str, int]:
    """The list of layers that a module's path leads through, and the number of its layer: the innermost one."""
    parts = path.split(".")
    for place in range(len(parts) - 1, 0, -1):
        above = ".".join(parts[:place])
        if parts[place].isdigit() and isinstance(module.get_submodule(above), nn.ModuleList):
            return above, int(parts[place])
    return "", 0


def fingerprint(module: Any) -> str:
    """Key under which models share a record: class, configuration, format of weights, versions."""
    import transformers

    told = (
        f"{type(module).__module__}.{type(module).__qualname__}",
        module.config.to_json_string(use_diff=False),
        str(module.dtype),
        str(getattr(module.config, "_attn_implementation", "")),
        torch.__version__,
        transformers.__version__,
        str(VERSION),
    )
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def cached(key: str) -> Record | None:
    """The record that another process left under a key; None without one, or where it cannot be read."""
    with suppress(OSError, ValueError, TypeError):
        told = dict(json.loads(_file(key).read_text("utf-8")))
        values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in told.items()}
        return Record(**values)
    return None


def cache(key: str, record: Record, module: Any) -> None:
    """Leaves a record for other processes; without a folder that can be written each derives its own.

    Only of a class of transformers, whose code follows from its version, and only a record that was proved whole:
    weights that are zero, for one, can hide what other weights of the configuration show.
    """
    whole = record.first and record.block and not record.unkept
    if whole and type(module).__module__.startswith("transformers."):
        with suppress(OSError):
            file = _file(key)
            file.parent.mkdir(parents=True, exist_ok=True)
            own = file.with_suffix(f".{os.getpid()}")
            own.write_text(json.dumps(asdict(record)), "utf-8")
            own.replace(file)


def _file(key: str) -> Path:
    return cache_folder("records") / f"{key}.json"
