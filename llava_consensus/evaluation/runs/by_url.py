"""A run whose questions go to a server by URL (`eval --url`): any server with OpenAI's chat API, with any number of
machines behind its address. No model is loaded here, and no torch.

A server started by `llava-consensus serve` says which method and budget it runs (serving/identity.py). The run is named
after them, and stops when an answer comes from another setting. Of other servers a few kept answers are asked again
before a run resumes, so that another model behind the same address is noticed. Every answer is on the disk as soon as
it has come.
"""

import base64
import io
import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llava_consensus.errors import ConsensusError, ImageError, OptionError, missing_extra, unknown_name
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.judge.client import KEY, check_url
from llava_consensus.evaluation.runs.driver import carry_out
from llava_consensus.evaluation.runs.execution import Execution, Result, RunResult, describe, error_record
from llava_consensus.evaluation.runs.questions import Asked, Plan, describe_questions, read_questions
from llava_consensus.evaluation.runs.store import Run, answer_record, run_name
from llava_consensus.reduction.budget import budget
from llava_consensus.serving.supported import ASKED, HEADER, IDENTITY, TOKENS

SERVED = "served"  # represents the method in the name of a run, if the server does not name one
PROBES = 3  # kept answers that are asked again before a run resumes
PATIENCE = 600.0  # seconds for one answer
NO_ANSWER = (AttributeError, IndexError, TypeError, ValueError)  # raised on a body that is no chat completion
UNTOLD = "the server does not say how many visual tokens it read (vLLM: --enable-prompt-tokens-details)"

log = logging.getLogger(__name__)


class ServerError(ConsensusError):
    """The server cannot be asked; finished answers are kept."""

    exit_code = 5


class ServerFault(Exception):
    """The server failed at one question, after the retries of the openai package: 5xx, 429, or no chat completion."""


@dataclass(frozen=True)
class UrlConfig(Asked):
    """A benchmark, and the server that answers it.

    Args:
        benchmark: benchmark to run, its options chosen; its files are images.
        url: base URL of the server, such as http://localhost:8000/v1.
        model: its name there; None is the one that the server has.
        tokens: asked for with each request, a number or a share; None leaves it to the server.
        data, limit, sample, max_new_tokens: as in `RunConfig`.
    Raises:
        OptionError: for a value outside its bound.
    """

    url: str
    model: str | None = None
    tokens: int | float | None = None

    def __post_init__(self) -> None:
        check_url(self.url, "--url")
        if self.tokens is not None:
            budget(self.tokens)
        if self.benchmark.frames:
            raise OptionError(f"--url: {self.benchmark.name} shows videos, which are not sent to servers. Leave it out")


def run(config: UrlConfig, out: Path, execution: Execution) -> RunResult:
    """Asks a server the open questions, `execution.batch` questions at once, and scores the answers.

    Raises:
        ServerError: the server cannot be reached, has no such model, or refuses access.
        ConsensusError: everything else the user can mend, see `errors.py`; Interrupted on Ctrl-C.
    """
    execution.check()
    if execution.merge or execution.workers > 1:
        raise OptionError("--url: one process asks as many questions at once as --batch says. Leave --workers out")
    client = Client(config)
    plan = _plan(config, client)
    check = partial(_check_same_server, client, plan) if client.identity is None else None
    ask = partial(_results, client, plan, execution.batch)
    return carry_out(plan, out, execution, ask, config.url, check)


def _plan(config: UrlConfig, client: "Client") -> Plan:
    questions, told = read_questions(config), client.identity or {}
    tokens = told.get("tokens") if config.tokens is None else config.tokens
    asked = {} if config.tokens is None else {TOKENS: config.tokens}
    options = {**told.get("options", {}), **asked}
    description = {
        **describe_questions(config),
        "method": told.get("method", SERVED),
        "tokens": tokens if isinstance(tokens, int | float) else None,
        "merged": None,
        "options": options,
        "changed": options,
        "model": client.model,
        "url": config.url,
        "device": "server",
        "versions": {},
        **({"server": told} if told else {}),
    }
    return Plan(benchmark=config.benchmark, data=config.data.expanduser(), questions=questions, description=description)


class Client:
    """A server and the model that it answers with.

    Args:
        config: names its address.
    Raises:
        ServerError: see `run`.
    """

    def __init__(self, config: UrlConfig) -> None:
        try:
            import openai
        except ImportError as error:
            raise missing_extra("--url asks through the openai package", "judge") from error
        self.openai, self.config = openai, config
        key = os.environ.get(KEY, "").strip() or "none"
        self.api = openai.OpenAI(api_key=key, base_url=config.url, timeout=PATIENCE, max_retries=3)
        try:
            cards = {card.id: card for card in self.api.with_options(timeout=10, max_retries=0).models.list()}
        except (openai.OpenAIError, AttributeError, TypeError) as wrong:  # or it is no list of models
            raise ServerError(f"--url {config.url}: {' '.join(str(wrong).split())[:300]}") from wrong
        known = list(cards)
        if config.model is None and len(known) != 1:
            raise OptionError(f"--url {config.url} has {len(known)} models: say one with --model: {', '.join(known)}")
        if config.model is not None and config.model not in known:
            raise unknown_name(f"model of {config.url}", config.model, known)
        self.model = config.model or known[0]
        self.identity: dict[str, Any] | None = getattr(cards[self.model], IDENTITY, None)

    def answer(self, plan: Plan, question: Question) -> tuple[str, int | None]:
        """Answer to a question, and the visual tokens that were read for it; None if the server does not say.

        Raises:
            ServerFault: for 5xx, 429 or a body that is no chat completion, after the client's retries.
            ServerError: if the answer names another method, budget or version than `/v1/models` did.
        """
        content: list[dict[str, Any]] = []
        for path in plan.images(question):  # as the models of this project see them, without loss
            plan.open(path).save(file := io.BytesIO(), "PNG", compress_level=1)
            url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
            content.append({"type": "image_url", "image_url": {"url": url}})
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": question.text}]}]
        tokens = self.config.tokens
        own = {} if tokens is None else {"mm_processor_kwargs": {TOKENS: tokens, ASKED: question.text}}
        wanted = {"max_tokens": plan.description["max_new_tokens"], "temperature": 0, "extra_body": own}
        create: Any = self.api.chat.completions.with_raw_response.create
        try:
            response = create(model=self.model, messages=messages, **wanted)
            answer = response.parse()
            said = answer.choices[0].message.content or ""
        except (self.openai.InternalServerError, self.openai.RateLimitError, *NO_ANSWER) as wrong:
            raise ServerFault(describe(wrong)) from wrong
        told = response.headers.get(HEADER)
        if told is not None and json.loads(told) != self.identity:
            raise ServerError(
                f"--url {self.config.url}: an answer comes from {told}, but the run began with "
                f"{json.dumps(self.identity)}. What was answered is kept; start the run again"
            )
        details = getattr(answer.usage, "prompt_tokens_details", None)
        read = getattr(details, "multimodal_tokens", None) or {}
        return said.strip(), sum(read.values()) if read else None


def _results(client: Client, plan: Plan, at_once: int, pending: Sequence[Question]) -> Iterator[Result]:
    """Answers as they come; nothing more is asked if one raises. Faults of the server are results only if it answers
    again afterwards; otherwise they end the call, and those questions are asked by the next one.
    """
    pool, faults = ThreadPoolExecutor(at_once), dict[int, tuple[Question, ServerFault]]()  # since the last answer
    asked = {question.index for question in pending}
    known = next((question for question in plan.questions if question.index not in asked), None)
    try:
        futures = {pool.submit(_answer, client, plan, question): question for question in pending}
        for future in as_completed(futures):
            try:
                result = future.result()
            except ServerFault as fault:
                faults[futures[future].index] = (futures[future], fault)
                if len(faults) > at_once:
                    raise
                continue
            if result.answers:
                known = futures[future]
                yield _recorded(faults)
                faults.clear()
            yield result
        if faults:
            _, first = next(iter(faults.values()))
            if known is None:
                raise first
            client.answer(plan, known)  # does it answer anything at all?
            yield _recorded(faults)
    except (ServerFault, client.openai.OpenAIError) as fault:
        raise _ends(client, fault) from fault
    finally:
        pool.shutdown(cancel_futures=True)


def _recorded(faults: dict[int, tuple[Question, ServerFault]]) -> Result:
    return Result([], [error_record(question, str(fault), "model") for question, fault in faults.values()])


def _ends(client: Client, fault: Exception) -> ServerError:
    said = " ".join(str(fault).split())[:300]
    return ServerError(f"--url {client.config.url}: {said}. What was answered is kept; the same command resumes")


def _check_same_server(client: Client, plan: Plan, folder: Run) -> None:
    """Asks some answered questions again. ServerError if most of the answers are others now."""
    answered = [question for question in plan.questions if question.index in folder.answers]
    probes = answered[:: max(1, len(answered) // PROBES)][:PROBES]
    try:
        other = [one for one in probes if client.answer(plan, one)[0] != folder.answers[one.index]["text"]]
    except (ServerFault, client.openai.OpenAIError) as fault:
        raise _ends(client, fault) from fault
    if 2 * len(other) > len(probes):
        raise ServerError(
            f"--url {client.config.url}: {len(other)} of {len(probes)} questions that {folder.path} has answers to are "
            "answered otherwise now, so this is another server or setting. Give this one a folder of its own: --out"
        )


def _answer(client: Client, plan: Plan, question: Question) -> Result:
    openai = client.openai
    try:
        text, read = client.answer(plan, question)
    except ImageError as error:
        return Result([], [error_record(question, str(error))])
    except openai.APITimeoutError:
        return Result([], [error_record(question, f"no answer within {PATIENCE:g} seconds", "model")])
    except (openai.AuthenticationError, openai.PermissionDeniedError, openai.APIConnectionError) as error:
        raise _ends(client, error) from error
    except openai.OpenAIError as error:
        cause = "question" if isinstance(error, openai.BadRequestError) else "model"
        return Result([], [error_record(question, describe(error), cause)])
    note = [UNTOLD] if read is None and question.images else []
    metadata = {"before": 0, "after": read or 0, "structural": 0, "notes": note}  # before: no server says it
    return Result([answer_record(run_name(plan.description), question, client.model, text, metadata)], [])
