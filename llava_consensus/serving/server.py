"""Configuration and requests of vLLM's servers, checked before an engine starts. Nothing heavy is imported here."""

from functools import wraps
from typing import Any

from llava_consensus.errors import ConsensusError, OptionError

BFLOAT16 = frozenset({"qwen3_5"})  # `model_type` of models that vLLM runs in no other format on a CPU


def check(config: Any) -> None:
    """Raises OptionError for server options that are incompatible with reduction."""
    import torch
    from vllm.platforms import current_platform

    parallel, multimodal = config.parallel_config, config.model_config.multimodal_config
    wrong = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "--dtype other than bfloat16 on a CPU": config.model_config.hf_config.model_type in BFLOAT16
        and current_platform.is_cpu()
        and config.model_config.dtype != torch.bfloat16,
        "LoRA adapters": config.lora_config is not None,
        "speculative decoding": config.speculative_config is not None,
        "disaggregation of the vision tower": config.ec_transfer_config is not None,
        "--mm-encoder-tp-mode data": multimodal.mm_encoder_tp_mode == "data",
        "--video-pruning-rate": multimodal.is_multimodal_pruning_enabled(),
        "captured graphs of the vision tower": config.compilation_config.cudagraph_mm_encoder,
        "a compiled vision tower": config.compilation_config.compile_mm_encoder,
    }
    for name, is_asked in wrong.items():
        if is_asked:
            raise OptionError(f"{name}: not adapted to reduced images. Leave it out")


class Configured:
    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Nothing."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Checks the configuration, and prepares the counters; then calls vLLM's own check for such a model."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as THEIRS
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from llava_consensus.serving.counts import show
        from llava_consensus.serving.patches import PROMPT, patch
        from llava_consensus.serving.setting import of_config
        from llava_consensus.serving.supported import check_version

        try:
            check_version()
            check(vllm_config)
        except OptionError as wrong:  # pydantic would lay a ValueError out in several lines
            raise ConsensusError(str(wrong)) from None
        reads_prompt = of_config(vllm_config.model_config.hf_config).made.reads_prompt
        patch(PROMPT if reads_prompt else "image")
        show()
        if reads_prompt:
            # it would hold every image once for each prompt; the processor has its own cache
            vllm_config.model_config.multimodal_config.mm_processor_cache_gb = 0
        theirs = MODELS_CONFIG_MAP.get(THEIRS.get(vllm_config.model_config.hf_config.model_type))
        if theirs is not None:
            theirs.verify_and_update_config(vllm_config)


def admit_own_arguments() -> None:
    """Makes servers take our own `mm_processor_kwargs` of any client, and no others, which can end an engine."""
    from vllm.renderers import online_renderer

    from llava_consensus.serving.setting import check_keys

    theirs = online_renderer.validate_request_mm_kwargs
    if hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def validate(*, mm_processor_kwargs: Any, **more: Any) -> None:
        check_keys(mm_processor_kwargs or {})
        theirs(mm_processor_kwargs=None, **more)

    online_renderer.validate_request_mm_kwargs = validate


def tell_bad_media() -> None:
    """Makes servers of this process answer 400 to images and videos that cannot be loaded, where vLLM answers 500."""
    from vllm.exceptions import VLLMError
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

    class Connector(MediaConnector):
        async def load_from_url_async(self, *given: Any, **named: Any) -> Any:
            """As in vLLM, but raises OptionError, which vLLM answers with 400, for errors that vLLM does not handle."""
            try:
                return await super().load_from_url_async(*given, **named)
            except (VLLMError, ValueError):
                raise
            except Exception as wrong:
                raise OptionError(f"an image or video cannot be loaded: {str(wrong) or repr(wrong)}") from wrong

    MEDIA_CONNECTOR_REGISTRY.register("http")(Connector)  # the name of vLLM's default
