"""Loads InternVL-Chat with the loader of its authors' `llava` package."""

from collections.abc import Mapping

from llava_consensus.errors import MissingDependency
from llava_consensus.hosts.loading import Loading
from llava_consensus.hosts.remote.internvl_chat.host import InternVLChatHost
from llava_consensus.hosts.remote.older_llava import check_loading, loaded_by


def load(path: str, loading: Loading, options: Mapping[str, str] | None = None) -> InternVLChatHost:
    """A checkpoint with its tokenizer and image processor.

    Args:
        path: folder, whose name must contain `llava` or `intern` for the official loader.
        loading: how, its device resolved.
        options: of the host; it has none.
    Raises:
        OptionError: for what that package's loader cannot be told.
        MissingDependency: where another `llava` package is installed than InternVL's.
        DataError: for a checkpoint that cannot be loaded, or whose weights are not those of its config.json.
    """
    _check_package()
    check_loading(loading, path, "InternVL's `llava` package")
    from llava.mm_utils import get_model_name_from_path
    from llava.model.builder import load_pretrained_model

    return InternVLChatHost(*loaded_by(load_pretrained_model, get_model_name_from_path, path, loading))


def _check_package() -> None:
    """Raises MissingDependency unless the installed `llava` package knows InternViT."""
    try:
        from llava.model.multimodal_encoder import clip_encoder

        known = hasattr(clip_encoder, "is_intern_vit_6b_model")
    except ImportError:
        known = False
    if not known:
        raise MissingDependency(
            "InternVL-Chat is run by a `llava` package of its own, which is not installed here. In an environment of "
            "its own, type: pip install 'llava @ git+https://github.com/OpenGVLab/InternVL#subdirectory="
            "internvl_chat_llava'"
        )
