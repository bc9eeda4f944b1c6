"""A model of transformers, asked by vLLM in this process (`eval --engine vllm`). Prompts are those of `hf.py`; method,
tower and language model run inside vLLM, which batches and keeps what it reads (docs/serving.md).
"""

import argparse
import gc
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from PIL.Image import Image
from torch import Tensor

from llava_consensus.errors import ConsensusError, OptionError
from llava_consensus.evaluation.media import Clip
from llava_consensus.evaluation.models.base import Answer, Prompt
from llava_consensus.evaluation.models.hf import HfRunner, processor_of
from llava_consensus.evaluation.models.hf import check as check_hf
from llava_consensus.evaluation.models.loading import Loading
from llava_consensus.hosts.facts import Facts
from llava_consensus.hosts.outcomes import ImageOutcome, unchanged
from llava_consensus.methods import method_name
from llava_consensus.reduction.budget import Budget, Share, amount
from llava_consensus.reduction.method import Method
from llava_consensus.serving.parent import children_end_too
from llava_consensus.serving.plan import left_of
from llava_consensus.serving.setting import Setting, config_of, further
from llava_consensus.serving.supported import ASKED, check_version

RAISED = re.compile(r"\b(\w*(?:Error|Exception): .+)")  # the last line of a traceback
TOLD = re.compile(rb"\b(WARNING|ERROR)\b")  # lines of a log that are shown where an engine starts

if TYPE_CHECKING:
    from transformers import ProcessorMixin


def check(model: str, conversation: str | None, videos: bool, options: Mapping[str, str]) -> dict[str, Any]:
    """Checks all that can be known without weights.

    Raises:
        OptionError: for a model, a version of vLLM or questions that are not adapted.
    """
    check_version()
    if videos:
        raise OptionError("engine='vllm': questions about videos are not adapted to it. Leave --engine out")
    Setting("full", 1).overrides(config_of(model))
    return check_hf(model, conversation, videos, options)


def arguments_of(text: str | None) -> dict[str, Any]:
    """Arguments of vLLM's `LLM(...)`, from those of its command in one text. OptionError for what it does not know."""
    words = further(text or "")
    if not words:
        return {}
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    reader = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    try:
        given, unknown = reader.parse_known_args(words)
    except argparse.ArgumentError as wrong:
        raise OptionError(f"--vllm {text!r}: {wrong}") from wrong
    if unknown:
        raise OptionError(f"--vllm {text!r}: an engine has no {unknown[0]}. vllm serve --help lists what it has")
    usual = vars(reader.parse_known_args([])[0])
    return {name: value for name, value in vars(given).items() if value != usual[name]}


@contextmanager
def starting() -> Iterator[None]:
    """Holds back what vLLM and its processes print while an engine starts: warnings come at the end. Of one that does
    not start the first error is raised as OptionError, with the name of a file that has all lines.
    """
    lines: list[bytes] = []
    source, sink = os.pipe()
    streams = {stream: os.dup(stream) for stream in (1, 2)}
    held = True

    def read() -> None:
        """Reads as long as a process of vLLM writes; what it prints later is shown at once."""
        with open(source, "rb") as pipe:
            for line in pipe:
                if held:
                    lines.append(line)
                else:
                    os.write(2, line)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    for stream in streams:
        os.dup2(sink, stream)
    os.close(sink)
    failed: Exception | None = None
    try:
        yield
    except Exception as wrong:
        failed = wrong
    finally:
        for stream, before in streams.items():
            os.dup2(before, stream)
            os.close(before)
    if failed is not None:
        thread.join(timeout=2)  # until processes that end have written all
    held = False
    if failed is None:
        os.write(2, b"".join(filter(TOLD.search, lines)))
    elif isinstance(failed, ConsensusError):
        raise failed
    else:
        with tempfile.NamedTemporaryFile("wb", prefix="vllm-", suffix=".log", delete=False) as log:
            log.writelines(lines)
        raise OptionError(f"vLLM does not start: {cause(lines, failed)}. All that it said: {log.name}") from failed


def cause(lines: Sequence[bytes], failed: Exception) -> str:
    """The first error in a log, in which those of the processes above follow; else what was raised."""
    found = (RAISED.search(line.decode(errors="replace")) for line in lines)
    return next((one[1] for one in found if one), None) or " ".join(str(failed).split())[:500]


def load(path: str, loading: Loading, view: str, options: Mapping[str, str]) -> "VllmRunner":
    """A checkpoint of transformers; its weights are loaded by vLLM when a method is attached.

    Raises:
        OptionError: for options of the host, which vLLM does not have, or arguments of vLLM that it does not know.
    """
    arguments_of(loading.vllm)
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config_of(path))
    own = Facts(model.eval(), options)
    if own.preprocessing:
        raise OptionError(f"engine='vllm' lays images out as the checkpoint says: leave {dict(options)} out")
    return VllmRunner(own, processor_of(path), path, loading)


class Shown(NamedTuple):
    """An image given to vLLM, with the method and budget it is reduced by, and its tokens before and after."""

    picture: Image
    method: Method
    budget: Budget | Share
    outcome: ImageOutcome


class Served:
    """A method in vLLM, as an attachment of it: vLLM holds it for its whole life, so that nothing is taken off again.

    Args:
        method, budget: of the pictures.
    """

    def __init__(self, method: Method, budget: Budget | Share) -> None:
        self.asked, self.budget, self.active = method, budget, True

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Another one may be attached."""
        self.active = False


class VllmRunner(HfRunner):
    """A model in vLLM, started anew for another method or budget.

    Args:
        view: of the model without weights.
        processor: of the same checkpoint.
        path: of the checkpoint.
        loading: how vLLM loads it.
    """

    def __init__(self, view: Facts, processor: "ProcessorMixin", path: str, loading: Loading) -> None:
        super().__init__(view, processor)
        self._path, self._loading = path, loading
        self._setting: Setting | None = None
        self._engine: Any = None

    def attach(self, method: Method, budget: Budget | Share) -> Any:
        """Starts vLLM with this method, or keeps the running engine if its setting is the same.

        Raises:
            OptionError: for a method or a budget that an engine cannot have.
        """
        setting = setting_of(method, budget)
        if setting != self._setting:
            self._stop()
            self._engine, self._setting = self._start(setting), setting
        self._attached: Any = Served(method, budget)
        return self._attached

    def _start(self, setting: Setting) -> Any:
        from vllm import LLM

        # on a CPU, compiling takes longer than it gains on a benchmark
        own = {"enforce_eager": self._loading.device == "cpu", "dtype": self._loading.torch_dtype(), "seed": 0}
        own |= arguments_of(self._loading.vllm)
        with starting(), children_end_too():
            return LLM(self._path, hf_overrides=setting, **own)

    def _stop(self) -> None:
        if self._engine is not None:
            from vllm.distributed import cleanup_dist_env_and_memory

            self._engine.llm_engine.engine_core.shutdown()
            self._engine = None
            gc.collect()
            cleanup_dist_env_and_memory()

    def encode(self, pictures: "list[Image | Clip]") -> list[Any]:
        """Images as they are: vLLM encodes them when they are asked about, and keeps what it made of them."""
        attached, view = self._attached, self.view
        shown = []
        for picture in pictures:
            assert not isinstance(picture, Clip)  # `check` refuses videos
            processed = self.processed(picture)
            arguments = view.encoder_inputs(processed.inputs)[processed.modality]
            (image,) = view.images(processed.modality, arguments, processed.ids.numpy())
            (outcome,) = unchanged([image])
            left, structural = left_of(image, attached.budget, attached.asked, view.most_tiles)
            outcome = outcome._replace(after=left, structural=structural)
            shown.append(Shown(picture, attached.asked, attached.budget, outcome))
        return shown

    def question_ids(self, prompt: Prompt, pictures: list[Any]) -> Tensor:
        return self.prompt_ids(prompt, len(pictures))

    def groups(self, attachment: Any, encoded: list[list[Any]], ids: list[Tensor]) -> list[list[int]]:
        return [list(range(len(ids)))]

    def answer_group(
        self, attachment: Any, encoded: list[list[Any]], ids: list[Tensor], prompts: list[Prompt]
    ) -> list[Answer]:
        from vllm import SamplingParams

        bounds = {"max_tokens": prompts[0].max_new_tokens, "min_tokens": prompts[0].min_new_tokens}
        given: list[dict[str, Any]] = [{"prompt_token_ids": row.tolist()} for row in ids]
        for one, pictures, prompt in zip(given, encoded, prompts, strict=True):
            if pictures:
                one["multi_modal_data"] = {"image": [shown.picture for shown in pictures]}
                one["mm_processor_kwargs"] = {ASKED: prompt.text}
        outputs = self._engine.generate(given, SamplingParams(temperature=0, **bounds), use_tqdm=False)
        return [
            self._answer(row, pictures, output)
            for row, (pictures, output) in enumerate(zip(encoded, outputs, strict=True))
        ]

    def _answer(self, row: int, shown: list[Shown], output: Any) -> Answer:
        """An answer with the token counts that vLLM reports."""
        text = self.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
        outcomes: tuple[Any, ...] = tuple(one.outcome._replace(row=row) for one in shown)
        structural = sum(outcome.structural for outcome in outcomes)
        after = output.prompt_token_ids.count(self.view.placeholder("image")) - structural
        return Answer(text.strip(), sum(one.before for one in outcomes), after, structural, (), outcomes)


def setting_of(method: Method, given: Budget | Share) -> Setting:
    """Server setting of a method and a budget. OptionError for one that a server cannot take."""
    if isinstance(given, Budget) and given.merged is not None:
        raise OptionError(f"merged={given.merged}: vLLM is only told the tokens of an image. Leave --merged out")
    options = {one.name: getattr(method, one.name) for one in fields(method) if one.init}
    return Setting(method_name(method), amount(given), options=options)
