"""ConsensusDrop: fewer visual tokens for vision-language models, without training.

    from llava_consensus import attach
    with attach(model, method="consensusdrop", tokens=64):
        model.generate(...)

Nothing heavy is imported until a name is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llava_consensus.hosts.attachment import Attachment

_HOME = {
    "Budget": "reduction.budget",
    "Share": "reduction.budget",
    "Reduction": "reduction.tokens",
    "VisualTokens": "reduction.tokens",
    "METHODS": "methods",
    "make": "methods",
    "HOSTS": "hosts",
    "timed": "evaluation.bench.timing",
    "load": "evaluation.models",
    "BENCHMARKS": "evaluation.benchmarks",
    "vllm": "serving.setting:engine_arguments",
    "recommend": "evidence",
}
__all__ = ["attach", "example_image", "list_methods", "load", "recommend", "timed", "vllm"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("llava-consensus")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), attribute or name)


def __dir__() -> list[str]:
    return sorted(__all__)


def list_methods() -> list[str]:
    """Names that `attach` takes as `method`."""
    from llava_consensus.methods import METHODS

    return list(METHODS)


def example_image() -> Any:
    """A bundled image of PIL, 384 x 304 pixels: a cake, three rockets and a sign that says LA, drawn of emoji."""
    from importlib.resources import files

    from PIL import Image

    with files("llava_consensus").joinpath("example.jpg").open("rb") as file:
        return Image.open(file).convert("RGB")


def attach(
    model: Any,
    method: str = "consensusdrop",
    tokens: int | float = 64,
    merged: int | None = None,
    total: int | None = None,
    host_options: dict[str, str] | None = None,
    **options: Any,
) -> "Attachment":
    """Makes one model instance answer from `tokens` visual tokens; detach with `.detach()` or by leaving a `with`
    block.

    Args:
        model: a loaded model of a class some host adapts (`HOSTS`).
        method: name in `METHODS`.
        tokens: T, visual tokens that the language model gets for one image; N or more is the unpatched model. A
            fraction in (0, 1), such as 0.1, is that share of each image's own tokens. For each tile if it is not known
            how the model groups the tiles of an image.
        merged: M of them, merged; None is the paper's share.
        total: the most visual tokens of one prompt: where its images have more, the older ones are made smaller.
        host_options: options of the model's host (`HOSTS`), for example `{"layout": "2880"}`.
        options: fields of the method, for example `alpha=1.0`.
    Raises:
        OptionError: for an unknown name, or a value outside its bound.
    """
    from llava_consensus.errors import OptionError
    from llava_consensus.hosts import attached
    from llava_consensus.methods import make
    from llava_consensus.reduction.budget import budget, checked_total

    if isinstance(method, int | float):
        raise OptionError(f"method={method!r}: must be a name. A number of tokens is given as tokens={method!r}")
    if not isinstance(method, str):
        raise OptionError(f"method={method!r}: must be the name of a method (llava-consensus list)")
    if host_options is not None and not isinstance(host_options, dict):
        raise OptionError(f"host_options={host_options!r}: must be a dictionary of names and values")
    return attached(model, make(method, **options), budget(tokens, merged), checked_total(total), host_options)
