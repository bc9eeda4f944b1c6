"""The seam in official LLaVA (the `llava` package, wheel and git HEAD): where a method is attached to a model and
taken off again.

An attachment shadows `prepare_inputs_labels_for_multimodal` of one model instance. The official function still
assembles the full sequence, every branch of it; called once more on a stand-in with one channel it tells which rows
are visual (provenance), and the assembled rows are then reduced. Nothing of LLaVA is copied, the class is never
touched, and `detach` removes the one attribute that was added.
"""

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import ImageOutcome, VisionTaps
from llava_consensus.hosts.decoder.hooks import DecoderSeam
from llava_consensus.hosts.llava.encode import blank_images, take_taps
from llava_consensus.hosts.llava.shape import most_tiles
from llava_consensus.hosts.sequence.layout import Layout, read_layout
from llava_consensus.hosts.sequence.reduce import Source, outcomes, reduce_sequences
from llava_consensus.hosts.sequence.splice import Sequences, cut, pad_left
from llava_consensus.hosts.tower import blocks as vision_seam
from llava_consensus.hosts.tower import taps as capture
from llava_consensus.hosts.tower.clip_text import text_side
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.stopwatch import Stopwatch

SEAM = "prepare_inputs_labels_for_multimodal"
NO_TEXT = "no text after the image: reduced by vision saliency alone"


class Call(NamedTuple):
    """Arguments of the seam, in its own order."""

    input_ids: Tensor
    position_ids: Tensor | None
    attention_mask: Tensor | None
    past_key_values: Any
    labels: Tensor | None
    images: Any
    image_sizes: Any = None


class View:
    """A model with some attributes replaced for one call; the model itself stays as it is."""

    def __init__(self, model: Any, **replaced: Any) -> None:
        vars(self).update(replaced, _model=model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class LlavaAttachment:
    """A method attached to one LLaVA model. `outcomes` says what became of the pictures of the last call."""

    def __init__(self, model: Any, method: Method, budget: Budget) -> None:
        check_model(model, method)
        self.model, self.method, self.budget = model, method, budget
        self.official: Callable[..., tuple[Any, ...]] = getattr(type(model), SEAM)
        self.outcomes: list[ImageOutcome] = []
        self.notes: tuple[str, ...] = ()
        self.stages: Stopwatch | None = None  # of the last reduction
        self.overrides: dict[str, Any] = {}  # config entries that differ for calls of the host's own
        self.encoded: VisionTaps | None = None  # pictures the host has put through the tower already
        self._warned = False
        self.questions: list[str] | None = None  # text asked in each row of the batch, for methods that read it
        self.clip_text = text_side(model, method)
        self.decoder = DecoderSeam(model.get_model(), method, self._report) if method.seam == "decoder" else None
        self._check_tower()
        setattr(model, SEAM, self.prepare)

    def _check_tower(self) -> None:
        """Raises OptionError where a method inside the tower cannot meet the budget of some picture."""
        tower = self.model.get_vision_tower()
        if tower is not None and vision_seam.acts_inside(self.method):
            most = most_tiles(self.model.config, tower.config.image_size)
            vision_seam.check(tower, self.method, [*self._tile_tokens(1), *self._tile_tokens(most)])

    @property
    def active(self) -> bool:
        """Whether the method is on the model now."""
        return vars(self.model).get(SEAM) == self.prepare

    def detach(self) -> None:
        """Gives the model back as it was. Detaching twice does nothing."""
        if self.active:
            delattr(self.model, SEAM)
        if self.decoder is not None:
            self.decoder.detach()

    def __enter__(self) -> "LlavaAttachment":
        return self

    def __exit__(self, *error: Any) -> None:
        self.detach()

    @property
    def reads_prompts(self) -> bool:
        """Whether what is left of a picture depends on the question asked about it."""
        tower = self.model.get_vision_tower()
        reduces = self.method.reduces and self.budget.tokens < tower.num_patches
        tiled = most_tiles(self.model.config, tower.config.image_size) > 1 and self.method.reduces
        reads = self.method.seam == "decoder" or bool(self.method.needs & {"probe", "fingerprint", "question"})
        return (reduces or tiled) and reads

    def milliseconds(self) -> dict[str, float]:
        """Time the last reduction took, by stage: the host's bookkeeping and the method's own work."""
        own = {id(one.stages): one.stages for outcome in self.outcomes for _, one in outcome.reductions}
        spent: dict[str, float] = {}
        for stages in (self.stages, *own.values()):
            for name, time in stages.milliseconds().items() if stages else ():
                spent[name] = spent.get(name, 0.0) + time
        return spent

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Takes the place of the official function on this instance: same arguments, same six results."""
        call = Call(*args, **kwargs)
        if self.model.get_vision_tower() is None or call.images is None or call.input_ids.shape[1] == 1:
            return self.official(self.model, *call)
        stages = Stopwatch(self.model.device)
        with stages.time("layout"):
            layout = self._layout(call)
        if layout.reduced() and self.decoder is None:
            self.stages = stages
            return self._reduce(call, layout, stages)
        self.outcomes, self.notes, self.stages = outcomes(layout, []), (), None
        own = self.encoded is not None or vision_seam.acts_inside(self.method)
        encoder = {"encode_images": lambda images: self._taps(call, images).projected} if own else {}
        host = View(self.model, config=self._config(), **encoder) if own or self.overrides else self.model
        result = self.official(host, *call)
        if self.decoder is not None:
            self.decoder.arm(layout, self.budget, result[4])
            self.outcomes = [self.decoder.untouched(one) for one in self.outcomes]
        return result

    def _report(self, cut: dict[int, ImageOutcome], stages: Stopwatch) -> None:
        """Takes in what became of the pictures that were cut between decoder layers; the others passed whole."""
        self.outcomes = [cut.get(index, one) for index, one in enumerate(self.outcomes)]
        self.stages = stages

    def taps(self, images: Tensor, tiles_of: list[int]) -> VisionTaps:
        """Encodes the tiles [T, 3, h, w] of pictures of so many tiles each and takes what the method needs."""
        tokens = [count for tiles in tiles_of for count in self._tile_tokens(tiles)]
        return take_taps(self.model, images, self.method, tokens)

    def _taps(self, call: Call, images: Tensor) -> VisionTaps:
        """The same for a call, unless the host has encoded its pictures already."""
        return self.taps(images, blank_images(call.images)[0]) if self.encoded is None else self.encoded

    def _tile_tokens(self, tiles: int) -> list[int]:
        """Budget of each tile of a picture."""
        shares = [share.tokens for share in self._shares(tiles, self.model.get_vision_tower().num_patches)]
        return shares if len(shares) == tiles else shares * tiles

    def _config(self, **changes: Any) -> Any:
        """A copy of the model's configuration with changes; the model's own is never written to."""
        config = copy.copy(self.model.config)
        for name, value in {**self.overrides, **changes}.items():
            setattr(config, name, value)
        return config

    def _layout(self, call: Call) -> Layout:
        """Where the visual tokens will stand, from the official function itself called on a stand-in of one channel
        (llava.md 9).
        """
        tower = self.model.get_vision_tower()
        tiles_of, blank = blank_images(call.images)
        untruncated = {"tokenizer_model_max_length": None} if self.decoder is None else {}

        def number(images: Tensor) -> Tensor:
            shape = (images.shape[0], tower.num_patches, 1)
            return torch.arange(1, shape[0] * shape[1] + 1, dtype=torch.float64).view(shape)

        inner = SimpleNamespace(
            embed_tokens=lambda ids: torch.zeros(*ids.shape, 1, dtype=torch.float64), get_vision_tower=lambda: tower
        )
        stand_in = SimpleNamespace(
            config=self._config(**untruncated),
            device=torch.device("cpu"),
            model=SimpleNamespace(image_newline=torch.tensor([-1.0], dtype=torch.float64)),
            encode_images=number,
            get_model=lambda: inner,
            get_vision_tower=lambda: tower,
        )
        ids = call.input_ids.cpu()
        mask = torch.ones_like(ids) if call.attention_mask is None else call.attention_mask.cpu()
        _, _, real, _, rows, _ = self.official(stand_in, ids, None, mask, None, None, blank, call.image_sizes)
        shares = [self._shares(tiles, tower.num_patches) for tiles in tiles_of]
        return read_layout(rows[..., 0].long(), real.bool(), tiles_of, tower.num_patches, shares)

    def _shares(self, tiles: int, patches: int) -> list[Budget]:
        """Budgets of a picture of so many tiles: one for all, or equal shares of the most tiles a picture of this
        model can have.
        """
        tower = self.model.get_vision_tower()
        most = max(tiles, most_tiles(self.model.config, tower.config.image_size)) if tiles > 1 else 1
        if not self.method.reduces or self.budget.tokens >= most * patches:
            return [Budget(most * patches)]
        if tiles == 1 or self.method.tile_budget == "global" or self.decoder is not None:
            return [self.budget]
        return self.budget.share(most)[:tiles]

    def _reduce(self, call: Call, layout: Layout, stages: Stopwatch) -> tuple[Any, ...]:
        """Assembles the full sequence officially, reduces its visual rows, and rebuilds what the official function
        returns.
        """
        config = self._config(tokenizer_model_max_length=None)  # truncation must judge the reduced length
        seen: list[VisionTaps] = []

        def encode(images: Tensor) -> Tensor:
            seen.append(self._taps(call, images))
            return seen[0].projected

        _, _, _, cache, embeds, labels = self.official(View(self.model, config=config, encode_images=encode), *call)
        real = layout.real.to(embeds.device)
        full = Sequences(embeds, labels, (real.cumsum(1) - 1).clamp_min(0), real)
        text = self.clip_text
        clip = None if text is None else text.sides(seen[0].features, self.questions, len(call.input_ids))
        source = Source(seen[0], self.model.get_model(), prompt_fingerprints(call), clip)
        out, self.outcomes = reduce_sequences(full, layout, self.method, source, stages)
        self._note_missing_text(layout)
        limit = getattr(self._config(), "tokenizer_model_max_length", None)
        out = out if limit is None else cut(out, limit)
        if getattr(config, "tokenizer_padding_side", "right") == "left":
            out = pad_left(out)
        return (
            None,
            self._positions(out, call.position_ids),
            _like(out.real, call.attention_mask),
            cache,
            out.embeds,
            out.labels,
        )

    def _positions(self, out: Sequences, given: Tensor | None) -> Tensor | None:
        """Position ids of the reduced sequence: the original ones, or none where the official function returns none."""
        if self.method.positions == "keep":
            return out.positions
        return _like((out.real.cumsum(1) - 1).clamp_min(0) * out.real, given)

    def _note_missing_text(self, layout: Layout) -> None:
        """Says once, and in every record, that a prompt had nothing to probe with."""
        missing = "probe" in self.method.needs and any(len(picture.text) == 0 for picture in layout.pictures)
        self.notes = (NO_TEXT,) if missing else ()
        if missing and not self._warned:
            self._warned = True
            warnings.warn(NO_TEXT, stacklevel=4)


def check_model(model: Any, method: Method) -> None:
    """Raises OptionError for what cannot be attached, with the remedy."""
    if type(model).__name__ == "LlavaMptForCausalLM":
        raise OptionError(
            "LLaVA's MPT class is broken upstream (it calls a five-argument form that is gone): "
            "use a Llama or Mistral checkpoint"
        )
    if SEAM in vars(model):
        raise OptionError("this model has a method attached already: detach it first")
    tower = model.get_vision_tower()
    if tower is not None and getattr(tower, "select_feature", "patch") != "patch":
        raise OptionError(
            f"mm_vision_select_feature={tower.select_feature!r} must be 'patch': "
            "a class token among the patches is no candidate"
        )
    if tower is not None and tower.is_loaded:
        blocks = capture.vision_blocks(tower.vision_tower)
        index = capture.feature_block(blocks, tower.select_layer, method.vision_layer)
        capture.attending_block(blocks, index, method.attention_ahead)
    if method.positions == "keep" and method.seam != "decoder" and int(transformers.__version__.split(".")[0]) < 5:
        raise OptionError(
            f"positions=keep needs transformers >= 5: "
            f"generate() of {transformers.__version__} does not advance given positions"
        )


def prompt_fingerprints(call: Call) -> Tensor:
    """A number for each prompt of the batch, the same wherever padding stands: int64 [R]."""
    ids = call.input_ids
    real = torch.ones_like(ids) if call.attention_mask is None else call.attention_mask.to(ids.dtype)
    return (ids * real * (real.cumsum(1) * 0x2545F4914F6CDD1D)).sum(1)


def _like(values: Tensor, given: Tensor | None) -> Tensor | None:
    """None where the caller gave None, else the values in the caller's dtype: what the official function does."""
    return None if given is None else values.to(given.dtype)
