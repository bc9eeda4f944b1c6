"""Blocks of a vision tower that nobody reads: those behind the block whose output feeds the projector. While an
attachment encodes pictures they hand their input on, which changes no bit of what is read; elsewhere they run.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llava_consensus.hosts import call as calls
from llava_consensus.hosts.shadow import Shadow
from llava_consensus.hosts.tower.taps import attending_block, chosen_block


def skip_unread(attachment: Any, tower: Any) -> list[Shadow]:
    """Shadows of the blocks behind the last one that projector or method reads; none where a tower does not say in
    which form its blocks return states.
    """
    if not hasattr(tower, "result"):
        return []
    method = attachment.method
    chosen = chosen_block(tower, method.vision_layer)
    last = max(tower.feature_block, chosen, attending_block(tower, chosen, method.blocks_ahead))
    return [
        Shadow(block, "forward", partial(_pass_on, attachment, block.forward)) for block in tower.blocks[last + 1 :]
    ]


def _pass_on(attachment: Any, plain: Callable[..., Any], hidden: Any, *args: Any, **kwargs: Any) -> Any:
    """Forward of an unread block."""
    call = calls.current(attachment)
    if call is None or call.parts is None:
        return plain(hidden, *args, **kwargs)
    return attachment.here.tower.result(hidden)
