"""What a user may name as a model, where its files are (`find("owner/name")`), and whether its weights are whole.

A model of the hub is its snapshot in huggingface_hub's cache, pinned by commit. The hub is asked once whether it
answers, because its own library repeats a request for minutes; where it does not, what the cache holds is used.
"""

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.files import read_json

SUFFIXES = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py"}
FETCH = "llava-consensus data mini puts the embedded model there"
OWN = "checkpoints"  # the folder in which a checkpoint is never taken for a name of the hub
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PATIENCE = 5.0  # seconds until a hub that does not answer is given up
SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
WEIGHTS = ("*.safetensors", "*.bin")  # only the first format that a model has is downloaded, and read


class Checkpoint(NamedTuple):
    """Where a model's files are."""

    name: str  # as the user named it
    folder: Path
    commit: str | None = None  # of a model of the hub

    def files(self) -> list[Path]:
        """What can change answers, downloaded where it is not here; a vision tower in a folder below included.

        Raises:
            DataError: for a model of the hub whose weights cannot be had, or not all of them; for a pipe in a folder.
        """
        if self.commit is None:
            found = (*self.folder.glob("[!.]*"), *self.folder.glob("[!.]*/[!.]*"))
            pipes = [path for path in found if path.is_fifo()]
            if pipes:
                raise DataError(f"{pipes[0]}: is a pipe, and a checkpoint is made of files. Fetch the checkpoint again")
            return sorted(path for path in found if path.suffix in SUFFIXES)
        from huggingface_hub import snapshot_download

        for pattern in WEIGHTS:
            wanted = [*SMALL, pattern]
            # folders below a model of the hub hold other formats
            _ask_hub(snapshot_download, self.name, self.commit, allow_patterns=wanted, ignore_patterns=["*/*"])
            indexes = self.folder.glob(f"{pattern}.index.json")
            maps = [read_json(index, "Download the model again", dict).get("weight_map", {}) for index in indexes]
            named = {name for one in maps for name in one.values()}
            if named or any(self.folder.glob(pattern)):
                if all((self.folder / name).is_file() for name in named):
                    return sorted(path for kind in wanted for path in self.folder.glob(kind))
                break  # loaders take this format where there is anything of it
        raise DataError(
            f"model {self.name!r}: {self.folder} lacks weight files ({', '.join(WEIGHTS)}). Download the model again"
        )


def find(model: str, revision: str | None = None) -> Checkpoint:
    """A model's folder with its configuration; of a model of the hub no weights are downloaded yet.

    Args:
        model: folder, or `owner/name` of the hub.
        revision: branch, tag or commit of a model of the hub; None is its main branch.
    Raises:
        DataError: for a model or a revision that is not there, or not open to this user.
        OptionError: for a revision of a folder.
    """
    check_checkpoint(model)
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise OptionError(f"revision={revision!r}: {model} is a folder, and only models of the hub have revisions")
        return Checkpoint(model, folder)
    from huggingface_hub import hf_hub_download

    folder = Path(_ask_hub(hf_hub_download, model, revision, filename="config.json")).parent
    return Checkpoint(model, folder, folder.name)


def check_checkpoint(model: str) -> None:
    """Raises DataError for a local folder that is no checkpoint; a name of the form owner/name is left to the hub."""
    folder = Path(model).expanduser()
    local = model.startswith((".", "/", "~", f"{OWN}/")) or Path(folder.parts[0] if folder.parts else ".").is_dir()
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return
        problem, hint = "the folder has no config.json, so it is no checkpoint.", ""
    elif folder.exists() or local or not HUB_NAME.fullmatch(model):
        problem, hint = "no such folder.", " A model of the hub is named owner/name"
    else:
        return
    here = sorted(str(path.parent) for path in Path(OWN).glob("*/config.json"))
    instead = f"Here are: {', '.join(here)}." if here else f"There are none in {OWN}/ either: {FETCH}."
    raise DataError(f"model {model!r}: {problem} {instead}{hint}")


def hub_name(folder: Path) -> str:
    """The name on the hub of the model whose snapshot a folder is; nothing for any other folder."""
    repository = folder.parents[1].name if folder.parent.name == "snapshots" else ""
    return repository.removeprefix("models--").replace("--", "/") if repository.startswith("models--") else ""


def _ask_hub(function: Callable[..., str], model: str, revision: str | None, **arguments: Any) -> str:
    """The path that a function of huggingface_hub returns, its errors as what the user can mend."""
    from huggingface_hub import constants, errors

    silence = _silence(constants.ENDPOINT, constants.HF_HUB_OFFLINE)
    page = f"{constants.ENDPOINT}/{model}"
    try:
        return str(function(model, revision=revision, **arguments, local_files_only=bool(silence)))
    except errors.GatedRepoError:
        problem = f"gated. Ask for access at {page}, then type: hf auth login"
    except errors.RevisionNotFoundError:
        problem = f"{page} has no revision {revision!r}"
    except errors.RepositoryNotFoundError:
        problem = f"{page} does not exist, or is private: type hf auth login"
    except errors.LocalEntryNotFoundError as error:
        problem = (
            f"not in the cache ({constants.HF_HUB_CACHE}), and not to be had from the hub: "
            f"{silence or str(error).splitlines()[0]}. Go online once, or give --model the folder of a checkpoint"
        )
    except errors.EntryNotFoundError:
        problem = f"{page} has no config.json, so it is no checkpoint"
    except (errors.HfHubHTTPError, OSError) as error:
        problem = f"{page}: {str(error).splitlines()[0]}"
    raise DataError(f"model {model!r}: {problem}")


@cache
def _silence(endpoint: str, offline: bool) -> str:
    """Why the hub does not answer; nothing where it does. It is asked once."""
    if offline:
        return "HF_HUB_OFFLINE is set"
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return ""  # it answers, if only with an error
    except (OSError, ValueError) as error:
        return f"{endpoint} does not answer ({getattr(error, 'reason', None) or type(error).__name__})"
    return ""


NAMED = 8  # names in a message
# Left over on purpose: the text side of a CLIP checkpoint of which the tower is one side, a tower that LLaVA reads from
# a folder of its own, and buffers that older versions of transformers stored.
UNREAD = re.compile(
    r"(^|\.)(text_model|text_projection|visual_projection|vision_tower)\.|(^|\.)logit_scale$"
    r"|rotary_emb\.inv_freq$|position_ids$|(^|\.)masked_bias$"
)
_LOADING = threading.Lock()  # `from_pretrained` is replaced for the whole process


@contextmanager
def incomplete_refused() -> Iterator[None]:
    """Inside, every model that foreign code loads is held against its weights (`refuse_incomplete`); one thread at a
    time.
    """
    with _LOADING:
        dtype = torch.get_default_dtype()  # transformers 4 does not set it back when a loading fails
        official = PreTrainedModel.__dict__["from_pretrained"]

        def checked(cls: type, path: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = kwargs.pop("output_loading_info", False)
            kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # else they are counted, not named
            try:
                model, info = official.__func__(cls, path, *args, **kwargs)
            except NotImplementedError:  # of transformers 4, which cannot place a model with a misshapen tensor
                plain = {
                    name: value for name, value in kwargs.items() if name not in ("low_cpu_mem_usage", "device_map")
                }
                model, info = official.__func__(cls, path, *args, **plain)
            refuse_incomplete(str(path), cls, info)
            return (model, info) if wanted else model

        PreTrainedModel.from_pretrained = classmethod(checked)
        try:
            yield
        finally:
            PreTrainedModel.from_pretrained = official
            torch.set_default_dtype(dtype)


def refuse_incomplete(path: str, model: type, info: Mapping[str, Any]) -> None:
    """Raises DataError where a tensor is missing, of another shape, or left over although the model is of its kind.

    Args:
        path: of the checkpoint, for the message.
        model: class that was loaded.
        info: what transformers says of the loading (`output_loading_info`).
    """
    kinds = ("missing_keys", "mismatched_keys", "unexpected_keys")  # of a misshapen tensor the shapes come along
    missing, mismatched, unexpected = (
        sorted(key if isinstance(key, str) else str(key[0]) for key in info.get(kind, ())) for kind in kinds
    )
    problems = {
        "missing (they would be random)": [name for name in missing if name not in mismatched],
        "of another shape than config.json says": mismatched,
        "left over, the model has no place for them": [name for name in unexpected if not UNREAD.search(name)],
    }
    found = [
        f"{model.__name__}: {len(names)} tensors {problem}: {_listed(names)}"
        for problem, names in problems.items()
        if names
    ]
    if found:
        raise DataError(
            f"model={path!r}: the weights do not fit config.json. {'; '.join(found)}. "
            "Fetch the whole checkpoint again, or mend its config.json"
        )


def refuse_not_finite(path: str, model: torch.nn.Module) -> None:
    """Raises DataError where a weight is NaN or infinite in the type the model is run in (quantised ones are whole
    numbers), or where generation_config.json has something else for a switch of outputs or the number of a token.
    """
    _refuse_odd_generation(path, model)
    names = [
        name
        for name, weight in model.named_parameters()
        if weight.is_floating_point() and not bool(torch.isfinite(weight).all())
    ]
    if names:
        kinds = sorted({str(weight.dtype).removeprefix("torch.") for weight in model.parameters()})
        raise DataError(
            f"model={path!r}: NaN or infinity in {len(names)} tensors (as {', '.join(kinds)}): {_listed(names)}. "
            "Fetch the checkpoint again; if only --dtype float16 says so, take bfloat16 or float32"
        )


def _refuse_odd_generation(path: str, model: torch.nn.Module) -> None:
    for name, value in vars(getattr(model, "generation_config", None) or object).items():
        ids = value if isinstance(value, list) else [value]
        switch, token = name.startswith("output_"), name.endswith("_token_id")
        if (switch and not isinstance(value, bool | None)) or (
            token and not all(isinstance(i, int | None) for i in ids)
        ):
            raise DataError(
                f"model={path!r}: generation_config.json says {name}={value!r}, which must be "
                f"{'true or false' if switch else 'the number of a token'}. Fetch the checkpoint again"
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
