"""Requests of lmms-eval as questions a runner can be asked, or a clear word on why not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from PIL import Image

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.media import open_image
from llava_consensus.evaluation.models.base import Prompt

MAX_NEW_TOKENS = 1024  # where a task sets no bound, as in lmms-eval's own models


@dataclass(frozen=True)
class LmmsQuestion:
    """One prompt, its pictures, and the texts an answer ends before."""

    prompt: Prompt
    pictures: tuple[Image.Image, ...]
    until: tuple[str, ...]

    def cut(self, text: str) -> str:
        """An answer up to the first of the texts it ends before."""
        for end in filter(None, self.until):
            text = text.split(end)[0]
        return text.strip()


def batches(requests: Sequence[Any], size: int) -> Iterator[list[Any]]:
    """Neighbours that allow answers of one length, at most `size` together, in the order they came in."""
    for _, neighbours in groupby(requests, lambda request: _max_new_tokens(_generation(request))):
        group = list(neighbours)
        yield from (group[first : first + size] for first in range(0, len(group), size))


def check_generation(requests: Sequence[Any]) -> None:
    """Raises OptionError for a task that asks for anything but greedy decoding."""
    for request in requests:
        generation = _generation(request)
        sampled = generation.get("do_sample", (generation.get("temperature") or 0) > 0)
        if sampled or (generation.get("num_beams") or 1) > 1:
            raise OptionError(
                f"task {request.task_name}: generation_kwargs={dict(generation)} must be greedy. "
                "Type: --gen_kwargs do_sample=False,temperature=0,num_beams=1"
            )


def read(request: Any, documents: Mapping[str, Any], conversation: str | None) -> LmmsQuestion:
    """The question of a request.

    Args:
        request: its arguments are the context, a function from a document to messages, settings of the generation, and
            where the document is: number, task and split.
        documents: by task, split and number.
        conversation: template of the prompt; None is the host's own.
    Raises:
        OptionError: for messages other than one turn of the user: pictures, then text.
        ImageError: for a picture that cannot be read.
    """
    _, to_messages, generation, number, task, split = request.args
    messages = to_messages(documents[task][split][number])
    if len(messages) != 1 or messages[0]["role"] != "user":
        roles = ", ".join(message["role"] for message in messages)
        raise OptionError(f"task {task}: has the turns {roles}; a host is asked one turn of the user")
    content = messages[0]["content"]
    kinds = [part["type"] for part in content]
    if kinds != ["image"] * (len(kinds) - 1) + ["text"]:
        raise OptionError(f"task {task}: asks with {', '.join(kinds)}; a host is asked with pictures, then one text")
    prompt = Prompt(content[-1]["text"], conversation, _max_new_tokens(generation))
    until = generation.get("until") or ()
    return LmmsQuestion(
        prompt, tuple(_picture(part["url"]) for part in content[:-1]), (until,) if isinstance(until, str) else (*until,)
    )


def _picture(source: Image.Image | str) -> Image.Image:
    """A picture from a file, or one that is in memory, as RGB."""
    return source.convert("RGB") if isinstance(source, Image.Image) else open_image(source)


def _generation(request: Any) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = request.args[2]
    return settings


def _max_new_tokens(generation: Mapping[str, Any]) -> int:
    return int(generation.get("max_new_tokens") or MAX_NEW_TOKENS)
