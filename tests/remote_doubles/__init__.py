"""Doubles of three models that carry code of their own, small and with random weights: the same attribute paths, shapes
and conventions of calling as theirs, written for these tests from what `hosts/remote` says of them. `base` and one of
the others stand alone, so that they can lie in a checkpoint as its code.
"""

from remote_doubles.cogvlm import cogvlm
from remote_doubles.internvl_chat import internvl_chat
from remote_doubles.qwen_vl import qwen_vl

__all__ = ["cogvlm", "internvl_chat", "qwen_vl"]
