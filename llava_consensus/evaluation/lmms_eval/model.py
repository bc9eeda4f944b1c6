"""A runner with a method attached, as lmms-eval's evaluator asks it.

    lmms-eval --model consensusdrop --model_args pretrained=checkpoints/llava-mini,method=visionzip,tokens=64 --tasks T

Answers come as a generator in the order of the requests, so that lmms-eval's response cache stores each as it is given,
and not all at the end.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from statistics import mean
from typing import Any, NoReturn

import torch
from lmms_eval.api.instance import GenerationResult, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from torch import Tensor, nn
from tqdm import tqdm

from llava_consensus.errors import OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.lmms_eval import questions
from llava_consensus.evaluation.lmms_eval.encodings import Encodings
from llava_consensus.evaluation.models import Answer, Loading, Runner
from llava_consensus.evaluation.runs.metrics import AnswerCosts
from llava_consensus.methods import make
from llava_consensus.reduction.budget import budget

RUN_ID = "LMMS_CACHE_RUN_ID"
LOADING = [field.name for field in fields(Loading)]
OF_HOST = "host_"  # in front of the name of an option of the host


@dataclass
class AnswerCounts(TokenCounts):
    """Counts of one answer: lmms-eval's own, then ours, whose names are those of docs/accounting.md."""

    reduction: dict[str, float | None] = field(default_factory=dict)  # None: not known
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values; lmms-eval writes them beside the answer."""
        return {**super().to_dict(), **self.reduction, "notes": list(self.notes)}


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
        self.batch_size = _batch_size(batch_size)
        self.conversation = conversation
        loading = Loading(**{name: options.pop(name) for name in LOADING if name in options})
        open_to_host = [name for name in options if name.startswith(OF_HOST)]
        host_options = {name.removeprefix(OF_HOST): str(options.pop(name)) for name in open_to_host}
        chosen, tokens_given = make(method, **options), budget(tokens, merged)
        models.check(pretrained, conversation, loading, host_options=host_options)
        os.environ.setdefault(RUN_ID, run_id(sys.argv[1:]))
        self.runner = models.load(pretrained, _on_own_device(loading), host_options)
        self.attachment = self.runner.attach(chosen, tokens_given)
        self._encodings = Encodings(self.runner)
        self._costs = AnswerCosts(chosen, tokens_given, self.runner.shape())

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.runner.model.device

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
                    _log_run(answered, seconds)  # now: after the last answer, a generator may never be asked again
                yield from results

    def _answer(self, requests: list[Any]) -> list[GenerationResult]:
        """Answers of requests that are asked together."""
        asked = [questions.read(request, self.task_dict, self.conversation) for request in requests]
        encodings = self._encodings.fetch([question.pictures for question in asked])
        tower_seconds = sum({id(one): one.seconds for own in encodings for one in own}.values())
        with _first_logits(self.runner) as first:
            answers = self.runner.answer(
                [[one.encoded for one in own] for own in encodings], [question.prompt for question in asked]
            )
        first_ms = 1e3 * (tower_seconds + first[0]) if first else None
        results = []
        for question, answer in zip(asked, answers, strict=True):
            text = question.cut(answer.text)
            told = answer.prefill, len(question.pictures), (), answer.outcomes
            account = self._costs.of(*told).get("account", {})
            output_tokens = len(self.runner.tokenizer(text, add_special_tokens=False).input_ids)
            results.append(GenerationResult(text, _counts(answer, account, output_tokens, first_ms)))
        return results

    def loglikelihood(self, requests: Sequence[Any]) -> NoReturn:
        """Refused: hosts answer, they do not rate given answers."""
        raise OptionError(f"task {requests[0].task_name}: asks for likelihoods; hosts answer. Take a generating task")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> NoReturn:
        """Refused: a host is asked one turn."""
        raise OptionError(f"task {requests[0].task_name}: asks in several rounds; a host is asked one turn of the user")

    def clean(self) -> None:
        """Lets go of the model when everything is answered, so that a local judge has its memory."""
        self.attachment.detach()
        del self.runner, self.attachment, self._encodings
        super().clean()


@contextmanager
def _first_logits(runner: Runner) -> Iterator[list[float]]:
    """Seconds from here to the first output of the model's head, once it is there; nothing before. The device is waited
    for there and nowhere else.
    """
    seconds: list[float] = []
    start = time.perf_counter()

    def note(head: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> None:
        if not seconds:
            if logits.is_cuda:
                torch.cuda.synchronize(logits.device)
            seconds.append(time.perf_counter() - start)

    hook = runner.model.get_output_embeddings().register_forward_hook(note)
    try:
        yield seconds
    finally:
        hook.remove()


def _counts(answer: Answer, account: Record, output_tokens: int, first_token_ms: float | None) -> AnswerCounts:
    """The counts of one answer.

    Args:
        answer: of a runner.
        account: what it cost as `runs/metrics.py` counts it; empty where the runner does not tell what it read.
        output_tokens: of its text.
        first_token_ms: milliseconds from the pictures in memory to the first token of its batch, vision tower included.
    """
    measured, flops = account.get("measured", {}), account.get("flops", {}).get("total")
    reduction = {
        "visual_before": answer.before,
        "visual_after": answer.after,
        "visual_structural": answer.structural,
        "visual_entering": measured.get("entering"),
        "visual_average": measured.get("average"),
        "gflops": None if flops is None else flops / 1e9,
        "kv_bytes": sum(measured["kv_bytes"]) if measured else None,
        "first_token_ms": first_token_ms,
    }
    read = answer.prefill.text + answer.prefill.entering[0] if measured and answer.prefill else None
    return AnswerCounts(read, output_tokens, reduction=reduction, notes=answer.notes)


def _log_run(answered: Sequence[AnswerCounts], seconds: float) -> None:
    """Hands lmms-eval the means over the answers that were given; those from its cache have no counts."""
    output = sum(one.output_tokens or 0 for one in answered)
    means = {}
    for name in answered[0].reduction:
        known = [value for value in (one.reduction[name] for one in answered) if value is not None]
        if len(known) == len(answered):
            means[name] = mean(known)
    log_metrics(seconds, output, output / seconds, {**means, "num_requests": len(answered)})


def run_id(arguments: Sequence[str]) -> str:
    """Name of a run in lmms-eval's cache: the same for the same command, which therefore resumes."""
    return f"consensusdrop-{sha256(chr(0).join(arguments).encode()).hexdigest()[:16]}"


def _batch_size(value: int | str) -> int:
    if not str(value).isdecimal() or int(value) < 1:
        raise OptionError(f"batch_size={value!r} must be a whole number of at least 1")
    return int(value)


def _on_own_device(loading: Loading) -> Loading:
    """Loading options with the GPU of this process, where lmms-eval runs one process per GPU."""
    rank, resolved = os.environ.get("LOCAL_RANK"), loading.resolved()
    return replace(resolved, device=f"cuda:{rank}") if rank is not None and resolved.device == "cuda" else resolved
