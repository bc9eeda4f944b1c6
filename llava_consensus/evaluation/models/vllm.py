"""A model of transformers, asked by vLLM in this process (`eval --engine vllm`). Prompts are those of `hf.py`; method,
tower and language model run inside vLLM, which batches and keeps what it reads (docs/serving.md).
"""

import gc
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from PIL.Image import Image
from torch import Tensor

from llava_consensus.entry_points import load_place
from llava_consensus.errors import OptionError
from llava_consensus.evaluation.models.base import Answer, Clip, Prompt
from llava_consensus.evaluation.models.hf import HfRunner, processor_of
from llava_consensus.evaluation.models.hf import check as check_hf
from llava_consensus.evaluation.models.loading import Loading
from llava_consensus.hosts.base import PictureOutcome
from llava_consensus.hosts.sequence import Layout, Sharing, read_layout
from llava_consensus.methods import method_name
from llava_consensus.reduction.budget import Budget, Share, amount
from llava_consensus.reduction.method import Method
from llava_consensus.serving.plan import row_kinds
from llava_consensus.serving.setting import ASKED, Setting, config_of
from llava_consensus.serving.supported import check_version

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


def load(path: str, loading: Loading, view: str, options: Mapping[str, str]) -> "VllmRunner":
    """A checkpoint of transformers; its weights are loaded by vLLM when a method is attached.

    Args:
        path: folder of the checkpoint.
        loading: how, with nothing left open.
        view: the family's view, as `module:class`.
        options: all options of the host.
    Raises:
        OptionError: for options of the host, which vLLM does not have.
    """
    import transformers

    made = load_place(view)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config_of(path))
        own = made(model.eval(), options)
    if own.preprocessing:
        raise OptionError(f"engine='vllm' lays pictures out as the checkpoint says: leave {dict(options)} out")
    return VllmRunner(own, processor_of(path, {}), path, loading)


class Shown(NamedTuple):
    """A picture given to vLLM, with the method and budget it is reduced by."""

    picture: Image
    layout: Layout
    method: Method
    budget: Budget | Share


class Served:
    """A method in vLLM, as an attachment of it: vLLM holds it for its whole life, so that nothing is taken off again.

    Args:
        method, budget: of the pictures.
    """

    def __init__(self, method: Method, budget: Budget | Share) -> None:
        self.method, self.budget, self.active = method, budget, True

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

    def __init__(self, view: Any, processor: "ProcessorMixin", path: str, loading: Loading) -> None:
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
        on_cpu = self._loading.device == "cpu"
        return LLM(self._path, hf_overrides=setting, dtype=self._loading.torch_dtype(), enforce_eager=on_cpu, seed=0)

    def _stop(self) -> None:
        if self._engine is not None:
            from vllm.distributed import cleanup_dist_env_and_memory

            self._engine.llm_engine.engine_core.shutdown()
            self._engine = None
            gc.collect()
            cleanup_dist_env_and_memory()

    def encode(self, pictures: "list[Image | Clip]") -> list[Any]:
        """Pictures as they are: vLLM encodes them when they are asked about, and keeps what it made of them."""
        attached, view = self._attached, self.view
        shown = []
        for picture in pictures:
            assert not isinstance(picture, Clip)  # `check` refuses videos
            processed = self.processed(picture)
            (rows,) = view.pictures(processed.modality, processed.inputs, processed.ids)
            kinds = row_kinds([torch.zeros(len(rows.token), dtype=torch.long)], [rows], processed.modality)
            sharing = Sharing(attached.method, attached.budget, view.tower.tokens, view.most_tiles)
            shown.append(Shown(picture, read_layout(kinds, sharing), attached.method, attached.budget))
        return shown

    def question_ids(self, prompt: Prompt, pictures: list[Any]) -> Tensor:
        """Ids [L] with one placeholder for each picture, as vLLM takes a prompt."""
        return self.prompt_ids(prompt, len(pictures))

    def groups(self, attachment: Any, encoded: list[list[Any]], ids: list[Tensor]) -> list[list[int]]:
        """A single group: vLLM batches by itself."""
        return [list(range(len(ids)))]

    def answer_group(
        self, attachment: Any, encoded: list[list[Any]], ids: list[Tensor], prompts: list[Prompt]
    ) -> list[Answer]:
        """Answers of prompts, which vLLM batches as it likes."""
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
        pictures = [picture for one in shown for picture in one.layout.pictures]
        structural = sum(picture.structural for picture in pictures)
        placeholder = self.view.placeholder("image")
        outcomes = []
        for one, picture in zip(shown, pictures, strict=True):
            gone = sum(len(unit.places) - unit.budget.tokens for unit in one.layout.reduced())
            origin = one.layout.origin(picture)
            left = picture.before - gone
            outcomes.append(PictureOutcome(row, picture.before, left, picture.structural, (), (), origin))
        after = output.prompt_token_ids.count(placeholder) - structural
        return Answer(text.strip(), sum(one.before for one in outcomes), after, structural, (), tuple(outcomes))


def setting_of(method: Method, given: Budget | Share) -> Setting:
    """Server setting of a method and a budget. OptionError for one that a server cannot take."""
    if isinstance(given, Budget) and given.merged is not None:
        raise OptionError(f"merged={given.merged}: vLLM is told the tokens of a picture alone. Leave --merged out")
    options = {one.name: getattr(method, one.name) for one in fields(method) if one.init}
    return Setting(method_name(method), amount(given), options=options)
