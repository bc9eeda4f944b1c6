"""Loads Video-LLaVA with the loader of its authors' package `videollava`."""

from collections.abc import Mapping

from llava_consensus.errors import MissingDependency
from llava_consensus.hosts.loading import Loading
from llava_consensus.hosts.remote.older_llava import check_loading, loaded_by
from llava_consensus.hosts.remote.video_llava.host import VideoLlavaHost


def load(path: str, loading: Loading, options: Mapping[str, str]) -> VideoLlavaHost:
    """A checkpoint with its tokenizer and its processors of pictures and clips.

    Args:
        path: folder, whose name must contain `llava` for that loader.
        loading: how, its device resolved.
        options: of the host, all of them.
    Raises:
        OptionError: for what that package's loader cannot be told.
        MissingDependency: where the package is not installed, or cannot be imported.
        DataError: for a checkpoint that cannot be loaded, or whose weights are not those of its config.json.
    """
    check_loading(loading, path, "`videollava`")
    try:
        from videollava.mm_utils import get_model_name_from_path
        from videollava.model.builder import load_pretrained_model
    except (ImportError, ValueError) as error:  # it registers a model type that transformers has since 4.36
        raise MissingDependency(
            f"Video-LLaVA's own package: {error}. It is written for transformers 4.31; type: pip install "
            "'videollava @ git+https://github.com/PKU-YuanGroup/Video-LLaVA', or take the checkpoint of transformers, "
            "LanguageBind/Video-LLaVA-7B-hf"
        ) from error
    return VideoLlavaHost(*loaded_by(load_pretrained_model, get_model_name_from_path, path, loading), options)
