"""vLLM's bound on the images that are encoded in a step, in tokens as the tower gives them, not those left."""

from functools import wraps
from typing import Any

from llava_consensus.serving.supported import ROWS


def count_tower_work() -> None:
    """Makes schedulers of this process count so. Images that are not reduced count as before."""
    from vllm.v1.core.sched.scheduler import Scheduler

    theirs = Scheduler._try_schedule_encoder_inputs
    if hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def schedule(self: Any, request: Any, *given: Any, **named: Any) -> Any:
        manager, gone = self.encoder_cache_manager, 0  # tokens that the tower gives and the reduction takes away
        allocates = manager.can_allocate

        def can_allocate(request: Any, place: int, left: int, waiting: int) -> bool:
            nonlocal gone
            tokens = request.get_num_encoder_embeds(place)
            more = tokens_before(request.mm_features[place], tokens) - tokens
            begun = left - gone < self.max_num_encoder_input_tokens  # a single image may be larger than the bound
            if (begun and tokens + more + gone > left) or not allocates(request, place, left, waiting):
                return False
            gone += more
            return True

        manager.can_allocate = can_allocate
        try:
            images, tokens, left, *rest = theirs(self, request, *given, **named)
        finally:
            del manager.can_allocate
        return images, tokens, left - gone, *rest

    Scheduler._try_schedule_encoder_inputs = schedule


def tokens_before(feature: Any, tokens: int) -> int:
    """Tokens of an image without reduction, given those that are left."""
    rows = (feature.data or {}).get(f"{feature.modality}_{ROWS}")
    return tokens if rows is None else max(tokens, int(rows.data))
