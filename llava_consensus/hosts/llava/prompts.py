"""A prompt as LLaVA's token ids, and where pictures and text stand in it."""

from typing import Any

from torch import Tensor

from llava_consensus.hosts.base import Prompt
from llava_consensus.hosts.llava.checks import CONVERSATION, check_conversation


def to_ids(prompt: Prompt, pictures: int, tokenizer: Any, wrapped: bool = False) -> Tensor:
    """Token ids [L] of a prompt with placeholders for its pictures in front of its text, as LLaVA's own runners build
    it; `wrapped` in the start and end tokens some checkpoints want (`mm_use_im_start_end`).
    """
    from llava.constants import DEFAULT_IM_END_TOKEN, DEFAULT_IM_START_TOKEN, DEFAULT_IMAGE_TOKEN, IMAGE_TOKEN_INDEX
    from llava.conversation import conv_templates
    from llava.mm_utils import tokenizer_image_token

    conversation = prompt.conversation or CONVERSATION
    check_conversation(conversation)
    image = DEFAULT_IM_START_TOKEN + DEFAULT_IMAGE_TOKEN + DEFAULT_IM_END_TOKEN if wrapped else DEFAULT_IMAGE_TOKEN
    turns = conv_templates[conversation].copy()
    turns.append_message(turns.roles[0], f"{image * pictures}\n{prompt.text}" if pictures else prompt.text)
    turns.append_message(turns.roles[1], None)
    ids: Tensor = tokenizer_image_token(turns.get_prompt(), tokenizer, IMAGE_TOKEN_INDEX, return_tensors="pt")
    return ids


def image_place(ids: Tensor) -> int:
    """Where the first image placeholder stands in a prompt [L]."""
    from llava.constants import IMAGE_TOKEN_INDEX

    return int((ids == IMAGE_TOKEN_INDEX).nonzero()[0])


def text_rows(ids: Tensor) -> tuple[int, int]:
    """Of a prompt [L]: ids that are no image placeholder, and how many of them follow the last placeholder."""
    from llava.constants import IMAGE_TOKEN_INDEX

    places = (ids == IMAGE_TOKEN_INDEX).nonzero()[:, 0].tolist()
    return len(ids) - len(places), len(ids) - 1 - places[-1] if places else len(ids)
