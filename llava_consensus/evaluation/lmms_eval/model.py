"""A host with a method attached, as lmms-eval's evaluator asks it.

    lmms-eval --model consensusdrop --model_args pretrained=checkpoints/llava-mini,method=visionzip,tokens=64 --tasks T

Answers come as a generator in the order of the requests, so that lmms-eval's response cache stores each as it is given,
and not all at the end.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from hashlib import sha256
from typing import Any

from lmms_eval.api.instance import GenerationResult
from lmms_eval.api.model import lmms
from tqdm import tqdm

from llava_consensus.errors import OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.lmms_eval import questions
from llava_consensus.evaluation.lmms_eval.clock import first_token
from llava_consensus.evaluation.lmms_eval.counts import AnswerCounts, counts, log_run
from llava_consensus.evaluation.lmms_eval.encodings import Encodings
from llava_consensus.evaluation.models import Loading
from llava_consensus.evaluation.runs.metrics import AnswerCosts
from llava_consensus.methods import make
from llava_consensus.reduction.budget import budget

RUN_ID = "LMMS_CACHE_RUN_ID"
LOADING = [field.name for field in fields(Loading)]
OF_HOST = "host_"  # in front of the name of an option of the host


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
        self.batch_size = _batch_size(batch_size)
        self.conversation = conversation
        loading = Loading(**{name: options.pop(name) for name in LOADING if name in options})
        open_to_host = [name for name in options if name.startswith(OF_HOST)]
        host_options = {name.removeprefix(OF_HOST): str(options.pop(name)) for name in open_to_host}
        chosen, tokens_given = make(method, **options), budget(tokens, merged)
        models.check(pretrained, conversation, loading, host_options=host_options)
        os.environ.setdefault(RUN_ID, run_id(sys.argv[1:]))
        self.host: Any = models.load(pretrained, _on_own_device(loading), host_options)
        self.attachment = self.host.attach(chosen, tokens_given)
        self._encodings = Encodings(self.host)
        self._costs = AnswerCosts(chosen, tokens_given, self.host.shape())

    @property
    def device(self) -> Any:
        """Where the model is."""
        return self.host.model.device

    def generate_until(self, requests: Sequence[Any]) -> Iterator[GenerationResult] | list[GenerationResult]:
        """Answers in the order of the requests.

        One request is answered with a list, because lmms-eval's loop for agents looks an answer up by its place.
        """
        questions.check_generation(requests)
        answers = self._answers(requests)
        return list(answers) if len(requests) == 1 else answers

    def _answers(self, requests: Sequence[Any]) -> Iterator[GenerationResult]:
        answered: list[AnswerCounts] = []
        seconds = 0.0
        with tqdm(total=len(requests), desc="questions", disable=self.rank != 0) as bar:
            for batch in questions.batches(requests, self.batch_size):
                start = time.perf_counter()
                results = self._answer(batch)
                seconds += time.perf_counter() - start
                answered += [result.token_counts for result in results]
                bar.update(len(batch))
                if len(answered) == len(requests):
                    log_run(answered, seconds)  # now: after the last answer, a generator may never be asked again
                yield from results

    def _answer(self, requests: list[Any]) -> list[GenerationResult]:
        """Answers of requests that are asked together."""
        asked = [questions.read(request, self.task_dict, self.conversation) for request in requests]
        encodings = self._encodings.fetch([question.pictures for question in asked])
        tower_seconds = sum({id(one): one.seconds for own in encodings for one in own}.values())
        with first_token(self.host.model) as first:
            answers = self.host.answer(
                [[one.encoded for one in own] for own in encodings], [question.prompt for question in asked]
            )
        first_ms = None if first.seconds is None else 1e3 * (tower_seconds + first.seconds)
        results = []
        for question, answer in zip(asked, answers, strict=True):
            text = question.cut(answer.text)
            told = answer.prefill, len(question.pictures), (), answer.outcomes
            account = self._costs.of(*told).get("account", {})
            output_tokens = len(self.host.tokenizer(text, add_special_tokens=False).input_ids)
            results.append(GenerationResult(text, counts(answer, account, output_tokens, first_ms)))
        return results

    def loglikelihood(self, requests: Sequence[Any]) -> Any:
        """Refused: hosts answer, they do not rate given answers."""
        raise OptionError(f"task {requests[0].task_name}: asks for likelihoods; hosts answer. Take a generating task")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> Any:
        """Refused: a host is asked one turn."""
        raise OptionError(f"task {requests[0].task_name}: asks in several rounds; a host is asked one turn of the user")

    def clean(self) -> None:
        """Lets go of the model when everything is answered, so that a local judge has its memory."""
        self.attachment.detach()
        del self.host, self.attachment, self._encodings
        super().clean()


def run_id(arguments: Sequence[str]) -> str:
    """The name of a run in lmms-eval's cache: the same for the same command, which so goes on where it was stopped."""
    return f"consensusdrop-{sha256(chr(0).join(arguments).encode()).hexdigest()[:16]}"


def _batch_size(value: int | str) -> int:
    if not str(value).isdecimal() or int(value) < 1:
        raise OptionError(f"batch_size={value!r} must be a whole number of at least 1")
    return int(value)


def _on_own_device(loading: Loading) -> Loading:
    """With the GPU of this process where lmms-eval runs several, one for each GPU."""
    rank, resolved = os.environ.get("LOCAL_RANK"), loading.resolved()
    return replace(resolved, device=f"cuda:{rank}") if rank is not None and resolved.device == "cuda" else resolved
