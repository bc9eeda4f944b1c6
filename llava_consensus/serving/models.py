"""vLLM's models with fewer visual tokens: each class is vLLM's own with another way from pictures to embeddings."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.llava import (
    LlavaDummyInputsBuilder,
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from llava_consensus.errors import OptionError
from llava_consensus.hosts.hf.model import tiles_of
from llava_consensus.hosts.towers import fingerprint
from llava_consensus.reduction.tokens import Need
from llava_consensus.serving.engine import Encoded, Engine, Prompt
from llava_consensus.serving.plan import Plan
from llava_consensus.serving.processors import ALL, BUDGET, INDEX, KEY, KEYS, OWN, PICTURES, PROMPT, Reducing, unpacked


def check(config: Any) -> None:
    """Raises OptionError for what a server is asked for beside the reduction and does not go with it."""
    parallel, multimodal = config.parallel_config, config.model_config.multimodal_config
    wrong = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "LoRA adapters": config.lora_config is not None,
        "speculative decoding": config.speculative_config is not None,
        "--mm-encoder-tp-mode data": multimodal.mm_encoder_tp_mode == "data",
        "--video-pruning-rate": multimodal.is_multimodal_pruning_enabled(),
        "captured graphs of the vision tower": config.compilation_config.cudagraph_mm_encoder,
    }
    for name, is_asked in wrong.items():
        if is_asked:
            raise OptionError(f"{name}: not adapted to reduced pictures. Leave it out")


class Reduced:
    """Mixed into vLLM's model of a family, in front of it."""

    engine: Engine

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        check(vllm_config)
        plan = Plan(vllm_config.model_config.hf_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.reduces = plan.method.reduces
        if self.reduces:
            self.engine = self.make_engine(plan)

    def embed_multimodal(self: Any, **kwargs: Any) -> Any:
        """What is left of each picture."""
        own = {name: kwargs.pop(name) for name in list(kwargs) if OWN in name}
        if not self.reduces or not kwargs:
            return super().embed_multimodal(**kwargs)
        modality = next(iter(own)).partition("_")[0]
        own = {name.partition("_")[2]: value for name, value in own.items()}
        budgets = [unpacked(int(value)) for value in own[BUDGET]]
        with torch.no_grad():
            if not self.engine.method.reads_prompt:
                return self._alone(self.encode(modality, kwargs), budgets, modality)
            return self._asked(modality, kwargs, own, budgets)

    def _alone(self: Any, pictures: list[Encoded], budgets: list[Any], modality: str) -> list[Tensor]:
        """Pictures that nothing is asked about."""
        prompts = [
            Prompt(
                torch.full((len(one.rows.token),), self.placeholder(modality)),
                torch.zeros_like(one.rows.token),
                [one],
                budget,
            )
            for one, budget in zip(pictures, budgets, strict=True)
        ]
        return [left for (left,) in self.engine.reduced(prompts, modality)]

    def placeholder(self: Any, modality: str) -> int:
        """Id of the tokens that stand for a modality."""
        return int(self.engine.view.placeholder(modality))

    def _asked(
        self: Any, modality: str, kwargs: dict[str, Any], own: dict[str, Any], budgets: list[Any]
    ) -> list[Tensor]:
        """Pictures of prompts that say what is asked about them; a prompt is reduced once for all of its pictures."""
        known: dict[tuple[int, ...], Encoded] = {}
        keys = [[tuple(key.tolist()) for key in group] for group in own[KEYS]]
        self._encode_missing(modality, kwargs, [tuple(key.tolist()) for key in own[KEY]], known)
        for number, group in enumerate(keys):
            others = {name.removeprefix(ALL): value[number] for name, value in own.items() if name.startswith(ALL)}
            if len(group) > 1:
                self._encode_missing(modality, others, group, known)
        first: dict[Any, int] = {}
        prompts: list[Prompt] = []
        which = []
        for number, group in enumerate(keys):
            ids, pictures = own[PROMPT][number], own[PICTURES][number]
            name = (tuple(group), budgets[number], ids.numpy().tobytes())
            if name not in first:
                first[name] = len(prompts)
                prompts.append(Prompt(ids, pictures, [known[key] for key in group], budgets[number]))
            which.append(first[name])
        reduced = self.engine.reduced(prompts, modality)
        return [reduced[prompt][int(index)] for prompt, index in zip(which, own[INDEX], strict=True)]

    def _encode_missing(
        self: Any, modality: str, kwargs: dict[str, Any], keys: Sequence[tuple[int, ...]], known: dict[Any, Encoded]
    ) -> None:
        """Puts these pictures into `known`: those that were encoded before, and the others through the tower."""
        kept = self.engine.kept
        known |= {key: found for key in keys if (found := kept.get(key)) is not None}
        missing = [place for place, key in enumerate(keys) if key not in known and key not in keys[:place]]
        if missing:
            for place, picture in zip(missing, self.encode(modality, self.some(kwargs, missing)), strict=True):
                known[keys[place]] = picture
                kept.put(keys[place], picture)

    def some(self: Any, kwargs: dict[str, Any], places: list[int]) -> dict[str, Any]:
        """The processor's output for some of the pictures."""
        return {
            name: values[places] if isinstance(values, Tensor) else [values[i] for i in places]
            for name, values in kwargs.items()
        }

    def encode(self: Any, modality: str, inputs: dict[str, Any]) -> list[Encoded]:
        """Pictures through vLLM's tower and projector, with what the method reads."""
        with self.engine.collecting() as parts:
            tokens = list(super().embed_multimodal(**inputs))
        rows = self.engine.plan.rows(modality, inputs)
        joined = {name: torch.cat(values) for name, values in parts.items()}
        if Need.FINGERPRINT in self.engine.method.needs:
            joined["fingerprint"] = fingerprint(self.engine.view.pixels(modality, inputs, rows))
        tiles = tiles_of(torch.cat(tokens), joined, rows)
        return [Encoded(*parts, {}) for parts in zip(tiles, tokens, rows, strict=True)]


def tower_named(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights with the tower's as vLLM's modules are called: transformers 5.19 saves them without `vision_model`, which
    vLLM 0.32 does not know.
    """
    for name, weight in weights:
        yield re.sub(r"^(model\.)?vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.", name), weight


class LlavaProcessor(Reducing, LlavaMultiModalProcessor):
    """Of LLaVA 1.5."""


@MULTIMODAL_REGISTRY.register_processor(LlavaProcessor, info=LlavaProcessingInfo, dummy_inputs=LlavaDummyInputsBuilder)
class Llava(Reduced, LlavaForConditionalGeneration):
    """LLaVA 1.5."""

    def make_engine(self, plan: Plan) -> Engine:
        """CLIP or SigLIP, and a projector of one patch at a time."""
        embed = lambda ids, at: self.embed_input_ids(ids, None, is_multimodal=at)  # noqa: E731
        blocks = self.vision_tower.vision_model.encoder.layers
        return Engine(plan, self.language_model.model, blocks, self.multi_modal_projector, embed)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As vLLM does, of checkpoints of transformers 5.19 too."""
        loaded: set[str] = super().load_weights(tower_named(weights))
        return loaded
