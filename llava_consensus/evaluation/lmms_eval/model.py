"""A runner with a method attached, as lmms-eval's evaluator asks it.

    lmms-eval --model consensusdrop --model_args pretrained=checkpoints/llava-mini,method=visionzip,tokens=64 --tasks T

Answers come as a generator in the order of the requests, so that lmms-eval's response cache stores each as it is given,
and not all at the end. Costs and times of an answer are measured by `llava-consensus eval` and `bench`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any, NoReturn

import torch
from lmms_eval.api.instance import GenerationResult, TokenCounts
from lmms_eval.api.model import lmms
from PIL import Image
from tqdm import tqdm

from llava_consensus.errors import OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.media import open_image
from llava_consensus.evaluation.models import Loading, Prompt
from llava_consensus.methods import make
from llava_consensus.reduction.budget import budget

LOADING = [field.name for field in fields(Loading)]
OF_HOST = "host_"  # in front of the name of an option of the host
MAX_NEW_TOKENS = 1024  # if a task sets no bound, as in lmms-eval's own models


@dataclass
class AnswerCounts(TokenCounts):
    """Counts of one answer: lmms-eval's own, then visual tokens, which it writes beside the answer."""

    visual_before: int = 0
    visual_after: int = 0
    visual_structural: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


class ReducedModel(lmms):
    """A model that answers from few visual tokens.

    Args:
        pretrained: checkpoint folder or hub name, of any host.
        method, tokens, merged: as `llava_consensus.attach` takes them.
        conversation: template of the prompts; None is the model's own.
        batch_size: questions answered together.
        max_batch_size: of no meaning here.
        options: of the method, such as `alpha=1.0`; of loading, named as the fields of `models.Loading` (of several
            processes each takes its own GPU); and of the host, with `host_` in front of their names.
    Raises:
        ConsensusError: for anything the user can mend, before weights load.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str = "",
        method: str = "consensusdrop",
        tokens: int | float = 64,
        merged: int | None = None,
        conversation: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not pretrained:
            raise OptionError("pretrained: no model. Type: --model_args pretrained=FOLDER,method=NAME,tokens=NUMBER")
        pretrained = str(pretrained)  # a name that looks like a number comes as one
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise OptionError(f"batch_size={batch_size!r} must be a whole number of at least 1")
        self.batch_size, self.conversation = int(batch_size), conversation
        loading = Loading(**{name: options.pop(name) for name in LOADING if name in options})
        open_to_host = [name for name in options if name.startswith(OF_HOST)]
        host_options = {name.removeprefix(OF_HOST): str(options.pop(name)) for name in open_to_host}
        chosen, tokens_given = make(method, **options), budget(tokens, merged)
        models.check(pretrained, conversation, loading, host_options=host_options)
        rank, loading = os.environ.get("LOCAL_RANK"), loading.resolved()
        if rank is not None and loading.device == "cuda":  # lmms-eval runs one process per GPU
            loading = replace(loading, device=f"cuda:{rank}")
        self.runner = models.load(pretrained, loading, host_options)
        self.attachment = self.runner.attach(chosen, tokens_given)

    @property
    def device(self) -> torch.device:
        return self.runner.model.device

    def generate_until(self, requests: Sequence[Any]) -> Iterator[GenerationResult] | list[GenerationResult]:
        """Answers in the order of the requests. One request is answered with a list, because lmms-eval's loop for
        agents looks an answer up by its place.
        """
        for request in requests:
            check_generation(request)
        answers = self._answers(requests)
        return list(answers) if len(requests) == 1 else answers

    def _answers(self, requests: Sequence[Any]) -> Iterator[GenerationResult]:
        with tqdm(total=len(requests), desc="questions", disable=self.rank != 0) as bar:
            for batch in batches(requests, self.batch_size):
                asked = [read(request, self.task_dict, self.conversation) for request in batch]
                encoded = [self.runner.encode(images) if images else [] for _, images, _ in asked]
                answers = self.runner.answer(encoded, [prompt for prompt, _, _ in asked])
                bar.update(len(batch))
                for (_, _, until), answer in zip(asked, answers, strict=True):
                    text = cut(answer.text, until)
                    rows = answer.prefill.text + answer.prefill.entering[0] if answer.prefill else None
                    length = len(self.runner.tokenizer(text, add_special_tokens=False).input_ids)
                    yield GenerationResult(text, AnswerCounts(rows, length, None, *answer[1:5]))

    def loglikelihood(self, requests: Sequence[Any]) -> NoReturn:
        raise OptionError(f"task {requests[0].task_name}: asks for likelihoods. Take a task that generates")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> NoReturn:
        raise OptionError(f"task {requests[0].task_name}: asks in several rounds; one turn of the user is asked")

    def clean(self) -> None:
        self.attachment.detach()
        del self.runner, self.attachment
        super().clean()


# Requests: (context, function from a document to messages, kwargs of the generation, number, task, split).


def batches(requests: Sequence[Any], size: int) -> Iterator[list[Any]]:
    """Neighbours that allow answers of one length, at most `size` together, in the order they came in."""
    for _, neighbours in groupby(requests, lambda request: _max_new_tokens(request.args[2])):
        group = list(neighbours)
        yield from (group[first : first + size] for first in range(0, len(group), size))


def check_generation(request: Any) -> None:
    generation = request.args[2]
    sampled = generation.get("do_sample", (generation.get("temperature") or 0) > 0)
    if sampled or (generation.get("num_beams") or 1) > 1:
        raise OptionError(
            f"task {request.task_name}: generation_kwargs={dict(generation)} must be greedy. "
            "Type: --gen_kwargs do_sample=False,temperature=0,num_beams=1"
        )


def read(
    request: Any, documents: Mapping[str, Any], conversation: str | None
) -> tuple[Prompt, list[Image.Image], tuple[str, ...]]:
    """Prompt and images of a request of a chat task, and the texts before which its answer ends. OptionError for
    messages other than one turn of the user: images, then text.
    """
    _, to_messages, generation, number, task, split = request.args
    messages = to_messages(documents[task][split][number])
    if len(messages) != 1 or messages[0]["role"] != "user":
        roles = ", ".join(message["role"] for message in messages)
        raise OptionError(f"task {task}: has the turns {roles}; one turn of the user is asked")
    *shown, text = content = messages[0]["content"]
    kinds = [part["type"] for part in content]
    if kinds != ["image"] * len(shown) + ["text"]:
        raise OptionError(f"task {task}: asks with {', '.join(kinds)}; images, then one text are asked")
    images = [
        one["url"].convert("RGB") if isinstance(one["url"], Image.Image) else open_image(one["url"]) for one in shown
    ]
    until = generation.get("until") or ()
    ends = (until,) if isinstance(until, str) else tuple(until)
    return Prompt(text["text"], conversation, _max_new_tokens(generation)), images, ends


def cut(text: str, until: Sequence[str]) -> str:
    """An answer up to the first of the texts it ends before."""
    for end in filter(None, until):
        text = text.split(end)[0]
    return text.strip()


def _max_new_tokens(generation: Mapping[str, Any]) -> int:
    return int(generation.get("max_new_tokens") or MAX_NEW_TOKENS)
