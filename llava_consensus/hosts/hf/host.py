"""Hugging Face models as hosts: the family's view of a model that is already loaded, and a method on it."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import transformers

from llava_consensus.errors import OptionError
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.hf import seam
from llava_consensus.hosts.hf.checks import check_version
from llava_consensus.hosts.hf.model import HfModel
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Method


class HfHost:
    """A model of transformers, to attach a method to."""

    def __init__(self, view: HfModel) -> None:
        self.view = view
        self._attached: Attachment | None = None

    def attach(self, method: Method, budget: Budget | Share) -> Attachment:
        """Attaches a method to this model instance; a context manager, or call `.detach()`.

        Raises:
            OptionError: for a method this model has no parts for, or a model that has a method already.
        """
        check_version(transformers.__version__, self.view.oldest)
        if getattr(vars(self.view.module).get("generate"), "func", None) is seam.generate:
            raise OptionError("this model has a method attached already: detach it first")
        self.view.check(method)
        self._attached = Attachment(self.view, method, budget)
        return self._attached


def wrap(model: Any, view: str, options: Mapping[str, str]) -> HfHost:
    """The host of a loaded model, whose family `view` names as `file:class`, with all options of the host."""
    return HfHost(view_of(model, view, options))


def view_of(model: Any, view: str, options: Mapping[str, str]) -> HfModel:
    """A family's view of a model, named as `file:class`."""
    file, name = view.split(":")
    family_view: HfModel = getattr(import_module(f"llava_consensus.hosts.hf.{file}"), name)(model, options)
    return family_view
