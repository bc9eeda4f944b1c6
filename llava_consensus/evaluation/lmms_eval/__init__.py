"""Every model that a host adapts as a model of lmms-eval, under the name `consensusdrop` (docs/lmms-eval.md).

lmms-eval finds `manifests` through the entry point `lmms_eval.models`, whenever it is imported: nothing heavy is loaded
before the model is asked for.
"""

from typing import Any

NAME = "consensusdrop"


def manifests() -> list[Any]:
    """Manifest that lmms-eval registers: the name of the model and its class."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return [ModelManifest(model_id=NAME, chat_class_path=f"{__name__}.model.ReducedModel")]
