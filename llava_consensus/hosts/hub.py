"""Models of the hub, by their snapshot in the local cache: `snapshot("owner/name", None)` is a folder with config.json.

The hub is asked once whether it is there, without repeats: its own library repeats for minutes. Where it is not, what
the cache holds is used.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import read_json

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PATIENCE = 5.0  # seconds
SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
WEIGHTS = ("*.safetensors", "*.bin")  # the first of which there are any


def snapshot(model: str, revision: str | None) -> Path:
    """The folder of a revision of a model, named after its commit. Of what is not in the cache only the configuration
    is downloaded.

    Raises:
        DataError: for a model or revision that is not there or not open to this user.
    """
    from huggingface_hub import hf_hub_download

    file = _asked(hf_hub_download, model, filename="config.json", revision=revision)
    return Path(file).parent


def fetch(model: str, folder: Path) -> None:
    """Downloads what a snapshot lacks: everything small, and weights of one format.

    Raises:
        DataError: where there are no weights, or not all of them can be had.
    """
    from huggingface_hub import snapshot_download

    for patterns in (SMALL, *((weights,) for weights in WEIGHTS)):
        _asked(snapshot_download, model, revision=folder.name, allow_patterns=[*patterns], ignore_patterns=["*/*"])
        if is_whole(folder):
            return
    raise DataError(f"model {model!r}: {folder} lacks weight files ({', '.join(WEIGHTS)}). Download the model again")


def name_of(folder: Path) -> str:
    """The name on the hub of the model whose snapshot a folder is; nothing for any other folder."""
    repository = folder.parents[1].name if folder.parent.name == "snapshots" else ""
    return repository.removeprefix("models--").replace("--", "/") if repository.startswith("models--") else ""


def is_whole(folder: Path) -> bool:
    """Whether a snapshot has weights, and every file of them that an index names."""
    for pattern in WEIGHTS:
        indexes = list(folder.glob(f"{pattern}.index.json"))
        maps = [read_json(index, "Download the model again", dict).get("weight_map", {}) for index in indexes]
        named = {name for weight_map in maps for name in weight_map.values()}
        if named or any(folder.glob(pattern)):
            return all((folder / name).is_file() for name in named)
    return False


def weights(folder: Path) -> list[Path]:
    """The files of a snapshot that can change answers: weights of one format, whatever else the cache holds."""
    unread = next((pattern for pattern in WEIGHTS[1:] if any(folder.glob(WEIGHTS[0]))), "")
    files = (file for pattern in (*SMALL, *WEIGHTS) if pattern != unread for file in folder.glob(pattern))
    return sorted(set(files))


def _asked(function: Any, model: str, **arguments: Any) -> str:
    """What a function of the hub's library gives, its errors as what the user can mend."""
    from huggingface_hub import constants, errors

    silence = _silence(constants.ENDPOINT, constants.HF_HUB_OFFLINE)
    page = f"{constants.ENDPOINT}/{model}"
    try:
        return str(function(model, **arguments, local_files_only=bool(silence)))
    except errors.GatedRepoError:
        raise DataError(f"model {model!r}: gated. Ask for access at {page}, then type: hf auth login") from None
    except errors.RevisionNotFoundError:
        raise DataError(f"model {model!r}: {page} has no revision {arguments['revision']!r}") from None
    except errors.RepositoryNotFoundError:
        raise DataError(f"model {model!r}: {page} does not exist, or is private: type hf auth login") from None
    except errors.LocalEntryNotFoundError as error:
        why = silence or str(error).splitlines()[0]
        cache = constants.HF_HUB_CACHE
        raise DataError(
            f"model {model!r}: not in the cache ({cache}), and not to be had from the hub: {why}. Go online once, or "
            "give --model the folder of a checkpoint"
        ) from None
    except errors.EntryNotFoundError:
        raise DataError(f"model {model!r}: {page} has no config.json, so it is no checkpoint") from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise DataError(f"model {model!r}: {page}: {str(error).splitlines()[0]}") from None


@cache
def _silence(endpoint: str, offline: bool) -> str:
    """Why the hub does not answer; nothing where it does. It is asked once."""
    import requests

    if offline:
        return "HF_HUB_OFFLINE is set"
    try:
        requests.head(endpoint, timeout=PATIENCE)
    except requests.RequestException as error:
        return f"{endpoint} does not answer ({type(error).__name__})"
    return ""
