"""What the hosts of older `llava` packages share. Their code makes mask and positions from the length of the cache and
answers no padded batch, so prompts are asked one by one, and `generate` gives the prompt back in front of the answer.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import Tensor

from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.models.weights import incomplete_refused, refuse_not_finite
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Encoded, Prompt
from llava_consensus.hosts.llava.adapter import LlavaModel
from llava_consensus.hosts.llava.host import LlavaHost
from llava_consensus.hosts.llava.prepare import PREPARE, generate
from llava_consensus.hosts.loading import Loading
from llava_consensus.reduction.method import Method, Place


class OlderLlava(LlavaModel):
    """A view of a model of an older `llava` package."""

    called: str  # the model, in messages

    @property
    def most_tiles(self) -> int:
        """A picture is one square."""
        return 1

    def prepare(self, attachment: Attachment, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Takes the place of the function that assembles prompts."""
        raise NotImplementedError

    def entrances(self, attachment: Attachment) -> dict[str, Callable[..., Any]]:
        """The function that assembles prompts, and `generate`, which makes a call of its own."""
        entrance = wraps(type(self.module).generate)(partial(generate, attachment))
        return {PREPARE: partial(self.prepare, attachment), "generate": entrance}

    def check_method(self, method: Method) -> None:
        """Raises OptionError for methods that do not work on any such model."""
        if method.place is Place.DECODER or method.positions != "renumber":
            raise OptionError(
                f"{type(method).__name__}: {self.called}'s own code makes mask and positions from the length of the "
                "cache, so nothing can be cut between its layers and positions cannot be kept. Take a method that acts "
                "after the tower, and positions=renumber"
            )


class OlderLlavaHost(LlavaHost):
    """A model of an older `llava` package with its tokenizer and image processor."""

    shares = False

    @property
    def visual_tokens(self) -> int:
        """Patches of one picture, or of one frame."""
        tower: Any = self.view.tower
        tokens: int = tower.tokens
        return tokens

    def groups(self, attachment: Attachment, encoded: list[list[Encoded]], ids: list[Tensor]) -> list[list[int]]:
        """Each prompt alone."""
        return [[row] for row in range(len(ids))]

    def _ask(self, pictures: list[Encoded], rows: list[Tensor], prompt: Prompt) -> list[str]:
        """Texts by the model's own `generate`."""
        ids, mask = self.pad(rows)
        images = self.blank(pictures) if pictures else None
        output = self.model.generate(ids, images=images, attention_mask=mask, **self.generation(prompt))
        return self.decode(output[:, ids.shape[1] :])


def check_loading(loading: Loading, path: str, package: str) -> None:
    """Raises OptionError for what the loader of an older package cannot be told."""
    if loading.attention != "auto" or loading.device_map not in (None, "auto"):
        raise OptionError(
            f"{path}: the loader of {package} takes no attention kernel, and no device map but auto. Leave them out"
        )


def loaded_by(load_pretrained_model: Any, name_of: Any, path: str, loading: Loading) -> tuple[Any, Any, Any]:
    """Model, tokenizer and processors of a checkpoint, by the loader of its package.

    Args:
        load_pretrained_model, name_of: of the package, which calls the second `get_model_name_from_path`.
        path: folder of the checkpoint.
        loading: how, with nothing left open.
    Raises:
        DataError: for a checkpoint that cannot be loaded, or whose weights are not those of its config.json.
    """
    bits: dict[str, Any] = {} if loading.bits is None else {f"load_{loading.bits}bit": True}
    try:
        with incomplete_refused():
            tokenizer, model, processors, _ = load_pretrained_model(
                path, None, name_of(path), device=loading.device, **bits
            )
    except DataError:
        raise
    except Exception as error:  # foreign code breaks in any way
        raise DataError(f"model={path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    loading.cast(model)
    refuse_not_finite(path, model)
    return model.eval(), tokenizer, processors
