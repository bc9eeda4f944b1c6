"""Which methods a model can be trained with, and what they need of the training: said before any weight loads."""

from importlib.util import find_spec

from llava_consensus.errors import OptionError, missing_extra
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import Need
from llava_consensus.training.data import Conversations
from llava_consensus.training.plan import LORA, Plan

TAKE = "Take a method that acts behind the tower or between decoder layers (llava-consensus list)"


def check(plan: Plan, name: str, data: Conversations | None = None) -> None:
    """Raises OptionError for a method that cannot be trained with, or not in this way, and MissingDependency for a
    package that is not installed.

    Args:
        name: of the method.
        data: what is trained on, where it is known.
    """
    _check_packages(plan)
    method = plan.method
    if method is None or not method.reduces:
        return
    check_method(method, name)
    if method.place is Place.DECODER:
        _check_decoder(plan, name)
    if plan.zero_stage == 3 and data is not None and data.without_picture and _runs_layers_of_its_own(method):
        raise OptionError(
            f"method {name!r} under ZeRO stage 3: it runs a layer of the language model once more for every batch with "
            f"a picture, and {data.without_picture} of {len(data.entries)} conversations have none. Processes whose "
            "batches differ in that would wait for each other for ever. Take stage 2, or conversations with pictures"
        )


def check_method(method: Method, name: str) -> None:
    """Raises OptionError for a method that no model can be trained with, with the reason."""
    if method.place in (Place.PICTURE, Place.TOWER):
        raise OptionError(
            f"method {name!r} acts {'on the picture' if method.place is Place.PICTURE else 'inside the vision tower'}, "
            f"which training leaves as it is and runs without gradients. {TAKE}"
        )
    if Need.QUESTION in method.needs:
        raise OptionError(
            f"method {name!r} reads the text of the question itself, and a batch in training holds token ids of whole "
            f"conversations. {TAKE}"
        )


def _check_decoder(plan: Plan, name: str) -> None:
    if plan.checkpointing:
        raise OptionError(
            f"method {name!r} with --checkpointing: it cuts between layers while they run, and layers that are "
            "computed again in the backward pass would not be cut. Leave it out, or take a method behind the tower"
        )
    if plan.attention == "flash_attention_2":
        raise OptionError(
            f"attention={plan.attention!r}: {name} cuts between decoder layers, which needs masks that this kernel "
            "does not take. Take sdpa"
        )


def _runs_layers_of_its_own(method: Method) -> bool:
    return Need.PROBE in method.needs or method.place is Place.DECODER


def _check_packages(plan: Plan) -> None:
    """Raises MissingDependency for a package that is needed and not installed."""
    for needed, package, extra in (
        (True, "accelerate", "train"),
        (plan.tune == LORA, "peft", "train"),
        (plan.deepspeed is not None, "deepspeed", "train"),
        (plan.attention == "flash_attention_2", "flash_attn", "gpu"),
    ):
        if needed and find_spec(package) is None:
            raise missing_extra(package, extra)
