"""Lengths of `generate` for prompts that were reduced: `max_length` and `min_length` count the original prompt."""

import functools
from typing import Any

from llava_consensus.hosts.call import named

UNDER_WAY = "generate"  # in the state of a call: the `generate` that forwards belong to
MORE = (
    "more rows"  # in the state of a call: rows by which the prompt that `generate` counts is longer than the full one
)
COUNTING = "_prepare_generated_length"  # function of transformers 5 that settles how long an answer may be


def recounting(attachment: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Patches the function by which `generate` settles its lengths: limits that count the prompt mean the full one, and
    `generate` counts the reduced one.
    """
    module = attachment.here.module
    function = getattr(type(module), COUNTING)
    kwargs = named(function, args, kwargs)
    config, more = kwargs["generation_config"], attachment.current(fresh=False).state.get(MORE, 0)
    if config.max_new_tokens is None and not kwargs["has_default_max_length"]:
        config.max_length = max(config.max_length + more, 1)
    if config.min_new_tokens is None and config.min_length and not kwargs["has_default_min_length"]:
        config.min_length = max(config.min_length + more, 0)
    return (plain or functools.partial(function, module))(**kwargs)
