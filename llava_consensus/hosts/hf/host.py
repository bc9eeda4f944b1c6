"""Hugging Face models as hosts: the family's view of a model that is already loaded, and a method on it."""

from importlib import import_module
from typing import Any

import transformers

from llava_consensus.errors import OptionError
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.hf import seam
from llava_consensus.hosts.hf.model import HfModel
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method

NEEDED = (5, 19)  # the version of transformers that takes features encoded before (`mm_encoder_outputs`)


class HfHost:
    """A model of transformers, to attach a method to."""

    def __init__(self, view: HfModel) -> None:
        self.view = view
        self._attached: Attachment | None = None

    def attach(self, method: Method, budget: Budget) -> Attachment:
        """Attaches a method to this model instance; a context manager, or call `.detach()`.

        Raises:
            OptionError: for a method this model has no parts for, or a model that has a method already.
        """
        check_version(transformers.__version__)
        if getattr(vars(self.view.module).get("generate"), "func", None) is seam.generate:
            raise OptionError("this model has a method attached already: detach it first")
        self.view.check(method)
        self._attached = Attachment(self.view, method, budget)
        return self._attached


def check_version(version: str) -> None:
    """Raises OptionError for a version of transformers that these hosts do not work with."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < NEEDED:
        raise OptionError(
            f"transformers {version}: methods on models of transformers need >= {NEEDED[0]}.{NEEDED[1]}, which takes "
            "pictures that were encoded before. Type: pip install -U transformers"
        )


def wrap(model: Any, view: str) -> HfHost:
    """The host of a loaded model, whose family `view` names as `file:class`."""
    return HfHost(view_of(model, view))


def view_of(model: Any, view: str) -> HfModel:
    """A family's view of a model, named as `file:class`."""
    file, name = view.split(":")
    family_view: HfModel = getattr(import_module(f"llava_consensus.hosts.hf.{file}"), name)(model)
    return family_view


def load(model: str, device: str, dtype: str, view: str) -> HfHost:
    """The host of a checkpoint with its processor, as the harness wants it."""
    from llava_consensus.hosts.hf.harness import load as load_with_processor

    return load_with_processor(model, device, dtype, view)
