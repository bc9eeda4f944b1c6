"""The setting of a server: method, budget, and the largest budget a request may ask for. It is checked before anything
is loaded, travels as plain values in the model's configuration, and is read back in every process of vLLM.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any

from llava_consensus.errors import OptionError
from llava_consensus.hosts import HOSTS
from llava_consensus.methods import make, method_name
from llava_consensus.reduction.budget import Budget, Share, amount, budget
from llava_consensus.reduction.method import Method, Place
from llava_consensus.serving.supported import ASKED, FAMILIES, TOKENS, check_version

ENTRY = "visual_reduction"  # of a configuration
TAKEN: dict[str, tuple[str, Any]] = {  # entries of configurations that vLLM 0.32 takes as this value, whatever they say
    "llava_onevision": ("vision_aspect_ratio", "anyres_max_9"),
    "internvl": ("vision_feature_layer", -1),
    "gemma4": ("text_config.use_bidirectional_attention", None),  # on a CPU
}
TOWERS = ("clip_vision_model", "siglip_vision_model")  # of models of LLaVA's kind that vLLM has
REFUSED: dict[str, tuple[str, ...]] = {  # arguments of vLLM, and the values that they may have
    "--pipeline-parallel-size": ("1",),
    "-pp": ("1",),
    "--data-parallel-size": ("1",),
    "-dp": ("1",),
    "--api-server-count": ("1",),
    "-asc": ("1",),
    "--enable-lora": (),
    "--speculative-config": (),
    "-sc": (),
    "--ec-transfer-config": (),
    "--mm-encoder-tp-mode": ("weights",),
    "--video-pruning-rate": ("0", "0.0"),
}


@dataclass(frozen=True)
class Setting:
    """A method and its budgets, as a server has them. OptionError for one that an engine cannot have."""

    method: str
    tokens: int | float  # of an image, a number or a share, if a request does not say
    largest: int | float | None = None  # the most an image is given; None: no more than `tokens`
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_method(self.method, self.made)
        for name, value in (("tokens", self.tokens), ("largest", self.most)):
            try:
                budget(value)
            except (OptionError, TypeError) as wrong:
                raise OptionError(f"{name}={value!r}: {wrong}") from wrong
        if isinstance(self.tokens, int) == isinstance(self.most, int) and self.most < self.tokens:
            raise OptionError(
                f"largest={self.largest} is below tokens={self.tokens}, which a request gets that does not ask: "
                f"give at least {self.tokens}, or leave largest out"
            )

    @property
    def made(self) -> Method:
        return make(self.method, **self.options)

    @property
    def most(self) -> int | float:
        return self.tokens if self.largest is None else self.largest

    def overrides(self, config: Any) -> dict[str, Any]:
        """vLLM's `hf_overrides` for a model of this configuration. OptionError for one that is not adapted."""
        if config.model_type not in FAMILIES:
            raise OptionError(
                f"models of type {config.model_type!r} are not adapted to vLLM here; adapted are {', '.join(FAMILIES)}"
            )
        entry, adapted = TAKEN.get(config.model_type, ("model_type", config.model_type))
        value = reduce(lambda part, name: getattr(part, name, adapted), entry.split("."), config)
        if value != adapted:
            raise OptionError(f"{entry}={value!r}: in vLLM such models are adapted with {adapted!r} alone")
        tower = getattr(getattr(config, "vision_config", None), "model_type", TOWERS[0])
        if config.model_type.startswith("llava") and tower not in TOWERS:
            raise OptionError(f"vision_config.model_type={tower!r}: adapted to vLLM are {', '.join(TOWERS)}")
        own = {"method": self.method, "tokens": self.tokens, "largest": self.largest, "options": self.options}
        found = {"architectures": [FAMILIES[config.model_type]], ENTRY: own}
        if self.made.positions != "renumber" and "qwen" not in config.model_type:
            found["rope_parameters"] = {"mrope_section": [1, 1, 1]}  # vLLM asks the model for positions if this is
        return found

    def __call__(self, config: Any) -> Any:
        """The configuration with the overrides in it. vLLM first tries this function on a made-up configuration."""
        if config.model_type.startswith("dummy_"):
            return config
        for name, value in self.overrides(config).items():
            setattr(config, name, value)
        return config


def of_config(config: Any) -> Setting:
    return Setting(**getattr(config, ENTRY))


def check_method(name: str, method: Method) -> None:
    """Raises OptionError for a method that acts where vLLM's own code runs, or whose length is not known beforehand."""
    if method.place is Place.DECODER:
        raise OptionError(
            f"{name} removes tokens between the layers of the language model, and vLLM's cache has one length for all "
            "layers: take a method that acts after the vision tower (llava-consensus list methods)"
        )
    if method.place is not Place.TOKENS:
        raise OptionError(
            f"{name} acts inside the vision tower or before it, where vLLM's own code runs: take a method that acts "
            "after the vision tower (llava-consensus list methods)"
        )
    if method.adaptive:
        raise OptionError(
            f"{name}: the number of tokens depends on the image, and vLLM makes room for them before it has seen it. "
            "Leave the option out that makes it so, or take another method"
        )


def engine_arguments(
    method: str = "consensusdrop", tokens: int | float = 64, largest: int | float | None = None, **options: Any
) -> dict[str, Any]:
    """Arguments of vLLM's `LLM(...)` that make it answer from `tokens` visual tokens for each image.

    Args:
        method: name in `METHODS`, one that acts after the vision tower.
        tokens: of one image, a number, or a share in (0, 1) of its tokens.
        largest: the most a request may ask for by `mm_processor_kwargs={"visual_tokens": ...}`; None: `tokens`.
        options: fields of the method, for example `alpha=1.0`.
    Raises:
        OptionError: for a value outside its bound, a method that an engine cannot have, or another vLLM.
        MissingDependency: without vLLM.
    """
    check_version()
    return {"hf_overrides": Setting(method, tokens, largest, options)}


def setting_of(method: Method, given: Budget | Share) -> Setting:
    """Server setting of a method and a budget. OptionError for one that a server cannot take."""
    if isinstance(given, Budget) and given.merged is not None:
        raise OptionError(f"merged={given.merged}: vLLM only knows the tokens of an image. Leave --merged out")
    options = {one.name: getattr(method, one.name) for one in fields(method) if one.init}
    return Setting(method_name(method), amount(given), options=options)


def check_keys(given: Mapping[str, object]) -> None:
    """Raises OptionError for `mm_processor_kwargs` of a request other than ours, which could end the engine."""
    others = sorted(set(given) - {TOKENS, ASKED})
    if others:
        raise OptionError(
            f"mm_processor_kwargs: {', '.join(map(repr, others))[:200]}: a request may only say {TOKENS} and "
            f"{ASKED}. How images are preprocessed is the server's (--vllm '--mm-processor-kwargs ...')"
        )


def asked(value: Any) -> Budget | Share:
    """The budget of a request's `visual_tokens`. OptionError for anything but a number or a share."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise OptionError(f"{TOKENS}={value!r} must be a whole number of tokens, or a share in (0, 1)")
    try:
        return budget(value)
    except OptionError as wrong:
        raise OptionError(f"visual_{wrong}") from wrong


def further(text: str) -> list[str]:
    """Arguments in `--vllm`. OptionError for those that do not go with a reduction (see `serving/server.py`)."""
    try:
        words = shlex.split(text)
    except ValueError as wrong:
        raise OptionError(f"--vllm {text!r}: {wrong}. Close the quote") from wrong
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        name, value = name.replace("_", "-"), value or (words[place + 1] if place + 1 < len(words) else "")
        if name == "--hf-overrides":
            raise OptionError(f"{name}: this command gives vLLM its own. Put yours into the checkpoint's config.json")
        if name in REFUSED and value not in REFUSED[name]:
            raise OptionError(f"{word}: not adapted to reduced images. Leave it out")
    return words


def config_of(model: str) -> Any:
    """The configuration of a checkpoint. OptionError if there is none."""
    import transformers

    from llava_consensus.hosts.environment import load_pretrained

    official = OptionError(
        f"model {model!r} has the format of official LLaVA, which vLLM does not read. "
        f"Type: llava-consensus model convert {model} OUT"
    )
    try:
        config = load_pretrained(transformers.AutoConfig, model)
    except (OSError, ValueError) as wrong:
        if any(f"`{kind}`" in str(wrong) for kind in HOSTS["llava"].types):
            raise official from wrong
        raise OptionError(f"model {model!r}: its configuration cannot be read: {str(wrong).splitlines()[0]}") from wrong
    if config.model_type in HOSTS["llava"].types:  # which transformers reads where `llava` was imported
        raise official
    return config
