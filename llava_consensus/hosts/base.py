"""Base classes of a host, the adapter of one family of models. Code for any model is in `attachment.py`; a host
supplies a `Model`: its `Tower`, its `Decoder`, and the functions of the model that are replaced while a method is
attached, in which it assembles sequences (`Assembled`).
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import Need, Reduction

EXPERTS = "experts"  # channel of sequences for an `ExpertDecoder`
IGNORE = -100  # label of rows without a target
PLACE_OF_PICTURE = -200  # stands for a picture in the ids of a prompt, as in official LLaVA


class Tiles(NamedTuple):
    """Output of a vision tower for the tiles of one picture (or several), with the parts a method asked for."""

    projected: Tensor  # [T, N, D] as the language model would receive them
    parts: dict[str, Tensor]  # query, key [T, H, C + n, d], features [T, n, D_v], slot [T, N], ...: see `Tap`
    side: int | None = None  # tokens in a row of a tile of this picture; None where it is as in `Tower.side`
    members: Tensor | None = None  # [N, m] the block rows each token is made of; None where it is as in `Tower.members`
    class_is_token: bool = False  # whether the class token of each tile is a token, its first one


class PictureOutcome(NamedTuple):
    """Result for one picture of one prompt."""

    row: int  # of the batch
    before: int  # visual tokens the language model would have received
    after: int  # visual tokens it received; of methods that cut between its layers, those left after the last cut
    structural: int  # newline tokens, which are never candidates
    reductions: tuple[tuple[int, Reduction], ...]  # (tile, its reduction, one unit) for every unit that was reduced
    entering: tuple[int, ...] = ()  # visual tokens that entered each decoder layer, where that differs by layer
    origin: tuple[Tensor, Tensor] | None = None  # [before] tile, and token of that tile, of each visual token

    def __repr__(self) -> str:
        structural = f" and {self.structural} structural ones" if self.structural else ""
        parts = f", reduced in {len(self.reductions)} parts" if len(self.reductions) > 1 else ""
        return f"<picture of row {self.row}: {self.before} -> {self.after} tokens{structural}{parts}>"


class Overlay:
    """An object with some attributes replaced; the object itself stays as it is."""

    def __init__(self, own: Any, **replaced: Any) -> None:
        vars(self).update(replaced, own=own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class Offer(NamedTuple):
    """Capabilities of the vision side of a family's usual checkpoint, known without one (`matrix.py`)."""

    needs: frozenset[Need]  # as `Tower.offers`, and QUESTION where the tower is one side of a whole CLIP model
    inside: Mapping[Place, str] = MappingProxyType({})  # as `inside` of towers
    blocks: int = 24
    feature_block: int = 22  # the one whose output feeds the projector


class Heads(NamedTuple):
    """Queries of asked rows and keys of all rows in one layer's attention."""

    query: Tensor  # [P, H, L, d]
    key: Tensor  # [R, H_kv, S, d]
    cos: Tensor  # [R, S, d] of the rotation that is still to be done
    sin: Tensor
    scale: float
    cap: float = 0.0  # of logits, tanh(x / cap) * cap; 0 for none


class Tap(NamedTuple):
    """A module of a model whose output is read while it runs; the output itself stays as it is."""

    module: nn.Module
    read: Callable[[Any], dict[str, Tensor]]  # the module's output -> parts by name, first dimension tiles or rows


class Tower(Protocol):
    """View of the vision side of a model."""

    tokens: int  # N visual tokens of one tile; the most there can be where it depends on the picture
    side: int  # tokens in a row of a tile, 0 where they form no grid
    classes: int  # C, class tokens in front of the patches in the blocks
    blocks: Sequence[Any]
    feature_block: int  # the one whose output feeds the projector
    members: Tensor | None  # [N, m] the block rows each token is made of; None: one each, in order
    offers: frozenset[Need]  # what it can give of what methods ask for

    def encode(self, pixels: Tensor) -> Tensor:
        """Tiles through tower and projector, by the model's own code: [T, ...] -> [T, N, D]."""
        ...

    def project(self, features: Tensor) -> Tensor:
        """The model's projector: [..., D_v] -> [..., D]."""
        ...

    def scale(self, block: int) -> float:
        """Scale of the attention logits of a block."""
        ...

    def taps(self, needs: frozenset[Need], features: int, attention: int) -> list[Tap]:
        """Taps of the parts, given the block whose output and the one whose queries and keys are wanted: `query` and
        `key` for ATTENTION, `features` and `class_feature` under these needs.
        """
        ...


class Decoder(Protocol):
    """View of the inner language model."""

    module: Any  # the inner model, whose forward runs the layers
    layers: Sequence[Any]
    reach: int  # positions the model was made for
    follows_length: bool  # whether the angles of a place change with the length of the sequence
    embedding_scale: float  # what the inner model multiplies embeddings with before its first layer

    @property
    def kernel(self) -> str:
        """Attention implementation: sdpa, eager, ..."""
        ...

    def norm(self, hidden: Tensor) -> Tensor:
        """The norm after the last layer."""
        ...

    def normed(self, layer: int, hidden: Tensor) -> Tensor:
        """States [R, S, D] as the attention of a layer reads them: after its norm."""
        ...

    def query(self, layer: int, normed: Tensor) -> Tensor:
        """Queries before rotation, by the layer's own modules: [R, L, D] -> [R, H, L, d]."""
        ...

    def key(self, layer: int, normed: Tensor) -> Tensor:
        """Keys before rotation: [R, S, D] -> [R, H_kv, S, d]."""
        ...

    def scale(self, layer: int) -> float:
        """Scale of the attention logits of a layer."""
        ...

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, S, d] of positions [R, S], or [R, S, A] of A axes."""
        ...


class ExpertDecoder(Decoder, Protocol):
    """A decoder that projects the rows of pictures by other weights than those of words. Its sequences have a channel
    `EXPERTS`.
    """

    def choosing(self, experts: Tensor) -> Decoder:
        """The decoder for sequences in which rows that are not 0 in `experts` [R, S] are read by the visual weights."""
        ...


class CutDecoder(Decoder, Protocol):
    """A decoder that methods can cut between its layers. One whose layers are of several kinds has `at(layer)`, a view
    for the layers of one `kind`, with their `window`; one whose rows attend to later ones too has `sees_ahead` (see
    `derived/decoder.py`).
    """

    def positions(self, layer_arguments: dict[str, Any], rows: int, outer: Mapping[str, Any]) -> Tensor:
        """Positions [rows, S], or [rows, S, A] of A axes, from the arguments a layer was given and those that the inner
        model was given.
        """
        ...

    def taps(self, layer: int) -> list[Tap]:
        """Taps of `query` [R, H, S, d] and `key` [R, H_kv, S, d] of a layer while it runs."""
        ...

    def value_taps(self, layer: int) -> list[Tap]:
        """Taps of the values of a layer while it runs, as `query` and as `key` [R, H_kv, S, d]."""
        ...

    def arguments(self, hidden: Tensor, positions: Tensor, mask: Tensor | None) -> dict[str, Any]:
        """Kwargs of a layer's forward for these positions [R, W] or [R, W, A] and this mask [R, 1, q, W]: true where a
        column is seen, or additive; None is the plain causal mask.
        """
        ...

    def angles(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines by which attention is calibrated by distance; without it those of `rotary`."""
        ...

    def tables(self) -> Sequence[nn.Module]:
        """Rotary modules that look positions up in a table as long as their own cache; none on current versions."""
        ...


class Model(Protocol):
    """View of a model, supplied by its host. Tower and decoder are read once for each view."""

    module: Any

    @property
    def tower(self) -> Tower | None: ...
    @property
    def decoder(self) -> CutDecoder: ...
    @property
    def most_tiles(self) -> int:
        """The most tiles a picture of this model can have."""
        ...

    def clip_text(self) -> Any:
        """CLIP's text side that belongs to the vision tower, None where the tower is of no CLIP model; OptionError
        where it cannot be loaded.
        """
        ...

    def of(self, module: nn.Module) -> "Model":
        """A new view of a module of this class: the same one, or a replica."""
        ...

    def check(self, method: Method) -> None:
        """Raises OptionError for a method that this model cannot have, with the remedy."""
        ...

    def entrances(self, attachment: Any) -> dict[str, Callable[..., Any]]:
        """Functions that take the place of the module's own while a method is attached, by name; those of a module
        inside of it by their path.
        """
        ...
