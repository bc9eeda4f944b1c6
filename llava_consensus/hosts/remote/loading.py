"""Loads a checkpoint that carries its own code."""

from collections.abc import Mapping

import transformers

from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.models.weights import refuse_incomplete, refuse_not_finite
from llava_consensus.hosts.loading import Loading
from llava_consensus.hosts.remote.host import RemoteHost, view_of


def load(path: str, loading: Loading, view: str, options: Mapping[str, str] | None = None) -> RemoteHost:
    """A checkpoint with its tokenizer. That the user trusts its code was checked before.

    Args:
        path: folder of the checkpoint.
        loading: how, its device resolved.
        view: the family's view, as `file:class`.
        options: of the host; it has none.
    Raises:
        OptionError: for an attention kernel, which such code chooses itself.
        DataError: for a checkpoint that cannot be loaded, or whose weights are not those of its config.json.
    """
    if loading.attention != "auto":
        raise OptionError(f"attention={loading.attention!r}: the code of {path} has a kernel of its own. Leave it out")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=loading.trust_remote_code)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path, output_loading_info=True, torch_dtype=loading.numbers(), **loading.told()
        )
    except Exception as error:  # foreign code breaks in any way
        raise DataError(
            f"model={path!r} cannot be loaded: {type(error).__name__}: {error}. Its code is of 2023, written for "
            "transformers 4.31 to 4.37 (make setup-pinned); CogVLM's checkpoint needs the tokenizer files of "
            "lmsys/vicuna-7b-v1.5 beside it"
        ) from error
    refuse_incomplete(path, type(model), info)
    if loading.device_map is None and loading.bits is None:
        model.to(loading.device)
    refuse_not_finite(path, model)
    return RemoteHost(view_of(model.eval(), view), tokenizer)
