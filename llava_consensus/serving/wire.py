"""Tensors that several items of a message of vLLM have in common, sent once: all N images go with each of them."""

from functools import wraps
from typing import Any


def send_once() -> None:
    """Makes vLLM's messages of this process so. Any vLLM can read them, and the other way round."""
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    theirs, reads = MsgpackEncoder._encode_tensor, MsgpackDecoder._decode_tensor
    if hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def encode(self: Any, tensor: Any) -> Any:
        known = _of_message(self)
        name = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if name not in known:
            known[name] = tensor, theirs(self, tensor)  # the tensor too: another must not come to its place
        return known[name][1]

    @wraps(reads)
    def decode(self: Any, sent: Any) -> Any:
        if not isinstance(sent[2], int):  # a small one, which is in the text itself
            return reads(self, sent)
        known = _of_message(self)
        name = (sent[2], sent[0], tuple(sent[1]))
        if name not in known:
            known[name] = reads(self, sent)
        return known[name]

    MsgpackEncoder._encode_tensor, MsgpackDecoder._decode_tensor = encode, decode


def _of_message(coder: Any) -> dict[Any, Any]:
    """Objects met in the current message, which is identified by its list of buffers."""
    buffers, known = getattr(coder, "_met", (None, {}))
    if buffers is not coder.aux_buffers:
        buffers, known = coder.aux_buffers, {}
        coder._met = buffers, known
    return known
