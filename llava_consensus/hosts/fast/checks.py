"""Who cannot answer in fixed shapes, said when a method is attached or before weights load."""

from typing import Any

from llava_consensus.errors import OptionError
from llava_consensus.hosts.tower.inside import acts_inside
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import Need

DEVICES = ("cpu", "cuda")
KERNELS = ("sdpa", "eager")
CHANGING = ("dynamic", "longrope")  # rotary embeddings whose angles depend on how long the sequence is
ADAPTED = (("llava_consensus.hosts.llava", ""), ("llava_consensus.hosts.hf", "llava:Llava"))  # package and view
OLDEST = 5  # version of transformers whose decoders take a given mask and any cache


def check_method(method: Method) -> None:
    """Raises OptionError for a method that does not leave prompts of one length, or asks the host between."""
    name = type(method).__name__
    if method.place is Place.DECODER:
        raise OptionError(
            f"fast=True: {name} cuts between decoder layers, so that the cache has another length in every layer, and "
            "a length of its own for every prompt. Take a method that acts before the language model, or fast=False"
        )
    if method.adaptive:
        raise OptionError(
            f"fast=True: {name} leaves a number of tokens that depends on the picture, and captured are prompts of one "
            "length. Set its option for a fixed number of tokens, or fast=False"
        )
    if Need.QUESTION in method.needs:
        raise OptionError(
            f"fast=True: {name} has CLIP's text tower read the question, cut into segments on the host. Take another "
            "method, or fast=False"
        )
    if acts_inside(method):
        raise OptionError(
            f"fast=True: {name} acts before the projector, which is not captured. Take another method, or fast=False"
        )
    if method.positions != "renumber":
        raise OptionError(
            f"fast=True: positions={method.positions!r} of {name} differ from the places in the cache, and captured "
            "are positions that are equal to them. Take positions=renumber, or fast=False"
        )


def check_host(model: str, entry: Any) -> None:
    """Raises OptionError for a checkpoint whose host is not adapted, before its weights load.

    Args:
        model: its name, for the message.
        entry: of `HOSTS`.
    """
    if (entry.package, entry.view) not in ADAPTED:
        raise OptionError(
            f"fast=True: model {model!r} is not adapted to answering in fixed shapes; official LLaVA and "
            "LlavaForConditionalGeneration are. Leave fast out"
        )


def check_model(view: Any) -> None:
    """Raises OptionError for a model that is not adapted."""
    import transformers

    module = view.module
    if int(transformers.__version__.split(".")[0]) < OLDEST:
        raise OptionError(
            f"fast=True: needs transformers >= {OLDEST}, whose decoders take a fixed cache; this is "
            f"{transformers.__version__}. Take the current stack (requirements/main.lock), or fast=False"
        )
    if "fixed" not in vars(type(view)):  # said by the class itself, not by one it builds on
        raise OptionError(
            f"fast=True: {type(module).__name__} is not adapted to answering in fixed shapes; official LLaVA and "
            "LlavaForConditionalGeneration are. Take fast=False"
        )
    for wrong, what, remedy in (
        (len(set((getattr(module, "hf_device_map", None) or {}).values())) > 1, "is spread over devices", "one device"),
        (getattr(module, "is_quantized", False), "is quantised", "--dtype bfloat16 without --load-4bit or --load-8bit"),
        (module.device.type not in DEVICES, f"is on {module.device.type}", "cuda"),
    ):
        if wrong:
            raise OptionError(f"fast=True: the model {what}, which is not captured. Take {remedy}, or fast=False")
    _check_decoder(view.decoder)


def _check_decoder(decoder: Any) -> None:
    config = decoder.module.config
    if decoder.kernel not in KERNELS:
        raise OptionError(f"fast=True: attention {decoder.kernel!r} takes no mask of a fixed cache. Take --attn sdpa")
    if getattr(decoder, "window", None) is not None:
        raise OptionError(
            f"fast=True: the model sees {decoder.window} positions at most (sliding_window), which a fixed cache does "
            "not follow. Take fast=False"
        )
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in CHANGING:
        raise OptionError(f"fast=True: rotary embeddings of kind {kind!r} change with the length. Take fast=False")
